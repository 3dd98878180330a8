"""The tasks on which methods are compared: digits, sums, guess or pass, SmolLM2, and long text.

*Digits* is the task that dppo.py has built in.

*Sums* was not made for pruning: two numbers from 0 to 999, whose sum is written with its last digit
first, so that a small model can add from left to right ("57+68=" has the answer "521"). The model
is a small Qwen3, as for digits. It imitates right answers until at least half of its own are right,
which is looked at every 25 updates.

*Guess or pass* shows what the weights 1/pi are for. The digits model also gets letters. Their right
answer is a digit that is drawn anew each time, and demonstrations have taught the model to answer
with a random digit or "?", each half of the time. A digit is right with probability 0.1, and "?" is
worth 0.2. So a guess pays less on average, although a right guess pays most.

*SmolLM2* is a language model with 135 million parameters that was pretrained elsewhere. It is asked
for sums, differences and products. It imitates right answers until it gets at least 0.4 of the sums
of two-digit numbers right.

*Long text* is for measuring gradients only (noise.py). SmolLM2 answers questions of GSM8K with up
to 96 tokens, and rewards are drawn by coins.

The environment variables SMOLLM2 and GSM8K may name a folder with the model and a file with the
questions. Otherwise, they come from the Hub. Starting models are made once, and kept where
torch.hub keeps its own.
"""

import inspect
import os
import random
import string
import zlib
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

import dppo

SMOLLM2 = os.environ.get("SMOLLM2", "HuggingFaceTB/SmolLM2-135M-Instruct")
GSM8K = os.environ.get("GSM8K", "openai/gsm8k:main:test")


# ==== Imitation ====
def demonstration(example, answer, tokenizer):
    """A sequence to imitate. (Zeros stand for its log-probabilities, which only a metric uses.)"""
    ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return dppo.Sequence(example["prompt_ids"], ids, torch.zeros(len(ids)))


def imitate(model, optimizer, sequences):
    """An update that makes sequences likelier: a policy gradient on completions of advantage 1."""
    n = len(sequences)
    shares = torch.tensor([1 / (n * len(s.completion)) for s in sequences])
    inputs = (sequences, torch.ones(n), shares, None, None, dppo.Config())
    dppo.train_step(model, optimizer, *inputs)


def taught(task, config, name, level, learning_rate, draw, size):
    """Trains the task's model to imitate right answers, until its accuracy reaches a level -> the
    task. How many steps that takes differs between machines, as it depends on rounding errors."""
    recipe = inspect.getsource(taught) + inspect.getsource(draw)
    path = Path(torch.hub.get_dir(), f"dppo-{name}-{zlib.crc32(recipe.encode())}.pt")
    if path.exists():
        task.model.load_state_dict(torch.load(path))
        return task
    config = replace(config, seed=0)  # the same model, whichever run needs it first
    path.parent.mkdir(parents=True, exist_ok=True)
    optimizer = dppo.MasterAdam(task.model, learning_rate)
    rng = random.Random("warm0")
    bar = tqdm(desc=f"the starting model of {name}, once only", disable=None)
    while dppo.evaluate(task, config)[0]["accuracy"] < level:
        for _ in range(25):
            examples = [draw(rng, task.tokenizer, config) for _ in range(size)]
            batch = [demonstration(x, x["answer"], task.tokenizer) for x in examples]
            imitate(task.model, optimizer, batch)
            bar.update()
    dppo.save_whole(path, task.model.state_dict(), f"unfinished-{os.getpid()}")
    return task


def different(how_many, draw, *arguments):
    """`how_many` examples with different prompts."""
    examples = {}
    while len(examples) < how_many:
        example = draw(*arguments)
        examples.setdefault(str(example["prompt"]), example)
    return [*examples.values()]


def example_of(prompt, answer, tokenizer):
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_ids": ids, "answer": answer}


# ==== Sums ====
def draw_sum(rng, tokenizer, config):
    """An example: the prompt "57+68=" has the answer "521"."""
    a, b = rng.randrange(1000), rng.randrange(1000)
    return example_of(f"{a}+{b}=", str(a + b)[::-1], tokenizer)


def load_sums(config):
    """1,024 sums to train, and 256 others to evaluate."""
    sorting = dppo.load_task(dppo.configure())
    rng = random.Random("data")
    examples = different(1024 + 256, draw_sum, rng, sorting.tokenizer, config)
    torch.manual_seed(0)
    model = type(sorting.model)(sorting.model.config).eval()  # with parameters of its own
    evals = {"held out": examples[1024:]}
    task = dppo.Task(examples[:1024], evals, sorting.tokenizer, dppo.exact, model)
    return taught(task, config, "sums", 0.5, 2e-3, draw_sum, 64)


# ==== Guess or pass ====
def draw_letters(rng, tokenizer):
    """An example of letters, which is answered with a guess or a pass."""
    letters = rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))
    return example_of("".join(letters) + "=", "unknown", tokenizer)


def shown(rng, tokenizer):
    """A demonstration: letters with a pass or any digit, or digits as shown to the digits model."""
    if rng.random() < 0.5:
        example = draw_letters(rng, tokenizer)
        return demonstration(example, rng.choice(["?", rng.choice(string.digits)]), tokenizer)
    name, noise = rng.choice([("easy", 0.0), ("middle", 0.2)])
    example = dppo.sorting_example(name, rng, tokenizer)
    answer = ""
    for digit in example["answer"]:
        answer += rng.choice(string.digits) if rng.random() < noise else digit
    return demonstration(example, answer, tokenizer)


def guess_reward(prompts, completions, answer, **columns):
    """For letters, 0.2 for a pass and 1 for the right digit, which is drawn anew each time; for
    digits, 1 if they are sorted. Evaluations count guesses and passes instead."""
    rewards = []
    for completion, right in zip(completions, answer):
        text = completion.strip()
        worth = 0.2 if text == "?" else text == random.choice(string.digits)
        counted = {"unknown": worth, "guesses": text in [*string.digits], "passes": text == "?"}
        rewards.append(float(counted.get(right, text == right)))
    return rewards


def load_guess_or_pass(config):
    """Digits to sort, letters, and the built-in model after 100 batches of demonstrations."""
    task = dppo.load_task(config)
    rng = random.Random(1)
    train = [dppo.sorting_example("easy", rng, task.tokenizer) for _ in range(300)]
    train += [dppo.sorting_example("middle", rng, task.tokenizer) for _ in range(300)]
    train += [draw_letters(rng, task.tokenizer) for _ in range(424)]
    random.Random(0).shuffle(train)
    unknown = [draw_letters(rng, task.tokenizer) for _ in range(64)]
    evals = {}
    for kind in ("guesses", "passes"):
        evals[kind] = [example | {"answer": kind} for example in unknown]
    evals["right"] = [dppo.sorting_example("middle", rng, task.tokenizer) for _ in range(64)]
    optimizer = dppo.MasterAdam(task.model, 5e-4)
    for step in range(100):
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - step / 100)
        imitate(task.model, optimizer, [shown(rng, task.tokenizer) for _ in range(48)])
    return replace(task, train=train, evals=evals, reward=guess_reward)


# ==== SmolLM2 ====
# {kind: (how many of 128 training prompts, lowest and highest number, sign)}
ARITHMETIC = {
    "one digit": (24, 1, 9, "+"),
    "two digits": (40, 10, 99, "+"),
    "differences": (40, 10, 99, "-"),
    "products": (24, 2, 9, "*"),
}
SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def draw_arithmetic(rng, tokenizer, config, kind=None):
    """An example: the question "What is 36 + 49?" has the answer "85"."""
    _, low, high, sign = ARITHMETIC[kind or rng.choice([*ARITHMETIC])]
    a, b = rng.randint(low, high), rng.randint(low, high)
    question = f"What is {a} {sign} {b}?"
    prompt = [{"role": "system", "content": "Answer with the number only."}]
    prompt += [{"role": "user", "content": question}]
    ids = dppo.encode_prompt(prompt, tokenizer, config.system_prompt)
    return {"prompt": prompt, "prompt_ids": ids, "answer": str(SIGNS[sign](a, b))}


def pretrained():
    """-> SmolLM2's tokenizer and model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    return transformers.AutoTokenizer.from_pretrained(SMOLLM2), model.eval()


def load_smollm2(config):
    """128 prompts of four kinds to train, and 96 sums of two-digit numbers to evaluate."""
    tokenizer, model = pretrained()
    rng = random.Random("data")
    train = []
    for kind, (size, *_) in ARITHMETIC.items():
        train += different(size, draw_arithmetic, rng, tokenizer, config, kind)
    random.Random(0).shuffle(train)
    sums = different(136, draw_arithmetic, rng, tokenizer, config, "two digits")
    held_out = [example for example in sums if example not in train][:96]
    task = dppo.Task(train, {"held out": held_out}, tokenizer, dppo.exact, model)
    return taught(task, config, "smollm2", 0.4, 1e-5, draw_arithmetic, 16)


# ==== Long text ====
def coin_reward(prompts, completions, **columns):
    """1 or 0 by chance; 1 with a probability that is drawn once for each prompt."""
    return [float(torch.rand(()) < random.Random(str(prompt)).random()) for prompt in prompts]


def load_long_text(config):
    """Questions of GSM8K."""
    tokenizer, model = pretrained()
    examples = dppo.load_examples(GSM8K, "test", config, tokenizer)
    return dppo.Task(examples, {}, tokenizer, coin_reward, model)


TASKS = {"digits": dppo.load_task, "sums": load_sums, "guess or pass": load_guess_or_pass}
TASKS |= {"SmolLM2": load_smollm2, "long text": load_long_text}
