"""Tests the tests: makes careless changes in dppo.py, one at a time, and runs the tests on each.

python .ci/careless.py [WORD]    all changes, or those with WORD in their name
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the change is, what dppo.py has, what a careless change makes of it, tests to try first.
CHANGES = [
    (
        "weight dropped",
        "(weights * loss_of_completion)",
        "(weights.sign() * loss_of_completion)",
        "linear",
    ),
    ("prompt's weight dropped", "return w_q * w_qi", "return w_qi", "expectation_one"),
    (
        "divided by what is kept",
        "/ (N * config.group_size), clipped",
        "/ (weights > 0).sum(), clipped",
        "formula",
    ),
    (
        "divided by those rolled out",
        "    progress.seen += N\n",
        "    progress.seen += N\n    N = len(prompts)\n",
        "these_weights",
    ),
    (
        "ceil in place of floor",
        "math.floor(rate * count + 1e-9)",
        "math.ceil(rate * count - 1e-9)",
        "floor_of",
    ),
    ("rounding makes a low set", "scores.nanmean() * (1 - 1e-6)", "scores.nanmean()", "floor_of"),
    (
        "lowest pruned for certain",
        "torch.randperm(len(pi), generator=generator)",
        "torch.arange(len(pi))",
        "by_hand or own_prob or draws_anew",
    ),
    (
        "low set with zeros",
        "scores = advantages[trainable].abs()",
        "scores = advantages.abs().mul(trainable)[trainable] * 0",
        "decides",
    ),
    (
        "low set of zeros too",
        "pi[trainable] = keep_probabilities(scores",
        "pi[trainable] = keep_probabilities(advantages.abs().flatten()",
        "decides",
    ),
    (
        "prompt's weight not in the score",
        "advantages.abs() * prompt_weights[:, None]",
        "advantages.abs()",
        "scored",
    ),
    (
        "A = 0 left out with KL too",
        "(advantages != 0) | (self.config.beta > 0)",
        "advantages != 0",
        "unless",
    ),
    ("no floor with KL", "self.floor if self.config.beta > 0 else 0.0", "0.0", "unless"),
    (
        "draw reused",
        "draws.append(weigh_completions(",
        "draws.append(draws[0] if draws else weigh_completions(",
        "draws_anew",
    ),
    (
        "centred after",
        "logprobs, old_logprobs, ref_logprobs, lengths, A, w, N",
        "logprobs, old_logprobs, ref_logprobs, lengths, A - A.mean(), w, N",
        "linear",
    ),
    (
        "std over G",
        "rewards.std(dim=1, keepdim=True)",
        "rewards.std(dim=1, keepdim=True, correction=0)",
        "advantages",
    ),
    (
        "dr_grpo scaled",
        'scale_by_std=config.objective != "dr_grpo"',
        "scale_by_std=True",
        "dr_grpo",
    ),
    ("groups that are not gradable", "pi = pi.masked_fill(missing, 0.0)", "pass", "missing"),
    (
        "memory of the pruned lost",
        "rule.update(prompts",
        "rule.memory.get('score', rewards)[upcoming[:N]] = 0.0; rule.update(prompts",
        "last_visit",
    ),
    (
        "window by the number sure to survive",
        "(pi.cumsum(0) <=",
        "((pi > 0.9).cumsum(0) <=",
        "window",
    ),
    (
        "next window starts anew",
        "torch.cat(orders)[start :",
        "torch.cat(orders)[0 :",
        "every_epoch",
    ),
    (
        "every epoch the same order",
        "1_000_003 * seed - 1 - number",
        "1_000_003 * seed - 1",
        "every_epoch",
    ),
    (
        "every step the same seed",
        "(1_000_003 * config.seed + progress.seen)",
        "(1_000_003 * config.seed)",
        "anew",
    ),
    (
        "seeded by the step number",
        "(1_000_003 * config.seed + progress.seen)",
        "(1_000_003 * config.seed + progress.step)",
        "history",
    ),
    (
        "a biased rule's weights",
        "return kept * N * rule.config.group_size /",
        "return kept * N /",
        "biased_rule",
    ),
    (
        "attention across sequences",
        "position_ids=position_ids, use_cache=False",
        "use_cache=False",
        "packing",
    ),
    (
        "trained off by one",
        "[0] * (len(prompt) - 1) + [1] * len(completion) + [0]",
        "[0] * len(prompt) + [1] * len(completion)",
        "packing",
    ),
    (
        "every other sequence lost",
        "waiting.extend(islice(coming, 1))",
        "waiting.extend(islice(coming, 1, 2))",
        "packed_once",
    ),
    ("top_k left at its default", '"top_k": 0, ', "", "probabilities_that_are_trained"),
    (
        "the model's own sampling lost",
        "copy.copy(task.model)",
        "task.model",
        "probabilities_that_are_trained",
    ),
    (
        "temperature not in the trained logits",
        ".float().div_(temperature)",
        ".float()",
        "temperature",
    ),
    ("clipped on one side", "clamp(1 - down, 1 + up)", "clamp(max=1 + up)", "formula"),
    (
        "gspo's ratio a sum",
        "(log_ratio * mask).sum(dim=1) / lengths",
        "(log_ratio * mask).sum(dim=1)",
        "formula",
    ),
    ("KL the wrong way round", "ref_logprobs - logprobs", "logprobs - ref_logprobs", "formula"),
    (
        "KL of the policy itself",
        "frozen_logprobs(reference, ",
        "frozen_logprobs(task.model, ",
        "reference",
    ),
    ("no mean length for dapo", '"dapo": m}', '"dapo": 1}', "formula"),
    ("dapo's own length", "m = progress.mean_length or this_step", "m = this_step", "dapo_divides"),
    (
        "old policy lost",
        "if config.inner_epochs > 1:",
        "if config.inner_epochs > 9:",
        "second_update",
    ),
    ("no warm-up", "min(1.0, progress.step / max(1, config.warmup_steps))", "1.0", "warm_up"),
    ("gradient never clipped", "config.max_grad_norm).item()", "1e9).item()", "max_grad_norm"),
    ("weights decay", "torch.optim.Adam(", "torch.optim.AdamW(", "decay"),
    (
        "finished rows mixed up",
        "rows = [rows[row] for row in live]",
        "rows = rows[: len(live)]",
        "differ or accepted",
    ),
    (
        "cache rows not selected",
        "torch.tensor(live, device",
        "torch.tensor(live[::-1], device",
        "accepted",
    ),
    ("bf16 sums", "weight.grad_dtype = torch.float32", "pass", "summed"),
    (
        "masters not copied back",
        "            weight.copy_(master)\n",
        "            pass\n",
        "below_bfloat16",
    ),
    (
        "updates that are not finite made",
        "math.isfinite(grad_norm + sum(means))",
        "True",
        "not_finite",
    ),
    ("momentum without a gradient", "if finite and grad_norm > 0:", "if finite:", "momentum"),
    ("gradients kept", "    model.zero_grad()\n", "", "two_parts or momentum or in_two"),
    (
        "sampling that is NaN passes",
        "if not difference <= (1e-3 if model.dtype == torch.float32 else 0.2)",
        "if difference > (1e-3 if model.dtype == torch.float32 else 0.2)",
        "noticed",
    ),
    ("logits not compared", "<= 2e-2 * logits", "<= 9e9 * logits", "refused"),
    (
        "zero is no answer",
        'None if wanted in (None, "") else',
        "None if not wanted else",
        "an_answer",
    ),
    ("successes never forgotten", "self.decay * right[q]", "right[q]", "decay"),
    (
        "no floor under prompts",
        "self.config.prompt_prune_rate, self.floor)",
        "self.config.prompt_prune_rate)",
        "useless",
    ),
    (
        "reward means unweighted",
        "prompt_weights = step.prompt_weights * graded",
        "prompt_weights = graded.double()",
        "estimate",
    ),
    (
        "evaluations differ",
        "transformers.set_seed(config.seed)  # the same every time",
        "pass",
        "same_each_time",
    ),
    ("masters not resumed", "        master.copy_(value)\n", "", "two_parts"),
    ("memory not resumed", "        run.rule.memory = saved", "        _ = saved", "two_parts"),
    (
        "history of other prompts",
        'SAME_MEMORY = ("method", "data")',
        'SAME_MEMORY = ("method",)',
        "history",
    ),
    (
        "mean length not known before the draw",
        "mean_length=earlier.mean_length)",
        ")",
        "history",
    ),
    ("history draws as before", "Progress(seen=earlier.seen, ", "Progress(", "history"),
    (
        "too few steps of bisection",
        "in range(50):  # bisection",
        "in range(9):  # bisection",
        "proportion",
    ),
    ("records not cut back", "        os.truncate(path, size)\n", "        pass\n", "two_parts"),
    ("checkpoint written in place", 'run.out / "partial.pt"', 'run.out / "checkpoint.pt"', "dies"),
    (
        "checkpoints may run code",
        "weights_only=True, mmap",
        "weights_only=False, mmap",
        "run_code",
    ),
    (
        "data by the seed",
        "random.Random(0).shuffle(examples)",
        "random.Random(config.seed).shuffle(examples)",
        "seed",
    ),
    (
        "chats without the assistant's turn",
        '"add_generation_prompt": True',
        '"add_generation_prompt": False',
        "chat",
    ),
    ("two system messages", ' if message["role"] != "system"', "", "chat"),
    (
        "prompts of exactly the limit left out",
        "<= config.max_prompt_tokens:",
        "< config.max_prompt_tokens:",
        "left_out",
    ),
    (
        "evaluation sets from the split train",
        'load_examples(spec, "test"',
        'load_examples(spec, "train"',
        "split_test",
    ),
    # Found by readers who had not seen the tests.
    (
        "gspo's clipping the wrong way round",
        '"gspo": (3e-4, 4e-4)',
        '"gspo": (4e-4, 3e-4)',
        "constants or formula",
    ),
    (
        "window without tolerance",
        "(pi.cumsum(0) <= limit + 1e-9)",
        "(pi.cumsum(0) <= limit)",
        "window",
    ),
    (
        "a subclass decides what has a gradient",
        "Rule.has_gradient(rule, advantages)  #",
        "rule.has_gradient(advantages)  #",
        "own_rule or refused",
    ),
    (
        "only the NaN itself is missing",
        "missing = rewards.isnan().any(dim=1, keepdim=True)",
        "missing = rewards.isnan()",
        "missing or nan",
    ),
    (
        "a biased rule divides by B",
        "return kept * N * rule.config.group_size /",
        "return kept * len(kept) * rule.config.group_size /",
        "biased",
    ),
    (
        "a biased rule that keeps nothing",
        "kept.sum().clamp(min=1)",
        "kept.sum()",
        "biased",
    ),
    (
        "micro-batches rounded up",
        "max(1, config.micro_batch_tokens // capacity)",
        "max(1, -(-config.micro_batch_tokens // capacity))",
        "micro_batch",
    ),
    (
        "pads count as clipped",
        "clipped = (surrogate < rho * A) & mask",
        "clipped = surrogate < rho * A",
        "formula",
    ),
    (
        "Adam on bfloat16 weights",
        "masters = [weight.float() for weight in weights]",
        "masters = weights",
        "bfloat16",
    ),
    (
        "mean length without the prompts' weights",
        "((prompt_weights * mean_lengths).sum() / prompt_weights.sum()).item()",
        "mean_lengths.mean().item()",
        "running_length or dapo",
    ),
    (
        "bisection of twenty steps",
        "in range(50):  # bisection",
        "in range(20):  # bisection",
        "many",
    ),
    (
        "frozen log-probabilities at temperature 1",
        "slots, config.temperature)\n        for i, of_completion",
        "slots, 1.0)\n        for i, of_completion",
        "temperature or second_update or frozen",
    ),
    (
        "rounded weights in the checkpoint",
        'state["weights"] = run.optimizer.param_groups[0]["params"]',
        'state["weights"] = list(run.task.model.parameters())',
        "two_parts",
    ),
    (
        "differences that cancel",
        "(trained.cpu() - sampled).abs().sum()",
        "(trained.cpu() - sampled).sum().abs()",
        "noticed",
    ),
    (
        "answers compared as floats",
        "return Decimal(numbers[-1]) if numbers",
        "return float(numbers[-1]) if numbers",
        "compare",
    ),
    (
        "only the model's end ids",
        "sorted({*ids, self.tokenizer.eos_token_id} - {None})",
        "sorted({*ids} - {None})",
        "end_ids",
    ),
    (
        "positions of evaluation sets unchecked",
        "in chain(train, *evals.values()))",
        "in chain(train))",
        "bad_data",
    ),
    (
        "the dataset's columns win over the answer that was named",
        "row | answer if config.reward in REWARDS else answer | row",
        "answer | row",
        "columns",
    ),
    (
        "what was named wins over the dataset's columns",
        "row | answer if config.reward in REWARDS else answer | row",
        "row | answer",
        "columns",
    ),
    (
        "embedded prompts held out and trained on",
        "[example for example in examples if example not in train][:held_out]",
        "examples[:held_out]",
        "embedded",
    ),
    (
        "warm start without a seed",
        "    torch.manual_seed(0)\n    model = transformers.Qwen3",
        "    model = transformers.Qwen3",
        "same_whole_model",
    ),
    (
        "settings that are NaN pass",
        "not least <= value <= most:  # nor",
        "(value < least or value > most):  # nor",
        "nonsense",
    ),
    (
        "accuracy the mean of the sets",
        "or_none(torch.cat(graded).mean())",
        "or_none(torch.stack([rewards.mean() for rewards in graded[1:]]).nanmean())",
        "average",
    ),
    (
        "partly skipped steps count",
        'if record["skipped"] == config.inner_epochs',
        'if record["skipped"] > 0',
        "some_updates",
    ),
    (
        "half a line accepted",
        'if b"".join(lines).count(b"\\n") < run.progress.step:',
        "if len(lines) < run.progress.step:",
        "missing_or_cut",
    ),
    (
        "the last evaluation stale",
        '        after = record.get("evaluation")\n',
        '        after = record.get("evaluation") or after\n',
        "not_made_twice",
    ),
    (
        "the reference a trained policy",
        "    run.optimizer = make_optimizer(task.model, config)\n    if config.resume:\n"
        "        load_checkpoint(run, saved)\n",
        "    run.optimizer = make_optimizer(task.model, config)\n    if config.resume:\n"
        "        load_checkpoint(run, saved)\n"
        "        run.reference = copy.deepcopy(task.model) if config.beta > 0 else None\n",
        "two_parts",
    ),
    (
        "out of memory a success",
        'sys.exit("dppo.py: out of memory',
        'print("dppo.py: out of memory',
        "out_of_memory",
    ),
    (
        "held-out prompts trained on where they stand twice",
        'in train if tuple(example["prompt_ids"]) not in held_out]',
        "in train[size:]]",
        "held_out",
    ),
    (
        "draws from torch's own generator",
        "torch.Generator().manual_seed(torch.randint(2**32, ()).item())",
        "torch.default_generator",
        "seeds_torch",
    ),
    (
        "draws with the seed of the samples",
        "torch.Generator().manual_seed(torch.randint(2**32, ()).item())",
        "torch.Generator().manual_seed(torch.initial_seed())",
        "draws_of_a_step",
    ),
    ("longrope as long as it says", 'rope.get("rope_type") == "longrope"', "False", "longrope"),
    (
        "accuracies at two temperatures compared",
        '"model", "reward", "temperature", "max_completion_tokens")',
        '"model", "reward", "max_completion_tokens")',
        "other_data",
    ),
    (
        "the record of a run shared",
        'path.open("x").close()',
        'path.open("a").close()',
        "second_run",
    ),
    (
        "Ctrl-C without a checkpoint",
        "if is_due or run.stopping or progress",
        "if is_due or progress",
        "ctrl_c",
    ),
    (
        "records not flushed",
        "            os.fsync(file.fileno())\n    state",
        "            pass\n    state",
        "reach_the_disk",
    ),
    (
        "counts averaged",
        '("completions_trained", "tokens_trained", "skipped")',
        '("x",)',
        "records",
    ),
    (
        "another sample shown",
        "q = step.weights.sum(dim=1).gt(0).int().argmax().item()",
        "q = 0",
        "samples_hold",
    ),
    (
        "gspo's ratio without a gradient",
        "mean_log_ratio[:, None].expand_as",
        "mean_log_ratio.detach()[:, None].expand_as",
        "formula",
    ),
    (
        "the prompts' weights not handed on",
        "append(weigh_completions(rule, rewards, advantages, prompt_weights, N",
        "append(weigh_completions(rule, rewards, advantages, prompt_weights * 0 + 1, N",
        "these_weights",
    ),
]


def caught(change):
    """The first test that fails with this change, None if none does."""
    _, has, makes, first = change
    source = (ROOT / "dppo.py").read_text()
    assert source.count(has) == 1, f"{has!r} stands {source.count(has)} times in dppo.py"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "test_dppo.py", folder)
        Path(folder, "dppo.py").write_text(source.replace(has, makes))
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        options = ["-x", "-q", "--basetemp", "temporary", "-p", "no:cacheprovider", "-k"]
        for tests in (first, "not slow"):
            command = [sys.executable, "-m", "pytest", *options, tests]
            result = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True
            )
            failed = re.search(r"^(?:FAILED|ERROR) \S+?::(\S+)", result.stdout, re.MULTILINE)
            if failed:
                return failed[1]
    return None


def main():
    word = " ".join(sys.argv[1:])
    changes = [change for change in CHANGES if word in change[0]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tests = []
        for change, test in zip(changes, pool.map(caught, changes)):
            print(f"{change[0]:40} {test or 'NOT CAUGHT'}", flush=True)
            tests.append(test)
    print(f"{len(changes) - tests.count(None)} of {len(changes)} careless changes are caught")
    sys.exit(None in tests)


if __name__ == "__main__":
    main()
