"""Tests of what .github/experiments.py computes a verdict from: python -m pytest -q .ci"""

import importlib.util
import json
import math
from pathlib import Path
from unittest import mock

import pytest

PATH = Path(__file__).resolve().parent.parent / ".github" / "experiments.py"
spec = importlib.util.spec_from_file_location("experiments", PATH)
experiments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiments)


def run_of(values, every=1, **measures):
    """A run with these accuracies after 0, 1, 2, ... times `every` steps of these measures."""
    curve = [[every * i, 0.5 * i, value] for i, value in enumerate(values)]
    measures = dict.fromkeys(experiments.OF_STEPS, 1.0) | {"noise_of_one": 32.0} | measures
    run = {name: [value] * curve[-1][0] for name, value in measures.items()}
    return run | {"curve": curve, "settings": {"max_grad_norm": 6.0}}


def test_means_leave_out_the_start_and_runs_are_paired_by_seed():
    assert experiments.mean_of_curve(run_of([9, 0.5, 0.7])) == pytest.approx(0.6)
    runs = {"dppo": {"1": "a1", "2": "a2", "3": "a3"}, "grpo-skip": {"2": "b2", "1": "b1"}}
    assert experiments.pairs(runs, "dppo") == [("a1", "b1"), ("a2", "b2")]


def test_intervals_are_of_student_s_t_and_those_of_ratios_by_logarithms():
    assert experiments.interval([0.1, 0.3]) == [0.2, -1.0706, 1.4706]  # 12.706 * 0.1414/sqrt(2)
    assert experiments.interval([0.1, 0.3] * 4) == [0.2, 0.1106, 0.2894]  # 2.365 * 0.1069/sqrt(8)
    assert experiments.ratios([0.5, 2.0, 0.5, 2.0]) == [1.0, 0.28, 3.573]  # 3.182 * 0.8/sqrt(4)


@pytest.mark.parametrize("better, as_good", [(0.0, True), (-0.019, True), (-0.0198, False)])
def test_digits_are_as_good_if_the_whole_interval_is_above_the_margin(better, as_good):
    runs = {"grpo-skip": {}, "dppo": {}}
    for seed in range(8):
        level = 0.1 * seed
        runs["grpo-skip"][str(seed)] = run_of([0, level, level], every=20)
        level += better + 0.0005 * (-1) ** seed
        pruned = {"prompts_rolled": 3, "completions_trained": 5, "noise": 1.5}
        runs["dppo"][str(seed)] = run_of([0, level - 0.1, level + 0.1], every=20, **pruned)
    result = experiments.analysis_of_digits(runs)
    assert result["dppo"]["as good"] == as_good and "as good" not in result["grpo-skip"]
    assert (result["grpo-skip"]["noise"], result["dppo"]["noise"]) == (1, 1.5)
    assert result["dppo"]["rollouts"] == 40 * 3 * 8 and result["dppo"]["completions trained"] == 200
    assert result["dppo"]["rollouts after the first epoch"] == 8 * 3 * 8  # which has 32 steps


def test_a_measure_counts_up_to_the_first_evaluation_that_reaches_the_level():
    run = run_of([0.1, 0.2, 0.4, 0.3, 0.5], every=3) | {"prompts_rolled": [*range(12)]}
    for level, steps in ((0.2, 3), (0.3, 6), (0.4, 6), (0.5, 12), (0.6, 12)):
        assert experiments.until(run, level, "prompts_rolled") == sum(range(steps))


GAINS = [(0.8, "yes"), (0.895, "undecided"), (0.905, "undecided"), (0.92, "no")]


@pytest.mark.parametrize("ratio, gain", GAINS)
def test_a_gain_needs_the_whole_interval_of_paired_ratios_below_0_9(ratio, gain):
    runs = {"grpo-skip": {}, "dppo-proportional": {}}
    for seed in range(8):
        slow = run_of([0, 0.2, 0.3, 0.4], every=6, processor_seconds=1.0 + seed)
        seconds = ratio * (1 + seed) * math.exp(0.01 * (-1) ** seed)
        ours = run_of([0, 0.1, 0.3, 0.2], every=6, processor_seconds=seconds, prompts_rolled=0.5)
        runs["grpo-skip"][str(seed)] = slow
        runs["dppo-proportional"][str(seed)] = ours | {"grad_norm": [5.9, 6.1] * 9}
    runs["grpo-skip"]["8"] = run_of([0, 0.2, 0.2, 0.2], every=6)
    result = experiments.analysis_of_hard(runs)
    assert result["grpo-skip"]["reach the level"] == "8 of 9"
    result = result["dppo-proportional"]
    assert result["processor_seconds, a gain"] == gain and result["reach the level"] == "8 of 8"
    assert result["clipped"] == 0.5
    interval = [ratio * math.exp(shift) for shift in (0, -0.00894, 0.00894)]  # 2.365 * 0.01/sqrt(7)
    assert result["processor_seconds over grpo-skip's"] == pytest.approx(interval, abs=6e-4)
    assert result["prompts_rolled over grpo-skip's"] == [0.5] * 3
    assert result["prompts_rolled, a gain"] == "yes"


def test_noise_by_gradients_is_over_that_of_as_many_prompts_and_of_32_after_the_first_epoch():
    first = {"N": 1, "B": 1, "w": [9.0], "g": [9.0], "A": [9.0]}
    pruned = {"N": 4, "B": 2, "w": [2.0, 1.0], "g": [16.0, 4.0], "A": [1.0, 1.0]}
    plain = {"N": 1, "B": 1, "w": [1.0], "g": [1.0], "A": [2.0]}
    of_seed = {"5": [first] * 32 + [pruned], "6": [first] * 32 + [plain]}
    result = experiments.analysis_of_gradients({"dppo-proportional": of_seed})
    assert result["5"] == {
        "1/worth by g^2": 0.944,  # 2 (4*16 + 1*4)/16 = 8.5, over (2*16 + 1*4)/4 = 9
        "1/worth by A^2": 0.833,  # 2 (4 + 1)/16 = 0.625, over (2 + 1)/4 = 0.75
        "noise by g^2": 15.111,  # 4.25 over 9/32
    }
    assert result["6"]["1/worth by g^2"] == 1 and result["6"]["noise by g^2"] == 32
    assert result["all"]["1/worth by g^2"] == 0.95  # (8.5 + 1)/(9 + 1)


def test_what_is_kept_of_a_run_has_its_steps_and_seconds_until_each_evaluation():
    records = [{"evaluation": {"accuracy": 0.1}}, {}, {"evaluation": {"accuracy": 0.25}}]
    for step, record in enumerate(records):
        record["step"] = step
        if step > 0:
            record |= dict.fromkeys(experiments.OF_STEPS, [1 / 3]) | {"processor_seconds": 1.5}
    run = experiments.kept(records)
    assert run["curve"] == [[0, 0, 0.1], [2, 3, 0.25]]
    assert run["processor_seconds"] == [1.5] * 2 and run["pi"] == [[0.3333]] * 2


def test_runs_are_gathered_and_analysed_if_every_arm_has_two_seeds(monkeypatch, tmp_path):
    for name, value in {"RESULTS": tmp_path / "results.json", "RUNS": tmp_path / "runs"}.items():
        monkeypatch.setattr(experiments, name, value)
    monkeypatch.setattr(experiments, "draw_picture", mock.Mock())
    name = "timed, on a GPU"
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    old = {"grpo": {"runs": {"1": 2}}, "experiments": {name: {"runs": {}, "analysis": "old"}}}
    experiments.RESULTS.write_text(json.dumps(old))
    for seed in (0, 1):
        for arm in experiments.ARMS[name]:
            experiments.gather()
            saved = json.loads(experiments.RESULTS.read_text())
            assert "analysis" not in saved["experiments"][name] and saved["grpo"] == old["grpo"]
            run = run_of([0, 0.5], processor_seconds=2.0 + seed)
            (folder / f"{arm}-{seed}.json").write_text(json.dumps(run))
    experiments.gather()
    saved = json.loads(experiments.RESULTS.read_text())["experiments"][name]
    assert [*saved["runs"]["grpo-skip"]] == ["0", "1"]
    assert saved["analysis"]["grpo"] == {"processor seconds of a step, by seed": [2.0, 3.0]}
