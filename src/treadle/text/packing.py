"""Removal of the packed-document check of transformers' decoders, which synchronises in every step.

Without a mask or a cache, a decoder checks on the device in every step whether position ids restart inside a row. The
host waits for the result and can no longer run ahead of the GPU. During CUDA graph capture the check is impossible and
the decoder uses a different attention kernel, so captured and eager steps give different numbers. If the caller passes
no position ids, the decoder has just counted them itself, and the result is known.
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
    """Disable the device check for packed documents in a causal model of transformers.

    Results are identical to the bit. The check is skipped where it cannot find anything: without position ids, mask,
    requested cache or gradient checkpointing.

    Args:
        model: a ``PreTrainedModel``, or a peft model around one; hooks are added in place.

    Returns:
        The model.

    Raises:
        TypeError: the model has no decoder that accepts a cache, or has layers that are not attention.

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
    """Pass a cache that stores nothing, since the presence of a cache skips the check."""
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
    """Remove that cache from the output, where some decoders return the cache they were given."""
    if isinstance(output, tuple):
        return tuple(value for value in output if not isinstance(value, _KeepsNothing))
    if not any(isinstance(value, _KeepsNothing) for value in output.values()):
        return output
    return type(output)(**{name: value for name, value in output.items() if not isinstance(value, _KeepsNothing)})


class _KeepsNothing:
    """Always empty cache with the interface of a transformers cache."""

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
