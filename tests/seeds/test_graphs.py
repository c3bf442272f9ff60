"""Every Python block of the training document of the graph pack runs after its import lines are rewritten."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from graph_data_kit import DataLoader
from graph_kit import graphs, loader, make, model_of
from treadle.checkpoint import load_checkpoint
from treadle.graphs import GraphTrainer, get_optimizer, get_scheduler

_spec = importlib.util.spec_from_file_location("seed_blocks", Path(__file__).parent / "blocks.py")
seed_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seed_blocks)


@pytest.fixture
def blocks():
    found = []
    for block in seed_blocks.python_blocks("graphs"):
        one_line = block.replace("from src.training import (", "from treadle.graphs import (")
        found.append(seed_blocks.rewrite_imports(one_line, {"src.": "treadle.graphs"}))
    return found


def find(blocks, text):
    (block,) = [block for block in blocks if text in block]
    return block


def trained(folder=None, epochs=2):
    data = loader(graphs(8))
    trainer = make(folder, scheduler=lambda o: get_scheduler(o, total_epochs=5, warmup_epochs=1))
    trainer.fit(data, data, epochs=epochs)
    return trainer, data


def test_the_document_has_eleven_blocks(blocks):
    assert len(blocks) == 11


def quick_start(blocks, dataset):
    """The block with another data set and fewer epochs, and nothing else."""
    block = find(blocks, "# Load dataset")
    block = block.replace('name="zinc"', dataset)
    return block.replace("train_loader, val_loader, epochs=100)", "train_loader, val_loader, epochs=2)")


def test_the_quick_start_trains_on_real_molecules(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = quick_start(blocks, 'name="nci"')
    exec(block.replace("dataset.get_splits()", "(part[:64] for part in dataset.get_splits())"), names := {})
    history = names["history"]
    assert [record["epoch"] for record in history["train"]] == [1, 2]
    assert history["train"][1]["loss"] < history["train"][0]["loss"]
    assert names["trainer"].global_step == 4
    assert {path.name for path in Path("checkpoints").glob("*.*t*")} >= {"best.pt", "last.pt"}
    assert json.loads(Path("checkpoints/history.json").read_text()) == history
    # The checkpoint holds what the document lists, under these names and of these kinds.
    documented = find(blocks, '"model": model.state_dict()')
    tree = load_checkpoint("checkpoints/best.pt")
    for line in documented.splitlines()[1:-1]:
        key, kind = (part.strip(' ",') for part in line.split(":"))
        expected = {"int": int, "float": float}.get(kind, dict)
        assert isinstance(tree[key], expected), key
    test_loader = DataLoader(names["test_data"], batch_size=32)
    assert names["trainer"].predict(test_loader).shape == (64, 1)


def test_the_initialisation_block_is_our_constructor(blocks):
    block = find(blocks, "# Loss function (optional, auto-inferred)")
    documented = [line.split("=")[0].strip() for line in block.splitlines() if "=" in line and "trainer" not in line]
    ours = list(inspect.signature(GraphTrainer).parameters)
    assert documented == [name for name in ours if name in documented]
    model = model_of()
    optimizer = get_optimizer(model)
    names = {
        "Trainer": GraphTrainer, "model": model, "optimizer": optimizer, "scheduler": None, "loss_fn": None,
        "metrics": None,
    }  # fmt: skip
    exec(block.replace('device="cuda"', 'device="cpu"'), names)
    assert names["trainer"].task_type == "regression"


def test_the_methods_block_runs(blocks, tmp_path):
    trainer, data = trained(tmp_path, epochs=1)
    names = {"trainer": trainer, "train_loader": data, "val_loader": data, "test_loader": loader(graphs(5, seed=1))}
    exec(find(blocks, "# One training epoch").replace("epochs=100", "epochs=3"), names)
    assert set(names["train_metrics"]) == {"loss", "mse", "mae", "rmse", "lr", "time"}
    assert set(names["val_metrics"]) == {"loss", "mse", "mae", "rmse"}
    assert names["history"]["train"][-1]["epoch"] == 3
    assert (tmp_path / "model.pt").exists()
    assert names["predictions"].shape == (5, 1)


def test_the_loss_block_builds_losses(blocks):
    block = find(blocks, "import get_loss_fn\n")
    names, built = {}, []
    for line in block.splitlines():
        exec(line, names)
        if "loss_fn" in names and line.startswith("loss_fn"):
            built.append((names["loss_fn"].task_type, names["loss_fn"].loss_type))
    assert built == [
        ("regression", "mse"), ("classification", "cross_entropy"), ("classification", "bce_logits"),
        ("edge_prediction", "bce_logits"),
    ]  # fmt: skip


def test_the_metrics_block_has_the_documented_names(blocks):
    block = find(blocks, "import get_metrics\n")
    names: dict[str, object] = {}
    documented = None
    for line in block.splitlines():
        exec(line, names)
        if line.startswith("#"):
            documented = line.split(": ")[1].split(", ")
        elif line.startswith("metrics"):
            assert [name.replace("@100", "@k") for name in names["metrics"].names] == documented


def test_the_optimizer_and_scheduler_blocks_run(blocks):
    names = {"model": model_of()}
    exec(find(blocks, "import get_optimizer\n"), names)
    assert isinstance(names["optimizer"], torch.optim.AdamW)
    first, second = find(blocks, "import get_scheduler\n").split("# Step LR")
    exec(first, names)
    assert names["scheduler"].get_last_lr() == pytest.approx([1e-7, 1e-7])
    names["optimizer"] = get_optimizer(names["model"], lr=1e-4)
    names["get_scheduler"] = get_scheduler
    exec(second, names)
    assert isinstance(names["scheduler"], torch.optim.lr_scheduler.StepLR)


def test_the_reproducibility_block_runs_and_restores_every_flag(blocks):
    import treadle

    with treadle.ReproducibilityContext(0):
        drawn = []
        for _ in range(2):
            names = {"train_model": lambda *_: float(torch.rand(1))}
            exec(find(blocks, "# Reproducibility context"), names)
            drawn.append(names["result"])
        assert drawn[0] == drawn[1]
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


class Logged:
    """Stands for wandb: it would talk to a service."""

    def __init__(self):
        self.lines = []

    def init(self, project):
        assert project == "mspe"

    def log(self, metrics, step):
        self.lines.append((step, metrics))


def test_the_hooks_block_logs_to_both_trackers_on_one_axis(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    service = Logged()
    module = types.ModuleType("wandb")
    module.init, module.log = service.init, service.log
    monkeypatch.setitem(sys.modules, "wandb", module)
    trainer, data = trained(epochs=0)
    exec(find(blocks, "# TensorBoard"), names := {"trainer": trainer})
    trainer.fit(data, data, epochs=2)
    names["writer"].close()
    assert [step for step, _ in service.lines] == [2, 2, 4, 4]
    assert set(service.lines[1][1]) == {"val/loss", "val/mse", "val/mae", "val/rmse"}
    assert list(Path("runs/experiment").iterdir())


def test_the_utilities_block_runs_inside_a_loop(blocks, caplog):
    block = find(blocks, "EarlyStopping,")
    names = {"model": model_of(), "val_loss": 1.0}
    imports, rest = block.split(")\n", 1)
    exec(f"{imports})", names)
    body = "\n".join(f"    {line}" for line in rest.splitlines())
    with caplog.at_level("INFO", "treadle.graphs"):
        exec(f"for _ in range(1):\n{body}", names)
    assert "parameters" in caplog.text
    assert names["accumulator"].accumulation_steps == 4
    assert isinstance(names["device"], torch.device)
