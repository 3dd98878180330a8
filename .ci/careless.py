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
import signal
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
## advantages_are, missing, floor_of, without_a_gradient, last_visit
- rewards.double().nanmean(dim=1, keepdim=True)
# the batch's mean instead of the group's
+ rewards.double().nanmean()
- centred = rewards.double() - rewards.double().nanmean(dim=1, keepdim=True)
# a missing reward counts as 0
+ centred = rewards.double().nan_to_num(0.0)
+     centred = centred - centred.mean(dim=1, keepdim=True)
- freedom = (~centred.isnan()).sum(dim=1, keepdim=True) - 1
# std with the divisor n
+ freedom = (~centred.isnan()).sum(dim=1, keepdim=True)
# missing rewards count in the divisor of the std
+ freedom = rewards.shape[1] - 1
- centred.round(decimals=9)
# groups of equal rewards have advantages by rounding
+ centred
- k = int(low.sum())
# a share of all is pruned, not of the low ones
+ k = low.numel()
- masked_fill(low, (k - pruned) / max(1, k))
# the lowest are always pruned
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
- self.memory["score"][q] = A[graded].abs().mean()
# a prompt's score is |mean A|, which is 0
+ self.memory["score"][q] = A[graded].mean().abs()
# missing rewards count as A = 0 in a prompt's score
+ self.memory["score"][q] = A.abs().mean()
# scores remembered at the place in the batch
+ self.memory["score"][: len(prompts)] = advantages.abs().mean(dim=1)
- if graded.sum() > 1:
# a group with one reward is a visit that taught nothing
+ if graded.any():

## four_gradients, draw_keeps, exceed, six_ways, sampled_weights, full_gradient
- scatter(0, kept, 1 / pi[kept])
# weights forgotten
+ scatter(0, kept, 1)
# 1/pi clipped
+ scatter(0, kept, (1 / pi[kept]).clamp(max=2))
# weights scaled to a mean of 1 (self-normalised importance sampling)
+ scatter(0, kept, len(pi) / pi[kept] / (1 / pi[kept]).sum())
# weights at the places of the shuffled items
+ scatter(0, (points_below[:-1] < points_below[1:]).nonzero()[:, 0], 1 / pi[kept])
- kept = order[points_below[:-1] < points_below[1:]]
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
- require(fits and pi[needed].all(), f
# a pi of 0 is accepted where there is a gradient
+ require(fits, f
- return len(window), window[kept], w_q[kept]
# prompts looked at until enough have survived
+ return int(kept.nonzero().max()) + 1, window[kept], w_q[kept]
# N is the number of survivors
+ return int(kept.sum()), window[kept], w_q[kept]
- upcoming[pi[upcoming].cumsum(0) <= limit + 1e-9]
# the window as large as the batch
+ upcoming[:limit]
- draw(pi / pi.sum().clamp(max=1), generator)
# no prompt kept, if few are to come
+ draw(pi, generator)

## sampling_ignores, sampled_log, check_sampling, linear
- (logits.float() / temperature)
# sampled at temperature 1
+ (logits.float())
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
- fits = off <= (1e-3
# a model that samples otherwise than it trains is accepted
+ fits = off <= (1e3
- any("Linear" in
# linear attention is packed
+ any("nothing" in

## pack, micro_batch, follows, kl_term, padded, moves_nothing, updates_below, reports
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
- (share[owner] @ losses).backward()
# divided by the number of completions in a micro-batch
+ (share[owner] @ losses / len(batch)).backward()
- losses, reported = token_losses(
# advantages centred again after pruning
+ A = A - A[kept].mean()
+         losses, reported = token_losses(
- model.zero_grad()  # an interrupted
# gradients of an interrupted update are added
+ pass  # an interrupted
- if 0 < grad_norm < math.inf:
# Adam's momentum moves the model without a gradient
+ if grad_norm < math.inf:
# a gradient that is not finite moves the model
+ if grad_norm != 0:
- torch._foreach_copy_(self.parameters, self.masters)
# masters rounded to bfloat16
+ torch._foreach_copy_(self.parameters, self.masters)
+         torch._foreach_copy_(self.masters, self.parameters)

## and_shares, remembers, later_updates, methods_of_its_own, full_gradient
- weights.append(w_q[:, None] * w_qi)
# the prompts' weights forgotten
+ weights.append(w_qi)
# the completions' weights forgotten
+ weights.append(w_q[:, None] * (w_qi > 0))
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
- return mean_length or lengths.mean()
# dapo divides by this step's mean length, which depends on the draw
+ return lengths.mean()
- w_q @ lengths.mean(dim=1) / w_q.sum()
# the mean length of survivors taken for the window's
+ lengths.mean()
- rule.prune_completions(A.clone(), w_q.clone(), generator)
# a rule that works in place changes the advantages
+ rule.prune_completions(A, w_q, generator)
- step = rule.step(task, optimizer, upcoming, generator)
# a rule's own step is not made
+ step = dppo_step(task, rule, optimizer, upcoming, generator)

## rejects, override, one_line, own_file, mine_py
- lowest <= value < below
# NaN is accepted
+ not (value < lowest or value >= below)
- **defaults | rule_class.defaults | given
# a rule's defaults are not used
+ **defaults | given
# a rule's defaults win over what is given
+ **defaults | given | rule_class.defaults
# the sorting task's defaults win over a rule's
+ **rule_class.defaults | defaults | given
- require(not {"steps", "epochs"} <= given.keys(),
# --steps is ignored beside --epochs
+ require(True,
- pkgutil.resolve_name(name) if ":" in name else None
# an unknown name is taken for a module
+ pkgutil.resolve_name(name)
- own = [frame for frame in frames if not frame.filename.startswith(others)]
# nobody learns where the error in their file is
+ own = []
- sys.path.insert(0, "")
# the clone's mine.py wins over the current folder's
+ sys.path.append("")

## later_updates, random_numbers, history_and_epochs, uninterrupted, saved_nothing, signals, log
- copy.deepcopy(task.model) if config.beta > 0
# the reference is the model that is trained
+ task.model if config.beta > 0
- seen += step.N
# pruned prompts do not count as seen
+ seen += len(step.prompts)
- transformers.set_seed((1_000_003
# random numbers follow from all earlier steps, and so differ in a resumed run
+ (lambda _: None)((1_000_003
- optimizer.load_state_dict(saved["optimizer"])
# Adam begins anew when a run is resumed
+ pass
- rule.memory |= saved["memory"]
# memory is lost when a run is resumed
+ pass
- torch._foreach_copy_(optimizer.masters, saved["masters"])
# masters restored from bfloat16
+ torch._foreach_copy_(optimizer.parameters, saved["masters"])
+         torch._foreach_copy_(optimizer.masters, optimizer.parameters)
- records = restore(out, rule, optimizer)
# when a run is resumed, the reference is the trained model
+ records = restore(out, rule, optimizer)
+         task.reference = copy.deepcopy(task.model)
- restore(config.history, rule)[-1]["candidates_so_far"]
# a run with history repeats the draws of the earlier run
+ restore(config.history, rule)[0]["candidates_so_far"]
- self.updates += 1
# a step is saved between its updates
+ pass
- rule.memory = memory
# an interrupted step stays in memory
+ pass
- if record["step"] > 0 and record is records[-1] and optimizer.updates == updates:
# an interrupted run is not saved
+ if is_over:
- if step > 0 and step % (config.save_every or math.inf) == 0:
# nothing is saved before the end
+ if False:
- write_whole(out / "checkpoint.pt", lambda file: torch.save(saved, file))
# a process that is killed while it saves leaves half a checkpoint
+ torch.save(saved, (out / "checkpoint.pt").open("wb"))
- signal.signal(signal.SIGINT, signal.SIG_DFL)
# a second Ctrl-C is only noted, too
+ pass
- sys.exit(128 + stopped[0] if stopped else 0)
# the exit status hides a signal
+ sys.exit(0)

## refused_by_name, two_processes, groups_without, record_fields, bar
- "model", "reward", "seed")
# another seed resumes a run
+ "model", "reward")
- others = changes(out, settings, SAME)
# another model resumes a run
+ others = changes(out, settings, SAME[:4])
- others = changes(config.history, settings, SAME[:4])
# memory is taken from a run with another objective
+ others = ""
- out.mkdir(parents=True, exist_ok=not is_new)
# two processes share a new folder
+ out.mkdir(parents=True, exist_ok=True)
- .view(len(step.w_q), -1).nanmean(dim=1)
# missing rewards count as 0 in means
+ .view(len(step.w_q), -1).nan_to_num(0.0).mean(dim=1)
- equal = (~step.A.any(dim=1)).double().masked_fill(few, math.nan)
# missing rewards count in zero_variance_fraction
+ equal = (~step.A.any(dim=1)).double()
- bar.update(min(done, goal) - bar.n)
# the bar does not move
+ pass

## counted, columns, json, can_grade, evaluates, shape_of, too_few, reasoning
- "repeated": tuple(ids) in examples or ids in evaluated
# evaluated prompts are trained
+ "repeated": tuple(ids) in examples
- cannot grade": not can_grade(answer)
# prompts whose answers cannot be graded are trained
+ cannot grade": False
- is_usable = answered or (
# a column that is named and absent is not noticed
+ is_usable = examples or (
- {number + error.lineno}
# a broken line is told by another number
+ {error.lineno}
- [name] if name in row else name.split(".")
# a column with a dot in its name is not found
+ name.split(".")
- random.Random(0).shuffle(examples)
# other prompts are held out with another seed
+ random.Random(config.seed).shuffle(examples)
- copy.deepcopy(examples[i // G] | {"completion_ids": ids})
# a reward changes the data
+ examples[i // G] | {"completion_ids": ids}
- require(len(rewards) == len(sequences),
# too few rewards are noticed by torch only
+ require(True,
- return "" if "<think>" in text else text.strip()
# unfinished reasoning is graded
+ return text.strip()

=== extras/proportional.py
## line_of_completions, noise_of, bin, pi_rises, missing, expect_little, all_rewards
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
+         bins[prompts] = (rewards.mean(dim=1) * 16).nan_to_num(0.0).long()  #
- if bins[q] >= 0 and len(group) > 1:
# first visits teach a bin
+ if len(group) > 1:
# a group with one reward teaches that there is nothing to learn
+ if bins[q] >= 0:
- memory["squares"][bins[q]] += A[graded].square().mean()
# bins learned with weights
+ memory["squares"][bins[q]] += A[graded].square().mean() / self.prompt_probabilities()[q]
# missing rewards count as A = 0 in squares
+ memory["squares"][bins[q]] += A.square().mean()
- guess = guess * self.range_of_rewards()[1] ** 2 / 4
# the guess is not in units of the rewards, which A^2 has
+ guess = guess / 4
- ((total - lowest * count) / width)
# rewards taken for successes
+ total

=== extras/rivals.py
## cppo, greso, biased_rules
- return kept * G / k * dppo.has_gradient(advantages, self.config.beta)
# CPPO's mean leaves out kept completions with A = 0
+ kept = kept * dppo.has_gradient(advantages, self.config.beta)
+         return kept * kept.numel() / kept.sum().clamp(min=1)
- goes_on = (streak * kind > 0) | mean.isnan()
# a group without rewards ends a streak
+ goes_on = streak * kind > 0
- graded = kind[~mean.isnan()]
# groups without rewards count in GRESO's shares
+ graded = kind
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


def too_long(number, frame):
    raise TimeoutError("a change made a loop endless")


def first_failure(change):
    """Error and name of the first test that fails with a change, "" if none does."""
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(240)
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
