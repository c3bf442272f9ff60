"""Asynchronous copies of device numbers to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treadle.device.handover import wait_for


class OnTheWay:
    """Device numbers that are copied to the host asynchronously.

    Args:
        numbers: tensor on any device.

    Example:
        >>> OnTheWay(torch.tensor([1.0, 2.0])).tolist()
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
    def there(self) -> bool:
        """Whether the copy is complete."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def arrived(self) -> Tensor:
        """Wait for the numbers and return them on the host."""
        if self._event is not None:
            wait_for(self._event)
        return self._numbers

    def tolist(self) -> Any:
        """Wait for the numbers and return them as Python numbers."""
        return self.arrived().tolist()
