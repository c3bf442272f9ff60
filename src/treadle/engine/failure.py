"""Failure of a rank: it logs its error at once with its rank, and the others log that they are not the cause.

The line is logged before anything is closed, so that nothing that waits for other ranks can delay it. A process
launched by torchrun also writes its error to the file that torchrun's summary reads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from treadle import distributed
from treadle.errors import NonFiniteError, RankLostError, TreadleError
from treadle.nested import non_finite_in, shapes_of
from treadle.optim.late_flags import StepLocation

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
NOTE = "in step"
"""How the note begins that an error of a step is given."""

_LATER = 5  # seconds; torchrun takes the earliest error as the cause, and its timestamps are whole seconds
_GONE = ("closed by peer", "reset by peer", "broken pipe", "socket closed", "connection refused", "remote process")
_SILENT = ("timed out", "timeout")
_BACKENDS = ("gloo", "nccl", "tcpstore")


@contextlib.contextmanager
def errors_logged_with_rank(engine: Engine) -> Iterator[None]:
    """Log an error raised in the block, with the rank and the location, if there are several ranks.

    Raises:
        RankLostError: in place of a collective's error, if another rank is gone or does not respond.
    """
    _remove_error_file()
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        _note_batches(engine, error)
        _note_groups(engine, error)
        if distributed.world_size() == 1:
            raise
        lost = lost_rank(error)
        if lost is None:
            engine.logger.error("%s", _line(engine, error))
            write_error_file(error)
            raise
        engine.logger.error("rank %d: %s", distributed.rank(), lost)
        write_error_file(lost)
        if lost is error:
            raise
        raise lost from error


def _note_batches(engine: Engine, error: BaseException) -> None:
    """Add a note with the step and its batches' shapes to an error raised in it; the error itself is unchanged."""
    inside = bool(engine.attempt.info) and "step_time" not in engine.attempt.info
    if not inside or isinstance(error, TreadleError) or not hasattr(error, "add_note"):  # before Python 3.11
        return
    shapes = " ".join(dict.fromkeys(shapes_of(batch) for batch in engine.attempt.group.batches))
    error.add_note(f"{NOTE} {engine.step}, epoch {engine.epoch + 1}; what the loader gave: {shapes}")


def _note_groups(engine: Engine, error: BaseException) -> None:
    """Add a note to an error of torch's if the optimizer has groups that its schedule was not built with."""
    covered = len(getattr(engine.lr_scheduler, "base_lrs", ()))
    groups = len(getattr(engine.optimizer, "param_groups", ()))  # build_optimizer may have returned anything
    if covered and groups > covered and isinstance(error, (ValueError, IndexError)) and hasattr(error, "add_note"):
        error.add_note(
            f"{type(engine.lr_scheduler).__name__} was built for {covered} parameter groups, and the optimizer has "
            f"{groups} by now: build all groups from the start and freeze those to come with requires_grad_(False)"
        )


@contextlib.contextmanager
def batch_named_in_errors(batch: Any, place: str) -> Iterator[None]:
    """Add the shapes of a batch to an error that leaves the block, as a note, unless it is one of this library's.

    Example:
        >>> with batch_named_in_errors([1.0], "evaluation"):
        ...     pass
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, TreadleError) and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"in {place}; what the loader gave: {shapes_of(batch)}")
        raise


def _line(engine: Engine, error: BaseException) -> str:
    rank, size = distributed.rank(), distributed.world_size()
    where = f"{socket.gethostname()}, process {os.getpid()}"
    text = " ".join(str(error).split())
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"rank {rank} of {size} ({where}) failed at step {engine.step}, epoch {engine.epoch}: {described}"


def lost_rank(error: BaseException) -> RankLostError | None:
    """Return the RankLostError for an error of a collective caused by another rank; None for any other error.

    Example:
        >>> lost_rank(RuntimeError("Gloo: Connection closed by peer [10.0.0.7]:4711"))
        RankLostError('another rank exited first; its error is the cause')
        >>> lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
        True
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RankLostError):
            return cause
        text = str(cause).lower()
        of_torch = dist.is_available() and isinstance(cause, dist.DistError)
        if of_torch or (isinstance(cause, RuntimeError) and any(word in text for word in _BACKENDS)):
            if any(word in text for word in _GONE):
                return RankLostError("another rank exited first; its error is the cause")
            if any(word in text for word in _SILENT):
                return RankLostError(
                    "another rank did not answer within the timeout of the process group: it is stuck, its machine is "
                    "down, or one rank alone called what all must call, such as evaluate(). Add a StuckRankHook to "
                    "learn which rank is stuck"
                )
        cause = cause.__cause__
    return None


def write_error_file(error: BaseException) -> None:
    """Write an error to torchrun's error file; a no-op in a process not launched by torchrun.

    The file is the one that ``torch.distributed.elastic.multiprocessing.errors.record`` writes, but written at the
    moment of the error. An error caused by another rank is dated later, so that it is not taken as the cause. The first
    error of a run is kept, and removed when the process has caught it and begins another run.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    moment = int(time.time()) + (_LATER if isinstance(error, RankLostError) else 0)
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": stack, "timestamp": str(moment)}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    # Only the summary needs the file; the error itself is raised anyway.
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def _remove_error_file() -> None:
    path = os.environ.get(_ERROR_FILE)
    if path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def non_finite_error(engine: Engine, at: StepLocation | None = None, norm: Tensor | None = None) -> NonFiniteError:
    """Return the error of a step whose gradient is not finite and whose retries are used up."""
    at = engine.location() if at is None else at
    measured = float(engine.attempt.info.get("grad_norm", math.nan) if norm is None else norm)
    first = max(at.position - at.num_batches + 1, min(at.position, 1))
    where = f"batch {at.position}" if first == at.position else f"batches {first} to {at.position}"
    found = _non_finite_values(engine, first) if at.step == engine.progress.step else ""
    return NonFiniteError(
        f"the gradient of step {at.step} is not finite (norm {measured}) after {at.tries} "
        f"{'try' if at.tries == 1 else 'tries'}: {where} of epoch "
        f"{at.epoch + 1}. The weights are those of the last applied step ({engine.progress.applied_steps}). "
        f"{found or 'Inspect these batches'}, lower the learning rate, clip gradients, or set "
        "max_non_finite_grad_retries",
        step=at.step, norm=measured, epoch=at.epoch, batch_index=at.position, tries=at.tries,
    )  # fmt: skip


def _non_finite_values(engine: Engine, first: int) -> str:
    """Return a sentence about the values of the current micro-batches that are not finite; empty if all are."""
    group = engine.attempt.group
    ids = group.sample_ids or [None] * len(group.batches)
    for number, (batch, of_samples) in enumerate(zip(group.batches, ids, strict=False), first):
        found = []
        for name, tensor in non_finite_in(batch):
            wrong = (~tensor.isfinite()).reshape(len(tensor) if tensor.dim() else 1, -1)
            row = int(wrong.any(1).nonzero()[0])
            known = isinstance(of_samples, list) and len(of_samples) == len(wrong)
            where = f"sample {of_samples[row]}" if known else f"row {row}"
            found.append(f"{name or 'the tensor'} has {int(wrong.sum())} of {wrong.numel()}, first in {where}")
        if found:
            return f"Batch {number} has values that are not finite: {'; '.join(found[:3])}. Correct the data"
    return ""
