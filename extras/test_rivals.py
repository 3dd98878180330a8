"""Tests of rivals.py, with numbers worked by hand from the rivals' papers and repositories."""

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dppo
from extras import rivals
from test_dppo import (
    ADVANTAGES,
    REWARDS,
    G,
    SmallInstance,
    metrics,
    recorded,
    rollout_of,
    rule_with_history,
    run,
    seldom_teaches,
    tiny_task,
)

NAN = math.nan


def train_with(method, out):
    """Four steps of four prompts, where every second prompt teaches."""
    task = tiny_task(seldom_teaches, prompts=64)
    run(out, task, method=method, prompts_per_step=4, steps=4)


def test_importing_rivals_changes_nothing_in_dppo(tmp_path):
    before = vars(dppo).copy()
    importlib.reload(rivals)
    assert vars(dppo) == before
    train_with("grpo", tmp_path / "run")
    assert recorded(tmp_path / "run", "prompts_rolled") == [4] * 4


@pytest.mark.parametrize("rewards", [REWARDS, torch.zeros(6, G)])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", ["CPPO", "Unweighted", "WeightOne"])
def test_biased_rules_give_the_same_weight_to_all_that_they_keep(name, beta, rewards):
    instance = SmallInstance(beta=beta)
    rule = rule_with_history(f"extras.rivals:{name}", r_o=0.3, prompts_per_step=3)
    step = instance.step(rule, torch.optim.SGD(instance.model.parameters()), rewards=rewards)
    shares = step.weights[0] / (step.N * G)
    needed, kept = dppo.has_gradient(step.rollout.A, beta), shares > 0
    assert not kept[~needed].any() and kept.any() == needed.any()
    # CPPO keeps k = 2 of 3 in each group, including those with A = 0.
    divisors = {"CPPO": 2 * 3, "Unweighted": kept.sum(), "WeightOne": step.N * G}
    assert torch.allclose(shares[kept], 1 / torch.as_tensor(divisors[name]).double())


# ==== Uniform ====
def test_uniform_keeps_as_many_as_dppo_does_each_with_the_same_pi():
    of_dppo = rule_with_history("dppo", r_o=0.6)
    uniform = rule_with_history("extras.rivals:Uniform", r_o=0.6)
    assert uniform.prompt_probabilities().eq(1).all()
    rollout = rollout_of(range(6), REWARDS)
    pi = uniform.completion_probabilities(rollout)
    assert pi.sum() == pytest.approx(of_dppo.completion_probabilities(rollout).sum())
    assert len(pi[ADVANTAGES != 0].unique()) == 1 and pi[ADVANTAGES == 0].eq(0).all()


# ==== Without weights ====
@pytest.mark.parametrize("name", ["Unweighted", "WeightOne"])
def test_rules_without_weights_keep_what_dppo_keeps(name):
    outcomes = []
    for method in ("dppo", f"extras.rivals:{name}"):
        rule = rule_with_history(method, prompts_per_step=3)
        generator = torch.Generator().manual_seed(3)
        N, prompts, w_q = rule.prune_prompts(torch.arange(6), generator)
        w_qi = rule.prune_completions(rollout_of(prompts, REWARDS[prompts], w_q=w_q), generator)
        outcomes.append((N, prompts.tolist(), w_qi > 0))
    (N, prompts, kept), (*same, also_kept) = outcomes
    assert same == [N, prompts] and len(prompts) < N
    assert kept.equal(also_kept) and 1 < kept.sum() < (ADVANTAGES[prompts] != 0).sum()


# ==== Literal ====
def test_literal_always_removes_the_lowest_and_weighs_the_others_as_dppo_does():
    scores = torch.tensor([3.0, 0.2, 0.1, 0.0, NAN, 0.0, 0.3, 3.0])
    weights = rivals.without_the_lowest(scores, 0.7)  # of five low ones, three
    assert weights.tolist() == [1, 2.5, 0, 0, 1, 0, 2.5, 1]
    of_dppo = 1 / dppo.keep_probabilities(scores, 0.7)
    assert weights[weights > 0].equal(of_dppo[weights > 0])
    assert rivals.without_the_lowest(torch.ones(4), 0.9).eq(1).all()  # none is low


def test_a_removed_prompt_returns_although_the_mean_is_the_same_once_others_fall_below_it():
    scores = torch.tensor([0.4, 0.5, 0.6, 2.5])  # the mean is 1, so floor(0.7 * 3) = 2 are removed
    assert rivals.without_the_lowest(scores, 0.7).gt(0).tolist() == [False, False, True, True]
    others = torch.tensor([0.4, 0.2, 0.3, 3.1])  # the mean is still 1
    assert rivals.without_the_lowest(others, 0.7).gt(0).tolist() == [True, False, False, True]


def test_a_step_of_literal_multiplies_the_weights_of_both_levels():
    instance = SmallInstance()
    rule = rule_with_history("extras.rivals:Literal", 0.7, 0.7, prompts_per_step=4)
    rewards = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]).double()
    rule.remember(rollout_of(range(1, 6), rewards))
    step = instance.step(rule, torch.optim.SGD(instance.model.parameters()))
    # Of the low prompts 2, 3 and 5, the first two are removed.
    prompts, w_q, A = step.rollout.prompts, step.rollout.w_q, step.rollout.A
    assert (step.N, prompts.tolist(), w_q.tolist()) == (6, [0, 1, 4, 5], [1, 1, 1, 3])
    scores = A.abs().where(A != 0, NAN)
    of_completions = (A != 0) * rivals.without_the_lowest(scores, 0.7)
    assert (A != 0).sum() > of_completions.count_nonzero() > 0
    assert step.weights[0].equal(w_q[:, None] * of_completions)


# ==== CPPO ====
def test_the_loss_of_cppo_is_the_mean_over_k_completions_of_every_group():
    """In CPPO's repository, the loss is a sum over the kept completions, divided by their number,
    also where A = 0. At a pruning rate of 0.7, k = floor(0.3 * 8) = 2 of 8 are kept. Of three
    groups, one has a single right answer, one is all right, and one has two right answers. So six
    completions are kept, four of which have a gradient, each with a share of 1/6 of the loss."""
    rewards = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [1.0] * 8, [1.0, 1, 0, 0, 0, 0, 0, 0]])
    rule = rivals.CPPO(dppo.Config(completion_prune_rate=0.7), range(3))
    w_qi = rule.prune_completions(rollout_of(range(3), rewards), None)
    shares = w_qi / (3 * 8)  # what dppo_step multiplies losses with, N being B = 3
    assert (shares > 0).sum(dim=1).tolist() == [2, 0, 2]
    assert shares[0, 0] > 0 and shares[2, :2].all()  # the largest |A|: the right answers
    assert torch.allclose(shares[shares > 0], torch.tensor(1 / 6).double())


@pytest.mark.parametrize("rate, kept", [(0.5, [1, 3]), (0.25, [1, 2, 3]), (0.9, [1])])
def test_cppo_keeps_the_largest_advantages_but_at_least_one(rate, kept):
    A = torch.tensor([[0.1, -3.0, 0.5, 2.0]])
    rule = rivals.CPPO(dppo.Config(completion_prune_rate=rate), range(1))
    w_qi = rule.prune_completions(rollout_of([0], A, A), None)
    assert w_qi[0].nonzero()[:, 0].tolist() == kept
    assert w_qi.max() == pytest.approx(4 / len(kept))  # G/k


def test_128_prompts_fill_cppo_s_batch_of_32_times_8():
    rule = rivals.CPPO(dppo.Config(completion_prune_rate=0.7), range(128))
    A = torch.randn(128, 8, generator=torch.Generator().manual_seed(0)).double()
    assert (rule.prune_completions(rollout_of(range(128), A, A), None) > 0).sum() == 32 * 8


def test_a_run_with_cppo_trains_one_of_four_in_each_group_that_teaches(tmp_path):
    train_with("extras.rivals:CPPO", tmp_path / "run")
    for record in metrics(tmp_path / "run")[1:]:
        assert record["prompts_rolled"] == 4
        teach = 4 * (1 - record["zero_variance_fraction"])
        assert record["completions_trained"] == round(teach)  # floor(0.3 * 4) = 1 of each


# ==== GRESO ====
def test_greso_refills_its_batch_with_groups_that_teach(tmp_path):
    train_with("extras.rivals:GRESO", tmp_path / "run")
    assert recorded(tmp_path / "run", "completions_trained") == [16] * 4  # four whole groups
    assert all(prompts > 4 for prompts in recorded(tmp_path / "run", "prompts_rolled"))


def test_slow_greso_makes_its_own_step_from_the_command_line(tmp_path):
    settings = "--steps 2 --prompts_per_step 4 --group_size 4 --eval_prompts 4 --eval_samples 1"
    command = [sys.executable, "dppo.py", "--method", "extras.rivals:GRESO", *settings.split()]
    root = Path(dppo.__file__).parent
    subprocess.run([*command, "--output_dir", tmp_path / "run"], check=True, cwd=root)
    assert recorded(tmp_path / "run", "completions_trained") == [16, 16]
    assert all(prompts > 4 for prompts in recorded(tmp_path / "run", "prompts_rolled"))


def test_greso_keeps_a_prompt_with_p_to_the_power_of_its_streak():
    rule = rivals.GRESO(dppo.Config(), range(4))
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    for _ in range(2):  # a third each is always right, never right, and teaches
        rule.remember(rollout_of(range(3), rewards))
    p = 0.5 - 0.02  # both kinds have more than their share
    assert torch.allclose(rule.prompt_probabilities(), torch.tensor([p**2, p**2, 1, 1]).double())
    rule.remember(rollout_of([0], rewards[[1]]))
    pi = torch.tensor([p - 0.01, (p - 0.01) ** 2, 1, 1]).double()  # from then on, never right
    assert torch.allclose(rule.prompt_probabilities(), pi)
    assert rule.memory["p_easy"][0] == pytest.approx(p + 0.01)


def test_missing_rewards_count_in_no_streak_and_no_share_of_greso():
    rule = rivals.GRESO(dppo.Config(), range(8))
    rule.memory["streak"][7] = -2
    rewards = torch.tensor([[NAN, 0], [NAN, 1], [0, 1], [0, 1], [0, 1], *[[NAN, NAN]] * 3])
    rule.remember(rollout_of(range(8), rewards))
    assert rule.memory["streak"].tolist() == [-1, 1, 0, 0, 0, 0, 0, -2]
    # Of the five groups with rewards, 1/5 is hard and 1/5 easy, above the targets 1/6 and 1/12.
    assert rule.memory["p_hard"][0] == rule.memory["p_easy"][0] == pytest.approx(0.49)
    rule.remember(rollout_of(range(5, 8), rewards[5:]))  # no reward at all
    assert rule.memory["p_hard"][0] == pytest.approx(0.49)
