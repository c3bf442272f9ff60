"""Sampling of spectrum tokens given the preceding tokens of a sequence.

Shapes: N = sequences, L = positions, R = draws of each, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treadle.astro.sequences import collate_sequences
from treadle.astro.vocab import VocabSpec
from treadle.engine.evaluation import evaluation_mode
from treadle.errors import ConfigError
from treadle.errors.arguments import checked


@checked
def draw_spectra(
    model: nn.Module,
    sequences: Sequence[Mapping[str, Any]],
    vocab: VocabSpec,
    *,
    draws: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw new spectrum tokens autoregressively, given all tokens before the first of them.

    The number of tokens per group is unchanged, and only ids of the group can be drawn.

    Args:
        model: with the call ``model(tokens, types, attn_mask)``; switched to eval mode during the call.
        sequences: all of one length, with spectrum ids at the same positions.
        vocab: the vocabulary.
        draws: R, samples per sequence.
        generator: on the CPU; None uses the global one.

    Returns:
        Tokens (N, R, L), int64, on the CPU.

    Raises:
        ConfigError: a sequence has no spectrum, or its positions differ.

    Example:
        >>> from treadle.astro.model import CausalTransformerLM
        >>> from treadle.astro.sequences import encode_sequence
        >>> vocab = VocabSpec(2, 4, 2, ("a",), 2)
        >>> model = CausalTransformerLM(vocab.vocab_size, vocab.n_types, 8, 1, 2, 16, 0.0, 16)
        >>> sequence = encode_sequence(vocab, scalars=[0, 1], spectra={"a": [1, 0, 1]})
        >>> draw_spectra(model, [sequence], vocab, draws=5).shape
        torch.Size([1, 5, 11])
    """
    tokens_NL = collate_sequences(sequences, vocab.pad_id)["tokens"]
    types_NL = vocab.types_of(tokens_NL)
    is_spectrum_NL = tokens_NL >= vocab.first_spectrum_id
    if not bool(is_spectrum_NL.any()) or not bool((types_NL == types_NL[0]).all()):
        raise ConfigError(
            "must have a spectrum, and its ids at the same positions in all of them", argument="sequences"
        )
    device = next((parameter.device for parameter in model.parameters()), tokens_NL.device)
    tokens = tokens_NL.repeat_interleave(draws, dim=0)
    with evaluation_mode(model):
        for position in is_spectrum_NL[0].nonzero().flatten().tolist():
            shown, types = tokens[:, :position], types_NL[0, :position].expand(len(tokens), -1)
            mask = torch.ones_like(shown, dtype=torch.bool)
            logits = model(shown.to(device), types.to(device), mask.to(device))[:, -1].float().cpu()
            first = max(base for base in vocab.base_spectrum.values() if base <= int(tokens_NL[0, position]))
            chances = logits[:, first : first + vocab.v_spectra].softmax(-1)
            tokens[:, position] = first + torch.multinomial(chances, 1, generator=generator)[:, 0]
    return tokens.reshape(len(tokens_NL), draws, -1)
