"""The data of ``treadle train text``: Python's manual by topics, those about statements kept apart for fine-tuning."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from treadle import distributed
from treadle.data import TensorLoader
from treadle.errors import ConfigError
from treadle.runs.ranks import shared_rows
from treadle.runs.setting_names import as_settings
from treadle.text.corpus import is_statement, load_manual, num_bytes, split_topics, without_repeats
from treadle.text.data import TokenBlocks, token_stream
from treadle.text.run_config import TextConfig
from treadle.text.tokenizer import train_tokenizer

_EVAL_BATCH = 64


@dataclass(frozen=True)
class Part:
    """Topics of one part of the data, as text and as blocks of tokens."""

    topics: dict[str, str]
    tokens_N: Tensor
    blocks: TokenBlocks

    @property
    def num_bytes(self) -> int:
        """Bytes of its texts."""
        return sum(map(num_bytes, self.topics.values()))

    def loader(self, batch_size: int | None = None, *, seed: int = 0) -> TensorLoader:
        """Returns a shuffled loader for training, or with None one for evaluation.

        On several ranks, it is one of this rank's part of each batch.
        """
        if batch_size is None:
            return self.eval_loader()
        return shared_rows(self.blocks.tensors, batch_size, shuffle=True, seed=seed)

    def eval_loader(self, batch_size: int | None = None) -> TensorLoader:
        """Returns a loader for evaluation; None takes the batch size of a run's own evaluations."""
        return shared_rows(self.blocks.tensors, batch_size or _EVAL_BATCH)


@dataclass(frozen=True)
class TextData:
    """Tokenizer and parts; no passage is in two parts."""

    tokenizer: Any
    train: Part
    val: Part
    lora_train: Part
    lora_val: Part

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by name."""
        return {name: getattr(self, name) for name in ("train", "val", "lora_train", "lora_val")}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of texts and tokenizer: other Python versions have other manuals."""
        digest = hashlib.sha256(self.tokenizer.to_str().encode())
        topics = {name: text for part in self.parts.values() for name, text in part.topics.items()}
        for name, text in sorted(topics.items()):
            digest.update(f"\0{name}\0{text}".encode())
        return digest.hexdigest()


def prepare_data(config: TextConfig) -> TextData:
    """Loads the manual, takes repeated passages out, deals the topics out and cuts them into blocks.

    Raises:
        ConfigError: a setting is out of range, or a part would be empty.
    """
    manual = load_manual()
    names = sorted(manual, key=lambda name: (len(manual[name]), name))[: config.data.max_topics]
    topics = without_repeats({name: manual[name] for name in names})
    statements = {name: text for name, text in topics.items() if is_statement(manual[name])}
    others = {name: text for name, text in topics.items() if name not in statements}
    seed = config.data.split_seed
    with as_settings("data", vars(config.data)):
        train, val = split_topics(others, val_fraction=config.data.val_fraction, seed=seed)
        tokenizer = train_tokenizer(train.values(), config.data.vocab_size)
    with as_settings("lora", vars(config.lora)):
        lora_train, lora_val = split_topics(statements, val_fraction=config.lora.val_fraction, seed=seed)

    def part(topics: Mapping[str, str]) -> Part:
        tokens_N = token_stream(tokenizer, topics.values())
        return Part(dict(topics), tokens_N, TokenBlocks(tokens_N, config.data.block_length))

    return TextData(tokenizer, part(train), part(val), part(lora_train), part(lora_val))


def check_same_on_ranks(data: TextData) -> None:
    """Refuses to train where the ranks do not read the same text.

    Raises:
        ConfigError: the manual or the tokenizer of a rank is another one.
    """
    found = distributed.gather_objects(data.fingerprint)
    others = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if others:
        raise ConfigError(
            f"rank {others[0]} reads another text than rank 0: the manual differs from one Python version to the next, "
            "and the tokenizer may from one version of tokenizers to the next; give all ranks the same versions"
        )


def check_same_text(stored: Mapping[str, Any], data: TextData, *, folder: str) -> None:
    """Refuses to go on with another text than the run began with.

    Raises:
        ConfigError: this Python's manual, or what ``tokenizers`` makes of it, is another one.
    """
    if stored.get("corpus") != data.fingerprint:
        raise ConfigError(
            f"the run in {folder} was started on another text: the manual differs from one Python version to the next, "
            "and the tokenizer may from one version of tokenizers to the next. Go on with the version it was started "
            "with, give another folder with --out, or --no-resume to start afresh in this one"
        )
