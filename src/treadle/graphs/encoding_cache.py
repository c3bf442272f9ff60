"""On-disk cache of encodings, keyed by the bytes of the graphs and the settings, not just a name."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from treadle.checkpoint import load_checkpoint, save_checkpoint
from treadle.errors import CheckpointError
from treadle.errors.arguments import checked
from treadle.graphs.encodings.config import PEConfig, PEConfigLike, parse_pe_config
from treadle.graphs.encodings.many import EncodedGraphs, encode_graphs

_log = logging.getLogger("treadle.graphs")

# Increment with every change of the encodings' values.
_VERSION = 2


@checked
def cached_encodings(
    graphs: Sequence[tuple[Tensor, int]],
    config: PEConfigLike,
    folder: str | os.PathLike[str],
    *,
    name: str = "encodings",
    num_workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> EncodedGraphs:
    """Return the encodings of many graphs, from a file if one matches exactly, otherwise computed and written.

    A file that is damaged or does not match its name is rewritten with a warning; if nothing can be written, a warning
    is logged and the encodings are returned anyway.

    Args:
        graphs: ``(edge_index, num_nodes)`` of each.
        config: see :func:`parse_pe_config`.
        folder: cache folder; created if needed.
        name: readable prefix of the file name.
        num_workers: as for :func:`encode_graphs`.
        progress: as for :func:`encode_graphs`; not called if a file is read.

    Raises:
        ConfigError: a setting is invalid, or an edge refers to a node outside its graph.

    Example:
        >>> import tempfile, torch
        >>> graphs = [(torch.tensor([[0, 1], [1, 2]]), 3)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     computed = cached_encodings(graphs, "light", folder)
        ...     read = cached_encodings(graphs, "light", folder)
        >>> torch.equal(computed.node, read.node)
        True
    """
    settings = parse_pe_config(config)
    key = _key(graphs, settings)
    path = Path(folder) / f"{name}-{key[:16]}.pt"
    if path.exists():
        try:
            return _read(path, key, settings)
        except CheckpointError as error:
            _log.warning("%s; the encodings are computed again", error)

    encoded = encode_graphs(graphs, settings, num_workers=num_workers, progress=progress)
    tree = {"key": key, "config": settings.to_dict(), **_parts(encoded)}
    try:
        save_checkpoint({part: value for part, value in tree.items() if value is not None}, path)
    except CheckpointError as error:
        _log.warning("%s; the encodings will be computed again next time", error)
    return encoded


def _key(graphs: Sequence[tuple[Tensor, int]], config: PEConfig) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps({"version": _VERSION, **config.to_dict()}, sort_keys=True).encode())
    for edge_index, num_nodes in graphs:
        digest.update(f";{num_nodes}:{tuple(edge_index.shape)}:".encode())
        digest.update(edge_index.cpu().long().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _parts(encoded: EncodedGraphs) -> dict[str, Tensor | None]:
    return {"num_nodes": encoded.num_nodes, "node": encoded.node, "pairs": encoded.pairs}


def _read(path: Path, key: str, config: PEConfig) -> EncodedGraphs:
    tree: Mapping[str, Any] = load_checkpoint(path)
    if tree.get("key") != key:
        raise CheckpointError(f"{str(path)!r} holds the encodings of other graphs or settings")
    return EncodedGraphs(config, tree["num_nodes"], tree.get("node"), tree.get("pairs"))
