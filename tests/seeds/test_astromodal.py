"""Every Python block of the astromodal document runs after its import lines are rewritten.

The configuration is small, and ``...`` is filled with codebooks fitted to shipped pictures, spectra and magnitudes.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from treadle.astro import (
    CausalTransformerLM,
    build_loader,
    build_vocab_spec,
    combined_loss,
    cosine_schedule_with_warmup,
    encode_sequence,
    kmeans_codebook,
    load_config,
    quantile_bins,
    save_codebook,
    set_seed,
)
from treadle.checkpoint import load_checkpoint
from treadle.datasets import load_sdss, load_spex, load_xdf

_spec = importlib.util.spec_from_file_location("seed_blocks", Path(__file__).parent / "blocks.py")
seed_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seed_blocks)

ROOTS = {"src.astromodal": "treadle.astro"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODES, PATCH, SEGMENT = 8, 8, 32
SMALL = """
vocab: {image: 8, scalar: 16, scalar_bins: 16, spectrum: 8}
sequences: {max_seq_len: 48}
model: {d_model: 32, n_layers: 1, n_heads: 2, d_ff: 64}
training: {batch_size: 8, num_workers: 0, warmup_steps: 2, save_every_steps: 5, log_every: 5, learning_rate: 1e-2}
"""


@pytest.fixture
def blocks():
    return [seed_blocks.rewrite_imports(block, ROOTS) for block in seed_blocks.python_blocks("astromodal")]


@functools.cache
def fitted():
    """Codebooks of patches, of one magnitude and of pieces of spectra, and the codes of 24 objects."""
    cutouts = torch.from_numpy(np.asarray(load_xdf().images[:24], dtype=np.float32)).reshape(24, -1, 32, 32)[:, :1]
    patches = F.unfold(cutouts, PATCH, stride=PATCH).transpose(1, 2).numpy()
    spectra = load_spex().spectra[:24, : 5 * SEGMENT].reshape(24, 5, SEGMENT)
    catalog = load_sdss()
    column = catalog.table[:, catalog.columns.index("r")].astype(np.float64)
    image = kmeans_codebook(patches.reshape(-1, patches.shape[-1]), CODES)
    spectrum = kmeans_codebook(spectra.reshape(-1, SEGMENT), CODES)
    edges, centers = quantile_bins(column, 16)

    def codes(vectors, codebook):
        return torch.cdist(torch.from_numpy(np.ascontiguousarray(vectors)), torch.from_numpy(codebook)).argmin(-1)

    bins = np.searchsorted(edges[1:-1], column[:24], side="right")
    return image, spectrum, centers, codes(patches, image), codes(spectra, spectrum), bins


def sequences(vocab):
    *_, image, spectra, bins = fitted()
    return [
        encode_sequence(
            vocab, image=image[row], scalars=[int(bins[row])],
            spectra={name: spectra[row, number : number + 1] for number, name in enumerate(vocab.spectrum_groups)},
        )
        for row in range(24)
    ]  # fmt: skip


def run(block, names, *replaced):
    """Run a block; what is replaced must be in it."""
    for old, new in (*replaced, ('"cuda"', repr(DEVICE)) if '"cuda"' in block else ("", "")):
        assert old in block
        block = block.replace(old, new) if old else block
    exec(compile(block, "astromodal.md", "exec"), names)
    return names


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """The names that the usage block leaves to its reader, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    config = load_config("small.yaml")
    vocab = build_vocab_spec(config.vocab.image, config.vocab.scalar, config.vocab.spectrum)
    set_seed(0)
    sizes = {"d_model": 32, "n_layers": 1, "n_heads": 2, "d_ff": 64, "dropout": 0.1, "max_len": 48}
    model = CausalTransformerLM(vocab.vocab_size, config.model.n_types, **sizes)
    loader = build_loader(sequences(vocab), config.training)
    image, spectrum, centers, *_ = fitted()
    return {"model_": model, "loader_": loader, "image_": image, "spectrum_": spectrum, "centers_": centers}


USAGE = (
    ("load_config()", "load_config('small.yaml')"), ("img_codebook = ...", "img_codebook = image_"),
    ("spec_codebook = ...", "spec_codebook = spectrum_"), ("sca_centers = ...", "sca_centers = centers_"),
    ("model = ...", "model = model_"), ("train_loader = ...", "train_loader = loader_"),
)  # fmt: skip
SETTINGS = "model=model, vocab=vocab, train_loader=train_loader, config=config.training, device=DEVICE, "
BOOKS = "image_codebook=img_codebook, spectrum_codebook=spec_codebook, scalar_centers=sca_centers, "


@pytest.fixture
def trained(blocks, prepared):
    return run(blocks[4], {**prepared, "DEVICE": DEVICE}, *USAGE)


def test_the_document_has_sixteen_blocks(blocks):
    assert len(blocks) == 16


def test_the_formulas_of_the_losses_are_what_the_losses_compute(blocks):
    vocab = build_vocab_spec(2, 4, 2, ["a"], scalar_bins=4)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, vocab.vocab_size, generator=draw)
    targets = torch.tensor([[vocab.base_image + 1, vocab.base_scalar + 2, vocab.first_spectrum_id]])
    image, spectrum, centers = torch.randn(2, 3), torch.randn(2, 5), torch.randn(4)
    names = {
        "softmax": functools.partial(torch.softmax, dim=-1), "MSE": F.mse_loss, "sum": torch.sum,
        "logits_image": logits[0, 0, 5:7], "image_codebook": image, "true_centroid": image[1],
        "logits_scalar": logits[0, 1, 7:11], "bin_centers": centers, "true_bin_center": centers[2],
        "logits_spectrum": logits[0, 2, 11:13], "spectrum_codebook": spectrum,
    }  # fmt: skip
    run(blocks[0], names)
    run(blocks[1], names)
    names["true_centroid"] = spectrum[0]
    run(blocks[2], names)
    names["loss_ce"] = F.cross_entropy(logits[0], targets[0])
    names |= {"α_img": 0.1, "α_sca": 0.1, "α_spec": 0.1}
    loss, stats = combined_loss(logits, targets, vocab, image, spectrum, centers, {})
    for term in ("image", "scalar", "spectrum"):
        short = {"image": "img", "scalar": "sca", "spectrum": "spec"}[term]
        assert stats[f"loss_{short}"].item() == pytest.approx(names[f"loss_{term}"].item(), abs=1e-6)
        names[f"loss_{short}"] = names[f"loss_{term}"]
    run(blocks[3], names)
    assert loss.item() == pytest.approx(names["total_loss"].item(), abs=1e-6)


def test_the_usage_trains_on_real_data_and_a_new_trainer_goes_on(blocks, trained, capsys):
    trainer = trained["trainer"]
    assert (trainer.epoch, trainer.global_step) == (10, 30)
    assert trainer.history[-1]["train_loss_total"] < trainer.history[0]["train_loss_total"]
    names = [path.name for path in Path("runs/experiment_001").glob("ckpt_*")]
    assert {"ckpt_step_00000010.pt", "ckpt_epoch_010.pt"} <= set(names)
    resumed = run(
        blocks[12],
        dict(trained),
        ("Trainer(...)", f"Trainer({SETTINGS}{BOOKS} use_amp=True)"),
        ("00010000", "00000010"),
    )["trainer"]
    assert resumed.epoch == trained["config"].training.epochs == 5
    assert resumed.global_step == 15
    run(blocks[13], {**trained, "val_loader": trained["train_loader"]})
    assert capsys.readouterr().out.startswith("Validation loss: ")


def test_the_codebooks_of_the_document_are_read_without_unpickling(blocks, prepared, tmp_path):
    Path("path/to").mkdir(parents=True)
    save_codebook("path/to/codebook_kmeans_2048.npz", prepared["image_"])
    save_codebook("path/to/spectrum_tokenizer_config.npz", prepared["spectrum_"])
    np.savez("path/to/scalar_tokenizer_config.npz", bin_centers=prepared["centers_"])
    names = run(blocks[5], {}, (".joblib", ".npz"))
    for read, name in (("img_codebook", "image_"), ("spec_codebook", "spectrum_"), ("sca_centers", "centers_")):
        np.testing.assert_allclose(names[read], prepared[name], rtol=1e-6)


def test_the_loops_written_by_hand_train(blocks, trained, capsys):
    model = trained["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    run(blocks[6], {**trained, "device": torch.device(DEVICE), "optimizer": optimizer})
    assert capsys.readouterr().out.count("Loss: ") == 3
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    batch = {name: part.to(DEVICE) for name, part in next(iter(trained["train_loader"])).items()}
    run(
        blocks[8],
        {
            "torch": torch, "use_amp": DEVICE == "cuda", "model": model, "optimizer": optimizer,
            "x": batch["tokens"][:, :-1], "x_types": batch["types"][:, :-1], "x_mask": batch["attn_mask"][:, :-1],
            "y": batch["tokens"][:, 1:], "compute_loss": lambda *given: trained["trainer"].compute_loss(*given)[0],
            "scaler": torch.amp.GradScaler(DEVICE),
        },
    )  # fmt: skip


def test_the_schedule_is_that_of_the_coming_step(blocks):
    names = run(blocks[7], {"global_step": 1000})
    assert names["lr"] == cosine_schedule_with_warmup(1000, 2e-4, 2000) == pytest.approx(1e-4)
    run(blocks[9], {})


def test_the_variants_of_the_trainer_are_made_and_train(blocks, trained):
    given = ("    ...,\n", f"    {SETTINGS}{BOOKS}\n")
    compiled = run(blocks[10], dict(trained), given)["trainer"]
    assert not any("_orig_mod" in name for name in compiled.model.state_dict())
    without = run(blocks[15], dict(trained), given)["trainer"]
    assert without.train_epoch()["n_ce"] == 0


def test_the_checkpoint_has_the_keys_of_the_document(blocks, trained):
    run_ = trained["trainer"]
    checkpoint = Path("runs/experiment_001/ckpt_epoch_010.pt")
    tree = load_checkpoint(checkpoint)
    source = blocks[11]
    names = {
        "model": run_.model, "optimizer": run_.optimizer, "scaler": torch.amp.GradScaler(DEVICE), "global_step": 30,
        "epoch": 10, "vocab": trained["vocab"], "loss_config": {},
    }  # fmt: skip
    documented = run(source, names)["checkpoint"]
    assert set(documented) <= set(tree)
    assert set(documented["config"]) <= set(tree["config"])
    for key in ("vocab_size", "base_image", "base_scalar", "base_spectrum"):
        assert tree["config"][key] == documented["config"][key]
    assert (tree["global_step"], tree["epoch"]) == (30, 10)


def test_the_supported_model_is_built(blocks, trained):
    source = blocks[14]
    with torch.device("meta"):
        model = run(source, {"vocab": build_vocab_spec()})["model"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 107_099_136
