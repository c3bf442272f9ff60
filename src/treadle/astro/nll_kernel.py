"""Triton kernel for the cross-entropy of a chunk of half-precision logits on a GPU, with two reads and one write.

With torch operations, a chunk is copied to float32 and traversed about ten times, which at 68,613 ids took several
times as long as the matrix products. Importing this needs Triton, which comes with torch for CUDA.

Shapes: R = rows of the chunk, V = columns of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def negative_log_likelihoods(logits_RV: Tensor, targets_R: Tensor, *, with_gradient: bool) -> Tensor:
    """Return -log softmax(logits)[target] of each row, and overwrite the logits with softmax - 1[target].

    Args:
        logits_RV: (R, V) on a GPU, rows contiguous; -inf means no logit.
        targets_R: (R,) int64, each below V.
        with_gradient: False leaves the logits unchanged.

    Returns:
        (R,) float32.
    """
    rows, columns = logits_RV.shape
    losses_R = logits_RV.new_empty(rows, dtype=torch.float32)
    with torch.cuda.device(logits_RV.device):
        _nll_of_a_row[(rows,)](
            logits_RV, targets_R, losses_R, logits_RV.stride(0), columns, with_gradient, _BLOCK, num_warps=8
        )
    return losses_R


@triton.jit  # type: ignore[untyped-decorator]
def _nll_of_a_row(  # type: ignore[no-untyped-def]
    logits, targets, losses, stride, columns, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    # Each lane keeps its own maximum and sum; a NaN propagates to its sum, and so to the loss.
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        place = first + lanes
        values = tl.load(start + place, mask=place < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, values)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - shift) + tl.exp(values - shift)
        peak = higher
    top = tl.max(peak, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    target = tl.load(targets + row)
    tl.store(losses + row, log_sum - tl.load(start + target).to(tl.float32))
    if WITH_GRADIENT:
        for first in range(0, columns, BLOCK):
            place = first + lanes
            values = tl.load(start + place, mask=place < columns, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(values - log_sum) - tl.where(place == target, 1.0, 0.0)
            tl.store(start + place, gradient.to(logits.dtype.element_ty), mask=place < columns)
