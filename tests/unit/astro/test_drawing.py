"""Drawn spectra: only ids of their group, what stands before them as it was, and with the model's own chances."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treadle.astro import CausalTransformerLM, VocabSpec, draw_spectra, encode_sequence
from treadle.errors import ConfigError

VOCAB = VocabSpec(2, 4, 3, ("a", "b"), 2)
SEQUENCES = [
    encode_sequence(VOCAB, scalars=[0, bin], spectra={"a": [0, 1], "b": [2]}) for bin in (0, 1)
]  # BOS MISS SEP, two scalars and SEP, two of a and SEP, one of b, SEP, EOS


class Echo(nn.Module):
    """Gives the next token chances that belong to the last one, and looks at nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB.vocab_size, VOCAB.vocab_size, generator=torch.manual_seed(0)))

    def forward(self, tokens: torch.Tensor, types: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        assert torch.equal(types, VOCAB.types_of(tokens))
        assert bool(attn_mask.all())
        return self.table[tokens]


def test_only_spectrum_ids_are_drawn_each_of_its_group_and_the_rest_stays() -> None:
    model = CausalTransformerLM(VOCAB.vocab_size, VOCAB.n_types, 8, 1, 2, 16, 0.0, 16)
    drawn = draw_spectra(model, SEQUENCES, VOCAB, draws=50)
    given = torch.stack([torch.as_tensor(sequence["tokens"]) for sequence in SEQUENCES])
    spectrum = given[0] >= VOCAB.first_spectrum_id
    assert torch.equal(drawn[:, :, ~spectrum], given[:, None, ~spectrum].expand(-1, 50, -1))
    assert torch.equal(VOCAB.types_of(drawn), VOCAB.types_of(given)[:, None].expand(-1, 50, -1))
    assert len(drawn[:, :, spectrum].unique()) == 6


def test_the_chances_are_those_of_the_model_given_what_was_drawn_before() -> None:
    model, first = Echo(), VOCAB.base_spectrum["a"]
    drawn = draw_spectra(model, SEQUENCES[:1], VOCAB, draws=20_000, generator=torch.Generator().manual_seed(0))[0]
    before, after = drawn[:, 6], drawn[:, 7]
    for token in range(first, first + 3):
        seen = after[before == token] - first
        shares = torch.bincount(seen, minlength=3) / len(seen)
        expected = model.table[token, first : first + 3].softmax(0)
        assert torch.allclose(shares, expected, atol=0.03)


def test_the_same_generator_draws_the_same_and_the_mode_is_restored() -> None:
    model = CausalTransformerLM(VOCAB.vocab_size, VOCAB.n_types, 8, 1, 2, 16, 0.5, 16).train()
    one, two = (
        draw_spectra(model, SEQUENCES, VOCAB, draws=4, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(one, two)
    assert model.training


def test_sequences_of_other_layouts_are_refused() -> None:
    model = Echo()
    other = encode_sequence(VOCAB, scalars=[0, 1], spectra={"a": [0], "b": [2, 1]})
    for sequences in ([*SEQUENCES, other], [encode_sequence(VOCAB, scalars=[0, 1])]):
        with pytest.raises(ConfigError, match="same positions in all of them"):
            draw_spectra(model, sequences, VOCAB, draws=2)
