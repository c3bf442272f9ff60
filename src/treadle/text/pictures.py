"""Plot of ``treadle train text``: losses of both trainings, with the n-gram baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.runs.figures import BLUE, INK, MUTED, ORANGE, label_axes, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_History = Mapping[str, Sequence[Any]]


def plot_losses(base: _History, lora: _History, *, metrics: Mapping[str, Any], path: Path) -> Path:
    """Plot training and validation loss by epoch of both trainings, with the n-gram baselines as lines.

    Args:
        base: history of the first training: ``epoch``, ``train_loss``, ``eval_loss``.
        lora: history of the fine-tuning.
        metrics: contents of ``metrics.json``.
        path: output file, ending in ``.png``.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    _curves(left, base, metrics["best_epoch"])
    _levels(left, {f"{name}s counted": score["loss"] for name, score in metrics["baselines"].items()})
    label_axes(left, x="epoch", y="loss, nats per token", title="GPT-2 on the manual")
    _curves(right, lora, metrics["lora"]["best_epoch"])
    counted = metrics["lora"]["baselines"]
    _levels(right, {"before LoRA": metrics["lora"]["before"]["loss"], "bigrams counted": counted["bigram"]["loss"]})
    label_axes(right, x="epoch", title="LoRA on the topics about statements")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)


def _curves(axes: Axes, history: _History, best_epoch: int) -> None:
    from matplotlib.ticker import MaxNLocator

    style_axes(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    epochs, val = list(history["epoch"]), list(history["eval_loss"])
    line: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
    axes.plot(epochs, history["train_loss"], color=BLUE, label="training, with dropout", **line)
    axes.plot(epochs, val, color=ORANGE, label="validation", **line)
    if best_epoch in epochs:
        best = val[epochs.index(best_epoch)]
        axes.plot([best_epoch], [best], "o", color=ORANGE, markersize=9, fillstyle="none")
        axes.annotate(
            f"{best:.2f}", (best_epoch, best), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=9,
            color=INK,
        )  # fmt: skip


def _levels(axes: Axes, levels: Mapping[str, float]) -> None:
    for name, level in levels.items():
        axes.axhline(level, color=MUTED, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"{name}: {level:.2f}", (1.0, level), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", fontsize=9, color=MUTED,
        )  # fmt: skip
