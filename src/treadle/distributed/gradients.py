"""Choice of the gradient exchange of a model, and the exchange of sharded models with FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from treadle import distributed
from treadle.distributed.exchange import GradientExchange, share_buffers
from treadle.distributed.ranks import is_dtensor
from treadle.distributed.replicas import ReplicaExchange
from treadle.errors import ConfigError
from treadle.nested import map_nested_tensor
from treadle.task import StepOutput


def gradient_exchange(model: nn.Module) -> GradientExchange:
    """Return the gradient exchange of a model, according to its wrappers and parameters.

    Example:
        >>> type(gradient_exchange(nn.Linear(1, 1))).__name__
        'GradientExchange'
    """
    replicas = distributed.replicated(model)
    if replicas is not None:
        return ReplicaExchange(replicas)
    return ShardExchange(model) if distributed.is_sharded(model) else GradientExchange(model)


class ShardExchange(GradientExchange):
    """Exchange for models sharded with ``fully_shard``, whose gradients torch reduces in the backward pass.

    The backward pass is collective, so a rank whose micro-batch has no loss backpropagates zeros through the model's
    outputs. Persistent buffers, such as the running mean of a batch norm, are those of rank 0 after a step, as in
    replicas.

    Args:
        model: model with sharded parameters.

    Raises:
        ConfigError: on several ranks, a trainable parameter is not sharded.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.equal = True
        self._parts = distributed.sharded_parts(model)
        self._outputs: list[Tensor] = []
        self._inner = distributed.unwrap(model)
        self._saved_buffers = self._inner.state_dict().keys() & {name for name, _ in self._inner.named_buffers()}
        plain = [name for name, value in model.named_parameters() if value.requires_grad and not is_dtensor(value)]
        if plain and distributed.world_size() > 1:
            raise ConfigError(
                f"parameter {plain[0]!r} is trained and not sharded, so its gradient would not be all-reduced; "
                "call fully_shard on the whole model too, as treadle.parallelize does, or freeze it",
                argument="model",
            )

    @contextlib.contextmanager
    def micro_batch(self, *, syncs: bool) -> Iterator[None]:
        """Reduce gradients if ``syncs``; otherwise accumulate them unsharded on each rank."""
        for part in self._parts:
            part.set_requires_gradient_sync(syncs, recurse=False)
        handle = self.model.register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()
            self._outputs = []
        if syncs and self._saved_buffers and distributed.world_size() > 1:
            named = self._inner.named_buffers()
            share_buffers([buffer for name, buffer in named if name in self._saved_buffers])

    def second_look(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap it as in a step: unreduced gradients would be added to those of the next step."""
        return self.micro_batch(syncs=last)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        def keep(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                self._outputs.append(tensor)
            return tensor

        map_nested_tensor(keep, output)

    def loss_of(self, output: StepOutput, scaled: Callable[[StepOutput], Tensor | None]) -> Tensor | None:
        """Return the loss, or zero times the model's outputs.

        Raises:
            ConfigError: there is no loss and the model was not run.
        """
        if output.loss is None and not self._outputs:
            raise ConfigError(
                "None, and the model was not run on this micro-batch. The forward and backward passes of a "
                "sharded model exchange weights, so every rank must run it on every micro-batch; call the model first "
                "and return loss None afterwards",
                argument="loss",
            )
        loss = scaled(output)
        if loss is not None:
            return loss
        kept = self._outputs
        if output.loss is not None and not kept:  # a loss of weight 0, from a task that runs parts of the model
            kept = [output.loss]
        return torch.stack([(each.sum() * 0).float() for each in kept]).sum()
