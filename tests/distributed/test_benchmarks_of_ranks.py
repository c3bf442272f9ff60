"""The benchmarks of ranks: bytes are those of real steps, lines go through times, and sums are worked out by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import run_on_ranks
from treadle.hooks import BaseHook

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Import a benchmark by its name."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.fixture
def messages(benchmark):
    return benchmark("messages")


@pytest.fixture
def model(benchmark):
    return benchmark("scaling_model")


# -- what a step sends --------------------------------------------------------------------------------------------


class Recording(BaseHook):
    """Notes the bytes of each collective of the second step: of what is gathered or reduced as a whole."""

    def on_before_step(self, trainer):
        if trainer.step != 1:
            return
        self.sent, self.originals = [], {}
        for name, call in list(vars(dist).items()):
            for kind, place in (("all_gather", 0), ("reduce_scatter", 1), ("all_reduce", 0)):
                if name.startswith(kind) and callable(call) and "object" not in name and "coalesced" not in name:
                    self.originals[name] = call
                    setattr(dist, name, self.noting(kind, place, call))

    def noting(self, kind, place, call):
        def noted(*args, **kwargs):
            given = [*args, *kwargs.values()]
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            listed = isinstance(given[0], list)  # gloo's gather of numbers between hosts
            tensor = tensors[0 if listed else place]
            self.sent.append(("between hosts" if listed else kind, tensor.numel() * tensor.element_size()))
            return call(*args, **kwargs)

        return noted

    def on_after_step(self, trainer):
        for name, call in getattr(self, "originals", {}).items():
            setattr(dist, name, call)


def sent_in_a_step(folder):
    sys.path.insert(0, folder)
    from decoder import NextToken
    from scaling import build

    from treadle import Engine

    found = {}
    for way in ("ddp", "fsdp"):
        model, optimizer = build(way, "tiny", torch.device("cpu"))
        recording = Recording()
        engine = Engine(model, optimizer, NextToken(), device="cpu", grad_clip=1.0, hooks=[recording])
        engine.run([torch.zeros(2, 16, dtype=torch.long)] * 3, max_steps=3)
        found[way] = sorted(recording.sent)
    return found


def test_the_messages_of_the_model_are_those_of_a_step(messages):
    kinds = {
        messages.ALL_GATHER: "all_gather", messages.REDUCE_SCATTER: "reduce_scatter", messages.ALL_REDUCE: "all_reduce",
        messages.HOST_GATHER: "between hosts", messages.HOST_MAXIMUM: "all_reduce",
    }  # fmt: skip
    found = run_on_ranks(sent_in_a_step, 2, str(FOLDER))[0]
    for way in ("ddp", "fsdp"):
        some = messages.messages_of(way, "tiny")
        if way == "fsdp":
            assert some.pop() == messages.Message(
                messages.ALL_REDUCE, 4
            )  # the norm, which DTensor adds up in its own way
        assert found[way] == sorted((kinds[each.operation], each.num_bytes) for each in some), way


def total(messages, some, operation):
    return sum(message.num_bytes for message in some if message.operation == operation)


def test_replicas_reduce_every_gradient_once_and_nothing_hides_the_last_bucket(messages):
    some = messages.messages_of("ddp", "1b")
    reduced = [message for message in some if message.operation == messages.ALL_REDUCE]
    assert total(messages, some, messages.ALL_REDUCE) == 4 * 1_039_622_144
    assert len(reduced) == 29
    assert [message.hidden_by for message in reduced] == ["backward"] * 28 + [None]
    assert reduced[-1].num_bytes >= 4 * (32_000 + 1024) * 2048  # the embeddings


def test_a_sharded_model_gathers_its_blocks_twice_and_reduces_all_once(messages):
    some, numel, blocks = messages.messages_of("fsdp", "1b"), 1_039_622_144, 18 * 50_358_272
    assert total(messages, some, messages.ALL_GATHER) == 2 * (numel + blocks)
    assert total(messages, some, messages.REDUCE_SCATTER) == 4 * numel
    assert sum(message.operation == messages.ALL_GATHER for message in some) == 19 + 18
    assert sum(message.operation == messages.REDUCE_SCATTER for message in some) == 19
    shown = [message.operation for message in some if message.hidden_by is None]
    gather, scatter = messages.ALL_GATHER, messages.REDUCE_SCATTER
    assert shown == [gather, gather, messages.HOST_GATHER, scatter, messages.ALL_REDUCE]


def test_bus_shares_are_those_of_nccl(messages):
    assert [messages.bus_share(messages.ALL_REDUCE, ranks) for ranks in (2, 8)] == [1.0, 1.75]
    assert messages.bus_share(messages.ALL_GATHER, 4) == messages.bus_share(messages.REDUCE_SCATTER, 4) == 0.75


def test_the_line_through_times_has_their_fixed_cost_and_slope(messages):
    line = messages.fit([(0, 2.0), (100, 3.0), (1000, 12.0)])
    assert (line.fixed, line.per_byte) == pytest.approx((2.0, 0.01))
    assert messages.fit([(88, 3.0), (88, 5.0)]).ms(88) == 4.0


def test_more_ranks_than_were_measured_keep_the_bandwidth_and_pay_fixed_costs_by_the_logarithm(messages):
    rows = [
        {"operation": messages.ALL_REDUCE, "ranks": 2, "bytes": size, "ms": str(2 + size / 100)} for size in (0, 100)
    ]
    rows += [{"operation": messages.ALL_REDUCE, "ranks": 2, "bytes": "fit"}]
    rows += [{"operation": messages.HOST_GATHER, "ranks": ranks, "bytes": 88, "ms": ranks} for ranks in (2, 4)]
    cost = messages.measured_cost(rows)
    assert cost(messages.Message(messages.ALL_REDUCE, 1000), 2) == pytest.approx(2 + 10)
    assert cost(messages.Message(messages.ALL_REDUCE, 1000), 8) == pytest.approx(3 * 2 + 1.75 * 10)
    assert cost(messages.Message(messages.HOST_GATHER, 88), 4) == pytest.approx(4)
    assert cost(messages.Message(messages.HOST_GATHER, 88), 16) == pytest.approx(2 * 4)


def test_a_step_hides_what_its_passes_are_long_enough_for(model, messages):
    some = [
        messages.Message(messages.ALL_GATHER, 5),
        messages.Message(messages.ALL_GATHER, 40, "forward"),  # 30 of 90 ms hide 30 of it
        messages.Message(messages.REDUCE_SCATTER, 50, "backward"),  # 60 of 90 ms hide all
    ]
    assert model.step_of(90.0, some, lambda message, ranks: message.num_bytes, 2) == model.Span(90 + 5 + 10, 90 + 95)


TIMES = {
    ("1b", "weak", "ddp", 1): 100.0, ("1b", "weak", "ddp", 2): 110.0, ("1b", "strong", "ddp", 2): 80.0,
}  # fmt: skip


def test_the_fitted_bandwidth_gives_the_row_it_was_fitted_to_and_grows_with_the_share_of_the_bus(model, messages):
    cost = messages.bandwidth_cost(model.fitted_bandwidth(TIMES))
    assert model.predict(("1b", "weak", "ddp", 2), TIMES, cost).most == pytest.approx(110.0)
    assert model.predict(("1b", "weak", "ddp", 8), TIMES, cost).most == pytest.approx(100.0 + 1.75 * 10)


def test_what_two_ranks_took_beyond_the_model_is_in_the_most_of_more(model, messages):
    cost = messages.bandwidth_cost(model.fitted_bandwidth(TIMES))
    times = {**TIMES, ("1b", "weak", "ddp", 2): 123.0}
    assert model.predict(("1b", "weak", "ddp", 8), times, cost).most == pytest.approx(100.0 + 1.75 * 10 + 13)


def test_a_strong_step_has_its_part_of_the_computation_or_what_one_rank_took_for_as_few_rows(model, messages):
    cost = messages.bandwidth_cost(model.fitted_bandwidth(TIMES))
    eighth = model.predict(("1b", "strong", "ddp", 8), TIMES, cost)
    assert eighth.most == 80.0
    assert 100 / 8 < eighth.least < 100 / 8 + 1.75 * 10
    measured = model.predict(("1b", "strong", "ddp", 8), {**TIMES, ("1b", "share of 8", "ddp", 1): 40.0}, cost)
    assert measured.most == pytest.approx(40 + 1.75 * 10)


def test_the_table_tells_fits_checks_and_predictions_apart(model, messages, monkeypatch):
    monkeypatch.setattr(model, "SIZES", {"1b": model.SIZES["1b"]})
    times = {**TIMES, ("1b", "weak", "fsdp", 1): 100.0}
    lines = model.table(times, messages.bandwidth_cost(model.fitted_bandwidth(times)), fitted=model.FITTED)
    told = {(line["scaling"], line["way"], line["ranks"]): line for line in lines}
    assert told["weak", "ddp", 2]["what it is"] == "fitted"
    assert told["weak", "ddp", 2]["error"].endswith("to +0%")
    assert told["strong", "ddp", 2]["what it is"] == "check"
    assert told["strong", "ddp", 2]["measured efficiency"] == "0.62"  # 50 of 80 ms
    assert {line["what it is"] for line in lines if line["ranks"] > 2} == {"predicted"}
    assert "strong -1% to -1% in 1 rows" in model.errors_of([{**told["strong", "ddp", 2], "ms most": "79.2"}])
    assert "weak" not in model.errors_of(lines)


# -- the other benchmarks -----------------------------------------------------------------------------------------


def test_collectives_are_measured_in_the_sizes_of_the_steps_which_ranks_can_share(benchmark, messages):
    collectives = benchmark("collectives")
    sizes = collectives.sizes_of(messages.ALL_GATHER, ["tiny"], 3)
    assert all(size % 12 == 0 for size in sizes)
    gathered = {
        each.num_bytes for each in messages.messages_of("fsdp", "tiny") if each.operation == messages.ALL_GATHER
    }
    assert all(any(each <= size < each + 12 for size in sizes) for each in gathered)
    assert collectives.sizes_of(messages.HOST_GATHER, ["tiny"], 3) == [88]


def test_the_table_of_collectives_ends_each_operation_with_its_line(benchmark, messages):
    collectives = benchmark("collectives")
    measured = [{"operation": messages.ALL_REDUCE, "bytes": size, "ms": 1 + size / 1e6} for size in (10**6, 2 * 10**6)]
    first, second, line = collectives.table(measured, 4)
    assert (first["ms"], first["bus GB/s"], second["bus GB/s"]) == ("2.0000", "0.75", "1.00")
    assert (line["bytes"], line["bus GB/s"], line["fixed µs"]) == ("fit", "1.50", "1000.0")


def test_one_rank_is_measured_with_the_rows_that_each_of_more_has(benchmark):
    shares = benchmark("scaling").shares
    assert shares(16, 1, [2, 8]) == {"weak": 16, "share of 2": 8, "share of 8": 2}
    assert shares(4, 8, []) == {"weak": 4, "strong": 1}


def test_a_tensor_that_differs_or_lacks_is_counted_and_a_sample_that_was_lost_is_told(benchmark):
    resume = benchmark("ranks_resume")
    assert resume.equal({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == "1 of 3"
    read = list(range(5 * 2 * 2 + 2))
    assert resume.each_once(read, "tiny", 2) == "each once"
    assert resume.each_once([*read[1:], 1], "tiny", 2).startswith("NOT")


def run_the_trial(benchmark, monkeypatch, name, *arguments):
    monkeypatch.setattr(benchmark("machine"), "RESULTS", None)  # a trial writes nothing
    monkeypatch.setattr(sys, "argv", [name, "--tiny", *arguments])
    benchmark(name).main()


@pytest.mark.slow
def test_collectives_have_a_trial(benchmark, monkeypatch, capsys):
    run_the_trial(benchmark, monkeypatch, "collectives", "--ranks", "2")
    assert capsys.readouterr().out.count("fit") == 3


@pytest.mark.slow
def test_runs_of_the_trial_go_on_to_the_bit(benchmark, monkeypatch, capsys):
    run_the_trial(benchmark, monkeypatch, "ranks_resume", "--ranks", "2")
    out = capsys.readouterr().out
    assert out.count("'tensors equal': '116 of 116'") == 6
    assert out.count("'each once'") == 4
    assert out.count("'kills': 2") == 2
