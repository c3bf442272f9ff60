"""Tensors that lie in one piece of memory, and a captured step's memory that takes them by one copy."""

from __future__ import annotations

import pytest
import torch

from treadle.capture.memory import FixedBatch
from treadle.device.one_piece import in_one_piece, offsets_in_one_piece


def some(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(3, 5, generator=draw), torch.randint(0, 9, (7,), generator=draw), torch.tensor([True, False, True]),
        torch.randn(2, 3, generator=draw).bfloat16(), torch.empty(0, 3), torch.tensor(float("nan")),
    ]  # fmt: skip


def equal(some, others):
    return all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(some, others, strict=True))


def test_the_tensors_are_the_same_and_lie_in_one_piece():
    given = some()
    joined = in_one_piece(given)
    assert equal(given, joined)
    assert [one.dtype for one in joined] == [one.dtype for one in given]
    assert offsets_in_one_piece(joined) is not None


@pytest.mark.parametrize(
    "tensors",
    [
        some(),
        in_one_piece(some())[:3],  # a part of the piece
        list(reversed(in_one_piece(some()))),
        [in_one_piece(some())[0].T, *in_one_piece(some())[1:]],
        [*in_one_piece(some())[:3], *in_one_piece(some())[3:]],
        in_one_piece(some())[:1],
    ],
)
def test_others_are_not_taken_for_one_piece(tensors):
    assert offsets_in_one_piece(tensors) is None


def test_fixed_memory_takes_a_batch_in_one_piece_by_one_copy(monkeypatch):
    place = FixedBatch(in_one_piece(some()), torch.device("cpu"))
    assert equal(place.batch, some())
    kept = [tensor.data_ptr() for tensor in place.batch]
    copies = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *given, **how: copies.append(1) or copy(self, *given, **how)
    )
    one = in_one_piece(some(1))
    copies.clear()
    place.fill(one)
    assert len(copies) == 1
    assert equal(place.batch, some(1))
    place.fill(some(2))  # not in one piece
    assert equal(place.batch, some(2))
    assert kept == [tensor.data_ptr() for tensor in place.batch]
