"""Does packing save time? Training steps with and without --no_packing, on the same sequences.

    python extras/packing_time.py                # digits: the embedded task's rollouts
    python extras/packing_time.py MODEL          # a model, and answers as long as GSM8K's solutions

One process and one thread make both kinds of step in turn, and what is compared are processor
seconds: of each pair the ratio, of these the mean with its 95% t-interval, by logarithms. Beside it
stand the densities, the share of tokens that are real. What comes out is printed, and added to
comparison.json as "packing".

Digits are trained as `grpo` does (all 256 completions of a step), and as `dppo` does (those that
are left of 512 prompts' rollouts). For a model, 24 answers have lengths drawn from a log-normal
distribution with the mean and standard deviation of GSM8K's solutions (121 and 54 tokens), cut to
20 to 400, and prompts as many tokens as its questions have on average, 60. (It is not asked to
write them, as random tokens take as long.)

Expected beforehand: packing pays on neither. On digits, a slot of 128 tokens holds four sequences
or more, so that attention costs more than without; for a model, padding wastes half of the tokens,
and what that saves, a dense mask takes back in part: a ratio of 0.6 to 0.9 of the time.
"""

import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo
from extras.experiments import RESULTS, ratios, write_results

PAIRS = 8


def timed(model, sequences, advantages, no_packing):
    """-> processor seconds of a training step, and its density."""
    config = dppo.Config(no_packing=no_packing, temperature=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shares = torch.ones_like(advantages) / advantages.numel()
    inputs = (sequences, advantages, shares, None, None, config)
    started_at = time.process_time()
    metrics = dppo.train_step(model, optimizer, *inputs)
    return time.process_time() - started_at, metrics["packing_density"]


def compare(name, model, sequences, advantages):
    """Pairs of steps, of which the first only warms up -> what is saved."""
    pairs = []
    for _ in range(PAIRS + 1):
        pairs.append([timed(model, sequences, advantages, alone) for alone in (False, True)])
    densities = [round(density, 3) for _, density in pairs[0]]
    seconds = [(round(packed, 4), round(alone, 4)) for (packed, _), (alone, _) in pairs[1:]]
    told = {"completions": len(sequences), "density packed, alone": densities}
    told["seconds packed, alone"] = seconds
    told["time packed over alone"] = ratios([packed / alone for packed, alone in seconds])
    print(name, told, flush=True)
    return {name: told}


def digits():
    config = dppo.Config()
    task = dppo.load_task(config)
    torch.manual_seed(0)
    sequences, rewards, _ = dppo.rollout(task, task.train[:512], 8, config)
    left = dppo.DPPO(config, 512).completion_probabilities(dppo.group_advantages(rewards), None)
    kept = (left.flatten().bernoulli() > 0).nonzero()[:, 0].tolist()
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
            sequences.append(dppo.Sequence(ids[:60], ids[60:]))
    name = f"{model.config.model_type}, {model.num_parameters() // 10**6}M"
    return compare(name, model, sequences, torch.randn(24))


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = answers(sys.argv[1]) if sys.argv[1:] else digits()
    results = json.loads(RESULTS.read_text())
    results["experiments"].setdefault("packing", {}).setdefault("analysis", {}).update(made)
    write_results(results)
