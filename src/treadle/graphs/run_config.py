"""Settings of graph runs: composition from config groups, validation, and those that a rerun may change."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.capture.compile import check_compile
from treadle.config.grammar import Assignment, fitted, parse
from treadle.config.overrides import apply
from treadle.config.sections import as_settings, from_nested, refuse_unknown_setting, typed
from treadle.config.tree import copied
from treadle.engine.settings import check_capture
from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import check_above, check_least
from treadle.faces.parallel import as_parallel
from treadle.graphs.groups import GROUPS, compose
from treadle.graphs.model_options import ModelOptions
from treadle.runs.settings import check_seeds, flat

FLAGS = {
    "device": "--device",
    "resume": "--resume or --no-resume",
    "log_dir": "--out",
    "experiment_name": "--out",
    "checkpoint": "--out, the folder of the run to resume",
}  # fmt: skip
"""Settings of scripts/train.py that are command-line options."""

FREE = (
    "threads", "log_every", "training.epochs", "training.num_workers", "training.grad_clip",
    "training.mixed_precision", "training.early_stopping", "training.parallel", "training.capture", "training.buckets",
    "training.compile",
    "training.scheduler.warmup_epochs", "training.scheduler.min_lr", "dataset.root", "dataset.pe_cache_dir",
    "dataset.use_preprocessed_pe", "dataset.num_workers",
)  # fmt: skip
"""Settings that a resumed run may change; others are stored in checkpoints or would make the history meaningless."""

RENAMED = {
    "optimizer_type": "training.optimizer.type", "scheduler_type": "training.scheduler.type",
    "loss_type": "training.loss", "patience": "training.early_stopping", "get_dataset": "dataset.name",
}  # fmt: skip
"""Library argument -> setting, where the names differ."""

_AT_LEAST_0 = ("lr", "weight_decay", "eps", "momentum")
_KINDS: dict[str, Any] = {
    "model.dropout": float, "model.attn_dropout": float | None, "model.drop_path_rate": float | None,
    "model.use_local": bool | None, "model.use_global": bool | None, "model.standardize": bool | None,
    "dataset.root": str, "dataset.pe_cache_dir": str | None, "dataset.use_preprocessed_pe": bool,
    "dataset.num_workers": int | None, "dataset.standardize": bool | None,
    **{f"training.optimizer.{name}": float | None for name in _AT_LEAST_0}, "training.optimizer.betas": list | None,
    "training.scheduler.warmup_epochs": int | None, "training.scheduler.step_size": int | None,
    "training.scheduler.warmup_offset": int | None,
    "training.scheduler.min_lr": float | None, "training.scheduler.gamma": float | None,
}  # fmt: skip
"""Types of settings in open sections, whose consumers compare or forward values without checking them."""
RECIPE: Mapping[str, Any] = {
    "dataset.standardize": True,
    "model.readout": None, "model.standardize": True, "model.mpnn_type": "gatedgcn", "model.hidden_dim": 56,
    "training.scheduler.warmup_offset": 1, "training.optimizer.lr": 2e-3,
    "pe.node.type": "rwse", "pe.node.dim": None, "pe.node.rwse.scales": list(range(1, 21)),
}  # fmt: skip
"""Defaults that are newer than some run folders; see :meth:`GraphsConfig.as_started`."""

_TASKS = ("regression", "classification", "multilabel", "edge_prediction")
_NONE_IS_A_CHOICE = ("pe.node.type", "pe.node.normalize", "pe.relative.type", "training.scheduler.type")
_OPEN = ("dataset.graph_params", "dataset.task_params")  # the data set defines their keys


@dataclass(frozen=True)
class TrainingConfig:
    """Section ``training``; `train/default.yaml` documents each key."""

    epochs: int
    batch_size: int
    accumulation_steps: int
    num_workers: int
    grad_clip: float | None
    mixed_precision: bool | str | None
    loss: dict[str, str | None]
    class_weights: list[float] | None
    metric_for_best: str
    minimize_metric: bool | None
    early_stopping: int | None
    parallel: str | None
    capture: bool | str
    compile: bool | str
    buckets: int | None
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]

    def __post_init__(self) -> None:
        check_least(
            1, training__epochs=self.epochs, training__batch_size=self.batch_size, training__buckets=self.buckets,
            training__accumulation_steps=self.accumulation_steps, training__early_stopping=self.early_stopping,
        )  # fmt: skip
        check_least(0, training__num_workers=self.num_workers, training__grad_clip=self.grad_clip)
        numbers = {f"training__optimizer__{name}": self.optimizer.get(name) for name in _AT_LEAST_0}
        check_least(0, **numbers)
        check_above(0, training__optimizer__lr=self.optimizer.get("lr"))
        betas = self.optimizer.get("betas")
        if betas is not None and not (len(betas) == 2 and all(0 <= float(beta) < 1 for beta in betas)):
            raise ConfigError(
                f"={betas}: must be two numbers in [0, 1), such as [0.9,0.999]", argument="training.optimizer.betas"
            )
        refuse_unknown("training.loss", self.loss, _TASKS)
        as_parallel(self.parallel)
        check_capture(self.capture)
        check_compile(self.compile, name="training.compile")

    @property
    def num_buckets(self) -> int | None:
        """Number of padded batch shapes; None for no padding."""
        return 4 if self.buckets is None and self.capture is not False else self.buckets


@dataclass(frozen=True)
class GraphsConfig:
    """All settings of a graph run as plain values.

    `dataset`, `pe` and `model` are passed to `get_dataset` and `get_model`, which use or reject each key; a null in
    `dataset`, `model`, `training.optimizer` or `training.scheduler` selects their default.

    Example:
        >>> read_settings(["model.hidden_dim=32"]).model["hidden_dim"]
        32
    """

    training: TrainingConfig
    model: dict[str, Any]
    dataset: dict[str, Any]
    pe: dict[str, Any]
    seed: int
    deterministic: bool
    threads: int | None
    log_every: int

    def __post_init__(self) -> None:
        check_least(1, threads=self.threads)
        check_least(0, dataset__num_workers=self.dataset.get("num_workers"))
        check_seeds(seed=self.seed)
        options = self.model_options
        if options.keys() <= vars(ModelOptions(num_features=1)).keys():  # get_model reports unknown ones
            with as_settings("model", self.model):
                ModelOptions(num_features=1, **options)

    @property
    def encodings(self) -> dict[str, Any]:
        """Section ``pe``, without pair encodings if the model has no attention to read them."""
        if self.model.get("name") != "mpnn":
            return self.pe
        return {name: section for name, section in self.pe.items() if name != "relative"}

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of `get_model` that are set, with statistics left to a checkpoint if requested."""
        options = given(self.model)
        if options.get("use_local") is False and options.get("mpnn_type") == RECIPE["model.mpnn_type"]:
            del options["mpnn_type"]  # the choices of groups, not used here
        return {**options, "statistics": True} if options.pop("standardize", False) else options

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> GraphsConfig:
        """Build the settings from the nested plain values of a configuration or a checkpoint.

        Raises:
            ConfigError: a key is unknown or missing, or a value is invalid.
        """
        # For runs from before these settings existed.
        added = {"parallel": None, "capture": False, "buckets": None, "compile": False}
        values = with_kinds(values)
        section = {**added, **_section(values, "training")}
        return from_nested(cls, {**values, "training": section}, complete=True)

    def as_started(self, stored: Mapping[str, Any], *, set_by_hand: Collection[str]) -> GraphsConfig:
        """Return these settings, restoring a run's values for defaults that have changed since it was started.

        Args:
            stored: nested settings of the run; missing ones are ignored.
            set_by_hand: dotted keys to keep unchanged.
        """
        values, mine, its = copied(self.to_dict()), flat(self.to_dict()), flat(stored)
        for key in RECIPE.keys() - set(set_by_hand):
            if mine.get(key) != RECIPE[key]:  # selected by a group
                continue
            *path, name = key.split(".")
            section = values
            for part in path:
                section = section[part]
            if key in its:
                section[name] = its[key]
            else:
                section.pop(name, None)
        return self.from_values(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested plain values."""
        return {**vars(self), "training": dict(vars(self.training))}


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    if not isinstance(section, Mapping):
        raise ConfigError("must be a section of settings", argument=name, value=section)
    return section


def with_kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the types in open sections of nested settings and return them; a number is converted to a string.

    Raises:
        ConfigError: a value has the wrong type.

    Example:
        >>> with_kinds({"dataset": {"root": 2024}})
        {'dataset': {'root': '2024'}}
    """
    made = copied(dict(values))
    for key, kind in _KINDS.items():
        *path, name = key.split(".")
        section: Any = made
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            is_number = isinstance(section[name], (int, float)) and not isinstance(section[name], bool)
            section[name] = typed(section[name], kind, key=key, text=str(section[name]) if is_number else None)
    return made  # type: ignore[no-any-return]


def given(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without its nulls, which select the default in code.

    Example:
        >>> given({"lr": 0.1, "eps": None})
        {'lr': 0.1}
    """
    return {key: value for key, value in section.items() if value is not None}


# -- command-line strings -----------------------------------------------------------------------------------------


def read_settings(settings: Sequence[str], device: str | None = None) -> GraphsConfig:
    """Return the settings of ``treadle train graphs`` with ``key=value`` strings applied; later ones win.

    Args:
        settings: ``model=gps`` chooses from a group, ``model.hidden_dim=64`` sets a value.
        device: does not affect the defaults.

    Raises:
        ConfigError: a group, a choice or a key is unknown, or a value is invalid.
        ImportError: OmegaConf is not installed; the message names the extra.
    """
    choices: dict[str, str] = {}
    assignments: list[Assignment] = []
    for text in settings:
        before, equals, _ = text.partition("=")
        if not equals or not before.strip("+ "):
            raise ConfigError(f"{text!r}: settings are written key=value, for example model=gps or training.epochs=5")
        found = parse(text)
        if found.key in FLAGS:
            raise ConfigError(f"is not set this way; use {FLAGS[found.key]}", argument=found.key)
        if found.key in GROUPS and found.sign == "=":
            choices[found.key] = found.raw.strip().strip("'\"")
        else:
            assignments.append(found)
    return GraphsConfig.from_values(with_assignments(compose(choices), assignments))


def with_assignments(values: dict[str, Any], assignments: Iterable[Assignment]) -> dict[str, Any]:
    """Apply command-line assignments to nested settings in place; return the same dict.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type for its setting.
    """
    kinds = _kinds()

    def fit(assignment: Assignment, current: Any) -> Any:
        kind = kinds.get(assignment.key)
        if kind is None:
            return fitted(assignment, current)
        return typed(assignment.value, kind, key=assignment.key, text=assignment.raw.strip())

    for assignment in assignments:
        is_open = assignment.key.startswith(_OPEN)
        if not is_open:
            own_data = "dataset=smiles_csv dataset.file=FILE reads molecules of your own"
            refuse_unknown_setting(assignment.key.partition("[")[0], flat(values), own_data)
        # A key of an open section may be new, with or without ``+``.
        added = is_open and assignment.sign == "=" and assignment.key not in _OPEN
        apply(values, [dataclasses.replace(assignment, new=added or assignment.new)], fit=fit)
    return values


def _kinds() -> dict[str, Any]:
    hints = {f"training.{name}": hint for name, hint in typing.get_type_hints(TrainingConfig).items()}
    return {**hints, **_KINDS, **dict.fromkeys(_NONE_IS_A_CHOICE, str)}
