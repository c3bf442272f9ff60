"""Optimizers of torch and of others, alone, in pairs and in one another."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from helpers import MeanSquare
from strangers.bench import WIDTH, Case, Row, net, points_loader
from treadle import BaseTrainer, StepOutput

KIND = "Optimizers"
_OF_TORCH = {
    "ASGD": {"lr": 0.01}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {"lr": 0.05}, "Adam": {"amsgrad": True},
    "AdamW": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {}, "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}  # fmt: skip


def of_torch(name: str, **settings: Any) -> Case:
    return Case(optimizer=lambda model: getattr(torch.optim, name)(model.parameters(), **settings))


def matrices_only() -> Case:
    model = nn.Sequential(nn.Linear(WIDTH, 6, bias=False), nn.ReLU(), nn.Linear(6, 1, bias=False))
    return Case(model=model, optimizer=lambda of: torch.optim.Muon(of.parameters(), lr=0.02))


class MuonWithAdamW(Optimizer):
    """Two optimizers in one class, whose groups it shares and whose state its inherited state dict does not hold."""

    def __init__(self, model: nn.Module):
        super().__init__(model.parameters(), {})
        self.muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
        self.adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


class InnerOptimizers(Optimizer):
    """The same, as a well-behaved subclass writes it."""

    def __init__(self, model: nn.Module):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        super().__init__([{"params": matrices, "lr": 0.02}, {"params": rest, "lr": 0.01}], {})
        self.inner = [torch.optim.SGD(matrices, lr=0.02, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]

    def step(self, closure: Any = None) -> None:
        for optimizer, group in zip(self.inner, self.param_groups, strict=True):
            optimizer.param_groups[0]["lr"] = group["lr"]
            optimizer.step()


class Lookahead(Optimizer):
    """A wrapper with slow weights and a form of its own, as packages write it."""

    def __init__(self, base: Optimizer, every: int = 3, alpha: float = 0.5):
        self.base, self.every, self.alpha = base, every, alpha
        self.calls = 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.calls += 1
        if self.calls % self.every == 0:
            fast = (p for group in self.param_groups for p in group["params"])
            for slow, live in zip(self.slow, fast, strict=True):
                slow.lerp_(live, self.alpha)
                live.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return {"base": self.base.state_dict(), "slow": self.slow, "calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state["base"])
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.slow = [slow.clone() for slow in state["slow"]]
        self.calls = state["calls"]


class WideMoments(Optimizer):
    """Keeps a float32 moment and a float32 copy beside half-precision weights, which torch's own loading narrows."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"], state["moment"] = p.detach().float().clone(), torch.zeros_like(p).float()
                    state["counts"] = torch.zeros(2, dtype=torch.uint8)
                state["moment"].mul_(0.9).add_(p.grad.float())
                state["counts"] += 1
                state["master"].sub_(group["lr"] * state["moment"])
                p.copy_(state["master"])


class Hidden(torch.optim.Optimizer):
    """Keeps its momenta in a list of its own, which the state dict that it inherits leaves out."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.05})
        self.momenta = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for momentum, p in zip(self.momenta, parameters, strict=True):
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.05)


class Counting(torch.optim.SGD):
    """Keeps a counter as an attribute, which no state dict has."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.calls
        return super().step(closure)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, 0] * 10).round().long())


class Gan(BaseTrainer):
    """A generator that the engine trains and a discriminator that the forward pass trains beside it."""

    def build_data_loader(self) -> Any:
        return points_loader(shuffle=True)

    def build_model(self) -> nn.Module:
        self.critic = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        return nn.Linear(2, WIDTH)

    def build_optimizer(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)

    def forward(self, input: Any) -> Any:
        real = input[0]
        fake = self.model(torch.randn(len(real), 2))
        self.critic_optimizer.zero_grad()
        (self.critic(fake.detach()).mean() - self.critic(real).mean()).backward()
        self.critic_optimizer.step()
        return -self.critic(fake).mean(), {}


class GanInATask(MeanSquare):
    """The same, with both on the task and in containers."""

    def __init__(self) -> None:
        self.parts = {"critic": nn.Linear(1, 1)}
        self.optimizers = [torch.optim.RMSprop(self.parts["critic"].parameters(), lr=0.01)]

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        made = model(batch[0])
        if model.training:
            self.optimizers[0].zero_grad()
            (self.parts["critic"](made.detach()) - batch[1]).square().mean().backward()
            self.optimizers[0].step()
        return StepOutput(self.parts["critic"](made).square().mean(), weight=float(len(made)))


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:
        return super().step(closure)


def schedule_free(name: str) -> Case:
    import schedulefree

    def made(model: nn.Module) -> Any:
        return getattr(schedulefree, name)(model.parameters(), lr=0.02)

    return Case(optimizer=made)


def half() -> Case:
    task = MeanSquare()
    model = net().to(torch.bfloat16)

    class InHalf:
        def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> Any:
            return task.step(model, (batch[0].bfloat16(), batch[1]))

    return Case(model=model, optimizer=lambda of: WideMoments(of.parameters()), task=InHalf())


def by(optimizer: Any) -> Case:
    return Case(optimizer=optimizer)


OPTIMIZERS = [
    *(Row(f"torch.optim.{name}", KIND, functools.partial(of_torch, name, **how)) for name, how in _OF_TORCH.items()),
    Row("torch.optim.Muon", KIND, matrices_only),
    Row("torch.optim.SparseAdam", KIND, lambda: Case(
        model=Sparse(), optimizer=lambda of: torch.optim.SparseAdam(of.parameters(), lr=0.05))),
    Row("torch.optim.LBFGS", KIND, lambda: by(lambda of: torch.optim.LBFGS(of.parameters())), ("LBFGS", "closure")),
    Row("an optimizer whose step() needs a closure", KIND, lambda: by(lambda of: NeedsClosure(of.parameters(), lr=0.1)),
        ("NeedsClosure", "closure")),
    Row("AdamW with a tensor learning rate", KIND, lambda: by(
        lambda of: torch.optim.AdamW(of.parameters(), lr=torch.tensor(0.01)))),
    Row("two optimizers in one class, state dict inherited", KIND, lambda: by(MuonWithAdamW)),
    Row("optimizers in a list inside one class", KIND, lambda: by(InnerOptimizers)),
    Row("a Lookahead with a custom state format", KIND, lambda: by(
        lambda of: Lookahead(torch.optim.AdamW(of.parameters(), lr=0.02)))),
    Row("float32 moments of bfloat16 weights", KIND, half),
    Row("a counter as an attribute of the optimizer", KIND, lambda: by(lambda of: Counting(of.parameters(), lr=0.05))),
    Row("momenta in a list, state dict inherited", KIND, lambda: by(lambda of: Hidden(of.parameters())),
        ("Hidden", "momenta")),
    Row("a GAN with two optimizers on the trainer", KIND, lambda: Case(engine=Gan(max_steps=9, device="cpu"))),
    Row("a GAN with its critic in containers of the task", KIND, lambda: Case(
        model=nn.Linear(WIDTH, 1), task=GanInATask())),
    Row("schedulefree.AdamWScheduleFree", KIND, lambda: schedule_free("AdamWScheduleFree"), needs=("schedulefree",)),
    Row("schedulefree.SGDScheduleFree", KIND, lambda: schedule_free("SGDScheduleFree"), needs=("schedulefree",)),
]  # fmt: skip
