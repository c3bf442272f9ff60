"""Checkpoints are written as ``torch.save`` writes them, to the byte."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from treadle.checkpoint import quick_pickle

WEIGHT = torch.randn(4, 3)
NAMED = torch.ones(2)
NAMED.note = "kept"
TREES = {
    "plain": {"a": 1, "b": [1.5, None, True, "text"], "c": {3: {"deep": -(2**70)}}},
    "types": {str(kind): torch.ones(3).to(kind) for kind in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn,
    )},
    "shared": {"one": WEIGHT, "again": WEIGHT, "part": WEIGHT[1:, :2], "turned": WEIGHT.T, "view": WEIGHT.view(-1)},
    "odd": {"number": torch.tensor(2.0), "empty": torch.empty(0, 3), "wide": torch.zeros(2, 3, 4, 4).to(
        memory_format=torch.channels_last
    )},
    "others": {"parameter": nn.Parameter(torch.ones(2)), "gradient": torch.ones(2, requires_grad=True), "named": NAMED,
               "conjugate": torch.ones(2, dtype=torch.complex64).conj(), "dtype": torch.float16,
               "sparse": torch.eye(3).to_sparse(), "storage": torch.ones(3).untyped_storage()},
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_bytes_are_those_of_torch(tree):
    usual, quick = io.BytesIO(), io.BytesIO()
    torch.save(tree, usual)
    torch.save(tree, quick, pickle_module=quick_pickle)
    assert quick.getvalue() == usual.getvalue()
