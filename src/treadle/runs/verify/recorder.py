"""The recorder: writes one line per step with digests of everything that happened, and kills the process as planned.

It wraps the target's own hooks. The first hook stops the run at its last step and has the record written after every
hook has seen the step but before any checkpoint is; the last hook observes the step after all others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from treadle.data.cursor import Group
from treadle.distributed.state_names import model_state
from treadle.engine import Engine
from treadle.engine.hook import BaseHook, read_only
from treadle.hooks.flight import ids_as_plain
from treadle.runs.verify.digests import leaves_of, without_durations
from treadle.runs.verify.evidence import SeedWatch, outside_values
from treadle.runs.verify.jobs import Job, RecordFile
from treadle.seed import RngState

PARTS = {
    "sample ids": "which samples were read",
    "batch content": "what was read",
    "random state before the forward pass": "python, numpy and torch",
    "weights before the forward pass": "after all hooks",
    "random state after the forward pass": "python, numpy and torch",
    "loss": "loss, weight and records of each micro-batch",
    "gradients": "by parameter, and their norm",
    "learning rate": "and the other settings of the optimizer",
    "weights": "parameters and buffers after the step",
    "optimizer": "its state",
    "scheduler": "its state",
    "scaler": "of fp16",
    "average": "EMA weights",
    "progress": "counters and running means",
    "metrics": "evaluation, best rule and history",
    "hooks": "state that hooks save",
    "data position": "epoch, position, generators of the loader",
    "random state after the step": "python, numpy and torch",
    "log": "records given to on_log",
}
"""Parts of a record, in the order in which they arise in a step: the first that differs is nearest to the cause."""

_OF_CHECKPOINT = {
    "weights": ("model",),
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
    "scaler": ("scaler",),
    "average": ("ema",),
    "progress": ("epoch", "global_step", "progress"),
    "metrics": ("best_metric", "best_epoch", "selection", "metrics", "history"),
    "hooks": ("hooks",),
    "data position": ("data",),
}


class Recorder(BaseHook):
    """First hook of the run, which stops it at its last step, kills it as planned and writes the records.

    Args:
        job: the job of this process.
        file: the output of records.
        watch: records calls that seed a generator.
    """

    def __init__(self, job: Job, file: RecordFile, watch: SeedWatch):
        self.job = job
        self.file = file
        self.watch = watch
        self.parts: dict[str, dict[str, str]] = {}
        self.outside: dict[str, str] = {}
        self.logged: dict[str, str] = {}
        self.loader: Any = None
        self.stop_at = 0

    def on_before_train(self, trainer: Engine) -> None:
        """Record where the run starts and begin to observe the data."""
        self.stop_at = trainer.step + self.job.steps if self.job.stop_at is None else self.job.stop_at
        trainer.should_stop = trainer.step >= self.stop_at
        self.file.write("start", step=trainer.step, source=trainer.resume_source, device=str(trainer.device))
        _after(trainer.cursor, "take", self._look_at_data)
        _before(trainer.cursor, "attach", self._look_at_loader)

    def _look_at_loader(self, loader: Any) -> None:
        self.loader = loader

    def _look_at_data(self, group: Group) -> None:
        if not group.batches:
            return
        ids = {str(index): _as_text(given) for index, given in enumerate(group.sample_ids) if given is not None}
        settle = getattr(self.loader, "settle", None)
        if settle is not None:  # a captured step gathers its batch itself, later
            settle()
        # A refused group is followed by a fresh one within the same step; the parts of both are kept.
        self._add("sample ids", ids)
        self._add("batch content", leaves_of(list(group.batches)))

    def _add(self, part: str, texts: Mapping[str, str]) -> None:
        held = self.parts.setdefault(part, {})
        for path, text in texts.items():
            held[path if path not in held else f"{path} (again)"] = text

    def look_before_forward(self, trainer: Engine) -> None:
        """Record the state before the forward pass."""
        self._add("random state before the forward pass", _random_state())
        self._add("weights before the forward pass", leaves_of(model_state(trainer.model)))
        self.outside = outside_values(trainer, self.loader)
        self.logged = {}  # logs after the last record may come before or after a checkpoint
        self.watch.start()

    def look_before_update(self, trainer: Engine) -> None:
        """Record the state before the update, and kill in the middle of a step if planned."""
        self.watch.stop()
        self._add("random state after the forward pass", _random_state())
        gradients = {name: value.grad for name, value in trainer.model.named_parameters() if value.grad is not None}
        self._add("gradients", leaves_of({"norm": trainer.step_info.get("grad_norm"), **gradients}))
        self._add("learning rate", leaves_of(_settings(trainer)))
        self._kill(trainer.step, "inside")

    def on_after_step(self, trainer: Engine) -> None:
        """End the run at its last step; the record is written after every hook has seen the step."""
        self.watch.stop()
        trainer.should_stop = trainer.should_stop or trainer.step >= self.stop_at
        trainer.request_write(lambda: self._write_step(trainer))

    def _write_step(self, trainer: Engine) -> None:
        outputs = [[output.loss, output.weight, output.records] for output in trainer.attempt.outputs]
        self._add("loss", without_durations(leaves_of(outputs)))
        self._write("step", trainer)
        self._kill(trainer.step, "before")

    def _write(self, kind: str, trainer: Engine) -> None:
        tree = trainer.state_dict()
        tree["data"] = {
            key: value for key, value in tree["data"].items() if key != "loader"
        }  # may represent it differently
        for part, keys in _OF_CHECKPOINT.items():
            held = {key: tree[key] for key in keys if tree.get(key) not in (None, {}, [])}
            texts = leaves_of(held) if held else {}
            self.parts[part] = without_durations(texts) if part in ("metrics", "hooks") else texts
        self._add("random state after the step", _random_state())
        self._add("log", self.logged)
        ordered = {part: self.parts[part] for part in PARTS if self.parts.get(part)}
        self.file.write(kind, step=trainer.step, parts=ordered, outside=self.outside, seeds=self.watch.calls)
        self.parts, self.logged = {}, {}

    def on_before_step(self, trainer: Engine) -> None:
        """Kill between two steps, after the checkpoint of the previous one."""
        self._kill(trainer.step - 1, "after")

    def _kill(self, step: int, place: str) -> None:
        kill = self.job.kill
        if kill is None or kill.place != place or kill.step != step:
            return
        self.file.write("kill", step=kill.step, signal=kill.signal, place=kill.place)
        os.kill(os.getpid(), getattr(signal, kill.signal))

    def on_log(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Keep the records logged in this step."""
        if not dry_run:
            self.logged.update(without_durations(leaves_of(records)))

    def on_after_epoch(self, trainer: Engine) -> None:
        """Record the state after an evaluation, before an epoch's checkpoint."""
        trainer.request_write(lambda: self._write("epoch", trainer))

    def on_after_train(self, trainer: Engine) -> None:
        """Record the state at the end, after every hook."""
        trainer.request_write(lambda: self._write("end", trainer))

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Exit the script when the run is over, since later code could write into the user's own folders.

        Raises:
            SystemExit: always, if training ended without an error.
        """
        if error is None:  # the first hook is closed last
            self.file.write("over", step=trainer.step)
            raise SystemExit(0)


class Looker(BaseHook):
    """Last hook of the run, which observes a step for the recorder after every other hook."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def on_before_train(self, trainer: Engine) -> None:
        """Discard logs from opening the hooks, which happens in every process."""
        self.recorder.logged = {}

    def on_before_step(self, trainer: Engine) -> None:
        """See :meth:`Recorder.look_before_forward`."""
        self.recorder.look_before_forward(trainer)

    @read_only
    def on_before_optimizer_step(self, trainer: Engine) -> None:
        """See :meth:`Recorder.look_before_update`."""
        self.recorder.look_before_update(trainer)


def _settings(trainer: Engine) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in trainer.optimizer.param_groups
    ]


def _random_state() -> dict[str, str]:
    plain = RngState.capture().to_plain()
    texts = {name: ";".join(leaves_of(plain[name]).values()) for name in ("python", "numpy", "torch")}
    return texts | leaves_of(plain["accelerators"])


def _as_text(ids: Any) -> str:
    """Return the ids themselves, which name the samples to look at.

    Example:
        >>> import torch
        >>> _as_text([3, torch.tensor(1)]), _as_text(torch.tensor([3, 1])), _as_text(range(2)), _as_text("a")
        ('3 1', '3 1', '0 1', 'a')
    """
    plain = ids_as_plain(ids)
    return " ".join(map(str, plain)) if isinstance(plain, list) else str(plain)


def _after(owner: Any, name: str, look: Callable[[Any], None]) -> None:
    """Pass every result of a method of one object to ``look``."""
    method = getattr(owner, name)

    def looked_at(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        look(result)
        return result

    setattr(owner, name, looked_at)


def _before(owner: Any, name: str, look: Callable[[Any], None]) -> None:
    """Pass the argument of every call of a method of one object to ``look``."""
    method = getattr(owner, name)

    def looked_at(argument: Any) -> Any:
        look(argument)
        return method(argument)

    setattr(owner, name, looked_at)
