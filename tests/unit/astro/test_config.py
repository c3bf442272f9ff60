"""The settings: merged over the defaults, every key known, every value checked; and the loader they describe."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from treadle.astro import (
    AstroConfig,
    TrainingConfig,
    build_loader,
    build_vocab_spec,
    encode_sequence,
    from_dict,
    load_config,
    save_config,
    to_dict,
)
from treadle.astro import config as astro_config
from treadle.config import load_config as load_plain
from treadle.errors import ConfigError


def written(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return file


def test_the_packaged_file_has_every_setting_at_its_default():
    packaged = load_plain(f"{astro_config.__file__.removesuffix('config.py')}{astro_config.DEFAULTS}")
    assert packaged == to_dict(AstroConfig())
    assert load_config() == AstroConfig()


def test_the_defaults_are_those_of_the_specification():
    config = load_config()
    vocab, model, training = config.vocab, config.model, config.training
    assert (vocab.image, vocab.scalar, vocab.scalar_bins, vocab.spectrum) == (2048, 56320, 1024, 2048)
    assert vocab.spectrum_groups == ["gaiaxp_bp", "gaiaxp_rp", "desi_b", "desi_r", "desi_z"]
    assert config.sequences.max_seq_len == 2048
    assert dataclasses.astuple(model) == (20, 768, 12, 12, 3072, 0.1)
    assert dataclasses.astuple(training) == (
        0, 16, 5, 2e-4, 0.05, 2000, None, 0.1, 1.0, 1, None, 4, True, True, 2, 50, 5000, (True, 4096, 0.1, 0.1, 0.1),
        None, False,
    )  # fmt: skip


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path):
    file = written(tmp_path, "training: {epochs: 10, meaningful_loss: {weight_image: 0.5}}\nmodel: {d_model: 96}\n")
    expected = AstroConfig()
    expected.training.epochs = 10
    expected.training.meaningful_loss.weight_image = 0.5
    expected.model.d_model = 96
    assert load_config(file) == expected
    assert AstroConfig() != expected  # the defaults are not shared


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_numbers_in_scientific_notation_are_numbers(tmp_path, text):
    assert load_config(written(tmp_path, f"training: {{learning_rate: {text}}}")).training.learning_rate == 1e-4


def test_a_file_may_refer_to_a_default(tmp_path):
    file = written(tmp_path, "sequences: {max_seq_len: '${model.d_ff}'}")
    assert load_config(file).sequences.max_seq_len == 3072


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainign: {epochs: 1}", "unknown key 'trainign'; did you mean 'training'"),
        ("training: {lerning_rate: 1}", "training: unknown key 'lerning_rate'; did you mean 'learning_rate'"),
        ("training: {meaningful_loss: {sample: 1}}", "training.meaningful_loss: unknown key 'sample'"),
        ("training: {epochs: many}", "training.epochs='many': must be int, but this is the str 'many'"),
        ("training: {epochs: true}", "training.epochs=True: must be int"),
        ("training: {learning_rate: '1e-4'}", "training.learning_rate='1e-4': must be float"),
        ("training: 3", "training=3: is a section"),
        ("training: {batch_size: 0}", "training.batch_size=0: must be at least 1"),
        ("training: {total_steps: 0}", "training.total_steps=0: must be at least 1"),
        ("training: {grad_clip: -1}", "training.grad_clip=-1.0: must be at least 0"),
        ("training: {learning_rate: .nan}", "training.learning_rate=nan: must be a finite number"),
        ("training: {min_lr_ratio: 2}", "training.min_lr_ratio=2.0"),
        ("training: {meaningful_loss: {weight_image: -1}}", "weight_image=-1.0"),
        ("training: {meaningful_loss: {sample_k_per_modality: 0}}", "sample_k=0"),
        ("vocab: {scalar_bins: 1000}", "vocab.scalar_bins=1000: must divide vocab.scalar=56320"),
        ("vocab: {spectrum_groups: [a, a]}", "vocab.spectrum_groups"),
        ("vocab: {spectrum_groups: [1]}", "vocab.spectrum_groups"),
        ("model: {n_heads: 7}", "model.n_heads=7: must divide 768"),
        ("model: {n_types: 11}", "model.n_types=11: must be at least 12"),
        ("model: {dropout: 1.0}", "model.dropout=1.0"),
    ],
)
def test_wrong_settings_are_refused_by_name(tmp_path, text, message):
    with pytest.raises(ConfigError) as refused:
        load_config(written(tmp_path, text))
    assert message in str(refused.value)


@pytest.mark.parametrize("ending", [".yaml", ".py"])
def test_what_is_saved_is_loaded_equal(tmp_path, ending):
    config = from_dict({"training": {"learning_rate": 1e-5, "grad_clip": None}, "vocab": {"spectrum_groups": ["a"]}})
    save_config(config, tmp_path / "new" / f"run{ending}")
    assert load_config(tmp_path / "new" / f"run{ending}") == config


def test_a_dict_of_the_settings_makes_them_again_and_shares_nothing():
    config = AstroConfig()
    values = to_dict(config)
    assert from_dict(values) == config
    values["vocab"]["spectrum_groups"].append("x")
    values["training"]["meaningful_loss"]["weight_image"] = 9.0
    assert config == AstroConfig()
    assert from_dict({"epochs": 2}, TrainingConfig) == TrainingConfig(epochs=2)


def sequences(count=5):
    vocab = build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2)
    return [encode_sequence(vocab, image=[0] * (number + 1)) for number in range(count)]


def test_the_loader_pads_batches_of_the_size_and_keeps_the_last_short_one():
    training = TrainingConfig(batch_size=2, num_workers=0)
    batches = list(build_loader(sequences(), training, shuffle=False))
    same = build_loader(sequences(), {"batch_size": training.batch_size, "num_workers": 0}, shuffle=False)
    assert [batch["tokens"].tolist() for batch in same] == [batch["tokens"].tolist() for batch in batches]
    assert [tuple(batch["tokens"].shape) for batch in batches] == [(2, 11), (2, 13), (1, 14)]
    assert [int(batch["attn_mask"].sum()) for batch in batches] == [10 + 11, 12 + 13, 14]
    torch.manual_seed(0)
    shuffled = [int(batch["attn_mask"].sum()) for batch in build_loader(sequences(), training)]
    assert sum(shuffled) == 60
    assert shuffled != [21, 25, 14]


def test_without_workers_and_without_cuda_their_options_are_left_out_and_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = build_loader(sequences(), TrainingConfig(num_workers=0))
        assert len(list(loader)) == 1
    assert (loader.persistent_workers, loader.prefetch_factor) == (False, None)
    assert loader.pin_memory is torch.cuda.is_available()


def test_with_workers_their_options_hold():
    loader = build_loader(sequences(), TrainingConfig(num_workers=2, prefetch_factor=3, persistent_workers=True))
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
