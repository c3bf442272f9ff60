"""The causal transformer: its size, what a position may depend on, and that its shortcuts change no number.

Shapes: B = sequences, L = positions.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import CountReads
from treadle.astro.layers import padding_last
from treadle.astro.model import CausalTransformerLM
from treadle.errors import ConfigError

VOCAB, TYPES, MAX_LEN = 15, 12, 32


def small_model(dropout=0.0, n_layers=2, seed=0):
    torch.manual_seed(seed)
    model = CausalTransformerLM(VOCAB, TYPES, 16, n_layers, 2, 32, dropout, MAX_LEN)
    for parameter in model.parameters():  # small initial weights would hide a wrong dependence
        nn.init.normal_(parameter, std=0.3)
    return model


def some_ids(batch=3, length=10, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda size: torch.randint(size, (batch, length), generator=generator)  # noqa: E731
    return draw(VOCAB), draw(TYPES)


MASKS = {
    "right": [[1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [1] * 10, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
    "left": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 10, [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]],
    "inside": [[1, 0, 1, 1, 0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]],
    "empty rows": [[0] * 10, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0], [0] * 10],
}


def mask(name):
    return torch.tensor(MASKS[name], dtype=torch.bool)


def test_the_numbers_of_parameters_are_those_of_the_specification():
    count = lambda *sizes: sum(p.numel() for p in CausalTransformerLM(*sizes).parameters())  # noqa: E731
    assert count(15, 12, 16, 1, 2, 32, 0, 32) == 3_440
    with torch.device("meta"):
        assert count(13317, 20, 768, 12, 12, 3072, 0.1, 2048) == 107_099_136


def test_initial_weights_are_as_stated():
    torch.manual_seed(0)
    model = CausalTransformerLM(500, 12, 64, 8, 2, 256, 0.1, 100)
    layer = model.layers[0]
    assert layer.out_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert layer.linear2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    for weight in (layer.in_proj.weight, layer.linear1.weight, model.token_embedding.weight, model.head.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name


def test_logits_are_those_of_torchs_own_encoder_with_causal_and_padding_masks():
    model = small_model()
    tokens, types = some_ids()
    valid_BL = mask("right")
    reference = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=True),
        num_layers=2, norm=nn.LayerNorm(16), enable_nested_tensor=False,
    )  # fmt: skip
    state = model.state_dict()
    renamed = {
        name.replace("in_proj.", "self_attn.in_proj_").replace("out_proj", "self_attn.out_proj"): value
        for name, value in state.items()
        if name.startswith(("layers.", "norm."))
    }
    reference.load_state_dict(renamed)
    embedded = model.token_embedding(tokens) + model.type_embedding(types) + model.position_embedding.weight[:10]
    causal = nn.Transformer.generate_square_subsequent_mask(10) < 0
    expected = reference(embedded, mask=causal, src_key_padding_mask=~valid_BL) @ state["head.weight"].T
    torch.testing.assert_close(model(tokens, types, valid_BL)[valid_BL], expected[valid_BL], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_no_logit_depends_on_a_later_position_or_on_padding(name):
    model, (tokens, types), valid_BL = small_model(), some_ids(), mask(name)
    other_tokens, other_types = some_ids(seed=2)
    before = model(tokens, types, valid_BL)
    padded = model(torch.where(valid_BL, tokens, other_tokens), torch.where(valid_BL, types, other_types), valid_BL)
    assert torch.equal(padded[valid_BL], before[valid_BL])
    for cut in range(1, 10):
        later = torch.arange(10) >= cut
        changed = model(torch.where(later, other_tokens, tokens), torch.where(later, other_types, types), valid_BL)
        seen = valid_BL & ~later
        assert torch.equal(changed[seen], before[seen])


def test_every_earlier_valid_position_does_matter():
    model, (tokens, types) = small_model(), some_ids(batch=1)
    before = model(tokens, types, torch.ones(1, 10, dtype=torch.bool))
    for position in range(10):
        changed = tokens.clone()
        changed[0, position] = (tokens[0, position] + 1) % VOCAB
        differs = (model(changed, types) != before).any(dim=-1)[0]
        assert differs.tolist() == [at >= position for at in range(10)]


@pytest.mark.parametrize("name", MASKS)
def test_a_row_has_the_logits_of_the_same_row_without_its_padding(name):
    model, (tokens, types), valid_BL = small_model(), some_ids(), mask(name)
    padded = model(tokens, types, valid_BL)
    assert padded.isfinite().all()
    for row in range(3):
        keep = valid_BL[row]
        if keep.any():
            alone = model(tokens[row, keep][None], types[row, keep][None])[0]
            torch.testing.assert_close(padded[row, keep], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_no_gradient_goes_through_padding(name):
    model, (tokens, types), valid_BL = small_model(), some_ids(), mask(name)
    padding = VOCAB - 1
    tokens = torch.where(valid_BL, tokens % padding, padding)
    model(tokens, types, valid_BL)[valid_BL].square().sum().backward()
    gradient = model.token_embedding.weight.grad
    assert gradient.isfinite().all()
    assert gradient[padding].count_nonzero() == 0
    assert gradient[:padding].count_nonzero() > 0


def test_a_mask_without_padding_changes_nothing():
    model, (tokens, types) = small_model(), some_ids()
    assert torch.equal(model(tokens, types, torch.ones(3, 10, dtype=torch.bool)), model(tokens, types))


def test_the_order_that_puts_padding_last_is_stable_and_comes_with_its_inverse():
    valid_BL = torch.rand(20, 50, generator=torch.Generator().manual_seed(0)) < 0.5
    order_BL, place_BL = padding_last(valid_BL)
    for row, valid in enumerate(valid_BL):
        positions = torch.arange(50)
        assert torch.equal(order_BL[row], torch.cat([positions[valid], positions[~valid]]))
    assert torch.equal(order_BL.gather(1, place_BL), torch.arange(50).expand(20, 50))


def test_attention_is_given_no_mask_and_nothing_waits_for_the_device(monkeypatch):
    asked = []
    attend = F.scaled_dot_product_attention

    def watched(*args, **options):
        asked.append(options)
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model, (tokens, types) = small_model(), some_ids()
    monkeypatch.setattr(model, "_may_read", lambda ids: False)  # as on an accelerator from the second call on
    with CountReads() as reads:
        model(tokens, types, mask("inside")).sum().backward()
    assert reads.reads == []
    assert [(options.get("attn_mask"), options["is_causal"]) for options in asked] == [(None, True)] * 2


def test_logits_are_the_head_on_the_hidden_states():
    model, (tokens, types) = small_model(), some_ids()
    hidden = model.hidden_states(tokens, types, mask("left"))
    assert hidden.shape == (3, 10, 16)
    assert torch.equal(model.head(hidden), model(tokens, types, mask("left")))


def gradients(model, tokens, types, valid_BL):
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(tokens, types, valid_BL).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def test_gradient_checkpointing_changes_no_bit_and_runs_the_layers_again():
    model, (tokens, types) = small_model(dropout=0.3), some_ids()
    runs = []
    model.layers[1].register_forward_pre_hook(lambda *_: runs.append(1))
    plain = gradients(model, tokens, types, mask("right"))
    assert len(runs) == 1
    model.gradient_checkpointing_enable()
    again = gradients(model, tokens, types, mask("right"))
    assert len(runs) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    with torch.no_grad():
        model(tokens, types)
    model.gradient_checkpointing_disable()
    gradients(model, tokens, types, mask("right"))
    assert len(runs) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(1, 33, dtype=torch.long), "types": torch.zeros(1, 33, dtype=torch.long)},
         "33 positions is longer than max_len=32"),
        ({"tokens": torch.tensor([[1, 15]])}, r"tokens holds the id 15, but vocab_size=15 .* allows 0 to 14"),
        ({"tokens": torch.tensor([[-1, 1]])}, "tokens holds the id -1, but vocab_size=15"),
        ({"types": torch.tensor([[1, 12]])}, "types holds the id 12, but n_types=12"),
        ({"types": torch.tensor([[1, 2, 3]])}, r"types has shape \(1, 3\) but must be \(1, 2\)"),
        ({"tokens": torch.tensor([1, 2])}, r"tokens has shape \(2,\)"),
        ({"attn_mask": torch.ones(1, 3, dtype=torch.bool)}, r"attn_mask has shape \(1, 3\)"),
        ({"attn_mask": torch.ones(1, 2)}, "dtype torch.float32 but must be bool"),
    ],
)  # fmt: skip
def test_bad_input_is_a_value_error_with_the_numbers(change, message):
    batch = {"tokens": torch.tensor([[1, 2]]), "types": torch.tensor([[1, 2]]), "attn_mask": None}
    with pytest.raises(ValueError, match=message):
        small_model()(**{**batch, **change})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((15, 12, 16, 1, 3, 32, 0.0, 32), "d_model=16 is not divisible by n_heads=3"),
        ((15, 12, 16, 0, 2, 32, 0.0, 32), "n_layers=0: must be at least 1"),
        ((15, 12, 16, 1, 2, 32, 1.0, 32), r"dropout=1.0: must lie in \[0, 1\)"),
    ],
)
def test_sizes_that_make_no_model_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        CausalTransformerLM(*sizes)


@pytest.mark.parametrize("length", [0, 1])
def test_sequences_of_no_and_of_one_position_pass(length):
    ids = torch.zeros(2, length, dtype=torch.long)
    assert small_model()(ids, ids, torch.ones(2, length, dtype=torch.bool)).shape == (2, length, VOCAB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_all_stays_finite_and_padding_still_does_not_matter(dtype):
    model, (tokens, types), valid_BL = small_model(), some_ids(), mask("inside")
    other_tokens, _ = some_ids(seed=2)
    with torch.autocast("cpu", dtype=dtype):
        logits = model(tokens, types, valid_BL)
        other = model(torch.where(valid_BL, tokens, other_tokens), types, valid_BL)
    assert logits.isfinite().all()
    assert torch.equal(logits[valid_BL], other[valid_BL])


def test_the_model_compiles_as_one_graph():
    model, (tokens, types) = small_model(), some_ids()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens, types, mask("inside")), model(tokens, types, mask("inside")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MASKS)
def test_on_a_gpu_padded_batches_take_the_flash_kernel_and_the_host_never_waits(name):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = small_model().cuda()
    tokens, types = (ids.cuda() for ids in some_ids())
    valid_BL = mask(name).cuda()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", dtype=torch.bfloat16):
        model(tokens, types, valid_BL)  # the first call looks at the ids
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(tokens, types, valid_BL).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    on_the_cpu = small_model()(tokens.cpu(), types.cpu(), mask(name))
    torch.testing.assert_close(
        model(tokens, types, valid_BL).cpu()[mask(name)], on_the_cpu[mask(name)], rtol=1e-3, atol=1e-3
    )
