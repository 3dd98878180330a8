"""What the notebook computes without showing how: live runs, steps on one batch, and pictures and
tables of these.
"""

import copy
import math
from dataclasses import replace

import torch

import dppo
from extras import plots
from extras.experiments import analysis, noise


def table(head, *rows):
    from IPython.display import Markdown  # which is there wherever a notebook is

    return Markdown(analysis.in_markdown([head, *rows]))


# ==== Live runs ====
class Run:
    """A copy of a task's model after some steps of training: these steps, and a curve of
    [completions generated, accuracy], with a point every 30 steps."""

    def __init__(self, make_step, task, config, steps=120, seed=0):
        self.task = replace(task, model=copy.deepcopy(task.model))
        self.config = config
        self.steps, self.curve = [], []
        optimizer = dppo.MasterAdam(self.task.model, config.learning_rate)
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        candidates = 0
        self.evaluate()
        for number in range(1, steps + 1):
            upcoming = dppo.next_prompts(candidates, len(task.train), seed, 1600)
            step = make_step(self.task, optimizer, upcoming, generator)
            candidates += step.rollout.N
            self.steps.append(step)
            if number % 30 == 0:
                self.evaluate()

    def evaluate(self):
        with torch.random.fork_rng():  # which leaves the random numbers of training as they are
            accuracy = dppo.evaluate(self.task, self.config)[0]["accuracy"]
        generated = sum(len(step.rollout.sequences) for step in self.steps)
        self.curve.append([generated, accuracy])


def teaching(steps):
    """(rollouts of prompts,) whether their groups have a gradient."""
    return torch.cat([step.rollout.A.any(dim=1) for step in steps])


def totals(run, first=0):
    """What a run did in all steps, or in those after the first few, by name."""
    steps = run.steps[first:]
    taught = teaching(steps)
    return {
        "candidates": sum(step.rollout.N for step in steps),
        "rolled out": len(taught),
        "of these, taught": f"{taught.double().mean():.0%}",
        "completions trained": sum(int((step.weights[0] != 0).sum()) for step in steps),
        "accuracy at the end": f"{run.curve[-1][1]:.2f}",
    }


def table_of_runs(runs, first=0):
    rows = {name: totals(run, first) for name, run in runs.items()}
    head = next(iter(rows.values()))
    return table(["run", *head], *[[name, *row.values()] for name, row in rows.items()])


def table_of_answers(task, run):
    """An easy, a middle and a hard prompt: a completion of each before training, and how many of a
    group are right; the same after it."""
    rows = []
    for name, (_, low, high) in dppo.SORTING.items():
        example = next(x for x in task.train if low <= len(x["answer"]) <= high)
        row = [name, f"`{example['prompt']}`", f"`{example['answer']}`"]
        for model in (task.model, run.task.model):
            torch.manual_seed(0)
            given = replace(task, model=model)
            sequences, rewards = dppo.sample_and_grade(given, [example], 8, run.config)
            text = task.tokenizer.decode(sequences[0].completion, skip_special_tokens=True)
            row += [f"`{text}`", f"{int(rewards.sum())} of 8"]
        rows.append(row)
    head = ["", "prompt", "answer", "one of 8, before", "right", "one of 8, after", "right"]
    return table(head, *rows)


def draw_visits(run):
    """Each rollout of a prompt of a run as a mark."""
    numbers, prompts = [], []
    for number, step in enumerate(run.steps, 1):
        numbers += [number] * len(step.rollout.prompts)
        prompts += step.rollout.prompts.tolist()
    taught = teaching(run.steps)
    digits = torch.tensor([len(example["answer"]) for example in run.task.train])
    place = digits.argsort(stable=True).argsort()  # easy prompts below, hard ones above
    classes = {}
    for name, (_, low, high) in dppo.SORTING.items():
        those = place[(digits >= low) & (digits <= high)].float()
        classes[name] = those.mean(), f"{name}:\n{low} to {high} digits,\n{len(those)} prompts"
    title = f"{len(taught):,} groups, of which {1 - taught.double().mean():.0%} taught nothing"
    plots.draw_rollouts(numbers, place[prompts], taught.tolist(), classes, title)


def draw_training(runs):
    plots.draw_training({name: (run.curve, plots.COLOURS[name]) for name, run in runs.items()})


# ==== Steps on one batch ====
def sampled(task, config):
    """A group of each prompt, by reward: its sequences, one after the other; (prompts, G) rewards.
    So completions are in the order in which dppo.py draws them."""
    sequences, rewards = dppo.sample_and_grade(task, task.train, config.group_size, config)
    order = rewards.argsort(dim=1, stable=True)
    rows = torch.arange(rewards.numel()).view_as(rewards).gather(1, order).flatten()
    return [sequences[row] for row in rows], rewards.gather(1, order)


def graded(prompts, rewards, w_q=None, sequences=()):
    """(B,) prompts, (B, G) rewards, (B,) w_q -> a Rollout without lengths."""
    w_q = torch.ones(len(prompts)).double() if w_q is None else w_q
    A = dppo.group_advantages(rewards)
    return dppo.Rollout(len(prompts), prompts, w_q, sequences, rewards, None, A, seconds=0.0)


def draw_one_step(step, pi, unseen):
    """The first step of a run: (all prompts,) pi; (all prompts, G) rewards, for the prompts that
    the step did not roll out."""
    candidates = dppo.next_prompts(0, len(pi), 0, step.rollout.N)
    states = 1.0 * (dppo.group_advantages(unseen[candidates]) != 0).T  # (G, N), nothing is kept
    kept = torch.isin(candidates, step.rollout.prompts)
    for q, A, w in zip(step.rollout.prompts, step.rollout.A, step.weights[0]):
        states[:, (candidates == q).nonzero()[0]] = ((A != 0) * (1.0 + (w > 0)))[:, None]
    fig = plots.plt.figure(figsize=(8.4, 4.8))
    plots.draw_step(fig, pi[candidates], states, kept)
    taught = int((states[:, ~kept] > 0).any(dim=0).sum())
    told = f"{taught} of {int((~kept).sum())} pruned groups would teach"
    fig.axes[1].set_title(f"{fig.axes[1].get_title('left')}; {told}", fontsize="medium")


def draw_weights(kind, past, rewards, number=1000):
    """(number, n G) weights of the completions of n prompts, drawn by a rule that remembers one
    visit, with the rewards `past`. All n prompts are candidates."""
    config = dppo.configure(prompts_per_step=10_000)
    rule = kind(config, examples=rewards)  # only their number matters
    rule.remember(graded(torch.arange(len(past)), past))
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(number, *rewards.shape)
    for step in weights:
        _, prompts, w_q = rule.prune_prompts(torch.arange(len(rewards)), generator)
        w_qi = rule.prune_completions(graded(prompts, rewards[prompts], w_q), generator)
        step[prompts] = (w_q[:, None] * w_qi).float()
    return weights.flatten(start_dim=1)


def gradients(task, sequences, A, config):
    """(completions,) A -> (completions with a gradient, parameters) the gradient of the loss of
    each, alone."""
    rows = A.nonzero()[:, 0]
    g = torch.empty(len(rows), task.model.num_parameters())
    kept = [sequences[row] for row in rows]
    for row, gradient in zip(g, noise.gradients(task, kept, A[rows], 0, config)):
        row[:] = gradient
    return g


def squares_of_prompts(gram, has):
    """(rows, rows) g . g of the completions with a gradient; (prompts, G) which these are ->
    (prompts,) the square of each prompt's gradient, the sum over its group."""
    prompt_of_row = has.nonzero()[:, 0]
    belongs = torch.nn.functional.one_hot(prompt_of_row, len(has)).double()
    return (belongs * (gram @ belongs)).sum(dim=0)


def degrees(gradient, other):
    """The angle between two gradients."""
    cosine = torch.cosine_similarity(gradient.double(), other.double(), dim=0)
    return math.degrees(math.acos(min(1.0, cosine.item())))


def degrees_by_chance(weights, g):
    """By how many degrees chance turns the mean step, if (steps, completions) weights are unbiased:
    the standard error of the mean over the length of the full gradient, as an angle."""
    scatter = weights - weights.mean(dim=0)
    variance = ((scatter @ (g @ g.T)) * scatter).sum(dim=1).mean() / len(weights)
    return math.degrees(math.atan((variance.sqrt() / g.sum(dim=0).norm()).item()))


def draw_cloud(g, weights):
    """Steps as dots, and their means, on the plane of the full gradient and of Literal's mean:
    (completions, parameters) g; {name: (steps, completions) weights}."""
    full = g.sum(dim=0)
    away = weights["Literal"].mean(dim=0) @ g
    away = away - full * (away @ full) / full.square().sum()
    axes = torch.stack([full / full.norm(), away / away.norm()], dim=1) / full.norm()
    clouds = {}
    for name, w in weights.items():
        x, y = (w @ (g @ axes)).T
        turned = degrees(w.mean(dim=0) @ g, full)
        colour = plots.COLOURS.get(name, plots.COLOURS["other"])
        clouds[name] = (x, y, colour, f"{name}: {turned:.0f}°")
    plots.draw_cloud(clouds)


def draw_scores(norms, scores):
    """(rows,) |g|; {name: (rows,) scores}."""
    correlated = {}
    for name, score in scores.items():
        r = torch.corrcoef(torch.stack([norms, score]))[0, 1]
        correlated[f"{name}: correlation {r:.2f}"] = score
    plots.draw_scores(norms, correlated)


# ==== What was saved ====
def draw_guessing(arms, names):
    """The share of guesses, a line for each run: {arm: {seed: run}}."""
    lines = {}
    for name in names:
        rows = [[[point[0], point[3]] for point in run["curve"]] for run in arms[name].values()]
        steps, guesses = torch.tensor(rows, dtype=torch.float64).unbind(dim=2)
        lines[name] = (steps[0], guesses, plots.COLOURS[name.split(" ")[0]])
    plots.draw_guessing(lines)


def table_of_noise(here, saved):
    """The added noise of each score at half of the completions: {score: noise} of this notebook,
    and the means of the saved batches before training."""
    rows = [["digits, here", *(f"{value:.2f}" for value in here.values())]]
    for task, moments in saved.items():
        noises = noise.with_share(0.5, moments["after 0 steps"])
        rows.append([task, *(f"{value:.2f}" for value in noises)])
    return table(["noise added, half of the completions kept", *here], *rows)


def table_of_times(saved):
    """The time to two levels over grpo-skip's, of three scores of completions."""
    arms = {
        "random": "random (0, 0.7)",
        "`dppo` (0, 0.7)": analysis.PAPER,
        "our rule (0, 0.7)": analysis.OURS,
    }
    rows = []
    for task, levels in analysis.LEVELS.items():
        control = saved[task]["grpo-skip"]
        for level in levels:
            ratios = [
                analysis.time_ratio(level, "seconds", saved[task][arm], control)
                for arm in arms.values()
            ]
            rows.append([f"{task}, to {analysis.name_of(level)}", *map(analysis.cell, ratios)])
    return table(["task", *arms], *rows)
