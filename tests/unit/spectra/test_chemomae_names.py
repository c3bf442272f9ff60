"""The names of chemomae 0.2: override points, files, extractor, tester, augmenter and the small functions."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle.spectra as line_0_1
import treadle.spectra.chemomae as names
from original_kit import spectra
from treadle import CheckpointError, ConfigError
from treadle.checkpoint import load_checkpoint
from treadle.spectra.chemomae import (
    ChemoMAE,
    ChemoMAEConfig,
    Extractor,
    ExtractorConfig,
    PreparedBatch,
    SpectraAugmenter,
    SpectraAugmenterConfig,
    Tester,
    TesterConfig,
    Trainer,
    TrainerConfig,
    build_optimizer,
    build_scheduler,
    make_patch_mask,
    masked_mse,
)


def tiny(**other):
    sizes = {"seq_len": 16, "d_model": 8, "nhead": 2, "num_layers": 1, "latent_dim": 4, "n_patches": 4, "n_mask": 1}
    return ChemoMAE(**{**sizes, **other})


def loader(count=12, batch_size=4):
    return DataLoader(TensorDataset(spectra(count)), batch_size=batch_size)


def trainer_of(out_dir, kind=Trainer, *, batches=None, augmenter=None, scheduler=False, seed=0, **settings):
    torch.manual_seed(seed)
    model = tiny()
    optimizer = build_optimizer(model, lr=1e-3)
    schedule = build_scheduler(optimizer, steps_per_epoch=3, epochs=2) if scheduler else None
    cfg = TrainerConfig(out_dir=out_dir, ema_decay=0.9, **settings)
    return kind(
        model, optimizer, loader() if batches is None else batches, scheduler=schedule, augmenter=augmenter, cfg=cfg
    )


# -- the model ----------------------------------------------------------------------------------------------------


def test_patches_are_hidden_whole():
    mask = make_patch_mask(50, 12, 4, 2)
    assert mask.dtype == torch.bool
    patches = mask.view(50, 4, 3)
    assert torch.equal(patches.all(2), patches.any(2))
    assert (patches.all(2).sum(1) == 2).all()
    assert len({tuple(row) for row in patches.all(2).tolist()}) == 6  # rows are drawn apart
    assert not make_patch_mask(2, 12, 4, 0).any()
    assert make_patch_mask(2, 12, 4, 4).all()
    state = torch.get_rng_state()
    make_patch_mask(2, 12, 4, 0)
    assert torch.equal(torch.get_rng_state(), state)
    for wrong in ((12, 5, 1), (12, 4, 5), (12, 4, -1)):
        with pytest.raises(ValueError, match="n_patches"):
            make_patch_mask(2, *wrong)


def test_hidden_values_reach_nothing():
    model, x = tiny(n_mask=2).eval(), spectra(3)
    x_recon, z, visible = model(x)
    changed = torch.where(visible, x, 99.0)
    again, z_again, _ = model(changed, visible)
    assert torch.equal(x_recon, again)
    assert torch.equal(z, z_again)
    assert x_recon.shape == x.shape
    assert z.shape == (3, 4)
    assert torch.allclose(z.norm(dim=1), torch.ones(3))


def test_rows_may_show_different_numbers_of_patches():
    model, x = tiny().eval(), spectra(3)
    visible = torch.ones(3, 16, dtype=torch.bool)
    visible[0, :8] = False
    visible[1] = False  # in chemomae a batch without any visible patch is shown the first one; here it stays hidden
    together = model(x, visible)[0]
    for row in range(3):
        assert torch.allclose(model(x[row : row + 1], visible[row : row + 1])[0][0], together[row], atol=1e-6)
    x[1] += 5.0
    assert torch.equal(model(x, visible)[0][1], together[1])


def test_a_mask_across_patches_is_refused():
    visible = torch.ones(2, 16, dtype=torch.bool)
    visible[0, 0] = False
    with pytest.raises(ValueError, match="parts of patches"):
        tiny()(spectra(2), visible)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_len": 15}, {"n_patches": 0}, {"nhead": 3}, {"dim_feedforward": 0}, {"n_mask": 5}, {"dropout": 1.5},
        {"latent_normalize": 1}, {"decoder_num_layers": 0}, {"n_mask": 1.0}, {"dropout": math.nan},
    ],
)  # fmt: skip
def test_sizes_are_checked_before_memory_is_taken(wrong):
    with pytest.raises(ConfigError):
        tiny(**wrong)


def test_a_configuration_goes_through_a_dict():
    config = ChemoMAEConfig(seq_len=32, n_patches=8)
    assert ChemoMAEConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="lacks n_mask"):
        ChemoMAEConfig.from_dict({k: v for k, v in config.to_dict().items() if k != "n_mask"})
    with pytest.raises(ConfigError, match="n_patchs"):
        ChemoMAEConfig.from_dict({**config.to_dict(), "n_patchs": 1})


def test_representations_and_decoders():
    model, x = tiny(latent_normalize=False).eval(), spectra(3)
    raw, latent = model.encode(x, representation="raw_latent"), model.encode(x)
    assert torch.equal(raw, latent)
    scaled = model.encode(x, representation="normalized_latent")
    assert torch.allclose(scaled, raw / raw.norm(dim=1, keepdim=True))
    assert model.encode(x, representation="cls").shape == (3, 8)
    with pytest.raises(ConfigError, match="representation"):
        model.encode(x, representation="token")
    with pytest.raises(TypeError):
        model.encode(torch.ones(2, 16, dtype=torch.int64))
    assert isinstance(names.ChemoDecoder(seq_len=8, latent_dim=3, num_layers=1).net, nn.Linear)
    assert [type(layer) for layer in names.ChemoDecoder(seq_len=8, latent_dim=3, num_layers=3).net] == [
        nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear,
    ]  # fmt: skip


def test_a_model_goes_through_a_file(tmp_path):
    model = tiny(latent_normalize=False)
    model.n_mask = 3
    model.save(tmp_path / "deep" / "model.pt")
    loaded = ChemoMAE.load(tmp_path / "deep" / "model.pt")
    assert loaded.get_config() == model.get_config()
    assert loaded.n_mask == 3
    assert not loaded.training
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="load_foreign"):
        ChemoMAE.load(tmp_path / "weights.pt")
    bad = {name: value * math.nan for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="not finite"):
        model.save(tmp_path / "bad.pt", state_dict=bad)
    assert not (tmp_path / "bad.pt").exists()

    class Other(ChemoMAE):
        pass

    with pytest.raises(ConfigError, match="Other"):
        Other(seq_len=16, n_patches=4, d_model=8, nhead=2).save(tmp_path / "other.pt")


# -- the trainer --------------------------------------------------------------------------------------------------


def test_a_run_writes_the_files_and_records_of_chemomae(tmp_path):
    trainer = trainer_of(tmp_path, scheduler=True, augmenter=SpectraAugmenter(SpectraAugmenterConfig()))
    result = trainer.fit(2)
    assert result == {
        "epochs": 2, "completed": True, "final_model": "ema_last_model.pt",
        "final_artifact": str(tmp_path / "ema_last_model.artifact.pt"), "attempted_steps": 6, "optimizer_updates": 6,
        "amp_skips": 0,
    }  # fmt: skip
    history = json.loads((tmp_path / "training_history.json").read_text())
    assert history == trainer.history
    assert list(history[1]) == [
        "epoch", "train_loss", "lr", "loss_region", "n_mask", "attempted_steps", "optimizer_updates", "amp_skips",
        "cumulative_attempted_steps", "cumulative_optimizer_updates", "cumulative_amp_skips",
    ]  # fmt: skip
    assert (history[1]["attempted_steps"], history[1]["cumulative_attempted_steps"]) == (3, 6)
    raw = load_checkpoint(tmp_path / "last_model.pt")
    assert all(torch.equal(raw[name], value) for name, value in trainer.model.state_dict().items())
    averaged = ChemoMAE.load(result["final_artifact"]).state_dict()
    assert all(torch.equal(averaged[name], value) for name, value in trainer.ema.export(trainer.model).items())
    assert trainer_of(tmp_path, scheduler=True, seed=1).fit(2)["attempted_steps"] == 6  # finished: nothing is trained


def test_outputs_go_where_they_are_sent_or_nowhere(tmp_path):
    sent = {"history_file": "log/h.json", "checkpoint_dir": tmp_path / "ck", "raw_weights_file": "w/raw.pt"}
    trainer = trainer_of(tmp_path / "run", **sent, ema_weights_file=None, model_artifacts=False)
    assert trainer.fit(1)["final_model"] == "w/raw.pt"
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*") if path.suffix in (".pt", ".json")}
    assert {"run/log/h.json", "ck/last.pt", "run/w/raw.pt"} <= files
    assert not {name for name in files if "ema" in name or "artifact" in name or "checkpoints" in name}
    assert trainer_of(tmp_path / "run", **sent, seed=1).fit(2)["attempted_steps"] == 6  # resumed from there
    none = dict.fromkeys(("history_file", "checkpoint_dir", "raw_weights_file", "ema_weights_file", "resume_from"))
    silent = trainer_of(tmp_path / "none", **none)
    assert silent.fit(1)["final_model"] is None
    assert len(silent.history) == 1
    assert list((tmp_path / "none").rglob("*.pt")) == []
    silent.save_checkpoint(1, path=tmp_path / "explicit.pt")
    assert load_checkpoint(tmp_path / "explicit.pt")["epoch"] == 1
    for call in (lambda: silent.save_checkpoint(1), silent.save_weights_only):
        with pytest.raises(ConfigError):
            call()


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_region": "some"}, {"checkpoint_dir": None}, {"progress": 1}, {"history_file": ""}, {"reduction": "max"},
        {"amp_dtype": "fp8"}, {"ema_decay": 2.0}, {"grad_clip": -1.0}, {"loss_type": "mae"},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong):
    with pytest.raises(ConfigError):
        TrainerConfig(**wrong)


def test_one_file_for_two_outputs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the same path"):
        trainer_of(tmp_path, raw_weights_file="w.pt", ema_weights_file="w.pt")


class Loud(Trainer):
    """Replaces every override point and writes down each call."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls, self.loaded = [], None

    def train_batches(self, epoch):
        self.calls.append(("train_batches", epoch))
        return super().train_batches(epoch)

    def prepare_batch(self, batch):
        return super().prepare_batch(batch)

    def compute_loss(self, reconstructed, target, visible_mask):
        return 2.0 * super().compute_loss(reconstructed, target, visible_mask)

    def before_epoch(self, epoch):
        self.calls.append(("before_epoch", epoch))

    def after_epoch(self, epoch, record):
        self.calls.append(("after_epoch", epoch))
        record["seen"] = epoch * 10

    def before_step(self, epoch, batch_index, batch):
        self.calls.append(("before_step", epoch, batch_index, len(batch.target)))
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + batch_index)

    def after_step(self, epoch, batch_index, batch, *, loss, optimizer_updated):
        self.calls.append(("after_step", epoch, batch_index, optimizer_updated, self.optimizer_updates))
        assert math.isfinite(loss)

    def checkpoint_extra_state(self):
        return {"calls": len(self.calls), "numbers": torch.arange(2)}

    def load_checkpoint_extra_state(self, state):
        self.loaded = state


def test_every_override_point_is_called_in_order(tmp_path):
    trainer = trainer_of(tmp_path, Loud)
    trainer.fit(2)
    one = [
        ("before_epoch", 1), ("train_batches", 1),
        ("before_step", 1, 0, 4), ("after_step", 1, 0, True, 1),
        ("before_step", 1, 1, 4), ("after_step", 1, 1, True, 2),
        ("before_step", 1, 2, 4), ("after_step", 1, 2, True, 3),
        ("after_epoch", 1),
    ]  # fmt: skip
    assert trainer.calls[: len(one)] == one
    assert trainer.calls[len(one) :][:2] == [("before_epoch", 2), ("train_batches", 2)]
    assert [record["seen"] for record in trainer.history] == [10, 20]
    assert [record["lr"] for record in trainer.history] == pytest.approx([1e-3 / 3] * 2)
    plain = trainer_of(tmp_path / "plain")
    plain.fit(1)
    assert trainer.history[0]["train_loss"] > 1.5 * plain.history[0]["train_loss"]
    again = trainer_of(tmp_path, Loud, seed=1)
    again.fit(2)
    assert again.loaded["numbers"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="load_checkpoint_extra_state"):
        trainer_of(tmp_path, seed=1).fit(2)


def test_override_points_that_change_nothing_train_the_same_numbers(tmp_path):
    class Same(Trainer):
        def forward_batch(self, batch):
            return super().forward_batch(batch)

    plain, same = trainer_of(tmp_path / "plain"), trainer_of(tmp_path / "same", Same)
    for trainer in (plain, same):
        torch.manual_seed(1)
        trainer.fit(2)
    assert [r["train_loss"] for r in same.history] == pytest.approx([r["train_loss"] for r in plain.history], abs=1e-7)


def test_prepared_batches_keep_their_input_target_and_mask(tmp_path):
    x, visible = spectra(8), torch.ones(8, 16, dtype=torch.bool)
    visible[:, 4:8] = False
    batches = [PreparedBatch(x[i : i + 4] * 0.5, x[i : i + 4], visible[i : i + 4]) for i in (0, 4)]
    trainer = trainer_of(tmp_path, batches=batches, augmenter=lambda x: pytest.fail("it is prepared already"))
    first = trainer.model(batches[0].model_input, batches[0].visible_mask)[0]
    expected = masked_mse(first, batches[0].target, ~batches[0].visible_mask).item()
    trainer.fit(1)
    assert trainer.history[0]["train_loss"] == pytest.approx(expected, rel=0.2)
    for wrong in (
        lambda: PreparedBatch(x, x[:, :8]), lambda: PreparedBatch(x, x, visible[:4]), lambda: PreparedBatch(x[0], x[0])
    ):  # fmt: skip
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(TypeError):
        PreparedBatch(x.long(), x)


def test_the_loss_may_be_over_all_channels(tmp_path):
    assert line_0_1.TesterConfig(loss_region="all").loss_region == "all"
    model, x = tiny(n_mask=0).eval(), spectra(12)
    everywhere = masked_mse(model(x)[0], x, torch.ones_like(x, dtype=torch.bool)).item()
    cfg = TesterConfig(out_dir=tmp_path, loss_region="all")
    assert Tester(model, cfg)(loader(batch_size=5)) == pytest.approx(everywhere, rel=1e-5)
    with pytest.raises(ConfigError, match="loss_region"):
        Tester(model, replace(cfg, loss_region="masked"))(loader())
    trainer = trainer_of(tmp_path / "run", loss_region="all")
    trainer.fit(1)
    assert trainer.history[0]["loss_region"] == "all"


# -- extractor and tester -----------------------------------------------------------------------------------------


class Spy(SpectraAugmenter):
    """Adds a constant in training mode, and notes the mode."""

    def __init__(self):
        super().__init__(SpectraAugmenterConfig(shift_prob=0.0, noise_prob=0.0))
        self.modes = []

    def forward(self, x):
        self.modes.append(self.training)
        return x + 0.01 if self.training else x


def test_the_extractor_gives_batches_or_all(tmp_path):
    model = tiny()
    model.encoder.eval()
    modes = [module.training for module in model.modules()]
    batches = []
    for features in Extractor(model).iter_transform(loader(10)):
        assert [module.training for module in model.modules()] == modes  # between batches as it was
        assert torch.is_grad_enabled()
        batches.append(features)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    whole = Extractor(model, ExtractorConfig(save_path=tmp_path / "z.pt"))(loader(10))
    assert torch.equal(torch.cat(batches), whole)
    assert torch.equal(torch.load(tmp_path / "z.pt", weights_only=True), whole)
    arrays = Extractor(model, ExtractorConfig(save_path=tmp_path / "z.npy", output_type="numpy")).extract(loader(10))
    assert np.array_equal(np.load(tmp_path / "z.npy"), arrays)
    assert Extractor(model, ExtractorConfig(representation="cls")).transform([]).shape == (0, 8)
    assert Extractor(model, ExtractorConfig(output_dtype=torch.float64))(loader(4)).dtype == torch.float64
    for wrong in (
        {"output_type": "list"}, {"output_type": "numpy", "output_dtype": torch.bfloat16},
        {"output_dtype": torch.int64}, {"representation": "token"},
        {"output_type": "numpy", "output_device": "cuda"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            ExtractorConfig(**wrong)
    with pytest.raises(ValueError, match="finite"):
        Extractor(model)([torch.full((2, 16), math.nan)])


def test_extractor_and_tester_augment_where_they_are_asked(tmp_path):
    model, spy = tiny(), Spy().eval()
    plain = Extractor(model).transform(loader(6))
    assert not torch.equal(Extractor(model, augmenter=spy).transform(loader(6)), plain)
    cfg = TesterConfig(out_dir=tmp_path, history_filename="aug.json")
    value = Tester(model, cfg, augmenter=spy)(loader(6))
    assert spy.modes == [True] * 4
    assert not spy.training
    (record,) = json.loads((tmp_path / "aug.json").read_text())
    assert record == {
        "phase": "test", "test_loss": value, "loss_type": "mse", "reduction": "mean", "loss_region": "masked",
        "samples": 6, "selected_elements": 24, "augmented": True,
    }  # fmt: skip


def test_the_tester_takes_a_fixed_mask(tmp_path):
    visible = torch.zeros(16, dtype=torch.bool)
    visible[:8] = True
    model, x = tiny().eval(), spectra(6)
    expected = masked_mse(model(x, visible.expand(6, -1))[0], x, ~visible.expand(6, -1)).item()
    for mask in (visible, visible[None]):
        cfg = TesterConfig(out_dir=tmp_path, fixed_visible=mask, log_history=False)
        assert Tester(model, cfg)(loader(6)) == pytest.approx(expected, rel=1e-5)
    assert not (tmp_path / "test_history.json").exists()


# -- the augmenter ------------------------------------------------------------------------------------------------


def on_sphere(count=8):
    x = spectra(count)
    x = x - x.mean(dim=1, keepdim=True)
    return x / x.norm(dim=1, keepdim=True)


def angles(x, y):
    return torch.rad2deg(torch.arccos(nn.functional.cosine_similarity(x.double(), y.double()).clamp(-1, 1)))


def test_augmented_rows_stay_on_their_sphere():
    x = on_sphere()
    noise = {"shift_prob": 0.0, "noise_prob": 1.0, "noise_angle_deg_range": (2.0, 2.0)}
    shift = {"shift_prob": 1.0, "noise_prob": 0.0, "shift_delta_range": (1.5, 1.5)}
    for settings in (noise, shift, {"shift_prob": 1.0, "noise_prob": 1.0}):
        changed = SpectraAugmenter(SpectraAugmenterConfig(**settings))(x)
        assert not torch.allclose(changed, x)
        assert torch.allclose(changed.norm(dim=1), x.norm(dim=1), atol=1e-6)
        assert changed.mean(dim=1).abs().max() < 1e-6
    turned = SpectraAugmenter(SpectraAugmenterConfig(**noise))(x)
    assert torch.allclose(angles(x, turned), torch.full((8,), 2.0, dtype=torch.float64), atol=1e-3)
    assert torch.equal(SpectraAugmenter(SpectraAugmenterConfig(shift_prob=0.0, noise_prob=0.0))(x), x)
    assert SpectraAugmenter(SpectraAugmenterConfig()).eval()(x) is x


def test_a_generator_gives_the_same_rows_again():
    x, augment = on_sphere(), SpectraAugmenter(SpectraAugmenterConfig())
    first, second = (augment(x, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    state = torch.get_rng_state()
    SpectraAugmenter(generator=torch.Generator().manual_seed(3))(x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shift_prob": -0.1}, {"noise_prob": 1.1}, {"shift_delta_range": (4.0, -4.0)}, {"eps": 0.0},
        {"noise_angle_deg_range": (-0.5, 3.0)}, {"noise_angle_deg_range": (0.5, 181.0)},
        {"noise_angle_deg_range": (3.0, 0.5)}, {"shift_delta_range": (0.0, math.inf)}, {"shift_delta_range": (1.0,)},
    ],
)  # fmt: skip
def test_augmentation_settings_are_checked(wrong):
    with pytest.raises(ConfigError):
        SpectraAugmenterConfig(**wrong)


def test_augmented_input_is_checked():
    augment = SpectraAugmenter(SpectraAugmenterConfig())
    for wrong, error in (
        (torch.randn(2, 4, 1), ValueError), (torch.ones(2, 4, dtype=torch.int64), TypeError),
        (torch.randn(2, 1), ValueError), (torch.randn(0, 4), ValueError),
    ):  # fmt: skip
        with pytest.raises(error):
            augment(wrong)


# -- functions ----------------------------------------------------------------------------------------------------


def test_seeds_and_flags(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        names.set_global_seed(123)
        first = torch.rand(2), np.random.rand()
        assert os.environ["PYTHONHASHSEED"] == "123"
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        names.enable_deterministic(False)
        names.set_global_seed(123, fix_cudnn=False)
        assert torch.equal(torch.rand(2), first[0])
        assert np.random.rand() == first[1]
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags


def test_a_random_state_is_restored_whole_or_not_at_all():
    state = names.capture_rng_state()
    first = torch.rand(1), np.random.rand()
    names.restore_rng_state(state)
    assert (torch.rand(1), np.random.rand()) == first
    before = torch.get_rng_state()
    for wrong in ({}, {**state, "format_version": 2}, {**state, "numpy": {}}, {**state, "torch_cpu": torch.zeros(3)}):
        with pytest.raises(ValueError):
            names.restore_rng_state(wrong)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_average_is_kept_by_hand():
    model = nn.Linear(2, 1)
    ema = names.EMACallback(model, decay=0.5)
    start = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    ema.update(model)
    ema.apply_to(model)
    assert torch.allclose(model.weight, start / 2)
    other = names.EMACallback(nn.Linear(2, 1))
    other.load_state_dict(ema.state_dict())
    assert other.decay == 0.5
    assert torch.equal(other.shadow["weight"], ema.shadow["weight"])


def test_zero_rows_are_at_distance_one_of_the_silhouette():
    sklearn = pytest.importorskip("sklearn.metrics")
    x, labels = spectra(12).numpy(), np.arange(12) % 3
    x[:2] = 0.0
    own = names.silhouette_samples_cosine_gpu(x, labels, device="cpu", dtype=torch.float64)
    assert np.allclose(own, sklearn.silhouette_samples(x, labels, metric="cosine"), atol=1e-6)
    assert own.dtype == np.float32
    score = names.silhouette_score_cosine_gpu(x, labels, device="cpu", chunk=5)
    assert score == pytest.approx(own.mean(), abs=1e-6)
    assert torch.is_tensor(names.silhouette_score_cosine_gpu(x, labels, device="cpu", return_numpy=False))


def test_subsets_of_no_rows_and_of_one():
    assert names.cosine_fps_downsample(np.empty((0, 3)), ratio=0.3).shape == (0, 3)
    assert names.cosine_fps_downsample(torch.empty(0, 3), return_numpy=False).shape == (0, 3)
    x = spectra(20)
    assert names.cosine_fps_downsample(x, ratio=0.0).shape == (1, 16)
    rows, indices = names.cosine_fps_downsample(x, ratio=0.25, init_index=3, return_indices=True)
    assert indices[0] == 3
    assert np.array_equal(rows, x.numpy()[indices])
    with pytest.raises(ConfigError, match="exclude"):
        names.cosine_fps_downsample(x, seed=1, generator=torch.Generator())


def test_elbows_are_found_and_drawn(tmp_path):
    pytest.importorskip("scipy")
    plt = pytest.importorskip("matplotlib.pyplot")
    ks, values = [1, 2, 3, 4, 5, 6], [0.9, 0.7, 0.75, 0.6, 0.59, 0.58]
    best, index, curvature = line_0_1.find_elbow_curvature(ks, values)
    assert curvature.shape == (6,)
    assert names.find_elbow_curvature(ks, values) == (best, index, curvature[index])
    names.plot_elbow_ckm(ks, values, best, index)
    plt.gcf().savefig(tmp_path / "k.png")
    names.plot_elbow_vmf(ks, values, best, index, criterion="nll")
    assert plt.gca().get_ylabel() == "Mean NLL (lower is better)"
    plt.close("all")
    for wrong in (([1, 2], [1.0, 0.5]), ([1, 2, 2], [1.0, 0.5, 0.4]), ([1, 2, 3], [1.0, math.nan, 0.4])):
        with pytest.raises(ConfigError):
            names.find_elbow_curvature(*wrong)


def test_free_parameters_of_a_mixture():
    assert names.VMFMixture(2, device="cpu", max_iter=2).fit(spectra(20)).num_params() == 2 * 16 + 1


def test_names_of_line_0_1():
    encoder = line_0_1.ChemoEncoder(seq_len=16, d_model=8, nhead=2, num_layers=1, latent_dim=4)
    assert encoder(spectra(2), torch.ones(2, 16, dtype=torch.bool)).shape == (2, 4)
    assert line_0_1.ChemoDecoderLP(seq_len=16, latent_dim=4)(torch.zeros(2, 4)).shape == (2, 16)
    assert line_0_1.sinusoidal_positional_encoding(8, 4, torch.device("cpu"))[0, 0].tolist() == [0, 1, 0, 1]
    assert np.allclose(line_0_1.snv(np.array([[1.0, 2.0, 3.0]])), [[-1, 0, 1]])


def test_label_agreement_by_hand():
    labels = np.array([[0, 0], [0, 1]])
    result = names.local_label_agreement(labels, np.ones((2, 2), dtype=bool), windows=[3])
    (window,) = result.windows
    # Each pixel has the three others as neighbours: 6 of the 12 ordered pairs match, as by chance.
    assert (window.matching_pairs, window.valid_pairs, window.score) == (6, 12, 0.0)
    assert result.chance_agreement == 0.5
    alone = names.local_label_agreement(labels, labels == 1, windows=[3, 5], class_chunk=1)
    assert math.isnan(alone.windows[0].score)
    assert alone.windows[0].undefined_reasons == (
        "fewer_than_two_valid_pixels", "no_valid_neighbor_pairs", "single_class",
    )  # fmt: skip
    for wrong in ({"windows": [2]}, {"windows": []}, {"windows": [3, 3]}, {"class_chunk": 0}):
        with pytest.raises(ValueError):
            names.local_label_agreement(labels, labels == 1, **wrong)
    with pytest.raises(ValueError, match="no valid pixel"):
        names.local_label_agreement(labels, labels == 9)
