"""Dynamic Pruning Policy Optimization (DPPO) in one file: GRPO with unbiased pruning.

After "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" (Zhu et al., 2026, arXiv 2603.04135).
GRPO trains on a group of completions of every prompt. Many of them teach nothing. DPPO leaves out prompts before the
rollout and completions after it. It divides what it keeps by the probability of being kept, so that the expected
gradient stays that of full GRPO. It packs what is left densely into slots.

    python dppo.py                           trains a small embedded model in a minute or two on a laptop, offline
    python dppo.py --method dppo-optimal     the same with our rule of least variance
    python dppo.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k:main:train --eval_dataset openai/gsm8k:main:test

Sections 2 to 4 are the paper; dppo_step in section 8 is its algorithm. Symbols: N candidate prompts of a step (its
window), B of them rolled out, G completions of each, M completions in an update, T their tokens, A advantage, r_q and
r_o pruning rates of prompts and completions, pi = 1 - P probability of being kept, w importance weight (1/pi or 0).

Our reading, where the paper is silent or contradicts itself:
  - The number pruned of a low set is fixed, and which ones is random (keep_probabilities).
  - Completions with A = 0 have no gradient and are left out before anything else (GRPOSkip).
  - The low set of prompts is that of all prompts with a score. A prompt without a score is kept (DPPO).
  - The window is as long as the rollout batch has room for. Only history decides that (pick_prompts).
  - The loss is divided by all N G candidates, not by what is kept (policy_loss).
  - dapo divides by tokens. Pruned prompts have none; the mean length of earlier steps stands in (dppo_step)."""

import copy
import hashlib
import json
import math
import os
import pkgutil
import random
import re
import shlex
import shutil
import sys
import time
import traceback
import warnings
from argparse import SUPPRESS
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Callable, Literal

import torch
import transformers
from datasets import disable_progress_bars, load_dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.hf_argparser import HfArg, HfArgumentParser

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICE_NAME = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # but see make_optimizer
LOGIT_CHUNK = 1024  # tokens whose logits exist at a time: 0.6 GB in float32 with Qwen's vocabulary

# ---- 1. Config

EMBEDDED = dict(steps=110, learning_rate=5e-5, max_completion_tokens=22, temperature=0.7, reward="exact")  # no --model
HUB = dict(steps=300, learning_rate=1e-6, max_completion_tokens=1024, temperature=1.0, reward="gsm8k")  # with --model
CLIPPING = dict(grpo=(0.2, 0.2), dr_grpo=(0.2, 0.2), dapo=(0.2, 0.28), gspo=(3e-4, 4e-4))  # of the ratio: down, up
AT_LEAST = dict(group_size=2, temperature=1e-3, max_grad_norm=1e-6) | dict.fromkeys(  # of other numbers, 0
    ("prompts_per_step", "inner_epochs", "max_prompt_tokens", "max_completion_tokens", "eval_samples",
     "rollout_batch_size", "micro_batch_tokens"), 1)
NOT_LEARNED = {"steps", "eval_every", "save_every", "resume", "output_dir", "rollout_batch_size",
               "micro_batch_tokens", "gradient_checkpointing"}  # may differ with --resume


@dataclass
class Config:
    """Every setting, which is the command line. Raises ValueError for what would be silently wrong."""

    method: str = HfArg(default="dppo", help="grpo, grpo-skip, dppo, dppo-optimal, or a Rule as package.module:Class")
    objective: Literal[tuple(CLIPPING)] = HfArg(default="grpo", help="advantages, normalisation, clipping")
    prompt_prune_rate: float = HfArg(default=None, help="r_q, pruned of the low prompts; 0.7, dppo-optimal: 0.9")
    completion_prune_rate: float = HfArg(default=0.7, help="r_o, pruned of the low completions")

    model: str = HfArg(default="", help="causal LM, Hub or folder; empty: the embedded one")
    dataset: str = HfArg(default="", help="path, path:split or path:config:split; Hub, folder, .jsonl, .parquet")
    prompt_column: str = HfArg(default="prompt,question,problem", help="the first found")
    answer_column: str = HfArg(default="answer,solution,reward_model.ground_truth", help="the first found")
    system_prompt: str = HfArg(default="", help="put before every prompt, in place of its own system message")
    chat_template_kwargs: str = HfArg(default="{}", help='JSON, such as {"enable_thinking": false}')
    reward: str = HfArg(default=None, help="exact, gsm8k, boxed, package.module:function; embedded: exact, else gsm8k")
    max_prompt_tokens: int = HfArg(default=512, help="longer ones are left out, and counted")

    eval_dataset: str = HfArg(default="", help="as --dataset, several by commas; empty: held out")
    eval_prompts: int = HfArg(default=256, help="of each evaluation set, at most")
    eval_samples: int = HfArg(default=4, help="k of avg@k and pass@k")
    eval_every: int = HfArg(default=0, help="steps between evaluations; 0: only before and after")

    steps: int = HfArg(default=None, help="0 only evaluates; embedded: 110, else 300")
    prompts_per_step: int = HfArg(default=32, help="B, prompts rolled out in a step, at most")
    group_size: int = HfArg(default=8, help="G, completions of each prompt")
    inner_epochs: int = HfArg(default=1, help="updates on each rollout")
    learning_rate: float = HfArg(default=None, help="after the warm-up; embedded: 5e-5, else 1e-6")
    warmup_steps: int = HfArg(default=10, help="steps of linear rise")
    max_grad_norm: float = HfArg(default=1.0, help="of the gradient, clipped")
    beta: float = HfArg(default=0.0, help="weight of the KL term")

    temperature: float = HfArg(default=None, help="also in training; embedded: 0.7, else 1")
    max_completion_tokens: int = HfArg(default=None, help="cut here; embedded: 22, else 1024")
    rollout_batch_size: int = HfArg(default=256, help="sequences in a call of generate")
    micro_batch_tokens: int = HfArg(default=4096, help="tokens in a forward pass, or one long sequence")
    gradient_checkpointing: bool = HfArg(default=False, help="less memory, a third more work")

    seed: int = HfArg(default=0, help="of the prompts' order, the rollouts and the draws")
    output_dir: str = HfArg(default="", help="the run's own folder; empty: a new one under runs/")
    save_every: int = HfArg(default=50, help="steps between checkpoints; 0: only after the last")
    resume: bool = HfArg(default=False, help="go on from the checkpoint in --output_dir, if any")

    def __post_init__(self):
        self.rule = find("method", self.method, RULES)
        defaults = (HUB if self.model else EMBEDDED) | dict(prompt_prune_rate=self.rule.prompt_prune_rate)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name, value in vars(self).items():
            least, most = AT_LEAST.get(name, 0), 0.99 if name.endswith("prune_rate") else sys.float_info.max
            if isinstance(value, (int, float)) and not least <= value <= most:  # NaN fails too
                raise ValueError(f"--{name} {value} must lie in [{least}, {most:.2g}]")
        if self.model and not self.dataset:
            raise ValueError("--model needs --dataset")
        for name in ("dataset", "eval_dataset", "system_prompt", "chat_template_kwargs"):
            if not self.model and getattr(self, name) not in ("", "{}"):
                raise ValueError(f"--{name} needs --model")
        if self.resume and not self.output_dir:
            raise ValueError("--resume needs --output_dir")
        self.output_dir = self.output_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        if self.model and Path(self.model).resolve() == Path(self.output_dir, "model").resolve():
            raise ValueError(f"--model {self.model} would be overwritten by the run; give another --output_dir")


def find(option: str, name: str, known: dict):
    """A rule or reward by its name, or a user's own as package.module:name. Raises ValueError for any other word."""
    if name not in known and ":" not in name:
        raise ValueError(f"--{option} {name}: neither one of {', '.join(known)} nor package.module:name")
    return known.get(name) or pkgutil.resolve_name(name)


# ---- 2. Pruning: which prompts and completions are kept, and what they weigh
def group_advantages(rewards: torch.Tensor, scale_by_std: bool = True) -> torch.Tensor:
    """(B, G) rewards -> (B, G) float64 advantages in each group: (r - mean)/(std + 1e-4), std over G - 1, or r - mean.
    Of the whole group: to centre them again after pruning would bias the gradient. Exactly 0 in a group of equal
    rewards, and in one with a NaN, which is not gradable."""
    rewards = rewards.double()
    scale = rewards.std(dim=1, keepdim=True) + 1e-4 if scale_by_std else 1
    no_signal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True) | rewards.isnan().any(dim=1, keepdim=True)
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / scale).masked_fill(no_signal, 0.0)


def keep_probabilities(scores: torch.Tensor, rate: float) -> torch.Tensor:
    """The paper's rule: scores of any shape -> float64 keep probabilities pi = 1 - P of that shape. Of the low set, the
    scores below the mean, floor(rate |low|) are pruned, each with the same probability. All else has pi = 1, also what
    has no score (NaN). Our reading: the paper's Algorithm 1 is reported to remove the lowest for certain. Then pi = 0
    where the gradient is not 0, but the paper's proof assumes P < 1."""
    scores = scores.double()
    low = scores < scores.nanmean() * (1 - 1e-6)  # by more than rounding: equal scores can lie below their own mean
    count = int(low.sum())
    pruned = min(math.floor(rate * count + 1e-9), max(count - 1, 0))  # 0.29 * 100 is 28.999999999999996; never all
    return torch.ones_like(scores).masked_fill(low, (count - pruned) / max(count, 1))


def optimal_probabilities(scores: torch.Tensor, rate: float, floor: float = 0.0) -> torch.Tensor:
    """As many as keep_probabilities keeps, with the least variance: pi = min(1, c score), at least `floor`. Our
    addition: pruning adds the variance sum (1/pi - 1) |g|^2 to the gradient. At a given sum(pi) it is least where pi is
    proportional to the norm |g| (Neyman allocation), which is nearly proportional to |A|."""
    keep = keep_probabilities(scores, rate).sum().round()
    scores = scores.double().nan_to_num(nan=math.inf)
    low, high = 0.0, 1e12
    for _ in range(100):  # bisection: the sum of pi grows with c
        c = (low + high) / 2
        low, high = (c, high) if (c * scores).clamp(floor, 1).sum() < keep else (low, c)
    return (high * scores).clamp(floor, 1)


def draw(pi: torch.Tensor, generator: torch.Generator, order: torch.Tensor | None = None) -> torch.Tensor:
    """(n,) keep probabilities -> (n,) float64 weights: 1/pi where kept, 0 where pruned. E[weight] = 1 where pi > 0.

    Picture the items end to end along `order`, (n,) indices, by default a random permutation. Each is pi long. A comb
    has teeth at u, u + 1, u + 2, ... for one uniform number u. The items that hold a tooth are kept (systematic
    sampling): each with its own pi, and sum(pi) of them, rounded down or up."""
    order = torch.randperm(len(pi), generator=generator) if order is None else order
    ends = pi[order].cumsum(0).round(decimals=12)  # an integer but for rounding is an integer
    teeth = (ends - torch.rand(1, generator=generator, dtype=pi.dtype)).ceil()  # how many lie before each end
    kept = order[teeth.diff(prepend=teeth.new_zeros(1)) > 0]
    weights = torch.zeros_like(pi)
    weights[kept] = 1 / pi[kept]
    return weights


class Rule:
    """What is kept, with which probability. This is textbook GRPO: all, also completions with A = 0. If unbiased, what
    is kept weighs 1/pi, divided by all candidates; else it weighs 1, divided by the number kept."""

    unbiased = True
    prompt_prune_rate = 0.7  # the default of config.prompt_prune_rate
    remembers = {}  # one number a prompt, by name, and what it is before the first visit

    def __init__(self, config: Config, prompts: int):
        self.config, self.all_kept = config, torch.ones(prompts, dtype=torch.float64)
        self.memory = {name: value * self.all_kept for name, value in self.remembers.items()}  # is in checkpoints

    def prompts(self) -> torch.Tensor:
        """(all prompts,) float64 keep probabilities, from memory alone: known before the draw."""
        return self.all_kept

    def completions(self, advantages: torch.Tensor, prompt_weights: torch.Tensor) -> torch.Tensor:
        """(B, G) advantages and (B,) weights of their prompts -> (B, G) float64 keep probabilities."""
        return torch.ones_like(advantages)

    def update(self, prompts: torch.Tensor, rewards: torch.Tensor, advantages: torch.Tensor) -> None:
        """Remembers a step: (B,) indices of the prompts rolled out, (B, G) rewards and advantages."""


class GRPOSkip(Rule):
    """GRPO without completions that have no gradient, A = 0. This costs neither bias nor variance."""

    def completions(self, advantages, prompt_weights):
        return ((advantages != 0) | (self.config.beta > 0)).double()  # a KL term has a gradient everywhere


class DPPO(GRPOSkip):
    """The paper's rule. The score of a completion is |A|, of a prompt the mean |A| of its group when last visited."""

    remembers = {"score": math.nan}

    def prompts(self):
        return keep_probabilities(self.memory["score"], self.config.prompt_prune_rate)

    def completions(self, advantages, prompt_weights):
        candidates = super().completions(advantages, prompt_weights)
        scores = advantages.abs().masked_fill(candidates == 0, math.nan)
        return candidates * keep_probabilities(scores, self.config.completion_prune_rate)

    def update(self, prompts, rewards, advantages):
        for q, group in zip(prompts.tolist(), advantages):  # the later of two visits in a window that spans two epochs
            self.memory["score"][q] = group.abs().mean()  # 0 also where a group is not gradable


class OptimalDPPO(GRPOSkip):
    """Our addition, of least variance. The score of a completion is |A| times the weight of its prompt, as its gradient
    enters; of a prompt, the root mean square |A| to expect of its next group."""

    prompt_prune_rate = 0.9
    remembers = {"visits": 0.0, "right": 0.0, "wrong": 0.0}  # right, wrong: r and 1 - r, summed over visits with decay
    floor = 0.07  # of pi, where what looks useless may have a gradient: there, weights are at most 15
    prior = 0.05  # of a prompt's success rate, a Beta prior: most are solved nearly always or nearly never
    decay = 0.8  # what a visit still counts one visit later, since the policy changes

    def prompts(self):
        """At success rate p the mean A^2 is p (1 - p), or, scaled by the std, about 1 unless all G are right or all are
        wrong: 1 - p^G - (1 - p)^G. The means over p's posterior Beta(a, b) are exact."""
        a, b = self.prior + self.memory["right"], self.prior + self.memory["wrong"]
        i = torch.arange(self.config.group_size)
        square = 1 - sum(((x[:, None] + i) / ((a + b)[:, None] + i)).prod(dim=1) for x in (a, b))
        if self.config.objective == "dr_grpo":
            square = a * b / ((a + b) * (a + b + 1))
        scores = square.sqrt().masked_fill(self.memory["visits"] == 0, math.nan)
        return optimal_probabilities(scores, self.config.prompt_prune_rate, self.floor)

    def completions(self, advantages, prompt_weights):
        candidates = super().completions(advantages, prompt_weights)
        scores = (advantages.abs() * prompt_weights[:, None]).masked_fill(candidates == 0, math.nan)
        floor = self.floor if self.config.beta > 0 else 0.0
        return candidates * optimal_probabilities(scores, self.config.completion_prune_rate, floor)

    def update(self, prompts, rewards, advantages):
        if ((rewards < 0) | (rewards > 1)).any():
            warnings.warn("dppo-optimal expects rewards within [0, 1]: less counts as 0, and more as 1")  # once
        for q, group in zip(prompts.tolist(), rewards):  # a window across two epochs may hold a prompt twice
            self.memory["visits"][q] += 1
            if not group.isnan().any():  # else it is not gradable
                right = group.clamp(0, 1).sum()
                for name, visit in (("right", right), ("wrong", len(group) - right)):
                    self.memory[name][q] = self.decay * self.memory[name][q] + visit


RULES = {"grpo": Rule, "grpo-skip": GRPOSkip, "dppo": DPPO, "dppo-optimal": OptimalDPPO}


def check_probabilities(rule: Rule, method: str, pi: torch.Tensor, may_be_zero: torch.Tensor) -> torch.Tensor:
    """What a rule's method gave, in float64. Raises ValueError where it would bias the gradient in silence."""
    may_be_zero = may_be_zero | (not rule.unbiased)
    if pi.shape != may_be_zero.shape or not torch.where(pi == 0, may_be_zero, (pi > 0) & (pi <= 1 + 1e-9)).all():
        raise ValueError(f"{type(rule).__name__}.{method}() must return {tuple(may_be_zero.shape)} probabilities, "
                         "0 < pi <= 1 (0 only where a completion has no gradient, or with unbiased = False)")
    return pi.double()


def pick_prompts(rule: Rule, order: torch.Tensor, batch_size: int, generator: torch.Generator) -> tuple:
    """Prompt-level pruning: (k,) indices of the next prompts -> window (N,), those kept (B,), their weights (B,).
    The window is the longest stretch whose pi sum to at most batch_size, so that the draw keeps about that many. N may
    depend on history and order, never on the draw: to look on until enough survive would be biased."""
    pi = check_probabilities(rule, "prompts", rule.prompts(), rule.all_kept == 0)[order]
    size = int((pi.cumsum(0) <= batch_size + 1e-9).sum())
    if not pi[:size].any():
        raise ValueError(f"{type(rule).__name__}.prompts() keeps none of the next {size} prompts")
    pi = pi[:size] / pi[:size].sum().clamp(max=1)  # where that is less than 1, one is kept all the same
    weights = draw(pi, generator)
    kept = weights.nonzero().squeeze(1)
    return order[:size], order[kept], weights[kept] if rule.unbiased else weights[kept].sign()


def weigh_completions(rule: Rule, rewards, advantages, prompt_weights, generator: torch.Generator) -> torch.Tensor:
    """Completion-level pruning: (B, G) rewards and advantages, (B,) prompt weights -> (B, G) weights of both levels."""
    no_gradient = (advantages == 0) & (rule.config.beta == 0)
    pi = check_probabilities(rule, "completions", rule.completions(advantages, prompt_weights), no_gradient)
    pi = pi * ~rewards.isnan().any(dim=1, keepdim=True)  # NaN: not gradable
    weights = draw(pi.flatten(), generator).view_as(pi)
    return prompt_weights[:, None] * weights if rule.unbiased else weights.sign()


# ---- 3. Packing: the paper's Dense Prompt Packing
def pack(lengths: list[int], capacity: int, window: int = 64) -> list[list[int]]:
    """Window-based greedy packing: lengths in tokens -> slots, lists of indices whose lengths sum to <= capacity.
    Of the next `window` sequences, the longest that fits goes into the open slot. When none fits, the next is opened.
    Every index ends up in exactly one slot. Raises ValueError if a sequence exceeds a slot."""
    if max(lengths, default=0) > capacity:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit a slot of {capacity}")
    waiting, slots, room = list(range(len(lengths))), [], 0
    while waiting:
        fitting = [i for i in waiting[:window] if lengths[i] <= room]
        if not fitting:
            slots.append([])
            room, fitting = capacity, waiting[:window]
        longest = max(fitting, key=lambda i: lengths[i])
        waiting.remove(longest)
        slots[-1].append(longest)
        room -= lengths[longest]
    return slots


def pack_micro_batches(sequences: list[tuple], indices: list[int], config: Config) -> tuple[list, float]:
    """Packs the (prompt ids, completion ids) at `indices` -> micro-batches, lists of slots; density, 1 - padding share.
    A slot has a dense attention mask, so it is only as long as the longest sequence."""
    lengths = {i: len(sequences[i][0]) + len(sequences[i][1]) for i in indices}
    capacity = max(lengths.values(), default=1)
    slots = [[indices[j] for j in slot] for slot in pack([*lengths.values()], capacity)]
    rows = max(1, config.micro_batch_tokens // capacity)
    batches = [slots[i:i + rows] for i in range(0, len(slots), rows)]
    computed = sum(len(batch) * max(sum(lengths[i] for i in slot) for slot in batch) for batch in batches)
    return batches, sum(lengths.values()) / max(1, computed)


# ---- 4. Update
def completion_logprobs(model, sequences: list[tuple], slots: list[list[int]], temperature: float) -> tuple:
    """A forward pass over packed slots -> (T,) log-probabilities and (T,) entropies of the completion tokens, in order.

    Position ids restart with each sequence, so transformers makes the mask block-diagonal: attention never crosses a
    boundary. (All padding has position 0, so each token of it is alone.) Only completion tokens get logits, chunk by
    chunk, again in the backward pass."""
    slots = [torch.tensor([(token, t, len(prompt) <= t + 1 < len(prompt) + len(completion))
                           for prompt, completion in (sequences[i] for i in slot)
                           for t, token in enumerate(prompt + completion)]) for slot in slots]
    input_ids, position_ids, predicts = pad_sequence(slots, batch_first=True).unbind(dim=2)
    predicting = predicts.flatten().nonzero().squeeze(1)
    input_ids, position_ids, predicting, targets = (x.to(model.device) for x in (
        input_ids, position_ids, predicting, input_ids.flatten()[predicting + 1]))
    for module in model.modules():  # layers are computed again only in training mode; dropout stays off
        module.training = getattr(module, "gradient_checkpointing", False)
    hidden = model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    model.eval()

    def of_chunk(hidden, targets):
        logprobs = (model.get_output_embeddings()(hidden).float() / temperature).log_softmax(dim=-1)
        entropy = torch.special.entr(logprobs.detach().exp()).sum(dim=-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy

    chunks = zip(hidden.flatten(0, 1)[predicting].split(LOGIT_CHUNK), targets.split(LOGIT_CHUNK))
    results = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*results))


@torch.no_grad()
def frozen_logprobs(model, sequences: list[tuple], indices: list[int], config: Config) -> dict[int, torch.Tensor]:
    """Log-probabilities, by index, of the completions at `indices`, under the old or the reference policy."""
    result = {}
    for slots in pack_micro_batches(sequences, indices, config)[0]:
        order = sum(slots, [])
        logprobs, _ = completion_logprobs(model, sequences, slots, config.temperature)
        result.update(zip(order, logprobs.split([len(sequences[i][1]) for i in order])))
    return result


def policy_loss(logprobs, old_logprobs, ref_logprobs, lengths, advantages, weights, divisor: float, config: Config):
    """The importance-weighted clipped surrogate of M completions with T tokens -> scalar loss, (2,) sums.

        1/divisor sum_i w_i/Z_i sum_t [-min(rho_t A_i, clip(rho_t) A_i) + beta KL_t]

    divisor is N G, all candidates (dapo: the N G m tokens to expect of them). The paper averages over what is kept, and
    rescales by C/(1 - P), C = kept/total. That is the same (Horvitz-Thompson) estimator:
        1/kept C/(1 - P) = 1/kept (kept/total)/pi = 1/total 1/pi = w/(N G).
    To divide w by the number kept would be biased.

    logprobs, old_logprobs, ref_logprobs (only with beta): (T,); lengths, advantages, weights: (M,). Z_i is the length
    |o_i| (grpo, gspo), max_completion_tokens (dr_grpo) or 1 (dapo). rho_t is p/p_old. In gspo it is the same for all
    tokens, exp(mean_t log p/p_old). KL_t is k3 = 1/x - 1 + log x, x = p/p_ref. Sums: of tokens clipped, of KL."""
    owner = torch.repeat_interleave(lengths, output_size=len(logprobs))  # (T,) the completion that a token belongs to
    log_ratio = logprobs - old_logprobs
    if config.objective == "gspo":
        log_ratio = (logprobs.new_zeros(len(lengths)).index_add(0, owner, log_ratio) / lengths)[owner]
    surrogate = log_ratio.exp() * advantages[owner]
    down, up = CLIPPING[config.objective]
    clipped = log_ratio.exp().clamp(1 - down, 1 + up) * advantages[owner]
    log_ref_ratio = ref_logprobs - logprobs if config.beta > 0 else torch.zeros_like(logprobs)
    kl = log_ref_ratio.exp() - 1 - log_ref_ratio
    normalizer = {"dr_grpo": config.max_completion_tokens, "dapo": 1}.get(config.objective, lengths)
    loss = ((config.beta * kl - torch.minimum(surrogate, clipped)) * (weights / normalizer)[owner]).sum() / divisor
    return loss, torch.stack([(clipped < surrogate).sum(), kl.sum()]).detach()


def make_optimizer(model, config: Config) -> torch.optim.AdamW:
    """AdamW on float32: updates of bfloat16 weights at a learning rate of 1e-6 would round away. A bfloat16 parameter
    has a float32 master. train_step sums its gradients there and copies the master back."""
    masters = [p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    return torch.optim.AdamW(masters, lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)


def train_step(model, optimizer, sequences: list[tuple], advantages: torch.Tensor, weights: torch.Tensor,
               divisor: float, config: Config, old: dict | None = None, ref: dict | None = None) -> dict:
    """One update on what was kept: pack, forward and backward in micro-batches, clip, step -> metrics.

    sequences: pairs (prompt ids, completion ids); advantages, weights: one of each, weight 0 is skipped; divisor: see
    policy_loss; old, ref: frozen_logprobs. Without `old` the policy is the one that sampled: the ratio is 1, its
    gradient is not 0. An update that is not finite is left out: `skipped` is 1."""
    kept = weights.nonzero().squeeze(1).tolist()
    kept = kept if advantages[kept].any() or config.beta else []  # a step would move on Adam's momentum alone
    micro_batches, density = pack_micro_batches(sequences, kept, config)
    masters, sums = optimizer.param_groups[0]["params"], torch.zeros(3, device=model.device)
    copies = [(p, master) for p, master in zip(model.parameters(), masters) if p is not master]
    for slots in micro_batches:
        order = sum(slots, [])
        logprobs, entropy = completion_logprobs(model, sequences, slots, config.temperature)
        of_tokens = logprobs, *(torch.cat([p[i] for i in order]) if p else logprobs.detach() for p in (old, ref))
        lengths = torch.tensor([len(sequences[i][1]) for i in order])
        of_completions = (x.to(model.device) for x in (lengths, advantages[order].float(), weights[order].float()))
        loss, metrics = policy_loss(*of_tokens, *of_completions, divisor, config)
        loss.backward()
        for p, master in copies:
            if p.grad is not None:
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                p.grad = None
        sums += torch.stack([entropy.sum(), *metrics])
    grad_norm = torch.nn.utils.clip_grad_norm_(masters, config.max_grad_norm)
    tokens = sum(len(sequences[i][1]) for i in kept)
    values = torch.stack([*(sums / max(1, tokens)), grad_norm.to(sums)]).tolist()
    finite = math.isfinite(sum(values))
    if finite:
        optimizer.step()
        for p, master in copies:
            p.data.copy_(master)
    optimizer.zero_grad()
    means = dict(zip(("entropy", "clip_fraction", "kl", "grad_norm"), values if finite else [None] * 4))
    return means | dict(completions_trained=len(kept), tokens_trained=tokens, slot_density=density,
                        skipped=int(not finite))


# ---- 5. Rollout
def rollout(task: "Task", examples: list[dict], samples: int, config: Config, bar: str = "") -> list[list[list[int]]]:
    """`samples` completions of each example, in token ids: completions[q][i] ends with its first end id, or is cut.
    With the name of a progress `bar`, one is shown."""
    completions, size = [], max(1, config.rollout_batch_size // samples)
    for start in tqdm(range(0, len(examples), size), bar, leave=False, disable=not bar):
        completions += generate(task, [e["prompt_ids"] for e in examples[start:start + size]], samples, config)[0]
    return [completions[i:i + samples] for i in range(0, len(completions), samples)]


@torch.no_grad()
def generate(task: "Task", prompts: list[list[int]], samples: int, config: Config, scores: bool = False) -> tuple:
    """The model's own sampling -> `samples` completions of each prompt, in token ids, a prompt's side by side; with
    `scores` also the log-probabilities of their tokens. A prompt is read once for all its samples. model.generate goes
    on until its last row has ended, so it is called in eight parts, and rows that have ended leave in between. Qwen's
    own generation_config has top_k, top_p and a repetition penalty: another policy than the one trained. So the model
    has a clean one meanwhile."""
    model, ends = task.model, task.end_ids()
    own = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=config.temperature, top_k=0, top_p=1.0, eos_token_id=ends or None,
        pad_token_id=task.tokenizer.pad_token_id, return_dict_in_generate=True, output_scores=scores)
    inputs = task.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(model.device)
    cache = transformers.DynamicCache(config=model.config)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    if inputs["input_ids"].shape[1] > 1:  # all but the last token: model.generate starts by reading that one
        model.get_decoder()(**{k: x[:, :-1] for k, x in inputs.items()}, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(samples)
    ids, mask = (inputs[k].repeat_interleave(samples, dim=0) for k in ("input_ids", "attention_mask"))
    tokens = torch.full((len(ids), config.max_completion_tokens), -1, device=ids.device)
    rows, stop, logprobs = torch.arange(len(ids), device=ids.device), ids.new_tensor(ends), tokens.float()
    for part in torch.arange(config.max_completion_tokens).chunk(8):
        if len(rows) == 0:
            break
        output = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=len(part))
        ids, new = output.sequences, slice(part[0], part[0] + output.sequences.shape[1] - mask.shape[1])
        tokens[rows, new] = ids[:, mask.shape[1]:]
        if scores:
            logprobs[rows, new] = model.compute_transition_scores(ids, output.scores, normalize_logits=True)
        live = ~torch.isin(tokens[rows], stop).any(dim=1)
        cache.batch_select_indices(live)
        mask = torch.nn.functional.pad(mask[live], (0, ids.shape[1] - mask.shape[1]), value=1)
        rows, ids = rows[live], ids[live]
    model.generation_config = own
    ended = torch.isin(tokens, stop)
    lengths = torch.where(ended.any(dim=1), ended.int().argmax(dim=1) + 1, tokens.shape[1]).tolist()
    return tuple([row[:length] for row, length in zip(part.tolist(), lengths)] for part in (tokens, logprobs))


@torch.no_grad()
def check_sampling(task: "Task", config: Config) -> None:
    """Raises ValueError where the policy trained is not the one that samples. Their ratio is 1 by construction, so
    nothing else would notice. The logits must be those of the model's own head, to the last bit but for rounding: some
    models scale or cap them. The log-probabilities of a few sampled tokens must be those of completion_logprobs, packed
    in one slot and in two; on average, since bfloat16 is coarse."""
    transformers.set_seed(config.seed)
    model, prompts, samples = task.model, [e["prompt_ids"] for e in task.train[:2]], 4
    short = replace(config, max_completion_tokens=min(16, config.max_completion_tokens))
    try:
        ids = torch.tensor(prompts[:1], device=model.device)
        logits, hidden = model(ids).logits, model.get_decoder()(ids).last_hidden_state
        difference = (model.get_output_embeddings()(hidden) - logits).abs().max() / logits.abs().max()
        if not difference <= 1e-3:  # NaN fails too
            raise ValueError(f"it scales or caps its logits, by up to {difference:.1%}")
        completions, logprobs = generate(task, prompts, samples, short, scores=True)
        sequences = [(prompts[i // samples], ids) for i, ids in enumerate(completions)]
        indices = range(len(sequences))
        for slots in ([[*indices]], [[*indices[::2]], [*indices[1::2]]]):
            trained, _ = completion_logprobs(model, sequences, slots, config.temperature)
            sampled = torch.tensor(sum((logprobs[i] for slot in slots for i in slot), []), device=model.device)
            difference = (trained - sampled).abs().mean().item()
            if not difference <= (1e-3 if model.dtype == torch.float32 else 0.2):
                raise ValueError(f"log-probabilities in rollout and packed training differ by {difference:.2g}")
    except Exception as error:  # also inside models without the cache or the layers that this needs
        raise ValueError(f"{type(model).__name__} cannot be trained here: {error}") from None


# ---- 6. Rewards: f(prompts, completions, **columns) -> list[float | None]; None: not gradable
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\$-?)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")


NUMBER_AND_TAIL = re.compile(rf"({NUMBER.pattern})((?:[eE][-+]?|[A-Za-z]+)[0-9]\w*)?")


def gsm8k_number(text: str) -> Decimal | None:
    """The first number after the last ####, else the last number of the text, else None. 1e9 is not the number 1."""
    text = text.replace("\N{MINUS SIGN}", "-")
    numbers = [match for match in NUMBER_AND_TAIL.finditer(text) if not match[2]]
    mark = text.rfind("####") if "####" in text else len(text)
    chosen = [match for match in numbers if match.start() > mark][:1] or numbers[-1:]
    return Decimal(re.sub(r"[$,]", "", chosen[0][1])) if chosen else None


def last_boxed(text: str) -> str | None:
    """The inside of the last \\boxed{...}, nested braces included; None if there is none or it is never closed."""
    start = max((match.end() for match in re.finditer(r"\\boxed\s*\{", text)), default=len(text))
    depth = 1
    for token in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(token[0], 0)  # \{ and \} are characters, not braces
        if depth == 0:
            return text[start:start + token.start()]


def normalise_latex(text: str) -> Decimal | str:
    """A number, or one spelling of what differs in spacing, bracket sizes, kinds of fraction or a final dot."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").rstrip(". ")
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(\\\\)|\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|\\?[$%]|\^\{?\\circ\}?|[\s~°]", r"\1", text)
    text = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", re.sub(r"\\[dt]frac", r"\\frac", text))
    text = re.sub(r"^(-?)([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}", re.sub(r"\^\{(\w)\}", r"^\1", text))
    return gsm8k_number(text) if NUMBER.fullmatch(text) else text


def reward_of(read: Callable, gold: Callable) -> Callable:
    """A reward function: 1 where read(text of the completion) is gold(answer), None where that is None or empty."""
    def reward(prompts, completions, answer, **columns) -> list[float | None]:
        texts = (c if isinstance(c, str) else c[-1]["content"] for c in completions)  # chat: one assistant message
        golds = (None if a is None else gold(str(a)) for a in answer)
        return [None if g in (None, "") else float(read(text) == g) for text, g in zip(texts, golds)]
    return reward


exact_reward = reward_of(str.strip, str.strip)
gsm8k_reward = reward_of(gsm8k_number, lambda answer: (  # an answer is a number, or marks one with ####
    gsm8k_number(answer) if "####" in answer or NUMBER.fullmatch(answer.strip(" .%")) else None))
boxed_reward = reward_of(lambda text: normalise_latex(last_boxed(text) or ""),
                         lambda answer: normalise_latex(last_boxed(answer) or answer))
REWARDS = {"exact": exact_reward, "gsm8k": gsm8k_reward, "boxed": boxed_reward}


# ---- 7. Task: data, reward, model
@dataclass
class Task:
    """What a run works on. An example has prompt (text or chat messages), prompt_ids and the dataset's columns."""

    train: list[dict]
    evals: dict[str, list[dict]]
    tokenizer: transformers.PreTrainedTokenizerBase
    reward: Callable
    model: transformers.PreTrainedModel = None

    def end_ids(self) -> list[int]:
        """Every id that ends a completion: Qwen has two, and pads with one of them."""
        ids = self.model.generation_config.eos_token_id
        return sorted({*(ids if isinstance(ids, list) else [ids]), self.tokenizer.eos_token_id} - {None})


def load_task(config: Config) -> Task:
    """The user's data and model, or the embedded ones. Faulty data shows before a model is loaded."""
    if config.model:
        if not (Path(config.model).is_dir() or re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", config.model)):
            raise ValueError(f"--model {config.model}: no such folder, and not a name on the Hub")
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            config.model, padding_side="left", trust_remote_code=False)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        train, specs = load_examples(config.dataset, "train", config, tokenizer), config.eval_dataset.split(",")
        evals = {spec: load_examples(spec, "test", config, tokenizer)[:config.eval_prompts] for spec in specs if spec}
        if not evals and (held_out := min(config.eval_prompts, len(train) // 5)):
            evals, train = {"held out": train[:held_out]}, train[held_out:]
    else:
        train, evals, tokenizer = sorting_data(config)
    evals = {name: examples for name, examples in evals.items() if examples}
    task = Task(train, evals, tokenizer, find("reward", config.reward, REWARDS))
    for name, examples in {"the training data": train, **evals}.items():
        trial = examples[:100]  # with empty completions
        if score_completions(task, trial, [[[]] for _ in trial]).isnan().all():
            raise ValueError(f"--reward {config.reward} can grade none of the first {len(trial)} answers of {name}")
    task.model = model = transformers.AutoModelForCausalLM.from_pretrained(
        config.model or warm_started(tokenizer), dtype=DTYPE, attn_implementation="sdpa",
        trust_remote_code=False).to(DEVICE).eval()
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    longest = max(len(e["prompt_ids"]) for e in sum(evals.values(), train)) + config.max_completion_tokens
    if longest > (limit := getattr(model.config.get_text_config(), "max_position_embeddings", longest)):
        raise ValueError(f"prompt and completion may take {longest} tokens, but the model has {limit} positions")
    check_sampling(task, config)
    print(f"{type(model).__name__}, {model.num_parameters() / 1e6:,.2f} M weights, {str(DTYPE)[6:]} on {DEVICE_NAME}")
    return task


def score_completions(task: Task, examples: list[dict], completions: list[list[list[int]]]) -> torch.Tensor:
    """(B, G) float64 rewards of G completions (token ids) of B examples; NaN: not gradable."""
    rows = [(e, task.tokenizer.decode(ids, skip_special_tokens=True))
            for e, group in zip(examples, completions) for ids in group]
    texts = [text if isinstance(e["prompt"], str) else [{"role": "assistant", "content": text}] for e, text in rows]
    columns = {key: [e[key] for e, _ in rows] for key in examples[0].keys() - {"prompt", "prompt_ids", "completions"}}
    values = task.reward(prompts=[e["prompt"] for e, _ in rows], completions=texts, **columns)
    rewards = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
    if rewards.shape != (len(rows),) or rewards.isinf().any():
        raise ValueError(f"the reward function must return {len(rows)} finite numbers or None, one for each completion")
    return rewards.view(len(examples), -1)


def load_examples(spec: str, split: str, config: Config, tokenizer) -> list[dict]:
    """Examples of path, path:split or path:config:split, shuffled. Prompts too long are left out and counted."""
    path, *name = re.split(r":(?![^\[]*\])", spec)  # a colon within [] is of a slice
    split = name.pop() if name else split
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    if kind and Path(path).is_file() and Path(path).stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    files = {split.partition("[")[0]: path} if kind else None
    rows = load_dataset(kind or path, *name, data_files=files, split=split)
    flat, examples = rows.flatten(), []  # verl nests the answer
    prompts, answers = (next((flat[name] for name in names.split(",") if name in flat.column_names), None)
                        for names in (config.prompt_column, config.answer_column))
    if prompts is None or answers is None and config.reward in REWARDS:  # a reward of one's own may need no answer
        option = "answer" if prompts is not None else "prompt"
        raise ValueError(f"{spec} has the columns {', '.join(flat.column_names)}; name one by --{option}_column")
    template, system = json.loads(config.chat_template_kwargs), config.system_prompt
    for row, prompt, answer in zip(rows, prompts, answers or [None] * len(rows)):
        if not prompt:
            continue
        if tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if system:
                prompt = [{"role": "system", "content": system}, *(m for m in prompt if m["role"] != "system")]
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template)
        else:
            prompt = system + "\n\n" + prompt if system else prompt
            ids = tokenizer(prompt)["input_ids"]
            ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
        if 0 < len(ids) <= config.max_prompt_tokens:  # rewards written for TRL expect the answer under either name
            examples.append({**row, "prompt": prompt, "prompt_ids": ids, "answer": answer, "solution": answer})
    if not examples:
        raise ValueError(f"{spec} has no prompts of at most --max_prompt_tokens {config.max_prompt_tokens}")
    print(f"{spec}: left out {len(rows) - len(examples)} of {len(rows)} prompts, empty or over --max_prompt_tokens")
    random.Random(config.seed).shuffle(examples)
    return examples


# The embedded task: sort digits. Of each class: training prompts, fewest and most digits. Before training, easy prompts
# are nearly always solved and hard ones never, as in real datasets; that is what pruning is for.
SORTING = {"easy": (461, 2, 3), "middle": (154, 9, 12), "hard": (409, 17, 20)}


def sorting_example(name: str, rng: random.Random, tokenizer) -> dict:
    """A prompt of one class of the embedded task, such as "4021=", and its answer, "0124"."""
    digits = rng.choices("0123456789", k=rng.randint(*SORTING[name][1:]))
    prompt = "".join(digits) + "="
    return {"prompt": prompt, "prompt_ids": tokenizer.encode(prompt, add_special_tokens=False),
            "answer": "".join(sorted(digits))}


def sorting_data(config: Config) -> tuple:
    """1,024 training examples, an evaluation set for each class, and a tokenizer: a token is a character."""
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0, padding_side="left")
    rng, train, evals, held_out = random.Random(config.seed), [], {}, config.eval_prompts // len(SORTING)
    for name, (size, *_) in SORTING.items():
        examples = [sorting_example(name, rng, tokenizer) for _ in range(size + 10 * held_out)]
        train += examples[:size]
        evals[name] = [e for e in examples[size:] if e not in train][:held_out]
    rng.shuffle(train)
    return train, evals, tokenizer


def warm_started(tokenizer) -> Path:
    """The folder, in the user's cache, of a model taught by noisy demonstrations. The first run makes it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dppo", "sorter-1")  # 1: this recipe
    if folder.exists():
        return folder
    transformers.set_seed(0)
    rng, steps, size, config = random.Random(0), 400, 64, Config(learning_rate=2e-3, temperature=1.0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, hidden_size=128, intermediate_size=256, head_dim=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True))
    optimizer, ones = make_optimizer(model, config), torch.ones(size)
    for step in tqdm(range(steps), desc="warm start, the first time only"):
        sequences = []
        for name in rng.choices(["easy", "middle"], k=size):  # every fifth digit of the middle class is random
            example, noise = sorting_example(name, rng, tokenizer), 0.2 * (name == "middle")
            answer = [rng.choice("0123456789") if rng.random() < noise else digit for digit in example["answer"]]
            sequences.append((example["prompt_ids"], tokenizer.encode("".join(answer))))  # with the end id
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - step / steps)
        train_step(model, optimizer, sequences, ones, ones, size, config)  # supervised: advantage 1 on others' answers
    model.save_pretrained(partial := folder.with_suffix(f".{os.getpid()}"))
    try:
        partial.rename(folder)  # never half a model under this name
    except OSError:  # another run was first, with the same model
        shutil.rmtree(partial)
    return folder


# ---- 8. Training
def evaluate(task: Task, config: Config) -> dict:
    """avg@k and pass@k of each evaluation set, and `accuracy`, the mean reward over the prompts of all of them."""
    transformers.set_seed(config.seed)  # the same every time; training seeds every step anew
    k, rewards, mean = config.eval_samples, {}, lambda values: values.mean().item() if len(values) else None
    for name, examples in task.evals.items():
        rewards[name] = score_completions(task, examples, rollout(task, examples, k, config, f"evaluating {name}"))
    rewards = {name: r[~r.isnan().any(dim=1)] for name, r in rewards.items()}  # NaN: not gradable
    sets = {name: {"prompts": len(r), f"avg@{k}": mean(r), f"pass@{k}": mean(r.amax(dim=1))}
            for name, r in rewards.items()}
    return {"accuracy": mean(torch.cat([*rewards.values()])) if sets else None, **sets}


def rollout_metrics(rewards, completions, prompt_weights, weights, ends: list[int]) -> dict:
    """Means of reward and length are weighted as the prompts are: they speak of the whole window."""
    graded = ~rewards.isnan().any(dim=1)
    r, w = rewards[graded], prompt_weights[graded]
    lengths = torch.tensor([[len(ids) for ids in group] for group in completions], dtype=torch.float64)
    cut = torch.tensor([[float(ids[-1] not in ends) for ids in group] for group in completions])
    metrics = dict(
        reward=w @ r.mean(dim=1) / w.sum(), zero_variance_fraction=(r == r[:, :1]).all(dim=1).double().mean(),
        completion_length=prompt_weights @ lengths.mean(dim=1) / prompt_weights.sum(),
        ungradable_prompts=(~graded).sum(), truncated_fraction=cut.mean(), weight_max=weights.max(),
        effective_sample_size=weights.sum() ** 2 / (weights ** 2).sum())
    return {name: value.nan_to_num().item() for name, value in metrics.items()}  # 0/0: none


def dppo_step(task: Task, rule: Rule, optimizer, reference, state: dict, config: Config) -> tuple[dict, dict]:
    """One step of the paper's algorithm -> its metrics, and a group as a sample. `state` counts on. What is random is a
    function of (seed, step), so a checkpoint needs no random state."""
    clock, model, B, G, n = time.perf_counter(), task.model, config.prompts_per_step, config.group_size, len(task.train)
    step = state["step"] = state["step"] + 1
    transformers.set_seed((1_000_003 * config.seed + step) % 2 ** 32)

    # 1. Prune prompts by what is remembered of them. Each epoch has an order of its own.
    epoch, done = divmod(state["seen"], n)
    order = sum((random.Random(f"{config.seed} {e}").sample(range(n), n) for e in (epoch, epoch + 1)), [])
    window, prompts, prompt_weights = pick_prompts(rule, torch.tensor(order[done:done + n]), B, torch.default_generator)

    # 2. Roll out those that are kept, reward the completions, and compare them within each whole group.
    examples = [task.train[q] for q in prompts]
    completions = rollout(task, examples, G, config)
    rewards = score_completions(task, examples, completions)
    advantages = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")
    rule.update(prompts, rewards, advantages)
    rollout_seconds = time.perf_counter() - clock

    # 3. Prune completions: a draw for each update on the rollout, since after the first, theta depends on it.
    draws = [weigh_completions(rule, rewards, advantages, prompt_weights, torch.default_generator)
             for _ in range(config.inner_epochs)]
    metrics = rollout_metrics(rewards, completions, prompt_weights, draws[-1], task.end_ids())

    # 4. Pack what is left, and update. The old policy is the one before the first update.
    sequences = [(e["prompt_ids"], ids) for e, group in zip(examples, completions) for ids in group]
    union = sum(draws).flatten().nonzero().squeeze(1).tolist()  # trained in any of the updates
    old = frozen_logprobs(model, sequences, union, config) if config.inner_epochs > 1 else None  # else ratio = 1
    ref = frozen_logprobs(reference, sequences, union, config) if config.beta > 0 else None
    # dapo's tokens are N G times the mean length of earlier steps; of its own in the first, where no prompt is pruned.
    mean_length = state["mean_length"] or metrics["completion_length"]
    state["mean_length"] = 0.9 * mean_length + 0.1 * metrics["completion_length"]
    optimizer.param_groups[0]["lr"] = config.learning_rate * min(1, step / max(1, config.warmup_steps))
    for w in draws:
        divisor = len(window) * G if rule.unbiased else max(1, int((w > 0).sum()))
        divisor *= mean_length if config.objective == "dapo" else 1
        update = train_step(model, optimizer, sequences, advantages.flatten(), w.flatten(), divisor, config, old, ref)
        state["failures"] = state["failures"] + 1 if update["skipped"] else 0

    seconds = time.perf_counter() - clock
    state |= dict(seen=state["seen"] + len(window), seconds=state["seconds"] + seconds)
    tokens = sum(len(sequences[i][0] + sequences[i][1]) for w in draws for i in w.flatten().nonzero())
    record = dict(
        step=step, epoch=1 + (state["seen"] - 1) // n, prompts_seen=len(window), prompts_rolled=len(prompts), **update,
        **metrics, rollout_seconds=rollout_seconds, train_seconds=seconds - rollout_seconds, seconds=state["seconds"],
        tokens_per_second=tokens / (seconds - rollout_seconds), peak_memory_gb=torch.cuda.max_memory_allocated() / 1e9)
    return record, dict(
        step=step, prompt=examples[0]["prompt"], completions=task.tokenizer.batch_decode(completions[0]),
        rewards=[None if math.isnan(reward) else reward for reward in rewards[0].tolist()],
        advantages=advantages[0].tolist(), weights=draws[-1][0].tolist())


def train(config: Config, task: Task | None = None, state: dict | None = None) -> dict:
    """A whole run, or the rest of one -> its summary. `state`, if given, is filled when the first step can begin."""
    started, out, state = time.perf_counter(), Path(config.output_dir), {} if state is None else state
    out.mkdir(parents=True, exist_ok=True)  # first, so that a folder that cannot be written shows before any work
    files, resume = [(out / f"{name}.jsonl").open("a") for name in ("metrics", "samples")], config.resume
    resume = resume and (out / "checkpoint.pt").exists()
    if not resume and files[0].tell():
        raise ValueError(f"--output_dir {out} holds a run " + ("without a checkpoint" if config.resume else "already"))
    task = task or load_task(config)
    rule, optimizer = config.rule(config, len(task.train)), make_optimizer(task.model, config)
    reference, masters = copy.deepcopy(task.model) if config.beta > 0 else None, optimizer.param_groups[0]["params"]
    learned = {name: value for name, value in asdict(config).items() if name not in NOT_LEARNED}
    data = repr([(e["prompt_ids"], e.get("answer")) for e in task.train])
    learned["training data"] = hashlib.sha256(data.encode()).hexdigest()
    if resume:
        saved = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)  # nothing in it is executed
        for name, value in learned.items():
            if value != (was := saved["learned"].get(name)):
                raise ValueError(f"--resume: {name} is {value!r}, but was {was!r} in {out}")
        for file, size in zip(files, saved["state"]["sizes"]):
            if file.tell() < size:
                raise ValueError(f"--resume: {file.name} is shorter than it was at the checkpoint")
        rule.memory = saved["memory"]
        optimizer.load_state_dict(saved["optimizer"])
        for p, master, weight in zip(task.model.parameters(), masters, saved["weights"]):
            p.data.copy_(weight)
            master.data.copy_(weight)
        state |= saved["state"]
    else:
        before = evaluate(task, config)
        state |= dict(step=0, seen=0, mean_length=None, seconds=0.0, failures=0, sizes=[0, 0], before=before)

    after = None if config.steps else state["before"]
    for file, size in zip(files, state["sizes"]):
        file.truncate(size)  # what came after the checkpoint comes again
    for step in (bar := tqdm(range(state["step"] + 1, config.steps + 1), initial=state["step"], total=config.steps)):
        record, sample = dppo_step(task, rule, optimizer, reference, state, config)
        after = evaluate(task, config) if config.eval_every and step % config.eval_every == 0 else None
        if after:
            record |= {"evaluation": after, "accuracy": after["accuracy"]}
        for file, line in zip(files, (record, sample)):
            print(json.dumps(line), file=file, flush=True)
        bar.set_postfix({name: record[name] for name in ("reward", "prompts_seen", "prompts_rolled", "slot_density")})
        if state["failures"] >= 10:
            raise FloatingPointError("10 updates in a row were not finite; a smaller --learning_rate may help")
        if step == config.steps or config.save_every and step % config.save_every == 0:
            state["sizes"] = [file.tell() for file in files]
            with (out / "partial.pt").open("wb") as file:
                torch.save(dict(state=state, learned=learned, memory=rule.memory, optimizer=optimizer.state_dict(),
                                weights=masters), file)
                os.fsync(file.fileno())
            (out / "partial.pt").replace(out / "checkpoint.pt")  # if killed, the last one is whole
    before, after = state["before"], after or evaluate(task, config)
    summary = dict(accuracy_before=before["accuracy"], accuracy_after=after["accuracy"], before=before, after=after,
                   wall_seconds=time.perf_counter() - started, device=DEVICE_NAME, config=asdict(config))
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    for part in (task.model, task.tokenizer):
        part.save_pretrained(out / "model")
    arrow = lambda *pair: " -> ".join("not graded" if x is None else f"{x:.2f}" for x in pair)
    sets = ", ".join(f"{name} {arrow(*(x[name][f'avg@{config.eval_samples}'] for x in (before, after)))}"
                     for name in task.evals)
    print(f"accuracy {arrow(before['accuracy'], after['accuracy'])} ({sets})" if sets else "not evaluated",
          f"in {summary['wall_seconds']:.0f} s; results are in {out}")
    return summary


def main() -> None:
    """The command line. What is wrong before the first step is told in one line."""
    parser, state = HfArgumentParser(Config, description=__doc__.partition("\n")[0], usage=SUPPRESS), {}
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
    sys.path.append(os.getcwd())  # for package.module:name
    try:
        config = Config(**vars(parser.parse_args()))
        train(config, state=state)
    except KeyboardInterrupt:
        saved = Path(config.output_dir, "checkpoint.pt")
        command = shlex.join(["python", *sys.argv, "--resume", "--output_dir", config.output_dir])
        parser.exit(130, f"\n{saved} is saved; go on with: {command}\n" if saved.exists() else "\nnothing is saved\n")
    except torch.OutOfMemoryError:
        parser.exit(2, "out of memory: try a smaller --micro_batch_tokens or --rollout_batch_size\n")
    except Exception as error:
        if state:
            raise
        message = "{0.__class__.__name__}: {0}".format(error.__cause__ or error).removeprefix("ValueError: ")[:300]
        libraries = __file__, sys.prefix + os.sep, sys.base_prefix + os.sep, os.path.expanduser("~/.local/lib"), "<"
        own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
        for frame in own[:1]:  # the line of the user's own reward or rule
            message += (f" (in {frame.name}, {frame.filename}, line {frame.lineno}; a reward gets the completions of a "
                        "chat model as lists of messages)")
        parser.exit(2, f"dppo.py: error: {' '.join(message.split())}\n")


if __name__ == "__main__":
    main()
