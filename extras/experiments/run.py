"""Makes the runs that RESULTS.md reports, as planned in PLAN.md.

    python extras/experiments/run.py digits 16 grpo-skip    # one run: experiment, seed, arm
    python extras/experiments/run.py digits                 # all of them, two at a time
    python extras/experiments/run.py gather                 # runs/experiments -> runs.json
    python extras/experiments/run.py noise                  # see noise.py

A finished run is kept in runs/experiments, and is not made again while it is there. If it is also
in runs.json, its numbers are printed beside the saved ones. Seconds differ between machines, and so
may all other numbers, since rounding errors change the starting model.
"""

import json
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import dppo
from extras.experiments import noise
from extras.experiments.tasks import TASKS

SAVED = Path(__file__).with_name("runs.json")
FOLDER = Path(__file__).resolve().parents[2] / "runs" / "experiments"


# ==== Arms: a method, with its settings ====
def pruning(method, prompts, completions, **settings):
    """Settings of a method with these two prune rates."""
    rates = {"prompt_prune_rate": prompts, "completion_prune_rate": completions}
    return {"method": method} | rates | settings


OURS = "extras.proportional:Proportional"
RIVALS = "extras.rivals:"
ARMS = {
    "grpo": {"method": "grpo"},
    "grpo-skip": {"method": "grpo-skip"},
    "dppo (0.7, 0.7)": pruning("dppo", 0.7, 0.7),
    "dppo (0.7, 0)": pruning("dppo", 0.7, 0.0),
    "dppo (0, 0.7)": pruning("dppo", 0.0, 0.7),
    "dppo (0, 0.9)": pruning("dppo", 0.0, 0.9),
    "our rule (0.7, 0.7)": pruning(OURS, 0.7, 0.7),
    "our rule (0.9, 0)": pruning(OURS, 0.9, 0.0),
    "our rule (0.95, 0), 20 prompts": pruning(OURS, 0.95, 0.0, prompts_per_step=20),
    "all weights 1": pruning(RIVALS + "WeightOne", 0.7, 0.7),
    "unweighted": pruning(RIVALS + "Unweighted", 0.7, 0.7),
    "Literal (0.7, 0.7)": pruning(RIVALS + "Literal", 0.7, 0.7),
    "CPPO, 32 prompts": pruning(RIVALS + "CPPO", 0.0, 0.7),
    "CPPO, 128 prompts": pruning(RIVALS + "CPPO", 0.0, 0.7, prompts_per_step=128),
    "GRESO": {"method": RIVALS + "GRESO"},
}

# ==== Experiments ====
# Runs are evaluated before they start, after each epoch or every `eval_every` steps, and at the
# end. The arm grpo-skip is the control.
Experiment = namedtuple("Experiment", "task settings seeds arms")

EPOCHS = {"epochs": 15.0, "eval_every": 0}
DIGITS = ["grpo", "grpo-skip", "dppo (0.7, 0.7)", "dppo (0, 0.7)", "all weights 1"]
DIGITS += ["our rule (0.9, 0)", "our rule (0.95, 0), 20 prompts"]
OTHERS = ["grpo", "grpo-skip", "dppo (0.7, 0.7)", "dppo (0.7, 0)", "our rule (0.9, 0)"]
OTHERS += ["our rule (0.95, 0), 20 prompts", "Literal (0.7, 0.7)"]
OTHERS += ["CPPO, 32 prompts", "CPPO, 128 prompts", "GRESO"]
SUMS = ["grpo", "grpo-skip", "dppo (0.7, 0.7)", "dppo (0.7, 0)", "dppo (0, 0.7)", "dppo (0, 0.9)"]
SUMS += ["our rule (0.95, 0), 20 prompts"]
SMOLLM2 = ["grpo-skip", "dppo (0.7, 0.7)", "dppo (0, 0.7)", "our rule (0.9, 0)"]
GUESSES = ["grpo", "dppo (0.7, 0.7)", "our rule (0.7, 0.7)", "unweighted", "CPPO, 32 prompts"]

OF_SUMS = EPOCHS | {"temperature": 0.7, "max_completion_tokens": 8}
OF_SUMS |= {"learning_rate": 2e-4, "max_grad_norm": 10.0}
OF_SMOLLM2 = {"steps": 60, "eval_every": 4, "prompts_per_step": 8, "max_completion_tokens": 8}
OF_SMOLLM2 |= {"temperature": 1.0, "learning_rate": 5e-6, "max_grad_norm": 10.0}
OF_SMOLLM2 |= {"micro_batch_tokens": 1024, "eval_samples": 2}
OF_GUESSES = {"steps": 100, "eval_every": 10, "eval_samples": 8}
OF_GUESSES |= {"objective": "dr_grpo", "learning_rate": 1e-4, "temperature": 1.0}

# Only for noise.py:
OF_LONG_TEXT = {"max_completion_tokens": 96, "temperature": 1.0}

EXPERIMENTS = {
    "digits": Experiment("digits", EPOCHS, range(16, 32), DIGITS),
    "digits, other rules": Experiment("digits", EPOCHS, range(8, 16), OTHERS),
    "sums": Experiment("sums", OF_SUMS, range(8), SUMS),
    "SmolLM2": Experiment("SmolLM2", OF_SMOLLM2, range(4), SMOLLM2),
    "guess or pass": Experiment("guess or pass", OF_GUESSES, range(8), GUESSES),
}


# ==== A run ====
def trained(task, rule):
    """Trains -> what is saved: {"curve": [[step, CPU seconds, completions, and an accuracy
    for each evaluation set]], and totals by name}. Seconds are those of steps, not of
    evaluations."""
    config = rule.config
    optimizer = dppo.MasterAdam(task.model, config.learning_rate)
    graded_at = []  # when rewards were asked for, which is the end of a rollout
    reward = task.reward

    def noting(**columns):
        graded_at.append(time.process_time())
        return reward(**columns)

    task.reward = noting
    record = {"step": 0, "epoch": 0.0, "candidates_so_far": 0}
    steps, curve, seconds, rollout_seconds, completions = [], [], 0.0, 0.0, 0
    evaluations = 0
    while True:
        done = record["step"] / config.eval_every if config.eval_every else record["epoch"]
        if done >= evaluations:
            metrics, _ = dppo.evaluate(task, config)
            accuracies = [metrics[f"accuracy of {name}"] for name in task.evals]
            curve.append([record["step"], seconds, completions, *accuracies])
            evaluations = int(done) + 1
        if done >= (config.epochs or config.steps / config.eval_every):
            break
        started_at = time.process_time()
        record = dppo.make_step(task, rule, optimizer, record)
        seconds += time.process_time() - started_at
        rollout_seconds += graded_at[-1] - started_at
        completions += record["completions"]
        steps.append(record)
    task.reward = reward
    return {
        "curve": [[rounded(value) for value in point] for point in curve],
        "prompts": sum(step["candidates"] for step in steps),
        "trained": round(sum(step["completions_trained"] for step in steps)),
        "rollout_seconds": rounded(rollout_seconds),
        "clipped": sum(step["grad_norm"] > config.max_grad_norm for step in steps),
        "equal": rounded(mean_of(steps[:32], "zero_variance_fraction")),
    }


def mean_of(steps, name):
    return sum(step[name] for step in steps) / len(steps)


def rounded(value, digits=4):
    """A number to `digits` significant digits; integers stay whole."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def path_of(name, seed, arm):
    return FOLDER / name / f"{arm}, seed {seed}.json"


def make_run(name, seed, arm):
    """A run, which is made only once."""
    path = path_of(name, seed, arm)
    if not path.exists():
        experiment = EXPERIMENTS[name]
        config = dppo.configure(**experiment.settings | ARMS[arm], seed=seed)
        task = TASKS[experiment.task](config)
        rule = dppo.find("method", config.method, dppo.RULES)(config, task.train)
        run = trained(task, rule)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run))
    return json.loads(path.read_text())


# ==== All runs ====
def make_all(name):
    """Each run has a process of its own. Seeds are the outer loop, so that all arms of a seed meet
    the same conditions."""

    def make(run):
        command = [sys.executable, __file__, name, *map(str, run)]
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        print(f"{name}, {run}: exit status {status}", flush=True)

    experiment = EXPERIMENTS[name]
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(make, product(experiment.seeds, experiment.arms)))


def measure_noise(tasks):
    """Measures the noise of scores on these tasks, or on all of them."""
    for name in tasks or noise.SETUPS:
        settings = EXPERIMENTS[name].settings if name in EXPERIMENTS else OF_LONG_TEXT
        config = dppo.configure(**settings | ARMS["grpo-skip"])
        results = noise.measure(name, TASKS[name](config), config)
        path = FOLDER / f"noise, {name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results))


def load():
    """{experiment: {arm: {seed: run}}}"""
    return json.loads(SAVED.read_text())


def gather():
    """Replaces each experiment in runs.json of which all runs have been made."""
    saved = load()
    for name, experiment in EXPERIMENTS.items():
        if all(path_of(name, *run).exists() for run in product(experiment.seeds, experiment.arms)):
            saved[name] = {}
            for arm in experiment.arms:
                runs = {str(seed): make_run(name, seed, arm) for seed in experiment.seeds}
                saved[name][arm] = runs
            print(f"{name}: from {FOLDER}")
    save(saved)
    paths = {name: FOLDER / f"noise, {name}.json" for name in noise.SETUPS}
    if all(path.exists() for path in paths.values()):
        results = {name: json.loads(path.read_text()) for name, path in paths.items()}
        noise.SAVED.write_text(json.dumps(results) + "\n")


def save(runs):
    """Writes runs, one a line."""
    text = json.dumps(runs, separators=(",", ":"), ensure_ascii=False)
    SAVED.write_text(text.replace('{"curve"', '\n{"curve"') + "\n")


def main():
    name, *run = sys.argv[1:] or ["?"]
    torch.set_num_threads(1)  # a process a core
    if name == "gather":
        gather()
    elif name == "noise":
        measure_noise(run)
    elif name in EXPERIMENTS and not run:
        make_all(name)
    elif name in EXPERIMENTS and len(run) == 2 and run[1] in ARMS:
        made = make_run(name, int(run[0]), run[1])
        saved = load().get(name, {}).get(run[1], {}).get(run[0], {})
        for key, value in made.items():
            print(f"{key}: {value}\n  saved: {saved.get(key)}")
    else:
        sys.exit(f"{__doc__}\nExperiments: {'; '.join(EXPERIMENTS)}.\nArms: {'; '.join(ARMS)}.")


if __name__ == "__main__":
    main()
