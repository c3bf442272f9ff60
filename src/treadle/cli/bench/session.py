"""The measuring hook of a bench: it warms up, measures, counts, runs the trials and ends the run."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch

from treadle.capture.compile import is_compiled
from treadle.cli.bench.advice import advise
from treadle.cli.bench.counting import CallCounter, count_flops, counting_launches
from treadle.cli.bench.floor import floor_of, least_bytes, measure_ceilings
from treadle.cli.bench.loaders import try_loaders
from treadle.cli.bench.result import BenchResult
from treadle.cli.bench.timing import DATA, Timeline, clock_of, mean_parts, typical
from treadle.cli.bench.trials import (
    Bench,
    Trial,
    captured,
    compiled_blocks,
    doubled_batch,
    fused_optimizer,
    in_bf16,
    num_threads,
    thread_counts,
)
from treadle.cli.bench.watch import Watch, is_replayed, parts_in_order
from treadle.data.cursor import Group
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError

WARM_UP, COUNTED, _LEAST = 5, 4, 3
_BESIDE = WARM_UP + 1 + 2 * COUNTED  # steps of a run that are not measured
_KEPT_GROUPS = 4
_TRIAL_SECONDS = 1.0  # of each measurement, if a step is short enough
_BF16 = {"mini": 'mixed_precision="bf16"', "functional": "training.mixed_precision: bf16", "spectra": "cfg.amp: true"}


class StepReached(BaseException):
    """Signal that everything is measured; not an Exception, so that user code does not catch it."""


class BenchHook(BaseHook):
    """Hook that measures the steps of its run; the last of the hooks.

    Args:
        result: filled in by the hook.
        steps: number of steps to measure.
        compiles: whether to try compiled blocks, which can take minutes.
    """

    def __init__(
        self,
        result: BenchResult,
        *,
        steps: int,
        compiles: bool = False,
    ):
        self.result, self.steps, self.compiles = result, steps, compiles
        self._seen = 0
        self._measured_at = 0
        self._groups: list[Group] = []
        self._watch: Watch | None = None
        self._line: Timeline | None = None
        self._open = contextlib.ExitStack()
        self._counter: CallCounter | None = None
        self._launches: dict[str, int] = {}

    def on_before_train(self, trainer: Engine) -> None:
        """Wrap the run's parts, once.

        Raises:
            ConfigError: the run is too short to be measured.
        """
        if self._watch is not None:
            return  # a face that drives each epoch itself
        total = trainer.total_steps
        if total is not None:
            left = total - trainer.step - _BESIDE
            if left < _LEAST:
                raise ConfigError(
                    f"={self.result.target}: trains {total - trainer.step} steps, but measuring needs at least "
                    f"{_BESIDE + _LEAST}; raise max_steps, for example",
                    argument="TARGET",
                )
            self.steps = min(self.steps, left)
        self._line = Timeline(clock_of(trainer.device))
        self._watch = Watch(trainer, self._line, left_out=self)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Drop the step that ended with the evaluation of the epoch."""
        if self._line is not None:
            self._line.drop_step()

    def on_after_step(self, trainer: Engine) -> None:
        """Move from warm-up to measuring to counting, and end the run after the last step."""
        assert self._line is not None
        assert self._watch is not None
        self._seen += 1
        if self._seen == WARM_UP:
            self._line.clear()
        if self._seen > WARM_UP and self._line.num_steps < self.steps:
            self._groups = [*self._groups, trainer.attempt.group][-_KEPT_GROUPS:]
            self._measured_at = self._seen
            return
        if self._seen <= WARM_UP:
            return
        counted = self._seen - self._measured_at
        if counted == 1:
            self._watch.remove()
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
            self._counter = self._open.enter_context(CallCounter(trainer.device))
        elif counted == 1 + COUNTED:
            self._open.close()
            if trainer.device.type == "cuda":
                self._open.enter_context(counting_launches(self._launches, trainer.device))
        if counted >= 1 + (2 if trainer.device.type == "cuda" else 1) * COUNTED:
            self._open.close()
            self._conclude(trainer)
            raise StepReached

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Restore everything, however the run ended."""
        self._open.close()
        if self._watch is not None:
            self._watch.remove()

    def _conclude(self, trainer: Engine) -> None:
        assert self._line is not None
        assert self._watch is not None
        assert self._counter is not None
        trainer.raise_if_refused()
        with trainer.temporarily(lr_scheduler=None):  # the trials may take more steps than the schedule has
            self._measure(trainer)

    def _measure(self, trainer: Engine) -> None:
        assert self._line is not None
        assert self._watch is not None
        assert self._counter is not None
        result = self.result
        result.face, result.device, result.precision = trainer.face, str(trainer.device), trainer.precision.name
        result.num_threads = torch.get_num_threads()
        result.steps = self._line.num_steps
        measured = self._line.seconds()
        result.parts, result.means = parts_in_order(typical(measured)), parts_in_order(mean_parts(measured))
        result.num_calls = self._counter.num_calls / COUNTED
        result.host_reads = {line: count / COUNTED for line, count in self._counter.reads.most_common()}
        result.launches = self._launches["launches"] / COUNTED if self._launches else None
        flops = count_flops(lambda: trainer.train_step(self._groups[-1]))
        result.trials = self._find_floor(trainer, flops) + self._try(trainer, self._watch.loader)
        on_cuda = trainer.device.type == "cuda"
        result.advice = advise(result.means, result.host_reads, result.trials, on_cuda=on_cuda)

    def _find_floor(self, trainer: Engine, flops: int) -> list[Trial]:
        """Measure the machine; return no trial, or one with the reason why that was not possible."""
        try:
            ceilings = measure_ceilings(trainer.device, self.result.precision)
        except torch.OutOfMemoryError:
            return [Trial("the floor", "", note="measuring the machine's ceilings needs 2.5 GB more of the device")]
        self.result.ceilings = ceilings
        self.result.floor = floor_of(flops, least_bytes(trainer, self._groups[-1].batches), ceilings)
        return []

    def _try(self, trainer: Engine, loader: Any) -> list[Trial]:
        step = self.result.step_seconds
        count = max(5, min(40, int(_TRIAL_SECONDS / step))) if step else 5
        clock = clock_of(trainer.device)
        share = self.result.parts.get(DATA, 0.0) / step if step else 0.0
        of_loaders = try_loaders(trainer, loader, count=count, clock=clock, share=share)
        if is_replayed(trainer):
            note = "the run is captured; bench it with capture=False to try settings of single operators"
            return [*of_loaders, Trial("other settings", "", note=note)]
        bench = Bench(trainer, self._groups, clock=clock, count=count)
        bf16 = _BF16.get(trainer.face, "mixed_precision: bf16")
        trials = [
            bench.run("fused optimizer", "fused=True", partial(fused_optimizer, trainer)),
            bench.run("bf16", bf16, partial(in_bf16, trainer), "rounds differently: check the loss"),
            bench.run("capture", "capture=True, with a fused optimizer", partial(captured, trainer, self._groups)),
            self._try_compiling(bench),
            self._try_doubling(bench),
        ]
        if trainer.device.type == "cpu":
            for threads in thread_counts():
                how = f"torch.set_num_threads({threads}); in a pack threads={threads}"
                trials.append(bench.run(f"threads: {threads}", how, partial(num_threads, trainer, threads)))
        return trials + of_loaders

    def _try_compiling(self, bench: Bench) -> Trial:
        if not self.compiles and not any(is_compiled(module) for module in bench.engine.model.modules()):
            return Trial("compiled blocks", "", note="compiling takes up to minutes; --compile tries it")
        cold: dict[str, float] = {}
        trial = bench.run("compiled blocks", 'compile="blocks"', partial(compiled_blocks, bench.engine, cold=cold))
        if trial.seconds is None:
            return trial
        note = f"the first step took {cold['seconds']:.1f} s; rounds differently"
        return Trial(trial.name, trial.how, trial.seconds, trial.present, note)

    def _try_doubling(self, bench: Bench) -> Trial:
        trial = bench.run("twice the batch", "", partial(doubled_batch, bench.engine))
        if trial.seconds is None:
            return trial
        note = "time for the same number of samples; another batch size changes the training"
        return Trial(trial.name, "a larger batch_size", trial.seconds / 2, trial.present, note, other_training=True)
