"""Surveys as sequences: real data, nothing leaks between the parts, what is missing is MISS."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.astro import encode_sequence, load_codebook, move_scalars_last
from treadle.astro.survey_tokens import ScalarDropout, code_use, explained_variance, fit_tokenizers
from treadle.astro.surveys import Survey, load_surveys
from treadle.astro.tokenizer_files import load_tokenizers, save_tokenizers
from treadle.datasets import load_sdss, load_xdf
from treadle.datasets.splits import split_by_group
from treadle.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def surveys():
    return load_surveys()


@pytest.fixture(scope="module")
def fitted(surveys):
    """Tokenizers of a few hundred objects of each survey, and other objects of it."""
    parts = {name: split_by_group(survey.objects, test_fraction=0.2) for name, survey in surveys.items()}
    train = [survey.take(parts[name][0][:250]) for name, survey in surveys.items()]
    test = {name: survey.take(parts[name][2][:60]) for name, survey in surveys.items()}
    return fit_tokenizers(train, v_image=32, scalar_bins=8, v_spectra=32, patch_size=4, segment=8), test


def test_no_pixel_of_the_xdf_picture_is_in_two_parts(surveys):
    xdf, whole = surveys["xdf"], load_xdf()
    kept = (whole.images[:, None] == xdf.images[None, :50]).all(axis=(2, 3, 4)).sum(axis=0)
    assert (kept >= 1).all()
    # Where a cut-out lies is not kept in the survey, so it is looked up by its scalars, which differ.
    rows = {tuple(row): number for number, row in enumerate(whole.scalars[:, :5].astype(np.float64))}
    places = whole.scalars[[rows[tuple(row)] for row in xdf.scalars]][:, 5:].round()
    near = (np.abs(places[:, None] - places) < 32).all(axis=-1)
    other_tile = xdf.objects[:, None] != xdf.objects
    assert near.sum() > len(xdf)
    assert not (near & other_tile).any()


def test_all_spectra_of_an_object_are_in_one_part(surveys):
    spex = surveys["spex"]
    train, val, test = split_by_group(spex.objects)
    assert len(np.unique(np.concatenate([train, val, test]))) == len(spex)
    for part, other in ((train, val), (train, test), (val, test)):
        assert not set(spex.objects[part]) & set(spex.objects[other])
        assert not {row.tobytes() for row in spex.spectra[part]} & {row.tobytes() for row in spex.spectra[other]}


def test_colours_are_differences_of_magnitudes_and_missing_where_one_is(surveys):
    table, columns = load_sdss().table.astype(np.float64), load_sdss().columns
    expected = table[:, columns.index("J")] - table[:, columns.index("K")]
    assert np.isnan(expected).any()
    np.testing.assert_array_equal(surveys["sdss"].column("sdss.J-K"), expected)
    assert surveys["sdss"].columns[-1] == "sdss.redshift"


def test_what_a_survey_does_not_have_is_miss(fitted):
    tokenizers, test = fitted
    vocab = tokenizers.vocab()
    lengths = {"xdf": (64, 1), "spex": (1, 8), "sdss": (1, 1)}
    for name, survey in test.items():
        sequence = tokenizers.encode(survey)[0]["tokens"]
        parts = [part.tolist() for part in torch.tensor_split(sequence, (sequence == vocab.sep_id).nonzero().ravel())]
        image, scalars, *groups, end = [part[1:] for part in parts]
        assert len(image) == lengths[name][0]
        assert len(scalars) == len(tokenizers.scalar.columns)
        assert [len(group) for group in groups] == [lengths[name][1]] * 4
        has = {"image": image != [vocab.miss_id], "spectra": all(group != [vocab.miss_id] for group in groups)}
        assert has == {"image": name == "xdf", "spectra": name == "spex"}
        known = [column for column, id in zip(tokenizers.scalar.columns, scalars, strict=True) if id != vocab.miss_id]
        finite = np.isfinite(survey.scalars[0])
        assert known == [column for column, there in zip(survey.columns, finite, strict=True) if there]
        assert end == [vocab.eos_id]


def test_an_id_stands_for_the_value_of_its_column(fitted):
    tokenizers, test = fitted
    vocab, survey = tokenizers.vocab(), test["sdss"]
    column = tokenizers.scalar.columns.index("sdss.redshift")
    ids = torch.stack([sequence["tokens"] for sequence in tokenizers.encode(survey)])[:, 3 + column]
    centers = torch.as_tensor(tokenizers.scalar.centers).flatten()[ids - vocab.base_scalar].numpy()
    assert np.corrcoef(centers, survey.column("sdss.redshift"))[0, 1] > 0.9


def test_the_quality_is_that_of_objects_not_fitted_to(fitted):
    tokenizers, test = fitted
    quality = tokenizers.quality(test.values())
    assert set(quality) == {"image", *tokenizers.spectrum.groups, *tokenizers.scalar.columns}
    assert quality["image"]["explained_variance"] > 0.6
    assert min(quality[group]["explained_variance"] for group in tokenizers.spectrum.groups) > 0.8
    assert quality["sdss.redshift"]["explained_variance"] > 0.8
    decoded = tokenizers.image.decode(tokenizers.image.encode(test["xdf"].images))
    images = test["xdf"].images
    by_hand = 1 - np.square(images - decoded).sum() / np.square(images - images.mean(axis=0)).sum()
    assert quality["image"]["explained_variance"] == pytest.approx(by_hand, abs=1e-4)


def test_code_use_counts_what_is_never_used():
    assert code_use(np.arange(8), 8) == {"codes": 8, "dead_codes": 0, "perplexity": pytest.approx(8)}
    assert code_use([[3, 3]], 8) == {"codes": 8, "dead_codes": 7, "perplexity": pytest.approx(1)}


def test_explained_variance_of_the_mean_is_zero():
    values = np.random.default_rng(0).normal([0, 10, 100], 1, (50, 3))
    assert explained_variance(values, np.broadcast_to(values.mean(axis=0), values.shape)) == pytest.approx(0)
    assert np.isnan(explained_variance([1.0, 1.0], [1.0, 1.0]))


def test_tokenizers_come_back_from_their_file_to_the_bit(fitted, tmp_path):
    tokenizers, test = fitted
    file = save_tokenizers(tmp_path / "new" / "tokenizers.safetensors", tokenizers)
    read = load_tokenizers(file)
    assert read.vocab() == tokenizers.vocab()
    for survey in test.values():
        for one, other in zip(tokenizers.encode(survey), read.encode(survey), strict=True):
            assert torch.equal(one["tokens"], other["tokens"])
    tokens = tokenizers.spectrum.encode(test["spex"].spectra)
    assert np.array_equal(read.spectrum.decode(tokens), tokenizers.spectrum.decode(tokens))
    bins = tokenizers.bins(test["sdss"])
    assert np.array_equal(read.scalar.decode(bins), tokenizers.scalar.decode(bins), equal_nan=True)
    assert np.array_equal(load_codebook(file, ["image"]), tokenizers.image.codebook)
    assert np.array_equal(load_codebook(file, ["spectrum.spex_k"]), tokenizers.spectrum.codebooks["spex_k"])


def test_another_file_holds_no_tokenizers(tmp_path):
    from safetensors.torch import save_file

    save_file({"image": torch.zeros(2, 2)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="does not hold tokenizers"):
        load_tokenizers(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError):
        load_tokenizers(tmp_path / "absent.safetensors")
    with pytest.raises(ConfigError, match="safetensors"):
        save_tokenizers(tmp_path / "tokenizers.npz", None)


def test_hidden_scalars_are_miss_and_nothing_else_changes(fitted):
    tokenizers, test = fitted
    vocab, sequences = tokenizers.vocab(), tokenizers.encode(test["xdf"])
    torch.manual_seed(2)
    shown = ScalarDropout(sequences, vocab, share=0.25)
    hidden, scalars = 0, 0
    for sequence, changed in zip(sequences, (shown[row] for row in range(len(shown))), strict=True):
        scalar = (sequence["types"] == vocab.type_of(vocab.base_scalar)).bool()
        differs = sequence["tokens"] != changed["tokens"]
        assert not (differs & ~scalar).any()
        assert (changed["tokens"][differs] == vocab.miss_id).all()
        assert torch.equal(changed["types"], vocab.types_of(changed["tokens"]))
        hidden, scalars = hidden + int(differs.sum()), scalars + int(scalar.sum())
    assert 0.15 < hidden / scalars < 0.35
    torch.manual_seed(7)
    first = shown[3]["tokens"]
    torch.manual_seed(7)
    assert torch.equal(shown[3]["tokens"], first)
    assert torch.equal(ScalarDropout(sequences, vocab, share=0.0)[3]["tokens"], sequences[3]["tokens"])


def test_the_last_scalar_is_often_all_that_is_shown_of_them(fitted):
    tokenizers, _ = fitted
    vocab = tokenizers.vocab()
    sequence = encode_sequence(vocab, scalars=[None] * (vocab.n_columns - 4) + [0, 1, 2, 3])
    torch.manual_seed(0)
    shown = ScalarDropout([sequence], vocab, share=0.5)
    scalars = [shown[0]["tokens"][3 + vocab.n_columns - 4 :][:4] != vocab.miss_id for _ in range(2000)]
    shares = {
        state: sum(scalar.tolist() == list(state) for scalar in scalars) / 2000
        for state in [(False, False, False, True), (True, True, True, True), (False, True, False, True)]
    }
    assert shares[False, False, False, True] > 0.12  # drawn one by one alone: 0.05
    assert shares[True, True, True, True] > 0.12
    assert shares[False, True, False, True] > 0.01


def test_scalars_stand_last_as_often_as_asked(fitted):
    tokenizers, test = fitted
    vocab, sequences = tokenizers.vocab(), tokenizers.encode(test["spex"])
    moved = [move_scalars_last(sequence, vocab)["tokens"] for sequence in sequences]
    torch.manual_seed(0)
    mixed = ScalarDropout(sequences, vocab, share=0.0, scalars_last=0.5)
    are_moved = [torch.equal(mixed[row]["tokens"], moved[row]) for row in range(len(sequences)) for _ in range(5)]
    assert 0.4 < sum(are_moved) / len(are_moved) < 0.6
    for share, expected in ((0.0, [sequence["tokens"] for sequence in sequences]), (1.0, moved)):
        shown = ScalarDropout(sequences, vocab, share=0.0, scalars_last=share)
        assert all(torch.equal(shown[row]["tokens"], tokens) for row, tokens in enumerate(expected))
    with pytest.raises(ConfigError, match=r"scalars_last=1\.5: must lie in"):
        ScalarDropout([], vocab, scalars_last=1.5)


def test_surveys_that_do_not_fit_are_refused(fitted, surveys):
    tokenizers, _ = fitted
    scalars = np.array([[1.0], [2.0]])
    with pytest.raises(ConfigError, match=r"no bins for mine\.mag"):
        tokenizers.encode(Survey("mine", ("mine.mag",), scalars, np.arange(2)))
    with pytest.raises(ConfigError, match="3 rows of objects for 2"):
        Survey("mine", ("mine.mag",), scalars, np.arange(3))
    with pytest.raises(ConfigError, match="2 columns"):
        Survey("mine", ("mine.mag", "mine.size"), scalars, np.arange(2))
    with pytest.raises(ConfigError, match=r"two columns are named mine\.mag"):
        Survey("mine", ("mine.mag", "mine.mag"), np.ones((2, 2)), np.arange(2))
    with pytest.raises(ConfigError, match="images: no survey has them"):
        fit_tokenizers([surveys["spex"].take(np.arange(9))])
    with pytest.raises(ConfigError, match="no column 'mag'; it has"):
        surveys["xdf"].column("mag")
    with pytest.raises(ConfigError, match=r"share=0\.9"):
        ScalarDropout([], tokenizers.vocab(), share=0.9)
