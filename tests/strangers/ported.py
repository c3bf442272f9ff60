"""Objects of scripts that were ported: nested loaders, long pipelines, an optimizer with two phases."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader

from strangers.bench import Case, Points, Row, points_loader

LOADERS, DATA, OPTIMIZERS = "Loaders", "Data sets and collate functions", "Optimizers"
STOPS = (2, 5, 7)


class Zipped:
    """Batches of two loaders side by side, of which the second has its own generator."""

    def __init__(self) -> None:
        own = torch.Generator().manual_seed(3)
        self.loaders = points_loader(shuffle=True), DataLoader(Points(), 3, shuffle=True, generator=own)

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __iter__(self) -> Any:
        for (x, y), (other, _) in zip(*self.loaders, strict=True):
            yield x + 0.3 * other, y


class Jitter:
    """An augmentation with a NumPy generator and a counter."""

    def __init__(self, seed: int):
        self.chance, self.calls = np.random.default_rng(seed), 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + float(self.chance.random()) / self.calls


class Compose(Points):
    """Eleven transforms, of which the last has state."""

    def __init__(self) -> None:
        super().__init__()
        self.transforms = [*(abs for _ in range(10)), Jitter(1)]

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        for transform in self.transforms:
            x = transform(x)
        return x, y


class Jittered(Points):
    """A few rows with an augmentation of their own."""

    def __init__(self, seed: int):
        super().__init__(2)
        self.transform = Jitter(seed)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return self.transform(x), y


class Sample:
    """A row that counts its reads, in a slot."""

    __slots__ = ("reads",)

    def __init__(self) -> None:
        self.reads = 0


class Counted(Points):
    """Many rows that are objects, of which some are read."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = [Sample() for _ in range(300)]

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[-1 - index]
        sample.reads += 1
        x, y = super().__getitem__(index)
        return x / sample.reads, y


class TwoPhases(torch.optim.Optimizer):
    """Changes a string among the settings of its group."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.05, "phase": "warm"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["calls"] = state.get("calls", 0) + 1
                one.sub_(one.grad if group["phase"] == "warm" else one.grad.sign() / 10, alpha=group["lr"])
                group["phase"] = "sign" if state["calls"] > 3 else "warm"


class SharesState(torch.optim.Optimizer):
    """A Lookahead that holds the state of the optimizer inside it under another name, too."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.optimizer, self.fast_state = inner, inner.state
        super().__init__(inner.param_groups, inner.defaults)
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for one in group["params"]:
                slow = self.state[one].setdefault("slow", one.detach().clone())
                if group["calls"] % 3 == 0:
                    one.copy_(slow.lerp_(one, 0.5))


def shares_state() -> Case:
    return Case(optimizer=lambda model: SharesState(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)))


PORTED = [
    Row("two loaders side by side, one with a generator", LOADERS, lambda: Case(loader=Zipped()), stops=STOPS),
    Row("eleven transforms, the last with a generator and a counter", DATA,
        lambda: Case(loader=points_loader(Compose(), shuffle=True)), stops=STOPS),
    Row("ten data sets in a ConcatDataset, each with an augmentation", DATA,
        lambda: Case(loader=points_loader(ConcatDataset([Jittered(n) for n in range(10)]), shuffle=True)), stops=STOPS),
    Row("300 samples that are objects and count their reads", DATA,
        lambda: Case(loader=points_loader(Counted(), shuffle=True)), stops=STOPS),
    Row("a phase as a string in the groups", OPTIMIZERS, lambda: Case(optimizer=lambda m: TwoPhases(m.parameters())),
        stops=STOPS),
    Row("a Lookahead with another name for the inner state", OPTIMIZERS, shares_state, stops=STOPS),
]  # fmt: skip
