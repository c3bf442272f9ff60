"""The names, arguments and numbers of ``qurious.llms.trainer``, where they differ from its document."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import treadle
from functional_kit import loader, net, same_weights
from treadle.checkpoint import load_checkpoint
from treadle.errors import CheckpointError, ConfigError
from treadle.functional.qurious import Trainer

TRAINING = {
    "epochs": 3, "batch_size": 4, "learning_rate": 1e-3, "max_eval_samples": 50, "log_interval": 10,
    "eval_interval": 500, "save_interval": 2, "max_grad_norm": 1.0, "scheduler_step_per_batch": False,
}  # fmt: skip


class Config:
    """Serves its keys by ``__getattr__`` and holds them elsewhere, as that of the package."""

    def __init__(self, data):
        self._data = {key: type(self)(value) if isinstance(value, dict) else value for key, value in data.items()}

    def __getattr__(self, key):
        if key.startswith("_") or key not in self._data:
            raise AttributeError(key)
        return self._data[key]


class Indexed(Config):
    """The same, and it can be read through."""

    def __getitem__(self, key):
        return getattr(self, key)

    def __iter__(self):
        return iter(self._data)


class Lenient(Config):
    """Gives None for what it does not hold."""

    def __getattr__(self, key):
        if key.startswith("__"):
            raise AttributeError(key)
        return vars(self)["_data"].get(key)


@pytest.mark.parametrize("kind", [Config, Indexed, Lenient])
def test_every_setting_of_such_a_config_is_read(kind):
    part = {"training": {"max_grad_norm": 0.5, "scheduler_step_per_batch": True, "learning_rate": 0.7}}
    settings = treadle.Trainer(net(), None, nn.MSELoss(), kind(part), device="cpu").settings
    assert (settings.max_grad_norm, settings.scheduler_step_per_batch, settings.learning_rate) == (0.5, True, 0.7)


def test_a_misspelt_key_is_refused_where_the_keys_can_be_seen_and_an_object_without_any_always():
    with pytest.raises(ConfigError, match="max_grad_norm"):
        treadle.Trainer(net(), None, nn.MSELoss(), Indexed({"training": {"max_grad_nrom": 0.5}}), device="cpu")
    with pytest.raises(ConfigError, match="neither keys nor attributes"):
        treadle.Trainer(net(), None, nn.MSELoss(), Config({"training": {"max_grad_nrom": 0.5}}), device="cpu")


def test_the_keys_of_its_yaml_are_read_or_named(tmp_path, caplog):
    config = {"training": {**TRAINING, "checkpoint_dir": str(tmp_path)}}
    trainer = treadle.Trainer(net(), None, nn.MSELoss(), config, device="cpu")
    assert "config.training.eval_interval=500 has no effect" in caplog.text
    trainer.train(loader(), 5)
    written = {path.name for path in tmp_path.glob("checkpoint_*")}
    assert {"checkpoint_epoch_2.pt", "checkpoint_epoch_4.pt"} <= written
    assert not {"checkpoint_epoch_1.pt", "checkpoint_epoch_3.pt"} & written
    trainer.train(loader(), 6, save_dir=tmp_path / "given", save_freq=1)
    assert (tmp_path / "given" / "checkpoint_epoch_6.pt").exists()
    with pytest.raises(ConfigError, match="save_interval"):
        treadle.Trainer(net(), None, nn.MSELoss(), {"training": {"save_interval": -1}}, device="cpu")


def test_both_orders_of_the_arguments_are_read():
    loss_fn, model = nn.MSELoss(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for trainer in (
        treadle.Trainer(model, loss_fn, optimizer, device="cpu"),
        treadle.Trainer(model, optimizer, loss_fn, device="cpu"),
        Trainer(model, loss_fn, optimizer=optimizer, device="cpu"),
        Trainer(model, loss_fn, optimizer, "cpu"),
    ):
        assert trainer.optimizer is optimizer
        assert trainer.loss_fn is loss_fn
    built = treadle.Trainer(model, loss_fn, device="cpu")
    assert isinstance(built.optimizer, torch.optim.AdamW)
    assert built.loss_fn is loss_fn


def test_without_an_optimizer_its_adamw_over_all_parameters_is_made():
    config = {"training": {"learning_rate": 0.25}}
    trainer = Trainer(net(), nn.MSELoss(), device="auto", config=config)
    (group,) = trainer.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (0.25, 0.01, 4)
    assert trainer._get_default_optimizer(0.001).param_groups[0]["lr"] == 0.001
    assert Trainer(net(), nn.MSELoss(), device="cpu").optimizer.param_groups[0]["lr"] == 1e-4


def test_its_keys_come_back_and_num_epochs_counts_from_the_call(tmp_path):
    paths = {"checkpoint_dir": str(tmp_path)}
    trainer = Trainer(net(), nn.MSELoss(), config={"training": {"save_interval": 1}, "paths": paths}, device="cpu")
    batch = next(iter(loader()))
    assert isinstance(trainer.eval_step(batch)["eval_loss"], float)
    assert set(trainer.evaluate(loader())) == {"eval_loss", "epoch"}
    result = trainer.train(loader(), 2, loader())
    assert (list(result), result["epoch"]) == (["epoch", "train_loss", "lr", "eval_loss"], [1, 2])
    assert result["history"]["eval_loss"] == result["eval_loss"]
    assert result["best_metric_value"] == min(result["eval_loss"])
    assert result["runtime_secs"] > 0
    assert trainer.train(loader(), 1, loader())["epoch"] == [3]
    assert (tmp_path / "checkpoint_epoch_3.pt").exists()
    assert isinstance(trainer.train_step(batch)["train_loss"], float)
    other = Trainer(net(), nn.MSELoss(), device="cpu")
    assert other.load_checkpoint(tmp_path / "checkpoint_epoch_3.pt") == other.epoch == 3
    assert other.train(loader(), 1, loader())["epoch"] == [4]


def test_with_resume_from_the_same_call_goes_on_to_the_same_target(tmp_path):
    def run(epochs, **rest):
        treadle.set_seed(0)
        trainer = Trainer(net(), nn.MSELoss(), device="cpu")
        return trainer, trainer.train(loader(), epochs, save_dir=tmp_path / rest.pop("folder"), **rest)

    straight, expected = run(3, folder="straight")
    run(1, folder="parts")
    resumed, found = run(3, folder="parts", resume_from="auto")
    assert same_weights(straight, resumed)
    assert found == expected


def test_its_checkpoint_arguments_in_both_forms(tmp_path):
    trainer = Trainer(net(), nn.MSELoss(), device="cpu")
    trainer.epoch = 5
    trainer._save_checkpoint(tmp_path / "late.pt", 0.5)
    trainer._save_checkpoint(tmp_path / "early.pt", epoch=7, metric_value=0.25)
    late, early = (load_checkpoint(tmp_path / name) for name in ("late.pt", "early.pt"))
    assert (late["epoch"], late["best_metric"]) == (5, 0.5)
    assert (early["epoch"], early["best_metric"]) == (7, 0.25)
    theirs = torch.load(tmp_path / "early.pt", weights_only=True)
    assert torch.equal(theirs["model_state_dict"]["0.weight"], trainer.model[0].weight)
    assert (theirs["metric_value"], theirs["step"]) == (0.25, 0)
    assert theirs["optimizer_state_dict"].keys() == trainer.optimizer.state_dict().keys()


def test_a_checkpoint_of_the_package_is_taken_over_and_its_next_losses_are_the_same(tmp_path):
    def steps(model, optimizer, count):
        losses = []
        for x, y in [*loader(seed=1), *loader(seed=2)][:count]:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    theirs = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    steps(theirs, optimizer, 6)
    state = {
        "model_state_dict": theirs.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 2, "step": 6,
        "metric_value": 0.5,
    }  # fmt: skip
    torch.save(state, tmp_path / "theirs.pt")
    expected = steps(theirs, optimizer, 3)

    trainer = Trainer(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), nn.MSELoss(), device="cpu")
    assert trainer.load_checkpoint(tmp_path / "theirs.pt") == 2
    assert (trainer.epoch, trainer.step) == (2, 6)
    found = [trainer.train_step(batch)["train_loss"] for batch in loader(seed=1)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_its_scheduler_is_taken_over_without_a_warning(tmp_path, caplog):
    def schedule(trainer):
        return torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.5)

    first = Trainer(net(), nn.MSELoss(), device="cpu")
    scheduler = schedule(first)
    for _ in range(3):
        first.optimizer.step()
        scheduler.step()
    state = {
        "model_state_dict": first.model.state_dict(), "optimizer_state_dict": first.optimizer.state_dict(), "epoch": 3,
        "step": 9, "scheduler_state_dict": scheduler.state_dict(),
    }  # fmt: skip
    torch.save(state, tmp_path / "theirs.pt")
    second = Trainer(net(), nn.MSELoss(), device="cpu")
    second.scheduler = schedule(second)
    second.load_checkpoint(tmp_path / "theirs.pt")
    assert second.scheduler.last_epoch == 3
    assert second.optimizer.param_groups[0]["lr"] == 5e-5
    assert "not taken over" not in caplog.text
    second.load_checkpoint(tmp_path / "theirs.pt", load_scheduler=False)
    assert "not taken over: scheduler_state_dict" in caplog.text
    with pytest.raises(CheckpointError, match="load_foreign"):
        treadle.Trainer(net(), None, nn.MSELoss(), device="cpu").load_checkpoint(tmp_path / "theirs.pt")


def test_files_are_in_the_folder_of_the_run(tmp_path):
    class Run:
        run_path = str(tmp_path / "run")

        def log_metrics(self, metrics):
            pass

    config = {"training": {}, "paths": {"checkpoint_dir": "checkpoints"}}
    Trainer(net(), nn.MSELoss(), config=config, device="cpu", run=Run()).train(loader(), 1)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint_epoch_1.pt").exists()


def test_a_subclass_by_the_keys_of_the_package_acts():
    class Classifies(Trainer):
        def eval_step(self, batch):
            return {**super().eval_step(batch), "accuracy": 0.5}

        def evaluate(self, dataloader):
            losses = [self.eval_step(batch)["eval_loss"] for batch in dataloader]
            return {"eval_loss": sum(losses) / len(losses), "eval_accuracy": 0.5, "epoch": self.epoch}

    class Logged:
        records = []

        def log_metrics(self, metrics):
            self.records.append(metrics["eval_accuracy"])

    trainer = Classifies(net(), nn.MSELoss(), device="cpu", run=Logged())
    result = trainer.train(loader(), 2, loader(), best_model_metric="eval_accuracy")
    assert result["eval_accuracy"] == Logged.records == [0.5, 0.5]
    with pytest.raises(ConfigError, match="log_metrics"):
        Trainer(net(), nn.MSELoss(), device="cpu", run="mlflow")
