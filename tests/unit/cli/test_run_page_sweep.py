"""Several runs beside each other: the columns of their table, groups of seeds, axes of parallel coordinates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_page_kit import make_run
from treadle.cli.runpage.records import RunRecords, read_run
from treadle.cli.runpage.summary import summarize
from treadle.cli.runpage.sweep import Column, columns_of, natural, parallel, seeds_of


def runs_of(*configs, results=None):
    found = results or [{}] * len(configs)
    return [
        RunRecords(Path(f"run{index}"), f"run{index}", config=config, config_file=True, results=result)
        for index, (config, result) in enumerate(zip(configs, found, strict=True))
    ]


def columns(runs):
    return columns_of(runs, [summarize(run) for run in runs])


def test_columns_are_the_settings_that_differ_choices_before_seeds_then_results():
    runs = runs_of(
        {"seed": 0, "lr": 0.1, "width": 8, "out": "a"},
        {"seed": 1, "lr": 0.2, "width": 8, "out": "b"},
        results=[{"test.mae": 0.5, "version": 1}, {"test.mae": 0.25, "version": 1}],
    )
    found = columns(runs)
    assert [(one.title, one.result) for one in found] == [("lr", False), ("seed", False), ("test.mae", True)]
    assert found[-1].values == [0.5, 0.25]


def test_numbers_of_weights_are_left_out_only_where_other_settings_tell_the_runs_apart():
    sizes = [(width, seed, 6 * width) for width in (8, 64) for seed in (0, 1)]
    told = runs_of(*[{"width": width, "model.parameters": count, "seed": seed} for width, seed, count in sizes])
    untold = runs_of(*[{"model.parameters": count, "seed": seed} for _, seed, count in sizes])
    seeds_apart = runs_of({"model.parameters": 1, "seed": 0}, {"model.parameters": 2, "seed": 1})
    assert [one.title for one in columns(told)] == ["width", "seed"]
    assert (
        [one.title for one in columns(untold)]
        == ["model.parameters", "seed"]
        == [one.title for one in columns(seeds_apart)]
    )
    twice = runs_of(
        *[{"model.parameters": n, "model.trainable": n, "optimizer.parameters": n, "lr": 0.1} for n in (1, 2)]
    )
    assert [one.title for one in columns(twice)] == ["model.parameters"]
    assert seeds_of(told).names == ["width=8 (2 seeds)", "width=64 (2 seeds)"]


def test_runs_that_differ_by_a_seed_only_are_one_group():
    runs = runs_of({"lr": 1, "seed": 0}, {"lr": 2, "seed": 0}, {"lr": 1, "seed": 1}, {"lr": 2, "seed": 1})
    seeds = seeds_of(runs)
    assert seeds is not None
    assert seeds.group == [0, 1, 0, 1]
    assert seeds.names == ["lr=1 (2 seeds)", "lr=2 (2 seeds)"]


def test_members_of_a_population_are_grouped_by_seeds_that_their_own_settings_lack(tmp_path):
    names = [f"lr={lr},seed={seed}" for lr in (0.1, 0.2) for seed in (0, 1)]
    rows = []
    for number, name in enumerate(names):
        make_run(tmp_path / name, lr=(0.1, 0.2)[number // 2])
        (tmp_path / name / "config.json").write_text(json.dumps({"optimizer": {"lr": (0.1, 0.2)[number // 2]}}))
        rows.append({"name": name, "settings": {"lr": (0.1, 0.2)[number // 2], "seed": number % 2}})
    (tmp_path / "population.json").write_text(json.dumps({"members": rows}))
    seeds = seeds_of([read_run(tmp_path / name) for name in names])
    assert seeds is not None
    assert seeds.group == [0, 0, 1, 1]
    assert seeds.names == ["optimizer.lr=0.1 (2 seeds)", "optimizer.lr=0.2 (2 seeds)"]


@pytest.mark.parametrize(
    "configs",
    [[{"lr": 1}, {"lr": 2}], [{"lr": 1, "seed": 0}, {"lr": 2, "seed": 1}], [{"seed": 0}, {}], [{"seed": 0}]],
    ids=["no seed", "never the same settings", "settings unknown", "one run"],
)
def test_other_runs_are_no_groups(configs):
    assert seeds_of(runs_of(*configs)) is None


def test_an_axis_is_linear_logarithmic_over_decades_or_in_the_order_of_texts():
    assert Column("a", [0, 1, 4], ["0", "1", "4"]).places == [0.0, 0.25, 1.0]
    assert Column("a", [1e-4, 1e-3, 1e-2], ["a", "b", "c"]).places == pytest.approx([0.0, 0.5, 1.0])
    assert Column("a", ["adam", "sgd", "adam"], ["adam", "sgd", "adam"]).places == [0.0, 1.0, 0.0]
    assert Column("a", [2, None, 4], ["2", "–", "4"]).places == [0.0, None, 1.0]
    assert Column("a", [0, 1, 4], ["0", "1", "4"]).ticks == [(0.0, "0"), (1.0, "4")]


def test_parallel_coordinates_need_a_setting_and_a_result():
    assert parallel(columns(runs_of({"lr": 1}, {"lr": 2}))) is None
    found = parallel(columns(runs_of({"lr": 1}, {"lr": 2}, results=[{"mae": 1.0}, {"mae": 2.0}])))
    assert found is not None
    assert [one["title"] for one in found] == ["lr", "mae"]


def test_names_sort_by_their_numbers():
    values = ["lr=0.1,seed=0", "lr=0.01,seed=1", "lr=1e-05,seed=3", "lr=0.01,seed=0", "lr=-2,seed=0", "lr=10,seed=0"]
    assert sorted(values, key=natural) == [values[4], values[2], values[3], values[1], values[0], values[5]]
    assert sorted(["b/run10", "b/run9", "a/run11"], key=natural) == ["a/run11", "b/run9", "b/run10"]
