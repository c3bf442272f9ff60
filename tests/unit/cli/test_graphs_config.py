"""The settings of graph runs: the groups fit the code, and every key is used or refused."""

from __future__ import annotations

from importlib.resources import files

import pytest
from omegaconf import OmegaConf

from treadle.cli.graphs_config import CONF, FREE, GraphsConfig, read_settings
from treadle.cli.settings import flat
from treadle.errors import ConfigError
from treadle.graphs import dataset_names
from treadle.graphs.encodings import PE_PRESETS, parse_pe_config
from treadle.graphs.model_options import ModelOptions


def choices(group: str, folder: str = "") -> list[str]:
    entries = files(CONF).joinpath(group, folder).iterdir()
    names = [entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml")]
    return sorted(folder + name for name in names if not name.startswith("_"))


def test_every_data_set_has_a_group_of_its_own() -> None:
    families = [name.replace("/", "_") for name in choices("dataset", "synthetic/")]
    assert sorted([*choices("dataset"), *families]) == dataset_names()
    for choice in (*choices("dataset"), *choices("dataset", "synthetic/")):
        stored = OmegaConf.create(files(CONF).joinpath("dataset", f"{choice}.yaml").read_text())
        assert stored["name"] == choice.replace("/", "_")


@pytest.mark.parametrize("choice", ["zinc", "zinc_clean_leads", "synthetic/grid_3d"])
def test_the_shared_keys_of_data_sets_are_in_their_section(choice: str) -> None:
    dataset = read_settings([f"dataset={choice}"]).dataset
    assert {"name", "root", "splits", "seed", "pe_cache_dir", "use_preprocessed_pe", "num_workers"} <= dataset.keys()
    assert ("num_graphs" in dataset) == choice.startswith("synthetic/")


def test_the_groups_of_encodings_are_the_presets() -> None:
    assert choices("pe") == sorted(PE_PRESETS)
    for name in PE_PRESETS:
        assert parse_pe_config(read_settings([f"pe={name}"]).pe) == parse_pe_config(name)


def test_every_option_of_a_model_is_a_key_and_every_group_builds_one() -> None:
    of_the_data = {"num_features", "num_classes", "num_edge_features", "node_pe_dim", "relative_pe_dim", "task"}
    for choice in choices("model"):
        model = read_settings([f"model={choice}"]).model
        assert model.keys() == vars(ModelOptions(num_features=1)).keys() - of_the_data
        ModelOptions(num_features=1, **{key: value for key, value in model.items() if value is not None})


def test_the_keys_of_the_seed_document_hold() -> None:
    training = read_settings(["train=default"]).to_dict()["training"]
    assert (training["epochs"], training["batch_size"], training["grad_clip"]) == (100, 32, 1.0)
    assert training["mixed_precision"] is False
    assert {key: training["optimizer"][key] for key in ("type", "lr", "weight_decay")} == {
        "type": "adamw", "lr": 1e-4, "weight_decay": 0.01,
    }  # fmt: skip
    assert {key: training["scheduler"][key] for key in ("type", "warmup_epochs", "min_lr")} == {
        "type": "cosine_warmup", "warmup_epochs": 10, "min_lr": 1e-6,
    }  # fmt: skip


def test_what_may_change_on_the_way_are_settings() -> None:
    assert set(FREE) <= flat(read_settings([]).to_dict()).keys()


def test_settings_survive_a_checkpoint_and_a_yaml_file() -> None:
    config = read_settings(["pe=mspe", "dataset=synthetic/ring", "dataset.graph_params.num_nodes=[5,9]"])
    assert GraphsConfig.from_values(config.to_dict()) == config
    assert GraphsConfig.from_values(OmegaConf.to_container(OmegaConf.create(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("texts", "key", "value"),
    [
        (["seed=1", "seed=2"], "seed", 2),
        (["model=gps", "model=light"], "model.num_layers", 4),
        (["training.grad_clip=None"], "training.grad_clip", None),
        (["training.loss.regression=null"], "training.loss.regression", None),
        (["training.optimizer.lr=1e-3"], "training.optimizer.lr", 1e-3),
        (["training.epochs=7", "train=default"], "training.epochs", 7),
        (["training.class_weights=[1, 2.5]"], "training.class_weights", [1, 2.5]),
        (["dataset=synthetic/tree", "dataset.task_params={num_pairs: 3}"], "dataset.task_params.num_pairs", 3),
        (["dataset='nci'"], "dataset.name", "nci"),
        (["pe.node.role.features=['degree']"], "pe.node.role.features", ["degree"]),
    ],
)
def test_a_text_sets_one_value(texts: list[str], key: str, value: object) -> None:
    assert flat(read_settings(texts).to_dict())[key] == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dataset=synthetic_tree", "dataset=synthetic_tree: did you mean 'synthetic/tree'"),
        ("pe=defualt", "did you mean 'default'"),
        ("model.hiden_dim=3", "did you mean 'model.hidden_dim'"),
        ("lr=3", "did you mean 'training.optimizer.lr'"),
        ("pe.node.foo=1", "unknown setting 'pe.node.foo'"),
        ("training=3", "training: is a section"),
        ("training.epochs=many", "training.epochs=many: must be int"),
        ("training.epochs=0", "training.epochs=0: must be at least 1"),
        ("training.num_workers=-1", "training.num_workers=-1"),
        ("training.class_weights=3", "training.class_weights=3: must be list"),
        ("threads=0", "threads=0"),
        ("seed=0,1", "seed=0,1"),
        ("seed=[1", "values are written as Hydra reads them"),
        ("seed", "key=value"),
        ("log_dir=x", "--out"),
        ("device=cpu", "--device"),
    ],
)
def test_a_wrong_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings([text])
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"foo": 1}, "unknown setting 'settings.foo'"),
        ({"training": {"epochs": 3}}, "training.batch_size: is missing"),
        ({"training": 3}, "training=3: must be a section"),
        ({"training": {**read_settings([]).to_dict()["training"], "loss": {"foo": "mae"}}}, "unknown key 'foo'"),
        ({"seed": "1"}, "settings.seed=1: must be int"),
    ],
)
def test_stored_settings_of_another_form_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GraphsConfig.from_values({**read_settings([]).to_dict(), **change})
    assert words in str(refused.value)
