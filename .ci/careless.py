r"""Tests the tests: makes careless changes in dppo.py, one at a time, and runs the tests on each.

    python .ci/careless.py [WORD]    all changes, or those with WORD in what happened

They are mistakes that a researcher may make in the paper's algorithm or in our rule. After "-" is
what dppo.py has, in one place; after "#" what happened; and after "+" what is there instead. Tests
with one of the words after "##" in their name run first, then all others but the slow one.
"""

import importlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("datasets", "tokenizers", "torch._dynamo", "transformers.models.qwen3.modeling_qwen3")
CHANGES = r"""
## advantages_are
- rewards - rewards.nanmean(dim=1, keepdim=True)
# the batch's mean instead of the group's
+ rewards - rewards.nanmean()
- / (n - 1).clamp(min=1)
# std with the divisor n
+ / n
- rewards = rewards.double()
# a missing reward counts as 0
+ rewards = rewards.double().nan_to_num(0.0)
- A.masked_fill(missing | equal, 0.0)
# groups of equal rewards have advantages by rounding
+ A.masked_fill(missing, 0.0)

## floor_of, gradient, last_visit
- low = scores < scores
# high scores pruned instead of low ones
+ low = scores > scores
- masked_fill(low, (k - pruned) / max(1, k))
# the lowest pruned for certain
+ index_fill(0, scores.argsort()[:pruned], 0.0)
- return (advantages != 0) | (beta > 0)
# completions with A = 0 pruned in spite of KL
+ return advantages != 0
- scores = torch.where(needed, advantages.abs(), math.nan)
# completions scored by A, not |A|
+ scores = torch.where(needed, advantages.relu(), math.nan)
# completions without a gradient lower the mean
+ scores = advantages.abs()
- remembers = {"score": math.nan}
# prompts are low before their first visit
+ remembers = {"score": 0.0}
- self.memory["score"][q] = A.abs().mean()
# a prompt's score is |mean A|, which is 0
+ self.memory["score"][q] = A.mean().abs()
# scores remembered at the place in the batch
+ self.memory["score"][: len(prompts)] = advantages.abs().mean(dim=1)

## four_gradients, draw_keeps, exceed, six_ways, real_draws
- scatter(0, kept, 1 / pi[kept])
# weights forgotten
+ scatter(0, kept, 1)
# 1/pi clipped
+ scatter(0, kept, (1 / pi[kept]).clamp(max=2))
# 1/P instead of 1/pi
+ scatter(0, kept, 1 / (1 - pi[kept]))
# weights scaled to a mean of 1 (self-normalised importance sampling)
+ scatter(0, kept, len(pi) / pi[kept] / (1 / pi[kept]).sum())
# weights at the places of the shuffled items
+ scatter(0, (teeth[:-1] < teeth[1:]).nonzero()[:, 0], 1 / pi[kept])
- kept = order[teeth[:-1] < teeth[1:]]
# each item has a coin of its own
+ kept = (torch.rand(len(pi), generator=generator) < pi).nonzero()[:, 0]
# drawn without replacement in proportion to pi, as by numpy.random.choice
+ kept = pi.multinomial(int(pi.sum().round()), generator=generator)
# the likeliest kept for certain
+ kept = pi.topk(int(pi.sum().round()))[1]
- order = torch.randperm(len(pi), generator=generator)
# items lie in their own order, so neighbours exclude each other
+ order = torch.arange(len(pi))
- u = torch.rand(1, generator=generator, dtype=torch.float64)
# drawn with the random numbers of rollouts
+ u = torch.rand(1, dtype=torch.float64)
- draw(pi.flatten(), generator).view_as(pi)
# weights of other completions
+ draw(pi.T.flatten(), generator).view_as(pi)
- return len(window), window[kept]
# prompts looked at until enough have survived
+ return int(kept.nonzero().max()) + 1, window[kept]
# N is the number of survivors
+ return int(kept.sum()), window[kept]
- window = window_of(pi, upcoming, limit)
# the window as large as the batch
+ window = upcoming[:limit]
- w_q = draw(pi, generator)
# drawn with one pi, weighted by another
+ w_q = (draw(pi, generator) > 0) / rule.prompt_probabilities().double()[window]

## samples_have, what_is_sampled, only_models
- .logits[:, -1].float() / temperature
# sampled at temperature 1
+ .logits[:, -1].float()
- positions = (mask.cumsum(dim=1) - 1)
# padding counted in positions
+ positions = (torch.ones_like(mask).cumsum(dim=1) - 1)
- if len(live) < len(rows):
# completions go on after their end
+ if False:
- row[row >= 0].tolist()))
# the end left out, so never trained
+ [n for n in row.tolist() if n not in (-1, *task.end_ids)]))
- Sequence(prompts[i // samples]
# completions of other prompts (repeat for repeat_interleave)
+ Sequence(prompts[i % len(prompts)]

## packing, micro_batch, follows
- zip(prompt + completion, count(), owners)
# positions do not restart
+ zip(prompt + completion, count(len(row)), owners)
- [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
# the mask late by one
+ [-1] * len(prompt) + [i] * len(completion)
# prompts trained, too
+ [i] * (len(prompt) + len(completion) - 1) + [-1]
# tokens belong to the first sequence of their slot
+ [-1] * (len(prompt) - 1) + [slot[0]] * len(completion) + [-1]
- head(hidden).float().div_(temperature)
# temperature forgotten in training
+ head(hidden).float()

## follows, moves_nothing, updates_below
- torch.min(rho * A, clipped)
# the larger of clipped and unclipped
+ torch.max(rho * A, clipped)
# clipped also where that hides a bad update
+ clipped
- log_ratio, "mean", include_self
# gspo's ratio is a product of all tokens', not their mean
+ log_ratio, "sum", include_self
- log_x = ref_logprobs - logprobs
# KL the wrong way round
+ log_x = logprobs - ref_logprobs
# KL has no gradient
+ log_x = ref_logprobs - logprobs.detach()
- kl = log_x.exp() - 1 - log_x
# KL by log p/p_ref, whose gradient has the mean 0
+ kl = -log_x
- config.beta * kl - surrogate
# the loss has the wrong sign
+ config.beta * kl + surrogate
- return lengths
# grpo divides by the mean length
+ return torch.full_like(lengths, lengths.mean())
- loss = share[owner] @ losses
# divided by the number of completions in a micro-batch
+ loss = share[owner] @ losses / len(batch)
- losses, more = token_losses(
# advantages centred again after pruning
+ A = A - A[kept].mean()
+         losses, more = token_losses(
- model.zero_grad()
-     tokens
# gradients of earlier updates added
+ tokens
- if 0 < grad_norm < math.inf:
# Adam's momentum moves the model without a gradient
+ if grad_norm < math.inf:

## and_shares, remembers, later_updates, biased_rule, reward_gets
- return w_q[:, None] * w_qi
# the prompts' weights forgotten
+ return w_qi
# the completions' weights forgotten
+ return w_q[:, None] * (w_qi > 0)
- weights.append(rule.weights(w_q, w_qi, N))
# the prompts' weights by pi from the same rollout
+ rule.remember(prompts, rewards, A)
+         weights.append(w_qi / rule.prompt_probabilities()[prompts, None])
- w / (N * G * Z)
# B instead of N
+ w / (len(prompts) * G * Z)
# divided by the number of completions that are kept
+ w / (w.count_nonzero() * Z)
# Z forgotten
+ w / (N * G)
- for number, w in enumerate(weights):
# one draw of completions for all updates
+ for number, w in enumerate(weights[:1] * len(weights)):
# the old policy is that before each update, so nothing is clipped
+ for number, w in enumerate(weights):
+         old = frozen_logprobs(task.model, sequences, trained, config)
- for q in prompts.tolist()]
# the first prompts of the window rolled out, not the survivors
+ for q in upcoming[: len(prompts)].tolist()]
- examples[i // G] | {
# graded by the answers of other prompts
+ examples[i % len(examples)] | {
- scale_by_std=config.objective != "dr_grpo")  # (B, G)
# dr_grpo scaled by std
+ scale_by_std=True)
- mean_length or lengths.mean())
# dapo divides by this step's mean length, which depends on the draw
+ lengths.mean())
- (w_q @ lengths.mean(dim=1) / w_q.sum()).item()
# the mean length of survivors taken for the window's
+ lengths.mean().item()
- copy.deepcopy(task.model) if config.beta > 0
# the reference is the model that is trained
+ task.model if config.beta > 0
- rule.remember(prompts.clone(), rewards
# remembered for the first prompts of the window, not the survivors
+ rule.remember(upcoming[: len(prompts)], rewards
- if self.unbiased:
# a biased rule keeps its weights
+ if True:
- kept * N * kept.shape[1] / kept.sum().clamp(min=1)
# a biased rule divides by the candidates, not by what it keeps
+ kept

## line_of_completions, many_unpruned, that_rate, worth_little
- (1 - rate * (1 - height))
# a line without its floor 1 - r
+ (height)
- scores = advantages.abs() * prompt_weights[:, None]
# a completion's score without its prompt's weight
+ scores = advantages.abs()
- top = scores[needed].mean()
# completions without a gradient lower the line's end
+ top = scores.mean()
- scores = self.expected_squares().sqrt()
# prompts scored by A^2, not its root
+ scores = self.expected_squares()
- (pi.mean() * (squares / pi).mean())
# worth without the mean of pi
+ (squares / pi).mean()

## that_rate, worth_little, all_equal, far_from
- memory, bins = self.memory, self.bin_of_prompts()
# bins by the rewards that they learn from
+ memory, bins = self.memory, self.bin_of_prompts()
+         bins[prompts] = (rewards.nanmean(dim=1).nan_to_num(0.0) * 16).long()  #
- if bins[q] >= 0:
# first visits teach a bin
+ if True:
- memory["squares"][bins[q]] += A.square().mean()
# bins learned with weights
+ memory["squares"][bins[q]] += A.square().mean() / self.prompt_probabilities()[q]
- self.decay * memory["count"][q]
# rewards decay, visits do not
+ memory["count"][q]
- for outer in (0.01, 0.0):
# a single reward far from all others sets the range
+ for outer in (0.0,):
- guess = guess * self.range_of_rewards()[1] ** 2 / 4
# the guess is not in units of the rewards, which A^2 has
+ guess = guess / 4
"""


class Change(NamedTuple):
    what: str
    words: list  # of tests to run first
    old: list  # lines
    new: list


def parsed(text):
    """-> the changes."""
    changes, old, last = [], [], None
    for line in filter(None, text.splitlines()):
        sign, rest = line.split(" ", 1)
        if sign == "##":
            words = rest.split(", ")
        elif sign == "-":
            old = [*old, rest] if last == "-" else [rest]
        elif sign == "#":
            changes.append(Change(rest, words, old, []))
        else:
            changes[-1].new.append(rest)
        last = sign
    return changes


class Watcher:
    """Runs some tests before others, and notes the first that fails."""

    failure = ""

    def __init__(self, words):
        self.words = words

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: [word not in item.name for word in self.words])

    def pytest_exception_interact(self, node, call):
        self.failure = self.failure or f"{call.excinfo.typename}: {node.name}"


def first_failure(change):
    """Error and name of the first test that fails with a change, "" if none does."""
    watcher = Watcher(change.words)
    source = (ROOT / "dppo.py").read_text()
    source = source.replace("\n".join(change.old), "\n".join(change.new))
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(told), redirect_stderr(told):
        Path(folder, "dppo.py").write_text(source)
        shutil.copy(ROOT / "test_dppo.py", folder)
        os.chdir(folder)
        sys.path.insert(0, folder)
        options = ["-x", "-k", "not slow", "--assert=plain", "--basetemp=temporary"]
        pytest.main([*options, "-p", "no:cacheprovider"], plugins=[watcher])
        os.chdir(ROOT)
    return watcher.failure


def main():
    word = " ".join(sys.argv[1:])
    changes = [change for change in parsed(CHANGES) if word in change.what]
    source = (ROOT / "dppo.py").read_text()
    wrong = []
    for change in changes:
        times = source.count("\n".join(change.old))
        if times != 1:
            wrong.append(f"{change.what}: dppo.py has {times} times {change.old}")
    if wrong:
        sys.exit("\n".join(wrong))
    for library in LIBRARIES:  # which each change's process then finds imported
        importlib.import_module(library)
    survivors = []
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        failures = pool.imap(first_failure, [Change("nothing", [], [""], [""]), *changes])
        if failure := next(failures):
            sys.exit(f"without any change, there is {failure}")
        for change, failure in zip(changes, failures):
            print(f"{change.what:66} {failure or 'NOT CAUGHT':.99}", flush=True)
            # A change that cannot run is not what it says.
            if not failure or failure.startswith(("NameError", "UnboundLocal", "CollectError")):
                survivors.append(change.what)
    print(f"{len(changes) - len(survivors)} of {len(changes)} careless changes are caught")
    if survivors:
        sys.exit(f"not caught, or not as they should be: {'; '.join(survivors)}")


if __name__ == "__main__":
    main()
