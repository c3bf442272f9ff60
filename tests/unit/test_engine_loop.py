from __future__ import annotations

import logging
import os
import re
import signal

import pytest
import torch
from torch import nn

from helpers import Scalar, Slopes, library_frames, scalar_engine
from treadle import BestRule, CheckpointingHook, EpochTrainer, StepOutput
from treadle.engine import Engine
from treadle.engine import hook as hooks_base
from treadle.errors import ConfigError, DataExhaustedError
from treadle.hooks import EVENTS, BaseHook, EmaHook, LoggingHook, NonFiniteHook, SignalHook


class Recorder(BaseHook):
    """Writes down every event, and what the parts of a step do in between."""

    def __init__(self, name="", log=None):
        self.name = name
        self.log = [] if log is None else log

    @property
    def state_key(self):
        return f"Recorder{self.name}"

    def note(self, what):
        self.log.append(f"{self.name}{what}")

    def on_close(self, trainer, error=None):
        self.note(f"on_close({type(error).__name__})" if error else "on_close")


def _recorded(event):
    def note(self, trainer, *args):
        self.note(event)

    return note


for _event in EVENTS:
    if _event != "on_close":
        setattr(Recorder, _event, _recorded(_event))


class Watched:
    """Records the parts of a step that are no events."""

    def __init__(self, engine, recorder):
        model, optimizer = engine.model, engine.optimizer
        forward, step, zero = model.forward, optimizer.step, optimizer.zero_grad
        model.forward = lambda *a: recorder.note("forward") or forward(*a)
        optimizer.step = lambda *a, **k: recorder.note("optimizer.step") or step(*a, **k)
        optimizer.zero_grad = lambda *a, **k: recorder.note("zero gradients") or zero(*a, **k)


def test_the_events_come_as_the_pseudo_code_says():
    recorder = Recorder()
    engine = scalar_engine(hooks=[recorder])
    Watched(engine, recorder)
    engine.run([1.0], epochs=1)
    loop = re.split(r"\n(?=\S)", hooks_base.__doc__.split("::")[1])[0]  # the indented block
    written = re.findall(r"on_(?!log|state|load)\w+|forward|optimizer\.step|zero gradients(?=\n)", loop)
    assert recorder.log == written
    assert {word for word in written if word.startswith("on_")} | set(
        re.findall(r"`(on_\w+)`", hooks_base.__doc__)
    ) == set(EVENTS)


STEP = ["on_before_step", "on_before_optimizer_step", "on_after_step"]


def test_a_run_by_steps_leaves_at_its_target_in_the_middle_of_an_epoch():
    recorder = Recorder()
    engine = scalar_engine(hooks=[recorder])
    engine.run([1.0, 2.0], max_steps=3)
    assert recorder.log == [
        "on_before_train", *STEP, *STEP, "on_after_epoch", *STEP, "on_after_train", "on_close",
    ]  # fmt: skip
    assert (engine.step, engine.epoch, engine.micro_steps, engine.applied_steps) == (3, 1, 3, 3)


def test_an_epoch_that_ends_with_the_last_step_is_completed_when_the_run_goes_on():
    recorder = Recorder()
    engine = scalar_engine(hooks=[recorder])
    engine.run([1.0, 2.0], max_steps=2)
    assert (engine.step, engine.epoch) == (2, 0)
    assert "on_after_epoch" not in recorder.log  # the last step's checkpoint is the state at the end
    recorder.log.clear()
    engine.run([1.0, 2.0], max_steps=3)
    assert recorder.log == ["on_before_train", "on_after_epoch", *STEP, "on_after_train", "on_close"]
    assert (engine.step, engine.epoch) == (3, 1)


def test_events_reach_hooks_in_list_order_and_close_in_reverse_order():
    log = []
    engine = scalar_engine(hooks=[Recorder("a:", log), Recorder("b:", log)])
    engine.run([1.0], max_steps=1)
    assert log[:2] == ["a:on_before_train", "b:on_before_train"]
    assert log[-4:] == ["a:on_after_train", "b:on_after_train", "b:on_close", "a:on_close"]


def test_an_early_stop_acts_after_the_epochs_files_and_callbacks():
    recorder = Recorder()
    engine = scalar_engine(hooks=[recorder])
    trainer = EpochTrainer(engine, best=BestRule("train_loss", patience=1))
    engine.model.weight.requires_grad_(True)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    trainer.fit([0.0], None, 9, after_epoch=lambda record: recorder.note("callback"))
    epoch = [*STEP, "on_after_epoch", "callback"]
    assert recorder.log == ["on_before_train", *epoch, *epoch, "on_after_train", "on_close"]
    assert engine.epoch == 2


def test_a_hook_can_stop_a_run_after_its_step():
    class Stop(BaseHook):
        def on_after_step(self, trainer):
            trainer.should_stop = trainer.step == 2

    recorder = Recorder()
    engine = scalar_engine(hooks=[Stop(), recorder])
    engine.run([1.0] * 5, max_steps=5)
    assert recorder.log == ["on_before_train", *STEP, *STEP, "on_after_train", "on_close"]
    engine.run([1.0] * 5, max_steps=4)
    assert engine.step == 4, "a stop of an earlier run must not stop the next one"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
@pytest.mark.parametrize("k", [1, 2])
def test_an_exception_of_the_model_leaves_unchanged_and_every_hook_is_closed(kind, k):
    error = kind("mine")
    recorder = Recorder()
    engine = scalar_engine(hooks=[recorder], accumulation_steps=k)
    engine.task = Slopes(fail_at={2: error})
    with pytest.raises(kind) as caught:
        engine.run([1.0] * 6, max_steps=6)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert recorder.log[-1] == f"on_close({kind.__name__})"
    assert "on_after_train" not in recorder.log
    assert engine.step == (2 if k == 1 else 1)


@pytest.mark.parametrize("event", ["on_before_train", "on_before_step", "on_before_optimizer_step", "on_after_step",
                                   "on_after_epoch", "on_after_train"])  # fmt: skip
def test_an_exception_of_a_hook_leaves_unchanged_and_the_others_are_closed(event):
    error = KeyError("mine")

    class Fails(BaseHook):
        pass

    def fail(self, trainer):
        raise error

    setattr(Fails, event, fail)
    first, last = Recorder("a:"), Recorder("b:")
    engine = scalar_engine(hooks=[first, Fails(), last])
    with pytest.raises(KeyError) as caught:
        engine.run([1.0], epochs=1)
    assert caught.value is error
    assert first.log[-1] == "a:on_close(KeyError)"
    assert last.log[-1:] == ([] if event == "on_before_train" else ["b:on_close(KeyError)"])


def test_an_error_while_closing_does_not_keep_the_others_open_nor_hide_the_first():
    class FailsToClose(BaseHook):
        def on_close(self, trainer, error=None):
            raise OSError("closing")

    recorder = Recorder()
    engine = scalar_engine(hooks=[recorder, FailsToClose()])
    with pytest.raises(OSError, match="closing"):
        engine.run([1.0], max_steps=1)
    assert recorder.log[-1] == "on_close"
    engine.task = Slopes(fail_at={1: ValueError("the first")})
    with pytest.raises(ValueError, match="the first"):
        engine.run([1.0], max_steps=2)
    assert recorder.log[-1] == "on_close(ValueError)"


def test_a_run_goes_on_after_an_exception_without_losing_data():
    engine = scalar_engine()
    engine.task = Slopes(fail_at={2: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        engine.run([1.0, 2.0, 4.0], max_steps=3)
    before = engine.model.weight.item()
    engine.task = Slopes()
    engine.run([1.0, 2.0, 4.0], epochs=1)
    assert before == -1.0
    assert engine.model.weight.grad.item() == 4.0, "a gradient of the broken step leaked"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129),
                                              (signal.SIGUSR1, 138)])  # fmt: skip
def test_a_signal_saves_at_the_next_boundary_and_leaves_with_its_code(number, code, tmp_path):
    class Send(BaseHook):
        def on_before_optimizer_step(self, trainer):
            if trainer.step == 2:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    recorder = Recorder()
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
    checkpointing = CheckpointingHook(100, path=tmp_path, exit_signals=signals)
    engine = scalar_engine(hooks=[Send(), checkpointing, recorder])
    with pytest.raises(SystemExit) as caught:
        engine.run([1.0] * 5, max_steps=5)
    assert caught.value.code == code
    assert recorder.log == ["on_before_train", *STEP, *STEP, "on_state_dict", "on_close(SystemExit)"]
    assert signal.getsignal(number) is before
    resumed = scalar_engine(hooks=[CheckpointingHook(100, path=tmp_path)])
    resumed.run([1.0] * 5, max_steps=5)
    assert resumed.step == 5
    assert resumed.model.weight.item() == -5.0


def test_a_signal_before_the_first_step_saves_step_zero(tmp_path):
    class Send(BaseHook):
        def on_before_train(self, trainer):
            os.kill(os.getpid(), signal.SIGTERM)

    engine = scalar_engine(hooks=[Send(), CheckpointingHook(9, path=tmp_path, exit_signals=signal.SIGTERM)])
    with pytest.raises(SystemExit):
        engine.run([1.0], max_steps=5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint_latest.pt", "checkpoint_step_0.pt"]


@pytest.mark.parametrize("target", [{"max_steps": -1}, {"max_steps": 2.5}, {"epochs": -1}, {"epochs": "3"}])
def test_a_target_that_is_no_whole_number_is_refused_by_name(target):
    ((name, value),) = target.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r} must be a whole number >= 0")):
        scalar_engine().run([1.0], **target)


@pytest.mark.parametrize("make", [lambda: EmaHook(0.5), lambda: NonFiniteHook("skip")])
def test_a_hook_that_comes_too_late_for_what_it_declares_is_refused(make):
    engine = scalar_engine()
    engine.run([1.0], max_steps=1)
    engine.hooks += [BaseHook(), make()]
    with pytest.raises(ConfigError, match=r"(EmaHook|NonFiniteHook) was added too late, after a run"):
        engine.run([1.0], max_steps=2)
    del engine.hooks[-1]
    engine.run([1.0], max_steps=2)


class SendAt(BaseHook):
    """Sends SIGTERM to this process at an event of the last epoch."""

    def __init__(self, event):
        setattr(self, event, lambda trainer: trainer.epoch == 2 and os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.parametrize("event", ["on_after_epoch", "on_after_train"])
def test_a_signal_after_the_last_step_is_not_swallowed(event):
    saved = []
    engine = scalar_engine(hooks=[SendAt(event), SignalHook(lambda: saved.append(engine.epoch), signal.SIGTERM)])
    with pytest.raises(SystemExit) as left:
        engine.run([1.0], epochs=2)
    assert left.value.code == 143
    assert saved == [2]


def test_a_signal_that_ended_a_run_does_not_end_a_later_evaluation():
    engine = scalar_engine(hooks=[SendAt("on_after_epoch"), SignalHook(lambda: None, signal.SIGTERM)])
    with pytest.raises(SystemExit):
        engine.run([1.0], epochs=2)
    assert engine.evaluate([2.0])["loss"] == -4.0


def test_a_signal_in_an_evaluation_abandons_it_and_logs_nothing_of_it():
    class Sends(Slopes):
        def step(self, model, batch, totals=None, generator=None):
            if not model.training and batch == 8.0:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(model, batch)

    states = []
    hook = SignalHook(lambda: states.append(engine.state_dict()), signal.SIGTERM)
    engine = scalar_engine(hooks=[EmaHook(0.5), hook])
    engine.task = Sends()
    trainer = EpochTrainer(engine)
    with pytest.raises(SystemExit) as caught:
        trainer.fit([1.0, 1.0], [7.0, 8.0, 9.0], 3)
    assert caught.value.code == 143
    assert trainer.history == []
    (state,) = states
    assert (state["epoch"], state["global_step"], state["metrics"], state["history"]) == (0, 2, None, [])
    assert state["model"]["weight"].item() == -2.0, "the averaged weights were saved as the raw ones"
    assert engine.model.weight.item() == -2.0
    assert engine.model.training
    resumed = scalar_engine(hooks=[EmaHook(0.5)])
    again = EpochTrainer(resumed)
    resumed.load_state_dict(state)
    again.fit([1.0, 1.0], [7.0, 8.0, 9.0], 1)
    assert [record["epoch"] for record in again.history] == [1]
    assert resumed.step == 2


def test_a_signal_that_nobody_asked_for_keeps_its_default():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    class Look(BaseHook):
        def on_after_step(self, trainer):
            seen.append(signal.getsignal(signal.SIGTERM))

    scalar_engine(hooks=[Look()]).run([1.0], max_steps=1)
    assert seen == [before]


def test_a_finished_run_is_a_no_op_with_one_line_in_the_log(caplog):
    recorder = Recorder()
    engine = scalar_engine(hooks=[recorder])
    engine.run([1.0], max_steps=2)
    recorder.log.clear()
    state = engine.state_dict()
    recorder.log.clear()
    with caplog.at_level(logging.INFO, "treadle"):
        engine.run([1.0], max_steps=2)
        engine.run([1.0], max_steps=1)
    assert recorder.log == []
    assert len(caplog.records) == 2
    assert engine.step == 2
    assert torch.equal(engine.model.weight, state["model"]["weight"])


def test_targets_are_absolute():
    engine = scalar_engine()
    engine.run([1.0] * 3, epochs=2)
    engine.run([1.0] * 3, epochs=2)
    engine.run([1.0] * 3, epochs=3)
    assert (engine.step, engine.epoch) == (9, 3)
    fresh = scalar_engine()
    fresh.run([1.0], max_steps=0)
    assert fresh.step == 0


@pytest.mark.parametrize("targets", [{}, {"max_steps": 1, "epochs": 1}])
def test_exactly_one_target_is_needed(targets):
    with pytest.raises(ConfigError, match="exactly one"):
        scalar_engine().run([1.0], **targets)


@pytest.mark.parametrize("loader", [[], iter([])])
@pytest.mark.parametrize("target", [{"max_steps": 3}, {"epochs": 2}])
def test_an_empty_loader_is_an_error_naming_step_and_target(loader, target):
    with pytest.raises(DataExhaustedError, match=rf"step 0.*{next(iter(target.values()))}"):
        scalar_engine().run(loader, **target)


def test_a_one_shot_stream_that_ends_early_is_an_error_naming_step_and_target():
    engine = scalar_engine()
    with pytest.raises(DataExhaustedError, match=r"step 3.*target step 7"):
        engine.run(iter([1.0, 1.0, 1.0]), max_steps=7)
    assert engine.model.weight.item() == -3.0
    enough = scalar_engine()
    enough.run(iter([1.0, 1.0, 1.0]), max_steps=3)
    assert enough.step == 3


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_finite_loader_is_opened_again_for_each_epoch(k):
    recorder = Recorder()
    engine = scalar_engine(hooks=[recorder], accumulation_steps=k)
    engine.run([1.0] * 3, max_steps=5)
    assert engine.step == 5
    assert recorder.log.count("on_after_epoch") == engine.epoch


def test_files_are_written_after_every_hook_has_seen_the_step():
    log = []

    class Asks(Recorder):
        def on_after_step(self, trainer):
            super().on_after_step(trainer)
            trainer.request_write(lambda: log.append("write"))

    engine = scalar_engine(hooks=[Asks("a:", log), Recorder("b:", log)])
    engine.run([1.0], max_steps=1)
    assert log.index("write") > log.index("b:on_after_step")


def test_writes_asked_for_at_the_end_come_after_every_hook_has_seen_it():
    log = []

    class Asks(Recorder):
        def on_after_train(self, trainer):
            super().on_after_train(trainer)
            trainer.request_write(lambda: log.append("write"))

    engine = scalar_engine(hooks=[Asks("a:", log), Recorder("b:", log)])
    engine.run([1.0], max_steps=1)
    assert log[-3:] == ["write", "b:on_close", "a:on_close"]


def test_between_the_users_script_and_forward_are_two_library_frames():
    frames = []

    class Look(Slopes):
        def step(self, model, batch, totals=None, generator=None):
            frames.extend(library_frames())
            return super().step(model, batch)

    engine = scalar_engine()
    engine.task = Look()
    engine.run([1.0], max_steps=1)
    assert frames == ["forward", "train_step", "run"]


def test_the_step_function_fits_on_a_screen_and_is_flat():
    import ast
    import inspect
    import textwrap

    source = inspect.getsource(Engine.train_step)
    assert len(source.splitlines()) <= 60

    def depth(node):
        inner = [depth(child) for child in ast.iter_child_nodes(node)]
        own = isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try))
        return max(inner, default=0) + own

    assert depth(ast.parse(textwrap.dedent(source))) <= 3


def test_records_reach_every_hook_exactly_once_however_log_is_overridden():
    class Counts(BaseHook):
        def __init__(self):
            self.seen = []

        def on_log(self, trainer, records, dry_run=False):
            self.seen.append((records, dry_run))

    def engine_of(kind):
        hook = Counts()
        model = Scalar()
        engine = kind(model, torch.optim.SGD(model.parameters(), lr=1.0), Slopes(), device="cpu",
                      hooks=[LoggingHook(2), hook])  # fmt: skip
        return engine, hook

    class Silent(Engine):
        def log(self, records, dry_run=False):
            self.own = records

    class Loud(Engine):
        def log(self, records, dry_run=False):
            self.own = records
            super().log(records, dry_run)

    for kind in (Engine, Silent, Loud):
        engine, hook = engine_of(kind)
        engine.run([1.0] * 4, max_steps=4)
        assert [records["train"]["grad_norm"] for records, _ in hook.seen] == [1.0, 1.0]
        engine.log({"a": 1}, dry_run=True)
        if kind is not Silent:
            assert hook.seen[-1] == ({"a": 1}, True)


def test_lr_of_a_log_is_the_one_the_step_used():
    class Keeps(BaseHook):
        def __init__(self):
            self.seen = []

        def on_log(self, trainer, records, dry_run=False):
            self.seen.append(records["train"]["lr"]["group_0"])

    hook = Keeps()
    engine = scalar_engine(hooks=[LoggingHook(1), hook])
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
    engine.run([1.0] * 3, max_steps=3)
    assert hook.seen == [1.0, 0.5, 0.25]


def test_two_hooks_with_one_key_are_refused_every_time_they_are_used():
    model = Scalar()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), Slopes(), device="cpu",
                    hooks=[LoggingHook(1), LoggingHook(2)])  # fmt: skip
    for _ in range(2):
        with pytest.raises(ConfigError, match="LoggingHook"):
            engine.run([1.0], max_steps=1)
    with pytest.raises(ConfigError, match="LoggingHook"):
        engine.state_dict()


def test_two_averages_need_two_names():
    with pytest.raises(ConfigError, match=r"EmaHook.*give one another name="):
        scalar_engine(hooks=[EmaHook(0.9), EmaHook(0.99)]).run([1.0], max_steps=1)

    class Other(EmaHook):
        pass

    for _ in range(2):
        engine = scalar_engine(hooks=[EmaHook(0.9), Other(0.99)])
        with pytest.raises(ConfigError, match="'ema'"):
            engine.run([1.0], max_steps=1)
    engine = scalar_engine(hooks=[EmaHook(0.5), EmaHook(0.0, name="copy")])
    engine.run([1.0], max_steps=1)
    assert {name: ema.module.weight.item() for name, ema in engine.averages.items()} == {"ema": -0.5, "copy": -1.0}
    assert set(engine.state_dict()["ema"]) == {"ema", "copy"}


class KeepsEval(nn.Module):
    """Freezes its layer as models do that mean it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(x)


class OutOfNorm:
    """A task without numbers of its own."""

    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).square().sum())


@pytest.mark.parametrize(("model", "frozen", "thawed"), [
    (nn.Sequential(nn.BatchNorm1d(4)), "0", True),
    (nn.Sequential(nn.BatchNorm1d(4)), "", False),  # all of it, as models come that were loaded to be used
    (nn.Sequential(KeepsEval()), "0.norm", False),
])  # fmt: skip
def test_a_frozen_layer_with_running_statistics_is_named_when_training_thaws_it(model, frozen, thawed, caplog):
    model.train().get_submodule(frozen).eval()
    Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), OutOfNorm(), device="cpu").run(
        [torch.randn(3, 4)], max_steps=1
    )
    warned = [record.getMessage() for record in caplog.records if "running statistics" in record.getMessage()]
    assert len(warned) == thawed
    assert all("(first: 0)" in line and "override train()" in line for line in warned)
    assert model.get_submodule(frozen).training is (frozen != "0.norm")


def test_parameters_outside_the_optimizer_are_listed_in_a_warning(caplog):
    model = nn.ModuleDict({"used": nn.Linear(1, 1), "forgotten": nn.Linear(1, 1), "frozen": nn.Linear(1, 1)})
    model["frozen"].requires_grad_(False)

    class UsesAll:
        def step(self, model, batch, totals=None, generator=None):
            from treadle import StepOutput

            return StepOutput(sum(part(torch.ones(1, 1)).sum() for part in model.values()))

    engine = Engine(model, torch.optim.SGD(model["used"].parameters(), lr=0.1), UsesAll(), device="cpu")
    with caplog.at_level(logging.WARNING, "treadle"):
        engine.run([1.0] * 2, max_steps=2)
    (record,) = caplog.records
    assert "forgotten.weight, forgotten.bias" in record.getMessage()
    assert "frozen" not in record.getMessage()
    assert model["forgotten"].weight.grad.abs().max() <= 1.0, "the gradient of a forgotten parameter piles up"


def test_a_lazy_parameter_is_refused_with_its_name():
    model = nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(1))
    engine = Engine(model, torch.optim.SGD(model[0].parameters(), lr=0.1), Slopes(), device="cpu")
    with pytest.raises(ConfigError, match=r"1\.weight"):
        engine.run([1.0], max_steps=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduler_interval": "batch"},
        {"grad_clip": -1.0},
        {"grad_clip": float("nan")},
        {"accumulation_steps": 0},
        {"max_non_finite_grad_retries": -1},
        {"precision": "fp8"},
        {"device": "nowhere"},
    ],
)
def test_a_setting_outside_its_range_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        scalar_engine(**wrong)


def test_an_epoch_in_which_no_step_changed_the_weights_is_told(caplog):
    class Nothing(Slopes):
        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(None)

    engine = scalar_engine(task=Nothing())
    with caplog.at_level("WARNING"):
        engine.run([1.0, 2.0], epochs=2)
    told = [message for message in caplog.messages if "no step changed the weights" in message]
    assert told == [
        f"epoch {epoch}: no step changed the weights (last step: no micro-batch had a loss)" for epoch in (1, 2)
    ]
