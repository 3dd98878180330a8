"""An outside oracle: where nothing is pruned, updates have the gradients of TRL's GRPOTrainer.

python -m pytest -q .ci/test_trl.py    # where TRL is installed
"""

import copy

import pytest
import torch
from test_notebook import SCORED, SEQUENCES, G, N, trl_settings

import dppo

OBJECTIVES = {  # as TRL has them
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}


def move(model, seed):
    """Moves the weights at random."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data += 0.01 * torch.randn(weight.shape, generator=generator)


class Noting:
    """An optimizer that notes the gradient of each update, and makes a move that is always the same
    in place of the one that would follow from it."""

    def __init__(self, model):
        self.model = model
        self.gradients = []

    def step(self):
        gradients = [weight.grad.flatten() for weight in self.model.parameters()]
        self.gradients.append(torch.cat(gradients))
        move(self.model, seed=len(self.gradients))
        self.model.zero_grad()


def gradients_of_trl(trainer):
    """Of two updates on a batch, each in three parts."""
    optimizer = Noting(trainer.model)
    trainer.current_gradient_accumulation_steps = 3
    rows = [trainer.train_dataset[q] for q in range(N) for _ in range(G)]
    for trainer._step in range(6):
        inputs = trainer._prepare_inputs(rows)
        trainer.compute_loss(trainer.model, inputs).backward()
        if trainer._step % 3 == 2:
            optimizer.step()
    return optimizer.gradients


@pytest.mark.parametrize("objective", dppo.CLIPPING)
def test_two_updates_on_an_unpruned_rollout_have_the_gradients_of_trl(
    objective, monkeypatch, tmp_path
):
    trl = pytest.importorskip("trl")
    common = {"beta": 0.1, "temperature": 0.7}
    own = {"num_iterations": 2, "max_completion_length": 8, "use_bias_correction_kl": False}
    settings = trl_settings(trl, tmp_path, **OBJECTIVES[objective], **common, **own)
    reference = settings["model"]
    reference.save_pretrained(tmp_path / "model")  # TRL loads it twice, as a reference, too
    settings["model"] = str(tmp_path / "model")
    trainer = trl.GRPOTrainer(**settings)
    trainer.model.train()
    move(trainer.model, seed=0)  # away from the reference

    model = copy.deepcopy(trainer.model)
    own = {"inner_epochs": 2, "max_completion_tokens": 8, "group_size": G, "max_grad_norm": 1e9}
    rule = dppo.Rule(dppo.Config(objective=objective, **common, **own), N)
    task = dppo.Task(range(N), {}, None, None, model, reference=reference)
    optimizer = Noting(model)
    monkeypatch.setattr(dppo, "rollout", lambda *_: (SEQUENCES, SCORED, 0.0))
    step = dppo.dppo_step(task, rule, optimizer, torch.arange(N), 0.0, torch.Generator())
    assert 0 < step.updates[1]["clipped_fraction"] < 1
    for gradient, expected in zip(optimizer.gradients, gradients_of_trl(trainer), strict=True):
        assert (gradient - expected).norm() < 1e-5 * expected.norm()
