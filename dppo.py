"""Dynamic Pruning Policy Optimization (DPPO) in one file: GRPO with unbiased pruning.

After "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" (Zhu et al., 2026,
arXiv 2603.04135), of which we had the abstract and reviews that quote it, not the text. This is
neither Diffusion Policy Policy Optimization nor Divergence PPO, which TRL calls `dppo`.

GRPO answers each prompt several times and learns from the differences; a group that is all right or
all wrong teaches nothing. DPPO prunes, at random, prompts and completions that teach little, and
divides the loss of what it keeps by the probability of having been kept, so the expected gradient
stays GRPO's. What is left is packed, and a step makes no more rollouts than equal noise takes.

    python dppo.py  # a small embedded model, offline, in two minutes
    python dppo.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k:main:train

Part I is the method; `dppo_step` is the paper's algorithm. Where our sources are silent or
disagree, our reading is in keep_probabilities, DPPO, prune_prompts, normalizer and dppo_step. Fewer
rollouts at equal noise (Means) and the last rule are ours. Part II is the plumbing.

    q, i, t   a prompt; a completion; a token of the completion
    N         number of candidate prompts of a step, its window
    B         number of prompts of the window that are kept and rolled out
    G         number of completions of a prompt, its group
    A         advantage of a completion
    P, pi     probability of being pruned, of being kept: pi = 1 - P
    w         1/pi where kept, 0 where pruned: w_q of a prompt, w_qi of a completion, w = w_q w_qi
    rho       probability of a token under the new policy over that under the old one
    beta      weight of the KL term
    l         loss of a completion: the sum of its tokens' losses, divided by Z (normalizer)
    L, L_hat  the mean of l over the N G candidates; that of w l, which estimates it
"""

import copy
import glob
import json
import math
import os
import pkgutil
import random
import re
import signal
import sys
import time
import warnings
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import datasets
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# ======== Part I: the method ========


# ---- 1. Pruning
def group_advantages(rewards, scale_by_std=True):
    """(B, G) rewards -> (B, G) float64 A = (reward - mean)/(std + 1e-4), or reward - mean. Mean and
    std (divisor n - 1) are of all n rewards that were given: to centre A again after pruning would
    bias the gradient. A is exactly 0 if all given are equal, and for a reward that is missing."""
    rewards = rewards.double()
    given = ~rewards.isnan()
    advantages = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale_by_std:
        squares = advantages.square().nansum(dim=1, keepdim=True)
        std = (squares / (given.sum(dim=1, keepdim=True) - 1)).sqrt()
        advantages = advantages / (std + 1e-4)
    lowest, highest = rewards.nanquantile(rewards.new_tensor([0, 1]), dim=1, keepdim=True)
    return advantages.masked_fill((lowest == highest) | ~given, 0.0)


def has_gradient(advantages, beta):
    """(B, G) bool: False where A = 0 and there is no KL, so that loss and gradient are 0."""
    return (advantages != 0) | (beta > 0)


def keep_probabilities(scores, rate):
    """The paper's rule, as we read it: scores >= 0 -> float64 keep probabilities pi.

    Each of the k items that score below the mean has pi = 1 - floor(rate k)/k, so that a draw over
    all prunes floor(rate k) of them. The others, and those without a score (NaN), have pi = 1.

    The paper's Algorithm 1 reportedly removes the lowest scores outright: pi = 0 where the gradient
    is not 0, against its own proof. Here as many go, but at random among the low ones."""
    scores = scores.double()
    low = scores < scores.nanmean() * (1 - 1e-6)  # 1e-6: rounding; a NaN is never low
    k = int(low.sum())
    pruned = math.floor(rate * k + 1e-9)  # 0.29 * 100 is 28.999999999999996
    return torch.ones_like(scores).masked_fill(low, (k - pruned) / max(1, k))


def draw(pi, generator):
    """(n,) keep probabilities -> (n,) float64 weights: 1/pi where kept, 0 where pruned. Where
    pi > 0, a weight has the expectation pi (1/pi) + (1 - pi) 0 = 1.

    In systematic sampling, items are laid end to end in random order, each as long as its pi, and
    kept where one of the teeth u, u + 1, u + 2, ... of a comb falls on them, for one u uniform in
    [0, 1). With pi of 0.5, 1, 0.25, 0.25 in this order, u = 0.6 keeps the 2nd and 3rd."""
    order = torch.randperm(len(pi), generator=generator)
    ends = pi[order].cumsum(0)
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    teeth_before_end = (ends - u).ceil()  # teeth in [0, end); in the example 0, 1, 2, 2
    kept = order[teeth_before_end.diff(prepend=torch.zeros(1)) > 0]
    return torch.zeros_like(pi).scatter(0, kept, 1 / pi[kept])


class Rule:
    """What is kept, and with which probability. This one keeps everything, as textbook GRPO does.

    Write your own as a subclass. The gradient is unbiased if pi is known before the draw: a
    prompt's pi may depend only on memory, a completion's also on the rollout and on the prompts
    that were kept. A prompt needs pi > 0, and so does a completion that has a gradient."""

    unbiased = True  # False: all that is kept weighs the same
    remembers = {}  # {name: initial value}, one number per prompt

    def __init__(self, config, prompt_count):
        self.config = config
        self.prompt_count = prompt_count
        zeros = torch.zeros(prompt_count, dtype=torch.float64)
        self.memory = {name: zeros + value for name, value in self.remembers.items()}  # of tensors

    def prompt_probabilities(self):
        """(all prompts,) float64 pi of each prompt, from memory alone."""
        return torch.ones(self.prompt_count, dtype=torch.float64)

    def completion_probabilities(self, advantages, prompt_weights):
        """(B, G) advantages, (B,) weights of their prompts -> (B, G) float64 pi."""
        return torch.ones_like(advantages)

    def remember(self, prompts, rewards, advantages):
        """Takes a rollout into memory: (B,) prompts, (B, G) rewards, (B, G) advantages."""


class GRPOSkip(Rule):
    """GRPO that skips completions without a gradient, which adds no bias and no variance."""

    def completion_probabilities(self, advantages, prompt_weights):
        return has_gradient(advantages, self.config.beta).double()


class DPPO(Rule):
    """The paper's rule. A completion's score is |A|, and low means below the mean |A| of those that
    have a gradient (without one, all go). A prompt's score is the mean |A| of its group at its last
    visit, and low means below the mean over all prompts that have a score."""

    remembers = {"score": math.nan}

    def prompt_probabilities(self):
        return keep_probabilities(self.memory["score"], self.config.prompt_prune_rate)

    def completion_probabilities(self, advantages, prompt_weights):
        trainable = has_gradient(advantages, self.config.beta)
        scores = advantages.abs().masked_fill(~trainable, math.nan)  # (B, G)
        return trainable * keep_probabilities(scores, self.config.completion_prune_rate)

    def remember(self, prompts, rewards, advantages):
        for q, A in zip(prompts, advantages):  # of two visits, the later counts
            self.memory["score"][q] = A.abs().mean()


def check_probabilities(rule, pi, needed):
    """Refuses what is no probability and, if the rule is unbiased, pi = 0 where `needed`."""
    valid = pi.shape == needed.shape and ((pi >= 0) & (pi <= 1 + 1e-9)).all()  # NaN fails
    if not valid or (rule.unbiased and (pi[needed] == 0).any()):
        raise Refused(f"a rule needs pi of shape {tuple(needed.shape)}, 0 < pi <= 1 for a gradient")


def prune_prompts(rule, upcoming, limit, generator):
    """Prompt-level pruning, before the rollout: (n,) upcoming prompts, by index -> N, how many of
    them are the window; (B,) the prompts that are kept; (B,) their weights.

    The window is the longest prefix of `upcoming` whose pi sum to at most `limit`. From it the draw
    keeps sum(pi) prompts, rounded down or up, so B is `limit` or one less, if `upcoming` lasts.
    Drawing until enough prompts survive would make N depend on the draw, and bias the gradient."""
    pi = rule.prompt_probabilities().double()  # (all prompts,)
    check_probabilities(rule, pi, needed=torch.ones(rule.prompt_count).bool())
    pi = pi[upcoming]  # (n,)
    N = int((pi.cumsum(0) <= limit + 1e-9).sum())
    pi = pi[:N]  # (N,)
    if not pi.any():
        raise Refused("a rule needs pi > 0 for at least one of the upcoming prompts")
    pi = pi / pi.sum().clamp(max=1)  # with less than 1, a draw might keep none
    weights = draw(pi, generator)
    return N, upcoming[:N][weights > 0], weights[weights > 0]


def prune_completions(rule, advantages, prompt_weights, generator):
    """Completion-level pruning, after the rollout: (B, G) advantages, (B,) w_q -> (B, G) w_qi."""
    pi = rule.completion_probabilities(advantages, prompt_weights).double()  # (B, G)
    check_probabilities(rule, pi, needed=has_gradient(advantages, rule.config.beta))
    return draw(pi.flatten(), generator).view_as(pi)


# ---- 2. Dense Prompt Packing
class Sequence(NamedTuple):
    prompt: list  # of token ids
    completion: list  # likewise, with the end id unless it was cut


def pack(lengths, capacity, lookahead=64):
    """The paper's window-based greedy packing: lengths in tokens, from 1 to `capacity` -> slots,
    lists of indices whose lengths sum to at most `capacity`. Of the next `lookahead` sequences,
    the longest that fits goes into the open slot. When none fits, the next slot is opened."""
    coming = iter(range(len(lengths)))
    waiting = list(islice(coming, lookahead))
    slots = []
    room = 0
    while waiting:
        fitting = [i for i in waiting if lengths[i] <= room]
        if not fitting:
            slots.append([])
            room = capacity
            fitting = waiting  # the slot is empty
        longest = max(fitting, key=lambda i: lengths[i])  # the first of several
        slots[-1].append(longest)
        room -= lengths[longest]
        waiting.remove(longest)
        waiting.extend(islice(coming, 1))  # the next one, if there is one
    return slots


def pack_micro_batches(sequences, indices, config):
    """The sequences at `indices` -> micro-batches, lists of slots of indices; how full slots are.
    A slot has the longest's length, as attention costs its square, but at least 128 tokens."""
    lengths = [len(sequences[i].prompt) + len(sequences[i].completion) for i in indices]
    capacity = max([128, *lengths])
    slots = []
    for slot in pack(lengths, capacity):
        slots.append([indices[place] for place in slot])
    slots_at_once = max(1, config.micro_batch_tokens // capacity)
    starts = range(0, len(slots), slots_at_once)
    micro_batches = [slots[start : start + slots_at_once] for start in starts]
    return micro_batches, sum(lengths) / max(1, capacity * len(slots))


def lay_out(sequences, slots):
    """The sequences of some slots -> (slots, length, 3): the token id, the position id, and the
    index of the sequence if the next token is of its completion, otherwise -1. As position ids
    restart at 0 with every sequence, transformers' sdpa, given no mask, keeps these apart."""
    tables = []
    for slot in slots:
        rows = []
        for i in slot:
            prompt, completion = sequences[i]
            # The last token of the prompt predicts the first of the completion.
            owners = [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
            rows += zip(prompt + completion, count(), owners)
        tables.append(torch.tensor(rows))
    table = pad_sequence(tables, batch_first=True, padding_value=-1)
    padding = -table.shape[1] % 8  # matrix products are fast at multiples of 8
    return torch.nn.functional.pad(table, (0, 0, 0, padding), value=-1)


# ---- 3. Forward pass, loss and update
def token_logprobs(head, hidden, targets, temperature):
    """(n, width) hidden states, (n,) ids of the next tokens -> (n,) log-probabilities of these
    tokens, (n,) entropies of the distributions that they come from."""
    logprobs = head(hidden).float().div_(temperature).log_softmax(dim=-1)
    of_targets = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    entropies = torch.special.entr(logprobs.detach().exp()).sum(dim=-1)
    return of_targets, entropies


def completion_logprobs(model, sequences, slots, temperature):
    """The forward pass over packed slots -> (tokens,) log-probabilities of their completions,
    (tokens,) entropies, and (tokens,) the index of each token's sequence."""
    table = lay_out(sequences, slots).to(model.device)
    input_ids, position_ids = table[:, :, :2].clamp(min=0).unbind(dim=2)
    predicts = table[:, :, 2] >= 0  # (slots, length)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    hidden = output.last_hidden_state[predicts]  # (tokens, width)
    targets = input_ids.roll(-1, dims=1)[predicts]  # (tokens,)
    # Logits of 8,192 tokens are 5 GB: they are made 512 at a time, and again by the backward pass.
    piece = partial(checkpoint, token_logprobs, head, temperature=temperature, use_reentrant=False)
    parts = map(piece, hidden.split(512), targets.split(512))
    logprobs, entropies = map(torch.cat, zip(*parts))
    return logprobs, entropies, table[predicts, 2]


@torch.no_grad()
def frozen_logprobs(model, sequences, indices, config):
    """{index: (length,) log-probabilities} of the completions at `indices`."""
    result = {}
    for slots in pack_micro_batches(sequences, indices, config)[0]:
        logprobs, _, owner = completion_logprobs(model, sequences, slots, config.temperature)
        result |= {i: logprobs[owner == i] for i in chain(*slots)}
    return result


# How far rho may fall below 1, and rise above it, before it is clipped.
CLIPPING = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


def token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config):
    """(tokens,) the new, old and reference log-probabilities, (tokens,) the index of each token's
    completion, and A by that index -> (tokens,) each: loss; whether clipped; KL.

        loss = -min(rho A, clip(rho, 1 - down, 1 + up) A) + beta KL

    In gspo, all tokens of a completion have the same rho, exp of the mean log-ratio."""
    log_ratio = logprobs - old_logprobs
    if config.objective == "gspo":
        means = torch.zeros_like(A).scatter_reduce(0, owner, log_ratio, "mean", include_self=False)
        log_ratio = means[owner]
    rho = log_ratio.exp()
    A = A[owner]  # (tokens,)
    down, up = CLIPPING[config.objective]
    surrogate = torch.min(rho * A, rho.clamp(1 - down, 1 + up) * A)
    clipped = surrogate < rho * A
    log_ref_ratio = ref_logprobs - logprobs
    kl = log_ref_ratio.exp() - 1 - log_ref_ratio  # k3: x - 1 - log x, x = p_ref/p
    return config.beta * kl - surrogate, clipped, kl.detach()


def train_step(model, optimizer, sequences, advantages, shares, old, ref, config):
    """One update on the completions that have a share of the loss -> metrics. Even an unbiased
    gradient does not give an unbiased update, as Adam and clipping the norm are not linear.

    advantages, shares: A and w/(N G Z) of each sequence; old, ref: from frozen_logprobs, or None.
    Without `old`, the policy is the one that sampled: rho = 1, its gradient that of log p."""
    kept = shares.flatten().nonzero().squeeze(1).tolist()
    A = advantages.flatten().float().to(model.device)
    share = shares.flatten().float().to(model.device)
    micro_batches, density = pack_micro_batches(sequences, kept, config)
    sums = torch.zeros(3, device=model.device)  # of entropies, clipped tokens, KL
    for slots in micro_batches:
        batch = list(chain(*slots))
        logprobs, entropy, owner = completion_logprobs(model, sequences, slots, config.temperature)
        old_logprobs = torch.cat([old[i] for i in batch]) if old else logprobs.detach()
        ref_logprobs = torch.cat([ref[i] for i in batch]) if ref else logprobs.detach()
        losses, clipped, kl = token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config)
        loss = share[owner] @ losses
        loss.backward()  # adds up over the micro-batches
        sums += torch.stack([entropy.sum(), clipped.sum(), kl.sum()])

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
    if 0 < grad_norm < math.inf:  # at 0, Adam would move on its momentum; NaN would spread
        optimizer.step()
    model.zero_grad()
    tokens = sum(len(sequences[i].completion) for i in kept)
    metrics = {"completions_trained": len(kept), "tokens_trained": tokens, "slot_density": density}
    entropy, clip, kl = (sums / max(1, tokens)).tolist()
    return metrics | {"grad_norm": grad_norm, "entropy": entropy, "clip_fraction": clip, "kl": kl}


# ---- 4. The step: the paper's algorithm
class Means(NamedTuple):
    """Running means over earlier steps, so known before a draw; 0 before the first. With g_q the
    gradient of a group, the noise of a step is, without cross terms, sum |g_q|^2/(pi_q N^2) over
    its window, estimated as sum (w_q |g_q|/N)^2 over the B prompts that are kept. Unpruned, B
    prompts have mean |g_q|^2/B; this over the noise is what a rollout is worth: at 2, half as many
    have about the same noise. A^2 stands in for |g|^2, and w for w_q if completions are pruned."""

    length: float = 0.0  # of a completion
    unpruned: float = 0.0  # noise of a step times its B, had nothing been pruned
    prompts_pruned: float = 0.0  # the same, with only prompts pruned; for the record
    pruned: float = 0.0  # the same, as it was, with both levels pruned

    def worth(self, noise):
        """What a rollout is worth with this noise times B; 1 if it is unknown."""
        return self.unpruned / noise if noise > 0 else 1.0

    def after(self, N, w_q, w, A, lengths):
        """The means after a step with (B,) w_q, (B, G) w, A and lengths. Worth starts at 1."""
        length = (w_q @ lengths.mean(dim=1) / w_q.sum()).item()
        length = 0.9 * (self.length or length) + 0.1 * length
        if not A.any():  # the step says nothing about noise
            return self._replace(length=length)
        w_q, B = w_q[:, None], len(A)
        weights = (w_q, B / N * w_q**2, B / N * w**2)
        noise = [(weight * A**2).mean(dim=1).sum().item() / N for weight in weights]
        means = [0.95 * (mean or noise[0]) + 0.05 * new for mean, new in zip(self[1:], noise)]
        return Means(length, *means)


def normalizer(lengths, mean_length, config):
    """(B, G) lengths -> (B, G) Z: the length for grpo and gspo, otherwise a constant. dapo divides
    by the number of all tokens, N G times the mean length, which is unknown where prompts are
    pruned. The mean of *earlier* steps, fixed before the draw, takes its place. A first step takes
    its own, which is exact as long as it prunes no prompt."""
    constants = {"dr_grpo": config.max_completion_tokens, "dapo": mean_length or lengths.mean()}
    return torch.zeros_like(lengths) + constants.get(config.objective, lengths)


def dppo_step(task, rule, optimizer, reference, upcoming, means, generator, config):
    """One step of the paper's algorithm -> what happened in it, for the record.

    reference: the model that KL is measured against; upcoming: the next prompts in order, as many
    as there are training examples; means: of earlier steps; generator: for the draws alone.

    Memory, limit and N are fixed before the draw, so w_q has mean 1; given that draw and the
    rollouts, so has w_qi, wherever l has a gradient. As a rollout is independent of its draw, the
    gradients of L_hat and L have the same mean. The paper averages over what it keeps and rescales
    by C/(1 - P). If C is kept/total, as we read it, this is the same (Horvitz-Thompson):

        (1/kept) C/(1 - P) = (1/kept) (kept/total)/pi = 1/(total pi) = w/(N G)"""
    G = config.group_size

    # 1. Prune prompts by what is remembered of them. Ours: keep just enough for the noise of
    #    prompts_per_step unpruned prompts, but never more than these.
    limit = max(1, round(config.prompts_per_step / max(1, means.worth(means.pruned))))
    N, prompts, w_q = prune_prompts(rule, upcoming, limit, generator)

    # 2. Roll out the prompts that are kept. Completion i of the q-th of them is sequences[q G + i].
    examples = [task.train[q] for q in prompts.tolist()]
    sequences, rewards, seconds = rollout(task, examples, G, config)  # B G; (B, G)
    A = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")  # (B, G)
    lengths = A.new_tensor([len(sequence.completion) for sequence in sequences]).view_as(A)
    Z = normalizer(lengths, means.length, config)

    # 3. Prune completions, anew for every update, since the policy depends on earlier draws.
    #    (Prompts are drawn once, so in later updates only this draw is unbiased.)
    weights = []  # (B, G) for each update
    for _ in range(config.inner_epochs):
        w = w_q[:, None] * prune_completions(rule, A, w_q, generator)
        if not rule.unbiased:  # L_hat is the plain mean of what is kept: share = 1/(kept Z)
            w = (w > 0) * (N * G / (w > 0).sum().clamp(min=1))
        weights.append(w)

    # 4. Remember what prompts taught, lengths and, if the rule is unbiased, the noise.
    rule.remember(prompts, rewards, A)
    means = means.after(N, w_q, weights[0], A * rule.unbiased, lengths)

    # 5. Log-probabilities under the reference and, for later updates, the old policy.
    trained = torch.stack(weights).any(dim=0).flatten().nonzero().squeeze(1).tolist()
    ref = frozen_logprobs(reference, sequences, trained, config) if config.beta > 0 else None
    later = torch.stack(weights)[1:].any(dim=0).flatten().nonzero().squeeze(1).tolist()
    old = frozen_logprobs(task.model, sequences, later, config)

    # 6. Pack what is kept, and update. The first update trains the policy that sampled.
    updates = []
    for w in weights:
        inputs = (sequences, A, w / (N * G * Z), old if updates else None, ref, config)
        updates.append(train_step(task.model, optimizer, *inputs))
    step = {"N": N, "w_q": w_q, "w": weights[0], "sequences": sequences, "lengths": lengths}
    step |= {"rewards": rewards, "A": A, "means": means, "updates": updates}
    return SimpleNamespace(**step, rollout_seconds=seconds)


# ---- 5. Beyond the paper: keep in proportion to the score
def proportional_probabilities(scores, rate, floor=0.0):
    """Scores >= 0 of any shape -> float64 pi = min(1, c score), at least `floor`, and 1 where there
    is no score (NaN). They sum to what keep_probabilities' do, or more if `floor` is that high.
    Without a floor, scores of 0 have pi = 0 and do not count; with one, they are tiny scores.

    With independent draws, pruning adds the variance sum (1/pi - 1) |g|^2 to the gradient. At given
    sum(pi), this is least for pi proportional to the norm |g| (Neyman allocation)."""
    scores = scores.double().clamp(min=1e-100 if floor > 0 else 0.0)  # NaN stays
    keep = keep_probabilities(scores[scores != 0], rate).sum().round()
    scores = scores.nan_to_num(math.inf)
    low, high = 1e-150, 1e150
    for _ in range(50):  # bisection of the logarithm of c
        c = math.sqrt(low * high)
        if (c * scores).clamp(floor, 1).sum() < keep:
            low = c
        else:
            high = c
    return (high * scores).clamp(floor, 1)  # sums to `keep`, unless `floor` is higher


class ProportionalDPPO(Rule):
    """A completion's score is |A| times its prompt's weight, which is how strongly it counts. A
    prompt's is the root mean square of A to expect of its next group, learned in bins: prompts
    whose smoothed success rate p has a similar spread 2 sqrt(p (1 - p)) share one. Its score is the
    root mean A^2 of repeat visits. (As all of a bin have the same pi, it needs no weights.)"""

    remembers = {"right": 0.0, "wrong": 0.0}  # decayed sums of rewards, of 1 - rewards
    prior = 0.05  # successes, and failures, before any visit
    decay = 0.8  # memory, times this at each visit, as the policy changes
    bins = 9
    forget = 0.998  # what bins have learned, times this at each step
    floor = 0.07  # of pi where a gradient is unlikely but possible: 1/pi is at most 15

    def __init__(self, config, prompt_count):
        super().__init__(config, prompt_count)
        middles = (torch.arange(self.bins).double() + 0.5) / self.bins
        self.memory["visits"] = torch.full_like(middles, 4)  # a guess worth four
        self.memory["squares"] = 4 * (0.1 + 0.9 * middles**2)  # sum of the visits' mean A^2

    def bin_of_prompts(self):
        """(all prompts,) the bin of each, -1 where it was never visited."""
        right, wrong = self.memory["right"], self.memory["wrong"]
        p = (self.prior + right) / (2 * self.prior + right + wrong)
        place = (2 * (p * (1 - p)).sqrt() * self.bins).long().clamp(max=self.bins - 1)
        return place.masked_fill(right + wrong == 0, -1)

    def prompt_probabilities(self):
        place = self.bin_of_prompts()
        scores = (self.memory["squares"] / self.memory["visits"]).sqrt()[place]
        scores[place < 0] = math.nan
        return proportional_probabilities(scores, self.config.prompt_prune_rate, self.floor)

    def completion_probabilities(self, advantages, prompt_weights):
        scores = advantages.abs() * prompt_weights[:, None]  # (B, G)
        floor = self.floor if self.config.beta > 0 else 0.0  # A = 0 has a gradient then
        return proportional_probabilities(scores, self.config.completion_prune_rate, floor)

    def remember(self, prompts, rewards, advantages):
        memory, place = self.memory, self.bin_of_prompts()
        memory["visits"] *= self.forget
        memory["squares"] *= self.forget
        for q, group, A in zip(prompts, rewards.clamp(0, 1), advantages):
            if place[q] >= 0 and not group.isnan().all():
                memory["visits"][place[q]] += 1
                memory["squares"][place[q]] += A.square().mean()
            right = len(group) * group.nanmean().nan_to_num()  # all wrong without a reward
            memory["right"][q] = self.decay * memory["right"][q] + right
            memory["wrong"][q] = self.decay * memory["wrong"][q] + len(group) - right


RULES = {"grpo": Rule, "grpo-skip": GRPOSkip, "dppo": DPPO, "dppo-proportional": ProportionalDPPO}


# ======== Part II: the plumbing ========

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
# cuDNN's attention plans anew at every token, and may give NaN gradients (pytorch#196678).
torch.backends.cuda.enable_cudnn_sdp(False)


class Refused(ValueError):
    """Bad input, which the command line reports in one line."""


@contextmanager
def refusing(what):
    """Turns whatever is raised inside into Refused."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):  # main has advice on these
        raise
    except Exception as error:
        raise Refused(f"{what}: {error.__cause__ or error}") from error


# ---- 6. Order and precision
def next_prompts(seen, prompt_count, seed):
    """(prompt_count,) the prompts after `seen` candidates; each epoch has its own order."""
    epoch, start = divmod(seen, prompt_count)
    order = []
    for number in (epoch, epoch + 1):
        order += random.Random(f"{seed}, {number}").sample(range(prompt_count), prompt_count)
    return torch.tensor(order[start : start + prompt_count])


class MasterAdam(torch.optim.Adam):
    """Adam in float32. At a learning rate of 1e-6, updates of bfloat16 weights would be rounded
    away, so Adam updates a float32 master of each weight, which is then rounded to the weight."""

    def __init__(self, model, learning_rate):
        self.updates = 0  # so far
        self.weights = list(model.parameters())
        for weight in self.weights:
            weight.grad = None  # a step that was interrupted may have left one
            weight.grad_dtype = torch.float32
        self.masters = [weight.detach().float() for weight in self.weights]
        super().__init__(self.masters, lr=learning_rate, betas=(0.9, 0.99), fused=True)

    @torch.no_grad()
    def step(self):
        self.updates += 1  # first, since an update may fail halfway
        for weight, master in zip(self.weights, self.masters):
            master.grad = weight.grad
        super().step()
        for weight, master in zip(self.weights, self.masters):
            weight.copy_(master)
            master.grad = None  # or it would outlive model.zero_grad()


# ---- 7. Rollout
@torch.inference_mode()
def decode(model, input_ids, generation_config, samples, temperature, end_ids, **inputs):
    """(prompts, tokens) ids -> (prompts * samples, limit) ids of the completions, -1 after their
    end; their log-probabilities. `model.generate` runs this loop in place of its own, to sample
    from softmax(logits/temperature), as is trained, without the model's top_k or the like."""
    cache_name = "cache" if "cache" in inputs else "past_key_values"  # the latter until 5.23
    new, cache, mask = input_ids, inputs[cache_name], inputs["attention_mask"]
    mask = torch.ones_like(new) if mask is None else mask  # None: no padding
    rows = torch.arange(len(mask) * samples, device=mask.device)  # those that have not ended
    tokens = mask.new_full((len(rows), generation_config.max_new_tokens), -1)
    logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    for t in range(tokens.shape[1]):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
        state = {"attention_mask": mask, "position_ids": positions, cache_name: cache}
        logits = model(new, **state, logits_to_keep=1).logits[:, -1].float() / temperature
        if t == 0:  # the prompts have been read
            cache.batch_repeat_interleave(samples)
            logits = logits.repeat_interleave(samples, dim=0)
            mask = mask.repeat_interleave(samples, dim=0)
        distribution = logits.log_softmax(dim=-1)
        new = distribution.exp().multinomial(1)  # (rows, 1)
        tokens[rows, t] = new.squeeze(1)
        logprobs[rows, t] = distribution.gather(1, new).squeeze(1)
        live = (~torch.isin(new.squeeze(1), end_ids)).nonzero().squeeze(1)
        if len(live) == 0:
            break
        if len(live) < len(rows):
            cache.batch_select_indices(live)
            rows, new, mask = rows[live], new[live], mask[live]
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    return tokens, logprobs


def sample(task, prompts, samples, config):
    """Lists of prompt ids -> `samples` sequences of each; (tokens,) their log-probabilities."""
    ids = [torch.tensor(prompt, device=task.model.device) for prompt in prompts]
    ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")
    settings = {"custom_generate": decode, "samples": samples, "temperature": config.temperature}
    settings |= {"end_ids": ids.new_tensor(task.end_ids), "attention_mask": (ids >= 0).long()}
    settings |= {"max_new_tokens": config.max_completion_tokens, "cache_implementation": "dynamic"}
    settings |= {"do_sample": True, "use_cache": True, "num_beams": 1, "pad_token_id": 0}
    tokens, logprobs = task.model.generate(ids.clamp(min=0), **settings)
    rows = enumerate(tokens.cpu())
    sequences = [Sequence(prompts[i // samples], row[row >= 0].tolist()) for i, row in rows]
    return sequences, logprobs[tokens >= 0]


def rollout(task, examples, samples, config):
    """-> `samples` sequences of each example, in order; (examples, samples) rewards; seconds."""
    started_at = time.perf_counter()
    sequences = []
    size = max(1, config.rollout_batch_size // samples)
    for start in tqdm(range(0, len(examples), size), "rollout", leave=False, delay=5):
        prompts = [example["prompt_ids"] for example in examples[start : start + size]]
        sequences += sample(task, prompts, samples, config)[0]
    rewards = reward_completions(task, examples, sequences)
    return sequences, rewards, time.perf_counter() - started_at


@torch.no_grad()
def check_sampling(task, config):
    """Refuses a model whose trained policy is not the one that samples, as rho is taken to be 1.
    They must agree beside the longest possible sequence, too, which rescales RoPE in some."""
    model = task.model
    prompts = [example["prompt_ids"] for example in chain(task.train, *task.evals.values())]
    prompts.sort(key=len)
    longest = Sequence(prompts[-1], prompts[-1][:1] * config.max_completion_tokens)
    prompts = [prompts[0], prompts[0][len(prompts[0]) // 2 :]]  # the shortest, and half of it
    short = replace(config, max_completion_tokens=min(16, config.max_completion_tokens))
    with refusing(f"{type(model).__name__} cannot be trained here"):
        transformers.set_seed(config.seed % 2**32)
        ids = torch.tensor(prompts[:1], device=model.device)
        logits = model(ids).logits
        of_head = model.get_output_embeddings()(model.get_decoder()(ids).last_hidden_state)
        # One rounding to bfloat16 is up to 4e-3. Written so that NaN fails, too.
        if not (of_head - logits).abs().max() <= 1e-2 * logits.abs().max():
            raise Refused("its logits are scaled, capped or NaN")
        sequences, sampled = sample(task, prompts, 4, short)
        slots = [range(8), [8]]  # the samples; the longest sequence
        trained, _, _ = completion_logprobs(model, [*sequences, longest], slots, config.temperature)
        difference = (trained[: len(sampled)] - sampled).abs().mean()
        if not difference <= (1e-3 if model.dtype == torch.float32 else 0.1):
            raise Refused(f"sampled and trained log-probabilities differ by {difference:.2g}")


# ---- 8. Rewards: f(prompts, completions, **columns) -> list of float or, if not gradable, None
# A sign may stand off, but in 5-3 and 5 - 3 there is none.
NUMBER = re.compile(r"(?:(?<![\w)])(?<![0-9)] )- ?)?(?:[0-9]*\.)?[0-9]+(?:[eE][+-]?[0-9]+)?")
MARKED = re.compile(r"(?:####|\\boxed *\{)\s*(?:\\boxed *\{)?([^\n}]*)")
COMMA = r"(,|\{,\}|,?\\[,!]|[\xa0\u2009\u202f])"  # or what stands for one; none in (100,200)
THOUSANDS = re.compile(rf"(?<![0-9.,(\[])[1-9][0-9]{{0,2}}({COMMA}[0-9]{{3}})+(?![0-9])")
# What makes a number part of a fraction, power, root, pair, sum, relation or time.
BEFORE = r"((\^|\d_|sqrt|frac){?|}{|\d[,:]|([\d}] */|[≥≤≠±√]|\\(times|cdot|[lg]eq?|pm)) *)$"
AFTER = r" *((_{?|[:.]?|(, ?|[-+*/] *|or )-?)\d|\^(?!{?\\circ)|[×π√]|\\(times|cdot|pi|sqrt|frac))"
AROUND = r"""[\s"'*()\[\]{}\\.%°]*"""  # what may stand around an answer


def text_of(completion):
    """The text of a completion, which is a list of one message if its prompt is a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def gsm8k_number(text, is_answer=False):
    r"""The number that a text gives after its last mark, #### or \boxed{, and the last = in that
    line, or else at its end; None if a fraction, power or the like. An answer must be one number,
    or what a name or a calculation is equal to."""
    text = re.sub("[\N{MINUS SIGN}\N{EN DASH}]", "-", text)
    text = re.sub(r"\\?[$€£]", "", text)
    text = THOUSANDS.sub(lambda found: re.sub("[^0-9]", "", found[0]), text)
    marked = MARKED.findall(text)
    left, _, end = marked[-1].rpartition("=") if marked else ("", "", text)
    if is_answer:
        is_equation = not re.fullmatch(r"\s*([a-zA-Z]\w*|[-+*/×().0-9\s]*)\s*", left)
        found = re.fullmatch(rf"{AROUND}?({NUMBER.pattern})(?:\^\{{?\\circ)?{AROUND}", end)
        return None if is_equation or not found else float(found[1].replace(" ", ""))
    found = NUMBER.search(end) if marked else None
    if not found:
        end = re.sub(r"(?m)^ *- (?=.*[a-z])", "", text)  # a dash before an item is no sign
        *_, found = [None, *NUMBER.finditer(end)]
    if not found or re.search(BEFORE, end[: found.start()]) or re.match(AFTER, end[found.end() :]):
        return None
    return float(found[0].replace(" ", ""))


def graded(prompts, completions, answer, read_answer, read_text, **columns):
    """1 where a completion reads as its answer does, None if no answer can be read. Reasoning is
    left out, and a completion whose <think> does not end is wrong."""
    rewards = []
    for prompt, completion, wanted in zip(prompts, completions, answer):
        begun, text = text_of(prompt), text_of(completion)
        unfinished = "<think>" in (begun + text).rpartition("</think>")[2]
        wanted = None if wanted is None else read_answer(str(wanted))
        is_right = not unfinished and read_text(text.rpartition("</think>")[2]) == wanted
        rewards.append(None if wanted in (None, "") else float(is_right))
    return rewards


exact = partial(graded, read_answer=str.strip, read_text=str.strip)
gsm8k = partial(graded, read_answer=partial(gsm8k_number, is_answer=True), read_text=gsm8k_number)
REWARDS = {"exact": exact, "gsm8k": gsm8k}


# ---- 9. Tasks
@dataclass
class Task:
    """An example has prompt (text or messages), prompt_ids, and the columns of its data."""

    train: list
    evals: dict  # name: examples
    tokenizer: object
    reward: object  # a function
    model: object = None
    end_ids: tuple | list = ()  # all that end a completion: Qwen has two


def load_task(config):
    """The user's task, or the embedded one. Data and reward are tried before a model is loaded."""
    train, evals, tokenizer = user_data(config) if config.model else sorting_data(config)
    for ids in chain(*evals.values()):
        train.pop(ids, None)  # what is evaluated is not trained on
    if not train:
        raise Refused(f"{config.dataset} has only prompts that are evaluated")
    evals = {name: list(examples.values()) for name, examples in evals.items() if examples}
    task = Task(list(train.values()), evals, tokenizer, config.reward_function)
    trial = task.train[:99]
    reward_completions(task, trial, [Sequence([], [])] * len(trial))
    if config.model:
        options = {"dtype": DTYPE, "attn_implementation": "sdpa", "trust_remote_code": False}
        with refusing(f"{config.model} cannot be loaded"):
            model = transformers.AutoModelForCausalLM.from_pretrained(config.model, **options)
    else:
        model = warm_started(tokenizer)
    task.model = model.to(DEVICE).eval()
    ids = model.generation_config.eos_token_id
    ids = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
    # A chat's turn ends with the first special token after its message.
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "MESSAGE"}]
    with suppress(Exception):  # no template, or no such token
        text = tokenizer.apply_chat_template(chat, tokenize=False).rsplit("MESSAGE", 1)[1]
        after = tokenizer.encode(text, add_special_tokens=False)
        ids.add(next(token for token in after if token in tokenizer.added_tokens_decoder))
    task.end_ids = sorted(ids)
    check_sampling(task, config)
    end = tokenizer.decode(task.train[0]["prompt_ids"])[-40:]
    print(f"{model.dtype} on {DEVICE}; the first of {len(train)} prompts to train on ends {end!r}")
    return task


def reward_completions(task, examples, sequences):
    """B examples, B G sequences -> (B, G) float64 rewards, NaN where there is none."""
    samples = len(sequences) // len(examples)
    rows = [examples[i // samples] for i in range(len(sequences))]
    columns = {"prompts": [row["prompt"] for row in rows], "completions": []}
    for name in rows[0].keys() - columns - {"prompt", "prompt_ids"}:
        columns[name] = [row[name] for row in rows]
    if task.reward in REWARDS.values():  # ours ask if <think> is open
        endings = [task.tokenizer.decode(row["prompt_ids"][-20:]) for row in examples]
        columns["prompts"] = [endings[i // samples] for i in range(len(sequences))]
    for row, (_, ids) in zip(rows, sequences):
        has_ended = ids and ids[-1] in task.end_ids
        text = task.tokenizer.decode(ids[:-1] if has_ended else ids)
        is_chat = not isinstance(row["prompt"], str)  # and so is a completion
        columns["completions"].append([{"role": "assistant", "content": text}] if is_chat else text)
    values = task.reward(**columns)
    with refusing(f"rewards must be a list of {len(rows)} numbers or None, not {values!r:.60}"):
        numbers = []
        for value in values[:]:  # [:] refuses sets and dicts
            numbers.append(math.nan if value is None else value)
        rewards = torch.tensor(numbers, dtype=torch.float64).view(len(examples), samples)
        if rewards.isinf().any():
            raise Refused("one is infinite")
    return rewards


# ---- 10. Data
def user_data(config):
    """-> {ids: example} to train on, {name: {ids: example}} to evaluate, and the tokenizer."""
    options = {"trust_remote_code": False}
    with refusing(f"{config.model} cannot be loaded"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, **options)
    train = load_examples(config.dataset, "train", config, tokenizer)
    specs = filter(None, config.eval_dataset.split(","))
    evals = {spec: load_examples(spec, "test", config, tokenizer) for spec in specs}
    evals = evals or {"held out": dict(islice(train.items(), len(train) // 5))}
    for name, examples in evals.items():
        evals[name] = dict(islice(examples.items(), config.eval_prompts))
    return train, evals, tokenizer


# Csv is read as text, as pandas would take 0124 for 124.
READERS = {"parquet": ("parquet", {}), "csv": ("csv", {}), "tsv": ("csv", {"sep": "\t"})}
READERS |= dict.fromkeys(("json", "jsonl", "ndjson"), ("json", {}))
TEXT = {"converters": dict.fromkeys(range(999), str), "keep_default_na": False, "index_col": False}


def load_rows(spec, split):
    """The rows of path, path:split or path:config:split. A split may be a slice, as train[:900].
    A path is a file, whose name may have colons, a name on the Hub, or a URL."""
    parts = re.split(r":(?!//|\d+/|[^\[]*\])", spec)  # not in https://h:1/ or train[a:b]
    paths = [":".join(parts[:end]) for end in range(len(parts), 0, -1)]
    path = next(filter(os.path.isfile, paths), paths[-1])
    *names, split = parts[paths[::-1].index(path) + 1 :] or [split]
    kind = Path(re.sub(r"\.(gz|bz2|xz|zst)$", "", path.lower())).suffix[1:]
    source, options = READERS.get(kind, (path, {}))
    if kind in READERS:
        file = glob.escape(path) if os.path.isfile(path) else path
        options = options | {"data_files": {split.partition("[")[0]: file}}
    elif os.path.isfile(path):
        raise Refused(f"{spec} is a file, but none of {', '.join(READERS)}")
    warnings.filterwarnings("error", "Length of header")  # pandas would cut 7,000 to 7
    with refusing(f"{spec} is empty or cannot be read"):
        builder = datasets.load_dataset_builder(source, *names, **options)
        options = options | TEXT if builder.info.builder_name == "csv" else options
        return datasets.load_dataset(source, *names, split=split, **options)


def load_examples(spec, split, config, tokenizer):
    """{prompt ids: example}, shuffled, without what is empty, overlong or not gradable."""
    rows = load_rows(spec, split).shuffle(seed=0)  # the same data for every --seed
    flat = rows.flatten()  # data for verl nest the answer
    prompts = [name for name in config.prompt_column.split(",") if name in flat.column_names]
    answers = [name for name in config.answer_column.split(",") if name in flat.column_names]
    is_ours = config.reward in REWARDS
    if not prompts or (is_ours and not answers):
        raise Refused(f"{spec} has {flat.column_names}: set --prompt_column and --answer_column")
    read_as = getattr(flat.features[answers[0]], "dtype", "nested") if answers else "null"
    if config.reward == "exact" and not re.match("(large_)?string|u?int", read_as):
        raise Refused(f"{spec}: {answers[0]} was read as {read_as}; exact needs texts or integers")
    examples = {}
    gradable = 0
    for row, values in tqdm(zip(rows, flat), spec, len(rows), leave=False, delay=5):
        text = values[prompts[0]]
        # Our rewards and TRL's read either name; one's own keeps its columns.
        answer = dict.fromkeys(("answer", "solution"), values[answers[0]]) if answers else {}
        if is_ours and config.reward_function(["?"], [""], [answer["answer"]]) == [None]:
            continue
        gradable += 1
        with refusing(f"{spec} has a prompt that cannot be encoded"):
            prompt, ids = encode_prompt(text or "", config, tokenizer)
        if text and 0 < len(ids) <= config.max_prompt_tokens:
            row = row | answer if is_ours else answer | row
            examples[tuple(ids)] = row | {"prompt": prompt, "prompt_ids": ids}
    told = f"{spec}: {gradable} of {len(rows)} rows are gradable, {len(examples)} different prompts"
    if not examples:
        raise Refused(f"{told}: see --reward, --answer_column and --max_prompt_tokens")
    print(told)
    return examples


def encode_prompt(prompt, config, tokenizer):
    """A text or a list of messages -> the prompt as a reward gets it, and its ids."""
    system, is_chat = config.system_prompt, isinstance(prompt, list)
    for message in prompt if is_chat else []:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [0]
        if not all(isinstance(part, str) for part in parts):
            raise Refused(f"a message needs a role and a text as its content: {message!r:.60}")
    looks = r"""\s*\[?\s*\{\s*["'](role|content|from|messages|conversations)["']\s*:"""
    if isinstance(prompt, dict) or (not is_chat and re.match(looks, str(prompt))):
        raise Refused("it looks like a chat, but is not a list of messages")
    if is_chat or tokenizer.chat_template:
        prompt = prompt if is_chat else [{"role": "user", "content": str(prompt)}]
        if system:
            others = [message for message in prompt if message["role"] != "system"]
            prompt = [{"role": "system", "content": system}, *others]
        goes_on = prompt[-1]["role"] == "assistant"  # then its message is continued
        options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        return prompt, tokenizer.apply_chat_template(prompt, **config.template_kwargs | options)
    prompt = f"{system}\n\n{prompt}" if system else str(prompt)
    ids = tokenizer.encode(prompt)
    if ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text with it
        ids = ids[:-1]
    return prompt, ids


# ---- 11. The embedded task: sort digits
# Training prompts, fewest and most digits. Easy ones start solved, hard ones never are.
SORTING = {"easy": (461, 2, 3), "middle": (154, 9, 12), "hard": (409, 17, 20)}


def sorting_example(name, rng, tokenizer):
    """An example of a class: the prompt "4021=" has the answer "0124"."""
    _, fewest, most = SORTING[name]
    digits = rng.choices("0123456789", k=rng.randint(fewest, most))
    prompt = "".join(digits) + "="
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_ids": ids, "answer": "".join(sorted(digits))}


def sorting_data(config):
    """What user_data returns, for the embedded task. Only the middle class is evaluated."""
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    train, evals = [], {}
    for name, (size, _, _) in SORTING.items():
        rng, examples = random.Random(name), {}
        for _ in range(9 * (size + config.eval_prompts)):  # some come twice
            example = sorting_example(name, rng, tokenizer)
            examples[tuple(example["prompt_ids"])] = example
        train += islice(examples.items(), size)
        evals[name] = dict(islice(examples.items(), size, size + config.eval_prompts))
    random.Random(0).shuffle(train)
    print("sorts digits; accuracy is of 9 to 12 digits, the class from which one can learn")
    return dict(train), {"middle": evals["middle"]}, tokenizer


def warm_started(tokenizer):
    """A small Qwen3, taught by demonstrations: of the easy class, and of the middle one with a
    fifth of the digits replaced at random. The first run caches it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    sizes |= {"vocab_size": 259, "eos_token_id": 1, "pad_token_id": 0}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    cached = Path(torch.hub.get_dir(), "dppo-sorter-2.pt")  # 2: of this recipe
    cached.parent.mkdir(parents=True, exist_ok=True)
    if cached.exists():
        model.load_state_dict(torch.load(cached, weights_only=True))
        return model
    config = Config(temperature=1.0)
    optimizer = MasterAdam(model, 2e-3)
    rng = random.Random(0)
    for step in tqdm(range(400), "warm start, the first time only"):
        sequences = []
        for name, noise in rng.choices([("easy", 0.0), ("middle", 0.2)], k=64):
            example = sorting_example(name, rng, tokenizer)
            answer = ""
            for digit in example["answer"]:
                answer += rng.choice("0123456789") if rng.random() < noise else digit
            sequences.append(Sequence(example["prompt_ids"], tokenizer.encode(answer)))
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / 400)
        # Imitation is a policy gradient on given completions of advantage 1.
        shares = torch.tensor([1 / (64 * len(sequence.completion)) for sequence in sequences])
        train_step(model, optimizer, sequences, torch.ones(64), shares, None, None, config)
    half = cached.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), half)
    half.replace(cached)
    return model


# ---- 12. Settings
def setting(default, text):
    """A field: default, or a pair (with --model, for the embedded task), and help."""
    return field(default=default, metadata={"help": text, "metavar": ""})


LEAST = {"prompts_per_step": 1, "group_size": 2, "inner_epochs": 1, "temperature": 1e-3}
LEAST |= {"max_completion_tokens": 1, "max_grad_norm": 1e-6, "eval_samples": 1}


@dataclass
class Config:
    """All settings of the command line. Refuses what would silently go wrong."""

    # The method
    method: str = setting("dppo", "grpo, grpo-skip, dppo, dppo-proportional or module:Rule")
    objective: str = setting("grpo", "grpo, dr_grpo, dapo or gspo")
    prompt_prune_rate: float = setting(0.7, "r_q, share of low-scoring prompts to prune")
    completion_prune_rate: float = setting(0.7, "r_o, share of low-scoring completions to prune")
    prompts_per_step: int = setting(32, "noise wanted, in unpruned prompts; no more are rolled out")
    group_size: int = setting(8, "G, completions of each prompt")
    inner_epochs: int = setting(1, "updates on each rollout")
    beta: float = setting(0.0, "weight of the KL term")
    learning_rate: float = setting((1e-6, 5e-5), "after the warm-up")
    warmup_steps: int = setting(10, "steps over which it rises")
    max_grad_norm: float = setting(1.0, "longer gradients are clipped")
    temperature: float = setting((1.0, 0.7), "of the samples")
    max_completion_tokens: int = setting((1024, 22), "longer are cut")
    # Model and data
    model: str = setting("", "causal LM, on the Hub or in a folder")
    dataset: str = setting("", "path[[:config]:split], on the Hub or a file")
    prompt_column: str = setting("prompt,question,problem", "the first of these that exists")
    answer_column: str = setting("answer,solution,reward_model.ground_truth", "the same")
    system_prompt: str = setting("", "in place of a prompt's own system message")
    chat_template_kwargs: str = setting("{}", 'JSON, such as {"enable_thinking": false}')
    max_prompt_tokens: int = setting(512, "longer prompts are left out")
    reward: str = setting(("gsm8k", "exact"), "gsm8k, exact or module:function")
    eval_dataset: str = setting("", "like --dataset, as a,b; empty: held out")
    eval_prompts: int = setting(256, "prompts of an evaluation set, at most")
    eval_samples: int = setting(4, "samples of each evaluated prompt")
    # The run
    steps: int = setting((300, 60), "training steps; 0 only evaluates")
    eval_every: int = setting((0, 10), "steps between evaluations; 0: ends only")
    save_every: int = setting(50, "steps between checkpoints; 0: only at the end")
    rollout_batch_size: int = setting(256, "sequences generated at a time")
    micro_batch_tokens: int = setting(4096, "tokens of a forward pass")
    seed: int = setting(0, "of order, rollouts and draws")
    output_dir: str = setting("", "folder of the run; or a new one in runs/")
    history: str = setting("", "folder of a run, to start with its memory")
    resume: str = setting("", "folder of a run to go on with")

    def __post_init__(self):
        for name, value in asdict(self).items():
            if isinstance(value, tuple):  # a pair of defaults
                value = value[0] if self.model else value[1]
                setattr(self, name, value)
            least = LEAST.get(name, 0)
            most = 0.99 if name.endswith("prune_rate") else 1e15
            if isinstance(value, int | float) and not least <= value <= most:  # NaN fails
                raise Refused(f"--{name} {value} must be from {least} to {most:g}")
        if self.objective not in CLIPPING:
            raise Refused(f"--objective {self.objective} is not one of {', '.join(CLIPPING)}")
        with refusing("--chat_template_kwargs must be a JSON object"):
            self.template_kwargs = json.loads(self.chat_template_kwargs) | {"return_dict": False}
        of_user = (self.model, self.dataset, self.eval_dataset, self.system_prompt)
        if any(of_user) and not (self.model and self.dataset):
            raise Refused("--model or --dataset is missing: data of your own need both")
        named = {"rule_class": ("method", RULES), "reward_function": ("reward", REWARDS)}
        for attribute, (name, known) in named.items():
            value = getattr(self, name)
            with refusing(f"--{name} {value} is not one of {', '.join(known)}"):
                found = known.get(value) or pkgutil.resolve_name(value)
                if not callable(found):
                    raise Refused("it cannot be called; write module:name")
            setattr(self, attribute, found)


# ---- 13. Runs: a run is its records, one of step 0 and one of each step
def evaluate(task, config):
    """-> the mean of the rewards that are given in each set, and `accuracy`, that of all."""
    transformers.set_seed(config.seed % 2**32)  # the same every time
    k = config.eval_samples
    rewards = {name: rollout(task, rows, k, config)[1] for name, rows in task.evals.items()}
    means = {name: of_set.nanmean().item() for name, of_set in rewards.items()}
    together = torch.cat([torch.zeros(0), *map(torch.flatten, rewards.values())])
    return {"accuracy": together.nanmean().item(), **means}


def make_step(records, task, rule, optimizer, reference, config):
    """Makes the next step, and adds its record."""
    started_at = time.perf_counter()
    last = records[-1]
    seen = last["candidates_so_far"]
    # Draws have a generator of their own, as a reward may seed torch's.
    transformers.set_seed((1_000_003 * config.seed + seen) % 2**32)
    generator = torch.Generator().manual_seed(torch.randint(2**32, ()).item())
    upcoming = next_prompts(seen, len(task.train), config.seed)
    number = last["step"] + 1
    rate = config.learning_rate * min(1.0, number / max(1, config.warmup_steps))
    optimizer.param_groups[0]["lr"] = rate
    means = Means(**last["means"])
    step = dppo_step(task, rule, optimizer, reference, upcoming, means, generator, config)
    seconds, in_rollout = time.perf_counter() - started_at, step.rollout_seconds
    record = {"step": number, "updates": optimizer.updates, **record_of(step, task)}
    record |= {"candidates_so_far": seen + step.N, "learning_rate": rate}
    record |= {"rollout_seconds": in_rollout, "train_seconds": seconds - in_rollout}
    record["cumulative_seconds"] = last["cumulative_seconds"] + seconds
    rule.whole_memory = copy.deepcopy(rule.memory)  # a failed step leaves no trace
    records.append(record)


def record_of(step, task):
    """A step's record: means over its window, estimated from groups with rewards; one group."""
    B, G = step.rewards.shape
    completions = [sequence.completion for sequence in step.sequences]
    truncated = torch.tensor([ids[-1] not in task.end_ids for ids in completions]).view(B, G)
    equal = ~step.A.any(dim=1, keepdim=True)
    values = {"reward": step.rewards, "zero_variance_fraction": equal}
    values |= {"completion_length": step.lengths, "truncated_fraction": truncated}
    w_q = step.w_q * ~step.rewards.isnan().all(dim=1)  # (B,)
    record = {"prompts_seen": step.N, "prompts_rolled": B, "weight_max": step.w.max().item()}
    for name, of_groups in values.items():
        record[name] = (w_q @ of_groups.double().nanmean(dim=1).nan_to_num() / w_q.sum()).item()
    record |= {"means": step.means._asdict(), **step.updates[-1]}
    record["rollout_worth"] = step.means.worth(step.means.pruned)
    record["prompt_worth"] = step.means.worth(step.means.prompts_pruned)
    totals = {"completions_trained": torch.sum, "tokens_trained": torch.sum, "grad_norm": torch.max}
    for name, total in totals.items():  # torch.max keeps a NaN
        record[name] = total(torch.tensor([update[name] for update in step.updates])).item()
    q = step.w.any(dim=1).int().argmax().item()  # the first group that is trained
    record["prompt"] = task.tokenizer.decode(step.sequences[G * q].prompt)
    record["completions"] = task.tokenizer.batch_decode(completions[G * q : G * (q + 1)])
    return record | {"rewards": step.rewards[q].tolist(), "weights": step.w[q].tolist()}


def start(config, task, rule, optimizer):
    """A run's folder, made last so that a refused run leaves none, and its records so far."""
    out = Path(config.resume or config.output_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
    made_of = [(config.method, row["prompt"], row.get("answer")) for row in task.train]
    first = {"step": 0, "updates": 0, "candidates_so_far": 0, "means": Means()._asdict()}
    first |= {"cumulative_seconds": 0.0, "made_of": zlib.crc32(repr(made_of).encode())}
    folder = config.resume or config.history
    if folder:
        with refusing(f"{folder}/checkpoint.pt cannot be read"):
            saved = torch.load(Path(folder, "checkpoint.pt"), "cpu", weights_only=True, mmap=True)
            earlier = saved["records"]
            first["candidates_so_far"] = earlier[-1]["candidates_so_far"]
            # Settings may be others now, so worth starts at 1 again.
            first["means"]["length"] = earlier[-1]["means"]["length"]
            rule.memory |= copy.deepcopy(saved["memory"])
        if earlier[0].get("made_of") != first["made_of"]:
            raise Refused(f"{folder} was made with another method or other data")
    rule.whole_memory = copy.deepcopy(rule.memory)  # for checkpoints
    # A user's rule should fail now, not after the evaluation.
    trial = copy.copy(rule)
    trial.memory = copy.deepcopy(rule.memory)
    prune_prompts(trial, torch.arange(len(task.train)), config.prompts_per_step, torch.Generator())
    if config.resume:
        restore(saved, config, optimizer)
    with refusing(f"{out} cannot be written, or exists: name another --output_dir"):
        out.mkdir(parents=True, exist_ok=bool(config.resume))
        (out / "config.partial").write_text(json.dumps(asdict(config) | {"resume": ""}, indent=2))
        (out / "config.partial").replace(out / "config.json")
    return out, earlier if config.resume else [first]


@torch.no_grad()
def restore(saved, config, optimizer):
    """Restores optimizer and model, if the settings are those of the run."""
    free = ("steps", "save_every", "eval_every", "micro_batch_tokens", "rollout_batch_size")
    wanted = json.loads(Path(config.resume, "config.json").read_text())
    for name, value in asdict(config).items():
        if wanted.get(name) != value and name not in (*free, "resume"):
            raise Refused(f"--{name} must be {wanted.get(name)!r}: the run was made with it")
    optimizer.updates = saved["records"][-1]["updates"]
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # or its file stays mapped
    for weight, master, value in zip(optimizer.weights, optimizer.masters, saved["weights"]):
        master.copy_(value)
        weight.copy_(value)


def save_checkpoint(out, records, rule, optimizer):
    saved = {"records": records, "memory": rule.whole_memory, "weights": optimizer.masters}
    torch.save(saved | {"optimizer": optimizer.state_dict()}, out / "partial.pt")
    (out / "partial.pt").replace(out / "checkpoint.pt")  # always whole


def make_steps(out, records, task, rule, optimizer, reference, config):
    """Evaluates the last step, if that is due, and makes those that are left."""

    def stop(*_):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # Ctrl-C also ends what reads a pipe
            print("\nstops after this step; Ctrl-C again stops at once", file=sys.stderr)

    signal.signal(signal.SIGINT, stop)
    made = records[-1]["step"]
    last = max(made, config.steps)
    with (out / "metrics.jsonl").open("w") as file, tqdm(total=last, initial=made) as bar:
        file.writelines(json.dumps(record) + "\n" for record in records[:-1])
        for number in range(made, last + 1):
            if number > made:
                make_step(records, task, rule, optimizer, reference, config)
                bar.update()
                bar.set_postfix({name: records[-1][name] for name in ("reward", "rollout_worth")})
            record = records[-1]
            is_due = config.eval_every and number % config.eval_every == 0
            if (is_due or number in (0, last)) and "evaluation" not in record:
                record["evaluation"] = evaluate(task, config)
                bar.write(f"step {number}: accuracy {record['evaluation']['accuracy']:.2f}")
            print(json.dumps(record), file=file, flush=True)
            if config.save_every and number % config.save_every == 0 and made < number < last:
                save_checkpoint(out, records, rule, optimizer)
            if number < last and signal.getsignal(signal.SIGINT) != stop:
                raise KeyboardInterrupt


def train(config, task):
    """Makes a run, or the rest of one, and saves it unless it ends amid a step's updates."""
    rule = config.rule_class(config, len(task.train))
    reference = copy.deepcopy(task.model) if config.beta > 0 else None
    optimizer = MasterAdam(task.model, config.learning_rate)
    out, records = start(config, task, rule, optimizer)
    try:
        try:
            make_steps(out, records, task, rule, optimizer, reference, config)
        finally:
            if optimizer.updates == records[-1]["updates"]:  # not amid those of a step
                save_checkpoint(out, records, rule, optimizer)
                task.model.save_pretrained(out / "model")
                task.tokenizer.save_pretrained(out / "model")
            signal.signal(signal.SIGINT, signal.default_int_handler)
    except BaseException:
        if (out / "checkpoint.pt").exists():
            print(f"\ngo on with: python dppo.py --resume={str(out)!r}")
        raise
    before, after = records[0]["evaluation"], records[-1]["evaluation"]
    seconds, worth = records[-1]["cumulative_seconds"], records[-1].get("rollout_worth", 1.0)
    texts = [f"{name} {before[name]:.2f} -> {after[name]:.2f}" for name in task.evals]
    told = f"accuracy: {', '.join(texts) or 'not evaluated'}; a rollout was worth {worth:.1f}"
    print(f"{told} without pruning; {seconds:.0f} s of training; results are in {out}")


def main():
    """The command line, which reports bad input in one line."""
    sys.path.append(os.getcwd())  # where module:name is looked for
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    options = {"usage": "python dppo.py [--setting value] ...", "allow_abbrev": False}
    options["description"] = "Of two defaults, the second is that of the embedded task."
    parser = transformers.HfArgumentParser(Config, **options)
    try:
        resume, stored = parser.parse_args().resume, []
        if resume:  # its settings first, as the last ones count
            with refusing(f"{resume}/config.json cannot be read"):
                settings = json.loads(Path(resume, "config.json").read_text()).items()
            stored = [f"--{name}={value}" for name, value in settings]
        config = Config(**vars(parser.parse_args(stored + sys.argv[1:])))
        if not config.model:  # half of the threads: as they wait, they spin
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        train(config, load_task(config))
    except KeyboardInterrupt:
        sys.exit(130)
    except (torch.OutOfMemoryError, MemoryError):
        sys.exit("dppo.py: out of memory: lower --micro_batch_tokens or --rollout_batch_size")
    except Refused as error:
        parser.error(" ".join(str(error).split())[:300])


if __name__ == "__main__":
    sys.modules["dppo"] = sys.modules["__main__"]  # for a rule's `import dppo`
    main()
