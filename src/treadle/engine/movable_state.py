"""State that the user's code may change between two steps, for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from treadle.checkpoint.schema import to_plain
from treadle.engine.settings import MOVABLE
from treadle.seed import RngState

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def movable_state(engine: Engine) -> Any:
    """Return the state that the user's code may change between steps, as a plain tree for comparison."""
    groups = [{key: value for key, value in group.items() if key != "params"}
              for group in engine.optimizer.param_groups]  # fmt: skip
    entries = [entry for entry in engine.optimizer.state.values() if isinstance(entry, dict)]
    held = [value for entry in entries for value in entry.values()]
    tensors = [value for value in (*engine.model.state_dict().values(), *held) if isinstance(value, Tensor)]
    written = [value._version for value in tensors]
    settings = [getattr(engine.settings, name) for name in MOVABLE]
    state = engine.state
    objects = [one.collect() for one in (state.objects, *state.hooks.objects.values())]
    modules, optimizer = state.modules.collect(engine.model), state.optimizer_attributes.changed()
    random_numbers = RngState.capture().to_plain()
    return to_plain(
        [*objects, modules, optimizer, groups, written, settings, engine.cursor.state_dict(), random_numbers],
        encoding="odd",
    )
