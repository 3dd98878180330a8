"""A proof that dppo.py prunes without bias, and then its other guarantees: python -m pytest -q

THEOREM. Let everything of a step be given but its draws: the policy theta, the memory of the rule,
the order of the prompts, and the completions that each of the N candidates would get. Then the loss
L_hat that is trained has, on average over the draws of prompts and completions, the gradient of the
full loss L, the mean of l_i over all N G completions: E[grad L_hat] = grad L.

PROOF. Each step has its test, in this order; step 1 has three.

  1. Each weight w_i has expectation 1, unless l_i has no gradient.
  2. The gradient of train_step is linear in the weights: it is sum_i w_i g_i, where g_i is the
     gradient of l_i/(N G) for completion i alone.
  3. The loss l_i is the formula of its objective, token by token.
  4. Packing changes neither log-probabilities nor gradients.
  5. Training uses these weights, this N and the advantages of whole groups, and draws completions
     anew for every update.
  6. Hence E[grad L_hat] = sum_i E[w_i] g_i = sum_i g_i = grad L. A small Qwen3 shows it.

Then come the six ways to lose unbiasedness, numbered as in README. Not proven: that random numbers
are random, and two draws independent; anything about the update, as Adam and norm clipping are not
linear; and updates after the first on one rollout, for which prompts cannot be drawn anew.
"""

import copy
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
import torch
import transformers
from torch.nn.utils import parameters_to_vector

import dppo
from dppo import Config, Task, draw, group_advantages, pick_prompts, weigh_completions

torch.set_num_threads(1)  # the tensors are so small that more threads would wait for each other

# ==== The proof ====
# Four prompts with three completions each. The last one was never visited. Of the scores the mean
# is 0.4, so the first and the third are low. Under every rule below, the window is the first three,
# because their keep probabilities sum to 2, the limit.
SCORES = torch.tensor([0.1, 0.9, 0.2, math.nan], dtype=torch.float64)
REWARDS = torch.tensor([[1, 0, 0], [1, 0.7, 0.2], [0, 0.9, 1], [1, 1, 1]], dtype=torch.float64)
ADVANTAGES = group_advantages(REWARDS)
LIMIT, N, G = 2, 3, 3


class OwnRule(dppo.Rule):
    """As somebody might write one: any probabilities that are known before the draw."""

    def prompt_probabilities(self):
        return torch.tensor([0.3, 0.8, 0.9, 0.5])

    def completion_probabilities(self, advantages, prompt_weights):
        return torch.where(advantages > 0, 1.0, 0.3)


def rule_with_history(method="dppo", r_q=0.6, r_o=0.6, beta=0.0):
    rates = {"prompt_prune_rate": r_q, "completion_prune_rate": r_o}
    config = Config(method=method, beta=beta, group_size=G, **rates)
    rule = config.rule(config, len(SCORES))
    rule.memory["score"] = SCORES.clone()
    return rule


def draw_along(order, u, pi):
    u = torch.tensor([u], dtype=torch.float64)
    with mock.patch("torch.randperm", return_value=order), mock.patch("torch.rand", return_value=u):
        return draw(pi, None)


def every_draw(pi):
    """All outcomes of draw(pi) -> [(probability, (n,) weights)], by running it along every order.
    An outcome changes only where u crosses the end of an item modulo 1, so one u between any two
    such places will do. Items with pi of 0 or 1 shift the others by whole numbers only."""
    fixed = [i for i in range(len(pi)) if pi[i] in (0, 1)]
    orders = list(itertools.permutations(set(range(len(pi))) - set(fixed)))
    outcomes = Counter()
    for order in orders:
        order = torch.tensor([*order, *fixed], dtype=torch.long)
        ends = (pi[order].cumsum(0) % 1).tolist()
        for low, high in itertools.pairwise(sorted({0.0, 1.0, *ends})):
            weights = draw_along(order, (low + high) / 2, pi)
            outcomes[tuple(weights.tolist())] += (high - low) / len(orders)
    certain = {w: p for w, p in outcomes.items() if p > 1e-11}  # less happens by rounding only
    return [(p, torch.tensor(w, dtype=pi.dtype)) for w, p in certain.items()]


def every_result(function):
    """All outcomes of a function that draws once -> [(probability, result)]."""
    with mock.patch.object(dppo, "draw", side_effect=lambda pi, _: torch.ones_like(pi)) as asked:
        function()
    pi, _ = asked.call_args.args
    results = []
    for probability, weights in every_draw(pi):
        with mock.patch.object(dppo, "draw", return_value=weights):
            results.append((probability, function()))
    return results


def every_step(rule):
    """All outcomes of both levels of pruning -> [(probability, (N, G) weights)]."""
    steps = []
    picks = every_result(partial(pick_prompts, rule, torch.arange(4), LIMIT, None))
    for p_prompts, (size, kept, prompt_weights) in picks:
        assert size == N  # whatever the draw
        inputs = (rule, REWARDS[kept], ADVANTAGES[kept], prompt_weights, N, None)
        for p_completions, of_kept in every_result(partial(weigh_completions, *inputs)):
            weights = torch.zeros(N, G, dtype=torch.float64)
            weights[kept] = of_kept
            steps.append((p_prompts * p_completions, weights))
    return steps


def test_a_draw_of_three_items_by_hand():
    """Of lengths 1/2, 1/4, 1/4, a tooth at u < 1/2 hits the first, at u < 3/4 the second, otherwise
    the third. So they are kept with these probabilities, and weigh 2, 4, 4: in expectation 1."""
    pi = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    for u, weights in ((0.1, [2, 0, 0]), (0.49, [2, 0, 0]), (0.6, [0, 4, 0]), (0.9, [0, 0, 4])):
        assert draw_along(torch.arange(3), u, pi).tolist() == weights


@pytest.mark.parametrize("pi", [[0.5] * 4, [0.4] * 5 + [1.0], [0.3, 0.9, 0.2, 0.05], [0, 0.5, 0.2]])
def test_draw_keeps_each_item_with_its_own_probability(pi):
    pi = torch.tensor(pi, dtype=torch.float64)
    for _, weights in every_draw(pi):
        kept = weights > 0
        assert torch.allclose(weights[kept], 1 / pi[kept])
        assert abs(kept.sum() - pi.sum()) < 1 - 1e-9  # rounded down or up
    expectation = sum(p * weights for p, weights in every_draw(pi))
    assert torch.allclose(expectation, (pi > 0).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("r_o", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("r_q", [0.6, 0.9])
@pytest.mark.parametrize("method", ["dppo", "dppo-proportional", "test_dppo:OwnRule"])
def test_every_weight_has_expectation_one(method, r_q, r_o):
    steps = every_step(rule_with_history(method, r_q, r_o))
    assert len(steps) > 1
    expectation = sum(p * weights for p, weights in steps)
    assert torch.allclose(expectation, torch.ones(N, G).double(), rtol=0, atol=1e-10)


class Problem:
    """The completions of the window, with a real model, KL, and unless `first`, clipped tokens."""

    def __init__(self, objective="grpo", beta=0.0, max_grad_norm=1e9, first=False):
        settings = {"objective": objective, "beta": beta, "max_grad_norm": max_grad_norm}
        self.config = Config(**settings, group_size=G, temperature=1.0, micro_batch_tokens=256)
        self.model = tiny_model()
        self.sequences = random_sequences()
        torch.manual_seed(0)
        frozen = dppo.frozen_logprobs(self.model, self.sequences, range(N * G), self.config)
        self.old = {i: p + 0.4 * torch.randn(p.shape) for i, p in frozen.items() if not first}
        self.ref = {i: p + 0.4 * torch.randn(p.shape) for i, p in frozen.items()}

    def gradients_alone(self):
        """(N G, parameters) the g_i, each from its completion alone."""
        rows = []
        for i, A in enumerate(ADVANTAGES[:N].flatten()):
            logprobs, _ = dppo.completion_logprobs(self.model, self.sequences, [[i]], 1.0)
            lengths, w = torch.tensor([logprobs.shape[1]]), torch.ones(1)
            old = self.old[i][None] if self.old else logprobs.detach()
            inputs = (old, self.ref[i][None], lengths, A[None], w, N, MEAN_LENGTH)
            loss, _, _ = dppo.policy_loss(logprobs, *inputs, self.config)
            rows.append(flat_gradient(loss, self.model))
        return torch.stack(rows)

    def gradient_of_train_step(self, weights):
        """(parameters,) what train_step takes off the parameters in gradient descent at rate 1."""
        model = copy.deepcopy(self.model)
        before = parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        inputs = (self.sequences, ADVANTAGES[:N], weights, N, MEAN_LENGTH, self.config)
        dppo.train_step(model, optimizer, *inputs, self.old or None, self.ref)
        return before - parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("objective", dppo.CLIPPING)
def test_the_gradient_of_train_step_is_linear_in_the_weights(objective, first):
    problem = Problem(objective, beta=0.1, first=first)
    weights = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.5, 0.0], [1.0, 1.0, 4.0]])
    expected = weights.double().flatten() @ problem.gradients_alone()
    difference = problem.gradient_of_train_step(weights) - expected
    assert difference.norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("objective", dppo.CLIPPING)
def test_the_loss_is_its_formula_and_so_is_its_gradient(objective, beta):
    config = Config(objective=objective, beta=beta, max_completion_tokens=9, group_size=4)
    lengths = torch.tensor([3, 1, 7, 4])
    new, old, ref = -3 * torch.rand(3, 4, 7, generator=torch.Generator().manual_seed(0)).double()
    A, w = torch.tensor([[1.5, -0.5, -2.0, 0.7], [2.0, 1.0, 3.0, 0.5]], dtype=torch.float64)
    new.requires_grad_()
    loss, clipped, kl = dppo.policy_loss(new, old, ref, lengths, A, w, 3, 2.5, config)
    down, up = dppo.CLIPPING[objective]
    expected = 0.0
    for i, length in enumerate(lengths):
        Z = {"dr_grpo": 9, "dapo": 2.5}.get(objective, length)
        log_ratio = (new - old)[i, :length]
        if objective == "gspo":
            log_ratio = log_ratio.mean().expand(length)
        for t in range(length):
            rho = log_ratio[t].exp()
            surrogate = min(rho * A[i], rho.clamp(1 - down, 1 + up) * A[i])
            x = (ref[i, t] - new[i, t]).exp()
            k3 = x - 1 - x.log() if beta else 0.0
            expected += w[i] / Z * (beta * k3 - surrogate) / (3 * 4)
            assert clipped[i, t] == (surrogate < rho * A[i])
            assert abs(kl[i, t] - k3) < 1e-12
        assert not clipped[i, length:].any()
    assert clipped.sum() > 3
    assert abs(loss - expected) < 1e-12
    gradients = [torch.autograd.grad(value, new)[0] for value in (loss, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


def test_packing_changes_neither_log_probabilities_nor_gradients():
    """Against the model's own forward pass on one sequence at a time."""
    problem = Problem()
    micro_batches, _ = dppo.pack_micro_batches(problem.sequences, range(N * G), problem.config)
    assert len(micro_batches) > 1 and len(micro_batches[0][0]) > 1
    packed, alone = 0.0, 0.0
    for slots in micro_batches:
        logprobs, _ = dppo.completion_logprobs(problem.model, problem.sequences, slots, 1.0)
        for i, row in zip(itertools.chain(*slots), logprobs):
            prompt, completion = problem.sequences[i]
            logits = problem.model(torch.tensor([prompt + completion])).logits[0].float()
            predicting = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
            expected = predicting[range(len(completion)), completion]
            assert torch.allclose(row[: len(completion)], expected, atol=1e-5)
            packed += (1 + i) * row.sum()
            alone += (1 + i) * expected.sum()
    packed, alone = flat_gradient(packed, problem.model), flat_gradient(alone, problem.model)
    assert (packed - alone).norm() < 1e-6 * alone.norm()


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_training_uses_these_weights_and_this_n_and_draws_anew(objective, monkeypatch, tmp_path):
    picks, draws, updates = spy(monkeypatch, "pick_prompts", "weigh_completions", "train_step")
    settings = {"objective": objective, "prompts_per_step": 8, "inner_epochs": 2, "steps": 12}
    run(tmp_path, tiny_task(prompts=48), **settings)
    assert max(size for _, (size, _, _) in picks) > 8
    for n, ((_, _, _, A, w, divided_by, _, _, old, _), _) in enumerate(updates):
        (_, rewards, _, prompt_weights, *_), drawn = draws[n]
        _, (size, _, weights_of_pick) = picks[1 + n // 2]  # the first was a trial of the rule
        assert w is drawn
        assert prompt_weights is weights_of_pick
        assert divided_by == size
        assert torch.equal(A, group_advantages(rewards, objective == "grpo"))
        assert old.keys() >= set(w.flatten().nonzero().flatten().tolist())
    assert sum(not torch.equal(a, b) for (_, a), (_, b) in zip(draws[::2], draws[1::2])) > 6


@pytest.mark.parametrize("method, beta", [("dppo", 0.0), ("dppo-proportional", 1.0)])
def test_the_expected_gradient_of_a_transformer_is_the_full_one(method, beta):
    gradients = Problem(beta=beta).gradients_alone()
    steps = every_step(rule_with_history(method, beta=beta))
    expectation = sum(p * (w.flatten() @ gradients) for p, w in steps)
    assert gradients.sum(0).norm() > 0.01
    assert (expectation - gradients.sum(0)).abs().max() < 1e-10


# ---- Six ways to lose it. Any gradients will do: here A grad log p, with random grad log p
A = ADVANTAGES[:N]
GRAD_LOG_P = torch.randn(N, G, 5, generator=torch.Generator().manual_seed(0)).double()


def gradient(w, advantages=A):
    return torch.einsum("qi,qi,qip->p", w, advantages, GRAD_LOG_P) / (N * G)


def relative_bias(estimate):
    """|E[estimate(w)] - full gradient| / |full gradient|, under the paper's rule."""
    full = gradient(torch.ones_like(A))
    expectation = sum(p * estimate(w) for p, w in every_step(rule_with_history()))
    return (expectation - full).norm() / full.norm()


def test_1_dividing_by_what_is_kept_is_biased():
    assert relative_bias(gradient) < 1e-12
    assert relative_bias(lambda w: gradient(w) * N * G / (w > 0).sum()) > 0.05


def test_2_centring_advantages_again_after_pruning_is_biased():
    def recentred(w):
        means = (A * (w > 0)).sum(dim=1) / (w > 0).sum(dim=1).clamp(min=1)
        return gradient(w, A - means[:, None])

    assert relative_bias(recentred) > 0.05


def test_3_removing_the_lowest_for_certain_is_refused_and_no_weights_could_mend_it():
    highest = A.abs() >= A.abs().median()
    rule = rule_with_history()
    rule.completion_probabilities = mock.Mock(return_value=highest)
    with pytest.raises(ValueError, match="0 < pi <= 1"):
        weigh_completions(rule, REWARDS[:N], A, torch.ones(N), N, torch.Generator())
    gradients = Problem().gradients_alone().T
    full, kept = gradients.sum(dim=1, keepdim=True), gradients[:, highest.flatten()]
    best = kept @ torch.linalg.lstsq(kept, full).solution
    assert (best - full).norm() > 0.1 * full.norm()


def test_4_looking_on_until_a_prompt_survives_is_biased():
    """Of prompts of value 1, 0, 0, 0; against the mean value of those that were looked at."""
    values, bias = torch.tensor([1.0, 0.0, 0.0, 0.0]), 0.0
    for p, weights in every_draw(torch.full((4,), 0.5).double()):
        looked_at = int(weights.nonzero()[0]) + 1
        bias += p * ((weights - 1) * values)[:looked_at].mean()
    assert abs(bias) > 0.1


def test_5_a_draw_used_again_for_a_second_update_is_biased():
    """With losses c (x - b)^2/2, the first update moves x from 0 to a place that depends on w."""
    c, b = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 5.0, 2.0]], dtype=torch.float64)
    bias = 0.0
    for p, w in every_draw(torch.full((4,), 0.5).double()):
        x = 0.25 * (w * c * b).mean()
        bias += p * ((w - 1) * c * (x - b)).mean()
    assert abs(bias) > 0.1


def test_6_an_update_is_biased_where_the_norm_is_clipped():
    problem = Problem(max_grad_norm=1e-3)
    steps = every_step(rule_with_history(r_o=0.0))
    expectation = sum(p * problem.gradient_of_train_step(w) for p, w in steps)
    full = problem.gradient_of_train_step(torch.ones(N, G))
    assert (expectation - full).norm() > 0.05 * full.norm()


# ==== What the tests work on ====
MEAN_LENGTH = 2.5


def tiny_model(dtype=torch.float64, device="cpu", **sizes):
    """A Qwen3 with 13 tokens and a few thousand random weights, large enough to matter."""
    torch.manual_seed(0)
    shape = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shape |= {"max_position_embeddings": 256, "initializer_range": 0.3}
    shape |= {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.Qwen3Config(**shape | sizes)
    return transformers.Qwen3ForCausalLM(config).to(device, dtype).eval()


def flat_gradient(loss, model):
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def random_sequences():
    """(prompt ids, completion ids) of the window. Prompts of 20 to 30 tokens make several slots."""
    rng = random.Random(0)
    sequences = []
    for i in range(N * G):
        prompt = rng.choices(range(2, 13), k=20 + 5 * (i // G))
        sequences.append((prompt, rng.choices(range(2, 13), k=1 + i % 7)))
    return sequences


def tiny_tokenizer():
    """A token for each character of the sorting task."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "=", *"0123456789"])}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<end>"
    )


def lengths_reward(prompts, completions, **_):
    """Differs within most groups, also of an untrained model, so that every step learns."""
    return [len(c) % (2 + len(p) % 3) / 3 for p, c in zip(prompts, completions)]


def tiny_task(reward=lengths_reward, model=None, prompts=16):
    tokenizer, rng = tiny_tokenizer(), random.Random(0)
    train = []
    while len(train) < prompts:
        example = dppo.sorting_example(["easy", "middle"][len(train) % 2], rng, tokenizer)
        if example not in train:
            train.append(example)
    model = model or tiny_model(torch.float32)
    return Task(train, {"some": train[:4]}, tokenizer, reward, model)


def spy(monkeypatch, *names):
    """Lists that note the calls of functions of dppo, as (arguments, result)."""
    lists = []
    for name in names:
        lists.append([])
        monkeypatch.setattr(dppo, name, noting(getattr(dppo, name), lists[-1]))
    return lists


def noting(function, calls):
    def wrapper(*arguments):
        result = function(*arguments)
        calls.append((arguments, result))
        return result

    return wrapper


def run(out, task=None, **settings):
    """A run of small steps to its end, new or resumed -> the summary."""
    defaults = {"group_size": 4, "max_completion_tokens": 8}
    folder = {"resume" if (out / "checkpoint.pt").exists() else "output_dir": str(out)}
    config = Config(**defaults | folder | settings)
    return dppo.train(dppo.start(config, task or tiny_task()))


# ==== 2. Pruning ====
def test_advantages_are_those_of_whole_groups_and_zero_where_there_is_nothing_to_learn():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.1] * 4, [math.nan, 1.0, 0.0, 0.0]])
    advantages = group_advantages(rewards)
    assert torch.allclose(advantages[0], (rewards[0].double() - 0.25) / (rewards[0].std() + 1e-4))
    assert advantages[1:].eq(0).all()
    unscaled = group_advantages(rewards, scale_by_std=False)
    assert torch.equal(unscaled[0], rewards[0].double() - 0.25)


@pytest.mark.parametrize(
    "scores, rate, expected",
    [
        ([0.1, 0.2, 0.3, 0.4, 4.0], 0.7, [0.5] * 4 + [1.0]),  # floor(0.7 * 4) of 4 go
        ([0.1, 0.2, 0.3, 0.4, 4.0], 0.2, [1.0] * 5),  # floor(0.8) is none
        ([0.1] * 100 + [50.0], 0.29, [0.71] * 100 + [1.0]),  # 0.29 * 100 is 28.999999999999996
        ([math.nan, 1.0, 1.0, 4.0], 0.5, [1.0, 0.5, 0.5, 1.0]),
        ([1.0, 1.0 + 2e-7, 1.0], 0.9, [1.0] * 3),  # equal but for rounding: none is low
    ],
)
def test_the_paper_s_rule_prunes_the_floor_of_the_low_set(scores, rate, expected):
    assert dppo.keep_probabilities(torch.tensor(scores), rate).tolist() == expected


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    scores=st.lists(st.floats(0, 1e6) | st.sampled_from([math.nan, 0.0]), min_size=1),
    rate=st.floats(0, 0.99),
)
def test_any_scores_give_probabilities_and_as_many_kept_as_they_sum_to_rounded(scores, rate):
    scores = torch.tensor(scores, dtype=torch.float64)
    for pi in (
        dppo.keep_probabilities(scores, rate),
        dppo.proportional_probabilities(scores, rate, floor=0.07),
    ):
        assert ((pi > 0) & (pi <= 1)).all()
        kept = draw(pi, torch.Generator()) > 0
        assert abs(kept.sum() - pi.sum()) < 1 + 1e-6


def test_draws_of_a_generator_keep_each_item_as_often_as_it_should_be():
    """The proof enumerates draws. These come from a torch.Generator, in random order."""
    pi = torch.tensor([0.1, 0.5, 0.9, 0.25, 1.0, 0.4], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    kept = torch.stack([draw(pi, generator) > 0 for _ in range(20_000)])
    standard_errors = (pi * (1 - pi) / 20_000).sqrt()
    assert ((kept.double().mean(dim=0) - pi).abs() <= 5 * standard_errors).all()


def random_history(rule, generator):
    """Visits of a long run: rewards of two visits by policies of different strength. A fifth of the
    prompts was never visited."""
    visited = torch.randperm(rule.prompt_count, generator=generator)[: rule.prompt_count * 4 // 5]
    for _ in range(2):
        p = torch.rand(len(visited), 1, generator=generator) ** 3
        rewards = (torch.rand(len(visited), 8, generator=generator) < p).double()
        rule.update(visited, rewards, group_advantages(rewards))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("method", ["dppo", "dppo-proportional"])
def test_the_window_is_the_longest_whose_survivors_never_exceed_the_batch(method, rate):
    generator = torch.Generator().manual_seed(0)
    config = Config(method=method, prompt_prune_rate=rate)
    for _ in range(10):
        rule = config.rule(config, 300)
        random_history(rule, generator)
        order, pi = torch.randperm(300, generator=generator), rule.prompt_probabilities()
        N, kept, weights = pick_prompts(rule, order, 16, generator)
        assert pi[order[:N]].sum() <= 16 + 1e-9 < pi[order[: N + 1]].sum()
        assert len(kept) in (15, 16)
        assert set(kept.tolist()) <= set(order[:N].tolist())
        assert torch.allclose(weights, 1 / pi[kept])
        assert N > 16 or rate < 0.9


def test_of_unlikely_prompts_exactly_one_is_kept_by_its_share_of_the_chances():
    rule = dppo.Rule(Config(), 3)
    rule.prompt_probabilities = mock.Mock(return_value=torch.tensor([0.1, 0.2, 0.1]))
    results = every_result(lambda: pick_prompts(rule, torch.arange(3), 8, None))
    chances = {tuple(kept.tolist()): p for p, (_, kept, _) in results}
    assert chances == pytest.approx({(0,): 0.25, (1,): 0.5, (2,): 0.25})


def test_the_low_set_of_prompts_is_of_all_so_that_windows_without_signal_are_pruned_too():
    rule = dppo.DPPO(Config(prompt_prune_rate=0.7), 40)
    rule.memory["score"] = torch.tensor([0.0] * 30 + [0.9] * 8 + [math.nan] * 2).double()
    N, kept, weights = pick_prompts(rule, torch.arange(40), 6, torch.Generator())
    assert N == 20
    assert torch.allclose(weights, torch.full((6,), 30 / 9).double())


def test_a_score_is_of_the_last_visit_and_pruned_prompts_keep_theirs(monkeypatch, tmp_path):
    memories, real = [], dppo.DPPO.update

    def update(rule, prompts, rewards, advantages):
        expected = rule.memory["score"].clone()
        expected[prompts] = advantages.abs().mean(dim=1)
        real(rule, prompts, rewards, advantages)
        memories.append((expected, rule.memory["score"].clone()))

    monkeypatch.setattr(dppo.DPPO, "update", update)
    run(tmp_path, steps=8, prompts_per_step=6)
    for expected, score in memories:
        assert torch.equal(score.nan_to_num(-1), expected.nan_to_num(-1))
    assert not memories[-1][1].isnan().any()


def test_of_two_visits_in_one_window_the_later_is_the_score():
    rule = dppo.DPPO(Config(), 2)
    rule.update(torch.tensor([1, 1]), None, torch.tensor([[1.0, -1.0], [0.5, -0.5]]))
    assert rule.memory["score"][1] == 0.5


@pytest.mark.parametrize("method", ["grpo-skip", "dppo", "dppo-proportional"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_completions_without_a_gradient_are_left_out_unless_there_is_kl(method, beta):
    config = Config(method=method, beta=beta, completion_prune_rate=0.0)
    advantages = torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    pi = config.rule(config, 2).completion_probabilities(advantages, torch.ones(2))
    assert (pi > 0).tolist() == [[True, True], [beta > 0, beta > 0]]


def test_the_mean_that_decides_what_is_low_is_of_completions_with_a_gradient():
    advantages = torch.tensor([[2.0, 1.0, 1.0, 1.0], [0.0] * 4, [0.0] * 4])  # 1.25, and not 0.42
    rule = dppo.DPPO(Config(completion_prune_rate=0.7), 3)
    pi = rule.completion_probabilities(advantages.double(), torch.ones(3))
    assert torch.allclose(pi[0], torch.tensor([1, 1 / 3, 1 / 3, 1 / 3]).double())


def test_a_group_with_a_missing_reward_is_not_trained():
    rewards = torch.tensor([[1.0, 0.0], [math.nan, 1.0]])
    inputs = (rewards, group_advantages(rewards), torch.ones(2), 2, torch.Generator())
    weights = weigh_completions(dppo.Rule(Config(beta=0.1, group_size=2), 2), *inputs)
    assert weights.tolist() == [[1.0, 1.0], [0.0, 0.0]]


class KeepLargest(dppo.GRPOSkip):
    """A biased rule, as somebody might plug one in, which also counts visits."""

    unbiased = False
    remembers = {"visits": 0.0}

    def completion_probabilities(self, advantages, prompt_weights):
        return self.has_gradient(advantages) & (advantages.abs() >= advantages.abs().median())

    def update(self, prompts, rewards, advantages):
        self.memory["visits"][prompts] += 1


def test_a_biased_rule_trains_on_the_mean_of_what_it_keeps_whatever_its_prompts_weigh():
    rule, generator = KeepLargest(Config(group_size=G), 4), torch.Generator()
    prompt_weights = torch.tensor([1.0, 3.0, 1.0, 1.0])
    weights = weigh_completions(rule, REWARDS, ADVANTAGES, prompt_weights, 7, generator)
    kept = (weights > 0).sum()
    assert 0 < kept < 9
    assert torch.allclose(weights[weights > 0] / (7 * G), 1 / kept.double())
    nothing = weigh_completions(rule, REWARDS, 0 * ADVANTAGES, prompt_weights, 7, generator)
    assert torch.equal(nothing, torch.zeros(4, G).double())


WRONG = [(True, [0.0, 1, 1, 1]), (False, [0.0] * 4), (True, [2.0, 1, 1, 1]), (True, [1.0] * 3)]
WRONG += [(False, [-0.5, 1, 1, 1]), (False, [math.nan] * 4)]


@pytest.mark.parametrize("unbiased, pi", WRONG)
def test_probabilities_of_one_s_own_that_would_bias_in_silence_are_refused(unbiased, pi):
    rule = dppo.Rule(Config(), 4)
    rule.unbiased = unbiased
    rule.has_gradient = mock.Mock(return_value=torch.tensor(False))  # an excuse that is not heard
    rule.prompt_probabilities = mock.Mock(return_value=torch.tensor(pi))
    rule.completion_probabilities = mock.Mock(return_value=torch.tensor([pi, pi]))
    with pytest.raises(ValueError, match="a rule must"):
        pick_prompts(rule, torch.arange(4), 8, torch.Generator())
    if any(pi):
        advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2)
        with pytest.raises(ValueError, match=r"of shape \(2, 4\)"):
            weigh_completions(rule, advantages, advantages, torch.ones(2), 2, torch.Generator())


# ==== 3. Dense Prompt Packing ====
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    lengths=st.lists(st.integers(1, 50)), room=st.integers(0, 100), lookahead=st.integers(1, 90)
)
def test_every_sequence_is_packed_once_and_no_slot_overflows(lengths, room, lookahead):
    capacity = max(lengths, default=1) + room
    slots = dppo.pack(lengths, capacity, lookahead)
    assert sorted(itertools.chain(*slots)) == list(range(len(lengths)))
    for slot in slots:
        assert 0 < sum(lengths[i] for i in slot) <= capacity


def test_packing_takes_the_longest_that_fits_among_the_next_in_order():
    assert dppo.pack([5, 3, 8, 2, 2], capacity=10, lookahead=3) == [[2, 3], [0, 1, 4]]
    assert dppo.pack([5, 6, 5, 4], capacity=10, lookahead=1) == [[0], [1], [2, 3]]
    lengths = random.Random(0).choices(range(1, 1001), k=20_000)
    assert sum(lengths) > 950 * len(dppo.pack(lengths, 1000))  # 95% of the slots are filled


@pytest.mark.parametrize(
    "tokens, sizes", [(408, [3]), (407, [2, 1]), (271, [1, 1, 1]), (1, [1] * 3)]
)
def test_a_micro_batch_has_as_many_slots_as_its_tokens_allow(tokens, sizes):
    sequences = [([2] * 3, [3] * n) for n in (130, 50, 50, 70)]  # slots of 136: 133; 73, 53; 53
    config = Config(micro_batch_tokens=tokens)
    micro_batches, density = dppo.pack_micro_batches(sequences, [0, 1, 2, 3], config)
    assert [len(slots) for slots in micro_batches] == sizes
    assert density == 312 / 408


# ==== 4. Forward pass, loss and update ====
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_packed_log_probabilities_are_those_alone(device, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(dppo, "LOGIT_CHUNK", 7)  # so that there are several chunks
    model, sequences = tiny_model(dtype, device), random_sequences()
    packed, _ = dppo.completion_logprobs(model, sequences, [[0, 1, 2, 3], [4, 5]], 0.7)
    for i, row in enumerate(packed):
        alone, _ = dppo.completion_logprobs(model, sequences, [[i]], 0.7)
        length = alone.shape[1]
        assert torch.allclose(row[:length], alone[0], rtol=tolerance, atol=tolerance)
        assert not row[length:].any()


def test_entropies_and_log_probabilities_are_of_the_policy_at_its_temperature():
    model = tiny_model(torch.float32)
    sequences = [([5, 4], [token]) for token in range(13)]
    slots = [[i] for i in range(13)]
    logprobs, entropies = dppo.completion_logprobs(model, sequences, slots, 0.7)
    expected = (model(torch.tensor([[5, 4]])).logits[0, -1] / 0.7).log_softmax(dim=-1)
    assert torch.allclose(logprobs.squeeze(1), expected, atol=1e-5)
    assert torch.allclose(entropies, -(expected.exp() @ expected).expand(13), atol=1e-5)


def test_gradient_checkpointing_computes_layers_again_and_changes_nothing():
    plain, again = Problem(), Problem()
    dppo.recompute_layers(again.model)
    calls = Counter()
    for problem in (plain, again):
        first_mlp = problem.model.model.layers[0].mlp
        first_mlp.register_forward_pre_hook(lambda *_, who=problem: calls.update([who]))
    ones = torch.ones(N, G)
    gradient = plain.gradient_of_train_step(ones)
    assert torch.allclose(again.gradient_of_train_step(ones), gradient, rtol=1e-9, atol=1e-12)
    assert calls[again] == 2 * calls[plain]
    assert not any(module.training for module in again.model.modules())  # so dropout stays off


def test_clipping_is_as_published():
    assert dppo.CLIPPING["grpo"] == dppo.CLIPPING["dr_grpo"] == (0.2, 0.2)
    assert dppo.CLIPPING["dapo"] == (0.2, 0.28)
    assert dppo.CLIPPING["gspo"] == (3e-4, 4e-4)


def test_gradients_are_clipped_to_max_grad_norm():
    gradient = Problem().gradient_of_train_step(torch.ones(N, G))
    limit = 0.1 * gradient.norm().item()
    clipped = Problem(max_grad_norm=limit).gradient_of_train_step(torch.ones(N, G))
    assert torch.allclose(clipped, 0.1 * gradient, rtol=1e-3, atol=1e-9)


def bfloat16_problem():
    problem = Problem()
    problem.model = tiny_model(torch.bfloat16)
    problem.old, problem.ref = None, None
    return problem


def train_once(problem, optimizer, weights):
    inputs = (problem.sequences, A, weights, N, MEAN_LENGTH, problem.config)
    return dppo.train_step(problem.model, optimizer, *inputs)


def test_updates_far_below_bfloat16_resolution_add_up_in_the_masters(monkeypatch):
    problem = bfloat16_problem()
    [losses] = spy(monkeypatch, "policy_loss")
    optimizer = dppo.make_optimizer(problem.model, Config(learning_rate=1e-5))
    start = parameters_to_vector(problem.model.parameters()).detach().float()
    still = []
    for _ in range(60):
        train_once(problem, optimizer, torch.full((N, G), 10 / 3))
        now = parameters_to_vector(problem.model.parameters()).detach().float()
        still.append((now == start).double().mean())
    assert still[0] > 0.9 > still[-1]
    masters = optimizer.param_groups[0]["params"]
    for weight, master in zip(problem.model.parameters(), masters):
        assert master.dtype == torch.float32
        assert torch.equal(weight, master.bfloat16())
        assert weight.grad is None and master.grad is None
    (_, _, _, _, advantages, weights, *_), _ = losses[0]
    assert advantages.dtype == weights.dtype == torch.float32
    assert optimizer.param_groups[0].get("weight_decay", 0) == 0


def test_float32_weights_are_their_own_masters():
    model = tiny_model(torch.float32)
    masters = dppo.make_optimizer(model, Config()).param_groups[0]["params"]
    assert all(weight is master for weight, master in zip(model.parameters(), masters))


def test_gradients_of_bfloat16_weights_are_summed_in_float32(monkeypatch):
    """They are the float32 sum of what each completion has alone; a bfloat16 sum would differ."""
    problem = bfloat16_problem()
    problem.config.micro_batch_tokens = 1
    optimizer = dppo.make_optimizer(problem.model, problem.config)
    gradients = []

    def step():
        gradients.append([weight.grad.clone() for weight in problem.model.parameters()])

    monkeypatch.setattr(optimizer, "step", step)
    problem.sequences = [(prompt * 6, completion) for prompt, completion in problem.sequences]
    one_each = torch.eye(N * G).view(-1, N, G)
    for weights in [*one_each, torch.ones(N, G)]:
        train_once(problem, optimizer, weights)
    *alone, together = gradients
    bfloat16_sums_are_worse = False
    for parts, whole in zip(zip(*alone), together):
        assert whole.dtype == torch.float32
        assert torch.allclose(whole, sum(parts), rtol=1e-5, atol=1e-7)
        coarse = sum(part.bfloat16() for part in parts)
        bfloat16_sums_are_worse |= not torch.allclose(coarse.float(), whole, rtol=1e-5, atol=1e-7)
    assert bfloat16_sums_are_worse


@pytest.mark.parametrize("warmup_steps, expected", [(0, [3.0] * 4), (3, [1.0, 2.0, 3.0, 3.0])])
def test_the_learning_rate_rises_over_the_warm_up(warmup_steps, expected, tmp_path):
    run(tmp_path, steps=4, warmup_steps=warmup_steps, learning_rate=3.0)
    rates = [record["learning_rate"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx(expected)


def test_dapo_divides_by_the_running_mean_of_earlier_lengths_by_prompt_weights():
    progress, lengths = dppo.Progress(), torch.tensor([[1, 3], [6, 6]])
    weights = torch.tensor([3.0, 1.0])
    assert dppo.running_length(progress, lengths, weights) == 3  # (3 * 2 + 6) / 4
    progress.mean_length = 5.0
    assert dppo.running_length(progress, lengths, weights) == 5
    assert progress.mean_length == 0.9 * 5 + 0.1 * 3


def test_the_reference_of_the_kl_term_is_the_policy_before_the_first_step(tmp_path):
    run(tmp_path, steps=6, beta=0.1, learning_rate=1e-2, warmup_steps=0)
    kl = [record["kl"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert kl[0] < 1e-6 < kl[-1]


def weights_at_each_reward(task):
    """A list that takes in the weights of the model whenever the reward of the task is called."""
    states, reward = [], task.reward

    def watched(**columns):
        states.append(parameters_to_vector(task.model.parameters()).detach().clone())
        return reward(**columns)

    task.reward = watched
    return states


@pytest.mark.parametrize("method", dppo.RULES)
def test_batches_of_equal_rewards_train_nothing_not_even_by_the_momentum_of_adam(method, tmp_path):
    rewards = itertools.chain(
        [lengths_reward] * 4, itertools.repeat(lambda prompts, **_: [1.0] * len(prompts))
    )
    task = tiny_task(lambda **columns: next(rewards)(**columns))
    task.evals = {}
    states = weights_at_each_reward(task)
    run(tmp_path, task, method=method, steps=9, learning_rate=1e-2)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(states)]
    assert moved == [True] * 4 + [False] * 4
    records = read_lines(tmp_path / "metrics.jsonl")[4:]
    assert {record["grad_norm"] for record in records} == {0}


def make_losses_nan(monkeypatch, calls):
    real, count = dppo.policy_loss, itertools.count(1)

    def policy_loss(*inputs):
        loss, *rest = real(*inputs)
        return loss * (math.nan if next(count) in calls else 1.0), *rest

    monkeypatch.setattr(dppo, "policy_loss", policy_loss)


def test_updates_not_finite_are_left_out_and_ten_in_a_row_end_the_run(monkeypatch, tmp_path):
    make_losses_nan(monkeypatch, {2, 3, *range(6, 99)})
    task = tiny_task()
    task.evals = {}
    states = weights_at_each_reward(task)
    with pytest.raises(FloatingPointError, match="not finite"):
        run(tmp_path, task, steps=50, learning_rate=1e-2, beta=0.1)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(states)]
    assert moved == [True, False, False, True, True] + [False] * 9
    records = read_lines(tmp_path / "metrics.jsonl")
    assert [record["skipped"] for record in records] == [0, 1, 1, 0, 0] + [1] * 10
    assert [record["grad_norm"] is None for record in records] == [r["skipped"] for r in records]


def test_a_run_of_which_some_updates_are_finite_goes_on(monkeypatch, tmp_path):
    make_losses_nan(monkeypatch, range(1, 99, 2))
    run(tmp_path, steps=12, inner_epochs=2)
    skipped = [record["skipped"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert skipped == [1] * 12


# ==== 6. The proportional rule ====
def binary_rewards(seed):
    """(64, 8) rewards 0 and 1, at success rates that are uniform on [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(64, 1, generator=generator)
    return (torch.rand(64, 8, generator=generator) < p).double()


def second_moment(method, rate):
    """Of a sum of orthogonal gradients of norm |A|, where that of the full sum is 1."""
    config = Config(method=method, completion_prune_rate=rate)
    rule = config.rule(config, 64)
    pruned, full = 0.0, 0.0
    for seed in range(50):
        advantages = group_advantages(binary_rewards(seed))
        pi = rule.completion_probabilities(advantages, torch.ones(64))
        pruned += (advantages**2 / pi)[pi > 0].sum()
        full += (advantages**2).sum()
    return pruned / full


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 0.95])
def test_for_orthogonal_gradients_of_norm_a_its_second_moment_is_at_most_the_paper_s(rate):
    assert second_moment("dppo-proportional", rate) <= second_moment("dppo", rate) + 1e-12
    if rate >= 0.9:
        assert second_moment("dppo-proportional", rate) < 0.65 * second_moment("dppo", rate)


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_it_keeps_as_many_as_the_paper_s_rule_in_proportion_to_their_scores(rate):
    scores = group_advantages(binary_rewards(0)).abs()
    scores = scores[scores > 0]
    pi = dppo.proportional_probabilities(scores, rate)
    assert abs(pi.sum() - dppo.keep_probabilities(scores, rate).sum()) < 1e-9
    assert (pi / scores)[pi < 1].std() < 1e-9
    assert pi[scores.argmax()] == pi.max() <= 1


def test_a_floor_lies_under_all_and_what_has_no_score_is_kept():
    scores = torch.tensor([math.nan, *[1.0] * 20, *[1e-6] * 20])
    pi = dppo.proportional_probabilities(scores, 0.95, floor=0.07)
    assert pi[0] == 1
    assert pi[21:].tolist() == [0.07] * 20
    assert abs(pi.sum() - pi.sum().round()) < 1e-9


def test_its_completions_are_scored_with_the_weight_of_their_prompt():
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 8))
    prompt_weights = torch.tensor([10.0] + [1.0] * 7).double()
    rule = dppo.RULES["dppo-proportional"](Config(completion_prune_rate=0.9), 8)
    pi = rule.completion_probabilities(advantages, prompt_weights)
    assert torch.allclose(pi[0, 1:], 10 * pi[1, 1:])
    assert torch.allclose(pi[1:, 0], 3 * pi[1:, 1])


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_its_prompts_are_scored_by_the_expected_square_of_their_advantages(objective):
    rule = dppo.RULES["dppo-proportional"](Config(objective=objective, group_size=6), 3)
    rewards = torch.tensor([[0.0] * 8, [1.0] * 3 + [0.0] * 5, [1.0] * 7 + [0.5]]).double()
    rule.update(torch.arange(3), rewards, group_advantages(rewards))
    torch.manual_seed(0)
    for score, right in zip(rule.memory["score"], (0.0, 3.0, 7.5)):
        posterior = torch.distributions.Beta(rule.prior + right, rule.prior + 8 - right)
        p = posterior.sample((300_000,)).double()
        square = 2 * p * (1 - p) if objective == "dr_grpo" else 1 - p**6 - (1 - p) ** 6
        assert abs(score**2 - square.mean()) < 5 * square.std() / 300_000**0.5


def test_it_sums_successes_with_decay_and_takes_rewards_within_0_and_1_with_a_warning():
    rule = dppo.RULES["dppo-proportional"](Config(), 3)
    visits = [
        ([0, 1], [[1.0, 0.0, 0.0, 1.0], [0.0] * 4]),
        ([0], [[1.0, 1.0, 1.0, math.nan]]),  # says nothing about successes
        ([0], [[1.0] * 4]),
    ]
    for prompts, rewards in visits:
        rewards = torch.tensor(rewards, dtype=torch.float64)
        rule.update(torch.tensor(prompts), rewards, group_advantages(rewards))
    assert rule.memory["right"].tolist() == pytest.approx([rule.decay * 2 + 4, 0, 0])
    assert rule.memory["wrong"].tolist() == pytest.approx([rule.decay * 2, 4, 0])
    rewards = torch.tensor([[-1.0, 2.0, 0.5, 0.0]]).double()
    with pytest.warns(UserWarning, match="below 0 as 0"):
        rule.update(torch.tensor([2]), rewards, group_advantages(rewards))
    assert rule.memory["right"][2] == 1.5


def test_of_prompts_that_look_useless_it_keeps_some():
    rule = dppo.RULES["dppo-proportional"](Config(prompt_prune_rate=0.99), 50)
    rule.memory["score"] = torch.tensor([0.9] * 5 + [1e-9] * 45).double()
    assert rule.prompt_probabilities()[5:].min() == rule.floor


# ==== 7. Order ====
@pytest.mark.parametrize("method", ["grpo", "dppo"])
def test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own(method, monkeypatch, tmp_path):
    [picks] = spy(monkeypatch, "pick_prompts")
    run(tmp_path, tiny_task(prompts=24), method=method, steps=12, prompts_per_step=8)
    seen = torch.cat([upcoming[:size] for (_, upcoming, *_), (size, *_) in picks[1:]])
    first, second = seen[:24].tolist(), seen[24:48].tolist()
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_a_reward_that_seeds_torch_changes_no_draw(monkeypatch, tmp_path):
    def seeding(**columns):
        torch.manual_seed(0)
        return lengths_reward(**columns)

    settings = {"steps": 8, "completion_prune_rate": 0.9, "learning_rate": 0.0}
    [draws] = spy(monkeypatch, "weigh_completions")
    for name, reward in (("plain", lengths_reward), ("seeding", seeding)):
        run(tmp_path / name, tiny_task(reward), **settings)
    for (_, plain), (_, seeded) in zip(draws[:8], draws[8:], strict=True):
        assert torch.equal(plain, seeded)


def test_the_draws_of_a_step_are_not_those_of_its_samples(monkeypatch, tmp_path):
    """Two generators with the same seed would correlate what is kept with what is sampled."""
    asked = []

    def pick_prompts(rule, upcoming, limit, generator):
        asked.append((generator.initial_seed(), torch.initial_seed()))
        return real(rule, upcoming, limit, generator)

    real = dppo.pick_prompts
    monkeypatch.setattr(dppo, "pick_prompts", pick_prompts)
    run(tmp_path, steps=4)
    own = {generator_seed for generator_seed, _ in asked[1:]}
    assert len(own) == 4
    assert not own & {global_seed for _, global_seed in asked}


def test_two_seeds_have_no_order_of_prompts_in_common():
    orders = []
    for seed, epoch in itertools.product(range(4), range(4)):
        orders.append(tuple(dppo.next_prompts(24 * epoch, 24, seed).tolist()))
    assert len(set(orders)) == 16


def test_every_step_samples_anew(monkeypatch, tmp_path):
    [updates] = spy(monkeypatch, "train_step")
    task = tiny_task(prompts=1)
    run(tmp_path, task, method="grpo", steps=2, learning_rate=0.0, temperature=3.0)
    assert updates[0][0][2] != updates[1][0][2]


# ==== 8. Rollout ====
QWEN_GENERATION = {"do_sample": True, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5}
QWEN_GENERATION |= {"min_p": 0.2, "no_repeat_ngram_size": 1, "eos_token_id": [1, 12]}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_have_the_probabilities_that_are_trained_whatever_the_model_s_defaults(temperature):
    task, prompt, draws = tiny_task(), [5, 4, 3, 7], 8000
    task.model = tiny_model(torch.float32, vocab_size=80, initializer_range=0.1)  # top_k is 50
    own = transformers.GenerationConfig(**QWEN_GENERATION)
    task.model.generation_config = own
    config = Config(temperature=temperature, max_completion_tokens=1)
    torch.manual_seed(0)
    sequences = dppo.rollout(task, [{"prompt_ids": prompt}], draws, config)
    counts = torch.bincount(torch.tensor([ids for _, ids in sequences]).flatten(), minlength=80)
    trained = dppo.frozen_logprobs(
        task.model, [(prompt, [t]) for t in range(80)], range(80), config
    )
    expected = draws * torch.cat(list(trained.values())).exp()
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 131  # of 79 degrees of freedom: p = 2e-4
    assert task.model.generation_config is own


def test_completions_end_with_the_first_of_several_end_ids_or_at_the_limit():
    task = tiny_task()
    task.model.generation_config = transformers.GenerationConfig(**QWEN_GENERATION)
    assert task.end_ids() == [1, 12]
    lengths, ends = set(), set()
    for _, completion in dppo.rollout(task, task.train[:6], 20, Config(max_completion_tokens=9)):
        assert not {1, 12} & set(completion[:-1])
        if completion[-1] in (1, 12):
            lengths.add(len(completion))
            ends.add(completion[-1])
        else:
            assert len(completion) == 9
    assert len(lengths) > 3
    assert ends == {1, 12}
    task.model.generation_config.eos_token_id = 12
    assert task.end_ids() == [1, 12]  # the tokenizer's own is 1


def test_a_prompt_of_a_single_token_is_completed():
    _, completion = dppo.rollout(tiny_task(), [{"prompt_ids": [5]}], 1, Config())[0]
    assert completion


def test_rollouts_are_split_and_keep_the_order_of_their_prompts(monkeypatch):
    task, sizes = tiny_task(), []

    def generate(task, prompts, samples, config):
        sizes.append(len(prompts) * samples)
        sequences = []
        for prompt in prompts:
            sequences += [(prompt, [len(prompt)])] * samples
        return sequences, None

    monkeypatch.setattr(dppo, "generate", generate)
    sequences = dppo.rollout(task, task.train, 3, Config(rollout_batch_size=10))
    assert sizes == [9] * 5 + [3]
    assert [prompt for prompt, _ in sequences[::3]] == [e["prompt_ids"] for e in task.train]
    assert all(completion == [len(prompt)] for prompt, completion in sequences)


def architecture(name, **more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4}
    sizes |= {"max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 1}
    model = getattr(transformers, name)
    return model(model.config_class(**sizes | more)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Gemma3ForCausalLM"])
def test_models_that_sample_as_they_are_trained_are_accepted_up_to_their_last_position(name, dtype):
    task = tiny_task(model=architecture(name, sliding_window=8).to(dtype))
    dppo.check_sampling(task, Config())
    for example in task.train:
        example["prompt_ids"] = (example["prompt_ids"] * 9)[:26]
    dppo.check_sampling(task, Config(max_completion_tokens=6))  # of 32 positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, more, reason",
    [
        ("GraniteForCausalLM", {"logits_scaling": 1.1}, "scales or caps"),
        ("OPTForCausalLM", {"init_std": 0.4}, "differ by"),  # ignores position ids
    ],
)
def test_models_that_do_not_sample_as_they_are_trained_are_refused(name, more, reason, dtype):
    task = tiny_task(model=architecture(name, **more).to(dtype))
    with pytest.raises(ValueError, match=f"{name} cannot be trained here: .*{reason}"):
        dppo.check_sampling(task, Config())


def test_a_head_that_rounds_otherwise_is_accepted():
    """As mixtures of experts in bfloat16 do, where one rounding is 0.005."""
    task = tiny_task()
    real = task.model.forward

    @wraps(real)
    def forward(*arguments, **options):
        output = real(*arguments, **options)
        output.logits = output.logits + 0.005 * output.logits.abs().max()
        return output

    task.model.forward = forward
    dppo.check_sampling(task, Config())


@pytest.mark.parametrize("change", ["temperature", "leak between sequences", "NaN"])
def test_a_difference_between_sampling_and_training_is_noticed(change, monkeypatch):
    task, real = tiny_task(), dppo.completion_logprobs

    def changed(model, sequences, slots, temperature):
        if change == "temperature":
            temperature *= 1.2
        logprobs, entropies = real(model, sequences, slots, temperature)
        if change == "NaN":
            logprobs[0, 0] = math.nan
        elif change != "temperature" and len(slots[0]) > 4:
            logprobs[:, ::2] += 0.01
            logprobs[:, 1::2] -= 0.01
        return logprobs, entropies

    dppo.check_sampling(task, Config())
    monkeypatch.setattr(dppo, "completion_logprobs", changed)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot be trained here: .*differ by"):
        dppo.check_sampling(task, Config())


# ==== 9. Rewards ====
NUMBERS = {"#### 18": 18, "so 3 + 4 = 7\n#### 1,234": 1234, "#### 1\n#### -2 and 3": -2}
NUMBERS |= {"#### $70,000.": 70000, "#### none, 4": 4, "7 ####": 7, "first 1 then 2.50.": 2.5}
NUMBERS |= {"16-3": 3, "answer: $-7": -7, "\N{MINUS SIGN}.5": -0.5, "no digits, or \u0663": None}


@pytest.mark.parametrize("text", NUMBERS)
def test_the_number_of_a_gsm8k_answer(text):
    found = dppo.gsm8k_number(text)
    assert (found if found is None else float(found)) == NUMBERS[text]


@pytest.mark.parametrize(
    "reward, completion, answer, expected",
    [
        ("gsm8k", "#### 18.0", "x\n#### 18", 1),
        ("gsm8k", "19", "18.", 0),
        ("gsm8k", "18", r"\frac{3}{18}", None),  # not an answer of this kind
        ("gsm8k", "18", None, None),
        ("gsm8k", "0", "0", 1),
        ("gsm8k", "9007199254740993", "9007199254740992", 0),
        ("exact", " ab\n", "ab", 1),
        ("exact", "b", "ab", 0),
        ("exact", "", "", None),
        ("exact", "3", 3, 1),
    ],
)
def test_rewards_compare_with_an_answer_if_there_is_one(reward, completion, answer, expected):
    text, chat = completion, [{"role": "assistant", "content": completion}]
    rewards = dppo.REWARDS[reward](["?"] * 2, [text, chat], answer=[answer] * 2, level=[1, 2])
    assert rewards == [expected] * 2


HOSTILE = ["", "9" * 5000, "1e999999", "NaN", "#### 1e9999", "\0\x1b[2J\ud800", "$" * 50_000]
HOSTILE += [
    "1," * 50_000,
    "####" * 9000,
    "-" * 9000,
    "__import__('os').abort()",
    "\u0663",
    "\u202e",
]


@pytest.mark.parametrize("reward", dppo.REWARDS)
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.text() | st.sampled_from(HOSTILE), min_size=2, max_size=2))
def test_hostile_text_gets_a_grade_or_none_and_never_raises(reward, texts):
    rewards = dppo.REWARDS[reward](["?"] * 2, texts, answer=texts[::-1])
    assert set(rewards) <= {0.0, 1.0, None}


def test_a_reward_gets_trl_s_arguments_and_may_say_none():
    task = tiny_task(mock.Mock(return_value=[None, 1, 0.5, True]))
    chat = [{"role": "user", "content": "3"}]
    examples = [
        {"prompt": "12=", "prompt_ids": [1], "answer": "12", "level": 1, "completions": "x"},
        {"prompt": chat, "prompt_ids": [2], "answer": "3", "level": 2, "completions": "y"},
    ]
    sequences = [([1], [3, 4, 1]), ([1], [5]), ([2], [6, 1]), ([2], [7, 7])]
    rewards = dppo.reward_completions(task, examples, sequences)
    assert rewards.nan_to_num(-1).tolist() == [[-1.0, 1.0], [0.5, 1.0]]
    arguments = task.reward.call_args.kwargs
    assert arguments["prompts"] == ["12=", "12=", chat, chat]
    assistant = [[{"role": "assistant", "content": text}] for text in ("3", "44")]
    assert arguments["completions"] == ["01", "2", *assistant]
    assert arguments["answer"] == ["12", "12", "3", "3"]
    assert arguments["level"] == [1, 1, 2, 2]


# ==== 10 and 11. Tasks and data ====
def short(prompts, completions, **columns):
    """A reward, as somebody might plug one in. Those that follow are wrong."""
    return [float(len(completion) < 4) for completion in completions]


def two_values(**columns):
    return [0.0, 0.0]


def nothing(**columns):
    pass


def words(prompts, **columns):
    return ["good"] * len(prompts)


def none_if_empty(completions, **columns):
    return [float(len(completion)) or None for completion in completions]


def mistaken(completions, **columns):
    return [int(completion) for completion in completions]


def save_model(model, path, chat_template=None):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    for part in (model, tokenizer):
        part.save_pretrained(path)
    return path


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_summary(out):
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model with random weights and a dataset, as users have them."""
    folder = tmp_path_factory.mktemp("user")
    save_model(tiny_model(torch.float32), folder / "model")
    rows = [{"question": f"{a}=", "answer": f"#### {a}"} for a in range(100, 180)]
    write_rows(folder / "data.jsonl", rows)
    return folder


@pytest.fixture
def main(monkeypatch, tmp_path):
    """The command line, as it is called with some arguments in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["dppo.py", *map(str, arguments)])
        dppo.main()

    return command


@pytest.fixture
def refusal(main, capsys):
    """What the command line prints where it refuses: one line, with exit status 2."""

    def told(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(*arguments)
        assert exit_.value.code == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert len(line) < 480
        return line

    return told


@pytest.fixture
def no_model(monkeypatch):
    """Makes a test fail where a model is loaded."""
    monkeypatch.setattr(dppo, "warm_started", None)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--prompt_prune_rate 1", "--prompt_prune_rate 1.0 must"),
        ("--beta nan", "--beta nan must"),
        ("--group_size 1", "--group_size 1 must be at least 2"),
        ("--gradient_checkpointing 2", "must be from 0 to 1"),
        ("--rollout_batch_size 7", "--rollout_batch_size 7 has no room for --group_size 8"),
        ("--rollout_batch_size 9 --eval_samples 10", "has no room for --eval_samples 10"),
        ("--method dpo", "--method dpo: not one of "),
        ("--method math:nothing", "has no attribute 'nothing'"),
        ("--objective ppo", "--objective ppo: not one of "),
        ("--chat_template_kwargs {", "--chat_template_kwargs { is no JSON object"),
        ("--chat_template_kwargs []", "--chat_template_kwargs [] is no JSON object"),
        ("--learning_rate much", "invalid float value"),
        ("--dataset x", "--model or --dataset is missing"),
        ("--model ./no --dataset x", "--model ./no: no such folder"),
        ("--reward test_dppo:two_values", "list of 100 finite numbers or None, not 2 values"),
        ("--reward test_dppo:nothing", "list of 100 finite numbers or None, not None"),
        ("--reward test_dppo:words", "or None, not ['good', 'good'"),
        ("--reward math:pi", "--reward math:pi cannot be called"),
        ("--output_dir {run}", "--output_dir {run} is not empty"),
        ("--output_dir {run}/metrics.jsonl/x", "Not a directory"),
        ("--resume {run}", "{run}/checkpoint.pt cannot be read: [Errno 2] No such file"),
        ("--history {run}/x", "{run}/x/checkpoint.pt cannot be read: [Errno 2] No such file"),
        ("--resume x", "x/config.json"),
        ("--resume {run} --output_dir x", "leave out --output_dir"),
    ],
)
def test_bad_settings_are_told_in_one_line(arguments, message, refusal, no_model, tmp_path):
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / name).write_text("{}\n")
    arguments = arguments.replace("{run}", str(tmp_path)).split()
    told = refusal(*arguments)
    assert message.replace("{run}", str(tmp_path)) in told
    assert "goes on with a run" not in told
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    assert not list(tmp_path.glob("runs/*"))


def test_a_reward_that_fails_is_a_traceback_that_names_the_user_s_line(main):
    with pytest.raises(RuntimeError) as failure:
        main("--reward", "test_dppo:mistaken")
    assert failure.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_name == "mistaken"


def test_numbers_that_would_train_on_nonsense_are_refused():
    for option in fields(Config):
        value = getattr(Config(), option.name)
        if isinstance(value, (int, float)):
            for nonsense in (-1, math.nan, math.inf):
                with pytest.raises(ValueError, match=f"^--{option.name} "):
                    Config(**{option.name: nonsense})


GOOD = [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 120)]


@pytest.mark.parametrize(
    "rows, arguments, message",
    [
        ([], "", "data.jsonl is empty"),
        ('{"question": "1=", "answer": "1"}\n{"question": "2=', "", "data.jsonl cannot be read"),
        ([{"question": "1", "answer": "B"}], "", "--reward gsm8k grades none of 1 answers"),
        ([{"text": "1", "label": "2"}], "", "data.jsonl has no prompt column (looked for prompt, "),
        (
            [{"prompt": "1", "label": "2"}],
            "",
            "data.jsonl has no answer column (looked for answer, ",
        ),
        ([{"prompt": "1", "label": "2"}], "", "; has prompt, label): name it with --answer_column"),
        (GOOD[:1] * 9, "", "with 1 rows held out, no prompt is left"),
        ([{"prompt": [{"role": "user", "content": "1"}], "answer": "1"}], "", "no chat template"),
        (GOOD, "--max_prompt_tokens 3", "0 of 20 prompts are within --max_prompt_tokens 3"),
        (GOOD, "--eval_dataset data.jsonl:x:y:z", "data.jsonl:x:y:z cannot be read"),
        (GOOD, "--dataset nowhere.jsonl", "nowhere.jsonl cannot be read"),
        (GOOD, "--max_completion_tokens 253", "may take 257 tokens, but the model has 256"),
        (GOOD, "--eval_dataset {long}:train", "tokens, but the model has 256"),
        ([{"question": 12, "answer": "1"}], "", "must be a text or a list of messages, not 12"),
    ],
)
def test_bad_data_is_told_in_one_line(
    rows, arguments, message, folder, refusal, no_model, tmp_path
):
    data = tmp_path / "data.jsonl"
    data.write_text(rows) if isinstance(rows, str) else write_rows(data, rows)
    long = write_rows(tmp_path / "long.jsonl", [{"question": "1" * 250, "answer": "1"}])
    user = ["--model", folder / "model", "--dataset", data, "--max_completion_tokens", 8]
    assert message in refusal(*user, *arguments.replace("{long}", long).split())


@pytest.mark.parametrize(
    "name, more, message",
    [("OPTForCausalLM", {"init_std": 0.4}, "differ by"), ("Gemma2ForCausalLM", {}, "attention")],
)
def test_models_that_cannot_be_trained_are_told(name, more, message, folder, refusal, tmp_path):
    model = save_model(architecture(name, **more), tmp_path)
    user = ["--model", model, "--dataset", folder / "data.jsonl", "--max_completion_tokens", 8]
    assert message in refusal(*user)


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}="
    "{% if enable_thinking is defined and not enable_thinking %}0{% endif %}{% endif %}"
)


def test_examples_have_the_dataset_s_columns_and_long_prompts_are_left_out(tmp_path, capsys):
    rows = [{"solution": "4", "answer": "3", "level": 5} for _ in range(4)]
    for row, text in zip(rows, ("12", "1" * 20, None, "")):
        row["question"] = text
    data = write_rows(tmp_path / "a.jsonl", rows)
    config = Config(model="x", dataset=data, max_prompt_tokens=20, system_prompt="7")
    [example] = dppo.load_examples(data, "train", config, tiny_tokenizer())
    assert (example["prompt"], example["answer"], example["level"]) == ("7\n\n12", "3", 5)
    assert example["solution"] == "3"  # our rewards take what was named
    assert example["prompt_ids"] == tiny_tokenizer().encode("7\n\n12")
    assert "1 of 4 prompts" in capsys.readouterr().out
    config.max_prompt_tokens = len(example["prompt_ids"])  # just long enough
    assert dppo.load_examples(data, "train", config, tiny_tokenizer()) == [example]


def test_a_reward_of_one_s_own_gets_the_columns_as_they_are_and_no_answer_if_there_is_none(
    tmp_path,
):
    data = str(tmp_path / "a.csv")
    row = {"prompt": "1=", "answer": "one", "solution": "", "level": "007"}
    datasets.Dataset.from_list([row]).to_csv(data)
    settings = {"model": "x", "dataset": data, "reward": "test_dppo:short"}
    for column in ("level", "solution,answer"):
        config = Config(**settings, answer_column=column)
        [example] = dppo.load_examples(data, "train", config, tiny_tokenizer())
        assert example == row | {"prompt_ids": tiny_tokenizer().encode("1=")}
    with pytest.raises(ValueError, match="a.csv has no answer column .looked for label; has"):
        config = Config(**settings, answer_column="label")
        dppo.load_examples(data, "train", config, tiny_tokenizer())
    rows = write_rows(tmp_path / "b.jsonl", [{"prompt": "1=", "label": 3}])
    [example] = dppo.load_examples(rows, "train", Config(**settings), tiny_tokenizer())
    assert example.keys() == {"prompt", "prompt_ids", "label"}
    config = Config(**settings, answer_column="label")
    [example] = dppo.load_examples(rows, "train", config, tiny_tokenizer())
    assert (example["answer"], example["solution"]) == (3, 3)


@pytest.mark.parametrize(
    "slice_, numbers",
    [("train", range(9)), ("train[6:]", [6, 7, 8]), ("train[:2]+train[-1:]", [0, 1, 8])],
)
def test_a_split_may_be_a_slice(slice_, numbers, monkeypatch, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": f"{i}="} for i in range(9)])
    rows.to_parquet(tmp_path / "a.parquet")
    config = Config(model="x", dataset="x", reward="test_dppo:short")
    spec = f"{tmp_path / 'a.parquet'}:{slice_}"
    examples = dppo.load_examples(spec, "test", config, tiny_tokenizer())
    assert sorted(example["prompt"] for example in examples) == [f"{i}=" for i in numbers]
    load = mock.Mock(return_value=rows)
    monkeypatch.setattr(datasets, "load_dataset", load)
    dppo.load_examples(f"openai/gsm8k:main:{slice_}", "test", config, tiny_tokenizer())
    assert load.call_args.args == ("openai/gsm8k", "main")
    assert load.call_args.kwargs["split"] == slice_


def test_chat_templates_nested_answers_and_several_evaluation_sets(tmp_path):
    user = {"role": "user", "content": "12"}
    row = {"prompt": [{"role": "system", "content": "88"}, user]}
    row["reward_model"] = {"ground_truth": "21", "style": "rule"}  # as verl has it
    verl = str(tmp_path / "verl.parquet")
    datasets.Dataset.from_list([row] * 6).to_parquet(verl)
    text = write_rows(tmp_path / "text.jsonl", [{"problem": "34", "answer": "43"}] * 3)
    model = save_model(tiny_model(torch.float32), tmp_path / "model", CHAT_TEMPLATE)
    config = Config(model=str(model), dataset=verl, eval_dataset=f"{verl}:train,{text}")
    config.max_completion_tokens, config.eval_prompts = 8, 5
    config.system_prompt, config.chat_template_kwargs = "9", '{"enable_thinking": false}'
    task = dppo.load_task(config)
    assert task.train[0]["prompt"] == [{"role": "system", "content": "9"}, user]
    assert task.tokenizer.decode(task.train[0]["prompt_ids"]) == "912=0"
    assert task.train[0]["answer"] == "21"
    assert {name: len(examples) for name, examples in task.evals.items()} == {
        f"{verl}:train": 5,
        text: 3,
    }
    assert task.evals[text][0]["prompt"][1] == {"role": "user", "content": "34"}
    config.system_prompt = ""
    assert dppo.load_examples(verl, "train", config, task.tokenizer)[0]["prompt"] == row["prompt"]


def test_evaluation_sets_are_read_from_the_split_test_unless_they_name_another(monkeypatch):
    rows = datasets.Dataset.from_list(GOOD)
    load = mock.Mock(return_value=rows)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tiny_tokenizer()
    )
    dppo.user_data(Config(model="x", dataset="a", eval_dataset="b,c:val"))
    splits = [call.kwargs["split"] for call in load.call_args_list]
    assert splits == ["train", "test", "val"]


@pytest.mark.parametrize("eval_prompts, held_out", [(10, 10), (256, 16), (0, 0)])
def test_without_evaluation_sets_at_most_a_fifth_is_held_out(eval_prompts, held_out, folder):
    model, data = str(folder / "model"), str(folder / "data.jsonl")
    config = Config(model=model, dataset=data, eval_prompts=eval_prompts)
    train, evals, _ = dppo.user_data(config)
    questions = [example["question"] for example in train]
    others = [example["question"] for example in evals["held out"]]
    assert len(others) == held_out
    assert len(set(questions + others)) == len(questions + others) == 80
    assert questions != sorted(questions)  # shuffled


def test_what_is_held_out_is_not_trained_on_and_other_overlap_is_told(folder, tmp_path, capsys):
    rows = [{"question": f"{a % 30}=", "answer": f"{a}"} for a in range(90)]
    data = write_rows(tmp_path / "a.jsonl", rows)
    config = Config(model=str(folder / "model"), dataset=data, eval_prompts=10)
    train, evals, _ = dppo.user_data(config)
    trained = {example["question"] for example in train}
    held_out = {example["question"] for example in evals["held out"]}
    assert len(evals["held out"]) == 10
    assert not trained & held_out
    assert len(trained | held_out) == 30
    assert "are trained on" not in capsys.readouterr().out
    other = write_rows(tmp_path / "b.jsonl", [*rows[:4], {"question": "77=", "answer": "1"}])
    config.eval_dataset = f"{other}:train"
    dppo.user_data(config)
    assert f"{other}:train: 4 of its 5 prompts are trained on, too" in capsys.readouterr().out


def test_the_positions_of_longrope_end_where_it_changes(folder, refusal, no_model, tmp_path):
    model = shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    config["rope_parameters"] |= {"rope_theta": 1e4, "short_factor": [1.0] * 4}
    config["rope_parameters"] |= {"long_factor": [2.0] * 4}
    (model / "config.json").write_text(json.dumps(config))
    user = ["--model", model, "--dataset", folder / "data.jsonl", "--max_completion_tokens"]
    assert "may take 17 tokens, but the model has 16 positions" in refusal(*user, 13)


def test_rule_reward_model_and_data_may_be_one_s_own(folder, main, tmp_path, capsys):
    data, out = str(folder / "data.jsonl"), tmp_path / "run"
    settings = {"model": folder / "model", "dataset": data, "eval_dataset": f"{data}:train"}
    settings |= {"method": "test_dppo:KeepLargest", "reward": "test_dppo:short", "steps": 4}
    settings |= {"prompts_per_step": 8, "max_completion_tokens": 6, "output_dir": out}
    settings |= {"eval_prompts": 5}
    main(*options(settings))
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"results are in {out}")
    memory = torch.load(out / "checkpoint.pt", weights_only=True)["memory"]
    assert memory["visits"].sum() == 4 * 8
    records = read_lines(out / "metrics.jsonl")
    assert all(0 < record["completions_trained"] < 64 for record in records)
    summary = read_summary(out)
    assert summary["after"][f"{data}:train"]["prompts"] == 5
    own = transformers.GenerationConfig.from_pretrained(out / "model")
    assert own.top_k != 0  # the model's own, and not that of the rollouts


def test_a_reward_of_one_s_own_need_not_grade_empty_completions(folder, capsys):
    settings = {"model": str(folder / "model"), "dataset": str(folder / "data.jsonl")}
    dppo.load_task(Config(**settings, reward="test_dppo:none_if_empty", max_completion_tokens=8))
    assert "grades none of 64 answers in the training data, as far" in capsys.readouterr().out


def options(settings):
    return itertools.chain(*((f"--{name}", value) for name, value in settings.items()))


# ==== 12. The embedded task ====
@pytest.mark.parametrize("eval_prompts", [0, 2, 61])
def test_the_embedded_task_has_its_classes_and_holds_out_as_many_of_each(eval_prompts):
    train, evals, _ = dppo.sorting_data(Config(eval_prompts=eval_prompts))
    prompts = {example["prompt"] for example in train}
    for name, (size, low, high) in dppo.SORTING.items():
        of_class = [example for example in train if low <= len(example["answer"]) <= high]
        assert len(of_class) == size
        assert len(evals[name]) == eval_prompts // 3
        assert not prompts & {example["prompt"] for example in evals[name]}
        for example in of_class + evals[name]:
            assert sorted(example["prompt"]) == [*example["answer"], "="]


def test_the_data_depends_neither_on_the_seed_nor_training_on_how_many_are_held_out(folder):
    def data(**settings):
        train, evals, _ = dppo.sorting_data(Config(**settings))
        return train, evals

    assert data(seed=0) == data(seed=1)
    assert data(eval_prompts=30)[0] == data(eval_prompts=60)[0]
    user = {"model": str(folder / "model"), "dataset": str(folder / "data.jsonl")}
    train, evals, _ = dppo.user_data(Config(seed=0, **user))
    assert dppo.user_data(Config(seed=1, **user))[:2] == (train, evals)


@pytest.mark.parametrize("trouble", ["damaged", "no folder"])
def test_a_starting_model_that_cannot_be_kept_or_read_is_made_anew(trouble, monkeypatch, tmp_path):
    def train_step(model, *_):
        model.lm_head.weight.data += 1

    monkeypatch.setattr(dppo, "train_step", train_step)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    if trouble == "no folder":
        (tmp_path / "dppo").write_text("")  # a file of this name
        first = dppo.warm_started(tokenizer)
    else:
        first = dppo.warm_started(tokenizer)
        [kept] = (tmp_path / "dppo").iterdir()
        kept.write_bytes(kept.read_bytes()[:-1000])
    again = dppo.warm_started(tokenizer)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)


def test_first_runs_make_the_same_whole_model_and_later_ones_take_it(tmp_path, monkeypatch):
    def train_step(model, optimizer, sequences, *_):
        files = [path for path in cache.rglob("*") if path.is_file()]
        assert not files  # nothing half done is visible
        model.lm_head.weight.data += sum(sequences[0][1])

    monkeypatch.setattr(dppo, "train_step", train_step)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    models = []
    for cache in (tmp_path / "one", tmp_path / "two", tmp_path / "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        models.append(dppo.warm_started(tokenizer).lm_head.weight)
        assert len([path for path in cache.rglob("*") if path.is_file()]) == 1
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[1], models[2])


# ==== 13. Runs ====
TIMES = {"cumulative_seconds", "rollout_seconds", "train_seconds", "evaluation_seconds"}
ASIDE = TIMES | {"peak_memory_gb", "evaluation"}


def metrics(out):
    """The records of a run, but for what differs between two runs that are the same."""
    records = read_lines(out / "metrics.jsonl")
    for record in records:
        for name in ASIDE & record.keys():
            del record[name]
    return records


def test_help_has_every_setting_and_no_default_that_says_none(main, capsys):
    with pytest.raises(SystemExit):
        main("--help")
    text = capsys.readouterr().out
    assert re.findall(r"^  --(\w+)", text, re.MULTILINE) == [
        option.name for option in fields(Config)
    ]
    assert "None" not in text
    first, _, usage, *_ = text.splitlines()
    assert first == dppo.__doc__.splitlines()[0]
    assert usage == "usage: python dppo.py [--setting value] ..."


def test_gradient_checkpointing_needs_no_number():
    parser = dppo.make_parser()
    for arguments, value in (([], 0), (["--gradient_checkpointing"], 1)):
        assert parser.parse_args(arguments).gradient_checkpointing == value


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "dppo-proportional", "objective": "dapo", "inner_epochs": 2},
        {"method": "grpo", "objective": "dr_grpo"},
        {"method": "dppo", "objective": "gspo", "beta": 0.05},
    ],
)
def test_a_seed_gives_the_same_metrics_however_often_one_evaluates(settings, tmp_path):
    settings |= {"steps": 6, "prompts_per_step": 4}
    run(tmp_path / "first", seed=4, **settings)
    run(tmp_path / "again", seed=4, eval_every=2, **settings)
    run(tmp_path / "other", seed=5, **settings)
    assert metrics(tmp_path / "first") == metrics(tmp_path / "again")
    assert metrics(tmp_path / "first") != metrics(tmp_path / "other")
    records = read_lines(tmp_path / "again" / "metrics.jsonl")
    assert [record["step"] for record in records if "evaluation" in record] == [2, 4, 6]


def test_an_evaluation_is_the_same_each_time_and_not_made_twice(monkeypatch, tmp_path):
    [evaluations] = spy(monkeypatch, "evaluate")
    summary = run(tmp_path / "one", steps=4, eval_every=2, learning_rate=0.0)
    assert [result for _, result in evaluations] == [summary["before"]] * 3
    assert summary["after"] == summary["before"]
    run(tmp_path / "two", steps=5, eval_every=2)
    assert len(evaluations) == 3 + 4  # before, after steps 2 and 4, and at the end


def test_evaluations_average_over_prompts_and_are_null_where_nothing_is_graded(tmp_path, capsys):
    graded = iter([[1, 0, 0, 0], [1, 1, 0, None, 1, 0], [None] * 2])
    task = tiny_task(lambda prompts, **_: next(graded, [None] * len(prompts)))
    task.evals = {"one": task.train[:2], "two": task.train[:3], "three": task.train[:1]}
    result = dppo.evaluate(task, Config(eval_samples=2), dppo.Progress())
    assert result["accuracy"] == 4 / 8
    assert result["one"] == {"prompts": 2, "avg@2": 0.25, "pass@2": 0.5}
    assert result["two"] == {"prompts": 2, "avg@2": 0.75, "pass@2": 1.0}
    assert result["three"] == {"prompts": 0, "avg@2": None, "pass@2": None}
    run(tmp_path, task, steps=1)
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["after"]["accuracy"] is None


def test_records_estimate_means_over_the_window_and_samples_hold_a_group_that_is_trained():
    task = tiny_task()
    task.model.generation_config.eos_token_id = [7, 12]
    task.tokenizer.eos_token = None
    sequences = [([], ids) for ids in ([5, 6, 12], [12], [5, 6], [5, 12], [5] * 4, [5] * 5 + [7])]
    step = SimpleNamespace(N=5, sequences=sequences, examples=task.train[:3])
    step.rewards = torch.tensor([[1, 0], [1, 1], [math.nan, 1]], dtype=torch.float64)
    step.advantages = step.rewards - 1
    step.prompt_weights = torch.tensor([2.0, 1.0, 1.0]).double()
    step.weights = torch.tensor([[0.0, 0.0], [1.0, 3.0], [0.0, 2.0]]).double()
    step.updates = [{"kl": 1.0, "skipped": 0}, {"kl": None, "skipped": 1}, {"kl": 4, "skipped": 0}]
    progress = dppo.Progress(step=3, seen=40)
    record = dppo.step_record(progress, step, task)
    expected = {"step": 3, "prompts_seen": 5, "prompts_rolled": 3, "prompts_pruned": 2}
    expected |= {"epoch": 40 / 16, "rollouts": 6, "skipped": 1}
    expected |= {"ungradable_prompts": 1, "reward": 2 / 3, "zero_variance_fraction": 1 / 3}
    expected |= {"completion_length": 2, "truncated_fraction": 1 / 6, "weight_max": 3}
    expected |= {"effective_sample_size": 36 / 14, "kl": 5 / 2}
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    sample = dppo.sample_record(progress, step, tiny_tokenizer())
    assert sample["completions"] == ["23", "29"]
    assert sample["prompt"] == task.train[1]["prompt"]
    assert (sample["rewards"], sample["advantages"], sample["weights"]) == ([1, 1], [0, 0], [1, 3])


def test_records_count_what_was_kept_and_packed(monkeypatch, tmp_path):
    [updates] = spy(monkeypatch, "train_step")
    run(tmp_path, steps=6, completion_prune_rate=0.9)
    for (inputs, _), record in zip(updates, read_lines(tmp_path / "metrics.jsonl")):
        _, _, sequences, _, weights, *_ = inputs
        kept = [ids for (_, ids), w in zip(sequences, weights.flatten()) if w > 0]
        assert record["completions_trained"] == len(kept)
        assert record["tokens_trained"] == sum(map(len, kept))
        assert type(record["completions_trained"]) is int
        assert record.keys() >= TIMES


def test_the_summary_has_what_the_run_cost_also_if_it_was_resumed(tmp_path):
    run(tmp_path, steps=3, completion_prune_rate=0.9)
    summary = run(tmp_path, steps=5, completion_prune_rate=0.9)
    records = read_lines(tmp_path / "metrics.jsonl")
    names = ("prompts_seen", "prompts_rolled", "completions_trained")
    for name in (*names, "rollout_seconds", "train_seconds"):
        assert summary[name] == sum(record[name] for record in records)
    assert summary["prompts_rolled"] > 0
    assert summary["evaluation_seconds"] > sum(record["evaluation_seconds"] for record in records)
    assert summary["torch"] == torch.__version__
    assert summary["transformers"] == transformers.__version__


def test_the_progress_bar_has_the_means_of_the_last_steps_within_80_columns():
    record = {"reward": 0.25, "prompts_seen": 40, "prompts_pruned": 10}
    record |= {"rollouts": 80, "completions_trained": 4}
    other = record | {"reward": 0.75, "completions_trained": 28}
    text = dppo.recent_means([record, other], inner_epochs=2)
    assert text == "reward 0.50, prompts pruned 25%, trained 10%"
    place = {"n": 3000, "total": 3516, "elapsed": 35_000, "initial": 0}
    line = dppo.tqdm.format_meter(**place, postfix=text, bar_format=dppo.BAR)
    assert line.startswith("3000/3516 [") and line.endswith("trained 10%]")
    assert len(line) <= 80


def test_ten_steps_without_a_gradient_are_told_once(tmp_path, capsys):
    task = tiny_task(lambda prompts, **_: [0.0] * len(prompts))
    run(tmp_path / "nine", task, steps=9)
    assert "without a gradient" not in capsys.readouterr().out
    run(tmp_path / "thirty", task, steps=30)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "gradient" in line]
    assert "in every group, all rewards are equal" in line
    assert line.endswith("thirty/samples.jsonl shows what was rewarded")


def test_without_evaluation_sets_the_last_line_says_so(tmp_path, capsys):
    task = tiny_task()
    task.evals = {}
    run(tmp_path, task, steps=1)
    assert capsys.readouterr().out.splitlines()[-1].startswith("no evaluation in ")


def test_a_failure_in_a_step_is_a_traceback_and_records_are_kept(monkeypatch, main, tmp_path):
    rewards = iter([lengths_reward] * 4)
    task = tiny_task(lambda **columns: next(rewards)(**columns))
    monkeypatch.setattr(dppo, "load_task", lambda config: task)
    with pytest.raises(StopIteration):
        main("--steps", 8, "--prompts_per_step", 4, "--output_dir", "run")
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_out_of_memory_is_told_with_what_helps(monkeypatch, main):
    monkeypatch.setattr(dppo, "start", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(SystemExit, match="out of memory: lower --micro_batch_tokens"):
        main()


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture(scope="session", autouse=True)
def plain_command(request, tmp_path_factory):
    """Runs in the background, if its test is among those chosen: the others leave a core idle."""
    if not any("plain_command" in item.name for item in request.session.items):
        yield
        return
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, dppo.__file__, "--steps", "40", "--output_dir", folder / "run"]
    environment = ENVIRONMENT | {"XDG_CACHE_HOME": str(folder / "cache"), "TQDM_DISABLE": "1"}
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=printed, env=environment)
        yield folder, process
        process.kill()
        process.wait()


def test_slow_the_plain_command_raises_the_middle_class_and_writes_every_file(plain_command):
    folder, process = plain_command
    out = folder / "run"
    assert process.wait() == 0, (folder / "printed").read_text()[-3000:]
    assert "evaluating" not in (folder / "printed").read_text()  # TQDM_DISABLE
    line = (folder / "printed").read_text().splitlines()[-1]
    assert re.match(rf"accuracy .*, middle \d.\d\d -> \d.\d\d, .* results are in {out}$", line)
    summary = read_summary(out)
    assert summary["after"]["middle"]["avg@4"] > summary["before"]["middle"]["avg@4"] + 0.12
    files = {"metrics.jsonl", "samples.jsonl", "summary.json", "config.json", "checkpoint.pt"}
    assert set(os.listdir(out)) >= files | {"model"}
    records = read_lines(out / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 41))
    later = records[10:]
    trained = sum(record["completions_trained"] for record in later)
    rolled = sum(record["prompts_rolled"] for record in later)
    assert trained / 8 < 0.7 * rolled < 0.6 * sum(record["prompts_seen"] for record in later)
    transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    data = write_rows(folder / "a.jsonl", GOOD)
    example = dppo.load_examples(data, "train", Config(), tokenizer)[0]
    assert example["prompt_ids"][-1] == ord("=") + 3  # and not the end id


# ---- Interruptions and resuming
SMALL = {"prompts_per_step": 4, "save_every": 1, "method": "dppo-proportional", "objective": "dapo"}
SMALL |= {"steps": 10, "inner_epochs": 2, "learning_rate": 1e-3}


def assert_same_run(one, other):
    """The same weights bit for bit, and the same records and results."""
    first, second = torch.load(one / "checkpoint.pt"), torch.load(other / "checkpoint.pt")
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)
    assert metrics(one) == metrics(other)
    assert read_lines(one / "samples.jsonl") == read_lines(other / "samples.jsonl")
    first, second = read_summary(one), read_summary(other)
    assert (first["before"], first["after"]) == (second["before"], second["after"])


@pytest.mark.parametrize(
    "dtype, settings",
    [
        (torch.float32, SMALL),
        (torch.float32, {"method": "dppo", "objective": "gspo", "beta": 0.1}),
        (torch.bfloat16, {"method": "dppo", "learning_rate": 1e-4}),
    ],
)
def test_a_run_in_two_parts_is_the_run_in_one(dtype, settings, tmp_path):
    for out, steps in (("one", 8), ("two", 5), ("two", 8)):
        task = tiny_task(model=tiny_model(dtype))
        run(tmp_path / out, task, **settings | {"steps": steps, "eval_every": 3})
    assert_same_run(tmp_path / "one", tmp_path / "two")


def was_killed(out, seconds):
    """Makes a run in a process of its own, new or resumed, and kills it after so many seconds."""
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # kills, as no one handles it; 0: never
        try:
            run(out, **SMALL)
        finally:
            os._exit(not (out / "summary.json").exists())
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGALRM)
    return status != 0


def kill_often(folder):
    tiny_task()  # imports what is imported late
    start = time.perf_counter()
    assert not was_killed(folder / "whole", 0)
    duration = time.perf_counter() - start
    rng, kills = random.Random(0), 0
    while was_killed(folder / "killed", rng.uniform(0.1, 0.7) * duration):
        kills += 1
        if not (folder / "killed" / "checkpoint.pt").exists():  # it starts again
            shutil.rmtree(folder / "killed", ignore_errors=True)
    assert kills > 0
    assert_same_run(folder / "whole", folder / "killed")


def test_slow_a_run_killed_at_random_moments_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    code = f"import pathlib, test_dppo; test_dppo.kill_often(pathlib.Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)


def test_a_process_that_dies_saving_leaves_the_last_checkpoint(monkeypatch, main, capsys, tmp_path):
    monkeypatch.setattr(dppo, "load_task", lambda config: tiny_task())
    settings = SMALL | {"seed": 3, "beta": 0.1, "group_size": 4, "max_completion_tokens": 8}
    main(*options(settings), "--output_dir", tmp_path / "whole")
    real = torch.save

    def save(state, file):
        if state["progress"]["step"] == 7:
            file.write(b"half")
            raise KeyboardInterrupt
        real(state, file)

    cut = tmp_path / "cut"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(SystemExit) as exit_:
            main(*options(settings), "--output_dir", cut)
    assert exit_.value.code == 130
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"python dppo.py --resume {cut}")
    main("--resume", cut)
    assert_same_run(tmp_path / "whole", cut)
    for out in (tmp_path / "whole", cut):  # settings given beside it hold instead
        main("--resume", out, "--steps", 11, "--rollout_batch_size", 8)
        config = json.loads((out / "config.json").read_text())
        assert config.items() >= (settings | {"steps": 11, "rollout_batch_size": 8}).items()
    assert_same_run(tmp_path / "whole", cut)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["metrics", "samples"])
def test_a_run_whose_records_are_missing_or_cut_is_not_resumed_and_loses_nothing(name, tmp_path):
    run(tmp_path, steps=2)
    path = tmp_path / f"{name}.jsonl"
    lines = path.read_bytes()
    for damaged in (lines[:-1], lines.splitlines(keepends=True)[0], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        before = files_of(tmp_path)
        with pytest.raises((ValueError, FileNotFoundError), match=str(path)):
            run(tmp_path, steps=4)
        assert files_of(tmp_path) == before


def test_other_data_another_rule_or_model_is_not_resumed_and_other_settings_are(tmp_path):
    run(tmp_path, steps=2)
    before = files_of(tmp_path)
    fewer, other = tiny_task(prompts=15), tiny_task()
    other.train[3]["answer"] = "0"
    for name, task, settings in (
        ("data", fewer, {}),
        ("data", other, {}),
        ("method", None, {"method": "grpo"}),
        ("model", None, {"model": "x", "dataset": "x"}),
        ("eval_prompts", None, {"eval_prompts": 3}),
        ("temperature", None, {"temperature": 0.1}),
        ("reward", None, {"reward": "test_dppo:short"}),
        ("max_completion_tokens", None, {"max_completion_tokens": 9}),
        ("seed", None, {"seed": 1}),
    ):
        with pytest.raises(ValueError, match=f"^{tmp_path} was made with another {name}"):
            run(tmp_path, task, **settings)
    with pytest.raises(ValueError, match=f"--steps 1: {tmp_path} has made 2"):
        run(tmp_path, steps=1)
    larger = tiny_task(model=tiny_model(torch.float32, num_hidden_layers=3))
    with pytest.raises(ValueError):
        run(tmp_path, larger)
    assert files_of(tmp_path) == before
    settings = {"learning_rate": 0.1, "micro_batch_tokens": 100, "rollout_batch_size": 8}
    run(tmp_path, steps=4, **settings)
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("method", ["dppo", "dppo-proportional"])
def test_a_run_with_history_prunes_from_its_first_step_without_bias(method, tmp_path):
    settings = {"method": method, "prompts_per_step": 2, "objective": "dapo"}
    run(tmp_path / "first", tiny_task(prompts=4), steps=8, **settings)
    saved = torch.load(tmp_path / "first" / "checkpoint.pt")
    settings["history"] = str(tmp_path / "first")
    config = Config(**settings, output_dir=str(tmp_path / "second"))
    rule = dppo.start(config, tiny_task(prompts=4)).rule
    for name, memory in rule.memory.items():
        assert torch.equal(memory, saved["memory"][name])
    expectation = torch.zeros(4, dtype=torch.float64)
    for p, picked in every_result(partial(pick_prompts, rule, torch.arange(4), 2, None)):
        size, kept, weights = picked
        expectation[kept] += p * weights
    assert torch.allclose(expectation[:size], torch.ones(size).double())


def test_a_run_with_history_repeats_no_random_numbers_and_knows_the_mean_length(
    monkeypatch, tmp_path
):
    seeds = []
    monkeypatch.setattr(transformers, "set_seed", seeds.append)
    monkeypatch.setattr(dppo, "evaluate", mock.Mock(return_value={"accuracy": None}))
    task = tiny_task()
    task.evals = {}
    run(tmp_path / "first", task, steps=3)
    first = torch.load(tmp_path / "first" / "checkpoint.pt")["progress"]
    [lengths] = spy(monkeypatch, "running_length")
    for steps in (3, 4):  # made, and resumed
        run(tmp_path / "second", task, steps=steps, history=str(tmp_path / "first"))
    assert len(set(seeds)) == 3 + 4
    assert lengths[0][1] == first["mean_length"]
    assert [record["step"] for record in metrics(tmp_path / "second")] == [1, 2, 3, 4]


def test_history_of_other_prompts_or_another_rule_is_refused(tmp_path):
    run(tmp_path / "first", steps=1)
    history = str(tmp_path / "first")
    with pytest.raises(ValueError, match="was made with another data"):
        run(tmp_path / "second", tiny_task(prompts=5), history=history)
    with pytest.raises(ValueError, match="was made with another method"):
        run(tmp_path / "third", method="grpo", history=history)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "run", steps=1)
    path = tmp_path / "run" / "checkpoint.pt"

    class Payload:
        def __reduce__(self):
            return os.mkdir, ("payload-ran",)

    torch.save(torch.load(path) | {"memory": Payload()}, path)
    with pytest.raises(Exception, match="[Ww]eights.only"):
        run(tmp_path / "run", steps=2)
    assert not (tmp_path / "payload-ran").exists()


@pytest.fixture
def interrupted(main, monkeypatch, capsys, tmp_path):
    """A run of 9 steps, with one Ctrl-C or two while it rolls out its sixth -> what it prints."""

    def command(times, **settings):
        calls = itertools.count(1)

        def reward(**columns):
            if next(calls) == 1 + 6:  # the first is the evaluation
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return lengths_reward(**columns)

        monkeypatch.setattr(dppo, "load_task", lambda config: tiny_task(reward))
        settings |= {"steps": 9, "prompts_per_step": 4, "output_dir": tmp_path / "run"}
        with pytest.raises(SystemExit) as exit_:
            main(*options(settings))
        assert exit_.value.code == 130
        return capsys.readouterr().out

    yield command
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_the_first_ctrl_c_ends_the_run_after_its_step_and_nothing_is_lost(
    interrupted, main, capsys, tmp_path
):
    told = interrupted(times=1)
    folder = tmp_path / "run"
    assert told.splitlines()[-2:] == [
        "stopped; steps 1 to 6 are kept",
        f"go on with: python dppo.py --resume {folder}",
    ]
    main("--resume", folder)
    assert f"{folder}: goes on after step 6 of 9" in capsys.readouterr().out
    assert [record["step"] for record in metrics(folder)] == list(range(1, 10))


@pytest.mark.parametrize(
    "save_every, told",
    [(4, "stopped; steps 1 to 4 are kept"), (0, "stopped before the first checkpoint, so")],
)
def test_the_second_ctrl_c_stops_at_once_and_tells_what_is_kept(save_every, told, interrupted):
    assert told in interrupted(times=2, save_every=save_every)


def test_ctrl_c_while_a_run_is_loaded_tells_the_same_command(main, monkeypatch, capsys, tmp_path):
    run(tmp_path / "run", steps=2)
    monkeypatch.setattr(dppo, "load_task", mock.Mock(side_effect=KeyboardInterrupt))
    for arguments, told in (
        (["--resume", tmp_path / "run"], f"python dppo.py --resume {tmp_path / 'run'}"),
        (["--output_dir", "new"], "stopped before the first checkpoint, so that it cannot go on"),
    ):
        with pytest.raises(SystemExit):
            main(*arguments)
        assert capsys.readouterr().out.splitlines()[-1].endswith(told)
    assert not (tmp_path / "new").exists()


def test_a_second_run_in_the_same_folder_is_refused(monkeypatch, tmp_path):
    def load_task(config):
        with pytest.raises(ValueError, match="is not empty$"):
            dppo.start(config, task)
        with pytest.raises(FileExistsError), monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", lambda folder: iter([]))  # both look at once
            dppo.start(config, task)
        return task

    task = tiny_task()
    monkeypatch.setattr(dppo, "load_task", load_task)
    config = Config(output_dir=str(tmp_path / "run"), max_completion_tokens=8, steps=1)
    dppo.train(dppo.start(config))
    with pytest.raises(ValueError, match=f"; --resume {tmp_path / 'run'} goes on with a run"):
        dppo.start(config, task)


def test_records_reach_the_disk_before_the_checkpoint_and_checkpoints_are_mapped(
    monkeypatch, tmp_path
):
    run(tmp_path, steps=1)
    written = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: written.append(os.fstat(file).st_ino) or real(file)
    )
    load = mock.Mock(wraps=torch.load)
    monkeypatch.setattr(torch, "load", load)
    run(tmp_path, steps=2)
    names = ("metrics.jsonl", "samples.jsonl", "checkpoint.pt")
    assert written == [(tmp_path / name).stat().st_ino for name in names]
    assert load.call_args.kwargs["mmap"]


def test_a_damaged_checkpoint_is_named(tmp_path):
    run(tmp_path, steps=1)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"^{path} cannot be read"):
        run(tmp_path, steps=2)
