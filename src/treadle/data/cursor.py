"""The cursor: which epoch, how far in it, and how to get there again to the bit."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from treadle import distributed
from treadle.data.sources import Source, generators_of, open_source, samplers_of
from treadle.errors import CheckpointError
from treadle.seed import RngState, mix_seed

_log = logging.getLogger("treadle.data")
_END = object()


def steps_per_epoch(loader: Any, accumulation: int = 1) -> int:
    """Returns the optimizer steps of one epoch: ceil(len(loader) / accumulation).

    Args:
        loader: anything with a length, in micro-batches.
        accumulation: micro-batches per step, >= 1.

    Example:
        >>> steps_per_epoch(range(7), accumulation=3)
        3
    """
    return math.ceil(len(loader) / accumulation)


@dataclass
class Group:
    """The micro-batches of one step.

    Attributes:
        batches: as the loader gave them.
        data_time: seconds spent waiting for each.
        sample_ids: what each was read with: the sampler's own index list where the loader is map-style, else None.
    """

    batches: list[Any] = field(default_factory=list)
    data_time: list[float] = field(default_factory=list)
    sample_ids: list[Any] = field(default_factory=list)


class Cursor:
    """Owns the position in the data. It exists before its loader, so a checkpoint can be loaded into it first.

    Attributes:
        epoch: epochs completed.
        position: micro-batches consumed in the running epoch.
        ended: whether the running epoch has no more micro-batches.

    Example:
        >>> cursor = Cursor()
        >>> cursor.open([10, 20, 30])
        >>> cursor.take(2).batches, cursor.take(2).batches, cursor.ended
        ([10, 20], [30], True)
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0
        self.ended = False
        self._source: Source | None = None
        self._loader: Any = None
        self._iterator: Iterator[Any] | None = None
        self._opening: dict[str, Any] | None = None  # RNG and generator states at the epoch's opening
        self._loaded: dict[str, Any] | None = None  # a checkpoint's data entry that waits for its loader
        self._pending_rng: RngState | None = None  # the checkpoint's RNG, set after the epoch is reopened
        self._pending_generators: list[torch.Tensor] = []
        self._warned: set[str] = set()

    def attach(self, loader: Any) -> None:
        """Names the loader; cheap when it is the one already attached."""
        if loader is not self._loader:
            self._source = open_source(loader)
            self._loader = loader
            self._iterator = None
            self._warn(self._source.warnings(resuming=False))

    def open(self, loader: Any) -> None:
        """Opens the running epoch: afresh, where it stands, or at the position of a loaded checkpoint."""
        self.attach(loader)
        if self._iterator is not None or self.ended:
            self._restore_pending()
            return
        _set_epoch(loader, self.epoch)
        if self._opening is None:
            self._open_fresh()
        else:
            self._reopen(self._opening)

    def _open_fresh(self) -> None:
        self._restore_pending()
        self._opening = {
            "rng": RngState.capture().to_plain(),
            "generators": [generator.get_state() for generator in generators_of(self._loader)],
        }
        self._loaded = None  # a checkpoint of the epoch's very start: from here on the place is another
        self._iterator = self._iterate(skip=0, state=None)

    def _reopen(self, opening: Mapping[str, Any]) -> None:
        present = self._pending_rng or RngState.capture()
        loaded = self._loaded or {}
        source = self._the_source()
        self._refuse_other_workers(loaded)
        self._warn(self._mismatches(loaded) + source.warnings(resuming=True))
        _set_generators(self._loader, opening["generators"])
        RngState.from_plain(opening["rng"]).restore()
        state = loaded.get("loader") if loaded.get("kind") == source.kind else None
        self._iterator = self._iterate(skip=self.position, state=state)
        if not self._num_workers:
            # A generator may be shared with the dataset; without prefetching its state is known exactly.
            _set_generators(self._loader, self._pending_generators)
        self._loaded, self._pending_rng, self._pending_generators = None, None, []
        present.restore()

    def _refuse_other_workers(self, loaded: Mapping[str, Any]) -> None:
        """A loader's own state is one of its workers; torchdata fails on another number with a bare assertion."""
        saved = loaded.get("num_workers")
        both_stateful = loaded.get("kind") == self._the_source().kind == "stateful"
        if both_stateful and loaded.get("loader") is not None and saved not in (None, self._num_workers):
            raise CheckpointError(
                f"the {type(self._loader).__name__}'s own state was saved with num_workers={saved} and cannot be "
                f"loaded with num_workers={self._num_workers}: keep the number, or use a plain DataLoader, whose "
                "position does not depend on it"
            )

    def _restore_pending(self) -> None:
        if self._pending_rng is not None:
            self._pending_rng.restore()
            self._pending_rng = None
        _set_generators(self._loader, self._pending_generators)
        self._pending_generators = []

    def _iterate(self, *, skip: int, state: Any) -> Iterator[Any]:
        assert self._opening is not None
        digest = hashlib.blake2b(self._opening["rng"]["torch"].numpy().tobytes(), digest_size=8).digest()
        seed = mix_seed(int.from_bytes(digest, "little"), self.epoch, distributed.rank())
        return self._the_source().open(skip=skip, seed=seed, state=state)

    @property
    def _num_workers(self) -> int:
        return int(getattr(self._loader, "num_workers", None) or 0)

    @property
    def length(self) -> int | None:
        """Micro-batches in an epoch of the attached loader, as it says itself."""
        return self._source.length if self._source else None

    def _the_source(self) -> Source:
        assert self._source is not None, "attach() comes first"
        return self._source

    def take(self, count: int) -> Group:
        """Draws up to ``count`` micro-batches of the running epoch; an empty group means the epoch ended."""
        group = Group()
        source = self._the_source()
        while len(group.batches) < count and not self.ended:
            assert self._iterator is not None, "open() comes first"
            start = time.perf_counter()
            try:
                batch = self._next_batch(self._iterator)
            except BaseException:
                self._go_back_to(self.position - len(group.batches))
                raise
            if batch is _END:
                self.ended = True
                break
            group.data_time.append(time.perf_counter() - start)
            group.batches.append(batch)
            group.sample_ids.append(source.ids_at(self.position))
            self.position += 1
            if source.exact and self.position >= (source.length or 0):
                source.finish(self._iterator)
                self.ended = True
        if self.ended:
            self._iterator = None
            self._warn(source.warnings(resuming=False))
        return group

    def _next_batch(self, iterator: Iterator[Any]) -> Any:
        try:
            return next(iterator)
        except StopIteration as error:
            if not self._the_source().is_over_at(self.position):
                raise RuntimeError(
                    "a StopIteration was raised inside the data set, its collate function or a worker: that is not the "
                    "end of the data"
                ) from error
            return _END

    def _go_back_to(self, position: int) -> None:
        """Gives up a broken iterator, so that no batch is lost when the epoch is opened again."""
        self.position = position
        self._loaded = {**self.state_dict(), "loader": None}
        self._pending_generators = self._loaded["generators"]
        self._iterator = None

    def next_epoch(self) -> None:
        """Counts the running epoch as completed."""
        self.epoch += 1
        self.position = 0
        self.ended = False
        self._iterator = None
        self._opening = None
        self._loaded = None

    def restart(self) -> None:
        """Goes back to the start of epoch 0, keeping the loader and its persistent workers."""
        self.next_epoch()
        self.epoch = 0

    def close(self) -> None:
        """Ends workers; the position stays and the epoch can be reopened."""
        if not self._num_workers or self._source is None:
            return
        if self._iterator is not None:
            self._loaded = self.state_dict()
            self._pending_generators = self._loaded["generators"]
            self._iterator = None
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the ``data`` entry of a checkpoint."""
        if self._loaded is not None:  # loaded and not opened since: still the same place
            return dict(self._loaded)
        source = self._source
        opened = self._iterator is not None
        return {
            "epoch": self.epoch,
            "position": self.position,
            "ended": self.ended,
            "opening": self._opening,
            "generators": self._pending_generators
            or [generator.get_state() for generator in generators_of(self._loader)],
            "kind": source.kind if source else None,
            "length": source.length if source else None,
            "loader": source.state() if source and opened else None,
            "num_workers": self._num_workers,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, rng: RngState | None = None) -> None:
        """Restores the position; the loader is opened there when it comes.

        Args:
            state_dict: what :meth:`state_dict` returned.
            rng: the checkpoint's RNG, restored last, after the epoch is reopened.
        """
        self.epoch = int(state_dict["epoch"])
        self.position = int(state_dict["position"])
        self.ended = bool(state_dict["ended"])
        self._iterator = None
        self._opening = state_dict["opening"]
        self._loaded = dict(state_dict)
        self._pending_rng = rng
        self._pending_generators = list(state_dict["generators"])

    def _mismatches(self, loaded: Mapping[str, Any]) -> list[str]:
        """Says in words what the loader has in common no more with the one of the checkpoint."""
        source = self._the_source()
        words = []
        if loaded.get("kind") not in (None, source.kind):
            words.append(f"the checkpoint's loader was of kind {loaded['kind']!r}, this one is {source.kind!r}")
        if loaded.get("length") not in (None, source.length):
            words.append(
                f"an epoch had {loaded['length']} micro-batches and now has {source.length}: another batch size, "
                "data set or number of ranks"
            )
        workers = loaded.get("num_workers")
        if workers is not None and bool(workers) != bool(self._num_workers):
            words.append(
                f"num_workers was {workers} and is now {self._num_workers}: items draw their "
                "random numbers from the main process with 0 workers and from their own seeds with more"
            )
        return [f"resume inside an epoch is not exact: {sentence}" for sentence in words]

    def _warn(self, sentences: list[str]) -> None:
        for sentence in sentences:
            if sentence not in self._warned:
                self._warned.add(sentence)
                _log.warning(sentence)


def _set_generators(loader: Any, states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators_of(loader), states, strict=False):
        generator.set_state(state)


def _set_epoch(loader: Any, epoch: int) -> None:
    for owner in (*samplers_of(loader), loader):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
