"""Checkpoints of sharded models: whole tensors in one file or parts in a folder, loaded on any ranks, to the bit."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers import differences
from ranks import run_on_ranks
from sharded_kit import Cut, differing, engine, loader, run, tensors_of
from treadle import distributed
from treadle.checkpoint import load_checkpoint, load_weights, verify_checkpoint
from treadle.checkpoint.sharded import extract_tensors
from treadle.engine.state_options import StateOptions
from treadle.errors import CheckpointError

STEPS = 3
LOADS = [("fsdp", "alone"), ("fsdp", "ddp"), ("ddp", "parts"), ("ddp", "file"), ("fsdp", "file"), ("fsdp", "parts")]
CUTS = [("foreground", 1), ("foreground", 4), ("background", 2), ("file", 6)]  # an epoch has four steps
MORE_CUTS = [(name, cut) for name in ("foreground", "background", "file") for cut in range(1, 7)]


def two_ranks(folder):
    """Run all cases that need two ranks in one launch; return whole tensors from rank 0."""
    folder = Path(folder)
    found = {
        "parts": tensors_of(run("fsdp", folder / "parts", STEPS)),
        "file": tensors_of(run("fsdp", folder / "file", STEPS, interval=STEPS, sharded=False)),
        "ddp": tensors_of(run("ddp", folder / "ddp", STEPS, interval=STEPS, sharded=True)),
        "hsdp": tensors_of(run("hsdp", folder / "hsdp", STEPS, interval=STEPS)),
    }
    for kind, name in LOADS:
        found[name, kind] = tensors_of(run(kind, folder / name, STEPS, seed=9))
    found |= cut_and_straight(folder, CUTS)
    found["not finite"] = not_finite(folder / "nan")
    found["buffer"] = buffers_that_differ(folder / "buffers")
    frozen_left_out("fsdp", folder / "frozen").run(loader(), max_steps=1)
    return found


def cut_and_straight(folder, cuts):
    """Return the differences between an interrupted, resumed run and an undisturbed one."""
    straight, found = run("fsdp", None, 7).state_dict(), {}
    for name, cut in cuts:
        in_background = name == "background"  # then one write is under way at each step
        settings = {"background": in_background, "interval": 1 if in_background else 100}
        settings["sharded"] = False if name == "file" else None
        run("fsdp", Path(folder, f"{name}{cut}"), 7, hooks=[Cut(cut)], **settings)
        resumed = run("fsdp", Path(folder, f"{name}{cut}"), 7, seed=9, **settings).state_dict()
        found[name, cut] = differences(straight, resumed) if dist.get_rank() == 0 else []
    return found


def frozen_left_out(kind, folder):
    """An engine that writes whole files without what is frozen."""
    made = engine(kind, folder)
    distributed.unwrap(made.model).narrow.requires_grad_(False)
    made.state.options = StateOptions(full_state_dict=True, ignore_frozen_params=True)
    return made


def buffers_that_differ(folder):
    """Return the restored values of a buffer that differs between ranks."""
    made = run("ddp", folder, 1, sharded=True)
    made.model.module.seen.fill_(40.0 + dist.get_rank())
    made.progress.step = 2
    made.hooks[-1].save(made)
    return float(load_checkpoint(folder / "checkpoint_step_2")["model"]["seen"])


def not_finite(folder):
    """The state of one rank has a NaN: what is written, and what is there afterwards."""
    made = run("fsdp", folder, 1, keep_previous=1)
    with torch.no_grad():
        made.model.blocks[0][0].weight.to_local()[-1] += torch.nan * dist.get_rank()
    made.run(loader(), max_steps=1)
    made.progress.step = 2
    made.hooks[-1].save(made)
    return sorted(path.name for path in folder.iterdir())


def three_ranks(folder):
    folder = Path(folder)
    found = {name: tensors_of(run("fsdp", folder / name, STEPS, seed=9)) for name in ("parts", "file", "alone")}
    again = engine("fsdp", folder / "thirds")
    again.load_state_dict(load_checkpoint(folder / "parts" / "checkpoint_latest"))
    again.prepare()
    again.hooks[-1].save(again)
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    alone = tensors_of(run(None, folder / "alone", STEPS))
    two, other = run_on_ranks(two_ranks, 2, str(folder), timeout=240)
    three = run_on_ranks(three_ranks, 3, str(folder), timeout=120)[0]
    return folder, {**two, "alone": alone, "file on rank 1": other["file"]}, three


@pytest.mark.parametrize(("kind", "name"), LOADS)
def test_a_state_is_the_same_on_two_ranks_whatever_wrote_it(outcome, kind, name):
    _, found, _ = outcome
    assert differing(found[name, kind], found[name]) == []


@pytest.mark.parametrize("name", ["parts", "file", "alone"])
def test_a_state_is_the_same_on_three_ranks(outcome, name):
    _, found, three = outcome
    assert differing(three[name], found[name]) == []


@pytest.mark.parametrize("name", ["parts", "file", "ddp", "hsdp"])
def test_a_state_is_the_same_in_one_process(outcome, name, caplog):
    folder, found, _ = outcome
    resumed = run(None, folder / name, STEPS, seed=9)
    assert resumed.step == STEPS
    assert differing(tensors_of(resumed), found[name]) == []
    assert "random generators start fresh" in caplog.text


def test_a_folder_holds_the_tree_of_a_single_file(outcome):
    folder, found, _ = outcome
    parts = load_checkpoint(folder / "parts" / "checkpoint_step_3")
    file = load_checkpoint(folder / "file" / "checkpoint_step_3.pt")
    assert list(parts) == list(file)
    assert differences({**parts, "rng": None}, {**file, "rng": None}) == []
    assert differing(extract_tensors(parts)[0], found["parts"]) == []
    assert parts["model"]["inward.weight"] is parts["model"]["again.weight"]  # tied weights are one tensor
    weights = load_weights(folder / "parts" / "checkpoint_latest")
    assert differences(weights, parts["model"]) == []


def test_whole_tensors_are_kept_on_rank_0_only(outcome):
    kept = [key for key in outcome[1]["file on rank 1"] if not key.endswith(".step")]
    assert kept == ["model.seen", "ema.ema.shadow.seen"]


def test_both_ranks_write_tensors_of_replicas_and_of_shards(outcome):
    folder, _, _ = outcome
    for name in ("parts", "ddp", "hsdp"):
        files = json.loads((folder / name / "checkpoint_step_3" / "WHOLE.json").read_text())["files"]
        assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"]
        sizes = [files[f"__{rank}_0.distcp"]["size"] for rank in range(2)]
        assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_a_sharded_run_that_was_cut_ends_as_one_that_was_not(outcome, name, cut):
    assert outcome[1][name, cut] == []


@pytest.mark.slow
def test_a_sharded_run_may_be_cut_anywhere(tmp_path):
    found = run_on_ranks(cut_and_straight, 2, str(tmp_path), MORE_CUTS, timeout=300)[0]
    assert found == {cut: [] for cut in MORE_CUTS}


def test_parts_of_three_ranks_where_some_have_nothing_are_whole_in_one_process(outcome):
    folder, found, _ = outcome
    (thirds,) = (folder / "thirds").glob("checkpoint_step_*")
    assert verify_checkpoint(thirds) == []
    assert differing(extract_tensors(load_checkpoint(thirds))[0], found["parts"]) == []


def test_of_a_buffer_that_ranks_do_not_share_that_of_rank_0_is_kept_as_in_a_file(outcome):
    assert outcome[1]["buffer"] == 40.0


def test_a_sharded_model_writes_whole_files_without_frozen_weights_where_options_ask_for_it(outcome):
    folder = outcome[0] / "frozen"
    saved = load_checkpoint(folder / "checkpoint_step_1.pt")
    assert sorted(saved["base"]) == ["narrow.bias", "narrow.weight"]
    assert not saved["base"].keys() & saved["model"].keys()
    resumed = frozen_left_out(None, folder)
    resumed.run(loader(), max_steps=1)
    assert resumed.step == 1
    assert torch.equal(resumed.model.inward.weight, saved["model"]["inward.weight"])


def test_a_state_with_a_nan_on_one_rank_is_put_aside_by_all(outcome):
    names = ["checkpoint_latest", "checkpoint_step_1", "checkpoint_step_2.nonfinite"]
    assert [name for name in outcome[1]["not finite"] if not name.startswith(".")] == names


# -- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(outcome, tmp_path):
    """A copy of a run of parts with three checkpoints."""
    shutil.copytree(outcome[0] / "parts", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["__1_0.distcp", "__0_0.distcp", "state.pt", ".metadata"])
def test_a_flipped_bit_is_named_with_its_file_and_the_one_before_is_resumed(folder, name, caplog):
    file = folder / "checkpoint_step_3" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    (problem,) = verify_checkpoint(folder / "checkpoint_step_3")
    assert name in problem
    assert "CRC-32" in problem
    assert ("of rank 1" in problem) == (name == "__1_0.distcp")
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder / "checkpoint_step_3")
    assert run(None, folder, 1).step == 2
    assert name in caplog.text


@pytest.mark.parametrize("harm", ["cut", "missing", "no marker", "bad marker"])
def test_a_folder_that_is_not_whole_is_never_loaded(folder, harm):
    target = folder / "checkpoint_step_3"
    if harm == "cut":
        (target / "__1_0.distcp").write_bytes((target / "__1_0.distcp").read_bytes()[:-1])
    elif harm == "missing":
        (target / "__1_0.distcp").unlink()
    elif harm == "no marker":
        (target / "WHOLE.json").unlink()
    else:
        (target / "WHOLE.json").write_text("{")
    assert verify_checkpoint(target) != []
    with pytest.raises(CheckpointError, match="cannot be used"):
        load_checkpoint(target)
    assert run(None, folder, 1).step == 2


def test_an_unfinished_folder_is_named_and_removed_when_the_next_run_starts(folder, caplog):
    target = folder / "checkpoint_step_4"
    (folder / "checkpoint_step_3").rename(target)
    (target / "WHOLE.json").rename(target / "UNFINISHED")
    with caplog.at_level(logging.WARNING):
        assert run(None, folder, 1).step == 2
    assert "checkpoint_step_4: it is unfinished" in caplog.text
    assert not target.exists()


def test_a_folder_that_stepped_aside_comes_back_if_the_new_one_was_never_finished(folder):
    (folder / "checkpoint_step_3").rename(folder / ".checkpoint_step_3.old")
    (folder / "checkpoint_step_3").mkdir()
    (folder / "checkpoint_step_3" / "UNFINISHED").touch()
    assert run(None, folder, 1).step == 3
    assert not (folder / ".checkpoint_step_3.old").exists()


def test_folders_of_others_stay_as_they_are(folder):
    for name in ("checkpoint_step_9", "notes"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"mine")
    made = run(None, folder, 5, keep_previous=1)
    assert made.step == 5
    assert (folder / "checkpoint_step_9" / "__0_0.distcp").read_bytes() == b"mine"
    assert (folder / "notes" / "__0_0.distcp").read_bytes() == b"mine"


def test_retention_counts_folders_and_files_alike(folder):
    run(None, folder, 5, keep_previous=2, sharded=False)
    names = sorted(path.name for path in folder.iterdir())
    # The folder resumed from stays, as a file would.
    assert names == ["checkpoint_latest.pt", "checkpoint_step_3", "checkpoint_step_4.pt", "checkpoint_step_5.pt"]
    run(None, folder, 7, keep_previous=2, sharded=True)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checkpoint_latest", "checkpoint_step_5.pt", "checkpoint_step_6", "checkpoint_step_7"]


def test_saving_a_step_again_replaces_the_folder(folder):
    marker = folder / "checkpoint_step_3" / "WHOLE.json"
    os.utime(marker, (1, 1))  # clocks of file systems may tick in seconds
    made = run(None, folder, 3, load="checkpoint_step_2", sharded=True)
    assert made.step == 3
    assert marker.stat().st_mtime > 1
    assert load_checkpoint(folder / "checkpoint_latest")["global_step"] == 3
    assert not list(folder.glob(".checkpoint*"))
