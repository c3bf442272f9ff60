"""The notebook runs from its first cell to its last, without jupyter, and shows what it says."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import torch

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


def run_cell(source, names):
    """Run a cell and return the value of its last line, if that is an expression, as a notebook shows it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


def test_the_cells_run_and_two_halves_are_one_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {"__name__": "__main__"}
    shown = {cell["id"]: run_cell("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"}
    assert shown["more"][0] == 40
    assert shown["straight"] is True
    assert shown["load"]["0.weight"] == (64, 98)
    assert names["history"]["eval_loss"][-1] < names["history"]["eval_loss"][0]
    assert torch.isfinite(names["predicted"]).all()
    __import__("matplotlib.pyplot").pyplot.close("all")


def test_it_is_stored_with_the_outputs_of_one_run_in_order():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = {cell["id"]: cell["outputs"] for cell in code}
    assert outputs["straight"][-1]["data"]["text/plain"] in ("True", ["True"])
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell["outputs"])
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
