"""Conditional distributions of one modality given others, from a trained model.

A causal model predicts each token from those before it. The distribution of a scalar given the rest of its sequence
follows by Bayes' rule from the model's own predictions: p(bin | before, after) ∝ p(bin | before) · p(after | before,
bin). If nothing after the scalar is known, the second factor drops out.

`encode_sequence` places spectra after scalars, so the errors of all spectrum tokens accumulate in that second factor. A
model also trained with the scalars last (`move_scalars_last`) predicts them from a spectrum without it.

Shapes: N = sequences, L = positions, V = vocabulary, K = bins of a column, T = tokens of a modality, D = values behind
one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treadle.astro.sequences import collate_sequences, move_scalars_last
from treadle.astro.vocab import NUM_SPECIAL, VocabSpec
from treadle.engine.evaluation import evaluation_mode
from treadle.errors import ConfigError
from treadle.errors.arguments import checked

Sequences = Sequence[Mapping[str, Any]]


@checked
def column_probabilities(
    model: nn.Module,
    sequences: Sequences,
    vocab: VocabSpec,
    column: int,
    *,
    scalars_last: bool = False,
    batch_size: int = 256,
) -> Tensor:
    """Return the model's distribution of a scalar given everything else in its sequence.

    The token at the column itself is ignored. Known tokens after it count as evidence (one forward pass per bin); MISS
    does not: a missing measurement is not treated as evidence.

    Args:
        model: with the call ``model(tokens, types, attn_mask)``; switched to eval mode during the call.
        sequences: from `encode_sequence`, with one position for each column.
        vocab: the vocabulary.
        column: index of the column.
        scalars_last: move the scalars behind the spectra, for a model trained that way.
        batch_size: rows of one forward pass.

    Returns:
        (N, K) float32 on the CPU; rows sum to 1.

    Raises:
        ConfigError: the column is out of range, or a sequence has no position for it.

    Example:
        >>> from treadle.astro.model import CausalTransformerLM
        >>> from treadle.astro.sequences import encode_sequence
        >>> vocab = VocabSpec(2, 4, 2, ("a",), 2)
        >>> model = CausalTransformerLM(vocab.vocab_size, 8, 8, 1, 2, 16, 0.0, 16)
        >>> sequence = encode_sequence(vocab, scalars=[0, None], spectra={"a": [1, 0]})
        >>> column_probabilities(model, [sequence], vocab, 1).shape
        torch.Size([1, 2])
    """
    first_id = vocab.scalar_id(column, 0)
    section = -1 if scalars_last else 1
    if scalars_last:
        sequences = [move_scalars_last(sequence, vocab) for sequence in sequences]
    places = [_place(vocab, sequence, number, column, section) for number, sequence in enumerate(sequences)]
    rows = max(1, batch_size // vocab.scalar_bins)
    found = []
    with evaluation_mode(model):
        for start in range(0, len(sequences), rows):
            part, at = sequences[start : start + rows], torch.tensor(places[start : start + rows])
            found.append(_posterior(model, part, vocab, at, first_id))
    return torch.cat(found) if found else torch.empty(0, vocab.scalar_bins)


def _posterior(model: nn.Module, sequences: Sequences, vocab: VocabSpec, at_N: Tensor, first_id: int) -> Tensor:
    batch = collate_sequences(sequences, vocab.pad_id)
    tokens_NL, count = batch["tokens"], len(sequences)
    after_NL = torch.arange(tokens_NL.shape[1]) > at_N[:, None]
    evidence_NL = after_NL & (tokens_NL >= NUM_SPECIAL)
    bins = torch.arange(first_id, first_id + vocab.scalar_bins)
    shown = bins if bool(evidence_NL.any()) else bins[:1]  # without evidence one row serves all bins
    tokens_NKL = tokens_NL[:, None].repeat(1, len(shown), 1)
    tokens_NKL[torch.arange(count), :, at_N] = shown
    tokens = tokens_NKL.flatten(0, 1)
    mask = batch["attn_mask"].repeat_interleave(len(shown), dim=0)
    logits = _logits(model, tokens, vocab.types_of(tokens), mask)
    first_NLV = logits.reshape(count, len(shown), *logits.shape[1:])[:, 0]
    log_prior_NK = first_NLV[torch.arange(count), at_N - 1][:, bins].log_softmax(-1)
    if len(shown) == 1:
        return log_prior_NK.exp()
    log_p = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    log_p_NKL = log_p.reshape(count, len(shown), -1)
    posterior_NK: Tensor = (log_prior_NK + (log_p_NKL * evidence_NL[:, None, 1:]).sum(-1)).softmax(-1)
    return posterior_NK


@checked
def expected_vectors(
    model: nn.Module, sequences: Sequences, base: int, codebook: Any, *, batch_size: int = 64
) -> Tensor:
    """Return expected patches or segments, each given all preceding tokens of its sequence.

    Args:
        model: with the call ``model(tokens, types, attn_mask)``; switched to eval mode during the call.
        sequences: each with T tokens of the modality.
        base: the modality's first id, such as ``vocab.base_image`` or ``vocab.base_spectrum[group]``.
        codebook: (K, D), in any unit.

    Returns:
        (N, T, D) float32 on the CPU, in the codebook's unit.

    Raises:
        ConfigError: the sequences have different numbers of tokens of the modality, or none.

    Example:
        >>> from treadle.astro.model import CausalTransformerLM
        >>> from treadle.astro.sequences import encode_sequence
        >>> vocab = VocabSpec(2, 2, 2, ("a",), 2)
        >>> model = CausalTransformerLM(vocab.vocab_size, 8, 8, 1, 2, 16, 0.0, 16)
        >>> sequence = encode_sequence(vocab, image=[0, 1, 1])
        >>> expected_vectors(model, [sequence], vocab.base_image, [[0.0, 0.0], [2.0, 4.0]]).shape
        torch.Size([1, 3, 2])
    """
    values_KD = torch.as_tensor(codebook, dtype=torch.float32)
    found = []
    with evaluation_mode(model):
        for start in range(0, len(sequences), batch_size):
            batch = collate_sequences(sequences[start : start + batch_size])
            tokens = batch["tokens"]
            inside = (tokens >= base) & (tokens < base + len(values_KD))
            counts = sorted(set(inside.sum(1).tolist()))
            if len(counts) > 1 or not counts[0]:
                raise ConfigError(
                    f"they have {counts} tokens of the modality, but must all have the same number",
                    argument="sequences",
                )
            logits = _logits(model, tokens, batch["types"], batch["attn_mask"])
            chosen = logits[:, :-1][inside[:, 1:]][:, base : base + len(values_KD)]
            found.append((chosen.softmax(-1) @ values_KD).reshape(len(tokens), -1, values_KD.shape[1]))
    lengths = {len(part[0]) for part in found}
    if len(lengths) != 1:
        raise ConfigError(
            f"they have {sorted(lengths)} tokens of the modality, but must all have the same number",
            argument="sequences",
        )
    return torch.cat(found)


@checked
def hide_columns(sequences: Sequences, vocab: VocabSpec, columns: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return sequences with some scalar columns replaced by MISS.

    Raises:
        ConfigError: a column is out of range, or a sequence has no place for it.

    Example:
        >>> from treadle.astro.sequences import encode_sequence
        >>> vocab = VocabSpec(2, 4, 2, ("a",), 2)
        >>> hide_columns([encode_sequence(vocab, scalars=[0, 1])], vocab, [0])[0]["tokens"].tolist()
        [1, 4, 3, 4, 10, 3, 4, 3, 2]
    """
    hidden = []
    for number, sequence in enumerate(sequences):
        tokens = torch.as_tensor(sequence["tokens"]).clone()
        for column in columns:
            tokens[_place(vocab, sequence, number, column)] = vocab.miss_id
        hidden.append({"tokens": tokens, "types": vocab.types_of(tokens)})
    return hidden


def _place(vocab: VocabSpec, sequence: Mapping[str, Any], number: int, column: int, section: int = 1) -> int:
    """Return the position of a column; the scalars are the second section of a sequence (1) or the last (-1)."""
    vocab.scalar_id(column, 0)
    ends = (torch.as_tensor(sequence["tokens"]) == vocab.sep_id).nonzero().flatten().tolist()
    if len(ends) < 2 or ends[section] - ends[section - 1] != vocab.n_columns + 1:
        raise ConfigError(
            f"sequences[{number}] has no position for each of the {vocab.n_columns} columns; encode it with "
            "scalars=[None, ...] where they are missing"
        )
    return int(ends[section - 1]) + 1 + column


def _logits(model: nn.Module, tokens: Tensor, types: Tensor, attn_mask: Tensor) -> Tensor:
    device = next((parameter.device for parameter in model.parameters()), tokens.device)
    logits: Tensor = model(tokens.to(device), types.to(device), attn_mask.to(device))
    return logits.float().cpu()
