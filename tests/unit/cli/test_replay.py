"""``treadle replay``: every step of a run, run again, is what the record says; the run folder is only read."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

from command_kit import leave_the_report_out
from treadle.cli.main import main
from treadle.hooks.steplog import read_steps
from treadle.runs.compare import differences, likely_causes, same
from treadle.runs.replay import Replayed
from treadle.runs.script import run_as_main
from treadle.spectra.runs import PACK

TINY = [
    "epochs=2", "data.max_rows=420", "model.d_model=8", "model.nhead=2", "model.num_layers=1",
    "model.dim_feedforward=8", "model.n_mask=28", "model.dropout=0.1", "schedule.warmup_epochs=1",
    "trainer.accumulation_steps=2",
]  # fmt: skip

SCRIPT = """
import sys
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import treadle
from treadle import BaseTrainer, CheckpointingHook, EmaHook, LoggingHook, JsonlHook, NonFiniteHook, StepLogHook


class Fit(BaseTrainer):
    def build_data_loader(self):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(20, 3, generator=generator)
        y = x.sum(1, keepdim=True)
        y[12] = float("nan")
        return DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True, num_workers=WORKERS)

    def build_model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x), y), {}

    def build_hooks(self):
        hooks = [NonFiniteHook("POLICY"), StepLogHook(), EmaHook(0.9), LoggingHook(1), JsonlHook()]
        return [*hooks, CheckpointingHook(5, None)]


if __name__ == "__main__":
    treadle.set_seed(0)
    Fit(int(sys.argv[2]), workspace=sys.argv[1], device="cpu", grad_clip=1.0).train()
    Path(sys.argv[1], "after.txt").write_text("the script went on after train()")
"""


def treadle(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return left.value.code if isinstance(left.value.code, int) else 0


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict:
    capsys.readouterr()
    found = treadle("replay", "--json", *arguments)
    captured = capsys.readouterr()
    assert found == code, captured.err
    return json.loads(captured.out)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    everything = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size) for path in everything}


@pytest.fixture(autouse=True)
def _logging_is_left_alone():
    level = logging.getLogger("treadle").level
    yield
    assert logging.getLogger("treadle").level == level
    assert logging.getLogger("treadle").handlers == []


@pytest.fixture(scope="module")
def spectra_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "spectra"
    with pytest.MonkeyPatch.context() as patch:
        leave_the_report_out(patch, PACK)  # what follows the training is not replayed
        assert treadle("train", "spectra", *TINY, "--out", out, "--device", "cpu") == 0
    return out


def write_script(folder: Path, *, policy: str = "skip", workers: int = 0) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("POLICY", policy).replace("WORKERS", str(workers)))
    return script


def train(script: Path, out: Path, steps: int) -> None:
    import runpy

    argv = sys.argv
    sys.argv = [str(script), str(out), str(steps)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv


@pytest.fixture(scope="module")
def script_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("script")
    script = write_script(folder)
    train(script, folder / "out", 16)
    return script, folder / "out"


def test_a_spectra_run_keeps_a_record_of_every_step(spectra_run: Path) -> None:
    rows = read_steps(spectra_run / "steps.jsonl")
    assert list(rows) == list(range(1, len(rows) + 1))
    assert len(rows) > 8
    assert all(len(row["losses"]) == 2 for row in rows.values() if row["position"] % 2 == 0)


def test_every_step_of_a_spectra_run_is_equal_to_the_bit(spectra_run: Path, capsys) -> None:
    before = files(spectra_run)
    rows = read_steps(spectra_run / "steps.jsonl")
    for step, row in rows.items():
        values = replayed(capsys, spectra_run, "--step", step, "--device", "cpu")
        assert values["equal"] is True
        assert repr(values["loss"]) == repr(row["loss"])
        assert repr(values["grad_norm"]) == repr(row["grad_norm"])
        assert values["first_difference"] is None
    assert files(spectra_run) == before
    assert values["start"] == "the run's beginning"  # last.pt is that of the last step


def test_a_step_after_a_checkpoint_starts_there(spectra_run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    from treadle.spectra.trainer import SpectraTrainer

    leave_the_report_out(monkeypatch, PACK)
    original = SpectraTrainer._write_epoch

    def only_the_first(self, record):
        if record["epoch"] == 1:
            original(self, record)

    monkeypatch.setattr(SpectraTrainer, "_write_epoch", only_the_first)
    assert treadle("train", "spectra", *TINY, "--out", tmp_path, "--device", "cpu") == 0
    last = max(read_steps(tmp_path / "steps.jsonl"))
    values = replayed(capsys, tmp_path, "--step", last, "--device", "cpu")
    assert Path(values["start"]).parent == tmp_path / "checkpoints"
    assert values["start_step"] == last // 2
    assert values["equal"] is True
    assert (tmp_path / "steps.jsonl").read_text() == (spectra_run / "steps.jsonl").read_text()


@pytest.mark.parametrize(("policy", "workers"), [("skip", 0), ("skip", 2), ("rollback", 0)])
def test_every_step_of_a_script_is_equal_to_the_bit(tmp_path: Path, capsys, policy: str, workers: int) -> None:
    script, out = write_script(tmp_path, policy=policy, workers=workers), tmp_path / "out"
    train(script, out, 16)
    (out / "after.txt").unlink()
    before = files(out)
    rows = read_steps(out / "steps.jsonl")
    assert len(rows) == 16
    assert [row["loss"] is None for row in rows.values()].count(True) >= 2
    for step, row in rows.items() if workers == 0 else list(rows.items())[6::5]:
        values = replayed(capsys, out, "--step", step, "--script", script, "--", out, 16)
        assert values["equal"] is True, values
        assert values["start_step"] == (step - 1) // 5 * 5
        assert (values["loss"], values["reason"]) == (row["loss"], row["reason"] and values["reason"])
        assert (12 in values["sample_ids"][0]) == (not row["applied"])
        assert list(values["layer_norms"]) == ["0", "2"]
        if row["applied"]:
            assert math.hypot(*values["layer_norms"].values()) == pytest.approx(row["grad_norm"], rel=1e-6)
    assert files(out) == before


def test_the_script_does_not_go_on_after_the_step(script_run, tmp_path: Path, capsys) -> None:
    script, out = script_run
    replayed(capsys, out, "--step", 3, "--script", script, "--", tmp_path, 16)
    assert list(tmp_path.iterdir()) == []


def test_an_edited_record_is_reported(script_run, tmp_path: Path, capsys) -> None:
    script, out = script_run[0], Path(shutil.copytree(script_run[1], tmp_path / "out"))
    rows = read_steps(out / "steps.jsonl")
    exact = rows[8]["loss"]
    rows[8]["loss"] = math.nextafter(exact, math.inf)  # one bit
    (out / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    values = replayed(capsys, out, "--step", 8, "--script", script, "--", out, 16, code=3)
    assert values["differences"] == {"loss": [rows[8]["loss"], exact]}
    assert values["first_difference"] == 8
    assert "edited record" in values["likely_causes"][-1]
    capsys.readouterr()
    assert treadle("replay", out, "--step", 8, "--script", script, "--", out, 16) == 3
    shown = capsys.readouterr().out
    assert "DIFFERS" in shown
    assert f"recorded {rows[8]['loss']!r}, replayed {exact!r}" in shown
    values = replayed(capsys, out, "--step", 9, "--script", script, "--", out, 16)
    assert (values["equal"], values["first_difference"]) == (True, 8)


def test_without_a_record_nothing_is_compared(script_run, tmp_path: Path, capsys) -> None:
    script, out = script_run[0], Path(shutil.copytree(script_run[1], tmp_path / "out"))
    (out / "steps.jsonl").unlink()
    assert replayed(capsys, out, "--step", 8, "--script", script, "--", out, 16)["equal"] is None
    treadle("replay", out, "--step", 8, "--script", script, "--", out, 16)
    assert "nothing can be compared" in capsys.readouterr().out


def test_the_saved_batch_is_the_batch(script_run, tmp_path: Path, capsys) -> None:
    script, out = script_run
    path = tmp_path / "batch.pt"
    values = replayed(capsys, out, "--step", 8, "--script", script, "--save", path, "--", out, 16)
    assert values["saved"] == str(path)
    ((x, y),) = torch.load(path, weights_only=True)
    data = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
    assert torch.equal(x, data[values["sample_ids"][0]])
    assert torch.equal(y.nan_to_num(), data.sum(1, keepdim=True)[values["sample_ids"][0]].nan_to_num())


def test_pdb_stops_inside_the_step_with_everything_at_hand(script_run, capsys, monkeypatch) -> None:
    script, out = script_run
    stopped = []

    def hook():
        names = sys._getframe(1).f_locals
        stopped.append((set(names), names["trainer"].step, set(names["grads"])))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    values = replayed(capsys, out, "--step", 8, "--script", script, "--pdb", "--", out, 16)
    ((names, step, grads),) = stopped
    assert {"model", "batch", "grads"} <= names
    assert (step, grads) == (8, {"0.weight", "0.bias", "2.weight", "2.bias"})
    assert values["equal"] is True


def test_a_step_that_ended_the_run_is_replayed(tmp_path: Path, capsys) -> None:
    from treadle import NonFiniteError

    script, out = write_script(tmp_path, policy="raise"), tmp_path / "out"
    with pytest.raises(NonFiniteError) as caught:
        train(script, out, 16)
    rows = read_steps(out / "steps.jsonl")
    assert max(rows) == caught.value.step
    values = replayed(capsys, out, "--step", caught.value.step, "--script", script, "--", out, 16)
    assert (values["equal"], values["applied"], values["loss"]) == (True, False, None)
    assert values["reason"] == "non-finite gradient: raised"
    assert 12 in values["sample_ids"][0]


def test_it_reads_well(script_run, capsys) -> None:
    script, out = script_run
    assert treadle("replay", out, "--step", 8, "--script", script, "--", out, 16) == 0
    shown = capsys.readouterr().out
    for words in (
        "step      8: epoch 2, batch 1; applied",
        "checkpoint_step_5.pt (step 5)",
        "samples",
        "equal to the bit",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", 99], "no such step"),
        (["--step", 3, "--device", "cpu"], "the script decides"),
        (["--step", 3, "--save", "no/such/folder/batch.pt"], "--save"),
    ],
)
def test_wrong_settings_leave_with_2(script_run, capsys, arguments, words) -> None:
    script, out = script_run
    assert treadle("replay", out, *arguments, "--script", script, "--", out, 16) == 2
    assert words in capsys.readouterr().err


def test_what_is_no_run_is_refused_with_2(tmp_path: Path, capsys) -> None:
    assert treadle("replay", tmp_path, "--step", 1) == 2
    assert "config.json" in capsys.readouterr().err
    assert treadle("replay", tmp_path, "--step", 1, "--script", tmp_path / "none.py") == 2
    assert treadle("replay", tmp_path, "--step", 0) == 2
    assert treadle("replay", tmp_path, "extra", "--step", 1) == 2
    script = tmp_path / "nothing.py"
    script.write_text("x = 1\n")
    assert treadle("replay", tmp_path, "--step", 1, "--script", script) == 2
    assert "nothing was trained" in capsys.readouterr().err


def test_an_error_of_the_script_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise KeyError('mine')\n")
    with pytest.raises(SystemExit) as left:
        main(["replay", str(tmp_path), "--step", "1", "--script", str(script)])
    assert left.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: KeyError: 'mine'"
    assert "broken.py, line 1, in <module>: raise KeyError('mine')" in lines[1]


def test_bits_are_compared() -> None:
    assert same(0.1, 0.1)
    assert not same(0.1, 0.1 + 1e-17 + 1e-16)
    assert not same(0.0, -0.0)
    assert same(None, math.inf)
    assert not same(None, 0.0)
    assert same([None, 1.0], [math.nan, 1.0])
    assert differences({"loss": 1.0, "lr": [0.1]}, {"loss": 1.0, "lr": [0.2]}) == {"lr": ([0.1], [0.2])}


def test_causes_are_named_by_what_is_known() -> None:
    seen = Replayed(start_step=4, versions={"torch": "1.0", "numpy": None}, device="cuda:0")
    causes = likely_causes(seen, {"lr": (1, 2)}, 7, own=True)
    assert [
        words in cause for words, cause in zip(["learning rate", "torch 1.0", "CUDA", "unseeded"], causes, strict=True)
    ]
    assert "steps 5 to 6 are equal" in causes[-1]
    causes = likely_causes(Replayed(), {"loss": (1, 2)}, 1, own=True)
    assert "set_seed" in causes[0]
    assert "from the first step" in causes[1]


OF_EPOCHS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import treadle


class Own(treadle.Trainer):
    def train_epoch(self, *args, **kwargs):
        return super().train_epoch(*args, **kwargs)


treadle.set_seed(0)
x = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
kind, folder = sys.argv[1:]
if kind == "EpochTrainer":
    class Task:
        def step(self, model, batch, totals=None, generator=None):
            return treadle.StepOutput(nn.functional.mse_loss(model(batch[0]), batch[1]))

    hooks = [treadle.CheckpointingHook(5, None), treadle.StepLogHook()]
    engine = treadle.Engine(model, optimizer, Task(), scheduler=schedule, hooks=hooks, device="cpu", workspace=folder)
    treadle.EpochTrainer(engine).fit(loader, loader, 3)
else:
    hooks = [treadle.CheckpointingHook(4, None)] if kind == "hook" else []
    make = Own if kind == "Own" else treadle.Trainer
    trainer = make(model, optimizer, nn.MSELoss(), device="cpu", scheduler=schedule, ema_decay=0.9, hooks=hooks)
    trainer.train(loader, 3, loader, save_dir=folder, resume_from="auto", early_stopping_patience=9)
"""


@pytest.mark.parametrize("kind", ["Trainer", "Own", "hook", "EpochTrainer"])
def test_every_step_of_a_script_with_a_trainer_of_epochs_is_equal_to_the_bit(kind, tmp_path, capsys, monkeypatch):
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(OF_EPOCHS)
    monkeypatch.setattr(sys, "argv", [str(script), kind, str(run)])
    run_as_main(script, [kind, str(run)])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for step in (5, 6, 15) if kind == "Trainer" else (8,):
        found = replayed(capsys, run, "--step", step, "--script", script, "--", kind, run)
        assert found["equal"] is True
        near = 4 if kind == "hook" else 5
        assert found["start_step"] in ((step - 1) // 5 * 5, (step - 1) // near * near)
        assert len(found["sample_ids"][0]) == 4
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
