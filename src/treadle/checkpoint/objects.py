"""Objects under a URL: whole writes, listing after writing, exclusive creation.

The common subset of object stores, memory and folders, through fsspec: no rename, no append. Requests are retried after
an error, with increasing delays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from treadle.errors import CheckpointError, ConfigError

Result = TypeVar("Result")
_ANSWERS = (FileNotFoundError, FileExistsError)  # answers about an object
_REFUSALS = (PermissionError, NotADirectoryError, IsADirectoryError)


class ObjectStore:
    """Whole objects below a URL.

    Args:
        url: URL of a folder, such as ``s3://bucket/runs/7``, ``gs://``, ``memory://`` or ``file://``.
        options: options of fsspec's file system, such as ``{"endpoint_url": ...}``.
        tries: attempts of a request before its error is raised.
        pause: seconds before the second attempt, doubled before each further one, up to a minute.

    Raises:
        ConfigError: fsspec or its backend for the URL is not installed.

    Example:
        >>> store = ObjectStore("memory://run")
        >>> store.put("a", b"1"), store.create("a", b"2"), store.get("a"), store.sizes()
        (None, False, b'1', {'a': 1})
    """

    def __init__(self, url: str, *, options: dict[str, Any] | None = None, tries: int = 6, pause: float = 0.5):
        try:
            from fsspec.core import url_to_fs

            settings = {"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
            files, root = url_to_fs(url, **settings)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"cannot be reached: {error}. Install what fsspec needs for such a URL: pip install 'treadle[s3]' for "
                "s3://, 'treadle[gs]' for gs://",
                argument="url",
                value=url,
            ) from error
        self.url = url.rstrip("/")
        self.tries = tries
        self.pause = pause
        self._root = root.rstrip("/")
        protocol = files.protocol
        local = "file" in (protocol if isinstance(protocol, (tuple, list)) else (protocol,))
        self._files: Any = _Folder(files) if local else files

    @property
    def files(self) -> Any:
        """fsspec file system, whose requests are not retried."""
        return self._files

    def path(self, key: str) -> str:
        """Return the path of an object in :attr:`files`."""
        return f"{self._root}/{key}"

    def put(self, key: str, data: bytes) -> None:
        """Write an object atomically."""
        self._trying(lambda: self._put(key, data, create=False))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the name exists; return whether it now holds ``data``.

        A request whose response was lost counts as successful.
        """
        try:
            self._trying(lambda: self._put(key, data, create=True))
        except FileExistsError:
            return self.get(key) == data
        return True

    def _put(self, key: str, data: bytes, *, create: bool) -> None:
        path = self.path(key)
        try:
            self._files.pipe_file(path, data, mode="create" if create else "overwrite")
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.url}: cannot be written to ({error}); create the bucket first") from error
        except OSError as error:
            if create and error.errno == errno.EINVAL:  # s3fs's error for an unmet condition
                raise FileExistsError(path) from error
            raise

    def get(self, key: str) -> bytes:
        """Read an object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        data: bytes = self._trying(lambda: self._files.cat_file(self.path(key)))
        return data

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """List all objects below a prefix that ends in a slash, with their sizes in bytes."""
        return self._trying(lambda: self._sizes(prefix))

    def _sizes(self, prefix: str) -> dict[str, int]:
        self._files.invalidate_cache()
        top = f"{self._root}/{prefix}".rstrip("/")
        try:
            found = self._files.find(top, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._files._strip_protocol(self._root).rstrip("/")) + 1
        return {self._files._strip_protocol(path)[start:]: int(info["size"] or 0) for path, info in found.items()}

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, ignoring those already gone."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._trying(lambda key=key: self._files.rm_file(self.path(key)))  # type: ignore[misc]

    def _trying(self, request: Callable[[], Result]) -> Result:
        for attempt in range(self.tries):
            try:
                return request()
            except (*_ANSWERS, CheckpointError):
                raise
            except _REFUSALS as error:
                raise CheckpointError(
                    f"{self.url}: a request was refused ({error}); check the credentials, their permissions, the clock "
                    "of this machine, and the URL"
                ) from error
            except Exception as error:
                if attempt == self.tries - 1:
                    raise CheckpointError(
                        f"{self.url}: a request failed {self.tries} times ({type(error).__name__}: {error})"
                    ) from error
                time.sleep(min(60.0, self.pause * 2**attempt) * random.Random().uniform(0.5, 1.0))
        raise AssertionError


class _Folder:
    """Local fsspec file system that writes files like objects: atomically, and exclusively on request."""

    def __init__(self, files: Any):
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def pipe_file(self, path: str, data: bytes, mode: str) -> None:
        """Write a file; a kill leaves only a ``.part`` file."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.part"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if mode == "create":
                os.link(temporary, path)
            else:
                os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
