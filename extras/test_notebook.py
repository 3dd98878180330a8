"""Tests of the notebook.

python -m pytest -q extras/test_notebook.py
"""

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

import dppo

ROOT = Path(dppo.__file__).parent
CLAIMS = """
totals = {name: tools.totals(run) for name, run in runs.items()}
taught = {name: tools.teaching(run.steps).double().mean() for name, run in runs.items()}
assert taught["grpo-skip"] < 0.3
assert min(taught["dppo"], taught["our rule"]) > 1.3 * taught["grpo-skip"]
assert totals["dppo"]["candidates"] > 1.5 * totals["grpo-skip"]["candidates"]
assert totals["our rule"]["rolled out"] < 0.8 * totals["grpo-skip"]["rolled out"]
assert all(run.curve[-1][1] > run.curve[0][1] + 0.1 for run in runs.values())
assert all(same) and round(estimates.mean().item(), 1) == 2 and len({*estimates[:4].tolist()}) > 1

assert 0 < added < 0.6 and noise_of_prompts(s2[rest], pi_q[rest]) < 1.2
assert here["random"] > 1.2 * here["|A|"] and here["|A|"] > 1.5 * here["|A| × surprise"]
correlations = [torch.corrcoef(torch.stack([norms, x]))[0, 1] for x in guesses.values()]
assert correlations[1] > correlations[0] + 0.1

chance = tools.degrees_by_chance(weights["dppo"], g)
turned = {name: tools.degrees(w.mean(dim=0) @ g, full) for name, w in weights.items()}
assert turned.pop("dppo") < 3 * chance and min(turned.values()) > 4 * chance
assert tools.degrees_by_chance(weights["all weights 1"], g) < chance
assert (weights["Literal"] == weights["Literal"][0]).all()
"""


@pytest.fixture
def notebook():
    return pytest.importorskip("nbformat").read(ROOT / "notebook.ipynb", as_version=4)


def test_the_notebook_was_executed_from_top_to_bottom(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]


@pytest.mark.parametrize("seed", [1])
def test_slow_the_notebook_s_claims_hold_for_another_starting_model(
    seed, notebook, tmp_path, monkeypatch
):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # where the starting model is looked for
    manual_seed = torch.manual_seed
    with mock.patch("torch.manual_seed", lambda _: manual_seed(seed)):
        dppo.warm_started(transformers.ByT5Tokenizer(extra_ids=0))
    claims = copy.deepcopy(notebook.cells[-2])
    claims.source = CLAIMS
    notebook.cells.append(claims)
    place = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
