"""What the notebook computes without showing how.

Steps on one batch: gradients of single completions, weights that rules draw, and angles. Then live
runs, and pictures and tables of live and of saved ones.
"""

import copy
import math
from collections import namedtuple
from dataclasses import replace

import pandas
import torch

import dppo
from extras import plots
from extras.comparison import cells, picture, statistics, tables


# ==== Steps on one batch ====
def visit(rule, rewards):
    """One visit of a rule to each prompt, with these (n, G) rewards."""
    rule.remember(picture.graded(torch.arange(len(rewards)), rewards))


def rule_after(kind, rewards, r_q, r_o):
    """A rule that remembers one visit to each prompt, with these (n, G) rewards. Its window is as
    long as it may be."""
    rates = {"prompt_prune_rate": r_q, "completion_prune_rate": r_o}
    rule = kind(dppo.configure(**rates, prompts_per_step=10_000), examples=rewards)  # as many
    visit(rule, rewards)
    return rule


Drawn = namedtuple("Drawn", "weights rolled_out")  # (steps, n, G); (steps,) numbers of prompts


def draw_steps(rule, rewards):
    """1,000 steps that a rule draws on one batch, with (n, G) rewards -> Drawn."""
    number = 1000
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(number, *rewards.shape, dtype=torch.float64)
    rolled_out = torch.zeros(number, dtype=torch.float64)
    for step in range(number):
        _, prompts, w_q = rule.prune_prompts(torch.arange(len(rewards)), generator)
        rollout = picture.graded(prompts, rewards[prompts], w_q)
        w_qi = rule.prune_completions(rollout, generator)
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

    def table(self, drawn):
        """What the notebook's table has of some rules: {name: Drawn}."""
        rows = {}
        for name, (steps, rolled_out) in drawn.items():
            rows[name] = {
                "prompts rolled out": round(rolled_out.mean().item()),
                "completions trained": round((steps > 0).sum().item() / len(steps)),
                "one step: degrees off": self.degrees(steps).mean().item(),
                "mean step: degrees off": self.degrees(steps.mean(dim=0)).item(),
            }
        return pandas.DataFrame.from_dict(rows, orient="index").round(2)


def draw_cloud(batch, drawn):
    """The steps of some rules, the first of which scatters most."""
    clouds = {}
    for name, (steps, _) in drawn.items():
        aside = batch.aside(steps, drawn["Literal"].weights[0])
        clouds[name] = (batch.along(steps), aside, colour_of(name))
    plots.draw_cloud(clouds)


# ==== Groups, and one step ====
def table_of_groups(task, sequences, rewards):
    """A group that is all right, two mixed ones, and one that is all wrong."""
    G = rewards.shape[1]
    right = rewards.sum(dim=1)
    largest = dppo.group_advantages(rewards).abs().amax(dim=1)
    rows = {}
    for kind, number in ((right == G, 1), ((right > 0) & (right < G), 2), (right == 0, 1)):
        for q in kind.nonzero()[:number, 0].tolist():
            ids = [sequence.completion for sequence in sequences[q * G : (q + 1) * G]]
            texts = task.tokenizer.batch_decode(ids, skip_special_tokens=True)
            told = [f"{text} ({reward:.0f})" for text, reward in zip(texts, rewards[q])]
            rows[task.train[q]["prompt"]] = {
                "two answers (reward)": ", ".join([*dict.fromkeys(told)][:2]),
                f"right, of {G}": int(right[q]),
                "largest |A|": round(largest[q].item(), 1),
            }
    return pandas.DataFrame.from_dict(rows, orient="index")


def draw_numbered_step(step, pi):
    """The first step of a run as the loop numbers it: (all prompts,) pi."""
    window = dppo.next_prompts(0, len(pi), 0, step.N)
    rollout = step.rollout
    states = torch.full((rollout.A.shape[1], step.N), math.nan)
    for q, A, w in zip(rollout.prompts, rollout.A, step.weights[0]):
        states[:, (window == q).nonzero()[0]] = ((A != 0) * (1.0 + (w > 0))).float()[:, None]
    fig = plots.plt.figure(figsize=(8.4, 4.6))
    plots.draw_step(fig, pi[window], states)
    for ax, number in zip(fig.axes, ("1 and 2: ", "3 to 5: ")):
        ax.set_title(number + ax.get_title(loc="left"))


# ==== Live runs ====
class Run:
    """A copy of a task's model in training: its steps, and its curve of [completions generated,
    accuracy], with a point every 30 steps."""

    def __init__(self, task, config, seed):
        self.task = replace(task, model=copy.deepcopy(task.model))
        self.config = config
        self.optimizer = dppo.MasterAdam(self.task.model, config.learning_rate)
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.steps, self.curve = [], []
        self.evaluate()

    @property
    def looked_at(self):
        """How many prompts the steps have looked at."""
        return sum(step.N for step in self.steps)

    def evaluate(self):
        with torch.random.fork_rng():  # which leaves the random numbers of training as they are
            accuracy = dppo.evaluate(self.task, self.config)["accuracy"]
        generated = sum(len(step.rollout.sequences) for step in self.steps)
        self.curve.append([generated, accuracy])

    def add(self, step):
        self.steps.append(step)
        if len(self.steps) % 30 == 0:
            self.evaluate()

    def gain(self):
        """By how much the accuracy rose."""
        return self.curve[-1][1] - self.curve[0][1]


def draw_training(runs):
    plots.draw_training({name: (run.curve, colour_of(name)) for name, run in runs.items()})


def table_of_runs(runs, first=0):
    """What runs did in all steps, or in those after the first few."""
    rows = {}
    for name, run in runs.items():
        steps = run.steps[first:]
        teach = torch.cat([step.rollout.A.any(dim=1) for step in steps]).double()
        rows[name] = {
            "prompts looked at": sum(step.N for step in steps),
            "rolled out": len(teach),
            "share of these that teach": round(teach.mean().item(), 2),
            "completions trained": sum(int((step.weights[0] != 0).sum()) for step in steps),
            "accuracy at the end": round(run.curve[-1][1], 2),
        }
    return pandas.DataFrame.from_dict(rows, orient="index")


def draw_visits(steps, task):
    """Each rollout of a prompt of a run as a mark."""
    numbers, prompts, teaches = [], [], []
    for number, step in enumerate(steps, 1):
        numbers += [number] * len(step.rollout.prompts)
        prompts += step.rollout.prompts.tolist()
        teaches += step.rollout.A.any(dim=1).tolist()
    digits = torch.tensor([len(example["answer"]) for example in task.train])
    place = digits.argsort(stable=True).argsort()  # easy prompts below, hard ones above
    classes = {}
    for name, (_, low, high) in dppo.SORTING.items():
        those = place[(digits >= low) & (digits <= high)].float()
        classes[name] = those.mean(), f"{name}:\n{low} to {high} digits,\n{len(those)} prompts"
    plots.draw_rollouts(numbers, place[prompts], teaches, classes)


# ==== Saved runs ====
GUESSES = 4  # the column of a curve of "guess or pass" that has the share of guesses


def colour_of(arm):
    """An arm's method is the beginning of its name, unless it is a reader's own."""
    if arm.endswith("memory"):
        return plots.COLOURS["with memory"]
    if arm.endswith(("unweighted", "all weights 1")):
        return plots.COLOURS["Unweighted"]
    names = [name for name in plots.COLOURS if arm.startswith(name)]
    return plots.COLOURS[max(names, key=len, default="other")]


def draw_guessing(runs):
    """The share of guesses in each run."""
    lines = {}
    for arm, of_seed in runs.items():
        rows = []
        for run in of_seed.values():
            rows.append([[point[0], point[GUESSES]] for point in run["curve"]])
        steps, guesses = torch.tensor(rows, dtype=torch.float64).unbind(dim=2)
        lines[arm] = (steps[0], guesses, colour_of(arm))
    plots.draw_guessing(lines)


SHOWN = ("grpo", "grpo-skip", "dppo (0.7, 0.7)", "our rule (0.9, 0)")


def draw_seconds(saved):
    """Accuracy against processor seconds, the mean over the seeds and its 95% interval."""
    curves = {}
    for arm in SHOWN:
        curves[arm] = (*picture.band(saved["time"][arm]), colour_of(arm))
    plots.draw_means(curves, "processor seconds", 85, "accuracy, held-out prompts")


def table_of_times(saved):
    """The times to two levels, and the accuracies at equal time and at the end, beside those of
    grpo-skip."""
    control = saved["time"]["grpo-skip"]
    rows = [["compared with `grpo-skip`", "time to 0.80", "time to 0.84"]]
    rows[0] += ["accuracy at equal times", "accuracy at the end"]
    for arm in SHOWN[2:]:
        runs = saved["time"][arm]
        told = []
        for level in (0.80, 0.84):
            told.append(cells.bracketed(statistics.time_ratio(runs, control, level)))
        early = statistics.at_equal_time(runs, control)
        late = statistics.differences(statistics.accuracy_at_the_end, runs, control)
        told += [cells.bracketed(gap, cells.signed) for gap in (early, late)]
        rows.append([cells.method(arm), *told])
    return plots.table(rows)


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


def draw_smollm2(saved):
    """The probability of the right answer against completions."""
    curves = {}
    for arm in ("grpo-skip", "dppo (0.7, 0)", "our rule (0.9, 0)"):
        curves[arm] = (*picture.band(by_completions(saved["SmolLM2"][arm])), colour_of(arm))
    plots.draw_means(curves, "completions generated", 11_000, "probability of the right answer")


# ==== Packing ====
def draw_packing(sequences, longest):
    """Sequences, padded and packed -> the share of padding, of both."""
    lengths = {i: len(s.prompt + s.completion) for i, s in enumerate(sequences)}
    kinds = {"padded": [[i] for i in lengths], "packed": dppo.pack(lengths, longest)}
    titled, padding = {}, []
    for name, slots in kinds.items():
        used = [sum(lengths[i] for i in slot) for slot in slots]
        padding.append(1 - sum(used) / (len(slots) * max(used)))
        titled[f"{name}: {padding[-1]:.0%} is padding"] = slots
    plots.draw_packing(lengths, titled, longest)
    return padding


def table_of_packing(saved):
    rows = [["sequences", "padding, if not packed", "time packed, over time padded"]]
    for name, _, _, tokens, time in tables.packing(saved)[1:]:
        rows.append([name, f"{1 - float(tokens):.0%}", time])
    return plots.table(rows[:3])  # without Llama
