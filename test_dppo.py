"""The claims of dppo.py, each a test whose name is the sentence it proves. Run with: python -m pytest -q
`python test_dppo.py` tests the tests: it runs them on dppo.py with careless changes, one at a time."""

import copy, dataclasses, itertools, json, math, os, random, re, shlex
import shutil, signal, subprocess, sys, tempfile, time, timeit, warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import datasets, hypothesis, pytest, safetensors.torch, tokenizers, torch, transformers
import hypothesis.strategies as st

import dppo
from dppo import Config, Task, draw, group_advantages, keep_probabilities, pick_prompts, weigh_completions

hypothesis.settings.register_profile("ours", max_examples=200, deadline=None, derandomize=True)
hypothesis.settings.load_profile("ours")
torch.set_num_threads(1)  # for tensors this small, more threads only wait for each other
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
SCRIPT, OBJECTIVES = Path(dppo.__file__), [*dppo.CLIPPING]
# ---- What the tests work on ------------------------------------------------------------------------------------------
def tiny_model(dtype=torch.float64, device="cpu", **config):
    """A Qwen3 with 13 tokens and a few thousand random weights, large enough to matter."""
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**dict(
        vocab_size=13, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, initializer_range=0.3,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1) | config)).to(device, dtype).eval()
def tiny_tokenizer():
    """A token for each character of the sorting task."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "=", *"0123456789"])}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<end>")
def lengths_reward(prompts, completions, **_):
    """Differs within most groups, also of an untrained model: there is something to learn in every step."""
    return [len(c) % (2 + len(p) % 3) / 3 for p, c in zip(prompts, completions)]
def tiny_task(reward=lengths_reward, model=None, prompts=16) -> Task:
    tokenizer, rng, train = tiny_tokenizer(), random.Random(0), []
    while len(train) < prompts:
        example = dppo.sorting_example(["easy", "middle"][len(train) % 2], rng, tokenizer)
        train += [example] * (example not in train)
    return Task(train, {"some": train[:4]}, tokenizer, reward, model or tiny_model(torch.float32))
def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
def without_times(path: Path) -> list[dict]:
    aside = dict.fromkeys(
        "cumulative_seconds rollout_seconds train_seconds evaluation_seconds peak_memory_gb evaluation".split())
    return [record | aside for record in read_lines(path)]
def flat_gradient(loss, model) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
# ---- The expected gradient is that of the full batch -----------------------------------------------------------------
REWARDS = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.7, 0.2], [1.0, 1.0, 1.0], [0.0, 0.9, 1.0]], dtype=torch.float64)
(N, G), LENGTH = REWARDS.shape, 2.5  # LENGTH: the mean length m that dapo divides by
MEMORY = {name: torch.tensor(values, dtype=torch.float64) for name, values in dict(
    score=[math.nan, 0.9, 0.1, 0.2],  # mean 0.4: the last two are the low set
    right=[0.0, 4.0, 0.4, 7.0], wrong=[0.0, 4.0, 7.6, 1.0]).items()}
def rule_of(config: Config, prompts: int = N) -> dppo.Rule:
    """The method's rule, after visits that pruning can go by."""
    rule = dppo.RULES[config.method](config, prompts)
    rule.memory = {name: MEMORY[name].clone() if prompts == N else value for name, value in rule.memory.items()}
    return rule
def make_sequences() -> list[tuple]:
    rng = random.Random(0)
    return [([rng.randrange(2, 13) for _ in range(3 + q)], [rng.randrange(2, 13) for _ in range(1 + rng.randrange(7))])
            for q in range(N) for _ in range(G)]
def problem(objective="grpo", beta=0.0, **settings):
    """A batch with a real model's gradients, clipping, and KL: config, model, sequences, advantages, old, ref."""
    config = Config(objective=objective, beta=beta, max_grad_norm=1e9, temperature=1.0, group_size=G, **settings)
    sequences, model, generator = make_sequences(), tiny_model(), torch.Generator().manual_seed(1)
    logprobs = dppo.frozen_logprobs(model, sequences, [*range(N * G)], config)
    old, ref = ({i: p + 0.4 * torch.randn(p.shape, generator=generator) for i, p in logprobs.items()} for _ in range(2))
    return config, model, sequences, group_advantages(REWARDS, objective != "dr_grpo"), old, ref if beta else None
def completion_gradients(config, model, sequences, advantages, old, ref) -> torch.Tensor:
    """(N G, parameters) float64: each completion's share of the full batch's gradient, computed alone and unpadded."""
    rows = []
    for i, (_, completion) in enumerate(sequences):
        logprobs, _ = dppo.completion_logprobs(model, sequences, [[i]], 1.0)
        loss, *_ = dppo.policy_loss(logprobs, old[i][None], ref and ref[i][None], torch.tensor([len(completion)]),
                                    advantages.flatten()[[i]], torch.ones(1), N, LENGTH, config)
        rows.append(flat_gradient(loss, model))
    return torch.stack(rows)
def gradients_of(*args, **settings) -> tuple:
    """Of a problem: config, advantages, completion_gradients, and their sum, the full batch's gradient."""
    config, model, sequences, advantages, old, ref = problem(*args, **settings)
    gradients = completion_gradients(config, model, sequences, advantages, old, ref)
    return config, advantages, gradients, gradients.sum(0)
DRAWS = {}
def every_draw(pi: torch.Tensor, monkeypatch) -> Counter:
    """Every outcome of draw(pi) -> {weights: probability}, by running it for each interval of its number u, along each
    order. An item with pi = 0 or 1 moves no other's place between the teeth of the comb, so only the others are
    permuted. Where they sum to an integer, the comb closes to a ring, so that one of them may stay in front."""
    if (key := tuple(pi.tolist())) not in DRAWS:
        uncertain = [i for i in range(len(pi)) if 0 < pi[i] < 1]
        front = uncertain[:abs(pi[uncertain].sum() - pi[uncertain].sum().round()) < 1e-9]
        orders = [(*front, *others) for others in itertools.permutations(uncertain[len(front):])]
        rest, outcomes = {*range(len(pi))} - {*uncertain}, Counter()
        for order in orders:
            breakpoints = sorted({0.0, 1.0, *(pi[list(order)].cumsum(0) % 1).tolist()})
            for low, high in itertools.pairwise(breakpoints):
                with monkeypatch.context() as patch:
                    patch.setattr(torch, "rand", lambda *_, **__: torch.tensor([(low + high) / 2], dtype=torch.float64))
                    patch.setattr(torch, "randperm", lambda *_, **__: torch.tensor([*order, *rest], dtype=torch.long))
                    weights = draw(pi, None)
                outcomes[tuple(weights.tolist())] += (high - low) / len(orders)
        assert abs(sum(outcomes.values()) - 1) < 1e-12
        DRAWS[key] = outcomes
    return DRAWS[key]
def every_outcome(function, monkeypatch):
    """Every outcome of a function without arguments that draws once -> pairs (probability, what it returns)."""
    drawn = []
    def result_of(draw):
        with monkeypatch.context() as patch:
            patch.setattr(dppo, "draw", draw)
            return function()
    result_of(lambda pi, *_: drawn.append(pi) or (pi > 0).to(pi.dtype))
    for weights, probability in every_draw(*drawn, monkeypatch).items():
        yield probability, result_of(lambda *_: torch.tensor(weights, dtype=torch.float64))
def every_step(config, advantages, monkeypatch, rule=None):
    """Every outcome of both levels of pruning, with the functions of training -> (probability, (N, G) weights)."""
    rule, order = rule or rule_of(config), torch.arange(N)
    for p, (window, kept, prompt_weights) in every_outcome(lambda: pick_prompts(rule, order, N, None), monkeypatch):
        assert window.tolist() == order.tolist()
        inputs = rule, REWARDS[kept], advantages[kept], prompt_weights, N, None
        for p_completions, weights in every_outcome(lambda: weigh_completions(*inputs), monkeypatch):
            full = torch.zeros(N, G, dtype=torch.float64)
            full[kept] = weights
            yield p * p_completions, full
@pytest.mark.parametrize("prompt_rate, completion_rate", [(0.0, 0.6), (0.6, 0.0), (0.6, 0.6)])
@pytest.mark.parametrize("objective, beta", [*itertools.product(OBJECTIVES, (0.0, 0.1))])
@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
def test_expected_gradient_is_exactly_the_full_one(method, objective, beta, prompt_rate, completion_rate, monkeypatch):
    rates = dict(prompt_prune_rate=prompt_rate, completion_prune_rate=completion_rate)
    config, advantages, gradients, full = gradients_of(objective, beta, method=method, **rates)
    outcomes = [*every_step(config, advantages, monkeypatch)]
    expectation = sum(p * (w.flatten() @ gradients) for p, w in outcomes)
    assert len(outcomes) > 1 and full.norm() > 0.01 and (expectation - full).abs().max() < 1e-10

@pytest.mark.parametrize("objective", OBJECTIVES)
def test_grpo_skip_has_the_gradient_of_grpo_from_fewer_completions(objective, monkeypatch):
    trained = []
    for method in ("grpo", "grpo-skip"):
        config, advantages, gradients, full = gradients_of(objective, method=method)
        [(probability, weights)] = every_step(config, advantages, monkeypatch)
        assert probability == 1 and torch.equal(weights.flatten() @ gradients, full)
        trained.append((weights > 0).sum())
    assert trained[0] == N * G > trained[1]
def gradient_of_train_step(config, model, sequences, advantages, weights, old, ref) -> torch.Tensor:
    """What train_step changes the parameters by under plain gradient descent with rate 1: minus the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    dppo.train_step(model, optimizer, sequences, advantages.flatten(), weights.flatten(), N, LENGTH, config, old, ref)
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])
@pytest.mark.parametrize("micro_batch_tokens", [30, 4096])
@pytest.mark.parametrize("objective, beta", [*itertools.product(OBJECTIVES, (0.0, 0.1))])
def test_train_step_has_the_gradient_of_its_weights_cut_to_max_grad_norm(objective, beta, micro_batch_tokens):
    config, model, sequences, advantages, old, ref = problem(objective, beta, micro_batch_tokens=micro_batch_tokens)
    gradients = completion_gradients(config, model, sequences, advantages, old, ref)
    weights = torch.rand(N * G, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3
    weights[::4] = 0
    expected = weights @ gradients
    for factor, tolerance in ((1e9, 1e-6), (0.1, 1e-4)):
        config, model = dppo.replace(config, max_grad_norm=factor * expected.norm().item()), tiny_model()
        measured = gradient_of_train_step(config, model, sequences, advantages, weights, old, ref)
        assert expected.norm() > 0.01 and (measured - min(1, factor) * expected).norm() < tolerance * measured.norm()

@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
def test_expected_gradient_through_training_by_monte_carlo(method):
    """The draws that training makes, from a torch.Generator, and its own gradient: within 4 standard errors."""
    rates = dict(prompt_prune_rate=0.6, completion_prune_rate=0.6)
    config, model, sequences, advantages, old, _ = problem(method=method, **rates)
    state, rule = copy.deepcopy(model.state_dict()), rule_of(config)
    full = completion_gradients(config, model, sequences, advantages, old, None).sum(0)
    generator, samples = torch.Generator().manual_seed(3), []
    for _ in range(80):
        _, kept, prompt_weights = pick_prompts(rule, torch.randperm(N, generator=generator), N, generator)
        weights = torch.zeros(N, G, dtype=torch.float64)
        weights[kept] = weigh_completions(rule, REWARDS[kept], advantages[kept], prompt_weights, N, generator)
        model.load_state_dict(state)
        gradient = gradient_of_train_step(config, model, sequences, advantages, weights, old, None)
        samples.append(gradient @ full / full.norm() ** 2)
    samples = torch.stack(samples)
    assert samples.std() > 0.05 and abs(samples.mean() - 1) / (samples.std() / len(samples) ** 0.5) < 4

@pytest.mark.parametrize("objective, beta", [*itertools.product(OBJECTIVES, (0.0, 0.1))])
def test_policy_loss_is_its_formula_token_by_token(objective, beta, monkeypatch):
    assert dppo.CLIPPING == dict(grpo=(0.2, 0.2), dr_grpo=(0.2, 0.2), dapo=(0.2, 0.28), gspo=(3e-4, 4e-4))  # published
    monkeypatch.setitem(dppo.CLIPPING, objective, (0.1, 0.3))
    config = Config(objective=objective, beta=beta, max_completion_tokens=9, group_size=4)
    generator, lengths = torch.Generator().manual_seed(0), torch.tensor([3, 1, 7, 4])
    new, old, ref = -3 * torch.rand(3, 4, 7, generator=generator, dtype=torch.float64)  # also where there are no tokens
    advantages, weights = torch.tensor([[1.5, -0.5, -2.0, 0.7], [2.0, 1.0, 3.0, 0.5]], dtype=torch.float64)
    loss, clipped, kl = dppo.policy_loss(new, old, ref, lengths, advantages, weights, 3, 2.5, config)
    expected, expected_clipped, expected_kl = 0.0, torch.zeros(4, 7, dtype=bool), torch.zeros(4, 7).double()
    for i, length in enumerate(lengths.tolist()):
        normalizer = {"grpo": length, "gspo": length, "dr_grpo": 9, "dapo": 2.5}[objective]
        mean_log_ratio = (new[i, :length] - old[i, :length]).mean()
        for t in range(length):
            ratio = math.exp(mean_log_ratio if objective == "gspo" else new[i, t] - old[i, t])
            low, high = (x * advantages[i].item() for x in (min(max(ratio, 0.9), 1.3), ratio))
            k3 = math.exp(ref[i, t] - new[i, t]) - (ref[i, t] - new[i, t]).item() - 1 if beta else 0.0
            expected += weights[i].item() / normalizer * (beta * k3 - min(low, high)) / 12  # 3 prompts of 4 completions
            expected_clipped[i, t], expected_kl[i, t] = low < high, k3
    assert abs(loss - expected) < 1e-12 and clipped.equal(expected_clipped) and clipped.sum() > 3
    assert torch.allclose(kl * (torch.arange(7) < lengths[:, None]), expected_kl, atol=1e-12)
# ---- The ways to lose it, and that training does not -----------------------------------------------------------------
def relative_bias(estimate, monkeypatch) -> float:
    """|E[estimate(weights, gradients)] - full gradient| / |full gradient| under completion pruning at 0.6."""
    config, advantages, gradients, full = gradients_of(prompt_prune_rate=0.0, completion_prune_rate=0.6)
    expectation = sum(p * estimate(w.flatten(), gradients) for p, w in every_step(config, advantages, monkeypatch))
    return ((expectation - full).norm() / full.norm()).item()
def test_dividing_by_the_kept_count_or_weighing_1_is_biased_and_the_estimator_itself_is_not(monkeypatch):
    assert relative_bias(lambda w, g: w @ g, monkeypatch) < 1e-10
    assert relative_bias(lambda w, g: w @ g * N * G / (w > 0).sum(), monkeypatch) > 0.2
    assert relative_bias(lambda w, g: (w > 0).double() @ g, monkeypatch) > 0.05
    assert relative_bias(lambda w, g: (w > 0).double() @ g * N * G / (w > 0).sum(), monkeypatch) > 0.05

def test_deterministic_removal_of_the_lowest_is_biased_whatever_the_weights():
    _, advantages, gradients, full = gradients_of()
    scores = advantages.abs().flatten()
    kept = scores.argsort()[(scores == 0).sum() + 4:]
    for weight in (1.0, ((scores > 0).sum() / len(kept)).item()):
        assert (weight * gradients[kept].sum(0) - full).norm() / full.norm() > 0.05

def test_advantages_centred_anew_after_pruning_are_biased(monkeypatch):
    config, model, sequences, advantages, old, _ = problem(prompt_prune_rate=0.0, completion_prune_rate=0.6)
    full = completion_gradients(config, model, sequences, advantages, old, None).sum(0)
    expectation = torch.zeros_like(full)
    for probability, weights in every_step(config, advantages, monkeypatch):
        means = (advantages * (weights > 0)).sum(1) / (weights > 0).sum(1).clamp(min=1)
        gradients = completion_gradients(config, model, sequences, advantages - means[:, None], old, None)
        expectation += probability * (weights.flatten() @ gradients)
    assert (expectation - full).norm() / full.norm() > 0.05

def test_looking_on_until_enough_prompts_survive_is_biased():
    """Prompts of value 1, 0, 0, ..., each kept with probability 1/2, until one has survived: n are looked at with
    probability 2^-n. The survivor's weighted value over n is compared with the mean over the same n prompts."""
    assert sum(0.5 ** n * ((2 if n == 1 else 0) - 1) / n for n in range(1, 60)) > 0.3

def test_a_mask_reused_for_a_second_update_is_biased(monkeypatch):
    """Losses c (x - b)^2/2, two updates. Given x after the first, a fresh draw is unbiased; the first one is not."""
    b, c, pi = torch.tensor([[0.0, 1.0, 5.0, 2.0], [1.0, 2.0, 3.0, 4.0], [0.5] * 4], dtype=torch.float64)
    draws = {torch.tensor(weights, dtype=torch.float64): p for weights, p in every_draw(pi, monkeypatch).items()}
    bias_reused = bias_fresh = 0.0
    for w, p in draws.items():
        gradients = c * (0.25 * (w * c * b).mean() - b)  # at x = 0 - 0.25 * first gradient
        bias_reused += p * (w * gradients - gradients).mean()
        bias_fresh += p * sum(p_fresh * (fresh * gradients - gradients).mean() for fresh, p_fresh in draws.items())
    assert abs(bias_fresh) < 1e-12 and abs(bias_reused) > 0.1
class KeepLargest(dppo.GRPOSkip):
    """A biased rule, as somebody might plug one in: the larger half of all advantages, and it counts visits."""
    unbiased, remembers = False, {"visits": 0.0}
    def completion_probabilities(self, advantages, prompt_weights):
        return self.has_gradient(advantages) * (advantages.abs() >= advantages.abs().median())
    def update(self, prompts, rewards, advantages):
        self.memory["visits"][prompts] += 1
def spied_run(monkeypatch, folder, task=None, **settings) -> list[dict]:
    """A run -> for each step what pick_prompts, weigh_completions and train_step got and gave."""
    task, steps = task or tiny_task(prompts=48), []
    def spy(name, note):
        real = getattr(dppo, name)
        monkeypatch.setattr(dppo, name, lambda *args: (result := real(*args), note(*args, result))[0])
    spy("pick_prompts", lambda rule, *args: steps.append(dict(
        zip(("window", "prompts", "prompt_weights"), args[-1]), rule=rule, memory=copy.deepcopy(rule.memory),
        pi=rule.prompt_probabilities(), weights=[], updates=[])))
    spy("weigh_completions", lambda rule, rewards, advantages, *args: (
        steps[-1].update(rewards=rewards, advantages=advantages), steps[-1]["weights"].append(args[-1])))
    spy("train_step", lambda *args: steps[-1].update(optimizer=args[1].param_groups[0].copy()) or steps[-1]["updates"]
        .append(args[:-1]))
    task.evals = {}
    dppo.train(dppo.start(Config(**dict(steps=20, prompts_per_step=8, group_size=4, max_completion_tokens=8,
                                        output_dir=str(folder / "run")) | settings), task))
    return steps
@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_training_divides_by_all_candidates_with_whole_groups_advantages_over_pi(rate, monkeypatch, tmp_path):
    steps, heavy, seconds = spied_run(monkeypatch, tmp_path, completion_prune_rate=rate), 0, 0.0
    records, samples = (read_lines(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "samples"))
    for step, record, sample in zip(steps, records, samples):
        [(_, _, sequences, advantages, weights, divided_by, _, config, *_)] = step["updates"]
        assert torch.equal(advantages, group_advantages(step["rewards"]).flatten())
        assert torch.equal(weights, step["weights"][0].flatten()) and (rate == 0 or (weights == 0).any())
        assert divided_by == len(step["window"]) == record["prompts_seen"] and config.group_size == 4
        pi = step["pi"][step["prompts"]][:, None]
        assert rate > 0 or torch.allclose(weights.view(-1, 4), (step["advantages"] != 0) / pi)
        heavy += (pi < 1).sum()
        assert all(sample[name] == step[name][0].tolist() for name in ("rewards", "advantages"))
        assert sample["weights"] == weights[:4].tolist() and record["weight_max"] == weights.max()
        assert sample["prompt_weight"] == step["prompt_weights"][0]
        tokens = [len(completion) for (_, completion), w in zip(sequences, weights) if w]
        assert (record["completions_trained"], record["tokens_trained"]) == (len(tokens), sum(tokens))
        seconds += record["rollout_seconds"] + record["train_seconds"]
        assert record["cumulative_seconds"] == pytest.approx(seconds)
    assert heavy > 5 and sum(r["prompts_seen"] for r in records) > sum(r["prompts_rolled"] for r in records)

def test_with_inner_epochs_completions_are_drawn_anew_for_every_update(monkeypatch, tmp_path):
    for step in spied_run(monkeypatch, tmp_path, steps=3, inner_epochs=3, prompts_per_step=16, objective="dr_grpo"):
        assert torch.equal(step["advantages"], group_advantages(step["rewards"], scale_by_std=False))
        masks, old = {tuple((args[4] > 0).tolist()) for args in step["updates"]}, step["updates"][0][8]
        assert len(masks) == len(step["updates"]) == 3 and all(args[8] is old for args in step["updates"])
        assert {i for mask in masks for i, kept in enumerate(mask) if kept} == {*old}

def test_a_biased_rule_trains_on_the_mean_of_what_it_keeps_whatever_its_prompts_weigh(monkeypatch, tmp_path):
    monkeypatch.setitem(dppo.RULES, "largest", KeepLargest)
    for step in (steps := spied_run(monkeypatch, tmp_path, method="largest", steps=4)):
        [(_, _, _, _, weights, divided_by, *_)] = step["updates"]
        kept = (weights > 0).sum().item()
        assert divided_by == len(step["window"]) and kept < 4 * divided_by  # each weighs 1/kept of the loss
        assert {*weights.tolist()} == {0.0, 4 * divided_by / kept}
    assert steps[-1]["rule"].memory["visits"].sum() == 4 * 8
    rule = dppo.DPPO(Config(prompt_prune_rate=0.5), N)
    rule.memory, rule.unbiased, generator = {"score": MEMORY["score"]}, False, torch.Generator().manual_seed(0)
    _, kept, prompt_weights = pick_prompts(rule, torch.arange(N), N, generator)
    assert prompt_weights.tolist() == [1.0, 1.0, 2.0]
    weights = weigh_completions(rule, REWARDS[kept], group_advantages(REWARDS[kept]), prompt_weights, N, generator)
    assert {*weights.flatten().tolist()} == {0.0, N * G / (weights > 0).sum().item()}

def test_dapo_divides_by_the_mean_length_of_earlier_steps_as_prompts_weigh(monkeypatch, tmp_path):
    mean = None
    for step in spied_run(monkeypatch, tmp_path, objective="dapo", method="grpo", steps=6):
        [(_, _, sequences, _, _, divided_by, m, *_)] = step["updates"]
        length = sum(len(completion) for _, completion in sequences) / len(sequences)
        mean = mean or length
        assert divided_by == len(step["window"]) and abs(m - mean) < 1e-6
        mean = 0.9 * mean + 0.1 * length
    progress, inputs = SimpleNamespace(mean_length=None), ([[[1], [1] * 3], [[1] * 6] * 2], torch.tensor([3.0, 1.0]))
    assert dppo.running_length(progress, *inputs) == 3 and (3 * 2 + 6) / 4 == 3
    progress.mean_length = 5.0
    assert dppo.running_length(progress, *inputs) == 5 and progress.mean_length == 0.9 * 5 + 0.1 * 3
# ---- Keep probabilities, draws, windows ------------------------------------------------------------------------------
def test_advantages_are_trl_s_with_exact_zeros_for_equal_rewards_and_for_groups_that_are_not_gradable():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.1] * 4, [math.nan, 1.0, 0.0, 0.0]], dtype=torch.float64)
    advantages = group_advantages(rewards)
    assert torch.allclose(advantages[0], (rewards[0] - 0.25) / (rewards[0].std() + 1e-4), rtol=1e-9)
    assert advantages[1:].eq(0).all() and group_advantages(torch.full((3, 7), 0.1)).eq(0).all()
    assert torch.equal(group_advantages(rewards, scale_by_std=False)[0], rewards[0] - 0.25)

def test_keep_probabilities_prune_exactly_the_floor_of_the_low_set_and_nothing_without_a_score():
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4, 4.0])
    assert keep_probabilities(scores, 0.7).tolist() == [0.5] * 4 + [1.0]  # floor(0.7 * 4) = 2 of 4 go
    assert keep_probabilities(scores, 0.0).tolist() == [1.0] * 5
    assert keep_probabilities(scores, 0.2).tolist() == [1.0] * 5  # floor(0.8) = 0
    assert keep_probabilities(torch.tensor([0.1] * 100 + [50.0]), 0.29)[0] == 0.71  # 0.29 * 100 is 28.999999999999996
    scores = torch.tensor([math.nan, 1.0, 1.0, 4.0, math.nan])
    assert keep_probabilities(scores, 0.5).tolist() == [1.0, 0.5, 0.5, 1.0, 1.0]
    assert keep_probabilities(torch.full((3,), math.nan), 0.9).tolist() == [1.0] * 3
    assert keep_probabilities(torch.zeros(0), 0.9).tolist() == []
    for value, count in itertools.product((0.1, 0.7, 1 / 3, 1e-3), (3, 8, 11, 100)):  # equal scores: none is low
        noisy = torch.full((count,), value, dtype=torch.float32) * (1 + 1e-7 * torch.randn(count))
        assert keep_probabilities(noisy, 0.9).eq(1).all()

@pytest.mark.parametrize("pi", [[0.5] * 4, [0.4] * 5 + [1.0], [0.25, 0.5, 0.75, 0.5], [0.3, 0.9, 0.2, 0.05],
                                [0.0, 0.5, 0.5, 1.0], [1 / 3, 1 / 7, 0.2], [0.4] * 5])
def test_draw_keeps_each_item_with_its_own_probability_and_weighs_it_by_the_inverse(pi, monkeypatch):
    pi = torch.tensor(pi, dtype=torch.float64)
    outcomes = every_draw(pi, monkeypatch)
    expected_weight = sum(p * torch.tensor(w, dtype=torch.float64) for w, p in outcomes.items())
    assert torch.allclose(expected_weight, (pi > 0).double(), atol=1e-12)
    assert {sum(x > 0 for x in w) for w in outcomes} <= {math.floor(pi.sum() + 1e-9), math.ceil(pi.sum() - 1e-9)}
    if len({*pi.tolist()}) == 1:  # the uniform draw of a fixed number
        assert all(p == pytest.approx(1 / math.comb(len(pi), round(pi.sum().item()))) for p in outcomes.values())
@hypothesis.given(scores=st.lists(st.one_of(st.floats(0, 1e6), st.sampled_from([math.nan, 0.0])), min_size=1),
                  rate=st.floats(0, 0.99), seed=st.integers(0, 2 ** 31))
def test_any_scores_give_probabilities_and_a_draw_whose_weights_are_their_inverse(scores, rate, seed):
    scores = torch.tensor(scores, dtype=torch.float64)
    for pi in (keep_probabilities(scores, rate), dppo.optimal_probabilities(scores, rate, dppo.OptimalDPPO.floor)):
        assert ((pi > 0) & (pi <= 1)).all()
        kept = (weights := draw(pi, torch.Generator().manual_seed(seed))) > 0
        assert torch.allclose(weights[kept], 1 / pi[kept]) and abs(kept.sum() - pi.sum()) < 1 + 1e-6
        assert kept.sum() == pi.sum().round() or abs(pi.sum() - pi.sum().round()) > 1e-9
def rule_with(pi) -> dppo.Rule:
    class Given(dppo.Rule):
        prompt_probabilities = lambda self: torch.tensor(pi, dtype=torch.float64)
    return Given(Config(), len(pi))
def test_of_unlikely_prompts_one_is_kept_with_the_weight_of_its_chance(monkeypatch):
    outcomes = every_outcome(lambda: pick_prompts(rule_with([0.1, 0.2, 0.1]), torch.arange(3), 8, None), monkeypatch)
    chances = {(*kept.tolist(), *weights.tolist()): p for p, (_, kept, weights) in outcomes}
    assert chances == pytest.approx({(0, 4.0): 0.25, (1, 2.0): 0.5, (2, 4.0): 0.25})
def random_history(rule: dppo.Rule, generator) -> dppo.Rule:
    """Of a long run: rewards of two visits by policies of different strength; a fifth was never visited."""
    visited = torch.randperm(rule.prompt_count, generator=generator)[:rule.prompt_count * 4 // 5]
    for _ in range(2):
        p = torch.rand(len(visited), 1, generator=generator) ** 3
        rewards = (torch.rand(len(visited), 8, generator=generator) < p).double()
        rule.update(visited, rewards, group_advantages(rewards))
    return rule
@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
def test_the_window_is_the_longest_whose_survivors_never_exceed_the_batch(method):
    generator, longer = torch.Generator().manual_seed(0), 0
    for rate, _ in itertools.product((0.0, 0.3, 0.7, 0.95), range(20)):
        rule = random_history(dppo.RULES[method](Config(method=method, prompt_prune_rate=rate), 300), generator)
        order, pi = torch.randperm(300, generator=generator), rule.prompt_probabilities()
        window, kept, weights = pick_prompts(rule, order, 16, generator)
        assert torch.equal(window, order[:len(window)]) and len(window) >= 16 >= len(kept) > 15 - (rate > 0)
        assert pi[window].sum() <= 16 + 1e-9 < pi[order[:len(window) + 1]].sum()
        assert {*kept.tolist()} <= {*window.tolist()} and torch.allclose(weights, 1 / pi[kept])
        longer += len(window) > 16
    assert longer > 50
    assert pick_prompts(rule_with([0.5] * 6), torch.arange(5), 4, generator)[0].tolist() == [0, 1, 2, 3, 4]  # no more

def test_the_low_set_of_prompts_is_of_all_prompts_so_that_a_window_without_any_signal_is_pruned_too():
    rule = dppo.DPPO(Config(prompt_prune_rate=0.7), 40)
    rule.memory["score"] = torch.tensor([0.0] * 30 + [0.9] * 8 + [math.nan] * 2, dtype=torch.float64)
    window, kept, weights = pick_prompts(rule, torch.arange(40), 6, torch.Generator().manual_seed(0))
    assert len(window) == 20 and len(kept) == 6 and torch.allclose(weights, torch.full((6,), 30 / 9).double())

def test_a_score_is_the_mean_advantage_of_the_last_visit_and_pruned_prompts_keep_theirs(monkeypatch, tmp_path):
    steps, pruned = spied_run(monkeypatch, tmp_path, group_size=8, max_completion_tokens=16, steps=30), 0
    for step, following in itertools.pairwise(steps):
        expected = step["memory"]["score"].clone()
        expected[step["prompts"]] = step["advantages"].abs().mean(dim=1)
        assert torch.equal(expected.nan_to_num(-1), following["memory"]["score"].nan_to_num(-1))
        gone = [q for q in step["window"].tolist() if q not in step["prompts"]]
        pruned += (step["memory"]["score"][gone] > 0).sum()
    assert pruned > 10 and not steps[-1]["memory"]["score"].isnan().any()

def test_completions_without_a_gradient_cost_nothing_except_in_the_textbook_and_with_kl():
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [math.nan, 1.0]], dtype=torch.float64)
    for (method, rule), (beta, trained) in itertools.product(dppo.RULES.items(), ((0.0, 2), (0.1, 4))):
        rule = rule(Config(method=method, beta=beta, completion_prune_rate=0.0), 3)
        advantages, ones = group_advantages(rewards), torch.ones(3)
        assert (rule.completion_probabilities(advantages, ones)[:2] > 0).sum() == (4 if method == "grpo" else trained)
        weights = weigh_completions(rule, rewards, advantages, ones, 3, torch.Generator().manual_seed(0))
        assert weights[0].all() and not weights[2].any()  # the last group is not gradable
    advantages = torch.tensor([[2.0, 1.0, 1.0, 1.0], [0.0] * 4, [0.0] * 4], dtype=torch.float64)  # mean 1.25, not 0.42
    pi = dppo.DPPO(Config(completion_prune_rate=0.7), 3).completion_probabilities(advantages, torch.ones(3))
    assert torch.allclose(pi[0], torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3]).double()) and not pi[1:].any()
def binary_rewards(seed: int) -> torch.Tensor:
    """(64, 8) rewards 0 and 1, the success rates uniform on [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(64, 8, generator=generator) < torch.rand(64, 1, generator=generator)).double()
def second_moment(method: str, rate: float) -> float:
    """Of a sum of orthogonal gradients of norm |A|, where the full sum has 1: sum A^2/pi over sum A^2."""
    rule, pruned, full = dppo.RULES[method](Config(method=method, completion_prune_rate=rate), 64), 0.0, 0.0
    for seed in range(50):
        pi = rule.completion_probabilities(advantages := group_advantages(binary_rewards(seed)), torch.ones(64))
        assert (pi > 0).equal(advantages != 0)
        pruned += (advantages[pi > 0] ** 2 / pi[pi > 0]).sum()
        full += (advantages ** 2).sum()
    return (pruned / full).item()
def test_the_optimal_rule_has_at_most_the_paper_s_second_moment_at_every_rate():
    for rate in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95):
        assert second_moment("dppo-optimal", rate) <= second_moment("dppo", rate) + 1e-12
    assert second_moment("dppo-optimal", 0.9) <= 0.65 * second_moment("dppo", 0.9)

@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_the_optimal_rule_keeps_as_many_in_proportion_to_their_scores(rate):
    scores = (advantages := group_advantages(binary_rewards(0)))[advantages != 0].abs()
    pi = dppo.optimal_probabilities(scores, rate)
    assert abs(pi.sum() - keep_probabilities(scores, rate).sum()) < 1e-9
    assert pi.max() <= 1 and (pi / scores)[pi < 1].std() < 1e-9 and pi[scores.argmax()] == pi.max()
    floored = dppo.optimal_probabilities(torch.cat([scores, torch.full((5,), 1e-6)]), rate, 0.07)
    assert floored.min() == 0.07 and abs(floored.sum() - floored.sum().round()) < 1e-9
    assert dppo.optimal_probabilities(torch.tensor([math.nan, 1.0, 0.1, 0.1, 0.1]), rate)[0] == 1

@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
def test_choosing_among_300_000_prompts_takes_less_than_0_15_seconds_and_finds_pi_to_1e_9(method):
    generator, config = torch.Generator().manual_seed(0), Config(method=method)
    rule, scores = config.rule(config, 300_000), torch.rand(300_000, generator=generator).double() ** 3
    rule.memory["score"] = scores.masked_fill(scores < 0.01, 0.0).masked_fill(scores > 0.9, math.nan)
    choose = lambda: pick_prompts(rule, dppo.next_prompts(299_000, 300_000, 0), 32, generator)
    assert min(timeit.repeat(choose, number=1, repeat=3)) < 0.15 and len(choose()[0]) > 32
    pi, scores, low, high = rule.prompt_probabilities(), rule.memory["score"].nan_to_num(nan=math.inf), 0.0, 1e12
    for _ in range(100 * (method == "dppo-optimal")):
        c = (low + high) / 2
        low, high = (c, high) if (c * scores).clamp(0.07, 1).sum() < pi.sum().round() else (low, c)
    assert method == "dppo" or (pi - (high * scores).clamp(0.07, 1)).abs().max() < 1e-9

def test_optimal_completions_are_scored_with_the_weight_of_their_prompt():
    advantages = group_advantages(rewards := torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 8, dtype=torch.float64))
    prompt_weights = torch.tensor([10.0] + [1.0] * 7, dtype=torch.float64)
    rule = dppo.OptimalDPPO(Config(completion_prune_rate=0.9), 8)
    pi = rule.completion_probabilities(advantages, prompt_weights)
    assert pi[0, 0] == 1 and torch.allclose(pi[0, 1:], 10 * pi[1:, 1:]) and torch.allclose(pi[1:, 0], 3 * pi[1:, 1])
    weights = weigh_completions(rule, rewards, advantages, prompt_weights, 8, torch.Generator().manual_seed(0))
    assert weights[0, 0] == 10 and torch.allclose(weights[weights > 0], (prompt_weights[:, None] / pi)[weights > 0])

@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_optimal_prompts_are_scored_by_the_mean_over_the_posterior_of_their_success_rate(objective):
    rule, rewards = dppo.OptimalDPPO(Config(objective=objective, group_size=6), 4), torch.zeros(3, 8).double()
    rewards[1, :3], rewards[2] = 1, torch.tensor([1.0] * 7 + [0.5])
    rule.update(torch.arange(3), rewards, group_advantages(rewards))
    scores = rule.memory["score"]
    torch.manual_seed(0)
    for score, right in zip(scores, (0.0, 3.0, 7.5)):
        p = torch.distributions.Beta(0.05 + right, 8.05 - right).sample((300_000,))
        square = 2 * p * (1 - p) if objective == "dr_grpo" else 1 - p ** 6 - (1 - p) ** 6  # up to a constant factor
        assert abs(score ** 2 - square.mean()) < 5 * square.std() / 300_000 ** 0.5
    assert scores[3].isnan() and scores[1] > max(scores[0], scores[2])

def test_successes_are_summed_with_decay_and_rewards_count_within_0_and_1_which_is_said_once():
    rule, odd = dppo.OptimalDPPO(Config(), 3), ([1], [[-1.0, 2.0, 0.5, 0.0]])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for prompts, rewards in ([0, 1], [[1.0, 0.0, 0.0, 1.0], [0.0] * 4]), ([0], [[1.0] * 4]), odd, odd:
            rewards = torch.tensor(rewards, dtype=torch.float64)
            rule.update(torch.tensor(prompts), rewards, group_advantages(rewards))
    assert torch.allclose(rule.memory["right"], torch.tensor([0.8 * 2 + 4, 0.8 * 1.5 + 1.5, 0.0]).double())
    assert torch.allclose(rule.memory["wrong"], torch.tensor([0.8 * 2, 0.64 * 4 + 0.8 * 2.5 + 2.5, 0.0]).double())
    assert rule.prompt_probabilities()[2] == 1  # never visited
    assert [str(w.message)[:44] for w in said] == ["dppo-optimal takes rewards below 0 as 0, and"]

def test_groups_that_are_not_gradable_leave_successes_alone_and_lose_the_certainty_of_a_first_visit():
    rewards = torch.tensor([[1.0] * 4 + [math.nan] * 4] * 2 + [[1.0] * 4 + [0.0] * 4] * 38, dtype=torch.float64)
    rule = dppo.OptimalDPPO(Config(), 40)
    for _ in range(2):
        rule.update(torch.arange(40), rewards, group_advantages(rewards))
    assert rule.memory["right"][:3].tolist() == [0.0, 0.0, 7.2] == rule.memory["wrong"][:3].tolist()
    pi = rule.prompt_probabilities()
    assert pi[:2].tolist() == pytest.approx([0.5, 0.5]) and pi[2:].eq(1).all()

def test_a_prompt_twice_in_a_window_counts_both_visits_and_the_paper_s_score_is_of_the_later():
    rewards = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0] * 4, [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    for method in ("dppo", "dppo-optimal"):
        together, apart = (dppo.RULES[method](Config(method=method), 3) for _ in range(2))
        together.update(torch.tensor([1, 2, 1]), rewards, group_advantages(rewards))
        for q, group in zip((1, 2, 1), rewards[:, None]):
            apart.update(torch.tensor([q]), group, group_advantages(group))
        assert all(m.nan_to_num(-1).equal(apart.memory[name].nan_to_num(-1)) for name, m in together.memory.items())
    assert together.memory["right"][1] == 0.8 * 3 + 2

def test_of_prompts_that_look_useless_the_optimal_rule_keeps_7_in_100_and_with_kl_of_completions_too():
    rule = dppo.OptimalDPPO(Config(beta=0.1, prompt_prune_rate=0.99, completion_prune_rate=0.9), 50)
    rewards = torch.zeros(50, 4000).double()
    rewards[:5, ::2] = 1
    rule.update(torch.arange(50), rewards, group_advantages(rewards))
    assert (pi := rule.prompt_probabilities())[5:].eq(0.07).all() and pi[:5].min() > 0.07
    pi = rule.completion_probabilities(group_advantages(torch.eye(50)[:, :10].double()), torch.ones(50))
    assert pi[10:].eq(0.07).all() and pi[:10].max() > 0.9

@pytest.mark.parametrize("unbiased, wrong", [
    *itertools.product((True, False), ([2.0, 1, 1, 1], [-0.5, 1, 1, 1], [math.nan] * 4, [1.0] * 3, [[1.0]] * 4)),
    (True, [0.0, 1, 1, 1]), (False, [0.0] * 4)])
def test_wrong_probabilities_of_a_rule_of_one_s_own_are_refused_where_they_come_in(unbiased, wrong):
    advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2, dtype=torch.float64)
    class Mine(dppo.Rule):
        def prompt_probabilities(self):
            return torch.tensor(wrong)
        def completion_probabilities(self, advantages, prompt_weights):
            return torch.stack([torch.tensor(wrong)] * 2)
    Mine.unbiased, rule = unbiased, Mine(Config(), 4)
    with pytest.raises(ValueError, match=r"Mine.prompt_probabilities must give \(4,\) probabilities, 0 < pi <= 1"):
        pick_prompts(rule, torch.arange(4), 8, torch.Generator())
    if any(wrong):
        with pytest.raises(ValueError, match=r"Mine.completion_probabilities must give \(2, 4\) probabilities, 0 < pi"):
            weigh_completions(rule, advantages, advantages, torch.ones(2), 2, torch.Generator())
# ---- Packing ---------------------------------------------------------------------------------------------------------
@hypothesis.given(lengths=st.lists(st.integers(1, 50)), room=st.integers(0, 100), lookahead=st.integers(1, 90))
def test_every_sequence_is_packed_once_as_the_plain_algorithm_does_and_no_slot_overflows(lengths, room, lookahead):
    capacity = max(lengths, default=1) + room
    slots, waiting, plain, left = dppo.pack(lengths, capacity, lookahead), [*range(len(lengths))], [], 0
    while waiting:  # quadratic
        fitting = [i for i in waiting[:lookahead] if lengths[i] <= left]
        if not fitting:
            plain.append([])
            left, fitting = capacity, waiting[:lookahead]
        longest = max(fitting, key=lambda i: lengths[i])  # of equal lengths, the first
        plain[-1].append(waiting.pop(waiting.index(longest)))
        left -= lengths[longest]
    assert slots == plain and sorted(sum(slots, [])) == [*range(len(lengths))]
    assert all(0 < sum(lengths[i] for i in slot) <= capacity for slot in slots)

def test_packing_takes_the_longest_that_fits_among_the_next_in_order_and_200_000_in_less_than_two_seconds():
    clock, lengths = time.perf_counter(), random.Random(0).choices(range(1, 1001), k=200_000)
    assert sum(lengths) > 980 * len(dppo.pack(lengths, 1000)) and time.perf_counter() - clock < 2
    assert dppo.pack([5, 3, 8, 2, 2], capacity=10, lookahead=3) == [[2, 3], [0, 1, 4]]
    assert dppo.pack([5, 6, 5, 4], capacity=10, lookahead=1) == [[0], [1], [2, 3]]
    sequences = [([2] * 3, [3] * n) for n in (130, 50, 50, 70)]  # three slots of 136, for 133, 73 + 53 and 53 tokens
    for tokens, rows in ((408, [3]), (407, [2, 1]), (272, [2, 1]), (271, [1] * 3), (1, [1] * 3)):
        batches, density = dppo.pack_micro_batches(sequences, [0, 1, 2, 3], Config(micro_batch_tokens=tokens))
        assert [*map(len, batches)] == rows and density == 312 / 408
def padded_logprobs(model, sequences):
    """Each completion's log-probabilities from a padded batch with an attention mask: no packing anywhere."""
    width = max(len(p) + len(c) for p, c in sequences)
    ids, mask = (torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device) for rows in (
        [p + c for p, c in sequences], [[1] * len(p + c) for p, c in sequences]))
    logprobs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float().log_softmax(-1)
    logprobs = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return [logprobs[row, len(p) - 1:len(p) + len(c) - 1] for row, (p, c) in enumerate(sequences)]
@pytest.mark.parametrize("device, dtype, tolerance", [("cpu", torch.float32, 1e-5), *(
    pytest.param("cuda", *values, marks=CUDA.marks) for values in [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])])
def test_no_attention_crosses_a_boundary_so_that_packed_log_probabilities_and_gradients_are_those_of_padding(
        device, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(dppo, "LOGIT_CHUNK", 7)  # logits in chunks are the same
    model, sequences, logprobs = tiny_model(dtype, device), make_sequences(), {}
    weights = [(-1.0) ** i * (1 + i % 3) for i in range(len(sequences))]
    for slots in dppo.pack_micro_batches(sequences, [*range(N * G)], Config())[0]:
        assert max(map(len, slots)) > 1
        values, entropies = dppo.completion_logprobs(model, sequences, slots, 1.0)
        assert entropies.min() > 0 and len(entropies) == sum(len(sequences[i][1]) for i in sum(slots, []))
        for i, row in zip(sum(slots, []), values, strict=True):
            logprobs[i], rest = row.split([(length := len(sequences[i][1])), len(row) - length])
            assert not rest.any()
    packed = [logprobs[i] for i in range(N * G)]
    gradient = flat_gradient(sum(w * p.sum() for w, p in zip(weights, packed)), model).float()
    padded = padded_logprobs(model, sequences)
    expected = flat_gradient(sum(w * p.sum() for w, p in zip(weights, padded)), model).float()
    packed, padded = torch.cat(packed).detach(), torch.cat(padded).detach()
    assert (packed - padded).abs().max() < tolerance * padded.abs().max()
    assert (gradient - expected).norm() < tolerance * expected.norm()

def test_gradient_checkpointing_computes_layers_again_and_changes_nothing():
    gradients, calls = [], Counter()
    for again in (False, True):
        config, model, sequences, advantages, old, _ = problem()
        if again:
            model.activation_checkpointing_enable()
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.update([again]))
        weights = torch.ones(N * G, dtype=torch.float64)
        gradients.append(gradient_of_train_step(config, model, sequences, advantages, weights, old, None))
        assert not model.training
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12) and calls[True] == 2 * calls[False]
# ---- The policy that samples is the one that is trained --------------------------------------------------------------
SIZES = dict(vocab_size=13, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.4, pad_token_id=0, eos_token_id=1)
SOUND = {"Qwen2ForCausalLM": {}, "Gemma3ForCausalLM": dict(head_dim=8, sliding_window=8), "GPT2LMHeadModel": {}}
UNSOUND = {"GraniteForCausalLM": dict(logits_scaling=1.1), "OPTForCausalLM": dict(init_std=0.4), "BloomForCausalLM": {},
           "Gemma3nForCausalLM": dict(altup_num_inputs=2,  # it caps its logits at 30, which these hardly reach
               head_dim=8, layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.0, 0.0],
               hidden_size_per_layer_input=4, vocab_size_per_layer_input=13, laurel_rank=4, num_kv_shared_layers=0)}
UNABLE = {"Gemma2ForCausalLM": dict(head_dim=8),
          "Lfm2ForCausalLM": dict(block_ff_dim=32, layer_types=["conv", "full_attention"])}
def model_of(name: str):
    architecture = getattr(transformers, name)
    return architecture(architecture.config_class(**SIZES | (SOUND | UNSOUND | UNABLE)[name])).eval()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SOUND | UNSOUND)
def test_models_that_sample_as_they_are_trained_are_told_from_those_that_do_not_up_to_their_last_position(name, dtype):
    for seed in range(3):
        torch.manual_seed(seed)
        task, config = tiny_task(model=model_of(name).to(dtype)), Config(seed=seed, temperature=[0.7, 1.0, 1.3][seed])
        if name in SOUND:
            dppo.check_sampling(task, config)
            task.train = [{"prompt_ids": (e["prompt_ids"] * 9)[:26]} for e in task.train]
            dppo.check_sampling(task, dppo.replace(config, max_completion_tokens=6))  # of 32 positions
        else:
            with pytest.raises(ValueError, match=f"{name} cannot be trained here: .* (differ by|scales or caps)"):
                dppo.check_sampling(task, config)

@pytest.mark.parametrize("name, change", [
    ("temperature", lambda logprobs, model, sequences, slots, t, real: real(model, sequences, slots, 1.2 * t)[0]),
    ("leak", lambda logprobs, model, sequences, slots, t, real: logprobs + 0.01 * (logprobs < 0) * (len(slots[0]) > 4)),
    ("NaN", lambda logprobs, *_: logprobs.index_put([torch.tensor(0)] * 2, torch.tensor(math.nan)))])
def test_a_wrong_temperature_a_leak_between_sequences_and_nan_are_noticed(name, change, monkeypatch):
    task, real = tiny_task(), dppo.completion_logprobs
    dppo.check_sampling(task, Config())
    monkeypatch.setattr(dppo, "completion_logprobs", lambda *args: (change(real(*args)[0], *args, real), None))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot be trained here: log-prob.* differ by"):
        dppo.check_sampling(task, Config())
# ---- Rollout ---------------------------------------------------------------------------------------------------------
QWEN_GENERATION = dict(do_sample=True, temperature=0.5, top_k=3, top_p=0.7, repetition_penalty=1.5, min_p=0.2,
                       no_repeat_ngram_size=1, eos_token_id=[1, 12], pad_token_id=12)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_frequencies_match_the_probabilities_that_are_trained_whatever_the_model_s_defaults(temperature):
    task, draws, prompt = tiny_task(), 8000, [5, 4, 3, 7]
    task.model = tiny_model(torch.float32, vocab_size=80, initializer_range=0.1)  # over the 50 of generate's own top_k
    task.model.generation_config = own = transformers.GenerationConfig(**QWEN_GENERATION)
    config, _ = Config(temperature=temperature, max_completion_tokens=1), torch.manual_seed(0)
    first = Counter(ids[0] for ids in dppo.rollout(task, [{"prompt_ids": prompt}], draws, config)[0])
    with torch.no_grad():
        trained, entropy = dppo.completion_logprobs(
            task.model, [(prompt, [t]) for t in range(80)], [[t] for t in range(80)], temperature)
    trained = trained.squeeze(1)
    assert torch.allclose(entropy, -(trained.exp() @ trained).expand(80), rtol=1e-4)
    expected = (draws * trained.exp()).tolist()
    assert {*first} <= {*range(80)} and min(expected) > 5
    assert sum((first[t] - mean) ** 2 / mean for t, mean in enumerate(expected)) < 131  # 79 degrees, p = 2e-4
    assert task.model.generation_config is own and own.top_k == 3  # its own again

def test_completions_end_with_the_first_of_several_end_ids():
    (task := tiny_task()).model.generation_config = transformers.GenerationConfig(**QWEN_GENERATION)
    assert task.end_ids() == [1, 12]
    completions = dppo.rollout(task, task.train[:6], 20, Config(max_completion_tokens=9))
    flat = [ids for group in completions for ids in group]
    ended = [ids for ids in flat if ids[-1] in (1, 12)]
    assert all(not {1, 12} & {*ids[:-1]} for ids in flat) and {ids[-1] for ids in ended} == {1, 12}
    assert all(len(ids) == 9 for ids in flat if ids not in ended) and len({len(ids) for ids in ended}) > 3
    assert dppo.rollout(task, [{"prompt_ids": [5]}], 3, Config())[0][2]  # prompts of a single token are completed too

def test_rollouts_are_split_and_come_back_in_the_order_of_their_prompts(monkeypatch):
    task, sizes = tiny_task(), []
    def generate(task, prompts, samples, *_):  # "completes" with the prompt's length
        sizes.append(len(prompts) * samples)
        return [[len(prompt)] for prompt in prompts for _ in range(samples)], None
    monkeypatch.setattr(dppo, "generate", generate)
    completions = dppo.rollout(task, task.train, 3, Config(rollout_batch_size=10))
    assert completions == [[[len(e["prompt_ids"])]] * 3 for e in task.train] and sizes == [9] * 5 + [3]
# ---- The optimizer and its precision ---------------------------------------------------------------------------------
@pytest.mark.parametrize("warmup_steps, rates", [(0, [3.0] * 4), (3, [1.0, 2.0, 3.0, 3.0])])
def test_the_learning_rate_rises_over_the_warm_up_and_weights_do_not_decay(warmup_steps, rates, monkeypatch, tmp_path):
    groups = [step["optimizer"] for step in spied_run(
        monkeypatch, tmp_path, tiny_task(), steps=4, warmup_steps=warmup_steps, learning_rate=3e-3)]
    assert [group["lr"] for group in groups] == pytest.approx([rate * 1e-3 for rate in rates])
    assert all((group["weight_decay"], group["betas"]) == (0.0, (0.9, 0.99)) for group in groups)

@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_updates_far_below_bfloat16_resolution_are_not_lost_and_float32_models_have_no_masters(device):
    model = tiny_model(torch.float32)
    assert [*map(id, dppo.make_optimizer(model, Config()).param_groups[0]["params"])] == [*map(id, model.parameters())]
    config, model, steps = Config(learning_rate=1e-5, group_size=G), tiny_model(torch.bfloat16, device), 100
    optimizer, sequences, ones = dppo.make_optimizer(model, config), make_sequences(), torch.ones(N * G)
    masters, start = optimizer.param_groups[0]["params"], [p.detach().float().clone() for p in model.parameters()]
    count, unmoved = sum(p.numel() for p in masters), []
    for step in range(steps):
        dppo.train_step(model, optimizer, sequences, ones, ones, N, 1.0, config)
        unmoved.append(sum(p.float().eq(q).sum() for p, q in zip(model.parameters(), start)))
    assert unmoved[0] > 0.95 * count > 0.8 * count > unmoved[-1]
    moved = sum((p.detach() - q).abs().sum() for p, q in zip(masters, start)) / count
    assert 0.3 * steps * 1e-5 < moved <= steps * 1e-5 * 1.01
    assert all(torch.equal(p, master.bfloat16()) for p, master in zip(model.parameters(), masters))

def test_gradients_of_several_micro_batches_accumulate_in_float32(monkeypatch):
    """They are the float32 sum, in order, of the bfloat16 gradients of each alone; a bfloat16 sum would differ."""
    config, gradients = Config(micro_batch_tokens=1, max_grad_norm=1e9), []
    model, sequences = tiny_model(torch.bfloat16), [([2, 3, i + 2] * 22, [4, 5]) for i in range(8)]
    for weights in [*torch.eye(8), torch.ones(8)]:
        masters = (optimizer := dppo.make_optimizer(model, config)).param_groups[0]["params"]
        monkeypatch.setattr(optimizer, "step", lambda: gradients.append([p.grad.clone() for p in masters]))
        dppo.train_step(model, optimizer, sequences, torch.ones(8), weights, 1, 1.0, config)
    *alone, together = gradients
    for parts, whole in zip(zip(*alone), together):
        assert whole.dtype == torch.float32 and torch.equal(whole, sum(parts[1:], parts[0]))
    assert any(not torch.equal(p, sum((q.bfloat16() for q in parts[1:]), parts[0].bfloat16()).float())
               for parts, p in zip(zip(*alone), together))
# ---- Rewards ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, number", [
    ("#### 18", 18), ("so 3 + 4 = 7\n#### 1,234", 1234), ("####-5", -5), ("#### $70,000.", 70000), ("#### 50%", 50),
    ("it is 3.50.", 3.5), ("first 1 then 2", 2), ("5 - 3 = 2", 2), ("16-3", 3), ("-7", -7), ("answer: $-7", -7),
    ("1,2,3", 3), ("#### none, 4", 4), ("#### ", None), ("", None), ("7 ####", 7), ("\N{MINUS SIGN}4", -4), (".5", 0.5),
    ("no digits", None), ("\u0663\u0664", None), ("1/4 is 0.25", 0.25), ("#### 4 and 5", 4), ("#### 1\n#### 2", 2),
    ("#### 1e999999", None), ("2\n#### 1e9", 2), ("#### 12ab3", None), ("#### -0.0", 0), ("3m", 3)])
def test_gsm8k_numbers(text, number):
    assert dppo.gsm8k_number(text) == (number if number is None else dppo.Decimal(str(number)))

def test_gsm8k_reward_compares_numbers_and_says_none_without_an_answer():
    reward, answers = dppo.REWARDS["gsm8k"], ["x\n#### 18", "18", "1 8\n#### 18", "18.", r"\frac{3}{18}", None]
    rewards = reward(["?"] * 6, ["#### 18.0", "18", "$18.", "19", "18", "18"], answer=answers, level=[1] * 6)
    assert rewards == [1.0, 1.0, 1.0, 0.0, None, None]
    assert reward([[]], [[{"role": "assistant", "content": "#### 4"}]], [4]) == [1.0]

def written_by_the_notebook(name, **known) -> dict:
    cells = json.loads((SCRIPT.parent / "notebook.ipynb").read_text())["cells"]
    [code] = ["".join(cell["source"][1:]) for cell in cells if cell["source"][:1] == [f"%%writefile {name}\n"]]
    exec(code, module := known | {"__name__": "example"})
    return module
REWARDS_OF_ALL = dppo.REWARDS | {"boxed": written_by_the_notebook("boxed.py")["reward"]}
@pytest.mark.parametrize("given, gold, reward", [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1), (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1),
    (r"\boxed{1/2}", r"\tfrac{1}{2}", 1), (r"\boxed{1} then \boxed{2}", "2", 1), (r"\boxed{1} then \boxed{2}", "1", 0),
    (r"\boxed{2}, not 3", "2", 1), (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1),
    (r"\boxed{\text{Evelyn}}", "Evelyn", 1), (r"\boxed{x^{2}}", "x^2", 1), (r"\boxed{1,000}", "1000", 1),
    (r"\boxed{\$10.}", "10.0", 1), (r"\boxed{30^\circ}", "30", 1), (r"\boxed{50\%}", "50", 1), (r"\boxed{3", "3", 0),
    ("3", "3", 0), (r"\boxed{3}", r"thus \boxed{3}", 1), (r"\boxed {\{1,2\}}", r"\{1,2\}", 1), (r"\boxed{}", "", None),
    (r"\boxed{a_{n_{k}}}", "a_{n_{k}}", 1), (r"\boxed{5x}", "5", 0), (r"\leftarrow\boxed{2}", "2", 1),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1), (r"\boxed{3m}", "3", 0),
    (r"\boxed{70{,}000}", "70000", 1), (r"\boxed{10,\!080}", "10080", 1), (r"\boxed{30°}", "30", 1),
    (r"\boxed{3}", None, None), (r"\boxed{0}", "0.0", 1), (r"\boxed{1}", "0", 0), (r"\boxed{}", "0", 0)])
def test_boxed_rewards(given, gold, reward):
    assert REWARDS_OF_ALL["boxed"](prompts=["?"], completions=[given], answer=[gold]) == [reward]
MATH_ANSWERS = [
    r"\frac{270}7\text{ degrees}", r"\$32,\!348", r"864 \mbox{ inches}^2", r"10,\!080", r"11,\! 111,\! 111,\! 100",
    r"\frac43", r"\frac 59", r"11\sqrt2", ".0000672", r"137 \frac{1}{2}", r"1 \pm \sqrt{19}", "(3,4]",
    r"\left(\frac{3}{5},\frac{8}{3}\right]", r"x \in [-2,7]", "5x - 7y + 11z + 4 = 0", "52_8", "4210_{5}", "52", "4210",
    r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{pmatrix} -1 & 0 \\ 0 & 1 \end{pmatrix}", r"\text{(B)}",
    "11", r"\frac34", "-0.5", r"(-\infty, 2) \cup (3, \infty)", "2^{10}", "x^3+3x-6", "i", r"\text{east}", "6 - 5i"]
ZEROS = ["0", "0.0", "-0", "$0$", "0.", ".00", r"0\%", r"0^\circ", r"\$0", "\N{MINUS SIGN}0", r"\text{0}"]
def test_answers_as_math_spells_them_are_right_against_themselves_and_against_no_other():
    for answer in (answers := MATH_ANSWERS + ZEROS):  # all zeros are one
        texts = [rf"First \boxed{{7}}, no: the answer is $\boxed{{{answer}}}$, since 3 < 4."] * len(answers)
        rewards = REWARDS_OF_ALL["boxed"](prompts=texts, completions=texts, answer=answers)
        assert rewards == [float(gold == answer or {gold, answer} <= {*ZEROS}) for gold in answers], answer
HOSTILE = ["", "9" * 5000, "1e999999", "1e" + "9" * 30, "NaN", "Infinity", "#### 1e999999999999999999999",
           r"\boxed{" * 10_000, r"\boxed{" + "{" * 9_000 + "}" * 9_001, "\0\x1b[2J\ud800", "$" * 50_000, "1," * 50_000,
           r"\boxed{" + "5 " * 30_000 + "}", r"\boxed{5" + r"\text{" * 10_000, "__import__('os').abort()"]
FRAGMENTS = st.sampled_from([*HOSTILE[:7], *r"#### \boxed{ } { \ \\ $ , . - e E9 -inf \frac \text{ ^\circ cm".split(),
                             *r"\left( \! / 1,234 .5 ٣ १२ ½".split(), "\N{MINUS SIGN}", " ", "\n", "\0", "\u202e"])
@pytest.mark.parametrize("reward", REWARDS_OF_ALL.values(), ids=REWARDS_OF_ALL)
@hypothesis.given(completion=(text := st.one_of(st.text(), st.sampled_from(HOSTILE), st.lists(FRAGMENTS).map("".join))),
                  answer=text)
def test_hostile_text_gets_a_grade_or_none_and_never_raises(reward, completion, answer):
    for pair in itertools.product((completion, answer), repeat=2):
        assert reward(prompts=["?"], completions=[pair[0]], answer=[pair[1]])[0] in (0.0, 1.0, None)
# ---- The command line, data and bad input ----------------------------------------------------------------------------
def short(prompts, completions, **columns):  # a reward, as somebody might plug one in; then some that are wrong
    return [float(len(completion) < 4) for completion in completions]
two_values, no_opinion = lambda **_: [0.0] * 2, lambda prompts, **_: [None] * len(prompts)
nested = lambda prompts, **_: [[0.0]] * len(prompts)
def mistaken(completions, **_):
    return [re.findall("x", [completion]) for completion in completions]
@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A causal LM with random weights and its tokenizer, and a dataset, as a user has them in a folder."""
    folder = tmp_path_factory.mktemp("user")
    save_model(tiny_model(torch.float32), folder / "model")
    write_rows(folder / "data.jsonl", [{"question": f"{a}=", "answer": f"#### {a}"} for a in range(100, 180)])
    return folder
def save_model(model, path: Path, chat_template=None) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    for part in (model, tokenizer):
        part.save_pretrained(path)
    return path
def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
def python(*args, cwd=SCRIPT.parent, **environment) -> str:
    result = subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, cwd=cwd,
                            env=ENVIRONMENT | environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
def main(monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, "argv", ["dppo.py", *map(str, args)])
    dppo.main()
def refusal(monkeypatch, capsys, tmp_path, *args) -> str:
    """What main() prints with these arguments, which must be one line, with exit status 2."""
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exit_ = pytest.raises(SystemExit, main, monkeypatch, *args)
    lines = capsys.readouterr().err.strip().splitlines()
    assert exit_.value.code == 2 and len(lines) == 1 and len(lines[0]) < 480, lines
    return lines[0]
@pytest.mark.parametrize("args, message", [
    ("--prompt_prune_rate 1", "--prompt_prune_rate 1.0 must lie in [0, 0.99]"), ("--beta nan", "--beta nan must lie "),
    ("--group_size 1", "--group_size 1 must lie in [2, "), ("--method dpo", "--method dpo: not one of grpo, grpo-s"),
    ("--method math:nothing", "has no attribute 'nothing'"), ("--objective ppo", "objective ppo: not one of grpo, dr_"),
    ("--nonsense 1", "unrecognized arguments: --nonsense"), ("--learning_rate much", "invalid float value"),
    *((f"--{x} x", "--model and --dataset") for x in ("model", "dataset", "system_prompt", "model y --eval_dataset")),
    ("--model ./no --dataset x", "--model ./no: no such folder"), ("--resume", "expected one argument"),
    ("--reward math:nothing", "has no attribute 'nothing'"), ("--reward math:sqrt", "TypeError"),
    ("--reward typo", "--reward typo: not one of exact, gsm8k, nor package.module:name"),
    *((f"--reward test_dppo:{name}", "must return 100 finite numbers or None") for name in ("two_values", "nested")),
    ("--reward test_dppo:no_opinion", "--reward test_dppo:no_opinion grades none of 100 answers"),
    ("--reward test_dppo:mistaken", f"(in mistaken, {__file__}, line {mistaken.__code__.co_firstlineno + 1})"),
    ("--output_dir {run}", "is not empty; --resume {run} goes on"),
    ("--output_dir {run}/metrics.jsonl/x", "Not a directory"),
    ("--resume {run}", "No such file or directory: '{run}/checkpoint.pt'"), ("--resume x", "x/config.json"),
    ("--resume {run} --output_dir x", "leave out --output_dir")])
def test_bad_settings_are_told_in_one_line_before_any_model_is_loaded(args, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(dppo, "warm_started", None)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / name).write_text("{}\n")
    args, message = (x.replace("{run}", str(tmp_path)) for x in (args, message))
    assert message in refusal(monkeypatch, capsys, tmp_path, *args.split())
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"

def test_numbers_that_would_train_on_nonsense_are_refused_and_0_where_it_means_something_is_not():
    zero = "learning_rate prompt_prune_rate completion_prune_rate eval_prompts eval_every steps warmup_steps beta seed"
    for field, value in itertools.product(dataclasses.fields(Config), (-1, 0, math.nan, math.inf)):
        if value == 0 and field.name in (*zero.split(), "save_every", "gradient_checkpointing"):
            Config(**{field.name: value})
        elif field.type is float or field.type is int and value in (-1, 0):
            pytest.raises(ValueError, Config, **{field.name: value}).match(f"^--{field.name} {value} must lie in ")

@pytest.mark.parametrize("eval_prompts", [0, 2, 3, 61])
def test_the_embedded_task_holds_out_as_many_of_each_class_also_if_few_or_none(eval_prompts, monkeypatch, tmp_path):
    monkeypatch.setattr(dppo, "warm_started", lambda _: tiny_model(vocab_size=259))
    task = dppo.load_task(config := Config(steps=0, eval_prompts=eval_prompts, output_dir=str(tmp_path)))
    summary, trained = dppo.train(dppo.start(config, task)), {e["prompt"] for e in task.train}
    for name, (size, low, high) in dppo.SORTING.items():
        examples, of_class = task.evals.get(name, []), [e for e in task.train if low <= len(e["answer"]) <= high]
        assert len(examples) == eval_prompts // 3 and not trained & {e["prompt"] for e in examples}
        assert len(of_class) == size and task.train[:size] != of_class != task.train[-size:]  # shuffled
        assert all(low <= len(e["answer"]) <= high and sorted(e["prompt"]) == [*e["answer"], "="] for e in examples)
    assert (summary["after"]["accuracy"] is None) == (eval_prompts < 3) and summary["before"] == summary["after"]

def test_the_data_depends_neither_on_the_seed_nor_the_prompts_trained_on_on_how_many_are_held_out(folder):
    (train, evals, _), other, more = (dppo.sorting_data(Config(seed=seed, eval_prompts=prompts))
                                      for seed, prompts in ((0, 30), (1, 30), (0, 60)))
    assert (train, evals) == other[:2] and train == more[0] and all(more[1][x][:10] == evals[x] for x in dppo.SORTING)
    one, two = (dppo.load_examples(str(folder / "data.jsonl"), "train", Config(model="x", dataset="x", seed=seed),
                                   tiny_tokenizer()) for seed in (0, 1))
    assert one == two and len(one) == 80

def test_help_has_every_setting_once_in_its_group_and_no_default_that_says_none(monkeypatch, capsys):
    pytest.raises(SystemExit, main, monkeypatch, "--help")
    text, settings = capsys.readouterr().out, dataclasses.fields(Config)
    assert [*dppo.GROUPS.values()] == re.findall(r"^(\w+):$", text.partition("-h, --help")[2], re.MULTILINE)
    assert re.findall(r"^  --(\w+)", text, re.MULTILINE) == [f.name for f in settings]
    assert "None" not in text and "(0.0)" in text and all(f.metadata["help"].split()[0] in text for f in settings)
GOOD = [{"question": f"{a}=", "answer": f"{a}"} for a in range(100, 120)]
@pytest.mark.parametrize("rows, args, message", [
    ([], "", "data.jsonl"), ('{"question": "1=", "answer": "1"}\n{"question": "2=', "", "JSON"),
    ("cut parquet", "", "arquet"), ([{"question": "1", "answer": "B"}], "", "--reward gsm8k grades none"),
    ([{"text": "1", "label": "2"}], "", "has the columns text, label: --prompt_column names one"),
    ([{"prompt": "1", "label": "2"}], "", "--reward gsm8k grades none of 1 answers (--answer_column): the"),
    (GOOD, "--max_prompt_tokens 3", "no prompts of at most --max_prompt_tokens 3"),
    (GOOD, "--prompt_column q", "columns question, answer: --prompt_column names one"),
    (GOOD, "--chat_template_kwargs {", "JSONDecodeError"), (GOOD, "--eval_dataset data.jsonl:x:y:z", "data.jsonl"),
    (GOOD, "--eval_dataset {folder}/letters.jsonl", "grades none of 3 answers (--answer_column): {folder}/l"),
    (GOOD, "--dataset nowhere.jsonl", "nowhere.jsonl"), (GOOD, "--model {folder}", "dppo.py: error: "),
    (GOOD, "--max_completion_tokens 253", "may take 257 tokens, but"), ([{"question": 12, "answer": "1"}], "", "text"),
    ([{"question": "1=", "answer": ["1"]}], "", "gsm8k grades none")])
def test_bad_data_is_told_in_one_line(rows, args, message, folder, monkeypatch, capsys, tmp_path):
    data = tmp_path / ("data.parquet" if rows == "cut parquet" else "data.jsonl")
    data.write_text(rows) if isinstance(rows, str) else write_rows(data, rows)
    if rows == "cut parquet":
        datasets.Dataset.from_list(GOOD).to_parquet(data)
        data.write_bytes(data.read_bytes()[:-200])
    write_rows(tmp_path / "letters.jsonl", [{"question": "1", "answer": letter} for letter in "ABC"])
    monkeypatch.setattr(dppo, "check_sampling", None)
    args = ["--model", folder / "model", "--dataset", data, *args.replace("{folder}", str(tmp_path)).split()]
    assert message.replace("{folder}", str(tmp_path)) in refusal(monkeypatch, capsys, tmp_path, *args)

@pytest.mark.parametrize("name, message", [
    ("OPTForCausalLM", "OPTForCausalLM cannot be trained here: log-probabilities"), ("Gemma2ForCausalLM", "attention"),
    ("Lfm2ForCausalLM", "Lfm2ForCausalLM cannot be trained here: ")])  # an AttributeError deep inside
def test_models_that_cannot_be_trained_are_told_in_one_line(name, message, folder, monkeypatch, capsys, tmp_path):
    args = "--dataset", folder / "data.jsonl", "--max_completion_tokens", 8
    assert message in refusal(monkeypatch, capsys, tmp_path, "--model", save_model(model_of(name), tmp_path), *args)
CHAT_TEMPLATE = ("{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}="
                 "{% if enable_thinking is defined and not enable_thinking %}0{% endif %}{% endif %}")
def test_datasets_are_read_with_their_columns_and_long_prompts_are_left_out_and_counted(folder, tmp_path, capsys):
    rows = [{"question": text, "solution": "3", "level": 5} for text in ("12", "1" * 40, None, "")]
    data, tokenizer = str(write_rows(tmp_path / "a.jsonl", rows * 5)), tiny_tokenizer()
    config = Config(model="x", dataset=data, max_prompt_tokens=20, system_prompt="7")
    examples = dppo.load_examples(data, "train", config, tokenizer)
    assert "left out 15 of 20 prompts, empty or over" in capsys.readouterr().out
    assert examples == [dict(question="12", prompt="7\n\n12", prompt_ids=tokenizer("7\n\n12")["input_ids"],
                             solution="3", answer="3", level=5)] * 5

@pytest.mark.parametrize("slice_, numbers", [
    ("train", [*range(9)]), ("train[6:]", [6, 7, 8]), ("train[:2]+train[-1:]", [0, 1, 8]), ("train[:33%]", [0, 1, 2])])
def test_a_split_may_be_a_slice_and_a_reward_of_one_s_own_needs_no_answers(slice_, numbers, monkeypatch, tmp_path):
    rows, given = datasets.Dataset.from_list([{"prompt": f"{i}="} for i in range(9)]), []
    rows.to_parquet(data := tmp_path / "a.parquet")
    config, tokenizer = Config(model="x", dataset="x", reward="test_dppo:short"), tiny_tokenizer()
    examples = dppo.load_examples(f"{data}:{slice_}", "test", config, tokenizer)
    assert sorted(e["prompt"] for e in examples) == [f"{i}=" for i in numbers] and examples[0]["answer"] is None
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, split, **_: given.append((*args, split)) or rows)
    dppo.load_examples(f"openai/gsm8k:main:{slice_}", "test", config, tokenizer)
    assert given == [("openai/gsm8k", "main", slice_)]

def test_chat_templates_verl_s_nested_answers_and_several_evaluation_sets(tmp_path):
    messages, path = [{"role": "user", "content": "12"}], str(tmp_path / "verl.parquet")
    rows = [{"prompt": [{"role": "system", "content": "88"}, *messages],
             "reward_model": {"ground_truth": "21", "style": "rule"}}] * 6
    datasets.Dataset.from_list(rows).to_parquet(path)
    text = str(write_rows(tmp_path / "text.jsonl", [{"problem": "34", "answer": "43"}] * 3))
    config = Config(model=str(save_model(tiny_model(torch.float32), tmp_path / "m", CHAT_TEMPLATE)), dataset=path,
                    system_prompt="9", eval_dataset=f"{path}:train,{text}", eval_prompts=5, max_completion_tokens=8,
                    chat_template_kwargs='{"enable_thinking": false}')
    task = dppo.load_task(config)
    assert len(task.train) == 6 and {name: len(e) for name, e in task.evals.items()} == {f"{path}:train": 5, text: 3}
    assert task.train[0]["prompt"] == [{"role": "system", "content": "9"}, *messages]
    assert task.train[0]["answer"] == "21" and task.tokenizer.decode(task.train[0]["prompt_ids"]) == "912=0"
    assert task.evals[text][0]["prompt"][1] == {"role": "user", "content": "34"}
    assert {*dppo.evaluate(task, config)} == {"accuracy", f"{path}:train", text}
    own = dppo.load_examples(path, "train", Config(model="x", dataset="x"), task.tokenizer)[0]
    assert own["prompt"] == rows[0]["prompt"] and task.tokenizer.decode(own["prompt_ids"]) == "8812="

@pytest.mark.parametrize("eval_prompts, held_out", [(10, 10), (256, 16), (0, 0)])
def test_without_evaluation_sets_at_most_a_fifth_of_the_data_is_held_out(eval_prompts, held_out, folder, monkeypatch):
    monkeypatch.setattr(dppo, "check_sampling", lambda *_: None)
    task = dppo.load_task(Config(model=str(folder / "model"), dataset=str(folder / "data.jsonl"),
                                 eval_prompts=eval_prompts, max_completion_tokens=6))
    parts = [[e["question"] for e in part] for part in (task.train, *task.evals.values())]
    assert [*map(len, parts)] == [80 - held_out, held_out][:1 + bool(held_out)] and len({*sum(parts, [])}) == 80
    assert parts[0] != sorted(parts[0])  # shuffled

def test_rewards_get_trl_s_arguments_and_none_is_not_gradable():
    task, calls = tiny_task(), []
    task.reward = lambda **arguments: calls.append(arguments) or [None, 1, 0.5, True]
    examples = [dict(prompt="12=", prompt_ids=[1], answer="12", solution="12", level=1),
                dict(prompt=[{"role": "user", "content": "3"}], prompt_ids=[2], answer="3", solution="3", level=2)]
    rewards = dppo.reward_completions(task, examples, [[[3, 4, 1], [5]], [[6, 1], [7, 7]]])
    assert rewards.nan_to_num(-1).tolist() == [[-1.0, 1.0], [0.5, 1.0]]
    assistant = [[{"role": "assistant", "content": "3"}], [{"role": "assistant", "content": "44"}]]
    assert calls[0] == dict(prompts=["12=", "12=", *[examples[1]["prompt"]] * 2], completions=["01", "2", *assistant],
                            answer=["12", "12", "3", "3"], solution=["12", "12", "3", "3"], level=[1, 1, 2, 2])

def test_a_rule_a_reward_a_model_and_data_of_one_s_own_are_named_on_the_command_line(folder, tmp_path):
    data = folder / "data.jsonl"
    common = ["--model", folder / "model", "--dataset", data, "--eval_dataset", f"{data}:train", "--eval_prompts", 5,
              "--max_completion_tokens", 6, "--prompts_per_step", 8, "--reward", "test_dppo:short"]
    out = tmp_path / "run"
    printed = python(SCRIPT, *common, "--method", "test_dppo:KeepLargest", "--steps", 4, "--output_dir", out)
    assert printed.splitlines()[-1].endswith(f"results are in {out}")
    assert torch.load(out / "checkpoint.pt", weights_only=True)["memory"]["visits"].sum() == 4 * 8
    records = read_lines(out / "metrics.jsonl")
    assert len(records) == 4 and all(r["completions_trained"] < 64 for r in records)
    assert all(r["effective_sample_size"] == pytest.approx(r["completions_trained"]) for r in records)  # equal weights
    summary = json.loads((out / "summary.json").read_text())
    assert summary["after"][f"{data}:train"]["prompts"] == 5 and summary["config"]["method"] == "test_dppo:KeepLargest"
    own = transformers.GenerationConfig.from_pretrained(out / "model")
    assert own.top_k != 0 and own.max_new_tokens is None  # the model's own, not the rollouts'
# ---- Runs ------------------------------------------------------------------------------------------------------------
METRICS = set("""step learning_rate prompts_seen prompts_rolled prompts_pruned ungradable_prompts reward skipped kl
    completion_length truncated_fraction zero_variance_fraction completions_trained tokens_trained slot_density entropy
    weight_max effective_sample_size grad_norm clip_fraction rollout_seconds train_seconds evaluation_seconds
    cumulative_seconds peak_memory_gb""".split())
RUN = dict(steps=10, prompts_per_step=4, group_size=4, max_completion_tokens=6, save_every=1, method="dppo-optimal",
           objective="dapo", inner_epochs=2, learning_rate=1e-3)
def run(out: Path, task=None, resume=False, **settings) -> list[dict]:
    settings = RUN | settings | {"resume" if resume else "output_dir": str(out)}
    dppo.train(dppo.start(Config(**settings), task or tiny_task()))
    return without_times(out / "metrics.jsonl")
@pytest.mark.parametrize("settings", [dict(), dict(method="grpo", objective="dr_grpo", inner_epochs=1),
                                      dict(method="dppo", objective="gspo", beta=0.05)])
def test_a_seed_gives_the_same_metrics_however_often_one_evaluates_and_another_others(settings, tmp_path):
    def some_graded(prompts, completions, **_):
        return [None if "8" in p[:2] else r for p, r in zip(prompts, lengths_reward(prompts, completions))]
    first, again, other = (run(tmp_path / name, tiny_task(some_graded), seed=seed, eval_every=every, **settings)
                           for name, seed, every in (("first", 4, 0), ("again", 4, 5), ("other", 1, 0)))
    assert first == again != other
    assert all({*record} == METRICS for record in read_lines(tmp_path / "first" / "metrics.jsonl"))
    assert [r["step"] for r in read_lines(tmp_path / "again" / "metrics.jsonl") if "evaluation" in r] == [5, 10]
    assert (first[-1]["kl"] > 0) == ("beta" in settings)
    assert any(r["clip_fraction"] for r in first) == ("inner_epochs" not in settings)
    samples = read_lines(tmp_path / "first" / "samples.jsonl")
    assert all(len(sample[name]) == 4 for sample in samples for name in ("completions", "rewards", "weights"))
    assert any(sample["rewards"] == [None] * 4 for sample in samples)

def test_evaluation_is_the_same_each_time_shows_its_progress_and_is_not_run_twice(monkeypatch, tmp_path, capsys):
    results, real = [], dppo.evaluate
    monkeypatch.setattr(dppo, "evaluate", lambda *args: results.append(real(*args)) or results[-1])
    run(tmp_path, steps=4, eval_every=2, learning_rate=0.0)
    assert len(results) == 3 and results[0] == results[1] == results[2] == read_lines(tmp_path / "metrics.jsonl")[3][
        "evaluation"] == json.loads((tmp_path / "summary.json").read_text())["after"]
    assert capsys.readouterr().err.count("evaluating some:") >= 3

def test_evaluations_average_over_prompts_and_say_null_where_nothing_is_graded(tmp_path, capsys):
    graded = iter([[1, 0, 0, 0], [1, 1, 0, None, 1, 0], [None] * 2])
    task = tiny_task(lambda prompts, **_: next(graded, [None] * len(prompts)))
    task.evals = {name: task.train[:size] for name, size in (("one", 2), ("two", 3), ("three", 1))}
    assert dppo.evaluate(task, Config(eval_samples=2)) == {
        "accuracy": 4 / 8, "one": {"prompts": 2, "avg@2": 0.25, "pass@2": 0.5},
        "two": {"prompts": 2, "avg@2": 0.75, "pass@2": 1.0}, "three": {"prompts": 0, "avg@2": None, "pass@2": None}}
    run(tmp_path, task, steps=1)
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)  # NaN is not JSON
    assert summary["after"] == summary["before"] and summary["after"]["accuracy"] is None
    assert "->" not in (printed := capsys.readouterr().out) and f"results are in {tmp_path}" in printed

def test_reward_and_length_are_means_over_the_window_by_the_weights_of_prompts():
    rewards = torch.tensor([[1, 0], [1, 1], [math.nan, 1]], dtype=torch.float64)
    completions = [[[5, 6, 12], [12]], [[5, 6], [5, 12]], [[5] * 4, [5] * 5 + [7]]]  # 12 or 7 ends them: two were cut
    prompt_weights, weights = torch.tensor([2.0, 1, 1]).double(), torch.tensor([[2.0, 0], [1, 3], [0, 0]]).double()
    (task := tiny_task()).end_ids = lambda: [7, 12]
    record, sample = dppo.step_record(task, SimpleNamespace(step=3, seconds=9.0), **dict(
        N=5, examples=task.train[:3], completions=completions, rewards=rewards, advantages=rewards - 1, weights=weights,
        prompt_weights=prompt_weights, learning_rate=0.5, rollout_seconds=2.0, train_seconds=1.0,
        updates=[dict(kl=1.0, skipped=0), dict(kl=None, skipped=1), dict(kl=4.0, skipped=0)]))  # None: not made
    assert record | {"peak_memory_gb": 0} == pytest.approx(dict(
        step=3, learning_rate=0.5, prompts_seen=5, prompts_rolled=3, prompts_pruned=2, ungradable_prompts=1,
        reward=2 / 3, zero_variance_fraction=1 / 3, completion_length=2, truncated_fraction=1 / 6, weight_max=3,
        effective_sample_size=36 / 14, kl=5 / 2, skipped=1 / 3, rollout_seconds=2, train_seconds=1,
        cumulative_seconds=9, peak_memory_gb=0))
    assert sample == dict(step=3, prompt=task.train[0]["prompt"], answer=task.train[0]["answer"], rewards=[1, 0],
                          completions=["239", "9"], prompt_weight=2, advantages=[0, -1], weights=[2, 0])

@pytest.mark.parametrize("method", ["grpo", "dppo"])  # the next window starts where the last one ended
def test_every_epoch_sees_every_prompt_once_in_its_own_order_and_every_step_samples_anew(method, monkeypatch, tmp_path):
    steps = spied_run(monkeypatch, tmp_path, method=method, steps=12, learning_rate=0.0)
    assert any(len(step["window"]) > len(step["prompts"]) for step in steps) == (method == "dppo")
    seen = torch.cat([step["window"] for step in steps])[:96].view(2, 48)
    assert all(sorted(epoch.tolist()) == [*range(48)] for epoch in seen) and not torch.equal(*seen)
    monkeypatch.undo()
    first, second = spied_run(monkeypatch, tmp_path / "1", tiny_task(prompts=1), method="grpo", steps=2,
                              learning_rate=0.0, temperature=3.0)
    assert first["updates"][0][2] != second["updates"][0][2]

@pytest.mark.parametrize("method", dppo.RULES)
def test_batches_of_equal_rewards_train_nothing_not_even_by_adam_s_momentum(method, tmp_path):
    calls, weights = itertools.count(), []
    def reward(prompts, completions, **_):
        weights.append(copy.deepcopy(task.model.state_dict()))
        return lengths_reward(prompts, completions) if next(calls) < 4 else [1.0] * len(prompts)
    task = tiny_task(reward)
    records = run(tmp_path, task, method=method, inner_epochs=1)[3:]  # the first call is an evaluation
    moved = [any(not torch.equal(p, q[name]) for name, p in p.items()) for p, q in itertools.pairwise(weights)]
    assert moved == [False, True, True, True] + [False] * 7
    assert all((r["completions_trained"] == 0) == (method != "grpo") and r["reward"] == pytest.approx(1) and
               r["grad_norm"] == r["skipped"] == 0 for r in records)

def test_updates_that_are_not_finite_are_left_out_and_counted_and_ten_in_a_row_stop_the_run(tmp_path, monkeypatch):
    real, count, weights = dppo.policy_loss, itertools.count(1), []
    def policy_loss(*args):
        loss, *metrics = real(*args)
        return loss * (math.nan if next(count) in (2, 3, *range(6, 99)) else 1.0), *metrics
    monkeypatch.setattr(dppo, "policy_loss", policy_loss)
    task = tiny_task(lambda **rest: weights.append(copy.deepcopy(task.model.state_dict())) or lengths_reward(**rest))
    pytest.raises(FloatingPointError, run, tmp_path, task, steps=50, inner_epochs=1, beta=0.1).match("not finite")
    same = [all(torch.equal(p, q[name]) for name, p in p.items()) for p, q in itertools.pairwise(weights[1:])]
    records = read_lines(tmp_path / "metrics.jsonl")
    assert same == [False, True, True, False, False] + [True] * 9 and [*map(bool, same), True] == [
        record["skipped"] == 1 for record in records] == [record["grad_norm"] is None for record in records]

def test_a_reward_that_fails_in_a_step_is_a_traceback_and_the_metrics_up_to_there_are_on_disk(tmp_path, monkeypatch):
    calls = itertools.count()
    task = tiny_task(lambda **columns: lengths_reward(**columns) if next(calls) < 4 else 1 / 0)
    monkeypatch.setattr(dppo, "load_task", lambda config: task)
    settings = f"--steps 8 --prompts_per_step 4 --output_dir {tmp_path}".split()
    pytest.raises(ZeroDivisionError, main, monkeypatch, *settings)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3

@pytest.fixture(scope="session", autouse=True)
def plain_command(request, tmp_path_factory):
    """Started before the first test, if its own is among them: the other tests leave a core idle."""
    out = tmp_path_factory.mktemp("plain") / "run"
    if any("plain_command" in item.name for item in request.session.items):
        return out, subprocess.Popen([sys.executable, SCRIPT, "--steps", "40", "--output_dir", out], text=True,
                                     stdout=subprocess.PIPE, stderr=out.with_name("stderr").open("w"),
                                     env=ENVIRONMENT | {"XDG_CACHE_HOME": str(out.with_name("cache"))})
def test_slow_the_plain_command_raises_the_middle_class_and_writes_every_file(plain_command):
    out, process = plain_command
    printed = process.communicate()[0]
    assert process.returncode == 0, out.with_name("stderr").read_text()[-3000:]
    pair, line = r"(\d\.\d\d) -> (\d\.\d\d)", printed.splitlines()[-1]
    values = re.match(rf"accuracy {pair}, easy {pair}, middle {pair}, hard {pair} in \d+ s of .* {out}$", line).groups()
    summary = json.loads((out / "summary.json").read_text())
    before, after = (summary[when]["middle"]["avg@4"] for when in ("before", "after"))
    assert after > before + 0.12 and summary["after"]["accuracy"] > summary["before"]["accuracy"] + 0.04
    assert values[4:6] == (f"{before:.2f}", f"{after:.2f}") and summary["after"]["middle"]["pass@4"] > after
    records = read_lines(out / "metrics.jsonl")
    assert [r["step"] for r in records] == [*range(1, 41)] and all({*r} == METRICS for r in records)
    total = {name: sum(r[name] for r in records[10:]) for name in METRICS if not {None} & {r[name] for r in records}}
    assert total["completions_trained"] / 8 < 0.7 * total["prompts_rolled"] < 0.6 * total["prompts_seen"]
    assert {*os.listdir(out)} == {*"metrics.jsonl samples.jsonl summary.json config.json checkpoint.pt model".split()}
    assert {*summary} > {"before", "after", "device"} and summary["seconds"] == records[-1]["cumulative_seconds"]
    transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    own, file = transformers.AutoTokenizer.from_pretrained(out / "model"), write_rows(out.with_name("a.jsonl"), GOOD)
    assert dppo.load_examples(str(file), "train", Config(), own)[0]["prompt_ids"][-1] == ord("=") + 3  # no end id
    assert [p.suffix for p in (out.with_name("cache") / "dppo").iterdir()] == [".pt"]  # and nothing half done
# ---- Interruptions and resuming --------------------------------------------------------------------------------------
def assert_same_run(one: Path, other: Path) -> None:
    """The same weights bit for bit, and the same metrics and samples, times aside; no step twice."""
    first, second = (safetensors.torch.load_file(out / "model" / "model.safetensors") for out in (one, other))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert without_times(one / "metrics.jsonl") == without_times(other / "metrics.jsonl")
    assert read_lines(one / "samples.jsonl") == read_lines(other / "samples.jsonl")
    summaries = [json.loads((out / "summary.json").read_text()) for out in (one, other)]
    assert summaries[0]["before"] == summaries[1]["before"] and summaries[0]["after"] == summaries[1]["after"]
def was_killed(out: Path, seconds: float) -> bool:
    """Makes a run in a process of its own, or goes on with it, and kills it after so many seconds; 0: never."""
    if child := os.fork():
        return {0: False, signal.SIGALRM: True}[os.waitpid(child, 0)[1]]  # KeyError: it failed
    signal.setitimer(signal.ITIMER_REAL, seconds)  # kills, as no one handles it
    sys.stdout = sys.stderr = open(os.devnull, "w")
    run(out, resume=(out / "checkpoint.pt").exists())
    os._exit(0)
def kill_often(folder: Path) -> None:
    clock, rng, kills, rounds = time.time(), random.Random(0), 0, 0
    assert not was_killed(folder / "whole", 0)
    duration = time.time() - clock
    while kills < 5:
        out, rounds = folder / f"killed-{rounds}", rounds + 1
        while was_killed(out, rng.uniform(0.1, 0.7) * duration):
            kills += 1
            if out.exists() and not (out / "checkpoint.pt").exists():
                shutil.rmtree(out)  # killed before the first checkpoint: it starts again
        assert_same_run(folder / "whole", out)
def test_slow_a_run_killed_at_random_moments_and_resumed_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    python("-c", f"import test_dppo as t; t.tiny_task(); t.kill_often(t.Path({str(tmp_path)!r}))")  # late imports first

@pytest.mark.parametrize("dtype, settings", [
    (torch.float32, {}), (torch.float32, dict(method="dppo", objective="gspo", beta=0.1)),
    (torch.bfloat16, dict(method="dppo", learning_rate=1e-5))])
def test_a_run_in_two_parts_is_the_run_in_one(dtype, settings, tmp_path):
    for out, steps in (("one", 10), ("two", 6), ("two", 10)):
        settings |= dict(steps=steps, eval_every=4, resume=(tmp_path / out).exists())
        run(tmp_path / out, tiny_task(model=tiny_model(dtype)), **settings)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    one, two = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["weights"] for name in ("one", "two"))
    assert all(p.dtype == torch.float32 and torch.equal(p, q) for p, q in zip(one, two, strict=True))

def test_a_process_that_dies_saving_leaves_the_last_checkpoint_and_resume_alone_goes_on(tmp_path, monkeypatch, capsys):
    real, flushed, whole, cut = torch.save, [], tmp_path / "whole", tmp_path / "cut"
    monkeypatch.setattr(dppo, "load_task", lambda config: tiny_task())
    settings = RUN | dict(seed=3, beta=0.1)
    options = sum(([f"--{name}", value] for name, value in settings.items()), [])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: flushed.append(((whole / "partial.pt").exists(), *os.fstat(file)[1:7])))
        main(monkeypatch, *options, "--output_dir", whole)
    assert len(flushed) == 10 and flushed[-1] == (True, *(whole / "checkpoint.pt").stat()[1:7])  # the same file
    def save(state, file):
        if state["progress"]["step"] == 7:
            file.write(b"half")
            raise KeyboardInterrupt
        real(state, file)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        assert pytest.raises(SystemExit, main, monkeypatch, *options, "--output_dir", cut).value.code == 130
    assert len(read_lines(cut / "metrics.jsonl")) == 7  # the last of them is written again
    assert capsys.readouterr().out.splitlines()[-1] == f"go on with: python dppo.py --resume {cut}"
    main(monkeypatch, "--resume", cut)
    assert_same_run(whole, cut)
    for out in (whole, cut):  # settings beside it hold instead
        main(monkeypatch, "--resume", out, "--steps", 11, "--rollout_batch_size", 8)
        given = json.loads((out / "config.json").read_text())
        assert given == given | settings | dict(steps=11, rollout_batch_size=8)
    assert_same_run(whole, cut)
    assert [record["step"] for record in read_lines(cut / "metrics.jsonl")] == [*range(1, 12)]

@pytest.mark.parametrize("name", ["metrics", "samples"])
def test_a_run_whose_records_are_missing_or_cut_is_not_resumed_and_loses_nothing(name, tmp_path):
    run(tmp_path, steps=2)
    for file in tmp_path.glob("*.jsonl"):  # after the checkpoint, as if killed in the third step
        file.write_text(file.read_text() + (file.stem != name) * "{}\n")
    path, before = tmp_path / f"{name}.jsonl", {f: f.read_bytes() for f in tmp_path.iterdir() if f.is_file()}
    for damaged in (before[path][:-1], b""):
        path.write_bytes(damaged) if damaged else path.unlink()
        pytest.raises(ValueError, run, tmp_path, resume=True).match(rf"^{path} is shorter than it was")
        assert all(f.read_bytes() == (damaged if f == path else was) for f, was in before.items())

def test_of_two_first_runs_at_once_the_later_leaves_a_whole_model_and_the_next_takes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept, tokenizer = tmp_path / "dppo" / "sorter-2.pt", transformers.ByT5Tokenizer(extra_ids=0)
    def train_step(model, *_):  # meanwhile, the earlier writes
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
        model.lm_head.weight.data += 1
    monkeypatch.setattr(dppo, "train_step", train_step)
    made, taken = (dppo.warm_started(tokenizer).state_dict() for _ in range(2))
    assert all(torch.equal(made[name], taken[name]) for name in made) and made["lm_head.weight"].mean() > 300
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]

def test_other_data_another_memory_or_model_is_not_resumed_and_other_settings_are(tmp_path):
    run(tmp_path, steps=2)
    before = {f: f.read_bytes() for f in tmp_path.iterdir() if f.is_file()}
    (fewer := tiny_task()).train.pop()
    (other := tiny_task()).train[3].update(answer="0")
    models = [tiny_task(model=tiny_model(torch.float32, **{name: 1})) for name in ("head_dim", "num_hidden_layers")]
    changed = dict(method=dict(method="dppo"), model=dict(model="x", dataset="x"), eval_prompts=dict(eval_prompts=3))
    for task, name in ((fewer, "data"), (other, "data"), *((None, name) for name in changed)):
        pytest.raises(ValueError, run, tmp_path, task, resume=True, **changed.get(name, {})).match(
            f"^{tmp_path}: its {name} is not that of this run")
    for task in models:
        pytest.raises((ValueError, RuntimeError), run, tmp_path, task, resume=True).match("size|shorter")
    assert before == {f: f.read_bytes() for f in tmp_path.iterdir() if f.is_file()}
    free = dict(rollout_batch_size=8, micro_batch_tokens=100, gradient_checkpointing=True, save_every=0, beta=0.1,
                learning_rate=0.1)
    assert [r["step"] for r in run(tmp_path, resume=True, steps=4, group_size=8, seed=3, **free)] == [1, 2, 3, 4]
    after = [json.loads((tmp_path / "summary.json").read_text())["after"] for _ in run(tmp_path, resume=True, steps=0)]
    assert after[0] != json.loads((tmp_path / "summary.json").read_text())["before"]  # 0 steps, but not untrained
    for resume, message in ((False, "is not empty"), (True, "No such file .*checkpoint.pt")):
        pytest.raises((ValueError, FileNotFoundError), run, tmp_path, resume=resume).match(message)
        (tmp_path / "checkpoint.pt").unlink(missing_ok=True)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 4

@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
def test_a_run_that_starts_with_the_memory_of_another_is_unbiased_from_its_first_step(method, monkeypatch, tmp_path):
    run(tmp_path / "first", tiny_task(prompts=N), method=method, steps=8, objective="dapo", inner_epochs=1)
    config, advantages, gradients, full = gradients_of("dapo", method=method)
    start = lambda history="first", task=None, **settings: dppo.start(Config(**dict(
        method=method, history=str(tmp_path / history), seed=7, learning_rate=0.1, steps=1, objective="dr_grpo",
        output_dir=str(tmp_path / f"{len([*tmp_path.iterdir()])}")) | settings), task or tiny_task(prompts=N))
    started, earlier = start(), torch.load(tmp_path / "first" / "checkpoint.pt")
    assert all(torch.equal(earlier["memory"][name], memory) for name, memory in started.rule.memory.items())
    assert started.progress.step == 0
    assert all(vars(started.progress)[name] == earlier["progress"][name] for name in ("mean_length", "seen"))
    started.rule.config = config
    outcomes = [*every_step(config, advantages, monkeypatch, started.rule)]
    assert len({tuple((w.sum(dim=1) > 0).tolist()) for _, w in outcomes}) > 1  # prompts are pruned, of the whole data
    assert (sum(p * (w.flatten() @ gradients) for p, w in outcomes) - full).abs().max() < 1e-10
    for name, settings in (("data", dict(task=tiny_task(prompts=5))), ("method", dict(method="grpo"))):
        pytest.raises(ValueError, start, **settings).match(f"^{tmp_path / 'first'}: its {name} is not that of this run")
    pytest.raises(FileNotFoundError, start, "nowhere")

def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    payload = type("Payload", (), {"__reduce__": lambda self: (os.mkdir, ("payload-ran",))})
    run(tmp_path / "run", steps=1)
    path = tmp_path / "run" / "checkpoint.pt"
    torch.save({**torch.load(path), "memory": payload()}, path)
    pytest.raises(Exception, run, tmp_path / "run", resume=True).match("[Ww]eights.only")
    assert not (tmp_path / "payload-ran").exists()

def test_slow_ctrl_c_prints_what_is_saved_and_the_command_that_goes_on(folder, tmp_path):
    command = ["--model", folder / "model", "--dataset", folder / "data.jsonl", "--max_completion_tokens", 6,
               "--reward", "test_dppo:short", "--prompts_per_step", 4, "--steps", 100_000, "--save_every", 2]
    with subprocess.Popen([sys.executable, SCRIPT, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, cwd=tmp_path, env=ENVIRONMENT,  # a background job ignores SIGINT
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        while not (found := [*tmp_path.glob("runs/*/checkpoint.pt")]):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error
    command = re.fullmatch(r"go on with: python dppo.py (--resume runs/\S+)", printed.splitlines()[-1])[1]
    steps = torch.load(found[0], weights_only=True)["progress"]["step"]
    python(SCRIPT, *shlex.split(command), "--steps", steps + 2, cwd=tmp_path)
    assert [line["step"] for line in read_lines(found[0].parent / "metrics.jsonl")] == [*range(1, steps + 3)]
# ---- The example for TRL in the notebook; where TRL is installed -----------------------------------------------------
def trl_example() -> dict:
    return written_by_the_notebook("dppo_trl.py", trl=pytest.importorskip("trl"))
def trl_settings(trl, folder, prompts=N, loss_type="grpo", **arguments) -> dict:
    """Of a trainer whose rollouts are the sequences with REWARDS, for prompt q those of q % N."""
    sequences, rewards = make_sequences(), REWARDS.flatten().tolist()
    def rollout(prompts, trainer):
        indices = [int(prompt[:-1]) % N * G + i % G for i, prompt in enumerate(prompts)]
        return dict(prompt_ids=[sequences[i][0] for i in indices], completion_ids=[sequences[i][1] for i in indices],
                    logprobs=None, score=[rewards[i] for i in indices])
    arguments = dict(num_generations=G, per_device_train_batch_size=4, steps_per_generation=3, max_grad_norm=1e9,
                     learning_rate=0.0, gradient_accumulation_steps=3, max_completion_length=8) | arguments
    return dict(model=tiny_model(torch.float32), processing_class=tiny_tokenizer(), rollout_func=rollout,
                train_dataset=datasets.Dataset.from_list([{"prompt": f"{q}="} for q in range(prompts)]),
                reward_funcs=lambda score, **_: score, args=trl.GRPOConfig(
                    output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], save_strategy="no",
                    gradient_checkpointing=False, loss_type=loss_type,
                    scale_rewards="none" if loss_type == "dr_grpo" else "group", **arguments))
@pytest.mark.parametrize("method", ["dppo", "dppo-optimal"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_trl_example_has_on_average_the_gradient_of_the_window(loss_type, method, monkeypatch, tmp_path):
    example, sequences = trl_example(), make_sequences()
    settings = trl_settings(example["trl"], tmp_path, loss_type=loss_type)
    pruning = dict(method=method, prompt_prune_rate=0.6, completion_prune_rate=0.6)
    trainer, trained = example["DPPOTrainer"](**settings, pruning=pruning), []
    def gradient(trainer, prompts):
        trainer.model.train().zero_grad()
        trainer.current_gradient_accumulation_steps = 3
        for trainer._step in range(3):
            inputs = trainer._prepare_inputs([settings["train_dataset"][q] for q in prompts])
            trainer.compute_loss(trainer.model, inputs).backward()
        trained.append(sum(len(part["advantages"]) for part in trainer._buffered_inputs))
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double()
    def pick():
        trainer.windows.order = torch.arange(N)
        trainer.windows.rule.memory = rule_of(Config(method=method)).memory
        return [*itertools.islice(trainer.windows, N * G)], trainer.windows.queue[0]
    def step():
        trainer.windows.queue, trainer.mean_length = [entry], sum(len(c) for _, c in sequences) / N / G
        return gradient(trainer, prompts)
    full, expectation = gradient(example["trl"].GRPOTrainer(**settings), [q for q in range(N) for _ in range(G)]), 0
    for p, (prompts, entry) in [outcome for outcome in every_outcome(pick, monkeypatch) if outcome[0] > 1e-9]:
        assert len(prompts) == N * G and entry[0] == N > len(entry[1])
        expectation += p * sum(p_completions * g for p_completions, g in every_outcome(step, monkeypatch))
    assert max(trained[1:]) < N * G and (expectation - full).norm() < 1e-5 * full.norm()

@pytest.mark.parametrize("setting", [dict(loss_type="bnpo"), dict(beta=0.1), dict(num_iterations=2)])
def test_the_trl_example_refuses_what_would_be_biased(setting, tmp_path):
    example, path = trl_example(), save_model(tiny_model(torch.float32), tmp_path)  # a folder: TRL loads a reference
    with pytest.raises(ValueError, match="needs loss_type grpo, dr_grpo or dapo, beta 0, num_iterations 1"):
        example["DPPOTrainer"](**trl_settings(example["trl"], tmp_path, **setting) | dict(model=str(path)))
def trl_run(folder: str, processes: str) -> None:
    """Trains with the notebook's example, in one of so many processes, and saves the draws and the gradients."""
    example, log, gradients = trl_example(), [], []
    for name in ("pick_prompts", "weigh_completions"):
        example[name] = lambda *args, function=example[name]: log.append(function(*args)) or log[-1]
    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    settings = trl_settings(example["trl"], folder, 16, per_device_train_batch_size=4 // int(processes), max_steps=10)
    trainer = example["DPPOTrainer"](**settings, callbacks=[Gradients()])
    trainer.train()
    torch.save((log, gradients), Path(folder, f"{processes}-{trainer.accelerator.process_index}"))
def test_slow_the_trl_example_in_two_processes_draws_the_same_and_has_the_gradient_of_one(tmp_path):
    pytest.importorskip("trl")
    for launcher, processes in ((), 1), ("-m torch.distributed.run --standalone --nproc_per_node 2".split(), 2):
        python(*launcher, __file__, tmp_path, processes)
    (log, gradients), *two = (torch.load(tmp_path / name, weights_only=False) for name in ("1-0", "2-0", "2-1"))
    assert len(gradients) == 10 and max(len(x[0]) for x in log if type(x) is tuple) > N
    for draws, of_part in two:
        assert all(torch.equal(a, b) for x, y in zip(log, draws, strict=True) for a, b in zip(x, y))
        for a, b in zip(gradients, of_part, strict=True):  # the mean over the processes, as TRL has it
            assert (a - b).norm() <= 1e-5 * a.norm()
# ---- The tests are tested: python test_dppo.py makes each of these careless changes and runs the tests on it ---------
MUTANTS = [  # name, what dppo.py has, what a careless fork would have, a word of a test to try first
    ("weight dropped", "(weights * loss_of_completion)", "(weights.sign() * loss_of_completion)", "of_its_weights"),
    ("prompt's weight dropped", "return w_q * w_qi", "return w_qi", "full_one"),
    ("divided by what is kept", "/ (N * config.group_size), clipped", "/ (weights > 0).sum(), clipped", "formula"),
    ("divided by those rolled out", "    N = len(window)\n", "    N = len(prompts)\n", "divides_by"),
    ("ceil in place of floor", "math.floor(rate * count + 1e-9)", "math.ceil(rate * count - 1e-9)", "keep_prob"),
    ("rounding makes a low set", "* (1 - 1e-6)", "", "keep_prob"),
    ("lowest pruned for certain", "torch.randperm(len(pi), generator=generator)", "torch.arange(len(pi))", "anew_for"),
    ("low set with zeros", "advantages[trainable].abs()", "advantages.abs().mul(trainable)[trainable] * 0", "cost_not"),
    ("prompt's weight not in the score", "advantages.abs() * prompt_weights[:, None]", "advantages.abs()", "scored"),
    ("A = 0 left out with KL too", "(advantages != 0) | (self.config.beta > 0)", "advantages != 0", "cost_nothing"),
    ("no floor with KL", "floor = self.floor * (self.config.beta > 0)", "floor = 0.0", "full_one"),
    ("draw reused", "draws.append(weights.flatten())", "draws.append([*draws, weights.flatten()][0])", "anew_for"),
    ("centred after", "sequences, A, w, N", "sequences, A - A[w > 0].mean(), w, N", "divides"),
    ("std over G", "rewards.std(dim=1, keepdim=True)", "rewards.std(dim=1, keepdim=True, correction=0)", "trl_s_with"),
    ("dr_grpo scaled", 'scale_by_std=config.objective != "dr_grpo"', "scale_by_std=True", "scaled"),
    ("groups that are not gradable", "pi = pi.masked_fill(missing, 0.0)", "pass", "cost_nothing"),
    ("memory of the pruned lost", "rule.update(", "rule.memory['score'][window] = 0.0; rule.update(", "last_visit"),
    ("window by the number sure to survive", "(pi.cumsum(0) <=", "((pi > 0.9).cumsum(0) <=", "window"),
    ("next window starts anew", "torch.cat(orders)[start :", "torch.cat(orders)[0 :", "every_epoch"),
    ("every epoch the same order", "1_000_003 * seed - 1 - e", "1_000_003 * seed - 1", "every_epoch"),
    ("every step the same seed", "(1_000_003 * config.seed + progress.seen)", "(1_000_003 * config.seed)", "anew"),
    ("a biased rule's weights", "kept * N * kept.shape[1] /", "kept * N /", "biased_rule"),
    ("attention across sequences", "position_ids=position_ids, ", "", "boundary"),
    ("trained off by one", "- 1) + [1] * len(completion) + [0]", ") + [1] * len(completion)", "boundary"),
    ("every other sequence lost", "            following += 1", "            following += 2", "packed_exactly_once"),
    ("top_k left at its default", "top_k=0, top_p=1.0, ", "top_p=1.0, ", "frequencies"),
    ("the model's own sampling lost", "copy.copy(task.model)", "task.model", "frequencies"),
    ("temperature not in the trained logits", ".div_(temperature)", "", "sample_as"),
    ("dropout in training", "    model.eval()\n", "    model.train()\n", "checkpointing"),
    ("clipped on one side", "clamp(1 - down, 1 + up)", "clamp(max=1 + up)", "formula"),
    ("dapo clipped as grpo", "dapo=(0.2, 0.28)", "dapo=(0.2, 0.2)"),
    ("gspo's ratio a sum", "(log_ratio * mask).sum(dim=1) / lengths", "(log_ratio * mask).sum(dim=1)", "formula"),
    ("KL the wrong way round", "ref_logprobs - logprobs", "logprobs - ref_logprobs", "formula"),
    ("no mean length for dapo", "        Z = m\n", "        Z = 1\n", "formula"),
    ("dapo's own length", "    m = progress.mean_length or own\n", "    m = own\n", "dapo_divides"),
    ("old policy lost", "if config.inner_epochs > 1:", "if config.inner_epochs > 9:", "anew_for"),
    ("no warm-up", "min(1.0, progress.step / max(1, config.warmup_steps))", "1.0", "warm_up"),
    ("gradient never clipped", "config.max_grad_norm)\n", "1e9)\n", "max_grad_norm"),
    ("weights decay", "torch.optim.Adam(", "torch.optim.AdamW(", "decay"),
    ("finished rows mixed up", "rows[live], ids[live]", "rows[:int(live.sum())], ids[live]", "divides_by"),
    ("cache rows not selected", "batch_select_indices(live)", "batch_select_indices(live.flip(0))", "sample_as"),
    ("bf16 sums", "torch.zeros_like(p, dtype=torch.float32)", "torch.zeros_like(p)", "accum"),
    ("masters not copied back", "        torch._foreach_copy_(weights, masters)\n", "        pass\n", "below_bfloat16"),
    ("updates that are not finite made", "finite = math.isfinite(sum(values))", "finite = True", "ten_in_a_row"),
    ("momentum without a gradient", "if finite and values[-1] > 0:", "if finite:", "momentum"),
    ("sampling that is NaN passes", "if not difference <= (", "if difference > (", "leak"),
    ("logits not compared", "<= 1e-3 * logits", "<= 9e9 * logits", "sample_as"),
    ("zero is no answer", "None if g in (None, \"\") else", "None if not g else", "math_spells"),
    ("successes never forgotten", 'self.decay * right[q]', 'right[q]', "decay"),
    ("no floor under prompts", "prompt_prune_rate, self.floor)", "prompt_prune_rate)", "useless"),
    ("reward means unweighted", "w = prompt_weights * graded", "w = graded.double()", "reward_and_length"),
    ("evaluations differ", "transformers.set_seed(config.seed)  # the same every", "#", "same_each_time"),
    ("masters not resumed", "torch._foreach_copy_(weights, saved", "len, (weights, saved", "two_parts"),
    ("memory not resumed", "rule.memory, progress = saved", "_, progress = saved", "two_parts"),
    ("history of other prompts", "else FIXED[:2]", "else FIXED[:1]", "memory_of_another"),
    ("mean length not known before the draw", "(step=0, seco", "(mean_length=None, step=0, seco", "of_another"),
    ("history draws as before", "dict(step=0", "dict(seen=0, step=0", "memory_of_another"),
    ("too few steps of bisection", "in range(50):  # bisection", "in range(9):  # bisection", "in_proportion"),
    ("metrics not cut back", "file.truncate(size)", "pass", "two_parts"),
    ("checkpoint written in place", '(run.out / "partial.pt").open', '(run.out / "checkpoint.pt").open', "dies"),
    ("checkpoints may run code", '"cpu", weights_only=True', '"cpu", weights_only=False', "run_code"),
    ("data by the seed", "random.Random(0).shuffle(examples)", "random.Random(config.seed).shuffle(examples)", "seed"),
    ("chats without the assistant's turn", "add_generation_prompt=True", "add_generation_prompt=False", "chat"),
    ("two system messages", 'if turn["role"] != "system"', "", "chat"),
]
def test_every_careless_change_still_applies():
    assert [m[0] for m in MUTANTS if SCRIPT.read_text().count(m[1]) != 1 or m[1] == m[2]] == []
def caught(mutant: tuple[str, ...]) -> str | None:
    """The first test that fails on this change, None if none does."""
    _, has, would_have, *first = mutant
    with tempfile.TemporaryDirectory() as folder:
        for path in (__file__, SCRIPT.with_name("notebook.ipynb")):
            shutil.copy(path, folder)
        Path(folder, "dppo.py").write_text(SCRIPT.read_text().replace(has, would_have))
        for tests in (*first, "not slow and not still_applies and not trl_example"):
            command = [sys.executable, *"-m pytest -x -q --basetemp temporary -p no:cacheprovider -k".split(), tests]
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                                    env=ENVIRONMENT | {"PYTHONPATH": folder})
            if failed := re.search(r"^(?:FAILED|ERROR) \S+?::(\S+)", result.stdout, re.MULTILINE):
                return failed[1]

if __name__ == "__main__" and sys.argv[1:]:
    trl_run(*sys.argv[1:])
elif __name__ == "__main__":
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [print(f"{mutant[0]:40} {test or 'NOT CAUGHT'}", flush=True) or test
                   for mutant, test in zip(MUTANTS, pool.map(caught, MUTANTS))]
    print(f"{sum(map(bool, results))} of {len(MUTANTS)} careless changes are caught")
    sys.exit(not all(results))
