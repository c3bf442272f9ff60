"""Named references in values of users' objects to parameters, modules and other objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from treadle.distributed import unwrap
from treadle.distributed.state_names import clean_name
from treadle.errors import CheckpointError

PART = "part"
"""Key of a tree that refers to an object."""


class Reference:
    """Object in place of a tree that refers to it."""

    def __init__(self, part: Any):
        self.part = part


class References:
    """Named objects: parameters and modules of a model, and added ones.

    Args:
        model: model, wrapped or not; None has no parts.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> references = References(model)
        >>> references.encode(model.bias), references.resolved([{"part": "parameter bias"}])[0].part is model.bias
        ({'part': 'parameter bias'}, True)
    """

    def __init__(self, model: nn.Module | None = None):
        self._at: dict[str, Any] = {}
        if model is not None:
            inner = unwrap(model)
            self._at |= {f"module {clean_name(name)}": module for name, module in inner.named_modules()}
            self._at |= {f"parameter {clean_name(name)}": one for name, one in inner.named_parameters()}
        self._names = {id(part): name for name, part in self._at.items()}

    def __contains__(self, value: object) -> bool:
        return id(value) in self._names

    def add(self, name: str, value: Any) -> None:
        """Add an object under a name; it must live as long as this table."""
        if id(value) not in self._names:
            self._at[name], self._names[id(value)] = value, name

    def encode(self, value: Any) -> Any:
        """Return a tree that refers to an object, or None if it has no name."""
        name = self._names.get(id(value))
        return None if name is None else {PART: name}

    def resolved(self, tree: Any) -> Any:
        """Replace references in a tree by :class:`Reference` objects.

        Raises:
            CheckpointError: there is no object of the name.
        """
        if isinstance(tree, list):
            return [self.resolved(item) for item in tree]
        if not isinstance(tree, Mapping):
            return tree
        if tree.keys() != {PART}:
            return {key: self.resolved(value) for key, value in tree.items()}
        if tree[PART] not in self._at:
            raise CheckpointError(
                f"the checkpoint refers to the {tree[PART]}, which this run does not have; build the model and the "
                "other objects as in the run that saved it"
            )
        return Reference(self._at[tree[PART]])
