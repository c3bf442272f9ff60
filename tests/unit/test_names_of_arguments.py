"""Wrong names of arguments of ``train`` and ``fit``: the error suggests the right ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import astro_trainer_kit
import graph_kit
import spectra_kit
from treadle import Trainer
from treadle.astro import AstroTrainer
from treadle.spectra.chemomae import Trainer as ChemomaeTrainer


def functional(folder):
    model = nn.Linear(2, 1)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())


def astro(folder):
    return AstroTrainer(
        astro_trainer_kit.model(), astro_trainer_kit.VOCAB, astro_trainer_kit.loader(),
        **astro_trainer_kit.codebooks(), device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "call", "given", "meant"),
    [
        (functional, "train", "epochs", "num_epochs"),
        (functional, "train", "eval_loader", "eval_dataloader"),
        (spectra_kit.make, "fit", "num_epochs", "epochs"),
        (graph_kit.make, "fit", "max_epochs", "epochs"),
        (graph_kit.make, "fit", "metric_for_best_model", "metric_for_best"),
        (astro, "train", "epochs", "num_epochs"),
    ],
)
def test_a_wrong_name_is_named_with_the_right_one(tmp_path, make, call, given, meant):
    with pytest.raises(TypeError, match=rf"{call}\(\) got an unexpected argument '{given}'; did you mean '{meant}'\?"):
        getattr(make(tmp_path), call)([], **{given: 2})


def test_the_trainers_of_other_packages_suggest_too():
    with pytest.raises(TypeError, match="did you mean 'epochs'"):
        ChemomaeTrainer.fit(object(), num_epochs=2)


@pytest.mark.parametrize("minimize", [True, False, None])
def test_a_direction_against_the_name_of_the_metric_is_named(tmp_path, caplog, minimize):
    batches = graph_kit.loader(graph_kit.graphs(8))
    graph_kit.make(tmp_path).fit(batches, batches, 1, "mae", minimize)
    named = "minimize_metric=False: the name of val_mae means that lower is better" in caplog.text
    assert named is (minimize is False)
