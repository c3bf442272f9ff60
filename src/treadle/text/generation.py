"""Sampling from a causal language model with a private generator.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treadle.engine.evaluation import evaluation_mode
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within, checked


@checked
def sample_tokens(
    model: Any,
    prompt_BT: Tensor,
    *,
    num_tokens: int,
    context: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """Continue each row with tokens sampled from the model, in eval mode and without touching the global RNG.

    The model re-reads the last ``context`` tokens for each new one: slower than a cache, but with learned positions a
    cache would be wrong beyond the longest block.

    Args:
        model: ``model(input_ids=(B, T)).logits`` is (B, T, V).
        prompt_BT: (B, T) int64 with T at least 1, on any device.
        num_tokens: number of tokens to sample per row.
        context: context length of the model.
        generator: CPU generator; sampling runs on the CPU, so that results do not depend on the device.
        temperature: below 1 sharpens, above 1 flattens; 0 selects the most likely token and draws nothing.
        top_k: sample only among the k most likely tokens; None among all.

    Returns:
        (B, T + num_tokens) int64 on the CPU, including the prompt.

    Raises:
        ConfigError: a value is out of range or the prompt is empty.

    Example:
        >>> from types import SimpleNamespace
        >>> class Next(torch.nn.Module):  # the token after n is n + 1
        ...     def forward(self, input_ids):
        ...         return SimpleNamespace(logits=torch.eye(9)[input_ids + 1] * 99)
        >>> sample_tokens(Next(), torch.tensor([[3]]), num_tokens=3, context=8, generator=torch.Generator())
        tensor([[3, 4, 5, 6]])
    """
    if prompt_BT.dim() != 2 or prompt_BT.shape[1] < 1:
        raise ConfigError(
            f"shape {tuple(prompt_BT.shape)}, must be (rows, tokens) with at least one token", argument="prompt_BT"
        )
    check_within("[0, inf)", temperature=temperature)
    check_least(0, num_tokens=num_tokens)
    check_least(1, context=context, top_k=top_k)
    device = next((parameter.device for parameter in model.parameters()), prompt_BT.device)
    tokens_BT = prompt_BT.cpu()
    with evaluation_mode(model):
        for _ in range(num_tokens):
            logits_BTV = model(input_ids=tokens_BT[:, -context:].to(device)).logits
            next_B = _drawn(logits_BTV[:, -1].float().cpu(), temperature, top_k, generator)
            tokens_BT = torch.cat([tokens_BT, next_B[:, None]], dim=1)
    return tokens_BT


def _drawn(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(dim=1)
    if top_k is not None and top_k < logits_BV.shape[1]:
        least_B1 = logits_BV.topk(top_k, dim=1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    probabilities_BV = torch.softmax(logits_BV / temperature, dim=1)
    return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]


@checked
def sample_texts(
    model: Any,
    tokenizer: Any,
    *,
    prompt: str = "",
    count: int,
    num_tokens: int,
    context: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    end_id: int = 0,
) -> list[str]:
    """Sample continuations of a prompt as strings that include the prompt; each ends where the model ends its document.

    Args:
        model: this and the other arguments as in :func:`sample_tokens`.
        tokenizer: with ``encode(text).ids`` and ``decode(ids)``.
        prompt: start of the document; empty lets the model begin one.
        count: number of samples.
        num_tokens: maximum number of tokens per sample.
        context: context length of the model.
        generator: CPU generator.
        temperature: 0 selects the most likely token.
        top_k: sample only among this many tokens.
        end_id: id of the token between documents.

    Example:
        >>> # sample_texts(model, tokenizer, count=3, num_tokens=50, context=64, generator=torch.Generator())
    """
    prompt_BT = torch.tensor([[end_id, *tokenizer.encode(prompt).ids]]).repeat(count, 1)
    drawn_BT = sample_tokens(
        model, prompt_BT, num_tokens=num_tokens, context=context, generator=generator, temperature=temperature,
        top_k=top_k,
    )  # fmt: skip
    texts = []
    for row in drawn_BT[:, 1:].tolist():
        end = row.index(end_id) if end_id in row else len(row)
        texts.append(tokenizer.decode(row[:end]))
    return texts
