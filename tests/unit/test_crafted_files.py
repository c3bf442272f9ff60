"""Files that somebody made to hurt: each is refused in one line, by every reader, before anything is allocated."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from treadle import load_weights, verify_checkpoint
from treadle.checkpoint.safe.inspect import inspect_path
from treadle.checkpoint.store import find_latest, load_checkpoint, save_checkpoint
from treadle.errors import CheckpointError


def saved(tree=None):
    buffer = io.BytesIO()
    torch.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3} if tree is None else tree, buffer)
    return buffer.getvalue()


def rebuilt(content, change=lambda records: None, compression=zipfile.ZIP_STORED):
    """Take an archive apart, change its records, and put it together again with right CRC-32s."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def in_pickle(*changes):
    def change(records):
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert old in records["archive/data.pkl"]
            records["archive/data.pkl"] = records["archive/data.pkl"].replace(old, new, 1)

    return rebuilt(saved(), change)


def adding(name, data=b"x"):
    return rebuilt(saved(), lambda records: records.__setitem__(name, data))


def with_pickle(data):
    return rebuilt(saved(), lambda records: records.__setitem__("archive/data.pkl", data))


class Code:
    def __reduce__(self):
        return os.system, ("touch was_executed",)


def twice():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"N.")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("archive/data.pkl", b"N.")
    return buffer.getvalue()


def over_declared():
    """A stored record whose sizes claim a terabyte."""
    content = bytearray(rebuilt(saved()))
    at = content.index(b"PK\x01\x02")
    content[at + 20 : at + 28] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    return bytes(content)


CRAFTED = {
    "code": (lambda: saved({"model": {}, "x": Code()}), r"system.*could run code"),
    "code under another name": (lambda: with_pickle(b"cbuiltins\neval\n(X\x01\x00\x00\x001tR."), r"builtins\.eval"),
    "code of protocol 4": (lambda: with_pickle(pickle.dumps(Code(), protocol=4)), "system"),
    "extension registry": (lambda: with_pickle(b"\x80\x02\x82\x01."), "EXT1"),
    "getattr through a dotted name": (lambda: with_pickle(b"ctorch\nos.system\n."), r"torch\.os\.system"),
    "huge bytearray": (lambda: with_pickle(b"cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x10\x85R."), "bytearray"),
    "huge tensor by its class": (lambda: with_pickle(b"ctorch\nTensor\n\x8a\x05\0\0\0\0\x10\x85R."), "allocate"),
    "huge storage by its class": (
        lambda: with_pickle(b"ctorch.storage\nUntypedStorage\n\x8a\x05\0\0\0\0\x10\x85R."),
        "allocate",
    ),
    "object by its class": (lambda: with_pickle(b"ctorch\nTensor\n)\x81."), "makes an object"),
    "zip bomb": (
        lambda: rebuilt(saved({"z": torch.zeros(2_000_000)}), compression=zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "over-declared record": (over_declared, "claim more bytes|damaged"),
    "path traversal": (lambda: adding("archive/../../etc/cron.d/x"), "outside the archive"),
    "absolute name": (lambda: adding("/etc/cron.d/x"), "outside the archive"),
    "backslashes": (lambda: adding("archive\\..\\x"), "outside the archive"),
    "drive letter": (lambda: adding("C:x"), "outside the archive"),
    "record given twice": (twice, "twice"),
    "nested archive": (lambda: adding("archive/inner.zip", saved()), "not one that torch.save writes"),
    "TorchScript": (lambda: adding("archive/code/__torch__.py"), "TorchScript"),
    "something before it": (lambda: b"#!/bin/sh\nrm -rf x\n" + saved(), "before the archive|damaged"),
    "something after it": (lambda: saved() + b"#!/bin/sh" * 9, "before the archive|damaged"),
    "storage larger than its record": (lambda: in_pickle(b"K\x06t", b"M\x00\x10t"), "claims 4,096 elements"),
    "storage of no record": (lambda: in_pickle(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x008"), r"data/8 is missing"),
    "storage of another kind": (lambda: in_pickle(b"FloatStorage", b"DoubleStorage"), "claims 6 elements of 8"),
    "sizes beyond the storage": (lambda: in_pickle(b"K\x02K\x03\x86", b"K\x02M\x00\xff\x86"), "reaches outside"),
    "absurd sizes": (
        lambda: in_pickle(b"K\x02K\x03\x86", b"\x8a\x07\0\0\0\0\0\0\x10\x8a\x07\0\0\0\0\0\0\x10\x86"),
        "reaches outside",
    ),
    "many sizes of one element": (
        lambda: in_pickle(b"K\x02K\x03\x86", b"M\xff\xffK\x03\x86", b"K\x03K\x01\x86", b"K\x00K\x00\x86"),
        "reaches outside",
    ),
    "negative size": (lambda: in_pickle(b"K\x02K\x03\x86", b"J\xff\xff\xff\xffK\x03\x86"), "whole numbers"),
    "strides outside": (lambda: in_pickle(b"K\x03K\x01\x86", b"M\x00\x10K\x01\x86"), "reaches outside"),
    "offset outside": (lambda: in_pickle(b"QK\x00", b"QK\x09"), "reaches outside"),
    "endless pickle": (lambda: with_pickle(b"\x80\x02" + b"(" * 1000), "damaged"),
    "text": (lambda: b"hello there, this is text", "damaged"),
    "nothing": (lambda: b"", "damaged"),
    "gzip": (lambda: b"\x1f\x8b\x08" + bytes(50), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CRAFTED))
def test_a_crafted_file_is_refused_in_one_line_and_runs_nothing(tmp_path, monkeypatch, name):
    make, words = CRAFTED[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    path.write_bytes(make())
    (problem, *_) = verify_checkpoint(path)
    for read in (load_checkpoint, load_weights):
        with pytest.raises(CheckpointError, match=words) as caught:
            read(path)
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 600
    with pytest.raises(CheckpointError, match="no intact"):
        find_latest([path])
    assert inspect_path(path)["problems"]
    assert os.listdir() == ["a.pt"]
    assert problem.isascii()


def test_no_memory_is_taken_for_what_a_file_only_claims(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for make, _ in CRAFTED.values():
        (tmp_path / "a.pt").write_bytes(make())
        assert verify_checkpoint(tmp_path / "a.pt") != []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_what_torch_itself_writes_is_read(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    base = torch.arange(12.0)
    trees = [
        module.state_dict(),
        {"t": base[3:9].view(2, 3).t(), "all": base, "empty": torch.zeros(0, 3), "scalar": torch.tensor(1)},
        {"sparse": torch.eye(3).to_sparse()},
        {"half": torch.ones(2).bfloat16(), "f8": torch.ones(2).to(torch.float8_e5m2)},
        {"u": torch.ones(2).to(torch.uint16)},
        {"parameter": module[0].weight, "conj": torch.tensor([1 + 2j]).conj(), "size": torch.Size([1]), "b": b"ab"},
        {"set": {1, 2}, "complex": 1j, "dtype": torch.float32, "device": torch.device("cpu"), "big": 2**70},
        {str(i): torch.zeros(1) for i in range(300)},
    ]  # fmt: skip
    for tree in trees:
        torch.save(tree, tmp_path / "a.pt")
        assert verify_checkpoint(tmp_path / "a.pt") == []
        assert set(load_checkpoint(tmp_path / "a.pt")) == set(tree)
        assert inspect_path(tmp_path / "a.pt")["problems"] == []


# -- fuzzing ------------------------------------------------------------------------------------------------------


def survives(path):
    """The readers either load or say CheckpointError; nothing else ever comes out."""
    problems = verify_checkpoint(path)
    said = ""
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said
    assert said or problems == []
    json.dumps(inspect_path(path))


FUZZ = settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
edits = st.lists(st.tuples(st.integers(0, 10**9), st.binary(min_size=0, max_size=6), st.integers(0, 6)), max_size=6)


def edited(content, changes):
    data = bytearray(content)
    for where, new, length in changes:
        at = where % (len(data) + 1)
        data[at : at + length] = new
    return bytes(data)


@FUZZ
@given(changes=edits)
def test_a_file_changed_anywhere_loads_or_is_refused(tmp_path, changes):
    (tmp_path / "a.pt").write_bytes(edited(saved(), changes))
    survives(tmp_path / "a.pt")


@FUZZ
@given(changes=edits)
def test_a_pickle_changed_anywhere_under_a_right_checksum_loads_or_is_refused(tmp_path, changes):
    tree = {
        "model": nn.Linear(2, 2).state_dict(),
        "s": torch.eye(2).to_sparse(),
        "h": [{"a": 1.5}],
        "e": torch.ones(2).half(),
    }

    def change(records):
        records["archive/data.pkl"] = edited(records["archive/data.pkl"], changes)

    (tmp_path / "a.pt").write_bytes(rebuilt(saved(tree), change))
    survives(tmp_path / "a.pt")


@FUZZ
@given(
    content=st.binary(max_size=300), start=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x20" + bytes(7) + b"{"])
)
def test_random_bytes_are_refused(tmp_path, content, start):
    (tmp_path / "a.pt").write_bytes(start + content)
    survives(tmp_path / "a.pt")


@FUZZ
@given(content=st.binary(max_size=60))
def test_a_random_pickle_in_a_right_archive_is_refused_or_loads(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(with_pickle(b"\x80\x02" + content + b"."))
    survives(tmp_path / "a.pt")


# -- what inspect shows -------------------------------------------------------------------------------------------


def test_inspect_shows_the_keys_shapes_types_versions_step_and_epoch(tmp_path):
    tree = {"format": {"name": "treadle", "version": 1, "face": "mini"}, "model": {"w": torch.ones(2, 3)}, "epoch": 4,
            "global_step": 9, "versions": {"torch": "2.9"}}  # fmt: skip
    report = inspect_path(save_checkpoint(tree, tmp_path / "a.pt"))
    assert report["kind"] == "treadle checkpoint"
    assert (report["step"], report["epoch"], report["versions"]) == (9, 4, {"torch": "2.9"})
    assert report["tensors"] == [{"name": "model.w", "shape": [2, 3], "dtype": "float32", "bytes": 24}]
    assert report["keys"] == list(tree)
    assert report["values"]["format.face"] == "mini"


def test_inspect_knows_the_files_of_others(tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "state.pt")
    lightning = {"pytorch-lightning_version": "2.6", "epoch": 1, "global_step": 5, "state_dict": {"w": torch.ones(1)}}
    torch.save(lightning, tmp_path / "a.ckpt")
    torch.save({**lightning, "callbacks": Code()}, tmp_path / "code.ckpt")
    torch.save({"w": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "code.pkl").write_bytes(pickle.dumps(Code(), protocol=4))
    header = json.dumps(
        {"w": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
    )
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    kinds = {path.name: inspect_path(path) for path in tmp_path.iterdir()}
    assert kinds["state.pt"]["kind"] == "torch state dict"
    assert (kinds["a.ckpt"]["kind"], kinds["a.ckpt"]["step"]) == ("Lightning checkpoint", 5)
    assert kinds["a.ckpt"]["problems"] == []
    assert "posix.system" in kinds["code.ckpt"]["globals"]
    assert kinds["code.ckpt"]["problems"][0].startswith("refused")
    assert kinds["code.ckpt"]["tensors"][0]["name"] == "state_dict.w"
    assert kinds["code.pkl"]["globals"] == ["posix.system"]
    assert "torch._utils._rebuild_tensor_v2" in kinds["old.pt"]["globals"]
    assert kinds["a.safetensors"]["tensors"] == [{"name": "w", "shape": [2, 2], "dtype": "F16", "bytes": 8}]
    assert kinds["a.safetensors"]["problems"] == []


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**60, 2**60], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [20], "data_offsets": [0, 80]},
        {"shape": [2]},
        3,
    ],
)
def test_a_safetensors_header_that_lies_is_named_damaged(tmp_path, entry):
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "damaged" in inspect_path(tmp_path / "a.safetensors")["problems"][0]


def test_inspect_of_a_folder_lists_its_checkpoints_with_step_and_state(tmp_path):
    for step in (1, 2):
        save_checkpoint({"model": {"w": torch.ones(9)}, "global_step": step}, tmp_path / f"checkpoint_step_{step}.pt")
        os.utime(tmp_path / f"checkpoint_step_{step}.pt", ns=(step, step))
    data = bytearray((tmp_path / "checkpoint_step_1.pt").read_bytes())
    data[data.index(struct.pack("<9f", *[1.0] * 9))] ^= 1  # in the tensor: the archive also has unused bytes
    (tmp_path / "checkpoint_step_1.pt").write_bytes(data)
    (tmp_path / "checkpoint_latest.pt").symlink_to("checkpoint_step_7.pt")
    os.mkdir(tmp_path / "checkpoint_step_3.pt")
    found = {entry["name"]: entry for entry in inspect_path(tmp_path)["checkpoints"]}
    assert found["checkpoint_step_2.pt"]["problems"] == []
    assert found["checkpoint_step_2.pt"]["step"] == 2
    assert found["checkpoint_step_1.pt"]["problems"] != []
    assert "checkpoint_step_7.pt" in found["checkpoint_latest.pt"]["problems"][0]
    assert found["checkpoint_step_3.pt"]["problems"] == ["not a file"]


def test_nothing_in_a_name_reaches_the_terminal_or_blows_up_the_report(tmp_path):
    laughs = [1]
    for _ in range(60):
        laughs = [laughs, laughs]
    torch.save({"a\x1b[31m\n": torch.ones(1), "laughs": laughs, "big": 1 << 2000, "n": float("nan")}, tmp_path / "a.pt")
    report = inspect_path(tmp_path / "a.pt")
    assert "\x1b" not in json.dumps(report)
    assert len(json.dumps(report)) < 10_000
    (tmp_path / "deep.pt").write_bytes(with_pickle(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."))
    survives(tmp_path / "deep.pt")


def test_the_command_shows_the_same_and_its_exit_code_says_whether_the_file_is_sound(tmp_path, capsys):
    pytest.importorskip("typer")
    from treadle.cli.main import main

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["inspect", *map(str, arguments)])
        return left.value.code, capsys.readouterr()

    good = save_checkpoint({"model": {"w": torch.ones(2, 3)}, "global_step": 9}, tmp_path / "a.pt")
    code, shown = run(good)
    assert code == 0
    assert "model.w" in shown.out
    assert "step      9" in shown.out
    code, shown = run(good, "--json")
    assert json.loads(shown.out)["step"] == 9
    assert "a.pt" in run(tmp_path)[1].out
    torch.save({"x": Code()}, tmp_path / "b.pt")
    code, shown = run(tmp_path / "b.pt")
    assert code == 1
    assert "posix.system" in shown.out
    code, shown = run(tmp_path / "none.pt")
    assert (code, shown.err.count("\n")) == (2, 1)  # a wrong path
    assert "Traceback" not in shown.err
