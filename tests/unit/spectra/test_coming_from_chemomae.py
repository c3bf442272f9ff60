"""What is other here than in chemomae: each line of the two pages has its test, those here and the ones they name."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import treadle.spectra as spectra_pack
import treadle.spectra.chemomae as names
from original_kit import DATA, SIZES, UNITS, make, spectra
from spectra_kit import make as make_run
from treadle import NonFiniteError
from treadle.checkpoint import load_checkpoint
from treadle.spectra import ChemoMAE, CosineKMeans, SpectraTrainer, TrainerConfig, VMFMixture, make_block_mask
from treadle.spectra.originals import decays_0, own_name

OF_0_1 = list(load_checkpoint(DATA / "0.1" / "checkpoints" / "last.pt")["model"])


def small(out_dir, *, batches=None, **settings):
    torch.manual_seed(0)
    model = names.ChemoMAE(**SIZES, **UNITS["0.2"])
    batches = DataLoader(TensorDataset(spectra(8)), batch_size=4) if batches is None else batches
    cfg = names.TrainerConfig(out_dir=out_dir, **settings)
    return names.Trainer(model, names.build_optimizer(model), batches, cfg=cfg)


# -- both lines ---------------------------------------------------------------------------------------------------


def test_the_lr_of_a_record_is_that_of_the_last_update(tmp_path):
    """There it is the rate of the next one."""
    shutil.copytree(DATA / "0.2", tmp_path / "run")
    trainer = make("0.2", vars(names), tmp_path / "run", seed=1)
    trainer.fit(3)
    used = 3e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (5 - 2) / 6)))  # index 5 of 8, 2 warm up
    assert trainer.history[-1]["lr"] == pytest.approx(used)
    assert trainer.optimizer.param_groups[0]["lr"] < used


def test_an_epochs_sum_is_the_sum_over_all_its_rows(tmp_path):
    """There the sum of each batch is averaged over batches, weighted by their rows."""
    trainer = make_run(tmp_path, reduction="sum", epochs=1, grad_clip=None)
    trainer.optimizer.param_groups[0]["lr"] = trainer.optimizer.param_groups[1]["lr"] = 0.0
    trainer.scheduler.base_lrs = [0.0, 0.0]
    trainer.fit(1)
    mean = make_run(tmp_path / "mean", reduction="mean", epochs=1, grad_clip=None)
    mean.scheduler.base_lrs = [0.0, 0.0]
    for group in mean.optimizer.param_groups:
        group["lr"] = 0.0
    mean.fit(1)
    hidden = 28 * 16  # rows x channels
    assert trainer.history[0]["train_loss"] == pytest.approx(mean.history[0]["train_loss"] * hidden, rel=1e-4)


def test_masks_are_drawn_on_the_cpu_whatever_the_device(tmp_path):
    drawn = [draw(torch.device("meta")) for draw in (
        lambda device: make_block_mask(2, 8, 4, 2, device=device),
        lambda device: names.make_patch_mask(2, 8, 4, 2, device=device),
    )]  # fmt: skip
    assert [mask.device.type for mask in drawn] == ["meta", "meta"]
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="CPU"):
            make_block_mask(2, 8, 4, 2, generator=torch.Generator("cuda"))


def test_mixed_precision_acts_on_the_cpu_too(tmp_path):
    """There `amp=True` does nothing without CUDA in 0.1, and is refused in 0.2."""
    torch.manual_seed(0)
    seen = []
    model = ChemoMAE(**SIZES, **UNITS["0.1"])
    model.decoder.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    batches = [spectra(4)]
    SpectraTrainer(
        model, spectra_pack.build_optimizer(model), batches, cfg=TrainerConfig(out_dir=tmp_path, device="cpu")
    ).fit(1)
    assert seen == [torch.bfloat16]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    trainer = small(tmp_path, batches=[torch.full((4, 16), math.inf)])
    with pytest.raises(NonFiniteError):
        trainer.fit(1)


def test_files_of_chemomae_clusterings_load(tmp_path):
    """Those written here are of another format."""
    torch.save({"centroids": torch.eye(3), "inertia_": 0.25}, tmp_path / "centroids.pt")
    rows = torch.eye(3)[[2, 0]]
    loaded = CosineKMeans(3, device="cpu").load_centroids(tmp_path / "centroids.pt")
    assert (loaded.predict(rows).tolist(), loaded.inertia_) == ([2, 0], 0.25)
    mixture = {
        "K": 3, "d": 3, "device": "cuda:0", "mus": torch.eye(3), "kappas": torch.full((3,), 5.0),
        "logpi": torch.full((3,), 1 / 3).log(), "_logC": torch.zeros(3), "n_iter_": 1, "lower_bound_": 0.0,
        "_fitted": True, "random_state": 42, "rng_state": torch.get_rng_state(), "tol": 1e-4, "max_iter": 200,
        "init": "kmeans++",
    }  # fmt: skip
    torch.save(mixture, tmp_path / "mixture.pt")
    assert VMFMixture.load(tmp_path / "mixture.pt", map_location="cpu").predict(rows).tolist() == [2, 0]
    torch.save({"centroids": torch.eye(3), "n_clusters": 3}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="must hold"):
        CosineKMeans(3, device="cpu").load_centroids(tmp_path / "other.pt")


def test_what_is_written_here_has_the_format_of_this_library(tmp_path):
    small(tmp_path).fit(1)
    assert load_checkpoint(tmp_path / "checkpoints" / "last.pt")["format"]["name"] == "treadle"


# -- line 0.1 -----------------------------------------------------------------------------------------------------


def test_a_history_without_a_checkpoint_is_set_aside(tmp_path):
    (tmp_path / "training_history.json").write_text('[{"epoch": 1, "train_loss": 5.0}]')
    trainer = make_run(tmp_path, epochs=1)
    trainer.fit(1)
    assert len(json.loads((tmp_path / "training_history.json").read_text())) == 1
    assert json.loads((tmp_path / "training_history.1.json").read_text())[0]["train_loss"] == 5.0


def test_no_bias_decays_in_our_own_optimizer():
    model = names.ChemoMAE(**SIZES, **UNITS["0.2"])
    bias = model.encoder.encoder.layers[0].self_attn.in_proj_bias
    own, theirs = (
        build(model).param_groups[0]["params"] for build in (spectra_pack.build_optimizer, names.build_optimizer)
    )
    assert [any(parameter is bias for parameter in group) for group in (own, theirs)] == [False, True]


def test_the_optimizer_of_chemomae_decays_the_same_of_both_models():
    model = ChemoMAE(**SIZES, **UNITS["0.1"])
    names_of = {id(parameter): name for name, parameter in model.named_parameters()}
    group = names.build_optimizer(model).param_groups[0]["params"]
    expected = {own_name(name) for name, decays in zip(OF_0_1, decays_0(OF_0_1), strict=True) if decays}
    assert {names_of[id(parameter)] for parameter in group} == expected & set(names_of.values())
    assert any(name.endswith("in_proj.bias") for name in expected)


def test_early_stopping_is_called_with_a_value():
    stop = spectra_pack.EarlyStopping(patience=2, start_epoch=3)
    assert [stop(value) for value in (1.0, 1.0, 1.0, 1.0)] == [False, False, False, True]
    theirs = names.EarlyStopping(patience=2, start_epoch_ratio=0.5)
    theirs.setup(10)
    stops = [theirs.step(epoch, 1.0 if epoch < 7 else 0.5) for epoch in range(1, 7)]
    assert stops == [False] * 5 + [True]  # epochs 5 and 6 count
    assert (theirs.started, theirs.best, theirs.best_epoch) == (True, 1.0, 1)


def test_a_tester_gives_the_same_number_twice(tmp_path):
    """There each call draws other masks."""
    for module, line in ((spectra_pack, "0.1"), (names, "0.2")):
        tester = module.Tester(
            module.ChemoMAE(**SIZES, **UNITS[line]), module.TesterConfig(out_dir=tmp_path, device="cpu", amp=False)
        )
        batches = [spectra(6)]
        state = torch.get_rng_state()
        assert tester(batches) == tester(batches)
        assert torch.equal(torch.get_rng_state(), state)
    assert len(json.loads((tmp_path / "test_history.json").read_text())) == 4


# -- line 0.2 -----------------------------------------------------------------------------------------------------


def test_resume_none_starts_afresh_and_sets_the_old_history_aside(tmp_path):
    """There it is refused where files are."""
    small(tmp_path).fit(1)
    again = small(tmp_path, resume_from=None)
    assert again.fit(1)["attempted_steps"] == 2
    assert (tmp_path / "training_history.1.json").exists()


def test_fit_may_be_called_again_and_weights_are_written_after_each_epoch(tmp_path):
    trainer = small(tmp_path)
    trainer.fit(1)
    first = load_checkpoint(tmp_path / "last_model.pt")
    assert trainer.fit(2)["epochs"] == 2
    second = load_checkpoint(tmp_path / "last_model.pt")
    assert not torch.equal(first["decoder.net.0.weight"], second["decoder.net.0.weight"])
    assert "time_sec" not in trainer.history[0]


def test_other_settings_than_the_checkpoints_are_a_warning(tmp_path, caplog):
    """There they are refused."""
    small(tmp_path).fit(1)
    small(tmp_path, loss_region="all", grad_clip=None).fit(2)
    assert "was trained with another loss: loss_region='masked' (here 'all')" in caplog.text


@pytest.mark.parametrize("other", ["augmenter", "n_mask", "enable_tf32"])
def test_another_input_or_precision_than_the_checkpoints_is_a_warning(tmp_path, caplog, other):
    for changed in (False, True):
        model = names.ChemoMAE(**{**SIZES, "n_mask": 1 if changed and other == "n_mask" else 2}, **UNITS["0.2"])
        augmenter = names.SpectraAugmenter(names.SpectraAugmenterConfig()) if changed and other == "augmenter" else None
        trainer = names.Trainer(
            model, names.build_optimizer(model), [spectra(4)], augmenter=augmenter,
            cfg=names.TrainerConfig(out_dir=tmp_path, enable_tf32=changed and other == "enable_tf32"),
        )  # fmt: skip
        assert "settings that differ" not in caplog.text
        trainer.fit(2 if changed else 1)
    assert f"resumed with settings that differ from the checkpoint's: {other}=" in caplog.text
