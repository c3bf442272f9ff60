"""Asynchronous copies of device numbers to the host, and reads with one transfer per device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.device.handover import wait_for


class HostTransfer:
    """Device numbers that are copied to the host asynchronously.

    Args:
        numbers: tensor on any device.

    Example:
        >>> HostTransfer(torch.tensor([1.0, 2.0])).tolist()
        [1.0, 2.0]
    """

    def __init__(self, numbers: Tensor):
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers.detach()
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))
        elif numbers.device.type != "cpu":
            self._numbers = self._numbers.cpu()

    @property
    def done(self) -> bool:
        """Whether the copy is complete."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> Tensor:
        """Wait for the numbers and return them on the host."""
        if self._event is not None:
            wait_for(self._event)
        return self._numbers

    def tolist(self) -> Any:
        """Wait for the numbers and return them as Python numbers."""
        return self.result().tolist()


def read_scalars(values: Iterable[float | Tensor]) -> Tensor:
    """Read numbers and 0-d tensors into one float64 CPU tensor, with one transfer per device.

    Example:
        >>> read_scalars([1.0, torch.tensor(2)])
        tensor([1., 2.], dtype=torch.float64)
    """
    return torch.tensor(NumbersTransfer(list(values)).read(), dtype=torch.float64)


class NumbersTransfer:
    """Asynchronous copy of numbers and 0-d tensors to the host, with one transfer per device.

    Args:
        items: numbers and 0-d tensors.

    Example:
        >>> NumbersTransfer([1.0, torch.tensor(2)]).read()
        [1.0, 2.0]
    """

    def __init__(self, items: Sequence[float | Tensor]):
        by_kind: dict[torch.device, dict[torch.dtype, list[int]]] = {}
        for index, item in enumerate(items):
            if type(item) is not float and isinstance(item, Tensor):
                by_kind.setdefault(item.device, {}).setdefault(item.dtype, []).append(index)
        self._items = [0.0 if isinstance(item, Tensor) else float(item) for item in items]
        self._sent: list[tuple[list[int], HostTransfer]] = []
        for kinds in by_kind.values():
            # Tensors of one dtype are stacked and then converted: two kernels, since one for each would cost as much as
            # a step.
            parts = [widen(_joined([items[index] for index in indices])) for indices in kinds.values()]
            order = [index for indices in kinds.values() for index in indices]
            self._sent.append((order, HostTransfer(parts[0] if len(parts) == 1 else torch.cat(parts))))

    @property
    def done(self) -> bool:
        """Whether the numbers have arrived on the host."""
        return all(numbers.done for _, numbers in self._sent)

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        found = list(self._items)
        for order, numbers in self._sent:
            for index, number in zip(order, numbers.result().double().tolist(), strict=True):
                found[index] = number
        return found


def _joined(scalars: Sequence[Any]) -> Tensor:
    """Concatenate one-element tensors of one dtype and device."""
    shaped = [scalar for scalar in scalars if scalar.dim()]
    return torch.stack([scalar.reshape(()) for scalar in scalars] if shaped else list(scalars)).detach()


def widest(device: torch.device) -> torch.dtype:
    """Return float64, in which a sum over a million steps loses no digits; float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def widen(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Convert a tensor to the widest dtype of its device, or of another one that it is moved to."""
    target = tensor.device if device is None else device
    return tensor.to(device=target, dtype=widest(target), non_blocking=True)
