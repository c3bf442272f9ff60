from __future__ import annotations

import datetime
import enum
import io
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers import differences, through_a_file
from treadle.checkpoint import schema
from treadle.checkpoint.schema import check_format, non_finite_names, to_plain
from treadle.errors import CheckpointError


class Color(enum.Enum):
    RED = 1


class Word(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    pass


class Words(list):
    pass


@dataclass
class Record:
    x: int = 1


class Marked(torch.Tensor):
    """A tensor subclass of the user; its class is not on any allow-list."""


Pair = namedtuple("Pair", "a b")

REFUSED = {
    "ndarray": np.zeros(3),
    "Path": Path("x"),
    "Enum": Color.RED,
    "string Enum": Word.RED,
    "IntEnum": Number.ONE,
    "str subclass": Text("x"),
    "list subclass": Words([1]),
    "deque": deque([1]),
    "slice": slice(1, 2),
    "timedelta": datetime.timedelta(1),
    "datetime": datetime.datetime(2020, 1, 1),
    "datetime64": np.datetime64("2020-01-01"),
    "timedelta64": np.timedelta64(1, "s"),
    "longdouble": np.longdouble(1),
    "void": np.zeros(1, dtype=[("a", int)])[0],
    "numpy bytes": np.bytes_(b"x"),
    "set": {1},
    "frozenset": frozenset({1}),
    "bytes": b"x",
    "complex": 1j,
    "dataclass": Record(),
    "class": int,
    "function": len,
    "lambda": lambda: 0,
    "module": nn.Linear(1, 1),
    "generator": torch.Generator(),
    "device": torch.device("cpu"),
    "Size": torch.Size([1]),
    "range": range(3),
    "numpy RNG": np.random.RandomState(0),
    "tensor without data": torch.zeros(1, device="meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_weights_only_cannot_read_is_refused_when_saving_and_its_path_named(name):
    with pytest.raises(CheckpointError, match=r"hooks\.mine\.a\[1\]\.b"):
        to_plain({"mine": {"a": [0, {"b": REFUSED[name]}]}}, "hooks")


@pytest.mark.parametrize("key", [1.5, True, None, (1, 2), b"x", np.int64(3), Number.ONE, Word.RED])
def test_a_key_that_is_no_plain_string_or_int_is_refused_with_its_path(key):
    with pytest.raises(CheckpointError, match=r"config.*key"):
        to_plain({"a": {key: 1}}, "config")


CONVERTED = {
    "tuple": ((1, (2,)), [1, [2]]),
    "namedtuple": (Pair(1, 2), [1, 2]),
    "defaultdict": (defaultdict(list, {"a": [1]}), {"a": [1]}),
    "OrderedDict": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "Counter": (Counter("aa"), {"a": 2}),
    "float64": (np.float64(0.1), 0.1),
    "float32": (np.float32(0.5), 0.5),
    "float16": (np.float16(0.5), 0.5),
    "int64": (np.int64(3), 3),
    "uint8": (np.uint8(3), 3),
    "numpy bool": (np.bool_(True), True),
    "numpy str": (np.str_("x"), "x"),
    "plain": ({"n": None, "t": True, "s": "x", "i": 2**70, "f": -0.0, 3: []}, None),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_what_has_a_plain_form_is_converted_and_loads(name):
    value, expected = CONVERTED[name]
    plain = to_plain({"v": value})
    assert differences(plain["v"], value if expected is None else expected) == []
    assert differences(through_a_file(plain), plain) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_plain(value):
    assert differences(through_a_file(to_plain({"v": value})), {"v": value}) == []


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"],
)
def test_tensors_of_every_dtype_go_through_a_file(dtype):
    dtype = getattr(torch, dtype)
    tensor = torch.ones(2, 3).to(dtype)
    loaded = through_a_file(to_plain({"t": tensor}))["t"]
    assert loaded.dtype == dtype
    assert loaded.tolist() == tensor.tolist()


def test_a_tensor_of_a_users_class_is_saved_as_a_plain_tensor():
    marked = torch.ones(3).as_subclass(Marked)
    loaded = through_a_file(to_plain({"t": marked, "p": nn.Parameter(torch.ones(2))}))
    assert type(loaded["t"]) is type(loaded["p"]) is torch.Tensor
    assert loaded["t"].tolist() == [1, 1, 1]


def test_a_sparse_tensor_goes_through_a_file():
    sparse = torch.eye(3).to_sparse()
    loaded = through_a_file(to_plain({"t": sparse}))["t"]
    assert torch.equal(loaded.to_dense(), torch.eye(3))


def test_a_following_step_does_not_change_the_tree():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().square().backward()
        optimizer.step()

    step()
    tree = to_plain({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    kept = through_a_file(tree)
    step()
    assert differences(tree, kept) == []
    assert differences(to_plain({"model": model.state_dict()}), {"model": kept["model"]}) != []


def test_tied_tensors_share_memory_in_the_copy_and_not_with_the_original():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    plain = to_plain(model.state_dict(), "model")
    assert plain["0.weight"].data_ptr() == plain["1.weight"].data_ptr()
    assert plain["0.weight"].data_ptr() != model[0].weight.data_ptr()
    loaded = through_a_file(plain)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()


def test_views_of_one_memory_keep_their_own_values():
    base = torch.arange(6.0)
    tree = {"all": base, "head": base[:2], "tail": base[4:], "t": base.view(2, 3).t(), "bits": base.view(torch.int32)}
    plain = to_plain(tree)
    assert all(torch.equal(plain[name], tree[name]) for name in tree)
    assert plain["bits"].dtype == torch.int32


def test_a_view_of_a_large_tensor_does_not_save_all_of_it():
    plain = to_plain({"t": torch.zeros(10_000)[:3]})
    assert plain["t"].untyped_storage().nbytes() == 12


def test_a_gradient_is_not_saved():
    weight = nn.Parameter(torch.ones(2))
    plain = to_plain({"w": weight * 2})
    assert not plain["w"].requires_grad
    assert plain["w"].grad_fn is None


def test_the_input_is_not_changed():
    tree = {"a": (1, 2), "b": OrderedDict(x=torch.ones(1))}
    to_plain(tree)["b"]["x"].fill_(9)
    assert tree["a"] == (1, 2)
    assert type(tree["b"]) is OrderedDict
    assert tree["b"]["x"].item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(dtype, bad):
    good, poisoned = torch.ones(3), torch.tensor([1.0, bad, 1.0]).to(dtype)
    tree = {"model": {"ok": good, "w": poisoned}, "ema": {"ema": {"shadow": {"v": poisoned, "ok": good}}}}
    assert non_finite_names(tree) == ["model.w", "ema.ema.v"]
    assert non_finite_names({"a": good, "w": poisoned}) == ["w"]
    assert non_finite_names({"model": {"i": torch.ones(2, dtype=torch.int64)}, "ema": None}) == []


def test_a_newer_format_is_refused():
    with pytest.raises(CheckpointError, match="newer"):
        check_format({"format": {"name": "treadle", "version": 99}}, "file x")


@pytest.mark.parametrize("tree", [[], 3, {}, torch.zeros(1), None])
def test_what_is_no_dict_is_no_checkpoint(tree):
    with pytest.raises(CheckpointError, match="file x"):
        check_format(tree, "file x")


def test_copies_of_device_tensors_are_those_that_one_by_one_are(monkeypatch):
    monkeypatch.setattr(schema, "_ON", "cpu")
    weight = torch.randn(4, 3)
    tree = {
        "weights": [weight, weight, weight.T, weight[1], nn.Parameter(torch.ones(2))],
        "others": {0: torch.tensor(7), "empty": torch.empty(0, 2), "bits": torch.tensor([True, False])},
        "large": torch.zeros(schema._SMALL // 4 + 1), "nan": (torch.tensor(float("nan")), torch.tensor(-0.0)),
        "half": torch.ones(3, dtype=torch.bfloat16), "sparse": torch.eye(2).to_sparse(), "number": 3,
    }  # fmt: skip
    monkeypatch.setattr(schema, "_AT_ONCE", 2)
    every = schema.DeviceCopies({"state": tree, "other": {"again": weight}, "none": None}).result()
    copies = every["state"]
    assert len(copies) == 11  # all but the sparse one
    assert len(set(map(id, copies.values()))) == 11
    assert list(every["other"]) == [id(weight)]
    assert every["other"][id(weight)] is not copies[id(weight)]
    live = {id(tensor) for tensor in (weight, tree["large"])}
    assert not live & set(map(id, copies.values()))
    small, plain = to_plain(tree, copies=copies), to_plain(tree)
    one, other = io.BytesIO(), io.BytesIO()
    torch.save(small, one)
    torch.save(plain, other)
    assert one.getvalue() == other.getvalue()
    small["weights"][0].zero_()
    assert weight.abs().sum() > 0
