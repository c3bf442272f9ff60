from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from treadle.nested import flatten_nested_dict, key_average, map_nested_tensor, unflatten

Pair = namedtuple("Pair", "left right")


class Typed(NamedTuple):
    x: torch.Tensor
    tag: str = "t"


@dataclass
class Plain:
    x: torch.Tensor
    inner: dict


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    n: int = 3


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    n: int = 3


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: torch.Tensor
    inner: list


@dataclass
class Derived:
    """A field that is no argument, and a check that must not run a second time."""

    x: torch.Tensor
    total: Any = field(init=False)

    def __post_init__(self):
        self.total = self.x.sum()


class Words(list):
    pass


ONE = torch.tensor(1.0)


def double(tensor):
    return tensor * 2


CONTAINERS = {
    "dict": lambda: {"a": ONE, "n": 3, "s": "text", "none": None},
    "list": lambda: [ONE, 2, [ONE]],
    "tuple": lambda: (ONE, (ONE, "x")),
    "empty": lambda: {"d": {}, "l": [], "t": ()},
    "namedtuple": lambda: Pair(ONE, {"k": ONE}),
    "NamedTuple": lambda: Typed(ONE),
    "dataclass": lambda: Plain(ONE, {"k": ONE}),
    "frozen dataclass": lambda: Frozen(ONE),
    "dataclass with slots": lambda: Slotted(ONE),
    "frozen dataclass with slots": lambda: FrozenSlotted(ONE, [ONE]),
    "dataclass with a field that is no argument": lambda: Derived(ONE),
    "defaultdict": lambda: defaultdict(list, {"a": ONE}),
    "OrderedDict": lambda: OrderedDict([("b", ONE), ("a", ONE)]),
    "UserDict": lambda: UserDict({"a": ONE}),
    "MappingProxyType": lambda: MappingProxyType({"a": ONE}),
    "list subclass": lambda: Words([ONE, "x"]),
    "mixed": lambda: {"a": [Pair(ONE, Frozen(ONE)), OrderedDict(x=(ONE,))]},
}


def leaves(value):
    """Every tensor of a nesting, found without the code under test."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in leaves(getattr(value, f.name))]
    if hasattr(value, "items"):
        return [t for item in value.values() for t in leaves(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in leaves(item)]
    return []


def shape_of(value):
    """The types and the other values of a nesting, tensors left out."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if dataclasses.is_dataclass(value):
        return type(value), [(f.name, shape_of(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if hasattr(value, "items"):
        return type(value), [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(item) for item in value]
    return value


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_tensor_of_a_container_is_mapped_and_its_type_kept(name):
    original = CONTAINERS[name]()
    before = shape_of(original), [t.clone() for t in leaves(original)]
    mapped = map_nested_tensor(double, original)
    assert shape_of(mapped) == shape_of(original)
    assert [t.item() for t in leaves(mapped)] == [2.0] * len(leaves(original))
    assert shape_of(original) == before[0], "the input was changed"
    assert all(torch.equal(a, b) for a, b in zip(leaves(original), before[1], strict=True)), "the input was changed"


def test_a_mapped_container_is_a_new_one():
    original = {"a": [ONE]}
    mapped = map_nested_tensor(lambda t: t, original)
    mapped["a"].append("more")
    assert original == {"a": [ONE]}


def test_a_mapped_defaultdict_keeps_its_default():
    mapped = map_nested_tensor(double, defaultdict(list, {"a": ONE}))
    assert mapped["new"] == []


def test_a_counter_of_plain_numbers_is_passed_through_as_a_counter():
    assert map_nested_tensor(double, Counter("aab")) == Counter("aab")


@pytest.mark.parametrize("value", [3, 2.5, "text", b"raw", None, {1, 2}, torch.float32, dataclasses, int])
def test_other_values_come_back_as_they_are(value):
    assert map_nested_tensor(double, value) is value


def test_a_shape_is_kept():
    size = torch.Size([2, 3])
    mapped = map_nested_tensor(double, size)
    assert type(mapped) is torch.Size
    assert mapped == size


def test_a_packed_sequence_is_kept():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    mapped = map_nested_tensor(lambda t: t.clone(), packed)
    assert type(mapped) is type(packed)
    assert torch.equal(mapped.data, packed.data)


def test_a_class_is_no_instance_of_a_dataclass():
    assert map_nested_tensor(double, Frozen) is Frozen


def test_what_the_function_returns_may_be_anything():
    assert map_nested_tensor(lambda t: t.shape, {"a": torch.zeros(2, 3)}) == {"a": (2, 3)}


trees = st.recursive(
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@given(trees)
def test_unflattening_a_flattened_dict_gives_the_dict(tree):
    assert unflatten(flatten_nested_dict(tree)) == tree


@given(trees)
def test_the_average_of_equal_dicts_is_the_dict(tree):
    before = copy.deepcopy(tree)
    assert key_average([tree] * 4) == tree
    assert tree == before


def test_the_average_is_taken_key_by_key():
    records = [{"loss": 0.5, "metrics": {"acc": 0.9}}, {"loss": 0.6, "metrics": {"acc": 0.85}}]
    mean = key_average(records)
    assert mean["loss"] == pytest.approx(0.55, abs=1e-6)
    assert mean["metrics"]["acc"] == pytest.approx(0.875, abs=1e-6)


def test_a_nan_shows_in_the_average():
    mean = key_average([{"a": 1, "b": math.nan}, {"a": 3, "b": 4}])
    assert mean["a"] == 2
    assert math.isnan(mean["b"])


def test_a_nan_can_be_left_out():
    assert key_average([{"a": 1, "b": math.nan}, {"a": 3, "b": 4}], skip_nan=True) == {"a": 2, "b": 4}
    assert key_average([{"a": 1, "b": math.nan}, {"a": 3, "b": 4}], exclude_nan=True) == {"a": 2, "b": 4}


def test_a_key_that_is_always_nan_stays_in_sight_when_nan_is_left_out():
    mean = key_average([{"a": math.nan}, {"a": math.nan, "b": 1}], skip_nan=True)
    assert math.isnan(mean["a"])
    assert mean["b"] == 1


def test_each_key_is_averaged_over_the_dicts_that_have_it():
    assert key_average([{"a": 1}, {"a": 3, "c": 5}]) == {"a": 2, "c": 5}


def test_the_average_of_nothing_is_empty():
    assert key_average([]) == {}


@pytest.mark.parametrize("values", [(math.inf, -math.inf), (math.inf, math.nan)])
def test_infinities_of_both_signs_average_to_nan(values):
    assert math.isnan(key_average([{"a": value} for value in values])["a"])


def test_an_infinity_shows_in_the_average():
    assert key_average([{"a": 1.0}, {"a": math.inf}]) == {"a": math.inf}


def test_numbers_too_large_for_a_sum_do_not_raise():
    assert key_average([{"a": 1.7e308}, {"a": 1.7e308}])["a"] in (1.7e308, math.inf)


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.tensor(2), torch.ones(1) * 2, np.float32(2), True + 1])
def test_numbers_and_tensors_of_one_element_are_averaged_as_floats(value):
    mean = key_average([{"a": value}])
    assert mean == {"a": 2.0}
    assert type(mean["a"]) is float


@pytest.mark.parametrize("value", ["text", torch.zeros(2), np.zeros(3), None, [1.0]])
def test_a_value_that_is_no_number_is_refused_with_its_path(value):
    with pytest.raises(TypeError, match="m/acc"):
        key_average([{"m": {"acc": value}}])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_key_that_is_a_number_here_and_a_dict_there_is_refused_with_its_path(order):
    records = [{"m": 1.0}, {"m": {"acc": 1.0}}]
    with pytest.raises(TypeError, match="'m'"):
        key_average([records[i] for i in order])
