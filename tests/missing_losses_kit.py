"""Work of two processes in the tests of missing losses; a separate module, so that they can import it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from helpers import Scalar, Slopes
from treadle.engine import Engine
from treadle.task import StepOutput

NOTHING = torch.tensor(0)
# The micro-batches of one step per rank, and the weight after it: the mean gradient over all valid elements.
CASES = {
    "all have a loss": ([[1.0, 2.0], [3.0, 6.0]], -3.0),
    "the last one is missing everywhere": ([[1.0, None], [3.0, None]], -2.0),
    "the last one is missing on one rank": ([[1.0, None], [3.0, 5.0]], -3.0),
    "one rank has none at all": ([[None, None], [3.0, 5.0]], -4.0),
    "nobody has any": ([[None, None], [None, None]], 0.0),
    "different ones are missing": ([[None, 2.0], [4.0, None]], -3.0),
    "unequal counts": ([[(8.0, 1), (0.0, 2)], [(0.0, 1), None]], -2.0),
    "counts on the device": ([[(8.0, torch.tensor(1)), (0.0, torch.tensor(3))], [None, None]], -2.0),
    "a count of zero on the device": ([[(8.0, NOTHING), (9.0, NOTHING)], [(2.0, torch.tensor(1)), None]], -2.0),
    "nothing is counted anywhere": ([[(8.0, NOTHING), None], [(2.0, NOTHING), None]], 0.0),
    "one micro-batch": ([[1.0], [3.0]], -2.0),
    "one micro-batch, one rank without": ([[None], [3.0]], -3.0),
}


class Normalised:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).square().mean())


def replica(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net.register_parameter("unused_for_now", nn.Parameter(torch.ones(1), requires_grad=False))
    model = nn.parallel.DistributedDataParallel(net)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def same_as_plain_torch(rank):
    """Compare three steps of the engine with a hand-written loop over torch's own exchange, buffers included."""
    data = [torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(3)]
    model, optimizer = replica(0)
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    ours, optimizer = replica(0)
    Engine(ours, optimizer, Normalised(), device="cpu").run(data, max_steps=3)
    for buffer in model.buffers():  # torch broadcasts them before a forward pass, the engine after the last one
        dist.broadcast(buffer, src=0)
    pairs = zip(model.state_dict().values(), ours.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def work():
    found = {}
    for case, (batches, _) in CASES.items():
        model = torch.nn.parallel.DistributedDataParallel(Scalar())
        engine = Engine(
            model, torch.optim.SGD(model.parameters(), lr=1.0), Slopes(), device="cpu", accumulation_steps=2
        )
        # A second, ordinary step shows that nothing was left behind.
        own = batches[dist.get_rank()]
        engine.run([*own, *([None] * (2 - len(own))), 1.0, 1.0], max_steps=2)
        found[case] = model.module.weight.item(), engine.applied_steps
    return found, same_as_plain_torch(dist.get_rank())
