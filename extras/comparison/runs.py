"""Makes the run of one arm with one seed, and saves what the analyses need of it."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch

import dppo
from extras import guess_or_pass, sums
from extras.comparison.arms import ARMS, SETTINGS, WITH_MEMORY, memory_of

RUNS = Path(__file__).resolve().parent.parent.parent / "runs" / "experiments"
SUMMED = ("prompts_seen", "prompts_rolled", "completions_trained", "tokens_generated")
SUMMED += ("tokens_trained", "processor_seconds", "rollout_processor_seconds")


def noting(rule_class):
    """A rule that prunes as `rule_class` does, and notes more of each step in its record:
    processor seconds, tokens generated, the noise by A^2, and, if the run is counted in epochs, an
    evaluation after each."""

    class Noting(rule_class):
        def __init__(self, config, examples):
            super().__init__(config, examples)
            self.memory["seen"] = torch.tensor(0.0)  # candidates, in memory so that a run resumes

        def step(self, task, optimizer, upcoming, generator):
            rolled_out = []

            def reward(**columns):
                rolled_out.append(time.process_time())  # as a rollout ends with its rewards
                return task.reward(**columns)

            started_at = time.process_time()
            step = super().step(replace(task, reward=reward), optimizer, upcoming, generator)
            noted = {
                "processor_seconds": time.process_time() - started_at,
                "rollout_processor_seconds": rolled_out[-1] - started_at,
                "tokens_generated": int(step.rollout.lengths.sum()),
            }
            squares = step.rollout.A.square()
            noises = (step.weights[0].square() * squares).mean(dim=1)
            noted["noise"] = noises.sum().item() / step.N**2
            noted["noise_of_one"] = (
                step.rollout.w_q @ squares.mean(dim=1)
            ).item() / step.N  # prompt
            epoch_before = self.memory["seen"] // self.prompt_count
            self.memory["seen"] += step.N
            is_epoch_over = self.memory["seen"] // self.prompt_count > epoch_before
            if is_epoch_over and self.config.epochs > 0:
                noted |= dppo.evaluate(task, self.config)
            step.updates[-1].update(noted)
            return step

    return Noting


def task_of(name, config):
    """The task of an experiment."""
    others = {"sums": sums.load_task, "guess or pass": guess_or_pass.load_task}
    return others.get(name, dppo.load_task)(config)


def train(name, settings, folder):
    """A run, or the rest of it -> its records."""
    config = dppo.configure(**settings, output_dir=str(folder))
    rule_class = noting(dppo.find("method", config.method, dppo.RULES))
    task = task_of(name, config)
    rule = rule_class(config, task.train)
    optimizer, records = dppo.start(task, rule, folder)
    if len(records) == 1:
        rule.memory["seen"].zero_()  # of the run whose memory this one starts with
    dppo.train(task, rule, optimizer, records, folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def summary(records, settings):
    """What is saved of a run. Its curve has, for each evaluation, the step, the processor seconds
    until then, those of rollouts alone, the completions generated, and the mean of each set."""
    curve = []
    seconds, rollout_seconds, generated = 0.0, 0.0, 0
    for record in records:
        seconds += record.get("processor_seconds", 0.0)
        rollout_seconds += record.get("rollout_processor_seconds", 0.0)
        generated += record.get("completions", 0)
        if "accuracy" in record:
            means = [record[name] for name in record if name.startswith("accuracy of ")]
            point = [record["step"], seconds, rollout_seconds, generated, *means]
            curve.append([round(value, 4) for value in point])
    steps = records[1:]
    totals = {"steps": len(steps)}
    for name in SUMMED:
        totals[name] = round(sum(record[name] for record in steps), 4)
    limit = settings.get("max_grad_norm", dppo.Config.max_grad_norm)
    totals["steps_clipped"] = sum((record["grad_norm"] or 0.0) > limit for record in steps)
    noise = sum(record["noise"] for record in steps)
    one = sum(record["noise_of_one"] for record in steps)
    totals["noise_in_prompts"] = round(one / noise, 3)  # as noisy as so many unpruned prompts
    zero_variance = [record["zero_variance_fraction"] for record in steps[:32]]
    totals["zero_variance_of_first_steps"] = round(sum(zero_variance) / len(zero_variance), 4)
    return {"curve": curve, "totals": totals, "settings": settings}


def make_run(name, seed, arm):
    """Makes runs/experiments/NAME/ARM-SEED.json, unless it is there -> what it has."""
    path = RUNS / name / f"{arm}-{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    settings = SETTINGS[name] | ARMS[name][arm] | {"seed": seed}
    source = memory_of(name, seed, arm)
    history = ""
    if source:
        other_seed, other_arm = source
        history = path.with_name(f"{other_arm}-{other_seed}.memory")
        if not history.exists():
            raise SystemExit(f'run this first: "{name}" {other_seed} "{other_arm}"')
    folder = path.with_suffix(".run")
    records = train(name, settings | {"history": str(history)}, folder)
    run = summary(records, settings)
    path.write_text(json.dumps(run))
    shutil.rmtree(folder / "model")
    if arm + WITH_MEMORY in ARMS[name]:  # another run may start with its memory
        folder.rename(path.with_suffix(".memory"))
    else:
        (folder / "checkpoint.pt").unlink()
    return run
