"""Dynamic Pruning Policy Optimization (DPPO) in one file: GRPO with unbiased pruning.

After "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" (Zhu et al., 2026,
arXiv 2603.04135), known to us by its abstract and reviews that quote it; docstrings say how we read
the rest. (TRL's `dppo` is another method.)

GRPO answers each prompt several times and learns from the differences between the rewards, so a
group that is all right or all wrong teaches nothing. DPPO prunes prompts before the rollout and
completions after it, both at random, and what it keeps with probability pi counts 1/pi times. The
expected gradient is therefore still that of all candidates. This is a step:

    pi      = keep_probabilities(memory)     of each prompt, by what it taught at its last visit
    window  = the next N prompts             as far as their pi sum to the limit of a step
    w_q     = draw(pi)                       1/pi for a prompt that is kept, 0 for one that is not
    A       = advantages of the rollout      of the prompts that are kept, in whole groups
    w_qi    = draw(keep_probabilities(|A|))  1/pi or 0, for each of their completions
    update  : the gradient of the sum of w_q w_qi l/(N G), where N G is fixed, not the number kept
    memory  = the mean |A| of each group     for later steps

    python dppo.py  # a small model learns to sort digits, offline, in two minutes

    q, i      a prompt; a completion
    N         candidate prompts, a step's window
    limit, B  the most prompts that a step may keep; how many it keeps
    G         completions of a prompt, its group
    A         advantage of a completion
    P, pi     probability of being pruned, of being kept: pi = 1 - P
    r_q, r_o  rates at which low-scoring prompts, completions are pruned
    w         weight, 1/pi if kept, else 0: w_q of a prompt, w_qi of a completion, w = w_q w_qi
    C         factor of the paper's weight C/(1 - P), where 1 - P is the pi of both draws
    rho       ratio of a token's probabilities under the new and the old policy
    beta      weight of the KL term
    l, Z      loss of a completion: the sum of its tokens' losses, divided by Z
    L, L_hat  mean of l over the window's N G completions; mean of w l, its estimate
"""

import copy
import csv
import glob
import io
import json
import math
import os
import pkgutil
import random
import re
import signal
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
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

# ======== Part I: the method ========


# ---- 1. Advantages
def group_advantages(rewards, scale_by_std=True):
    """(B, G) rewards -> (B, G) float64 A = (reward - mean)/(std + 1e-4), or reward - mean.

    The mean and the std (with divisor n - 1) are those of the rewards that are not missing (NaN).
    A missing reward has A = 0, and so has a group whose rewards are equal up to rounding. To centre
    A again after pruning would bias the gradient, as what is left of a group has another mean."""
    rewards = rewards.double()
    missing = rewards.isnan()
    A = rewards - rewards.nanmean(dim=1, keepdim=True)
    rounding = 1e-12 + 1e-6 * rewards.nan_to_num().abs().amax(dim=1, keepdim=True)
    equal = (A.nan_to_num().abs() <= rounding).all(dim=1, keepdim=True)
    if scale_by_std:
        n = (~missing).sum(dim=1, keepdim=True)
        variance = A.square().nansum(dim=1, keepdim=True) / (n - 1).clamp(min=1)
        A = A / (variance.sqrt() + 1e-4)
    return A.masked_fill(missing | equal, 0.0)


def has_gradient(advantages, beta):
    """(B, G) bool: False where A = 0 and there is no KL term, so that the gradient is 0."""
    return (advantages != 0) | (beta > 0)


# ---- 2. Keep probabilities, and a draw with them
def keep_probabilities(scores, rate):
    """The paper's rule, as we read it: scores >= 0 -> float64 pi of the same shape.

    The k items that score below the mean have pi = 1 - floor(rate k)/k, as if so many of them were
    pruned, and chance decided which. All others have pi = 1, also those without a score (NaN).

    (The paper's Algorithm 1 reportedly removes the lowest outright. They would have pi = 0 although
    they have a gradient, which the paper's own proof excludes.)"""
    scores = scores.double()
    low = scores < scores.nanmean() * (1 - 1e-6)  # equal scores are not below their mean
    k = int(low.sum())
    pruned = math.floor(rate * k + 1e-9)  # in floating point, 0.29 * 100 is below 29
    return torch.ones_like(scores).masked_fill(low, (k - pruned) / max(1, k))


def draw(pi, generator):
    """(n,) pi -> (n,) weights: 1/pi for what is kept, 0 for what is pruned.

    Wherever pi > 0, the mean of a weight is pi (1/pi) + (1 - pi) 0 = 1. The sampling is systematic,
    so that the number kept is the sum of pi, rounded down or up. Items lie end to end in random
    order, each as long as its pi, and those are kept on which a tooth of the comb u, u + 1, u + 2,
    ... falls, where u is uniform in [0, 1). With items of the lengths 0.5, 1, 0.25 and 0.25, for
    example, u = 0.6 keeps the second and the third."""
    order = torch.randperm(len(pi), generator=generator)
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    ends = torch.cat([torch.zeros(1), pi[order].cumsum(0)])  # (n + 1,) where items meet
    teeth = (ends - u).ceil()  # the number of teeth below each; in the example 0, 0, 1, 2, 2
    kept = order[teeth[:-1] < teeth[1:]]
    return torch.zeros_like(pi).scatter(0, kept, 1 / pi[kept])


# ---- 3. Rules: with which probability something is kept
class Rule:
    """Textbook GRPO, which keeps everything.

    A subclass is unbiased if every pi is known before its draw, and positive wherever there is a
    gradient: pi of prompts from memory alone, pi of completions also from w_q and the rollout."""

    unbiased = True  # False: all that is kept weighs the same, and pi may be 0
    remembers = {}  # {name: initial value}, one number for each prompt

    def __init__(self, config, prompt_count):
        self.config = config
        self.prompt_count = prompt_count
        zeros = torch.zeros(prompt_count, dtype=torch.float64)
        self.memory = {name: zeros + value for name, value in self.remembers.items()}

    def limit_of_step(self, upcoming):
        """The most prompts that a step may keep, from memory and the upcoming ones alone."""
        return self.config.prompts_per_step

    def prompt_probabilities(self):
        """(all prompts,) pi, from memory alone."""
        return torch.ones(self.prompt_count, dtype=torch.float64)

    def completion_probabilities(self, advantages, prompt_weights):
        """(B, G) A, (B,) w_q -> (B, G) pi."""
        return torch.ones_like(advantages)

    def weights(self, w_q, w_qi, N):
        """(B,) w_q, (B, G) w_qi -> (B, G) w: L_hat is the sum of w l, divided by N G. A biased
        rule averages over what it keeps instead."""
        if self.unbiased:
            return w_q[:, None] * w_qi
        kept = (w_qi > 0).double()
        return kept * N * kept.shape[1] / kept.sum().clamp(min=1)

    def remember(self, prompts, rewards, advantages):
        """Takes a rollout into memory: (B,) prompts, (B, G) rewards, (B, G) A."""


class GRPOSkip(Rule):
    """GRPO without the completions that have no gradient, which adds neither bias nor variance."""

    def completion_probabilities(self, advantages, prompt_weights):
        return has_gradient(advantages, self.config.beta).double()


class DPPO(Rule):
    """The paper's rule, at both levels.

    A completion's score is |A|, and a prompt's is the mean |A| of its group at its last visit.
    Completions without a gradient are left out first, so the mean score is that of the others.
    For prompts it is the mean of all that were visited so far."""

    remembers = {"score": math.nan}

    def prompt_probabilities(self):
        return keep_probabilities(self.memory["score"], self.config.prompt_prune_rate)

    def completion_probabilities(self, advantages, prompt_weights):
        needed = has_gradient(advantages, self.config.beta)
        scores = torch.where(needed, advantages.abs(), math.nan)
        return needed * keep_probabilities(scores, self.config.completion_prune_rate)

    def remember(self, prompts, rewards, advantages):
        for q, A in zip(prompts, advantages):  # a prompt may come twice: its last group counts
            self.memory["score"][q] = A.abs().mean()


# ---- 4. Pruning
def check_probabilities(rule, pi, needed):
    """Refuses what is no probability and, if the rule is unbiased, pi = 0 where `needed`."""
    valid = pi.shape == needed.shape and ((pi >= 0) & (pi <= 1 + 1e-9)).all()  # NaN fails
    if not valid or (rule.unbiased and (pi[needed] == 0).any()):
        raise Refused(f"a rule needs pi of shape {tuple(needed.shape)}, 0 < pi <= 1 for a gradient")


def window_of(pi, upcoming, limit):
    """The longest prefix of the upcoming prompts whose pi sum to at most `limit`."""
    return upcoming[pi[upcoming].cumsum(0) <= limit + 1e-9]


def prune_prompts(rule, upcoming, limit, generator):
    """Before the rollout: (n,) upcoming prompts -> N; (B,) the prompts that are kept; (B,) w_q.

    The window follows from pi and the limit, so no draw changes its length N. To look on until
    enough prompts have survived would make N depend on the draw, and bias the gradient."""
    pi = torch.as_tensor(rule.prompt_probabilities(), dtype=torch.float64)  # (all prompts,)
    check_probabilities(rule, pi, needed=torch.ones(rule.prompt_count).bool())
    window = window_of(pi, upcoming, limit)
    pi = pi[window]  # (N,)
    if not pi.any():  # as a biased rule may have it
        raise Refused("a rule needs a limit of 1, at least, and pi > 0 for some upcoming prompts")
    if pi.sum() < 1:  # as with a limit of 1: scaled, so that one prompt is kept
        pi = pi / pi.sum()
    w_q = draw(pi, generator)
    kept = w_q > 0
    return len(window), window[kept], w_q[kept]


def prune_completions(rule, advantages, prompt_weights, generator):
    """After the rollout: (B, G) A, (B,) w_q -> (B, G) w_qi. The rule gets copies to work with."""
    pi = rule.completion_probabilities(advantages.clone(), prompt_weights.clone()).double()
    check_probabilities(rule, pi, needed=has_gradient(advantages, rule.config.beta))
    return draw(pi.flatten(), generator).view_as(pi)


# ---- 5. The step
@dataclass(kw_only=True)
class Step:
    limit: int
    N: int
    prompts: torch.Tensor  # (B,)
    w_q: torch.Tensor  # (B,)
    weights: list  # (B, G) w of each update
    sequences: list  # B G, group by group
    rewards: torch.Tensor  # (B, G)
    A: torch.Tensor  # (B, G)
    mean_length: float  # moving mean, for the next step
    updates: list  # metrics of each
    rollout_seconds: float


def dppo_step(task, rule, optimizer, upcoming, mean_length, generator):
    """The paper's algorithm: one step with the upcoming prompts, in order -> Step. mean_length is
    that of completions in earlier steps, 0 at first.

    Memory, limit and N are fixed before prompts are drawn, so w_q has the mean 1. Given that draw
    and its rollouts, w_qi has the mean 1 wherever l has a gradient. And how a prompt is answered
    does not depend on whether it is drawn. So a first update has, on average, the gradient of L.

    The paper averages over the n completions that it keeps, with weights C/(1 - P). If C is
    n/(N G), that is the same: (1/n) C/(1 - P) = w/(N G), the weight of Horvitz and Thompson."""
    config = rule.config
    G = config.group_size

    # 1. Prune prompts, from memory.
    limit = rule.limit_of_step(upcoming.clone())
    N, prompts, w_q = prune_prompts(rule, upcoming, limit, generator)

    # 2. Roll out those that are kept.
    examples = [task.train[q] for q in prompts.tolist()]
    sequences, rewards, seconds = rollout(task, examples, G, config)  # B G; (B, G)
    A = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")  # (B, G)
    lengths = torch.tensor([float(len(ids)) for _, ids in sequences]).double().view_as(A)
    Z = normalizer(lengths, mean_length, config)  # (B, G)

    # 3. Prune completions anew for each update. (Later ones may be biased: w_q shaped the policy.)
    weights = []
    for _ in range(config.inner_epochs):
        w_qi = prune_completions(rule, A, w_q, generator)
        weights.append(rule.weights(w_q, w_qi, N))

    # 4. Log-probabilities under the old policy, for later updates, and under the reference.
    trained = sum(weights).flatten().nonzero()[:, 0].tolist()
    old = frozen_logprobs(task.model, sequences, trained, config) if len(weights) > 1 else None
    ref = frozen_logprobs(task.reference, sequences, trained, config) if config.beta > 0 else None

    # 5. Update: the sum of each token's loss (token_losses) times w/(N G Z), where N G is fixed.
    updates = []
    for number, w in enumerate(weights):
        old_policy = old if number > 0 else None  # the first update trains the policy that sampled
        shares = w / (N * G * Z)
        metrics = train_step(
            task.model, optimizer, sequences, A, shares, old=old_policy, ref=ref, config=config
        )
        updates.append(metrics)

    # 6. Remember last, so that a step that fails changes no memory.
    rule.remember(prompts.clone(), rewards.clone(), A.clone())
    length = (w_q @ lengths.mean(dim=1) / w_q.sum()).item()  # biased, but only later steps use it
    return Step(
        limit=limit,
        N=N,
        prompts=prompts,
        w_q=w_q,
        weights=weights,
        sequences=sequences,
        rewards=rewards,
        A=A,
        mean_length=0.9 * (mean_length or length) + 0.1 * length,
        updates=updates,
        rollout_seconds=seconds,
    )


# ======== Part II: the engine ========


# ---- 6. Rollout
class Sequence(NamedTuple):
    prompt: list  # of token ids
    completion: list  # likewise, with its end id unless cut


BLOCK = 1  # tokens after which rows that have ended leave, at least 64 with --cuda_graphs


class RoomyCache(transformers.DynamicCache):
    """Keys and values with room for more tokens, so that nothing moves. `column` is next."""

    def __init__(self, cache, room, column):
        super().__init__()
        self.layers, self.column = cache.layers, column
        for layer in self.layers:
            layer.keys = torch.nn.functional.pad(layer.keys, (0, 0, 0, room))
            layer.values = torch.nn.functional.pad(layer.values, (0, 0, 0, room))

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.column, keys)
        layer.values.index_copy_(2, self.column, values)
        return layer.keys, layer.values


def capture(forward):
    """-> a function that launches all kernels of forward() at once, on the tensors that it uses."""
    forward()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = forward()

    def replay():
        graph.replay()
        return logits

    return replay


@torch.inference_mode()
def decode(model, input_ids, generation_config, samples, temperature, end_ids, mask, block, **rest):
    """(prompts, tokens) ids and mask -> (prompts * samples, max_new_tokens) ids of completions, -1
    after their end; their log-probabilities, for check_sampling alone. `model.generate` runs this
    loop in place of its own, so that softmax(logits/temperature) is sampled, as it is trained, and
    no top_k. As tensors must not move while a graph uses them, they get room for a block."""
    cache_name = "cache" if "cache" in rest else "past_key_values"  # the latter until v5.23
    cache, start = rest[cache_name], input_ids.shape[1]
    is_plain = {type(layer) for layer in cache.layers} == {transformers.DynamicLayer}
    block = max(block, BLOCK) if is_plain else 1  # a cache with windows moves
    new, column = input_ids, input_ids.new_zeros(1)  # to be read next; their place in the cache
    rows = torch.arange(len(new) * samples, device=new.device)  # that have not left
    ended = torch.zeros_like(rows, dtype=torch.bool)
    tokens = new.new_full((len(rows), start + generation_config.max_new_tokens), -1)
    logprobs = torch.zeros_like(tokens, dtype=torch.float32)

    def forward():
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
        shown = mask
        if isinstance(cache, RoomyCache):  # its room is no token: 0 or -inf is added to scores
            shown = mask.to(cache.layers[0].keys.dtype).log()[:, None, None]
        state = {"attention_mask": shown, "position_ids": positions, cache_name: cache}
        return model(new, **state, logits_to_keep=1).logits[:, -1].float() / temperature

    read = forward
    logits = read().repeat_interleave(samples, dim=0)  # each prompt is read once
    mask = mask.repeat_interleave(samples, dim=0)
    cache.batch_repeat_interleave(samples)
    for end in range(start, tokens.shape[1]):
        # Sample one token for each row.
        log_p = logits.log_softmax(dim=-1)
        drawn = log_p.exp().multinomial(1)
        tokens[rows, end] = drawn[:, 0].masked_fill(ended, -1)
        logprobs[rows, end] = log_p.gather(1, drawn)[:, 0]
        ended |= torch.isin(drawn[:, 0], end_ids)
        if ended.all() or end + 1 == tokens.shape[1]:
            break

        # Read it. Where a block is full, rows that have ended leave, and the others get more room.
        column.fill_(end)
        if end < mask.shape[1]:
            new.copy_(drawn)
        else:
            live = ended.logical_not().nonzero()[:, 0]
            if len(live) < len(rows):
                cache.batch_select_indices(live)
            rows, ended, new = rows[live], ended[live], drawn[live]
            room = block - end % block
            mask = torch.nn.functional.pad(mask[live], (0, room))
            if block > 1:
                read = None  # frees the last graph
                cache = RoomyCache(cache, room, column)
                read = capture(forward)
        mask[:, end] = 1
        logits = read()
    return tokens[:, start:], logprobs[:, start:]


def sample(task, prompts, samples, config):
    """Lists of prompt ids -> `samples` sequences of each; (tokens,) their log-probabilities."""
    ids = [torch.tensor(prompt, device=task.model.device) for prompt in prompts]
    ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")
    mask = (ids >= 0).long()
    tokens, logprobs = task.model.generate(
        ids.clamp(min=0),
        attention_mask=mask,
        max_new_tokens=config.max_completion_tokens,
        # What decode gets:
        custom_generate=decode,
        samples=samples,
        temperature=config.temperature,
        end_ids=ids.new_tensor(task.end_ids),
        mask=mask,  # attention_mask may be None
        block=64 if config.cuda_graphs else 1,
        # Against what the model's own generation_config may have:
        cache_implementation="dynamic",
        use_cache=True,
        do_sample=True,
        num_beams=1,
        num_return_sequences=1,
        pad_token_id=0,
    )
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
    for start in tqdm(range(0, len(prompts), size), "rollout", leave=False, delay=5, disable=None):
        sequences += sample(task, prompts[start : start + size], samples, config)[0]
    rewards = reward_completions(task, examples, sequences)
    return sequences, rewards, time.perf_counter() - started_at


# ---- 7. Dense Prompt Packing
def pack(lengths, capacity, lookahead=64):
    """The paper's window-based greedy packing: lengths from 1 to `capacity` -> slots, which are
    lists of indices whose lengths sum to at most `capacity`. Of the next `lookahead` indices, the
    longest that fits goes into the open slot. If none fits, the longest opens another slot."""
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


def tokens_of(sequences, slot):
    """How many tokens the sequences of a slot have."""
    return sum(len(sequences[i].prompt) + len(sequences[i].completion) for i in slot)


def pack_micro_batches(sequences, indices, config):
    """The sequences at `indices` -> micro-batches, lists of slots of indices. As attention costs
    the square of a slot's length, a slot is as long as the longest sequence, at least 128."""
    lengths = [tokens_of(sequences, [i]) for i in indices]
    capacity = max([128, *lengths])
    slots = []
    for slot in pack(lengths, capacity):
        slots.append([indices[place] for place in slot])
    size = max(1, config.micro_batch_tokens // capacity)
    return [slots[i : i + size] for i in range(0, len(slots), size)]


def lay_out(sequences, slots):
    """Lays the sequences of a slot end to end -> (slots, length, 3): each token's id, position and
    owner, the sequence to whose completion the *next* token belongs, which it predicts, or -1. As
    positions restart at 0, transformers keeps sequences apart."""
    rows = []
    for slot in slots:
        row = []
        for i in slot:
            prompt, completion = sequences[i]
            owners = [-1] * (len(prompt) - 1) + [i] * len(completion) + [-1]
            row += zip(prompt + completion, count(), owners)
        rows.append(row)
    longest = max(len(row) for row in rows)
    length = longest + -longest % 8  # multiples of 8 are fast
    return torch.tensor([row + [(0, 0, -1)] * (length - len(row)) for row in rows])


# ---- 8. Loss and update
def token_logprobs(head, hidden, targets, temperature):
    """(n, width) hidden states, (n,) next tokens -> (n,) their log-probabilities."""
    logprobs = head(hidden).float().div_(temperature).log_softmax(dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0]


def completion_logprobs(model, sequences, slots, temperature):
    """The forward pass -> (tokens,) log-probabilities of the completions' tokens, slot by slot;
    their owners."""
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


# How far rho may go below and above 1.
CLIPPING = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


def token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config):
    """(tokens,) new, old and reference log-probabilities, (tokens,) owners, A by owner -> (tokens,)
    losses -min(rho A, clip(rho, 1 - down, 1 + up) A) + beta KL; sums of the KL and of the tokens
    that are clipped. In a first update rho is 1, so clipping acts from the second on."""
    log_ratio = logprobs - old_logprobs
    if config.objective == "gspo":  # one rho for all tokens of a completion
        means = torch.zeros_like(A).scatter_reduce(0, owner, log_ratio, "mean", include_self=False)
        log_ratio = means[owner]
    rho = log_ratio.exp()
    A = A[owner]  # (tokens,)
    down, up = CLIPPING[config.objective]
    clipped = rho.clamp(1 - down, 1 + up) * A
    surrogate = torch.min(rho * A, clipped)
    log_x = ref_logprobs - logprobs
    kl = log_x.exp() - 1 - log_x  # k3, for x = p_ref/p
    sums = torch.stack([kl.detach().sum(), (clipped < rho * A).sum()])
    return config.beta * kl - surrogate, sums


def normalizer(lengths, mean_length, config):
    """(B, G) lengths -> (B, G) Z: the length for grpo, and for gspo, whose tokens share one rho, so
    that their mean is rho A; otherwise a constant. dapo wants the window's mean length, which is
    unknown where prompts are pruned. A moving mean of *earlier* steps, fixed before the draw,
    replaces it. A first step takes its own: unbiased if all are kept."""
    if config.objective == "dr_grpo":
        return torch.full_like(lengths, config.max_completion_tokens)
    if config.objective == "dapo":
        return torch.full_like(lengths, mean_length or lengths.mean())
    return lengths


def train_step(model, optimizer, sequences, advantages, shares, old, ref, config):
    """One update with (B, G) A and (B, G) shares w/(N G Z) of the loss -> metrics. old, ref: from
    frozen_logprobs, or None; without `old`, rho = 1 and its gradient is that of log p."""
    A = advantages.flatten().float().to(model.device)
    share = shares.flatten().float().to(model.device)
    kept = share.nonzero()[:, 0].tolist()
    room, sums = 0, torch.zeros(2, device=model.device)
    for slots in pack_micro_batches(sequences, kept, config):
        batch = list(chain(*slots))  # slot by slot, as are the tokens
        logprobs, owner = completion_logprobs(model, sequences, slots, config.temperature)
        old_logprobs = torch.cat([old[i] for i in batch]) if old else logprobs.detach()
        ref_logprobs = torch.cat([ref[i] for i in batch]) if ref else logprobs.detach()
        losses, more = token_losses(logprobs, old_logprobs, ref_logprobs, owner, A, config)
        loss = share[owner] @ losses
        loss.backward()
        room += len(slots) * max(tokens_of(sequences, slot) for slot in slots)
        sums += more

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
    if 0 < grad_norm < math.inf:  # at 0, Adam would move on its momentum; NaN would spread
        optimizer.step()
    model.zero_grad()
    tokens = sum(len(sequences[i].completion) for i in kept)
    kl, clipped = (sums / max(1, tokens)).tolist()
    return {
        "completions_trained": len(kept),
        "tokens_trained": tokens,
        "packing_density": tokens_of(sequences, kept) / room if room else math.nan,
        "kl": kl,
        "clipped_fraction": clipped,  # of the tokens
        "grad_norm": grad_norm,
        "updates_skipped": int(not math.isfinite(grad_norm)),
        "updates_clipped": int(config.max_grad_norm < grad_norm < math.inf),
    }


# ======== Part III: beyond the paper ========


def proportional_probabilities(scores, rate, top):
    """Scores >= 0 -> float64 pi: a line from 1 - rate at score 0 to 1 at `top`. Above the top,
    without a score (NaN) and without a top (0 or NaN), pi = 1.

    It mixes a constant, which keeps 1/pi at most 1/(1 - rate), with pi in proportion to the scores,
    which adds the least variance if they are the norms of gradients (Neyman)."""
    height = (scores.double() / top).clamp(max=1)  # 0/0 is NaN
    return (1 - rate * (1 - height)).nan_to_num(1.0)


class ProportionalDPPO(Rule):
    """Prompts that teach most are always kept, those that teach nothing with probability 1 - r_q,
    and a step rolls out as few as give the noise of prompts_per_step unpruned ones.

    A completion's score is w_q |A|. A prompt's is the root of the mean A^2 to expect of its next
    group: prompts of a similar success rate share a bin, which learns what they taught next."""

    remembers = {"rewards": 0.0, "count": 0.0}  # decayed sum and number
    remembers |= {"lowest": math.nan, "highest": math.nan}  # rewards of the last visit
    prior = 0.05  # successes, and failures, before any visit
    decay = 0.8  # factor of memory at each visit, as the policy changes
    bins = 17  # of equal width in asin(sqrt(success rate))
    forget = 0.998  # factor of what bins have learned, at each step

    def __init__(self, config, prompt_count):
        super().__init__(config, prompt_count)
        zeros = torch.zeros(self.bins, dtype=torch.float64)
        self.memory |= {"visits": zeros, "squares": zeros.clone()}  # (bins,) sums of mean A^2
        self.memory["prior_visits"] = torch.tensor(4.0).double()  # what the guess counts for

    def range_of_rewards(self):
        """The lowest reward of the last visits (NaN before any), and the width of their range, 0 if
        they are equal up to rounding. At both ends, the outermost 1% of the prompts do not count,
        unless nothing is left without them."""
        for outer in (0.01, 0.0):
            lowest = self.memory["lowest"].nanquantile(outer, interpolation="higher").item()
            highest = self.memory["highest"].nanquantile(1 - outer, interpolation="lower").item()
            if highest - lowest > 1e-6 * max(abs(lowest), abs(highest)):
                return lowest, highest - lowest
        return lowest, 0.0

    def bin_of_prompts(self):
        """(all prompts,) the bin of each, or -1 before its first visit. A success rate is the mean
        reward, scaled to the range of rewards."""
        total, count = self.memory["rewards"], self.memory["count"]
        lowest, width = self.range_of_rewards()
        successes = (total - lowest * count) / width if width > 0 else torch.zeros_like(total)
        success_rate = (self.prior + successes) / (2 * self.prior + count)
        x = success_rate.clamp(0, 1).sqrt().asin() / (math.pi / 2)
        bins = (x * self.bins).long().clamp(max=self.bins - 1)
        return bins.masked_fill(count == 0, -1)

    def expected_squares(self):
        """(all prompts,) the mean A^2 to expect: that of the bin or, before a first visit, the mean
        of all visited prompts, or 1."""
        memory = self.memory
        x = (torch.arange(self.bins).double() + 0.5) / self.bins  # the middles of the bins
        # A mean A^2 is 0 if all rewards are equal, and about 1 if not. The guess for how often they
        # are not is 4p(1 - p), at least 0.1. With p = sin(x pi/2)^2, that is sin(x pi)^2.
        guess = 0.1 + 0.9 * (math.pi * x).sin() ** 2
        if self.config.objective == "dr_grpo":  # without the std, A^2 is about p(1 - p) width^2
            guess = guess * self.range_of_rewards()[1] ** 2 / 4
        squares = memory["squares"] + memory["prior_visits"] * guess
        squares = squares / (memory["visits"] + memory["prior_visits"])  # (bins,)
        squares = squares[self.bin_of_prompts()]  # bin -1 reads the last, and is replaced below
        visited = memory["count"] > 0
        return torch.where(visited, squares, squares[visited].mean().nan_to_num(1.0))

    def limit_of_step(self, upcoming):
        """prompts_per_step over what a rollout is worth. With s^2 the A^2 to expect, as if it were
        the square of a gradient, k unpruned prompts have the noise mean(s^2)/k, and k that are kept
        of n = k/mean(pi) candidates have mean(s^2/pi)/n. The worth, how many unpruned rollouts one
        replaces, is the first over the second, in which k cancels."""
        pi = self.prompt_probabilities()
        window = window_of(pi, upcoming, self.config.prompts_per_step)
        pi, squares = pi[window], self.expected_squares()[window]
        worth = squares.mean() / (pi.mean() * (squares / pi).mean())
        worth = worth.nan_to_num(1.0).clamp(min=1.0).item()  # 0/0 if nothing teaches
        return max(1, round(self.config.prompts_per_step / worth))

    def prompt_probabilities(self):
        scores = self.expected_squares().sqrt()
        scores[self.memory["count"] == 0] = math.nan
        top = scores.nan_to_num(0.0).max()  # 0 before any visit
        return proportional_probabilities(scores, self.config.prompt_prune_rate, top)

    def completion_probabilities(self, advantages, prompt_weights):
        needed = has_gradient(advantages, self.config.beta)
        scores = advantages.abs() * prompt_weights[:, None]
        top = scores[needed].mean()  # not the largest, as some are outliers; NaN if there is none
        return needed * proportional_probabilities(scores, self.config.completion_prune_rate, top)

    def remember(self, prompts, rewards, advantages):
        memory, bins = self.memory, self.bin_of_prompts()  # by the visits before this one
        largest = math.inf  # a mean A^2 counts up to this
        if self.config.objective == "dr_grpo":  # only outliers exceed it
            largest = self.range_of_rewards()[1] ** 2 / 4 or math.inf
        for name in ("visits", "squares", "prior_visits"):
            memory[name] *= self.forget

        for q, group, A in zip(prompts, rewards, advantages):
            given = group[~group.isnan()]
            if len(given) == 0:  # no visit
                continue
            memory["lowest"][q], memory["highest"][q] = given.aminmax()
            memory["rewards"][q] = self.decay * memory["rewards"][q] + given.sum()
            memory["count"][q] = self.decay * memory["count"][q] + len(given)
            if bins[q] >= 0:
                # Unweighted, as all visited prompts of a bin were kept with the same pi.
                memory["visits"][bins[q]] += 1
                memory["squares"][bins[q]] += A.square().mean().clamp(max=largest)


RULES = {"grpo": Rule, "grpo-skip": GRPOSkip, "dppo": DPPO, "dppo-proportional": ProportionalDPPO}

# ======== Part IV: the plumbing ========

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
torch.backends.cuda.enable_cudnn_sdp(False)  # it may give NaN gradients (pytorch#196678)


class Refused(ValueError):
    """Bad input, which the command line reports in one line."""


# ---- 9. Order, precision, and which models can be trained
def next_prompts(seen, prompt_count, seed, least=0):
    """The prompts after `seen` candidates: an epoch of them or, if that is more, `least`."""
    epoch, start = divmod(seen, prompt_count)
    end = start + max(prompt_count, least)
    order = []
    for n in range(epoch, epoch + math.ceil(end / prompt_count)):  # each in its own order
        order += random.Random(f"{seed}, {n}").sample(range(prompt_count), prompt_count)
    return torch.tensor(order[start:end])


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
    """Turns any error inside into Refused, except a lack of memory, which needs other advice."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        cause = "" if error.__suppress_context__ else error.__context__ or ""  # as a full disk
        raise Refused(f"{what}{error} {cause}") from error


@torch.no_grad()
def check_sampling(task, config):
    """Refuses a model that does not fit the prompts, or whose trained policy is not the one that
    samples, as rho is taken to be 1."""
    model = task.model
    prompts = [example["prompt_ids"] for example in chain(task.train, *task.evals.values())]
    shortest, longest = min(prompts, key=len), max(prompts, key=len)
    how = " with --cuda_graphs" if config.cuda_graphs else ""
    with refusing(f"{type(model).__name__} cannot be trained here{how}: "):
        layers = transformers.DynamicCache(config=model.config).layers
        if any("Linear" in type(layer).__name__ for layer in layers):
            raise Refused("layers of linear attention have no keys and values to repeat")
        if max(map(max, prompts)) >= model.get_input_embeddings().num_embeddings:
            raise Refused("a prompt has tokens that it does not know")
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if len(longest) + config.max_completion_tokens > (positions or math.inf):
            raise Refused(f"the longest prompt and --max_completion_tokens exceed its {positions}")

        # Does the head alone make the logits? (bfloat16 rounds.)
        ids = torch.tensor([shortest], device=model.device)
        logits = model(ids).logits
        of_head = model.get_output_embeddings()(model.get_decoder()(ids).last_hidden_state)
        if not (of_head - logits).abs().max() <= 1e-2 * logits.abs().max():  # NaN fails
            raise Refused("its logits are scaled, capped or NaN")

        # Do sampling and training agree, also beside the longest sequence, which may rescale RoPE?
        short = replace(config, max_completion_tokens=16)
        sequences, sampled = sample(task, [shortest, shortest[-1:]], 4, short)  # one is padded
        slots = [range(len(sequences)), [len(sequences)]]
        sequences.append(Sequence(longest, longest[:1] * config.max_completion_tokens))
        trained, _ = completion_logprobs(model, sequences, slots, config.temperature)
        difference = (trained[: len(sampled)] - sampled).abs().mean()
        if not difference <= (1e-3 if model.dtype == torch.float32 else 0.1):
            raise Refused(f"sampled and trained log-probabilities differ by {difference:.2g}")


# ---- 10. Rewards: f(prompts, completions, **columns) -> list of float or, if not gradable, None
def text_of(completion):
    """What a completion, a text or a list of one message, says after its reasoning."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text.strip()  # "" if the reasoning has not ended


AS_READ = {  # patterns and what replaces them, in turn, so that numbers stand as they are read
    r"\\(?:text|math|bold|mbox|fbox|underline|emph)\w* *\{([^{}]*)\}": r" \1 ",
    r"(?:\b[A-Z]{1,3})?\\?[$€£]|\\?%|\\!": "",
    r"\{,\}|(?<=\d)\\[,;:](?=\d{3})": ",",
    r"[°º][CF]?|\\degree|\^ *\{? *\\circ *\}?|\*\*|\\left|\\right|\\[,;: ()[\]{}]|\\quad": " ",
    r"(?![百千万亿])[\u3000-\u9fff\uac00-\ud7af]": " ",  # Chinese, and the like
    r" *([\^/{]) *|(?<=sqrt) +| +(?=\\(?:[dt]?frac|sqrt|pi)(?![a-z]))": r"\1",
    "\N{MINUS SIGN}|[\u2011\u2013](?=\\d)": "-",
}
FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # to ASCII
GLUE = r"[.,/-]{1,2}(?=\d)|\.(?=\\)|\)(?=\^)|(?<=\d):(?=\d)|(?<=[a-z])[([](?=\d)"  # as in 1/2
WORD = r"(?:[\w^{}\\√]|" + GLUE + ")+"
NUMBER = r"(-?(?:[1-9]\d{0,2}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?)"  # -1,234.5, 18 or .5
UNIT = r"((?!(?:pi|sqrt)\b)[a-zA-Z]{2,})?"


def gsm8k_number(text, is_answer=False):
    r"""The only number after the last mark, #### or \boxed{, until its line or box ends; without a
    mark, the last number of the text; None if there is none. In an answer, it stands alone."""
    text = text.translate(FULL_WIDTH)
    for old, new in AS_READ.items():
        text = re.sub(old, new, text)
    *before, end = re.split(r"####|\\boxed *{", text)
    if before:
        end = re.split(r"[}\n]", end.strip(" {\n"))[0]
    end = re.sub(r"(^|[=:(]|\bis) *- +(?=[\d.])", r"\1 -", end)  # a sign, not a dash
    # A number is a whole word, as -1,234.5 and 18km are, but not x5, 5x, 2^3, 1/2 or 10-12.
    words = [end.strip()] if is_answer else re.findall(WORD, end)
    number = re.compile(NUMBER if is_answer else NUMBER + UNIT, re.ASCII)
    numbers = [match[1] for match in map(number.fullmatch, words) if match]
    rivals = [word for word in words if re.match(r"-?\.?\d", word)]  # 1/2 is one, but no number
    if not numbers or (before and len(rivals) > 1):
        return None
    return Decimal(numbers[-1].replace(",", ""))  # a float would round 2^53 + 1


def gsm8k(prompts, completions, answer, **columns):
    """1 if a completion gives the number of its answer, else 0; None if the answer has none."""
    rewards = []
    for completion, text in zip(completions, answer):
        wanted = gsm8k_number(str(text), is_answer=True)
        found = gsm8k_number(text_of(completion))
        rewards.append(None if wanted is None else float(found == wanted))
    return rewards


def exact(prompts, completions, answer, **columns):
    """1 if a completion is its answer, but for spaces around, else 0; None if that is no text."""
    rewards = []
    for completion, text in zip(completions, answer):
        wanted = str(text).strip() if type(text) in (str, int) else ""
        rewards.append(float(text_of(completion) == wanted) if wanted else None)
    return rewards


# ---- 11. Tasks
@dataclass
class Task:
    train: list  # examples: prompt (text or messages), prompt_ids, the data's columns
    evals: dict  # name: examples
    tokenizer: object
    reward: object  # a function
    model: object = None
    end_ids: tuple | list = ()  # all that end a completion: Qwen has two
    reference: object = None  # the model of the KL term


def load_task(config):
    """The user's task, or the embedded one. Data and reward are tried before a model is loaded."""
    task = user_task(config) if config.model else sorting_task(config)
    task.evals = {name: examples for name, examples in task.evals.items() if examples}
    some = task.train[:99]
    reward_completions(task, some, [Sequence([], [])] * len(some))
    if config.model:
        options = {"dtype": DTYPE, "attn_implementation": "sdpa", "trust_remote_code": False}
        with refusing(f"{config.model} cannot be loaded: "):
            task.model = transformers.AutoModelForCausalLM.from_pretrained(config.model, **options)
    else:
        task.model = warm_started(task.tokenizer)
    task.model.to(DEVICE).eval()
    task.end_ids = end_ids_of(task.model, task.tokenizer)
    check_sampling(task, config)
    evaluated = sum(map(len, task.evals.values()))
    told = f"{len(task.train)} prompts to train, {evaluated} to evaluate"
    print(f"{told}; {task.model.dtype} on {DEVICE}")
    return task


def end_ids_of(model, tokenizer):
    """The ids that end a completion: of tokenizer and model, and of a turn in the chat template."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "THE END"}]
    with suppress(Exception):  # no template, or one that wants another chat
        text = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("THE END")[2]
        after = tokenizer.encode(text, add_special_tokens=False)
        added = [token for token in after if token in tokenizer.added_tokens_decoder]
        ends.update(added[:1])
    return sorted(ends)


def reward_completions(task, examples, sequences):
    """B examples, B G sequences -> (B, G) float64 rewards, NaN where there is none."""
    G = len(sequences) // len(examples)
    columns = {}
    for i, (prompt_ids, ids) in enumerate(sequences):
        text = task.tokenizer.decode([token for token in ids if token not in task.end_ids])
        begun = task.tokenizer.decode(prompt_ids[-20:]).rpartition("</think>")[2]
        if "<think>" in begun and task.reward in REWARDS.values():
            text = "<think>" + text  # which the prompt began
        row = examples[i // G] | {"completion_ids": ids}
        row["prompts"] = row.pop("prompt")
        is_text = isinstance(row["prompts"], str)
        row["completions"] = text if is_text else [{"role": "assistant", "content": text}]
        for name in row.keys() - {"prompt_ids"}:
            columns.setdefault(name, []).append(copy.deepcopy(row[name]))  # it may be changed
    values = task.reward(**columns)
    with refusing(f"rewards must be {len(sequences)} numbers or None, not {values!r:.60}: "):
        numbers = []
        for value in values[:]:  # [:] refuses sets and dicts
            numbers.append(math.nan if value is None else value)
        rewards = torch.tensor(numbers, dtype=torch.float64).view(len(examples), G)
        if rewards.isinf().any():
            raise Refused("one is infinite")
        return rewards


# ---- 12. Data
def user_task(config):
    """The user's task, as yet without its model."""
    with refusing(f"{config.model} cannot be loaded: "):
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    evals = {}
    for spec in filter(None, config.eval_dataset.split(",")):
        evals[spec] = load_examples(spec, "test", config, tokenizer)[: config.eval_prompts]
    train = load_examples(config.dataset, "train", config, tokenizer, chain(*evals.values()))
    size = 0 if evals else min(len(train) // 5, config.eval_prompts)
    evals["held out"] = train[:size]
    return Task(train[size:], evals, tokenizer, config.reward_function)


def read_rows(spec, split):
    """The rows of a file or of path[[:config]:split]. Files of json and csv are read here, because
    datasets gives each column one type, and may turn 0124 into 124."""
    kind = Path(spec).suffix.lower()
    if kind not in (".json", ".jsonl", ".csv", ".parquet") and not Path(spec).is_file():
        path, *names = re.split(r":(?![^\[]*\])", spec)  # not in train[a:b]
        if names:
            split = names.pop()
        return datasets.load_dataset(path, *names, split=split)
    if kind == ".parquet":
        return datasets.load_dataset("parquet", data_files=glob.escape(spec), split="train")
    text = Path(spec).read_text(encoding="utf-8-sig")
    if kind == ".csv":
        return csv.DictReader(io.StringIO(text), restval=..., strict=True)
    if text.lstrip().startswith("["):
        return json.loads(text)
    return map(json.loads, filter(str.strip, io.StringIO(text)))


def value_of(row, columns):
    """The value in the first of the columns "a,b" that a row has; a.b is b in column a."""
    for column in columns.split(","):
        value = row
        with suppress(KeyError, TypeError):
            for name in column.split("."):
                value = value[name]
            return value
    return None


def load_examples(spec, split, config, tokenizer, evaluated=()):
    """Shuffled examples of a file or of path[[:config]:split]; tells why rows are left out."""
    with refusing(f"{spec} cannot be read: "):
        rows = iter(read_rows(spec, split))
    examples, left_out, columns = [], {}, {}
    taken = {tuple(example["prompt_ids"]) for example in evaluated}
    for number in tqdm(count(1), spec, leave=False, delay=5, disable=None):
        with refusing(f"{spec}, row {number}: "):
            row = next(rows, rows)
            if row is rows:  # the end
                break
            # In a csv, None has the fields beyond the header, and ... stands for missing ones.
            if not isinstance(row, dict) or None in row or ... in row.values():
                raise Refused("its fields are not those of the others")
            prompt, ids = encode_prompt(value_of(row, config.prompt_column), config, tokenizer)
        answer = value_of(row, config.answer_column)
        columns |= dict.fromkeys(row)
        is_ours = config.reward in REWARDS  # a reward that is None for an answer it cannot grade
        if is_ours and config.reward_function([], [""], [answer]) == [None]:
            left_out.setdefault("not gradable", []).append(answer)
        elif not ids:
            left_out.setdefault("empty", []).append(prompt)
        elif len(ids) > config.max_prompt_tokens:
            left_out.setdefault("over --max_prompt_tokens", []).append(prompt)
        elif tuple(ids) in taken:
            left_out.setdefault("repeated or evaluated", []).append(prompt)
        else:
            taken.add(tuple(ids))
            examples.append(row | {"prompt": prompt, "prompt_ids": ids, "answer": answer})

    told = f"{spec}: {number - 1} rows of {', '.join(columns)}; {len(examples)} prompts"
    for reason, some in left_out.items():
        told += f", {len(some)} {reason} ({some[0]!r:.40})"
    no_answers = all(example["answer"] is None for example in examples)
    if not examples or (no_answers and config.answer_column != Config.answer_column):
        raise Refused(f"{told}: set --prompt_column and --answer_column")
    print(f"{told}; the first ends {tokenizer.decode(examples[0]['prompt_ids'])[-60:]!r}")
    random.Random(0).shuffle(examples)  # alike for every --seed
    return [columns | example for example in examples]  # all have all columns


def encode_prompt(prompt, config, tokenizer):
    """A text or a list of messages -> the prompt as a reward gets it, and its ids."""
    messages, system = prompt, config.system_prompt
    if not prompt:
        return prompt, []
    if isinstance(prompt, str):
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        if prompt.startswith(tuple(map(str, special))) or re.match(r"\s*\[\s*\{\s*.role", prompt):
            raise Refused("it is a chat as a text: a list of messages is needed")
        if not tokenizer.chat_template:
            ids = tokenizer.encode(f"{system}\n\n{prompt}" if system else prompt)
            is_ended = ids[-1:] == [tokenizer.eos_token_id]
            return prompt, (ids[:-1] if is_ended else ids)
        messages = [{"role": "user", "content": prompt}]
    is_chat = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    if not is_chat or any(m.get("role") is None or m.get("content") is None for m in messages):
        raise Refused(f"{prompt!r:.60} is no text, and no list of messages with role and content")
    if system and any(m["role"] in ("system", "developer") for m in messages):
        raise Refused("it has a system message: drop --system_prompt")
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    is_begun = messages[-1]["role"] == "assistant"  # then its message is continued
    options = {"add_generation_prompt": not is_begun, "continue_final_message": is_begun}
    options |= config.template_kwargs
    return prompt, tokenizer.apply_chat_template(messages, return_dict=False, **options)


# ---- 13. The embedded task: sort digits
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
    """A small Qwen3 that imitated easy answers, and middle ones with a fifth of digits redrawn."""
    torch.manual_seed(0)
    net = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    net |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    net |= {"vocab_size": 259, "eos_token_id": 1, "pad_token_id": 0}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(tie_word_embeddings=True, **net))
    cached = Path(torch.hub.get_dir(), "dppo-sorter-2.pt")  # 3 if the recipe changes
    if cached.exists():
        model.load_state_dict(torch.load(cached))
        return model
    optimizer = MasterAdam(model, 2e-3)
    config = Config(temperature=1.0)
    rng = random.Random(0)
    for step in tqdm(range(400), "warm start, the first time only", disable=None):
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


# ---- 14. Settings
REWARDS = {"gsm8k": gsm8k, "exact": exact}
MINIMUM = {"group_size": 2, "max_grad_norm": 1e-6, "temperature": 1e-3}
MINIMUM |= dict.fromkeys(("prompts_per_step", "inner_epochs", "max_completion_tokens"), 1)
MINIMUM |= dict.fromkeys(("eval_samples", "rollout_batch_size", "micro_batch_tokens"), 1)
MAY_CHANGE = {"steps", "epochs", "eval_every", "save_every"}  # when a run is resumed
MAY_CHANGE |= {"rollout_batch_size", "micro_batch_tokens", "cuda_graphs", "resume"}
MUST_AGREE = {"prompts", "method", "objective", "reward", "group_size"}  # with --history's run


def setting(default, text):
    """A field of Config with its help. A pair has the default with --model, and without."""
    return field(default=default, metadata={"help": text, "metavar": ""})


def resolve(name, value, known):
    """The object that a setting's value names: one of the known, or module:name."""
    try:
        return known.get(value) or pkgutil.resolve_name(value)
    except (ImportError, AttributeError, ValueError) as error:
        raise Refused(f"--{name} {value} is not one of {', '.join(known)}: {error}") from error


@dataclass
class Config:
    """All settings. Refuses what would silently go wrong."""

    method: str = setting("dppo", "grpo, grpo-skip, dppo, dppo-proportional or module:Rule")
    objective: str = setting("grpo", "grpo, dr_grpo, dapo or gspo")
    prompt_prune_rate: float = setting(0.7, "r_q, share of low-scoring prompts to prune")
    completion_prune_rate: float = setting(0.7, "r_o, the same of completions")
    prompts_per_step: int = setting(32, "rolled out; a rule may do with fewer at equal noise")
    group_size: int = setting(8, "G, completions of each prompt")
    inner_epochs: int = setting(1, "updates on each rollout")
    beta: float = setting(0.0, "weight of the KL term")
    learning_rate: float = setting((1e-6, 5e-5), "after the warm-up")
    warmup_steps: int = setting(10, "steps over which it rises")
    max_grad_norm: float = setting(1.0, "longer gradients are clipped")
    temperature: float = setting((1.0, 0.7), "of the samples")
    max_completion_tokens: int = setting((1024, 22), "longer are cut")
    model: str = setting("", "causal LM, on the Hub or in a folder")
    dataset: str = setting("", "path[[:config]:split] on the Hub, or a file")
    prompt_column: str = setting("prompt,question,problem", "the first of these that exists")
    answer_column: str = setting("answer,solution", "the same; a.b is b in column a")
    system_prompt: str = setting("", "comes before every prompt")
    chat_template_kwargs: str = setting("{}", 'JSON, such as {"enable_thinking": false}')
    max_prompt_tokens: int = setting(512, "longer ones are left out")
    reward: str = setting(("gsm8k", "exact"), "gsm8k (a number), exact (a text), module:function")
    eval_dataset: str = setting("", "like --dataset, or a,b; if empty, some are held out")
    eval_prompts: int = setting(256, "prompts of each set, at most")
    eval_samples: int = setting(4, "samples of each prompt")
    steps: int = setting((300, 60), "training steps; 0 only evaluates")
    epochs: float = setting(0.0, "instead of steps: passes over the prompts, pruned included")
    eval_every: int = setting((0, 10), "steps between evaluations; 0: at start and end")
    save_every: int = setting(50, "steps between checkpoints; 0: only at the end")
    rollout_batch_size: int = setting(256, "sequences generated at a time")
    micro_batch_tokens: int = setting(4096, "tokens of a forward pass")
    cuda_graphs: bool = setting(False, "rollouts by CUDA graphs, as yet untried on a GPU")
    seed: int = setting(0, "of order, rollouts and draws")
    output_dir: str = setting("", "a new folder; otherwise one in runs/")
    history: str = setting("", "folder of a run whose memory to start with")
    resume: str = setting("", "folder of a run to go on with")

    def __post_init__(self):
        if self.epochs > 0:
            if self.steps not in (0, Config.steps):
                raise Refused("--steps and --epochs exclude each other")
            self.steps = 0
        for name, value in asdict(self).items():
            if isinstance(value, tuple):  # a pair of defaults
                value = value[0] if self.model else value[1]
                setattr(self, name, value)
            least = MINIMUM.get(name, 0)
            most = 0.99 if name.endswith("prune_rate") else 1e15
            if isinstance(value, int | float) and not least <= value <= most:  # NaN fails
                raise Refused(f"--{name} {value} must be from {least} to {most:g}")
        if self.objective not in CLIPPING:
            raise Refused(f"--objective {self.objective} is not one of {', '.join(CLIPPING)}")
        if bool(self.model) != bool(self.dataset):
            raise Refused("--model or --dataset is missing: data of your own need both")
        with refusing("--chat_template_kwargs must be a JSON object: "):
            self.template_kwargs = {} | json.loads(self.chat_template_kwargs)
        self.rule_class = resolve("method", self.method, RULES)
        if not (isinstance(self.rule_class, type) and issubclass(self.rule_class, Rule)):
            raise Refused(f"--method {self.method} is no subclass of Rule")
        self.reward_function = resolve("reward", self.reward, REWARDS)
        if isinstance(self.reward_function, type) or not callable(self.reward_function):
            raise Refused(f"--reward {self.reward} is no function")


# ---- 15. Runs
def evaluate(task, config):
    """-> the mean of all rewards, `accuracy`, and of those of each set; some completions."""
    transformers.set_seed(config.seed % 2**32)  # the same every time
    given, shown = {"accuracy": torch.zeros(0)}, []
    for name, examples in task.evals.items():
        sequences, rewards, _ = rollout(task, examples, config.eval_samples, config)
        given[f"accuracy of {name}"] = rewards.flatten()
        given["accuracy"] = torch.cat([given["accuracy"], rewards.flatten()])
        for q, example in enumerate(examples[:3]):
            text = task.tokenizer.decode(sequences[q * config.eval_samples].completion)
            shown.append([text, str(example.get("answer")), rewards[q, 0].item()])
    means = {name: rewards.nanmean().item() for name, rewards in given.items()}
    return means | {"evaluation": shown}


def record_of(step, task):
    """A step's record: means over its window, estimated from what was kept. Over several updates,
    counts are summed, fractions averaged, and the norm and the weight are the largest."""
    updates = step.updates
    w_q = step.w_q[:, None].expand_as(step.rewards).flatten().tolist()
    is_missing = step.rewards.isnan()
    is_cut = [ids[-1] not in task.end_ids for _, ids in step.sequences]
    given = step.w_q * ~is_missing.all(dim=1)  # (B,), 0 without a reward

    record = updates[-1] | {"prompts_seen": step.N, "prompts_rolled": len(step.w_q)}
    for name in ("completions_trained", "tokens_trained", "updates_skipped", "updates_clipped"):
        record[name] = sum(update[name] for update in updates)
    for name in ("packing_density", "kl", "clipped_fraction"):
        record[name] = fmean(update[name] for update in updates)
    norms = torch.tensor([update["grad_norm"] for update in updates], dtype=torch.float64)
    record["grad_norm"] = norms.max().item()  # NaN if one is
    record["weight_max"] = max(w.max().item() for w in step.weights)
    record["mean_length"] = step.mean_length
    record["reward"] = (given @ step.rewards.nanmean(dim=1).nan_to_num() / given.sum()).item()
    record["zero_variance_fraction"] = (given @ (~step.A.any(dim=1)).double() / given.sum()).item()
    record["missing_fraction"] = fmean(is_missing.flatten().tolist(), w_q)
    record["truncated_fraction"] = fmean(is_cut, w_q)
    record["completion_length"] = fmean((len(ids) for _, ids in step.sequences), w_q)
    return record


def summary(steps, config):
    """What to tell of a whole run: means over its steps, and if clipping undid the weights."""
    if not steps:
        return []
    seconds = sum(record["rollout_seconds"] + record["train_seconds"] for record in steps)
    told = [f"{seconds:.0f} s of training with {steps[-1]['updates']} updates"]
    names = ("zero_variance_fraction", "missing_fraction", "truncated_fraction", "updates_skipped")
    for name in (*names, "rollout_worth"):
        values = torch.tensor([record[name] for record in steps], dtype=torch.float64)
        told.append(f"{name} {values.nanmean():.2f}")  # NaN where a step had no reward at all

    has_weights = max(record["weight_max"] for record in steps) > 1 + 1e-9
    clipped = sum(record["updates_clipped"] for record in steps) / max(1, steps[-1]["updates"])
    if config.rule_class.unbiased and has_weights and clipped > 0.5:
        told.append(f"the norm was clipped in {clipped:.0%} of the updates: raise --max_grad_norm")
    return told


@contextmanager
def writing(path):
    """A path to write to, which replaces `path` when it is whole."""
    with refusing(f"{path}: "), TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder, path.name)
        yield partial
        partial.replace(path)


class Run:
    """A run: its records, one of step 0 and one of each step, and all that it needs to go on."""

    def __init__(self, config, task):
        self.config, self.task = config, task
        checksum = 0  # as other data may have as many prompts
        for example in task.train:
            pair = example["prompt_ids"], example.get("answer")
            checksum = zlib.crc32(str(pair).encode(), checksum)
        self.settings = asdict(config) | {"prompts": f"{len(task.train)}, checksum {checksum}"}
        self.rule = config.rule_class(config, len(task.train))
        self.optimizer = MasterAdam(task.model, config.learning_rate)
        task.reference = copy.deepcopy(task.model) if config.beta > 0 else None
        self.records = [dict.fromkeys(("step", "updates", "candidates_so_far", "mean_length"), 0)]
        new = time.strftime(f"runs/%Y%m%d-%H%M%S-{os.getpid()}")
        self.out = Path(config.resume or config.output_dir or new).absolute()
        was_saved = (self.out / "checkpoint.pt").exists() or (self.out / "model").exists()
        if config.resume and was_saved:
            self.restore(self.out, self.settings.keys() - MAY_CHANGE)
        elif config.history:
            self.restore(Path(config.history), MUST_AGREE, only_memory=True)
        self.memory = copy.deepcopy(self.rule.memory)  # of the last whole step
        with refusing("--output_dir or --resume: "):
            self.out.mkdir(parents=True, exist_ok=bool(config.resume))  # last: none if refused
        with writing(self.out / "config.json") as path:
            path.write_text(json.dumps(asdict(config), indent=2))
        self.logged = 0  # records in metrics.jsonl, which is written anew
        self.is_stopped = False

    def restore(self, folder, must_agree, only_memory=False):
        """Takes over a run's memory if these settings agree and, to go on with it, the rest."""
        with refusing(f"{folder}: "):
            saved = torch.load(folder / "checkpoint.pt", "cpu", mmap=True)
        for name in sorted(must_agree):
            if saved["settings"].get(name) != self.settings[name]:
                raise Refused(f"{folder} was made with {name} = {saved['settings'].get(name)!r}")
        self.rule.memory |= copy.deepcopy(saved["memory"])  # or the file would stay mapped
        last, optimizer = saved["records"][-1], self.optimizer
        if only_memory:  # and these, as the count of candidates seeds random numbers
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
        """Stops at once or, if this step has begun to change the weights, after it."""
        self.is_stopped = True
        if self.records[-1]["updates"] == self.optimizer.updates:
            raise KeyboardInterrupt

    def progress(self):
        """Steps or, with --epochs, candidates: how many there were, and how many there will be."""
        start, last, epochs = self.records[0], self.records[-1], self.config.epochs
        if epochs > 0:
            seen = last["candidates_so_far"] - start["candidates_so_far"]
            return seen, math.ceil(epochs * len(self.task.train) - 1e-9)
        return last["step"], self.config.steps

    def make_step(self):
        started_at = time.perf_counter()
        config, before = self.config, self.records[-1]
        number, seen = before["step"] + 1, before["candidates_so_far"]
        transformers.set_seed((1_000_003 * config.seed + seen) % 2**32)
        # Draws have a generator of their own, as a reward may seed torch's.
        generator = torch.Generator().manual_seed(torch.randint(2**32, ()).item())
        rate = config.learning_rate * min(1.0, number / max(1, config.warmup_steps))
        self.optimizer.param_groups[0]["lr"] = rate
        least = 100 * config.prompts_per_step  # a window of theirs: pi is at least 0.01
        upcoming = next_prompts(seen, len(self.task.train), config.seed, least)
        state = {"mean_length": before["mean_length"], "generator": generator}
        step = dppo_step(self.task, self.rule, self.optimizer, upcoming, **state)

        seen += step.N
        seconds = time.perf_counter() - started_at - step.rollout_seconds
        record = record_of(step, self.task) | {"step": number, "updates": self.optimizer.updates}
        record |= {"candidates_so_far": seen, "epoch": seen / len(self.task.train)}
        record |= {"rollout_seconds": step.rollout_seconds, "train_seconds": seconds}
        record["rollout_worth"] = config.prompts_per_step / step.limit
        memory = {}
        for name, value in self.rule.memory.items():  # as tensors, as numpy's could not be loaded
            dtype = torch.float64 if isinstance(value, float) else None
            memory[name] = torch.as_tensor(value, dtype=dtype).clone()
        self.memory, self.records = memory, [*self.records, record]  # at once, so never one alone
        return record

    def log(self, bar):
        """Evaluates if it is time, and writes new records, as strict JSON."""
        record, every = self.records[-1], self.config.eval_every or math.inf
        done, total = self.progress()
        if "accuracy" not in record and (record["step"] % every == 0 or done >= total):
            record |= evaluate(self.task, self.config)
            names = [f"accuracy of {name}" for name in self.task.evals]
            told = [f"{name} {record[name]:.2f}" for name in names]
            bar.write(f"step {record['step']}: {', '.join(told) or 'nothing to evaluate'}")
        path, mode = self.out / "metrics.jsonl", "a" if self.logged else "w"
        with refusing(f"{path}: "), path.open(mode) as file:
            for new in self.records[self.logged :]:
                strict = json.loads(json.dumps(new), parse_constant=lambda name: None)
                file.write(json.dumps(strict) + "\n")  # null for NaN
        self.logged = len(self.records)
        bar.update(done - bar.n)


@contextmanager
def on_signals(handler):
    """Ctrl-C, and SIGTERM at the end of a job's time on a cluster, call `handler` meanwhile."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before):
            signal.signal(number, old)


def train(config, task):
    """Makes a run, or its rest. Saves its last whole step, unless a failure came amid updates."""
    run = Run(config, task)
    print(f"if it is stopped, go on with: python dppo.py --resume={str(run.out)!r}")
    with on_signals(signal.SIG_IGN):  # while it saves
        try:
            with on_signals(run.stop):
                train_steps(run)
        finally:
            last = run.records[-1]
            is_whole = last["updates"] == run.optimizer.updates
            if is_whole and last["step"] > 0:
                run.save()
                with refusing(f"{run.out}/model: "):
                    task.model.save_pretrained(run.out / "model")
                    task.tokenizer.save_pretrained(run.out / "model")
    print("; ".join([*summary(run.records[1:], config), f"results are in {run.out}"]))


def train_steps(run):
    """Makes the steps that are left, logs each, and saves some."""
    done, total = run.progress()
    with tqdm(total=total, initial=done, disable=None) as bar:
        run.log(bar)
        while done < total:
            record = run.make_step()
            if run.is_stopped:
                raise KeyboardInterrupt
            bar.set_description("epoch {epoch:.1f}, reward {reward:.2f}".format(**record))
            run.log(bar)
            done, total = run.progress()
            if done < total and record["step"] % (run.config.save_every or math.inf) == 0:
                run.save()


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
                settings = asdict(saved)
                if any(argument.startswith(("--steps", "--epochs")) for argument in sys.argv):
                    del settings["steps"], settings["epochs"]  # what is given counts alone
                parser.set_defaults(**settings)
        config = parser.parse_args_into_dataclasses()[0]
        if not config.model:  # half of the threads, as waiting ones spin
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        train(config, load_task(config))
    except KeyboardInterrupt:
        sys.exit(130)
    except (torch.OutOfMemoryError, MemoryError):
        sys.exit("dppo.py: out of memory: lower --micro_batch_tokens or --rollout_batch_size")
    except Refused as error:
        parser.exit(2, f"dppo.py: {' '.join(str(error).split())[:400]}\n")


if __name__ == "__main__":
    sys.modules["dppo"] = sys.modules["__main__"]  # for a rule's `import dppo`
    main()
