"""TensorLoader: data that fits into memory as whole tensors, read in vectorised batches, resumed in O(1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from treadle import distributed as ranks
from treadle.data.order import GlobalOrder, check_batch_size
from treadle.data.ranks import check_rank
from treadle.errors import ConfigError


class TensorLoader:
    """Yields batches of rows of one or several tensors.

    The order of an epoch depends on the seed and the epoch alone, and it is the same on every device. Nothing is drawn
    from the global random generators. The state is an epoch and a position.

    On several ranks, every rank reads all rows unless ``distributed`` is set or a part is named: then each reads its
    part of every batch, as with :class:`RankBatchSampler`, and needs all rows in its memory.

    Args:
        tensors: equal first dimensions (N, ...), any dtypes.
        batch_size: rows in a batch of one rank, >= 1.
        shuffle: a new order for each epoch.
        seed: seeds the orders.
        drop_last: leave a short last batch out.
        device: where the tensors are kept and batches come from; None leaves them where they are.
        global_batch_size: instead of ``batch_size``, rows in a batch of all ranks together.
        distributed: share the rows among all ranks of the process group.
        rank: which part is read here, instead of the process group's.
        num_replicas: how many share the rows, instead of the process group's.

    Raises:
        ConfigError: no tensors, different numbers of rows, or a number outside its range.

    Example:
        >>> loader = TensorLoader(torch.arange(5), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    exact_length = True  # the cursor may trust len(): an epoch has exactly as many batches

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        global_batch_size: int | None = None,
        distributed: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ):
        if not tensors:
            raise ConfigError("TensorLoader: give at least one tensor")
        rows = [len(tensor) for tensor in tensors]
        if len(set(rows)) > 1:
            raise ConfigError(f"TensorLoader: the tensors have {rows} rows; all must have the same number")
        check_batch_size(batch_size, global_batch_size, owner="TensorLoader")
        check_rank(rank, num_replicas)
        self.tensors = tuple(tensor if device is None else tensor.to(device) for tensor in tensors)
        self.num_rows = rows[0]
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self.last_rows: Tensor | range = range(0)  # of the batch that was given last: a view, nothing is read
        self._distributed = distributed
        self._part = None if rank is None or num_replicas is None else (rank, num_replicas)
        self._start = 0

    @property
    def order(self) -> GlobalOrder:
        """The order and how it is cut; read anew each time, since a process group may be started later."""
        _, replicas = self._rank_of()
        size = self.global_batch_size if self.batch_size is None else self.batch_size * replicas
        assert size is not None, "the constructor checks it"
        return GlobalOrder(self.num_rows, size, replicas, self.shuffle, self.seed, self.drop_last)

    def _rank_of(self) -> tuple[int, int]:
        if self._part is not None:
            return self._part
        return (ranks.rank(), ranks.world_size()) if self._distributed else (0, 1)

    def __len__(self) -> int:
        """Returns the batches of a whole epoch."""
        return self.order.num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next pass has; a pass that ends goes on to the next epoch by itself."""
        self.epoch = epoch
        self.start_at(0)

    def start_at(self, consumed: int) -> None:
        """Lets the next pass give what follows the first ``consumed`` rows of its epoch."""
        self._start = consumed
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch: all of it, unless a state was loaded."""
        order, (rank, _) = self.order, self._rank_of()
        rows = order.rows(self.epoch)
        if rows is not None:  # drawn on the CPU, so that the order is the same on every device
            rows = rows.to(self.tensors[0].device, non_blocking=True)
        while self.position < order.num_batches(self._start):
            part = order.part(self.position, rank, self._start)
            self.position += 1
            yield self._batch(rows, part)
        self.set_epoch(self.epoch + 1)

    def _batch(self, rows: Tensor | None, part: range) -> Any:
        if rows is None:
            self.last_rows = part
            batch = tuple(tensor[part.start : part.stop] for tensor in self.tensors)
        else:
            self.last_rows = picked = rows[part.start : part.stop]
            batch = tuple(tensor.index_select(0, picked.to(tensor.device)) for tensor in self.tensors)
        return batch[0] if len(batch) == 1 else batch

    def state_dict(self) -> dict[str, Any]:
        """Returns epoch and position, and what they refer to."""
        return {"epoch": self.epoch, "position": self.position, "start": self._start, **self._refers_to()}

    def _refers_to(self) -> dict[str, Any]:
        order = self.order
        return {
            "num_rows": self.num_rows,
            "batch_size": order.global_batch_size,  # of all ranks: a state of one process is as it always was
            "seed": self.seed,
            "num_replicas": order.num_replicas,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a stored position.

        Raises:
            ConfigError: the rows, the batch size, the seed or the ranks are others, so the position means other data.
        """
        for name, now in self._refers_to().items():
            saved = state_dict.get(name, 1 if name == "num_replicas" else None)
            if saved != now:
                raise ConfigError(
                    f"TensorLoader: {name} was {saved} when the state was saved and is now {now}; keep it, or start "
                    "the epoch afresh"
                )
        self.epoch = int(state_dict["epoch"])
        self.start_at(int(state_dict.get("start", 0)))
        self.position = int(state_dict["position"])
