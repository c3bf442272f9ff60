"""Sums without atomics: those of index_add_, their gradients, and the same bits each time on a GPU."""

from __future__ import annotations

import pytest
import torch

from treadle.graphs.row_index import RowIndex

SIZES = [(50, 20), (300, 3), (0, 4), (6000, 3000), (5, 1)]  # of which the second and the fourth are summed in pieces


@pytest.mark.parametrize(("count", "rows"), SIZES)
@pytest.mark.parametrize("shape", [(3,), (2, 4), ()])
def test_sorted_sums_and_selections_are_those_of_index_add(count, rows, shape):
    torch.manual_seed(0)
    index = torch.randint(0, rows, (count,))
    values = torch.randn(count, *shape, dtype=torch.double)
    summed, selected = [], []
    for sorts in (True, False):
        of = RowIndex(index, rows, sorts=sorts)
        nodes = torch.randn(rows, *shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))
        nodes.requires_grad_()
        summed.append(of.sum(values))
        (of.select(nodes) * values).sum().backward()
        selected.append((of.select(nodes).detach(), nodes.grad))
    assert torch.allclose(*summed)
    assert torch.equal(selected[0][0], selected[1][0])
    assert torch.allclose(selected[0][1], selected[1][1])


@pytest.mark.parametrize(("count", "rows"), [(12, 5), (40, 2)])
def test_gradients_of_sorted_sums_have_gradients(count, rows):
    of = RowIndex(torch.arange(count) * 7 % rows, rows, sorts=True)
    nodes = torch.randn(rows, 2, dtype=torch.double, requires_grad=True)

    def messages(nodes):
        return of.sum(of.select(nodes).square() * of.softmax(of.select(nodes)))

    assert torch.autograd.gradcheck(messages, (nodes,))
    assert torch.autograd.gradgradcheck(messages, (nodes,))


def test_gradients_in_half_precision_are_added_in_full():
    of = RowIndex(torch.zeros(3000, dtype=torch.long), 1, sorts=True)
    nodes = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    of.select(nodes).backward(torch.ones(3000, 1, dtype=torch.bfloat16))
    assert nodes.grad.item() == 3008  # the nearest in bf16; added in bf16, ones stop at 256


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("count", "rows"), [(3000, 1200), (200_000, 30_000), (200_000, 5)])
def test_sums_have_the_same_bits_each_time_on_a_gpu(count, rows):
    generator = torch.Generator("cuda").manual_seed(0)
    index = torch.randint(0, rows, (count,), device="cuda", generator=generator)
    values = torch.randn(count, 16, device="cuda", generator=generator)
    found = []
    for _ in range(20):
        of = RowIndex(index, rows)
        nodes = torch.zeros(rows, 16, device="cuda", requires_grad=True)
        (of.select(nodes) * values).sum().backward()
        found.append((of.sum(values), nodes.grad))
    assert all(torch.equal(summed, found[0][0]) and torch.equal(grad, found[0][1]) for summed, grad in found)
    exact = torch.zeros(rows, 16, dtype=torch.double, device="cuda").index_add_(0, index, values.double())
    assert torch.allclose(found[0][0].double(), exact, rtol=1e-4, atol=1e-2)
