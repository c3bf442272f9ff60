"""Conversion of astromodal weights and checkpoints.

Its transformer is :class:`CausalTransformerLM` with ``norm_first=False``; only the names differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from treadle.astro.model import CausalTransformerLM
from treadle.astro.schedule import WarmupCosine
from treadle.distributed import unwrap
from treadle.distributed.state_names import check_model_state
from treadle.engine import Engine
from treadle.errors import CheckpointError
from treadle.exchange.adapters import register_adapter, state_in_groups
from treadle.exchange.foreign import ForeignCheckpoint, cleaned

_RENAMED = (
    ("tok_emb.", "token_embedding."),
    ("type_emb.", "type_embedding."),
    ("pos_emb.", "position_embedding."),
    ("enc.layers.", "layers."),
    ("self_attn.in_proj_", "in_proj."),
    ("self_attn.out_proj.", "out_proj."),
)


def own_name(name: str) -> str:
    """Return the :class:`CausalTransformerLM` name of a weight of astromodal's transformer.

    Example:
        >>> own_name("enc.layers.0.self_attn.in_proj_weight"), own_name("ln.bias")
        ('layers.0.in_proj.weight', 'norm.bias')
    """
    for theirs, ours in _RENAMED:
        name = name.replace(theirs, ours)
    return f"norm.{name.removeprefix('ln.')}" if name.startswith("ln.") else name


def is_original(tree: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint tree was written by the trainer of astromodal.

    Example:
        >>> is_original({"model": {"tok_emb.weight": 0}, "global_step": 1})
        True
    """
    return "format" not in tree and "tok_emb.weight" in cleaned(tree.get("model") or {})


def adapt(model: CausalTransformerLM, found: ForeignCheckpoint, optimizer: Optimizer | None) -> ForeignCheckpoint:
    """Rename astromodal weights for a model; return other weights unchanged.

    Raises:
        CheckpointError: the model has pre-norm layers: the shapes would match, but it would compute a different
            function.
    """
    if "tok_emb.weight" not in found.model:
        return found
    state = found.optimizer
    if optimizer is not None and state is not None:
        state = _own_state(state, found.model, optimizer, model)
    return replace(found, model=_own_weights(model, found.model), optimizer=state)


def _own_weights(model: CausalTransformerLM, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if model.norm_first:
        raise CheckpointError(
            "these are weights of astromodal, whose layers normalise their sums: build the model with "
            "norm_first=False; with norm_first=True they would compute a different function"
        )
    return {own_name(name): value for name, value in weights.items()}


def _own_state(
    state: Mapping[str, Any], weights: Mapping[str, Any], optimizer: Optimizer, model: CausalTransformerLM
) -> dict[str, Any]:
    names = [own_name(name) for name in weights]
    counts = [len(group["params"]) for group in state["param_groups"]]
    if counts != [len(names)]:
        raise CheckpointError(
            f"optimizer: the groups of the file have {counts} parameters, that of astromodal's trainer {len(names)}; "
            "load without the optimizer"
        )
    return state_in_groups(state, [names], optimizer, model)


def own_tree(tree: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Convert an astromodal checkpoint to a tree that a run of this pack can resume from.

    In astromodal ``global_step`` counts micro-batches and determines the learning rate; here the schedule advances with
    applied steps.

    Raises:
        CheckpointError: the model does not match or has pre-norm layers, or the optimizer has different groups.
    """
    model: Any = unwrap(engine.model)
    theirs = cleaned(tree["model"])
    weights = _own_weights(model, theirs)
    check_model_state(model, weights)
    micro_steps = int(tree.get("global_step", 0))
    applied = micro_steps // engine.accumulation_steps
    own: dict[str, Any] = {
        "model": weights,
        "optimizer": _at_rate(_own_state(tree["optimizer"], theirs, engine.optimizer, model), engine, applied),
        "scheduler": None if engine.lr_scheduler is None else _moved(engine.lr_scheduler.state_dict(), applied),
        "scaler": tree.get("scaler"),
        "epoch": int(tree.get("epoch", 0)),
        "global_step": applied,
        "progress": {"applied_steps": applied, "micro_steps": micro_steps},
        "selection": None,
        "history": [],
        "hooks": {},
        "config": {
            key: value for key, value in (tree.get("config") or {}).items() if key not in ("loss_config", "training")
        },
    }
    return own


def _at_rate(state: dict[str, Any], engine: Engine, applied: int) -> dict[str, Any]:
    """Return optimizer state with the schedule's rates of the next step; the file has those of its last micro-batch."""
    scheduler = engine.lr_scheduler
    if not isinstance(scheduler, WarmupCosine):
        return state
    rates = scheduler.rates_after(applied)
    groups = [{**group, "lr": rate} for group, rate in zip(state["param_groups"], rates, strict=True)]
    return {**state, "param_groups": groups}


def _moved(state: dict[str, Any], applied: int) -> dict[str, Any]:
    return {**state, "last_epoch": applied, "_step_count": applied + 1}


register_adapter(CausalTransformerLM, adapt)
