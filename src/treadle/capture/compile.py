"""torch.compile as one setting: nothing, the whole model, or each of its repeated blocks.

Modules are compiled in place, so that parameter names are unchanged and nothing wraps the model. Compilation happens at
the first call of each shape and mode. A layer that occurs twelve times is compiled once: torch detects that its code
and shapes are the same.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn

from treadle.distributed import is_sharded, unwrap
from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_log = logging.getLogger("treadle.compiling")
Compile = bool | Literal["blocks"]


def check_compile(setting: Any, *, name: str = "compile") -> Compile:
    """Return the setting.

    Args:
        setting: the user's setting.
        name: name of the argument, for the message.

    Raises:
        ConfigError: it is not True, False or ``"blocks"``.

    Example:
        >>> check_compile("blocks")
        'blocks'
    """
    if setting is True or setting is False or setting == "blocks":
        return setting  # type: ignore[no-any-return]
    raise ConfigError(
        "use True (the whole model), 'blocks' (each repeated block) or False", argument=name, value=setting
    )


@checked
def compile_model(
    model: nn.Module,
    setting: Compile = "blocks",
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
) -> nn.Module:
    """Compile a model in place and return it; parameter names are unchanged.

    It can be called before or after the model is replicated or sharded: inside DistributedDataParallel and FSDP2 only
    the model or its blocks are compiled, not the wrapper.

    Args:
        model: model, wrapped or not.
        setting: True compiles the whole model; ``"blocks"`` the items of its ModuleLists, or the whole model if it has
            none; False nothing.
        backend: argument of ``torch.compile``.
        mode: argument of ``torch.compile``. ``"reduce-overhead"`` uses CUDA graphs itself, so do not capture as well.
        dynamic: argument of ``torch.compile``; None lets torch detect which sizes change.

    Raises:
        ConfigError: the setting is unknown, or blocks are requested and some are already compiled.

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
        raise ConfigError(f"the {name} is already compiled; compile it once", argument="compile", value=setting)
    for part in parts:
        compile_in_place(part, backend=backend, mode=mode, dynamic=dynamic)
    warn_of_sharded(inner)
    if backend == "inductor" and torch.cuda.is_available() and not _chooses_without_timing():
        _log.warning(
            "compile: torch chooses GPU kernels by timing them and keeps its choice in a cache; a resume with another "
            "cache may round differently. Keep the folder TORCHINDUCTOR_CACHE_DIR, or set "
            "TORCHINDUCTOR_DETERMINISTIC=1 (from torch 2.10 on)"
        )
    return model


def _chooses_without_timing() -> bool:
    from torch._inductor import config

    return bool(getattr(config, "deterministic", False))


def warn_of_sharded(model: nn.Module) -> None:
    """Warn about compiled layers of torch's own classes in a sharded model, whose hooks prevent compilation.

    Example:
        >>> warn_of_sharded(nn.Linear(1, 1))
    """
    if not is_sharded(model):
        return
    names = {type(part).__name__ for part in model.modules() if is_compiled(part) and _is_of_torch(part)}
    if names:
        _log.warning(
            "compile: %s: layers of torch's own classes are not compiled where FSDP2 "
            "shards them; wrap them in a module of your own, or use parallel='ddp'", ", ".join(sorted(names)),
        )  # fmt: skip


def compile_in_place(module: nn.Module, **how: Any) -> None:
    """Compile a module in place, like its ``compile`` method, including torch's own classes.

    torch does not trace the code of its own packages unless other code calls it, so the ``compile`` of a ``Sequential``
    or a ``TransformerEncoderLayer`` silently compiles nothing.

    Args:
        module: module to change in place.
        how: arguments of ``torch.compile``, by name.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> compile_in_place(layer, backend="eager"); is_compiled(layer)
        True
    """
    if _is_of_torch(module):
        module._compiled_call_impl = torch.compile(_caller_of(module), **how)
    else:
        module.compile(**how)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).forward.__module__.startswith("torch.")


def _caller_of(module: nn.Module) -> Callable[..., Any]:
    """Return a function outside torch that calls a module, hooks included."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # torch limits how often a code object is compiled, so similar modules share one.
    call.__code__ = _code_for(repr(module), call.__code__)
    return call


@functools.lru_cache(maxsize=256)
def _code_for(look: str, code: CodeType) -> CodeType:
    return code.replace(co_name=f"call_{look.partition('(')[0]}")


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the items of a model's outermost ModuleLists that have parameters, in order.

    An item that is itself a container and never called, such as a ModuleDict, is replaced by its items.

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
    """Return whether a module itself is compiled, in place or by a wrapper; submodules are not checked.

    Example:
        >>> is_compiled(nn.Linear(1, 1)), is_compiled(compile_model(nn.Linear(1, 1), True, backend="eager"))
        (False, True)
    """
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def makes_cuda_graphs(model: nn.Module) -> bool:
    """Return whether any compiled part of a model uses CUDA graphs itself, as with ``mode="reduce-overhead"``.

    Example:
        >>> makes_cuda_graphs(nn.Linear(1, 1))
        False
    """
    for module in model.modules():
        if not is_compiled(module):
            continue
        compiled: Any = module if hasattr(module, "_orig_mod") else module._compiled_call_impl
        config_of: Callable[[], Any] | None = getattr(compiled, "get_compiler_config", None)
        if config_of is not None and (config_of() or {}).get("triton.cudagraphs"):
            return True
    return False


def uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Run a compiled model eagerly inside the block.

    Compiled code calls no hooks, and another mode of torch would trigger recompilation.

    Example:
        >>> with uncompiled(nn.Linear(2, 1)):
        ...     pass
    """
    if not any(is_compiled(module) for module in model.modules()):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
