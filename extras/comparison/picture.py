"""The picture of README: a step of DPPO, and accuracy against processor seconds.

It is drawn twice, for light and for dark pages, and legible if it is shown 500 pixels wide.
"""

import math
from pathlib import Path

import torch

import dppo
from extras import plots
from extras.comparison.statistics import (
    T_QUANTILES,
    accuracies_at,
    mean_of,
    seconds_at_the_end,
    times_of,
)

PATHS = {"light": Path(__file__).resolve().parent.parent / "pruning.png"}
PATHS["dark"] = PATHS["light"].with_name("pruning-dark.png")
PAGES = {"light": ("white", "0.1"), "dark": ("#0d1117", "#e6edf3")}  # page, text

LAST = 85  # processor seconds that are shown

# Arm: the name of its colour, its label, and where that stands (seconds, accuracy).
SHOWN = {
    "grpo": ("grpo", "grpo", (62, 0.775)),
    "grpo-skip": ("grpo-skip", "grpo-skip", (60, 0.895)),
    "dppo (0.7, 0.7)": ("dppo", "dppo (0.7, 0.7)", (38, 0.70)),
    "our rule (0.95, 0), 20 prompts": ("our rule", "our rule (0.95, 0)", (17, 0.895)),
}


# ==== A step ====
def graded(prompts, rewards, w_q=None):
    """(B,) prompts, (B, G) rewards, (B,) w_q -> a Rollout without its sequences."""
    w_q = torch.ones(len(prompts)).double() if w_q is None else w_q
    return dppo.Rollout(prompts, w_q, None, rewards, None, dppo.group_advantages(rewards))


def one_step():
    """A step with the embedded task -> pi of its candidates; the state of each of their
    completions: 0 has no gradient, 1 is pruned, 2 is kept, and -1 is of a pruned prompt."""
    config = dppo.configure(prompts_per_step=24)
    task = dppo.load_task(config)
    torch.manual_seed(0)
    examples = task.train[:64]
    _, first = dppo.sample_and_grade(task, examples, config.group_size, config)
    _, rewards = dppo.sample_and_grade(task, examples, config.group_size, config)
    rule = dppo.DPPO(config, examples)
    rule.remember(graded(torch.arange(64), first))

    generator = torch.Generator().manual_seed(0)
    N, prompts, w_q = rule.prune_prompts(torch.arange(64), generator)
    rollout = graded(prompts, rewards[prompts], w_q)
    w_qi = rule.prune_completions(rollout, generator)
    states = torch.full((N, config.group_size), -1)
    states[prompts] = (rollout.A != 0).long() + (w_qi > 0).long()
    pi = [round(value, 4) for value in rule.prompt_probabilities()[:N].tolist()]
    return {"pi": pi, "states": states.tolist()}


def draw_one_step(fig, step):
    states = torch.tensor(step["states"]).double().T  # (G, N)
    states = states.where(states >= 0, math.nan)
    plots.draw_step(fig, torch.tensor(step["pi"]), states, "dppo (0.7, 0.7): ")


# ==== Accuracy against seconds ====
def band(runs):
    """Processor seconds, until the seeds' mean end -> the mean curve, and its t-interval."""
    end = mean_of(seconds_at_the_end, runs)
    times = [seconds for seconds in times_of(runs) if seconds < end] + [end]
    accuracies = accuracies_at(runs, times)
    middle = accuracies.mean(dim=0)
    half = T_QUANTILES[len(runs)] * accuracies.std(dim=0) / math.sqrt(len(runs))
    return torch.tensor(times), middle, middle - half, middle + half


def draw_curves(fig, runs, text_colour):
    colours = plots.COLOURS | {"grpo-skip": text_colour}
    ax = fig.subplots()
    for arm, (name, label, place) in SHOWN.items():
        times, middle, low, high = band(runs[arm])
        ax.fill_between(times, low, high, color=colours[name], alpha=0.18, linewidth=0)
        ax.plot(times, middle, color=colours[name], linewidth=3.5)
        ax.plot(times[-1], middle[-1], "o", color=colours[name], markersize=11)
        line = {"arrowstyle": "-", "color": colours[name]}  # from the label to the end of its curve
        leader = {"arrowprops": line if times[-1] < LAST else None, "annotation_clip": False}
        style = {"color": colours[name], "fontweight": "bold"}
        ax.annotate(label, (times[-1], middle[-1]), place, **style, **leader)
    seeds = len(runs["grpo-skip"])
    ax.set_title(f"Sorting digits, 15 epochs: mean of {seeds} seeds, 95%")
    ax.set(xlabel="processor seconds", ylabel="accuracy, held-out prompts")
    ax.set(xlim=(0, LAST), ylim=(0.45, 0.92))


def draw(results, page, path):
    """Draws the picture for one kind of page."""
    back, text = PAGES[page]
    rc = {"text.color": text, "axes.edgecolor": text, "axes.labelcolor": text}
    rc |= {"xtick.color": text, "ytick.color": text}
    rc |= {f"{name}.facecolor": back for name in ("figure", "axes", "savefig")}
    with plots.plt.rc_context():
        plots.style()
        plots.plt.rcParams.update(rc | {"font.size": 17, "axes.titlesize": 18})
        fig = plots.plt.figure(figsize=(9.6, 10))
        above, below = fig.subfigures(2, 1, height_ratios=[1, 1.2])
        draw_one_step(above, results["one step"])
        draw_curves(below, results["time"], text)
        fig.savefig(path, format="png", dpi=120, bbox_inches="tight", pad_inches=0.25)
        plots.plt.close(fig)


def draw_both(results, paths=PATHS):
    for page, path in paths.items():
        draw(results, page, path)
