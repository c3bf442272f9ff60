"""Finders leave every bit of a run as it was; a summary too, and it counts right."""

from __future__ import annotations

import queue

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from helpers import differences
from treadle.faces.finders import LearningRates


def data(size=4, *, generator=None):
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), size, shuffle=True, generator=generator)


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))


class Fit(treadle.BaseTrainer):
    """Has a second model and optimizer that forward steps, and an average."""

    def build_data_loader(self):
        return data()

    def build_model(self):
        self.other = nn.Linear(3, 1)
        self.second = torch.optim.Adam(self.other.parameters(), lr=0.01)
        return net()

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_lr_scheduler(self):
        return treadle.build_schedule(self.optimizer, "cosine", total_steps=10, warmup_steps=2)

    def build_hooks(self):
        return [treadle.EmaHook(0.9)]

    def forward(self, batch):
        if self.model.training:
            self.second.zero_grad()
            nn.functional.mse_loss(self.other(batch[0]), batch[1]).backward()
            self.second.step()
        return nn.functional.mse_loss(self.model(batch[0]), batch[1]), {"noise": torch.rand(())}


def fit(before=None):
    treadle.set_seed(0)
    trainer = Fit(10, device="cpu", progress=False)
    if before is not None:
        before(trainer)
    trainer.train()
    return trainer.state_dict()


def with_rate(trainer):
    found = treadle.find_learning_rate(trainer, num_steps=20)
    assert 2 < len(found.rates) <= 20
    assert found.rates[0] == pytest.approx(1e-7)


def with_size(trainer):
    assert treadle.find_batch_size(trainer, data, start=8) == 32


@pytest.mark.parametrize("before", [with_rate, with_size])
def test_a_run_of_the_step_face_has_the_bits_of_one_without(before):
    assert differences(fit(), fit(before)) == []


@pytest.mark.parametrize("generator", [True, False])
def test_a_run_of_ready_parts_has_the_bits_of_one_without(generator):
    def run(*, find):
        treadle.set_seed(0)
        model = net()
        loader = data(generator=torch.Generator().manual_seed(1) if generator else None)
        trainer = treadle.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), nn.MSELoss(), device="cpu",
            progress=False, max_grad_norm=1.0, gradient_accumulation_steps=2, ema_decay=0.9,
        )  # fmt: skip
        if find:
            treadle.find_learning_rate(trainer, loader, num_steps=30)
        trainer.train(loader, 2, data())
        return trainer._engine.state_dict(), torch.get_rng_state()

    (one, rng), (other, other_rng) = run(find=False), run(find=True)
    assert differences(one, other) == []
    assert torch.equal(rng, other_rng)


def test_persistent_workers_draw_their_seeds_as_without():
    def run(*, find):
        treadle.set_seed(0)
        x = torch.ones(8, 3)
        loader = DataLoader(TensorDataset(x, x[:, :1]), 4, num_workers=1, persistent_workers=True, shuffle=True)
        model = nn.Linear(3, 1)
        trainer = treadle.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu", progress=False
        )
        if find:
            treadle.find_learning_rate(trainer, loader, num_steps=2)
        trainer.train(loader, 1)
        return torch.get_rng_state()

    assert torch.equal(run(find=False), run(find=True))


def test_the_suggestion_learns_and_does_not_diverge():
    treadle.set_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    trainer = treadle.Trainer(model, optimizer, nn.MSELoss(), device="cpu", progress=False)
    found = treadle.find_learning_rate(trainer, data(16), lowest=1e-5, highest=100.0)
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 1.0
    assert found.rates[-1] < 100.0  # it ended where the loss ran away
    optimizer.param_groups[0]["lr"] = found.suggestion
    losses = trainer.train(data(), 5)["train_loss"]
    assert losses[-1] < 0.2 * losses[0]


def test_no_rate_is_suggested_where_the_loss_never_falls():
    assert LearningRates([1.0, 2.0], [1.0, 1.0]).suggestion is None


def test_the_largest_size_that_fits_is_found():
    class Full(nn.Linear):
        def forward(self, x):
            sizes.put(len(x))
            if len(x) > limit:
                raise torch.OutOfMemoryError("full")
            return super().forward(x)

    model = Full(1, 1)
    trainer = treadle.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu")

    def rows(size):
        return [(torch.ones(size, 1), torch.ones(size, 1))] * 3

    for limit, least in ((200, 178), (5, 5)):
        sizes: queue.SimpleQueue[int] = queue.SimpleQueue()  # of a type that is not put back
        found = treadle.find_batch_size(trainer, rows, largest=1024)
        assert least <= found <= limit
        assert max(sizes.get() for _ in range(sizes.qsize())) <= 512
    limit = 1
    with pytest.raises(torch.OutOfMemoryError):
        treadle.find_batch_size(trainer, rows, largest=64)


@pytest.mark.parametrize(
    ("find", "argument"),
    [
        (lambda trainer: treadle.find_learning_rate(trainer), "loader"),
        (lambda trainer: treadle.find_learning_rate(trainer, []), "loader"),
        (lambda trainer: treadle.find_learning_rate(3, [1]), "trainer"),
        (lambda trainer: treadle.find_learning_rate(trainer, data(), lowest=2.0), "lowest"),
        (lambda trainer: treadle.find_learning_rate(trainer, data(), num_steps=1), "num_steps"),
        (lambda trainer: treadle.find_batch_size(trainer, data, start=0), "start"),
        (lambda trainer: treadle.find_batch_size(trainer, lambda size: iter([])), "largest"),
    ],
)
def test_bad_arguments_are_refused(find, argument):
    model = nn.Linear(3, 1)
    with pytest.raises(treadle.ConfigError) as error:
        find(treadle.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu"))
    assert error.value.argument == argument


# -- the summary ------------------------------------------------------------------------------------------------------


def test_a_summary_counts_each_parameter_once_and_changes_nothing():
    model = nn.ModuleDict({"body": net(), "head": nn.Linear(8, 2)})
    model["again"] = model["head"]
    model["head"].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = treadle.summary(model, depth=1)
    assert found.num_parameters == sum(p.numel() for p in model.parameters()) == 75
    assert found.num_trainable == 73
    assert [row.name for row in found.rows] == ["", "body", "head"]
    assert "(2 frozen)" in str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_summary_shows_shapes_and_leaves_random_numbers_and_modes():
    model = net()
    state = torch.get_rng_state()
    found = treadle.summary(model, torch.ones(5, 3))
    assert torch.equal(state, torch.get_rng_state())
    assert model[2].training
    assert model[1].num_batches_tracked == 0
    assert [row.shape for row in found.rows] == [(5, 1), (5, 8), (5, 8), (5, 8), (5, 8), (5, 1)]
    assert not model[0]._forward_hooks
    with pytest.raises(treadle.ConfigError, match="depth=-1"):
        treadle.summary(model, depth=-1)
