"""``parallel=`` of every face on two ranks: a sharded model trains as replicas do, evaluation and averages included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import astro_ranks_kit
import astro_trainer_kit
import graph_kit
from ranks import run_on_ranks
from spectra_kit import spectra
from step_kit import whole
from treadle import BaseTrainer, ConfigError, EmaHook, ParallelConfig, Trainer, parallelize
from treadle.distributed import is_sharded, replicated
from treadle.seed import set_seed
from treadle.spectra import ChemoMAE, SpectraTrainer, TrainerConfig

TOLERANCE = 1e-6


def halves(data):
    return data[dist.get_rank() :: dist.get_world_size()]


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def batches():
    draw = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 2, -100, 2, 1] * 4)
    return halves([(torch.randn(3, 4, generator=draw), labels[3 * i : 3 * i + 3]) for i in range(8)])


def functional(kind):
    set_seed(0)
    trainer = Trainer(
        Stack(), None, nn.CrossEntropyLoss(), {"training": {"ema_decay": 0.5, "learning_rate": 0.01}}, "cpu",
        parallel=ParallelConfig(kind, blocks=[nn.Linear]),
    )  # fmt: skip
    history = trainer.train(batches(), 2, batches())
    return trainer.model, [history["train_loss"], history["eval_loss"]]


def mini(kind):
    class Fit(BaseTrainer):
        def build_data_loader(self):
            return batches()

        def build_model(self):
            set_seed(0)
            return parallelize(Stack(), kind)

        def build_optimizer(self):
            return torch.optim.AdamW(self.model.parameters(), lr=0.01)

        def build_hooks(self):
            return [EmaHook(0.5)]

        def forward(self, input):
            return nn.functional.cross_entropy(self.model(input[0]), input[1]), {}

    trainer = Fit(6, grad_clip=0.5, gradient_accumulation_steps=2, device="cpu")
    trainer.train()
    return trainer.model, [trainer.train_means()["loss"]]


def graphs(kind):
    set_seed(0)
    model = graph_kit.model_of(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # not Adam, as below
    trainer = graph_kit.make(model=model, optimizer=optimizer, task_type="regression", parallel=kind, grad_clip=1.0)
    train, val = halves(graph_kit.graphs(12)), halves(graph_kit.graphs(8, seed=2))
    history = trainer.fit(graph_kit.loader(train, 2), graph_kit.loader(val, 2), epochs=2)
    return trainer.model, [[record["loss"], record["mae"]] for record in history["val"]]


def astro(kind):
    rows, net = astro_ranks_kit.share(dist.get_rank()), astro_trainer_kit.model(0.0)
    # Not Adam: the bias of the keys has no gradient but rounding, which Adam makes as large as any other.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = astro_trainer_kit.make(
        net=net, optimizer=optimizer, scheduler=schedule, train=rows, sample_k=4096, grad_accum_steps=2, parallel=kind
    )
    records = trainer.train(2, rows)
    return trainer.model, [[record["train_loss_total"], record["val_loss_total"]] for record in records]


def masked_spectra(kind, folder):
    set_seed(0)
    x = spectra()
    model = ChemoMAE(
        seq_len=32, d_model=16, nhead=2, num_layers=1, dim_feedforward=32, latent_dim=8, n_blocks=8, n_mask=4
    )
    cfg = TrainerConfig(
        out_dir=f"{folder}/{kind}", amp=False, ema_decay=0.8, device="cpu", parallel=kind, accumulation_steps=2
    )
    trainer = SpectraTrainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), halves(x[:32].split(4)), halves(x[32:].split(2)), cfg=cfg
    )
    set_seed(dist.get_rank())  # masks differ between ranks and not between kinds
    trainer.fit(2)
    return trainer.model, [[record["train_loss"], record["val_loss"]] for record in trainer.history]


def every_face(folder):
    found = {}
    for kind in ("ddp", "fsdp"):
        for face in (functional, mini, graphs, astro):
            model, numbers = face(kind)
            assert is_sharded(model) if kind == "fsdp" else replicated(model)
            found[face.__name__, kind] = whole(model), torch.tensor(numbers, dtype=torch.float64)
        model, numbers = masked_spectra(kind, folder)
        found["masked_spectra", kind] = whole(model), torch.tensor(numbers, dtype=torch.float64)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_on_ranks(every_face, 2, str(tmp_path_factory.mktemp("runs")), timeout=150)


@pytest.mark.parametrize("face", ["functional", "mini", "graphs", "astro", "masked_spectra"])
def test_a_sharded_model_trains_as_replicas_do(face, found):
    for rank in found:
        (replica, reported), (sharded, same) = rank[face, "ddp"], rank[face, "fsdp"]
        assert replica.keys() == sharded.keys()
        for name, value in replica.items():
            assert torch.allclose(value, sharded[name], atol=TOLERANCE, rtol=TOLERANCE), name
        assert torch.allclose(reported, same, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(reported, found[0][face, "ddp"][1])


def test_without_a_process_group_the_setting_names_torchrun():
    net, as_sharded = astro_trainer_kit.model(), ParallelConfig("fsdp", blocks=["EncoderLayer"])
    for build in (
        lambda: Trainer(Stack(), None, nn.CrossEntropyLoss(), device="cpu", parallel="ddp"),
        lambda: graph_kit.make(parallel=as_sharded),
        lambda: astro_trainer_kit.make(net=net, parallel=as_sharded),
        lambda: SpectraTrainer(net, torch.optim.SGD(net.parameters()), [], device="cpu", parallel=as_sharded),
    ):
        with pytest.raises(ConfigError, match="launch with torchrun"):
            build()
    with pytest.raises(ConfigError, match="must be 'ddp', 'fsdp' or None"):
        TrainerConfig(parallel="dp")
