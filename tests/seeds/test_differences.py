"""Every line under "Differences" of four pages, one function each, named after the line."""

from __future__ import annotations

import math
import queue
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import graph_data_kit
from functional_kit import Given, constant, evaluations, loader, make, net, scalar
from graph_kit import graphs as graph_list
from graph_kit import loader as graph_loader
from graph_kit import make as make_graphs
from treadle import (
    BaseTrainer,
    CheckpointingHook,
    EmaHook,
    LoggingHook,
    NonFiniteHook,
    ProgressHook,
    Trainer,
    WandbHook,
    key_average,
)  # fmt: skip
from treadle.builder import Registry, build_from_cfg
from treadle.checkpoint import load_checkpoint
from treadle.config import apply_overrides, format_config, load_config, save_config
from treadle.errors import ConfigError, NonFiniteError
from treadle.functional.qurious import Trainer as PackageTrainer
from treadle.graphs import get_dataset, get_loss_fn, get_metrics, get_scheduler, lap_pe, mspe, parse_pe_config
from treadle.graphs import long_range as lr
from treadle.graphs.loops import run_eval_loop
from treadle.graphs.probes import PathParityProbe
from treadle.graphs.profiling import count_flops

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"


def lines():
    for page in ("qurious", "mini", "trainloop", "mspe"):
        listed = (PAGES / f"{page}.md").read_text(encoding="utf-8").split("## Differences")[1]
        for name in re.findall(r"^- \*\*(.+?)\*\*:", listed, flags=re.MULTILINE):
            yield f"{page}_{name.lower().replace(' ', '_')}"


@pytest.mark.parametrize("name", list(lines()))
def test_a_line_of_a_page_is_true(name, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    check = globals()[name]
    given = {"tmp_path": tmp_path, "caplog": caplog}
    check(**{key: given[key] for key in check.__code__.co_varnames[: check.__code__.co_argcount]})


# -- qurious -----------------------------------------------------------------------------------------------------------


def qurious_epochs():
    trainer = make()
    trainer.train(loader(), 3)
    assert trainer.train(loader(), 5)["epoch"] == [1, 2, 3, 4, 5]
    theirs = PackageTrainer(net(), nn.MSELoss(), device="cpu")
    theirs.train(loader(), 3)
    assert theirs.train(loader(), 2)["epoch"] == [4, 5]


def qurious_history():
    history = make().train(loader(), 1, loader())
    assert list(history) == ["epoch", "train_loss", "lr", "eval_loss"]
    assert type(history["train_loss"][0]) is float


def qurious_mean_loss():
    batches = [constant(1.0, size=4), constant(2.0, size=4), constant(4.0, size=2)]
    assert scalar().train(batches, 1)["train_loss"] == [2.0]  # the mean of the batches is 7/3


def qurious_direction():
    values = [0.1, 0.3, 0.2]
    trainer = scalar(evaluations(values, "accuracy"))
    trainer.train([constant(1)], 3, [constant(1)], best_model_metric="accuracy")
    assert trainer.best_epoch == 2
    with pytest.raises(ConfigError, match="best_mode"):
        scalar(evaluations(values, "oddness")).train([constant(1)], 1, [constant(1)], best_model_metric="oddness")


def qurious_missing_metric():
    with pytest.raises(ConfigError, match="best_model_metric='eval_acuracy'"):
        make().train(loader(), 1, loader(), best_model_metric="eval_acuracy")
    trainer = make()
    losses = trainer.train(loader(), 2, best_model_metric="eval_loss")["train_loss"]
    assert trainer.best_metric == min(losses)
    with pytest.raises(ConfigError, match="best_model_metric='eval_accuracy'"):
        make().train(loader(), 1, best_model_metric="eval_accuracy")


def qurious_unknown_keys(caplog):
    with pytest.raises(ConfigError, match="did you mean 'max_grad_norm'"):
        make(max_grad_nrom=1.0)
    make(eval_interval=5)
    assert "config.training.eval_interval=5 has no effect" in caplog.text


def qurious_errors():
    class Fails(Given):
        def train_step(self, batch):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        scalar(Fails).train([constant(1)], 1)


def qurious_interrupts(tmp_path):
    class Interrupted(Given):
        def _compute_loss(self, outputs, targets):
            if self.step == 1:
                signal.raise_signal(signal.SIGINT)
            return super()._compute_loss(outputs, targets)

    with pytest.raises(SystemExit):
        scalar(Interrupted).train([constant(1)] * 4, 1, save_dir=tmp_path)
    assert load_checkpoint(tmp_path / "last.pt")["global_step"] in (1, 2)


def qurious_callbacks():
    for trainer, epochs in ((make(), [(0, 1), (1, 2)]), (PackageTrainer(net(), nn.MSELoss()), [(1, 1), (2, 2)])):
        seen = []
        trainer.train(loader(), 2, callbacks=[lambda trainer, epoch, _, seen=seen: seen.append((epoch, trainer.epoch))])
        assert seen == epochs


def qurious_schedulers():
    for kind in (Trainer, PackageTrainer):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        config = {"training": {"scheduler_step_per_batch": True}}
        batches = list(loader())
        given = {"optimizer": optimizer, "loss_fn": nn.MSELoss(), "config": config, "scheduler": scheduler}
        kind(model, **given, device="cpu").train(batches, 2)
        assert scheduler.last_epoch == 2 * len(batches)


def qurious_logged_metrics():
    class Run:
        records = queue.SimpleQueue()

        def log_metrics(self, metrics):
            self.records.put(metrics["epoch"])

    PackageTrainer(net(), nn.MSELoss(), device="cpu", run=Run()).train(loader(), 2)
    assert [Run.records.get(), Run.records.get(), Run.records.empty()] == [1, 2, True]


def qurious_default_optimizer():
    ours, theirs = Trainer(net(), None, nn.MSELoss(), device="cpu"), PackageTrainer(net(), nn.MSELoss(), device="cpu")
    assert [group["weight_decay"] for group in ours.optimizer.param_groups] == [0.01, 0.0]
    assert [group["weight_decay"] for group in theirs.optimizer.param_groups] == [0.01]


class OwnStep(Given):
    def train_step(self, batch):
        self.optimizer.step()
        return {"loss": 1.0}


def qurious_custom_steps(caplog):
    assert scalar(OwnStep).train([constant(1)], 1)["train_loss"] == [1.0]
    assert [record.levelno for record in caplog.records if "the override replaces" in record.getMessage()] == [30]


def qurious_custom_precision():
    with pytest.raises(ConfigError, match="mixed_precision=True"):
        scalar(OwnStep, mixed_precision=True)


def qurious_functions_on_the_object(caplog):
    trainer = make()
    trainer.evaluate = lambda batches: {"loss": 7.0}
    trainer.train_step = lambda batch: {"loss": 0.0}
    assert trainer.train(loader(), 1, loader())["eval_loss"] == [7.0]
    assert "train_step: set on this object" in caplog.text


def qurious_saved_epochs(tmp_path):
    make(save_interval=2, checkpoint_dir=str(tmp_path)).train(loader(), 4)
    assert sorted(path.name for path in tmp_path.glob("checkpoint_*")) == [
        "checkpoint_epoch_2.pt",
        "checkpoint_epoch_4.pt",
    ]


def qurious_folders(tmp_path):
    config = {"training": {}, "paths": {"checkpoint_dir": str(tmp_path / "theirs")}}
    Trainer(net(), None, nn.MSELoss(), config, device="cpu").train(loader(), 1)
    assert list(tmp_path.iterdir()) == []
    PackageTrainer(net(), nn.MSELoss(), config=config, device="cpu").train(loader(), 1)
    assert (tmp_path / "theirs" / "checkpoint_epoch_1.pt").exists()


def qurious_patience():
    trainer = PackageTrainer(net(), nn.MSELoss(), device="cpu")
    values = [1.0, 0.5, 0.7, 0.8]
    trainer.evaluate = lambda batches: {"loss": values.pop(0)}
    trainer.train(loader(), 3, loader(), early_stopping_patience=2)
    assert trainer.train(loader(), 5, loader(), early_stopping_patience=2)["epoch"] == [4]


def qurious_pretrained_models(tmp_path):
    class Saves(nn.Linear):
        def save_pretrained(self, folder, **rest):
            (Path(folder) / "weights").write_text("x")

    make(model=Saves(4, 1)).train(loader(), 1, save_dir=tmp_path)
    assert load_checkpoint(tmp_path / "checkpoint_epoch_1.pt")["model"]["weight"].shape == (1, 4)
    assert (tmp_path / "pretrained" / "weights").exists()


# -- mini and trainloop ------------------------------------------------------------------------------------------------


class Line(BaseTrainer):
    """Its loss is its one weight times the mean of the batch."""

    def __init__(self, batches=None, given=(), factor=1.0, **settings):
        super().__init__(**{"max_steps": 4, "device": "cpu", **settings})
        self.batches = [torch.ones(2, 1)] * 4 if batches is None else batches
        self.given, self.factor, self.seen = list(given), factor, []

    def build_data_loader(self):
        return self.batches

    def build_model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=1.0)

    def build_hooks(self):
        return self.given

    def forward(self, input):
        return self.model(input).mean() * self.factor, {}, len(input)

    def log(self, records, dry_run=False):
        self.seen.append(records)


def write(path, text):
    path.write_text(text)
    return path


def mini_device():
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert Line(device=None).device.type == best


def mini_retries():
    with pytest.raises(NonFiniteError, match="after 1 try"):
        Line(factor=math.inf).train()


def mini_accumulation():
    batches = [torch.full((3, 1), 1.0), torch.full((1, 1), 5.0), torch.full((2, 1), 4.0)]
    trainer = Line(batches, max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    assert trainer.model.weight.item() == 1 - (3 * 1 + 1 * 5) / 4 - 4


def mini_loading_early():
    first = Line()
    first.train()
    second = Line()
    second.load_state_dict(first.state_dict())
    assert second.step == 4


def mini_kept_checkpoints(tmp_path):
    Line(given=[CheckpointingHook(1, keep_previous=2, path=tmp_path)]).train()
    found = sorted(path.name for path in tmp_path.glob("checkpoint_step_*"))
    assert found == ["checkpoint_step_3.pt", "checkpoint_step_4.pt"]


def mini_nan_in_averages():
    records = [{"a": math.nan}, {"a": 3.0}]
    assert math.isnan(key_average(records)["a"])
    assert key_average(records, exclude_nan=True) == {"a": 3.0}


def mini_building():
    class Around(Line):
        def _build(self):
            super()._build()
            self.factor = 2.0

    class Never(Line):
        def _build(self):
            pass

    trainer = Around(max_steps=1)
    trainer.train()
    assert trainer.model.weight.item() == -1.0
    with pytest.raises(ConfigError, match=r"super\(\)\._build\(\)"):
        Never().train()


def mini_custom_steps():
    with pytest.raises(ConfigError, match=r"train_step\(group\)"):
        type("Own", (Line,), {"_run_step": lambda self: None})()


def mini_new_keys():
    assert apply_overrides({}, ["+a.b=1"]) == {"a": {"b": 1}}
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        apply_overrides({"lr": 1}, ["lrr=2"])


def mini_new_lists():
    assert apply_overrides({"tags": []}, ["hooks+=x", "+tags[1]=y"]) == {"tags": [None, "y"], "hooks": ["x"]}
    with pytest.raises(ConfigError, match="did you mean 'tags'"):
        apply_overrides({"tags": []}, ["tagz+=x"])


def mini_types():
    assert apply_overrides({"a": "x", "b": True}, ["a=none", "b=off"]) == {"a": None, "b": False}
    with pytest.raises(ConfigError, match="would change the kind"):
        apply_overrides({"lr": 0.1}, ["lr=fast"])


def mini_removing():
    with pytest.raises(ConfigError, match="has no entry"):
        apply_overrides({"tags": ["a"]}, ["tags-=b"])


def mini_in_place():
    config = {"a": 1}
    assert apply_overrides(config, ["a=2"]) is config


def mini_shared_parents(tmp_path):
    write(tmp_path / "far.py", "config = {'a': 1}")
    write(tmp_path / "one.py", "parents = 'far.py'\nconfig = {'a': 2}")
    write(tmp_path / "two.py", "parents = 'far.py'\nconfig = {'b': 3}")
    assert load_config(write(tmp_path / "end.py", "parents = ['one.py', 'two.py']")) == {"a": 2, "b": 3}


def mini_parameters(tmp_path):
    path = write(tmp_path / "a.py", "def config(lr=1, **params): return {}")
    with pytest.raises(ConfigError, match="unknown parameter 'lrr'"):
        load_config(path, {"lrr": 1})


def mini_printed_configs():
    assert format_config({"a": "b"}) == '{"a": "b"}'


def mini_saved_objects(tmp_path):
    with pytest.raises(ConfigError, match="cannot be saved"):
        save_config({"a": object()}, tmp_path / "a.py")


def mini_registered_names():
    registry = Registry()
    registry.register("net")(dict)
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("net")(list)


def mini_errors():
    for cfg in ({"x": 1}, {"type": "nonexistent.Module"}):
        with pytest.raises(ValueError, match="type"):
            build_from_cfg(cfg)


def mini_copies():
    widths = [1, 2]
    built = build_from_cfg({"type": "types.SimpleNamespace", "widths": widths})
    assert built.widths == widths
    assert built.widths is not widths


def trainloop_device():
    mini_device()


def trainloop_missing_losses():
    class Half(Line):
        def forward(self, input):
            return (None, {}) if input.sum() == 0 else super().forward(input)

    empty, full = torch.zeros(2, 1), torch.ones(2, 1)
    trainer = Half([empty, full, empty, empty, full], max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    assert (trainer.step, trainer.applied_steps, trainer.model.weight.item()) == (2, 1, 0.0)


def trainloop_arguments_of_hooks():
    with pytest.raises(TypeError, match="show_units"):
        ProgressHook(10, show_units=False)
    for wrong in (lambda: CheckpointingHook(2, 1, 3, [3]), lambda: WandbHook("p", {"a": 1})):
        with pytest.raises(ConfigError, match="must be"):
            wrong()


def trainloop_retries():
    mini_retries()


def trainloop_retry_count():
    trainer = Line([torch.full((1, 1), math.inf), torch.ones(1, 1), torch.ones(1, 1)], [LoggingHook(2)], max_steps=2,
                   max_non_finite_grad_retries=1)  # fmt: skip
    trainer.train()
    assert trainer.seen[0]["train"]["retries"] == 1
    assert trainer.step_info["non_finite_grad_retries"] == trainer.step_info["non_finite_grad_retry_count"] == 0
    again = Line([torch.full((1, 1), math.inf), torch.ones(1, 1)], max_steps=1, max_non_finite_grad_retries=1)
    again.train()
    assert again.step_info["non_finite_grad_retries"] == again.step_info["non_finite_grad_retry_count"] == 1


def trainloop_loss_not_finite(tmp_path):
    class Loss(Line):
        def forward(self, input):
            return self.model(input).mean() + math.inf, {}

    trainer = Loss(max_steps=1)
    trainer.train()
    assert trainer.applied_steps == 1
    Line(factor=math.inf, given=[NonFiniteHook("skip")], max_steps=1, workspace=tmp_path).train()
    assert any(tmp_path.rglob("*.json*"))


def trainloop_kept_checkpoints(tmp_path):
    mini_kept_checkpoints(tmp_path / "given")
    Line(given=[CheckpointingHook(1, path=tmp_path / "default")]).train()
    assert [len(list((tmp_path / name).glob("checkpoint_step_*"))) for name in ("given", "default")] == [2, 2]


def trainloop_names_of_checkpoints(tmp_path):
    Line(given=[CheckpointingHook(4, keep_previous=1, keep_steps=[3], path=tmp_path)]).train()
    found = sorted(path.name for path in tmp_path.glob("checkpoint_step_*"))
    assert found == ["checkpoint_step_3.pt", "checkpoint_step_4.pt"]


def trainloop_first_average():
    hook = EmaHook(0.5)
    Line(given=[hook], max_steps=1).train()  # the weight goes from 1 to 0
    assert next(hook.ema_model.parameters()).item() == 0.5


def trainloop_decay():
    assert EmaHook().decay == 0.9999


def trainloop_custom_steps():
    mini_custom_steps()


# -- mspe --------------------------------------------------------------------------------------------------------------


def mspe_undefined_metrics():
    metrics = get_metrics("classification", 1)
    metrics.update(torch.randn(3), torch.ones(3))
    assert math.isnan(metrics.compute()["roc_auc"])


def mspe_unknown_labels():
    pred, target = torch.tensor([1.0, 2.0]), torch.tensor([0.0, math.nan])
    assert get_loss_fn("regression")(pred, target) == 1.0
    metrics = get_metrics("regression")
    metrics.update(pred, target)
    assert metrics.compute()["mse"] == 1.0


def mspe_logits():
    metrics = get_metrics("classification", 1)
    metrics.update(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0, 0, 1]))
    assert metrics.compute()["accuracy"] == pytest.approx(1 / 3)


def mspe_columns():
    pred, target = torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 1])
    expected = nn.functional.cross_entropy(pred, target)
    assert torch.allclose(get_loss_fn("classification", "bce_logits", 2)(pred, target), expected)
    metrics = get_metrics("classification", 2)
    metrics.update(pred, target)
    assert metrics.compute()["accuracy"] == 1.0


def mspe_direction():
    trainer = make_graphs(task_type="classification", model={"num_classes": 2})
    trainer.fit(graph_loader(graph_list(classes=2)), graph_loader(graph_list(classes=2)), epochs=1,
                metric_for_best="accuracy")  # fmt: skip
    assert trainer._epochs.selection["mode"] == "max"


def mspe_mixed_precision():
    assert make_graphs(mixed_precision=True)._engine.precision.name == "bf16"


def mspe_log_hooks():
    seen = set()
    trainer = make_graphs(log_every=1)
    trainer.add_log_hook(lambda metrics, step, prefix: seen.add(prefix))
    trainer.fit(graph_loader(graph_list()), graph_loader(graph_list()), epochs=1)
    assert "step" in seen


def mspe_lists_of_encodings():
    assert list(parse_pe_config({"node": {"types": ["hks", "lap_pe"], "dim": 32}}).node.blocks) == ["lap", "hks"]
    with pytest.raises(ConfigError, match="only the first of a list"):
        parse_pe_config({"relative": {"types": ["spd", "bfs"]}})


def mspe_failing_encodings():
    with pytest.raises(ConfigError, match="nodes are numbered"):
        lap_pe(torch.tensor([[0], [9]]), 2)
    with pytest.raises(ConfigError, match="did you mean 'rwse'"):
        parse_pe_config({"node": {"types": ["rswe"]}})


def mspe_synthetic_targets():
    data = get_dataset("synthetic_ring", num_graphs=10, num_workers=0)
    assert (data.level, data.task_type) == ("edge", "edge_prediction")


def mspe_trees():
    def sizes(**params):
        data = get_dataset("synthetic_tree", num_graphs=10, graph_params=params, num_workers=0)
        return {int(graph.edge_index[0].bincount().max()) for graph in data.train}

    assert len(sizes(num_nodes=20)) > 1
    assert sizes(r=3, h=2) == {4}


def mspe_no_schedule():
    assert get_scheduler(torch.optim.SGD(net().parameters(), lr=0.1), "none") is None


def mspe_evaluation_loop():
    class First(nn.Module):
        def forward(self, batch):
            return batch.x

    made = [graph_data_kit.Data(x=torch.full((1, 1), value), y=torch.zeros(1, 1), edge_index=torch.empty(2, 0).long())
            for value in (1.0, 1.0, 4.0)]  # fmt: skip
    batches = graph_data_kit.DataLoader(made, batch_size=2)
    found = run_eval_loop(First(), batches, get_loss_fn("regression", "mae"), get_metrics("regression"), "cpu")
    assert found["loss"] == 2.0  # the mean of the batches is 2.5


def mspe_receptive_field():
    errors = {(d, d): {"metric": 1.0 + d} for d in range(4)}
    assert lr.find_effective_receptive_field(errors, higher_is_better=False) == 1
    assert lr.LongRangeEvaluator(2).compute()["effective_receptive_field"] == -1


def mspe_operations():
    assert count_flops(nn.Linear(4, 3), torch.ones(2, 4)).total == 2 * 2 * 4 * 3


def mspe_probes():
    before = torch.get_rng_state()
    PathParityProbe(5).generate_path_graph()
    assert torch.equal(before, torch.get_rng_state())


def mspe_counters():
    trainer = make_graphs()
    trainer.fit(graph_loader(graph_list()), graph_loader(graph_list()), epochs=1)
    assert trainer.current_epoch == 1
    for name in ("current_epoch", "best_metric"):
        with pytest.raises(AttributeError):
            setattr(trainer, name, 5)


def mspe_reductions():
    with pytest.raises(TypeError, match="reduction"):
        mspe.RegressionLoss(reduction="sum")
