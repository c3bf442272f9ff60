"""Shared parts of the tests of astronomy losses: the specification's example and reference losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.astro import build_vocab_spec

IMAGE = [[0.0, 0.0], [2.0, 4.0]]
CENTERS = [[1.0, 3.0], [10.0, 30.0]]
SPECTRUM = {"a": [[0.0], [4.0]], "b": [[10.0], [20.0]]}
TARGETS = torch.tensor([[5, 8, 10, 12, 13]])


def tiny_vocab():
    return build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2)


def tiny_logits(*raised, dtype=torch.float32):
    """Return logits that are zero, or log 3 at the given (position, id)."""
    logits = torch.zeros(1, 5, 15, dtype=dtype)
    for position, id in raised:
        logits[0, position, id] = torch.log(torch.tensor(3.0))
    return logits.requires_grad_()


SECOND_ROW = [(0, 6), (1, 8), (2, 9), (3, 12), (4, 14)]


def random_case(seed=0, *, batch=(3, 40), width=16, dtype=torch.float32):
    """Return a vocabulary of 7 image, 4 x 5 scalar and 3 x 6 spectrum ids, codebooks, padded targets and states."""
    generator = torch.Generator().manual_seed(seed)
    vocab = build_vocab_spec(7, 20, 6, ["a", "b", "c"], scalar_bins=5)
    targets = torch.randint(0, vocab.vocab_size, batch, generator=generator)
    targets[:, -4:] = vocab.pad_id
    books = (
        torch.randn(7, 3, generator=generator) + 5,
        {"a": torch.randn(6, 2, generator=generator), "b": torch.randn(6, 4, generator=generator) - 3,
         "c": torch.randn(6, 4, generator=generator)},
        torch.randn(4, 5, generator=generator).sort(1).values * 2,
    )  # fmt: skip
    hidden = torch.randn(*batch, width, generator=generator).to(dtype)
    head = (torch.randn(vocab.vocab_size, width, generator=generator) / 3).to(dtype)
    return vocab, targets, books, hidden, head


def plain_terms(logits, targets, vocab, image, spectrum, centers):
    """Return sums and counts of every term over all positions, by autograd, one position at a time."""
    logits, targets = logits.reshape(-1, vocab.vocab_size), targets.reshape(-1)
    kept = targets != vocab.pad_id
    terms = {"ce": (F.cross_entropy(logits[kept], targets[kept], reduction="sum"), int(kept.sum()))}
    centers = torch.as_tensor(centers).reshape(vocab.n_columns, vocab.scalar_bins)
    for term in ("img", "sca", *(f"spec/{group}" for group in vocab.spectrum_groups)):
        total, count = logits.sum() * 0, 0
        for row, target in zip(logits, targets.tolist(), strict=True):
            if term == "img":
                first, codes = vocab.base_image, torch.as_tensor(image)
            elif term == "sca":
                column = max(0, target - vocab.base_scalar) // vocab.scalar_bins % vocab.n_columns
                first, codes = vocab.base_scalar + column * vocab.scalar_bins, centers[column][:, None]
            else:
                first, codes = vocab.base_spectrum[term[5:]], torch.as_tensor(spectrum[term[5:]])
            if first <= target < first + len(codes):
                codes = codes.to(row.dtype)
                expected = row[first : first + len(codes)].softmax(0) @ codes
                total = total + (expected - codes[target - first]).square().mean()
                count += 1
        terms[term] = (total, count)
    return terms


def plain_loss(terms, *, use_ce=True, weights=(0.1, 0.1, 0.1), totals=None):
    """Return the loss from `plain_terms`, each divided by its total."""
    totals = totals or {term: count for term, (_, count) in terms.items()}
    occurring = sum(total > 0 for term, total in totals.items() if term.startswith("spec/"))
    loss = 0.0
    for term, (total, _) in terms.items():
        if not totals[term] or (term == "ce" and not use_ce):
            continue
        weight = {"ce": 1.0, "img": weights[0], "sca": weights[1]}.get(term, weights[2] / max(1, occurring))
        loss = loss + weight * total / totals[term]
    return loss


class NewTensors(TorchDispatchMode):
    """Recorder of the number of elements of every new tensor except views."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.sizes.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return result
