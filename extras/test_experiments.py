"""Tests of what extras/experiments.py computes a verdict from: python -m pytest -q .ci"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo
from extras import experiments
from test_dppo import seldom_teaches, tiny_task

ROOT = Path(dppo.__file__).parent


def run_of(values, every=1, seconds=0.5, **of_steps):
    """A run with these accuracies after 0, 1, 2, ... times `every` steps of these measures."""
    curve = [[every * i, every * i * seconds, value] for i, value in enumerate(values)]
    measures = dict.fromkeys((*experiments.SUMS, *experiments.OF_STEPS), 1.0)
    measures |= {"noise_of_one": 32.0, "clipped": 0} | of_steps
    steps = curve[-1][0]
    run = {name: [value] * steps for name, value in measures.items()}
    sums = {name: value * steps for name, value in measures.items()}
    return run | {"curve": curve, "sums": sums | {"steps": steps}}


# ==== Statistics ====
def test_means_begin_after_the_start_or_with_the_fifth_from_the_end_and_runs_are_paired_by_seed():
    run = run_of([9, 0.5, 0.7, 0.1, 0.1, 0.1, 0.6])
    assert experiments.accuracy(run, 1) == pytest.approx(0.35)
    assert experiments.accuracy(run, -5) == pytest.approx(0.32)
    runs = {"dppo": {"1": "a1", "2": "a2", "3": "a3"}, "grpo-skip": {"2": "b2", "1": "b1"}}
    assert experiments.pairs(runs, "dppo") == [("a1", "b1"), ("a2", "b2")]


def test_intervals_are_of_student_s_t_and_those_of_ratios_by_logarithms():
    assert experiments.interval([0.1, 0.3]) == [0.2, -1.0706, 1.4706]  # 12.706 * 0.1414/sqrt(2)
    assert experiments.interval([0.1, 0.3] * 4) == [0.2, 0.11061, 0.28939]  # 2.365 * 0.1069/sqrt(8)
    assert experiments.ratios([0.5, 2.0, 0.5, 2.0]) == [1.0, 0.28, 3.573]  # 3.182 * 0.8/sqrt(4)


def test_a_verdict_needs_the_whole_interval_on_one_side_of_the_bound():
    intervals = [[0.2, 0.11, 0.3], [0.2, 0.1, 0.3], [0.0, -0.1, 0.1], [0.0, -0.1, 0.09]]
    verdicts = [experiments.verdict(interval, 0.1, "above", "below") for interval in intervals]
    assert verdicts == ["above", "undecided", "undecided", "below"]


# ==== Epochs ====
def test_a_run_is_evaluated_at_the_first_step_after_each_epoch(monkeypatch):
    def make_step(task, rule, optimizer, before):
        return {"candidates_so_far": before["candidates_so_far"] + 4}

    monkeypatch.setattr(dppo, "evaluate", mock.Mock(return_value={"accuracy": 0.5}))
    task, rule = SimpleNamespace(train=[None] * 10), SimpleNamespace(config=None)
    records = [{"candidates_so_far": 7}]  # of a history
    for _ in range(8):  # after 4, 8, 12, 16, 20, 24, 28 and 32 prompts
        step = experiments.step_by_epochs(make_step, 7, task, rule, None, records[-1])
        records.append(step)
    assert [i for i, record in enumerate(records) if "accuracy" in record] == [3, 5, 8]
    assert records[3]["accuracy"] == 0.5


def test_accuracy_between_two_evaluations_is_on_a_straight_line_and_then_stays():
    curve = [[0, 0.0, 0.4], [10, 2.0, 0.6], [20, 6.0, 0.8]]
    for seconds, value in ((0, 0.4), (1, 0.5), (2, 0.6), (3, 0.65), (6, 0.8), (9, 0.8)):
        assert experiments.accuracy_after(seconds, curve) == pytest.approx(value)
    run = {"curve": [[i, seconds, 0.0] for i, seconds in enumerate((0, 0.5, 1, 2, 3, 4, 9))]}
    value = experiments.in_the_same_time(run, {"curve": curve})  # not at 0 and 0.5 seconds
    assert value == pytest.approx((0.5 + 0.6 + 0.65 + 0.7 + 0.8) / 5)


def epochs_of(better):
    """Runs of eight seeds: grpo has a level of accuracy, dppo is better by so much plus or minus
    0.001 in a quarter of the time, and grpo-skip begins at the level and rises by 0.01 a second."""
    runs = {"grpo": {}, "grpo-skip": {}, "dppo": {}}
    for seed in range(8):
        level = 0.1 * seed
        sign = (-1) ** seed
        grpo = run_of([0.9, 0.9] + [level] * 5, processor_seconds=10 * math.exp(0.01 * sign))
        skip = run_of([level + 0.01 * i for i in range(11)], seconds=1.0, processor_seconds=3.0)
        ours = run_of([0.9, 0.9] + [level + better + 0.001 * sign] * 5, processor_seconds=2.5)
        for point, seconds in zip(ours["curve"], (0, 1, 2, 4, 6, 8, 20)):
            point[1] = seconds  # grpo-skip has level + 0.02, 0.04, 0.06, 0.08 and 0.1
        ours |= {"packing_density": 0.9 + 0.01 * sign}
        for arm, run in {"grpo": grpo, "grpo-skip": skip, "dppo": ours}.items():
            runs[arm][str(seed)] = {"packing_density": None} | run
    return runs


# The half of the interval of better + 0.001 or better - 0.001: 2.365 * 0.001/sqrt(7) = 0.00089.
AS_GOOD = [(-0.019, "as good"), (-0.0195, "undecided"), (-0.0205, "undecided"), (-0.021, "worse")]


@pytest.mark.parametrize("better, told", AS_GOOD)
def test_after_equal_epochs_an_arm_is_as_good_as_grpo_if_the_interval_is_above_the_margin(
    better, told
):
    result = experiments.analysis_of_epochs(epochs_of(better))
    interval = [better, better - 0.00089, better + 0.00089]
    assert result["dppo"]["minus grpo"] == pytest.approx(interval, abs=1e-6)
    assert result["dppo"]["against grpo"] == told
    assert "minus grpo" not in result["grpo"]


SAME_TIME = [(0.062, "better"), (0.0605, "undecided"), (0.0595, "undecided"), (0.058, "worse")]


@pytest.mark.parametrize("better, told", SAME_TIME)
def test_in_the_same_time_an_arm_is_compared_with_grpo_skip_of_the_same_seed(better, told):
    result = experiments.analysis_of_epochs(epochs_of(better))
    assert result["dppo"]["grpo-skip in the same time"] == pytest.approx(0.35 + 0.06)
    interval = [better - 0.06, better - 0.06089, better - 0.05911]
    assert result["dppo"]["minus grpo-skip in the same time"] == pytest.approx(interval, abs=1e-6)
    assert result["dppo"]["in the same time"] == told
    # grpo ends after 3 seconds, its last five evaluations are after 1, 1.5, 2, 2.5 and 3.
    assert result["grpo"]["minus grpo-skip in the same time"] == [-0.02] * 3
    assert "in the same time" not in result["grpo-skip"]


def test_of_epochs_are_told_sums_and_the_speed_up():
    result = experiments.analysis_of_epochs(epochs_of(0.01))
    told = result["dppo"]
    assert (told["steps"], told["generated"], told["trained"]) == (6, 48, 6)
    assert told["processor seconds"] == 15 and told["accuracy"] == pytest.approx(0.36)
    assert told["density of packing"] == 0.9 and "density of packing" not in result["grpo"]
    interval = [4 * math.exp(shift) for shift in (0, -0.0089, 0.0089)]  # 2.365 * 0.01/sqrt(7)
    assert told["speed-up over grpo"] == pytest.approx(interval, abs=6e-4)
    assert told["speed-up over grpo-skip"] == [2.0] * 3  # 10 steps of 3 seconds, 6 of 2.5


def test_greso_trains_with_its_own_step_and_a_step_tells_its_seconds_and_noise(tmp_path):
    task = tiny_task(seldom_teaches, prompts=64)
    settings = {"group_size": 4, "max_completion_tokens": 8, "prompts_per_step": 4, "steps": 2}
    for method, trained in (("extras.rivals:GRESO", [16, 16]), ("grpo", [16, 16])):
        folder = tmp_path / method
        records = experiments.train(folder, task, method=method, **settings)[1:]
        assert [record["completions_trained"] for record in records] == trained
        assert all(record["processor_seconds"] > 0 for record in records)
        rolled = [record["prompts_rolled"] for record in records]
        assert (min(rolled) > 4) == (method == "extras.rivals:GRESO")
    assert records[1]["noise"] > 0
    for record in records:  # of grpo, which has that of four unpruned prompts
        assert record["noise_of_one"] == pytest.approx(4 * record["noise"])


# ==== Guess or pass ====
def test_a_pass_is_worth_a_fifth_a_guess_a_tenth_and_evaluations_count_them():
    reward = experiments.guess_or_pass
    assert reward([""] * 4, ["?", " ?", "??", "12"], ["unknown"] * 4) == [0.2, 0.2, 0, 0]
    wins = sum(reward([""] * 9000, ["7"] * 9000, ["unknown"] * 9000))
    assert 750 < wins < 1050  # 900 and five standard deviations
    assert reward([""] * 4, ["7", "?", "77", ""], ["guesses"] * 4) == [1, 0, 0, 0]
    assert reward([""] * 3, ["7", "?", "??"], ["passes"] * 3) == [0, 1, 0]
    assert reward([""] * 3, ["0124", "?", "7"], ["0124", "0124", "7"]) == [1, 0, 1]


def test_of_guesses_are_told_the_mean_and_the_lowest_and_highest_seed_at_the_end():
    runs = {"dppo": {}}
    for seed, (guesses, right) in enumerate(((0.1, 0.7), (0.2, 0.5), (0.6, 0.9))):
        runs["dppo"][str(seed)] = {"curve": [[0, 0, 1, 0, 0], [9, 1, guesses, 0, right]]}
    result = experiments.analysis_of_guesses(runs)
    assert result["dppo"]["guesses at the end"] == [0.3, 0.1, 0.6]
    assert result["dppo"]["right at the end"] == [0.7, 0.5, 0.9]


# ==== Digits ====
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


# ==== SmolLM2 ====
def test_a_measure_counts_up_to_the_first_evaluation_that_reaches_the_level():
    run = run_of([0.1, 0.2, 0.4, 0.3, 0.5], every=3) | {"prompts_rolled": [*range(12)]}
    for level, steps in ((0.2, 3), (0.3, 6), (0.4, 6), (0.5, 12), (0.6, 12)):
        assert experiments.until(run, level, "prompts_rolled") == sum(range(steps))
        assert experiments.until(run, level, "processor_seconds") == 0.5 * steps


GAINS = [(0.8, "yes"), (0.895, "undecided"), (0.905, "undecided"), (0.92, "no")]


@pytest.mark.parametrize("ratio, gain", GAINS)
def test_a_gain_needs_the_whole_interval_of_paired_ratios_below_0_9(ratio, gain):
    runs = {"grpo-skip": {}, "dppo-proportional": {}}
    for seed in range(8):
        slow = run_of([0, 0.2, 0.3, 0.4], every=6, seconds=1.0 + seed)
        seconds = ratio * (1 + seed) * math.exp(0.01 * (-1) ** seed)
        pruned = {"prompts_rolled": 0.5, "clipped": 0.5}
        ours = run_of([0, 0.1, 0.3, 0.2], every=6, seconds=seconds, **pruned)
        runs["grpo-skip"][str(seed)] = slow
        runs["dppo-proportional"][str(seed)] = ours
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


# ==== What is saved ====
def test_of_a_run_are_kept_its_evaluations_sums_and_some_of_each_step():
    records = [{"step": 0, "accuracy": 0.15, "accuracy of guesses": 0.1, "accuracy of right": 0.2}]
    for step, (grad_norm, density) in enumerate(((0.5, 0.75), (6.5, None), (1.5, 0.5)), 1):
        record = dict.fromkeys((*experiments.SUMS, *experiments.OF_STEPS), 1 / 3)
        record |= {"processor_seconds": 1.5, "prompts_rolled": step}
        record |= {"step": step, "grad_norm": grad_norm, "packing_density": density}
        records.append(record)
    means = {"accuracy": 0.4, "accuracy of guesses": 0.3, "accuracy of right": 0.55}
    records[2] |= means | {"evaluation": []}
    run = experiments.kept(records, {"max_grad_norm": 6.0}, ("prompts_rolled", "noise"))
    assert run["curve"] == [[0, 0, 0.1, 0.2], [2, 3, 0.3, 0.55]]
    assert run["prompts_rolled"] == [1, 2, 3] and run["noise"] == [0.3333] * 3
    assert (run["sums"]["steps"], run["sums"]["prompts_rolled"], run["sums"]["clipped"]) == (
        3,
        6,
        1,
    )
    assert run["sums"]["processor_seconds"] == 4.5 and run["packing_density"] == 0.625
    assert experiments.kept(records, {})["sums"]["clipped"] == 2  # at 1 without a setting
    del records[1]["packing_density"], records[3]["packing_density"]
    assert experiments.kept(records, {})["packing_density"] is None


def test_runs_are_gathered_and_analysed_if_every_arm_has_two_seeds(monkeypatch, tmp_path):
    for name, value in {"RESULTS": tmp_path / "results.json", "RUNS": tmp_path / "runs"}.items():
        monkeypatch.setattr(experiments, name, value)
    monkeypatch.setattr(experiments, "draw_picture", mock.Mock())
    name = "guess or pass"
    monkeypatch.setattr(experiments, "ANALYSES", {name: experiments.analysis_of_guesses})
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    old = {"grpo": {"runs": {"1": 2}}, "experiments": {name: {"runs": {}, "analysis": "old"}}}
    old["experiments"]["pilot"] = {"analysis": "made elsewhere"}
    experiments.RESULTS.write_text(json.dumps(old))
    for seed in (0, 1):
        for arm in reversed(experiments.ARMS[name]):
            experiments.gather()
            saved = json.loads(experiments.RESULTS.read_text())
            assert "analysis" not in saved["experiments"][name] and saved["grpo"] == old["grpo"]
            run = {"curve": [[100, 0.0, 0.25 + 0.5 * seed, 0.0, 0.5]]}
            (folder / f"{arm}-{seed}.json").write_text(json.dumps(run))
    experiments.gather()
    saved = json.loads(experiments.RESULTS.read_text())["experiments"]
    assert [*saved[name]["runs"]["dppo"]] == ["0", "1"]
    assert saved[name]["analysis"]["grpo"]["guesses at the end"] == [0.5, 0.25, 0.75]
    assert [*saved[name]["analysis"]] == [*experiments.ARMS[name]]
    assert saved["pilot"] == {"analysis": "made elsewhere"}


def test_a_run_is_made_once_and_printed_beside_the_saved_one(monkeypatch, tmp_path, capsys):
    name, arm = "digits", experiments.WITH_HISTORY[0]
    run = run_of([0.5, 0.75], every=3, prompts_rolled=4)
    results = {"experiments": {name: {"runs": {arm: {"0": run}}}}}
    for attribute, value in {"RESULTS": tmp_path / "results.json", "RUNS": tmp_path}.items():
        monkeypatch.setattr(experiments, attribute, value)
    experiments.RESULTS.write_text(json.dumps(results))

    def make_run(name, arm, seed, task, folder):
        folder.mkdir(parents=True)
        (folder / "checkpoint.pt").write_text("memory")
        return run

    make_run = mock.Mock(side_effect=make_run)
    monkeypatch.setattr(experiments, "make_run", make_run)
    for seed, told in ((0, "prompts_rolled: 12; 12"), (0, "[0.75]; [0.75]"), (1, "[0.75]; -")):
        experiments.make_runs(name, [seed], [arm], None)
        assert told in capsys.readouterr().out
    assert make_run.call_count == 2  # the second time, it was there
    assert experiments.runs_of(name, results)[arm] == {"0": run, "1": run}
    left = [path.relative_to(tmp_path / name) for path in (tmp_path / name).glob("**/*.pt")]
    assert sorted(map(str, left)) == [f"{arm}-{seed}.memory/checkpoint.pt" for seed in (0, 1)]


def test_a_run_with_the_memory_of_another_waits_for_that(monkeypatch, tmp_path, capsys):
    without, arm = experiments.WITH_HISTORY
    monkeypatch.setattr(experiments, "RUNS", tmp_path)
    make_run = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(experiments, "make_run", make_run)
    experiments.make_runs("epochs", [7], [arm], None)
    assert f"first needs: 'epochs' 0 '{without}'" in capsys.readouterr().out
    memory = tmp_path / "epochs" / f"{without}-0.memory"
    memory.mkdir(parents=True)
    (memory / "checkpoint.pt").touch()
    with pytest.raises(InterruptedError):
        experiments.make_runs("epochs", [7], [arm], None)
    assert make_run.call_args.kwargs == {"history": str(memory)}


def test_runs_with_the_memory_of_another_are_made_at_last(monkeypatch, tmp_path):
    monkeypatch.setattr(experiments, "RUNS", tmp_path)
    made = []

    def make_run(name, arm, seed, task, folder, **history):
        made.append((arm.removeprefix("dppo-proportional (0.9, 0)"), seed))
        folder.mkdir(parents=True)
        (folder / "checkpoint.pt").touch()
        return run_of([0.5, 0.75])

    monkeypatch.setattr(experiments, "make_run", make_run)
    experiments.make_runs("epochs", range(8), experiments.WITH_HISTORY, None)
    assert made == [("", seed) for seed in range(8)] + [(", with history", i) for i in range(8)]


def test_what_was_saved_stays_when_runs_are_gathered(monkeypatch, tmp_path):
    monkeypatch.setattr(experiments, "RUNS", tmp_path)
    (tmp_path / "epochs").mkdir()
    (tmp_path / "epochs" / "grpo-0.json").write_text('"repeated"')
    (tmp_path / "epochs" / "grpo-9.json").write_text('"new"')
    results = {"experiments": {"epochs": {"runs": {"grpo": {"0": "saved"}}}}}
    assert experiments.runs_of("epochs", results)["grpo"] == {"0": "saved", "9": "new"}


MISTAKES = ["digit 0", "digits", "digits x", "digits 0,", "digits 0 CPPO", "digits 0 grpo 1"]


@pytest.mark.parametrize("arguments", MISTAKES)
def test_what_is_asked_wrongly_is_told_in_a_line(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments.py", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        experiments.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_saved_has_the_analysis_that_is_saved_with_it():
    saved = json.loads(experiments.RESULTS.read_text())["experiments"]
    for name, analyse in experiments.ANALYSES.items():
        if "analysis" in saved.get(name, {}):
            assert analyse(saved[name]["runs"]) == saved[name]["analysis"]
    assert len(saved["hard, on a GPU"]["analysis"]) == 4


def test_a_curve_crosses_a_level_on_the_line_between_its_points():
    assert experiments.crossing([(0, 0.0), (2, 0.2), (4, 0.6), (6, 0.2)], 0.3) == 2.5
    assert math.isnan(experiments.crossing([(0, 0.0), (2, 0.2)], 0.3))


def test_without_new_runs_gathering_changes_nothing_and_draws_the_picture(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    saved = experiments.RESULTS.read_text()
    for name in ("RESULTS", "PICTURE", "RUNS"):
        monkeypatch.setattr(experiments, name, tmp_path / name)
    experiments.RESULTS.write_text(saved)
    experiments.gather()
    assert experiments.RESULTS.read_text() == saved
    assert experiments.PICTURE.stat().st_size > 10_000


def test_the_step_of_the_picture_has_completions_for_each_prompt_that_is_kept():
    step = json.loads(experiments.RESULTS.read_text())["one step"]
    kept = [max(states) >= 0 for states in step["states"]]
    assert len(kept) == len(step["pi"]) and abs(sum(kept) - sum(step["pi"])) < 1
    assert all(is_kept for is_kept, pi in zip(kept, step["pi"]) if pi == 1)
    for is_kept, states in zip(kept, step["states"]):
        assert len(states) == 8 and (min(states) >= 0) == is_kept
