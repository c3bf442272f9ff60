"""Compiled blocks on a GPU, by torch's own compiler: the numbers are near the plain ones, and captured the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treadle import Engine, StepOutput, TensorLoader, compile_model
from treadle.capture.compile import is_compiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # what torch's compiler says differs between its versions
]
STEPS = 20


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.inward, self.outward = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.outward(nn.functional.gelu(self.inward(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        (x,) = batch if isinstance(batch, (tuple, list)) else (batch,)
        return StepOutput((model(x) - x.sum(1, keepdim=True)).square().mean(), weight=float(len(x)))


def trained(compiled, *, capture=False, dropout=0.0, precision=None):
    torch.manual_seed(0)
    model = Net(dropout).cuda()
    compile_model(model, compiled)
    # Not Adam: where a gradient is all but 0, it would make a step of what two kernels round differently.
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), momentum=0.9, fused=True)
    engine = Engine(model, optimizer, Fit(), device="cuda", grad_clip=1.0, capture=capture, precision=precision)
    rows = torch.randn(160, 32, generator=torch.Generator().manual_seed(1))
    engine.run(TensorLoader(rows, batch_size=16, device="cuda"), max_steps=STEPS)
    return engine


@pytest.mark.parametrize("setting", ["blocks", True])
def test_a_compiled_run_is_near_the_plain_one_and_keeps_the_names(setting):
    plain, compiled = trained(False), trained(setting)
    assert is_compiled(compiled.model if setting is True else compiled.model.blocks[0])
    weights = compiled.model.state_dict()
    assert list(weights) == list(plain.model.state_dict())
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_compiled_blocks_have_the_same_bits_captured_dropout_included(precision):
    # Else the compiler chooses the blocks of its reductions by timing them, and another choice rounds otherwise.
    with torch._inductor.config.patch(deterministic=True):
        trained("blocks", dropout=0.2, precision=precision)  # a filled cache has other kernels than an empty one
        runs = [trained("blocks", capture=how, dropout=0.2, precision=precision) for how in (False, False, True)]
    assert runs[2].steps._steps
    assert differing(runs[0], runs[1]) == [], "two eager runs differ: the compiler chose other kernels"
    assert differing(runs[0], runs[2]) == []


def differing(one, other):
    pairs = zip(one.model.named_parameters(), other.model.parameters(), strict=True)
    return [name for (name, mine), theirs in pairs if not torch.equal(mine, theirs)]
