"""notebook.ipynb: it is short, its outputs are saved, and what it claims about live numbers holds
for other starting models, too. (The claims are assertions in its cells.)"""

import io
import tokenize
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

import dppo

nbformat = pytest.importorskip("nbformat")
PATH = Path(dppo.__file__).with_name("notebook.ipynb")
AIR = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def cells(kind):
    return [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == kind]


def lines_of_code(source):
    """The number of lines that are neither blank nor a comment."""
    source = "\n".join(line for line in source.splitlines() if not line.startswith("%"))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*AIR, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_it_can_be_read_in_one_sitting():
    sizes = [lines_of_code(cell.source) for cell in cells("code")]
    assert max(sizes) <= 25 and sum(sizes) <= 140
    assert sum(len(cell.source.split()) for cell in cells("markdown")) <= 2200


def test_its_outputs_are_saved_and_none_is_an_error():
    numbers = [cell.execution_count for cell in cells("code")]
    assert numbers == [*range(1, len(numbers) + 1)]  # executed once, from top to bottom
    outputs = [output for cell in cells("code") for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 8


@pytest.mark.parametrize("seed", [1, 2])
def test_slow_its_claims_hold_for_another_starting_model(tmp_path, monkeypatch, seed):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # where the starting model is looked for
    manual_seed = torch.manual_seed
    with mock.patch("torch.manual_seed", lambda _: manual_seed(seed)):
        dppo.warm_started(transformers.ByT5Tokenizer(extra_ids=0))
    notebook = nbformat.read(PATH, as_version=4)
    place = {"metadata": {"path": str(PATH.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
