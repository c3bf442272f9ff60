"""Where a stored position lies in the data of another number of ranks, or of another batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.data.order import GlobalOrder


@dataclass(frozen=True)
class Place:
    """A place in the running epoch.

    Attributes:
        position: micro-batches consumed, of those of a whole epoch.
        start: samples of the global order after which the epoch was entered; 0 without such an order.
        keeps_state: whether a loader's own state means the same place.
        exact: whether the batches to come are those of the run that was stopped.
        warnings: what the user must know.
    """

    position: int
    start: int = 0
    keeps_state: bool = True
    exact: bool = True
    warnings: list[str] = field(default_factory=list)


def find_place(
    saved: Mapping[str, Any], *, position: int, order: GlobalOrder | None, length: int | None, ranks: int, loader: str
) -> Place:
    """Returns where a run goes on.

    Args:
        saved: the ``data`` entry of the checkpoint.
        position: the stored micro-batches.
        order: how the loader's samples are ordered and cut now; None if it has no global order.
        length: micro-batches in an epoch now, or None.
        ranks: how many there are now.
        loader: what to call the loader.
    """
    before = saved.get("order")
    if order is not None and before is not None and order.same_samples(before):
        if order.same_batches(before):
            return Place(position, start=int(before["start"]))
        return _place_in_order(before, order)
    wrote = saved.get("num_ranks") or ranks
    if wrote == ranks:
        return Place(position)
    old_length = saved.get("length")
    scaled = position if not old_length or length is None else position * length // old_length
    return Place(
        scaled,
        keeps_state=False,
        exact=False,
        warnings=[
            f"the checkpoint was written by {wrote} ranks inside an epoch and this run has {ranks}: the position in a "
            f"{loader} cannot be carried over, and some samples of this epoch are read twice or not at all "
            f"(going on after {scaled} of {length if length is not None else 'an unknown number of'} micro-batches); "
            "a treadle.data.RankBatchSampler goes on with the very samples that are left"
        ],
    )


def _place_in_order(before: Mapping[str, Any], order: GlobalOrder) -> Place:
    """The samples that are left are cut afresh; counted so that position and length tell what is left."""
    start = int(before["consumed"])
    left = order.num_batches(start)
    warnings = [
        f"the epoch goes on after {start} of its {order.num_samples} samples, in the same order and none lost or "
        f"doubled, but in other batches: {before['global_batch_size']} samples on {before['num_replicas']} ranks "
        f"before, {order.global_batch_size} on {order.num_replicas} now. From here on the run is another"
    ]
    unread = order.num_samples - order.consumed(left, start)
    if unread and not order.drop_last:
        warnings.append(
            f"the last {unread} samples of the epoch are fewer than the {order.num_replicas} ranks: they are not read "
            "in this epoch"
        )
    return Place(order.num_batches() - left, start=start, keeps_state=False, exact=False, warnings=warnings)
