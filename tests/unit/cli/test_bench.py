"""``treadle bench``: the parts add up, counts are exact, advice follows figures, and nothing of the run is touched."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseHook, EmaHook, Engine, StepOutput
from treadle.capture.compile import compile_model, is_compiled
from treadle.cli.bench import session, trials
from treadle.cli.bench.advice import advise
from treadle.cli.bench.counting import CallCounter, count_flops
from treadle.cli.bench.floor import Ceilings, floor_of, least_bytes, measure_ceilings
from treadle.cli.bench.loaders import as_tensor_loader, try_loaders, with_workers
from treadle.cli.bench.timing import HostClock, Timeline, typical
from treadle.cli.bench.trials import (
    Bench,
    NotTried,
    Trial,
    captured,
    compiled_blocks,
    doubled_batch,
    fused_optimizer,
    in_bf16,
    num_threads,
)
from treadle.cli.bench.watch import Watch
from treadle.cli.main import main
from treadle.data.cursor import Group

SCRIPT = """
import sys
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset
from treadle import BaseHook, BaseTrainer, CheckpointingHook, LoggingHook

class Reader(BaseHook):
    def on_after_step(self, trainer):
        trainer.step_info["loss"][0].item()

class Fit(BaseTrainer):
    def build_data_loader(self):
        return DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4, shuffle=True)
    def build_model(self):
        return nn.Linear(4, 1)
    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters())
    def build_lr_scheduler(self):
        return torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=self.max_steps)
    def build_hooks(self):
        return [Reader(), CheckpointingHook(100)]
    def forward(self, input):
        x, y = input
        return ((self.model(x) - y) ** 2).mean(), {}

print("of the script")
Fit(max_steps=int(sys.argv[1]), device="cpu", workspace="runs/mine").train()
raise SystemExit("trained to its end")
"""


class Ticks(HostClock):
    """A clock that moves when it is told to."""

    now = 0.0

    def mark(self):
        return self.now


class Square:
    def __init__(self, clock):
        self.clock = clock

    def step(self, model, batch, totals=None, generator=None):
        self.clock.now += 2
        return StepOutput(((model(batch) - 1) ** 2).mean())


class Slow(BaseHook):
    def __init__(self, clock):
        self.clock = clock

    def on_before_optimizer_step(self, trainer):
        self.clock.now += 5

    def on_after_step(self, trainer):
        self.clock.now += 7


class Watching(BaseHook):
    def __init__(self, line):
        self.line = line

    def on_before_train(self, trainer):
        self.watch = Watch(trainer, self.line, left_out=self)

    def on_close(self, trainer, error=None):
        self.watch.remove()


def slow_data(clock, count):
    for _ in range(count):
        clock.now += 3
        yield torch.ones(2, 1)


class Data:
    def __init__(self, clock, count):
        self.clock, self.count = clock, count

    def __iter__(self):
        return slow_data(self.clock, self.count)


def engine_of(clock=None, hooks=(), **kwargs):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Engine(model, optimizer, Square(clock or Ticks()), device="cpu", hooks=list(hooks), **kwargs)


def bench_of(engine):
    return Bench(engine, [Group([torch.ones(2, 1)], [0.0], [None])], clock=HostClock(), count=2)


# -- where the time goes --------------------------------------------------------------------------------------------


def test_every_second_of_a_step_is_in_one_part():
    clock = Ticks()
    line = Timeline(clock)
    engine = engine_of(clock, [Slow(clock), Watching(line)], accumulation_steps=2)
    engine.run(Data(clock, 6), max_steps=3)
    line.end_step()
    steps = line.seconds()
    assert [sum(parts.values()) for parts in steps] == [22.0] * 3  # 2 x 3 data, 2 x 2 forward, 5 + 7 in the hook
    parts = typical(steps)
    assert {name: value for name, value in parts.items() if value} == {"data": 6.0, "forward": 4.0, "hook Slow": 12.0}


def test_parts_of_no_time_of_the_clock_are_there_too():
    line = Timeline(Ticks())
    engine = engine_of(hooks=[EmaHook(0.9), Watching(line)])
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer)
    engine.run([torch.ones(2, 1)] * 3, max_steps=2)
    assert {"backward", "clip and optimizer", "averages", "schedule", "rest of the loop"} <= set(line.seconds()[0])


def test_a_step_with_an_evaluation_behind_it_counts_without_it():
    clock = Ticks()
    line = Timeline(clock)
    engine = engine_of(clock, [Watching(line)])

    def score():
        clock.now += 1000

    engine.run(Data(clock, 2), epochs=2, score_epoch=score)
    assert [sum(parts.values()) for parts in line.seconds()] == [5.0] * 4


def test_a_step_that_records_a_graph_is_not_measured():
    clock = Ticks()
    line = Timeline(clock)
    for number in range(3):
        line.begin_step("data")
        clock.now += 1
        if number == 1:
            clock.mark = lambda: None  # as in a graph
        line.switch("forward")
        clock.now += 1
        vars(clock).pop("mark", None)
        line.switch("loop")
    line.end_step()
    assert line.seconds() == [{"data": 1, "forward": 1, "loop": 0}] * 2


def test_all_is_put_back_after_a_measurement():
    watching = Watching(Timeline(Ticks()))
    slow = Slow(Ticks())
    engine = engine_of(hooks=[slow, EmaHook(0.9), watching])
    before = torch.Tensor.backward, EmaHook.__dict__.get("update"), dict(vars(slow)), set(vars(engine))
    engine.run([torch.ones(2, 1)] * 3, max_steps=2)
    new = set(vars(engine)) - before[3] - {"base", "exchange", "notices", "_step_events"}
    assert (torch.Tensor.backward, EmaHook.__dict__.get("update"), dict(vars(slow))) == before[:3]
    assert not {"forward", "write_requested"} & new
    assert "take" not in vars(engine.cursor)
    assert engine.steps.__func__ is Engine.train_step


# -- counts ---------------------------------------------------------------------------------------------------------


def test_reads_are_counted_at_their_lines_and_those_of_optimizers_and_data_are_not():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    with CallCounter(torch.device("cpu")) as counter:
        for _ in range(2):
            loss = (weight**2).sum()
            loss.backward()
            optimizer.step()
            bool(loss > 0)
        loss.item()
    assert sorted(counter.reads.values()) == [1, 2]
    assert all("test_bench.py" in line and "in test_reads" in line for line in counter.reads)


def test_the_calls_that_a_host_waits_for_on_a_gpu_are_told_from_others():
    counter = CallCounter(torch.device("cuda"))
    with FakeTensorMode():
        there, host = torch.empty(4, device="cuda"), torch.empty(4)
        mask, places = torch.empty(4, dtype=torch.bool, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    for waits, name, args, kwargs in [
        (True, "_local_scalar_dense", (there,), {}), (False, "_local_scalar_dense", (host,), {}),
        (True, "index", (there, [mask]), {}), (False, "index", (there, [None, places]), {}),
        (True, "repeat_interleave", (places,), {}), (False, "repeat_interleave", (places,), {"output_size": 9}),
        (True, "copy_", (host, there), {}), (False, "copy_", (there, host), {}), (False, "add", (there, there), {}),
    ]:  # fmt: skip
        assert counter._reads(name, args, kwargs, there) is waits, name


def test_operations_of_a_linear_layer_are_exact():
    layer = nn.Linear(3, 5)

    def step():
        layer(torch.ones(7, 3)).sum().backward()

    assert count_flops(step) == 2 * (2 * 7 * 3 * 5)  # forward, and the gradient of the weight: the input needs none


def test_the_least_bytes_of_a_step():
    engine = engine_of()
    engine.run([torch.ones(2, 1)] * 2, max_steps=1)
    parameters, state, batch = 2 * 4, 2 * (4 + 4 + 4), 2 * 4  # exp_avg, exp_avg_sq and the counter of each
    assert (
        least_bytes(engine, [torch.ones(2, 1)]) == 2 * parameters + 2 * parameters + 2 * parameters + 2 * state + batch
    )


def test_the_floor_is_the_larger_of_both():
    floor = floor_of(100, 30, Ceilings(flops_per_second=50.0, bytes_per_second=10.0))
    assert (floor.compute_seconds, floor.memory_seconds, floor.seconds) == (2.0, 3.0, 3.0)


def test_ceilings_are_measured_without_the_random_numbers_of_the_run(monkeypatch):
    monkeypatch.setattr("treadle.cli.bench.floor._SIDE", {"cpu": 8})
    monkeypatch.setattr("treadle.cli.bench.floor._COPIED", {"cpu": 64})
    before = torch.get_rng_state()
    ceilings = measure_ceilings(torch.device("cpu"), "bf16")
    assert torch.equal(torch.get_rng_state(), before)
    assert ceilings.flops_per_second > 0 < ceilings.bytes_per_second


# -- trials ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [fused_optimizer, in_bf16, doubled_batch, lambda engine: num_threads(engine, 1)])
def test_a_trial_takes_back_what_it_changed(change):
    engine = engine_of(grad_clip=1.0)
    engine.prepare()
    before = (engine.optimizer, engine.precision, engine.guard, engine.capture, torch.get_num_threads())
    trial = bench_of(engine).run("name", "how", lambda: change(engine))
    assert trial.seconds is not None, trial.note
    assert trial.present is not None
    assert (engine.optimizer, engine.precision, engine.guard, engine.capture, torch.get_num_threads()) == before


def test_compiled_blocks_are_taken_back(monkeypatch):
    monkeypatch.setattr(trials, "compile_model", lambda model, how: compile_model(model, how, backend="eager"))
    engine, cold = engine_of(), {}
    engine.prepare()
    trial = bench_of(engine).run("compiled", "how", lambda: compiled_blocks(engine, cold=cold))
    assert trial.seconds is not None, trial.note
    assert cold["seconds"] > 0
    assert not is_compiled(engine.model)


def test_what_makes_no_sense_or_fails_is_a_note():
    engine = engine_of()
    engine.prepare()
    bench = bench_of(engine)
    assert "CUDA" in bench.run("capture", "", lambda: captured(engine, bench.groups)).note
    engine.task.step = None
    broken = Bench(engine, bench.groups, clock=HostClock(), count=2)
    monkey = iter([engine.train_step])
    engine.steps = lambda group: next(monkey, None)
    assert broken.run("bf16", "", lambda: in_bf16(engine)).note.startswith("failed: TypeError: ")
    assert engine.precision.name is None


def test_loaders_that_could_take_the_place_of_the_present_one():
    data = TensorDataset(torch.arange(8.0).reshape(8, 1))
    loader = DataLoader(data, batch_size=3, shuffle=True, drop_last=True)
    assert len(list(as_tensor_loader(loader, torch.device("cpu")))) == len(loader) == 2
    assert next(iter(as_tensor_loader(loader, torch.device("meta")))).device.type == "meta"
    with pytest.raises(NotTried, match="1 workers already"):
        with_workers(DataLoader(data, num_workers=1))
    with pytest.raises(NotTried, match="collate"):
        as_tensor_loader(DataLoader(data, collate_fn=list), torch.device("cpu"))


@pytest.mark.parametrize(("share", "loader", "words"), [(0.01, None, "1.0% of a step"), (0.5, [1], "this is a list")])
def test_no_other_loader_is_tried_where_it_cannot_help(share, loader, words):
    (trial,) = try_loaders(engine_of(), loader, count=2, clock=HostClock(), share=share)
    assert trial.seconds is None
    assert words in trial.note


# -- advice ---------------------------------------------------------------------------------------------------------


def test_advice_has_the_largest_gain_first_and_says_what_was_tried_in_vain():
    found = advise(
        {"data": 4.0, "forward": 5.0, "hook Slow": 1.0, "files": 0.9, "rest of the loop": 0.01},
        {"a.py:1": 1.0, "b.py:2": 3.0},
        [
            Trial("small", "x=1", 0.9, 1.0), Trial("large", "y=1", 0.5, 1.0, "rounds"), Trial("none", "z", 0.99, 1.0),
            Trial("worse", "w", 2.0, 1.0), Trial("left", "v", note="no device"),
            Trial("larger", "b", 0.1, 1.0, other_training=True),
        ],
        on_cuda=True,
    )  # fmt: skip
    assert [(line.kind, line.text.split(":")[0]) for line in found] == [
        ("switch on", "large"), ("switch on", "small"), ("look at", "larger"),
        ("look at", "data"), ("look at", "Slow"), ("look at", "files"),
        ("look at", "host reads"), ("no gain", "none"), ("no gain", "worse"), ("not tried", "left"),
    ]  # fmt: skip
    assert found[0].text == "large: 1000.0 ms -> 500.0 ms a step (2.00 x as fast): y=1 [rounds]"
    assert "4 times a step, most at b.py:2" in found[6].text
    assert advise({"loop": 1.0}, {"a": 1.0}, [], on_cuda=False) == []
    (line,) = advise({"loop": 1.0}, {"transformers/x.py:7 in find_packed_sequence_indices": 1.0}, [], on_cuda=True)
    assert line.text.endswith("; treadle.text.skip_packing_check(model) leaves this out")


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "measure_ceilings", lambda device, precision: Ceilings(1e9, 1e9))
    monkeypatch.setattr(session, "_TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(session, "thread_counts", list)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fit.py").write_text(SCRIPT)
    return tmp_path


def measured(*arguments):
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    assert left.value.code == 0


def test_the_command_writes_json_and_leaves_the_users_folder_alone(quick, capsys):
    measured("fit.py", "--steps", "6", "--json", "--", "40")
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert "of the script" in told.err
    assert (result["steps"], result["face"], result["device"]) == (6, "mini", "cpu")
    assert {"data", "forward", "backward", "hook Reader", "hook CheckpointingHook"} <= set(result["parts"])
    assert result["step_seconds"] == pytest.approx(sum(result["parts"].values()))
    assert result["floor"]["flops"] == 2 * 2 * 4 * 4
    assert [line.split(" in ")[1] for line in result["host_reads"]] == ["on_after_step"]
    assert list(result["host_reads"].values()) == [1.0]
    tried = {trial["name"] for trial in result["trials"] if trial["seconds"] is not None}
    assert {"fused optimizer", "bf16", "twice the batch"} <= tried
    assert [path.name for path in quick.iterdir() if path.name != "__pycache__"] == ["fit.py"]


def test_the_command_prints_a_report_without_control_characters(quick, capsys):
    measured("fit.py", "--steps", "3", "--", "18")
    text = capsys.readouterr().out
    for words in ("part of a step", "host reads: 1 a step", "floor: ", "not tried: capture: CUDA graphs", "data"):
        assert words in text
    assert not [character for character in text if ord(character) < 32 and character != "\n"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit.py", "--steps", "2"], "--steps 2: must be at least 3"),
        (["spectre"], "did you mean 'spectra'?"),
        (["spectra", "epoch=3"], "did you mean 'epochs'?"),
        (["fit.py", "--", "10"], "trains 10 steps, but measuring needs at least 17"),
        (["idle.py"], "ended without training"),
        (["other.py"], "makes a trainer of the functional face"),
    ],
)
def test_what_cannot_be_measured_is_refused(quick, capsys, arguments, words):
    (quick / "idle.py").write_text("x = 1")
    (quick / "other.py").write_text(
        "import torch, treadle\nmodel = torch.nn.Linear(1, 1)\n"
        "treadle.Trainer(model, None, torch.nn.MSELoss(), device='cpu').train([(torch.ones(1, 1),) * 2] * 30, 1)"
    )
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    assert left.value.code == 2
    assert words in capsys.readouterr().err
