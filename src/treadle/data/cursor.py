"""Cursor: epoch and position in the data, and how to restore them to the bit."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle import distributed
from treadle.checkpoint.schema import from_plain
from treadle.data.agreement import Coordination, EpochAgreement, Lengths
from treadle.data.amount import Amount, batches_in
from treadle.data.batch_sizes import other_batch_size
from treadle.data.built_data import BuiltData
from treadle.data.duplicates import repeated_by_workers
from treadle.data.elastic import ResumePoint, changes_between_epochs, find_place, mismatches, refuse_other_workers
from treadle.data.loader_parts import LoaderParts
from treadle.data.order import in_global_order
from treadle.data.own_state import restored_generators, set_epoch
from treadle.data.samples import explain_collate
from treadle.data.source import Source
from treadle.data.sources import open_source
from treadle.errors import ConfigError
from treadle.seed import RngState, forked_rng, mix_seed

_log = logging.getLogger("treadle.data")
_END = object()


@dataclass
class Group:
    """Micro-batches of one step.

    Attributes:
        batches: batches from the loader.
        data_time: seconds spent waiting for each.
        sample_ids: what each was read with: the sampler's index list for map-style loaders; a callable that returns the
            rows for rows of tensors; else None.
    """

    batches: list[Any] = field(default_factory=list)
    data_time: list[float] = field(default_factory=list)
    sample_ids: list[Any] = field(default_factory=list)


class Cursor:
    """Position in the data. It is created before its loader, so that a checkpoint can be loaded into it first.

    Args:
        ranks: coordination of several ranks, see :class:`EpochAgreement`.
        limit: micro-batches after which an epoch ends, or a fraction of it; None for all.
        only: micro-batches from the start of the loader, or a fraction of it, that are read once, kept, and make up
            every epoch; None reads the loader in each epoch.

    Attributes:
        epoch: epochs completed.
        position: micro-batches consumed in the running epoch. If another number of ranks began the epoch, the number
            that leaves the same remainder.
        ended: whether the running epoch has no more micro-batches.
        built: comparison of the values with which the data is built.

    Example:
        >>> cursor = Cursor()
        >>> cursor.open([10, 20, 30])
        >>> cursor.take(2).batches, cursor.take(2).batches, cursor.ended
        ([10, 20], [30], True)
    """

    def __init__(
        self,
        *,
        ranks: Coordination = "independent",
        limit: Amount | None = None,
        only: Amount | None = None,
    ) -> None:
        self._agreement = EpochAgreement(ranks)
        self._agrees = False  # whether ranks agree on each group of the running epoch
        self._limit = limit
        self._end: int | None = None  # position at which the limit ends an epoch of the attached loader
        self._only = only
        self._first: tuple[Any, list[Any]] | None = None  # a loader, and the batches used in place of it
        self.epoch = 0
        self.position = 0
        self.ended = False
        self._place = ResumePoint(0)  # where the running epoch was resumed
        self._passed = 0  # positions before that point that this loader never had
        self._source: Source | None = None
        self._iterator: Iterator[Any] | None = None
        self._opening: dict[str, Any] | None = None  # RNG and generator states at the epoch's opening
        self._loaded: dict[str, Any] | None = None  # a checkpoint's data entry, pending until the loader is attached
        self._parts = LoaderParts()
        self.built = BuiltData()
        self._between: Any = None  # a checkpoint's state of the loader between two epochs, until the next one is opened
        self._epoch_of_workers: int | None = None  # epoch set on the data sets before workers started
        self._warned: set[str] = set()

    def attach(self, loader: Any) -> None:
        """Attach a loader; cheap if it is already attached."""
        if self._only is not None:
            loader = self._first_batches(loader, self._only)
        if loader is not self.loader:
            if self._opening is not None and self._loaded is None and in_global_order(self.loader) is not None:
                self._loaded = {**self.state_dict(), "loader": None}  # the rest is available for any loader
            self._source = open_source(loader)
            self.limit_to(self._limit)
            self._parts.attach(loader)
            self.built.attach(loader, self._parts.objects.owners)
            self._iterator = None
            self.warn(self._source.warnings(resuming=False) + repeated_by_workers(loader))

    def coordinate(self, ranks: Coordination) -> None:
        """Set the coordination of several ranks, from the next epoch on."""
        self._agreement = EpochAgreement(ranks)

    def limit_to(self, limit: Amount | None) -> None:
        """End epochs after a number of micro-batches or a fraction of the attached loader; None removes the limit.

        Raises:
            ConfigError: it is a part of an unknown length, or comes to no batch at all.
        """
        self._limit = limit
        length = None if self._source is None else self._source.length
        self._end = None if limit is None else batches_in(limit, length, "limit_train_batches")

    def _first_batches(self, loader: Any, only: Amount) -> list[Any]:
        """Return the first batches of a loader, in the same order in every process of the run."""
        if self._first is None or loader is not self._first[0]:
            with forked_rng(0), restored_generators(loader):
                first = Cursor()
                first.attach(loader)
                count = batches_in(only, first.length, "overfit_batches")
                first.open(loader)
                batches = first.take(count).batches
                first.close()
            self._first = (loader, batches)
        return self._first[1]

    def open(self, loader: Any) -> None:
        """Open the running epoch: at its start, its current position, or the position of a loaded checkpoint."""
        self.attach(loader)
        loader = self.loader
        self._parts.begin_opening()
        if self._opening is None or self._iterator is not None or self.ended:
            self._parts.restore()  # between two epochs: what set_epoch and the length of the next one build on
            self.warn(other_batch_size(self._loaded or {}, loader))
        if self._iterator is not None or self.ended:
            return
        if set_epoch(loader, self.epoch) and self._epoch_of_workers not in (None, self.epoch):
            self._attached_source().close()  # copies in persistent workers are set to another epoch
        self._epoch_of_workers = self.epoch
        if self._opening is not None:
            self._parts.objects.restore(self._opening.get("objects") or {})  # it may determine the length of the epoch
        source = self._attached_source()
        source.measure()
        other = self.built.opened(loader, kind=source.kind, length=source.length, is_new=self._opening is None)
        self.warn(other, topic="other values")
        self.warn(self._agreement.open(loader, self.length, exact=source.exact))
        self._agrees = self._agreement.on_each_group
        if self._opening is None:
            self._open_fresh()
        else:
            self._reopen(self._opening)

    def settle(self, loader: Any) -> None:
        """Between two epochs, attach a loader and restore now what opening the next epoch would restore.

        Code of the user's that runs before the epoch then begins as in an undisturbed run. If it opens another loader,
        the state goes into that one, too.
        """
        if self._opening is None:
            self.attach(loader)
            self._parts.settle()

    def put_back(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the objects and generators of the opened loader, but not its position."""
        if self._iterator is not None:
            self._parts.put_back(state_dict)

    def _open_fresh(self) -> None:
        self._opening = self._parts.opening()
        if self._loaded is not None:
            source = self._attached_source()
            length = self._loaded.get("length") if self._loaded.get("objects") else source.length  # these may move it
            now = {"kind": source.kind, "length": length, "num_workers": self._parts.num_workers}
            self.warn(changes_between_epochs(self._loaded, now), topic="resumed position")
        self._loaded = None  # a checkpoint of the start of the epoch: from here on the position differs
        between, self._between = self._between, None
        self._iterator = self._iterate(skip=0, state=from_plain(between))

    def _reopen(self, opening: Mapping[str, Any]) -> None:
        loaded, source = self._loaded or {}, self._attached_source()
        self._seek(loaded)
        now = {"kind": source.kind, "length": source.length, "num_workers": self._parts.num_workers,
               "depends_on_workers": self._parts.objects.depends_on_workers}  # fmt: skip
        if self._place.keeps_state:
            refuse_other_workers(loaded, now, loader=type(self.loader).__name__)
        self.warn(self._place.warnings, topic="resumed position")
        self.warn(mismatches(loaded, now, self._place) + source.warnings(resuming=True))
        self.warn(self._parts.unknown(opening.get("objects") or {}))
        keeps_state = self._place.keeps_state and loaded.get("kind") == source.kind
        state = from_plain(loaded.get("loader")) if keeps_state else None
        with self._parts.reopening(opening):
            self._iterator = self._iterate(skip=self.position - self._passed, state=state)
        self._loaded = None

    def _seek(self, loaded: Mapping[str, Any]) -> None:
        """Find the stored position in the attached loader, whose ranks and batches may differ."""
        ordered = in_global_order(self.loader)
        self._place = find_place(
            loaded,
            position=self.position,
            order=None if ordered is None else ordered.order,
            length=self.length,
            ranks=distributed.world_size(),
            loader=type(self.loader).__name__,
        )
        self.position = self._place.position
        self._passed = 0
        if ordered is not None:
            ordered.start_at(self._place.start)
            self._passed = ordered.order.num_batches() - ordered.order.num_batches(self._place.start)

    def _iterate(self, *, skip: int, state: Any) -> Iterator[Any]:
        assert self._opening is not None
        digest = hashlib.blake2b(self._opening["rng"]["torch"].numpy().tobytes(), digest_size=8).digest()
        entered = [self._place.start] if self._place.start else []
        seed = mix_seed(int.from_bytes(digest, "little"), self.epoch, distributed.rank(), *entered)
        source = self._attached_source()
        cut = self._end is not None and (source.length is None or self._end < source.length)
        return source.open(skip=skip, seed=seed, state=state, cut=cut)

    @property
    def lengths(self) -> Lengths | None:
        """Lengths reported by the ranks when the epoch was opened; None on one rank or if these are independent."""
        return self._agreement.lengths

    @property
    def loader(self) -> Any:
        """Attached loader, or None."""
        return self._parts.loader

    @property
    def length(self) -> int | None:
        """Micro-batches in an epoch by ``len`` of the attached loader and the limit."""
        whole = self._source.length if self._source else None
        return whole if self._end is None else self._end if whole is None else min(whole, self._end)

    def _attached_source(self) -> Source:
        assert self._source is not None, "call attach() first"
        return self._source

    def take(self, count: int) -> Group:
        """Draw up to ``count`` micro-batches of the running epoch; an empty group means that the epoch has ended."""
        group = Group()
        if self.ended:
            return group
        if count > 1:
            self._check_buffers(count)
        source, asks, end = self._attached_source(), self._agrees, self._end
        fresh = self.position == 0
        if end is not None and self.position >= end:
            self.ended, self._iterator = True, None
            return group
        while len(group.batches) < count and not self.ended:
            assert self._iterator is not None, "call open() first"
            start = time.perf_counter()
            try:
                batch = self._next_batch(self._iterator)
            except BaseException as error:
                self._rewind(self.position - len(group.batches))
                explain_collate(error, self.loader)
                raise
            if batch is _END:
                self.ended = True
                break
            group.data_time.append(time.perf_counter() - start)
            group.batches.append(batch)
            group.sample_ids.append(source.ids_at(self.position - self._passed))
            self.position += 1
            if source.exact and not asks and self.position >= (source.length or 0):
                source.finish(self._iterator)
                self.ended = True
            elif end is not None and self.position >= end:
                self.ended = not asks
                break
        if asks:
            self._end_with_the_first(group, count)
        if fresh:
            self.warn(source.warnings(resuming=False))  # a stream is only known after reading from it
        if self.ended:
            self._iterator = None
            self.warn(source.warnings(resuming=False))
            self.warn(self._parts.lost(), topic="state that is lost")
        return group

    def skip(self, count: int) -> None:
        """Count micro-batches that were gathered without being drawn, excluding the last of the epoch."""
        self.loader.skip(count)
        self.position += count

    def _check_buffers(self, count: int) -> None:
        """Refuse a group whose later batches would overwrite its first ones."""
        num_buffers = getattr(self.loader, "num_buffers", None)
        if isinstance(num_buffers, int) and count > num_buffers:
            raise ConfigError(
                f"={num_buffers}: a step of {count} micro-batches needs {count} sets of tensors, or later "
                f"micro-batches overwrite earlier ones; pass num_buffers={count} to the "
                f"{type(self.loader).__name__}, or None for new tensors",
                argument="num_buffers",
            )

    def _end_with_the_first(self, group: Group, count: int) -> None:
        """Drop micro-batches that other ranks do not have, and end the epoch on all ranks."""
        used = self._agreement.smallest(len(group.batches))
        unused = len(group.batches) - used
        if unused:
            self.position -= unused
            left = f"{unused}" if self.ended else f"{unused} or more"
            left = left if self.length is None else f"{self.length - self.position}"
            self.warn([
                f"rank {distributed.rank()}: another rank has no more data, so the epoch ends on all ranks; {left} "
                "micro-batches are not used here"
            ])  # fmt: skip
            for part in (group.batches, group.data_time, group.sample_ids):
                del part[used:]
        self.ended = used < count

    def _next_batch(self, iterator: Iterator[Any]) -> Any:
        try:
            return next(iterator)
        except StopIteration as error:
            if not self._attached_source().is_over_at(self.position - self._passed):
                raise RuntimeError(
                    "a StopIteration was raised inside the data set, its collate function or a worker before the end "
                    "of the data"
                ) from error
            return _END

    def _rewind(self, position: int) -> None:
        """Discard a broken iterator, so that no batch is lost when the epoch is reopened."""
        self.position = position
        self._suspend({**self.state_dict(), "loader": None})

    def _suspend(self, state: dict[str, Any]) -> None:
        """Discard the iterator; the epoch is reopened from a state."""
        self._loaded = state
        self._parts.pend(state)
        self._iterator = None

    def give_back(self, count: int) -> None:
        """Return the last micro-batches: the epoch is reopened before them."""
        self.ended = False
        self._rewind(self.position - count)

    def next_epoch(self) -> None:
        """Count the running epoch as completed."""
        self.epoch += 1
        self.position = 0
        self.ended = False
        self._iterator = None
        self._opening = self._loaded = None
        self._place, self._passed = ResumePoint(0), 0

    def restart(self, *, epoch: int = 0) -> None:
        """Go to the start of an epoch, keeping the loader and persistent workers."""
        self.next_epoch()
        self.epoch = epoch

    def close(self) -> None:
        """End workers and threads; the position is kept and the epoch can be reopened."""
        in_background = self._parts.num_workers or getattr(self.loader, "in_background", False)
        if not in_background or self._source is None:
            return
        if self._iterator is not None:
            self._suspend(self.state_dict())
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the ``data`` entry of a checkpoint."""
        if self._loaded is not None and not self._parts.is_settled:  # not opened yet: still the same position
            return dict(self._loaded)
        if self._loaded is not None:
            return {**self._loaded, "generators": self._parts.generators(), "objects": self._parts.states()}
        source, objects = self._source, self._parts.states()
        self.warn(self._parts.lost(), topic="state that is lost")  # after the look at the states, which it uses
        opened = self._iterator is not None
        has_state = opened or (source is not None and source.counts_epochs and self.between_epochs)
        if source is not None and opened:
            self.warn(source.warnings(resuming=False))
        return {
            "epoch": self.epoch,
            "position": self.position,
            "ended": self.ended,
            "opening": self._parts.objects.completed(self._opening, objects),
            "generators": self._parts.generators(),
            "kind": source.kind if source else None,
            "length": source.length if source else None,
            "loader": source.state() if source and has_state else None,
            "num_workers": self._parts.num_workers,
            "num_ranks": distributed.world_size(),
            "order": self._order_state(),
            **({"objects": objects} if objects else {}),
        }

    @property
    def between_epochs(self) -> bool:
        """Whether an epoch has ended and the next one has not begun."""
        return self.ended or (self.epoch > 0 and not self.position)

    def _order_state(self) -> dict[str, Any] | None:
        """Return the position of all ranks in the global order, if the loader has one."""
        ordered, start = in_global_order(self.loader), self._place.start
        if ordered is None:
            return None
        consumed = ordered.order.consumed(self.position - self._passed, start)
        return {**ordered.order.describe(), "start": start, "consumed": consumed}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, rng: RngState | None = None) -> None:
        """Restore the position, at which the loader is opened once attached.

        Args:
            state_dict: result of :meth:`state_dict`, with each rank's part under ``"ranks"`` if several wrote it.
            rng: the checkpoint's RNG, restored last, after the epoch is reopened.
        """
        of_ranks = state_dict.get("ranks") or []
        if len(of_ranks) == distributed.world_size() > 1:
            state_dict = {**state_dict, **of_ranks[distributed.rank()]}
        self.epoch = int(state_dict["epoch"])
        self.position = int(state_dict["position"])
        self.ended = bool(state_dict["ended"])
        self._place, self._passed = ResumePoint(self.position), 0
        self._iterator = None
        self._opening = state_dict["opening"]
        self._loaded = {key: value for key, value in state_dict.items() if key != "ranks"}
        self._parts.pend(state_dict, rng=rng)
        self.built.load(state_dict)
        self._between = state_dict.get("loader") if self.between_epochs else None

    def warn(self, sentences: list[str], *, topic: str | None = None) -> None:
        """Log each message as a warning, once; ``topic`` becomes an attribute of the record, for filters."""
        for sentence in sentences:
            if sentence not in self._warned:
                self._warned.add(sentence)
                _log.warning(sentence, extra={"topic": topic})
