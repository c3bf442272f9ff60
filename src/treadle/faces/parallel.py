"""Data parallelism as one setting: replicas (DistributedDataParallel) or a sharded model (FSDP2)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle import distributed
from treadle.capture.compile import compile_in_place, repeated_blocks, warn_of_sharded
from treadle.errors import ConfigError, refuse_unknown
from treadle.errors.arguments import check_least, checked

ParallelName = Literal["ddp", "fsdp"]
Block = type[nn.Module] | nn.Module | str
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@checked
@dataclass(frozen=True)
class ParallelConfig:
    """Configuration of data parallelism, as trainers take it by ``parallel=``.

    Attributes:
        kind: ``"ddp"``: every rank has the whole model. ``"fsdp"``: every rank has a shard of each parameter.
        blocks: modules to compile, and to gather one at a time when sharded: modules, their classes or their class
            names. None takes the items of the model's ModuleLists.
        param_dtype: ``"fsdp"``: dtype of gathered weights and of compute: a torch dtype, ``"bf16"``, ``"fp16"`` or
            ``"fp32"``; None keeps the parameters' dtype.
        reduce_dtype: ``"fsdp"``: dtype of gradient reduction; None takes ``param_dtype``.
        reshard_after_forward: ``"fsdp"``: free a block's gathered weights after its forward pass and gather them again
            for its backward pass: less memory, more communication.
        replicas: ``"fsdp"``: number of groups of ranks that each hold a whole sharded model (HSDP); None makes one
            group.
        compile_blocks: compile each block in place; names in files stay the same.

    Raises:
        ConfigError: an unknown kind or dtype, or a setting of ``"fsdp"`` for ``"ddp"``.

    Example:
        >>> ParallelConfig("fsdp", param_dtype="bf16").kind
        'fsdp'
    """

    kind: ParallelName
    blocks: Sequence[Block] | None = None
    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    reshard_after_forward: bool = True
    replicas: int | None = None
    compile_blocks: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            _dtype(name, getattr(self, name))
        check_least(1, replicas=self.replicas)
        of_both = ("kind", "blocks", "compile_blocks")
        given = [field for field in fields(self) if getattr(self, field.name) != field.default]
        for field in given if self.kind == "ddp" else ():
            if field.name not in of_both:
                value = getattr(self, field.name)
                raise ConfigError(
                    "applies only to kind 'fsdp'; leave it out for 'ddp'", argument=field.name, value=value
                )


def as_parallel(value: ParallelConfig | Mapping[str, Any] | str | None) -> ParallelConfig | None:
    """Convert a ``parallel=`` setting to a ParallelConfig; None stays None.

    Raises:
        ConfigError: an unknown name, key or kind.

    Example:
        >>> as_parallel("ddp").kind, as_parallel({"kind": "fsdp", "replicas": 2}).replicas, as_parallel(None)
        ('ddp', 2, None)
    """
    if value is None or isinstance(value, ParallelConfig):
        return value
    if isinstance(value, str):
        if value not in ("ddp", "fsdp"):
            raise ConfigError("must be 'ddp', 'fsdp' or None", argument="parallel", value=value)
        return ParallelConfig(value)  # type: ignore[arg-type]  # one of the two
    if isinstance(value, Mapping):
        refuse_unknown("parallel", value, [field.name for field in fields(ParallelConfig)])
        if "kind" not in value:
            raise ConfigError("the key 'kind' is missing; it is 'ddp' or 'fsdp'", argument="parallel")
        return ParallelConfig(**value)
    raise ConfigError("must be 'ddp', 'fsdp', a ParallelConfig or None", argument="parallel", value=value)


@checked
def parallelize(
    model: nn.Module,
    kind: ParallelName | ParallelConfig,
    *,
    optimizer: Optimizer | None = None,
    **settings: Any,
) -> nn.Module:
    """Replicate or shard a model over the ranks of the process group and return it.

    All ranks start from the weights and buffers of rank 0; tied weights stay tied. ``"ddp"`` returns a
    DistributedDataParallel for an engine, which all-reduces the gradients itself: a backward pass anywhere else raises.
    ``"fsdp"`` shards the model in place and returns it.

    Args:
        model: model on its device, the same on every rank except for its values.
        kind: ``"ddp"``, ``"fsdp"`` or a whole :class:`ParallelConfig`.
        optimizer: optimizer already built from the model's parameters; continues with the sharded ones, in the same
            groups.
        settings: fields of :class:`ParallelConfig`, if ``kind`` is a string.

    Raises:
        ConfigError: there is no process group, the model is already parallelized or differs between ranks, a parameter
            cannot be sharded, the optimizer already has state, or the ranks cannot be grouped as requested.

    Example:
        >>> # torchrun --nproc_per_node=2 train.py, with torch.distributed.init_process_group() in it
        >>> # model = parallelize(model, "fsdp", param_dtype="bf16")
        >>> # optimizer = torch.optim.AdamW(model.parameters())
    """
    config = kind if isinstance(kind, ParallelConfig) else ParallelConfig(kind, **settings)
    if not distributed.is_distributed():
        raise ConfigError(
            "no process group was initialized, so there is only one rank; launch with torchrun and call "
            "torch.distributed.init_process_group(), or leave parallel out",
            argument="parallel",
            value=config.kind,
        )
    if distributed.replicated(model) is not None or distributed.is_sharded(model):
        raise ConfigError("the model is already parallelized; do it only once", argument="parallel", value=config.kind)
    blocks = _blocks(model, config.blocks)
    if config.compile_blocks:
        for block in blocks:
            compile_in_place(block)
    if config.kind == "ddp":
        return _replicas(model)
    _shard(model, blocks, config, optimizer)
    warn_of_sharded(model)
    return model


def spread(
    model: nn.Module, parallel: ParallelConfig | Mapping[str, Any] | str | None, optimizer: Optimizer
) -> nn.Module:
    """Return the model parallelized by a ``parallel=`` setting; None leaves it unchanged.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> spread(model, None, torch.optim.SGD(model.parameters())) is model
        True
    """
    config = as_parallel(parallel)
    return model if config is None else parallelize(model, config, optimizer=optimizer)


def _replicas(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    """Wrap a model in DDP without the buckets of torch's reducer, which an engine's step does not use.

    They would be as large as the gradients. The wrapper allocates them for the parameters that are trainable at that
    moment, so all but the smallest parameter are frozen meanwhile.
    """
    _check_alike(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen_meanwhile = sorted(trained, key=Tensor.numel)[1:]
    for parameter in frozen_meanwhile:
        parameter.requires_grad_(False)
    try:
        replicas = nn.parallel.DistributedDataParallel(model)
    finally:
        for parameter in frozen_meanwhile:
            parameter.requires_grad_(True)
    replicas.register_comm_hook(None, lambda state, bucket: _refuse_own_loop())  # it refuses string annotations
    return replicas


def _check_alike(model: nn.Module) -> None:
    """Raise on every rank unless parameters have the same names, shapes and dtypes on all ranks."""
    # DistributedDataParallel only checks parameters that have buckets.
    described = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.named_parameters()]
    mark = zlib.crc32(repr(described).encode())
    device = distributed.collective_device(next(model.parameters()).device)
    extremes = torch.tensor([mark, -mark], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = extremes.tolist()
    if largest != -smallest:
        raise ConfigError(
            f"='ddp': the models of the ranks differ; this one has {len(described)} parameters, from {described[0]} "
            f"to {described[-1]}. Build the same model on every rank",
            argument="parallel",
        )


def _refuse_own_loop() -> torch.futures.Future[Tensor]:
    """Raise when torch's reducer would all-reduce gradients, which an engine never lets it do."""
    raise ConfigError(
        "='ddp': a backward pass ran outside an engine's step, so its gradients would not be all-reduced; for your "
        "own loop, wrap the model in DistributedDataParallel yourself, or use the model's no_sync() where none is "
        "wanted",
        argument="parallel",
    )


def _shard(model: nn.Module, blocks: Sequence[nn.Module], config: ParallelConfig, optimizer: Optimizer | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ConfigError(
            f"='fsdp': parameter {scalars[0]!r} is a scalar, which cannot be sharded; give it the shape (1,)",
            argument="parallel",
        )
    places = _places(model, optimizer)
    _start_equal(model)
    mesh = _mesh(next(model.parameters()).device.type, config.replicas)
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype("param_dtype", config.param_dtype), reduce_dtype=_dtype("reduce_dtype", config.reduce_dtype)
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if optimizer is not None:
        sharded = dict(model.named_parameters())
        for group, names in zip(optimizer.param_groups, places, strict=True):
            group["params"] = [sharded[name] for name in names]


def _places(model: nn.Module, optimizer: Optimizer | None) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    if optimizer is None:
        return []
    if optimizer.state:
        raise ConfigError(
            f"{type(optimizer).__name__} already has state, which belongs to the unsharded parameters; create it "
            "after the model is sharded, or load a checkpoint afterwards",
            argument="optimizer",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = []
    for number, group in enumerate(optimizer.param_groups):
        missing = [parameter for parameter in group["params"] if id(parameter) not in names]
        if missing:
            raise ConfigError(
                f"group {number} holds {len(missing)} parameters that are not the model's; build it over "
                "model.parameters()",
                argument="optimizer",
            )
        places.append([names[id(parameter)] for parameter in group["params"]])
    return places


@torch.no_grad()
def _start_equal(model: nn.Module) -> None:
    """Broadcast the weights and buffers of rank 0, as DistributedDataParallel does.

    Weights become contiguous, as FSDP2 requires.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    for tensor in [*model.parameters(), *model.buffers()]:
        shared = tensor.detach().to(distributed.collective_device(tensor.device))
        dist.broadcast(shared, src=0)
        tensor.copy_(shared)


def _mesh(device_type: str, replicas: int | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    size = distributed.world_size()
    if replicas is None:
        return init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
    if size % replicas:
        raise ConfigError(
            f"{size} ranks cannot be divided into groups of equal size", argument="replicas", value=replicas
        )
    return init_device_mesh(device_type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def _blocks(model: nn.Module, asked: Sequence[Block] | None) -> list[nn.Module]:
    """Return the blocks, nested ones first.

    Raises:
        ConfigError: a block is not in the model, or the model has no module of a class.
    """
    if asked is None:
        return repeated_blocks(model)
    found: dict[nn.Module, None] = {}
    for block in asked:
        kind: Any = block if isinstance(block, type) else ()
        some = [part for part in model.modules() if block in (part, type(part).__name__) or isinstance(part, kind)]
        if not some or some == [model]:
            name = block_name(block)
            raise ConfigError(f"the model has no {name} inside; its parts are {_kinds(model)}", argument="blocks")
        found.update(dict.fromkeys(part for part in some if part is not model))
    return [part for part in reversed(list(model.modules())) if part in found]


def block_name(block: Block) -> str:
    """Return the name of a block's class.

    Example:
        >>> block_name("Linear"), block_name(nn.Linear), block_name(nn.Linear(1, 1))
        ('Linear', 'Linear', 'Linear')
    """
    if isinstance(block, str):
        return block
    return block.__name__ if isinstance(block, type) else type(block).__name__


def _kinds(model: nn.Module) -> str:
    return ", ".join(sorted({type(part).__name__ for part in model.modules() if part is not model})) or "none"


def _dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    if value not in _DTYPES:
        raise ConfigError("must be a torch dtype, 'bf16', 'fp16', 'fp32' or None", argument=name, value=value)
    return _DTYPES[value]
