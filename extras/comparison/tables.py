"""The tables of RESULTS.md and DETAILS.md, as Markdown, from comparison.json.

There, the lines from `<!-- table: NAME -->` to `<!-- end -->` are such a table.
"""

import re
from functools import partial
from pathlib import Path
from statistics import mean

from extras.comparison.arms import ARMS, SEEDS
from extras.comparison.cells import (
    bracketed,
    compared_cell,
    difference_cells,
    markdown,
    method,
    plain,
    rows_of,
    signed,
    thousands,
)
from extras.comparison.expected import EXPECTED, found, is_as_expected
from extras.comparison.statistics import (
    accuracy_at_the_end,
    accuracy_of_all,
    at_equal_time,
    interval_of_ratios,
    mean_of,
    ratios,
    time_ratio,
    time_to,
    total,
    until,
)

EXTRAS = Path(__file__).resolve().parent.parent
PAGES = (EXTRAS / "RESULTS.md", EXTRAS / "DETAILS.md")
GROUP = 8  # completions of a prompt
LEVELS = {"time": (0.75, 0.80, 0.84), "sums": (0.65, 0.70, 0.74)}
LEVELS["time, controls"] = LEVELS["time"]
SKIP = "grpo-skip"
RATIO_OF_SECONDS = partial(ratios, total("processor_seconds"))


# ==== Time, and Sums ====
def times(name, control, results):
    runs, levels = results[name], LEVELS[name]

    def cells(of_arm):
        row = []
        for level in levels:
            row.append(compared_cell(partial(time_ratio, level=level), of_arm, runs[control]))
        return [*row, plain(time_to(of_arm, levels[-1]), 1)]

    head = [f"time to {level:.2f}, over `{control}`'s" for level in levels]
    return [["method", *head, f"seconds to {levels[-1]:.2f}"], *rows_of(runs, cells)]


def ends(name, results):
    runs = results[name]

    def cells(of_arm):
        row = difference_cells(accuracy_at_the_end, of_arm, runs[SKIP])
        row.append(compared_cell(at_equal_time, of_arm, runs[SKIP], signed))
        return [*row, compared_cell(RATIO_OF_SECONDS, of_arm, runs[SKIP])]

    head = ["method", "accuracy at the end", f"minus `{SKIP}`'s", "verdict"]
    head += ["at equal time", f"time of the whole run, over `{SKIP}`'s"]
    return [head, *rows_of(runs, cells)]


def costs(name, results):
    def cells(of_arm):
        def of(name):
            return mean_of(total(name), of_arm)

        rollouts = of("rollout_processor_seconds")
        row = [of("steps"), of("prompts_seen"), GROUP * of("prompts_rolled")]
        row = [*map(thousands, [*row, of("completions_trained")])]
        row.append(f"{of('steps_clipped') / of('steps'):.0%}")
        row += [f"{rollouts:.1f}", f"{of('processor_seconds') - rollouts:.1f}"]
        return [*row, f"{of('zero_variance_of_first_steps'):.0%}"]

    head = ["method", "steps", "prompts looked at", "completions", "of which trained"]
    head += ["steps clipped", "seconds in rollouts", "in training"]
    return [[*head, "groups without variance, first 32 steps"], *rows_of(results[name], cells)]


def by_seed(name, results):
    def cells(of_arm):
        return [f"{accuracy_at_the_end(of_arm[seed]):.3f}" for seed in sorted(of_arm, key=int)]

    seeds = sorted(next(iter(results[name].values())), key=int)
    return [["method", *(f"seed {seed}" for seed in seeds)], *rows_of(results[name], cells)]


def expectations(name, results):
    rows = [["method", "measure", "compared with", "expected", "found", "as expected?"]]
    for expectation in EXPECTED[name]:
        arm, measure, expected, control = expectation
        value = found(results[name], expectation)
        if isinstance(expected, str):
            texts = [expected, value]
        else:
            show = signed if measure == "accuracy" else plain
            texts = [f"{show(expected[0])} to {show(expected[1])}", bracketed(value, show)]
        told = "yes" if is_as_expected(expectation, value) else "**no**"
        rows.append([method(arm), measure, method(control), *texts, told])
    return rows


# ==== The other experiments ====
def rates(results):
    runs = results["rates"]

    def cells(of_arm):
        row = [mean_of(total("steps"), of_arm), GROUP * mean_of(total("prompts_rolled"), of_arm)]
        row = [*map(thousands, row), compared_cell(RATIO_OF_SECONDS, of_arm, runs[SKIP])]
        row.append(compared_cell(partial(time_ratio, level=0.75), of_arm, runs[SKIP]))
        return row + difference_cells(accuracy_at_the_end, of_arm, runs[SKIP])

    head = ["method", "steps", "completions", f"seconds of the run, over `{SKIP}`'s"]
    head += ["seconds to 0.75, likewise", "accuracy at the end", f"minus `{SKIP}`'s", "verdict"]
    return [head, *rows_of(runs, cells)]


def digits(results):
    head = ["seeds", "method", "completions", f"over `{SKIP}`'s", "of which trained"]
    head += ["as noisy as so many prompts", "accuracy, mean of all evaluations"]
    rows = [[*head, f"minus `{SKIP}`'s", "verdict"]]
    for name in ("digits", "digits, new seeds"):
        control = results[name][SKIP]
        for arm, of_arm in results[name].items():
            rolled = mean_of(total("prompts_rolled"), of_arm)
            share = rolled / mean_of(total("prompts_rolled"), control)
            row = [f"{SEEDS[name][0]} to {SEEDS[name][-1]}", method(arm)]
            row += [thousands(GROUP * rolled), f"{share:.2f}"]
            row.append(thousands(mean_of(total("completions_trained"), of_arm)))
            row.append(f"{mean_of(total('noise_in_prompts'), of_arm):.1f}")
            rows.append(row + difference_cells(accuracy_of_all, of_arm, control))
    return rows


def worth(results):
    rows = [["seed", "1/worth by gradients", "1/worth by A²"]]
    for seed, told in results["digits by gradients"].items():
        rows.append([seed, f"{told['1/worth by g^2']:.2f}", f"{told['1/worth by A^2']:.2f}"])
    return rows


GENERATED, TRAINED = 3, 4  # columns of SmolLM2's curves


def smollm2(results):
    head = ["norm clipped at", "seeds", "method", "steps clipped", "completions until 0.3"]
    rows = [[*head, f"over `{SKIP}`'s", f"of them trained, over `{SKIP}`'s"]]
    for name, norm in (("SmolLM2", "6"), ("SmolLM2, clipped", "1")):
        control = results[name][SKIP]
        for arm, of_arm in results[name].items():
            clipped = mean_of(total("steps_clipped"), of_arm) / mean_of(total("steps"), of_arm)
            row = [norm, str(len(of_arm)), method(arm), f"{clipped:.0%}"]
            row.append(thousands(mean_of(until(0.3, GENERATED), of_arm)))
            for column in (GENERATED, TRAINED):
                row.append(compared_cell(partial(ratios, until(0.3, column)), of_arm, control))
            rows.append(row)
    return rows


def smollm2_levels(results):
    runs = results["SmolLM2"]
    arms = [arm for arm in runs if arm != SKIP]
    rows = [["level", *map(method, arms)]]
    for level in (0.15, 0.20, 0.25, 0.30, 0.35):
        gains = [ratios(until(level, GENERATED), runs[arm], runs[SKIP]) for arm in arms]
        rows.append([f"{level:.2f}", *map(bracketed, gains)])
    return rows


def smollm2_seconds(results):
    rows = [["method", "seconds of the median step, seed 0", "seed 1"]]
    for arm, seconds in results["SmolLM2, seconds of a step"].items():
        rows.append([method(arm), *map(plain, seconds)])
    return rows


def guess_or_pass(results):
    def cells(of_arm):
        row = []
        for column in (4, 6):
            values = [run["curve"][-1][column] for run in of_arm.values()]
            row.append(bracketed([mean(values), min(values), max(values)]))
        return row

    head = ["method", "share of guesses at the end", "accuracy on 9 to 12 digits"]
    return [head, *rows_of(results["guess or pass"], cells)]


def packing(results):
    rows = [["sequences", "how many", "density packed", "padded", "time, packed over padded"]]
    for name, told in results["packing"].items():
        pairs = told["seconds packed, alone"]
        ratio = bracketed(interval_of_ratios([packed / alone for packed, alone in pairs]))
        densities = map(plain, told["density packed, alone"])
        rows.append([name, str(told["completions"]), *densities, ratio])
    return rows


# ==== The pages ====
# {name: (the experiment that it is about, the function that makes it)}
TABLES = {
    "rates": ("rates", rates),
    "digits": ("digits", digits),
    "worth of a rollout": ("digits by gradients", worth),
    "SmolLM2": ("SmolLM2", smollm2),
    "SmolLM2, levels": ("SmolLM2", smollm2_levels),
    "SmolLM2, seconds": ("SmolLM2, seconds of a step", smollm2_seconds),
    "guess or pass": ("guess or pass", guess_or_pass),
    "packing": ("packing", packing),
}
for name in LEVELS:
    TABLES[f"{name}, over grpo-skip"] = (name, partial(times, name, SKIP))
    if "grpo" in ARMS[name]:
        TABLES[f"{name}, over grpo"] = (name, partial(times, name, "grpo"))
    TABLES[f"{name}, ends"] = (name, partial(ends, name))
    TABLES[f"{name}, costs"] = (name, partial(costs, name))
    TABLES[f"{name}, seeds"] = (name, partial(by_seed, name))
    TABLES[f"{name}, expected"] = (name, partial(expectations, name))


def with_tables(text, results):
    """A text with its tables made anew. A table stays as it is if its experiment has no results."""

    def made(match):
        name = match.group(1)
        experiment, table = TABLES[name]
        if experiment not in results:
            return match.group(0)
        return f"<!-- table: {name} -->\n{markdown(table(results))}\n<!-- end -->"

    return re.sub(r"<!-- table: (.*?) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def write(results):
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), results))
