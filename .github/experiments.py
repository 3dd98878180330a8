"""What a rollout is worth, measured. Of each experiment, this is what was decided before it ran.

    python .github/experiments.py digits 0,1,2,3      # makes the runs of these seeds
    python .github/experiments.py worth 10,11 MODEL   # MODEL: a folder with SmolLM2-135M-Instruct
    python .github/experiments.py                     # gathers, analyses, draws (with matplotlib)

So are made "digits by gradients" 5,6,7 and, with MODEL, equal-noise 0,1 and group 0. A run that was
interrupted goes on where it was. Runs lie in runs/experiments, so several processes may make them;
gathered, they are in .github/comparison.json, under "experiments". The older results in that file
were made by the code of commit b079a0a: the notebook there, and .github/epochs.py.

DIGITS: does a step at equal noise learn as much from fewer rollouts? The embedded task, 250 steps,
eight seeds, from the same starting model: grpo, grpo-skip, dppo (both rates 0.7), and dppo-
proportional (0.9 for prompts, 0.7 for completions). Decided beforehand: the mean of all evaluations
after step 0 is as good as grpo-skip's if the 95% interval of the paired difference lies above
-0.02; and, as the gain, the rollouts after the first epoch (of 32 steps) over grpo-skip's. The
control is grpo-skip with as many prompts a step as dppo-proportional rolled out on average: if that
learns as well, rollouts were never what was short. Looked at afterwards, in three of the seeds
("digits by gradients"): |g|^2 beside A^2 of each group with a gradient, 1/worth by both after the
first epoch, and noise over that of 32 prompts without pruning; also with w |g|/N cut at 1, the norm
at which a step's gradient is clipped.

WORTH: what is a rollout worth on SmolLM2 by the true gradients, and does A^2 tell? Sums and
products for a chat model: of 384 prompts, a third are sums of one digit, a third sums of two
digits, from which it learns, and a third products, which it never gets right. Each of the seeds 10
to 13 makes 96 steps with each rule (dppo 0.7; dppo-proportional as it was before it learned its
scores, 0.7; and as it is, 0.9). After steps 48, 72 and 96, all prompts are rolled out twice, in
groups of 8, and s^2 is the mean over the two of |g|^2, g being the gradient of the group. With the
pi that the rule's memory then gives, 1/worth = mean(pi) mean(s^2/pi)/mean(s^2), and a rule that
knew s would have mean(s)^2/mean(s^2). A seed's mean of log(1/worth) is the unit. Expected: 1.0
(dppo), 1.05 (as it was), 0.93 (as it is), 0.55 (knows s). Told beside it: the same by A^2.

EQUAL-NOISE: a case in which it must show. The same questions as hard sets have them: of 384
prompts, 144 of one digit, 48 of two, 192 products, so that simulation promises a worth of about 2.
grpo-skip with 16 prompts a step, grpo-skip with 8, and dppo-proportional (0.9, no completion
pruned) with 16 at equal noise; 96 steps, eight seeds. Measured is the mean probability of the right
answer to 96 held-out sums of two digits, without sampling. Primary: the tokens generated until a
run is where grpo-skip with 16 prompts ends with the same seed, over those of that run; and the mean
over all evaluations minus that of grpo-skip with 16, paired, with its 95% interval, which should
lie above -0.02. A pilot of grpo-skip alone (seed 100) decides learning rate and steps, and whether
8 prompts are visibly worse than 16 (the mean over all evaluations by at least 0.02): if not, the
question cannot be asked so, and 12 and 4 prompts, or another learning rate, are tried in the same
way. (The pilot: 0.391 with 16 and 0.366 with 8, and with 16 the probability is 0.04, 0.25, 0.43,
0.48 and 0.51 after each epoch, so the settings stand.) Looked at afterwards: the difference without
the first epoch, in which nothing is pruned, and at the end; and prompt_worth after four epochs.

GROUP: one real group of eight completions, with rewards and weights, for the notebook.
"""

import copy
import json
import math
import random
import shutil
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import patch

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo

RESULTS = Path(__file__).with_name("comparison.json")
PICTURE = Path(__file__).with_name("weights.png")
RUNS = Path("runs/experiments")
T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


# ==== Rules ====
class AsItWas(dppo.ProportionalDPPO):
    """dppo-proportional before it learned its scores: a prompt's score is the root mean square of A
    that the posterior Beta(a, b) of its success rate promises for its next group."""

    remembers = {"score": math.nan, "right": 0.0, "wrong": 0.0}

    def prompt_probabilities(self):
        rate = self.config.prompt_prune_rate
        return dppo.proportional_probabilities(self.memory["score"], rate, floor=0.07)

    def remember(self, prompts, rewards, advantages):
        right, wrong = self.memory["right"], self.memory["wrong"]
        for q, group in zip(prompts.tolist(), rewards):
            right[q] = 0.8 * right[q] + group.sum()
            wrong[q] = 0.8 * wrong[q] + (1 - group).sum()
        a, b = 0.05 + right[prompts], 0.05 + wrong[prompts]
        i = torch.arange(self.config.group_size)[:, None]
        all_right = ((a + i) / (a + b + i)).prod(dim=0)
        all_wrong = ((b + i) / (a + b + i)).prod(dim=0)
        self.memory["score"][prompts] = (1 - all_right - all_wrong).sqrt()


# ==== Tasks ====
# The range of both numbers, and what stands between them.
KINDS = {"easy": ((2, 9), (2, 9), "+"), "middle": ((10, 99), (10, 99), "+")}
KINDS |= {"hard": ((100, 999), (11, 99), "*")}


def question(kind, rng, tokenizer):
    """An example of a kind, such as "What is 47 + 86?"."""
    first, second, sign = KINDS[kind]
    a, b = rng.randint(*first), rng.randint(*second)
    chat = dppo.Config(model="-", dataset="-", system_prompt="Reply with the number only.")
    prompt, ids = dppo.encode_prompt(f"What is {a} {sign} {b}?", chat, tokenizer)
    answer = str(a + b if sign == "+" else a * b)
    return {"prompt": prompt, "prompt_ids": ids, "answer": answer, "kind": kind}


def with_answer(example, answer, tokenizer):
    completion = tokenizer.encode(answer) + [tokenizer.eos_token_id]
    return dppo.Sequence(example["prompt_ids"], completion)


def calculating(path, sizes):
    """SmolLM2 after 25 steps of demonstrations, in which half of the sums of two digits have a
    random number as their answer, and so many prompts of each kind. Held out are 96 sums of two
    digits."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    rng, size = random.Random(0), 24
    optimizer = dppo.MasterAdam(model, 1e-5)
    for _ in range(25):
        sequences = []
        for kind in rng.choices([*KINDS], k=size):
            example = question(kind, rng, tokenizer)
            is_noise = kind == "middle" and rng.random() < 0.5
            answer = str(rng.randint(20, 198)) if is_noise else example["answer"]
            sequences.append(with_answer(example, answer, tokenizer))
        shares = torch.tensor([1 / (size * len(sequence.completion)) for sequence in sequences])
        inputs = (torch.ones(size), shares, None, None, dppo.Config(**CALCULATING))
        dppo.train_step(model, optimizer, sequences, *inputs)
    train = []
    for kind, count in sizes.items():
        train += [question(kind, rng, tokenizer) for _ in range(count)]
    rng.shuffle(train)
    taken, held_out = {example["prompt"][-1]["content"] for example in train}, []
    while len(held_out) < 96:
        example = question("middle", rng, tokenizer)
        if example["prompt"][-1]["content"] not in taken:
            taken.add(example["prompt"][-1]["content"])
            held_out.append(example)
    end_ids = [tokenizer.eos_token_id]
    return dppo.Task(train, {"held out": held_out}, tokenizer, dppo.exact, model, end_ids)


def probability(task, config):
    """In place of dppo.evaluate: the mean probability of the right answers to what is held out."""
    examples = task.evals["held out"]
    sequences = [with_answer(example, example["answer"], task.tokenizer) for example in examples]
    logprobs = dppo.frozen_logprobs(task.model, sequences, range(len(sequences)), config)
    value = mean(logprobs[i].sum().exp().item() for i in range(len(sequences)))
    return {"accuracy": value, "held out": value}


# ==== Runs ====
CALCULATING = {"learning_rate": 1e-5, "warmup_steps": 3, "temperature": 1.0, "steps": 96}
CALCULATING |= {"prompts_per_step": 16, "max_completion_tokens": 8, "micro_batch_tokens": 2048}
CALCULATING |= {"eval_every": 12, "save_every": 6}
PROPORTIONAL = {"method": "dppo-proportional", "prompt_prune_rate": 0.9}
DIGITS = {"steps": 250, "eval_every": 25, "save_every": 0}
ARMS = {
    "digits": {
        "grpo": {"method": "grpo"},
        "grpo-skip": {"method": "grpo-skip"},
        "dppo": {"method": "dppo"},
        "dppo-proportional": PROPORTIONAL,
        # As many as dppo-proportional rolled out on average: 20.7.
        "grpo-skip, as many rollouts": {"method": "grpo-skip", "prompts_per_step": 21},
    },
    "digits by gradients": {"dppo-proportional": PROPORTIONAL},
    "worth": {
        "dppo": {"method": "dppo"},
        "as it was": {"method": "experiments:AsItWas"},
        "as it is": PROPORTIONAL,
    },
    "equal-noise": {
        "grpo-skip, 16": {"method": "grpo-skip"},
        "grpo-skip, 8": {"method": "grpo-skip", "prompts_per_step": 8},
        "dppo-proportional": PROPORTIONAL | {"completion_prune_rate": 0.0},
    },
}
SIZES = {"worth": dict.fromkeys(KINDS, 128), "equal-noise": dict(zip(KINDS, (144, 48, 192)))}


def record_of(real, step, task):
    """A step's record, and what only the step tells. The noises, pruned or not, are by A^2."""
    squares = step.A.square()
    record = real(step, task) | {"tokens_generated": int(step.lengths.sum())}
    record["informative"] = int(step.A.any(dim=1).sum())
    record["noise"] = (step.w.square() * squares).mean(dim=1).sum().item() / step.N**2
    record["noise_of_one"] = (step.w_q @ squares.mean(dim=1)).item() / step.N
    return record


def train(folder, task, evaluate=dppo.evaluate, **settings):
    """A run, or the rest of it, from a copy of the task's model -> its records."""
    if not (folder / "checkpoint.pt").exists():
        shutil.rmtree(folder, ignore_errors=True)
    resume = str(folder) if folder.exists() else ""
    config = dppo.Config(**settings, output_dir=str(folder), resume=resume)
    own = {"evaluate": evaluate, "record_of": partial(record_of, dppo.record_of)}
    with patch.multiple(dppo, **own):
        dppo.train(config, replace(task, model=copy.deepcopy(task.model)))
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


KEPT = ("prompts_seen", "prompts_rolled", "completions_trained", "tokens_trained", "rollout_worth")
KEPT += ("prompt_worth", "tokens_generated", "informative", "noise", "noise_of_one")


def kept(records):
    """What is saved: {name: value of each step}, and [step, seconds, accuracy] of evaluations."""
    result = {"curve": []}
    for record in records:
        if "evaluation" in record:
            values = record["step"], record["cumulative_seconds"], record["evaluation"]["accuracy"]
            result["curve"].append([round(value, 4) for value in values])
    for name in KEPT:
        result[name] = [round(record[name], 5) for record in records[1:]]
    return result


def runs_of(name, results):
    """{arm: {seed: run}} of an experiment in the results, to which it adds what is in RUNS."""
    runs = results.setdefault("experiments", {}).setdefault(name, {}).setdefault("runs", {})
    for path in sorted((RUNS / name).glob("*.json")):
        arm, _, seed = path.stem.rpartition("-")
        if seed.isdigit():
            runs.setdefault(arm, {})[seed] = json.loads(path.read_text())
    return runs


def make_runs(name, seeds, task):
    """Makes RUNS/name/arm-seed.json of each run that is missing there and was not gathered."""
    measure = dppo.evaluate if name == "digits" else probability
    for arm, of_arm in ARMS[name].items():
        runs = runs_of(name, json.loads(RESULTS.read_text()))
        for seed in seeds:
            path = RUNS / name / f"{arm}-{seed}.json"
            if path.exists() or str(seed) in runs.get(arm, {}):
                continue
            settings = (DIGITS if "digits" in name else CALCULATING) | of_arm | {"seed": seed}
            folder = path.with_suffix("")
            result = {"measured": measured_worth(folder, task, settings)} if name == "worth" else {}
            if name == "digits by gradients":
                with patch.object(dppo, "dppo_step", partial(measured_step, dppo.dppo_step)):
                    result = [record["groups"] for record in train(folder, task, **settings)[1:]]
            else:
                result |= kept(train(folder, task, measure, **settings)) | {"settings": settings}
            path.write_text(json.dumps(result))
            shutil.rmtree(folder)
            print(f"{name}, {arm}, seed {seed} is complete", flush=True)


# ==== What a rollout is worth by true gradients ====
def squared_norms(model, sequences, A, config):
    """|g|^2 of the gradient of each group: B G sequences, (B, G) advantages -> (B,) float64."""
    G, squares = config.group_size, torch.zeros(len(A), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = replace(config, max_grad_norm=1e9, output_dir="-")
    for q in A.any(dim=1).nonzero().flatten().tolist():
        group = sequences[G * q : G * (q + 1)]
        lengths = torch.tensor([len(sequence.completion) for sequence in group])
        inputs = (A[q], 1 / (G * lengths), None, None, settings)
        squares[q] = dppo.train_step(model, optimizer, group, *inputs)["grad_norm"] ** 2
    return squares


def measured_step(real, task, *inputs):
    """A step. Its record gets N, B and, of each group that has a gradient, its prompt's weight w,
    g = |g|^2 and A, the mean A^2. As g is measured on a copy of the model, the run is the same."""
    model = copy.deepcopy(task.model)  # before the update
    step = real(task, *inputs)
    g = squared_norms(model, step.sequences, step.A, config=inputs[-1])
    groups = {"w": step.w_q, "g": g, "A": step.A.square().mean(dim=1)}
    for name, values in groups.items():
        groups[name] = [float(f"{value:.4g}") for value in values[step.A.any(dim=1)].tolist()]
    step.updates[-1]["groups"] = {"N": step.N, "B": len(g)} | groups
    return step


def measured_worth(folder, task, settings):
    """-> {step: pi of each prompt, and its s^2, by |g|^2 and by A^2}."""
    path = folder.with_suffix(".measured.json")
    result = json.loads(path.read_text()) if path.exists() else {}
    for step in (48, 72, 96):
        if str(step) in result:
            continue
        train(folder, task, probability, **settings | {"steps": step})
        config = dppo.Config(**settings)
        saved = torch.load(folder / "checkpoint.pt", "cpu", weights_only=True)
        rule = config.rule_class(config, len(task.train))
        rule.memory |= saved["memory"]
        of_step = replace(task, model=copy.deepcopy(task.model))
        for weight, value in zip(of_step.model.parameters(), saved["weights"]):
            weight.data.copy_(value)
        transformers.set_seed(1_000 * config.seed + step)
        squares = torch.zeros(2, len(task.train), dtype=torch.float64)  # by |g|^2, by A^2
        for _ in range(2):
            sequences, rewards, _ = dppo.rollout(of_step, task.train, config.group_size, config)
            A = dppo.group_advantages(rewards)
            squares[1] += A.square().mean(dim=1) / 2
            squares[0] += squared_norms(of_step.model, sequences, A, config) / 2
        pi = rule.prompt_probabilities()
        result[str(step)] = {"pi": pi.tolist(), "g": squares[0].tolist(), "A": squares[1].tolist()}
        path.write_text(json.dumps(result))
    path.unlink()
    return result


def inverse_worth(pi, squares):
    """-> 1/worth of these pi, and of the best, which are in proportion to s."""
    pi, squares = torch.tensor(pi).double(), torch.tensor(squares).double()
    of_rule = pi.mean() * (squares / pi).mean() / squares.mean()
    return of_rule.item(), (squares.sqrt().mean() ** 2 / squares.mean()).item()


def one_group(path):
    """A group of eight completions whose rewards differ, with what dppo makes of them."""
    task = calculating(path, SIZES["worth"])
    config = dppo.Config(**CALCULATING)
    rule, generator = config.rule_class(config, len(task.train)), torch.Generator().manual_seed(0)
    transformers.set_seed(0)
    for example in task.train:
        sequences, rewards, _ = dppo.rollout(task, [example], 8, config)
        A = dppo.group_advantages(rewards)
        if example["kind"] == "middle" and 1 < rewards.sum() < 5:
            pi = rule.completion_probabilities(A, torch.ones(1))
            w = dppo.prune_completions(rule, A, torch.ones(1), generator)
            texts = task.tokenizer.batch_decode([sequence.completion for sequence in sequences])
            values = {"rewards": rewards, "A": A, "pi": pi, "weights": w}
            lists = {name: value[0].tolist() for name, value in values.items()}
            return {"prompt": example["prompt"], "completions": texts} | lists
    raise LookupError("no group has both right and wrong completions")


# ==== Analyses: what was decided beforehand ====
def interval(values):
    """Mean and 95% t-interval of paired differences."""
    half = T_QUANTILES[len(values)] * stdev(values) / len(values) ** 0.5
    return [round(mean(values) + shift, 4) for shift in (0, -half, half)]


def mean_of_curve(run, after=0):
    return mean(value for step, _, value in run["curve"] if step > after)


def differences(runs, arm, control, after=0):
    """The mean over all evaluations after a step, arm minus control, of each seed of both."""
    pairs = [(runs[arm][n], runs[control][n]) for n in sorted(runs[arm].keys() & runs[control])]
    return [mean_of_curve(one, after) - mean_of_curve(other, after) for one, other in pairs]


def worths(of_arm, prompts):
    """Mean, least and most of prompt_worth, after 4 epochs of so many prompts and at the end."""
    at = [sum(seen < 4 * prompts for seen in accumulate(run["prompts_seen"])) for run in of_arm]
    result = {}
    for name, steps in {"after 4 epochs": at, "at the end": [-1] * len(at)}.items():
        values = [run["prompt_worth"][step] for run, step in zip(of_arm, steps)]
        result[f"prompt_worth {name}"] = [round(mean(values), 3), min(values), max(values)]
    return result


def noise(run, prompts):
    """The noise of all steps by A^2, over that of so many prompts a step without pruning."""
    return sum(run["noise"]) / (sum(run["noise_of_one"]) / prompts)


def tokens_until(run, level):
    """Tokens generated until an evaluation has reached the level; infinite if none has."""
    for step, _, value in run["curve"]:
        if value >= level:
            return sum(run["tokens_generated"][:step])
    return math.inf


def analysis_of_digits(runs):
    result = {}
    for arm, of_seed in runs.items():
        of_arm = list(of_seed.values())
        result[arm] = {"mean of all evaluations": round(mean(map(mean_of_curve, of_arm)), 4)}
        rolled = [8 * sum(run["prompts_rolled"][32:]) for run in of_arm]
        result[arm]["rollouts after the first epoch"] = round(mean(rolled))
        trained = round(mean(sum(run["completions_trained"]) for run in of_arm))
        result[arm]["completions trained"] = trained
        result[arm]["noise"] = round(mean(noise(run, 32) for run in of_arm), 3)
        result[arm]["seconds"] = round(mean(run["curve"][-1][1] for run in of_arm), 1)
        if arm != "grpo-skip":
            result[arm]["minus grpo-skip"] = interval(differences(runs, arm, "grpo-skip"))
            result[arm]["as good"] = result[arm]["minus grpo-skip"][1] > -0.02
        if arm == "dppo-proportional":
            result[arm] |= worths(of_arm, prompts=1024)
    return result


def noise_by(name, steps, prompts=None, most=math.inf):
    """The noise of steps by these squares, over that of so many prompts a step without pruning, or
    of as many as were rolled out. A group adds at most `most` to the noise of a step."""
    pruned = unpruned = 0.0
    for step in steps:
        M, N = prompts or step["B"], step["N"]
        for w, square in zip(step["w"], step[name]):
            pruned += M * min((w / N) ** 2 * square, most)
            unpruned += M * (M * w / N) * min(square / M**2, most)  # M w/N of M would be like it
    return round(pruned / unpruned, 3)


def analysis_of_gradients(runs):
    parts = {seed: steps[32:] for seed, steps in runs["dppo-proportional"].items()}
    parts["all"] = [*chain(*parts.values())]
    result = {}
    for part, steps in parts.items():
        result[part] = {f"1/worth by {name}^2": noise_by(name, steps) for name in ("g", "A")}
        result[part]["1/worth by g^2, cut"] = noise_by("g", steps, most=1.0)
        result[part]["noise by g^2"] = noise_by("g", steps, 32)
        result[part]["noise by g^2, cut"] = noise_by("g", steps, 32, most=1.0)
    return result


def analysis_of_worth(runs):
    result = {}
    for arm, of_seed in runs.items():
        result[arm] = {}
        for by in ("g", "A"):
            of_rule, of_best = [], []  # a seed's mean of the logarithm
            for run in of_seed.values():
                pairs = [inverse_worth(at["pi"], at[by]) for at in run["measured"].values()]
                of_rule.append(mean(math.log(rule) for rule, _ in pairs))
                of_best.append(mean(math.log(best) for _, best in pairs))
            values = [math.exp(value) for value in interval(of_rule)]
            result[arm][f"1/worth by {by}^2"] = [round(value, 3) for value in values]
            result[arm][f"of the best by {by}^2"] = round(math.exp(mean(of_best)), 3)
        for name in ("rollout_worth", "prompt_worth"):
            result[arm][name] = round(mean(run[name][-1] for run in of_seed.values()), 3)
    return result


def analysis_of_equal_noise(runs):
    control = "grpo-skip, 16"
    result = {}
    for arm in runs:
        of_arm = list(runs[arm].values())
        result[arm] = {"seeds": len(of_arm), "noise": round(mean(noise(r, 16) for r in of_arm), 3)}
        result[arm]["mean of all evaluations"] = round(mean(map(mean_of_curve, of_arm)), 4)
        for name in ("prompts_rolled", "tokens_generated", "tokens_trained"):
            result[arm][name] = round(mean(sum(run[name]) for run in of_arm))
        if arm == control:
            continue
        if arm == "dppo-proportional":
            result[arm] |= worths(of_arm, prompts=384)
        for part, after in {"": 0, ", after the first epoch": 24, ", at the end": 84}.items():
            result[arm]["minus control" + part] = interval(differences(runs, arm, control, after))
        ratios = []
        for seed in sorted(runs[arm].keys() & runs[control].keys()):
            level = runs[control][seed]["curve"][-1][2]
            tokens = tokens_until(runs[control][seed], level)
            ratios.append(round(tokens_until(runs[arm][seed], level) / tokens, 3))
        reached = [ratio for ratio in ratios if ratio < math.inf]
        result[arm]["tokens until the control's end, over the control's"] = sorted(reached)
        result[arm]["seeds in which it gets there"] = f"{len(reached)} of {len(ratios)}"
    return result


ANALYSES = {"digits": analysis_of_digits, "worth": analysis_of_worth}
ANALYSES |= {"equal-noise": analysis_of_equal_noise, "digits by gradients": analysis_of_gradients}


def table(analysis):
    """{arm: {measure: value}} as a table in markdown, an arm a line."""
    names = list(dict.fromkeys(chain(*analysis.values())))
    lines = [["", *names], ["---"] * (1 + len(names))]
    for arm, values in analysis.items():
        lines.append([arm, *(str(values.get(name, "")) for name in names)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gather():
    """Adds what is in RUNS to RESULTS, and analyses what has two seeds of every arm."""
    results = json.loads(RESULTS.read_text())
    saved = results.setdefault("experiments", {})
    if (RUNS / "group.json").exists():
        saved["group"] = json.loads((RUNS / "group.json").read_text())
    for name, analysis in ANALYSES.items():
        runs = runs_of(name, results)
        saved[name].pop("analysis", None)
        if min(len(runs.get(arm, {})) for arm in ARMS[name]) > 1:
            saved[name]["analysis"] = analysis(runs)
            print(f"\n{name}\n{table(saved[name]['analysis'])}")
    RESULTS.write_text(json.dumps(results).replace('"curve"', '\n"curve"') + "\n")
    draw_picture(results)


def draw_picture(results):
    """README's picture: what the weights are for, and accuracy over completions generated."""
    import matplotlib.pyplot as plt

    plt.rc("font", size=11)
    plt.rc("axes", titleweight="bold", titlesize=12)
    colours = {"grpo": "black", "grpo-skip": "0.5", "dppo": "#0072B2", "CPPO": "#E69F00"}
    colours |= {"dppo-proportional": "#009E73", "dppo without weights": "#D55E00"}
    fig, panels = plt.subplots(1, 2, figsize=(8.6, 3.9), layout="constrained")
    curves = {}  # (panel, method): (seeds, evaluations, 2)
    guesses = results["runs"]["small Qwen3 guesses or passes"]
    for name in ("grpo", "dppo", "dppo without weights", "CPPO"):
        of_seeds = [[point[::2][:2] for point in run["curve"]] for run in guesses[name].values()]
        curves[0, name] = torch.tensor(of_seeds)
    for name in ("grpo-skip", "dppo", "dppo-proportional"):
        of_seeds = []
        for run in results["experiments"]["digits"]["runs"][name].values():
            made = [0, *accumulate(8 * count / 1000 for count in run["prompts_rolled"])]
            of_seeds.append([(made[step], accuracy) for step, _, accuracy in run["curve"]])
        curves[1, name] = torch.tensor(of_seeds)
    shifts = {(0, "grpo"): -6, (0, "dppo"): 7, (0, "dppo without weights"): 0, (0, "CPPO"): -24}
    shifts |= {(1, "grpo-skip"): -12, (1, "dppo"): 3, (1, "dppo-proportional"): 12}
    for (panel, name), of_seeds in curves.items():
        for curve, width in [*zip(of_seeds, [0.6] * 8), (of_seeds.mean(dim=0), 3)]:
            panels[panel].plot(*curve.T, color=colours[name], linewidth=width)
        place = {"xytext": (6, shifts[panel, name]), "textcoords": "offset points", "va": "center"}
        text = name.replace(" weights", "\nweights")
        panels[panel].annotate(text, curve[-1], color=colours[name], weight="bold", **place)
    panels[0].set(title="Without weights, a model guesses", xlabel="step", xlim=(0, 166))
    panels[0].set(ylabel="guesses where passing pays more", xticks=range(0, 101, 25))
    panels[0].set(ylim=(-0.06, 1.05), yticks=[0, 0.25, 0.5, 0.75, 1])
    panels[1].set(title="Fewer rollouts, as much learned", xlim=(0, 98), ylim=(0.4, 0.95))
    panels[1].set(xlabel="completions generated, thousands", ylabel="accuracy, digits")
    panels[1].set(xticks=range(0, 61, 20))
    fig.savefig(PICTURE, dpi=140)


def main():
    name, seeds, *model = sys.argv[1:] or (None, "")
    if name is None:
        gather()
    elif name == "group":
        RUNS.mkdir(parents=True, exist_ok=True)
        (RUNS / "group.json").write_text(json.dumps(one_group(*model)))
    else:
        task = calculating(*model, SIZES[name]) if model else dppo.load_task(dppo.Config())
        make_runs(name, [int(seed) for seed in seeds.split(",")], task)


if __name__ == "__main__":
    sys.modules["experiments"] = sys.modules["__main__"]
    torch.set_num_threads(1)  # a process a core
    main()
