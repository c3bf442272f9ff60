"""Shared helpers: comparison of states to the bit, small models, data whose order is visible."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

import treadle
from treadle.engine.hook import BaseHook
from treadle.task import StepOutput

_LIBRARY = Path(treadle.__file__).parent
RUN_FILES = {
    "checkpoints",
    "sessions.jsonl",
    "settings.json",
    "steps.jsonl",
}  # that every face writes into a run folder by default


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """List every path at which two state trees differ, tensors by torch.equal, NaN equal to NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = (one.to_dense() if one.is_sparse else one for one in (a, b))
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        if not same and a.dtype == b.dtype and a.shape == b.shape and a.is_floating_point():
            same = torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{path}.{key} only on one side" for key in a.keys() ^ b.keys()]
        for key in a.keys() & b.keys():
            found += differences(a[key], b[key], f"{path}.{key}")
        return found
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} items"]
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in differences(x, y, f"{path}[{i}]")]
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return []
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} and {b!r}"]


def through_a_file(tree: Any) -> Any:
    """Save and load a tree as a checkpoint file does, with weights_only."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Augmented(Dataset):
    """Data set with random augmentation from three generators, which records reads outside its attributes."""

    notes: ClassVar[weakref.WeakKeyDictionary[Any, list[int]]] = weakref.WeakKeyDictionary()  # in no checkpoint

    def __init__(self, size: int = 20, width: int = 4):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, width, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        self.notes[self] = []

    @property
    def reads(self) -> list[int]:
        return self.notes.setdefault(self, [])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        self.reads.append(int(index))
        noise = 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.x[index] + noise, self.y[index]


class MeanSquare:
    """Task with the mean squared error as loss."""

    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        loss = nn.functional.mse_loss(model(x).float(), y)
        return StepOutput(loss, {"size": len(x)}, weight=float(len(x)), num_samples=len(x))


def small_model(width: int = 4) -> nn.Module:
    """Return a model with dropout and batch norm, so that random numbers and buffers matter."""
    return nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


class Snapshots(BaseHook):
    """Hook that keeps the whole state after every step, as a checkpoint would hold it."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def on_after_step(self, trainer) -> None:
        trainer.request_write(lambda: self.states.__setitem__(trainer.step, through_a_file(trainer.state_dict())))


class Scalar(nn.Module):
    """Model with one weight; with the loss g·w its gradient is g, so that results can be computed by hand."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))

    def forward(self, g: Any) -> torch.Tensor:
        return self.weight * g


class Slopes:
    """Task that turns a batch g, or (g, weight), into the loss g·w; None gives no loss.

    ``fail_at`` raises at the n-th micro-batch (1-based).
    """

    def __init__(self, fail_at: dict[int, BaseException] | None = None):
        self.fail_at = fail_at or {}
        self._calls = [0]  # in a list, since a checkpoint would carry a number and move the fault

    @property
    def calls(self) -> int:
        return self._calls[0]

    def step(self, model, batch, totals=None, generator=None):
        self._calls[0] += 1
        if self.calls in self.fail_at:
            raise self.fail_at[self.calls]
        g, weight = batch if isinstance(batch, tuple) else (batch, None)
        return StepOutput(None if g is None else model(g), {"g": float("nan") if g is None else g}, weight=weight)


def scalar_engine(start: float = 0.0, lr: float = 1.0, task: Any = None, **kwargs: Any) -> Any:
    """Return an engine over one weight with plain SGD: each step moves the weight by -lr·gradient."""
    from treadle.engine import Engine

    model = Scalar(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Engine(model, optimizer, task or Slopes(), **{"device": "cpu", **kwargs})


READS = (
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
)  # fmt: skip


class CountReads(TorchDispatchMode):
    """Counter of operations that make the host wait for a tensor's value."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.reads.append(func)
        return func(*args, **(kwargs or {}))


def library_frames() -> list[str]:
    """Return the names of the library's functions on the stack, innermost first."""
    frame, names = sys._getframe(1), []
    while frame is not None:
        if _LIBRARY in Path(frame.f_code.co_filename).parents:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


class ReadsPerStep(BaseHook):
    """Counter of each step's reads of tensor values, including those on the CPU."""

    def __init__(self):
        self.per_step = []

    def on_before_step(self, trainer):
        self.mode = CountReads()
        self.mode.__enter__()

    def on_after_step(self, trainer):
        self.mode.__exit__(None, None, None)
        self.per_step.append(len(self.mode.reads))


# Modules that `import treadle` must not load, and that a missing extra may lack.
OPTIONAL_PACKAGES = frozenset({
    "PIL", "astropy", "h5py", "hydra", "joblib", "matplotlib", "mlflow", "omegaconf", "pandas", "peft", "plotly",
    "pyarrow", "rdkit", "rich", "safetensors", "scipy", "sklearn", "tensorboard", "tokenizers", "torch_geometric",
    "torchdata", "trackio", "transformers", "typer", "wandb", "yaml",
})  # fmt: skip


class _Copies(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        from_host = any(tensor.device.type == "cpu" and tensor.dim() > 0 for tensor in tensors)
        to_far = any(tensor.is_meta for tensor in tensors) or _is_far(kwargs.get("device"))
        goes_on = kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and len(args) > 2 and args[2])
        assert not (from_host and to_far and not goes_on), f"{func} copies to the device and waits"
        return func(*args, **kwargs)


class _NewTensors(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made_of_numbers = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        waits = made_of_numbers and _is_far((kwargs or {}).get("device"))
        waits |= func is torch.Tensor.new_tensor and args[0].is_meta
        assert not waits, f"{func.__name__} copies numbers to the device and waits"
        return func(*args, **(kwargs or {}))


def _is_far(device):
    return device is not None and torch.device(device).type == "meta"


def accept_meta(monkeypatch):
    """Let models be on ``"meta"``, where a user's model is refused."""
    for module in ("treadle.engine.preflight", "treadle.faces.build"):
        monkeypatch.setattr(f"{module}.refuse_meta", lambda model: None)


@contextlib.contextmanager
def no_waits_for_meta():
    """Let ``"meta"`` stand in for a GPU: inside the block, anything that would wait for a GPU is an error.

    Tensors there have no values, so torch itself refuses to read one and operations whose output size depends on
    values. Copies that a GPU would wait for, those that are not ``non_blocking``, fail here.
    """
    autocast, is_enabled = torch.autocast, torch.is_autocast_enabled

    def autocast_of(device_type, *args, **kwargs):
        return contextlib.nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    with (
        # torch has no autocast for it.
        mock.patch.object(torch, "autocast", autocast_of),
        mock.patch.object(torch, "is_autocast_enabled", lambda *kind: kind != ("meta",) and is_enabled(*kind)),
        _Copies(),
        _NewTensors(),
    ):
        yield
