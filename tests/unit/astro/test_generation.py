"""Generation: the cache changes nothing, types follow from ids, and on request only legal sequences come out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treadle.astro.generation import SequenceGrammar
from treadle.astro.model import CausalTransformerLM
from treadle.astro.sequences import encode_sequence
from treadle.astro.vocab import build_vocab_spec
from treadle.errors import ConfigError

CPU = torch.device("cpu")
VOCAB = build_vocab_spec(2, 4, 2, ["a", "b"], scalar_bins=2)
PAD, BOS, EOS, SEP, MISS = range(5)


def small_model(max_len=32, dropout=0.5):
    torch.manual_seed(0)
    model = CausalTransformerLM(15, 12, 16, 2, 2, 32, dropout, max_len)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def prompt(*ids, rows=2):
    tokens = torch.tensor([ids] * rows)
    return tokens, VOCAB.types_of(tokens)


def drawn_without_a_cache(model, tokens, types, count, *, top_k, generator):
    """The plain way: the whole sequence through the model for every new token."""
    for _ in range(count):
        with torch.no_grad():
            logits = model(tokens, types)[:, -1]
        kept, ids = logits.topk(top_k, dim=-1)
        drawn = ids.gather(1, torch.multinomial(kept.softmax(-1), 1, generator=generator))
        tokens, types = torch.cat([tokens, drawn], 1), torch.cat([types, types[:, -1:]], 1)
    return tokens, types


def test_the_cached_hidden_states_are_those_of_the_whole_sequence():
    model = small_model().eval()
    tokens = torch.randint(15, (3, 12), generator=torch.Generator().manual_seed(0))
    types = VOCAB.types_of(tokens)
    whole = model.hidden_states(tokens, types)
    caches = model.new_caches()
    parts = [model.extend(tokens[:, :5], types[:, :5], caches)]
    parts += [model.extend(tokens[:, at : at + 1], types[:, at : at + 1], caches) for at in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 4, 15])
def test_generated_ids_are_those_of_the_uncached_way(top_k):
    model, (tokens, types) = small_model().eval(), prompt(BOS, 5, 6)
    expected = drawn_without_a_cache(model, tokens, types, 20, top_k=top_k, generator=torch.Generator().manual_seed(4))
    found = model.generate(tokens, types, 20, top_k=top_k, generator=torch.Generator().manual_seed(4))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_temperature_zero_takes_the_likeliest_id_and_draws_nothing():
    model, (tokens, types) = small_model().eval(), prompt(BOS)
    before = torch.get_rng_state()
    found, _ = model.generate(tokens, types, 10, temperature=0)
    likeliest, _ = drawn_without_a_cache(model, tokens, types, 10, top_k=1, generator=torch.Generator())
    assert torch.equal(found, likeliest)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_low_temperature_sharpens_and_a_high_one_flattens():
    model, (tokens, types) = small_model().eval(), prompt(BOS, rows=2000)
    with torch.no_grad():
        logits = model(tokens[:1], types[:1])[0, -1]
    for temperature in (0.3, 1.0, 5.0):
        generator = torch.Generator().manual_seed(1)
        drawn = model.generate(tokens, types, 1, temperature, generator=generator)[0][:, 1]
        share = drawn.bincount(minlength=15) / 2000
        assert (share - (logits / temperature).softmax(-1)).abs().max() < 0.04


def test_a_generator_of_its_own_leaves_the_global_one_alone_and_repeats():
    model, (tokens, types) = small_model(), prompt(BOS)
    before = torch.get_rng_state()
    first = model.generate(tokens, types, 10, generator=torch.Generator().manual_seed(1))[0]
    again = model.generate(tokens, types, 10, generator=torch.Generator().manual_seed(1))[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    torch.manual_seed(1)
    assert torch.equal(model.generate(tokens, types, 10)[0], first)


def test_generation_uses_no_dropout_and_restores_every_modules_own_mode():
    model, (tokens, types) = small_model(), prompt(BOS)
    model.train()
    model.layers[0].eval()
    found, _ = model.generate(tokens, types, 10, temperature=0)
    assert [model.training, model.layers[0].training, model.layers[1].training] == [True, False, True]
    assert torch.equal(found, model.eval().generate(tokens, types, 10, temperature=0)[0])
    assert not found.requires_grad


def test_it_stops_at_max_len():
    model, (tokens, types) = small_model(max_len=8), prompt(BOS, 5, 6)
    assert model.generate(tokens, types)[0].shape == (2, 8)
    full = model.generate(tokens, types)
    assert torch.equal(model.generate(*full)[0], full[0])


def test_with_a_vocabulary_types_follow_from_the_likeliest_ids_after_any_prompt_up_to_max_len():
    model = small_model(max_len=24).eval()
    tokens, types = prompt(13, 5, 8)  # no sequence begins so
    found, found_types = model.generate(tokens, types, 100, temperature=0, vocab=VOCAB)
    for _ in range(21):
        with torch.no_grad():
            likeliest = model(tokens, types)[:, -1:].argmax(-1)
        tokens, types = torch.cat([tokens, likeliest], 1), torch.cat([types, VOCAB.types_of(likeliest)], 1)
    assert torch.equal(found, tokens)
    assert torch.equal(found_types, types)


@pytest.mark.parametrize("top_k", [None, 3])
def test_with_legal_only_no_other_ids_come_and_types_follow_from_them(top_k):
    model, (tokens, types) = small_model(max_len=200), prompt(BOS, rows=60)
    draw = torch.Generator().manual_seed(0)
    options = {"temperature": 3.0, "top_k": top_k, "vocab": VOCAB, "legal_only": True}
    tokens, types = model.generate(tokens, types, 199, generator=draw, **options)
    assert torch.equal(types, VOCAB.types_of(tokens))
    SequenceGrammar(VOCAB, CPU).read(tokens)  # raises at an illegal id
    for row in tokens.tolist():
        ended = row.index(EOS)
        assert row[ended + 1 :] == [PAD] * (len(row) - ended - 1)
        image, scalars, a, b = parts_of(row[1:ended])
        assert image == [MISS] or set(image) <= {5, 6}
        assert scalars == [MISS] or (scalars[0] in (7, 8, MISS) and scalars[1] in (9, 10, MISS) and len(scalars) == 2)
        assert a == [MISS] or set(a) <= {11, 12}
        assert b == [MISS] or set(b) <= {13, 14}


def parts_of(ids):
    parts, part = [], []
    for id in ids:
        if id == SEP:
            parts.append(part)
            part = []
        else:
            part.append(id)
    assert part == []
    return parts


def test_generation_ends_when_every_row_has_its_eos():
    model, (tokens, types) = small_model(max_len=500), prompt(BOS)
    draw = torch.Generator().manual_seed(0)
    tokens, _ = model.generate(tokens, types, 499, vocab=VOCAB, generator=draw, legal_only=True)
    assert (tokens == EOS).any(dim=1).all()
    assert tokens.shape[1] < 500
    assert (tokens[:, -1] == EOS).any()


def test_a_prompt_that_has_its_eos_stays_as_it_is():
    tokens = encode_sequence(VOCAB, image=[0])["tokens"].expand(2, -1)
    found, _ = small_model().generate(tokens, VOCAB.types_of(tokens), 5, vocab=VOCAB, legal_only=True)
    assert torch.equal(found, tokens)


def test_the_dtype_of_the_ids_is_kept():
    tokens, types = (ids.to(torch.int32) for ids in prompt(BOS))
    for legal_only in (False, True):
        found = small_model().generate(tokens, types, 3, vocab=VOCAB, legal_only=legal_only)
        assert [ids.dtype for ids in found] == [torch.int32, torch.int32]


def random_object(draw):
    image = [draw(2) for _ in range(draw(4))] or None
    scalars = None if draw(3) == 0 else [None if draw(3) == 0 else draw(2) for _ in range(2)]
    spectra = {group: [draw(2) for _ in range(draw(4))] for group in ("a", "b") if draw(3)}
    return {"image": image, "scalars": scalars, "spectra": spectra}


def test_every_sequence_that_can_be_encoded_is_legal_to_its_end():
    generator = torch.Generator().manual_seed(0)
    draw = lambda size: int(torch.randint(size, (1,), generator=generator))  # noqa: E731
    grammar = SequenceGrammar(VOCAB, CPU)
    for _ in range(300):
        tokens = encode_sequence(VOCAB, **random_object(draw))["tokens"][None]
        assert grammar.ended(grammar.read(tokens)).all()
        for end in range(1, tokens.shape[1]):
            legal = grammar.legal(grammar.read(tokens[:, :end]))[0]
            assert legal[tokens[0, end]]


def test_the_legal_ids_at_each_place_of_a_sequence():
    grammar = SequenceGrammar(VOCAB, CPU)
    after = lambda *ids: grammar.legal(grammar.read(torch.tensor([ids]))).nonzero()[:, 1].tolist()  # noqa: E731
    assert after(BOS) == [MISS, 5, 6]
    assert after(BOS, MISS) == [SEP]
    assert after(BOS, 5) == [SEP, 5, 6]
    assert after(BOS, 5, SEP) == [MISS, 7, 8]
    assert after(BOS, 5, SEP, 7) == [MISS, 9, 10]
    assert after(BOS, 5, SEP, MISS) == [SEP, MISS, 9, 10]  # the first column missing, or all of them
    assert after(BOS, 5, SEP, 7, MISS) == [SEP]
    assert after(BOS, 5, SEP, MISS, SEP) == [MISS, 11, 12]
    assert after(BOS, 5, SEP, MISS, SEP, MISS, SEP, 13, SEP) == [EOS]
    assert after(BOS, 5, SEP, MISS, SEP, MISS, SEP, 13, SEP, EOS) == [PAD]


def test_with_one_column_a_missing_scalar_is_followed_by_sep_alone():
    grammar = SequenceGrammar(build_vocab_spec(2, 4, 2, ["a"], scalar_bins=4), CPU)
    legal = grammar.legal(grammar.read(torch.tensor([[BOS, MISS, SEP, MISS]])))
    assert legal.nonzero()[:, 1].tolist() == [SEP]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((5,), r"tokens\[0, 0\]=5 is not legal there: BOS must follow"),
        ((BOS, 5, 7), r"tokens\[0, 2\]=7 is not legal there: SEP or an image id must follow"),
        ((BOS, 5, SEP, 9), r"tokens\[0, 3\]=9 .*: MISS or an id of scalar column 0 must follow"),
        ((BOS, 5, SEP, MISS, SEP, 13, 11), r"tokens\[0, 5\]=13 .*: MISS or an id of the spectrum group 'a' must"),
    ],
)
def test_a_prompt_that_no_sequence_begins_with_is_refused_where_it_goes_wrong(ids, message):
    with pytest.raises(ConfigError, match=message):
        small_model().generate(*prompt(*ids), vocab=VOCAB, legal_only=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"legal_only": True}, "legal_only=True needs vocab"),
        ({"vocab": build_vocab_spec()}, "vocab has 13317 ids and 12 types, the model vocab_size=15 and n_types=12"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        small_model().generate(*prompt(BOS), **options)


def test_prompts_without_a_position_or_beyond_max_len_are_refused():
    with pytest.raises(ConfigError, match="at least one position"):
        small_model().generate(*prompt())
    with pytest.raises(ConfigError, match="33 positions is longer than max_len=32"):
        small_model().generate(*prompt(*[BOS] * 33))


def test_several_tokens_behind_a_filled_cache_are_refused():
    model, caches = small_model().eval(), small_model().new_caches()
    model.extend(*prompt(BOS, 5), caches)
    with pytest.raises(ValueError, match="2 positions after 2 cached ones"):
        model.extend(*prompt(5, 5), caches)
