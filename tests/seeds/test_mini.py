"""Every Python block of the mini.trainer document runs after its import lines are rewritten, and trains."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import treadle

_spec = importlib.util.spec_from_file_location("seed_blocks", Path(__file__).parent / "blocks.py")
seed_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seed_blocks)

ROOTS = {
    "mini.trainer": "treadle", "mini.config": "treadle.config", "mini.builder": "treadle.builder",
}  # fmt: skip
DEVICE = repr("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [seed_blocks.rewrite_imports(block, ROOTS) for block in seed_blocks.python_blocks("mini")]
    assert len(found) == 19
    return [block.replace('"cuda"', DEVICE) for block in found]


def quick_tour(blocks):
    """Run the first block with its ``...`` filled: 784 features, ten classes."""
    names = {"data": TensorDataset(torch.randn(128, 784), torch.randint(0, 10, (128,)))}
    exec(blocks[0].replace("dataset = ...", "dataset = data"), names)
    return names


def test_the_quick_tour_trains(blocks, tmp_path):
    names = quick_tour(blocks)
    exec(blocks[1].replace("10_000", "5"), names)
    trainer = names["trainer"]
    assert (trainer.step, trainer.applied_steps) == (5, 5)
    assert trainer.micro_steps == 20
    assert trainer.workspace == tmp_path / "runs" / "experiment_1"
    assert "accuracy" in trainer.step_info["records"][0]


def test_the_hooks_block_trains_logs_and_saves(blocks, tmp_path, capsys):
    names = quick_tour(blocks)
    block = blocks[2].replace("class MyTrainer(BaseTrainer):", "class MyTrainer(Same):")
    names["Same"] = names["MyTrainer"]
    exec(block, names)
    trainer = names["MyTrainer"](max_steps=100, workspace=tmp_path, device=eval(DEVICE))
    trainer.train()
    assert capsys.readouterr().out.startswith("Step 100: {'train': {'accuracy': ")
    assert (tmp_path / "checkpoints" / "checkpoint_step_100.pt").exists()


def test_the_state_block_continues_to_the_bit(blocks, tmp_path):
    names = quick_tour(blocks)

    def make(steps=6):
        treadle.set_seed(0)
        return names["MyTrainer"](max_steps=steps, device=eval(DEVICE))

    straight = make()
    straight.train()
    names["trainer"] = make(3)
    names["trainer"].train()
    assert "MyTrainer(...)" in blocks[3]
    names["make"] = make
    exec(blocks[3].replace("MyTrainer(...)", "make()"), names)
    assert names["trainer"].step == 6
    for a, b in zip(straight.model.parameters(), names["trainer"].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_built_in_hook_is_made_as_documented(blocks):
    names = {"signal": signal}
    exec("from treadle import *", names)
    for block in (blocks[4], blocks[5], *blocks[7:12]):
        made = eval(compile(block.strip().replace("# ... (other wandb.init arguments)", ""), "mini.md", "eval"), names)
        assert isinstance(made, treadle.BaseHook)


def test_the_log_block_is_a_method_that_both_logs_and_leaves_the_trackers_served(blocks, tmp_path, capsys):
    names = quick_tour(blocks)
    body = "\n".join("    " + line for line in blocks[6].splitlines())
    names["Same"] = names["MyTrainer"]
    exec(f"class Logging(Same):\n{body}\n", names)
    seen = []

    class Tracker(treadle.BaseHook):
        def on_log(self, trainer, records, dry_run=False):
            seen.append(trainer.step)

    names["Logging"].build_hooks = lambda self: [treadle.LoggingHook(2), Tracker()]
    names["Logging"](max_steps=4, device=eval(DEVICE)).train()
    assert seen == [2, 4]
    assert capsys.readouterr().out.count("Step ") == 2


def test_custom_hooks_and_unwrapping_run_as_documented(blocks, capsys):
    names = quick_tour(blocks)
    exec(blocks[13], names)
    names["ProgressHook"] = treadle.ProgressHook
    exec(blocks[14], names)
    names["MyTrainer"].build_hooks = names["build_hooks"]
    names["trainer"] = names["MyTrainer"](max_steps=100, device=eval(DEVICE))
    names["trainer"].train()
    assert capsys.readouterr().out == "Custom hook triggered at step 100\n"
    exec(blocks[12], names)
    assert names["unwrapped"] is names["trainer"].model


def test_the_utilities_give_what_the_document_says(blocks):
    names = {"torch": torch}
    exec(blocks[15], names)
    assert names["output"]["x"].shape == (2, 3)
    assert names["output"]["y"][0].device.type == eval(DEVICE)
    exec(blocks[16], names)
    assert names["avg"] == pytest.approx({"loss": 0.55, "metrics": pytest.approx({"acc": 0.875})})


class Digits(DataLoader):
    def __init__(self, batch_size, num_workers):
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(96, 8, generator=generator), torch.randint(0, 3, (96,), generator=generator))
        super().__init__(data, batch_size=batch_size, num_workers=num_workers, shuffle=True)


class MyModel(torch.nn.Linear):
    def __init__(self, hidden_size):
        super().__init__(8, 3)
        self.hidden_size = hidden_size


def test_the_integration_example_runs_with_the_working_call(blocks, tmp_path, monkeypatch):
    """The document passes the trainer's sub-configs nowhere; the call that works is in its last three lines here."""
    from treadle.builder import REGISTRY

    for made in (Digits, MyModel):
        REGISTRY.register()(made)
    (tmp_path / "configs").mkdir()
    config = blocks[17].replace('"data": {"batch_size": 32', '"data": {"type": "Digits", "batch_size": 32')
    (tmp_path / "configs" / "train.py").write_text(config.replace('"num_workers": 4', '"num_workers": 0'))
    names = {"torch": torch, "__name__": "train"}
    script = blocks[18].replace(
        'build_from_cfg(cfg["trainer"], recursive=True)',
        'build_from_cfg(cfg["trainer"] | {"max_steps": 4, "grad_clip": 1.0}, data_cfg=cfg["data"], '
        'model_cfg=cfg["model"], optimizer_cfg=cfg["optimizer"])',
    )
    assert script != blocks[18]
    monkeypatch.setitem(sys.modules, "train", None)
    exec(script, names)
    assert names["trainer"].step == 4
    assert isinstance(names["trainer"].model, MyModel)
    assert (tmp_path / "runs/experiment_1/checkpoints/checkpoint_step_4.pt").exists()


def test_images_reach_the_disk_as_documented(blocks, tmp_path):
    names = quick_tour(blocks)
    names["MyTrainer"].build_hooks = lambda self: [treadle.ImageFileLoggerHook(interval=2, path="images", max_images=8)]
    trainer = names["MyTrainer"](max_steps=2, workspace=tmp_path, device=eval(DEVICE))
    trainer.train()
    trainer.log_images({"image_name": Image.new("RGB", (4, 4))})
    assert (tmp_path / "images" / "2" / "image_name.png").exists()
