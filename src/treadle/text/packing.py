"""Decoders of transformers without their look at every batch for packed documents.

A decoder that gets neither mask nor cache reads from the device in every step whether its position ids restart inside a
row. The host waits for the answer, which costs a step on a GPU its head start. While a CUDA graph is recorded it cannot
ask, and takes another attention kernel, so that captured and eager steps give different numbers. Where the caller gives
no position ids, the decoder has just counted them itself, and the answer is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from treadle.errors.arguments import checked

_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@checked
def skip_packing_check(model: Any) -> Any:
    """Let a causal model of transformers compute without asking the device whether rows hold packed documents.

    Numbers stay the same to the bit. The check is left out where it can find nothing: with no position ids given, no
    mask, no cache asked for, and no gradient checkpointing.

    Args:
        model: a ``PreTrainedModel``, or one of peft around it; gets hooks in place.

    Returns:
        The model.

    Raises:
        TypeError: the model has no decoder that takes a cache, or layers that are no attention.

    Example:
        >>> # model = skip_packing_check(AutoModelForCausalLM.from_pretrained("my_model"))
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = getattr(inner, "base_model", inner)
    parameters = inspect.signature(decoder.forward).parameters if isinstance(decoder, nn.Module) else {}
    name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    layers = getattr(getattr(decoder, "config", None), "layer_types", None) or ()
    if name is None or "position_ids" not in parameters or not set(layers) <= _LAYERS:
        raise TypeError(
            f"model is a {type(model).__name__}: its decoder must take position_ids and a cache, as the causal models "
            f"of transformers do, and its layers must be attention; it names {sorted(set(layers)) or 'none'}"
        )
    decoder.register_forward_pre_hook(partial(_without_check, name), with_kwargs=True)
    decoder.register_forward_hook(_without_cache)
    return model


def _without_check(
    cache: str, decoder: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass a cache that keeps nothing, since one that exists ends the check."""
    named = (cache, "attention_mask", "position_ids", "encoder_hidden_states")
    if len(args) > 1 or any(given.get(name) is not None for name in named):
        return None
    wants_cache = given.get("use_cache")
    if getattr(decoder.config, "use_cache", False) if wants_cache is None else wants_cache:
        return None
    if decoder.training and any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules()):
        return None  # its layers warn about any cache
    return args, {**given, cache: _NOTHING}


def _without_cache(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Take that cache out of the output, where some decoders put the one that they were given."""
    if isinstance(output, tuple):
        return tuple(value for value in output if not isinstance(value, _KeepsNothing))
    if not any(isinstance(value, _KeepsNothing) for value in output.values()):
        return output
    return type(output)(**{name: value for name, value in output.items() if not isinstance(value, _KeepsNothing)})


class _KeepsNothing:
    """What a cache of transformers looks like to a decoder, with nothing in it before or after."""

    is_compileable = False
    layers: tuple[()] = ()
    is_sliding: tuple[()] = ()

    def update(self, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, *args: Any, **more: Any) -> int:
        return 0

    def get_query_offset(self, *args: Any, **more: Any) -> int:
        return 0

    def get_mask_sizes(self, queries: int | Tensor, *args: Any, **more: Any) -> tuple[int, int]:
        return (queries.shape[0] if isinstance(queries, Tensor) else queries), 0


_NOTHING = _KeepsNothing()
