r"""Tests the tests: makes careless changes, one at a time, and runs the tests on each, or, with
`python .ci/careless.py WORD`, on those with WORD in what happened.

"===" names the file that is changed, "-" what it has in one place, "#" what happened, "+" what is
there instead. Tests with a word after "##" in their name run first.
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
## advantages_are, missing, floor_of, gradient, last_visit
- rewards.nanmean(dim=1, keepdim=True)
# the batch's mean instead of the group's
+ rewards.nanmean()
- rewards.std(dim=1, keepdim=True)
# std with the divisor n
+ rewards.std(dim=1, keepdim=True, correction=0)
- (rewards - mean).round(decimals=9)
# groups of equal rewards have advantages by rounding
+ rewards - mean
- rewards.where(~missing, mean)
# a missing reward counts as 0
+ rewards.nan_to_num(0.0)
- * ((rewards.shape[1] - 1) / freedom).sqrt()
# a missing reward, replaced by the mean, shrinks the std of the others
+ * freedom / freedom
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
# weights scaled to a mean of 1 (self-normalised importance sampling)
+ scatter(0, kept, len(pi) / pi[kept] / (1 / pi[kept]).sum())
# weights at the places of the shuffled items
+ scatter(0, (hits[:-1] < hits[1:]).nonzero()[:, 0], 1 / pi[kept])
- kept = order[hits[:-1] < hits[1:]]
# each item has a coin of its own
+ kept = (torch.rand(len(pi), generator=generator) < pi).nonzero()[:, 0]
# drawn without replacement in proportion to pi, as by numpy.random.choice
+ kept = pi.multinomial(int(pi.sum().round()), generator=generator)
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
- (logits[:, -1].float() / temperature)
# sampled at temperature 1
+ (logits[:, -1].float())
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

## packing, follows, KL, filled, moves_nothing, updates_below, tells_how_much
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
- kl = log_ratio.exp() * (log_x.exp() - 1 - log_x)
# KL without the ratio, so that a first update follows the reverse KL
+ kl = log_x.exp() - 1 - log_x
- [(row[0][0], 0, -1)]
# slots filled with token 0, whatever its embedding is
+ [(0, 0, -1)]
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
- mean_length or lengths.mean()}
# dapo divides by this step's mean length, which depends on the draw
+ lengths.mean()}
- w_q @ lengths.mean(dim=1) / w_q.sum()
# the mean length of survivors taken for the window's
+ lengths.mean()
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
# random numbers go on from step to step, and so differ when a run goes on
+ (lambda _: None)((1_000_003
- parameter.copy_(master)
# masters rounded to bfloat16
+ master.copy_(parameter.copy_(master))
- optimizer.load_state_dict(saved["optimizer"])
# Adam begins anew when a run goes on
+ pass
- rule.memory |= saved["memory"]
# memory is lost when a run goes on
+ pass
- master.copy_(value)
# masters restored from bfloat16
+ master.copy_(value.to(parameter.dtype))
- records = restore(out, task, rule, optimizer)
# when a run goes on, the reference is the trained model
+ records = restore(out, task, rule, optimizer)
+         task.reference = copy.deepcopy(task.model)
- self.updates += 1
# a step is saved between its updates
+ pass
- rule.memory = memory
# a step that was stopped stays in memory
+ pass
- if records[-1]["step"] > 0 and updates == optimizer.updates:
# an interrupted run is not saved
+ if is_over:
- write_whole(out / "checkpoint.pt", lambda file: torch.save(saved, file))
# a disk that fills up leaves half a checkpoint
+ torch.save(saved, out / "checkpoint.pt")
- lines = log.read_text().splitlines() if log.exists() else []
# records are lost when a run goes on
+ lines = []
- .nanmean(dim=1)
# a group without rewards counts as 0 in means
+ .nan_to_num(0.0).mean(dim=1)

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
