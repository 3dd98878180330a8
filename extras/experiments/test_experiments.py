"""Tests of the measures, by numbers worked by hand, and of a run from its start to its picture.

python -m pytest -q extras/experiments
"""

import math
from functools import partial
from unittest import mock

import numpy as np
import pytest

import dppo
from test_dppo import tiny_task

pytest.importorskip("scipy", reason="the measures need scipy")
from extras.experiments import analysis, run, tasks  # noqa: E402, because they need scipy


def arm(*curves, every=1):
    """Runs with the seeds 0, 1, ..., of 10 seconds and 100 candidates a step. The evaluations
    of a curve are `every` steps apart."""
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
    assert analysis.time_to(run_of_it, 0.1, "steps") == 0  # it begins there
    assert math.isnan(analysis.time_to(run_of_it, 0.71, "steps"))
    assert analysis.time_to(run_of_it, 0.05, "steps") == pytest.approx(0.5)  # a gain of 0.05


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
    def gap(arm, control):
        return analysis.compared(partial(analysis.gap, "seconds"), arm, control).middle

    assert gap(arm([0.5] * 3, [0.6] * 3), arm([0.4] * 9, [0.4] * 9)) == pytest.approx(0.15)
    rising = arm([0.0, 1.0], [0.0, 1.0])  # on average, 0.5 until it ends
    assert gap(rising, arm([0.2] * 9, [0.4] * 9)) == pytest.approx(0.2)


def test_chance_is_what_halves_of_the_control_differ_by():
    # Of 0, 0, 0 and 1, every half has a mean that is 0.5 from the other's; of 0, 1, 1 and 4, two in
    # three splits have halves that differ by 2, and one by 1.
    for values, most in (([0, 0, 0, 1], 0.5), ([0, 1, 1, 4], 2)):
        control = arm(*([value] * 3 for value in values))
        found = analysis.by_chance(partial(analysis.gap, "steps"), control)
        assert found == pytest.approx(most / math.sqrt(2))


def test_epochs_end_between_evaluations():
    run_of_it = arm([0.2, 0.3, 0.5])["0"]
    for point in run_of_it["curve"]:
        point[2] = point[0] * analysis.EPOCHS * 2 / 3  # so the epochs end after 1.5 steps
    assert analysis.after_epochs(run_of_it) == pytest.approx([15, 1.5, 0.4])


def test_tables_are_those_of_the_saved_runs():
    text = analysis.RESULTS.read_text()
    assert analysis.with_tables(text, analysis.everything()) == text


def test_saved_runs_were_made_with_the_code_that_is_here():
    assert run.load() and run.made_otherwise() == []


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment of a few seconds, whose runs go to a folder of their own."""
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "SAVED", tmp_path / "runs.json")
    run.save({})
    settings = {"steps": 6, "eval_every": 2, "prompts_per_step": 4, "group_size": 4}
    settings |= {"max_completion_tokens": 8}
    arms = {"grpo-skip": 1e-4, "dppo (0.7, 0.7)": 1e-4}
    experiment = run.Experiment(settings, arms, 2, {"dppo (0.7, 0.7)": 1})
    monkeypatch.setattr(run, "EXPERIMENTS", {"tiny": experiment})
    monkeypatch.setattr(run, "PILOTS", {"tiny": (1e-4, 2e-4)})

    def load_tiny(config):
        return tiny_task()

    load = mock.Mock(side_effect=load_tiny, __name__="load_tiny")
    monkeypatch.setitem(tasks.TASKS, "tiny", load)
    return load


def main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["run.py", *map(str, arguments)])
    run.main()


def test_a_run_is_made_once_saved_and_compared(tiny, monkeypatch, capsys):
    runs = [(40, "grpo-skip"), (40, "dppo (0.7, 0.7)"), (41, "grpo-skip")]
    assert run.runs_of("tiny") == runs
    for seed, arm in [*runs, runs[0]]:
        main(monkeypatch, "tiny", seed, arm)
    assert tiny.call_count == 3
    assert "saved: None" in capsys.readouterr().out
    main(monkeypatch, "gather")
    saved = run.load()["tiny"]["grpo-skip"]["40"]
    assert [point[0] for point in saved["curve"]] == [0, 2, 4, 6]
    assert [point[2] for point in saved["curve"]] == [0, 8, 16, 24] and saved["completions"] == 96
    assert 0 < saved["rollout"] < 1 and 0 < saved["trained"] <= 1
    main(monkeypatch, "tiny", *runs[0])
    assert f"saved: {saved['curve']}" in capsys.readouterr().out


def test_a_pilot_is_shorter_and_prints_mean_accuracies(tiny, monkeypatch, capsys):
    run_alone = run.make_run
    monkeypatch.setattr(run, "make_all", lambda name, runs: [run_alone(name, *one) for one in runs])
    main(monkeypatch, "tiny", "pilot")
    [first, second] = run.make_run("tiny", 301, "dppo (0.7, 0.7)", 2e-4)["curve"]  # of two steps
    told = f"seed 301, dppo (0.7, 0.7), 0.0002: mean accuracy {second[3]:.3f}"
    assert second[0] == 2 and told in capsys.readouterr().out


def test_a_checksum_is_of_code_and_settings(tiny, monkeypatch):
    here = run.checksum("tiny", 40, "grpo-skip")
    assert here == run.checksum("tiny", 41, "grpo-skip")
    assert here != run.checksum("tiny", 40, "grpo-skip", 2e-4)
    source = run.inspect.getsource

    def changed(old, new):
        assert old in source(dppo)
        monkeypatch.setattr(run.inspect, "getsource", lambda it: source(it).replace(old, new))
        return run.checksum("tiny", 40, "grpo-skip")

    assert changed("rewards.nanmean", "rewards.nanmedian") != here  # in group_advantages
    assert changed("# ---- 4. The step", "# ---- another comment") == here
    assert changed('"""Samples and grades G', '"""Another docstring') == here
    assert changed("the model is in", "see") == here  # in train, which saves and prints


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
