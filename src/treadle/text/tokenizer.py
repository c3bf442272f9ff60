"""Training of a byte-level BPE tokenizer, lossless for any text without :data:`END` and without unknown words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.text.extras import import_extra

END = "<|endoftext|>"
"""Separator before, between and after documents, with id 0. Inside a text it is also that token, and ends a
document."""
_LEAST = 257  # every byte, and END


@checked
def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016, on bytes as in GPT-2).

    The same texts give the same tokenizer.

    Args:
        texts: training texts only, or a single one, to keep validation text out of the vocabulary.
        vocab_size: maximum number of tokens, at least 257: every byte and :data:`END`, whose id is 0.

    Returns:
        A ``tokenizers.Tokenizer``.

    Raises:
        ValueError: ``vocab_size`` is below 257, or there is no text.
        ImportError: the package ``tokenizers`` is not installed.

    Example:
        >>> tokenizer = train_tokenizer(["pass is a null operation", "pass"], 260)
        >>> tokenizer.decode(tokenizer.encode("compass").ids)
        'compass'
    """
    if vocab_size < _LEAST:
        raise ConfigError(f"must be at least {_LEAST}, every byte and {END}", argument="vocab_size", value=vocab_size)
    remaining = iter([texts] if isinstance(texts, str) else texts)
    first = next(filter(None, remaining), None)
    if first is None:
        raise ConfigError("holds no text; pass at least one string that is not empty", argument="texts")
    tokenizers = import_extra("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain([first], remaining), trainer)
    return tokenizer


@checked
def as_transformers(tokenizer: Any) -> Any:
    """Convert to a ``PreTrainedTokenizerFast``, which ``save_pretrained`` writes for ``AutoTokenizer``.

    Args:
        tokenizer: from :func:`train_tokenizer`.

    Raises:
        ImportError: the package ``transformers`` is not installed.

    Example:
        >>> # as_transformers(tokenizer).save_pretrained("run/pretrained")
    """
    transformers = import_extra("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)
