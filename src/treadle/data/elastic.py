"""Mapping of a stored position to the current data, with other ranks, batches or loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.data.order import GlobalOrder
from treadle.errors import CheckpointError, number_of


@dataclass(frozen=True)
class ResumePoint:
    """Position in the running epoch.

    Attributes:
        position: micro-batches consumed, counted in a whole epoch.
        start: samples of the global order after which the epoch was entered; 0 without such an order.
        keeps_state: whether a loader's own state is valid for the position.
        exact: whether the following batches are those of the stopped run.
        warnings: messages for the user.
    """

    position: int
    start: int = 0
    keeps_state: bool = True
    exact: bool = True
    warnings: list[str] = field(default_factory=list)


def find_place(
    saved: Mapping[str, Any], *, position: int, order: GlobalOrder | None, length: int | None, ranks: int, loader: str
) -> ResumePoint:
    """Return the position at which a run continues.

    Args:
        saved: the ``data`` entry of the checkpoint.
        position: the stored micro-batches.
        order: current order of the loader's samples; None if it has no global order.
        length: current number of micro-batches in an epoch, or None.
        ranks: current number of ranks.
        loader: name of the loader in messages.
    """
    before = saved.get("order")
    if order is not None and before is not None and order.same_samples(before):
        if order.same_batches(before):
            return ResumePoint(position, start=int(before["start"]))
        return _place_in_order(before, order)
    wrote = saved.get("num_ranks") or ranks
    if wrote == ranks:
        another_order = "order" in saved and (before is not None or order is not None)  # older states lack it
        return _place_in_another_order(position, loader) if another_order else ResumePoint(position)
    old_length = saved.get("length")
    scaled = position if not old_length or length is None else position * length // old_length
    return ResumePoint(
        scaled,
        keeps_state=False,
        exact=False,
        warnings=[
            f"the checkpoint was written by {number_of(wrote, 'rank')} inside an epoch and this run has "
            f"{ranks}: the position of a {loader} cannot be converted, so some samples of this epoch "
            "are read twice or not at all (continuing "
            f"after {scaled} of {length if length is not None else 'an unknown number of'} micro-batches); a "
            "treadle.data.RankBatchSampler continues with exactly the remaining samples"
        ],
    )


def _place_in_another_order(position: int, loader: str) -> ResumePoint:
    return ResumePoint(
        position,
        exact=False,
        warnings=[
            f"the checkpoint was written inside an epoch with a different sample order from that of this {loader}: "
            "some samples of this epoch are read twice or not at all"
        ],
    )


def _place_in_order(before: Mapping[str, Any], order: GlobalOrder) -> ResumePoint:
    """Return the position in the remaining samples, divided into new batches."""
    start = int(before["consumed"])
    left = order.num_batches(start)
    warnings = [
        f"the epoch continues after {start} of its {order.num_samples} samples, in the same order, none lost or "
        f"repeated, but in different batches: {before['global_batch_size']} samples on {before['num_replicas']} ranks "
        f"before, {order.global_batch_size} on {order.num_replicas} now. The run differs from here on"
    ]
    unread = order.num_samples - order.consumed(left, start)
    if unread and not order.drop_last:
        warnings.append(
            f"the last {unread} samples of the epoch are skipped, as they are fewer than the {order.num_replicas} ranks"
        )
    return ResumePoint(order.num_batches() - left, start=start, keeps_state=False, exact=False, warnings=warnings)


def refuse_other_workers(saved: Mapping[str, Any], now: Mapping[str, Any], *, loader: str) -> None:
    """Raise if a loader's own state has another number of workers, where torchdata fails with a bare assertion.

    Args:
        saved: the ``data`` entry of the checkpoint.
        now: the same keys for the attached loader: ``kind``, ``length``, ``num_workers``.
        loader: name of the loader in messages.

    Raises:
        CheckpointError: the number of workers differs.
    """
    before, both_stateful = saved.get("num_workers"), saved.get("kind") == now["kind"] in ("stateful", "streamed")
    if both_stateful and saved.get("loader") is not None and before not in (None, now["num_workers"]):
        raise CheckpointError(
            f"the {loader}'s own state was saved with num_workers={before} and cannot be loaded with "
            f"num_workers={now['num_workers']}: keep the number, or use a plain DataLoader, whose position does not "
            "depend on it"
        )


def changes_between_epochs(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return messages on how the loader differs from the checkpoint's at the start of an epoch.

    Args:
        saved: the ``data`` entry of the checkpoint, between two epochs.
        now: the same keys of the attached loader: ``kind``, ``length``, ``num_workers``.

    Example:
        >>> now = {"kind": "replayed", "length": 4, "num_workers": 0}
        >>> changes_between_epochs({"kind": "replayed", "length": 8}, now)[0][:61]
        'resumed with another loader: an epoch had 8 micro-batches and'
    """
    return [f"resumed with another loader: {sentence}" for sentence in _differences(saved, now)]


def mismatches(saved: Mapping[str, Any], now: Mapping[str, Any], place: ResumePoint) -> list[str]:
    """Return messages on how the loader differs from the checkpoint's; arguments as above."""
    words = _differences(saved, {**now, "length": now["length"] if place.exact else saved.get("length")})
    return [f"resume inside an epoch is not exact: {sentence}" for sentence in words]


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    words = []
    if saved.get("kind") not in (None, now["kind"]):
        words.append(f"the checkpoint's loader was of kind {saved['kind']!r}, this one is {now['kind']!r}")
    if saved.get("length") not in (None, now["length"]):
        words.append(
            f"an epoch had {saved['length']} micro-batches and now has {now['length']}: another batch size, data set "
            "or number of ranks"
        )
    workers = saved.get("num_workers")
    if workers is not None and workers != now["num_workers"] and now.get("depends_on_workers"):
        words.append(
            f"num_workers was {workers} and is now {now['num_workers']}, and the data set depends on the worker that "
            "reads it"
        )
    elif workers is not None and bool(workers) != bool(now["num_workers"]):
        words.append(
            f"num_workers was {workers} and is now {now['num_workers']}: random numbers of items come from the main "
            "process with 0 workers, and from seeds of the workers with more"
        )
    return words
