"""Interface of a checkpoint part, a checkpoint being loaded, and comparison of states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from treadle.checkpoint.comparison import unequal
from treadle.checkpoint.schema import is_encoded, to_plain
from treadle.distributed import is_dtensor
from treadle.distributed.shards import placed_like, placed_state
from treadle.engine.common_state import common_state
from treadle.errors import CheckpointError

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

Difference = tuple[str, str]
"""Where a state that was loaded differs from its checkpoint, and how."""


class Notice(NamedTuple):
    """Warning about a loaded state, with the topic of its log record."""

    text: str
    topic: str | None = None


@dataclass(frozen=True)
class Saved:
    """Checkpoint being loaded into a run.

    Attributes:
        tree: the checkpoint, without what ``strict=False`` leaves out.
        kept: names of weights that are not loaded, since the checkpoint omits them on purpose.
    """

    tree: Mapping[str, Any]
    kept: frozenset[str] = frozenset()

    @classmethod
    def for_engine(cls, engine: Engine, tree: Mapping[str, Any]) -> Saved:
        """Return a checkpoint fitted to an engine's model, without changing anything.

        Raises:
            CheckpointError: it has no model, or its frozen weights differ from the model's.
        """
        if "model" not in tree:
            raise CheckpointError(
                f"the checkpoint has no 'model' entry; its keys are {sorted(tree)}. Weights and optimizer state that "
                "another library saved: load_foreign(model, path, optimizer=optimizer)"
            )
        kept = engine.state.base.check(engine.model, tree.get("base"))
        if engine.state.options.strict:
            return cls(tree, kept)
        return cls(*common_state(engine, tree, kept))

    def get(self, key: str) -> Any:
        """Return an entry, or None if it is missing."""
        return self.tree.get(key)

    @property
    def same_torch(self) -> bool:
        """Whether the torch of this run wrote the checkpoint, so that its objects have the same keys."""
        return bool(self.part("versions").get("torch") == str(torch.__version__))

    def part(self, key: str) -> Mapping[str, Any]:
        """Return a mapping, or an empty one if it is missing."""
        return self.tree.get(key) or {}


class StatePart:
    """Part of a checkpoint; the base class saves nothing, accepts everything and never warns."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        """Write the part's keys into a tree."""

    def check(self, engine: Engine, saved: Saved) -> None:
        """Raise CheckpointError if the part cannot be loaded, without changing anything."""

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        """Yield warnings about what differs between the checkpoint and this run."""
        yield from ()

    def load(self, engine: Engine, saved: Saved) -> None:
        """Restore the part in place."""

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        """Yield where the part, once loaded, differs from the checkpoint."""
        yield from ()


def unlike(saved: Mapping[str, Any], now: Mapping[str, Any], path: str) -> Iterator[Difference]:
    """Yield where a state in memory differs from a saved one; sharded tensors are compared on local shards."""
    for key, value in saved.items():
        if key not in now:
            yield f"{path}.{key}", "missing after loading"
            continue
        live = now[key]
        if is_encoded(value):
            yield from unequal(value, to_plain(live, path, encoding="exact"), f"{path}.{key}")
            continue
        if isinstance(value, Mapping) and isinstance(live, Mapping):
            yield from unlike(value, live, f"{path}.{key}")
            for extra in live.keys() - value.keys():
                yield f"{path}.{key}.{extra}", "missing in the file"
            continue
        if is_dtensor(live) and not is_dtensor(value):
            placed = placed_state(value, live)
            value, live = placed.to_local() if is_dtensor(placed) else placed, live.to_local()
        elif isinstance(live, torch.Tensor) and not isinstance(value, torch.Tensor):
            value = placed_like(value, None)  # stored in a folder of shards
        yield from unequal(value, live, f"{path}.{key}")
