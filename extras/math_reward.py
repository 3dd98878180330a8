"""A reward for answers in LaTeX, by math-verify (pip install math-verify).

    python dppo.py --reward extras.math_reward:reward --model ... --dataset ...

RESULTS.md has such a command for MATH, under "The paper".
"""

from math_verify import parse, verify

from dppo import text_of


def reward(prompts, completions, answer, **columns):
    """1 if a completion means the same as its answer, else 0; None if the answer cannot be read."""
    rewards = []
    for completion, gold in zip(completions, map(str, answer)):
        # Without a box, math-verify would misread some answers, such as x^2 + 1.
        boxed = gold if "\\boxed" in gold else f"$\\boxed{{{gold}}}$"
        wanted = parse(boxed)
        found = parse(text_of(completion))
        rewards.append(float(verify(wanted, found)) if wanted else None)
    return rewards
