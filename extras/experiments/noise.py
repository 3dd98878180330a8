"""What a score is worth: the noise that pruning completions adds to a step, by true gradients.

    python extras/experiments/noise.py              # measures all tasks -> noise.json
    python extras/experiments/noise.py "long text"  # one of them

A batch is rolled out, and no prompt is pruned. Let g_i be the gradient of the loss of completion i
alone, and w_i its weight. A rule adds the noise

    E|sum of (w_i - 1) g_i|^2 / sum of |g_i|^2,

where E is over the draws; 2,000 of them stand for it. If the gradients are orthogonal, this is
the sum of |g_i|^2 (1/pi_i - 1), over that of |g_i|^2.

At a given share, each score keeps the same number of completions. The paper's rule keeps a share of
its own, at which random is measured, too. Draws are made in two ways: in the order of dppo.py
(group by group, and by A within a group), and in a random one.
"""

import json
import sys
from collections import namedtuple
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import dppo
from extras.experiments import run, tasks
from extras.proportional import share_probabilities, surprise

SAVED = Path(__file__).with_name("noise.json")
SHARES = (0.5, 0.3, 0.2)  # of the completions with a gradient
# The scores, with their labels in table and picture.
SCORES = {"random": "random", "A": "|A|", "A times surprise": "|A| × surprise"}
SCORES |= {"gradient": "true |g|"}

# How many batches are measured before training and, if `steps` is not 0, after so many steps of
# grpo-skip; the number of prompts in a batch; and which gradients: of the parameters of every
# n-th layer (n = `layers`), so that they fit into memory, or of all parameters (0).
Setup = namedtuple("Setup", "batches steps prompts layers")
SETUPS = {
    "sums": Setup(batches=16, steps=240, prompts=32, layers=0),
    "digits": Setup(batches=16, steps=240, prompts=64, layers=0),
    "SmolLM2": Setup(batches=3, steps=0, prompts=8, layers=3),
    "long text": Setup(batches=3, steps=0, prompts=8, layers=3),
}


def gradients(task, sequences, A, layers, config):
    """(n,) A of n completions -> the gradient of the loss of each, alone and flat, one by one."""
    parts = task.model.model.layers[::layers] if layers else [task.model]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    for sequence, advantage in zip(sequences, A.tolist()):
        logprobs, _ = dppo.completion_logprobs(task.model, [sequence], [[0]], config.temperature)
        parts = torch.autograd.grad(-advantage * logprobs.mean(), parameters)
        yield torch.cat([part.flatten() for part in parts])


def products(rows_of_g):
    """A list of n gradients -> (n, n) float64 g_i . g_j."""
    gram = torch.zeros(len(rows_of_g), len(rows_of_g), dtype=torch.float64)
    for i, g in enumerate(rows_of_g):
        for j, other in enumerate(rows_of_g[: i + 1]):
            gram[i, j] = gram[j, i] = g @ other
    return gram


def added_noise(pi, gram, is_shuffled=False, number=2000):
    """(n,) pi, (n, n) g_i . g_j -> the noise that pruning adds, over that of the batch."""
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(len(pi))
    errors = torch.zeros(number, len(pi), dtype=torch.float64)
    for error in errors:
        if is_shuffled:
            order = torch.randperm(len(pi), generator=generator)
        error[order] = dppo.draw(pi[order], generator) - 1
    return (((errors @ gram) * errors).sum(dim=1).mean() / gram.trace()).item()


def measured(task, prompts, layers, config):
    """-> the noise of all scores in one batch of the (B,) prompts: {name: [in order, shuffled]} for
    the paper's rule and its share, and {name: {share: [in order, shuffled]}}."""
    w_q = torch.ones(len(prompts), dtype=torch.float64)
    rollout = dppo.roll_out(task, len(prompts), prompts, w_q, config)
    rows = torch.arange(rollout.A.numel()).view_as(rollout.A)
    rows = rows.gather(1, rollout.A.argsort(dim=1, stable=True)).flatten()
    rows = rows[rollout.A.flatten()[rows] != 0]
    sequences = [rollout.sequences[row] for row in rows]
    A = rollout.A.flatten()[rows]
    gram = products([*gradients(task, sequences, A, layers, config)])
    A = A.abs()
    factor = (surprise(rollout) / rollout.lengths).flatten()[rows]
    scores = (torch.ones_like(A), A, A * factor, gram.diagonal().sqrt())

    def both(pi):
        return [round(added_noise(pi, gram, is_shuffled), 4) for is_shuffled in (False, True)]

    pi = dppo.keep_probabilities(A, 0.7)
    share = pi.mean().item()
    result = {"n": len(rows), "paper's share": round(share, 3), "paper's rule": both(pi)}
    result["random, paper's share"] = both(torch.full_like(pi, share))
    for name, score in zip(SCORES, scores, strict=True):
        result[name] = {str(x): both(share_probabilities(score, x)) for x in SHARES}
    return result


def with_share(share, batches):
    """The mean over batches of the noise of each score, with this share of the completions kept, by
    draws in order."""
    return [sum(b[score][str(share)][0] for b in batches) / len(batches) for score in SCORES]


def measure(name):
    """Measures a task's batches, before and after training -> {moment: results of batches}."""
    setup = SETUPS[name]
    settings = {"max_completion_tokens": 96, "temperature": 1.0}  # of long text
    if name in run.EXPERIMENTS:
        settings = run.settings_of(name, 0, "grpo-skip")
    config = dppo.configure(**settings)
    task = tasks.TASKS[name](config)
    rule = dppo.GRPOSkip(config, task.train)
    optimizer = dppo.MasterAdam(task.model, config.learning_rate)
    record = {"step": 0, "candidates_so_far": 0}
    results = {}
    for steps in sorted({0, setup.steps}):
        while record["step"] < steps:
            record = dppo.make_step(task, rule, optimizer, record)
        results[f"after {steps} steps"] = []
        for batch in range(setup.batches):
            torch.manual_seed(batch)
            prompts = torch.randperm(len(task.train))[: setup.prompts]
            result = measured(task, prompts, setup.layers, config)
            if result["n"] > 0:  # else, no completion has a gradient
                results[f"after {steps} steps"].append(result)
            print(f"{name}, after {steps} steps, batch {batch}: {json.dumps(result)}", flush=True)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SETUPS:
        results = json.loads(SAVED.read_text()) | {name: measure(name)}
        SAVED.write_text(json.dumps(results) + "\n")
