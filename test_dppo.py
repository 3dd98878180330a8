"""A proof, checked on small instances, that dppo.py prunes without bias; then its other guarantees.

    python -m pytest -q

THEOREM. If a rule has unbiased = True and gives pi > 0 wherever there is a gradient, the first
update of a step has, on average over the draws, the gradient of the loss of all N G completions:

    E[grad L_hat] = grad L,    where L is the mean of l_i, and L_hat that of w_i l_i.

What is fixed before the draws:

  - the policy and, for the KL term, the reference;
  - what the rule remembers, and the order of the prompts, which together fix limit and N;
  - the mean length by which dapo divides (a first step takes its own, and must prune no prompt);
  - how each of the N prompts would be answered and graded. Nobody looks at that of pruned ones.

PROOF. Lemma 1 is about a draw, lemmas 2 and 3 are about what a step makes of it.

  1. E[w_i] = 1, unless l_i has no gradient. In one draw, pi (1/pi) + (1 - pi) 0 = 1; of both
     levels, E[w_i] = E[w_q E[w_qi given the prompts that are drawn]] = E[w_q] = 1.
  2. With shares w_i/(N G Z_i), train_step follows grad L_hat, whatever w is. Here l is the
     published loss, and packing makes no difference.
  3. These are the shares that dppo_step gives it, with advantages in whole groups, and no draw
     changes N or Z_i.

So E[grad L_hat] = mean of E[w_i] grad l_i = mean of grad l_i = grad L.

The tests begin with the idea, by hand, and the theorem itself. After the lemmas come six ways to
lose it. dppo.py refuses the third, and the last two limit the theorem: it holds neither for later
updates on a rollout, as prompts cannot be drawn anew, nor for what clipping and Adam make of a
gradient. (That advantages are GRPO's is the first test after the proof.)

Not proven: that random numbers are random and draws independent (one test counts them); that
rollouts and rewards have the same distribution whichever prompts survive; anything about other
models or bfloat16; and that prompts count the same over an epoch (low pi makes a window longer).
"""

import dataclasses
import inspect
import itertools
import json
import math
import os
import pkgutil
import random
import re
import runpy
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, SimpleNamespace
from unittest import mock

import datasets
import pytest
import tokenizers
import torch
import transformers
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dppo
from dppo import Config, Sequence, Task, draw, group_advantages, prune_completions, prune_prompts

torch.set_num_threads(1)  # tensors are so small that more would wait for each other


# ==== By hand ====
def test_four_gradients_keep_their_mean_of_2_although_two_are_always_pruned():
    gradients = torch.tensor([4.0, 2.0, 1.0, 1.0])
    scores = torch.tensor([3.0, 1.0, 1.0, 1.0])
    pi = dppo.keep_probabilities(scores, rate=0.7)  # of three low ones floor(0.7 * 3) are pruned
    assert pi.tolist() == [1, 1 / 3, 1 / 3, 1 / 3]

    outcomes = Counter()
    for seed in range(300):
        weights = draw(pi, torch.Generator().manual_seed(seed))
        outcomes[tuple(weights.tolist())] += 1
    assert outcomes.keys() == {(1, 3, 0, 0), (1, 0, 3, 0), (1, 0, 0, 3)}
    assert min(outcomes.values()) > 85  # of about 100: they are equally likely

    estimates = [(torch.tensor(weights) * gradients).mean().item() for weights in outcomes]
    assert sorted(estimates) == [(4 + 3) / 4, (4 + 3) / 4, (4 + 6) / 4]
    assert sum(estimates) / 3 == gradients.mean() == 2

    unweighted = [gradients[torch.tensor(weights) > 0].mean().item() for weights in outcomes]
    assert sum(unweighted) / 3 == pytest.approx(8 / 3)  # so the large ones count too much


# ==== The theorem ====
# What it uses comes next: every_result(f) runs f with every outcome of its draws, and Given has a
# tiny Qwen3, random completions of six prompts, and their losses by the published formulas.
PAPER, OURS, OWN = "dppo", "dppo-proportional", "test_dppo:OwnRule"
G = 3  # completions of each of six prompts


@pytest.mark.parametrize(
    "method, objective, beta, most, upcoming",
    [
        (PAPER, "grpo", 0.0, 3, [0, 1, 2, 3, 4, 5]),
        (PAPER, "gspo", 0.1, 3, [0, 1, 2, 3, 4, 5]),
        (PAPER, "dr_grpo", 0.0, 3, [2, 0, 2, 1, 5, 3]),  # a prompt is there twice
        (OURS, "grpo", 0.1, 3, [0, 1, 2, 3, 4, 5]),
        (OURS, "grpo", 0.0, 5, [0, 5, 1, 2, 3, 4]),  # our rule wants 4 where 5 are allowed
        (OWN, "dapo", 0.0, 3, [2, 3, 4]),
        (OWN, "grpo", 0.0, 3, [2, 4]),  # their pi sum to 0.75, and exactly one is kept
    ],
)
def test_theorem(method, objective, beta, most, upcoming):
    given = Given(objective, beta=beta)
    windows, kept = set(), set()

    def update(optimizer):
        rule = rule_with_history(method, prompts_per_step=most)
        step = given.step(rule, optimizer, upcoming)
        windows.add((step.limit, step.N))
        kept.add(tuple(step.prompts.tolist()))

    # The gradient that dppo_step follows, on average.
    outcomes = every_result(partial(given.descent, update))
    expectation = sum(p * gradient for p, gradient in outcomes)
    assert len(outcomes) > len(kept) > 1 and all(kept)  # both levels prune, but never all
    [(limit, N)] = windows  # the same, whatever is drawn
    assert limit == min(most, 4)

    # The gradient of all completions of the window.
    counts = torch.bincount(torch.tensor(upcoming[:N]), minlength=6)  # of prompts in the window
    A = group_advantages(REWARDS, scale_by_std=objective != "dr_grpo")
    L = (counts[:, None] * given.losses(A)).sum() / (N * G)
    full = given.gradient(L)
    assert full.norm() > 0.01
    assert (expectation - full).norm() < 1e-6 * full.norm()


# ==== Every outcome, in place of chance ====
def every_draw(pi):
    """All outcomes of draw(pi) -> [(probability, (n,) weights)]. A draw depends on an order and on
    u. In one order, outcomes change only where a tooth meets an item's end, so one u between two
    such places is enough. Items whose pi is 0 or 1 do not shift others, and so may stand last."""
    loose = [i for i in range(len(pi)) if 0 < pi[i] < 1]
    others = [i for i in range(len(pi)) if i not in loose]
    orders = list(itertools.permutations(loose))
    outcomes = Counter()
    randperm, rand = mock.Mock(), mock.Mock()
    with mock.patch("torch.randperm", randperm), mock.patch("torch.rand", rand):
        for order in orders:
            order = torch.tensor([*order, *others]).long()
            randperm.return_value = order
            ends = (pi[order].cumsum(0) % 1).round(decimals=12).tolist()
            for low, high in itertools.pairwise(sorted({0.0, 1.0, *ends})):
                rand.return_value = torch.tensor([(low + high) / 2], dtype=torch.float64)
                weights = draw(pi, None)
                outcomes[tuple(weights.tolist())] += (high - low) / len(orders)
    return [(p, torch.tensor(weights, dtype=torch.float64)) for weights, p in outcomes.items()]


class OneMore(Exception):
    """A draw beyond the script."""


def every_result(function, *script):
    """All outcomes of a function that draws -> [(probability, result)]. Its draws give what the
    script says. When it asks for one more, each outcome of that one makes a longer script."""
    with mock.patch.object(dppo, "draw", side_effect=[*script, OneMore]) as scripted:
        try:
            return [(1.0, function())]
        except OneMore:
            pi = scripted.call_args.args[0]
    results = []
    for p, weights in every_draw(pi):
        for p_rest, result in every_result(function, *script, weights):
            results.append((p * p_rest, result))
    return results


# ==== What is given: rewards, completions and rules ====
# In the fourth group, a reward is missing. In the first and the last, all are equal.
REWARDS = [[0, 0, 0], [1, 0.7, 0.2], [1, 0, 0], [math.nan, 0.9, 1], [0, 0, 1], [1, 1, 1]]
REWARDS = torch.tensor(REWARDS, dtype=torch.float64)
ADVANTAGES = group_advantages(REWARDS)

rng = random.Random(0)
PROMPTS = [rng.choices(range(2, 13), k=8) for _ in range(6)]
SEQUENCES = []  # random answers of 20 to 54 tokens, group by group
for i in range(6 * G):
    SEQUENCES.append(Sequence(PROMPTS[i // G], rng.choices(range(2, 13), k=20 + 2 * i)))
LENGTHS = torch.arange(20, 56, 2).double().view(6, G)
LONGEST, MEAN_LENGTH, TEMPERATURE = 60, 30.0, 0.7  # the mean is that of earlier steps
CLIPPING = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


class OwnRule(dppo.Rule):
    """As somebody might write one: any probabilities that are known before the draw."""

    def prompt_probabilities(self):
        return torch.tensor([0.5, 0.9, 0.25, 0.75, 0.5, 0.5])

    def completion_probabilities(self, advantages, prompt_weights):
        signs = advantages.sign_()  # in place, which changes nothing for others
        return torch.where(signs < 0, 0.3, 1.0)


def rule_with_history(method=PAPER, r_q=0.9, r_o=0.7, **settings):
    """A rule after five visits to each prompt but the first. Three of these taught nothing."""
    rates = {"prompt_prune_rate": r_q, "completion_prune_rate": r_o}
    config = Config(method=method, group_size=G, **rates | settings)
    rule = config.rule_class(config, prompt_count=6)
    rewards = torch.tensor([[0, 0, 1], [0, 0, 0], [0.1, 0.1, 0.1], [1, 1, 1], [0, 1, 1]]).double()
    for _ in range(5):
        rule.remember(torch.arange(1, 6), rewards, group_advantages(rewards))
    return rule


# ==== The published losses, and the code that is compared with them ====
def logprobs_of(model, sequence):
    """(tokens,) log-probabilities of a completion, by the model's own forward pass."""
    prompt, completion = sequence
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits.float() / TEMPERATURE).log_softmax(dim=-1)
    return logprobs[range(len(completion)), completion]


class Given:
    """A random Qwen3 in float64 (tiny_model, after the proof) and its reference. At later updates
    there is also an old policy, which differs so much that tokens are clipped."""

    def __init__(self, objective="grpo", first=True, dtype=torch.float64, **settings):
        defaults = {"group_size": G, "temperature": TEMPERATURE, "max_grad_norm": 1e9}
        defaults |= {"max_completion_tokens": LONGEST, "micro_batch_tokens": 768}
        self.settings = defaults | settings | {"objective": objective}
        self.config = Config(**self.settings)
        self.model = tiny_model(dtype)
        self.reference = tiny_model(dtype, initializer_range=0.1)
        with torch.no_grad():
            self.ref = {i: logprobs_of(self.reference, s) for i, s in enumerate(SEQUENCES)}
        old = {i: (0.6 + 0.2 * (i % 5)) * logprobs for i, logprobs in self.ref.items()}
        self.old = None if first else old
        self.Z = {"dr_grpo": LONGEST, "dapo": MEAN_LENGTH}.get(objective, LENGTHS)

    def losses(self, A):
        """(6, G) A -> (6, G) l as published, each completion by itself."""
        objective = self.config.objective
        down, up = CLIPPING[objective]
        sums = []
        for i, A_i in enumerate(A.flatten()):
            logprobs = logprobs_of(self.model, SEQUENCES[i])
            log_ratio = logprobs - (self.old[i] if self.old else logprobs.detach())
            if objective == "gspo":
                log_ratio = log_ratio.mean()
            rho = log_ratio.exp()
            surrogate = torch.min(rho * A_i, rho.clamp(1 - down, 1 + up) * A_i)
            x = (self.ref[i] - logprobs).exp()
            k3 = x - 1 - x.log()
            sums.append((self.config.beta * k3 - surrogate).sum())
        return torch.stack(sums).view(6, G) / self.Z

    def gradient(self, loss):
        """(parameters,) of a loss."""
        return parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))

    def descent(self, update):
        """(parameters,) the gradient that update(optimizer) follows. The move is undone."""
        before = self.parameters()
        update(torch.optim.SGD(self.model.parameters(), lr=1.0))
        gradient = before - self.parameters()
        vector_to_parameters(before, self.model.parameters())
        return gradient

    def parameters(self):
        return parameters_to_vector(self.model.parameters()).detach()

    def step(self, rule, optimizer, upcoming=range(6), mean_length=MEAN_LENGTH, rewards=REWARDS):
        """dppo_step, with what is given in place of a rollout."""

        def rollout(task, prompts, *_):
            groups = [SEQUENCES[G * q : G * (q + 1)] for q in prompts]
            return sum(groups, []), rewards[prompts], 0.0

        examples = range(6)  # an example is its prompt's number
        task = Task(examples, {}, None, None, self.model, reference=self.reference)
        rule.config = dataclasses.replace(rule.config, **self.settings)
        inputs = (torch.tensor(upcoming), mean_length, torch.Generator())
        with mock.patch.object(dppo, "rollout", rollout):
            return dppo.dppo_step(task, rule, optimizer, *inputs)

    def update(self, shares, optimizer, advantages=ADVANTAGES):
        """train_step, for all 18 completions."""
        inputs = (SEQUENCES, advantages, shares, self.old, self.ref, self.config)
        return dppo.train_step(self.model, optimizer, *inputs)


# ==== Lemma 1: weights have the expectation 1 ====
@pytest.mark.parametrize("pi", [[0.5] * 4, [0.4] * 5 + [1.0], [0.3, 0.9, 0.2, 0.05], [0, 0.5, 0.2]])
def test_draw_keeps_each_item_with_its_own_probability(pi):
    pi = torch.tensor(pi, dtype=torch.float64)
    outcomes = every_draw(pi)
    for _, weights in outcomes:
        kept = weights > 0
        assert torch.allclose(weights[kept], 1 / pi[kept])
        assert abs(kept.sum() - pi.sum()) < 1 - 1e-9  # rounded down or up

    expectation = sum(p * weights for p, weights in outcomes)
    assert torch.allclose(expectation, (pi > 0).double(), rtol=0, atol=1e-12)


def test_real_draws_of_both_levels_have_the_mean_1():
    """Counted, not enumerated: is there chance, and are the two levels independent?"""
    rule = rule_with_history()
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(5, G).double()
    for _ in range(2000):
        N, prompts, w_q = prune_prompts(rule, torch.arange(6), 3, generator)
        w_qi = prune_completions(rule, ADVANTAGES[prompts], w_q, generator)
        total[prompts] += w_q[:, None] * w_qi

    errors = (total / 2000 - 1)[ADVANTAGES[:5] != 0]
    assert N == 5 and errors.abs().max() < 0.2


# ==== Lemma 2: train_step follows the gradient of L_hat ====
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_an_update_follows_the_gradient_of_the_weighted_losses(objective, beta, first):
    given = Given(objective, first, beta=beta)
    w = torch.linspace(0, 3, 6 * G).view(6, G)  # any weights
    w[:, 1] = 0  # pruned
    L_hat = (w * given.losses(ADVANTAGES)).mean()
    gradient = given.gradient(L_hat)

    shares = w / (6 * G * given.Z)
    descent = given.descent(partial(given.update, shares))
    assert (descent - gradient).norm() < 1e-6 * gradient.norm()


def test_these_sequences_fill_slots_and_batches_and_have_logits_for_512_tokens_at_a_time():
    given, made = Given(), []
    given.model.lm_head.register_forward_hook(lambda head, x, logits: made.append(len(logits)))
    batch, *others = dppo.pack_micro_batches(SEQUENCES, range(6 * G), given.config)
    dppo.completion_logprobs(given.model, SEQUENCES, batch, TEMPERATURE)
    assert others and len(batch) > 1
    assert len(made) > 1 and max(made) == 512


@pytest.mark.parametrize("objective", dppo.CLIPPING)
def test_both_bounds_clip_but_not_in_a_first_update(objective):
    assert dppo.CLIPPING == CLIPPING
    down, up = CLIPPING[objective]
    for first in (True, False):
        given = Given(objective, first)
        losses = given.losses(ADVANTAGES)
        for bounds in ((math.inf, up), (down, math.inf)):
            with mock.patch.dict(CLIPPING, {objective: bounds}):
                assert torch.equal(given.losses(ADVANTAGES), losses) == first


@pytest.mark.parametrize("objective", dppo.CLIPPING)
def test_a_first_update_without_KL_follows_the_policy_gradient(objective):
    given = Given(objective)
    logprobs = torch.stack([logprobs_of(given.model, s).sum() for s in SEQUENCES]).view(6, G)
    expected = given.gradient(-(ADVANTAGES * logprobs / given.Z).mean())
    gradient = given.gradient(given.losses(ADVANTAGES).mean())
    assert (gradient - expected).norm() < 1e-6 * expected.norm()


# ==== Lemma 3: dppo_step gives train_step advantages of whole groups and shares w/(N G Z) ====
@pytest.mark.parametrize("mean_length, w_q", [(MEAN_LENGTH, [1, 0, 2, 0, 3]), (0.0, [1] * 5)])
@pytest.mark.parametrize("objective", dppo.CLIPPING)
def test_updates_have_advantages_of_whole_groups_and_shares(objective, mean_length, w_q):
    """Whatever is drawn, and in both of two updates. (A mean length of 0 makes it a first step.)"""
    given = Given(objective, inner_epochs=2)
    rule = rule_with_history(OURS, prompts_per_step=5)
    w_q = torch.tensor(w_q).double()  # of a window of five
    prompts = w_q.nonzero()[:, 0]
    w_qi = torch.rand(2, len(prompts), G).double()

    # Draws give these, first the one of prompts, then two of completions.
    scripted = mock.patch.object(dppo, "draw", side_effect=[w_q, *w_qi.flatten(1)])
    with scripted as draws, mock.patch.object(dppo, "train_step") as train_step:
        step = given.step(rule, None, range(5), mean_length)

    A = group_advantages(REWARDS[prompts], scale_by_std=objective != "dr_grpo")
    w = w_q[prompts, None] * w_qi  # (updates, B, G)
    lengths = LENGTHS[prompts]
    Z = {"dr_grpo": LONGEST, "dapo": mean_length or lengths.mean()}.get(objective, lengths)
    assert torch.equal(torch.stack(step.weights), w)
    for update, its_w in zip(train_step.call_args_list, w, strict=True):
        _, _, _, advantages, shares, *_ = update.args
        assert torch.equal(advantages, A)
        assert torch.allclose(shares, its_w / (5 * G * Z))

    pi = rule.completion_probabilities(A, w_q[prompts]).flatten()
    for completions in draws.call_args_list[1:]:
        assert torch.equal(completions.args[0], pi)


# ==== Six ways to lose it ====
def test_six_ways_to_lose_it():
    """In a toy of four gradients, whose mean is 1 and of which a draw keeps two or three."""
    gradients = torch.tensor([4.0, 2.0, -1.0, -1.0], dtype=torch.float64)
    pi = torch.tensor([0.25, 0.5, 0.75, 0.75], dtype=torch.float64)

    def bias(estimate):
        return abs(sum(p * estimate(w) for p, w in every_draw(pi)) - 1)

    assert bias(lambda w: (w * gradients).mean()) < 1e-12

    # 1. Divide by the number that is kept, even if its mean, 2.25, makes up for it.
    assert bias(lambda w: (w * gradients).sum() / w.count_nonzero() * 2.25 / 4) > 0.05

    # 2. Centre advantages again after pruning. Relative to A, the first then has another mean.
    A = gradients - gradients.mean()
    assert bias(lambda w: w[0] * (A[0] - A[w > 0].mean()) / A[0]) > 0.05

    # 3. Remove the lowest for certain. This is refused.
    rule = rule_with_history()
    highest = ADVANTAGES.abs() >= ADVANTAGES.abs().median()
    rule.completion_probabilities = mock.Mock(return_value=highest)
    with pytest.raises(ValueError, match="0 < pi <= 1"):
        prune_completions(rule, ADVANTAGES, torch.ones(6), None)

    # 4. Look on until one has survived, and average over those that were looked at.
    assert bias(lambda w: (w * gradients)[: int(w.nonzero()[0]) + 1].mean()) > 0.05

    # 5. Use a draw again for a second update, which is no longer independent of theta. Here theta
    # rises from 0 to 1 on average, and gradients fall by as much, so it should stay at 1.
    def theta_after_two(w):
        theta = (w * gradients).mean()
        return theta + (w * (gradients - theta)).mean()

    assert bias(theta_after_two) > 0.05

    # 6. Clip the norm, or use Adam, whose first update is the gradient's sign.
    assert bias(lambda w: (w * gradients).mean().clamp(-1, 1)) > 0.05
    assert bias(lambda w: (w * gradients).mean().sign()) > 0.05


# ==== Models, tasks and runs that are tiny ====
def tiny_model(dtype=torch.float64, name="Qwen3ForCausalLM", **sizes):
    """A model with 13 tokens and random weights that are large enough to matter."""
    torch.manual_seed(0)
    shape = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shape |= {"max_position_embeddings": 256, "initializer_range": 0.3}
    shape |= {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1}
    model = getattr(transformers, name)
    return model(model.config_class(**shape | sizes)).to(dtype).eval()


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
    return [r * (len(p) > 5) for p, r in zip(prompts, lengths_reward(prompts, completions))]


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
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]  # strict JSON


def recorded(out, name):
    return [record[name] for record in metrics(out)[1:]]  # of each step


def spy(monkeypatch, *names):
    """Lists of the calls of functions of dppo, as (arguments by name, result)."""

    def noting(real, calls, *values, **named):
        arguments = inspect.signature(real).bind(*values, **named).arguments
        calls.append((SimpleNamespace(**arguments), real(*values, **named)))
        return calls[-1][1]

    lists = [[] for _ in names]
    for name, calls in zip(names, lists):
        monkeypatch.setattr(dppo, name, partial(noting, getattr(dppo, name), calls))
    return lists


# ==== 1 to 4. Advantages, keep probabilities, rules and pruning ====
def test_advantages_are_of_whole_groups_and_0_where_there_is_nothing_to_learn():
    none = math.nan
    rewards = [[1.0, 0.0, 0.0, 0.0], [1e-9, 0.0, 0.0, 0.0], [none, 1.0, 0.0, 0.0]]
    equal = [[0.1] * 4, [none, 0.1, 0.1, 0.1], [none, none, 0.3, none], [none] * 4]
    equal += [[0.1 + 0.2, 0.3, 0.3, none], [-1e9, -1e9 - 1, -1e9, -1e9]]  # up to rounding
    equal += [[0.3 - 0.1 - 0.2, 0.0, 0.0, 0.0]]
    rewards = torch.tensor([*rewards, *equal], dtype=torch.float64)
    for scale_by_std in (True, False):
        advantages = group_advantages(rewards, scale_by_std)
        for group, given in enumerate((rewards[0], rewards[1], rewards[2, 1:])):  # those given
            std = given.std() + 1e-4 if scale_by_std else 1.0
            assert torch.allclose(advantages[group, -len(given) :], (given - given.mean()) / std)
        assert advantages[2, 0] == 0 and advantages[3:].eq(0).all()


def test_the_paper_s_rule_prunes_the_floor_of_the_low_set():
    for scores, rate, expected in (
        ([0.1, 4.0, 4.0], 0.9, [1.0] * 3),  # floor(0.9 * 1) is none
        ([0.1] * 100 + [50.0], 0.29, [0.71] * 100 + [1.0]),  # 0.29 * 100 is below 29
        ([math.nan, 1.0, 1.0, 4.0], 0.5, [1.0, 0.5, 0.5, 1.0]),
        ([1.0, 1.0 + 2e-7, 1.0], 0.9, [1.0] * 3),  # equal but for rounding: none is low
        ([0.0] * 3, 0.9, [1.0] * 3),
    ):
        assert dppo.keep_probabilities(torch.tensor(scores), rate).tolist() == expected


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("method", [PAPER, OURS])
def test_the_window_is_the_longest_whose_survivors_never_exceed_the_batch(method, rate):
    generator, state = torch.Generator().manual_seed(0), torch.get_rng_state()
    rule = dppo.RULES[method](Config(prompt_prune_rate=rate), 300)
    for _ in range(10):
        order = torch.randperm(300, generator=generator)
        p = torch.rand(240, 1, generator=generator) ** 3
        rewards = (torch.rand(240, 8, generator=generator) < p).double()
        rule.remember(order[30:270], rewards, group_advantages(rewards))
        pi = rule.prompt_probabilities()
        N, kept, weights = prune_prompts(rule, order, 16, generator)
        assert pi[order[:N]].sum() <= 16 + 1e-9 < pi[order[: N + 1]].sum()
        assert len(kept) in (15, 16) and set(kept.tolist()) <= set(order[:N].tolist())
        assert weights.allclose(1 / pi[kept])
        assert pi.min() > 0.99 - rate  # so no weight exceeds 1/(1 - rate)
        assert pi.equal(rule.prompt_probabilities())  # no draw changes what a rule knows
    assert state.equal(torch.get_rng_state())  # draws are of the generator alone


def test_scores_are_of_the_last_visit_and_completions_without_a_gradient_go():
    rule = dppo.DPPO(Config(), 3)
    rule.remember(torch.tensor([0, 1, 1]), None, torch.tensor([[3.0, -3.0], [1, -1], [1.0, -0.5]]))
    rule.remember(torch.tensor([0]), None, torch.tensor([[2.0, -3.0]]))
    assert rule.memory["score"].nan_to_num(-1).tolist() == [2.5, 0.75, -1.0]  # means of groups
    A = torch.tensor([[2.0, -1.0, 1.0, 1.0], [0.4, -0.4, 0.4, 0.4], [0.0] * 4]).double()
    pi = rule.completion_probabilities(A, torch.ones(3))
    assert pi.tolist() == [[1.0] * 4, [0.5] * 4, [0.0] * 4]  # the mean is 6.6/8, of eight
    assert dppo.GRPOSkip(Config(), 3).completion_probabilities(A, None).equal((A != 0).double())
    assert dppo.GRPOSkip(Config(beta=0.1), 3).completion_probabilities(A, None).all()


def test_probabilities_of_one_s_own_that_would_bias_in_silence_are_refused():
    wrong = [(True, [0.0, 1, 1, 1]), (True, [2.0, 1, 1, 1]), (True, [1.0] * 3)]
    wrong += [(False, [-0.5, 1, 1, 1]), (False, [math.nan] * 4), (False, [0.0] * 4)]
    for unbiased, pi in wrong:
        rule = mock.Mock(dppo.Rule, prompt_count=4, unbiased=unbiased)
        rule.prompt_probabilities.return_value = torch.tensor(pi)
        with pytest.raises(ValueError, match=r"a rule needs (pi of shape \(4,\)|a limit of 1, )"):
            prune_prompts(rule, torch.arange(4), 8, None)
    pytest.raises(dppo.Refused, prune_prompts, rule_with_history(), torch.arange(1, 6), 0, None)
    rule = mock.Mock(dppo.Rule, config=Config(), unbiased=True)
    rule.completion_probabilities.return_value = ADVANTAGES > 0  # successes alone
    with pytest.raises(ValueError, match="0 < pi <= 1"):
        prune_completions(rule, ADVANTAGES, torch.ones(6), None)


# ==== 5. The step ====
def test_later_updates_of_a_run_compare_with_the_policy_that_sampled(monkeypatch, tmp_path):
    """The first does not, as another packing's rounding might be clipped in bfloat16."""
    samples, steps, updates = spy(monkeypatch, "sample", "dppo_step", "train_step")
    monkeypatch.setattr(dppo.time, "perf_counter", itertools.count().__next__)  # 4 times a step
    task, out = tiny_task(evals=0), tmp_path / "one"
    run(out, task, steps=2, inner_epochs=2, learning_rate=1e-2, warmup_steps=0, beta=0.1)
    for n, (given, step) in enumerate(steps):
        examples = [task.train[q] for q in step.prompts]
        assert [s.prompt for s in step.sequences[::4]] == [e["prompt_ids"] for e in examples]
        assert step.rewards.equal(dppo.reward_completions(task, examples, step.sequences))
        before, record = metrics(out)[n : n + 2]
        assert given.mean_length == before["mean_length"]
        assert (record["mean_length"], record["updates"]) == (step.mean_length, 2 * (n + 1))
        assert (record["rollout_seconds"], record["train_seconds"]) == (1, 2)
        assert record["rollout_worth"] == 32 / step.limit
        sampled = samples[n][1][1].split([len(ids) for _, ids in step.sequences])
        first, later = [update for update, _ in updates[2 * n : 2 * n + 2]]
        assert first.old is None
        assert first.optimizer.param_groups[0]["lr"] == 1e-2  # without a warm-up
        assert all(old.allclose(sampled[i], atol=1e-4) for i, old in later.old.items())
        for i, ref in first.ref.items():
            assert torch.allclose(ref, sampled[i], atol=1e-4) == (n == 0)  # the first policy


def test_a_step_remembers_its_rollout_after_its_updates_and_the_window_s_mean_length(monkeypatch):
    given, rule, done = Given(inner_epochs=2), rule_with_history(), []
    [updates] = spy(monkeypatch, "train_step")
    rule.remember = mock.Mock(side_effect=lambda *_: done.append(len(updates)))
    for before in (0.0, MEAN_LENGTH):
        step = given.step(rule, torch.optim.SGD(given.model.parameters()), mean_length=before)
        prompts, rewards, advantages = rule.remember.call_args.args
        assert torch.equal(prompts, step.prompts) and torch.equal(advantages, ADVANTAGES[prompts])
        assert torch.allclose(rewards, REWARDS[prompts], equal_nan=True)
        length = step.w_q @ LENGTHS[prompts].mean(dim=1) / step.w_q.sum()
        assert step.mean_length == pytest.approx(0.9 * (before or length) + 0.1 * length)
        advantages.zero_()  # as a rule may work in place
        assert torch.equal(step.A, ADVANTAGES[prompts])
    assert done == [2, 4]


@pytest.mark.parametrize("rewards", [REWARDS, torch.zeros(6, G)])
def test_a_biased_rule_trains_on_the_mean_of_what_it_keeps(rewards):
    given, rule = Given(), rule_with_history()
    rule.unbiased = False  # so it may keep for certain what it likes
    likes = mock.Mock(side_effect=lambda A, w_q: ((A != 0) & (w_q[:, None] > 1)).double())
    rule.completion_probabilities = likes
    step = given.step(rule, torch.optim.SGD(given.model.parameters()), rewards=rewards)
    kept = likes(step.A, step.w_q)
    assert torch.allclose(step.weights[0] / (step.N * G), kept / kept.sum().clamp(min=1))
    assert (kept.sum() > 1) == rewards.any()


# ==== 6. Rollout ====
def test_samples_have_the_probabilities_that_are_trained_whatever_the_model_s_defaults():
    task, prompt, draws = tiny_task(), [5, 4, 3, 7], 8000
    task.model = tiny_model(torch.float32, vocab_size=80, initializer_range=0.1)  # top_k is 50
    others = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5, "eos_token_id": [1, 12]}
    others |= {"no_repeat_ngram_size": 1, "num_beams": 2, "num_return_sequences": 2}
    task.model.generation_config = transformers.GenerationConfig(
        **others, cache_implementation="static"
    )
    config = Config(temperature=0.7, max_completion_tokens=1)
    torch.manual_seed(0)
    sequences, _ = dppo.sample(task, [prompt], draws, config)
    counts = torch.bincount(torch.tensor([ids for _, ids in sequences]).flatten(), minlength=80)
    each = [Sequence(prompt, [token]) for token in range(80)]
    trained = dppo.frozen_logprobs(task.model, each, range(80), config)
    expected = draws * torch.cat(list(trained.values())).exp()
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 131  # of 79 degrees of freedom: p = 2e-4


def captured(forward):
    """In place of a CUDA graph: a function that always uses the tensors which are there now."""
    cells = [CellType(cell.cell_contents) for cell in forward.__closure__]
    return FunctionType(forward.__code__, forward.__globals__, closure=tuple(cells))


@pytest.mark.parametrize("block, graphs, captures", [(1, False, 0), (8, False, 6), (1, True, 2)])
@pytest.mark.parametrize("end_ids", [[1, 12], [0], []])
def test_what_is_sampled_is_what_is_trained(end_ids, block, graphs, captures, monkeypatch):
    """A graph reads a block of tokens. Then rows that have ended leave, and there is another."""
    task, capture = tiny_task(), mock.Mock(side_effect=captured)
    task.end_ids = end_ids
    monkeypatch.setattr(dppo, "capture", capture)
    monkeypatch.setattr(dppo, "BLOCK", block)
    texts = [[0, *task.train[1]["prompt_ids"] * 9][:length] for length in (3, 30, 1, 17, 8)]
    config = Config(max_completion_tokens=40, cuda_graphs=graphs)
    torch.manual_seed(0)
    for prompts, samples in ((texts[:1], 1), (texts[1:2], 9), (texts[:2], 1), (texts, 8)):
        capture.reset_mock()
        sequences, sampled = dppo.sample(task, prompts, samples, config)
        assert [prompt for prompt, _ in sequences[::samples]] == prompts
        trained = dppo.frozen_logprobs(task.model, sequences, range(len(sequences)), config)
        lengths = [len(completion) for _, completion in sequences]
        for i, logprobs in enumerate(sampled.split(lengths)):
            completion = sequences[i].completion
            assert not set(end_ids) & set(completion[:-1])
            assert completion[-1] in end_ids or len(completion) == 40
            assert torch.allclose(logprobs, trained[i], atol=1e-4)
    assert len(set(lengths)) > 8 or not end_ids
    assert capture.call_count == captures


# ==== 7 and 8. Dense Prompt Packing, loss and update ====
def test_packing_takes_the_longest_that_fits_into_as_many_slots_as_the_tokens_allow():
    assert dppo.pack([5, 3, 8, 2, 2], capacity=10) == [[2, 3], [0, 1, 4]]
    assert dppo.pack([5, 6, 5, 4], capacity=10, lookahead=1) == [[0], [1], [2, 3]]  # in order
    sequences = [Sequence([2] * 3, [3] * n) for n in (130, 50, 50, 70)]  # 133, 53, 53, 73 tokens
    for tokens, expected in {399: [[[0], [3, 1], [2]]], 398: [[[0], [3, 1]], [[2]]]}.items():
        config = Config(micro_batch_tokens=tokens)
        assert dppo.pack_micro_batches(sequences, range(4), config) == expected
    config = Config(micro_batch_tokens=256)  # two of 128 tokens
    assert dppo.pack_micro_batches(sequences, [1, 2, 3], config) == [[[3, 1], [2]]]
    inputs = (sequences, torch.ones(4), torch.tensor([0, 1, 1, 1]), None, None, config)
    metrics = dppo.train_step(tiny_model(), mock.Mock(), *inputs)
    assert metrics["packing_density"] == (73 + 53 + 53) / (2 * 126)


def test_an_update_tells_how_much_it_trained_and_clips_a_gradient_longer_than_allowed():
    given, told = Given(first=False, beta=0.1, max_grad_norm=1e-3), []
    shares, A = torch.tensor([0.0, 1.0, 1.0] * 6), torch.ones(6, G)
    kept = shares.nonzero()[:, 0].tolist()
    rho = torch.cat([logprobs_of(given.model, SEQUENCES[i]) - given.old[i] for i in kept]).exp()
    kl = given.losses(0 * A) * given.Z / 0.1  # what is left of losses without advantages
    descent = given.descent(lambda optimizer: told.append(given.update(shares, optimizer, A)))
    assert descent.norm().item() == pytest.approx(1e-3)
    assert (told[0]["completions_trained"], told[0]["tokens_trained"]) == (12, len(rho))
    assert told[0]["kl"] == pytest.approx(kl[:, 1:].sum().item() / len(rho))
    assert told[0]["clipped_fraction"] == pytest.approx((rho > 1.2).sum().item() / len(rho)) != 0


def test_updates_below_bfloat16_resolution_add_up_in_float32_masters():
    given, still = Given(dtype=torch.bfloat16), []
    given.model.lm_head.weight.grad = torch.ones(13, 16).bfloat16()  # left by an interruption
    optimizer, start = dppo.MasterAdam(given.model, 4e-5), given.parameters()
    for _ in range(12):
        given.update(torch.ones(6, G), optimizer)
        still.append((given.parameters() == start).double().mean())
    assert still[0] > 0.9 > still[-1]
    for weight, master in zip(given.model.parameters(), optimizer.masters):
        assert weight.grad_dtype == master.dtype == torch.float32  # of sums over micro-batches, too
        assert torch.equal(weight, master.bfloat16())
        assert weight.grad is None and master.grad is None


def test_a_gradient_that_is_0_or_not_finite_moves_nothing():
    given, moved, skipped = Given(dtype=torch.float32), [], []
    optimizer, equal = dppo.MasterAdam(given.model, 1e-2), torch.zeros(6, G)
    shares = [0.0, math.nan, 1e30, 1.0]  # at 1e30, the norm is infinite
    updates = [(1.0, ADVANTAGES), (1.0, equal), *((share, ADVANTAGES) for share in shares)]
    for share, advantages in updates:
        before = given.parameters()
        metrics = given.update(torch.full((6, G), share), optimizer, advantages)
        moved.append(not torch.equal(before, given.parameters()))
        skipped.append(metrics["updates_skipped"])
    assert moved == [True, False, False, False, False, True]
    assert skipped == [0, 0, 0, 1, 1, 0] and optimizer.updates == 2


# ==== Part III: our rule, and the lemmas on its line and on what a rollout is worth ====
def test_the_line_of_completions_ends_at_their_mean_and_counts_w_q():
    advantages = torch.tensor([[3.0, -1.0, -2.0], [1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]).double()
    rule = dppo.ProportionalDPPO(Config(completion_prune_rate=0.6), 3)
    pi = rule.completion_probabilities(advantages, torch.tensor([1.0, 4.0, 9.0]).double())
    # The scores are 3, 1, 2; 4, -, 4; none. Their mean is 2.8.
    line = [1 - 0.6 * (1 - score / 2.8) for score in (1, 2)]
    assert pi.flatten().tolist() == pytest.approx([1, *line, 1, 0, 1, 0, 0, 0])
    assert not rule.completion_probabilities(0 * advantages, torch.ones(3)).any()


def test_a_step_has_the_noise_of_as_many_unpruned_prompts_as_are_wanted():
    """Noise is the sum of |w_q s_q/N|^2, which is mean(s^2)/N without pruning."""

    def noise():
        N, kept, w_q = prune_prompts(rule, visits, 5, None)
        return (w_q**2 * squares[kept]).sum() / N**2

    for r_q in (0.0, 0.9):
        rule, visits = rule_with_history(OURS, r_q), torch.tensor([2, 3, 4, 1, 5])
        squares, pi = rule.expected_squares(), rule.prompt_probabilities()
        pruned = sum(p * value for p, value in every_result(noise))
        worth = squares[visits].mean() / pi[visits].sum() / pruned
        assert worth > 1.1 if r_q else abs(worth - 1) < 1e-12
        for most in (1, 4, 9, 40):
            rule = rule_with_history(OURS, r_q, prompts_per_step=most)
            assert rule.limit_of_step(visits.repeat(12)) == max(1, round(most / worth.item()))
    rule = rule_with_history(OURS, 0.9, prompts_per_step=1)
    rule.expected_squares = mock.Mock(return_value=torch.tensor([1, 1, 0.25, 0, 0, 0]))
    assert rule.limit_of_step(torch.tensor([2, 3, 4, 5])) == 1  # 0.4 would be enough


@pytest.mark.parametrize("low, size", [(0, 1), (-1, 1), (0, 100), (1, 1), (-3e-4, 4e-4)])
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_a_score_is_what_others_of_that_rate_had_next_at_any_scale(objective, low, size):
    none, one, half, all_right = [0.0] * 4, [1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0] * 4
    partly, missing = [1.0, 0, math.nan, math.nan], [math.nan] * 4

    def visit(prompts, *rewards):
        """-> the mean A^2 of each group."""
        rewards = low + size * torch.tensor(rewards, dtype=torch.float64)
        A = group_advantages(rewards, scale_by_std=objective != "dr_grpo")
        rule.remember(torch.tensor(prompts), rewards, A)
        return A.square().mean(dim=1)

    rule = dppo.ProportionalDPPO(Config(objective=objective, prompt_prune_rate=0.5), 9)
    visit([8], missing)  # no reward has been given yet: nothing to remember
    assert rule.prompt_probabilities().eq(1).all() and rule.limit_of_step(torch.arange(9)) == 32
    visit(range(6), all_right, half, half, none, one, half)
    # Of the rates p = 4.05/4.1, 2.05/4.1, 0.05/4.1, 1.05/4.1, this is 17 asin(sqrt p)/(pi/2).
    assert rule.bin_of_prompts().tolist() == [15, 8, 8, 1, 5, 8, -1, -1, -1]
    assert rule.memory["visits"].eq(0).all()  # first visits teach bins nothing
    # 0 comes twice in one window; 1 and 5 were like 2, and `missing` is no visit.
    square, wide, *_ = visit([0, 1, 5, 0], partly, half, missing, partly)
    guess = 0.1 + 0.9 * (math.pi * (torch.arange(17).double() + 0.5) / 17).sin() ** 2
    guess *= size**2 / 4 if objective == "dr_grpo" else 1  # A^2 is at most (size/2)^2
    left = 4 * rule.forget**3  # of the visits that the guess was worth
    learned = {15: (left * guess[15] + 2 * square) / (left + 2)}
    learned[8] = (left * guess[8] + wide) / (left + 1)
    expected = rule.expected_squares()
    assert expected[2:5].allclose(torch.stack([learned[8], guess[1], guess[5]]))
    assert expected[6:].allclose(expected[:6].mean())  # never visited: the mean of the others
    pi = rule.prompt_probabilities()
    assert pi[:6].allclose(1 - 0.5 * (1 - (expected[:6] / expected[:6].max()).sqrt()))
    assert pi[6:].eq(1).all()
    # Sums decay. Missing rewards count for nothing.
    d = rule.decay
    counts = torch.tensor([4 * d**2 + 2 * d + 2, 4 * d + 4, 4, 4, 4, 4, 0, 0, 0]).double()
    right = torch.tensor([4 * d**2 + d + 1, 2 * d + 2, 2, 0, 1, 2, 0, 0, 0]).double()
    assert rule.memory["count"].allclose(counts)
    assert rule.memory["rewards"].allclose(low * counts + size * right)


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_prompts_that_always_or_never_succeed_teach_their_bins_to_be_worth_little(objective):
    rule, by_std = dppo.ProportionalDPPO(Config(objective=objective), 3), objective == "grpo"
    rewards = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    for _ in range(40):
        rule.remember(torch.arange(3), rewards, group_advantages(rewards, by_std))
    assert rule.bin_of_prompts().tolist() == [0, 8, 16]  # of 17
    assert rule.expected_squares()[[0, 2]].max() < 0.02  # the guess was 0.1
    # Rewards far from all others move neither their range nor the limit of a step.
    limit = rule.limit_of_step(torch.arange(3).repeat(40))
    rewards[0, 0], rewards[2, 0] = -100, 100
    rule.remember(torch.arange(3), rewards, group_advantages(rewards, by_std))
    assert rule.range_of_rewards() == (0, 1) and rule.expected_squares()[0] < 0.04
    assert limit - 2 < rule.limit_of_step(torch.arange(3).repeat(40)) < limit + 4 < 32
    # Of rewards that are all equal but for rounding, none is a success.
    for reward in (0.3, -0.1, 0.0):
        rule, zeros = dppo.ProportionalDPPO(Config(objective="dr_grpo"), 3), torch.zeros(3, 8)
        for _ in range(4):
            rule.remember(torch.arange(3), zeros.double() + reward, zeros)
        assert rule.range_of_rewards() == (reward, 0) and rule.bin_of_prompts().eq(0).all()
        assert rule.prompt_probabilities().eq(1).all() and rule.limit_of_step(torch.arange(3)) == 32


# ==== Part IV, 9. Order, and which models can be trained ====
def test_epochs_and_seeds_have_orders_and_random_numbers_of_their_own(monkeypatch, tmp_path):
    windows, updates = spy(monkeypatch, "prune_prompts", "train_step")
    monkeypatch.setattr(transformers, "set_seed", mock.Mock(wraps=transformers.set_seed))
    for seed, warmup in ((0, 10), (9999, 4)):
        task = tiny_task(seldom_teaches, prompts=24, evals=0)
        settings = {"seed": seed, "warmup_steps": warmup, "prompts_per_step": 12}
        run(tmp_path / str(seed), task, **settings, steps=6)
    sizes = [(N, len(prompts)) for _, (N, prompts, _) in windows]
    assert max(sizes) > (24, 10) and min(B for _, B in sizes) > 10  # full, from several epochs
    seen = torch.cat([window.upcoming[:N] for window, (N, *_) in windows[:6]])
    first, second, other = seen[:24], seen[24:48], windows[6][0].upcoming[:24]
    assert all(sorted(epoch.tolist()) == list(range(24)) for epoch in (first, second, other))
    assert not first.equal(second) and not first.equal(other)
    for least, end in ((0, 44), (40, 60)):
        assert dppo.next_prompts(20, 24, seed=0, least=least).equal(seen[20:end])
    assert recorded(tmp_path / "0", "epoch")[:2] == [12 / 24, 1]
    rates = [update.optimizer.param_groups[0]["lr"] for update, _ in (updates[0], updates[-1])]
    assert rates == pytest.approx([5e-5 * 6 / 10, 5e-5])  # during the warm-up, and after it
    own = {window.generator.initial_seed() for window, _ in windows}
    others = [call.args[0] for call in transformers.set_seed.call_args_list]
    assert len(own) == 12 and not own & set(others)
    assert not set(others[1:7]) & set(others[-6:])  # nor do runs of two seeds share any


# A sequence of more than 48 tokens changes the rotations of all others in its batch.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG |= {"original_max_position_embeddings": 48, "rope_theta": 100.0}
MODELS = [("Qwen2ForCausalLM", {"use_cache": False}, None), ("GPT2LMHeadModel", {}, None)]
MODELS += [("Gemma3ForCausalLM", {"sliding_window": 8}, None)]
MODELS += [("Qwen3ForCausalLM", {"rope_parameters": YARN | {"rope_theta": 1e4}}, None)]
MODELS += [("LlamaForCausalLM", {"max_position_embeddings": 63}, "tokens exceed its 63")]
MODELS += [("Qwen3ForCausalLM", {"vocab_size": 12}, "a prompt has tokens that it does not know")]
MODELS += [("LlamaForCausalLM", {"rope_parameters": LONG}, "differ by")]
MODELS += [("OPTForCausalLM", {"tie_word_embeddings": False}, "differ by")]  # ignores position ids
MODELS += [("GraniteForCausalLM", {"logits_scaling": 1.1}, "scaled, capped")]
MODELS += [("Qwen3NextForCausalLM", {}, "layers of linear attention have no keys and values")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, more, reason", MODELS)
def test_only_models_that_sample_as_they_train_are_accepted(name, more, reason, dtype, monkeypatch):
    """Up to the last of 64 positions, of which the samples that are compared have at most 27."""
    monkeypatch.setattr(dppo, "capture", captured)
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
        dppo.check_sampling(task, dataclasses.replace(config, cuda_graphs=True))
        task.train[0]["prompt_ids"] = [5]  # nor does a prompt of one token do harm
        dppo.check_sampling(task, config)


@pytest.mark.parametrize("change", [0.01, math.nan])
def test_a_difference_between_sampling_and_training_is_noticed(change, monkeypatch):
    def changed(*inputs):
        logprobs = real(*inputs)
        return logprobs + change * (-1) ** torch.arange(len(logprobs))

    real = dppo.token_logprobs
    monkeypatch.setattr(dppo, "token_logprobs", changed)
    with pytest.raises(ValueError, match="differ by"):
        dppo.check_sampling(tiny_task(), Config())


# ==== 10. Rewards ====
def test_rewards_compare_with_an_answer_if_there_is_one():
    numbers = [("0", 0, 1), ("a <b> 18", "18", 1), ("5", "#### 5 apples", None), ("2", 2.0, 1)]
    numbers += [("<think>5</think>", "5", 0), ("<think>5 + 13 = 18", "18", 0)]
    numbers += [("5</think>18", "18", 1), ("<think>1</think>2<think>3", "2", 0)]
    texts = [(" ab\n", "ab ", 1), ("b", "ab", 0), ("0", 0, 1), ("A", "a", 0), ("0124", "124", 0)]
    texts += [("", "", None), ("None", None, None), ("1.5", 1.5, None), ("True", True, None)]
    texts += [("<think>ab</think>\nb", "b", 1)]
    for reward, grades in ((dppo.gsm8k, numbers), (dppo.exact, texts)):
        for completion, answer, grade in grades:
            for given in (completion, [{"role": "assistant", "content": completion}]):
                assert reward(["?"], [given], answer=[answer], level=[1]) == [grade], completion


def test_numbers_are_read_where_there_is_one_and_an_answer_must_be_nothing_else():
    numbers = {18: ["#### 18.0", "x\n#### 18", "####18", r"\boxed{18}", "18", "$18$", "**18**"]}
    numbers[18] += [r"\(18\)", r"\[18\]", r"#### \(18\)", r"18^\circ", "\uff11\uff18"]  # full width
    numbers[18] += ["US$18", "18°C", r"\boxed{\{18\}}", r"\boldsymbol{18}"]
    numbers |= {5: [r"#### \boxed{5}", r"so it is $\boxed{5}$"], -2: ["#### 7\n#### -2"]}
    numbers |= {0.5: ["0.50", "#### 0.5%", ".5"], 9500: ["9,500", "$9,500.00"]}
    numbers |= {7: ["7 #### one\n#### 7", r"I get \boxed{7}, not 8"], 1234: [r"\boxed{1{,}234}"]}
    numbers[1234] += [r"\boxed{1,\!234}", r"1\,234"]
    numbers[-31] = [r"-\$31", "\N{MINUS SIGN}31", "\N{EN DASH}31", "- 31"]
    for number, texts in numbers.items():
        for text in texts:
            assert dppo.gsm8k_number(text) == number, text
            assert dppo.gsm8k_number(text, is_answer=True) == number, text
    none = ["(3,4)", "14,16", "1/2", r"\frac{14}{3}", "12:30", "10-12", "52_8", "0,500", "one", ""]
    none += ["1234,567", "2^3", r"\sqrt{13}", "1.234,50", "x5", "5x", "1e3", "5²", "3pi", "\u0663"]
    none += ["#### (3,4)", "#### 1/2", "#### 1 1/2", "#### 5+3", "#### 5 + 13 = 18", "\n" * 99_999]
    none += [r"\boxed{3,4}", r"\boxed{\frac{1}{2}}", r"\boxed{2 \sqrt{3}}", r"\boxed{2 \times 9}"]
    none += ["9" * 99_999 + "x", r"\boxed{1.8 \times 10^1}", r"\boxed{(-2)^3}", "#### 3 /4", "18万"]
    assert {dppo.gsm8k_number(text) for text in none} == {None}
    sentences = ["so 18 eggs.", "#### 18 dollars", "5 +\n13 = 18", "(18)", "x = 18km!", "< 18"]
    sentences += [r"\boxed{18\text{ dollars}}", r"\(3 \times 6 = 18\)", "从3到18。", r"18^\circ C"]
    assert {dppo.gsm8k_number(text) for text in sentences} == {18}
    none += [*sentences[:6], "± 7", "6 - 5i", "2 1/4"]
    assert {dppo.gsm8k_number(text, is_answer=True) for text in none} == {None}


def test_a_reward_gets_trl_s_arguments_in_the_shape_of_the_data_and_may_say_none():
    def reward(**columns):
        assert columns == expected
        columns["prompts"][2] += columns["completions"][2]  # in place, as what it gets are copies
        assert columns["prompts"][3] == chat
        return returned

    task, chat = tiny_task(reward), [{"role": "user", "content": "3"}]
    text = {"prompt": "12=", "prompt_ids": [1], "answer": "12", "level": 1}
    examples = [text, text | {"prompt": [*chat], "answer": "3", "level": 2}]
    ids = [[3, 4, 1], [0, 5], [6, 1], [7, 7]]
    assistant = [[{"role": "assistant", "content": text}] for text in ("3", "44")]
    completions = ["01", "<pad>2", *assistant]  # special tokens, but for the end, are a part of it
    expected = {"prompts": ["12=", "12=", chat, chat], "completions": completions}
    expected |= {"answer": ["12", "12", "3", "3"], "level": [1, 1, 2, 2], "completion_ids": ids}
    inputs = (task, examples, [Sequence([1], completion) for completion in ids])
    returned = [None, 1, 0.5, True]
    rewards = dppo.reward_completions(*inputs)
    assert rewards.nan_to_num(-1).tolist() == [[-1.0, 1.0], [0.5, 1.0]]
    for right in ([[0.0], [1.0], [0.5], [1.0]], torch.tensor([0.0, 1, 0.5, 1]), (0, 1, 0.5, 1)):
        returned = right  # as some models and libraries return them
        assert dppo.reward_completions(*inputs).tolist() == [[0, 1], [0.5, 1]]
    for wrong in ([1.0] * 3, ["x"] * 4, {1, 2, 3, 4}, {0: 1.0}, None, "1234", [math.inf] * 4):
        returned = wrong
        with pytest.raises(ValueError, match="rewards must be 4 numbers or None"):
            dppo.reward_completions(*inputs)


def test_reasoning_that_the_template_begins_must_end_to_be_graded():
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    begun, mentioned = "2?<think>\n", "What does <think> mean in a template?"
    cases = [(begun, dppo.gsm8k, [[0, 1]]), (begun, lambda completions, **_: [1, 0], [[1, 0]])]
    for prompt, reward, expected in [*cases, (mentioned, dppo.gsm8k, [[1, 1]])]:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        example = {"prompt": [{"role": "user", "content": "2?"}], "prompt_ids": ids, "answer": "5"}
        sequences = [Sequence(ids, tokenizer.encode(text)) for text in ("5", "4</think>5")]
        task = Task([], {}, tokenizer, reward, None, [tokenizer.eos_token_id])
        assert dppo.reward_completions(task, [example], sequences).tolist() == expected


# ==== 11 and 12. Tasks and data ====
def write_rows(path, *rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def user(tmp_path_factory):
    """Settings with a model with random weights and a dataset, as users have them."""
    folder = tmp_path_factory.mktemp("user")
    rows = [{"question": f"{a}=", "answer": f"#### {a}"} for a in range(100, 180)]
    data = write_rows(folder / "data.jsonl", *rows)
    for part in (tiny_model(torch.float32, eos_token_id=[12, 7]), tiny_tokenizer()):
        part.save_pretrained(folder / "model")
    return {"model": f"{folder}/model", "dataset": data, "max_completion_tokens": 8}


def main(*arguments):
    """The command line."""
    with mock.patch.object(sys, "argv", ["dppo.py", *arguments]):
        dppo.main()


def chat_template(after):
    """What follows each message; then = and, if thinking is switched off, 0."""
    messages = "{% for m in messages %}{{ m['content'] }}" + after + "{% endfor %}"
    thinking = "{% if enable_thinking is false %}0{% endif %}"
    return messages + "{% if add_generation_prompt %}=" + thinking + "{% endif %}"


def load(data, reward="test_dppo:lengths_reward", tokenizer=None, **settings):
    config = Config(model="x", dataset=str(data), reward=reward, **settings)
    return dppo.load_examples(str(data), "train", config, tokenizer or tiny_tokenizer())


def test_rows_that_are_left_out_are_told_by_reason_and_add_up(tmp_path, capsys):
    texts = ("12", "1" * 20, None, "", "12")
    rows = [{"question": text, "solution": "4", "level": 5} for text in texts]
    data = write_rows(tmp_path / "a.jsonl", *rows, {"question": "13", "solution": "B", "tools": 0})
    [example] = load(data, "gsm8k", max_prompt_tokens=4, system_prompt="7")  # just long enough
    expected = {"prompt": "12", "prompt_ids": tiny_tokenizer().encode("7\n\n12"), "answer": "4"}
    assert example == expected | {"question": "12", "solution": "4", "level": 5, "tools": None}
    told = capsys.readouterr().out
    assert "a.jsonl: 6 rows of question, solution, level, tools; 1 prompts" in told
    assert ", 2 empty (None)" in told and "1 not gradable ('B')" in told
    assert "1 over --max_prompt_tokens" in told and "1 repeated" in told


def test_data_are_files_whose_texts_stay_as_they_are_or_slices_on_the_hub(monkeypatch, tmp_path):
    answers = ["0124", "2.0", 7, math.nan, True, ["x"], {"y": None}, None]
    rows = [{"prompt": f"{i}=", "answer": answer} for i, answer in enumerate(answers)]
    write_rows(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text("\ufeff " + json.dumps(rows, indent=1))
    for name in ("a.jsonl", "a.json"):
        given = {example["prompt"]: example["answer"] for example in load(tmp_path / name)}
        assert repr([given[row["prompt"]] for row in rows]) == repr(answers)
    table = '\ufeffprompt,answer\n1=,0124\n2=,\n\n3=,NA\n4=,true\n5=,1e5\n6=,"18,5"\n'
    (tmp_path / "a b.CSV").write_text(table)
    given = {row["answer"] for row in load(tmp_path / "a b.CSV", "exact")}
    assert given == {"0124", "NA", "true", "1e5", "18,5"}
    rows = datasets.Dataset.from_list([{"prompt": f"{i}=", "of": {"label": i}} for i in range(9)])
    rows.to_parquet(tmp_path / "a:[1].PARQUET")
    examples = load(tmp_path / "a:[1].PARQUET", answer_column="of.label")
    assert sorted(example["answer"] for example in examples) == list(range(9))
    monkeypatch.setattr(datasets, "load_dataset", mock.Mock(return_value=rows))
    part = "train[9:99]+train[-1:]"
    for names, split in (([], "train"), (["test"], "test"), (["main", part], part)):
        assert load(":".join(["openai/gsm8k", *names]))[0]["answer"] is None
        call = mock.call("openai/gsm8k", *names[:-1], split=split)
        assert datasets.load_dataset.mock_calls[-1] == call


def test_a_row_that_cannot_be_used_is_refused_by_its_number(tmp_path):
    rows = {"jsonl": [('["1="]', "not those of"), ("null", "not those of"), ("{", "Expec")]}
    rows["csv"] = [("1=,7,0", "not those of"), ("1=", "not those of"), (9**6 * "1", "field limit")]
    user, shape = {"role": "user", "content": "1="}, "is no text, and no list of messages with role"
    prompts = [(1, shape), ([user | {"content": None}], shape), ([{"from": "human"}], shape)]
    prompts += [("<end>1=", "it is a chat as a text: a list of messages"), (["1=", "2="], "")]
    prompts += [(str([user]), "it is a chat as a text"), (json.dumps([user]), "a chat as a text")]
    prompts += [([user | {"content": [{"type": "text", "text": "1="}]}], "can only concatenate")]
    prompts += [([user, user | {"role": r}], "drop --system") for r in ("system", "developer")]
    rows["jsonl"] += [(json.dumps({"prompt": prompt}), reason) for prompt, reason in prompts]
    tokenizer = tiny_tokenizer("{{ messages[-1]['content'] + '=' }}")
    for kind, first in {"csv": "prompt,answer\n1=,1\n", "jsonl": '{"prompt": "1="}\n'}.items():
        for row, reason in rows[kind]:
            (tmp_path / f"a.{kind}").write_text(first + row)
            with pytest.raises(dppo.Refused, match=f"a.{kind}, row 2: .*{reason}"):
                load(tmp_path / f"a.{kind}", system_prompt="7", tokenizer=tokenizer)


def test_chat_templates_end_with_the_assistant_s_turn_or_what_it_began_which_is_continued():
    tokenizer = tiny_tokenizer(chat_template("{{ {'system': 6, 'user': 9}.get(m['role'], 5) }}"))
    roles = {"system": "8", "user": "12", "assistant": "3"}
    system, *chat = [{"role": role, "content": text} for role, text in roles.items()]
    plain = Config(chat_template_kwargs='{"enable_thinking": false}')
    told = dataclasses.replace(plain, system_prompt="7")
    cases = [(plain, chat, "1293"), (plain, "12", "129=0"), (plain, [system, *chat[:1]], "86129=0")]
    cases += [(told, chat, "761293"), (told, "12", "76129=0")]
    for config, prompt, text in cases:
        given, ids = dppo.encode_prompt(prompt, config, tokenizer)
        assert (given, tokenizer.decode(ids)) == (prompt, text)  # a text stays a text
    mentioned = dppo.encode_prompt("1<end>2", plain, tokenizer)[1]
    assert tokenizer.decode(mentioned).startswith("1<end>29")  # in the template
    ends = transformers.ByT5Tokenizer(extra_ids=0)  # what it encodes, but no prompt
    assert dppo.encode_prompt("12", Config(), ends)[1] == [52, 53]


def test_a_model_has_every_end_id_and_no_code_and_is_checked(user, monkeypatch, tmp_path):
    monkeypatch.setattr(dppo, "DTYPE", torch.bfloat16)
    kind, tokenizer = transformers.AutoModelForCausalLM, tiny_tokenizer()
    monkeypatch.setattr(kind, "from_pretrained", mock.Mock(wraps=kind.from_pretrained))
    [checks] = spy(monkeypatch, "check_sampling")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    begins = tokenizers.processors.TemplateProcessing("<pad> $A", None, [("<pad>", 0)])
    tokenizer.backend_tokenizer.post_processor = begins  # a text, but not what ends a turn
    tiny_model(torch.float32, vocab_size=14, eos_token_id=[12, 7]).save_pretrained(tmp_path)
    fails = "{% if m['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    turn = "{{ {'assistant': '=<turn>5<pad>'}[m['role']] }}"
    for after, end in ((None, []), ("5", []), (fails, []), (turn, [13])):
        tokenizer.chat_template = after and chat_template(after)
        tokenizer.save_pretrained(tmp_path)
        task = dppo.load_task(Config(**user | {"model": str(tmp_path)}))
        assert task.end_ids == [1, 7, 12, *end]  # the tokenizer's, the model's, the template's
    assert len(checks) == 4 and task.model.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in task.model.buffers()} == {torch.float32}
    options = kind.from_pretrained.call_args.kwargs
    assert options["attn_implementation"] == "sdpa" and not options["trust_remote_code"]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_what_is_evaluated_is_not_trained_on(user, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 106)]
    write_rows("some.jsonl", *rows[:4])
    write_rows("more.jsonl", *rows[3:])
    cases = [("", 10, {"held out": 10}), ("", 256, {"held out": 16}), ("", 0, {})]  # a fifth
    cases += [("some.jsonl,more.jsonl", 3, {"some.jsonl": 3, "more.jsonl": 3})]
    for sets, most, sizes in cases:
        settings = user | {"eval_dataset": sets, "eval_prompts": most}
        task, other = dppo.load_task(Config(**settings)), dppo.load_task(Config(**settings, seed=1))
        assert {name: len(examples) for name, examples in task.evals.items()} == sizes
        trained = [example["question"] for example in task.train]
        evaluated = {example["question"] for example in itertools.chain(*task.evals.values())}
        assert not evaluated & set(trained) and len(trained) == 80 - len(evaluated)
        assert trained != sorted(trained)  # shuffled
        assert (task.train, task.evals) == (other.train, other.evals)  # not by the seed
        told = f"{len(trained)} prompts to train, {sum(sizes.values())} to evaluate"
        assert told in capsys.readouterr().out


# ==== 13 and 14. The embedded task, and settings ====
def test_the_embedded_task_has_its_classes_and_evaluates_the_middle_one(monkeypatch):
    monkeypatch.setattr(dppo, "warm_started", lambda tokenizer: tiny_model(vocab_size=259))
    task = dppo.load_task(Config(eval_prompts=300))
    other = dppo.load_task(Config(eval_prompts=0, seed=1))
    for size, low, high in dppo.SORTING.values():
        of_class = [e for e in task.train if low <= len(e["answer"]) <= high]
        assert len(of_class) == size
        assert all(sorted(e["prompt"]) == [*e["answer"], "="] for e in of_class)
        assert all(task.tokenizer.decode(e["prompt_ids"]) == e["prompt"] for e in of_class)
    [(name, evaluated)] = task.evals.items()
    assert name == "middle" and len(evaluated) == 300 and other.evals == {}
    assert not {e["prompt"] for e in evaluated} & {e["prompt"] for e in task.train}
    assert {len(e["answer"]) for e in evaluated} <= {9, 10, 11, 12}
    assert task.train == other.train


def test_first_runs_teach_the_same_model_and_later_ones_take_it(tmp_path, monkeypatch):
    def train_step(model, optimizer, sequences, A, shares, *_):
        model.lm_head.weight.data += sum(sequences[0].completion)
        assert 0 < optimizer.param_groups[0]["lr"] <= 2e-3
        assert torch.allclose(shares * torch.tensor([len(a) for _, a in sequences]), A / 64)
        assert all(a[:-1] == sorted(p[:-1]) for p, a in sequences if len(a) < 5)  # easy: right

    (tmp_path / "two" / "hub").mkdir(parents=True)  # as after other downloads
    monkeypatch.setattr(dppo, "train_step", mock.Mock(side_effect=train_step))
    monkeypatch.setattr(dppo, "tqdm", lambda steps, *_, **more: steps[::20])  # 20 of the 400
    tokenizer, models = transformers.ByT5Tokenizer(extra_ids=0), []
    for cache in ("one", "two", "two"):
        monkeypatch.setenv("TORCH_HOME", str(tmp_path / cache))
        models.append(dppo.warm_started(tokenizer))
        assert torch.equal(models[0].lm_head.weight, models[-1].lm_head.weight)
    assert dppo.train_step.call_count == 2 * 20  # and not a third time
    assert models[-1].config.eos_token_id == tokenizer.eos_token_id


OWN = "--model MODEL --dataset "
REFUSED = [("--objective ppo", "--objective ppo is not one of grpo, dr_grpo")]
REFUSED += [("--group 2", "unrecognized arguments: --group"), ("--group_size 1", "must be from 2")]
REFUSED += [("--method " + 999 * "o", "--method ooo"), ("--method json:loads", "is no subclass")]
REFUSED += [("--method test_dppo:Given", "--method test_dppo:Given is no subclass of Rule")]
REFUSED += [("--reward dppo:DPPO", "--reward dppo:DPPO is no function")]
REFUSED += [("--reward test_dppo:none", "none is not one of gsm8k, exact: .* no attribute 'none'")]
REFUSED += [("--reward mine.py:reward", "--reward mine.py:reward is not one of gsm8k, exact: ")]
REFUSED += [("--model x", "--model or --dataset is missing"), ("--history .", "checkpoint.pt")]
REFUSED += [("--output_dir .", "exists"), ("--resume none", "none/config.json")]
REFUSED += [("--resume MODEL", "keys are not used"), ("--steps 1 --epochs 1", "exclude each")]
REFUSED += [(OWN + "one.jsonl --eval_dataset one.jsonl", "0 prompts, 1 repeated or evaluated")]
REFUSED += [(OWN + "one.jsonl --prompt_column x", "0 prompts, 1 empty .*: set --prompt_column")]
REFUSED += [(OWN + "one.jsonl --reward dppo:exact --answer_column gold", "set --prompt_column")]
REFUSED += [(OWN + "one.jsonl --chat_template_kwargs {", "--chat_template_kwargs must be a JSON")]
REFUSED += [(OWN + "no/file.jsonl", "no/file.jsonl cannot be read: .*No such file")]
REFUSED += [(OWN + "latin.csv", "latin.csv cannot be read: .*'utf-8' codec")]
REFUSED += [("--model . --dataset one.jsonl", "[.] cannot be loaded")]  # in several lines


@pytest.mark.parametrize("arguments, message", REFUSED)
def test_what_is_bad_is_told_at_once(arguments, message, user, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_rows("one.jsonl", {"question": "1=", "answer": "1"})
    Path("latin.csv").write_text("question,answer\n1=,\xe9", encoding="latin-1")
    before = sorted(os.listdir())
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(dppo, "sorting_task", lambda config: tiny_task())
    monkeypatch.setattr(dppo, "warm_started", lambda tokenizer: tiny_model())
    with pytest.raises(SystemExit, match="2"):
        main(*arguments.replace("MODEL", user["model"]).split())
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, line) and len(line) < 480
    assert sorted(os.listdir()) == before


def test_settings_that_would_train_on_nonsense_are_refused_and_others_win_over_defaults(user):
    least = {"prompts_per_step", "group_size", "inner_epochs", "temperature", "max_grad_norm"}
    least |= {"max_completion_tokens", "eval_samples", "rollout_batch_size", "micro_batch_tokens"}
    for name, value in dataclasses.asdict(Config()).items():
        if isinstance(value, (int, float)):
            too_little, too_much = [0] * (name in least), [0.995] * name.endswith("prune_rate")
            for nonsense in [-1, math.nan, math.inf, *too_little, *too_much]:
                with pytest.raises(ValueError, match=f"^--{name} {nonsense} must"):
                    Config(**{name: nonsense})
    Config(**dict.fromkeys(least, 1) | {"group_size": 2})  # the least is accepted
    assert (Config().temperature, Config(temperature=1.0).temperature) == (0.7, 1.0)
    assert Config(**user).temperature == 1.0 and Config(**user, temperature=0.7).temperature == 0.7


# ==== 15. Runs ====
def test_an_evaluation_is_the_same_each_time_and_not_made_twice(monkeypatch, tmp_path):
    [evaluations] = spy(monkeypatch, "evaluate")
    run(tmp_path / "one", steps=5, eval_every=2, learning_rate=0.0)
    before = evaluations[0][1]
    kept = [record.items() >= before.items() for record in metrics(tmp_path / "one")]
    assert kept == [True, False, True, False, True, True]
    for folder, steps in (("one", 5), ("two", 0)):  # nothing is left to do, or to train
        run(tmp_path / folder, steps=steps, learning_rate=0.0)
    assert len(evaluations) == 4 + 1
    assert sorted(os.listdir(tmp_path / "two")) == ["config.json", "metrics.jsonl"]


def test_evaluations_average_over_prompts_and_show_some_completions(monkeypatch):
    [calls] = spy(monkeypatch, "sample")
    graded = iter([[1, 0, 0, 0], [1, 1, 0, None, 1, 0], [None] * 2])
    task = tiny_task(lambda prompts, **_: next(graded))
    task.evals = {"one": task.train[:2], "two": task.train[:3], "three": task.train[:1]}
    config = Config(eval_samples=2, rollout_batch_size=3, max_completion_tokens=2, seed=2**32)
    result = dppo.evaluate(task, config)
    ids = [example["prompt_ids"] for example in task.train[:3]]
    assert [call.prompts for call, _ in calls] == [[ids[q]] for q in (0, 1, 0, 1, 2, 0)]
    assert (result["accuracy of one"], result["accuracy of two"]) == (0.25, 0.6)  # of those given
    assert math.isnan(result["accuracy of three"]) and result["accuracy"] == pytest.approx(4 / 9)
    texts, answers, rewards = zip(*result["evaluation"][:5])
    assert rewards == (1, 0, 1, 0, 1) and answers[1] == task.train[1]["answer"]
    sequences, _ = calls[1][1]
    assert texts[1] == task.tokenizer.decode(sequences[0].completion)


def test_records_estimate_means_over_the_window_and_add_up_updates():
    task, rewards = tiny_task(), torch.tensor([[1, 0], [1, 1], [math.nan, math.nan]]).double()
    task.end_ids = [7, 12]
    completions = ([5, 6, 12], [12], [5, 6], [5, 12], [5] * 4, [5] * 5 + [7])
    step = SimpleNamespace(rewards=rewards, A=group_advantages(rewards), N=5, mean_length=2.5)
    step.sequences = [Sequence([2], ids) for ids in completions]
    step.w_q = torch.tensor([2.0, 1.0, 1.0]).double()
    step.weights = [torch.tensor([[0.0, 0.0], [1.0, 3.0], [0.0, 2.0]]), torch.ones(3, 2)]
    names = ("completions_trained", "tokens_trained", "updates_skipped", "updates_clipped")
    names += ("grad_norm", "packing_density", "kl", "clipped_fraction")
    updates = ([3, 8, 0, 1, 10.6, 0.5, 0.0, 0.0], [6, 18, 1, 0, 0.7, 1.0, 0.4, 0.1])
    step.updates = [dict(zip(names, values)) for values in updates]
    expected = dict(zip(names, [9, 26, 1, 1, 10.6, 0.75, 0.2, 0.05]))
    expected |= {"prompts_seen": 5, "prompts_rolled": 3, "reward": 2 / 3, "weight_max": 3}
    expected |= {"zero_variance_fraction": 1 / 3, "truncated_fraction": 2 / 8, "mean_length": 2.5}
    expected |= {"missing_fraction": 2 / 8, "completion_length": 11 / 4}
    assert dppo.record_of(step, task) == pytest.approx(expected)
    step.rewards *= math.nan
    assert math.isnan(dppo.record_of(step, task)["reward"])


def in_turn(*groups):
    """A reward with the values of a group, again and again, and at each call of the next group."""
    calls = itertools.cycle(groups)
    return lambda prompts, **_: (next(calls) * len(prompts))[: len(prompts)]


def test_the_last_line_says_what_went_wrong(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(dppo.tqdm, "set_description", mock.Mock())
    clipped, none = {"max_grad_norm": 1e-6}, [None, None, 1, 0, 1]  # for 40% of the completions
    for method, reward, more, told in (
        (OURS, in_turn([0.5]), {"steps": 12}, "0 updates; zero_variance_fraction 1.00"),
        (OURS, in_turn([1], [1, 0], [1]), clipped, "the norm was clipped in 100% of the updates"),
        (OURS, seldom_teaches, {"steps": 12, "max_grad_norm": 1e6}, "rollout_worth 1.[1-9]"),
        ("grpo", in_turn([1, 0]), clipped, "truncated_fraction 0.[1-9]"),
        ("grpo", in_turn(none, [*none, 1e99]), {"objective": "dr_grpo"}, "updates_skipped 0.50"),
        ("grpo", in_turn(none), {}, "missing_fraction 0.40"),
    ):
        out, task = tmp_path / told[:9] / method, tiny_task(reward, evals=5)
        task.train[0]["answer"] = Path("12")  # no JSON
        settings = {"steps": 6, "prompts_per_step": 5, "prompt_prune_rate": 0.9} | more
        run(out, task, method=method, **settings)
        last = capsys.readouterr().out.splitlines()[-1]
        assert re.search(told, last)
        for name, mean in re.findall(r"(\w+_\w+) (\d\.\d\d);", last):
            assert mean == f"{sum(recorded(out, name)) / settings['steps']:.2f}"
        assert ("the norm was clipped" in last) == ("the norm was clipped" in told)
        assert metrics(out)[0]["evaluation"][0][1] == "12" and torch.load(out / "checkpoint.pt")
    assert re.fullmatch(r"epoch \d\.\d, reward \S+", *dppo.tqdm.set_description.call_args.args)


class ChangedByLooks(dppo.ProportionalDPPO):
    def prompt_probabilities(self):
        self.memory["rewards"] *= 0.9
        self.memory["sum"] = self.memory.get("sum", 0.1) + self.memory["rewards"].numpy().sum()
        return super().prompt_probabilities()


SMALL = {"method": "test_dppo:ChangedByLooks", "objective": "dapo", "prompts_per_step": 4}
SMALL |= {"inner_epochs": 2, "learning_rate": 3e-2, "prompt_prune_rate": 0.9}


def assert_same_run(one, other):
    """The same weights bit for bit, and the same records."""
    saved, again = torch.load(one / "checkpoint.pt"), torch.load(other / "checkpoint.pt")
    assert all(map(torch.equal, saved["weights"], again["weights"]))
    assert all(map(torch.equal, saved["memory"].values(), again["memory"].values()))
    may_differ = {"rollout_seconds", "train_seconds"}
    for record, same in zip(metrics(one), metrics(other), strict=True):
        assert {name for name in record if record[name] != same.get(name)} <= may_differ


def test_a_run_of_some_epochs_with_history_in_two_parts_is_the_run_in_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first, one, two = Path("first"), Path("one"), Path("two")
    run(first, tiny_task(seldom_teaches), **SMALL, epochs=1)
    assert recorded(first, "step") == [1, 2, 3, 4]  # of 4 prompts each
    [steps] = spy(monkeypatch, "dppo_step")
    for module, name in ((torch, "load"), (transformers, "set_seed")):
        monkeypatch.setattr(module, name, mock.Mock(wraps=getattr(module, name)))
    for out, epochs in ((one, 4), (two, 1.5), (two, 4)):
        task = tiny_task(seldom_teaches, tiny_model(torch.bfloat16))
        run(out, task, **SMALL, history="first", beta=0.1, eval_every=3, epochs=epochs)
    options = torch.load.call_args.kwargs  # no code can run, and 7 GB are not read for a few MB
    assert options.get("weights_only", True) and options["mmap"]
    assert_same_run(one, two)
    start, *_, before, last = [record["candidates_so_far"] for record in metrics(two)]
    assert before - start < 4 * 16 <= last - start  # the first step after which they are over
    saved = transformers.AutoModelForCausalLM.from_pretrained(two / "model")
    assert torch.equal(saved.lm_head.weight, task.model.lm_head.weight)
    assert len(transformers.AutoTokenizer.from_pretrained(two / "model")) == 13
    # What is remembered prunes from the first step on, and no draw is made twice.
    last, (given, step) = metrics(first)[-1], steps[0]
    assert len(step.prompts) < step.N and given.mean_length == last["mean_length"]
    assert transformers.set_seed.mock_calls[1] == mock.call(last["candidates_so_far"])


def test_a_run_that_fails_goes_on_as_if_it_had_not(tmp_path):
    # What fails, at which of its calls; the step that is saved. In step 2, there is no update.
    failures = [("dppo.evaluate", 1, None), ("dppo.record_of", 1, None), ("dppo.evaluate", 4, 6)]
    failures += [("dppo.train_step", 7, 3), ("dppo.train_step", 8, 2), ("dppo.record_of", 2, 1)]
    failures += [("torch.optim.adam.adam", 7, 4), ("dppo.prune_completions", 5, 2)]
    settings = SMALL | {"steps": 6, "eval_every": 2, "save_every": 2}
    run(tmp_path / "one", **settings)
    for name, call, step in failures:
        out, results = tmp_path / f"{name} {call}", [mock.DEFAULT] * (call - 1)
        results.append(KeyboardInterrupt)  # or anything else
        failing = mock.Mock(wraps=pkgutil.resolve_name(name), side_effect=results)
        with mock.patch(name, failing), pytest.raises(KeyboardInterrupt):
            run(out, **settings)
        saved = out / "checkpoint.pt"
        assert saved.exists() == (step is not None)  # else, a run begins anew in its folder
        assert not saved.exists() or torch.load(saved)["records"][-1]["step"] == step
        run(out, **settings, resume=str(out))
        assert_same_run(tmp_path / "one", out)


def test_what_is_refused_or_fails_for_want_of_space_leaves_the_last_checkpoint(tmp_path):
    def refuses(message, folder=tmp_path / "one", task=None, **settings):
        with pytest.raises(ValueError, match=message):
            run(folder, task, **settings)

    def save(values, file):
        file.write(b"half of it")
        error = RuntimeError("unexpected pos")  # this is how torch tells it
        error.__context__ = OSError(28, "No space left on device")
        raise error

    out = tmp_path / "one"
    run(out, steps=2)
    before = [path.read_bytes() for path in sorted(out.glob("*.*"))]
    history = {"reward": "json:loads", "objective": "dapo", "method": "grpo", "group_size": 8}
    for name, value in (history | {"temperature": 0.1, "seed": 1}).items():
        refuses(f"was made with {name} = ", **{name: value})
    for name, value in history.items():
        refuses(f"was made with {name} = ", out / "new", history=str(out), **{name: value})
    others = [tiny_task(prompts=17), tiny_task(), tiny_task()]
    others[1].train.reverse()  # sorted anew
    others[2].train[0]["answer"] = "0"
    for task in others:
        refuses("prompts", task=task)
        refuses("prompts", out / "new", task, history=str(out))
    assert [path.read_bytes() for path in sorted(out.glob("*.*"))] == before
    with mock.patch.object(torch, "save", save):
        refuses("checkpoint.pt: .*No space left", steps=4)
    assert (out / "checkpoint.pt").read_bytes() == before[0]
    assert len(os.listdir(out)) == 4  # and no half of a file
    new = {"micro_batch_tokens": 100, "rollout_batch_size": 8, "save_every": 1, "eval_every": 1}
    run(out, steps=4, **new)
    assert json.loads((out / "config.json").read_text()).items() > new.items()  # from now on
    (out / "checkpoint.pt").unlink()  # what is left must not be overwritten
    refuses("checkpoint.pt", resume=str(out))


def test_ctrl_c_or_sigterm_loses_no_whole_step(monkeypatch, capsys, tmp_path):
    def interrupted(real, number, at, *inputs, **columns):
        if next(at) == 0:
            os.chdir("/")  # paths are absolute from the start
            signal.raise_signal(number)
        return real(*inputs, **columns)

    monkeypatch.chdir(tmp_path)
    reward = partial(interrupted, lengths_reward, signal.SIGTERM, itertools.count(-6))  # in step 6
    monkeypatch.setattr(dppo, "load_task", lambda config: tiny_task(reward))
    with pytest.raises(SystemExit, match="130"):
        main("--steps=9", "--prompts_per_step=4", "--inner_epochs=2", "--output_dir=one")
    out, shown = tmp_path / "one", capsys.readouterr()
    assert f"--resume='{out}'" in shown.out and "|" not in shown.err  # no bar without a terminal
    assert recorded(out, "step") == [1, 2, 3, 4, 5] and (out / "model").exists()
    for module, name, call in ((dppo, "train_step", -1), (torch, "save", 0)):  # both are ended
        real, at = getattr(module, name), itertools.count(call)
        monkeypatch.setattr(module, name, partial(interrupted, real, signal.SIGINT, at))
    with pytest.raises(SystemExit, match="130"):
        main("--epochs=4", f"--resume={out}")
    assert torch.load(out / "checkpoint.pt")["records"][-1]["step"] == 6
    main("--epochs=4", f"--resume={out}")  # in place of steps
    last = torch.load(out / "checkpoint.pt")["records"][-1]
    assert last["candidates_so_far"] >= 4 * 16 and last["step"] == recorded(out, "step")[-1] > 9


def test_a_fork_s_errors_keep_their_traceback_or_are_told_in_a_line(user, monkeypatch, capsys):
    own = ["--model", user["model"], "--dataset", user["dataset"], "--max_completion_tokens=8"]
    with pytest.raises(TypeError, match="positional argument: 's'"):
        main(*own, "--reward=json:loads")
    monkeypatch.setattr(dppo, "sample", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(SystemExit, match="lower --micro_batch_tokens"):
        main(*own)
    fork = "import dppo, __main__\ndef reward(**_): raise dppo.Refused(f'{dppo is __main__}!')"
    Path(user["model"], "mine.py").write_text(fork)
    monkeypatch.chdir(user["model"])
    monkeypatch.setitem(sys.modules, "dppo", dppo)  # what it is after the test, too
    monkeypatch.setattr(dppo, "main", lambda: runpy.run_path(dppo.__file__, run_name="__main__"))
    with pytest.raises(SystemExit, match="2"):
        main(*own, "--reward=mine:reward")
    assert "True!" in capsys.readouterr().err


@pytest.fixture(scope="session", autouse=True)
def plain_command(request, tmp_path_factory):
    """The plain command in a folder of its own, beside the other tests, as it takes as long."""
    is_wanted = any("slow" in test.name for test in request.session.items)
    arguments = [dppo.__file__, "--steps=40", "--eval_prompts=128"] if is_wanted else ["--version"]
    folder = tmp_path_factory.mktemp("plain")
    environment = os.environ | {"TORCH_HOME": str(folder), "TQDM_DISABLE": "1"}
    options = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *arguments], **options) as process:
        yield process
        process.kill()


def test_slow_the_plain_command_raises_the_middle_class_and_writes_every_file(plain_command):
    told, _ = plain_command.communicate()
    printed = re.findall(r"^step (\d+): accuracy of middle 0\.\d\d$", told, re.MULTILINE)
    assert printed == ["0", "10", "20", "30", "40"]
    out = Path(re.search("results are in (.*)", told)[1])
    assert out.name.endswith(f"-{plain_command.pid}")  # or runs of the same second would meet
    accuracies = [record["accuracy"] for record in metrics(out)[::10]]
    assert accuracies[-1] > accuracies[0] + 0.12
    assert sorted(os.listdir(out)) == ["checkpoint.pt", "config.json", "metrics.jsonl", "model"]
    assert sum(recorded(out, "prompts_rolled")) < 0.8 * sum(recorded(out, "prompts_seen"))
