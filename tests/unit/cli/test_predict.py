"""`treadle evaluate` and `treadle predict` on runs of packs, and the option --trackers."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest

from command_kit import read, treadle

SMALL = ["data.max_rows=80", "epochs=1", "batch_size=32", "model.d_model=16", "model.num_layers=1", "threads=1"]
pytestmark = pytest.mark.filterwarnings("ignore")


class FakeWandb(types.ModuleType):
    """Keeps what a run was given."""

    def __init__(self):
        super().__init__("wandb")
        self.summary, self.sent, self.ended = {}, [], []
        self.id = "made-up"

    def init(self, **arguments):
        self.arguments = arguments
        return self

    def log(self, values, step):
        self.sent.append((step, values))

    def finish(self, exit_code=None):
        self.ended.append(exit_code)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, and what its trackers were sent."""
    from treadle.spectra import report as spectra_report

    out, fake = tmp_path_factory.mktemp("run") / "spectra", FakeWandb()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", fake)
        patch.setattr(spectra_report, "_draw", lambda *args: [])
        assert treadle("train", "spectra", *SMALL, "--out", out, "--trackers", "wandb,jsonl") == 0
    return out, fake


def test_the_runs_of_a_pack_are_followed_with_settings_and_what_it_measured_in_the_end(run):
    out, fake = run
    assert fake.arguments["config"]["model"]["d_model"] == 16
    assert fake.summary["final/test_loss"] == read(out, "metrics.json")["test_loss"]
    assert fake.ended == [0]
    keys = {key for _, values in fake.sent for key in values}
    assert {"train/loss", "epoch/val_loss"} <= keys
    assert '"epoch/val_loss"' in (out / "metrics.jsonl").read_text()


def test_spectra_are_evaluated_as_the_run_did(run, capsys):
    out, _ = run
    assert treadle("evaluate", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["loss"] == read(out, "metrics.json")["test_loss"]
    assert read(out, "eval_results_test.json") == found
    assert treadle("evaluate", out, "--split", "val") == 0
    assert "weights of epoch 1" in capsys.readouterr().out


def test_a_run_is_opened_as_its_trainer(run):
    import treadle as library

    out, _ = run
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    trainer = library.open_run(out, device="cpu")
    assert (type(trainer).__name__, trainer.epoch) == ("SpectraTrainer", 1)
    assert trainer.validate() == trainer.history[-1]["val_loss"]
    with pytest.raises(library.ConfigError, match="continue it with treadle train spectra"):
        trainer.fit(3)
    with pytest.raises(library.ConfigError, match="is continued by its command"):
        library.open_run(out, read_only=False)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_latents_are_written_with_their_rows(run, tmp_path, capsys):
    out, _ = run
    assert treadle("predict", out, "--split", "val", "--out", tmp_path / "l.npz", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    with np.load(tmp_path / "l.npz") as arrays:
        assert {name: list(arrays[name].shape) for name in arrays} == found["arrays"]
        assert arrays["latent"].dtype == np.float32
        assert len(set(arrays["row"].tolist())) == len(arrays["latent"])
    assert treadle("predict", out) == 0
    assert (out / "predictions_test.npz").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--split", "tst"], "did you mean 'test'?"),
        (["--out", "l.txt"], "must end in .npz or .csv"),
    ],
)
def test_a_wrong_option_is_one_line(run, capsys, arguments, words):
    assert treadle("predict", run[0], *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_face_without_predictions_names_what_to_use(tmp_path, capsys):
    import torch

    import treadle as library

    model = torch.nn.Linear(1, 1)
    trainer = library.Trainer(model, None, torch.nn.MSELoss(), device="cpu")
    trainer.train([(torch.ones(2, 1), torch.ones(2, 1))], 1, save_dir=tmp_path, save_freq=1)
    assert treadle("predict", next(tmp_path.rglob("*.pt"))) == 2
    assert f"treadle.open_run('{tmp_path}', trainer)" in "".join(capsys.readouterr().err.split("\n"))


def test_trackers_of_a_configuration_of_a_pack_and_of_no_such_name(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("face: spectra\ntrackers: [tensorbord]\n")
    assert treadle("train", tmp_path / "run.yaml") == 2
    assert "did you mean 'tensorboard'?" in capsys.readouterr().err
    assert treadle("train", "spectra", "--trackers", "mlfow") == 2
    assert "did you mean 'mlflow'?" in capsys.readouterr().err
