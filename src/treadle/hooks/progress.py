"""ProgressHook: one line per report in the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from treadle.errors.arguments import check_least, checked
from treadle.hooks.reporting import IntervalHook
from treadle.hooks.values import hours
from treadle.nested import flatten_nested_dict

if TYPE_CHECKING:
    from treadle.engine import Engine


class ProgressHook(IntervalHook):
    """Hook that logs an INFO line of step, times, ETA, memory, loss, gradient norm and learning rates.

    ``Step   100/10000: step 0.2500s data 0.0100s eta 6:00:00 loss 0.5234 grad_norm 2.346 lr_0 1.00e-03``

    Numbers have four significant digits. A line for an incomplete interval, at the end of a run, states the number of
    steps that its means cover. On a GPU a line may be logged some steps late, but before the next line or a checkpoint:
    training continues while the numbers are copied.

    Args:
        interval: steps between lines.
        with_records: add the records after `` | ``.
        sync: reduce over ranks.
        eta_warmup: steps of this process before an ETA is shown.

    Example:
        >>> hook = ProgressHook(interval=10, with_records=True)
    """

    _may_report_late = True

    @checked
    def __init__(self, interval: int = 1, with_records: bool = False, sync: bool = False, eta_warmup: int = 10):
        super().__init__(interval, sync=sync)
        self.with_records = with_records
        check_least(0, eta_warmup=eta_warmup)
        self.eta_warmup = eta_warmup
        self._first_step = 0
        self._started = 0.0

    def on_before_train(self, trainer: Engine) -> None:
        """Start the clock of this process; steps of an earlier process do not count for its speed."""
        self._first_step = trainer.step
        self._started = time.perf_counter()

    def report(self, trainer: Engine, means: dict[str, Any]) -> None:
        """Log the line."""
        total, step = trainer.total_steps, means["step"]
        width = len(str(total)) if total is not None else 1
        of = f"/{total}" if total is not None else ""
        parts = [f"Step {step:>{width}}{of}:"]
        # A run resumed with only an evaluation left reports steps of another process.
        parts += [f"{name} {means[f'{name}_time']:.4f}s" for name in ("step", "data") if f"{name}_time" in means]
        done = step - self._first_step
        if total is not None and done >= self.eta_warmup:
            left = (means["report_time"] - self._started) / max(done, 1) * (total - step)
            parts.append(f"eta {hours(left)}")
        if "max_memory" in means:
            parts.append(f"mem {means['max_memory']:.2f}GiB")
        parts += [f"{name} {means[name]:.4g}" for name in ("loss", "grad_norm") if name in means]
        parts += [f"lr_{index} {value:.2e}" for index, value in enumerate(means["lr"])]
        line = " ".join(parts)
        if self.with_records and means.get("records"):
            flat = flatten_nested_dict(means["records"])
            line += " | " + " ".join(f"{'/'.join(path)} {value:.4g}" for path, value in flat.items())
        if rest := step % self.interval:
            line += f" (means of the last {rest} step{'s' if rest > 1 else ''})"
        trainer.logger.info(line, extra={"topic": "progress"})
