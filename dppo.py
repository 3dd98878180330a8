"""Dynamic Pruning Policy Optimization (DPPO) in one file: GRPO with unbiased pruning.

After "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" (Zhu et al., 2026,
arXiv 2603.04135), known to us by its abstract and reviews that quote it; docstrings say how we read
the rest. (TRL's `dppo` is another method.)

GRPO answers each prompt several times and learns from the differences, so a group that is all right
or all wrong teaches nothing. DPPO prunes prompts before and completions after the rollout, both at
random, and divides a loss by its probability of being kept, so the expected gradient is still that
of all candidates.

    python dppo.py  # a small model learns to sort digits, offline, in two minutes

    q, i      a prompt; a completion
    N         candidate prompts, a step's window
    limit, B  the most prompts that a step may keep; how many it keeps
    G         completions of a prompt, its group
    A         advantage of a completion
    P, pi     probability of being pruned, of being kept: pi = 1 - P
    r_q, r_o  rates at which low-scoring prompts, completions are pruned
    w         1/pi where kept, 0 where pruned: w_q of a prompt, w_qi of a completion, w = w_q w_qi
    C         factor of the paper's weight C/(1 - P)
    rho       ratio of a token's probabilities under the new and the old policy
    beta      weight of the KL term
    l, Z      loss of a completion: the sum of its tokens' losses, divided by Z
    L, L_hat  mean of l over the window's N G completions; mean of w l, its estimate
"""

import copy
import csv
import glob
import inspect
import json
import math
import pkgutil
import random
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

import datasets
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# ======== Part I: the paper ========


class Refused(ValueError):
    """Bad input, which the command line reports in one line."""


# ---- 1. Advantages and pruning
def group_advantages(rewards, scale_by_std=True):
    """(B, G) rewards -> (B, G) float64 A = (reward - mean)/(std + 1e-4), or reward - mean, with the
    mean and std (divisor n - 1) of those that are not missing (NaN). A is exactly 0 if these are
    equal, and for a missing one. To centre A again after pruning would bias the gradient."""
    rewards = rewards.double()
    A = rewards - rewards.nan_to_num(math.inf).amin(dim=1, keepdim=True)  # equal ones give 0
    A = A - A.nanmean(dim=1, keepdim=True)
    if scale_by_std:
        divisor = ((~rewards.isnan()).sum(dim=1, keepdim=True) - 1).clamp(min=1)
        std = (A.square().nansum(dim=1, keepdim=True) / divisor).sqrt()
        A = A / (std + 1e-4)
    return A.masked_fill(rewards.isnan(), 0.0)


def has_gradient(advantages, beta):
    """(B, G) bool: False where A = 0 and there is no KL, so that the gradient is 0."""
    return (advantages != 0) | (beta > 0)


def keep_probabilities(scores, rate):
    """The paper's rule, as we read it: scores >= 0 -> float64 pi. Each of the k items that score
    below the mean has pi = 1 - floor(rate k)/k, so that a draw over all prunes floor(rate k) of
    them. Others, also those without a score (NaN), have pi = 1. (The paper's Algorithm 1 reportedly
    removes the lowest outright: pi = 0 despite a gradient, against its own proof.)"""
    scores = scores.double()
    low = scores < scores.nanmean() * (1 - 1e-6)  # equal ones are not below
    k = int(low.sum())
    pruned = math.floor(rate * k + 1e-9)  # 0.29 * 100 < 29
    return torch.ones_like(scores).masked_fill(low, (k - pruned) / max(1, k))


def draw(pi, generator):
    """(n,) pi -> (n,) weights: 1/pi where kept, 0 where pruned. Wherever pi > 0, their mean is
    pi (1/pi) + (1 - pi) 0 = 1. The sampling is systematic: items lie end to end in random order,
    each as long as its pi, and those are kept on which a tooth of the comb u, u + 1, u + 2, ...
    falls, with u uniform in [0, 1). If pi is 0.5, 1, 0.25, 0.25, u = 0.6 keeps the 2nd and 3rd."""
    order = torch.randperm(len(pi), generator=generator)
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    bounds = torch.cat([torch.zeros(1), pi[order].cumsum(0)])  # (n + 1,)
    teeth = (bounds - u).ceil()  # below each bound; in the example 0, 0, 1, 2, 2
    kept = order[teeth[:-1] < teeth[1:]]
    return torch.zeros_like(pi).scatter(0, kept, 1 / pi[kept])


class Rule:
    """What is kept, and with which probability: here everything, as in textbook GRPO. A subclass is
    unbiased if prompts, and completions with a gradient, have a pi > 0 that is known before the
    draw: a prompt's from memory alone, a completion's also from w_q and the rollout."""

    unbiased = True  # False: all that is kept weighs the same
    remembers = {}  # {name: initial value}, one number per prompt

    def __init__(self, config, prompt_count):
        self.config = config
        self.prompt_count = prompt_count
        zeros = torch.zeros(prompt_count, dtype=torch.float64)
        self.memory = {name: zeros + value for name, value in self.remembers.items()}

    def prompts_to_keep(self, upcoming):
        """The limit of a step, from memory alone."""
        return self.config.prompts_per_step

    def prompt_probabilities(self):
        """(all prompts,) pi, from memory alone."""
        return torch.ones(self.prompt_count, dtype=torch.float64)

    def completion_probabilities(self, advantages, prompt_weights):
        """(B, G) A, (B,) w_q -> (B, G) pi."""
        return torch.ones_like(advantages)

    def remember(self, prompts, rewards, advantages):
        """Takes a rollout into memory: (B,) prompts, (B, G) rewards, (B, G) A."""


class GRPOSkip(Rule):
    """Skips completions without a gradient, which adds no bias and no variance."""

    def completion_probabilities(self, advantages, prompt_weights):
        return has_gradient(advantages, self.config.beta).double()


class DPPO(Rule):
    """The paper's rule. A completion's score is |A|, and a prompt's the mean |A| of its group at
    its last visit. Completions without a gradient are pruned, and only the others compared."""

    remembers = {"score": math.nan}

    def prompt_probabilities(self):
        return keep_probabilities(self.memory["score"], self.config.prompt_prune_rate)

    def completion_probabilities(self, advantages, prompt_weights):
        needed = has_gradient(advantages, self.config.beta)
        scores = torch.where(needed, advantages.abs(), math.nan)
        return needed * keep_probabilities(scores, self.config.completion_prune_rate)

    def remember(self, prompts, rewards, advantages):
        for q, A in zip(prompts, advantages):  # one may come twice: the last counts
            self.memory["score"][q] = A.abs().mean()


def check_probabilities(rule, pi, needed):
    """Refuses what is no probability and, if the rule is unbiased, pi = 0 where `needed`."""
    valid = pi.shape == needed.shape and ((pi >= 0) & (pi <= 1 + 1e-9)).all()  # NaN fails
    if not valid or (rule.unbiased and (pi[needed] == 0).any()):
        raise Refused(f"a rule needs pi of shape {tuple(needed.shape)}, 0 < pi <= 1 for a gradient")


def window_of(pi, upcoming, limit):
    """The longest prefix of the upcoming prompts whose pi sum to at most `limit`."""
    return upcoming[pi[upcoming].cumsum(0) <= limit + 1e-9]


def prune_prompts(rule, upcoming, limit, generator):
    """Before the rollout: (n,) upcoming prompts -> N; (B,) those that are kept; (B,) w_q. The limit
    is fixed in advance, and the window follows from pi; the draw keeps their sum, rounded.
    To look on until enough have survived would make N depend on the draw, and bias the gradient."""
    pi = rule.prompt_probabilities().double()  # (all prompts,)
    check_probabilities(rule, pi, needed=torch.ones(rule.prompt_count).bool())
    window = window_of(pi, upcoming, limit)  # (N,)
    pi = pi[window]
    if not pi.any():
        raise Refused("a rule needs pi > 0 for some upcoming prompts")
    weights = draw(pi / pi.sum().clamp(max=1), generator)  # a sum below 1 becomes 1: one is kept
    kept = weights > 0
    return len(window), window[kept], weights[kept]


def prune_completions(rule, advantages, prompt_weights, generator):
    """After the rollout: (B, G) A, (B,) w_q -> (B, G) w_qi."""
    pi = rule.completion_probabilities(advantages, prompt_weights).double()
    check_probabilities(rule, pi, needed=has_gradient(advantages, rule.config.beta))
    return draw(pi.flatten(), generator).view_as(pi)


# ---- 2. Rollout
class Sequence(NamedTuple):
    prompt: list  # of token ids
    completion: list  # likewise, with its end id unless cut


@torch.inference_mode()
def decode(model, input_ids, generation_config, samples, temperature, end_ids, **inputs):
    """(prompts, tokens) ids -> (prompts * samples, max_new_tokens) ids of completions, -1 after
    their end; their log-probabilities. `model.generate` runs this loop in place of its own, which
    may apply top_k and the like. Here softmax(logits/temperature) is sampled, as it is trained."""
    cache_name = "cache" if "cache" in inputs else "past_key_values"  # the latter until v5.22
    cache, mask = inputs[cache_name], inputs["attention_mask"]
    mask = torch.ones_like(input_ids) if mask is None else mask  # None: no padding
    new = input_ids
    rows = torch.arange(len(new) * samples, device=new.device)  # that have not ended
    tokens = new.new_full((len(rows), generation_config.max_new_tokens), -1)
    logprobs = torch.zeros_like(tokens, dtype=torch.float32)

    for t in range(tokens.shape[1]):
        # Read what is new, at first the prompts.
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
        state = {"attention_mask": mask, "position_ids": positions, cache_name: cache}
        logits = model(new, **state, logits_to_keep=1).logits[:, -1].float() / temperature
        if t == 0:
            cache.batch_repeat_interleave(samples)
            logits = logits.repeat_interleave(samples, dim=0)
            mask = mask.repeat_interleave(samples, dim=0)

        # Sample one token for each row.
        log_p = logits.log_softmax(dim=-1)
        new = log_p.exp().multinomial(1)
        tokens[rows, t] = new[:, 0]
        logprobs[rows, t] = log_p.gather(1, new)[:, 0]

        # Rows that have ended leave.
        live = torch.isin(new[:, 0], end_ids, invert=True).nonzero()[:, 0]
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
    mask = (ids >= 0).long()
    options = {"custom_generate": decode, "samples": samples, "temperature": config.temperature}
    options |= {"end_ids": ids.new_tensor(task.end_ids), "pad_token_id": 0}
    options |= {"max_new_tokens": config.max_completion_tokens, "cache_implementation": "dynamic"}
    options |= {"do_sample": True, "num_beams": 1, "use_cache": True}
    tokens, logprobs = task.model.generate(ids.clamp(min=0), attention_mask=mask, **options)
    sequences = []
    for i, row in enumerate(tokens.cpu()):
        sequences.append(Sequence(prompts[i // samples], row[row >= 0].tolist()))
    return sequences, logprobs[tokens >= 0]


def rollout(task, examples, samples, config):
    """-> `samples` sequences of each example, in order; (examples, samples) rewards; seconds."""
    started_at = time.perf_counter()
    prompts = [example["prompt_ids"] for example in examples]
    sequences = []
    size = max(1, config.rollout_batch_size // samples)
    for start in tqdm(range(0, len(prompts), size), "rollout", leave=False, delay=5):
        sequences += sample(task, prompts[start : start + size], samples, config)[0]
    rewards = reward_completions(task, examples, sequences)
    return sequences, rewards, time.perf_counter() - started_at


# ---- 3. Dense Prompt Packing
def pack(lengths, capacity, lookahead=64):
    """The paper's window-based greedy packing: lengths, from 1 to `capacity` -> slots, lists of
    indices whose lengths sum to no more. Of the next `lookahead`, the longest that fits goes into
    the open slot or, if none fits, opens another."""
    waiting = list(range(len(lengths)))
    slots = []
    room = 0
    while waiting:
        fitting = [i for i in waiting[:lookahead] if lengths[i] <= room]
        if not fitting:
            slots.append([])
            room = capacity
            fitting = waiting[:lookahead]
        longest = max(fitting, key=lambda i: lengths[i])
        slots[-1].append(longest)
        room -= lengths[longest]
        waiting.remove(longest)
    return slots


def pack_micro_batches(sequences, indices, config):
    """The sequences at `indices` -> micro-batches, lists of slots of indices. As attention costs
    the square of a slot's length, a slot is as long as the longest sequence, at least 128."""
    lengths = [len(sequences[i].prompt) + len(sequences[i].completion) for i in indices]
    capacity = max([128, *lengths])
    slots = []
    for slot in pack(lengths, capacity):
        slots.append([indices[place] for place in slot])
    size = max(1, config.micro_batch_tokens // capacity)
    return [slots[i : i + size] for i in range(0, len(slots), size)]


def lay_out(sequences, slots):
    """Lays the sequences of a slot end to end -> (slots, length, 3): each token's id, position and
    owner: its sequence's index if the *next* token, which it predicts, is of the completion, else
    -1. As positions restart at 0, transformers keeps sequences apart."""
    rows = []
    for slot in slots:
        row = []
        for i in slot:
            prompt, completion = sequences[i]
            owners = [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
            row += zip(prompt + completion, count(), owners)
        rows.append(row)
    length = math.ceil(max(map(len, rows)) / 8) * 8  # multiples of 8 are fast
    return torch.tensor([row + [(0, 0, -1)] * (length - len(row)) for row in rows])


# ---- 4. Loss and update
def token_logprobs(head, hidden, targets, temperature):
    """(n, width) hidden states, (n,) next tokens -> (n,) their log-probabilities."""
    logprobs = head(hidden).float().div_(temperature).log_softmax(dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0]


def completion_logprobs(model, sequences, slots, temperature):
    """The forward pass -> (tokens,) log-probabilities of the completions' tokens; their owners."""
    input_ids, position_ids, owner = lay_out(sequences, slots).to(model.device).unbind(dim=2)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    predicts = owner >= 0  # (slots, length)
    hidden = output.last_hidden_state[predicts]  # (tokens, width)
    targets = input_ids.roll(-1, dims=1)[predicts]  # (tokens,)

    # Logits of 8,192 tokens are 5 GB, so 512 are made at a time, and again in backward().
    parts = []
    for piece in zip(hidden.split(512), targets.split(512)):
        parts.append(checkpoint(token_logprobs, head, *piece, temperature, use_reentrant=False))
    return torch.cat(parts), owner[predicts]


@torch.no_grad()
def frozen_logprobs(model, sequences, indices, config):
    """{index: (length,) log-probabilities} of the completions at `indices`."""
    result = {}
    for slots in pack_micro_batches(sequences, indices, config):
        logprobs, owner = completion_logprobs(model, sequences, slots, config.temperature)
        result |= {i: logprobs[owner == i] for i in chain(*slots)}
    return result


CLIPPING = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2)}  # how far below and above 1 rho may be
CLIPPING |= {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


def token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config):
    """(tokens,) new, old and reference log-probabilities, (tokens,) owners, A by owner -> (tokens,)
    losses -min(rho A, clip(rho, 1 - down, 1 + up) A) + beta KL."""
    log_ratio = logprobs - old_logprobs
    if config.objective == "gspo":
        means = torch.zeros_like(A).scatter_reduce(0, owner, log_ratio, "mean", include_self=False)
        log_ratio = means[owner]  # one for each completion
    rho = log_ratio.exp()
    A = A[owner]  # (tokens,)
    down, up = CLIPPING[config.objective]
    surrogate = torch.min(rho * A, rho.clamp(1 - down, 1 + up) * A)
    log_x = ref_logprobs - logprobs
    kl = log_x.exp() - 1 - log_x  # k3, for x = p_ref/p
    return config.beta * kl - surrogate


def normalizer(lengths, mean_length, config):
    """(B, G) lengths -> (B, G) Z: the length for grpo and gspo, otherwise a constant. dapo wants
    the window's mean length, unknown where prompts are pruned. A moving mean of *earlier* steps,
    fixed before the draw, replaces it. A first step takes its own: unbiased if all are kept."""
    if config.objective == "dr_grpo":
        return torch.full_like(lengths, config.max_completion_tokens)
    if config.objective == "dapo":
        return torch.full_like(lengths, mean_length or lengths.mean())
    return lengths


def train_step(model, optimizer, sequences, advantages, shares, old, ref, config):
    """One update with (B, G) A and shares w/(N G Z) of the loss -> metrics. old, ref: from
    frozen_logprobs, or None; without `old`, rho = 1 and its gradient is that of log p."""
    A = advantages.flatten().float().to(model.device)
    share = shares.flatten().float().to(model.device)
    kept = share.nonzero()[:, 0].tolist()
    for slots in pack_micro_batches(sequences, kept, config):
        batch = list(chain(*slots))
        logprobs, owner = completion_logprobs(model, sequences, slots, config.temperature)
        old_logprobs = torch.cat([old[i] for i in batch]) if old else logprobs.detach()
        ref_logprobs = torch.cat([ref[i] for i in batch]) if ref else logprobs.detach()
        losses = token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config)
        loss = share[owner] @ losses
        loss.backward()

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
    if 0 < grad_norm < math.inf:  # at 0, Adam would move on its momentum; NaN would spread
        optimizer.step()
    model.zero_grad()
    tokens = sum(len(sequences[i].completion) for i in kept)
    return {"completions_trained": len(kept), "tokens_trained": tokens, "grad_norm": grad_norm}


# ---- 5. The paper's algorithm
@dataclass
class Step:
    limit: int
    N: int
    prompts: torch.Tensor  # (B,)
    w_q: torch.Tensor  # (B,)
    w: torch.Tensor  # (B, G), of the first update
    sequences: list  # B G, group by group
    rewards: torch.Tensor  # (B, G)
    A: torch.Tensor  # (B, G)
    mean_length: float  # moving mean
    updates: list  # metrics of each
    rollout_seconds: float


def dppo_step(task, rule, optimizer, reference, upcoming, mean_length, generator, config):
    """One step of the paper's algorithm -> Step. reference: the model of the KL term; upcoming:
    (all prompts,) the next ones in order; mean_length: of earlier completions, or 0.

    Memory, limit and N are fixed before the draw of prompts, so w_q has mean 1. Given that draw and
    its rollouts, w_qi has mean 1 wherever l has a gradient. As a rollout is independent of the draw
    of its prompt, the gradient of L_hat is on average that of L.

    The paper averages over what it keeps, weighted by C/(1 - P), which is the same if C is
    kept/(N G), as we read it: (1/kept) C/(1 - P) = 1/(N G pi) = w/(N G) (Horvitz-Thompson)."""
    G = config.group_size

    # 1. Prune prompts, from memory.
    limit = rule.prompts_to_keep(upcoming)
    N, prompts, w_q = prune_prompts(rule, upcoming, limit, generator)

    # 2. Roll out those that are kept.
    examples = [task.train[q] for q in prompts.tolist()]
    sequences, rewards, seconds = rollout(task, examples, G, config)  # B G; (B, G)
    A = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")  # (B, G)
    lengths = A.new_tensor([len(sequence.completion) for sequence in sequences]).view_as(A)
    Z = normalizer(lengths, mean_length, config)

    # 3. Prune completions, anew for every update. (As prompts are not, later ones may be biased.)
    weights = []  # (B, G) for each update
    for _ in range(config.inner_epochs):
        w_qi = prune_completions(rule, A, w_q, generator)
        if rule.unbiased:
            w = w_q[:, None] * w_qi
        else:  # L_hat is the plain mean of what is kept: w/(N G Z) = 1/(kept Z)
            w = (w_qi > 0) * N * G / w_qi.count_nonzero().clamp(min=1)
        weights.append(w)

    # 4. Log-probabilities under the reference and, for later updates, the old policy.
    trained = sum(weights).flatten().nonzero()[:, 0].tolist()
    ref = frozen_logprobs(reference, sequences, trained, config) if config.beta > 0 else None
    old = frozen_logprobs(task.model, sequences, trained, config) if len(weights) > 1 else None

    # 5. Pack what is kept, and update. The first update trains the policy that sampled.
    updates = []
    for number, w in enumerate(weights):
        inputs = (sequences, A, w / (N * G * Z), old if number > 0 else None, ref, config)
        updates.append(train_step(task.model, optimizer, *inputs))

    # 6. Remember last: a step that fails changes no memory.
    rule.remember(prompts, rewards, A)
    length = (w_q @ lengths.mean(dim=1) / w_q.sum()).item()  # of the window, estimated
    moving = 0.9 * (mean_length or length) + 0.1 * length
    return Step(limit, N, prompts, w_q, weights[0], sequences, rewards, A, moving, updates, seconds)


# ======== Part II: beyond the paper ========


def proportional_probabilities(scores, rate, top):
    """Scores >= 0 -> float64 pi: a line from 1 - rate at score 0 to 1 at `top`, and 1 above it,
    without a score (NaN) or without a top (0 or NaN). It mixes a constant, so no 1/pi exceeds
    1/(1 - rate), with pi in proportion to scores, best if these are gradients' norms (Neyman)."""
    share = (scores.double() / top).clamp(max=1)  # 0/0 is NaN
    return (1 - rate * (1 - share)).nan_to_num(1.0)


class ProportionalDPPO(Rule):
    """What teaches most is always kept, what teaches nothing with probability 1 - r, and a step
    rolls out as few prompts as give the noise of prompts_per_step unpruned ones. A completion
    scores w_q |A|, and a prompt the root of the mean A^2 to expect of its next group: prompts of a
    similar success rate share a bin, which learns their mean A^2 at later visits."""

    remembers = {"rewards": 0.0, "count": 0.0}  # decayed sum and number
    prior = 0.05  # successes, and failures, before any visit
    decay = 0.8  # factor of memory at each visit, as the policy changes
    bins = 17  # of equal width in asin(sqrt(success rate))
    forget = 0.998  # factor of bins at each step

    def __init__(self, config, prompt_count):
        super().__init__(config, prompt_count)
        x = (torch.arange(self.bins).double() + 0.5) / self.bins  # the middles
        self.memory["visits"] = torch.full_like(x, 4)  # a guess worth four
        self.memory["squares"] = 4 * (0.1 + 0.9 * (math.pi * x).sin() ** 2)  # sin^2 = 4p(1 - p)
        self.memory["range"] = torch.full((2,), math.nan).double()  # of rewards so far

    def bin_of_prompts(self):
        """(all prompts,) the bin of each, or -1 before its first visit. A success rate is the mean
        reward, scaled to the range of rewards so far."""
        total, count = self.memory["rewards"], self.memory["count"]
        lowest, highest = self.memory["range"]
        successes = ((total - lowest * count) / (highest - lowest)).nan_to_num(0.0)
        rate = (self.prior + successes) / (2 * self.prior + count)
        x = rate.clamp(0, 1).sqrt().asin() / (math.pi / 2)
        bins = (x * self.bins).long().clamp(max=self.bins - 1)
        return bins.masked_fill(count == 0, -1)

    def expected_squares(self):
        """(all prompts,) A^2 to expect: the bin's mean or, before a visit, that of others, or 1."""
        squares = (self.memory["squares"] / self.memory["visits"])[self.bin_of_prompts()]
        visited = self.memory["count"] > 0
        return torch.where(visited, squares, squares[visited].mean().nan_to_num(1.0))

    def prompts_to_keep(self, upcoming):
        """prompts_per_step over a rollout's worth: mean(s^2)/k, the noise of k unpruned prompts,
        over mean(s^2/pi)/n, that of k kept of n = k/mean(pi), for expected squares s^2."""
        pi = self.prompt_probabilities()
        window = window_of(pi, upcoming, self.config.prompts_per_step)
        pi, squares = pi[window], self.expected_squares()[window]
        worth = squares.mean() / (pi.mean() * (squares / pi).mean())
        return max(1, round(self.config.prompts_per_step / max(1.0, worth.item())))

    def prompt_probabilities(self):
        scores = self.expected_squares().sqrt()
        scores[self.memory["count"] == 0] = math.nan
        top = scores.nan_to_num(0.0).max()  # 0 before any visit
        return proportional_probabilities(scores, self.config.prompt_prune_rate, top)

    def completion_probabilities(self, advantages, prompt_weights):
        needed = has_gradient(advantages, self.config.beta)
        scores = advantages.abs() * prompt_weights[:, None]
        top = scores[needed].mean()  # NaN if there is none
        return needed * proportional_probabilities(scores, self.config.completion_prune_rate, top)

    def remember(self, prompts, rewards, advantages):
        memory = self.memory
        bins = self.bin_of_prompts()  # before this visit
        seen = torch.cat([memory["range"], rewards.flatten()])
        if seen.isnan().all():
            return
        memory["range"] = torch.stack(seen[~seen.isnan()].aminmax())
        lowest, highest = memory["range"]

        # In units of the range or, for dr_grpo, of half of it, A^2 fits __init__'s guess.
        scale_by_std = self.config.objective != "dr_grpo"
        A = group_advantages((rewards - lowest) / (highest - lowest), scale_by_std)
        squares = A.square().mean(dim=1) * (1 if scale_by_std else 4)
        memory["visits"] *= self.forget
        memory["squares"] *= self.forget
        for q, group, square in zip(prompts, rewards, squares):
            if bins[q] >= 0 and not group.isnan().all():
                memory["visits"][bins[q]] += 1
                memory["squares"][bins[q]] += square  # no w_q: a bin shares one pi
            reward = group.nanmean().nan_to_num(lowest.item())  # if none: the lowest
            memory["rewards"][q] = self.decay * memory["rewards"][q] + len(group) * reward
            memory["count"][q] = self.decay * memory["count"][q] + len(group)


RULES = {"grpo": Rule, "grpo-skip": GRPOSkip}
RULES |= {"dppo": DPPO, "dppo-proportional": ProportionalDPPO}

# ======== Part III: the plumbing ========

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
torch.backends.cuda.enable_cudnn_sdp(False)  # it may give NaN gradients (pytorch#196678)


# ---- 6. Order, precision, and which models can be trained
def next_prompts(seen, prompt_count, seed):
    """(prompt_count,) the prompts after `seen` candidates; each epoch has its own order."""
    epoch, start = divmod(seen, prompt_count)
    order = []
    for n in (epoch, epoch + 1):
        order += random.Random(f"{seed}, {n}").sample(range(prompt_count), prompt_count)
    return torch.tensor(order[start : start + prompt_count])


class MasterAdam(torch.optim.Adam):
    """Adam on float32 masters of the weights, as bfloat16 would round small updates away."""

    def __init__(self, model, learning_rate):
        self.updates = 0
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        super().__init__(self.masters, lr=learning_rate, betas=(0.9, 0.99), fused=True)
        model.zero_grad()  # an interrupted step may have left some
        for weight in self.weights:
            weight.grad_dtype = torch.float32

    @torch.no_grad()
    def step(self):
        self.updates += 1  # first, since an update may fail halfway
        for weight, master in zip(self.weights, self.masters):
            master.grad = weight.grad
        super().step()
        for weight, master in zip(self.weights, self.masters):
            weight.copy_(master)
            master.grad = None  # or it would outlive model.zero_grad()


@contextmanager
def refusing(what):
    """Turns what fails inside into Refused, but for want of memory and the user's own code."""
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or hasattr(error, "__notes__"):
            raise
        cause = str(error.__cause__ or error.__context__ or "")  # an error may say nothing
        raise Refused(f"{what}{error} {'' if cause in str(error) else cause}") from error


@torch.no_grad()
def check_sampling(task, config):
    """Refuses a model whose trained policy is not the one that samples, as rho is taken to be 1."""
    model = task.model
    prompts = [example["prompt_ids"] for example in chain(task.train, *task.evals.values())]
    shortest, longest = min(prompts, key=len), max(prompts, key=len)
    with refusing(f"{type(model).__name__} cannot be trained here: "):
        # Does the head alone make the logits? (bfloat16 rounds.)
        ids = torch.tensor([shortest], device=model.device)
        logits = model(ids).logits
        of_head = model.get_output_embeddings()(model.get_decoder()(ids).last_hidden_state)
        if not (of_head - logits).abs().max() <= 1e-2 * logits.abs().max():  # NaN fails
            raise Refused("its logits are scaled, capped or NaN")
        # Is what is sampled trained, also beside the longest sequence, which may rescale RoPE?
        short = replace(config, max_completion_tokens=16)
        sequences, sampled = sample(task, [shortest, shortest[-1:]], 4, short)
        sequences.append(Sequence(longest, longest[:1] * config.max_completion_tokens))
        trained, _ = completion_logprobs(model, sequences, [range(8), [8]], config.temperature)
        difference = (trained[: len(sampled)] - sampled).abs().mean()
        if not difference <= (1e-3 if model.dtype == torch.float32 else 0.1):
            raise Refused(f"sampled and trained log-probabilities differ by {difference:.2g}")


# ---- 7. Rewards: f(prompts, completions, **columns) -> list of float or, if not gradable, None
def text_of(completion):
    """What a completion, a text or a list of one message, says after its reasoning."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text.strip()  # "" if the reasoning has not ended


def gsm8k_number(text, is_answer=False):
    r"""The only number in the line after the last mark, #### or \boxed{, or without a mark the last
    one of the text; None if there is none. An answer must be nothing but one number."""
    text = re.sub(r"\\?[$%€£]|\*\*", "", text).replace("\N{MINUS SIGN}", "-")
    *before, end = re.split(r"####|\\boxed *{", text)
    if before:
        end = re.split(r"[}\n]", end.strip())[0]
    # A number is a whole word, as -1,234.5 is, but not x5, 2^3, 1/2 or 10-12.
    words = [end.strip()] if is_answer else re.findall(r"(?:[\w^{}\\]|[.,:/-]{1,2}(?=\d))+", end)
    number = re.compile(r"-?([1-9]\d{0,2}(,\d{3})+|\d+)(\.\d+)?", re.ASCII)
    numbers = [word for word in words if number.fullmatch(word)]
    if not numbers or (before and len(numbers) > 1):
        return None
    return float(numbers[-1].replace(",", ""))


def gsm8k(prompts, completions, answer, **columns):
    """1 if a completion gives the number of its answer; None if that is no plain number."""
    rewards = []
    for completion, text in zip(completions, answer):
        wanted = gsm8k_number(str(text), is_answer=True)
        found = gsm8k_number(text_of(completion))
        rewards.append(None if wanted is None else float(found == wanted))
    return rewards


def exact(prompts, completions, answer, **columns):
    """1 if a completion is its answer, but for spaces around it; None if that is no text."""
    rewards = []
    for completion, text in zip(completions, answer):
        wanted = str(text).strip() if type(text) in (str, int) else ""
        rewards.append(float(text_of(completion) == wanted) if wanted else None)
    return rewards


# ---- 8. Tasks
@dataclass
class Task:
    train: list  # examples: prompt (text or messages), prompt_ids, the data's columns
    evals: dict  # name: examples
    tokenizer: object
    reward: object  # a function
    model: object = None
    end_ids: tuple | list = ()  # all that end a completion: Qwen has two


def load_task(config):
    """The user's task, or the embedded one. Data and reward are tried first."""
    task = user_task(config) if config.model else sorting_task(config)
    task.evals = {name: examples for name, examples in task.evals.items() if examples}
    tokenizer, some = task.tokenizer, task.train[:99]
    try:
        reward_completions(task, some, [Sequence([], [])] * len(some))
    except Exception as error:
        error.add_note(f"Tried on empty completions of prompts like {some[0]['prompt']!r:.60}")
        raise
    if config.model:
        options = {"dtype": DTYPE, "attn_implementation": "sdpa", "trust_remote_code": False}
        with refusing(f"{config.model} cannot be loaded: "):
            model = transformers.AutoModelForCausalLM.from_pretrained(config.model, **options)
    else:
        model = warm_started(tokenizer)
    task.model = model.to(DEVICE).eval()

    # A completion ends with an end id of tokenizer or model, or as the template ends a turn.
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "END"}]
    with suppress(Exception):  # no template, or one that wants another chat
        text = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("END")[2]
        after = tokenizer.encode(text, add_special_tokens=False)
        ends.update([token for token in after if token in tokenizer.added_tokens_decoder][:1])
    task.end_ids = sorted(ends)
    check_sampling(task, config)
    print(f"{model.dtype} on {DEVICE}, evaluated on {', '.join(task.evals) or 'nothing'}")
    return task


def reward_completions(task, examples, sequences):
    """B examples, B G sequences -> (B, G) float64 rewards, NaN where there is none."""
    G = len(sequences) // len(examples)
    columns = {}
    for i, (prompt_ids, ids) in enumerate(sequences):
        text = task.tokenizer.decode([token for token in ids if token not in task.end_ids])
        begun = task.tokenizer.decode(prompt_ids[-20:]).rpartition("</think>")[2]
        if "<think>" in begun and task.reward in REWARDS.values():
            text = "<think>" + text  # which the prompt began
        prompt = examples[i // G]["prompt"]
        message = [{"role": "assistant", "content": text}]
        row = {"prompts": prompt, "completions": text if isinstance(prompt, str) else message}
        for name, value in (examples[i // G] | row | {"completion_ids": ids}).items():
            columns.setdefault(name, []).append(value)
    del columns["prompt"], columns["prompt_ids"]
    takes = inspect.signature(task.reward).parameters
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in takes.values()):
        columns = {name: columns[name] for name in columns.keys() & takes.keys()}
    values = task.reward(**columns)
    with refusing(f"rewards must be {len(sequences)} numbers or None, not {values!r:.60}: "):
        numbers = []
        for value in values[:]:  # [:] refuses sets and dicts
            numbers.append(math.nan if value is None else value)
        rewards = torch.tensor(numbers, dtype=torch.float64).view(len(examples), G)
        if rewards.isinf().any():
            raise Refused("one is infinite")
        return rewards


# ---- 9. Data
def user_task(config):
    """The user's task, as yet without its model."""
    with refusing(f"{config.model} cannot be loaded: "):
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    known = re.findall(r"\w+", f"chat_template {tokenizer.chat_template}")
    for name in config.template_kwargs.keys() - known:
        raise Refused(f"--chat_template_kwargs: the template has no {name}")
    evals = {}
    for spec in filter(None, config.eval_dataset.split(",")):
        evals[spec] = load_examples(spec, "test", config, tokenizer)[: config.eval_prompts]
    train = load_examples(config.dataset, "train", config, tokenizer, chain(*evals.values()))
    size = 0 if evals else min(len(train) // 5, config.eval_prompts)
    evals["held out"] = train[:size]
    return Task(train[size:], evals, tokenizer, config.reward_function)


def load_examples(spec, split, config, tokenizer, evaluated=()):
    """Shuffled examples of a file or of path[[:config]:split]; tells why rows are left out."""
    with refusing(f"{spec} is empty, or no json, parquet or regular csv: "):
        if not Path(spec).is_file():
            path, *names = re.split(r":(?![^\[]*\])", spec)  # not in train[a:b]
            *names, split = names or [split]
            rows = datasets.load_dataset(path, *names, split=split)
        elif spec.lower().endswith(".csv"):  # as text: 0124 is not 124
            with open(spec, newline="", encoding="utf-8-sig") as file:
                header, *rows = filter(None, csv.reader(file, strict=True))
            rows = datasets.Dataset.from_list([dict(zip(header, row, strict=True)) for row in rows])
        else:
            kind = "parquet" if spec.lower().endswith(".parquet") else "json"
            rows = datasets.load_dataset(kind, data_files=glob.escape(spec), split="train")
    prompts = [name for name in config.prompt_column.split(",") if name in rows.column_names]
    answers = [name for name in config.answer_column.split(",") if name in rows.column_names]
    if not prompts or (config.reward in REWARDS and not answers):
        raise Refused(f"{spec} has {rows.column_names}: set --prompt_column and --answer_column")
    examples, left_out = [], {}
    taken = {tuple(example["prompt_ids"]) for example in evaluated}
    for row in tqdm(rows.shuffle(seed=0), spec, leave=False, delay=5):  # alike for every --seed
        if answers:
            row["answer"] = row[answers[0]]
        with refusing(f"{spec} has a prompt that cannot be used, {row[prompts[0]]!r:.60}: "):
            prompt, ids = encode_prompt(row[prompts[0]] or "", config, tokenizer)
        if config.reward in REWARDS and config.reward_function([], [""], [row["answer"]]) == [None]:
            left_out.setdefault("not gradable", []).append(row["answer"])
        elif not (prompt and ids):
            left_out.setdefault("empty", []).append(prompt)
        elif len(ids) > config.max_prompt_tokens:
            left_out.setdefault("over --max_prompt_tokens", []).append(prompt)
        elif tuple(ids) in taken:
            left_out.setdefault("repeated or evaluated", []).append(prompt)
        else:
            taken.add(tuple(ids))
            examples.append(row | {"prompt": prompt, "prompt_ids": ids})
    told = f"{spec}: {len(rows)} rows, {len(examples)} prompts"
    for reason, some in left_out.items():
        told += f", {len(some)} {reason} ({some[0]!r:.40})"
    if not examples:
        raise Refused(told)
    print(f"{told}; the first ends {tokenizer.decode(examples[0]['prompt_ids'])[-60:]!r}")
    return examples


def encode_prompt(prompt, config, tokenizer):
    """A text or a list of messages -> the prompt as a reward gets it, and its ids."""
    messages, system, kwargs = prompt, config.system_prompt, config.template_kwargs
    if isinstance(prompt, str):
        added = tokenizer.added_tokens_decoder.values()
        if prompt.startswith(tuple(str(token) for token in added if token.special)):
            if system or kwargs:
                raise Refused("it is in its template: drop --system_prompt, --chat_template_kwargs")
            return prompt, tokenizer.encode(prompt, add_special_tokens=False)
        if not tokenizer.chat_template:
            ids = tokenizer.encode(f"{system}\n\n{prompt}" if system else prompt)
            return prompt, ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
        messages = [{"role": "user", "content": prompt}]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    goes_on = messages[-1]["role"] == "assistant"  # then its message is continued
    options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    return prompt, tokenizer.apply_chat_template(messages, return_dict=False, **options | kwargs)


# ---- 10. The embedded task: sort digits
# Training prompts, fewest and most digits. Easy ones start solved, hard ones never are.
SORTING = {"easy": (461, 2, 3), "middle": (154, 9, 12), "hard": (409, 17, 20)}


def sorting_example(name, rng, tokenizer):
    """An example of a class: the prompt "4021=" has the answer "0124"."""
    _, fewest, most = SORTING[name]
    digits = rng.choices("0123456789", k=rng.randint(fewest, most))
    prompt = "".join(digits) + "="
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_ids": ids, "answer": "".join(sorted(digits))}


def sorting_task(config):
    """The embedded task, of which only the middle class is evaluated."""
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    train = []
    for name, (size, _, _) in SORTING.items():
        rng = random.Random(name)
        drawn = [sorting_example(name, rng, tokenizer) for _ in range(4000)]
        examples = list({example["prompt"]: example for example in drawn}.values())  # once each
        train += examples[:size]
        if name == "middle":
            evals = {name: examples[size : size + config.eval_prompts]}
    random.Random(0).shuffle(train)
    return Task(train, evals, tokenizer, config.reward_function)


def warm_started(tokenizer):
    """A small Qwen3 that imitated easy answers, and middle ones with a fifth of random digits."""
    torch.manual_seed(0)
    net = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    net |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    net |= {"vocab_size": 259, "eos_token_id": 1, "pad_token_id": 0}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(tie_word_embeddings=True, **net))
    cached = Path(torch.hub.get_dir(), "dppo-sorter-2.pt")  # 2: of this recipe
    if cached.exists():
        model.load_state_dict(torch.load(cached))
        return model
    optimizer = MasterAdam(model, 2e-3)
    config = Config(temperature=1.0)
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
        shares = torch.tensor([1 / (64 * len(ids)) for _, ids in sequences])
        train_step(model, optimizer, sequences, torch.ones(64), shares, None, None, config)
    cached.parent.mkdir(parents=True, exist_ok=True)
    with writing(cached) as path:
        torch.save(model.state_dict(), path)
    return model


# ---- 11. Settings
REWARDS = {"gsm8k": gsm8k, "exact": exact}
LEAST = {"group_size": 2, "max_grad_norm": 1e-6, "temperature": 1e-3}
LEAST |= dict.fromkeys(("prompts_per_step", "inner_epochs", "max_completion_tokens"), 1)
LEAST |= dict.fromkeys(("eval_samples", "rollout_batch_size", "micro_batch_tokens"), 1)
# What may change on resuming.
FREE = {"steps", "eval_every", "save_every", "rollout_batch_size", "micro_batch_tokens", "resume"}


def flag(default, text):
    """A field: default, or a pair (with --model, without), and help."""
    return field(default=default, metadata={"help": text, "metavar": ""})


def find(name, value, known):
    """What a setting names: a known one, or module:name."""
    try:
        found = known.get(value) or pkgutil.resolve_name(value)
        if (Rule in getattr(found, "__mro__", ())) != (known is RULES) or not callable(found):
            raise ValueError("it is no Rule, or no function")
    except (ImportError, AttributeError, ValueError) as error:
        raise Refused(f"--{name} {value} is not one of {', '.join(known)}: {error}") from error
    return found


@dataclass
class Config:
    """All settings. Refuses what would silently go wrong."""

    method: str = flag("dppo", "grpo, grpo-skip, dppo, dppo-proportional or module:Rule")
    objective: str = flag("grpo", "grpo, dr_grpo, dapo or gspo")
    prompt_prune_rate: float = flag(0.7, "r_q, share of low-scoring prompts to prune")
    completion_prune_rate: float = flag(0.7, "r_o, the same of completions")
    prompts_per_step: int = flag(32, "of a step; a rule may reach their noise with fewer")
    group_size: int = flag(8, "G, completions of each prompt")
    inner_epochs: int = flag(1, "updates on each rollout")
    beta: float = flag(0.0, "weight of the KL term")
    learning_rate: float = flag((1e-6, 5e-5), "after the warm-up")
    warmup_steps: int = flag(10, "steps over which it rises")
    max_grad_norm: float = flag(1.0, "longer gradients are clipped")
    temperature: float = flag((1.0, 0.7), "of the samples")
    max_completion_tokens: int = flag((1024, 22), "longer are cut")
    model: str = flag("", "causal LM, on the Hub or in a folder")
    dataset: str = flag("", "path[[:config]:split] on the Hub, or a file")
    prompt_column: str = flag("prompt,question,problem", "the first of these that exists")
    answer_column: str = flag("answer,solution", "the same")
    system_prompt: str = flag("", "comes before every prompt")
    chat_template_kwargs: str = flag("{}", 'JSON, such as {"enable_thinking": false}')
    max_prompt_tokens: int = flag(512, "longer ones are left out")
    reward: str = flag(("gsm8k", "exact"), "gsm8k (a number), exact (a text), module:function")
    eval_dataset: str = flag("", "like --dataset, or a,b; without it some are held out")
    eval_prompts: int = flag(256, "prompts of each set, at most")
    eval_samples: int = flag(4, "samples of each prompt")
    steps: int = flag((300, 60), "training steps; 0 only evaluates")
    eval_every: int = flag((0, 10), "steps between evaluations; 0: ends only")
    save_every: int = flag(50, "steps between checkpoints; 0: only at the end")
    rollout_batch_size: int = flag(256, "sequences generated at a time")
    micro_batch_tokens: int = flag(4096, "tokens of a forward pass")
    seed: int = flag(0, "of order, rollouts and draws")
    output_dir: str = flag("", "a new folder; otherwise one in runs/")
    history: str = flag("", "folder of a run whose memory to start with")
    resume: str = flag("", "folder of a run to go on with")

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
        if bool(self.model) != bool(self.dataset):
            raise Refused("--model or --dataset is missing: data of your own need both")
        with refusing("--chat_template_kwargs must be a JSON object: "):
            self.template_kwargs = {} | json.loads(self.chat_template_kwargs)
        self.rule_class = find("method", self.method, RULES)
        self.reward_function = find("reward", self.reward, REWARDS)


# ---- 12. Runs
def evaluate(task, config):
    """-> the mean of the rewards given in each set; `accuracy`, that of all; some completions."""
    transformers.set_seed(config.seed % 2**32)  # the same every time
    given, completions = {}, []
    for name, examples in task.evals.items():
        sequences, rewards, _ = rollout(task, examples, config.eval_samples, config)
        given[name] = rewards.flatten()
        for q, example in enumerate(examples[:3]):
            text = task.tokenizer.decode(sequences[q * config.eval_samples].completion)
            completions.append([text, example.get("answer"), rewards[q, 0].item()])
    given["accuracy"] = torch.cat([torch.zeros(0), *given.values()])
    means = {name: rewards.nanmean().item() for name, rewards in given.items()}
    return means | {"completions": completions}


def record_of(step, task):
    """A step's record: means over its window, estimated from what was kept."""
    is_cut = [ids[-1] not in task.end_ids for _, ids in step.sequences]
    w_q = step.w_q[:, None].expand_as(step.rewards).flatten().tolist()
    given = step.w_q * ~step.rewards.isnan().all(dim=1)  # (B,), 0 without a reward

    record = step.updates[-1] | {"prompts_seen": step.N, "prompts_rolled": len(step.w_q)}
    record |= {"weight_max": step.w.max().item(), "mean_length": step.mean_length}
    record["reward"] = (given @ step.rewards.nanmean(dim=1).nan_to_num() / given.sum()).item()
    record["zero_variance_fraction"] = (given @ (~step.A.any(dim=1)).double() / given.sum()).item()
    record["completion_length"] = fmean((len(ids) for _, ids in step.sequences), w_q)
    record["truncated_fraction"] = fmean(is_cut, w_q)
    return record


def account_of(records, config):
    """Yields what to tell of the steps after the first record."""
    before, *steps = records
    if steps[-1]["updates"] == before["updates"]:
        why = "all rewards of a group were equal"
        if all(math.isnan(record["reward"]) for record in steps):
            why = "no completion got a reward"
        elif any(record["grad_norm"] != 0 for record in steps):
            why = "gradients were not finite"
        yield f"no update in {len(steps)} steps: {why}"
    cut = fmean(record["truncated_fraction"] for record in steps)
    yield f"{cut:.0%} cut at --max_completion_tokens {config.max_completion_tokens}"
    clipped = fmean(record["grad_norm"] > config.max_grad_norm for record in steps)
    has_weights = config.rule_class.unbiased and any(record["weight_max"] > 1 for record in steps)
    if has_weights and clipped > 0.5:
        told = f"the norm was clipped in {clipped:.0%} of the steps, which undoes weights"
        yield f"{told}: raise --max_grad_norm or --prompts_per_step"
    worth = 1 / fmean(1 / record["rollout_worth"] for record in steps)
    if worth > 1:
        yield f"a rollout was worth {worth:.1f} unpruned ones"


@contextmanager
def writing(path):
    """A path to write to, which replaces `path` when it is whole."""
    with refusing(f"{path}: "), TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder, path.name)
        yield partial
        partial.replace(path)


class Run:
    """A run: its records, one of step 0 and one of each step."""

    def __init__(self, config, task):
        self.config, self.task = config, task
        self.settings = asdict(config) | {"prompts": len(task.train)}
        self.rule = config.rule_class(config, len(task.train))
        self.optimizer = MasterAdam(task.model, config.learning_rate)
        self.reference = copy.deepcopy(task.model) if config.beta > 0 else None
        self.records = [dict.fromkeys(("step", "updates", "candidates_so_far", "mean_length"), 0)]
        self.is_stopped = False  # by Ctrl-C
        self.out = Path(config.resume or config.output_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
        self.metrics = self.out / "metrics.jsonl"
        with refusing(""):
            if config.resume and (self.out / "checkpoint.pt").exists():
                self.restore(self.out)
            elif config.history:
                self.restore(Path(config.history))
            self.memory = copy.deepcopy(self.rule.memory)  # of the last whole step
            self.out.mkdir(parents=True, exist_ok=bool(config.resume))  # last: none if refused
            with writing(self.out / "config.json") as path:
                path.write_text(json.dumps(asdict(config), indent=2))
            with writing(self.metrics) as path:
                path.write_text("".join(json.dumps(record) + "\n" for record in self.records[:-1]))

    def restore(self, folder):
        """Takes over a run's memory and, to go on with it, all the rest."""
        saved = torch.load(folder / "checkpoint.pt", "cpu", mmap=True)
        goes_on = folder == self.out
        for name in sorted(self.settings.keys() - FREE) if goes_on else ["method", "prompts"]:
            if saved["settings"][name] != self.settings[name]:
                raise Refused(f"{folder} was made with {name} = {saved['settings'][name]!r}")
        self.rule.memory |= copy.deepcopy(saved["memory"])  # or the file would stay mapped
        last, optimizer = saved["records"][-1], self.optimizer
        if not goes_on:  # from these counts on, so that no random number is used twice
            self.records[0] |= {name: last[name] for name in ("candidates_so_far", "mean_length")}
            return
        self.records = saved["records"]
        optimizer.updates = last["updates"]
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        for weight, master, value in zip(optimizer.weights, optimizer.masters, saved["weights"]):
            master.copy_(value)
            weight.data.copy_(value)

    def save(self):
        saved = {"settings": self.settings, "records": self.records, "memory": self.memory}
        saved |= {"weights": self.optimizer.masters, "optimizer": self.optimizer.state_dict()}
        with writing(self.out / "checkpoint.pt") as path, path.open("wb") as file:
            torch.save(saved, file)

    def stop(self, *_):
        self.is_stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # Ctrl-C also ends what reads a pipe
            print("\nstops after this step; Ctrl-C again stops at once", file=sys.stderr)

    def make_step(self):
        started_at = time.perf_counter()
        config, last = self.config, self.records[-1]
        number, seen = last["step"] + 1, last["candidates_so_far"]
        # A generator for draws, as a reward may seed torch's.
        transformers.set_seed((1_000_003 * config.seed + seen) % 2**32)
        generator = torch.Generator().manual_seed(torch.randint(2**32, ()).item())
        rate = config.learning_rate * min(1.0, number / max(1, config.warmup_steps))
        self.optimizer.param_groups[0]["lr"] = rate
        upcoming = next_prompts(seen, len(self.task.train), config.seed)
        inputs = (self.task, self.rule, self.optimizer, self.reference, upcoming)
        step = dppo_step(*inputs, last["mean_length"], generator, config)

        seen += step.N
        seconds = time.perf_counter() - started_at - step.rollout_seconds
        record = record_of(step, self.task) | {"step": number, "updates": self.optimizer.updates}
        record |= {"candidates_so_far": seen, "epoch": seen / len(self.task.train)}
        record |= {"rollout_seconds": step.rollout_seconds, "train_seconds": seconds}
        record["rollout_worth"] = config.prompts_per_step / step.limit
        self.memory = copy.deepcopy(self.rule.memory)
        self.records.append(record)
        return record


def train(config, task):
    """Makes a run, or its rest. Its last whole step is saved, unless it ends amid an update."""
    run = Run(config, task)
    records, record = run.records, run.records[-1]
    made = record["step"]
    last = max(made, config.steps)
    signal.signal(signal.SIGINT, run.stop)
    try:
        with tqdm(total=last, initial=made) as bar:
            for number in range(made, last + 1):  # made: it may lack its evaluation
                if run.is_stopped:
                    raise KeyboardInterrupt
                if number > made:
                    record = run.make_step()
                    bar.set_description("epoch {epoch:.1f}, reward {reward:.2f}".format(**record))
                    bar.set_postfix_str(", ".join(account_of(records[-11:], config)))
                    bar.update()
                    if number % 10 == 0 and record["updates"] == records[-11]["updates"]:
                        bar.write(next(account_of(records[-11:], config)))
                is_due = number % (config.eval_every or math.inf) == 0 or number == last
                if is_due and "evaluation" not in record:
                    record["evaluation"] = evaluate(task, config)
                    bar.write(f"step {number}: accuracy {record['evaluation']['accuracy']:.2f}")
                with refusing(f"{run.metrics}: "), run.metrics.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                if made < number < last and number % (config.save_every or math.inf) == 0:
                    run.save()
    except BaseException:
        print(f"\ngo on with: python dppo.py --resume={str(run.out)!r}")
        raise
    finally:
        if run.optimizer.updates == records[-1]["updates"]:  # not amid those of a step
            run.save()
            with refusing(f"{run.out}/model: "):
                task.model.save_pretrained(run.out / "model")
                task.tokenizer.save_pretrained(run.out / "model")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before, after = records[0]["evaluation"], record["evaluation"]
    gains = [f"accuracy of {name} {before[name]:.2f} -> {after[name]:.2f}" for name in task.evals]
    seconds = sum(record["rollout_seconds"] + record["train_seconds"] for record in records[1:])
    told = account_of(records, config) if last > 0 else []
    print("; ".join([*gains, f"{seconds:.0f} s of training", *told, f"results are in {run.out}"]))


def main():
    sys.path.append("")  # module:name may be in the current folder
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    parser = transformers.HfArgumentParser(Config, usage="dppo.py [options]", allow_abbrev=False)
    parser.description = "Of two defaults, the second is the embedded task's."
    try:
        with refusing(""):
            resume = parser.parse_args().resume
            if resume:  # its settings are the defaults
                [saved] = parser.parse_json_file(Path(resume, "config.json"))
                parser.set_defaults(**asdict(saved))
        config = parser.parse_args_into_dataclasses()[0]
        with refusing(""):
            if not config.model:  # half of the threads, as waiting ones spin
                torch.set_num_threads(max(1, torch.get_num_threads() // 2))
            task = load_task(config)
        train(config, task)
    except KeyboardInterrupt:
        sys.exit(130)
    except (torch.OutOfMemoryError, MemoryError):
        sys.exit("dppo.py: out of memory: lower --micro_batch_tokens or --rollout_batch_size")
    except Refused as error:
        parser.exit(2, f"dppo.py: {' '.join(str(error).split())[:400]}\n")


if __name__ == "__main__":
    sys.modules["dppo"] = sys.modules["__main__"]  # for a rule's `import dppo`
    main()
