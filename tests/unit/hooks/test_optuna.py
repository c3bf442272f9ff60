"""OptunaPruningHook: reports each value once, prunes in every face, and a study runs with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle

optuna = pytest.importorskip("optuna", reason="the extra tune is not installed")
optuna.logging.set_verbosity(optuna.logging.ERROR)


class Trial:
    """Prunes from a step on."""

    def __init__(self, prune_at=99):
        self.reports, self.prune_at = [], prune_at

    def report(self, value, step):
        self.reports.append((step, value))

    def should_prune(self):
        return bool(self.reports) and self.reports[-1][0] >= self.prune_at


def data():
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)


def trainer(hook, rate=0.1):
    treadle.set_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return treadle.Trainer(model, optimizer, nn.MSELoss(), device="cpu", progress=False, hooks=[hook])


class Fit(treadle.BaseTrainer):
    def build_data_loader(self):
        return data()

    def build_model(self):
        return nn.Linear(2, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, batch):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1]), {}


def test_each_epoch_is_reported_and_the_run_is_pruned_after_one():
    trial = Trial(prune_at=3)
    made = trainer(treadle.OptunaPruningHook(trial, "eval_loss"))
    with pytest.raises(optuna.TrialPruned, match="pruned at 3"):
        made.train(data(), 5, data())
    assert made.epoch == 3
    assert trial.reports == list(zip([1, 2, 3], made.history["eval_loss"], strict=True))


@pytest.mark.parametrize("first", [True, False])
def test_validations_of_the_step_face_are_reported_under_their_steps(first):
    trial = Trial(prune_at=4)
    hooks = [treadle.OptunaPruningHook(trial, "val_loss"), treadle.ValidationHook(data(), interval=2)]
    made = Fit(10, device="cpu", progress=False, hooks=hooks if first else hooks[::-1])
    with pytest.raises(optuna.TrialPruned):
        made.train()
    assert [step for step, _ in trial.reports] == [2, 4]
    assert trial.reports == [(record["step"], record["val_loss"]) for record in hooks[1].history]


def test_a_resumed_trial_reports_no_step_twice(tmp_path):
    trial = Trial()
    for epochs in (2, 4):
        made = trainer(treadle.OptunaPruningHook(trial, "eval_loss"))
        made.train(data(), epochs, data(), save_dir=tmp_path, resume_from="auto")
    assert [step for step, _ in trial.reports] == [1, 2, 3, 4]


def test_a_study_prunes_bad_rates():
    def objective(trial):
        rate = trial.suggest_categorical("lr", [0.1, 1e-6, 1e-7])
        hook = treadle.OptunaPruningHook(trial, "eval_loss")
        return min(trainer(hook, rate).train(data(), 3, data())["eval_loss"])

    space = {"lr": [0.1, 1e-6, 1e-7]}
    study = optuna.create_study(
        sampler=optuna.samplers.GridSampler(space, seed=0), pruner=optuna.pruners.MedianPruner(1, 0)
    )
    study.enqueue_trial({"lr": 0.1})
    study.optimize(objective, n_trials=3)
    states = [trial.state for trial in study.trials]
    assert states[0] == optuna.trial.TrialState.COMPLETE
    assert optuna.trial.TrialState.PRUNED in states
    assert study.best_params == {"lr": 0.1}


def test_a_metric_that_no_record_has_is_named():
    with pytest.raises(treadle.ConfigError, match=r"metric='eval_acc'.*eval_loss"):
        trainer(treadle.OptunaPruningHook(Trial(), "eval_acc")).train(data(), 1, data())


def test_what_is_no_trial_is_refused():
    with pytest.raises(treadle.ConfigError, match="has no report"):
        treadle.OptunaPruningHook(3, "eval_loss")
