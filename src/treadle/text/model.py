"""GPT-2 models with new weights, and LoRA adapters."""

from __future__ import annotations

import warnings
from typing import Any

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within, checked
from treadle.text.extras import import_extra
from treadle.text.packing import skip_packing_check


@checked
def build_gpt2(
    vocab_size: int,
    *,
    n_positions: int,
    n_embd: int = 128,
    n_layer: int = 4,
    n_head: int = 4,
    dropout: float = 0.1,
    end_id: int = 0,
) -> Any:
    """Build a ``GPT2LMHeadModel`` from a configuration, without loading any weights.

    Its steps do not synchronise with the device: see :func:`skip_packing_check`.

    Args:
        vocab_size: number of tokens.
        n_positions: maximum block length.
        n_embd: width; a multiple of ``n_head``.
        n_layer: transformer layers.
        n_head: attention heads.
        dropout: dropout of embeddings, attention and residuals.
        end_id: id of the token between documents.

    Raises:
        ValueError: a number is out of range.
        ImportError: the package ``transformers`` is not installed.

    Example:
        >>> # build_gpt2(1024, n_positions=128).num_parameters()
    """
    sizes = {
        "vocab_size": vocab_size, "n_positions": n_positions, "n_embd": n_embd, "n_layer": n_layer, "n_head": n_head,
    }  # fmt: skip
    check_least(1, **sizes)
    if n_embd % n_head:
        raise ConfigError(f"must be a multiple of n_head={n_head!r}", argument="n_embd", value=n_embd)
    _check_dropout(dropout)
    transformers = import_extra("transformers")
    config = transformers.GPT2Config(
        **sizes,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=end_id,
        eos_token_id=end_id,
        use_cache=False,  # training reads whole blocks
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, set here to avoid a warning
    return skip_packing_check(model)


@checked
def add_lora(model: Any, *, r: int = 8, alpha: float = 16, dropout: float = 0.05) -> Any:
    """Freeze a GPT-2 and add a low-rank update to every linear layer of its blocks (Hu et al. 2021).

    The updates are initialised to 0, so the model is unchanged at first. Their weights are drawn from the global RNG.

    Args:
        model: from :func:`build_gpt2`; its layers are replaced in place.
        r: rank.
        alpha: the update is scaled by alpha / r.
        dropout: dropout of the update's input.

    Returns:
        A ``peft.PeftModel`` that wraps the model.

    Raises:
        ValueError: a number is out of range.
        ImportError: the package ``peft`` is not installed.

    Example:
        >>> # add_lora(model, r=4).print_trainable_parameters()
    """
    check_least(1, r=r)
    _check_dropout(dropout)
    peft = import_extra("peft")
    config = peft.LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,  # GPT-2's layers store their weights as (in, out)
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft 0.21 looks this up under its former name in models of transformers 5.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return peft.get_peft_model(model, config)


def _check_dropout(dropout: float) -> None:
    check_within("[0, 1)", dropout=dropout)
