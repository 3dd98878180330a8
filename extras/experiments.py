"""What pruning is worth, measured.

    python extras/experiments.py time 8 grpo-skip    # one run: an experiment, a seed, an arm
    python extras/experiments.py time                # all its runs, two at a time, in their order

PLAN.md says what was decided before each experiment ran, RESULTS.md what came out. A run is kept in
runs/experiments, and an interrupted one resumes.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from extras.comparison import arms, runs


def make_all(name):
    """All runs of an experiment, each in a process of its own, two at a time."""

    def make(seed, arm):
        command = [sys.executable, __file__, name, str(seed), arm]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        print(f"{name}, seed {seed}, {arm}: exit status {done.returncode}", flush=True)

    with ThreadPoolExecutor(max_workers=2) as pool:
        [*pool.map(make, *zip(*arms.runs_in_order(name)))]


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*arms.ARMS])
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("arm", nargs="?")
    chosen = parser.parse_args()
    if chosen.seed is None:
        make_all(chosen.name)
    elif chosen.arm not in arms.ARMS[chosen.name]:
        parser.error(f"{chosen.name} has the arms {'; '.join(arms.ARMS[chosen.name])}")
    else:
        torch.set_num_threads(1)  # a process a core
        run = runs.make_run(chosen.name, chosen.seed, chosen.arm)
        for name, total in run["totals"].items():
            print(f"{name}: {total:,.8g}")
        for step, seconds, rollouts, generated, *means in run["curve"]:
            print(
                f"step {step}: {seconds:.1f} s, {rollouts:.1f} s in rollouts, {generated:,}", means
            )


if __name__ == "__main__":
    main()
