r"""Tests the tests: makes careless changes, one at a time, and runs the tests on each.

    python .ci/careless.py [WORD]    all changes, or those with WORD in what happened

They are mistakes that a researcher may make in the paper's algorithm, in our rule, or in what runs
them. After "===" is the file that is changed. After "-" is what it has, in one place; after "#"
what happened; and after "+" what is there instead. Of the file's tests, those with one of the words
after "##" in their name run first, then all others but the slow one.
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
=== dppo.py
## advantages_are, reward_teaches, floor_of, gradient, last_visit
- rewards - rewards.mean(dim=1, keepdim=True)
# the batch's mean instead of the group's
+ rewards - rewards.mean()
- rewards.std(dim=1, keepdim=True)
# std with the divisor n
+ rewards.std(dim=1, keepdim=True, correction=0)
- A.round(decimals=9)
# groups of equal rewards have advantages by rounding
+ A
- torch.where(rewards.isnan(), means, rewards)
# a missing reward counts as 0
+ rewards.nan_to_num(0.0)
- low = scores < scores
# high scores pruned instead of low ones
+ low = scores > scores
- k = int(low.sum())
# a share of all is pruned, not of the low ones
+ k = low.numel()
- masked_fill(low, (k - pruned) / max(1, k))
# the lowest pruned for certain
+ index_fill(0, scores.argsort()[:pruned], 0.0)
- return (advantages != 0) | (beta > 0)
# completions with A = 0 pruned in spite of KL
+ return advantages != 0
- scores = torch.where(needed, advantages.abs(), math.nan)
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

## four_gradients, draw_keeps, exceed, six_ways, real_draws, theorem
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
- return len(window), window[kept]
# prompts looked at until enough have survived
+ return int(kept.nonzero().max()) + 1, window[kept]
# N is the number of survivors
+ return int(kept.sum()), window[kept]
- upcoming[pi[upcoming].cumsum(0) <= limit + 1e-9]
# the window as large as the batch
+ upcoming[:limit]

## samples_have, what_is_sampled, only_models
- .logits[:, -1].float() / temperature
# sampled at temperature 1
+ .logits[:, -1].float()
- positions = (mask.cumsum(dim=1) - 1)
# padding counted in positions
+ positions = (torch.ones_like(mask).cumsum(dim=1) - 1)
- log_p.exp().multinomial(1)
# only the 50 likeliest tokens sampled, as is the default elsewhere
+ log_p.where(log_p >= log_p.topk(min(50, len(log_p[0])))[0][:, -1:], -99).exp().multinomial(1)
- if len(live) < len(rows):
# completions go on after their end
+ if False:
- row[row >= 0].tolist()
# the end left out, so never trained
+ [n for n in row.tolist() if n not in (-1, *task.end_ids)]
- Sequence(prompts[i // samples]
# completions of other prompts (repeat for repeat_interleave)
+ Sequence(prompts[i % len(prompts)]

## packing, follows, moves_nothing, updates_below, tells_how_much
- zip(prompt + completion, count(), owners)
# positions do not restart
+ zip(prompt + completion, count(len(row)), owners)
- [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
# the mask late by one
+ [-1] * len(prompt) + [i] * len(completion)
# tokens belong to the first sequence of their slot
+ [-1] * (len(prompt) - 1) + [slot[0]] * len(completion) + [-1]
- head(hidden).float().div_(temperature)
# temperature forgotten in training
+ head(hidden).float()
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
- torch.cat([old[i] for i in batch])
# the old policy's tokens in another order than the new one's
+ torch.cat([old[i] for i in sorted(batch)])
- loss = share[owner] @ losses
# divided by the number of completions in a micro-batch
+ loss = share[owner] @ losses / len(batch)
- losses, more = token_losses(
# advantages centred again after pruning
+ A = A - A[kept].mean()
+         losses, more = token_losses(
- if 0 < grad_norm < math.inf:
# Adam's momentum moves the model without a gradient
+ if grad_norm < math.inf:
# a gradient that is not finite moves the model
+ if grad_norm != 0:

## and_shares, remembers, later_updates, biased_rule, reward_gets
- return w_q[:, None] * w_qi
# the prompts' weights forgotten
+ return w_qi
# the completions' weights forgotten
+ return w_q[:, None] * (w_qi > 0)
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
- scale_by_std=config.objective != "dr_grpo")
# dr_grpo scaled by std
+ scale_by_std=True)
- mean_length or lengths.mean())
# dapo divides by this step's mean length, which depends on the draw
+ lengths.mean())
- (w_q @ lengths.mean(dim=1) / w_q.sum()).item()
# the mean length of survivors taken for the window's
+ lengths.mean().item()
- if self.unbiased:
# a biased rule keeps its weights
+ if True:

## later_updates, random_numbers_of_their_own, history_in_two_parts, goes_on, leaves, log_tells
- copy.deepcopy(task.model) if config.beta > 0
# the reference is the model that is trained
+ task.model if config.beta > 0
- seen += step.N
# pruned prompts do not count as seen
+ seen += len(step.prompts)
- transformers.set_seed((1_000_003
# random numbers go on from step to step, and so differ after --resume
+ (lambda _: None)((1_000_003
- parameter.copy_(master)
# masters rounded to bfloat16
+ master.copy_(parameter.copy_(master))
- optimizer.load_state_dict(saved["optimizer"])
# Adam begins anew after --resume
+ pass
- self.rule.memory |= saved["memory"]
# memory is lost with --resume
+ pass
- master.copy_(value)
# masters restored from bfloat16
+ master.copy_(value.to(parameter.dtype))
- self.restore(Path(config.resume or config.history) / "checkpoint.pt")
# after --resume, the reference is the trained model
+ self.restore(Path(config.resume or config.history) / "checkpoint.pt")
+             task.reference = copy.deepcopy(task.model)
- optimizer.is_amid_step = True
# a step is saved between its updates
+ optimizer.is_amid_step = False
- if run.records[-1]["step"] > 0 and not run.optimizer.is_amid_step:
# an interrupted run is not saved
+ if done >= total:
- save_whole(saved, self.out / "checkpoint.pt")
# a disk that fills up leaves half a checkpoint
+ torch.save(saved, self.out / "checkpoint.pt")

=== extras/proportional.py
## line_of_completions, noise_of, that_rate, worth_little, all_equal
- (1 - rate * (1 - height))
# a line without its floor 1 - r
+ (height)
- scores = advantages.abs() * prompt_weights[:, None]
# a completion's score without its prompt's weight
+ scores = advantages.abs()
- scores = self.expected_squares().sqrt()
# prompts scored by A^2, not its root
+ scores = self.expected_squares()
- (pi.mean() * (squares / pi).mean())
# worth without the mean of pi
+ (squares / pi).mean()
- memory, bins = self.memory, self.bin_of_prompts()
# bins by the rewards that they learn from
+ memory, bins = self.memory, self.bin_of_prompts()
+         bins[prompts] = (rewards.mean(dim=1) * 16).long()  #
- if bins[q] >= 0:
# first visits teach a bin
+ if True:
- memory["squares"][bins[q]] += A.square().mean()
# bins learned with weights
+ memory["squares"][bins[q]] += A.square().mean() / self.prompt_probabilities()[q]
- guess = guess * self.range_of_rewards()[1] ** 2 / 4
# the guess is not in units of the rewards, which A^2 has
+ guess = guess / 4
- ((total - lowest * count) / width)
# rewards taken for successes
+ total
"""


class Change(NamedTuple):
    file: str
    what: str
    words: list  # of tests to run first
    old: str
    new: list  # of lines


def parsed(text):
    """-> the changes."""
    changes = []
    for line in filter(None, text.splitlines()):
        sign, rest = line.split(" ", 1)
        if sign == "===":
            file = rest
        elif sign == "##":
            words = rest.split(", ")
        elif sign == "-":
            old = rest
        elif sign == "#":
            changes.append(Change(file, rest, words, old, []))
        else:
            changes[-1].new.append(rest)
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
    file = Path(change.file)
    source = (ROOT / file).read_text().replace(change.old, "\n".join(change.new))
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(told), redirect_stderr(told):
        os.chdir(folder)
        shutil.copytree(ROOT / "extras", "extras")
        for name in ("dppo.py", "test_dppo.py"):
            shutil.copy(ROOT / name, name)
        file.write_text(source)
        options = ["-x", "-k", "not slow", "--assert=plain", "--basetemp=temporary"]
        options += ["-p", "no:cacheprovider", str(file.with_name(f"test_{file.name}"))]
        pytest.main(options, plugins=[watcher])
    return watcher.failure


def main():
    changes = [change for change in parsed(CHANGES) if " ".join(sys.argv[1:]) in change.what]
    files = sorted({change.file for change in changes})
    for change in changes:
        times = (ROOT / change.file).read_text().count(change.old)
        if times != 1:
            sys.exit(f'{change.what}: {change.file} has {times} times "{change.old}"')
    for library in LIBRARIES:  # which each change's process then finds imported
        importlib.import_module(library)
    nothing = [Change(file, "nothing", [], "", [""]) for file in files]
    survivors = []
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        failures = pool.imap(first_failure, [*nothing, *changes])
        if failure := "".join(next(failures) for _ in files):
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
