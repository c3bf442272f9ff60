"""Gradient checkpointing as one setting: activations of blocks are recomputed in the backward pass."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treadle.capture.compile import repeated_blocks
from treadle.distributed import unwrap
from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import checked

Checkpointing = bool | Sequence[str]


def check_checkpointing(setting: Any, *, name: str = "gradient_checkpointing") -> Checkpointing:
    """Return the setting.

    Args:
        setting: the user's setting.
        name: name of the argument, for the message.

    Raises:
        ConfigError: it is neither True nor False nor a list of names.

    Example:
        >>> check_checkpointing(["layers.*"])
        ['layers.*']
    """
    if isinstance(setting, bool):
        return setting
    if isinstance(setting, Sequence) and not isinstance(setting, str) and all(isinstance(one, str) for one in setting):
        return list(setting)
    raise ConfigError(
        "use True, False, or a list of names of modules, such as ['layers.*']", argument=name, value=setting
    )


@checked
def checkpoint_model(model: nn.Module, setting: Checkpointing = True) -> nn.Module:
    """Make a model recompute activations in the backward pass, in place; parameter names and results are unchanged.

    For a model with a method ``gradient_checkpointing_enable``, as in transformers, that method is used. Blocks of
    other models are wrapped with ``torch.utils.checkpoint``. Random numbers from torch's global generators and the
    block's buffers, such as running statistics, are the same in both passes and advance once. A block that draws from a
    private generator, or counts in Python, cannot be run twice with the same result: exclude it by name.

    Args:
        model: model, wrapped or not, before it is compiled, replicated or sharded.
        setting: True for the items of its ModuleLists, names of modules with ``*`` and ``?``, or False for none.

    Returns:
        The same model.

    Raises:
        ConfigError: no block is found, a name matches no module, blocks are nested, or the model's own method would
            update running statistics twice.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> checkpoint_model(model, ["0"])(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    if check_checkpointing(setting) is False:
        return model
    inner = unwrap(model)
    own = getattr(inner, "gradient_checkpointing_enable", None)
    if setting is True and callable(own):
        _enable_own(inner, own)
        return model
    blocks = _chosen(inner, setting)
    _refuse_nested(blocks)
    for block in blocks.values():
        if not isinstance(vars(block).get("forward"), CheckpointedForward):
            vars(block)["forward"] = CheckpointedForward(block)
    return model


def is_checkpointed(model: nn.Module) -> bool:
    """Return whether any part of a model uses gradient checkpointing, by this setting or the model's own.

    Example:
        >>> is_checkpointed(nn.Linear(1, 1))
        False
    """
    return any(
        isinstance(vars(part).get("forward"), CheckpointedForward)
        or getattr(part, "gradient_checkpointing", None) is True
        for part in model.modules()
    )


class CheckpointedForward:
    """Forward pass of a block that saves only its inputs and is rerun in the backward pass.

    It refers to the module itself, so that copies and pickles of the module call their own.

    Args:
        module: the block.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> vars(layer)["forward"] = CheckpointedForward(layer)
        >>> layer(torch.ones(1, 1)).shape
        torch.Size([1, 1])
    """

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, checkpointed if a backward pass may follow."""
        module = self.module
        run = functools.partial(type(module).forward, module)
        if not (module.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        buffers = list(module.buffers())
        if not buffers:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        before = [buffer.detach().clone() for buffer in buffers]
        contexts = contextlib.nullcontext(), _with_buffers(buffers, before)
        return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)


@contextlib.contextmanager
def _with_buffers(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Set buffers to the values of the first pass inside the block, and restore the current ones afterwards.

    They are written through ``.data``: a buffer may be saved for the backward pass, and torch must not count this
    write.
    """
    now = [buffer.detach().clone() for buffer in buffers]
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, now, strict=True):
            buffer.data.copy_(value)


def _enable_own(model: nn.Module, enable: Any) -> None:
    name = type(model).__name__
    if getattr(model, "supports_gradient_checkpointing", True) is False:
        raise ConfigError(
            f"{name} does not support it; give names of its blocks instead, such as ['layers.*']",
            argument="gradient_checkpointing",
            value=True,
        )
    moved = [part for part in model.modules() if getattr(part, "running_mean", None) is not None]
    if moved:
        raise ConfigError(
            f"{name} has its own method for it and layers with running statistics ({type(moved[0]).__name__}), "
            "which recomputing it would update twice a step; give names of its blocks instead, such as ['layers.*']",
            argument="gradient_checkpointing",
            value=True,
        )
    takes = inspect.signature(enable).parameters
    # With use_reentrant=False the step is exact even if a block's inputs need no gradient.
    how = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    enable(**(how if set(how) <= set(takes) else {}))


def _chosen(model: nn.Module, setting: Checkpointing) -> dict[str, nn.Module]:
    names = {name: module for name, module in model.named_modules() if name}
    if setting is True:
        blocks = {id(block) for block in repeated_blocks(model)}
        found = {name: module for name, module in names.items() if id(module) in blocks}
        if not found:
            raise ConfigError(
                f"{type(model).__name__} has no ModuleList whose items could be recomputed; give names of its parts, "
                f"such as {[next(iter(names), 'layers.*')]}",
                argument="gradient_checkpointing",
                value=True,
            )
        return found
    assert not isinstance(setting, bool)
    found = {}
    for pattern in setting:
        # 'layers.*' refers to the blocks, not the modules inside them.
        depth = pattern.count(".")
        fits = {
            name: module
            for name, module in names.items()
            if name.count(".") == depth and fnmatch.fnmatchcase(name, pattern)
        }
        if not fits:
            raise ConfigError(
                f"no module has the name {pattern!r}; {nearest(pattern, names)}", argument="gradient_checkpointing"
            )
        found.update(fits)
    return found


def _refuse_nested(blocks: dict[str, nn.Module]) -> None:
    for name in blocks:
        outer = next((other for other in blocks if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(
                f"{name!r} is inside {outer!r}, so its activations would be computed three times; name one of them",
                argument="gradient_checkpointing",
            )
