"""Compiled blocks inside replicas and sharded models, compiled before and after the model was spread."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ranks import run_on_ranks
from step_kit import differing, net, train
from treadle import compile_model
from treadle.distributed import unwrap
from treadle.engine.hook import BaseHook

pytestmark = pytest.mark.slow
SIZES = [(3, 3), (4, 2), (1, 5), (2, 2)]


class Block(nn.Module):
    """A block whose code is not torch's."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


class CompileLate(BaseHook):
    """Compiles the blocks of a model that is spread over the ranks already."""

    def on_before_train(self, trainer):
        compile_model(trainer.model, "blocks", backend="aot_eager")


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def net_of(own):
    model = net()
    if own:
        model.blocks = nn.ModuleList(Block(layers) for layers in model.blocks)
    return model


def all_ways():
    found, heard = {}, Heard()
    logging.getLogger("treadle.compiling").addHandler(heard)
    for kind, order, own in [("ddp", "before", False), ("ddp", "after", True), *FSDP]:
        torch._dynamo.reset()
        counters.clear()
        heard.texts.clear()
        model = net_of(own)
        if order == "before":
            compile_model(model, "blocks", backend="aot_eager")
        done = train(kind, SIZES, model=model, hooks=[CompileLate()] if order == "after" else [])
        compiled = [block._compiled_call_impl is not None for block in unwrap(done["engine"].model).blocks]
        weights = {name.replace(".layers.", "."): value for name, value in done["weights"].items()}
        found[kind, order, own] = weights, compiled, counters["stats"]["unique_graphs"], list(heard.texts)
    return found


FSDP = [("fsdp", order, own) for order in ("before", "after") for own in (True, False)]


@pytest.fixture(scope="module")
def found():
    return run_on_ranks(all_ways, 2)


@pytest.mark.parametrize("way", [("ddp", "before", False), ("ddp", "after", True), *FSDP])
def test_compiled_blocks_train_as_one_plain_process(way, found):
    kind, _, own = way
    expected = train(None, SIZES)["weights"]
    for weights, compiled, num_graphs, said in (rank[way] for rank in found):
        assert compiled == [True, True]
        assert differing(weights, expected) == []
        if kind == "ddp" or own:
            assert num_graphs > 0
            assert said == []
        else:  # torch compiles nothing, and it is said
            assert num_graphs == 0
            assert "layers of torch's own classes are not compiled where FSDP2 shards them" in said[0]
