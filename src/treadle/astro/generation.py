"""Continuing sequences one token at a time.

Shapes: B = sequences, L = positions of the prompt, N = new positions, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.astro.grammar import SequenceGrammar
from treadle.engine.evaluation import evaluation_mode
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within

if TYPE_CHECKING:
    from treadle.astro.model import CausalTransformerLM
    from treadle.astro.vocab import VocabSpec


def generate(
    model: CausalTransformerLM,
    tokens: Tensor,
    *,
    types: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    vocab: VocabSpec | None,
    generator: torch.Generator | None,
    legal_only: bool,
) -> tuple[Tensor, Tensor]:
    """Continue sequences; `CausalTransformerLM.generate` is the public way to call this and documents it."""
    _check(model, tokens, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)
    _check_vocab(model, vocab, legal_only=legal_only)
    end = min(tokens.shape[1] + max_new_tokens, model.max_len)
    with evaluation_mode(model):
        rule = _LegalId(vocab, tokens) if legal_only and vocab is not None else _AnyId(vocab, types)
        caches = model.new_caches(end)
        all_tokens, all_types = [tokens], [types]
        for _ in range(end - tokens.shape[1]):
            if rule.all_ended():
                break
            hidden_BLD = model.extend(all_tokens[-1], all_types[-1], caches)
            logits_BV = rule.restrict(model.head(hidden_BLD[:, -1]).float())
            ids_B = _choose(logits_BV, temperature=temperature, top_k=top_k, generator=generator)
            all_tokens.append(ids_B[:, None].to(tokens.dtype))
            all_types.append(rule.follow(ids_B)[:, None].to(types.dtype))
    return torch.cat(all_tokens, dim=1), torch.cat(all_types, dim=1)


class _AnyId:
    """Any id may follow; its type is that of the id, or without a vocabulary the last of the prompt."""

    def __init__(self, vocab: VocabSpec | None, types_BL: Tensor):
        self._vocab = vocab
        self._types_B = types_BL[:, -1]

    def all_ended(self) -> bool:
        return False

    def restrict(self, logits_BV: Tensor) -> Tensor:
        return logits_BV

    def follow(self, ids_B: Tensor) -> Tensor:
        """Take note of the ids that were drawn and return their types."""
        return self._types_B if self._vocab is None else self._vocab.types_of(ids_B)


class _LegalId:
    """Only ids that are legal at their position may follow, and each has the type of its id."""

    def __init__(self, vocab: VocabSpec, tokens_BL: Tensor):
        self._vocab = vocab
        self._grammar = SequenceGrammar(vocab, tokens_BL.device)
        self._states_B = self._grammar.read(tokens_BL)

    def all_ended(self) -> bool:
        return bool(self._grammar.ended(self._states_B).all())

    def restrict(self, logits_BV: Tensor) -> Tensor:
        return logits_BV.masked_fill(~self._grammar.legal(self._states_B), -torch.inf)

    def follow(self, ids_B: Tensor) -> Tensor:
        self._states_B = self._grammar.advance(self._states_B, ids_B)
        return self._vocab.types_of(ids_B)


def _choose(logits_BV: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one id a row, (B,)."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    ids_BK = None
    if top_k is not None:
        logits_BV, ids_BK = logits_BV.topk(min(top_k, logits_BV.shape[1]), dim=-1)
    chances_BK = (logits_BV / temperature).softmax(dim=-1)
    device = chances_BK.device if generator is None else generator.device
    drawn_B1 = torch.multinomial(chances_BK.to(device), 1, generator=generator).to(chances_BK.device)
    return (drawn_B1 if ids_BK is None else ids_BK.gather(1, drawn_B1))[:, 0]


def _check(
    model: CausalTransformerLM,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ConfigError(f"tokens has shape {tuple(tokens.shape)}; a prompt is (B, L) with at least one position")
    if tokens.shape[1] > model.max_len:
        raise ConfigError(f"a prompt of {tokens.shape[1]} positions is longer than max_len={model.max_len}")
    check_least(0, max_new_tokens=max_new_tokens)
    check_within("[0, inf)", temperature=temperature)
    check_least(1, top_k=top_k)


def _check_vocab(model: CausalTransformerLM, vocab: VocabSpec | None, *, legal_only: bool) -> None:
    if legal_only and vocab is None:
        raise ConfigError(
            "=True, but vocab=None: the legal tokens follow from the vocabulary; give it", argument="legal_only"
        )
    if vocab is not None and (vocab.vocab_size != model.vocab_size or vocab.n_types > model.n_types):
        raise ConfigError(
            f"vocab has {vocab.vocab_size} ids and {vocab.n_types} types, the model vocab_size={model.vocab_size} and "
            f"n_types={model.n_types}; give the vocabulary that the model was built for"
        )
