"""Attention through torch's memory-efficient kernel: its outputs, and a gradient that does not depend on the order."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from treadle.graphs.attention import attend

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_kernels_take_what_is_passed_to_them():
    forward = torch.ops.aten._scaled_dot_product_efficient_attention.default._schema
    backward = torch.ops.aten._efficient_attention_backward.default._schema
    names = [argument.name for argument in forward.arguments]
    assert names[:6] == ["query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p"]
    assert len(forward.returns) == 4
    assert [argument.name for argument in backward.arguments][:16] == [
        "grad_out_", "query", "key", "value", "bias", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
        "max_seqlen_k", "logsumexp", "dropout_p", "philox_seed", "philox_offset", "custom_mask_type",
        "bias_requires_grad",
    ]  # fmt: skip
    assert "num_splits_key" in [argument.name for argument in backward.arguments]


def inputs(size, kind, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(0)
    rows = [torch.randn(6, 4, size, 16, device="cuda", generator=generator).to(dtype) for _ in range(3)]
    owner = torch.arange(size, device="cuda") * 3 // size
    mask = None
    if kind == "bool":
        mask = (owner[:, None] == owner)[None, None].expand(6, 1, size, size)
    elif kind == "keys":
        mask = (owner < 2)[None, None, None].expand(6, 1, 1, size)
    elif kind == "float":
        mask = torch.randn(6, 4, size, size, device="cuda", generator=generator).requires_grad_()
    return [row.requires_grad_() for row in rows], mask


@pytest.mark.parametrize("size", [96, 130, 300])
@pytest.mark.parametrize("kind", ["none", "bool", "keys", "float"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
class TestOnAGpu:
    pytestmark = GPU

    def test_outputs_and_gradients_are_those_of_torch(self, size, kind, dropout):
        found = []
        for function in (attend, lambda q, k, v, mask, p: F.scaled_dot_product_attention(q, k, v, mask, p)):
            rows, mask = inputs(size, kind)
            torch.cuda.manual_seed(1)
            mixed = function(*rows, mask, dropout)
            (mixed * torch.linspace(-1, 1, 16, device="cuda")).sum().backward()
            grads = [row.grad for row in rows] + ([mask.grad] if kind == "float" else [])
            found.append((mixed.detach(), grads))
        assert torch.equal(found[0][0], found[1][0])
        for mine, theirs in zip(found[0][1], found[1][1], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)

    def test_gradients_have_the_same_bits_beside_other_work(self, size, kind, dropout):
        busy = torch.cuda.Stream()
        large = torch.randn(2048, 2048, device="cuda")
        found = []
        for turn in range(12):
            rows, mask = inputs(size, kind)
            with torch.cuda.stream(busy):
                for _ in range(turn % 4):
                    large @ large
            torch.cuda.manual_seed(1)
            attend(*rows, mask, dropout).square().sum().backward()
            found.append([row.grad for row in rows])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, found[0], strict=True))
