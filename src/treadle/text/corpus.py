"""The Python manual as a small corpus: the topics shown by ``help()``, with repeated passages removed."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_PASSAGE_END = re.compile(r"\n\s*\n")
_STATEMENT = re.compile(r'The "\w+" statement')


def load_manual() -> dict[str, str]:
    """Return the topics of the standard library's ``pydoc_data.topics`` by name.

    About 470,000 characters in 79 topics; the text differs between Python versions. A third of it occurs twice, such as
    the topic ``with`` inside the topic ``compound``; :func:`without_repeats` removes the repeats.

    Raises:
        ImportError: this Python was installed without its topics.

    Example:
        >>> load_manual()["pass"].splitlines()[0]
        'The "pass" statement'
    """
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise ImportError(f"this Python has no pydoc_data.topics ({error}): install its documentation") from error
    return {name: text.strip() for name, text in sorted(topics.topics.items())}


@checked
def without_repeats(topics: Mapping[str, str]) -> dict[str, str]:
    """Keep every passage only in the shortest topic that contains it, and drop topics that become empty.

    Otherwise a validation topic would leak through a longer training topic that quotes it. Passages are separated by
    blank lines and are equal if they have the same words.

    Args:
        topics: name -> text.

    Example:
        >>> without_repeats({"short": "One.", "long": "One.\\n\\nTwo."})
        {'long': 'Two.', 'short': 'One.'}
    """
    owner: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        passages = [
            passage
            for passage in _PASSAGE_END.split(topics[name])
            if owner.setdefault(" ".join(passage.split()), name) == name
        ]
        if any(passage.strip() for passage in passages):
            kept[name] = "\n\n".join(passages)
    return dict(sorted(kept.items()))


def is_statement(text: str) -> bool:
    """Return whether a topic is about one statement of the language, titled ``The "..." statement``.

    Example:
        >>> is_statement('The "pass" statement\\n********'), is_statement("Lambdas\\n*******")
        (True, False)
    """
    return _STATEMENT.fullmatch(text.partition("\n")[0].strip()) is not None


@checked
def split_topics(topics: Mapping[str, str], *, val_fraction: float, seed: int) -> tuple[dict[str, str], dict[str, str]]:
    """Split topics into training and validation.

    In a seeded order, a topic is assigned to validation if it still fits into the validation share of the text; the
    share is thus nearly used up and never exceeded, although topics have 200 to 40,000 characters.

    Args:
        topics: name -> text.
        val_fraction: fraction of the bytes, between 0 and 1.
        seed: seed of the order.

    Returns:
        ``(training, validation)``, each by name.

    Raises:
        ValueError: a split would be empty, or the fraction is out of range.

    Example:
        >>> [list(part) for part in split_topics({"a": "1234", "b": "12", "c": "1234"}, val_fraction=0.3, seed=0)]
        [['a', 'c'], ['b']]
    """
    return deal(topics, val_fraction, seed=seed, name="val_fraction", purpose="validate")


def deal(
    topics: Mapping[str, str], share: float, *, seed: int, name: str, purpose: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Split topics like `split_topics`; errors name the fraction (``name``) and its ``purpose``."""
    if not 0 < share < 1:
        raise ConfigError("must lie between 0 and 1", argument=name, value=share)
    order = sorted(topics)
    random.Random(seed).shuffle(order)
    room = share * sum(num_bytes(text) for text in topics.values())
    chosen = set()
    for topic in order:
        if num_bytes(topics[topic]) <= room:
            chosen.add(topic)
            room -= num_bytes(topics[topic])
    kept = {topic: text for topic, text in topics.items() if topic not in chosen}
    dealt = {topic: text for topic, text in topics.items() if topic in chosen}
    if not kept or not dealt:
        raise ConfigError(
            f" of {len(topics)} topics leaves none to "
            f"{f'{purpose} on; raise it' if kept else 'train on; lower it'}, or take more topics",
            argument=name,
            value=share,
        )
    return kept, dealt


def num_bytes(text: str) -> int:
    """Return the length of a string in UTF-8 bytes.

    Example:
        >>> num_bytes("né")
        3
    """
    return len(text.encode())
