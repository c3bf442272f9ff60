"""Language models on the Python manual: corpus, tokenizer, token blocks, GPT-2, LoRA and sampling.

They are trained with ``treadle.Trainer``. transformers, tokenizers and peft are imported where they are used: ``pip
install 'treadle[hf]'``.
"""

from __future__ import annotations

from treadle.text.corpus import is_statement, load_manual, split_topics, without_repeats
from treadle.text.data import TokenBlocks, token_stream
from treadle.text.generation import sample_texts, sample_tokens
from treadle.text.model import add_lora, build_gpt2
from treadle.text.ngrams import bits_per_byte, ngram_losses
from treadle.text.packing import skip_packing_check
from treadle.text.tokenizer import as_transformers, train_tokenizer

__all__ = [
    "TokenBlocks",
    "add_lora",
    "as_transformers",
    "bits_per_byte",
    "build_gpt2",
    "is_statement",
    "load_manual",
    "ngram_losses",
    "sample_texts",
    "sample_tokens",
    "skip_packing_check",
    "split_topics",
    "token_stream",
    "train_tokenizer",
    "without_repeats",
]
