"""Tests of what the notebook and README give to fork: rules, math_reward.py and dppo_trl.py.

python -m pytest -q .ci/test_notebook.py    # those of dppo_trl.py where TRL is installed
"""

import itertools
import json
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo
from test_dppo import (
    ADVANTAGES,
    REWARDS,
    G,
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

NOTEBOOK = Path(dppo.__file__).with_name("notebook.ipynb")


def from_the_notebook(first, **known):
    """The module in a cell or in a block of code whose first line starts like this."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    _, code = "\n```\n".join("".join(cell["source"]) for cell in cells).split(first)
    module = known | {"__name__": "example"}
    exec("#" + code.split("\n```")[0], module)  # the rest of the first line is no code
    return module


# ==== The notebook's rules ====
def rules_of_the_notebook():
    """What the cells define that have CPPO and GRESO."""
    known = {"__name__": "example"}
    exec("import itertools, math, dppo, torch\nfrom unittest.mock import Mock, patch", known)
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        code = "".join(cell["source"])
        if "class CPPO(" in code or "class GRESO(" in code:
            exec(code, known)
    return known


def train_with(rule, folder, monkeypatch):
    """A run of four steps, in which every second prompt teaches -> its folder."""
    monkeypatch.setattr(sys.modules[__name__], "Rival", rule, raising=False)
    task = tiny_task(seldom_teaches, prompts=64)
    run(folder / "run", task, method=f"{__name__}:Rival", prompts_per_step=4, steps=4)
    return folder / "run"


def test_cppo_trains_the_largest_advantage_of_each_group(monkeypatch, tmp_path):
    out = train_with(rules_of_the_notebook()["CPPO"], tmp_path, monkeypatch)
    for record in metrics(out)[1:]:
        assert record["prompts_rolled"] == 4
        teach = 4 * (1 - record["zero_variance_fraction"])
        assert record["completions_trained"] == round(teach)  # floor(0.3 * 4) = 1 of each


def test_greso_refills_its_batch_with_groups_that_teach(monkeypatch, tmp_path):
    known = rules_of_the_notebook()
    monkeypatch.setattr(dppo, "dppo_step", known["refilled_step"])
    out = train_with(known["GRESO"], tmp_path, monkeypatch)
    assert recorded(out, "completions_trained") == [16] * 4  # four whole groups
    assert all(prompts > 4 for prompts in recorded(out, "prompts_rolled"))
    assert recorded(out, "updates") == [1, 2, 3, 4]


def test_greso_keeps_a_prompt_with_p_to_the_power_of_its_streak():
    rule = rules_of_the_notebook()["GRESO"](dppo.Config(), 4)
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    for _ in range(2):  # a third each is always right, never right, and teaches
        rule.remember(torch.arange(3), rewards, dppo.group_advantages(rewards))
    p = 0.5 - 0.02  # both kinds have more than their share
    assert torch.allclose(rule.prompt_probabilities(), torch.tensor([p**2, p**2, 1, 1]).double())
    rule.remember(torch.tensor([0]), rewards[[1]], torch.zeros(1, 2))
    pi = torch.tensor([p - 0.01, (p - 0.01) ** 2, 1, 1]).double()  # from then on, never right
    assert torch.allclose(rule.prompt_probabilities(), pi)
    assert rule.memory["p_easy"][0] == pytest.approx(p + 0.01)


# ==== README's rules ====
def test_the_rules_in_readme_prune_without_bias():
    readme = NOTEBOOK.with_name("README.md").read_text()
    blocks = re.findall("```python\n(.*?)```", readme, re.DOTALL)
    [code] = [block for block in blocks if "(dppo." in block]
    known = {}
    exec(code, known)
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
    pytest.importorskip("math_verify")
    reward = from_the_notebook("# math_reward.py")["reward"]
    for given in (completion, [{"role": "assistant", "content": completion}]):
        assert reward(["?"], [given], answer=[gold], level=[1]) == [grade]


# ==== dppo_trl.py ====
N = 4  # prompts, the fourth with equal rewards; all of them are the window
ROWS = [2, 1, 4, 5]  # of REWARDS
SCORED = REWARDS[ROWS]
SEQUENCES, rng = [], random.Random(0)
for i in range(N * G):
    prompt = rng.choices(range(2, 13), k=20 + 5 * (i // G))
    SEQUENCES.append(dppo.Sequence(prompt, rng.choices(range(2, 13), k=1 + i % 7)))


def trl_example():
    return from_the_notebook("%%writefile dppo_trl.py", trl=pytest.importorskip("trl"))


def trl_settings(trl, folder, prompts=N, loss_type="grpo", **arguments):
    """Of a trainer whose rollouts are SEQUENCES with REWARDS, for prompt q those of q % N."""

    def rollout(prompts, trainer):
        indices = [int(prompt[:-1]) % N * G + i % G for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [SEQUENCES[i][0] for i in indices],
            "completion_ids": [SEQUENCES[i][1] for i in indices],
            "logprobs": None,
            "score": SCORED.flatten()[indices].tolist(),
        }

    settings = {"num_generations": G, "per_device_train_batch_size": 4, "steps_per_generation": 3}
    settings |= {"gradient_accumulation_steps": 3, "max_grad_norm": 1e9, "learning_rate": 0.0}
    settings |= {"max_completion_length": 8, "use_cpu": True, "bf16": False, "report_to": []}
    settings |= {"save_strategy": "no", "gradient_checkpointing": False, "loss_type": loss_type}
    settings |= {"scale_rewards": "none" if loss_type == "dr_grpo" else "group"}
    args = trl.GRPOConfig(output_dir=str(folder), **settings | arguments)
    rows = [{"prompt": f"{q}="} for q in range(prompts)]
    return {
        "model": tiny_model(torch.float32),
        "processing_class": tiny_tokenizer(),
        "rollout_func": rollout,
        "train_dataset": datasets.Dataset.from_list(rows),
        "reward_funcs": lambda score, **_: score,
        "args": args,
    }


def gradient_of(trainer, prompts):
    """The gradient of a step of a trainer, and how many completions it trained."""
    trainer.model.train().zero_grad()
    trainer.current_gradient_accumulation_steps = 3
    rows = [trainer.train_dataset[q] for q in prompts]
    for trainer._step in range(3):
        inputs = trainer._prepare_inputs(rows)
        trainer.compute_loss(trainer.model, inputs).backward()
    trained = sum(len(part["advantages"]) for part in trainer._buffered_inputs)
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double(), trained


@pytest.mark.parametrize("method", ["dppo", "dppo-proportional"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_trl_example_has_on_average_the_gradient_of_the_window(loss_type, method, tmp_path):
    example = trl_example()
    settings = trl_settings(example["trl"], tmp_path, loss_type=loss_type)
    pruning = {"method": method, "prompt_prune_rate": 0.6, "completion_prune_rate": 0.6}
    trainer = example["DPPOTrainer"](**settings, pruning=pruning)
    everything = [q for q in range(N) for _ in range(G)]
    full, _ = gradient_of(example["trl"].GRPOTrainer(**settings), everything)

    def pick():
        trainer.windows.order = torch.arange(N)
        for name, values in rule_with_history(method).memory.items():
            is_of_prompts = values.shape == (6,)
            values = values[[2, 0, 4, 5]] if is_of_prompts else values
            trainer.windows.rule.memory[name] = values
        prompts = list(itertools.islice(trainer.windows, N * G))
        return prompts, trainer.windows.queue[0]

    def step(prompts, entry):
        trainer.windows.queue = [entry]
        length = sum(len(completion) for _, completion in SEQUENCES) / len(SEQUENCES)
        trainer.mean_length = length
        return gradient_of(trainer, prompts)

    expectation = torch.zeros_like(full)
    windows = every_result(pick)
    assert min(len(kept) for _, (_, (_, kept, _)) in windows) < N
    for p, (prompts, entry) in windows:
        assert len(prompts) == N * G and entry[0] == N
        for p_completions, (gradient, trained) in every_result(partial(step, prompts, entry)):
            assert trained < N * G
            expectation += p * p_completions * gradient
    assert (expectation - full).norm() < 1e-5 * full.norm()


@pytest.mark.parametrize("setting", [{"loss_type": "bnpo"}, {"beta": 0.1}, {"num_iterations": 2}])
def test_the_trl_example_refuses_what_would_be_biased(setting, tmp_path):
    example = trl_example()
    settings = trl_settings(example["trl"], tmp_path, **setting)
    settings["model"].save_pretrained(tmp_path / "model")  # a folder: TRL loads a reference
    settings["model"] = str(tmp_path / "model")
    with pytest.raises(ValueError, match="needs loss_type grpo, dr_grpo or dapo, beta 0"):
        example["DPPOTrainer"](**settings)


def trl_run(folder, processes):
    """Trains with the example, in one of so many processes; saves the draws and the gradients."""
    example, log, gradients = trl_example(), [], []

    def noting(function, *arguments):
        result = function(*arguments)
        log.append(result if isinstance(result, tuple) else (result,))
        return result

    for name in ("prune_prompts", "prune_completions"):
        example[name] = partial(noting, example[name])

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    size = 4 // processes
    settings = trl_settings(
        example["trl"], folder, prompts=16, per_device_train_batch_size=size, max_steps=10
    )
    trainer = example["DPPOTrainer"](**settings, callbacks=[Gradients()])
    trainer.train()
    path = Path(folder, f"{processes}-{trainer.accelerator.process_index}")
    torch.save((log, gradients), path)


def test_the_trl_example_in_two_processes_draws_the_same_and_has_the_gradient_of_one(tmp_path):
    pytest.importorskip("trl")
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for launcher, processes in (([], 1), (two, 2)):
        command = [sys.executable, *launcher, __file__, tmp_path, str(processes)]
        subprocess.run(command, check=True, capture_output=True)
    log, gradients = torch.load(tmp_path / "1-0", weights_only=False)
    assert len(gradients) == 10
    assert max(result[0] for result in log if len(result) == 3) > N
    for name in ("2-0", "2-1"):
        same_log, of_part = torch.load(tmp_path / name, weights_only=False)
        for one, other in zip(itertools.chain(*log), itertools.chain(*same_log), strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        for a, b in zip(gradients, of_part, strict=True):  # the mean over the processes, as in TRL
            assert (a - b).norm() <= 1e-5 * a.norm()


if __name__ == "__main__":
    trl_run(sys.argv[1], int(sys.argv[2]))
