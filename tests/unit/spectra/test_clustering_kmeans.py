"""Cosine k-means: objective, seeding, empty clusters, blocks of rows, files."""

from __future__ import annotations

import os
import sys
import typing
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import ConfigError
from treadle.spectra.clustering import CosineKMeans, VMFMixture, silhouette_score_cosine
from treadle.spectra.clustering._rows import UnitRows
from treadle.spectra.clustering.kmeans import _farthest_rows

CPU = torch.device("cpu")


def blobs(*, k: int = 4, per: int = 50, d: int = 8, noise: float = 0.1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q[:k]
    rows = centres.repeat_interleave(per, dim=0)
    return rows + noise * torch.randn(len(rows), d, generator=generator)


def objective(rows: torch.Tensor, centroids: torch.Tensor) -> float:
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    return float((1 - (unit @ centroids.double().T).amax(dim=1)).mean())


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows[:, ::-1], lambda rows: rows.astype(">f4"), lambda rows: rows.T.copy().T,
        lambda rows: np.ma.masked_array(rows, mask=False),
    ],
)  # fmt: skip
def test_arrays_are_taken_in_any_layout_and_byte_order(view: Any) -> None:
    rows = view(blobs().numpy())
    labels = CosineKMeans(4, device="cpu").fit_predict(rows)
    assert torch.equal(labels, CosineKMeans(4, device="cpu").fit_predict(np.array(rows, dtype=np.float32, order="C")))
    score = silhouette_score_cosine(rows, labels.numpy()[::-1][::-1])
    assert score == silhouette_score_cosine(np.array(rows, dtype=np.float32, order="C"), labels)


def test_a_masked_number_is_no_number() -> None:
    rows = np.ma.masked_array(blobs().numpy())
    rows[3, 2] = np.ma.masked
    with pytest.raises(ValueError, match="row 3 holds NaN"):
        CosineKMeans(4, device="cpu").fit(rows)


def test_a_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for device in ("cuda", "gpu", "mps", 0, 1.5):
        if device == "mps" and torch.backends.mps.is_available():
            continue
        for build in (CosineKMeans, VMFMixture):
            with pytest.raises(ConfigError, match=f"device={device!r} is not .*available: cpu") as caught:
                build(2, device=device)
            assert len(str(caught.value)) < 200


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons forget overloads")
def test_a_type_checker_takes_a_flag_that_is_not_known_in_advance() -> None:
    taken = {overload.__annotations__["return_dist"] for overload in typing.get_overloads(CosineKMeans.predict)}
    assert taken == {"Literal[False]", "Literal[True]", "bool"}


def test_finds_the_groups() -> None:
    rows = blobs()
    labels = CosineKMeans(4, device="cpu").fit_predict(rows)
    assert labels.dtype == torch.int64
    groups = labels.reshape(4, 50)
    assert bool((groups == groups[:, :1]).all())
    assert len(set(groups[:, 0].tolist())) == 4


def test_centroids_are_unit_means_of_their_rows() -> None:
    rows = blobs()
    model = CosineKMeans(4, device="cpu", tol=0.0).fit(rows)
    unit = torch.nn.functional.normalize(rows, dim=1)
    labels = model.predict(rows)
    means = torch.stack([unit[labels == k].mean(dim=0) for k in range(4)])
    torch.testing.assert_close(model.centroids, torch.nn.functional.normalize(means, dim=1), rtol=0, atol=1e-6)
    assert model.centroids.shape == (4, 8)


@pytest.mark.parametrize("max_iter", [1, 2, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_inertia_belongs_to_the_returned_centroids(max_iter: int, dtype: torch.dtype) -> None:
    rows = blobs(noise=0.4).to(dtype)
    model = CosineKMeans(6, device="cpu", max_iter=max_iter).fit(rows)
    assert isinstance(model.inertia_, float)
    assert model.inertia_ == pytest.approx(objective(rows, model.centroids), abs=1e-7)
    assert model.centroids.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert model.n_iter_ <= max_iter


def test_more_iterations_never_raise_the_objective() -> None:
    rows = blobs(k=6, noise=0.5)
    values = [CosineKMeans(6, tol=0.0, max_iter=n, device="cpu").fit(rows.double()).inertia_ for n in range(1, 15)]
    assert all(after <= before + 1e-12 for before, after in pairwise(values))


def test_a_loose_tolerance_stops_early() -> None:
    rows = blobs(noise=0.6)
    loose = CosineKMeans(4, tol=1e6, device="cpu").fit(rows)
    assert loose.n_iter_ == 2


@pytest.mark.parametrize("chunk", [1, 7, 64, 199, 200, 10_000])
def test_chunk_does_not_change_results(chunk: int) -> None:
    rows = blobs(noise=0.4)
    whole = CosineKMeans(5, device="cpu").fit(rows)
    parts = CosineKMeans(5, device="cpu").fit(rows, chunk=chunk)
    torch.testing.assert_close(parts.centroids, whole.centroids, rtol=0, atol=1e-6)
    assert parts.inertia_ == pytest.approx(whole.inertia_, abs=1e-9)
    labels, distances = whole.predict(rows, return_dist=True)
    labels_parts, distances_parts = whole.predict(rows, return_dist=True, chunk=chunk)
    assert torch.equal(labels, labels_parts)
    torch.testing.assert_close(distances, distances_parts, rtol=0, atol=1e-6)


def test_predict_returns_distances_to_every_centroid() -> None:
    rows = blobs()
    model = CosineKMeans(4, device="cpu").fit(rows)
    labels, distances = model.predict(rows, return_dist=True)
    assert distances.shape == (200, 4)
    assert torch.equal(distances.argmin(dim=1), labels)
    unit = torch.nn.functional.normalize(rows, dim=1)
    torch.testing.assert_close(distances, 1 - unit @ model.centroids.T, rtol=0, atol=1e-6)


def test_random_state_decides_and_the_global_generators_are_untouched() -> None:
    rows = blobs(noise=0.8)
    torch.manual_seed(5)
    np.random.seed(5)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = CosineKMeans(7, max_iter=1, device="cpu", random_state=3).fit(rows)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(99)
    two = CosineKMeans(7, max_iter=1, device="cpu", random_state=3).fit(rows)
    three = CosineKMeans(7, max_iter=1, device="cpu", random_state=4).fit(rows)
    assert torch.equal(one.centroids, two.centroids)
    assert not torch.equal(one.centroids, three.centroids)
    assert torch.equal(one.fit(rows).centroids, two.centroids)  # a second fit starts afresh


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_only_directions_matter(scale: float) -> None:
    rows = blobs(noise=0.3)
    lengths = torch.linspace(0.5, 4.0, len(rows))[:, None]
    plain = CosineKMeans(4, device="cpu").fit(rows)
    scaled = CosineKMeans(4, device="cpu").fit(rows * lengths * scale)
    torch.testing.assert_close(scaled.centroids, plain.centroids, rtol=0, atol=1e-5)


def test_an_empty_cluster_takes_the_farthest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = blobs(k=3, per=20, noise=0.02)
    lone = torch.zeros(1, 8)
    lone[0] = -rows.mean(dim=0)  # away from every group
    rows = torch.cat([rows, lone])
    first = torch.nn.functional.normalize(rows[:1], dim=1).double()

    def same_seed_four_times(unit_rows, n_components, *, generator):
        return first.repeat(n_components, 1)

    monkeypatch.setattr("treadle.spectra.clustering.kmeans.kmeans_plus_plus", same_seed_four_times)
    model = CosineKMeans(4, device="cpu").fit(rows)
    labels = model.predict(rows)
    assert sorted(torch.bincount(labels, minlength=4).tolist()) == [1, 20, 20, 20]
    assert model.inertia_ < 0.01


def test_farthest_rows_ignores_the_empty_centroids() -> None:
    rows = UnitRows(torch.eye(3), device=CPU, chunk=2)
    centroids = torch.eye(3, dtype=torch.float64)[[0, 2, 2]]
    taken = _farthest_rows(rows, centroids, torch.tensor([False, True, True]))
    assert {int(row.argmax()) for row in taken} == {1, 2}


def test_fewer_distinct_rows_than_clusters() -> None:
    rows = torch.eye(4)[:2].repeat(10, 1)
    model = CosineKMeans(5, device="cpu").fit(rows)
    assert model.inertia_ == pytest.approx(0.0, abs=1e-9)
    assert bool(torch.isfinite(model.centroids).all())
    assert model.n_iter_ < 10


def test_opposite_rows_leave_a_centroid_in_place() -> None:
    model = CosineKMeans(1, device="cpu").fit(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert model.inertia_ == pytest.approx(1.0)
    assert float(model.centroids.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("chunk", [None, 2])
def test_rows_without_direction_are_refused(bad: float, chunk: int | None) -> None:
    rows = torch.ones(5, 3)
    rows[3] = bad
    with pytest.raises(ValueError, match="row 3"):
        CosineKMeans(2, device="cpu").fit(rows, chunk=chunk)
    model = CosineKMeans(1, device="cpu").fit(torch.ones(5, 3))
    with pytest.raises(ValueError, match="row 3"):
        model.predict(rows, chunk=chunk)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_components": 0}, "n_components=0"),
        ({"n_components": 2.0}, "n_components=2.0"),
        ({"tol": -1.0}, "tol=-1.0"),
        ({"tol": float("nan")}, "tol=nan"),
        ({"max_iter": 0}, "max_iter=0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CosineKMeans(**arguments)


def test_data_that_do_not_fit_are_refused() -> None:
    model = CosineKMeans(4, device="cpu")
    with pytest.raises(ValueError, match=r"n_components=4 .* N=3"):
        model.fit(torch.eye(3))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        model.fit(torch.ones(3))
    with pytest.raises(ValueError, match="chunk=0"):
        model.fit(torch.eye(5), chunk=0)
    with pytest.raises(ValueError, match="bool"):
        model.fit(torch.eye(5).bool())
    with pytest.raises(RuntimeError, match="fit"):
        model.predict(torch.eye(5))
    with pytest.raises(ValueError, match="4 features"):
        model.fit(torch.eye(5)).predict(torch.eye(4))


def test_arrays_and_integers_are_accepted() -> None:
    array = blobs().numpy()
    array.flags.writeable = False
    from_array = CosineKMeans(4, device="cpu").fit(array)
    assert torch.equal(from_array.centroids, CosineKMeans(4, device="cpu").fit(blobs()).centroids)
    assert CosineKMeans(2, device="cpu").fit(torch.eye(3).int()).centroids.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_centroids_round_trip(tmp_path, dtype: torch.dtype) -> None:
    rows = blobs().to(dtype)
    model = CosineKMeans(4, device="cpu").fit(rows)
    path = tmp_path / "centroids.pt"
    model.save_centroids(path)
    model.save_centroids(str(path))  # replaces
    assert os.listdir(tmp_path) == ["centroids.pt"]
    loaded = CosineKMeans(4, device="cpu").load_centroids(path)
    assert torch.equal(loaded.centroids, model.centroids)
    assert loaded.inertia_ == model.inertia_
    assert torch.equal(loaded.predict(rows), model.predict(rows))


def test_another_number_of_centroids_needs_strict_k_false(tmp_path) -> None:
    CosineKMeans(4, device="cpu").fit(blobs()).save_centroids(tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"n_components=3.*strict_k=False"):
        CosineKMeans(3, device="cpu").load_centroids(tmp_path / "c.pt")
    loaded = CosineKMeans(3, device="cpu").load_centroids(tmp_path / "c.pt", strict_k=False)
    assert loaded.n_components == 4


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CosineKMeans(4, device="cpu").fit(blobs())
    path = tmp_path / "c.pt"
    model.save_centroids(path)
    before = path.read_bytes()

    def fail(payload, stream) -> None:
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save_centroids(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["c.pt"]


def test_other_files_are_refused(tmp_path) -> None:
    torch.save({"centroids": torch.eye(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="CosineKMeans"):
        CosineKMeans(2, device="cpu").load_centroids(tmp_path / "other.pt")
    kind = "treadle.spectra.CosineKMeans"
    torch.save({"kind": kind, "centroids": torch.eye(2)}, tmp_path / "part.pt")
    with pytest.raises(ValueError, match="inertia"):
        CosineKMeans(2, device="cpu").load_centroids(tmp_path / "part.pt")
    torch.save({"kind": kind, "centroids": torch.ones(2), "inertia": 0.0}, tmp_path / "flat.pt")
    with pytest.raises(ValueError, match=r"\(K, D\)"):
        CosineKMeans(2, device="cpu").load_centroids(tmp_path / "flat.pt")


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 10_000), st.integers(1, 12))
def test_any_rows_give_a_sound_result(n: int, d: int, seed: int, chunk: int) -> None:
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    k = 1 + seed % n
    model = CosineKMeans(k, device="cpu", random_state=seed).fit(rows, chunk=chunk)
    assert model.inertia_ == pytest.approx(objective(rows, model.centroids), abs=1e-12)
    torch.testing.assert_close(model.centroids.norm(dim=1), torch.ones(k, dtype=torch.float64))
    if d > 1:
        assert torch.bincount(model.predict(rows), minlength=k).min() > 0  # distinct rows: none empty
