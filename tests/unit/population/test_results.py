"""Means over seeds, tables, and whether a difference is more than noise."""

from __future__ import annotations

import csv
import json
import math
import random
import statistics

import pytest

from treadle import ConfigError
from treadle.population import Results, Summary, difference
from treadle.population.comparison import _widened
from treadle.population.results import Row, read_rows


def rows(values, **settings):
    return [
        Row(f"seed={n}", {**settings, "seed": n}, "finished", 9, 1, {"loss": value}) for n, value in enumerate(values)
    ]


def test_a_summary_has_mean_and_deviation_of_the_sample():
    values = [0.3, 0.1, 0.25, 0.7]
    found = Summary.of([*values, math.nan])
    assert (found.mean, found.count) == (pytest.approx(statistics.mean(values)), 4)
    assert found.deviation == pytest.approx(statistics.stdev(values))
    assert str(Summary.of([2.0])) == "2 (1)"
    assert Summary.of([]).count == 0


def test_groups_are_settings_without_the_seed_and_failed_members_count_nothing():
    results = Results([
        *rows([1.0, 2.0], lr="a"), *rows([5.0], lr="b"),
        Row("x", {"lr": "b", "seed": 9}, "failed", 1, 0, {}, 0, "E: no"),
    ])  # fmt: skip
    assert list(results.groups()) == ["lr=a", "lr=b"]
    assert results.lines() == [
        "lr=a: 2 of 2 members; loss 1.5 ± 0.71 (2)", "lr=b: 1 of 2 members; loss 5 (1)", "x failed: E: no",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="metric='los': no member has it; did you mean 'loss'"):
        results.summary("los")


def test_a_table_is_written_and_rows_are_read_again(tmp_path):
    found = rows([1.5, 2.5], lr=0.1)
    path = Results(found).to_csv(tmp_path / "rows.csv")
    table = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["member"], row["seed"], row["lr"], row["loss"]) for row in table] == [
        ("seed=0", "0", "0.1", "1.5"), ("seed=1", "1", "0.1", "2.5"),
    ]  # fmt: skip
    (tmp_path / "population.json").write_text(json.dumps({"members": [row.as_values() for row in found]}))
    assert read_rows(tmp_path / "population.json") == found


def test_pairs_of_seeds_show_a_small_difference_that_whole_groups_do_not():
    rng = random.Random(0)
    base = [rng.gauss(0, 1) for _ in range(10)]
    one, two = Results(rows(base)), Results(rows([value + 0.1 + rng.gauss(0, 0.02) for value in base]))
    found = difference(one, two, "loss")
    assert found.paired
    assert found.is_real
    assert found.low < 0.1 < found.high
    assert "paired over 10 seeds" in str(found)
    assert str(found).endswith("more than noise")
    unpaired = Results(
        [Row(row.name, {"seed": 100 + n}, "finished", 9, 1, row.metrics) for n, row in enumerate(two.rows)]
    )
    apart = difference(one, unpaired, "loss")
    assert not apart.paired
    assert not apart.is_real
    assert difference(one, two, "loss") == found


def test_an_interval_of_nothing_but_noise_holds_zero_about_as_often_as_it_says():
    rng, misses = random.Random(1), 0
    for _ in range(200):
        one, two = (Results(rows([rng.gauss(0, 1) for _ in range(5)])) for _ in range(2))
        misses += difference(one, two, "loss", resamples=400).is_real
    assert misses <= 20  # 10 are expected of 200 at 95 %


@pytest.mark.parametrize(
    ("options", "words"),
    [({"level": 1.0}, "level=1.0: must be between 0 and 1"), ({"resamples": 5}, "resamples=5: must be")],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        difference(Results(rows([1, 2])), Results(rows([1, 2])), "loss", **options)


def test_one_member_has_no_noise_to_compare_with():
    with pytest.raises(ConfigError, match="A has 1 members with it and B has 1; estimating noise needs at least 2"):
        difference(Results(rows([1.0])), Results(rows([2.0])), "loss")


@pytest.mark.parametrize(
    ("count", "level", "quantile"), [(2, 0.95, 12.706), (3, 0.99, 9.925), (5, 0.8, 1.533), (21, 0.95, 2.086)]
)
def test_intervals_are_widened_by_the_quantiles_of_t(count, level, quantile):
    normal = {0.95: 1.95996, 0.99: 2.57583, 0.8: 1.28155}[level]
    assert _widened(count, level) == pytest.approx(quantile / normal * (count / (count - 1)) ** 0.5, rel=1e-3)


def test_members_of_a_sweep_are_paired_by_all_settings_that_differ():
    rng = random.Random(2)
    base = {(lr, seed): 10 * lr + rng.gauss(0, 1) for lr in (0.1, 1.0) for seed in range(4)}

    def sweep(shift, **more):
        return Results([
            Row(f"lr={lr},seed={seed}", {"lr": lr, "seed": seed, **more}, "finished", 9, 1, {"loss": value + shift})
            for (lr, seed), value in base.items()
        ])  # fmt: skip

    found = difference(sweep(0.0, wide=True), sweep(0.1, wide=False), "loss")
    assert (found.paired, found.pairs, found.count, found.is_real) == (True, "settings", 8, True)
    assert "paired over 8 settings" in str(found)


def test_a_member_that_has_not_finished_is_no_part_of_a_mean():
    members = [Row(f"seed={n}", {"seed": n}, "finished", 9, 1, {"loss": float(n)}) for n in range(3)]
    paused = Row("seed=3", {"seed": 3}, "paused", 3, 1, {"loss": 100.0})
    results = Results([*members, paused])
    assert str(results.summary("loss")) == "1 ± 1 (3)"
    assert results.lines() == ["all: 3 of 4 members, 1 paused; loss 1 ± 1 (3)"]
    assert difference(results, results, "loss").count == 3
    assert Results([paused]).summary("loss").mean == 100.0
    assert Results([paused]).lines() == ["all: 1 of 1 member, 1 paused; loss 100 (1)"]


def test_members_without_a_partner_are_counted_and_missing_numbers_are_told_apart():
    one, more = Results(rows([1.0, 2.0, 3.0])), Results(rows([1.5, 2.5, 3.5, 4.0, 5.0]))
    assert "(paired over 3 seeds; 2 members have no partner)" in str(difference(one, more, "loss"))
    with pytest.raises(ConfigError, match="no member has it; did you mean 'loss'"):
        difference(one, more, "los")
    with pytest.raises(ConfigError, match="metric='loss': no comparable member has a finite value"):
        difference(Results(rows([math.nan, math.nan])), more, "loss")
