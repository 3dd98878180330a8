"""Tests of what one can plug in, and of the code printed in README and docstrings.

python -m pytest -q extras/test_extras.py
"""

import ast
import math
import re
import shlex
import sys
import textwrap
from functools import partial
from pathlib import Path
from unittest import mock

import datasets
import pytest
import torch
import transformers

import dppo
from dppo import Config, group_advantages
from extras import rivals
from extras.experiments import noise
from extras.proportional import Proportional, share_probabilities
from test_dppo import (
    ADVANTAGES,
    REWARDS,
    G,
    SmallInstance,
    assert_most_candidates,
    assert_unbiased,
    every_result,
    main,
    mean_weights,
    metrics,
    recorded,
    rollout_of,
    rule_with_history,
    run,
    seldom_teaches,
    tiny_model,
    tiny_task,
    tiny_tokenizer,
    write_rows,
)

ROOT = Path(dppo.__file__).parent
OURS = "extras.proportional:Proportional"
NAN = math.nan


# ==== Code and commands, as they are printed ====
def printed_block(words):
    """The one block with these words in it, in README, in RESULTS or in a docstring of extras."""
    blocks = []
    for page in ("README.md", "extras/experiments/RESULTS.md"):
        blocks += re.findall(r"^ *```\w+\n(.*?)^ *```", (ROOT / page).read_text(), re.M | re.S)
    for path in ROOT.glob("extras/*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        blocks += re.findall("(?:^    .*\n)+", docstring, re.M)
    [block] = [block for block in blocks if words in block]
    return textwrap.dedent(block)


def run_command(block, *more):
    """A printed command, with more arguments, in this process."""
    words = shlex.split(block.replace("\\\n", ""))
    main(*words[words.index("dppo.py") + 1 :], *more)


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """An empty folder, and a Hub that has tiny models and data; -> settings of small runs."""
    rows = [{"question": f"{a}=", "answer": str(a), "problem": f"{a}="} for a in range(20)]
    data = datasets.Dataset.from_list(rows)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ enable_thinking }}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    write_rows("mine.jsonl", *rows)

    def of_hub(path, *names, split):
        return data.select(range(8) if split == "test" else range(8, 20))

    monkeypatch.setattr(datasets, "load_dataset", of_hub)
    auto = mock.Mock(return_value=tiny_tokenizer(template))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", auto)
    of_model = mock.Mock(side_effect=lambda *_, **__: tiny_model(torch.float32))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", of_model)
    small = {"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 8, "eval_samples": 1}
    return [f"--{name}={value}" for name, value in small.items()]


def test_readme_reward_trains_and_the_command_resumes(newcomer):
    Path("mine.py").write_text(printed_block("def reward"))
    command = printed_block("--reward mine:reward")
    run_command(command, *newcomer, "--eval_every=2")
    steps = len(metrics(Path("runs/mine")))
    run_command(command, *newcomer, "--eval_every=2", "--epochs=5")  # repeated, with more epochs
    assert len(metrics(Path("runs/mine"))) > steps > 4


def test_the_printed_plot_is_drawn(newcomer):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib").use("agg")
    steps = [{"step": n, "seconds": 60.0, "prompts_rolled": 4} for n in range(1, 9)]
    records = [{"step": 0, "accuracy": 0.1}, *steps, {"step": 9, "accuracy": 0.5} | steps[0]]
    for name in ("runs/mine", "runs/other"):
        Path(name).mkdir(parents=True)
        write_rows(f"{name}/metrics.jsonl", *records)
    exec(printed_block("import pandas"), {})
    assert Path("accuracy.png").stat().st_size > 5000


@pytest.mark.parametrize("method", ["dppo", OURS])
def test_printed_commands_run_on_a_stub_hub(method, newcomer):
    block = printed_block("openai/gsm8k")
    # (--epochs of the block is replaced by --steps, as only one of them may be given.)
    block, replaced = re.subn(r"--epochs \S+", "--steps 2", block)
    run_command(block, *newcomer, "--output_dir=run", f"--method={method}")
    assert replaced and [record["step"] for record in metrics(Path("run"))] == [0, 1, 2]


def test_the_printed_rule_begins_with_the_memory_of_an_earlier_run(newcomer):
    run("runs/a", tiny_task(seldom_teaches), steps=4)
    Path("again.py").write_text(printed_block("class Again"))
    sys.path.insert(0, "")  # as main() does
    task = tiny_task(seldom_teaches)
    run("two", task, method="again:Again", seed=1, steps=1, prompts_per_step=4)
    assert recorded(Path("two"), "candidates")[0] > recorded(Path("two"), "prompts_rolled")[0]


def test_readme_rule_is_unbiased():
    known = {}
    exec(printed_block("class Half"), known)
    rule = known["Half"](Config(group_size=G), range(6))
    rule.remember(rollout_of(range(6), REWARDS.roll(2, 0)))  # the second prompt was solved
    assert (mean_weights(rule)[ADVANTAGES != 0] - 1).abs().max() < 1e-10


# ==== math_reward.py ====
ANSWERS = [
    (r"so it is $\boxed{\dfrac12}$.", "0.5", 1),
    (r"\boxed{2}, not 3", "3", 0),
    (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1),
    (r"\boxed{x^{2} + 1}", "1 + x^2", 1),
    (r"\boxed{1,000}", "1000", 1),
    (r"\boxed{11\sqrt2}", r"11\sqrt{2}", 1),
    (r"\boxed{3}", r"thus \boxed{3}", 1),
    (r"\boxed{", "7", 0),
    (r"\boxed{3}", "", None),
]


def test_answers_in_latex_are_compared_by_what_they_mean():
    pytest.importorskip("math_verify", reason="answers in LaTeX need math-verify")
    from extras import math_reward

    texts, golds, grades = zip(*ANSWERS)
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    for completions in (texts, chats):
        assert math_reward.reward(texts, completions, answer=golds, level=1) == [*grades]


# ==== Our rule: it is unbiased, too, and a step has the noise that is asked for ====
def test_the_mean_gradients_of_our_rule_and_of_uniform_are_the_full_gradient():
    assert_unbiased(OURS, "grpo", 0.1, 3, [0, 1, 2, 3, 4, 5], limit=3)
    assert_unbiased("extras.rivals:Uniform", "dapo", 0.0, 3, [0, 1, 2, 3, 4, 5], limit=3)
    assert_unbiased(OURS, "grpo", 0.0, 5, [0, 5, 1, 2, 3, 4], limit=4)
    assert_most_candidates(OURS, 0.95)


def test_a_step_has_the_noise_of_as_many_unpruned_prompts_as_are_wanted():
    """Noise is the sum of |w_q s_q/N|^2, which is mean(s^2)/N without pruning."""

    def noise():
        N, kept, w_q = rule.prune_prompts(visits, None)
        return (w_q**2 * squares[kept]).sum() / N**2

    for r_q in (0.0, 0.9):
        rule, visits = rule_with_history(OURS, r_q), torch.tensor([2, 3, 4, 1, 5])
        rule.limit_of_step = mock.Mock(return_value=5)
        squares, pi = rule.expected_squares(), rule.prompt_probabilities()
        pruned = sum(p * value for p, value in every_result(noise))
        worth = squares[visits].mean() / pi[visits].sum() / pruned
        assert worth > 1.1 if r_q else abs(worth - 1) < 1e-12
        for most in (1, 4, 9, 40):
            rule = rule_with_history(OURS, r_q, prompts_per_step=most)
            assert rule.limit_of_step(visits.repeat(12)) == max(1, round(most / worth.item()))


def with_surprises(rollout, probabilities):
    """The rollout with completions of two tokens, sampled with these (B, G) probabilities."""
    rows = torch.tensor(probabilities).double().log().flatten()[:, None].expand(-1, 2)
    sequences = [dppo.Sequence([2], [3, 4], row) for row in rows]
    return rollout._replace(sequences=sequences, lengths=torch.full_like(rollout.A, 2.0))


def test_completions_are_kept_in_proportion_to_their_weighted_advantage_and_surprise():
    A = torch.tensor([[3.0, -1.0, -2.0], [1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]).double()
    w_q = torch.tensor([1.0, 4.0, 9.0]).double()
    rollout = with_surprises(rollout_of(range(3), A, A, w_q), [[0.5, 0.1, 0.5]] * 3)
    rule = Proportional(Config(completion_prune_rate=0.6), range(3))
    # The scores are, but for a factor: 3 * 0.5, 1 * 0.9, 2 * 0.5; 4 * 0.5, -, 4 * 0.5; none.
    scores = torch.tensor([1.5, 0.9, 1.0, 2.0, 2.0])
    pi = rule.completion_probabilities(rollout)
    assert pi[A != 0].allclose(2 * (scores / scores.sum()).double())  # 0.4 of five are kept
    assert not pi[A == 0].any()
    # Without log-probabilities, the advantage is left.
    pi = rule.completion_probabilities(rollout_of(range(3), A, A, w_q))
    scores = torch.tensor([3.0, 1.0, 2.0, 4.0, 4.0])
    assert pi[A != 0].allclose(2 * (scores / scores.sum()).double())
    assert not rule.completion_probabilities(rollout_of(range(3), 0 * A)).any()


SCORES = [[5.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1e-9, 1.0, 2.0, 100.0], [0.0, 0.0, 1.0, 1.0], []]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("share", [0.3, 0.75, 1.0])
def test_probabilities_add_up_to_a_share_and_no_weight_exceeds_20(scores, share):
    pi = share_probabilities(torch.tensor(scores), share)
    assert pi.sum() == pytest.approx(share * len(scores)) and ((pi >= 0.05) & (pi <= 1)).all()
    order = torch.tensor(scores).argsort()
    assert (pi[order].diff() >= 0).all()


def test_our_rule_is_unbiased_with_certain_tokens_missing_rewards_and_kl():
    A = torch.tensor([[2.0, -1.0, 0.0], [0.0, 0.0, 0.0], [1.0, -1.0, -1.0]]).double()
    probabilities = [[1.0, 0.5, 0.2], [0.5, 1.0, 1.0], [1.0, 1.0, 0.01]]  # 1: certain
    rewards = torch.tensor([[1, 0, NAN], [1, 1, 1], [1, 0, 0]])
    rollout = with_surprises(rollout_of(range(3), rewards, A), probabilities)
    for beta in (0.0, 0.1):
        rule = Proportional(Config(beta=beta, completion_prune_rate=0.6), range(3))
        outcomes = every_result(partial(rule.prune_completions, rollout, None))
        mean = sum(p * w_qi for p, w_qi in outcomes)
        assert len(outcomes) > 2
        assert mean.allclose(dppo.has_gradient(A, beta).double())


# ==== Uniform, which a score has to beat, and the noise that pruning adds ====
def test_uniform_keeps_as_many_as_dppo_with_one_probability():
    rewards = torch.tensor([[1.0, 0, 0, 0], [1.0, 1, 1, 1], [1.0, 1, 0, 0]])
    rollout = rollout_of(range(3), rewards)
    of_dppo = dppo.DPPO(Config(), range(3)).completion_probabilities(rollout)
    pi = rivals.Uniform(Config(), range(3)).completion_probabilities(rollout)
    assert pi.sum() == pytest.approx(of_dppo.sum().item()) and of_dppo.unique().numel() > 2
    assert pi[rollout.A != 0].unique().numel() == 1 and not pi[rollout.A == 0].any()
    none = rollout_of(range(3), 0 * rewards)
    assert not rivals.Uniform(Config(), range(3)).completion_probabilities(none).any()


def test_added_noise_of_orthogonal_gradients_is_least_for_pi_in_proportion_to_norms():
    norms = torch.tensor([4.0, 1.0, 0.5, 2.0, 1.0, 3.0, 0.2, 1.5]).double()
    others = [torch.ones(8), norms.flip(0), norms.sqrt(), norms**2]
    for share in (0.3, 0.5):
        pis = [share_probabilities(scores, share) for scores in (norms, *others)]
        for is_shuffled in (False, True):
            found = [noise.added_noise(pi, norms.square().diag(), is_shuffled) for pi in pis]
            by_hand = [norms.square() @ (1 / pi - 1) / norms.square().sum() for pi in pis]
            assert found == pytest.approx([value.item() for value in by_hand], rel=0.1)
            assert min(by_hand) == by_hand[0] and min(found) == found[0]


def test_added_noise_of_equal_gradients_is_that_of_their_number():
    """Of eight equal gradients, half are kept: always four, so their weighted sum is the same."""
    gram = torch.ones(8, 8).double()
    assert noise.added_noise(torch.full((8,), 0.5).double(), gram) == pytest.approx(0)
    # On average 3.6 are kept, so three or four in each draw, each with the weight 8/3.6.
    pi = torch.full((8,), 0.45).double()
    variance = (0.6 * 0.4**2 + 0.4 * 0.6**2) * (1 / 0.45) ** 2
    assert noise.added_noise(pi, gram) == pytest.approx(variance / 8, rel=0.1)


def test_measured_gradients_are_those_of_the_losses():
    task, config = tiny_task(), Config(group_size=4, max_completion_tokens=8)
    w_q = torch.ones(4).double()
    torch.manual_seed(0)
    rollout = dppo.roll_out(task, 4, torch.arange(4), w_q, config)
    rows = rollout.A.flatten().nonzero()[:, 0].tolist()
    inputs = ([rollout.sequences[row] for row in rows], rollout.A.flatten()[rows])
    gram = noise.products([*noise.gradients(task, *inputs, 0, config)])
    for i, row in enumerate(rows):  # a step on one completion alone, of N G = 16
        weights = torch.zeros(16).double()
        weights[row] = 1.0
        [update] = dppo.learn(task, mock.Mock(), rollout, [weights.view(4, 4)], config)
        assert update["grad_norm"] * 16 == pytest.approx(gram[i, i].sqrt().item(), rel=1e-4)
    norms = gram.diagonal().sqrt()
    assert (gram.abs() <= norms[:, None] * norms * 1.0001).all()


# Five of seven prompts are visited. Their rewards, from 0 to 1, are then scaled.
NONE, ONE, HALF, ALL = [0.0] * 4, [1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0] * 4
FIRST = [ALL, HALF, HALF, NONE, ONE]
BINS = [15, 8, 8, 1, 5, -1, -1]  # after the first visits: 17 asin(sqrt p)/(pi/2), rounded down
SCALES = [(0, 1), (-1, 1), (0, 100), (-3e-4, 4e-4)]  # lowest reward, width of the range


def visit(rule, prompts, rewards, scale):
    """-> the mean A^2 of each group."""
    low, width = scale
    rewards = low + width * torch.tensor(rewards, dtype=torch.float64)
    A = group_advantages(rewards, scale_by_std=rule.config.objective != "dr_grpo")
    rule.remember(rollout_of(prompts, rewards, A))
    return A.square().mean(dim=1)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_bins_of_equal_success_rates_learn_what_prompts_teach_next(objective, scale):
    rule = Proportional(Config(objective=objective, prompt_prune_rate=0.5), range(7))
    assert rule.prompt_probabilities().eq(1).all() and rule.limit_of_step(torch.arange(7)) == 32
    visit(rule, range(5), FIRST, scale)
    assert rule.bin_of_prompts().tolist() == BINS
    x = (torch.arange(17).double() + 0.5) / 17
    guess = 0.1 + 0.9 * (math.pi * x).sin() ** 2  # before a bin has learned anything
    guess *= scale[1] ** 2 / 4 if objective == "dr_grpo" else 1
    expected = rule.expected_squares()
    assert expected[:5].allclose(guess[BINS[:5]])  # first visits teach bins nothing
    assert expected[5:].allclose(expected[:5].mean())  # never visited: the mean of the others

    # pi rises on a line with the root of the expected square.
    pi = rule.prompt_probabilities()
    assert pi[:5].allclose(1 - 0.5 * (1 - (expected[:5] / expected[:5].max()).sqrt()))
    assert pi[5:].eq(1).all()

    # Prompt 0 comes twice among the candidates. Prompt 1 shares its bin with prompt 2.
    of_15, of_8, _ = visit(rule, [0, 1, 0], [ONE, HALF, ONE], scale)
    left = 4 * rule.forget**2  # of the four visits that the guess counts for
    expected = rule.expected_squares()
    assert expected[2] == pytest.approx(((left * guess[8] + of_8) / (left + 1)).item())
    assert expected[3:5].allclose(guess[[1, 5]])
    learned = (rule.memory["squares"] + left * guess) / (rule.memory["visits"] + left)
    assert learned[15] == pytest.approx(((left * guess[15] + 2 * of_15) / (left + 2)).item())

    # Rewards decay with each visit of their prompt.
    d = rule.decay
    counts = torch.tensor([4 * d**2 + 4 * d + 4, 4 * d + 4, 4, 4, 4, 0, 0]).double()
    right = torch.tensor([4 * d**2 + d + 1, 2 * d + 2, 2, 0, 1, 0, 0]).double()
    assert rule.memory["count"].allclose(counts)
    assert rule.memory["rewards"].allclose(scale[0] * counts + scale[1] * right)


def test_missing_rewards_count_in_no_square_no_visit_and_no_success_rate():
    rule = Proportional(Config(), range(7))
    visit(rule, range(5), FIRST, (0, 1))
    visit(rule, [2, 3, 4], [[1.0, 0, NAN, NAN], [NAN] * 4, [NAN, NAN, NAN, 1]], (0, 1))
    of_two = group_advantages(torch.tensor([[1.0, 0.0]])).square().mean()
    assert rule.memory["squares"][8] == pytest.approx(of_two.item())
    assert rule.memory["visits"].nonzero().flatten().tolist() == [8]
    d = rule.decay  # a single reward counts in the success rate, although it has no square
    assert rule.memory["count"][2:5].tolist() == pytest.approx([4 * d + 2, 4, 4 * d + 1])
    assert rule.memory["rewards"][2:5].tolist() == pytest.approx([2 * d + 1, 0, d + 1])


# ==== Rivals, by numbers worked by hand from their papers and repositories ====
def train_with(method, out):
    """Four steps of four prompts, where every second prompt teaches."""
    run(out, tiny_task(seldom_teaches, prompts=64), method=method, prompts_per_step=4, steps=4)


@pytest.mark.parametrize("rewards", [REWARDS, torch.zeros(6, G)])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", ["CPPO", "Unweighted", "WeightOne"])
def test_biased_rules_give_the_same_weight_to_all_that_they_keep(name, beta, rewards):
    instance = SmallInstance(beta=beta)
    rule = rule_with_history(f"extras.rivals:{name}", r_o=0.3, prompts_per_step=3)
    step = instance.step(rule, torch.optim.SGD(instance.model.parameters()), rewards=rewards)
    shares = step.weights[0] / (step.rollout.N * G)
    needed, kept = dppo.has_gradient(step.rollout.A, beta), shares > 0
    assert not kept[~needed].any() and kept.any() == needed.any()
    # CPPO keeps k = 2 of 3 in each group, including those with A = 0.
    divisors = {"CPPO": 2 * 3, "Unweighted": kept.sum(), "WeightOne": step.rollout.N * G}
    assert torch.allclose(shares[kept], 1 / torch.as_tensor(divisors[name]).double())


def test_literal_always_removes_the_lowest_and_weighs_the_others_as_dppo_does():
    scores = torch.tensor([3.0, 0.2, 0.1, 0.0, NAN, 0.0, 0.3, 3.0])
    weights = rivals.without_the_lowest(scores, 0.7)  # of five low ones, three
    assert weights.tolist() == [1, 2.5, 0, 0, 1, 0, 2.5, 1]
    assert weights[weights > 0].equal(1 / dppo.keep_probabilities(scores, 0.7)[weights > 0])

    instance = SmallInstance()
    rule = rule_with_history("extras.rivals:Literal", 0.7, 0.7, prompts_per_step=4)
    rewards = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]).double()
    rule.remember(rollout_of(range(1, 6), rewards))
    step = instance.step(rule, torch.optim.SGD(instance.model.parameters()))
    # Of the low prompts 2, 3 and 5, the first two are removed.
    prompts, w_q, A = step.rollout.prompts, step.rollout.w_q, step.rollout.A
    assert (step.rollout.N, prompts.tolist(), w_q.tolist()) == (6, [0, 1, 4, 5], [1, 1, 1, 3])
    of_completions = (A != 0) * rivals.without_the_lowest(A.abs().where(A != 0, NAN), 0.7)
    assert (A != 0).sum() > of_completions.count_nonzero() > 0
    assert step.weights[0].equal(w_q[:, None] * of_completions)


def test_the_loss_of_cppo_is_the_mean_over_k_completions_of_every_group():
    """In CPPO's repository, kept completions with A = 0 count in the mean, and so they do here. At
    a pruning rate of 0.7, k = floor(0.3 * 8) = 2 of 8 are kept. Of three groups, one has a single
    right answer, one is all right, and one has two right answers. So six completions are kept, four
    of which have a gradient, each with a share of 1/6 of the loss."""
    rewards = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [1.0] * 8, [1.0, 1, 0, 0, 0, 0, 0, 0]])
    rule = rivals.CPPO(Config(completion_prune_rate=0.7), range(3))
    w_qi = rule.prune_completions(rollout_of(range(3), rewards), None)
    shares = w_qi / (3 * 8)  # what dppo_step multiplies losses with, N being B = 3
    assert (shares > 0).sum(dim=1).tolist() == [2, 0, 2]
    assert shares[0, 0] > 0 and shares[2, :2].all()  # the largest |A|: the right answers
    assert torch.allclose(shares[shares > 0], torch.tensor(1 / 6).double())


def test_greso_refills_its_batch_with_groups_that_teach(tmp_path):
    train_with("extras.rivals:GRESO", tmp_path / "run")
    assert recorded(tmp_path / "run", "completions_trained") == [16] * 4  # four whole groups
    assert all(prompts > 4 for prompts in recorded(tmp_path / "run", "prompts_rolled"))


def test_greso_keeps_a_prompt_with_p_to_the_power_of_its_streak():
    rule = rivals.GRESO(Config(), range(4))
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    for _ in range(2):  # one is always right, one is never right, and one teaches
        rule.remember(rollout_of(range(3), rewards))
    p = 0.5 - 0.02  # both kinds have more than their share
    assert torch.allclose(rule.prompt_probabilities(), torch.tensor([p**2, p**2, 1, 1]).double())
    rule.remember(rollout_of([0], rewards[[1]]))
    pi = torch.tensor([p - 0.01, (p - 0.01) ** 2, 1, 1]).double()  # from then on, never right
    assert torch.allclose(rule.prompt_probabilities(), pi)
    assert rule.memory["p_easy"][0] == pytest.approx(p + 0.01)
