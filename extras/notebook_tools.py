"""What the notebook computes without showing how.

Steps on one batch: gradients of single completions, weights that rules draw, and angles. Then what
runs are to be drawn: rollouts of a live one, and means of saved ones.
"""

import math
from collections import namedtuple

import pandas
import torch

import dppo
from extras import plots
from extras.comparison import picture, statistics
from extras.proportional import Proportional


class AnyPrompt(Proportional):
    """Keeps as many prompts as our rule, all with the same pi."""

    def prompt_probabilities(self):
        pi = super().prompt_probabilities()
        return torch.full_like(pi, pi.mean())


# ==== Steps on one batch ====
def rule_after(kind, rewards, r_q, r_o):
    """A rule that remembers one visit to each prompt, with these (n, G) rewards. Its window is as
    long as it may be."""
    rates = {"prompt_prune_rate": r_q, "completion_prune_rate": r_o}
    rule = kind(dppo.configure(**rates, prompts_per_step=10_000), len(rewards))
    rule.remember(torch.arange(len(rewards)), rewards, dppo.group_advantages(rewards))
    return rule


Drawn = namedtuple("Drawn", "weights rolled_out")  # (steps, n, G); (steps,) numbers of prompts


def draw_steps(rule, A, number=1000):
    """Many steps that a rule draws on one batch, with (n, G) advantages -> Drawn."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(number, *A.shape, dtype=torch.float64)
    rolled_out = torch.zeros(number, dtype=torch.float64)
    for step in range(number):
        _, prompts, w_q = rule.prune_prompts(torch.arange(len(A)), generator)
        w_qi = rule.prune_completions(A[prompts], w_q, generator)
        weights[step, prompts] = w_q[:, None] * w_qi
        rolled_out[step] = len(prompts)
    return Drawn(weights, rolled_out)


class Gradients:
    """The gradients g of the completions of a batch, each alone, for (n, G) advantages A. The full
    gradient is their sum; that of a step is the sum of w g."""

    def __init__(self, task, sequences, A, config):
        self.at = A.flatten().nonzero()[:, 0]  # the others have no gradient
        parameters = [*task.model.parameters()]
        g = torch.empty(len(self.at), sum(part.numel() for part in parameters))
        for row, i in zip(g, self.at.tolist()):
            inputs = (task.model, [sequences[i]], [[0]], config.temperature)
            logprobs, _ = dppo.completion_logprobs(*inputs)
            parts = torch.autograd.grad(-A.flatten()[i] * logprobs.mean(), parameters)
            row[:] = torch.cat([part.flatten() for part in parts])
        self.products = (g @ g.T).double()  # all that lengths and angles need
        self.whole = self.products.sum()  # the square of the full gradient's length

    def weights(self, steps):
        """(steps, n, G) weights, or (n, G) of one step -> (steps, completions with a gradient)."""
        return steps.reshape(-1, steps.shape[-2] * steps.shape[-1])[:, self.at]

    def along(self, steps):
        """(steps,) the part along the full gradient, in lengths of the full gradient."""
        return (self.weights(steps) @ self.products).sum(dim=1) / self.whole

    def square(self, steps):
        """(steps,) the square of the length, in squares of the full gradient's."""
        w = self.weights(steps)
        return (w @ self.products * w).sum(dim=1) / self.whole

    def degrees(self, steps):
        """(steps,) the angle to the full gradient."""
        along = self.along(steps)
        across = (self.square(steps) - along.square()).clamp(min=0).sqrt()
        return torch.rad2deg(torch.atan2(across, along))

    def degrees_by_chance(self, steps):
        """How far the mean of steps is off, if they are unbiased: their scatter over the root of
        their number."""
        variance = self.square(steps).mean() - self.square(steps.mean(dim=0))[0]
        return torch.rad2deg((variance.clamp(min=0) / len(steps)).sqrt().atan()).item()

    def aside(self, steps, biased):
        """(steps,) the part in the direction in which the gradient of a biased step, with (n, G)
        weights, leaves the full gradient, in lengths of the full gradient."""
        away = self.weights(biased)[0] - self.along(biased)
        away = away / (away @ self.products @ away).sqrt()
        return self.weights(steps) @ self.products @ away / self.whole.sqrt()

    def row(self, drawn):
        """What the notebook's table has of a rule."""
        steps = drawn.weights
        return {
            "prompts rolled out": drawn.rolled_out.mean().item(),
            "completions trained": (steps > 0).sum(dim=(1, 2)).double().mean().item(),
            "a step: degrees off": self.degrees(steps).mean().item(),
            "mean of 1,000: degrees off": self.degrees(steps.mean(dim=0)).item(),
        }


def draw_cloud(batch, drawn, names):
    """The steps of some rules, the first of which scatters most."""
    clouds = {}
    for name in names:
        steps = drawn[name].weights
        aside = batch.aside(steps, drawn["Literal"].weights[0])
        clouds[name] = (batch.along(steps), aside, colour_of(name))
    plots.draw_cloud(clouds)


# ==== Groups, and one step ====
def answers(task, sequences, rewards, G):
    """(a line for each prompt) up to three different answers of its group, with their rewards."""
    lines = []
    for q, group in enumerate(rewards):
        ids = [sequence.completion for sequence in sequences[q * G : (q + 1) * G]]
        texts = task.tokenizer.batch_decode(ids, skip_special_tokens=True)
        told = [f"{text} ({reward:.0f})" for text, reward in zip(texts, group)]
        lines.append(", ".join([*dict.fromkeys(told)][:3]))
    return lines


def draw_numbered_step(step, pi, window):
    """A step as the loop numbers it: (N,) pi of the prompts in its window."""
    states = torch.full((step.A.shape[1], step.N), math.nan)
    for q, A, w in zip(step.prompts, step.A, step.weights[0]):
        states[:, (window == q).nonzero()[0]] = ((A != 0) * (1.0 + (w > 0))).float()[:, None]
    fig = plots.plt.figure(figsize=(8.4, 4.6))
    plots.draw_step(fig, pi, states)
    for ax, number in zip(fig.axes, ("1 and 2: ", "3 to 5: ")):
        ax.set_title(number + ax.get_title(loc="left"))


# ==== Live runs ====
def accuracy(task, config):
    """The accuracy now, which leaves the random numbers of training as they are."""
    with torch.random.fork_rng():
        return dppo.evaluate(task, config)["accuracy"]


def table_of_runs(runs, first=0):
    """What runs did in all steps, or in those after the first few."""
    rows = {}
    for name, (steps, curve) in runs.items():
        later = steps[first:]
        teaches = torch.cat([step.A.any(dim=1) for step in later]).double()
        rows[name] = {
            "prompts looked at": sum(step.N for step in later),
            "rolled out": len(teaches),
            "of these with a gradient": f"{teaches.mean():.0%}",
            "completions trained": sum(int((step.weights[0] != 0).sum()) for step in later),
            "accuracy before": f"{curve[0][1]:.2f}",
            "at the end": f"{curve[-1][1]:.2f}",
        }
    return pandas.DataFrame.from_dict(rows, orient="index")


def draw_visits(steps, task):
    """Each rollout of a prompt of a run as a mark."""
    numbers, prompts, teaches = [], [], []
    for number, step in enumerate(steps, 1):
        numbers += [number] * len(step.prompts)
        prompts += step.prompts.tolist()
        teaches += step.A.any(dim=1).tolist()
    digits = torch.tensor([len(example["answer"]) for example in task.train[:256]])
    place = digits.argsort(stable=True).argsort()  # easy prompts below, hard ones above
    classes = {}
    for name, (_, low, high) in dppo.SORTING.items():
        those = place[(digits >= low) & (digits <= high)].float()
        classes[name] = those.mean(), f"{name}:\n{low} to {high} digits,\n{len(those)} prompts"
    plots.draw_rollouts(numbers, place[prompts], teaches, classes)


# ==== Saved runs ====
GUESSES = 4  # the column of a curve of "guess or pass" that has the share of guesses


def colour_of(arm):
    """An arm's method is the beginning of its name."""
    if arm.endswith("memory"):
        return plots.COLOURS["with memory"]
    if arm.endswith(("unweighted", "all weights 1")):
        return plots.COLOURS["Unweighted"]
    names = [name for name in plots.COLOURS if arm.startswith(name)]
    return plots.COLOURS[max(names, key=len)]


def draw_guessing(runs):
    """The share of guesses in each run."""
    lines = {}
    for arm, of_seed in runs.items():
        rows = [[[point[0], point[GUESSES]] for point in run["curve"]] for run in of_seed.values()]
        steps, guesses = torch.tensor(rows, dtype=torch.float64).unbind(dim=2)
        lines[arm] = (steps[0], guesses, colour_of(arm))
    plots.draw_guessing(lines)


def draw_seconds(runs):
    """Accuracy against processor seconds, the mean over the seeds and its 95% interval."""
    curves = {}
    for arm, of_seed in runs.items():
        curves[arm] = (*picture.band(of_seed), colour_of(arm))
    plots.draw_means(curves, "processor seconds", 85)


def draw_ratios(runs, level):
    """The time to a level, over grpo-skip's, of each arm."""
    rows = {}
    for arm, of_seed in runs.items():
        if arm != "grpo-skip":
            ratio = statistics.time_ratio(of_seed, runs["grpo-skip"], level)
            rows[arm] = (*ratio, colour_of(arm))
    plots.draw_ratios(rows, f"processor seconds to {level}, over grpo-skip's")


def halves(saved):
    """For both tasks, how many groups were equal in the first steps, and what either half of the
    pruning did to the time of a whole run and to the accuracy at its end, beside grpo-skip."""
    arms = {"completions: dppo (0, 0.7)": "dppo (0, 0.7)"}
    arms["prompts: our rule (0.95, 0)"] = "our rule (0.95, 0), 20 prompts"
    seconds = statistics.total("processor_seconds")
    rows = {}
    for task, runs in (("digits", saved["time"]), ("sums", saved["sums"])):
        control = runs["grpo-skip"]
        equal = statistics.mean_of(statistics.total("zero_variance_of_first_steps"), control)
        rows[task] = {"equal groups at first": f"{equal:.0%}"}
        for name, arm in arms.items():
            time = statistics.ratios(seconds, runs[arm], control)[0]
            end = statistics.differences(statistics.accuracy_at_the_end, runs[arm], control)
            verdict = statistics.is_as_good(end)
            told = f"{time:.2f} of grpo-skip's time, accuracy {end[0]:+.3f} ({verdict})"
            rows[task][name] = told
    return pandas.DataFrame.from_dict(rows, orient="index").T


def by_completions(runs):
    """Runs whose curves count completions in place of seconds, until the first run ends."""
    curves = {}
    for seed, run in runs.items():
        curves[seed] = [[step, made, value] for step, _, _, made, _, value in run["curve"]]
    end = min(curve[-1][1] for curve in curves.values())
    shortened = {}
    for seed, curve in curves.items():
        before = [point for point in curve if point[1] < end]
        shortened[seed] = {"curve": [*before, [0, end, statistics.curve_at(curve, end)]]}
    return shortened


def draw_smollm2(runs):
    curves = {arm: (*picture.band(by_completions(runs[arm])), colour_of(arm)) for arm in runs}
    plots.draw_means(curves, "completions generated", 11_000)


# ==== Packing ====
def lengths_of(sequences):
    """{index: tokens of a prompt with its completion}"""
    return {i: len(sequence.prompt + sequence.completion) for i, sequence in enumerate(sequences)}


def share_of_tokens(lengths, slots):
    """The share of a batch that is not padding."""
    room = max(sum(lengths[i] for i in slot) for slot in slots)
    return sum(lengths.values()) / (len(slots) * room)
