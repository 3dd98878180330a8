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
from collections import namedtuple
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch._dynamo", "transformers.models.qwen3.modeling_qwen3")
LIBRARIES += ("trl.trainer.grpo_trainer",)  # which imports datasets and tokenizers
# {file: its tests}; those of other files are in extras/test_extras.py.
TESTS = {"dppo.py": "test_dppo.py", "extras/dppo_trl.py": "extras/test_trl.py"}
CHANGES = r"""
=== dppo.py
## advantages_are, missing, completions_without, last_visit, published, full_gradient
- mean = rewards.nanmean(dim=1, keepdim=True)
# a missing reward counts as 0
+ mean = rewards.nan_to_num(0.0).mean(dim=1, keepdim=True)
- dim=1, keepdim=True) / (n - 1)
# missing rewards count in the divisor of the std
+ dim=1, keepdim=True) / (rewards.shape[1] - 1)
- rewards.isclose(mean, rtol=1e-6, atol=1e-6)
# groups of equal rewards have advantages by rounding
+ rewards.isclose(mean, rtol=1e-12, atol=1e-9)
- return (advantages != 0) | (beta > 0)
# completions with A = 0 pruned in spite of KL
+ return advantages != 0
- partial(group_advantages, scale_by_std=False)
# dr_grpo scaled by std
+ group_advantages
- "dapo": Objective(group_advantages, 0.2, 0.28, fixed_Z=True)
# dapo has the clip of grpo
+ "dapo": Objective(group_advantages, 0.2, 0.2, fixed_Z=True)
# dapo divides by each completion's length
+ "dapo": Objective(group_advantages, 0.2, 0.28)
- masked_fill(low, (k - pruned) / max(1, k))
# the lowest are always pruned
+ masked_fill(scores < scores.nan_to_num(math.inf).view(-1).sort()[0][pruned], 0.0)
- scores = torch.where(needed, rollout.A.abs(), math.nan)
# completions without a gradient lower the mean
+ scores = rollout.A.abs()
- remembers = {"score": math.nan}
# prompts are low before their first visit
+ remembers = {"score": 0.0}
- self.memory["score"][q] = A[graded].abs().mean()
# missing rewards count as A = 0 in a prompt's score
+ self.memory["score"][q] = A.abs().mean()
- if graded.sum() > 1:
# a group with one reward is a visit that taught nothing
+ if graded.any():
## four_gradients, draw_keeps, its_share, exceed, and_shares, later_updates
- kept = points_below[:-1] < points_below[1:]
# each item has a coin of its own
+ kept = torch.rand(len(pi), generator=generator) < pi
- return torch.where(kept, 1 / pi, 0.0)
# weights scaled to a mean of 1 (self-normalised importance sampling)
+ return torch.where(kept, len(pi) / pi / (1 / pi[kept]).sum(), 0.0)
- order = rollout.A.argsort(dim=1, stable=True)
# completions drawn in the order of their sampling
+ order = torch.arange(rollout.A.shape[1]).expand(rollout.A.shape)
- w_qi = draw(pi.gather(1, order).flatten(), generator).view_as(pi)
# the draw goes through the A of all groups together
+ return draw(pi.view(-1)[o := rollout.A.view(-1).argsort()], generator)[o.argsort()].view_as(pi)
# drawn with the pi of other completions
+ w_qi = draw(pi.flatten(), generator).view_as(pi)
- return torch.zeros_like(pi).scatter(1, order, w_qi)
# weights given to other completions
+ return w_qi
- require(valid and pi[needed].all(), f
# a pi of 0 is accepted where there is a gradient
+ require(valid, f
- return len(candidates), candidates[kept], w_q[kept]
# prompts looked at until enough are kept
+ return int(kept.nonzero().max()) + 1, candidates[kept], w_q[kept]
# N is the number of kept prompts
+ return int(kept.sum()), candidates[kept], w_q[kept]
- weights.append(w_q[:, None] * w_qi)
# the prompts' weights forgotten
+ weights.append(w_qi)
# the completions' weights forgotten
+ weights.append(w_q[:, None] * (w_qi > 0))
- rollout.A, w / (NG * Z)
# B instead of N
+ rollout.A, w / (w.numel() * Z)
# advantages centred again after pruning
+ rollout.A - rollout.A[w > 0].mean(), w / (NG * Z)
- Z = config.max_completion_tokens
# dapo divides by this step's mean length, which depends on the draw
+ Z = rollout.lengths.mean()
- for number, w in enumerate(weights):
# one draw of completions for all updates
+ for number, w in enumerate(weights[:1] * len(weights)):
- old if number > 0 else None, ref
# later updates take themselves for the old policy, so nothing is clipped
+ None, ref
- rule.prune_completions(copied(rollout), generator)
# a rule that works in place changes the advantages
+ rule.prune_completions(rollout, generator)
## sampling_ignores, sampled_log, check_sampling, follows, kl_term, moves_nothing, updates_below
- positions = (mask.cumsum(dim=1) - 1)
# padding counted in positions
+ positions = (torch.ones_like(mask).cumsum(dim=1) - 1)
- log_p.exp().multinomial(1)
# only the 50 likeliest tokens sampled, as is the default elsewhere
+ log_p.where(log_p >= log_p.topk(min(50, len(log_p[0])))[0][:, -1:], -99).exp().multinomial(1)
- completion = tokens[i, :length].tolist()
# the end left out, so never trained
+ completion = [n for n in tokens[i, :length].tolist() if n not in task.end_ids] or [0]
- completion[-1] not in task.end_ids)
# a completion that ends with its last token counts as truncated
+ length == config.max_completion_tokens)
- is_equal = off <= (1e-3
# a model that samples otherwise than it trains is accepted
+ is_equal = off <= (1e3
- can_pack = "Linear" not in
# linear attention is packed
+ can_pack = "nothing" not in
- zip(prompt + completion, count(), owners)
# positions do not restart
+ zip(prompt + completion, count(len(row)), owners)
- [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
# the mask late by one
+ [-1] * len(prompt) + [i] * len(completion)
- torch.min(unclipped, clipped)
# clipped also where that hides a bad update
+ clipped
- log_ratio, "mean", include_self
# gspo's ratio is a product of all tokens', not their mean
+ log_ratio, "sum", include_self
- kl = log_ratio.exp() * (log_x.exp() - 1 - log_x)
# KL without the ratio, so that a first update follows the reverse KL
+ kl = log_x.exp() - 1 - log_x
- (share[owner] @ losses).backward()
# divided by the number of completions in a micro-batch
+ (share[owner] @ losses / len(batch)).backward()
- if 0 < grad_norm < math.inf:
# Adam's momentum moves the model without a gradient
+ if grad_norm < math.inf:
# a gradient that is not finite moves the model
+ if grad_norm != 0:
- torch._foreach_copy_(self.originals, self.masters)
# masters rounded to bfloat16
+ [master.copy_(x.copy_(master)) for x, master in zip(self.originals, self.masters)]
## own_orders, extended, that_fails, resumes, refused, two_processes, record_fields, evaluations
- task.reference = copy.deepcopy(task.model)
# when a run is resumed, the reference is the trained model
+ task.reference = restore(out / "checkpoint.pt", rule, optimizer) and copy.deepcopy(task.model)
- {"candidates_so_far": consumed + N,
# pruned prompts do not count as candidates
+ {"candidates_so_far": consumed + len(prompts),
- transformers.set_seed((1_000_003
# random numbers follow from all earlier steps, and so differ in a resumed run
+ (lambda _: None)((1_000_003
- torch.Generator().manual_seed(torch.randint(2**32, ()).item())
# all steps draw alike
+ torch.Generator().manual_seed(config.seed)
- optimizer.load_state_dict(saved["optimizer"])
# Adam begins anew when a run is resumed
+ pass
- rule.memory |= saved["memory"]
# memory is lost when a run is resumed
+ pass
- torch._foreach_copy_(optimizer.masters, saved["masters"])
# masters restored in bfloat16
+ torch._foreach_copy_(optimizer.masters, [x.bfloat16() for x in saved["masters"]])
- torch.save(values, path.with_name(unfinished))
# a run that is killed while it saves leaves half a checkpoint
+ return torch.save(values, path)
- if x["step"] < step] if path.exists()
# samples of repeated steps are there twice
+ ] if path.exists()
- shutil.rmtree(out / "model", ignore_errors=True)
# a resumed run keeps the model of its earlier end
+ pass
- if task.evals and (
# a restored record keeps its accuracy, whatever the settings
+ if task.evals and "accuracy" not in record and (
- "model", "reward", "seed", "prompts")
# another seed resumes a run
+ "model", "reward", "prompts")
- (w_q @ means / w_q.sum()).item()
# means of kept prompts instead of candidates
+ means.mean().item()
- [-s.logprobs.mean().item() for s in sequences]
# the entropy is negative
+ [s.logprobs.mean().item() for s in sequences]
- "graded_fraction": is_graded}
# the share of groups with a reward
+ "graded_fraction": is_graded.any(dim=1)}
- task = replace(task, reward=find("reward", config.eval_reward, REWARDS | {"": task.reward}))
# evaluated by the reward of training
+ task = replace(task)
# trained by the reward of evaluations, after the first
+ task.reward = find("reward", config.eval_reward, REWARDS | {"": task.reward})
## a_number, compare_what, left_out, parquet, loaded, texts_or
- (?:(?<!\w)[-−–])?\\?[$€£]?
# -$5 is 5
+ (?:(?<!\w)[-−–])?
- (?>({NUMBER}))(?![.):][ \t]+\w)
# the number of a heading is taken for the answer
+ (?>({NUMBER}))
- rf"^{IN_BOX}$"
# half in a box is 1
+ rf"^{IN_BOX}"
- return "" if "<think>" in text else text.strip()
# unfinished reasoning is graded
+ return text.strip()
- seen = {tuple(" ".join(texts_of(example["prompt"])).split()) for example in evaluated}
# evaluated prompts are trained
+ seen = set()
- = train[:size], train[size:]
# prompts that are held out are trained
+ = train[:size], train
- require(None not in row
# rows with more cells than columns are trained
+ require(True
- require(len({*names}) == len(names)
# of two columns of one name, the last counts
+ require(True
- x is not None and x == x and str(x).strip()
# blanks are answers
+ x is not None and x == x
# NaN is an answer
+ x is not None and str(x).strip()
- require(chat[-1].get("role") != "assistant"
# chats that end with the answer are trained
+ require(True
- require(not any(token in "\n".join(texts) for token in controls)
# prompts become control tokens
+ require(True
- require(message["content"].strip() in text
# a prompt that the template drops is trained
+ require(True
- require(TAKEN.isdisjoint(row)
# a column with the name of a reward's argument is lost
+ require(True
=== extras/proportional.py
## in_proportion, add_up, unbiased_with, noise_of, bins, missing
- (1 - rate * (1 - height))
# a line without its floor 1 - r
+ (height)
- rollout.w_q[:, None] * rollout.A.abs()
# a completion's score without its prompt's weight
+ rollout.A.abs()
- (1 - logprobs.double().exp()).norm(dim=1)
# likely tokens count instead of surprising ones
+ logprobs.double().exp().norm(dim=1)
- (c * scores).clamp(least, 1.0)
# a pi without a floor
+ (c * scores).clamp(max=1.0)
- if bins[q] >= 0 and len(group) > 1:
# first visits teach a bin
+ if len(group) > 1:
- memory["squares"][bins[q]] += A[graded].square().mean()
# missing rewards count as A = 0 in squares
+ memory["squares"][bins[q]] += A.square().mean()
=== extras/rivals.py
## cppo, greso, literal
- return kept * G / k * dppo.has_gradient(A, self.config.beta)
# CPPO's mean leaves out kept completions with A = 0
+ return (kept := kept * (A != 0)) * kept.numel() / kept.sum().clamp(min=1)
- weights = without_the_lowest(self.memory["score"], self.config.prompt_prune_rate)
# Literal draws prompts as DPPO does
+ weights = 1 / dppo.keep_probabilities(self.memory["score"], self.config.prompt_prune_rate)
=== extras/dppo_trl.py
## gradient_and_the_log, on_average, estimates, resumed
- (scale * w_of * A_of)
# weights forgotten in TRL
+ (scale * A_of)
- else processes * count / total
# divided by the rows of TRL's batch
+ else 1
- divisor = torch.tensor(total * self.args.max_completion_length)
# dapo in TRL divides by the number of tokens, which depends on the draw
+ divisor = lengths.sum()
"""


# (`words` are of tests to run first; `new` is a list of lines.)
Change = namedtuple("Change", "file what words old new")


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
        shutil.copytree(ROOT / "extras", "extras", ignore=shutil.ignore_patterns("*.json", "*.png"))
        for name in ("dppo.py", "test_dppo.py", "README.md"):
            shutil.copy(ROOT / name, name)
        file.write_text(source)
        # (Left out are tests that take long, of which some start processes.)
        options = ["-x", "-k", "not slow and not trainer_in_two", "--assert=plain"]
        tests = TESTS.get(change.file, "extras/test_extras.py")
        options += ["--basetemp=temporary", "-p", "no:cacheprovider", tests]
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
