"""Frozen base of a run with adapters: left out of its checkpoints and identified by fingerprints.

A model with a ``peft_config`` trains a small part of its weights. Its checkpoints hold everything that may change:
every trained weight, every buffer, and any frozen weight that changed after all. For the other weights they hold a
fingerprint, so that resuming with another base is refused instead of training a wrong model.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from treadle.checkpoint.comparison import sample
from treadle.distributed import is_dtensor, local, unwrap
from treadle.distributed.state_names import clean_name
from treadle.errors import CheckpointError


def fingerprint(tensor: Tensor) -> str:
    """Return dtype, shape and CRC-32 of a tensor's bytes, independent of its device and sharding.

    Example:
        >>> fingerprint(torch.zeros(2, 3))
        'float32 2x3 a3c1ca20'
    """
    if is_dtensor(tensor):
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    shape = "x".join(str(size) for size in tensor.shape) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {zlib.crc32(plain.numpy().data):08x}"


class FrozenBase:
    """Weights that a checkpoint may leave out: frozen ones of a model with adapters, or on request.

    Fingerprints are computed when the object is created, and again only for weights that were written to.

    Args:
        model: model before training, wrapped or not.
        asked: leave frozen weights out of a model without adapters too.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 2).requires_grad_(False), nn.Linear(2, 1))
        >>> model.peft_config = {}
        >>> sorted(FrozenBase(model).unchanged(model))
        ['0.bias', '0.weight']
    """

    def __init__(self, model: nn.Module, *, requested: bool = False):
        self._seen: dict[str, tuple[Any, str]] = {}
        self._leaves_out = requested or hasattr(unwrap(model), "peft_config")
        self._at_start = self._fingerprints(model, _frozen(model)) if self._leaves_out else {}

    def unchanged(self, model: nn.Module) -> dict[str, str]:
        """Return the fingerprints of frozen weights that have not changed."""
        if not self._leaves_out:
            return {}
        now = self._fingerprints(model, _frozen(model) & self._at_start.keys())
        return {name: mark for name, mark in now.items() if self._at_start[name] == mark}

    def check(self, model: nn.Module, marks: Mapping[str, str] | None) -> frozenset[str]:
        """Compare the fingerprints of a checkpoint with the weights of a model.

        Args:
            model: model, wrapped or not.
            marks: the checkpoint's entry ``base``; None if it holds every weight.

        Returns:
            The names that the checkpoint leaves out, whose weights need not be loaded.

        Raises:
            CheckpointError: a weight is missing or different.
        """
        marks = marks or {}
        here = self._fingerprints(model, marks.keys())
        wrong = [name for name, mark in marks.items() if here.get(name) != mark]
        if wrong:
            name = wrong[0]
            raise CheckpointError(
                f"the checkpoint has no frozen weights and was trained on another base model: {len(wrong)} of "
                f"{len(marks)} frozen weights differ; the first is {name}, which is {marks[name]} there and "
                f"{here.get(name, 'missing')} here (dtype, shape, CRC-32). Load the base weights that the run was "
                "started with, in the same dtype"
            )
        return frozenset(marks)

    def _fingerprints(self, model: nn.Module, names: Collection[str]) -> dict[str, str]:
        found = {}
        for name, parameter in _parameters(model).items():
            if name in names:
                written = (local(parameter).data_ptr(), parameter._version, sample(parameter))
                if name not in self._seen or self._seen[name][0] != written:
                    self._seen[name] = (written, fingerprint(parameter))
                found[name] = self._seen[name][1]
        return found


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by clean name, tied ones under each of their names, as in a state dict."""
    return {clean_name(name): value for name, value in unwrap(model).named_parameters(remove_duplicate=False)}


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in _parameters(model).items() if not parameter.requires_grad}


def without(weights: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a mapping without some names.

    Example:
        >>> without({"a": 1, "b": 2}, {"a"})
        {'b': 2}
    """
    return {name: value for name, value in weights.items() if name not in names}
