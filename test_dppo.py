"""A proof that dppo.py prunes without bias, checked on small instances, and its other guarantees.

    python -m pytest -q

The first test is the idea, by hand, in four numbers. The second is the theorem itself.

THEOREM. Take any rule with unbiased = True that gives pi > 0 wherever there is a gradient. The loss
L_hat of a step's first update then has, on average over the draws, the gradient of the full loss L,
the mean of l_i over all N G completions: E[grad L_hat] = grad L. This is conditional on

  - the policy theta and, for the KL term, the reference;
  - the rule, with all that it remembers, and the order of the prompts, which fix limit and N;
  - for dapo, the mean length of earlier steps (a first step takes its own, and must prune none);
  - the completions of the N candidates and their rewards; for a pruned prompt, those that it would
    have had.

PROOF. Lemma 1 is mathematics, the others are facts about the code.

  1. Where pi > 0, a draw gives a weight of expectation pi (1/pi) + (1 - pi) 0 = 1, as a tooth of
     its comb falls on an item with probability pi. Whichever prompts are drawn, w_qi then has
     expectation 1, and so w_i = w_q w_qi has it, too, unless l_i has no gradient.
  2. The gradient of train_step is linear in the shares: it is sum_i share_i h_i, where h_i is the
     gradient of the sum of the token losses of completion i alone.
  3. Token losses and Z are the formulas of the objective: l_i is 1/Z_i times that sum.
  4. Packing changes neither log-probabilities nor gradients.
  5. dppo_step trains completion i on its advantage in its whole group and with share_i = w_i/(N G
     Z_i), in which no draw changes N or Z_i, and draws completions anew for every update.

Hence E[grad L_hat] = sum_i E[w_i] h_i/(N G Z_i) = sum_i h_i/(N G Z_i) = grad L.

Two lemmas on our own rule follow, 6 on its line and 7 on what a rollout is worth; then six ways to
lose unbiasedness, of which dppo.py refuses the third, and what a policy learns without it. The last
two limit the theorem: it holds neither for later updates on a rollout, for which prompts cannot be
drawn anew, nor for what clipping and Adam make of a gradient.

Not proven: that random numbers are random (one test counts them), and draws independent; that a
rollout and its rewards have the same distribution whichever other prompts survive; anything about
other models, or bfloat16, where packing rounds; and that prompts count the same over an epoch (one
of low pi makes its window longer, so it counts less, by about (1 - pi)/B).
"""

import inspect
import itertools
import json
import math
import os
import random
import re
import runpy
import signal
import subprocess
import sys
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


# ==== By hand ====
def test_four_gradients_of_mean_2_have_it_on_average_although_two_are_always_pruned():
    gradients, scores = torch.tensor([4.0, 2.0, 1.0, 1.0]), torch.tensor([3.0, 1.0, 1.0, 1.0])
    pi = dppo.keep_probabilities(scores, rate=0.7)  # of three low ones floor(0.7 * 3) are pruned
    assert pi.tolist() == [1, 1 / 3, 1 / 3, 1 / 3]
    outcomes = set()
    for seed in range(50):
        weights = draw(pi, torch.Generator().manual_seed(seed))
        outcomes.add(tuple(weights.tolist()))
    assert outcomes == {(1, 3, 0, 0), (1, 0, 3, 0), (1, 0, 0, 3)}  # equally likely
    estimates = [(torch.tensor(weights) * gradients).mean().item() for weights in outcomes]
    assert sorted(estimates) == [(4 + 3) / 4, (4 + 3) / 4, (4 + 6) / 4]
    assert sum(estimates) / 3 == gradients.mean() == 2  # and without weights 8/3, of what is kept


# ==== The theorem ====
# Chance is replaced by enumeration. A draw depends on two random things alone, an order and a
# number u. As weights are piecewise constant in u, one u of each piece is enough.
def every_draw(pi):
    """All outcomes of draw(pi) -> [(probability, (n,) weights)]. The pieces of u end where items
    do, modulo 1. Items with pi of 0 or 1 shift the others by whole numbers only."""
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


class OneMore(Exception):
    """A function draws once more than its path has outcomes."""


def every_result(function):
    """All outcomes of a function, however often it draws -> [(probability, result)]. A path is the
    outcomes of its draws so far, on which later pi may depend."""
    results = []
    stack = [(1.0, [])]
    while stack:
        probability, path = stack.pop()
        try:
            with mock.patch.object(dppo, "draw", side_effect=[*path, OneMore]) as scripted:
                results.append((probability, function()))
        except OneMore:
            pi, _ = scripted.call_args.args
            stack += [(probability * p, [*path, weights]) for p, weights in every_draw(pi)]
    return results


# Six prompts with three completions each. In the third, a reward is missing. In the second and the
# last, all are equal, and the last lies outside the windows.
REWARDS = [[1, 0, 0], [0, 0, 0], [math.nan, 0.9, 1], [0, 0, 1], [1, 0.7, 0.2], [1, 1, 1]]
REWARDS = torch.tensor(REWARDS, dtype=torch.float64)
ADVANTAGES = group_advantages(REWARDS)
LIMIT, G = 3, 3
# What is remembered of the six: the last score, or sums of rewards. The second had no visit.
REMEMBERED = {"score": [0.1, math.nan, 0.2, 0.3, 0.6, 0.9], "range": [0, 1]}
REMEMBERED |= {"rewards": [8, 0, 0.3, 4, 5, 1], "count": [8, 0, 7.3, 8, 6, 7]}
REMEMBERED |= {"visits": [2] * 17, "squares": [0.1, 0.2] * 3 + [1, 2] * 3 + [0.5] * 5}


class OwnRule(dppo.Rule):
    """As somebody might write one: any probabilities that are known before the draw."""

    def prompt_probabilities(self):
        return torch.tensor([0.25, 0.5, 0.75, 0.5, 0.9, 0.5])

    def completion_probabilities(self, advantages, prompt_weights):
        return torch.where(advantages < 0, 0.3, 1.0)


PAPER, OURS, OWN = "dppo", "dppo-proportional", "test_dppo:OwnRule"


def rule_with_history(method=PAPER, r_q=0.8, r_o=0.7, **settings):
    rates = {"prompt_prune_rate": r_q, "completion_prune_rate": r_o}
    config = Config(method=method, group_size=G, **rates | settings)
    rule = config.rule_class(config, 6)
    for name in rule.memory.keys() & REMEMBERED:
        rule.memory[name] = torch.tensor(REMEMBERED[name], dtype=torch.float64)
    return rule


def tiny_model(dtype=torch.float64, name="Qwen3ForCausalLM", **sizes):
    """A model with 13 tokens and a few thousand random weights, large enough to matter."""
    torch.manual_seed(0)
    shape = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shape |= {"max_position_embeddings": 256, "initializer_range": 0.3}
    shape |= {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1}
    model = getattr(transformers, name)
    return model(model.config_class(**shape | sizes)).to(dtype).eval()


def random_sequences():
    """(prompt ids, completion ids) of six groups, which fill several slots."""
    rng, sequences, ids = random.Random(0), [], range(2, 13)
    for i in range(6 * G):
        prompt = rng.choices(ids, k=20 + 5 * (i // G))
        sequences.append(Sequence(prompt, rng.choices(ids, k=1 + i % 7)))
    return sequences


def lengths_of(sequences):
    return [len(sequence.completion) for sequence in sequences]


class Given:
    """Model, reference, the completions of all six prompts and their Z. Unless it is the first
    update, the old policy differs so much that tokens are clipped."""

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

    def update(self, shares, optimizer, advantages=ADVANTAGES):
        inputs = (self.sequences, advantages, shares, self.old, self.ref, self.config)
        return dppo.train_step(self.model, optimizer, *inputs)

    def descent(self, update, optimizer=torch.optim.SGD):
        """(parameters,) what update(optimizer) takes off the model in descent at rate 1."""
        before = self.parameters()
        update(optimizer(self.model.parameters(), lr=1.0))
        gradient = before - self.parameters()
        vector_to_parameters(before, self.model.parameters())
        return gradient

    def gradient(self, shares, advantages=ADVANTAGES):
        return self.descent(partial(self.update, shares, advantages=advantages))


ONCE, ONE_TWICE = [0, 1, 2, 3, 4, 5], [0, 1, 0, 4, 2, 5]
STEPS = [(PAPER, "grpo", 0.0, 3, ONCE), (OURS, "grpo", 0.0, 5, ONCE), (OURS, "grpo", 0.1, 3, ONCE)]
STEPS += [(PAPER, "gspo", 0.0, 3, ONCE), (OWN, "dapo", 0.0, 3, ONCE)]
STEPS += [(PAPER, "dr_grpo", 0.0, 3, ONE_TWICE)]


@pytest.mark.parametrize("method, objective, beta, most, upcoming", STEPS)
def test_theorem(method, objective, beta, most, upcoming, monkeypatch):
    """The gradient of dppo_step, averaged over every outcome of both draws, is that of all N G
    completions. Prompt 0 may be there twice, as two candidates with the same completions. Of five
    prompts, our rule wants only four, which have the same noise."""

    def step(optimizer):
        rule = rule_with_history(method, beta=beta, prompts_per_step=most)
        inputs = (given.reference, torch.tensor(upcoming), 2.5, None, given.config)
        step = dppo.dppo_step(task, rule, optimizer, *inputs)
        sizes.add((step.N, step.limit))

    def rollout(task, kept, *_):
        return sum((groups[q] for q in kept), []), REWARDS[kept], 0.0

    given, sizes = Given(objective, first=True, beta=beta), set()
    task = Task(list(range(6)), {}, None, None, given.model)  # an example is the number of a group
    groups = [given.sequences[G * q : G * (q + 1)] for q in range(6)]
    advantages = group_advantages(REWARDS, objective != "dr_grpo")
    monkeypatch.setattr(dppo, "rollout", rollout)
    steps = every_result(partial(given.descent, step))
    [(N, limit)] = sizes  # the same, whatever is drawn
    times = torch.bincount(torch.tensor(upcoming[:N]), minlength=6)
    full = given.gradient(times[:, None] / (N * G * given.Z), advantages)
    expectation = sum(p * gradient for p, gradient in steps)
    assert len(steps) > 5 and limit == min(most, 4) and full.norm() > 0.01
    assert (expectation - full).norm() < 1e-6 * full.norm()


# ==== Lemma 1: weights have the expectation 1 ====
@pytest.mark.parametrize("pi", [[0.5] * 4, [0.4] * 5 + [1.0], [0.3, 0.9, 0.2, 0.05], [0, 0.5, 0.2]])
def test_draw_keeps_each_item_with_its_own_probability(pi):
    pi = torch.tensor(pi, dtype=torch.float64)
    for _, weights in every_draw(pi):
        kept = weights > 0
        assert torch.allclose(weights[kept], 1 / pi[kept])
        assert abs(kept.sum() - pi.sum()) < 1 - 1e-9  # rounded down or up
    expectation = sum(p * weights for p, weights in every_draw(pi))
    assert torch.allclose(expectation, (pi > 0).double(), rtol=0, atol=1e-12)


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


def test_every_weight_has_expectation_one_unless_there_is_no_gradient():
    rates = [(0.7, 0.4, 0.0), (0.7, 0.7, 0.0), (0.7, 0.7, 0.1)]  # r_q, r_o, beta
    cases = [*itertools.product((PAPER, OURS), rates), (PAPER, (0.4, 0.7, 0.0)), (OWN, rates[0])]
    seen = []  # by each rule at each rate: all should differ
    for method, (r_q, r_o, beta) in cases:
        outcomes = every_weight(method, r_q, r_o, beta=beta)
        [N] = {N for _, (N, _) in outcomes}  # the same, whatever is drawn
        expectation = sum(p * w for p, (_, w) in outcomes)
        needed = dppo.has_gradient(ADVANTAGES[:N], beta)
        assert torch.allclose(expectation[needed], torch.ones(1).double(), rtol=0, atol=1e-10)
        assert method == OWN or not expectation[~needed].any()  # our rules leave these out
        seen.append(frozenset(tuple(w.flatten().tolist()) for _, (_, w) in outcomes))
    assert min(map(len, seen)) > 1 and len(set(seen)) == len(seen)


# ==== Lemma 2: the gradient is linear in the shares ====
def flat_gradient(loss, model):
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def alone(given, i):
    """(tokens,) losses and entropies of completion i by itself."""
    new, entropies, owner = dppo.completion_logprobs(given.model, given.sequences, [[i]], 1.0)
    old = given.old[i] if given.old else new.detach()
    A = ADVANTAGES.flatten().float()
    return dppo.token_losses(new, old, given.ref[i], owner, A, given.config), entropies


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("objective", dppo.CLIPPING)
def test_the_gradient_of_train_step_is_linear_in_the_shares(objective, first):
    given, loss = Given(objective, first), 0.0
    shares = torch.linspace(0, 3, 6 * G) * torch.tensor([1, 0, 1] * 6)
    for i, share in enumerate(shares):
        losses, _ = alone(given, i)
        loss = loss + share * losses.sum()
    expected = flat_gradient(loss, given.model)
    assert (given.gradient(shares) - expected).norm() < 1e-6 * expected.norm()


# ==== Lemma 3: token losses and Z ====
PUBLISHED = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("objective", PUBLISHED)
def test_the_loss_is_its_formula_and_so_is_its_gradient(objective, beta):
    config = Config(objective=objective, beta=beta, max_completion_tokens=9)
    lengths = torch.tensor([3.0, 1, 7, 4]).double()
    owner = torch.arange(4).repeat_interleave(lengths.long())
    new, old, ref = -3 * torch.rand(3, 15, generator=torch.Generator().manual_seed(34)).double()
    A = torch.tensor([1.5, -0.5, -2.0, 0.0]).double()
    new.requires_grad_()
    losses = dppo.token_losses(new, old, ref, owner, A, config)
    loss = (losses / dppo.normalizer(lengths, 2.5, config)[owner]).sum()
    A = A[owner]
    (down, up), expected, clipped = PUBLISHED[objective], 0.0, 0
    for i in range(4):
        tokens = (owner == i).nonzero().flatten()
        Z = {"dr_grpo": 9, "dapo": 2.5}.get(objective, len(tokens))
        mean = (new - old)[tokens].mean()
        for t in tokens:
            rho = (mean if objective == "gspo" else (new - old)[t]).exp()
            surrogate = min(rho * A[t], rho.clamp(1 - down, 1 + up) * A[t])
            x = (ref[t] - new[t]).exp()
            k3 = x - 1 - x.log()
            expected += (beta * k3 - surrogate) / Z
            clipped += surrogate < rho * A[t]
    assert clipped > 3 and abs(loss - expected) < 1e-12
    gradients = [torch.autograd.grad(value, new)[0] for value in (loss, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)
    assert bool(gradients[0][A == 0].any()) == (beta > 0)


# ==== Lemma 4: packing ====
def test_packing_changes_neither_log_probabilities_nor_gradients():
    """Against a small Qwen3's own forward pass on one sequence at a time. Logits are made of 512
    tokens at a time. Here are more."""
    given, made = Given(micro_batch_tokens=2000), []
    given.model.lm_head.register_forward_hook(lambda *call: made.append(len(call[2])))
    sequences = [Sequence(prompt, 20 * completion) for prompt, completion in given.sequences]
    model, packed, separate = given.model, 0.0, 0.0
    micro_batches = dppo.pack_micro_batches(sequences, range(6 * G), given.config)
    assert sum(lengths_of(sequences)) > 512 * len(micro_batches)
    assert min(len(micro_batches), max(map(len, micro_batches[0]))) > 1
    for slots in micro_batches:
        batch = list(itertools.chain(*slots))
        logprobs, entropies, owner = dppo.completion_logprobs(model, sequences, slots, 0.7)
        assert owner.unique_consecutive().tolist() == batch
        for i in batch:
            prompt, completion = sequences[i]
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            distributions = (logits.float() / 0.7).log_softmax(dim=-1)
            expected = distributions[range(len(completion)), completion]
            entropy = -(distributions.exp() * distributions).sum(dim=-1)
            assert torch.allclose(logprobs[owner == i], expected, atol=1e-4)
            assert torch.allclose(entropies[owner == i], entropy, atol=1e-4)
            packed += (1 + i) * logprobs[owner == i].sum()
            separate += (1 + i) * expected.sum()
    assert max(made) == 512
    packed, separate = flat_gradient(packed, model), flat_gradient(separate, model)
    assert (packed - separate).norm() < 1e-6 * separate.norm()


# ==== Lemma 5: dppo_step in a run ====
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


def seldom_teaches(prompts, completions, **columns):
    """The same for long prompts, and 0 for short ones, so that it pays to prune these."""
    rewards = lengths_reward(prompts, completions)
    return [reward * (len(p) > 5) for p, reward in zip(prompts, rewards)]


def tiny_task(reward=lengths_reward, model=None, prompts=16, evals=4):
    tokenizer, rng, train = tiny_tokenizer(), random.Random(0), {}
    while len(train) < prompts:
        example = dppo.sorting_example(["easy", "middle"][len(train) % 2], rng, tokenizer)
        train[example["prompt"]] = example
    train = list(train.values())
    evals = {"some": train[:evals]} if evals else {}
    return Task(train, evals, tokenizer, reward, model or tiny_model(torch.float32), [1])


def run(out, task=None, **settings):
    """A run of small steps to its end, new or resumed."""
    defaults = {"group_size": 4, "max_completion_tokens": 8, "output_dir": str(out)}
    folder = {"resume": str(out)} if Path(out, "checkpoint.pt").exists() else {}
    dppo.train(Config(**defaults | folder | settings), task or tiny_task())


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def recorded(out, name):
    return [record[name] for record in metrics(out)[1:]]  # of each step


def noted(real, calls, *values, **named):
    result = real(*values, **named)
    arguments = inspect.signature(real).bind(*values, **named).arguments
    calls.append((SimpleNamespace(**arguments), result))
    return result


def spy(monkeypatch, *names):
    """Lists that note the calls of functions of dppo, as (arguments by their names, result)."""
    lists = [[] for _ in names]
    for name, calls in zip(names, lists):
        monkeypatch.setattr(dppo, name, partial(noted, getattr(dppo, name), calls))
    return lists


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("objective", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("method", [PAPER, OURS])
def test_dppo_step_trains_completions_with_their_advantages_and_shares(
    method, objective, monkeypatch, out
):
    """In a run. The rewards are computed again, from the sequences that train_step gets."""
    windows, draws, updates = spy(monkeypatch, "prune_prompts", "prune_completions", "train_step")
    steps, kind = spy(monkeypatch, "dppo_step")[0], dppo.RULES[method]
    remember = mock.Mock(side_effect=kind.remember, autospec=True)
    monkeypatch.setattr(kind, "remember", lambda *visit: remember(*visit))
    task = tiny_task(seldom_teaches, prompts=24)
    settings = {"objective": objective, "prompt_prune_rate": 0.9, "completion_prune_rate": 0.3}
    run(out, task, method=method, prompts_per_step=8, inner_epochs=2, steps=16, **settings)
    records, all_weights, mean_length = metrics(out), [], 0.0
    for n, (given, step) in enumerate(steps):
        window, (N, prompts, w_q) = windows[n]
        of_step = slice(2 * n, 2 * n + 2)  # two updates
        sequences, A = updates[2 * n][0].sequences, updates[2 * n][0].advantages
        examples = [task.train[q] for q in prompts]
        for example, sequence in zip(examples, sequences[:: A.shape[1]]):
            assert sequence.prompt == example["prompt_ids"]
        rewards = dppo.reward_completions(task, examples, sequences)
        assert torch.equal(A, group_advantages(rewards, objective != "dr_grpo"))
        _, *visit = remember.call_args_list[n].args
        assert all(map(torch.equal, visit, (prompts, rewards, A)))
        lengths = torch.tensor(lengths_of(sequences)).double().view_as(A)
        Z = {"grpo": lengths, "dapo": mean_length or lengths.mean(), "dr_grpo": 8}[objective]
        for (update, _), (drawn, w_qi) in zip(updates[of_step], draws[of_step]):
            assert drawn.prompt_weights is w_q and drawn.advantages is update.advantages is A
            all_weights.append(w_q[:, None] * w_qi)
            assert torch.allclose(update.shares, all_weights[-1] / (N * A.shape[1] * Z))
        length = (w_q @ lengths.mean(dim=1) / w_q.sum()).item()
        mean_length = 0.9 * (mean_length or length) + 0.1 * length
        assert step.mean_length == pytest.approx(mean_length) == records[n + 1]["mean_length"]
        assert given.mean_length == records[n]["mean_length"]
        assert records[n + 1]["weight_max"] == all_weights[2 * n].max()
        assert records[n + 1]["rollout_worth"] == 8 / window.limit and step.limit == window.limit
    assert sum(not a.equal(b) for a, b in zip(all_weights[::2], all_weights[1::2])) > 6
    assert max(N for _, (N, _, _) in windows) > 8
    assert (min(window.limit for window, _ in windows) < 8) == (method == OURS)


def test_later_updates_compare_with_the_policy_that_sampled(monkeypatch, out):
    """Were the first compared, too, rounding in another packing might be clipped in bfloat16. The
    reference of the KL term is the policy before the first step."""
    samples, updates = spy(monkeypatch, "sample", "train_step")
    settings = {"inner_epochs": 3, "learning_rate": 1e-2, "warmup_steps": 0, "beta": 0.1}
    run(out, tiny_task(evals=0), steps=2, **settings)
    for n, (update, _) in enumerate(updates):
        _, (_, sampled) = samples[n // 3]
        sampled = sampled.split(lengths_of(update.sequences))
        assert bool(update.old) == (n % 3 > 0)
        for i, old in (update.old or {}).items():
            assert torch.allclose(old, sampled[i], atol=1e-4)
        for i, ref in update.ref.items():
            assert torch.allclose(ref, sampled[i], atol=1e-4) == (n < 3)  # in the first step


# ==== Lemma 6: our rule's line ====
def test_pi_rises_from_1_minus_rate_in_proportion_to_the_score_up_to_1():
    scores = torch.tensor([0.0, 1.0, 3.0, 4.0, 9.0, math.nan])
    pi = dppo.proportional_probabilities(scores, rate=0.8, top=4.0)
    assert pi.tolist() == pytest.approx([0.2, 0.4, 0.8, 1, 1, 1])  # so no weight exceeds 1/0.2
    assert dppo.proportional_probabilities(0 * scores, rate=0.8, top=0.0).eq(1).all()


def test_of_completions_the_line_ends_at_the_mean_and_scores_count_the_prompt_s_weight():
    advantages = torch.tensor([[3.0, -1.0, -2.0], [1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]).double()
    rule = dppo.ProportionalDPPO(Config(completion_prune_rate=0.6), 3)
    pi = rule.completion_probabilities(advantages, torch.tensor([1.0, 4.0, 9.0]).double())
    # The scores are 3, 1, 2; 4, -, 4; none. Their mean is 2.8.
    line = [1 - 0.6 * (1 - score / 2.8) for score in (1, 2)]
    assert pi.flatten().tolist() == pytest.approx([1, *line, 1, 0, 1, 0, 0, 0])
    assert not rule.completion_probabilities(0 * advantages, torch.ones(3)).any()


# ==== Lemma 7: what a rollout is worth ====
def noise_of(rule, upcoming, limit):
    """The noise of a step, sum_q |w_q s_q/N|^2, on average over every draw, with what is remembered
    of s^2; and the window."""
    squares = rule.expected_squares()

    def one_draw():
        N, kept, w_q = prune_prompts(rule, upcoming, limit, None)
        return N, (w_q**2 * squares[kept]).sum() / N**2

    outcomes = every_result(one_draw)
    [N] = {N for _, (N, _) in outcomes}
    return sum(p * noise for p, (_, noise) in outcomes).item(), upcoming[:N]


def test_a_rollout_is_worth_what_its_noise_says_and_that_is_between_its_bounds():
    """The rise, by which A^2 is larger in the groups that are rolled out than in all, and what the
    best rule would be worth, that knows s, are its upper bounds."""
    rule = rule_with_history(OURS, 0.9, prompts_per_step=4)
    upcoming = torch.tensor([0, 2, 3, 4, 5])  # all were visited
    noise, window = noise_of(rule, upcoming, 4)
    pi, squares = rule.prompt_probabilities()[window], rule.expected_squares()[window]
    worth = squares.mean().item() / (noise * pi.sum().item())
    rise = (pi * squares).mean() / (pi.mean() * squares.mean())
    assert 1 < worth < min(rise, squares.mean() / squares.sqrt().mean() ** 2)
    for most in (1, 4, 9, 40):
        rule = rule_with_history(OURS, 0.9, prompts_per_step=most)
        assert rule.prompts_to_keep(torch.tensor([*window] * 12)) == max(1, round(most / worth))


def test_a_step_has_the_noise_of_as_many_unpruned_prompts_as_are_wanted():
    """A prompt that teaches, with pi = 1, and three that teach nothing, with pi = 1/3, and so on: a
    rollout is worth two, so two prompts have the noise of four."""
    rule = dppo.ProportionalDPPO(Config(prompt_prune_rate=2 / 3, prompts_per_step=4), 8)
    rule.memory["count"] += 8
    rule.memory["rewards"][[0, 4]] = 4  # half are right, in the others none
    rule.memory["range"] = torch.tensor([0.0, 1.0])
    rule.memory["squares"] = torch.zeros(17).double().index_fill(0, torch.tensor(8), 3)
    upcoming = torch.arange(8)
    assert rule.prompts_to_keep(upcoming) == 2
    noise, _ = noise_of(rule, upcoming, 2)
    assert noise == pytest.approx(rule.expected_squares().mean().item() / 4)


def test_without_pruning_or_before_the_first_visit_a_rollout_is_worth_exactly_one():
    upcoming = torch.arange(6)
    assert rule_with_history(OURS, 0.0, prompts_per_step=5).prompts_to_keep(upcoming) == 5
    fresh = dppo.ProportionalDPPO(Config(prompts_per_step=5), 6)
    assert fresh.prompts_to_keep(upcoming) == 5
    for method in ("grpo", "grpo-skip", PAPER):
        rule = rule_with_history(method, prompts_per_step=5)
        assert rule.prompts_to_keep(upcoming) == 5


# ==== Six ways to lose it, mostly under the paper's rule, with a window of five prompts ====
WINDOW = ADVANTAGES[:5]
GRAD_LOG_P = torch.randn(5, G, 5, generator=torch.Generator().manual_seed(0)).double()


def shares_of(w, Z):
    """(6, G) the shares of (N, G) weights of the first N prompts."""
    shares = torch.zeros_like(Z)
    shares[: len(w)] = w / (w.numel() * Z[: len(w)])
    return shares


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
    rule.completion_probabilities = mock.Mock(return_value=largest)
    with pytest.raises(ValueError, match="0 < pi <= 1"):
        prune_completions(rule, WINDOW, torch.ones(5), None)
    rule.unbiased = False  # a rule that says that it is biased may do so
    prune_completions(rule, WINDOW, torch.ones(5), torch.Generator())


def test_4_looking_on_until_a_prompt_survives_is_biased_in_a_toy():
    """dppo.py only draws here. Of prompts of value 1, 0, 0, 0, each kept with probability 1/2, take
    some until one survives, and average over those that were looked at."""
    values, bias = torch.tensor([1.0, 0.0, 0.0, 0.0]), 0.0
    for p, weights in every_draw(torch.full((4,), 0.5).double()):
        looked_at = int(weights.nonzero()[0]) + 1
        bias += p * ((weights - 1) * values)[:looked_at].mean()
    assert abs(bias) > 0.1


@pytest.mark.parametrize("r_q, r_o", [(0.0, 0.7), (0.7, 0.0)])
def test_5_a_draw_used_again_for_a_second_update_is_biased(r_q, r_o):
    """Of completions, which dppo.py draws anew, and of prompts, which it cannot. An update of
    train_step has moved the model to a place that depends on the draw. There, rho is 1 again."""

    def second_gradient(again, w):
        given = Given(first=True, beta=0.0)
        start, first = given.parameters(), given.gradient(shares_of(w, given.Z))
        vector_to_parameters(start - 3 * first, given.model.parameters())
        return given.gradient(shares_of(w if again else torch.ones_like(w), given.Z))

    outcomes = every_weight(r_q=r_q, r_o=r_o)
    full = sum(p * second_gradient(False, w) for p, (_, w) in outcomes)  # the mean of new draws
    assert relative_bias(partial(second_gradient, True), full, r_q=r_q, r_o=r_o) > 0.05


@pytest.mark.parametrize("norm, optimizer", [(1e-3, torch.optim.SGD), (1e9, torch.optim.Adam)])
def test_6_an_update_is_biased_where_the_norm_is_clipped_and_by_adam(norm, optimizer):
    def update(w):
        return given.descent(partial(given.update, shares_of(w, given.Z)), optimizer)

    given = Given(first=True, beta=0.0, max_grad_norm=norm)
    assert relative_bias(update, update(torch.ones(5, G))) > 0.05


class Unweighted(dppo.DPPO):
    """The paper's rule without its weights. It is biased, and says so."""

    unbiased = False


@pytest.mark.parametrize("rule", [dppo.Rule, dppo.DPPO, Unweighted])
def test_without_weights_a_policy_learns_to_guess_and_with_them_to_pass(rule):
    """It guesses with probability sigmoid(theta). At half of the prompts a guess is right once in
    ten times, but to pass is worth 0.15. Most guesses have a small |A| and the right ones a large
    one, so pruning leaves those, unless weights stand in for what is pruned. The other prompts,
    solved half of the time whatever theta, are there for the mean |A|."""
    rule, generator = rule(Config(), 16), torch.Generator().manual_seed(0)
    theta, unknown = torch.tensor(0.0).double(), (torch.arange(16) % 2 == 0)[:, None]
    for _ in range(200):
        chance = torch.rand(3, 16, 8, generator=generator)
        guess, right, solved = chance < torch.tensor([theta.sigmoid(), 0.1, 0.5])[:, None, None]
        rewards = torch.where(unknown, torch.where(guess, right.double(), 0.15), solved.double())
        A = group_advantages(rewards, scale_by_std=False)
        w = prune_completions(rule, A, torch.ones(16), generator)
        if not rule.unbiased:
            w = (w > 0) * w.numel() / w.count_nonzero()
        grad_log_p = unknown * (guess.double() - theta.sigmoid())
        theta += 3 * (w * A * grad_log_p).mean()
    assert theta.sigmoid() < 0.3 if rule.unbiased else theta.sigmoid() > 0.7


# ==== 1. Advantages and pruning ====
def test_advantages_are_those_of_whole_groups_and_zero_where_there_is_nothing_to_learn():
    none = math.nan
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.1] * 4, [none, 1.0, 0.0, 0.0], [none, 0.1, 0.1, 0.1]]
    rewards = torch.tensor([*rewards, [none, none, 0.3, none], [none] * 4]).double()
    for scale_by_std in (True, False):
        advantages = group_advantages(rewards, scale_by_std)
        for group, given in ((0, rewards[0]), (2, rewards[2, 1:])):  # mean and std of those given
            std = given.std() + 1e-4 if scale_by_std else 1.0
            assert torch.allclose(advantages[group, -len(given) :], (given - given.mean()) / std)
        assert advantages[2, 0] == 0 and advantages[[1, 3, 4, 5]].eq(0).all()


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
    rule = dppo.RULES[method](Config(prompt_prune_rate=rate), 300)
    for _ in range(10):
        order = torch.randperm(300, generator=generator)
        visited = torch.randperm(300, generator=generator)[:240]
        p = torch.rand(240, 1, generator=generator) ** 3
        rewards = (torch.rand(240, 8, generator=generator) < p).double()
        rule.remember(visited, rewards, group_advantages(rewards))
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
    chances = {(kept.item(), round(w.item())): p for p, (_, kept, w) in results}
    assert chances == pytest.approx({(0, 4): 0.25, (1, 2): 0.5, (2, 4): 0.25})
    rule.prompt_probabilities.return_value = torch.tensor([0.6, 0.9, 1.0])  # one or two of these
    results = every_result(lambda: prune_prompts(rule, torch.arange(2), 8, None))
    assert {len(kept) for _, (_, kept, _) in results} == {1, 2}


def test_a_score_is_the_mean_of_the_last_visit_and_that_of_other_prompts_stays():
    rule = dppo.DPPO(Config(), 3)
    rule.remember(torch.tensor([0, 1, 1]), None, torch.tensor([[3.0, -3.0], [1, -1], [1.0, -0.5]]))
    rule.remember(torch.tensor([0]), None, torch.tensor([[2.0, -3.0]]))
    assert rule.memory["score"].nan_to_num(-1).tolist() == [2.5, 0.75, -1.0]


def test_of_completions_those_without_a_gradient_go_first_and_the_mean_is_of_all_others():
    advantages = torch.tensor([[2.0, -1.0, 1.0, 1.0], [0.4, -0.4, 0.4, 0.4], [0.0] * 4]).double()
    pi = dppo.DPPO(Config(), 3).completion_probabilities(advantages, torch.ones(3))
    assert pi.tolist() == [[1.0] * 4, [0.5] * 4, [0.0] * 4]  # the mean is 6.6/8, of eight
    pi = dppo.GRPOSkip(Config(), 3).completion_probabilities(advantages, torch.ones(3))
    assert pi.equal((advantages != 0).double())
    assert dppo.GRPOSkip(Config(beta=0.1), 3).completion_probabilities(advantages, None).all()


def test_a_biased_rule_trains_on_the_mean_of_what_it_keeps(monkeypatch, out):
    def reward(**columns):  # after two steps, all are equal
        return lengths_reward(**columns) if len(updates) < 2 else [0.0] * len(columns["prompts"])

    [updates] = spy(monkeypatch, "train_step")
    task = tiny_task(reward, prompts=64)
    run(out, task, method="test_dppo:Unweighted", steps=4, objective="dr_grpo", prompts_per_step=4)
    shares = [update.shares for update, _ in updates]
    for of_step in shares[:2]:
        kept = of_step > 0
        assert 0 < kept.double().mean() < 1
        assert torch.allclose(of_step[kept], 1 / (kept.sum().double() * 8))  # Z is 8
    assert not torch.cat(shares[2:]).any()


def test_probabilities_of_one_s_own_that_would_bias_in_silence_are_refused():
    wrong = [(True, [0.0, 1, 1, 1]), (True, [2.0, 1, 1, 1]), (True, [1.0] * 3)]
    wrong += [(False, [-0.5, 1, 1, 1]), (False, [math.nan] * 4), (False, [0.0] * 4)]
    for unbiased, pi in wrong:
        rule = dppo.Rule(Config(), 4)
        rule.unbiased = unbiased
        rule.prompt_probabilities = mock.Mock(return_value=torch.tensor(pi))
        with pytest.raises(ValueError, match=r"a rule needs pi (of shape \(4,\)|> 0 for)"):
            prune_prompts(rule, torch.arange(4), 8, None)


# ==== 3. Dense Prompt Packing ====
def test_packing_takes_the_longest_that_fits_among_the_next_in_order():
    assert dppo.pack([5, 3, 8, 2, 2], capacity=10) == [[2, 3], [0, 1, 4]]
    assert dppo.pack([5, 6, 5, 4], capacity=10, lookahead=1) == [[0], [1], [2, 3]]
    slots = dppo.pack([1 + i % 7 for i in range(200)], capacity=10)
    assert sorted(itertools.chain(*slots)) == list(range(200))  # each once


def test_a_micro_batch_has_as_many_slots_as_its_tokens_allow():
    sequences = [Sequence([2] * 3, [3] * n) for n in (130, 50, 50, 70)]  # 133, 53, 53, 73 tokens
    for tokens, expected in {399: [[[0], [3, 1], [2]]], 398: [[[0], [3, 1]], [[2]]]}.items():
        config = Config(micro_batch_tokens=tokens)
        assert dppo.pack_micro_batches(sequences, range(4), config) == expected
    config = Config(micro_batch_tokens=256)  # two of 128 tokens
    assert dppo.pack_micro_batches(sequences, [1, 2, 3], config) == [[[3, 1], [2]]]


# ==== 4. Loss and update ====
def test_an_update_tells_what_it_trained_and_the_mean_entropy():
    given, shares = Given(), torch.tensor([1.0, 0.0, 1.0] * 6)
    entropies = torch.cat([alone(given, i)[1] for i in shares.nonzero().flatten().tolist()])
    metrics = given.update(shares, torch.optim.SGD(given.model.parameters(), lr=0.0))
    assert (metrics["completions_trained"], metrics["tokens_trained"]) == (12, len(entropies))
    assert metrics["entropy"] == pytest.approx(entropies.double().mean().item(), rel=1e-4)


def test_updates_far_below_bfloat16_resolution_add_up_in_float32_masters():
    given, still, dtypes = Given(first=True, dtype=torch.bfloat16), [], set()
    optimizer, start = dppo.MasterAdam(given.model, 1e-5), given.parameters()
    for weight in given.model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: dtypes.add(weight.grad.dtype))
    for _ in range(60):
        given.update(torch.ones(6, G), optimizer)
        still.append((given.parameters() == start).double().mean())
    assert still[0] > 0.9 > still[-1]
    assert dtypes == {torch.float32}  # of the sums over micro-batches
    for weight, master in zip(given.model.parameters(), optimizer.masters):
        assert master.dtype == torch.float32 and torch.equal(weight, master.bfloat16())
        assert weight.grad is None and master.grad is None


def test_the_learning_rate_rises_over_the_warm_up(out):
    for steps, expected in ((2, [1e-9, 2e-9]), (4, [1e-9, 2e-9, 3e-9, 3e-9])):
        run(out, steps=steps, warmup_steps=3, learning_rate=3e-9)
        rates = recorded(out, "learning_rate")
        assert rates == pytest.approx(expected)
        assert torch.load(out / "checkpoint.pt")["optimizer"]["param_groups"][0]["lr"] == rates[-1]


def test_an_update_without_a_gradient_or_one_that_is_not_finite_moves_nothing():
    given, moved = Given(first=True, dtype=torch.float32, beta=0.0), []
    optimizer, equal = dppo.MasterAdam(given.model, 1e-2), torch.zeros(6, G)
    shares = [1.0, 0.0, math.nan, 1e30, 1.0]  # at 1e30, the norm is infinite
    for share, advantages in ((1.0, equal), *((share, ADVANTAGES) for share in shares)):
        before = given.parameters()
        given.update(torch.full((6, G), share), optimizer, advantages)
        moved.append(not torch.equal(before, given.parameters()))
    assert moved == [False, True, False, False, False, True]


# ==== Part II: our rule ====
def visited(rule, *visits):
    """A rule that remembers visits of (prompts, rewards)."""
    for prompts, rewards in visits:
        rewards = torch.tensor(rewards, dtype=torch.float64)
        scale_by_std = rule.config.objective != "dr_grpo"
        rule.remember(torch.tensor(prompts), rewards, group_advantages(rewards, scale_by_std))
    return rule


NONE, ONE, HALF, ALL = [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0] * 4


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_prompts_are_scored_by_what_others_of_their_rate_had_at_their_next_visit(objective):
    rule = dppo.ProportionalDPPO(Config(objective=objective, prompt_prune_rate=0.5), 9)
    visited(rule, (range(6), [ALL, HALF, HALF, NONE, ONE, HALF]))
    # Of the rates p = 4.05/4.1, 2.05/4.1, 0.05/4.1, 1.05/4.1, this is 17 asin(sqrt p)/(pi/2).
    assert rule.bin_of_prompts().tolist() == [15, 8, 8, 1, 5, 8, -1, -1, -1]
    assert rule.memory["visits"].eq(4 * rule.forget).all()  # first visits teach bins nothing
    partly, missing = [1.0, 0.0, math.nan, math.nan], [math.nan] * 4
    # 0 comes twice in one window; 1 and 5 were like 2, and `missing` is no visit.
    visited(rule, ([0, 1, 5, 0], [partly, ALL, missing, partly]))
    guess = 0.1 + 0.9 * (math.pi * (torch.arange(17).double() + 0.5) / 17).sin() ** 2
    square = group_advantages(torch.tensor([partly]), objective != "dr_grpo").square().mean()
    left = 4 * rule.forget**2  # of the guess, which was worth four visits
    learned = {15: (left * guess[15] + 2 * square) / (left + 2), 8: left * guess[8] / (left + 1)}
    assert rule.bin_of_prompts()[[2, 3, 4]].tolist() == [8, 1, 5]
    expected = rule.expected_squares()
    assert expected[2:5].allclose(torch.stack([learned[8], guess[1], guess[5]]))
    assert (rule.memory["squares"] / rule.memory["visits"])[15].allclose(learned[15])
    assert expected[6:].allclose(expected[:6].mean())  # never visited: the mean of the others
    pi = rule.prompt_probabilities()
    assert pi[:6].allclose(1 - 0.5 * (1 - (expected[:6] / expected[:6].max()).sqrt()))
    assert pi[6:].eq(1).all()


def test_sums_of_rewards_decay_and_what_is_missing_is_like_the_rest_of_its_group():
    rule = visited(
        dppo.ProportionalDPPO(Config(), 5),
        ([4], [[math.nan] * 4]),  # no reward has been given yet: nothing to remember
        ([0, 1], [[1.0, 0.0, 0.0, 1.0], NONE]),
        ([0], [[1.0, 1.0, 0.0, math.nan]]),
        ([0, 1, 1, 2], [ALL] * 3 + [HALF]),  # 1 is twice in a window
        ([3], [[math.nan] * 4]),  # without any reward: the lowest
    )
    decay = rule.decay
    rewards = [decay * (decay * 2 + 8 / 3) + 4, decay * 4 + 4, 2, 0, 0]
    assert rule.memory["rewards"].tolist() == pytest.approx(rewards)
    counts = [4 * (1 + decay + decay**2), 4 * (1 + decay + decay**2), 4, 4, 0]
    assert rule.memory["count"].tolist() == pytest.approx(counts)


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("low, high", [(-1.0, 0.0), (0.0, 100.0), (1.0, 2.0), (-3e-4, 1e-4)])
def test_rewards_of_any_scale_prune_alike(low, high, objective):
    config = Config(objective=objective, prompts_per_step=3, prompt_prune_rate=0.9)
    rules, upcoming = [], torch.arange(8)
    for lowest, highest in ((0.0, 1.0), (low, high)):
        rule, generator = dppo.ProportionalDPPO(config, 8), torch.Generator().manual_seed(0)
        for _ in range(5):
            right = (torch.rand(8, 8, generator=generator) < torch.arange(8)[:, None] / 7).double()
            visited(rule, (range(8), (lowest + (highest - lowest) * right).tolist()))
        rules.append(rule)
    one, other = rules
    assert other.prompt_probabilities().allclose(one.prompt_probabilities(), atol=0.02)
    assert one.prompt_probabilities().std() > 0.1
    assert one.bin_of_prompts().equal(other.bin_of_prompts())
    assert one.prompts_to_keep(upcoming) == other.prompts_to_keep(upcoming)


def test_no_draw_changes_what_a_rule_knows():
    rule = rule_with_history(OURS)
    known = {name: values.clone() for name, values in rule.memory.items()}
    for _ in range(3):
        prune_prompts(
            rule, torch.arange(6), rule.prompts_to_keep(torch.arange(6)), torch.Generator()
        )
    assert all(values.equal(rule.memory[name]) for name, values in known.items())


# ==== 2. Rollout ====
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_have_the_probabilities_that_are_trained_whatever_the_model_s_defaults(temperature):
    task, prompt, draws = tiny_task(), [5, 4, 3, 7], 8000
    task.model = tiny_model(torch.float32, vocab_size=80, initializer_range=0.1)  # top_k is 50
    others = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5, "eos_token_id": [1, 12]}
    others |= {"min_p": 0.2, "no_repeat_ngram_size": 1, "do_sample": True, "num_beams": 2}
    others["cache_implementation"] = "static"
    task.model.generation_config = transformers.GenerationConfig(**others)
    config = Config(temperature=temperature, max_completion_tokens=1)
    torch.manual_seed(0)
    sequences, _ = dppo.sample(task, [prompt], draws, config)
    counts = torch.bincount(torch.tensor([ids for _, ids in sequences]).flatten(), minlength=80)
    each = [Sequence(prompt, [token]) for token in range(80)]
    trained = dppo.frozen_logprobs(task.model, each, range(80), config)
    expected = draws * torch.cat(list(trained.values())).exp()
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 131  # of 79 degrees of freedom: p = 2e-4


@pytest.mark.parametrize("end_ids", [[1, 12], [0], []])
def test_of_padded_prompts_the_probabilities_that_are_sampled_are_those_that_are_trained(end_ids):
    task = tiny_task()
    task.end_ids = end_ids
    prompts = [[0, *task.train[1]["prompt_ids"] * 9][:length] for length in (3, 30, 1, 17, 8)]
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


# ==== 6. Order, and which models can be trained ====
@pytest.mark.parametrize("method", ["grpo", PAPER])
def test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own(method, monkeypatch, out):
    [windows] = spy(monkeypatch, "prune_prompts")
    run(out, tiny_task(prompts=24), method=method, steps=12, prompts_per_step=8)
    seen = torch.cat([window.upcoming[:N] for window, (N, *_) in windows])
    first, second = seen[:24].tolist(), seen[24:48].tolist()
    assert sorted(first) == sorted(second) == list(range(24)) and first != second
    assert not torch.equal(dppo.next_prompts(0, 24, 0), dppo.next_prompts(0, 24, 1))
    assert recorded(out, "epoch")[:3] == [8 / 24, 16 / 24, 1]


def test_draws_and_seeds_have_random_numbers_of_their_own(monkeypatch, tmp_path):
    [windows] = spy(monkeypatch, "prune_prompts")
    monkeypatch.setattr(transformers, "set_seed", mock.Mock(wraps=transformers.set_seed))
    for seed in (0, 1):
        run(tmp_path / str(seed), tiny_task(evals=0), steps=4, seed=seed)
    own = {window.generator.initial_seed() for window, _ in windows}
    others = [call.args[0] for call in transformers.set_seed.call_args_list]
    assert len(own) == 8 and not own & set(others)
    assert not set(others[1:5]) & set(others[-4:])  # nor do runs of two seeds share any


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
NTK = {"rope_parameters": {"rope_type": "dynamic", "factor": 16.0, "rope_theta": 100.0}}
MODELS = [
    ("Qwen2ForCausalLM", {"use_cache": False}, None),
    ("GPT2LMHeadModel", {}, None),
    ("Gemma3ForCausalLM", {"sliding_window": 8}, None),
    ("Qwen3ForCausalLM", {"rope_parameters": YARN | {"rope_theta": 1e4}}, None),
    ("GPT2LMHeadModel", {"max_position_embeddings": 63}, "index out of range"),
    ("LlamaForCausalLM", NTK | {"max_position_embeddings": 48}, "differ by"),
    ("OPTForCausalLM", {"tie_word_embeddings": False}, "differ by"),  # ignores position ids
    ("GraniteForCausalLM", {"logits_scaling": 1.1}, "scaled, capped"),
    ("Qwen3NextForCausalLM", {}, "Attention"),  # has another cache
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, more, reason", MODELS)
def test_only_models_that_sample_as_they_are_trained_are_accepted(name, more, reason, dtype):
    """Up to the last of 64 positions, of which the samples that are compared have at most 27."""
    task = tiny_task(model=tiny_model(dtype, name, **{"max_position_embeddings": 64} | more))
    for n, example in enumerate(task.train):
        example["prompt_ids"] = (example["prompt_ids"] * 9)[: 26 - n]
    task.evals["some"] = [task.train.pop(0)]  # the longest
    config = Config(max_completion_tokens=38)
    if reason:
        with pytest.raises(ValueError, match=f"{name} cannot be trained here: .*{reason}"):
            dppo.check_sampling(task, config)
    else:
        dppo.check_sampling(task, config)


@pytest.mark.parametrize("change", [0.01, math.nan])
def test_a_difference_between_sampling_and_training_is_noticed(change, monkeypatch):
    def changed(*inputs):
        sequences, logprobs = sample(*inputs)
        return sequences, logprobs + change * (-1) ** torch.arange(len(logprobs))

    sample = dppo.sample
    monkeypatch.setattr(dppo, "sample", changed)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot be trained here: .*differ by"):
        dppo.check_sampling(tiny_task(), Config())


# ==== 7. Rewards ====
GRADES = {"gsm8k": [("19", "18.", None), ("0", 0, 1), ("18", 18, 1), ("a <b> 18", "18", 1)]}
GRADES["gsm8k"] += [("<think>5</think>", "5", 0), ("<think>5 + 13 = 18", "18", 0)]
GRADES["gsm8k"] += [("5</think>18", "18", 1), ("<think>1</think>2<think>3", "2", 0)]
GRADES["gsm8k"] += [("#### 5", "x\n#### 5", 1), ("5", "#### 5 apples", None), ("5", None, None)]
GRADES["exact"] = [(" ab\n", "ab", 1), ("b", "ab", 0), ("0", 0, 1), ("ab b", "ab", 0)]
GRADES["exact"] += [("A", "a", 0), ("0124", "124", 0), ("", "", None), ("None", None, None)]
GRADES["exact"] += [("<think>ab</think>\nb", "b", 1), ("1.5", 1.5, None), ("True", True, None)]
NUMBERS = {18: ["#### 18.0", "x\n#### 18", "####18", r"\boxed{18}", "18", "$18$", "**18**"]}
NUMBERS |= {-31: [r"-\$31", "\N{MINUS SIGN}31", "#### -31"], 9500: ["9,500", "$9,500.00"]}
NUMBERS |= {5: [r"#### \boxed{5}", r"so it is $\boxed{5}$"], 0.5: ["0.50", "#### 0.5%"]}
NO_NUMBER = [
    "(3,4)",
    "14,16",
    "1/2",
    r"\frac{14}{3}",
    "12:30",
    "10-12",
    "52_8",
    "0,500",
    "1234,567",
]
NO_NUMBER += ["2^3", r"\sqrt{13}", "1.234,50", "#### 1/2", "one", "", "x5", "5x", "#### 5+3", "1e3"]
NO_NUMBER += [r"\boxed{3,4}", r"\boxed{\frac{1}{2}}", "#### (3,4)", r"\boxed{2\sqrt{3}}", "5²"]
NO_NUMBER += ["#### 5 + 13 = 18", "\n" * 99_999, "9" * 99_999 + "x"]
NOT_ONLY = [
    "5!",
    "± 7",
    "x = 5",
    "9 hours",
    "6 - 5i",
    "< 5",
    "a 5",
    "#### 5 apples",
    "2 1/4",
    "(5)",
]
COMPLETIONS = {18: ["so 18 eggs.", "#### 18 dollars a day", "5 + 13 = 18", "(18)", "x = 18!"]}
COMPLETIONS |= {-2: ["#### 7\n#### -2"], 7: ["7 #### one\n#### 7", r"I get \boxed{7}, not 8"]}


@pytest.mark.parametrize("name", GRADES)
def test_rewards_compare_with_an_answer_if_there_is_one(name):
    reward = dppo.REWARDS[name]
    for completion, answer, grade in GRADES[name]:
        message = [{"role": "assistant", "content": completion}]
        for given in (completion, message):
            assert reward(["?"], [given], answer=[answer], level=[1]) == [grade], completion


def test_numbers_are_read_where_there_is_one_and_an_answer_must_be_nothing_else():
    for number, texts in NUMBERS.items():
        for text in texts:
            assert dppo.gsm8k_number(text) == number, text
    for number, texts in COMPLETIONS.items():
        assert [dppo.gsm8k_number(text) for text in texts] == [number] * len(texts)
    assert [text for text in NO_NUMBER if dppo.gsm8k_number(text) is not None] == []
    none = NO_NUMBER + NOT_ONLY
    assert [text for text in none if dppo.gsm8k_number(text, True) is not None] == []


def test_a_reward_gets_trl_s_arguments_in_the_shape_of_the_data_and_may_say_none():
    task = tiny_task(mock.Mock(return_value=[None, 1, 0.5, True]))
    chat = [{"role": "user", "content": "3"}]
    text = {"prompt": "12=", "prompt_ids": [1], "answer": "12", "level": 1}
    examples = [text, text | {"prompt": chat, "answer": "3", "level": 2}]
    sequences = [Sequence([1], ids) for ids in ([3, 4, 1], [0, 5], [6, 1], [7, 7])]
    rewards = dppo.reward_completions(task, examples, sequences)
    assert rewards.nan_to_num(-1).tolist() == [[-1.0, 1.0], [0.5, 1.0]]
    assistant = [[{"role": "assistant", "content": text}] for text in ("3", "44")]
    completions = ["01", "<pad>2", *assistant]  # special tokens, but for the end, are a part of it
    expected = {"prompts": ["12=", "12=", chat, chat], "completions": completions}
    expected |= {"answer": ["12", "12", "3", "3"], "level": [1, 1, 2, 2]}
    expected["completion_ids"] = [[3, 4, 1], [0, 5], [6, 1], [7, 7]]
    assert task.reward.call_args.kwargs == expected
    for right in ([[0.0], [1.0], [0.5], [1.0]], torch.tensor([0.0, 1.0, 0.5, 1.0]), (0, 1, 0.5, 1)):
        task.reward.return_value = right  # as some models and libraries return them
        rewards = dppo.reward_completions(task, examples, sequences)
        assert rewards.tolist() == [[0.0, 1.0], [0.5, 1.0]]
    for wrong in ([1.0] * 3, ["x"] * 4, {1.0, 2.0, 3.0, 4.0}, {0: 1.0}, None, "1234"):
        task.reward.return_value = wrong
        with pytest.raises(ValueError, match="must be a list of 4 numbers or None"):
            dppo.reward_completions(task, examples, sequences)
    task.reward = lambda completions, answer: list(map(len, completions))  # takes no others
    assert dppo.reward_completions(task, examples, sequences).tolist() == [[2, 6], [1, 1]]


def test_reasoning_that_the_template_begins_must_end_to_be_graded():
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    ids = tokenizer.encode("2?<think>\n", add_special_tokens=False)
    example = {"prompt": [{"role": "user", "content": "2?"}], "prompt_ids": ids, "answer": "5"}
    sequences = [Sequence(ids, tokenizer.encode(text)) for text in ("5", "4</think>5")]
    for reward, expected in ((dppo.gsm8k, [[0.0, 1.0]]), (lambda completions: [1, 0], [[1, 0]])):
        task = Task([], {}, tokenizer, reward, None, [tokenizer.eos_token_id])
        assert dppo.reward_completions(task, [example], sequences).tolist() == expected


# ==== 8 and 9. Tasks and data ====
def short(prompts, completions, **columns):
    return [float(len(completion) < 4) for completion in completions]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def user(tmp_path_factory):
    """Settings with a model with random weights and a dataset, as users have them."""
    folder = tmp_path_factory.mktemp("user")
    rows = [{"question": f"{a}=", "answer": f"#### {a}"} for a in range(100, 180)]
    data = write_rows(folder / "data.jsonl", rows)
    for part in (tiny_model(torch.float32, eos_token_id=[12, 7]), tiny_tokenizer()):
        part.save_pretrained(folder / "model")
    return {"model": f"{folder}/model", "dataset": data, "max_completion_tokens": 8}


@pytest.fixture
def main(monkeypatch, tmp_path):
    """The command line, called with settings and arguments in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments, **settings):
        named = [f"--{name}={value}" for name, value in settings.items()]
        monkeypatch.setattr(sys, "argv", ["dppo.py", *named, *arguments])
        dppo.main()

    return command


@pytest.fixture
def refusal(main, capsys, monkeypatch):
    """The line that the command line prints where it refuses, before it loads a model."""
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)

    def told(*arguments, **settings):
        with pytest.raises(SystemExit, match="2"):
            main(*arguments, **settings)
        *_, line = capsys.readouterr().err.strip().splitlines()
        assert len(line) < 480
        return line

    return told


PARTS = [{"role": "user", "content": [{"type": "text", "text": "1="}]}]
BAD_DATA = [
    ({"answer": "B"}, "", "1 rows, 0 prompts, 1 not gradable"),
    ({"answer": 1.5}, "--reward exact", "1 rows, 0 prompts, 1 not gradable"),
    ({"answer": "1"}, "--prompt_column x", "set --prompt_column and --answer_column"),
    ({"answer": "1"}, "--dataset none.jsonl", "none.jsonl cannot be read"),
    ({"answer": "1"}, "--dataset bad.jsonl", "bad.jsonl cannot be read: .*JSON"),
    ({"answer": "1"}, "--model none", "none"),
]


@pytest.mark.parametrize("row, arguments, message", BAD_DATA)
def test_bad_data_are_reported_at_once(row, arguments, message, user, refusal, tmp_path):
    data = write_rows(tmp_path / "data.jsonl", [{"question": "1="} | row])
    (tmp_path / "bad.jsonl").write_text('{"question": "1')
    assert re.search(message, refusal(*arguments.split(), **user | {"dataset": data}))
    assert not (tmp_path / "runs").exists()


def test_a_template_that_fails_is_reported_with_the_prompt(user, refusal, tmp_path):
    data = write_rows(tmp_path / "data.jsonl", [{"question": PARTS, "answer": "1"}])
    tiny_tokenizer("{{ messages[0]['content'] + '=' }}").save_pretrained(tmp_path / "model")
    told = refusal(**user | {"dataset": data, "model": tmp_path / "model"})
    assert "data.jsonl" in told and "can only concatenate list" in told


def test_a_reward_that_fails_on_its_trial_keeps_its_traceback(user, main):
    with pytest.raises(IndexError) as caught:
        main(**user, reward="test_dppo:fails_on_nothing")
    assert caught.value.__notes__ == ["The reward was tried on empty completions."]


def fails_on_nothing(prompts, completions, answer):
    return [completion[0] == "1" for completion in completions]


def test_a_model_has_all_end_ids_rotary_frequencies_in_float32_and_no_code(user, monkeypatch):
    monkeypatch.setattr(dppo, "DTYPE", torch.bfloat16)
    kinds = (transformers.AutoTokenizer, transformers.AutoModelForCausalLM)
    for kind in kinds:
        monkeypatch.setattr(kind, "from_pretrained", mock.Mock(wraps=kind.from_pretrained))
    [checks] = spy(monkeypatch, "check_sampling")
    task = dppo.load_task(Config(**user))
    assert len(checks) == 1 and task.model.dtype == torch.bfloat16
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert task.end_ids == [1, 7, 12]  # that of the tokenizer, and the model's
    assert {buffer.dtype for buffer in task.model.buffers()} == {torch.float32}
    assert kinds[1].from_pretrained.call_args.kwargs["attn_implementation"] == "sdpa"


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}="
    "{% if enable_thinking is defined and not enable_thinking %}0{% endif %}{% endif %}"
)


def load(data, **settings):
    config = Config(model="x", dataset=data, **settings)
    return dppo.load_examples(data, "train", config, tiny_tokenizer())


def test_rows_that_are_left_out_are_told_by_reason_and_add_up(tmp_path, capsys):
    texts = ("12", "1" * 20, None, "", "12", "13")
    rows = [{"question": text, "solution": "4", "level": 5} for text in texts]
    rows[5]["solution"] = "B"
    data = write_rows(tmp_path / "a.jsonl", rows)
    [example] = load(data, max_prompt_tokens=4, system_prompt="7")  # just long enough
    ids = tiny_tokenizer().encode("7\n\n12")
    expected = {"prompt": "12", "prompt_ids": ids, "question": "12", "level": 5}
    assert example == expected | {"answer": "4", "solution": "4"}
    told = capsys.readouterr().out
    assert "a.jsonl: 6 rows, 1 prompts, 2 empty ('')" in told and "1 not gradable ('B')" in told
    assert "1 too long" in told and "1 repeated" in told


def test_one_s_own_reward_gets_the_columns_of_the_data(tmp_path):
    row = {"prompt": "1=", "solution": "one", "of": {"label": 3}}
    data = write_rows(tmp_path / "b.jsonl", [row])
    ids = {"prompt_ids": tiny_tokenizer().encode("1=")}
    for column, more in {"of": {"answer": {"label": 3}}, "no": {}}.items():
        [example] = load(data, reward="test_dppo:short", answer_column=column)
        assert example == row | more | ids


def test_data_are_files_or_on_the_hub_and_a_split_may_be_a_slice(monkeypatch, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": f"{i}="} for i in range(9)])
    rows.to_parquet(tmp_path / "a:[1].parquet")
    assert len(load(f"{tmp_path}/a:[1].parquet", reward="test_dppo:short")) == 9
    (tmp_path / "a b.csv").write_text(
        'prompt,answer\n1=,0124\n2=,\n\n3=,NA\n4=,true\n5=,1e5\n6=,"18,5"\n'
    )
    answers = {row["answer"] for row in load(f"{tmp_path}/a b.csv", reward="exact")}
    assert answers == {"0124", "NA", "true", "1e5", "18,5"}
    (tmp_path / "c.csv").write_text("prompt,answer\n1=,7,000\n")
    with pytest.raises(ValueError, match="c.csv cannot be read"):
        load(f"{tmp_path}/c.csv", reward="exact")
    monkeypatch.setattr(datasets, "load_dataset", mock.Mock(return_value=rows))
    calls = {"openai/gsm8k": mock.call("openai/gsm8k", split="train")}
    calls["openai/gsm8k:test"] = mock.call("openai/gsm8k", split="test")
    sliced = mock.call("openai/gsm8k", "main", split="train[9:99]+train[-1:]")
    calls["openai/gsm8k:main:train[9:99]+train[-1:]"] = sliced
    for spec, call in calls.items():
        load(spec, reward="test_dppo:short")
        assert datasets.load_dataset.mock_calls[-1] == call


def test_chat_templates_end_with_the_assistant_s_turn_or_what_it_began_which_is_continued():
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE.replace("{% endfor %}", "9{% endfor %}"))
    roles = {"system": "8", "user": "12", "assistant": "3"}
    system, *chat = [{"role": role, "content": text} for role, text in roles.items()]
    kwargs = '{"enable_thinking": false, "add_generation_prompt": false}'  # the latter not heeded
    plain = Config(model="x", dataset="x", chat_template_kwargs=kwargs)
    config = Config(model="x", dataset="x", chat_template_kwargs=kwargs, system_prompt="7")
    for prompt, text in ((chat, "1293"), ([system, *chat[:1]], "89129=0"), ("12", "129=0")):
        given, ids = dppo.encode_prompt(prompt, plain, tokenizer)
        assert tokenizer.decode(ids) == text and given == prompt  # a text stays a text
        assert tokenizer.decode(dppo.encode_prompt(prompt, config, tokenizer)[1]) == "79" + text
    templated = "<end>12="  # holds a special token, so it has its template
    assert dppo.encode_prompt(templated, config, tokenizer)[1] == [1, 4, 5, 2]


def test_what_the_template_writes_after_an_assistant_s_message_ends_a_completion(user, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tiny_model(torch.float32, vocab_size=14, eos_token_id=[12, 7]).save_pretrained(tmp_path)
    # None without a template: see the test of end ids above.
    for after, end in (
        ("5", []),
        ("{% if m['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}", []),
        ("=<turn>5<end>", [13]),
    ):
        tokenizer.chat_template = CHAT_TEMPLATE.replace("{% endfor %}", after + "{% endfor %}")
        tokenizer.save_pretrained(tmp_path)
        task = dppo.load_task(Config(**user | {"model": str(tmp_path)}))
        assert task.end_ids == [1, 7, 12, *end]


@pytest.mark.parametrize("eval_prompts, held_out", [(10, 10), (256, 16), (0, 0)])
def test_without_evaluation_sets_at_most_a_fifth_is_held_out(eval_prompts, held_out, user):
    configs = [Config(**user, eval_prompts=eval_prompts, seed=seed) for seed in (0, 1)]
    task, other = map(dppo.load_task, configs)
    trained = [example["question"] for example in task.train]
    evaluated = [example["question"] for example in itertools.chain(*task.evals.values())]
    assert len(evaluated) == held_out and len({*trained, *evaluated}) == 80
    assert len(trained) == 80 - held_out  # what is evaluated is not trained on
    assert list(task.evals) == ["held out"][:held_out]
    assert trained != sorted(trained)  # shuffled
    assert (task.train, task.evals) == (other.train, other.evals)  # not by the seed


def test_what_is_evaluated_is_not_trained_on(user, tmp_path, request):
    rows = [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 106)]
    some = write_rows(tmp_path / "some.jsonl", rows[:4])
    more = write_rows(tmp_path / "more.jsonl", rows[3:])
    task = dppo.load_task(Config(**user, eval_dataset=f"{some},{more}", eval_prompts=3))
    assert [len(task.evals[name]) for name in (some, more)] == [3, 3]
    evaluated = [example["question"] for example in itertools.chain(*task.evals.values())]
    trained = [example["question"] for example in task.train]
    assert not set(evaluated) & set(trained) and len(trained) == 80 - len(set(evaluated))
    refusal = request.getfixturevalue("refusal")
    assert "0 prompts" in refusal(**user | {"eval_dataset": user["dataset"]})


# ==== 10. The embedded task ====
@pytest.mark.parametrize("eval_prompts", [0, 2, 300])
def test_the_embedded_task_has_its_classes_and_evaluates_the_middle_one(eval_prompts, monkeypatch):
    monkeypatch.setattr(dppo, "warm_started", lambda tokenizer: tiny_model(vocab_size=259))
    task = dppo.load_task(Config(eval_prompts=eval_prompts))
    for size, low, high in dppo.SORTING.values():
        of_class = [e for e in task.train if low <= len(e["answer"]) <= high]
        assert len(of_class) == size
        assert all(sorted(e["prompt"]) == [*e["answer"], "="] for e in of_class)
    evaluated = task.evals.get("middle", [])
    assert len(evaluated) == eval_prompts and not task.evals.keys() - {"middle"}
    prompts = {e["prompt"] for e in evaluated}
    assert not prompts & {e["prompt"] for e in task.train}
    assert {len(e["answer"]) for e in evaluated} <= {9, 10, 11, 12}
    assert task.train == dppo.load_task(Config(eval_prompts=99, seed=1)).train


def test_first_runs_teach_the_same_model_and_later_ones_take_it(tmp_path, monkeypatch):
    def train_step(model, optimizer, sequences, *_):
        model.lm_head.weight.data += sum(sequences[0].completion)

    tokenizer, models = transformers.ByT5Tokenizer(extra_ids=0), []
    taught = mock.Mock(side_effect=train_step)
    monkeypatch.setattr(dppo, "train_step", taught)
    for cache in (tmp_path / "one", tmp_path / "two", tmp_path / "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        models.append(dppo.warm_started(tokenizer).lm_head.weight)
        assert len([path for path in cache.rglob("*") if path.is_file()]) == 1
    assert torch.equal(models[0], models[1]) and torch.equal(models[1], models[2])
    assert taught.call_count == 2 * 400  # and not a third time


# ==== 11. Settings ====
BAD_SETTINGS = [
    ("--group_size 1", "--group_size 1 must"),
    ("--group 2", "unrecognized arguments: --group 2"),
    ("--method dpo", "--method dpo is not one of "),
    ("--method test_dppo", "--method test_dppo is not one of .* it cannot be called"),
    ("--reward test_dppo:none", "--reward test_dppo:none is not one of .* no attribute 'none'"),
    ("--model x", "--model or --dataset is missing"),
    ("--output_dir .", "exists"),
    ("--resume none", "none/config.json"),
    ("--history .", "checkpoint.pt"),
]


@pytest.mark.parametrize("arguments, message", BAD_SETTINGS)
def test_bad_settings_leave_nothing(arguments, message, refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(dppo, "load_task", lambda config: tiny_task(evals=0))
    assert re.search(message, refusal(*arguments.split()))
    assert os.listdir(tmp_path) == []


def test_settings_that_would_train_on_nonsense_are_refused():
    with pytest.raises(ValueError, match="^--objective ppo is not one of grpo, dr_grpo"):
        Config(objective="ppo")
    least = {"prompts_per_step", "group_size", "inner_epochs", "temperature", "max_grad_norm"}
    least |= {"max_completion_tokens", "eval_samples", "rollout_batch_size", "micro_batch_tokens"}
    for option in fields(Config):
        value = getattr(Config(), option.name)
        if isinstance(value, (int, float)):
            too_much = [0.995] * option.name.endswith("prune_rate")
            for nonsense in [-1, math.nan, math.inf, *too_much] + [0] * (option.name in least):
                with pytest.raises(ValueError, match=f"^--{option.name} {nonsense} must"):
                    Config(**{option.name: nonsense})


def test_a_value_that_is_given_wins_over_the_embedded_task_s(user):
    assert (Config().temperature, Config(temperature=1.0).temperature) == (0.7, 1.0)
    assert Config(**user).temperature == 1.0 and Config(**user, temperature=0.7).temperature == 0.7


# ==== 12. Runs ====
def test_an_evaluation_is_the_same_each_time_and_not_made_twice(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    [evaluations] = spy(monkeypatch, "evaluate")
    run(tmp_path / "one", steps=5, eval_every=2, learning_rate=0.0)
    before, *later = [result for _, result in evaluations]
    assert later == [before] * 3
    kept = {line["step"]: line.get("evaluation") for line in metrics(tmp_path / "one")}
    assert kept == {0: before, 1: None, 2: before, 3: None, 4: before, 5: before}
    run("", steps=0)
    assert len(evaluations) == 5
    [folder] = (tmp_path / "runs").iterdir()  # without --output_dir
    assert metrics(folder)[0]["evaluation"] == before


def test_evaluations_average_over_prompts_and_show_some_completions(monkeypatch, out):
    [calls] = spy(monkeypatch, "sample")
    graded = iter([[1, 0, 0, 0], [1, 1, 0, None, 1, 0], [None] * 2])
    task = tiny_task(lambda prompts, **_: next(graded, [None] * len(prompts)))
    task.evals = {"one": task.train[:2], "two": task.train[:3], "three": task.train[:1]}
    config = Config(eval_samples=2, rollout_batch_size=3, max_completion_tokens=2)
    result = dppo.evaluate(task, config)
    ids = [example["prompt_ids"] for example in task.train[:3]]
    assert [call.prompts for call, _ in calls] == [[ids[q]] for q in (0, 1, 0, 1, 2, 0)]
    means = {"one": 0.25, "two": 0.6}  # of the rewards that are given
    assert result.items() > means.items() and result["accuracy"] == 4 / 9
    shown = result["completions"]
    assert [reward for *_, reward in shown[:5]] == [1, 0, 1, 0, 1]
    assert [answer for _, answer, _ in shown[:2]] == [e["answer"] for e in task.train[:2]]
    sequences, _ = calls[1][1]
    assert shown[1][0] == task.tokenizer.decode(sequences[0].completion)


def test_records_estimate_means_over_the_window():
    task = tiny_task()
    task.end_ids = [7, 12]
    completions = ([5, 6, 12], [12], [5, 6], [5, 12], [5] * 4, [5] * 5 + [7])
    rewards = torch.tensor([[1, 0], [1, 1], [math.nan, math.nan]], dtype=torch.float64)
    step = dppo.Step(
        limit=4,
        N=5,
        prompts=torch.tensor([4, 2, 3]),
        w_q=torch.tensor([2.0, 1.0, 1.0]).double(),
        w=torch.tensor([[0.0, 0.0], [1.0, 3.0], [0.0, 2.0]]).double(),
        sequences=[Sequence([2 + i], ids) for i, ids in enumerate(completions)],
        rewards=rewards,
        A=group_advantages(rewards),
        mean_length=2.5,
        updates=[{"grad_norm": 3.0}, {"grad_norm": 0.5, "tokens_trained": 9}],
        rollout_seconds=0.1,
    )
    record = dppo.record_of(step, task)
    expected = {"prompts_seen": 5, "prompts_rolled": 3, "reward": 2 / 3, "weight_max": 3}
    expected |= {"zero_variance_fraction": 1 / 3, "truncated_fraction": 2 / 8}
    expected |= {"completion_length": (2 * 2 + 2 + 5) / 4, "mean_length": 2.5}
    expected |= {"grad_norm": 0.5, "tokens_trained": 9}  # of the last update
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    step.rewards *= math.nan
    assert math.isnan(dppo.record_of(step, task)["reward"])


# ---- What went wrong is told
LONG = {"max_completion_tokens": 60}  # after which few are cut
WRONG = [
    (
        lambda prompts, **_: [0.5] * len(prompts),
        LONG,
        "no update in 12 steps: all rewards of a group",
    ),
    (lambda prompts, **_: [None] * len(prompts), LONG, "no update in 12 steps: no completion got"),
    (
        lengths_reward,
        {"max_completion_tokens": 3, "max_grad_norm": 1e6},
        "69% cut at --max_completion_tokens 3",
    ),
    (lengths_reward, LONG | {"max_grad_norm": 1e-6}, "the norm was clipped in 92% of the steps"),
    (lengths_reward, LONG | {"max_grad_norm": 1e6}, ""),
]


@pytest.mark.parametrize("reward, settings, told", WRONG)
def test_a_run_that_goes_wrong_ends_with_a_line_that_says_so(reward, settings, told, capsys, out):
    run(out, tiny_task(reward), method=OURS, steps=12, prompts_per_step=4, **settings)
    shown = capsys.readouterr()
    assert told in shown.out.strip().splitlines()[-1]
    assert ("no update in 10 steps" in shown.out) == ("no update" in told)  # on the way
    for part in ("no update", "norm was clipped"):
        assert (part in shown.out) == (part in told)
    assert "epoch" in shown.err and "reward" in shown.err and "cut" in shown.err  # on the bar


def test_gradients_that_are_not_finite_are_told(monkeypatch, capsys, out):
    real = dppo.token_losses
    monkeypatch.setattr(dppo, "token_losses", lambda *inputs: real(*inputs) * math.nan)
    run(out, steps=3)
    assert "no update in 3 steps: gradients were not finite" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["grpo", OURS])
def test_what_a_rollout_is_worth_is_told_only_where_a_rule_asks_for_fewer(method, capsys, out):
    task = tiny_task(seldom_teaches, prompts=24)
    run(out, task, method=method, steps=16, prompts_per_step=8, prompt_prune_rate=0.9)
    assert ("a rollout was worth 1." in capsys.readouterr().out) == (method == OURS)


# ---- Interruptions and resuming
SMALL = {"prompts_per_step": 4, "method": OURS, "objective": "dapo", "prompt_prune_rate": 0.9}
SMALL |= {"inner_epochs": 2, "learning_rate": 3e-2, "completion_prune_rate": 0.2}


def assert_same_run(one, other):
    """The same weights bit for bit, and the same records."""
    saved, again = torch.load(one / "checkpoint.pt"), torch.load(other / "checkpoint.pt")
    assert all(map(torch.equal, saved["weights"], again["weights"]))
    assert all(
        torch.equal(saved["memory"][name], again["memory"][name]) for name in saved["memory"]
    )
    may_differ = {"rollout_seconds", "train_seconds"}
    for record, same in zip(metrics(one), metrics(other), strict=True):
        assert {name for name in record if record[name] != same.get(name)} <= may_differ


class Counting(dppo.DPPO):
    """A rule whose memory every look changes."""

    def __init__(self, config, prompt_count):
        super().__init__(config, prompt_count)
        self.memory["looks"] = torch.zeros(1)

    def prompt_probabilities(self):
        self.memory["looks"] += 1
        return super().prompt_probabilities() / self.memory["looks"]


TWO_PARTS = [(torch.float32, {"objective": "gspo", "beta": 0.1})]
TWO_PARTS += [(torch.bfloat16, {"learning_rate": 1e-4})]
TWO_PARTS += [(torch.float32, SMALL | {"history": "first"})]
TWO_PARTS += [(torch.float32, {"method": "test_dppo:Counting", "prompts_per_step": 4})]


@pytest.mark.parametrize("dtype, settings", TWO_PARTS)
def test_a_run_in_two_parts_is_the_run_in_one(dtype, settings, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run(Path("first"), tiny_task(seldom_teaches), **SMALL, steps=9)  # for the history of another
    for out, steps in (("one", 12), ("two", 6), ("two", 12)):
        task = tiny_task(seldom_teaches, tiny_model(dtype))
        run(tmp_path / out, task, **settings | {"steps": steps, "eval_every": 3})
    two = tmp_path / "two"
    assert_same_run(tmp_path / "one", two)
    assert len(set(recorded(two, "prompts_rolled"))) > (settings.get("method") == OURS)
    assert min(recorded(two, "rollout_seconds") + recorded(two, "train_seconds")) > 0
    saved = transformers.AutoModelForCausalLM.from_pretrained(two / "model")
    assert torch.equal(saved.lm_head.weight, task.model.lm_head.weight)
    assert len(transformers.AutoTokenizer.from_pretrained(two / "model")) == 13


# What fails, at which of its calls; the step that is saved. The first updates are those of step 1.
FAILURES = [("evaluate", 1, 0), ("evaluate", 3, 4), ("sample", 1, 0), ("reward_completions", 5, 2)]
FAILURES += [("prune_completions", 5, 2), ("train_step", 7, 3)]  # by then, the rule has learned
FAILURES += [("train_step", 8, 2), ("step", 5, 4), ("record_of", 1, None)]  # amid updates
FAILURES += [("record_of", 3, 2), ("evaluate", 4, 6)]  # a step without an update; at the end


@pytest.mark.parametrize("name, call, step", FAILURES)
def test_a_run_that_fails_goes_on_as_if_it_had_not(name, call, step, monkeypatch, capsys, tmp_path):
    def failing(*inputs, **named):
        if next(calls) == call:
            raise KeyboardInterrupt  # or anything else
        return real(*inputs, **named)

    one, two = tmp_path / "one", tmp_path / "two"
    settings = SMALL | {"steps": 6, "eval_every": 2, "save_every": 2}
    run(one, **settings)
    owner, calls = torch.optim.Adam if name == "step" else dppo, itertools.count(1)
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(KeyboardInterrupt):
        run(two, **settings)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert f"go on with: python dppo.py --resume='{two}'" in capsys.readouterr().out
    if step is None:  # killed before its first checkpoint, a run begins anew in its folder
        assert not (two / "checkpoint.pt").exists()
    else:
        assert torch.load(two / "checkpoint.pt")["records"][-1]["step"] == step
    run(two, **settings, resume=str(two))
    assert_same_run(one, two)


def test_a_rule_that_fails_while_it_remembers_leaves_no_trace(monkeypatch, tmp_path):
    def failing(self, prompts, *visit):
        real(self, prompts, *visit)
        if next(calls) == 3:  # in a step without an update
            raise KeyError

    one, two = tmp_path / "one", tmp_path / "two"
    settings = SMALL | {"steps": 6, "inner_epochs": 1, "learning_rate": 0.0}
    quiet = tiny_task(lambda prompts, **_: [float(len(p) > 5) for p in prompts])
    run(one, quiet, **settings)
    real, calls = dppo.ProportionalDPPO.remember, itertools.count(1)
    monkeypatch.setattr(dppo.ProportionalDPPO, "remember", failing)
    with pytest.raises(KeyError):
        run(two, quiet, **settings)
    run(two, quiet, **settings)
    assert_same_run(one, two)


def test_a_disk_that_is_full_leaves_the_last_checkpoint_and_one_line(monkeypatch, capsys, out):
    run(out, steps=2)
    whole = (out / "checkpoint.pt").read_bytes()

    def save(values, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(dppo.Refused, match="checkpoint.pt cannot be written: .*No space left"):
        run(out, steps=4)
    assert (out / "checkpoint.pt").read_bytes() == whole
    names = ["checkpoint.pt", "config.json", "metrics.jsonl", "model"]
    assert sorted(os.listdir(out)) == names  # and no half of a file


def test_other_data_another_rule_or_other_settings_are_not_resumed(out):
    run(out, steps=2)
    before = [path.read_bytes() for path in sorted(out.glob("*.*"))]
    different = {"temperature": 0.1, "reward": "test_dppo:short", "seed": 1, "objective": "dapo"}
    for name, value in (different | {"method": "grpo"}).items():
        with pytest.raises(ValueError, match=f"{name}"):
            run(out, **{name: value})
    with pytest.raises(ValueError, match="prompts"):
        run(out, tiny_task(prompts=17))
    for history in ({"method": "grpo"}, {}):
        with pytest.raises(ValueError, match="method" if history else "prompts"):
            run(out / "new", tiny_task(prompts=16 + (not history)), history=str(out), **history)
    assert [path.read_bytes() for path in sorted(out.glob("*.*"))] == before
    new = {"micro_batch_tokens": 100, "rollout_batch_size": 8, "save_every": 1, "eval_every": 1}
    run(out, steps=4, **new)
    assert json.loads((out / "config.json").read_text()).items() > new.items()  # from now on


@pytest.mark.parametrize("method", [PAPER, OURS])
def test_a_run_with_history_prunes_from_its_first_step(method, monkeypatch, tmp_path):
    settings = {"method": method, "prompts_per_step": 2, "objective": "dapo"}
    run(tmp_path / "first", tiny_task(prompts=4, evals=0), steps=8, **settings)
    saved = torch.load(tmp_path / "first" / "checkpoint.pt")
    settings |= {"history": str(tmp_path / "first"), "steps": 1}
    run(tmp_path / "none", tiny_task(prompts=4, evals=0), **settings | {"steps": 0})
    taken = torch.load(tmp_path / "none" / "checkpoint.pt")["memory"]
    assert all(memory.equal(taken[name]) for name, memory in saved["memory"].items())
    [steps] = spy(monkeypatch, "dppo_step")
    for module, name in ((torch, "load"), (transformers, "set_seed")):
        monkeypatch.setattr(module, name, mock.Mock(wraps=getattr(module, name)))
    run(tmp_path / "second", tiny_task(prompts=4, evals=0), **settings)
    options = torch.load.call_args.kwargs  # no code can run, and 7 GB are not read for a few MB
    assert options["weights_only"] and options["mmap"]
    [(given, _)], last = steps, saved["records"][-1]
    assert given.mean_length == last["mean_length"]
    transformers.set_seed.assert_any_call(last["candidates_so_far"])  # no draw is made twice


def test_ctrl_c_ends_a_run_after_the_step_and_it_goes_on(main, monkeypatch, capsys, out):
    def interrupted(real, at, *inputs, **columns):
        if next(at) == 0:
            signal.raise_signal(signal.SIGINT)
        return real(*inputs, **columns)

    # The first call of the reward is of the evaluation, the seventh in the sixth step.
    reward = partial(interrupted, lengths_reward, itertools.count(-6))
    monkeypatch.setattr(dppo, "load_task", lambda config: tiny_task(reward))
    with pytest.raises(SystemExit, match="130"):
        main(steps=9, prompts_per_step=4, output_dir=out, save_every=0)
    assert f"go on with: python dppo.py --resume='{out}'" in capsys.readouterr().out
    assert recorded(out, "step") == [1, 2, 3, 4, 5, 6]
    transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    monkeypatch.setattr(torch, "save", partial(interrupted, torch.save, itertools.count(0)))
    main(steps=8, resume=out)  # interrupted again, while it saves
    assert recorded(out, "step") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert torch.load(out / "checkpoint.pt")["records"][-1]["step"] == 8
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_out_of_memory_is_reported_with_advice(main, monkeypatch):
    monkeypatch.setattr(dppo, "load_task", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(SystemExit, match="lower --micro_batch_tokens"):
        main()
    monkeypatch.setattr(dppo, "sample", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        dppo.check_sampling(tiny_task(), Config())


def test_a_fork_that_imports_dppo_has_the_module_that_runs(refusal, monkeypatch, tmp_path):
    fork = "import dppo, __main__\ndppo.CLIPPING = 5\ndef reward(**columns):\n"
    fork += "    raise dppo.Refused(f'by the fork: {__main__.CLIPPING}')\n"
    (tmp_path / "mine.py").write_text(fork)
    monkeypatch.setitem(sys.modules, "dppo", dppo)  # what it is after the test, too
    monkeypatch.setattr(dppo, "main", lambda: runpy.run_path(dppo.__file__, run_name="__main__"))
    assert "by the fork: 5" in refusal(reward="mine:reward")


def test_of_two_runs_in_a_folder_the_later_is_refused(out):
    out.mkdir()  # the other one was faster
    with pytest.raises(ValueError, match="File exists"):
        run(out)


def test_slow_the_plain_command_raises_the_middle_class_and_writes_every_file(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, dppo.__file__, "--steps", "40", "--output_dir", str(out)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TQDM_DISABLE": "1"}
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    printed = re.findall(r"^step (\d+): accuracy 0\.\d\d$", told.stdout, re.MULTILINE)
    assert printed == ["0", "10", "20", "30", "40"]
    accuracies = [record["evaluation"]["accuracy"] for record in metrics(out)[::10]]
    assert accuracies[-1] > accuracies[0] + 0.12
    assert sorted(os.listdir(out)) == ["checkpoint.pt", "config.json", "metrics.jsonl", "model"]
    assert sum(recorded(out, "prompts_rolled")) < 0.8 * sum(recorded(out, "prompts_seen"))
