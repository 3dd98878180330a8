"""The claims of dppo.py, each a test whose name is the sentence it proves. Run with: python -m pytest -q"""

import ast
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import datasets
import hypothesis
import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
import transformers

import dppo
from dppo import (
    Config,
    InputError,
    Task,
    completion_probabilities,
    draw,
    group_advantages,
    grow_window,
    keep_probabilities,
)

torch.set_num_threads(1)  # for tensors this small, more threads only wait for each other
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
SCRIPT = Path(dppo.__file__)


def tiny_model(dtype=torch.float64, device="cpu", **config):
    """A Qwen3 of the embedded task's vocabulary with a few thousand random weights, large enough to matter."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **dict(
                vocab_size=13,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                max_position_embeddings=256,
                initializer_range=0.3,
                tie_word_embeddings=True,
                pad_token_id=0,
                eos_token_id=1,
            )
            | config
        )
    )
    return model.to(device, dtype).eval()


def tiny_task() -> Task:
    train, _, tokenizer = dppo.sorting_data(Config())
    return Task(train[:24] + train[-24:], {"some": train[:4]}, tokenizer, dppo.exact_reward, tiny_model(torch.float32))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- The expected gradient is that of the full batch ------------------------------------------------------------------

REWARDS = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.7, 0.2], [1.0, 1.0, 1.0], [0.0, 0.9, 1.0]], dtype=torch.float64)
N, G = REWARDS.shape
HISTORY = dppo.new_history(N) | {
    "score": torch.tensor([math.nan, 0.9, 0.1, 0.2], dtype=torch.float64),  # mean 0.4: the last two are the low set
    "right": torch.tensor([0.0, 4.0, 0.4, 7.0], dtype=torch.float64),
    "wrong": torch.tensor([0.0, 4.0, 7.6, 1.0], dtype=torch.float64),
    "streak": torch.tensor([0.0, 0.0, -2.0, 1.0], dtype=torch.float64),
}
OBJECTIVES = ["grpo", "dr_grpo", "dapo", "gspo"]


def make_sequences():
    rng = random.Random(0)
    return [
        ([rng.randrange(2, 13) for _ in range(3 + q)], [rng.randrange(2, 13) for _ in range(1 + rng.randrange(7))])
        for q in range(N)
        for _ in range(G)
    ]


def problem(objective="grpo", beta=0.0, **settings):
    """A small batch with a real model's gradients, clipping active, and KL: config, model, sequences, advantages, old, ref."""
    config = Config(objective=objective, beta=beta, max_grad_norm=1e9, temperature=1.0, **settings)
    sequences, model = make_sequences(), tiny_model()
    everything = list(range(N * G))
    logprobs = dppo.frozen_logprobs(model, sequences, everything, config)
    generator = torch.Generator().manual_seed(1)
    old, ref = ({i: p + 0.4 * torch.randn(p.shape, generator=generator) for i, p in logprobs.items()} for _ in range(2))
    return config, model, sequences, group_advantages(REWARDS, objective != "dr_grpo"), old, ref if beta else None


def completion_gradients(config, model, sequences, advantages, old, ref) -> torch.Tensor:
    """(N G, parameters) float64: each completion's share of the full batch's gradient, computed alone and unpadded."""
    rows = []
    for i in range(N * G):
        logprobs, _ = dppo.completion_logprobs(model, sequences, [[i]], 1.0)
        loss, _ = dppo.policy_loss(
            logprobs,
            old[i],
            ref and ref[i],
            torch.tensor([len(sequences[i][1])]),
            advantages.flatten()[[i]],
            torch.ones(1),
            N * G,
            config,
        )
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


DRAWS = {}


def every_draw(pi: torch.Tensor, monkeypatch, order: torch.Tensor | None = None) -> Counter:
    """Every outcome of draw(pi) -> {weights: probability}, by running it for each interval of its number u, along the
    given order or along each."""
    key = tuple(pi.tolist()), order if order is None else tuple(order.tolist())
    if key in DRAWS:
        return DRAWS[key]
    uncertain = [i for i in range(len(pi)) if 0 < pi[i] < 1]
    rest = [i for i in range(len(pi)) if i not in uncertain]
    orders, outcomes = list(itertools.permutations(uncertain)), Counter()
    if order is not None:
        orders = [[i for i in order.tolist() if i in uncertain]]
    for along in orders:
        breakpoints = sorted({0.0, 1.0, *(pi[list(along)].cumsum(0) % 1).tolist()})
        for low, high in itertools.pairwise(breakpoints):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "rand", lambda *_, **__: torch.tensor([(low + high) / 2], dtype=torch.float64))
                weights = draw(pi, None, order=torch.tensor([*along, *rest], dtype=torch.long))
            outcomes[tuple(weights.tolist())] += (high - low) / len(orders)
    assert abs(sum(outcomes.values()) - 1) < 1e-12
    DRAWS[key] = outcomes
    return outcomes


def every_outcome(function, monkeypatch):
    """Every outcome of a function without arguments that draws once -> pairs (probability, what it returns)."""
    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr(dppo, "draw", lambda pi, _, order=None: drawn.append((pi, order)) or (pi > 0).to(pi.dtype))
        function()
    [(pi, order)] = drawn
    for weights, probability in every_draw(pi, monkeypatch, order).items():
        with monkeypatch.context() as patch:
            patch.setattr(dppo, "draw", lambda *_: torch.tensor(weights, dtype=torch.float64))
            result = function()
        yield probability, result


def every_step(config, advantages, monkeypatch):
    """Every outcome of both levels of pruning, in the order and with the functions of training -> (probability, (N, G) weights)."""
    pi = dppo.prompt_rule(HISTORY, config)(torch.arange(N))
    for p, prompt_weights in every_outcome(lambda: dppo.draw_prompts(pi, config, None), monkeypatch):
        kept = prompt_weights > 0
        inputs = advantages[kept], prompt_weights[kept], config
        pi_completions = completion_probabilities(REWARDS[kept], *inputs)
        for p_completions, weights in every_outcome(
            lambda: dppo.draw_completions(pi_completions, *inputs, None), monkeypatch
        ):
            full = torch.zeros(N, G, dtype=torch.float64)
            full[kept] = weights
            yield p * p_completions, full


def expected_gradient(config, advantages, gradients, monkeypatch) -> tuple[torch.Tensor, int]:
    """The exact expectation of the method's gradient, divided as training divides it, and the number of outcomes."""
    expectation, outcomes = torch.zeros_like(gradients[0]), 0
    for probability, weights in every_step(config, advantages, monkeypatch):
        expectation += probability * (weights.flatten() @ gradients) * N * G / dppo.denominator(weights, N * G, config)
        outcomes += 1
    return expectation, outcomes


@pytest.mark.parametrize("prompt_rate, completion_rate", [(0.0, 0.6), (0.6, 0.0), (0.6, 0.6)])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
def test_expected_gradient_is_exactly_the_full_one(method, objective, beta, prompt_rate, completion_rate, monkeypatch):
    rates = dict(prompt_prune_rate=prompt_rate, completion_prune_rate=completion_rate)
    config, model, sequences, advantages, old, ref = problem(objective, beta, method=method, **rates)
    gradients = completion_gradients(config, model, sequences, advantages, old, ref)
    expectation, outcomes = expected_gradient(config, advantages, gradients, monkeypatch)
    full = gradients.sum(0)
    assert outcomes > 1 and full.norm() > 0.01
    assert (expectation - full).abs().max() < 1e-10


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_grpo_skip_has_the_gradient_of_grpo_from_fewer_completions(objective, monkeypatch):
    trained = []
    for method in ("grpo", "grpo-skip"):
        config, model, sequences, advantages, old, ref = problem(objective, method=method)
        gradients = completion_gradients(config, model, sequences, advantages, old, ref)
        [(probability, weights)] = every_step(config, advantages, monkeypatch)
        assert probability == 1 and dppo.denominator(weights, N * G, config) == N * G
        assert torch.equal(weights.flatten() @ gradients, gradients.sum(0))
        trained.append((weights > 0).sum())
    assert trained[0] == N * G > trained[1]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("method", ["cppo", "greso"])
def test_cppo_and_greso_are_biased_also_in_direction(method, objective, monkeypatch):
    config, model, sequences, advantages, old, ref = problem(objective, method=method, completion_prune_rate=0.6)
    gradients = completion_gradients(config, model, sequences, advantages, old, ref)
    expectation, _ = expected_gradient(config, advantages, gradients, monkeypatch)
    full = gradients.sum(0)
    assert (expectation - full).norm() > 0.1 * full.norm()
    assert torch.cosine_similarity(expectation, full, dim=0) < 0.995  # whatever the step size


def test_clipping_is_active_in_these_problems():
    config, model, sequences, advantages, old, _ = problem()
    everything = list(range(N * G))
    new = torch.cat(list(dppo.frozen_logprobs(model, sequences, everything, config).values()))
    lengths = torch.tensor([len(sequences[i][1]) for i in everything])
    _, (clipped, _) = dppo.policy_loss(
        new,
        torch.cat([old[i] for i in everything]),
        None,
        lengths,
        advantages.flatten(),
        torch.ones(N * G),
        N * G,
        config,
    )
    assert 0.1 < clipped / lengths.sum() < 0.9


def gradient_of_train_step(config, model, sequences, advantages, weights, old, ref) -> torch.Tensor:
    """What train_step changes the parameters by under plain gradient descent with rate 1: minus the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    dppo.train_step(model, optimizer, sequences, advantages.flatten(), weights.flatten(), N * G, config, old, ref)
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("micro_batch_tokens", [30, 16384])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_train_step_has_the_gradient_of_its_weights(objective, beta, micro_batch_tokens):
    config, model, sequences, advantages, old, ref = problem(objective, beta)
    gradients = completion_gradients(config, model, sequences, advantages, old, ref)
    weights = torch.rand(N * G, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3
    weights[::3] = 0
    config = replace(config, micro_batch_tokens=micro_batch_tokens)
    measured = gradient_of_train_step(config, model, sequences, advantages, weights, old, ref)
    expected = weights @ gradients
    assert (measured - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
def test_expected_gradient_through_training_by_monte_carlo(method):
    """The draws that training makes, from a torch.Generator, and its own gradient: within 4 standard errors."""
    rates = dict(prompt_prune_rate=0.6, completion_prune_rate=0.6)
    config, model, sequences, advantages, old, _ = problem(method=method, **rates)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    full = completion_gradients(config, model, sequences, advantages, old, None).sum(0)
    generator, samples = torch.Generator().manual_seed(3), []
    for _ in range(150):
        prompt_weights = dppo.draw_prompts(dppo.prompt_rule(HISTORY, config)(torch.arange(N)), config, generator)
        kept = prompt_weights > 0
        inputs = advantages[kept], prompt_weights[kept], config
        weights = torch.zeros(N, G, dtype=torch.float64)
        weights[kept] = dppo.draw_completions(completion_probabilities(REWARDS[kept], *inputs), *inputs, generator)
        model.load_state_dict(state)
        samples.append(
            gradient_of_train_step(config, model, sequences, advantages, weights, old, None) @ full / full.norm() ** 2
        )
    samples = torch.stack(samples)
    assert samples.std() > 0.05
    assert abs(samples.mean() - 1) / (samples.std() / len(samples) ** 0.5) < 4


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_policy_loss_is_its_formula_token_by_token(objective, beta):
    config = Config(objective=objective, beta=beta, clip_low=0.1, clip_high=0.3, max_completion_tokens=9)
    generator, lengths = torch.Generator().manual_seed(0), [3, 1, 7, 4]
    new, old, ref = -3 * torch.rand(3, sum(lengths), generator=generator, dtype=torch.float64)
    advantages, weights = torch.tensor([[1.5, -0.5, -2.0, 0.7], [2.0, 1.0, 3.0, 0.5]], dtype=torch.float64)
    loss, (clipped, kl) = dppo.policy_loss(new, old, ref, torch.tensor(lengths), advantages, weights, 12, config)
    expected, expected_clipped, expected_kl, t = 0.0, 0, 0.0, 0
    for i, length in enumerate(lengths):
        normalizer = {"grpo": length, "gspo": length, "dr_grpo": 9, "dapo": 1}[objective]
        mean_log_ratio = (new[t : t + length] - old[t : t + length]).mean()
        for _ in range(length):
            log_ratio = mean_log_ratio if objective == "gspo" else new[t] - old[t]
            ratio, a = math.exp(log_ratio), advantages[i].item()
            low, high = (min(max(ratio, 0.9), 1.3) * a, ratio * a)
            k3 = math.exp(ref[t] - new[t]) - (ref[t] - new[t]).item() - 1 if beta else 0.0
            expected += weights[i].item() / normalizer * (beta * k3 - min(low, high)) / 12
            expected_clipped += low < high
            expected_kl += k3
            t += 1
    assert abs(loss - expected) < 1e-12 and clipped == expected_clipped > 3 and abs(kl - expected_kl) < 1e-9


# ---- What breaks it is caught -----------------------------------------------------------------------------------------


def relative_bias(estimate, monkeypatch) -> float:
    """|E[estimate(weights, gradients)] - full gradient| / |full gradient| under completion pruning at 0.6."""
    config, model, sequences, advantages, old, _ = problem(prompt_prune_rate=0.0, completion_prune_rate=0.6)
    gradients = completion_gradients(config, model, sequences, advantages, old, None)
    expectation = sum(
        probability * estimate(weights.flatten(), gradients)
        for probability, weights in every_step(config, advantages, monkeypatch)
    )
    return ((expectation - gradients.sum(0)).norm() / gradients.sum(0).norm()).item()


def test_the_harness_finds_no_bias_in_the_estimator_itself(monkeypatch):
    assert relative_bias(lambda w, g: w @ g, monkeypatch) < 1e-10


def test_dividing_by_the_kept_count_is_biased(monkeypatch):
    assert relative_bias(lambda w, g: w @ g * N * G / (w > 0).sum(), monkeypatch) > 0.2


def test_weight_1_is_biased_however_it_is_averaged(monkeypatch):
    assert relative_bias(lambda w, g: (w > 0).double() @ g, monkeypatch) > 0.05
    assert relative_bias(lambda w, g: (w > 0).double() @ g * N * G / (w > 0).sum(), monkeypatch) > 0.05


def test_deterministic_removal_of_the_lowest_is_biased_whatever_the_weights():
    config, model, sequences, advantages, old, _ = problem()
    gradients = completion_gradients(config, model, sequences, advantages, old, None)
    full, scores = gradients.sum(0), advantages.abs().flatten()
    pruned = 4
    kept = scores.argsort()[(scores == 0).sum() + pruned :]
    for weight in (1.0, ((scores > 0).sum() / len(kept)).item()):
        assert (weight * gradients[kept].sum(0) - full).norm() / full.norm() > 0.05


def test_advantages_centred_anew_after_pruning_are_biased(monkeypatch):
    config, model, sequences, advantages, old, _ = problem(prompt_prune_rate=0.0, completion_prune_rate=0.6)
    full = completion_gradients(config, model, sequences, advantages, old, None).sum(0)
    expectation, cache = torch.zeros_like(full), {}
    for probability, weights in every_step(config, advantages, monkeypatch):
        centred = advantages.clone()
        for q in range(N):
            kept = weights[q] > 0
            centred[q, kept] -= advantages[q, kept].mean() if kept.any() else 0
        key = tuple(centred.flatten().tolist())
        if key not in cache:
            cache[key] = completion_gradients(config, model, sequences, centred, old, None)
        expectation += probability * (weights.flatten() @ cache[key])
    assert (expectation - full).norm() / full.norm() > 0.05


def test_looking_on_until_enough_prompts_survive_is_biased():
    """Prompts of value 1, 0, 0, ..., each kept with probability 1/2, until one has survived: n looked at, with probability
    2^-n. The survivor's weighted value, divided by n, is compared with the mean over the same n prompts."""
    estimate = sum(0.5**n * (2.0 if n == 1 else 0.0) / n for n in range(1, 60))
    mean_of_window = sum(0.5**n * 1.0 / n for n in range(1, 60))
    assert estimate - mean_of_window > 0.3


def test_the_loss_is_divided_by_all_candidates_before_pruning(monkeypatch, tmp_path):
    steps = spied_run(monkeypatch, tmp_path, group_size=4)
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["total"] for step in steps] == [4 * len(step["window"]) for step in steps]
    assert [step["total"] for step in steps] == [4 * record["prompts_seen"] for record in records]
    assert sum(record["prompts_seen"] for record in records) > sum(record["prompts_rolled"] for record in records)


def test_a_mask_reused_for_a_second_update_is_biased(monkeypatch):
    """Losses c (x - b)^2/2, two updates. Given x after the first, a fresh draw is unbiased; the first draw agrees with x."""
    b, c, pi = torch.tensor([[0.0, 1.0, 5.0, 2.0], [1.0, 2.0, 3.0, 4.0], [0.5] * 4], dtype=torch.float64)
    draws = {torch.tensor(weights, dtype=torch.float64): p for weights, p in every_draw(pi, monkeypatch).items()}
    bias_reused = bias_fresh = 0.0
    for w, p in draws.items():
        gradients = c * (0.25 * (w * c * b).mean() - b)  # at x = 0 - 0.25 * first gradient
        bias_reused += p * (w * gradients - gradients).mean()
        bias_fresh += p * sum(p_fresh * (fresh * gradients - gradients).mean() for fresh, p_fresh in draws.items())
    assert abs(bias_fresh) < 1e-12 and abs(bias_reused) > 0.1


def test_with_inner_epochs_train_draws_the_completions_anew_for_every_update(monkeypatch, tmp_path):
    seen, real = [], dppo.train_step
    monkeypatch.setattr(dppo, "train_step", lambda *args: seen.append(args) or real(*args))
    task = tiny_task()
    task.reward = lambda prompts, completions, answer, **_: [len(c) % 5 / 4 for c in completions]
    dppo.train(Config(steps=2, inner_epochs=3, prompts_per_step=16, output_dir=str(tmp_path / "run")), task)
    assert len(seen) == 6
    masks = [tuple((args[4] > 0).tolist()) for args in seen[:3]]
    assert len(set(masks)) == 3
    old = seen[0][7]
    assert all(args[7] is old for args in seen[:3]) and all(
        set(args[4].nonzero().flatten().tolist()) <= set(old) for args in seen[:3]
    )


# ---- Keep probabilities, draws, windows -------------------------------------------------------------------------------


def test_keep_probabilities_prune_exactly_the_floor_of_the_low_set():
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4, 4.0])
    assert keep_probabilities(scores, 0.7).tolist() == [0.5] * 4 + [1.0]  # floor(0.7 * 4) = 2 of 4 go
    assert keep_probabilities(scores, 0.0).tolist() == [1.0] * 5
    assert keep_probabilities(scores, 0.2).tolist() == [1.0] * 5  # floor(0.8) = 0


def test_the_floor_is_of_the_exact_product():
    scores = torch.tensor([0.1] * 100 + [50.0])
    assert keep_probabilities(scores, 0.29)[0] == 0.71  # 0.29 * 100 is 28.999999999999996 in floating point


def test_unseen_prompts_are_always_kept_and_do_not_enter_the_mean():
    scores = torch.tensor([math.nan, 1.0, 1.0, 4.0, math.nan])
    assert keep_probabilities(scores, 0.5).tolist() == [1.0, 0.5, 0.5, 1.0, 1.0]
    assert keep_probabilities(torch.full((3,), math.nan), 0.9).tolist() == [1.0] * 3
    assert keep_probabilities(torch.zeros(0), 0.9).tolist() == []


def test_equal_scores_are_not_below_their_own_mean():
    scores = torch.full((8,), 0.1, dtype=torch.float32)
    assert (scores < scores.mean()).any() or scores.mean() == scores[0]  # what a comparison in float32 may say
    for value in (0.1, 0.7, 1 / 3, 1e-3):
        for count in (3, 8, 11, 100):
            noisy = torch.full((count,), value, dtype=torch.float32) * (1 + 1e-7 * torch.randn(count))
            assert keep_probabilities(noisy, 0.9).eq(1).all()


@pytest.mark.parametrize(
    "pi",
    [
        [0.5] * 4,
        [0.4] * 5 + [1.0],
        [0.25, 0.5, 0.75, 0.5],
        [0.3, 0.9, 0.2, 0.05],
        [0.0, 0.5, 0.5, 1.0],
        [1 / 3, 1 / 7, 0.2],
    ],
)
def test_draw_keeps_each_item_with_its_own_probability_and_weights_it_by_the_inverse(pi, monkeypatch):
    pi = torch.tensor(pi, dtype=torch.float64)
    outcomes = every_draw(pi, monkeypatch)
    expected_weight = sum(p * torch.tensor(w, dtype=torch.float64) for w, p in outcomes.items())
    assert torch.allclose(expected_weight, (pi > 0).double(), atol=1e-12)
    kept = {sum(x > 0 for x in w) for w in outcomes}
    assert kept <= {math.floor(pi.sum() + 1e-9), math.ceil(pi.sum() - 1e-9)}


def test_with_equal_probabilities_draw_is_the_uniform_draw_of_a_fixed_number(monkeypatch):
    outcomes = every_draw(torch.full((5,), 0.4, dtype=torch.float64), monkeypatch)
    assert len(outcomes) == math.comb(5, 2)
    assert all(abs(p - 1 / math.comb(5, 2)) < 1e-12 for p in outcomes.values())


def test_draw_keeps_the_exact_number_at_any_size_and_seed():
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        low = int(torch.randint(1, 200, (1,), generator=generator))
        kept = int(torch.randint(1, low + 1, (1,), generator=generator))
        pi = torch.cat([torch.full((low,), kept / low, dtype=torch.float64), torch.ones(7, dtype=torch.float64)])
        assert (draw(pi, generator) > 0).sum() == kept + 7


def test_of_unlikely_prompts_one_is_kept_with_the_weight_of_its_chance(monkeypatch):
    pi = torch.tensor([0.1, 0.2, 0.1], dtype=torch.float64)
    outcomes = dict(every_outcome_of_prompts(pi, Config(), monkeypatch))
    assert outcomes == pytest.approx({(4.0, 0.0, 0.0): 0.25, (0.0, 2.0, 0.0): 0.5, (0.0, 0.0, 4.0): 0.25})
    greso = every_outcome_of_prompts(pi, Config(method="greso"), monkeypatch)
    assert {weights for weights, _ in greso} == {(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)}


def every_outcome_of_prompts(pi, config, monkeypatch):
    outcomes = every_outcome(lambda: dppo.draw_prompts(pi, config, None), monkeypatch)
    return [(tuple(round(x, 9) for x in weights.tolist()), probability) for probability, weights in outcomes]


def test_draw_shuffles_by_default_and_repeats_with_its_seed():
    pi = torch.full((40,), 0.5, dtype=torch.float64)
    first, again, other = (draw(pi, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (first > 0).tolist() not in ([True, False] * 20, [False, True] * 20)


def low_set_rule(history, rate):
    return lambda window: keep_probabilities(history[window], rate)


def test_window_grows_until_one_more_prompt_would_leave_too_many():
    history = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9], dtype=torch.float64)
    order, rule = torch.arange(10), low_set_rule(history, 0.5)
    # Batch 4, rate 0.5. Up to 6 prompts the scores are equal and all survive, so the window stays at 4.
    assert grow_window(order, rule, 4).tolist() == [0, 1, 2, 3]
    # 9, 8, 0, 1: 2 low, 1 pruned, 3 survive; with 2: 3 low, 1 pruned, 4 survive; with 3: 4 low, 2 pruned, 4; with 4: 5, 2, 5.
    assert grow_window(torch.tensor([9, 8, 0, 1, 2, 3, 4, 5, 6, 7]), rule, 4).tolist() == [9, 8, 0, 1, 2, 3]
    assert grow_window(torch.tensor([9, 8, 0]), rule, 4).tolist() == [9, 8, 0]  # no more prompts
    unseen = low_set_rule(torch.full((10,), math.nan, dtype=torch.float64), 0.9)
    assert grow_window(order, unseen, 4).tolist() == [0, 1, 2, 3]
    assert grow_window(order, lambda window: torch.full((len(window),), 0.5), 4).tolist() == list(range(8))


def random_history(generator, prompts=300) -> dict:
    """Of a long run: rewards of two visits by policies of different strength; a fifth was never visited."""
    history = dppo.new_history(prompts)
    visited = torch.randperm(prompts, generator=generator)[: prompts * 4 // 5]
    for _ in range(2):
        p = torch.rand(len(visited), 1, generator=generator) ** 3
        rewards = (torch.rand(len(visited), 8, generator=generator) < p).double()
        dppo.update_history(history, visited, rewards, group_advantages(rewards))
    return history


@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
def test_survivors_never_exceed_the_batch(method):
    generator = torch.Generator().manual_seed(0)
    for rate in (0.0, 0.3, 0.7, 0.95):
        for _ in range(30):
            history = random_history(generator)
            rule = dppo.prompt_rule(history, Config(method=method, prompt_prune_rate=rate))
            window = grow_window(torch.randperm(300, generator=generator), rule, 16)
            weights = draw(rule(window), generator)
            assert len(window) >= 16 and (weights > 0).sum() <= 16


def spied_run(monkeypatch, tmp_path, reward=None, **settings) -> list[dict]:
    """Thirty steps of training -> for each its history before, window, rolled-out prompts, advantages, weights and total."""
    steps, task = [], tiny_task()
    task.reward = reward or (
        lambda prompts, completions, **_: [len(c) % (2 + len(p) % 3) / 3 for p, c in zip(prompts, completions)]
    )
    gathered, roll, advantages, update = dppo.gather, dppo.rollout, dppo.group_advantages, dppo.train_step

    def gather(task, order, history, *args):
        steps.append({"history": {name: value.clone() for name, value in history.items()}})
        result = gathered(task, order, history, *args)
        steps[-1] |= {"window": result[0], "completions": result[3]}
        return result

    def rollout(task, examples, *args):
        if steps:  # not the evaluation before the first step
            rolled = [next(i for i, e in enumerate(task.train) if e is example) for example in examples]
            steps[-1]["rolled"] = steps[-1].get("rolled", []) + rolled
        return roll(task, examples, *args)

    def group_advantages(*args, **kwargs):
        steps[-1]["advantages"] = advantages(*args, **kwargs)
        return steps[-1]["advantages"]

    def train_step(*args):
        steps[-1] |= {"weights": args[4].view_as(steps[-1]["advantages"]), "total": args[5], "trained": args[3]}
        return update(*args)

    for function in (gather, group_advantages, train_step, rollout):
        monkeypatch.setattr(dppo, function.__name__, function)
    task.evals = {}
    settings = dict(steps=30, prompts_per_step=8, output_dir=str(tmp_path / "run")) | settings
    dppo.train(Config(**settings), task)
    return steps


def test_history_is_the_mean_advantage_of_the_last_visit_and_pruned_prompts_keep_theirs(monkeypatch, tmp_path):
    steps, pruned = spied_run(monkeypatch, tmp_path), 0
    for step, following in itertools.pairwise(steps):
        expected = step["history"]["score"].clone()
        expected[step["rolled"]] = step["advantages"].abs().mean(dim=1)
        assert torch.equal(expected.nan_to_num(-1), following["history"]["score"].nan_to_num(-1))
        gone = [q for q in step["window"].tolist() if q not in step["rolled"]]
        pruned += (step["history"]["score"][gone] > 0).sum()
    assert pruned > 20 and not steps[-1]["history"]["score"].isnan().any()


def test_the_advantages_trained_are_those_of_the_whole_groups(monkeypatch, tmp_path):
    for step in spied_run(monkeypatch, tmp_path, completion_prune_rate=0.9):
        assert torch.equal(step["trained"], step["advantages"].flatten())


def test_completions_of_a_kept_prompt_carry_its_weight(monkeypatch, tmp_path):
    heavy = 0
    for step in spied_run(monkeypatch, tmp_path, completion_prune_rate=0.0):
        scores = step["history"]["score"][step["window"]]
        pi = dict(zip(step["window"].tolist(), keep_probabilities(scores, 0.7).tolist()))
        for prompt, advantages, weights in zip(step["rolled"], step["advantages"], step["weights"]):
            assert torch.allclose(weights, (advantages != 0).double() / pi[prompt])
            heavy += pi[prompt] < 1 and advantages.any()
    assert heavy > 5


# ---- The methods of the comparison -------------------------------------------------------------------------------------


def binary_rewards(groups: int, seed: int) -> torch.Tensor:
    """(groups, 8) rewards 0 and 1, the success rates uniform on [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(groups, 1, generator=generator)
    return (torch.rand(groups, 8, generator=generator) < p).double()


def second_moment(method: str, rate: float) -> float:
    """Of a sum of orthogonal gradients of norm |A|, relative to the full sum: sum A^2/pi over sum A^2, completions pruned."""
    config, pruned, full = Config(method=method, completion_prune_rate=rate), 0.0, 0.0
    for seed in range(100):
        rewards = binary_rewards(64, seed)
        advantages = group_advantages(rewards)
        pi = completion_probabilities(rewards, advantages, torch.ones(64), config)
        assert (pi > 0).equal(advantages != 0)
        pruned += (advantages[pi > 0] ** 2 / pi[pi > 0]).sum()
        full += (advantages**2).sum()
    return (pruned / full).item()


def test_the_optimal_rule_has_at_most_the_paper_s_second_moment_at_every_rate():
    for rate in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        assert second_moment("dppo-optimal", rate) <= second_moment("dppo", rate) + 1e-12
    assert second_moment("dppo-optimal", 0.9) <= 0.65 * second_moment("dppo", 0.9)


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_the_optimal_rule_keeps_as_many_in_proportion_to_their_scores(rate):
    rewards = binary_rewards(64, 0)
    scores = group_advantages(rewards).abs()
    scores = scores[scores > 0]
    pi = dppo.optimal_probabilities(scores, rate)
    assert abs(pi.sum() - keep_probabilities(scores, rate).sum()) < 1e-9
    assert pi.max() <= 1 and ((pi / scores)[pi < 1]).std() < 1e-9 and pi[scores.argmax()] == pi.max()
    floored = dppo.optimal_probabilities(torch.cat([scores, torch.full((5,), 1e-6)]), rate, 0.07)
    assert floored.min() == 0.07 and abs(floored.sum() - floored.sum().round()) < 1e-9
    assert dppo.optimal_probabilities(torch.tensor([math.nan, 1.0, 0.1, 0.1, 0.1]), rate)[0] == 1
    assert dppo.optimal_probabilities(torch.zeros(0), rate).tolist() == []


def test_optimal_completions_are_scored_with_the_weight_of_their_prompt():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 8, dtype=torch.float64)
    weights = torch.tensor([10.0] + [1.0] * 7, dtype=torch.float64)
    config = Config(method="dppo-optimal", completion_prune_rate=0.9)
    pi = completion_probabilities(rewards, group_advantages(rewards), weights, config)
    assert pi[0, 0] == 1 and torch.allclose(pi[0, 1:], 10 * pi[1:, 1:]) and torch.allclose(pi[1:, 0], 3 * pi[1:, 1])
    drawn = dppo.draw_completions(pi, group_advantages(rewards), weights, config, torch.Generator().manual_seed(0))
    assert drawn[0, 0] == 10 and torch.allclose(drawn[drawn > 0], (weights[:, None] / pi)[drawn > 0])


def test_the_optimal_draw_takes_its_share_of_every_group_and_sign():
    rewards = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * 16, dtype=torch.float64)
    advantages, ones = group_advantages(rewards), torch.ones(16, dtype=torch.float64)
    pi = torch.full_like(advantages, 0.5)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        drawn = dppo.draw_completions(pi, advantages, ones, Config(method="dppo-optimal"), generator) > 0
        assert drawn[:, :4].sum(dim=1).eq(2).all() and drawn[:, 4:].sum(dim=1).eq(2).all()


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_predicted_advantages_are_the_mean_over_the_success_rate_s_posterior(objective):
    history = dppo.new_history(4)
    history["right"][:3] = torch.tensor([0.0, 3.0, 12.5])
    history["wrong"][:3] = torch.tensor([8.0, 5.0, 0.5])
    history["score"][:3] = 0.0
    config = Config(objective=objective, group_size=6)
    predicted = dppo.predicted_advantages(history, config)
    torch.manual_seed(0)
    for q in range(3):
        a, b = (dppo.PRIOR + history[name][q] for name in ("right", "wrong"))
        p = torch.distributions.Beta(a, b).sample((400_000,))
        square = p * (1 - p) if objective == "dr_grpo" else 1 - p**6 - (1 - p) ** 6
        assert abs(predicted[q] ** 2 - square.mean()) < 5 * square.std() / 400_000**0.5
    assert predicted[3].isnan() and predicted[1] > max(predicted[0], predicted[2])


def test_successes_are_summed_with_decay_and_rewards_count_within_0_and_1():
    history = dppo.new_history(3)
    visit(history, {0: "mixed", 1: "hard"})
    visit(history, {0: "easy"})
    assert torch.allclose(history["right"], torch.tensor([0.8 * 2 + 4, 0.0, 0.0], dtype=torch.float64))
    assert torch.allclose(history["wrong"], torch.tensor([0.8 * 2, 4.0, 0.0], dtype=torch.float64))
    rewards = torch.tensor([[-1.0, 2.0, 0.5, 0.0], [math.nan, 1.0, 1.0, 1.0]], dtype=torch.float64)
    dppo.update_history(history, torch.tensor([1, 2]), rewards, group_advantages(rewards))
    assert torch.allclose(history["right"][1:], torch.tensor([1.5, 0.0], dtype=torch.float64))
    assert torch.allclose(history["wrong"][1:], torch.tensor([0.8 * 4 + 2.5, 4.0], dtype=torch.float64))
    assert history["score"][2] == 0 and history["streak"][2] == -1


def test_cppo_keeps_the_largest_advantages_of_the_whole_batch():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0] * 4], dtype=torch.float64)
    advantages, ones = group_advantages(rewards), torch.ones(3, dtype=torch.float64)  # 1.5, -0.5; 0.87, -0.87; 0
    for rate, expected in (
        (0.9, [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),  # floor(0.1 * 12) = 1
        (0.58, [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),  # floor(0.42 * 12) = 5
        (0.0, [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]),
    ):
        config = Config(method="cppo", completion_prune_rate=rate)
        pi = completion_probabilities(rewards, advantages, ones, config)
        weights = dppo.draw_completions(pi, advantages, ones, config, torch.Generator())
        assert pi.tolist() == weights.tolist() == expected
        assert dppo.denominator(weights, 12, config) == sum(map(sum, expected))


def test_cppo_rolls_out_more_prompts_so_that_as_many_completions_are_trained(monkeypatch, tmp_path):
    steps = spied_run(monkeypatch, tmp_path, method="cppo", completion_prune_rate=0.5, prompts_per_step=4, steps=5)
    for step in steps:
        assert len(step["window"]) == len(step["rolled"]) == 8
        assert step["total"] == (step["weights"] > 0).sum() <= 4 * 8 and step["weights"].max() == 1


def group(kind: str) -> list[float]:
    return {"easy": [1.0] * 4, "hard": [0.0] * 4, "mixed": [1.0, 0.0, 0.0, 1.0]}[kind]


def visit(history, kinds: dict[int, str]) -> None:
    rewards = torch.tensor([group(kind) for kind in kinds.values()], dtype=torch.float64)
    dppo.update_history(history, torch.tensor(list(kinds)), rewards, group_advantages(rewards))


def test_greso_counts_visits_in_a_row_that_taught_nothing():
    history, rule = dppo.new_history(4), lambda: dppo.prompt_rule(history, Config(method="greso"))(torch.arange(4))
    assert rule().tolist() == [1.0] * 4
    for kinds in ({0: "easy", 1: "hard", 2: "mixed"}, {0: "easy", 1: "hard", 2: "easy"}, {0: "mixed", 1: "easy"}):
        visit(history, kinds)
    assert history["streak"].tolist() == [0, 1, 1, 0]  # after a mixed visit 0; hard, hard, easy is one easy visit
    history["streak"] = torch.tensor([0.0, 2.0, -1.0, -9.0], dtype=torch.float64)
    history["p_easy"], history["p_hard"] = torch.tensor([0.3, 0.5], dtype=torch.float64)
    assert torch.allclose(rule(), torch.tensor([1.0, 0.3**2, 0.5, 0.01], dtype=torch.float64))


def test_greso_sets_aside_whole_groups():
    rewards = torch.tensor([[1.0, 0.5, 0.0], [0.5] * 3, [math.nan, 0.0, 1.0]], dtype=torch.float64)
    for beta in (0.0, 0.1):
        config = Config(method="greso", beta=beta)
        pi = completion_probabilities(rewards, group_advantages(rewards), torch.ones(3), config)
        assert pi.tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3] and dppo.denominator(pi, 9, config) == 3


def test_greso_s_probabilities_move_by_001_within_their_bounds():
    history = dppo.new_history(12)
    visit(history, {q: "easy" if q == 0 else "hard" if q == 1 else "mixed" for q in range(12)})
    assert abs(history["p_easy"] - 0.49) < 1e-12  # 1/12 easy is the target
    assert abs(history["p_hard"] - 0.51) < 1e-12  # 1/12 hard is below 1/6
    visit(history, {q: "hard" if q < 2 else "mixed" for q in range(12)})
    assert abs(history["p_easy"] - 0.50) < 1e-12 and abs(history["p_hard"] - 0.50) < 1e-12
    for _ in range(100):
        visit(history, {0: "hard", 1: "mixed"})
    assert history["p_easy"] == 0.95 and history["p_hard"] == 0.05


def test_greso_refills_its_batch_with_groups_of_unequal_rewards(monkeypatch, tmp_path):
    def reward(prompts, completions, **_):  # of short prompts always 1
        return [float(len(p) < 10 or len(c) % 2) for p, c in zip(prompts, completions)]

    steps = spied_run(monkeypatch, tmp_path, reward, method="greso", prompts_per_step=6, steps=8)
    full = 0
    for step in steps:
        informative = step["advantages"].any(dim=1)
        assert step["weights"].equal((step["advantages"] != 0).double())
        assert step["total"] == (step["weights"] > 0).sum()
        assert informative.sum() >= 6 or len(step["window"]) == 48  # all prompts there are
        full += informative.sum() >= 6
    assert full > 4 and max(len(step["rolled"]) for step in steps) > 8


def test_dapo_divides_by_the_mean_length_of_earlier_steps(monkeypatch, tmp_path):
    steps = spied_run(monkeypatch, tmp_path, objective="dapo", method="grpo", steps=6)
    mean = None
    for step in steps:
        length = sum(len(ids) for group in step["completions"] for ids in group) / 64
        mean = mean or length
        assert abs(step["total"] - len(step["window"]) * 8 * mean) < 1e-6
        mean = 0.9 * mean + 0.1 * length


def test_every_method_sees_the_same_prompts_in_the_same_order(monkeypatch, tmp_path):
    streams = []
    for method in dppo.METHODS:
        with monkeypatch.context() as patch:
            steps = spied_run(patch, tmp_path / method, method=method, steps=8)
        streams.append([q for step in steps for q in step["window"].tolist()][:64])
    assert all(stream == streams[0] for stream in streams) and len(set(streams[0][:48])) == 48


def test_evaluating_more_often_does_not_change_the_training(tmp_path):
    def run(every):
        out = tmp_path / str(every)
        dppo.train(Config(steps=6, prompts_per_step=8, eval_every=every, output_dir=str(out)), tiny_task())
        return without_times(out / "metrics.jsonl")

    often, never = run(2), run(0)
    assert ["accuracy" in record for record in often] == [False, True] * 3
    assert [{k: v for k, v in record.items() if k != "accuracy"} for record in often] == never


# ---- Advantages -------------------------------------------------------------------------------------------------------


def test_advantages_are_trl_s_with_exact_zeros_for_equal_rewards():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.1] * 4], dtype=torch.float64)
    advantages = group_advantages(rewards)
    assert torch.allclose(advantages[0], (rewards[0] - 0.25) / (rewards[0].std() + 1e-4))
    assert advantages[1].tolist() == [0.0] * 4
    assert group_advantages(torch.full((3, 7), 0.1)).eq(0).all()
    assert torch.allclose(group_advantages(rewards, scale_by_std=False)[0], rewards[0] - 0.25)


def test_groups_that_are_not_gradable_are_left_out_also_with_kl():
    rewards = torch.tensor([[1.0, 0.0], [math.nan, 1.0]], dtype=torch.float64)
    advantages = group_advantages(rewards)
    assert advantages[1].tolist() == [0.0, 0.0]
    for method, beta in itertools.product(dppo.METHODS, (0.0, 0.1)):
        config = Config(method=method, beta=beta, completion_prune_rate=0.0)
        pi = completion_probabilities(rewards, advantages, torch.ones(2), config)
        assert pi.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_zero_advantages_cost_nothing_except_in_the_textbook_and_with_kl():
    advantages = group_advantages(rewards := torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64))
    for method in dppo.METHODS:
        for beta, trained in ((0.0, 4 if method == "grpo" else 2), (0.1, 2 if method == "greso" else 4)):
            config = Config(method=method, beta=beta, completion_prune_rate=0.0)
            pi = completion_probabilities(rewards, advantages, torch.ones(2), config)
            assert (pi > 0).sum() == trained


# ---- Packing ----------------------------------------------------------------------------------------------------------


def gsm8k_like_lengths(count: int) -> list[int]:
    """Question plus solution, in tokens: means 60 and 121, standard deviation of solutions 54, longest 194 and 453."""
    rng = random.Random(0)
    return [
        min(194, round(rng.gammavariate(8, 7.5))) + min(453, round(rng.gammavariate(5, 24.2))) for _ in range(count)
    ]


def test_every_sequence_is_packed_exactly_once_and_no_slot_overflows():
    rng = random.Random(0)
    for _ in range(300):
        capacity, window = rng.randint(1, 50), rng.randint(1, 20)
        lengths = [rng.randint(1, capacity) for _ in range(rng.randint(0, 60))]
        slots = dppo.pack(lengths, capacity, window)
        assert sorted(index for slot in slots for index in slot) == list(range(len(lengths)))
        assert all(0 < sum(lengths[index] for index in slot) <= capacity for slot in slots)


def test_packing_takes_the_longest_that_fits_among_the_next_in_order():
    assert dppo.pack([5, 3, 8, 2, 2], capacity=10, window=3) == [[2, 3], [0, 1, 4]]
    assert dppo.pack([5, 6, 5, 4], capacity=10, window=1) == [[0], [1], [2, 3]]
    assert dppo.pack([], 10, 3) == []
    with pytest.raises(ValueError, match="11 tokens does not fit a slot of 10"):
        dppo.pack([3, 11], capacity=10, window=3)


def test_density_is_at_least_095_with_slots_as_long_as_the_longest_sequence():
    lengths = gsm8k_like_lengths(2000)
    slots = dppo.pack(lengths, max(lengths), window=64)
    assert sum(lengths) / (len(slots) * max(lengths)) >= 0.95


def padded_logprobs(model, sequences):
    """Each completion's log-probabilities from a padded batch with an attention mask: no packing anywhere."""
    width = max(len(p) + len(c) for p, c in sequences)
    ids = torch.tensor([p + c + [0] * (width - len(p) - len(c)) for p, c in sequences], device=model.device)
    mask = torch.tensor(
        [[1] * (len(p) + len(c)) + [0] * (width - len(p) - len(c)) for p, c in sequences], device=model.device
    )
    logprobs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float().log_softmax(-1)
    logprobs = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return [logprobs[row, len(p) - 1 : len(p) + len(c) - 1] for row, (p, c) in enumerate(sequences)]


def varlen_stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
    """What torch's varlen_attn computes, which needs CUDA: causal attention of each of the sequences alone."""
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q[-1] == len(query) and window_size == (-1, 0)
    assert max_q == max_k == cu_seq_q.diff().max() and cu_seq_q.dtype == torch.int32
    parts = [x.split(cu_seq_q.diff().tolist()) for x in (query, key, value)]
    each = [[x.transpose(0, 1) for x in sequence] for sequence in zip(*parts)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([attend(q, k, v, is_causal=True, scale=scale).transpose(0, 1) for q, k, v in each])


@pytest.mark.parametrize(
    "attention, device, dtype, tolerance",
    [
        ("sdpa", "cpu", torch.float32, 1e-5),
        ("varlen", "cpu", torch.float32, 1e-5),
        pytest.param("sdpa", "cuda", torch.float32, 1e-4, marks=CUDA.marks),
        pytest.param("sdpa", "cuda", torch.bfloat16, 0.1, marks=CUDA.marks),
        pytest.param("varlen", "cuda", torch.bfloat16, 0.1, marks=CUDA.marks),
        pytest.param("flex_attention", "cuda", torch.bfloat16, 0.1, marks=CUDA.marks),
    ],
)
@pytest.mark.parametrize("slot_tokens, pack_window", [(0, 5), (40, 5), (0, 0)])
def test_packed_and_padded_log_probabilities_and_gradients_agree(
    slot_tokens, pack_window, attention, device, dtype, tolerance, monkeypatch
):
    if device == "cpu":
        monkeypatch.setattr(dppo, "varlen_attn", varlen_stand_in)
    model, sequences = tiny_model(dtype, device), make_sequences()
    config = Config(slot_tokens=slot_tokens, pack_window=pack_window, attention=attention)
    model.set_attn_implementation(attention)
    weights = [(-1.0) ** i * (1 + i % 3) for i in range(len(sequences))]
    results = []
    for packed in (True, False):
        if packed:
            logprobs = {}
            for slots in dppo.pack_micro_batches(sequences, list(range(len(sequences))), config)[0]:
                assert max(map(len, slots)) > 1 if pack_window else all(len(slot) == 1 for slot in slots)
                order = [i for slot in slots for i in slot]
                values, _ = dppo.completion_logprobs(model, sequences, slots, 1.0)
                logprobs.update(zip(order, values.split([len(sequences[i][1]) for i in order])))
            logprobs = [logprobs[i] for i in range(len(sequences))]
        else:
            model.set_attn_implementation("sdpa")
            logprobs = padded_logprobs(model, sequences)
        loss = sum(w * p.sum() for w, p in zip(weights, logprobs))
        gradient = torch.cat([g.flatten().float() for g in torch.autograd.grad(loss, list(model.parameters()))])
        results.append((torch.cat(logprobs).detach(), gradient))
    (packed_logprobs, packed_gradient), (logprobs, gradient) = results
    assert (packed_logprobs - logprobs).abs().max() < tolerance * logprobs.abs().max()
    assert (packed_gradient - gradient).norm() < tolerance * gradient.norm()


def test_a_slot_is_as_long_as_the_longest_sequence_or_with_block_skipping_attention_a_micro_batch():
    sequences = make_sequences()
    lengths = [len(p) + len(c) for p, c in sequences]
    indices = list(range(len(sequences)))
    [slots], density = dppo.pack_micro_batches(sequences, indices, Config(attention="sdpa"))
    filled = [sum(lengths[i] for i in slot) for slot in slots]
    assert max(filled) <= max(lengths) and density == pytest.approx(sum(lengths) / (len(slots) * max(filled)))
    batches, density = dppo.pack_micro_batches(sequences, indices, Config(attention="varlen", micro_batch_tokens=60))
    assert all(len(slots) == 1 for slots in batches) and density == 1 and len(batches) < len(sequences)
    padded = Config(attention="varlen", pack_window=0)
    [slots], density = dppo.pack_micro_batches(sequences, indices, padded)  # many rows, as wide as the longest
    assert len(slots) == len(sequences) and density == pytest.approx(sum(lengths) / (len(slots) * max(lengths)))
    assert dppo.pack_micro_batches(sequences, [], Config()) == ([], 0)


def test_the_attention_of_slots_is_checked_against_that_of_rollouts(monkeypatch):
    model, examples = tiny_model(torch.float32), [{"prompt_ids": [3, 4, 5]}, {"prompt_ids": [6, 7, 8, 9]}]
    model.set_attn_implementation("varlen")
    monkeypatch.setattr(dppo, "varlen_attn", varlen_stand_in)
    dppo.check_packing(model, examples)
    assert model.config._attn_implementation == "varlen"
    monkeypatch.setattr(dppo, "varlen_attn", lambda *args, scale, **_: varlen_stand_in(*args, scale / 2, (-1, 0)))
    with pytest.raises(InputError, match="cannot be trained packed"):
        dppo.check_packing(model, examples)


def test_gradient_checkpointing_computes_layers_again_and_changes_nothing():
    gradients, forwards = [], []
    for again in (False, True):
        config, model, sequences, advantages, old, _ = problem()
        if again:
            model.activation_checkpointing_enable()
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        weights = torch.ones(N * G, dtype=torch.float64)
        gradients.append(gradient_of_train_step(config, model, sequences, advantages, weights, old, None))
        forwards.append(len(calls))
        ids = torch.arange(2, 12)[None]  # and a cache still works
        cached = model(ids[:, -1:], past_key_values=model(ids[:, :-1], use_cache=True).past_key_values).logits
        assert torch.allclose(cached[:, -1], model(ids).logits[:, -1])
    assert forwards[1] == 2 * forwards[0] and torch.allclose(*gradients, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_micro_batch_loop_never_waits_for_the_device():
    config, _, sequences, advantages, old, _ = problem(micro_batch_tokens=60)
    config.attention = "varlen"
    model = tiny_model(torch.bfloat16, "cuda")
    model.set_attn_implementation("varlen")
    phases = []

    def mark(phase):
        phases.append(phase)
        torch.cuda.set_sync_debug_mode("error" if phase in ("packing", "forward") else "default")

    weights = torch.ones(N * G, dtype=torch.float64)
    optimizer = dppo.make_optimizer(model, config)
    dppo.train_step(model, optimizer, sequences, advantages.flatten(), weights, N * G, config, mark=mark)
    assert phases.count("backward") > 1


TWO_PROCESSES = """
import torch, test_dppo, dppo
torch.distributed.init_process_group("gloo")
config, model, sequences, advantages, old, ref = test_dppo.problem(beta=0.1, micro_batch_tokens=60)
weights = torch.rand(len(sequences), generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3
weights[::3] = 0
gradient = test_dppo.gradient_of_train_step(config, model, sequences, advantages, weights, old, ref)
torch.save(gradient, f"{dppo.WORLD}-{dppo.RANK}.pt")
task = test_dppo.tiny_task()
task.reward = lambda prompts, completions, **columns: [len(p) + len(c) / 100 for p, c in zip(prompts, completions)]
completions, rewards = dppo.scored_rollout(task, task.train[:7], 3, dppo.Config())
for example, group, values in zip(task.train, completions, rewards):
    texts = [task.tokenizer.decode(ids, skip_special_tokens=True) for ids in group]
    assert values.tolist() == [len(example["prompt"]) + len(text) / 100 for text in texts]
"""


def run_python(*args, cwd=None, **environment) -> str:
    """Standard output of Python with these arguments, dppo.py and this file importable, which must succeed."""
    result = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent), **environment},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run_on(processes: int, *command, cwd=None) -> str:
    return run_python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command, cwd=cwd)


def test_two_processes_have_the_gradient_of_one_and_share_their_rollouts(tmp_path):
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    for processes in (1, 2):
        run_on(processes, tmp_path / "two.py", cwd=tmp_path)
    one, *two = (torch.load(tmp_path / name) for name in ("1-0.pt", "2-0.pt", "2-1.pt"))
    assert all((gradient - one).norm() < 1e-6 * one.norm() for gradient in two)


def test_no_attention_crosses_a_slot_boundary():
    model, sequences = tiny_model(torch.float32), make_sequences()
    before, _ = dppo.completion_logprobs(model, sequences, [[0, 1, 2], [3, 4]], 1.0)
    prompt, completion = sequences[1]
    sequences[1] = ([2 + (token + 3) % 11 for token in prompt], [2 + (token + 5) % 11 for token in completion])
    after, _ = dppo.completion_logprobs(model, sequences, [[0, 1, 2], [3, 4]], 1.0)
    own = slice(len(sequences[0][1]), len(sequences[0][1]) + len(completion))
    assert (before[own] - after[own]).abs().max() > 0.01
    before[own] = after[own] = 0
    assert torch.equal(before, after)


def test_logits_in_chunks_are_the_same(monkeypatch):
    model, sequences, slots = tiny_model(torch.float32), make_sequences(), [[0, 1, 2], [3, 4, 5]]
    whole = dppo.completion_logprobs(model, sequences, slots, 0.7)
    monkeypatch.setattr(dppo, "LOGIT_CHUNK", 3)
    for a, b in zip(whole, dppo.completion_logprobs(model, sequences, slots, 0.7)):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_model_that_caps_its_logits_is_refused():
    config = transformers.Gemma2Config(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=1.0,
        final_logit_softcapping=1.0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    examples = [{"prompt_ids": [3, 4, 5]}, {"prompt_ids": [6, 7, 8, 9]}]
    dppo.check_packing(tiny_model(torch.float32), examples)
    with pytest.raises(InputError, match="Gemma2ForCausalLM cannot be trained packed"):
        dppo.check_packing(transformers.Gemma2ForCausalLM(config).eval(), examples)


# ---- Rollout ----------------------------------------------------------------------------------------------------------

QWEN_GENERATION = dict(
    do_sample=True,
    temperature=0.5,
    top_k=3,
    top_p=0.7,
    repetition_penalty=1.5,
    min_p=0.2,
    no_repeat_ngram_size=1,
    eos_token_id=[1, 12],
    pad_token_id=12,
)


def chi_square(counts: Counter, expected: dict) -> float:
    assert set(counts) <= set(expected) and min(expected.values()) > 5
    return sum((counts[outcome] - mean) ** 2 / mean for outcome, mean in expected.items())


@pytest.mark.parametrize("cache, temperature", [("dynamic", 1.0), ("dynamic", 0.7), ("static", 0.7), ("paged", 0.7)])
def test_sampled_frequencies_match_the_probabilities_that_are_trained(cache, temperature):
    task, draws = tiny_task(), 8000
    task.model = tiny_model(torch.float32, vocab_size=80, initializer_range=0.1)  # over the 50 of generate's own top_k
    task.model.generation_config = transformers.GenerationConfig(**QWEN_GENERATION)
    prompt = [5, 4, 3, 7]
    config = Config(temperature=temperature, max_completion_tokens=1, rollout_cache=cache)
    torch.manual_seed(0)
    first = Counter(ids[0] for ids in dppo.rollout(task, [{"prompt_ids": prompt}], draws, config)[0])
    with torch.no_grad():
        trained = {
            token: draws * dppo.completion_logprobs(task.model, [(prompt, [token])], [[0]], temperature)[0].exp().item()
            for token in range(80)
        }
    assert chi_square(first, trained) < 131  # 79 degrees of freedom, p = 2e-4
    assert task.model.generation_config.top_k == 3 and task.model.config._attn_implementation == "sdpa"  # its own again


@pytest.mark.parametrize("cache", ["dynamic", "static", "paged"])
def test_sampled_completions_match_their_probability_whatever_their_neighbours_do(cache):
    """Prompts of different lengths, some samples that end early, and others that go on when these have left."""
    task, draws = tiny_task(), 4000
    task.model = tiny_model(torch.float32, vocab_size=5, pad_token_id=0, eos_token_id=1)
    prompts = [[2], [4, 3, 2, 2, 4, 2], [3, 4]]
    torch.manual_seed(0)
    config = Config(temperature=1.5, max_completion_tokens=3, rollout_cache=cache)
    groups = dppo.rollout(task, [{"prompt_ids": prompt} for prompt in prompts], draws, config)
    others = [0, 2, 3, 4]  # all but the end
    outcomes = [(1,), *((a, 1) for a in others), *itertools.product(others, others, range(5))]
    for prompt, group in zip(prompts, groups):
        with torch.no_grad():
            sequences = [(prompt, list(outcome)) for outcome in outcomes]
            logprobs, _ = dppo.completion_logprobs(task.model, sequences, [[i] for i in range(len(outcomes))], 1.5)
        expected = [draws * part.sum().exp().item() for part in logprobs.split([len(o) for o in outcomes])]
        assert sum(expected) == pytest.approx(draws)
        rare = sum(mean for mean in expected if mean < 6)
        counts = Counter(map(tuple, group))
        common = {outcome: mean for outcome, mean in zip(outcomes, expected) if mean >= 6}
        counts["rare"] = sum(n for outcome, n in counts.items() if outcome not in common)
        counts = Counter({outcome: n for outcome, n in counts.items() if outcome in common or outcome == "rare"})
        degrees = len(common)
        assert chi_square(counts, common | {"rare": max(rare, 6)}) < degrees + 4 * (2 * degrees) ** 0.5


def test_completions_end_with_the_first_of_several_end_ids_which_may_also_pad():
    assert dppo.trim_completion([5, 6, 12, 12, 12], {1, 12}) == [5, 6, 12]
    assert dppo.trim_completion([5, 1, 12, 7], {1, 12}) == [5, 1]
    assert dppo.trim_completion([5, 6, 7], {1, 12}) == [5, 6, 7]  # cut off by the token limit
    assert dppo.trim_completion([12, 12], {1, 12}) == [12]
    task = tiny_task()
    task.model.generation_config = transformers.GenerationConfig(**QWEN_GENERATION)
    task.tokenizer.pad_token_id = 12
    assert dppo.end_ids(task) == {1, 12}
    completions = dppo.rollout(task, task.train[:6], 20, Config(max_completion_tokens=9))
    flat = [ids for group in completions for ids in group]
    ended = [ids for ids in flat if ids[-1] in (1, 12)]
    assert all(not {1, 12} & set(ids[:-1]) for ids in flat) and {ids[-1] for ids in ended} == {1, 12}
    assert all(len(ids) == 9 for ids in flat if ids not in ended) and len({len(ids) for ids in ended}) > 3


def test_rollouts_are_split_and_come_back_in_the_order_of_their_prompts(monkeypatch):
    task, sizes = tiny_task(), []

    def generate(input_ids, attention_mask, **settings):  # "completes" with the prompt's length and the end
        sizes.append(input_ids.shape)
        return torch.cat([input_ids, attention_mask.sum(1, keepdim=True), torch.ones_like(input_ids[:, :1])], dim=1)

    monkeypatch.setattr(task.model, "generate", generate)
    lengths = [len(e["prompt_ids"]) for e in task.train]
    completions = dppo.rollout(task, task.train, 3, Config(rollout_batch_size=10))
    assert completions == [[[length, 1]] * 3 if length != 1 else [[1]] * 3 for length in lengths]
    assert sum(rows for rows, _ in sizes) == 3 * len(lengths) and max(rows for rows, _ in sizes) == 9
    assert sum(rows * width for rows, width in sizes) < 1.2 * 3 * sum(lengths)  # prompts of similar length together


def test_what_has_ended_leaves_the_batch(monkeypatch):
    task, rows, real = tiny_task(), [], tiny_task().model.generate
    monkeypatch.setattr(task.model, "generate", lambda ids, **settings: rows.append(len(ids)) or real(ids, **settings))
    torch.manual_seed(0)
    completions = dppo.rollout(task, task.train[:8], 8, Config(max_completion_tokens=16))
    lengths = [len(ids) for group in completions for ids in group]
    live = [sum(length > done or length == done == 0 for length in lengths) for done in range(0, 16, 2)]
    assert rows == [n for n in live if n] and 64 == rows[0] > rows[-1]


# ---- Precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_updates_far_below_bfloat16_resolution_are_not_lost(device):
    model = tiny_model(torch.bfloat16, device)
    optimizer = dppo.make_optimizer(model, Config(learning_rate=1e-5))
    masters = optimizer.param_groups[0]["params"]
    weight, master = model.lm_head.weight, masters[0]
    start = master.detach().clone()
    assert master.dtype == torch.float32 and torch.equal(weight.float(), start)
    for _ in range(300):
        weight.float().sum().backward()
        assert weight.grad is None and master.grad.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(master.detach() - start, torch.full_like(start, -300e-5), rtol=0.01)
    assert torch.equal(weight, master.detach().bfloat16()) and (weight.float() - start).abs().max() > 1e-3


def test_gradients_of_several_backward_passes_accumulate_in_float32():
    model = tiny_model(torch.bfloat16)
    optimizer = dppo.make_optimizer(model, Config())
    weight, master = model.lm_head.weight, optimizer.param_groups[0]["params"][0]
    for value in (256.0, 1.0, 1.0):
        (weight * value).sum().backward()
    assert master.grad.eq(258).all()  # 256 + 1 is 256 in bfloat16


def test_float32_models_are_trained_in_place():
    model = tiny_model(torch.float32)
    assert [*map(id, dppo.make_optimizer(model, Config()).param_groups[0]["params"])] == [*map(id, model.parameters())]


# ---- Rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, number",
    [
        ("#### 18", 18),
        ("so 3 + 4 = 7\n#### 1,234", 1234),
        ("####-5", -5),
        ("#### $70,000.", 70000),
        ("#### 50%", 50),
        ("it is 3.50.", 3.5),
        ("first 1 then 2", 2),
        ("5 - 3 = 2", 2),
        ("16-3", 3),
        ("-7", -7),
        ("answer: $-7", -7),
        ("1,2,3", 3),
        ("#### none, 4", 4),
        ("#### ", None),
        ("", None),
        ("7 ####", 7),
        ("\N{MINUS SIGN}4", -4),
        (".5", 0.5),
        ("no digits", None),
        ("\u0663\u0664", None),
        ("1/4 is 0.25", 0.25),
    ],
)
def test_gsm8k_numbers(text, number):
    assert dppo.gsm8k_number(text) == (number if number is None else dppo.Decimal(str(number)))


def test_gsm8k_reward_compares_numbers_and_says_none_without_an_answer():
    rewards = dppo.gsm8k_reward(
        prompts=["?"] * 5,
        completions=["#### 18.0", "18", "$18.", "19", "18"],
        extra=[1] * 5,
        answer=["x\n#### 18", "18", "1 8\n#### 18", "18.", r"\frac{3}{18}"],
    )
    assert rewards == [1.0, 1.0, 1.0, 0.0, None]
    assert dppo.gsm8k_reward(prompts=[[]], completions=[[{"role": "assistant", "content": "#### 4"}]], answer=[4]) == [
        1.0
    ]


@pytest.mark.parametrize(
    "given, gold, reward",
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1),
        (r"\boxed{1/2}", r"\tfrac{1}{2}", 1),
        (r"\boxed{1} then \boxed{2}", "2", 1),
        (r"\boxed{1} then \boxed{2}", "1", 0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1),
        (r"\boxed{5\text{ cm}}", "5", 1),
        (r"\boxed{5 cm}", "5", 1),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1),
        (r"\boxed{x^{2}}", "x^{2}", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{\$10.}", "10.0", 1),
        (r"\boxed{30^\circ}", "30", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{3", "3", 0),
        ("3", "3", 0),
        (r"\boxed{3}", r"thus \boxed{3}", 1),
        (r"\boxed {\{1,2\}}", r"\{1,2\}", 1),
        (r"\boxed{}", "", None),
        (r"\boxed{10\text{ m}^2}", "10", 1),
        (r"\boxed{a_{n_{k}}}", "a_{n_{k}}", 1),
        (r"\boxed{5x}", "5", 0),
        (r"\leftarrow\boxed{2}", "2", 1),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
        (r"\boxed{3m}", "3", 0),
        (r"\boxed{70{,}000}", "70000", 1),
        (r"\boxed{x^2}", "x^{2}", 1),
        (r"\boxed{\sqrt2}", r"\sqrt{2}", 1),
        (r"\boxed{30°}", "30", 1),
        (r"\boxed{None}", None, None),
    ],
)
def test_boxed_rewards(given, gold, reward):
    assert dppo.boxed_reward(prompts=["?"], completions=[given], answer=[gold]) == [reward]


HOSTILE = [
    "",
    "9" * 5000,
    "9" * 100_000,
    "1e999999",
    "1e" + "9" * 30,
    "NaN",
    "Infinity",
    "#### 1e999999999999999999999",
    r"\boxed{" * 10_000,
    r"\boxed{" + "{" * 10_000 + "}" * 10_001,
    "\0\x1b[2J\ud800",
    "$" * 50_000,
    "1," * 50_000,
    "-" * 50_000,
    "####" * 20_000,
    "\\" * 50_000,
    r"\boxed{" + "5 " * 30_000 + "}",
    r"\boxed{5" + r"\text{" * 10_000,
    "__import__('os').abort()",
    "1" + " " * 50_000 + r"\text{a}",
]


@pytest.mark.parametrize("reward", dppo.REWARDS.values())
def test_rewards_survive_hostile_text(reward):
    for text in HOSTILE:
        for gold in ("18", text):
            assert reward(prompts=["?"], completions=[text], answer=[gold])[0] in (0.0, 1.0, None)


# ---- Data and bad input -----------------------------------------------------------------------------------------------

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking is defined and not enable_thinking %}0{% endif %}="


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A causal LM with random weights and its tokenizer, as a user has them in a folder."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(torch.float32).save_pretrained(folder)
    dppo.sorting_data(Config())[2].save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_main(monkeypatch, capsys, *args) -> str:
    """main() with these arguments, which must exit with status 2 and one line (progress and usage aside); returns it."""
    monkeypatch.setattr(sys, "argv", ["dppo.py", *map(str, args)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exit_:
        dppo.main()
    error = [
        line
        for line in capsys.readouterr().err.strip().splitlines()
        if "examples/s" not in line and "usage:" not in line
    ]
    assert exit_.value.code == 2 and len(error) == 1
    return error[0]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--prompt_prune_rate", "1"], "prompt_prune_rate must lie in [0, 1), got 1.0"),
        (["--completion_prune_rate", "-0.1"], "completion_prune_rate"),
        (["--prompt_prune_rate", "nan"], "prompt_prune_rate"),
        (["--group_size", "1"], "group_size must be at least 2"),
        (["--method", "ppo"], "invalid choice: 'ppo'"),
        (["--slot_tokens", "30"], "slot_tokens 30 is less than the longest sequence, 43 tokens"),
        (["--micro_batch_tokens", "30"], "micro_batch_tokens 30"),
        (["--nonsense", "1"], "unrecognized arguments: --nonsense"),
        (["--model", "x"], "--model needs --dataset"),
        (["--system_prompt", "x"], "--system_prompt needs --model"),
        (["--seed", "-1"], "--seed"),
        (["--learning_rate", "inf"], "--learning_rate"),
        (["--slot_tokens", "64", "--micro_batch_tokens", "50"], "micro_batch_tokens must hold a slot"),
        (["--reward", "test_dppo:HOSTILE"], "is not callable"),
        (["--reward", "test_dppo:not_a_number"], "reward function not_a_number returned a value that is not finite"),
        (["--reward", "test_dppo:no_opinion"], "can grade none of the first 100 answers"),
        (["--chat_template_kwargs", "[1]"], "JSON object"),
        (["--chat_template_kwargs", "{"], "JSON object"),
        (["--reward", "no_such_module:f"], "No module named 'no_such_module'"),
        (["--reward", "math:nothing"], "nothing"),
        (["--reward", "typo"], "--reward typo: neither exact, gsm8k, boxed nor"),
        (["--reward", "test_dppo:two_values"], "reward function two_values returned 7 values for 200 completions"),
        (["--reward", "math:sqrt"], "reward function sqrt failed"),
        (["--output_dir", SCRIPT / "x"], "cannot be written"),
        (["--temperature", "0"], "temperature"),
        (["--compare", "dppo,cppo"], "--compare takes methods by commas, grpo among them, of grpo, grpo-skip"),
        (["--compare", "grpo,ppo"], "--compare takes methods by commas"),
        (["--compare", "grpo", "--steps", "2"], "--compare needs 3 evaluations"),
        (["--objective", "ppo"], "invalid choice: 'ppo'"),
    ],
)
def test_bad_input_is_told_in_one_line_before_any_model_is_loaded(args, message, monkeypatch, capsys):
    monkeypatch.setattr(dppo, "warm_started", None)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    assert message in run_main(monkeypatch, capsys, *args)


def two_values(prompts, completions, **columns):
    return [0.0] * 7


def not_a_number(prompts, completions, **columns):
    return [math.inf] * len(prompts)


def no_opinion(prompts, completions, **columns):
    return [None] * len(prompts)


@pytest.mark.parametrize(
    "rows, args, message",
    [
        (None, [], "cannot be loaded"),
        ([], [], "cannot be loaded, or is empty"),
        ([{"prompt": "1", "answer": "B"}], [], "--reward gsm8k can grade none of the first 1 answers"),
        ([{"prompt": "1", "answer": "1"}], ["--eval_dataset", "a:b:c:d"], "--eval_dataset a:b:c:d is not path"),
        ([{"text": "1", "label": "2"}], [], "no column prompt or question or problem in the dataset, but text, label"),
        ([{"prompt": "1", "label": "2"}], [], "no column answer or solution"),
        ([{"prompt": "1", "answer": "1"}], ["--prompt_column", "q"], "no column q"),
        ([{"prompt": "1" * 600, "answer": "1"}], [], "all prompts are empty or longer than --max_prompt_tokens 512"),
        (
            [{"prompt": "1", "answer": "1"}],
            ["--dataset_split", "test"],
            "has train, but not the split: KeyError 'test'",
        ),
        (
            [{"prompt": [{"role": "user", "content": "1"}], "answer": "1"}],
            [],
            "row 0: prompt is neither text nor, with a chat template, messages",
        ),
    ],
)
def test_bad_datasets_are_told_in_one_line(rows, args, message, model_folder, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    path = tmp_path / "data.jsonl" if rows is None else write_rows(tmp_path / "data.jsonl", rows)
    assert message in run_main(monkeypatch, capsys, "--model", model_folder, "--dataset", path, *args)


def test_columns_are_found_by_name_and_answers_go_by_both_names(model_folder, tmp_path):
    rows = [{"question": "12", "solution": "3", "level": 5}, {"question": "1" * 40, "solution": "4", "level": 6}]
    config = Config(
        model=str(model_folder),
        dataset=write_rows(tmp_path / "a.jsonl", rows * 5),
        max_prompt_tokens=20,
        system_prompt="7",
    )
    train, evals, tokenizer = dppo.load_data(config)
    assert len(train) + len(evals["held out"]) == 5 and len(evals["held out"]) == 1
    assert train[0] == {
        "question": "12",
        "prompt": "7\n\n12",
        "prompt_ids": tokenizer("7\n\n12")["input_ids"],
        "solution": "3",
        "answer": "3",
        "level": 5,
    }
    other = replace(config, prompt_column="solution", answer_column="question", system_prompt="")
    assert {e["prompt"] + e["answer"][:2] for e in dppo.load_data(other)[0]} == {"312", "411"}


def test_chat_prompts_verl_s_layout_and_parquet(model_folder, tmp_path):
    messages = [{"role": "user", "content": "12"}]
    rows = datasets.Dataset.from_list(
        [{"prompt": messages, "reward_model": {"ground_truth": "21", "style": "rule"}}] * 6
    )
    rows.to_parquet(str(tmp_path / "verl.parquet"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chat")
    config = Config(
        model=str(tmp_path / "chat"),
        dataset=str(tmp_path / "verl.parquet"),
        system_prompt="9",
        eval_dataset=f"{tmp_path / 'verl.parquet'}:train",
        chat_template_kwargs='{"enable_thinking": false}',
    )
    train, evals, tokenizer = dppo.load_data(config)
    assert len(train) == 6 and [len(e) for e in evals.values()] == [6]
    assert (
        train[0]["prompt"] == [{"role": "system", "content": "9"}, *messages]
        and train[0]["answer"] == train[0]["solution"] == "21"
    )
    assert tokenizer.decode(train[0]["prompt_ids"]) == "9120="
    text = write_rows(tmp_path / "text.jsonl", [{"problem": "34", "answer": "43"}] * 6)
    train, _, _ = dppo.load_data(replace(config, dataset=text, eval_dataset="", system_prompt=""))
    assert train[0]["prompt"] == [{"role": "user", "content": "34"}]


def test_rewards_get_trl_s_arguments_and_none_is_not_gradable():
    task, calls = tiny_task(), []

    def reward(prompts, completions, answer, solution, **columns):
        calls.append((prompts, completions, answer, solution, columns))
        return [None, 1, 0.5, True]

    task.reward = reward
    examples = [
        {"prompt": "12=", "prompt_ids": [1], "answer": "12", "solution": "12", "level": 1},
        {"prompt": [{"role": "user", "content": "3"}], "prompt_ids": [2], "answer": "3", "solution": "3", "level": 2},
    ]
    rewards = dppo.score_completions(task, examples, [[[3, 4, 1], [5]], [[6, 1], [7, 7]]])
    assert torch.equal(rewards.nan_to_num(-1), torch.tensor([[-1.0, 1.0], [0.5, 1.0]], dtype=torch.float64))
    assistant = [[{"role": "assistant", "content": "3"}], [{"role": "assistant", "content": "44"}]]
    assert calls[0] == (
        ["12=", "12=", *[[{"role": "user", "content": "3"}]] * 2],
        ["01", "2", *assistant],
        ["12", "12", "3", "3"],
        ["12", "12", "3", "3"],
        {"level": [1, 1, 2, 2]},
    )


# ---- Runs -------------------------------------------------------------------------------------------------------------

METRICS = {
    "step",
    "epoch",
    "reward",
    "prompts_seen",
    "prompts_rolled",
    "completions_trained",
    "tokens_trained",
    "slot_density",
    "weight_max",
    "effective_sample_size",
    "grad_norm",
    "entropy",
    "kl",
    "clip_fraction",
    "completion_length",
    "truncated_fraction",
    "zero_variance_fraction",
    "rollout_seconds",
    "train_seconds",
}


def without_times(path: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if not k.endswith("seconds")} for record in read_lines(path)]


@pytest.mark.parametrize(
    "method, objective, beta, inner_epochs",
    [
        ("dppo", "grpo", 0.0, 1),
        ("grpo", "dr_grpo", 0.0, 1),
        ("grpo-skip", "grpo", 0.0, 1),
        ("dppo", "dr_grpo", 0.05, 2),
    ],
)
def test_the_same_seed_gives_the_same_metrics(method, objective, beta, inner_epochs, tmp_path):
    def run(name, seed):
        task = tiny_task()
        task.reward = lambda prompts, completions, **_: [
            None if "88" in p else float(len(c) > 4) for p, c in zip(prompts, completions)
        ]
        dppo.train(
            Config(
                method=method,
                objective=objective,
                beta=beta,
                inner_epochs=inner_epochs,
                steps=8,
                prompts_per_step=8,
                seed=seed,
                learning_rate=1e-3,
                output_dir=str(tmp_path / name),
            ),
            task,
        )
        return without_times(tmp_path / name / "metrics.jsonl")

    first, again, other = run("first", 0), run("again", 0), run("other", 1)
    assert first == again != other
    assert set(first[0]) >= METRICS - {"rollout_seconds", "train_seconds"}
    assert (first[-1]["kl"] > 0) == (beta > 0) and any(r["clip_fraction"] for r in first) == (inner_epochs > 1)
    assert read_lines(tmp_path / "first" / "samples.jsonl")


@pytest.mark.parametrize("method", dppo.METHODS)
def test_a_batch_of_equal_rewards_trains_nothing_and_is_recorded(method, tmp_path):
    task = tiny_task()
    task.train = task.train[:16]
    task.reward = lambda prompts, completions, **_: [1.0] * len(prompts)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    dppo.train(Config(method=method, steps=40, prompts_per_step=1, output_dir=str(tmp_path / "run")), task)
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    assert all(
        r["completions_trained"] == 0 and r["reward"] == 1 and r["zero_variance_fraction"] == 1
        for r in read_lines(tmp_path / "run" / "metrics.jsonl")
    )


def command_line(*args, **environment) -> str:
    """Standard output of python dppo.py with these arguments."""
    return run_python(SCRIPT, *args, **environment)


def test_torchrun_trains_with_several_processes_and_writes_one_run(model_folder, tmp_path):
    data = write_rows(tmp_path / "data.jsonl", [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 160)])
    common = ["--model", model_folder, "--dataset", data, "--max_completion_tokens", "6", "--reward", "test_dppo:short"]
    printed = run_on(2, SCRIPT, *common, "--steps", "3", "--prompts_per_step", "5", "--output_dir", tmp_path / "run")
    assert printed.count("results are in") == 1
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] and all(line["completions_trained"] > 0 for line in lines)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_the_plain_command_raises_accuracy_and_writes_every_file(tmp_path):
    printed = command_line("--steps", 50, "--output_dir", tmp_path / "run", XDG_CACHE_HOME=str(tmp_path / "cache"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = (summary[when]["middle"]["avg@4"] for when in ("before", "after"))
    assert after > before + 0.15 and summary["accuracy_after"] > summary["accuracy_before"] + 0.05
    assert summary["after"]["middle"]["avg@4"] > summary["before"]["middle"]["avg@4"] + 0.15
    assert summary["after"]["middle"]["pass@4"] >= summary["after"]["middle"]["avg@4"]
    assert summary["config"]["method"] == "dppo" and summary["wall_seconds"] > 0 and summary["device"]
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 51)) and all(set(r) >= METRICS for r in records)
    later = records[25:]
    assert sum(r["prompts_rolled"] for r in later) < 0.9 * sum(r["prompts_seen"] for r in later)
    assert sum(r["completions_trained"] for r in later) < 0.7 * 8 * sum(r["prompts_rolled"] for r in later)
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    assert all(
        {"prompt", "completion", "reward", "advantage", "keep_probability", "weight"} <= set(sample)
        for sample in samples
    )
    for sample in samples:
        assert sample["weight"] == 0 or abs(sample["weight"] * sample["keep_probability"] - 1) < 1e-9
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model").decode(
            [3, 4, 1], skip_special_tokens=True
        )
        == "01"
    )
    assert [line.split()[0] for line in printed.splitlines()] == ["Qwen3ForCausalLM,", "accuracy", "next:"]
    assert [p.suffix for p in (tmp_path / "cache" / "dppo").iterdir()] == [
        ""
    ]  # the warm start, whole, and nothing else


def test_a_model_and_dataset_from_disk_train_and_evaluate_with_the_same_code(model_folder, tmp_path):
    data = write_rows(
        tmp_path / "data.jsonl",
        [{"question": f"{a}{b}", "answer": f"#### {b}"} for a in range(2, 10) for b in range(10)],
    )
    common = [
        "--model",
        model_folder,
        "--dataset",
        data,
        "--eval_dataset",
        f"{data}:train,{data}",
        "--eval_prompts",
        5,
        "--max_completion_tokens",
        6,
        "--prompts_per_step",
        16,
    ]
    command_line(*common, "--steps", 6, "--output_dir", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {k: v["prompts"] for k, v in summary["after"].items() if k != "accuracy"} == {f"{data}:train": 5, data: 5}
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 6
    own = transformers.GenerationConfig.from_pretrained(tmp_path / "run" / "model")
    assert own.top_k != 0 and own.max_new_tokens is None  # the model's own, not the rollouts'
    command_line(*common, "--steps", 0, "--output_dir", tmp_path / "evaluation")
    assert [path.name for path in (tmp_path / "evaluation").iterdir()] == ["summary.json"]


def test_a_reward_that_fails_in_the_middle_loses_neither_the_model_nor_the_metrics(tmp_path):
    task, calls = tiny_task(), []
    task.reward = lambda prompts, completions, **_: (
        [float(len(c) > 3) for c in completions] if calls.append(1) or len(calls) < 5 else 1 / 0
    )
    with pytest.raises(InputError, match="reward function <lambda> failed: ZeroDivisionError"):
        dppo.train(Config(steps=8, prompts_per_step=4, output_dir=str(tmp_path / "run")), task)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_an_output_dir_that_holds_a_run_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "holds another run" in run_main(monkeypatch, capsys, "--output_dir", tmp_path)
    assert "holds another run" in run_main(monkeypatch, capsys, "--output_dir", tmp_path.parent)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


# ---- The estimator, measured, and the comparison -----------------------------------------------------------------------


def graded_task() -> Task:
    """A tiny task whose untrained model gets about half of the rewards."""
    task = tiny_task()
    task.reward = lambda prompts, completions, **_: [
        float(len(c) % 2 == len(p) % 3 % 2) for p, c in zip(prompts, completions)
    ]
    return task


def test_the_measured_products_are_those_of_the_completions_gradients():
    task, config = graded_task(), Config(temperature=1.0, group_size=3)
    torch.manual_seed(0)
    _, rewards, products = dppo.frozen_rollouts(task, config, 4)
    torch.manual_seed(0)
    completions = [dppo.rollout(task, task.train[:4], 3, config) for _ in range(2)][1]
    sequences = [(e["prompt_ids"], ids) for e, group in zip(task.train, completions) for ids in group]
    advantages = group_advantages(rewards).flatten()
    rows = []
    for i, (prompt, completion) in enumerate(sequences):
        logprobs, _ = dppo.completion_logprobs(task.model, sequences, [[i]], 1.0)
        loss = -advantages[i].float() * logprobs.mean()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(task.model.parameters()))]))
    gradients = torch.stack(rows).double()
    assert products.abs().max() > 0 and torch.allclose(products, gradients @ gradients.T, atol=1e-4 * products.max())


def test_measured_bias_is_chance_for_the_unbiased_and_more_for_the_others():
    task = graded_task()
    measured = dppo.frozen_rollouts(task, Config(), 24)
    measured[0]["streak"][::2] = 2.0  # or greso would have nothing to prune
    rates = dict.fromkeys(dppo.METHODS, 0.7) | {"cppo": 0.9}
    by_method = {
        method: dppo.measure_estimator(*measured, Config(method=method, completion_prune_rate=rate), draws=500)
        for method, rate in rates.items()
    }
    assert max(by_method["grpo"]["bias"], by_method["grpo-skip"]["bias"]) < 1e-6
    assert abs(by_method["grpo"]["second_moment"] - 1) < 1e-12 and by_method["grpo"]["trained_fraction"] == 1
    for method in ("dppo", "dppo-optimal"):
        assert 0 < by_method[method]["bias"] < 3 * by_method[method]["bias_error"]
        assert by_method[method]["second_moment"] > 1 > by_method[method]["trained_fraction"]
    for method in ("cppo", "greso"):
        assert by_method[method]["bias"] > 0.1 + 5 * by_method[method]["bias_error"]
        assert by_method[method]["direction_bias"] > 0.01


def test_the_measured_second_moment_is_that_of_its_formula():
    rewards = binary_rewards(64, 0)
    advantages = group_advantages(rewards)
    config = Config(completion_prune_rate=0.9)
    pi = completion_probabilities(rewards, advantages, torch.ones(64), config).flatten()
    products = torch.diag(advantages.flatten() ** 2)
    measured = dppo.measure_estimator(dppo.new_history(64), rewards, products, config, draws=500)
    kept = pi > 0
    expected = (advantages.flatten()[kept] ** 2 / pi[kept]).sum() / (advantages**2).sum()
    assert abs(measured["second_moment"] / expected - 1) < 0.02
    assert abs(measured["trained_fraction"] - pi.mean()) < 1e-9


def test_times_to_accuracy_and_to_prompts_by_hand():
    records = [
        dict(seconds=1.0 * step, prompts_seen=10, **({"accuracy": accuracy} if accuracy is not None else {}))
        for step, accuracy in enumerate([None, 0.1, None, 0.6, 0.2, 0.4, 0.6, 0.5], start=1)
    ]
    assert dppo.time_to_accuracy(records, 0.3) == 5.0  # (0.1 + 0.6 + 0.2)/3, at the fifth step
    assert dppo.time_to_accuracy(records, 0.5) == 8.0
    assert dppo.time_to_accuracy(records, 0.51) is None and dppo.time_to_accuracy(records[:4], 0.1) is None
    assert dppo.time_to_prompts(records, 80) == 8.0 and dppo.time_to_prompts(records, 25) == 2.5


def test_compare_runs_two_methods_and_writes_its_table(model_folder, tmp_path):
    rows = [{"question": f"{a}{b}", "answer": f"#### {b}"} for a in range(2, 10) for b in range(10)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    common = "--prompts_per_step 8 --max_completion_tokens 6 --steps 8 --eval_prompts 8 --eval_every 1".split()
    options = ["--model", model_folder, "--dataset", data, *common, "--reward", "test_dppo:short"]
    printed = command_line(
        "--compare", "dppo-optimal,grpo", "--compare_seeds", 2, *options, "--output_dir", tmp_path / "out",
        PYTHONPATH=str(SCRIPT.parent),
    )  # fmt: skip
    saved = json.loads((tmp_path / "out" / "comparison.json").read_text())
    optimal, grpo = saved["rows"]
    assert [optimal["method"], grpo["method"]] == ["dppo-optimal", "grpo"] and saved["device"]
    assert grpo["speedup_prompts"] == [1.0, 1.0] and abs(grpo["second_moment"] - 1) < 1e-12 and grpo["bias"] < 1e-6
    assert set(grpo["speedup_accuracy"]) <= {1.0}
    for number, seed in enumerate((0, 1)):
        records = read_lines(tmp_path / "out" / f"dppo-optimal-{seed}" / "metrics.jsonl")
        for name in ("prompts_rolled", "completions_trained", "tokens_trained", "prompts_seen"):
            assert optimal[name][number] == sum(record[name] for record in records)
        assert optimal["seconds"][number] == records[-1]["seconds"] and all("accuracy" in r for r in records)
    assert optimal["completions_trained"][0] < grpo["completions_trained"][0] == 8 * 64
    table = (tmp_path / "out" / "comparison.md").read_text()
    assert table in printed and [line.split("|")[1].strip() for line in table.splitlines()][2:] == [
        "dppo-optimal",
        "grpo",
    ]
    config = json.loads((tmp_path / "out" / "dppo-optimal-1" / "summary.json").read_text())["config"]
    assert config["prompt_prune_rate"] == 0.9 and config["seed"] == 1
    assert not list((tmp_path / "out").glob("*/model"))


# ---- Interruptions and resuming ----------------------------------------------------------------------------------------

RUN = dict(
    steps=12,
    prompts_per_step=4,
    group_size=4,
    max_completion_tokens=6,
    eval_every=4,
    save_every=1,
    method="dppo-optimal",
    objective="dapo",
    inner_epochs=2,
    learning_rate=1e-3,
)


def resumable_task() -> Task:
    """A tiny task whose rewards differ within a group: every step learns something."""
    task = tiny_task()
    task.reward = lambda prompts, completions, **_: [
        len(c) % (2 + len(p) % 3) / 3 for p, c in zip(prompts, completions)
    ]
    return task


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "model" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """The same weights bit for bit, and the same metrics and samples, times aside; no step twice."""
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert without_times(one / "metrics.jsonl") == without_times(other / "metrics.jsonl")
    assert read_lines(one / "samples.jsonl") == read_lines(other / "samples.jsonl")
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    assert summaries[0]["before"] == summaries[1]["before"] and summaries[0]["after"] == summaries[1]["after"]


KILLS = """
import os, random, signal, sys, time
import torch, test_dppo, dppo
from pathlib import Path

wanted, folder = int(sys.argv[1]), Path(sys.argv[2])
real_save = torch.save

def slow_save(state, path):
    real_save(state, path)
    with open(path, "r+b") as file:  # a while with half a file under the name that is being written
        whole = path.read_bytes()
        file.truncate(len(whole) // 2)
        file.flush()
        time.sleep(0.03)
    path.write_bytes(whole)

def run(out, resume):
    torch.save = slow_save
    sys.stdout = sys.stderr = open(os.devnull, "w")
    dppo.train(dppo.Config(**test_dppo.RUN, output_dir=str(out), resume=resume), test_dppo.resumable_task())
    os._exit(0)

def start(out, resume):
    child = os.fork()
    if child == 0:
        run(out, resume)
    return child

clock = time.time()
os.waitpid(start(folder / "whole", False), 0)
duration, rng, kills, saving, rounds = time.time() - clock, random.Random(0), 0, 0, 0
while kills < wanted:
    out = folder / f"killed-{rounds}"
    rounds += 1
    while True:
        child = start(out, True)
        deadline = time.time() + rng.uniform(0, duration)
        while time.time() < deadline and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        try:
            os.kill(child, signal.SIGKILL)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL
        except (ProcessLookupError, ChildProcessError):
            ended = True
        if ended:
            break
        kills += 1
        saving += (out / "checkpoints" / "partial").exists()
    test_dppo.assert_same_run(folder / "whole", out)
print(f"{kills} kills, {saving} of them while a checkpoint was written, in {rounds} runs")
"""


def test_a_run_killed_at_random_moments_and_resumed_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    printed = run_python("-c", KILLS, 20, tmp_path)
    kills, saving = (int(number) for number in re.findall(r"\d+", printed)[:2])
    assert kills >= 20 and saving >= 2, printed
    print(printed)


@pytest.mark.parametrize("method, objective, beta", [("greso", "grpo", 0.0), ("dppo", "gspo", 0.1)])
def test_a_run_in_two_parts_is_the_run_in_one(method, objective, beta, tmp_path):
    settings = RUN | dict(method=method, objective=objective, beta=beta)
    dppo.train(Config(**settings, output_dir=str(tmp_path / "one")), resumable_task())
    dppo.train(Config(**settings | dict(steps=7), output_dir=str(tmp_path / "two")), resumable_task())
    dppo.train(Config(**settings, output_dir=str(tmp_path / "two"), resume=True), resumable_task())
    assert_same_run(tmp_path / "one", tmp_path / "two")
    kept = sorted(path.name for path in (tmp_path / "two" / "checkpoints").iterdir())
    assert kept == ["step-00000011.pt", "step-00000012.pt"]


def test_bfloat16_models_resume_with_their_float32_masters(tmp_path):
    def task():
        result = resumable_task()
        result.model = tiny_model(torch.bfloat16)
        return result

    settings = RUN | dict(learning_rate=1e-5)  # the weights in bfloat16 hardly show it
    dppo.train(Config(**settings, output_dir=str(tmp_path / "one")), task())
    dppo.train(Config(**settings | dict(steps=7), output_dir=str(tmp_path / "two")), task())
    dppo.train(Config(**settings, output_dir=str(tmp_path / "two"), resume=True), task())
    assert_same_run(tmp_path / "one", tmp_path / "two")
    one, two = (torch.load(tmp_path / run / "checkpoints" / "step-00000012.pt") for run in ("one", "two"))
    assert all(p.dtype == torch.float32 and torch.equal(p, q) for p, q in zip(one["weights"], two["weights"]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_prints_the_command_that_goes_on(number, model_folder, tmp_path):
    data = write_rows(tmp_path / "data.jsonl", [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 160)])
    arguments = [
        "--model",
        model_folder,
        "--dataset",
        data,
        "--max_completion_tokens",
        6,
        "--reward",
        "test_dppo:short",
    ]
    command = [sys.executable, SCRIPT, *map(str, arguments), "--prompts_per_step", "4", "--steps", "100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    with subprocess.Popen(command, **pipes) as process:
        deadline = time.monotonic() + 120
        while not any(path.stat().st_size for path in tmp_path.glob("runs/*/metrics.jsonl")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error
    [checkpoint] = tmp_path.glob("runs/*/checkpoints/step-*.pt")
    steps = int(checkpoint.stem.split("-")[1])
    assert f"saved in {checkpoint.relative_to(tmp_path)}" in error
    words = shlex.split(error.strip().splitlines()[-1].replace("100000", str(steps + 2)))
    assert words[0] == "python"
    result = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    lines = read_lines(checkpoint.parent.parent / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 3))


def test_resuming_another_run_is_refused_and_the_differences_are_named(tmp_path):
    out = str(tmp_path / "run")
    dppo.train(Config(**RUN | dict(steps=2), output_dir=out), resumable_task())
    changed = RUN | dict(method="dppo", seed=3, group_size=8, eval_every=1)
    with pytest.raises(InputError) as refusal:
        dppo.train(Config(**changed, output_dir=out, resume=True), resumable_task())
    for difference in ("method is 'dppo', was 'dppo-optimal'", "seed is 3, was 0", "group_size is 8, was 4"):
        assert difference in str(refusal.value)
    assert "eval_every" not in str(refusal.value)
    other = resumable_task()
    other.train = other.train[1:]
    with pytest.raises(InputError, match="the training prompts are not those of the checkpoint"):
        dppo.train(Config(**RUN, output_dir=out, resume=True), other)
    with pytest.raises(InputError, match="--resume needs the --output_dir"):
        Config(resume=True)


def test_overwriting_and_resuming_have_to_be_asked_for(tmp_path):
    out = str(tmp_path / "run")
    for _ in range(2):  # resuming where there is nothing yet starts
        dppo.train(Config(**RUN | dict(steps=2), output_dir=out, resume=True), resumable_task())
    with pytest.raises(InputError, match="holds another run; --resume goes on with it, --overwrite replaces it"):
        dppo.train(Config(**RUN, output_dir=out), resumable_task())
    dppo.train(Config(**RUN | dict(steps=1, save_every=0), output_dir=out, overwrite=True), resumable_task())
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_full_disk_is_reported_and_training_goes_on_with_the_last_checkpoint_whole(tmp_path, monkeypatch, capsys):
    real = torch.save

    def save(state, path):
        if state["step"] > 3:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(state, path)

    monkeypatch.setattr(torch, "save", save)
    dppo.train(Config(**RUN | dict(steps=5), output_dir=str(tmp_path / "run")), resumable_task())
    error = capsys.readouterr().err
    assert "checkpoint of step 4 not saved, training goes on: [Errno 28] No space left" in error
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 5
    monkeypatch.undo()
    dppo.train(Config(**RUN | dict(steps=6), output_dir=str(tmp_path / "run"), resume=True), resumable_task())
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_goes_is_reported_and_the_model_still_saved(tmp_path, monkeypatch, capsys):
    real, out = dppo.gather, tmp_path / "run"
    calls = []

    def gather(*args):
        calls.append(1)
        if len(calls) == 3:
            shutil.rmtree(out)
        return real(*args)

    monkeypatch.setattr(dppo, "gather", gather)
    dppo.train(Config(**RUN | dict(steps=4, save_every=0), output_dir=str(out)), resumable_task())
    assert "metrics.jsonl of step 3: No such file or directory; training goes on" in capsys.readouterr().err
    assert (out / "model" / "model.safetensors").exists() and (out / "summary.json").exists()


# ---- Numbers that go wrong ---------------------------------------------------------------------------------------------


def broken_loss(monkeypatch, steps) -> None:
    """The loss is not finite in these updates, counted from 1."""
    real, count = dppo.policy_loss, itertools.count(1)

    def policy_loss(*args):
        loss, metrics = real(*args)
        return loss * (math.nan if next(count) in steps else 1.0), metrics

    monkeypatch.setattr(dppo, "policy_loss", policy_loss)


def test_an_update_that_is_not_finite_is_left_out_and_counted_with_its_prompts(tmp_path, monkeypatch):
    broken_loss(monkeypatch, {2, 3})
    task, seen = resumable_task(), []
    real = dppo.train_step

    def train_step(model, *args):
        before = [p.clone() for p in model.parameters()]
        update = real(model, *args)
        seen.append(all(torch.equal(p, q) for p, q in zip(before, model.parameters())))
        return update

    monkeypatch.setattr(dppo, "train_step", train_step)
    dppo.train(Config(**RUN | dict(steps=5, inner_epochs=1, save_every=0), output_dir=str(tmp_path / "run")), task)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert seen == [False, True, True, False, False] and [line["skipped"] for line in lines] == [0, 1, 1, 0, 0]
    assert all(lines[i]["skipped_prompts"] and lines[i]["grad_norm"] is None for i in (1, 2))
    assert all(torch.isfinite(p).all() for p in task.model.parameters())


def test_ten_updates_in_a_row_that_are_not_finite_stop_the_run(tmp_path, monkeypatch):
    broken_loss(monkeypatch, set(range(3, 100)))
    with pytest.raises(InputError, match="stopped at step 12: the last 10 updates were not finite"):
        dppo.train(Config(**RUN | dict(steps=50, inner_epochs=1), output_dir=str(tmp_path / "run")), resumable_task())
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_the_prompts_named_are_those_whose_log_probabilities_are_not_finite(monkeypatch):
    values = {0: torch.tensor([-1.0]), 3: torch.tensor([-1.0, math.nan]), 5: torch.tensor([-math.inf])}
    monkeypatch.setattr(dppo, "frozen_logprobs", lambda model, sequences, trained, config: values)
    owners = torch.tensor([7, 7, 7, 8, 8, 9])
    assert dppo.not_finite(None, None, [0, 3, 5], None, owners) == [8, 9]
    values[3], values[5] = values[0], values[0]
    assert dppo.not_finite(None, None, [0, 3, 5], None, owners) == [7, 8, 9]  # the gradient then


def test_out_of_memory_halves_the_micro_batch_and_leaves_the_gradient_as_it_is(monkeypatch, capsys):
    config, model, sequences, advantages, old, _ = problem(micro_batch_tokens=60)
    weights = torch.ones(N * G, dtype=torch.float64)
    expected = gradient_of_train_step(config, model, sequences, advantages, weights, old, None)
    config, model, sequences, advantages, old, _ = problem(micro_batch_tokens=120)
    real, sizes = dppo.completion_logprobs, []

    def completion_logprobs(model, sequences, slots, temperature):
        sizes.append(sum(len(p + c) for p, c in (sequences[i] for slot in slots for i in slot)))
        if len(sizes) == 2:  # in the middle: part of the gradient is there already
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, sequences, slots, temperature)

    monkeypatch.setattr(dppo, "completion_logprobs", completion_logprobs)
    measured = gradient_of_train_step(config, model, sequences, advantages, weights, old, None)
    assert (measured - expected).norm() < 1e-6 * expected.norm()
    assert config.micro_batch_tokens == 60 and max(sizes[:2]) > 60 >= max(sizes[2:])
    assert "out of memory: --micro_batch_tokens is 60 from here on" in capsys.readouterr().err


# ---- Hostile and strange input -----------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [
        *(
            "####",
            "\\boxed{",
            "}",
            "{",
            "\\",
            "\\\\",
            "$",
            ",",
            ".",
            "-",
            "\N{MINUS SIGN}",
            "e",
            "E9",
            "1e999999",
            "NaN",
        ),
        *(
            "Infinity",
            "-inf",
            "\\frac",
            "\\text{",
            "^\\circ",
            "cm",
            " ",
            "\n",
            "\0",
            "\x1b[31m",
            "٣",
            "१२",
            "\u202e",
            "½",
        ),
        *("9" * 500, "1,234", ".5", "0x10", "{" * 50, "\\left(", "\\!", "/", "^{2}"),
    ]
)
HOSTILE_TEXT = st.one_of(st.text(max_size=200), st.lists(FRAGMENTS, max_size=30).map("".join))


@pytest.mark.parametrize("reward", dppo.REWARDS.values())
@hypothesis.settings(max_examples=400, deadline=500, derandomize=True)
@hypothesis.given(completion=HOSTILE_TEXT, answer=HOSTILE_TEXT)
def test_any_completion_gets_0_or_1_and_any_answer_a_grade_or_none(reward, completion, answer):
    [value] = reward(prompts=["?"], completions=[completion], answer=[answer])
    assert value in (0.0, 1.0, None)
    assert reward(prompts=["?"], completions=[completion], answer=[completion]) in ([1.0], [0.0], [None])


@pytest.mark.parametrize("reward", dppo.REWARDS.values())
@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "1,",
        "1e9",
        "{",
        "\\boxed{",
        "\\boxed{{{",
        "\\\\",
        "\\frac",
        "#### ",
        "- ",
        "$",
        ".",
        "\\text{a}",
        " cm",
        "\0",
        "٣",
    ],
)
def test_rewards_take_linear_time(reward, unit):
    """Ten times the text may take about ten times as long, and a million characters not more than two seconds."""
    seconds = []
    for length in (100_000, 1_000_000):
        text = (unit * length)[:length]
        clock = time.perf_counter()
        reward(prompts=["?"], completions=[text], answer=["18"])
        reward(prompts=["?"], completions=["18"], answer=[text])
        seconds.append(time.perf_counter() - clock)
    assert seconds[1] < 2 and seconds[1] < 40 * seconds[0] + 0.05


@hypothesis.settings(max_examples=300, deadline=500, derandomize=True)
@hypothesis.given(
    scores=st.lists(st.one_of(st.floats(0, 1e6), st.just(math.nan), st.just(0.0)), min_size=1, max_size=60),
    rate=st.floats(0, 0.99),
    seed=st.integers(0, 2**31),
)
def test_any_scores_give_probabilities_and_a_draw_whose_weights_are_their_inverse(scores, rate, seed):
    scores = torch.tensor(scores, dtype=torch.float64)
    for pi in (keep_probabilities(scores, rate), dppo.optimal_probabilities(scores, rate, dppo.FLOOR)):
        assert ((pi > 0) & (pi <= 1)).all()
        weights = draw(pi, torch.Generator().manual_seed(seed))
        kept = weights > 0
        assert torch.allclose(weights[kept], 1 / pi[kept]) and abs(kept.sum() - pi.sum()) < 1 + 1e-6


@hypothesis.settings(max_examples=300, deadline=500, derandomize=True)
@hypothesis.given(
    lengths=st.lists(st.integers(1, 50), max_size=80), room=st.integers(0, 100), window=st.integers(1, 90)
)
def test_any_lengths_are_packed_once_each_within_the_slots(lengths, room, window):
    capacity = max(lengths, default=1) + room
    slots = dppo.pack(lengths, capacity, window)
    assert sorted(i for slot in slots for i in slot) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in slot) <= capacity for slot in slots)


def strange_rows(name: str, tmp_path: Path) -> str:
    """A dataset file that is broken or odd in one way."""
    good = [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 120)]
    path = tmp_path / ("data.parquet" if name == "cut parquet" else "data.jsonl")
    if name == "cut parquet":
        datasets.Dataset.from_list(good).to_parquet(path)
        path.write_bytes(path.read_bytes()[:-200])
    elif name == "broken line":
        path.write_text('{"question": "1=", "answer": "1"}\n{"question": "2=", "ans\n')
    else:
        odd = {
            "null prompt": [{"question": None, "answer": "1"}],
            "number as prompt": [{"question": 12, "answer": "1"}],
            "mixed chat and text": [{"question": [{"role": "user", "content": "1="}], "answer": "1"}],
            "missing answer": [{"question": "1="}],
            "null answer": [{"question": "1=", "answer": None}],
            "number as answer": [{"question": "1=", "answer": 1}],
            "duplicates": good * 3,
            "enormous": [{"question": "1" * 2_000_000 + "=", "answer": "1" * 2_000_000}],
            "control characters": [{"question": "\0\x1b[2J\u202e1=", "answer": "\0"}],
        }[name]
        rows = odd if name == "number as prompt" else good + odd
        if name == "number as answer":
            rows = [{**row, "answer": int(row["answer"])} for row in rows]
        write_rows(path, rows if name != "single row" else good[:1])
    return str(path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("cut parquet", "cannot be loaded"),
        ("broken line", "cannot be loaded"),
        ("null prompt", "row 20: question is neither text nor"),
        ("number as prompt", "row 0: question is neither text nor"),
        ("mixed chat and text", "row 20: question is neither text nor"),
        ("missing answer", None),
        ("null answer", None),
        ("number as answer", None),
        ("duplicates", None),
        ("enormous", None),
        ("control characters", None),
    ],
)
def test_strange_datasets_end_in_one_line_or_in_training(name, message, model_folder, tmp_path, monkeypatch, capsys):
    data = strange_rows(name, tmp_path)
    arguments = ["--model", model_folder, "--dataset", data, "--max_completion_tokens", 6, "--reward", "exact"]
    if message:
        assert message in run_main(monkeypatch, capsys, *arguments)
    else:
        settings = dict(model=str(model_folder), dataset=data, max_completion_tokens=6, reward="exact")
        summary = dppo.train(Config(**settings, steps=2, prompts_per_step=4, output_dir=str(tmp_path / "run")))
        assert 0 <= summary["accuracy_after"] <= 1 and len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(pad_token=None), None),  # the end token pads
        (dict(eos_token=None), None),
        (dict(pad_token=None, eos_token=None), "its tokenizer has neither a pad nor an end token"),
        (dict(vocabulary=40), "its tokenizer has more tokens than the model's vocabulary"),
    ],
)
def test_strange_tokenizers_train_or_are_refused(change, message, tmp_path, monkeypatch, capsys):
    data = write_rows(tmp_path / "data.jsonl", [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 120)])
    tokenizer = dppo.sorting_data(Config())[2]
    tokenizer.add_tokens([f"<{i}>" for i in range(change.pop("vocabulary", 0))])
    for name, token in change.items():
        setattr(tokenizer, name, token)
    folder = tmp_path / "model"
    tiny_model(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = dict(model=str(folder), dataset=data, max_completion_tokens=6, reward="exact", steps=2)
    capsys.readouterr()
    if message:
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        assert message in run_main(monkeypatch, capsys, *arguments)
    else:
        dppo.train(Config(**settings, prompts_per_step=4, output_dir=str(tmp_path / "run")))
        assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2


def test_chat_and_plain_prompts_may_be_mixed_where_there_is_a_chat_template(model_folder, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chat")
    tiny_model(torch.float32).save_pretrained(tmp_path / "chat")
    rows = [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 110)]
    rows += [{"question": [{"role": "user", "content": f"{a}"}], "answer": f"{a}"} for a in range(110, 120)]
    settings = dict(model=str(tmp_path / "chat"), dataset=write_rows(tmp_path / "mixed.jsonl", rows), steps=2)
    task = dppo.load_task(Config(**settings, reward="exact", max_completion_tokens=6))
    assert {type(e["prompt"]) for e in task.train} == {list}
    dppo.train(Config(**settings, reward="exact", max_completion_tokens=6, output_dir=str(tmp_path / "run")), task)
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_single_row_trains_without_evaluation(model_folder, tmp_path):
    data = write_rows(tmp_path / "one.jsonl", [{"question": "12=", "answer": "12"}])
    settings = dict(model=str(model_folder), dataset=data, max_completion_tokens=6, reward="exact")
    summary = dppo.train(Config(**settings, steps=3, output_dir=str(tmp_path / "run")))
    assert summary["accuracy_after"] is None and len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_model_that_only_pads_is_trained_on_what_it_said(tmp_path, monkeypatch):
    task = resumable_task()
    monkeypatch.setattr(
        task.model,
        "generate",
        lambda ids, max_new_tokens, **_: torch.nn.functional.pad(ids, (0, max_new_tokens), value=0),
    )
    summary = dppo.train(Config(**RUN | dict(steps=2, save_every=0), output_dir=str(tmp_path / "run")), task)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert summary["accuracy_after"] is not None and [line["completions_trained"] for line in lines] == [0, 0]


def test_every_prompt_at_its_floor_still_ends_the_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(dppo, "predicted_advantages", lambda history, config: torch.zeros_like(history["score"]))
    config = Config(**RUN | dict(steps=6, save_every=0), output_dir=str(tmp_path / "run"))
    dppo.train(config, resumable_task())
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(1 <= line["prompts_rolled"] <= 4 for line in lines) and lines[-1]["epoch"] > 2


# ---- Nothing let in ----------------------------------------------------------------------------------------------------


def test_the_source_has_no_call_that_could_run_what_came_from_data():
    tree = ast.parse(SCRIPT.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "input"}
    assert not called & forbidden
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"pickle", "subprocess", "marshal", "shelve", "ctypes", "dill", "cloudpickle", "yaml"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert ast.unparse(node.value) in ("False", "config.trust_remote_code")
        assert not (isinstance(node, ast.keyword) and node.arg == "shell")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained"):
            source = ast.unparse(node)
            assert "trust_remote_code" in source, source
    assert Config().trust_remote_code is False


class Payload:
    def __reduce__(self):
        return os.mkdir, ("payload-ran",)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    dppo.train(Config(**RUN | dict(steps=1), output_dir=str(out)), resumable_task())
    [path] = out.glob("checkpoints/step-*.pt")
    torch.save({**torch.load(path), "history": Payload()}, path)
    with pytest.raises(InputError, match="checkpoint .*step-00000001.pt cannot be read: UnpicklingError"):
        dppo.train(Config(**RUN, output_dir=str(out), resume=True), resumable_task())
    assert not (tmp_path / "payload-ran").exists()


# ---- The benchmark -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def architecture(tmp_path_factory) -> str:
    """A configuration without weights, untied, as --benchmark takes it."""
    folder = tmp_path_factory.mktemp("architecture")
    tiny_model(vocab_size=2000, max_position_embeddings=2048, tie_word_embeddings=False).config.save_pretrained(folder)
    return str(folder)


def test_benchmark_measures_a_configuration_of_random_weights(architecture, tmp_path, capsys):
    config = Config(
        benchmark=True,
        model=architecture,
        prompts_per_step=4,
        max_completion_tokens=60,
        output_dir=str(tmp_path / "benchmark"),
    )
    results = dppo.benchmark(config, repeats=2)
    table = (tmp_path / "benchmark" / "benchmark.md").read_text()
    assert table in capsys.readouterr().out and {len(rounds) for rounds in results.values()} == {3}
    padded, packed, pruned = (results[name][1:] for name in ("GRPO, padded", "GRPO, packed", "DPPO, packed"))
    for step in padded + packed + pruned:
        parts = [step[name] for name in dppo.PHASES]
        assert min(parts) > 0 and sum(parts) == pytest.approx(step["step"]) and 0 < step["utilisation"] < 2
    assert max(step["density"] for step in padded) < min(step["density"] for step in packed)


def test_benchmark_works_on_the_embedded_task_and_does_not_learn(tmp_path, monkeypatch):
    task = tiny_task()
    task.reward = lambda prompts, completions, **_: [len(c) % 4 / 3 for c in completions]
    before = {name: p.clone() for name, p in task.model.named_parameters()}
    monkeypatch.setattr(dppo, "load_task", lambda config: task)
    results = dppo.benchmark(Config(benchmark=True, prompts_per_step=4, output_dir=str(tmp_path / "b")), repeats=1)
    assert set(results) == {"plain", "dynamic", "static", "GRPO, padded", "GRPO, packed", "DPPO, packed"}
    assert all(torch.equal(p, before[name]) for name, p in task.model.named_parameters())


def test_training_flops_are_six_for_each_weight_and_token_and_attention():
    model = tiny_model(tie_word_embeddings=False)
    head = embedding = 13 * 16
    body = sum(p.numel() for p in model.parameters()) - head - embedding
    flops = dppo.training_flops(model, [([2] * 5, [3] * 3)])
    assert flops == 6 * body * 8 + 6 * head * 3 + 6 * 2 * 16 * 8**2  # two layers, 2 heads of 8
    tied = dppo.training_flops(tiny_model(tie_word_embeddings=True), [([2] * 5, [3] * 3)])
    assert tied == flops


def test_random_weights_end_completions_at_the_mean_length_of_gsm8k(architecture):
    torch.manual_seed(0)
    config = Config(benchmark=True, model=architecture, max_completion_tokens=1000)
    task = dppo.random_task(config)
    lengths = [len(ids) for group in dppo.rollout(task, task.train[:4], 100, config) for ids in group]
    assert 100 < sum(lengths) / len(lengths) < 145


# ---- TRL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_readme_s_trl_example_has_the_gradient_of_all_completions_on_average(loss_type, monkeypatch, tmp_path):
    trl = pytest.importorskip("trl")
    example = {"__name__": "example"}
    exec((SCRIPT.parent / "README.md").read_text().split("```python\n")[1].split("```")[0], example)
    task = tiny_task()
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        steps_per_generation=3,
        num_generations=4,
        max_completion_length=6,
        loss_type=loss_type,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = example["PrunedGRPOTrainer"](
        model=task.model,
        processing_class=task.tokenizer,
        reward_funcs=lambda prompts, completions, **_: [len(c) % 4 / 3 for c in completions],
        train_dataset=datasets.Dataset.from_list([{"prompt": e["prompt"]} for e in task.train[:3]]),
        args=arguments,
    )
    trainer.current_gradient_accumulation_steps = batches = arguments.steps_per_generation
    trainer.model.train()
    rows = [{"prompt": e["prompt"]} for e in task.train[:3] for _ in range(4)]
    full = trl.GRPOTrainer._generate_and_score_completions(trainer, rows)
    monkeypatch.setattr(
        trl.GRPOTrainer,
        "_generate_and_score_completions",
        lambda *_: {key: value.clone() if torch.is_tensor(value) else value for key, value in full.items()},
    )

    def gradient(batch):
        size = len(batch["advantages"]) // batches
        assert size * batches == len(batch["advantages"]), "TRL would cut rows off"
        trainer.model.zero_grad()
        for start in range(0, size * batches, size):
            part = {
                key: value[start : start + size] if torch.is_tensor(value) and value.dim() else value
                for key, value in batch.items()
            }
            trainer.compute_loss(trainer.model, part).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double()

    drawn, expectation, sizes = [], 0, set()
    example["draw"] = lambda pi, _: drawn.append(pi) or torch.ones_like(pi)
    trainer._generate_and_score_completions(rows)
    assert (drawn[0] < 1).any()
    for weights, probability in every_draw(drawn[0], monkeypatch).items():
        example["draw"] = lambda *_: torch.tensor(weights, dtype=torch.float64)
        batch = trainer._generate_and_score_completions(rows)
        sizes.add(len(batch["advantages"]))
        expectation += probability * gradient(batch)
    assert max(sizes) < len(rows)
    assert (expectation - gradient(full)).norm() < 1e-5 * expectation.norm()


def short(prompts, completions, **columns):
    return [float(len(completion) < 4) for completion in completions]


# ---- The tests are tested: python test_dppo.py applies each of these careless changes and runs the tests on it ----------

MUTANTS = [  # name, what dppo.py has, what a careless fork would have
    ("weight dropped", "(weights / normalizer)[owner]", "(weights.sign() / normalizer)[owner]"),
    ("prompt's weight dropped", "return prompt_weights[:, None] * draw(", "return draw("),
    (
        "divided by the kept count",
        "return int((weights > 0).sum()) if config.method in BIASED else candidates",
        "return int((weights > 0).sum())",
    ),
    (
        "window counted by survivors",
        "denominator(w, len(window) * G, config)",
        "denominator(w, len(prompts) * G, config)",
    ),
    ("ceil in place of floor", "math.floor(rate * count + 1e-9)", "math.ceil(rate * count - 1e-9)"),
    (
        "ceil in place of floor, pi as before",
        "low, (count - pruned) / max(count, 1))",
        "low, (count - math.floor(rate * count)) / max(count, 1) - (rate * count % 1 > 1e-9) / max(count, 1) / 2)",
    ),
    (
        "the lowest pruned for certain",
        "order = torch.randperm(len(pi), generator=generator)",
        "order = torch.arange(len(pi))",
    ),
    ("weights of the wrong items", "= 1 / pi[order[crossed]]", "= 1 / pi[order[: int(crossed.sum())]]"),
    (
        "pi from the wrong set",
        "kept = keep_probabilities(scores, rate)",
        "kept = keep_probabilities(advantages.abs().flatten(), rate)[has_gradient.flatten()]",
    ),
    (
        "mask reused for every update",
        "for _ in range(config.inner_epochs)]",
        "for _ in range(1)] * config.inner_epochs",
    ),
    (
        "advantages centred after pruning",
        "update = train_step(model, optimizer, sequences, advantages.flatten(), w.flatten(),",
        "update = train_step(model, optimizer, sequences, (advantages - advantages[w > 0].mean()).flatten(), w.flatten(),",
    ),
    ("std without eps", "(rewards.std(dim=1, keepdim=True) + 1e-4)", "rewards.std(dim=1, keepdim=True)"),
    (
        "history of pruned prompts overwritten",
        "        update_history(history, prompts, rewards, advantages)\n        rollout",
        '        history["score"][window] = 0.0\n        update_history(history, prompts, rewards, advantages)\n        rollout',
    ),
    ("window drawn until enough survive", "rule(order[:size + 1]).sum() <=", "(rule(order[:size + 1]) > 0.9).sum() <="),
    ("position ids not restarted", "= torch.arange(width - start)", "= torch.arange(start, width)"),
    (
        "off by one in the trained positions",
        "torch.arange(start + len(prompt) - 1, end - 1)",
        "torch.arange(start + len(prompt) - 2, end - 2)",
    ),
    (
        "last token not trained",
        "torch.arange(start + len(prompt) - 1, end - 1)",
        "torch.arange(start + len(prompt) - 1, end - 2)",
    ),
    ("top_k left at its default", "top_k=0, top_p=1.0, ", "top_p=1.0, "),
    ("temperature not in the trained logits", ".float() / temperature)", ".float())"),
    ("clipped on one side", "clamp(1 - config.clip_low, 1 + config.clip_high)", "clamp(max=1 + config.clip_high)"),
    ("gspo's ratio a sum", "index_add(0, owner, log_ratio) / lengths)", "index_add(0, owner, log_ratio))"),
    ("no mean length for dapo", 'unit = mean_length if config.objective == "dapo" else 1', "unit = 1"),
    ("finished rows mixed up", "rows, ids, left = [rows[i] for i in live],", "rows, ids, left = rows[: len(live)],"),
    (
        "cache rows not selected",
        "        cache.batch_select_indices(live)\n",
        "        cache.batch_select_indices(live.flip(0))\n",
    ),
    ("gradients of other processes lost", "            dist.all_reduce(p.grad)\n", ""),
    (
        "gradient kept when memory ran out",
        "        optimizer.zero_grad()\n        model.zero_grad()",
        "        pass",
    ),
    ("updates that are not finite made", "    if finite:\n        optimizer.step()", "    optimizer.step()"),
    ("random numbers not resumed", "        generator.set_state(saved)\n", "        pass\n"),
    ("masters not resumed", "        master.data.copy_(saved)\n", "        master.data.copy_(p.data)\n"),
    (
        "checkpoint written in place",
        'torch.save(state, folder / "partial")',
        "torch.save(state, folder / f\"step-{state['step']:08d}.pt\")",
    ),
    ("metrics not cut back", '["step"] <= step', '["step"] <= step + 1'),
    ("checkpoints may run code", "weights_only=True", "weights_only=False"),
]


@pytest.mark.parametrize("name, has, would_have", MUTANTS, ids=[name for name, *_ in MUTANTS])
def test_every_careless_change_still_applies(name, has, would_have):
    assert SCRIPT.read_text().count(has) == 1 and has != would_have


def caught(mutant: tuple[str, str, str]) -> str | None:
    """The first test that fails on this change, None if none does."""
    name, has, would_have = mutant
    with tempfile.TemporaryDirectory() as folder:
        for file in ("test_dppo.py", "README.md"):
            shutil.copy(SCRIPT.parent / file, folder)
        (Path(folder) / "dppo.py").write_text(SCRIPT.read_text().replace(has, would_have))
        slow = "not paged and not plain_command and not still_applies and not linear_time"
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "--basetemp",
                "temporary",
                "-p",
                "no:cacheprovider",
                "-k",
                slow,
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    failed = re.search(r"^FAILED \S+::(\S+)", result.stdout, re.MULTILINE)
    return failed and failed[1]


if __name__ == "__main__":
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip((name for name, *_ in MUTANTS), pool.map(caught, MUTANTS)))
    for name, test in results.items():
        print(f"{name:40} {test or 'NOT CAUGHT'}")
    print(f"{sum(map(bool, results.values()))} of {len(MUTANTS)} careless changes are caught")
    sys.exit(not all(results.values()))
