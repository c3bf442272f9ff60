"""The warm-up/cosine factor: conformance numbers, its ends, its degenerate cases."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import treadle.optim.schedules
from treadle.optim.schedules import SCHEDULES, ScheduleShape, check_warmup, warmup_cosine_factor

C1 = [
    *(0.2, 0.4, 0.6, 0.8, 1, 1, 0.990166, 0.961095, 0.914058, 0.851109, 0.775, 0.689058, 0.597038, 0.502962),
    *(0.410942, 0.325, 0.248891, 0.185942, 0.138905, 0.109834, 0.1),
]


def test_factor_gives_the_conformance_numbers() -> None:
    got = [warmup_cosine_factor(s, warmup_steps=5, total_steps=20, min_scale=0.1) for s in range(21)]
    assert got == pytest.approx(C1, abs=1e-6)


def test_factor_starts_at_one_over_w_and_stays_at_the_floor() -> None:
    def factor(step: int) -> float:
        return warmup_cosine_factor(step, warmup_steps=4, total_steps=10, min_scale=0.25)

    assert factor(0) == 0.25
    assert factor(3) == factor(4) == 1.0
    assert factor(9) > 0.25
    assert factor(10) == factor(11) == factor(10_000) == pytest.approx(0.25, abs=1e-12)


def test_no_warmup_starts_at_one() -> None:
    assert warmup_cosine_factor(0, warmup_steps=0, total_steps=10, min_scale=0.0) == 1.0
    assert warmup_cosine_factor(5, warmup_steps=0, total_steps=10, min_scale=0.0) == pytest.approx(0.5)


@pytest.mark.parametrize("total", [6, 8])
def test_warmup_that_fills_the_run_never_decays(total: int) -> None:
    got = [warmup_cosine_factor(s, warmup_steps=8, total_steps=total, min_scale=0.1) for s in range(10)]
    assert got == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1, 1])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_warms_up_alike_and_ends_at_the_floor(name: str) -> None:
    shape = ScheduleShape(name, warmup_steps=4, min_scale=0.25)
    factor = shape.factor(100)
    assert [factor(s) for s in range(5)][:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(0.25 <= factor(s + 1) <= factor(s) for s in range(3, 120))
    assert factor(100) == pytest.approx({"constant": 1.0}.get(name, 0.25), abs=1e-12)


def test_each_schedule_has_its_numbers() -> None:
    def rounded(name: str, **given: float) -> list[float]:
        factor = ScheduleShape(name, **given).factor(10)
        return [round(factor(s), 4) for s in (0, 2, 5, 8, 9, 10, 11)]

    assert rounded("linear") == [1.0, 0.8, 0.5, 0.2, 0.1, 0.0, 0.0]
    assert rounded("wsd") == [1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert rounded("inverse_sqrt") == [1.0, 0.5774, 0.4082, 0.3333, 0.3162, 0.3015, 0.2887]
    assert rounded("cosine", warmup_ratio=0.11) == [0.5, 1.0, 0.6913, 0.1464, 0.0381, 0.0, 0.0]


@pytest.mark.parametrize(("total", "warnings"), [(4, 1), (5, 1), (6, 0)])
def test_long_warmup_warns_once(total: int, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="treadle.schedules"):
        check_warmup(5, total_steps=total, min_scale=0.0)
    assert len(caplog.records) == warnings
    assert all(r.name == "treadle.schedules" and "warm-up of 5" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("warmup", "total", "scale", "match"),
    [
        (-1, 10, 0.1, r"warmup_steps=-1: must be at least 0"),
        (0, 0, 0.1, r"total_steps=0: must be at least 1"),
        (0, 10, 1.5, r"min_scale=1.5: must lie in"),
        (0, 10, float("nan"), r"min_scale=nan: must lie in"),
    ],
)
def test_bad_numbers_are_named(warmup: int, total: int, scale: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_warmup(warmup, total_steps=total, min_scale=scale)


def test_schedules_need_the_standard_library_only() -> None:
    tree = ast.parse(Path(treadle.optim.schedules.__file__).read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert "torch" not in names
    assert "numpy" not in names
