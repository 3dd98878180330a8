"""A second task to compare methods on, which was not made for pruning: sums of two numbers.

The two numbers are drawn uniformly from 0 to 999, and the answer is written with its last digit
first, so that a small model can add from left to right: the prompt "57+68=" has the answer "521".
The model is a small Qwen3 like the embedded task's. It imitates right answers until it gives half
of those to the held-out prompts. How many steps that takes differs between machines, because the
accuracy rises steeply and depends on rounding errors.

    python extras/sums.py    # trains the starting model, which is kept, and says how good it is
"""

import random
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo

START = Path(torch.hub.get_dir(), "dppo-sums-1.pt")  # count up if the recipe changes
SETTINGS = {"temperature": 0.7, "max_completion_tokens": 8, "reward": "exact"}
SETTINGS |= {"learning_rate": 2e-4, "max_grad_norm": 10.0}  # the best that grpo-skip had


def sum_example(rng, tokenizer):
    """An example: the prompt "57+68=" has the answer "521"."""
    a, b = rng.randrange(1000), rng.randrange(1000)
    prompt = f"{a}+{b}="
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_ids": ids, "answer": str(a + b)[::-1]}


def demonstrated(prompt, completion):
    """A sequence to imitate. Nobody sampled it, so its log-probabilities are made up; train_step
    only reports how far they are off."""
    return dppo.Sequence(prompt, completion, torch.zeros(len(completion)))


def imitate(model, optimizer, sequences):
    """A step that makes sequences more likely: a policy gradient on completions of advantage 1."""
    n = len(sequences)
    shares = torch.tensor([1 / (n * len(s.completion)) for s in sequences])
    inputs = (sequences, torch.ones(n), shares, None, None, dppo.Config())
    dppo.train_step(model, optimizer, *inputs)


def prepare(task, config):
    """Trains the task's model until it is right in half of the held-out answers, or loads it."""
    if START.exists():
        task.model.load_state_dict(torch.load(START))
        return
    optimizer = dppo.MasterAdam(task.model, 2e-3)
    rng = random.Random("warm0")
    bar = tqdm(desc="the starting model of sums, once only", disable=None)
    accuracy = 0.0
    while accuracy < 0.5:
        for _ in range(25):
            sequences = []
            for _ in range(64):
                example = sum_example(rng, task.tokenizer)
                ids = task.tokenizer.encode(example["answer"])
                sequences.append(demonstrated(example["prompt_ids"], ids))
            imitate(task.model, optimizer, sequences)
        bar.update(25)
        accuracy = dppo.evaluate(task, config)["accuracy"]
    dppo.save_whole(START, task.model.state_dict())


def load_task(config):
    """1,024 sums to train, and 256 others to evaluate."""
    sorting = dppo.load_task(dppo.configure())
    tokenizer = sorting.tokenizer
    rng = random.Random("data")
    examples = {}
    while len(examples) < 1024 + 256:
        example = sum_example(rng, tokenizer)
        examples.setdefault(example["prompt"], example)  # each sum once
    examples = list(examples.values())
    torch.manual_seed(0)
    model = type(sorting.model)(sorting.model.config).eval()  # with weights of its own
    evals = {"held out": examples[1024:]}
    reward = dppo.find("reward", config.reward, dppo.REWARDS)
    task = dppo.Task(examples[:1024], evals, tokenizer, reward, model)
    prepare(task, config)
    dppo.check_sampling(task, config)
    return task


def main():
    torch.set_num_threads(1)
    config = dppo.configure(**SETTINGS)
    task = load_task(config)
    torch.manual_seed(0)
    _, rewards = dppo.sample_and_grade(task, task.train[:128], 8, config)
    uniform = (rewards == rewards[:, :1]).all(dim=1).double().mean()
    accuracy = dppo.evaluate(task, config)["accuracy"]
    print(f"accuracy {accuracy:.2f}; {uniform:.0%} of the groups are all right or all wrong")


if __name__ == "__main__":
    main()
