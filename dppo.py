"""Dynamic Pruning Policy Optimization (DPPO) in one file: GRPO with unbiased pruning.

After "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" (Zhu et al., 2026,
arXiv 2603.04135), of which we had the abstract and reviews that quote it, not the text. This is
neither Diffusion Policy Policy Optimization nor Divergence PPO, which TRL calls `dppo`.

GRPO answers each prompt several times and learns from the differences; a group that is all right or
all wrong teaches nothing. DPPO prunes, at random, prompts and completions that teach little, and
divides the loss of what it keeps by the probability of having been kept, so the expected gradient
stays GRPO's. What is left is packed, and a step makes only as many rollouts as its noise needs.

    python dppo.py                              # a small embedded model, offline, in two minutes
    python dppo.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k:main:train

Part I is the method. It leads to `dppo_step`, the paper's algorithm. Where our sources are silent
or disagree, these have our reading in their docstrings: keep_probabilities, DPPO, prune_prompts,
normalizer, dppo_step. Fewer rollouts at equal noise (Means) and a rule that goes beyond the paper
are ours. Part II is the rest: rollout, rewards, model, data, settings, files.

    q, i, t   a prompt; a completion; a token of the completion
    N         number of candidate prompts of a step, its window
    B         number of prompts of the window that are kept and rolled out
    G         number of completions of a prompt, its group
    A         advantage of a completion
    P, pi     probability of being pruned, of being kept: pi = 1 - P
    w         inverse-probability weight, 1/pi where kept and 0 where pruned: w_q of a
              prompt, w_qi of a completion whose prompt was kept, w = w_q w_qi
    rho       probability of a token under the new policy over that under the old one
    beta      weight of the KL term, the divergence from a reference policy
    l, L      loss of a completion; its mean over the N G candidates; L_hat estimates L
    Z         what the sum over a completion's token losses is divided by
    share     w/(N G Z), which multiplies that sum in L_hat
    NaN       a reward that was not given, or a score that is not yet known
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
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

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
    lowest, highest = rewards.nanquantile(rewards.new_tensor([0, 1]), dim=1, keepdim=True)  # (B, 1)
    return advantages.masked_fill((lowest == highest) | ~given, 0.0)


def has_gradient(advantages, beta):
    """(B, G) bool: False where A = 0 and there is no KL, so that loss and gradient are 0. DPPO
    prunes such completions first, and leaves them out of the mean that its scores are held to."""
    return (advantages != 0) | (beta > 0)


def keep_probabilities(scores, rate):
    """The paper's rule, as we read it: (n,) scores >= 0 -> (n,) float64 keep probabilities pi.

    Each of the k items that score below the mean has pi = 1 - floor(rate k)/k, so that a draw over
    all n prunes floor(rate k) of them. The others, and those without a score (NaN), have pi = 1.

    The paper's Algorithm 1 reportedly removes the lowest scores outright: pi = 0 where the gradient
    is not 0, against its own proof. Here as many go, but at random among the low ones."""
    scores = scores.double()
    low = scores < scores.nanmean() * (1 - 1e-6)  # 1e-6: rounding; a NaN is never low
    count = int(low.sum())
    pruned = math.floor(rate * count + 1e-9)  # 0.29 * 100 is 28.999999999999996
    pi = torch.ones_like(scores)
    pi[low] = (count - pruned) / max(1, count)
    return pi


def draw(pi, generator):
    """(n,) keep probabilities -> (n,) float64 weights: 1/pi where kept, 0 where pruned. Where
    pi > 0, a weight has the expectation pi (1/pi) + (1 - pi) 0 = 1.

    This is systematic sampling. The items are laid end to end in random order, each as long as
    its pi, and a comb with teeth at u, u + 1, u + 2, ... is held over them, for one u uniform in
    [0, 1). An item is kept if a tooth falls on it, with probability pi. In all, sum(pi) are
    kept, rounded down or up. In the order 0.5, 1, 0.25, 0.25, u = 0.6 keeps the 2nd and 3rd."""
    order = torch.randperm(len(pi), generator=generator)
    ends = pi[order].cumsum(0)
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    teeth_before_end = (ends - u).ceil()  # teeth in [0, end); in the example 0, 1, 2, 2
    has_tooth = teeth_before_end.diff(prepend=torch.zeros(1)) > 0
    kept = order[has_tooth]
    weights = torch.zeros_like(pi)
    weights[kept] = 1 / pi[kept]
    return weights


class Rule:
    """What is kept, and with which probability. This one keeps everything, as textbook GRPO does.

    Write your own as a subclass. The gradient stays unbiased as long as pi is known before the
    draw: a prompt's pi may depend only on memory, a completion's also on the rollout and on the
    prompts that were kept. A prompt needs pi > 0, and so does a completion that has a gradient."""

    unbiased = True  # False: all that is kept weighs the same, and L_hat is the mean of its losses
    remembers = {}  # {name: initial value} of the numbers that are remembered of each prompt

    def __init__(self, config, prompt_count):
        self.config = config
        self.prompt_count = prompt_count
        self.memory = {}  # of tensors, saved in checkpoints
        for name, value in self.remembers.items():
            self.memory[name] = torch.full((prompt_count,), value, dtype=torch.float64)

    def prompt_probabilities(self):
        """(all prompts,) float64 pi of each prompt, from memory alone."""
        return torch.ones(self.prompt_count, dtype=torch.float64)

    def completion_probabilities(self, advantages, prompt_weights):
        """(B, G) advantages, (B,) weights of their prompts -> (B, G) float64 pi."""
        return torch.ones_like(advantages)

    def remember(self, prompts, rewards, advantages):
        """Takes a rollout into memory: (B,) prompts, (B, G) rewards, (B, G) advantages."""


class GRPOSkip(Rule):
    """GRPO that skips completions without a gradient. Skipping adds neither bias nor variance."""

    def completion_probabilities(self, advantages, prompt_weights):
        return has_gradient(advantages, self.config.beta).double()


class DPPO(Rule):
    """The paper's rule. A completion's score is |A|, and low means below the mean |A| of the
    completions that have a gradient. A prompt's score is the mean |A| of its group at its last
    visit, and low means below the mean over all prompts that have a score."""

    remembers = {"score": math.nan}

    def prompt_probabilities(self):
        return keep_probabilities(self.memory["score"], self.config.prompt_prune_rate)

    def completion_probabilities(self, advantages, prompt_weights):
        trainable = has_gradient(advantages, self.config.beta)
        scores = advantages[trainable].abs()
        pi = torch.zeros_like(advantages)
        pi[trainable] = keep_probabilities(scores, self.config.completion_prune_rate)
        return pi

    def remember(self, prompts, rewards, advantages):
        scores = advantages.abs().mean(dim=1)  # (B,)
        for q, score in zip(prompts, scores):  # of two visits in a window, the later counts
            self.memory["score"][q] = score


def check_probabilities(rule, pi, needed):
    """Refuses what is no probability, and pi = 0 where `needed`, which would silently bias the
    gradient, unless the rule says that it is biased."""
    valid = pi.shape == needed.shape and bool(((pi >= 0) & (pi <= 1 + 1e-9)).all())  # NaN fails
    if not valid or (rule.unbiased and (pi[needed] == 0).any()):
        shape = tuple(needed.shape)
        raise Refused(f"a rule needs pi of shape {shape}, 0 < pi <= 1 where there is a gradient")


def prune_prompts(rule, upcoming, limit, generator):
    """Prompt-level pruning, before the rollout: (n,) upcoming prompts, by index -> N, of which the
    first N are the window; (B,) the prompts that are kept; (B,) their weights.

    The window is the longest prefix of `upcoming` whose pi sum to at most `limit`. From it the draw
    keeps sum(pi) prompts, rounded down or up, so B is `limit` or one less, if `upcoming` lasts.
    Drawing until enough prompts survive would make N depend on the draw, and bias the gradient.

    A window that runs into the next epoch may hold a prompt twice, as two candidates. A prompt's
    low pi makes N larger, so per epoch it counts about (1 - pi)/limit less than one of pi = 1."""
    pi = rule.prompt_probabilities().double()  # (all prompts,)
    check_probabilities(rule, pi, needed=torch.ones(rule.prompt_count).bool())
    pi = pi[upcoming]  # (n,)
    N = int((pi.cumsum(0) <= limit + 1e-9).sum())
    pi = pi[:N]  # (N,)
    if not pi.any():
        raise Refused("a rule needs pi > 0 for at least one of the upcoming prompts")
    if pi.sum() < 1:  # a draw might keep none; scaled to the sum 1, it keeps exactly one
        pi = pi / pi.sum()
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
    """The sequences at `indices` -> micro-batches, which are lists of slots, which are lists of
    indices; and how full the slots are. As masked attention costs the square of a slot's length,
    slots are as long as the longest sequence, but at least 128 tokens."""
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
    restart at 0 with every sequence, transformers' sdpa, given no mask, keeps attention in it."""
    tables = []
    for slot in slots:
        tokens, positions, owners = [], [], []
        for i in slot:
            prompt, completion = sequences[i]
            tokens += prompt + completion
            positions += range(len(prompt) + len(completion))
            # The last token of the prompt predicts the first of the completion.
            owners += [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
        tables.append(torch.tensor([tokens, positions, owners]).T)
    table = pad_sequence(tables, batch_first=True, padding_value=-1)
    padding = -table.shape[1] % 8  # matrix products are fast at multiples of 8
    return torch.nn.functional.pad(table, (0, 0, 0, padding), value=-1)


# ---- 3. Forward pass, loss and update
def token_logprobs(head, hidden, targets, temperature):
    """(n, width) hidden states, (n,) ids of the next tokens -> (n,) log-probabilities of these
    tokens, (n,) entropies of the distributions that they come from."""
    logits = head(hidden).float().div_(temperature)
    logprobs = logits.log_softmax(dim=-1)
    of_targets = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    entropies = torch.special.entr(logprobs.detach().exp()).sum(dim=-1)
    return of_targets, entropies


def completion_logprobs(model, sequences, slots, temperature):
    """The forward pass over packed slots -> (tokens,) log-probabilities of their completions,
    (tokens,) entropies, and (tokens,) the index of each token's sequence."""
    table = lay_out(sequences, slots)
    owner = table[:, :, 2].flatten()
    places = (owner >= 0).nonzero().squeeze(1)  # (tokens,)
    owner, places = owner[places].to(model.device), places.to(model.device)
    input_ids, position_ids = table[:, :, :2].clamp(min=0).to(model.device).unbind(dim=2)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    hidden = output.last_hidden_state.flatten(0, 1)[places]  # (tokens, width)
    targets = input_ids.flatten()[places + 1]  # (tokens,)
    # 8,192 tokens of Qwen have 5 GB of logits. So only completions get them, 512 tokens at a time,
    # and the backward pass computes them again.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    parts = []
    for states, ids in zip(hidden.split(512), targets.split(512)):
        parts.append(checkpoint(token_logprobs, head, states, ids, temperature, **options))
    logprobs, entropies = map(torch.cat, zip(*parts))
    return logprobs, entropies, owner


@torch.no_grad()
def frozen_logprobs(model, sequences, indices, config):
    """{index: (length,) log-probabilities} of the completions at `indices`, without gradient."""
    result = {}
    for slots in pack_micro_batches(sequences, indices, config)[0]:
        logprobs, _, owner = completion_logprobs(model, sequences, slots, config.temperature)
        result |= {i: logprobs[owner == i] for i in chain(*slots)}
    return result


# For each objective, how far rho may fall below 1 and rise above it before it is clipped.
CLIPPING = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


def token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config):
    """(tokens,) the new, old and, if beta > 0, reference log-probabilities, (tokens,) the index of
    each token's completion, and A by that index -> (tokens,) each: loss; whether clipped; KL.

        loss = -min(rho A, clip(rho, 1 - down, 1 + up) A) + beta KL

    In gspo, all tokens of a completion have the same rho, exp of the mean log-ratio."""
    A = A[owner]  # (tokens,)
    log_ratio = logprobs - old_logprobs
    if config.objective == "gspo":
        _, place, lengths = owner.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros_like(lengths, dtype=log_ratio.dtype).index_add(0, place, log_ratio)
        log_ratio = (sums / lengths)[place]
    rho = log_ratio.exp()
    down, up = CLIPPING[config.objective]
    surrogate = torch.min(rho * A, rho.clamp(1 - down, 1 + up) * A)
    clipped = surrogate < rho * A
    kl = torch.zeros_like(logprobs)
    if config.beta > 0:
        log_ref_ratio = ref_logprobs - logprobs
        kl = log_ref_ratio.exp() - 1 - log_ref_ratio  # k3: x - 1 - log x, x = p_ref/p
    return config.beta * kl - surrogate, clipped, kl.detach()


def train_step(model, optimizer, sequences, advantages, shares, old, ref, config):
    """One update on the completions that have a share of the loss -> metrics. Even an unbiased
    gradient does not give an unbiased update, as Adam and clipping the norm are not linear.

    sequences: all completions with their prompts; advantages, shares: A and w/(N G Z) of each;
    old, ref: {index: log-probabilities} from frozen_logprobs, or None. Without `old`, the policy
    that is trained is the one that sampled: rho = 1, and its gradient is that of log p."""
    kept = shares.flatten().nonzero().squeeze(1).tolist()
    A = advantages.flatten().float().to(model.device)
    share = shares.flatten().float().to(model.device)
    micro_batches, density = pack_micro_batches(sequences, kept, config)
    sums = torch.zeros(3, device=model.device)  # of entropies, clipped tokens, KL
    for slots in micro_batches:
        batch = list(chain(*slots))
        logprobs, entropy, owner = completion_logprobs(model, sequences, slots, config.temperature)
        old_logprobs = torch.cat([old[i] for i in batch]) if old else logprobs.detach()
        ref_logprobs = torch.cat([ref[i] for i in batch]) if ref else None
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
    its window, estimated as sum (w_q |g_q|/N)^2 over the B prompts that are kept. B prompts without
    pruning have mean |g_q|^2/B. This over the former is what a rollout is worth: at 2, half as many
    give about the same noise. A^2 stands in for |g|^2, and w for w_q if completions are pruned."""

    length: float = 0.0  # of a completion
    unpruned: float = 0.0  # noise of a step times its B, had nothing been pruned
    prompts_pruned: float = 0.0  # the same, had only prompts been pruned; for the record
    pruned: float = 0.0  # the same, as it was, with both levels pruned

    def worth(self, noise):
        """What a rollout is worth with this noise; 1 if nothing is known of it."""
        return self.unpruned / noise if noise > 0 else 1.0

    def after(self, N, w_q, w, A, lengths):
        """The means after a step with (B,) w_q, (B, G) w, A and lengths. Worth starts at 1."""
        length = (w_q @ lengths.mean(dim=1) / w_q.sum()).item()
        length = 0.9 * (self.length or length) + 0.1 * length
        if not A.any():  # the step says nothing about noise
            return self._replace(length=length)
        noise = []
        w_q, B = w_q[:, None], len(A)
        for weights in (w_q, B / N * w_q**2, B / N * w**2):
            noise.append((weights * A**2).mean(dim=1).sum().item() / N)
        means = [0.95 * (mean or noise[0]) + 0.05 * new for mean, new in zip(self[1:], noise)]
        return Means(length, *means)


def normalizer(lengths, mean_length, config):
    """(B, G) lengths -> (B, G) Z: the length for grpo and gspo, otherwise a constant.

    dapo divides by the number of all tokens, N G times the mean length, which is unknown where
    prompts are pruned. The mean length of *earlier* steps replaces it, as it is fixed before the
    draw. A first step takes its own, which is exact as long as it prunes no prompt."""
    if config.objective == "dr_grpo":
        return torch.full_like(lengths, config.max_completion_tokens)
    if config.objective == "dapo":
        return torch.full_like(lengths, mean_length or lengths.mean().item())
    return lengths


def dppo_step(task, rule, optimizer, reference, upcoming, means, generator, config):
    """One step of the paper's algorithm -> what happened in it, for the record.

    task: model, training examples, reward; reference: the model that KL is measured against;
    upcoming: the next prompts in order, as many as there are training examples;
    means: Means of the steps before; generator: for the draws alone.

    L is the mean of l = (sum of token losses)/Z over all N G candidates; L_hat = sum(w l)/(N G).
    Memory, limit and N are fixed before the draw, so w_q has mean 1; given that draw and the
    rollouts, so has w_qi, wherever l has a gradient. As a rollout is independent of its draw, the
    gradients of L_hat and L have the same mean. The paper averages over what it keeps and rescales
    by C/(1 - P). If C is kept/total, as we read it, this is the same (Horvitz-Thompson):

        (1/kept) C/(1 - P) = (1/kept) (kept/total)/pi = 1/(total pi) = w/(N G)"""
    G = config.group_size

    # 1. Prune prompts by what is remembered of them. Keep just enough for the noise of
    #    prompts_per_step unpruned prompts, but never more than these.
    limit = max(1, round(config.prompts_per_step / max(1, means.worth(means.pruned))))
    N, prompts, w_q = prune_prompts(rule, upcoming, limit, generator)

    # 2. Roll out the prompts that are kept, and reward their completions. Completion i of the q-th
    #    of these prompts is sequences[q G + i], as flatten() has it.
    examples = [task.train[q] for q in prompts.tolist()]
    sequences, rewards, seconds = rollout(task, examples, G, config)  # B G; (B, G)
    A = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")  # (B, G)
    lengths = A.new_tensor([len(sequence.completion) for sequence in sequences]).view_as(A)
    Z = normalizer(lengths, means.length, config)

    # 3. Prune completions, anew for every update, since the policy depends on earlier draws.
    #    (Prompts are drawn once, so later updates are unbiased only given that draw.)
    weights = []  # (B, G) for each update
    for _ in range(config.inner_epochs):
        w = w_q[:, None] * prune_completions(rule, A, w_q, generator)
        if not rule.unbiased:  # L_hat is the plain mean of what is kept: share = 1/(kept Z)
            w = (w > 0) * (N * G / (w > 0).sum().clamp(min=1))
        weights.append(w)

    # 4. Remember what prompts taught and, unless the rule is biased (A = 0 then), the noise.
    rule.remember(prompts, rewards, A)
    means = means.after(N, w_q, weights[0], A * rule.unbiased, lengths)

    # 5. Log-probabilities under the reference and, for later updates (if any), the old policy.
    trained = torch.stack(weights).any(dim=0).flatten().nonzero().squeeze(1).tolist()
    ref = frozen_logprobs(reference, sequences, trained, config) if config.beta > 0 else None
    later = torch.stack(weights)[1:].any(dim=0).flatten().nonzero().squeeze(1).tolist()
    old = frozen_logprobs(task.model, sequences, later, config)

    # 6. Pack what is kept, and update. The first update trains the policy that sampled.
    updates = []
    for number, w in enumerate(weights):
        inputs = {"advantages": A, "shares": w / (N * G * Z), "ref": ref, "config": config}
        inputs["old"] = old if number > 0 else None
        updates.append(train_step(task.model, optimizer, sequences, **inputs))
    step = {"N": N, "w_q": w_q, "w": weights[0], "sequences": sequences, "lengths": lengths}
    step |= {"rewards": rewards, "A": A, "means": means, "updates": updates}
    return SimpleNamespace(**step, rollout_seconds=seconds)


# ---- 5. Beyond the paper: keep in proportion to the score
def proportional_probabilities(scores, rate, floor=0.0):
    """Scores >= 0 of any shape -> float64 pi = min(1, c score), at least `floor`, and 1 where there
    is no score (NaN). Their sum is that of keep_probabilities, or more if `floor` is that high.
    Without a floor, scores of 0 get pi = 0 and are not counted; with one, 0 is a tiny score.

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
    prompt's score, the root mean square of A that is expected of its next group, is learned:
    prompts whose smoothed success rate p has a similar spread 2 sqrt(p (1 - p)) share a bin, whose
    score is what its prompts had at their next visits. (As all of a bin have the same pi, that mean
    needs no weights.) Rewards below 0 count as 0, and above 1 as 1."""

    remembers = {"right": 0.0, "wrong": 0.0}  # sums of rewards, of 1 - rewards
    prior = 0.05  # successes and failures before any visit: most prompts are solved always or never
    decay = 0.8  # what is remembered shrinks by this factor at each visit, as the policy changes
    bins = 9
    forget = 0.998  # what bins have learned shrinks by this factor at each step
    floor = 0.07  # of pi where a gradient is unlikely but possible: 1/pi is at most 15

    def __init__(self, config, prompt_count):
        super().__init__(config, prompt_count)
        middles = (torch.arange(self.bins).double() + 0.5) / self.bins
        self.memory["visits"] = torch.full_like(middles, 4)  # a guess that is worth four of them
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
        floor = self.floor if self.config.beta > 0 else 0.0  # with KL, A = 0 has a gradient too
        return proportional_probabilities(scores, self.config.completion_prune_rate, floor)

    def remember(self, prompts, rewards, advantages):
        memory, place = self.memory, self.bin_of_prompts()
        memory["visits"] *= self.forget
        memory["squares"] *= self.forget
        for q, group, A in zip(prompts, rewards.clamp(0, 1), advantages):
            if place[q] >= 0 and not group.isnan().all():
                memory["visits"][place[q]] += 1
                memory["squares"][place[q]] += A.square().mean()
            right = len(group) * group.nanmean().nan_to_num()  # without any reward, it is all wrong
            memory["right"][q] = self.decay * memory["right"][q] + right
            memory["wrong"][q] = self.decay * memory["wrong"][q] + len(group) - right


RULES = {"grpo": Rule, "grpo-skip": GRPOSkip, "dppo": DPPO, "dppo-proportional": ProportionalDPPO}


# ======== Part II: the plumbing ========

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
# cuDNN's attention plans anew at every token, and may give NaN gradients (pytorch issue 196678).
torch.backends.cuda.enable_cudnn_sdp(False)


class Refused(ValueError):
    """Bad input, which the command line reports in one line."""


@contextmanager
def refusing(what):
    """Turns whatever is raised inside into Refused, as libraries raise nearly anything."""
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
    away, so Adam updates a float32 master of each weight (of a float32 weight, itself), which is
    then rounded to the weight. Gradients are summed in float32."""

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
            master.grad = None  # otherwise it would outlive model.zero_grad()


# ---- 7. Rollout
@torch.inference_mode()
def decode(model, input_ids, generation_config, samples, temperature, end_ids, **inputs):
    """(prompts, tokens) ids -> (prompts * samples, limit) ids of the completions, -1 after their
    end; their log-probabilities. `model.generate` runs this loop in place of its own, to sample
    from the policy that is trained, softmax(logits/temperature), without the model's top_k or the
    like. It reads a prompt once for all its samples, and rows that have ended leave the batch."""
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
    sequences = []
    for i, row in enumerate(tokens.tolist()):
        sequences.append(Sequence(prompts[i // samples], [token for token in row if token >= 0]))
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
    Log-probabilities must agree on average (each differs a bit in bfloat16), also beside the
    longest possible sequence, which moves positions in some models."""
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


# ---- 8. Rewards: f(prompts, completions, **columns) -> list[float | None]; None: not gradable
# A sign may stand off, but in 5-3 and 5 - 3 there is none.
NUMBER = re.compile(r"(?:(?<![\w)])(?<![0-9)] )- ?)?(?:[0-9]*\.)?[0-9]+(?:[eE][+-]?[0-9]+)?")
MARKED = re.compile(r"(?:####|\\boxed *\{)\s*(?:\\boxed *\{)?([^\n}]*)")
COMMA = r"(,|\{,\}|,?\\[,!]|[\xa0\u2009\u202f])"  # or what stands for one; none in (100,200)
THOUSANDS = re.compile(rf"(?<![0-9.,(\[])[1-9][0-9]{{0,2}}({COMMA}[0-9]{{3}})+(?![0-9])")
# What makes a number a part of a fraction, a power, a root, a pair, a sum, a relation, a time.
BEFORE = r"([0-9}] */ *|\^\{?|[0-9]_\{?|(sqrt|frac)\{?|\}\{|[0-9][,:]|[≥≤≠±√] *"
BEFORE = re.compile(BEFORE + r"|\\(times|cdot|[lg]eq?|pm) *)$")
AFTER = r" *(/ *[0-9]|\^(?!\{?\\circ)|_\{?[0-9]|[,:.]?[0-9]|(, ?|[-+] |or )-?[0-9]|[×π√]"
AFTER = re.compile(AFTER + r"|\\(times|cdot|pi|sqrt|frac))")
AROUND = r"""[\s"'*()\[\]{}\\.%°]*"""  # what may stand around a number that is an answer


def text_of(completion):
    """The text of a completion, which is a list of one message if its prompt is a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def gsm8k_number(text, is_answer=False):
    r"""The number that a text gives after its last mark, #### or \boxed{, and the last = in that
    line, or else at its end; None where it is part of an expression. An answer must be one number,
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
        end = re.sub(r"(?m)^\s*- (?=.*[a-z])", "", text)  # a dash before an item is no sign
        *_, found = [None, *NUMBER.finditer(end)]
    if not found or BEFORE.search(end[: found.start()]) or AFTER.match(end, found.end()):
        return None
    return float(found[0].replace(" ", ""))


def graded(prompts, completions, answer, read_answer, read_text, **columns):
    """1 where what is read of a completion is what is read of its answer, None where that is
    nothing. Reasoning is left out, and so is all of a completion whose <think> does not end."""
    rewards = []
    for prompt, completion, wanted in zip(prompts, completions, answer):
        text = text_of(completion)
        if "<think>" in text_of(prompt).rpartition("</think>")[2]:
            text = "<think>" + text
        text, unfinished, _ = text.rpartition("</think>")[2].partition("<think>")
        wanted = None if wanted is None else read_answer(str(wanted))
        is_right = not unfinished and read_text(text) == wanted
        rewards.append(None if wanted in (None, "") else float(is_right))
    return rewards


exact = partial(graded, read_answer=str.strip, read_text=str.strip)
gsm8k = partial(graded, read_answer=partial(gsm8k_number, is_answer=True), read_text=gsm8k_number)
REWARDS = {"exact": exact, "gsm8k": gsm8k}


# ---- 9. Tasks
@dataclass
class Task:
    """What a run works on. An example has prompt (text or messages), prompt_ids, and columns."""

    train: list
    evals: dict  # name: examples
    tokenizer: object
    reward: object  # a function
    model: object = None
    end_ids: tuple | list = ()  # all that end a completion: Qwen has two


def load_task(config):
    """The user's data and model, or the embedded ones. Errors in the data, or in the reward, which
    is tried on empty completions, are reported before the model is loaded."""
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
    task.end_ids = sorted(ids | turn_end(tokenizer))
    check_sampling(task, config)
    ending = tokenizer.decode(task.train[0]["prompt_ids"])[-40:]
    told = f"{type(model).__name__} in {model.dtype} on {DEVICE}"
    print(f"{told}; the first of {len(train)} prompts to train on ends {ending!r}")
    return task


def turn_end(tokenizer):
    """{the first special id that the chat template writes after an assistant's message}, if any.
    Base models end their texts with another."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "MESSAGE"}]
    with suppress(Exception):  # no template, or one that wants more than this
        text = tokenizer.apply_chat_template(chat, tokenize=False).rsplit("MESSAGE", 1)[1]
        after = tokenizer.encode(text, add_special_tokens=False)
        return {*[token for token in after if token in tokenizer.added_tokens_decoder][:1]}
    return set()


def reward_completions(task, examples, sequences):
    """B examples, B G sequences -> (B, G) float64 rewards, NaN where there is none. The reward
    function gets the columns of the data."""
    samples = len(sequences) // len(examples)
    rows = [examples[i // samples] for i in range(len(sequences))]
    columns = {"prompts": [row["prompt"] for row in rows], "completions": []}
    for name in rows[0].keys() - columns - {"prompt", "prompt_ids"}:
        columns[name] = [row[name] for row in rows]
    if task.reward in REWARDS.values():  # these ask whether <think> is open as a prompt ends
        endings = [task.tokenizer.decode(row["prompt_ids"][-20:]) for row in examples]
        columns["prompts"] = [endings[i // samples] for i in range(len(sequences))]
    for row, (_, ids) in zip(rows, sequences):
        has_ended = ids and ids[-1] in task.end_ids
        text = task.tokenizer.decode(ids[:-1] if has_ended else ids)
        is_chat = not isinstance(row["prompt"], str)  # then a completion is a message, too
        columns["completions"].append([{"role": "assistant", "content": text}] if is_chat else text)
    values = task.reward(**columns)
    must = f"the reward function must return a list of {len(rows)} finite numbers or None"
    with refusing(f"{must}, not {values!r:.60}"):
        numbers = []
        for value in values[:]:  # a set or a dict has no order
            numbers.append(math.nan if value is None else value)
        rewards = torch.tensor(numbers, dtype=torch.float64).view(len(examples), samples)
        if rewards.isinf().any():
            raise Refused("one is infinite")
    return rewards


# ---- 10. Data
def user_data(config):
    """-> {prompt ids: example} to train on, {name: {prompt ids: example}} to evaluate, held out if
    no evaluation set is named, and the tokenizer."""
    options = {"trust_remote_code": False}
    with refusing(f"{config.model} cannot be loaded"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, **options)
    train = load_examples(config.dataset, "train", config, tokenizer)
    evals = {}
    for spec in filter(None, config.eval_dataset.split(",")):
        examples = load_examples(spec, "test", config, tokenizer)
        evals[spec] = dict(islice(examples.items(), config.eval_prompts))
    if not evals:
        evals["held out"] = dict(islice(train.items(), min(config.eval_prompts, len(train) // 5)))
    return train, evals, tokenizer


# What reads a kind of file, and how: csv as text, since pandas would take 0124 for 124.
TEXT = {"converters": dict.fromkeys(range(999), str), "keep_default_na": False, "index_col": False}
READERS = {"parquet": ("parquet", {}), "csv": ("csv", TEXT), "tsv": ("csv", TEXT | {"sep": "\t"})}
READERS |= dict.fromkeys(("json", "jsonl", "ndjson"), ("json", {}))


def load_rows(spec, split):
    """The rows of path, path:split or path:config:split. A split may be a slice, as train[:900]. A
    path is a file, whose name may have colons, or else a name on the Hub, or a URL."""
    parts = re.split(r":(?!//|[^\[]*\])", spec)  # at colons, but those of https:// and train[a:b]
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
    warnings.filterwarnings("error", "Length of header")  # of pandas, which would cut 7,000 to 7
    with refusing(f"{spec} is empty or cannot be read"):
        rows = datasets.load_dataset(source, *names, split=split, **options)
        if rows.info.builder_name == "csv" and source != "csv":  # in a folder, or on the Hub
            rows = datasets.load_dataset(source, *names, split=split, **TEXT)
        return rows


def load_examples(spec, split, config, tokenizer):
    """{prompt ids: example} of what load_rows reads, shuffled, each prompt once; empty and overlong
    prompts are left out, and so is what our rewards cannot grade."""
    rows = load_rows(spec, split).shuffle(seed=0)  # not --seed, so that all runs have the same data
    flat = rows.flatten()  # data for verl nest the answer
    prompts = [name for name in config.prompt_column.split(",") if name in flat.column_names]
    answers = [name for name in config.answer_column.split(",") if name in flat.column_names]
    is_ours = config.reward in REWARDS
    if not prompts or (is_ours and not answers):
        raise Refused(f"{spec} has {flat.column_names}: set --prompt_column and --answer_column")
    read_as = getattr(flat.features[answers[0]], "dtype", "JSON") if answers else "null"
    if config.reward == "exact" and not re.match("(large_)?string|u?int", read_as):
        raise Refused(f"{spec}: {answers[0]} was read as {read_as}; exact needs texts or integers")
    examples = {}
    gradable = 0
    for row, values in tqdm(zip(rows, flat), spec, len(rows), leave=False, delay=5):
        text = values[prompts[0]]
        # Ours and TRL's read one of these names; one's own reward keeps columns that have them.
        answer = dict.fromkeys(("answer", "solution"), values[answers[0]]) if answers else {}
        if is_ours and config.reward_function(["?"], [""], [answer["answer"]]) == [None]:
            continue
        gradable += 1
        with refusing(f"{spec} has a prompt that cannot be encoded"):
            prompt, ids = encode_prompt(text or "", config, tokenizer)
        if text and 0 < len(ids) <= config.max_prompt_tokens:
            row = row | answer if is_ours else answer | row
            examples[tuple(ids)] = row | {"prompt": prompt, "prompt_ids": ids}
    told = f"{spec}: {gradable} of {len(rows)} rows can be graded"
    told += f", {len(examples)} different prompts within --max_prompt_tokens"
    if not examples:
        raise Refused(f"{told}: see --reward and --answer_column")
    print(told)
    return examples


def encode_prompt(prompt, config, tokenizer):
    """A text or a list of messages -> the prompt as a reward gets it, and its ids. If the last of
    the messages is the assistant's, it is continued."""
    system, is_chat = config.system_prompt, isinstance(prompt, list)
    for message in prompt if is_chat else []:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [0]
        if not all(isinstance(part, str) for part in parts):
            raise Refused(f"a message needs a role and a text as its content: {message!r:.60}")
    looks = r"""\s*(\[\s*\{\s*["'](role|content|from)|\{\s*["'](messages|conversations))["']\s*:"""
    if isinstance(prompt, dict) or (not is_chat and re.match(looks, str(prompt))):
        raise Refused("it looks like a chat, but is not a list of messages")
    if tokenizer.chat_template:
        prompt = prompt if is_chat else [{"role": "user", "content": str(prompt)}]
        if system:
            others = [message for message in prompt if message["role"] != "system"]
            prompt = [{"role": "system", "content": system}, *others]
        goes_on = prompt[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        options = config.template_kwargs | options | {"return_dict": False}
        return prompt, tokenizer.apply_chat_template(prompt, **options)
    if is_chat:
        raise Refused(f"it is a chat, but {config.model} has no chat template")
    prompt = f"{system}\n\n{prompt}" if system else str(prompt)
    ids = tokenizer.encode(prompt)
    if ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text with it
        ids = ids[:-1]
    return prompt, ids


# ---- 11. The embedded task: sort digits
# Class: training prompts, fewest and most digits. Easy ones start solved, hard ones never are.
SORTING = {"easy": (461, 2, 3), "middle": (154, 9, 12), "hard": (409, 17, 20)}


def sorting_example(name, rng, tokenizer):
    """An example of a class: the prompt "4021=" has the answer "0124"."""
    _, fewest, most = SORTING[name]
    digits = rng.choices("0123456789", k=rng.randint(fewest, most))
    prompt = "".join(digits) + "="
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_ids": ids, "answer": "".join(sorted(digits))}


def sorting_data(config):
    """What user_data returns, for the embedded task. Evaluated is the middle class alone."""
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
    half.replace(cached)  # which is always whole
    return model


# ---- 12. Settings
def setting(default, text):
    """A field of Config: its default, or that with --model and that of the embedded task; help."""
    return field(default=default, metadata={"help": text, "metavar": ""})


# The least value of the numbers that may not be 0.
LEAST = {"prompts_per_step": 1, "group_size": 2, "inner_epochs": 1, "temperature": 1e-3}
LEAST |= {"max_completion_tokens": 1, "max_grad_norm": 1e-6, "max_prompt_tokens": 1}
LEAST |= {"rollout_batch_size": 1, "micro_batch_tokens": 1, "eval_samples": 1}


@dataclass
class Config:
    """All settings of the command line. Refuses what would silently go wrong."""

    # The method
    method: str = setting("dppo", "grpo, grpo-skip, dppo, dppo-proportional or module:Rule")
    objective: Literal["grpo", "dr_grpo", "dapo", "gspo"] = setting("grpo", "dr_grpo, dapo, gspo")
    prompt_prune_rate: float = setting(0.7, "r_q, share of the low-scoring prompts to prune")
    completion_prune_rate: float = setting(0.7, "r_o, share of low-scoring completions to prune")
    prompts_per_step: int = setting(32, "noise wanted, in unpruned prompts; no more are rolled out")
    group_size: int = setting(8, "G, completions of each prompt")
    inner_epochs: int = setting(1, "updates on each rollout")
    beta: float = setting(0.0, "weight of the KL term")
    learning_rate: float = setting((1e-6, 5e-5), "after the warm-up")
    warmup_steps: int = setting(10, "steps over which the learning rate rises")
    max_grad_norm: float = setting(1.0, "longer gradients are clipped")
    temperature: float = setting((1.0, 0.7), "of the samples")
    max_completion_tokens: int = setting((1024, 22), "longer are cut")
    # Model and data
    model: str = setting("", "causal LM, on the Hub or in a folder")
    dataset: str = setting("", "path, path:split or path:config:split, on the Hub or a file")
    prompt_column: str = setting("prompt,question,problem", "the first of these that exists")
    answer_column: str = setting("answer,solution,reward_model.ground_truth", "the same")
    system_prompt: str = setting("", "before every prompt, in place of its own system message")
    chat_template_kwargs: str = setting("{}", 'JSON, such as {"enable_thinking": false}')
    max_prompt_tokens: int = setting(512, "longer prompts are left out")
    reward: str = setting(("gsm8k", "exact"), "gsm8k, exact or module:function")
    eval_dataset: str = setting("", "like --dataset, with commas; without, held out of it")
    eval_prompts: int = setting(256, "prompts of an evaluation set, at most")
    eval_samples: int = setting(4, "samples of each prompt, k of avg@k")
    # The run
    steps: int = setting((300, 60), "training steps; 0 only evaluates")
    eval_every: int = setting((0, 10), "steps between evaluations; 0: none")
    save_every: int = setting(50, "steps between checkpoints; 0: only at the end")
    rollout_batch_size: int = setting(256, "sequences generated at a time, at least a prompt's")
    micro_batch_tokens: int = setting(4096, "tokens of a forward pass, at least a sequence")
    seed: int = setting(0, "of the prompts' order, the rollouts and the draws")
    output_dir: str = setting("", "folder of the run; without, a new one under runs/")
    history: str = setting("", "folder of an earlier run, to start with what it remembers")
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
            self.template_kwargs = dict(**json.loads(self.chat_template_kwargs))
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
def as_json(value):
    """JSON, which lacks NaN and infinity: they become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))


def evaluate(task, config):
    """-> avg@k of each set, and `accuracy` over all, of the rewards that are given."""
    transformers.set_seed(config.seed % 2**32)  # the same every time
    k = config.eval_samples
    rewards = {name: rollout(task, rows, k, config)[1] for name, rows in task.evals.items()}
    sets = {name: {f"avg@{k}": of_set.nanmean().item()} for name, of_set in rewards.items()}
    together = torch.cat([torch.zeros(0), *map(torch.flatten, rewards.values())])
    return {"accuracy": together.nanmean().item(), **sets}


def make_step(records, task, rule, optimizer, reference, config):
    """Makes the next step, and adds its record."""
    started_at = time.perf_counter()
    last = records[-1]
    memory = copy.deepcopy(rule.memory)
    # The draws have a generator of their own, as a reward function may seed torch's global one.
    seen = last["candidates_so_far"]
    transformers.set_seed((1_000_003 * config.seed + seen) % 2**32)
    generator = torch.Generator().manual_seed(torch.randint(2**32, ()).item())
    upcoming = next_prompts(seen, len(task.train), config.seed)
    number = last["step"] + 1
    rate = config.learning_rate * min(1.0, number / max(1, config.warmup_steps))
    optimizer.param_groups[0]["lr"] = rate
    means = Means(**last["means"])
    try:
        step = dppo_step(task, rule, optimizer, reference, upcoming, means, generator, config)
        seconds, in_rollout = time.perf_counter() - started_at, step.rollout_seconds
        record = {"step": number, "updates": optimizer.updates, **record_of(step, task)}
        record |= {"candidates_so_far": seen + step.N, "learning_rate": rate}
        record |= {"rollout_seconds": in_rollout, "train_seconds": seconds - in_rollout}
        record["cumulative_seconds"] = last["cumulative_seconds"] + seconds
        records.append(record)
    except BaseException:
        rule.memory = memory  # that of the last record
        raise


def record_of(step, task):
    """What is recorded of a step: means over the window, estimated with the prompts' weights, of
    groups that have a reward; entropy, clip_fraction and kl of the last update; a group."""
    B, G = step.rewards.shape
    completions = [sequence.completion for sequence in step.sequences]
    truncated = torch.tensor([ids[-1] not in task.end_ids for ids in completions]).view(B, G)
    of_groups = {"reward": step.rewards.nanmean(dim=1)}
    of_groups |= {"zero_variance_fraction": ~step.A.any(dim=1)}
    of_groups |= {"completion_length": step.lengths.mean(dim=1)}
    of_groups |= {"truncated_fraction": truncated.double().mean(dim=1)}
    w_q = step.w_q * ~step.rewards.isnan().all(dim=1)  # (B,)
    record = {"prompts_seen": step.N, "prompts_rolled": B, "weight_max": step.w.max().item()}
    for name, values in of_groups.items():
        record[name] = (w_q @ values.double().nan_to_num() / w_q.sum()).item()
    record |= {"means": step.means._asdict(), **step.updates[-1]}
    record["rollout_worth"] = step.means.worth(step.means.pruned)
    record["prompt_worth"] = step.means.worth(step.means.prompts_pruned)
    for name in ("completions_trained", "tokens_trained"):
        record[name] = sum(update[name] for update in step.updates)
    norms = torch.tensor([update["grad_norm"] for update in step.updates])
    record["grad_norm"] = norms.max().item()  # NaN if one is NaN
    q = step.w.any(dim=1).int().argmax().item()  # the first group that is trained
    record["prompt"] = task.tokenizer.decode(step.sequences[G * q].prompt)
    record["completions"] = task.tokenizer.batch_decode(completions[G * q : G * (q + 1)])
    return record | {"rewards": step.rewards[q].tolist(), "weights": step.w[q].tolist()}


def start(config, task, rule, optimizer):
    """The folder of a run and its records so far. With --resume, rule and optimizer get back what
    they had. A new folder is made last: a run that is refused leaves nothing behind."""
    out = Path(config.resume or config.output_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
    if out.exists() and not config.resume:
        advice = ", or --resume it" * (out / "checkpoint.pt").exists()
        raise Refused(f"{out} exists: name another --output_dir{advice}")
    data = repr([(row["prompt"], row.get("answer")) for row in task.train])
    first = {"step": 0, "updates": 0, "candidates_so_far": 0, "means": Means()._asdict()}
    first |= {"cumulative_seconds": 0.0, "method": config.method, "data": zlib.crc32(data.encode())}
    folder = config.resume or config.history
    if folder:
        with refusing(f"{folder}/checkpoint.pt cannot be read"):  # weights_only: no code can run
            options = {"weights_only": True, "mmap": not config.resume}  # the memory is a few MB
            saved = torch.load(Path(folder, "checkpoint.pt"), "cpu", **options)
            earlier = saved["records"]
            first["candidates_so_far"] = earlier[-1]["candidates_so_far"]
            # Noise depends on settings that may be others now, so worth starts at 1 again.
            first["means"] = Means(earlier[-1]["means"]["length"])._asdict()
            rule.memory |= saved["memory"]
        if any(earlier[0][name] != first[name] for name in ("method", "data")):
            raise Refused(f"{folder} was made with another method or other data")
    # A rule of the user's own should fail here rather than after the evaluation.
    trial = config.rule_class(config, len(task.train))
    trial.memory = copy.deepcopy(rule.memory)
    prune_prompts(trial, torch.arange(len(task.train)), config.prompts_per_step, torch.Generator())
    if config.resume:
        restore(saved, config, optimizer)
        print(f"{out}: goes on after step {earlier[-1]['step']} of {config.steps}")
    with refusing(f"{out} cannot be written"):
        out.mkdir(parents=True, exist_ok=bool(config.resume))
        (out / "config.partial").write_text(json.dumps(asdict(config) | {"resume": ""}, indent=2))
        (out / "config.partial").replace(out / "config.json")
    return out, earlier if config.resume else [first]


@torch.no_grad()
def restore(saved, config, optimizer):
    """Gives an optimizer and its model back what they had, if the settings are those of the run."""
    free = ("steps", "save_every", "eval_every", "micro_batch_tokens", "rollout_batch_size")
    wanted = json.loads(Path(config.resume, "config.json").read_text())
    for name, value in asdict(config).items():
        if wanted.get(name) != value and name not in (*free, "resume"):
            raise Refused(f"--{name} must be {wanted.get(name)!r}: the run was made with it")
    optimizer.updates = saved["records"][-1]["updates"]
    optimizer.load_state_dict(saved["optimizer"])
    for weight, master, value in zip(optimizer.weights, optimizer.masters, saved["weights"]):
        master.copy_(value)
        weight.copy_(value)


def save_checkpoint(out, records, rule, optimizer):
    saved = {"records": records, "memory": rule.memory, "weights": optimizer.masters}
    torch.save(saved | {"optimizer": optimizer.state_dict()}, out / "partial.pt")
    (out / "partial.pt").replace(out / "checkpoint.pt")  # which is always whole


def make_steps(out, records, task, rule, optimizer, reference, config):
    """Evaluates the last step, if that is due, and makes those that are left. Ctrl-C stops it after
    the step that it is at, a second one at once."""

    def stop(*_):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # Ctrl-C also ends what reads a pipe
            print("\nstops after this step; Ctrl-C again stops at once", file=sys.stderr)

    signal.signal(signal.SIGINT, stop)
    made = records[-1]["step"]
    last = max(made, config.steps)
    with (out / "metrics.jsonl").open("w") as file, tqdm(total=last, initial=made) as bar:
        file.writelines(as_json(record) + "\n" for record in records[:-1])
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
            print(as_json(record), file=file, flush=True)
            if config.save_every and number % config.save_every == 0 and made < number < last:
                save_checkpoint(out, records, rule, optimizer)
            if signal.getsignal(signal.SIGINT) != stop:
                break


def train(config, task):
    """Makes a run, or the rest of one -> the summary. Unless it ends amid the updates of a step,
    the last step and its model are saved. A Ctrl-C that stopped it is raised at the end."""
    rule = config.rule_class(config, len(task.train))
    reference = copy.deepcopy(task.model) if config.beta > 0 else None
    optimizer = MasterAdam(task.model, config.learning_rate)
    out, records = start(config, task, rule, optimizer)
    goes_on = True
    try:
        try:
            make_steps(out, records, task, rule, optimizer, reference, config)
        finally:
            if optimizer.updates == records[-1]["updates"]:  # not amid those of a step
                save_checkpoint(out, records, rule, optimizer)
                task.model.save_pretrained(out / "model")
                task.tokenizer.save_pretrained(out / "model")
        goes_on = records[-1]["step"] < config.steps
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if goes_on and (out / "checkpoint.pt").exists():
            print(f"\ngo on with: python dppo.py --resume={str(out)!r}")
    if goes_on:
        raise KeyboardInterrupt
    before, after = records[0]["evaluation"], records[-1]["evaluation"]
    seconds, worth = records[-1]["cumulative_seconds"], records[-1].get("rollout_worth", 1.0)
    key = f"avg@{config.eval_samples}"
    texts = [f"{name} {before[name][key]:.2f} -> {after[name][key]:.2f}" for name in task.evals]
    told = f"accuracy: {', '.join(texts)}" if texts else "nothing was evaluated"
    told += f"; a rollout was worth {worth:.1f} without pruning"
    print(f"{told}; {seconds:.0f} s of training; results are in {out}")
    return {"before": before, "after": after, "seconds": seconds}


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
        if resume:  # its settings, before those given beside it, as the last one counts
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
    sys.modules["dppo"] = sys.modules["__main__"]  # so that a fork's `import dppo` is this module
    main()
