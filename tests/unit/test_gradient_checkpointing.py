"""Gradient checkpointing: every bit as without it, by the model's own method or by wrapped blocks, or refused."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import treadle
from functional_kit import loader
from treadle.capture import obstacles
from treadle.capture.checkpointing import CheckpointedForward, is_checkpointed


class Block(nn.Module):
    """Draws random numbers and moves buffers, each of which a second pass could change."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4, momentum=0.3), nn.GELU(), nn.Dropout(0.4)
        )
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.inner(x)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trained(setting, *, folder=None, epochs=2):
    treadle.set_seed(0)
    model = Stack()
    trainer = treadle.Trainer(
        model, torch.optim.Adam(model.parameters(), lr=0.01), nn.MSELoss(), device="cpu", progress=False,
        gradient_checkpointing=setting,
    )  # fmt: skip
    trainer.train(loader(24, 8, shuffle=True), epochs, save_dir=folder, resume_from=folder and "auto")
    return model


def same(one, other):
    states = one.state_dict(), other.state_dict()
    return list(states[0]) == list(states[1]) and all(map(torch.equal, states[0].values(), states[1].values()))


@pytest.mark.parametrize("setting", [True, ["layers.*"], ["layers.0", "layers.2.inner"]])
def test_a_run_has_the_bits_of_one_without(setting):
    plain, model = trained(False), trained(setting)
    assert is_checkpointed(model)
    assert not is_checkpointed(plain)
    assert same(plain, model)
    assert torch.equal(torch.get_rng_state(), (trained(False), torch.get_rng_state())[1])


def test_the_blocks_are_run_twice():
    assert trained(True).layers[0].calls == 2 * trained(False).layers[0].calls > 0


def test_a_stopped_run_goes_on_to_the_bit_also_without_it(tmp_path):
    trained(True, folder=tmp_path, epochs=1)
    assert same(trained(False, folder=tmp_path), trained(True))


def pickled(model):
    return pickle.loads(pickle.dumps(treadle.checkpoint_model(model, ["0"])))


def test_copies_and_pickles_call_their_own_weights():
    for model in (copy.deepcopy(treadle.checkpoint_model(Stack())), pickled(nn.ModuleList([nn.Linear(1, 1)]))):
        blocks = getattr(model, "layers", model)
        assert blocks[0].forward.module is blocks[0]


def test_the_step_face_takes_it_too():
    class Fit(treadle.BaseTrainer):
        def build_data_loader(self):
            return loader(16, 8)

        def build_model(self):
            return Stack()

        def build_optimizer(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

        def forward(self, batch):
            return nn.functional.mse_loss(self.model(batch[0]), batch[1]), {}

    trainer = Fit(2, device="cpu", progress=False, gradient_checkpointing=True)
    trainer.train()
    assert isinstance(trainer.model.layers[0].forward, CheckpointedForward)


class Own(nn.Module):
    """As a model of transformers, which has a method of its own."""

    def __init__(self, *more):
        super().__init__()
        self.more = nn.ModuleList(more)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.asked = gradient_checkpointing_kwargs


def test_a_models_own_method_is_asked_without_reentry():
    model = treadle.checkpoint_model(Own(nn.Linear(1, 1)))
    assert model.asked == {"use_reentrant": False}
    assert not isinstance(vars(model.more[0]).get("forward"), CheckpointedForward)


@pytest.mark.parametrize(
    ("model", "setting", "message"),
    [
        (nn.Linear(1, 1), True, "no ModuleList"),
        (Own(nn.BatchNorm1d(1)), True, "would update twice"),
        (Stack(), ["layer.*"], "no module has the name 'layer.\\*'; did you mean"),
        (Stack(), ["layers.0", "layers.0.inner"], "is inside 'layers.0'"),
    ],
)
def test_what_cannot_be_run_twice_is_refused(model, setting, message):
    with pytest.raises(treadle.ConfigError, match=message) as error:
        treadle.checkpoint_model(model, setting)
    assert error.value.argument == "gradient_checkpointing"


def test_a_pattern_in_place_of_names_is_refused():
    with pytest.raises(treadle.ConfigError, match=r"setting='layers\.\*': must be True or False or a list of strings"):
        treadle.checkpoint_model(Stack(), "layers.*")


def test_a_captured_step_says_why_it_is_not(monkeypatch):
    monkeypatch.setattr(obstacles, "can_be_recorded", lambda optimizer, device: True)
    engine = SimpleNamespace(
        device=torch.device("cuda"), hooks=[], optimizer=None, num_ranks=1, precision=SimpleNamespace(scaled=False),
        model=treadle.checkpoint_model(nn.Sequential(nn.Linear(1, 1)), ["0"]),
    )  # fmt: skip
    assert "gradient checkpointing" in obstacles.reason_against(engine)
