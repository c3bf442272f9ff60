"""Split of a state tree into tensors of model, optimizer and averages under flat keys, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from treadle.checkpoint.files import STORED
from treadle.distributed.shards import LocalShard
from treadle.errors import CheckpointError


def take_apart(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor | LocalShard], dict[str, Any]]:
    """Extract the tensors of model, optimizer state and averages, and sharded tensors elsewhere.

    Args:
        tree: a checkpoint tree.

    Returns:
        (the tensors by key: ``model.<name>``, ``optimizer.state.<name of the parameter>.<entry>``,
        ``ema.<name>.shadow.<name>``; the tree with ``{"treadle.stored": key}`` in their place).

    Raises:
        CheckpointError: the tree itself contains such a dict.

    Example:
        >>> tensors, rest = take_apart({"model": {"w": torch.zeros(1)}, "epoch": 3})
        >>> list(tensors), rest
        (['model.w'], {'model': {'w': {'treadle.stored': 'model.w'}}, 'epoch': 3})
    """
    taker = _Taker()
    rest = {}
    for name, value in tree.items():
        if name == "optimizer" and value is not None:
            rest[name] = {**value, "state": taker.take_state(value)}
        else:
            rest[name] = taker.take(value, name, whole=name in ("model", "ema"))
    return taker.tensors, rest


class _Taker:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | LocalShard] = {}
        self._keys: dict[int, str] = {}  # by identity: tied weights are stored once

    def take(self, value: Any, path: str, *, whole: bool) -> Any:
        if isinstance(value, LocalShard) or (whole and isinstance(value, Tensor) and _is_plain(value)):
            key = self._keys.setdefault(id(value), path)
            self.tensors[key] = value
            return {STORED: key}
        if isinstance(value, Mapping):
            if STORED in value:
                raise CheckpointError(f"state at {path!r} has the key {STORED!r}, which is reserved for stored tensors")
            return {key: self.take(item, f"{path}.{key}", whole=whole) for key, item in value.items()}
        if isinstance(value, list):
            return [self.take(item, f"{path}.{number}", whole=whole) for number, item in enumerate(value)]
        return value

    def take_state(self, optimizer: Mapping[str, Any]) -> dict[Any, Any]:
        names: dict[Any, str] = {}
        for group in optimizer["param_groups"]:
            named = group.get("param_names") or [""] * len(group["params"])
            names |= {index: name or f"#{index}" for index, name in zip(group["params"], named, strict=True)}
        return {
            index: self.take(entries, f"optimizer.state.{names.get(index, f'#{index}')}", whole=True)
            for index, entries in optimizer["state"].items()
        }


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
