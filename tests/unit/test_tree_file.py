"""Checkpoints have the layout of ``torch.save``'s files, and torch reads the same from both."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from torch import nn
from torch.utils.serialization import config

from treadle.checkpoint import store
from treadle.checkpoint.comparison import same
from treadle.checkpoint.safe.archive import read_archive
from treadle.checkpoint.safe.pickled import walk_pickle
from treadle.checkpoint.tree_file import pieces_of

WEIGHT = torch.randn(4, 3)
NAMED = torch.ones(2)
NAMED.note = "kept"
PLAIN = {
    "values": {"a": 1, "b": [1.5, None, True, False, "text", "é\ud800"], "c": {3: {"deep": -(2**70)}}, "": [], "d": {}},
    "numbers": {"inf": float("inf"), "nan": float("nan"), "tiny": 5e-324, "zero": -0.0, "long": 2**40, "byte": 255},
    "types": {str(kind): torch.ones(3).to(kind) for kind in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )},
    "shared": {"one": WEIGHT, "again": WEIGHT, "part": WEIGHT[1:, :2], "turned": WEIGHT.T, "view": WEIGHT.view(-1)},
    "apart": {**dict(zip("abc", torch.arange(12.0).split([4, 5, 3]), strict=True)), "end": torch.arange(9)[7:]},
    "channels": {"one": torch.ones(2, 1, 1, 1).to(memory_format=torch.channels_last), "two": torch.ones(2, 1, 1, 1)},
    "shapes": {"number": torch.tensor(2.0), "empty": torch.empty(0, 3), "wide": torch.zeros(2, 3, 4, 4).to(
        memory_format=torch.channels_last
    ), "half": torch.tensor(1.0, dtype=torch.bfloat16)},
    "many": {str(number): torch.full((number % 7,), float(number)) for number in range(300)},
}  # fmt: skip
UNUSUAL = {
    "parameter": nn.Parameter(torch.ones(2)), "gradient": torch.ones(2, requires_grad=True), "named": NAMED,
    "complex": torch.ones(2, dtype=torch.complex64), "dtype": torch.float16, "sparse": torch.eye(3).to_sparse(),
    "storage": torch.ones(3).untyped_storage(), "tuple": (1, 2), "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "meta": torch.ones(2, device="meta"), "overlap": [WEIGHT, WEIGHT[1:]], "inside": [WEIGHT[1:], WEIGHT],
    "gradient of a part": [WEIGHT, WEIGHT.view(-1).requires_grad_()],
    "negative": torch.ones(2, dtype=torch.complex64).conj().imag,
    "two types": [WEIGHT, WEIGHT.view(torch.int32)], "bytes": b"12", "module": nn.Linear(1, 1).state_dict(),
}  # fmt: skip


def shared_in(tree):
    """Return which tensors of a flat tree share memory."""
    first = {}
    return [first.setdefault(each.untyped_storage().data_ptr(), name) for name, each in tree.items() if each.numel()]


@pytest.mark.parametrize("tree", PLAIN.values(), ids=PLAIN)
def test_torch_reads_the_tree_from_a_file_of_its_own_layout(tree, tmp_path):
    usual, path = tmp_path / "usual.pt", tmp_path / "quick.pt"
    with open(usual, "wb") as file:
        torch.save(tree, file)
    path.write_bytes(b"".join(pieces_of(tree)))
    loaded = torch.load(path, weights_only=True)
    assert same(loaded, torch.load(usual, weights_only=True))
    if all(isinstance(each, torch.Tensor) for each in tree.values()):
        assert [each.stride() for each in loaded.values()] == [each.stride() for each in tree.values()]
        assert shared_in(loaded) == (list(tree) if tree is PLAIN["apart"] else shared_in(tree))
    if tree is PLAIN["apart"]:
        return  # torch writes all memory that they are part of
    archives = [zipfile.ZipFile(each) for each in (usual, path)]
    theirs, ours = ({record.filename: record for record in each.infolist()} for each in archives)
    assert archives[1].testzip() is None
    assert list(ours) == [name for name in theirs if not name.endswith("serialization_id")]
    for name, record in ours.items():
        assert record.flag_bits == theirs[name].flag_bits
        if not name.endswith("data.pkl"):
            assert archives[0].read(name) == archives[1].read(name)
    assert len(path.read_bytes()) <= len(usual.read_bytes())
    archive = read_archive(path)
    assert walk_pickle(archive.pickle, archive.storages).refused == []


def test_the_file_can_be_mapped_into_memory_and_its_records_found_by_their_sizes(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(b"".join(pieces_of(PLAIN)))
    for computed in (False, True):
        with config.patch("load.calculate_storage_offsets", computed):
            loaded = torch.load(path, weights_only=True, mmap=True)
        assert same(loaded, torch.load(io.BytesIO(b"".join(pieces_of(PLAIN)))))
        assert same(loaded["many"], PLAIN["many"])
        assert all(each.data_ptr() % 64 == 0 for each in loaded["many"].values() if each.numel())


@pytest.mark.parametrize("value", UNUSUAL.values(), ids=UNUSUAL)
def test_anything_else_is_left_to_torch(value):
    assert pieces_of({"value": value}) is None


def test_a_state_with_an_unusual_value_is_written_by_torch(tmp_path):
    tree = {"model": {"weight": torch.eye(3).to_sparse()}}
    loaded = store.load_checkpoint(store.save_checkpoint(tree, tmp_path / "a.pt"))
    assert torch.equal(loaded["model"]["weight"].to_dense(), torch.eye(3))


def test_what_torch_would_write_in_another_form_is_left_to_it(monkeypatch):
    monkeypatch.setattr("treadle.checkpoint.tree_file._MOST", 8)
    assert pieces_of({"two": torch.ones(2)}) is None
    assert torch.equal(torch.load(io.BytesIO(b"".join(pieces_of({"one": torch.ones(1)}))))["one"], torch.ones(1))
