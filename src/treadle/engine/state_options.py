"""Options of a run's states: the subset of torch's ``StateDictOptions`` that applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

_REFUSED = {
    "broadcast_from_rank0": "load_state_dict takes the tree on every rank, and each copies its part of it",
    "flatten_optimizer_state_dict": "a checkpoint holds the state of the optimizer by parameter already",
    "keep_submodule_prefixes": "a state is that of the whole model",
    "dsd_fqn_modifiers": "names are those of the model without its wrappers",
}


@dataclass(frozen=True)
class StateOptions:
    """Options of which parts a state omits, which may be missing on load, and whether files are whole.

    Attributes:
        full_state_dict: checkpoints of a sharded model are single files.
        ignore_frozen_params: leave out unchanged frozen parameters except for a fingerprint.
        strict: refuse a state whose names differ from the model's.

    Example:
        >>> StateOptions().strict
        True
    """

    full_state_dict: bool = False
    ignore_frozen_params: bool = False
    strict: bool = True


def state_options(requested: StateDictOptions | None) -> StateOptions:
    """Convert torch's ``StateDictOptions``.

    ``cpu_offload`` is implied: a state is on the CPU, with whole tensors on rank 0.

    Raises:
        ConfigError: an option is not supported.

    Example:
        >>> from torch.distributed.checkpoint.state_dict import StateDictOptions
        >>> state_options(StateDictOptions(strict=False))
        StateOptions(full_state_dict=False, ignore_frozen_params=False, strict=False)
    """
    if requested is None:
        return StateOptions()
    if isinstance(requested, type) or not hasattr(requested, "full_state_dict"):
        raise ConfigError(
            "must be torch.distributed.checkpoint.state_dict.StateDictOptions(...), or None",
            argument="state_dict_options",
            value=requested,
        )
    for name, reason in _REFUSED.items():
        value = getattr(requested, name)
        if value != getattr(type(requested), name):
            raise ConfigError(
                f"{name}={value!r} has no meaning here: {reason}; leave it out", argument="state_dict_options"
            )
    return StateOptions(requested.full_state_dict, requested.ignore_frozen_params, requested.strict)
