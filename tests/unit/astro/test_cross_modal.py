"""Predictions across modalities of real objects, beside the mean, a regression and the best that bins allow."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from treadle.astro import (
    CausalTransformerLM,
    CrossPrediction,
    class_scores,
    cross_predict,
    fit_tokenizers,
    load_surveys,
    ridge_prediction,
    token_values,
)
from treadle.astro.cross_modal import CROSS_PREDICTIONS
from treadle.datasets.splits import split_by_group
from treadle.errors import ConfigError


@pytest.fixture(scope="module")
def case():
    surveys = load_surveys()
    parts = {name: split_by_group(survey.objects, test_fraction=0.2) for name, survey in surveys.items()}
    train = {name: survey.take(parts[name][0][:300]) for name, survey in surveys.items()}
    test = {name: survey.take(parts[name][2][:50]) for name, survey in surveys.items()}
    return (
        fit_tokenizers(list(train.values()), v_image=32, scalar_bins=8, v_spectra=32, patch_size=4, segment=8),
        train,
        test,
    )


class Watcher(nn.Module):
    """Says that everything is equally probable, and keeps what it was shown."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.shown = vocab, []

    def forward(self, tokens, types, attn_mask):
        self.shown.append(tokens[attn_mask])
        return torch.zeros(*tokens.shape, self.vocab.vocab_size)


def test_a_model_that_knows_nothing_is_no_better_than_the_mean_and_bins_bound_all(case):
    tokenizers, train, test = case
    results = cross_predict(Watcher(tokenizers.vocab()), tokenizers, train, test)
    assert [result.question.target for result in results] == [question.target for question in CROSS_PREDICTIONS]
    for result in results:
        scores = result.scores()
        assert np.isfinite(result.true).all()
        assert scores["n"] == len(result.true) <= 50
        assert scores["mean"]["explained"] == 0
        assert scores["model"]["explained"] < 0.15
        assert scores["bins"]["explained"] > 0.6
        assert scores["bins"]["rmse"] < scores["ridge"]["rmse"]
    explained = {result.question.target: result.scores()["ridge"]["explained"] for result in results}
    assert explained["sdss.redshift"] > 0.5
    assert explained["spex.type"] > 0.8


def test_nothing_but_what_is_given_is_shown(case):
    tokenizers, train, test = case
    vocab, columns = tokenizers.vocab(), tokenizers.scalar.columns
    for question in CROSS_PREDICTIONS:
        watcher = Watcher(vocab)
        cross_predict(watcher, tokenizers, train, test, questions=[question])
        ids = torch.cat(watcher.shown)
        types = vocab.types_of(ids)
        assert bool((types == 5).any()) == (question.given == "image")
        assert bool((types >= 7).any()) == (question.given == "spectrum")
        seen = {columns[(id - vocab.base_scalar) // vocab.scalar_bins] for id in ids[types == 6].unique().tolist()}
        assert seen - {question.target} == (set() if isinstance(question.given, str) else set(question.given))


def test_with_the_scalars_last_the_model_sees_the_spectrum_before_it_is_asked(case):
    tokenizers, train, test = case
    vocab, question = tokenizers.vocab(), CROSS_PREDICTIONS[1]
    for scalars_last in (False, True):
        watcher = Watcher(vocab)
        cross_predict(watcher, tokenizers, train, test, questions=[question], scalars_last=scalars_last)
        shown = vocab.types_of(watcher.shown[0])
        first_spectrum = int((shown >= 7).nonzero()[0])
        before = shown[:first_spectrum].tolist()  # BOS, MISS for the image, SEP, and perhaps all columns
        assert len(before) == (3 if scalars_last else 3 + vocab.n_columns + 1)


def test_the_target_itself_is_never_evidence(case):
    tokenizers, train, test = case
    question = next(question for question in CROSS_PREDICTIONS if question.target == "sdss.redshift")
    scalars = test["sdss"].scalars.copy()
    scalars[:, -1] = np.random.default_rng(0).permutation(scalars[:, -1])
    changed = {"sdss": dataclasses.replace(test["sdss"], scalars=scalars)}
    torch.manual_seed(0)
    vocab = tokenizers.vocab()
    model = CausalTransformerLM(vocab.vocab_size, vocab.n_types, 16, 1, 2, 32, 0.0, 128)
    first, second = (
        cross_predict(model, tokenizers, train, surveys, questions=[question])[0] for surveys in (test, changed)
    )
    assert not np.array_equal(first.true, second.true)
    for method in ("model", "ridge", "mean"):
        np.testing.assert_array_equal(first.predicted[method], second.predicted[method])


def test_classes_follow_from_the_numbers(case):
    tokenizers, train, test = case
    question = CROSS_PREDICTIONS[0]
    result = cross_predict(Watcher(tokenizers.vocab()), tokenizers, train, test, questions=[question])[0]
    expected = np.select([result.true >= 20, result.true >= 10], ["T", "L"], "M")
    assert np.array_equal(result.classes["true"], expected)
    assert len(set(result.classes["mean"])) == 1
    scores = result.scores()
    assert scores["mean"]["accuracy"] == pytest.approx((result.classes["mean"] == expected).mean())
    assert scores["ridge"]["accuracy"] > scores["mean"]["accuracy"]
    assert (
        "accuracy"
        not in cross_predict(Watcher(tokenizers.vocab()), tokenizers, train, test, questions=[CROSS_PREDICTIONS[1]])[
            0
        ].scores()["model"]
    )


def test_the_regression_sees_the_values_behind_the_tokens(case):
    tokenizers, train, _ = case
    pixels = token_values(tokenizers, train["xdf"], "image")
    assert pixels.shape == (300, 3072)
    assert len(np.unique(pixels.reshape(300, 3, 8, 4, 8, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 48), axis=0)) <= 32
    assert token_values(tokenizers, train["spex"], "spectrum").shape == (300, 256)
    colour = token_values(tokenizers, train["sdss"], ("sdss.J-K",)).ravel()
    assert np.array_equal(np.isnan(colour), np.isnan(train["sdss"].column("sdss.J-K")))
    assert len(np.unique(colour[np.isfinite(colour)])) <= 8


def test_the_regression_finds_a_line_and_lives_with_missing_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5))
    y = x @ [1.0, -2.0, 0.0, 3.0, 0.0] + 7
    assert np.allclose(ridge_prediction(x[:200], y[:200], x[200:]), y[200:], atol=0.05)
    x[rng.random(x.shape) < 0.1] = np.nan
    x[:, 4] = np.nan
    error = ridge_prediction(x[:200], y[:200], x[200:]) - y[200:]
    assert np.square(error).mean() < 0.5 * y.var()


def test_balanced_accuracy_counts_every_class_alike():
    assert class_scores(["M"] * 8 + ["T"] * 2, ["M"] * 10) == {"accuracy": 0.8, "balanced_accuracy": 0.5}


def test_questions_that_have_no_answer_are_refused(case):
    tokenizers, train, test = case
    model = Watcher(tokenizers.vocab())
    for question, message in [
        (CrossPrediction("gaia", "gaia.g", "image"), "survey='gaia' is not there"),
        (CrossPrediction("sdss", "sdss.z", "image"), "no column 'sdss.z'"),
        (CrossPrediction("sdss", "sdss.redshift", "image"), "given='image': survey 'sdss' does not have it"),
        (CrossPrediction("sdss", "sdss.redshift", ("sdss.q",)), "no column 'sdss.q'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            cross_predict(model, tokenizers, train, test, questions=[question])
