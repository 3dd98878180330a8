"""Other methods, as subclasses of dppo.Rule, to compare with.

    python dppo.py --method extras.rivals:CPPO    # or another class of this file

Uniform is what a score has to beat: it keeps as many completions as DPPO does, all with one pi.

The others are biased, some on purpose and some as they were published. They override prune_prompts,
prune_completions or step, so dppo.py does not check their weights.

Unweighted prunes as DPPO does and takes the mean of what it keeps. That changes two things: the
weights are gone, and the divisor is the number kept. WeightOne changes the weights only: it keeps
the divisor N G, so its gradient is shorter as well as turned.

Literal is the paper's Algorithm 1 as it is reported [second-hand]. Of the k scores below the mean
it always removes the lowest floor(r k), where DPPO prunes as many at random, and it gives the
others the weights 1/pi of DPPO. Most scores are equal, and among equal ones, the first are removed.
A removed prompt keeps its score. It returns when at least floor(r k) scores lie below its own. This
happens if the mean falls, and k with it, or if other prompts get lower scores.

CPPO (arXiv 2503.22342) keeps the k completions with the largest |A| of each group. Its loss is a
mean over all that is kept, those with A = 0 included, as in its repository: there over tokens, here
over completions, as every objective has its own Z. (The repository also ranks the completions of a
whole batch, where the tables of CPPO's paper count k of each group.) That paper fills the space of
the removed completions with more prompts, which is not done here: with k = 2 of 8, 128 prompts for
a batch of 32.

GRESO (arXiv 2506.02177) rolls out a prompt the less often, the more visits in a row its completions
have been all correct, or all wrong. It refills its batch until enough groups have rewards that
differ. Its loss is the mean over their completions. GRESO's own code flips a coin for each prompt,
and adapts its probabilities p (see the class) from the second epoch on. Here dppo.draw is used, so
that the number kept hardly varies, and p adapts from the first step on.
"""

import math

import torch

import dppo
from dppo import DPPO, Rollout, Rule, Step


class Uniform(DPPO):
    """Of the completions with a gradient, keeps as many as DPPO, all with the same probability."""

    def completion_probabilities(self, rollout):
        needed = dppo.has_gradient(rollout.A, self.config.beta)
        kept = super().completion_probabilities(rollout).sum()
        return needed * kept / needed.sum().clamp(min=1)


class Unweighted(DPPO):
    """Prunes as DPPO does, but all kept completions have one weight: the loss is their mean."""

    def prune_completions(self, rollout, generator):
        kept = super().prune_completions(rollout, generator) > 0
        # In the loss, w_q w_qi/(N G) is then 1 over the number kept. (w_q itself stays, for the
        # records, which estimate means over all candidates.)
        candidates = rollout.N * rollout.A.shape[1]
        return kept * candidates / kept.sum().clamp(min=1) / rollout.w_q[:, None]


class WeightOne(DPPO):
    """Prunes as DPPO does, but gives weight 1 to all that it keeps, and still divides by N G."""

    def prune_completions(self, rollout, generator):
        kept = super().prune_completions(rollout, generator) > 0
        return kept / rollout.w_q[:, None]  # so that w_q w_qi is 1


def without_the_lowest(scores, rate):
    """Scores -> weights: 1/pi of dppo.keep_probabilities, but 0 for the lowest floor(rate k)."""
    pi = dppo.keep_probabilities(scores, rate)
    pruned = round((1 - pi).sum().item())
    lowest = scores.nan_to_num(math.inf).flatten().argsort(stable=True)[:pruned]
    return (1 / pi).flatten().index_fill(0, lowest, 0.0).view_as(pi)


class Literal(DPPO):
    """Algorithm 1 as it is reported: always removes the lowest scores, but weights the others as if
    the removal had been random."""

    def prune_prompts(self, upcoming, generator):
        weights = without_the_lowest(self.memory["score"], self.config.prompt_prune_rate)
        kept = weights[upcoming] > 0
        is_candidate = kept.cumsum(0) <= self.config.prompts_per_step
        prompts = upcoming[kept & is_candidate]
        return int(is_candidate.sum()), prompts, weights[prompts]

    def prune_completions(self, rollout, generator):
        needed = dppo.has_gradient(rollout.A, self.config.beta)
        scores = torch.where(needed, rollout.A.abs(), math.nan)
        return needed * without_the_lowest(scores, self.config.completion_prune_rate)


class CPPO(Rule):
    """Trains on the k completions with the largest |A| of each group: k = floor((1 - r) G), but at
    least 1, where r is the completion_prune_rate."""

    def prune_completions(self, rollout, generator):
        A = rollout.A
        G = A.shape[1]
        k = max(1, math.floor((1 - self.config.completion_prune_rate) * G + 1e-9))
        largest = A.abs().topk(k, dim=1).indices
        kept = torch.zeros_like(A).scatter(1, largest, 1.0)
        # In the loss, w_qi/(B G) is then 1/(B k). Those without a gradient count in k.
        return kept * G / k * dppo.has_gradient(A, self.config.beta)


def joined(rollouts):
    """One Rollout of several: tensors and sequences end to end, and the sums of numbers."""

    def join(values):
        first, *others = values
        return torch.cat(values) if torch.is_tensor(first) else sum(others, first)

    return Rollout(*map(join, zip(*rollouts)))


class GRESO(Rule):
    """Rolls out a prompt with probability p^z if its completions were all correct, or all wrong, at
    its last z visits. Trains on the first prompts_per_step groups that teach."""

    # streak: visits in a row with all correct or, below 0, all wrong; p: one for all prompts
    remembers = {"streak": 0.0, "p_easy": 0.5, "p_hard": 0.5}

    def prompt_probabilities(self):
        streak = self.memory["streak"]
        p = torch.where(streak > 0, self.memory["p_easy"], self.memory["p_hard"])
        return (p ** streak.abs()).clamp(min=0.01)

    def limit_of_step(self, upcoming):
        return self.size  # of a round

    def step(self, task, optimizer, upcoming, generator):
        """dppo_step, but it rolls out until prompts_per_step groups teach, or no prompt is left,
        and its loss is the mean over the completions of these groups."""
        config = self.config
        most = config.prompts_per_step
        self.size = most
        rounds = []
        while self.size > 0 and len(upcoming) > 0:
            N, prompts, w_q = self.prune_prompts(upcoming, generator)
            upcoming = upcoming[N:]
            rounds.append(dppo.roll_out(task, N, prompts, torch.ones_like(w_q), config))
            # Next as many as should fill the batch, and a quarter more.
            teaches = torch.cat([part.A.any(dim=1) for part in rounds])
            missing = most - teaches.sum().item()
            rate = teaches.double().mean().item()
            self.size = min(most, math.ceil(1.25 * missing / max(rate, 0.01)))
        rollout = joined(rounds)

        # Train on the first groups that teach, whole. In the loss, w/(N G) is 1 over their number.
        is_trained = (teaches & (teaches.cumsum(0) <= most)).double()
        w = is_trained[:, None].expand_as(rollout.A) * rollout.N / is_trained.sum().clamp(min=1)
        weights = [w] * config.inner_epochs
        updates = dppo.learn(task, optimizer, rollout, weights, config)
        self.remember(rollout)
        return Step(rollout, weights, updates)

    def remember(self, rollout):
        prompts = rollout.prompts
        teaches = rollout.A.any(dim=1)
        mean = rollout.rewards.nanmean(dim=1)  # NaN for a group without rewards
        kind = (mean > 0).double() - (mean <= 0).double()
        kind = kind * ~teaches  # 0 if the group teaches
        streak = self.memory["streak"][prompts]
        goes_on = (streak * kind > 0) | mean.isnan()  # without rewards, this was no visit
        self.memory["streak"][prompts] = kind + streak * goes_on
        # p_easy and p_hard adapt until easy groups are 1/12 of the rollout and hard ones 1/6.
        graded = kind[~mean.isnan()]
        if len(graded) == 0:
            return
        for name, sign, target in (("p_easy", 1, 1 / 12), ("p_hard", -1, 1 / 6)):
            is_below = (graded == sign).double().mean() < target
            self.memory[name] += 0.01 if is_below else -0.01
            self.memory[name].clamp_(0.05, 0.95)
