"""Names of weights, the same with and without wrappers, in files and in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from treadle.distributed.ranks import unwrap
from treadle.distributed.shards import placed_like
from treadle.errors import CheckpointError


def clean_name(name: str) -> str:
    """Return the name of a weight without the prefixes of compiled modules.

    The prefix of DistributedDataParallel is not removed here, since a part of the user's own model may be named
    ``module``; :func:`treadle.distributed.unwrap` removes the wrapper.

    Example:
        >>> clean_name("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return name.replace("_orig_mod.", "")


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's raw weights without the prefixes of wrappers.

    Example:
        >>> list(model_state(nn.DataParallel(nn.Linear(1, 1))))
        ['weight', 'bias']
    """
    return {clean_name(name): value for name, value in unwrap(model).state_dict().items()}


def load_model_state(
    model: nn.Module, saved: Mapping[str, Any], *, what: str = "model", kept: Collection[str] = ()
) -> None:
    """Copy saved weights into a model in place; for a sharded model, every rank takes its shards.

    Args:
        model: model, wrapped or not, sharded or not.
        saved: whole or stored tensors by name; names with the prefixes of wrappers are accepted.
        what: name of the weights in messages.
        kept: names that may be missing in ``saved`` and are then unchanged.

    Raises:
        CheckpointError: names are missing or unexpected, or shapes differ; all are listed.
    """
    check_model_state(model, saved, what=what, kept=kept)
    target = unwrap(model)
    _fill_buffers(target, saved)
    own = target.state_dict()
    live = {clean_name(name): (name, value) for name, value in own.items()}
    fitting = {
        live[name][0]: placed_like(value, live[name][1]) for name, value in without_wrappers(saved, live).items()
    }
    state: OrderedDict[str, Any] = OrderedDict(fitting)
    # Versions of the modules' states, without which torch assumes the oldest.
    state._metadata = getattr(own, "_metadata", None)  # type: ignore[attr-defined]
    target.load_state_dict(state, strict=not kept)


def check_model_state(
    model: nn.Module, saved: Mapping[str, Any], *, what: str = "model", kept: Collection[str] = ()
) -> None:
    """Raise what :func:`load_model_state` would, without loading anything.

    Raises:
        CheckpointError: names are missing or unexpected, or shapes differ; all are listed.
    """
    wrong = state_mismatches(model, saved, what=what, kept=kept)
    if wrong:
        raise CheckpointError(
            f"the checkpoint does not fit this {what}: {wrong}. Use another folder for another model, "
            "or start without resuming"
        )


def state_mismatches(
    model: nn.Module, saved: Mapping[str, Any], *, what: str = "model", kept: Collection[str] = ()
) -> str:
    """Return the first missing or unexpected names or differing shapes; empty if the saved weights fit.

    Example:
        >>> state_mismatches(nn.Linear(2, 1), {"weight": nn.Linear(3, 1).weight})
        'missing bias; weight is (1, 3) in the checkpoint and (1, 2) in the model'
    """
    live = {clean_name(name): value for name, value in unwrap(model).state_dict().items()}
    saved = without_wrappers(saved, live)
    resized = _resized_by_loading(unwrap(model))
    wrong = [f"missing {name}" for name in live if name not in saved and name not in kept]
    unfilled = _unfilled_buffers(unwrap(model))
    wrong += [f"unexpected {name}" for name in saved if name not in live and name not in unfilled]
    for name, value in live.items():
        other = getattr(saved.get(name), "shape", None)
        if isinstance(value, Tensor) and other is not None and value.shape != other and name not in resized:
            wrong.append(f"{name} is {tuple(other)} in the checkpoint and {tuple(value.shape)} in the {what}")
    return "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")


def _unfilled_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the persistent buffers that are None, which are not in a state dict until the model sets them."""
    return {
        clean_name(f"{prefix}.{name}".lstrip(".")): (module, name)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is None and name not in module._non_persistent_buffers_set
    }


def _fill_buffers(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Create buffers that are None here but not in a checkpoint."""
    unfilled = _unfilled_buffers(model)
    beside = next(model.parameters(), None)
    for name, value in without_wrappers(saved, model.state_dict()).items() if unfilled else ():
        if name in unfilled:
            module, key = unfilled[name]
            made = placed_like(value, None).clone()
            module._buffers[key] = made if beside is None else made.to(beside.device)


def _resized_by_loading(model: nn.Module) -> set[str]:
    """Return names of tensors whose modules accept other shapes on loading, such as quantization observers."""
    return {
        clean_name(f"{prefix}.{name}".lstrip("."))
        for prefix, module in model.named_modules()
        if _loads_in_its_own_way(type(module))
        for name in (*module._parameters, *module._buffers)
    }


def _loads_in_its_own_way(kind: type[nn.Module]) -> bool:
    own = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    return own and (not kind.__module__.startswith("torch.") or kind.__module__.startswith("torch.ao."))


def without_wrappers(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove wrappers' prefixes from the names in a file written by plain torch.

    Args:
        saved: weights by name.
        live: weights of the model, by clean name.

    Example:
        >>> without_wrappers({"module.weight": 1}, {"weight": 0})
        {'weight': 1}
    """
    cleaned = {clean_name(name): value for name, value in saved.items()}
    while cleaned and not set(cleaned) & set(live) and all(name.startswith("module.") for name in cleaned):
        cleaned = {name.removeprefix("module."): value for name, value in cleaned.items()}
    return cleaned
