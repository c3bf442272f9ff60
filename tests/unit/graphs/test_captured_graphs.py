"""Captured steps on padded graphs, with a graph that runs its work anew; the real one is tried on a GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from capture_kit import Rerun, capture_on_the_cpu
from graph_batches import collate, make_graph
from graph_kit import graphs, loader, make, model_of
from helpers import differences
from treadle import ConfigError
from treadle.graphs import PaddingCollater, get_loss_fn, pad_batch, plan_buckets
from treadle.graphs.padding import Padding, buckets_for
from treadle.hooks import BaseHook
from treadle.seed import set_seed

KINDS = {
    "regression": {"level": "graph", "width": 2, "unknown": 0.3},
    "node": {"level": "node", "classes": 3},
    "edge_prediction": {"level": "edge", "classes": 2},
}


@pytest.fixture
def on_the_cpu(monkeypatch):
    capture_on_the_cpu(monkeypatch)


def build(capture, kind="regression", *, pad_to=3, seed=0, **options):
    settings = KINDS[kind]
    outputs = settings.get("classes") or settings["width"]
    outputs = 1 if kind == "edge_prediction" else outputs
    set_seed(seed)
    model = model_of(outputs, task=settings["level"], num_layers=1, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    task_type = "classification" if kind == "node" else kind
    return make(
        model=model, optimizer=optimizer, task_type=task_type, num_classes=outputs, capture=capture, pad_to=pad_to,
        grad_clip=1.0, **options,
    )  # fmt: skip


def data_of(kind="regression"):
    return graphs(14, **KINDS[kind])


def ended(trainer):
    state = trainer._engine.state_dict()
    for record in state["history"]:
        record.pop("time")
    state["config"].pop("capture", None)
    state.pop("objects", None)  # what Watch noted
    state["data"].pop("built", None)  # of a loader with a collate function of its own
    return state


def run(capture, kind="regression", *, epochs=3, batches=None, state=None, **options):
    trainer = build(capture, kind, **options)
    if state is not None:
        trainer._engine.load_state_dict(state)
    trainer.fit(loader(data_of(kind)) if batches is None else batches, None, epochs=epochs)
    return trainer


class Watch(BaseHook):
    """Notes how many graphs each step says it had, and keeps the state after one step."""

    def __init__(self, step=None):
        self.step, self.state, self.num_graphs = step, None, []

    def on_after_step(self, trainer):
        self.num_graphs.append(trainer.step_info["num_samples"])
        if trainer.step == self.step:
            trainer.request_write(lambda: setattr(self, "state", trainer.state_dict()))

    def on_state_dict(self, trainer, state):
        """Keep nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_train_log_and_measure_as_eager_ones(on_the_cpu, kind):
    told = Watch(), Watch()
    eager, captured = (run(capture, kind, hooks=[hook]) for capture, hook in zip((False, True), told))
    assert Rerun.made >= 1
    assert told[0].num_graphs == told[1].num_graphs == [4, 4, 4, 2] * 3
    assert differences(ended(eager), ended(captured)) == []


def test_weights_that_vary_are_those_of_each_accumulated_step(on_the_cpu):
    eager, captured = (run(capture, accumulation_steps=2, pad_to=1, epochs=4) for capture in (False, True))
    assert Rerun.made == 1  # all batches have one shape, and the graph is given the weights of each step
    assert differences(ended(eager), ended(captured)) == []


def test_class_weights_are_summed_by_the_host_in_both_modes(on_the_cpu):
    def weighted(capture):
        loss_fn = get_loss_fn("classification", num_classes=3, class_weights=[0.3, 1.7, 0.9])
        return run(capture, "node", accumulation_steps=2, pad_to=1, loss_fn=loss_fn)

    assert differences(ended(weighted(False)), ended(weighted(True))) == []


@pytest.mark.parametrize(("first", "cut"), [(False, 6), (True, 7)])
def test_a_stop_inside_an_epoch_in_one_mode_goes_on_in_the_other(on_the_cpu, first, cut):
    watch = Watch(cut)
    straight = run(first, hooks=[watch])
    resumed = run(not first, hooks=[Watch()], seed=9, state=watch.state)
    assert differences(ended(straight), ended(resumed)) == []


def test_how_much_is_padding_is_in_the_records_and_said_once(caplog):
    data = data_of()
    with caplog.at_level(logging.INFO):
        history = run(False, epochs=2).history
    buckets = plan_buckets(data, 4, num_buckets=3)
    slots = sum(len(pad_batch(batch, buckets).node_mask) for batch in loader(data))
    share = 1 - sum(len(graph.x) for graph in data) / slots
    assert [record["padding"] for record in history["train"]] == [pytest.approx(share)] * 2
    assert sum(f"padding: {share:.0%} of the nodes" in message for message in caplog.messages) == 1
    assert "padding" not in run(False, epochs=1, pad_to=None).history["train"][0]


def test_choosing_buckets_reads_the_data_and_draws_nothing():
    class Drawing(list):
        def __getitem__(self, index):
            torch.rand(1)
            return super().__getitem__(index)

    before = torch.get_rng_state()
    assert buckets_for(loader(Drawing(data_of())), 2) == plan_buckets(data_of(), 4)
    assert torch.equal(before, torch.get_rng_state())


def test_more_buckets_leave_less_padding_and_the_last_holds_any_batch():
    data = [make_graph(4 + 5 * (number % 6), number) for number in range(60)]
    room = []
    for number in (1, 2, 4):
        padding = Padding(plan_buckets(data, 8, num_buckets=number))
        for at in range(15):
            padding.padded(collate(data[at::8][:8]))
        assert len(padding.buckets) <= number
        assert padding.buckets[-1] == plan_buckets(data, 8)[-1]
        room.append(padding.used()["nodes"][1])
    assert room[0] > room[1] > room[2]


def test_batches_that_the_loader_padded_are_taken_as_they_are(on_the_cpu):
    data = data_of()
    collater = PaddingCollater(plan_buckets(data, 4, num_buckets=3), collate=collate)
    one = run(True, epochs=2)
    other = run(True, epochs=2, pad_to=None, batches=torch.utils.data.DataLoader(data, 4, collate_fn=collater))
    assert differences(ended(one), ended(other)) == []


def test_without_padding_true_is_refused_and_names_the_setting(on_the_cpu):
    with pytest.raises(ConfigError, match=r"a batch holds a \w+, .*pad_to of GraphTrainer"):
        run(True, pad_to=None)


@pytest.mark.parametrize("pad_to", [0, -1, True, []])
def test_a_number_of_buckets_below_one_is_refused(pad_to):
    with pytest.raises(ConfigError, match=r"give a number of buckets >= 1|pad_to=True: must be a whole number"):
        build(False, pad_to=pad_to)


def test_what_cannot_be_padded_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match="cannot ignore padding; use a loss of get_loss_fn"):
        build(False, loss_fn=torch.nn.MSELoss())
    with pytest.raises(ConfigError, match="this list does not provide them; pass pad_to=plan_buckets"):
        build(False).fit([SimpleNamespace()], None, epochs=1)
