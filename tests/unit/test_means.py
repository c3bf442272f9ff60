from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import differences, through_a_file
from treadle.checkpoint.schema import to_plain
from treadle.device.host_transfer import read_scalars
from treadle.means import RunningMeans, Total, Weighted
from treadle.task import StepOutput, add_output


def test_a_mean_weighs_each_value():
    means = RunningMeans()
    for value, weight in [(1, 4), (2, 4), (4, 2)]:
        means.add({"loss": value}, weight=weight)
    assert means.compute() == {"loss": 2.0}


@pytest.mark.parametrize("value_as", [float, torch.tensor])
@pytest.mark.parametrize("weight_as", [float, torch.tensor])
def test_numbers_and_tensors_give_the_same_mean(value_as, weight_as):
    means = RunningMeans()
    for value, weight in [(1.0, 4.0), (2.0, 4.0), (4.0, 2.0)]:
        means.add({"loss": value_as(value)}, weight=weight_as(weight))
    assert means.compute() == {"loss": 2.0}


def test_values_and_weights_of_both_kinds_may_be_mixed_under_one_name():
    means = RunningMeans()
    means.add({"a": 1.0}, weight=1)
    means.add({"a": torch.tensor(2.0)}, weight=2)
    means.add({"a": 3.0}, weight=torch.tensor(3))
    means.add({"a": torch.tensor(4.0)}, weight=torch.tensor(4.0))
    assert means.compute() == {"a": (1 + 4 + 9 + 16) / 10}


def test_a_total_is_summed():
    means = RunningMeans()
    for value in (10, 20, 5):
        means.add({"n": Total(value), "t": Total(torch.tensor(float(value)))}, weight=3)
    assert means.compute() == {"n": 35.0, "t": 35.0}


def test_the_value_of_summed_losses_is_their_plain_total():
    means = RunningMeans()
    for value in (10.0, 20.0, 5.0):
        add_output(means, StepOutput(torch.tensor(value), weight=7, reduction="sum"))
    assert means.compute() == {"loss": 35.0}


def test_a_weighted_record_brings_its_own_weight():
    means = RunningMeans()
    means.add({"a": Weighted(8.0, 1), "b": 8.0}, weight=5)
    means.add({"a": Weighted(torch.tensor(0.0), torch.tensor(3)), "b": 0.0}, weight=5)
    assert means.compute() == {"a": 2.0, "b": 4.0}


@pytest.mark.parametrize("nothing", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("value", [math.nan, torch.tensor(math.nan), math.inf, torch.tensor(math.inf)])
def test_a_value_of_weight_zero_contributes_nothing_whatever_it_is(value, nothing):
    means = RunningMeans()
    means.add({"loss": 3.0}, weight=2)
    means.add({"loss": value}, weight=nothing)
    assert means.compute() == {"loss": 3.0}


@pytest.mark.parametrize("nothing", [0, torch.tensor(0)])
def test_a_mean_over_nothing_is_nan(nothing):
    means = RunningMeans()
    means.add({"loss": torch.tensor(1.0)}, weight=nothing)
    assert math.isnan(means.compute()["loss"])


def test_no_records_give_no_means():
    assert RunningMeans().compute() == {}


def test_a_nan_shows_in_the_mean():
    means = RunningMeans()
    means.add({"a": 1.0, "b": torch.tensor(math.nan)})
    means.add({"a": math.nan, "b": torch.tensor(1.0)})
    assert all(math.isnan(value) for value in means.compute().values())


def test_nested_records_come_back_nested():
    means = RunningMeans()
    means.add({"m": {"a": 1.0, "deep": {"b": torch.tensor(2)}}})
    assert means.compute() == {"m": {"a": 1.0, "deep": {"b": 2.0}}}


def test_reading_twice_and_reading_in_between_changes_no_bit():
    values = torch.rand(200, generator=torch.Generator().manual_seed(0)).unbind()
    read, unread = RunningMeans(), RunningMeans()
    for value in values:
        read.add({"a": value}, weight=0.3)
        unread.add({"a": value}, weight=0.3)
        assert read.compute() == read.compute()
    assert read.compute() == unread.compute()


def fill(means, start, stop):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(stop, 4, generator=generator)
    for row in numbers[start:]:
        means.add({"loss": row[0], "m": {"acc": Weighted(row[1], row[2])}, "n": Total(row[3])}, weight=float(row[2]))
        means.add({"plain": float(row[3]), "half": row[1].bfloat16()}, weight=row[0])


@pytest.mark.parametrize("cut", [0, 1, 31, 63, 64, 65, 100, 127, 128, 129])
def test_a_saved_mean_goes_on_to_the_bit_from_any_cut(cut):
    straight, first, second = RunningMeans(), RunningMeans(), RunningMeans()
    fill(straight, 0, 130)
    fill(first, 0, cut)
    second.load_state_dict(through_a_file(to_plain(first.state_dict())), device=torch.device("cpu"))
    fill(second, cut, 130)
    assert second.compute() == straight.compute()
    assert differences(to_plain(second.state_dict()), to_plain(straight.state_dict())) == []


@settings(max_examples=30)
@given(st.lists(st.integers(0, 140), min_size=1, max_size=3))
def test_any_number_of_cuts_changes_no_bit(cuts):
    straight = RunningMeans()
    fill(straight, 0, 140)
    means, done = RunningMeans(), 0
    for cut in [*sorted(cuts), 140]:
        fill(means, done, cut)
        done = cut
        fresh = RunningMeans()
        fresh.load_state_dict(to_plain(means.state_dict()))
        means = fresh
    assert means.compute() == straight.compute()


def test_loading_forgets_what_was_there():
    means, empty = RunningMeans(), RunningMeans()
    means.add({"a": 1.0})
    means.load_state_dict(empty.state_dict())
    assert means.compute() == {}


def test_half_precision_values_lose_no_digits_in_a_long_sum():
    means = RunningMeans()
    for _ in range(3000):
        means.add({"a": torch.tensor(1.0, dtype=torch.bfloat16)}, weight=torch.tensor(3, dtype=torch.int16))
    means.add({"b": Total(torch.tensor(1.0, dtype=torch.bfloat16))})
    assert means.compute() == {"a": 1.0, "b": 1.0}


def test_a_number_with_a_weight_on_the_device_keeps_its_digits():
    means = RunningMeans()
    means.add({"a": 0.1}, weight=torch.tensor(2))
    assert means.compute() == {"a": 0.1}


def test_a_name_cannot_be_a_mean_and_a_total():
    means = RunningMeans()
    means.add({"m": {"a": 1.0}})
    with pytest.raises(TypeError, match="m/a"):
        means.add({"m": {"a": Total(1.0)}})


@pytest.mark.parametrize("value", ["text", torch.zeros(3), None, Weighted("x", 1), Weighted(1.0, torch.zeros(2))])
def test_what_is_no_number_is_refused_with_its_path(value):
    with pytest.raises(TypeError, match="m/a"):
        RunningMeans().add({"m": {"a": value}})


def test_no_graph_is_kept():
    weight = torch.ones(1, requires_grad=True)
    means = RunningMeans()
    means.add({"a": weight.sum(), "b": Weighted(weight.sum(), weight.sum())}, weight=(weight * 2).sum())
    for _ in range(2):  # the second one finds its names there
        means.add({"c": weight.sum(), "n": Total(weight.sum())}, weight=2.0)
    kept = [tensor for entry in means._sums.values() for pair in (*entry.pending, *entry.log) for tensor in pair]
    assert [tensor.requires_grad for tensor in kept if isinstance(tensor, torch.Tensor)] == [False] * 8


NUMBERS = st.floats(-9, 9, width=32)
VALUES = NUMBERS | st.integers(-9, 9) | NUMBERS.map(torch.tensor) | NUMBERS.map(lambda x: torch.tensor(x).double())
WEIGHTS = st.sampled_from([1.0, 1.0, 1.0, 0.3, 0.0, 2.0, torch.tensor(0.7), torch.tensor(0)])


@settings(max_examples=60)
@given(st.lists(st.tuples(VALUES, WEIGHTS), max_size=9), st.integers(1, 60), st.sets(st.integers(0, 300), max_size=5))
def test_what_waits_to_be_added_gives_the_bits_of_what_is_added_at_once(pairs, repeats, looks):
    later, at_once = RunningMeans(), RunningMeans()
    for number, (value, weight) in enumerate(pairs * repeats):
        later.add({"a": value, "n": Total(value)}, weight)
        at_once.add({"a": Weighted(value, weight), "n": Total(value)})
        for entry in at_once._sums.values():
            entry.flush()
        if number in looks:
            later.compute()
            assert differences(to_plain(later.state_dict()), to_plain(at_once.state_dict())) == []
    assert differences(to_plain(later.state_dict()), to_plain(at_once.state_dict())) == []
    assert [repr(later.compute()), later.names()] == [repr(at_once.compute()), at_once.names()]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_no_more_than_a_block_of_values_waits(kind):
    means, most = RunningMeans(), 0
    for number in range(300):
        means.add({"a": kind(1.0)}, weight=0.5)
        if number == 100:
            means.compute()
        (entry,) = means._sums.values()
        most = max(most, len(entry.log) + len(entry.pending))
    assert most == 63
    assert means.compute() == {"a": 1.0}


def test_what_the_caller_does_to_a_record_afterwards_changes_nothing():
    means, record = RunningMeans(), {"a": 1.0}
    for _ in range(3):
        means.add(record)
    record["a"] = 5.0
    assert means.compute() == {"a": 1.0}


@pytest.mark.parametrize("value", ["text", torch.zeros(3), None, Total(1.0)])
def test_what_is_no_number_is_refused_at_once_under_a_name_that_is_known(value):
    means = RunningMeans()
    means.add({"m": {"a": 1.0}})
    with pytest.raises(TypeError, match="m/a"):
        means.add({"m": {"a": value}})
    assert means.compute() == {"m": {"a": 1.0}}


@pytest.mark.parametrize("weights", [[1.0] * 200, [3.0] * 200, [1.0 + number for number in range(200)]])
def test_values_of_one_kind_and_of_several_give_the_same_bits(weights):
    values = torch.rand(200, generator=torch.Generator().manual_seed(0))
    alike, mixed = RunningMeans(), RunningMeans()
    for number, (value, weight) in enumerate(zip(values, weights, strict=True)):
        alike.add({"a": value}, weight)
        mixed.add({"a": value.double() if number % 2 else value}, weight)
    blocks = torch.stack(
        [values.double()[i : i + 64] @ torch.tensor(weights[i : i + 64]).double() for i in range(0, 200, 64)]
    )
    assert alike.compute() == mixed.compute() == {"a": pytest.approx(blocks.sum().item() / sum(weights), rel=1e-14)}


@pytest.mark.parametrize("weight", [1.0, 0.1, 0.0])
@pytest.mark.parametrize("parts", [[3, 64, 64, 70], [200], [1, 1, 130, 5]])
def test_a_column_is_added_as_its_values_one_by_one(weight, parts):
    values = torch.rand(sum(parts), generator=torch.Generator().manual_seed(0))
    single, whole, resumed = RunningMeans(), RunningMeans(), RunningMeans()
    at = 0
    for number, count in enumerate(parts):
        for value in values[at : at + count]:
            single.add({"a": value}, weight)
        if number == 1:  # a single value between columns
            whole.add({"a": values[at]}, weight)
        whole.add_column(("a",), values[at + (number == 1) : at + count], weight)
        at += count
        resumed.load_state_dict(whole.state_dict())
        assert differences(whole.state_dict(), single.state_dict()) == []
        assert differences(resumed.state_dict(), single.state_dict()) == []
    assert whole.sums("a") == single.sums("a")


def test_values_on_several_devices_may_meet_under_one_name():
    # After a resume what was pending lies on the training device, while a record may be computed on the CPU.
    means = RunningMeans()
    for i in range(64):
        means.add({"a": torch.ones((), device="meta" if i % 2 else "cpu")}, weight=2.0)
    for i in range(64):
        means.add({"a": torch.ones(()), "b": torch.ones(())}, weight=torch.ones((), device="meta" if i % 2 else "cpu"))
    assert means._sums["a",].device_value is not None


def test_scalars_are_read_in_their_order():
    values = [1, torch.tensor(2), 3.5, torch.tensor(4.0, dtype=torch.bfloat16), torch.tensor([5.0])]
    assert read_scalars(values).tolist() == [1, 2, 3.5, 4, 5]
    assert read_scalars([]).tolist() == []


def test_sums_over_ranks_are_taken_of_values_and_weights_apart():
    means = RunningMeans()
    means.add({"loss": 8.0, "n": Total(2)}, weight=1)
    other = torch.tensor([[0.0, 3.0], [5.0, 1.0]], dtype=torch.float64)  # loss 0 over 3 things, and a total of 5
    assert means.compute(lambda table: table + other) == {"loss": 2.0, "n": 7.0}
