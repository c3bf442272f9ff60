"""Run folders in an object store: atomic mirrors of a local folder.

The run writes to a local staging folder as to any other folder. Finished files become objects that are never
overwritten; a manifest that lists them all, with sizes and CRC-32, is written last, and only then are replaced objects
deleted. A crash at any request leaves the old manifest with all of its objects, or the new one. Large files are split
into several objects, so that the store never holds an incomplete multipart upload.

    claims/00000003.json        who writes, with a heartbeat
    manifests/00000003-00000012.json
    objects/00000003/00000012/checkpoints/checkpoint_step_40.pt.0000
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from treadle.checkpoint.files import make_folder, write_bytes
from treadle.checkpoint.lock import LOCK_NAME
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.order import StateProgress, is_moved_aside, progress_of
from treadle.checkpoint.remote_claim import RemoteClaim
from treadle.checkpoint.shard_manifest import MARKER, METADATA, is_unfinished, is_whole
from treadle.errors import CheckpointError

_RESTORING = ".treadle-restoring"
_MANIFESTS, _OBJECTS = "manifests/", "objects/"
_ATTEMPTS = 100
_Stamp = tuple[int, int, int]


@dataclass
class Manifest:
    """Content of a remote workspace.

    Attributes:
        claim: number of the writing process's claim.
        number: number of the manifest, counted by that process.
        reach: step and epoch of the furthest state.
        files: path in the workspace to ``{"size", "crc32", "parts": [{"key", "size"}]}``, or to ``{"link"}``.
    """

    claim: int
    number: int
    reach: StateProgress
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of the manifest's object; names sort in the order of writing."""
        return f"{_MANIFESTS}{self.claim:08d}-{self.number:08d}.json"

    @property
    def objects(self) -> set[str]:
        """Names of the objects that hold the files."""
        return {part["key"] for entry in self.files.values() for part in entry.get("parts", [])}

    def packed(self) -> bytes:
        """Return the bytes of the manifest's object, with a CRC-32."""
        text = json.dumps({"claim": self.claim, "number": self.number, "reach": self.reach, "files": self.files})
        return f"{zlib.crc32(text.encode()):08x} {text}".encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Manifest:
        """Parse the result of :meth:`packed`.

        Raises:
            CheckpointError: it is damaged.
        """
        crc, _, text = data.partition(b" ")
        if crc != f"{zlib.crc32(text):08x}".encode():
            raise CheckpointError("the manifest fails its CRC-32 check")
        found = json.loads(text)
        return cls(found["claim"], found["number"], StateProgress(*found["reach"]), found["files"])


class RemoteWorkspace:
    """Run folder in an object store that mirrors a local folder.

    Args:
        store: the folder in the object store.
        staging: the local folder that the run writes to, used by one process at a time.
        part: largest size of an object in bytes.
        lease: seconds without a heartbeat after which another writer is considered dead.

    Attributes:
        manifest: the last manifest published or restored by this object.

    Example:
        >>> remote = RemoteWorkspace(ObjectStore("memory://example"), Path("staging"))
        >>> remote.restore(), remote.claim.take()
        (False, None)
        >>> Path("staging").mkdir(); _ = Path("staging/log.txt").write_text("a line")
        >>> remote.publish()
        >>> other = RemoteWorkspace(ObjectStore("memory://example"), Path("elsewhere"))
        >>> sorted(other.latest()[0].files)
        ['log.txt']
        >>> remote.claim.release()
    """

    def __init__(self, store: ObjectStore, staging: Path, *, part: int = 64 << 20, lease: float = 60.0):
        self.store = store
        self.staging = staging
        self.part = part
        self.claim = RemoteClaim(store, lease=lease)
        self.manifest: Manifest | None = None
        self._number = 0
        self._stamps: dict[str, _Stamp] = {}

    # -- reading --------------------------------------------------------------------------------------------------

    def latest(self) -> tuple[Manifest, list[str]] | tuple[None, list[str]]:
        """Return the latest readable manifest, and the errors of later ones.

        Raises:
            CheckpointError: there are manifests, but none can be read.
        """
        problems: list[str] = []
        whole = [key for key in self.store.sizes(_MANIFESTS) if key.endswith(".json")]  # no partial file of a put
        for key in sorted(whole, reverse=True):
            try:
                return Manifest.unpacked(self.store.get(key)), problems
            except (CheckpointError, ValueError, KeyError, TypeError, FileNotFoundError) as error:
                problems.append(f"{self.store.url}/{key} cannot be used: {error}")
        if problems:
            raise CheckpointError(f"no intact manifest: {'; '.join(problems[:3])}")
        return None, problems

    def restore(self, warn: Callable[[str], object] = print) -> bool:
        """Bring the staging folder to the furthest state: that of the store, or its own if equally far.

        Args:
            warn: called with a message about each damaged object.

        Returns:
            Whether the folder was filled from the store.

        Raises:
            CheckpointError: the store holds states, but none is intact.
        """
        manifest, problems = self.latest()
        for problem in problems:
            warn(f"{problem}; looking for an older one")
        self.manifest = manifest
        half = (self.staging / _RESTORING).exists()
        if manifest is None:
            if half:
                _empty(self.staging)
            return False
        own = None if half else furthest(self.staging)
        if own is not None and own >= manifest.reach:
            return False
        make_folder(self.staging)
        (self.staging / _RESTORING).touch()
        _empty(self.staging)
        self._fill(manifest, warn)
        (self.staging / _RESTORING).unlink()
        return True

    def _fill(self, manifest: Manifest, warn: Callable[[str], object]) -> None:
        states, damaged = 0, []
        # Markers of folders of shards last: without its marker, a folder is no checkpoint.
        for name in sorted(manifest.files, key=lambda name: (name.endswith(MARKER), name)):
            entry, target = manifest.files[name], self.staging / name
            if "link" in entry:
                make_folder(target.parent)
                target.symlink_to(entry["link"])
                continue
            try:
                write_bytes(lambda file, entry=entry: self._download(entry, file), target)  # type: ignore[misc]
                os.utime(target, ns=(entry["written"], entry["written"]))
                states += is_state(name)
            except (CheckpointError, FileNotFoundError) as error:
                damaged.append(name)
                warn(f"{self.store.url}: {name} is damaged and skipped: {error}")
        if not states and any(map(is_state, damaged)):
            raise CheckpointError(f"{self.store.url}: no state of {manifest.key} is intact: {', '.join(damaged[:5])}")

    def _download(self, entry: dict[str, Any], file: Any) -> None:
        crc = 0
        for part in entry["parts"]:
            data = self.store.get(part["key"])
            if len(data) != part["size"]:
                raise CheckpointError(f"{part['key']} has {len(data):,} bytes instead of {part['size']:,}")
            crc = zlib.crc32(data, crc)
            file.write(data)
        if f"{crc:08x}" != entry["crc32"]:
            raise CheckpointError("it fails its CRC-32 check")

    # -- writing --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Claim the workspace for this process, after restoring it.

        Raises:
            CheckpointError: another process holds the claim, or has published since.
        """
        self.claim.take(above=0 if self.manifest is None else self.manifest.claim)
        now, _ = self.latest()
        if (now and now.key) != (self.manifest and self.manifest.key):
            self.claim.release()
            raise CheckpointError(f"{self.store.url} was changed by another process in the meantime; start again")

    def ahead(self) -> bool:
        """Return whether the staging folder holds a further state than the store."""
        own = furthest(self.staging)
        return own is not None and (self.manifest is None or own > self.manifest.reach)

    def changed(self) -> bool:
        """Return whether the staging folder's states differ from those published last."""
        return _state_stamps(_stamps(self.staging)) != _state_stamps(self._stamps)

    def publish(self) -> None:
        """Upload new files of the staging folder, then the manifest, and delete unneeded files.

        Raises:
            CheckpointError: the store is unreachable, or another process has claimed it. The previous content is
                intact.
        """
        if self.claim.is_lost():
            raise CheckpointError(f"{self.store.url} was claimed by another process; this run uploads nothing more")
        before = self.manifest
        known = before.files if before is not None and before.claim == self.claim.number else {}
        with contextlib.ExitStack() as opened:
            stamps, links, files, reach = self._open_snapshot(known, opened)
            self._number += 1
            manifest = Manifest(self.claim.number, self._number, reach)
            for name, stamp in stamps.items():
                if name in links:
                    manifest.files[name] = {"link": links[name]}
                else:
                    manifest.files[name] = self._upload(name, stamp, files[name]) if name in files else known[name]
        if not self.store.create(manifest.key, manifest.packed()):
            raise CheckpointError(f"{self.store.url}/{manifest.key} was written by another process")
        self.manifest, self._stamps = manifest, stamps
        self._clean(manifest, before)

    def _open_snapshot(
        self, known: Mapping[str, Any], opened: contextlib.ExitStack
    ) -> tuple[dict[str, _Stamp], dict[str, str], dict[str, BinaryIO], StateProgress]:
        """Open a consistent snapshot of the files to upload, since the run continues to save and prune.

        An open file can be read to its end even after pruning. If states or links changed meanwhile, the listing is
        repeated.

        Returns:
            Stamps of all files, targets of links, the open files, and the progress of the furthest state.

        Raises:
            CheckpointError: the folder changes faster than it can be listed.
        """
        for _ in range(_ATTEMPTS):
            with contextlib.ExitStack() as trial, contextlib.suppress(FileNotFoundError):
                stamps = _stamps(self.staging)
                links = {
                    name: os.readlink(self.staging / name) for name in stamps if (self.staging / name).is_symlink()
                }
                new = [n for n in stamps if n not in links and (n not in known or self._stamps.get(n) != stamps[n])]
                files: dict[str, BinaryIO] = {
                    name: trial.enter_context(open(self.staging / name, "rb")) for name in new
                }
                reach = furthest(self.staging) or StateProgress()
                if _state_stamps(_stamps(self.staging)) == _state_stamps(stamps):
                    opened.enter_context(trial.pop_all())
                    return stamps, links, files, reach
        raise CheckpointError(f"{self.staging} changes faster than it can be listed; save less often")

    def _upload(self, name: str, stamp: _Stamp, file: BinaryIO) -> dict[str, Any]:
        """Upload a file up to its current size; logs may grow meanwhile."""
        entry: dict[str, Any] = {"size": 0, "parts": [], "written": stamp[1]}
        crc, left = 0, os.fstat(file.fileno()).st_size
        while left > 0 and (data := file.read(min(self.part, left))):
            key = f"{_OBJECTS}{self.claim.number:08d}/{self._number:08d}/{name}.{len(entry['parts']):04d}"
            self.store.put(key, data)
            crc, left = zlib.crc32(data, crc), left - len(data)
            entry["parts"].append({"key": key, "size": len(data)})
            entry["size"] += len(data)
        return {**entry, "crc32": f"{crc:08x}"}

    def _clean(self, manifest: Manifest, before: Manifest | None) -> None:
        """Delete objects that neither this nor the previous manifest needs, including those of other claims."""
        kept = {manifest.key} | manifest.objects
        if before is not None:
            kept |= {before.key} | before.objects
        present = self.store.sizes()
        stale = [key for key in present if key not in kept and self._is_own(key)]
        # Manifests first: a manifest must never name deleted objects.
        self.store.delete(sorted(stale, key=lambda key: not key.startswith(_MANIFESTS)))

    def _is_own(self, key: str) -> bool:
        """Return whether this claim or an earlier one may have written an object."""
        return key.startswith((_MANIFESTS, _OBJECTS)) and _claim_of(key) <= self.claim.number

    def tidy(self) -> None:
        """Delete leftovers of killed uploads; only for the process that holds the claim."""
        stale = [key for key in self.leftovers() if self._is_own(key)]
        self.store.delete(sorted(stale, key=lambda key: not key.startswith(_MANIFESTS)))

    def leftovers(self) -> list[str]:
        """Return the objects not named by the two latest manifests; empty once a run has ended."""
        present = self.store.sizes()
        manifests = sorted(key for key in present if key.startswith(_MANIFESTS))[-2:]
        kept = set(manifests).union(*(Manifest.unpacked(self.store.get(key)).objects for key in manifests))
        return sorted(key for key in present if key not in kept and not key.startswith("claims/"))


def _claim_of(key: str) -> int:
    digits = key.partition("/")[2][:8]
    return int(digits) if digits.isdecimal() else 0


def is_state(name: str) -> bool:
    """Return whether a file in a run folder is a state or the marker of a folder of shards.

    Example:
        >>> is_state("checkpoints/last.pt"), is_state("steps.jsonl")
        (True, False)
    """
    return name.endswith((".pt", f"/{MARKER}"))


def _state_stamps(stamps: Mapping[str, _Stamp]) -> dict[str, _Stamp]:
    return {name: stamp for name, stamp in stamps.items() if is_state(name)}


def furthest(folder: Path) -> StateProgress | None:
    """Return the progress of the furthest state in a folder and its subfolders, or None.

    Example:
        >>> furthest(Path("no_such_folder")) is None
        True
    """
    paths = [folder / name for name in _stamps(folder) if is_state(name)]
    states = [path.parent if path.name == MARKER else path for path in paths if not path.is_symlink()]
    inside = {path.parent for path in paths if path.name == MARKER}
    reaches = [progress_of(path) for path in states if path.parent not in inside and not is_moved_aside(path)]
    return max((reach for reach in reaches if reach is not None), default=None)


def _stamps(folder: Path) -> dict[str, _Stamp]:
    """Return size, modification time and inode of each finished file of a folder."""
    found: dict[str, _Stamp] = {}
    for parent, name in _walk(folder):
        path = os.path.join(parent, name)
        try:
            about = os.lstat(path)
        except FileNotFoundError:
            continue
        found[os.path.relpath(path, folder)] = (about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def _walk(folder: Path) -> Iterator[tuple[str, str]]:
    for parent, folders, names in os.walk(folder):
        if is_unfinished(Path(parent)) and not is_whole(Path(parent)) and parent != str(folder):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        linked = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*names, *linked]):
            if not name.startswith(".") or name == METADATA:  # skip locks and temporary files
                yield parent, name


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name in (LOCK_NAME, _RESTORING):
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
