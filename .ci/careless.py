r"""Tests the tests: makes careless changes in dppo.py, one at a time, and runs the tests on each.

python .ci/careless.py [WORD]    all changes, or those with WORD in their name
"""

import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import datasets  # noqa: F401
import pytest
import tokenizers  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
# For each change, its name and the tests to try first; what dppo.py has; what takes its place.
CHANGES = r"""
# the weights dropped: expectation_one
- scatter(0, kept, 1 / pi[kept])
+ scatter(0, kept, 1)
# the prompts' weights left out: shares
- w = w_q[:, None] * prune_completions(
+ w = prune_completions(
# the prompts' weights not handed on: shares
- prune_completions(rule, A, w_q, generator)
+ prune_completions(rule, A, w_q * 0 + 1, generator)
# N left out: shares
- w / (N * G * Z)
+ w / (len(prompts) * G * Z)
# G left out: shares
- w / (N * G * Z)
+ w / (N * Z)
# Z left out: shares
- w / (N * G * Z)
+ w / (N * G)
# the weights of the first draw used for every update: shares
- for w in weights:
+ for w in weights[:1] * len(weights):
# divided by those that are kept: linear
- loss = share[owner] @ losses
+ loss = share[owner] @ losses / len(batch)
# advantages centred again: linear
- = token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config)
+ = token_losses(logprobs, old_logprobs, ref_logprobs, owner, A - A[batch].mean(), config)
# advantages of other completions: linear
- = token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config)
+ = token_losses(logprobs, old_logprobs, ref_logprobs, owner, A.roll(1), config)
# tokens that belong to other completions: linear
- owners = [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
+ owners = [-1] * (len(prompt) - 1) + [slot[0]] * len(completion) + [-1]
# dr_grpo scaled: shares
- scale_by_std=config.objective != "dr_grpo"
+ scale_by_std=True
# a completion without a reward has an advantage: advantages
- return advantages.masked_fill((lowest == highest) | ~given, 0.0)
+ return advantages.masked_fill(lowest == highest, 0.0)
# the std of all that have no reward, too: advantages
- std = (squares / (given.sum(dim=1, keepdim=True) - 1)).sqrt()
+ std = (squares / (given.shape[1] - 1)).sqrt()
# rounding makes a low set: floor_of
- scores.nanmean() * (1 - 1e-6)
+ scores.nanmean()
# the lowest pruned for certain: floor_of
- masked_fill(low, (k - pruned) / max(1, k))
+ index_fill(0, low.nonzero().squeeze(1)[:pruned], 0.0)
# zeros count in the mean of completions: gradient_go_first
- scores = advantages.abs().masked_fill(~trainable, math.nan)
+ scores = advantages.abs()
# A = 0 left out with KL, too: expectation_one
- return (advantages != 0) | (beta > 0)
+ return advantages != 0
# no floor with KL: expectation_one
- floor = self.floor if self.config.beta > 0 else 0.0
+ floor = 0.0
# the prompt's weight not in the score: scored
- scores = advantages.abs() * prompt_weights[:, None]  # (B, G)
+ scores = advantages.abs()
# a score is the sum: last_visit
- self.memory["score"][q] = A.abs().mean()
+ self.memory["score"][q] = A.abs().sum()
# the first of two visits in a window counts: last_visit
- for q, A in zip(prompts, advantages):
+ for q, A in zip(prompts.flip(0), advantages.flip(0)):
# the memory of pruned prompts lost: advantages_and_shares
- rule.remember(prompts, rewards, A)
+ rule.remember(torch.arange(len(task.train))[:len(prompts)], rewards, A)
# the window as large as the batch: window
- N = int((pi.cumsum(0) <= limit + 1e-9).sum())
+ N = limit
# unlikely prompts may leave a batch empty: exactly_one
- pi = pi / pi.sum().clamp(max=1)
+ pass
# a biased rule's losses summed: biased_rule
- w = (w > 0) * (N * G / (w > 0).sum().clamp(min=1))
+ w = (w > 0).double()
# a biased rule keeps its weights: biased_rule
- if not rule.unbiased:  # L_hat
+ if False:  # L_hat
# attention across sequences: packing
- position_ids=position_ids, use_cache=False
+ use_cache=False
# trained off by one: packing
- [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
+ [-1] * len(prompt) + [i] * len(completion)
# temperature not in the trained logits: packing
- head(hidden).float().div_(temperature)
+ head(hidden).float()
# clipped on one side: formula
- rho.clamp(1 - down, 1 + up)
+ rho.clamp(max=1 + up)
# gspo's ratio a sum: formula
- scatter_reduce(0, owner, log_ratio, "mean", include_self=False)
+ scatter_reduce(0, owner, log_ratio, "sum")
# KL the wrong way round: formula
- log_ref_ratio = ref_logprobs - logprobs
+ log_ref_ratio = logprobs - ref_logprobs
# KL of the policy itself: later_updates
- ref = frozen_logprobs(reference, sequences, trained, config)
+ ref = frozen_logprobs(task.model, sequences, trained, config)
# the old policy lost: later_updates
- old if updates else None
+ None
# the first of several updates clips what is rounding: later_updates
- old if updates else None
+ old
# dapo's own length: shares
- "dapo": mean_length or lengths.mean()}
+ "dapo": lengths.mean()}
# dapo's length without the prompts' weights: running_means
- length = (w_q @ lengths.mean(dim=1) / w_q.sum()).item()
+ length = lengths.mean().item()
# the gradient clipped at another norm: clipped
- clip_grad_norm_(model.parameters(), config.max_grad_norm)
+ clip_grad_norm_(model.parameters(), 1e9)
# momentum without a gradient: moves_nothing
- if 0 < grad_norm < math.inf:
+ if grad_norm < math.inf:
# updates that are not finite made: moves_nothing
- if 0 < grad_norm < math.inf:
+ if grad_norm != 0:
# gradients kept: in_one or moves_nothing
-     model.zero_grad()
-     tokens = sum
+     tokens = sum
# probabilities above 1 pass: in_silence
- (pi <= 1 + 1e-9)
+ (pi <= 9)
# an unbiased rule may never keep: in_silence or 3_removing
- (rule.unbiased and (pi[needed] == 0).any())
+ False
# bins learn from first visits: next_visit
- if place[q] >= 0 and not group.isnan().all():
+ if not group.isnan().all():
# bins by the reward of this visit: next_visit
- memory, place = self.memory, self.bin_of_prompts()
-         memory["visits"] *= self.forget
+ memory, place = self.memory, self.bin_of_prompts()
+         place[prompts] = (rewards.mean(dim=1) * 8).long()
+         memory["visits"] *= self.forget
# a bin's score is the mean square itself: next_visit
- (self.memory["squares"] / self.memory["visits"]).sqrt()[place]
+ (self.memory["squares"] / self.memory["visits"])[place]
# a group without any reward teaches a bin: next_visit
- if place[q] >= 0 and not group.isnan().all():
+ if place[q] >= 0:
# the next window starts anew: every_epoch
- order[start : start + prompt_count]
+ order[:prompt_count]
# every epoch the same order: every_epoch
- random.Random(f"{seed}, {number}")
+ random.Random(f"{seed}")
# bfloat16 sums: below_bfloat16
- weight.grad_dtype = torch.float32
+ pass
# masters not rounded back: below_bfloat16
- weight.copy_(master)
-             master.grad
+ pass
+             master.grad
# samples at temperature 1: samples
- .logits[:, -1].float() / temperature
+ .logits[:, -1].float()
# a row that has ended stays: padded
- if len(live) < len(rows):
+ if False:
# a position off by one: accepted
- positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
+ positions = mask.cumsum(dim=1)
# the mask of a padded prompt lost: padded
- state = {"attention_mask": mask,
+ state = {"attention_mask": torch.ones_like(mask),
# the log-probability of the most likely token: padded
- distribution.gather(1, new).squeeze(1)
+ distribution.amax(dim=1)
# the end id 0 taken for padding: padded
- row[row >= 0].tolist()
+ row[row > 0].tolist()
# the model's own end ids only: rotary
- tokenizer.eos_token_id} - {None}
+ 1} - {None, 1}
# the end of a turn is not an end: assistant_s_message
- ids.add(next(
+ {*ids}.add(next(
# logits not compared: accepted
- <= 1e-2 * logits
+ <= 9e9 * logits
# sampling that is NaN passes: noticed
- if not difference <= (1e-3 if model.dtype == torch.float32 else 0.1)
+ if difference > (1e-3 if model.dtype == torch.float32 else 0.1)
# differences that cancel: noticed
- (trained[: len(sampled)] - sampled).abs().mean()
+ (trained[: len(sampled)] - sampled).mean().abs()
# a check of short sequences alone: accepted
- slots = [range(8), [8]]
+ slots = [range(8)]
# weights of a model rounded with its buffers: rotary
- task.model = model.to(DEVICE).eval()
+ task.model = model.to(DEVICE, DTYPE).eval()
# what is evaluated is trained on: a_fifth
- train.pop(ids, None)  # what
+ pass  # what
# data by the seed: a_fifth
- load_rows(spec, split).shuffle(seed=0)
+ load_rows(spec, split).shuffle(seed=config.seed)
# chats without the assistant's turn: chat_templates
- "add_generation_prompt": not goes_on
+ "add_generation_prompt": False
# what the assistant began is closed: continued
- "continue_final_message": goes_on
+ "continue_final_message": False
# the dataset's columns win over the answer that was named: columns
- row | answer if is_ours else answer | row
+ answer | row
# evaluations differ: same_each_time
- transformers.set_seed(config.seed % 2**32)  # the same every time
+ pass
# reward means unweighted: estimate_means
- w_q = step.w_q * ~step.rewards.isnan().all(dim=1)  # (B,)
+ w_q = (~step.rewards.isnan().all(dim=1)).double()
# a checkpoint written in place: dies_saving
- torch.save(saved | {"optimizer": optimizer.state_dict()}, out / "partial.pt")
-     (out / "partial.pt").replace(out / "checkpoint.pt")
+ torch.save(saved | {"optimizer": optimizer.state_dict()}, out / "checkpoint.pt")
# checkpoints may run code: with_history
- "checkpoint.pt"), "cpu", weights_only=True,
+ "checkpoint.pt"), "cpu", weights_only=False,
# rounded weights in the checkpoint: in_one
- "weights": optimizer.masters}
+ "weights": optimizer.weights}
# masters not resumed: in_one
- master.copy_(value)
+ pass
# the optimizer not resumed: in_one
- optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # or
+ pass  # or
# memory not resumed: in_one
- rule.memory |= copy.deepcopy(saved["memory"])
+ pass
# records of steps that are repeated stay: anew or ctrl_c
- (out / "metrics.jsonl").open("w")
+ (out / "metrics.jsonl").open("a")
# history draws as before: with_history
- first["candidates_so_far"] = earlier[-1]["candidates_so_far"]
+ pass
# a mean length that depends on the draw: with_history
- first["means"]["length"] = earlier[-1]["means"]["length"]
+ pass
# worth of other settings inherited: with_history
- first["means"]["length"] = earlier[-1]["means"]["length"]
+ first["means"] = earlier[-1]["means"]
# every step the same seed: random_numbers
- (1_000_003 * config.seed + seen)
+ (1_000_003 * config.seed)
# draws with the seed of the samples: random_numbers
- manual_seed(torch.randint(2**32, ()).item())
+ manual_seed(torch.initial_seed())
# no warm-up: warm_up
- min(1.0, number / max(1, config.warmup_steps))
+ 1.0
# the reference a trained policy: in_one
- reference = copy.deepcopy(task.model) if config.beta > 0 else None
-     optimizer = MasterAdam(task.model, config.learning_rate)
-     out, records = start(config, task, rule, optimizer)
+ optimizer = MasterAdam(task.model, config.learning_rate)
+     out, records = start(config, task, rule, optimizer)
+     reference = copy.deepcopy(task.model) if config.beta > 0 else None
# the last evaluation not recorded: not_made_twice
- or number in (0, last)) and
+ or number == 0) and
# Ctrl-C without a checkpoint: ctrl_c
- if optimizer.updates == records[-1]["updates"]:  # not
+ if records[-1]["step"] == config.steps:  # not
# two runs in a folder: two_runs
- exist_ok=bool(config.resume))
+ exist_ok=True)
# kl has no gradient: formula
- log_ref_ratio = ref_logprobs - logprobs
+ log_ref_ratio = ref_logprobs - logprobs.detach()
# zero scores count in the proportional rule: as_many_as
- keep_probabilities(scores[scores != 0], rate)
+ keep_probabilities(scores, rate)
# zeros lie at the floor: share_what
- clamp(min=1e-100 if floor > 0 else 0.0)  # NaN stays
-     keep = keep_probabilities(scores[scores != 0], rate)
+ clamp(min=0.0)
+     keep = keep_probabilities(scores if floor > 0 else scores[scores != 0], rate)
# only the first end id ends a row: padded
- live = (~torch.isin(new.squeeze(1), end_ids)).nonzero().squeeze(1)
+ live = (new.squeeze(1) != end_ids[0]).nonzero().squeeze(1)
# what cannot be graded counts as wrong: rewards_compare
- rewards.append(None if wanted in (None, "") else float(is_right))
+ rewards.append(float(is_right))
# reasoning that does not end is graded: rewards_compare
- is_right = not unfinished and read_text
+ is_right = read_text
# a comma left out anywhere: numbers
- [1-9][0-9]{{0,2}}({COMMA}[0-9]{{3}})+(?![0-9])
+ [0-9]+({COMMA}[0-9]+)+
# what cannot be graded rolled out: on_the_hub
- [answer["answer"]]) == [None]:
+ [answer["answer"]]) == []:
# csv as pandas guesses: on_the_hub
- options | TEXT if builder.info.builder_name == "csv" else options
+ options | TEXT if source == path else options
# exact on what JSON guessed: bad_data
- if config.reward == "exact" and not re.match
+ if False and not re.match
# reference is the trained model itself: later_updates
- reference = copy.deepcopy(task.model) if config.beta > 0 else None
+ reference = task.model if config.beta > 0 else None
# the old policy taken anew before every update: later_updates
- for w in weights:
+ for w in weights:
+         old = frozen_logprobs(task.model, sequences, later, config)
# a missing reward makes the whole group worthless: advantages
- rewards.nanmean(dim=1, keepdim=True)
+ rewards.mean(dim=1, keepdim=True)
# prompts scored by the root mean square: last_visit
- self.memory["score"][q] = A.abs().mean()
+ self.memory["score"][q] = A.square().mean().sqrt()
# the low set of each group: gradient_go_first
- trainable * keep_probabilities(scores, self.config.completion_prune_rate)
+ trainable * torch.stack(
+             [keep_probabilities(row, self.config.completion_prune_rate) for row in scores]
+         )
# trained at temperature 1: later_updates
- completion_logprobs(model, sequences, slots, config.temperature)
-         old_logprobs
+ completion_logprobs(model, sequences, slots, 1.0)
+         old_logprobs
# a share in the record for a weight: shares
- "w": weights[0],
+ "w": inputs[2],
# worth from this step instead of earlier ones: exactly_one or shares
- limit = max(1, round(config.prompts_per_step / max(1, means.worth(means.pruned))))
+ N, prompts, w_q = prune_prompts(rule, upcoming, config.prompts_per_step, generator)
+     limit = max(1, round(config.prompts_per_step / float(w_q.mean())))
# more rollouts than without pruning: no_more
- max(1, means.worth(means.pruned))))
+ means.worth(means.pruned)))
# worth of prompts alone decides: shares
- means.worth(means.pruned))))
+ means.worth(means.prompts_pruned))))
# weights not squared in the noise: noise
- B / N * w**2)
+ B / N * w)
# the noise without B: running_means
- w_q, B = w_q[:, None], len(A)
+ w_q, B = w_q[:, None], 1
# the noise without N: noise
- .mean(dim=1).sum().item() / N
+ .mean(dim=1).mean().item()
# the noise without pruning not weighted: noise
- weights = (w_q, B
+ weights = (w_q > 0, B
# steps without a gradient count as noise: running_means
- if not A.any():  # the step
+ if False:  # the step
# worth starts at what one step says: running_means
- (mean or noise[0])
+ (mean or new)
# noise of the last update's draw: shares
- weights[0], A * rule.unbiased
+ weights[-1], A * rule.unbiased
# a biased rule has a worth: exactly_one
- A * rule.unbiased, lengths)
+ A, lengths)
# a run with history resumed from the other: in_one
- folder = config.resume or config.history
+ folder = config.history or config.resume
# settings beside resume ignored: ctrl_c
- parser.parse_args(stored + sys.argv[1:])
+ parser.parse_args(sys.argv[1:] + stored + [f"--resume={resume}"])
# a failing step leaves what the rule remembered: fails
- "memory": rule.whole_memory, "weights"
+ "memory": rule.memory, "weights"
# half a step saved: fails
- if optimizer.updates == records[-1]["updates"]:  # not
+ if True:  # not
# a fork has another module: fork
- sys.modules["dppo"] = sys.modules["__main__"]
+ pass
# out of memory without advice: memory
- except (torch.OutOfMemoryError, MemoryError):  # main
+ except ZeroDivisionError:  # main
# of several updates the last norm: estimate_means
- "tokens_trained": torch.sum, "grad_norm": torch.max}
+ "tokens_trained": torch.sum}
"""


class Failed:
    """Notes the first test that fails."""

    name = None

    def pytest_runtest_logreport(self, report):
        if report.failed and self.name is None:
            self.name = report.nodeid.rpartition("::")[2]


def caught(change):
    """The first test that fails with this change, None if none does."""
    _, first, has, makes = change
    source = (ROOT / "dppo.py").read_text()
    assert source.count(has) == 1, f"{has!r} stands {source.count(has)} times in dppo.py"
    failed = Failed()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        shutil.copy(ROOT / "test_dppo.py", folder)
        Path(folder, "dppo.py").write_text(source.replace(has, makes))
        os.chdir(folder)
        sys.path.insert(0, folder)
        options = ["-x", "-q", "--basetemp", "temporary", "-p", "no:cacheprovider", "-k"]
        for tests in (first, "not slow"):
            if failed.name is None:
                pytest.main([*options, tests], plugins=[failed])
        os.chdir(ROOT)
    return failed.name


def parsed(text):
    """-> (name, tests, what dppo.py has, what takes its place) of each change."""
    changes = []
    for change in text.split("\n# ")[1:]:
        title, *lines = change.strip("\n").split("\n")
        has, makes = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        changes.append((*title.split(": "), has, makes))
    return changes


def main():
    word = " ".join(sys.argv[1:])
    changes = [change for change in parsed(CHANGES) if word in change[0]]
    # Each change has a process of its own, which finds the libraries imported.
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        tests = []
        for change, test in zip(changes, pool.imap(caught, changes)):
            print(f"{change[0]:60} {test or 'NOT CAUGHT'}", flush=True)
            tests.append(test)
    print(f"{len(changes) - tests.count(None)} of {len(changes)} careless changes are caught")
    sys.exit(None in tests)


if __name__ == "__main__":
    main()
