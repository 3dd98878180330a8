"""Tests of rivals.py, with numbers worked by hand from the rivals' papers and repositories."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dppo
from extras import rivals
from test_dppo import REWARDS, G, Given, rule_with_history


# ==== CPPO ====
def test_cppo_s_loss_is_the_mean_over_k_completions_of_every_group():
    """In CPPO's repository, the loss is a sum over the kept completions, divided by their number,
    also where A = 0. At a pruning rate of 0.7, k = floor(0.3 * 8) = 2 of 8 are kept. Of three
    groups, one has a single right answer, one is all right, and one has two right answers. So six
    completions are kept, four of which have a gradient, each with a share of 1/6 of the loss."""
    rewards = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [1.0] * 8, [1.0, 1, 0, 0, 0, 0, 0, 0]])
    A = dppo.group_advantages(rewards)
    rule = rivals.CPPO(dppo.Config(completion_prune_rate=0.7), 3)
    w_qi = rule.prune_completions(A, torch.ones(3), None)
    shares = w_qi / (3 * 8)  # what dppo_step multiplies losses with, N being B = 3
    assert (shares > 0).sum(dim=1).tolist() == [2, 0, 2]
    assert shares[0, 0] > 0 and shares[2, :2].all()  # the largest |A|: the right answers
    assert torch.allclose(shares[shares > 0], torch.tensor(1 / 6).double())


def test_128_prompts_fill_cppo_s_batch_of_32_times_8():
    rule = rivals.CPPO(dppo.Config(completion_prune_rate=0.7), 128)
    A = torch.randn(128, 8, generator=torch.Generator().manual_seed(0)).double()
    assert (rule.prune_completions(A, torch.ones(128), None) > 0).sum() == 32 * 8


# ==== Without weights ====
@pytest.mark.parametrize("name", ["Unweighted", "WeightOne"])
def test_without_weights_the_divisor_is_the_number_kept_or_that_of_all_candidates(name):
    given = Given()
    rule = rule_with_history(f"extras.rivals:{name}", r_o=0.7, prompts_per_step=3)
    step = given.step(rule, torch.optim.SGD(given.model.parameters()))
    shares = step.weights[0] / (step.N * G)
    kept = shares > 0
    assert step.w_q.max() > 1 and len(step.prompts) < step.N  # the paper's draw of prompts
    divisor = {"Unweighted": kept.sum(), "WeightOne": step.N * G}[name]
    assert torch.allclose(shares[kept], (1 / torch.as_tensor(divisor)).double())
    assert kept.sum() < (dppo.group_advantages(REWARDS[step.prompts]) != 0).sum()


# ==== Literal ====
def test_a_removed_prompt_returns_although_the_mean_is_the_same_once_others_fall_below_it():
    scores = torch.tensor([0.4, 0.5, 0.6, 2.5])  # the mean is 1, so floor(0.7 * 3) = 2 are removed
    assert rivals.without_the_lowest(scores, 0.7).gt(0).tolist() == [False, False, True, True]
    others = torch.tensor([0.4, 0.2, 0.3, 3.1])  # the mean is still 1
    assert rivals.without_the_lowest(others, 0.7).gt(0).tolist() == [True, False, False, True]
