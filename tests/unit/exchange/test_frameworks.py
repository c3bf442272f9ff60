"""Real files of Lightning, Accelerate and the Hugging Face Trainer, read to the bit."""

from __future__ import annotations

import copy
import json
import warnings
from argparse import Namespace

import pytest
import torch
from torch import nn

from foreign_kit import batches, fresh, plain_model
from helpers import differences
from treadle import CheckpointError, load_foreign, read_foreign
from treadle.exchange import export_weights

# Of transformers itself, when it saves a model; nothing here depends on it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def names(found):
    return {line.partition(":")[0] for line in found.not_taken}


def check_equal(found, model, optimizer):
    assert differences(dict(found.model), dict(model.state_dict())) == []
    assert differences(found.optimizer["state"], optimizer.state_dict()["state"]) == []


def check_training_goes_on_alike(model, optimizer, other, other_optimizer):
    """The next step of both is the same to the bit: weights, buffers and optimizer state were all taken over."""
    model, optimizer = copy.deepcopy((model, optimizer))
    x, y = next(iter(batches(1)))
    for net, stepper in ((model, optimizer), (other, other_optimizer)):
        stepper.zero_grad()
        nn.functional.mse_loss(net.train()(x), y).backward()
        stepper.step()
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []


# -- Lightning ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lightning_run(tmp_path_factory):
    """Train two epochs; write every third step and at the end. A second run has settings that are pickled."""
    folder = tmp_path_factory.mktemp("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's import and its advice on loaders; none is of this library
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self, width=8, settings=None):
                super().__init__()
                self.save_hyperparameters()
                self.model = plain_model(width)
                self.register_buffer("scale", torch.ones(2))

            def training_step(self, batch, index):
                return nn.functional.mse_loss(self.model(batch[0]), batch[1])

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def fit(module, name):
            saver = lightning.pytorch.callbacks.ModelCheckpoint(
                folder, filename=f"{name}-{{step}}", every_n_train_steps=3, save_top_k=-1
            )
            at_the_end = lightning.pytorch.callbacks.ModelCheckpoint(folder, filename=f"{name}-end")
            trainer = lightning.Trainer(
                max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                callbacks=[saver, at_the_end], default_root_dir=folder,
            )  # fmt: skip
            trainer.fit(module, batches(4))
            trainer.save_checkpoint(folder / f"{name}.ckpt")
            return trainer.optimizers[0]

        module = Module()
        optimizer = fit(module, "plain")
        fit(Module(settings=Namespace(lr=0.1)), "pickled")
    return folder, module, optimizer


def test_a_file_of_lightning_gives_weights_optimizer_and_numbers(lightning_run):
    folder, module, optimizer = lightning_run
    found = read_foreign(folder / "plain.ckpt")
    assert (found.kind, found.epoch, found.step) == ("lightning", 2, 8)
    check_equal(found, module, optimizer)
    assert names(found) == {"loops", "callbacks", "lr_schedulers", "hyper_parameters", "random numbers"}
    assert "(width, settings)" in next(line for line in found.not_taken if line.startswith("hyper_parameters"))


def test_the_epochs_of_lightning_are_those_trained_wherever_the_file_was_written(lightning_run):
    folder, *_ = lightning_run
    middle = read_foreign(folder / "plain-step=6.ckpt")
    assert (middle.epoch, middle.step) == (1, 6)
    end = folder / "plain-end.ckpt"
    assert torch.load(end, weights_only=True)["epoch"] == 1  # which is why it is not taken as it stands
    assert (read_foreign(end).epoch, read_foreign(end).step) == (2, 8)


def test_the_model_inside_a_lightning_module_takes_its_part_when_told_so(lightning_run, caplog):
    folder, module, optimizer = lightning_run
    model, other = fresh()
    with pytest.raises(CheckpointError, match=r"missing 0.weight.*Pass prefix='model\.'"):
        load_foreign(model, folder / "plain.ckpt")
    found = load_foreign(model, folder / "plain.ckpt", optimizer=other, prefix="model.")
    assert found.not_taken[0] == "scale: outside prefix='model.'"
    assert differences(dict(model.state_dict()), dict(module.model.state_dict())) == []
    assert len(caplog.records) == 1
    assert "not taken over: scale: outside" in caplog.text
    assert "hyper_parameters" in caplog.text
    check_training_goes_on_alike(module.model, optimizer, model, other)


def test_pickled_settings_of_lightning_are_refused_in_one_line(lightning_run):
    folder, *_ = lightning_run
    with pytest.raises(CheckpointError, match=r"pickled objects \(argparse.Namespace.*save only the weights") as caught:
        read_foreign(folder / "pickled.ckpt")
    assert "\n" not in str(caught.value)


# -- Accelerate ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["safetensors", "bin"])
def accelerate_run(request, tmp_path_factory):
    from accelerate import Accelerator

    folder = tmp_path_factory.mktemp("accelerate") / "state"
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared = accelerator.prepare(model, optimizer, batches(4), torch.optim.lr_scheduler.StepLR(optimizer, 3))
    net, stepper, loader, schedule = prepared
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(net(x), y))
        stepper.step()
        schedule.step()
        stepper.zero_grad()
    accelerator.save_state(str(folder), safe_serialization=request.param)
    return folder, model, optimizer


def test_a_folder_of_accelerate_gives_weights_and_optimizer(accelerate_run):
    folder, model, optimizer = accelerate_run
    found = read_foreign(folder)
    assert (found.kind, found.epoch, found.step) == ("accelerate", None, None)
    check_equal(found, model, optimizer)
    assert names(found) == {"random_states_0.pkl", "scheduler.bin"}


def test_training_goes_on_from_a_folder_of_accelerate(accelerate_run):
    folder, model, optimizer = accelerate_run
    other, other_optimizer = fresh()
    load_foreign(other, folder, optimizer=other_optimizer)
    check_training_goes_on_alike(model, optimizer, other, other_optimizer)


# -- transformers -------------------------------------------------------------------------------------------------


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


def small_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


@pytest.fixture(scope="module")
def trainer_run(tmp_path_factory):
    from transformers import Trainer, TrainingArguments

    folder = tmp_path_factory.mktemp("transformers")
    arguments = TrainingArguments(
        str(folder), max_steps=3, save_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(small_gpt2(), arguments, train_dataset=Counting())
    trainer.train()
    return folder, trainer.model, trainer.optimizer


def test_a_folder_of_the_hugging_face_trainer_gives_weights_optimizer_and_numbers(trainer_run):
    folder, model, optimizer = trainer_run
    found = read_foreign(folder / "checkpoint-3")
    assert (found.kind, found.epoch, found.step) == ("transformers", 0.75, 3)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    tied = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert differences(found.model, tied) == []
    assert differences(found.optimizer["state"], optimizer.state_dict()["state"]) == []
    assert names(found) == {"rng_state.pth", "scheduler.pt", "training_args.bin"}


def test_a_tied_weight_that_the_file_has_once_is_loaded_and_stays_tied(trainer_run):
    folder, model, optimizer = trainer_run
    other = small_gpt2()
    # The groups of the Trainer: with and without weight decay.
    decayed = [p for name, p in other.named_parameters() if p.ndim > 1]
    rest = [p for name, p in other.named_parameters() if p.ndim == 1]
    stepper = torch.optim.AdamW([{"params": decayed}, {"params": rest}], lr=1.0)
    load_foreign(other, folder / "checkpoint-3", optimizer=stepper)
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    assert other.lm_head.weight is other.transformer.wte.weight
    assert stepper.param_groups[0]["lr"] == 5e-5
    assert differences(stepper.state_dict()["state"], optimizer.state_dict()["state"]) == []


def test_the_run_folder_of_the_trainer_is_refused_with_the_newest_checkpoint(trainer_run):
    folder, *_ = trainer_run
    with pytest.raises(CheckpointError, match="give one of them, such as checkpoint-3"):
        read_foreign(folder)


def test_weights_in_several_files_are_read_together(tmp_path):
    model = small_gpt2()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    found = read_foreign(tmp_path)
    assert set(found.model) == set(index["weight_map"])
    other = small_gpt2()
    with torch.no_grad():
        other.transformer.wte.weight.zero_()
    load_foreign(other, tmp_path)
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []


def test_adapters_without_their_base_are_refused_in_words(tmp_path):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(small_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    adapted.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"PeftModel\.from_pretrained"):
        read_foreign(tmp_path)


def test_an_export_of_a_folder_holds_its_weights_and_names_the_rest(trainer_run, tmp_path):
    from transformers import GPT2LMHeadModel

    folder, model, _ = trainer_run
    done = export_weights(folder / "checkpoint-3", "hf", out=tmp_path / "hf")
    assert done.source.left_out == ["optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"]
    assert sorted(path.name for path in done.path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    again, report = GPT2LMHeadModel.from_pretrained(done.path, output_loading_info=True)
    assert not any(report.values())
    assert differences(dict(again.state_dict()), dict(model.state_dict())) == []


def test_an_export_of_a_file_of_lightning_is_a_state_dict(lightning_run, tmp_path):
    folder, module, _ = lightning_run
    done = export_weights(folder / "plain.ckpt", "torch", out=tmp_path / "w.pt")
    assert (done.source.kind, done.source.step, done.source.epoch) == ("lightning", 8, 2)
    assert differences(torch.load(done.path, weights_only=True), dict(module.state_dict())) == []
