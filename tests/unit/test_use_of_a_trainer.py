"""validate, test, predict and save of every face: what is scored, and that the run does not notice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import astro_trainer_kit
import functional_kit
import graph_kit
import spectra_kit
import treadle
from helpers import Slopes, differences, scalar_engine
from treadle import BaseTrainer, ConfigError, EmaHook, EpochTrainer


class Fit(BaseTrainer):
    def __init__(self, max_steps=5, **rest):
        super().__init__(max_steps, device="cpu", progress=False, **rest)

    def build_data_loader(self):
        treadle.set_seed(0)
        return functional_kit.loader(20, 4, shuffle=True)

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def build_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), 0.05)

    def build_hooks(self):
        return [EmaHook(0.5)]

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x), y), {}, len(x)


class Predicts(Fit):
    def predict_step(self, input):
        return self.model(input[0])


def mini(tmp_path):
    trainer = Predicts()
    trainer.train()
    return trainer, functional_kit.loader(12, 5, seed=9), 12


def functional(tmp_path):
    trainer = functional_kit.make(ema_decay=0.5)
    trainer.train(functional_kit.loader(), 2, functional_kit.loader(seed=6))
    return trainer, functional_kit.loader(12, 5, seed=9), 12


def graphs(tmp_path):
    trainer = graph_kit.make()
    trainer.fit(graph_kit.loader(graph_kit.graphs()), epochs=1)
    return trainer, graph_kit.loader(graph_kit.graphs(6)), 6


def spectra(tmp_path):
    trainer = spectra_kit.make(tmp_path)
    trainer.fit(1)
    return trainer, trainer.val_loader, 12


def astro(tmp_path):
    trainer = astro_trainer_kit.make()
    trainer.train(1)
    one = astro_trainer_kit.sequences(1)[0]
    return trainer, astro_trainer_kit.loader([one] * 6), 6


def state_of(trainer):
    return getattr(trainer, "_engine", trainer).state_dict()


@pytest.mark.parametrize("face", [mini, functional, graphs, spectra, astro])
def test_a_run_does_not_notice(face, tmp_path):
    trainer, loader, count = face(tmp_path)
    engine = getattr(trainer, "_engine", trainer)
    before, modes = state_of(trainer), [module.training for module in engine.model.modules()]
    found = trainer.validate(loader)
    assert found == trainer.validate(loader)
    whole = trainer.test(loader)
    outputs = trainer.predict(loader)
    assert differences(before, state_of(trainer)) == []
    assert modes == [module.training for module in engine.model.modules()]
    assert (whole["loss"] if face is spectra else whole) == found
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    assert len(first) == count
    assert not first.requires_grad
    path = trainer.save(tmp_path / "here.pt")
    assert differences(treadle.checkpoint.load_checkpoint(path), before) == []


def test_the_averaged_weights_are_used(tmp_path):
    trainer, loader, _ = mini(tmp_path)
    plain = trainer.evaluate(loader)
    averaged = trainer.validate(loader)
    assert averaged != plain
    with trainer.averages["ema"].applied_to(trainer.model):
        assert trainer.evaluate(loader) == averaged
        trainer.model.eval()
        with torch.no_grad():
            expected = torch.cat([trainer.model(x) for x, _ in loader])
        trainer.model.train()
    assert torch.equal(trainer.predict(loader), expected)


def test_the_limit_counts_for_validate_and_not_for_test():
    trainer = functional_kit.make(limit_eval_batches=1)
    loader = functional_kit.loader(12, 5)
    first = next(iter(loader))
    assert trainer.validate(loader) == trainer.validate([first]) == trainer.evaluate(loader)
    assert trainer.test(loader) == functional_kit.make().evaluate(loader)


def test_loaders_of_a_dict_have_results_by_name(tmp_path):
    for trainer, loader, _ in (mini(tmp_path), functional(tmp_path)):
        found = trainer.test({"near": loader, "far": loader})
        assert found["near_loss"] == found["far_loss"] == trainer.test(loader)["loss"]


def test_the_epoch_driver_has_them_too():
    trainer = EpochTrainer(scalar_engine(task=Slopes()))
    trainer.fit([1.0, 2.0], None, 1)
    assert trainer.validate([1.0]) == trainer.test([1.0]) == trainer.evaluate([1.0])


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"validate\(\) came before train\(\)"):
        Fit().validate([])
    with pytest.raises(ConfigError, match=r"predict\(\) came before train\(\)"):
        Fit().predict([])
    trainer = Fit()
    trainer.prepare()
    with pytest.raises(ConfigError, match=r"predict: Fit has no predict_step\(input\)"):
        trainer.predict([])
    with pytest.raises(ConfigError, match="loader: it gave no batch"):
        trainer.test([])


def test_a_saved_state_goes_on_as_the_run_does(tmp_path):
    straight, stopped = Fit(7), Fit(4)
    straight.train()
    stopped.train()
    stopped.save(tmp_path / "some" / "where.pt")
    resumed = Fit(7)
    resumed.load_state_dict(treadle.checkpoint.load_checkpoint(tmp_path / "some" / "where.pt"))
    resumed.train()
    assert differences(straight.state_dict(), resumed.state_dict()) == []
