"""Averaged models, based on ``torch.optim.swa_utils.AveragedModel``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from treadle.device import get_device
from treadle.distributed import is_sharded, local, reshard, unwrap
from treadle.distributed.state_names import load_model_state, model_state
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within

_HALF = (torch.float16, torch.bfloat16)


def check_average(decay: float, update_interval: int) -> None:
    """Raise ConfigError for a decay or an interval outside its range."""
    check_within("[0, 1]", decay=decay)
    check_least(1, update_interval=update_interval)


class Ema(AveragedModel):
    """Exponential moving average of a model's weights: s = d·s + (1 - d)·w.

    The shadow starts as a copy of the weights, so there is no copy at the first update. Half-precision weights are
    averaged in float32: in bfloat16 a step of 1e-4 of the difference would be rounded away. A buffer whose shape
    changes, such as a table that grows with the inputs, is copied again.

    For a sharded model every rank averages its shards. ``module`` then only holds the named parameters and buffers and
    cannot be called: use :meth:`applied_to`.

    Args:
        model: the model to average, wrapped or not.
        decay: d in [0, 1].
        update_interval: applied steps between updates, >= 1.
        use_buffers: average floating and complex buffers; False copies them. Integer buffers are always copied.
        device: device of the shadow; None puts it on the model's device.

    Raises:
        ConfigError: a value is outside its range, or a device is given for the average of a sharded model.

    Example:
        >>> model = nn.Linear(1, 1, bias=False); _ = nn.init.ones_(model.weight)
        >>> ema = Ema(model, decay=0.9)
        >>> _ = nn.init.constant_(model.weight, 2.0); ema.update(model, applied_steps=1)
        >>> round(ema.module.weight.item(), 4)
        1.1
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        *,
        update_interval: int = 1,
        use_buffers: bool = False,
        device: torch.device | str | int | None = None,
    ):
        check_average(decay, update_interval)
        source = unwrap(model)
        sharded = is_sharded(source)
        if sharded:
            if device is not None:
                raise ConfigError(
                    "the average of a sharded model is kept with its shards; use None", argument="device", value=device
                )
            reshard(source)
            source = _bare(source, set(source.state_dict()))
        with _without_graphs(source):
            super().__init__(source, device=get_device(device) if device is not None else None)
        self.decay = decay
        self.update_interval = update_interval
        self.use_buffers = use_buffers
        self.num_updates = 0
        self._sharded = sharded
        self.n_averaged.fill_(1)  # 0 would make torch replace the shadow by the first weights it sees
        _widen_halves(self.module)
        self.module.requires_grad_(False)

    @property
    def recordable(self) -> bool:
        """Whether every applied step updates the average in the same way, so that one captured graph fits all."""
        return self.update_interval == 1

    def update(self, model: nn.Module, *, applied_steps: int) -> None:
        """Update the shadow if ``applied_steps`` is due, without reading the device."""
        if applied_steps % self.update_interval == 0:
            self.move(model)
            self.count_update()

    def count_update(self, count: int = 1) -> None:
        """Count an update of the shadow, including those made by a graph; a negative count takes some back."""
        self.__dict__["num_updates"] += count  # called in each step, and setting attributes of a module is slow

    @torch.no_grad()
    def move(self, model: nn.Module, weight: float | None = None, *, unless: Tensor | None = None) -> None:
        """Move the shadow towards the model's weights by ``weight``, 1 - decay by default.

        It does not count the update, so that it can be captured.

        Args:
            model: the model.
            weight: None is 1 - decay.
            unless: 0-d flag on the device; where it is set, nothing moves.
        """
        source = unwrap(model)
        shadows: list[Tensor] = []
        lives: list[Tensor] = []
        pairs = self._pairs(source)
        for shadow, live, is_buffer in pairs if unless is None else _staying(pairs, unless.bool()):
            if (shadow.is_floating_point() or shadow.is_complex()) and (not is_buffer or self.use_buffers):
                alike = live.dtype == shadow.dtype and live.device == shadow.device
                shadows.append(shadow)
                lives.append(live if alike else live.to(device=shadow.device, dtype=shadow.dtype))
            else:
                shadow.copy_(live)
        if shadows:
            torch._foreach_lerp_(shadows, lives, 1.0 - self.decay if weight is None else weight)

    def shares_devices_with(self, model: nn.Module) -> bool:
        """Return whether each averaged weight is on the same device as the model's weight."""
        return all(shadow.device == live.device for shadow, live, _ in self._pairs(unwrap(model)))

    def _pairs(self, source: nn.Module) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Yield shadow, live weight, and whether it is a buffer; local shards of sharded tensors."""
        if self._sharded:
            reshard(source)
        own, theirs = _tensors(self.module), _tensors(source)
        if [buffer.numel() for buffer in own[1]] != [buffer.numel() for buffer in theirs[1]]:  # faster than shapes
            _follow_buffers(self.module, source)
            own = _tensors(self.module)
        for number, (shadows, lives) in enumerate(zip(own, theirs, strict=True)):
            for shadow, live in zip(shadows, lives, strict=True):
                yield (local(shadow), local(live), number == 1) if self._sharded else (shadow, live, number == 1)

    @torch.no_grad()
    def restart_from(self, model: nn.Module) -> None:
        """Reset the shadow to a copy of the model's current weights, with no update counted."""
        for shadow, live, _ in self._pairs(unwrap(model)):
            shadow.copy_(live)
        self.num_updates = 0

    @contextlib.contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Use the averaged weights in ``model`` inside the block, and restore the raw ones to the bit afterwards."""
        target = unwrap(model)
        before = [live for _, live, _ in self._pairs(target)]
        raw = [live.detach().clone() for live in before]
        try:
            with torch.no_grad():
                for shadow, live, _ in self._pairs(target):
                    live.copy_(shadow)
            yield
        finally:
            with torch.no_grad():
                now = [live for _, live, _ in self._pairs(target)]
                for live, saved in zip(now if len(now) == len(raw) else before, raw, strict=True):
                    if live.shape == saved.shape:  # else a buffer that grew, which its module now relies on
                        live.copy_(saved)

    def export(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the averaged weights with the model's dtypes and names, as evaluated."""
        live = model_state(model)
        return {
            name: value.detach().to(live[name].dtype) if isinstance(value, Tensor) else value
            for name, value in model_state(self.module).items()
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the checkpoint entry: decay, update_interval, num_updates, shadow."""
        return {
            "decay": self.decay,
            "update_interval": self.update_interval,
            "num_updates": self.num_updates,
            "shadow": model_state(self.module),
        }

    def restore(self, entry: Mapping[str, Any], *, kept: Collection[str] = ()) -> None:
        """Restore the result of :meth:`snapshot` in place; weights in ``kept`` may be missing and are then unchanged.

        Raises:
            CheckpointError: the average belongs to another model.
        """
        load_model_state(self.module, entry["shadow"], what="average", kept=kept)
        self.num_updates = int(entry["num_updates"])


def _staying(pairs: Iterator[tuple[Tensor, Tensor, bool]], stays: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the pairs with the shadow itself as live weight where a flag is set."""
    for shadow, live, is_buffer in pairs:
        yield shadow, torch.where(stays, shadow, live.to(device=shadow.device, dtype=shadow.dtype)), is_buffer


@contextlib.contextmanager
def _without_graphs(model: nn.Module) -> Iterator[None]:
    """Replace non-leaf tensors, which torch refuses to copy, by detached ones: weights of the old ``weight_norm``.

    Raises:
        ConfigError: the model cannot be copied for another reason.
    """
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]
    for module, name, value in held:
        vars(module)[name] = value.detach().clone()
    try:
        yield
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"the {type(model).__name__} cannot be copied, so its average cannot be kept: {error}. Define __deepcopy__ "
            "on the part that fails, or train without an average"
        ) from error
    finally:
        for module, name, value in held:
            vars(module)[name] = value


def _bare(module: nn.Module, persistent: Collection[str]) -> nn.Module:
    """Return a tree of empty modules with the parameters and buffers of a module that cannot be copied.

    Args:
        module: module on which ``fully_shard`` was called.
        persistent: names in its state dict.
    """
    made: dict[int, nn.Module] = {}

    def build(inner: nn.Module, prefix: str) -> nn.Module:
        if id(inner) in made:
            return made[id(inner)]
        bare = made[id(inner)] = nn.Module()
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            bare.register_parameter(name, parameter)
        for name, buffer in inner.named_buffers(recurse=False, remove_duplicate=False):
            bare.register_buffer(name, buffer, persistent=prefix + name in persistent)
        for name, child in inner._modules.items():
            bare.add_module(name, None if child is None else build(child, f"{prefix}{name}."))
        return bare

    return build(module, "")


def _tensors(root: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters and the buffers of a module, each once, in one pass, since it is called in each step."""
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
        for buffer in module._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
        if children := module._modules:
            waiting.extend(reversed(children.values()))
    return list(parameters.values()), list(buffers.values())


def _follow_buffers(module: nn.Module, source: nn.Module) -> None:
    """Mirror buffers that were added, removed or reshaped in the model, such as growing tables, in the average."""
    for inner, live in zip(module.modules(), source.modules(), strict=True):
        for name, buffer in live._buffers.items():
            own = inner._buffers.get(name)
            if own is None or buffer is None or own.shape != buffer.shape:
                copied = None if buffer is None else buffer.detach().clone()
                if copied is not None and own is not None:
                    copied = copied.to(own.device)
                inner.register_buffer(name, copied, persistent=name not in live._non_persistent_buffers_set)
    _widen_halves(module)


def _widen_halves(module: nn.Module) -> None:
    widened: dict[int, nn.Parameter] = {}  # by identity, so that tied parameters stay tied
    buffers: dict[int, Tensor] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.dtype in _HALF:
                wide = widened.setdefault(id(parameter), nn.Parameter(parameter.detach().float(), requires_grad=False))
                setattr(child, name, wide)
        for name, buffer in child.named_buffers(recurse=False):
            if buffer.dtype in _HALF:
                setattr(child, name, buffers.setdefault(id(buffer), buffer.float()))
