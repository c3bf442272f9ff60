"""Base of row loaders: rows of each rank and batch, and a position of two numbers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from treadle import distributed as ranks
from treadle.data.order import GlobalOrder, check_batch_size
from treadle.data.ranks import check_rank
from treadle.errors import ConfigError

Read = Callable[[range], Any]  # positions in the order of the epoch -> a batch


class LastRows(NamedTuple):
    """Rows of a batch, looked up lazily.

    Attributes:
        rows: the order of the epoch, or the rows themselves, on the CPU; None for 0, 1, 2, ...
        part: positions in the order.
        given: tensors of the batch from :func:`noted`, if the loader records them.

    Example:
        >>> from torch import tensor
        >>> LastRows(None, range(2, 4))(), LastRows(tensor([3, 0, 1]), range(1, 3))().tolist()
        (range(2, 4), [0, 1])
    """

    rows: Tensor | None
    part: range
    given: Sequence[tuple[weakref.ref[Tensor], int]] = ()

    def __call__(self) -> Tensor | range:
        """Return the rows."""
        return self.part if self.rows is None else self.rows[self.part.start : self.part.stop]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without process-local state."""
        return LastRows, (self.rows, self.part)

    def gave(self, tensor: Tensor) -> bool:
        """Return whether a tensor was returned by the loader with these rows and not written to since."""
        return any(of() is tensor and tensor._version == version for of, version in self.given)


def noted(tensors: Sequence[Tensor]) -> list[tuple[weakref.ref[Tensor], int]]:
    """Return tensors with their version counters, without tensors that have none.

    Example:
        >>> from torch import zeros
        >>> len(noted([zeros(1), zeros(2)]))
        2
    """
    return [(weakref.ref(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]


class RowLoader:
    """Loader of batches of rows in a global order; a subclass holds the rows.

    Args:
        num_rows: number of rows N.
        batch_size: rows in a batch of one rank, >= 1.
        global_batch_size: instead, rows in a batch over all ranks.
        shuffle: a new order for each epoch.
        seed: seeds the orders.
        drop_last: leave a short last batch out.
        distributed: share the rows among all ranks of the process group.
        rank: which part is read here, instead of the process group's.
        num_replicas: how many share the rows, instead of the process group's.

    Attributes:
        epoch: epoch whose order the next pass uses.
        position: batches yielded since the epoch was entered.

    Raises:
        ConfigError: a number is outside its range.
    """

    exact_length = True  # the cursor may trust len(): it is the exact number of batches

    def __init__(
        self,
        num_rows: int,
        *,
        batch_size: int | None,
        global_batch_size: int | None,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        distributed: bool,
        rank: int | None,
        num_replicas: int | None,
    ):
        check_batch_size(batch_size, global_batch_size, owner=type(self).__name__)
        check_rank(rank, num_replicas)
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self._last = LastRows(None, range(0))
        self._distributed = distributed
        self._part = None if rank is None or num_replicas is None else (rank, num_replicas)
        self._start = 0
        self._passes = 0

    @property
    def last_rows(self) -> Tensor | range:
        """Rows of the last batch, as a view; reads no data."""
        return self._last()

    def last_ids(self) -> LastRows:
        """Return a callable that returns the rows of the last batch, now or later."""
        return self._last

    @property
    def order(self) -> GlobalOrder:
        """The order and how it is cut; read each time, since a process group may be started later."""
        _, replicas = self._rank_of()
        size = self.global_batch_size if self.batch_size is None else self.batch_size * replicas
        assert size is not None, "the constructor checks it"
        return self._order_of(size, replicas)

    def _order_of(self, size: int, replicas: int) -> GlobalOrder:
        return GlobalOrder(self.num_rows, size, replicas, self.shuffle, self.seed, self.drop_last)

    def _rank_of(self) -> tuple[int, int]:
        if self._part is not None:
            return self._part
        return (ranks.rank(), ranks.world_size()) if self._distributed else (0, 1)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self.order.num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next pass uses; a completed pass advances the epoch automatically."""
        self.epoch = epoch
        self.start_at(0)

    def start_at(self, consumed: int) -> None:
        """Start the next pass after the first ``consumed`` rows of its epoch."""
        self._start = consumed
        self.position = 0

    def pass_over(self, batches: int) -> None:
        """Skip a number of batches in the next pass, without reading them."""
        self.position = batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch: all of it, unless a state was loaded.

        Raises:
            RuntimeError: a later pass was started meanwhile; the loader has one position.
        """
        self._passes += 1
        order, (rank, _), own = self.order, self._rank_of(), self._passes
        count = order.num_batches(self._start)
        ahead = (order.part(number, rank, self._start) for number in range(self.position, count))
        with self._reading(order, ahead) as read:
            while self.position < count or own != self._passes:
                if own != self._passes:
                    self._refuse_old_pass()
                batch = read(order.part(self.position, rank, self._start, count=count))
                self.position += 1
                yield batch
        self.set_epoch(self.epoch + 1)

    def _refuse_old_pass(self) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__}: this iterator is no longer valid: it was closed, or another one was started over "
            "the same loader. Use separate loaders for training and evaluation"
        )

    def _reading(self, order: GlobalOrder, ahead: Iterator[range]) -> contextlib.AbstractContextManager[Read]:
        """Open an epoch; the callable reads one batch, and ``ahead`` lists the following batches."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position, and the settings they refer to."""
        return {"epoch": self.epoch, "position": self.position, "start": self._start, **self._refers_to()}

    def _refers_to(self) -> dict[str, Any]:
        order = self.order
        return {
            "num_rows": self.num_rows,
            "batch_size": order.global_batch_size,  # over all ranks: keeps the format of single-process states
            "seed": self.seed,
            "num_replicas": order.num_replicas,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a stored position.

        Raises:
            ConfigError: rows, batches, order or ranks differ, so the position refers to other data.
        """
        was_implied = {"num_replicas": 1, "shuffle": self.shuffle}  # keys that older states lack
        for name, now in self._refers_to().items():
            saved = state_dict.get(name, was_implied.get(name))
            if saved != now:
                raise ConfigError(
                    f"{type(self).__name__}: {name} was {saved} when the state was saved and is now {now}; keep it, or "
                    "start the epoch afresh"
                )
        self.epoch = int(state_dict["epoch"])
        self.start_at(int(state_dict.get("start", 0)))
        self.position = int(state_dict["position"])


def one_number_of_rows(rows: list[int], *, owner: str) -> int:
    """Return the common number of rows.

    Raises:
        ConfigError: there are no arrays, or the numbers differ.

    Example:
        >>> one_number_of_rows([3, 3], owner="TensorLoader")
        3
    """
    if not rows:
        raise ConfigError(f"{owner}: give at least one tensor")
    if len(set(rows)) > 1:
        raise ConfigError(f"{owner}: the tensors have {rows} rows; all must have the same number")
    return rows[0]
