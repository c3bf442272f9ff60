"""Masked losses: the tiny example, selection, gradients, precision, messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from treadle.spectra.losses import masked_mse, masked_sse

LOSSES = [masked_mse, masked_sse]
NAMES = ["mean", "batch_mean", "sum"]


def tiny() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    x_recon = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    return x_recon, x, mask


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("reduction", "value"), [("sum", 9.0), ("mean", 3.0), ("batch_mean", 4.5)])
def test_tiny_example(loss: Callable[..., Tensor], reduction: str, value: float) -> None:
    got = loss(*tiny(), reduction=reduction)
    assert got.shape == ()
    assert got.dtype == torch.float32
    assert got.item() == value


def test_defaults_differ() -> None:
    assert masked_mse(*tiny()).item() == 3.0
    assert masked_sse(*tiny()).item() == 4.5


@pytest.mark.parametrize("reduction", NAMES)
def test_gradient_is_that_of_the_selected_elements(reduction: str) -> None:
    x_recon, x, mask = tiny()
    masked_mse(x_recon, x, mask, reduction=reduction).backward()
    divisor = {"sum": 1, "mean": 3, "batch_mean": 2}[reduction]
    expected = torch.tensor([[-2.0, -4.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]]) / divisor
    assert torch.allclose(x_recon.grad, expected)


@pytest.mark.parametrize("reduction", NAMES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_values_outside_the_mask_reach_neither_loss_nor_gradient(reduction: str, poison: float) -> None:
    clean, x, mask = tiny()
    expected = masked_mse(clean, x, mask, reduction=reduction)
    expected.backward()
    x_recon, x, mask = tiny()
    with torch.no_grad():
        x_recon[~mask] = poison
        x[~mask] = poison
    got = masked_mse(x_recon, x, mask, reduction=reduction)
    got.backward()
    assert got.item() == expected.item()
    assert torch.equal(x_recon.grad, clean.grad)


@pytest.mark.parametrize("reduction", NAMES)
def test_nan_inside_the_mask_is_seen(reduction: str) -> None:
    x_recon, x, mask = tiny()
    x[0, 0] = float("nan")
    assert masked_mse(x_recon, x, mask, reduction=reduction).isnan()


@pytest.mark.parametrize("reduction", NAMES)
@pytest.mark.parametrize("loss", LOSSES)
def test_empty_mask_gives_zero_with_a_zero_gradient(loss: Callable[..., Tensor], reduction: str) -> None:
    x_recon, x, mask = tiny()
    value = loss(x_recon, x, torch.zeros_like(mask), reduction=reduction)
    assert value.item() == 0.0
    value.backward()
    assert torch.equal(x_recon.grad, torch.zeros_like(x_recon))


def test_arithmetic_is_float32_also_for_half_inputs_and_under_autocast() -> None:
    # 400 squared is beyond float16, and 2049 ones summed in bfloat16 stop at 256.
    x_recon = torch.full((1, 2049), 400.0, dtype=torch.float16)
    mask = torch.ones(1, 2049, dtype=torch.bool)
    assert masked_mse(x_recon, torch.zeros_like(x_recon), mask).item() == 160_000.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ones = torch.ones(1, 2049, dtype=torch.bfloat16)
        total = masked_mse(ones, torch.zeros(1, 2049), mask, reduction="sum")
    assert total.dtype == torch.float32
    assert total.item() == 2049.0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["none", "Mean", "batchmean", ""])
def test_other_reductions_are_named(loss: Callable[..., Tensor], name: str) -> None:
    with pytest.raises(ValueError, match=r"reduction='.*' must be one of mean, batch_mean, sum"):
        loss(*tiny(), reduction=name)


def test_shapes_and_mask_dtype_are_checked() -> None:
    x_recon, x, mask = tiny()
    with pytest.raises(ValueError, match=r"\(2, 4\), \(2, 4\) and \(4,\)"):
        masked_mse(x_recon, x, mask[0])
    with pytest.raises(ValueError, match=r"\(2, 4\), \(1, 4\)"):
        masked_mse(x_recon, x[:1], mask)
    with pytest.raises(ValueError, match=r"mask has dtype torch.float32 but must be bool.*~visible_mask"):
        masked_mse(x_recon, x, mask.float())
    with pytest.raises(ValueError, match=r"one shape"):
        masked_mse(x_recon.sum(), x.sum(), mask.any())
