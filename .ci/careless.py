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
- mean = rewards.nanmean(dim=1, keepdim=True)
# the batch's mean instead of the group's
+ mean = rewards.nanmean().expand(len(rewards), 1)
# a missing reward counts as 0
+ rewards = rewards.nan_to_num(0.0)
+     mean = rewards.mean(dim=1, keepdim=True)
- freedom = (~centred.isnan()).sum(dim=1, keepdim=True) - 1
# std with the divisor n
+ freedom = (~centred.isnan()).sum(dim=1, keepdim=True)
# missing rewards count in the divisor of the std
+ freedom = rewards.shape[1] - 1
- rewards.isclose(mean, rtol=1e-6, atol=1e-6)
# groups of equal rewards have advantages by rounding in float64
+ rewards == mean
# groups of equal rewards have advantages by rounding in float32
+ rewards.isclose(mean, rtol=1e-12, atol=1e-9)
# rewards that differ slightly have no advantages
+ rewards.isclose(mean, rtol=1e-4, atol=1e-4)
- k = int(low.sum())
# a share of all is pruned, not of the low ones
+ k = low.numel()
- masked_fill(low, (k - pruned) / max(1, k))
# the lowest are always pruned
+ index_fill(0, scores.argsort()[:pruned], 0.0)
- return (advantages != 0) | (beta > 0)
# completions with A = 0 pruned in spite of KL
+ return advantages != 0
- scores = torch.where(needed, rollout.A.abs(), math.nan)
# completions without a gradient lower the mean
+ scores = rollout.A.abs()
- remembers = {"score": math.nan}
# prompts are low before their first visit
+ remembers = {"score": 0.0}
- self.memory["score"][q] = A[graded].abs().mean()
# a prompt's score is |mean A|, which is 0
+ self.memory["score"][q] = A[graded].mean().abs()
# missing rewards count as A = 0 in a prompt's score
+ self.memory["score"][q] = A.abs().mean()
# scores remembered at the place in the batch
+ self.memory["score"][: len(rollout.A)] = rollout.A.abs().mean(dim=1)
- if graded.sum() > 1:
# a group with one reward is a visit that taught nothing
+ if graded.any():

## four_gradients, draw_keeps, exceed, five_shortcuts, sampled_weights, full_gradient
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
- require(valid and pi[needed].all(), f
# a pi of 0 is accepted where there is a gradient
+ require(valid, f
- self.limit_of_step(upcoming.clone())
# a rule that works in place changes the upcoming prompts
+ self.limit_of_step(upcoming)
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
- completion = tokens[i, :length].tolist()
# the end left out, so never trained
+ completion = [n for n in tokens[i, :length].tolist() if n not in task.end_ids]
- logprobs[i, :length].clone()
# log-probabilities that autograd refuses
+ logprobs[i, :length]
# log-probabilities of another row
+ logprobs[0, :length].clone()
- Sequence(prompts[i // samples]
# completions of other prompts (repeat for repeat_interleave)
+ Sequence(prompts[i % len(prompts)]
- is_equal = off <= (1e-3
# a model that samples otherwise than it trains is accepted
+ is_equal = off <= (1e3
- can_pack = "Linear" not in
# linear attention is packed
+ can_pack = "nothing" not in

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
- torch.min(unclipped, clipped)
# the larger of clipped and unclipped
+ torch.max(unclipped, clipped)
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
- sums += torch.stack([*reported, (old_logprobs - sampled).abs()]).sum(dim=1)
# metrics of the last micro-batch only
+ sums = torch.stack([*reported, (old_logprobs - sampled).abs()]).sum(dim=1)
# the distance of the new policy from the sampled one
+ sums += torch.stack([*reported, (logprobs.detach() - sampled).abs()]).sum(dim=1)
- if 0 < grad_norm < math.inf:
# Adam's momentum moves the model without a gradient
+ if grad_norm < math.inf:
# a gradient that is not finite moves the model
+ if grad_norm != 0:
- torch._foreach_copy_(self.parameters, self.masters)
# masters rounded to bfloat16
+ torch._foreach_copy_(self.parameters, self.masters)
+         torch._foreach_copy_(self.masters, self.parameters)

## and_shares, remembers, later_updates, full_gradient
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
- for epoch, w in enumerate(weights):
# one draw of completions for all updates
+ for epoch, w in enumerate(weights[:1] * len(weights)):
# the old policy is that before each update, so nothing is clipped
+ for epoch, w in enumerate(weights):
+         old = frozen_logprobs(task.model, sequences, indices, config)
- scale_by_std=config.objective != "dr_grpo")
# dr_grpo scaled by std
+ scale_by_std=True)
- "dapo": mean_length}
# dapo divides by this step's mean length, which depends on the draw
+ "dapo": lengths.mean()}
- mean_length = window_mean(lengths, w_q)
# the mean length of survivors taken for the window's
+ mean_length = lengths.mean().item()
- rule.prune_completions(copied(rollout), generator)
# a rule that works in place changes the advantages
+ rule.prune_completions(rollout, generator)
- {id(rollout.sequences): list(rollout.sequences)}
# a rule that works in place changes the list of sequences
+ {id(rollout.sequences): rollout.sequences}

## rejects, override, can_mend, other_error, a_module
- least <= value < below
# NaN is accepted
+ not (value < least or value >= below)
- **({} if needy else SORTING_DEFAULTS) | rule_class.defaults | given
# a rule's defaults are not used
+ **({} if needy else SORTING_DEFAULTS) | given
# a rule's defaults win over what is given
+ **({} if needy else SORTING_DEFAULTS) | given | rule_class.defaults
# the sorting task's defaults win over a rule's
+ **rule_class.defaults | ({} if needy else SORTING_DEFAULTS) | given
- needy = OF_A_MODEL & given.keys()
# a setting of a model is ignored without a model
+ needy = {"model"} & given.keys()
- require(not {"steps", "epochs"} <= given.keys(),
# --steps is ignored beside --epochs
+ require(True,
- pydoc.locate(name.replace(":", ".")) if ":" in name else None
# an unknown name is taken for a module
+ pydoc.locate(name)
- except Refused as error:
# nobody learns where an error is
+ except Exception as error:
- sys.path.insert(0, "")
# the clone's mine.py wins over the current folder's
+ sys.path.append("")

## later_updates, random_numbers, history_and_epochs, that_fails, end_of_a_process, cannot_be_saved
- copy.deepcopy(task.model) if config.beta > 0
# the reference is the model that is trained
+ task.model if config.beta > 0
- {"candidates_so_far": candidates + N,
# pruned prompts do not count as candidates
+ {"candidates_so_far": candidates + len(rollout.prompts),
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
- is_time = is_over or record["step"] % (rule.config.save_every or math.inf) == 0
# nothing is saved before the end
+ is_time = is_over
# a stopped run is not saved
+ is_time = done >= goal or record["step"] % (rule.config.save_every or math.inf) == 0
- torch.save(values, unfinished)
# a process that is killed while it saves leaves half a checkpoint
+ torch.save(values, path)
+     unfinished.touch()
- require(all(map(torch.is_tensor, rule.memory.values()))
# a checkpoint that cannot be read is saved
+ require(True
- signal.signal(signal_number, signal.SIG_DFL)
# a second Ctrl-C is only noted, too
+ pass
- tell(b"stopping after
# a handler prints
+ print(b"stopping after
- except OSError:  # the pipe
# a run ends if nobody reads
+ except ZeroDivisionError:  # the pipe
- transformers.logging.disable_progress_bar()
# a library's bar ends a run if nobody reads
+ pass
- signal.signal(signal.SIGHUP, stop)
# a closed terminal ends a run
+ pass
- sys.exit(128 + stopped[0] if stopped else 0)
# the exit status hides a signal
+ sys.exit(0)

## refused_by_name, two_processes, record_fields, tells_its
- "model", "reward", "seed")
# another seed resumes a run
+ "model", "reward")
- changes(out, settings, SAME_RUN)
# another model resumes a run
+ changes(out, settings, SAME_MEMORY)
- changes(config.history, settings, SAME_MEMORY)
# memory is taken from a run with another objective
+ changes(config.history, settings, ())
- require(not (is_new and out.exists())
# two processes share a new folder
+ is_new = not out.exists()
+     require(True
- .view(len(w_q), -1).nanmean(dim=1)
# missing rewards count as 0 in means
+ .view(len(w_q), -1).nan_to_num(0.0).mean(dim=1)
- (~rewards.isnan()).sum(dim=1) < 2
# missing rewards count in zero_variance_fraction
+ A.isnan().all(dim=1)
- record["logprob_difference"] = updates[0]["logprob_difference"]
# later updates count in logprob_difference
+ pass

## counted, parquet, json, evaluates, shape_of, a_number, reasoning, templates
- seen = {tuple(example["prompt_ids"]) for example in evaluated}
# evaluated prompts are trained
+ seen = set()
- require(can_grade(answer)
# prompts whose answers cannot be graded are trained
+ require(True
- require(not needs_answer or answer is not None
# a column that is named and absent is not noticed
+ require(True
- require(not any(token in "\n".join(texts) for token in controls)
# prompts become control tokens
+ require(True
- require(not extra
# a misspelt variable of the template is ignored
+ require(True
- require(message["content"].strip() in text
# a prompt that the template drops is trained
+ require(True
- {*map(type, texts)} == {str}
# contents that are no texts are trained
+ len(texts) > 0
- os.register_at_fork(after_in_child
# what a reward has forked cannot be terminated
+ os.register_at_fork(after_in_parent
- errors="backslashreplace"
# what stdout cannot encode ends a run
+ errors="strict"
- return list(csv.DictReader(Path(spec).open(encoding="utf-8-sig"), restkey="more"))
# numbers of a csv file lose their zeros
+ return datasets.load_dataset("csv", data_files=spec, split="train")
- line {error.lineno}
# a broken line is told by another number
+ line {error.lineno - 1}
- isinstance(x, dict) else None
# a field of a text is not None
+ isinstance(x, dict) else x
- mistral_format=False
# a tokenizer without a chat template, where mistral-common is installed
+ mistral_format=None
- random.Random(0).shuffle(examples)
# other prompts are held out with another seed
+ random.Random(config.seed).shuffle(examples)
- copy.deepcopy(examples[i // G] | {"completion_ids": ids})
# a reward changes the data
+ examples[i // G] | {"completion_ids": ids}
- [^\w.#-]*({NUMBER})
# a heading with a number is taken for the answer
+ .*?({NUMBER})
- return "" if "<think>" in text else text.strip()
# unfinished reasoning is graded
+ return text.strip()

=== extras/proportional.py
## line_of_completions, noise_of, bins, missing
- (1 - rate * (1 - height))
# a line without its floor 1 - r
+ (height)
- scores = rollout.A.abs() * rollout.w_q[:, None]
# a completion's score without its prompt's weight
+ scores = rollout.A.abs()
- scores = self.expected_squares().sqrt()
# prompts scored by A^2, not its root
+ scores = self.expected_squares()
- (pi.mean() * (squares / pi).mean())
# worth without the mean of pi
+ (squares / pi).mean()
- memory, bins = self.memory, self.bin_of_prompts()
# bins by the rewards that they learn from
+ memory, bins = self.memory, self.bin_of_prompts()
+         bins[rollout.prompts] = (rollout.rewards.mean(dim=1) * 16).nan_to_num(0.0).long()  #
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
- return kept * G / k * dppo.has_gradient(A, self.config.beta)
# CPPO's mean leaves out kept completions with A = 0
+ kept = kept * dppo.has_gradient(A, self.config.beta)
+         return kept * kept.numel() / kept.sum().clamp(min=1)
- kind = kind * ~teaches  # 0 if the group teaches
# a group that teaches ends no streak in GRESO
+ kind = kind * 1
- weights = without_the_lowest(self.memory["score"], self.config.prompt_prune_rate)
# Literal draws prompts as DPPO does
+ weights = 1 / dppo.keep_probabilities(self.memory["score"], self.config.prompt_prune_rate)
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
    # A test has a pool of its own, which a daemonic process may not have.
    multiprocessing.current_process()._config["daemon"] = False
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(240)
    watcher = Watcher(change.words)
    file = Path(change.file)
    source = (ROOT / file).read_text().replace(change.old, "\n".join(change.new))
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(told), redirect_stderr(told):
        os.chdir(folder)
        shutil.copytree(ROOT / "extras", "extras", ignore=shutil.ignore_patterns("*.json", "*.png"))
        for name in ("dppo.py", "test_dppo.py", "README.md"):
            shutil.copy(ROOT / name, name)
        file.write_text(source)
        options = ["-x", "-k", "not slow", "--assert=plain", "--basetemp=temporary"]
        tests = "test_dppo.py" if change.file == "dppo.py" else "extras/test_extras.py"
        options += ["-p", "no:cacheprovider", tests]
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
