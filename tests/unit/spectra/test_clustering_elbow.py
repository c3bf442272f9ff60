"""Elbows: C24, the chord rule, and the criteria."""

from __future__ import annotations

import doctest
import importlib
import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle.spectra.clustering as clustering
from treadle.spectra.clustering import CosineKMeans, VMFMixture, elbow_ckmeans, elbow_vmf
from treadle.spectra.clustering.elbow import chord_elbow


def six_clusters(seed: int = 0, *, rotate: bool = True) -> torch.Tensor:
    """C24: six orthonormal centres in R^16, 200 rows each, row = normalise(centre + 0.075 N(0, I))."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q if rotate else torch.eye(16)
    rows = basis[:6].repeat_interleave(200, dim=0)
    rows = rows + 0.075 * torch.randn(1200, 16, generator=generator)
    return torch.nn.functional.normalize(rows, dim=1)


@pytest.mark.parametrize(("seed", "rotate"), [(0, False), (1, True), (2, True), (3, True)])
def test_c24_k_means(seed: int, rotate: bool) -> None:
    rows = six_clusters(seed, rotate=rotate)
    k_list, inertias, k, index, score = elbow_ckmeans(CosineKMeans, rows, "cpu", k_max=12)
    assert (k, index, k_list[index]) == (6, 5, 6)
    assert k_list == list(range(1, 13))
    assert len(inertias) == 12
    assert type(score) is float
    assert 0.5 < score < 1 - 5 / 11


@pytest.mark.parametrize(("seed", "rotate"), [(0, False), (1, True)])
def test_c24_vmf_bic(seed: int, rotate: bool) -> None:
    rows = six_clusters(seed, rotate=rotate)
    k_list, scores, k, index, score = elbow_vmf(VMFMixture, rows, "cpu", k_max=12)
    assert (k, index) == (6, 5)
    assert k_list == list(range(1, 13))
    assert min(scores) == scores[5]
    model = VMFMixture(6, device="cpu").fit(rows)
    assert scores[5] == pytest.approx(model.bic(rows))  # the curve is BIC itself, not its negative
    assert type(score) is float
    assert score == pytest.approx(1 - 5 / 11)


def test_vmf_nll_takes_the_elbow() -> None:
    rows = six_clusters()
    _, scores, k, index, score = elbow_vmf(VMFMixture, rows, "cpu", k_max=8, criterion="nll")
    assert (k, index) == (6, 5)
    assert scores[5] == pytest.approx(-VMFMixture(6, device="cpu").fit(rows).loglik(rows, average=True))
    assert type(score) is float


def test_random_state_and_chunk_reach_the_fits() -> None:
    rows = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = elbow_ckmeans(CosineKMeans, rows, "cpu", k_max=6, random_state=3)
    two = elbow_ckmeans(CosineKMeans, rows, "cpu", k_max=6, random_state=3, chunk=11)
    assert torch.equal(torch.get_rng_state(), before)
    assert one[1] == pytest.approx(two[1], abs=1e-9)
    assert one[2:4] == two[2:4]
    assert one[1][3] == CosineKMeans(4, device="cpu", random_state=3).fit(rows).inertia_


def test_k_max_is_checked_and_never_beyond_the_rows() -> None:
    rows = torch.eye(4)
    assert elbow_ckmeans(CosineKMeans, rows, "cpu")[0] == [1, 2, 3, 4]
    assert elbow_ckmeans(CosineKMeans, rows, "cpu", k_max=1)[2:] == (1, 0, 0.0)
    with pytest.raises(ValueError, match="k_max=0"):
        elbow_ckmeans(CosineKMeans, rows, "cpu", k_max=0)
    with pytest.raises(ValueError, match="criterion='aic'"):
        elbow_vmf(VMFMixture, rows, "cpu", criterion="aic")
    with pytest.raises(ValueError, match="row 0 is zero"):
        elbow_ckmeans(CosineKMeans, torch.zeros(4, 3), "cpu", k_max=2)


def test_verbose_logs_and_prints_nothing(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        elbow_ckmeans(CosineKMeans, torch.eye(4), "cpu", k_max=2)
        assert caplog.messages == []
        elbow_ckmeans(CosineKMeans, torch.eye(4), "cpu", k_max=2, verbose=True)
    assert [message[:3] for message in caplog.messages] == ["K=1", "K=2"]
    assert capsys.readouterr().out == ""


def test_chord_rule() -> None:
    assert chord_elbow([1, 2, 3], [1.0, 0.0, 0.0]) == (1, 0.5)
    assert chord_elbow([1, 2, 3, 4, 5], [10.0, 8.0, 2.0, 1.0, 0.0])[0] == 2
    # A rise is flattened: the third point counts as 2, not 5.
    index, score = chord_elbow([1, 2, 3, 4, 5], [10.0, 2.0, 5.0, 2.0, 0.0])
    assert (index, score) == (1, pytest.approx(1 - 0.25 - 0.2))
    assert chord_elbow([1, 2, 3], [1.0, 1.0, 1.0]) == (0, 0.0)
    assert chord_elbow([1, 2, 3], [1.0, 2.0, 3.0]) == (0, 0.0)
    assert chord_elbow([4], [1.0]) == (0, 0.0)


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0.1, 10.0), st.floats(-100, 100))
def test_chord_rule_properties(values: list[float], scale: float, shift: float) -> None:
    k_list = list(range(1, len(values) + 1))
    index, score = chord_elbow(k_list, values)
    assert 0 <= index < len(values)
    assert type(score) is float
    assert math.isfinite(score)
    assert 0.0 <= score <= 1.0
    if values[0] - min(values) > 1e-3:  # enough that rounding of the shifted curve does not matter
        moved = [scale * value + shift for value in values]
        assert chord_elbow(k_list, moved)[1] == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("name", ["elbow", "kmeans", "silhouette", "vmf"])
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"treadle.spectra.clustering.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


def test_public_names() -> None:
    assert clustering.__all__ == sorted(clustering.__all__)
    assert all(getattr(clustering, name).__doc__ for name in clustering.__all__)
