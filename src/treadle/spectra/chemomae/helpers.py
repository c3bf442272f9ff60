"""Functions of chemomae, of both lines, by their own names and with their own arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from treadle.engine.best import BestRule
from treadle.errors import ConfigError
from treadle.seed import RngState, set_seed
from treadle.spectra import preprocessing
from treadle.spectra.arrays import take
from treadle.spectra.clustering.elbow import curvature_elbow
from treadle.spectra.clustering.silhouette import silhouette_samples_cosine
from treadle.spectra.clustering.vmf import vmf_log_normalizer
from treadle.spectra.encoder import sine_positions
from treadle.spectra.originals import decays_0, own_rng

Rows = Tensor | NDArray[Any]

# -- the optimizer and the model ----------------------------------------------------------------------------------


def build_optimizer(
    model: nn.Module,
    *,
    lr: float = 1.5e-4,
    weight_decay: float = 0.05,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> AdamW:
    """Build AdamW with the two groups of chemomae, the first of which decays.

    The bias of an attention's input is in the first one, as there; `treadle.spectra.build_optimizer` decays no bias.

    Raises:
        ConfigError: no parameter requires a gradient.

    Example:
        >>> [len(group["params"]) for group in build_optimizer(nn.Linear(2, 1)).param_groups]
        [1, 1]
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    norms = {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for (name, parameter), decays in zip(named, decays_0([name for name, _ in named]), strict=True):
        spared = not decays or name == "bias" or any(name.startswith(norm) for norm in norms)
        (rest if spared else decayed).append(parameter)
    if not named:
        raise ConfigError("has no parameter that requires a gradient", argument="model")
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps)


def sinusoidal_positional_encoding(L: int, d_model: int, device: torch.device | str = "cpu") -> Tensor:
    """Return fixed sine and cosine positions, (1, L, d_model).

    Example:
        >>> sinusoidal_positional_encoding(8, 4, torch.device("cpu"))[0, 0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    return sine_positions(L, d_model).to(device).unsqueeze(0)


class EMACallback:
    """Average of the floating weights and buffers of a model: s = d·s + (1 - d)·w at each update.

    Args:
        model: its present weights are the first average.
        decay: d.

    Attributes:
        decay: d.
        shadow: the averages by name.

    Example:
        >>> model = nn.Linear(1, 1, bias=False); _ = nn.init.ones_(model.weight)
        >>> ema = EMACallback(model, decay=0.5)
        >>> _ = nn.init.constant_(model.weight, 3.0); ema.update(model); ema.apply_to(model); model.weight.item()
        2.0
    """

    def __init__(self, model: nn.Module, decay: float = 0.999):
        self.decay = float(decay)
        self.shadow: dict[str, Tensor] = {}
        self.register(model)

    def register(self, model: nn.Module) -> None:
        """Starts again from the present weights."""
        self.shadow = {name: value.detach().clone() for name, value in _floating(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the averages towards the present weights."""
        for name, value in _floating(model):
            self.shadow[name].lerp_(value, 1.0 - self.decay)

    def apply_to(self, model: nn.Module) -> None:
        """Copies the averages into a model, for good."""
        model.load_state_dict({**model.state_dict(), **self.shadow}, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """Returns decay and averages."""
        return {"decay": self.decay, "shadow": {name: value.clone() for name, value in self.shadow.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.decay = float(state.get("decay", self.decay))
        self.shadow = {name: value.detach().clone() for name, value in state.get("shadow", {}).items()}


class EarlyStopping:
    """Early stopping of chemomae 0.1, which counts from a share of all epochs on.

    `treadle.spectra.EarlyStopping` is called with values alone.

    Args:
        patience: epochs without improvement until :meth:`step` is True.
        min_delta: smallest improvement that counts.
        start_epoch_ratio: share of all epochs before which none is counted.

    Attributes:
        best: lowest value so far.
        best_epoch: its epoch; -1 before there is one.
        started: whether an epoch was counted.

    Example:
        >>> stop = EarlyStopping(patience=2, start_epoch_ratio=0.5); stop.setup(4)
        >>> [stop.step(epoch, 1.0) for epoch in (1, 2, 3)], stop.best_epoch
        ([False, False, True], 1)
    """

    def __init__(self, patience: int = 20, min_delta: float = 0.0, start_epoch_ratio: float = 0.5):
        if not 0 <= start_epoch_ratio <= 1:
            raise ConfigError("must lie in [0, 1]", argument="start_epoch_ratio", value=start_epoch_ratio)
        self._rule = BestRule("val_loss", "min", min_delta, patience)
        self.start_epoch_ratio = start_epoch_ratio
        self.started = False

    def setup(self, total_epochs: int) -> None:
        """Takes the number of all epochs."""
        self._rule.start_epoch = max(1, int(total_epochs * self.start_epoch_ratio))

    def step(self, epoch: int, val: float) -> bool:
        """Takes the value of a 1-based epoch; returns whether to stop."""
        improved = self._rule.update(epoch, val)
        self.started = self.started or (not improved and epoch >= self._rule.start_epoch)
        return self._rule.should_stop

    @property
    def best(self) -> float:
        """Lowest value so far."""
        return self._rule.best

    @property
    def best_epoch(self) -> int:
        """Epoch of the lowest value; -1 before there is one."""
        return -1 if self._rule.best_epoch is None else self._rule.best_epoch


def _floating(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in model.state_dict().items() if value.is_floating_point()]


# -- random numbers -----------------------------------------------------------------------------------------------


class RNGState(TypedDict):
    """Random state of python, NumPy and torch, as chemomae writes it."""

    format_version: int
    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch_cpu: Tensor
    torch_cuda: list[Tensor]


def set_global_seed(seed: int = 42, *, fix_cudnn: bool = True) -> None:
    """Seed python, NumPy and torch, and set ``PYTHONHASHSEED`` for processes started later.

    Args:
        seed: a whole number.
        fix_cudnn: choose deterministic cuDNN kernels.

    Example:
        >>> set_global_seed(7, fix_cudnn=False); a = torch.rand(1); set_global_seed(7, fix_cudnn=False)
        >>> torch.equal(a, torch.rand(1))
        True
    """
    set_seed(int(seed))
    os.environ["PYTHONHASHSEED"] = str(int(seed))
    if fix_cudnn:
        enable_deterministic()


def enable_deterministic(enable: bool = True) -> None:
    """Set the cuDNN flags ``deterministic`` and not ``benchmark``, or their opposites.

    Example:
        >>> before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        >>> enable_deterministic(False); torch.backends.cudnn.benchmark
        True
        >>> torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
    """
    torch.backends.cudnn.deterministic = bool(enable)
    torch.backends.cudnn.benchmark = not enable


def capture_rng_state() -> RNGState:
    """Return the random state of python, NumPy, torch and the CUDA devices in use.

    Example:
        >>> state = capture_rng_state(); a = torch.rand(1); restore_rng_state(state); torch.equal(a, torch.rand(1))
        True
    """
    now = RngState.capture()
    name, keys, position, has_gauss, cached = now.numpy
    return {
        "format_version": 1,
        "python": now.python,
        "numpy": {
            "algorithm": name, "keys": torch.from_numpy(keys.astype(np.int64)), "position": int(position),
            "has_gauss": int(has_gauss), "cached_gaussian": float(cached),
        },
        "torch_cpu": now.torch.clone(),
        "torch_cuda": [state.cpu().clone() for state in now.accelerators.get("cuda", [])],
    }  # fmt: skip


def restore_rng_state(state: Any, *, restore_cuda: bool = True) -> None:
    """Restore what :func:`capture_rng_state` returned; nothing is changed where it does not fit.

    Args:
        state: of this library or of chemomae.
        restore_cuda: False leaves the CUDA devices alone.

    Raises:
        ConfigError: it is another kind of state, or of another number of CUDA devices.
    """
    if not isinstance(state, Mapping) or state.get("format_version") != 1:
        raise ConfigError("must be what capture_rng_state returned, of format_version 1", argument="state")
    cuda = list(state.get("torch_cuda") or []) if restore_cuda else []
    if cuda and len(cuda) != torch.cuda.device_count():
        raise ConfigError(
            f"has {len(cuda)} CUDA devices and this machine {torch.cuda.device_count()}; pass restore_cuda=False",
            argument="state",
        )
    before = RngState.capture()
    try:
        RngState.from_plain(own_rng({**state, "torch_cuda": cuda})).restore()
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        before.restore()
        raise ConfigError(f"is incomplete or damaged ({error})", argument="state") from error


# -- preprocessing and clustering ---------------------------------------------------------------------------------


def cosine_fps_downsample(
    X: Rows,
    *,
    ratio: float = 0.1,
    seed: int | None = None,
    init_index: int | None = None,
    return_numpy: bool = True,
    return_indices: bool = False,
    eps: float = 1e-12,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Choose rows far apart in angle, as `treadle.spectra.cosine_fps_downsample` does.

    Also of no rows, of which it returns none, and for a ratio of 0, which takes one row.

    Args:
        X: (N, C).
        ratio: share of the rows, at least 0; one row at least.
        seed: of the first row.
        init_index: the first row; nothing is drawn then.
        return_numpy: False returns tensors.
        return_indices: return ``(rows, indices)``.
        eps: smallest norm.
        device: where it is computed; None means that of a tensor, else the CPU.
        generator: draws the first row, on the device of the computation.

    Raises:
        ConfigError: a value is out of its range, or both ``seed`` and ``generator`` are given.
    """
    if seed is not None and generator is not None:
        raise ConfigError("seed and generator exclude each other; give one", argument="generator")
    if ratio < 0:
        raise ConfigError("must be >= 0", argument="ratio", value=ratio)
    if X.ndim != 2:
        raise ValueError(f"X has shape {tuple(X.shape)} but must be (N, C)")
    count = len(X)
    home = X.device if isinstance(X, Tensor) else torch.device("cpu")
    where = home if device is None else torch.device(device)
    if not count:
        rows: Any = np.asarray(X) if return_numpy else torch.as_tensor(X)
        none: Any = np.empty(0, dtype=np.int64) if return_numpy else torch.empty(0, dtype=torch.int64)
        return (rows, none) if return_indices else rows
    if init_index is None:
        draws = torch.Generator(device=where).manual_seed(seed) if seed is not None else generator
        init_index = int(torch.randint(count, (1,), device=where, generator=draws))
    _, indices = preprocessing.cosine_fps_downsample(
        torch.as_tensor(X).to(where), ratio=min(ratio, 1.0) or 0.5 / count, init_index=init_index, return_numpy=False,
        return_indices=True, eps=eps,
    )  # fmt: skip
    chosen, numbers = _rows_at(X, indices.to(home), where, as_numpy=return_numpy)
    return (chosen, numbers) if return_indices else chosen


def _rows_at(X: Rows, indices: Tensor, where: torch.device, *, as_numpy: bool) -> tuple[Any, Any]:
    """Returns rows and their indices: of a tensor beside it, of an array on the device that was asked for."""
    rows = take(X, indices, as_numpy=as_numpy)
    if as_numpy:
        return rows, indices.cpu().numpy()
    if isinstance(X, Tensor):
        return rows, indices
    return torch.as_tensor(rows).to(where), indices.to(where)


def silhouette_samples_cosine_gpu(
    X: Rows,
    labels: Rows,
    *,
    device: torch.device | str | None = None,
    chunk: int | None = 1_000_000,
    dtype: torch.dtype = torch.float32,
    return_numpy: bool = True,
    eps: float = 1e-12,
) -> Any:
    """Return the silhouettes of `treadle.spectra.silhouette_samples_cosine`; a zero row is at distance 1.

    Args:
        X: (N, D).
        labels: (N,) integers.
        device: None means CUDA, then MPS, then CPU.
        chunk: most rows on the device at once.
        dtype: of the result as a tensor; the arithmetic is float64 (float32 on MPS).
        return_numpy: a float32 array; False returns a tensor on the device.
        eps: norms up to it count as zero.

    Raises:
        ValueError: one cluster only, as many clusters as rows, or labels of another length.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> silhouette_samples_cosine_gpu(rows, torch.tensor([0, 0, 1, 1]), device="cpu").round(2).tolist()
        [0.9900000095367432, 0.9900000095367432, 0.9900000095367432, 0.9900000095367432]
    """
    rows = torch.as_tensor(X).to(dtype).double()
    zero = (torch.linalg.vector_norm(rows, dim=1) <= eps).nonzero().flatten()
    if len(zero):  # each gets another direction, at a right angle to all others
        own = rows.new_zeros(len(rows), len(zero))
        own[zero, torch.arange(len(zero), device=rows.device)] = 1.0
        rows = torch.cat([rows.index_fill(0, zero, 0.0), own], dim=1)
    values = silhouette_samples_cosine(rows, labels, chunk=chunk, device=device)
    if return_numpy:
        return values.float().cpu().numpy()
    return values.to(dtype) if device is None else values.to(torch.device(device), dtype)


def silhouette_score_cosine_gpu(X: Rows, labels: Rows, *, return_numpy: bool = True, **settings: Any) -> Any:
    """Return the mean of :func:`silhouette_samples_cosine_gpu`: a float, or a tensor with ``return_numpy=False``."""
    values = silhouette_samples_cosine_gpu(X, labels, **{**settings, "return_numpy": False})
    mean = values.float().mean()
    return float(mean) if return_numpy else mean


def vmf_logC(d: int, kappa: float | Tensor) -> Tensor:
    """Return the logarithm of the normaliser, as `treadle.spectra.vmf_log_normalizer` does."""
    return vmf_log_normalizer(d, kappa)


def l2_normalize_rows(X: Tensor, eps: float = 1e-6) -> Tensor:
    """Return rows of norm 1."""
    return F.normalize(X, dim=1, eps=eps)


def cosine_similarity(A: Tensor, B: Tensor) -> Tensor:
    """Return the cosines (N, M) between rows of norm 1."""
    return A @ B.T


def cosine_dissimilarity(A: Tensor, B: Tensor) -> Tensor:
    """Return 1 - cosine (N, M) between rows of norm 1."""
    return 1.0 - A @ B.T


def find_elbow_curvature(
    k_list: Sequence[int],
    inertia_list: Sequence[float],
    smooth: bool = True,
    window_length: int = 5,
    polyorder: int = 2,
) -> tuple[int, int, NDArray[np.float64]]:
    """Find the elbow of a curve by its curvature, as chemomae 0.1 does.

    Returns:
        (K, index, curvature of every point).

    Raises:
        ConfigError: fewer than three points, or an argument out of its range.
        ImportError: SciPy is not installed.
    """
    index, curvature = curvature_elbow(
        k_list, inertia_list, smooth=smooth, window_length=window_length, polyorder=polyorder
    )
    return int(k_list[index]), index, curvature


def plot_elbow_ckm(k_list: Sequence[int], inertias: Sequence[float], optimal_k: int, elbow_idx: int) -> None:
    """Draw inertias over K into a new pyplot figure, with the elbow marked."""
    _plot_elbow(k_list, inertias, optimal_k, elbow_idx, ("Number of Clusters (k)", "Mean Cosine Inertia", "inertia"))


def plot_elbow_vmf(
    k_list: Sequence[int], scores: Sequence[float], optimal_k: int, elbow_idx: int, criterion: str = "bic"
) -> None:
    """Draw BIC (``"bic"``) or mean negative log-likelihoods (``"nll"``) over K into a new pyplot figure."""
    name = {"bic": "BIC (lower is better)", "nll": "Mean NLL (lower is better)"}.get(criterion.lower(), "Score")
    _plot_elbow(k_list, scores, optimal_k, elbow_idx, ("Number of Components (k)", name, "score"))


def _plot_elbow(
    k_list: Sequence[int], values: Sequence[float], best: int, index: int, names: tuple[str, str, str]
) -> None:
    import matplotlib.pyplot as plt

    x_name, y_name, short = names
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(k_list, values, "o-", label=y_name.split(" (")[0])
    axes.scatter(k_list[index], values[index], s=120, label=f"Elbow: k={best}, {short}={values[index]:.4f}")
    axes.axvline(best, linestyle="--", linewidth=1.5, alpha=0.7)
    axes.set(xlabel=x_name, ylabel=y_name)
    axes.legend(loc="best")
    figure.tight_layout()
