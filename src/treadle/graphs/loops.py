"""Training and evaluation steps and loops as plain functions, for scripts with their own loop.

They keep no state and cannot be resumed; `GraphTrainer` does the same with checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.graphs.metrics import GraphMetrics

LossFn = Callable[[Tensor, Tensor], Tensor]
_log = logging.getLogger("treadle.graphs")


def train_step(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer,
    loss_fn: LossFn,
    device: torch.device | str,
    grad_clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, float]:
    """Run forward, backward and one optimizer step on a batch.

    Args:
        model: called with the batch.
        batch: torch_geometric batch with ``y``.
        optimizer: optimizer of the model's parameters.
        loss_fn: ``loss_fn(pred, target)``, such as from `get_loss_fn`.
        device: device of the model.
        grad_clip: maximum gradient norm; None disables clipping.
        scaler: gradient scaler; if given, the forward pass runs under autocast and the loss is scaled.

    Returns:
        ``loss``; with ``grad_clip`` also ``grad_norm``, the norm before clipping.

    Example:
        >>> from treadle.graphs import get_loss_fn
        >>> class Sum(nn.Linear):
        ...     def forward(self, batch): return super().forward(batch.x)
        >>> class Graphs:
        ...     x, y = torch.ones(2, 3), torch.ones(2, 1)
        ...     def to(self, device): return self
        >>> model = Sum(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sorted(train_step(model, Graphs(), optimizer, get_loss_fn("regression"), "cpu", grad_clip=1.0))
        ['grad_norm', 'loss']
    """
    model.train()
    batch = batch.to(device)
    optimizer.zero_grad()
    found: dict[str, float] = {}
    with torch.autocast(torch.device(device).type, enabled=scaler is not None):
        pred = model(batch)
    loss = loss_fn(pred, batch.y)
    (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
    if grad_clip is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        found["grad_norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), grad_clip))
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return {**found, "loss": float(loss.detach())}


@torch.no_grad()
def eval_step(model: nn.Module, batch: Any, loss_fn: LossFn, device: torch.device | str) -> dict[str, Any]:
    """Run the model on a batch in eval mode, without gradients.

    Returns:
        ``loss``, a float; ``pred`` and ``target``, tensors on the device.
    """
    model.eval()
    batch = batch.to(device)
    pred = model(batch)
    return {"loss": float(loss_fn(pred, batch.y)), "pred": pred, "target": batch.y}


@torch.no_grad()
def run_eval_loop(
    model: nn.Module, loader: Iterable[Any], loss_fn: LossFn, metrics: GraphMetrics, device: torch.device | str
) -> dict[str, float]:
    """Evaluate a model on a loader.

    Args:
        model: called with each batch, in eval mode.
        loader: batches with ``y``.
        loss_fn: ``loss_fn(pred, target)``.
        metrics: reset first.
        device: device of the model.

    Returns:
        The metrics, and ``loss``: the mean over batches, each weighted by the number of entries its loss averages over
        if the loss has a ``count``, else by its number of targets.

    Raises:
        ConfigError: the loader is empty.
    """
    metrics.reset()
    total = weight = 0.0
    for batch in loader:
        result = eval_step(model, batch, loss_fn, device)
        metrics.update(result["pred"], result["target"])
        count = float(getattr(loss_fn, "count", len)(result["target"]))
        total += result["loss"] * count
        weight += count
    return {**metrics.compute(), "loss": total / weight if weight else float("nan")}


@torch.no_grad()
def run_inference(model: nn.Module, loader: Iterable[Any], device: torch.device | str) -> list[Tensor]:
    """Return the outputs of a model for each batch of a loader, on the CPU."""
    model.eval()
    return [model(batch.to(device)).cpu() for batch in loader]


def run_training_loop(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    optimizer: Optimizer,
    scheduler: Any,
    loss_fn: LossFn,
    metrics: GraphMetrics,
    device: torch.device | str,
    epochs: int,
    grad_clip: float | None = None,
    mixed_precision: bool = False,
    log_every: int | None = 50,
    callbacks: Sequence[Callable[[int, nn.Module, Optimizer, dict[str, float]], object]] | None = None,
) -> dict[str, list[Any]]:
    """Train for a number of epochs, with an evaluation after each.

    Args:
        model: already on the device.
        train_loader: batches to train on.
        val_loader: batches to evaluate.
        optimizer: optimizer of the model's parameters.
        scheduler: advanced after each epoch, or None.
        loss_fn: ``loss_fn(pred, target)``.
        metrics: metrics of the evaluation.
        device: device of the model.
        epochs: number of epochs.
        grad_clip: maximum gradient norm, or None.
        mixed_precision: fp16 on a GPU with a gradient scaler, bf16 on the CPU.
        log_every: batches between log lines; None or 0 disables them.
        callbacks: called as ``callback(epoch, model, optimizer, val_metrics)``.

    Returns:
        ``train_loss``, ``val_loss`` and ``val_metrics``, one entry per epoch.
    """
    scaler = torch.amp.GradScaler(torch.device(device).type) if mixed_precision else None
    history: dict[str, list[Any]] = {"train_loss": [], "val_loss": [], "val_metrics": []}
    for epoch in range(epochs):
        losses = []
        for number, batch in enumerate(train_loader):
            losses.append(train_step(model, batch, optimizer, loss_fn, device, grad_clip, scaler)["loss"])
            if log_every and number % log_every == 0:
                _log.info("epoch %d batch %d: loss %.4f", epoch, number, losses[-1])
        found = run_eval_loop(model, val_loader, loss_fn, metrics, device)
        history["train_loss"].append(sum(losses) / len(losses) if losses else float("nan"))
        history["val_loss"].append(found["loss"])
        history["val_metrics"].append(found)
        if scheduler is not None:
            scheduler.step()
        for callback in callbacks or ():
            callback(epoch, model, optimizer, found)
    return history
