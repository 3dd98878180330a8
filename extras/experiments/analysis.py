"""The measures that PLAN.md defines, and the tables of RESULTS.md.

    python extras/experiments/analysis.py    # runs.json, noise.json -> the tables in RESULTS.md

In RESULTS.md, a table stands between `<!-- table: NAME -->` and `<!-- end -->`.

A run is what run.py saves. An arm is {seed: run}. It is compared with the runs of the control,
grpo-skip, with the same seeds. A comparison is an Estimate, with the bounds of its 95% t-interval.
"""

import json
import re
import sys
from collections import namedtuple
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
from scipy import optimize, stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from extras.experiments import noise
from extras.experiments.run import load

RESULTS = Path(__file__).with_name("RESULTS.md")
CLOCKS = {"steps": 0, "seconds": 1, "completions": 2}  # columns of a curve
LEVELS = {"digits": (0.80, 0.84), "digits, other rules": (0.80, 0.84), "sums": (0.70, 0.74)}
LEVELS["SmolLM2"] = (0.60, 0.65)

# `short` is the share of seeds with which a run of either arm never reached the level.
Estimate = namedtuple("Estimate", "middle low high short", defaults=[0.0])
MOST_SHORT = 1 / 8  # with a larger share, a ratio of times says little


# ==== One run ====
def curve_of(run, clock):
    """(n,) a clock at each evaluation; (n,) the accuracy there."""
    points = np.array(run["curve"])
    return points[:, CLOCKS[clock]], points[:, 3]


def time_to(run, level, clock):
    """What a clock shows when a run reaches a level, on straight lines between evaluations; NaN if
    it never does. Its curve is replaced by the nearest one that never falls, since the first of
    many noisy evaluations to exceed a level would come the sooner, the more there are."""
    times, accuracies = curve_of(run, clock)
    accuracies = optimize.isotonic_regression(accuracies).x
    reached = np.flatnonzero(accuracies >= level)
    if len(reached) == 0:
        return np.nan
    i = reached[0]
    return np.interp(level, accuracies[max(0, i - 1) : i + 1], times[max(0, i - 1) : i + 1])


def at_the_end(run):
    """The mean accuracy of the last five evaluations."""
    return curve_of(run, "steps")[1][-5:].mean()


def total(run, clock):
    return curve_of(run, clock)[0][-1]


# ==== Two arms ====
def mean_of(arm, measure):
    return np.mean([measure(run) for run in arm.values()])


def paired(measure, arm, control):
    """(2, seeds) a measure of the runs of two arms with the same seeds."""
    return np.array([[measure(runs[seed]) for seed in arm] for runs in (arm, control)])


def interval(values):
    """The mean of values, with its t-interval."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    return Estimate(np.mean(values), low, high)


def difference(measure, arm, control):
    values, others = paired(measure, arm, control)
    return interval(values - others)


def time_ratio(level, clock, arm, control):
    """The ratio of the times to a level. A run that does not get there counts at its length."""
    times = paired(partial(time_to, level=level, clock=clock), arm, control)
    lengths = paired(partial(total, clock=clock), arm, control)
    values, others = np.where(np.isnan(times), lengths, times)
    middle, low, high, _ = interval(np.log(values / others))
    return Estimate(*np.exp([middle, low, high]), np.isnan(times).any(axis=0).mean())


def at_equal_time(clock, arm, control):
    """The mean difference of two arms' accuracies at the evaluations of the control, until the
    shorter run ends."""
    gaps = []
    for seed in arm:
        times, accuracies = curve_of(control[seed], clock)
        shared = times <= total(arm[seed], clock)
        gap = np.interp(times, *curve_of(arm[seed], clock)) - accuracies
        gaps.append(gap[shared].mean())
    return interval(gaps)


# ==== Tables ====
def signed(value):
    return f"{value:+.3f}".replace("-", "−")


def cell(estimate, show="{:.2f}".format):
    """0.81 (0.76–0.86), or only how many never got there, if they are too many."""
    middle, low, high, short = estimate
    if short > MOST_SHORT:
        return f"{short:.0%} never"
    to = " to " if show is signed else "–"
    return f"{show(middle)} ({show(low)}{to}{show(high)})"


def method(arm):
    """`dppo` (0.7, 0.7); only what a method is called in the code is set as code."""
    return re.sub(r"^(grpo(-skip)?|dppo|[A-Z]\w+)", r"`\g<0>`", arm)


def times_table(name, arms):
    """When arms reach two levels, by three clocks."""
    head, rows = ["method"], []
    for clock in CLOCKS:
        head += [f"{clock} to {level:.2f}" for level in LEVELS[name]]
    control = arms["grpo-skip"]
    for arm, runs in arms.items():
        row = [method(arm)]
        for clock in CLOCKS:
            for level in LEVELS[name]:
                row.append(cell(time_ratio(level, clock, runs, control)))
        rows.append(row)
    return [head, *(row for row in rows if row[0] != "`grpo-skip`")]


def ends_table(name, arms):
    """How accurate arms are, and what they cost."""
    head = ["method", "accuracy at the end", "minus `grpo-skip`'s", "gap at equal seconds"]
    rows = [[*head, "seconds", "rollouts' share", "steps", "completions", "equal at first"]]
    control = arms["grpo-skip"]
    for arm, runs in arms.items():
        mean = partial(mean_of, runs)
        steps, seconds, completions = [mean(partial(total, clock=clock)) for clock in CLOCKS]
        row = [method(arm), f"{mean(at_the_end):.3f}", "", ""]
        if runs is not control:
            row[2] = cell(difference(at_the_end, runs, control), signed)
            row[3] = cell(at_equal_time("seconds", runs, control), signed)
        row += [f"{seconds:.0f}", f"{mean(itemgetter('rollout_seconds')) / seconds:.0%}"]
        row += [f"{steps:,.0f}", f"{completions:,.0f}", f"{mean(itemgetter('equal')):.0%}"]
        rows.append(row)
    return rows


def guesses_table(name, arms):
    rows = [["method", "share of guesses at the end", "accuracy on 9 to 12 digits"]]
    for arm, runs in arms.items():
        row = [method(arm)]
        for column in (3, 5):
            values = [run["curve"][-1][column] for run in runs.values()]
            row.append(cell(Estimate(np.mean(values), min(values), max(values))))
        rows.append(row)
    return rows


def noise_table(name, results):
    """The noise that pruning adds with each score: of draws in order, and in a random order."""
    head = ["task", "the paper's rule", "random, as many"]
    _, *scores = noise.SCORES  # without random
    columns = [(score, share) for share in (0.5, 0.3) for score in scores]
    labels = {score: label.replace("|", "\\|") for score, label in noise.SCORES.items()}
    rows = [head + [f"{labels[score]}, {share}" for score, share in columns]]
    for task, moments in results.items():
        for moment, batches in moments.items():
            values = [[b["paper's rule"] for b in batches]]
            values += [[b["random, paper's share"] for b in batches]]
            values += [[b[score][str(share)] for b in batches] for score, share in columns]
            cells = ["{:.2f} ({:.2f})".format(*np.mean(value, axis=0)) for value in values]
            share = np.mean([b["paper's share"] for b in batches])
            cells[0] = f"{share:.2f} kept: {cells[0]}"
            rows.append([f"{task}, {moment}", *cells])
    return rows


TABLES = {"noise": ("noise", noise_table), "guess or pass": ("guess or pass", guesses_table)}
for name in LEVELS:
    TABLES[f"{name}, times"] = (name, times_table)
    TABLES[f"{name}, ends"] = (name, ends_table)


def with_tables(text, saved):
    """A text, with its tables made anew."""

    def made(match):
        name, make = TABLES[match[1]]
        rows = make(name, saved[name])
        rows.insert(1, ["---"] * len(rows[0]))
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([f"<!-- table: {match[1]} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- table: (.*?) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def everything():
    """All that is saved, by the name of its experiment."""
    return load() | {"noise": json.loads(noise.SAVED.read_text())}


if __name__ == "__main__":
    RESULTS.write_text(with_tables(RESULTS.read_text(), everything()))
