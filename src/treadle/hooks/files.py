"""What hooks that write files share: where a path lies, a free name for an older file, values as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.engine import Engine


def in_workspace(trainer: Engine, path: str | Path) -> Path:
    """Returns an absolute path as it is and a relative one inside the trainer's workspace.

    Raises:
        ConfigError: the path is relative and the trainer has no workspace.
    """
    path = Path(path)
    if path.is_absolute():
        return path
    if trainer.workspace is None:
        raise ConfigError(
            f"path={str(path)!r} is relative and the trainer has no workspace; pass workspace= to the "
            "trainer or an absolute path"
        )
    return trainer.workspace / path


def next_free(path: Path) -> Path:
    """Returns ``<stem>.N<suffix>`` with the smallest N that is free."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def to_json(value: Any) -> Any:
    """Returns a value that is valid JSON: NaN and infinities become null.

    Example:
        >>> to_json({"a": float("nan"), "b": [1, float("inf")]})
        {'a': None, 'b': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
