"""Errors that treadle raises deliberately.

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

Every message names the argument, the value, the rule and the fix. Errors from user code (the model, the loss, the data
set, a hook) are never wrapped: they propagate unchanged, except out-of-memory errors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class TreadleError(Exception):
    """Base class of all errors that treadle raises deliberately."""


class _Missing:
    """Placeholder for a missing value, since None is a value."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"  # pickled by name, so that a copy is the same object


MISSING = _Missing()


def _formatted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else f"<{type(value).__name__}>"


class ConfigError(TreadleError, ValueError):
    """Error for an invalid setting, argument or input, raised before any work is lost.

    With an argument, the message begins with it: ``width=0: must be at least 1``, or ``model: has no parameter`` if no
    value is given. A text that begins with a space, ``=`` or ``:`` is appended directly to the argument.

    Args:
        text: the rule and the fix.
        argument: plain or dotted name of the argument or setting, or None.
        value: its value, shown by ``repr``, or by its class if that is longer than a line.

    Attributes:
        argument: the argument.
        value: the value; ``MISSING`` if not given.

    Example:
        >>> error = ConfigError("must be at least 1", argument="width", value=0)
        >>> error.argument, str(error)
        ('width', 'width=0: must be at least 1')
    """

    argument: str | None
    value: Any

    def __init__(self, text: str = "", *, argument: str | None = None, value: Any = MISSING):
        given = "" if value is MISSING or argument is None else f"={_formatted(value)}"
        joint = "" if argument is None or text.startswith((" ", "=", ":")) else ": "
        self._after = f"{given}{joint}{text}"
        super().__init__(f"{argument or ''}{self._after}")
        self._leading = argument is not None
        self.argument = argument
        self.value = value

    def about(self, argument: str | None, value: Any = MISSING) -> ConfigError:
        """Set argument and value if the text already names them; return the same error.

        Example:
            >>> ConfigError("unknown setting 'lr'").about("lr").argument
            'lr'
        """
        self.argument = argument
        self.value = value
        return self

    def renamed(self, argument: str) -> ConfigError:
        """Return a copy with another name of the argument, such as its dotted name in a configuration.

        An error without an argument gets the name prepended; one whose text names its argument itself is unchanged.

        Example:
            >>> str(ConfigError("must be at least 1", argument="width", value=0).renamed("model.width"))
            'model.width=0: must be at least 1'
        """
        if self.argument is not None and not self._leading:
            return self
        return ConfigError(self._after, argument=argument).about(argument, self.value)

    def extended(self, place: str) -> ConfigError:
        """Return a copy with text appended, such as the line of a file."""
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
    """Error for a checkpoint that cannot be read, written, or used for this model."""


class PickledCodeError(CheckpointError):
    """Error for a file with pickled objects, which could run code when loaded; nothing was loaded."""


class DataExhaustedError(TreadleError, RuntimeError):
    """Error for a loader without more data before the target is reached."""


class RankLostError(TreadleError, RuntimeError):
    """Error that another rank ended or does not respond, which is the cause."""


class RanksDifferError(TreadleError, RuntimeError):
    """Error for ranks whose weights differ but must be equal."""


class MissingExtraError(TreadleError, ImportError):
    """Error for a missing optional package; the message names the extra that installs it."""


if TYPE_CHECKING:

    class OutOfMemoryError(TreadleError, torch.OutOfMemoryError):
        """Out-of-memory error in training, caused by PyTorch's error. The message names what was saved."""


class NonFiniteError(TreadleError, RuntimeError):
    """Error for a step with a NaN or infinite gradient and no retries left.

    The weights are those of the last applied step.

    Attributes:
        step: the refused step (1-based).
        norm: the total gradient norm (NaN or infinity).
        epoch: epochs completed at that time.
        batch_index: micro-batches of the epoch consumed, including the refused ones.
        tries: number of groups tried for this step.
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
    # Keyword-only arguments are lost in the default pickling of exceptions, which workers and launchers use.
    return NonFiniteError(message, step=step, norm=norm, epoch=epoch, batch_index=batch_index, tries=tries)


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return a suggestion of the known word closest to ``name``, or a list of all if none is close.

    Args:
        name: the given name.
        known: the words.
        prefix: prefix of the suggested word.

    Example:
        >>> nearest("max_grad_nrom", ["max_grad_norm", "seed"])
        "did you mean 'max_grad_norm'?"
    """
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    return f"known: {', '.join(options)}"


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 epoch`` or ``2 epochs``.

    Example:
        >>> number_of(1, "epoch"), number_of(2000, "step")
        ('1 epoch', '2,000 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first key of ``given`` that is not in ``known``, suggesting the closest.

    Example:
        >>> refuse_unknown("TrainerConfig", ["amp"], ["amp", "device"])
    """
    options = set(known)
    for key in given:
        if key not in options:
            raise ConfigError(f"unknown key {key!r}; {nearest(str(key), options)}", argument=where)


def __getattr__(name: str) -> Any:
    """Define OutOfMemoryError, a subclass of torch's, lazily, since the command line must not import torch."""
    if name != "OutOfMemoryError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    class OutOfMemoryError(TreadleError, torch.OutOfMemoryError):
        """Out-of-memory error in training, caused by PyTorch's error. The message names what was saved."""

        __qualname__ = "OutOfMemoryError"

    return globals().setdefault(name, OutOfMemoryError)
