"""Dynamic Pruning Policy Optimization (DPPO) in one file: GRPO with unbiased pruning.

After "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" (Zhu et al., 2026,
arXiv 2603.04135). It is neither Diffusion PPO nor Divergence PPO, which TRL calls `dppo`.

GRPO samples a group of completions for every prompt and trains on all of them, although many carry
no learning signal. DPPO drops some prompts before the rollout and some completions after it, at
random, and divides the loss of what it keeps by the probability of having been kept, so that the
expected gradient is still that of full GRPO. What is left is packed densely into slots.

    python dppo.py                              # a small embedded model, offline, in two minutes
    python dppo.py --method dppo-proportional   # the same with our own rule of what to keep
    python dppo.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k:main:train

Part I is the method. It ends with `dppo_step`, the paper's algorithm, and you can stop there. Part
II is the plumbing that the method needs: model, rewards, data, runs.

    q, i, t   a prompt; a completion of its group, or of all; a token of the completion
    N         number of candidate prompts of a step, its window
    B         number of prompts of the window that are kept and rolled out
    G         number of completions of a prompt, its group
    M, T      number of completions in a micro-batch, and of tokens in the longest of them
    r, A      reward and advantage of a completion
    P, pi     probability of being pruned, and of being kept: pi = 1 - P
    w         importance weight: w_q of a prompt times w_qi of its completion, each 1/pi or 0
    C         fraction that is kept: kept/total
    r_q, r_o  fraction of the low-scoring prompts, or completions, that is pruned
    theta     the parameters of the policy
    rho       ratio of a token's probability under the new policy to that under the old one
    beta, KL  weight of the KL term, and the divergence from a reference policy that it limits
    l, L      loss of a completion; loss of the full batch, of which L_hat is the estimate
    Z         what the sum over a completion's tokens is divided by
    m         a running mean of completion lengths, which is Z for dapo
    NaN       a reward that could not be given, or a score that is not known yet

Where the paper is silent or contradicts itself, we read it as follows:

  - Of the low-scoring set, a fixed fraction is pruned at random (keep_probabilities).
  - Without KL, completions with A = 0 have no gradient and are left out first (GRPOSkip).
  - Whether a prompt scores low is decided among all prompts that have a score (DPPO).
  - The window is so long that what survives its pruning fills the rollout batch (pick_prompts).
  - The loss is divided by N G, the number of candidate completions, pruned or not (policy_loss).
  - For dapo, N G m stands in for the number of tokens, which pruning hides (running_length).
  - An update without a gradient is left out; Adam would move on its momentum (train_step).
"""

import argparse
import copy
import csv
import inspect
import json
import math
import os
import pkgutil
import random
import re
import shlex
import signal
import sys
import time
import warnings
import zlib
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import datasets
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# ==================================== Part I: the method ====================================


# ---- 1. Settings
ANY = 1e15  # of numbers that have no other upper bound


def setting(default, text, least=0, most=ANY):
    """A field of Settings: its default, its line of --help, and the bounds if it is a number."""
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass
class Settings:
    """The settings of the method. Config, in Part II, adds those of model, data and run. Where
    the default is None, Config puts in one that depends on the rule or on the task."""

    method: str = setting(
        "dppo", "grpo, grpo-skip, dppo, dppo-proportional, or your own module:Rule"
    )
    objective: str = setting("grpo", "of the loss: grpo, dr_grpo, dapo or gspo")
    prompt_prune_rate: float | None = setting(
        None, "r_q, share of the low-scoring prompts to prune (default: the rule's)", most=0.99
    )
    completion_prune_rate: float = setting(
        0.7, "r_o, share of the low-scoring completions to prune", most=0.99
    )
    prompts_per_step: int = setting(32, "at most so many prompts are rolled out in a step", least=1)
    group_size: int = setting(8, "G, completions of each prompt", least=2)
    inner_epochs: int = setting(1, "updates on each rollout", least=1)
    beta: float = setting(0.0, "weight of the KL term")
    learning_rate: float | None = setting(None, "learning rate after the warm-up")
    warmup_steps: int = setting(10, "steps over which the learning rate rises")
    temperature: float | None = setting(None, "sampling temperature", least=1e-3)
    max_completion_tokens: int | None = setting(None, "where completions are cut", least=1)


# For each objective, how far rho may fall below 1 and rise above it before it is clipped.
CLIPPING = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


# ---- 2. Pruning
def group_advantages(rewards, scale_by_std=True):
    """(B, G) rewards -> (B, G) float64 advantages A = (r - mean)/(std + 1e-4), or r - mean.

    The mean and the std (divisor G - 1) are always those of the whole group: re-centring A after
    pruning would bias the gradient. A is exactly 0 where all rewards are equal, or one is NaN."""
    rewards = rewards.double()
    advantages = rewards - rewards.mean(dim=1, keepdim=True)  # (B, G)
    if scale_by_std:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-4)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # (B, 1)
    return advantages.masked_fill(equal, 0.0).nan_to_num()


def keep_probabilities(scores, rate):
    """The paper's rule: (n,) scores >= 0 -> (n,) float64 keep probabilities pi = 1 - P.

    The low set holds the items that score below the mean. If it has k of them, floor(rate k) are
    to be pruned, all with the same probability, so that pi = 1 - floor(rate k)/k for each. Every
    other item has pi = 1, and so has an item without a score (NaN).

    The paper's Algorithm 1 is reported to remove the lowest scores for certain. That would be
    pi = 0 where the gradient is not 0, whereas its proof assumes P < 1. Here only the number that
    is removed is fixed, if all n are drawn at once, as completions are; which ones is random."""
    scores = scores.double()
    low = scores < scores.nanmean() * (1 - 1e-6)  # (n,) by more than rounding; NaN < x is False
    count = int(low.sum())
    pruned = math.floor(rate * count + 1e-9)  # 0.29 * 100 is 28.999999999999996
    pi = torch.ones_like(scores)  # (n,)
    pi[low] = (count - pruned) / max(1, count)
    return pi


def draw(pi, generator):
    """(n,) keep probabilities -> (n,) float64 weights: 1/pi where kept, 0 where pruned. Where
    pi > 0, a weight has the expectation pi (1/pi) + (1 - pi) 0 = 1.

    This is systematic sampling. The items are laid end to end in random order, each as long as
    its pi, and a comb with teeth at u, u + 1, u + 2, ... is held over them, for one u uniform in
    [0, 1). An item is kept if a tooth falls on it, which has probability pi. In all, sum(pi) items
    are kept, rounded down or up. With lengths 0.5, 1, 0.25, 0.25 and u = 0.6, the teeth at 0.6 and
    1.6 keep the second item and the third."""
    order = torch.randperm(len(pi), generator=generator)  # (n,)
    ends = pi[order].cumsum(0)  # (n,)
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    teeth_up_to_end = (ends - u).ceil()  # (n,) in the example 0, 1, 2, 2
    has_tooth = teeth_up_to_end.diff(prepend=torch.zeros(1)) > 0  # (n,)
    kept = order[has_tooth]
    weights = torch.zeros_like(pi)  # (n,)
    weights[kept] = 1 / pi[kept]
    return weights


class Rule:
    """What is kept, with which probability. This one is textbook GRPO: it keeps everything.

    Write your own as a subclass. The gradient stays unbiased as long as pi is known before the
    draw: a prompt's pi may depend on memory alone, a completion's pi on memory and the rollout.
    A prompt needs pi > 0; a completion may have pi = 0 if it has no gradient."""

    unbiased = True  # False: all that is kept weighs the same, and the loss is its mean
    default_prompt_prune_rate = 0.7
    remembers = {}  # name: initial value of what is remembered of each prompt, a number

    def __init__(self, config, prompt_count):
        self.config = config
        self.prompt_count = prompt_count
        self.memory = {}  # saved in checkpoints
        for name, value in self.remembers.items():
            self.memory[name] = torch.full((prompt_count,), value, dtype=torch.float64)

    def has_gradient(self, advantages):
        """(B, G) bool: A is not 0, or there is a KL term."""
        return (advantages != 0) | (self.config.beta > 0)

    def prompt_probabilities(self):
        """(all prompts,) float64 pi of each prompt, from memory alone."""
        return torch.ones(self.prompt_count, dtype=torch.float64)

    def completion_probabilities(self, advantages, prompt_weights):
        """(B, G) advantages, (B,) weights of their prompts -> (B, G) float64 pi."""
        return torch.ones_like(advantages)

    def update(self, prompts, rewards, advantages):
        """Remembers a rollout: (B,) indices of prompts, (B, G) rewards, (B, G) advantages."""


def check_probabilities(pi, needed):
    """Raises ValueError where the keep probabilities of somebody's own rule would silently bias
    the gradient: pi must have the shape of `needed` and be positive wherever that is True."""
    valid = (pi >= 0) & (pi <= 1 + 1e-9)  # False for NaN
    if pi.shape != needed.shape or not (valid & ((pi > 0) | ~needed)).all():
        raise ValueError(
            f"a rule must give keep probabilities of shape {tuple(needed.shape)}, 0 < pi <= 1; "
            "0 is allowed for a completion without a gradient, and if unbiased = False"
        )


class GRPOSkip(Rule):
    """GRPO without the completions that have no gradient. This costs neither bias nor variance."""

    def completion_probabilities(self, advantages, prompt_weights):
        return self.has_gradient(advantages).double()


class DPPO(GRPOSkip):
    """The paper's rule. A completion's score is |A|, and it is low if it is below the mean |A| of
    the completions that have a gradient. A prompt's score is the mean |A| of its group at its last
    visit, and it is low if it is below the mean over all prompts that have a score."""

    remembers = {"score": math.nan}

    def prompt_probabilities(self):
        return keep_probabilities(self.memory["score"], self.config.prompt_prune_rate)

    def completion_probabilities(self, advantages, prompt_weights):
        trainable = self.has_gradient(advantages)  # (B, G)
        scores = advantages[trainable].abs()  # (trainable completions,)
        pi = torch.zeros_like(advantages)  # (B, G)
        pi[trainable] = keep_probabilities(scores, self.config.completion_prune_rate)
        return pi

    def update(self, prompts, rewards, advantages):
        scores = advantages.abs().mean(dim=1)  # (B,) 0 where a reward is missing
        for q, score in zip(prompts, scores):  # if a window has a prompt twice, the later counts
            self.memory["score"][q] = score


def pick_prompts(rule, upcoming, limit, generator):
    """Prompt-level pruning: (k,) upcoming prompts -> N, the size of the window, which is the first
    N of them; (B,) the prompts of the window that are kept; (B,) their weights.

    The window is the longest beginning of `upcoming` whose pi sum to at most `limit`. The draw
    keeps sum(pi) of it, rounded down or up, so B is `limit` or one less, unless there are too few
    prompts. N follows from history and order alone. If it depended on the draw, as it does where
    one goes on until enough prompts have survived, the gradient would be biased.

    The price of a varying N is that each step counts the same in training, so a prompt in a small
    window weighs more. Small windows have more prompts with pi = 1. Over an epoch, these weigh
    about 1 + (1 - pi)/limit times as much as the others, where pi is that of the others. At r_q =
    0.7 this was measured as 1.02 at a limit of 32, 1.1 at 8, 1.2 at 4, and 1.4 to 2.9 at 1."""
    pi = rule.prompt_probabilities().double()  # (all prompts,)
    check_probabilities(pi, needed=torch.full((rule.prompt_count,), rule.unbiased))
    if not pi.any():
        raise ValueError("a rule must keep some of the prompts")
    pi = pi[upcoming]  # (k,)
    N = int((pi.cumsum(0) <= limit + 1e-9).sum())
    pi = pi[:N]  # (N,)
    if pi.sum() < 1:  # with few prompts, or a limit of 1: keep exactly one of them
        pi = pi / pi.sum()  # still fixed before the draw
    weights = draw(pi, generator)  # (N,)
    return N, upcoming[:N][weights > 0], weights[weights > 0]


def weigh_completions(rule, rewards, advantages, prompt_weights, N, generator):
    """Completion-level pruning: (B, G) rewards, (B, G) advantages, (B,) weights of the prompts
    -> (B, G) weights w = w_q w_qi, prompt times completion, 0 where pruned.

    E[w_q w_qi l] = E[w_q E[w_qi | rollout] l] = E[w_q l] = E[l], because pi = 0 only where l = 0,
    and because whether a prompt is drawn has no influence on what its rollout would be. So pi of
    a completion may depend on all of the rollout, and on which prompts have survived."""
    pi = rule.completion_probabilities(advantages, prompt_weights).double()  # (B, G)
    has_gradient = Rule.has_gradient(rule, advantages)  # even if a subclass has another opinion
    check_probabilities(pi, needed=has_gradient & rule.unbiased)
    missing = rewards.isnan().any(dim=1, keepdim=True)  # (B, 1)
    pi = pi.masked_fill(missing, 0.0)  # a group with a NaN has no loss, neither here nor in L
    w_q = prompt_weights[:, None]  # (B, 1)
    w_qi = draw(pi.flatten(), generator).view_as(pi)  # (B, G)
    if rule.unbiased:
        return w_q * w_qi
    # A biased rule trains on the mean over what it keeps: there, w/(N G) is 1/(number kept).
    kept = (w_qi > 0).double()
    return kept * N * rule.config.group_size / kept.sum().clamp(min=1)


# ---- 3. Dense Prompt Packing
def pack(lengths, capacity, lookahead=64):
    """Window-based greedy packing: lengths in tokens, from 1 to `capacity` -> slots, which are
    lists of indices whose lengths sum to at most `capacity`.

    Of the next `lookahead` sequences, the longest that fits goes into the open slot. When none
    of them fits, the next slot is opened."""
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
    """Packs the (prompt ids, completion ids) at `indices` -> micro-batches, which are lists of
    slots, which are lists of indices; and the density, how full the slots are.

    Attention within a slot costs the square of its length, so a slot is only as long as the
    longest sequence (at least 128 tokens, and a multiple of 8), and a micro-batch has several."""
    lengths = [len(sequences[i][0]) + len(sequences[i][1]) for i in indices]
    capacity = 8 * math.ceil(max([128, *lengths]) / 8)
    slots = []
    for slot in pack(lengths, capacity):
        slots.append([indices[place] for place in slot])
    slots_at_once = max(1, config.micro_batch_tokens // capacity)
    starts = range(0, len(slots), slots_at_once)
    micro_batches = [slots[start : start + slots_at_once] for start in starts]
    return micro_batches, sum(lengths) / max(1, capacity * len(slots))


# ---- 4. Forward pass, loss and update
def lay_out(sequences, slots):
    """The sequences of some slots -> (slots, length, 3): the token id, the position id, and 1 where
    the next token is one of a completion, otherwise 0.

    Position ids restart at 0 with every sequence. From this, transformers derives a causal mask
    that is block-diagonal, so that attention never crosses a boundary. Each pad has position 0."""
    tables = []
    for slot in slots:
        tokens, positions, predicts = [], [], []
        for i in slot:
            prompt, completion = sequences[i]
            tokens += prompt + completion
            positions += range(len(prompt) + len(completion))
            # The last token of the prompt predicts the first of the completion, and so on.
            predicts += [0] * (len(prompt) - 1) + [1] * len(completion) + [0]
        tables.append(torch.tensor([tokens, positions, predicts]).T)  # (tokens of the slot, 3)
    table = pad_sequence(tables, batch_first=True)  # (slots, tokens of the fullest, 3)
    padding = -table.shape[1] % 8  # matrix products are fast at multiples of 8
    return torch.nn.functional.pad(table, (0, 0, 0, padding))


def token_logprobs(head, hidden, targets, temperature):
    """(n, width) hidden states, (n,) ids of the next tokens -> (n,) log-probabilities of these
    tokens, (n,) entropies of the distributions that they come from."""
    logits = head(hidden).float().div_(temperature)  # (n, vocabulary)
    logprobs = logits.log_softmax(dim=-1)  # (n, vocabulary)
    of_targets = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    entropies = torch.special.entr(logprobs.detach().exp()).sum(dim=-1)
    return of_targets, entropies


def completion_logprobs(model, sequences, slots, temperature):
    """The forward pass over packed slots -> (M, T) log-probabilities of the completions' tokens,
    one row for each completion in the order of the slots, 0 after its end; and (tokens,) the
    entropies. Only the tokens of completions get logits, because those of all would be huge."""
    table = lay_out(sequences, slots)
    places = table[:, :, 2].flatten().nonzero().squeeze(1).to(model.device)  # (tokens,)
    input_ids, position_ids, _ = table.to(model.device).unbind(dim=2)  # (slots, length) each

    decoder = model.get_decoder()
    output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    hidden = output.last_hidden_state.flatten(0, 1)[places]  # (tokens, width)
    targets = input_ids.flatten()[places + 1]  # (tokens,)
    head = model.get_output_embeddings()
    logprobs, entropies = in_chunks(token_logprobs, head, hidden, targets, temperature)

    lengths = [len(sequences[i][1]) for i in chain(*slots)]
    return pad_sequence(logprobs.split(lengths), batch_first=True), entropies


def policy_loss(logprobs, old_logprobs, ref_logprobs, lengths, advantages, weights, N, m, config):
    """The importance-weighted clipped surrogate of M completions -> scalar, their share of the
    loss; and for the metrics (M, T) whether a token is clipped, and (M, T) its KL.

        L_hat = 1/(N G) sum_i w_i l_i, over all N G completions
        l_i = 1/Z_i sum_t [-min(rho_t A_i, clip(rho_t, 1 - down, 1 + up) A_i) + beta KL_t]

    With w = 1 this is the full loss L. Because E[w l] = E[l] (weigh_completions), E[L_hat] = E[L]
    at a given theta, also with clipping and KL, which the paper's proof leaves out. The paper
    averages over what is kept and rescales by C/(1 - P) with C = kept/total. That is the same
    estimator, Horvitz-Thompson's:

        (1/kept) C/(1 - P) = (1/kept) (kept/total)/pi = 1/(total pi) = w/(N G)

    logprobs, old_logprobs, and ref_logprobs (None without beta): (M, T); lengths, advantages,
    weights: (M,)."""
    mask = torch.arange(logprobs.shape[1], device=logprobs.device) < lengths[:, None]  # (M, T)
    log_ratio = logprobs - old_logprobs  # (M, T)
    if config.objective == "gspo":
        # One ratio for the whole sequence: exp of the mean log-ratio.
        mean_log_ratio = (log_ratio * mask).sum(dim=1) / lengths  # (M,)
        log_ratio = mean_log_ratio[:, None].expand_as(log_ratio)
    rho = log_ratio.exp()
    A = advantages[:, None]  # (M, 1)
    down, up = CLIPPING[config.objective]
    surrogate = torch.min(rho * A, rho.clamp(1 - down, 1 + up) * A)  # (M, T)
    clipped = (surrogate < rho * A) & mask  # (M, T)

    kl = torch.zeros_like(logprobs)  # (M, T)
    if config.beta > 0:
        log_ref_ratio = ref_logprobs - logprobs
        kl = log_ref_ratio.exp() - 1 - log_ref_ratio  # x - 1 - log x, x = p_ref/p: known as k3

    # grpo and gspo: the length. In gspo, a mean over equal terms makes l_i that one term.
    Z = {"dr_grpo": config.max_completion_tokens, "dapo": m}.get(config.objective, lengths)
    loss_of_completion = ((config.beta * kl - surrogate) * mask).sum(dim=1) / Z  # (M,)
    return (weights * loss_of_completion).sum() / (N * config.group_size), clipped, kl.detach()


def train_step(model, optimizer, sequences, advantages, weights, N, m, config, old=None, ref=None):
    """One update on what was kept -> metrics. Even an unbiased gradient does not give an unbiased
    update, because Adam and the clipping of the norm are not linear.

    sequences: the (prompt ids, completion ids) of all completions; advantages, weights: one number
    for each; old, ref: their log-probabilities under the old policy and the reference, from
    frozen_logprobs. Without `old`, the policy that is trained is the one that has sampled. Then
    rho is 1, but its gradient with respect to theta is not 0."""
    advantages, weights = advantages.flatten(), weights.flatten()
    kept = weights.nonzero().squeeze(1).tolist()
    micro_batches, density = pack_micro_batches(sequences, kept, config)
    metric_sums = torch.zeros(3, device=model.device)  # entropy, clip fraction, KL
    for slots in micro_batches:
        batch = list(chain(*slots))  # M indices
        lengths = torch.tensor([len(sequences[i][1]) for i in batch], device=model.device)  # (M,)
        A = advantages[batch].to(model.device, torch.float32)  # (M,)
        w = weights[batch].to(model.device, torch.float32)  # (M,)
        logprobs, entropies = completion_logprobs(model, sequences, slots, config.temperature)
        old_logprobs, ref_logprobs = logprobs.detach(), None  # (M, T)
        if old is not None:
            old_logprobs = pad_sequence([old[i] for i in batch], batch_first=True)
        if ref is not None:
            ref_logprobs = pad_sequence([ref[i] for i in batch], batch_first=True)
        loss, clipped, kl = policy_loss(
            logprobs, old_logprobs, ref_logprobs, lengths, A, w, N, m, config
        )
        loss.backward()  # adds up over the micro-batches
        metric_sums += torch.stack([entropies.sum(), clipped.sum(), kl.sum()])

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
    tokens = sum(len(sequences[i][1]) for i in kept)
    means = (metric_sums / max(1, tokens)).tolist()
    finite = math.isfinite(grad_norm + sum(means))
    if finite and grad_norm > 0:  # without a gradient, Adam would move on its momentum alone
        optimizer.step()
    model.zero_grad()
    measured = dict(zip(("entropy", "clip_fraction", "kl", "grad_norm"), (*means, grad_norm)))
    return (measured if finite else dict.fromkeys(measured)) | {
        "skipped": int(not finite),
        "completions_trained": len(kept),
        "tokens_trained": tokens,
        "slot_density": density,
    }


# ---- 5. The step: the paper's algorithm
def running_length(progress, lengths, prompt_weights):
    """dapo's m: the running mean of completion lengths over earlier steps. The (B, G) lengths of
    this step are taken in afterwards. At the very first step, where no rule of ours prunes a
    prompt, m is that step's own mean.

    dapo divides by the number of all tokens, which is unknown where prompts are pruned. With N G m
    in its place, the gradient is unbiased, because m is fixed before the draw."""
    mean_lengths = lengths.float().mean(dim=1)  # (B,)
    this_step = ((prompt_weights * mean_lengths).sum() / prompt_weights.sum()).item()
    m = progress.mean_length or this_step
    progress.mean_length = 0.9 * m + 0.1 * this_step
    return m


def dppo_step(task, rule, optimizer, reference, progress, config):
    """One step of the paper's algorithm -> what happened in it, for the record.

    task has the model, the training examples (`train`) and the reward; reference is what KL is
    measured against. All that is random follows from the seed and `progress.seen`, the number of
    candidate prompts so far, which a run with --history takes over so as not to repeat draws."""
    transformers.set_seed((1_000_003 * config.seed + progress.seen) % 2**32)
    # The draws have their own generator, because a reward function may seed torch's global one.
    generator = torch.Generator().manual_seed(torch.randint(2**32, ()).item())

    # 1. Prune prompts by what is remembered of them.
    upcoming = next_prompts(progress.seen, len(task.train), config.seed)
    N, prompts, prompt_weights = pick_prompts(rule, upcoming, config.prompts_per_step, generator)
    progress.step += 1
    progress.seen += N

    # 2. Roll out the prompts that are kept, and reward their completions.
    examples = [task.train[q] for q in prompts.tolist()]
    sequences = rollout(task, examples, config.group_size, config)  # B G pairs of token ids
    rewards = reward_completions(task, examples, sequences)  # (B, G)
    advantages = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")  # (B, G)
    rule.update(prompts, rewards, advantages)  # after the prompts' draw, before the completions'
    lengths = torch.tensor([len(completion) for _, completion in sequences]).view_as(rewards)
    m = running_length(progress, lengths, prompt_weights)
    rolled_out_at = time.perf_counter()

    # 3. Prune completions. After the first update, theta depends on the first draw, so every update
    #    needs a draw of its own. (Prompts cannot be drawn anew. So from the second update on, the
    #    gradient is unbiased only given the prompts that were kept.)
    draws = []  # (B, G) each
    for _ in range(config.inner_epochs):
        draws.append(weigh_completions(rule, rewards, advantages, prompt_weights, N, generator))

    # 4. Log-probabilities under the old policy and the reference, for all that any update trains.
    in_any_draw = torch.stack(draws).any(dim=0)  # (B, G)
    trained = in_any_draw.flatten().nonzero().squeeze(1).tolist()
    old, ref = None, None
    if config.inner_epochs > 1:
        old = frozen_logprobs(task.model, sequences, trained, config)
    if config.beta > 0:
        ref = frozen_logprobs(reference, sequences, trained, config)

    # 5. Pack what is kept, and update.
    warmup = min(1.0, progress.step / max(1, config.warmup_steps))
    optimizer.param_groups[0]["lr"] = config.learning_rate * warmup
    updates = []
    for w in draws:
        update = train_step(task.model, optimizer, sequences, advantages, w, N, m, config, old, ref)
        updates.append(update)
    return SimpleNamespace(
        N=N,
        examples=examples,
        sequences=sequences,
        rewards=rewards,
        advantages=advantages,
        prompt_weights=prompt_weights,
        weights=draws[-1],
        updates=updates,
        rolled_out_at=rolled_out_at,
    )


# =================================== Part II: the plumbing ===================================

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_BFLOAT16 = torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 only emulates it
DTYPE = torch.bfloat16 if HAS_BFLOAT16 else torch.float32
LOGIT_CHUNK = 512  # tokens; with Qwen's vocabulary, logits, log-probabilities and exp take 0.9 GB


# ---- 6. Beyond the paper: the proportional rule
def proportional_probabilities(scores, rate, floor=0.0):
    """Scores >= 0 of any shape -> float64 pi = min(1, c score), at least `floor`, and 1 where there
    is no score (NaN). As many are kept as by keep_probabilities. Without a floor, scores of 0 get
    pi = 0 and do not count.

    Pruning adds sum (1/pi - 1) |g|^2 to the variance of the gradient. At a given sum(pi), this is
    least for pi proportional to the norm |g| (Neyman allocation), so this rule has the least
    variance as far as |g| is proportional to the score. The notebook measures how far."""
    scores = scores.double()
    counted = scores if floor > 0 else scores[scores != 0]
    keep = keep_probabilities(counted, rate).sum().round()
    scores = scores.nan_to_num(math.inf)
    low, high = 1e-150, 1e150
    for _ in range(50):  # bisection of the logarithm of c
        c = math.sqrt(low * high)
        if (c * scores).clamp(floor, 1).sum() < keep:
            low = c
        else:
            high = c
    return (high * scores).clamp(floor, 1)


class ProportionalDPPO(Rule):
    """A completion's score is |A| times its prompt's weight, which is how strongly its gradient
    counts. A prompt's score is the root mean square of A that is expected of its next group."""

    default_prompt_prune_rate = 0.9
    remembers = {"score": math.nan, "right": 0.0, "wrong": 0.0}  # right: sum of r; wrong: of 1 - r
    floor = 0.07  # of pi where a gradient is unlikely but possible: 1/pi is at most 15
    prior = 0.05  # a and b of the Beta: most prompts are solved nearly always or nearly never
    decay = 0.8  # a visit counts less by this factor at each later one, as the policy changes

    def prompt_probabilities(self):
        scores = self.memory["score"]
        return proportional_probabilities(scores, self.config.prompt_prune_rate, self.floor)

    def completion_probabilities(self, advantages, prompt_weights):
        scores = advantages.abs() * prompt_weights[:, None]  # (B, G)
        floor = self.floor if self.config.beta > 0 else 0.0  # with KL, A = 0 has a gradient too
        return proportional_probabilities(scores, self.config.completion_prune_rate, floor)

    def update(self, prompts, rewards, advantages):
        """At success rate p, the mean A^2 of a group is about 1, or 0 if all are right or all are
        wrong: in expectation 1 - p^G - (1 - p)^G. Without the division by std, it is p (1 - p),
        which is the same with 2 for G, but for a factor that does not matter. As p is unknown,
        this is averaged over its posterior Beta(a, b), where E[p^n] is the product of
        (a + i)/(a + b + i) over i < n."""
        if ((rewards < 0) | (rewards > 1)).any():
            warnings.warn(
                f"{type(self).__name__} takes rewards below 0 as 0, above 1 as 1", stacklevel=2
            )
        right, wrong = self.memory["right"], self.memory["wrong"]
        for q, group in zip(prompts.tolist(), rewards.clamp(0, 1)):
            if not group.isnan().any():  # otherwise it says nothing about successes
                right[q] = self.decay * right[q] + group.sum()
                wrong[q] = self.decay * wrong[q] + (1 - group).sum()
        a = self.prior + right[prompts]  # (B,)
        b = self.prior + wrong[prompts]  # (B,)
        n = 2 if self.config.objective == "dr_grpo" else self.config.group_size
        i = torch.arange(n)[:, None]  # (n, 1)
        all_right = ((a + i) / (a + b + i)).prod(dim=0)  # (B,)
        all_wrong = ((b + i) / (a + b + i)).prod(dim=0)  # (B,)
        self.memory["score"][prompts] = (1 - all_right - all_wrong).sqrt()


RULES = {"grpo": Rule, "grpo-skip": GRPOSkip, "dppo": DPPO, "dppo-proportional": ProportionalDPPO}


def named(option, name, known):
    """A rule or a reward: a known one by its name, or the user's own as package.module:name."""
    if name not in known and ":" not in name:
        raise ValueError(f"--{option} {name}: not one of {', '.join(known)}, nor module:name")
    try:
        found = known.get(name) or pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--{option} {name}: {error}") from error
    if not callable(found):
        raise ValueError(f"--{option} {name} cannot be called")
    return found


# ---- 7. Order, memory and precision
def next_prompts(seen, prompt_count, seed):
    """(prompt_count,) the prompts that come next after `seen` candidates. Each epoch has its own
    random order. The sequence runs on into the next epoch, so a window may have a prompt twice."""
    epoch, start = divmod(seen, prompt_count)
    orders = []
    for number in (epoch, epoch + 1):
        # The seeds of dppo_step count upwards from 1_000_003 * seed, so these count downwards.
        generator = torch.Generator().manual_seed(1_000_003 * seed - 1 - number)
        orders.append(torch.randperm(prompt_count, generator=generator))
    return torch.cat(orders)[start : start + prompt_count]


@torch.no_grad()
def frozen_logprobs(model, sequences, indices, config):
    """{index: (length,) log-probabilities} of the completions at `indices`, without gradient."""
    result = {}
    micro_batches, _ = pack_micro_batches(sequences, indices, config)
    for slots in micro_batches:
        logprobs, _ = completion_logprobs(model, sequences, slots, config.temperature)
        for i, of_completion in zip(chain(*slots), logprobs):
            result[i] = of_completion[: len(sequences[i][1])]
    return result


def in_chunks(function, head, hidden, targets, temperature):
    """function(head, hidden, targets, temperature) by chunks of LOGIT_CHUNK tokens -> its results,
    each concatenated. What a chunk computes is not kept but computed again in the backward pass."""
    results = []
    for chunk in zip(hidden.split(LOGIT_CHUNK), targets.split(LOGIT_CHUNK)):
        inputs = (function, head, *chunk, temperature)
        results.append(checkpoint(*inputs, use_reentrant=False, preserve_rng_state=False))
    return [torch.cat(parts) for parts in zip(*results)]


def recompute_layers(model):
    """Lets layers compute their activations again in the backward pass instead of keeping them.
    (In transformers, this takes the training mode, in which there is also dropout.)"""
    again = {"use_reentrant": False, "preserve_rng_state": False}
    for layer in model.modules():
        if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
            layer.forward = partial(checkpoint, layer.forward, **again)


@torch.no_grad()
def make_optimizer(model, config):
    """Adam in float32. At a learning rate of 1e-6, updates of bfloat16 weights would be rounded
    away, so each bfloat16 weight has a float32 master: Adam updates the master, which is then
    rounded to the weight. Gradients are summed in float32. A float32 weight is its own master."""
    weights = list(model.parameters())
    for weight in weights:
        weight.grad_dtype = torch.float32
    masters = [weight.float() for weight in weights]
    optimizer = torch.optim.Adam(masters, lr=config.learning_rate, betas=(0.9, 0.99), fused=True)

    def pass_gradients(*_):
        for weight, master in zip(weights, masters):
            master.grad = weight.grad

    @torch.no_grad()
    def round_masters(*_):
        for weight, master in zip(weights, masters):
            weight.copy_(master)
            master.grad = None  # otherwise it would outlive model.zero_grad()

    optimizer.register_step_pre_hook(pass_gradients)
    optimizer.register_step_post_hook(round_masters)
    return optimizer


# ---- 8. Rollout
def rollout(task, examples, samples, config, description=""):
    """-> (prompt ids, completion ids) of `samples` completions of the first example, then of the
    second, and so on. A description gives a progress bar.

    To sample in another way, replace this, and what check_sampling asks of `generate`."""
    sequences = []
    size = max(1, config.rollout_batch_size // samples)
    starts = range(0, len(examples), size)
    if description:
        starts = tqdm(starts, description, leave=False)
    for start in starts:
        prompts = [example["prompt_ids"] for example in examples[start : start + size]]
        sequences += generate(task, prompts, samples, config)[0]
    return sequences


def prefill(model, ids, mask, samples):
    """A key-value cache of (prompts, tokens): each is read once, and repeated for its samples."""
    cache = transformers.DynamicCache(config=model.config)
    if ids.shape[1] > 0:
        positions = mask.cumsum(dim=1) - mask
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        model.get_decoder()(**inputs, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(samples)
    return cache


@torch.inference_mode()
def generate(task, prompts, samples, config, output_scores=False):
    """Lists of prompt ids -> (prompt ids, completion ids) of `samples` completions of each prompt.
    A completion ends with its first end id, or at the limit. With output_scores, there are also
    the log-probabilities of the tokens, in lists that may go on after the end.

    model.generate stops only when all rows have ended. So it is called for a sixth of the tokens
    at a time, and rows that have ended leave in between. The cache always lacks the last token,
    which model.generate reads first."""
    end_ids = task.end_ids()
    # The policy that is trained, with nothing of the model's own settings: Qwen's have a top_k.
    settings = {"do_sample": True, "temperature": config.temperature, "top_k": 0, "top_p": 1.0}
    settings |= {"eos_token_id": end_ids or None, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_scores": output_scores}
    model = copy.copy(task.model)  # with the same weights
    model.generation_config = transformers.GenerationConfig(**settings)
    ids = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    mask = [torch.ones_like(prompt) for prompt in ids]
    ids = pad_sequence(ids, batch_first=True, padding_side="left")  # (prompts, tokens)
    mask = pad_sequence(mask, batch_first=True, padding_side="left")  # (prompts, tokens)
    cache = prefill(model, ids[:, :-1], mask[:, :-1], samples)
    ids = ids.repeat_interleave(samples, dim=0)  # (rows, tokens)
    mask = mask.repeat_interleave(samples, dim=0)  # (rows, tokens)

    sequences = [(prompts[i // samples], []) for i in range(len(ids))]
    logprobs = [[] for _ in sequences]
    rows = list(range(len(ids)))  # the index in `sequences` of each row that is left
    part = math.ceil(config.max_completion_tokens / 6)
    for start in range(0, config.max_completion_tokens, part):
        n = min(part, config.max_completion_tokens - start)
        output = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=n)
        tokens, scores = output.sequences, output.scores
        if output_scores:
            scores = model.compute_transition_scores(tokens, scores, normalize_logits=True)
            for i, of_row in zip(rows, scores.tolist()):
                logprobs[i] += of_row
        live = []  # the rows that have not ended
        for row, new in enumerate(tokens[:, ids.shape[1] :].tolist()):
            _, completion = sequences[rows[row]]
            for token in new:
                completion.append(token)
                if token in end_ids:
                    break
            else:
                live.append(row)
        if not live:
            break
        rows = [rows[row] for row in live]
        ids = tokens[live]
        mask = torch.nn.functional.pad(mask[live], (0, n), value=1)
        cache.batch_select_indices(torch.tensor(live, device=ids.device))
    return sequences, logprobs


@torch.no_grad()
def check_sampling(task, config):
    """Raises ValueError where the policy that is trained is not the one that samples, which nothing
    else would reveal, since rho is taken to be 1. The logits must be those of the head, neither
    scaled nor capped. And the log-probabilities that tokens were sampled with must be those that
    completion_logprobs gives them, in one slot or in two; on average, as bfloat16 is coarse."""
    transformers.set_seed(config.seed)
    model = task.model
    prompts = [task.train[0]["prompt_ids"], task.train[-1]["prompt_ids"]]
    short = replace(config, max_completion_tokens=min(16, config.max_completion_tokens))
    try:
        ids = torch.tensor(prompts[:1], device=model.device)
        logits = model(ids).logits
        of_head = model.get_output_embeddings()(model.get_decoder()(ids).last_hidden_state)
        # One rounding of bfloat16 is 5e-3. Written so that NaN fails, too.
        if not (of_head - logits).abs().max() <= 2e-2 * logits.abs().max():
            raise ValueError("it scales or caps its logits")
        sequences, sampled = generate(task, prompts, 4, short, output_scores=True)
        lengths = [len(completion) for _, completion in sequences]
        sampled = [torch.tensor(row[:length]) for row, length in zip(sampled, lengths)]
        sampled = pad_sequence(sampled, batch_first=True)
        for slots in ([[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]):
            trained, _ = completion_logprobs(model, sequences, slots, config.temperature)
            difference = (trained.cpu() - sampled).abs().sum() / sum(lengths)
            if not difference <= (1e-3 if model.dtype == torch.float32 else 0.2):
                raise ValueError(
                    f"log-probabilities of rollout and training differ by {difference:.2g}"
                )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # also inside models that lack the cache or the layers used here
        raise ValueError(f"{type(model).__name__} cannot be trained here: {error}") from error


# ---- 9. Rewards: f(prompts, completions, **columns) -> list[float | None]; None: not gradable
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def plain(text):
    """The text with its numbers as NUMBER reads them, without commas and dollar signs."""
    return text.replace("\N{MINUS SIGN}", "-").replace(",", "").replace("$", "")


def gsm8k_number(text):
    """The first number after the last ####, or else the last number of the text, or else None."""
    _, mark, end = plain(text).rpartition("####")
    numbers = NUMBER.findall(plain(text))
    if mark:
        numbers = NUMBER.findall(end)[:1] or numbers
    return Decimal(numbers[-1]) if numbers else None


def gsm8k_gold(answer):
    """The number of an answer that marks it with ####, or is nothing but a number; else None."""
    is_number = NUMBER.fullmatch(plain(answer).strip(" %").rstrip("."))
    return gsm8k_number(answer) if is_number or "####" in answer else None


def reward_of(read, gold):
    """A reward: 1 where read(text) equals gold(answer), None where gold(answer) is empty."""

    def reward(prompts, completions, answer, **columns):
        rewards = []
        for completion, stated in zip(completions, answer):
            wanted = None if stated is None else gold(str(stated))
            text = completion if isinstance(completion, str) else completion[-1]["content"]  # chat
            rewards.append(None if wanted in (None, "") else float(read(text) == wanted))
        return rewards

    return reward


REWARDS = {"exact": reward_of(str.strip, str.strip), "gsm8k": reward_of(gsm8k_number, gsm8k_gold)}


# ---- 10. Tasks
@dataclass
class Task:
    """What a run works on. An example is a dictionary with `prompt` (a text or a list of messages),
    `prompt_ids` and the columns of its dataset."""

    train: list
    evals: dict  # name: examples
    tokenizer: object
    reward: object  # a function
    model: object = None

    def end_ids(self):
        """All ids that end a completion. Qwen has two."""
        ids = self.model.generation_config.eos_token_id
        ids = ids if isinstance(ids, list) else [ids]
        return sorted({*ids, self.tokenizer.eos_token_id} - {None})


def load_task(config):
    """The user's data and model, or the embedded ones. Errors in the data, or in the reward, which
    is tried on empty completions, are reported before the model is loaded."""
    train, evals, tokenizer = user_data(config) if config.model else sorting_data(config)
    evals = {name: examples for name, examples in evals.items() if examples}
    task = Task(train, evals, tokenizer, named("reward", config.reward, REWARDS))
    for name, examples in {"the training data": train[:100], **evals}.items():
        rewards = reward_completions(task, examples, [([], [])] * len(examples))
        if rewards.isnan().all():
            text = f"--reward {config.reward} grades none of {len(examples)} answers in {name}"
            if config.reward in REWARDS:
                raise ValueError(f"{text} (--answer_column)")
            print(f"{text}, as far as completions that are empty can tell")

    shape = transformers.Qwen3Config(**SORTER)
    if config.model:
        shape = transformers.AutoConfig.from_pretrained(config.model, trust_remote_code=False)
    longest = max(len(example["prompt_ids"]) for example in chain(train, *evals.values()))
    longest += config.max_completion_tokens
    shape = shape.get_text_config()
    positions = getattr(shape, "max_position_embeddings", longest)
    rope = getattr(shape, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this, all positions are encoded differently
        positions = rope["original_max_position_embeddings"]
    if longest > positions:
        text = f"prompt and completion may take {longest} tokens"
        raise ValueError(f"{text}, but the model has {positions} positions")

    if config.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            config.model, dtype=DTYPE, attn_implementation="sdpa", trust_remote_code=False
        )
    else:
        model = warm_started(tokenizer)
    if config.gradient_checkpointing:
        recompute_layers(model)
    task.model = model.to(DEVICE, DTYPE).eval()
    check_sampling(task, config)
    print(f"{type(model).__name__} in {DTYPE} on {DEVICE}")
    return task


def reward_completions(task, examples, sequences):
    """B examples, B G (prompt ids, completion ids) -> (B, G) float64 rewards, NaN where there is
    none. The reward function gets all columns of the examples."""
    samples = len(sequences) // len(examples)
    columns = {}
    for name in examples[0]:
        columns[name] = [examples[i // samples][name] for i in range(len(sequences))]
    for name in ("prompt_ids", "prompts", "completions"):  # the latter are arguments already
        columns.pop(name, None)
    prompts = columns.pop("prompt")
    ids = [completion for _, completion in sequences]
    completions = task.tokenizer.batch_decode(ids, skip_special_tokens=True)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):  # in a chat, a completion is a message too
            completions[i] = [{"role": "assistant", "content": completions[i]}]
    try:
        values = task.reward(prompts=prompts, completions=completions, **columns)
    except (ValueError, OSError) as error:  # main would leave out where in the user's code it was
        raise RuntimeError(f"the reward function failed: {error}") from error
    must = f"the reward function must return a list of {len(ids)} finite numbers or None"
    numbers = []
    try:
        for value in values:
            numbers.append(math.nan if value is None else value)
        rewards = torch.tensor(numbers, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{must}, not {values!r:.60}") from error
    if rewards.shape != (len(ids),) or rewards.isinf().any():
        raise ValueError(f"{must}, not {len(numbers)} values, such as {numbers[:4]}")
    return rewards.view(len(examples), samples)


# ---- 11. Data
def user_data(config):
    """-> training examples, {name: examples} of the evaluation sets, or of one that is held out if
    none is named, and the tokenizer."""
    is_hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", config.model)
    if not is_hub_name and not os.path.isdir(config.model):
        raise ValueError(f"--model {config.model}: no such folder, and not a name on the Hub")
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
    train = load_examples(config.dataset, "train", config, tokenizer)
    evals = {}
    for spec in filter(None, config.eval_dataset.split(",")):
        evals[spec] = load_examples(spec, "test", config, tokenizer)[: config.eval_prompts]
    if not evals:
        size = min(config.eval_prompts, len(train) // 5)
        evals["held out"] = train[:size]
        held_out = {tuple(example["prompt_ids"]) for example in train[:size]}
        train = [example for example in train if tuple(example["prompt_ids"]) not in held_out]
        if not train:
            raise ValueError(f"{config.dataset}: with {size} rows held out, no prompt is left")
        print(f"{size} of them are held out, and {len(train)} trained on")
    trained = {tuple(example["prompt_ids"]) for example in train}
    for name, examples in evals.items():
        count = sum(tuple(example["prompt_ids"]) in trained for example in examples)
        if count:
            print(f"{name}: {count} of its {len(examples)} prompts are trained on, too")
    return train, evals, tokenizer


def load_examples(spec, split, config, tokenizer):
    """The examples of path, path:split or path:config:split, shuffled, without those whose prompt
    is empty or too long."""
    rows = read_rows(spec, split)
    columns = rows.flatten()[:]  # verl nests the answer
    prompts = find_column("prompt", columns, config.prompt_column, spec, required=True)
    parameters = inspect.signature(named("reward", config.reward, REWARDS)).parameters
    # Rewards that were written for TRL expect the answer under either name.
    names = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    is_default = config.answer_column == Config.answer_column
    required = not is_default or bool(names & {"answer", "solution"})
    answers = find_column("answer", columns, config.answer_column, spec, required)
    examples = []
    for i, row in enumerate(rows):
        if prompts[i]:
            prompt, ids = encode_prompt(prompts[i], config, tokenizer)
            if 0 < len(ids) <= config.max_prompt_tokens:
                answer = {"answer": answers[i], "solution": answers[i]} if answers else {}
                # A reward of the user's own gets all columns of the row as they are.
                example = row | answer if config.reward in REWARDS else answer | row
                examples.append(example | {"prompt": prompt, "prompt_ids": ids})
    used = f"{len(examples)} of {len(rows)} prompts"
    limit = f"--max_prompt_tokens {config.max_prompt_tokens}"
    if not examples:
        raise ValueError(f"{spec}: {used} are within {limit}")
    print(f"{spec}: {used} are neither empty nor over {limit}")
    random.Random(0).shuffle(examples)  # not by --seed, so that every run has the same data
    return examples


def find_column(kind, columns, wanted, spec, required):
    """The first column that exists of those wanted, which are separated by commas. If none does,
    None, or ValueError if it is required."""
    for name in wanted.split(","):
        if name in columns:
            return columns[name]
    if required:
        looked_for, names = wanted.replace(",", ", "), ", ".join(columns)
        text = f"{spec} has no {kind} column (looked for {looked_for}; has {names})"
        raise ValueError(f"{text}: name it with --{kind}_column")
    return None


def read_rows(spec, split):
    """The rows of path, path:split or path:config:split. A split may be a slice, like train[:9]."""
    path, *names = re.split(r":(?![^\[]*\])", spec)  # at colons, but not within [a:b]
    split = names.pop() if names else split
    if os.path.isfile(path) and os.path.getsize(path) == 0:
        raise ValueError(f"{path} is empty")
    kinds = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
    kind = kinds.get(Path(path).suffix)
    options = {"split": split}
    if kind:
        options["data_files"] = {split.partition("[")[0]: path}  # the split without its slice
    try:
        if kind == "csv":  # every column as texts, because 0124 is not 124
            with open(path, newline="") as file:
                header = next(csv.reader(file))
            texts = datasets.Features({name: datasets.Value("string") for name in header})
            options |= {"features": texts, "keep_default_na": False}
        return datasets.load_dataset(kind or path, *names, **options)
    except Exception as error:
        raise ValueError(f"{spec} cannot be read: {error.__cause__ or error}") from error


def encode_prompt(prompt, config, tokenizer):
    """A text or a list of messages -> the prompt as the model sees it, and its ids."""
    system = config.system_prompt
    if not isinstance(prompt, str | list):
        raise ValueError(f"a prompt must be a text or a list of messages, not {prompt!r:.60}")
    if tokenizer.chat_template:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if system:
            others = [message for message in prompt if message["role"] != "system"]
            prompt = [{"role": "system", "content": system}, *others]
        options = {"add_generation_prompt": True, "return_dict": False}
        options |= json.loads(config.chat_template_kwargs)
        return prompt, tokenizer.apply_chat_template(prompt, **options)
    if not isinstance(prompt, str):
        raise ValueError(
            f"the prompts are chats, but {config.model} has no chat template: it needs texts"
        )
    if system:
        prompt = f"{system}\n\n{prompt}"
    ids = tokenizer.encode(prompt)
    if ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text with it
        ids = ids[:-1]
    return prompt, ids


# ---- 12. The embedded task: sort digits
# For each class: training prompts, fewest digits, most digits. As in real data, easy prompts are
# nearly always solved before training, and hard ones never.
SORTING = {"easy": (461, 2, 3), "middle": (154, 9, 12), "hard": (409, 17, 20)}

# The model that is to learn it: a Qwen3.
SORTER = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
SORTER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
SORTER |= {"vocab_size": 259, "eos_token_id": 1, "pad_token_id": 0}


def sorting_example(name, rng, tokenizer):
    """An example of a class: the prompt "4021=" has the answer "0124"."""
    _, fewest, most = SORTING[name]
    digits = rng.choices("0123456789", k=rng.randint(fewest, most))
    prompt = "".join(digits) + "="
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_ids": ids, "answer": "".join(sorted(digits))}


def sorting_data(config):
    """-> 1,024 training examples, {class: held-out examples}, a tokenizer of single characters."""
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    held_out = config.eval_prompts // len(SORTING)
    train = []
    evals = {}
    for name, (size, _, _) in SORTING.items():
        rng = random.Random(name)
        examples = [sorting_example(name, rng, tokenizer) for _ in range(size + 10 * held_out)]
        train += examples[:size]
        evals[name] = [example for example in examples if example not in train][:held_out]
    random.Random(0).shuffle(train)
    return train, evals, tokenizer


def warm_started(tokenizer):
    """The embedded model, taught by demonstrations: of the easy class, and of the middle one with a
    fifth of the digits replaced at random. The first run keeps it in the user's cache."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SORTER))
    cache = Path(os.getenv("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dppo")
    kept = cache / "sorter-2.pt"  # 2: of this recipe
    if os.path.exists(kept):
        try:
            model.load_state_dict(load_whole(kept))
            return model
        except Exception as error:  # it depends on where the file is damaged
            print(f"{error}; it is made anew")
    config = Config(temperature=1.0)
    optimizer = make_optimizer(model, config)
    rng = random.Random(0)
    ones = torch.ones(64)
    for step in tqdm(range(400), "warm start, the first time only"):
        sequences = []
        for name, noise in rng.choices([("easy", 0.0), ("middle", 0.2)], k=64):
            example = sorting_example(name, rng, tokenizer)
            answer = ""
            for digit in example["answer"]:
                answer += rng.choice("0123456789") if rng.random() < noise else digit
            sequences.append((example["prompt_ids"], tokenizer.encode(answer)))  # with the end id
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / 400)
        # Imitation is a policy gradient on given completions of advantage 1: here, 8 groups of 8.
        train_step(model, optimizer, sequences, ones, ones, 8, 1.0, config)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        save_whole(model.state_dict(), kept, cache / f"sorter.{os.getpid()}")
    except (OSError, RuntimeError) as error:  # torch raises the latter where a disk is full
        print(f"the starting model is not kept for the next run: {error}")
    return model


# ---- 13. Runs
# The defaults of settings that are left at None: with --model, and for the embedded task.
DEFAULTS = {
    "learning_rate": (1e-6, 5e-5),
    "temperature": (1.0, 0.7),
    "max_completion_tokens": (1024, 22),
    "reward": ("gsm8k", "exact"),
    "steps": (300, 110),
}
# The sums over a run's steps that its summary has.
COSTS = (
    "prompts_seen",
    "prompts_rolled",
    "completions_trained",
    "rollout_seconds",
    "train_seconds",
)
# The progress bar has no room for a bar, in 80 columns.
BAR = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
# The setting that opens each further group of --help, and the name of the group.
GROUPS = {"model": "data", "rollout_batch_size": "training", "eval_dataset": "run"}
# What a run must have in common with the one whose memory it takes over, and what else with the one
# that it goes on with, so that the accuracies before and after can be compared.
SAME_MEMORY = ("method", "data")
SAME_RUN = (*SAME_MEMORY, "model", "reward", "temperature", "max_completion_tokens")
SAME_RUN += ("eval_dataset", "eval_prompts", "eval_samples", "seed")


@dataclass
class Config(Settings):
    """All settings of the command line. Raises ValueError for what would silently go wrong."""

    model: str = setting("", "causal LM, on the Hub or in a folder; default: the embedded one")
    dataset: str = setting("", "path, path:split or path:config:split, on the Hub or a file")
    prompt_column: str = setting("prompt,question,problem", "the first of these that exists")
    answer_column: str = setting(
        "answer,solution,reward_model.ground_truth", "the first of these that exists"
    )
    system_prompt: str = setting("", "put before every prompt, in place of its own system message")
    chat_template_kwargs: str = setting("{}", 'JSON, such as {"enable_thinking": false}')
    max_prompt_tokens: int = setting(512, "longer prompts are left out", least=1)
    reward: str | None = setting(None, "exact, gsm8k or your own module:function")
    rollout_batch_size: int = setting(256, "sequences generated at a time", least=1)
    steps: int | None = setting(None, "training steps; 0 only evaluates")
    max_grad_norm: float = setting(1.0, "longer gradients are clipped", least=1e-6)
    micro_batch_tokens: int = setting(
        4096, "at most so many tokens in a forward pass, or one sequence", least=1
    )
    gradient_checkpointing: int = setting(0, "less memory for a third more work", most=1)
    eval_dataset: str = setting(
        "", "like --dataset, several separated by commas; default: held out of --dataset"
    )
    eval_prompts: int = setting(256, "at most so many prompts of each evaluation set")
    eval_samples: int = setting(4, "k of avg@k and pass@k", least=1)
    eval_every: int = setting(0, "steps between evaluations; 0: only before and after")
    seed: int = setting(0, "of the prompts' order, the rollouts and the draws", most=2**32 - 1)
    output_dir: str = setting("", "folder of the run; default: a new one under runs/")
    save_every: int = setting(50, "steps between checkpoints; 0: only after the last")
    history: str = setting("", "folder of an earlier run, to start with its memory of the prompts")
    resume: str = setting("", "folder of a run to continue; its settings hold unless given anew")

    def __post_init__(self):
        self.rule = named("method", self.method, RULES)
        if self.prompt_prune_rate is None:
            self.prompt_prune_rate = self.rule.default_prompt_prune_rate
        for name, (with_model, embedded) in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, with_model if self.model else embedded)
        for option in fields(self):
            value = getattr(self, option.name)
            least, most = option.metadata["least"], option.metadata["most"]
            if not isinstance(value, str) and not least <= value <= most:  # nor if it is NaN
                bound = f"at least {least}" if most == ANY else f"from {least} to {most}"
                raise ValueError(f"--{option.name} {value} must be {bound}")
        if self.objective not in CLIPPING:
            raise ValueError(f"--objective {self.objective}: not one of {', '.join(CLIPPING)}")
        for name in ("group_size", "eval_samples"):
            samples = getattr(self, name)
            if samples > self.rollout_batch_size:  # those of a prompt are generated together
                text = f"--rollout_batch_size {self.rollout_batch_size} has no room"
                raise ValueError(f"{text} for --{name} {samples}")
        try:
            is_valid = isinstance(json.loads(self.chat_template_kwargs), dict)
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ValueError(
                f"--chat_template_kwargs {self.chat_template_kwargs} is no JSON object"
            )
        of_user = (self.model, self.dataset, self.eval_dataset, self.system_prompt)
        if any(of_user) and not (self.model and self.dataset):
            raise ValueError("--model or --dataset is missing: data of your own need both")
        if self.resume and self.output_dir:
            raise ValueError("--resume goes on in its own folder: leave out --output_dir")


@dataclass
class Progress:
    """What a run carries from step to step."""

    step: int = 0  # steps made
    seen: int = 0  # candidate prompts so far, pruned or not
    mean_length: float | None = None  # m
    seconds: float = 0.0  # of rollouts and updates
    evaluation_seconds: float = 0.0
    skipped: int = 0  # updates in a row that were not finite
    before: dict | None = None  # the evaluation before the first step


def evaluate(task, config, progress):
    """-> avg@k and pass@k of each evaluation set, and `accuracy`, the mean reward of them all."""
    started_at = time.perf_counter()
    transformers.set_seed(config.seed)  # the same every time
    k = config.eval_samples
    sets = {}
    graded = [torch.zeros(0)]
    for name, examples in task.evals.items():
        sequences = rollout(task, examples, k, config, f"evaluating {name}")
        rewards = reward_completions(task, examples, sequences)
        rewards = rewards[~rewards.isnan().any(dim=1)]
        graded.append(rewards.flatten())
        average, best = or_none(rewards.mean()), or_none(rewards.amax(dim=1).mean())
        sets[name] = {"prompts": len(rewards), f"avg@{k}": average, f"pass@{k}": best}
    progress.evaluation_seconds += time.perf_counter() - started_at
    return {"accuracy": or_none(torch.cat(graded).mean()), **sets}


def or_none(number):
    """A number from a tensor, or None for NaN (as the mean of nothing), which JSON lacks."""
    return None if number.isnan() else number.item()


def step_record(progress, step, task):
    """What dppo_step returned -> a line of metrics.jsonl. Means are over the graded prompts, with
    their weights, so that they estimate the mean over the window. What the updates measure is
    averaged over them, but their counts are added up."""
    end_ids = task.end_ids()
    graded = ~step.rewards.isnan().any(dim=1)  # (B,)
    prompt_weights = step.prompt_weights * graded

    def window_mean(values):
        """B G numbers, (B, G) or in a row -> their mean over the window, 0 if nothing is graded."""
        means = torch.as_tensor(values).double().view_as(step.rewards).mean(dim=1).nan_to_num()
        return (prompt_weights @ means / prompt_weights.sum()).nan_to_num().item()

    B, w = len(graded), step.weights
    completions = [completion for _, completion in step.sequences]
    zero_variance = (step.advantages == 0).all(dim=1, keepdim=True).expand_as(w)
    record = {"step": progress.step, "cumulative_seconds": progress.seconds}
    record["epoch"] = progress.seen / len(task.train)
    record |= {"prompts_seen": step.N, "prompts_rolled": B, "prompts_pruned": step.N - B}
    record["ungradable_prompts"] = int((~graded).sum())
    record["reward"] = window_mean(step.rewards)
    record["zero_variance_fraction"] = window_mean(zero_variance)
    record["completion_length"] = window_mean([len(ids) for ids in completions])
    record["truncated_fraction"] = window_mean([ids[-1] not in end_ids for ids in completions])
    record["weight_max"] = w.max().item()
    record["effective_sample_size"] = (w.sum() ** 2 / w.square().sum()).nan_to_num().item()
    record["rollouts"] = len(step.sequences)
    record["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    for name in step.updates[0]:
        values = [update[name] for update in step.updates if update[name] is not None]
        record[name] = sum(values) if values else None
        if values and name not in ("completions_trained", "tokens_trained", "skipped"):
            record[name] /= len(values)
    return record


def sample_record(progress, step, tokenizer):
    """The first group of a step that is trained, or else the first -> a line of samples.jsonl."""
    q = step.weights.sum(dim=1).gt(0).int().argmax().item()
    G = step.weights.shape[1]
    example = step.examples[q]
    sample = {"step": progress.step, "prompt": example["prompt"], "answer": example.get("answer")}
    completions = [completion for _, completion in step.sequences[G * q : G * (q + 1)]]
    sample["completions"] = tokenizer.batch_decode(completions)
    sample["prompt_weight"] = step.prompt_weights[q].item()
    sample["rewards"] = [or_none(reward) for reward in step.rewards[q]]
    sample["advantages"] = step.advantages[q].tolist()
    sample["weights"] = step.weights[q].tolist()
    return sample


def save_whole(state, path, partial):
    """Saves to `partial` first, so that there is never half a file at `path`."""
    with partial.open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    partial.replace(path)


def load_whole(path):
    """What save_whole has saved. A file cannot run code here, and is read only as far as needed."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # it depends on where the file is damaged
        raise ValueError(f"{path} cannot be read: {error}") from error


def save_checkpoint(run):
    """Writes all that the run needs to go on, after the records that it counts on."""
    for path in run.records:
        with path.open("a") as file:
            os.fsync(file.fileno())
    state = {"progress": asdict(run.progress), "settings": run.settings, "memory": run.rule.memory}
    state["optimizer"] = run.optimizer.state_dict()
    state["weights"] = run.optimizer.param_groups[0]["params"]
    save_whole(state, run.out / "checkpoint.pt", run.out / "partial.pt")
    run.saved_step = run.progress.step


@torch.no_grad()
def load_checkpoint(run, saved):
    """Continues a run from its checkpoint. Later steps will be repeated, so their lines are cut off
    the records, which have a line a step."""
    sizes = {}
    for path in run.records:
        lines = path.read_bytes().splitlines(keepends=True)[: run.progress.step]
        sizes[path] = sum(map(len, lines))
        if b"".join(lines).count(b"\n") < run.progress.step:
            raise ValueError(f"{path} is shorter than it was at the checkpoint")
    run.optimizer.load_state_dict(saved["optimizer"])
    masters = run.optimizer.param_groups[0]["params"]
    weights = run.task.model.parameters()
    for weight, master, value in zip(weights, masters, saved["weights"], strict=True):
        master.copy_(value)
        weight.copy_(value)
    for path, size in sizes.items():
        os.truncate(path, size)


def start(config, task=None):
    """A run that is ready for its next step: a new one, or one that goes on. A new one claims its
    folder by creating the records, and gives the folder up again if it is refused."""
    new = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    out = Path(config.resume or config.output_dir or new)
    run = SimpleNamespace(config=config, out=out, saved_step=0, stopping=False)
    run.records = [out / "metrics.jsonl", out / "samples.jsonl"]
    if config.resume:
        prepare(run, task)
        return run
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        hint = f"; --resume {out} goes on with a run" if (out / "checkpoint.pt").exists() else ""
        raise ValueError(f"--output_dir {out} is not empty{hint}")
    for path in run.records:
        path.open("x").close()  # fails if another run has been faster
    try:
        prepare(run, task)
    except BaseException:  # Ctrl-C, too
        for path in run.records:
            path.unlink()
        if not existed:
            out.rmdir()
        raise
    return run


def prepare(run, task):
    """Gives a run its task, rule, optimizer and progress: new ones, or those of its checkpoint."""
    config = run.config
    folder = config.resume or config.history
    saved = load_whole(Path(folder, "checkpoint.pt")) if folder else None
    task = task or load_task(config)
    run.task = task
    data = repr([(example["prompt_ids"], example.get("answer")) for example in task.train])
    run.settings = asdict(config) | {"data": zlib.crc32(data.encode())}
    run.rule = config.rule(config, len(task.train))
    run.progress = Progress()
    if folder:
        for name in SAME_RUN if config.resume else SAME_MEMORY:
            if saved["settings"][name] != run.settings[name]:
                raise ValueError(f"{folder} was made with another {name}")
        run.rule.memory = saved["memory"]
        run.progress = Progress(**saved["progress"])
        if config.resume and config.steps < run.progress.step:
            raise ValueError(f"--steps {config.steps}: {folder} has made {run.progress.step}")
    # A user's own rule should fail here rather than after the evaluation.
    everything = torch.arange(len(task.train))
    pick_prompts(run.rule, everything, config.prompts_per_step, torch.Generator())
    if not config.resume:
        earlier = run.progress
        run.progress = Progress(seen=earlier.seen, mean_length=earlier.mean_length)
        run.progress.before = evaluate(task, config, run.progress)
    run.reference = copy.deepcopy(task.model) if config.beta > 0 else None
    run.optimizer = make_optimizer(task.model, config)
    if config.resume:
        load_checkpoint(run, saved)
        run.saved_step = run.progress.step
        print(f"{folder}: goes on after step {run.saved_step} of {config.steps}")
    partial = run.out / "config.partial"
    partial.write_text(json.dumps(asdict(config) | {"output_dir": ""}, indent=2))
    partial.replace(run.out / "config.json")


def recorded_step(run):
    """Makes a step, and evaluates if it is time -> its line of metrics.jsonl."""
    config, task, progress = run.config, run.task, run.progress
    started_at = time.perf_counter()
    step = dppo_step(task, run.rule, run.optimizer, run.reference, progress, config)
    ended_at = time.perf_counter()
    progress.seconds += ended_at - started_at
    record = step_record(progress, step, task)
    record["learning_rate"] = run.optimizer.param_groups[0]["lr"]
    record["rollout_seconds"] = step.rolled_out_at - started_at
    record["train_seconds"] = ended_at - step.rolled_out_at
    if config.eval_every and progress.step % config.eval_every == 0:
        record["evaluation"] = evaluate(task, config, progress)
    record["evaluation_seconds"] = time.perf_counter() - ended_at
    sample = sample_record(progress, step, task.tokenizer)
    for path, line in zip(run.records, (record, sample)):
        with path.open("a") as file:
            print(json.dumps(line, default=str), file=file)  # an answer may be a date
    return record


def recent_means(records, inner_epochs):
    """What the progress bar says of the last steps."""
    total = {}
    for name in ("reward", "prompts_seen", "prompts_pruned", "rollouts", "completions_trained"):
        total[name] = sum(record[name] for record in records)
    pruned = total["prompts_pruned"] / total["prompts_seen"]
    trained = total["completions_trained"] / (inner_epochs * total["rollouts"])
    reward = total["reward"] / len(records)
    return f"reward {reward:.2f}, prompts pruned {pruned:.0%}, trained {trained:.0%}"


def train(run):
    """Makes the steps that are left, and saves the model -> the summary. If run.stopping is set,
    the step that it is in becomes the last: it saves a checkpoint and raises KeyboardInterrupt."""
    config, progress = run.config, run.progress
    after = None
    recent = deque(maxlen=20)
    without_gradient = 0  # steps in a row
    left = range(progress.step, config.steps)
    bar = tqdm(left, initial=progress.step, total=config.steps, bar_format=BAR)
    for _ in bar:
        record = recorded_step(run)
        after = record.get("evaluation")
        recent.append(record)
        bar.set_postfix_str(recent_means(recent, config.inner_epochs))
        without_gradient = without_gradient + 1 if record["grad_norm"] == 0 else 0
        if without_gradient == 10:
            bar.write(
                "ten steps without a gradient: in every group, all rewards are equal; "
                f"{run.records[1]} shows what was rewarded"
            )
        progress.skipped = progress.skipped + 1 if record["skipped"] == config.inner_epochs else 0
        if progress.skipped >= 10:
            raise FloatingPointError("10 updates in a row were not finite: lower --learning_rate")
        is_due = config.save_every and progress.step % config.save_every == 0
        if is_due or run.stopping or progress.step == config.steps:
            save_checkpoint(run)
        if run.stopping:
            raise KeyboardInterrupt
    if after is None:
        after = evaluate(run.task, config, progress) if progress.step else progress.before
    return finish(run, after)


def finish(run, after):
    """Saves the model and the summary, and prints what has come out -> the summary."""
    before = run.progress.before
    summary = {"before": before, "after": after, "seconds": run.progress.seconds}
    records = [json.loads(line) for line in run.records[0].read_text().splitlines()]
    for name in COSTS:
        summary[name] = sum(record[name] for record in records)
    summary["evaluation_seconds"] = run.progress.evaluation_seconds
    summary |= {"torch": torch.__version__, "transformers": transformers.__version__}
    summary |= {"device": DEVICE, "config": asdict(run.config)}
    (run.out / "summary.json").write_text(json.dumps(summary, indent=2))
    for part in (run.task.model, run.task.tokenizer):
        part.save_pretrained(run.out / "model")
    key = f"avg@{run.config.eval_samples}"
    pairs = {"accuracy": (before["accuracy"], after["accuracy"])}
    for name in run.task.evals:
        pairs[name] = (before[name][key], after[name][key])
    texts = [f"{name} {a:.2f} -> {b:.2f}" for name, (a, b) in pairs.items() if None not in (a, b)]
    texts = ", ".join(texts) or "no evaluation"
    print(f"{texts} in {run.progress.seconds:.0f} s of training; results are in {run.out}")
    return summary


def make_parser():
    """One option for each field of Config."""
    summary, _, _, examples, *_ = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{summary}\n\nusage: python dppo.py [--setting value] ...\n\n{examples}",
    )
    group = parser.add_argument_group("method")
    for option in fields(Config):
        if option.name in GROUPS:
            group = parser.add_argument_group(GROUPS[option.name])
        text, default = option.metadata["help"], option.default
        if option.name in DEFAULTS:
            text += " ({}, embedded task {})".format(*DEFAULTS[option.name])
        elif default not in (None, ""):
            text += f" ({default})"
        kind, *_ = get_args(option.type) or (option.type,)  # float of float | None
        how = {"type": kind, "default": default, "metavar": "", "help": text}
        if option.metadata["most"] == 1:  # a switch
            how |= {"nargs": "?", "const": 1, "metavar": "1"}
        group.add_argument(f"--{option.name}", **how)
    return parser


def main():
    """The command line. Errors before the first step are reported in one line."""
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    sys.path.append(os.getcwd())  # where package.module:name is looked for
    parser = make_parser()
    run, resume = None, None

    def stop(*_):
        """The first Ctrl-C ends the run after its step, the second at once."""
        if run.stopping or run.saved_step == run.config.steps:  # then it evaluates
            raise KeyboardInterrupt
        run.stopping = True
        print("\nstops after this step; Ctrl-C again stops at once", file=sys.stderr)

    try:
        resume = parser.parse_args().resume
        if resume:  # its settings, but for those given beside it
            parser.set_defaults(**json.loads(Path(resume, "config.json").read_text()))
        run = start(Config(**vars(parser.parse_args())))
        signal.signal(signal.SIGINT, stop)
        train(run)
    except KeyboardInterrupt:
        if run and run.saved_step:
            print(f"\nstopped; steps 1 to {run.saved_step} are kept")
        if resume or (run and run.saved_step):
            folder = shlex.quote(str(resume or run.out))
            print(f"go on with: python dppo.py --resume {folder}")
        else:
            print("\nstopped before the first checkpoint, so that it cannot go on")
        sys.exit(130)
    except torch.OutOfMemoryError:
        sys.exit("dppo.py: out of memory: lower --micro_batch_tokens or --rollout_batch_size")
    except (ValueError, OSError) as error:
        if run:  # a traceback tells where in training
            raise
        parser.error(" ".join(str(error).split())[:300])


if __name__ == "__main__":
    main()
