"""The small helpers: exact numbers, one host read, and flags that are touched only where CUDA is."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

from helpers import CountReads
from treadle.astro import configure_cuda_performance, count_parameters, format_time, log_gradient_stats, utilities
from treadle.errors import ConfigError


def test_parameters_are_counted_once_and_frozen_ones_apart():
    model = nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 5, bias=False))
    model[1].weight.requires_grad_(False)
    assert count_parameters(model) == (80, 55)
    model.append(model[0])
    assert count_parameters(model) == (80, 55)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.4, "0s"), (45, "45s"), (59.6, "1m 0s"), (125, "2m 5s"), (3600, "1h 0m 0s"), (3665, "1h 1m 5s"),
     (100_000, "27h 46m 40s")],
)  # fmt: skip
def test_durations(seconds, text):
    assert format_time(seconds) == text


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_what_is_no_duration_is_refused(seconds):
    with pytest.raises(ConfigError, match="seconds="):
        format_time(seconds)


def test_gradients_are_measured_over_all_their_numbers_with_one_host_read(caplog):
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    model[0].weight.grad = torch.tensor([[3.0, -4.0]])
    model[0].bias.grad = torch.tensor([12.0])
    model[1].weight.grad = torch.tensor([[0.0]])
    with caplog.at_level(logging.INFO, "treadle.astro"), CountReads() as counted:
        stats = log_gradient_stats(model)
    assert stats == {"grad_norm": 13.0, "grad_mean": 2.75, "grad_max": 12.0, "grad_min": -4.0}
    assert len(counted.reads) <= 4  # the values of one tensor of four
    assert "grad_norm 13" in caplog.text


def test_without_gradients_the_norm_is_zero_and_the_rest_undefined():
    stats = log_gradient_stats(nn.Linear(2, 1))
    assert stats["grad_norm"] == 0
    assert all(math.isnan(stats[name]) for name in ("grad_mean", "grad_max", "grad_min"))


def flags():
    cuda = torch.backends.cuda
    return [cuda.matmul.allow_tf32, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]


@pytest.fixture
def attention_off():
    cuda, before = torch.backends.cuda, flags()
    setters = [cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp]
    cuda.matmul.allow_tf32 = False
    for switch in setters:
        switch(False)
    yield
    cuda.matmul.allow_tf32 = before[0]
    for switch, value in zip(setters, before[1:], strict=True):
        switch(value)


@pytest.mark.usefixtures("attention_off")
def test_with_cuda_the_fast_paths_are_on_and_the_plain_one_stays(monkeypatch):
    monkeypatch.setattr(utilities.torch.cuda, "is_available", lambda: True)
    configure_cuda_performance()
    assert flags() == [True] * 4


@pytest.mark.usefixtures("attention_off")
def test_without_cuda_nothing_happens(monkeypatch):
    monkeypatch.setattr(utilities.torch.cuda, "is_available", lambda: False)
    configure_cuda_performance()
    assert flags() == [False] * 4
