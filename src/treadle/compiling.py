"""torch.compile as one setting: nothing, the whole model, or each of its repeated blocks.

Modules are compiled in place, so that the names of weights stay as they are and nothing wraps the model. Compilation
happens at the first call of each shape and mode. A layer that occurs twelve times is compiled once: torch finds that
its code and its shapes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import nn

from treadle.distributed import unwrap
from treadle.errors import ConfigError

Compile = bool | Literal["blocks"]


def check_compile(setting: Any, *, name: str = "compile") -> Compile:
    """Returns the setting.

    Args:
        setting: what the user gave.
        name: of the argument, for the message.

    Raises:
        ConfigError: it is another value than True, False or ``"blocks"``.

    Example:
        >>> check_compile("blocks")
        'blocks'
    """
    if setting is True or setting is False or setting == "blocks":
        return setting  # type: ignore[no-any-return]
    raise ConfigError(f"{name}={setting!r}: use True (the whole model), 'blocks' (each repeated block) or False")


def compile_model(
    model: nn.Module,
    setting: Compile = "blocks",
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
) -> nn.Module:
    """Compiles a model in place and returns it; names in files stay the same.

    Call it before the model is spread over ranks, or after: inside DistributedDataParallel and FSDP2 it is the model
    or its blocks that are compiled, and what the wrapper does stays outside.

    Args:
        model: wrapped or not.
        setting: True compiles the whole model; ``"blocks"`` the items of its ModuleLists, or the whole model where it
            has none; False nothing.
        backend: as ``torch.compile`` takes it.
        mode: as ``torch.compile`` takes it. ``"reduce-overhead"`` makes CUDA graphs of its own, so do not capture too.
        dynamic: as ``torch.compile`` takes it; None lets torch find out which sizes change.

    Raises:
        ConfigError: another setting, or blocks were asked for and some are compiled already.

    Example:
        >>> model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])[0])
        >>> list(compile_model(model, True, backend="eager").state_dict())
        ['0.weight', '0.bias']
    """
    if check_compile(setting) is False:
        return model
    inner = unwrap(model)
    parts = (repeated_blocks(inner) or [inner]) if setting == "blocks" else [inner]
    done = [part for part in parts if is_compiled(part)]
    if done or is_compiled(model):
        name = type(done[0]).__name__ if done else "model"
        raise ConfigError(f"compile={setting!r}: the {name} is compiled already; compile it once")
    for part in parts:
        part.compile(backend=backend, mode=mode, dynamic=dynamic)
    return model


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the items of a model's outermost ModuleLists that have parameters, in order.

    An item that is a container itself and is never called, such as a ModuleDict, stands for what it holds.

    Example:
        >>> repeated_blocks(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])}))
        [Linear(in_features=1, out_features=1, bias=True)]
    """
    return [block for block in _items(model) if any(True for _ in block.parameters())]


def _items(module: nn.Module, *, listed: bool = False) -> Iterator[nn.Module]:
    for child in module.children():
        container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if listed and not container:
            yield child
        else:
            yield from _items(child, listed=listed or isinstance(child, nn.ModuleList))


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module itself is compiled, in place or by a wrapper; those inside it are not looked at.

    Example:
        >>> is_compiled(nn.Linear(1, 1)), is_compiled(compile_model(nn.Linear(1, 1), True, backend="eager"))
        (False, True)
    """
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def makes_cuda_graphs(model: nn.Module) -> bool:
    """Returns whether some compiled part of a model makes CUDA graphs by itself, as ``mode="reduce-overhead"`` does.

    Example:
        >>> makes_cuda_graphs(nn.Linear(1, 1))
        False
    """
    for module in model.modules():
        if not is_compiled(module):
            continue
        compiled: Any = module if hasattr(module, "_orig_mod") else module._compiled_call_impl
        told: Callable[[], Any] | None = getattr(compiled, "get_compiler_config", None)
        if told is not None and (told() or {}).get("triton.cudagraphs"):
            return True
    return False
