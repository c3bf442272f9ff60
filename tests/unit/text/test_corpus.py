"""The manual as a corpus: nothing of a validation topic may be known from a training topic."""

from __future__ import annotations

import pytest

from treadle.text import is_statement, load_manual, split_topics, without_repeats


@pytest.fixture(scope="module")
def manual():
    return load_manual()


@pytest.fixture(scope="module")
def topics(manual):
    return without_repeats(manual)


def words(text):
    return " ".join(text.split())


def longest_shared(text, others, *, least):
    """The longest run of characters, of at least ``least``, that a text shares with any of the others."""
    joined, text = "\0".join(map(words, others)), words(text)
    best = ""
    for start in range(len(text) - least):
        end = start + max(least, len(best) + 1)
        while end <= len(text) and text[start:end] in joined:
            best = text[start:end]
            end += 1
    return best


def test_the_manual_is_there_and_large_enough(manual):
    assert len(manual) > 60
    assert sum(map(len, manual.values())) > 300_000
    assert manual["pass"].startswith('The "pass" statement')


def test_the_manual_itself_does_repeat_passages(manual):
    assert longest_shared(manual["nonlocal"], [manual["global"]], least=20) != ""
    assert len(longest_shared(manual["while"], [manual["compound"]], least=200)) > 400


def test_no_passage_is_left_in_two_topics(topics):
    seen = {}
    for name, text in topics.items():
        for passage in text.split("\n\n"):
            assert seen.setdefault(words(passage), name) == name, passage


def test_a_passage_stays_in_the_shortest_topic_and_no_text_is_invented(manual, topics):
    assert topics["while"] == manual["while"]
    assert words(topics["while"])[-200:] not in words(topics["compound"])
    for name, text in topics.items():
        assert len(text) <= len(manual[name])
    assert set(manual) - set(topics) <= {"if", "else"}  # one text under two names


def test_validation_topics_share_no_long_run_of_words_with_training_topics(topics):
    train, val = split_topics(topics, val_fraction=0.05, seed=3)
    for name, text in val.items():
        assert len(longest_shared(text, train.values(), least=160)) < 250, name


def test_a_topic_is_about_a_statement_by_its_title():
    manual = load_manual()
    statements = {name for name, text in manual.items() if is_statement(text)}
    assert statements >= {"assert", "for", "pass", "with"}
    assert not statements & {"assignment", "augassign", "compound", "lambda", "class"}


@pytest.mark.parametrize("seed", range(5))
def test_whole_topics_go_to_validation_and_nearly_use_up_their_share(topics, seed):
    train, val = split_topics(topics, val_fraction=0.1, seed=seed)
    assert train.keys() | val.keys() == topics.keys()
    assert not train.keys() & val.keys()
    share = sum(len(text.encode()) for text in val.values()) / sum(len(text.encode()) for text in topics.values())
    assert 0.08 < share <= 0.1


def test_the_split_depends_on_the_seed_and_on_nothing_else(topics):
    backwards = dict(reversed(topics.items()))
    assert split_topics(topics, val_fraction=0.1, seed=0)[1] == split_topics(backwards, val_fraction=0.1, seed=0)[1]
    assert split_topics(topics, val_fraction=0.1, seed=0)[1] != split_topics(topics, val_fraction=0.1, seed=1)[1]


@pytest.mark.parametrize(
    ("topics", "fraction", "words"),
    [
        ({"a": "x" * 10}, 0.5, "raise it"),
        ({"a": "x", "b": "y"}, 1.0, "between 0 and 1"),
        ({"a": "x", "b": "y"}, 0.0, "between 0 and 1"),
        ({"a": "", "b": ""}, 0.5, "lower it"),
    ],
)
def test_a_split_that_leaves_a_part_empty_is_refused(topics, fraction, words):
    with pytest.raises(ValueError, match=words):
        split_topics(topics, val_fraction=fraction, seed=0)
