"""Tests of the code and the commands in README and in docstrings, and of math_reward.py.

python -m pytest -q extras/test_extras.py
"""

import ast
import itertools
import re
import shlex
import sys
import textwrap
from pathlib import Path
from unittest import mock

import datasets
import pytest
import torch

import dppo
from test_dppo import (
    ADVANTAGES,
    REWARDS,
    G,
    main,
    mean_weights,
    metrics,
    rollout_of,
    tiny_model,
    tiny_tokenizer,
    write_rows,
)

ROOT = Path(dppo.__file__).parent
MATH_VERIFY = "answers in LaTeX need math-verify"


# ==== Code and commands, as they are printed ====
def blocks_in(text):
    """Fenced blocks or, without any, indented ones."""
    fenced = re.findall(r"^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return fenced or re.findall("(?:^    .*\n)+", text, re.MULTILINE)


def printed_block(words):
    """The one block with these words in it, in README or else in a docstring of extras."""
    modules = [ast.parse(path.read_text()) for path in ROOT.glob("extras/*.py")]
    docstrings = [ast.get_docstring(module) or "" for module in modules]
    for texts in ([(ROOT / "README.md").read_text()], docstrings):
        blocks = itertools.chain.from_iterable(map(blocks_in, texts))
        blocks = [block for block in blocks if words in block]
        if blocks:
            [block] = blocks
            return textwrap.dedent(block)
    return pytest.fail(f"no block with {words}")


def run_command(block, *more):
    """A printed command, with more arguments, in this process."""
    words = shlex.split(block.replace("\\\n", ""))
    main(*words[words.index("dppo.py") + 1 :], *more)


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """An empty folder, and a Hub that has tiny models and data; -> settings of small runs."""
    rows = [{"question": f"{a}=", "answer": a, "problem": f"{a}="} for a in range(20)]
    data = datasets.Dataset.from_list([row | {"answer": str(row["answer"])} for row in rows])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ enable_thinking }}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    write_rows("mine.jsonl", *rows)

    def of_hub(path, *names, split):
        return data.select(range(8) if split == "test" else range(8, 20))

    monkeypatch.setattr(datasets, "load_dataset", of_hub)
    auto = mock.Mock(return_value=tiny_tokenizer(template))
    monkeypatch.setattr(dppo.transformers.AutoTokenizer, "from_pretrained", auto)
    of_model = mock.Mock(side_effect=lambda *_, **__: tiny_model(torch.float32))
    monkeypatch.setattr(dppo.transformers.AutoModelForCausalLM, "from_pretrained", of_model)
    small = {"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 8, "eval_samples": 1}
    return [f"--{name}={value}" for name, value in small.items()]


def test_readme_reward_trains_and_the_command_resumes(newcomer):
    Path("mine.py").write_text(printed_block("def reward"))
    command = printed_block("--reward mine:reward")
    run_command(command, *newcomer, "--eval_every=2")
    steps = len(metrics(Path("runs/mine")))
    run_command(command, *newcomer, "--eval_every=2", "--epochs=5")  # repeated, with more epochs
    assert len(metrics(Path("runs/mine"))) > steps > 4
    import mine

    assert mine.reward(["<think>4</think> 12.", [{"content": "13"}]], answer=[12, "12"]) == [1, 0]


def test_the_printed_plot_is_drawn(newcomer):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib").use("agg")
    steps = [{"step": n, "seconds": 60.0, "prompts_rolled": 4} for n in range(1, 9)]
    records = [{"step": 0, "accuracy": 0.1}, *steps, {"step": 9, "accuracy": 0.5} | steps[0]]
    for run in ("mine", "other"):
        Path("runs", run).mkdir(parents=True)
        write_rows(f"runs/{run}/metrics.jsonl", *records)
    drawn = {}
    exec(printed_block("import pandas"), drawn)
    assert Path("accuracy.png").stat().st_size > 5000
    assert drawn["hours"].iloc[-1] == pytest.approx(9 / 60)
    assert len(drawn["pyplot"].gca().lines) == 2


@pytest.mark.parametrize("words", ["openai/gsm8k", "MATH-lighteval"])
@pytest.mark.parametrize("method", ["dppo", "extras.proportional:Proportional"])
def test_printed_commands_parse_and_run_on_stub_hub(method, words, newcomer):
    if words == "MATH-lighteval":
        pytest.importorskip("math_verify", reason=MATH_VERIFY)
    block = printed_block(words)
    # (--epochs of the block is replaced by --steps, as only one of them may be instance.)
    block, replaced = re.subn(r"--epochs \S+", "--steps 2", block)
    run_command(block, *newcomer, "--output_dir=run", f"--method={method}")
    assert "enable_thinking" in block and replaced == 1
    assert [record["step"] for record in metrics(Path("run"))] == [0, 1, 2]


def test_readme_rule_is_unbiased():
    known = {}
    exec(printed_block("class Half"), known)
    rule = known["Half"](dppo.Config(group_size=G), range(6))
    rule.remember(rollout_of(range(6), REWARDS.roll(2, 0)))  # the second prompt was solved
    assert (mean_weights(rule)[ADVANTAGES != 0] - 1).abs().max() < 1e-10


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
    pytest.importorskip("math_verify", reason=MATH_VERIFY)
    from extras import math_reward

    for given in (completion, [{"role": "assistant", "content": completion}]):
        assert math_reward.reward(["?"], [given], answer=[gold], level=[1]) == [grade]
