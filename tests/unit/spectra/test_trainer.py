"""The spectra trainer: its files, its selection, its promises."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import treadle
from helpers import library_frames
from spectra_kit import make, spectra
from treadle import CheckpointError, ConfigError, NonFiniteError
from treadle.spectra import Extractor, ExtractorConfig, SpectraTrainer, Tester, TesterConfig, TrainerConfig

RECORDS = {"sessions.jsonl", "settings.json", "steps.jsonl"}  # of every run folder


def files(folder):
    """The files of the face; the records that every run folder has are there too."""
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert not found or set(found) >= RECORDS
    return [name for name in found if name not in RECORDS]


def test_a_run_leaves_the_documented_files_and_result(tmp_path, caplog):
    trainer = make(tmp_path)
    with caplog.at_level("INFO", logger="treadle.spectra"):
        result = trainer.fit(4)
    last = trainer.history[-1]
    numbers = " ".join(f"{key} {last[key]:.4g}" for key in ("train_loss", "val_loss", "lr"))
    assert [line for line in caplog.messages if line.startswith("epoch ")][3:] == [f"epoch 4: {numbers}"]
    assert result == {"best": trainer.best, "epochs": 4}
    assert set(result["best"]) == {"epoch", "val_loss"}
    assert files(tmp_path) == ["best_model.pt", "checkpoints/best.pt", "checkpoints/last.pt", "training_history.json"]
    history = json.loads((tmp_path / "training_history.json").read_text())
    assert [list(record) for record in history] == [["epoch", "train_loss", "val_loss", "lr"]] * 4
    assert history == trainer.history
    assert min(record["val_loss"] for record in history) == result["best"]["val_loss"]
    assert trainer.step == 16


def test_learning_rates_are_those_the_last_step_of_each_epoch_used(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(4)
    factors = [1.0] + [0.1 + 0.45 * (1 + math.cos(math.pi * (s - 4) / 12)) for s in (7, 11, 15)]
    assert [record["lr"] for record in trainer.history] == pytest.approx([3e-3 * factor for factor in factors])


def test_the_exported_weights_give_the_recorded_validation_loss_to_the_bit(tmp_path):
    for settings in ({}, {"use_ema": False}, {"amp": True}):
        out = tmp_path / "-".join(settings) / "run"
        trainer = make(out, **settings)
        best = trainer.fit(3)["best"]
        fresh = make(tmp_path / "other", seed=9, use_ema=False, **{k: v for k, v in settings.items() if k == "amp"})
        fresh.model.load_state_dict(torch.load(out / "best_model.pt", weights_only=True))
        assert fresh.validate() == best["val_loss"]
        fresh.model.load_state_dict(treadle.load_weights(out / "checkpoints" / "best.pt"))
        assert fresh.validate() == best["val_loss"]


def test_two_validations_agree_to_the_bit_and_change_nothing(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(1)
    trainer.model.encoder.eval()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    modes = [module.training for module in trainer.model.modules()]
    rng = torch.get_rng_state()
    assert trainer.validate() == trainer.validate()
    assert torch.equal(rng, torch.get_rng_state())
    assert modes == [module.training for module in trainer.model.modules()]
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in weights.items())


def test_a_failing_validation_puts_weights_and_modes_back(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(1)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.val_loader = [torch.zeros(2, 31)]
    with pytest.raises(ValueError, match="seq_len"):
        trainer.validate()
    assert trainer.model.training
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in weights.items())


def test_a_validation_loader_does_not_change_the_trained_weights(tmp_path):
    with_val = make(tmp_path / "a", early_stop_patience=None)
    with_val.fit(2)
    without = make(tmp_path / "b", val=False)
    without.fit(2)
    for a, b in zip(with_val.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_selection_last_writes_its_own_files_and_stops_never(tmp_path):
    trainer = make(tmp_path, selection="last", early_stop_patience=1, early_stop_start_ratio=0.0)
    trainer.fit(3)
    assert files(tmp_path) == ["checkpoints/last.pt", "ema_last_model.pt", "last_model.pt", "training_history.json"]
    assert trainer.best == {"epoch": -1, "val_loss": math.inf}
    raw = torch.load(tmp_path / "last_model.pt", weights_only=True)
    averaged = torch.load(tmp_path / "ema_last_model.pt", weights_only=True)
    assert all(torch.equal(raw[name], value) for name, value in trainer.model.state_dict().items())
    assert not all(torch.equal(raw[name], averaged[name]) for name in raw)


def test_no_validation_loader_makes_it_the_last_with_a_warning_and_null_in_the_history(tmp_path, caplog):
    trainer = make(tmp_path, val=False)
    assert "selection='best' needs a val_loader" in caplog.text
    trainer.fit(1)
    saved = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert trainer.cfg.selection == saved["config"]["selection"] == "last"
    history = json.loads((tmp_path / "training_history.json").read_text())
    assert history[0]["val_loss"] is None
    assert [list(record.items()) for record in trainer.history] == [list(record.items()) for record in history]
    assert math.isnan(trainer.validate())


def test_a_finished_run_returns_the_stored_result_and_touches_no_file(tmp_path):
    result = make(tmp_path).fit(2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = make(tmp_path, seed=5)
    assert again.fit(2) == result
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_resume_none_starts_a_new_history_and_keeps_the_old_one(tmp_path):
    make(tmp_path).fit(2)
    old = (tmp_path / "training_history.json").read_text()
    make(tmp_path, resume_from=None).fit(1)
    assert (tmp_path / "training_history.1.json").read_text() == old
    assert [record["epoch"] for record in json.loads((tmp_path / "training_history.json").read_text())] == [1]


def test_another_model_is_refused_with_advice(tmp_path):
    make(tmp_path).fit(1)
    trainer = make(tmp_path)
    trainer._engine.model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="another out_dir, or resume_from=None"):
        trainer.fit(2)


def test_a_truncated_last_checkpoint_is_named_and_the_older_one_used(tmp_path, caplog):
    make(tmp_path).fit(2)
    last = tmp_path / "checkpoints" / "last.pt"
    data = last.read_bytes()
    last.unlink()
    last.write_bytes(data[: len(data) // 2])
    trainer = make(tmp_path, seed=5)
    trainer.fit(3)
    assert "last.pt" in caplog.text
    assert "damaged or truncated" in caplog.text
    assert trainer.epoch == 3
    data = (tmp_path / "checkpoints" / "best.pt").read_bytes()
    last.unlink()
    last.write_bytes(data[:1000])
    with pytest.raises(CheckpointError, match=r"last\.pt"):
        make(tmp_path, resume_from=last).fit(4)


def test_a_checkpoint_with_pickled_code_is_refused(tmp_path):
    class Payload:
        def __reduce__(self):
            return (print, ("executed",))

    (tmp_path / "checkpoints").mkdir()
    torch.save({"model": Payload()}, tmp_path / "checkpoints" / "last.pt")
    with pytest.raises(CheckpointError, match="pickled objects"):
        make(tmp_path, resume_from=tmp_path / "checkpoints" / "last.pt").fit(1)
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        make(tmp_path).fit(1)


def test_a_nan_in_one_sample_ends_the_run_with_finite_weights_and_an_intact_checkpoint(tmp_path):
    make(tmp_path).fit(1)
    kept = treadle.load_weights(tmp_path / "checkpoints" / "last.pt")
    data = spectra()
    data[12] = math.nan
    trainer = make(tmp_path)
    trainer.train_loader = DataLoader(list(data[:28]), batch_size=8, shuffle=True)  # rows that are not in one tensor
    with pytest.raises(NonFiniteError, match=r"step \d+ is not finite.*batch \d of epoch 2") as caught:
        trainer.fit(4)
    assert caught.value.step == trainer.step
    assert 1 <= caught.value.batch_index <= 4
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert treadle.verify_checkpoint(tmp_path / "checkpoints" / "last.pt") == []
    assert all(torch.equal(kept[k], v) for k, v in treadle.load_weights(tmp_path / "checkpoints" / "last.pt").items())


class Ragged(nn.Module):
    """Hides where x is large, so that rows hide different numbers of channels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, visible_mask=None):
        return self.linear(x), x, (x < 0.3 if visible_mask is None else visible_mask)


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
def test_accumulating_ragged_batches_equals_one_batch(tmp_path, reduction):
    x = spectra(12)
    weights = []
    for batches, k in (([x], 1), ([x[:7], x[7:8], x[8:]], 3)):
        treadle.set_seed(0)
        model = Ragged()
        cfg = TrainerConfig(
            out_dir=tmp_path, amp=False, device="cpu", reduction=reduction, accumulation_steps=k, resume_from=None,
            grad_clip=None, loss_type="sse", use_ema=False,
        )  # fmt: skip
        trainer = SpectraTrainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), batches, cfg=cfg)
        loss = trainer.train_one_epoch()
        weights.append((model.linear.weight.detach().clone(), loss))
    assert torch.allclose(weights[0][0], weights[1][0], atol=1e-6)
    assert weights[0][1] == pytest.approx(weights[1][1], rel=1e-5)


def test_tester_and_extractor_leave_modes_alone_and_write_their_own_files(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(1)
    trainer.model.decoder.eval()
    modes = [module.training for module in trainer.model.modules()]
    loader = DataLoader(spectra(), batch_size=16)
    before = (tmp_path / "training_history.json").read_text()
    tester = Tester(trainer.model, TesterConfig(out_dir=tmp_path, device="cpu", amp=False))
    assert tester(loader) == tester(loader)
    history = json.loads((tmp_path / "test_history.json").read_text())
    assert [list(record) for record in history] == [["phase", "test_loss", "loss_type", "reduction"]] * 2
    path = tmp_path / "latent.npy"
    cfg = ExtractorConfig(device="cpu", amp=False, save_path=path)
    latent = Extractor(trainer.model, cfg)(loader)
    assert latent.shape == (40, 8)
    assert latent.dtype == torch.float32
    assert torch.allclose(latent.norm(dim=1), torch.ones(40), atol=1e-5)
    assert np.array_equal(np.load(path), latent.numpy())
    assert modes == [module.training for module in trainer.model.modules()]
    assert (tmp_path / "training_history.json").read_text() == before


def test_a_fixed_visible_mask_is_used_by_the_tester(tmp_path):
    visible = torch.zeros(32, dtype=torch.bool)
    visible[:8] = True
    model = make(tmp_path).model
    cfg = TesterConfig(device="cpu", amp=False, fixed_visible=visible, log_history=False)
    x = spectra(6)
    model.eval()
    with torch.no_grad():
        recon, _, _ = model(x, visible.expand(6, -1))
    expected = (recon - x)[:, 8:].square().mean().item()
    assert Tester(model, cfg)([x]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fixed", [[True, False], torch.ones(32), torch.ones(1, 2, 32, dtype=torch.bool)])
def test_a_fixed_mask_of_another_kind_is_refused_when_it_is_given(fixed):
    with pytest.raises(ConfigError, match=r"^fixed_visible"):
        TesterConfig(fixed_visible=fixed)


def test_a_wrapped_model_is_tested_and_gives_its_latents(tmp_path):
    model = make(tmp_path).model
    latents = [
        Extractor(one, ExtractorConfig(device="cpu", amp=False))([spectra(4)])
        for one in (model, nn.DataParallel(model))
    ]
    assert torch.equal(*latents)


def test_a_damaged_test_history_is_named_and_kept(tmp_path):
    (tmp_path / "test_history.json").write_text("[{")
    tester = Tester(make(tmp_path).model, TesterConfig(out_dir=tmp_path, device="cpu", amp=False))
    with pytest.raises(ConfigError, match=r"test_history\.json"):
        tester([spectra(4)])
    assert (tmp_path / "test_history.json").read_text() == "[{"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"reduction": "median"}, "'mean' or 'batch_mean' or 'sum'"),
        ({"amp_dtype": "fp8"}, "'bf16' or 'fp16'"),
        ({"grad_clip": -1.0}, "grad_clip"),
        ({"early_stop_patience": 0}, "early_stop_patience"),
        ({"selection": "first"}, "'best' or 'last'"),
    ],
)
def test_wrong_settings_are_refused_when_they_are_made(values, words):
    with pytest.raises(ConfigError, match=words):
        TrainerConfig(**values)


def test_unknown_settings_name_the_nearest_one():
    with pytest.raises(ConfigError, match="grad_clip"):
        TrainerConfig.from_dict({"grad_clp": 1.0})
    assert TrainerConfig.from_dict(TrainerConfig(out_dir="x").to_dict()) == TrainerConfig(out_dir="x")


def test_the_callers_config_is_neither_changed_nor_shared(tmp_path):
    cfg = TrainerConfig(out_dir=tmp_path, amp=False)
    model = Ragged()
    trainer = SpectraTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), [spectra(4)], cfg=cfg, device="cpu")
    assert trainer.cfg is not cfg
    assert cfg.device is None
    with pytest.raises(ConfigError, match="differ"):
        SpectraTrainer(
            model, trainer.optimizer, [], cfg=TrainerConfig(device="meta"), device="cpu",
        )  # fmt: skip


def test_a_batch_that_is_no_spectrum_names_its_type(tmp_path):
    model = Ragged()
    trainer = SpectraTrainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), [{"x": spectra(4)}],
        cfg=TrainerConfig(out_dir=tmp_path, amp=False), device="cpu",
    )  # fmt: skip
    with pytest.raises(TypeError, match="dict"):
        trainer.fit(1)


def test_training_on_real_spectra_beats_the_mean_of_the_row(tmp_path):
    trainer = make(tmp_path, epochs=60, early_stop_patience=None)
    loss = trainer.fit(60)["best"]["val_loss"]
    assert loss < 0.9 * 31 / 32  # predicting the row's mean costs (L-1)/L after SNV


def test_a_checkpoint_of_another_loss_is_named(tmp_path, caplog):
    make(tmp_path).fit(1)
    with caplog.at_level("WARNING", logger="treadle"):
        make(tmp_path, early_stop_patience=3).fit(1)
        assert caplog.messages == []
        make(tmp_path, loss_type="sse", reduction="sum").fit(1)
    (line,) = caplog.messages
    assert "loss_type='mse' (here 'sse'), reduction='mean' (here 'sum')" in line


def test_a_validation_loader_without_batches_is_refused(tmp_path):
    trainer = make(tmp_path)
    trainer.val_loader = []
    with pytest.raises(ConfigError, match="val_loader: it yielded no batch"):
        trainer.fit(2)
    with pytest.raises(ConfigError, match="val_loader: it yielded no batch"):
        trainer.validate()
    with pytest.raises(ConfigError, match="loader: it yielded no batch"):
        Tester(trainer.model, TesterConfig(tmp_path, device="cpu"))([])
    assert not (tmp_path / "test_history.json").exists()
    with pytest.raises(ConfigError, match="loader: it yielded no batch"):
        Extractor(trainer.model, ExtractorConfig(device="cpu"))([])


def test_a_scheduler_of_another_optimizer_is_refused(tmp_path):
    trainer = make(tmp_path, scheduler=False)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ConfigError, match="another optimizer"):
        SpectraTrainer(
            trainer.model, trainer.optimizer, [spectra(4)], cfg=TrainerConfig(tmp_path, device="cpu"),
            scheduler=torch.optim.lr_scheduler.StepLR(other, 1),
        )  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"amp": "no"}, {"use_ema": "false"}, {"enable_tf32": 1}, {"grad_clip": "1.0"}, {"grad_clip": True},
        {"early_stop_patience": 2.5}, {"accumulation_steps": True}, {"eval_seed": "a"},
        {"ema_decay": "0.9"}, {"resume_from": True}, {"max_non_finite_grad_retries": 1.5},
    ],
)  # fmt: skip
def test_settings_of_another_type_are_refused_when_they_are_made(values):
    (field,) = values
    with pytest.raises(ConfigError, match=f"^{field}="):
        TrainerConfig(**values)
    if field in ("amp", "eval_seed"):
        with pytest.raises(ConfigError, match=f"^{field}="):
            TesterConfig(**values)


def test_tf32_flags_hold_while_fit_runs_and_are_put_back(tmp_path):
    seen = []

    class Look(treadle.BaseHook):
        def on_after_step(self, trainer):
            seen.append(torch.backends.cuda.matmul.allow_tf32)

    make(tmp_path, enable_tf32=True, hooks=[Look()]).fit(1)
    assert all(seen)
    assert seen
    assert not torch.backends.cuda.matmul.allow_tf32


def test_nan_validation_counts_as_no_improvement(tmp_path):
    trainer = make(tmp_path, early_stop_patience=2, early_stop_start_ratio=0.0)
    trainer.val_loader = [torch.full((2, 32), math.nan)]
    trainer.fit(9)
    assert trainer.epoch == 2
    assert "best_model.pt" not in files(tmp_path)
    assert json.loads((tmp_path / "training_history.json").read_text())[0]["val_loss"] is None


@pytest.mark.parametrize("epochs", ["3", 2.5, True, -1])
def test_what_is_no_number_of_epochs_is_refused(tmp_path, epochs):
    with pytest.raises(treadle.ConfigError, match=f"epochs={epochs!r}: must be a whole number >= 0"):
        make(tmp_path).fit(epochs)
    assert files(tmp_path) == []


def test_from_a_script_to_the_model_there_are_at_most_eight_frames_of_the_library(tmp_path):
    trainer, seen = make(tmp_path, val=False), []
    trainer.model.register_forward_pre_hook(lambda module, args: seen.append(library_frames()))
    trainer.fit(1)
    assert {tuple(names[-2:]) for names in seen} == {("fit", "call")}
    assert max(map(len, seen)) <= 8
