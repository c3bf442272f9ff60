"""Kernel regression by its formulas, rows left out by refitting, shares of mixtures, and what a stack chooses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from treadle.errors import ConfigError
from treadle.regression import KERNELS, KernelRegression, KernelStack, NumberViews, Setting, mixing_shares

RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.normal(size=(40, 3)))
Y = torch.stack([X[:, 0].tanh(), X[:, 1] * X[:, 2]], dim=1) + 0.05 * torch.from_numpy(RNG.normal(size=(40, 2)))
GRID = {"widths": (0.1, 1.0), "noises": (1e-3, 1e-1)}


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_a_row_that_is_left_out_is_one_that_was_not_fitted(kernel):
    setting = Setting(kernel, 0.5, 0.01)
    off, deviation = KernelRegression(X, Y, setting).left_out()
    others = KernelRegression(X[1:], Y[1:], setting)
    torch.testing.assert_close(off[0], others.mean(X[:1])[0] - Y[0])
    # The variance of the process is that of all rows in one and of the others in the other.
    ratio = deviation[0] / others.deviation(X[:1])[0]
    whole, part = (KernelRegression(x, y, setting)._variance for x, y in ((X, Y), (X[1:], Y[1:])))
    torch.testing.assert_close(ratio, (whole / part).sqrt())


def test_a_gaussian_process_is_that_of_scikit_learn():
    process = pytest.importorskip("sklearn.gaussian_process")
    kernels = pytest.importorskip("sklearn.gaussian_process.kernels")
    fitted = KernelRegression(X, Y[:, :1], Setting("Gaussian", 0.5, 0.01))
    length = float(np.sqrt(X.shape[1] / 0.5))  # the squared distance is a mean over the inputs
    peer = process.GaussianProcessRegressor(kernels.RBF(length), alpha=0.01, optimizer=None).fit(X, Y[:, 0])
    mean, deviation = peer.predict(X[:5] + 0.3, return_std=True)
    np.testing.assert_allclose(fitted.mean(X[:5] + 0.3)[:, 0], mean, rtol=1e-6)
    own = fitted.deviation(X[:5] + 0.3)[:, 0] ** 2 / fitted._variance
    np.testing.assert_allclose(own, deviation**2 + 0.01, rtol=1e-5)


def test_shares_are_the_best_of_a_fine_grid():
    errors = RNG.normal(size=(3, 50)) + np.array([[0.5], [0.0], [-0.2]])
    shares = mixing_shares(errors)
    grid = [(a, b, 1 - a - b) for a, b in itertools.product(np.arange(0, 1.001, 0.01), repeat=2) if a + b <= 1]
    least = min(float(np.square(np.array(each) @ errors).sum()) for each in grid)
    assert shares.min() >= 0
    assert shares.sum() == pytest.approx(1)
    assert least * 0.995 < np.square(shares @ errors).sum() <= least


def test_shares_of_answers_alike_and_of_none_and_of_too_many():
    assert mixing_shares(np.zeros((2, 5))).sum() == pytest.approx(1)
    assert mixing_shares(np.ones((3, 5))).sum() == pytest.approx(1)
    assert mixing_shares([[1.0], [0.0]]).round(6).tolist() == [0.0, 1.0]
    for count in (0, 13):
        with pytest.raises(ConfigError, match=f"has {count} answers"):
            mixing_shares(np.zeros((count, 5)))


def test_a_stack_prefers_the_view_that_knows_and_mixes_two_that_know_half():
    x = RNG.normal(size=(120, 2))
    y = np.sin(x[:, 0]) + np.cos(x[:, 1])
    views = {"first": x[:, :1], "both": x, "noise": RNG.normal(size=(120, 2))}
    stack = KernelStack({name: view[:80] for name, view in views.items()}, y[:80], **GRID)
    assert stack.shares["both"] > 0.95
    mean, deviation = stack({name: view[80:] for name, view in views.items()})
    assert mean.shape == deviation.shape == (40,)
    assert np.square(mean - y[80:]).mean() < 0.05 * y.var()
    halves = KernelStack({"first": x[:80, :1], "second": x[:80, 1:]}, y[:80], **GRID)
    assert min(halves.shares.values()) > 0.2


def test_held_out_rows_choose_where_they_are_given():
    x = RNG.normal(size=(60, 1))
    y = np.tanh(x[:, 0])
    # Each training row twice with the same noise: left out alone, a row is known by its twin.
    noisy = y[:40] + RNG.normal(size=40)
    twice = {"x": np.concatenate([x[:40], x[:40]])}, np.concatenate([noisy, noisy])
    alone = KernelStack(*twice, widths=(0.1, 10.0), noises=(1e-3, 1.0))
    held = KernelStack(*twice, held_out=({"x": x[40:]}, y[40:]), widths=(0.1, 10.0), noises=(1e-3, 1.0))
    assert alone.settings["x"].noise < held.settings["x"].noise
    errors = [np.square(stack({"x": x[40:]}).mean - y[40:]).mean() for stack in (alone, held)]
    assert errors[1] < 0.5 * errors[0]


def test_intervals_hold_what_they_should():
    x = RNG.uniform(-2, 2, size=(400, 1))
    y = np.sin(2 * x[:, 0]) + 0.3 * RNG.normal(size=400)
    mean, deviation = KernelStack({"x": x[:150]}, 5 + 7 * y[:150], **GRID)({"x": x[150:]})
    inside = np.abs(mean - (5 + 7 * y[150:])) < 1.645 * deviation
    assert 0.84 < inside.mean() < 0.96


def test_outputs_of_several_columns_and_missing_inputs():
    table = np.where(RNG.random((40, 3)) < 0.1, np.nan, X.numpy())
    views = NumberViews(table)
    stack = KernelStack(views(table), Y.numpy(), **GRID)
    assert np.isfinite(stack(views(table)).mean).all()
    assert stack(views(np.full((2, 3), np.nan))).mean.shape == (2, 2)


def test_ranks_do_not_change_with_a_monotonic_scale():
    table = RNG.normal(size=(30, 2))
    first, second = NumberViews(table)(table[:5]), NumberViews(np.exp(table))(np.exp(table[:5]))
    np.testing.assert_allclose(first["ranks"], second["ranks"])
    assert list(first) == ["values", "ranks", "both"]
    assert first["both"].shape == (5, 4)  # nothing is missing, so there are no flags


def test_what_cannot_be_fitted_is_named():
    with pytest.raises(ConfigError, match="views"):
        KernelStack({}, [1.0])
    with pytest.raises(ConfigError, match="y: must be finite"):
        KernelStack({"x": [[0.0], [1.0]]}, [1.0, np.nan])
    with pytest.raises(ConfigError, match="noises"):
        KernelStack({"x": np.zeros((3, 1))}, [1.0, 2.0, 3.0], noises=(0.0,))
    with pytest.raises(ConfigError, match="errors: must be finite"):
        mixing_shares([[1.0, np.nan], [2.0, 3.0]])


def test_views_must_be_those_that_were_fitted():
    x, y = X.numpy(), Y[:, 0].numpy()
    stack = KernelStack({"x": x}, y, **GRID)
    with pytest.raises(ConfigError, match=r"views: 'x' has shape \(40, 1\), must be \(N, 3\)"):
        stack({"x": x[:, :1]})  # one column would fit each of three by broadcasting
    with pytest.raises(ConfigError, match=r"views: 'x' has shape \(3,\)"):
        stack({"x": x[0]})
    with pytest.raises(ConfigError, match="views: has no 'x'"):
        stack({"other": x})
    with pytest.raises(ConfigError, match=r"views: 'x' has shape \(30, 3\), must be \(40, F\)"):
        KernelStack({"x": x[:30]}, y, **GRID)
    with pytest.raises(ConfigError, match="y: has 1 row"):
        KernelStack({"x": x[:1]}, y[:1], **GRID)
    with pytest.raises(ConfigError, match="held_out: y must be finite"):
        KernelStack({"x": x}, y, held_out=({"x": x[:2]}, [0.0, np.nan]), **GRID)
    with pytest.raises(ConfigError, match=r"held_out: 'x' has shape \(3, 3\), must be \(2, 3\)"):
        KernelStack({"x": x}, y, held_out=({"x": x[:3]}, [0.0, 1.0]), **GRID)


def test_a_number_that_does_not_vary_is_known_and_does_not_change_the_others():
    constant, varying = KernelStack({"x": X}, np.ones(40), **GRID), KernelStack({"x": X}, Y[:, 0], **GRID)
    assert constant({"x": X}).mean == pytest.approx(1)
    assert np.abs(constant({"x": X}).deviation).max() < 1e-9
    both = KernelStack({"x": X}, np.stack([Y[:, 0], np.ones(40)], axis=1), **GRID)({"x": X[:3] + 0.1})
    np.testing.assert_allclose(both.deviation[:, 0], varying({"x": X[:3] + 0.1}).deviation)
