"""How pictures are drawn, in the notebook and in experiments/picture.py.

To plot the curves of two runs without this file:

    import pandas
    from matplotlib import pyplot
    for run in ("runs/mine", "runs/other"):
        log = pandas.read_json(f"{run}/metrics.jsonl", lines=True)
        hours = log.seconds.fillna(0).cumsum() / 3600
        evaluated = log.accuracy.notna()
        pyplot.plot(hours[evaluated], log.accuracy[evaluated], label=run)
    pyplot.legend()
    pyplot.savefig("accuracy.png")

Each function draws one picture from numbers that it is given. Most colours are those of Okabe and
Ito, which colour-blind readers can tell apart, and labels are as large as a notebook's text.
"""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

STATES = {"no gradient (A = 0)": "0.82", "pruned": "#A6CEE8", "kept": "#0072B2"}
# One colour for a method, wherever it is drawn; "other" is for a reader's own. (On a dark page,
# grpo-skip is as light as text.)
COLOURS = {"grpo": "0.55", "grpo-skip": "0.15", "dppo": "#D55E00", "our rule": "#009E73"}
COLOURS |= {"unweighted": "#7B3294", "all weights 1": "#7B3294"}
COLOURS |= {"Literal": "#0072B2", "other": "#CC79A7"}


def style():
    """For a figure that a browser shows at its own size."""
    plt.rc("figure", dpi=100, figsize=(8.4, 3.8))
    plt.rc("figure.constrained_layout", use=True)
    plt.rc("font", size=12)
    plt.rc("axes", titleweight="bold", titlesize=13, titlelocation="left")
    plt.rc("axes.spines", top=False, right=False)
    plt.rc("legend", frameon=False)


def draw_step(fig, pi, states, kept, told=""):
    """A step: above, each candidate's pi as a bar, with the weight of those that were kept; below,
    their completions, as columns of `states`: 0 no gradient, 1 pruned, 2 kept. (N,) pi; (G, N)
    states; (N,) whether a prompt is kept. The groups of the others are drawn in pale colours."""
    above, below = fig.subplots(2, 1, sharex=True, height_ratios=[3, 5])
    place = torch.arange(len(pi)) + 0.5
    for name, those in (("pruned", ~kept), ("kept", kept)):
        above.bar(place[those], pi[those], color=STATES[name], width=0.9)
    for q in (kept & (pi < 1)).nonzero()[:, 0].tolist():
        text = f"{1 / pi[q]:.1f}"
        above.text(q + 0.6, pi[q] + 0.08, text, ha="center", fontsize="small", rotation=90)
    above.set(ylabel="π", yticks=[0, 1], ylim=(0, 1.15))
    above.set_title(f"{told}{len(pi)} candidate prompts, {int(kept.sum())} rolled out")
    style = {"cmap": ListedColormap([*STATES.values()]), "vmin": 0, "vmax": 2}
    style["ec"] = plt.rcParams["figure.facecolor"]
    for those, alpha in ((kept, 1.0), (~kept, 0.4)):
        below.pcolormesh(states.double().masked_fill(~those, math.nan), alpha=alpha, **style)
    trained = int((states == 2).sum())
    below.set_title(f"their {states[:, kept].numel()} completions, {trained} trained")
    below.set(xticks=[], yticks=[], xlim=(0, len(pi)), ylim=(len(states), 0), frame_on=False)
    patches = [Patch(color=colour) for colour in STATES.values()]
    fig.legend(patches, STATES, loc="outside lower center", ncols=3)


def draw_rollouts(numbers, places, teaches, classes, title):
    """Each rollout of a prompt as a mark; classes: {name: (middle, text)}."""
    fig, ax = plt.subplots(figsize=(8.4, 4.4))
    colours = ListedColormap([STATES["no gradient (A = 0)"], COLOURS["our rule"]])
    drawn = ax.scatter(numbers, places, c=teaches, s=10, marker="s", cmap=colours)
    for middle, text in classes.values():
        ax.text(1.03 * numbers[-1], middle, text, va="center")
    ax.set(xlabel="step", xlim=(0, 1.01 * numbers[-1]))
    ax.set(ylabel="prompts, by number of digits", yticks=[])
    ax.set_title(title)
    names = ["equal rewards", "different rewards"]
    fig.legend(drawn.legend_elements()[0], names, loc="outside lower center", ncols=2)


# ==== The notebook's pictures ====
def label_ends(ax, ends, gap):
    """Writes names beside the right ends of lines, at least a gap apart: {name: (x, y, colour)}.
    A thin line leads from an end to its name."""
    lowest = -1e9
    beside = 1.03 * max(x for x, _, _ in ends.values())
    for name, (x, y, colour) in sorted(ends.items(), key=lambda end: end[1][1]):
        lowest = max(y, lowest + gap)
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5)}
        line |= {"shrinkA": 0, "shrinkB": 0}
        style = {"color": colour, "va": "center", "annotation_clip": False}
        ax.annotate(name, (x, y), (beside, lowest), arrowprops=line, **style)


def draw_training(curves):
    """Accuracy against completions generated: {name: ([(completions, accuracy)], colour)}."""
    fig, ax = plt.subplots()
    ends = {}
    for name, (curve, colour) in curves.items():
        x, y = zip(*curve)
        ax.plot(x, y, "o-", color=colour, markersize=4, linewidth=2)
        ends[name] = (x[-1], y[-1], colour)
    label_ends(ax, ends, 0.03)
    ax.set(xlabel="completions generated", ylabel="accuracy, held-out prompts")


def draw_cloud(clouds):
    """Steps on one batch as dots, and their mean as a large one: {name: (x, y, colour, label)} with
    (n,) x, y. The axes show every dot of the first cloud."""
    fig, ax = plt.subplots(figsize=(8.4, 4.8))
    x, y, *_ = next(iter(clouds.values()))
    low, high = torch.stack([x.min(), y.min()]), torch.stack([x.max(), y.max()])
    for x, y, colour, label in clouds.values():
        mean = torch.stack([x.mean(), y.mean()])
        low, high = low.minimum(mean), high.maximum(mean)
        ax.plot(x, y, "o", color=colour, markersize=5, alpha=0.25, mec="none", zorder=1)
        ax.plot(*mean, "o", color=colour, markersize=13, mec="white", zorder=2, label=label)
    ax.plot(1, 0, "*", color="black", markersize=11, mec="white", zorder=3, label="full gradient")
    pad = 0.06 * (high - low)
    (left, bottom), (right, top) = (low - pad).tolist(), (high + pad).tolist()
    ax.set(xlim=(left, right), ylim=(bottom, top))
    ax.set(xlabel="along the full gradient, whose length is 1")
    ax.set(ylabel="sideways, towards Literal's mean")
    ax.set_aspect("equal")
    fig.legend(loc="outside upper center", ncols=len(clouds) + 1)


def draw_guessing(runs):
    """The share of guesses, a line for each run: {name: ((steps,) x, (runs, steps) y, colour)}."""
    fig, ax = plt.subplots()
    ends = {}
    for name, (x, y, colour) in runs.items():
        ax.plot(x, y.T, color=colour, linewidth=0.8, alpha=0.6)
        ends[name] = (x[-1].item(), y[:, -1].mean().item(), colour)
    label_ends(ax, ends, 0.09)
    ax.set(xlabel="step", ylabel="share of guesses", ylim=(-0.03, 1.03))


def draw_scores(norms, scores):
    """Each completion as a dot, a panel for each score: (n,) |g|, {title: (n,) scores}."""
    fig, axes = plt.subplots(1, len(scores), sharey=True)
    for ax, (title, score) in zip(axes, scores.items()):
        ax.loglog(score, norms, "o", color=COLOURS["our rule"], markersize=5, alpha=0.4, mec="none")
        ax.set_title(title)
        ax.set(xlabel="score")
        ax.minorticks_off()
    axes[0].set(ylabel="norm of the gradient, |g|")
