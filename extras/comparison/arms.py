"""The experiments: their arms, the settings of each arm, and those that all arms share.

The two numbers behind a method are its prune rates, of prompts and of completions.
"""

from itertools import product

from extras import guess_or_pass, sums

# ==== Methods ====
PROPORTIONAL = "extras.proportional:Proportional"
WITH_MEMORY = ", with memory"  # the end of the name of an arm that starts with another run's memory


def rates(prompts, completions, method="dppo", **more):
    """Settings of a method with these prune rates."""
    both = {"prompt_prune_rate": prompts, "completion_prune_rate": completions}
    return {"method": method} | both | more


def ours(prompts, completions, **more):
    return rates(prompts, completions, PROPORTIONAL, **more)


def rival(name, **more):
    return rates(0.7, 0.7, f"extras.rivals:{name}", **more)


SKIP = {"grpo-skip": {"method": "grpo-skip"}}
GRPO = {"grpo": {"method": "grpo"}} | SKIP

# ==== Arms, by experiment; PLAN.md has a section on each ====
TIME = GRPO | {
    "dppo (0.7, 0.7)": rates(0.7, 0.7),
    "dppo (0.7, 0.7), 13 prompts": rates(0.7, 0.7, prompts_per_step=13),
    "dppo (0.7, 0)": rates(0.7, 0.0),
    "dppo (0, 0.7)": rates(0.0, 0.7),
    "our rule (0.9, 0)": ours(0.9, 0.0),
    "our rule (0.95, 0), 20 prompts": ours(0.95, 0.0, prompts_per_step=20),
    "our rule (0.95, 0), 20 prompts, with memory": ours(0.95, 0.0, prompts_per_step=20),
    "Literal (0.7, 0.7)": rival("Literal"),
    "CPPO, 32 prompts": rival("CPPO"),
    "CPPO, 128 prompts": rival("CPPO", prompts_per_step=128),
    "GRESO": rival("GRESO"),
    "dppo (0.7, 0.7), all weights 1": rival("WeightOne"),
}
CONTROLS = SKIP | {
    "grpo-skip, 20 prompts": {"method": "grpo-skip", "prompts_per_step": 20},
    "our rule (0.9, 0)": ours(0.9, 0.0),
    "our rule (0.95, 0), 20 prompts": ours(0.95, 0.0, prompts_per_step=20),
}
SUMS = GRPO | {
    "dppo (0.7, 0.7)": rates(0.7, 0.7),
    "dppo (0.7, 0)": rates(0.7, 0.0),
    "dppo (0, 0.7)": rates(0.0, 0.7),
    "dppo (0, 0.9)": rates(0.0, 0.9),
    "our rule (0.95, 0), 20 prompts": ours(0.95, 0.0, prompts_per_step=20),
}
RATES = SKIP | {
    "dppo (0.5, 0.5)": rates(0.5, 0.5),
    "dppo (0.7, 0.7)": rates(0.7, 0.7),
    "dppo (0.9, 0.9)": rates(0.9, 0.9),
}
OURS = {
    "our rule (0.9, 0)": ours(0.9, 0.0),
    "our rule (0.9, 0), with memory": ours(0.9, 0.0),
}
DIGITS = GRPO | {
    "grpo-skip, 17 prompts": {"method": "grpo-skip", "prompts_per_step": 17},
    "dppo (0.7, 0.7)": rates(0.7, 0.7),
    "our rule (0.9, 0.7)": ours(0.9, 0.7),
}
GUESSES = {
    "grpo": {"method": "grpo"},
    "dppo (0.7, 0.7)": rates(0.7, 0.7),
    "our rule (0.7, 0.7)": ours(0.7, 0.7),
    "dppo (0.7, 0.7), unweighted": rival("Unweighted"),
    "CPPO, 32 prompts": rival("CPPO"),
}
ARMS = {"time": TIME, "time, controls": CONTROLS, "sums": SUMS, "rates": RATES}
ARMS |= {"digits": DIGITS | OURS, "digits, new seeds": SKIP | OURS, "guess or pass": GUESSES}

EPOCHS = {"epochs": 15.0, "eval_every": 0, "save_every": 0}
STEPS = {"steps": 250, "eval_every": 25, "save_every": 0}
SETTINGS = {"time": EPOCHS, "time, controls": EPOCHS, "rates": EPOCHS}
SETTINGS |= {"sums": EPOCHS | sums.SETTINGS}
SETTINGS |= {"digits": STEPS, "digits, new seeds": STEPS, "guess or pass": guess_or_pass.SETTINGS}

SEEDS = {"time": range(8, 16), "time, controls": range(8, 16), "sums": range(8), "rates": range(8)}
SEEDS |= {"digits": range(8), "digits, new seeds": range(8, 16), "guess or pass": range(8)}


# ==== Runs ====
def memory_of(name, seed, arm):
    """(seed, arm) of the run with whose memory a run starts, or None. It is a run without memory,
    of the seed before, or in the older experiments of the next of their eight seeds."""
    if not arm.endswith(WITH_MEMORY):
        return None
    other = seed - 1 if name == "time" else seed // 8 * 8 + (seed + 1) % 8
    return other, arm.removesuffix(WITH_MEMORY)


def runs_in_order(name):
    """[(seed, arm)] of an experiment. Seeds are the outer loop, so that every arm meets the same
    conditions. Runs that are made only for their memory come first, and those that would start
    with the memory of a later run come last."""
    order, waiting = [], []
    for run in product(SEEDS[name], ARMS[name]):
        source = memory_of(name, *run)
        if source in order or source is None:
            order.append(run)
        elif source[0] in SEEDS[name]:
            waiting.append(run)
        else:
            order = [source, *order, run]
    return order + waiting
