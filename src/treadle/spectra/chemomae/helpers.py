"""Optimizer, average and early stop of chemomae."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from treadle.distributed import unwrap
from treadle.engine.best import BestRule
from treadle.errors import ConfigError
from treadle.errors.arguments import check_within, checked
from treadle.spectra.encoder import sine_positions
from treadle.spectra.model import ChemoMAE
from treadle.spectra.originals import decays_0


@checked
def build_optimizer(
    model: nn.Module,
    *,
    lr: float = 1.5e-4,
    weight_decay: float = 0.05,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> AdamW:
    """Build AdamW with chemomae's two groups, with weight decay on the first.

    As in chemomae, the attention input bias is in the first group; `treadle.spectra.build_optimizer` decays no bias.

    Raises:
        ConfigError: no parameter requires a gradient.

    Example:
        >>> [len(group["params"]) for group in build_optimizer(nn.Linear(2, 1)).param_groups]
        [1, 1]
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    channels = isinstance(unwrap(model), ChemoMAE)
    norms = {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for (name, parameter), decays in zip(named, decays_0([name for name, _ in named]), strict=True):
        spared = not decays or name == "bias" or any(name.startswith(norm) for norm in norms)
        spared = spared and not (channels and name.endswith(".in_proj.bias"))  # in_proj_bias in chemomae 0.1
        (rest if spared else decayed).append(parameter)
    if not named:
        raise ConfigError("has no parameter that requires a gradient", argument="model")
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps)


def sinusoidal_positional_encoding(L: int, d_model: int, device: torch.device | str = "cpu") -> Tensor:
    """Return fixed sine/cosine positional encodings, (1, L, d_model).

    Example:
        >>> sinusoidal_positional_encoding(8, 4, torch.device("cpu"))[0, 0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    return sine_positions(L, d_model).to(device).unsqueeze(0)


class EMACallback:
    """Exponential moving average of the floating weights and buffers of a model: s = d·s + (1 - d)·w at each update.

    Args:
        model: its current weights initialise the average.
        decay: d.

    Attributes:
        decay: d.
        shadow: averages by name.

    Example:
        >>> model = nn.Linear(1, 1, bias=False); _ = nn.init.ones_(model.weight)
        >>> ema = EMACallback(model, decay=0.5)
        >>> _ = nn.init.constant_(model.weight, 3.0); ema.update(model); ema.apply_to(model); model.weight.item()
        2.0
    """

    @checked
    def __init__(self, model: nn.Module, decay: float = 0.999):
        check_within("[0, 1]", decay=decay)
        self.decay = float(decay)
        self.shadow: dict[str, Tensor] = {}
        self.register(model)

    def register(self, model: nn.Module) -> None:
        """Reset the averages to the current weights."""
        self.shadow = {name: value.detach().clone() for name, value in _floating(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the averages with the current weights."""
        for name, value in _floating(model):
            self.shadow[name].lerp_(value, 1.0 - self.decay)

    def apply_to(self, model: nn.Module) -> None:
        """Copy the averages into a model permanently."""
        model.load_state_dict({**model.state_dict(), **self.shadow}, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the decay and the averages."""
        return {"decay": self.decay, "shadow": {name: value.clone() for name, value in self.shadow.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.decay = float(state.get("decay", self.decay))
        self.shadow = {name: value.detach().clone() for name, value in state.get("shadow", {}).items()}


class EarlyStopping:
    """Early stopping of chemomae 0.1, active from a given fraction of all epochs.

    `treadle.spectra.EarlyStopping` is called with values only.

    Args:
        patience: epochs without improvement until :meth:`step` is True.
        min_delta: minimum improvement that counts.
        start_epoch_ratio: fraction of all epochs before which none counts.

    Attributes:
        best: lowest value so far.
        best_epoch: epoch of the lowest value; -1 before there is one.
        started: whether any epoch has counted yet.

    Example:
        >>> stop = EarlyStopping(patience=2, start_epoch_ratio=0.5); stop.setup(4)
        >>> [stop.step(epoch, 1.0) for epoch in (1, 2, 3)], stop.best_epoch
        ([False, False, True], 1)
    """

    @checked
    def __init__(self, patience: int = 20, min_delta: float = 0.0, start_epoch_ratio: float = 0.5):
        check_within("[0, 1]", start_epoch_ratio=start_epoch_ratio)
        self._rule = BestRule("val_loss", "min", min_delta, patience)
        self.start_epoch_ratio = start_epoch_ratio
        self.started = False

    def setup(self, total_epochs: int) -> None:
        """Set the total number of epochs."""
        self._rule.start_epoch = max(1, int(total_epochs * self.start_epoch_ratio))

    def step(self, epoch: int, val: float) -> bool:
        """Record the value of a 1-based epoch and return whether to stop."""
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
