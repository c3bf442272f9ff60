"""Schema of checkpoints: keys and allowed types.

A checkpoint is a dict with these keys, in this order. It holds tensors, numbers, strings, bools, None, lists and
dicts only, so ``torch.load(path, weights_only=True)`` reads it with no allow-list.
"""

from __future__ import annotations

import itertools
import math
import platform
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from treadle.checkpoint.buffers import HostBuffers
from treadle.checkpoint.files import FORMAT_NAME
from treadle.checkpoint.plain_values import OPAQUE, decode, encode
from treadle.device.handover import run_off_turn
from treadle.device.host_transfer import HostTransfer
from treadle.distributed import is_dtensor
from treadle.distributed.shards import LocalShard, gathered, local_block, without_pending_sums
from treadle.errors import CheckpointError
from treadle.nested import elements

FORMAT_VERSION = 1

KEYS: dict[str, str] = {
    "format": "{name, version, face, scored}: what wrote the file, and which weights were validated",
    "model": "raw weights, names without module. or _orig_mod. prefixes; with adapters, without the frozen base",
    "base": "{name: fingerprint} of the frozen weights that model leaves out, or None when it holds all",
    "optimizer": "the optimizer's state dict with param_names in each group",
    "scheduler": "the scheduler's state dict, or None",
    "scaler": "the gradient scaler's state dict, or None",
    "ema": "{name: {decay, update_interval, num_updates, shadow}}, or None",
    "epoch": "epochs completed",
    "global_step": "optimizer steps attempted",
    "progress": "{applied_steps, micro_steps, epoch_means, ...}",
    "best_metric": "best value of the selection metric, or None",
    "best_epoch": "its 1-based epoch, or None",
    "selection": "state of the best rule, or None",
    "metrics": "last evaluation, or None",
    "history": "list of epoch records",
    "rng": "one entry per rank: python, numpy, torch, accelerators",
    "data": "epoch, micro-batches consumed, RNG at the epoch's opening, generator and loader states",
    "hooks": "{state key: state}",
    "config": "the settings of the face as plain values",
    "versions": "{treadle, python, torch, numpy}",
}

OPTIONAL_KEYS: dict[str, str] = {
    "objects": "{path: state} of the user's own objects on the trainer and the task, where there are any",
    "modules": "what no state dict of the model holds and has changed: trainable flags, modes, buffers, attributes",
    "built": "values with which the model and own objects were built and that have not changed",
    "callbacks_due": "True in the state of an epoch before its callbacks are called",
}
"""Keys that a checkpoint has only where there is something to keep."""


VALUE = "treadle.value"
"""The key, alone in a dict, under which a value is encoded that a file could not hold."""
Encoding = Literal["none", "odd", "exact"]
OF_USERS: dict[str, Encoding] = {
    "model": "odd", "optimizer": "odd", "scheduler": "odd", "ema": "odd", "objects": "exact", "data": "exact",
    "hooks": "exact",
}  # fmt: skip
"""Keys of the state of user objects, which may hold encoded values."""
_PLAIN = (bool, int, float, str)
_SCALARS = frozenset({*_PLAIN, type(None)})
_ON = "cuda"  # device type whose small tensors are copied together
_SMALL = 1 << 18  # largest size of such a tensor in bytes,
_AT_ONCE = 1024  # and their largest number: 256 MiB in total
_PARALLEL = 1 << 15  # elements from which torch wakes its threads, which takes longer than one thread


def versions() -> dict[str, str]:
    """Return the versions that are written into every checkpoint."""
    return {
        "treadle": sys.modules["treadle"].__version__,  # cached: looking it up takes as long as a small state
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
    }


def to_plain(
    tree: Any,
    path: str = "",
    *,
    copies: dict[Any, Any] | None = None,
    buffers: HostBuffers | None = None,
    parts: bool = False,
    encoding: Encoding = "none",
) -> Any:
    """Return a copy of a state tree that is safe to save later: tensors cloned to the CPU, tuples turned into lists.

    Tensors that share memory (tied weights) share it in the copy too. Sharded tensors are gathered one by one, which
    all ranks must take part in; rank 0 gets the copies, the others meta tensors.

    Args:
        tree: nesting of dicts, lists and tuples.
        path: path of the tree, for error messages.
        copies: clones made so far, by what identifies the tensor; see also :class:`DeviceCopies`.
        buffers: memory for the clones; None allocates new memory.
        parts: copy this rank's :class:`treadle.distributed.shards.LocalShard` of sharded tensors instead.
        encoding: ``"odd"`` encodes values that a file cannot hold, such as a deque or a NumPy array, for
            :func:`from_plain`; ``"exact"`` also encodes tuples and ordered dicts, to restore their types.

    Raises:
        CheckpointError: a value cannot be loaded with ``weights_only=True``; the message names its path.

    Example:
        >>> to_plain({"betas": (0.9, 0.95), "n": np.int64(3)})
        {'betas': [0.9, 0.95], 'n': 3}
    """
    copies = {} if copies is None else copies
    if (
        tree is None or type(tree) in _PLAIN or isinstance(tree, torch.dtype)
    ):  # subclasses, such as a string Enum, would be pickled by class
        return tree
    if isinstance(tree, Tensor):
        if (copied := copies.get(id(tree))) is not None:
            return copied
        return _clone_part(tree, copies, buffers, parts) if is_dtensor(tree) else _clone(tree, path, copies, buffers)
    below: dict[str, Any] = {"copies": copies, "buffers": buffers, "parts": parts, "encoding": encoding}
    if isinstance(tree, np.generic) and encoding != "exact" and type(tree.item()) in _PLAIN:
        return tree.item()
    if isinstance(tree, Mapping):
        odd = [key for key in tree if type(key) not in (str, int)]
        is_ordered = type(tree) is OrderedDict and not hasattr(tree, "_metadata")  # which a module's state dict has
        is_kept = encoding == "exact" and (is_ordered or type(tree) in (defaultdict, Counter))
        if (is_kept or (odd and encoding != "none")) and (encoded := _encode(tree)) is not OPAQUE:
            return {VALUE: encoded}
        if odd:
            raise _not_plain(f"{path}[{odd[0]!r}]", odd[0], "a key must be a str or an int")
        return {key: to_plain(value, f"{path}.{key}" if path else str(key), **below) for key, value in tree.items()}
    is_tuple = isinstance(tree, tuple) and (type(tree) is tuple or hasattr(tree, "_fields"))
    if encoding == "exact" and is_tuple and (encoded := _encode(tree)) is not OPAQUE:
        return {VALUE: encoded}
    if type(tree) is list or is_tuple:
        return [to_plain(value, f"{path}[{index}]", **below) for index, value in enumerate(tree)]
    if encoding != "none" and (encoded := _encode(tree)) is not OPAQUE:
        return {VALUE: encoded}
    raise _not_plain(path, tree, "checkpoints hold tensors, numbers, strings, bools, None, lists and dicts only")


def _encode(value: Any) -> Any:
    return encode(value, deep=True, largest=sys.maxsize, alone=True)


def from_plain(tree: Any) -> Any:
    """Decode the values that :func:`to_plain` encoded in a tree.

    Example:
        >>> from_plain(to_plain({"at": (1, 2)}, encoding="exact"))
        {'at': (1, 2)}
    """
    if isinstance(tree, Mapping):
        if is_encoded(tree):
            return decode(tree[VALUE])
        return {key: from_plain(value) for key, value in tree.items()}
    return [from_plain(value) for value in tree] if type(tree) is list else tree


def is_encoded(value: Any) -> bool:
    """Return whether a value in a checkpoint was encoded by :func:`to_plain`.

    Example:
        >>> is_encoded(to_plain(range(2), encoding="odd")), is_encoded({})
        (True, False)
    """
    return isinstance(value, Mapping) and len(value) == 1 and VALUE in value


def _clone_part(tensor: Any, copies: dict[Any, Any], buffers: HostBuffers | None, parts: bool) -> Tensor | LocalShard:
    """Copy a sharded tensor: this rank's part, or the whole on rank 0."""
    tensor = tensor.detach()
    local = tensor.to_local()
    # All ranks must decide alike, or some would gather alone; tensors share memory on all ranks or on none.
    identity = ("part", local.untyped_storage()._cdata, local.storage_offset(), tensor.shape, tensor.dtype)
    if identity not in copies:
        summed = without_pending_sums(tensor)
        local = local if summed is tensor else summed.to_local()
        source = local if parts else gathered(summed)
        if source.device.type != "meta":
            source = source.to("cpu", copy=True) if buffers is None else buffers.copy(source)
        copies[identity] = LocalShard(source, local_block(summed)[0], tuple(tensor.shape)) if parts else source
    copied: Tensor | LocalShard = copies[identity]
    return copied


def _clone(tensor: Tensor, path: str, copies: dict[Any, Any], buffers: HostBuffers | None) -> Tensor:
    tensor = tensor.detach()
    is_plain = type(tensor) is Tensor
    if tensor.is_meta or (not is_plain and hasattr(tensor, "__tensor_flatten__")):
        raise _not_plain(path, tensor, "it has no memory that could be saved")
    if not is_plain:
        tensor = tensor.as_subclass(Tensor)
    try:
        identity = _identity(tensor)
    except NotImplementedError:  # sparse tensors have no storage
        return tensor.cpu().clone()
    if identity not in copies:
        copies[identity] = tensor.to("cpu", copy=True) if buffers is None else buffers.copy(tensor)
    copied: Tensor = copies[identity]
    return copied


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return the identity of a tensor's data: its memory and layout."""
    memory = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return (*memory, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


class DeviceCopies:
    """Host copies of the CUDA tensors in state trees, for ``copies`` of :func:`to_plain`.

    Small tensors of one dtype are concatenated on the device and copied in one transfer: copied one by one, hundreds of
    them would each wait for the device. Other runs of the process continue during all transfers.

    Args:
        trees: nestings of dicts, lists and tuples by name; tensors that share memory within one share it in the copies.

    Example:
        >>> DeviceCopies({"model": {"weight": torch.ones(2)}}).result()
        {'model': {}}
    """

    def __init__(self, trees: Mapping[str, Any]):
        self._sources: dict[str, dict[int, tuple[str, int]]] = {}  # of which tensor the copy is taken, by id
        self._large: dict[tuple[str, int], Tensor] = {}
        groups: dict[Any, dict[tuple[str, int], Tensor]] = defaultdict(dict)
        for name, tree in trees.items():
            first: dict[Any, tuple[str, int]] = {}
            sources = self._sources[name] = {}
            for tensor in _tensors_on_device(tree):
                memory = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
                source = sources[id(tensor)] = first.setdefault(memory, (name, id(tensor)))
                if tensor.is_contiguous() and tensor.nbytes <= _SMALL:
                    groups[tensor.device, tensor.dtype][source] = tensor.detach()
                else:
                    self._large[source] = tensor.detach()
        self._sent: list[tuple[dict[tuple[str, int], Tensor], HostTransfer]] = []
        for group in groups.values():
            for start in range(0, len(group), _AT_ONCE):
                some = dict(itertools.islice(group.items(), start, start + _AT_ONCE))
                joined: Tensor = torch._utils._flatten_dense_tensors(list(some.values()))  # type: ignore[no-untyped-call]
                self._sent.append((some, HostTransfer(joined)))

    def result(self, *, apart: bool = True) -> dict[str, dict[int, Tensor]]:
        """Wait for the copies; return them by tree and id of the tensor.

        Args:
            apart: whether each is in separate memory, and not in a part of a common one.
        """
        copies: dict[tuple[str, int], Tensor] = {}
        if self._large:
            copies = run_off_turn(lambda: {key: one.to("cpu", copy=True) for key, one in self._large.items()})
        for some, transfer in self._sent:
            parts = torch._utils._unflatten_dense_tensors(  # type: ignore[no-untyped-call]
                transfer.result(), list(some.values())
            )
            copies.update(zip(some, [part.clone() for part in parts] if apart else parts, strict=True))
        return {name: {tensor: copies[source] for tensor, source in sources.items()}
                for name, sources in self._sources.items()}  # fmt: skip


def _tensors_on_device(tree: Any) -> Iterator[Tensor]:
    """Yield the plain CUDA tensors of a tree."""
    left = [tree]
    while left:
        value = left.pop()
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind is Tensor or kind is torch.nn.Parameter:
            if value.device.type == _ON and value.layout is torch.strided and not _is_marked(value):
                yield value
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)


def _is_marked(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are not those in its memory."""
    return tensor.is_conj() or tensor.is_neg() or tensor.is_quantized


def _not_plain(path: str, value: Any, rule: str) -> CheckpointError:
    return CheckpointError(
        f"state at {path!r} is a {type(value).__module__}.{type(value).__qualname__}: {rule}. "
        "Convert it in state_dict(), for example Path to str, ndarray to a tensor, Enum to its value"
    )


def check_format(tree: Any, source: str) -> None:
    """Raise CheckpointError if this version cannot read the tree as a checkpoint.

    Args:
        tree: the loaded tree.
        source: name of the file, for the message.
    """
    if not isinstance(tree, Mapping) or not tree:
        raise CheckpointError(f"{source}: holds a {type(tree).__name__}, not a checkpoint dict")
    described = tree.get("format")
    if not isinstance(described, Mapping) or described.get("name") != FORMAT_NAME:
        return  # a file with the keys of a library before treadle; the loader reports what starts fresh
    if int(described.get("version", 0)) > FORMAT_VERSION:
        raise CheckpointError(
            f"{source}: checkpoint format {described['version']} is newer than this treadle reads "
            f"({FORMAT_VERSION}); update treadle"
        )


def non_finite_names(tree: Mapping[str, Any]) -> list[str]:
    """Return the names of non-finite model and EMA tensors in a checkpoint or an export."""
    if not isinstance(tree.get("model"), Mapping):
        return [name for name, value in tree.items() if not is_finite(value)]
    groups: list[tuple[str, Any]] = [("model", tree["model"])]
    for name, entry in (tree.get("ema") or {}).items():
        groups.append((f"ema.{name}", entry.get("shadow") if isinstance(entry, Mapping) else None))
    bad = []
    for prefix, weights in groups:
        if isinstance(weights, Mapping):
            bad += [f"{prefix}.{name}" for name, value in weights.items() if not is_finite(value)]
    return bad


def sizes_of(tree: Any) -> list[int]:
    """Return the sizes in bytes of the tensors of a state.

    Example:
        >>> sizes_of({"a": torch.zeros(2), "b": [torch.zeros(1), 3]})
        [8, 4]
    """
    if isinstance(tree, Tensor):
        return [tree.numel() * tree.element_size()]
    if not isinstance(tree, (Mapping, list)):
        return []
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [size for value in values if type(value) not in _SCALARS for size in sizes_of(value)]


def is_finite(value: Any) -> bool:
    """Return whether a value in a checkpoint tree is finite; other types count as finite.

    Example:
        >>> is_finite(torch.tensor([1.0, math.nan])), is_finite("nan")
        (False, True)
    """
    if isinstance(value, Tensor):
        return _all_finite(value.detach())
    return not isinstance(value, float) or math.isfinite(value)


def _all_finite(value: Tensor) -> bool:
    """Check the extremes only, which are NaN if any element is: a tenth of the time of ``isfinite``, without memory."""
    value = elements(value)
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if not value.is_floating_point() or value.numel() == 0:
        return True
    if value.numel() >= _PARALLEL and value.dtype in (torch.float32, torch.float64) and value.device.type == "cpu":
        numbers = value.numpy()
        with np.errstate(invalid="ignore"):
            return math.isfinite(numbers.min()) and math.isfinite(numbers.max())
    low, high = torch.aminmax(value.float() if value.element_size() == 1 else value)
    return math.isfinite(low) and math.isfinite(high)
