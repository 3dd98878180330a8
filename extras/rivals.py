"""Other methods as forks of dppo.Rule, to compare with.

    python dppo.py --method extras.rivals:CPPO     # or GRESO, Literal, Uniform, Unweighted

Uniform draws without scores, Unweighted leaves out the weights of the paper's rule, and Literal is
its Algorithm 1 as it is reported. CPPO and GRESO are the methods of other papers. All but Uniform
are biased on purpose. What CPPO, GRESO and Unweighted train weighs the same, and the loss is its
mean.

Literal removes the lowest floor(r k) of the k scores below the mean for certain, where DPPO draws
as many, and gives what it keeps the weights C/(1 - P) of DPPO. (This is second-hand, from a reader
of the full text. Of equal scores, which are most, the first are removed.) A prompt that is removed
keeps its score, and so does not come back unless the mean falls.

CPPO (arXiv 2503.22342) keeps the k completions of each group with the largest |A|, as the paper's
tables count them. (Its code ranks the completions of a whole batch.) The paper also fills the room
that this leaves with more prompts, which here is left to --prompts_per_step. Completions with A = 0
are not trained, since they have no gradient.

GRESO (arXiv 2506.02177) rolls out a prompt the less, the longer it was always right or never right,
and refills its batch until enough groups teach. The paper's own code tosses a coin for each prompt,
and moves p from the second epoch on. Here the draw is dppo.draw's, whose number does not scatter,
and p moves from the first step on.

The refill needs another step than dppo's, and so does Literal, whose kept prompts have weights that
no draw gives them. A rule cannot bring a step with it, so importing this module puts `step_of_rule`
in the place of dppo.dppo_step. It makes their own steps for these two, and dppo's for all others.
"""

import math
from itertools import chain
from unittest import mock

import torch

import dppo
from dppo import DPPO, Rule, dppo_step, group_advantages, prune_prompts, rollout


class Uniform(DPPO):
    """Keeps as many completions with a gradient as DPPO, all with the same pi, and every prompt.
    It is what scores have to beat."""

    def prompt_probabilities(self):
        return torch.ones(self.prompt_count, dtype=torch.float64)

    def completion_probabilities(self, advantages, prompt_weights):
        pi = super().completion_probabilities(advantages, prompt_weights)
        needed = pi > 0
        return needed * pi.sum() / needed.sum().clamp(min=1)


class Unweighted(DPPO):
    """Prunes as DPPO does, but all that it keeps weighs the same."""

    unbiased = False


def without_the_lowest(scores, rate):
    """Scores -> weights: those of dppo.keep_probabilities, but 0 for the lowest floor(rate k)."""
    pi = dppo.keep_probabilities(scores, rate)
    pruned = round((1 - pi).sum().item())
    lowest = scores.nan_to_num(math.inf).flatten().argsort(stable=True)[:pruned]
    return (1 / pi).flatten().index_fill(0, lowest, 0.0).view_as(pi)


class Literal(DPPO):
    """Algorithm 1 as it is reported: removes the lowest, and weighs the rest as if by chance."""

    unbiased = False

    def prompt_probabilities(self):
        scores = self.memory["score"]
        self.of_prompts = without_the_lowest(scores, self.config.prompt_prune_rate)  # for its step
        return (self.of_prompts > 0).double()

    def completion_probabilities(self, advantages, prompt_weights):
        needed = dppo.has_gradient(advantages, self.config.beta)
        scores = torch.where(needed, advantages.abs(), math.nan)
        weights = without_the_lowest(scores, self.config.completion_prune_rate)
        self.of_completions = needed * weights
        return (self.of_completions > 0).double()

    def weights(self, w_q, w_qi, N):
        return w_q[:, None] * self.of_completions


class CPPO(Rule):
    """Trains the k = floor((1 - r_o) G) completions of each group with the largest |A|, at least
    one of them."""

    unbiased = False

    def completion_probabilities(self, advantages, prompt_weights):
        G = advantages.shape[1]
        k = math.floor((1 - self.config.completion_prune_rate) * G + 1e-9)
        largest = advantages.abs().topk(max(1, k), dim=1).indices
        kept = torch.zeros_like(advantages).scatter(1, largest, 1.0)
        return kept * (advantages != 0)


class GRESO(Rule):
    """Rolls out a prompt with probability p^z if its last z visits were all right, or all wrong.
    Trains the first prompts_per_step groups that teach."""

    unbiased = False
    # streak: visits in a row that were all right or, below 0, all wrong; p: one for all prompts
    remembers = {"streak": 0.0, "p_easy": 0.5, "p_hard": 0.5}

    def prompt_probabilities(self):
        streak = self.memory["streak"]
        p = torch.where(streak > 0, self.memory["p_easy"], self.memory["p_hard"])
        return (p ** streak.abs()).clamp(min=0.01)

    def completion_probabilities(self, advantages, prompt_weights):
        teaches = advantages.any(dim=1)
        trained = teaches & (teaches.cumsum(0) <= self.config.prompts_per_step)
        return trained[:, None].double().expand_as(advantages)

    def remember(self, prompts, rewards, advantages):
        teaches = advantages.any(dim=1)
        mean = rewards.nanmean(dim=1)  # NaN for a group without rewards
        kind = (mean > 0).double() - (mean <= 0).double()
        kind = kind * ~teaches  # 0 if the group teaches
        streak = self.memory["streak"][prompts]
        goes_on = streak * kind > 0
        self.memory["streak"][prompts] = kind + streak * goes_on
        # Either kind has a share of the rollout to aim at, a quarter in all.
        for name, sign, target in (("p_easy", 1, 1 / 12), ("p_hard", -1, 1 / 6)):
            is_below = (kind == sign).double().mean() < target
            self.memory[name] += 0.01 if is_below else -0.01
            self.memory[name].clamp_(0.05, 0.95)


def refilled_step(task, rule, optimizer, upcoming, generator):
    """dppo_step, but it rolls out until prompts_per_step groups teach, or no prompt is left."""
    config = rule.config
    limit = config.prompts_per_step
    rounds = []
    N = 0
    size = limit
    teaches = torch.zeros(0)  # of each group rolled out so far
    while size > 0 and len(upcoming) > N:
        looked_at, prompts, _ = prune_prompts(rule, upcoming[N:], size, generator)
        examples = [task.train[q] for q in prompts.tolist()]
        sequences, rewards, seconds = rollout(task, examples, config.group_size, config)
        rounds.append((prompts, sequences, rewards, seconds))
        N += looked_at
        # Next as many as should fill the batch, and a quarter more.
        teaches = torch.cat([teaches, group_advantages(rewards).any(dim=1)])
        missing = limit - teaches.sum().item()
        size = min(limit, math.ceil(1.25 * missing / max(teaches.mean().item(), 0.01)))

    # The rest is dppo_step, which finds what was looked at and rolled out already.
    prompts, sequences, rewards, seconds = zip(*rounds)
    window = N, torch.cat(prompts), torch.ones(len(teaches)).double()
    outcome = [*chain(*sequences)], torch.cat(rewards), sum(seconds)
    with (
        mock.patch.object(dppo, "prune_prompts", return_value=window),
        mock.patch.object(dppo, "rollout", return_value=outcome),
    ):
        return dppo_step(task, rule, optimizer, upcoming, generator)


def literal_step(task, rule, *state):
    """dppo_step, but the prompts that are kept for certain have the weights of Literal."""

    def prune(rule, *inputs):
        N, prompts, _ = prune_prompts(rule, *inputs)
        return N, prompts, rule.of_prompts[prompts]

    with mock.patch.object(dppo, "prune_prompts", prune):
        return dppo_step(task, rule, *state)


def step_of_rule(task, rule, *state):
    """The step of GRESO, of Literal or, for any other rule, dppo's."""
    for kind, step in ((GRESO, refilled_step), (Literal, literal_step)):
        if isinstance(rule, kind):
            return step(task, rule, *state)
    return dppo_step(task, rule, *state)


dppo.dppo_step = step_of_rule
