"""What several test files share. It has no tests of its own.

Five things are here, in this order:

1. Every outcome instead of chance: every_draw lists all outcomes of one draw, and every_result runs
   a function with all outcomes of all its draws.
2. Rewards, advantages and random completions of six prompts, and rules that remember visits to
   these prompts.
3. Given, a tiny Qwen3 with the losses of these completions, computed by the published formulas.
4. Models, tokenizers, tasks and runs that are tiny, and ways to look at a run.
5. Ways to interrupt a run, and to compare a resumed one.
"""

import dataclasses
import inspect
import itertools
import json
import pkgutil
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tokenizers
import torch
import transformers
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dppo
from dppo import Config, Sequence, Task, draw, group_advantages

torch.set_num_threads(1)  # the tensors are so small that more threads would only wait


# ==== 1. Every outcome instead of chance ====
def every_draw(pi, all_orders=True):
    """All outcomes of draw(pi) -> [(probability, (n,) weights)].

    A draw depends on a random order and on u. In one order, the outcome changes only where a point
    crosses the end of an interval, so it is enough to try one u between each two such places. Items
    with a pi of 0 or 1 do not shift the others, so they may always come last."""
    loose = [i for i in range(len(pi)) if 0 < pi[i] < 1]
    others = [i for i in range(len(pi)) if i not in loose]
    orders = list(itertools.permutations(loose)) if all_orders else [loose]
    outcomes = Counter()
    randperm, rand = mock.Mock(), mock.Mock()
    with mock.patch("torch.randperm", randperm), mock.patch("torch.rand", rand):
        for order in orders:
            order = torch.tensor([*order, *others]).long()
            randperm.return_value = order
            ends = (pi[order].cumsum(0) % 1).round(decimals=12).tolist()
            for low, high in itertools.pairwise(sorted({0.0, 1.0, *ends})):
                rand.return_value = torch.tensor([(low + high) / 2], dtype=torch.float64)
                weights = draw(pi, None)
                outcomes[tuple(weights.tolist())] += (high - low) / len(orders)
    return [(p, torch.tensor(weights, dtype=torch.float64)) for weights, p in outcomes.items()]


class OneMore(Exception):
    """A function asks for a draw that the script does not have."""


def every_result(function, *script):
    """All outcomes of a function that draws -> [(probability, result)].

    Its draws return the weights in the script, one after the other. If it asks for one more draw,
    every outcome of that draw makes a longer script."""
    with mock.patch.object(dppo, "draw", side_effect=[*script, OneMore]) as scripted:
        try:
            return [(1.0, function())]
        except OneMore:
            pi = scripted.call_args.args[0]
    results = []
    for p, weights in every_draw(pi):
        for p_rest, result in every_result(function, *script, weights):
            results.append((p * p_rest, result))
    return results


# ==== 2. Rewards, completions, and rules that remember ====
G = 3  # completions of each of six prompts
PAPER, OWN = "dppo", "extras.testing:OwnRule"

# In the first group and the last, all rewards are equal.
REWARDS = [[0, 0, 0], [1, 0.7, 0.2], [1, 0, 0], [0.4, 0.9, 1], [0, 0, 1], [1, 1, 1]]
REWARDS = torch.tensor(REWARDS, dtype=torch.float64)
ADVANTAGES = group_advantages(REWARDS)

rng = random.Random(0)
PROMPTS = [rng.choices(range(2, 13), k=8) for _ in range(6)]
SEQUENCES = []  # random completions of 20 to 54 tokens, group by group
for i in range(6 * G):
    SEQUENCES.append(Sequence(PROMPTS[i // G], rng.choices(range(2, 13), k=20 + 2 * i)))
LENGTHS = torch.arange(20, 56, 2).double().view(6, G)
LONGEST = 60  # --max_completion_tokens
MEAN_LENGTH = 30.0  # of completions in earlier steps
TEMPERATURE = 0.7
CLIPPING = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


class OwnRule(dppo.Rule):
    """A rule that depends on all that it may depend on."""

    def prompt_probabilities(self):
        return torch.tensor([0.5, 0.9, 0.25, 0.75, 0.5, 0.5])

    def completion_probabilities(self, advantages, prompt_weights):
        signs = advantages.sign_()  # in place, which must change nothing for others
        return torch.where((signs < 0) & (prompt_weights[:, None] < 3), 0.3, 1.0)


def rule_with_history(method=PAPER, r_q=0.9, r_o=0.7, **settings):
    """A rule after five visits to each prompt but the first. Three prompts taught nothing."""
    rates = {"prompt_prune_rate": r_q, "completion_prune_rate": r_o}
    config = Config(method=method, group_size=G, **rates | settings)
    rule = config.rule_class(config, prompt_count=6)
    rewards = torch.tensor([[0, 0, 1], [0, 0, 0], [0.1, 0.1, 0.1], [1, 1, 1], [0, 1, 1]]).double()
    for _ in range(5):
        rule.remember(torch.arange(1, 6), rewards, group_advantages(rewards))
    return rule


# ==== 3. The published losses, and a model to compare with them ====
def logprobs_of(model, sequence):
    """(tokens,) log-probabilities of a completion, by the model's own forward pass."""
    prompt, completion = sequence
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits.float() / TEMPERATURE).log_softmax(dim=-1)
    return logprobs[range(len(completion)), completion]


class Given:
    """A random Qwen3 in float64 and its reference. At later updates (not `first`) there is also an
    old policy, which differs so much that tokens are clipped."""

    def __init__(self, objective="grpo", first=True, dtype=torch.float64, **settings):
        defaults = {"group_size": G, "temperature": TEMPERATURE, "max_grad_norm": 1e9}
        defaults |= {"max_completion_tokens": LONGEST, "micro_batch_tokens": 768}
        self.settings = defaults | settings | {"objective": objective}
        self.config = Config(**self.settings)
        self.model = tiny_model(dtype)
        self.reference = tiny_model(dtype, initializer_range=0.1)
        with torch.no_grad():
            self.ref = {i: logprobs_of(self.reference, s) for i, s in enumerate(SEQUENCES)}
        old = {i: (0.6 + 0.2 * (i % 5)) * logprobs for i, logprobs in self.ref.items()}
        self.old = None if first else old
        self.Z = {"dr_grpo": LONGEST, "dapo": MEAN_LENGTH}.get(objective, LENGTHS)

    def losses(self, A):
        """(6, G) A -> (6, G) l by the published formulas, one completion at a time. Only the KL
        term differs: it is multiplied by the ratio of the policies."""
        objective = self.config.objective
        down, up = CLIPPING[objective]
        sums = []
        for i, A_i in enumerate(A.flatten()):
            logprobs = logprobs_of(self.model, SEQUENCES[i])
            log_ratio = logprobs - (self.old[i] if self.old else logprobs.detach())
            x = (self.ref[i] - logprobs).exp()
            kl = log_ratio.exp() * (x - 1 - x.log())
            if objective == "gspo":
                log_ratio = log_ratio.mean()
            rho = log_ratio.exp()
            surrogate = torch.min(rho * A_i, rho.clamp(1 - down, 1 + up) * A_i)
            sums.append((self.config.beta * kl - surrogate).sum())
        return torch.stack(sums).view(6, G) / self.Z

    def gradient(self, loss):
        """(parameters,) the gradient of a loss."""
        return parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))

    def descent(self, update):
        """(parameters,) the gradient that update(optimizer) follows. The move is undone."""
        before = self.parameters()
        update(torch.optim.SGD(self.model.parameters(), lr=1.0))
        gradient = before - self.parameters()
        vector_to_parameters(before, self.model.parameters())
        return gradient

    def parameters(self):
        return parameters_to_vector(self.model.parameters()).detach()

    def step(self, rule, optimizer, upcoming=range(6), mean_length=MEAN_LENGTH, rewards=REWARDS):
        """A rule's step, with the given completions and rewards instead of a rollout."""

        def rollout(task, prompts, *_):
            groups = [SEQUENCES[G * q : G * (q + 1)] for q in prompts]
            return sum(groups, []), rewards[prompts]

        examples = range(6)  # an example is its prompt's number
        task = Task(examples, {}, None, None, self.model, self.reference)
        rule.config = dataclasses.replace(rule.config, **self.settings)
        rule.memory["mean_length"] = torch.tensor(mean_length)
        with mock.patch.object(dppo, "rollout", rollout):
            return rule.step(task, optimizer, torch.tensor(upcoming), torch.Generator())

    def update(self, shares, optimizer, advantages=ADVANTAGES):
        """train_step, for all 18 completions."""
        inputs = (SEQUENCES, advantages, shares, self.old, self.ref, self.config)
        return dppo.train_step(self.model, optimizer, *inputs)


# ==== 4. Models, tasks and runs that are tiny ====
def tiny_model(dtype=torch.float64, name="Qwen3ForCausalLM", **sizes):
    """A model with 13 tokens and random weights that are large enough to matter."""
    torch.manual_seed(0)
    shape = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shape |= {"max_position_embeddings": 256, "initializer_range": 0.3}
    shape |= {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1}
    model = getattr(transformers, name)
    return model(model.config_class(**shape | sizes)).to(dtype).eval()


def tiny_tokenizer(chat_template=None):
    """A tokenizer with a token for each character of the sorting task."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "=", *"0123456789"])}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "chat_template": chat_template}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=characters, **special)


def lengths_reward(prompts, completions, **_):
    """A reward that differs within most groups of an untrained model, so that every step learns."""
    return [len(c) % (2 + len(p) % 3) / 3 for p, c in zip(prompts, completions)]


def seldom_teaches(prompts, completions, **_):
    """lengths_reward for long prompts, and 0 for short ones, so that it pays to prune these."""
    return [r * (len(p) > 5) for p, r in zip(prompts, lengths_reward(prompts, completions))]


def tiny_task(reward=lengths_reward, model=None, prompts=16):
    """Half of the prompts are short, and half are long."""
    tokenizer, rng, train = tiny_tokenizer(), random.Random(0), {}
    while len(train) < prompts:
        example = dppo.sorting_example(["easy", "middle"][len(train) % 2], rng, tokenizer)
        train[example["prompt"]] = example
    train = list(train.values())
    return Task(train, {"some": train[:4]}, tokenizer, reward, model or tiny_model(torch.float32))


def run(out, task=None, **settings):
    """A run of small steps to its end, new or resumed."""
    defaults = {"group_size": 4, "max_completion_tokens": 8, "output_dir": str(out)}
    config = dppo.configure(**defaults | settings)
    out, task = Path(config.output_dir), task or tiny_task()
    dppo.train(task, *dppo.start(config, task, out, is_new=not out.exists()))


def main(*arguments):
    """The command line, in this process, whose signals it leaves alone. Raises SystemExit only if
    the exit status is not 0."""
    with mock.patch.object(sys, "argv", ["dppo.py", *arguments]), mock.patch("signal.signal"):
        try:
            dppo.main()
        except SystemExit as ended:
            if ended.code:
                raise


def write_rows(path, *rows):
    """Writes a JSON object a line -> the file's name."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def metrics(out):
    """The records in a run's log, which must be strict JSON: without NaN."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def recorded(out, name):
    """One value of each step's record."""
    return [record[name] for record in metrics(out)[1:]]


def spy(monkeypatch, *names):
    """Lists, to which calls of dppo's functions are added as (arguments by name, result)."""

    def watched(real, calls):
        def watching(*values, **named):
            arguments = inspect.signature(real).bind(*values, **named).arguments
            result = real(*values, **named)
            calls.append((SimpleNamespace(**arguments), result))
            return result

        return watching

    lists = [[] for _ in names]
    for name, calls in zip(names, lists):
        real = pkgutil.resolve_name(f"dppo:{name}")
        monkeypatch.setattr(f"dppo.{name}", watched(real, calls))
    return lists


# ==== 5. Runs that are interrupted ====
# Settings of small runs that prune, make two updates a step, and move the model far.
SMALL = {"method": PAPER, "objective": "dapo", "prompts_per_step": 4, "inner_epochs": 2}
SMALL |= {"learning_rate": 3e-2, "prompt_prune_rate": 0.9}


def fail_in_step_4(monkeypatch, name, number, error):
    """Makes a function of dppo fail: in step 4, its number-th call and all later ones."""
    real, make_step = pkgutil.resolve_name(f"dppo:{name}"), dppo.make_step
    begun, calls = [], itertools.count(1)

    def noting(task, rule, optimizer, before):
        if before["step"] == 3:
            begun.append(True)
        return make_step(task, rule, optimizer, before)

    def failing(*values, **named):
        if begun and next(calls) >= number:
            raise error
        return real(*values, **named)

    monkeypatch.setattr(dppo, "make_step", noting)
    monkeypatch.setattr(f"dppo.{name}", failing)


def command_that_waits(out):
    """The command line with a tiny task, for a process of its own. In step 3 it waits for a line of
    input, first in the rollout, then half-way through saving."""
    rollouts, save = itertools.count(), torch.save
    signal.alarm(60)  # ends a process that waits in vain

    def wait(place):
        print(place, flush=True)
        sys.stdin.readline()

    def reward(**columns):
        if next(rollouts) == 3:  # after an evaluation and two steps
            wait("rollout")
        return lengths_reward(**columns)

    def slow_save(values, file):
        if len(values["records"]) == 4:
            file.write(b"half of it")
            file.flush()
            wait("saving")
            file.seek(0)
        save(values, file)

    torch.save = slow_save
    dppo.load_task = mock.Mock(return_value=tiny_task(reward))
    settings = SMALL | {"group_size": 4, "max_completion_tokens": 8, "steps": 6, "save_every": 2}
    sys.argv = ["dppo.py", f"--output_dir={out}"]
    sys.argv += [f"--{name}={value}" for name, value in settings.items()]
    dppo.main()


def status_of_process(script, out):
    """The exit status of a command_that_waits. The script says what it gets once it has printed a
    line with certain words: a signal, or a line of input if that is None."""
    code = "import sys, extras.testing; extras.testing.command_that_waits(sys.argv[1])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command, root = [sys.executable, "-c", code, str(out)], Path(dppo.__file__).parent
    with subprocess.Popen(command, cwd=root, **pipes) as process:
        for words, number in script.items():
            if not any(words in line for line in process.stdout):
                pytest.fail(f"it ended without a line with {words}")
            if number is None:
                process.stdin.write("\n")
                process.stdin.flush()
            else:
                process.send_signal(number)
        process.stdout.read()
    return process.returncode


def assert_same_run(one, other):
    """Two runs have the same weights and memory in the end, and the same records."""
    saved, again = torch.load(one / "checkpoint.pt"), torch.load(other / "checkpoint.pt")
    assert all(map(torch.equal, saved["masters"], again["masters"]))
    memories = [[*values["memory"].values()] for values in (saved, again)]
    assert all(a.nan_to_num(-1).equal(b.nan_to_num(-1)) for a, b in zip(*memories))
    for record, same in zip(metrics(one), metrics(other), strict=True):
        assert {name for name in record if record[name] != same.get(name)} <= {"seconds"}
