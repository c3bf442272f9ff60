"""The first checkpoint of a run, loaded again before it is trusted: into this run's checks, and into copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from treadle.checkpoint.schema import to_plain
from treadle.engine.parts import PARTS
from treadle.engine.state_part import Saved
from treadle.errors import CheckpointError
from treadle.optim.optimizer_state import OWN, hidden_tensors, rehearse

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def try_loading(engine: Engine, tree: Mapping[str, Any]) -> None:
    """Tries whether a checkpoint can be loaded into the run that writes it; changes nothing.

    Raises:
        CheckpointError: it cannot, or the optimizer would come back without its state.
    """
    saved = Saved(tree, frozenset(tree.get("base") or ()))
    try:
        for part in PARTS:
            part.check(engine, saved)
        _try_optimizer(engine.optimizer, tree.get("optimizer") or {})
        _try_objects(engine, tree.get("objects") or {})
    except Exception as error:
        raise CheckpointError(
            f"the first checkpoint of this run could not be loaded again, so no later one could: {error}"
        ) from error


def _try_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    refuse_hidden_tensors(optimizer)
    if OWN in state or getattr(type(optimizer), "load_state_dict", None) is not Optimizer.load_state_dict:
        return
    if optimizer.state and not state.get("state"):
        raise CheckpointError(
            f"optimizer: the state_dict of this {type(optimizer).__name__} is empty although it holds state; give "
            "the class state_dict() and load_state_dict() of its own"
        )
    for lost in rehearse(optimizer, state):
        raise CheckpointError(f"optimizer: {type(optimizer).__name__} does not load what it saves: {lost}")


def refuse_hidden_tensors(optimizer: Any) -> None:
    """Raises for an optimizer that keeps tensors where its inherited state dict does not look.

    Raises:
        CheckpointError: it does.
    """
    hidden = hidden_tensors(optimizer)
    if hidden:
        raise CheckpointError(
            f"optimizer: {type(optimizer).__name__} keeps tensors in {hidden!r}, which the state_dict that it inherits "
            "leaves out; keep them in self.state[parameter], or give the class state_dict() and load_state_dict()"
        )


def _try_objects(engine: Engine, saved: Mapping[str, Any]) -> None:
    for path, owner in engine.state.objects.owners.items():
        state = saved.get(path, {}).get("state")
        if state is None or isinstance(owner, nn.Module):
            continue
        double = _copied(owner)
        if double is None:
            continue
        try:
            double.load_state_dict(to_plain(state, path))
        except Exception as error:
            raise CheckpointError(f"{path}: {type(owner).__name__} does not load what it saves: {error}") from error


def _copied(owner: Any) -> Any:
    try:
        return copy.deepcopy(owner)
    except Exception:  # noqa: BLE001  (what cannot be copied is tried by the first load)
        return None
