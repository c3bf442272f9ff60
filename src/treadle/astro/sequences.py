"""Encoding of an object as a sequence of ids and types, and collation of sequences.

Shapes: B = sequences, L = length of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treadle.astro.vocab import VocabSpec
from treadle.errors import ConfigError, refuse_unknown


def encode_sequence(
    vocab: VocabSpec,
    *,
    image: Sequence[int] | Tensor | None = None,
    scalars: Sequence[int | None] | None = None,
    spectra: Mapping[str, Sequence[int] | Tensor | None] | None = None,
    max_len: int | None = None,
) -> dict[str, Tensor]:
    """Encode one object as BOS, image, SEP, scalars, SEP, each spectrum group followed by SEP, and EOS.

    Anything absent is replaced by one MISS, so every object has its modalities in the same order.

    Args:
        vocab: the vocabulary.
        image: indices into the image codebook; None or empty is absent.
        scalars: one bin per column, None where it is missing; None means that the whole modality is absent.
        spectra: for each group, indices into its codebook; a group that is omitted, None or empty is absent.
        max_len: maximum sequence length.

    Returns:
        ``tokens`` and ``types``, both long (L,).

    Raises:
        ConfigError: an index is out of range, a group is unknown, the number of columns is wrong, or the sequence is
            too long.

    Example:
        >>> from treadle.astro.vocab import build_vocab_spec
        >>> vocab = build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2)
        >>> encoded = encode_sequence(vocab, image=[0, 1], scalars=[1, None], spectra={"b": [0]})
        >>> encoded["tokens"].tolist()
        [1, 5, 6, 3, 8, 4, 3, 4, 3, 13, 3, 2]
        >>> encoded["types"].tolist()
        [1, 5, 5, 3, 6, 4, 3, 4, 3, 8, 3, 2]
    """
    spectra = spectra or {}
    refuse_unknown("spectra", spectra, vocab.spectrum_groups)
    miss = [vocab.miss_id]
    parts = {"image": [vocab.image_token_to_id(token) for token in _numbers(image)]}
    parts["scalars"] = _scalar_ids(vocab, scalars)
    for group in vocab.spectrum_groups:
        parts[group] = [vocab.spectrum_token_to_id(group, token) for token in _numbers(spectra.get(group))]
    ids = [vocab.bos_id]
    for part in parts.values():
        ids += [*(part or miss), vocab.sep_id]
    ids.append(vocab.eos_id)
    if max_len is not None and len(ids) > max_len:
        counts = ", ".join(f"{name} {len(part)}" for name, part in parts.items())
        raise ConfigError(
            f"a sequence of {len(ids)} ids ({counts}; the rest are BOS, SEP, EOS and MISS) is longer than "
            f"max_len={max_len}; give fewer tokens or a larger max_len"
        )
    tokens = torch.tensor(ids)
    return {"tokens": tokens, "types": vocab.types_of(tokens)}


def move_scalars_last(sequence: Mapping[str, Any], vocab: VocabSpec) -> dict[str, Tensor]:
    """Move the scalars of a sequence behind its spectra: BOS, image, SEP, each group and SEP, scalars, SEP, EOS.

    A causal model also trained on this order predicts scalars directly from a spectrum.

    Args:
        sequence: from `encode_sequence`.
        vocab: the vocabulary.

    Returns:
        ``tokens`` and ``types``, both long (L,).

    Raises:
        ConfigError: the sequence does not have the SEP of every modality.

    Example:
        >>> from treadle.astro.vocab import build_vocab_spec
        >>> vocab = build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2)
        >>> encoded = encode_sequence(vocab, image=[0, 1], scalars=[1, None], spectra={"b": [0]})
        >>> move_scalars_last(encoded, vocab)["tokens"].tolist()
        [1, 5, 6, 3, 4, 3, 13, 3, 8, 4, 3, 2]
    """
    tokens, types = (torch.as_tensor(sequence[part]) for part in ("tokens", "types"))
    ends = ((tokens == vocab.sep_id).nonzero().flatten() + 1).tolist()
    if len(ends) != 2 + len(vocab.spectrum_groups):
        raise ConfigError(
            f"{len(ends)} SEP; one of encode_sequence has {2 + len(vocab.spectrum_groups)}, one after the image, the "
            "scalars and each spectrum group",
            argument="sequence",
        )
    image, scalars, last = ends[0], ends[1], ends[-1]

    def moved(part: Tensor) -> Tensor:
        return torch.cat([part[:image], part[scalars:last], part[image:scalars], part[last:]])

    return {"tokens": moved(tokens), "types": moved(types)}


def _numbers(tokens: Sequence[int] | Tensor | None) -> list[int]:
    return [] if tokens is None else torch.as_tensor(tokens).reshape(-1).tolist()


def _scalar_ids(vocab: VocabSpec, scalars: Sequence[int | None] | None) -> list[int]:
    if scalars is None:
        return []
    if len(scalars) != vocab.n_columns:
        raise ConfigError(
            f"{len(scalars)} bins for {vocab.n_columns} columns; give one for each, None where it is missing",
            argument="scalars",
        )
    return [vocab.miss_id if bin is None else vocab.scalar_id(column, bin) for column, bin in enumerate(scalars)]


def collate_sequences(batch: Sequence[Mapping[str, Any]], pad_id: int = 0) -> dict[str, Tensor]:
    """Pad sequences on the right and stack them into a batch.

    Args:
        batch: mappings with ``tokens`` and ``types`` (L,), as returned by `encode_sequence`, or with ``token_ids`` and
            ``type_ids``, as returned by `MultiFieldTokenDataset`.
        pad_id: padding id; its type is 0.

    Returns:
        ``tokens`` and ``types``, long (B, L), and ``attn_mask``, bool (B, L), True = valid.

    Raises:
        ConfigError: the batch is empty, or a sequence does not have one type per token.

    Example:
        >>> batch = [{"tokens": [1, 2], "types": [1, 2]}, {"tokens": [1, 5, 2], "types": [1, 5, 2]}]
        >>> collate_sequences(batch)["attn_mask"].tolist()
        [[True, True, False], [True, True, True]]
    """
    if not batch:
        raise ConfigError("no sequences; give at least one", argument="batch")
    names = ("token_ids", "type_ids") if "token_ids" in batch[0] else ("tokens", "types")
    tokens, types = ([torch.as_tensor(item[name], dtype=torch.long) for item in batch] for name in names)
    for number, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if token.dim() != 1 or token.shape != type_.shape:
            raise ConfigError(
                f"tokens of shape {tuple(token.shape)} and types of shape {tuple(type_.shape)}; "
                "both must be (L,), one type for each token",
                argument=f"batch[{number}]",
            )
    lengths = [len(token) for token in tokens]
    return {
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=pad_id),
        "types": pad_sequence(types, batch_first=True, padding_value=0),
        "attn_mask": torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
    }
