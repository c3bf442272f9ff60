"""What comes from astromodal: its transformer, weights, run folders, settings, ids, data sets and autoencoder."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from treadle import CheckpointError, ConfigError, load_foreign
from treadle.astro import (
    AstroConfig,
    AstromodalConfig,
    AstroTrainer,
    AutoEncoder,
    BaseTokenizer,
    CausalTransformerLM,
    CutoutTokenizer,
    DataConfig,
    ModelConfig,
    MultiFieldTokenDataset,
    PathsConfig,
    SplusDataset,
    TokenizersConfig,
    TrainingConfig,
    build_vocab_spec,
    collate_sequences,
    discover_fields_from_datacubes,
    discover_fields_from_template,
    encode_sequence,
    from_dict,
    load_config,
    norm_gaia_id,
    norm_splus_id,
    save_config,
)
from treadle.astro.cutouts import elliptical_mask, to_image_torch
from treadle.checkpoint import load_checkpoint

VOCAB = build_vocab_spec(v_image=4, v_scalar=8, v_spectra=4, spectrum_groups=["blue", "red"], scalar_bins=4)
SIZES = {"n_types": 12, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "dropout": 0.0, "max_len": 24}


class Theirs(nn.Module):
    """The function of astromodal's transformer by torch's own layers, with its names of weights."""

    def __init__(self):
        super().__init__()
        width = SIZES["d_model"]
        self.tok_emb = nn.Embedding(VOCAB.vocab_size, width)
        self.type_emb = nn.Embedding(SIZES["n_types"], width)
        self.pos_emb = nn.Embedding(SIZES["max_len"], width)
        layer = nn.TransformerEncoderLayer(
            width, SIZES["n_heads"], SIZES["d_ff"], SIZES["dropout"], activation="gelu", batch_first=True
        )
        self.enc = nn.TransformerEncoder(layer, SIZES["n_layers"], enable_nested_tensor=False)
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB.vocab_size, bias=False)

    def forward(self, tokens, types, attn_mask):
        length = tokens.shape[1]
        hidden = self.tok_emb(tokens) + self.type_emb(types) + self.pos_emb(torch.arange(length))
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.head(self.ln(self.enc(hidden, mask=future, src_key_padding_mask=~attn_mask)))


def sequences(count=16):
    return [
        encode_sequence(VOCAB, image=[i % 4, 1], scalars=[i % 4, (i * 3) % 4], spectra={"blue": [i % 4] * (1 + i % 3)})
        for i in range(count)
    ]


def batches():
    found = sequences()
    return [collate_sequences(found[start : start + 4]) for start in range(0, 16, 4)]


def next_token_loss(model, batch):
    logits = model(batch["tokens"][:, :-1], batch["types"][:, :-1], batch["attn_mask"][:, :-1])
    targets = batch["tokens"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=VOCAB.pad_id)


def train_theirs(model, optimizer, epochs, settings, start=0):
    """Take the steps of astromodal's trainer with cross-entropy alone; return the loss of each."""
    losses = []
    for step, batch in enumerate(batches() * epochs, start=start):
        for group in optimizer.param_groups:  # within the warm-up
            group["lr"] = settings["learning_rate"] * (step + 1) / settings["warmup_steps"]
        loss = next_token_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


SETTINGS = {"learning_rate": 3e-3, "warmup_steps": 40, "total_steps": 200_040, "epochs": 3, "num_workers": 0}


@pytest.fixture
def trained(tmp_path):
    """A checkpoint of two epochs with the keys of astromodal's trainer, and the losses of the third."""
    torch.manual_seed(0)
    model = Theirs().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.95))
    train_theirs(model, optimizer, 2, SETTINGS)
    tree = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(), "scaler": None, "global_step": 8, "epoch": 2,
        "config": {
            "vocab_size": VOCAB.vocab_size, "base_image": VOCAB.base_image, "base_scalar": VOCAB.base_scalar,
            "base_spectrum": VOCAB.base_spectrum, "loss_config": {"enabled": False},
        },
    }  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save(tree, folder / "ckpt_epoch_002.pt")
    return folder, train_theirs(model, optimizer, 1, SETTINGS, start=8), model


def trainer_of(folder, **model):
    torch.manual_seed(7)
    net = CausalTransformerLM(VOCAB.vocab_size, **SIZES, **model)
    config = TrainingConfig(**SETTINGS, weight_decay=0.05)
    config.meaningful_loss.enabled = False
    return AstroTrainer(net, VOCAB, batches(), config, device="cpu", output_dir=folder, use_amp=False)


def test_post_norm_is_the_originals_function(tmp_path):
    torch.manual_seed(1)
    theirs = Theirs().eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    ours = CausalTransformerLM(VOCAB.vocab_size, **SIZES, norm_first=False).eval()
    load_foreign(ours, tmp_path / "weights.pt")
    batch = collate_sequences(sequences())
    valid = batch["attn_mask"]
    own, other = (model(batch["tokens"], batch["types"], valid) for model in (ours, theirs))
    assert torch.allclose(own[valid], other[valid], atol=1e-5)
    tokens, types = batch["tokens"][:1, :4], batch["types"][:1, :4]
    caches = ours.new_caches()
    for place in range(4):  # keys and values that are kept give the same
        last = ours.extend(tokens[:, place : place + 1], types[:, place : place + 1], caches)
    assert torch.allclose(ours.head(last)[:, 0], ours(tokens, types)[:, -1], atol=1e-5)


def test_weights_for_a_pre_norm_model_are_refused(trained):
    folder, _, _ = trained
    with pytest.raises(CheckpointError, match="norm_first=False"):
        load_foreign(CausalTransformerLM(VOCAB.vocab_size, **SIZES), folder / "ckpt_epoch_002.pt")
    with pytest.raises(CheckpointError, match="norm_first=False"):
        trainer_of(folder).train(resume_from="auto")


def test_a_folder_of_astromodal_goes_on_with_its_losses(trained, caplog):
    folder, losses, theirs = trained
    trainer = trainer_of(folder, norm_first=False)
    trainer.train(resume_from="auto")
    assert (trainer.global_step, trainer.epoch) == (12, 3)
    assert trainer.history[-1]["epoch"] == 3
    targets = [int((batch["tokens"][:, 1:] != VOCAB.pad_id).sum()) for batch in batches()]
    mean = sum(loss * count for loss, count in zip(losses, targets, strict=True)) / sum(targets)
    assert trainer.history[-1]["train_loss_ce"] == pytest.approx(mean, abs=1e-6)
    for name, value in theirs.state_dict().items():
        gap = (trainer.model.state_dict()[own(name)] - value).abs()
        if gap.dim() == 1 and "in_proj" in name:  # the bias of keys has no gradient but rounding, which Adam scales up
            gap = torch.cat([gap.chunk(3)[0], gap.chunk(3)[2]])
        assert gap.max() < 1e-4, name
    said = "\n".join(record.message for record in caplog.records if record.levelno >= logging.WARNING)
    assert "is a checkpoint of astromodal" in said
    assert "resumed with settings that differ" not in said  # the file has none of those
    assert load_checkpoint(folder / "ckpt_epoch_003.pt")["format"]["name"] == "treadle"
    assert (folder / "ckpt_epoch_002.pt").exists()  # the original's file stays


def test_a_folder_of_a_compiled_model_goes_on(trained):
    folder, _, theirs = trained
    tree = torch.load(folder / "ckpt_epoch_002.pt", weights_only=True)
    tree["model"] = {f"_orig_mod.{name}": value for name, value in tree["model"].items()}
    torch.save(tree, folder / "ckpt_epoch_002.pt")
    trainer = trainer_of(folder, norm_first=False)
    trainer.train(resume_from="auto")
    assert (trainer.global_step, trainer.epoch) == (12, 3)
    state = trainer.model.state_dict()
    assert all((state[own(name)] - value).abs().max() < 1e-4 for name, value in theirs.state_dict().items()
               if "in_proj_bias" not in name)  # fmt: skip


def test_a_single_step_after_loading_has_the_rate_of_the_schedule(trained):
    """The file's own is that of its last micro-batch."""
    folder, _, _ = trained
    trainer = trainer_of(folder, norm_first=False)
    trainer.load_checkpoint("ckpt_epoch_002.pt")
    rate = SETTINGS["learning_rate"] * 9 / SETTINGS["warmup_steps"]
    assert trainer.get_lr() == pytest.approx(rate)
    assert trainer.train_step(batches()[0])["lr"] == pytest.approx(rate)


def own(name):
    from treadle.astro.originals import own_name

    return own_name(name)


def test_its_optimizer_is_taken_by_name(trained):
    folder, _, _ = trained
    model = CausalTransformerLM(VOCAB.vocab_size, **SIZES, norm_first=False)
    optimizer = torch.optim.AdamW(model.parameters())
    load_foreign(model, folder / "ckpt_epoch_002.pt", optimizer=optimizer)
    saved = load_checkpoint(folder / "ckpt_epoch_002.pt")
    live = dict(model.named_parameters())
    for number, name in enumerate(saved["model"]):
        assert torch.equal(optimizer.state[live[own(name)]]["exp_avg"], saved["optimizer"]["state"][number]["exp_avg"])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


# -- settings -----------------------------------------------------------------------------------------------------


def test_the_sections_of_astromodal_are_read(tmp_path):
    file = tmp_path / "project.yaml"
    file.write_text(
        "paths: {datacube_template: 'cubes/{field}.parquet', output_dir: runs}\n"
        "data:\n  mag_filter: {column: mag_r, min: 15.0, max: 21.0}\n  magerr_max: 1.5\n  splus_bands: [u, i]\n"
        "tokenizers:\n  scalar: {n_bins: 512}\n  spectrum: {codebook_size: 1024, groups: [blue]}\n"
        "  image: {cutout_size: 64, latent_dim: 2, codebook_size: 1024, bands: [U, G]}\n"
        "sequences: {max_image_tokens: 256, max_scalar_tokens: 55, max_spec_tokens_per_group: 128, max_seq_len: 1024}\n"
        "training: {num_workers: 0, meaningful_loss: {sample_k_per_modality: 64}}\n"
    )
    config = load_config(file)
    assert config.paths == PathsConfig(datacube_template="cubes/{field}.parquet", output_dir="runs")
    assert config.data == DataConfig({"column": "mag_r", "min": 15.0, "max": 21.0}, 1.5, ["u", "i"])
    assert config.tokenizers.image.bands == ["U", "G"]
    assert (config.tokenizers.scalar.n_bins, config.sequences.max_scalar_tokens) == (512, 55)
    assert config.model == ModelConfig()
    assert AstromodalConfig is AstroConfig
    save_config(config, tmp_path / "again.yaml")
    assert load_config(tmp_path / "again.yaml") == config


def test_defaults_of_the_new_sections():
    config = load_config()
    assert config.data.mag_filter == {"column": "mag_pstotal_r", "min": 14.0, "max": 22.0}
    assert len(config.data.splus_bands) == len(config.tokenizers.image.bands) == 12
    sequences = config.sequences
    assert (sequences.max_image_tokens, sequences.max_scalar_tokens) == (576, 512)
    assert config.tokenizers == TokenizersConfig()
    for wrong in (
        {"paths": {"datacubes": "x"}},
        {"data": {"mag_filter": {"colum": "r"}}},
        {"sequences": {"max_seq_len": 0}},
    ):
        with pytest.raises(ConfigError):
            from_dict(wrong)


# -- ids and fields -----------------------------------------------------------------------------------------------


def test_ids_have_one_form():
    assert [norm_splus_id(x) for x in (b"a", np.bytes_(b"a"), "a", 3, None, math.nan)] == ["a", "a", "a", "3", "", ""]
    assert [norm_gaia_id(x) for x in ("12", 12.0, np.int64(12), None, math.nan, "x", math.inf)] == [12] * 3 + [None] * 4


def test_fields_are_found_by_their_files(tmp_path):
    for name in (
        "datacube_B-2.parquet",
        "datacube_A-1.parquet",
        "datacube_.parquet",
        "other_C.parquet",
        "datacube_D.csv",
    ):
        (tmp_path / name).touch()
    template = tmp_path / "datacube_{field}.parquet"
    assert discover_fields_from_datacubes(template) == ["A-1", "B-2"]
    assert discover_fields_from_template(str(template), "datacube_", ".parquet") == ["A-1", "B-2"]
    assert discover_fields_from_template(tmp_path / "none" / "x_{field}.npz") == []
    with pytest.raises(ConfigError, match="field"):
        discover_fields_from_datacubes(tmp_path / "datacube.parquet")


# -- data sets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def survey(tmp_path):
    """Two fields; the second has no spectra, and one object is too faint."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    for field, first in (("A", 0), ("B", 10)):
        table = {
            "id": [f"obj{first + i}" for i in range(4)], "gaia_source_id": [100 + first + i for i in range(4)],
            "mag_pstotal_r": [15.0, 23.0, 16.0, 17.0], "err_mag_pstotal_r": [0.1, 0.1, 0.1, 0.1],
        }  # fmt: skip
        parquet.write_table(pyarrow.table(table), tmp_path / f"cube_{field}.parquet")
        np.savez(
            tmp_path / f"image_{field}.npz", ids=np.array([100 + first, 102 + first]),
            tokens_flat=np.array([[0, 1], [2, 3]], dtype=np.uint16),
        )  # fmt: skip
        np.savez(
            tmp_path / f"scalar_{field}.npz", ids=np.array([f"obj{first + i}" for i in range(3)]), N_BINS=4,
            scalar_tokens=np.array([[0, 1], [2, 2], [3, 3]], dtype=np.uint16),
            scalar_cols=np.array(["a", "b"], dtype=object),  # pickled, as astromodal writes it, and not needed
        )  # fmt: skip
    np.savez(
        tmp_path / "spectrum_A.npz", ids=np.array(["obj0", "obj2"]), tokens_red_flat=np.array([1, 2, 3], np.uint16),
        tokens_red_indptr=np.array([0, 1, 3]),
    )  # fmt: skip
    return tmp_path


def dataset(folder, **more):
    templates = [str(folder / f"{kind}_{{field}}.{end}") for kind, end in
                 (("cube", "parquet"), ("image", "npz"), ("scalar", "npz"), ("spectrum", "npz"))]  # fmt: skip
    groups = {"red": ("tokens_red_flat", "tokens_red_indptr")}
    return MultiFieldTokenDataset(["A", "B", "missing"], VOCAB, *templates, groups, **more)


def test_objects_of_many_fields_become_sequences(survey):
    data = dataset(survey, seed=None, lru_fields=1)
    assert (data.index_field, data.index_row.tolist()) == (["A"] * 3 + ["B"] * 3, [0, 2, 3] * 2)
    image, scalar, red = VOCAB.base_image, VOCAB.base_scalar, VOCAB.base_spectrum["red"]
    whole = data[0]
    assert whole["token_ids"].tolist() == [1, image, image + 1, 3, scalar, scalar + 4 + 1, 3, red + 1, 3, 2]
    assert whole["type_ids"].tolist() == [1, 5, 5, 3, 6, 6, 3, 8, 3, 2]
    assert data[1]["token_ids"].tolist()[-4:] == [red + 2, red + 3, 3, 2]
    assert data[2]["token_ids"].tolist() == [1, 2]  # nothing is known of it
    assert data[3]["token_ids"].tolist() == [1, image, image + 1, 3, scalar, scalar + 5, 3, 2]
    assert list(data._open) == ["B"]
    batch = collate_sequences([data[0], data[2]])
    assert batch["tokens"].shape == (2, 10)
    assert batch["attn_mask"].sum(1).tolist() == [10, 2]
    assert dataset(survey, seed=None, max_image_tokens=1)[0]["token_ids"].tolist()[:3] == [1, image, 3]


def test_the_list_of_objects_is_kept_and_made_again_for_other_settings(survey, caplog):
    cache = survey / "index.npz"
    first = dataset(survey, index_cache=cache)
    again = dataset(survey, index_cache=cache)
    assert again.index_row.tolist() == first.index_row.tolist()
    assert again.index_field == first.index_field
    assert sorted(first.index_row.tolist()) == [0, 0, 2, 2, 3, 3]
    other = dataset(survey, index_cache=cache, mag_max=15.5)
    assert len(other) == 2
    assert "is made again" in caplog.text


def test_files_that_do_not_fit_are_refused(survey):
    with pytest.raises(ConfigError, match="green"):
        MultiFieldTokenDataset(["A"], VOCAB, "", "", "", "", {"green": ("a", "b")})
    np.savez(survey / "image_A.npz", ids=np.array([100], dtype=object), tokens_flat=np.array([[9, 9]]))
    with pytest.raises(ConfigError, match="allow_pickle"):
        dataset(survey, seed=None)[0]
    with pytest.raises(ConfigError, match="outside 0 to 3"):
        dataset(survey, seed=None, allow_pickle=True)[0]


def test_cutouts_are_normalised_band_by_band():
    pixels = np.arange(64, dtype=np.float32).reshape(8, 8)
    holed = pixels.copy()
    holed[7, 7] = np.nan
    table = {
        "splus_cut_R": [pixels.reshape(-1)], "splus_cut_U": [holed], "a_pixel_det": [0.5], "b_pixel_det": [0.25],
        "theta_det": [90.0],
    }  # fmt: skip
    picture, inside, valid = SplusDataset(table, ["R", "U"], img_size=8)[0]
    values = np.arange(1, 64, dtype=np.float32)  # 0 is no valid pixel; torch's median is the lower one
    middle = np.sort(values)[(len(values) - 1) // 2]
    scale = np.sort(np.abs(values - middle))[(len(values) - 1) // 2] * 3.0 + 1e-6
    assert torch.allclose(picture[0], torch.asinh((torch.from_numpy(pixels) - middle) / scale), atol=1e-5)
    assert torch.isfinite(picture).all()
    assert (int(valid[0].sum()), int(valid[1].sum())) == (63, 62)
    # Turned by 90 degrees, the long axis of 4 x 0.5 pixels is along y, the short one of 4 x 0.25 along x.
    assert inside[0].nonzero().tolist() == [[2, 4], [3, 4], [4, 3], [4, 4], [4, 5], [5, 4], [6, 4]]
    assert torch.equal(elliptical_mask(8, 8, 4, 4, 0.5, 0.25, math.pi / 2), inside[0])
    with pytest.raises(ConfigError, match="splus_cut_G"):
        SplusDataset(table, ["G"])
    with pytest.raises(ValueError):
        to_image_torch([1.0, 2.0])


# -- the autoencoder ----------------------------------------------------------------------------------------------


def test_the_autoencoder_has_the_layers_of_astromodal():
    torch.manual_seed(0)
    model = AutoEncoder(in_channels=3, latent_dim=2, proj_channels=8)
    pictures, latents = model(torch.randn(2, 3, 32, 32))
    assert (pictures.shape, latents.shape) == ((2, 3, 32, 32), (2, 2, 8, 8))
    assert (model.latent_H, model.latent_W) == (24, 24)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes["encoder.proj.weight"] == (8, 3, 1, 1)
    assert shapes["encoder.enc_block1.0.conv1.weight"] == (8, 8, 3, 3)
    assert shapes["encoder.enc_block1.1.weight"] == (128, 8, 3, 3)
    assert shapes["encoder.enc_block2.3.conv2.bias"] == (128,)
    assert shapes["encoder.to_latent.weight"] == (2, 128, 1, 1)
    assert shapes["decoder.dec_block1.1.weight"] == (128, 64, 4, 4)
    assert shapes["decoder.dec_block2.3.conv1.weight"] == (8, 8, 3, 3)
    assert shapes["decoder.out_conv.weight"] == (3, 8, 3, 3)
    assert sum(p.numel() for p in AutoEncoder(12).parameters()) == 1_533_646
    block, x = model.encoder.enc_block1[0], torch.randn(1, 8, 4, 4)
    expected = F.relu(block.conv2(F.relu(block.conv1(x))) + x)
    assert torch.equal(block(x), expected)


def test_latents_become_tokens_and_go_through_a_file(tmp_path):
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    pictures = torch.randn(8, 3, 16, 16)
    tokenizer = CutoutTokenizer(AutoEncoder(3, proj_channels=8, cutout_size=16), 6, device="cpu")
    with pytest.raises(ConfigError, match="train"):
        tokenizer.encode(pictures)
    tokenizer.train(pictures)
    tokens = tokenizer.encode(pictures, batch_size=3)
    assert tokens.shape == (8, 4, 4)
    assert tokenizer.codebook.shape == (6, 2)
    latents = tokenizer.autoencoder.encode(pictures).permute(0, 2, 3, 1)
    nearest = torch.cdist(latents.reshape(-1, 2), torch.from_numpy(tokenizer.codebook)).argmin(1)
    assert np.array_equal(tokens.reshape(-1), nearest.numpy())
    tokenizer.save(tmp_path / "tokenizer.pt")
    loaded = CutoutTokenizer.load(tmp_path / "tokenizer.pt", device="cpu")
    assert np.array_equal(loaded.encode(pictures), tokens)
    assert torch.equal(loaded.decode(tokens), tokenizer.decode(tokens))
    torch.save({"kind": "other"}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a CutoutTokenizer file"):
        CutoutTokenizer.load(tmp_path / "other.pt")
    with pytest.raises(TypeError):
        BaseTokenizer()
