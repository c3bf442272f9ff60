"""The part of a checkpoint that holds what the state dict of the model leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from treadle.checkpoint.comparison import unequal
from treadle.checkpoint.schema import to_plain
from treadle.engine.state_part import Difference, Notice, Saved, StatePart

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class ModulesPart(StatePart):
    """State missing from the model's state dict: trainable flags, modes, non-persistent buffers, attributes."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        entry = engine.state.modules.collect(engine.model)
        known = set(tree["base"] or ())  # frozen and unchanged, as fingerprints show
        if entry.get("frozen") == entry.get("built_frozen") and known.issuperset(entry.get("frozen", ())):
            entry = {key: value for key, value in entry.items() if key not in ("frozen", "built_frozen")}
        if entry:
            tree["modules"] = entry
        if values := engine.state.built_values.unchanged():
            tree["built"] = values
        for name in engine.state.modules.replaced(engine.model):
            engine.state.warn_once(
                engine,
                f"model: {name or 'it'} was replaced by another module after the run began; a resumed run builds the "
                "original, which may not fit. Build the model with all its layers, and freeze or bypass those used "
                "later",
            )
        for name in engine.state.modules.lost():
            advice = "Make it a buffer, or define get_extra_state and set_extra_state in the module"
            engine.state.warn_of_lost(engine, f"model: {name}", advice)

        if any(isinstance(module, torch.jit.ScriptModule) for module in engine.model.modules()) and _fuses():
            engine.state.warn_once(
                engine,
                "model: TorchScript fuses kernels after the first calls in a process, which then round differently: a "
                "resume is exact only if torch.jit.set_fusion_strategy([]) is called before training",
            )

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        entry, modules = saved.part("modules"), engine.state.modules
        if "frozen" in entry and sorted(modules.built_frozen) != entry["built_frozen"]:
            differ = sorted(modules.built_frozen ^ set(entry["built_frozen"]))
            yield Notice(
                f"{', '.join(differ[:5])}: requires_grad is restored from the checkpoint, whose run began with other "
                "parameters frozen; to change it, set it in a hook's on_before_train"
            )
        for path in modules.unknown(engine.model, entry):
            yield Notice(f"the checkpoint's state of {path} is ignored: this run's model has no such module")

    def load(self, engine: Engine, saved: Saved) -> None:
        engine.state.modules.restore(engine.model, saved.part("modules"), ready=engine.state.training)

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        entry, now = saved.part("modules"), engine.state.modules.collect(engine.model)
        if "frozen" in entry:
            yield from unequal(entry["frozen"], now.get("frozen", []), "modules.frozen")
        tensors = now.get("tensors", {})
        for path, value in entry.get("tensors", {}).items():
            if path in tensors:
                yield from unequal(value, to_plain(tensors[path], path), f"modules.tensors.{path}")


def _fuses() -> bool:
    """Return whether TorchScript may fuse kernels; its strategy can only be read by setting it."""
    strategy = torch.jit.set_fusion_strategy([])
    torch.jit.set_fusion_strategy(strategy)
    return bool(strategy)
