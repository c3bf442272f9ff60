"""What torch's StateDictOptions do to states: frozen weights are left out, what does not fit is passed over."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from helpers import through_a_file
from treadle import BaseTrainer, CheckpointError, ConfigError, EmaHook


class Fit(BaseTrainer):
    """A frozen first layer, a trained second one, and a head that may have another name."""

    head = "head"
    seed = 0

    def build_data_loader(self):
        return [torch.ones(2, 3)] * 4

    def build_model(self):
        torch.manual_seed(self.seed)
        layers = {"base": nn.Linear(3, 3).requires_grad_(False), "body": nn.Linear(3, 3), self.head: nn.Linear(3, 1)}
        return nn.ModuleDict(layers)

    def build_optimizer(self):
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=0.1)

    def build_hooks(self):
        return [EmaHook(0.5)]

    def forward(self, input):
        layers = self.model
        return layers[self.head](layers["body"](layers["base"](input))).square().mean(), {}


class OtherHead(Fit):
    head = "other"


def fit(steps, options=None, kind=Fit):
    return kind(steps, device="cpu", state_dict_options=options)


def test_frozen_weights_are_left_out_and_a_run_goes_on_to_the_bit():
    options = StateDictOptions(ignore_frozen_params=True)
    straight, cut = fit(6, options), fit(3, options)
    straight.train()
    cut.train()
    saved = through_a_file(cut.state_dict())
    assert sorted(saved["base"]) == ["base.bias", "base.weight"]
    for weights in (saved["model"], saved["ema"]["ema"]["shadow"]):
        assert sorted(weights) == ["body.bias", "body.weight", "head.bias", "head.weight"]
    for asked in (options, None):  # the file says itself what it leaves out
        resumed = fit(6, asked)
        resumed.load_state_dict(through_a_file(saved))  # an optimizer goes on in the tensors that it is given
        resumed.train()
        for name, value in straight.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_other_frozen_weights_are_refused():
    saved = fit(0, StateDictOptions(ignore_frozen_params=True)).state_dict()
    other = fit(3)
    other.seed = 1
    with pytest.raises(CheckpointError, match="another base model: 2 of 2 frozen weights differ"):
        other.load_state_dict(saved)


def test_not_strict_loads_what_fits_with_its_optimizer_state_and_says_what_does_not(caplog):
    source = fit(3)
    source.train()
    saved = through_a_file(source.state_dict())
    with pytest.raises(CheckpointError, match=r"missing other\.weight"):
        fit(6, kind=OtherHead).load_state_dict(saved)
    loose = fit(6, StateDictOptions(strict=False), kind=OtherHead)
    loose.load_state_dict(saved)
    assert (
        "2 weights are missing from the checkpoint and keep their initial values: other.weight, other.bias"
        in caplog.text
    )
    assert "2 weights of the checkpoint are not in the model and are ignored: head.weight, head.bias" in caplog.text
    assert torch.equal(loose.model["body"].weight, source.model["body"].weight)
    moments = loose.optimizer.state[loose.model["body"].weight]
    assert torch.equal(moments["exp_avg"], source.optimizer.state[source.model["body"].weight]["exp_avg"])
    assert loose.model["other"].weight not in loose.optimizer.state
    loose.train()
    assert (loose.step, loose.applied_steps) == (6, 6)


def test_not_strict_changes_nothing_where_everything_fits(caplog):
    straight, cut = fit(6), fit(3)
    straight.train()
    cut.train()
    resumed = fit(6, StateDictOptions(strict=False))
    resumed.load_state_dict(through_a_file(cut.state_dict()))
    resumed.train()
    assert "strict=False" not in caplog.text
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_weight_of_another_shape_is_an_error_all_the_same():
    saved = fit(0).state_dict()
    saved["model"]["body.bias"] = torch.ones(4)
    with pytest.raises(CheckpointError, match=r"body\.bias is"):
        fit(1, StateDictOptions(strict=False)).load_state_dict(saved)


@pytest.mark.parametrize("option", [
    {"broadcast_from_rank0": True, "full_state_dict": True}, {"flatten_optimizer_state_dict": True},
    {"keep_submodule_prefixes": False}, {"dsd_fqn_modifiers": "other"},
])  # fmt: skip
def test_an_option_without_a_meaning_here_is_refused_at_once(option):
    with pytest.raises(ConfigError, match=f"state_dict_options: {next(iter(option))}="):
        fit(1, StateDictOptions(**option))
