"""Comparison of the data of a resumed run with that of the run that wrote its checkpoint, where both are built."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from treadle import distributed
from treadle.checkpoint.built_values import BuiltValues
from treadle.data.batch_sizes import other_batch_size
from treadle.data.own_state import owners_of
from treadle.data.tensors import TensorLoader
from treadle.data.transfer import TransferLoader


class BuiltData:
    """Values with which the parts of a loader were built: rows of a subset, tensors of a data set, class of a sampler.

    Those of the running epoch must be the same after a resume. Between two epochs, a script may go on with another
    loader on purpose: these are compared only if the call that trained was to read the same loader again, or had done
    so.

    Example:
        >>> BuiltData().entry(reads_on=True)
        {}
    """

    def __init__(self) -> None:
        self._values = BuiltValues(dict)
        self._epochs = 0  # that began with this loader
        self._loaded: Mapping[str, Any] | None = None  # a checkpoint's data entry, until a loader is opened
        self._passed_over = False  # whether the data of the loaded checkpoint was passed over

    def attach(self, loader: Any, owners: Mapping[str, Any]) -> None:
        """Record the values of a newly attached loader, given its parts by path."""
        self._values, self._epochs = _values_of(loader, owners), 0

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Compare the next loader with the ``data`` entry of a checkpoint of as many ranks."""
        is_comparable = "built" in state_dict and state_dict.get("num_ranks") == distributed.world_size()
        self._loaded, self._epochs = state_dict if is_comparable else None, 0

    def pass_over(self, loader: Any) -> None:
        """Look at a loader whose target is reached: if it is that of the checkpoint, the next one may be another."""
        if self._loaded is not None:
            values = _values_of(loader, owners_of(loader))
            self._passed_over = self._passed_over or not values.differing(self._loaded["built"]["values"])

    def opened(self, loader: Any, *, kind: str, length: int | None, is_new: bool) -> list[str]:
        """Count an epoch that is opened, and return a warning if its data is not that of the loaded checkpoint.

        Args:
            loader: of the epoch.
            kind: of its source.
            length: its micro-batches.
            is_new: whether the epoch begins, rather than being reopened.
        """
        loaded, self._loaded = self._loaded, None
        is_expected, self._passed_over = self._passed_over, False
        differing: list[str] = []
        if loaded is not None:
            again = loaded["built"]["again"]
            differing = self._values.differing(loaded["built"]["values"])
            self._epochs = 0 if differing else 1 + bool(again)
            is_named = (loaded.get("kind"), loaded.get("length")) != (kind, length) or other_batch_size(loaded, loader)
            if is_expected or is_named or (is_new and not again):
                differing = []
        self._epochs = self._epochs + 1 if is_new else max(self._epochs, 1)
        return [
            f"the data was built with other values than in the run that wrote the checkpoint: {', '.join(differing)}. "
            "No checkpoint holds them, so the run reads other samples or another order from here on, perhaps some that "
            "were held out before. Build the same data: call treadle.set_seed before it is built, or pass "
            "generator=torch.Generator().manual_seed(0) to random_split"
        ] if differing else []  # fmt: skip

    def entry(self, *, reads_on: bool) -> dict[str, Any]:
        """Return the entry of a checkpoint.

        Args:
            reads_on: whether the running call is between two epochs and will read the loader again.
        """
        if self._loaded is not None:
            return {"built": self._loaded["built"]}
        values = self._values.unchanged() if self._epochs else {}
        return {"built": {"again": reads_on or self._epochs > 1, "values": values}} if values else {}


def _values_of(loader: Any, owners: Mapping[str, Any]) -> BuiltValues:
    """Return the values of a loader's parts, and of the loader itself if it holds the samples."""
    if isinstance(loader, TransferLoader):
        loader = loader.loader
    held = {}
    if isinstance(loader, (list, tuple)):
        held["loader"] = SimpleNamespace(batches=loader)
    elif isinstance(loader, TensorLoader) or isinstance(getattr(loader, "dataset", None), (list, tuple)):
        held["loader"] = loader
    return BuiltValues(lambda: {**owners, **held}, lists=True)
