"""Base of the gradient exchanges between ranks.

Whatever happens in its forward and backward passes, every rank starts the same collectives in the same order, so a
micro-batch without a loss, or an unused parameter, never makes a rank wait forever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treadle import distributed
from treadle.task import StepOutput

_NOTHING = contextlib.nullcontext()


class GradientExchange:
    """Base gradient exchange, for models that need none: one process, or the user's own wrapper.

    Args:
        model: the model of the run.

    Attributes:
        equal: whether gradients, and so every number computed from them, are the same on all ranks after a step.
    """

    equal = False
    recordable = False  # whether a CUDA graph can hold the exchange

    def __init__(self, model: nn.Module):
        self.model = model

    def recording(self) -> AbstractContextManager[None]:
        """Exchange nothing between the hosts inside the block, in which a step is recorded or compared with one."""
        return _NOTHING

    def micro_batch(self, *, syncs: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch.

        Args:
            syncs: whether gradients are exchanged with this micro-batch; otherwise they only accumulate.
        """
        return _NOTHING if syncs else distributed.no_sync(self.model)

    def second_look(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of a micro-batch that is rerun to find an error.

        Args:
            last: whether it is the last of its step.
        """
        return self.micro_batch(syncs=False)

    def loss_of(self, output: StepOutput, scaled: Callable[[StepOutput], Tensor | None]) -> Tensor | None:
        """Return the loss to backpropagate; None if there is none and no rank waits for this one.

        Args:
            output: output of the micro-batch.
            scaled: returns its loss as weighted in the step, which may be collective.
        """
        return scaled(output)

    def close(self) -> None:
        """Remove every hook from the model; a later step adds them again."""


@torch.no_grad()
def share_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the buffers of rank 0, in one message per dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for some in by_kind.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in some])
        flat = flat.to(distributed.collective_device(flat.device))
        dist.broadcast(flat, group=group, group_src=0)
        for buffer, part in zip(some, torch.split(flat, [buffer.numel() for buffer in some]), strict=True):
            buffer.copy_(part.view_as(buffer))
