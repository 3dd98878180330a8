"""The arms of each experiment: the settings by which runs differ, and those that they share."""

from extras import sums

# ==== Methods ====
PROPORTIONAL = "extras.proportional:Proportional"


def rates(prompts, completions, method="dppo", **more):
    """Settings of a method with these prune rates."""
    both = {"prompt_prune_rate": prompts, "completion_prune_rate": completions}
    return {"method": method} | both | more


def ours(prompts, completions, **more):
    return rates(prompts, completions, PROPORTIONAL, **more)


def rival(name, **more):
    return rates(0.7, 0.7, f"extras.rivals:{name}", **more)


GRPO = {"grpo": {"method": "grpo"}, "grpo-skip": {"method": "grpo-skip"}}

# ==== Time: digits, 15 epochs (PLAN.md, "Time") ====
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

# ==== Sums: the second task, 15 epochs (PLAN.md, "Sums") ====
SUMS = GRPO | {
    "dppo (0.7, 0.7)": rates(0.7, 0.7),
    "dppo (0.7, 0)": rates(0.7, 0.0),
    "dppo (0, 0.7)": rates(0.0, 0.7),
    "dppo (0, 0.9)": rates(0.0, 0.9),
    "our rule (0.95, 0), 20 prompts": ours(0.95, 0.0, prompts_per_step=20),
}

ARMS = {"time": TIME, "sums": SUMS}
EPOCHS = {"epochs": 15.0, "eval_every": 0, "save_every": 0}
SETTINGS = {"time": EPOCHS, "sums": EPOCHS | sums.SETTINGS}

# A run of the first arm starts with the memory of a run of the second, of the seed before its own.
MEMORY_OF = {"our rule (0.95, 0), 20 prompts, with memory": "our rule (0.95, 0), 20 prompts"}
SEEDS = {"time": range(8, 16), "sums": range(8)}


def runs_in_order(name):
    """[(seed, arm)] of an experiment. Seeds are the outer loop, so that every arm meets the same
    conditions. Runs that are made only for their memory come first."""
    seeds = SEEDS[name]
    arms = ARMS[name]
    first = [(seeds[0] - 1, source) for arm, source in MEMORY_OF.items() if arm in arms]
    return first + [(seed, arm) for seed in seeds for arm in arms]
