"""Rows of embedding and head that start from the values behind their ids."""

from __future__ import annotations

import copy

import pytest
import torch

from treadle.astro import CausalTransformerLM, VocabSpec, initialise_from_codebooks
from treadle.errors import ConfigError

VOCAB = VocabSpec(6, 64, 5, ("a", "b"), 32)
IMAGE = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0], [5.0, 5.1], [-5.0, 2.0], [9.0, -7.0]])
SPECTRUM = {"a": torch.randn(5, 3, generator=torch.manual_seed(1)), "b": torch.randn(5, 4)}


def fresh() -> CausalTransformerLM:
    torch.manual_seed(0)
    return CausalTransformerLM(VOCAB.vocab_size, VOCAB.n_types, 64, 1, 2, 16, 0.0, 16)


def nearest(rows, wanted):
    distances = torch.cdist(rows, rows).fill_diagonal_(torch.inf)
    return distances[wanted].argmin().item()


def test_ids_of_similar_values_start_beside_each_other():
    model = fresh()
    initialise_from_codebooks(model, VOCAB, image_codebook=IMAGE, spectrum_codebook=SPECTRUM)
    for weight in (model.token_embedding.weight, model.head.weight):
        image = weight[VOCAB.base_image :][:6].detach()
        assert [nearest(image, row) for row in (0, 1, 2, 3)] == [1, 0, 3, 2]
        for column in (0, 1):
            bins = weight[VOCAB.scalar_id(column, 0) :][:32].detach()
            assert all(abs(nearest(bins, bin) - bin) == 1 for bin in range(32))
    assert not torch.equal(model.token_embedding.weight[5:], model.head.weight[5:])
    first, second = (model.head.weight[VOCAB.scalar_id(column, 0) :][:32] for column in (0, 1))
    assert not torch.equal(first, second)


def test_rows_have_the_size_that_was_asked_for_and_all_else_stays():
    model = fresh()
    before = copy.deepcopy(model.state_dict())
    initialise_from_codebooks(model, VOCAB, spectrum_codebook=SPECTRUM, std=0.3)
    scalars_and_spectra = slice(VOCAB.base_scalar, None)
    for weight in (model.token_embedding.weight, model.head.weight):
        assert weight[scalars_and_spectra].square().mean().sqrt().item() == pytest.approx(0.3, rel=0.25)
    for name, value in model.state_dict().items():
        if name in ("token_embedding.weight", "head.weight"):
            assert torch.equal(value[: VOCAB.base_scalar], before[name][: VOCAB.base_scalar])
            assert not torch.equal(value[scalars_and_spectra], before[name][scalars_and_spectra])
        else:
            assert torch.equal(value, before[name])


def test_what_does_not_fit_is_refused_and_nothing_is_changed():
    model = fresh()
    before = copy.deepcopy(model.state_dict())
    for settings, message in [
        ({"image_codebook": IMAGE[:4]}, "image_codebook"),
        ({"spectrum_codebook": {"a": SPECTRUM["a"]}}, "no codebook for b"),
        ({"std": 0.0}, r"std=0\.0: must be above 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            initialise_from_codebooks(model, VOCAB, **settings)
    with pytest.raises(ConfigError, match=r"vocab_size=\d+ but the vocabulary has 16 ids"):
        initialise_from_codebooks(model, VocabSpec(2, 4, 5, ("a",), 2), image_codebook=IMAGE[:2])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
