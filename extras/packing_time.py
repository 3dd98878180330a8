"""Does packing save time? Training steps with and without --no_packing, on the same sequences.

    python extras/packing_time.py                # digits: the embedded task's rollouts
    python extras/packing_time.py MODEL          # a model, and answers as long as GSM8K's solutions

One process and one thread make both kinds of step in turn. Compared are the processor seconds of
each pair: the geometric mean of their ratios, with its 95% t-interval. The density of a kind is the
share of the tokens in its slots that are real. What comes out is printed, and added to
comparison.json as "packing".

Digits are trained as `grpo` does (all 256 completions of a step), and as `dppo` does (those that
it keeps of 512 prompts' rollouts). For a model, 24 answers have lengths drawn from a log-normal
distribution with the mean and standard deviation of GSM8K's solutions (121 and 54 tokens), limited
to 20 to 400, and prompts have 60 tokens, as GSM8K's questions on average. (The model does not write
them, because random tokens take as long.) PLAN.md says what was expected.
"""

import math
import random
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo
from extras.comparison import results
from extras.comparison.statistics import interval_of_ratios
from extras.sums import demonstrated

PAIRS = 8


def density(sequences, config):
    """The share of tokens that are real, in the slots of all these sequences."""
    indices = range(len(sequences))
    micro_batches = dppo.pack_micro_batches(sequences, indices, config)
    places = sum(dppo.lay_out(sequences, slots)[..., 0].numel() for slots in micro_batches)
    return sum(len(s.prompt) + len(s.completion) for s in sequences) / places


def timed(model, sequences, advantages, config):
    """-> processor seconds of a training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shares = torch.ones_like(advantages) / advantages.numel()
    inputs = (sequences, advantages, shares, None, None, config)
    started_at = time.process_time()
    dppo.train_step(model, optimizer, *inputs)
    return time.process_time() - started_at


def compare(name, model, sequences, advantages, pairs=PAIRS):
    """Pairs of steps, of which the first only warms up -> what is saved."""
    configs = [dppo.Config(no_packing=alone) for alone in (False, True)]
    seconds = []
    for _ in range(pairs + 1):
        seconds.append([timed(model, sequences, advantages, config) for config in configs])
    seconds = [[round(value, 4) for value in pair] for pair in seconds[1:]]
    densities = [round(density(sequences, config), 3) for config in configs]
    made = {"completions": len(sequences), "density packed, alone": densities}
    made["seconds packed, alone"] = seconds
    ratio = interval_of_ratios([packed / alone for packed, alone in seconds])
    print(f"{name}: {made}; time packed over alone: {ratio}", flush=True)
    return {name: made}


def digits():
    config = dppo.configure()
    task = dppo.load_task(config)
    torch.manual_seed(0)
    examples = task.train[:512]
    sequences, rewards = dppo.sample_and_grade(task, examples, 8, config)
    A = dppo.group_advantages(rewards)
    rollout = dppo.Rollout(torch.arange(512), torch.ones(512), sequences, rewards, None, A)
    left = dppo.DPPO(config, examples).completion_probabilities(rollout)
    kept = left.flatten().bernoulli().nonzero()[:, 0].tolist()
    result = compare("digits, as grpo trains", task.model, sequences[:256], torch.randn(256))
    kept = [sequences[i] for i in kept]
    return result | compare("digits, as dppo trains", task.model, kept, torch.randn(len(kept)))


def answers(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rng = random.Random(0)
    vocabulary = range(1000, 20000)
    variance = math.log(1 + (54 / 121) ** 2)  # of the logarithm, and its mean:
    middle = math.log(121) - variance / 2
    sequences = []
    while len(sequences) < 24:
        length = round(rng.lognormvariate(middle, math.sqrt(variance)))
        if 20 <= length <= 400:
            ids = rng.choices(vocabulary, k=60 + length)
            sequences.append(demonstrated(ids[:60], ids[60:]))
    name = f"{model.config.model_type}, {model.num_parameters() // 10**6}M"
    return compare(name, model, sequences, torch.randn(24))


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = answers(sys.argv[1]) if sys.argv[1:] else digits()
    saved = results.load()
    saved.setdefault("packing", {}).update(made)
    results.write(saved)
