"""Parts of the encoder: fixed positions, packing, the layer against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from treadle.spectra.encoder import EncoderLayer, SpectrumEncoder, pack_visible, sine_positions


@pytest.mark.parametrize("d_model", [1, 2, 5, 8, 255])
def test_sine_positions_for_even_and_odd_widths(d_model: int) -> None:
    table = sine_positions(11, d_model)
    assert table.shape == (11, d_model)
    assert table.dtype == torch.float32
    for channel in (0, 1, 10):
        for column in range(d_model):
            angle = channel / 10000 ** ((column - column % 2) / d_model)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[channel, column].item() == pytest.approx(expected, abs=1e-6)


def test_packing_keeps_channel_order_and_marks_padding() -> None:
    visible = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    channels, real = pack_visible(visible)
    assert real is not None
    assert real.tolist() == [[True, True, True], [True, False, False], [False, False, False]]
    assert channels.shape == (3, 3)
    assert channels[0].tolist() == [1, 3, 4]
    assert channels[1, 0].item() == 0
    assert int(channels.max()) < 5


def test_packing_rows_of_one_length_needs_no_padding() -> None:
    visible = torch.tensor([[0, 1, 1], [1, 0, 1]]).bool()
    for count in (2, None):
        channels, real = pack_visible(visible, visible_count=count)
        assert real is None
        assert channels.tolist() == [[1, 2], [0, 2]]


def test_packing_a_large_random_mask_equals_nonzero() -> None:
    visible = torch.rand(64, 200, generator=torch.Generator().manual_seed(0)) < 0.4
    channels, real = pack_visible(visible)
    assert real is not None
    for row in range(64):
        assert channels[row][real[row]].tolist() == visible[row].nonzero().flatten().tolist()


def twin_layers() -> tuple[EncoderLayer, nn.TransformerEncoderLayer]:
    torch.manual_seed(0)
    ours = EncoderLayer(12, nhead=3, dim_feedforward=20, dropout=0.0)
    theirs = nn.TransformerEncoderLayer(12, 3, 20, 0.0, "gelu", batch_first=True, norm_first=True)
    with torch.no_grad():
        for parameter in ours.parameters():  # non-trivial norms and biases
            parameter.add_(0.1 * torch.randn_like(parameter))
    names = {"in_proj": "self_attn.in_proj", "out_proj": "self_attn.out_proj"}
    state = {}
    for key, value in ours.state_dict().items():
        module, leaf = key.rsplit(".", 1)
        state[f"{names[module]}_{leaf}" if module == "in_proj" else f"{names.get(module, module)}.{leaf}"] = value
    theirs.load_state_dict(state)
    return ours, theirs


@pytest.mark.parametrize("padded", [False, True])
def test_layer_equals_the_pre_norm_gelu_layer_of_torch(padded: bool) -> None:
    ours, theirs = twin_layers()
    tokens = torch.randn(4, 7, 12)
    attend = torch.ones(4, 7, dtype=torch.bool)
    if padded:
        attend[0, 3:] = attend[1, 1:] = False
    got = ours(tokens, attend[:, None, None, :] if padded else None)
    expected = theirs(tokens, src_key_padding_mask=~attend if padded else None)
    assert torch.allclose(got[attend], expected[attend], atol=1e-5)
    first = ours(tokens, attend[:, None, None, :] if padded else None, n_queries=1)
    assert first.shape == (4, 1, 12)
    assert torch.allclose(first, expected[:, :1], atol=1e-5)


def test_layer_drops_out_in_training_only() -> None:
    layer = EncoderLayer(12, nhead=3, dim_feedforward=20, dropout=0.5)
    tokens = torch.randn(4, 7, 12)
    assert not torch.equal(layer(tokens, None), layer(tokens, None))
    layer.eval()
    assert torch.equal(layer(tokens, None), layer(tokens, None))


def test_attention_weights_are_dropped_too() -> None:
    layer = EncoderLayer(12, nhead=3, dim_feedforward=20, dropout=0.5)
    layer.dropout.p = 0.0
    tokens = torch.randn(4, 7, 12)
    assert not torch.equal(layer(tokens, None), layer(tokens, None))


def encoder(use_learnable_pos: bool = True, d_model: int = 12) -> SpectrumEncoder:
    torch.manual_seed(1)
    return SpectrumEncoder(
        seq_len=10,
        d_model=d_model,
        nhead=3,
        num_layers=2,
        dim_feedforward=16,
        dropout=0.1,
        use_learnable_pos=use_learnable_pos,
        latent_dim=4,
    ).eval()


def by_hand(model: SpectrumEncoder, x_L: Tensor, visible_L: Tensor) -> Tensor:
    """One row, one token at a time, in channel order, CLS in front and without a position."""
    tokens = [model.cls_token]
    for channel in visible_L.nonzero().flatten().tolist():
        tokens.append(model.token_proj.weight[:, 0] * x_L[channel] + model.pos_embed[channel])
    hidden = torch.stack(tokens)[None]
    for layer in model.layers:
        hidden = layer(hidden, None)
    latent = model.to_latent.weight @ hidden[0, 0]
    return latent / latent.norm()


@pytest.mark.parametrize("use_learnable_pos", [True, False])
def test_encoder_equals_the_row_by_row_construction(use_learnable_pos: bool) -> None:
    model = encoder(use_learnable_pos)
    x = torch.randn(5, 10)
    visible = torch.rand(5, 10) < 0.5
    visible[0], visible[1] = False, True
    z = model(x, visible)
    expected = torch.stack([by_hand(model, x[row], visible[row]) for row in range(5)])
    assert torch.allclose(z, expected, atol=1e-5)


def test_a_known_count_changes_nothing() -> None:
    model = encoder()
    x = torch.randn(6, 10)
    visible = torch.zeros(6, 10, dtype=torch.bool)
    visible.scatter_(1, torch.rand(6, 10).argsort(dim=1)[:, :4], True)
    assert torch.equal(model(x, visible, visible_count=4), model(x, visible))


def test_position_of_a_value_matters() -> None:
    # Without positions, or with the position of the packed slot, these two would be one latent.
    model = encoder()
    with torch.no_grad():
        model.pos_embed.normal_()
    x = torch.ones(2, 10)
    visible = torch.zeros(2, 10, dtype=torch.bool)
    visible[0, 2:5] = True
    visible[1, 6:9] = True
    z = model(x, visible)
    assert (z[0] - z[1]).norm() > 1e-3


def test_odd_width_with_fixed_positions_runs_and_keeps_them_out_of_the_parameters() -> None:
    model = encoder(use_learnable_pos=False, d_model=15)
    assert model.pos_embed.shape == (10, 15)
    assert "pos_embed" not in dict(model.named_parameters())
    assert "pos_embed" in dict(model.named_buffers())
    z = model(torch.randn(2, 10), torch.ones(2, 10, dtype=torch.bool))
    assert z.isfinite().all()


def test_full_padding_while_compiling_gives_the_same_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    x = torch.randn(5, 10)
    visible = torch.rand(5, 10) < 0.5
    x[~visible] = float("nan")
    expected = model(x, visible)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    channels, real = pack_visible(visible)
    assert channels.shape == (5, 10)
    assert real is not None
    assert torch.allclose(model(x, visible), expected, atol=1e-5)
