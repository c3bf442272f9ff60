"""The settings of graph runs: composed from the groups of the pack, checked, and what a rerun may change."""

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
from treadle.errors.arguments import check_least
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
"""Settings of scripts/train.py that the command takes as options."""

FREE = (
    "threads", "log_every", "training.epochs", "training.num_workers", "training.grad_clip",
    "training.mixed_precision", "training.early_stopping", "training.parallel", "training.capture", "training.buckets",
    "training.compile",
    "training.scheduler.warmup_epochs", "training.scheduler.min_lr", "dataset.root", "dataset.pe_cache_dir",
    "dataset.use_preprocessed_pe", "dataset.num_workers",
)  # fmt: skip
"""What a run may change on the way. All else is stored in its checkpoints or would make its history meaningless."""

RENAMED = {
    "optimizer_type": "training.optimizer.type", "scheduler_type": "training.scheduler.type",
    "loss_type": "training.loss", "patience": "training.early_stopping", "get_dataset": "dataset.name",
}  # fmt: skip
"""Arguments of the library -> settings, where the two have other names."""

_AT_LEAST_0 = ("lr", "weight_decay", "eps", "momentum")
_KINDS: dict[str, Any] = {
    "model.dropout": float, "model.attn_dropout": float | None, "model.drop_path_rate": float | None,
    "model.use_local": bool | None, "model.use_global": bool | None, "model.standardize": bool | None,
    "dataset.root": str, "dataset.pe_cache_dir": str | None, "dataset.use_preprocessed_pe": bool,
    "dataset.num_workers": int | None,
    **{f"training.optimizer.{name}": float | None for name in _AT_LEAST_0}, "training.optimizer.betas": list | None,
    "training.scheduler.warmup_epochs": int | None, "training.scheduler.step_size": int | None,
    "training.scheduler.warmup_offset": int | None,
    "training.scheduler.min_lr": float | None, "training.scheduler.gamma": float | None,
}  # fmt: skip
"""Of settings in sections whose keys are for others to know: what takes them compares or hands on without a look."""
RECIPE: Mapping[str, Any] = {
    "model.readout": None, "model.standardize": True, "model.mpnn_type": "gatedgcn", "model.hidden_dim": 56,
    "training.scheduler.warmup_offset": 1, "training.optimizer.lr": 2e-3,
    "pe.node.type": "rwse", "pe.node.dim": None, "pe.node.rwse.scales": list(range(1, 21)),
}  # fmt: skip
"""Defaults that are newer than some run folders; see :meth:`GraphsConfig.as_started`."""

_TASKS = ("regression", "classification", "multilabel", "edge_prediction")
_NONE_IS_A_CHOICE = ("pe.node.type", "pe.node.normalize", "pe.relative.type", "training.scheduler.type")
_OPEN = ("dataset.graph_params", "dataset.task_params")  # their keys are for the data set to know


@dataclass(frozen=True)
class TrainingConfig:
    """The section ``training``; `train/default.yaml` documents each key."""

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
        """How many shapes batches are padded into; None for no padding."""
        return 4 if self.buckets is None and self.capture is not False else self.buckets


@dataclass(frozen=True)
class GraphsConfig:
    """All settings of a graph run, as plain values.

    `dataset`, `pe` and `model` go to `get_dataset` and `get_model`, which use or refuse each key; a null in `dataset`,
    `model`, `training.optimizer` or `training.scheduler` leaves the value to them.

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
        if options.keys() <= vars(ModelOptions(num_features=1)).keys():  # get_model names unknown ones
            with as_settings("model", self.model):
                ModelOptions(num_features=1, **options)

    @property
    def encodings(self) -> dict[str, Any]:
        """The section ``pe``, without encodings of pairs where the kind of model has no attention to read them."""
        if self.model.get("name") != "mpnn":
            return self.pe
        return {name: section for name, section in self.pe.items() if name != "relative"}

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of `get_model` that are set; with statistics where they are wanted, for a checkpoint to bring."""
        options = given(self.model)
        if options.get("use_local") is False and options.get("mpnn_type") == RECIPE["model.mpnn_type"]:
            del options["mpnn_type"]  # the choice of the groups, which is of no use here
        return {**options, "statistics": True} if options.pop("standardize", False) else options

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> GraphsConfig:
        """Build the settings from nested plain values, as a configuration or a checkpoint has them.

        Raises:
            ConfigError: a key is unknown or missing, or a value is wrong.
        """
        # Of runs of before they were settings.
        added = {"parallel": None, "capture": False, "buckets": None, "compile": False}
        values = with_kinds(values)
        section = {**added, **_section(values, "training")}
        return from_nested(cls, {**values, "training": section}, complete=True)

    def as_started(self, stored: Mapping[str, Any], *, set_by_hand: Collection[str]) -> GraphsConfig:
        """Return these settings, with those of a run in the place of defaults that have changed since it was started.

        Args:
            stored: nested settings of the run; what it lacks is left out.
            set_by_hand: dotted keys that are kept as they are.
        """
        values, mine, its = copied(self.to_dict()), flat(self.to_dict()), flat(stored)
        for key in RECIPE.keys() - set(set_by_hand):
            if mine.get(key) != RECIPE[key]:  # chosen by a group
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
    """Return nested settings with those of open sections checked for their type; a number may stand for a text.

    Raises:
        ConfigError: a value is of the wrong type.

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
    """Return a section without its nulls, which leave a value to the code.

    Example:
        >>> given({"lr": 0.1, "eps": None})
        {'lr': 0.1}
    """
    return {key: value for key, value in section.items() if value is not None}


# -- texts of the command line ------------------------------------------------------------------------------------


def read_settings(settings: Sequence[str], device: str | None = None) -> GraphsConfig:
    """Return the settings of ``treadle train graphs`` with texts ``key=value`` applied; the later of two counts.

    Args:
        settings: ``model=gps`` chooses from a group, ``model.hidden_dim=64`` sets a value.
        device: has no influence on the defaults.

    Raises:
        ConfigError: a group, a choice or a key is unknown, or a value is wrong.
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
    """Change nested settings in place by those of a command line; return the same dict.

    Raises:
        ConfigError: a key is unknown, or a value is of another kind than its setting.
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
            refuse_unknown_setting(assignment.key.partition("[")[0], flat(values))
        # A key of an open section may be new, with or without the sign ``+``.
        added = is_open and assignment.sign == "=" and assignment.key not in _OPEN
        apply(values, [dataclasses.replace(assignment, new=added or assignment.new)], fit=fit)
    return values


def _kinds() -> dict[str, Any]:
    hints = {f"training.{name}": hint for name, hint in typing.get_type_hints(TrainingConfig).items()}
    return {**hints, **_KINDS, **dict.fromkeys(_NONE_IS_A_CHOICE, str)}
