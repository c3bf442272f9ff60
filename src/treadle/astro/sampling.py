"""Sampling of loss positions on the host, so that no step synchronises with the device.

The number of positions of a modality depends on the data. The targets of a training batch are on the CPU before they
are moved, so positions are chosen there, laid out for the device, and sent with the batch.

Shapes: N = positions of a batch (B·L), G = neighbouring groups of one modality (spectrum groups, scalar columns),
M = slots of each group, K = ids of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from treadle.astro.loss_inputs import LossConfig, check_sample_k
from treadle.astro.vocab import VocabSpec
from treadle.errors import ConfigError

# Maximum number of logits in a block: its float32 copies are a few times 32 MiB for any number of positions.
_MAX_LOGITS = 1 << 23
# Groups share a block as long as at most half of its slots are empty; this few empty slots are always allowed.
_FREE_SLOTS = 256


def sample_positions(mask: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Sample up to k True positions of a mask, uniformly without replacement.

    Sampling runs on the CPU, so the result does not depend on the mask's device; a mask on an accelerator is copied to
    the host.

    Args:
        mask: (B, L) bool, True = may be sampled.
        k: maximum number of positions; if there are no more than k, all are returned without sampling.
        generator: a CPU generator; None uses torch's global one.

    Returns:
        Indices into the flattened mask, long, ascending, on the mask's device.

    Raises:
        ConfigError: k is below 1, the mask is not bool, or the generator is not on the CPU.

    Example:
        >>> sample_positions(torch.tensor([[True, False], [True, True]]), 4)
        tensor([0, 2, 3])
    """
    check_sample_k(k)
    if mask.dtype != torch.bool:
        raise ConfigError(f"mask has dtype {mask.dtype} but must be bool, True = may be drawn")
    if generator is not None and generator.device.type != "cpu":
        raise ConfigError(f"generator is on {generator.device}: positions are drawn on the CPU; give torch.Generator()")
    positions = mask.flatten().nonzero().squeeze(1)
    if len(positions) <= k:
        return positions
    drawn = torch.randperm(len(positions), generator=generator)[:k].sort().values
    return positions[drawn.to(positions.device)]


@dataclass(frozen=True)
class Block:
    """Positions of G adjacent groups with M slots each, so that one batched product serves all of them.

    Attributes:
        terms: the term of each group, or one for all.
        first_group: index of the first group within its modality.
        first_id: first id of the first group.
        num_ids: ids per group.
        rows_GM: long, the flat position in each slot; an empty slot repeats another.
        codes_GM: long, the target within its group; -1 in an empty slot.
        filled: long (n,), flat indices of the non-empty slots, ascending.
    """

    terms: tuple[str, ...]
    first_group: int
    first_id: int
    num_ids: int
    rows_GM: Tensor
    codes_GM: Tensor
    filled: Tensor


@dataclass(frozen=True)
class LossPositions:
    """Positions chosen for one batch by `choose_positions`; numbers on the host, indices on any device.

    Attributes:
        counts: number of positions that each term averages over: ``ce``, ``img``, ``sca`` and ``spec/<group>``.
        num_rows: N, positions of the batch.
        ce_rows: long, the flat positions that count in the cross-entropy; None if all do.
        ce_targets: long, their targets.
        blocks: the positions of the reconstruction terms.
    """

    counts: Mapping[str, int]
    num_rows: int
    ce_rows: Tensor | None
    ce_targets: Tensor
    blocks: tuple[Block, ...]

    @property
    def terms(self) -> list[str]:
        """The terms that have positions."""
        return [term for term, count in self.counts.items() if count]

    def to(self, device: torch.device | str) -> LossPositions:
        """Return the positions on a device, copied in one asynchronous transfer."""
        device = torch.device(device)
        if self.ce_targets.device == device or (device.index is None and self.ce_targets.device.type == device.type):
            return self
        tensors = [self.ce_targets, *([] if self.ce_rows is None else [self.ce_rows])]
        for block in self.blocks:
            tensors += [block.rows_GM, block.codes_GM, block.filled]
        packed = torch.cat([tensor.flatten() for tensor in tensors])
        if device.type == "cuda" and packed.device.type == "cpu":
            packed = packed.pin_memory()
        parts = torch.split(packed.to(device, non_blocking=True), [tensor.numel() for tensor in tensors])
        moved = iter(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
        return replace(
            self,
            ce_targets=next(moved),
            ce_rows=None if self.ce_rows is None else next(moved),
            blocks=tuple(
                replace(block, rows_GM=next(moved), codes_GM=next(moved), filled=next(moved)) for block in self.blocks
            ),
        )


def choose_positions(
    targets: Tensor,
    vocab: VocabSpec,
    config: Any = None,
    *,
    use_ce: bool = True,
    generator: torch.Generator | None = None,
) -> LossPositions:
    """Choose the positions of every term for one batch of targets.

    Sampled in the order image, scalars, spectrum groups as in the vocabulary; a term with weight 0 draws nothing.

    Args:
        targets: ids of any shape, usually ``tokens[:, 1:]`` (B, L) on the CPU; on an accelerator they are copied to the
            host, which synchronises.
        vocab: the vocabulary.
        config: a `LossConfig`, or a mapping or dataclass that it accepts.
        use_ce: whether to include the cross-entropy.
        generator: a CPU generator; None uses torch's global one.

    Raises:
        ConfigError: a target is not an id of the vocabulary, or a setting is invalid.

    Example:
        >>> from treadle.astro.vocab import build_vocab_spec
        >>> vocab = build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2)
        >>> choose_positions(torch.tensor([[5, 8, 10], [12, 13, 0]]), vocab).counts
        {'ce': 5, 'img': 1, 'sca': 2, 'spec/a': 1, 'spec/b': 1}
    """
    config = LossConfig.read(config)
    flat = flat_ids(targets, vocab.vocab_size)
    weights = config.term_weights(vocab)
    counts = dict.fromkeys(["ce", "img", "sca", *(f"spec/{group}" for group in vocab.spectrum_groups)], 0)
    ce_rows, ce_targets = valid_positions(flat, vocab.pad_id) if use_ce else (None, flat[:0])
    counts["ce"] = len(ce_targets)
    blocks: list[Block] = []
    if weights["img"]:
        rows = _drawn(flat, vocab.base_image, vocab.v_image, config.sample_k, generator)
        blocks += _blocks(("img",), flat, rows, vocab.base_image, 1, vocab.v_image)
    if weights["sca"]:
        rows = _drawn(flat, vocab.base_scalar, vocab.v_scalar, config.sample_k, generator)
        blocks += _blocks(("sca",), flat, rows, vocab.base_scalar, vocab.n_columns, vocab.scalar_bins)
    if weights["spec"]:
        share = max(1, config.sample_k // len(vocab.spectrum_groups))
        drawn = [_drawn(flat, base, vocab.v_spectra, share, generator) for base in vocab.base_spectrum.values()]
        terms = tuple(f"spec/{group}" for group in vocab.spectrum_groups)
        blocks += _blocks(terms, flat, torch.cat(drawn), vocab.first_spectrum_id, len(terms), vocab.v_spectra)
    for block in blocks:
        for group, count in enumerate((block.codes_GM >= 0).sum(1).tolist()):
            counts[block.terms[group % len(block.terms)]] += count
    return LossPositions(counts, flat.numel(), ce_rows, ce_targets, tuple(blocks))


def valid_positions(flat: Tensor, pad_id: int) -> tuple[Tensor | None, Tensor]:
    """Return the positions whose target is not padding (None for all) and their targets."""
    rows = (flat != pad_id).nonzero().squeeze(1)
    return (None, flat) if len(rows) == len(flat) else (rows, flat[rows])


def flat_ids(targets: Tensor, vocab_size: int) -> Tensor:
    """Return targets as a flat row of ids on the host.

    Raises:
        ConfigError: a target is not an id of the vocabulary.
    """
    flat = targets.detach().cpu().reshape(-1)
    if flat.dtype.is_floating_point or flat.dtype == torch.bool:
        raise ConfigError(f"targets have dtype {flat.dtype}; they are ids, so give a tensor of whole numbers")
    flat = flat.long()
    ids = flat.numpy()
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ConfigError(
            f"targets from {ids.min()} to {ids.max()}: every id must lie in [0, {vocab_size}); "
            "were they made with this vocabulary?"
        )
    return flat


def _drawn(flat: Tensor, first_id: int, num_ids: int, k: int, generator: torch.Generator | None) -> Tensor:
    return sample_positions((flat >= first_id) & (flat < first_id + num_ids), k, generator)


def _blocks(
    terms: tuple[str, ...], flat: Tensor, rows: Tensor, first_id: int, num_groups: int, num_ids: int
) -> list[Block]:
    """Lay out the positions of one modality in blocks of bounded size with few empty slots."""
    rows = rows[(flat[rows] - first_id).div(num_ids, rounding_mode="floor").argsort(stable=True)]
    codes = flat[rows] - first_id
    group = codes.div(num_ids, rounding_mode="floor")
    counts = torch.bincount(group, minlength=num_groups)
    place = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[group]  # index of a position within its group
    found = []
    sizes = counts.tolist()
    for start, stop in _ranges(sizes):
        deepest = max(sizes[start:stop])
        depth = max(1, min(deepest, _MAX_LOGITS // ((stop - start) * num_ids)))
        for first, last in pairwise([*range(0, deepest, depth), deepest]):
            mine = (group >= start) & (group < stop) & (place >= first) & (place < last)
            slots = (group[mine] - start) * (last - first) + place[mine] - first
            # An empty slot repeats a position of the block, since one that was not sampled might hold anything.
            rows_GM = rows[mine][:1].repeat(stop - start, last - first)
            codes_GM = torch.full_like(rows_GM, -1)
            rows_GM.view(-1)[slots] = rows[mine]
            codes_GM.view(-1)[slots] = codes[mine] - group[mine] * num_ids
            own_terms = terms[start:stop] if len(terms) == num_groups else terms
            found.append(Block(own_terms, start, first_id + start * num_ids, num_ids, rows_GM, codes_GM, slots))
    return found


def _ranges(counts: list[int]) -> list[tuple[int, int]]:
    """Return ranges of groups, without empty groups at either end, that leave at most half of a block's slots empty."""
    found: list[tuple[int, int]] = []
    for group, count in enumerate(counts):
        if count == 0:
            continue
        if found:
            start = found[-1][0]
            together = counts[start : group + 1]
            if len(together) * max(together) <= 2 * sum(together) + _FREE_SLOTS:
                found[-1] = (start, group + 1)
                continue
        found.append((group, group + 1))
    return found
