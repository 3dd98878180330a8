"""Does it help a real model to prune prompts by history? The experiment and its analysis, which was
written before any arm but the control had run.

    python .github/epochs.py MODEL 0,1,2,3,4,5,6,7    # the runs of these seeds, then the analysis
    python .github/epochs.py                          # the analysis alone

A chat model calculates: of 384 prompts, a third are sums of one digit, which it soon always gets
right, a third sums of two digits, from which it learns, and a third products, which it never gets
right. With each seed, a first epoch prunes no prompt. From its model, with a fresh optimizer and
the rule's memory of that epoch, each arm then makes 72 steps, which for C are three epochs:

    C  dppo-proportional without pruning of prompts        the control
    T  dppo-proportional
    P  dppo

The settings, and bfloat16, in which a GPU would train, were chosen by a run of the control alone
(seed 100). It ended its epochs at 0.28, 0.47, 0.54 and 0.64, and in the last three 30, 20 and 16%
of the groups had a gradient.

Measured is the mean probability of the right answer to 96 held-out sums of two digits, without
sampling. Primary: its mean over the evaluations after the first epoch, T - C, paired by seed, with
a 95% t-interval. Secondary: the tokens that T generates until it is where C ends, over those of C;
and P - C. An interval above 0, together with at most 0.8 of the tokens, speaks for pruning. Against
it speaks that the share of groups with a gradient rises by less than a fifth, or that the interval
ends below 0.02. Otherwise it is not decided.
"""

import copy
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo

RESULTS = Path(__file__).with_name("comparison.json")
ARMS = {"C": ("dppo-proportional", 0.0), "T": ("dppo-proportional", 0.7), "P": ("dppo", 0.7)}
EPOCH, STEPS, EVERY = 24, 96, 12  # steps of the first epoch, of a run, between evaluations
SETTINGS = {"objective": "grpo", "learning_rate": 1e-5, "warmup_steps": 3, "temperature": 1.0}
SETTINGS |= {"prompts_per_step": 16, "max_completion_tokens": 8, "micro_batch_tokens": 2048}
# The range of both numbers, and what stands between them.
KINDS = {"easy": ((2, 9), (2, 9), "+"), "middle": ((10, 99), (10, 99), "+")}
KINDS |= {"hard": ((100, 999), (11, 99), "*")}
T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


def question(kind, rng, tokenizer):
    """An example of a kind, such as "What is 47 + 86?"."""
    first, second, sign = KINDS[kind]
    a, b = rng.randint(*first), rng.randint(*second)
    chat = dppo.Config(model="-", dataset="-", system_prompt="Reply with the number only.")
    prompt, ids = dppo.encode_prompt(f"What is {a} {sign} {b}?", chat, tokenizer)
    answer = str(a + b if sign == "+" else a * b)
    return {"prompt": prompt, "prompt_ids": ids, "answer": answer, "kind": kind}


def with_answer(example, answer, tokenizer):
    completion = tokenizer.encode(answer) + [tokenizer.eos_token_id]
    return dppo.Sequence(example["prompt_ids"], completion)


def make_task(path):
    """The data, and the model after 25 steps of demonstrations, in which half of the sums of two
    digits have a random number as their answer -> task, held-out examples."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    rng, size = random.Random(0), 24
    optimizer, config = dppo.MasterAdam(model, 1e-5), dppo.Config(**SETTINGS)
    for _ in range(25):
        sequences = []
        for kind in rng.choices([*KINDS], k=size):
            example = question(kind, rng, tokenizer)
            is_noise = kind == "middle" and rng.random() < 0.5
            answer = str(rng.randint(20, 198)) if is_noise else example["answer"]
            sequences.append(with_answer(example, answer, tokenizer))
        shares = torch.tensor([1 / (size * len(sequence.completion)) for sequence in sequences])
        inputs = (sequences, torch.ones(size), shares, None, None, config)
        dppo.train_step(model, optimizer, *inputs)
    train = [question(kind, rng, tokenizer) for kind in KINDS for _ in range(128)]
    rng.shuffle(train)
    taken, held_out = {example["prompt"][-1]["content"] for example in train}, []
    while len(held_out) < 96:
        example = question("middle", rng, tokenizer)
        if example["prompt"][-1]["content"] not in taken:
            taken.add(example["prompt"][-1]["content"])
            held_out.append(example)
    task = dppo.Task(train, {}, tokenizer, dppo.exact, model, [tokenizer.eos_token_id])
    return task, held_out


def probability(task, examples, config):
    """The mean probability of the right answers, with the end of the completion."""
    sequences = [with_answer(example, example["answer"], task.tokenizer) for example in examples]
    logprobs = dppo.frozen_logprobs(task.model, sequences, range(len(sequences)), config)
    return mean(logprobs[i].sum().exp().item() for i in range(len(sequences)))


def run(task, held_out, seed, arm, first, last, seen=0, remembered=()):
    """Steps first to last of an arm -> (prompts, rewards, A) of each rollout, records, seen."""
    method, prune_rate = ARMS[arm]
    config = dppo.Config(method=method, prompt_prune_rate=prune_rate, seed=seed, **SETTINGS)
    rule = config.rule_class(config, len(task.train))
    for visit in remembered:
        rule.remember(*visit)
    visits, records, remember = [], [], rule.remember
    rule.remember = lambda *visit: (visits.append(visit), remember(*visit))
    optimizer = dppo.MasterAdam(task.model, config.learning_rate)
    for step in range(first, last + 1):
        transformers.set_seed(1_000_003 * seed + seen)
        generator = torch.Generator().manual_seed(torch.randint(2**32, ()).item())
        rate = config.learning_rate * min(1.0, (step - first + 1) / config.warmup_steps)
        optimizer.param_groups[0]["lr"] = rate
        upcoming = dppo.next_prompts(seen, len(task.train), seed)
        inputs = (None, upcoming, dppo.Means(), generator, config)
        done = dppo.dppo_step(task, rule, optimizer, *inputs)
        seen += done.N
        [update] = done.updates
        record = {"step": step, "seen": done.N, "rolled": len(done.A)}
        record |= {"generated": int(done.lengths.sum()), "trained": update["tokens_trained"]}
        record["informative"] = int((done.A != 0).any(dim=1).sum())
        record["grad_norm"] = round(update["grad_norm"], 3)
        if step % EVERY == 0:
            record["probability"] = round(probability(task, held_out, config), 4)
            train = [example for example in task.train if example["kind"] == "middle"]
            record["of_training"] = round(probability(task, train, config), 4)
        records.append(record)
    return visits, records, seen


def make_runs(path, seeds, saved):
    """Adds to `saved` the runs that are missing: {arm: {seed: records}}, and "first" for the epoch
    that the arms share."""
    task, held_out = make_task(path)
    for seed in seeds:
        if all(str(seed) in saved.get(arm, {}) for arm in ARMS):
            continue
        start = replace(task, model=copy.deepcopy(task.model))
        visits, records, seen = run(start, held_out, seed, "C", 1, EPOCH)
        saved.setdefault("first", {})[str(seed)] = records
        for arm in ARMS:
            of_arm = replace(task, model=copy.deepcopy(start.model))
            inputs = (seed, arm, EPOCH + 1, STEPS, seen, visits)
            saved.setdefault(arm, {})[str(seed)] = run(of_arm, held_out, *inputs)[1]
        yield seed


def curve(records):
    return [record["probability"] for record in records if "probability" in record]


def tokens_until(records, level):
    """Tokens generated until an evaluation has reached the level; None if none has."""
    generated = 0
    for record in records:
        generated += record["generated"]
        if record.get("probability", 0) >= level:
            return generated
    return None


def interval(differences):
    """Mean and 95% t-interval."""
    half = T_QUANTILES[len(differences)] * stdev(differences) / len(differences) ** 0.5
    return [round(mean(differences) + shift, 4) for shift in (0, -half, half)]


def records_of(runs):
    """The records of all seeds."""
    return [record for of_seed in runs.values() for record in of_seed]


def total(runs, name):
    """The sum of a count in all runs."""
    return sum(record[name] for record in records_of(runs))


def analysis(saved):
    """What was decided beforehand."""
    seeds = sorted(saved["C"].keys() & saved["T"].keys() & saved["P"].keys())
    result = {"seeds": seeds}
    for arm in ("T", "P"):
        pairs = [(curve(saved[arm][seed]), curve(saved["C"][seed])) for seed in seeds]
        result[f"{arm} - C"] = interval([mean(one) - mean(control) for one, control in pairs])
        ratios = []
        for seed in seeds:
            level = curve(saved["C"][seed])[-1]
            tokens = tokens_until(saved[arm][seed], level)
            of_control = tokens_until(saved["C"][seed], level)
            ratios.append(tokens / of_control if tokens else math.inf)
        middle = median(ratios)  # infinite if too few get there, which JSON cannot say
        result[f"tokens of {arm} over those of C"] = middle if middle < math.inf else None
        result[f"seeds in which {arm} gets there"] = sum(map(math.isfinite, ratios))
    for arm in ARMS:
        runs = saved[arm]
        informative = total(runs, "informative") / total(runs, "rolled")
        result[f"groups with a gradient, {arm}"] = round(informative, 4)
        clipped = mean(record["grad_norm"] > 1 for record in records_of(runs))
        result[f"steps that are clipped, {arm}"] = round(clipped, 3)
    (_, low, high), ratio = result["T - C"], result["tokens of T over those of C"]
    rise = result["groups with a gradient, T"] / result["groups with a gradient, C"]
    if low > 0 and ratio is not None and ratio <= 0.8:
        result["verdict"] = "for"
    elif rise < 1.2 or high < 0.02:
        result["verdict"] = "against"
    else:
        result["verdict"] = "not decided"
    return result


def average(runs, name, step):
    """The mean over the seeds of what an evaluation measured."""
    return mean(record[name] for record in records_of(runs) if record["step"] == step)


def table(saved, result):
    """The runs and their analysis in Markdown, with a column for each arm."""
    rows = [[f"mean of {len(result['seeds'])} seeds", *ARMS], ["---"] * (len(ARMS) + 1)]
    for step in range(EPOCH + EVERY, STEPS + 1, EVERY):
        values = [f"{average(saved[arm], 'probability', step):.3f}" for arm in ARMS]
        rows.append([f"probability after {step} steps", *values])
    values = [f"{average(saved[arm], 'of_training', STEPS):.3f}" for arm in ARMS]
    rows.append(["of the training sums, at the end", *values])
    differences = [
        f"{mid:+.3f} ({low:+.3f} to {high:+.3f})"
        for mid, low, high in (result["T - C"], result["P - C"])
    ]
    rows.append(["mean after the first epoch, minus C", "", *differences])
    counts = {
        "seen": "prompts drawn from",
        "generated": "tokens generated",
        "trained": "tokens trained",
    }
    for name, label in counts.items():
        means = [total(saved[arm], name) / len(saved[arm]) for arm in ARMS]
        rows.append([label, *(f"{count:,.0f}" for count in means)])
    for label in ("groups with a gradient", "steps that are clipped"):
        rows.append([label, *(f"{result[f'{label}, {arm}']:.0%}" for arm in ARMS)])
    until = [result[f"tokens of {arm} over those of C"] for arm in ("T", "P")]
    until = [f"{ratio:.2f}" if ratio is not None else "-" for ratio in until]
    rows.append(["tokens until it is where C ends, over C's (median)", "", *until])
    reached = [str(result[f"seeds in which {arm} gets there"]) for arm in ("T", "P")]
    rows.append(["seeds in which it gets there", "", *reached])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def save(results):
    RESULTS.write_text(json.dumps(results).replace('"curve"', '\n"curve"') + "\n")


if __name__ == "__main__":
    results = json.loads(RESULTS.read_text())
    epochs = results.setdefault("epochs", {"settings": SETTINGS, "runs": {}})
    if sys.argv[1:]:
        for seed in make_runs(sys.argv[1], map(int, sys.argv[2].split(",")), epochs["runs"]):
            save(results)
            print(f"seed {seed} is complete", flush=True)
    if len(epochs["runs"].get("P", {})) > 1:
        epochs["analysis"] = analysis(epochs["runs"])
        save(results)
        print(table(epochs["runs"], epochs["analysis"]), f"\n{epochs['analysis']['verdict']}")
