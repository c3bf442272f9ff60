"""The settings of the encodings: every one is used, every wrong one is refused and the nearest right one named."""

from __future__ import annotations

import copy

import pytest
import torch

from graph_shapes import random_graph
from treadle.errors import ConfigError
from treadle.graphs import (
    NodePEConfig,
    PEConfig,
    RelativePEConfig,
    compute_node_pe,
    compute_relative_pe,
    parse_pe_config,
)
from treadle.graphs.encodings import PE_PRESETS

# Every key. The default of the nodes is the recipe that won; the one before is the preset "combined".
DEFAULT = {
    "node": {
        "enabled": True,
        "type": "rwse",
        "dim": None,
        "lap": {"k": 16, "sign_invariant": "abs"},
        "rwse": {"scales": list(range(1, 21))},
        "hks": {"scales": [0.1, 0.5, 1.0, 2.0, 5.0]},
        "role": {"features": ["degree", "clustering", "kcore"]},
        "normalize": "none",
    },
    "relative": {
        "enabled": True,
        "type": "spd",
        "num_buckets": 32,
        "max_distance": 10,
        "scales": [0.1, 1.0, 10.0],
        "num_landmarks": 4,
        "reduce": ["min", "max", "mean"],
    },
}
GRAPH = random_graph(24, 0.12, 11)


def changed(section, **entries):
    config = copy.deepcopy(DEFAULT)
    for name, value in entries.items():
        if isinstance(value, dict):
            config[section][name].update(value)
        else:
            config[section][name] = value
    return config


def test_the_defaults_are_these():
    assert parse_pe_config(DEFAULT) == parse_pe_config("default") == PEConfig(NodePEConfig(), RelativePEConfig())
    assert parse_pe_config(DEFAULT).node.columns == parse_pe_config(DEFAULT).node_dim == 20


@pytest.mark.parametrize(
    ("name", "node_dim", "columns", "relative_dim"),
    [
        ("default", 20, 20, 32),
        ("combined", 32, 29, 32),
        ("light", 16, 3, 16),
        ("mspe", 64, 64, 32),
        ("none", None, None, None),
    ],
)
def test_presets(name, node_dim, columns, relative_dim):
    config = parse_pe_config(name)
    assert (config.node_dim, config.relative_dim) == (node_dim, relative_dim)
    if columns is None:
        assert compute_node_pe(*GRAPH, name).shape == (24, 0)
        assert [part.shape for part in compute_relative_pe(*GRAPH, name)] == [(2, 0), (0, 0)]
        return
    assert config.node.columns == columns
    node, (pairs, values) = compute_node_pe(*GRAPH, name), compute_relative_pe(*GRAPH, name)
    assert (node.shape, pairs.shape, values.shape) == ((24, node_dim), (2, 576), (576, relative_dim))
    start = 0
    for width in config.node.blocks.values():
        assert node[:, start : start + width].abs().sum() > 1
        start += width


def test_mspe_has_no_column_of_zeros_and_reaches_the_promised_scales():
    config = parse_pe_config("mspe").node
    assert (max(config.rwse.scales), max(config.hks.scales)) == (32, 10.0)
    assert (compute_node_pe(*random_graph(24, 0.3, 1), "mspe").abs().sum(0) > 0).all()


@pytest.mark.parametrize("name", PE_PRESETS)
def test_settings_survive_being_written_out(name):
    config = parse_pe_config(name)
    assert parse_pe_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "of_type"),
    [
        ({"lap": {"k": 3}}, "lap"),
        ({"lap": {"sign_invariant": "square"}}, "lap"),
        ({"lap": {"sign_invariant": "flip"}}, "combined"),
        ({"rwse": {"scales": [3]}}, "rwse"),
        ({"hks": {"scales": [3.0]}}, "hks"),
        ({"role": {"features": ["kcore"]}}, "role"),
        ({"normalize": "graph"}, "combined"),
        ({"dim": 60}, "combined"),
        ({"type": "rwse"}, "combined"),
        ({"type": "hks"}, "rwse"),
    ],
)
def test_every_setting_of_nodes_changes_the_encoding(change, of_type):
    before = compute_node_pe(*GRAPH, changed("node", type=of_type))
    after = compute_node_pe(*GRAPH, changed("node", **{"type": of_type, **change}))
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("change", "of_type"),
    [
        ({"num_buckets": 8}, "spd"),
        ({"max_distance": 2}, "spd"),
        ({"max_distance": 2}, "bfs"),
        ({"scales": [0.1, 1.0, 3.0]}, "diffusion"),
        ({"num_landmarks": 2}, "landmark"),
        ({"reduce": ["max"]}, "landmark"),
        ({"seed": 3}, "landmark"),
        ({"type": "bfs"}, "spd"),
        ({"type": "resistance"}, "spd"),
    ],
)
def test_every_setting_of_pairs_changes_the_encoding(change, of_type):
    before = compute_relative_pe(*GRAPH, changed("relative", type=of_type))
    after = compute_relative_pe(*GRAPH, changed("relative", **{"type": of_type, **change}))
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("kind", ["spd", "bfs", "diffusion", "resistance", "landmark"])
def test_the_width_that_is_promised_is_the_width_that_comes(kind):
    config = parse_pe_config({"relative": {"type": kind, "scales": [1.0, 2.0], "reduce": ["max"]}})
    assert compute_relative_pe(*GRAPH, config)[1].shape[1] == config.relative_dim


@pytest.mark.parametrize("alias", ["lap_pe", "lappe"])
def test_aliases(alias):
    assert parse_pe_config({"node": {"type": alias}}).node == NodePEConfig(type="lap")


@pytest.mark.parametrize("off", [{"enabled": False}, {"type": "none"}, {"type": "none", "dim": 8}])
def test_a_section_can_be_off(off):
    assert parse_pe_config({"node": off, "relative": {}}) == PEConfig(None, RelativePEConfig())


def test_a_section_that_is_absent_is_off():
    assert parse_pe_config({"node": {}}) == PEConfig(NodePEConfig(), None)
    assert parse_pe_config({}) == parse_pe_config(None) == PEConfig()


def test_a_section_alone_is_understood():
    alone = compute_node_pe(*GRAPH, {"type": "hks"})
    assert torch.equal(alone, compute_node_pe(*GRAPH, {"node": {"type": "hks"}}))
    assert torch.equal(alone, compute_node_pe(*GRAPH, NodePEConfig(type="hks")))
    pairs = compute_relative_pe(*GRAPH, {"type": "bfs"})
    for other in ({"relative": {"type": "bfs"}}, RelativePEConfig(type="bfs")):
        assert torch.equal(pairs[1], compute_relative_pe(*GRAPH, other)[1])


def test_a_configuration_of_omegaconf_is_understood():
    omegaconf = pytest.importorskip("omegaconf")
    assert parse_pe_config(omegaconf.OmegaConf.create(DEFAULT)) == parse_pe_config("default")


def test_the_caller_keeps_his_mapping():
    given = copy.deepcopy(DEFAULT)
    parse_pe_config(given)
    assert given == DEFAULT


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("mpse", "did you mean 'mspe'"),
        ({"nodes": {}}, "did you mean 'node'"),
        ({"node": {"rwes": {}}}, "did you mean 'rwse'"),
        ({"node": {"lap": {"kk": 3}}}, "did you mean 'k'"),
        ({"node": {"type": "lapp"}}, "did you mean 'lappe'"),
        ({"relative": {"type": "ressistance"}}, "did you mean 'resistance'"),
        ({"relative": {"typ": "spd"}}, "did you mean 'type'"),
        ({"node": {"normalize": "graphs"}}, "did you mean 'graph'"),
        ({"node": {"enabled": "yes"}}, "true or false"),
        ({"node": {"enabled": False, "dim": -1}}, "dim=-1"),
        ({"node": {"dim": 19}}, "20 columns"),
        ({"node": {"dim": True}}, "dim=True"),
        ({"node": {"lap": 3}}, "mapping"),
        ({"node": {"rwse": {"scales": "1"}}}, "scales"),
        ({"node": {"rwse": {"scales": [[1]]}}}, "scales"),
        ({"node": []}, "mapping"),
        ({"relative": {"num_buckets": 10**6}}, "num_buckets"),
        (3, "mapping"),
    ],
)
def test_what_is_wrong_is_named(config, words):
    with pytest.raises(ConfigError) as caught:
        parse_pe_config(config)
    assert words in str(caught.value)


def test_too_many_columns_name_both_numbers_and_where_they_come_from():
    with pytest.raises(ConfigError) as caught:
        parse_pe_config({"node": {"type": "combined", "dim": 32, "lap": {"k": 20}}})
    assert "dim=32" in str(caught.value)
    assert "48 columns (lap 20 + rwse 20 + hks 5 + role 3)" in str(caught.value)
