"""The measures and verdicts that PLAN.md defines, as functions of runs.

A run has a curve: for each evaluation [step, processor seconds, of which rollouts, completions
generated, accuracy]. `runs` are those of one arm, {seed: run}, and an arm is always compared with
a control's runs of the same seeds. What is measured comes as [estimate, low, high], where the
last two are the bounds of its 95% interval.
"""

import math
from itertools import pairwise
from statistics import mean, stdev

import torch

T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


# ==== Paired seeds ====
def interval(values):
    """The mean of paired differences, with its t-interval."""
    middle = mean(values)
    half = T_QUANTILES[len(values)] * stdev(values) / math.sqrt(len(values))
    return [middle, middle - half, middle + half]


def interval_of_ratios(values):
    """The geometric mean of paired ratios, with the t-interval of their logarithms."""
    logarithms = [math.log(value) for value in values]
    return [math.exp(bound) for bound in interval(logarithms)]


def paired(measure, runs, controls):
    """[(measure of a run, measure of the control's run with the same seed)]"""
    return [(measure(runs[seed]), measure(controls[seed])) for seed in sorted(runs, key=int)]


def differences(measure, runs, controls):
    return interval([value - other for value, other in paired(measure, runs, controls)])


def ratios(measure, runs, controls):
    return interval_of_ratios([value / other for value, other in paired(measure, runs, controls)])


def mean_of(measure, runs):
    return mean(measure(run) for run in runs.values())


def is_as_good(difference):
    """The verdict on a difference of accuracies, by the interval around it."""
    _, low, high = difference
    if low > -0.02:
        return "as good"
    return "worse" if high < -0.02 else "undecided"


# ==== One run ====
def total(name):
    """A measure: one of a run's totals."""
    return lambda run: run["totals"][name]


def seconds_at_the_end(run):
    return run["curve"][-1][1]


def accuracy_at_the_end(run):
    """The mean of the last five evaluations."""
    return mean(point[-1] for point in run["curve"][-5:])


def accuracy_of_all(run):
    """The mean of all evaluations after the first, which comes before training."""
    return mean(point[-1] for point in run["curve"][1:])


def until(level, column):
    """A measure: a column of the curve at the first evaluation that reaches a level, or at the
    last one."""

    def measure(run):
        reached = [point for point in run["curve"] if point[-1] >= level]
        return (reached or run["curve"][-1:])[0][column]

    return measure


# ==== Time to an accuracy ====
def curve_at(curve, seconds):
    """The accuracy after so many processor seconds, on straight lines between evaluations. After
    the last evaluation it is constant."""
    points = [(point[1], point[-1]) for point in curve]
    for (start, before), (end, after) in pairwise(points):
        if seconds <= end:
            return before + (after - before) * (seconds - start) / (end - start)
    return points[-1][1]


def accuracies_at(runs, times):
    """(seeds, times) the accuracy of each run after these processor seconds."""
    rows = []
    for seed in sorted(runs, key=int):
        rows.append([curve_at(runs[seed]["curve"], seconds) for seconds in times])
    return torch.tensor(rows, dtype=torch.float64)


def times_of(runs):
    """The processor seconds of all evaluations of all runs. Between these, a mean curve is
    straight."""
    return sorted({point[1] for run in runs.values() for point in run["curve"]})


def mean_curve(runs):
    """[(processor seconds, the mean of the runs' accuracies after these)]"""
    times = times_of(runs)
    return [*zip(times, accuracies_at(runs, times).mean(dim=0).tolist())]


def first_times(times, accuracies, level):
    """(n,) times, (curves, n) accuracies -> (curves,) when each curve first reaches the level, on
    straight lines, or inf."""
    times = torch.tensor(times, dtype=torch.float64)
    reached = accuracies >= level
    end = reached.long().argmax(dim=1)  # the first one, or 0
    start = (end - 1).clamp(min=0)
    before = accuracies.gather(1, start[:, None])[:, 0]
    after = accuracies.gather(1, end[:, None])[:, 0]
    share = ((level - before) / (after - before)).nan_to_num(0.0)  # 0/0 if it starts there
    found = times[start] + share * (times[end] - times[start])
    return found.where(reached.any(dim=1), math.inf)


def time_to(runs, level):
    """The processor seconds until the mean curve first reaches a level, or inf."""
    times = times_of(runs)
    middle = accuracies_at(runs, times).mean(dim=0, keepdim=True)
    return first_times(times, middle, level).item()


def at_equal_time(runs, controls):
    """The mean difference of the accuracies after equal processor seconds, over the time until the
    arm of the shorter runs ends, with its t-interval over the seeds."""
    end = min(mean_of(seconds_at_the_end, of_arm) for of_arm in (runs, controls))
    times = torch.linspace(0, end, 200).tolist()
    gaps = accuracies_at(runs, times) - accuracies_at(controls, times)
    return interval(gaps.mean(dim=1).tolist())


def bootstrap_shares(seeds, samples):
    """(samples, seeds) the share that each seed has in a sample of as many, with repeats."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(seeds, (samples, seeds), generator=generator)
    return torch.nn.functional.one_hot(drawn, seeds).double().mean(dim=1)


def time_ratio(runs, controls, level, samples=10_000):
    """time_to of an arm over a control's. The bounds are the 2.5% and 97.5% quantiles over
    bootstrap samples of the seeds, the same seeds for both."""
    shares = bootstrap_shares(len(runs), samples)
    found = []
    for of_arm in (runs, controls):
        times = times_of(of_arm)
        found.append(first_times(times, shares @ accuracies_at(of_arm, times), level))
    ratio = found[0] / found[1]  # NaN if neither reaches the level, so that nothing is known
    low = ratio.nan_to_num(0.0, posinf=math.inf).quantile(0.025, interpolation="nearest")
    high = ratio.nan_to_num(math.inf, posinf=math.inf).quantile(0.975, interpolation="nearest")
    return [time_to(runs, level) / time_to(controls, level), low.item(), high.item()]
