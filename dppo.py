"""Dynamic Pruning Policy Optimization (DPPO) in one file: GRPO with unbiased pruning.

After "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" (Zhu et al., 2026,
arXiv 2603.04135). This is neither Diffusion PPO nor Divergence PPO, TRL's `dppo`.

GRPO trains on a group of completions of every prompt. Many of them teach nothing. DPPO leaves out
prompts before the rollout and completions after it, at random. It divides what it keeps by the
probability of being kept, so the expected gradient stays that of full GRPO. It packs what is left
densely into slots.

    python dppo.py                           a small embedded model, in a minute or two, offline
    python dppo.py --method dppo-optimal     the same with our rule of least variance
    python dppo.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k:main:train

The upper floor is the paper. It ends with dppo_step, the algorithm, and you may stop there. The
lower floor is what it stands on.

    N    candidate prompts of a step: its window
    B    those of them that are rolled out
    G    completions of a prompt: its group
    M    completions in a forward pass
    T    tokens of the longest of them
    A    advantage of a completion
    pi   probability of being kept: 1 - P
    w    importance weight w_q w_qi: of the prompt and of the completion, 1/pi or 0 each
    C    share that is kept: kept/total
    r_q  share of the low prompts that is pruned
    r_o  the same of completions
    rho  ratio of the new to the old probability
    Z    what normalises a completion's loss
    m    dapo's Z, a mean length of completions
    NaN  no reward can be given, or no score yet

Our reading, where the paper is silent or contradicts itself:
  - From a low set, a fixed share is pruned at random (keep_probabilities).
  - Without KL, completions with A = 0 have no gradient. They are left out first (GRPOSkip).
  - The low set of prompts is that of all prompts with a score (DPPO).
  - The window is as long as the rollout batch has room for (pick_prompts).
  - The loss is divided by N G, all candidate completions, pruned or not (policy_loss).
  - dapo divides by tokens. Those of pruned prompts are unknown, m stands in (running_length).
"""

import argparse
import copy
import json
import math
import os
import pkgutil
import random
import re
import shlex
import sys
import time
import traceback
import warnings
import zlib
from bisect import bisect_right, insort
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import datasets
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# ==== The upper floor: the paper ====
# ---- 1. Settings
def setting(default, text, least=0, most=1e15):
    """A field of Settings, with its line of --help and the bounds of a number."""
    return field(default=default, metadata=dict(help=text, least=least, most=most))

@dataclass
class Settings:
    """The method's settings. Config, on the lower floor, adds those of model, data and run. Of two
    defaults, the second is that of the embedded task; None depends on the method."""
    method: str = setting("dppo", "grpo, grpo-skip, dppo, dppo-optimal, or your own module:Rule")
    objective: str = setting("grpo", "grpo, dr_grpo, dapo or gspo: advantages, Z and clipping")
    prompt_prune_rate: float = setting(None, "r_q; default 0.7, dppo-optimal 0.9", most=0.99)
    completion_prune_rate: float = setting(0.7, "r_o", most=0.99)
    prompts_per_step: int = setting(32, "prompts rolled out in a step, at most", least=1)
    group_size: int = setting(8, "G, completions of each prompt", least=2)
    inner_epochs: int = setting(1, "updates on each rollout", least=1)
    beta: float = setting(0.0, "weight of the KL term")
    learning_rate: float = setting((1e-6, 5e-5), "after the warm-up")
    warmup_steps: int = setting(10, "steps in which the learning rate rises")
    temperature: float = setting((1.0, 0.7), "of the policy", least=1e-3)
    max_completion_tokens: int = setting((1024, 22), "longer ones are cut", least=1)

# By objective, how far rho may go down and up from 1.
CLIPPING = dict(grpo=(0.2, 0.2), dr_grpo=(0.2, 0.2), dapo=(0.2, 0.28), gspo=(3e-4, 4e-4))

# ---- 2. Pruning
def group_advantages(rewards, scale_by_std=True):
    """(B, G) rewards -> (B, G) float64 advantages A = (r - mean)/(std + 1e-4), or r - mean.

    Mean and std (over G - 1) are those of the whole group. To centre A again after pruning would
    bias the gradient. A is exactly 0 in a group of equal rewards, and in one that has a NaN."""
    rewards = rewards.double()
    advantages = rewards - rewards.mean(dim=1, keepdim=True)  # (B, G)
    if scale_by_std:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-4)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # (B, 1)
    return advantages.masked_fill(equal, 0.0).nan_to_num()

def keep_probabilities(scores, rate):
    """The paper's rule: (n,) scores >= 0 -> (n,) float64 keep probabilities pi = 1 - P.

    The low set is what scores below the mean. A draw over all n prunes floor(rate |low|) of it,
    each with the same probability. Everything else has pi = 1, also what has no score (NaN).

    The paper's Algorithm 1 is reported to remove the lowest for certain: pi = 0 where the gradient
    is not 0, though its proof assumes P < 1."""
    scores = scores.double()
    low = scores < scores.nanmean() * (1 - 1e-6)  # (n,) by more than rounding; NaN < x is False
    count = int(low.sum())
    pruned = math.floor(rate * count + 1e-9)  # 0.29 * 100 is 28.999999999999996
    pi = torch.ones_like(scores)  # (n,)
    if count > 0:
        pi[low] = (count - pruned) / count
    return pi

def draw(pi, generator):
    """(n,) keep probabilities -> (n,) float64 weights: 1/pi where kept, 0 where pruned. Where
    pi > 0, their expectation is pi (1/pi) + (1 - pi) 0 = 1.

    Systematic sampling: lay the items end to end in random order, each pi long. Lay a comb over
    them, with teeth at u, u + 1, u + 2, ... for one u uniform in [0, 1). Items with a tooth are
    kept, each with probability pi: in all sum(pi) of them, rounded down or up. With lengths 0.5,
    1, 0.25, 0.25 and u = 0.6, the teeth at 0.6 and 1.6 keep the second and the third."""
    order = torch.randperm(len(pi), generator=generator)  # (n,)
    ends = pi[order].cumsum(0)  # (n,)
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    teeth_before = (ends - u).ceil()  # (n,) each end; in the example 0, 1, 2, 2
    has_tooth = teeth_before.diff(prepend=torch.zeros(1)) > 0  # (n,)
    kept = order[has_tooth]
    weights = torch.zeros_like(pi)  # (n,)
    weights[kept] = 1 / pi[kept]
    return weights

class Rule:
    """What is kept, with which probability. This one is textbook GRPO: everything, always.

    Write your own as a subclass. The gradient stays unbiased if pi is known before the draw: a
    prompt's from memory, a completion's from memory and the rollout. For prompts pi > 0; for a
    completion pi may be 0 if it has no gradient."""
    unbiased = True  # False: all that is kept weighs the same, and the loss is its mean
    remembers = {}  # name: value before the first visit; one number for each prompt

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

class GRPOSkip(Rule):
    """GRPO without the completions that have no gradient. This costs neither bias nor variance."""

    def completion_probabilities(self, advantages, prompt_weights):
        return self.has_gradient(advantages).double()

class DPPO(GRPOSkip):
    """The paper's rule. The score of a completion is |A|, and low if below the mean of those with
    a gradient. The score of a prompt is the mean |A| of its group at its last visit, and low if
    below the mean of all prompts that have one."""
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
        self.memory["score"].numpy()[prompts] = scores  # numpy: of two visits, the later

def next_prompts(seen, prompt_count, seed):
    """(prompt_count,) the prompts that come after `seen` of them, running on into the next epoch,
    which has an order of its own. So a window may hold a prompt twice."""
    epoch, start = divmod(seen, prompt_count)
    orders = []
    for e in (epoch, epoch + 1):
        # The seeds of dppo_step go up from 1_000_003 * seed, these down.
        generator = torch.Generator().manual_seed(1_000_003 * seed - 1 - e)
        orders.append(torch.randperm(prompt_count, generator=generator))
    return torch.cat(orders)[start : start + prompt_count]

def pick_prompts(rule, upcoming, limit, generator):
    """Prompt-level pruning: (k,) next prompts -> window (N,), those kept (B,), their weights (B,).

    The window is the longest beginning of `upcoming` whose pi sum to at most `limit`. As pi <= 1,
    it has at least `limit` prompts. The draw keeps sum(pi), rounded: B is `limit` or one less,
    unless `upcoming` ends. N depends on history and order, never on the draw: to go on until enough
    survive is biased.

    The price: every step counts the same in training, whatever its N. So over an epoch, a prompt in
    a small window counts more, by 2 to 3% at r_q = 0.7 and a limit of 32, more at smaller ones."""
    pi = checked(rule.prompt_probabilities)[upcoming]  # (k,) raises where pi would bias
    N = int((pi.cumsum(0) <= limit + 1e-9).sum())
    pi = pi[:N]  # (N,)
    if pi.sum() < 1:  # with few prompts, or a limit of 1: keep one
        pi = pi / pi.sum()
    weights = draw(pi, generator)  # (N,)
    window = upcoming[:N]
    return window, window[weights > 0], weights[weights > 0]

def weigh_completions(rule, rewards, advantages, prompt_weights, N, generator):
    """Completion-level pruning: (B, G) rewards, (B, G) advantages, (B,) weights of the prompts
    -> (B, G) weights w = w_q w_qi, prompt times completion, 0 where pruned.

    E[w_q w_qi l] = E[w_q l E[w_qi | rollout]] = E[w_q l] = E[l], as pi = 0 only where l = 0. So pi
    of a completion may depend on which prompts survived, and on all else in the rollout."""
    pi = checked(rule.completion_probabilities, advantages, prompt_weights)  # (B, G) 0: no gradient
    missing = rewards.isnan().any(dim=1, keepdim=True)  # (B, 1)
    pi = pi.masked_fill(missing, 0.0)  # a group with a NaN has no loss, neither here nor in L
    w_q = prompt_weights[:, None]  # (B, 1)
    w_qi = draw(pi.flatten(), generator).view_as(pi)  # (B, G)
    if rule.unbiased:
        return w_q * w_qi
    # A biased rule trains on the mean over what is kept: w/(N G) is 1 over their number.
    kept = (w_qi > 0).double()
    return kept * N * kept.shape[1] / kept.sum().clamp(min=1)

# ---- 3. Dense Prompt Packing
def pack(lengths, capacity, lookahead=64):
    """Window-based greedy packing: lengths in tokens, 1 to `capacity` -> slots, lists of indices
    whose lengths sum to at most `capacity`. Of the next `lookahead` sequences, the longest that
    fits goes into the open slot. When none fits, the next slot is opened."""
    # By length; of equal ones, the first in order last. So the last that fits is the next.
    waiting = sorted((length, -i) for i, length in enumerate(lengths[:lookahead]))
    slots, room, following = [], 0, lookahead
    while waiting:
        fitting = bisect_right(waiting, (room, 0))  # how many: all (length, -i) <= (room, 0)
        if fitting == 0:
            slots.append([])
            room = capacity
            fitting = len(waiting)
        length, minus_i = waiting.pop(fitting - 1)
        slots[-1].append(-minus_i)
        room -= length
        if following < len(lengths):
            insort(waiting, (lengths[following], -following))
            following += 1
    return slots

def pack_micro_batches(sequences, indices, config):
    """Packs the (prompt ids, completion ids) at `indices` -> micro-batches (lists of slots, which
    are lists of indices), and the density: the share of the slots that is filled.

    Attention in a slot costs its length squared. So a slot is as long as the longest sequence (a
    multiple of 8, at least 128), and a micro-batch has several."""
    lengths = [len(sequences[i][0]) + len(sequences[i][1]) for i in indices]
    capacity = max([128, *lengths])
    capacity += -capacity % 8
    slots = []
    for slot in pack(lengths, capacity):
        slots.append([indices[j] for j in slot])
    rows = max(1, config.micro_batch_tokens // capacity)
    micro_batches = [slots[i : i + rows] for i in range(0, len(slots), rows)]
    return micro_batches, sum(lengths) / max(1, capacity * len(slots))

# ---- 4. Loss and update
def completion_logprobs(model, sequences, slots, temperature):
    """A forward pass over packed slots -> (M, T) log-probabilities of the completion tokens, a row
    for each sequence in slot order, 0 after its end; and (completion tokens,) entropies.

    Position ids start again at 0 with each sequence. From that, transformers makes the mask
    block-diagonal: attention never crosses a boundary."""
    rows, lengths = [], []
    for slot in slots:
        tokens, positions, predicts = [], [], []
        for i in slot:
            prompt, completion = sequences[i]
            tokens += prompt + completion
            positions += range(len(prompt) + len(completion))
            # The last token of the prompt predicts the first of the completion, and so on.
            predicts += [0] * (len(prompt) - 1) + [1] * len(completion) + [0]
            lengths.append(len(completion))
        rows.append(torch.tensor([tokens, positions, predicts]).T)  # (tokens of the slot, 3)
    table = pad_sequence(rows, batch_first=True)  # (slots, length, 3); each pad its own sequence
    table = torch.nn.functional.pad(table, (0, 0, 0, -table.shape[1] % 8))  # to a multiple of 8
    logprobs, entropies = token_logprobs(model, table, sum(lengths), temperature)
    return pad_sequence(logprobs.split(lengths), batch_first=True), entropies

@torch.no_grad()
def frozen_logprobs(model, sequences, indices, config):
    """{index: (length,) log-probabilities} of the completions at `indices`, without gradient."""
    result = {}
    for slots in pack_micro_batches(sequences, indices, config)[0]:
        logprobs, _ = completion_logprobs(model, sequences, slots, config.temperature)
        for i, row in zip(sum(slots, []), logprobs):
            result[i] = row[: len(sequences[i][1])]
    return result

def policy_loss(logprobs, old_logprobs, ref_logprobs, lengths, advantages, weights, N, m, config):
    """The importance-weighted clipped surrogate of M completions -> scalar, their share of the
    loss; and for the metrics (M, T) whether a token is clipped, (M, T) its KL.

        L_hat = 1/(N G) sum_i w_i l_i
        l_i = 1/Z_i sum_t [-min(rho_t A_i, clip(rho_t, 1 - down, 1 + up) A_i) + beta KL_t]

    With w = 1 this is the full loss L. As E[w l] = E[l] (weigh_completions), E[L_hat] = E[L] at a
    given theta, also with clipping and KL, which the paper's proof leaves out. The paper averages
    over what is kept, and rescales by C/(1 - P), C = kept/total. That is the same estimator
    (Horvitz-Thompson's):
        (1/kept) C/(1 - P) = (1/kept) (kept/total)/pi = 1/(total pi) = w/(N G).

    logprobs, old_logprobs, ref_logprobs (None without beta): (M, T); lengths, advantages, weights:
    (M,)."""
    mask = torch.arange(logprobs.shape[1], device=logprobs.device) < lengths[:, None]  # (M, T)
    log_ratio = logprobs - old_logprobs  # (M, T)
    if config.objective == "gspo":
        # One ratio a sequence: exp of the mean log-ratio.
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

    Z = lengths  # grpo; gspo: |o| equal terms, so Z is 1 in effect
    if config.objective == "dr_grpo":
        Z = config.max_completion_tokens
    if config.objective == "dapo":
        Z = m
    loss_of_completion = ((config.beta * kl - surrogate) * mask).sum(dim=1) / Z  # (M,)
    return (weights * loss_of_completion).sum() / (N * config.group_size), clipped, kl.detach()

def train_step(model, optimizer, sequences, advantages, weights, N, m, config, old=None, ref=None):
    """One update on what was kept -> metrics. The gradient is summed over micro-batches. Even if it
    is unbiased, the update is not: Adam and the clipping of its norm are not linear.

    sequences: the (prompt ids, completion ids) of all completions; advantages, weights: one number
    for each; old, ref: from frozen_logprobs. Without `old`, the policy that sampled is the one
    that is trained: rho is 1, but its gradient is not 0."""
    kept = weights.nonzero().squeeze(1).tolist()
    micro_batches, density = pack_micro_batches(sequences, kept, config)
    metric_sums = torch.zeros(3, device=model.device)  # entropy, clip fraction, KL
    for slots in micro_batches:
        batch = sum(slots, [])  # M indices
        lengths = torch.tensor([len(sequences[i][1]) for i in batch])  # (M,)
        of_completions = torch.stack([lengths, advantages[batch], weights[batch]])  # (3, M)
        lengths, A, w = of_completions.float().to(model.device, non_blocking=True)
        logprobs, entropies = completion_logprobs(model, sequences, slots, config.temperature)
        old_logprobs, ref_logprobs = logprobs.detach(), None  # (M, T)
        if old is not None:
            old_logprobs = pad_sequence([old[i] for i in batch], batch_first=True)
        if ref is not None:
            ref_logprobs = pad_sequence([ref[i] for i in batch], batch_first=True)
        loss, clipped, kl = policy_loss(
            logprobs, old_logprobs, ref_logprobs, lengths, A, w, N, m, config)
        loss.backward()
        metric_sums += torch.stack([entropies.sum(), clipped.sum(), kl.sum()])
    tokens = sum(len(sequences[i][1]) for i in kept)
    means = metric_sums / max(1, tokens)
    metrics = apply_update(model, optimizer, means, config)  # skips a gradient of 0 or NaN
    return metrics | dict(
        completions_trained=len(kept), tokens_trained=tokens, slot_density=density)

# ---- 5. The step: the paper's algorithm
def running_length(progress, completions, prompt_weights):
    """m, a running mean of the completions' length over the steps before; then takes in this one.
    The first of all steps, where our rules prune no prompt, has its own."""
    lengths = torch.tensor([sum(map(len, group)) / len(group) for group in completions])  # (B,)
    own = ((prompt_weights * lengths).sum() / prompt_weights.sum()).item()
    m = progress.mean_length or own
    progress.mean_length = 0.9 * m + 0.1 * own
    return m

def dppo_step(task, rule, optimizer, reference, progress, config):
    """One step of the paper's algorithm -> what happened, for the record.

    task has the model, the training examples (`train`) and the reward; progress counts steps and
    candidate prompts seen, and has the mean length. What is random follows from seed and `seen`. A
    run that takes over memory takes over `seen` too, so that its draws are new."""
    clock, model, generator = time.perf_counter(), task.model, torch.default_generator
    progress.step += 1
    transformers.set_seed((1_000_003 * config.seed + progress.seen) % 2**32)

    # 1. Prune prompts by what is remembered of them.
    upcoming = next_prompts(progress.seen, len(task.train), config.seed)
    window, prompts, prompt_weights = pick_prompts(
        rule, upcoming, config.prompts_per_step, generator)
    N = len(window)
    progress.seen += N

    # 2. Roll out those that are kept, and reward the completions.
    examples = [task.train[q] for q in prompts.tolist()]
    completions = rollout(task, examples, config.group_size, config)  # B lists of G lists of ids
    rewards = reward_completions(task, examples, completions)  # (B, G)
    advantages = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")  # (B, G)
    rule.update(prompts, rewards, advantages)  # after the prompts' draw, before the completions'
    m = running_length(progress, completions, prompt_weights)
    rollout_seconds = time.perf_counter() - clock

    # 3. Prune completions. Every update has its own draw, since after the first, theta depends on
    #    the first draw. (Prompts cannot be drawn anew: from the second update on, the gradient is
    #    unbiased only given the prompts that were kept.)
    draws = []
    for _ in range(config.inner_epochs):
        weights = weigh_completions(rule, rewards, advantages, prompt_weights, N, generator)
        draws.append(weights.flatten())  # (B G,)

    # 4. Log-probabilities under the old policy and the reference, for all that any update trains.
    sequences = []
    for example, completions_of_prompt in zip(examples, completions):
        for completion in completions_of_prompt:
            sequences.append((example["prompt_ids"], completion))
    trained = sum(draws).nonzero().squeeze(1).tolist()
    old, ref = None, None
    if config.inner_epochs > 1:
        old = frozen_logprobs(model, sequences, trained, config)
    if config.beta > 0:
        ref = frozen_logprobs(reference, sequences, trained, config)

    # 5. Pack what is kept, and update.
    learning_rate = config.learning_rate * min(1.0, progress.step / max(1, config.warmup_steps))
    optimizer.param_groups[0]["lr"] = learning_rate
    A, updates = advantages.flatten(), []  # (B G,)
    for w in draws:
        updates.append(train_step(model, optimizer, sequences, A, w, N, m, config, old, ref))
    return dict(
        N=N, examples=examples, completions=completions, rewards=rewards, advantages=advantages,
        prompt_weights=prompt_weights, weights=draws[-1].view_as(rewards), updates=updates,
        learning_rate=learning_rate, rollout_seconds=rollout_seconds,
        train_seconds=time.perf_counter() - clock - rollout_seconds)

# ==== The lower floor: what the paper stands on ====
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = DEVICE == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)  # not a T4 or V100
DTYPE = torch.bfloat16 if NATIVE else torch.float32
LOGIT_CHUNK = 512  # tokens with logits at a time: of Qwen's vocabulary, three float32 copies of 0.3 GB

# ---- 6. Beyond the paper: the rule of least variance
def optimal_probabilities(scores, rate, floor=0.0):
    """Scores, of any shape -> float64 pi = min(1, c score), at least `floor`, 1 without a score. Their sum is that of
    keep_probabilities (without a floor, of what scores above 0). Pruning adds sum (1/pi - 1) |g|^2 to the gradient's
    variance. At a given sum(pi) this is least at pi proportional to the norm |g| (Neyman allocation), nearly to |A|."""
    keep = keep_probabilities(scores[(scores != 0) | (floor > 0)], rate).sum().round()
    scores = scores.double().nan_to_num(math.inf)
    pi, low, high = torch.empty_like(scores), 1e-150, 1e150
    for _ in range(50):  # bisection: sum(pi) grows with c
        c = math.sqrt(low * high)
        low, high = (c, high) if c * torch.clamp(scores, floor / c, 1 / c, out=pi).sum() < keep else (low, c)
    return (high * scores).clamp(floor, 1)

class OptimalDPPO(Rule):
    """A completion's score is |A| times the weight of its prompt, as its gradient enters. A prompt's is the root mean
    square A that its next group should have."""
    remembers = {"score": math.nan, "right": 0.0, "wrong": 0.0}  # right, wrong: r and 1 - r, summed with decay
    floor = 0.07  # of pi, where what looks useless may have a gradient: weights are at most 15
    prior = 0.05  # a and b of a prompt's success rate: most are solved nearly always or nearly never
    decay = 0.8  # what a visit counts one visit later, since the policy changes

    def prompt_probabilities(self):
        return optimal_probabilities(self.memory["score"], self.config.prompt_prune_rate, self.floor)

    def completion_probabilities(self, advantages, prompt_weights):
        scores = advantages.abs() * prompt_weights[:, None]
        floor = self.floor * (self.config.beta > 0)  # with KL, A = 0 has a gradient too
        return optimal_probabilities(scores, self.config.completion_prune_rate, floor)

    def update(self, prompts, rewards, advantages):
        """At success rate p, A^2 is 1 unless all are right or wrong: in the mean 1 - p^G - (1 - p)^G. Without the std
        it is p (1 - p), half of that at G = 2. For p from Beta(a, b), E[p^G] is the product of (a + i)/(a + b + i)."""
        if ((rewards < 0) | (rewards > 1)).any():
            warnings.warn("dppo-optimal takes rewards below 0 as 0, and above 1 as 1")
        right, wrong = self.memory["right"], self.memory["wrong"]
        for q, group in zip(prompts.tolist(), rewards.clamp(0, 1)):
            if not group.isnan().any():  # else it says nothing about successes
                right[q] = self.decay * right[q] + group.sum()
                wrong[q] = self.decay * wrong[q] + (1 - group).sum()
        a, b = self.prior + right[prompts], self.prior + wrong[prompts]  # (B,)
        i = torch.arange(2 if self.config.objective == "dr_grpo" else self.config.group_size)[:, None]
        square = 1 - sum(((x + i) / (a + b + i)).prod(dim=0) for x in (a, b))
        self.memory["score"][prompts] = square.sqrt()

RULES = {"grpo": Rule, "grpo-skip": GRPOSkip, "dppo": DPPO, "dppo-optimal": OptimalDPPO}

def checked(method, *inputs):
    """The probabilities of a rule's method, in float64. Raises ValueError where they would bias in silence."""
    rule, pi = method.__self__, method(*inputs).double()
    needed = Rule.has_gradient(rule, inputs[0]) if inputs else torch.ones(rule.prompt_count) > 0
    needed &= rule.unbiased or not (inputs or pi.any())
    if pi.shape != needed.shape or not (torch.where(needed, pi > 0, pi >= 0) & (pi <= 1 + 1e-9)).all():
        raise ValueError(f"{method.__qualname__} must give {tuple(needed.shape)} probabilities, 0 < pi <= 1; "
                         "0 only where there is no gradient, or if unbiased = False")
    return pi

def named(option, name, known):
    """A rule or reward by its name, or a user's own as package.module:name."""
    if name not in known and ":" not in name:
        raise ValueError(f"--{option} {name}: not one of {', '.join(known)}, nor package.module:name")
    return known.get(name) or pkgutil.resolve_name(name)

# ---- 7. The model
def token_logprobs(model, table, count, temperature):
    """(slots, length, 3) token ids, position ids, and 1 at the `count` places before tokens of completions -> (count,)
    log-probabilities of these, (count,) entropies. Only there are logits, by chunks, again in the backward pass."""
    input_ids, position_ids, predicts = table.to(model.device, non_blocking=True).unbind(dim=2)
    places = predicts.flatten().nonzero_static(size=count).squeeze(1)  # (count,) the host need not wait
    targets = input_ids.flatten()[places + 1]  # (count,)
    for module in model.modules():  # layers are computed again only in training mode; dropout stays off
        module.training = getattr(module, "gradient_checkpointing", False)
    hidden = model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    model.eval()
    def of_chunk(hidden, targets):
        logprobs = model.get_output_embeddings()(hidden).float().div_(temperature).log_softmax(dim=-1)
        of_targets = logprobs.gather(-1, targets[:, None]).squeeze(-1)  # the backward pass computes again up to here
        return of_targets, torch.special.entr(logprobs.detach().exp()).sum(dim=-1)
    chunks = zip(hidden.flatten(0, 1)[places].split(LOGIT_CHUNK), targets.split(LOGIT_CHUNK))
    parts = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return [torch.cat(part) for part in zip(*parts)]

@torch.no_grad()
def make_optimizer(model, config):
    """Adam on float32: at a learning rate of 1e-6, updates of bfloat16 weights would round away. So each has a float32
    master, which is rounded to it (a float32 weight is its own), and a float32 sum of its gradients."""
    for p in model.parameters():
        p.grad_dtype, p.grad = None, torch.zeros_like(p, dtype=torch.float32)  # None: any
    masters = [p.float() for p in model.parameters()]
    return torch.optim.Adam(masters, lr=config.learning_rate, betas=(0.9, 0.99), fused=True)

@torch.no_grad()
def apply_update(model, optimizer, means, config):
    """Clips the gradient and makes the step -> metrics. Left out are an update that is not finite (`skipped`), and one
    of gradient 0, which would move on Adam's momentum alone."""
    weights, masters = [*model.parameters()], optimizer.param_groups[0]["params"]
    for p, master in zip(weights, masters):
        master.grad = p.grad
    grad_norm = torch.nn.utils.clip_grad_norm_(masters, config.max_grad_norm)
    values = torch.hstack([means, grad_norm]).tolist()
    finite = math.isfinite(sum(values))
    if finite and values[-1] > 0:
        optimizer.step()
        torch._foreach_copy_(weights, masters)
    optimizer.zero_grad(set_to_none=False)
    names = ("entropy", "clip_fraction", "kl", "grad_norm")
    return dict(zip(names, values if finite else [None] * 4), skipped=int(not finite))

def rollout(task, examples, samples, config, bar=""):
    """`samples` completions of each example, in token ids: completions[q][i] ends with its first end id, or is cut."""
    ids, size = [], max(1, config.rollout_batch_size // samples)
    for start in tqdm(range(0, len(examples), size), bar, leave=False, disable=not bar):
        ids += generate(task, [e["prompt_ids"] for e in examples[start:start + size]], samples, config)[0]
    return [ids[i:i + samples] for i in range(0, len(ids), samples)]

@torch.inference_mode()
def generate(task, prompts, samples, config, scores=False):
    """Lists of ids -> `samples` completions of each, side by side; with `scores`, their log-probabilities, padded. A
    prompt is read once for all its samples. model.generate goes on until its last row has ended, so it is called in six
    parts; rows that have ended leave in between. Qwen's generation_config (top_k, a repetition penalty) is not of the
    policy that is trained, so a copy of the model has a clean one."""
    model = copy.copy(task.model)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=config.temperature, top_k=0, top_p=1.0, eos_token_id=task.end_ids() or None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=scores)
    table = [torch.tensor([prompt, [1] * len(prompt)]).T for prompt in prompts]
    ids, mask = pad_sequence(table, batch_first=True, padding_side="left").to(model.device).unbind(dim=2)
    cache, start = transformers.DynamicCache(config=model.config), ids.shape[1]
    if start > 1:  # all but the last token, which model.generate reads
        model.get_decoder()(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, use_cache=True,
                            position_ids=(mask.cumsum(dim=1) - mask)[:, :-1])
        cache.batch_repeat_interleave(samples)
    ids, mask = (x.repeat_interleave(samples, dim=0) for x in (ids, mask))
    rows, ends = torch.arange(len(ids), device=ids.device), ids.new_tensor(task.end_ids())
    tokens = ids.new_full((len(ids), config.max_completion_tokens), -1)
    logprobs = tokens.float()
    for part in torch.arange(config.max_completion_tokens).chunk(6):
        output = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=len(part))
        ids, new = output.sequences, output.sequences.shape[1] - start
        tokens[rows, :new] = ids[:, start:]
        if scores:
            logprobs[rows, part[0]:new] = model.compute_transition_scores(ids, output.scores, normalize_logits=True)
        live = ~torch.isin(tokens[rows], ends).any(dim=1)
        if not live.any():
            break
        cache.batch_select_indices(live)
        rows, ids, mask = rows[live], ids[live], torch.nn.functional.pad(mask[live], (0, len(part)), value=1)
    lengths = (torch.isin(tokens, ends).cumsum(dim=1) == 0).sum(dim=1) + 1  # one too many for what is cut
    return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist())], logprobs

@torch.no_grad()
def check_sampling(task, config):
    """Raises ValueError where the policy trained is not the one that samples, which rho = 1 would hide. The logits must
    be the head's, neither scaled nor capped. The log-probabilities of some sampled tokens must be those of
    completion_logprobs, in one slot and in two, on average, since bfloat16 is coarse."""
    transformers.set_seed(config.seed)
    model, prompts = task.model, [task.train[i]["prompt_ids"] for i in (0, -1)]
    try:
        ids = torch.tensor(prompts[:1], device=model.device)
        logits, hidden = model(ids).logits, model.get_decoder()(ids).last_hidden_state
        if not (model.get_output_embeddings()(hidden) - logits).abs().max() <= 1e-3 * logits.abs().max():  # nor NaN
            raise ValueError("it scales or caps its logits")
        short = replace(config, max_completion_tokens=min(16, config.max_completion_tokens))
        completions, logprobs = generate(task, prompts, 4, short, scores=True)
        sequences = [(prompts[i // 4], completion) for i, completion in enumerate(completions)]
        for slots in ([[*range(8)]], [[0, 2, 4, 6], [1, 3, 5, 7]]):
            trained, _ = completion_logprobs(model, sequences, slots, config.temperature)
            sampled = logprobs[sum(slots, []), :trained.shape[1]].where(trained != 0, 0)
            difference = (trained - sampled).abs().sum() / sum(map(len, completions))
            if not difference <= (1e-3 if model.dtype == torch.float32 else 0.2):
                raise ValueError(f"log-probabilities in rollout and packed training differ by {difference:.2g}")
    except Exception as error:  # also inside models without the cache or the layers that this needs
        raise ValueError(f"{type(model).__name__} cannot be trained here: {error}") from None

# ---- 8. Rewards: f(prompts, completions, **columns) -> list[float | None]; None: not gradable
NUMBER = r"(?:(?<![\w)])-\$?|\$-?)?(?a:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"

def gsm8k_number(text):
    """The first number after the last ####, else the last of the text, else None. 1e9 is not the number 1."""
    text = text.replace("\N{MINUS SIGN}", "-")
    numbers = [match for match in re.finditer(rf"{NUMBER}((?:[eE][-+]|[A-Za-z]+)[0-9]\w*)?", text) if not match[1]]
    mark = text.rfind("####")
    chosen = [match for match in numbers if match.start() > mark >= 0] or numbers[::-1]
    return Decimal(re.sub("[$,]", "", chosen[0][0])) if chosen else None

def reward_of(read, gold):
    """A reward: 1 where read(text of the completion) is gold(answer), None where that is None or empty."""
    def reward(prompts, completions, answer, **columns):
        texts = (c if isinstance(c, str) else c[-1]["content"] for c in completions)  # chat: one assistant message
        golds = (gold(str(a)) if isinstance(a, (str, int, float)) else None for a in answer)
        return [None if g in (None, "") else float(read(text) == g) for text, g in zip(texts, golds)]
    return reward

REWARDS = {
    "exact": reward_of(str.strip, str.strip),
    "gsm8k": reward_of(gsm8k_number, lambda answer: (  # an answer is a number, or marks one with ####
        gsm8k_number(answer) if re.search(rf"####|^[ .%]*{NUMBER}[ .%]*\Z", answer) else None))}

# ---- 9. Tasks
@dataclass
class Task:
    """What a run works on. An example has prompt (text or messages), prompt_ids and the dataset's columns."""
    train: list
    evals: dict  # name: examples
    tokenizer: object
    reward: callable
    model: object = None

    def end_ids(self):
        """Every id that ends a completion: Qwen has two."""
        ids = self.model.generation_config.eos_token_id
        return sorted({*(ids if isinstance(ids, list) else [ids]), self.tokenizer.eos_token_id} - {None})

def load_task(config):
    """The user's data and model, or the embedded ones. Wrong data shows before a model is loaded."""
    if config.model:
        if not (os.path.isdir(config.model) or re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", config.model)):
            raise ValueError(f"--model {config.model}: no such folder, and not a name on the Hub")
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
        train = load_examples(config.dataset, "train", config, tokenizer)
        evals = {spec: load_examples(spec, "test", config, tokenizer)[:config.eval_prompts]
                 for spec in config.eval_dataset.split(",") if spec}
        if not evals:
            size = min(config.eval_prompts, len(train) // 5)
            evals, train = {"held out": train[:size]}, train[size:]
    else:
        train, evals, tokenizer = sorting_data(config)
    task = Task(train, {name: e for name, e in evals.items() if e}, tokenizer, named("reward", config.reward, REWARDS))
    for name, trial in {"the training data": train[:100], **task.evals}.items():
        if reward_completions(task, trial, [[[]]] * len(trial)).isnan().all():  # of empty completions
            raise ValueError(f"--reward {config.reward} grades none of {len(trial)} answers (--answer_column): {name}")
    longest = max(len(e["prompt_ids"]) for e in sum(evals.values(), train)) + config.max_completion_tokens
    if config.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            config.model, dtype=DTYPE, attn_implementation="sdpa", trust_remote_code=False)
    else:
        model = warm_started(tokenizer).to(DTYPE)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if longest > positions:
        raise ValueError(f"prompt and completion may take {longest} tokens, but the model has {positions} positions")
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    task.model = model.to(DEVICE).eval()
    check_sampling(task, config)
    print(f"{type(model).__name__} in {DTYPE} on {DEVICE}")
    return task

def reward_completions(task, examples, completions):
    """(B, G) float64 rewards of G completions (token ids) of B examples; NaN: not gradable."""
    columns = {name: [e[name] for e in examples for _ in completions[0]] for name in examples[0]}
    del columns["prompt_ids"]
    prompts = columns["prompts"] = columns.pop("prompt")
    texts = task.tokenizer.batch_decode(sum(completions, []), skip_special_tokens=True)
    columns["completions"] = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]  # a chat
                              for prompt, text in zip(prompts, texts)]
    rewards = torch.tensor([math.nan if value is None else value for value in task.reward(**columns)], dtype=float)
    if rewards.shape != (len(texts),) or rewards.isinf().any():
        raise ValueError(f"the reward function must return {len(texts)} finite numbers or None, one a completion")
    return rewards.view(len(examples), -1)

def load_examples(spec, split, config, tokenizer):
    """Examples of path, path:split or path:config:split, shuffled. Prompts too long are left out and counted."""
    path, *name = re.split(r":(?![^\[]*\])", spec)  # not within a slice
    *name, split = name or [split]
    if os.path.isfile(path) and os.path.getsize(path) == 0:
        raise ValueError(f"{path} is empty")
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    rows = datasets.load_dataset(kind or path, *name, data_files=kind and {split.split("[")[0]: path}, split=split)
    flat = rows.flatten()[:]  # verl nests the answer
    prompts = [flat[name] for name in config.prompt_column.split(",") if name in flat]
    answers = [flat[name] for name in config.answer_column.split(",") if name in flat] + [[None] * len(rows)]
    if not prompts:
        raise ValueError(f"{spec} has the columns {', '.join(flat)}: --prompt_column names one")
    template, system, examples = json.loads(config.chat_template_kwargs), config.system_prompt, []
    for row, prompt, answer in zip(rows, prompts[0], answers[0]):
        if not prompt:
            continue
        if tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if system:
                prompt = [{"role": "system", "content": system}] + [turn for turn in prompt if turn["role"] != "system"]
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template)
        else:
            prompt = system + "\n\n" + prompt if system else prompt
            ids = tokenizer.encode(prompt)
            ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
        if 0 < len(ids) <= config.max_prompt_tokens:  # TRL's rewards expect the answer under either name
            examples.append(row | dict(prompt=prompt, prompt_ids=ids, answer=answer, solution=answer))
    if not examples:
        raise ValueError(f"{spec} has no prompts of at most --max_prompt_tokens {config.max_prompt_tokens}")
    print(f"{spec}: left out {len(rows) - len(examples)} of {len(rows)} prompts, empty or over --max_prompt_tokens")
    random.Random(0).shuffle(examples)  # not by --seed: the data is the same for every run
    return examples

# The embedded task: sort digits. By class: prompts, fewest and most digits. As in real data, the easy ones are nearly
# always solved before training, the hard ones never.
SORTING = {"easy": (461, 2, 3), "middle": (154, 9, 12), "hard": (409, 17, 20)}

def sorting_example(name, rng, tokenizer):
    """An example of a class of the embedded task: the prompt "4021=" has the answer "0124"."""
    digits = rng.choices("0123456789", k=rng.randint(*SORTING[name][1:]))
    prompt, answer = "".join(digits) + "=", "".join(sorted(digits))
    return dict(prompt=prompt, prompt_ids=tokenizer.encode(prompt, add_special_tokens=False), answer=answer)

def sorting_data(config):
    """1,024 training examples, an evaluation set for each class, and a tokenizer: a token is a character."""
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    train, evals, held_out = [], {}, config.eval_prompts // len(SORTING)
    for name, (size, *_) in SORTING.items():
        rng = random.Random(name)
        examples = [sorting_example(name, rng, tokenizer) for _ in range(size + 10 * held_out)]
        train += examples[:size]
        evals[name] = [e for e in examples if e not in train][:held_out]
    random.Random(0).shuffle(train)
    return train, evals, tokenizer

def warm_started(tokenizer):
    """A model taught by noisy demonstrations, which the first run makes and keeps in the user's cache."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, hidden_size=128, intermediate_size=256, head_dim=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    kept = Path(os.getenv("XDG_CACHE_HOME") or Path.home() / ".cache", "dppo/sorter-2.pt")  # 2: this recipe
    if kept.exists():
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model
    rng, config, ones = random.Random(0), Config(temperature=1.0), torch.ones(64)
    optimizer = make_optimizer(model, config)
    for step in tqdm(range(400), "warm start, the first time only"):
        sequences = []
        for name, noise in rng.choices([("easy", 0.0), ("middle", 0.2)], k=64):
            example = sorting_example(name, rng, tokenizer)
            answer = [rng.choice("0123456789") if rng.random() < noise else digit for digit in example["answer"]]
            sequences.append((example["prompt_ids"], tokenizer.encode("".join(answer))))  # with the end id
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / 400)
        # Supervised learning is a policy gradient on others' answers, of advantage 1: here, 8 groups of 8.
        train_step(model, optimizer, sequences, ones, ones, 8, 1.0, config)
    os.makedirs(kept.parent, exist_ok=True)
    partial = f"{kept}.{os.getpid()}"
    torch.save(model.state_dict(), partial)
    os.replace(partial, kept)  # never half a model under this name
    return model

# ---- 10. Runs
FIXED = ("method", "data", "model", "eval_dataset", "eval_prompts", "eval_samples")  # if resumed; of history two
GROUPS = dict(method="method", model="data", rollout_batch_size="rollout", steps="training", eval_dataset="run")

@dataclass
class Config(Settings):
    """Every setting of the command line. Raises ValueError for what would be silently wrong."""
    model: str = setting("", "causal LM, Hub or folder; none: the embedded one")
    dataset: str = setting("", "path, path:split or path:config:split; Hub, folder, .jsonl, .parquet")
    prompt_column: str = setting("prompt,question,problem", "the first found")
    answer_column: str = setting("answer,solution,reward_model.ground_truth", "the first found")
    system_prompt: str = setting("", "before every prompt, in place of its own system message")
    chat_template_kwargs: str = setting("{}", 'JSON, such as {"enable_thinking": false}')
    max_prompt_tokens: int = setting(512, "longer prompts are left out, and counted", least=1)
    reward: str = setting(("gsm8k", "exact"), "exact, gsm8k or your own module:function")
    rollout_batch_size: int = setting(256, "sequences in a call of generate", least=1)
    steps: int = setting((300, 110), "0 only evaluates")
    max_grad_norm: float = setting(1.0, "longer gradients are clipped", least=1e-6)
    micro_batch_tokens: int = setting(4096, "tokens in a forward pass, or one long sequence", least=1)
    gradient_checkpointing: int = setting(0, "1: less memory, a third more work", most=1)
    eval_dataset: str = setting("", "as --dataset, several by commas; none: held out")
    eval_prompts: int = setting(256, "of each evaluation set, at most")
    eval_samples: int = setting(4, "k of avg@k and pass@k", least=1)
    eval_every: int = setting(0, "steps between evaluations, besides before and after")
    seed: int = setting(0, "of the prompts' order, the rollouts and the draws", most=2**32 - 1)
    output_dir: str = setting("", "the run's own folder; none: a new one under runs/")
    save_every: int = setting(50, "steps between checkpoints, besides after the last")
    history: str = setting("", "folder of an earlier run on the same data, for its memory of prompts")
    resume: str = setting("", "folder of a run to go on with, in its settings but for those given")

    def __post_init__(self):
        self.rule = named("method", self.method, RULES)
        if self.prompt_prune_rate is None:
            self.prompt_prune_rate = 0.9 if self.rule is OptimalDPPO else 0.7
        for option in fields(self):
            value, (_, least, most) = getattr(self, option.name), option.metadata.values()
            if isinstance(value, tuple):
                value = value[not self.model]
                setattr(self, option.name, value)
            if option.type in (int, float) and not least <= value <= most:  # NaN fails too
                raise ValueError(f"--{option.name} {value} must lie in [{least}, {most}]")
        if self.objective not in CLIPPING:
            raise ValueError(f"--objective {self.objective}: not one of {', '.join(CLIPPING)}")
        if self.model + self.dataset + self.eval_dataset + self.system_prompt and not (self.model and self.dataset):
            raise ValueError("--model and --dataset need each other, --eval_dataset and --system_prompt need both")
        if self.resume and self.output_dir:
            raise ValueError("--resume goes on in its own folder: leave out --output_dir")

def evaluate(task, config):
    """avg@k and pass@k of each evaluation set, and `accuracy`, the mean reward of them all; None if not graded."""
    transformers.set_seed(config.seed)  # the same every time
    k, sets, graded = config.eval_samples, {}, [torch.zeros(0)]
    mean = lambda values: values.mean().item() if len(values) else None
    for name, examples in task.evals.items():
        rewards = reward_completions(task, examples, rollout(task, examples, k, config, f"evaluating {name}"))
        rewards = rewards[~rewards.isnan().any(dim=1)]
        graded.append(rewards)
        sets[name] = {"prompts": len(rewards), f"avg@{k}": mean(rewards), f"pass@{k}": mean(rewards.amax(dim=1))}
    return {"accuracy": mean(torch.cat(graded)), **sets}

def step_record(
        task, progress, N, examples, completions, rewards, advantages, prompt_weights, weights, updates, **numbers):
    """What dppo_step returned -> a line of metrics.jsonl, and one of samples.jsonl: its first group. Means are over
    graded prompts, by weight, so they speak of the whole window."""
    graded, ends = ~rewards.isnan().any(dim=1), task.end_ids()
    w = prompt_weights * graded
    mean = lambda x: (w @ torch.as_tensor(x).double().mean(dim=1).nan_to_num() / w.sum()).nan_to_num().item()
    record = dict(
        step=progress.step, cumulative_seconds=progress.seconds, peak_memory_gb=torch.cuda.max_memory_allocated() / 1e9,
        prompts_seen=N, prompts_rolled=len(w), prompts_pruned=N - len(w), ungradable_prompts=int((~graded).sum()),
        reward=mean(rewards), zero_variance_fraction=mean((advantages == 0).all(dim=1, keepdim=True)),
        truncated_fraction=mean([[ids[-1] not in ends for ids in group] for group in completions]),
        completion_length=mean([[len(ids) for ids in group] for group in completions]), weight_max=weights.max().item(),
        effective_sample_size=(weights.sum() ** 2 / weights.square().sum()).nan_to_num().item())
    for name in updates[0]:  # the mean of several updates
        values = [update[name] for update in updates if update[name] is not None]
        record[name] = sum(values) / len(values) if values else None
    return record | numbers, dict(
        step=progress.step, prompt=examples[0]["prompt"], answer=examples[0].get("answer"),
        completions=task.tokenizer.batch_decode(completions[0]), prompt_weight=prompt_weights[0].item(),
        rewards=[None if math.isnan(reward) else reward for reward in rewards[0].tolist()],
        advantages=advantages[0].tolist(), weights=weights[0].tolist())

def save_checkpoint(run):
    """Writes all that a run needs to go on, and then replaces the last checkpoint."""
    state = dict(progress=vars(run.progress), settings=run.settings, memory=run.rule.memory,
                 sizes=[file.tell() for file in run.files], optimizer=run.optimizer.state_dict(),
                 weights=run.optimizer.param_groups[0]["params"])
    with (run.out / "partial.pt").open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    os.replace(file.name, run.out / "checkpoint.pt")

@torch.no_grad()
def load_checkpoint(run, saved):
    """Takes a run up where its checkpoint was written."""
    for file, size in zip(run.files, saved["sizes"]):
        if file.tell() < size:
            raise ValueError(f"{file.name} is shorter than it was at the checkpoint")
    run.optimizer.load_state_dict(saved["optimizer"])
    for weights in (run.optimizer.param_groups[0]["params"], [*run.task.model.parameters()]):
        torch._foreach_copy_(weights, saved["weights"])
    for file, size in zip(run.files, saved["sizes"]):
        file.truncate(size)  # what came after the checkpoint comes again

def start(config, task=None):
    """A run that is ready for its next step."""
    folder = config.resume or config.history
    out = Path(config.resume or config.output_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    saved = folder and torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)  # runs no code
    out.mkdir(parents=True, exist_ok=True)  # first, in case it cannot be written
    if not config.resume and any(out.iterdir()):
        raise ValueError(f"--output_dir {out} is not empty; --resume {out} goes on with a run")
    task = task or load_task(config)
    data = repr([(e["prompt_ids"], e.get("answer")) for e in task.train])
    settings = asdict(config) | {"data": zlib.crc32(data.encode())}
    rule, progress = config.rule(config, len(task.train)), dict(seen=0, mean_length=None)
    if saved:
        for name in FIXED if config.resume else FIXED[:2]:
            if saved["settings"][name] != settings[name]:
                raise ValueError(f"{folder}: its {name} is not that of this run")
        rule.memory, progress = saved["memory"], saved["progress"]
    checked(rule.prompt_probabilities)  # one's own rule is tried first
    if not config.resume:
        progress |= dict(step=0, seconds=0.0, skipped=0, before=evaluate(task, config))
    run = SimpleNamespace(
        config=config, out=out, task=task, rule=rule, settings=settings, progress=SimpleNamespace(**progress),
        reference=copy.deepcopy(task.model) if config.beta > 0 else None,  # before the weights of a checkpoint
        optimizer=make_optimizer(task.model, config),
        files=[(out / name).open("a") for name in ("metrics.jsonl", "samples.jsonl")])
    if config.resume:
        load_checkpoint(run, saved)
    (out / "config.partial").write_text(json.dumps(asdict(config) | {"output_dir": ""}, indent=2))
    (out / "config.partial").replace(out / "config.json")
    return run

def train(run):
    """Makes the steps that are left, and evaluates -> the summary."""
    config, task, progress, after = run.config, run.task, run.progress, None
    for step in (bar := tqdm(range(progress.step + 1, config.steps + 1), initial=progress.step, total=config.steps)):
        told = dppo_step(task, run.rule, run.optimizer, run.reference, progress, config)
        progress.seconds += told["rollout_seconds"] + told["train_seconds"]
        record, sample = step_record(task, progress, **told)
        after, clock = None, time.perf_counter()
        if step % (config.eval_every or math.inf) == 0:
            record["evaluation"] = after = evaluate(task, config)
        record["evaluation_seconds"] = time.perf_counter() - clock
        for file, line in zip(run.files, (record, sample)):
            print(json.dumps(line, default=str), file=file, flush=True)  # an answer may be a date
        bar.set_postfix({name: record[name] for name in ("reward", "prompts_seen", "prompts_rolled", "slot_density")})
        progress.skipped = progress.skipped + 1 if record["skipped"] == 1 else 0
        if progress.skipped >= 10:
            raise FloatingPointError("10 updates in a row were not finite: lower --learning_rate")
        if step == config.steps or step % (config.save_every or math.inf) == 0:
            save_checkpoint(run)
    before = progress.before
    after = after or (evaluate(task, config) if progress.step else before)
    summary = dict(before=before, after=after, seconds=progress.seconds, device=DEVICE, config=asdict(config))
    (run.out / "summary.json").write_text(json.dumps(summary, indent=2))
    for part in (task.model, task.tokenizer):
        part.save_pretrained(run.out / "model")
    key = f"avg@{config.eval_samples}"
    pairs = [("accuracy", before["accuracy"], after["accuracy"])]
    pairs += [(name, before[name][key], after[name][key]) for name in task.evals]
    print(", ".join(f"{name} {old:.2f} -> {new:.2f}" for name, old, new in pairs if None not in (old, new)),
          f"in {progress.seconds:.0f} s of training; results are in {run.out}")
    return summary

def main():
    """The command line. What is wrong before the first step is told in one line."""
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    sys.path.append(os.getcwd())  # for package.module:name
    run, parser = None, argparse.ArgumentParser(
        usage=argparse.SUPPRESS, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__.split("\n\n")[3])
    for option in fields(Config):
        if option.name in GROUPS:
            group = parser.add_argument_group(GROUPS[option.name])
        shown = "" if option.default in (None, "") else f" ({option.default})"
        if isinstance(option.default, tuple):
            shown = " ({}, embedded task {})".format(*option.default)
        group.add_argument(f"--{option.name}", type=option.type, default=option.default, metavar="",
                           help=option.metadata["help"] + shown)
    try:
        resume = parser.parse_args().resume
        if resume:  # its settings, but for those given beside it
            parser.set_defaults(**json.loads(Path(resume, "config.json").read_text()))
        run = start(Config(**vars(parser.parse_args())))
        train(run)
    except KeyboardInterrupt:
        print(f"\ngo on with: python dppo.py --resume {shlex.quote(str(run.out))}"
              if run and (run.out / "checkpoint.pt").exists() else "\nstopped before the first checkpoint")
        sys.exit(130)
    except torch.OutOfMemoryError:
        sys.exit("dppo.py: out of memory: lower --micro_batch_tokens or --rollout_batch_size")
    except Exception as error:
        if run:
            raise
        message = "{0.__class__.__name__}: {0}".format(error.__cause__ or error).removeprefix("ValueError: ")[:300]
        own = [f"(in {name}, {file}, line {line})" for file, line, name, _ in traceback.extract_tb(error.__traceback__)
               if file != __file__ and not re.search("site-packages|[Ll]ib.python3|^<", file)]  # the user's own code
        parser.error(" ".join(message.split() + own[:1]))

if __name__ == "__main__":
    main()
