"""Warning about probabilities passed to a loss of torch that takes logits, and about logits where it does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_NORMALISING = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}
_LINEAR = {"AddmmBackward0": "linear layer", "MmBackward0": "linear layer", "ConvolutionBackward0": "convolution"}
_SAME_VALUES = ("View", "UnsafeView", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "Clone", "ToCopy", "Alias")
_PARTS_OF_A_LOSS = 64  # nodes, from the loss; models are behind the losses found there


def warn_of_logits(engine: Engine, loss: Tensor) -> None:
    """Warn if a loss is computed from the output of a softmax or sigmoid that it applies itself.

    The autograd graph of the loss is read, so the user's own step, loss and model are covered. A scaled or otherwise
    changed output is not reported, nor one that a compiled model computes.

    Args:
        engine: engine of the run, for its log.
        loss: loss of a micro-batch, with its graph.
    """
    for node in _nearest(loss.grad_fn):
        name = node.name()
        if name.startswith("NllLoss"):
            before = _source(node)
            if before is not None and before.name() == "LogSoftmaxBackward0":
                _warn(engine, "cross_entropy", "logits", before=_source(before), wrong=_NORMALISING)
            else:
                _warn(engine, "nll_loss", "log-probabilities", before=before, wrong={**_NORMALISING, **_LINEAR})
        elif name.startswith("BinaryCrossEntropyWithLogits"):
            wrong = {**_NORMALISING, "LogSoftmaxBackward0": "log_softmax", "LogSigmoidBackward0": "logsigmoid"}
            _warn(engine, "binary_cross_entropy_with_logits", "logits", before=_source(node), wrong=wrong)


def _warn(engine: Engine, loss: str, wanted: str, *, before: Any, wrong: dict[str, str]) -> None:
    operation = None if before is None else wrong.get(before.name())
    if operation is None:
        return
    fix = "end the model in log_softmax, or use cross_entropy" if loss == "nll_loss" else f"remove the {operation}"
    engine.logger.warning("loss: %s takes %s, and it is given the output of a %s; %s", loss, wanted, operation, fix)


def _nearest(node: Any) -> Iterator[Any]:
    """Yield the nodes of a graph, those next to the loss first."""
    waiting, seen = deque([node]), {None}
    while waiting and len(seen) <= _PARTS_OF_A_LOSS:
        found = waiting.popleft()
        if found not in seen:
            seen.add(found)
            yield found
            waiting += [further for further, _ in found.next_functions]


def _source(node: Any) -> Any:
    """Return the operation that computed the first input of a node, ignoring those that keep its values."""
    found = node.next_functions[0][0]
    while found is not None and found.name().partition("Backward")[0] in _SAME_VALUES:
        found = found.next_functions[0][0]
    return found
