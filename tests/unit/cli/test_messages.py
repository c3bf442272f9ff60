"""What goes wrong is said in one message, with the fix, and without a traceback from inside."""

from __future__ import annotations

import json
import re
import sys
import textwrap

import pytest

from command_kit import treadle
from treadle import BaseTrainer, ConfigError
from treadle.cli.user_errors import described

TRAINER = """
    import torch
    from torch import nn
    from treadle import BaseTrainer, CheckpointingHook

    class Fit(BaseTrainer):
        def __init__(self, max_steps, wrong=None, model_cfg=None, **kwargs):
            super().__init__(max_steps, **kwargs)
            self.wrong, self.width = wrong, model_cfg["width"]
        def build_data_loader(self):
            if self.wrong == "file":
                return torch.load("no_such_file.pt")
            return [(torch.ones(4, 3), torch.ones(4, 1))] * 4
        def build_model(self):
            return nn.Linear(self.width, 1).to(self.device)
        def build_optimizer(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.1)
        def build_hooks(self):
            return [CheckpointingHook(2)]
        def forward(self, input):
            if self.wrong == "memory" and self.step == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return self.model(input[0]).mean(), {}
"""
NAMES = iter(f"messages{number}" for number in range(100))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a configuration and its trainer, whose module no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TREADLE_TRACEBACK", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = next(NAMES)
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(TRAINER))
    (tmp_path / "run.yaml").write_text(
        f"imports: [{name}]\nseed: 0\nmodel: {{width: 3}}\n"
        f"trainer: {{type: {name}.Fit, max_steps: 3, workspace: runs, device: cpu, wrong: null}}\n"
    )
    (tmp_path / "a_file").write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("train nofile.yaml", 2, "nofile.yaml: no such configuration file; did you mean 'run.yaml'?"),
        ("train run.yaml trainer.max_step=3", 2, "did you mean 'trainer.max_steps'?"),
        ("train run.yaml width=3", 2, "did you mean 'model.width'?"),
        ("train run.yaml trainer.max_steps=three", 2, "trainer.max_steps is 3, a number, and 'three' is a string"),
        ("train run.yaml trainer.device=cuda", 2, "device='cuda' is not available here; available: cpu"),
        ("train run.yaml +trainer.trackers=wanb", 2, "there is no tracker 'wanb'; did you mean 'wandb'?"),
        ("train run.yaml trainer.workspace=a_file/runs", 2, "a_file is not a folder; choose another folder"),
        ("train spectra epoch=3", 2, "unknown setting 'epoch'; did you mean 'epochs'?"),
        ("train spectra epochs=three", 2, "epochs=three: must be int, but this is the str 'three'"),
        ("train spectra --device cuda", 2, "device='cuda' is not available here"),
        (
            "train spectra --out a_file/x data.max_rows=80 epochs=1",
            2,
            "--out a_file/x: a_file is not a folder; choose another folder",
        ),
        ("train spektra", 2, "No such command 'spektra'. Did you mean 'spectra'?"),
        ("verify spektra", 2, "did you mean 'spectra'?"),
        ("verify nofile.py", 2, "must be a script that exists"),
        ("inspect nofile", 2, "no such file or folder"),
        ("inspect a_file", 1, None),
        ("evaluate norun", 2, "'norun'"),
        ("evaluate a_file", 1, "damaged or truncated"),
        ("predict norun", 2, "'norun'"),
        ("replay norun --step 1", 2, "RUN='norun': no such folder"),
        ("export norun --to torch", 2, "no such file or folder"),
        ("export a_file --to torch", 1, "neither a torch, a safetensors nor a pickle file"),
        ("new spektra", 2, "did you mean 'spectra'?"),
        ("trian spectra", 2, "No such command 'trian'. Did you mean 'train'?"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*CUDA initialization.*")
def test_what_is_wrong_is_said_in_one_line_and_the_exit_code_tells_whose_fault_it_is(
    project, monkeypatch, capsys, arguments, code, words
):
    if "cuda" in arguments:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert treadle(*arguments.split()) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    errors = [line for line in captured.err.splitlines() if line.lower().startswith("error")]
    assert len(errors) == (words is not None)
    assert words is None or words in errors[0]


def test_a_wrong_shape_names_the_place_in_the_users_file_and_what_the_loader_gave(project, capsys):
    assert treadle("train", "run.yaml", "model.width=2") == 1
    lines = capsys.readouterr().err.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("error: "))
    assert lines[at].replace("addmm: ", "") == (  # torch 2.15 names the operator
        "error: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 2x1)"
    )
    told = lines[at + 1 :]
    if sys.version_info >= (3, 11):
        assert told.pop(0) == "  in step 1, epoch 1; what the loader gave: (float32 (4, 3), float32 (4, 1))"
    assert told[0].startswith("  messages")
    assert told[0].endswith("in forward: return self.model(input[0]).mean(), {}")
    assert told[1:] == ["  TREADLE_TRACEBACK=1 shows the whole traceback"]


def test_a_value_of_the_wrong_type_for_a_part_is_named_with_its_section_and_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    assert treadle("new", "config", ".") == 0
    assert treadle("train", "run.yaml", "optimizer.lr=fast", "trainer.device=cpu") == 2
    wrong = "override 'optimizer.lr=fast': optimizer.lr is 0.003, a number, and 'fast' is a string"
    assert f"error: {wrong}" in capsys.readouterr().err
    config = (tmp_path / "run.yaml").read_text()
    line = next(number for number, text in enumerate(config.splitlines(), 1) if "lr: " in text)
    (tmp_path / "run.yaml").write_text(re.sub(r"\blr: [\de.-]+", "lr: fast", config))
    assert treadle("train", "run.yaml", "trainer.device=cpu") == 2
    sys.modules.pop("train", None)
    assert capsys.readouterr().err.rstrip().endswith(f"but this is a string (run.yaml, line {line})")


def test_a_syntax_error_in_the_users_file_is_named_with_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "not_python.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "run.yaml").write_text("seed: 0\nimports: [not_python.py]\ntrainer: {type: T}\n")
    assert treadle("train", "run.yaml") == 1
    assert capsys.readouterr().err == "error: SyntaxError: invalid syntax\n  not_python.py, line 2: def f(:\n"


def test_a_file_that_the_users_code_misses_is_named_with_the_line(project, capsys):
    assert treadle("train", "run.yaml", "trainer.wrong=file") == 1
    error = capsys.readouterr().err
    assert "error: FileNotFoundError: [Errno 2] No such file or directory: 'no_such_file.pt'" in error
    assert 'in build_data_loader: return torch.load("no_such_file.pt")' in error
    assert "Traceback" not in error


def test_out_of_memory_says_what_to_change_and_saves(project, capsys):
    assert treadle("train", "run.yaml", "trainer.wrong=memory") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: out of memory at step 2 on cpu with micro-batches of 4")
    assert "a batch size of 2 and gradient_accumulation_steps=2" in error
    assert "Step 1 was saved" in error
    assert (project / "runs/checkpoints/checkpoint_step_1.pt").is_file()
    assert treadle("train", "run.yaml") == 0
    assert "checkpoint_step_1.pt" in capsys.readouterr().err


def test_the_whole_traceback_is_there_for_who_asks(project, monkeypatch):
    monkeypatch.setenv("TREADLE_TRACEBACK", "1")
    from treadle.cli.main import main

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        main(["train", "run.yaml", "model.width=2"])


def test_an_error_that_passed_no_code_of_the_users_keeps_its_traceback():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    error = caught.value
    assert "test_messages.py, line" in described(error)
    assert described(error.with_traceback(error.__traceback__.tb_next)) is None


@pytest.mark.parametrize("setting", [{"grad_clip": "1"}, {"gradient_accumulation_steps": 2.0}])
def test_a_setting_of_the_wrong_type_is_refused_before_anything_is_built(setting):
    with pytest.raises(ConfigError, match=r"must be a number|a whole number"):
        BaseTrainer(3, device="cpu", **setting)
