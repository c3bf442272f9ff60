"""Silhouettes against scikit-learn's `metric="cosine"`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import silhouette_samples, silhouette_score

from treadle.spectra.clustering import silhouette_samples_cosine, silhouette_score_cosine


def data(*, n: int = 150, d: int = 6, k: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(k, (n,), generator=generator)
    centres = torch.randn(k, d, generator=generator)
    return centres[labels] + 0.5 * torch.randn(n, d, generator=generator), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [None, 1, 40, 1000])
def test_equal_to_scikit_learn(dtype: torch.dtype, chunk: int | None) -> None:
    rows, labels = data()
    rows = rows.to(dtype)
    got = silhouette_samples_cosine(rows, labels, chunk=chunk)
    assert got.shape == (150,)
    assert got.dtype == dtype
    expected = silhouette_samples(rows.numpy(), labels.numpy(), metric="cosine")
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5, rtol=0)
    score = silhouette_score_cosine(rows, labels, chunk=chunk)
    assert type(score) is float
    assert score == pytest.approx(silhouette_score(rows.numpy(), labels.numpy(), metric="cosine"), abs=1e-5)


def test_labels_of_any_kind() -> None:
    rows, labels = data()
    expected = silhouette_samples_cosine(rows, labels)
    strange = torch.tensor([100, -7, 3, 12])[labels]
    assert torch.equal(silhouette_samples_cosine(rows, strange), expected)
    assert torch.equal(silhouette_samples_cosine(rows.numpy(), labels.tolist()), expected)
    assert torch.equal(silhouette_samples_cosine(rows, labels.numpy().astype(np.int32)), expected)


def test_a_row_alone_in_its_cluster_has_zero() -> None:
    rows, labels = data()
    labels[17] = 9
    got = silhouette_samples_cosine(rows, labels)
    assert float(got[17]) == 0.0
    expected = silhouette_samples(rows.numpy(), labels.numpy(), metric="cosine")
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5, rtol=0)


def test_rows_that_all_coincide_have_zero() -> None:
    rows = torch.tensor([[0.3, 0.1, 0.7]]).repeat(6, 1)
    assert silhouette_samples_cosine(rows, [0, 0, 0, 1, 1, 1]).tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 0, 0, 0], "1 clusters"),
        ([0, 1, 2, 3], "4 clusters"),
        ([0, 1, 1], r"\(3,\)"),
        ([0.0, 1.0, 1.0, 0.0], "integers"),
    ],
)
def test_labels_that_cannot_be_scored_are_refused(labels: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        silhouette_samples_cosine(torch.eye(4), labels)
    with pytest.raises(ValueError, match=message):
        silhouette_score_cosine(torch.eye(4), labels)


def test_zero_rows_are_refused() -> None:
    rows = torch.eye(4)
    rows[1] = 0.0
    with pytest.raises(ValueError, match="row 1 is zero"):
        silhouette_score_cosine(rows, [0, 0, 1, 1])


@settings(max_examples=25)
@given(st.integers(4, 30), st.integers(2, 5), st.integers(0, 10_000))
def test_any_labelling_equals_scikit_learn(n: int, d: int, seed: int) -> None:
    rows, labels = data(n=n, d=d, k=3, seed=seed)
    labels[:3] = torch.tensor([0, 0, 1])
    got = silhouette_samples_cosine(rows.double(), labels)
    assert float(got.abs().max()) <= 1.0
    expected = silhouette_samples(rows.double().numpy(), labels.numpy(), metric="cosine")
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5, rtol=0)
