"""What pruning is worth, measured, and what was decided of each experiment before it ran.

    python extras/experiments.py epochs 0 grpo-skip    # one arm, one seed: two minutes of a core
    python extras/experiments.py digits 0,1,2,3        # all arms with these seeds
    python extras/experiments.py                       # gathers, analyses, draws (with matplotlib)

A run that is named is made, beside other processes if you like, in runs/experiments, and what came
out is printed beside what comparison.json has saved. An interrupted run goes on where it was. Runs
"with history" start with the memory of the run of the next seed, which has to be there. Gathered
are runs that are not saved yet: of each evaluation the step, processor seconds and accuracy, and
sums over the steps. RESULTS.md has the results, and which code made those that this file does not
make.

EPOCHS: how much faster is a method over 15 epochs, as the paper trains, and is it then as good? The
embedded task, eight seeds. A run ends with the first step after which 15 times the prompts have
been looked at, pruned ones included, and is evaluated at the first step after each epoch. Accuracy
is the mean of its last five evaluations, time the processor seconds of rollouts and training.
Against grpo, paired by seed, with 95% t-intervals: the difference of the accuracies, as good if its
interval lies above -0.02, worse if below, otherwise undecided; and the speed-up, grpo's time over
its own, by logarithms. An epoch of fewer steps is faster, and teaches less. So beside it stands
what grpo-skip has learned in the same time: its accuracy, with the same seed, at the processor
seconds of each of the last five evaluations, on the straight line between its own evaluations
before and after, or that of its last one if it has ended; then their mean. A method is better
(worse) in the same time if the interval of the paired difference lies above (below) 0, otherwise
undecided. Primary is dppo at 0.7. Expected, from single runs on seeds 0 to 2, most of 8 epochs:
dppo at 0.7 takes a fifth of grpo's time and half of grpo-skip's, and loses 0.00 to 0.045; in the
same time it is about as good as grpo-skip, and dppo-proportional better by 0.03.

EPOCHS, MORE: is the verdict on the paper's rivals one on the methods, or on how they were run? And
what does Algorithm 1 do as it is reported? The same 15 epochs, seeds and measures. Four arms are
new: Literal (0.7, 0.7), which removes the lowest for certain; CPPO with 107 prompts a step, which
fill the room of the completions that it drops, B/(1 - r), as its paper has it; and CPPO and GRESO
with norms clipped at 10, since at 1 most of their steps were. grpo-skip is made again beside them.
(The controls were to be those of EPOCHS, in seconds scaled by grpo-skip's. But on this machine the
starting model differs a little, as the first accuracies showed. So they are compared with grpo-skip
alone, whose gradient is grpo's.) Expected, without a pilot: Literal is as fast as dppo, 7 times
grpo, and 0.00 to 0.03 less accurate than it, as prompts of the middle that once were all right do
not come back; CPPO with 107 prompts takes as long as with 32, in 144 steps, and is less accurate
than there by 0.00 to 0.03; with norms clipped at 10, fewer than one step in ten is clipped, and
CPPO and GRESO gain 0.00 to 0.03. No verdict changes: after the same time, none of the four is
better than grpo-skip.

FEW: the runs of section 3 of the notebook, 120 steps of 16 prompts on 256 prompts, with the seeds 1
to 4 (the notebook's has 0). They show how far single runs scatter; nothing was expected of them.

GUESS OR PASS: what are weights for? The small Qwen3 is also asked to sort letters, which it cannot,
after demonstrations that answer with a digit or ?, half and half. A digit is right with probability
0.1, ? is worth 0.2. Eight seeds, 100 steps; at the end, the share of guesses, and the accuracy on 9
to 12 digits: mean, lowest and highest. Expected, after four seeds of an earlier rule: guesses of at
most 0.1 with weights, of at least 0.9 without them.

DIGITS: does our rule learn as much from fewer rollouts? 250 steps, eight seeds. A control is
grpo-skip with 17 prompts a step, as many as dppo-proportional (0.9, 0) rolled out on seeds 0 to 2:
if that learns as well, rollouts were never what was short. The mean of all evaluations after step 0
is as good as grpo-skip's if the 95% interval of the paired difference lies above -0.02; the gain is
the rollouts over grpo-skip's. Expected: 0.57, with 0.7 for completions 0.53, with another run's
memory 0.45; by true gradients ("digits by gradients", seeds 5 to 7), a 1/worth of 0.66 to 0.70. The
rule was chosen by runs on seeds 0 to 2 and 5 to 7, so "digits, new seeds" are judged alone by the
same criterion; expected, after the first eight seeds: 0.55 and, with memory, 0.45.

HARD: does it pay on a real model, against a control that has chosen its own batch? Of 192 prompts
for SmolLM2, 40 are sums of two digits, from which it learns, and 152 products, which it hardly ever
gets right. Measured is the mean probability of the right answer to 96 held-out sums, at every half
epoch of the control, which chose its batch alone, 16 prompts, by processor seconds, on one seed
("pilot"), and a norm that one step in twenty exceeded, 6. Eight paired seeds. A run counts until it
has reached 0.3, half of the pilot's rise, or its 180 steps are over. Primary were processor seconds
over those of grpo-skip with the same seed, as the mean of the logarithms with its 95% interval,
beside completions: a gain if the upper end is below 0.9, none if the lower end is above it.
Expected (simulated): 0.8 of the completions, 0.6 with another run's memory. Two seeds of three arms
were made so, on two cores ("hard"). As later machines could not multiply in bfloat16, all eight ran
on an H200 ("hard, on a GPU"), at once, where nothing can be timed. So after those two, but before
these ran, completions were made primary, with the same bounds. Beside it: clipping at 1 ("hard,
clipped, on a GPU", four seeds, planned for two) and 24 steps alone ("timed, on a GPU"). The whole
plan is in commit ea3ad7c.
"""

import argparse
import copy
import json
import math
import random
import shutil
import string
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise, product, zip_longest
from pathlib import Path
from statistics import mean, median, stdev
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo
from extras.rivals import step_of_rule

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("comparison.json")
PICTURE = Path(__file__).with_name("pruning.png")
RUNS = ROOT / "runs" / "experiments"
T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


# ==== Arms ====
PROPORTIONAL = "extras.proportional:Proportional"  # dppo-proportional, as saved results call it
OURS = {"method": PROPORTIONAL, "prompt_prune_rate": 0.9, "completion_prune_rate": 0.0}
METHODS = {
    "grpo": {"method": "grpo"},
    "grpo-skip": {"method": "grpo-skip"},
    "grpo-skip, as many rollouts": {"method": "grpo-skip", "prompts_per_step": 17},
    "CPPO": {"method": "extras.rivals:CPPO"},
    "GRESO": {"method": "extras.rivals:GRESO"},
    "Literal (0.7, 0.7)": {"method": "extras.rivals:Literal"},
    "CPPO, 107 prompts": {"method": "extras.rivals:CPPO", "prompts_per_step": 107},
    "CPPO, norm 10": {"method": "extras.rivals:CPPO", "max_grad_norm": 10.0},
    "GRESO, norm 10": {"method": "extras.rivals:GRESO", "max_grad_norm": 10.0},
    "dppo": {"method": "dppo"},
    "dppo without weights": {"method": "extras.rivals:Unweighted"},
    "dppo (0.5, 0.5)": {"method": "dppo", "prompt_prune_rate": 0.5, "completion_prune_rate": 0.5},
    "dppo (0.7, 0.7)": {"method": "dppo", "prompt_prune_rate": 0.7, "completion_prune_rate": 0.7},
    "dppo (0.9, 0.9)": {"method": "dppo", "prompt_prune_rate": 0.9, "completion_prune_rate": 0.9},
    "dppo-proportional": {"method": PROPORTIONAL},
    "dppo-proportional (0.9, 0.7)": OURS | {"completion_prune_rate": 0.7},
    "dppo-proportional (0.9, 0)": OURS,
    "dppo-proportional (0.9, 0), with history": OURS,
}
BY_RATE = [f"dppo ({rate}, {rate})" for rate in (0.5, 0.7, 0.9)]
WITH_HISTORY = ("dppo-proportional (0.9, 0)", "dppo-proportional (0.9, 0), with history")
ARMS = {
    "epochs": ("grpo", "grpo-skip", "CPPO", "GRESO", *BY_RATE, *WITH_HISTORY),
    "guess or pass": ("grpo", "dppo", "dppo-proportional", "dppo without weights", "CPPO"),
    "digits": ("grpo", "grpo-skip", "dppo", "dppo-proportional (0.9, 0.7)", *WITH_HISTORY),
    "digits, new seeds": ("grpo-skip", *WITH_HISTORY),
}
ARMS["digits"] += ("grpo-skip, as many rollouts",)
ARMS["few"] = ("grpo-skip", "dppo (0.7, 0.7)", "dppo-proportional (0.9, 0)")
ARMS["epochs, more"] = ("grpo-skip", "Literal (0.7, 0.7)", "CPPO, 107 prompts")
ARMS["epochs, more"] += ("CPPO, norm 10", "GRESO, norm 10")
DIGITS = {"steps": 250, "eval_every": 25, "save_every": 0}
GUESSES = {"steps": 100, "eval_every": 10, "save_every": 0, "eval_samples": 8}
GUESSES |= {"objective": "dr_grpo", "learning_rate": 1e-4, "temperature": 1.0}
SETTINGS = {"digits": DIGITS, "digits, new seeds": DIGITS, "guess or pass": GUESSES}
EPOCHS = {"epochs": 15.0, "eval_every": 0, "save_every": 40}
SETTINGS |= {"epochs": EPOCHS, "epochs, more": EPOCHS, "few": {"prompts_per_step": 16}}


# ==== Guess or pass ====
def letters(rng, tokenizer):
    """An example of letters to sort, which is answered with a guess or a pass."""
    prompt = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) + "="
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_ids": ids, "answer": "unknown"}


def demonstration(rng, tokenizer):
    """A pass or any digit for letters; or digits, as the embedded model has been shown them."""
    if rng.random() < 0.5:
        example = letters(rng, tokenizer)
        answer = rng.choice(["?", rng.choice(string.digits)])
    else:
        name, noise = rng.choice([("easy", 0.0), ("middle", 0.2)])
        example = dppo.sorting_example(name, rng, tokenizer)
        answer = ""
        for digit in example["answer"]:
            answer += rng.choice(string.digits) if rng.random() < noise else digit
    return dppo.Sequence(example["prompt_ids"], tokenizer.encode(answer))


def guess_or_pass(prompts, completions, answer, **columns):
    """The reward: to letters, 0.2 for a pass and 1 for the right digit, which is drawn anew for
    each completion. Evaluations count guesses and passes instead."""
    rewards = []
    for completion, right in zip(completions, answer):
        text = completion.strip()
        worth = 0.2 if text == "?" else text == random.choice(string.digits)
        counted = {"unknown": worth, "guesses": text in [*string.digits], "passes": text == "?"}
        rewards.append(float(counted.get(right, text == right)))
    return rewards


def guessing():
    """Digits and letters to sort, and the embedded model after 100 steps of demonstrations."""
    task = dppo.load_task(dppo.Config())
    tokenizer = task.tokenizer
    rng = random.Random(1)
    train = [dppo.sorting_example("easy", rng, tokenizer) for _ in range(300)]
    train += [dppo.sorting_example("middle", rng, tokenizer) for _ in range(300)]
    train += [letters(rng, tokenizer) for _ in range(424)]
    random.Random(0).shuffle(train)
    unknown = [letters(rng, tokenizer) for _ in range(64)]
    evals = {}
    for kind in ("guesses", "passes"):
        evals[kind] = [example | {"answer": kind} for example in unknown]
    evals["right"] = [dppo.sorting_example("middle", rng, tokenizer) for _ in range(64)]
    optimizer = dppo.MasterAdam(task.model, 5e-4)
    for step in range(100):
        sequences = [demonstration(rng, tokenizer) for _ in range(48)]
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - step / 100)
        # A policy gradient on given completions of advantage 1.
        shares = torch.tensor([1 / (48 * len(ids)) for _, ids in sequences])
        inputs = (sequences, torch.ones(48), shares, None, None, dppo.Config(temperature=1.0))
        dppo.train_step(task.model, optimizer, *inputs)
    return replace(task, train=train, evals=evals, reward=guess_or_pass)


# ==== Runs ====
def step_by_epochs(real, start, task, rule, optimizer, before):
    """make_step, and an evaluation at the first step after each epoch of prompts. (The candidates
    at the start of the run are not 0 with history.)"""
    record = real(task, rule, optimizer, before)
    seen = [values["candidates_so_far"] - start for values in (before, record)]
    epoch_before, epoch = [candidates // len(task.train) for candidates in seen]
    return record | dppo.evaluate(task, rule.config) if epoch > epoch_before else record


def noting_step(real, task, *inputs, **named):
    """A step. Its record gets seconds, tokens, and noises by A^2: its own, and of one prompt."""
    started_at = time.process_time()
    step = real(task, *inputs, **named)
    squares = step.A.square()
    step.updates[-1] |= {
        "processor_seconds": time.process_time() - started_at,
        "tokens_generated": sum(len(sequence.completion) for sequence in step.sequences),
        "noise": (step.weights[0].square() * squares).mean(dim=1).sum().item() / step.N**2,
        "noise_of_one": (step.w_q @ squares.mean(dim=1)).item() / step.N,
    }
    return step


def train(folder, task, by_epochs=False, **settings):
    """A run, or the rest of it, from a copy of the task's model -> its records."""
    if not (folder / "checkpoint.pt").exists():
        shutil.rmtree(folder, ignore_errors=True)
    config = dppo.Config(**settings, output_dir=str(folder))
    own_task = replace(task, model=copy.deepcopy(task.model))
    run = dppo.start(config, own_task)
    changes = {"dppo_step": partial(noting_step, step_of_rule)}
    if by_epochs:
        _, _, records, _ = run
        start = records[0]["candidates_so_far"]
        changes["make_step"] = partial(step_by_epochs, dppo.make_step, start)
    with mock.patch.multiple(dppo, **changes):
        dppo.train(config, own_task, run)
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def train_on_few(task, config, rule=None, steps=120, every=15):
    """Trains a copy of the task's model on 256 prompts -> its Steps and, at the start and every few
    steps, (completions generated, processor seconds, accuracy)."""
    few = replace(task, model=copy.deepcopy(task.model), train=task.train[:256])
    rule = rule or config.rule_class(config, 256)
    optimizer = dppo.MasterAdam(few.model, config.learning_rate)
    torch.manual_seed(config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    curve = [(0, 0.0, dppo.evaluate(few, config)["accuracy"])]
    made, seen, seconds = [], 0, 0.0
    torch.manual_seed(config.seed)
    for number in range(1, steps + 1):
        started_at = time.process_time()
        upcoming = dppo.next_prompts(seen, 256, config.seed, 1600)
        step = dppo.dppo_step(few, rule, optimizer, upcoming, generator)
        seconds += time.process_time() - started_at
        seen += step.N
        made.append(step)
        if number % every == 0:
            generated = sum(len(step.sequences) for step in made)
            with torch.random.fork_rng():  # training has the same random numbers without it
                accuracy = dppo.evaluate(few, replace(config, seed=0))["accuracy"]
            curve.append((generated, seconds, accuracy))
    return made, curve


SUMS = ("prompts_seen", "prompts_rolled", "completions_trained", "tokens_generated")
SUMS += ("tokens_trained", "processor_seconds", "noise", "noise_of_one")
OF_STEPS = ("prompts_rolled", "rollout_worth", "noise", "noise_of_one")


def rounded(value, digits=4):
    """A number, or a list of them, in so many digits."""
    if isinstance(value, list):
        return [rounded(number, digits) for number in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def kept(records, settings, lists=()):
    """What is saved of a run: of each evaluation the step, processor seconds until then and the
    mean of each set; sums over the steps; and what `lists` names, of every step."""
    curve = []
    seconds = 0.0
    for record in records:
        seconds += record.get("processor_seconds", 0.0)
        if "accuracy" in record:
            means = [record[name] for name in record if name.startswith("accuracy of ")]
            curve.append([round(value, 4) for value in (record["step"], seconds, *means)])
    steps = records[1:]
    sums = {"steps": len(steps)}
    for name in SUMS:
        sums[name] = rounded(sum(record[name] for record in steps), 8)
    longest = settings.get("max_grad_norm", dppo.Config.max_grad_norm)
    norms = [record["grad_norm"] or 0.0 for record in steps]  # none if it was not finite
    sums["clipped"] = sum(norm > longest for norm in norms)
    densities = [record["packing_density"] for record in steps if record.get("packing_density")]
    density = rounded(mean(densities)) if densities else None
    result = {"curve": curve, "sums": sums, "packing_density": density, "settings": settings}
    return result | {name: rounded([record[name] for record in steps]) for name in lists}


def runs_of(name, results):
    """{arm: {seed: run}} of an experiment in the results, to which it adds runs of RUNS that are
    missing there."""
    runs = results.setdefault("experiments", {}).setdefault(name, {}).setdefault("runs", {})
    for arm in ARMS.get(name, ()):  # in this order
        runs.setdefault(arm, {})
    for path in sorted((RUNS / name).glob("*.json")):
        arm, _, seed = path.stem.rpartition("-")
        runs.setdefault(arm, {}).setdefault(seed, json.loads(path.read_text()))
    return runs


def make_run(name, arm, seed, task, folder, **history):
    """-> what is saved of a run."""
    settings = SETTINGS[name] | METHODS[arm] | {"seed": seed}
    if name == "few":
        _, curve = train_on_few(task, dppo.Config(**settings))
        return {"curve": [[*map(rounded, point)] for point in curve], "sums": {}}
    records = train(folder, task, name.startswith("epochs"), **settings, **history)
    return kept(records, settings, OF_STEPS if name.startswith("digits") else ())


def make_runs(name, seeds, arms, task):
    """Makes RUNS/name/arm-seed.json of each of these runs that is missing there, and prints all of
    them beside those that are saved."""
    experiments = json.loads(RESULTS.read_text())["experiments"]
    saved = experiments[name]["runs"] if name in experiments else {}
    without, with_history = WITH_HISTORY
    runs = sorted(product(seeds, arms), key=lambda run: run[1] == with_history)  # these at last
    for seed, arm in runs:
        path = RUNS / name / f"{arm}-{seed}.json"
        history = {}
        if arm == with_history:
            next_seed = seed // 8 * 8 + (seed + 1) % 8
            memory = path.with_name(f"{without}-{next_seed}.memory")
            history["history"] = str(memory)
            if not path.exists() and not (memory / "checkpoint.pt").exists():
                print(f"{arm}, seed {seed}, first needs: {name!r} {next_seed} {without!r}")
                continue
        if not path.exists():
            folder = path.with_suffix("")
            result = make_run(name, arm, seed, task, folder, **history)
            if arm == without and name != "few":  # another run may start with its memory
                memory = path.with_suffix(".memory")
                memory.mkdir(exist_ok=True)
                shutil.copy(folder / "checkpoint.pt", memory)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result))
            shutil.rmtree(folder, ignore_errors=True)
        other = saved.get(arm, {}).get(str(seed))
        print_beside(f"{name}, {arm}, seed {seed}", json.loads(path.read_text()), other)


def print_beside(title, run, other):
    """Prints the numbers of a run that was made here, and those of the saved one or None."""
    print(title, "(here; saved)" if other else "(here; none is saved)", flush=True)
    other = other or {"sums": {}, "curve": []}
    for measure, value in run["sums"].items():
        print(f"    {measure}: {value:,.8g}; {other['sums'].get(measure, math.nan):,.8g}")
    for point, of_other in zip_longest(run["curve"], other["curve"]):
        step, _, *means = point or of_other
        print(f"    accuracy after step {step}: {means if point else '-'};", end=" ")
        print(of_other[2:] if of_other else "-")


# ==== Analyses: what was decided beforehand ====
def interval(values, digits=5):
    """Mean and 95% t-interval of paired differences."""
    half = T_QUANTILES[len(values)] * stdev(values) / len(values) ** 0.5
    return [round(mean(values) + shift, digits) for shift in (0, -half, half)]


def ratios(values):
    """The same of ratios, by their logarithms."""
    return [round(math.exp(x), 3) for x in interval([*map(math.log, values)], digits=15)]


def verdict(of_interval, bound, above, below):
    """What an interval says that lies above a bound, or below it."""
    _, low, high = of_interval
    if low > bound:
        return above
    return below if high < bound else "undecided"


def pairs(runs, arm, control="grpo-skip"):
    """(run, run of the control) of each seed of both."""
    seeds = sorted(runs[arm].keys() & runs[control])
    return [(runs[arm][seed], runs[control][seed]) for seed in seeds]


def average(runs, name):
    """The mean over runs of the sum over their steps."""
    return mean(run["sums"][name] for run in runs)


def accuracy(run, start):
    """The mean of a run's evaluations from this one on: 1 or -5."""
    return mean(value for *_, value in run["curve"][start:])


def accuracy_after(seconds, curve):
    """A curve's accuracy after so many processor seconds, or at its end."""
    for (_, start, before), (_, end, after) in pairwise(curve):
        if seconds <= end:
            return before + (after - before) * (seconds - start) / (end - start)
    return curve[-1][2]


def in_the_same_time(run, control):
    """The control's accuracy at the processor seconds of a run's last five evaluations: a mean."""
    return mean(accuracy_after(seconds, control["curve"]) for _, seconds, _ in run["curve"][-5:])


def speed_up(runs, arm, control):
    """The processor seconds of a control over an arm's, with their interval."""
    name = "processor_seconds"
    both = pairs(runs, arm, control)
    return ratios([other["sums"][name] / run["sums"][name] for run, other in both])


def analysis_of_epochs(runs):
    result = {}
    for arm, of_seed in runs.items():
        of_arm = [*of_seed.values()]
        told = {"steps": round(average(of_arm, "steps"))}
        told["generated"] = round(8 * average(of_arm, "prompts_rolled"))
        clipped = average(of_arm, "clipped") / average(of_arm, "steps")
        told["steps clipped"] = round(clipped, 3)
        told["trained"] = round(average(of_arm, "completions_trained"))
        if all(run["packing_density"] for run in of_arm):
            told["density of packing"] = round(mean(run["packing_density"] for run in of_arm), 3)
        told["processor seconds"] = round(average(of_arm, "processor_seconds"), 1)
        told["accuracy"] = round(mean(accuracy(run, -5) for run in of_arm), 4)
        if arm != "grpo" and "grpo" in runs:
            both = pairs(runs, arm, "grpo")
            difference = interval([accuracy(run, -5) - accuracy(grpo, -5) for run, grpo in both])
            told["minus grpo"] = difference
            told["against grpo"] = verdict(difference, -0.02, "as good", "worse")
            told["speed-up over grpo"] = speed_up(runs, arm, "grpo")
        if arm != "grpo-skip":
            told["speed-up over grpo-skip"] = speed_up(runs, arm, "grpo-skip")
            both = pairs(runs, arm)
            difference = interval([accuracy(run, -5) - accuracy(skip, -5) for run, skip in both])
            told["minus grpo-skip"] = difference
            others = [in_the_same_time(run, skip) for run, skip in both]
            told["grpo-skip in the same time"] = round(mean(others), 4)
            own = [accuracy(run, -5) for run, _ in both]
            difference = interval([a - b for a, b in zip(own, others)])
            told["minus grpo-skip in the same time"] = difference
            told["in the same time"] = verdict(difference, 0, "better", "worse")
        result[arm] = told
    return result


def analysis_of_guesses(runs):
    result = {}
    for arm, of_seed in runs.items():
        result[arm] = {}
        for name, column in (("guesses", 2), ("right", 4)):
            ends = [run["curve"][-1][column] for run in of_seed.values()]
            result[arm][f"{name} at the end"] = rounded([mean(ends), min(ends), max(ends)])
    return result


def analysis_of_digits(runs):
    result = {}
    for arm, of_seed in runs.items():
        of_arm = [*of_seed.values()]
        told = {"mean of all evaluations": round(mean(accuracy(run, 1) for run in of_arm), 4)}
        told["rollouts"] = round(8 * average(of_arm, "prompts_rolled"))
        later = [sum(run["prompts_rolled"][32:]) for run in of_arm]
        told["rollouts after the first epoch"] = round(8 * mean(later))
        told["completions trained"] = round(average(of_arm, "completions_trained"))
        noises = [32 * run["sums"]["noise"] / run["sums"]["noise_of_one"] for run in of_arm]
        told["noise"] = round(mean(noises), 3)  # by A^2, over that of 32 unpruned prompts a step
        if arm != "grpo-skip":
            differences = [accuracy(a, 1) - accuracy(b, 1) for a, b in pairs(runs, arm)]
            told["minus grpo-skip"] = interval(differences)
            told["as good"] = told["minus grpo-skip"][1] > -0.02
        result[arm] = told
    return result


def noise_by(name, steps, prompts=None):
    """The noise of steps by these squares, over that of so many unpruned prompts, or of B."""
    pruned = 0.0
    unpruned = 0.0
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


def analysis_of_few(runs):
    result = {}
    for arm, of_seed in runs.items():
        generated = mean(run["curve"][-1][0] for run in of_seed.values())
        ends = [accuracy(run, -3) for run in of_seed.values()]
        result[arm] = {"generated": round(generated), "last three evaluations": interval(ends)}
    return result


LEVEL = 0.3  # of the held-out probability, half of the control's rise in the pilot


def until(run, level, name):
    """The sum of a measure until an evaluation has reached the level, or of the whole run."""
    reached = [point for point in run["curve"] if point[2] >= level]
    step, seconds, _ = reached[0] if reached else run["curve"][-1]
    return seconds if name == "processor_seconds" else sum(run[name][:step])


def analysis_of_hard(runs):
    result = {}
    for arm, of_seed in runs.items():
        of_arm = [*of_seed.values()]
        reached = sum(max(value for *_, value in run["curve"]) >= LEVEL for run in of_arm)
        told = {"reach the level": f"{reached} of {len(of_arm)}"}
        told["clipped"] = round(average(of_arm, "clipped") / average(of_arm, "steps"), 3)
        for name in ("processor_seconds", "prompts_rolled", "completions_trained"):
            measured = partial(until, level=LEVEL, name=name)
            told[name] = round(mean(map(measured, of_arm)), 1)
            if arm != "grpo-skip":
                of_seeds = [measured(run) / measured(control) for run, control in pairs(runs, arm)]
                told[f"{name} over grpo-skip's"] = ratios(of_seeds)
                told[f"{name}, of each seed"] = rounded(of_seeds)
                told[f"{name}, a gain"] = verdict(ratios(of_seeds), 0.9, "no", "yes")
        result[arm] = told
    return result


def analysis_of_times(runs):
    result = {}
    for arm, of_seed in runs.items():
        seconds = [median(run["processor_seconds"]) for run in of_seed.values()]
        result[arm] = {"processor seconds of a step, by seed": rounded(seconds)}
    return result


ANALYSES = {
    "epochs": analysis_of_epochs,
    "epochs, more": analysis_of_epochs,
    "guess or pass": analysis_of_guesses,
    "few": analysis_of_few,
    "digits": analysis_of_digits,
    "digits, new seeds": analysis_of_digits,
    "digits by gradients": analysis_of_gradients,
    "hard, on a GPU": analysis_of_hard,
    "hard, clipped, on a GPU": analysis_of_hard,
    "timed, on a GPU": analysis_of_times,
}


def write_results(results):
    """RESULTS, with a line for each run."""
    text = json.dumps(results, separators=(",", ":")).replace('"curve"', '\n"curve"')
    RESULTS.write_text(text + "\n")


def gather():
    """Adds what is in RUNS to RESULTS, and analyses what has two seeds of every arm."""
    results = json.loads(RESULTS.read_text())
    for name, analyse in ANALYSES.items():
        runs = runs_of(name, results)
        saved = results["experiments"][name]
        saved.pop("analysis", None)
        if min(len(runs.get(arm, {})) for arm in ARMS.get(name, runs)) > 1:
            saved["analysis"] = analyse(runs)
            for arm, told in saved["analysis"].items():
                print(f"{name}, {arm}: {told}")
    if "one step" not in results:
        results["one step"] = one_step()
    write_results(results)
    draw_picture(results)


def one_step():
    """The step that notebook and README show -> pi of its candidates; their completions: 0 has no
    gradient, 1 is pruned, 2 is kept, and -1 stands where a prompt was not kept."""
    config = dppo.Config()
    task = dppo.load_task(config)
    torch.manual_seed(0)
    examples = task.train[:64]
    _, first, _ = dppo.rollout(task, examples, config.group_size, config)
    _, rewards, _ = dppo.rollout(task, examples, config.group_size, config)
    rule = dppo.DPPO(config, len(examples))
    rule.remember(torch.arange(64), first, dppo.group_advantages(first))

    generator = torch.Generator().manual_seed(0)
    N, prompts, w_q = dppo.prune_prompts(rule, torch.arange(64), 24, generator)
    A = dppo.group_advantages(rewards)[prompts]
    w_qi = dppo.prune_completions(rule, A, w_q, generator)
    states = torch.full((N, config.group_size), -1)
    states[prompts] = (A != 0).long() + (w_qi > 0).long()
    return {"pi": rounded(rule.prompt_probabilities()[:N].tolist()), "states": states.tolist()}


def learned(run):
    """Of each evaluation, thousands of completions generated until then, and its value."""
    made = [0, *accumulate(run["prompts_rolled"])]
    return [(0.008 * made[step], value) for step, _, value in run["curve"]]


def crossing(curve, level):
    """Where a curve of (x, y) first crosses a level, on straight lines between its points."""
    for (x, y), (next_x, next_y) in pairwise(curve):
        if y < level <= next_y:
            return x + (next_x - x) * (level - y) / (next_y - y)
    return math.nan


METHODS_SHOWN = {
    "grpo-skip": ("grpo-skip", "0.15"),
    "dppo": ("dppo (0.7, 0)", "#D55E00"),
    "dppo-proportional": ("our rule (0.9, 0)", "#009E73"),
    "dppo-proportional, with history": ("… with another run's memory", "#CC79A7"),
}


def draw_curves(fig, experiment):
    """Means over the seeds of SmolLM2, where they cross the level, and the analysis's ratios."""
    ax = fig.subplots()
    texts = [("completions until 0.3, relative:", "0.4")]
    for name, (text, colour) in METHODS_SHOWN.items():
        curves = [*map(learned, experiment["runs"][name].values())]
        shortest = min(map(len, curves))
        curve = torch.tensor([curve[:shortest] for curve in curves]).mean(dim=0)
        ax.plot(*curve.T, color=colour, linewidth=3.5)
        made = crossing(curve.tolist(), LEVEL)
        ax.plot(made, LEVEL, "o", color=colour, markersize=11, markeredgecolor="white")
        told = experiment["analysis"][name].get("prompts_rolled over grpo-skip's", [1.0])
        texts.append((f"{text} {told[0]:.2f}", colour))
    for place, (text, colour) in enumerate(texts):
        ax.text(11.9, 0.152 - 0.041 * place, text, color=colour, ha="right")
    ax.axhline(LEVEL, color="0.6", linewidth=1.5, linestyle=":")
    ax.set_title("SmolLM2 learns to add: completions, not time", loc="left")
    ax.set(xlabel="completions generated, thousands", ylabel="probability of right sums")
    ax.set(xlim=(0, 12), ylim=(-0.03, 0.42), yticks=[0, 0.1, 0.2, 0.3, 0.4])


def draw_picture(results):
    """README's picture: a step, and what was learned from how many completions."""
    from extras import plots

    plots.style()
    plots.plt.rc("font", size=17)
    plots.plt.rc("axes", titlesize=18)
    fig = plots.plt.figure(figsize=(9.6, 9.6))
    above, below = fig.subfigures(2, 1, height_ratios=[1, 1.15])
    states = torch.tensor(results["one step"]["states"]).double().T  # (G, N)
    pi = torch.tensor(results["one step"]["pi"])
    plots.draw_step(above, pi, states.where(states >= 0, math.nan), "dppo (0.7, 0.7): ")
    draw_curves(below, results["experiments"]["hard, on a GPU"])
    fig.savefig(PICTURE, format="png", dpi=120, bbox_inches="tight", pad_inches=0.25)


def seeds_of(text):
    """The numbers of "0,1,2"."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers such as 0,1,2")
    return [int(part) for part in parts]


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=[*ARMS])
    parser.add_argument("seeds", nargs="?", type=seeds_of, help="such as 0,1,2")
    parser.add_argument("arm", nargs="?", choices=[*METHODS], help="all of them, if left out")
    chosen = parser.parse_args()
    if chosen.name is None:
        gather()
        return
    arms = ARMS[chosen.name] if chosen.arm is None else [chosen.arm]
    if chosen.seeds is None:
        parser.error(f"{chosen.name} needs seeds, such as 0,1,2")
    if not set(arms) <= set(ARMS[chosen.name]):
        parser.error(f"{chosen.name} has the arms {'; '.join(ARMS[chosen.name])}")
    task = guessing() if chosen.name == "guess or pass" else dppo.load_task(dppo.Config())
    make_runs(chosen.name, chosen.seeds, arms, task)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process a core
    main()
