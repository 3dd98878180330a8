"""Dynamic Pruning Policy Optimization (DPPO) in one file: GRPO with unbiased pruning.

After "Unbiased Dynamic Pruning for Efficient Group-Based Policy Optimization" (Zhu et al., 2026, arXiv 2603.04135).
GRPO samples a group of completions for every prompt and trains on all of them, though many teach nothing. DPPO leaves
out prompts before the rollout and completions after it, and divides what it keeps by the probability of being kept, so
that the expected gradient is that of full GRPO. The rest is packed densely into slots of a fixed length.

    python dppo.py                  trains a small embedded model, offline, in a minute or two on a laptop's CPU
    python dppo.py --compare grpo,grpo-skip,cppo,greso,dppo,dppo-optimal
                                    every method from the same start, and a table
    python dppo.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --dataset_config main \\
        --chat_template_kwargs '{"enable_thinking": false}' --eval_dataset openai/gsm8k:main:test

With the paper in the other hand, read from group_advantages, at the end of 4 Rollout, through 5 Pruning, 6 Packing and
7 Update to training_loop, at the end of 8 Training: the method, with visit and gather before it. 1 Config, 2 Rewards,
3 Task and the checkpoints are what every such script needs; 9 Comparison measures what the paper claims, 10 Benchmark
speed. Under torchrun (--nproc-per-node=N) processes share rollouts and training, and all make the same draws.
Symbols: N candidate prompts of a step, B of them rolled out, G completions of each, M completions trained, T their
tokens, A advantages, pi = 1 - P the probability of being kept, w = 1/pi the importance weight. "Our reading" marks what
the paper leaves open and this file decides.
"""

import copy
import hashlib
import importlib
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from argparse import SUPPRESS
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from inspect import signature
from itertools import accumulate, count, islice, pairwise, product, zip_longest
from pathlib import Path
from statistics import median, median_low
from typing import Literal

import torch
import torch.distributed as dist
import transformers
from datasets import disable_progress_bars, load_dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.generation import ContinuousBatchingConfig
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.modeling_layers import GradientCheckpointingLayer

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICE_NAME = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # of rollouts and forward passes; see make_optimizer
# From Ampere and torch 2.12 on, when it began to take a window and a scale.
VARLEN = (DEVICE == "cuda" and varlen_attn is not None and "window_size" in signature(varlen_attn).parameters
          and torch.cuda.get_device_capability() >= (8, 0))


class InputError(ValueError):
    """Unusable input from the user; the message says what and why in one line."""


def attempt(what: str, call: Callable):
    """call(), with whatever it raises raised as a one-line InputError: for other people's files, code and servers."""
    try:
        return call()
    except Exception as error:
        while error.__cause__:
            error = error.__cause__
        raise InputError(f"{what}: {type(error).__name__} {' '.join(str(error).split())}"[:400]) from error


# ---- 1. Config -------------------------------------------------------------------------------------------------------

LEAST = dict(group_size=2, prompts_per_step=1, inner_epochs=1, steps=0, warmup_steps=0, learning_rate=1e-12, beta=0,
             temperature=1e-3, max_grad_norm=1e-12, clip_low=0, clip_high=0, max_prompt_tokens=1, eval_prompts=0,
             max_completion_tokens=1, eval_samples=1, rollout_batch_size=1, slot_tokens=0, pack_window=0,
             micro_batch_tokens=1, seed=0, eval_every=0, compare_seeds=1, save_every=0)
# What a field's default depends on: the embedded model is a thousand times smaller than the smallest Qwen.
EMBEDDED_DEFAULTS = dict(learning_rate=5e-5, max_completion_tokens=22, temperature=0.7, reward="exact")
HUB_DEFAULTS = dict(learning_rate=1e-6, max_completion_tokens=1024, temperature=1.0, reward="gsm8k")
CLIPPING = dict(grpo=(0.2, 0.2), dr_grpo=(0.2, 0.2), dapo=(0.2, 0.28), gspo=(3e-4, 4e-4))  # clip_low, clip_high
METHODS = ("grpo", "grpo-skip", "cppo", "greso", "dppo", "dppo-optimal")
BIASED = ("cppo", "greso")  # they weigh what they keep by 1 and divide by how many that is


@dataclass
class Config:
    """Every setting of a run. Raises InputError for values that cannot work."""

    method: Literal[METHODS] = HfArg(default="dppo", help="what is pruned, and how; see 5 Pruning")
    objective: Literal[tuple(CLIPPING)] = HfArg(default="grpo", help="advantages, normalisation, ratio; see 7 Update")
    prompt_prune_rate: float = HfArg(default=None, help="r_q, the fraction pruned of low-scored prompts; 0.7, "
                                     "dppo-optimal: 0.9")
    completion_prune_rate: float = HfArg(default=0.7, help="r_o, as r_q of completions; cppo: of all")
    compare: str = HfArg(default="", help=f"methods to run and compare in a table, such as {','.join(METHODS)}")
    compare_seeds: int = HfArg(default=3, help="with --compare: runs of each method, from --seed on")
    benchmark: bool = HfArg(default=False, help="measure speed and memory in place of training; with --model but no "
                            "--dataset, on random weights and lengths like GSM8K's")

    model: str = HfArg(default="", help="causal LM on the Hub or in a folder; empty: the embedded task")
    dataset: str = HfArg(default="", help="on the Hub, a folder, or a .json, .jsonl or .parquet file")
    dataset_config: str = HfArg(default="", help="the Hub dataset's configuration, such as main")
    dataset_split: str = HfArg(default="train", help="the split to train on")
    prompt_column: str = HfArg(default="", help="empty: the first of prompt, question, problem")
    answer_column: str = HfArg(default="", help="empty: the first of answer, solution, reward_model.ground_truth")
    system_prompt: str = HfArg(default="", help="put before every prompt")
    chat_template_kwargs: str = HfArg(default="{}", help='JSON object, such as {"enable_thinking": false}')
    reward: str = HfArg(default=None, help="exact, gsm8k, boxed, package.module:function; embedded: exact, else gsm8k")
    max_prompt_tokens: int = HfArg(default=512, help="longer prompts are left out, and counted")

    eval_dataset: str = HfArg(default="", help="path, path:split or path:config:split, by commas; empty: hold some out")
    eval_prompts: int = HfArg(default=256, help="prompts of each evaluation set, at most")
    eval_samples: int = HfArg(default=4, help="k of avg@k and pass@k")
    eval_every: int = HfArg(default=0, help="steps between evaluations; 0: before and after; --compare: 20 times")

    steps: int = HfArg(default=300, help="rollouts to train on; 0 only evaluates")
    prompts_per_step: int = HfArg(default=32, help="B, prompts rolled out in a step, at most; cppo, greso: more")
    group_size: int = HfArg(default=8, help="G, completions of each prompt")
    inner_epochs: int = HfArg(default=1, help="updates on each rollout")
    learning_rate: float = HfArg(default=None, help="constant after the warm-up; embedded: 5e-5, else 1e-6")
    warmup_steps: int = HfArg(default=10, help="steps in which the learning rate rises linearly")
    max_grad_norm: float = HfArg(default=1.0, help="the gradient is clipped to this norm")
    clip_low: float = HfArg(default=None, help="the ratio is clipped below 1 - clip_low; 0.2, gspo: 3e-4")
    clip_high: float = HfArg(default=None, help="the ratio is clipped above 1 + clip_high; 0.2, dapo: 0.28, gspo: 4e-4")
    beta: float = HfArg(default=0.0, help="weight of the KL divergence from the initial model")

    temperature: float = HfArg(default=None, help="of rollouts, evaluation and training; embedded: 0.7, else 1")
    max_completion_tokens: int = HfArg(default=None, help="completions are cut here; embedded: 22, else 1024")
    rollout_batch_size: int = HfArg(default=256, help="sequences in a call of generate, at most")
    rollout_cache: Literal["plain", "dynamic", "static", "paged"] = HfArg(
        default="dynamic", help="plain: generate() as it is; static: compiled on CUDA; paged: continuous batching")
    attention: Literal["auto", "varlen", "flex_attention", "sdpa"] = HfArg(
        default="auto", help="of packed slots: varlen and flex skip what lies between sequences; auto: varlen on CUDA")
    gradient_checkpointing: bool = HfArg(default=False, help="layers are computed again in the backward pass: less "
                                         "memory, a third more work")
    slot_tokens: int = HfArg(default=0, help="capacity of a slot; 0: the longest sequence, varlen, flex: a micro-batch")
    pack_window: int = HfArg(default=64, help="sequences among which packing looks for one that fits; 0: a slot each")
    micro_batch_tokens: int = HfArg(default=16384, help="tokens in a forward and backward pass, at most")

    seed: int = HfArg(default=0, help="of the prompts' order, the rollouts and the draws")
    output_dir: str = HfArg(default="", help="the run's own folder; empty: a new one under runs/")
    save_every: int = HfArg(default=0, help="steps between checkpoints; 0: only when interrupted")
    resume: bool = HfArg(default=False, help="go on from the newest checkpoint in --output_dir, if there is one")
    overwrite: bool = HfArg(default=False, help="replace the run in --output_dir")
    trust_remote_code: bool = HfArg(default=False, help="run the code that comes with --model, if it has some")

    def __post_init__(self):
        low, high = CLIPPING[self.objective]
        defaults = dict(clip_low=low, clip_high=high, prompt_prune_rate=0.9 if self.method == "dppo-optimal" else 0.7)
        for name, value in (defaults | (HUB_DEFAULTS if self.model else EMBEDDED_DEFAULTS)).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.attention == "auto":
            self.attention = "varlen" if VARLEN else "sdpa"
        for name, least in LEAST.items():
            if not least <= getattr(self, name) < 2 ** 32:
                raise InputError(f"--{name} must be at least {least} and below 2^32, got {getattr(self, name)}")
        for name in ("prompt_prune_rate", "completion_prune_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"--{name} must lie in [0, 1), got {getattr(self, name)}")
        for name in ("dataset", "dataset_config", "prompt_column", "answer_column", "system_prompt", "eval_dataset"):
            if getattr(self, name) and not self.model:
                raise InputError(f"--{name} needs --model; without it, the embedded model and task are trained")
        if self.model and not self.dataset and not self.benchmark:
            raise InputError("--model needs --dataset")
        if self.slot_tokens > self.micro_batch_tokens:
            raise InputError(f"--micro_batch_tokens must hold a slot, --slot_tokens {self.slot_tokens}")
        if (self.compare or self.benchmark) and (WORLD > 1 or self.resume):
            raise InputError("--compare and --benchmark run in one process, not under torchrun, and do not --resume")
        if self.resume and not self.output_dir:
            raise InputError("--resume needs the --output_dir of the run to go on with")
        if self.compare:
            if not {"grpo"} <= set(self.compare.split(",")) <= set(METHODS):
                raise InputError(f"--compare takes methods by commas, grpo among them, of {', '.join(METHODS)}")
            self.eval_every = self.eval_every or max(1, math.ceil(self.steps / 20))
            if self.steps < 3 * self.eval_every:
                raise InputError("--compare needs 3 evaluations of each run: more --steps, or a smaller --eval_every")
        attempt("--chat_template_kwargs must be a JSON object", lambda: dict(**json.loads(self.chat_template_kwargs)))


# ---- 2. Rewards: f(prompts, completions, **columns) -> list[float | None], as in TRL; None is "not gradable" ---------

NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\$-?)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
                    r"(?:[eE][+-]?[0-9]+)?")
UNITS = (r"\\(?:text|mbox|mathrm)\{[^{}]*\}|\s(?:[cmk]?m|in|inch|inches|feet|foot|ft|miles?|degrees?|dollars?|cents?|"
         r"units?|hours?|minutes?|seconds?|days?)")


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion: a string, or for chat prompts a list of one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def to_number(text: str) -> Decimal | str:
    """Decimal takes 5,000 digits, which int() refuses, and 1e999999, inf for float(); what it refuses stays text."""
    try:
        return Decimal(re.sub(r"[$,]", "", text))
    except InvalidOperation:
        return text


def gsm8k_number(text: str) -> Decimal | str | None:
    """The first number after the last ####, else the last number of the text, else None."""
    text = text.replace("\N{MINUS SIGN}", "-")
    numbers = NUMBER.findall(text)
    marked = NUMBER.search(text, text.rfind("####")) if "####" in text else None
    return to_number(marked[0] if marked else numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    """The inside of the last \\boxed{...}, nested braces included; None if there is none or it is never closed."""
    start = max((match.end() for match in re.finditer(r"\\boxed\s*\{", text)), default=len(text))
    depth = 1
    for token in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(token[0], 0)  # \{ and \} are characters, not braces
        if depth == 0:
            return text[start:start + token.start()]


def normalise_latex(text: str) -> Decimal | str:
    """A number, or one spelling of what differs in spacing, bracket sizes, kinds of fraction, units or a final dot."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").rstrip(". ")
    text = re.sub(rf"(?<=[0-9}}])\s*(?:{UNITS})(?:\^\{{?[0-9]\}}?)?$", "", text)
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(\\\\)|\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|\\q?quad|\\?[$%]|\^\{?\\circ\}?|[\s~°]", r"\1", text)
    text = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", re.sub(r"\\[dt]frac", r"\\frac", text))
    text = re.sub(r"\^\{(\w)\}", r"^\1", re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text))
    text = re.sub(r"^(-?)([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}", text)
    return to_number(text) if NUMBER.fullmatch(text) else text


def exact_reward(prompts, completions, answer, **columns) -> list[float | None]:
    """1 where the completion is the answer, white space at its ends aside."""
    return [None if a is None else float(completion_text(c).strip() == str(a).strip())
            for c, a in zip(completions, answer)]


def gsm8k_reward(prompts, completions, answer, **columns) -> list[float | None]:
    """1 where the gsm8k_number is the answer's; None where the answer is neither a number nor marks one with ####."""
    golds = [gsm8k_number(a) if "####" in a or NUMBER.fullmatch(a.strip(" .%")) else None for a in map(str, answer)]
    return [None if g is None else float(gsm8k_number(completion_text(c)) == g) for c, g in zip(completions, golds)]


def boxed_reward(prompts, completions, answer, **columns) -> list[float | None]:
    """1 where the last \\boxed{...} is the answer, or what the answer boxes, normalised; None without an answer."""
    golds = ["" if a is None else normalise_latex(last_boxed(str(a)) or str(a)) for a in answer]
    return [None if g == "" else float(normalise_latex(last_boxed(completion_text(c)) or "") == g)
            for c, g in zip(completions, golds)]


REWARDS = {"exact": exact_reward, "gsm8k": gsm8k_reward, "boxed": boxed_reward}


def load_reward(name: str) -> Callable:
    """One of the rewards above by name, or any function as package.module:function. Raises InputError."""
    module, _, function = name.partition(":")
    sys.path.append(os.getcwd())
    return REWARDS.get(name) or attempt(f"--reward {name}: neither {', '.join(REWARDS)} nor package.module:function",
                                        lambda: getattr(importlib.import_module(module), function))


# ---- 3. Task ---------------------------------------------------------------------------------------------------------

@dataclass
class Task:
    """What a run works on. An example is a dict: prompt (text or chat messages), prompt_ids, the dataset's columns."""

    train: list[dict]
    evals: dict[str, list[dict]]
    tokenizer: transformers.PreTrainedTokenizerBase
    reward: Callable
    model: transformers.PreTrainedModel = None


def load_task(config: Config) -> Task:
    """The user's data and model, or the embedded ones. Faults of the data show before a model is loaded: InputError."""
    reward = load_reward(config.reward)
    train, evals, tokenizer = load_data(config) if config.model else sorting_data(config)
    task = Task(train, {name: examples for name, examples in evals.items() if examples}, tokenizer, reward)
    longest = max(len(e["prompt_ids"]) for e in sum(task.evals.values(), task.train)) + config.max_completion_tokens
    for name in ("slot_tokens", "micro_batch_tokens"):
        if 0 < getattr(config, name) < longest:
            raise InputError(f"--{name} {getattr(config, name)} is less than the longest sequence, {longest} tokens")
    trial = task.train[:100]  # with empty completions: a reward that fails or grades nothing shows early
    if score_completions(task, trial, [[[], []] for _ in trial]).isnan().all():
        raise InputError(f"--reward {config.reward} can grade none of the first {len(trial)} answers")
    folder = config.model or warm_started(task.tokenizer)
    task.model = prepare_model(attempt(f"model {folder} cannot be loaded", lambda: (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPE, trust_remote_code=config.trust_remote_code))), config)
    if len(task.tokenizer) > task.model.get_input_embeddings().num_embeddings:
        raise InputError(f"--model {config.model}: its tokenizer has more tokens than the model's vocabulary")
    check_packing(task.model, task.train[:2])
    return task


def prepare_model(model, config: Config):
    """The model on its device, with the attention and checkpointing asked for; says so in a line."""
    model.to(DEVICE).eval().set_attn_implementation(config.attention)  # eval, since dropout would falsify the ratio
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    if RANK == 0:
        print(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:,.2f} M weights, "
              f"{str(DTYPE)[6:]} on {DEVICE_NAME}; attention: {config.attention}; cache: {config.rollout_cache}")
    return model


def score_completions(task: Task, examples: list[dict], completions: list[list[list[int]]]) -> torch.Tensor:
    """(B, G) float64 rewards of the G completions (token ids) of B examples; NaN: not gradable. Raises InputError."""
    rows = [(e, task.tokenizer.decode(ids, skip_special_tokens=True))
            for e, group in zip(examples, completions) for ids in group]
    texts = [text if isinstance(e["prompt"], str) else [{"role": "assistant", "content": text}] for e, text in rows]
    columns = {key: [e[key] for e, _ in rows] for key in examples[0]
               if key not in ("prompt", "prompt_ids", "prompts", "completions")}
    name = f"reward function {getattr(task.reward, '__name__', type(task.reward))}"
    values = attempt(f"{name} failed", lambda: [value if value is None else float(value) for value in task.reward(
        prompts=[e["prompt"] for e, _ in rows], completions=texts, **columns)])
    if len(values) != len(rows):
        raise InputError(f"{name} returned {len(values)} values for {len(rows)} completions")
    if not all(value is None or math.isfinite(value) for value in values):
        raise InputError(f"{name} returned a value that is not finite; None means not gradable")
    values = [math.nan if value is None else value for value in values]
    return torch.tensor(values, dtype=torch.float64).view(len(examples), -1)


def load_data(config: Config) -> tuple[list[dict], dict[str, list[dict]], transformers.PreTrainedTokenizerBase]:
    """Training examples, evaluation sets by name, and the tokenizer. Raises InputError."""
    tokenizer = attempt(f"the tokenizer of --model {config.model} cannot be loaded",
                        lambda: transformers.AutoTokenizer.from_pretrained(
                            config.model, padding_side="left", trust_remote_code=config.trust_remote_code))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise InputError(f"--model {config.model}: its tokenizer has neither a pad nor an end token")
    train = to_examples(load_rows(config.dataset, config.dataset_config, config.dataset_split), config, tokenizer)
    random.Random(config.seed).shuffle(train)
    evals = {}
    for spec in filter(None, map(str.strip, config.eval_dataset.split(","))):
        path, *rest = spec.split(":")
        if len(rest) > 2:
            raise InputError(f"--eval_dataset {spec} is not path, path:split or path:config:split")
        name, split = (["", ""] + rest)[-2:]
        examples = to_examples(load_rows(path, name, split), config, tokenizer)
        evals[spec] = random.Random(0).sample(examples, min(config.eval_prompts, len(examples)))
    if not evals:
        held_out = min(config.eval_prompts, len(train) // 5)
        evals, train = {"held out": train[:held_out]}, train[held_out:]
    return train, evals, tokenizer


def load_rows(path: str, name: str, split: str):
    """A split of a dataset; where none is named, test, else validation, else the first. Raises InputError."""
    files = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix.lower())
    if Path(path).is_file() and not files:
        raise InputError(f"dataset {path} is neither .json, .jsonl nor .parquet")
    splits = attempt(f"dataset {path} cannot be loaded, or is empty",
                     lambda: load_dataset(files, data_files=path) if files else load_dataset(path, name or None))
    split = split or next((usual for usual in ("test", "validation") if usual in splits), next(iter(splits)))
    rows = attempt(f"dataset {path} has {', '.join(splits)}, but not the split", lambda: splits[split])
    if len(rows) == 0:
        raise InputError(f"dataset {path} is empty")
    if "reward_model" in rows.column_names:  # verl's layout
        truths = attempt(f"dataset {path}", lambda: [row["ground_truth"] for row in rows["reward_model"]])
        rows = rows.add_column("reward_model.ground_truth", truths)
    return rows


def to_examples(rows, config: Config, tokenizer) -> list[dict]:
    """Examples from the rows of a dataset; prompts that are too long are left out and counted. Raises InputError."""
    def column(wanted, *usual):
        for name in [wanted] if wanted else usual:
            if name in rows.column_names:
                return name
        raise InputError(f"no column {wanted or ' or '.join(usual)} in the dataset, but {', '.join(rows.column_names)}")

    prompt_column = column(config.prompt_column, "prompt", "question", "problem")
    answer_column = column(config.answer_column, "answer", "solution", "reward_model.ground_truth")
    template = json.loads(config.chat_template_kwargs) | dict(
        add_generation_prompt=True, tokenize=True, return_dict=False, return_tensors=None)
    system, examples = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else [], []
    for number, row in enumerate(rows):
        prompt, answer = row[prompt_column], row[answer_column]
        if not isinstance(prompt, (str, list) if tokenizer.chat_template else str):
            raise InputError(f"row {number}: {prompt_column} is neither text nor, with a chat template, messages")
        if tokenizer.chat_template:
            prompt = system + ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            ids = attempt(f"row {number}, {prompt_column}", lambda: tokenizer.apply_chat_template(prompt, **template))
        else:
            prompt = f"{config.system_prompt}\n\n{prompt}" if config.system_prompt else prompt
            ids = tokenizer(prompt)["input_ids"]
        if 0 < len(ids) <= config.max_prompt_tokens:
            # Rewards written for TRL expect the answer under either name.
            examples.append({**row, "prompt": prompt, "prompt_ids": ids, "answer": answer, "solution": answer})
    if not examples:
        raise InputError(f"all prompts are empty or longer than --max_prompt_tokens {config.max_prompt_tokens}")
    if len(examples) < len(rows):
        print(f"left out {len(rows) - len(examples)} of {len(rows)} prompts: empty or over --max_prompt_tokens")
    return examples


# The embedded task: sort the digits of a string. For each class of difficulty: its share of the prompts, how many
# digits, how often a digit of a demonstration is wrong, and its share of the demonstrations. Easy prompts are nearly
# always solved before training and hard ones never, as in real datasets; that is what pruning is for.
SORTING = {"easy": (0.45, (2, 3), 0.0, 0.5), "middle": (0.15, (9, 12), 0.2, 0.5), "hard": (0.4, (17, 20), 0.0, 0.0)}
WARM_START = dict(steps=400, batch_size=64, learning_rate=2e-3)
SORTER = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
              head_dim=32, max_position_embeddings=64, tie_word_embeddings=True)


def sorting_example(name: str, rng: random.Random, tokenizer) -> dict:
    """A prompt of one class of the embedded task, such as "4021=", and its answer, "0124"."""
    digits = rng.choices("0123456789", k=rng.randint(*SORTING[name][1]))
    prompt = "".join(digits) + "="
    return {"prompt": prompt, "prompt_ids": tokenizer(prompt)["input_ids"], "answer": "".join(sorted(digits))}


def sorting_data(config: Config):
    """As load_data, for the embedded task: 256 prompts, an evaluation set a class, and a token for each character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "=", *"0123456789"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<end>", padding_side="left")
    rng, train, evals = random.Random(config.seed), [], {}
    for name, (share, *_) in SORTING.items():
        train += [sorting_example(name, rng, tokenizer) for _ in range(round(256 * share))]
        drawn = (sorting_example(name, rng, tokenizer) for _ in count())
        evals[name] = list(islice((e for e in drawn if e not in train), config.eval_prompts // len(SORTING)))
    rng.shuffle(train)
    return train, evals, tokenizer


def warm_started(tokenizer) -> Path:
    """The folder of a model taught by noisy demonstrations, made by the first run and kept in the user's cache folder.

    Supervised learning is the policy gradient with advantage 1 on somebody else's completions: train_step does it."""
    recipe = repr((SORTING, WARM_START, SORTER, warm_started.__code__.co_code, torch.__version__))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dppo")
    folder = cache / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    if folder.exists():
        return folder
    transformers.set_seed(0)
    rng, config = random.Random(0), Config(learning_rate=WARM_START["learning_rate"], temperature=1.0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **SORTER))
    optimizer = make_optimizer(model, config)
    ones, shares = torch.ones(WARM_START["batch_size"]), [share for *_, share in SORTING.values()]
    for step in tqdm(range(WARM_START["steps"]), desc="warm start, the first time only"):
        sequences = []
        for name in rng.choices(list(SORTING), shares, k=len(ones)):
            example = sorting_example(name, rng, tokenizer)
            answer = [rng.choice("0123456789") if rng.random() < SORTING[name][2] else d for d in example["answer"]]
            sequences.append((example["prompt_ids"], tokenizer("".join(answer) + "<end>")["input_ids"]))
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - step / WARM_START["steps"])
        train_step(model, optimizer, sequences, ones, ones, len(ones), config)
    partial = folder.with_suffix(f".{os.getpid()}")
    model.save_pretrained(partial)
    try:
        partial.rename(folder)  # a run that dies while it saves leaves no half model under this name
    except OSError:  # another run was first
        shutil.rmtree(partial)
    return folder


# ---- 4. Rollout ------------------------------------------------------------------------------------------------------

def end_ids(task: Task) -> set[int]:
    """Every id that ends a completion: Qwen has two, and pads with one of them."""
    ids = task.model.generation_config.eos_token_id
    return {*(ids if isinstance(ids, list) else [ids]), task.tokenizer.eos_token_id} - {None}


def trim_completion(ids: list[int], ends: set[int]) -> list[int]:
    """The completion up to its first end id, which belongs to it and is trained; what follows is padding."""
    return ids[:next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]


@torch.no_grad()
def rollout(task: Task, examples: list[dict], samples: int, config: Config) -> list[list[list[int]]]:
    """`samples` completions of each example, in token ids: completions[q][i] ends with its first end id, or is cut off.

    generate() takes what its caller leaves open from the model's own generation_config. Qwen's holds top_k, top_p and a
    repetition penalty: the rollouts would come from another policy than the one whose log-probabilities are trained.
    So the model gets a clean one while it generates, and attention that knows a cache."""
    model, ends = task.model, end_ids(task)
    own = model.generation_config, model.config._attn_implementation
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=config.temperature, top_k=0, top_p=1.0, max_new_tokens=config.max_completion_tokens,
        eos_token_id=sorted(ends) or None, pad_token_id=task.tokenizer.pad_token_id)
    model.set_attn_implementation("sdpa")
    prompts, completions = [e["prompt_ids"] for e in examples], [None] * len(examples)
    # Prompts of similar length share a batch, which is as wide as its longest one; paged needs no batches.
    order = sorted(range(len(prompts)), key=lambda q: len(prompts[q]))
    batch_size = max(1, len(prompts) if config.rollout_cache == "paged" else config.rollout_batch_size // samples)
    try:
        for start in range(0, len(order), batch_size):
            batch = order[start:start + batch_size]
            ids = generate(task, [prompts[q] for q in batch], samples, config)
            for j, q in enumerate(batch):
                completions[q] = [trim_completion(c, ends) for c in ids[j * samples:(j + 1) * samples]]
    finally:
        model.generation_config = own[0]
        model.set_attn_implementation(own[1])
    return completions


def generate(task: Task, prompts: list[list[int]], samples: int, config: Config) -> list[list[int]]:
    """The model's own sampling: `samples` completions of each of B prompts, in token ids, a prompt's side by side.

    paged (continuous batching) and dynamic read a prompt once for all its samples. With paged, the place of what has
    ended goes to the next in line; with dynamic, what has ended leaves the batch, every eighth of the way: generate()
    alone would go on at the pace of all rows until the last has ended."""
    model, settings = task.model, task.model.generation_config
    if config.rollout_cache == "paged":
        settings.num_return_sequences = samples
        outputs = model.generate_batch(prompts, settings, ContinuousBatchingConfig(
            max_requests_per_batch=config.rollout_batch_size,
            seed=int(torch.randint(2 ** 31, ())))).values()  # else one of its own, never the same
        if len(outputs) < len(prompts) * samples or any(output.error for output in outputs):
            raise InputError("--rollout_cache paged: continuous batching failed")
        return [output.generated_tokens for output in outputs]
    inputs = task.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(model.device)
    width = inputs["input_ids"].shape[1]
    if config.rollout_cache != "dynamic":
        settings.cache_implementation = "static" if config.rollout_cache == "static" else None
        return model.generate(**inputs, num_return_sequences=samples)[:, width:].tolist()
    cache = transformers.DynamicCache(config=model.config)
    if width > 1:  # all but the last token: generate() starts by reading that one
        positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        model.get_decoder()(**{name: x[:, :-1] for name, x in dict(inputs, position_ids=positions).items()},
                            past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(samples)
    ids, mask = (inputs[name].repeat_interleave(samples, dim=0) for name in ("input_ids", "attention_mask"))
    ends = torch.tensor(settings.eos_token_id or [], device=ids.device)
    rows, completions, left = list(range(len(ids))), [[] for _ in ids], settings.max_new_tokens
    while rows and left:
        some = min(left, math.ceil(settings.max_new_tokens / 8))
        ids = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=some)
        new = ids[:, mask.shape[1]:]
        for row, tokens in zip(rows, new.tolist()):
            completions[row] += tokens
        live = (~torch.isin(new, ends).any(dim=1)).nonzero().squeeze(1)
        cache.batch_select_indices(live)
        rows, ids, left = [rows[i] for i in live], ids[live], left - new.shape[1]
        mask = torch.nn.functional.pad(mask[live], (0, new.shape[1]), value=1)
    return completions


def scored_rollout(task: Task, examples: list[dict], samples: int, config: Config) -> tuple[list, torch.Tensor]:
    """rollout and score_completions -> completions, (B, samples) rewards. Under torchrun, each process takes its share
    of the examples, and all get all results: what follows is the same everywhere, the draws too."""
    mine = examples[RANK::WORLD]
    completions = rollout(task, mine, samples, config)
    rewards = score_completions(task, mine, completions).tolist() if mine else []
    if WORLD > 1:
        parts = [None] * WORLD
        dist.all_gather_object(parts, list(zip(completions, rewards)))
        turns = (group for turn in zip_longest(*parts) for group in turn if group)
        completions, rewards = map(list, zip(*turns))
    return completions, torch.tensor(rewards, dtype=torch.float64)


def group_advantages(rewards: torch.Tensor, scale_by_std: bool = True) -> torch.Tensor:
    """(B, G) rewards -> (B, G) advantages within each group: (r - mean) / (std + 1e-4), std over G - 1, or r - mean.

    Exactly 0 in a group of equal rewards, where rounding would leave an error, and in one with a NaN, which is not
    gradable. Computed on the whole group: re-centring after pruning would bias them."""
    rewards = rewards.double()
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if scale_by_std:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-4)
    no_signal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True) | rewards.isnan().any(dim=1, keepdim=True)
    return advantages.masked_fill(no_signal, 0.0)


# ---- 5. Pruning: the paper's hierarchical importance-weighted pruning, and the methods it is compared with -----------
#
# A rule is a vector of keep probabilities, known before the draw. dppo and dppo-optimal weigh what they keep by 1/pi
# and divide by all candidates, which is unbiased; cppo and greso weigh it by 1 and average over it, which is not.
#
#                  prompts, before the rollout                        completions, after it
#   grpo           all                                                all
#   grpo-skip      all                                                those with a gradient; as in all that follow
#   cppo           all, and B/(1 - r) of them in place of B           of all, the fraction 1 - r with the largest |A|
#   greso          p^z, until B groups have unequal rewards           all of those groups
#   dppo           |A| at the last visit, low ones thinned by r       |A|, low ones thinned by r
#   dppo-optimal   in proportion to the |A| predicted                 in proportion to |A| times the prompt's weight
#
# Here B is prompts_per_step. Two readings of ours: cppo averages over those of its fraction that have a gradient, and
# greso draws systematically where the original flips coins with the same probabilities.

def keep_probabilities(scores: torch.Tensor, rate: float) -> torch.Tensor:
    """(n,) scores -> (n,) float64 keep probabilities pi; the paper's pruning probability is P = 1 - pi.

    A completion's score is |A|; a prompt's is the mean |A| of its group at its last visit, NaN if it had none. Of the
    low set, the scores below the mean, floor(rate |low|) are pruned; all others, the never visited too, have pi = 1.

    Our reading: the number pruned is fixed and which ones is uniformly random. The paper's Algorithm 1 is reported to
    remove the very lowest; then pi = 0 where the gradient is not, and its proof of unbiasedness assumes P < 1."""
    scores = scores.double()
    low = scores < scores.nanmean() * (1 - 1e-6)  # by more than rounding: equal scores can lie below their own mean
    count = int(low.sum())
    pruned = min(math.floor(rate * count + 1e-9), max(count - 1, 0))  # 0.29 * 100 is 28.999999999999996; never all
    return torch.ones_like(scores).masked_fill(low, (count - pruned) / max(count, 1))


def draw(pi: torch.Tensor, generator: torch.Generator, order: torch.Tensor | None = None) -> torch.Tensor:
    """(n,) keep probabilities -> (n,) float64 importance weights, 0 where pruned and 1/pi where kept: E[weight] = 1.

    The paper's rescale factor is C/(1 - P) with C = kept/total, in a loss that averages over what was kept. That is the
    same number, 1/kept * (kept/total)/pi = 1/total * 1/pi: the Horvitz-Thompson estimator. Our loss divides by total.

    Systematic sampling: u, one uniform number, is compared with the running sum of pi along `order`, (n,) indices, by
    default a random permutation. An item is kept where the sum crosses u + k, k an integer: each with its own pi, and
    exactly sum(pi) of them if that is an integer. With equal pi in random order, it is the uniform draw of a fixed
    number."""
    if order is None:
        order = torch.randperm(len(pi), generator=generator)
    order = order[(pi[order] > 0) & (pi[order] < 1)]
    sums = torch.cat([pi.new_zeros(1), pi[order].cumsum(0)])
    if (sums[-1] - sums[-1].round()).abs() < 1e-9:  # an integer but for rounding, which could change the number kept
        sums[-1] = sums[-1].round()
    crossed = (sums - torch.rand(1, generator=generator, dtype=pi.dtype)).floor().diff() > 0
    weights = (pi >= 1).to(pi.dtype)
    weights[order[crossed]] = 1 / pi[order[crossed]]
    return weights


def optimal_probabilities(scores: torch.Tensor, rate: float, floor: float = 0.0) -> torch.Tensor:
    """(n,) scores -> (n,) float64 keep probabilities of the smallest variance: pi = min(1, c score), at least `floor`.

    Our addition. Draws with probabilities pi add the variance sum (1/pi - 1) |g|^2 to the gradient. At a given sum(pi)
    it is least where pi is proportional to the norm |g| (Neyman allocation), and |A| is nearly that. c is such that of
    the same positive scores as many are kept as keep_probabilities keeps at this rate, unless the floor is in the way.
    A score of NaN has pi = 1."""
    keep = keep_probabilities(scores, rate).sum().round()
    scores = scores.double().nan_to_num(nan=math.inf)
    low, high = 0.0, 1e12
    for _ in range(100):  # bisection: the sum of pi grows with c
        c = (low + high) / 2
        low, high = (c, high) if (c * scores).clamp(floor, 1).sum() < keep else (low, c)
    return (high * scores).clamp(floor, 1)


FLOOR = 0.07  # of dppo-optimal's pi, where what looks useless may have a gradient: there, weights are at most 15
PRIOR = 0.05  # of the Beta prior of a prompt's success rate: most prompts are solved nearly always or nearly never
DECAY = 0.8  # what a visit to a prompt still counts one visit later, since the policy changes


def new_history(prompts: int) -> dict[str, torch.Tensor]:
    """What the rules know of each prompt: see update_history; and greso's probabilities."""
    zeros = torch.zeros(prompts, dtype=torch.float64)
    return dict(score=zeros + math.nan, right=zeros.clone(), wrong=zeros.clone(), streak=zeros.clone(),
                p_easy=zeros.new_tensor(0.5), p_hard=zeros.new_tensor(0.5))


def update_history(history: dict, prompts: torch.Tensor, rewards: torch.Tensor, advantages: torch.Tensor) -> None:
    """Records a step: (B,) indices of the prompts rolled out, (B, G) rewards and advantages.

    score (dppo): the mean |A| at the last visit, NaN if there was none. right, wrong (dppo-optimal): rewards, within
    [0, 1], and what they lack of 1, summed with decay. streak (greso): latest visits in a row with equal rewards above
    0 (all right), or, counted negative, of 0 or less (all wrong). greso's p_easy and p_hard fall by 0.01 when the share
    of such groups in the rollout reaches its target, 1/12 and 1/6, else rise. Ungradable groups count as reward 0; of a
    prompt that is twice in a step, at the turn of an epoch, one visit counts."""
    rewards = rewards.masked_fill(rewards.isnan().any(dim=1, keepdim=True), 0)
    right, equal = rewards.clamp(0, 1).sum(dim=1), (rewards == rewards[:, :1]).all(dim=1)
    history["score"][prompts] = advantages.abs().mean(dim=1)
    history["right"][prompts] = DECAY * history["right"][prompts] + right
    history["wrong"][prompts] = DECAY * history["wrong"][prompts] + rewards.shape[1] - right
    easy, hard = equal & (rewards[:, 0] > 0), equal & (rewards[:, 0] <= 0)
    sign, streak = easy.double() - hard.double(), history["streak"][prompts]
    history["streak"][prompts] = streak * (streak * sign > 0) + sign
    for p, groups, target in (("p_easy", easy, 1 / 12), ("p_hard", hard, 1 / 6)):
        history[p] = (history[p] + (-0.01 if groups.double().mean() >= target else 0.01)).clamp(0.05, 0.95)


def predicted_advantages(history: dict, config: Config) -> torch.Tensor:
    """(all prompts,) root mean square of the advantages to expect of a prompt's next group; NaN if never visited.

    With success rate p and rewards 0 and 1 it is sqrt(p (1 - p)), or, scaled by the std, nearly 1 unless all G are
    right or all wrong: sqrt(1 - p^G - (1-p)^G). The mean over p's Beta posterior given right and wrong is exact."""
    a, b = PRIOR + history["right"], PRIOR + history["wrong"]
    if config.objective == "dr_grpo":
        square = a * b / ((a + b) * (a + b + 1))
    else:
        i = torch.arange(config.group_size)
        square = 1 - sum(((x[:, None] + i) / ((a + b)[:, None] + i)).prod(dim=1) for x in (a, b))
    return square.sqrt().masked_fill(history["score"].isnan(), math.nan)


def prompt_rule(history: dict, config: Config) -> Callable[[torch.Tensor], torch.Tensor]:
    """The method's keep probabilities of prompts, as a function of a window's (n,) indices -> (n,). History only."""
    if config.method == "dppo":
        return lambda window: keep_probabilities(history["score"][window], config.prompt_prune_rate)
    pi = torch.ones_like(history["score"])
    if config.method == "greso":
        streak = history["streak"]
        pi = (torch.where(streak > 0, history["p_easy"], history["p_hard"]) ** streak.abs()).clamp(min=0.01)
    if config.method == "dppo-optimal":
        pi = optimal_probabilities(predicted_advantages(history, config), config.prompt_prune_rate, FLOOR)
    return lambda window: pi[window]


def grow_window(order: torch.Tensor, rule: Callable, batch_size: int) -> torch.Tensor:
    """The candidate prompts of a step: the next of `order`, until one more would leave over `batch_size` after pruning.

    order: (m,) indices of prompts; rule: see prompt_rule. The window's length N divides the loss, so it may depend on
    history and order, never on the draw: drawing until enough survive would be biased. (Each window's mean is unbiased.
    Windows of different N weigh the same in training, so over an epoch prompts in small ones count more.)"""
    size = min(batch_size, len(order))
    while size < len(order) and rule(order[:size + 1]).sum() <= batch_size + 1e-9:
        size += 1
    return order[:size]


def completion_probabilities(rewards, advantages, prompt_weights, config: Config) -> torch.Tensor:
    """(B, G) rewards, (B, G) advantages and (B,) weights of the prompts -> (B, G) keep probabilities of completions.

    Our reading: what has no gradient is set aside first, pi = 0, at no cost in bias or variance; the low set is that of
    the rest. Without a KL term that is A = 0 (which textbook grpo trains; greso sets aside groups, with a KL term too).
    Ungradable groups are left out always. For dppo-optimal a completion's score is |A| times its prompt's weight, since
    that is how its gradient enters."""
    has_gradient = (advantages != 0) | (config.method == "grpo") | (config.beta > 0)
    if config.method == "greso":
        has_gradient = (advantages != 0).any(dim=1, keepdim=True).expand_as(advantages)
    has_gradient = has_gradient & ~rewards.isnan().any(dim=1, keepdim=True)
    scores, rate = advantages.abs()[has_gradient], config.completion_prune_rate
    if config.method == "dppo":
        kept = keep_probabilities(scores, rate)
    elif config.method == "dppo-optimal":
        weighted = (advantages.abs() * prompt_weights[:, None])[has_gradient]
        kept = optimal_probabilities(weighted, rate, FLOOR if config.beta > 0 else 0.0)
    else:
        kept = torch.ones_like(scores)
        if config.method == "cppo":
            kept[scores.argsort(descending=True)[math.floor((1 - rate) * advantages.numel() + 1e-9):]] = 0
    return torch.zeros_like(advantages).masked_scatter(has_gradient, kept)


def draw_prompts(pi: torch.Tensor, config: Config, generator: torch.Generator) -> torch.Tensor:
    """(n,) keep probabilities of prompts -> (n,) weights, 0 where pruned; the biased methods weigh by 1.

    At least one is kept: where the pi sum up to less than 1, they are scaled to 1, which is known before the draw."""
    weights = draw(pi / pi.sum().clamp(max=1), generator)
    return weights.sign() if config.method in BIASED else weights


def draw_completions(pi, advantages, prompt_weights, config: Config, generator) -> torch.Tensor:
    """(B, G) keep probabilities, advantages and (B,) weights of the prompts -> (B, G) weights of both levels.

    dppo-optimal draws along the groups, in random order, and within them along the signs of A, so that the sample holds
    its share of each: neighbours have similar gradients, and of neighbours with a pi below 1/2 at most one is kept."""
    order = None
    if config.method == "dppo-optimal":
        strata = 3 * torch.randperm(len(pi), generator=generator)[:, None] + advantages.sign()  # signs: -1, 0, 1
        order = strata.flatten().argsort()
    return prompt_weights[:, None] * draw(pi.flatten(), generator, order).view_as(pi)


def denominator(weights: torch.Tensor, candidates: int, config: Config) -> int:
    """What a step's sum is divided by: N G candidates before any pruning, or by the biased methods what they kept."""
    return int((weights > 0).sum()) if config.method in BIASED else candidates


# ---- 6. Packing: the paper's Dense Prompt Packing --------------------------------------------------------------------

def pack(lengths: list[int], capacity: int, window: int) -> list[list[int]]:
    """Window-based greedy packing: lengths in tokens -> slots, lists of indices whose lengths sum to <= capacity.

    Of the next `window` sequences in order, the longest that fits goes into the open slot; when none fits, the slot is
    closed. Every index ends up in exactly one slot. Raises ValueError if a sequence exceeds a slot."""
    if max(lengths, default=0) > capacity:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit a slot of {capacity}")
    upcoming = zip(lengths, range(len(lengths)))
    visible = sorted(islice(upcoming, window))
    slots, room = [], 0
    while visible:
        fitting = bisect_right(visible, (room, len(lengths)))  # how many of the visible fit into the open slot
        if fitting == 0:
            slots.append([])
            room = capacity
        else:
            length, index = visible.pop(fitting - 1)
            slots[-1].append(index)
            room -= length
            for item in islice(upcoming, 1):
                insort(visible, item)
    return slots


def pack_micro_batches(sequences: list[tuple], indices: list[int], config: Config) -> tuple[list, float]:
    """Packs the (prompt ids, completion ids) at `indices` -> micro-batches, lists of slots; and their density, tokens
    over tokens with padding: a micro-batch is as wide as its fullest slot.

    A slot is by default as long as the longest sequence, since with sdpa its attention mask is dense and longer ones
    would cost more, or, with attention that skips what lies between sequences, a micro-batch. pack_window = 0 is for
    comparison: a slot for each sequence, padded."""
    lengths = {i: len(sequences[i][0]) + len(sequences[i][1]) for i in indices}
    long_slots = config.attention != "sdpa" and config.pack_window > 0
    capacity = config.slot_tokens or (config.micro_batch_tokens if long_slots else max(lengths.values(), default=1))
    slots = [[i] for i in indices]
    if config.pack_window:
        slots = [[indices[j] for j in slot] for slot in pack([*lengths.values()], capacity, config.pack_window)]
    rows = config.micro_batch_tokens // capacity
    batches = [slots[i:i + rows] for i in range(0, len(slots), rows)]
    computed = sum(len(batch) * max(sum(lengths[i] for i in slot) for slot in batch) for batch in batches)
    return batches, sum(lengths.values()) / max(1, computed)


# ---- 7. Update -------------------------------------------------------------------------------------------------------

LOGIT_CHUNK = 1024  # tokens whose logits exist at a time: 0.6 GB in float32 with Qwen's vocabulary


def varlen_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, cu_seq_lens_q=None,
                     max_length_q=None, **kwargs):
    """Attention for transformers, of (1, heads, T, d) queries, by a kernel for sequences that lie end to end."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    output = varlen_attn(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling,
                         window_size=((sliding_window or 0) - 1, 0))
    return output[None], None


transformers.AttentionInterface.register("varlen", varlen_attention)


def completion_logprobs(model, sequences: list[tuple], slots: list[list[int]], temperature: float):
    """A forward pass over packed slots -> (T,) log-probabilities and (T,) entropies of the completion tokens, in order.

    Position ids restart with each sequence, from which transformers builds the block-diagonal causal mask: attention
    never crosses a boundary. (At the end of a slot they go on: padding follows the last sequence, which cannot see it.)
    Logits exist for completion tokens only, chunk by chunk, and are computed again for the backward pass instead
    of being kept. The device is never waited for."""
    lengths = [[len(sequences[i][0]) + len(sequences[i][1]) for i in slot] for slot in slots]
    width, longest = max(map(sum, lengths)), max(map(max, lengths))
    input_ids, position_ids = torch.zeros(2, len(slots), width, dtype=torch.long)
    starts, predicting = [], []  # the hidden state at t predicts token t + 1
    for row, slot in enumerate(slots):
        start = 0
        for prompt, completion in (sequences[i] for i in slot):
            end = start + len(prompt) + len(completion)
            input_ids[row, start:end] = torch.tensor(prompt + completion)
            position_ids[row, start:] = torch.arange(width - start).clamp(max=longest - 1)
            starts.append(start + row * width)
            predicting.append(torch.arange(start + len(prompt) - 1, end - 1) + row * width)
            start = end
    predicting, attention = torch.cat(predicting), {}
    tensors = [input_ids, position_ids, predicting, input_ids.flatten()[predicting + 1]]
    if model.config._attn_implementation == "varlen":
        tensors[:2] = input_ids.view(1, -1), position_ids.view(1, -1)
        bounds = [*starts, input_ids.numel()]
        attention = dict(cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32).to(model.device, non_blocking=True),
                         max_length_q=max(end - start for start, end in pairwise(bounds)))
    input_ids, position_ids, predicting, targets = (x.to(model.device, non_blocking=True) for x in tensors)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    for layer in layers:  # which computes again only what is in training
        layer.training = torch.is_grad_enabled()
    hidden = model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False,
                                 **attention).last_hidden_state.flatten(0, 1)[predicting]
    for layer in layers:
        layer.training = False

    def of_chunk(hidden, targets):
        logprobs = (model.get_output_embeddings()(hidden).float() / temperature).log_softmax(dim=-1)
        entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(dim=-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy

    chunks = [checkpoint(of_chunk, h, t, use_reentrant=False, preserve_rng_state=False)
              for h, t in zip(hidden.split(LOGIT_CHUNK), targets.split(LOGIT_CHUNK))]
    return tuple(torch.cat(parts) for parts in zip(*chunks))


@torch.no_grad()
def check_packing(model, examples: list[dict]) -> None:
    """Raises InputError where log-probabilities in a slot are not those of the model alone, because it scales or caps
    its logits after the head, has layers that look past a boundary, or attention unlike that of its rollouts."""
    sequences = [(e["prompt_ids"], e["prompt_ids"][:8]) for e in examples]
    packed, _ = completion_logprobs(model, sequences, [[*range(len(sequences))]], temperature=1.0)
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if attention == "varlen" else attention)  # varlen is for slots only
    alone = [model(torch.tensor([p + c], device=model.device)).logits[0, len(p) - 1:-1].float().log_softmax(-1)[
        range(len(c)), c] for p, c in sequences]
    model.set_attn_implementation(attention)
    if (packed - torch.cat(alone)).abs().max() > (1e-3 if model.dtype == torch.float32 else 0.3):
        raise InputError(f"{type(model).__name__} cannot be trained packed: its log-probabilities are not simply those "
                         "of its head, or change with the neighbours in a slot")


@torch.no_grad()
def frozen_logprobs(model, sequences: list[tuple], indices: list[int], config: Config) -> dict[int, torch.Tensor]:
    """Log-probabilities, by index, of the completions at `indices` under a fixed policy: the old or the reference."""
    result = {}
    for slots in pack_micro_batches(sequences, indices, config)[0]:
        order = [i for slot in slots for i in slot]
        logprobs, _ = completion_logprobs(model, sequences, slots, config.temperature)
        result.update(zip(order, logprobs.split([len(sequences[i][1]) for i in order])))
    return result


def policy_loss(logprobs, old_logprobs, ref_logprobs, lengths, advantages, weights, total: float, config: Config):
    """The importance-weighted clipped surrogate of M completions with T tokens -> scalar loss, (2,) metrics sums.

    logprobs, old_logprobs, ref_logprobs (only with beta): (T,); lengths, advantages, weights: (M,).
        1/total sum_i w_i/Z_i sum_t [-min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) + beta KL_t]
    total counts the candidates before any pruning, N G (with dapo, the N G m tokens to expect of them): to divide by
    what was kept would be biased. Z_i is the length |o_i| (grpo, gspo), max_completion_tokens (dr_grpo) or 1 (dapo).
    gspo's rho is one for all tokens of a completion, exp(mean_t log rho_t). KL_t is estimated by k3 = 1/x - 1 + log x
    with x = p/p_ref. The sums, over tokens: how many are clipped, and KL."""
    owner = torch.repeat_interleave(lengths, output_size=len(logprobs))  # (T,) the completion that a token belongs to
    log_ratio = logprobs - old_logprobs
    if config.objective == "gspo":
        log_ratio = (logprobs.new_zeros(len(lengths)).index_add(0, owner, log_ratio) / lengths)[owner]
    surrogate = log_ratio.exp() * advantages[owner]
    clipped = log_ratio.exp().clamp(1 - config.clip_low, 1 + config.clip_high) * advantages[owner]
    log_ref_ratio = ref_logprobs - logprobs if config.beta > 0 else torch.zeros_like(logprobs)
    kl = log_ref_ratio.exp() - 1 - log_ref_ratio
    normalizer = {"dr_grpo": config.max_completion_tokens, "dapo": 1}.get(config.objective, lengths)
    loss = ((config.beta * kl - torch.minimum(surrogate, clipped)) * (weights / normalizer)[owner]).sum() / total
    return loss, torch.stack([(clipped < surrogate).sum(), kl.sum()]).detach()


def make_optimizer(model, config: Config) -> torch.optim.AdamW:
    """AdamW on float32 weights: at a learning rate of 1e-6, updates of bfloat16 weights would round away.

    A parameter of another dtype has a float32 master: gradients of the micro-batches add up there, and each step is
    copied back."""
    masters = {p: p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in model.parameters()}

    def accumulate(p):
        masters[p].grad = p.grad.float() if masters[p].grad is None else masters[p].grad.add_(p.grad)
        p.grad = None

    copies = {p: master for p, master in masters.items() if p is not master}
    for p in copies:
        p.register_post_accumulate_grad_hook(accumulate)
    optimizer = torch.optim.AdamW(masters.values(), lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    optimizer.register_step_post_hook(lambda *_: [p.data.copy_(master) for p, master in copies.items()])
    return optimizer


def accumulate_gradients(model, sequences, indices: list[int], advantages, weights, total, config, old, ref, mark):
    """Adds the gradient of the weighted loss of the completions at `indices` to .grad -> (4,) sums over their tokens
    (loss, entropy, clipped, KL), density. For the arguments see train_step."""
    micro_batches, density = pack_micro_batches(sequences, indices, config)
    mark("packing")
    sums = torch.zeros(4, device=model.device)
    for slots in micro_batches:
        order = [i for slot in slots for i in slot]
        lengths = torch.tensor([len(sequences[i][1]) for i in order])
        logprobs, entropy = completion_logprobs(model, sequences, slots, config.temperature)
        inputs = (x.to(model.device, non_blocking=True) for x in (
            lengths, advantages[order].to(logprobs.dtype), weights[order].to(logprobs.dtype)))
        loss, metrics = policy_loss(logprobs, torch.cat([old[i] for i in order]) if old else logprobs.detach(),
                                    torch.cat([ref[i] for i in order]) if ref else None, *inputs, total, config)
        mark("forward")
        loss.backward()
        sums += torch.cat([torch.stack([loss.detach(), entropy.sum()]), metrics])
        mark("backward")
    return sums, density


def train_step(model, optimizer, sequences: list[tuple], advantages: torch.Tensor, weights: torch.Tensor, total: float,
               config: Config, old: dict | None = None, ref: dict | None = None, mark=lambda phase: None) -> dict:
    """One update on what was kept: pack, forward and backward in micro-batches, clip, step -> metrics.

    sequences: pairs (prompt ids, completion ids); advantages, weights: one of each, weight 0 is skipped; total: see
    policy_loss; old, ref: frozen_logprobs; mark: called at the end of each phase, with its name. Without `old` the
    policy is the one that sampled: the ratio is 1 in value, but its gradient is not zero. Entropy, kl and clip_fraction
    are means over the trained tokens, unweighted. Under torchrun each process trains a share; gradients are summed.
    An update that is not finite is left out: `skipped` is 1. Out of memory, it is tried again with half of
    config.micro_batch_tokens, which stays; the gradient is the same."""
    kept = weights.nonzero().squeeze(1).tolist()
    names = ("entropy", "clip_fraction", "kl", "grad_norm")
    if not kept or not (advantages[kept].any() or config.beta):  # a step would move on Adam's momentum alone
        return dict(completions_trained=0, tokens_trained=0, slot_density=0, skipped=0) | dict.fromkeys(names, 0)
    share = [i for i in kept if i % WORLD == RANK]
    inputs = sequences, share, advantages, weights, total, config, old, ref, mark
    halved = max(config.micro_batch_tokens // 2, config.slot_tokens, max(len(p + c) for p, c in sequences))
    sums = None
    try:
        sums, density = accumulate_gradients(model, *inputs)
    except torch.OutOfMemoryError:
        if halved >= config.micro_batch_tokens:
            raise
    if sums is None:  # outside of the except clause, which holds on to what was computed
        config.micro_batch_tokens = halved
        tqdm.write(f"out of memory: --micro_batch_tokens is {halved} from here on", file=sys.stderr)
        optimizer.zero_grad()
        model.zero_grad()  # of bfloat16 weights too, whose gradient may not have reached its master
        torch.cuda.empty_cache()
        sums, density = accumulate_gradients(model, *inputs)
    parameters = optimizer.param_groups[0]["params"]
    if WORLD > 1:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        dist.all_reduce(sums)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    tokens = sum(len(sequences[i][1]) for i in kept)
    loss, *values = torch.stack([*(sums / tokens), grad_norm.to(sums)]).tolist()  # waits for the device, once a step
    finite = math.isfinite(sum(values, loss))
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    mark("optimizer")
    return dict(completions_trained=len(kept), tokens_trained=tokens, slot_density=density, skipped=int(not finite),
                **dict(zip(names, values if finite else [None] * 4)))


# ---- 8. Training -----------------------------------------------------------------------------------------------------

def evaluate(task: Task, config: Config) -> dict:
    """avg@k and pass@k of each evaluation set, and `accuracy`, the mean reward over the prompts of all of them.

    With random numbers of its own, the same every time: training does not depend on how often it is evaluated."""
    results, means, k = {}, [], config.eval_samples
    for name, examples in task.evals.items():
        with torch.random.fork_rng([torch.cuda.current_device()] if DEVICE == "cuda" else []):
            torch.manual_seed(RANK)
            _, rewards = scored_rollout(task, examples, k, config)
        rewards = rewards[~rewards.isnan().any(dim=1)]
        if len(rewards):
            means += rewards.mean(dim=1).tolist()
            results[name] = {"prompts": len(rewards), f"avg@{k}": rewards.mean().item(),
                             f"pass@{k}": rewards.amax(dim=1).mean().item()}
    return {"accuracy": sum(means) / len(means) if means else None, **results}


def rollout_metrics(rewards, completions, prompt_weights, weights, ends: set[int]) -> dict:
    """Statistics of a step's rollout and draws. The mean reward and length are weighted as the prompts are, so that
    they speak of the whole window and can be compared between methods (but not greso's, which has no weights)."""
    gradable = ~rewards.isnan().any(dim=1)
    lengths = torch.tensor([[len(ids) for ids in group] for group in completions], dtype=torch.float64)
    cut = sum(ids[-1] not in ends for group in completions for ids in group)
    metrics = dict(reward=prompt_weights[gradable] @ rewards[gradable].mean(dim=1) / prompt_weights[gradable].sum(),
                   zero_variance_fraction=(rewards == rewards[:, :1])[gradable].all(dim=1).double().mean(),
                   ungradable_prompts=(~gradable).sum(),
                   completion_length=prompt_weights @ lengths.mean(dim=1) / prompt_weights.sum(),
                   truncated_fraction=cut / lengths.numel(),
                   weight_max=weights.max(), effective_sample_size=weights.sum() ** 2 / (weights ** 2).sum())
    return {name: torch.as_tensor(value).nan_to_num().item() for name, value in metrics.items()}  # 0/0: none


def new_output_dir(config: Config) -> Path:
    """The run's folder, which is made only once the task is loaded. Raises InputError if it cannot be used."""
    name = "benchmark" if config.benchmark else "comparison" if config.compare else config.method
    out = Path(config.output_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}")
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"--output_dir {out} cannot be written")
    if (any(out.glob("metrics.jsonl")) or any(out.glob("*/metrics.jsonl"))) and not (config.resume or config.overwrite):
        raise InputError(f"--output_dir {out} holds another run; --resume goes on with it, --overwrite replaces it")
    return out


STOP = []  # signals that ask to stop: then the running step ends and a checkpoint is saved
# What may differ when a run is resumed: all that has no part in what is learned.
FREE = {"steps", "save_every", "resume", "overwrite", "output_dir", "eval_dataset", "eval_prompts", "eval_samples",
        "eval_every", "micro_batch_tokens", "gradient_checkpointing", "attention"}


def save_checkpoint(out: Path, state: dict) -> None:
    """Writes state, tensors and plain values, beside the last checkpoints and renames it: whenever the process is
    killed, the last one is whole. Keeps two. Where it cannot be written, says so, and training goes on."""
    folder = out / "checkpoints"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "partial")
        (folder / "partial").replace(folder / f"step-{state['step']:08d}.pt")
        for old in sorted(folder.glob("step-*.pt"))[:-2]:
            old.unlink()
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter
        tqdm.write(f"checkpoint of step {state['step']} not saved, training goes on: {' '.join(str(error).split())}",
                   file=sys.stderr)


def load_checkpoint(out: Path, config: Config) -> dict | None:
    """The state of the newest checkpoint, None if there is none. Raises InputError where it cannot be read, or is of a
    run that learned otherwise. weights_only: a checkpoint from somebody else cannot run code."""
    path = max(out.glob("checkpoints/step-*.pt"), default=None)
    if path is None:
        return None
    state = attempt(f"checkpoint {path} cannot be read",
                    lambda: torch.load(path, map_location="cpu", weights_only=True))
    changed = [f"{name} is {value!r}, was {state['config'].get(name)!r}" for name, value in asdict(config).items()
               if name not in FREE and state["config"].get(name) != value]
    if changed:
        raise InputError(f"--resume: not the run of {path}: {', '.join(changed)}")
    return state


def random_states() -> list:
    """Of torch's global generators, of all processes."""
    own = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE == "cuda" else [])]
    states = [own] * WORLD
    if WORLD > 1:
        dist.all_gather_object(states, own)
    return states


def open_lines(path: Path, step: int):
    """A file of JSON lines, cut back to those of steps up to `step`, to write on."""
    if RANK:
        return open(os.devnull, "w")
    lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
    partial = path.with_suffix(".partial")
    partial.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))
    partial.replace(path)
    return path.open("a")


def write_line(file, record: dict) -> None:
    """Where the disk is full or the folder gone, says so, and training goes on."""
    try:
        print(json.dumps(record), file=file, flush=True)
        os.stat(getattr(file, "name", os.devnull))
    except OSError as error:
        tqdm.write(f"{file.name} of step {record['step']}: {error.strerror}; training goes on", file=sys.stderr)


def train(config: Config, task: Task | None = None) -> dict:
    """A whole run -> its summary. Writes metrics.jsonl, samples.jsonl, summary.json, checkpoints/ and, but for a
    comparison, model/ into its own folder. Raises KeyboardInterrupt, with where to go on, once STOP has a signal."""
    started, out = time.perf_counter(), new_output_dir(config)
    state = load_checkpoint(out, config) if config.resume else None
    task = task or load_task(config)
    prompts = hashlib.sha256(repr([e["prompt_ids"] for e in task.train]).encode()).hexdigest()
    if state and state["prompts"] != prompts:
        raise InputError("--resume: the training prompts are not those of the checkpoint")
    if RANK == 0:
        attempt(f"--output_dir {out} cannot be written", lambda: out.mkdir(parents=True, exist_ok=True))
        for folder in ("checkpoints", "model") if config.overwrite and not state else ():
            shutil.rmtree(out / folder, ignore_errors=True)
    transformers.set_seed((config.seed + RANK) % 2 ** 32)
    before = after = state["before"] if state else evaluate(task, config)

    def save(state):
        state = dict(state, random_states=random_states(), before=before, prompts=prompts, config=asdict(config))
        if RANK == 0:
            save_checkpoint(out, state)

    if config.steps:
        files = attempt(f"--output_dir {out} cannot be written", lambda: [
            open_lines(out / name, state["step"] if state else 0) for name in ("metrics.jsonl", "samples.jsonl")])
        try:
            stopped = training_loop(task, config, *files, save, state)
        finally:  # also when it is interrupted, or a reward function fails in the middle
            if RANK == 0 and not config.compare:
                attempt(f"the model cannot be saved in {out}", lambda: [
                    part.save_pretrained(out / "model") for part in (task.model, task.tokenizer)])
        if stopped:
            if WORLD > 1:  # a process that leaves early has the others, which may still write, ended by torchrun
                dist.barrier()
            newest = max(out.glob("checkpoints/step-*.pt"), default="no checkpoint")
            words = [word for word in sys.argv if word not in ("--resume", "--overwrite")]
            words += ["--resume", *([] if config.output_dir else ["--output_dir", str(out)])]
            raise KeyboardInterrupt(f"stopped; saved in {newest}; go on with\n    python {shlex.join(words)}")
        after = evaluate(task, config)
    summary = dict(accuracy_before=before["accuracy"], accuracy_after=after["accuracy"], before=before, after=after,
                   wall_seconds=time.perf_counter() - started, device=DEVICE_NAME, config=asdict(config))
    if RANK == 0:
        attempt(f"{out} cannot be written", lambda: (out / "summary.json").write_text(json.dumps(summary, indent=2)))
        accuracies = ["none" if a is None else f"{a:.3f}" for a in (before["accuracy"], after["accuracy"])]
        print(f"accuracy {' -> '.join(accuracies)} in {summary['wall_seconds']:.0f} s; results are in {out}")
    return summary


def prune_prompts(order: torch.Tensor, history: dict, size: int, config: Config, generator) -> tuple:
    """The next window of `order` -> window (N,), the prompts of it that are kept (B,), at most `size`, weights (B,)."""
    rule = prompt_rule(history, config)
    window = grow_window(order, rule, size)
    weights = draw_prompts(rule(window), config, generator)
    return window, window[weights > 0], weights[weights > 0]


def visit(task: Task, order: torch.Tensor, history: dict, size: int, config: Config, generator) -> tuple:
    """One window: prompts are pruned, the others rolled out and rewarded -> as prune_prompts, completions (B lists of G
    lists of ids), rewards (B, G)."""
    window, prompts, weights = prune_prompts(order, history, size, config, generator)
    return window, prompts, weights, *scored_rollout(task, [task.train[q] for q in prompts], config.group_size, config)


def gather(task: Task, order: torch.Tensor, history: dict, config: Config, generator: torch.Generator) -> tuple:
    """The rollouts of a step, as visit returns them, of one window. cppo takes more prompts, since it trains fewer
    completions of each ("dynamic completion allocation"). Only greso visits windows until prompts_per_step groups, or
    somewhat more, have unequal rewards, or `order`, an epoch, has no more prompts."""
    wanted, parts, mixed, seen = config.prompts_per_step, [], 0, 0
    if config.method != "greso":
        more = 1 / (1 - config.completion_prune_rate) if config.method == "cppo" else 1
        return visit(task, order, history, round(wanted * more), config, generator)
    share = 0.75  # of groups with unequal rewards: what greso's targets leave, then what was seen
    while mixed < wanted and seen < len(order):
        parts.append(visit(task, order[seen:], history, math.ceil((wanted - mixed) / share), config, generator))
        seen += len(parts[-1][0])
        mixed += int(group_advantages(parts[-1][4]).any(dim=1).sum())
        share = max(mixed, 1) / sum(len(part[1]) for part in parts)
    windows, prompts, weights, completions, rewards = zip(*parts)
    return torch.cat(windows), torch.cat(prompts), torch.cat(weights), sum(completions, []), torch.cat(rewards)


def training_loop(task: Task, config: Config, metrics_file, samples_file, save=None, state: dict | None = None) -> bool:
    """The method -> whether it was stopped. A line to metrics_file each step, completions to samples_file every tenth.

    save is called with all that a run depends on, every save_every steps and when STOP asks; state: of such a call."""
    model, G, n = task.model, config.group_size, len(task.train)
    generator, order_generator = (torch.Generator().manual_seed(config.seed + i) for i in (1, 2))
    optimizer = make_optimizer(model, config)
    reference = copy.deepcopy(model) if config.beta > 0 else None
    history, order = new_history(n), torch.empty(0, dtype=torch.long)
    step, mean_length, total_seen, seconds, failures = 0, None, 0, 0.0, 0
    if state:
        history, order = state["history"], state["order"]
        step, mean_length, total_seen, seconds, failures = state["counts"]
        load_state(model, optimizer, (generator, order_generator), state)
    bar = tqdm(range(step + 1, config.steps + 1), initial=step, total=config.steps,
               bar_format="{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]", **({"disable": True} if RANK else {}))
    for step in bar:
        clock = time.perf_counter()
        if len(order) < n:  # a window reaches into the next epoch, so that none is small
            order = torch.cat([order, torch.randperm(n, generator=order_generator)])

        # Prune prompts, roll out the others, reward, compare within each whole group.
        window, prompts, prompt_weights, completions, rewards = gather(task, order[:n], history, config, generator)
        order = order[len(window):]
        advantages = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")
        update_history(history, prompts, rewards, advantages)
        rollout_seconds = time.perf_counter() - clock

        # Prune completions: one draw for each update on the rollout, since after the first, theta depends on it.
        pi = completion_probabilities(rewards, advantages, prompt_weights, config)
        weights = [draw_completions(pi, advantages, prompt_weights, config, generator)
                   for _ in range(config.inner_epochs)]
        metrics = rollout_metrics(rewards, completions, prompt_weights, weights[-1], end_ids(task))
        # dapo divides by the number of tokens, unknown for pruned prompts: N G times the mean length of earlier steps
        # (at the first step of its own, where no prompt is pruned).
        mean_length = mean_length or metrics["completion_length"]
        unit = mean_length if config.objective == "dapo" else 1
        mean_length = 0.9 * mean_length + 0.1 * metrics["completion_length"]

        # Pack what is left, and update. The old policy is the one before the first update.
        sequences = [(task.train[q]["prompt_ids"], ids) for q, group in zip(prompts, completions) for ids in group]
        union = sum(weights).flatten().nonzero().squeeze(1).tolist()  # trained in any of the updates
        old = frozen_logprobs(model, sequences, union, config) if config.inner_epochs > 1 else None  # else ratio = 1
        ref = frozen_logprobs(reference, sequences, union, config) if config.beta > 0 else None
        optimizer.param_groups[0]["lr"] = config.learning_rate * min(1, step / max(1, config.warmup_steps))
        for w in weights:
            update = train_step(model, optimizer, sequences, advantages.flatten(), w.flatten(),
                                denominator(w, len(window) * G, config) * unit, config, old, ref)
            failures = failures + 1 if update["skipped"] else 0
        step_seconds = time.perf_counter() - clock

        seconds, total_seen = seconds + step_seconds, total_seen + len(window)
        record = dict(step=step, epoch=1 + (total_seen - 1) // n, prompts_seen=len(window),
                      prompts_rolled=len(prompts), **update, **metrics, rollout_seconds=rollout_seconds,
                      train_seconds=step_seconds - rollout_seconds, seconds=seconds)
        if update["skipped"]:
            record["skipped_prompts"] = not_finite(model, sequences, union, config, prompts.repeat_interleave(G))
        if config.eval_every and step % config.eval_every == 0:
            record["accuracy"] = evaluate(task, config)["accuracy"]
        write_line(metrics_file, record)
        for q, i in product(range(0, len(prompts), 8), (0, 1)) if step % 10 == 1 else ():
            write_line(samples_file, dict(
                step=step, prompt=task.train[prompts[q]]["prompt"], completion=task.tokenizer.decode(completions[q][i]),
                reward=None if rewards[q, i].isnan() else rewards[q, i].item(), weight=w[q, i].item(),
                advantage=advantages[q, i].item(), keep_probability=(pi[q, i] / prompt_weights[q]).item()))
        bar.set_postfix_str("reward {reward:.2f} rolled {:.2f} trained {:.2f} density {slot_density:.2f} rollout "
                            "{rollout_seconds:.1f}s train {train_seconds:.1f}s".format(
                                len(prompts) / len(window), update["completions_trained"] / len(sequences), **record))
        if failures >= 10:
            raise InputError(f"stopped at step {step}: the last {failures} updates were not finite; a smaller "
                             "--learning_rate may help, metrics.jsonl has the prompts")
        stop = asked_to_stop()
        if save and (stop or config.save_every and step % config.save_every == 0):
            save(dict(step=step, history=history, order=order, optimizer=optimizer.state_dict(),
                      counts=(step, mean_length, total_seen, seconds, failures),
                      weights=[p.detach() for p in optimizer.param_groups[0]["params"]],
                      generators=[g.get_state() for g in (generator, order_generator)]))
        if stop:
            return True
    return False


def load_state(model, optimizer, generators, state: dict) -> None:
    """Puts back what training_loop saved: float32 weights into the optimizer and rounded into the model, moments,
    random numbers."""
    for p, master, saved in zip(model.parameters(), optimizer.param_groups[0]["params"], state["weights"]):
        p.data.copy_(saved)
        master.data.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    for generator, saved in zip(generators, state["generators"]):
        generator.set_state(saved)
    cpu, *cuda = state["random_states"][RANK % len(state["random_states"])]
    torch.set_rng_state(cpu)
    for saved in cuda:
        torch.cuda.set_rng_state(saved)


def asked_to_stop() -> bool:
    """Whether any process has been; all stop at the same step."""
    if WORLD == 1:
        return bool(STOP)
    flag = torch.tensor(len(STOP), device=DEVICE)
    dist.all_reduce(flag)
    return flag.item() > 0


def not_finite(model, sequences: list[tuple], trained: list[int], config: Config, owners: torch.Tensor) -> list[int]:
    """Indices of the prompts whose trained completions have log-probabilities that are not finite; where all are, of
    all that were trained: it was the gradient."""
    logprobs = frozen_logprobs(model, sequences, trained, config)
    culprits = [i for i in trained if not logprobs[i].isfinite().all()] or trained
    return sorted({owners[i].item() for i in culprits})


# ---- 9. Comparison ---------------------------------------------------------------------------------------------------

def frozen_rollouts(task: Task, config: Config, prompts: int) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Two visits of the first `prompts` training prompts by a frozen model -> history, rewards, products.

    history: after the first visit; rewards: (N, G) of the second; products: (N G, N G) inner products of the gradients
    that the completions would have alone, on which all that measure_estimator tells depends. Of a model with more than
    a million weights, evenly spaced coordinates of the gradients stand for all, about a million."""
    examples, scale_by_std = task.train[:prompts], config.objective != "dr_grpo"
    (_, first), (completions, rewards) = (scored_rollout(task, examples, config.group_size, config) for _ in range(2))
    history = new_history(len(examples))
    update_history(history, torch.arange(len(examples)), first, group_advantages(first, scale_by_std))
    advantages = group_advantages(rewards, scale_by_std).flatten()
    sequences = [(e["prompt_ids"], ids) for e, group in zip(examples, completions) for ids in group]
    parameters = list(task.model.parameters())
    stride = 1 + sum(p.numel() for p in parameters) // 1_000_000 | 1  # odd, to meet every column of a weight
    informative = advantages.nonzero().squeeze(1)  # the others have no gradient: of KL neither, where ref is the policy
    gradients = []
    for i in tqdm(informative.tolist(), desc="gradients of single completions", leave=False):
        logprobs, _ = completion_logprobs(task.model, sequences, [[i]], config.temperature)
        loss, _ = policy_loss(logprobs, logprobs.detach(), logprobs.detach(),
                              torch.tensor([len(logprobs)], device=logprobs.device), advantages[[i]].to(logprobs),
                              torch.ones_like(logprobs[:1]), 1, config)
        gradient = torch.autograd.grad(loss, parameters, materialize_grads=True)
        gradients.append(torch.cat([g.flatten()[::stride].float() for g in gradient]))
    products = torch.zeros(len(sequences), len(sequences), dtype=torch.float64)
    if gradients:
        gradients = torch.stack(gradients)
        products[informative[:, None], informative] = (gradients @ gradients.T).double().cpu()
    return history, rewards, products


def measure_estimator(history: dict, rewards: torch.Tensor, products: torch.Tensor, config: Config, draws: int = 1000):
    """The method's gradient estimate over `draws` draws from one set of frozen_rollouts, against the full gradient g.

    A draw is one batch of these prompts: cppo's larger one and greso's refill are not part of it.
    -> trained_fraction of the completions; second_moment, E|estimate|^2 / |g|^2; bias, |mean estimate - g| / |g|;
    bias_error, what the bias of `draws` draws of an unbiased estimator would be on average (root mean square);
    direction_bias, the bias that is left when the mean is scaled to fit best, the sine of its angle to g."""
    generator = torch.Generator().manual_seed(config.seed)
    advantages = group_advantages(rewards, scale_by_std=config.objective != "dr_grpo")
    pi, estimates = prompt_rule(history, config)(torch.arange(len(rewards))), []
    for _ in range(draws):
        prompt_weights, weights = draw_prompts(pi, config, generator), torch.zeros_like(rewards)
        kept = prompt_weights > 0
        inputs = advantages[kept], prompt_weights[kept], config
        weights[kept] = draw_completions(completion_probabilities(rewards[kept], *inputs), *inputs, generator)
        estimates.append(weights.flatten() * rewards.numel() / max(1, denominator(weights, rewards.numel(), config)))
    estimates = torch.stack(estimates)  # (draws, N G) coefficients of the completions' gradients; in g they are all 1
    full, mean = products.sum(), estimates.mean(dim=0)
    second_moment = ((estimates @ products) * estimates).sum(dim=1).mean() / full
    mean_square, projection = mean @ products @ mean / full, (mean @ products).sum() / full
    result = dict(trained_fraction=(estimates > 0).double().mean(), second_moment=second_moment,
                  bias=(mean_square - 2 * projection + 1).clamp(min=0).sqrt(),
                  bias_error=((second_moment - mean_square) / draws).clamp(min=0).sqrt(),
                  direction_bias=(1 - projection ** 2 / mean_square).clamp(min=0).sqrt())
    return {name: value.nan_to_num().item() for name, value in result.items()}  # 0/0: all rewards were equal


def time_to_accuracy(records: list[dict], target: float) -> float | None:
    """Seconds of training until the mean accuracy of three successive evaluations first reaches target, else None."""
    evaluated = [record for record in records if record.get("accuracy") is not None]
    for last in range(2, len(evaluated)):
        if sum(record["accuracy"] for record in evaluated[last - 2:last + 1]) / 3 >= target:
            return evaluated[last]["seconds"]


def time_to_prompts(records: list[dict], prompts: int) -> float:
    """Seconds of training until so many candidate prompts were seen, at the mean pace until then."""
    seen = list(accumulate(record["prompts_seen"] for record in records))
    last = next(i for i, n in enumerate(seen) if n >= prompts)
    return records[last]["seconds"] * prompts / seen[last]


def compare_with_grpo(summary: dict, records: list[dict], grpo: list[dict]) -> dict:
    """The figures of one run, from its summary and metrics, beside the metrics of grpo's run with the same seed."""
    final = [record["accuracy"] for record in grpo if record.get("accuracy") is not None][-3:]
    target = sum(final) / 3 if final else math.inf
    reached = time_to_accuracy(records, target)
    seen = min(sum(record["prompts_seen"] for record in run) for run in (grpo, records))
    totals = {name: sum(record[name] for record in records) for name in (
        "rollout_seconds", "train_seconds", "prompts_seen", "prompts_rolled", "completions_trained", "tokens_trained")}
    return dict(accuracy_before=summary["accuracy_before"], accuracy_after=summary["accuracy_after"],
                seconds=records[-1]["seconds"], time_to_grpo_accuracy=reached,
                speedup_accuracy=time_to_accuracy(grpo, target) / reached if reached else 0.0,
                speedup_prompts=time_to_prompts(grpo, seen) / time_to_prompts(records, seen), **totals)


def copied(task: Task) -> Task:
    """With a model of its own, and without the compiled decoding of static caches, which would stay the original's."""
    task = replace(task, model=copy.deepcopy(task.model))
    vars(task.model).pop("_compiled_call", None)
    return task


def compare(**settings) -> list[dict]:
    """Trains with every method of `compare` from the same start, on the same prompts in the same order -> table rows.

    settings: of Config, whose defaults depend on the method. A warm-up comes first, and the order of the methods
    rotates with the seeds, so that no figure depends on it; evaluation is not counted as time. Every run has its folder
    in the output directory, which also gets comparison.json, with the figures of every seed, and comparison.md."""
    base = Config(**settings)
    methods, out, rows = base.compare.split(","), new_output_dir(base), {}
    for number, seed in enumerate(range(base.seed, base.seed + base.compare_seeds)):
        task = load_task(replace(base, seed=seed))
        if number == 0:
            transformers.set_seed(seed)
            measured = frozen_rollouts(task, base, 4 * base.prompts_per_step)
            with open(os.devnull, "w") as nowhere:  # the first steps of a process are slower
                training_loop(copied(task), replace(base, compare="", eval_every=0, steps=3), nowhere, nowhere)
        first, runs = number * len(methods) // base.compare_seeds, {}
        for method in methods[first:] + methods[:first]:
            run = out / f"{method}-{seed}"
            config = Config(**settings | dict(method=method, seed=seed, output_dir=str(run)))
            summary = train(config, copied(task))
            runs[method] = summary, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            if method not in rows:
                rows[method] = dict(method=method, **measure_estimator(*measured, config))
        for method, (summary, records) in runs.items():
            for name, value in compare_with_grpo(summary, records, runs["grpo"][1]).items():
                rows[method].setdefault(name, []).append(value)
    rows = [rows[method] for method in methods]
    (out / "comparison.json").write_text(json.dumps(dict(device=DEVICE_NAME, config=asdict(base), rows=rows), indent=2))
    (out / "comparison.md").write_text(comparison_table(rows))
    print(f"\n{comparison_table(rows)}\nresults are in {out}")
    return rows


def comparison_table(rows: list[dict]) -> str:
    """The rows of compare as a Markdown table: medians over the seeds, lowest and highest accuracy in brackets.

    A run that never reached GRPO's accuracy counts as slower than all that did. The last three columns are measured at
    the first seed's start. Of a bias, and of a bias of direction, as much as the ± is chance."""
    def cells(row):
        middle = {name: median(values) for name, values in row.items() if type(values) is list and None not in values}
        before, after, speedups = row["accuracy_before"], row["accuracy_after"], row["speedup_accuracy"]
        accuracy = "none" if None in before + after else (
            f"{median(before):.3f} → {median(after):.3f} ({min(after):.3f} to {max(after):.3f})")
        reached, middle_run = sum(speedup > 0 for speedup in speedups), median_low(speedups)
        to_accuracy = f"{middle_run:.2f}x" if middle_run else "not reached"
        if 0 < reached < len(speedups):
            to_accuracy += f" ({reached} of {len(speedups)})"
        return [row["method"], accuracy, "{rollout_seconds:.1f} + {train_seconds:.1f}".format(**middle),
                "{speedup_prompts:.2f}x".format(**middle), to_accuracy,
                *(f"{middle[name]:,.0f}" for name in (
                    "prompts_seen", "prompts_rolled", "completions_trained", "tokens_trained")),
                "{second_moment:.2f}".format(**row), "{bias:.2f} ± {bias_error:.2f}".format(**row),
                "{direction_bias:.2f}".format(**row)]

    head = ["method", "accuracy before → after", "seconds: rollout + training", "speed-up, same prompts",
            "speed-up, GRPO's accuracy", "prompts seen", "rolled out", "completions trained", "tokens trained",
            "second moment", "bias", "bias of direction"]
    return markdown(head, map(cells, rows))


def markdown(head: list[str], rows) -> str:
    """A table of cells of text."""
    table = [head, ["---"] * len(head), *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in table)


# ---- 10. Benchmark ---------------------------------------------------------------------------------------------------

PHASES = ("rollout", "reward", "packing", "forward", "backward", "optimizer")
GSM8K_LIKE = dict(prompt=(8, 7.5, 194), completion=(5, 24.2, 453))  # tokens: shape and scale of a gamma; the longest


def gsm8k_like(kind: str, rng: random.Random) -> int:
    shape, scale, longest = GSM8K_LIKE[kind]
    return max(1, min(longest, round(rng.gammavariate(shape, scale))))


def random_task(config: Config) -> Task:
    """A model with random weights of the architecture that --model configures, and prompts of random tokens. At every
    position a completion ends with the same probability, for the mean length of GSM8K's; rewards are drawn."""
    architecture = attempt(f"--model {config.model} has no configuration",
                           lambda: transformers.AutoConfig.from_pretrained(config.model, trust_remote_code=False))
    transformers.set_seed(config.seed)
    with torch.device(DEVICE):
        model = prepare_model(transformers.AutoModelForCausalLM.from_config(architecture, dtype=DTYPE), config)
    tokenizer, rng = sorting_data(replace(config, eval_prompts=0))[2], random.Random(config.seed)
    model.generation_config.eos_token_id = end = tokenizer.eos_token_id
    head, size = model.get_output_embeddings(), architecture.vocab_size
    head.bias = torch.nn.Parameter(head.weight.new_zeros(len(head.weight)))
    head.bias.data[end] = math.log(size / (math.prod(GSM8K_LIKE["completion"][:2]) - 1))
    train = [dict(prompt="", prompt_ids=rng.choices(range(13, size), k=gsm8k_like("prompt", rng)),
                  solved=rng.choice([0, 0.2, 0.5, 0.8, 1])) for _ in range(8 * config.prompts_per_step)]
    reward = lambda prompts, completions, solved, **_: [float(rng.random() < p) for p in solved]
    return Task(train, {}, tokenizer, reward, model)


def training_flops(model, sequences: list[tuple]) -> float:
    """Of a forward and backward pass: 6 for each weight and token, the head's for completions only, and attention."""
    c, embedding, head = model.config, model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = sum(p.numel() for p in model.parameters()) - embedding.numel() - (head is not embedding) * head.numel()
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    width = c.num_hidden_layers * c.num_attention_heads * head_dim
    return sum(6 * (body * len(p + c) + head.numel() * len(c) + width * len(p + c) ** 2) for p, c in sequences)


def matrix_product_rate() -> float:
    """FLOP/s of a large matrix product in DTYPE on this device: what model FLOPs utilisation is relative to."""
    n, seconds = 8192 if DEVICE == "cuda" else 2048, []
    a = torch.randn(n, n, device=DEVICE, dtype=DTYPE)
    for _ in range(8):
        clock = now()
        a @ a
        seconds.append(now() - clock)
    return 2 * n ** 3 / min(seconds)


def now() -> float:
    """Seconds, once the device has done what it was asked."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def benchmark_step(task: Task, config: Config, history: dict, order: torch.Tensor, optimizer, draws) -> dict:
    """A step on the next prompts of `order` -> its figures. draws: a torch.Generator, and a random.Random or None; with
    it, what is trained is as long as GSM8K's solutions, not as what was rolled out."""
    phases, clock = dict.fromkeys(PHASES, 0.0), now()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def mark(phase):
        nonlocal clock
        phases[phase] -= clock
        clock = now()
        phases[phase] += clock

    generator, rng = draws
    window, prompts, prompt_weights = prune_prompts(order, history, config.prompts_per_step, config, generator)
    examples = [task.train[q] for q in prompts]
    completions = rollout(task, examples, config.group_size, config)
    mark("rollout")
    rewards = score_completions(task, examples, completions)
    mark("reward")
    rolled = sum(len(ids) for group in completions for ids in group)
    if rng:
        completions = [[rng.choices(range(2, 1000), k=gsm8k_like("completion", rng)) for _ in group]
                       for group in completions]
    sequences = [(e["prompt_ids"], ids) for e, group in zip(examples, completions) for ids in group]
    advantages = group_advantages(rewards)
    clock = now()
    pi = completion_probabilities(rewards, advantages, prompt_weights, config)
    weights = draw_completions(pi, advantages, prompt_weights, config, generator).flatten()
    update = train_step(task.model, optimizer, sequences, advantages.flatten(), weights,
                        len(window) * config.group_size, config, mark=mark)
    trained = [sequences[i] for i in weights.nonzero()]
    seconds = sum(phases.values())
    training = max(1e-9, seconds - phases["rollout"] - phases["reward"])  # 0 where no completion had an advantage
    return phases | dict(step=seconds, per_prompt=seconds / len(window), rollout_rate=rolled / phases["rollout"],
                         training_rate=sum(len(p + c) for p, c in trained) / training,
                         flops=training_flops(task.model, trained) / training, density=update["slot_density"],
                         memory=torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else math.nan)


def benchmark(config: Config, repeats: int = 5) -> dict:
    """Two tables, of rollouts by kind of cache and of steps without learning (at a rate of 0), printed and saved.

    What is compared alternates, and a first round, of warm-up, does not count. Medians, lowest and highest."""
    out = new_output_dir(config)
    random_weights = config.model and not config.dataset
    task = random_task(config) if random_weights else load_task(config)
    draws = torch.Generator().manual_seed(config.seed), random.Random(config.seed) if random_weights else None
    history, order = new_history(len(task.train)), torch.arange(len(task.train))
    for prompts in tqdm(order.split(config.prompts_per_step), desc="a first visit of the prompts"):
        _, rewards = scored_rollout(task, [task.train[q] for q in prompts], config.group_size, config)
        update_history(history, prompts, rewards, group_advantages(rewards))
    peak, optimizer = matrix_product_rate(), make_optimizer(task.model, config)
    optimizer.param_groups[0]["lr"] = 0.0
    caches = ["plain", "dynamic", "static", "paged"][:4 if DEVICE == "cuda" else 3]  # paged on a CPU is for tests
    steps = {"GRPO, padded": dict(method="grpo", pack_window=0), "GRPO, packed": dict(method="grpo"),
             "DPPO, packed": dict(method="dppo")}
    results = {name: [] for name in (*caches, *steps)}
    for repeat in tqdm(range(repeats + 1), desc="rounds"):
        for cache in caches:
            clock = now()
            groups = rollout(task, task.train[:config.prompts_per_step], config.group_size,
                             replace(config, rollout_cache=cache))
            seconds, rolled = now() - clock, sum(len(ids) for group in groups for ids in group)
            results[cache].append(dict(seconds=seconds, rollout_rate=rolled / seconds))
        for name, changes in steps.items():
            step = benchmark_step(task, replace(config, **changes), history,
                                  order.roll(-repeat * config.prompts_per_step), optimizer, draws)
            results[name].append(step | dict(utilisation=step["flops"] / peak))

    def cells(name, *columns):
        values = {column: [result[column] for result in results[name][1:]] for column in columns}
        return [name, *("not measured" if math.isnan(v[0]) else f"{median(v):.3g} ({min(v):.3g} to {max(v):.3g})"
                        for v in values.values())]

    columns = ("step", "per_prompt", "rollout_rate", "training_rate", "utilisation", "density", "memory", *PHASES)
    table = "\n\n".join([
        f"{DEVICE_NAME}, {str(DTYPE)[6:]}: a matrix product runs at {peak / 1e12:.3g} TFLOP/s",
        markdown(["rollout cache", "seconds", "tokens/s"], [cells(name, "seconds", "rollout_rate") for name in caches]),
        markdown(["step", "seconds", "s per prompt seen", "rollout tokens/s", "training tokens/s", "FLOPs utilisation",
                  "slot density", "peak GB", *PHASES], [cells(name, *columns) for name in steps])])
    attempt(f"--output_dir {out} cannot be written", lambda: out.mkdir(parents=True, exist_ok=True))
    (out / "benchmark.md").write_text(table)
    (out / "benchmark.json").write_text(json.dumps(dict(peak_flops=peak, config=asdict(config), results=results)))
    print(f"\n{table}\n\nresults are in {out}")
    return results


def stop_soon(number: int, frame) -> None:
    """Handles the first SIGINT or SIGTERM of a run; the second ends it at once."""
    STOP.append(number)
    signal.signal(number, signal.default_int_handler)
    sys.stderr.write("\nstopping after this step, with a checkpoint; once more stops at once\n")


def main() -> None:
    """The command line. Bad input is told in one line, with exit status 2."""
    parser = HfArgumentParser(Config, description=__doc__.partition("\n")[0], usage=SUPPRESS)
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
    try:
        settings = vars(parser.parse_args())
        if WORLD > 1:
            if DEVICE == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group()
        if settings["benchmark"]:
            benchmark(Config(**settings))
        elif settings["compare"]:
            compare(**settings)
        else:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, stop_soon)
            train(Config(**settings))
            if RANK == 0:
                print("next: --compare grpo,dppo puts methods side by side, --help lists the settings")
    except InputError as error:
        parser.exit(2, f"dppo.py: error: {error}\n")
    except KeyboardInterrupt as stopped:
        parser.exit(130, f"\n{stopped}\n" if stopped.args else
                    "\ninterrupted; what there is so far is in the run's folder\n")
    except torch.OutOfMemoryError:
        parser.exit(2, "dppo.py: error: out of memory: a smaller --micro_batch_tokens or --rollout_batch_size helps, "
                    "or --gradient_checkpointing\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
