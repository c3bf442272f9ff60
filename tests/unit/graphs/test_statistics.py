"""Statistics of the training graphs as part of a model: what they change, where they are kept, what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from graph_batches import SMALL, collate, make_graphs
from graph_kit import graphs, loader, make
from treadle.errors import ConfigError
from treadle.graphs import GraphStatistics, get_model, get_scheduler, graph_statistics
from treadle.graphs.heads import GraphHead
from treadle.graphs.layers import Structure

GRAPHS = make_graphs()


def model(**changes):
    return get_model(**{**SMALL, "dropout": 0.0, **changes})


def test_statistics_are_those_of_all_nodes():
    found = graph_statistics(GRAPHS)
    every = torch.cat([graph.node_pe for graph in GRAPHS]).double()
    assert found.mean_nodes == sum(len(graph.x) for graph in GRAPHS) / len(GRAPHS)
    assert torch.allclose(found.node_pe_mean.double(), every.mean(0), atol=1e-7)
    assert torch.allclose(1 / found.node_pe_scale.double(), every.std(0, correction=0), atol=1e-6)
    assert found.node_pe_dim == 4


def test_the_bits_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = graph_statistics(GRAPHS)
        torch.set_num_threads(2)
        two = graph_statistics(GRAPHS)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one.node_pe_mean, two.node_pe_mean)
    assert torch.equal(one.node_pe_scale, two.node_pe_scale)


def test_a_constant_column_stays_and_no_random_number_of_the_training_is_drawn():
    class Drawing:
        def __iter__(self):
            return iter(
                [SimpleNamespace(num_nodes=2, node_pe=torch.tensor([[1.0, 0.0], [1.0, 2.0]]) + 0 * torch.rand(1))]
            )

    before = torch.get_rng_state()
    found = graph_statistics(Drawing())
    assert torch.equal(before, torch.get_rng_state())
    assert (found.node_pe_mean.tolist(), found.node_pe_scale.tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_a_model_with_statistics_is_one_without_on_standardised_encodings():
    found = graph_statistics(GRAPHS)
    torch.manual_seed(0)
    with_them = model(statistics=found, readout="mean").eval()
    torch.manual_seed(0)
    without = model().eval()
    batch = collate(GRAPHS)
    expected = SimpleNamespace(**vars(batch))
    expected.node_pe = (batch.node_pe - found.node_pe_mean) * found.node_pe_scale
    assert torch.equal(with_them(batch), without(expected))


def test_mean_add_is_the_mean_beside_the_sum_over_the_mean_size():
    head = GraphHead(1, 1, dropout=0.0, readout="mean_add", mean_nodes=2.0)
    head.mlp = torch.nn.Identity()
    nodes, graph = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2])
    structure = Structure.of(graph.new_empty(2, 0), graph, 3)
    assert head(nodes, None, structure).tolist() == [[2.0, 2.0], [0.0, 0.0], [5.0, 2.5]]


def test_statistics_are_in_the_state_and_a_checkpoint_brings_them():
    found = graph_statistics(GRAPHS)
    trained = model(statistics=found).eval()
    assert {"node_pe.mean", "node_pe.scale", "head.mean_nodes"} <= trained.state_dict().keys()
    again = model(statistics=True).eval()
    batch = collate(GRAPHS)
    assert bool(again(batch).isnan().all())
    again.load_state_dict(trained.state_dict())
    assert torch.equal(again(batch), trained(batch))
    assert not {"node_pe.mean", "node_pe.scale", "head.mean_nodes"} & model().state_dict().keys()


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
    data = graphs(8)
    settings = {"model": {"statistics": graph_statistics(data)}}
    straight = make(**settings)
    straight.fit(loader(data), epochs=2)
    make(tmp_path, **settings).fit(loader(data), epochs=1)
    resumed = make(tmp_path, seed=1, model={"statistics": True})
    resumed.fit(loader(data), epochs=2, resume_from="auto")
    assert all(
        torch.equal(one, other)
        for one, other in zip(straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"readout": "mean_add"}, "pass statistics=graph_statistics"),
        ({"statistics": GraphStatistics(3.0)}, "node_pe has None columns, and node_pe_dim=4"),
        ({"statistics": graph_statistics(GRAPHS), "node_pe_dim": None}, "node_pe has 4 columns, and node_pe_dim=None"),
        ({"readout": "mean_sum"}, "did you mean"),
    ],
)
def test_what_does_not_fit_is_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        model(**changes)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "none to measure"),
        (
            [SimpleNamespace(num_nodes=1, node_pe=torch.zeros(1, 2)), SimpleNamespace(num_nodes=1)],
            "1 of 2 have a node_pe",
        ),
        ([SimpleNamespace(num_nodes=1, node_pe=torch.full((1, 2), math.nan))], "not finite"),
    ],
)
def test_what_cannot_be_measured_is_named(found, words):
    with pytest.raises(ConfigError, match=words):
        graph_statistics(found)


def test_a_warm_up_that_is_an_epoch_ahead_wastes_none():
    def rates(**settings):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        schedule = get_scheduler(optimizer, total_epochs=6, warmup_start_lr=0.0, min_lr=0.0, **settings)
        found = []
        for _ in range(4):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    assert rates(warmup_epochs=2, warmup_offset=1)[:3] == [0.5, 1.0, 1.0]
    assert rates(warmup_epochs=2)[:3] == [0.0, 0.5, 1.0]
    assert rates(warmup_epochs=2, warmup_offset=1)[2:] == rates(warmup_epochs=2)[2:]
    with pytest.raises(ConfigError, match="warmup_offset=2: must be 0 or 1"):
        rates(warmup_epochs=2, warmup_offset=2)


def test_a_model_with_measured_targets_answers_in_their_units():
    rows = [[100.0, 1.0], [300.0, math.nan], [math.nan, 3.0], [100.0, 3.0], [300.0, 1.0], [math.nan, 2.0]]
    known = [SimpleNamespace(**{**vars(GRAPHS[i]), "y": torch.tensor([row])}) for i, row in enumerate(rows)]
    found = graph_statistics(known, targets=True)
    assert (found.target_mean.tolist(), found.target_scale.tolist()) == ([200.0, 2.0], pytest.approx([100, 0.8**0.5]))
    torch.manual_seed(0)
    scaled = model(statistics=found, num_classes=2).eval()
    torch.manual_seed(0)
    plain = model(statistics=graph_statistics(known), num_classes=2).eval()
    batch = collate(GRAPHS)
    assert torch.equal(scaled(batch), plain(batch) * found.target_scale + found.target_mean)
    again = model(statistics=GraphStatistics.unknown(4, 2), num_classes=2).eval()
    again.load_state_dict(scaled.state_dict())
    assert torch.equal(again(batch), scaled(batch))


def test_targets_that_do_not_fit_are_refused():
    rows = [[1.0, math.nan], [2.0, math.nan]]
    unknown = [SimpleNamespace(num_nodes=2, y=torch.tensor([row])) for row in rows]
    with pytest.raises(ConfigError, match=r"\[1\] of the targets have no known value"):
        graph_statistics(unknown, targets=True)
    one = graph_statistics([SimpleNamespace(num_nodes=2, y=torch.tensor([[2.0]]))], targets=True)
    assert one.target_scale.tolist() == [1.0]  # a constant
    with pytest.raises(ConfigError, match="1 targets of a graph, and the model has 2 outputs"):
        model(statistics=one, node_pe_dim=None, num_classes=2)
