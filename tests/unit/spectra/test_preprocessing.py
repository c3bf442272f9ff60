"""SNV scaling and farthest-point subsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treadle
from treadle.spectra.preprocessing import SNVScaler, cosine_fps_downsample, pretreatments

SPECTRA = Path(treadle.__path__[0]) / "datasets" / "spex_spectra.npz"


def rows(count: int = 7, length: int = 256, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(3.0, 2.0, (count, length))


def test_snv_numbers() -> None:
    Y = SNVScaler().transform(rows())
    assert np.linalg.norm(Y, axis=1) == pytest.approx(np.full(7, 15.968719), abs=1e-6)
    assert np.abs(Y.mean(axis=1)).max() < 1e-12
    assert SNVScaler().transform(np.array([1.0, 2.0, 3.0])) == pytest.approx([-1, 0, 1], abs=1e-6)
    assert SNVScaler().transform(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1, 0, 1], abs=1e-6)


def test_spectra_so_faint_that_eps_would_scale_them_are_named(caplog: pytest.LogCaptureFixture) -> None:
    faint = rows(2) * 1e-17
    with caplog.at_level("WARNING", "treadle.spectra"):
        SNVScaler().transform(np.vstack([rows(2), np.ones((1, 256))]))
        SNVScaler(eps=0.0).transform(faint)
        assert caplog.messages == []
        Y = SNVScaler().transform(faint)
    assert np.linalg.norm(Y, axis=1).max() < 0.01  # as the formula says
    (line,) = caplog.messages
    assert "2 of 2 rows" in line
    assert "eps=1e-12" in line
    assert SNVScaler(eps=0.0).transform(faint) == pytest.approx(SNVScaler().transform(rows(2)), abs=1e-9)


def test_a_masked_number_is_no_number() -> None:
    X = np.ma.masked_array([[1.0, 2.0, 3.0], [1.0, 2.0, 9999.0]], mask=[[0, 0, 0], [0, 0, 1]])
    Y = SNVScaler().transform(X)
    assert Y[0].tolist() == pytest.approx([-1, 0, 1])
    assert np.isnan(np.asarray(Y[1])).all()
    with pytest.raises(ValueError, match="NaN"):
        cosine_fps_downsample(X)


def test_snv_of_the_shipped_spectra() -> None:
    with np.load(SPECTRA) as data:
        X = data["X"]
    Y = SNVScaler().transform(X)
    assert Y.dtype == np.float16
    assert Y.shape == X.shape == (1939, 256)
    norms = np.linalg.norm(SNVScaler().transform(X.astype(np.float32)), axis=1)
    assert norms == pytest.approx(np.full(1939, 15.968719), rel=1e-6)
    assert np.linalg.norm(Y.astype(np.float64), axis=1) == pytest.approx(np.full(1939, 15.968719), rel=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", ">f8"])
def test_snv_keeps_numpy_dtypes(dtype: str) -> None:
    X = rows().astype(dtype)
    before = X.copy()
    Y, mu, sd = SNVScaler(transform_stats=True).transform(X)
    assert isinstance(Y, np.ndarray)
    assert Y.dtype == mu.dtype == sd.dtype == X.dtype
    assert (mu.shape, sd.shape) == ((7, 1), (7, 1))
    assert np.array_equal(X, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_snv_keeps_tensor_dtypes(dtype: torch.dtype) -> None:
    X = torch.from_numpy(rows()).to(dtype)
    Y, mu, sd = SNVScaler(transform_stats=True).transform(X)
    assert Y.dtype == mu.dtype == sd.dtype == dtype
    assert (Y.shape, mu.shape, sd.shape) == ((7, 256), (7, 1), (7, 1))
    assert Y.device == X.device


def test_snv_turns_integers_into_float32() -> None:
    assert SNVScaler().transform(np.arange(6).reshape(2, 3)).dtype == np.float32
    assert SNVScaler().transform(np.arange(6, dtype=np.uint16).reshape(2, 3)).dtype == np.float32
    Y = SNVScaler().transform(torch.arange(6).reshape(2, 3))
    assert Y.dtype == torch.float32
    assert Y.tolist() == [[-1.0, 0.0, 1.0]] * 2


def test_snv_computes_in_float64() -> None:
    # In float32 the spread of 1 around 1e8 is lost altogether; these values are exact in float64.
    X = np.array([[1e8, 1e8 + 1, 1e8 + 2]])
    assert SNVScaler().transform(X)[0] == pytest.approx([-1, 0, 1], abs=1e-6)
    # The sum of squares of these overflows float16.
    half = np.array([[-60000, 0, 60000]], dtype=np.float16)
    assert SNVScaler().transform(half)[0].tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("eps", [1e-12, 0.0])
def test_snv_constant_rows_become_zeros(eps: float) -> None:
    # The mean of 256 times 0.1 differs from 0.1 in the last place, which eps would turn into 1e-5.
    X = np.full((2, 256), 0.1)
    X[1] = np.arange(256)
    Y, mu, sd = SNVScaler(eps=eps, transform_stats=True).transform(X)
    assert np.array_equal(Y[0], np.zeros(256))
    assert np.abs(Y[1]).max() > 1
    assert sd[0, 0] == eps
    assert np.array_equal(SNVScaler().inverse_transform(Y, mu=mu, sd=sd)[0], X[0])
    assert SNVScaler(eps=eps).transform(np.array([5.0])).tolist() == [0.0]
    assert SNVScaler(eps=eps).transform(np.array([[5.0], [7.0]])).tolist() == [[0.0], [0.0]]


def test_snv_nan_stays_in_its_row() -> None:
    X = rows(3)
    X[1, 5] = np.nan
    Y = SNVScaler().transform(X)
    assert np.isnan(Y[1]).all()
    assert np.isfinite(Y[[0, 2]]).all()


def test_snv_statistics_and_round_trip() -> None:
    X = rows()
    scaler = SNVScaler(eps=1e-3, transform_stats=True)
    Y, mu, sd = scaler.transform(X)
    assert mu[:, 0] == pytest.approx(X.mean(axis=1))
    assert sd[:, 0] == pytest.approx(X.std(axis=1, ddof=1) + 1e-3)
    assert np.allclose(Y, (X - mu) / sd, rtol=1e-12)
    assert scaler.inverse_transform(Y, mu=mu, sd=sd) == pytest.approx(X, abs=1e-12)
    assert scaler.inverse_transform(Y, mu=mu[:, 0], sd=sd[:, 0]) == pytest.approx(X, abs=1e-12)
    tensor = scaler.inverse_transform(torch.from_numpy(Y).float(), mu=mu, sd=sd)
    assert tensor.dtype == torch.float32
    assert tensor.numpy() == pytest.approx(X, abs=1e-5)
    y, m, s = scaler.transform(X[0])
    assert (y.shape, m.shape, s.shape) == ((256,), (), ())
    assert scaler.inverse_transform(y, mu=m, sd=s) == pytest.approx(X[0], abs=1e-12)


def test_snv_square_input_is_undone_by_row() -> None:
    # With N = L, statistics of shape (N,) would broadcast along the channels without a complaint.
    X = rows(5, 5)
    Y, mu, sd = SNVScaler(transform_stats=True).transform(X)
    assert SNVScaler().inverse_transform(Y, mu=mu.ravel(), sd=sd.ravel()) == pytest.approx(X)


def test_snv_copy_false_writes_into_a_floating_input() -> None:
    X = rows()
    expected = SNVScaler().transform(X)
    assert SNVScaler(copy=False).transform(X) is X
    assert np.array_equal(X, expected)
    tensor = torch.from_numpy(rows())
    assert SNVScaler(copy=False).transform(tensor) is tensor
    assert np.array_equal(tensor.numpy(), expected)
    integers = np.arange(6).reshape(2, 3)
    assert SNVScaler(copy=False).transform(integers).dtype == np.float32
    assert integers.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_snv_takes_read_only_and_strided_memory() -> None:
    X = rows()
    X.flags.writeable = False
    assert np.isfinite(SNVScaler().transform(X)).all()
    assert np.array_equal(SNVScaler().transform(X[::-1, ::2]), SNVScaler().transform(X[::-1, ::2].copy()))


def test_snv_fit_returns_self_and_fit_transform_works() -> None:
    scaler = SNVScaler()
    assert scaler.fit(rows()) is scaler
    assert np.array_equal(scaler.fit_transform(rows()), scaler.transform(rows()))
    assert scaler.transform(np.zeros((0, 4))).shape == (0, 4)


@pytest.mark.parametrize(
    ("X", "error", "match"),
    [
        ([[1.0, 2.0]], TypeError, r"X is a list but must be a NumPy array or a tensor"),
        (np.zeros((2, 2, 2)), ValueError, r"X has shape \(2, 2, 2\) but must be \(L,\) or \(N, L\)"),
        (np.float64(1.0) * np.ones(()), TypeError, r"X is a float64"),
        (torch.zeros(()), ValueError, r"X has shape \(\)"),
        (np.zeros((2, 0)), ValueError, r"X has shape \(2, 0\)"),
        (np.zeros((2, 2), complex), ValueError, r"X has dtype complex128 but must hold real numbers"),
        (torch.zeros(2, 2, dtype=torch.complex64), ValueError, r"X has dtype torch.complex64"),
        (np.array([["a", "b"]]), ValueError, r"must hold real numbers"),
    ],
)
def test_snv_faults_are_named(X: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SNVScaler().transform(X)


def test_snv_bad_eps_and_bad_statistics_are_named() -> None:
    for eps in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"eps=.* must be at least 0"):
            SNVScaler(eps=eps)
    with pytest.raises(ValueError, match=r"mu has shape \(3,\).*each row of Y, whose shape is \(7, 256\)"):
        SNVScaler().inverse_transform(rows(), mu=np.zeros(3), sd=np.ones(7))
    with pytest.raises(ValueError, match=r"sd has shape \(1, 7\)"):
        SNVScaler().inverse_transform(rows(), mu=np.zeros(7), sd=np.ones((1, 7)))


def plain_fps(X: np.ndarray[Any, Any], count: int, first: int) -> list[int]:
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    distance = 1 - unit @ unit.T
    chosen = [first]
    while len(chosen) < count:
        nearest = distance[:, chosen].min(axis=1)
        nearest[chosen] = -np.inf
        chosen.append(int(nearest.argmax()))
    return chosen


@pytest.mark.parametrize(
    ("n", "ratio", "k"),
    [(25, 0.1, 2), (35, 0.1, 4), (25, 1e-9, 1), (25, 1.0, 25), (25, 7.0, 25), (1, 0.5, 1)],
)
def test_fps_count(n: int, ratio: float, k: int) -> None:
    chosen, indices = cosine_fps_downsample(rows(n, 6), ratio=ratio, seed=0, return_indices=True)
    assert chosen.shape == (k, 6)
    assert len(set(indices.tolist())) == k


def test_fps_equals_the_plain_construction_and_keeps_the_scale() -> None:
    X = rows(60, 12) * np.random.default_rng(1).uniform(0.1, 10, (60, 1))
    chosen, indices = cosine_fps_downsample(X, ratio=0.5, init_index=17, return_indices=True)
    assert indices.tolist() == plain_fps(X, 30, 17)
    assert np.array_equal(chosen, X[indices])
    assert np.array_equal(cosine_fps_downsample(X, ratio=0.5, init_index=17), chosen)


def test_fps_spreads_wider_than_a_random_choice_of_real_spectra() -> None:
    with np.load(SPECTRA) as data:
        X = SNVScaler().transform(data["X"].astype(np.float64))
    chosen = cosine_fps_downsample(X, ratio=0.02, seed=0)

    def spread(Z: np.ndarray[Any, Any]) -> float:
        unit = Z / np.linalg.norm(Z, axis=1, keepdims=True)
        distance = 1 - unit @ unit.T
        return float(distance[~np.eye(len(Z), dtype=bool)].min())

    random = X[np.random.default_rng(0).choice(len(X), len(chosen), replace=False)]
    assert len(chosen) == 39
    assert spread(chosen) > 10 * spread(random)


def test_fps_indices_are_distinct_even_among_copies_and_zero_rows() -> None:
    X = np.zeros((8, 3))
    X[:4, 0] = 1.0
    indices = cosine_fps_downsample(X, ratio=1.0, seed=1, return_indices=True)[1]
    assert sorted(indices.tolist()) == list(range(8))


def test_fps_randomness() -> None:
    X = rows(40, 5)

    def first(seed: int | None) -> int:
        return int(cosine_fps_downsample(X, seed=seed, return_indices=True)[1][0])

    before = torch.get_rng_state()
    assert first(3) == first(3)
    assert len({first(seed) for seed in range(20)}) > 5
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)
    drawn = [first(None) for _ in range(10)]
    torch.manual_seed(0)
    assert [first(None) for _ in range(10)] == drawn
    assert len(set(drawn)) > 2


def test_fps_containers() -> None:
    X = rows(30, 5).astype(np.float32)
    as_array, array_indices = cosine_fps_downsample(X, init_index=2, return_indices=True)
    assert isinstance(as_array, np.ndarray)
    assert as_array.dtype == np.float32
    assert array_indices.dtype == np.int64
    tensor, indices = cosine_fps_downsample(torch.from_numpy(X), init_index=2, return_indices=True, return_numpy=False)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.float32
    assert indices.tolist() == array_indices.tolist()
    assert isinstance(cosine_fps_downsample(torch.from_numpy(X), init_index=2), np.ndarray)
    from_big_endian = cosine_fps_downsample(X.astype(">f4"), init_index=2, return_numpy=False)
    assert torch.equal(from_big_endian, tensor)
    assert cosine_fps_downsample(torch.from_numpy(X).bfloat16(), init_index=2).dtype == np.float32


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ratio": 0.0}, r"ratio=0.0: must lie in"),
        ({"ratio": -0.1}, r"ratio=-0.1: must lie in"),
        ({"ratio": float("nan")}, r"ratio=nan: must lie in"),
        ({"ratio": float("inf")}, r"ratio=inf: must lie in"),
        ({"init_index": 5}, r"init_index=5 must lie between 0 and 4"),
        ({"init_index": -1}, r"init_index=-1 must lie between 0 and 4"),
    ],
)
def test_fps_bad_numbers_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        cosine_fps_downsample(rows(5, 4), **options)


def test_fps_bad_input_is_named() -> None:
    for bad in (np.nan, np.inf):
        X = rows(5, 4)
        X[3, 1] = bad
        with pytest.raises(ValueError, match=r"X holds NaN or infinity"):
            cosine_fps_downsample(X)
    with pytest.raises(ValueError, match=r"X has shape \(4,\) but must be \(N, L\)"):
        cosine_fps_downsample(rows(5, 4)[0])
    with pytest.raises(ValueError, match=r"X has shape \(0, 4\)"):
        cosine_fps_downsample(rows(0, 4))
    with pytest.raises(TypeError, match=r"X is a list"):
        cosine_fps_downsample([[1.0, 2.0]])  # type: ignore[arg-type]


def test_pretreatments_are_derivatives_and_snv_in_both_orders() -> None:
    views = pretreatments(rows())
    np.testing.assert_array_equal(views["snv"], SNVScaler().transform(rows()))
    np.testing.assert_allclose(views["first of snv"][:, 1:-1], (views["snv"][:, 2:] - views["snv"][:, :-2]) / 2)
    np.testing.assert_allclose(views["second of snv"], np.gradient(views["first of snv"], axis=1))
    # A slope and an offset leave the second derivative alone, and a factor its SNV.
    tilted = 3 * rows() + np.linspace(-5, 2, 256) + 7
    np.testing.assert_allclose(pretreatments(tilted)["snv of second"], views["snv of second"], atol=1e-9)
    assert abs(pretreatments(tilted)["snv"] - views["snv"]).max() > 0.1
