"""The pictures of README and RESULTS.md, from runs.json and noise.json.

    python extras/experiments/picture.py

README's has a step of DPPO at the top and, below it, the time that three scores take, relative to
the control's. The other shows the noise that pruning completions adds. Each is drawn twice, for
light and for dark pages, and is legible if it is shown 500 pixels wide.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import dppo
from extras import plots
from extras.experiments import noise
from extras.experiments.analysis import LEVELS, MOST_SHORT, everything, name_of, time_ratio
from extras.notebook_tools import graded

HERE = Path(__file__).parent
PAGES = {"": ("white", "0.1"), "-dark": ("#0d1117", "#e6edf3")}  # page, text
# Arm: its label and the name of its colour.
SHOWN = {"random (0, 0.7)": ("at random", "grpo"), "dppo (0, 0.7)": ("dppo: |A|", "dppo")}
SHOWN["our rule (0, 0.7)"] = ("ours: |A| × surprise", "our rule")


def one_step():
    """A step with the built-in task -> (N,) pi of its candidates; (G, N) the state of each of their
    completions: 0 has no gradient, 1 is pruned, 2 is kept, and NaN is of a pruned prompt; (N,)
    whether a prompt is kept."""
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
    states = torch.full((config.group_size, N), math.nan)
    states[:, prompts] = ((rollout.A != 0).float() + (w_qi > 0)).T
    return rule.prompt_probabilities()[:N], states, ~states[0].isnan()


def draw_one_step(fig):
    plots.draw_step(fig, *one_step(), "dppo (0.7, 0.7): ")


def times_of(arms, levels):
    """-> the highest level that all scores reach, and {arm: its time to it over grpo-skip's}."""
    for level in levels:
        found = {x: time_ratio(level, "seconds", arms[x], arms["grpo-skip"]) for x in SHOWN}
        if max(ratio.short for ratio in found.values()) <= MOST_SHORT:
            highest = level, found
    return highest


def draw_times(fig, saved, colours):
    """The time to a level over grpo-skip's, with its 95% interval, on each task."""
    ax = fig.subplots()
    times = {name: times_of(saved[name], levels) for name, levels in LEVELS.items()}
    ax.axvline(1, color=colours["grpo-skip"], linewidth=3)
    for offset, (arm, (label, colour)) in enumerate(SHOWN.items()):
        style = {"color": colours[colour], "fmt": "o", "markersize": 13, "elinewidth": 4}
        for row, (_, found) in enumerate(times.values()):
            ratio = found[arm]
            ends = [[ratio.middle - ratio.low], [ratio.high - ratio.middle]]
            place = row + 0.25 * (offset - 1)
            ax.errorbar(ratio.middle, place, xerr=ends, label=label, **style)
            label = None  # only once
    labels = [f"{name},\nto {name_of(level)}" for name, (level, _) in times.items()]
    ax.set(yticks=range(len(labels)), yticklabels=labels)
    ax.set_title("CPU time to an accuracy, over grpo-skip's")
    ax.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=3)


def draw_noise(fig, results, colours):
    """The noise that pruning adds before training, by the share that is kept; the mean of a task's
    batches."""
    shares = noise.SHARES
    lines = [colours[name] for name in ("grpo", "dppo", "our rule", "grpo-skip")]
    for ax, (task, moments) in zip(fig.subplots(1, len(results), sharey=True), results.items()):
        noises = [noise.with_share(share, moments["after 0 steps"]) for share in shares]
        for label, colour, of_score in zip(noise.SCORES.values(), lines, zip(*noises)):
            ax.plot(shares, of_score, "o-", color=colour, linewidth=3, label=label)
        ax.set_title(task)
        ax.set(xlabel="share kept", xticks=shares, yscale="log", ylim=(0.008, 5))
    fig.axes[0].set(ylabel="added noise")
    fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def page(back, text, size, path, *parts):
    """Draws parts one above another, on a page of a given colour."""
    rc = {"text.color": text, "axes.edgecolor": text, "axes.labelcolor": text}
    rc |= {"xtick.color": text, "ytick.color": text, "font.size": 17, "axes.titlesize": 18}
    rc |= {f"{name}.facecolor": back for name in ("figure", "axes", "savefig")}
    with plots.plt.rc_context():
        plots.style()
        plots.plt.rcParams.update(rc)
        fig = plots.plt.figure(figsize=size)
        figures = np.atleast_1d(fig.subfigures(len(parts), 1))
        for part, (draw, *arguments) in zip(figures, parts):
            draw(part, *arguments)
        fig.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.25)
        plots.plt.close(fig)


def draw_all(folder=HERE.parent):
    saved = everything()
    for name, (back, text) in PAGES.items():
        colours = plots.COLOURS | {"grpo-skip": text}
        times = (draw_times, saved, colours)
        page(back, text, (9.6, 10), folder / f"pruning{name}.png", (draw_one_step,), times)
        noises = (draw_noise, saved["noise"], colours)
        page(back, text, (11, 5), folder / f"noise{name}.png", noises)


if __name__ == "__main__":
    draw_all()
