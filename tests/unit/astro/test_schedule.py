"""The learning rate: the numbers of the specification, and what happens at the edges."""

from __future__ import annotations

import pytest

from treadle.astro.schedule import cosine_schedule_with_warmup
from treadle.errors import ConfigError


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.0), (1, 0.1), (5, 0.5), (9, 0.9), (10, 1.0), (11, 0.999726), (20, 0.972862), (55, 0.55), (78, 0.226297),
     (99, 0.100274), (100, 0.1), (500, 0.1)],
)  # fmt: skip
def test_the_rates_are_those_of_the_specification(step, expected):
    assert cosine_schedule_with_warmup(step, 1.0, 10, 100, 0.1) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("step", "expected"), [(0, 1.0), (50, 0.55)])
def test_without_a_warm_up_it_starts_at_the_base(step, expected):
    assert cosine_schedule_with_warmup(step, 1.0, 0, 100, 0.1) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 1e-7), (1000, 1e-4), (2000, 2e-4), (101_000, 1.1e-4), (200_000, 2e-5)]
)
def test_the_default_length_and_ratio(step, expected):
    assert cosine_schedule_with_warmup(step, 2e-4, 2000) == pytest.approx(expected, rel=1e-9)


def test_a_warm_up_that_fills_the_schedule_ends_at_the_base():
    rates = [cosine_schedule_with_warmup(step, 1.0, 10, 10) for step in (0, 5, 9, 10, 11)]
    assert rates == [0.0, 0.5, 0.9, 1.0, 0.1]
    assert cosine_schedule_with_warmup(10, 1.0, 20, 10) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1.0, 10, 100), "step=-1"),
        ((1, -1.0, 10, 100), "base_lr=-1.0"),
        ((1, float("nan"), 10, 100), "base_lr=nan"),
        ((1, 1.0, -1, 100), "warmup_steps=-1"),
        ((1, 1.0, 10, 0), "total_steps=0"),
        ((1, 1.0, 10, 100, 1.5), "min_lr_ratio=1.5"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cosine_schedule_with_warmup(*arguments)
