"""Blocks: every token but the first is predicted exactly once, whatever the lengths."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from treadle.text import TokenBlocks, load_manual, token_stream, train_tokenizer
from treadle.text.data import IGNORED


def predicted(blocks):
    """The tokens that a causal model is scored on, in order, each with the token read just before it."""
    return [
        (int(block["input_ids"][place - 1]), int(block["labels"][place]))
        for block in blocks
        for place in range(1, len(block["labels"]))
        if block["labels"][place] != IGNORED
    ]


@pytest.mark.parametrize("length", [2, 3, 4, 7, 30, 31, 32, 100])
@pytest.mark.parametrize("size", [2, 3, 8, 31])
def test_every_token_but_the_first_is_predicted_once_from_the_one_before(size, length):
    stream = torch.randperm(size, generator=torch.Generator().manual_seed(0)) + 5
    blocks = TokenBlocks(stream, length, pad_id=1)
    assert predicted(blocks) == list(zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True))
    assert blocks.num_targets == size - 1


def test_labels_that_are_not_ignored_count_each_token_once():
    blocks = TokenBlocks(torch.arange(1, 30), 8)
    assert sum(int((block["labels"] != IGNORED).sum()) for block in blocks) == blocks.num_targets == 28


def test_the_face_counts_exactly_the_tokens_of_an_uneven_last_batch():
    from treadle.functional.losses import loss_weight
    from treadle.text import build_gpt2

    torch.manual_seed(0)
    model = build_gpt2(40, n_positions=8, n_embd=8, n_layer=1, n_head=2).eval()
    blocks = TokenBlocks(torch.arange(1, 36), 8)  # 5 blocks, the last one with 6 of its 7 places used
    batches = list(DataLoader(blocks, batch_size=3))
    weights = [loss_weight(model, None, inputs=batch, outputs=model(**batch), targets=None) for batch in batches]
    assert weights == [21, 13]
    mean = sum(weight * model(**batch).loss for weight, batch in zip(weights, batches, strict=True)) / 34
    logits = torch.cat([model(input_ids=block["input_ids"][None]).logits[0, :-1] for block in blocks])
    labels = torch.cat([block["labels"][1:] for block in blocks])
    torch.testing.assert_close(mean, torch.nn.functional.cross_entropy(logits, labels))


def test_a_stream_has_an_end_token_before_between_and_behind_documents():
    tokenizer = train_tokenizer([load_manual()["pass"]], 300)
    stream = token_stream(tokenizer, ["pass", "pass pass", ""])
    assert stream.dtype == torch.int64
    assert (stream == 0).nonzero()[:, 0].tolist()[0] == 0
    assert int((stream == 0).sum()) == 4
    documents = "".join(tokenizer.decode([token]) if token else "|" for token in stream.tolist())
    assert documents == "|pass|pass pass||"


@pytest.mark.parametrize(("size", "length", "words"), [(5, 1, "length=1"), (1, 4, "nothing to predict")])
def test_what_cannot_be_predicted_is_refused(size, length, words):
    with pytest.raises(ValueError, match=words):
        TokenBlocks(torch.arange(size), length)


@pytest.mark.parametrize(
    "tokens", [torch.rand(9), torch.ones(3, 3, dtype=torch.int64), torch.ones(9, dtype=torch.bool)]
)
def test_what_is_no_stream_of_ids_is_refused(tokens):
    with pytest.raises(ValueError, match="one stream of token ids"):
        TokenBlocks(tokens, 4)


def test_an_index_beyond_the_end_is_an_error_so_that_iteration_ends():
    blocks = TokenBlocks(torch.arange(5), 3)
    assert len(list(blocks)) == len(blocks) == 2
    with pytest.raises(IndexError):
        blocks[2]
