"""Autoregressive generation of token sequences.

Shapes: B = sequences, L = positions of the prompt, N = new positions, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.astro.vocab import NUM_SPECIAL, VocabSpec
from treadle.engine.evaluation import evaluation_mode
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within

if TYPE_CHECKING:
    from treadle.astro.model import CausalTransformerLM
    from treadle.astro.vocab import VocabSpec


_Arcs = dict[int, int]  # kind of id -> next state
_DEAD = 0  # state after an illegal id


class SequenceGrammar:
    """State machine that follows sequences in the order of `encode_sequence` and returns the legal next ids.

    That order is BOS; image ids or MISS, SEP; a bin or MISS for each scalar column, or one MISS for all, SEP; for each
    spectrum group its ids or MISS, SEP; EOS; then only PAD. The numbers of image and spectrum ids are free.

    Args:
        vocab: the vocabulary.
        device: device of the tokens.

    Example:
        >>> from treadle.astro.vocab import build_vocab_spec
        >>> grammar = SequenceGrammar(build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2), torch.device("cpu"))
        >>> states_B = grammar.read(torch.tensor([[1, 5]]))
        >>> grammar.legal(states_B).nonzero()[:, 1].tolist()  # SEP and the image ids
        [3, 5, 6]
    """

    def __init__(self, vocab: VocabSpec, device: torch.device):
        columns, groups = range(vocab.n_columns), vocab.spectrum_groups
        self._kinds = ["PAD", "BOS", "EOS", "SEP", "MISS", "an image id"]
        self._kinds += [f"an id of scalar column {column}" for column in columns]
        self._kinds += [f"an id of the spectrum group {group!r}" for group in groups]
        sizes = (
            [1] * NUM_SPECIAL + [vocab.v_image] + [vocab.scalar_bins] * len(columns) + [vocab.v_spectra] * len(groups)
        )
        self._kind_V = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)
        states, self._start, self._ended = _states(vocab)
        next_SK = torch.full((len(states), len(sizes)), _DEAD)
        for state, arcs in enumerate(states):
            for kind, following in arcs.items():
                next_SK[state, kind] = following
        self._next_SK = next_SK.to(device)

    def read(self, tokens_BL: Tensor) -> Tensor:
        """Return the states (B,) after the given prefixes.

        Raises:
            ConfigError: an id is not legal at its position.
        """
        states_B = torch.full((len(tokens_BL),), self._start, device=tokens_BL.device)
        passed = [states_B]
        for tokens_B in tokens_BL.unbind(1):
            passed.append(self.advance(passed[-1], tokens_B))
        dead = (torch.stack(passed, dim=1) == _DEAD).nonzero()  # one device synchronisation for the whole prompt
        if len(dead):
            row, position = dead[0].tolist()
            self._refuse(tokens_BL, row, position - 1, passed[position - 1][row])
        return passed[-1]

    def _refuse(self, tokens_BL: Tensor, row: int, position: int, state: Tensor) -> None:
        legal = (self._next_SK[state] != _DEAD).tolist()
        allowed = " or ".join(kind for kind, is_legal in zip(self._kinds, legal, strict=True) if is_legal)
        raise ConfigError(
            f"tokens[{row}, {position}]={int(tokens_BL[row, position])} is not legal there: {allowed} must follow; "
            "begin prompts like sequences of encode_sequence, or omit vocab to generate without this check"
        )

    def advance(self, states_B: Tensor, ids_B: Tensor) -> Tensor:
        """Return the states (B,) after one more id per row."""
        return self._next_SK[states_B, self._kind_V[ids_B]]

    def legal(self, states_B: Tensor) -> Tensor:
        """Return (B, V) bool, True = the id is legal next."""
        return (self._next_SK[states_B] != _DEAD)[:, self._kind_V]

    def ended(self, states_B: Tensor) -> Tensor:
        """Return (B,) bool, True = the sequence has reached EOS."""
        return states_B == self._ended


def _states(vocab: VocabSpec) -> tuple[list[_Arcs], int, int]:
    """Build the states from last to first; return them with the first and the last."""
    pad, bos, eos, sep, miss, image = range(NUM_SPECIAL + 1)
    first_column = image + 1
    first_group = first_column + vocab.n_columns
    states: list[_Arcs] = [{}]

    def add(arcs: _Arcs) -> int:
        states.append(arcs)
        return len(states) - 1

    def add_run(kind: int, following: int) -> int:
        """Add one or more ids of a kind, or MISS, followed by SEP."""
        more = add({sep: following})
        states[more][kind] = more
        return add({kind: more, miss: add({sep: following})})

    ended = add({})
    states[ended][pad] = ended
    following = add({eos: ended})
    for kind in reversed(range(first_group, first_group + len(vocab.spectrum_groups))):
        following = add_run(kind, following)
    after_scalars = following
    following = second = add({sep: after_scalars})
    for kind in reversed(range(first_column, first_group)):
        second, following = following, add({kind: following, miss: following})
    # MISS at the first column may also mean that the whole modality is absent, followed directly by SEP.
    states[following][miss] = add({**states[second], sep: after_scalars})
    following = add_run(image, following)
    return states, add({bos: following}), ended


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
    """Continue sequences; see `CausalTransformerLM.generate`, the public interface."""
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
    """Unconstrained generation; types come from the vocabulary, or without one from the last prompt position."""

    def __init__(self, vocab: VocabSpec | None, types_BL: Tensor):
        self._vocab = vocab
        self._types_B = types_BL[:, -1]

    def all_ended(self) -> bool:
        return False

    def restrict(self, logits_BV: Tensor) -> Tensor:
        return logits_BV

    def follow(self, ids_B: Tensor) -> Tensor:
        """Record the drawn ids and return their types."""
        return self._types_B if self._vocab is None else self._vocab.types_of(ids_B)


class _LegalId:
    """Generation restricted to legal ids; types come from the vocabulary."""

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
    """Draw one id per row, (B,)."""
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
        raise ConfigError("=True needs vocab, which defines the legal tokens", argument="legal_only")
    if vocab is not None and (vocab.vocab_size != model.vocab_size or vocab.n_types > model.n_types):
        raise ConfigError(
            f"vocab has {vocab.vocab_size} ids and {vocab.n_types} types, the model vocab_size={model.vocab_size} and "
            f"n_types={model.n_types}; give the vocabulary that the model was built for"
        )
