"""Tests of the measures, by numbers worked by hand, and of a run from its start to its picture.

python -m pytest -q extras/experiments
"""

import json
import math
from unittest import mock

import numpy as np
import pytest

import dppo
from test_dppo import tiny_task

pytest.importorskip("scipy", reason="the measures need scipy")
from extras.experiments import analysis, run, tasks  # noqa: E402, because they need scipy


def arm(*curves, every=1):
    """Runs with the seeds 0, 1, ..., of 10 seconds and 100 completions a step. Each curve has an
    evaluation in `every` steps."""
    runs = {}
    for seed, accuracies in enumerate(curves):
        steps = [every * n for n in range(len(accuracies))]
        curve = [[n, 10.0 * n, 100 * n, accuracy] for n, accuracy in zip(steps, accuracies)]
        runs[str(seed)] = {"curve": curve}
    return runs


SLOW = [0.1, 0.2, 0.6, 0.4, 0.3, 0.7]  # nearest without a fall: 0.1 0.2 0.43 0.43 0.43 0.7


def test_a_run_reaches_a_level_where_the_nearest_curve_that_never_falls_does():
    run_of_it = arm(SLOW)["0"]
    assert analysis.time_to(run_of_it, 0.15, "steps") == pytest.approx(0.5)
    assert analysis.time_to(run_of_it, 0.6, "seconds") == pytest.approx(46.25)  # 0.1667 of 0.2667
    assert analysis.time_to(run_of_it, 0.1, "completions") == 0  # it begins there
    assert math.isnan(analysis.time_to(run_of_it, 0.71, "steps"))


def test_times_are_compared_by_the_geometric_mean_of_paired_ratios():
    slow = arm([0.0, 0.2, 0.4, 0.6], [0.0, 0.2, 0.4, 0.6])
    fast = arm([0.0, 0.3, 0.6], [0.0, 0.15, 0.3, 0.3])
    found = analysis.time_ratio(0.3, "steps", fast, slow)  # 1/1.5 and 2/1.5
    # The t-interval of two logarithms that are log 2 apart: 12.706 (log 2)/2 to either side.
    bounds = [math.sqrt(2) / 1.5 * math.exp(sign * 12.706 * math.log(2) / 2) for sign in (0, -1, 1)]
    assert found[:3] == pytest.approx(bounds, rel=1e-3) and found.short == 0
    assert analysis.cell(found) == f"{bounds[0]:.2f} ({bounds[1]:.2f}–{bounds[2]:.2f})"
    # A run that never reaches 0.6 counts at its 3 steps. The slow one takes 3 steps to get there.
    found = analysis.time_ratio(0.6, "steps", fast, slow)
    assert found.middle == pytest.approx(math.sqrt(2 / 3 * 3 / 3)) and found.short == 0.5
    assert analysis.cell(found) == "50% never"


def test_a_run_gains_nothing_by_being_evaluated_more_often():
    rng = np.random.default_rng(0)

    def noisy(every):
        truth = 0.86 - 0.4 * np.exp(-np.arange(0, 481, every) / 60)
        return arm(*rng.normal(truth, 0.03, (500, len(truth))), every=every)

    often, seldom = noisy(every=12), noisy(every=32)
    for level in (0.78, 0.80, 0.82):  # the first crossing of smoothed curves would give 0.94
        assert abs(analysis.time_ratio(level, "steps", often, seldom).middle - 1) < 0.03


def test_gaps_count_until_the_shorter_run_ends():
    gap = analysis.at_equal_time("seconds", arm([0.5] * 3, [0.6] * 3), arm([0.4] * 9, [0.4] * 9))
    assert gap.middle == pytest.approx(0.15)
    rising = arm([0.0, 1.0], [0.0, 1.0])  # on average, 0.5 until it ends
    gap = analysis.at_equal_time("completions", rising, arm([0.2] * 9, [0.4] * 9))
    assert gap.middle == pytest.approx(0.2)
    assert analysis.at_the_end(arm([9, 1, 2, 3, 4, 5])["0"]) == 3


def test_tables_are_those_of_the_saved_runs():
    text = analysis.RESULTS.read_text()
    assert analysis.with_tables(text, analysis.everything()) == text


def test_a_run_is_made_once_saved_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "SAVED", tmp_path / "runs.json")
    run.save({})
    settings = {"epochs": 2.0, "eval_every": 0, "prompts_per_step": 4, "group_size": 4}
    settings |= {"max_completion_tokens": 8}
    experiment = run.Experiment("tiny", settings, [3], ["grpo-skip", "dppo (0.7, 0.7)"])
    monkeypatch.setattr(run, "EXPERIMENTS", {"tiny": experiment})
    load = mock.Mock(side_effect=lambda config: tiny_task())
    monkeypatch.setitem(tasks.TASKS, "tiny", load)
    for name in [*experiment.arms, experiment.arms[0]]:
        monkeypatch.setattr("sys.argv", ["run.py", "tiny", "3", name])
        run.main()
    assert load.call_count == 2
    run.gather()
    saved = json.loads(run.SAVED.read_text())["tiny"]["grpo-skip"]["3"]
    steps = [point[0] for point in saved["curve"]]
    assert steps == [0, 4, 8] and saved["prompts"] == 32  # 16 prompts an epoch, 4 a step
    assert saved["curve"][-1][2] == 8 * 4 * 4 >= saved["trained"] > 0
    assert 0 < saved["rollout_seconds"] < saved["curve"][-1][1]
    assert "saved: None" in capsys.readouterr().out
    run.main()
    assert f"saved: {saved['curve']}" in capsys.readouterr().out


def test_sums_are_written_with_their_last_digit_first():
    tokenizer = dppo.transformers.ByT5Tokenizer(extra_ids=0)
    for example in tasks.different(9, tasks.draw_sum, tasks.random.Random(0), tokenizer, None):
        a, b = map(int, example["prompt"][:-1].split("+"))
        assert int(example["answer"][::-1]) == a + b


def test_letters_are_worth_a_pass_and_seldom_a_guess():
    prompts = ["q="] * 5
    texts, answers = ["?", "ab", "?", "7", "12"], ["unknown", "unknown", "passes", "guesses", "12"]
    assert tasks.guess_reward(prompts, texts, answer=answers) == [0.2, 0, 1, 1, 1]
    guesses = [tasks.guess_reward(["q="], ["7"], answer=["unknown"])[0] for _ in range(2000)]
    assert 0.05 < sum(guesses) / 2000 < 0.15
