from __future__ import annotations

import contextlib
import os
import random

import numpy as np
import pytest
import torch

from helpers import differences, through_a_file
from treadle.checkpoint.schema import to_plain
from treadle.errors import ConfigError
from treadle.seed import ReproducibilityContext, RngState, forked_rng, mix_seed, set_seed


def draw():
    return random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.normal(), torch.rand(3).tolist()


@pytest.fixture(autouse=True)
def _outer_state_is_put_back():
    rng = RngState.capture()
    flags = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    cublas = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    yield
    rng.restore()
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if cublas is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = cublas


def flags_now():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("seed", [0, 42, 2**32, 2**40 + 1, -1])
def test_one_seed_gives_one_stream_in_python_numpy_and_torch(seed):
    set_seed(seed)
    first = draw()
    set_seed(seed)
    assert draw() == first
    set_seed(seed + 1)
    other = draw()
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_seed_of_numpy_is_the_same_number_and_what_is_no_seed_is_named():
    set_seed(7)
    first = draw()
    set_seed(np.int64(7))
    assert draw() == first
    for seed in (1.5, "7", None):
        with pytest.raises(ConfigError, match=r"seed=.*: must be a whole number"):
            set_seed(seed)


def test_the_default_seed_is_42():
    set_seed()
    first = draw()
    set_seed(42)
    assert draw() == first


def test_seeding_touches_no_flag_unless_asked():
    before = flags_now()
    set_seed(1)
    assert flags_now() == before


def test_deterministic_sets_every_flag():
    set_seed(1, deterministic=True)
    assert flags_now() == (True, False, True, False, ":4096:8")


def test_deterministic_leaves_a_cublas_setting_alone():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    set_seed(1, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_captured_state_is_restored():
    set_seed(3)
    random.gauss(0, 1)  # leaves the second value of a pair behind
    np.random.normal()
    state = RngState.capture()
    first = draw()
    draw()
    state.restore()
    assert draw() == first


def test_a_state_goes_through_a_file_to_the_bit():
    set_seed(4)
    random.gauss(0, 1)
    np.random.normal()
    plain = to_plain(RngState.capture().to_plain())
    first = draw()
    loaded = through_a_file(plain)
    assert differences(loaded, plain) == []
    RngState.from_plain(loaded).restore()
    assert draw() == first


def test_a_captured_state_does_not_move_with_the_generators():
    state = RngState.capture()
    before = to_plain(state.to_plain())
    draw()
    assert differences(to_plain(state.to_plain()), before) == []


def test_an_accelerator_that_is_not_here_is_passed_over():
    state = RngState.capture()
    RngState(state.python, state.numpy, state.torch, {"cuda": [torch.zeros(16, dtype=torch.uint8)]}).restore()


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_a_forked_block_does_not_move_the_outer_streams(seed):
    set_seed(5)
    expected = draw()
    set_seed(5)
    with forked_rng(seed):
        draw()
    assert draw() == expected


def test_a_forked_block_restores_after_an_exception():
    set_seed(5)
    expected = draw()
    set_seed(5)
    with contextlib.suppress(KeyError), forked_rng(1):
        draw()
        raise KeyError
    assert draw() == expected


def test_a_forked_block_with_a_seed_always_draws_the_same():
    with forked_rng(9):
        first = draw()
    draw()
    with forked_rng(9):
        assert draw() == first


def test_a_forked_block_without_a_seed_continues_the_outer_streams():
    set_seed(5)
    expected = draw()
    set_seed(5)
    with forked_rng():
        assert draw() == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_context_restores_every_generator_and_flag(deterministic):
    set_seed(6)
    expected = draw()
    set_seed(6)
    before = flags_now()
    with ReproducibilityContext(1, deterministic):
        inside = draw()
    assert flags_now() == before
    assert draw() == expected
    with ReproducibilityContext(1, deterministic):
        assert draw() == inside


def test_the_context_restores_a_warn_only_setting_and_a_cublas_setting():
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    torch.backends.cudnn.benchmark = True
    before = flags_now()
    with ReproducibilityContext(1, deterministic=True):
        assert flags_now()[:4] == (True, False, True, False)
    assert flags_now() == before


def test_the_context_restores_after_an_exception():
    before = flags_now()
    set_seed(6)
    expected = draw()
    set_seed(6)
    with contextlib.suppress(KeyError), ReproducibilityContext(1, deterministic=True):
        draw()
        raise KeyError
    assert flags_now() == before
    assert draw() == expected


def test_one_context_may_be_entered_inside_itself():
    set_seed(6)
    expected = draw()
    set_seed(6)
    before = flags_now()
    context = ReproducibilityContext(1, deterministic=True)
    with context:
        draw()
        with context:
            draw()
    assert flags_now() == before
    assert draw() == expected


def test_mixed_seeds_of_neighbours_are_all_different_and_fit_every_generator():
    seeds = {mix_seed(a, b) for a in range(60) for b in range(60)}
    assert len(seeds) == 3600
    assert all(0 <= seed < 2**63 for seed in seeds)
    set_seed(max(seeds))


def test_a_mixed_seed_depends_on_order_and_number_and_is_stable():
    assert mix_seed(1, 2) != mix_seed(2, 1)
    assert mix_seed(1) != mix_seed(1, 0)
    assert mix_seed(-1) != mix_seed(1)
    assert mix_seed(123, 4) == mix_seed(123, 4)


def test_streams_of_neighbouring_mixed_seeds_are_unrelated():
    rows = []
    for number in range(200):
        with forked_rng(mix_seed(0, number)):
            rows.append(torch.rand(50))
    correlation = torch.corrcoef(torch.stack(rows))
    off_diagonal = correlation[~torch.eye(200, dtype=torch.bool)]
    assert off_diagonal.abs().max() < 0.75
    assert abs(off_diagonal.mean()) < 0.01
