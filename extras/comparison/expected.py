"""What PLAN.md expects of "Time" and "Sums", to print beside what was found.

Where the plan says "as long", "as many" or "half", the range reaches a tenth to either side. Where
it names no level, the level is 0.80.
"""

from collections import namedtuple

from extras.comparison.statistics import (
    accuracy_at_the_end,
    differences,
    is_as_good,
    ratios,
    time_ratio,
    total,
)

# expected: a range of the estimate, or a verdict
Expectation = namedtuple("Expectation", "arm measure expected control", defaults=["grpo-skip"])

DPPO, OURS = "dppo (0.7, 0.7)", "our rule (0.95, 0), 20 prompts"
SMALL = "dppo (0.7, 0.7), 13 prompts"
SKIP_20 = "grpo-skip, 20 prompts"
TIME = [
    Expectation("grpo", "time to 0.75", (2.6, 3.0)),
    Expectation("grpo", "time to 0.80", (2.6, 3.0)),
    Expectation("grpo", "time to 0.84", (2.6, 3.0)),
    Expectation("grpo", "verdict", "as good"),
    Expectation(OURS, "time to 0.84", (0.5, 0.65)),
    Expectation(OURS, "time of the run", (0.45, 0.55)),
    Expectation(OURS, "verdict", "as good"),
    Expectation(OURS + ", with memory", "time to 0.84", (0.4, 0.6)),
    Expectation("our rule (0.9, 0)", "time to 0.80", (0.6, 0.9)),
    Expectation(DPPO, "time to 0.80", (0.75, 1.0)),
    Expectation(DPPO, "accuracy", (-0.05, -0.02)),
    Expectation(SMALL, "time to 0.80", (0.5, 0.8)),
    Expectation(SMALL, "steps", (0.9, 1.1)),
    Expectation("dppo (0.7, 0)", "time to 0.80", (0.9, 1.1), DPPO),
    Expectation("dppo (0, 0.7)", "time to 0.80", (0.9, 1.0)),
    Expectation("dppo (0, 0.7)", "verdict", "as good"),
    Expectation("Literal (0.7, 0.7)", "time to 0.80", (0.9, 1.1), DPPO),
    Expectation("Literal (0.7, 0.7)", "accuracy", (-0.02, 0.02), DPPO),
    Expectation("CPPO, 32 prompts", "time to 0.80", (0.8, 1.1)),
    Expectation("CPPO, 32 prompts", "verdict", "as good"),
    Expectation("CPPO, 128 prompts", "verdict", "undecided"),
    Expectation("GRESO", "verdict", "undecided"),
    Expectation("dppo (0.7, 0.7), all weights 1", "verdict", "undecided"),
]
CONTROLS = [
    Expectation(SKIP_20, "time of the run", (1.0, 1.15)),
    Expectation(SKIP_20, "verdict", "as good"),
    Expectation(SKIP_20, "time to 0.84", (0.7, 1.05)),
    Expectation(OURS, "time to 0.84", (0.6, 1.0), SKIP_20),
]
SUMS = [
    Expectation("dppo (0, 0.7)", "time to 0.70", (0.7, 0.85)),
    Expectation("dppo (0, 0.7)", "verdict", "as good"),
    Expectation("dppo (0, 0.9)", "time to 0.70", (0.6, 0.75)),
    Expectation("dppo (0, 0.9)", "verdict", "as good"),
    Expectation(OURS, "time to 0.70", (0.8, 1.1)),
    Expectation(OURS, "accuracy", (-0.05, -0.01)),
    Expectation(DPPO, "time to 0.70", (0.75, 1.0)),
    Expectation(DPPO, "accuracy", (-0.08, -0.04)),
    Expectation("dppo (0.7, 0)", "time to 0.70", (1.0, 1.4)),
    Expectation("dppo (0.7, 0)", "accuracy", (-0.09, -0.04)),
]
EXPECTED = {"time": TIME, "time, controls": CONTROLS, "sums": SUMS}


def found(runs, expectation):
    """What the runs {arm: {seed: run}} say: [estimate, low, high], or a verdict."""
    pair = runs[expectation.arm], runs[expectation.control]
    kind, _, level = expectation.measure.partition(" to ")
    if kind == "time":
        return time_ratio(*pair, float(level))
    if kind == "time of the run":
        return ratios(total("processor_seconds"), *pair)
    if kind == "steps":
        return ratios(total("steps"), *pair)
    difference = differences(accuracy_at_the_end, *pair)
    return difference if kind == "accuracy" else is_as_good(difference)


def is_as_expected(expectation, value):
    """Whether the estimate is in the expected range, or the verdict is the expected one."""
    if isinstance(expectation.expected, str):
        return value == expectation.expected
    low, high = expectation.expected
    return low <= value[0] <= high
