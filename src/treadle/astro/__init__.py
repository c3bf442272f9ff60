"""Sequences of image, scalar and spectrum tokens of one object, trained on the values that the tokens stand for.

Importing this needs torch and numpy only.
"""

from __future__ import annotations

from treadle.astro.sequences import collate_sequences, encode_sequence
from treadle.astro.vocab import VocabSpec, build_vocab_spec

__all__ = [
    "VocabSpec",
    "build_vocab_spec",
    "collate_sequences",
    "encode_sequence",
]
