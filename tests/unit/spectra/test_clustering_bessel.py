"""The normalizing constant, the Bessel ratio and the concentration estimate against tables and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ive

from treadle.spectra.clustering import vmf_bessel_ratio, vmf_log_normalizer
from treadle.spectra.clustering.bessel import kappa_from_mean_length

KAPPAS = (0.0, 0.1, 1.0, 12.0, 100.0, 1000.0)
TABLE = {
    2: (-1.837877, -1.840376, -2.073791, -11.687380, -98.617610, -997.46519),
    3: (-2.531024, -2.532690, -2.692464, -11.352970, -97.232707, -994.93012),
    16: (-1.325825, -1.326137, -1.357021, -5.090241, -79.000422, -961.95153),
    64: (40.767720, 40.767642, 40.759908, 39.661098, -8.040765, -839.81826),
}


def reference_log_bessel(nu: float, x: float) -> float:
    """log I_nu(x) from scipy, or from the power series in logarithms where scipy underflows."""
    scaled = float(ive(nu, x))
    if scaled > 1e-280:
        return math.log(scaled) + x
    terms = [(2 * k + nu) * math.log(x / 2) - math.lgamma(k + 1) - math.lgamma(nu + k + 1) for k in range(2000)]
    top = max(terms)
    return top + math.log(math.fsum(math.exp(term - top) for term in terms))


def reference_log_normalizer(d: int, kappa: float) -> float:
    nu = d / 2 - 1
    if kappa == 0.0:
        return math.lgamma(d / 2) - math.log(2) - d / 2 * math.log(math.pi)
    return nu * math.log(kappa) - (nu + 1) * math.log(2 * math.pi) - reference_log_bessel(nu, kappa)


@pytest.mark.parametrize("d", sorted(TABLE))
def test_log_normalizer_matches_the_table(d: int) -> None:
    got = vmf_log_normalizer(d, torch.tensor(KAPPAS, dtype=torch.float64))
    assert got.tolist() == pytest.approx(TABLE[d], abs=6e-6)
    assert got.tolist() == pytest.approx(TABLE[d], rel=1e-6)


def test_c23() -> None:
    assert float(vmf_log_normalizer(64, 12)) == pytest.approx(39.661098, abs=1e-6)
    assert float(vmf_log_normalizer(64, 100.0)) == pytest.approx(-8.040765, abs=1e-6)
    assert float(vmf_log_normalizer(3, 1.0)) == pytest.approx(-2.692464, abs=1e-6)


@pytest.mark.parametrize("d", [2, 3, 4, 5, 7, 8, 16, 31, 64, 100, 128, 200, 256, 333, 511, 512])
def test_log_normalizer_within_1e_5_of_the_reference(d: int) -> None:
    kappas = [0.0, *np.logspace(-4, 4, 33).tolist()]
    got = vmf_log_normalizer(d, torch.tensor(kappas, dtype=torch.float64)).tolist()
    assert got == pytest.approx([reference_log_normalizer(d, kappa) for kappa in kappas], rel=1e-9)


@settings(max_examples=60)
@given(st.integers(2, 512), st.floats(0.0, 1e4))
def test_log_normalizer_anywhere_in_the_range(d: int, kappa: float) -> None:
    # A kappa below 1e-6 cannot change the result in float64, but its logarithm spoils the reference.
    expected = reference_log_normalizer(d, kappa if kappa > 1e-6 else 0.0)
    assert float(vmf_log_normalizer(d, kappa)) == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_log_normalizer_has_no_seam() -> None:
    kappa = torch.linspace(0.0, 60.0, 6001, dtype=torch.float64)
    for d in (2, 3, 16, 64, 512):
        curve = vmf_log_normalizer(d, kappa)
        assert bool((curve.diff() < 1e-13 * curve[0].abs()).all())  # d/dkappa log C = -ratio <= 0
        slope = (curve[2:] - curve[:-2]) / (kappa[2:] - kappa[:-2])
        torch.testing.assert_close(-slope, vmf_bessel_ratio(d, kappa)[1:-1], rtol=0, atol=2e-5)


def test_ratio_matches_the_numbers() -> None:
    kappa = torch.tensor([1.0, 12.0, 100.0])
    assert vmf_bessel_ratio(3, kappa).tolist() == pytest.approx([0.31303529, 0.91666667, 0.99], abs=1e-8)
    assert vmf_bessel_ratio(64, kappa).tolist() == pytest.approx([0.015621303, 0.18149954, 0.73238019], abs=1e-8)


@pytest.mark.parametrize("d", [2, 3, 6, 17, 64, 200, 512])
def test_ratio_matches_scipy(d: int) -> None:
    nu = d / 2 - 1
    kappas = [k for k in np.logspace(-3, 4, 29).tolist() if ive(nu + 1, k) > 1e-280]
    got = vmf_bessel_ratio(d, torch.tensor(kappas, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(got, ive(nu + 1, kappas) / ive(nu, kappas), rtol=1e-11)
    assert float(vmf_bessel_ratio(d, 0.0)) == 0.0


def test_ratio_in_three_dimensions_is_the_langevin_function() -> None:
    kappa = torch.logspace(0, 8, 33, dtype=torch.float64)
    expected = 1 / torch.tanh(kappa) - 1 / kappa
    torch.testing.assert_close(vmf_bessel_ratio(3, kappa), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("function", [vmf_log_normalizer, vmf_bessel_ratio])
def test_shapes_and_dtypes(function) -> None:
    assert function(8, 3.0).shape == ()
    assert function(8, 3.0).dtype == torch.float64
    assert function(8, torch.ones(2, 3)).shape == (2, 3)
    assert function(8, torch.ones(2, 3)).dtype == torch.float64
    assert float(function(8, torch.tensor(3))) == float(function(8, 3.0))


@pytest.mark.parametrize("function", [vmf_log_normalizer, vmf_bessel_ratio])
@pytest.mark.parametrize(("d", "kappa"), [(1, 1.0), (2.5, 1.0), (8, -1.0), (8, math.nan), (8, math.inf)])
def test_arguments_out_of_range_are_refused(function, d, kappa) -> None:
    with pytest.raises(ValueError, match=r"^(d|kappa)="):
        function(d, kappa)


@pytest.mark.parametrize("d", [2, 3, 16, 64, 512])
def test_kappa_makes_the_ratio_equal_to_the_mean_length(d: int) -> None:
    length = torch.tensor([0.0, 1e-6, 0.01, 0.3, 0.7, 0.95, 0.999, 0.99999, 1.0], dtype=torch.float64)
    kappa = kappa_from_mean_length(d, length)
    assert bool(torch.isfinite(kappa).all())
    torch.testing.assert_close(vmf_bessel_ratio(d, kappa), length, rtol=0, atol=1.0001e-6)
    torch.testing.assert_close(vmf_bessel_ratio(d, kappa[:-1]), length[:-1], rtol=0, atol=1e-12)


def test_kappa_is_refined_beyond_its_start() -> None:
    length = vmf_bessel_ratio(3, torch.tensor([12.0]))
    start = length * (3 - length**2) / (1 - length**2)
    assert float(start) == pytest.approx(12.3949, abs=1e-4)
    assert float(kappa_from_mean_length(3, length)) == pytest.approx(12.0, abs=1e-9)


@settings(max_examples=40)
@given(st.integers(2, 512), st.floats(1e-3, 1e4))
def test_kappa_comes_back(d: int, kappa: float) -> None:
    length = vmf_bessel_ratio(d, torch.tensor([kappa], dtype=torch.float64))
    assert float(kappa_from_mean_length(d, length)) == pytest.approx(kappa, rel=1e-8)
