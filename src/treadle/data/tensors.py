"""TensorLoader: data that fits into memory as whole tensors, read in vectorised batches, resumed in O(1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.seed import mix_seed


class TensorLoader:
    """Yields batches of rows of one or several tensors.

    The order of an epoch depends on the seed and the epoch alone, and it is the same on every device. Nothing is drawn
    from the global random generators. The state is an epoch and a position.

    Args:
        tensors: equal first dimensions (N, ...), any dtypes.
        batch_size: rows in a batch, >= 1.
        shuffle: a new order for each epoch.
        seed: seeds the orders.
        drop_last: leave a short last batch out.
        device: where the tensors are kept and batches come from; None leaves them where they are.

    Raises:
        ConfigError: no tensors, different numbers of rows, or a batch size below 1.

    Example:
        >>> loader = TensorLoader(torch.arange(5), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    exact_length = True  # the cursor may trust len(): an epoch has exactly as many batches

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str | None = None,
    ):
        if not tensors:
            raise ConfigError("TensorLoader: give at least one tensor")
        rows = [len(tensor) for tensor in tensors]
        if len(set(rows)) > 1:
            raise ConfigError(f"TensorLoader: the tensors have {rows} rows; all must have the same number")
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r}: must be at least 1 row")
        self.tensors = tuple(tensor if device is None else tensor.to(device) for tensor in tensors)
        self.num_rows = rows[0]
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self.last_rows: Tensor | range = range(0)  # of the batch that was given last: a view, nothing is read

    def __len__(self) -> int:
        """Returns the batches of an epoch."""
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next pass has; a pass that ends goes on to the next epoch by itself."""
        self.epoch = epoch
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch: all of it, unless a state was loaded."""
        order = self._order()
        while self.position < len(self):
            start = self.position * self.batch_size
            self.position += 1
            yield self._batch(order, start)
        self.set_epoch(self.epoch + 1)

    def _order(self) -> Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(mix_seed(self.seed, self.epoch))
        # Drawn on the CPU, so that the order is the same on every device.
        return torch.randperm(self.num_rows, generator=generator).to(self.tensors[0].device, non_blocking=True)

    def _batch(self, order: Tensor | None, start: int) -> Any:
        stop = min(start + self.batch_size, self.num_rows)
        self.last_rows = range(start, stop) if order is None else order[start:stop]
        if order is None:
            rows = tuple(tensor[start:stop] for tensor in self.tensors)
        else:
            rows = tuple(tensor.index_select(0, order[start:stop].to(tensor.device)) for tensor in self.tensors)
        return rows[0] if len(rows) == 1 else rows

    def state_dict(self) -> dict[str, Any]:
        """Returns epoch and position, and what they refer to."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a stored position.

        Raises:
            ConfigError: the rows, the batch size or the seed are others, so the position means other data.
        """
        for name in ("num_rows", "batch_size", "seed"):
            if state_dict[name] != getattr(self, name):
                raise ConfigError(
                    f"TensorLoader: {name} was {state_dict[name]} when the state was saved and is now "
                    f"{getattr(self, name)}; keep it, or start the epoch afresh"
                )
        self.epoch = int(state_dict["epoch"])
        self.position = int(state_dict["position"])
