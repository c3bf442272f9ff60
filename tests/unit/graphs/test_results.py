"""Costs, tables over seeds, and what a result was made with."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
import torch
from torch import nn

from treadle.errors import ConfigError
from treadle.graphs import environment, profiling, results
from treadle.population import Summary


def test_operations_are_counted_and_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 1, bias=False)).train()
    model[1].eval()
    before = torch.get_rng_state()
    forward = profiling.count_flops(model, torch.ones(3, 4))
    both = profiling.count_flops(model, torch.ones(3, 4), backward=True)
    assert forward.total == 2 * 3 * (4 * 8 + 8)
    assert both.total == forward.total + 2 * 3 * (4 * 8 + 8) + 2 * 3 * 8  # weights of both, inputs of the second
    assert forward.breakdown == {"aten.mm": forward.total}
    assert [module.training for module in model] == [True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


def test_times_memory_and_a_table_of_sizes():
    stats = profiling.profile_forward(nn.Linear(2, 1), torch.ones(1, 2), num_runs=3, warmup_runs=1)
    assert (stats.num_runs, stats.min <= stats.mean <= stats.max) == (3, True)
    model = nn.Linear(1024, 256, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    found = profiling.memory_breakdown(model, optimizer)
    assert (found["parameters"], found["gradients"]) == (1.0, 1.0)
    assert found["optimizer"] == pytest.approx(2.0, abs=1e-4)
    rows = profiling.scaling_table(lambda n: nn.Linear(n, 1), lambda n: torch.ones(1, n), [2, 4], num_runs=1)
    assert [(row["value"], row["parameters"], row["flops"]) for row in rows] == [(2, 3, 4), (4, 5, 8)]
    with pytest.raises(ConfigError, match="CUDA"):
        profiling.peak_memory(lambda: None, "cpu")
    with pytest.raises(ConfigError, match="num_runs"):
        profiling.benchmark_function(lambda: None, num_runs=0)


def write_run(folder, mae, seed, pe="lap_pe"):
    folder.mkdir(parents=True)
    content = {"test_metrics": {"mae": mae, "roc_auc": 1 - mae}, "seed": seed}
    (folder / "test_results.json").write_text(json.dumps(content))
    (folder / "config.yaml").write_text(f"pe: {{node: {{type: {pe}}}}}\n")


def test_runs_become_rows_rows_become_means_and_these_tables(tmp_path):
    for number, (mae, pe) in enumerate([(0.25, "lap_pe"), (0.75, "lap_pe"), (0.375, "none")]):
        write_run(tmp_path / f"run{number}", mae, number, pe)
    rows = results.load_results(tmp_path, settings=["pe.node.type"])
    assert rows[0] == {"run": "run0", "seed": 0, "pe.node.type": "lap_pe", "mae": 0.25, "roc_auc": 0.75}
    table = results.aggregate_by_seed(rows, ["pe.node.type"], ["mae", "roc_auc"])
    assert table[0]["mae"] == Summary(0.5, pytest.approx(math.sqrt(0.125)), 2)
    results.export_table(table, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().splitlines()[2] == "none,0.375,,1,0.625,,1"
    results.export_table(table, tmp_path / "table.tex")
    lines = (tmp_path / "table.tex").read_text().splitlines()
    assert lines[0] == r"\begin{tabular}{lrr}"
    assert lines[4] == r"lap\_pe & $0.5000 \pm 0.3536$ & $0.5000 \pm 0.3536$ \\"
    assert lines[5] == r"none & $\mathbf{0.3750}$ & $\mathbf{0.6250}$ \\"
    for call, word in (
        (lambda: results.load_results(tmp_path / "run0" / "no"), "no run"),
        (lambda: results.load_results(tmp_path, settings=["pe.node.typ"]), "pe.node.type"),
        (lambda: results.aggregate_by_seed(rows, ["seeds"], ["mae"]), "seed"),
        (lambda: results.aggregate_by_seed(rows, ["seed"], ["mea"]), "mae"),
        (lambda: results.export_table(table, tmp_path / "table.xlsx"), "tex or .csv"),
        (lambda: results.to_latex([]), "there are no rows"),
    ):
        with pytest.raises(ConfigError, match=word):
            call()


def test_the_commit_and_the_versions_are_told(tmp_path):
    outside = environment.get_git_info(tmp_path)
    assert (outside["commit"], outside["dirty"]) == ("unknown", None)
    for command in (
        ["init", "-q", "-b", "trunk"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    inside = environment.get_git_info(tmp_path)
    assert (len(inside["commit"]), inside["branch"], inside["dirty"]) == (40, "trunk", False)
    (tmp_path / "new").write_text("x")
    assert environment.get_git_info(tmp_path)["dirty"]
    info = environment.create_reproducibility_info({"seed": 42}, seed=42)
    assert info["seed"] == 42
    assert {"git", "environment", "config_hash", "timestamp"} < info.keys()
    path = environment.save_reproducibility_info(info, tmp_path / "run")
    assert json.loads(path.read_text())["environment"]["torch_version"] == torch.__version__


@pytest.mark.parametrize(
    ("first", "second", "differences"),
    [
        ({"a": 0.5, "b": [1, 2]}, {"a": 0.5 + 1e-9, "b": [1, 2]}, []),
        ({"a": math.nan}, {"a": math.nan}, []),
        ({"a": 0.5}, {"a": 0.6}, ["a: 0.5 and 0.6"]),
        ({"a": {"b": 1}}, {"a": {}}, ["a.b: only in the first"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a[1]: 2 and 3"]),
        ({"start_time": "noon"}, {"start_time": "night"}, []),
        ({"wall_time": 1.0}, {"wall_time": 2.0}, ["wall_time: 1.0 and 2.0"]),
        ({"a": True}, {"a": False}, ["a: True and False"]),
    ],
)
def test_two_results_are_compared_value_by_value(tmp_path, first, second, differences):
    for name, content in (("one", first), ("two", second)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(content))
    found = environment.verify_reproducibility(tmp_path / "one", tmp_path / "two")
    assert (found["identical"], found["differences"]) == (not differences, differences)
    assert not environment.verify_reproducibility(tmp_path / "one", tmp_path / "gone")["identical"]
