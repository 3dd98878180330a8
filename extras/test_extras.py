"""Tests of what there is to fork beside our rule: rivals, a reward, README's code.

python -m pytest -q .ci/test_extras.py
"""

import json
import math
import re
import shlex
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from unittest import mock

import datasets
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo
from extras import rivals
from test_dppo import (
    ADVANTAGES,
    REWARDS,
    G,
    Given,
    every_result,
    metrics,
    recorded,
    rule_with_history,
    run,
    seldom_teaches,
    tiny_model,
    tiny_task,
    tiny_tokenizer,
)

ROOT = Path(dppo.__file__).parent


# ==== rivals.py ====
def train_with(method, out):
    """Four steps of four prompts, where every second prompt teaches."""
    task = tiny_task(seldom_teaches, prompts=64)
    run(out, task, method=method, prompts_per_step=4, steps=4)


def test_cppo_trains_the_largest_advantage_of_each_group(tmp_path):
    out = tmp_path / "run"
    train_with("extras.rivals:CPPO", out)
    for record in metrics(out)[1:]:
        assert record["prompts_rolled"] == 4
        teach = 4 * (1 - record["zero_variance_fraction"])
        assert record["completions_trained"] == round(teach)  # floor(0.3 * 4) = 1 of each


def test_cppo_keeps_k_of_each_group_that_have_a_gradient():
    advantages = torch.tensor([[0.1, -3.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0]])
    for rate, kept in ((0.5, [0, 1, 0, 1]), (0.25, [0, 1, 1, 1]), (0.9, [0, 1, 0, 0])):
        rule = rivals.CPPO(dppo.Config(completion_prune_rate=rate), 2)
        pi = rule.completion_probabilities(advantages, torch.ones(2))
        assert pi.tolist() == [kept, [0] * 4]


def test_greso_refills_its_batch_with_groups_that_teach(tmp_path):
    out = tmp_path / "run"
    train_with("extras.rivals:GRESO", out)
    assert recorded(out, "completions_trained") == [16] * 4  # four whole groups
    assert all(prompts > 4 for prompts in recorded(out, "prompts_rolled"))


def test_other_rules_make_their_own_step_when_rivals_are_imported(tmp_path):
    out = tmp_path / "run"
    train_with("grpo", out)
    assert recorded(out, "prompts_rolled") == [4] * 4


def test_greso_makes_its_own_step_from_the_command_line(tmp_path):
    settings = "--steps 2 --prompts_per_step 4 --group_size 4"
    settings += " --eval_prompts 4 --eval_samples 1"
    out = tmp_path / "run"
    command = [sys.executable, "dppo.py", "--method", "extras.rivals:GRESO", *settings.split()]
    subprocess.run([*command, "--output_dir", out], check=True, capture_output=True, cwd=ROOT)
    assert recorded(out, "completions_trained") == [16, 16]
    assert all(prompts > 4 for prompts in recorded(out, "prompts_rolled"))


def test_greso_keeps_a_prompt_with_p_to_the_power_of_its_streak():
    rule = rivals.GRESO(dppo.Config(), 4)
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    for _ in range(2):  # a third each is always right, never right, and teaches
        rule.remember(torch.arange(3), rewards, dppo.group_advantages(rewards))
    p = 0.5 - 0.02  # both kinds have more than their share
    assert torch.allclose(rule.prompt_probabilities(), torch.tensor([p**2, p**2, 1, 1]).double())
    rule.remember(torch.tensor([0]), rewards[[1]], torch.zeros(1, 2))
    pi = torch.tensor([p - 0.01, (p - 0.01) ** 2, 1, 1]).double()  # from then on, never right
    assert torch.allclose(rule.prompt_probabilities(), pi)
    assert rule.memory["p_easy"][0] == pytest.approx(p + 0.01)


def test_greso_tells_groups_by_the_rewards_that_exist():
    rule = rivals.GRESO(dppo.Config(), 2)
    rewards = torch.tensor([[math.nan, 1.0], [math.nan, math.nan]])
    rule.remember(torch.arange(2), rewards, dppo.group_advantages(rewards))
    assert rule.memory["streak"].tolist() == [1, 0]


def test_uniform_keeps_as_many_as_dppo_does_each_with_the_same_pi():
    of_dppo = rule_with_history("dppo", r_o=0.6)
    uniform = rule_with_history("extras.rivals:Uniform", r_o=0.6)
    assert uniform.prompt_probabilities().eq(1).all()
    pi = uniform.completion_probabilities(ADVANTAGES, torch.ones(6))
    assert pi.sum() == pytest.approx(of_dppo.completion_probabilities(ADVANTAGES, None).sum())
    assert len(pi[ADVANTAGES != 0].unique()) == 1 and pi[ADVANTAGES == 0].eq(0).all()


def test_unweighted_keeps_what_dppo_keeps_and_weighs_it_alike():
    w_q, w_qi = torch.tensor([1.0, 2.5]), torch.tensor([[0.0, 4.0, 1.0], [2.0, 0.0, 0.0]])
    weights = rule_with_history("extras.rivals:Unweighted").weights(w_q, w_qi, 4)
    assert weights.tolist() == [[0, 4, 4], [4, 0, 0]]  # N G/3 = 4: the mean of the three


def test_literal_removes_the_lowest_for_certain_and_weighs_the_rest_as_dppo_does():
    scores = torch.tensor([3.0, 0.2, 0.1, 0.0, math.nan, 0.0, 0.3, 3.0])
    weights = rivals.without_the_lowest(scores, 0.7)  # of five low ones, three
    assert weights.tolist() == [1, 2.5, 0, 0, 1, 0, 2.5, 1]
    of_dppo = 1 / dppo.keep_probabilities(scores, 0.7)
    assert weights[weights > 0].equal(of_dppo[weights > 0])
    assert rivals.without_the_lowest(torch.ones(4), 0.9).eq(1).all()  # none is low


def test_literal_s_step_weighs_what_it_keeps_by_both_levels():
    given = Given()
    rule = rule_with_history("extras.rivals:Literal", 0.7, 0.7, prompts_per_step=4)
    rewards = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]).double()
    rule.remember(torch.arange(1, 6), rewards, dppo.group_advantages(rewards))
    step = given.step(rule, torch.optim.SGD(given.model.parameters()))
    # Of the low prompts 2, 3 and 5, the first two are removed.
    assert (step.N, step.prompts.tolist(), step.w_q.tolist()) == (6, [0, 1, 4, 5], [1, 1, 1, 3])
    scores = step.A.abs().where(step.A != 0, math.nan)
    of_completions = (step.A != 0) * rivals.without_the_lowest(scores, 0.7)
    assert (step.A != 0).sum() > of_completions.count_nonzero() > 0
    assert step.weights[0].equal(step.w_q[:, None] * of_completions)


# ==== README's code and commands, as they are printed ====
def readme_block(word):
    """The one indented block with this word in it."""
    blocks = re.findall("(?:^    .*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    [block] = [textwrap.dedent(block) for block in blocks if word in block]
    return block


def run_command(block, *more):
    """A command of README, with more arguments, in this process."""
    words = shlex.split(block.replace("\\\n", ""))
    with mock.patch.object(sys, "argv", [*words[words.index("dppo.py") :], *more]):
        dppo.main()


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """An empty folder, in which the Hub has tiny models and data; -> settings of small runs."""
    rows = [{"question": f"{a}=", "answer": a, "problem": f"{a}="} for a in range(20)]
    data = datasets.Dataset.from_list([row | {"answer": str(row["answer"])} for row in rows])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ enable_thinking }}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = datasets.load_dataset

    def of_hub(path, *names, split, data_files=None):
        if data_files:
            return load(path, data_files=data_files, split=split)
        return data.select(range(8) if split == "test" else range(8, 20))

    monkeypatch.setattr(datasets, "load_dataset", of_hub)
    auto = mock.Mock(return_value=tiny_tokenizer(template))
    monkeypatch.setattr(dppo.transformers.AutoTokenizer, "from_pretrained", auto)
    of_model = mock.Mock(side_effect=lambda *_, **__: tiny_model(torch.float32))
    monkeypatch.setattr(dppo.transformers.AutoModelForCausalLM, "from_pretrained", of_model)
    small = {"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 8, "eval_samples": 1}
    return [f"--{name}={value}" for name, value in small.items()]


def test_readme_s_reward_trains_goes_on_and_is_plotted(newcomer):
    Path("mine.py").write_text(readme_block("def reward"))
    command = readme_block("--reward mine:reward")
    run_command(command, *newcomer, "--eval_every=2")
    steps = len(metrics(Path("runs/mine")))
    run_command(command, *newcomer, "--eval_every=2", "--epochs=5")  # repeated, with more epochs
    assert len(metrics(Path("runs/mine"))) > steps > 4
    pytest.importorskip("matplotlib").use("agg")
    log = {}
    exec(readme_block("import pandas"), log)
    assert Path("accuracy.png").stat().st_size > 5000 and log["log"].hours.iloc[-1] > 0
    import mine

    assert mine.reward(["<think>4</think> 12.", [{"content": "13"}]], answer=[12, "12"]) == [1, 0]


@pytest.mark.parametrize("word", ["openai/gsm8k", "MATH-lighteval"])
def test_readme_s_other_commands_run(word, newcomer):
    pytest.importorskip("math_verify")
    block = readme_block(word)
    run_command(block, *newcomer, "--epochs=0", "--steps=2", "--output_dir=run")
    assert "enable_thinking" in block and len(metrics(Path("run"))) == 3
    ours = re.search("`(--method extras.*?)`", (ROOT / "README.md").read_text())[1].split()
    run_command(block, *newcomer, "--epochs=0", "--steps=2", "--output_dir=ours", *ours)


def test_the_rules_in_readme_prune_without_bias():
    known = {}
    exec(readme_block("class Half"), known)
    rules = [value for value in known.values() if isinstance(value, type)]
    rewards, advantages = REWARDS[[2, 5]], ADVANTAGES[[2, 5]]  # the second is solved
    for kind in rules:
        rule = kind(dppo.Config(group_size=G), 2)
        rule.remember(torch.arange(2), rewards, advantages)
        expectation, outcomes = torch.zeros_like(rewards), 0
        windows = every_result(partial(dppo.prune_prompts, rule, torch.arange(2), 2, None))
        for p, (N, kept, w_q) in windows:
            assert N == 2
            inputs = (rule, advantages[kept], w_q, None)
            for q, w in every_result(partial(dppo.prune_completions, *inputs)):
                expectation[kept] += p * q * w_q[:, None] * w
                outcomes += 1
        assert outcomes > 1
        needed = (advantages != 0).double()
        assert torch.allclose(expectation * needed, needed, atol=1e-10)
    assert rules


# ==== math_reward.py ====
ANSWERS = [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
    (r"so it is $\boxed{\dfrac12}$.", "0.5", 1),
    (r"\boxed{1/2}", r"\tfrac{1}{2}", 1),
    (r"\boxed{2}, not 3", "2", 1),
    (r"\boxed{2}, not 3", "3", 0),
    (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1),
    (r"\boxed{x^{2} + 1}", "1 + x^2", 1),
    (r"\boxed{1,000}", "1000", 1),
    (r"\boxed{30^\circ}", "30", 1),
    (r"\boxed{11\sqrt2}", r"11\sqrt{2}", 1),
    (r"\boxed{3}", r"thus \boxed{3}", 1),
    (r"\boxed{\text{(B)}}", r"\text{(B)}", 1),
    ("I do not know.", "7", 0),
    (r"\boxed{", "7", 0),
    (r"\boxed{3}", "", None),
]


@pytest.mark.parametrize("completion, gold, grade", ANSWERS)
def test_answers_in_latex_are_compared_by_what_they_mean(completion, gold, grade):
    math_reward = pytest.importorskip("extras.math_reward")
    for given in (completion, [{"role": "assistant", "content": completion}]):
        assert math_reward.reward(["?"], [given], answer=[gold], level=[1]) == [grade]
