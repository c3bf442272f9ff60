"""Trial load of a run's first checkpoint, against this run's checks and into copies."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.checkpoint.schema import from_plain, to_plain
from treadle.engine.parts import PARTS
from treadle.engine.state_part import Saved
from treadle.errors import CheckpointError
from treadle.optim.optimizer_state import OWN, hidden_tensors, try_state
from treadle.seed import forked_rng

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_LARGEST_COPY = 2**28  # bytes of parameters up to which copies of an optimizer are tried


def try_loading(engine: Engine, tree: Mapping[str, Any]) -> None:
    """Check that a checkpoint can be loaded into the run that writes it, without changing anything.

    Raises:
        CheckpointError: it cannot be loaded, or the optimizer would lose its state.
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
            "the class its own state_dict() and load_state_dict()"
        )
    for lost in try_state(optimizer, from_plain(state)):
        raise CheckpointError(f"optimizer: {type(optimizer).__name__} does not load what it saves: {lost}")


def refuse_hidden_tensors(optimizer: Any) -> None:
    """Raise if an optimizer keeps tensors that its inherited state dict misses.

    Raises:
        CheckpointError: there are such tensors.
    """
    hidden = hidden_tensors(optimizer)
    if hidden:
        raise CheckpointError(
            f"optimizer: {type(optimizer).__name__} keeps tensors in {hidden!r}, which the state_dict that it inherits "
            "leaves out; keep them in self.state[parameter], or give the class state_dict() and load_state_dict()"
        )


def try_optimizer(optimizer: Any) -> None:
    """Step a copy of a user's optimizer with gradients of zero, and load its state into another copy.

    Raises:
        CheckpointError: its state is lost or cannot be loaded.
    """
    named = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    size = sum(one.numel() * one.element_size() for one in named.values())
    plain = all(type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided for one in named.values())
    if size > _LARGEST_COPY or not plain:
        return
    name = type(optimizer).__name__
    try:
        first, second = _double(optimizer, named), _double(optimizer, named)
        with warnings.catch_warnings(), forked_rng(0):
            warnings.simplefilter("ignore")
            type(first).step(first)  # a step set on the object may be bound to the original optimizer
    except Exception:  # noqa: BLE001  (what cannot be copied, or wants a closure, is not tried)
        return
    refuse_hidden_tensors(first)
    addresses = {id(one) for group in first.param_groups for one in group["params"]}
    if any(key in addresses for key in _int_keys(first.state_dict())):
        raise CheckpointError(
            f"optimizer: the state_dict of {name} has the memory addresses of parameters for keys, which another "
            "process does not have; use their order, as torch's optimizers do"
        )
    state = to_plain(first.state_dict(), "optimizer", encoding="odd")
    try:
        second.load_state_dict(from_plain(copy.deepcopy(state)))
    except Exception as error:
        raise CheckpointError(
            f"optimizer: {name}.load_state_dict does not take what its state_dict gives: {type(error).__name__}: "
            f"{error}. Both are tried before step 1, on copies"
        ) from error


def _double(optimizer: Any, named: Mapping[int, Tensor]) -> Any:
    """Return a copy of an optimizer over copies of its parameters, with gradients of zero."""
    double = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): double}
    for identity, parameter in named.items():
        memo[identity] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        memo[identity].grad = torch.zeros_like(parameter)
    held = {name: value for name, value in vars(optimizer).items() if name != "step" and not name.endswith("_hooks")}
    hooks = {name: OrderedDict[Any, Any]() for name in vars(optimizer) if name.endswith("_hooks")}
    double.__dict__.update(copy.deepcopy(held, memo), **hooks)
    return double


def _int_keys(tree: Any) -> Iterator[int]:
    if isinstance(tree, Mapping):
        yield from (key for key in tree if isinstance(key, int))
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _int_keys(item)


def _try_objects(engine: Engine, saved: Mapping[str, Any]) -> None:
    for path, owner in engine.state.objects.owners.items():
        state = saved.get(path, {}).get("state")
        if state is None or isinstance(owner, nn.Module):
            continue
        double = _copied(owner)
        if double is None:
            continue
        try:
            double.load_state_dict(from_plain(to_plain(state, path)))
        except Exception as error:
            raise CheckpointError(f"{path}: {type(owner).__name__} does not load what it saves: {error}") from error


def _copied(owner: Any) -> Any:
    try:
        return copy.deepcopy(owner)
    except Exception:  # noqa: BLE001  (what cannot be copied is tried by the first load)
        return None
