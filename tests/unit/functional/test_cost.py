"""What a step of the functional face may cost: no host read between log points, at most eight library frames."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import treadle
from functional_kit import loader, make, same_weights
from helpers import ReadsPerStep, library_frames
from treadle import BaseHook

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def labelled(batches, *, ignored=()):
    found = []
    for number in range(batches):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        labels = torch.where(x[:, 0] > 0.5, -100, (x[:, 1] > 0).long())
        found.append((x, torch.full((8,), -100) if number in ignored else labels))
    return found


def classifier(device, *, hooks=(), fused=True, seed=0, **settings):
    treadle.set_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    training = {"log_interval": None, "max_grad_norm": 0.1, **settings}
    loss_fn = nn.CrossEntropyLoss()
    return treadle.Trainer(model, optimizer, loss_fn, {"training": training}, device, hooks=hooks)


def test_counting_labels_clipping_and_averaging_read_nothing_on_the_host():
    hook = ReadsPerStep()
    classifier("cpu", hooks=[hook], ema_decay=0.9).train(labelled(20), 1)
    assert hook.per_step == [0] * 20


def test_at_most_eight_library_frames_lie_between_the_script_and_forward():
    seen = []

    class Looking(nn.Linear):
        def forward(self, input):
            seen.append(library_frames())
            return super().forward(input)

    make(model=Looking(4, 1)).train(loader(8), 1)
    assert seen == [["_forward_pass", "step", "forward", "train_step", "run", "fit", "train", "call"]]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("k", [1, 3])
def test_the_host_waits_for_no_tensor_on_a_gpu(k):
    class Strict(BaseHook):
        def on_before_step(self, trainer):
            if trainer.step > 3:
                torch.cuda.set_sync_debug_mode("error")

        def on_after_step(self, trainer):
            torch.cuda.set_sync_debug_mode("default")

    try:
        trainer = classifier("cuda", hooks=[Strict()], ema_decay=0.9, gradient_accumulation_steps=k)
        trainer.train(labelled(60, ignored=(7, 20)), 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.step == 60 // k


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_batches_without_a_label_that_lie_on_the_gpu_are_no_part_of_a_step(k, precision):
    data = [(x.cuda(), y.cuda()) for x, y in labelled(12, ignored=(3, 7, 8))]
    trainer = classifier("cuda", mixed_precision=precision, gradient_accumulation_steps=k)
    history = trainer.train(data, 2, data)
    assert all(torch.isfinite(torch.tensor(values)).all() for values in history.values())
    if precision != "fp16":
        assert trainer.applied_steps == (18 if k == 1 else 8)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_run_resumes_to_the_bit(tmp_path):
    def train(epochs, *, seed=0, **arguments):
        trainer = classifier("cuda", mixed_precision="bf16", ema_decay=0.9, seed=seed)
        return trainer, trainer.train(labelled(9), epochs, labelled(3), **arguments)

    straight, history = train(4)
    train(2, save_dir=tmp_path)
    resumed, again = train(4, seed=5, save_dir=tmp_path, resume_from="auto")
    assert again == history
    assert same_weights(straight, resumed)


@pytest.mark.gpu
@needs_cuda
def test_class_weights_and_metrics_follow_the_model_to_the_gpu():
    from torchmetrics.classification import MulticlassAccuracy

    model = nn.Linear(4, 2)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    metrics = MulticlassAccuracy(2, ignore_index=-100, average="micro")
    trainer = treadle.Trainer(model, None, loss_fn, metrics=metrics)
    history = trainer.train(labelled(6, ignored=(2,)), 1, labelled(6))
    assert trainer.device.type == "cuda"
    assert trainer.predict(labelled(6)).device.type == "cpu"
    assert 0 < history["eval_accuracy"][0] < 1


def test_the_optimizer_that_the_trainer_builds_is_fused_where_torch_can():
    def built_for(model):
        return treadle.Trainer(model, None, nn.MSELoss(), device="cpu").optimizer.defaults["fused"]

    counting = nn.Linear(2, 2)
    counting.count = nn.Parameter(torch.ones(2).long(), requires_grad=False)  # frozen, so not held
    assert (built_for(nn.Linear(2, 2)), built_for(counting)) == (True, True)
