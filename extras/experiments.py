"""What pruning is worth, measured.

    python extras/experiments.py time 8 grpo-skip    # one run: an experiment, a seed, an arm
    python extras/experiments.py time                # all its runs, two at a time, in their order
    python extras/experiments.py gather              # runs/experiments -> comparison.json
    python extras/experiments.py tables              # comparison.json -> RESULTS.md, DETAILS.md
    python extras/experiments.py picture             # comparison.json -> pruning.png, also dark

PLAN.md says what was decided before each experiment ran, RESULTS.md what came out. A run is kept in
runs/experiments, and an interrupted one resumes. Its numbers are printed beside the saved ones. Of
these, seconds depend on the machine, and all others on rounding errors in the starting model.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from extras.comparison import arms, results, runs, tables


def make_all(name):
    """All runs of an experiment, each in a process of its own, two at a time."""

    def make(seed, arm):
        command = [sys.executable, __file__, name, str(seed), arm]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        print(f"{name}, seed {seed}, {arm}: exit status {done.returncode}", flush=True)

    with ThreadPoolExecutor(max_workers=2) as pool:
        [*pool.map(make, *zip(*arms.runs_in_order(name)))]


def make_one(name, seed, arm):
    """One run, printed beside the saved one."""
    torch.set_num_threads(1)  # a process a core
    run = runs.make_run(name, seed, arm)
    saved = results.load().get(name, {}).get(arm, {}).get(str(seed))
    print("\n".join(results.compared(run, saved)))


def draw_picture():
    from extras.comparison import picture  # which needs matplotlib

    picture.draw_both(results.load())


COMMANDS = {
    "gather": lambda: print("\n".join(results.gather())),
    "tables": lambda: tables.write(results.load()),
    "picture": draw_picture,
}


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*arms.ARMS, *COMMANDS])
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("arm", nargs="?")
    chosen = parser.parse_args()
    if chosen.name in COMMANDS:
        COMMANDS[chosen.name]()
    elif chosen.seed is None:
        make_all(chosen.name)
    elif chosen.arm in arms.ARMS[chosen.name]:
        make_one(chosen.name, chosen.seed, chosen.arm)
    else:
        parser.error(f"{chosen.name} has the arms {'; '.join(arms.ARMS[chosen.name])}")


if __name__ == "__main__":
    main()
