"""Counted baselines: probabilities that sum to 1, by a second, slow way."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from treadle.text import bits_per_byte, ngram_losses

VOCAB = 6


def streams(seed):
    generator = torch.Generator().manual_seed(seed)
    train = torch.randint(0, VOCAB - 1, (40,), generator=generator)  # the last token is never seen
    return train, torch.randint(0, VOCAB, (25,), generator=generator)


def unigram(train, token):
    counts = Counter(train.tolist()[1:])
    return (counts[token] + len(counts) / VOCAB) / (len(train) - 1 + len(counts))


def bigram(train, before, token):
    followers = Counter(b for a, b in zip(train.tolist(), train.tolist()[1:], strict=False) if a == before)
    if not followers:
        return unigram(train, token)
    return (followers[token] + len(followers) * unigram(train, token)) / (sum(followers.values()) + len(followers))


@pytest.mark.parametrize("seed", range(4))
def test_losses_are_those_of_the_formula(seed):
    train, val = streams(seed)
    pairs = list(zip(val.tolist(), val.tolist()[1:], strict=False))
    losses = ngram_losses(train, val, vocab_size=VOCAB)
    assert losses["unigram"] == pytest.approx(-sum(math.log(unigram(train, b)) for _, b in pairs) / len(pairs))
    assert losses["bigram"] == pytest.approx(-sum(math.log(bigram(train, a, b)) for a, b in pairs) / len(pairs))


@pytest.mark.parametrize("before", range(VOCAB))
def test_probabilities_sum_to_one_after_every_token_also_one_never_seen(before):
    train, _ = streams(0)
    losses = [ngram_losses(train, torch.tensor([before, token]), vocab_size=VOCAB) for token in range(VOCAB)]
    for name in ("unigram", "bigram"):
        assert sum(math.exp(-loss[name]) for loss in losses) == pytest.approx(1)


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    # 100 bytes at 0.5 nats each: as 50 tokens of 1 nat, or as 25 of 2.
    assert bits_per_byte(1.0, num_tokens=50, num_bytes=100) == bits_per_byte(2.0, num_tokens=25, num_bytes=100)
    assert bits_per_byte(8 * math.log(2), num_tokens=3, num_bytes=3) == pytest.approx(8)
