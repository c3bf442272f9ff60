"""Detection of settings that a graph run would ignore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treadle.graphs import ModelOptions, parse_pe_config
from treadle.graphs.run_config import GraphsConfig
from treadle.runs.settings import refuse_idle

_OF_RELATIVE = {
    "spd": ("num_buckets", "max_distance"),
    "bfs": ("num_buckets", "max_distance"),
    "diffusion": ("scales",),
    "resistance": (),
    "landmark": ("num_landmarks", "reduce", "seed"),
}
_OF_OPTIMIZER = {"adamw": ("betas", "eps"), "adam": ("betas", "eps"), "sgd": ("momentum",)}
_OF_SCHEDULER = {
    "cosine_warmup": ("warmup_epochs", "warmup_offset", "min_lr"),
    "cosine": ("min_lr",),
    "linear": ("min_lr",),
    "step": ("step_size", "gamma"),
    "warmup": ("warmup_epochs", "warmup_offset"),
    "none": (),
}


def refuse_idle_settings(settings: Sequence[str], config: GraphsConfig, *, level: str, task_type: str) -> None:
    """Reject explicit settings that have no effect in combination with the others.

    The groups contain every key of a section, including those of other types, so only explicit settings can be
    mistakes.

    Args:
        settings: the given ``key=value`` strings.
        config: the settings composed from them.
        level: level of the data.
        task_type: task type of the data.

    Raises:
        ConfigError: a setting would have no effect.

    Example:
        >>> from treadle.graphs.run_config import read_settings
        >>> given = ["pe.node.type=rwse", "pe.node.lap.k=8"]
        >>> refuse_idle_settings(given, read_settings(given), level="graph", task_type="regression")
        Traceback (most recent call last):
        treadle.errors.ConfigError: pe.node.lap.k=8: has no effect, as pe.node.type is 'rwse'; leave it out
    """
    refuse_idle(settings, config.to_dict(), _idle(config, level, task_type))


def _idle(config: GraphsConfig, level: str, task_type: str) -> Iterator[tuple[str, str]]:
    """Yield the keys or sections that nothing reads, with the reason."""
    yield from _idle_encodings(config)
    for section, used in (("optimizer", _OF_OPTIMIZER), ("scheduler", _OF_SCHEDULER)):
        chosen = getattr(config.training, section).get("type")
        for key in {key for keys in used.values() for key in keys} - set(used.get(chosen, ())):
            yield f"training.{section}.{key}", f"training.{section}.type is {chosen!r}"
    for task in config.training.loss:
        if task != task_type:
            yield f"training.loss.{task}", f"the task of the data is {task_type!r}"
    if level != "graph":
        yield "model.readout", f"the targets of the data are those of {'pairs' if level == 'edge' else 'nodes'}"
    if task_type != "regression":
        yield "dataset.standardize", f"the task of the data is {task_type!r}"
    elif not config.model.get("standardize"):
        yield "dataset.standardize", "model.standardize is False"
    model = ModelOptions(num_features=1, **config.model_options)
    if not (model.has_attention or (model.use_local and model.mpnn_type == "gat")):
        yield "model.num_heads", "the model has no attention"
    if not model.use_local:
        yield "model.mpnn_type", "model.use_local is False"


def _idle_encodings(config: GraphsConfig) -> Iterator[tuple[str, str]]:
    read = parse_pe_config(config.pe)
    if read.relative is not None and config.encodings is not config.pe:
        yield "pe.relative", "model.name is 'mpnn', which has no attention"
    for name, section in (("node", read.node), ("relative", read.relative)):
        keys = config.pe.get(name, {})
        if section is None:
            switch = "enabled" if keys.get("enabled") is False else "type"
            for key in keys.keys() - {"enabled", switch}:
                yield f"pe.{name}.{key}", f"pe.{name}.{switch} is {keys[switch]!r}"
            continue
        used: Sequence[str] = list(read.node.blocks) if read.node is section else _OF_RELATIVE[section.type]
        for key in keys.keys() - {"enabled", "type", "dim", "normalize", *used}:
            yield f"pe.{name}.{key}", f"pe.{name}.type is {section.type!r}"
