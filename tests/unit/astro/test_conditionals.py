"""One modality from another: Bayes' rule against a world whose probabilities are known, and what is shown."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treadle.astro import (
    CausalTransformerLM,
    VocabSpec,
    column_probabilities,
    encode_sequence,
    expected_vectors,
    hide_columns,
    move_scalars_last,
)
from treadle.errors import ConfigError

VOCAB = VocabSpec(2, 6, 2, ("a",), 3)
PRIOR = torch.tensor([0.5, 0.3, 0.2])
# P(spectrum token | bin of column 1): every spectrum token is drawn by it, alone.
LIKELIHOOD = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])


class KnownWorld(nn.Module):
    """Gives the next token as the tables above say; it looks at the bin of column 1 and at nothing else."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens, types, attn_mask):
        assert torch.equal(types, VOCAB.types_of(tokens))
        self.calls += 1
        logits = torch.full((*tokens.shape, VOCAB.vocab_size), -30.0)
        first = VOCAB.scalar_id(1, 0)
        logits[..., first : first + 3] = PRIOR.log()
        bins = tokens[:, 4] - first  # BOS, MISS, SEP, column 0, column 1
        spectrum = VOCAB.base_spectrum["a"]
        known = (bins >= 0) & (bins < 3)
        logits[known, :, spectrum : spectrum + 2] = LIKELIHOOD[bins[known]].log()[:, None]
        # Whatever the rest of the sequence is, its probability differs from bin to bin: none of it is evidence.
        logits[known, :, VOCAB.sep_id] = bins[known, None].float()
        return logits * self.scale


def sequence(spectrum, scalars=(0, None), image=None):
    return encode_sequence(VOCAB, image=image, scalars=list(scalars), spectra={"a": spectrum})


def log_p(tokens):
    """log p(spectrum token | bin), normalised with all that the world thinks possible there."""
    logits = torch.stack([LIKELIHOOD.log()[:, token] for token in tokens]).sum(0)
    others = torch.stack([LIKELIHOOD.sum(1) + PRIOR.sum() + torch.arange(3.0).exp()]).log()[0]
    return logits - len(tokens) * others


def test_without_evidence_after_it_the_distribution_is_the_models_own():
    world = KnownWorld()
    found = column_probabilities(world, [sequence(None), sequence(None, scalars=(2, 1))], VOCAB, 1, batch_size=6)
    assert torch.allclose(found, PRIOR.expand(2, 3), atol=1e-6)
    assert world.calls == 1


@pytest.mark.parametrize("tokens", [[0], [1], [1, 1, 0], [0, 0, 0, 0]])
def test_tokens_after_it_count_by_bayes_rule(tokens):
    expected = (PRIOR.log() + log_p(tokens)).softmax(0)
    found = column_probabilities(KnownWorld(), [sequence(tokens)], VOCAB, 1)
    assert torch.allclose(found[0], expected, atol=1e-5)


def test_with_the_scalars_last_a_spectrum_comes_before_them_and_is_not_evidence_by_bayes_rule():
    torch.manual_seed(0)
    model = CausalTransformerLM(VOCAB.vocab_size, 8, 16, 2, 2, 32, 0.0, 32).eval()
    sequences = [sequence([1, 0, 1], scalars=(2, bin), image=image) for bin in (None, 1) for image in (None, [0, 1])]
    found = column_probabilities(model, sequences, VOCAB, 1, scalars_last=True, batch_size=6)
    for asked, probabilities in zip(sequences, found, strict=True):
        moved = move_scalars_last(asked, VOCAB)
        logits = model(moved["tokens"][None], moved["types"][None])[0, -4]  # column 0; column 1, SEP and EOS follow
        assert moved["tokens"][-4] == VOCAB.scalar_id(0, 2)
        first = VOCAB.scalar_id(1, 0)
        assert torch.allclose(probabilities, logits[first : first + 3].softmax(0), atol=1e-6)
    assert not torch.allclose(found[0], column_probabilities(model, sequences[:1], VOCAB, 1)[0], atol=1e-3)


def test_columns_behind_the_one_asked_for_are_evidence_with_the_scalars_last_too():
    torch.manual_seed(0)
    model = CausalTransformerLM(VOCAB.vocab_size, 8, 16, 2, 2, 32, 0.0, 32).eval()
    found = column_probabilities(model, [sequence([1, 0], scalars=(None, 2))], VOCAB, 0, scalars_last=True)[0]
    by_hand = []
    for bin in range(3):
        moved = move_scalars_last(sequence([1, 0], scalars=(bin, 2)), VOCAB)
        tokens = moved["tokens"]
        logs = model(tokens[None], moved["types"][None])[0].log_softmax(-1)
        by_hand.append(logs[-5, tokens[-4]] + logs[-4, tokens[-3]])
    assert torch.allclose(found, torch.stack(by_hand).softmax(0), atol=1e-5)


def test_the_true_bin_and_the_batch_do_not_change_the_answer():
    sequences = [sequence(tokens, scalars=(0, bin)) for tokens in ([0], [1, 1, 0], None) for bin in (None, 0, 2)]
    found = column_probabilities(KnownWorld(), sequences, VOCAB, 1, batch_size=256)
    for size in (1, 7):
        assert torch.allclose(
            column_probabilities(KnownWorld(), sequences, VOCAB, 1, batch_size=size), found, atol=1e-6
        )
    for first in range(0, 9, 3):
        assert torch.allclose(found[first : first + 3], found[first].expand(3, 3), atol=1e-6)


def test_a_transformer_is_asked_as_by_hand():
    torch.manual_seed(0)
    model = CausalTransformerLM(VOCAB.vocab_size, 8, 16, 2, 2, 32, 0.5, 32)
    model.train()
    asked = sequence([1, 0], image=[0, 1, 1])
    found = column_probabilities(model, [asked], VOCAB, 0)[0]
    assert model.training
    model.eval()
    by_hand = []
    for bin in range(3):
        tokens = asked["tokens"].clone()
        place = 5  # BOS, three patches, SEP
        tokens[place] = VOCAB.scalar_id(0, bin)
        logs = model(tokens[None], VOCAB.types_of(tokens)[None])[0].log_softmax(-1)
        counted = [place, *(position for position in range(place + 1, len(tokens)) if tokens[position] >= 5)]
        by_hand.append(sum(logs[position - 1, tokens[position]] for position in counted))
    assert torch.allclose(found, torch.stack(by_hand).softmax(0), atol=1e-5)


def test_expected_vectors_are_those_of_the_places_that_hold_the_modality():
    torch.manual_seed(0)
    model = CausalTransformerLM(VOCAB.vocab_size, 8, 16, 1, 2, 32, 0.0, 32)
    codebook = torch.tensor([[0.0, 1.0], [2.0, -4.0]])
    sequences = [sequence([1], image=image) for image in ([0, 1], [1, 1])]
    found = expected_vectors(model, sequences, VOCAB.base_image, codebook, batch_size=1)
    assert found.shape == (2, 2, 2)
    tokens = sequences[1]["tokens"][None]
    logits = model(tokens, VOCAB.types_of(tokens))[0, :2, VOCAB.base_image : VOCAB.base_image + 2]
    assert torch.allclose(found[1], logits.softmax(-1) @ codebook, atol=1e-5)


def test_hidden_columns_are_miss_and_nothing_else_changes():
    before = sequence([1], scalars=(2, 1))
    after = hide_columns([before], VOCAB, [1])[0]
    changed = (before["tokens"] != after["tokens"]).nonzero().flatten().tolist()
    assert changed == [4]
    assert after["tokens"][4] == VOCAB.miss_id == after["types"][4]
    assert before["tokens"][4] == VOCAB.scalar_id(1, 1)


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ConfigError, match="column 2 is out of range"):
        column_probabilities(KnownWorld(), [sequence([1])], VOCAB, 2)
    with pytest.raises(ConfigError, match=r"sequences\[1\] has no position for each of the 2 columns"):
        column_probabilities(KnownWorld(), [sequence([1]), encode_sequence(VOCAB)], VOCAB, 1)
    first, codebook = VOCAB.base_spectrum["a"], [[0.0], [1.0]]
    for tokens, size in (([[0], [0, 1]], 64), ([None, None], 64), ([[0], [0, 1]], 1)):
        with pytest.raises(ConfigError, match="tokens of the modality"):
            expected_vectors(KnownWorld(), [sequence(part) for part in tokens], first, codebook, batch_size=size)
