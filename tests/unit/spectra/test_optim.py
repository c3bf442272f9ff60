"""Optimizer groups and the LambdaLR builders of the spectra face."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import nn

from treadle.spectra.model import ChemoMAE
from treadle.spectra.optim import build_optimizer, build_scheduler, build_warmup_cosine, split_by_decay

C1 = [
    *(0.2, 0.4, 0.6, 0.8, 1, 1, 0.990166, 0.961095, 0.914058, 0.851109, 0.775, 0.689058, 0.597038, 0.502962),
    *(0.410942, 0.325, 0.248891, 0.185942, 0.138905, 0.109834, 0.1),
]


def small_model(**options: Any) -> ChemoMAE:
    return ChemoMAE(
        seq_len=16,
        d_model=8,
        nhead=2,
        num_layers=2,
        dim_feedforward=16,
        latent_dim=4,
        n_blocks=4,
        n_mask=2,
        **options,
    )


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [{names[id(param)] for param in group["params"]} for group in optimizer.param_groups]


def test_defaults_and_groups_of_the_model() -> None:
    model = small_model()
    optimizer = build_optimizer(model)
    assert type(optimizer) is torch.optim.AdamW
    decayed, undecayed = group_names(model, optimizer)
    assert decayed == {
        "encoder.token_proj.weight",
        *(f"encoder.layers.{i}.{m}.weight" for i in (0, 1) for m in ("in_proj", "out_proj", "linear1", "linear2")),
        "encoder.to_latent.weight",
        "decoder.weight",
    }
    assert {"encoder.cls_token", "encoder.pos_embed", "encoder.layers.0.norm1.weight"} <= undecayed
    assert decayed | undecayed == {name for name, _ in model.named_parameters()}
    assert not decayed & undecayed
    assert [g["weight_decay"] for g in optimizer.param_groups] == [1e-4, 0.0]
    for group in optimizer.param_groups:
        assert group["lr"] == 3e-4
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-8
        assert group["fused"] is True


def test_arguments_reach_the_groups() -> None:
    optimizer = build_optimizer(small_model(), lr=2e-4, weight_decay=0.05, betas=(0.8, 0.9), eps=1e-6)
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"], first["betas"], first["eps"]) == (
        2e-4,
        0.05,
        (0.8, 0.9),
        1e-6,
    )
    assert (second["lr"], second["weight_decay"]) == (2e-4, 0.0)


class Zoo(nn.Module):
    """Norms under names that say nothing, biases of every spelling, a norm-like name on a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.BatchNorm1d(3)
        self.b = nn.GroupNorm(1, 3)
        self.c = nn.RMSNorm(3)
        self.d = nn.InstanceNorm1d(3, affine=True)
        self.e = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.f = nn.GRU(3, 4)
        self.norm_like = nn.Linear(3, 3)
        self.my_cls_token_2 = nn.Parameter(torch.zeros(3, 3))
        self.old_pos_embedding = nn.Parameter(torch.zeros(3, 3))


def test_grouping_goes_by_dimensions_and_kinds_of_modules_not_by_names() -> None:
    model = Zoo()
    decayed, undecayed = group_names(model, build_optimizer(model))
    assert decayed == {
        "e.in_proj_weight",
        "e.out_proj.weight",
        "f.weight_ih_l0",
        "f.weight_hh_l0",
        "norm_like.weight",
        "e.bias_k",
        "e.bias_v",
        "my_cls_token_2",
        "old_pos_embedding",
    }
    assert {
        "a.weight",
        "b.bias",
        "c.weight",
        "d.weight",
        "e.in_proj_bias",
        "f.bias_ih_l0",
    } <= undecayed


def test_frozen_parameters_are_left_out_and_shared_ones_come_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[3].weight = model[2].weight
    decayed, undecayed = group_names(model, build_optimizer(model))
    assert decayed == {"2.weight"}
    assert undecayed == {"0.bias", "1.weight", "2.bias", "3.bias"}


def test_a_weight_shared_with_a_norm_is_undecayed() -> None:
    model = nn.Sequential(nn.Bilinear(1, 1, 1), nn.LayerNorm(3))
    model[0].register_parameter("scale", model[1].weight)
    decayed, undecayed = split_by_decay(model)
    assert not any(param is model[1].weight for param in decayed)
    assert sum(param is model[1].weight for param in undecayed) == 1


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"model \(Linear\) has no parameter with requires_grad=True; unfreeze"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False))


def test_unfused_where_the_device_has_no_kernel() -> None:
    assert build_optimizer(nn.Linear(2, 2, device="meta")).param_groups[0]["fused"] is None


def test_only_the_decayed_group_shrinks_without_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(model, lr=0.1, weight_decay=0.5)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.allclose(model[0].weight, before["0.weight"] * (1 - 0.1 * 0.5))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(dict(model.named_parameters())[name], before[name])


def run_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("face", ["epochs", "steps"])
def test_scheduler_gives_the_conformance_numbers(face: str) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), lr=2.0)
    if face == "epochs":
        scheduler = build_scheduler(optimizer, steps_per_epoch=5, epochs=4)
    else:
        scheduler = build_warmup_cosine(optimizer, warmup_steps=5, total_steps=20, min_lr_scale=0.1)
    assert type(scheduler) is torch.optim.lr_scheduler.LambdaLR
    assert run_schedule(scheduler, 21) == pytest.approx([2.0 * factor for factor in C1], abs=2e-6)


def test_step_builder_ends_at_zero_by_default() -> None:
    scheduler = build_warmup_cosine(build_optimizer(nn.Linear(2, 2), lr=1.0), warmup_steps=0, total_steps=4)
    rates = run_schedule(scheduler, 5)
    assert rates == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def only_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and only_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(only_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float)


def test_scheduler_state_is_plain_and_resumes_to_the_bit() -> None:
    def fresh() -> torch.optim.lr_scheduler.LambdaLR:
        return build_scheduler(build_optimizer(nn.Linear(2, 2), lr=0.3), steps_per_epoch=5, epochs=4)

    whole = run_schedule(fresh(), 20)
    first = fresh()
    head = run_schedule(first, 7)
    state = first.state_dict()
    assert only_plain(state), state
    buffer = io.BytesIO()
    torch.save({"scheduler": state, "optimizer": first.optimizer.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    second = fresh()
    second.optimizer.load_state_dict(loaded["optimizer"])
    second.load_state_dict(loaded["scheduler"])
    assert head + run_schedule(second, 13) == whole


def test_long_warmup_is_legal_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="treadle.schedules"):
        scheduler = build_scheduler(
            build_optimizer(nn.Linear(2, 2), lr=1.0), steps_per_epoch=2, epochs=2, warmup_epochs=4
        )
        rates = run_schedule(scheduler, 10)
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1, 1])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps_per_epoch": 0, "epochs": 4}, "steps_per_epoch=0: must be at least 1"),
        ({"steps_per_epoch": 5, "epochs": 0}, "epochs=0: must be at least 1"),
        ({"steps_per_epoch": 5, "epochs": 4, "warmup_epochs": -1}, "warmup_epochs=-1: must be at least 0"),
        (
            {"steps_per_epoch": 5, "epochs": 4, "min_lr_scale": -0.1},
            "min_scale=-0.1: must lie in",
        ),
    ],
)
def test_bad_numbers_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build_scheduler(build_optimizer(nn.Linear(2, 2)), **options)
