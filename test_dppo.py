"""A proof that dppo.py prunes without bias, and then its other guarantees: python -m pytest -q

THEOREM. Let everything of a step be given but what is pruned: the policy theta, an unbiased rule
and its memory, the order of the prompts, the completions of the N candidates and, for dapo, the
mean length of earlier steps. (A pruned prompt has no completions. Those given for it are what it
would have had, of the same distribution, if it had been kept.) Then the loss L_hat that is trained
has, on average over the draws of prompts and completions to keep, the gradient of the full loss L,
the mean of l_i over all N G completions: E[grad L_hat] = grad L.

PROOF. Each step has its test, in this order; step 1 has two.

  1. Each weight w_i = w_q w_qi has expectation 1, unless l_i has no gradient.
  2. The gradient of train_step is linear in the shares: it is sum_i share_i h_i, where h_i is the
     gradient of the sum of the token losses of completion i alone.
  3. Token losses and Z are the formulas of the objective: l_i is 1/Z_i times that sum.
  4. Packing changes neither log-probabilities nor gradients.
  5. dppo_step trains completion i on its advantage in its whole group and with share_i = w_i/(N G
     Z_i), and draws completions anew for every update.
  6. Hence E[grad L_hat] = sum_i E[w_i] h_i/(N G Z_i) = grad L. A small Qwen3 shows it: the gradient
     of dppo_step itself, averaged over every outcome of both draws, is that of the full batch.

Then come six ways to lose unbiasedness, of which dppo.py refuses the third. Not proven: that random
numbers are random, and draws independent; that a rollout has the same distribution whichever other
prompts survive; anything about the update, as Adam and clipping the norm are not linear; and
updates after the first on one rollout, for which prompts cannot be drawn anew.
"""

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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import pytest
import tokenizers
import torch
import transformers
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dppo
from dppo import Config, Sequence, Task, draw, group_advantages, prune_completions, prune_prompts

torch.set_num_threads(1)  # the tensors are so small that more threads would wait for each other

# ==== The proof ====
# Six prompts with three completions each. The second was never visited, so it has no score. In the
# fifth, a reward is missing, so A = 0. The last, whose rewards are equal, lies outside the windows.
SCORES = torch.tensor([0.1, math.nan, 0.2, 0.3, 0.6, 0.9], dtype=torch.float64)
REWARDS = [[1, 0, 0], [1, 0.7, 0.2], [0, 0.9, 1], [0, 0, 1], [math.nan, 1, 0], [1, 1, 1]]
REWARDS = torch.tensor(REWARDS, dtype=torch.float64)
ADVANTAGES = group_advantages(REWARDS)
LIMIT, G = 3, 3
PAPER, OURS, OWN = "dppo", "dppo-proportional", "test_dppo:OwnRule"


class OwnRule(dppo.Rule):
    """As somebody might write one: any probabilities that are known before the draw."""

    def prompt_probabilities(self):
        return torch.tensor([0.25, 0.5, 0.75, 0.5, 1.0, 0.5])

    def completion_probabilities(self, advantages, prompt_weights):
        return torch.where(advantages < 0, 0.3, 1.0)


def rule_with_history(method=PAPER, r_q=0.7, r_o=0.7, beta=0.0):
    rates = {"prompt_prune_rate": r_q, "completion_prune_rate": r_o}
    config = Config(method=method, beta=beta, group_size=G, **rates)
    rule = config.rule(config, len(SCORES))
    rule.memory["score"] = SCORES.clone()
    return rule


def every_draw(pi):
    """All outcomes of draw(pi) -> [(probability, (n,) weights)], by running it along every order,
    with one u between any two places where an outcome changes, which are the ends of items modulo
    1. Items with pi of 0 or 1 shift the others by whole numbers only."""
    fixed = [i for i in range(len(pi)) if pi[i] in (0, 1)]
    orders = list(itertools.permutations(set(range(len(pi))) - set(fixed)))
    outcomes = Counter()
    for order in orders:
        order = torch.tensor([*order, *fixed]).long()
        ends = (pi[order].cumsum(0) % 1).tolist()
        for low, high in itertools.pairwise(sorted({0.0, 1.0, *ends})):
            u = torch.tensor([(low + high) / 2], dtype=torch.float64)
            numbers = {"randperm": mock.Mock(return_value=order), "rand": mock.Mock(return_value=u)}
            with mock.patch.multiple(torch, **numbers):
                weights = draw(pi, None)
            outcomes[tuple(weights.tolist())] += (high - low) / len(orders)
    certain = {w: p for w, p in outcomes.items() if p > 1e-11}  # less happens by rounding only
    return [(p, torch.tensor(w, dtype=pi.dtype)) for w, p in certain.items()]


def every_result(function):
    """All outcomes of a function, however often it draws -> [(probability, result)]. It is run from
    its beginning on a sequence of outcomes; where it draws once more, that gives longer ones."""
    results, paths = [], [(1.0, [])]
    for probability, path in paths:
        try:
            with mock.patch.object(dppo, "draw", side_effect=[*path, EOFError]) as scripted:
                results.append((probability, function()))
        except EOFError:
            pi, _ = scripted.call_args.args
            paths += [(probability * p, [*path, weights]) for p, weights in every_draw(pi)]
    return results


def every_weight(*settings, **more):
    """All outcomes of both levels, for a rule with these settings -> [(probability, (N, (N, G)
    weights w_q w_qi))], as dppo_step forms them."""
    rule = rule_with_history(*settings, **more)

    def both_levels():
        N, prompts, w_q = prune_prompts(rule, torch.arange(6), LIMIT, None)
        w = torch.zeros(N, G).double()
        w[prompts] = w_q[:, None] * prune_completions(rule, ADVANTAGES[prompts], w_q, None)
        return N, w

    return every_result(both_levels)


@pytest.mark.parametrize("pi", [[0.5] * 4, [0.4] * 5 + [1.0], [0.3, 0.9, 0.2, 0.05], [0, 0.5, 0.2]])
def test_draw_keeps_each_item_with_its_own_probability(pi):
    pi = torch.tensor(pi, dtype=torch.float64)
    for _, weights in every_draw(pi):
        kept = weights > 0
        assert torch.allclose(weights[kept], 1 / pi[kept])
        assert abs(kept.sum() - pi.sum()) < 1 - 1e-9  # rounded down or up
    expectation = sum(p * weights for p, weights in every_draw(pi))
    assert torch.allclose(expectation, (pi > 0).double(), rtol=0, atol=1e-12)


RATES = [(0.7, 0.4, 0.0), (0.7, 0.7, 0.0), (0.7, 0.7, 0.1)]  # r_q, r_o, beta
CASES = [*itertools.product((PAPER, OURS), RATES), (PAPER, (0.4, 0.7, 0.0)), (OWN, RATES[0])]


def test_every_weight_has_expectation_one_unless_there_is_no_gradient():
    seen = []  # by each rule at each rate: all should differ
    for method, (r_q, r_o, beta) in CASES:
        outcomes = every_weight(method, r_q, r_o, beta)
        [N] = {N for _, (N, _) in outcomes}  # the same, whatever is drawn
        expectation = sum(p * w for p, (_, w) in outcomes)
        needed = dppo.has_gradient(ADVANTAGES[:N], beta)
        assert torch.allclose(expectation[needed], torch.ones(1).double(), rtol=0, atol=1e-10)
        assert method == OWN or not expectation[~needed].any()  # our rules leave these out
        seen.append(frozenset(tuple(w.flatten().tolist()) for _, (_, w) in outcomes))
    assert min(map(len, seen)) > 1 and len(set(seen)) == len(seen)


# Given() has the completions that all prompts have, or would have had, a small model, an old policy
# and a reference; given.gradient(shares) is the gradient of train_step. It stands after the proof.
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("objective", dppo.CLIPPING)
def test_the_gradient_of_train_step_is_linear_in_the_shares(objective, first):
    given, loss, clips = Given(objective, first), 0.0, set()
    shares = torch.linspace(0, 3, 6 * G) * torch.tensor([1, 0, 1] * 6)
    for i, A in enumerate(ADVANTAGES.flatten()):
        new, _ = dppo.completion_logprobs(given.model, given.sequences, [[i]], 1.0)
        old = new.detach() if first else given.old[i]
        inputs = (old, given.ref[i], [len(new)], A.expand(len(new)), given.config)
        losses, clipped, _ = dppo.token_losses(new, *inputs)  # of this completion alone
        loss = loss + shares[i] * losses.sum()
        clips.update(clipped.tolist())
    expected = flat_gradient(loss, given.model)
    assert (given.gradient(shares) - expected).norm() < 1e-6 * expected.norm()
    assert (True in clips) != first


PUBLISHED = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("objective", PUBLISHED)
def test_the_loss_is_its_formula_and_so_is_its_gradient(objective, beta):
    config = Config(objective=objective, beta=beta, max_completion_tokens=9)
    lengths = [3, 1, 7, 4]
    repeats = torch.tensor(lengths)
    new, old, ref = -3 * torch.rand(3, 15, generator=torch.Generator().manual_seed(6)).double()
    A = torch.tensor([1.5, -0.5, -2.0, 0.0]).double().repeat_interleave(repeats)
    new.requires_grad_()
    losses, clipped, kl = dppo.token_losses(new, old, ref, lengths, A, config)
    Z = dppo.normalizer(repeats.double(), 2.5, config).repeat_interleave(repeats)
    loss = (losses / Z).sum()
    (down, up), expected = PUBLISHED[objective], 0.0
    for tokens in torch.arange(15).split(lengths):  # of one completion
        Z = {"dr_grpo": 9, "dapo": 2.5}.get(objective, len(tokens))
        mean = (new - old)[tokens].mean()
        for t in tokens:
            rho = (mean if objective == "gspo" else (new - old)[t]).exp()
            surrogate = min(rho * A[t], rho.clamp(1 - down, 1 + up) * A[t])
            x = (ref[t] - new[t]).exp()
            k3 = x - 1 - x.log() if beta else 0.0
            expected += (beta * k3 - surrogate) / Z
            assert clipped[t] == (surrogate < rho * A[t]) and abs(kl[t] - k3) < 1e-12
    assert clipped.sum() > 3 and abs(loss - expected) < 1e-12
    gradients = [torch.autograd.grad(value, new)[0] for value in (loss, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)
    assert bool(gradients[0][A == 0].any()) == (beta > 0)


def test_packing_changes_neither_log_probabilities_nor_gradients():
    """Against the model's own forward pass on one sequence at a time."""
    given = Given()
    model, sequences, packed, alone = given.model, given.sequences, 0.0, 0.0
    micro_batches, _ = dppo.pack_micro_batches(sequences, range(6 * G), given.config)
    assert len(micro_batches) > 1 and len(micro_batches[0][0]) > 1
    for slots in micro_batches:
        batch = list(itertools.chain(*slots))
        logprobs, _ = dppo.completion_logprobs(model, sequences, slots, 1.0)
        for i, of_completion in zip(batch, logprobs.split(lengths_of(sequences, batch))):
            prompt, completion = sequences[i]
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(dim=-1)[range(len(completion)), completion]
            assert torch.allclose(of_completion, expected, atol=1e-5)
            packed += (1 + i) * of_completion.sum()
            alone += (1 + i) * expected.sum()
    packed, alone = flat_gradient(packed, model), flat_gradient(alone, model)
    assert (packed - alone).norm() < 1e-6 * alone.norm()


@pytest.mark.parametrize("objective", ["grpo", "dapo", "dr_grpo"])
def test_dppo_step_trains_completions_with_their_advantages_and_shares(objective, monkeypatch, out):
    """In a run. The rewards are computed again, from the sequences that train_step gets."""
    windows, draws, updates = spy(monkeypatch, "prune_prompts", "prune_completions", "train_step")
    task, m = tiny_task(prompts=48), None
    run(out, task, objective=objective, prompts_per_step=8, inner_epochs=2, steps=12)
    assert max(N for _, (N, _, _) in windows) > 8
    for n, ((_, _, sequences, A, shares, old, _, config), _) in enumerate(updates):
        N, prompts, w_q = windows[1 + n // 2][1]  # the first was a trial of the rule
        ids, completions = zip(*sequences)
        assert list(ids[:: A.shape[1]]) == [task.train[q]["prompt_ids"] for q in prompts]
        examples = [{"prompt": prompt} for prompt in task.tokenizer.batch_decode(ids)]
        rewards = dppo.reward_completions(task, examples, sequences).view_as(A)
        assert torch.equal(A, group_advantages(rewards, objective != "dr_grpo"))
        assert draws[n][0][2] is w_q
        lengths = torch.tensor([len(ids) for ids in completions]).double().view_as(A)
        own = (w_q @ lengths.mean(dim=1) / w_q.sum()).item()
        m = m or own
        Z = {"grpo": lengths, "dapo": m, "dr_grpo": config.max_completion_tokens}[objective]
        assert torch.allclose(shares, w_q[:, None] * draws[n][1] / (N * A.shape[1] * Z))
        if n % 2 == 0:
            assert old is None  # the first update trains the policy that sampled
        else:
            assert old.keys() >= set(shares.flatten().nonzero().flatten().tolist())
        m = 0.9 * m + 0.1 * own if n % 2 else m  # after the second update of a step
    assert sum(not torch.equal(a, b) for (_, a), (_, b) in zip(draws[::2], draws[1::2])) > 6


def test_the_first_of_several_updates_clips_nothing(monkeypatch, out):
    """Log-probabilities of another packing differ in bfloat16, by more than gspo may clip."""

    def rounded(*inputs):
        return {i: logprobs + 0.01 for i, logprobs in frozen_logprobs(*inputs).items()}

    frozen_logprobs, [updates] = dppo.frozen_logprobs, spy(monkeypatch, "train_step")
    monkeypatch.setattr(dppo, "frozen_logprobs", rounded)
    run(out, steps=3, objective="gspo", inner_epochs=2, learning_rate=0.0)
    clipped = [metrics["clip_fraction"] for _, metrics in updates]
    assert max(clipped[::2]) == 0 < min(clipped[1::2])


@pytest.mark.parametrize("method, beta", [(PAPER, 0.0), (OURS, 0.1)])
def test_the_expected_gradient_of_dppo_step_is_the_full_one(method, beta, monkeypatch):
    def step(optimizer):
        inputs = (given.reference, torch.arange(6), None, None, given.config)
        sizes.add(dppo.dppo_step(task, rule_with_history(method, beta=beta), optimizer, *inputs).N)

    given, sizes = Given(first=True, beta=beta), set()
    task = Task(list(range(6)), {}, None, None, given.model)  # an example is the number of a group
    groups = [given.sequences[G * q : G * (q + 1)] for q in range(6)]
    monkeypatch.setattr(dppo, "rollout", lambda _, kept, *__: sum((groups[q] for q in kept), []))
    monkeypatch.setattr(dppo, "reward_completions", lambda _, kept, __: REWARDS[kept])
    steps = every_result(partial(given.descent, step))
    [N] = sizes  # the same, whatever is drawn
    full = given.gradient(given.shares(torch.ones(N, G)))
    expectation = sum(p * gradient for p, gradient in steps)
    assert len(steps) > 5 and full.norm() > 0.01
    assert (expectation - full).norm() < 1e-6 * full.norm()


# ---- Six ways to lose it, under the paper's rule and with a window of five prompts, unless it says
# otherwise. In 1 and 2, the gradients are A grad log p, with random numbers as grad log p.
WINDOW = ADVANTAGES[:5]
GRAD_LOG_P = torch.randn(5, G, 5, generator=torch.Generator().manual_seed(0)).double()


def relative_bias(estimate, full, **settings):
    """|E[estimate(w)] - full|/|full|, for a rule with these settings."""
    outcomes = every_weight(**settings)
    return (sum(p * estimate(w) for p, (_, w) in outcomes) - full).norm() / full.norm()


def test_1_and_2_dividing_by_what_is_kept_and_centring_advantages_again_are_biased():
    def gradient(w, advantages=WINDOW):
        return torch.einsum("qi,qi,qip->p", w, advantages, GRAD_LOG_P) / w.numel()

    def divided(w):  # by the number that is kept, which OWN leaves to chance, in place of its mean
        return gradient(w) * mean_kept / (w > 0).sum()

    def recentred(w):
        means = (WINDOW * (w > 0)).sum(dim=1) / (w > 0).sum(dim=1).clamp(min=1)
        return gradient(w, WINDOW - means[:, None])

    outcomes = every_weight(OWN)
    mean_kept = sum(p * (w > 0).sum() for p, (_, w) in outcomes)
    full = gradient(torch.ones_like(WINDOW))
    assert relative_bias(gradient, full) < 1e-12
    assert relative_bias(divided, full, method=OWN) > 0.05
    assert relative_bias(recentred, full) > 0.05


def test_3_removing_the_lowest_for_certain_is_refused():
    rule, largest = rule_with_history(), WINDOW.abs() >= WINDOW.abs().median()
    rule.completion_probabilities = mock.Mock(side_effect=[largest.clamp(min=0.01), largest])
    prune_completions(rule, WINDOW, torch.ones(5), torch.Generator())
    with pytest.raises(ValueError, match="0 < pi <= 1"):
        prune_completions(rule, WINDOW, torch.ones(5), None)


def test_4_looking_on_until_a_prompt_survives_is_biased_in_a_toy():
    """dppo.py only draws here. Of prompts of value 1, 0, 0, 0, each kept with probability 1/2, one
    looks on until one survives, and averages over those that were looked at."""
    values, bias = torch.tensor([1.0, 0.0, 0.0, 0.0]), 0.0
    for p, weights in every_draw(torch.full((4,), 0.5).double()):
        looked_at = int(weights.nonzero()[0]) + 1
        bias += p * ((weights - 1) * values)[:looked_at].mean()
    assert abs(bias) > 0.1


def test_5_a_draw_used_again_for_a_second_update_is_biased():
    """An update of train_step has moved the model to a place that depends on the draw, which here
    is of completions only. There, rho is 1 again."""

    def second_gradient(again, w):
        given = Given(first=True, beta=0.0)
        start, first = given.parameters(), given.gradient(given.shares(w))
        vector_to_parameters(start - 3 * first, given.model.parameters())
        return given.gradient(given.shares(w if again else torch.ones_like(w)))

    outcomes = every_weight(r_q=0.0)
    full = sum(p * second_gradient(False, w) for p, (_, w) in outcomes)  # the mean of draws anew
    assert relative_bias(partial(second_gradient, True), full, r_q=0.0) > 0.05


def test_6_an_update_is_biased_where_the_norm_is_clipped():
    given = Given(first=True, beta=0.0, max_grad_norm=1e-3)
    full = given.gradient(given.shares(torch.ones(5, G)))
    assert full.norm() == pytest.approx(1e-3, rel=1e-4)
    assert relative_bias(lambda w: given.gradient(given.shares(w)), full) > 0.05


# ==== What the tests work on ====
class Given:
    """Unless it is the first update, the old policy differs so much that tokens are clipped."""

    def __init__(self, objective="grpo", first=False, dtype=torch.float64, **settings):
        defaults = {"group_size": G, "prompts_per_step": LIMIT, "temperature": 1.0, "beta": 0.1}
        defaults |= {"micro_batch_tokens": 256, "max_grad_norm": 1e9, "max_completion_tokens": 9}
        self.config = Config(objective=objective, **defaults | settings)
        self.model, self.reference = tiny_model(dtype), tiny_model(dtype, initializer_range=0.1)
        self.sequences = random_sequences()
        lengths = torch.tensor(lengths_of(self.sequences)).double().view(6, G)
        self.Z = dppo.normalizer(lengths, 2.5, self.config)
        self.ref = dppo.frozen_logprobs(self.reference, self.sequences, range(6 * G), self.config)
        self.old = None if first else {i: 0.7 * logprobs for i, logprobs in self.ref.items()}

    def parameters(self):
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def shares(self, w):
        """(6, G) the shares of (N, G) weights of the first N prompts."""
        shares = torch.zeros_like(self.Z)
        shares[: len(w)] = w / (len(w) * G * self.Z[: len(w)])
        return shares

    def update(self, shares, optimizer):
        inputs = (self.sequences, ADVANTAGES, shares, self.old, self.ref, self.config)
        return dppo.train_step(self.model, optimizer, *inputs)

    def descent(self, update):
        """(parameters,) what update(optimizer) takes off the model in descent at rate 1."""
        before = self.parameters()
        update(torch.optim.SGD(self.model.parameters(), lr=1.0))
        gradient = before - self.parameters()
        vector_to_parameters(before, self.model.parameters())
        return gradient

    def gradient(self, shares):
        return self.descent(partial(self.update, shares))


def tiny_model(dtype=torch.float64, name="Qwen3ForCausalLM", **sizes):
    """A model with 13 tokens and a few thousand random weights, large enough to matter."""
    torch.manual_seed(0)
    shape = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shape |= {"max_position_embeddings": 256, "initializer_range": 0.3}
    shape |= {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1}
    model = getattr(transformers, name)
    return model(model.config_class(**shape | sizes)).to(dtype).eval()


def flat_gradient(loss, model):
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def random_sequences():
    """(prompt ids, completion ids) of six groups, which fill several slots."""
    rng, sequences = random.Random(0), []
    for i in range(6 * G):
        prompt = rng.choices(range(2, 13), k=20 + 5 * (i // G))
        sequences.append(Sequence(prompt, rng.choices(range(2, 13), k=1 + i % 7)))
    return sequences


def lengths_of(sequences, indices=None):
    """The lengths of the completions, of all or of those at `indices`."""
    indices = range(len(sequences)) if indices is None else indices
    return [len(sequences[i].completion) for i in indices]


def tiny_tokenizer(chat_template=None):
    """A token for each character of the sorting task."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "=", *"0123456789"])}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "chat_template": chat_template}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=characters, **special)


def lengths_reward(prompts, completions, **_):
    """Differs within most groups, also of an untrained model, so that every step learns."""
    return [len(c) % (2 + len(p) % 3) / 3 for p, c in zip(prompts, completions)]


def zeros(prompts, **_):
    return [0.0] * len(prompts)


def tiny_task(reward=lengths_reward, model=None, prompts=16, evals=4):
    tokenizer, rng, train = tiny_tokenizer(), random.Random(0), {}
    while len(train) < prompts:
        example = dppo.sorting_example(["easy", "middle"][len(train) % 2], rng, tokenizer)
        train[example["prompt"]] = example
    train = list(train.values())
    evals = {"some": train[:evals]} if evals else {}
    return Task(train, evals, tokenizer, reward, model or tiny_model(torch.float32), [1])


def noted(real, calls, *arguments):
    result = real(*arguments)
    calls.append((arguments, result))
    return result


def spy(monkeypatch, *names):
    """Lists that note the calls of functions of dppo, as (arguments, result)."""
    lists = []
    for name in names:
        lists.append([])
        monkeypatch.setattr(dppo, name, partial(noted, getattr(dppo, name), lists[-1]))
    return lists


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def run(out, task=None, **settings):
    """A run of small steps to its end, new or resumed -> the summary."""
    defaults = {"group_size": 4, "max_completion_tokens": 8, "output_dir": str(out)}
    folder = {"resume": str(out)} if (out / "checkpoint.pt").exists() else {}
    return dppo.train(Config(**defaults | folder | settings), task or tiny_task())


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def recorded(out, name):
    """Of each step."""
    return [record[name] for record in metrics(out)[1:]]


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


# ==== 1. Pruning ====
def test_advantages_are_those_of_whole_groups_and_zero_where_there_is_nothing_to_learn():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.1] * 4, [math.nan, 1.0, 0.0, 0.0]])
    advantages = group_advantages(rewards)
    assert torch.allclose(advantages[0], (rewards[0].double() - 0.25) / (rewards[0].std() + 1e-4))
    assert advantages[1:].eq(0).all()
    unscaled = group_advantages(rewards, scale_by_std=False)
    assert torch.equal(unscaled[0], rewards[0].double() - 0.25)


def test_the_paper_s_rule_prunes_the_floor_of_the_low_set():
    for scores, rate, expected in (
        ([0.1, 0.2, 0.3, 0.4, 4.0], 0.7, [0.5] * 4 + [1.0]),  # floor(0.7 * 4) of 4 go
        ([0.1, 0.2, 0.3, 0.4, 4.0], 0.2, [1.0] * 5),  # floor(0.8) is none
        ([0.1] * 100 + [50.0], 0.29, [0.71] * 100 + [1.0]),  # 0.29 * 100 is 28.999999999999996
        ([math.nan, 1.0, 1.0, 4.0], 0.5, [1.0, 0.5, 0.5, 1.0]),
        ([1.0, 1.0 + 2e-7, 1.0], 0.9, [1.0] * 3),  # equal but for rounding: none is low
    ):
        assert dppo.keep_probabilities(torch.tensor(scores), rate).tolist() == expected


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("method", [PAPER, OURS])
def test_the_window_is_the_longest_whose_survivors_never_exceed_the_batch(method, rate):
    generator, state = torch.Generator().manual_seed(0), torch.get_rng_state()
    config = Config(method=method, prompt_prune_rate=rate)
    rule = config.rule(config, 300)
    for _ in range(10):
        order = torch.randperm(300, generator=generator)
        visited = torch.randperm(300, generator=generator)[:240]
        p = torch.rand(240, 1, generator=generator) ** 3
        rewards = (torch.rand(240, 8, generator=generator) < p).double()
        rule.update(visited, rewards, group_advantages(rewards))
        pi = rule.prompt_probabilities()
        N, kept, weights = prune_prompts(rule, order, 16, generator)
        assert pi[order[:N]].sum() <= 16 + 1e-9 < pi[order[: N + 1]].sum()
        assert len(kept) in (15, 16) and set(kept.tolist()) <= set(order[:N].tolist())
        assert weights.allclose(1 / pi[kept])
    assert state.equal(torch.get_rng_state())  # draws are of the generator alone


def test_of_unlikely_prompts_exactly_one_is_kept_by_its_share_of_the_chances():
    rule = dppo.Rule(Config(), 3)
    rule.prompt_probabilities = mock.Mock(return_value=torch.tensor([0.1, 0.2, 0.1]))
    results = every_result(lambda: prune_prompts(rule, torch.arange(3), 8, None))
    chances = {tuple(kept.tolist()): p for p, (_, kept, _) in results}
    assert chances == pytest.approx({(0,): 0.25, (1,): 0.5, (2,): 0.25})


def test_the_low_set_of_prompts_is_of_all_so_that_windows_without_signal_are_pruned_too():
    rule = dppo.DPPO(Config(prompt_prune_rate=0.7), 40)
    rule.memory["score"] = torch.tensor([0.0] * 30 + [0.9] * 8 + [math.nan] * 2).double()
    N, _, weights = prune_prompts(rule, torch.arange(40), 6, torch.Generator())
    assert N == 20
    assert torch.allclose(weights, torch.full((6,), 30 / 9).double())


def test_a_score_is_of_the_last_visit_and_that_of_other_prompts_stays():
    rule = dppo.DPPO(Config(), 3)
    rule.update(torch.tensor([0, 1, 1]), None, torch.tensor([[3.0, -3.0], [1, -1], [0.5, -0.5]]))
    rule.update(torch.tensor([0]), None, torch.tensor([[2.0, -2.0]]))
    assert rule.memory["score"].nan_to_num(-1).tolist() == [2.0, 0.5, -1.0]


def test_of_completions_those_without_a_gradient_go_first_and_do_not_count_in_the_mean():
    advantages = torch.tensor([[2.0, 1.0, 1.0, 1.0], [0.0] * 4, [0.0] * 4]).double()
    pi = dppo.DPPO(Config(), 3).completion_probabilities(advantages, torch.ones(3))
    expected = torch.tensor([1, 1 / 3, 1 / 3, 1 / 3]).double()  # below 1.25, the mean of the first
    assert torch.allclose(pi[0], expected) and not pi[1:].any()
    pi = dppo.GRPOSkip(Config(), 3).completion_probabilities(advantages, torch.ones(3))
    assert pi.equal((advantages != 0).double())


class KeepLargest(dppo.Rule):
    """A biased rule, as somebody might plug one in, which also counts visits."""

    unbiased = False
    remembers = {"visits": 0.0}

    def prompt_probabilities(self):
        return torch.linspace(0, 0.9, self.prompt_count)

    def completion_probabilities(self, advantages, prompt_weights):
        return (advantages != 0) & (advantages.abs() >= advantages.abs().median())

    def update(self, prompts, rewards, advantages):
        self.memory["visits"][prompts] += 1


def test_a_biased_rule_trains_on_the_mean_of_what_it_keeps(monkeypatch, out):
    [updates] = spy(monkeypatch, "train_step")
    rewards = iter([lengths_reward] * 3)
    task = tiny_task(lambda **columns: next(rewards, zeros)(**columns))
    run(out, task, method="test_dppo:KeepLargest", steps=4, objective="dr_grpo", prompts_per_step=4)
    for (*_, shares, _, _, _), _ in updates[:2]:
        kept = shares > 0
        assert 0 < kept.double().mean() < 1
        assert torch.allclose(shares[kept], 1 / (kept.sum().double() * 8))  # Z is 8
    assert [bool(shares.any()) for (*_, shares, _, _, _), _ in updates[2:]] == [False, False]


WRONG = [(True, [0.0, 1, 1, 1]), (True, [2.0, 1, 1, 1]), (True, [1.0] * 3)]
WRONG += [(False, [-0.5, 1, 1, 1]), (False, [math.nan] * 4), (False, [0.0] * 4)]


@pytest.mark.parametrize("unbiased, pi", WRONG)
def test_probabilities_of_one_s_own_that_would_bias_in_silence_are_refused(unbiased, pi):
    rule = dppo.Rule(Config(), 4)
    rule.unbiased = unbiased
    rule.prompt_probabilities = mock.Mock(return_value=torch.tensor(pi))
    rule.completion_probabilities = mock.Mock(return_value=torch.tensor([pi, pi]))
    with pytest.raises(ValueError, match=r"a rule needs pi (of shape \(4,\)|> 0 for)"):
        prune_prompts(rule, torch.arange(4), 8, None)
    advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2)
    if any(pi):  # a biased rule may prune all completions of a step
        with pytest.raises(ValueError, match=r"\(2, 4\)"):
            prune_completions(rule, advantages, torch.ones(2), None)


# ==== 2. Dense Prompt Packing ====
@pytest.mark.parametrize("seed", range(50))
def test_every_sequence_is_packed_once_and_no_slot_overflows(seed):
    rng = random.Random(seed)
    lengths = rng.choices(range(1, 51), k=3 * seed)
    capacity = max(lengths, default=1) + rng.randrange(100)
    slots = dppo.pack(lengths, capacity, lookahead=rng.randint(1, 90))
    assert sorted(itertools.chain(*slots)) == list(range(len(lengths)))
    for slot in slots:
        assert 0 < sum(lengths[i] for i in slot) <= capacity


def test_packing_takes_the_longest_that_fits_among_the_next_in_order():
    assert dppo.pack([5, 3, 8, 2, 2], capacity=10, lookahead=3) == [[2, 3], [0, 1, 4]]
    assert dppo.pack([5, 6, 5, 4], capacity=10, lookahead=1) == [[0], [1], [2, 3]]


def test_a_micro_batch_has_as_many_slots_as_its_tokens_allow():
    sequences = [
        Sequence([2] * 3, [3] * n) for n in (130, 50, 50, 70)
    ]  # slots of 133: 133; 73, 53; 53
    for tokens, sizes in {399: [3], 398: [2, 1], 265: [1, 1, 1], 1: [1, 1, 1]}.items():
        config = Config(micro_batch_tokens=tokens)
        micro_batches, density = dppo.pack_micro_batches(sequences, [0, 1, 2, 3], config)
        assert [len(slots) for slots in micro_batches] == sizes
        assert density == 312 / 399


# ==== 3. Forward pass, loss and update ====
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_packed_log_probabilities_are_those_alone_also_of_many_tokens(device, dtype, tolerance):
    """Logits are made of 512 tokens at a time. Here are over a thousand."""
    model = tiny_model(dtype).to(device)
    sequences = [Sequence(prompt, completion * 40) for prompt, completion in random_sequences()]
    packed, _ = dppo.completion_logprobs(model, sequences, [[0, 1, 2, 3, 4, 5], [6, 7, 8]], 0.7)
    for i, of_completion in enumerate(packed.split(lengths_of(sequences, range(9)))):
        alone, _ = dppo.completion_logprobs(model, sequences, [[i]], 0.7)
        assert torch.allclose(of_completion, alone, rtol=tolerance, atol=tolerance)


def test_log_probabilities_and_entropies_are_of_the_policy_at_its_temperature():
    model = tiny_model(torch.float32)
    sequences = [Sequence([5, 4], [token]) for token in range(13)]
    slots = [[i] for i in range(13)]
    logprobs, entropies = dppo.completion_logprobs(model, sequences, slots, 0.7)
    expected = (model(torch.tensor([[5, 4]])).logits[0, -1].detach() / 0.7).log_softmax(dim=-1)
    assert torch.allclose(logprobs, expected, atol=1e-5)
    entropy = -(expected.exp() @ expected).item()
    assert entropies.allclose(torch.tensor(entropy), atol=1e-5)


def test_updates_far_below_bfloat16_resolution_add_up_in_float32_masters():
    given, still, dtypes = Given(first=True, dtype=torch.bfloat16), [], set()
    optimizer, start = dppo.MasterAdam(given.model, 1e-5), given.parameters()
    for weight in given.model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: dtypes.add(weight.grad.dtype))
    for _ in range(60):
        given.update(torch.ones(6, G), optimizer)
        still.append((given.parameters() == start).double().mean())
    first, *_, last = still
    assert first > 0.9 > last
    assert dtypes == {torch.float32}  # of the sums over micro-batches
    for weight, master in zip(given.model.parameters(), optimizer.masters):
        assert master.dtype == torch.float32 and torch.equal(weight, master.bfloat16())
        assert weight.grad is None and master.grad is None


@pytest.mark.parametrize("warmup_steps, expected", [(0, [3.0] * 4), (3, [1.0, 2.0, 3.0, 3.0])])
def test_the_learning_rate_rises_over_the_warm_up(warmup_steps, expected, out):
    run(out, steps=4, warmup_steps=warmup_steps, learning_rate=3e-9)
    rates = recorded(out, "learning_rate")
    assert rates == pytest.approx([1e-9 * rate for rate in expected])
    assert torch.load(out / "checkpoint.pt")["optimizer"]["param_groups"][0]["lr"] == rates[-1]


def test_the_reference_of_the_kl_term_is_the_policy_before_the_first_step(out):
    run(out, steps=6, beta=0.1, learning_rate=1e-2, warmup_steps=0)
    first, *_, last = recorded(out, "kl")
    assert first < 1e-6 < last


def weights_at_each_reward(task):
    """A list that takes in the weights of the model whenever the reward of the task is called."""
    states, reward = [], task.reward

    def watched(**columns):
        states.append(parameters_to_vector(task.model.parameters()).detach().clone())
        return reward(**columns)

    task.reward = watched
    return states


@pytest.mark.parametrize("method", dppo.RULES)
def test_batches_of_equal_rewards_train_nothing_not_even_by_the_momentum_of_adam(method, out):
    rewards = iter([lengths_reward] * 4)
    task = tiny_task(lambda **columns: next(rewards, zeros)(**columns), evals=0)
    states = weights_at_each_reward(task)
    run(out, task, method=method, steps=9, learning_rate=1e-2)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(states)]
    assert moved == [True] * 4 + [False] * 4
    assert set(recorded(out, "grad_norm")[4:]) == {0}


def test_updates_not_finite_are_left_out_and_ten_in_a_row_end_the_run(monkeypatch, out):
    real, count = dppo.token_losses, itertools.count(1)

    def token_losses(*inputs):
        losses, *rest = real(*inputs)
        return losses * (math.nan if next(count) in {2, 3, *range(6, 99)} else 1.0), *rest

    monkeypatch.setattr(dppo, "token_losses", token_losses)
    task = tiny_task(evals=0)
    states = weights_at_each_reward(task)
    with pytest.raises(FloatingPointError, match="not finite"):
        run(out, task, steps=50, learning_rate=1e-2, beta=0.1)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(states)]
    assert moved == [True, False, False, True, True, *[False] * 9]
    finite = [norm is not None for norm in recorded(out, "grad_norm")]
    assert finite == [True, False, False, True, True, *[False] * 10]


# ==== 5. The proportional rule ====
def test_it_keeps_as_many_as_the_paper_s_rule_in_proportion_to_their_scores():
    scores = torch.rand(200, generator=torch.Generator().manual_seed(0)).double() ** 3
    for rate in (0.5, 0.7, 0.9):
        pi = dppo.proportional_probabilities(torch.cat([scores, 0 * scores]), rate)[:200]
        assert abs(pi.sum() - dppo.keep_probabilities(scores, rate).sum()) < 1e-9
        assert (pi / scores)[pi < 1].std() < 1e-9


def test_a_floor_lies_under_all_and_what_has_no_score_is_kept():
    scores = torch.tensor([math.nan, *[1.0] * 20, *[1e-6] * 20])
    pi = dppo.proportional_probabilities(scores, 0.95, floor=0.07)
    assert pi[0] == 1
    assert pi[21:].tolist() == [0.07] * 20
    rule = dppo.ProportionalDPPO(Config(prompt_prune_rate=0.99), 50)
    rule.memory["score"] = torch.tensor([0.9] * 5 + [1e-9] * 45).double()
    assert rule.prompt_probabilities()[5:].min() == rule.floor


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
def test_above_a_floor_scores_of_zero_share_what_the_others_leave(rate):
    scores = torch.tensor([0.0] * 240 + [0.5, 1.0] * 8)
    pi = dppo.proportional_probabilities(scores, rate, floor=0.07)
    assert abs(pi.sum() - dppo.keep_probabilities(scores, rate).sum()) < 1e-6
    assert pi[240:].eq(1).all() and pi[:240].std() < 1e-9


def test_its_completions_are_scored_with_the_weight_of_their_prompt():
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 8))
    prompt_weights = torch.tensor([10.0] + [1.0] * 7).double()
    rule = dppo.ProportionalDPPO(Config(completion_prune_rate=0.9), 8)
    pi = rule.completion_probabilities(advantages, prompt_weights)
    assert torch.allclose(pi[0, 1:], 10 * pi[1, 1:])
    assert torch.allclose(pi[1:, 0], 3 * pi[1:, 1])


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_its_prompts_are_scored_by_the_expected_square_of_their_advantages(objective):
    rule = dppo.ProportionalDPPO(Config(objective=objective, group_size=6), 3)
    rewards = torch.tensor([[0.0] * 8, [1.0] * 3 + [0.0] * 5, [1.0] * 7 + [0.5]]).double()
    rule.update(torch.arange(3), rewards, group_advantages(rewards))
    torch.manual_seed(0)
    for score, right in zip(rule.memory["score"], (0.0, 3.0, 7.5)):
        posterior = torch.distributions.Beta(rule.prior + right, rule.prior + 8 - right)
        p = posterior.sample((300_000,)).double()
        square = 2 * p * (1 - p) if objective == "dr_grpo" else 1 - p**6 - (1 - p) ** 6
        assert abs(score**2 - square.mean()) < 5 * square.std() / 300_000**0.5


def test_it_sums_successes_with_decay_and_takes_rewards_within_0_and_1():
    rule = dppo.ProportionalDPPO(Config(), 3)
    visits = [([0, 1], [[1.0, 0.0, 0.0, 1.0], [0.0] * 4])]
    visits += [([0], [[1.0, 1.0, 1.0, math.nan]])]  # says nothing about successes
    visits += [([0, 2], [[1.0] * 4, [-1.0, 3.0, 0.5, 0.0]])]
    visits += [([1, 1], [[1.0] * 4] * 2)]  # twice in a window
    for prompts, rewards in visits:
        rewards = torch.tensor(rewards, dtype=torch.float64)
        rule.update(torch.tensor(prompts), rewards, group_advantages(rewards))
    decay = rule.decay
    assert rule.memory["right"].tolist() == pytest.approx([decay * 2 + 4, decay * 4 + 4, 1.5])
    assert rule.memory["wrong"].tolist() == pytest.approx([decay * 2, decay**2 * 4, 2.5])


# ==== 6. Order ====
@pytest.mark.parametrize("method", ["grpo", PAPER])
def test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own(method, monkeypatch, out):
    [windows] = spy(monkeypatch, "prune_prompts")
    run(out, tiny_task(prompts=24), method=method, steps=12, prompts_per_step=8)
    seen = torch.cat([upcoming[:N] for (_, upcoming, *_), (N, *_) in windows[1:]])
    first, second = seen[:24].tolist(), seen[24:48].tolist()
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert not torch.equal(dppo.next_prompts(0, 24, 0), dppo.next_prompts(0, 24, 1))


def test_draws_have_random_numbers_of_their_own(monkeypatch, out):
    """Two generators with the same seed would correlate what is kept with what is sampled."""
    [windows] = spy(monkeypatch, "prune_prompts")
    monkeypatch.setattr(transformers, "set_seed", mock.Mock(wraps=transformers.set_seed))
    run(out, steps=8)
    own = {generator.initial_seed() for (*_, generator), _ in windows[1:]}
    others = {call.args[0] for call in transformers.set_seed.call_args_list}
    assert len(own) == 8 and not own & others


# ==== 7. Rollout ====
QWEN_GENERATION = {"do_sample": True, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5}
QWEN_GENERATION |= {"min_p": 0.2, "no_repeat_ngram_size": 1, "eos_token_id": [1, 12]}
QWEN_GENERATION |= {"cache_implementation": "static", "num_beams": 2}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_have_the_probabilities_that_are_trained_whatever_the_model_s_defaults(temperature):
    task, prompt, draws = tiny_task(), [5, 4, 3, 7], 8000
    task.model = tiny_model(torch.float32, vocab_size=80, initializer_range=0.1)  # top_k is 50
    task.model.generation_config = transformers.GenerationConfig(**QWEN_GENERATION)
    config = Config(temperature=temperature, max_completion_tokens=1)
    torch.manual_seed(0)
    sequences = dppo.rollout(task, [{"prompt_ids": prompt}], draws, config)
    counts = torch.bincount(torch.tensor([ids for _, ids in sequences]).flatten(), minlength=80)
    each = [Sequence(prompt, [token]) for token in range(80)]
    trained = dppo.frozen_logprobs(task.model, each, range(80), config)
    expected = draws * torch.cat(list(trained.values())).exp()
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 131  # of 79 degrees of freedom: p = 2e-4


@pytest.mark.parametrize("end_ids", [[1, 12], [0], []])
def test_of_padded_prompts_the_probabilities_that_are_sampled_are_those_that_are_trained(end_ids):
    """Prompts of 1 to 30 tokens, completions of 1 to 40 that leave the batch as they end."""
    task = tiny_task()
    task.end_ids = end_ids
    prompts = [(task.train[1]["prompt_ids"] * 9)[:length] for length in (3, 30, 1, 17, 8)]
    config = Config(max_completion_tokens=40)
    torch.manual_seed(0)
    sequences, sampled = dppo.sample(task, prompts, 8, config)
    assert [prompt for prompt, _ in sequences[::8]] == prompts
    trained = dppo.frozen_logprobs(task.model, sequences, range(40), config)
    sampled = sampled.split(lengths_of(sequences))
    for i, (_, completion) in enumerate(sequences):
        assert not set(end_ids) & set(completion[:-1])
        assert completion[-1] in end_ids or len(completion) == 40
        assert torch.allclose(sampled[i], trained[i], atol=1e-4)
    assert len({len(completion) for _, completion in sequences}) > 8 or not end_ids


def test_rollouts_are_split_and_keep_the_order_of_their_prompts(monkeypatch):
    [calls] = spy(monkeypatch, "sample")
    task = tiny_task()
    for samples, count, sizes in ((3, 16, [3] * 5 + [1]), (12, 2, [1, 1])):
        config = Config(rollout_batch_size=10, max_completion_tokens=2)
        sequences = dppo.rollout(task, task.train[:count], samples, config)
        assert [len(prompts) for (_, prompts, *_), _ in calls] == sizes
        ids = [example["prompt_ids"] for example in task.train[:count]]
        assert [prompt for prompt, _ in sequences[::samples]] == ids
        calls.clear()


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
YARN |= {"original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4}
ORIGINAL = {"original_max_position_embeddings": 48}
LONGROPE |= {"long_factor": [4.0] * 4} | ORIGINAL
DYNAMIC_NTK = {"rope_type": "dynamic", "factor": 16.0, "rope_theta": 100.0}
OPT = {"tie_word_embeddings": False, "init_std": 0.4}
MODELS = [
    ("Qwen2ForCausalLM", {"use_cache": False}, None),
    ("GPT2LMHeadModel", {}, None),
    ("Gemma3ForCausalLM", {"sliding_window": 8}, None),
    ("MistralForCausalLM", {"sliding_window": 8}, None),
    ("Qwen3ForCausalLM", {"rope_parameters": YARN}, None),
    ("GPT2LMHeadModel", {"max_position_embeddings": 63}, "index out of range"),
    (
        "LlamaForCausalLM",
        {"rope_parameters": DYNAMIC_NTK, "max_position_embeddings": 48},
        "differ by",
    ),
    ("Phi3ForCausalLM", {"rope_parameters": LONGROPE} | ORIGINAL, "differ by"),
    ("OPTForCausalLM", OPT, "differ by"),  # ignores position ids
    ("GraniteForCausalLM", {"logits_scaling": 1.1}, "scaled, capped"),
    ("Qwen3NextForCausalLM", {}, "Attention"),  # has another cache
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, more, reason", MODELS)
def test_only_models_that_sample_as_they_are_trained_are_accepted(name, more, reason, dtype):
    """Up to the last of 64 positions, of which the samples that are compared have at most 42."""
    task = tiny_task(model=tiny_model(dtype, name, **{"max_position_embeddings": 64} | more))
    for n, example in enumerate(task.train):
        example["prompt_ids"] = (example["prompt_ids"] * 9)[: 26 - n]
    config = Config(max_completion_tokens=38)
    if reason:
        with pytest.raises(ValueError, match=f"{name} cannot be trained here: .*{reason}"):
            dppo.check_sampling(task, config)
    else:
        dppo.check_sampling(task, config)


def test_attention_of_cudnn_is_off():
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("change", ["temperature", "alternating", "NaN"])
def test_a_difference_between_sampling_and_training_is_noticed(change, monkeypatch):
    task, real = tiny_task(), dppo.completion_logprobs

    def changed(model, sequences, slots, temperature):
        factor = 1.2 if change == "temperature" else 1.0
        logprobs, entropies = real(model, sequences, slots, temperature * factor)
        signs = (-1) ** torch.arange(len(logprobs))
        return logprobs + {"NaN": math.nan, "alternating": 0.01 * signs}.get(change, 0), entropies

    monkeypatch.setattr(dppo, "completion_logprobs", changed)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot be trained here: .*differ by"):
        dppo.check_sampling(task, Config())


# ==== 8. Rewards ====
GRADES = [("gsm8k", "#### 18.0", "x\n#### 18", 1), ("gsm8k", "19", "18.", 0), ("gsm8k", "0", 0, 1)]
GRADES += [("gsm8k", "-1,800", "\N{MINUS SIGN}$1800", 1), ("gsm8k", "16-.5.", ".50 %", 1)]
GRADES += [("gsm8k", "#### 7\n#### -2 and 3", "-2", 1), ("gsm8k", "7 #### \u0663", "7", 1)]
GRADES += [("gsm8k", "18", r"\frac{3}{18}", None), ("gsm8k", "18", None, None)]
GRADES += [("gsm8k", "#### 1e3", "1000", 1), ("gsm8k", "3e", "3", 1)]
GRADES += [("exact", " ab\n", "ab", 1), ("exact", "b", "ab", 0), ("exact", "0", 0, 1)]
GRADES += [("exact", "", "", None), ("exact", "None", None, None)]


@pytest.mark.parametrize("reward, completion, answer, grade", GRADES)
def test_rewards_compare_with_an_answer_if_there_is_one(reward, completion, answer, grade):
    for given in (completion, [{"role": "assistant", "content": completion}]):
        assert dppo.REWARDS[reward](["?"], [given], answer=[answer], level=[1]) == [grade]


HOSTILE = ["", "9" * 5000, "1e999999", "NaN", "#### 1e9999", "\0\x1b[2J\ud800", "$" * 50_000]
HOSTILE += ["1," * 50_000, "####" * 9000, "-" * 9000, "__import__('os').abort()", "\u0663"]


@pytest.mark.parametrize("reward", dppo.REWARDS)
def test_hostile_text_gets_a_grade_or_none_and_never_raises(reward):
    for answer in HOSTILE:
        answers = [answer] * len(HOSTILE)
        grades = dppo.REWARDS[reward](answers, HOSTILE, answer=answers)
        assert set(grades) <= {0.0, 1.0, None}


def test_a_reward_gets_trl_s_arguments_and_may_say_none():
    task = tiny_task(mock.Mock(return_value=[None, 1, 0.5, True]))
    chat = [{"role": "user", "content": "3"}]
    text = {"prompt": "12=", "prompt_ids": [1], "answer": "12", "level": 1, "completions": "x"}
    examples = [text, text | {"prompt": chat, "answer": "3", "level": 2}]
    sequences = [Sequence([1], ids) for ids in ([3, 4, 1], [5], [6, 1], [7, 7])]
    rewards = dppo.reward_completions(task, examples, sequences)
    assert rewards.nan_to_num(-1).tolist() == [[-1.0, 1.0], [0.5, 1.0]]
    assistant = [[{"role": "assistant", "content": text}] for text in ("3", "44")]
    expected = {"prompts": ["12=", "12=", chat, chat], "completions": ["01", "2", *assistant]}
    expected |= {"answer": ["12", "12", "3", "3"], "level": [1, 1, 2, 2]}
    assert task.reward.call_args.kwargs == expected


# ==== 9 and 10. Tasks and data ====
def short(prompts, completions, **columns):
    """A reward, as somebody might plug one in. Those that follow are wrong."""
    return [float(len(completion) < 4) for completion in completions]


two_values = mock.Mock(return_value=[0.0, 0.0])


def mistaken(*_, **columns):
    raise ValueError("a mistake of mine")


def save_model(model, path, chat_template=None):
    for part in (model, tiny_tokenizer(chat_template)):
        part.save_pretrained(path)
    return str(path)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def user(tmp_path_factory):
    """Settings with a model with random weights and a dataset, as users have them."""
    folder = tmp_path_factory.mktemp("user")
    rows = [{"question": f"{a}=", "answer": f"#### {a}"} for a in range(100, 180)]
    data = write_rows(folder / "data.jsonl", rows)
    model = save_model(tiny_model(torch.float32, eos_token_id=12), folder / "model")
    return {"model": model, "dataset": data, "max_completion_tokens": 8}


@pytest.fixture
def main(monkeypatch, tmp_path):
    """The command line, called with settings and arguments in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments, **settings):
        named = itertools.chain(*((f"--{name}", value) for name, value in settings.items()))
        monkeypatch.setattr(sys, "argv", ["dppo.py", *map(str, [*named, *arguments])])
        dppo.main()

    return command


@pytest.fixture
def refusal(main, capsys, monkeypatch):
    """What the command line prints where it refuses, before it loads a model: one line, with exit
    status 2."""
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)

    def told(*arguments, **settings):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(*arguments, **settings)
        assert exit_.value.code == 2
        usage, line = capsys.readouterr().err.strip().splitlines()
        assert usage == "usage: python dppo.py [--setting value] ..."
        assert len(line) < 480
        return line

    return told


GOOD = [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 120)]
CHAT = {"prompt": [{"role": "user", "content": "1"}], "answer": "1"}
BAD_DATA = [
    (
        '{"question": "1=", "answer": "1"}\n{"question": "2=',
        "",
        "data.jsonl is empty or cannot be read",
    ),
    ([{"question": "1", "answer": "B"}], "", "choose another --reward or --answer_column"),
    ([{"text": "1", "label": "2"}], "", "data.jsonl has ['text', 'label']: set --prompt_column"),
    (GOOD, "--eval_dataset data.jsonl:train", "data.jsonl has only prompts that are evaluated"),
    ([CHAT], "", "no chat template"),
    (GOOD, "--max_prompt_tokens 3", "no prompt has from 1 to --max_prompt_tokens"),
    (GOOD, "--model ./nowhere", "./nowhere cannot be loaded"),
    (GOOD, "--reward test_dppo:two_values", "16 finite numbers or None, not [0.0, 0.0]"),
]


@pytest.mark.parametrize("rows, arguments, message", BAD_DATA)
def test_bad_data_are_reported_at_once(rows, arguments, message, user, refusal, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(rows) if isinstance(rows, str) else write_rows(data, rows)
    assert message in refusal(*arguments.split(), **user | {"dataset": data})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["reward", "method"])
def test_what_one_s_own_reward_or_rule_raises_is_not_made_one_line(option, user, main):
    with pytest.raises(ValueError, match="^a mistake of mine") as error:
        main(**user, **{option: "test_dppo:mistaken"})
    assert type(error.value) is ValueError


def test_a_model_has_all_end_ids_and_its_rotary_frequencies_in_float32(user, monkeypatch):
    monkeypatch.setattr(dppo, "DTYPE", torch.bfloat16)
    task = dppo.load_task(Config(**user))
    assert task.model.dtype == torch.bfloat16
    assert task.end_ids == [1, 12]  # that of the tokenizer, and the model's
    assert {buffer.dtype for buffer in task.model.buffers()} == {torch.float32}


def in_lower_case(prompts, completions, answer, **columns):
    """A reward that takes every completion for a text."""
    return [float(text.lower() == gold) for text, gold in zip(completions, answer)]


def test_a_reward_that_cannot_read_chats_fails_with_a_note_on_text_of(user, tmp_path):
    model = save_model(tiny_model(), tmp_path / "model", CHAT_TEMPLATE)
    with pytest.raises(AttributeError) as error:
        dppo.load_task(Config(**user | {"model": model, "reward": "test_dppo:in_lower_case"}))
    assert "in_lower_case" in [entry.name for entry in error.traceback]
    [note] = error.value.__notes__
    assert "dppo.text_of" in note


def test_quantized_weights_are_refused(user, monkeypatch):
    model = tiny_model(torch.float32)
    model.config.quantization_config = {"quant_method": "fp8"}
    load = mock.Mock(return_value=model)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(dppo.Refused, match="its weights are quantized"):
        dppo.load_task(Config(**user))


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}="
    "{% if enable_thinking is defined and not enable_thinking %}0{% endif %}{% endif %}"
)


def load(data, **settings):
    config = Config(model="x", dataset=data, **settings)
    return list(dppo.load_examples(data, "train", config, tiny_tokenizer()).values())


def test_examples_have_the_columns_of_the_data_and_long_prompts_are_left_out(tmp_path):
    texts = ("12", "1" * 20, None, "", "12")
    rows = [{"question": text, "solution": "4", "answer": "3", "level": 5} for text in texts]
    data = write_rows(tmp_path / "a.jsonl", rows)
    [example] = load(data, max_prompt_tokens=5, system_prompt="7")  # just long enough
    ids = tiny_tokenizer().encode("7\n\n12")
    expected = {"prompt": "7\n\n12", "prompt_ids": ids, "question": "12", "level": 5}
    assert example == expected | {"answer": "3", "solution": "3"}  # our rewards take what is named


def test_a_reward_of_one_s_own_gets_the_columns_as_they_are(tmp_path):
    row = {"prompt": "1=", "answer": "one", "solution": "", "of": {"label": 3}}
    data = write_rows(tmp_path / "a.jsonl", [row])
    for column in ("solution,answer", "of.label", "no"):
        [example] = load(data, reward="test_dppo:short", answer_column=column)
        assert example == row | {"prompt_ids": tiny_tokenizer().encode("1=")}
    data = write_rows(tmp_path / "b.jsonl", [{"prompt": "1=", "of": {"label": 3}}])
    [example] = load(data, reward="test_dppo:short", answer_column="of.label")
    assert (example["answer"], example["solution"], example["of"]) == (3, 3, {"label": 3})


def test_data_are_files_or_on_the_hub_and_a_split_may_be_a_slice(monkeypatch, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": f"{i}="} for i in range(9)])
    slices = {"train": range(9), "train[6:]": [6, 7, 8], "train[:2]+train[-1:]": [0, 1, 8]}
    for kind, (slice_, numbers) in itertools.product(("parquet", "csv", "json"), slices.items()):
        getattr(rows, f"to_{kind}")(tmp_path / f"a.{kind}")
        examples = load(f"{tmp_path}/a.{kind}:{slice_}", reward="test_dppo:short")
        assert sorted(example["prompt"] for example in examples) == [f"{i}=" for i in numbers]
    monkeypatch.setattr(datasets, "load_dataset", mock.Mock(return_value=rows))
    load("openai/gsm8k:main:train[:9]", reward="test_dppo:short")
    load_dataset = datasets.load_dataset
    load_dataset.assert_called_with("openai/gsm8k", "main", split="train[:9]", data_files=None)


def test_chat_templates_nested_answers_and_several_evaluation_sets(tmp_path):
    messages = [{"role": "system", "content": "88"}, {"role": "user", "content": "12"}]
    verl = {"prompt": messages, "reward_model": {"ground_truth": "21", "style": "rule"}}
    rows = [{"problem": f"3{i}", "answer": "4"} for i in range(5)]
    text = write_rows(tmp_path / "text.jsonl", rows)
    settings = {"dataset": write_rows(tmp_path / "verl.jsonl", [verl]), "eval_prompts": 3}
    settings |= {"eval_dataset": f"{text}:train,{text}:train[:2]", "max_completion_tokens": 8}
    settings |= {"model": save_model(tiny_model(), tmp_path / "model", CHAT_TEMPLATE)}
    more = {"system_prompt": "9", "chat_template_kwargs": '{"enable_thinking": false}'}
    task = dppo.load_task(Config(**settings, **more))
    [example] = task.train
    assert example["prompt"] == [{"role": "system", "content": "9"}, messages[1]]
    assert task.tokenizer.decode(example["prompt_ids"]) == "912=0"
    assert example["answer"] == "21"
    assert [len(examples) for examples in task.evals.values()] == [3, 2]
    assert dppo.load_task(Config(**settings)).train[0]["prompt"] == messages


@pytest.mark.parametrize("eval_prompts, held_out", [(10, 10), (256, 16), (0, 0)])
def test_without_evaluation_sets_at_most_a_fifth_is_held_out(eval_prompts, held_out, user):
    user = user | {"eval_prompts": eval_prompts}
    task, other = dppo.load_task(Config(**user)), dppo.load_task(Config(**user, seed=1))
    trained = [example["question"] for example in task.train]
    evaluated = [example["question"] for example in itertools.chain(*task.evals.values())]
    assert len(evaluated) == held_out and len({*trained, *evaluated}) == 80
    assert trained != sorted(trained)  # shuffled
    assert (task.train, task.evals) == (other.train, other.evals)  # not by the seed


def test_prompts_are_there_once_and_what_is_evaluated_is_not_trained_on(user, tmp_path):
    rows = [{"question": f"{a % 30}=", "answer": f"{a}"} for a in range(90)]
    data = write_rows(tmp_path / "a.jsonl", rows)
    task = dppo.load_task(Config(**user | {"dataset": data, "eval_dataset": f"{data}:train[:4]"}))
    trained = {example["question"] for example in task.train}
    assert len(trained) == len(task.train) == 26
    assert not trained & {example["question"] for example in task.evals[f"{data}:train[:4]"]}


def test_rule_reward_model_and_data_may_be_one_s_own(user, main, out):
    settings = {"eval_dataset": f"{user['dataset']}:train[:9]", "output_dir": out, "steps": 4}
    settings |= {"method": "test_dppo:KeepLargest", "reward": "test_dppo:short"}
    main(**user, **settings, prompts_per_step=4)


# ==== 11. The embedded task ====
@pytest.mark.parametrize("eval_prompts", [0, 2, 61, 3000])
def test_the_embedded_task_has_its_classes_and_evaluates_the_middle_one(eval_prompts):
    train, evals, _ = dppo.sorting_data(Config(eval_prompts=eval_prompts))
    for size, low, high in dppo.SORTING.values():
        of_class = [e for e in train.values() if low <= len(e["answer"]) <= high]
        assert len(of_class) == size
        for example in of_class:
            assert sorted(example["prompt"]) == [*example["answer"], "="]
    assert evals.keys() == {"middle"} and len(evals["middle"]) == eval_prompts
    assert not train.keys() & evals["middle"].keys()
    assert {len(e["answer"]) for e in evals["middle"].values()} <= {9, 10, 11, 12}
    assert train == dppo.sorting_data(Config(eval_prompts=99, seed=1))[0]


def test_first_runs_make_the_same_whole_model_and_later_ones_take_it(tmp_path, monkeypatch):
    def train_step(model, optimizer, sequences, *_):
        model.lm_head.weight.data += sum(sequences[0][1])

    monkeypatch.setattr(dppo, "train_step", train_step)
    models = []
    for cache in (tmp_path / "one", tmp_path / "two", tmp_path / "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        models.append(dppo.warm_started(transformers.ByT5Tokenizer(extra_ids=0)).lm_head.weight)
        assert len([path for path in cache.rglob("*") if path.is_file()]) == 1
    assert torch.equal(models[0], models[1]) and torch.equal(models[1], models[2])


# ==== 12. Settings ====
BAD_SETTINGS = [
    ("--prompt_prune_rate 1", "--prompt_prune_rate 1.0 must"),
    ("--method dpo", "--method dpo is not one of "),
    ("--method test_dppo", "it cannot be called; write module:name"),
    ("--reward test_dppo", "it cannot be called; write module:name"),
    ("--objective ppo", "invalid choice: 'ppo' (choose from 'grpo', 'dr_grpo'"),
    ("--chat_template_kwargs {", "--chat_template_kwargs must be a JSON object"),
    ("--dataset x", "--model or --dataset is missing"),
    ("--output_dir {run}", "{run} exists: name another --output_dir"),
    ("--resume {run}", "{run}/checkpoint.pt cannot be read: [Errno 2] No such file"),
    ("--history {run}/x", "{run}/x/checkpoint.pt cannot be read: [Errno 2] No such file"),
    ("--resume x", "x/config.json"),
]


@pytest.mark.parametrize("arguments, message", BAD_SETTINGS)
def test_bad_settings_leave_nothing(arguments, message, refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(dppo, "load_task", lambda config: tiny_task(evals=0))
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / name).write_text("{}\n")
    arguments = arguments.replace("{run}", str(tmp_path)).split()
    assert message.replace("{run}", str(tmp_path)) in refusal(*arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "config.json"}


def test_numbers_that_would_train_on_nonsense_are_refused():
    for option in fields(Config):
        value = getattr(Config(), option.name)
        if isinstance(value, (int, float)):
            wrong = [-1, math.nan, math.inf] + [0] * (option.name in dppo.LEAST)
            for nonsense in wrong:
                with pytest.raises(ValueError, match=f"^--{option.name} {nonsense} must"):
                    Config(**{option.name: nonsense})


# ==== 13. Runs ====
def records(out):
    """The records of a run, but for what differs between two runs that are the same."""
    aside = {"cumulative_seconds", "rollout_seconds", "train_seconds", "evaluation"}
    kept = []
    for record in metrics(out):
        kept.append({name: record[name] for name in record.keys() - aside})
    return kept


def test_a_seed_gives_the_same_metrics_however_often_one_evaluates(tmp_path):
    settings = {"method": OURS, "objective": "dapo", "inner_epochs": 2, "steps": 6}
    run(tmp_path / "first", seed=4, **settings)
    run(tmp_path / "again", seed=4, eval_every=2, **settings)
    assert records(tmp_path / "first") == records(tmp_path / "again")
    for name, expected in (("first", [0, 6]), ("again", [0, 2, 4, 6])):
        evaluated = [line["step"] for line in metrics(tmp_path / name) if "evaluation" in line]
        assert evaluated == expected


def test_an_evaluation_is_the_same_each_time_and_not_made_twice(monkeypatch, tmp_path):
    [evaluations] = spy(monkeypatch, "evaluate")
    summary = run(tmp_path / "one", steps=4, eval_every=2, learning_rate=0.0)
    assert [result for _, result in evaluations] == [summary["before"]] * 3
    assert summary["after"] == summary["before"]
    run(tmp_path / "two", steps=5, eval_every=2)
    assert len(evaluations) == 7  # before, after steps 2 and 4, and at the end
    assert run(tmp_path / "three", steps=0)["after"] == summary["before"]
    assert len(evaluations) == 8
    lines = [record["evaluation"] for record in metrics(tmp_path / "one")[::2]]
    assert lines == [summary["before"]] * 3  # the first line is of step 0


def test_evaluations_average_over_prompts_and_are_null_where_nothing_is_graded(out):
    graded = iter([[1, 0, 0, 0], [1, 1, 0, None, 1, 0], [None] * 2])
    task = tiny_task(lambda prompts, **_: next(graded, [None] * len(prompts)))
    task.evals = {"one": task.train[:2], "two": task.train[:3], "three": task.train[:1]}
    result = dppo.evaluate(task, Config(eval_samples=2))
    assert result["accuracy"] == 4 / 8
    assert result["one"] == {"avg@2": 0.25, "pass@2": 0.5}
    assert result["two"] == {"avg@2": 0.75, "pass@2": 1.0}
    run(out, task, steps=2, objective="dapo")
    for name in ("summary.json", "metrics.jsonl"):
        assert "null" in (out / name).read_text() and "NaN" not in (out / name).read_text()


FIRST = {"step": 0, "candidates_so_far": 0, "mean_length": None, "cumulative_seconds": 0.0}


def test_where_nothing_is_held_out_the_last_line_says_so(out, capsys):
    run(out, tiny_task(evals=0), steps=2)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("nothing was evaluated; ")


def test_records_estimate_means_over_the_window_and_hold_a_group_that_is_trained(monkeypatch):
    task = tiny_task()
    task.end_ids = [7, 12]
    completions = ([5, 6, 12], [12], [5, 6], [5, 12], [5] * 4, [5] * 5 + [7])
    step = SimpleNamespace(N=5, w_q=torch.tensor([2.0, 1.0, 1.0]).double(), update={"kl": 5.0})
    step.lengths = torch.tensor([len(ids) for ids in completions]).double().view(3, 2)
    step.rewards = torch.tensor([[1, 0], [1, 1], [math.nan, 1]], dtype=torch.float64)
    step.A = group_advantages(step.rewards)
    step.w = torch.tensor([[0.0, 0.0], [1.0, 3.0], [0.0, 2.0]]).double()
    step.sequences = [Sequence([2 + i], ids) for i, ids in enumerate(completions)]
    monkeypatch.setattr(dppo, "dppo_step", lambda *_: step)
    optimizer = SimpleNamespace(param_groups=[{}])
    record = dppo.make_step(FIRST, task, None, optimizer, None, Config())
    expected = {"prompts_seen": 5, "prompts_rolled": 3, "reward": 2 / 3, "kl": 5, "weight_max": 3}
    expected |= {"zero_variance_fraction": 1 / 3, "truncated_fraction": 1 / 6}
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    assert record["prompt"] == "1" and record["completions"] == ["23", "29"]
    assert (record["rewards"], record["weights"]) == ([1, 1], [1, 3])


def test_the_seconds_of_a_run_are_of_all_its_steps_also_if_it_was_resumed(out):
    run(out, steps=3)
    summary = run(out, steps=5)
    steps = sum(recorded(out, "rollout_seconds")) + sum(recorded(out, "train_seconds"))
    assert min(recorded(out, "rollout_seconds") + recorded(out, "train_seconds")) > 0
    assert summary_of(out)["seconds"] == summary["seconds"] == pytest.approx(steps)


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}


# ---- Interruptions and resuming
SMALL = {"prompts_per_step": 4, "save_every": 1, "method": OURS, "objective": "dapo"}
SMALL |= {"steps": 10, "inner_epochs": 2, "learning_rate": 1e-3}


def assert_same_run(one, other):
    """The same weights bit for bit, and the same records and results."""
    first, second = torch.load(one / "checkpoint.pt"), torch.load(other / "checkpoint.pt")
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)
    assert records(one) == records(other)
    first, second = summary_of(one), summary_of(other)
    assert (first["before"], first["after"]) == (second["before"], second["after"])


TWO_PARTS = [(torch.float32, SMALL), (torch.float32, {"objective": "gspo", "beta": 0.1})]
TWO_PARTS += [(torch.bfloat16, {"learning_rate": 1e-4})]


@pytest.mark.parametrize("dtype, settings", TWO_PARTS)
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
    tiny_task()  # imports what is imported late, as otherwise each process would
    start = time.perf_counter()
    assert not was_killed(folder / "whole", 0)
    duration, rng, kills = time.perf_counter() - start, random.Random(0), 0
    while was_killed(folder / "killed", rng.uniform(0.1, 0.7) * duration):
        kills += 1
        if not (folder / "killed" / "checkpoint.pt").exists():  # it starts again
            shutil.rmtree(folder / "killed", ignore_errors=True)
    assert kills > 0
    assert_same_run(folder / "whole", folder / "killed")


def test_slow_a_run_killed_at_random_moments_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    code = f"import pathlib, test_dppo; test_dppo.kill_often(pathlib.Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)


def test_a_process_that_dies_saving_leaves_the_last_checkpoint(monkeypatch, out):
    run(out, steps=2)
    whole = (out / "checkpoint.pt").read_bytes()

    def save(saved, path):
        path.write_bytes(b"half")
        raise SystemError

    with monkeypatch.context() as patch, pytest.raises(SystemError):
        patch.setattr(torch, "save", save)
        run(out, steps=4)
    assert (out / "checkpoint.pt").read_bytes() == whole


def files_of(folder):
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["checkpoint.pt", "config.json"])
def test_a_run_of_which_a_file_is_missing_or_cut_is_refused_and_left_as_it_is(name, out):
    run(out, steps=2)
    whole = (out / name).read_bytes()
    middle = whole[:300] + bytes(len(whole) - 600) + whole[-300:]
    for damaged in (None, whole[:-100], middle):
        (out / name).unlink() if damaged is None else (out / name).write_bytes(damaged)
        before = files_of(out)
        with pytest.raises((ValueError, FileNotFoundError)):
            run(out, steps=4, resume=str(out))
        assert files_of(out) == before


@pytest.mark.parametrize("damage", [b"", b"{}\n" * 9, None])
def test_metrics_are_written_anew_from_the_checkpoint(damage, tmp_path):
    for folder, steps in (("whole", 4), ("damaged", 2)):
        run(tmp_path / folder, steps=steps)
    metrics_file = tmp_path / "damaged" / "metrics.jsonl"
    metrics_file.unlink() if damage is None else metrics_file.write_bytes(damage)
    run(tmp_path / "damaged", steps=4)
    assert records(tmp_path / "whole") == records(tmp_path / "damaged")


def test_other_data_another_rule_or_other_settings_are_not_resumed(out):
    run(out, steps=2)
    before, other = files_of(out), tiny_task()
    other.train[3]["answer"] = "0"
    different = {"eval_prompts": 3, "temperature": 0.1, "reward": "test_dppo:short", "seed": 1}
    for name, value in different.items():
        with pytest.raises(ValueError, match=f"--{name} must be"):
            run(out, **{name: value})
    for task, method in ((tiny_task(prompts=15), PAPER), (other, PAPER), (None, "grpo")):
        with pytest.raises(ValueError, match="was made with another method or other data"):
            run(out, task, method=method)
    assert files_of(out) == before
    new = {"micro_batch_tokens": 100, "rollout_batch_size": 8, "save_every": 1, "eval_every": 1}
    run(out, steps=4, **new)
    assert json.loads((out / "config.json").read_text()).items() > new.items()  # from now on
    assert recorded(out, "step") == [1, 2, 3, 4]


@pytest.mark.parametrize("method", [PAPER, OURS])
def test_a_run_with_history_prunes_from_its_first_step(method, monkeypatch, tmp_path):
    settings = {"method": method, "prompts_per_step": 2, "objective": "dapo"}
    run(tmp_path / "first", tiny_task(prompts=4, evals=0), steps=8, **settings)
    saved = torch.load(tmp_path / "first" / "checkpoint.pt")
    settings |= {"history": str(tmp_path / "first")}
    for message, prompts, other in (("other data", 5, {}), ("method", 4, {"method": "grpo"})):
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "other", tiny_task(prompts=prompts), **settings | other)
    monkeypatch.setattr(torch, "load", mock.Mock(wraps=torch.load))
    config = Config(**settings, output_dir=str(tmp_path / "second"))
    task, rule = tiny_task(prompts=4, evals=0), config.rule(config, 4)
    optimizer = dppo.MasterAdam(task.model, 0.0)
    _, [first] = dppo.start(config, task, rule, optimizer)
    assert torch.load.call_args.kwargs["weights_only"]  # so that no code can run
    for name, memory in saved["memory"].items():
        assert memory.equal(rule.memory[name])
    last = saved["records"][-1]
    assert first["mean_length"] == last["mean_length"] and first["step"] == 0
    monkeypatch.setattr(transformers, "set_seed", mock.Mock())
    assert dppo.make_step(first, task, rule, optimizer, None, config)["step"] == 1
    transformers.set_seed.assert_called_with(last["candidates_so_far"])  # no draw is made twice


@pytest.mark.parametrize("times, kept", [(1, 6), (2, 4)])
def test_ctrl_c_and_a_second_ctrl_c(times, kept, main, monkeypatch, capsys, out):
    """While a run of 9 steps that saves every 4 is in its sixth: it ends after that, or at once."""
    calls = itertools.count(1)

    def reward(**columns):
        if next(calls) == 1 + 6:  # the first is the evaluation
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return lengths_reward(**columns)

    monkeypatch.setattr(dppo, "load_task", lambda config: tiny_task(reward))
    with pytest.raises(SystemExit) as exit_:
        main(steps=9, prompts_per_step=4, output_dir=out, save_every=4)
    assert exit_.value.code == 130
    told = capsys.readouterr()
    assert "stops after this step; Ctrl-C again stops at once" in told.err
    assert torch.load(out / "checkpoint.pt")["records"][-1]["step"] == kept
    assert (out / "model").exists() == (times == 1)
    assert (f"go on with: python dppo.py --resume='{out}'" in told.out) == (times == 1)
    main(resume=out)
    assert recorded(out, "step") == list(range(1, 10))


def test_of_two_runs_in_a_folder_the_later_is_refused(monkeypatch, out):
    def evaluate(task, config):
        out.mkdir()  # meanwhile, another has begun
        return {"accuracy": 0.0}

    monkeypatch.setattr(dppo, "evaluate", evaluate)
    with pytest.raises(ValueError, match="cannot be written: .* File exists"):
        run(out)


@pytest.mark.parametrize(
    "threads, own_model, expected", [(4, False, [2]), (1, False, [1]), (4, True, [])]
)
def test_the_embedded_model_takes_half_of_the_threads(
    threads, own_model, expected, user, main, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", mock.Mock())
    monkeypatch.setattr(dppo, "load_task", lambda config: None)
    monkeypatch.setattr(dppo, "train", lambda config, task: None)
    main(**user if own_model else {})
    assert [call.args[0] for call in torch.set_num_threads.mock_calls] == expected


# ---- The plain command, for which the other tests leave a core idle
@pytest.fixture(scope="session", autouse=True)
def plain_command(request, tmp_path_factory):
    """Runs in the background, if its test is among those chosen."""
    if not any("plain_command" in item.name for item in request.session.items):
        yield
        return
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, dppo.__file__, "--steps", "40", "--output_dir", folder / "run"]
    command += ["--prompts_per_step", "32"]  # an epoch has 32 steps
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
    line = (folder / "printed").read_text().splitlines()[-1]
    accuracies = r"accuracy: middle \d.\d\d -> \d.\d\d; \d+ s of training"
    assert re.match(f"{accuracies}; results are in {re.escape(str(out))}$", line)
    printed = re.findall(r"^step (\d+): accuracy 0\.\d\d$", (folder / "printed").read_text(), re.M)
    assert printed == ["0", "10", "20", "30", "40"]
    summary = summary_of(out)
    assert summary["after"]["middle"]["avg@4"] > summary["before"]["middle"]["avg@4"] + 0.12
    files = {"metrics.jsonl", "summary.json", "config.json", "checkpoint.pt", "model"}
    assert files.issuperset(os.listdir(out))
    assert sum(recorded(out, "prompts_rolled")) < 0.8 * sum(recorded(out, "prompts_seen"))
    transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    _, ids = dppo.encode_prompt("12=", Config(), tokenizer)
    assert ids[-1] == ord("=") + 3  # and not the end id
