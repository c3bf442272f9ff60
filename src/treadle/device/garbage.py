"""Short garbage collections in a process with torch."""

from __future__ import annotations

import gc


class ShortCollections:
    """Full garbage collections that skip the objects which existed at their begin.

    Code that creates many objects triggers a full collection every few seconds. Over all objects of a process with
    torch one takes 0.2 s, during which no thread runs Python.

    Example:
        >>> collections = ShortCollections()
        >>> collections.begin(); collections.end()
    """

    def __init__(self) -> None:
        self._begun = False

    def begin(self) -> None:
        """Freeze the existing objects, unless already done."""
        if gc.isenabled() and gc.get_freeze_count() < len(gc.get_objects()):  # Python 3.12 starts with some frozen
            gc.collect()  # garbage would be frozen too, with its memory
            gc.freeze()
            self._begun = True

    def end(self) -> None:
        """Unfreeze the objects."""
        if self._begun:
            gc.unfreeze()
            self._begun = False
