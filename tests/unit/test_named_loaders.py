"""Several named validation loaders in the trainers of packs: what records hold, what selects, what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import astro_trainer_kit
import graph_kit
import spectra_kit
from command_kit import Killed, Stop, kill
from treadle import ConfigError


class Spectra:
    """``far`` are the spectra of ``near``, four times as bright."""

    loss, prefix, count = "loss", "val_", 4

    def loaders(self):
        x = spectra_kit.spectra()[28:]
        return {"near": DataLoader(TensorDataset(x), 5), "far": DataLoader(TensorDataset(x * 4), 7)}

    def run(self, folder, epochs=3, *, loaders=None, metric=None, hooks=()):
        loaders = self.loaders() if loaders is None else loaders
        trainer = spectra_kit.make(folder, val=loaders, metric=metric, hooks=hooks, resume_from="auto")
        trainer.fit(epochs)
        return trainer

    def records(self, trainer):
        return trainer.history

    def best(self, trainer):
        return trainer.best["val_loss"]


class Graphs:
    loss, prefix, count = "loss", "", 4

    def loaders(self):
        return {
            "near": graph_kit.loader(graph_kit.graphs(6, seed=1)),
            "far": graph_kit.loader(graph_kit.graphs(9, seed=2)),
        }

    def run(self, folder, epochs=3, *, loaders=None, metric=None, hooks=()):
        trainer = graph_kit.make(folder, hooks=hooks)
        train = graph_kit.loader(graph_kit.graphs(), shuffle=True)
        named = {} if metric is None else {"metric_for_best": metric}
        trainer.fit(train, self.loaders() if loaders is None else loaders, epochs, resume_from="auto", **named)
        return trainer

    def records(self, trainer):
        return trainer.history["val"]

    def best(self, trainer):
        return trainer.best_metric


class Astro:
    loss, prefix, count = "loss_total", "val_", 4

    def loaders(self):
        kit = astro_trainer_kit
        return {"near": kit.loader(kit.sequences(6, seed=1)), "far": kit.loader(kit.sequences(9, seed=2))}

    def run(self, folder, epochs=3, *, loaders=None, metric=None, hooks=()):
        trainer = astro_trainer_kit.make(folder, hooks=hooks)
        given = self.loaders() if loaders is None else loaders
        trainer.train(epochs, given, resume_from="auto", best_model_metric=metric)
        return trainer

    def records(self, trainer):
        return trainer.history

    def best(self, trainer):
        tree = torch.load(trainer.output_dir / "best.pt", weights_only=True)
        return tree["best_metric"]


faces = pytest.mark.parametrize("face", [Spectra(), Graphs(), Astro()], ids=["spectra", "graphs", "astro"])


@faces
def test_each_is_in_every_record_and_in_the_files_and_the_first_selects(face, tmp_path):
    trainer = face.run(tmp_path)
    near, far = (
        [record[f"{face.prefix}{name}_{face.loss}"] for record in face.records(trainer)] for name in ("near", "far")
    )
    assert len(near) == 3
    assert near != far
    assert not [record for record in face.records(trainer) if f"{face.prefix}{face.loss}" in record]
    assert face.best(trainer) == min(near)
    last = trainer.validate(face.loaders())
    assert last[f"near_{face.loss}"] == near[-1]
    assert last[f"far_{face.loss}"] == far[-1]
    (path,) = tmp_path.glob("*history.json")
    written = json.loads(path.read_text())
    written = written["val"] if isinstance(written, dict) else written
    assert [record[f"{face.prefix}far_{face.loss}"] for record in written] == far


@faces
def test_another_is_named_and_a_run_that_was_killed_ends_as_one_that_was_not(face, tmp_path):
    metric = f"far_{face.loss}"
    straight = face.run(tmp_path / "straight", metric=metric)
    with pytest.raises(Killed):
        face.run(tmp_path / "killed", metric=metric, hooks=[Stop("on_after_step", face.count + 2, kill)])
    resumed = face.run(tmp_path / "killed", metric=metric)
    assert face.best(resumed) == min(record[f"{face.prefix}{metric}"] for record in face.records(resumed))
    without_time = [
        [{key: value for key, value in record.items() if key != "time"} for record in face.records(one)]
        for one in (straight, resumed)
    ]
    assert str(without_time[0]) == str(without_time[1])  # a term without positions is NaN
    for one, other in zip(straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@faces
def test_what_does_not_fit_is_refused_before_step_1(face, tmp_path):
    loaders = face.loaders()
    for given, words in (
        ([*loaders.values()], "val_loader: is a list of loaders"),
        ({}, "val_loader: a dict of loaders must have at least one, with non-empty strings as names"),
        ({"near": []}, r"val_loader\['near'\]: it is empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            face.run(tmp_path, loaders=given)
    with pytest.raises(ConfigError, match=f"far_{face.loss}"):
        face.run(tmp_path, metric="far_los")
    assert not [*tmp_path.rglob("*.pt")]


def test_a_metric_without_a_loader_is_that_of_the_first_and_has_its_direction(tmp_path):
    trainer = Graphs().run(tmp_path, metric="mae")
    assert trainer.best_metric == min(record["near_mae"] for record in trainer.history["val"])
    trainer = Astro().run(tmp_path / "astro", metric="val_loss_img")
    assert Astro().best(trainer) == min(record["val_near_loss_img"] for record in trainer.history)
