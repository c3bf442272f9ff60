"""AstroTrainer: what it takes and refuses, what it counts, what it returns."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from astro_trainer_kit import VOCAB, LogitsOnly, OverflowAt, codebooks, loader, make, model, same_weights, sequences
from helpers import ReadsPerStep, library_frames
from treadle.astro import (
    AstroTrainer,
    MeaningfulLossConfig,
    Trainer,
    TrainingConfig,
    build_vocab_spec,
    choose_positions,
    collate_sequences,
    combined_loss,
    cosine_schedule_with_warmup,
    encode_sequence,
    load_config,
)
from treadle.astro.loss_inputs import LossConfig
from treadle.astro.task import offers_hidden_states
from treadle.errors import ConfigError
from treadle.hooks import BaseHook, EmaHook, ProgressHook
from treadle.seed import set_seed

EVERYTHING = 4096
TERMS = ("ce", "img", "sca", "spec")


def batches(data, sizes, batch_of=None):
    """Cut sequences into ragged batches of the given sizes."""
    made, start = [], 0
    for size in sizes:
        made += list(loader(data[start : start + size], size))
        start += size
    return made


def plain(trainer, batch, use_ce=True):
    """The loss of a batch by the documented function, at every position."""
    logits = trainer.model(batch["tokens"][:, :-1], batch["types"][:, :-1], batch["attn_mask"][:, :-1])
    config = {"sample_k": EVERYTHING}
    books = codebooks()
    return combined_loss(
        logits, batch["tokens"][:, 1:], VOCAB, books["image_codebook"], books["spectrum_codebook"],
        books["scalar_centers"], config, use_ce,
    )  # fmt: skip


@pytest.mark.parametrize("id", [-1, VOCAB.vocab_size, VOCAB.vocab_size + 7])
def test_an_id_outside_the_vocabulary_is_named(id):
    batch = {name: part.clone() for name, part in next(iter(loader())).items()}
    batch["tokens"][0, 2] = id
    for run in (make(train=[batch]).train, lambda: make().evaluate([batch])):
        with pytest.raises(ConfigError, match=rf"targets from .*{id}.*\[0, {VOCAB.vocab_size}\)"):
            run()


def test_the_constructor_and_train_have_the_documented_arguments():
    parameters = inspect.signature(AstroTrainer).parameters
    assert list(parameters) == [
        "model", "vocab", "train_loader", "config", "image_codebook", "spectrum_codebook", "scalar_centers", "device",
        "output_dir", "use_amp", "use_ce", "compile_model", "amp_dtype", "optimizer", "scheduler",
        "scheduler_interval", "hooks", "trackers", "eval_seed", "capture", "parallel", "progress", "limits",
        "save_total_limit",
    ]  # fmt: skip
    keyword_only = [name for name, value in parameters.items() if value.kind is value.KEYWORD_ONLY]
    assert keyword_only == list(parameters)[12:]
    train = inspect.signature(AstroTrainer.train).parameters
    assert list(train)[1:] == ["num_epochs", "val_loader", "resume_from", "best_model_metric"]
    assert Trainer is AstroTrainer


class Unsized:
    def __iter__(self):
        return iter(loader())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_codebook": None}, "image_codebook=None, but meaningful_loss.weight_image=0.1"),
        ({"spectrum_codebook": None}, "spectrum_codebook=None"),
        ({"scalar_centers": None}, "scalar_centers=None"),
        ({"image_codebook": torch.full((7, 3), math.nan)}, "image_codebook"),
        ({"use_ce": False, "loss": {"enabled": False}}, "nothing would be trained"),
        ({"learning_rat": 1.0}, "did you mean 'learning_rate'"),
        ({"amp_dtype": "fp8"}, "amp_dtype='fp8'"),
        ({"scheduler_interval": "epoch"}, "the schedule of the settings counts steps"),
        ({"train": Unsized()}, "total_steps=None and the train_loader has no length"),
        ({"net": model(vocab_size=5)}, "vocab_size=5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        make(**settings)


def test_all_settings_in_place_of_the_training_part_are_refused():
    with pytest.raises(ConfigError, match=r"give the training part, such as load_config\(\).training"):
        AstroTrainer(model(), VOCAB, loader(), load_config(), **codebooks())


@dataclasses.dataclass
class OwnSettings:
    epochs: int = 3
    meaningful_loss: MeaningfulLossConfig = dataclasses.field(default_factory=lambda: MeaningfulLossConfig(True, 7))


@pytest.mark.parametrize(
    "given",
    [
        OwnSettings(),
        {"epochs": 3, "meaningful_loss": {"sample_k": 7}},
        {"epochs": 3, "meaningful_loss": MeaningfulLossConfig(sample_k_per_modality=7)},
    ],
)
def test_settings_are_read_from_dataclasses_and_with_the_name_that_the_losses_have(given):
    trainer = AstroTrainer(model(), VOCAB, loader(), given, **codebooks(), device="cpu")
    assert (trainer.config.epochs, trainer.config.meaningful_loss) == (3, MeaningfulLossConfig(True, 7))


@pytest.mark.parametrize("epochs", [-1, 1.5, True])
def test_a_number_of_epochs_must_be_whole(epochs):
    with pytest.raises(ConfigError, match="num_epochs="):
        make().train(epochs)


def test_a_term_of_weight_zero_needs_no_codebook():
    trainer = make(image_codebook=None, loss={"weight_image": 0.0})
    assert trainer.train(1)[0]["train_n_img"] == 0


def test_the_callers_settings_are_neither_changed_nor_shared():
    config = TrainingConfig(warmup_steps=2, log_every=None)
    before = dataclasses.asdict(config)
    trainer = AstroTrainer(model(), VOCAB, loader(), config, **codebooks(), device="cpu")
    trainer.config.meaningful_loss.weight_image = 9.0
    assert dataclasses.asdict(config) == before


def test_a_batch_that_is_no_batch_of_sequences_is_refused():
    trainer = make()
    with pytest.raises(ConfigError, match="tokens, types and attn_mask"):
        trainer.train_step({"tokens": torch.ones(1, 3, dtype=torch.long)})
    with pytest.raises(ConfigError, match="L >= 2"):
        trainer.train_step({name: torch.ones(2, 1, dtype=torch.long) for name in ("tokens", "types", "attn_mask")})


# -- the optimizer and the schedule ------------------------------------------------------------------------------------


def test_matrices_decay_and_embeddings_norms_and_biases_do_not():
    trainer = make(weight_decay=0.3)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decayed, rest = ({names[id(p)] for p in group["params"]} for group in trainer.optimizer.param_groups)
    assert decayed | rest == set(names.values())
    assert all("embedding" in name or "norm" in name or name.endswith("bias") for name in rest)
    assert not any("embedding" in name or "norm" in name or name.endswith("bias") for name in decayed)
    assert "head.weight" in decayed
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.3, 0.0]
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.95)


class Rates(BaseHook):
    def __init__(self):
        self.used = []

    def on_after_step(self, trainer):
        self.used.append(trainer.last_lr[0])


def test_step_n_is_taken_at_the_rate_of_the_schedule_for_n():
    rates = Rates()
    trainer = make(hooks=[rates], lr=1.0, grad_clip=1e-9, grad_accum_steps=3, warmup_steps=2)
    trainer.train(3)
    assert trainer.global_step == 6  # 4 micro-batches an epoch: 3 and 1
    assert rates.used == pytest.approx([cosine_schedule_with_warmup(n, 1.0, 2, 6) for n in range(1, 7)])
    assert trainer.get_lr() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "epochs", "total"),
    [({}, None, 12), ({}, 5, 20), ({"grad_accum_steps": 3}, None, 6), ({"total_steps": 7}, 5, 7)],
)
def test_the_schedule_is_as_long_as_the_run_unless_it_is_set(settings, epochs, total):
    trainer = make(**settings)
    trainer.train(epochs)
    assert trainer.scheduler.total_steps == total


def test_an_unsized_loader_trains_with_a_length_or_a_scheduler_of_its_own():
    assert make(train=Unsized(), total_steps=9).train(1)[0]["epoch"] == 1
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = make(net=net, train=Unsized(), optimizer=optimizer, scheduler=LambdaLR(optimizer, lambda step: 0.5))
    trainer.train(1)
    assert trainer.get_lr() == 0.05


def test_a_warm_up_that_fills_the_run_is_said_once(caplog):
    trainer = make(warmup_steps=100)
    with caplog.at_level(logging.WARNING, "treadle"):
        trainer.train(1)
    assert ["warm-up of 100 updates" in record.getMessage() for record in caplog.records] == [True]


def test_going_on_to_another_number_of_epochs_names_both_lengths(caplog):
    trainer = make()
    trainer.train(2)
    with caplog.at_level(logging.WARNING, "treadle.astro"):
        trainer.train(2)
        assert [record.getMessage()[:13] for record in caplog.records] == ["nothing to do"]
        trainer.train(3)
    assert "had 8 steps in all and has 12" in caplog.text


def test_a_plateau_scheduler_follows_the_validation_loss():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    trainer = make(net=net, optimizer=optimizer, scheduler=plateau)
    trainer.train(3, loader())
    assert plateau.best == trainer.history[0]["val_loss_total"]


def test_a_skipped_step_moves_neither_schedule_nor_average():
    trainer = make(use_amp=True, hooks=[OverflowAt(2), EmaHook(0.5)])
    trainer.train(1)
    assert (trainer.global_step, trainer.applied_steps, trainer.scheduler.last_epoch) == (4, 3, 3)
    assert trainer._engine.state_dict()["ema"]["ema"]["num_updates"] == 3


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use_amp", "dtype", "device", "name"),
    [
        (None, "fp16", "cuda:0", "fp16"), (None, "bf16", "cuda", "bf16"), (None, "fp16", "cpu", None),
        (True, "fp16", "cpu", "fp16"), (True, "bf16", "cpu", "bf16"), (False, "fp16", "cuda", None),
    ],
)  # fmt: skip
def test_autocast_is_on_for_cuda_of_any_spelling_and_wherever_it_is_asked_for(use_amp, dtype, device, name):
    from treadle.astro.settings import precision_of

    assert precision_of(use_amp, dtype, torch.device(device)) == name


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_trains_on_the_cpu(dtype):
    records = make(use_amp=True, amp_dtype=dtype, lr=0.01).train(6)
    assert records[-1]["train_loss_total"] < records[0]["train_loss_total"]


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_ce", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_step_on_one_batch_is_that_of_the_documented_loss(use_ce, hidden):
    net = model(0.0)
    trainer = make(net=net if hidden else LogitsOnly(net), sample_k=EVERYTHING, use_ce=use_ce)
    assert offers_hidden_states(trainer.model) is hidden
    batch = next(iter(loader()))
    expected, stats = plain(trainer, batch, use_ce)
    expected.backward()
    gradient = net.head.weight.grad.clone()
    kept = {}
    trainer._engine.hooks.append(Kept(net, kept))
    numbers = trainer.train_step(batch)
    assert numbers["loss_total"] == pytest.approx(expected.item(), abs=1e-5)
    for term in TERMS:
        assert numbers[f"n_{term}"] == stats[f"n_{term}"]
        assert numbers[f"loss_{term}"] == pytest.approx(float(stats[f"loss_{term}"]), abs=1e-5)
    assert torch.allclose(kept["head"], gradient, atol=1e-6)
    assert numbers["lr"] == pytest.approx(0.01)


class Kept(BaseHook):
    def __init__(self, net, kept):
        self.net, self.kept = net, kept

    def on_before_optimizer_step(self, trainer):
        self.kept["head"] = self.net.head.weight.grad.clone()


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("sizes", [[4, 4, 4, 2], [1, 6, 2, 5], [13, 1]])
def test_ragged_micro_batches_equal_one_big_batch_in_weights_and_numbers(sizes, hidden):
    data, runs = sequences(), []
    for parts in (sizes, [14]):
        net = model(0.0) if hidden else LogitsOnly(model(0.0))
        sgd = torch.optim.SGD(net.parameters(), lr=0.5)
        torch.manual_seed(3)
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.3)
        trainer = make(
            net=net, optimizer=sgd, scheduler=LambdaLR(sgd, lambda step: 1.0), train=batches(data, parts),
            sample_k=EVERYTHING, grad_accum_steps=4, grad_clip=None,
        )  # fmt: skip
        records = trainer.train(2)
        assert trainer.global_step == 2
        runs.append((records, list(net.parameters()), trainer._engine.epoch_means))
    for record, whole in zip(runs[0][0], runs[1][0]):
        assert record == pytest.approx(whole, abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(runs[0][1], runs[1][1]))


def test_reported_step_losses_are_those_of_whole_steps():
    class Reports(ProgressHook):
        def report(self, trainer, means):
            self.loss = means["loss"]

    reports = Reports(1)
    data = sequences()
    trainer = make(net=model(0.0), train=batches(data, [3, 6, 5]), sample_k=EVERYTHING, grad_accum_steps=3,
                   hooks=[reports])  # fmt: skip
    record = trainer.train(1)[0]
    assert reports.loss == pytest.approx(record["train_loss_total"], abs=1e-5)


def test_counts_are_known_before_the_forward_and_are_those_of_the_draw():
    for k in (1, 3, 5, EVERYTHING):
        for loss in ({}, {"weight_image": 0.0}, {"enabled": False}):
            trainer = make(sample_k=k, loss=loss)
            config = LossConfig.read(trainer.config.meaningful_loss)
            for batch in loader(sequences(9, seed=k)):
                drawn = choose_positions(batch["tokens"][:, 1:], VOCAB, config).counts
                assert trainer._task.weights(batch) == drawn


def test_steps_of_six_batches_by_four_are_of_four_and_two():
    seen = []

    class Sizes(BaseHook):
        def on_after_step(self, trainer):
            seen.append(len(trainer.step_info["loss"]))

    trainer = make(train=loader(sequences(6), 1), grad_accum_steps=4, hooks=[Sizes()])
    trainer.train(1)
    assert seen == [4, 2]
    assert (trainer.global_step, trainer.micro_steps) == (2, 6)


def test_without_cross_entropy_a_batch_without_positions_changes_nothing():
    trainer = make(use_ce=False, weight_decay=0.5)
    special = {name: torch.tensor([[1, 3, 2]]) for name in ("tokens", "types")}
    batch = {**special, "attn_mask": torch.ones(1, 3, dtype=torch.bool)}
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    numbers = trainer.train_step(batch)
    assert math.isnan(numbers["loss_total"])
    assert {numbers[f"loss_{term}"] for term in TERMS} == {numbers[f"n_{term}"] for term in TERMS} == {0}
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
    assert (trainer.global_step, trainer.applied_steps) == (1, 0)


def test_a_vocabulary_without_spectra_has_all_keys_and_a_loss_of_the_means_of_its_terms():
    vocab = build_vocab_spec(2, 4, 2, [], scalar_bins=2)
    objects = [encode_sequence(vocab, image=[0] * number, scalars=[0, 1]) for number in (1, 3)]
    ragged = [collate_sequences([one]) for one in objects]
    trainer = AstroTrainer(
        model(vocab_size=vocab.vocab_size), vocab, ragged, {"grad_accum_steps": 2, "log_every": 0},
        image_codebook=[[0.0], [1.0]], scalar_centers=[1.0, 2.0, 3.0, 4.0], device="cpu",
    )  # fmt: skip
    record = trainer.train(1, ragged)[0]
    keys = ["loss_total", *(f"loss_{term}" for term in TERMS), *(f"n_{term}" for term in TERMS)]
    assert list(record)[1:10] == [f"train_{key}" for key in keys]
    assert (math.isnan(record["train_loss_spec"]), record["train_n_spec"], record["train_n_img"]) == (True, 0, 4)
    for name in ("train", "val"):
        parts = record[f"{name}_loss_ce"] + 0.1 * (record[f"{name}_loss_img"] + record[f"{name}_loss_sca"])
        assert record[f"{name}_loss_total"] == pytest.approx(parts, abs=1e-6)
    assert trainer.train_step(ragged[0])["loss_spec"] == 0


def test_without_cross_entropy_a_micro_batch_without_positions_is_no_obstacle():
    special = {name: torch.tensor([[1, 3, 2]]) for name in ("tokens", "types")}
    empty = {**special, "attn_mask": torch.ones(1, 3, dtype=torch.bool)}
    whole = next(iter(loader()))
    runs = []
    for parts in ([whole, empty], [empty, whole], [whole]):
        runs.append(make(use_ce=False, net=model(0.0), train=parts, sample_k=EVERYTHING, grad_accum_steps=2))
        runs[-1].train(1)
    assert runs[0].history[0]["train_loss_total"] == pytest.approx(runs[2].history[0]["train_loss_total"], abs=1e-6)
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters()):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_term_that_never_occurs_is_nan_in_the_record_and_nothing_in_the_total():
    trainer = make(loss={"weight_scalar": 0.0})
    record = trainer.train(1)[0]
    assert math.isnan(record["train_loss_sca"])
    assert record["train_n_sca"] == 0
    expected = record["train_loss_ce"] + 0.1 * record["train_loss_img"] + 0.1 * record["train_loss_spec"]
    assert record["train_loss_total"] == pytest.approx(expected)


# -- positions ---------------------------------------------------------------------------------------------------------


class Drawn(AstroTrainer):
    """Notes which image positions the losses are taken at, by way of their codebook gradient."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drawn = []
        choose = self._task._choose

        def noted(targets, generator):
            positions = choose(targets, generator)
            self.drawn.append([block.rows_GM.tolist() for block in positions.blocks])
            return positions

        self._task._choose = noted


def test_positions_depend_on_the_seed_and_the_micro_step_alone():
    runs = {}
    for name, settings in {
        "one": {}, "again": {"seed": 5}, "other seed": {"training_seed": 1}, "accumulated": {"grad_accum_steps": 3},
    }.items():  # fmt: skip
        training_seed = settings.pop("training_seed", 0)
        trainer = make(cls=Drawn, sample_k=2, train=loader(), **settings)
        trainer.config.seed = training_seed
        torch.manual_seed(77)
        trainer.train(1)
        runs[name] = trainer.drawn
    assert runs["one"] == runs["again"] == runs["accumulated"]
    assert runs["one"] != runs["other seed"]
    assert len(runs["one"]) == 4


def test_evaluations_agree_to_the_bit_and_depend_on_their_seed_and_batch_alone():
    trainer = make(cls=Drawn, sample_k=2)
    first = trainer.evaluate(loader())
    places = trainer.drawn[:]
    trainer.train(1)
    trained = trainer.evaluate(loader())
    assert trainer.drawn[-4:] == places
    assert trainer.evaluate(loader()) == trained
    assert make(sample_k=2).evaluate(loader()) == first
    assert make(sample_k=2, eval_seed=1).evaluate(loader()) != first


def test_an_evaluation_changes_no_training():
    with_, without = make(), make()
    set_seed(0)
    with_.train(2, loader())
    set_seed(0)
    without.train(2)
    assert same_weights(with_, without)


# -- an override -------------------------------------------------------------------------------------------------------


class Doubled(AstroTrainer):
    def compute_loss(self, logits, targets):
        assert logits.shape == (*targets.shape, VOCAB.vocab_size)
        loss, stats = super().compute_loss(logits, targets)
        return 2 * loss, {**stats, "temperature": 0.5}


def test_an_overridden_loss_is_what_is_trained_and_reported():
    ours, doubled = (make(cls=cls, net=model(0.0), train=loader()) for cls in (AstroTrainer, Doubled))
    values, twice = ours.evaluate(loader(batch_size=14)), doubled.evaluate(loader(batch_size=14))
    assert twice["loss_total"] == pytest.approx(2 * values["loss_total"], abs=1e-5)
    assert twice["temperature"] == 0.5
    assert [twice[f"n_{term}"] for term in TERMS] == [values[f"n_{term}"] for term in TERMS]
    record = doubled.train(1)[0]
    assert record["train_loss_total"] > 0
    assert record["train_n_ce"] == ours.train(1)[0]["train_n_ce"]


def test_an_override_that_only_hands_on_trains_the_same_weights_up_to_rounding():
    class Same(AstroTrainer):
        def compute_loss(self, logits, targets):
            return super().compute_loss(logits, targets)

    runs = [make(cls=cls, net=model(0.0)) for cls in (AstroTrainer, Same)]
    for run in runs:
        set_seed(0)
        run.train(2)
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters()):
        assert torch.allclose(a, b, atol=1e-4)


def test_compute_loss_may_be_called_by_hand():
    trainer = make(sample_k=EVERYTHING, net=model(0.0))
    batch = next(iter(loader()))
    expected, stats = plain(trainer, batch)
    logits = trainer.model(batch["tokens"][:, :-1], batch["types"][:, :-1], batch["attn_mask"][:, :-1])
    loss, numbers = trainer.compute_loss(logits, batch["tokens"][:, 1:])
    assert torch.equal(loss, expected)
    assert {name: float(value) for name, value in numbers.items()} == {name: float(v) for name, v in stats.items()}


@pytest.mark.parametrize("target", ["model", "head"])
def test_a_model_whose_forward_is_watched_runs_its_forward(target):
    net, seen = model(), []
    watched = net if target == "model" else net.head
    watched.register_forward_hook(lambda *args: seen.append(1))
    make(net=net).train(1)
    assert len(seen) == 4


# -- compilation, reads, logs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [True, False])
def test_a_compiled_model_trains_the_same_and_leaves_no_trace_in_names(hidden, tmp_path, monkeypatch):
    compiled = []

    def compile_(run):
        compiled.append(run)
        return run

    monkeypatch.setattr(torch, "compile", compile_)
    net = [model() if hidden else LogitsOnly(model()) for _ in range(2)]
    plain_run = make(net=net[0])
    plain_run.train(1)
    run = make(tmp_path, net=net[1], compile_model=True)
    run.train(1, loader())
    assert len(compiled) == 1
    assert same_weights(plain_run, run)
    tree = run.load_checkpoint("ckpt_epoch_001.pt")
    assert not any("_orig_mod" in name for name in tree["model"])


@pytest.mark.parametrize("net", [model, lambda: LogitsOnly(model())])
def test_a_step_reads_no_number_of_a_tensor(net):
    counts = ReadsPerStep()
    make(net=net(), hooks=[counts], grad_clip=0.1, grad_accum_steps=2).train(1)
    assert counts.per_step == [0, 0]


def test_lines_are_logged_every_so_many_steps_and_one_for_each_epoch(caplog):
    with caplog.at_level(logging.INFO, "treadle"):
        make(log_every=2).train(1, loader())
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("Step ") for line in lines) == 2
    assert [line for line in lines if line.startswith("epoch 1: train_loss_total ")]


def test_an_epoch_by_itself_returns_means_and_evaluates_nothing(tmp_path):
    trainer = make(tmp_path)
    values = trainer.train_epoch()
    assert list(values) == ["loss_total", *(f"loss_{term}" for term in TERMS), *(f"n_{term}" for term in TERMS)]
    assert trainer.epoch == 1
    assert trainer.history == []
    with pytest.raises(ConfigError, match="yielded no batch"):
        trainer.evaluate([])


def test_a_finished_run_returns_its_records():
    trainer = make()
    records = trainer.train(2)
    assert trainer.train(2) == records
    assert trainer.global_step == 8


def test_a_vocabulary_without_spectra_trains():
    vocab = build_vocab_spec(7, 8, 6, [], scalar_bins=4)
    net = model(vocab_size=vocab.vocab_size)
    books = {**codebooks(), "spectrum_codebook": None}
    trainer = AstroTrainer(net, vocab, loader(), {"warmup_steps": 1, "log_every": None}, **books, device="cpu")
    assert trainer._task.weights({name: torch.tensor([[1, 5, 12]]) for name in ("tokens", "types", "attn_mask")}) == {
        "ce": 2.0, "img": 1.0, "sca": 1.0,
    }  # fmt: skip


def test_from_a_script_to_the_model_there_are_at_most_eight_frames_of_the_library():
    net, seen = LogitsOnly(model()), []
    net.register_forward_pre_hook(lambda module, args: seen.append(library_frames()))
    make(net=net).train(1)
    assert {tuple(names[-2:]) for names in seen} == {("train", "call")}
    assert max(map(len, seen)) <= 8
