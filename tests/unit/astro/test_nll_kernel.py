"""The fused cross-entropy of a piece of logits on a GPU: it has torch's numbers, and it is what the loss calls."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from treadle.astro import loss_terms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def piece(dtype, columns=9_000, padded=9_024):
    generator = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(7, padded, generator=generator)
    logits[:, columns:] = -torch.inf
    logits[0, 8_999] = 300.0  # one id has all of the probability
    targets = torch.tensor([8_999, 0, 4_095, 4_096, 8_191, 5, 8_999])
    return logits.to("cuda", dtype), targets.cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_and_gradients_are_those_of_torch(dtype):
    logits, targets = piece(dtype)
    wide = logits.float().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="sum")
    expected.backward()
    (total,) = loss_terms._negative_log_likelihoods(logits, targets, True)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits, wide.grad.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_without_a_gradient_the_logits_stay_as_they_are():
    logits, targets = piece(torch.bfloat16)
    before = logits.clone()
    loss_terms._negative_log_likelihoods(logits, targets, False)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_makes_the_loss_nan(value):
    logits, targets = piece(torch.bfloat16)
    logits[2, 17] = value
    (total,) = loss_terms._negative_log_likelihoods(logits, targets, True)
    assert total.isnan()


def test_the_same_piece_twice_gives_the_same_bits():
    (first, first_targets), (second, _) = piece(torch.bfloat16), piece(torch.bfloat16)
    one = loss_terms._negative_log_likelihoods(first, first_targets, True)[0]
    other = loss_terms._negative_log_likelihoods(second, first_targets, True)[0]
    assert torch.equal(one, other)
    assert torch.equal(first, second)


def test_half_precision_logits_on_a_gpu_take_the_kernel(monkeypatch):
    from treadle.astro import nll_kernel

    seen = []
    kernel = nll_kernel.negative_log_likelihoods
    monkeypatch.setattr(
        nll_kernel, "negative_log_likelihoods", lambda *args, **kwargs: seen.append(1) or kernel(*args, **kwargs)
    )
    for dtype, calls in ((torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 2)):
        loss_terms._negative_log_likelihoods(*piece(dtype), True)
        assert len(seen) == calls
