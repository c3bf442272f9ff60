"""The vocabulary's offsets, ids and types, sequences laid out and collated."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch

from treadle.astro import VocabSpec, build_vocab_spec, collate_sequences, encode_sequence, move_scalars_last
from treadle.errors import ConfigError


def tiny() -> VocabSpec:
    return build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2)


def test_groups_may_be_a_list_but_no_single_text():
    listed = VocabSpec(2, 4, 2, ["a", "b"], 2)
    assert listed == tiny()
    assert hash(listed) == hash(tiny())
    for build in (lambda: VocabSpec(2, 4, 2, "uvw", 2), lambda: build_vocab_spec(2, 4, 2, "uvw", scalar_bins=2)):
        with pytest.raises(ConfigError, match="spectrum_groups='uvw'"):
            build()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image": [1.7]}, r"image token 1\.7"), ({"scalars": [1.7, 0]}, r"bin 1\.7"),
        ({"scalars": [True, 0]}, "bin True"),
        ({"scalars": [float("nan"), 0]}, "bin nan"), ({"spectra": {"a": torch.tensor([0.5])}}, r"token of a 0\.5"),
    ],
)  # fmt: skip
def test_an_index_that_is_no_whole_number_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        encode_sequence(tiny(), **given)


def test_the_offsets_are_those_of_the_specification():
    vocab = build_vocab_spec()
    assert (vocab.pad_id, vocab.bos_id, vocab.eos_id, vocab.sep_id, vocab.miss_id) == (0, 1, 2, 3, 4)
    assert (vocab.base_image, vocab.base_scalar, vocab.vocab_size, vocab.n_columns) == (5, 2053, 13317, 1)
    assert vocab.base_spectrum == {
        "gaiaxp_bp": 3077, "gaiaxp_rp": 5125, "desi_b": 7173, "desi_r": 9221, "desi_z": 11269,
    }  # fmt: skip
    wide = build_vocab_spec(v_scalar=56320)
    assert (wide.scalar_bins, wide.n_columns, wide.base_spectrum["gaiaxp_bp"], wide.vocab_size) == (
        1024, 55, 58373, 68613,
    )  # fmt: skip
    assert (tiny().base_image, tiny().base_scalar, tiny().base_spectrum, tiny().vocab_size) == (
        5, 7, {"a": 11, "b": 13}, 15,
    )  # fmt: skip


def test_without_a_divisor_all_scalar_ids_are_one_column_and_the_layout_is_logged(caplog):
    with caplog.at_level(logging.INFO, "treadle.astro"):
        vocab = build_vocab_spec(v_scalar=300)
    assert (vocab.scalar_bins, vocab.n_columns) == (300, 1)
    assert "1 columns of 300 bins" in caplog.text


def test_a_vocabulary_is_a_value():
    vocab = tiny()
    assert pickle.loads(pickle.dumps(vocab)) == vocab == tiny()
    assert hash(vocab) == hash(tiny())
    vocab.base_spectrum["a"] = 0
    assert vocab.base_spectrum["a"] == 11
    with pytest.raises(AttributeError):
        vocab.v_image = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"v_image": 0}, "v_image=0"),
        ({"v_scalar": True}, "v_scalar=True"),
        ({"v_scalar": 10, "scalar_bins": 3}, "does not divide"),
        ({"spectrum_groups": ["a", "b", "a"]}, "a occurs more than once"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_vocab_spec(**settings)


def test_ids_are_offset_and_index_and_out_of_range_is_refused():
    vocab = tiny()
    assert [vocab.image_token_to_id(1), vocab.scalar_token_to_id(3), vocab.scalar_id(1, 1)] == [6, 10, 10]
    assert vocab.spectrum_token_to_id("b", 1) == 14
    for call in (
        lambda: vocab.image_token_to_id(2),
        lambda: vocab.image_token_to_id(-1),
        lambda: vocab.scalar_token_to_id(4),
        lambda: vocab.scalar_id(2, 0),
        lambda: vocab.scalar_id(0, 2),
        lambda: vocab.spectrum_token_to_id("a", 2),
        lambda: vocab.type_of(15),
    ):
        with pytest.raises(ValueError, match=r"out of range: it must lie in \[0, "):
            call()
    with pytest.raises(ValueError, match="not a spectrum group; known: a, b"):
        vocab.spectrum_token_to_id("A", 0)


def test_a_type_follows_from_the_id_and_the_vocabularys_groups():
    assert [tiny().type_of(id) for id in range(15)] == [0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7, 7, 8, 8]
    ids = torch.tensor([[0, 5], [12, 14]])
    assert tiny().types_of(ids).tolist() == [[0, 5], [7, 8]]
    assert build_vocab_spec().n_types == 12


def test_what_is_absent_is_one_miss_and_types_do_not_move():
    vocab = tiny()
    nothing = encode_sequence(vocab)
    assert nothing["tokens"].tolist() == [1, 4, 3, 4, 3, 4, 3, 4, 3, 2]
    only_b = encode_sequence(vocab, spectra={"a": None, "b": torch.tensor([1, 0])}, scalars=[None, 1])
    assert only_b["tokens"].tolist() == [1, 4, 3, 4, 10, 3, 4, 3, 14, 13, 3, 2]
    assert only_b["types"].tolist() == [1, 4, 3, 4, 6, 3, 4, 3, 8, 8, 3, 2]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"image": [0, 1, 0], "max_len": 11}, "12 ids .image 3, scalars 0, a 0, b 0.*max_len=11"),
        ({"scalars": [1]}, "1 bins for 2 columns"),
        ({"spectra": {"c": [0]}}, "unknown key 'c'"),
        ({"image": [2]}, "image token 2"),
        ({"scalars": [0, 2]}, "bin 2"),
    ],
)
def test_a_sequence_that_does_not_fit_is_refused_when_it_is_encoded(parts, message):
    with pytest.raises(ValueError, match=message):
        encode_sequence(tiny(), **parts)


def test_a_sequence_of_exactly_the_greatest_length_is_taken():
    assert len(encode_sequence(tiny(), image=[0, 1, 0], max_len=12)["tokens"]) == 12


def test_moved_scalars_keep_their_types_and_all_else_its_order():
    vocab = build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2)
    encoded = encode_sequence(vocab, image=[1], scalars=[0, None], spectra={"a": [1, 0]})
    moved = move_scalars_last(encoded, vocab)
    assert moved["tokens"].tolist() == [1, 6, 3, 12, 11, 3, 4, 3, 7, 4, 3, 2]
    assert torch.equal(moved["types"], vocab.types_of(moved["tokens"]))
    absent = move_scalars_last(encode_sequence(vocab, spectra={"b": [0]}), vocab)
    assert absent["tokens"].tolist() == [1, 4, 3, 4, 3, 13, 3, 4, 3, 2]
    with pytest.raises(ConfigError, match="sequence: 2 SEP; one of encode_sequence has 4"):
        move_scalars_last({"tokens": [1, 3, 3, 2], "types": [1, 3, 3, 2]}, vocab)


def test_collating_pads_on_the_right():
    batch = [encode_sequence(tiny(), image=[0, 1]), encode_sequence(tiny())]
    collated = collate_sequences(batch)
    assert collated["tokens"].dtype == collated["types"].dtype == torch.long
    assert torch.equal(collated["tokens"][1, :10], batch[1]["tokens"])
    assert collated["tokens"][1, 10:].tolist() == collated["types"][1, 10:].tolist() == [0]
    assert torch.equal(collated["attn_mask"], torch.tensor([[True] * 11, [True] * 10 + [False]]))
    assert collate_sequences(batch, pad_id=9)["tokens"][1, 10] == 9


def test_collating_nothing_or_unequal_parts_is_refused():
    with pytest.raises(ValueError, match="no sequences"):
        collate_sequences([])
    with pytest.raises(ValueError, match=r"batch\[0\]: tokens of shape \(2,\) and types of shape \(1,\)"):
        collate_sequences([{"tokens": [1, 2], "types": [1]}])
