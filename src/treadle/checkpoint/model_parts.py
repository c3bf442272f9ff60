"""Parameters and modules of a model as values of users' objects, which refer to them by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from treadle.distributed import unwrap
from treadle.distributed.state_names import clean_name
from treadle.errors import CheckpointError

PART = "part"
"""Key of the tree that refers to a part of the model."""


class Reference:
    """A part of the model in a tree that is decoded."""

    def __init__(self, part: Any):
        self.part = part


class ModelParts:
    """Parameters and modules of a model by name.

    Args:
        model: wrapped or not; None has no parts.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> parts = ModelParts(model)
        >>> parts.encode(model.bias), parts.resolved([{"part": "parameter bias"}])[0].part is model.bias
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

    def encode(self, value: Any) -> Any:
        """Return a tree that refers to a part, or None where a value is none."""
        name = self._names.get(id(value))
        return None if name is None else {PART: name}

    def resolved(self, tree: Any) -> Any:
        """Return a tree with a :class:`Reference` wherever it refers to a part.

        Raises:
            CheckpointError: this model has no such part.
        """
        if isinstance(tree, list):
            return [self.resolved(item) for item in tree]
        if not isinstance(tree, Mapping):
            return tree
        if tree.keys() != {PART}:
            return {key: self.resolved(value) for key, value in tree.items()}
        if tree[PART] not in self._at:
            raise CheckpointError(
                f"the checkpoint holds a reference to the {tree[PART]} of the model, which this run's model does not "
                "have; build the model as it was"
            )
        return Reference(self._at[tree[PART]])
