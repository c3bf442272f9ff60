"""The commands of packs on several ranks: the numbers of one process, files written once, stopped and gone on with.

Randomness that each rank draws for itself (masks, dropout) is turned off where numbers are compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from command_kit import Killed, Stop, draw_nothing, interrupt, kill, read, treadle
from ranks import run_on_ranks, torchrun
from treadle import distributed, load_weights
from treadle.astro import report as astro_report
from treadle.astro.runs import PACK as ASTRO_PACK
from treadle.engine.observers import observing
from treadle.errors import ConfigError, TreadleError
from treadle.graphs import report as graphs_report
from treadle.graphs.runs import PACK as GRAPHS_PACK
from treadle.runs.pack import Results
from treadle.runs.replay import refuse_run_of_ranks
from treadle.runs.report import Report
from treadle.spectra import report as spectra_report
from treadle.spectra.runs import PACK as SPECTRA_PACK
from treadle.text import report as text_report
from treadle.text.runs import PACK as TEXT_PACK

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
GRAPHS = [
    "dataset=synthetic/ring", "dataset.task=distance_regression", "dataset.num_graphs=80", "training.epochs=2",
    "training.batch_size=16", "pe=light", "training.scheduler.warmup_epochs=1", "model.hidden_dim=8",
    "model.num_layers=1", "model.num_heads=2", "model.dropout=0.0", "dataset.num_workers=0",
    "training.optimizer.type=sgd", "training.optimizer.lr=0.1",
]  # fmt: skip
TEXT = [
    "epochs=2", "data.max_topics=20", "data.vocab_size=280", "data.block_length=32", "data.val_fraction=0.2",
    "model.n_embd=8", "model.n_layer=1", "model.n_head=2", "model.dropout=0.0", "schedule.warmup_steps=2",
    "training.checkpoint_interval=5", "lora.epochs=2", "lora.r=2", "lora.val_fraction=0.3", "lora.dropout=0.0",
    "samples.num_tokens=8", "samples.count=2",
]  # fmt: skip

BARE = {"treadle", "device", "config"}  # of a report that was left out


def outcome(pack, settings, out, *hooks):
    """Run a command on this rank and say how it ended: with what it returned, "killed", an exit code or a message."""
    try:
        with observing(hooks[0] if hooks else Stop("on_after_step", -1, kill)):
            return pack.train(settings, out=Path(out), device="cpu", resume=True, messages=Console(quiet=True))
    except Killed:
        return "killed"
    except SystemExit as left:
        return left.code
    except TreadleError as error:
        return f"{type(error).__name__}: {error}"


def leave_the_report_out(pack):
    """Make a pack test and draw nothing after its training, in this process."""
    pack.finish, pack.report = (lambda *args: Results({})), (lambda *args: Report())


class Reads(Stop):
    """Counts the samples that this rank reads for each step."""

    def __init__(self):
        super().__init__("on_after_step", -1, kill)
        self.on_after_step = lambda trainer: self.counts.append(trainer.step_info["num_samples"])
        self.counts = []


def steps_of(out):
    return [json.loads(line)["step"] for line in (out / "steps.jsonl").read_text().splitlines()]


def assert_close(ours, theirs, tolerance=1e-5):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.allclose(ours[name].float(), value.float(), rtol=0, atol=tolerance), name


def assert_shared(ours, theirs, *, batch_size):
    """Two ranks read parts of each batch that differ by one sample at most."""
    assert ours
    for mine, other in zip(ours, theirs, strict=True):
        assert 0 <= mine - other <= 1
        assert mine + other <= batch_size


def assert_records_close(ours, theirs, tolerance=1e-5):
    for our_record, their_record in zip(ours, theirs, strict=True):
        assert our_record == pytest.approx(their_record, abs=tolerance, nan_ok=True)


# -- spectra ------------------------------------------------------------------------------------------------------


def spectra_alone(folder):
    """A run on one rank that is stopped inside the second epoch, and one that is not."""
    leave_the_report_out(SPECTRA_PACK)
    stopped = outcome(SPECTRA_PACK, SPECTRA, folder / "two", Stop("on_after_step", 8, interrupt))
    return stopped, outcome(SPECTRA_PACK, SPECTRA, folder / "one")


def spectra_on_two(folder):
    """The stopped run: refused with another model, killed, gone on with to its end."""
    spectra_report._probe, spectra_report._draw = (lambda *args: {}), (lambda *args: [])
    spectra_report._few_labels = lambda *args: {}
    spectra_report._MOST_CLUSTERS = 2
    two, reads = folder / "two", Reads()
    ended = [
        outcome(SPECTRA_PACK, [*SPECTRA, "model.d_model=16"], two),
        outcome(SPECTRA_PACK, [*SPECTRA, "batch_size=1"], folder / "three"),
        outcome(SPECTRA_PACK, SPECTRA, two, Stop("on_after_step", 10, kill)),
        outcome(SPECTRA_PACK, [*SPECTRA, "trainer.parallel=fsdp"], two, reads),
    ]
    return ended, distributed.world_size(), reads.counts


def test_spectra_go_on_from_one_rank_to_two_and_end_as_one(tmp_path):
    ((stopped, alone),) = run_on_ranks(spectra_alone, 1, tmp_path, timeout=120)
    assert (stopped, set(alone)) == (130, BARE)
    assert steps_of(tmp_path / "two") == list(range(1, 9))
    first, second = run_on_ranks(spectra_on_two, 2, tmp_path, timeout=120)
    for ended, left, _ in (first, second):
        assert ended[0].startswith("ConfigError: the run in")
        assert "model.d_model was 8 and is now 16" in ended[0]
        assert ended[1].startswith("ConfigError: batch_size=1: is split over 2 ranks")
        assert ended[2] == "killed"
        assert left == 1  # the group ended with the training
    assert second[0][3] is None  # the first rank alone reports
    metrics = read(tmp_path / "two" / "metrics.json")
    shares = list(zip(first[2], second[2], strict=True))
    assert sum(map(sum, shares)) == metrics["rows"]["train"] - 2 * 16  # what two steps of the epoch had left
    assert all(0 <= ours - theirs <= 1 for ours, theirs in shares)
    assert metrics["test_loss"] == first[0][3]["test_loss"]
    assert not (tmp_path / "three").exists()
    one, two = tmp_path / "one", tmp_path / "two"
    assert steps_of(two) == steps_of(one)
    assert_close(load_weights(two / "best_model.pt"), load_weights(one / "best_model.pt"))
    with pytest.raises(ConfigError, match="was trained under torchrun"):
        refuse_run_of_ranks(two)
    assert_records_close(read(two, "training_history.json"), read(one, "training_history.json"))


def spectra_with_masks(folder, killed):
    """A run whose ranks draw masks, killed inside the second epoch and gone on with, or not killed."""
    leave_the_report_out(SPECTRA_PACK)
    settings = [*SPECTRA, "model.n_mask=28"]
    if killed:
        assert outcome(SPECTRA_PACK, settings, folder, Stop("on_after_step", 10, kill)) == "killed"
    return outcome(SPECTRA_PACK, settings, folder)


@pytest.mark.slow
def test_a_killed_run_on_two_ranks_ends_as_one_that_was_not_to_the_bit(tmp_path):
    for name, killed in (("straight", False), ("killed", True)):
        first, second = run_on_ranks(spectra_with_masks, 2, tmp_path / name, killed, timeout=120)
        assert (set(first), second) == (BARE, None)
    straight, again = (load_weights(tmp_path / name / "best_model.pt") for name in ("straight", "killed"))
    assert straight.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in straight.items())
    for name in ("training_history.json", "config.json"):
        assert read(tmp_path, "killed", name) == read(tmp_path, "straight", name)


@pytest.mark.slow
def test_torchrun_goes_on_where_one_process_stopped_and_one_rank_prints_and_reports(tmp_path):
    arguments = [*SPECTRA, "model.n_mask=28", "--out", tmp_path / "run", "--device", "cpu"]
    assert treadle("train", "spectra", *arguments, "epochs=1") == 0
    command = map(str, ("-m", "treadle", "train", "--rank-timeout", "60", "spectra", *arguments))
    done = torchrun(*command, options=["--max-restarts=0"], timeout=300)
    assert done.returncode == 0, done.stderr
    for line in ("ranks     2, replicas (ddp)", "trained 1 epochs in", "resumes from", "epochs was 1 and is now 2"):
        assert done.stderr.count(line) == 1, line
    assert done.stdout.count("Masked reconstruction") == 1
    assert read(tmp_path / "run" / "metrics.json")["epochs"] == 2
    assert sorted(path.stem for path in (tmp_path / "run" / "pictures").glob("*.png")) == [
        "cluster_map", "few_labels", "latent_map", "reconstructions", "training_curves",
    ]  # fmt: skip


# -- astro --------------------------------------------------------------------------------------------------------


def astro_alone(folder):
    """A run on one rank that is stopped inside the second epoch, and one that is not."""
    leave_the_report_out(ASTRO_PACK)
    stopped = outcome(ASTRO_PACK, ASTRO, folder / "two", Stop("on_after_step", 6, interrupt))
    return stopped, outcome(ASTRO_PACK, ASTRO, folder / "one")


def astro_on_two(folder):
    """The stopped run, killed and gone on with to its end."""
    astro_report.draw, astro_report.cross_predict = (lambda *args: []), (lambda *args, **kwargs: [])
    ASTRO_PACK.report = lambda *args: Report()
    killed = outcome(ASTRO_PACK, ASTRO, folder / "two", Stop("on_after_step", 7, kill))
    reads = Reads()
    return killed, outcome(ASTRO_PACK, ASTRO, folder / "two", reads), reads.counts


@pytest.mark.slow
def test_astro_goes_on_from_one_rank_to_two_and_ends_as_one(tmp_path):
    ((stopped, alone),) = run_on_ranks(astro_alone, 1, tmp_path, timeout=120)
    assert (stopped, set(alone)) == (130, BARE)
    first, second = run_on_ranks(astro_on_two, 2, tmp_path, timeout=180)
    assert (first[0], second[:2]) == ("killed", ("killed", None))
    assert_shared(first[2], second[2], batch_size=32)
    one, two = tmp_path / "one", tmp_path / "two"
    assert read(two / "metrics.json") == first[1]
    assert first[1]["epochs"] == 2
    assert steps_of(two) == steps_of(one)
    assert_close(load_weights(two / "checkpoints" / "best.pt"), load_weights(one / "checkpoints" / "best.pt"))
    assert_records_close(
        read(two, "checkpoints", "training_history.json"), read(one, "checkpoints", "training_history.json")
    )


# -- graphs -------------------------------------------------------------------------------------------------------


def graphs_alone(folder):
    """A run on one rank that is stopped inside the second epoch, and one that is not."""
    leave_the_report_out(GRAPHS_PACK)
    settings = [*GRAPHS, f"dataset.root={folder / 'data'}"]
    stopped = outcome(GRAPHS_PACK, settings, folder / "two", Stop("on_after_step", 5, interrupt))
    return stopped, outcome(GRAPHS_PACK, settings, folder / "one")


def graphs_on_two(folder):
    """The stopped run, killed and gone on with to its end."""
    graphs_report.draw = lambda *args: []
    settings = [*GRAPHS, f"dataset.root={folder / 'data'}"]
    killed = outcome(GRAPHS_PACK, settings, folder / "two", Stop("on_after_step", 6, kill))
    reads = Reads()
    return killed, outcome(GRAPHS_PACK, settings, folder / "two", reads), reads.counts


@pytest.mark.slow
def test_graphs_go_on_from_one_rank_to_two_and_end_as_one(tmp_path):
    ((stopped, alone),) = run_on_ranks(graphs_alone, 1, tmp_path, timeout=120)
    assert (stopped, set(alone)) == (130, BARE)
    first, second = run_on_ranks(graphs_on_two, 2, tmp_path, timeout=180)
    assert (first[0], second[:2]) == ("killed", ("killed", None))
    assert_shared(first[2], second[2], batch_size=16)
    one, two = tmp_path / "one", tmp_path / "two"
    assert read(two / "metrics.json") == first[1]
    assert first[1]["epochs"] == 2
    assert steps_of(two) == steps_of(one)
    assert_close(load_weights(two / "checkpoints" / "best.pt"), load_weights(one / "checkpoints" / "best.pt"))
    ours, theirs = (read(run, "checkpoints", "history.json") for run in (two, one))
    assert_records_close(ours["val"], theirs["val"])


# -- text ---------------------------------------------------------------------------------------------------------


def text_alone(folder):
    """A run on one rank that is stopped inside the second epoch, and one that is not."""
    text_report.plot_losses, TEXT_PACK.report = draw_nothing, lambda *args: Report()
    stopped = outcome(TEXT_PACK, TEXT, folder / "two", Stop("on_after_step", 20, interrupt))
    return stopped, outcome(TEXT_PACK, TEXT, folder / "one")


def text_on_two(folder):
    """The stopped run, killed and gone on with to the end of its fine-tuning."""
    text_report.plot_losses, TEXT_PACK.report = draw_nothing, lambda *args: Report()
    killed = outcome(TEXT_PACK, TEXT, folder / "two", Stop("on_after_step", 26, kill))
    return killed, outcome(TEXT_PACK, [*TEXT, "training.parallel=fsdp"], folder / "two")


@pytest.mark.slow
def test_text_goes_on_from_one_rank_to_two_and_is_tuned_on_the_first(tmp_path):
    ((stopped, alone),) = run_on_ranks(text_alone, 1, tmp_path, timeout=120)
    assert stopped == 130
    first, second = run_on_ranks(text_on_two, 2, tmp_path, timeout=180)
    assert (first[0], second) == ("killed", ("killed", None))
    one, two = tmp_path / "one", tmp_path / "two"
    for part in ("", "lora"):
        assert steps_of(two / part) == steps_of(one / part)
    assert_close(load_weights(two / "best_model.pt"), load_weights(one / "best_model.pt"))
    assert first[1]["val"] == pytest.approx(alone["val"], abs=1e-5)
    assert first[1]["lora"]["after"] == pytest.approx(alone["lora"]["after"], abs=1e-3)
