"""N-gram baselines: losses of a unigram and a bigram model."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from torch import Tensor

from treadle.errors.arguments import check_least, checked


@checked
def ngram_losses(train_N: Tensor, val_N: Tensor, *, vocab_size: int) -> dict[str, float]:
    """Return the mean negative log-likelihood, in nats, of every token of a stream but the first.

    Counts come from the training stream, interpolated after Witten and Bell (1991; method C of Chen & Goodman 1999)::

        p(w | h) = (c(h w) + T(h) p(w)) / (c(h) + T(h))

    T(h) is the number of distinct tokens seen after h; p(w) is the same formula without a history, over the uniform
    distribution. There is nothing to tune, and no token has probability 0.

    Args:
        train_N: (N,) int64, tokens to count.
        val_N: (N,) int64, tokens to predict, each from the previous one.
        vocab_size: upper bound of the ids, exclusive.

    Returns:
        ``{"unigram": ..., "bigram": ...}``.

    Example:
        >>> import torch
        >>> losses = ngram_losses(torch.tensor([0, 1, 0, 1, 0]), torch.tensor([0, 1, 0, 1]), vocab_size=2)
        >>> round(losses["unigram"], 4), round(losses["bigram"], 4)
        (0.6931, 0.1823)
    """
    check_least(1, vocab_size=vocab_size)
    train, val = train_N.numpy(), val_N.numpy()
    before, after = train[:-1], train[1:]
    counts = np.bincount(after, minlength=vocab_size)
    unigram = _mixed(counts, len(after), np.count_nonzero(counts), np.full(vocab_size, 1 / vocab_size))
    pairs, pair_counts = np.unique(before * vocab_size + after, return_counts=True)
    history_counts = np.bincount(before, minlength=vocab_size)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)
    history, target = val[:-1], val[1:]
    wanted = history * vocab_size + target
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, pair_counts[place], 0)
    bigram = _mixed(seen, history_counts[history], followers[history], unigram[target])
    return {"unigram": -float(np.log(unigram[target]).mean()), "bigram": -float(np.log(bigram).mean())}


def _mixed(
    count: npt.NDArray[np.int64], total: npt.ArrayLike, distinct: npt.ArrayLike, lower: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Interpolate relative frequencies with a lower-order distribution, which alone is used for an unseen history."""
    total, distinct = np.asarray(total), np.asarray(distinct)
    mixed = (count + distinct * lower) / np.maximum(total + distinct, 1)
    return np.asarray(np.where(total > 0, mixed, lower))


@checked
def bits_per_byte(loss: float, *, num_tokens: int, num_bytes: int) -> float:
    """Convert a mean loss in nats per token to bits per byte of text, which does not depend on the tokenizer.

    Example:
        >>> bits_per_byte(math.log(2), num_tokens=10, num_bytes=20)
        0.5
    """
    check_least(1, num_tokens=num_tokens, num_bytes=num_bytes)
    return loss * num_tokens / (math.log(2) * num_bytes)
