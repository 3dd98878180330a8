"""Other methods, as subclasses of dppo.Rule, to compare with.

    python dppo.py --method extras.rivals:CPPO    # or another class of this file

They are biased on purpose. They override prune_prompts, prune_completions or step, so dppo.py does
not check their weights.

Unweighted prunes as the paper's rule does and takes the mean of what it keeps. That changes two
things: the weights are gone, and the divisor is the number kept. WeightOne changes the weights
only: it keeps the divisor N G, so its gradient is shorter as well as turned.

Literal is the paper's Algorithm 1 as it is reported [second-hand]. Of the k scores below the mean
it always removes the lowest floor(r k), where DPPO prunes as many at random, and it gives the
others the weights 1/pi of DPPO. Most scores are equal, and among equal ones, the first are removed.
A removed prompt keeps its score. It returns when at least floor(r k) scores lie below its own. This
happens if the mean falls, and k with it, or if other prompts get lower scores.

CPPO (arXiv 2503.22342) keeps the k completions with the largest |A| of each group. Its loss is the
mean over all kept completions, those with A = 0 included, as in its repository. (The repository
averages over their tokens, whereas here every objective has its own Z. It also ranks the
completions of a whole batch, where the tables of CPPO's paper count k of each group.) That paper
fills the space of the pruned completions with more prompts: with k = 2 of 8, 128 prompts for a
batch of 32.

GRESO (arXiv 2506.02177) rolls out a prompt the less often, the more visits in a row its completions
have been all correct, or all wrong. It refills its batch until enough groups have rewards that
differ. Its loss is the mean over their completions. GRESO's own code flips a coin for each prompt,
and adapts its probabilities p (see the class) from the second epoch on. Here dppo.draw is used, so
that the number kept hardly varies, and p adapts from the first step on.
"""

import math

import torch

import dppo
from dppo import DPPO, Rollout, Rule, Step, draw, group_advantages, sample_and_grade


class Unweighted(DPPO):
    """Prunes as DPPO does, but all kept completions have one weight: the loss is their mean."""

    def prune_prompts(self, upcoming, generator):
        self.N, prompts, w_q = super().prune_prompts(upcoming, generator)
        return self.N, prompts, w_q

    def prune_completions(self, rollout, generator):
        kept = super().prune_completions(rollout, generator) > 0
        # In the loss, w_q w_qi/(N G) is then 1 over the number kept. (w_q itself stays, for the
        # records, which estimate means over the window.)
        candidates = self.N * rollout.A.shape[1]
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
        in_window = kept.cumsum(0) <= self.config.prompts_per_step
        prompts = upcoming[kept & in_window]
        return int(in_window.sum()), prompts, weights[prompts]

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


class GRESO(Rule):
    """Rolls out a prompt with probability p^z if its completions were all correct, or all wrong, at
    its last z visits. Trains on the first prompts_per_step groups that teach."""

    # streak: visits in a row with all correct or, below 0, all wrong; p: one for all prompts
    remembers = {"streak": 0.0, "p_easy": 0.5, "p_hard": 0.5}

    def prompt_probabilities(self):
        streak = self.memory["streak"]
        p = torch.where(streak > 0, self.memory["p_easy"], self.memory["p_hard"])
        return (p ** streak.abs()).clamp(min=0.01)

    def step(self, task, optimizer, upcoming, generator):
        """dppo_step, but it rolls out until prompts_per_step groups teach, or no prompt is left,
        and its loss is the mean over the completions of these groups."""
        config, model = self.config, task.model
        G, most = config.group_size, config.prompts_per_step

        # 1 and 2. Prune prompts, and roll out those that are kept, in rounds.
        N, size = 0, most
        prompts, sequences, rewards = [], [], []
        while size > 0 and len(upcoming) > N:
            rest = upcoming[N:]
            pi = self.prompt_probabilities()[rest]
            window = rest[pi.cumsum(0) <= size + 1e-9]
            pi = pi[: len(window)]
            kept = window[draw(pi / pi.sum().clamp(max=1), generator) > 0]
            examples = [task.train[q] for q in kept.tolist()]
            new_sequences, new_rewards = sample_and_grade(task, examples, G, config)
            prompts.append(kept)
            sequences += new_sequences
            rewards.append(new_rewards)
            N += len(window)
            # Next as many as should fill the batch, and a quarter more.
            teaches = group_advantages(torch.cat(rewards)).any(dim=1)
            missing = most - teaches.sum().item()
            rate = teaches.double().mean().item()
            size = min(most, math.ceil(1.25 * missing / max(rate, 0.01)))
        prompts, rewards = torch.cat(prompts), torch.cat(rewards)
        A = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")
        lengths = torch.tensor([len(s.completion) for s in sequences]).double().view_as(A)
        w_q = torch.ones(len(prompts), dtype=torch.float64)
        rollout = Rollout(prompts, w_q, sequences, rewards, lengths, A)
        earlier_mean = self.memory["mean_length"].nan_to_num(lengths.mean().item())
        Z = dppo.normalizer(lengths, earlier_mean, config)

        # 3. Train on the first groups that teach, whole.
        teaches = A.any(dim=1)
        is_trained = (teaches & (teaches.cumsum(0) <= most)).double()
        w = is_trained[:, None].expand_as(A) * N / is_trained.sum().clamp(min=1)

        # 4. Before any update, get the old and reference log-probabilities.
        indices = w.flatten().nonzero()[:, 0].tolist()
        old, ref = None, None
        if config.inner_epochs > 1:
            old = dppo.frozen_logprobs(model, sequences, indices, config)
        if config.beta > 0:
            ref = dppo.frozen_logprobs(task.reference, sequences, indices, config)

        # 5. Update.
        updates = []
        for epoch in range(config.inner_epochs):
            inputs = (sequences, A, w / (N * G * Z), old if epoch > 0 else None, ref, config)
            updates.append(dppo.train_step(model, optimizer, *inputs))

        # 6. Remember.
        self.remember(rollout)
        self.memory["mean_length"] = 0.9 * earlier_mean + 0.1 * lengths.mean()
        return Step(N, rollout, [w] * config.inner_epochs, updates)

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
