"""Generators and objects of the attached loader, with the states that a checkpoint has for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from treadle.data.own_state import LoaderState
from treadle.data.samplers import generators_of
from treadle.seed import RngState


class LoaderParts:
    """Generators and objects of a loader, and their pending states, which are restored when an epoch is opened.

    Attributes:
        loader: the attached loader, or None.
        objects: state of its objects.

    Example:
        >>> parts = LoaderParts()
        >>> parts.attach([1.0])
        >>> parts.generators(), parts.states()
        ([], {})
    """

    def __init__(self) -> None:
        self.loader: Any = None
        self.objects = LoaderState(None)
        self._rng: RngState | None = None  # the checkpoint's RNG, set after the epoch is reopened
        self._generators: list[Tensor] = []
        self._states: dict[str, Any] | None = None
        self._settled: tuple[list[Tensor], dict[str, Any] | None] | None = None  # restored before the opening

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader."""
        return int(getattr(self.loader, "num_workers", None) or 0)

    @property
    def is_settled(self) -> bool:
        """Whether pending states were restored before the opening of their epoch."""
        return self._settled is not None

    def attach(self, loader: Any) -> None:
        """Attach a loader, into which settled states go, too."""
        if self._settled is not None:
            self._generators, self._states = self._settled
        self.objects = LoaderState(loader)
        self.loader = loader

    def pend(self, state_dict: Mapping[str, Any], *, rng: RngState | None = None) -> None:
        """Keep the states of a ``data`` entry until an epoch is opened.

        Args:
            state_dict: the entry.
            rng: the checkpoint's RNG, restored last, after the epoch is reopened.
        """
        self._rng, self._settled = rng, None
        self._generators = list(state_dict["generators"])
        self._states = dict(state_dict.get("objects") or {})

    def settle(self) -> None:
        """Restore the pending states now, and again if another loader is attached before the opening."""
        settled = self._generators, self._states
        self.restore()
        self._settled = settled

    def begin_opening(self) -> None:
        """Forget settled states: the attached loader is the one whose epoch is opened."""
        self._settled = None

    def restore(self) -> None:
        """Restore the pending states."""
        if self._rng is not None:
            self._rng.restore()
            self._rng = None
        self.set_generators(self._generators)
        self._generators = []
        self._restore_objects()

    @contextlib.contextmanager
    def reopening(self, opening: Mapping[str, Any]) -> Iterator[None]:
        """Let a block reopen an epoch with the random states of its opening; restore the pending ones afterwards."""
        present = self._rng or RngState.capture()
        self.set_generators(opening["generators"])
        RngState.from_plain(opening["rng"]).restore()
        yield
        if not self.num_workers:
            # A generator may be shared with the data set; without prefetching its state is known exactly.
            self.set_generators(self._generators)
        self._restore_objects()
        self._rng, self._generators = None, []
        present.restore()

    def put_back(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of a ``data`` entry of this run."""
        self.objects.restore(state_dict.get("objects") or {})
        self.set_generators(state_dict["generators"])

    def opening(self) -> dict[str, Any]:
        """Return the states with which an epoch is opened."""
        generators = [generator.get_state() for generator in generators_of(self.loader)]
        return {"rng": RngState.capture().to_plain(), "generators": generators, "objects": self.objects.collect()}

    def generators(self) -> list[Tensor]:
        """Return the states of the generators: the pending ones, or those of now."""
        return self._generators or [generator.get_state() for generator in generators_of(self.loader)]

    def states(self) -> dict[str, Any]:
        """Return the states of the objects: the pending ones, or those of now."""
        return self.objects.collect() if self._states is None else self._states

    def lost(self) -> list[str]:
        """Return warnings about changes of the objects that no checkpoint holds."""
        return [
            f"{name} has changed, but checkpoints do not hold it: a resume is exact only if no item depends on it. "
            "Define state_dict and load_state_dict on its object, or compute items from their index and the global "
            "random generators"
            for name in self.objects.lost()
        ]

    def unknown(self, states: Mapping[str, Any]) -> list[str]:
        """Return warnings about states without an object in this loader."""
        return [
            f"the checkpoint's state of {path} is ignored: this run's loader has no such object"
            for path in self.objects.unknown(states)
        ]

    def set_generators(self, states: list[Tensor]) -> None:
        """Set the states of the loader's generators."""
        for generator, state in zip(generators_of(self.loader), states, strict=False):
            generator.set_state(state)

    def _restore_objects(self) -> None:
        if self._states is not None:
            self.objects.restore(self._states)
            self._states = None
