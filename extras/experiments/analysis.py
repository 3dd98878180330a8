"""The measures that PLAN.md defines, and the tables of RESULTS.md.

    python extras/experiments/analysis.py    # runs.json, noise.json -> the tables

In RESULTS.md, a table stands between `<!-- table: NAME -->` and `<!-- end -->`.

A run is what run.py saves. An arm is {seed: run}. A comparison is an Estimate, with the bounds of
its 95% t-interval.
"""

import json
import re
import sys
from collections import namedtuple
from functools import partial
from itertools import combinations
from operator import itemgetter
from pathlib import Path

import numpy as np
from scipy import optimize, stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from extras.experiments import noise
from extras.experiments.run import load

RESULTS = Path(__file__).with_name("RESULTS.md")
CLOCKS = {"seconds": 1, "steps": 0}  # columns of a curve
GAINS_BELOW = 0.1  # lower levels are gains since the start of a run
# Levels of the tasks in runs.json:
LEVELS = {"sums": (0.70, 0.75), "digits": (0.80, 0.84), "SmolLM2": (0.03, 0.06)}
EPOCHS = 10 * 1024  # candidates in ten epochs of digits
EPOCH_ARMS = ["grpo", "grpo-skip", "dppo (0.7, 0.7)", "our rule (0.9, 0.7)"]
EPOCH_ARMS += ["CPPO (0, 0.7)", "GRESO"]  # which the paper compares, and ours

# What is compared beside each arm with the control:
OURS, PAPER = "our rule (0, 0.7)", "dppo (0, 0.7)"
PAIRS = [(PAPER, "random (0, 0.7)"), (OURS, PAPER), (OURS, "dppo (0, 0.9)")]
PAIRS += [("our rule (0.9, 0.7)", "dppo (0.7, 0.7)"), ("our rule (0.9, 0.7)", OURS)]
PAIRS += [("our rule (0, 0.85)", PAPER), ("grpo", "our rule (0.9, 0.7)")]

# `short` is the share of pairs in which a run never reached the level.
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
    level += accuracies[0] if level < GAINS_BELOW else 0
    accuracies = optimize.isotonic_regression(accuracies).x
    reached = np.flatnonzero(accuracies >= level)
    if len(reached) == 0:
        return np.nan
    i = reached[0]
    return np.interp(level, accuracies[max(0, i - 1) : i + 1], times[max(0, i - 1) : i + 1])


def length(run, clock):
    return curve_of(run, clock)[0][-1]


def after_epochs(run):
    """The seconds, the steps and the accuracy when EPOCHS candidates have passed."""
    steps, seconds, candidates, accuracies = np.array(run["curve"]).T
    columns = (seconds, steps, accuracies)
    return [np.interp(EPOCHS, candidates, column, right=np.nan) for column in columns]


# ==== Two runs ====
def log_ratio(level, clock, run, other):
    """Of the times to a level. A run that does not get there counts at its length."""
    pair = (run, other)
    times = [time_to(x, level, clock) for x in pair]
    times = [length(x, clock) if np.isnan(time) else time for x, time in zip(pair, times)]
    return np.log(times[0] / times[1])


def gap(clock, run, other):
    """The mean difference of accuracies at the evaluations of the second run, until the shorter
    run ends by this clock."""
    times, accuracies = curve_of(other, clock)
    differences = np.interp(times, *curve_of(run, clock)) - accuracies
    return differences[times <= length(run, clock)].mean()


def more_accurate(run, other):
    """The difference of accuracies after EPOCHS."""
    return after_epochs(run)[2] - after_epochs(other)[2]


# ==== Two arms ====
def interval(values):
    """The mean of values, with its t-interval."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    return Estimate(np.mean(values), low, high)


def compared(measure, arm, control):
    """A measure of the runs of two arms with the same seeds."""
    return interval([measure(arm[seed], control[seed]) for seed in arm])


def time_ratio(level, clock, arm, control):
    """The ratio of the times to a level."""
    bounds = np.exp(compared(partial(log_ratio, level, clock), arm, control)[:3])
    times = [[time_to(runs[seed], level, clock) for runs in (arm, control)] for seed in arm]
    return Estimate(*bounds, np.isnan(times).any(axis=1).mean())


def by_chance(measure, control):
    """What two arms, each with as many runs as the control, would differ by at most, in 95% of
    cases, if all were runs of the control (A/A). It is found from all splits of its runs into two
    halves. (A half has half as many runs, so it differs by sqrt(2) times as much.)"""
    runs = [*control.values()]
    values = np.array([[measure(run, other) for other in runs] for run in runs])
    rows = range(len(runs))
    differences = []
    for half in combinations(rows, len(runs) // 2):
        others = [row for row in rows if row not in half]
        differences.append(abs(values[np.ix_(half, others)].mean()))
    return np.quantile(differences, 0.95, method="higher") / np.sqrt(2)


# ==== Tables ====
def signed(estimate):
    """+0.016 ±0.007: a difference, whose t-interval is symmetric."""
    return f"{estimate.middle:+.3f} ±{estimate.high - estimate.middle:.3f}".replace("-", "−")


def cell(estimate):
    """0.81 (0.76–0.86), or only how many never got there, if they are too many."""
    middle, low, high, short = estimate
    if short > MOST_SHORT:
        return f"{short:.0%} never"
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def name_of(level):
    """0.75, or +0.06 if it is a gain."""
    return f"{level:+.2f}" if level < GAINS_BELOW else f"{level:.2f}"


def method(arm):
    """`dppo` (0.7, 0.7); only what a method is called in the code is set as code."""
    return re.sub(r"^(grpo(-skip)?|dppo|CPPO|GRESO|Literal)", r"`\g<0>`", arm)


def mean_of(arm, value):
    return np.mean([value(run) for run in arm.values()])


GAPS = [f"gap at equal {clock}" for clock in CLOCKS]


def comparison(name, arm, control):
    """Cells: the seconds to both levels, and the gaps at equal seconds and at equal steps."""
    ratios = [time_ratio(level, "seconds", arm, control) for level in LEVELS[name]]
    gaps = [compared(partial(gap, clock), arm, control) for clock in CLOCKS]
    return [", ".join(map(cell, ratios)), *map(signed, gaps)]


def by_chance_cells(name, control):
    """What chance makes of a comparison."""
    ratios = [np.exp(by_chance(partial(log_ratio, x, "seconds"), control)) for x in LEVELS[name]]
    gaps = [by_chance(partial(gap, clock), control) for clock in CLOCKS]
    times = ", ".join(f"{1 / ratio:.2f}–{ratio:.2f}" for ratio in ratios)
    return [times, *(f"±{x:.3f}" for x in gaps)]


def controls_table(name, saved):
    """What the log of the control shows."""
    columns = {"equal": "groups of equal rewards", "rollout": "rollouts' share of the time"}
    columns["trained"] = "completions trained"
    rows = [["task", *columns.values(), "accuracy, first–last"]]
    for task in LEVELS:
        runs = saved[task]["grpo-skip"]
        shares = [f"{mean_of(runs, itemgetter(column)):.0%}" for column in columns]
        curve = np.mean([curve_of(run, "steps")[1] for run in runs.values()], axis=0)
        rows.append([task, *shares, f"{curve[0]:.2f}–{curve[-1]:.2f}"])
    return rows


def task_table(name, saved):
    """All arms over the control, some over one another, and the control over itself, by chance."""
    arms = saved[name]
    control = arms["grpo-skip"]
    levels = " and ".join(map(name_of, LEVELS[name]))
    rows = [["method", "trained", f"seconds to {levels}", *GAPS]]
    for arm, runs in arms.items():
        if runs is not control:
            trained = f"{mean_of(runs, itemgetter('trained')):.0%}"
            rows.append([method(arm), trained, *comparison(name, runs, control)])
    for arm, other in PAIRS:
        if {arm, other} <= arms.keys():
            cells = comparison(name, arms[arm], arms[other])
            rows.append([f"{method(arm)} over {method(other)}", "", *cells])
    rows.append(["chance", "", *by_chance_cells(name, control)])
    return rows


def epochs_table(name, saved):
    """When ten epochs of candidates have passed."""
    arms = saved["digits"]
    rows = [["method", "steps", "seconds over `grpo`'s", "accuracy minus `grpo-skip`'s"]]
    for arm in EPOCH_ARMS:
        runs = arms[arm]
        found = {seed: after_epochs(run) for seed, run in runs.items()}
        steps = np.mean([at_end[1] for at_end in found.values()])
        ratios = [found[seed][0] / after_epochs(run)[0] for seed, run in arms["grpo"].items()]
        difference = signed(compared(more_accurate, runs, arms["grpo-skip"]))
        row = [method(arm), f"{steps:.0f}", f"{stats.gmean(ratios):.2f}"]
        rows.append([*row, difference if arm != "grpo-skip" else ""])
    return rows


def guesses_table(name, saved):
    rows = [["method", "share of guesses at the end", "accuracy on 9 to 12 digits"]]
    for arm, runs in saved["guess or pass"].items():
        row = [method(arm)]
        for column in (3, 5):
            values = [run["curve"][-1][column] for run in runs.values()]
            row.append(cell(Estimate(np.mean(values), min(values), max(values))))
        rows.append(row)
    return rows


def noise_table(name, saved):
    """The noise that pruning adds at first with each score, by draws in order. The scores keep
    half."""
    _, *scores = noise.SCORES  # without random
    labels = [f"half by {noise.SCORES[score]}" for score in scores]
    rows = [["task", "`dppo`", "random, as many", *labels]]
    for task, moments in saved["noise"].items():
        batches = moments["after 0 steps"]
        share = np.mean([b["paper's share"] for b in batches])
        of_rule = np.mean([b["paper's rule"][0] for b in batches])
        of_random = np.mean([b["random, paper's share"][0] for b in batches])
        _, *of_scores = noise.with_share(0.5, batches)
        others = [f"{value:.2f}" for value in (of_random, *of_scores)]
        rows.append([task, f"{of_rule:.2f} ({share:.2f})", *others])
    return rows


TABLES = {"controls": controls_table, "equal epochs": epochs_table, "noise": noise_table}
TABLES |= {"guess or pass": guesses_table}
TABLES |= dict.fromkeys(LEVELS, task_table)


def in_markdown(rows):
    """A table, whose first row is its head. A bar within a cell must not end it."""
    lines = []
    for row in rows:
        cells = [str(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def with_tables(text, saved):
    """A text, with its tables made anew."""

    def made(match):
        table = in_markdown(TABLES[match[1]](match[1], saved))
        return f"<!-- table: {match[1]} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- table: (.*?) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def everything():
    """All that is saved, by the name of its experiment."""
    return load() | {"noise": json.loads(noise.SAVED.read_text())}


if __name__ == "__main__":
    RESULTS.write_text(with_tables(RESULTS.read_text(), everything()))
