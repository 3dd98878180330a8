"""Makes the runs that RESULTS.md reports, as planned in PLAN.md.

    python extras/experiments/run.py digits 40 grpo-skip    # one run: experiment, seed, arm
    python extras/experiments/run.py digits                 # all of them, two at a time
    python extras/experiments/run.py digits pilot           # the pilot that chose learning rates
    python extras/experiments/run.py gather                 # runs/experiments -> runs.json
    python extras/experiments/run.py check                  # made with the code that is here?

A finished run is kept in runs/experiments, and is not made again while it is there. If it is also
in runs.json, its numbers are printed beside the saved ones. Seconds differ between machines, and so
may all other numbers, since rounding errors change the starting model.
"""

import ast
import inspect
import json
import subprocess
import sys
import time
import zlib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import dppo
from extras import proportional, rivals
from extras.experiments import tasks

SAVED = Path(__file__).with_name("runs.json")
FOLDER = Path(__file__).resolve().parents[2] / "runs" / "experiments"


# ==== Arms: a method, with its prune rates of prompts and of completions ====
METHODS = {"our rule": "extras.proportional:Proportional", "random": "extras.rivals:Uniform"}
METHODS |= {"all weights 1": "extras.rivals:WeightOne", "unweighted": "extras.rivals:Unweighted"}
METHODS |= {name: f"extras.rivals:{name}" for name in ("Literal", "CPPO", "GRESO")}


def settings_of_arm(arm):
    """ "dppo (0, 0.7)" -> its method and its rates."""
    method, _, rates = arm.partition(" (")
    settings = {"method": METHODS.get(method, method)}
    if rates:
        names = ("prompt_prune_rate", "completion_prune_rate")
        settings |= zip(names, map(float, rates[:-1].split(", ")))
    return settings


# ==== Experiments ====
# Runs are evaluated before they start, and every `eval_every` steps. `arms` has the learning rate
# of each arm, chosen as PLAN.md says, and `fewer` the arms that have fewer seeds than `seeds`. The
# seeds begin at 40. An experiment has the name of its task. The arm grpo-skip is the control.
Experiment = namedtuple("Experiment", "settings arms seeds fewer", defaults=[{}])

OF_DIGITS = {"steps": 320, "eval_every": 16}
OF_SUMS = OF_DIGITS | {"temperature": 0.7, "max_completion_tokens": 8, "max_grad_norm": 10.0}
OF_SMOLLM2 = {"steps": 40, "eval_every": 5, "prompts_per_step": 8, "max_completion_tokens": 8}
OF_SMOLLM2 |= {"temperature": 1.0, "max_grad_norm": 10.0}
OF_SMOLLM2 |= {"micro_batch_tokens": 1024, "eval_samples": 2, "warmup_steps": 2}
OF_GUESSES = {"steps": 100, "eval_every": 20, "eval_samples": 8}
OF_GUESSES |= {"objective": "dr_grpo", "temperature": 1.0}

DIGITS = ["grpo", "grpo-skip", "random (0, 0.7)", "dppo (0, 0.7)", "dppo (0.7, 0.7)"]
DIGITS = dict.fromkeys([*DIGITS, "our rule (0, 0.7)", "our rule (0.9, 0.7)"], 5e-5)
RIVALS = {"all weights 1 (0.7, 0.7)": 5e-5, "Literal (0.7, 0.7)": 5e-5}
RIVALS |= {"CPPO (0, 0.7)": 5e-5, "GRESO": 2e-4}
SUMS = ["grpo", "grpo-skip", "random (0, 0.7)", "dppo (0, 0.7)", "dppo (0, 0.9)"]
SUMS = dict.fromkeys([*SUMS, "dppo (0.7, 0.7)", "our rule (0, 0.7)", "our rule (0.9, 0.7)"], 2e-4)
SMOLLM2 = ["grpo-skip", "random (0, 0.7)", "dppo (0, 0.7)"]
SMOLLM2 = dict.fromkeys([*SMOLLM2, "our rule (0, 0.7)", "our rule (0, 0.85)"], 2.5e-6)
GUESSES = ["grpo-skip", "dppo (0.7, 0.7)", "our rule (0.7, 0.7)", "unweighted (0.7, 0.7)"]
GUESSES = dict.fromkeys([*GUESSES, "CPPO (0, 0.7)"], 1e-4)

EXPERIMENTS = {
    "sums": Experiment(OF_SUMS, SUMS, 8, {"grpo": 4}),
    "digits": Experiment(OF_DIGITS, DIGITS | RIVALS, 8, {"grpo": 4} | dict.fromkeys(RIVALS, 6)),
    "guess or pass": Experiment(OF_GUESSES, GUESSES, 6),
    "SmolLM2": Experiment(OF_SMOLLM2, SMOLLM2, 6),
}
SPECIAL = {"GRESO": {"steps": 48, "eval_every": 3, "warmup_steps": 2}}  # its steps are long
# A pilot takes the first 0.4 of the steps, with two other seeds and with these learning rates.
PILOTS = {"sums": (1e-4, 2e-4, 4e-4), "digits": (2.5e-5, 5e-5, 1e-4)}
PILOTS["SmolLM2"] = (2.5e-6, 5e-6, 1e-5)


def runs_of(name):
    """All (seed, arm) of an experiment. Seeds are the outer loop, and each begins with another arm,
    so that all arms meet the same conditions."""
    _, arms, most, fewer = EXPERIMENTS[name]
    runs = []
    for n in range(most):
        first = n % len(arms)
        for arm in [*arms][first:] + [*arms][:first]:
            if n < fewer.get(arm, most):
                runs.append((40 + n, arm))
    return runs


def pilot_of(name):
    """All (seed, arm, learning rate) of an experiment's pilot. (The gradient of grpo is that of
    grpo-skip.)"""
    arms = [arm for arm in EXPERIMENTS[name].arms if arm != "grpo"]
    return [(seed, arm, rate) for seed in (300, 301) for arm in arms for rate in PILOTS[name]]


def settings_of(name, seed, arm, rate=None):
    """The settings of a run or, with a learning rate, of a pilot's."""
    experiment = EXPERIMENTS[name]
    settings = experiment.settings | settings_of_arm(arm) | SPECIAL.get(arm, {})
    if rate:
        settings["steps"] = settings["steps"] * 2 // 5
    return settings | {"seed": seed, "learning_rate": rate or experiment.arms[arm]}


# ==== A run ====
def trained(task, rule):
    """Trains -> what is saved: {"curve": [[step, CPU seconds, candidates, and an accuracy for each
    evaluation set]], and totals by name}. Seconds are those of steps, not of evaluations."""
    config = rule.config
    optimizer = dppo.MasterAdam(task.model, config.learning_rate)
    records = [{"step": 0, "candidates_so_far": 0}]
    curve, seconds = [], 0.0
    while True:
        step, candidates = records[-1]["step"], records[-1]["candidates_so_far"]
        if step % config.eval_every == 0:
            metrics, _ = dppo.evaluate(task, config)
            accuracies = [metrics[f"accuracy of {name}"] for name in task.evals]
            point = [step, seconds, candidates, *accuracies]
            curve.append([rounded(value) for value in point])
        if step == config.steps:
            break
        started_at = time.process_time()
        records.append(dppo.make_step(task, rule, optimizer, records[-1]))
        seconds += time.process_time() - started_at

    def total(name):
        return sum(record[name] for record in records[1:])

    shares = {
        "rollout": total("rollout_seconds") / total("seconds"),
        "trained": total("completions_trained") / total("completions"),
        "clipped": sum(x["grad_norm"] > config.max_grad_norm for x in records[1:]) / config.steps,
        "equal": sum(x["zero_variance_fraction"] for x in records[1:33]) / len(records[1:33]),
    }
    totals = {"completions": total("completions")}
    return {"curve": curve} | totals | {name: rounded(x, 3) for name, x in shares.items()}


def rounded(value, digits=4):
    """A number to `digits` significant digits; integers stay whole."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def checksum(name, *run):
    """Of what a run is made with: its settings but for the seed, and all definitions that
    `trained`, its rule and its task lead to. Comments and docstrings do not count."""
    config = dppo.configure(**settings_of(name, *run))
    nodes = {}
    for module in (sys.modules[__name__], dppo, proportional, rivals, tasks):
        for node in ast.parse(inspect.getsource(module)).body:
            names = [getattr(target, "id", "") for target in getattr(node, "targets", [])]
            nodes |= dict.fromkeys(names or [getattr(node, "name", "")], node)
    # Of Config, its values and the table of objectives count, and not the help on them.
    nodes["Config"] = ast.parse("OBJECTIVES")
    rule = dppo.find("method", config.method, dppo.RULES)
    missing = ["trained", "Config", rule.__name__, tasks.TASKS[name].__name__]
    texts = set()
    while missing:
        node = nodes.pop(missing.pop(), ast.Pass())  # each only once
        parts = [*ast.walk(node)]
        names = [part for part in parts if isinstance(part, ast.Name)]
        local = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        missing += {name.id for name in names} - local
        for part in parts:
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "dppo":
                missing.append(part.attr)
            elif isinstance(part, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(part):
                part.body[0] = ast.Pass()
        texts.add(ast.unparse(node).replace('"', "'"))  # Python 3.12 chooses other quotes
    values = sorted((asdict(config) | {"seed": 0}).items())
    return zlib.crc32(f"{sorted(texts)} {values}".encode())


def path_of(name, *run):
    return FOLDER / name / f"{', '.join(map(str, run))}.json"


def make_run(name, *run):
    """A run, which is made only once."""
    path = path_of(name, *run)
    if not path.exists():
        made_with = checksum(name, *run)
        config = dppo.configure(**settings_of(name, *run))
        task = tasks.TASKS[name](config)
        rule = dppo.find("method", config.method, dppo.RULES)(config, task.train)
        result = trained(task, rule) | {"made with": made_with}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
    return json.loads(path.read_text())


# ==== All runs ====
def make_all(name, runs):
    """Each run has a process of its own, and there are two at a time."""

    def make(run):
        command = [sys.executable, __file__, name, *map(str, run)]
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        print(f"{name}, {run}: exit status {status}", flush=True)

    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(make, runs))


def load():
    """{experiment: {arm: {seed: run}}}"""
    return json.loads(SAVED.read_text())


def gather():
    """Replaces each experiment in runs.json of which all runs have been made."""
    saved = load()
    for name in EXPERIMENTS:
        if all(path_of(name, *run).exists() for run in runs_of(name)):
            saved[name] = {}
            for seed, arm in runs_of(name):
                saved[name].setdefault(arm, {})[str(seed)] = make_run(name, seed, arm)
            print(f"{name}: from {FOLDER}")
    save(saved)


def save(runs):
    """Writes runs, one a line."""
    text = json.dumps(runs, separators=(",", ":"), ensure_ascii=False)
    SAVED.write_text(text.replace('{"curve"', '\n{"curve"') + "\n")


def made_otherwise():
    """The saved (experiment, arm, seed) that were made with other code or settings than today's."""
    found = []
    for name, arms in load().items():
        for arm, runs in arms.items():
            here = checksum(name, 0, arm)
            found += [(name, arm, seed) for seed in runs if runs[seed]["made with"] != here]
    return found


def main():
    name, *run = sys.argv[1:] or ["?"]
    torch.set_num_threads(1)  # a process a core
    if name == "gather":
        gather()
    elif name == "check":
        found = made_otherwise()
        print(found or "All runs were made with the code that is here.")
        sys.exit(bool(found))
    elif name in EXPERIMENTS and not run:
        make_all(name, runs_of(name))
    elif name in PILOTS and run == ["pilot"]:
        make_all(name, pilot_of(name))
        for seed, arm, rate in pilot_of(name):
            _, *points = make_run(name, seed, arm, rate)["curve"]
            mean = sum(point[3] for point in points) / len(points)
            print(f"seed {seed}, {arm}, {rate:g}: mean accuracy {mean:.3f} after the start")
    elif name in EXPERIMENTS and len(run) > 1 and run[1] in EXPERIMENTS[name].arms:
        seed, arm, *rate = run
        made = make_run(name, int(seed), arm, *map(float, rate))
        saved = load().get(name, {}).get(arm, {}).get(seed, {})
        for key, value in made.items():
            print(f"{key}: {value}\n  saved: {saved.get(key)}")
    else:
        sys.exit(f"{__doc__}\nExperiments: {'; '.join(EXPERIMENTS)}.")


if __name__ == "__main__":
    main()
