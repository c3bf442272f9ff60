"""Quantile bins and k-means: against their definitions, and the same every time."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from treadle.astro import kmeans_codebook, quantile_bins
from treadle.errors import ConfigError


def test_bins_hold_equally_many_values_and_their_centres_are_the_means():
    values = np.random.default_rng(0).lognormal(size=1000)
    edges, centers = quantile_bins(values, 10)
    bins = np.searchsorted(edges[1:-1], values, side="right")
    assert np.bincount(bins).tolist() == [100] * 10
    assert (edges[0], edges[-1]) == (values.min(), values.max())
    expected = [values[bins == number].mean() for number in range(10)]
    assert np.allclose(centers, expected, rtol=1e-12)
    assert (np.diff(centers) > 0).all()


def test_values_that_are_masked_are_left_out():
    masked = np.ma.masked_array([1, 2, 9999, 3], mask=[0, 0, 1, 0])
    for found, expected in zip(quantile_bins(masked, 3), quantile_bins([1.0, 2.0, 3.0], 3), strict=True):
        assert np.array_equal(found, expected)
    with pytest.raises(ConfigError, match="finite"):
        kmeans_codebook(np.ma.masked_array(np.eye(3), mask=np.eye(3)), 2)


def test_values_that_are_not_finite_are_left_out():
    values = np.array([[np.nan, 1.0, np.inf], [2.0, -np.inf, 3.0]])
    for found, expected in zip(quantile_bins(values, 3), quantile_bins([1.0, 2.0, 3.0], 3), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "values",
    [
        [5.0] * 7,
        [0.0] * 50 + [1.0, 2.0, 3.0],
        [1.0, 2.0],
        np.full(1000, 0.1) * np.random.default_rng(1).integers(1, 4, 1000),
        [-1e300, 1e300],
    ],
)
def test_ties_and_few_values_still_give_ascending_centres_inside_their_bins(values):
    edges, centers = quantile_bins(values, 8)
    assert edges.shape == (9,)
    assert np.isfinite(centers).all()
    assert (np.diff(centers) >= 0).all()
    assert ((edges[:-1] <= centers) & (centers <= edges[1:])).all()


def test_tensors_are_values_too():
    values = torch.arange(8, dtype=torch.bfloat16)
    assert quantile_bins(values, 4)[1].tolist() == [0.5, 2.5, 4.5, 6.5]


def test_bins_of_nothing_are_refused():
    with pytest.raises(ConfigError, match="none of the 2 values is finite"):
        quantile_bins([np.nan, np.inf], 2)
    with pytest.raises(ConfigError, match="n_bins=0"):
        quantile_bins([1.0], 0)
    with pytest.raises(ConfigError, match="must hold real numbers"):
        quantile_bins(["a"], 1)


def blobs():
    rng = np.random.default_rng(0)
    means = np.array([[0.0, 0.0, 0.0], [10.0, 0.0, 0.0], [0.0, 10.0, 0.0], [0.0, 0.0, 10.0]])
    return means, (means[:, None] + rng.normal(size=(4, 200, 3))).reshape(-1, 3)


def test_well_separated_clusters_are_found():
    means, points = blobs()
    codebook = kmeans_codebook(points, 4)
    assert codebook.dtype == np.float32
    distance = np.linalg.norm(codebook[:, None] - means, axis=-1)
    assert sorted(distance.argmin(axis=1).tolist()) == [0, 1, 2, 3]
    assert distance.min(axis=1).max() < 0.3


def test_every_centroid_is_the_mean_of_its_points():
    _, points = blobs()
    codebook = kmeans_codebook(points, 7, max_iter=300)
    nearest = np.linalg.norm(points[:, None] - codebook, axis=-1).argmin(axis=1)
    expected = np.stack([points[nearest == number].mean(axis=0) for number in range(7)])
    assert np.allclose(codebook, expected, atol=1e-3)


def test_the_same_seed_gives_the_same_bits_whatever_the_global_generators_do():
    _, points = blobs()
    first = kmeans_codebook(torch.tensor(points), 6, seed=3)
    np.random.seed(1)
    state = np.random.get_state()[1].copy()
    assert np.array_equal(kmeans_codebook(points, 6, seed=3), first)
    assert np.array_equal(np.random.get_state()[1], state)
    assert not np.array_equal(kmeans_codebook(points, 6, seed=4), first)


def test_as_many_centroids_as_vectors_are_the_vectors():
    points = np.array([[0.0], [1.0], [5.0]])
    assert sorted(kmeans_codebook(points, 3).ravel().tolist()) == [0.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        ([[0.0], [1.0]], 3, "k=3: must be at least 1 and at most the 2 vectors"),
        ([[0.0], [1.0]], 0, "k=0"),
        ([0.0, 1.0], 1, r"x of shape \(2,\)"),
        ([[0.0], [np.nan]], 1, "finite"),
    ],
)
def test_vectors_or_numbers_that_make_no_codebook_are_refused(x, k, message):
    with pytest.raises(ConfigError, match=message):
        kmeans_codebook(x, k)


def test_fewer_distinct_vectors_than_centroids_warn():
    with pytest.warns(UserWarning, match="distinct clusters"):
        assert kmeans_codebook([[1.0], [1.0], [2.0]], 3).shape == (3, 1)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match=r"treadle\[astro\]"):
        kmeans_codebook([[0.0]], 1)
