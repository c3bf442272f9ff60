"""The augmenter: bounded shift, bounded angle, back on the sphere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.spectra.augment import SpectraAugmenter
from treadle.spectra.preprocessing import SNVScaler
from treadle.spectra.preprocessing import SpectraAugmenter as exported


def spectra(rows: int = 200, length: int = 64) -> Tensor:
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(0)).cumsum(dim=1)
    scaled: Tensor = SNVScaler().transform(x)
    return scaled


def angles(a: Tensor, b: Tensor) -> Tensor:
    # arcsin of the chord: arccos would lose half of the digits near 0.
    chord = torch.nn.functional.normalize(a.double()) - torch.nn.functional.normalize(b.double())
    return 2 * torch.asin(chord.norm(dim=1) / 2)


def test_exported_from_preprocessing() -> None:
    assert exported is SpectraAugmenter


@pytest.mark.parametrize("options", [{}, {"max_shift": 2.0}, {"max_angle": 0.3}, {"max_shift": 2.0, "max_angle": 0.3}])
def test_rows_stay_centred_and_of_full_norm(options: dict[str, float]) -> None:
    x = spectra()
    before = x.clone()
    y = SpectraAugmenter(**options)(x)
    assert torch.equal(x, before)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert torch.allclose(y.norm(dim=1), torch.full((200,), math.sqrt(63)), rtol=1e-5)
    assert y.mean(dim=1).abs().max() < 1e-6
    assert torch.allclose(x, y, atol=1e-5) is (not options)


def test_angle_is_bounded_and_used_in_full() -> None:
    x = spectra(2000)
    turned = angles(x, SpectraAugmenter(max_angle=0.2)(x))
    assert turned.max() <= 0.2 + 1e-5
    assert turned.max() > 0.19
    assert turned.mean().item() == pytest.approx(0.1, abs=0.01)


def test_directions_differ_between_rows_and_calls() -> None:
    x = spectra(1).expand(50, -1)
    augment = SpectraAugmenter(max_angle=0.2)
    first, second = augment(x), augment(x)
    step = torch.nn.functional.normalize(first - x)
    overlap = (step @ step.T)[~torch.eye(50, dtype=torch.bool)]
    assert overlap.abs().mean() < 0.3
    assert not torch.allclose(first, second, atol=1e-3)


def test_shift_moves_features_by_a_fraction_of_a_channel() -> None:
    # On a straight line inside held edges, a shift by d lowers the interior by d times the slope.
    line = torch.arange(64.0).expand(500, -1).contiguous()
    x = line - line.mean()
    y = SpectraAugmenter(max_shift=3.0)(x)
    # Centring and rescaling keep the interior a line; its slope and zero crossing give the shift back.
    slope = y[:, 33] - y[:, 32]
    assert torch.allclose(y[:, 40] - y[:, 32], 8 * slope, rtol=1e-3)
    assert torch.allclose(y[:, 32] - y[:, 24], 8 * slope, rtol=1e-3)
    held_low = (y[:, 1] - y[:, 0]).abs() < 1e-6
    held_high = (y[:, 63] - y[:, 62]).abs() < 1e-6
    # Shifts beyond one channel hold the low edge (positive) or the high edge (negative), never both.
    assert not (held_low & held_high).any()
    assert held_low.double().mean().item() == pytest.approx(1 / 3, abs=0.08)
    assert held_high.double().mean().item() == pytest.approx(1 / 3, abs=0.08)


def test_positive_shift_moves_a_peak_up_by_exactly_that_much() -> None:
    from treadle.spectra.augment import _shift_channels

    x = torch.zeros(3, 8)
    x[:, 3] = 1.0
    got = _shift_channels(x, torch.tensor([[2.0], [-1.0], [0.25]]))
    expected = torch.zeros(3, 8)
    expected[0, 5] = expected[1, 2] = 1.0
    expected[2, 3], expected[2, 4] = 0.75, 0.25
    assert torch.allclose(got, expected)
    ramp = torch.arange(4.0)[None]
    assert _shift_channels(ramp, torch.tensor([[1.5]])).tolist() == [[0.0, 0.0, 0.5, 1.5]]
    assert _shift_channels(ramp, torch.tensor([[-1.5]])).tolist() == [[1.5, 2.5, 3.0, 3.0]]
    assert _shift_channels(ramp, torch.tensor([[9.0]])).tolist() == [[0.0] * 4]


def test_constant_rows_become_zeros() -> None:
    x = torch.full((3, 64), 0.1)
    y = SpectraAugmenter(max_shift=1.7, max_angle=0.3)(x)
    assert torch.equal(y, torch.zeros(3, 64))


def test_seeding() -> None:
    x = spectra(5)
    before = torch.get_rng_state()

    def made(seed: int) -> Tensor:
        augment = SpectraAugmenter(max_shift=1.0, max_angle=0.1, generator=torch.Generator().manual_seed(seed))
        return augment(x)

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    first = SpectraAugmenter(max_angle=0.1)(x)
    torch.manual_seed(4)
    assert torch.equal(first, SpectraAugmenter(max_angle=0.1)(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    y = SpectraAugmenter(max_shift=1.0, max_angle=0.1)(spectra().to(dtype))
    assert y.dtype == dtype
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_shift": -1.0}, r"max_shift=-1.0: must lie in"),
        ({"max_shift": float("inf")}, r"max_shift=inf: must lie in"),
        ({"max_angle": -0.1}, r"max_angle=-0.1 must lie between 0 and pi"),
        ({"max_angle": 4.0}, r"max_angle=4.0 must lie between 0 and pi"),
        ({"max_angle": float("nan")}, r"max_angle=nan must lie"),
    ],
)
def test_bad_numbers_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SpectraAugmenter(**options)


def test_bad_input_is_named() -> None:
    augment = SpectraAugmenter(max_angle=0.1)
    for x in (torch.randn(64), torch.ones(2, 64, dtype=torch.int64), torch.randn(2, 2)):
        with pytest.raises(ValueError, match=r"x has shape .* and dtype .* but must be floating \(B, L\)"):
            augment(x)
