"""A task that shows what the weights are for: a model that cannot know an answer may guess or pass.

The small Qwen3 is also asked to sort letters, which it cannot, after demonstrations that answer
with a digit or "?", half and half. A digit is right with probability 0.1, and "?" is worth 0.2. So
a guess pays less on average, although a right guess pays most.
"""

import random
import string
from dataclasses import replace

import dppo
from extras.sums import demonstrated, imitate

SETTINGS = {"steps": 100, "eval_every": 10, "save_every": 0, "eval_samples": 8}
SETTINGS |= {"objective": "dr_grpo", "learning_rate": 1e-4, "temperature": 1.0}


def letters(rng, tokenizer):
    """An example of letters to sort, which is answered with a guess or a pass."""
    prompt = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) + "="
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_ids": ids, "answer": "unknown"}


def demonstration(rng, tokenizer):
    """A pass or any digit for letters; or digits, as the embedded model has been shown them."""
    if rng.random() < 0.5:
        example = letters(rng, tokenizer)
        answer = rng.choice(["?", rng.choice(string.digits)])
    else:
        name, noise = rng.choice([("easy", 0.0), ("middle", 0.2)])
        example = dppo.sorting_example(name, rng, tokenizer)
        answer = ""
        for digit in example["answer"]:
            answer += rng.choice(string.digits) if rng.random() < noise else digit
    return demonstrated(example["prompt_ids"], tokenizer.encode(answer))


def reward(prompts, completions, answer, **columns):
    """To letters, 0.2 for a pass and 1 for the right digit, which is drawn anew each time, and to
    digits, 1 if they are sorted. Evaluations count guesses and passes instead."""
    rewards = []
    for completion, right in zip(completions, answer):
        text = completion.strip()
        worth = 0.2 if text == "?" else text == random.choice(string.digits)
        counted = {"unknown": worth, "guesses": text in [*string.digits], "passes": text == "?"}
        rewards.append(float(counted.get(right, text == right)))
    return rewards


def train_on_demonstrations(task, rng):
    """Trains the task's model on 100 batches of demonstrations."""
    optimizer = dppo.MasterAdam(task.model, 5e-4)
    for step in range(100):
        sequences = [demonstration(rng, task.tokenizer) for _ in range(48)]
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - step / 100)
        imitate(task.model, optimizer, sequences)


def load_task(config):
    """Digits and letters to sort, and the embedded model after the demonstrations."""
    task = dppo.load_task(config)
    rng = random.Random(1)
    train = [dppo.sorting_example("easy", rng, task.tokenizer) for _ in range(300)]
    train += [dppo.sorting_example("middle", rng, task.tokenizer) for _ in range(300)]
    train += [letters(rng, task.tokenizer) for _ in range(424)]
    random.Random(0).shuffle(train)
    unknown = [letters(rng, task.tokenizer) for _ in range(64)]
    evals = {}
    for kind in ("guesses", "passes"):
        evals[kind] = [example | {"answer": kind} for example in unknown]
    evals["right"] = [dppo.sorting_example("middle", rng, task.tokenizer) for _ in range(64)]
    task = replace(task, train=train, evals=evals, reward=reward)
    train_on_demonstrations(task, rng)
    return task
