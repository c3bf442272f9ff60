"""Weights and run folders of chemomae, of both lines, continue here with the original's numbers."""

from __future__ import annotations

import inspect
import json
import logging
import shutil

import pytest
import torch
from torch import nn

import treadle.spectra as line_0_1
import treadle.spectra.chemomae as line_0_2
from original_kit import (
    DATA,
    LINES,
    SIZES,
    UNITS,
    folder_of,
    latents,
    make,
    names_of,
    original,
    same_visible,
    spectra,
)
from treadle import CheckpointError, load_foreign
from treadle.checkpoint import load_checkpoint
from treadle.exchange.adapters import adapted
from treadle.spectra import ChemoMAE, PatchMAE
from treadle.spectra.originals import is_original, own_name

OWN = {"0.1": vars(line_0_1), "0.2": vars(line_0_2)}
EXPECTED = json.loads((DATA / "expected.json").read_text())
CLOSE = 1e-6


@pytest.fixture(autouse=True)
def masks_of_both(monkeypatch):
    """Line 0.1 draws other masks than this library, so both get the same ones; 0.2 draws the same."""
    monkeypatch.setattr(ChemoMAE, "make_visible", same_visible)


@pytest.fixture
def folder(request, tmp_path):
    shutil.copytree(DATA / request.param, tmp_path / "run")
    return request.param, tmp_path / "run"


def check_is_the_rest(line, trainer):
    expected = EXPECTED[line]
    assert [r["train_loss"] for r in trainer.history] == pytest.approx(expected["train_loss"], abs=CLOSE)
    if line == "0.1":
        assert [r["val_loss"] for r in trainer.history] == pytest.approx(expected["val_loss"], abs=CLOSE)
        assert trainer.best == pytest.approx(expected["best"], abs=CLOSE)
    assert latents(trainer.model)[:2].tolist() == [pytest.approx(row, abs=1e-4) for row in expected["latents"]]


@pytest.mark.parametrize("folder", LINES, indirect=True)
def test_a_folder_of_the_original_goes_on(folder, caplog):
    line, out_dir = folder
    trainer = make(line, OWN[line], out_dir, seed=5)
    trainer.fit(4)
    check_is_the_rest(line, trainer)
    assert (trainer.epoch, trainer.step, trainer.applied_steps) == (4, 8, 8)
    said = "\n".join(record.message for record in caplog.records if record.levelno >= logging.WARNING)
    assert "is a checkpoint of chemomae" in said
    assert "continues with the checkpoint's" not in said  # no setting is overruled
    assert "resumed with settings that differ" not in said  # what the file does not store is not compared
    # What the original wrote stays beside the file that replaced it.
    assert is_original(load_checkpoint(out_dir / "checkpoints" / "last.chemomae.pt"))
    assert load_checkpoint(out_dir / "checkpoints" / "last.pt")["global_step"] == 8
    # The same command once more: a finished run.
    again = make(line, OWN[line], out_dir, seed=6)
    again.fit(4)
    assert again.history == trainer.history


@pytest.mark.parametrize("folder", LINES, indirect=True)
def test_going_on_is_exact_from_there(folder, tmp_path):
    line, out_dir = folder
    shutil.copytree(out_dir, tmp_path / "other")
    straight = make(line, OWN[line], out_dir, seed=5)
    torch.manual_seed(3)
    straight.fit(4)
    for seed, epochs in ((7, 3), (8, 4)):
        parted = make(line, OWN[line], tmp_path / "other", seed=seed)
        torch.manual_seed(3)  # 0.1 stores no random state
        parted.fit(epochs)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, parted.model.state_dict()[name]), name


@pytest.mark.parametrize("folder", LINES, indirect=True)
def test_a_folder_of_a_compiled_model_goes_on(folder):
    line, out_dir = folder
    file = out_dir / "checkpoints" / "last.pt"
    tree = torch.load(file, weights_only=True)
    for weights in (tree, tree["ema"]):
        key = "model" if weights is tree else "shadow"
        weights[key] = {f"_orig_mod.{name}": value for name, value in weights[key].items()}
    torch.save(tree, file)
    trainer = make(line, OWN[line], out_dir, seed=5)
    trainer.fit(4)
    check_is_the_rest(line, trainer)


def test_settings_that_differ_from_those_of_a_file_of_0_2_are_named(tmp_path, caplog):
    shutil.copytree(DATA / "0.2", tmp_path / "run")
    make("0.2", OWN["0.2"], tmp_path / "run", sizes={"n_mask": 1}, grad_clip=0.5).fit(3)
    assert "grad_clip=1.0 (here 0.5), n_mask=2 (here 1)" in caplog.text


@pytest.mark.parametrize("line", LINES)
def test_weights_of_the_original_load(line):
    torch.manual_seed(9)
    model = OWN[line]["ChemoMAE"](**SIZES, **UNITS[line])
    found = load_foreign(model, DATA / line / "checkpoints" / "last.pt")
    assert found.epoch == 2
    saved = load_checkpoint(DATA / line / "checkpoints" / "last.pt")["model"]
    for name, value in saved.items():
        own = model.state_dict().get(own_name(name), model.state_dict().get(name))
        assert torch.equal(own.flatten(), value.flatten()), name


@pytest.mark.parametrize("line", LINES)
def test_the_optimizers_state_is_matched_by_name(line):
    model = OWN[line]["ChemoMAE"](**SIZES, **UNITS[line])
    path = DATA / line / "checkpoints" / "last.pt"
    optimizer = OWN[line]["build_optimizer"](model)
    load_foreign(model, path, optimizer=optimizer)
    saved = load_checkpoint(path)
    live = dict(model.named_parameters())
    of_first_group = [name for name in saved["model"] if "cls_token" in name or "pos_embed" in name or ".norm" in name]
    # The second group of the file begins with the CLS token and the positions.
    first = len(saved["optimizer"]["param_groups"][0]["params"])
    for number, name in enumerate(of_first_group[:2]):
        state = optimizer.state[live[own_name(name)]]
        theirs = saved["optimizer"]["state"][first + number]["exp_avg"]
        assert torch.equal(state["exp_avg"].flatten(), theirs.flatten()), name
    assert optimizer.param_groups[0]["lr"] == saved["optimizer"]["param_groups"][0]["lr"]


def test_fixed_positions_are_the_models_own(tmp_path):
    sizes = {**SIZES, **UNITS["0.1"], "use_learnable_pos": False}
    saved = dict(load_checkpoint(DATA / "0.1" / "checkpoints" / "last.pt")["model"])
    del saved["encoder.pos_embed"]  # a buffer there that is not stored
    torch.save(saved, tmp_path / "weights.pt")
    model = ChemoMAE(**sizes)
    positions = model.encoder.pos_embed.clone()
    load_foreign(model, tmp_path / "weights.pt")
    assert torch.equal(model.encoder.pos_embed, positions)


def test_wrapped_weights_load(tmp_path):
    saved = load_checkpoint(DATA / "0.1" / "checkpoints" / "last.pt")["model"]
    torch.save({f"module.{name}": value for name, value in saved.items()}, tmp_path / "wrapped.pt")
    load_foreign(nn.DataParallel(ChemoMAE(**SIZES, **UNITS["0.1"])), tmp_path / "wrapped.pt")


def test_another_line_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_foreign(PatchMAE(**SIZES, **UNITS["0.2"]), DATA / "0.1" / "checkpoints" / "last.pt")
    shutil.copytree(DATA / "0.2", tmp_path / "run")
    with pytest.raises(CheckpointError, match="For another model use another out_dir"):
        make("0.1", OWN["0.1"], tmp_path / "run").fit(4)


def test_an_optimizer_with_other_groups_is_refused(tmp_path):
    tree = load_checkpoint(DATA / "0.1" / "checkpoints" / "last.pt")
    first = tree["optimizer"]["param_groups"][0]
    tree["optimizer"]["param_groups"].insert(0, {**first, "params": first["params"][:1]})
    first["params"] = first["params"][1:]
    torch.save(tree, tmp_path / "last.pt")
    model = ChemoMAE(**SIZES, **UNITS["0.1"])
    with pytest.raises(CheckpointError, match="build_optimizer"):
        load_foreign(model, tmp_path / "last.pt", optimizer=line_0_1.build_optimizer(model))


def test_own_weights_and_other_models_are_left_alone(tmp_path):
    model = ChemoMAE(**SIZES, **UNITS["0.1"])
    torch.save(model.state_dict(), tmp_path / "own.pt")
    load_foreign(ChemoMAE(**SIZES, **UNITS["0.1"]), tmp_path / "own.pt")
    found = object()
    assert adapted(nn.Linear(1, 1), found) is found


# -- beside the installed original ---------------------------------------------------------------------------------


def needs(line):
    where = folder_of(line)
    return pytest.param(
        line, marks=pytest.mark.skipif(where is None, reason=f"chemomae {line} is not installed; see original_kit")
    )


INSTALLED = [needs(line) for line in LINES]


@pytest.mark.parametrize("line", INSTALLED)
def test_the_stored_numbers_are_the_originals(line, tmp_path):
    with original(line) as chemomae:
        names = names_of(chemomae)
        if line == "0.1":
            names["ChemoMAE"].make_visible = same_visible
        trainer = make(line, names, tmp_path, seed=0)
        trainer.fit(4)
        assert trainer.history[-1]["train_loss"] == pytest.approx(EXPECTED[line]["train_loss"][-1], abs=CLOSE)


@pytest.mark.parametrize("line", INSTALLED)
@pytest.mark.parametrize("augmented", [False, True])
def test_four_epochs_from_one_seed_are_the_originals(line, augmented, tmp_path):
    """Weights, masks of 0.2, dropout, augmentation, order of the data, schedule, average and losses."""
    if line == "0.1" and augmented:
        pytest.skip("line 0.1 has no augmenter")
    sizes = {"dropout": 0.2 if line == "0.2" else 0.0}
    with original(line) as chemomae:
        names = names_of(chemomae)
        if line == "0.1":
            names["ChemoMAE"].make_visible = same_visible
        augmenter = names["SpectraAugmenter"](names["SpectraAugmenterConfig"]()) if augmented else None
        theirs = make(line, names, tmp_path / "theirs", sizes=sizes, augmenter=augmenter)
        start = {name: value.clone() for name, value in theirs.model.state_dict().items()}
        torch.manual_seed(1)
        result = theirs.fit(4)
    augmenter = line_0_2.SpectraAugmenter() if augmented else None
    ours = make(line, OWN[line], tmp_path / "ours", sizes=sizes, augmenter=augmenter)
    if line == "0.1":  # the two models draw their weights in another order
        torch.save(start, tmp_path / "start.pt")
        load_foreign(ours.model, tmp_path / "start.pt")
    torch.manual_seed(1)
    own = ours.fit(4)
    losses = [[record["train_loss"] for record in trainer.history] for trainer in (theirs, ours)]
    assert losses[1] == pytest.approx(losses[0], abs=CLOSE)
    assert ours.scheduler.get_last_lr() == theirs.scheduler.get_last_lr()
    average = adapted(ours.model, found_of(theirs.ema.shadow)).model
    for name, value in ours.ema.export(ours.model).items():
        gap = (value - average[name]).abs()
        if "in_proj" in name and gap.dim() == 1:  # the bias of keys has no gradient but rounding, which Adam scales up
            gap = torch.cat([gap.chunk(3)[0], gap.chunk(3)[2]])
        assert gap.max() < 1e-5, name
    if line == "0.1":
        assert own["best"] == pytest.approx(result["best"], abs=CLOSE)
    else:
        keys = ("epochs", "completed", "final_model", "attempted_steps", "optimizer_updates", "amp_skips")
        assert {key: own[key] for key in keys} == {key: result[key] for key in keys}


def found_of(weights):
    from pathlib import Path

    from treadle.exchange import ForeignCheckpoint

    return ForeignCheckpoint(Path("weights.pt"), "torch", dict(weights))


@pytest.mark.parametrize("line", INSTALLED)
def test_every_public_name_of_the_original_is_here(line):
    with original(line) as chemomae:
        names = set()
        for part in ("models", "training", "utils", "preprocessing", "clustering"):
            names |= set(getattr(chemomae, part).__all__)
    assert names - set(dir(line_0_1 if line == "0.1" else line_0_2)) == set()


@pytest.mark.parametrize("line", [needs("0.2")])
def test_arguments_and_defaults_are_the_originals(line):
    """Those that differ are named here and on the page."""
    other = {
        "silhouette_samples_cosine_gpu": {"device"},  # "cuda" there
        "CosineKMeans": {"device"}, "VMFMixture": {"device", "kappa_init", "kappa_min", "dtype"},
        "elbow_ckmeans": {"device", "k_max", "chunk", "verbose"}, "elbow_vmf": {"device", "k_max", "chunk", "verbose"},
        "SpectraAugmenter": {"config"},  # may be left out
        "enable_deterministic": set(),
    }  # fmt: skip
    differences, moved = {}, set()
    with original(line) as chemomae:
        for part in ("models", "training", "utils", "preprocessing", "clustering"):
            module = getattr(chemomae, part)
            for name in module.__all__:
                theirs, ours = getattr(module, name), getattr(line_0_2, name)
                if not callable(theirs) or name == "RNGState":
                    continue
                own = inspect.signature(ours).parameters
                order = [key for key, p in inspect.signature(theirs).parameters.items() if p.kind < p.VAR_POSITIONAL]
                if [key for key in own if key in order] != order:
                    moved.add(name)
                for key, parameter in inspect.signature(theirs).parameters.items():
                    same = key in own and (
                        own[key].default == parameter.default or repr(own[key].default) == repr(parameter.default)
                    )
                    if not same and key not in ("kwargs", "self"):
                        differences.setdefault(name, set()).add(key)
    assert {name: keys for name, keys in differences.items() if keys - other.get(name, set())} == {}
    assert moved - set(other) == {"TesterConfig"}


@pytest.mark.parametrize("line", INSTALLED)
def test_the_model_is_the_same_function(line):
    x = spectra()
    with original(line) as chemomae:
        theirs = chemomae.models.ChemoMAE(**SIZES, **UNITS[line]).eval()
        ours = OWN[line]["ChemoMAE"](**SIZES, **UNITS[line]).eval()
        load = adapted(ours, found_of(theirs.state_dict())).model
        ours.load_state_dict(load)
        visible = same_visible(None, len(x))
        with torch.no_grad():
            for own, other in zip(ours(x, visible), theirs(x, visible), strict=True):
                assert torch.allclose(own, other, atol=CLOSE)
            if line == "0.2":
                for kind in ("latent", "raw_latent", "normalized_latent", "cls"):
                    own, other = (model.encode(x, representation=kind) for model in (ours, theirs))
                    assert torch.allclose(own, other, atol=CLOSE), kind
        parameters = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
        assert parameters[0] == parameters[1]


@pytest.mark.parametrize("line", [needs("0.2")])
def test_artifacts_and_random_states_go_both_ways(line, tmp_path):
    torch.manual_seed(0)
    with original(line) as chemomae:
        theirs = chemomae.models.ChemoMAE(**SIZES, **UNITS[line])
        theirs.save(tmp_path / "theirs.pt")
        ours = PatchMAE.load(tmp_path / "theirs.pt")
        assert ours.get_config() == theirs.get_config()
        ours.save(tmp_path / "ours.pt")
        back = chemomae.models.ChemoMAE.load(tmp_path / "ours.pt")
        for name, value in theirs.state_dict().items():
            assert torch.equal(back.state_dict()[name], value)
        state = chemomae.utils.capture_rng_state()
        first = torch.rand(2)
        line_0_2.restore_rng_state(state)
        assert torch.equal(torch.rand(2), first)
        chemomae.utils.restore_rng_state(line_0_2.capture_rng_state())


@pytest.mark.parametrize("line", INSTALLED)
def test_files_of_clusterings_load(line, tmp_path):
    x = torch.cat([spectra(30), -spectra(30)])
    with original(line) as chemomae:
        theirs = chemomae.clustering.CosineKMeans(3, device="cpu")
        mixture = chemomae.clustering.VMFMixture(3, device="cpu")
        theirs.fit(x)
        mixture.fit(x)
        theirs.save_centroids(tmp_path / "centroids.pt")
        mixture.save(tmp_path / "mixture.pt")
        expected = theirs.predict(x), mixture.predict(x)
    own = line_0_1.CosineKMeans(3, device="cpu").load_centroids(tmp_path / "centroids.pt")
    assert torch.equal(own.predict(x), expected[0])
    loaded = line_0_1.VMFMixture.load(tmp_path / "mixture.pt", map_location="cpu")
    assert torch.equal(loaded.predict(x), expected[1])


@pytest.mark.parametrize("line", [needs("0.2")])
def test_functions_give_the_originals_numbers(line):
    import numpy as np

    x = spectra(30)
    rows, labels = x.numpy(), np.arange(30) % 3
    with original(line) as chemomae:
        clustering, preprocessing, training = chemomae.clustering, chemomae.preprocessing, chemomae.training
        map_HW = np.arange(48).reshape(6, 8) // 5 % 3
        theirs = clustering.local_label_agreement(map_HW, map_HW < 2)
        assert repr(line_0_2.local_label_agreement(map_HW, map_HW < 2)) == repr(theirs)
        for ours, other in (
            (line_0_2.snv, preprocessing.snv),
            (lambda X: line_0_2.silhouette_samples_cosine_gpu(X, labels, device="cpu"),
             lambda X: clustering.silhouette_samples_cosine_gpu(X, labels, device="cpu")),
            (lambda X: line_0_2.cosine_fps_downsample(X, ratio=0.3, seed=4),
             lambda X: preprocessing.cosine_fps_downsample(X, ratio=0.3, seed=4)),
        ):  # fmt: skip
            assert np.allclose(ours(rows), other(rows), atol=1e-5)
        curve = [9.0, 5.0, 2.0, 1.5, 1.3, 1.2, 1.15]
        own, other = (f.find_elbow_curvature(list(range(1, 8)), curve) for f in (line_0_2, clustering))
        assert own == pytest.approx(other)
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        for own, other in zip(
            line_0_2.build_optimizer(model).param_groups, training.build_optimizer(model).param_groups, strict=True
        ):
            assert [id(p) for p in own["params"]] == [id(p) for p in other["params"]]
            assert own["weight_decay"] == other["weight_decay"]
