"""Models whose state is more than their parameters, or which hooks change while they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from strangers.bench import WIDTH, Case, Row, net
from treadle import EmaHook
from treadle.hooks import BaseHook

KIND = "Models"


def old_weight_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(WIDTH, 6)), nn.ReLU(), nn.Linear(6, 1))


def lazy(initialised: bool) -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 1))
    if initialised:
        model(torch.ones(1, WIDTH))
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).sum(1, keepdim=True)


class FirstHalf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class Clamped(nn.Module):
    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-0.5, 0.5)


class Queue(nn.Module):
    """A queue in a buffer that no state dict has, and a counter that anneals."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("queue", torch.zeros(4), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.queue = torch.cat([self.queue[1:], x.mean().reshape(1)])
            self.calls += 1
        return self.inner(x) * (1 - 0.5**self.calls) + self.queue.mean()


class InPlace(nn.Module):
    """A running mean in a non-persistent buffer and a plain tensor, both written to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.scale = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.3)
            self.scale = self.scale * 0.9
        return self.inner(x - self.mean) * self.scale


class Grows(nn.Module):
    """A table that grows as rotary caches do, with the length beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.length = net(), 1
        self.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        need = int(x[:, 0].max() * 10) + 1
        if need > self.length:
            self.length = need
            self.register_buffer("table", torch.linspace(1, 2, need), persistent=False)
        return self.inner(x) * self.table[:need].mean()


class Remembers(nn.Module):
    """Keeps its last activations, which is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = net(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.inner[0](x)
        return self.inner(x)


class WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.inner(x) / (1 + self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class AtStep(BaseHook):
    """Does something to the trainer at one step."""

    def __init__(self, step: int, act: Any):
        self.step, self.act = step, act

    def on_before_step(self, trainer: Any) -> None:
        if trainer.step == self.step:
            self.act(trainer)


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    model[0].requires_grad_(False)
    return model


def unfreeze(trainer: Any) -> None:
    trainer.model[0].requires_grad_(True)


def unfreeze_with_a_group(trainer: Any) -> None:
    unfreeze(trainer)
    trainer.optimizer.add_param_group({"params": list(trainer.model[0].parameters()), "lr": 0.001})


def freeze_statistics(trainer: Any) -> None:
    trainer.model[1].eval()


def set_groups(trainer: Any) -> None:
    group = trainer.optimizer.param_groups[0]
    group["lr"], group["momentum"], group["mine"] = 0.01, 0.7, "a text"


def trainable(model: nn.Module) -> Any:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.02)


class AlwaysFrozenStatistics(nn.Sequential):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[1].eval()
        return self


def quantised() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(WIDTH, 6)), {nn.Linear})
            self.head = nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.base(x))

    return Net()


def quantisation_aware() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 1))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model)


def fully_sharded_1() -> Case:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)
    model._fsdp_wrapped_module = net()
    optimizer = torch.optim.SGD(model._fsdp_wrapped_module.parameters(), lr=0.1)
    return Case(model=model, optimizer=lambda of: optimizer)


def of(make: Any, *hooks: Any, optimizer: Any = None) -> Any:
    return lambda: Case(model=make(), hooks=[hook() for hook in hooks], optimizer=optimizer)


def ema() -> EmaHook:
    return EmaHook(0.8)


MODELS = [
    Row("old torch.nn.utils.weight_norm", KIND, of(old_weight_norm)),
    Row("old weight_norm with an average", KIND, of(lambda: _used(old_weight_norm()), ema)),
    Row("parametrizations.weight_norm", KIND, of(lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, 6)), nn.Linear(6, 1)), ema)),
    Row("parametrizations.spectral_norm", KIND, of(lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(WIDTH, 6)), nn.Linear(6, 1)), ema)),
    Row("old torch.nn.utils.spectral_norm", KIND, of(lambda: nn.Sequential(
        torch.nn.utils.spectral_norm(nn.Linear(WIDTH, 6)), nn.Linear(6, 1)))),
    Row("old spectral_norm with an average", KIND, of(lambda: _used(nn.Sequential(
        torch.nn.utils.spectral_norm(nn.Linear(WIDTH, 6)), nn.Linear(6, 1))), ema)),
    Row("parametrizations.orthogonal", KIND, of(lambda: nn.Sequential(
        parametrizations.orthogonal(nn.Linear(WIDTH, 6)), nn.Linear(6, 1)))),
    Row("a custom parametrization", KIND, of(lambda: _parametrized())),
    Row("an initialized lazy model", KIND, of(lambda: lazy(True))),
    Row("an uninitialized lazy model", KIND, lambda: Case(
        model=lazy(False), optimizer=lambda of: torch.optim.SGD(of[2].parameters(), lr=0.1)), ("lazy", "0.weight")),
    Row("tied weights", KIND, of(Tied, ema)),
    Row("a layer unfrozen by a hook", KIND, of(frozen_first, lambda: AtStep(4, unfreeze))),
    Row("a layer unfrozen by a hook into a new group", KIND, of(
        frozen_first, lambda: AtStep(4, unfreeze_with_a_group), optimizer=trainable)),
    Row("a layer frozen by a hook", KIND, of(net, lambda: AtStep(
        3, lambda trainer: trainer.model[0].requires_grad_(False)))),
    Row("statistics frozen by a hook", KIND, of(frozen_first, lambda: AtStep(3, freeze_statistics))),
    Row("statistics frozen by the model", KIND, of(lambda: AlwaysFrozenStatistics(*frozen_first()))),
    Row("group settings changed by a hook", KIND, of(net, lambda: AtStep(4, set_groups))),
    Row("SyncBatchNorm in one process", KIND, of(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(frozen_first()))),
    Row("BatchNorm with a cumulative average", KIND, of(lambda: nn.Sequential(
        nn.BatchNorm1d(WIDTH, momentum=None), nn.Linear(WIDTH, 1)), ema)),
    Row("a queue in a non-persistent buffer, and a counter", KIND, of(Queue)),
    Row("a running mean in a non-persistent buffer", KIND, of(InPlace)),
    Row("a growing cache", KIND, of(Grows)),
    Row("a model that stores its last activations", KIND, of(Remembers)),
    Row("a model with extra state", KIND, of(WithExtraState)),
    Row("a dynamically quantised part", KIND, of(quantised)),
    Row("quantisation-aware training", KIND, of(quantisation_aware)),
    Row("FullyShardedDataParallel (FSDP 1)", KIND, fully_sharded_1,
        ("FullyShardedDataParallel", 'parallelize(model, "fsdp")')),
]  # fmt: skip


def _used(model: nn.Module) -> nn.Module:
    model(torch.ones(1, WIDTH))
    return model


def _parametrized() -> nn.Module:
    layer = nn.Linear(WIDTH, 6)
    parametrize.register_parametrization(layer, "weight", Clamped())
    return nn.Sequential(layer, nn.Linear(6, 1))
