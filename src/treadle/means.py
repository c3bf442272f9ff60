"""Running weighted means and totals of records, kept on the device until read."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treadle.device.host_transfer import NumbersTransfer, widen, widest
from treadle.errors import ConfigError
from treadle.nested import as_number, unflatten

# Tensors are folded into the sum in blocks of this many. The block boundaries depend on the number of additions only,
# never on reads, so reading or saving cannot change a bit of the sum.
_BLOCK = 64
_DTYPE, _DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")
_NUMBER = {float}
_NUMBERS = (float, int, Tensor)  # the usual values: checking for a Mapping is slow
_EXACT = 2**53  # integers below are exact floats


class Weighted(NamedTuple):
    """Mean with the number of elements it was taken over.

    Attributes:
        value: the mean; a number or a 0-d tensor.
        weight: its weight in the mean of a report or an epoch; a number or a 0-d tensor, >= 0.

    Example:
        >>> means = RunningMeans()
        >>> means.add({"recall": Weighted(0.5, 3)}); means.add({"recall": Weighted(1.0, 1)})
        >>> means.compute()
        {'recall': 0.625}
    """

    value: float | Tensor
    weight: float | Tensor


class Total(NamedTuple):
    """Quantity that is summed over micro-batches instead of averaged.

    Attributes:
        value: a number or a 0-d tensor.

    Example:
        >>> means = RunningMeans()
        >>> means.add({"tokens": Total(100)}); means.add({"tokens": Total(28)})
        >>> means.compute()
        {'tokens': 128.0}
    """

    value: float | Tensor


@dataclass(slots=True)
class _Sum:
    """Sums Σ w·value and Σ w of one record name: a host part and a device part.

    Values of each step wait in ``log`` and are added in blocks or at the next read, so that a step costs the host
    little more than an append. Any other operation flushes them first, so that additions keep their order. Tensors of
    ``pending`` are 0-d, or (N,) for values added together.
    """

    is_total: bool
    value: float = 0.0
    weight: float = 0.0
    device_value: Tensor | None = None
    device_weight: Tensor | None = None
    pending: list[tuple[Tensor, float | Tensor]] = field(default_factory=list)
    num_pending: int = 0  # number of values in ``pending``
    log: list[tuple[float | Tensor, float]] = field(default_factory=list)

    def add(self, value: float | Tensor, weight: float | Tensor) -> None:
        self.flush()
        if not isinstance(weight, Tensor):
            if weight == 0:
                return  # the NaN of a mean over nothing must not reach the sum
            self.weight += weight
            if not isinstance(value, Tensor):
                self.value += value * weight
                return
        else:
            weight = weight.detach()
            if not isinstance(value, Tensor):
                value = torch.full_like(weight, value, dtype=widest(weight.device))
        self.pending.append((value, weight))
        self.num_pending += 1
        if self.num_pending == _BLOCK:
            self._fold()

    def add_column(self, values: Tensor, weight: float) -> None:
        """Add values (N,) of one weight, with the result of :meth:`add` one by one."""
        self.flush()
        if weight == 0:
            return
        for _ in range(len(values)):  # their product would round differently
            self.weight += weight
        while len(values):
            if not self.num_pending and len(values) > _BLOCK:
                values = self._fold_whole_blocks(values, weight)
                continue
            part, values = values.tensor_split([_BLOCK - self.num_pending])
            self.pending.append((part, weight))
            self.num_pending += len(part)
            if self.num_pending == _BLOCK:
                self._fold()

    def _fold_whole_blocks(self, values: Tensor, weight: float) -> Tensor:
        """Fold all whole blocks of values with few launches; return the rest."""
        whole = len(values) // _BLOCK * _BLOCK
        blocks = self._stacked([values[:whole]], ()).view(-1, _BLOCK)
        for block_value in (blocks if weight == 1 else blocks * weight).sum(1).unbind():
            self.device_value = _plus(self.device_value, block_value)
        return values[whole:]

    def flush(self) -> None:
        """Add everything in ``log``, with the result of :meth:`add` one by one."""
        if not self.log:
            return
        log, self.log = self.log, []
        number, counted, pending = self.value, self.weight, self.pending
        for value, weight in log:
            if weight == 0:
                continue
            counted += weight
            if type(value) is Tensor:  # like everything here that is not a number
                pending.append((value, weight))
                self.num_pending += 1
                if self.num_pending == _BLOCK:
                    self._fold()
                    pending = self.pending
            else:
                number += value * weight  # type: ignore[assignment]
        self.value, self.weight = number, counted

    def _fold(self) -> None:
        self.device_value, self.device_weight = self._folded()
        self.pending, self.num_pending = [], 0

    def _folded(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the device part with the pending block added, without changing it."""
        if not self.pending:
            return self.device_value, self.device_weight
        tensors, weights = zip(*self.pending, strict=True)
        usual = set(map(type, weights)) == _NUMBER  # isinstance is slow to tell a number from a tensor
        on_device = [] if usual else [weight for weight in weights if isinstance(weight, Tensor)]
        values = self._stacked(tensors, on_device)
        block_weight: Tensor | None = None
        if on_device:
            counts = torch.cat(
                [_like(weight, values).expand(tensor.numel()) for tensor, weight in zip(tensors, weights, strict=True)]
            )
            block_value = torch.where(counts > 0, values * counts, torch.zeros_like(values)).sum()
            block_weight = torch.stack([_like(weight, values) for weight in on_device]).sum()
        elif len(set(weights)) == 1:
            block_value = (values if weights[0] == 1 else values * weights[0]).sum()
        else:  # the same products, without copying the numbers to the device as a tensor
            pieces = values.split_with_sizes([tensor.numel() for tensor in tensors])
            block_value = torch.cat(torch._foreach_mul(list(pieces), list(weights))).sum()
        return _plus(self.device_value, block_value), _plus(self.device_weight, block_weight)

    def _stacked(self, values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Stack 0-d tensors in the wide dtype; tensors of one dtype, the usual case, are converted together.

        The result is on the accelerator if one is in use, so that adding a CPU record does not wait for it.
        """
        devices = dict.fromkeys(map(_DEVICE, (*values, *weights)))
        of_sums = [part.device for part in (self.device_value, self.device_weight) if part is not None]
        device = next((each for each in (*of_sums, *devices) if each.type != "cpu"), torch.device("cpu"))
        if len(devices) == 1 and len(set(map(_DTYPE, values))) == 1:
            return widen(torch.hstack(values), device)  # type: ignore[arg-type]
        return torch.hstack([widen(value, device) for value in values])

    def include(self, other: _Sum) -> None:
        """Add the sums of another instance."""
        self.flush()
        other.flush()
        value, weight = other._folded()
        self.value, self.weight = self.value + other.value, self.weight + other.weight
        self.device_value, self.device_weight = _plus(self.device_value, value), _plus(self.device_weight, weight)

    def parts(self) -> list[float | Tensor]:
        """Return [value, device value, weight, device weight] without changing the sums."""
        self.flush()
        value, weight = self._folded()
        return [self.value, 0.0 if value is None else value, self.weight, 0.0 if weight is None else weight]


class RunningMeans:
    """Weighted means and totals of nested records.

    Adding never waits for the device and, for tensors, launches work only once per 64 additions.
    Reading moves everything in one transfer per device.

    Example:
        >>> means = RunningMeans()
        >>> means.add({"loss": torch.tensor(1.0)}, weight=4)
        >>> means.add({"loss": torch.tensor(4.0)}, weight=2)
        >>> means.compute()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], _Sum] = {}

    def add(self, record: Mapping[str, Any], weight: float | Tensor = 1.0, *, below: tuple[str, ...] = ()) -> None:
        """Add one nested record.

        Args:
            record: nested dict of numbers, 0-d tensors, :class:`Weighted` or :class:`Total`.
            weight: the weight of the plain values.
            below: path prefix of the record.

        Raises:
            TypeError: a value is not numeric, or a name is used for a mean and for a total.
        """
        for name, value in record.items():
            path = (*below, str(name))
            if type(value) not in _NUMBERS and isinstance(value, Mapping):
                self.add(value, weight, below=path)
            else:
                self.add_value(path, value, weight)

    def add_value(
        self, path: tuple[str, ...], value: float | Tensor | Weighted | Total, weight: float | Tensor = 1.0
    ) -> None:
        """Add one value of a record, as :meth:`add` does.

        Args:
            path: path of the value.
            value: a number, a 0-d tensor, :class:`Weighted` or :class:`Total`.
            weight: the weight of a plain value.

        Example:
            >>> means = RunningMeans()
            >>> means.add_value(("m", "acc"), 0.5)
            >>> means.compute()
            {'m': {'acc': 0.5}}
        """
        entry = self._sums.get(path)
        if entry is not None and not entry.is_total and type(weight) is float and _is_plain(value):
            log = entry.log
            log.append((value, weight))  # type: ignore[arg-type]
            if len(log) + entry.num_pending >= _BLOCK:
                entry.flush()
        elif isinstance(value, Total):
            self.add_total(path, value.value)
        elif isinstance(value, Weighted):
            self._entry(path, is_total=False).add(as_number(path, value.value), as_number(path, value.weight))
        else:
            self._entry(path, is_total=False).add(as_number(path, value), weight)

    def add_column(self, path: tuple[str, ...], values: Tensor, weight: float) -> None:
        """Add values (N,) of one weight in order, with the result of :meth:`add_value` one by one.

        Example:
            >>> means = RunningMeans()
            >>> means.add_column(("loss",), torch.tensor([1.0, 2.0]), 1.0)
            >>> means.compute()
            {'loss': 1.5}
        """
        self._entry(path, is_total=False).add_column(values, weight)

    def add_total(self, path: tuple[str, ...], value: float | Tensor) -> None:
        """Add one value to a total, as :meth:`add` does for a :class:`Total`.

        Example:
            >>> means = RunningMeans()
            >>> means.add_total(("n",), 2); means.add_total(("n",), 3)
            >>> means.compute()
            {'n': 5.0}
        """
        entry = self._sums.get(path)
        if entry is not None and entry.is_total and _is_plain(value):
            log = entry.log
            log.append((value, 1.0))
            if len(log) + entry.num_pending >= _BLOCK:
                entry.flush()
        else:
            self._entry(path, is_total=True).add(as_number(path, value), 1.0)

    def _entry(self, path: tuple[str, ...], *, is_total: bool) -> _Sum:
        entry = self._sums.get(path)
        if entry is None:
            entry = self._sums[path] = _Sum(is_total)
        if entry.is_total != is_total:
            if path == ("loss",):
                raise ConfigError(
                    "its reduction was changed between 'mean' and 'sum' within an epoch, whose loss would mix the two; "
                    "change it between two epochs",
                    argument="loss",
                )
            raise TypeError(f"record {'/'.join(path)!r} is a mean in one record and a Total in another; use two names")
        return entry

    def compute(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """Return the nested means and totals as floats; a mean with total weight 0 is NaN.

        Args:
            reduce: sums a float64 CPU tensor over ranks, which all have the same names; by default no reduction.
        """
        return means_of(self.names(), NumbersTransfer(self.parts()).read(), reduce) if self._sums else {}

    def parts(self) -> list[float | Tensor]:
        """Return value, device value, weight and device weight of each record, without changing the sums."""
        return [part for entry in self._sums.values() for part in entry.parts()]

    def sums(self, *path: str) -> tuple[float, float]:
        """Return the weighted sum and the total weight of one record; reads the device.

        Example:
            >>> means = RunningMeans()
            >>> means.add({"loss": 2.0}, weight=4)
            >>> means.sums("loss"), means.sums("other")
            ((8.0, 4.0), (0.0, 0.0))
        """
        entry = self._sums.get(path)
        if entry is None:
            return 0.0, 0.0
        value, on_device, weight, weight_on_device = NumbersTransfer(entry.parts()).read()
        return value + on_device, weight + weight_on_device

    def include(self, other: RunningMeans) -> None:
        """Add everything that was added to another instance."""
        for path, theirs in other._sums.items():
            self._entry(path, is_total=theirs.is_total).include(theirs)

    def names(self) -> list[tuple[tuple[str, ...], bool]]:
        """Return the paths of the records, each with whether it is a total."""
        return [(path, entry.is_total) for path, entry in self._sums.items()]

    def align_keys(self, names: Iterable[Iterable[tuple[tuple[str, ...], bool]]]) -> None:
        """Adopt the names of every rank, in rank order; names not added here have weight 0."""
        every = dict.fromkeys(name for of_rank in names for name in of_rank)
        self._sums = {path: self._entry(path, is_total=is_total) for path, is_total in every}

    def reset(self) -> None:
        """Reset all sums."""
        self._sums = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain values, from which they continue to the bit."""
        for entry in self._sums.values():
            entry.flush()
        return {
            "entries": [
                {
                    "path": list(path),
                    "is_total": entry.is_total,
                    "numbers": [entry.value, entry.weight],
                    "device": [entry.device_value, entry.device_weight],
                    "pending": [[value, weight] for part, weight in entry.pending for value in part.reshape(-1)],
                }
                for path, entry in self._sums.items()
            ]
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, device: torch.device | None = None) -> None:
        """Restore what :meth:`state_dict` returned, tensors on ``device``."""

        def place(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        self.reset()
        for saved in state_dict["entries"]:
            entry = self._entry(tuple(saved["path"]), is_total=saved["is_total"])
            entry.value, entry.weight = saved["numbers"]
            entry.device_value, entry.device_weight = (place(value) for value in saved["device"])
            entry.pending = [(place(value), place(weight)) for value, weight in saved["pending"]]
            entry.num_pending = len(entry.pending)


def _is_plain(value: Any) -> bool:
    """Return whether a value needs no conversion: a number, or a detached 0-d tensor."""
    kind = type(value)
    if kind is float:
        return True
    if kind is Tensor:
        return not (value.requires_grad or value.dim())
    return kind is int and -_EXACT < value < _EXACT


def _like(number: float | Tensor, reference: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device=reference.device, dtype=reference.dtype)
    return torch.full((), number, dtype=reference.dtype, device=reference.device)


def _plus(total: Tensor | None, value: Tensor | None) -> Tensor | None:
    if total is None or value is None:
        return value if total is None else total
    return total.to(value.device) + value


def means_of(
    names: Iterable[tuple[tuple[str, ...], bool]],
    parts: Sequence[float],
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """Compute means as :meth:`RunningMeans.compute` does.

    Args:
        names: path of each record, with whether it is a total.
        parts: values of :meth:`RunningMeans.parts`, on the host.
        reduce: as in :meth:`RunningMeans.compute`.
    """
    sums = [number + on_device for number, on_device in zip(parts[::2], parts[1::2], strict=True)]
    if reduce is not None:
        sums = reduce(torch.tensor(sums, dtype=torch.float64).reshape(-1, 2)).flatten().tolist()
    flat = {}
    for (path, is_total), value, weight in zip(names, sums[::2], sums[1::2], strict=True):
        flat[path] = value if is_total else (value / weight if weight > 0 else math.nan)
    return unflatten(flat)
