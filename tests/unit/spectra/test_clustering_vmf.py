"""Von Mises-Fisher mixtures: likelihood, parameters, blocks of rows, samples, files."""

from __future__ import annotations

import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.spectra.clustering import VMFMixture, vmf_bessel_ratio, vmf_log_normalizer


def blobs(*, k: int = 4, per: int = 60, d: int = 8, noise: float = 0.1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q[:k]
    rows = centres.repeat_interleave(per, dim=0)
    return rows + noise * torch.randn(len(rows), d, generator=generator)


def assert_never_falls(history: list[float]) -> None:
    for before, after in pairwise(history):
        assert after >= before - 1e-9 * max(1.0, abs(before))


@pytest.mark.parametrize("init", ["kmeans++", "random"])
@pytest.mark.parametrize(("k", "noise", "d"), [(1, 0.1, 8), (4, 0.1, 8), (9, 0.6, 8), (6, 0.003, 8), (5, 0.3, 64)])
def test_the_likelihood_never_falls(init: str, k: int, noise: float, d: int) -> None:
    rows = blobs(noise=noise, d=d)
    model = VMFMixture(k, device="cpu", tol=0.0, max_iter=60, init=init).fit(rows)
    assert len(model.loglik_history_) == model.n_iter_ >= 2
    assert_never_falls(model.loglik_history_)
    assert model.loglik(rows) >= model.loglik_history_[-1] - 1e-5 * abs(model.loglik_history_[-1])


@settings(max_examples=25)
@given(st.integers(1, 14), st.integers(2, 6), st.integers(0, 10_000), st.booleans())
def test_the_likelihood_never_falls_on_few_rows(n: int, d: int, seed: int, doubled: bool) -> None:
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = torch.cat([rows, rows]) if doubled else rows
    k = 1 + seed % len(rows)  # up to one component per row
    model = VMFMixture(k, device="cpu", tol=0.0, max_iter=15, random_state=seed).fit(rows)
    assert_never_falls(model.loglik_history_)
    for tensor in (model.mus, model.kappas, model.logpi):
        assert bool(torch.isfinite(tensor).all())
    assert float(model.logpi.exp().sum()) == pytest.approx(1.0)


def test_recovers_the_groups_and_their_parameters() -> None:
    rows = blobs(per=400)
    model = VMFMixture(4, device="cpu").fit(rows)
    labels = model.predict(rows).reshape(4, 400)
    assert bool((labels == labels[:, :1]).all())
    assert len(set(labels[:, 0].tolist())) == 4
    unit = torch.nn.functional.normalize(rows.double(), dim=1).reshape(4, 400, 8)
    for group, label in zip(unit, labels[:, 0].tolist(), strict=True):
        mean = group.mean(dim=0)
        length = float(mean.norm())
        torch.testing.assert_close(model.mus[label].double(), mean / length, rtol=0, atol=1e-4)
        assert float(vmf_bessel_ratio(8, model.kappas[label])) == pytest.approx(length, abs=1e-5)
        assert math.exp(float(model.logpi[label])) == pytest.approx(0.25, abs=1e-4)


def test_one_component_is_the_closed_estimate() -> None:
    rows = blobs(k=1).double()
    model = VMFMixture(1, device="cpu").fit(rows)
    mean = torch.nn.functional.normalize(rows, dim=1).mean(dim=0)
    assert float(vmf_bessel_ratio(8, model.kappas[0])) == pytest.approx(float(mean.norm()), abs=1e-10)
    expected = float(vmf_log_normalizer(8, model.kappas[0])) + float(model.kappas[0] * mean.norm())
    assert model.loglik(rows, average=True) == pytest.approx(expected, abs=1e-9)
    assert float(model.logpi[0]) == pytest.approx(0.0, abs=1e-12)


def test_log_likelihood_and_probabilities_agree_with_the_formula() -> None:
    rows = blobs(noise=0.5)
    model = VMFMixture(3, device="cpu").fit(rows)
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    joint = (
        model.logpi.double()
        + vmf_log_normalizer(8, model.kappas)
        + unit @ (model.kappas.double()[:, None] * torch.nn.functional.normalize(model.mus.double(), dim=1)).T
    )
    total = float(torch.logsumexp(joint, dim=1).sum())
    assert model.loglik(rows) == pytest.approx(total, abs=1e-6)
    assert model.loglik(rows, average=True) == pytest.approx(total / len(rows), abs=1e-8)
    torch.testing.assert_close(model.predict_proba(rows), torch.softmax(joint, dim=1).float(), rtol=0, atol=1e-6)
    assert torch.equal(model.predict(rows), joint.argmax(dim=1))
    assert model.bic(rows) == pytest.approx(-2 * total + (3 * 8 + 3 - 1) * math.log(len(rows)), abs=1e-5)
    assert isinstance(model.loglik(rows), float)
    assert isinstance(model.bic(rows), float)


@pytest.mark.parametrize("chunk", [1, 17, 239, 240, 10_000])
def test_chunk_does_not_change_results(chunk: int) -> None:
    rows = blobs(noise=0.4)
    whole = VMFMixture(4, device="cpu", max_iter=10).fit(rows)
    parts = VMFMixture(4, device="cpu", max_iter=10).fit(rows, chunk=chunk)
    torch.testing.assert_close(parts.mus, whole.mus, rtol=0, atol=1e-6)
    torch.testing.assert_close(parts.kappas, whole.kappas, rtol=1e-6, atol=0)
    torch.testing.assert_close(parts.logpi, whole.logpi, rtol=0, atol=1e-6)
    assert whole.loglik(rows, chunk=chunk) == pytest.approx(whole.loglik(rows), abs=1e-8)
    assert whole.bic(rows, chunk=chunk) == pytest.approx(whole.bic(rows), abs=1e-8)
    assert torch.equal(whole.predict(rows, chunk=chunk), whole.predict(rows))
    torch.testing.assert_close(whole.predict_proba(rows, chunk=chunk), whole.predict_proba(rows), rtol=0, atol=1e-6)


def test_random_state_decides_and_the_global_generators_are_untouched() -> None:
    rows = blobs(noise=0.8)
    torch.manual_seed(5)
    np.random.seed(5)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = VMFMixture(6, device="cpu", random_state=1, max_iter=3).fit(rows)
    draws = one.sample(20)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(99)
    two = VMFMixture(6, device="cpu", random_state=1, max_iter=3).fit(rows)
    three = VMFMixture(6, device="cpu", random_state=2, max_iter=3).fit(rows)
    assert torch.equal(one.mus, two.mus)
    assert torch.equal(draws, two.sample(20))
    assert not torch.equal(one.mus, three.mus)


def test_a_component_without_rows_keeps_its_place() -> None:
    rows = torch.eye(4)[:2].repeat(10, 1)  # two distinct rows, five components
    model = VMFMixture(5, device="cpu", tol=0.0, max_iter=20).fit(rows)
    assert_never_falls(model.loglik_history_)
    assert bool(torch.isfinite(model.mus).all())
    assert bool(torch.isfinite(model.logpi).all())
    assert float(model.predict_proba(rows).sum(dim=1).sub(1).abs().max()) < 1e-6
    assert len(set(model.predict(rows).tolist())) == 2


def test_a_component_of_one_row_does_not_run_to_the_bound() -> None:
    rows = torch.cat([blobs(k=1, noise=0.1), -blobs(k=1, per=1, noise=0.0)])
    model = VMFMixture(2, device="cpu").fit(rows)
    lone = int(model.predict(rows[-1:])[0])
    assert float(model.logpi[lone].exp()) == pytest.approx(1 / len(rows), rel=1e-3)
    assert float(model.kappas[lone]) < 1e3


def test_uniform_rows_give_a_small_kappa() -> None:
    rows = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0))
    assert float(VMFMixture(1, device="cpu").fit(rows).kappas[0]) < 0.3
    opposite = torch.cat([rows, -rows]).double()
    model = VMFMixture(1, device="cpu").fit(opposite)
    assert float(model.kappas[0]) == pytest.approx(0.0, abs=1e-10)
    assert model.loglik(opposite, average=True) == pytest.approx(float(vmf_log_normalizer(5, 0.0)))


@pytest.mark.parametrize(("d", "kappa"), [(2, 1.0), (2, 300.0), (3, 0.0), (3, 12.0), (16, 50.0), (64, 5e3)])
def test_samples_have_the_right_mean_and_spread(tmp_path, d: int, kappa: float) -> None:
    mu = torch.nn.functional.normalize(torch.arange(1.0, d + 1)[None], dim=1)
    seed_model = VMFMixture(1, device="cpu").fit(mu.repeat(3, 1))
    seed_model.save(tmp_path / "m.pt")
    payload = torch.load(tmp_path / "m.pt", weights_only=True)
    payload["kappas"] = torch.tensor([kappa])
    torch.save(payload, tmp_path / "m.pt")
    draws = VMFMixture.load(tmp_path / "m.pt", map_location="cpu").sample(20_000).double()
    assert draws.shape == (20_000, d)
    torch.testing.assert_close(draws.norm(dim=1), torch.ones(20_000, dtype=torch.float64), rtol=0, atol=1e-6)
    ratio = float(vmf_bessel_ratio(d, kappa))
    mean = draws.mean(dim=0)
    torch.testing.assert_close(mean, ratio * mu[0].double(), rtol=0, atol=0.025)
    cosine = draws @ mu[0].double()
    variance = 1 - ratio**2 - ((d - 1) * ratio / kappa if kappa > 0 else (d - 1) / d)
    assert float(cosine.mean()) == pytest.approx(ratio, abs=5 * math.sqrt(variance / 20_000) + 1e-6)
    assert float(cosine.var()) == pytest.approx(variance, rel=0.1)


def test_samples_come_from_every_component_and_fit_back() -> None:
    model = VMFMixture(4, device="cpu").fit(blobs(per=100))
    draws = model.sample(4000)
    assert draws.dtype == torch.float32
    counts = torch.bincount(model.predict(draws), minlength=4)
    assert int(counts.min()) > 800
    again = VMFMixture(4, device="cpu").fit(draws)
    nearest = (again.mus @ model.mus.T).max(dim=1)
    assert float(nearest.values.min()) > 0.999
    assert len(set(nearest.indices.tolist())) == 4
    torch.testing.assert_close(again.kappas, model.kappas[nearest.indices], rtol=0.1, atol=0)
    assert torch.equal(model.sample(7), model.sample(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixture_round_trip(tmp_path, dtype: torch.dtype) -> None:
    rows = blobs().to(dtype)
    model = VMFMixture(4, device="cpu", random_state=7, tol=1e-6, max_iter=50, init="random").fit(rows)
    model.save(tmp_path / "m.pt")
    assert os.listdir(tmp_path) == ["m.pt"]
    loaded = VMFMixture.load(tmp_path / "m.pt", map_location="cpu")
    for name in ("mus", "kappas", "logpi"):
        assert torch.equal(getattr(loaded, name), getattr(model, name))
        assert getattr(loaded, name).dtype == dtype
    for name in ("n_components", "d", "random_state", "tol", "max_iter", "init"):
        assert getattr(loaded, name) == getattr(model, name)
    assert loaded.loglik(rows) == model.loglik(rows)
    assert torch.equal(loaded.sample(5), model.sample(5))


def test_other_files_are_refused(tmp_path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="VMFMixture"):
        VMFMixture.load(tmp_path / "list.pt")
    torch.save({"kind": "treadle.spectra.VMFMixture"}, tmp_path / "part.pt")
    with pytest.raises(ValueError, match="lacks"):
        VMFMixture.load(tmp_path / "part.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_components": 0}, "n_components=0"),
        ({"d": 1}, "d=1"),
        ({"tol": -1.0}, "tol=-1.0"),
        ({"max_iter": 0}, "max_iter=0"),
        ({"init": "best"}, "init='best'"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VMFMixture(**{"n_components": 2, **arguments})


def test_data_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"n_components=4 .* N=3"):
        VMFMixture(4, device="cpu").fit(torch.eye(3))
    with pytest.raises(ValueError, match="d=5"):
        VMFMixture(2, d=5, device="cpu").fit(torch.eye(3))
    with pytest.raises(ValueError, match=r"1 feature"):
        VMFMixture(2, device="cpu").fit(torch.ones(3, 1))
    with pytest.raises(RuntimeError, match="fit"):
        VMFMixture(2, device="cpu").predict(torch.eye(3))
    with pytest.raises(RuntimeError, match="fit"):
        VMFMixture(2, device="cpu").sample(3)
    rows = torch.ones(4, 3)
    rows[2] = 0.0
    with pytest.raises(ValueError, match="row 2 is zero"):
        VMFMixture(2, device="cpu").fit(rows)
    model = VMFMixture(2, device="cpu").fit(blobs())
    with pytest.raises(ValueError, match="n=0"):
        model.sample(0)
    with pytest.raises(ValueError, match="3 features"):
        model.loglik(torch.eye(3))
