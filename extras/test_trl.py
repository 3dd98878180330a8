"""TRL: its GRPOTrainer as an outside oracle, and extras/dppo_trl.py, in one process and in two.

python -m pytest -q extras/test_trl.py  # skipped unless TRL is installed
"""

import copy
import itertools
import math
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import datasets
import pytest
import torch
import transformers
from torch.nn.utils import parameters_to_vector

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo
from test_dppo import REWARDS, G, every_result, rule_with_history, tiny_model, tiny_tokenizer

trl = pytest.importorskip("trl", reason="extras/dppo_trl.py needs TRL")
from extras import dppo_trl  # noqa: E402, because it needs TRL

N = 4  # prompts, the fourth with equal rewards; all of them are candidates
SCORED = REWARDS[[2, 1, 4, 5]]
EVERYTHING = [q for q in range(N) for _ in range(G)]  # all candidates, without pruning
SEQUENCES, rng = [], random.Random(0)
for i in range(N * G):
    prompt = rng.choices(range(2, 13), k=20 + 5 * (i // G))
    completion = rng.choices(range(2, 13), k=1 + i % 7)
    SEQUENCES.append(dppo.Sequence(prompt, completion, torch.full((1 + i % 7,), -0.1 - i % 5)))


def trl_settings(folder, prompts=N, loss_type="grpo", scores=SCORED, has_tools=False, **arguments):
    """Settings of a trainer whose rollouts are SEQUENCES with these scores. Prompt q gets those of
    prompt q % N. With tools, every second token comes from a tool, and is not trained."""

    def rollout(prompts, trainer):
        indices = [int(prompt[:-1]) % N * G + i % G for i, prompt in enumerate(prompts)]
        result = {
            "prompt_ids": [SEQUENCES[i][0] for i in indices],
            "completion_ids": [SEQUENCES[i][1] for i in indices],
            "logprobs": [SEQUENCES[i].logprobs.tolist() for i in indices],
            "score": scores.flatten()[indices].tolist(),
        }
        if has_tools:
            result["env_mask"] = [[1, 0, 1, 0, 1, 0, 1][: len(SEQUENCES[i][1])] for i in indices]
        return result

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


# ==== Where nothing is pruned, updates have the gradients of TRL ====
OBJECTIVES = {  # as TRL has them
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}


def shortening(loss_type, has_tools=False):
    """How much shorter gradients are than TRL's. With dapo, TRL divides by the number of trained
    tokens, and dppo.py by the maximal number, 8 for each completion."""
    trained = [(len(s.completion) + has_tools) // (1 + has_tools) for s in SEQUENCES]
    return sum(trained) / (8 * len(trained)) if loss_type == "dapo" else 1.0


@pytest.mark.parametrize("objective", dppo.OBJECTIVES)
def test_two_updates_on_an_unpruned_rollout_are_those_of_trl(objective, monkeypatch, tmp_path):
    # With gspo, TRL multiplies a token's KL by the ratio of the sequence, which is not the token's.
    common = {"beta": 0.0 if objective == "gspo" else 0.1, "temperature": 0.7}
    own = {"num_iterations": 2, "max_completion_length": 8}
    settings = trl_settings(tmp_path, **OBJECTIVES[objective], **common, **own)
    reference = settings["model"]
    reference.save_pretrained(tmp_path / "model")  # TRL loads it twice, as a reference, too
    settings["model"] = str(tmp_path / "model")
    trainer = trl.GRPOTrainer(**settings)
    trainer.model.train()
    for weight in trainer.model.parameters():  # away from the reference
        weight.data += 0.01 * torch.randn(weight.shape)
    model = copy.deepcopy(trainer.model)
    start = parameters_to_vector(model.parameters())

    # Two updates, by TRL in three parts each.
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.3)
    trainer.current_gradient_accumulation_steps = 3
    rows = [trainer.train_dataset[q] for q in EVERYTHING]
    for trainer._step in range(6):
        inputs = trainer._prepare_inputs(rows)
        trainer.compute_loss(trainer.model, inputs).backward()
        if trainer._step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    expected = parameters_to_vector(trainer.model.parameters()) - start

    # And by dppo.py.
    own = {"inner_epochs": 2, "max_completion_tokens": 8, "group_size": G, "max_grad_norm": 1e9}
    rule = dppo.Rule(dppo.Config(objective=objective, **common, **own), range(N))
    task = dppo.Task(range(N), {}, None, None, model, reference=reference)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 / shortening(objective))
    monkeypatch.setattr(dppo, "sample_and_grade", lambda *_: (SEQUENCES, SCORED))
    step = dppo.dppo_step(task, rule, optimizer, torch.arange(N), torch.Generator())
    assert 0 < step.updates[1]["clipped_fraction"] < 1
    moved = parameters_to_vector(model.parameters()) - start
    assert (moved - expected).norm() < 1e-5 * expected.norm()


# ==== dppo_trl.py ====
METHODS = ["dppo", "extras.proportional:Proportional"]


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


def next_batch(trainer, order=(0, 1, 2, 3)):
    """Draws a batch, with the prompts in this order -> the prompts of its rows."""
    trainer.sampler.order = torch.tensor(order)
    return list(itertools.islice(trainer.sampler, N * G))


def assert_same_log(trainer, reference):
    """The logs of two trainers say the same about rewards."""
    log, expected = trainer._metrics["train"], reference._metrics["train"]
    for name in expected:
        assert log[name] == pytest.approx(expected[name], abs=1e-6) or "reward" not in name


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_without_pruning_the_trl_trainer_has_the_gradient_and_the_log_of_trl(
    loss_type, has_tools, tmp_path
):
    scores = SCORED.clone()
    scores[1, 0] = math.nan  # a missing reward
    settings = trl_settings(tmp_path, loss_type=loss_type, scores=scores, has_tools=has_tools)
    reference = trl.GRPOTrainer(**settings)
    expected, _ = gradient_of(reference, EVERYTHING)
    trainer = dppo_trl.DPPOTrainer(**settings, pruning={"method": "grpo"})
    gradient, trained = gradient_of(trainer, next_batch(trainer))
    assert trained == N * G
    expected = expected * shortening(loss_type, has_tools)
    assert (gradient - expected).norm() < 1e-5 * expected.norm()
    assert_same_log(trainer, reference)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_trl_trainer_has_on_average_the_gradient_of_all_candidates(loss_type, method, tmp_path):
    settings = trl_settings(tmp_path, loss_type=loss_type)
    pruning = {"method": method, "prompt_prune_rate": 0.6, "completion_prune_rate": 0.6}
    trainer = dppo_trl.DPPOTrainer(**settings, pruning=pruning)
    full = gradient_of(trl.GRPOTrainer(**settings), EVERYTHING)[0] * shortening(loss_type)

    def pick():
        for name, values in rule_with_history(method).memory.items():
            is_of_prompts = values.shape == (6,)
            values = values[[2, 0, 4, 5]] if is_of_prompts else values
            trainer.sampler.rule.memory[name] = values
        return next_batch(trainer), trainer.sampler.queue[0]

    def step(prompts, entry):
        trainer.sampler.queue = [entry]
        return gradient_of(trainer, prompts)

    expectation = torch.zeros_like(full)
    batches = every_result(pick)
    sizes = set()
    for p, (prompts, entry) in batches:
        assert len(prompts) == N * G and entry[0] == N
        sizes.add(len(entry[1]))
        for p_completions, (gradient, trained) in every_result(partial(step, prompts, entry)):
            assert trained < N * G
            expectation += p * p_completions * gradient
    assert min(sizes) < N
    assert (expectation - full).norm() < 1e-5 * full.norm()


def test_the_trl_log_estimates_the_rewards_of_all_candidates(tmp_path):
    # One of the prompts 0 and 2 is kept and stands for both, and their rewards have the same mean
    # and std. So the estimates are exact, although prompt 3 fills the batch and is there twice.
    scores = SCORED.clone()
    scores[1, 0] = math.nan
    settings = trl_settings(tmp_path, scores=scores)
    reference = trl.GRPOTrainer(**settings)
    gradient_of(reference, EVERYTHING)
    kept = set()
    for seed in range(8):
        trainer = dppo_trl.DPPOTrainer(**settings, pruning={"prompt_prune_rate": 0.5})
        trainer.args.seed = seed
        trainer.sampler.rule.memory["score"] = torch.tensor([0.0, 1.0, 0.0, 1.0]).double()
        prompts = next_batch(trainer, order=(3, 0, 1, 2))
        kept.add(tuple(trainer.sampler.queue[0][1].sort().values.tolist()))
        assert len(trainer.sampler.order) == 0  # all four were candidates
        trainer.sampler.queue.append(None)  # the next batch, which is fetched ahead
        gradient_of(trainer, prompts)
        assert_same_log(trainer, reference)
    assert kept == {(0, 1, 3), (1, 2, 3)}


def test_a_missing_reward_teaches_a_trl_run_nothing(tmp_path):
    scores = SCORED.clone()
    scores[1] = math.nan
    scores[2, 0] = math.nan
    trainer = dppo_trl.DPPOTrainer(**trl_settings(tmp_path, scores=scores))
    gradient_of(trainer, next_batch(trainer))
    A = dppo.group_advantages(scores).abs()
    expected = [A[0].mean(), math.nan, A[2, 1:].mean(), 0.0]  # the second has no score yet
    score = trainer.sampler.rule.memory["score"]
    torch.testing.assert_close(score, torch.tensor(expected).double(), equal_nan=True)
    log = trainer._metrics["train"]
    assert log["reward"] == pytest.approx([scores.nanmean().item()])
    assert log["frac_reward_zero_std"] == pytest.approx([1 / 3])  # of three groups with rewards


def test_a_rule_sees_the_log_probabilities_that_trl_has(tmp_path):
    trainer = dppo_trl.DPPOTrainer(**trl_settings(tmp_path, has_tools=True))
    trainer.sampler.rule.remember = mock.Mock()
    gradient_of(trainer, next_batch(trainer))
    [rollout] = trainer.sampler.rule.remember.call_args.args
    for n, sequence in enumerate(rollout.sequences):
        expected = SEQUENCES[G * rollout.prompts[n // G] + n % G].logprobs[::2]  # not of tools
        assert sequence.logprobs.allclose(expected)


def test_a_trl_run_that_is_resumed_looks_at_prompts_in_an_order_of_its_own(tmp_path):
    starts = []
    for max_steps, checkpoint in ((3, None), (6, str(tmp_path / "checkpoint-3")), (6, None)):
        saving = {"save_strategy": "steps", "save_steps": 3}
        settings = trl_settings(tmp_path, 16, max_steps=max_steps, **saving)
        trainer = dppo_trl.DPPOTrainer(**settings)
        rule = trainer.sampler.rule
        rule.prune_prompts = mock.Mock(wraps=rule.prune_prompts)
        trainer.train(resume_from_checkpoint=checkpoint)
        starts.append(rule.prune_prompts.call_args_list[0].args[0][:N].tolist())
    assert trainer.state.global_step == 6
    assert starts[0] == starts[2] != starts[1]  # the third starts anew


BIASED = [
    ({"loss_type": "bnpo"}, "dppo", "needs loss_type grpo, dr_grpo or dapo, beta 0"),
    ({"beta": 0.1}, "dppo", "needs loss_type grpo, dr_grpo or dapo, beta 0"),
    ({"num_iterations": 2}, "dppo", "needs loss_type grpo, dr_grpo or dapo, beta 0"),
    ({"shuffle_dataset": False}, "dppo", "needs shuffle_dataset"),
    ({}, "extras.rivals:GRESO", r"GRESO overrides step\(\)"),
]


@pytest.mark.parametrize("setting, method, message", BIASED)
def test_the_trl_trainer_refuses_what_would_be_biased(setting, method, message, tmp_path):
    settings = trl_settings(tmp_path, **setting)
    settings["model"].save_pretrained(tmp_path / "model")  # a folder: TRL loads a reference
    settings["model"] = str(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        dppo_trl.DPPOTrainer(**settings, pruning={"method": method})


def test_the_trl_trainer_refuses_the_loss_of_a_router(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = tiny_model(torch.float32, "Qwen3MoeForCausalLM", **sizes)
    with pytest.raises(ValueError, match="needs router_aux_loss_coef 0"):
        dppo_trl.DPPOTrainer(**trl_settings(tmp_path) | {"model": model})
    settings = trl_settings(tmp_path, router_aux_loss_coef=0.0) | {"model": model}
    trainer = dppo_trl.DPPOTrainer(**settings)
    assert gradient_of(trainer, next_batch(trainer))[0].norm() > 0


def train(folder, processes, method):
    """Trains in one of `processes` processes; saves the draws, the gradients and the rewards."""
    log = []
    gradients = []

    def noting(function, *arguments):
        result = function(*arguments)
        log.extend(result if isinstance(result, tuple) else [result])
        return result

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    size = 4 // processes
    settings = trl_settings(folder, prompts=16, per_device_train_batch_size=size, max_steps=10)
    settings["args"].logging_steps = 1
    trainer = dppo_trl.DPPOTrainer(**settings, callbacks=[Gradients()], pruning={"method": method})
    rule = trainer.sampler.rule
    for name in ("prune_prompts", "prune_completions"):
        setattr(rule, name, partial(noting, getattr(rule, name)))
    trainer.train()
    rewards = [step["reward"] for step in trainer.state.log_history[:10]]
    path = Path(folder, f"{processes}-{trainer.accelerator.process_index}")
    torch.save((log, gradients, rewards), path)


@pytest.mark.parametrize("method", METHODS)
def test_the_trl_trainer_in_two_processes_draws_the_same_and_has_the_gradient_of_one(
    method, tmp_path
):
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for launcher, processes in (([], 1), (two, 2)):
        command = [sys.executable, *launcher, __file__, tmp_path, str(processes), method]
        subprocess.run(command, check=True, capture_output=True)
    log, gradients, rewards = torch.load(tmp_path / "1-0", weights_only=False)
    assert len(gradients) == 10
    assert max(number for number in log if isinstance(number, int)) > N
    for name in ("2-0", "2-1"):
        same_log, of_part, same_rewards = torch.load(tmp_path / name, weights_only=False)
        assert same_rewards == rewards
        for one, other in zip(log, same_log, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        for a, b in zip(gradients, of_part, strict=True):  # the mean over the processes, as in TRL
            assert (a - b).norm() <= 1e-5 * a.norm()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
