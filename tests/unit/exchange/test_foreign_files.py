"""Files of plain PyTorch and safetensors, and files that must not be loaded."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from foreign_kit import batches, fresh, plain_model, trained
from helpers import differences
from treadle import CheckpointError, ConfigError, load_foreign, read_foreign


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


class Tied(nn.Module):
    """Two names for one weight, as in a language model."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 5, bias=False)
        self.embedding = nn.Embedding(5, 3)
        self.embedding.weight = self.head.weight


def saved(tree, path):
    torch.save(tree, path)
    return path


# -- plain torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model", "model_state_dict", "state_dict", "net"])
@pytest.mark.parametrize("optimizer_key", ["optimizer", "optimizer_state_dict"])
def test_the_usual_keys_of_a_hand_written_file_are_known(tmp_path, key, optimizer_key):
    model, optimizer = trained()
    tree = {key: model.state_dict(), optimizer_key: optimizer.state_dict(), "epoch": 3, "global_step": 12}
    found = read_foreign(saved(tree, tmp_path / "a.pt"))
    assert (found.kind, found.epoch, found.step, found.not_taken) == ("torch", 3, 12, [])
    assert differences(found.model, dict(model.state_dict())) == []
    assert differences(found.optimizer["state"], optimizer.state_dict()["state"]) == []


def test_a_bare_state_dict_is_known(tmp_path):
    model, _ = trained()
    found = read_foreign(saved(model.state_dict(), tmp_path / "a.pth"))
    assert differences(found.model, dict(model.state_dict())) == []
    assert (found.optimizer, found.epoch, found.step) == (None, None, None)


def test_what_is_not_taken_is_named_with_its_reason(tmp_path):
    model, optimizer = trained()
    tree = {
        "model": model.state_dict(), "ema": model.state_dict(), "optimizer": optimizer.state_dict(),
        "optimizer_d": optimizer.state_dict(), "lr_sched": {"last_epoch": 3}, "scaler": {"scale": 2.0},
        "rng": torch.zeros(3), "args": {"lr": 0.1},
    }  # fmt: skip
    reasons = dict(line.split(": ", 1) for line in read_foreign(saved(tree, tmp_path / "a.pt")).not_taken)
    assert set(reasons) == {"ema", "optimizer_d", "lr_sched", "scaler", "rng", "args"}
    assert "weights beside" in reasons["ema"]
    assert "an optimizer beside" in reasons["optimizer_d"]
    assert "schedule" in reasons["lr_sched"]
    assert "scaler" in reasons["scaler"]
    assert "random state" in reasons["rng"]
    assert "no equivalent" in reasons["args"]


def test_a_file_without_weights_names_its_keys(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no weights.*its keys are generator, epoch"):
        read_foreign(saved({"generator": {"deep": {"w": torch.ones(1)}}, "epoch": 3}, tmp_path / "a.pt"))


def test_a_checkpoint_of_treadle_is_sent_to_its_own_reader(tmp_path):
    with pytest.raises(CheckpointError, match="checkpoint of treadle"):
        read_foreign(saved({"format": {"name": "treadle", "version": 1}, "model": {}}, tmp_path / "a.pt"))


# -- prefixes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_the_prefixes_of_wrappers_are_taken_off(tmp_path, wrap):
    model, _ = trained()
    found = read_foreign(saved(wrap(model).state_dict(), tmp_path / "a.pt"))
    assert differences(found.model, dict(model.state_dict())) == []


def test_a_part_of_the_models_own_that_is_called_module_keeps_its_name(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 1)

    old, new = Own(), Own()
    found = load_foreign(new, saved(old.state_dict(), tmp_path / "a.pt"))
    assert list(found.model) == ["module.weight", "module.bias"]
    assert differences(dict(new.state_dict()), dict(old.state_dict())) == []


def test_a_prefix_is_taken_off_when_the_target_says_so_and_only_then(tmp_path):
    model, _ = trained()
    path = saved({f"model.{name}": value for name, value in model.state_dict().items()}, tmp_path / "a.pt")
    assert all(name.startswith("model.") for name in read_foreign(path).model)
    other, _ = fresh()
    assert load_foreign(other, path).prefix == "model."
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    whole = nn.ModuleDict({"model": plain_model()})
    assert load_foreign(whole, path).prefix == ""
    assert differences(dict(whole["model"].state_dict()), dict(model.state_dict())) == []


def test_a_prefix_that_no_weight_has_is_refused(tmp_path):
    path = saved(trained()[0].state_dict(), tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"prefix='net\.'.*the first is '0.weight'"):
        load_foreign(fresh()[0], path, prefix="net.")


# -- loading strictly ---------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_hand_written_file_to_the_bit(tmp_path, caplog):
    model, optimizer = trained()
    path = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    other, other_optimizer = fresh()
    load_foreign(other, path, optimizer=other_optimizer)
    assert caplog.text == ""
    for net, stepper in ((model, optimizer), (other, other_optimizer)):
        for x, y in batches(3):
            nn.functional.mse_loss(net(x), y).backward()
            stepper.step()
            stepper.zero_grad()
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    assert differences(other_optimizer.state_dict(), optimizer.state_dict()) == []


def test_an_optimizer_that_is_not_asked_for_is_named(tmp_path, caplog):
    model, optimizer = trained()
    path = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    load_foreign(fresh()[0], path)
    assert "not taken over: optimizer: pass optimizer=" in caplog.text


def refused(tmp_path, tree, model, optimizer, match):
    """The checkpoint is refused and nothing was changed."""
    before = [{name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()]
    with pytest.raises(CheckpointError, match=match) as caught:
        load_foreign(model, saved(tree, tmp_path / "a.pt"), optimizer=optimizer)
    assert "\n" not in str(caught.value)
    assert differences([dict(model.state_dict()), optimizer.state_dict()], before) == []


def test_missing_unexpected_and_misshaped_weights_are_listed_and_nothing_changes(tmp_path):
    model, optimizer = trained()
    weights = dict(model.state_dict())
    del weights["0.bias"]
    weights["extra"] = torch.ones(1)
    weights["2.weight"] = torch.ones(1, 3)
    tree = {"model": weights, "optimizer": optimizer.state_dict()}
    refused(tmp_path, tree, *fresh(), r"missing 0.bias; unexpected extra; 2.weight is \(1, 3\) in the checkpoint and")


def test_an_optimizer_with_other_groups_is_refused_and_nothing_changes(tmp_path):
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    other, _ = fresh()
    parameters = list(other.parameters())
    split = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    refused(tmp_path, tree, other, split, "has 1 parameter groups and this one 2")
    refused(tmp_path, tree, other, torch.optim.AdamW(parameters[:2]), "group 0 has 2 parameters, the checkpoint's has")


def test_an_optimizer_whose_parameters_come_in_another_order_is_refused(tmp_path):
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    other, _ = fresh()
    turned = torch.optim.AdamW(list(other.parameters())[::-1])
    refused(tmp_path, tree, other, turned, r"exp_avg is \(8, 4\) where 2.bias is \(1,\)")


def test_an_optimizer_with_names_is_matched_by_name(tmp_path):
    torch.manual_seed(0)
    model = plain_model()
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.01)
    for x, y in batches():
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    tree = {"model": {f"module.{k}": v for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}
    tree["optimizer"]["param_groups"][0]["param_names"] = [f"module.{n}" for n in dict(model.named_parameters())][::-1]
    other, other_optimizer = fresh()
    load_foreign(other, saved(tree, tmp_path / "a.pt"), optimizer=other_optimizer)
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], other_optimizer.state[two]["exp_avg"]), name


def test_another_kind_of_optimizer_is_refused(tmp_path):
    model, optimizer = trained()
    other, _ = fresh()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    refused(tmp_path, tree, other, torch.optim.SGD(other.parameters(), lr=0.1), "settings .*betas.*where SGD has")


def test_a_file_without_optimizer_state_is_refused_when_it_is_asked_for(tmp_path):
    refused(tmp_path, trained()[0].state_dict(), *fresh(), "holds no optimizer state")


# -- tied weights and safetensors ---------------------------------------------------------------------------------


def test_tied_weights_that_safetensors_stores_once_are_loaded(tmp_path):
    old, new = Tied(), Tied()
    save_model(old, str(tmp_path / "a.safetensors"))
    assert set(read_foreign(tmp_path / "a.safetensors").model) == {"head.weight", "embedding.weight"}
    load_foreign(new, tmp_path / "a.safetensors")
    assert torch.equal(new.head.weight, old.head.weight)
    assert new.embedding.weight is new.head.weight


@pytest.mark.parametrize("name", ["head.weight", "embedding.weight"])
def test_either_name_of_a_tied_weight_is_enough(tmp_path, name):
    value = torch.randn(5, 3)
    model = Tied()
    load_foreign(model, saved({name: value}, tmp_path / "a.pt"))
    assert torch.equal(model.head.weight, value)


def test_two_weights_for_one_tied_weight_are_refused(tmp_path):
    tree = {"head.weight": torch.zeros(5, 3), "embedding.weight": torch.ones(5, 3)}
    with pytest.raises(CheckpointError, match=r"head.weight and embedding.weight are one tied weight here"):
        load_foreign(Tied(), saved(tree, tmp_path / "a.pt"))


# -- files that must not be loaded --------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", [True, False], ids=["pickle", "archive"])
def test_a_malicious_pickle_is_refused_in_one_line_and_nothing_runs(tmp_path, bare):
    path, witness = tmp_path / "a.pt", tmp_path / "was_executed"
    tree = {"model": {"w": torch.ones(1)}, "extra": Code(witness)}
    path.write_bytes(pickle.dumps(tree)) if bare else torch.save(tree, path)
    for read in (read_foreign, lambda file: load_foreign(nn.Linear(1, 1), file)):
        with pytest.raises(CheckpointError, match=r"refused: .*system") as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert not witness.exists()


def test_a_whole_pickled_model_is_refused_with_the_fix(tmp_path):
    with pytest.raises(CheckpointError, match=r"pickled objects.*torch\.save\(model\.state_dict\(\)"):
        read_foreign(saved(nn.Linear(1, 1), tmp_path / "a.pt"))


@pytest.mark.parametrize("where", ["model.safetensors", "alone.safetensors"])
@pytest.mark.parametrize("left", [4, 60, -1])
def test_a_truncated_safetensors_file_is_refused_in_one_line(tmp_path, where, left):
    path = tmp_path / where
    save_file({"w": torch.ones(8)}, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"damaged|neither a torch") as caught:
        read_foreign(tmp_path if where == "model.safetensors" else path)
    assert "\n" not in str(caught.value)


def test_a_truncated_torch_file_is_refused(tmp_path):
    path = saved({"w": torch.ones(800)}, tmp_path / "a.pt")
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        read_foreign(path)


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path):
    save_file({"w": torch.ones(8)}, tmp_path / "secret.safetensors")
    (tmp_path / "in").mkdir()
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(CheckpointError, match="outside its folder"):
            read_foreign(tmp_path / "in")


def test_damaged_json_in_a_folder_is_refused_in_one_line(tmp_path):
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"global_step": ')
    with pytest.raises(CheckpointError, match=r"trainer_state\.json.*damaged"):
        read_foreign(tmp_path)


def test_a_header_that_claims_another_shape_is_refused(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="damaged"):
        read_foreign(tmp_path / "a.safetensors")


def test_a_second_model_of_a_folder_is_named(tmp_path):
    for name in ("model.safetensors", "model_1.safetensors"):
        save_file({"w": torch.ones(8)}, tmp_path / name)
    assert read_foreign(tmp_path).not_taken == ["model_1.safetensors: a second model; the first one is read"]


@pytest.mark.parametrize(("name", "match"), [
    ("pytorch_model_fsdp_0", "merge-weights"), ("zero_to_fp32.py", "DeepSpeed"), ("nothing.txt", "holds none of"),
])  # fmt: skip
def test_a_folder_that_cannot_be_read_says_what_it_is(tmp_path, name, match):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=match):
        read_foreign(tmp_path)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        read_foreign(tmp_path / "absent.pt")


def test_without_safetensors_the_extra_to_install_is_named(tmp_path, monkeypatch):
    save_file({"w": torch.ones(8)}, tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'treadle\[cli\]'"):
        read_foreign(tmp_path / "a.safetensors")
