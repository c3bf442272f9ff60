"""The commands of packs on several ranks: the numbers of one process, files written once, stopped and gone on with.

Randomness that each rank draws for itself (masks, dropout) is turned off where numbers are compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from command_kit import Killed, Stop, interrupt, kill, read
from ranks import run_on_ranks
from treadle import distributed, load_weights
from treadle.cli import astro_report, astro_run, spectra_report, spectra_run
from treadle.errors import TreadleError
from treadle.observers import observing

SPECTRA = [
    "epochs=2", "data.max_rows=120", "model.d_model=8", "model.nhead=2", "model.num_layers=1",
    "model.dim_feedforward=8", "model.n_mask=32", "schedule.warmup_epochs=1", "batch_size=16",
]  # fmt: skip
ASTRO = [
    "data.max_rows=60", "tokens.v_image=4", "tokens.patch_size=16", "tokens.scalar_bins=3", "tokens.v_spectra=4",
    "tokens.segment=64", "repeats.xdf=1", "repeats.spex=1", "model.d_model=8", "model.n_heads=2", "model.n_layers=1",
    "model.d_ff=8", "model.dropout=0.0", "hidden_scalars=0.0", "scalars_last=0.0", "training.epochs=2",
    "training.batch_size=32", "training.warmup_steps=2",
]  # fmt: skip


def outcome(run, settings, out, *hooks):
    """Runs a command on this rank and says how it ended: with what it returned, "killed", an exit code or a message."""
    quiet = {"results": Console(quiet=True), "messages": Console(quiet=True)}
    try:
        with observing(hooks[0] if hooks else Stop("on_after_step", -1, kill)):
            return run(settings, out=Path(out), device="cpu", resume=True, **quiet)
    except Killed:
        return "killed"
    except SystemExit as left:
        return left.code
    except TreadleError as error:
        return f"{type(error).__name__}: {error}"


def steps_of(out):
    return [json.loads(line)["step"] for line in (out / "steps.jsonl").read_text().splitlines()]


def assert_close(ours, theirs, tolerance=1e-5):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.allclose(ours[name].float(), value.float(), rtol=0, atol=tolerance), name


def assert_records_close(ours, theirs, tolerance=1e-5):
    for our_record, their_record in zip(ours, theirs, strict=True):
        assert our_record == pytest.approx(their_record, abs=tolerance, nan_ok=True)


# -- spectra ------------------------------------------------------------------------------------------------------


def spectra_alone(folder):
    """A run on one rank that is stopped inside the second epoch, and one that is not."""
    spectra_run.evaluate_run = lambda *args: {}
    spectra_run.print_results = lambda *args: None
    stopped = outcome(spectra_run.run_spectra, SPECTRA, folder / "two", Stop("on_after_step", 8, interrupt))
    return stopped, outcome(spectra_run.run_spectra, SPECTRA, folder / "one")


def spectra_on_two(folder):
    """The stopped run: refused with another model, killed, gone on with to its end."""
    spectra_report._probe, spectra_report._draw = (lambda *args: {}), (lambda *args: None)
    spectra_report._MOST_CLUSTERS = 2
    two = folder / "two"
    ended = [
        outcome(spectra_run.run_spectra, [*SPECTRA, "model.d_model=16"], two),
        outcome(spectra_run.run_spectra, [*SPECTRA, "batch_size=1"], folder / "three"),
        outcome(spectra_run.run_spectra, SPECTRA, two, Stop("on_after_step", 10, kill)),
        outcome(spectra_run.run_spectra, [*SPECTRA, "trainer.parallel=fsdp"], two),
    ]
    return ended, distributed.world_size()


def test_spectra_go_on_from_one_rank_to_two_and_end_as_one(tmp_path):
    ((stopped, alone),) = run_on_ranks(spectra_alone, 1, tmp_path)
    assert (stopped, alone) == (130, {})
    assert steps_of(tmp_path / "two") == list(range(1, 9))
    first, second = run_on_ranks(spectra_on_two, 2, tmp_path, timeout=120)
    for ended, left in (first, second):
        assert ended[0].startswith("ConfigError: the run in")
        assert "model.d_model was 8 and is now 16" in ended[0]
        assert ended[1].startswith("ConfigError: batch_size=1: is shared among 2 ranks")
        assert ended[2] == "killed"
        assert left == 1  # the group ended with the training
    assert second[0][3] is None  # the first rank alone reports
    metrics = read(tmp_path / "two" / "metrics.json")
    assert metrics["test_loss"] == first[0][3]["test_loss"]
    assert not (tmp_path / "three").exists()
    one, two = tmp_path / "one", tmp_path / "two"
    assert steps_of(two) == steps_of(one)
    assert_close(load_weights(two / "best_model.pt"), load_weights(one / "best_model.pt"))
    assert_records_close(read(two, "training_history.json"), read(one, "training_history.json"))


# -- astro --------------------------------------------------------------------------------------------------------


def astro_alone(folder):
    """A run on one rank that is stopped inside the second epoch, and one that is not."""
    astro_run.finish_run = lambda *args: {}
    astro_run.print_results = lambda *args: None
    stopped = outcome(astro_run.run_astro, ASTRO, folder / "two", Stop("on_after_step", 6, interrupt))
    return stopped, outcome(astro_run.run_astro, ASTRO, folder / "one")


def astro_on_two(folder):
    """The stopped run, killed and gone on with to its end."""
    astro_report.draw_and_write, astro_report.cross_predict = (lambda *args: None), (lambda *args, **kwargs: [])
    astro_run.print_results = lambda *args: None
    killed = outcome(astro_run.run_astro, ASTRO, folder / "two", Stop("on_after_step", 7, kill))
    return killed, outcome(astro_run.run_astro, ASTRO, folder / "two")


@pytest.mark.slow
def test_astro_goes_on_from_one_rank_to_two_and_ends_as_one(tmp_path):
    assert run_on_ranks(astro_alone, 1, tmp_path, timeout=120) == [(130, {})]
    first, second = run_on_ranks(astro_on_two, 2, tmp_path, timeout=180)
    assert (first[0], second) == ("killed", ("killed", None))
    one, two = tmp_path / "one", tmp_path / "two"
    assert read(two / "metrics.json") == first[1]
    assert first[1]["epochs"] == 2
    assert steps_of(two) == steps_of(one)
    assert_close(load_weights(two / "checkpoints" / "best.pt"), load_weights(one / "checkpoints" / "best.pt"))
    assert_records_close(
        read(two, "checkpoints", "training_history.json"), read(one, "checkpoints", "training_history.json")
    )
