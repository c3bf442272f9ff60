"""The settings of graph runs: the groups fit the code, and every key is used or refused."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from treadle.errors import ConfigError
from treadle.graphs import PaddedGraphBatch, dataset_names, get_optimizer, get_scheduler
from treadle.graphs.encodings import PE_PRESETS, parse_pe_config
from treadle.graphs.groups import CONF
from treadle.graphs.idle_settings import _OF_OPTIMIZER, _OF_SCHEDULER, refuse_idle_settings
from treadle.graphs.model_options import ModelOptions
from treadle.graphs.run_build import build_trainer, prepare_data, train_loader
from treadle.graphs.run_config import FREE, RECIPE, GraphsConfig, read_settings
from treadle.runs.settings import changes, flat


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
        assert model.keys() == vars(ModelOptions(num_features=1)).keys() - of_the_data - {"statistics"} | {
            "standardize"
        }
        ModelOptions(num_features=1, **read_settings([f"model={choice}"]).model_options)


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
        (["training.scheduler.type=none", "pe.node.normalize=none"], "training.scheduler.type", "none"),
        (["pe.node.type=none"], "pe.node.type", "none"),
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
        ("seed=[1", "seed is 42, a number, and '[1' is a string"),
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
        ({"foo": 1}, "unknown key 'foo'"),
        ({"training": {"epochs": 3}}, "training.batch_size: is missing"),
        ({"training": 3}, "training=3: must be a section"),
        ({"training": {**read_settings([]).to_dict()["training"], "loss": {"foo": "mae"}}}, "unknown key 'foo'"),
        ({"seed": "1"}, "seed='1': must be int"),
    ],
)
def test_stored_settings_of_another_form_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GraphsConfig.from_values({**read_settings([]).to_dict(), **change})
    assert words in str(refused.value)


@cache
def composed(group: str) -> dict[str, Any]:
    return read_settings([group] if group else []).to_dict()


def quickly(texts: list[str]) -> GraphsConfig:
    """Return the settings read from choices of encodings and of values, in one call, since Hydra is slow."""
    (group,) = [text for text in texts if text.startswith("pe=")] or [""]
    values = OmegaConf.create(composed(group))
    merged = OmegaConf.merge(values, OmegaConf.from_dotlist([t.lstrip("+") for t in texts if t != group]))
    return GraphsConfig.from_values(OmegaConf.to_container(merged))


PAIRS = {"level": "edge", "task_type": "regression"}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["pe=light", "pe.node.lap.k=8"], "pe.node.lap.k=8: has no effect, as pe.node.type is 'rwse'"),
        (["pe=light", "pe.node.rwse.scales=[2,4]"], None),
        (["pe.node.type=combined", "pe.node.lap.k=8", "pe.node.normalize=graph"], None),
        (["pe.node.lap.k=8"], "as pe.node.type is 'rwse'"),
        (["model.name=mpnn", "pe.relative.max_distance=5"], "as model.name is 'mpnn', which has no attention"),
        (["model.use_local=false", "model.mpnn_type=gatedgcn"], "as model.use_local is False"),
        (["model.use_local=false"], None),
        (["pe=none", "pe.node.dim=64"], "as pe.node.enabled is False"),
        (["pe=none", "pe.node.enabled=true"], None),
        (["pe.relative.type=none", "pe.relative.num_buckets=8"], "as pe.relative.type is 'none'"),
        (["pe.relative.type=none"], None),
        (["pe.relative.scales=[1.0]"], "as pe.relative.type is 'spd'"),
        (["pe.relative.type=diffusion", "pe.relative.scales=[1.0]"], None),
        (["pe.relative.seed=3"], "as pe.relative.type is 'spd'"),
        (["pe.relative.type=landmark", "pe.relative.seed=3"], None),
        (["training.optimizer.momentum=0.5"], "as training.optimizer.type is 'adamw'"),
        (["training.optimizer.momentum=null"], None),
        (["training.optimizer.type=sgd", "training.optimizer.eps=1e-6"], "as training.optimizer.type is 'sgd'"),
        (["training.scheduler.step_size=3"], "as training.scheduler.type is 'cosine_warmup'"),
        (["training.scheduler.type=step", "training.scheduler.gamma=0.3", "training.scheduler.step_size=3"], None),
        (["training.scheduler.type=none", "training.scheduler.min_lr=0.1"], "as training.scheduler.type is 'none'"),
        (["training.loss.multilabel=bce"], "as the task of the data is 'regression'"),
        (["training.loss.regression=mae"], None),
        (["model.readout=max"], "as the targets of the data are those of pairs"),
        (["model.name=mpnn", "model.num_heads=2"], "as the model has no attention"),
        (["model.name=mpnn", "model.mpnn_type=gat", "model.num_heads=2"], None),
        (["+pe.relative.reduce=[min]"], "pe.relative.reduce=['min']"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(texts: list[str], words: str | None) -> None:
    config = quickly(texts)
    if words is None:
        refuse_idle_settings(texts, config, **PAIRS)
        return
    with pytest.raises(ConfigError) as refused:
        refuse_idle_settings(texts, config, **PAIRS)
    assert words in str(refused.value)


def test_what_only_some_types_read_is_what_they_are_changed_by() -> None:
    """The table of optimizers and schedules, against what they do with a setting."""
    model = torch.nn.Linear(2, 2)
    for kind, used in _OF_OPTIMIZER.items():
        plain = get_optimizer(model, kind).defaults
        for key, value in {"betas": (0.5, 0.6), "eps": 0.1, "momentum": 0.5}.items():
            assert (get_optimizer(model, kind, **{key: value}).defaults != plain) == (key in used)
    for kind, used in _OF_SCHEDULER.items():
        for key, value in {
            "warmup_epochs": 3,
            "warmup_offset": 1,
            "min_lr": 1e-5,
            "step_size": 2,
            "gamma": 0.5,
        }.items():
            assert (rates(kind, {key: value}) != rates(kind, {})) == (key in used), (kind, key)


def rates(kind: str, settings: dict[str, Any]) -> list[float]:
    optimizer = get_optimizer(torch.nn.Linear(2, 2), "sgd", lr=1e-3)
    scheduler = get_scheduler(optimizer, kind, total_epochs=40, **settings)
    found = []
    for _ in range(35):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


def test_capture_pads_batches_into_a_few_shapes_and_other_runs_are_as_they_were(tmp_path: Any) -> None:
    assert read_settings([]).training.num_buckets is None
    small = [
        "dataset=synthetic/tree", "dataset.num_graphs=24", f"dataset.root={tmp_path}", "pe=none", "model.hidden_dim=8",
        "training.batch_size=4", "training.capture=auto", "training.epochs=1",
    ]  # fmt: skip
    config = read_settings(small)
    data = prepare_data(config)
    batches = list(train_loader(config, data))
    assert {type(batch) for batch in batches} == {PaddedGraphBatch}
    assert len({(len(batch.x), batch.edge_index.shape[1]) for batch in batches}) <= config.training.num_buckets == 4
    trainer = build_trainer(config, data, device=torch.device("cpu"))
    assert trainer._engine.capture == "auto"
    history = trainer.fit(train_loader(config, data), epochs=1)
    assert 0 < history["train"][0]["padding"] < 1
    with pytest.raises(ConfigError, match=r"training\.buckets=0: must be at least 1"):
        read_settings(["training.buckets=0"])
    with pytest.raises(ConfigError, match="capture='often': use True, False or 'auto'"):
        read_settings(["training.capture=often"])


FORMER = {
    "model.readout": "mean", "model.mpnn_type": "gin", "model.hidden_dim": 64, "training.optimizer.lr": 1e-3,
    "pe.node.type": "combined", "pe.node.dim": 32, "pe.node.rwse.scales": [1, 2, 4, 8, 16],
}  # fmt: skip


def former() -> dict[str, Any]:
    """Settings of a run of before the recipe, as its folder has them."""
    values = read_settings([]).to_dict()
    del values["model"]["standardize"], values["training"]["scheduler"]["warmup_offset"]
    for key, value in FORMER.items():
        *path, name = key.split(".")
        section = values
        for part in path:
            section = section[part]
        section[name] = value
    return values


def test_the_recipe_is_what_the_quick_groups_compose() -> None:
    known = {**flat(read_settings(["dataset=smiles_csv"]).to_dict()), **flat(read_settings([]).to_dict())}
    assert {key: known[key] for key in RECIPE} == RECIPE


def test_a_run_of_before_keeps_the_defaults_that_it_was_started_with() -> None:
    stored, now = former(), read_settings([])
    started = now.as_started(stored, set_by_hand=())
    assert changes(stored, started.to_dict()) == {}
    assert started.as_started(started.to_dict(), set_by_hand=()).to_dict() == started.to_dict()
    assert now.as_started(started.to_dict(), set_by_hand=()).to_dict() == started.to_dict()
    assert "statistics" not in started.model_options
    by_hand = now.as_started(stored, set_by_hand=["model.mpnn_type"])
    assert changes(stored, by_hand.to_dict()) == {"model.mpnn_type": ("gin", "gatedgcn")}
    light = read_settings(["pe=light"])
    assert light.as_started({**stored, "pe": light.pe}, set_by_hand=()).pe == light.pe


def test_a_run_of_today_is_not_changed_by_what_it_stored() -> None:
    now = read_settings(["pe=none", "model=gps"])
    assert now.as_started(now.to_dict(), set_by_hand=()).to_dict() == now.to_dict()


def test_message_passing_alone_has_no_encodings_of_pairs() -> None:
    assert set(read_settings(["model=gatedgcn"]).encodings) == {"node"}
    assert set(read_settings([]).encodings) == {"node", "relative"}
