"""The tokenizer: any text comes back, and the same texts give the same tokens in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from treadle.text import as_transformers, load_manual, train_tokenizer
from treadle.text.tokenizer import END

TEXTS = [load_manual()[name] for name in ("with", "try", "lambda", "pass")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


@pytest.mark.parametrize("text", ["", " two  blanks ", "\n\ttab\r\n", "naïve “quotes” — 日本 🧵", "\0\x7f", TEXTS[0]])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_it_has_learned_merges_of_its_text_and_keeps_to_the_size(tokenizer):
    assert tokenizer.get_vocab_size() == 400
    assert len(tokenizer.encode(TEXTS[0]).ids) < 0.6 * len(TEXTS[0])


def test_the_end_token_is_0_and_stands_for_itself(tokenizer):
    assert tokenizer.token_to_id(END) == 0
    assert tokenizer.encode(f"a{END}b").ids[1] == 0


def test_other_processes_with_other_hash_seeds_learn_the_same(tokenizer):
    program = (
        "from treadle.text import load_manual, train_tokenizer\n"
        "texts = [load_manual()[name] for name in ('with', 'try', 'lambda', 'pass')]\n"
        "print(train_tokenizer(texts, 400).to_str(), end='')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == tokenizer.to_str()


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(TEXTS, 256)


def test_transformers_reads_what_was_saved(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    as_transformers(tokenizer).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXTS[1])["input_ids"] == tokenizer.encode(TEXTS[1]).ids
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 0, 0)


@pytest.mark.parametrize("texts", [[], [""], "", iter([])])
def test_no_text_is_refused(texts):
    with pytest.raises(ValueError, match="texts: holds no text"):
        train_tokenizer(texts, 300)


def test_a_single_text_is_not_read_letter_by_letter():
    assert train_tokenizer("pass pass", 300).to_str() == train_tokenizer(["pass pass"], 300).to_str()
    assert train_tokenizer("pass pass", 300).get_vocab_size() > 257
