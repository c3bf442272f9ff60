"""RemoteWorkspaceHook: workspace in an object store, uploaded during training."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from treadle import distributed
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.remote import RemoteWorkspace
from treadle.engine.hook import BaseHook
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import check_above, checked

if TYPE_CHECKING:
    from treadle.engine import Engine


class RemoteWorkspaceHook(BaseHook):
    """Mirror of the trainer's workspace in an object store: S3, Google Cloud Storage, or any other that fsspec
    supports.

    When a run starts, the workspace is filled with the furthest state of the store, unless its own is equally far.
    During training, a thread uploads each new state together with the other files of the workspace: objects first, a
    manifest last, so that the store holds either the old or the new state at every moment. Only one process at a time
    writes.

    ``BaseTrainer(workspace="s3://bucket/run")`` adds this hook automatically. It must precede a CheckpointingHook.

    A failed upload is retried, then causes a warning and is retried with the next state; if the last one of a run
    fails, the run ends with its error. The local files are intact in any case.

    Args:
        url: URL such as ``s3://bucket/runs/7``. ``s3://`` needs s3fs and ``gs://`` gcsfs.
        options: options of fsspec's file system, such as ``{"endpoint_url": "https://..."}``.
        part_size: largest size of an object in bytes, >= 1; larger files are split.
        lease: seconds without a heartbeat after which another writing process is considered dead, > 0.
        poll: seconds between two checks for new states, > 0.

    Raises:
        ConfigError: a value is outside its range, or a package for the URL is missing.

    Example:
        >>> hook = RemoteWorkspaceHook("memory://runs/7")
    """

    writes = True

    @checked
    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        part_size: int = 64 << 20,
        lease: float = 60.0,
        poll: float = 1.0,
    ):
        check_above(0, part_size=part_size, lease=lease, poll=poll)
        self.store = ObjectStore(url, options=dict(options or {}))
        self._settings = {"part": int(part_size), "lease": lease}
        self._poll = poll
        self._remote: RemoteWorkspace | None = None
        self._logged: list[str] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def checkpoint_to_resume(self, trainer: Engine) -> Mapping[str, Any] | None:
        """Fill the workspace from the store, before a CheckpointingHook reads it.

        Raises:
            ConfigError: the trainer has no workspace, or ranks on other machines cannot access it.
            CheckpointError: the store is unreachable, or none of its states is intact.
        """
        if trainer.workspace is None:
            raise ConfigError("a RemoteWorkspaceHook needs a local folder to mirror", argument="workspace")
        if int(os.environ.get("LOCAL_WORLD_SIZE", distributed.world_size())) < distributed.world_size():
            trainer.logger.warning(
                "%s: the workspace %s must be a folder shared by all machines, as only rank 0 downloads and uploads it",
                self.store.url, trainer.workspace,
            )  # fmt: skip
        on_rank_0(lambda: self._prepare_claim(trainer))
        self._log_messages(trainer)
        return None

    def _prepare_claim(self, trainer: Engine) -> None:
        assert trainer.workspace is not None
        remote = self._remote = RemoteWorkspace(self.store, trainer.workspace, **self._settings)  # type: ignore[arg-type]
        if remote.restore(self._logged.append):
            trainer.logger.info("%s: filled from %s", trainer.workspace, self.store.url)
        elif remote.ahead():  # from a run that was killed before the upload, and may be finished now
            with self._claimed():
                remote.publish()
        self._delete_leftovers(remote)

    def _delete_leftovers(self, remote: RemoteWorkspace) -> None:
        """Delete leftovers of a killed upload: a finished run uploads nothing."""
        with contextlib.suppress(CheckpointError):  # another process holds the URL, or damage is reported later
            if remote.leftovers():
                with self._claimed():
                    remote.tidy()

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        assert self._remote is not None
        self._remote.begin()
        try:
            yield
        finally:
            with contextlib.suppress(CheckpointError):  # the lease expires anyway
                self._remote.claim.release()

    def claim(self, trainer: Engine) -> AbstractContextManager[None]:
        """Claim the folder in the store for this process."""
        return self._held(trainer)

    @contextlib.contextmanager
    def _held(self, trainer: Engine) -> Iterator[None]:
        if self._remote is None:
            on_rank_0(lambda: self._prepare_claim(trainer))
        remote = self._remote
        on_rank_0(lambda: None if remote is None else remote.begin())
        try:
            yield
        finally:
            if remote is not None:
                with contextlib.suppress(CheckpointError):  # the lease expires anyway
                    remote.claim.release()
            self._remote = None

    def on_before_train(self, trainer: Engine) -> None:
        """Start uploading."""
        if self._remote is not None and distributed.rank() == 0:
            self._stopped.clear()
            self._thread = threading.Thread(
                target=self._mirror, args=(self._remote,), name="treadle-upload", daemon=True
            )
            self._thread.start()

    def _mirror(self, remote: RemoteWorkspace) -> None:
        failed = 0.0
        while not self._stopped.wait(self._poll):
            if not remote.changed() or time.monotonic() < failed:
                continue
            try:
                remote.publish()
            except Exception as error:  # noqa: BLE001  (training continues without it)
                self._logged.append(f"{error}. Training continues; the next save uploads again")
                failed = time.monotonic() + 10 * self._poll

    def on_after_step(self, trainer: Engine) -> None:
        """Log errors in the thread since the previous step."""
        if self._logged:
            self._log_messages(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps: errors in the thread do not depend on steps."""
        return None

    def _log_messages(self, trainer: Engine) -> None:
        while self._logged:
            trainer.logger.warning("%s", self._logged.pop(0))

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Upload the final state.

        Raises:
            CheckpointError: the upload failed, and the run itself did not.
        """
        if error is None:
            on_rank_0(self._finish)
        else:
            try:
                self._finish()
            except CheckpointError as late:
                trainer.logger.error("%s", late)
        self._log_messages(trainer)

    def _finish(self) -> None:
        if self._thread is None or self._remote is None:
            return
        self._stopped.set()
        self._thread.join()
        self._thread = None
        self._remote.publish()


def is_remote(workspace: object) -> bool:
    """Return whether a workspace is a URL.

    Example:
        >>> is_remote("s3://bucket/run"), is_remote("runs/7")
        (True, False)
    """
    return isinstance(workspace, str) and "://" in workspace


def staging_of(url: str) -> Path:
    """Return the local folder for a workspace in an object store, below ``TREADLE_STAGING`` or the user's cache.

    Example:
        >>> staging_of("s3://bucket/run").name
        's3%3A%2F%2Fbucket%2Frun'
    """
    base = os.environ.get("TREADLE_STAGING") or Path.home() / ".cache" / "treadle" / "staging"
    return Path(base).absolute() / quote(url.rstrip("/"), safe="")


def local_workspace(workspace: Path | str | None) -> tuple[Path | None, RemoteWorkspaceHook | None]:
    """Return the absolute local folder of a workspace, and the hook that mirrors it if the workspace is a URL.

    Example:
        >>> local_workspace(None)
        (None, None)
    """
    if workspace is not None and is_remote(workspace):
        return staging_of(str(workspace)), RemoteWorkspaceHook(str(workspace))
    return (None if workspace is None else Path(workspace).absolute()), None
