"""Modified Bessel functions I_nu for the von Mises-Fisher distribution, in float64 on the CPU.

One formula covers every order and argument, so there is no threshold between regimes. The order is raised by `_RAISE`,
where the uniform (Debye) expansion is exact to rounding: its terms shrink like 1/sqrt(nu^2 + x^2), for x = 0 as for x =
1e8. The Gauss continued fraction then leads back down to the requested order; all its terms are positive, so nothing
cancels. Formulas: DLMF 10.41.3 and 10.41.9 (expansion), 10.33.1 (fraction), 10.29.2 (slope).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

_RAISE = 16  # orders added before the expansion is used: nu^2 + x^2 >= 256
_TERMS = 12  # terms of the expansion; the first omitted one is below 1e-13 there
_TINY = 1e-300


def log_normalizer(d: int, kappa: Tensor) -> Tensor:
    """Return the log of the normaliser C(d, kappa) of the von Mises-Fisher density, elementwise."""
    return -(d / 2) * math.log(2 * math.pi) - log_scaled_bessel(d / 2 - 1, kappa)


def log_scaled_bessel(nu: float, x: Tensor) -> Tensor:
    """Return log(x^-nu I_nu(x)), elementwise; finite at x = 0, where it is -nu log 2 - log Gamma(nu + 1)."""
    top = nu + _RAISE
    radius = torch.sqrt(x * x + top * top)
    value = radius - top * torch.log(top + radius) - 0.5 * torch.log(2 * math.pi * radius)
    value = value + torch.log(_debye_sum(top, radius))
    ratio = _ratio_by_expansion(top, x)
    for step in range(_RAISE, 0, -1):  # x^-(m-1) I_{m-1} = (2m + x I_{m+1}/I_m) x^-m I_m
        denominator = 2 * (nu + step) + x * ratio
        value = value + torch.log(denominator)
        ratio = x / denominator
    return value


def bessel_ratio(nu: float, x: Tensor) -> Tensor:
    """Return I_{nu+1}(x) / I_nu(x), elementwise, between 0 (at x = 0) and 1."""
    ratio = _ratio_by_expansion(nu + _RAISE, x)
    for step in range(_RAISE, 0, -1):
        ratio = x / (2 * (nu + step) + x * ratio)
    return ratio


def bessel_ratio_slope(d: int, x: Tensor, ratio: Tensor) -> Tensor:
    """Return the derivative of A(x) = I_{d/2}(x) / I_{d/2-1}(x): 1 - A^2 - (d-1) A / x (1/d at x = 0)."""
    slope = 1 - ratio * ratio - (d - 1) * ratio / x.clamp(min=_TINY)
    slope = torch.where(x > 0, slope, torch.full_like(x, 1 / d))
    # The difference above loses digits like x^2; its own expansion takes over long before that matters.
    large = x.clamp(min=1.0)
    far = (d - 1) / (2 * large**2) * (1 - (d - 3) / (2 * large))
    return torch.where(x > 1e4 * d, far, slope)


def kappa_from_mean_length(d: int, length: Tensor) -> Tensor:
    """Return kappa with I_{d/2}(kappa) / I_{d/2-1}(kappa) = R for mean lengths R in [0, 1], elementwise.

    Starts from R (d - R^2) / (1 - R^2) (Banerjee et al. 2005) and takes Newton steps until kappa converges, far beyond
    |ratio - R| <= 1e-6: an imprecise kappa would let the likelihood decrease when kappa is large. R = 1 has no finite
    solution; kappa stops at (d - 1) / 2 * 1e6, where the ratio is within 1e-6 of 1.
    """
    cap = 0.5e6 * (d - 1)
    length = length.to("cpu", torch.float64).clamp(0.0, 1.0)
    kappa = (length * (d - length**2) / (1 - length**2).clamp(min=_TINY)).clamp(max=cap)
    for _ in range(50):
        ratio = bessel_ratio(d / 2 - 1, kappa)
        newton = kappa - (ratio - length) / bessel_ratio_slope(d, kappa, ratio)
        moved = newton.clamp(min=kappa / 2, max=kappa * 2).clamp(max=cap)
        # Rounding of the ratio alone changes kappa by about 2 kappa^2 eps / (d - 1).
        settled = (moved - kappa).abs() <= kappa * (1e-11 + 2e-15 * kappa / (d - 1))
        kappa = moved
        if bool(settled.all()):
            break
    return kappa


def _ratio_by_expansion(nu: float, x: Tensor) -> Tensor:
    """Return I_{nu+1}(x) / I_nu(x) from the quotient of two expansions, written without large differences."""
    low = torch.sqrt(x * x + nu * nu)
    high = torch.sqrt(x * x + (nu + 1) * (nu + 1))
    rise = (2 * nu + 1) / (high + low)  # high - low
    exponent = rise - nu * torch.log1p((1 + rise) / (nu + low)) - 0.25 * torch.log1p((2 * nu + 1) / low**2)
    return x / (nu + 1 + high) * torch.exp(exponent) * _debye_sum(nu + 1, high) / _debye_sum(nu, low)


def _debye_sum(nu: float, radius: Tensor) -> Tensor:
    """Return sum_k U_k(p) / nu^k with p = nu / radius, radius = sqrt(nu^2 + x^2)."""
    table = _debye_polynomials()
    powers = torch.arange(_TERMS + 1, dtype=torch.float64, device="cpu")
    polynomials = (nu / radius).unsqueeze(-1) ** (2 * powers) @ table.T
    return (polynomials * (1 / radius).unsqueeze(-1) ** powers).sum(dim=-1)


@lru_cache(maxsize=1)
def _debye_polynomials() -> Tensor:
    """Return in row k the coefficients of U_k(p) / p^k in powers of p^2 (DLMF 10.41.9, exact before rounding)."""
    current = {0: Fraction(1)}  # power of p -> coefficient
    table = torch.zeros(_TERMS + 1, _TERMS + 1, dtype=torch.float64, device="cpu")
    table[0, 0] = 1.0
    for k in range(1, _TERMS + 1):
        following: dict[int, Fraction] = {}
        for power, c in current.items():
            up = c * (Fraction(power, 2) + Fraction(1, 8 * (power + 1)))
            down = -c * (Fraction(power, 2) + Fraction(5, 8 * (power + 3)))
            following[power + 1] = following.get(power + 1, Fraction(0)) + up
            following[power + 3] = following.get(power + 3, Fraction(0)) + down
        current = following
        for j in range(k + 1):
            table[k, j] = float(current[k + 2 * j])
    return table
