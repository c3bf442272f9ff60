"""Part of a checkpoint that fits another model, for ``strict=False``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.distributed.state_names import model_state, without_wrappers
from treadle.optim.optimizer import parameter_names

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def common_state(
    engine: Engine, tree: Mapping[str, Any], kept: Collection[str]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return a checkpoint tree without keys that the engine's model lacks, and log what starts fresh.

    Args:
        engine: the engine that will load the state.
        tree: a checkpoint tree.
        kept: names of weights that the checkpoint omits on purpose.

    Returns:
        (the tree; the names of all weights that are not loaded).
    """
    live = model_state(engine.model)
    weights, missing, strange = common_weights(without_wrappers(tree["model"], live), live)
    missing = [name for name in missing if name not in kept]
    fitted = {**tree, "model": weights, "ema": {
        name: {**entry, "shadow": common_weights(entry["shadow"], live)[0]}
        for name, entry in (tree.get("ema") or {}).items()
    }}  # fmt: skip
    saved, by_id = tree.get("optimizer"), parameter_names(engine.model)
    names = [[by_id.get(id(p), "") for p in group["params"]] for group in engine.optimizer.param_groups]
    if saved is not None and _is_named(saved, names):
        fitted["optimizer"] = common_optimizer_state(saved, names)
    if missing or strange:
        engine.logger.warning(
            "strict=False: %d weights are missing from the checkpoint and keep their initial values: %s; %d weights "
            "of the checkpoint are not in the model and are ignored: %s",
            len(missing), _listed(missing), len(strange), _listed(strange),
        )  # fmt: skip
    return fitted, frozenset(kept) | frozenset(missing)


def _is_named(saved: Mapping[str, Any], live: Sequence[Sequence[str]]) -> bool:
    """Return whether all parameters are named on both sides, in equally many groups; else they match by order."""
    groups = [group.get("param_names") or [""] for group in saved["param_groups"]]
    return len(groups) == len(live) and all(name for group in [*groups, *live] for name in group)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "") if names else "none"


def common_weights(saved: Mapping[str, Any], live: Collection[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Split saved weights into those that a model has, names that the state lacks and names that the model lacks.

    Returns:
        (the weights; names that the state lacks; names that the model lacks).

    Example:
        >>> common_weights({"a": 1, "old": 2}, ["a", "new"])
        ({'a': 1}, ['new'], ['old'])
    """
    kept = {name: value for name, value in saved.items() if name in live}
    return kept, [name for name in live if name not in saved], [name for name in saved if name not in live]


def common_optimizer_state(saved: Mapping[str, Any], live: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a saved optimizer state fitted to other parameters; parameters unknown to it have no state.

    Args:
        saved: an optimizer's state dict with ``param_names`` in each group.
        live: names of the parameters in each group of the optimizer; as many groups as ``saved`` has.

    Example:
        >>> groups = [{"params": [0, 1], "param_names": ["a", "old"], "lr": 0.1}]
        >>> state = common_optimizer_state({"state": {0: "A", 1: "O"}, "param_groups": groups}, [["b", "a"]])
        >>> state["state"], state["param_groups"][0]["params"]
        ({0: 'A'}, [2, 0])
    """
    known = {
        name: index
        for group in saved["param_groups"]
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }
    names = [name for group in live for name in group]
    fresh = (name for name in names if name not in known)
    numbers = {**known, **{name: len(known) + place for place, name in enumerate(fresh)}}
    groups = [
        {**group, "params": [numbers[name] for name in own], "param_names": list(own)}
        for group, own in zip(saved["param_groups"], live, strict=True)
    ]
    kept = {numbers[name] for name in names}
    state = {index: entry for index, entry in saved["state"].items() if index in kept}
    return {**saved, "state": state, "param_groups": groups}
