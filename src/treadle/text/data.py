"""Packing of documents into blocks of tokens.

Shapes: N tokens of a stream, B blocks, L tokens in a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from treadle.errors.arguments import check_least, checked

IGNORED = -100
"""Label of an ignored position, as in torch's cross-entropy and transformers."""


@checked
def token_stream(tokenizer: Any, texts: Iterable[str], *, end_id: int = 0) -> Tensor:
    """Concatenate documents into one stream, with an end token before, between and after them.

    Args:
        tokenizer: with ``encode(text).ids``.
        texts: the documents.
        end_id: id of the end token.

    Returns:
        (N,) int64.

    Example:
        >>> from treadle.text.tokenizer import train_tokenizer
        >>> tokenizer = train_tokenizer(["ab"], 257)
        >>> token_stream(tokenizer, ["a", "b"]).tolist()[::2]
        [0, 0, 0]
    """
    ids = [end_id]
    for text in texts:
        ids += [*tokenizer.encode(text).ids, end_id]
    return torch.tensor(ids)


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Data set of a token stream packed into blocks, in which every token but the first is predicted exactly once.

    A block starts with the last token of the previous one, which is input but not predicted again. Documents here have
    50 to 15,000 tokens: padding each to whole blocks would waste computation, and truncating each would show the model
    fewer beginnings. The last block is padded, and padding is ignored.

    Items are ``{"input_ids": (L,) int64, "labels": (L,) int64}``. Labels are the ids themselves, since causal models of
    transformers shift them, and :data:`IGNORED` at the first position of a block and at padding.

    Args:
        tokens_N: a token stream, int64.
        length: L, at least 2.
        pad_id: padding id for the last block.

    Attributes:
        num_targets: number of predicted tokens, N - 1.

    Raises:
        ValueError: ``length`` is below 2, or the stream has fewer than 2 tokens, or another shape or dtype.

    Example:
        >>> blocks = TokenBlocks(torch.arange(1, 7), 4)
        >>> [block["input_ids"].tolist() for block in blocks], [block["labels"].tolist() for block in blocks]
        ([[1, 2, 3, 4], [4, 5, 6, 0]], [[-100, 2, 3, 4], [-100, 5, 6, -100]])
    """

    @checked
    def __init__(self, tokens_N: Tensor, length: int, *, pad_id: int = 0):
        check_least(2, length=length)
        if tokens_N.ndim != 1 or tokens_N.dtype != torch.int64:
            raise ValueError(
                f"tokens_N is a {tokens_N.dtype} tensor of shape {tuple(tokens_N.shape)}: it must be one stream of "
                "token ids, shape (N,) and dtype torch.int64"
            )
        if len(tokens_N) < 2:
            raise ValueError(
                f"tokens_N has {len(tokens_N)} tokens: it must have at least 2, or there is nothing to predict"
            )
        self.num_targets = len(tokens_N) - 1
        num_blocks = -(-self.num_targets // (length - 1))
        padding = num_blocks * (length - 1) - self.num_targets
        ids_N = torch.cat([tokens_N, tokens_N.new_full((padding,), pad_id)])
        labels_N = torch.cat([tokens_N, tokens_N.new_full((padding,), IGNORED)])
        self.input_ids_BL = ids_N.unfold(0, length, length - 1).clone()
        self.labels_BL = labels_N.unfold(0, length, length - 1).clone()
        self.labels_BL[:, 0] = IGNORED

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All blocks as tensors (B, L) by name, for a ``TensorLoader``."""
        return {"input_ids": self.input_ids_BL, "labels": self.labels_BL}

    def __len__(self) -> int:
        return len(self.input_ids_BL)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return {"input_ids": self.input_ids_BL[index], "labels": self.labels_BL[index]}
