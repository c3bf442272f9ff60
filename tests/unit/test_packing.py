"""Values as bytes for other ranks: equal to the bit, and no archive for each tensor."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from treadle.distributed.ranks import packed, unpacked
from treadle.seed import RngState


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1.0, -0.0, float("nan"), float("inf")]),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.layout}",
)
def test_a_tensor_comes_back_as_it_was(tensor):
    back = unpacked(packed({"deep": [tensor]}))["deep"][0]
    assert type(back) is type(tensor)
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert np.array_equal(bits(back), bits(tensor))


def bits(tensor):
    dense = tensor.detach().resolve_conj().to_dense().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else dense.numpy()


def test_random_states_need_no_archives(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("torch reads an archive for a plain tensor")

    state = {"rng": RngState.capture().to_plain(), "pending": [[torch.tensor(float(n)), 1.0] for n in range(30)]}
    data = packed(state)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", refused)
    back = unpacked(data)
    drawn = random.random(), np.random.rand(), torch.rand(1)
    RngState.from_plain(back["rng"]).restore()
    assert (random.random(), np.random.rand()) == drawn[:2]
    assert torch.equal(torch.rand(1), drawn[2])
    assert torch.equal(back["pending"][29][0], torch.tensor(29.0))


def test_what_comes_back_can_be_written_to_and_is_ones_own():
    tensor = torch.zeros(2)
    back = unpacked(packed(tensor))
    back += 1
    assert tensor.tolist() == [0, 0]
    assert back.tolist() == [1, 1]
