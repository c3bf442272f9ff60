"""Wrong uses of the faces that are refused or named before step 1, or before the step that they would spoil."""

from __future__ import annotations

import math
import queue
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import (
    BaseTrainer,
    CheckpointError,
    CheckpointingHook,
    ConfigError,
    NonFiniteError,
    Population,
    SwaHook,
    Trainer,
    ValidationHook,
)
from treadle.engine import preflight
from treadle.spectra import SpectraTrainer, TrainerConfig


def rows(width: int = 4, *, targets: torch.Tensor | None = None) -> DataLoader:
    x = torch.linspace(-1, 1, 16 * width).reshape(16, width)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True) if targets is None else targets), 4)


def trainer_of(model: nn.Module | None = None, loss=None, **options) -> Trainer:
    model = model or nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, loss or nn.MSELoss(), device="cpu", progress=False, **options)


class Steps(BaseTrainer):
    lr = 0.1

    def __init__(self, max_steps: int = 6, **options):
        super().__init__(max_steps, device="cpu", progress=False, **options)

    def build_data_loader(self):
        return rows()

    def build_model(self):
        return nn.Linear(4, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)

    def forward(self, input):
        return nn.functional.mse_loss(self.model(input[0]), input[1]), {}


def weights(trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


def test_an_error_of_the_first_evaluation_names_it_and_the_batch_before_step_1():
    trainer = trainer_of()
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        trainer.train(rows(), 1, eval_dataloader=rows(5))
    assert "the evaluation, tried before step 1; what the loader gave: (float32 (4, 5), float32 (4, 1))" in notes(
        raised.value
    )
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("loss", "advice"),
    [(lambda o, t: float((o - t).square().mean()), "cut it off"), (lambda o, t: ((o - t).mean(), 1), "loss alone")],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_a_loss_that_is_no_tensor_gets_advice_that_fits(loss, advice):
    with pytest.raises(ConfigError, match=advice):
        trainer_of(loss=loss).train(rows(), 1)


def test_a_model_that_is_frozen_as_a_whole_is_named():
    with pytest.raises(ConfigError, match="all parameters frozen"):
        trainer_of(nn.Linear(4, 1).requires_grad_(False)).train(rows(), 1)


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_rate_that_is_not_finite_moves_no_weight(rate):
    class Wrong(Steps):
        lr = rate

    trainer = Wrong()
    trainer.prepare()
    before = weights(trainer)
    with pytest.raises(ConfigError, match=f"lr={rate}: a learning rate must be finite"):
        trainer.train()
    assert all(map(torch.equal, weights(trainer), before))


def test_a_schedule_that_gives_nan_ends_the_run_before_the_step_that_it_would_spoil():
    class Wrong(Steps):
        def build_lr_scheduler(self):
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: math.nan if step == 3 else 1.0)

    trainer = Wrong()
    with pytest.raises(ConfigError, match="lr=nan"):
        trainer.train()
    assert trainer.applied_steps == 3
    assert all(weight.isfinite().all() for weight in weights(trainer))


@pytest.mark.parametrize("records", [{"a": "text"}, {"a": torch.ones(3)}, {"a": None}], ids=repr)
def test_a_record_that_is_no_number_is_named_before_the_step_is_applied(records):
    class Wrong(Steps):
        def forward(self, input):
            return super().forward(input)[0], records

    trainer = Wrong()
    with pytest.raises(TypeError, match="records/a"):
        trainer.train()
    assert trainer.applied_steps == 0


@pytest.mark.parametrize("shapes", [((16, 1), (16,)), ((16,), (16, 1))])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_column_of_outputs_against_a_row_of_targets_is_refused(shapes):
    outputs, targets = shapes
    model = nn.Sequential(nn.Linear(4, 1), nn.Unflatten(1, outputs[1:] or (1,)))
    if not outputs[1:]:
        model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    with pytest.raises(ConfigError, match=r"MSELoss would broadcast to \(4, 4\)"):
        trainer_of(model).train(rows(targets=torch.zeros(targets)), 1)


@pytest.mark.filterwarnings("error")
def test_a_single_row_and_an_own_loss_may_have_other_shapes():
    one = DataLoader(TensorDataset(torch.ones(1, 4), torch.ones(1)), 1)

    class Reshapes(Trainer):
        def _compute_loss(self, outputs, targets):
            return super()._compute_loss(outputs.squeeze(1), targets)

    trainer_of(loss=lambda outputs, targets: (outputs.mean() - targets.mean()) ** 2).train(one, 1)
    model = nn.Linear(4, 1)
    trainer = Reshapes(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", progress=False)
    trainer.train(rows(targets=torch.zeros(16)), 1)
    assert trainer.step == 4


@pytest.mark.parametrize(
    ("loss", "targets", "note"),
    [
        (nn.CrossEntropyLoss(), torch.zeros(16, 1), "targets (N, ...) of int64 from 0 to C - 1"),
        (nn.BCEWithLogitsLoss(), torch.zeros(16, 3, dtype=torch.int64), "floating targets of one shape"),
        (nn.CrossEntropyLoss(), torch.full((16,), 7), "outputs float32 (4, 3) and targets int64 (4,)"),
    ],
)
def test_an_error_of_the_loss_names_shapes_and_what_it_takes(loss, targets, note):
    with pytest.raises((RuntimeError, IndexError)) as raised:
        trainer_of(nn.Linear(4, 3), loss).train(rows(targets=targets), 1)
    assert note in notes(raised.value)


def test_an_array_is_not_shown_as_a_tensor():
    array = torch.ones(4, 4).numpy()
    with pytest.raises(TypeError) as raised:
        trainer_of().train([(array, array)], 1)
    assert "(ndarray float32 (4, 4), ndarray float32 (4, 4))" in notes(raised.value)


DATA_SET = rows().dataset


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("loader", [None, "rows", DATA_SET, torch.ones(3, 4), {"near": rows()}], ids=type)
def test_what_is_no_loader_is_neither_evaluated_nor_predicted(method, loader):
    with pytest.raises(ConfigError, match=r"^dataloader"):
        getattr(trainer_of(), method)(loader)


@pytest.mark.parametrize("loader", [torch.ones(4, 4), torch.ones(4, 4).numpy(), {"train": rows()}], ids=type)
def test_what_is_no_loader_trains_no_step_face(loader):
    class Wrong(Steps):
        def build_data_loader(self):
            return loader

    with pytest.raises(ConfigError, match=r"^loader: is a"):
        Wrong().train()


@pytest.mark.parametrize(
    ("settings", "call", "named"),
    [
        ({"save_top_k": 2}, {}, "save_top_k has no effect without save_dir"),
        ({"save_total_limit": 2}, {"save_freq": 3}, "save_total_limit, save_freq has no effect without save_dir"),
        ({}, {"save_freq": 1}, "save_freq has no effect without save_dir"),
        ({}, {}, ""),
        ({"save_total_limit": 1}, {"save_dir": "."}, ""),
        ({"save_top_k": 1}, {"save_dir": ".", "best_model_metric": None}, "selects no best epoch"),
    ],
)
def test_settings_of_files_that_are_not_written_are_named(settings, call, named, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer_of(**settings).train(rows(), 1, **call)
    assert named in caplog.text
    assert bool(caplog.records and "WARNING" in caplog.text) == bool(named)


@pytest.mark.parametrize("made", [[], ()], ids=repr)
def test_an_optimizer_among_others_is_refused(made):
    class Wrong(Steps):
        def build_optimizer(self):
            return type(made)([super().build_optimizer()])

    with pytest.raises(ConfigError, match=r"Wrong.build_optimizer\(\) returned a (list|tuple); return one"):
        Wrong().train()


def test_parts_that_are_assigned_and_arguments_in_the_body_of_a_class_are_named(caplog):
    class Wrong(Steps):
        grad_clip = 1.0
        hooks = ()

        def __init__(self):
            super().__init__()
            self.model = nn.Linear(4, 1)

    Wrong().train()
    for text in ("Wrong.model: assigned before", "Wrong.grad_clip: an attribute", "return it from build_hooks()"):
        assert text in caplog.text


def test_a_class_without_such_names_is_not_warned_of(caplog):
    class Right(Steps):
        width, name = 4, "right"

    Right().train()
    assert "WARNING" not in caplog.text


@pytest.mark.parametrize("loader", [None, "val", {"near": "val"}], ids=repr)
def test_a_validation_hook_wants_a_loader(loader):
    with pytest.raises(ConfigError, match="loader"):
        ValidationHook(loader)


def test_an_average_that_begins_after_the_run_is_named(caplog):
    Steps(hooks=[SwaHook(start=100)]).train()
    assert "start=100 is beyond the 6 steps" in caplog.text


def test_records_that_are_no_dict_are_refused():
    trainer = Steps()
    trainer.prepare()
    with pytest.raises(ConfigError, match="records='loss': must be a dict"):
        trainer.log("loss", 1.0)


def test_a_misspelt_event_is_named_once(caplog):
    class Hook(SwaHook):
        def on_after_stp(self, trainer): ...

    Steps(hooks=[Hook(start=2)]).train()
    assert caplog.text.count("on_after_stp") == 1


def test_options_of_a_state_are_torchs():
    with pytest.raises(ConfigError, match=r"state_dict_options={'strict': False}: must be"):
        Steps(state_dict_options={"strict": False})


def make(seed, workspace, lr=0.1):
    return Steps(workspace=workspace)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 3}, "seeds=3: must be several"),
        ({"seeds": ["a"]}, "seeds='a': must be a whole number"),
        ({"settings": {"lr": [1, 2]}}, "settings={'lr': \\[1, 2\\]}: must be a list"),
        ({"seeds": [1], "gpus": ["0"]}, "gpus=.*applies only to worker"),
    ],
    ids=str,
)
def test_a_population_refuses(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        Population(make, out=tmp_path, progress=False, **options)


def test_a_seed_of_numpy_seeds_a_member(tmp_path):
    drawn = []

    def note(seed, workspace):
        drawn.append(float(torch.rand(1)))
        return lambda: {"loss": 0.0}

    for seeds in (np.arange(2), range(2)):
        Population(note, seeds=seeds, out=tmp_path / str(type(seeds)), progress=False).run()
    assert drawn[:2] == drawn[2:]


def test_a_file_in_the_place_of_a_folder_is_named_by_its_argument(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"save_dir='.*file': is a file"):
        trainer_of().train(rows(), 1, save_dir=file)
    with pytest.raises(ConfigError, match=r"out='.*file': is a file"):
        Population(make, seeds=[1], out=file)
    with pytest.raises((ConfigError, CheckpointError), match="file' is a file"):
        Steps(workspace=file, hooks=[CheckpointingHook(interval=2)]).train()


def test_a_spectra_trainer_names_its_settings_and_what_a_model_returns(tmp_path):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"cfg={}: must be a TrainerConfig"):
        SpectraTrainer(model, optimizer, [torch.ones(2, 8)], cfg={})
    trainer = SpectraTrainer(model, optimizer, [torch.ones(2, 8)], cfg=TrainerConfig(tmp_path, "cpu", amp=False))
    with pytest.raises(ConfigError, match="model: returned a Tensor, must return"):
        trainer.fit(1)


def test_members_of_a_population_share_no_workspace(tmp_path):
    def make(seed):
        return Steps(workspace=tmp_path / "one")

    results = Population(make, seeds=range(2), out=tmp_path / "out", progress=False).run()
    assert [row.status for row in results.rows] == ["finished", "failed"]
    assert "would write into the folder of seed=0" in results.rows[1].error
    again = Population(make, seeds=[0], out=tmp_path / "out", progress=False).run()
    assert again.rows[0].status == "finished"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gradient_clip_val", "did you mean max_grad_norm"),
        ("accumulate_grad_batches", "did you mean gradient_accumulation_steps"),
        ("early_stopping_patience", r"pass early_stopping_patience= to train\(\)"),
        ("max_epochs", r"pass num_epochs= to train\(\)"),
        ("batch_size", "pass it to the DataLoader"),
        ("min_dleta", "did you mean 'min_delta'"),
    ],
)
def test_a_setting_by_another_librarys_name_gets_its_counterpart_and_not_the_nearest_letters(name, hint):
    with pytest.raises(ConfigError, match=f"^{name}: no such argument of the trainer; {hint}"):
        trainer_of(**{name: 1})


# -- losses that take logits or log-probabilities ------------------------------------------------------------------


def classes(rows: int = 16) -> DataLoader:
    x = torch.linspace(-1, 1, rows * 4).reshape(rows, 4)
    return DataLoader(TensorDataset(x, torch.arange(rows) % 3), 4)


def flags(rows: int = 16) -> DataLoader:
    x = torch.linspace(-1, 1, rows * 4).reshape(rows, 4)
    return DataLoader(TensorDataset(x, (torch.arange(rows) % 2).float()), 4)


class Classifier(nn.Module):
    """Model whose last operation is a function, which no list of modules shows."""

    def __init__(self, last, width: int = 3):
        super().__init__()
        self.linear, self.last = nn.Linear(4, width), last

    def forward(self, x):
        return self.last(self.linear(x))


def softmax(x):
    return x.softmax(1)


def probability(x):
    return x.squeeze(1).sigmoid()


def squeezed_probability(x):
    return x.sigmoid().squeeze(1)


TWICE = {
    "softmax": (Classifier(softmax), nn.CrossEntropyLoss(), classes, "cross_entropy takes logits.*of a softmax"),
    "module": (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), nn.CrossEntropyLoss(), classes, "of a softmax"),
    "sigmoid": (Classifier(torch.sigmoid), nn.CrossEntropyLoss(), classes, "of a sigmoid"),
    "weights": (Classifier(softmax), nn.CrossEntropyLoss(torch.ones(3)), classes, "of a softmax"),
    "function": (Classifier(softmax), nn.functional.cross_entropy, classes, "of a softmax"),
    "binary": (Classifier(probability, 1), nn.BCEWithLogitsLoss(), flags, "with_logits takes logits.*of a sigmoid"),
    "view": (Classifier(squeezed_probability, 1), nn.BCEWithLogitsLoss(), flags, "of a sigmoid"),
    "nll": (nn.Linear(4, 3), nn.NLLLoss(), classes, "nll_loss takes log-probabilities"),
    "nll of softmax": (Classifier(softmax), nn.NLLLoss(), classes, "nll_loss takes log-probabilities"),
}
ONCE = {
    "logits": (nn.Linear(4, 3), nn.CrossEntropyLoss(), classes),
    "log-probabilities, of which log_softmax is the identity": (
        Classifier(lambda x: x.log_softmax(1)), nn.CrossEntropyLoss(), classes),
    "nll": (Classifier(lambda x: x.log_softmax(1)), nn.NLLLoss(), classes),
    "nll of a logarithm": (Classifier(lambda x: (x.softmax(1) + 1e-6).log()), nn.NLLLoss(), classes),
    "scaled": (Classifier(lambda x: 10 * x.sigmoid()), nn.CrossEntropyLoss(), classes),
    "gate": (Classifier(lambda x: x * x.sigmoid()), nn.CrossEntropyLoss(), classes),
    "binary": (Classifier(lambda x: x.squeeze(1), 1), nn.BCEWithLogitsLoss(), flags),
    "probabilities": (Classifier(probability, 1), nn.BCELoss(), flags),
    "soft targets": (
        Classifier(softmax), lambda o, t: -(o + 1e-6).log().mean(), classes),
}  # fmt: skip


@pytest.mark.parametrize("case", TWICE)
def test_probabilities_for_a_loss_of_logits_are_named_in_step_1_and_once(case, caplog):
    model, loss, data, named = TWICE[case]
    trainer_of(model, loss).train(data(), 2)
    found = [record.getMessage() for record in caplog.records if "takes log" in record.getMessage()]
    assert len(found) == 1
    assert re.search(named, found[0])


@pytest.mark.parametrize("case", ONCE)
def test_outputs_that_fit_their_loss_are_not_warned_of(case, caplog):
    model, loss, data = ONCE[case]
    trainer_of(model, loss).train(data(), 1)
    assert not [record for record in caplog.records if "takes log" in record.getMessage()]


def test_a_loss_in_the_users_own_step_is_looked_at_too(caplog):
    class Own(Steps):
        def build_data_loader(self):
            return classes()

        def build_model(self):
            return nn.Linear(4, 3)

        def forward(self, input):
            outputs = self.model(input[0]).softmax(1)
            return 0.5 * nn.functional.cross_entropy(outputs, input[1]) + 0.1 * outputs.square().mean(), {}

    Own(2).train()
    assert "cross_entropy takes logits" in caplog.text


# -- models without values, steps longer than an epoch -------------------------------------------------------------


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 1)


def partly_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), on_meta())


@pytest.mark.parametrize(("model", "first"), [(on_meta, "'weight'"), (partly_on_meta, "'1.weight'")])
def test_a_model_on_the_meta_device_is_refused(model, first):
    class Fit(Steps):
        def build_model(self):
            return model()

    for call in (lambda: trainer_of(model()), Fit().train):
        with pytest.raises(ConfigError, match=f"model: {first} is on the meta device.*to_empty"):
            call()


def test_a_buffer_on_the_meta_device_is_refused():
    made = nn.Linear(4, 1)
    made.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match="'table' is on the meta device"):
        trainer_of(made)


@pytest.mark.parametrize(("steps", "named"), [(4, False), (5, True), (64, True)])
def test_a_step_longer_than_an_epoch_is_named_at_the_start(steps, named, caplog):
    trainer_of(gradient_accumulation_steps=steps).train(rows(), 3)
    Steps(gradient_accumulation_steps=steps).train()
    found = [record for record in caplog.records if "has 4 micro-batches" in record.getMessage()]
    assert len(found) == 2 * named


def test_a_limited_epoch_is_not_named_for_its_length(caplog):
    trainer_of(gradient_accumulation_steps=4, limit_train_batches=2).train(rows(), 1)
    Steps(gradient_accumulation_steps=4, fast_dev_run=True).train()
    assert "micro-batches" not in caplog.text


# -- samples that torch cannot join --------------------------------------------------------------------------------


class Ragged:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(index + 1), torch.ones(1)


class WithNone(Ragged):
    def __getitem__(self, index):
        return torch.ones(4), None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("data", "shown"), [(Ragged(), r"float32 \(2,\)"), (WithNone(), "NoneType")])
def test_samples_that_the_default_collate_cannot_join_are_shown(data, shown, workers):
    trainer = trainer_of()
    with pytest.raises(ConfigError, match=rf"collate_fn: (?s:.*){shown}(?s:.*)pass collate_fn="):
        trainer.train(DataLoader(data, 4, num_workers=workers), 1)
    assert trainer.step == 0


def test_an_error_of_the_users_data_is_left_as_it_is():
    class Broken(Ragged):
        def __getitem__(self, index):
            raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="no such file"):
        trainer_of().train(DataLoader(Broken(), 4), 1)


# -- values that are not finite ------------------------------------------------------------------------------------


def with_nan(row: int) -> DataLoader:
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    x[row, 2] = math.nan
    return DataLoader(TensorDataset(x, torch.ones(16, 1)), 4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_error_of_a_gradient_names_the_sample_that_is_not_finite(accumulation):
    trainer = trainer_of(gradient_accumulation_steps=accumulation)
    with pytest.raises(NonFiniteError, match=r"Batch 3 has .*not finite: \[0\] has 1 of 16, first in sample 9"):
        trainer.train(with_nan(9), 1)


def test_the_error_of_a_gradient_that_diverges_names_no_data():
    with pytest.raises(NonFiniteError, match="Inspect these batches"):
        trainer_of(loss=lambda outputs, targets: (outputs - targets).mean() * math.inf).train(rows(), 1)


@pytest.mark.parametrize(("row", "named"), [(1, True), (9, False)])
def test_an_evaluation_whose_first_loss_is_nan_is_named_before_step_1(row, named, caplog):
    trainer = trainer_of()
    seen = queue.SimpleQueue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "treadle.engine.preflight._warn_of_loss",
            lambda engine, *rest, original=preflight._warn_of_loss: (seen.put(engine.step), original(engine, *rest)),
        )
        trainer.train(rows(), 1, with_nan(row))
    assert seen.get() == 0
    assert ("before step 1, has a loss of nan" in caplog.text) == named
    assert ("not finite in [0]" in caplog.text) == named
