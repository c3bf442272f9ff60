"""Folders of shards in one process: what is read, what is refused, and the way to single files and back."""

from __future__ import annotations

import json
import os
import pickle
import zlib

import pytest
import torch
from torch import nn

import helpers
from treadle.checkpoint import find_latest, load_checkpoint, load_weights, save_checkpoint, verify_checkpoint
from treadle.checkpoint.convert import convert_checkpoint
from treadle.checkpoint.files import STORED
from treadle.checkpoint.find_step import nearest_state, states_in
from treadle.checkpoint.order import by_progress
from treadle.checkpoint.safe.inspect import inspect_path
from treadle.checkpoint.schema import to_plain
from treadle.checkpoint.shard_manifest import MARKER
from treadle.checkpoint.sharded import extract_tensors, save_sharded
from treadle.checkpoint.store import open_checkpoint
from treadle.distributed.shards import LocalShard
from treadle.distributed.state_names import load_model_state
from treadle.errors import CheckpointError, ConfigError
from treadle.optim.optimizer import load_optimizer_state, optimizer_state


def differences(a, b):
    """As the helper, also for sparse tensors."""
    return helpers.differences(dense(a), dense(b))


def dense(tree):
    if isinstance(tree, torch.Tensor):
        return tree.to_dense()
    return {key: dense(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net.register_buffer("empty", torch.zeros(0, 2))
    net.register_buffer("turned", torch.ones(2, dtype=torch.complex64).conj())
    net.register_buffer("scattered", torch.eye(2).to_sparse())
    net.register_buffer("narrow", torch.ones(3, 5, dtype=torch.bfloat16).t())
    return net


def state(step=3):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return to_plain(
        {
            "format": {"name": "treadle", "version": 1, "face": "engine", "scored": "ema"},
            "model": net.state_dict(),
            "optimizer": optimizer_state(optimizer, net),
            "ema": {"ema": {"decay": 0.5, "shadow": {name: value.clone() for name, value in net.state_dict().items()}}},
            "global_step": step,
            "epoch": 1,
            "hooks": {"mine": {"table": torch.arange(4), "names": ["a", None, 2.5]}},
        }
    )


@pytest.fixture
def folder(tmp_path):
    return save_sharded(state(), tmp_path / "checkpoint_step_3")


def test_a_folder_gives_back_every_value_to_the_bit(folder):
    assert differences(load_checkpoint(folder), state()) == []
    assert verify_checkpoint(folder) == []
    assert differences(load_weights(folder), load_weights(save_checkpoint(state(), folder.parent / "a.pt"))) == []


def test_tensors_of_a_state_have_flat_keys_and_the_rest_is_plain(folder):
    tensors, rest = extract_tensors(state())
    assert {"model.0.weight", "optimizer.state.2.bias.exp_avg", "ema.ema.shadow.1.running_mean"} <= tensors.keys()
    assert not any("scattered" in key or "mine" in key for key in tensors)
    stored = torch.load(folder / "state.pt", weights_only=True)
    assert differences(stored, rest) == []


def test_whoever_uses_the_key_of_stored_tensors_is_refused():
    with pytest.raises(CheckpointError, match="is reserved for stored tensors"):
        extract_tensors({"hooks": {"mine": {STORED: "model.w"}}})


def test_an_opened_folder_is_read_while_it_is_loaded(folder):
    tree = open_checkpoint(folder)
    assert not isinstance(tree["model"]["0.weight"], torch.Tensor)
    net, other = model(), model()
    nn.init.zeros_(net[0].weight)
    load_model_state(net, tree["model"])
    load_model_state(other, state()["model"])
    assert differences(dict(net.state_dict()), dict(other.state_dict())) == []
    optimizer = torch.optim.AdamW(net.parameters())
    load_optimizer_state(optimizer, net, tree["optimizer"])
    assert differences(to_plain(optimizer.state_dict()["state"]), state()["optimizer"]["state"]) == []
    with pytest.raises(CheckpointError, match=r"0.weight is \(4, 3\) in the checkpoint and \(4, 2\)"):
        load_model_state(nn.Sequential(nn.Linear(2, 4)), {"0.weight": tree["model"]["0.weight"]}, kept=["0.bias"])


def test_parts_that_leave_a_gap_are_noticed_when_they_are_read(tmp_path):
    tree = state()
    tree["model"]["0.weight"] = LocalShard(torch.ones(2, 3), (1, 0), (4, 3))
    refused = "Failed to validate global plan"  # torch 2.7 does not even write it
    with pytest.raises(CheckpointError, match=rf"parts of 'model\.0\.weight' are missing from its files|{refused}"):
        load_checkpoint(save_sharded(tree, tmp_path / "gap"))


# -- the metadata -------------------------------------------------------------------------------------------------


class Planted:
    def __reduce__(self):
        return os.system, ("touch planted",)


def rewritten(folder, change):
    """Change the metadata and make the marker fit it, as an attacker would."""
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    data = pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(data)
    marker = json.loads((folder / "WHOLE.json").read_text())
    marker["files"][".metadata"] = {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    (folder / "WHOLE.json").write_text(json.dumps(marker))
    return folder


def plant(metadata):
    metadata.planner_data = Planted()


def leave(metadata):
    for where in metadata.storage_data.values():
        where.relative_path = "../secret"


def reach_out(metadata):
    for where in metadata.storage_data.values():
        where.offset += 10**6


def outside(metadata):
    metadata.state_dict_metadata["model.0.weight"].chunks[0].offsets = torch.Size([2, 0])


def no_tensor(metadata):
    metadata.state_dict_metadata["model.0.weight"] = "x"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (plant, r"system\), which metadata never contains"),
        (leave, r"\.\./secret, which the marker does not name"),
        (reach_out, "is shorter than its header states"),
        (outside, r"a part of model\.0\.weight is outside its bounds"),
        (no_tensor, "is not a tensor"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_and_never_run(folder, change, reason, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rewritten(folder, change)
    with pytest.raises(CheckpointError, match=reason):
        load_checkpoint(folder)
    assert len(verify_checkpoint(folder)) == 1
    assert inspect_path(folder)["problems"] != []
    assert not (tmp_path / "planted").exists()


def test_a_marker_that_names_files_elsewhere_is_refused(folder):
    marker = json.loads((folder / "WHOLE.json").read_text())
    marker["files"]["../secret"] = {"size": 1, "crc32": "00000000"}
    (folder / "WHOLE.json").write_text(json.dumps(marker))
    assert verify_checkpoint(folder) == ["WHOLE.json was not written by treadle"]


def test_a_newer_marker_is_refused(folder):
    marker = json.loads((folder / "WHOLE.json").read_text())
    marker["format"]["version"] = 2
    (folder / "WHOLE.json").write_text(json.dumps(marker))
    with pytest.raises(CheckpointError, match="newer than this treadle"):
        load_checkpoint(folder)


# -- among other checkpoints --------------------------------------------------------------------------------------


def test_folders_and_files_are_found_together(tmp_path, caplog):
    save_checkpoint(state(1), tmp_path / "checkpoint_step_1.pt")
    second = save_sharded(state(2), tmp_path / "checkpoint_step_2")
    third = save_sharded(state(3), tmp_path / "checkpoint_step_3")
    assert {path.name for path in states_in(tmp_path)} == {
        "checkpoint_step_1.pt", "checkpoint_step_2", "checkpoint_step_3",
    }  # fmt: skip
    assert nearest_state(tmp_path, 2)[0] == second
    assert find_latest(states_in(tmp_path))[0] == third
    (third / "__0_0.distcp").unlink()
    assert find_latest(states_in(tmp_path))[0] == second
    assert "__0_0.distcp of rank 0 is missing" in caplog.text


def test_the_furthest_of_files_and_folders_comes_first_whenever_it_was_written(tmp_path):
    first = save_sharded(state(1), tmp_path / "checkpoint_step_1")
    hour_ahead = (first / MARKER).stat().st_mtime_ns + 3600 * 10**9
    os.utime(first / MARKER, ns=(hour_ahead, hour_ahead))
    second = save_sharded(state(2), tmp_path / "checkpoint_step_2")
    third = save_checkpoint(dense(state(3)), tmp_path / "checkpoint_step_3.pt")
    assert by_progress([first, third, second]) == [third, second, first]


def test_a_state_that_is_not_finite_is_put_aside(tmp_path, caplog):
    tree = state()
    tree["model"]["0.bias"][1] = torch.nan
    assert save_sharded(tree, tmp_path / "checkpoint_step_3").name == "checkpoint_step_3.nonfinite"
    assert "model.0.bias" in caplog.text
    assert states_in(tmp_path) == []
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        find_latest(tmp_path.glob("checkpoint*"))


def test_the_report_on_a_folder_is_that_on_a_file_with_who_wrote_it(folder):
    file = inspect_path(save_checkpoint(state(), folder.parent / "a.pt"))
    report = inspect_path(folder)
    assert (report["ranks"], report["shards"], report["problems"]) == (1, 1, [])
    for key in ("kind", "step", "epoch", "format", "keys", "values"):
        assert report[key] == file[key], key
    by_name = {entry["name"]: entry for entry in file["tensors"]}
    assert {entry["name"]: entry for entry in report["tensors"]} == by_name


def test_the_report_on_an_unfinished_folder_says_so(folder):
    os.rename(folder / "WHOLE.json", folder / "UNFINISHED")
    assert "unfinished" in inspect_path(folder)["problems"][0]
    (entry,) = inspect_path(folder.parent)["checkpoints"]
    assert "unfinished" in entry["problems"][0]


def test_a_checkpoint_is_converted_to_the_other_form_and_back(folder, tmp_path):
    file = convert_checkpoint(folder, "file")
    assert file == tmp_path / "export" / "checkpoint_step_3.pt"
    again = convert_checkpoint(file, "folder", out=tmp_path / "again")
    assert differences(load_checkpoint(again), state()) == []
    with pytest.raises(ConfigError, match="already exists"):
        convert_checkpoint(file, "folder", out=tmp_path / "again")
    assert convert_checkpoint(tmp_path, "file", out=tmp_path / "newest.pt", force=True).exists()


def test_only_states_of_training_are_converted(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="no training state"):
        convert_checkpoint(tmp_path / "w.pt", "folder")
    with pytest.raises(ConfigError, match="no such file"):
        convert_checkpoint(tmp_path / "none.pt", "folder")
    with pytest.raises(ConfigError, match="the folder has no checkpoint"):
        convert_checkpoint(os.fspath(tmp_path.joinpath("sub").mkdir() or tmp_path / "sub"), "folder")
