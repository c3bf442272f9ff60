"""scikit-learn's estimator interface without importing it: parameters by name, and tags."""

from __future__ import annotations

import difflib
import inspect
import sys
from typing import Any, TypeVar, cast

from treadle.errors import ConfigError

Self = TypeVar("Self", bound="Estimator")


def not_fitted(message: str) -> RuntimeError:
    """Return the error of an estimator without fitted values; where scikit-learn is loaded, its NotFittedError too."""
    exceptions = sys.modules.get("sklearn.exceptions")
    if exceptions is None:
        return RuntimeError(message)
    reduced = {"__reduce__": lambda self: (not_fitted, (message,))}  # as the class cannot be imported
    kind = type("NotFittedError", (RuntimeError, exceptions.NotFittedError), reduced)
    return cast(RuntimeError, kind(message))


class Estimator:
    """Estimator whose parameters are its constructor arguments, stored as attributes of the same names.

    Compatible with ``sklearn.base.clone``, ``GridSearchCV`` and pipelines.

    Example:
        >>> class Shifts(Estimator):
        ...     def __init__(self, by=1.0):
        ...         self.by = by
        >>> Shifts().set_params(by=2.0).get_params()
        {'by': 2.0}
    """

    _learns, _transforms = True, False  # kind of estimator, for the tags

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({settings})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name.

        Args:
            deep: for scikit-learn; there are no nested estimators.
        """
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self: Self, **params: Any) -> Self:
        """Set parameters by name, validated as in the constructor, and return self.

        Raises:
            ConfigError: a name is unknown or a value is out of range; nothing is changed.
        """
        now = self.get_params()
        for name in params:
            if name not in now:
                near = difflib.get_close_matches(name, now, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(now)}"
                raise ConfigError(f"unknown setting of {type(self).__name__}; {hint}", argument=name)
        for name, value in type(self)(**{**now, **params}).get_params().items():
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        """Return the scikit-learn tags: no target is needed."""
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags() if self._transforms else None,
            classifier_tags=None,
            regressor_tags=None,
            input_tags=InputTags(allow_nan=not self._learns),
            no_validation=not self._learns,
            requires_fit=self._learns,
        )
