"""The errors that treadle raises on purpose.

::

    TreadleError
    ├── ConfigError         (also ValueError)    a setting, argument or input is wrong
    ├── CheckpointError     (also RuntimeError)  a file cannot be read, written or used
    │   └── PickledCodeError                     a file holds pickled objects, which could run code
    ├── DataExhaustedError  (also RuntimeError)  the data ended before the training did
    ├── NonFiniteError      (also RuntimeError)  a gradient or loss is NaN or infinite
    ├── OutOfMemoryError    (also torch.OutOfMemoryError)  memory ran out in training
    ├── RankLostError       (also RuntimeError)  another rank ended or does not answer
    └── MissingExtraError   (also ImportError)   an optional package is not installed

Every message names the argument, the value, the rule and the fix. Errors from user code
(the model, the loss, the data set, a hook) are never wrapped: they leave as they were raised, but for one that means
that memory ran out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class TreadleError(Exception):
    """Base of all errors that treadle raises on purpose."""


class _Missing:
    """Placeholder for a value that was not given, since None is one."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"  # by name, so that a copy is the same object


MISSING = _Missing()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else f"<{type(value).__name__}>"


class ConfigError(TreadleError, ValueError):
    """A setting, an argument or an input breaks a rule; raised before any work is lost.

    With an argument the message begins with it: ``width=0: must be at least 1``, or ``model: has no parameter`` where
    no value is given. A text that begins with a space, ``=`` or ``:`` follows the argument as it is.

    Args:
        text: the rule and the fix.
        argument: bare or dotted name of the argument or setting; None if the error is about none.
        value: its value, shown by ``repr``, or by its class where that fills more than a line.

    Attributes:
        argument: as given.
        value: as given; ``MISSING`` if it was not.

    Example:
        >>> error = ConfigError("must be at least 1", argument="width", value=0)
        >>> error.argument, str(error)
        ('width', 'width=0: must be at least 1')
    """

    argument: str | None
    value: Any

    def __init__(self, text: str = "", *, argument: str | None = None, value: Any = MISSING):
        given = "" if value is MISSING or argument is None else f"={_shown(value)}"
        joint = "" if argument is None or text.startswith((" ", "=", ":")) else ": "
        self._after = f"{given}{joint}{text}"
        super().__init__(f"{argument or ''}{self._after}")
        self._leading = argument is not None
        self.argument = argument
        self.value = value

    def about(self, argument: str | None, value: Any = MISSING) -> ConfigError:
        """Set argument and value where the text names them in other words; return the same error.

        Example:
            >>> ConfigError("unknown setting 'lr'").about("lr").argument
            'lr'
        """
        self.argument = argument
        self.value = value
        return self

    def renamed(self, argument: str) -> ConfigError:
        """Return a copy that begins with another name of the argument, such as its dotted name in a configuration.

        An error about no argument gets the name in front; one that names its argument in other words stays as it is.

        Example:
            >>> str(ConfigError("must be at least 1", argument="width", value=0).renamed("model.width"))
            'model.width=0: must be at least 1'
        """
        if self.argument is not None and not self._leading:
            return self
        return ConfigError(self._after, argument=argument).about(argument, self.value)

    def extended(self, place: str) -> ConfigError:
        """Return a copy with more text at its end, such as the line of a file."""
        error = type(self)(f"{self}{place}").about(self.argument, self.value)
        error._after, error._leading = f"{self._after}{place}", self._leading
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        plain = isinstance(self.value, (bool, int, float, str, type(None)))
        about = (self.argument, self.value if plain else MISSING)  # other values may not be picklable
        return _remake_config_error, (type(self), str(self), about, self._after if self._leading else None)


def _remake_config_error(
    kind: type[ConfigError], text: str, about: tuple[str | None, Any], after: str | None
) -> ConfigError:
    error = kind(text).about(*about)
    if after is not None:
        error._after, error._leading = after, True
    return error


class CheckpointError(TreadleError, RuntimeError):
    """A checkpoint cannot be read, written, or used for this model."""


class PickledCodeError(CheckpointError):
    """A file holds pickled objects, which could run code when it is loaded; nothing of it was loaded."""


class DataExhaustedError(TreadleError, RuntimeError):
    """The loader has no more data although the target is not reached."""


class RankLostError(TreadleError, RuntimeError):
    """Another rank ended or does not answer, so this one cannot continue; the cause is there."""


class RanksDifferError(TreadleError, RuntimeError):
    """Ranks that must hold the same weights do not."""


class MissingExtraError(TreadleError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


if TYPE_CHECKING:

    class OutOfMemoryError(TreadleError, torch.OutOfMemoryError):
        """Memory ran out in training; PyTorch's error is its cause. The message names what was saved."""


class NonFiniteError(TreadleError, RuntimeError):
    """The gradient of a step is NaN or infinite and the retries are used up.

    The weights are those of the last applied step.

    Attributes:
        step: the step that was refused (1-based).
        norm: the total gradient norm that was measured (NaN or infinity).
        epoch: epochs completed when it happened.
        batch_index: micro-batches of the epoch that were consumed, the refused ones included.
        tries: how often a group of data was tried for this step.
    """

    def __init__(self, message: str, *, step: int, norm: float, epoch: int, batch_index: int, tries: int):
        super().__init__(message)
        self.step = step
        self.norm = norm
        self.epoch = epoch
        self.batch_index = batch_index
        self.tries = tries

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake_non_finite, (str(self), self.step, self.norm, self.epoch, self.batch_index, self.tries)


def _remake_non_finite(
    message: str, step: int, norm: float, epoch: int, batch_index: int, tries: int
) -> NonFiniteError:
    # Keyword-only arguments do not survive the default pickling of exceptions, and workers and launchers pickle them.
    return NonFiniteError(message, step=step, norm=norm, epoch=epoch, batch_index=batch_index, tries=tries)


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return a sentence that names the known word nearest to ``name``, and all of them if none is near.

    Args:
        name: what was given.
        known: the words.
        prefix: goes before the word that is named.

    Example:
        >>> nearest("max_grad_nrom", ["max_grad_norm", "seed"])
        "did you mean 'max_grad_norm'?"
    """
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    return f"known: {', '.join(options)}"


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first key of ``given`` that is not in ``known``, naming the nearest.

    Example:
        >>> refuse_unknown("TrainerConfig", ["amp"], ["amp", "device"])
    """
    options = set(known)
    for key in given:
        if key not in options:
            raise ConfigError(f"unknown key {key!r}; {nearest(str(key), options)}", argument=where)


def __getattr__(name: str) -> Any:
    """Make OutOfMemoryError, whose base is torch's, when it is first asked for: the command line loads no torch."""
    if name != "OutOfMemoryError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    class OutOfMemoryError(TreadleError, torch.OutOfMemoryError):
        """Memory ran out in training; PyTorch's error is its cause. The message names what was saved."""

        __qualname__ = "OutOfMemoryError"

    return globals().setdefault(name, OutOfMemoryError)
