"""``treadle train FILE``: trains what a configuration says, resumes exactly, and can be replayed from its folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from config_kit import write_project
from helpers import differences
from processes import Forked
from treadle.builder import REGISTRY
from treadle.cli.main import main
from treadle.config import load_config, save_config
from treadle.errors import ConfigError
from treadle.hooks.steplog import read_steps
from treadle.runs.packs import PACKS, find_pack
from treadle.runs.target import PackRun, is_config_file, read_target
from treadle.spectra.runs import PACK as SPECTRA


@pytest.fixture(autouse=True)
def each_project_is_the_first_of_its_process(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(REGISTRY, "_objects", dict(REGISTRY._objects))
    sys.modules.pop("parts", None)
    level = logging.getLogger("treadle").level
    yield
    sys.modules.pop("parts", None)
    assert logging.getLogger("treadle").level == level
    assert logging.getLogger("treadle").handlers == []


def fresh():
    """Forget the project, as a new process would."""
    sys.modules.pop("parts", None)
    REGISTRY._objects.pop("Fit", None)
    REGISTRY._objects.pop("Net", None)


def treadle(*arguments, code=0):
    fresh()
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert left.value.code == code


def state(run, step):
    tree = torch.load(run / "checkpoints" / f"checkpoint_step_{step}.pt", weights_only=True)
    return {key: tree[key] for key in ("model", "optimizer", "ema", "progress", "data", "rng", "hooks", "global_step")}


@pytest.fixture
def config(tmp_path):
    return write_project(tmp_path)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The workspace of a run that nothing stopped."""
    config = write_project(tmp_path_factory.mktemp("straight"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(REGISTRY, "_objects", dict(REGISTRY._objects))
        treadle("train", config)
        fresh()
    return config.parent / "run"


# training


def test_yaml_and_python_files_train_the_same(config, straight, tmp_path):
    cfg = load_config(config)
    assert cfg["imports"] == ["parts.py"]
    cfg["trainer"]["workspace"] = str(tmp_path / "from_python")
    save_config(cfg, tmp_path / "fit.py")
    treadle("train", tmp_path / "fit.py")
    assert differences(state(tmp_path / "from_python", 12), state(straight, 12)) == []
    steps = (tmp_path / "from_python" / "steps.jsonl").read_text()
    assert steps == (straight / "steps.jsonl").read_text()


def test_settings_of_the_command_line_take_effect_and_new_keys_need_a_plus(config, tmp_path, capsys):
    treadle("train", config, "model.width=5", "+model.dropout=0.0", "trainer.max_steps=4")
    assert state(tmp_path / "run", 4)["model"]["layers.0.weight"].shape == (5, 6)
    treadle("train", config, "model.dropout=0.0", code=2)
    assert "a new key needs the form '+model.dropout=0.0'" in capsys.readouterr().err


WRONG = [
    (["trainer.max_step=3"], "no key 'trainer.max_step'; did you mean 'trainer.max_steps'?"),
    (["+trainer.max_step=3"], "trainer.max_step: 'Fit' takes no such argument; did you mean 'max_steps'?"),
    (["+optimzer.lr=3"], "its parts are data, model, optimizer, hooks; did you mean 'optimizer'?"),
    (["trainer.type=Fid"], "trainer.type: 'Fid' is not registered; nearest: 'Fit'"),
    (["imports=['part.py']"], "part.py: no such file; did you mean 'parts.py'?"),
    (["trainer.type=parts.Net", "trainer!=", "+trainer.type=builtins.dict"], "which has no train()"),
    (["+model.widht=3"], "did you mean 'width'?"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_a_wrong_setting_is_one_line_and_exit_code_2(config, tmp_path, capsys, settings, words):
    parts = [] if words != "which has no train()" else ["data!=", "model!=", "optimizer!=", "hooks!="]
    treadle("train", config, *settings, *parts, code=2)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ")
    assert words in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_script_is_sent_to_python_and_a_missing_file_named(config, tmp_path, capsys):
    script = tmp_path / "script.py"
    for text, words in (
        ("trainer.train()", f"it is a training script; run it with `python {script}`"),
        (
            "class Mine: ...",
            "it defines Mine and trains nothing; name the trainer in a configuration, as `type: script.Mine`",
        ),
        ("x = 1", "it trains nothing and defines no config"),
        ("def f(:", "it cannot be read: invalid syntax"),
    ):
        script.write_text(text)
        treadle("train", script, code=2)
        assert words in " ".join(capsys.readouterr().err.split())
    treadle("train", tmp_path / "fit.yml", code=2)
    assert "did you mean 'fit.yaml'?" in capsys.readouterr().err


def test_what_is_missing_for_a_resume_or_a_rerun_is_said(tmp_path, capsys):
    config = write_project(tmp_path, seed="note: null")
    treadle("train", config, "note!=", "hooks=()", "trainer.max_steps=2")
    said = capsys.readouterr().err
    assert "warning: no hook saves checkpoints, so this run cannot resume after a stop" in said
    assert "sets no seed" in said
    fresh()
    treadle("train", write_project(tmp_path), "trainer.max_steps=2")
    said = capsys.readouterr().err
    assert "no hook" not in said
    assert "no seed" not in said
    assert "training starts" in said


def test_the_settings_are_shown_and_nothing_runs(config, tmp_path, capsys):
    treadle("train", config, "model.width=9", "--show-settings")
    shown = eval(capsys.readouterr().out)
    cfg = load_config(config)
    cfg["model"]["width"] = 9
    assert shown == cfg
    assert not (tmp_path / "run").exists()


def test_the_help_names_both_forms(capsys):
    treadle("train", "--help")
    shown = capsys.readouterr().out
    assert "COMMAND | FILE" in shown
    assert "spectra" in shown
    treadle("train", "fit.yaml", "--help")
    assert "treadle train FILE [OPTIONS] [KEY=VALUE]..." in capsys.readouterr().out


# which files are configurations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("config = {}", True),
        ("config: dict = {}", True),
        ("def config(lr=0.1): return {}", True),
        ("parents = ['base.py']", True),
        ("from base import config", True),
        ("from base import settings as config", True),
        ("if True:\n    config = {}", True),
        ("config = {}\nconfig.update(lr=1)\nprint(config)", True),
        ("import torch\ncfg = {}", False),
        ("def main():\n    config = {}", False),
        ("def other(config): return config", False),
        ("config = {}\nif __name__ == '__main__':\n    main()", False),
        ("config = {}\nTrainer(config).train()", False),
        ("config = {}\nresult = SpectraTrainer(config).fit(3)", False),
        ("config = {}\ndef main(): ...\nmain()", False),
        ("from mine import config, main\nmain(config)", False),
        ("import config\nprint(config.lr)", False),
        ("config = {", False),
    ],
)
def test_a_configuration_is_told_from_a_script_without_running_it(tmp_path, text, expected):
    path = tmp_path / "some.py"
    path.write_text(text)
    assert is_config_file(path) == expected


# runs of a pack


def pack_file(folder, text):
    path = folder / "short.yaml"
    path.write_text(text)
    return path


def test_a_face_runs_the_command_of_its_pack_with_the_settings_of_the_file(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(SPECTRA, "train", lambda settings, **options: calls.append((settings, options)))
    file = pack_file(
        tmp_path, "face: spectra\nepochs: 3\nmodel: {d_model: 32}\ntrainer: {amp: false, grad_clip: null}\ndevice: cpu"
    )
    treadle("train", file, "epochs=5", "+optimizer.lr=1e-2")
    ((settings, options),) = calls
    made = SPECTRA.read_settings(settings, "cpu")
    assert (made.epochs, made.model.d_model, made.optimizer.lr) == (5, 32, 0.01)
    assert (made.trainer.amp, made.trainer.grad_clip) == (False, None)
    assert (options["out"], options["device"], options["resume"]) == (Path("runs/short"), "cpu", True)


def test_the_options_of_a_packs_command_are_keys_of_the_file_and_settings(tmp_path):
    file = pack_file(tmp_path, "face: spectra\nout: somewhere\nresume: false")
    assert read_target(file, []) == PackRun("spectra", [], Path("somewhere"), None, False)
    changed = read_target(file, ["out=2024", "resume=true", "device=none"])
    assert changed == PackRun("spectra", [], Path("2024"), None, True)
    with pytest.raises(ConfigError, match="resume=3: must be true or false"):
        read_target(file, ["resume=3"])


# torch_geometric, which the graphs pack imports, compiles functions with torch.jit.script.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("face", PACKS)
def test_every_pack_can_be_the_face_of_a_file(tmp_path, face):
    run = read_target(pack_file(tmp_path, f"face: {face}"), ["nonsense=1"])
    with pytest.raises(ConfigError, match="nonsense"):
        find_pack(run.face).read_settings(run.settings, "cpu")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("face: spectre", "face='spectre': there is no such pack; did you mean 'spectra'?"),
        ("face: spectra\nepoch: 3", "unknown setting 'epoch'; did you mean 'epochs'?"),
        ("face: spectra\nmodel: {d_modle: 3}", "did you mean 'model.d_model'?"),
        ("face: spectra\nepochs: many", "must be int"),
    ],
)
def test_wrong_settings_of_a_pack_are_one_line(tmp_path, monkeypatch, capsys, text, words):
    monkeypatch.chdir(tmp_path)
    treadle("train", pack_file(tmp_path, text), code=2)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_settings_of_a_pack_are_shown(tmp_path, capsys):
    treadle("train", pack_file(tmp_path, "face: spectra\nepochs: 3\ndevice: cpu"), "seed=4", "--show-settings")
    shown = capsys.readouterr().out.splitlines()
    assert {"epochs=3", "seed=4"} <= set(shown)


# stopped and rerun


def process(config):
    return Forked(
        [sys.executable, "-m", "treadle", "train", str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=config.parent,
    )  # fmt: skip


STOPS_IN_STEP_6 = """SEEN.append(1)
        while len(SEEN) == 6 and not Path("go_on").exists():
            Path("in_step_6").touch()
            time.sleep(0.01)"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_goes_on_with_the_same_command_to_the_bit(tmp_path, straight, number):
    config = write_project(tmp_path, step=STOPS_IN_STEP_6)
    module = tmp_path / "parts.py"
    module.write_text(module.read_text() + "\nimport time\nfrom pathlib import Path\nSEEN = []\n")
    running = process(config)
    deadline = time.monotonic() + 120
    while not (tmp_path / "in_step_6").exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(number)
    (tmp_path / "go_on").touch()  # the signal is there before the step can end
    _, said = running.communicate(timeout=120)
    assert running.returncode == (-9 if number == signal.SIGKILL else 143), said
    assert not (tmp_path / "run" / "checkpoints" / "checkpoint_step_12.pt").exists()
    again = process(config)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert "checkpoint_step_" in said  # it went on from one
    assert differences(state(tmp_path / "run", 12), state(straight, 12)) == []
    assert (tmp_path / "run" / "steps.jsonl").read_text() == (straight / "steps.jsonl").read_text()
    assert len(entries(tmp_path / "run")) == 1


# the record of a run, and its replay


def entries(run):
    return json.loads((run / "run.json").read_text())["entries"]


def replayed(capsys, *arguments, code=0):
    capsys.readouterr()
    treadle("replay", "--json", *arguments, code=code)
    return json.loads(capsys.readouterr().out)


def test_every_step_is_replayed_from_the_run_folder_alone(straight, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in straight.rglob("*"))
    rows = read_steps(straight / "steps.jsonl")
    assert list(rows) == list(range(1, 13))
    for step in rows:
        values = replayed(capsys, straight, "--step", step)
        assert values["equal"] is True, values["differences"]
        assert values["start_step"] == (step - 1) // 4 * 4
    assert sorted((path, path.stat().st_mtime_ns) for path in straight.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_an_edited_file_changes_no_replay(config, capsys):
    treadle("train", config, "trainer.max_steps=4", "optimizer.lr=0.02")
    config.write_text("nothing: of the kind")
    assert replayed(capsys, config.parent / "run", "--step", 3)["equal"] is True


def test_each_step_is_replayed_with_the_settings_it_was_made_with(config, capsys):
    run = config.parent / "run"
    treadle("train", config, "trainer.max_steps=4")
    capsys.readouterr()
    treadle("train", config, "trainer.max_steps=8", "trainer.grad_clip=0.01")
    said = capsys.readouterr().err
    assert f"the run in {run} was started with other settings: trainer.grad_clip was 1.0 and is now 0.01" in said
    assert "trainer.max_steps was 4 and is now 8" in said
    assert [entry["from_step"] for entry in entries(run)] == [0, 4]
    capsys.readouterr()
    treadle("replay", run, "--step", 9, code=2)
    assert "--step=9: the run has no such step: it ended at step 8" in capsys.readouterr().err
    for step in (3, 4, 5, 7):
        assert replayed(capsys, run, "--step", step)["equal"] is True
    treadle("train", config, "trainer.max_steps=8", "trainer.grad_clip=0.01")
    assert "other settings" not in capsys.readouterr().err
    assert len(entries(run)) == 2


def test_a_run_that_starts_anew_has_a_new_record(config):
    run = config.parent / "run"
    treadle("train", config, "trainer.max_steps=4")
    shutil.rmtree(run / "checkpoints")
    treadle("train", config, "trainer.max_steps=4", "model.width=5")
    (entry,) = entries(run)
    assert entry["from_step"] == 0
    assert '"width": 5' in "".join(entry["config"])


def test_a_project_that_moved_is_replayed_by_naming_its_file(config, capsys, tmp_path):
    treadle("train", config, "trainer.max_steps=4")
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    run = tmp_path / "elsewhere"
    record = json.loads((run / "run.json").read_text())
    record["entries"][0]["file"] = str(tmp_path / "gone" / "fit.yaml")
    (run / "run.json").write_text(json.dumps(record))
    treadle("replay", run, "--step", 3, code=2)
    assert "whose folder no longer exists" in capsys.readouterr().err
    values = replayed(capsys, run, "--step", 3, "--script", config, "--", "trainer.max_steps=4")
    assert values["equal"] is True
    assert values["start_step"] == 0
    treadle("replay", run, "--step", 3, "--script", config, "--device", "cpu", code=2)
    treadle("replay", run, "--step", 3, "--script", pack_file(tmp_path, "face: spectra"), code=2)
    assert "names a pack" in capsys.readouterr().err


def test_a_configuration_that_holds_objects_is_loaded_again_for_a_replay(config, capsys, tmp_path):
    file = tmp_path / "objects.py"
    file.write_text("parents = 'fit.yaml'\nconfig = {'trainer': {'logger': __import__('logging').getLogger('mine')}}")
    treadle("train", file, "trainer.max_steps=4")
    (entry,) = entries(tmp_path / "run")
    assert entry["config"] is None
    assert replayed(capsys, tmp_path / "run", "--step", 3)["equal"] is True


def test_a_record_that_an_earlier_version_wrote_in_other_quotes_is_the_same():
    from treadle.runs.record_hooks import _same

    entry = {"file": "fit.yaml", "arguments": [], "config": ['{"lr": 0.1, "name": "a"}']}
    assert _same({**entry, "config": ["{'lr': 0.1, 'name': 'a'}"]}, entry)
    assert not _same({**entry, "config": ["{'lr': 0.2, 'name': 'a'}"]}, entry)
    assert not _same({**entry, "config": None}, entry)
