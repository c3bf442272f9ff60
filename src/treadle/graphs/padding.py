"""Padding of training batches: bucket selection, and the fraction of padded slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.graphs.buckets import PadBucket, columns, plan_buckets
from treadle.graphs.losses import GraphLoss
from treadle.graphs.padded import PaddedGraphBatch, pad_batch
from treadle.seed import forked_rng

if TYPE_CHECKING:
    from treadle.engine import Engine

PadTo = int | PadBucket | Sequence[PadBucket] | None
_KINDS = ("nodes", "edges", "pairs")


@dataclass(frozen=True)
class PreparedGraphs:
    """Training batch that is already padded and counted."""

    padded: PaddedGraphBatch


def buckets_for(loader: Any, num_buckets: int) -> list[PadBucket]:
    """Choose buckets for the batches of a loader from the graphs of its data set; see `plan_buckets`.

    Args:
        loader: loader with a ``dataset`` of graphs and a ``batch_size``, its own or its ``batch_sampler``'s.
        num_buckets: maximum number of buckets, >= 1.

    Raises:
        ConfigError: the loader does not expose its data set or its batch size.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch.utils.data import DataLoader
        >>> graphs = [SimpleNamespace(x=torch.ones(n), edge_index=torch.ones(2, 2 * n)) for n in [5, 9, 6] * 20]
        >>> [bucket.rows for bucket in buckets_for(DataLoader(graphs, 4, collate_fn=list), 3)]
        [2, 4, 5]
    """
    graphs: Any = getattr(loader, "dataset", None)
    sampler: Any = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if size is None and getattr(sampler, "global_batch_size", None) is not None:
        size = -(-sampler.global_batch_size // distributed.world_size())
    if size is None or not hasattr(graphs, "__getitem__") or not hasattr(graphs, "__len__"):
        raise ConfigError(
            f"={num_buckets}: buckets are chosen from the graphs of the loader's dataset and its batch_size, and "
            f"this {type(loader).__name__} does not provide them; pass pad_to=plan_buckets(graphs, batch_size)",
            argument="pad_to",
        )
    with forked_rng():  # a data set may draw random numbers when a graph is read, which must not affect training
        return plan_buckets((graphs[index] for index in range(len(graphs))), size, num_buckets=num_buckets)


class Padding:
    """Padding of training batches, with counts of the padded slots.

    Args:
        pad_to: buckets, or the number of buckets to choose from the data; None disables padding.
        level: level of the target rows, ``"graph"``, ``"node"`` or ``"edge"``; None infers it from a batch.
        loss_fn: must be able to ignore padding.

    Attributes:
        buckets: buckets in use; None if nothing is padded here, or before :meth:`plan`.

    Raises:
        ConfigError: a number is below 1, there is no bucket, or the loss is not from `get_loss_fn`.

    Example:
        >>> Padding([PadBucket(graphs=3, rows=2, row_length=3, edges=6)]).buckets[0].edges
        6
    """

    def __init__(self, pad_to: PadTo = None, *, level: str | None = None, loss_fn: Any = None):
        if pad_to is not None and loss_fn is not None and not isinstance(loss_fn, GraphLoss):
            raise ConfigError(
                f"loss_fn={loss_fn!r} cannot ignore padding; use a loss of get_loss_fn",
                argument="pad_to",
                value=pad_to,
            )
        self._num_buckets = pad_to if isinstance(pad_to, int) else None
        self.buckets: list[PadBucket] | None = None
        if isinstance(pad_to, PadBucket):
            self.buckets = [pad_to]
        elif pad_to is not None and not isinstance(pad_to, int):
            self.buckets = list(pad_to)
        if isinstance(pad_to, bool) or pad_to == 0 or self.buckets == [] or (self._num_buckets or 1) < 1:
            raise ConfigError("give a number of buckets >= 1, or PadBuckets", argument="pad_to", value=pad_to)
        self._level = level
        self._planned_for: Any = None
        self._used = {kind: [0, 0] for kind in _KINDS}

    def plan(self, loader: Iterable[Any]) -> None:
        """Choose the buckets from a loader's data set, if a number of buckets was given."""
        if self._num_buckets is not None and self._planned_for is not loader:
            self.buckets, self._planned_for = buckets_for(loader, self._num_buckets), loader

    def padded(self, batch: Any) -> Any:
        """Return the batch, padded if it is not yet and there are buckets, and count it.

        Raises:
            ConfigError: no bucket holds it.
        """
        if self.buckets is not None and not isinstance(batch, PaddedGraphBatch):
            batch = pad_batch(batch, self.buckets, level=self._level or level_of(batch))
        if isinstance(batch, PaddedGraphBatch):
            for kind, (real, room) in room_of(batch).items():
                self._used[kind][0] += real
                self._used[kind][1] += room
        return batch

    def forget(self) -> None:
        """Reset the counts."""
        self._used = {kind: [0, 0] for kind in _KINDS}

    def used(self) -> dict[str, list[int]]:
        """Return the numbers of real slots and of all slots for each kind, over all ranks."""
        numbers = torch.tensor([self._used[kind] for kind in _KINDS], dtype=torch.float64)
        summed = distributed.sum_over_ranks(numbers).tolist()
        return {kind: [int(n) for n in pair] for kind, pair in zip(_KINDS, summed, strict=True) if pair[1]}

    def take_up(self, used: Mapping[str, Sequence[int]]) -> None:
        """Restore counts returned by :meth:`used`; a collective call."""
        self.forget()
        if distributed.rank() == 0:
            self._used.update({kind: list(pair) for kind, pair in used.items()})


def level_of(batch: Any) -> str:
    """Return the level of a batch's targets, inferred from their number of rows.

    Example:
        >>> from types import SimpleNamespace
        >>> level_of(SimpleNamespace(x=torch.zeros(3), y=torch.zeros(3), num_graphs=2))
        'node'
    """
    target = getattr(batch, "y", None)
    target = getattr(batch, "target", None) if target is None else target
    if not isinstance(target, Tensor) or target.dim() == 0 or len(target) == getattr(batch, "num_graphs", 1):
        return "graph"
    pairs = columns(batch, "pair_index")
    return "edge" if pairs and len(target) == pairs else "node"


def room_of(batch: PaddedGraphBatch) -> dict[str, tuple[int, int]]:
    """Return the numbers of real slots and of all slots of a padded batch; empty if it is on a device.

    Example:
        >>> from types import SimpleNamespace
        >>> one = SimpleNamespace(x=torch.ones(2, 1), edge_index=torch.tensor([[0, 1], [1, 0]]), num_graphs=1)
        >>> room_of(pad_batch(one, PadBucket(graphs=3, rows=2, row_length=3, edges=6)))
        {'nodes': (2, 6), 'edges': (2, 6)}
    """
    if batch.node_mask.device.type != "cpu":
        return {}
    masks = {"nodes": batch.node_mask, "edges": batch.edge_mask}
    if batch.edge_pe_index is not None:
        masks["pairs"] = batch.node_mask[batch.edge_pe_index[0]]
    return {kind: (int(np.count_nonzero(mask.numpy())), len(mask)) for kind, mask in masks.items()}


def share_of_padding(used: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the fraction of padded slots of each kind.

    Example:
        >>> share_of_padding({"nodes": [3, 4]})
        {'nodes': 0.25}
    """
    return {kind: 1 - real / room for kind, (real, room) in used.items() if room}


class PaddingHook(BaseHook):
    """Hook that preserves the padding counts across a resume, and logs them after the first epoch.

    Args:
        padding: the padding whose counts are kept.
    """

    def __init__(self, padding: Padding):
        self._padding = padding
        self._said = False

    def on_after_epoch(self, trainer: Engine) -> None:
        """Log the counts once, and reset them."""
        shares = share_of_padding(self._padding.used())
        if shares and not self._said:
            self._said = True
            parts = ", ".join(f"{share:.0%} of the {kind}" for kind, share in shares.items())
            trainer.logger.info("padding: %s that were computed in this epoch were padding", parts)
        self._padding.forget()

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Store the counts of the current epoch."""
        state_dict["hooks"][self.state_key] = {"used": self._padding.used()}

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self._padding.take_up(((state_dict.get("hooks") or {}).get(self.state_key) or {}).get("used", {}))
