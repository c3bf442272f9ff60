"""Grammar of token sequences: the ids that are legal next, as a state table on the device.

Shapes: B = sequences, L = positions, V = vocabulary, S = states, K = kinds of ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.astro.vocab import NUM_SPECIAL, VocabSpec
from treadle.errors import ConfigError

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
            "prompts begin as encode_sequence lays sequences out, or leave vocab out to generate without a rule"
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
