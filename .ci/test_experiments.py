"""Tests of what .github/experiments.py computes a verdict from: python -m pytest -q .ci"""

import importlib.util
import math
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / ".github" / "experiments.py"
spec = importlib.util.spec_from_file_location("experiments", PATH)
experiments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiments)


def run_of(values, tokens=10, rolled=2, noise=1.0, every=1):
    """A run with these accuracies after 0, 1, 2, ... times `every` steps."""
    steps = every * (len(values) - 1)
    run = {"curve": [[every * i, 0.5 * i, value] for i, value in enumerate(values)]}
    run |= {"tokens_generated": [tokens] * steps, "prompts_rolled": [rolled] * steps}
    run |= {"completions_trained": [3] * steps, "tokens_trained": [7] * steps}
    run |= {"rollout_worth": [2.0] * steps, "prompts_seen": [1024] * steps}
    run |= {"prompt_worth": [1 + step / 100 for step in range(1, steps + 1)]}
    return run | {"noise": [noise] * steps, "noise_of_one": [32.0] * steps}


def test_means_leave_out_the_start_and_differences_are_paired_by_seed():
    runs = {"a": {"1": run_of([9, 0.5, 0.7]), "2": run_of([9, 0.3, 0.3]), "3": run_of([9, 9, 9])}}
    runs["b"] = {"2": run_of([0, 0.1, 0.3]), "1": run_of([0, 0.5, 0.5])}
    assert experiments.differences(runs, "a", "b") == pytest.approx([0.1, 0.1])
    assert experiments.interval([0.1, 0.3]) == [0.2, -1.0706, 1.4706]  # 12.706 * 0.1414/sqrt(2)


@pytest.mark.parametrize("better, as_good", [(0.0, True), (-0.019, True), (-0.03, False)])
def test_digits_are_as_good_if_the_whole_interval_is_above_the_margin(better, as_good):
    runs = {"grpo-skip": {}, "dppo": {}}
    for seed in range(8):
        scatter = 0.0005 * (-1) ** seed
        runs["grpo-skip"][str(seed)] = run_of([0, 0.5, 0.6])
        level = better + scatter
        runs["dppo"][str(seed)] = run_of([0, 0.5 + level, 0.6 + level], rolled=1, noise=1.5)
    result = experiments.analysis_of_digits(runs)
    assert result["dppo"]["as good"] == as_good and "as good" not in result["grpo-skip"]
    assert result["dppo"]["noise"] == 1.5 and result["grpo-skip"]["noise"] == 1


def test_tokens_count_up_to_the_evaluation_that_reaches_the_level():
    run = run_of([0.1, 0.2, 0.4, 0.3])
    assert experiments.tokens_until(run, 0.2) == 10 and experiments.tokens_until(run, 0.3) == 20
    assert experiments.tokens_until(run, 0.5) == math.inf


def test_equal_noise_is_also_compared_after_the_first_epoch_and_at_the_end():
    control, worse = [0, 0.2, 0.4, *[0.4] * 6], [0, 0.2, 0.3, *[0.3] * 5, 0.2]
    runs = {"grpo-skip, 16": {seed: run_of(control, every=12) for seed in "12"}}
    runs["dppo-proportional"] = {"1": run_of([0, *[0.4] * 8], 5, every=12)}
    runs["dppo-proportional"]["2"] = run_of(worse, 5, every=12)
    result = experiments.analysis_of_equal_noise(runs)["dppo-proportional"]
    assert result["tokens until the control's end, over the control's"] == [0.25]
    assert result["seeds in which it gets there"] == "1 of 2"
    means = {"": -0.0375, ", after the first epoch": -0.0583, ", at the end": -0.1}
    for part, difference in means.items():  # seed 1: 0.2/8, 0, 0; seed 2: -0.8/8, -0.7/6, -0.2
        assert result["minus control" + part][0] == pytest.approx(difference, abs=1e-4)
    assert result["tokens_generated"] == 480 and result["tokens_trained"] == 7 * 96


def test_prompt_worth_is_read_in_the_step_that_ends_the_fourth_epoch_and_in_the_last():
    runs = [run_of([0] * 9), run_of([0] * 9) | {"prompts_seen": [512] * 8}]
    result = experiments.worths(runs, prompts=1000)
    assert result["prompt_worth after 4 epochs"] == [1.06, 1.04, 1.08]  # steps 4 and 8
    assert result["prompt_worth at the end"] == [1.08, 1.08, 1.08]


def test_worth_is_that_of_its_formula_and_one_if_all_pi_are_equal():
    squares = [0.0, 1.0, 4.0, 0.0]
    of_rule, of_best = experiments.inverse_worth([0.5] * 4, squares)
    assert of_rule == pytest.approx(1.0) and of_best == pytest.approx(0.75**2 / 1.25)
    of_rule, _ = experiments.inverse_worth([0.2, 0.5, 1.0, 0.3], squares)
    assert of_rule == pytest.approx(0.5 * (2 + 4) / 4 / 1.25)
    run = run_of([0, 1]) | {
        "measured": {"48": {"pi": [0.2, 0.5, 1, 0.3], "g": squares, "A": squares}}
    }
    result = experiments.analysis_of_worth({"as it is": {"10": run, "11": run}})
    assert result["as it is"]["1/worth by g^2"] == [0.6, 0.6, 0.6]


def test_noise_by_gradients_is_over_that_of_as_many_prompts_and_of_32_after_the_first_epoch():
    first = {"N": 1, "B": 1, "w": [9.0], "g": [9.0], "A": [9.0]}
    pruned = {"N": 4, "B": 2, "w": [2.0, 1.0], "g": [16.0, 4.0], "A": [1.0, 1.0]}
    plain = {"N": 1, "B": 1, "w": [1.0], "g": [1.0], "A": [2.0]}
    of_seed = {"5": [first] * 32 + [pruned], "6": [first] * 32 + [plain]}
    result = experiments.analysis_of_gradients({"dppo-proportional": of_seed})
    assert result["5"] == {
        "1/worth by g^2": 0.944,  # 2 (4*16 + 1*4)/16 = 8.5, over (2*16 + 1*4)/4 = 9
        "1/worth by A^2": 0.833,  # 2 (4 + 1)/16 = 0.625, over (2 + 1)/4 = 0.75
        "1/worth by g^2, cut": 0.833,  # of the first group, (2/4)^2 16 is cut to 1, and 16/2^2 too
        "noise by g^2": 15.111,  # 4.25 over 9/32
        "noise by g^2, cut": 4.444,  # 1.25 over 9/32
    }
    assert result["6"]["1/worth by g^2"] == 1 and result["6"]["noise by g^2"] == 32
    assert result["all"]["1/worth by g^2"] == 0.95  # (8.5 + 1)/(9 + 1)
