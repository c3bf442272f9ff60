"""Drawing tokens: from the right distribution, by its own generator, with the model left as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from treadle.errors import ConfigError
from treadle.text import build_gpt2, sample_texts, sample_tokens, train_tokenizer


class Table(nn.Module):
    """Logits that depend on the last token only; notes how long its input was."""

    def __init__(self, logits_VV):
        super().__init__()
        self.logits_VV = nn.Parameter(logits_VV)
        self.lengths = []

    def forward(self, input_ids):
        self.lengths.append(input_ids.shape[1])
        return SimpleNamespace(logits=self.logits_VV[input_ids])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(model, rows, **changes):
    settings = {"num_tokens": 1, "context": 4, "generator": generator(), **changes}
    return sample_tokens(model, torch.zeros(rows, 1, dtype=torch.long), **settings)


def shares(drawn, vocab):
    return torch.bincount(drawn[:, 1], minlength=vocab) / len(drawn)


LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(4, 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_tempered_distribution_says(temperature):
    drawn = draw(Table(LOGITS), 20_000, temperature=temperature)
    torch.testing.assert_close(shares(drawn, 4), torch.softmax(LOGITS[0] / temperature, 0), atol=0.015, rtol=0)


def test_top_k_draws_among_the_likeliest_only_in_their_proportion():
    drawn = draw(Table(LOGITS), 20_000, top_k=2)
    expected = torch.tensor([0.0, 1 / (1 + torch.e), torch.e / (1 + torch.e), 0.0])
    torch.testing.assert_close(shares(drawn, 4), expected, atol=0.015, rtol=0)


def test_temperature_0_takes_the_likeliest_and_draws_nothing():
    own = generator()
    before = own.get_state()
    assert draw(Table(LOGITS), 3, temperature=0, num_tokens=5, generator=own)[:, 1:].unique().tolist() == [2]
    assert torch.equal(own.get_state(), before)


def test_more_than_all_tokens_are_all_tokens():
    assert torch.equal(draw(Table(LOGITS), 50, top_k=99), draw(Table(LOGITS), 50))


def test_the_model_never_reads_more_than_its_context():
    model = Table(LOGITS)
    drawn = draw(model, 1, num_tokens=9, context=4)
    assert model.lengths == [1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert drawn.shape == (1, 10)


def test_the_same_generator_state_gives_the_same_tokens_and_the_global_one_is_not_touched():
    torch.manual_seed(5)
    model = build_gpt2(12, n_positions=8, n_embd=8, n_layer=1, n_head=2, dropout=0.5)
    before = torch.get_rng_state()
    first, again = (draw(model, 2, num_tokens=20, context=8) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)  # dropout is off
    assert not torch.equal(first, draw(model, 2, num_tokens=20, context=8, generator=generator(1)))


def test_each_modules_mode_comes_back():
    model = build_gpt2(12, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model.train()
    model.transformer.drop.eval()
    modes = [module.training for module in model.modules()]
    draw(model, 1, num_tokens=2)
    assert [module.training for module in model.modules()] == modes
    assert True in modes
    assert False in modes


def test_a_text_ends_where_the_model_ends_its_document():
    tokenizer = train_tokenizer(["ab"], 258)
    a, b = (tokenizer.encode(letter).ids[0] for letter in "ab")
    logits = torch.full((258, 258), -99.0)
    logits[a, b] = logits[b, 0] = logits[0, a] = 99.0  # a, b, end, a, b, end, ...
    texts = sample_texts(
        Table(logits), tokenizer, count=2, num_tokens=7, context=4, generator=generator(), temperature=1.0
    )
    assert texts == ["ab", "ab"]
    short = sample_texts(Table(logits), tokenizer, prompt="ba", count=1, num_tokens=1, context=4, generator=generator())
    assert short == ["bab"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"), ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"), ({"rows": 0}, "at least one token"), ({"context": 0}, "context=0"),
        ({"num_tokens": -2}, "num_tokens=-2"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(changes, words):
    prompt = torch.zeros(1, changes.pop("rows", 1), dtype=torch.long)
    with pytest.raises(ConfigError, match=words):
        sample_tokens(Table(LOGITS), prompt, **{"num_tokens": 1, "context": 4, "generator": generator(), **changes})
