"""What holds for every data set: names, splits, encodings, files, and exact resume of its loader."""

from __future__ import annotations

import logging
import pickle
import sys

import pytest
import torch

from graph_data_kit import Data, DataLoader, fields
from helpers import differences, through_a_file
from treadle import set_seed
from treadle.data import Cursor
from treadle.errors import ConfigError
from treadle.graphs import compute_node_pe, compute_relative_pe, get_model
from treadle.graphs.datasets import dataset_names, get_dataset
from treadle.graphs.datasets.files import cached
from treadle.graphs.datasets.packed import GraphSplit, pack
from treadle.seed import RngState


def trees(root, **settings):
    settings = {"num_graphs": 20, "task": "distance_regression", "num_workers": 0, **settings}
    return get_dataset("synthetic_tree", root, **settings)


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="'zinc_clean_leads'"):
        get_dataset("zinc_clean_lead", tmp_path)
    with pytest.raises(ConfigError, match="'synthetic_random_regular'"):
        get_dataset("synthetic_regular", tmp_path)


def test_every_name_has_its_reader():
    from treadle.graphs.datasets.registry import _loader

    assert len(dataset_names()) == 33
    for name in dataset_names():
        assert callable(_loader(name)), name


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"splits": "scaffold"}, "splits='scaffold'"),
        ({"splits": "random"}, None),  # synthetic sets have a seed of their own
        ({"splits": "random", "seed": "1"}, "seed"),
        ({"pe_config": "defualt"}, "default"),
        ({"pe_config": {"nod": {}}}, "node"),
    ],
)
def test_a_wrong_choice_is_an_error_before_anything_is_made(tmp_path, given, rule):
    if rule is None:
        given = {**given, "seed": None}
        rule = "needs seed"
    with pytest.raises(ConfigError, match=rule):
        trees(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_seed_without_random_splits_is_refused_where_nothing_is_drawn(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'seed'"):
        get_dataset("zinc", tmp_path, seed=1)


def test_random_splits_are_drawn_by_the_seed_and_cover_every_graph_once(tmp_path):
    def drawn(splits, seed):
        data = trees(tmp_path, splits=splits, seed=seed)
        return [[repr(fields(graph)) for graph in split] for split in data.get_splits()]

    official, first, second = drawn("official", 1), drawn("random", 1), drawn("random", 1)
    assert first == second
    assert first != official
    assert [len(part) for part in first] == [16, 2, 2]
    everything = {graph for part in official for graph in part}
    assert len(everything) == 20
    assert {graph for part in first for graph in part} == everything


@pytest.mark.parametrize("preset", ["default", "light", "mspe"])
def test_encodings_are_those_of_each_graph_and_as_wide_as_the_data_set_says(preset, tmp_path):
    data = trees(tmp_path, pe_config=preset)
    for split in data.get_splits():
        for graph in split:
            index, values = compute_relative_pe(graph.edge_index, graph.num_nodes, preset)
            # One graph alone and many at once are summed in another order.
            assert torch.allclose(graph.node_pe, compute_node_pe(graph.edge_index, graph.num_nodes, preset), atol=1e-4)
            assert torch.equal(graph.edge_pe_index, index)
            assert torch.equal(graph.edge_pe, values)
            assert graph.node_pe.shape[1] == data.node_pe_dim
            assert graph.edge_pe.shape[1] == data.relative_pe_dim
            assert graph.node_pe.any()


def test_without_encodings_there_are_none_and_nothing_is_written(tmp_path):
    data = trees(tmp_path / "data")
    assert (data.node_pe_dim, data.relative_pe_dim) == (None, None)
    assert "node_pe" not in data.train[0]
    assert not (tmp_path / "data").exists()


def test_encodings_are_read_where_they_were_kept_and_computed_anew_on_request(tmp_path, monkeypatch):
    first = trees(tmp_path, pe_config="light", pe_cache_dir=tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 1

    def refuse(*args, **kwargs):
        raise AssertionError("computed again")

    monkeypatch.setattr("treadle.graphs.encoding_cache.encode_graphs", refuse)
    second = trees(tmp_path, pe_config="light", pe_cache_dir=tmp_path / "kept")
    assert [fields(graph) for graph in second.train] == [fields(graph) for graph in first.train]
    monkeypatch.setattr("treadle.graphs.datasets.registry.encode_graphs", refuse)
    with pytest.raises(AssertionError, match="computed again"):
        trees(tmp_path, pe_config="light", pe_cache_dir=tmp_path / "kept", use_preprocessed_pe=False)


def test_progress_of_the_encodings_is_told(tmp_path):
    told = []
    trees(tmp_path, pe_config="light", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (20, 20)


FLIP = {"node": {"type": "lap", "dim": 4, "lap": {"k": 4, "sign_invariant": "flip"}}}


def test_signs_are_drawn_in_training_and_fixed_otherwise(tmp_path):
    data = trees(tmp_path, pe_config=FLIP)
    seen = {tuple(data.train[0].node_pe.sign().flatten().tolist()) for _ in range(20)}
    assert len(seen) > 1
    for split in (data.val, data.test):
        assert torch.equal(split[0].node_pe, split[0].node_pe)
    assert torch.equal(data.train[0].node_pe.abs(), data.train[0].node_pe.abs())


@pytest.mark.parametrize("task", ["local_vs_global", "structural_role", "distance_regression"])
def test_a_model_of_the_widths_and_the_level_gives_an_output_for_each_target(tmp_path, task):
    data = get_dataset("synthetic_grid_2d", tmp_path, "light", task=task, num_graphs=10, num_workers=0)
    model = get_model(
        num_features=data.num_features, num_classes=data.num_classes, num_edge_features=data.num_edge_features,
        node_pe_dim=data.node_pe_dim, relative_pe_dim=data.relative_pe_dim, task=data.level, hidden_dim=8,
        num_layers=1, num_heads=2,
    )  # fmt: skip
    (batch,) = DataLoader(data.train, batch_size=8)
    assert model(batch).shape == (len(batch.y), data.num_classes)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "treadle.graphs.datasets.synthetic", raising=False)
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(ImportError, match=r"'synthetic_tree' needs torch_geometric.*treadle\[graphs\]"):
        trees(tmp_path)


# Packed splits


def graphs(count=5):
    return [
        Data(
            x=torch.arange(n, dtype=torch.int64).view(-1, 1) + 300,
            edge_index=torch.tensor([[0, 1], [1, 0]]),
            edge_attr=torch.eye(2)[: 1 + 1],
            y=torch.tensor([[n + 0.25]]),
            smiles="C" * n,
        )
        for n in range(2, 2 + count)
    ]


@pytest.mark.parametrize("count", [1, 5])
def test_a_packed_graph_comes_back_equal_in_values_and_dtypes(count):
    split = GraphSplit(through_a_file(pack(graphs(count))))
    assert len(split) == count
    for found, given in zip(split, graphs(count), strict=True):
        assert differences(found.to_dict(), given.to_dict()) == []


def test_a_split_can_be_sent_to_another_process(tmp_path):
    split = trees(tmp_path, pe_config="light").val
    assert [fields(graph) for graph in pickle.loads(pickle.dumps(split))] == [fields(graph) for graph in split]


def test_values_that_fit_are_kept_in_a_byte_and_no_value_is_lost():
    packed = pack(
        [Data(x=torch.tensor([[0.0, 255.0]]), y=torch.tensor([256]), z=torch.tensor([0.5, float("nan")]))] * 2
    )
    assert {name: value.dtype for name, value in packed["fields"].items()} == {
        "x": torch.uint8, "y": torch.int16, "z": torch.float32,
    }  # fmt: skip
    split = GraphSplit(packed)
    assert split[1].x.dtype == torch.float32
    assert split[1].y.tolist() == [256]
    assert split[1].z.isnan().tolist() == [False, True]


def test_changing_a_graph_changes_no_other_reading_of_it():
    split = GraphSplit(pack(graphs()))
    before = fields(split[1])
    split[1].y = None
    split[1].x.add_(1)
    assert fields(split[1]) == before


def test_a_split_without_graphs_is_an_error():
    with pytest.raises(ConfigError, match="no graphs"):
        pack([])


# Files of processed graphs


def test_processed_graphs_are_built_once_for_each_key(tmp_path):
    def build(value):
        return lambda: {"x": torch.tensor(value)}

    assert cached(tmp_path, {"a": 1}, build(5)) == ({"x": torch.tensor(5)}, False)
    assert cached(tmp_path, {"a": 1}, build(6)) == ({"x": torch.tensor(5)}, True)
    assert cached(tmp_path, {"a": 2}, build(7)) == ({"x": torch.tensor(7)}, False)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:200] + b"?" + b[201:], lambda b: b""])
def test_a_damaged_file_is_built_anew_with_a_warning(tmp_path, caplog, damage):
    cached(tmp_path, {}, lambda: {"x": torch.arange(100)})
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "treadle"):
        content, from_file = cached(tmp_path, {}, lambda: {"x": torch.arange(3)})
    assert not from_file
    assert content["x"].tolist() == [0, 1, 2]
    assert [line for line in caplog.messages if "built again" in line] != []
    assert cached(tmp_path, {}, dict)[0]["x"].tolist() == [0, 1, 2]


def test_a_file_of_another_key_under_the_same_name_is_not_used(tmp_path):
    cached(tmp_path, {"a": 1}, lambda: {"x": 1})
    cached(tmp_path / "other", {"a": 2}, lambda: {"x": 2})
    (mine,), (other,) = tmp_path.glob("*.pt"), (tmp_path / "other").iterdir()
    mine.write_bytes(other.read_bytes())
    assert cached(tmp_path, {"a": 1}, lambda: {"x": 3}) == ({"x": 3}, False)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "treadle"):
        assert cached(tmp_path / "file", {}, lambda: {"x": 1}) == ({"x": 1}, False)
    assert [line for line in caplog.messages if "not kept" in line] != []


# Loaders


def batches_of(loader, cut, saved=None):
    """Go through two epochs with a cursor, from the start or a saved position; return batches and one position."""
    cursor, seen, position = Cursor(), [], None
    if saved is not None:
        rng = RngState.from_plain(saved["rng"])
        cursor.load_state_dict(saved["data"], rng=rng)
        cursor.open(loader)
        rng.restore()
    while cursor.epoch < 2:
        cursor.open(loader)
        if len(seen) == cut and position is None:
            position = through_a_file({"data": cursor.state_dict(), "rng": RngState.capture().to_plain()})
        taken = cursor.take(1).batches
        seen += [batch.to_dict() for batch in taken]
        if not taken:
            cursor.next_epoch()
    return seen, position


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_torch_geometric_resumes_exactly(tmp_path, workers):
    data = trees(tmp_path, pe_config=FLIP)  # signs are drawn as each graph is read

    def loader():
        return DataLoader(data.train, batch_size=5, shuffle=True, num_workers=workers)

    for cut in range(0, 8, 1 if workers == 0 else 3):
        set_seed(3)
        straight, position = batches_of(loader(), cut)
        assert len(straight) == 8
        set_seed(99)
        resumed, _ = batches_of(loader(), None, position)
        assert differences(resumed, straight[cut:]) == [], cut
