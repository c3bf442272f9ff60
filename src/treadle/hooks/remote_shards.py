"""RemoteShardsHook: sharded checkpoints written by every rank to an object store, without a shared folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.order import StateProgress
from treadle.checkpoint.ranks import on_rank_0, together, writers_group
from treadle.checkpoint.remote_claim import RemoteClaim
from treadle.engine.signals import ExitPlan, exit_plan
from treadle.errors import CheckpointError
from treadle.errors.arguments import check_above, check_least, checked
from treadle.hooks.saving import SavingHook, equal_names

if TYPE_CHECKING:
    from treadle.checkpoint.remote_shards import RemoteShards
    from treadle.engine import Engine


class RemoteShardsHook(SavingHook):
    """Hook that saves every rank's part of the state to an object store, at intervals, at the end and on signals.

    This is for runs on several machines whose state is too large to upload from one of them:
    ``torch.distributed.checkpoint`` writes each rank's tensors through fsspec, and each rank reads the blocks it needs.
    No local disk is used. A run resumes from the furthest intact checkpoint below the URL, on any number of ranks. Use
    it in place of a CheckpointingHook; one process, or group of ranks, at a time writes below a URL.

    Args:
        url: URL such as ``s3://bucket/runs/7/shards``; nothing else may be below it.
        interval: steps between checkpoints, >= 1.
        keep_previous: number of checkpoints to keep, >= 1; None keeps all.
        options: for fsspec's file system, such as ``{"endpoint_url": "https://..."}``.
        background: write during training. Takes host memory for a copy of each rank's part.
        exit_signals: one or several signals on which to save and exit.
        lease: seconds without a heartbeat after which another writing process is considered dead, > 0.

    Raises:
        ConfigError: a value is outside its range, or the URL cannot be reached for want of a package.

    Example:
        >>> hook = RemoteShardsHook("memory://runs/7/shards", interval=1000)
    """

    @checked
    def __init__(
        self,
        url: str,
        interval: int,
        *,
        keep_previous: int | None = 2,
        options: Mapping[str, Any] | None = None,
        background: bool = True,
        exit_signals: int | Sequence[int] | None = None,
        lease: float = 60.0,
    ):
        check_least(1, interval=interval, keep_previous=keep_previous)
        check_above(0, lease=lease)
        exit_plan(exit_signals, lambda: None)  # validates the values now
        super().__init__(background=background)
        self.store = ObjectStore(url, options=dict(options or {}))
        self.interval = interval
        self.keep_previous = keep_previous
        self._signals = exit_signals
        self._claim = RemoteClaim(ObjectStore(f"{self.store.url}/claim", options=dict(options or {})), lease=lease)

    @property
    def _shards(self) -> RemoteShards:
        from treadle.checkpoint.remote_shards import RemoteShards

        return RemoteShards(self.store)

    def checkpoint_to_resume(self, trainer: Engine) -> Mapping[str, Any] | None:
        """Open the furthest intact checkpoint; warn about each damaged one.

        Raises:
            CheckpointError: there are checkpoints, but none is intact.
        """
        problems, names = [], on_rank_0(self._shards.whole)
        for name in names:
            try:
                tree = self._shards.open_on_ranks(name, distributed.rank(), distributed.world_size())
            except CheckpointError as error:
                problems.append(str(error))
                trainer.logger.warning("%s; looking for an older one", error)
                continue
            trainer.state.record_source(f"{self.store.url}/{name}")
            self._saved = self._shards.reach(name)
            return tree
        if problems:
            raise CheckpointError(f"no checkpoint below {self.store.url} is intact: {'; '.join(problems[:3])}")
        return None

    def claim(self, trainer: Engine) -> AbstractContextManager[None]:
        """Claim the URL for this run."""
        return self._held()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        on_rank_0(self._claim.take)
        try:
            yield
        finally:
            with contextlib.suppress(CheckpointError):  # the lease ends without it
                self._claim.release()

    def on_before_train(self, trainer: Engine) -> None:
        """Prepare for writing.

        Raises:
            CheckpointError: the URL holds a state of another run beyond the start of this one.
        """
        writers_group()  # created here, where all ranks are at the same point
        furthest = on_rank_0(lambda: next(iter(self._shards.whole()), None))
        here = StateProgress(trainer.step, trainer.epoch)
        if self._saved is None and furthest is not None and self._shards.reach(furthest) > here:
            raise CheckpointError(
                f"{self.store.url} holds {furthest}, which is beyond the start of this run (step {here.step}), so the "
                "next resume would load it; choose another URL"
            )

    def _is_due(self, trainer: Engine) -> bool:
        """Return whether the current step is in the interval or the last one."""
        return trainer.step % self.interval == 0 or trainer.is_last_step

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow steps up to the next checkpoint; every step is checked while one is being written."""
        return 1 if self._writer.in_flight else self.interval - trainer.step % self.interval

    def exit_plan(self, trainer: Engine) -> ExitPlan | None:
        """Save on a signal, if signals are given."""
        return exit_plan(self._signals, lambda: self._save_and_leave(trainer))

    def _begin_save(self, trainer: Engine, *, background: bool) -> None:
        """Write this rank's part of the current state and, once complete, delete older checkpoints."""
        collect = lambda buffers: trainer.state_dict(buffers=buffers, parts=True)  # noqa: E731
        self._writer.save_folder(
            collect, self._write(trainer, StateProgress(trainer.step, trainer.epoch)), background=background
        )

    def _write(self, trainer: Engine, reach: StateProgress) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that writes this rank's part of the current state, independent of the trainer."""
        reach, equal = StateProgress(trainer.step, trainer.epoch), equal_names(trainer)
        shards, keep, state = self._shards, self.keep_previous, trainer.state

        def write(tree: Mapping[str, Any]) -> None:
            group = writers_group()
            together(group, self._refuse_if_lost)
            name = shards.save(tree, reach, equal=equal)
            if name is not None:
                together(group, lambda: shards.prune(keep) if distributed.rank() == 0 else None)
                state.record_saved(f"{shards.store.url}/{name}", reach.step)

        return write

    def _refuse_if_lost(self) -> None:
        if self._claim.number and self._claim.is_lost():
            raise CheckpointError(f"{self.store.url} was claimed by another process; this run writes nothing more")
