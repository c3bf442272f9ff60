"""LoggingHook: aggregated records for ``trainer.log`` and the trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.hooks.reporting import IntervalHook

if TYPE_CHECKING:
    from treadle.engine import Engine

_OWN_KEYS = ("loss", "data_time", "step_time", "lr", "grad_norm", "max_memory", "retries")


class LoggingHook(IntervalHook):
    """Hook that logs ``{"train": {**records, loss, data_time, step_time, lr, grad_norm, ...}}`` every ``interval``
    steps.

    ``loss`` is left out if no step since the last emission had one, ``grad_norm`` if none had a gradient.

    Args:
        interval: steps between emissions.
        sync: reduce over ranks.

    Raises:
        ConfigError: at the first emission, if a record has the name of one of the hook's own keys.

    Example:
        >>> hook = LoggingHook(interval=100)
    """

    @checked
    def __init__(self, interval: int = 10, sync: bool = True):
        super().__init__(interval, sync=sync)

    def report(self, trainer: Engine, means: dict[str, Any]) -> None:
        """Pass the records to ``trainer.log`` and to ``on_log`` of every hook."""
        records: dict[str, Any] = means.get("records", {})
        taken = [name for name in records if name in _OWN_KEYS]
        if taken:
            raise ConfigError(
                f"the name {taken[0]!r} is used by LoggingHook itself; rename the record in your forward step",
                argument="records",
            )
        own = {key: means[key] for key in _OWN_KEYS if key in means and key not in ("lr", "retries")}
        own["lr"] = {f"group_{index}": value for index, value in enumerate(means["lr"])}
        if means["retries"]:
            own["retries"] = means["retries"]
        trainer.log({"train": {**records, **own}})
