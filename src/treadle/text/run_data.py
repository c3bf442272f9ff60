"""Data of ``treadle train text``: the Python manual by topic, with topics about statements reserved for fine-tuning."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from treadle import distributed
from treadle.config.sections import as_settings
from treadle.data import TensorLoader
from treadle.errors import ConfigError
from treadle.runs.ranks import shared_rows
from treadle.text.corpus import deal, is_statement, load_manual, num_bytes, split_topics, without_repeats
from treadle.text.data import TokenBlocks, token_stream
from treadle.text.run_config import DataConfig, TextConfig
from treadle.text.tokenizer import train_tokenizer

_EVAL_BATCH = 64
_log = logging.getLogger("treadle.cli")


@dataclass(frozen=True)
class Part:
    """Topics of one split, as text and as token blocks."""

    topics: dict[str, str]
    tokens_N: Tensor
    blocks: TokenBlocks

    @property
    def num_bytes(self) -> int:
        """Size of its text in bytes."""
        return sum(map(num_bytes, self.topics.values()))

    def loader(self, batch_size: int | None = None, *, seed: int = 0) -> TensorLoader:
        """Return a shuffled loader for training, or an evaluation loader if ``batch_size`` is None.

        In distributed runs it loads this rank's part of each batch.
        """
        if batch_size is None:
            return self.eval_loader()
        return shared_rows(self.blocks.tensors, batch_size, shuffle=True, seed=seed)

    def eval_loader(self, batch_size: int | None = None) -> TensorLoader:
        """Return a loader for evaluation; None uses the batch size of a run's own evaluations."""
        return shared_rows(self.blocks.tensors, batch_size or _EVAL_BATCH)


@dataclass(frozen=True)
class TextData:
    """Tokenizer and splits; no passage is in two splits."""

    tokenizer: Any
    train: Part
    val: Part
    lora_train: Part
    lora_val: Part
    test: Part | None = None
    """Evaluated once, at the end; None if disabled by the settings."""
    lora_test: Part | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """Splits by name, without disabled ones."""
        names = ("train", "val", "test", "lora_train", "lora_val", "lora_test")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the text and the tokenizer, since the manual differs between Python versions."""
        digest = hashlib.sha256(self.tokenizer.to_str().encode())
        topics = {name: text for part in self.parts.values() for name, text in part.topics.items()}
        for name, text in sorted(topics.items()):
            digest.update(f"\0{name}\0{text}".encode())
        return digest.hexdigest()


def prepare_data(config: TextConfig) -> TextData:
    """Load the manual, remove repeated passages, split the topics and pack them into blocks.

    Raises:
        ConfigError: a setting is out of range, or a split would be empty.
    """
    manual = load_manual()
    names = sorted(manual, key=lambda name: (len(manual[name]), name))[: config.data.max_topics]
    topics = without_repeats({name: manual[name] for name in names})
    statements = {name: text for name, text in topics.items() if is_statement(manual[name])}
    others = {name: text for name, text in topics.items() if name not in statements}
    seed = config.data.split_seed
    with as_settings("data", vars(config.data)):
        others, test = _without_test(others, config.data.test_fraction, seed, usual=0.1)
        train, val = split_topics(others, val_fraction=config.data.val_fraction, seed=seed)
        tokenizer = train_tokenizer(train.values(), config.data.vocab_size)
    with as_settings("lora", vars(config.lora)):
        statements, lora_test = _without_test(statements, config.lora.test_fraction, seed, usual=0.25)
        lora_train, lora_val = split_topics(statements, val_fraction=config.lora.val_fraction, seed=seed)

    def part(topics: Mapping[str, str]) -> Part:
        tokens_N = token_stream(tokenizer, topics.values())
        return Part(dict(topics), tokens_N, TokenBlocks(tokens_N, config.data.block_length))

    tests = [part(topics) if topics else None for topics in (test, lora_test)]
    return TextData(tokenizer, part(train), part(val), part(lora_train), part(lora_val), *tests)


def warn_of_untrained(settings: DataConfig, data: TextData) -> None:
    """Warn of rows of the model's embeddings that the training text cannot train."""
    learned, longest = data.tokenizer.get_vocab_size(), len(data.train.tokens_N)
    if settings.vocab_size > learned:
        _log.warning(
            "data.vocab_size=%d: the training text yields %d tokens, so %d rows of the embedding are never trained; "
            "set data.vocab_size=%d", settings.vocab_size, learned, settings.vocab_size - learned, learned,
        )  # fmt: skip
    if settings.block_length > longest:
        _log.warning(
            "data.block_length=%d: the training text has %d tokens, so the rest of its one block is padding and later "
            "positions are never trained; set data.block_length to at most %d",
            settings.block_length, longest, longest,
        )  # fmt: skip


def _without_test(
    topics: dict[str, str], share: float | None, seed: int, *, usual: float
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the remaining topics and the test topics."""
    share = usual if share is None else share
    return deal(topics, share, seed=seed, name="test_fraction", purpose="test") if share else (topics, {})


def prepare_data_of(config: TextConfig, corpus: str | None) -> TextData:
    """Return the data of a run that started with text of the given fingerprint; None for a new run.

    Runs of versions without a test split started with text split without one.

    Raises:
        ConfigError: as `prepare_data`.
    """
    data = prepare_data(config)
    if corpus in (None, data.fingerprint) or (config.data.test_fraction, config.lora.test_fraction) != (None, None):
        return data
    parts = {part: dataclasses.replace(getattr(config, part), test_fraction=0.0) for part in ("data", "lora")}
    older = prepare_data(dataclasses.replace(config, **parts))
    return older if older.fingerprint == corpus else data


def check_same_on_ranks(data: TextData) -> None:
    """Raise if the ranks do not read the same text.

    Raises:
        ConfigError: the manual or the tokenizer of a rank differs.
    """
    found = distributed.gather_objects(data.fingerprint)
    others = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if others:
        raise ConfigError(
            f"rank {others[0]} reads a different text than rank 0: the manual differs between Python versions, and the "
            "tokenizer may differ between versions of tokenizers; give all ranks the same versions"
        )


def check_same_text(stored: Mapping[str, Any], data: TextData, *, folder: str) -> None:
    """Raise if the text is not the one that the run started with.

    Raises:
        ConfigError: this Python's manual, or the tokenizer that ``tokenizers`` trains on it, differs.
    """
    if stored.get("corpus") != data.fingerprint:
        raise ConfigError(
            f"the run in {folder} was started on a different text: the manual differs between Python versions, and the "
            "tokenizer may differ between versions of tokenizers. Use the version it was started with, give another "
            "folder with --out, or --no-resume to start over in this one"
        )
