"""``treadle train astro`` from the first line on the terminal to the files it leaves, stopped at every place."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_kit import Killed, Stop, files, interrupt, kill, read, treadle
from helpers import differences
from treadle import load_weights
from treadle.astro import fit_tokenizers, load_tokenizers
from treadle.astro import report as astro_report
from treadle.astro.pictures import question_name
from treadle.astro.run_config import FREE, AstroRunConfig
from treadle.astro.run_data import split_surveys
from treadle.checkpoint import load_checkpoint
from treadle.engine.observers import observing
from treadle.runs.settings import leaves

TINY = [
    "data.max_rows=60", "tokens.v_image=4", "tokens.patch_size=16", "tokens.scalar_bins=3", "tokens.v_spectra=4",
    "tokens.segment=64", "repeats.xdf=1", "repeats.spex=1", "model.d_model=8", "model.n_heads=2", "model.n_layers=1",
    "model.d_ff=8", "training.epochs=2", "training.batch_size=32", "training.warmup_steps=2",
]  # fmt: skip
STEPS = 8
PICTURES = {"images.png", "loss_terms.png", "scalars.png", "spectra.png", "training_curves.png"}


def run(out: Path, *arguments: str) -> int:
    return treadle("train", "astro", *TINY, "--out", out, "--device", "cpu", *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "astro"
    assert run(out) == 0
    return out


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the slow pictures out, which the full run draws."""
    monkeypatch.setattr(astro_report, "draw", lambda *args: [])


# -- what a run leaves --------------------------------------------------------------------------------------------


def test_the_run_folder_is_complete(finished: Path) -> None:
    for name in ("config.json", "metrics.json", "tokenizers.safetensors", "checkpoints/best.pt"):
        assert (finished / name).stat().st_size > 0
    assert {path.name for path in (finished / "pictures").iterdir()} == PICTURES
    for name in PICTURES:
        assert (finished / "pictures" / name).read_bytes().startswith(b"\x89PNG")
    assert (finished / "page.html").read_text(encoding="utf-8").count("data:image/png") == len(PICTURES)
    for epoch in (1, 2):
        tree = load_checkpoint(finished / "checkpoints" / f"ckpt_epoch_{epoch:03d}.pt")
        assert (tree["epoch"], tree["global_step"]) == (epoch, epoch * STEPS / 2)
    lines = (finished / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def test_metrics_are_of_the_best_epoch_with_simple_methods_beside_the_model(finished: Path) -> None:
    metrics = read(finished, "metrics.json")
    history = json.loads((finished / "checkpoints" / "training_history.json").read_text())
    best = history[metrics["best_epoch"] - 1]
    assert best["val_loss_total"] == min(record["val_loss_total"] for record in history)
    assert metrics["val"] == {name[4:]: value for name, value in best.items() if name.startswith("val_")}
    galaxies, dwarfs = (metrics["objects"][name]["val"] for name in ("xdf", "spex"))
    # In both orders of scalars and spectra: four patches of a picture, a segment in each of four groups of a spectrum.
    assert (metrics["val"]["n_img"], metrics["val"]["n_spec"]) == (2 * 4 * galaxies, 2 * 4 * dwarfs)
    asked = [(found["target"], found["given"]) for found in metrics["predictions"]]
    assert [target for target, _ in asked] == ["spex.type", "spex.J-Ks", "xdf.mag", "xdf.blue-red", "sdss.redshift"]
    for found in metrics["predictions"]:
        assert found["mean"]["explained"] == 0
        assert {"model", "ridge", "mean", "bins"} <= set(found)
    assert metrics["predictions"][0]["mean"]["balanced_accuracy"] <= 0.5


def test_the_mean_is_that_of_the_training_objects_and_the_split_keeps_objects_together(finished: Path) -> None:
    config = AstroRunConfig()
    config.data.max_rows = 60
    train, val, test = split_surveys(config.data)
    for name in train:
        parts = [np.unique(part[name].objects) for part in (train, val, test)]
        assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))
    found = read(finished, "metrics.json")["predictions"][-1]
    true, guess = test["sdss"].column("sdss.redshift"), train["sdss"].column("sdss.redshift").mean()
    assert found["n"] == len(true)
    assert found["mean"]["rmse"] == pytest.approx(np.sqrt(np.square(true - guess).mean()))


def test_every_codebook_is_fitted_to_the_training_objects_and_measured_on_the_test(finished: Path) -> None:
    config = AstroRunConfig()
    config.data.max_rows = 60
    train, _, test = split_surveys(config.data)
    tokenizers = load_tokenizers(finished / "tokenizers.safetensors")
    assert set(np.unique(tokenizers.bins(train["sdss"])[:, -1])) == {0, 1, 2}
    bins = tokenizers.bins(train["sdss"])[:, -1]
    redshifts = train["sdss"].column("sdss.redshift")
    assert tokenizers.scalar.centers[-1] == pytest.approx([redshifts[bins == number].mean() for number in range(3)])
    quality = read(finished, "metrics.json")["tokenizers"]
    assert len(quality) == 1 + 4 + 16  # pictures, groups of the spectrum, columns
    pictures = test["xdf"].images
    assert pictures is not None
    decoded = tokenizers.image.decode(tokenizers.image.encode(pictures)).astype(np.float64)
    error = np.square(pictures - decoded).sum() / np.square(pictures - pictures.mean(axis=0)).sum()
    assert quality["image"]["explained_variance"] == pytest.approx(1 - error)


# -- going on -----------------------------------------------------------------------------------------------------


def the_end(out: Path) -> dict[str, Any]:
    """Return every file of a run that shows what it computed."""
    names = ("best.pt", "ckpt_epoch_001.pt", "ckpt_epoch_002.pt")
    end: dict[str, Any] = {name: load_checkpoint(out / "checkpoints" / name) for name in names}
    for name in ("metrics.json", "config.json", "steps.jsonl", "checkpoints/training_history.json"):
        end[name] = (out / name).read_text()
    end["tokenizers"] = (out / "tokenizers.safetensors").read_bytes()
    return end


PLACES_TO_STOP = {
    "first step, nothing saved": ("on_before_optimizer_step", 1),
    "first epoch evaluated, not written": ("on_after_epoch", STEPS // 2),
    "inside the second epoch": ("on_before_optimizer_step", STEPS // 2 + 2),
    "trained, not reported": ("on_after_train", STEPS),
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("place", PLACES_TO_STOP.values(), ids=PLACES_TO_STOP.keys())
def test_killed_anywhere_the_same_command_ends_the_same(place: tuple[str, int], finished: Path, tmp_path: Path) -> None:
    with observing(Stop(*place, kill)), pytest.raises(Killed):
        run(tmp_path / "astro")
    assert not (tmp_path / "astro" / "metrics.json").exists()
    assert run(tmp_path / "astro") == 0
    assert differences(the_end(finished), the_end(tmp_path / "astro")) == []


@pytest.mark.usefixtures("no_pictures")
def test_ctrl_c_saves_at_the_step_and_the_rerun_goes_on_from_it(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with observing(Stop("on_before_step", STEPS // 2 + 2, interrupt)):
        assert run(tmp_path / "astro") == 130
    assert f"saved at step {STEPS // 2 + 2}; the same command resumes from here" in capsys.readouterr().err
    assert run(tmp_path / "astro") == 0
    assert f"ckpt_step_{STEPS // 2 + 2:08d}.pt at step {STEPS // 2 + 2}, epoch 1" in capsys.readouterr().err
    assert differences(the_end(finished), the_end(tmp_path / "astro")) == []


def test_a_rerun_of_a_finished_run_shows_the_tables_and_touches_nothing(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    assert run(copied) == 0
    shown = capsys.readouterr()
    for words in ("redshift from photometry", "balanced accuracy", "spex_zj", "16 columns"):
        assert words in shown.out
    assert "is finished" in shown.err
    assert files(copied) == before


@pytest.mark.usefixtures("no_pictures")
def test_more_epochs_go_on_and_say_so(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(copied, "training.epochs=3") == 0
    shown = capsys.readouterr().err
    assert "training.epochs was 2 and is now 3: the learning rate follows the new schedule" in shown
    history = json.loads((copied / "checkpoints" / "training_history.json").read_text())
    assert [record["epoch"] for record in history] == [1, 2, 3]


def test_other_tokens_or_another_model_are_refused_and_nothing_is_lost(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    assert run(copied, "model.d_model=16", "tokens.v_image=5") == 2
    error = capsys.readouterr().err
    for words in ("model.d_model was 8 and is now 16", "tokens.v_image was 4 and is now 5", "--out", "--no-resume"):
        assert words in error
    assert files(copied) == before


@pytest.mark.usefixtures("no_pictures")
def test_no_resume_starts_afresh_with_new_tokens_and_sets_the_old_checkpoints_aside(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = load_weights(copied / "checkpoints" / "best.pt")
    with observing(Stop("on_before_optimizer_step", 3, kill)), pytest.raises(Killed):
        run(copied, "tokens.v_image=5", "--no-resume")
    assert "start     fresh" in capsys.readouterr().err
    assert differences(load_weights(copied / "earlier.1" / "checkpoints" / "best.pt"), old) == []
    assert len(load_tokenizers(copied / "tokenizers.safetensors").image.codebook) == 5
    assert not (copied / "metrics.json").exists()


@pytest.mark.usefixtures("no_pictures")
def test_damaged_files_are_named_and_passed_over(
    copied: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizers.safetensors", "checkpoints/ckpt_epoch_002.pt"):
        content = (copied / name).read_bytes()
        (copied / name).unlink()  # it may be the same file as best.pt
        (copied / name).write_bytes(content[:-100])
    (copied / "metrics.json").unlink()
    (copied / "checkpoints" / "best.pt").unlink()
    assert run(copied) == 0
    shown = capsys.readouterr().err
    assert "they are fitted again" in shown
    assert "ckpt_epoch_002.pt' cannot be used" in shown
    weights = [load_checkpoint(out / "checkpoints" / "ckpt_epoch_002.pt")["model"] for out in (finished, copied)]
    assert differences(*weights) == []


@pytest.mark.parametrize("step", [STEPS // 2, STEPS // 2 + 3])
def test_a_step_run_again_is_its_record_to_the_bit(
    step: int, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(finished)
    assert treadle("replay", finished, "--step", step, "--device", "cpu", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["equal"]) == (step, True)
    assert shown["start_step"] == (0 if step == STEPS // 2 else STEPS // 2)
    assert files(finished) == before


def test_a_finished_run_predicts_what_its_report_scored(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert treadle("predict", copied, "--json") == 0
    with np.load(copied / "predictions_test.npz") as opened:
        arrays = dict(opened)
    found = json.loads(capsys.readouterr().out)["arrays"]
    assert {name: list(arrays[name].shape) for name in arrays} == found
    for question in read(copied, "metrics.json")["predictions"]:
        true = arrays[f"{question_name(question['target'], question['given'])}, true"]
        assert len(true) == question["n"]
    assert treadle("predict", copied, "--out", copied / "all.csv") == 2
    assert "use .npz" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["test", "val"])
def test_a_finished_run_is_evaluated_as_its_report_did(
    split: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treadle("evaluate", finished, "--split", split, "--device", "cpu", "--json") == 0
    found, metrics = json.loads(capsys.readouterr().out), read(finished, "metrics.json")
    assert found["metrics"] == metrics[split]
    assert (found["predictions"] == metrics["predictions"]) == (split == "test")
    assert found["equal_to_metrics"] is True
    assert read(finished, f"eval_results_{split}.json") == found


def test_an_evaluation_says_when_it_is_not_what_the_report_has(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = read(copied, "metrics.json")
    metrics["predictions"][0]["model"]["rmse"] += 1e-9
    (copied / "metrics.json").write_text(json.dumps(metrics))
    assert treadle("evaluate", copied, "--batch-size", "32", "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert f"not equal to the bit to {copied / 'metrics.json'}" in said
    assert "One modality from another, test objects" in said
    assert "loss_ce" in said
    for command, option in (("evaluate", ["--split", "tst"]), ("predict", ["--seed", "0"])):
        assert treadle(command, copied, *option) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "did you mean 'test'?" in said
    assert "--seed 0: a run of the face astro generates no text" in said


def test_a_run_of_several_ranks_is_asked_in_one_process(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = read(copied, "run.json")
    record["config"]["training"]["parallel"] = "fsdp"
    (copied / "run.json").write_text(json.dumps(record))
    assert treadle("evaluate", copied, "--split", "val", "--device", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["equal_to_metrics"] is True
    assert treadle("predict", copied, "--split", "val", "--device", "cpu") == 0


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.d_modle=8"], ["'model.d_model'"]),
        (["model.n_heads=3"], ["n_heads=3", "d_model=8"]),
        (["tokens.patch_size=5"], ["tokens.patch_size=5", "divisor of 32"]),
        (["tokens.v_spectra=1"], ["tokens.v_spectra=1", "at least 2"]),
        (["training.batch_size=0"], ["training.batch_size=0"]),
        (["training.seed=3"], ["use seed"]),
        (["training.log_every=3"], ["steps.jsonl"]),
        (["training.parallel=ddp"], ["torchrun"]),
        (["mixed_precision=fp8"], ["mixed_precision='fp8'", "bf16"]),
        (["hidden_scalars=0.7"], ["hidden_scalars=0.7", "0.5"]),
        (["scalars_last=1"], ["scalars_last=1", "[0, 1)"]),
        (["use_ce=false", "training.meaningful_loss.enabled=false"], ["nothing would be trained"]),
        (["data.max_rows=9"], ["data.max_rows=9"]),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    settings: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "run", *settings) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert not (tmp_path / "run").exists()


def test_what_may_change_is_made_of_settings_that_exist() -> None:
    assert set(FREE) <= {key for key, _ in leaves(AstroRunConfig())}


def test_the_tokens_are_those_of_the_library_unless_said_otherwise() -> None:
    defaults = {name: given.default for name, given in inspect.signature(fit_tokenizers).parameters.items()}
    assert vars(AstroRunConfig().tokens).items() <= defaults.items()


def test_help_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert treadle("train", "astro", "--help") == 0
    shown = capsys.readouterr().out
    for words in ("--no-resume", "treadle train astro --show-settings", "page.html"):
        assert words in shown
    assert treadle("train", "astro", "--show-settings", "model.d_model=32") == 0
    shown = capsys.readouterr().out.splitlines()
    assert {"model.d_model=32", "tokens.patch_size=8", "training.meaningful_loss.weight_image=0.1"} <= set(shown)
    assert not any(line.startswith(("training.seed", "training.log_every")) for line in shown)


@pytest.mark.slow
def test_verify_says_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert treadle("verify", "astro", *TINY, "training.epochs=4", "--steps", "14", "--kills", "2") == 0
    assert "EXACT" in capsys.readouterr().out
