"""The graph model: what its outputs may depend on, and which options and inputs it refuses."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch.nn import functional as F

from graph_batches import EDGE_TYPES, NODE_TYPES, SMALL, collate, make_graph, make_graphs, renumber, with_changes
from treadle.errors import ConfigError
from treadle.graphs import get_model
from treadle.graphs.heads import read_out
from treadle.graphs.layers import DropPath
from treadle.graphs.row_index import RowIndex

MPNN_TYPES = ["gin", "gat", "gcn", "gatedgcn"]
TASKS = ["graph", "node", "edge"]


def build(**options):
    torch.manual_seed(0)
    return get_model("graph_transformer", **{**SMALL, **options})


@pytest.fixture
def batch():
    return collate(make_graphs())


@pytest.mark.parametrize("readout", ["mean", "add", "max"])
@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
def test_a_graph_does_not_depend_on_the_others_in_its_batch(mpnn_type, readout, batch):
    model = build(mpnn_type=mpnn_type, readout=readout).eval()
    alone = torch.cat([model(graph) for graph in make_graphs()])
    assert alone.shape == (6, 2)
    torch.testing.assert_close(model(batch), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", ["node", "edge"])
def test_nodes_and_pairs_do_not_depend_on_other_graphs(task, batch):
    model = build(task=task).eval()
    alone = torch.cat([model(graph) for graph in make_graphs()])
    assert len(alone) == {"node": 71, "edge": batch.pair_index.shape[1]}[task]
    torch.testing.assert_close(model(batch), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
def test_the_numbering_of_the_nodes_does_not_matter(mpnn_type, task):
    graph, model = make_graph(12), build(mpnn_type=mpnn_type, task=task).eval()
    new_number = torch.randperm(12)
    expected, renumbered = model(graph), model(renumber(graph, new_number))
    if task == "node":
        renumbered = renumbered[new_number]
    torch.testing.assert_close(renumbered, expected, rtol=0, atol=1e-5)


def test_the_order_of_the_nodes_in_the_batch_does_not_matter(batch):
    model, new_number = build().eval(), torch.randperm(71)
    shuffled = renumber(batch, new_number)
    shuffled.batch, shuffled.num_graphs = batch.batch[new_number.argsort()], 6
    torch.testing.assert_close(model(shuffled), model(batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
@pytest.mark.parametrize("task", TASKS)
def test_every_parameter_exists_from_the_start_and_gets_a_gradient(mpnn_type, task, batch):
    model = build(mpnn_type=mpnn_type, task=task)
    names = set(dict(model.named_parameters()))
    model(batch).square().sum().backward()
    assert set(dict(model.named_parameters())) == names
    without = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []


@pytest.mark.parametrize("name", ["gt", "gps", "graph_transformer"])
def test_the_names_of_the_transformer_give_one_model(name, batch):
    expected = build().eval()(batch)
    torch.manual_seed(0)
    assert torch.equal(get_model(name, **SMALL).eval()(batch), expected)


def test_the_same_seed_gives_the_same_weights_and_evaluation_is_repeatable(batch):
    first, second = build().eval(), build().eval()
    assert torch.equal(first(batch), second(batch))
    assert torch.equal(first(batch), first(batch))
    first.train()
    assert not torch.equal(first(batch), first(batch))


def test_num_classes_is_the_output_width():
    assert build(num_classes=7).num_classes == 7


def test_mpnn_has_no_attention_and_attention_can_stand_alone(batch):
    options = {**SMALL, "relative_pe_dim": None}
    mpnn = get_model("mpnn", **options).eval()
    assert [name for name, _ in mpnn.named_parameters() if "attention" in name] == []
    assert mpnn(with_changes(batch, edge_pe=None)).shape == (6, 2)
    alone = build(use_local=False, num_edge_features=None).eval()
    assert [name for name, _ in alone.named_parameters() if "local" in name or "edge_input" in name] == []
    changed = with_changes(batch, edge_index=batch.edge_index[:, :0], edge_attr=None)
    assert torch.equal(alone(changed), alone(batch))


@pytest.mark.parametrize("name", ["gt", "mpnn"])
def test_message_passing_reaches_neighbours_and_attention_reaches_all(name):
    model = get_model(name, 2, hidden_dim=16, num_layers=1, num_heads=2, task="node").eval()
    path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    graph = with_changes(make_graph(3), x=torch.tensor([0, 0, 0]), edge_index=path, edge_attr=None)
    moved = with_changes(graph, x=torch.tensor([1, 0, 0]))
    is_reached = (model(graph) != model(moved)).any(1).tolist()
    assert is_reached == [True, True, name == "gt"]


# Features


def test_integer_types_are_a_table_and_floats_a_linear_map_with_the_same_weight(batch):
    model = build().eval()
    columns = with_changes(
        batch, x=F.one_hot(batch.x, NODE_TYPES).float(), edge_attr=F.one_hot(batch.edge_attr, EDGE_TYPES).double()
    )
    torch.testing.assert_close(model(columns), model(batch), rtol=0, atol=1e-6)
    one_column = with_changes(batch, x=batch.x[:, None], edge_attr=batch.edge_attr[:, None].int())
    assert torch.equal(model(one_column), model(batch))


@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
def test_edge_features_reach_the_output(mpnn_type):
    model = build(mpnn_type=mpnn_type, use_global=False, relative_pe_dim=None, task="node").eval()
    star = torch.tensor([[1, 2, 0, 0], [0, 0, 1, 2]])
    graph = with_changes(make_graph(3), edge_index=star, edge_attr=torch.tensor([0, 0, 0, 0]), edge_pe=None)
    other = with_changes(graph, edge_attr=torch.tensor([0, 2, 0, 0]))
    is_reached = ((model(graph) - model(other)).abs() > 1e-5).any(1).tolist()
    assert is_reached == [True, True, True]


@pytest.mark.parametrize("mpnn_type", ["gin", "gat", "gcn"])
def test_the_feature_of_its_only_edge_reaches_a_node(mpnn_type):
    # The gates of gatedgcn are shares, and the share of an only edge is 1 whatever its feature.
    model = build(mpnn_type=mpnn_type, use_global=False, relative_pe_dim=None, task="node").eval()
    bond = torch.tensor([[0, 1], [1, 0]])
    pair = with_changes(make_graph(2), edge_index=bond, edge_attr=torch.tensor([0, 0]), edge_pe=None)
    other = with_changes(pair, edge_attr=torch.tensor([2, 2]))
    assert (model(pair) - model(other)).abs().max() > 1e-4


def test_without_edge_features_every_edge_is_of_type_0(batch):
    model = build().eval()
    zeros = with_changes(batch, edge_attr=torch.zeros_like(batch.edge_attr))
    assert torch.equal(model(with_changes(batch, edge_attr=None)), model(zeros))
    assert len(build(num_edge_features=None).edge_input.weight) == 16


def test_columns_of_edges_are_taken_as_they_come_where_nobody_said_how_many(batch):
    model = build(num_edge_features=None).eval()
    columns = torch.nn.functional.one_hot(batch.edge_attr, 3).float()
    torch.testing.assert_close(model(with_changes(batch, edge_attr=columns)), model(batch), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="num_edge_features=17"):
        model(with_changes(batch, edge_attr=torch.zeros(len(columns), 17)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.full((71,), 5)}, ["x has types from 5 to 5", "num_features=6"]),
        ({"x": torch.full((71,), -1)}, ["x has types from -1", "num_features=5", "count from 0"]),
        ({"x": torch.zeros(71, 3)}, ["(71, 3)", "num_features=5"]),
        ({"x": torch.zeros(71)}, ["(71,)", "num_features=5"]),
        ({"x": torch.zeros(71, 2, dtype=torch.long)}, ["(71, 2)", "one for each row"]),
        ({"edge_attr": torch.full((999,), 3)}, ["edge_attr has types", "num_edge_features=4"]),
        ({"node_pe": torch.zeros(71, 3)}, ["(71, 3)", "node_pe_dim=4"]),
        ({"edge_pe": torch.zeros(5, 9)}, ["(5, 9)", "relative_pe_dim=6"]),
        ({"node_pe": torch.zeros(1, 4)}, ["node_pe has 1 rows", "71 nodes"]),
        ({"edge_pe": torch.zeros(1, 6)}, ["edge_pe has 1 rows", "pairs"]),
        ({"edge_attr": torch.zeros(1, dtype=torch.long)}, ["edge_attr has 1 rows", "edges"]),
        ({"node_pe": None}, ["no node_pe", "node_pe_dim"]),
        ({"edge_pe": None}, ["no edge_pe", "relative_pe_dim"]),
        ({"edge_pe_index": None}, ["edge_pe_index"]),
        ({"x": None}, ["'x'"]),
        ({"edge_index": None}, ["edge_index"]),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(change, words, batch):
    if "edge_attr" in change:
        change = {"edge_attr": change["edge_attr"][: batch.edge_index.shape[1]]}
    with pytest.raises(ValueError) as caught:
        build()(with_changes(batch, **change))
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_task_on_pairs_needs_pairs(batch):
    with pytest.raises(ConfigError, match="pair_index"):
        build(task="edge")(with_changes(batch, pair_index=None))


@pytest.mark.parametrize(("name", "argument"), [("node_pe", "node_pe_dim"), ("edge_pe", "relative_pe_dim")])
def test_an_encoding_that_the_model_was_not_built_for_is_one_warning(name, argument, batch, caplog):
    model = build(**{argument: None}).eval()
    with caplog.at_level(logging.WARNING, "treadle"):
        with_encoding = [model(batch), model(batch)][1]
    assert [record.name for record in caplog.records] == ["treadle.graphs.model"]
    assert name in caplog.text
    assert argument in caplog.text
    assert torch.equal(with_encoding, model(with_changes(batch, **{name: None})))


@pytest.mark.parametrize(("name", "part"), [("node_pe", "node_pe."), ("edge_pe", "pair_bias.")])
def test_encodings_change_the_output_and_get_gradients(name, part, batch):
    model = build().eval()
    outputs = model(batch)
    assert (model(with_changes(batch, **{name: getattr(batch, name) + 1})) - outputs).abs().max() > 1e-4
    outputs.sum().backward()
    gradients = [weight.grad for key, weight in model.named_parameters() if key.startswith(part)]
    assert gradients
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_a_pair_and_its_reverse_give_the_same_bits(batch):
    model = build(task="edge").eval()
    assert torch.equal(model(with_changes(batch, pair_index=batch.pair_index.flip(0))), model(batch))


def test_readouts_of_graphs_with_and_without_nodes():
    nodes, owner = torch.tensor([[1.0, -5.0], [3.0, -1.0], [5.0, 2.0]]), torch.tensor([0, 0, 2])
    assert read_out(nodes, RowIndex(owner, 3), "add").tolist() == [[4.0, -6.0], [0.0, 0.0], [5.0, 2.0]]
    assert read_out(nodes, RowIndex(owner, 3), "mean").tolist() == [[2.0, -3.0], [0.0, 0.0], [5.0, 2.0]]
    assert read_out(nodes, RowIndex(owner, 3), "max").tolist() == [[3.0, -1.0], [0.0, 0.0], [5.0, 2.0]]


def test_a_graph_without_nodes_is_no_source_of_nan(batch):
    model = build()
    batch = with_changes(batch, num_graphs=8)
    outputs = model(batch)
    outputs.square().sum().backward()
    assert outputs.shape == (8, 2)
    assert outputs.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


# Training


@pytest.mark.parametrize("mpnn_type", MPNN_TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_and_stays_near_full_precision(dtype, mpnn_type, batch):
    model = build(mpnn_type=mpnn_type).eval()
    expected = model(batch)
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(batch)
    outputs.float().square().sum().backward()
    assert (outputs.float() - expected).abs().max() < 0.05
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_drop_path_leaves_out_whole_graphs_and_keeps_the_mean():
    torch.manual_seed(0)
    owner = torch.arange(2000).repeat_interleave(3)
    dropped = DropPath(0.25)(torch.ones(6000, 1), RowIndex(owner, 2000)).view(2000, 3)
    assert torch.equal(dropped.amin(1), dropped.amax(1))
    assert set(dropped.flatten().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert dropped.mean().item() == pytest.approx(1, abs=0.04)


def test_drop_path_grows_from_the_first_layer_to_the_last():
    rates = [layer.drop_path.rate for layer in build(drop_path_rate=0.2).layers]
    assert rates == pytest.approx([0.0, 0.1, 0.2])


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layer": 3}, ["num_layer", "num_layers"]),
        ({"mpnn": "gin"}, ["mpnn", "mpnn_type"]),
        ({"task": "graphs"}, ["task='graphs'", "'graph'"]),
        ({"mpnn_type": "gine"}, ["mpnn_type='gine'", "'gin'"]),
        ({"readout": "sum"}, ["readout='sum'"]),
        ({"num_features": None}, ["num_features is required"]),
        ({"num_layers": 0}, ["num_layers=0"]),
        ({"num_classes": 1.5}, ["num_classes=1.5"]),
        ({"ffn_dim": 0}, ["ffn_dim=0"]),
        ({"node_pe_dim": -1}, ["node_pe_dim=-1"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"attn_dropout": -0.1}, ["attn_dropout=-0.1"]),
        ({"hidden_dim": 18}, ["hidden_dim=18", "num_heads=4"]),
        ({"use_local": False, "use_global": False}, ["no layer"]),
        ({"use_global": False}, ["relative_pe_dim=6", "no attention"]),
        ({"use_local": False}, ["num_edge_features=3"]),
        ({"use_local": False, "num_edge_features": None, "mpnn_type": "gat"}, ["mpnn_type='gat'"]),
        ({"task": "node", "readout": "max"}, ["readout='max'", "'node'"]),
        ({"num_layers": 1, "drop_path_rate": 0.1}, ["drop_path_rate=0.1"]),
    ],
)
def test_an_option_is_used_or_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        build(**options)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("graph_transfomer", {}, ["graph_transfomer", "graph_transformer"]),
        ("mpnn", {"use_local": False}, ["use_local=False"]),
        ("mpnn", {"attn_dropout": 0.1}, ["attn_dropout=0.1"]),
    ],
)
def test_a_name_that_contradicts_its_options_is_refused(name, options, words):
    with pytest.raises(ConfigError) as caught:
        get_model(name, **{**SMALL, "relative_pe_dim": None, **options})
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("use_global", [True, None, False])
def test_mpnn_is_the_model_without_attention_whatever_is_asked_for_else(use_global):
    model = get_model("mpnn", **{**SMALL, "relative_pe_dim": None}, use_global=use_global)
    assert [layer.attention for layer in model.layers] == [None] * len(model.layers)
    assert inspect.signature(get_model).parameters["use_global"].default is True


def test_attn_dropout_and_ffn_dim_have_their_defaults_and_reach_the_layers():
    default, given = build(mpnn_type="gat"), build(mpnn_type="gat", attn_dropout=0.3, ffn_dim=5)
    assert (default.layers[0].attention.dropout, default.layers[0].ffn[0].out_features) == (0.1, 32)
    assert (given.layers[0].attention.dropout, given.layers[0].ffn[0].out_features) == (0.3, 5)
    assert given.layers[0].local.dropout.p == 0.3
    assert given.layers[0].dropout.p == 0.1
