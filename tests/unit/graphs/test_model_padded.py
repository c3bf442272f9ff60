"""Padded batches: fixed shapes, the same numbers for real graphs, and nothing that the host must wait for."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from graph_batches import SIZES, SMALL, collate, make_graph, make_graphs, with_changes
from treadle.errors import ConfigError
from treadle.graphs import PadBucket, PaddingCollater, get_model, pad_batch, plan_buckets

MPNN_TYPES = ["gin", "gat", "gcn", "gatedgcn"]
TASKS = ["graph", "node", "edge"]
ROOM = PadBucket(graphs=8, rows=3, row_length=48, edges=900, pairs=2000, target_pairs=40)


def build(**options):
    torch.manual_seed(0)
    return get_model("gt", **{**SMALL, "dropout": 0.0, **options})


def targets(batch, task):
    rows = {"graph": batch.num_graphs, "node": len(batch.x), "edge": batch.pair_index.shape[1]}[task]
    return with_changes(batch, y=torch.randn(rows, 2, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
def test_outputs_and_gradients_equal_those_of_the_batch_without_padding(mpnn_type, task):
    batch = targets(collate(make_graphs()), task)
    plain, padded_model = build(mpnn_type=mpnn_type, task=task), build(mpnn_type=mpnn_type, task=task)
    expected = plain(batch)
    (expected - batch.y).square().mean().backward()

    padded = pad_batch(batch, ROOM, level=task)
    outputs = padded_model(padded)
    error = torch.where(padded.target_mask[:, None], outputs - padded.y, 0)
    (error.square().sum() / padded.target_mask.sum() / 2).backward()

    torch.testing.assert_close(padded.real(outputs), expected, rtol=0, atol=1e-5)
    assert torch.equal(padded.real(padded.y), batch.y)
    for (name, weight), other in zip(padded_model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
@pytest.mark.parametrize("readout", ["mean", "add", "max"])
def test_what_lies_in_the_padding_does_not_reach_real_graphs(mpnn_type, readout):
    model = build(mpnn_type=mpnn_type, readout=readout).eval()
    padded = pad_batch(collate(make_graphs()), ROOM)
    other = dataclasses.replace(
        padded,
        x=torch.where(padded.node_mask, padded.x, 4),
        edge_attr=torch.where(padded.edge_mask, padded.edge_attr, 2),
        node_pe=torch.where(padded.node_mask[:, None], padded.node_pe, 100.0),
    )
    outputs, changed = model(padded), model(other)
    assert torch.equal(padded.real(outputs), padded.real(changed))
    assert not torch.equal(outputs, changed)


def test_the_shapes_depend_on_the_bucket_alone():
    first, second = pad_batch(collate(make_graphs()), ROOM), pad_batch(collate(make_graphs((3, 48), seed=7)), ROOM)
    assert {n: t.shape for n, t in first.tensors().items()} == {n: t.shape for n, t in second.tensors().items()}
    assert first.x.shape == (3 * 48,)
    assert (first.num_graphs, first.graph_mask.sum().item(), second.graph_mask.sum().item()) == (9, 6, 2)


def test_padding_joins_padding_only_and_belongs_to_the_last_graph():
    padded = pad_batch(collate(make_graphs()), ROOM)
    assert set(padded.batch[~padded.node_mask].tolist()) == {8}
    assert not padded.node_mask[padded.edge_index[:, ~padded.edge_mask]].any()
    assert padded.node_mask[padded.edge_index[:, padded.edge_mask]].all()
    padding = padded.edge_index[1, ~padded.edge_mask].bincount()
    assert padding.max() <= 900 / (3 * 48 - 71) + 1


def test_no_graph_lies_in_two_rows_and_some_slots_stay_free():
    random.seed(0)
    for _ in range(50):
        sizes = [random.randint(0, 20) for _ in range(20)]
        starts = PadBucket(graphs=20, rows=20, row_length=24, edges=0).place(sizes)
        taken = [set(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
        assert all(len({slot // 24 for slot in slots}) <= 1 for slots in taken)
        assert sum(map(len, taken)) == len(set().union(*taken))
    assert PadBucket(graphs=2, rows=1, row_length=24, edges=0).place([21]) == [0]
    assert PadBucket(graphs=2, rows=1, row_length=24, edges=0).place([22]) is None
    assert PadBucket(graphs=2, rows=1, row_length=24, edges=0).place([1, 1, 1]) is None
    assert PadBucket(graphs=2, rows=9, row_length=24, edges=0).place([25]) is None


def captured_step(model, batch):
    """Forward, backward and update of a model on a batch, both without values: a read of one raises."""
    mode = FakeTensorMode(allow_non_fake_inputs=False)

    def fake(value):
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    weights = {name: fake(weight.detach()).requires_grad_() for name, weight in model.named_parameters()}
    with mode:
        if dataclasses.is_dataclass(batch):
            batch = dataclasses.replace(batch, **{n: fake(v) for n, v in batch.tensors().items()})
        else:
            batch = SimpleNamespace(**{n: fake(v) for n, v in vars(batch).items()})
        torch.func.functional_call(model, weights, (batch,)).square().sum().backward()
        torch.optim.AdamW(weights.values(), fused=True).step()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
def test_a_step_on_a_padded_batch_needs_no_value_on_the_host(mpnn_type, task):
    model = build(mpnn_type=mpnn_type, task=task, dropout=0.1, drop_path_rate=0.1)
    batch = with_changes(collate(make_graphs()), y=None)
    captured_step(model, pad_batch(batch, ROOM, level=task))
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        captured_step(model, batch)


@pytest.mark.parametrize("readout", ["mean", "add", "max"])
def test_no_readout_needs_a_value_on_the_host(readout):
    captured_step(build(readout=readout), pad_batch(collate(make_graphs()), ROOM))


def test_integer_targets_are_padded_with_0_and_float_targets_with_nan():
    batch = collate(make_graphs())
    assert pad_batch(batch, ROOM).y[6:].isnan().all()
    classes = pad_batch(with_changes(batch, y=torch.arange(1, 7)), ROOM)
    assert classes.y.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0]
    assert classes.target_mask.tolist() == [True] * 6 + [False] * 3
    renamed = with_changes(batch, y=None, target=batch.y)
    assert torch.equal(pad_batch(renamed, ROOM).y[:6], batch.y)


def test_the_first_bucket_that_holds_the_batch_is_taken():
    small = PadBucket(graphs=2, rows=2, row_length=8, edges=60, pairs=100, target_pairs=10)
    buckets = [small, ROOM]
    assert pad_batch(collate(make_graphs((5, 7))), buckets).row_length == 8
    assert pad_batch(collate(make_graphs((5, 9))), buckets).row_length == 48
    assert pad_batch(collate(make_graphs((5, 7))), [dataclasses.replace(small, edges=2), ROOM]).row_length == 48
    with pytest.raises(ConfigError, match=r"2 graphs, 55 nodes \(at most 50 in a graph\)") as caught:
        pad_batch(collate(make_graphs((5, 50))), buckets)
    assert "row_length=48" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [({}, "graphs", "level='graphs'"), ({}, "node", "(6, 2)"), ({"y": torch.tensor(1.0)}, "graph", "shape ()")],
)
def test_targets_of_another_level_are_refused(change, level, words):
    with pytest.raises(ConfigError) as caught:
        pad_batch(with_changes(collate(make_graphs()), **change), ROOM, level=level)
    assert words in str(caught.value)


def test_a_graph_that_names_no_batch_is_one_graph():
    model, graph = build().eval(), make_graph(9)
    padded = pad_batch(graph, ROOM)
    torch.testing.assert_close(padded.real(model(padded)), model(graph), rtol=0, atol=1e-5)


def test_buffers_are_filled_in_place_and_only_from_the_same_bucket():
    first, second = pad_batch(collate(make_graphs()), ROOM), pad_batch(collate(make_graphs(seed=5)), ROOM)
    before, x = first.clone(), first.x
    assert not torch.equal(x, second.x)
    assert first.copy_(second).x is x
    assert not torch.equal(before.x, x)
    for name, tensor in first.tensors().items():
        torch.testing.assert_close(tensor, second.tensors()[name], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="same bucket"):
        first.copy_(pad_batch(collate(make_graphs()), dataclasses.replace(ROOM, edges=901)))


def test_a_padded_batch_moves_with_all_its_tensors():
    moved = pad_batch(collate(make_graphs()), ROOM).to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert moved.num_graphs == 9


def test_every_random_batch_fits_and_nearly_all_fit_the_first_bucket():
    random.seed(0)
    graphs = [make_graph(min(60, int(2 * random.paretovariate(1.2)) + 1), seed) for seed in range(120)]
    first, second = plan_buckets(graphs, 12, share=0.7)
    batches = [collate(random.sample(graphs, random.choice([1, 12, 12, 12, 12]))) for _ in range(100)]
    lengths = [pad_batch(batch, [first, second]).row_length for batch in batches]
    assert 50 < lengths.count(first.row_length) < 100
    assert first.rows * first.row_length < second.rows * second.row_length / 2
    assert [first, second] == plan_buckets(graphs, 12, share=0.7)


def test_the_largest_and_richest_graphs_fit_together():
    random.seed(0)
    for _ in range(30):
        top = random.choice([3, 10, 60])
        graphs = [SimpleNamespace(x=torch.ones(random.randint(1, top)), edge_index=torch.ones(2, 0)) for _ in range(40)]
        graphs.sort(key=lambda graph: -len(graph.x))
        assert plan_buckets(graphs, 9)[-1].place([len(graph.x) for graph in graphs[:9]]) is not None
    graphs = make_graphs(SIZES)
    assert (
        pad_batch(collate(graphs), plan_buckets(graphs, len(graphs))).edge_mask.sum()
        == collate(graphs).edge_index.shape[1]
    )


@pytest.mark.parametrize(("arguments", "words"), [((0,), "batch_size=0"), ((3,), "no graphs")])
def test_buckets_need_graphs_and_a_batch_size(arguments, words):
    with pytest.raises(ConfigError, match=words):
        plan_buckets([] if words == "no graphs" else make_graphs(), *arguments)


def test_a_loader_of_torch_geometric_gives_padded_batches():
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(**vars(graph)) for graph in make_graphs()]
    collater = PaddingCollater(plan_buckets(graphs, 3))
    loader = torch.utils.data.DataLoader(graphs, batch_size=3, collate_fn=collater)
    model = build().eval()
    outputs = torch.cat([batch.real(model(batch)) for batch in loader])
    torch.testing.assert_close(outputs, model(collate(make_graphs())), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
def test_torch_compile_sees_one_graph_for_all_batches_of_a_bucket(mpnn_type):
    model = build(mpnn_type=mpnn_type)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    first, second = pad_batch(collate(make_graphs()), ROOM), pad_batch(collate(make_graphs(seed=3)), ROOM)
    torch.testing.assert_close(compiled(first), model(first))
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(second), model(second))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
def test_a_captured_step_is_the_eager_step(mpnn_type):
    def training():
        model = build(mpnn_type=mpnn_type).cuda()
        # Not Adam: the gradient of a key's bias is 0 but for the order of atomic sums, and Adam would make it a step.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

        def step(batch):
            optimizer.zero_grad()
            error = torch.where(batch.target_mask[:, None], model(batch) - batch.y, 0)
            error.square().sum().backward()
            optimizer.step()

        return model, step

    batches = [pad_batch(collate(make_graphs(seed=seed)), ROOM).to("cuda") for seed in range(6)]
    eager_model, eager_step = training()
    for batch in [batches[0]] * 3 + batches:
        eager_step(batch)

    model, step = training()
    buffers, side = batches[0].clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(buffers)
    for batch in batches:
        buffers.copy_(batch)
        graph.replay()
    for weight, expected in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)
