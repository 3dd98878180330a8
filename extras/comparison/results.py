"""comparison.json: what is saved of all runs.

Under the name of an experiment, {arm: {seed: run}}, where a run has a curve and totals. A point of
a curve is [step, processor seconds, of which rollouts, completions generated, accuracy], with null
where an older experiment did not note it. "guess or pass" has three accuracies: the shares of
guesses and of passes, and that of right answers. SmolLM2's points have the number of trained
completions before the probability of right answers. Besides, there are numbers of experiments that
this code no longer makes.
"""

import json
from pathlib import Path

from extras.comparison.arms import ARMS
from extras.comparison.runs import RUNS

PATH = Path(__file__).resolve().parent.parent / "comparison.json"


def load(path=PATH):
    return json.loads(path.read_text())


def write(results, path=PATH):
    """Writes results, with a line for each run."""
    text = json.dumps(results, separators=(",", ":"), ensure_ascii=False)
    path.write_text(text.replace('{"curve"', '\n{"curve"') + "\n")


def rounded(value, digits=4):
    """A number with so many significant digits, but integers whole."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def compact(run):
    """The part of a run that is saved."""
    curve = [[rounded(value) for value in point] for point in run["curve"]]
    totals = {name: rounded(value, 6) for name, value in run["totals"].items()}
    return {"curve": curve, "totals": totals}


def runs_made(name, folder=RUNS):
    """{arm: {seed: run}} of an experiment, of the seeds with which every arm has been run."""
    runs = {}
    for arm in ARMS[name]:
        runs[arm] = {}
        for path in (folder / name).glob(f"{arm}-*.json"):
            seed = path.stem.removeprefix(f"{arm}-")
            if seed.isdigit():  # and not "with memory-8" of another arm
                runs[arm][seed] = path
    whole = sorted(set.intersection(*[set(of_seed) for of_seed in runs.values()]), key=int)
    for arm, of_seed in runs.items():
        runs[arm] = {seed: compact(json.loads(of_seed[seed].read_text())) for seed in whole}
    return runs


def seeds_of(runs):
    """The seeds of {arm: {seed: run}}."""
    return [*next(iter(runs.values()), {})]


def gather(path=PATH, folder=RUNS):
    """Replaces each experiment in the results that has been made again with at least as many
    seeds -> a line for each experiment."""
    results = load(path)
    told = []
    for name in ARMS:
        made = runs_made(name, folder)
        saved = results.get(name, {})
        is_replaced = 0 < len(seeds_of(made)) >= len(seeds_of(saved))
        if is_replaced:
            results[name] = made
        source = "from runs/experiments" if is_replaced else "as before"
        told.append(f"{name}: {len(seeds_of(results.get(name, {})))} seeds, {source}")
    write(results, path)
    return told


def compared(run, saved):
    """A run's numbers beside those of the saved one or None, as lines."""
    saved = saved or {"totals": {}, "curve": []}
    lines = []
    for name, value in run["totals"].items():
        lines.append(f"{name}: {value:,.6g}; saved: {saved['totals'].get(name, '-')}")
    others = {point[0]: point for point in saved["curve"]}
    for step, seconds, rollouts, generated, *means in run["curve"]:
        cost = f"{seconds:.1f} s, {rollouts:.1f} s in rollouts, {generated:,} completions"
        other = others.get(step, [])
        lines.append(f"step {step}: {cost}, accuracy {means}; saved: {other[4:] or '-'}")
    return lines
