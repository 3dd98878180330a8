"""The pictures of the notebook and of README.

Each function draws one picture from numbers that it is given. Colours are those of Okabe and Ito,
which colour-blind readers tell apart, and labels are as large as a notebook's text.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

STATES = {"no gradient (A = 0)": "0.82", "pruned": "#A6CEE8", "kept": "#0072B2"}
COLOURS = {"grpo": "0.55", "grpo-skip": "0.15", "dppo": "#D55E00", "our rule": "#009E73"}
COLOURS |= {"Uniform": "#56B4E9", "Unweighted": "#CC79A7", "CPPO": "#E69F00", "Literal": "#0072B2"}
COLOURS |= {"GRESO": "#56B4E9"}


def style():
    """For a figure that a browser shows at its own size."""
    plt.rc("figure", dpi=100, figsize=(8.4, 3.8))
    plt.rc("figure.constrained_layout", use=True)
    plt.rc("font", size=12)
    plt.rc("axes", titleweight="bold", titlesize=13, titlelocation="left")
    plt.rc("axes.spines", top=False, right=False)
    plt.rc("legend", frameon=False)


def table(rows):
    from IPython.display import Markdown  # which experiments.py does without

    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return Markdown("\n".join(f"| {' | '.join(row)} |" for row in rows))


def name_of(arm):
    """The name that a saved arm or a rule has in pictures, and its rates."""
    name, _, rates = arm.partition(" (")
    return {"dppo-proportional": "our rule", "Proportional": "our rule"}.get(name, name), rates


def draw_step(fig, pi, states, told=""):
    """A step: above, each candidate's pi as a bar, with the weight of those that were kept; below,
    the completions of these, as columns of `states`: 0 no gradient, 1 pruned, 2 kept. (N,) pi, NaN
    in the (G, N) states of a prompt that is not kept."""
    kept = ~states[0].isnan()
    above, below = fig.subplots(2, 1, sharex=True, height_ratios=[3, 5])
    place = torch.arange(len(pi)) + 0.5
    for name, those in (("pruned", ~kept), ("kept", kept)):
        above.bar(place[those], pi[those], color=STATES[name], width=0.9)
    for q in (kept & (pi < 1)).nonzero()[:, 0].tolist():
        text = f"{1 / pi[q]:.1f}"
        above.text(q + 0.6, pi[q] + 0.08, text, ha="center", fontsize="small", rotation=90)
    above.set(ylabel="π", yticks=[0, 1], ylim=(0, 1.15))
    above.set_title(f"{told}{len(pi)} candidate prompts, {int(kept.sum())} rolled out")
    below.pcolormesh(states, cmap=ListedColormap([*STATES.values()]), vmin=0, vmax=2, ec="white")
    trained = int((states == 2).sum())
    below.set_title(f"their {states[:, kept].numel()} completions, {trained} trained")
    below.set(xticks=[], yticks=[], xlim=(0, len(pi)), ylim=(len(states), 0), frame_on=False)
    patches = [Patch(color=colour) for colour in STATES.values()]
    fig.legend(patches, STATES, loc="outside lower center", ncols=3)


def draw_learning(curves, saved):
    """Accuracy against completions generated: runs, and beside them faint ones of other seeds."""
    fig, ax = plt.subplots()
    for name, curve in curves.items():
        for other in saved.get(name, []):
            x, _, y = zip(*other)
            ax.plot(x, y, color=COLOURS[name], linewidth=0.7, alpha=0.4)
        x, _, y = zip(*curve)
        ax.plot(x, y, "o-", color=COLOURS[name], markersize=4, linewidth=2.5, label=name)
    ax.set(xlabel="completions generated", ylabel="accuracy, held-out prompts", ylim=(0.4, 0.9))
    ax.set_title("120 steps of each; faint lines: other seeds")
    ax.legend(loc="lower right")


def draw_convergence(angles):
    """Degrees off the full gradient of the mean of n draws, for each rule, on logarithmic axes."""
    fig, ax = plt.subplots(figsize=(8.4, 4.2))
    for name, values in angles.items():
        n = 2 ** torch.arange(len(values))
        ax.loglog(n, values, "o-", color=COLOURS[name], markersize=4, label=name)
        if name == "dppo":
            ax.loglog(n, values[0] / n.sqrt(), ":", color="0.5", label="1/√n")
    ax.set(xlabel="steps in the mean", ylabel="degrees off")
    ax.set_title("What is unbiased converges, what is biased does not")
    fig.legend(loc="outside right upper")


def draw_rules(scores, rules, points):
    """pi against the score: lines {name: (pi, dashes)} and, as dots, what is in the batch."""
    fig, ax = plt.subplots()
    for name, (pi, dashes) in rules.items():
        ax.plot(scores, pi, dashes, color=COLOURS[name.partition(",")[0]], label=name)
    for name, (size, pi) in points.items():
        ax.plot(size, pi, "o", color=COLOURS[name], markersize=4)
    ax.set(xlabel="score", ylabel="π, probability of being kept", ylim=(0, 1.05))
    ax.set_title("A threshold, or a line (r = 0.7)")
    ax.legend(loc="lower right")


def draw_variance(curves):
    """Added variance against the share that is kept: {name: (colour, dashes, share, variance)}."""
    fig, ax = plt.subplots()
    for name, (colour, dashes, share, variance) in curves.items():
        ax.plot(share, variance, dashes, color=colour, label=name)
    ax.set(xlabel="share of the completions that is kept", ylabel="added variance", ylim=(0, 1.5))
    ax.set_title("What pruning completions costs")
    ax.legend(loc="upper right")


def draw_guesses(runs):
    """The share of guesses in runs with weights, and in runs without: two bundles."""
    fig, ax = plt.subplots()
    for name, of_seed in runs.items():
        curves = torch.tensor([run["curve"] for run in of_seed.values()])[:, :, [0, 2]]
        biased = name in ("CPPO", "dppo without weights")
        for curve in curves:
            ax.plot(*curve.T, color="#D55E00" if biased else "#0072B2", linewidth=0.8, alpha=0.6)
    ax.text(50, 0.8, "without weights (dppo without them, CPPO):\n16 runs", color="#D55E00")
    ax.text(50, 0.12, "with weights (grpo, dppo, our rule):\n24 runs", color="#0072B2")
    ax.set(xlabel="step", ylabel="share of guesses", xlim=(0, 100), ylim=(-0.03, 1.03))
    ax.set_title("Without weights, the model learns to guess")


def draw_rollouts(numbers, places, teaches, classes):
    """Each rollout of a prompt as a mark; classes: {name: (middle, text)}."""
    fig, ax = plt.subplots(figsize=(8.4, 4.4))
    colours = ListedColormap([STATES["no gradient (A = 0)"], COLOURS["our rule"]])
    drawn = ax.scatter(numbers, places, c=teaches, s=10, marker="s", cmap=colours)
    for middle, text in classes.values():
        ax.text(123, middle, text, va="center")
    ax.set(xlabel="step", xlim=(0, 121), ylabel="prompts, by number of digits", yticks=[])
    ax.set_title("Prompts that teach are rolled out often, the others seldom")
    names = ["no gradient (A = 0)", "a gradient"]
    fig.legend(drawn.legend_elements()[0], names, loc="outside lower center", ncols=2)


def draw_slots(lengths, kinds, longest):
    """Sequences in slots, as coloured pieces; kinds: {title: slots}."""
    fig, axes = plt.subplots(1, len(kinds), figsize=(8.4, 3.6), sharey=True)
    for ax, (title, slots) in zip(axes, kinds.items()):
        for row, slot in enumerate(slots):
            left = 0
            for place, i in enumerate(slot):
                colour = ("#0072B2", "#E69F00")[place % 2]
                ax.barh(row, lengths[i], left=left, color=colour, height=0.85)
                left += lengths[i]
        ax.set(title=title, xlabel="tokens", xlim=(0, longest))
    axes[0].set(ylabel="slot")
    axes[0].invert_yaxis()


def draw_mask(lengths):
    """What each token of a slot may attend to: itself and what came before it in its sequence."""
    fig, ax = plt.subplots(figsize=(3.4, 3.4))
    blocks = [torch.ones(n, n).tril() * (1 + place % 2) for place, n in enumerate(lengths)]
    colours = ListedColormap(["white", "#0072B2", "#E69F00"])
    ax.imshow(torch.block_diag(*blocks), cmap=colours, vmin=0, vmax=2)
    ax.set(xlabel="attends to token", ylabel="token", xticks=[], yticks=[])
    ax.set_title("One slot's mask")


def draw_results(analysis):
    """Speed against accuracy, with their intervals, of each arm of "epochs"."""
    apart = {"dppo-proportional (0.9, 0)": (-6, 26), "dppo (0.5, 0.5)": (6, -18)}  # from others
    fig, ax = plt.subplots(figsize=(8.4, 4.4))
    for arm, told in analysis.items():
        name, rates = name_of(arm)
        speed = told.get("speed-up over grpo", [1, 1, 1])
        loss = told.get("minus grpo", [0, 0, 0])
        bars = {"xerr": [[speed[0] - speed[1]], [speed[2] - speed[0]]]}
        bars["yerr"] = [[loss[0] - loss[1]], [loss[2] - loss[0]]]
        hollow = {"markerfacecolor": "white"} if "history" in arm else {}
        ax.errorbar(speed[0], loss[0], fmt="o", color=COLOURS[name], capsize=3, **bars, **hollow)
        text = f"{name} ({rates}".replace("history", "memory") if rates else name
        offset = apart.get(arm, (6, 6))
        ax.annotate(text, (speed[0], loss[0]), offset, textcoords="offset points")
    ax.axhline(0, color="0.7", linewidth=1, zorder=0)
    ax.set(xlabel="times as fast as grpo", ylabel="accuracy minus grpo's", xlim=(0, 14))
    ax.set_title("15 epochs on digits, eight seeds, 95% intervals")
