"""Inspection of checkpoint files of treadle and other frameworks, without executing anything in them.

Zip archives are read record by record and their pickle's opcodes are walked; a safetensors header is JSON; a legacy
plain pickle is only scanned for the names it would import.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickletools
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from treadle.checkpoint.files import FORMAT_NAME, STORED
from treadle.checkpoint.safe.archive import Archive, ArchiveError, open_plain_file, read_archive, read_pickle
from treadle.checkpoint.safe.claims import Made, Named, TensorEntry, shortened
from treadle.checkpoint.safe.pickled import walk_pickle
from treadle.checkpoint.shard_manifest import STATE, folder_problems, has_shards, read_marker
from treadle.errors import CheckpointError

_MOST_ENTRIES = 100_000
_LONGEST_HEADER = 100_000_000  # limit of safetensors itself
_BITS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "BF16": 16, "C64": 64, "F4": 4}


def inspect_path(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a report on a file, or on the checkpoints of a folder, as plain values.

    Args:
        path: a checkpoint of treadle or Lightning, a torch file, a safetensors file, any pickle, a folder of shards, or
            a folder of checkpoints.

    Returns:
        For a file ``kind``, ``size``, ``problems`` (empty: intact and free of code), ``globals`` (what its pickle would
        import), ``tensors``, ``values`` and, if present, ``step``, ``epoch``, ``format``, ``versions``. For a folder of
        shards also ``shards`` and ``ranks``. For other folders ``kind`` and ``checkpoints``, furthest first.

    Raises:
        CheckpointError: there is no such file or folder, or it cannot be read.

    Example:
        >>> import torch
        >>> torch.save({"w": torch.zeros(2, 3)}, "w.pt")
        >>> inspect_path("w.pt")["tensors"]
        [{'name': 'w', 'shape': [2, 3], 'dtype': 'float32', 'bytes': 24}]
    """
    if os.path.isdir(path):
        return _inspect_shards(Path(path)) if has_shards(Path(path)) else _inspect_folder(Path(path))
    try:
        with open_plain_file(path) as file:
            start = file.read(9)
            size = os.fstat(file.fileno()).st_size
            if start[:2] == b"PK":
                return {"path": os.fspath(path), **_inspect_archive(path, size)}
            if len(start) == 9 and start[8:] == b"{":
                return {"path": os.fspath(path), **_inspect_safetensors(file, size)}
            return {"path": os.fspath(path), **_inspect_pickle(file, size)}
    except (ArchiveError, OSError) as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be inspected: {error}") from None


def glance(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Inspect a checkpoint or a folder of shards without reading tensors, which may be damaged.

    Raises:
        CheckpointError: it does not exist, cannot be read, or is not an archive of ``torch.save``.

    Example:
        >>> import torch
        >>> torch.save({"global_step": 3, "w": torch.zeros(2, 3)}, "w.pt")
        >>> glance("w.pt")["step"]
        3
    """
    file = Path(path) / STATE if os.path.isdir(path) else Path(path)
    try:
        return {"path": os.fspath(path), **_report_on(read_pickle(file), os.path.getsize(file))}
    except (ArchiveError, OSError) as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be inspected: {error}") from None


def _inspect_shards(folder: Path) -> dict[str, Any]:
    state = folder / STATE
    there = state.is_file()
    return inspect_shards(folder, inspect_path(state) if there else _report("unfinished folder of shards", 0, []))


def _report(kind: str, size: int, problems: list[str], **more: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"globals": [], "tensors": [], "values": {}}
    return {"kind": kind, "size": size, "problems": problems, **empty, **more}


# -- archives of torch.save ---------------------------------------------------------------------------------------


def _inspect_archive(path: str | os.PathLike[str], size: int) -> dict[str, Any]:
    try:
        archive = read_archive(path)
    except ArchiveError as error:
        return _report("zip archive", size, [str(error)])
    return _report_on(archive, size)


def _report_on(archive: Archive, size: int) -> dict[str, Any]:
    walk = walk_pickle(archive.pickle, archive.storages)
    tensors: list[dict[str, Any]] = []
    values: dict[str, Any] = {}
    for name, value in _leaves(walk.value):
        if isinstance(value, TensorEntry):
            entry = {"name": name, "shape": list(value.shape), "dtype": value.dtype, "bytes": value.nbytes}
            tensors.append(entry)
        else:
            values[name] = value
    tree = walk.value.state if isinstance(walk.value, Made) else walk.value
    top = tree if isinstance(tree, dict) else {}
    problems = [f"refused: {reason}" for reason in walk.refused]
    names = sorted(shortened(name) for name in walk.globals)
    report = _report(_kind_of(top), size, problems, globals=names, tensors=tensors, values=values)
    report["keys"] = [_plain(key) for key in list(top)[:_MOST_ENTRIES]]
    for name, key in (("step", "global_step"), ("epoch", "epoch")):
        report[name] = _plain(top[key]) if isinstance(top.get(key), int) else None
    for name in ("format", "versions"):
        found = top.get(name)
        report[name] = {_plain(k): _plain(v) for k, v in found.items()} if isinstance(found, dict) else None
    if isinstance(top.get("pytorch-lightning_version"), str):
        report["versions"] = {"lightning": shortened(top["pytorch-lightning_version"])}
    return report


def _kind_of(top: Mapping[Any, Any]) -> str:
    described = top.get("format")
    if isinstance(described, dict) and described.get("name") == FORMAT_NAME:
        return "treadle checkpoint"
    if "pytorch-lightning_version" in top:
        return "Lightning checkpoint"
    if top and all(isinstance(value, TensorEntry) for value in top.values()):
        return "torch state dict"
    return "torch file"


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf), visiting each container once, up to a limit."""
    waiting: list[tuple[str, Any]] = [("", tree)]
    seen: set[int] = set()
    count = 0
    while waiting and count < _MOST_ENTRIES:
        count += 1
        name, value = waiting.pop()
        children = _children(value)
        if children is None:
            yield name, value if isinstance(value, TensorEntry) else _plain(value)
        elif id(value) not in seen:
            seen.add(id(value))
            prefix = f"{name[:400]}." if name else ""
            waiting += [(f"{prefix}{_plain(key)}", child) for key, child in reversed(children)]


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Made):
        value = value.state if isinstance(value.state, dict) else value.arguments
    if isinstance(value, dict) and value:
        return list(value.items())
    if isinstance(value, (list, tuple)) and any(
        isinstance(item, (dict, list, tuple, TensorEntry, Made)) for item in value
    ):
        return list(enumerate(value))
    return None


def _plain(value: Any) -> Any:
    """Return a leaf as a short plain value, safe to show."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, Named):
        return shortened(value.name)
    if isinstance(value, Made):
        return f"{shortened(value.function)}(...)"
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value[:8]] if len(value) <= 8 else f"{len(value):,} values"
    return "{}" if value == {} else f"{type(value).__name__} of {len(value):,}" if hasattr(value, "__len__") else "?"


# -- safetensors --------------------------------------------------------------------------------------------------


def _inspect_safetensors(file: BinaryIO, size: int) -> dict[str, Any]:
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(size - 8, _LONGEST_HEADER):
        problem = f"damaged: the header claims {length:,} bytes, and the file has {size:,}"
        return _report("safetensors file", size, [problem])
    try:
        header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = [_safe_tensor(name, entry) for name, entry in list(entries.items())[:_MOST_ENTRIES]]
        problems = _check_spans(entries, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _report("safetensors file", size, [f"damaged header: {shortened(str(error))}"])
    found = header.get("__metadata__")
    values = {_plain(key): _plain(value) for key, value in found.items()} if isinstance(found, dict) else {}
    return _report("safetensors file", size, problems, tensors=tensors, values=values)


def _safe_tensor(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    shape = entry["shape"]
    if not all(type(count) is int and count >= 0 for count in shape):
        raise ValueError(f"tensor {name!r} has sizes that are not whole numbers >= 0")
    begin, end = (int(offset) for offset in entry["data_offsets"])
    numbers = re.search(r"\d+", entry["dtype"])
    bits = _BITS.get(entry["dtype"]) or (int(numbers[0]) if numbers else 0)
    if math.prod(shape) * bits != (end - begin) * 8:
        raise ValueError(f"tensor {name!r} of shape {shape} and type {entry['dtype']} claims {end - begin} bytes")
    return {"name": shortened(name), "shape": shape, "dtype": shortened(entry["dtype"]), "bytes": end - begin}


def _check_spans(entries: Mapping[str, Mapping[str, Any]], available: int) -> list[str]:
    position = 0
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in entries.values()):
        if begin != position or end < begin:
            return ["damaged: its tensors overlap or leave gaps"]
        position = end
    return [] if position == available else [f"damaged: its tensors need {position:,} bytes and it has {available:,}"]


# -- anything else ------------------------------------------------------------------------------------------------


def _inspect_pickle(file: BinaryIO, size: int) -> dict[str, Any]:
    file.seek(0)
    content = file.read(min(size, _LONGEST_HEADER))
    if not content[:1] or content[0] not in b"\x80(c]}":
        return _report("unknown file", size, ["neither a torch, a safetensors nor a pickle file"])
    names = sorted(shortened(name) for name in _named_in(content))
    listed = ", ".join(names[:5]) if names else "none"
    problem = f"refused: a bare pickle, which runs what it names when it is loaded (it names: {listed})"
    return _report("pickle", size, [problem], globals=names)


def _named_in(content: bytes) -> set[str]:
    """Return the names that the pickles in a stream would import, as far as it can be parsed."""
    stream, found = io.BytesIO(content), set()
    recent: list[str] = []
    try:
        while stream.tell() < len(content):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST"):
                    found.add(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL":
                    found.add(".".join(recent[-2:]))
                elif isinstance(argument, str):
                    recent = [*recent[-1:], argument]
    except Exception:  # noqa: BLE001  (old torch files have raw numbers behind their pickles)
        return found
    return found


def _inspect_folder(folder: Path) -> dict[str, Any]:
    try:
        inside = [folder / name for name in os.listdir(folder)]
        if (folder / "checkpoints").is_dir():  # a run folder
            inside += [folder / "checkpoints" / name for name in os.listdir(folder / "checkpoints")]
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be inspected: {error.strerror}") from None
    checkpoints = []
    files = [path for path in inside if path.suffix in (".pt", ".pth", ".ckpt", ".safetensors") or has_shards(path)]
    for path in sorted(files):
        link = os.readlink(path) if path.is_symlink() else None
        try:
            found = inspect_path(path)
        except CheckpointError as error:
            found = {"kind": "missing", "size": 0, "problems": [str(error)]}
        if "checkpoints" in found:
            found = {"kind": "folder", "size": 0, "problems": ["not a file"]}
        kept = {key: found.get(key) for key in ("kind", "size", "step", "epoch", "problems")}
        checkpoints.append(
            {
                "name": shortened(os.path.relpath(path, folder)),
                "link": None if link is None else shortened(link),
                **kept,
            }
        )
    checkpoints.sort(key=lambda found: [found[key] if isinstance(found[key], int) else -1 for key in ("step", "epoch")])
    return {"path": os.fspath(folder), "kind": "folder", "checkpoints": checkpoints[::-1]}


def inspect_shards(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report on a folder of shards.

    Args:
        folder: folder of one checkpoint, complete or not.
        state: the report on its ``state.pt``.

    Returns:
        The report of a single file with the same state, with ``shards`` (number of files with tensors) and ``ranks``
        (number of ranks that wrote the folder).
    """
    marker, _ = read_marker(folder)
    problems = folder_problems(folder) + list(state["problems"])
    places = {
        name.removesuffix(f".{STORED}"): key for name, key in state["values"].items() if name.endswith(f".{STORED}")
    }
    stored: list[dict[str, Any]] = []
    if marker is not None and not problems:
        try:
            stored = _described(folder, marker.files, places)
        except CheckpointError as error:
            problems.append(str(error))
    return {
        **state,
        "path": str(folder),
        "size": 0 if marker is None else marker.size,
        "problems": problems,
        "tensors": [*stored, *state["tensors"]],
        "values": {name: value for name, value in state["values"].items() if not name.endswith(f".{STORED}")},
        "shards": None if marker is None else marker.shards,
        "ranks": None if marker is None else marker.ranks,
    }


def _described(folder: Path, files: Mapping[str, Any], places: Mapping[str, str]) -> list[dict[str, Any]]:
    from treadle.checkpoint.stored import ShardFolder

    tensors = ShardFolder.on_disk(folder, files).tensors
    missing = [name for name, key in places.items() if key not in tensors]
    if missing:
        raise CheckpointError(f"the tensor {missing[0]} is in none of the files")
    entries = []
    for name, key in places.items():
        shape, dtype = tensors[key].size, tensors[key].properties.dtype
        described = {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        entries.append({**described, "bytes": shape.numel() * dtype.itemsize})
    return entries
