"""The encodings of a whole data set, in processes and on disk, and as a transform of single graphs."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import pytest
import torch

from graph_shapes import complete, cycle, edgeless, path, random_graph, star, union
from treadle.errors import ConfigError
from treadle.graphs import (
    AddPositionalEncodings,
    RandomSignFlip,
    cached_encodings,
    compute_node_pe,
    compute_relative_pe,
    encode_graphs,
    encoding_cache,
    parse_pe_config,
)

GRAPHS = [
    *(random_graph(n, 0.3, seed) for seed, n in enumerate([5, 9, 5, 14, 9, 9, 3])),
    edgeless(1),
    union(cycle(4), path(3)),
    edgeless(1),
]
CONFIGS = {
    kind: {"node": {}, "relative": {"type": kind}} for kind in ("spd", "bfs", "diffusion", "resistance", "landmark")
}


def same(one, other):
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


# Many graphs


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_graph_has_the_encodings_it_has_alone_in_the_order_of_the_data(kind):
    encoded = encode_graphs(GRAPHS, CONFIGS[kind])
    assert len(encoded) == len(GRAPHS)
    for graph, found in zip(GRAPHS, encoded, strict=True):
        assert torch.allclose(found.node_pe, compute_node_pe(*graph, CONFIGS[kind]), atol=1e-6)
        pairs, values = compute_relative_pe(*graph, CONFIGS[kind])
        assert torch.equal(found.edge_pe_index, pairs)
        assert torch.allclose(found.edge_pe, values, atol=1e-6)
    assert torch.equal(encoded[-1].node_pe, encoded[len(GRAPHS) - 1].node_pe)
    with pytest.raises(IndexError):
        encoded[len(GRAPHS)]


def test_what_is_off_is_none():
    node_only, pairs_only = encode_graphs(GRAPHS, {"node": {}}), encode_graphs(GRAPHS, {"relative": {}})
    assert node_only.pairs is None
    assert node_only[0][1:] == (None, None)
    assert pairs_only[0].node_pe is None
    assert encode_graphs(GRAPHS, None)[0] == (None, None, None)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_graph_may_change_its_encodings_without_changing_the_store(kind):
    encoded = encode_graphs(GRAPHS, CONFIGS[kind])
    kept = [part.clone() for part in encoded[0]]
    for part in encoded[0]:
        part.zero_()
    assert all(torch.equal(one, other) for one, other in zip(encoded[0], kept, strict=True))


def test_no_graphs_have_no_encodings():
    assert len(encode_graphs([], "default")) == 0


@pytest.mark.parametrize("kind", ["spd", "resistance"])
def test_the_number_of_workers_does_not_matter(kind):
    graphs = GRAPHS * 60  # of some sizes more than one chunk
    here, there = encode_graphs(graphs, CONFIGS[kind]), encode_graphs(graphs, CONFIGS[kind], num_workers=2)
    assert torch.equal(here.node, there.node)
    assert same(here.pairs, there.pairs)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_generator_is_touched_and_the_threads_are_given_back(workers):
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        encode_graphs(GRAPHS, CONFIGS["landmark"], num_workers=workers)
        assert torch.get_num_threads() == 2

        def fails(done, total):
            raise KeyError(done)

        with pytest.raises(KeyError):
            encode_graphs(GRAPHS, "light", progress=fails)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(before, torch.get_rng_state())


def test_progress_ends_at_the_number_of_graphs():
    seen = []
    encode_graphs(GRAPHS, "light", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(GRAPHS), len(GRAPHS))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_wrong_graph_is_named_before_any_work():
    seen = []
    wrong = [*GRAPHS, (torch.tensor([[0], [7]]), 3)]
    with pytest.raises(ConfigError, match=r"graph 10: edge_index has the edge \(0, 7\)"):
        encode_graphs(wrong, "light", progress=lambda *numbers: seen.append(numbers))
    assert seen == []


def test_codes_take_one_byte_a_pair():
    assert encode_graphs(GRAPHS, CONFIGS["spd"]).pairs.dtype == torch.uint8


# On disk


@pytest.fixture
def computed(monkeypatch):
    """Count how often encodings are computed for the cache."""
    calls = []

    def counting(*arguments, **keywords):
        calls.append(1)
        return encode_graphs(*arguments, **keywords)

    monkeypatch.setattr(encoding_cache, "encode_graphs", counting)
    return calls


def files_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("config", [CONFIGS["spd"], CONFIGS["diffusion"], {"node": {}}, None])
def test_the_second_time_they_are_read(tmp_path, computed, config):
    first = cached_encodings(GRAPHS, config, tmp_path / "new", name="nci-train")
    second = cached_encodings(copy.deepcopy(GRAPHS), config, tmp_path / "new", name="nci-train")
    assert len(computed) == 1
    assert same(first.node, second.node)
    assert same(first.pairs, second.pairs)
    assert first.config == second.config
    assert [entry.startswith("nci-train-") for entry in files_in(tmp_path / "new")] == [True]


def test_other_graphs_and_other_settings_are_computed(tmp_path, computed):
    variants = [
        (GRAPHS, "light"),
        (GRAPHS, "default"),
        (GRAPHS[:-1], "light"),
        (GRAPHS[::-1], "light"),
        ([(GRAPHS[0][0], 6), *GRAPHS[1:]], "light"),
        ([(GRAPHS[0][0][:, 1:], 5), *GRAPHS[1:]], "light"),
    ]
    for graphs, config in variants:
        cached_encodings(graphs, config, tmp_path)
    assert len(computed) == len(files_in(tmp_path)) == len(variants)


def test_a_new_version_of_the_encodings_does_not_read_old_files(tmp_path, computed, monkeypatch):
    cached_encodings(GRAPHS, "light", tmp_path)
    monkeypatch.setattr(encoding_cache, "_VERSION", encoding_cache._VERSION + 1)
    cached_encodings(GRAPHS, "light", tmp_path)
    assert len(computed) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "pickle"])
def test_a_damaged_file_is_named_and_written_anew(tmp_path, computed, caplog, damage):
    first = cached_encodings(GRAPHS, "light", tmp_path)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "pickle":
        content = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."
    file.write_bytes({"cut": content[:-100], "empty": b""}.get(damage, bytes(content)))
    with caplog.at_level(logging.WARNING, logger="treadle.graphs"):
        second = cached_encodings(GRAPHS, "light", tmp_path)
    assert file.name in caplog.text
    assert torch.equal(first.node, second.node)
    caplog.clear()
    cached_encodings(GRAPHS, "light", tmp_path)
    assert len(computed) == 2
    assert caplog.text == ""


def test_a_file_of_other_encodings_under_this_name_is_not_used(tmp_path, computed, caplog):
    cached_encodings(GRAPHS, "light", tmp_path)
    (file,) = tmp_path.iterdir()
    cached_encodings(GRAPHS[:3], "light", tmp_path / "other")
    (other,) = (tmp_path / "other").iterdir()
    file.write_bytes(other.read_bytes())
    assert len(cached_encodings(GRAPHS, "light", tmp_path)) == len(GRAPHS)
    assert "other graphs" in caplog.text


def test_where_nothing_can_be_written_a_warning_says_so(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    encoded = cached_encodings(GRAPHS, "light", tmp_path / "file")
    assert len(encoded) == len(GRAPHS)
    assert "again next time" in caplog.text


# Single graphs


# torch_geometric compiles functions with torch.jit.script when it is imported, which torch calls deprecated.
with_geometric = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def graph(shape):
    return SimpleNamespace(edge_index=shape[0], num_nodes=shape[1])


def test_the_transform_gives_a_copy_its_encodings_and_leaves_the_graph():
    given = graph(star(4))
    found = AddPositionalEncodings("default")(given)
    assert torch.equal(found.node_pe, compute_node_pe(*star(4), "default"))
    assert torch.equal(found.edge_pe, compute_relative_pe(*star(4), "default")[1])
    assert vars(given).keys() == {"edge_index", "num_nodes"}


def test_what_is_off_is_not_set():
    found = AddPositionalEncodings({"node": {"type": "rwse"}})(graph(star(4)))
    assert vars(found).keys() == {"edge_index", "num_nodes", "node_pe"}


def test_nodes_are_counted_in_x_where_num_nodes_is_absent():
    found = AddPositionalEncodings("light")(SimpleNamespace(edge_index=path(3)[0], x=torch.zeros(4, 2)))
    assert found.node_pe.shape == (4, 16)


def test_a_graph_without_edge_index_and_a_batch_are_refused():
    with pytest.raises(ConfigError, match="edge_index"):
        AddPositionalEncodings("light")(SimpleNamespace(num_nodes=3))
    with pytest.raises(ConfigError, match="batch of 2 graphs"):
        AddPositionalEncodings("light")(SimpleNamespace(num_nodes=3, num_graphs=2, edge_index=path(3)[0]))


@with_geometric
def test_torch_geometric_takes_the_transform_and_shifts_the_pairs():
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Batch, Data
    from torch_geometric.transforms import Compose

    transform = Compose([AddPositionalEncodings("default"), RandomSignFlip(0)])
    shapes = [path(3), cycle(4)]
    graphs = [transform(Data(edge_index=edges, num_nodes=n)) for edges, n in shapes]
    batch = Batch.from_data_list(graphs)
    assert batch.node_pe.shape == (7, 20)
    assert batch.edge_pe.shape == (25, 32)
    assert torch.equal(batch.edge_pe_index[:, :9], graphs[0].edge_pe_index)
    assert torch.equal(batch.edge_pe_index[:, 9:], graphs[1].edge_pe_index + 3)
    assert torch.equal(batch[1].edge_pe_index, graphs[1].edge_pe_index)


# Signs


FLIP = {"node": {"type": "combined", "dim": 32, "lap": {"k": 4, "sign_invariant": "flip"}, "rwse": {"scales": [1, 2]}}}


def test_which_columns_are_flipped_follows_from_the_settings():
    assert parse_pe_config(FLIP).node.flip_columns == 4
    assert parse_pe_config({"node": {**FLIP["node"], "type": "rwse"}}).node.flip_columns == 0
    assert parse_pe_config("default").node.flip_columns == 0


def test_signs_are_drawn_for_each_column_from_the_training_generator_and_nothing_else_changes():
    fixed = AddPositionalEncodings(FLIP)(graph(complete(6)))
    flip = RandomSignFlip(parse_pe_config(FLIP).node.flip_columns)
    torch.manual_seed(1)
    drawn = [flip(fixed).node_pe for _ in range(40)]
    torch.manual_seed(1)
    assert all(torch.equal(flip(fixed).node_pe, once) for once in drawn)
    patterns = set()
    for node_pe in drawn:
        assert torch.equal(node_pe[:, 4:], fixed.node_pe[:, 4:])
        ratio = node_pe[:, :4] / fixed.node_pe[:, :4]
        patterns.add(tuple(ratio.nanmean(0).tolist()))
    assert all(set(pattern) <= {1.0, -1.0} for pattern in patterns)
    assert len(patterns) > 8  # of 16


@with_geometric
def test_in_a_batch_every_graph_has_signs_of_its_own():
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Batch, Data

    one = AddPositionalEncodings(FLIP)(Data(edge_index=path(5)[0], num_nodes=5))
    batch = Batch.from_data_list([one] * 30)
    kept = batch.node_pe.clone()
    flipped = RandomSignFlip(4)(batch)
    assert torch.equal(batch.node_pe, kept)
    signs = (flipped.node_pe / batch.node_pe).view(30, 5, 32)[:, 0, :4]
    assert torch.equal(
        flipped.node_pe.view(30, 5, 32)[..., :4], batch.node_pe.view(30, 5, 32)[..., :4] * signs[:, None]
    )
    assert len(set(map(tuple, signs.tolist()))) > 4


def test_without_columns_to_flip_nothing_is_drawn_and_too_many_are_refused():
    data = SimpleNamespace(node_pe=torch.ones(3, 2))
    before = torch.get_rng_state()
    assert RandomSignFlip(0)(data) is data
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(ConfigError, match="2 columns"):
        RandomSignFlip(3)(data)
    with pytest.raises(ConfigError, match="columns=-1"):
        RandomSignFlip(-1)
