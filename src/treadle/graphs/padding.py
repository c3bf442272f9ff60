"""Padding of the batches that a trainer trains on: into which buckets, and how much of the work is padding."""

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
    """A batch of a training step that is padded and counted already."""

    padded: PaddedGraphBatch


def buckets_for(loader: Any, num_buckets: int) -> list[PadBucket]:
    """Choose buckets for the batches of a loader from the graphs of its data set; see `plan_buckets`.

    Args:
        loader: with a ``dataset`` of graphs, and a ``batch_size``, which its ``batch_sampler`` may have instead.
        num_buckets: how many at most, >= 1.

    Raises:
        ConfigError: the loader does not say what it reads, or in batches of which size.

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
            f"this {type(loader).__name__} does not tell them; give pad_to=plan_buckets(graphs, batch_size)",
            argument="pad_to",
        )
    with forked_rng():  # a data set may draw where a graph is read, and training is not to notice
        return plan_buckets((graphs[index] for index in range(len(graphs))), size, num_buckets=num_buckets)


class Padding:
    """Padding of the batches of a training, with a count of the padded slots.

    Args:
        pad_to: buckets, or how many to choose from the data; None leaves batches as the loader makes them.
        level: what a row of the targets belongs to, ``"graph"``, ``"node"`` or ``"edge"``; None infers it from a batch.
        loss_fn: must be able to leave padding out.

    Attributes:
        buckets: in use; None where nothing is padded here, or before :meth:`plan`.

    Raises:
        ConfigError: a number is below 1, there is no bucket, or the loss is none of `get_loss_fn`.

    Example:
        >>> Padding([PadBucket(graphs=3, rows=2, row_length=3, edges=6)]).buckets[0].edges
        6
    """

    def __init__(self, pad_to: PadTo = None, *, level: str | None = None, loss_fn: Any = None):
        if pad_to is not None and loss_fn is not None and not isinstance(loss_fn, GraphLoss):
            raise ConfigError(
                f"loss_fn={loss_fn!r} cannot leave padding out; use a loss of get_loss_fn",
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
        """Choose the buckets from a loader's data set, if a number of them is wanted."""
        if self._num_buckets is not None and self._planned_for is not loader:
            self.buckets, self._planned_for = buckets_for(loader, self._num_buckets), loader

    def padded(self, batch: Any) -> Any:
        """Return a batch padded, if it is not and there are buckets, and count it.

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
        """Return, for each kind that has slots, how many were real and how many there were, over all ranks."""
        numbers = torch.tensor([self._used[kind] for kind in _KINDS], dtype=torch.float64)
        summed = distributed.sum_over_ranks(numbers).tolist()
        return {kind: [int(n) for n in pair] for kind, pair in zip(_KINDS, summed, strict=True) if pair[1]}

    def take_up(self, used: Mapping[str, Sequence[int]]) -> None:
        """Restore what :meth:`used` returned; all ranks call it."""
        self.forget()
        if distributed.rank() == 0:
            self._used.update({kind: list(pair) for kind, pair in used.items()})


def level_of(batch: Any) -> str:
    """Return what a row of a batch's targets belongs to, by its number of rows.

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
    """Return how many slots of a padded batch are real, and how many it has; nothing of one on a device.

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
    """Return the share of slots that are padding, of each kind.

    Example:
        >>> share_of_padding({"nodes": [3, 4]})
        {'nodes': 0.25}
    """
    return {kind: 1 - real / room for kind, (real, room) in used.items() if room}


class PaddingHook(BaseHook):
    """Hook that keeps the count of padding over a resume, and logs it after the first epoch.

    Args:
        padding: what counts.
    """

    def __init__(self, padding: Padding):
        self._padding = padding
        self._said = False

    def on_after_epoch(self, trainer: Engine) -> None:
        """Log it once, and reset the count."""
        shares = share_of_padding(self._padding.used())
        if shares and not self._said:
            self._said = True
            parts = ", ".join(f"{share:.0%} of the {kind}" for kind, share in shares.items())
            trainer.logger.info("padding: %s that were computed in this epoch were padding", parts)
        self._padding.forget()

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Store the count of the present epoch."""
        state_dict["hooks"][self.state_key] = {"used": self._padding.used()}

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore it."""
        self._padding.take_up(((state_dict.get("hooks") or {}).get(self.state_key) or {}).get("used", {}))
