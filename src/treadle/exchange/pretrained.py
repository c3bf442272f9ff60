"""Models with ``save_pretrained``: the folder that ``from_pretrained`` loads, whole or not at all.

The library knows such models by their methods alone and imports neither transformers nor peft. Their checkpoints are
files like any other; the folder is a copy of the weights for other programs and is never read again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn

from treadle.checkpoint.files import replacing_folder, reported
from treadle.checkpoint.schema import non_finite_names, to_plain
from treadle.distributed import is_sharded, rank, unwrap
from treadle.distributed.state_names import clean_name, model_state

_log = logging.getLogger("treadle.checkpoint")


def has_save_pretrained(model: nn.Module) -> bool:
    """Return whether a model, wrapped or compiled or not, knows how to write itself into a folder.

    Example:
        >>> has_save_pretrained(nn.Linear(1, 1))
        False
    """
    return callable(getattr(unwrap(model), "save_pretrained", None))


def write_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Let a model write its present weights and its configuration, and then puts them in the place of ``folder``.

    Of a model with adapters that is what its own ``save_pretrained`` writes: the adapters. Weights that are not finite
    are not written, with a warning. On several ranks the first one writes; of a sharded model all must call this.

    Args:
        model: has a ``save_pretrained``; without its wrappers it is what writes, so that no name has their prefixes.
        folder: replaced as a whole.

    Raises:
        CheckpointError: it could not be written; the old folder is intact then.
    """
    inner, target = unwrap(model), Path(folder)
    sharded = is_sharded(inner)
    weights = to_plain(model_state(inner)) if sharded else model_state(inner)
    if rank() != 0:
        return
    bad = non_finite_names(weights)
    if bad:
        _log.warning("not writing %s: %d tensors are not finite (first: %s)", target, len(bad), bad[0])
        return
    # Parts that were compiled one by one keep their prefix in the model's own state dict; a sharded one has no weights
    # that another library could write.
    renamed = sharded or any(name != clean_name(name) for name in inner.state_dict())
    cleaned = {"state_dict": weights} if renamed else {}
    with reported(target), replacing_folder(target) as staged:
        inner.save_pretrained(staged, **cleaned)  # type: ignore[operator]
