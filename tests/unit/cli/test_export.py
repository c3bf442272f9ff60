"""``treadle export``: what it says, its exit codes, and its JSON."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn

from foreign_kit import trained
from helpers import differences
from treadle.checkpoint import load_checkpoint, save_checkpoint
from treadle.checkpoint.schema import KEYS, to_plain
from treadle.checkpoint.sharded import save_sharded
from treadle.cli.main import main


def run(capsys, *arguments, code=0):
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["export", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    assert left.value.code == code, captured.err
    return captured


@pytest.fixture
def checkpoint(tmp_path):
    model, _ = trained()
    tree = {**dict.fromkeys(KEYS), "model": model.state_dict(), "global_step": 1200, "epoch": 3}
    shadow = {name: value + 1 for name, value in model.state_dict().items()}
    tree["ema"] = {"ema": {"decay": 0.9, "update_interval": 1, "num_updates": 4, "shadow": shadow}}
    tree["format"] = {"name": "treadle", "version": 1, "face": "functional", "scored": "ema"}
    save_checkpoint(to_plain(tree), tmp_path / "best_model.pt")
    return tmp_path / "best_model.pt"


def test_it_says_which_file_and_which_weights(checkpoint, tmp_path, capsys):
    said = run(capsys, tmp_path, "--to", "torch", "--out", tmp_path / "w.pt").out
    assert said.splitlines()[0] == str(tmp_path / "w.pt")
    assert (
        f"the averaged weights that were validated, of {checkpoint} (treadle, functional, step 1,200, epoch 3)" in said
    )
    said = run(capsys, checkpoint, "--to", "torch", "--raw", "--out", tmp_path / "r.pt").out
    assert f"the raw weights of {checkpoint}" in said
    averaged, raw = (torch.load(tmp_path / name, weights_only=True) for name in ("w.pt", "r.pt"))
    assert torch.equal(averaged["0.weight"], raw["0.weight"] + 1)


def test_json_says_the_same_to_programs(checkpoint, tmp_path, capsys):
    said = json.loads(run(capsys, checkpoint, "--to", "safetensors", "--json").out)
    assert said["path"] == str(tmp_path / "export" / "best_model.safetensors")
    assert {key: said[key] for key in ("source", "kind", "weights", "face", "step", "epoch", "tensors")} == {
        "source": str(checkpoint), "kind": "treadle", "weights": "ema", "face": "functional", "step": 1200, "epoch": 3,
        "tensors": 9,
    }  # fmt: skip


def test_a_foreign_file_says_what_is_left_out(tmp_path, capsys):
    model, optimizer = trained()
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pth")
    said = run(capsys, tmp_path / "old.pth", "--to", "torch").out
    assert "left out: optimizer" in said
    weights = torch.load(tmp_path / "export" / "old.pt", weights_only=True)
    assert differences(weights, dict(model.state_dict())) == []


def one_line(captured, *words):
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert len(captured.err.strip().splitlines()) == 1
    for word in words:
        assert word in captured.err


def test_an_existing_file_is_a_wrong_setting_unless_forced(checkpoint, tmp_path, capsys):
    run(capsys, checkpoint, "--to", "torch")
    one_line(run(capsys, checkpoint, "--to", "torch", code=2), "already exists", "--force")
    run(capsys, checkpoint, "--to", "torch", "--force")


def test_errors_are_one_line(checkpoint, tmp_path, capsys):
    one_line(run(capsys, tmp_path / "absent", "--to", "torch", code=2), "no such file or folder")
    one_line(run(capsys, checkpoint, "--to", "hf", code=2), "config.json")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(nn.Linear(1, 1)))
    one_line(run(capsys, tmp_path / "evil.pt", "--to", "torch", code=1), "bare pickle", "torch.nn")
    (tmp_path / "empty").mkdir()
    one_line(run(capsys, tmp_path / "empty", "--to", "torch", code=1), "holds none of")


def test_the_whole_state_goes_into_a_folder_of_shards_and_back(checkpoint, tmp_path, capsys):
    folder = tmp_path / "export" / "best_model"
    assert run(capsys, checkpoint, "--to", "shards").out == f"{folder}\n"
    said = json.loads(run(capsys, folder, "--to", "checkpoint", "--out", tmp_path / "again.pt", "--json").out)
    assert said == {"path": str(tmp_path / "again.pt")}
    assert differences(load_checkpoint(tmp_path / "again.pt"), load_checkpoint(checkpoint)) == []
    one_line(run(capsys, checkpoint, "--to", "shards", code=2), "already exists", "--force")
    run(capsys, checkpoint, "--to", "shards", "--force")
    one_line(run(capsys, checkpoint, "--to", "shards", "--raw", code=2), "--raw", "whole state")


def test_weights_are_taken_from_a_folder_of_shards(checkpoint, tmp_path, capsys):
    folder = save_sharded(load_checkpoint(checkpoint), tmp_path / "checkpoint_step_3")
    run(capsys, folder, "--to", "torch")
    run(capsys, checkpoint, "--to", "torch", "--out", tmp_path / "w.pt")
    found = [
        torch.load(path, weights_only=True) for path in (tmp_path / "export/checkpoint_step_3.pt", tmp_path / "w.pt")
    ]
    assert differences(*found) == []


def test_a_folder_of_shards_is_shown_like_a_file(checkpoint, tmp_path, capsys):
    folder = save_sharded(load_checkpoint(checkpoint), tmp_path / "checkpoint_step_3")
    said = []
    for path in (folder, checkpoint):
        with pytest.raises(SystemExit) as left:
            main(["inspect", str(path)])
        assert left.value.code == 0
        said.append([line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("imports")])
    assert [line for line in said[0] if line not in said[1]] == ["shards    1", "ranks     1"]
    assert [line for line in said[1] if line not in said[0]] == []
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(folder)])
    assert left.value.code == 1
    assert "__0_0.distcp of rank 0 is missing" in capsys.readouterr().out
