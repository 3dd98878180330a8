"""What pruning prompts is worth, measured, and what was decided of each experiment before it ran.

    python .github/experiments.py digits 0,1,2,3      # makes the runs of these seeds
    python .github/experiments.py hard 0,1 MODEL      # MODEL: a folder with SmolLM2-135M-Instruct
    python .github/experiments.py                     # gathers, analyses, draws (with matplotlib)

So are made "digits by gradients" 5,6,7, "digits, new seeds" and, with MODEL, pilot 100, "hard, on a
GPU", "hard, clipped, on a GPU", "timed, on a GPU" and group 0. An interrupted run goes on where it
was; one that needs another's history waits for the next call. Runs lie in runs/experiments, so that
several processes may make them; gathered, they are in .github/comparison.json, with each prompt's
successes and pi at every visit, norms before clipping and processor seconds. What is there under
"runs" was made by commit b079a0a, grpo and grpo-skip on digits by f8378fc, as today's code would.

DIGITS: does our rule learn as much from fewer rollouts? The embedded task, 250 steps, eight seeds,
from the same starting model: grpo, grpo-skip, dppo (both rates 0.7), and dppo-proportional with 0.9
for prompts and 0.7 for completions, with 0.9 and 0, and the latter with --history of the run of the
next seed. The control is grpo-skip with 17 prompts a step, as many as dppo-proportional (0.9, 0)
rolled out on seeds 0 to 2: if that learns as well, rollouts were never what was short. The mean of
all evaluations after step 0 is as good as grpo-skip's if the 95% interval of the paired difference
lies above -0.02; the gain is the rollouts over grpo-skip's. Expected: 0.53, 0.57 and, with history,
0.45. By true gradients ("digits by gradients", seeds 5 to 7): |g|^2 beside A^2 of each group with a
gradient, 1/worth by both after the first epoch, and noise over that of 32 unpruned prompts.
Expected: 0.66 to 0.70 by |g|^2. The rule was chosen by runs on seeds 0 to 2 and 5 to 7, so "digits,
new seeds" (8 to 15) has grpo-skip and dppo-proportional (0.9, 0), without and with history, judged
alone by the same criterion; expected, after the first eight seeds: 0.55 and 0.45.

HARD: does it pay on a real model, against a control that has chosen its own batch? Sums and
products for SmolLM2: of 192 prompts, 40 are sums of two digits, from which it learns, and 152
products, which it hardly ever gets right. Measured is the mean probability of the right answer to
96 held-out sums of two digits, without sampling, at every half epoch of the control.

The control chose its batch, alone ("pilot": grpo-skip, seed 100, never clipped, 15 epochs with 4, 8
and 16 prompts a step, 6.5 with 32). Before, the probability is 0.04; after 15 epochs it is 0.59,
0.58 and 0.55. Half of that rise, 0.30, took 383 to 418, 369 and 340 processor seconds with 4, 8 and
16 prompts, five epochs each, and more with 32; 26%, 47% and 71% of the steps had a gradient. So 16
prompts, 180 steps. Of their norms, one in twenty exceeded 5.28: so --max_grad_norm 6.

Arms, eight paired seeds: grpo-skip; dppo-proportional (0.9, 0), its first epoch included; the same
with --history of the run of the next seed; dppo (0.7, 0). Primary: processor seconds of rollout and
training until the level is reached, over those of grpo-skip with the same seed, as the mean of the
logarithms with its 95% interval. Beside it: completions generated until then. A run ends two
evaluations after it has reached the level, at the latest after 180 steps, and then counts at its
full length. A gain if the upper end is below 0.9, none if the lower end is above it, otherwise
undecided. Expected (simulated): 0.8 of the completions, 0.6 with history.

Two seeds of three arms were made so, on two cores ("hard"). As later machines could not multiply in
bfloat16, all eight seeds ran on an H200 ("hard, on a GPU"), at once. What shares a GPU cannot be
timed. So after those two, but before these ran, completions were made primary, with the same
bounds. Beside it: clipping at 1 ("hard, clipped, on a GPU", four seeds, planned for two) and 24
steps alone ("timed, on a GPU"; grpo makes grpo-skip's updates up to rounding).

GROUP: one real group of eight completions, with rewards and weights, for the notebook.
"""

import copy
import json
import math
import random
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from statistics import mean, median, stdev
from unittest.mock import patch

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo

RESULTS = Path(__file__).with_name("comparison.json")
PICTURE = Path(__file__).with_name("weights.png")
RUNS = Path("runs/experiments")
T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


# ==== Arms ====
DIGITS = {"steps": 250, "eval_every": 25, "save_every": 0}
HARD = {"learning_rate": 5e-6, "warmup_steps": 3, "max_grad_norm": 6.0, "temperature": 1.0}
HARD |= {"prompts_per_step": 16, "max_completion_tokens": 8, "micro_batch_tokens": 2048}
HARD |= {"steps": 180, "eval_every": 6, "save_every": 24}  # 15 epochs of the control
LEVEL = 0.3  # of the held-out probability, half of the control's rise in the pilot
SKIP = {"method": "grpo-skip"}
NEVER_CLIPPED = SKIP | {"max_grad_norm": 1000.0}
PROMPTS = {"prompt_prune_rate": 0.9, "completion_prune_rate": 0.0}
OURS = {"method": "dppo-proportional"} | PROMPTS
ARMS = {
    "digits": {
        "grpo": {"method": "grpo"},
        "grpo-skip": SKIP,
        "dppo": {"method": "dppo"},
        "dppo-proportional (0.9, 0.7)": OURS | {"completion_prune_rate": 0.7},
        "dppo-proportional (0.9, 0)": OURS,
        "dppo-proportional (0.9, 0), with history": OURS,
        "grpo-skip, as many rollouts": SKIP | {"prompts_per_step": 17},
    },
    "digits by gradients": {"dppo-proportional": OURS | {"completion_prune_rate": 0.7}},
    "pilot": {
        "4": NEVER_CLIPPED | {"prompts_per_step": 4, "steps": 720, "eval_every": 24},
        "8": NEVER_CLIPPED | {"prompts_per_step": 8, "steps": 360, "eval_every": 12},
        "16": NEVER_CLIPPED,
        "32": NEVER_CLIPPED | {"prompts_per_step": 32, "steps": 90, "eval_every": 3},
    },
    "hard": {
        "grpo-skip": SKIP,
        "dppo-proportional": OURS,
        "dppo": {"method": "dppo", "completion_prune_rate": 0.0},
        "dppo-proportional, with history": OURS,
    },
}
AT_1 = {"max_grad_norm": 1.0}
ARMS["hard, clipped, on a GPU"] = {"grpo-skip": SKIP | AT_1, "dppo-proportional": OURS | AT_1}
ARMS["hard, on a GPU"] = ARMS["hard"]
ALONE = OURS | {"steps": 24, "eval_every": 0}
ARMS["timed, on a GPU"] = {arm: ALONE | {"method": arm} for arm in dppo.RULES if arm != "dppo"}
NEW = [arm for arm in ARMS["digits"] if arm == "grpo-skip" or "(0.9, 0)" in arm]
ARMS["digits, new seeds"] = {arm: ARMS["digits"][arm] for arm in NEW}


# ==== Sums and products ====
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


def calculating(path):
    """SmolLM2 after 25 steps of demonstrations of all kinds, in which half of the sums of two
    digits have a random number as their answer; 40 sums of two digits and 152 products to train
    on; and 96 other sums of two digits, held out."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path, dtype=torch.bfloat16).to(dppo.DEVICE).eval()
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
        config = dppo.Config(temperature=1.0, micro_batch_tokens=2048)
        inputs = (sequences, torch.ones(size), shares, None, None, config)
        dppo.train_step(model, optimizer, *inputs)
    train = []
    for kind, count in (("middle", 40), ("hard", 152)):
        train += [question(kind, rng, tokenizer) for _ in range(count)]
    rng.shuffle(train)
    taken, held_out = {example["prompt"] for example in train}, []
    while len(held_out) < 96:
        example = question("middle", rng, tokenizer)
        if example["prompt"] not in taken:
            taken.add(example["prompt"])
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
class Enough(Exception):
    """Ends a run before its next step."""


def noting_step(real, task, *inputs):
    """A step. Its record gets what only the step tells: processor seconds, noises by A^2 (pruned or
    not), and of each visit the prompt, its successes in its group, and its pi."""
    started_at = time.process_time()
    step = real(task, *inputs)
    squares = step.A.square()
    step.updates[-1] |= {
        "processor_seconds": time.process_time() - started_at,
        "tokens_generated": sum(len(sequence.completion) for sequence in step.sequences),
        "informative": int(step.A.any(dim=1).sum()),
        "noise": (step.w.square() * squares).mean(dim=1).sum().item() / step.N**2,
        "noise_of_one": (step.w_q @ squares.mean(dim=1)).item() / step.N,
        "prompts": step.prompts.tolist(),
        "successes": step.rewards.sum(dim=1).tolist(),
        "pi": (1 / step.w_q).tolist(),
    }
    return step


def train(folder, task, step=noting_step, evaluate=dppo.evaluate, **settings):
    """A run, or the rest of it, from a copy of the task's model -> its records."""
    if not (folder / "checkpoint.pt").exists():
        shutil.rmtree(folder, ignore_errors=True)
    resume = str(folder) if folder.exists() else ""
    config = dppo.Config(**settings, output_dir=str(folder), resume=resume)
    own = {"evaluate": evaluate, "dppo_step": partial(step, dppo.dppo_step)}
    with patch.multiple(dppo, **own):
        dppo.train(config, replace(task, model=copy.deepcopy(task.model)))
    return records_of(folder)


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def train_until(level, folder, task, **settings):
    """A run that ends two evaluations after it has reached the level -> its records."""

    def step(real, *inputs):
        curve = [at["evaluation"] for at in records_of(folder) if "evaluation" in at]
        if any(at["accuracy"] >= level for at in curve[:-2]):
            raise Enough
        return noting_step(real, *inputs)

    with suppress(Enough):
        train(folder, task, step, probability, **settings)
    return records_of(folder)


OF_STEPS = ("prompts_rolled", "prompts_seen", "completions_trained", "tokens_generated")
OF_STEPS += ("tokens_trained", "grad_norm", "rollout_worth", "informative", "noise", "noise_of_one")
OF_STEPS += ("processor_seconds", "prompts", "successes", "pi")


def rounded(value):
    """Numbers, or lists of them, in four digits."""
    if isinstance(value, list):
        return [rounded(number) for number in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def kept(records):
    """What is saved: {name: value of each step}, and [step, seconds, accuracy] of evaluations."""
    result = {"curve": []}
    seconds = 0.0
    for record in records:
        seconds += record.get("processor_seconds", 0.0)
        if "evaluation" in record:
            values = record["step"], seconds, record["evaluation"]["accuracy"]
            result["curve"].append([round(value, 4) for value in values])
    return result | {name: rounded([record[name] for record in records[1:]]) for name in OF_STEPS}


def runs_of(name, results):
    """{arm: {seed: run}} of an experiment in the results, to which it adds what is in RUNS."""
    runs = results.setdefault("experiments", {}).setdefault(name, {}).setdefault("runs", {})
    for path in sorted((RUNS / name).glob("*.json")):
        arm, _, seed = path.stem.rpartition("-")
        runs.setdefault(arm, {})[seed] = json.loads(path.read_text())
    return runs


def make_run(name, arm, seed, task, folder):
    """-> what is saved of a run."""
    is_digits = name.startswith("digits")
    settings = (DIGITS if is_digits else HARD) | ARMS[name][arm] | {"seed": seed}
    if name == "digits by gradients":
        return [record["groups"] for record in train(folder, task, measured_step, **settings)[1:]]
    more = {}
    if arm.endswith("with history"):
        of, next_seed = arm.rpartition(",")[0], seed // 8 * 8 + (seed + 1) % 8
        more["history"] = str(folder.with_name(f"{of}-{next_seed}.memory"))
    if name.startswith("hard"):
        records = train_until(LEVEL, folder, task, **settings, **more)
    else:
        evaluate = dppo.evaluate if is_digits else probability
        records = train(folder, task, evaluate=evaluate, **settings, **more)
    return kept(records) | {"settings": settings}


def make_runs(name, seeds, task):
    """Makes RUNS/name/arm-seed.json of each run that is missing there and was not gathered."""
    gathered = runs_of(name, json.loads(RESULTS.read_text()))
    for seed in seeds:
        for arm in ARMS[name]:
            path = RUNS / name / f"{arm}-{seed}.json"
            if path.exists() or str(seed) in gathered.get(arm, {}):
                continue
            folder = path.with_suffix("")
            try:
                result = make_run(name, arm, seed, task, folder)
            except dppo.Refused as error:  # no history yet
                print(error)
                continue
            memory = path.with_suffix(".memory")  # stays, for a run with history
            memory.mkdir(exist_ok=True)
            saved = torch.load(folder / "checkpoint.pt", "cpu", weights_only=True)
            del saved["weights"], saved["optimizer"]
            torch.save(saved, memory / "checkpoint.pt")
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
        groups[name] = rounded(values[step.A.any(dim=1)].tolist())
    step.updates[-1]["groups"] = {"N": step.N, "B": len(g)} | groups
    return step


def one_group(path):
    """A group of eight completions whose rewards differ, with what dppo makes of them."""
    task = calculating(path)
    config = dppo.Config(**HARD)
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


def ratios(values):
    """The same of ratios, by their logarithms."""
    return [round(math.exp(value), 3) for value in interval([math.log(ratio) for ratio in values])]


def mean_of_curve(run):
    return mean(value for step, _, value in run["curve"] if step > 0)


def pairs(runs, arm):
    """(run, run of grpo-skip) of each seed of both."""
    control = runs["grpo-skip"]
    return [(runs[arm][seed], control[seed]) for seed in sorted(runs[arm].keys() & control)]


def noise(run, prompts):
    """The noise of all steps by A^2, over that of so many prompts a step without pruning."""
    return sum(run["noise"]) / (sum(run["noise_of_one"]) / prompts)


def analysis_of_digits(runs):
    result = {}
    for arm, of_seed in runs.items():
        of_arm = list(of_seed.values())
        told = {"mean of all evaluations": round(mean(map(mean_of_curve, of_arm)), 4)}
        result[arm] = told
        told["rollouts"] = round(8 * mean(sum(run["prompts_rolled"]) for run in of_arm))
        later = [sum(run["prompts_rolled"][32:]) for run in of_arm]
        told["rollouts after the first epoch"] = round(8 * mean(later))
        told["completions trained"] = round(mean(sum(run["completions_trained"]) for run in of_arm))
        told["noise"] = round(mean(noise(run, 32) for run in of_arm), 3)
        if arm != "grpo-skip":
            differences = [mean_of_curve(a) - mean_of_curve(b) for a, b in pairs(runs, arm)]
            told["minus grpo-skip"] = interval(differences)
            told["as good"] = told["minus grpo-skip"][1] > -0.02
    return result


def noise_by(name, steps, prompts=None):
    """The noise of steps by these squares, over that of so many prompts a step without pruning, or
    of as many as were rolled out."""
    pruned = unpruned = 0.0
    for step in steps:
        for w, square in zip(step["w"], step[name]):
            share = w / step["N"]
            pruned += (prompts or step["B"]) * share**2 * square
            unpruned += share * square  # M share of M prompts would be like it: M share square/M
    return round(pruned / unpruned, 3)


def analysis_of_gradients(runs):
    parts = {seed: steps[32:] for seed, steps in runs["dppo-proportional"].items()}
    parts["all"] = [*chain(*parts.values())]
    result = {}
    for part, steps in parts.items():
        result[part] = {f"1/worth by {name}^2": noise_by(name, steps) for name in ("g", "A")}
        result[part]["noise by g^2"] = noise_by("g", steps, 32)
    return result


def until(run, level, name):
    """The sum of a measure until an evaluation has reached the level, or of the whole run."""
    steps = min((step for step, _, value in run["curve"] if value >= level), default=None)
    return sum(run[name][:steps])


def analysis_of_hard(runs):
    result = {}
    for arm, of_seed in runs.items():
        of_arm = list(of_seed.values())
        reached = sum(max(value for *_, value in run["curve"]) >= LEVEL for run in of_arm)
        clipped = []
        for run in of_arm:
            clipped += [norm > run["settings"]["max_grad_norm"] for norm in run["grad_norm"]]
        result[arm] = {"reach the level": f"{reached} of {len(of_arm)}"}
        result[arm]["clipped"] = round(mean(clipped), 3)
        for name in ("processor_seconds", "prompts_rolled", "completions_trained"):
            measured = partial(until, level=LEVEL, name=name)
            result[arm][name] = round(mean(map(measured, of_arm)), 1)
            if arm != "grpo-skip":
                of_seeds = [measured(one) / measured(other) for one, other in pairs(runs, arm)]
                _, low, high = result[arm][f"{name} over grpo-skip's"] = ratios(of_seeds)
                verdict = "yes" if high < 0.9 else "no" if low > 0.9 else "undecided"
                result[arm][f"{name}, of each seed"] = rounded(of_seeds)
                result[arm][f"{name}, a gain"] = verdict
    return result


def analysis_of_times(runs):
    result = {}
    for arm, of_seed in runs.items():
        seconds = [median(run["processor_seconds"]) for run in of_seed.values()]
        result[arm] = {"processor seconds of a step, by seed": rounded(seconds)}
    return result


ANALYSES = dict.fromkeys(("digits", "digits, new seeds"), analysis_of_digits)
ANALYSES |= {"digits by gradients": analysis_of_gradients, "timed, on a GPU": analysis_of_times}
ANALYSES |= dict.fromkeys([name for name in ARMS if "hard" in name], analysis_of_hard)


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
    for name in ARMS:
        runs = runs_of(name, results)
        saved[name].pop("analysis", None)
        if name in ANALYSES and min(len(runs.get(arm, {})) for arm in ARMS[name]) > 1:
            saved[name]["analysis"] = ANALYSES[name](runs)
            print(f"\n{name}\n{table(saved[name]['analysis'])}")
    text = json.dumps(results, separators=(",", ":")).replace('"curve"', '\n"curve"')
    RESULTS.write_text(text + "\n")
    draw_picture(results)


def draw_picture(results):
    """README's picture: what weights are for, and what was learned from how many completions."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.titleweight": "bold", "axes.titlesize": 12})
    colours = {"grpo": "black", "grpo-skip": "0.5", "dppo": "#0072B2", "CPPO": "#E69F00"}
    colours |= {"dppo-proportional": "#009E73", "dppo without weights": "#D55E00"}
    colours |= {"dppo-proportional, with history": "#CC79A7"}
    fig, panels = plt.subplots(1, 2, figsize=(8.6, 3.9), layout="constrained")
    curves = {}  # (panel, method): (seeds, evaluations, 2)
    guesses = results["runs"]["small Qwen3 guesses or passes"]
    for name in ("grpo", "dppo", "dppo without weights", "CPPO"):
        of_seeds = [[point[::2][:2] for point in run["curve"]] for run in guesses[name].values()]
        curves[0, name] = torch.tensor(of_seeds)
    for name in ARMS["hard, on a GPU"]:
        of_seeds = []
        for run in results["experiments"]["hard, on a GPU"]["runs"][name].values():
            made = [0, *accumulate(8 * count / 1000 for count in run["prompts_rolled"])]
            of_seeds.append([(made[step], value) for step, _, value in run["curve"]])
        shortest = min(map(len, of_seeds))
        curves[1, name] = torch.tensor([curve[:shortest] for curve in of_seeds])
    shifts = [(6, -6), (6, 7), (6, 0), (6, -24), (6, -4), (-20, 43), (2, 24), (-88, 60)]
    for ((panel, name), of_seeds), shift in zip(curves.items(), shifts):
        for curve, width in [*zip(of_seeds, [0.6] * 8), (of_seeds.mean(dim=0), 3)]:
            panels[panel].plot(*curve.T, color=colours[name], linewidth=width)
        place = {"xytext": shift, "textcoords": "offset points", "va": "center"}
        text = name.replace(" weights", "\nweights")
        panels[panel].annotate(text, curve[-1], color=colours[name], weight="bold", **place)
    panels[0].set(title="Without weights, a model guesses", xlabel="step", xlim=(0, 166))
    panels[0].set(ylabel="guesses where passing pays more", xticks=range(0, 101, 25))
    panels[0].set(ylim=(-0.06, 1.05), yticks=[0, 0.25, 0.5, 0.75, 1])
    panels[1].set(title="Fewer rollouts, as much learned", xlim=(0, 14.5), ylim=(0, 0.5))
    panels[1].set(xlabel="completions generated, thousands", xticks=range(0, 13, 3))
    panels[1].set(ylabel="probability of right sums, SmolLM2", yticks=[0, 0.1, 0.2, 0.3, 0.4])
    fig.savefig(PICTURE, dpi=140)


def main():
    name, seeds, *model = sys.argv[1:] or (None, "")
    if name is None:
        gather()
    elif name == "group":
        RUNS.mkdir(parents=True, exist_ok=True)
        (RUNS / "group.json").write_text(json.dumps(one_group(*model)))
    else:
        task = calculating(*model) if model else dppo.load_task(dppo.Config())
        make_runs(name, [int(seed) for seed in seeds.split(",")], task)


if __name__ == "__main__":
    sys.modules["experiments"] = sys.modules["__main__"]
    torch.set_num_threads(1)  # a process a core
    main()
