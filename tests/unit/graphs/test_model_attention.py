"""Attention inside each graph: the numbers, the bias of pairs, and how much memory it takes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_batches import SMALL, collate, make_graphs
from treadle.graphs import get_model
from treadle.graphs.attention import GraphAttention, PairBias, batch_layout, group_sizes


def attention(hidden_dim=8, num_heads=2):
    torch.manual_seed(0)
    return GraphAttention(hidden_dim, num_heads=num_heads)


def by_hand(module, nodes, bias=None):
    """Attention within one graph: nodes (n, D), bias (H, n, n)."""
    query, key, value = (part.unflatten(1, (module.num_heads, -1)) for part in module.qkv(nodes).chunk(3, dim=1))
    logits = torch.einsum("ihc,jhc->hij", query, key) / math.sqrt(query.shape[-1])
    shares = (logits if bias is None else logits + bias).softmax(-1)
    return module.out(torch.einsum("hij,jhc->ihc", shares, value).flatten(1))


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [((3, 3), 1), ((5, 4, 3), 1), ((40, 3, 2, 9, 1, 30), 2), ((300, 1, 40, 2, 299, 39, 5, 5, 5, 5, 5), 2)],
)
def test_attention_is_a_softmax_over_the_nodes_of_the_same_graph(sizes, groups):
    module, owner = attention(), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    nodes = torch.randn(sum(sizes), 8)
    expected = torch.cat([by_hand(module, part) for part in nodes.split(sizes)])
    layout = batch_layout(owner, len(sizes))
    assert len(layout.groups) == groups
    torch.testing.assert_close(module(nodes, layout), expected)


@pytest.mark.parametrize("sizes", [(3, 3), (40, 3, 2, 9, 1, 30)], ids=["equal", "grouped"])
def test_the_encoding_of_a_pair_is_added_to_the_logit_of_row_0_looking_at_row_1(sizes):
    module, owner = attention(), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    nodes, bias = torch.randn(sum(sizes), 8), PairBias(3, num_heads=2)
    expected, indices, encodings, start = [], [], [], 0
    for part in nodes.split(sizes):
        size = len(part)
        count = size * size // 2
        pairs = torch.randperm(size * size)[:count]
        encoding, dense = torch.randn(count, 3), torch.zeros(2, size * size)
        dense[:, pairs] = bias.proj(encoding).T
        expected.append(by_hand(module, part, dense.view(2, size, size)))
        indices.append(start + torch.stack([pairs // size, pairs % size]))
        encodings.append(encoding)
        start += size
    layout = bias(batch_layout(owner, len(sizes)), torch.cat(indices, dim=1), torch.cat(encodings))
    torch.testing.assert_close(module(nodes, layout), torch.cat(expected))


def test_a_pair_that_is_not_listed_or_has_a_zero_encoding_adds_nothing_and_one_listed_twice_adds_twice():
    bias, layout = PairBias(2, num_heads=1), batch_layout(torch.tensor([0, 0, 0]), 1)
    index = torch.tensor([[0, 1, 1, 2], [1, 2, 2, 0]])
    mask = bias(layout, index, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])).masks[0]
    first, second = bias.proj.weight[0].tolist()
    expected = torch.tensor([[0, first, 0], [0, 0, 2 * second], [0, 0, 0]])
    assert torch.equal(mask, expected[None, None])


def test_padding_never_more_than_doubles_the_pairs():
    random.seed(0)
    worst = 0.0
    for _ in range(300):
        top = random.choice([3, 40, 1000])
        sizes = [min(top, int(random.paretovariate(random.choice([0.3, 1.0, 3.0])))) for _ in range(60)]
        slots = group_sizes(sizes)
        assert all(slot >= size for slot, size in zip(slots, sizes, strict=True))
        worst = max(worst, sum(slot**2 for slot in slots) / sum(size**2 for size in sizes))
    assert 1.9 < worst <= 2


def test_graphs_of_about_the_same_size_are_one_group_and_a_few_groups_do_for_any():
    random.seed(0)
    assert len(set(group_sizes([random.randint(22, 30) for _ in range(512)]))) == 1
    for _ in range(100):
        assert len(set(group_sizes([int(random.paretovariate(0.5)) for _ in range(512)]))) <= 6


def test_graphs_without_nodes_do_not_spoil_the_grouping():
    assert group_sizes([0, 0]) == [1, 1]
    assert group_sizes([0, 64, 1]) == [1, 64, 1]


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def largest_tensor(sizes):
    """Elements of the largest tensor of a training step, and of the larger of (E, D) and of all (H, nᵢ, nᵢ)."""
    model, batch = get_model("gt", **SMALL), collate(make_graphs(sizes))
    with Largest() as largest:
        model(batch).sum().backward()
    pairs = SMALL["num_heads"] * sum(size**2 for size in sizes)
    return largest.elements, max(pairs, SMALL["hidden_dim"] * batch.edge_index.shape[1])


def test_no_tensor_grows_with_the_square_of_the_batch():
    elements, allowed = largest_tensor((20,) * 60)
    assert elements <= allowed < (20 * 60) ** 2 / 10


def test_one_large_graph_does_not_make_the_others_as_large():
    elements, allowed = largest_tensor((100, *(10,) * 60))
    assert elements <= 2 * allowed < SMALL["num_heads"] * 61 * 100**2 / 10
