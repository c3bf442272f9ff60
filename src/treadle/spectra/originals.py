"""Conversion of chemomae weights and checkpoints.

Its two versions are different models: 0.1 (a token per channel) is :class:`ChemoMAE`, 0.2 (a token per patch) is
:class:`PatchMAE`. Each computes the same function as the original, so only names need converting. chemomae stores
optimizer state by position, in the order of its parameters; here it is matched by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.distributed import unwrap
from treadle.distributed.state_names import check_model_state
from treadle.engine import Engine
from treadle.engine.best import BestRule
from treadle.errors import CheckpointError
from treadle.exchange.adapters import register_adapter, shaped_like, state_in_groups
from treadle.exchange.foreign import ForeignCheckpoint, cleaned
from treadle.seed import RngState
from treadle.spectra.model import ChemoMAE

_RENAMED = (
    ("encoder.encoder.layers.", "encoder.layers."),
    ("self_attn.in_proj_weight", "in_proj.weight"),
    ("self_attn.in_proj_bias", "in_proj.bias"),
    ("self_attn.out_proj.", "out_proj."),
    ("decoder.net.", "decoder."),
)


def own_name(name: str) -> str:
    """Return the :class:`ChemoMAE` name of a weight of chemomae 0.1.

    Example:
        >>> own_name("encoder.encoder.layers.0.self_attn.in_proj_bias")
        'encoder.layers.0.in_proj.bias'
    """
    for theirs, ours in _RENAMED:
        name = name.replace(theirs, ours)
    return name


def is_original(tree: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint tree was written by a chemomae trainer of either version.

    Example:
        >>> is_original({"model": {}, "ema_decay": 0.999, "amp": {"enabled": False}, "history": []})
        True
    """
    return "format" not in tree and {"model", "ema_decay", "amp", "history"} <= set(tree)


def adapt_channels(model: ChemoMAE, found: ForeignCheckpoint, optimizer: Optimizer | None) -> ForeignCheckpoint:
    """Convert chemomae 0.1 weights to the names and shapes of :class:`ChemoMAE`; return others unchanged."""
    if not {"decoder.net.weight", "encoder.token_proj.weight"} <= set(found.model):
        return found
    order = list(found.model)
    state = found.optimizer
    if optimizer is not None and state is not None:
        state = by_live_groups(state, [own_name(name) for name in order], decays_0(order), optimizer, model)
    return replace(found, model=own_weights(model, found.model), optimizer=state)


def own_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to the names of a model, and to its shapes if only dimensions of size 1 differ.

    Fixed positions, which chemomae computes and does not store, are taken from the model.
    """
    live = model.state_dict()
    renamed = {own_name(name) if own_name(name) in live else name: value for name, value in weights.items()}
    for name, buffer in model.named_buffers():
        renamed.setdefault(name, buffer)
    return {name: shaped_like(value, live.get(name)) for name, value in renamed.items()}


def decays_0(names: Sequence[str]) -> list[bool]:
    """Return whether chemomae's optimizer decays each parameter: all but biases, norms, CLS token and positions.

    chemomae identifies a bias by ``.bias``, so the attention input bias, ``in_proj_bias``, decays.

    Example:
        >>> decays_0(["encoder.cls_token", "to_latent.weight", "layers.0.norm1.weight", "self_attn.in_proj_bias"])
        [False, True, False, True]
    """
    special = ("cls_token", "pos_embed", ".norm")
    return [not (name.endswith(".bias") or any(word in name for word in special)) for name in names]


def by_live_groups(
    state: Mapping[str, Any], names: Sequence[str], decayed: Sequence[bool], optimizer: Optimizer, model: nn.Module
) -> dict[str, Any]:
    """Convert the state of a chemomae optimizer to the parameter groups of a live one, by name.

    Group settings, such as the learning rate, come from the group with the same index in the file.

    Args:
        state: parameters numbered in the order of ``names``, group by group.
        names: names of the file's parameters in the model.
        decayed: whether chemomae's ``build_optimizer`` puts each into its first group.
        optimizer: the live optimizer.
        model: the model whose parameters it optimizes.

    Raises:
        CheckpointError: the groups of the file are neither those of ``build_optimizer`` nor a single one.
    """
    live = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    order = [(name, decays) for name, decays in zip(names, decayed, strict=True) if name in live]
    groups = [[name for name, decays in order if decays], [name for name, decays in order if not decays]]
    counts = [len(group["params"]) for group in state["param_groups"]]
    if counts == [len(order)]:
        groups = [[name for name, _ in order]]
    groups = [group for group in groups if group]
    if counts != [len(group) for group in groups]:
        raise CheckpointError(
            f"optimizer: the groups of the file have {counts} parameters, those of chemomae's build_optimizer "
            f"{[len(group) for group in groups]}; load without the optimizer, or write its groups with param_names"
        )
    return state_in_groups(state, groups, optimizer, model)


# -- checkpoints --------------------------------------------------------------------------------------------------


def own_tree(tree: Mapping[str, Any], engine: Engine, rule: BestRule | None, extension_key: str) -> dict[str, Any]:
    """Convert a chemomae checkpoint to a tree that a run of this pack can resume from.

    The count of epochs without improvement, which chemomae 0.1 does not store, is derived from the history. The random
    state comes from the file if it has one; files of 0.1 do not.

    Args:
        tree: contents of the file.
        engine: engine of the resuming run.
        rule: its best-checkpoint rule, or None.
        extension_key: key in the hook state for the ``checkpoint_extra_state`` of 0.2.

    Raises:
        CheckpointError: the weights are of a different model, or the optimizer groups are not chemomae's.
    """
    model, weights = unwrap(engine.model), cleaned(tree["model"])
    check_model_state(model, own_weights(model, weights))
    order = [name for name in weights if own_name(name) in dict(model.named_parameters()) or name in model.state_dict()]
    names = [name if name in model.state_dict() else own_name(name) for name in order]
    progress = tree.get("progress") or {}
    applied = int(progress.get("optimizer_updates", _applied_steps(tree)))
    history = [_own_record(record) for record in tree["history"]]
    own: dict[str, Any] = {
        "model": own_weights(model, weights),
        "optimizer": by_live_groups(tree["optimizer"], names, decays_0(order), engine.optimizer, model),
        "scheduler": _own_schedule(tree.get("scheduler"), engine.lr_scheduler),
        "scaler": tree.get("scaler"),
        "ema": _own_average(tree, weights, model, applied),
        "epoch": int(tree["epoch"]),
        "global_step": int(progress.get("attempted_steps", applied)),
        "progress": {"applied_steps": applied, "micro_steps": int(progress.get("attempted_steps", applied))},
        "selection": _own_selection(tree, history, rule),
        "metrics": None,
        "history": history,
        "hooks": {extension_key: tree["extension_state"]} if tree.get("extension_state") else {},
        "config": _own_settings(tree),
    }
    if tree.get("rng_state"):
        own["rng"] = [own_rng(tree["rng_state"])]
    return own


def _own_schedule(saved: Mapping[str, Any] | None, live: Any) -> dict[str, Any] | None:
    """Return the scheduler state; chemomae stores nothing for its functions, this library an empty state."""
    if saved is None:
        return None
    own = live.state_dict() if live is not None else {}
    empty = not any(saved.get("lr_lambdas") or ()) and not any(own.get("lr_lambdas") or ())
    return {**saved, "lr_lambdas": own["lr_lambdas"]} if empty and "lr_lambdas" in own else dict(saved)


def _applied_steps(tree: Mapping[str, Any]) -> int:
    if tree.get("scheduler"):
        return int(tree["scheduler"]["last_epoch"])
    steps = [entry["step"] for entry in tree["optimizer"]["state"].values() if "step" in entry]
    return int(max(map(float, steps), default=0))


def _own_record(record: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(record)
    if isinstance(own.get("val_loss"), float) and math.isnan(own["val_loss"]):
        own["val_loss"] = None
    return own


def _own_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a file of chemomae has, under the names of ``TrainerConfig``; 0.1 stores few of them."""
    contract, amp = tree.get("resume_contract") or {}, tree["amp"]
    own = {key: tree[key] for key in ("loss_type", "loss_region", "reduction", "ema_decay") if key in tree}
    own |= {key: contract[key] for key in ("grad_clip", "enable_tf32") if key in contract}
    own["amp"] = bool(amp["enabled"]) and tree.get("device") == "cuda"  # no effect there on other devices
    if own["amp"]:
        own["amp_dtype"] = amp["dtype"]
    if contract.get("model_config"):
        own["n_mask"] = contract["model_config"]["n_mask"]
    return own


def _own_average(
    tree: Mapping[str, Any], weights: Mapping[str, Tensor], model: nn.Module, applied: int
) -> dict[str, Any] | None:
    average = tree.get("ema")
    if not average:
        return None
    # chemomae does not average non-floating entries; here they come from the model.
    shadow = own_weights(model, {**weights, **cleaned(average["shadow"])})
    return {
        "ema": {"decay": float(average["decay"]), "update_interval": 1, "num_updates": applied, "shadow": shadow},
    }


def _own_selection(tree: Mapping[str, Any], history: Sequence[Mapping[str, Any]], rule: BestRule | None) -> Any:
    if rule is None:
        return None
    replayed = BestRule(rule.metric, rule.mode, rule.min_delta, rule.patience, rule.start_epoch)
    for record in history:
        value = record.get(rule.metric)
        replayed.update(int(record["epoch"]), math.nan if value is None else float(value))
    best = tree.get("best") or {}
    if best.get("epoch", -1) > 0:
        replayed.best, replayed.best_epoch = float(best["val_loss"]), int(best["epoch"])
    return replayed.state_dict()


def own_rng(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the random state of chemomae 0.2 to the plain values of :class:`treadle.seed.RngState`."""
    version, words, gauss = saved["python"]
    numpy = saved["numpy"]
    cuda = list(saved.get("torch_cuda") or [])
    state = RngState(
        python=(version, tuple(words), gauss),
        numpy=(
            numpy["algorithm"], numpy["keys"].numpy().astype("uint32"), numpy["position"], numpy["has_gauss"],
            numpy["cached_gaussian"],
        ),
        torch=saved["torch_cpu"].to(torch.uint8),
        accelerators={"cuda": cuda} if cuda else {},
    )  # fmt: skip
    return state.to_plain()


register_adapter(ChemoMAE, adapt_channels)
