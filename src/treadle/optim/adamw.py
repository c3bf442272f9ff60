"""AdamW with weight decay by type of parameter, and a warm-up and cosine schedule."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from treadle.errors.arguments import checked
from treadle.optim.optimizer import can_be_fused, is_normalisation
from treadle.optim.schedules import build_schedule

_UNDECAYED_NAMES = ("cls_token", "pos_embed")


@checked
def build_optimizer(
    model: nn.Module,
    *,
    lr: float = 3e-4,
    weight_decay: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> AdamW:
    """Build AdamW with two parameter groups: with weight decay, then without.

    Weight decay excludes parameters with fewer than two dimensions, those of normalisation layers (by the type of the
    owning module), and class tokens and position tables that a module holds as ``cls_token`` or ``pos_embed``. A
    parameter shared by several modules is excluded if any of them excludes it. Frozen parameters are left out.

    Args:
        model: The model; only parameters with ``requires_grad`` are taken.
        lr: Base learning rate, at least 0.
        weight_decay: Decoupled decay of the first group (Loshchilov & Hutter 2019), at least 0.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the denominator, at least 0.

    Returns:
        AdamW with exactly two groups (one may be empty), each parameter in one of them. The fused kernel is
        used when every parameter is floating and on the CPU or on CUDA.

    Raises:
        ValueError: No parameter requires grad, or a number is outside its range.

    Example:
        >>> from torch import nn
        >>> optimizer = build_optimizer(nn.Linear(2, 3), lr=1e-3)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(1, 0.0001), (1, 0.0)]
    """
    decayed, undecayed = split_by_decay(model)
    params = [*decayed, *undecayed]
    if not params:
        raise ValueError(
            f"model ({type(model).__name__}) has no parameter with requires_grad=True; "
            "unfreeze at least one before building the optimizer"
        )
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    # fused=None lets torch choose between its foreach and single-tensor implementations.
    return AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=can_be_fused(params) or None)


def split_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters into those with and without weight decay.

    Returns:
        ``(decayed, undecayed)``, each in the order of ``model.parameters()``; the rules are those of
        `build_optimizer`.

    Example:
        >>> from torch import nn
        >>> decayed, undecayed = split_by_decay(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
        >>> len(decayed), len(undecayed)
        (1, 3)
    """
    undecayed_ids = set()
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if is_normalisation(module) or param.dim() < 2 or name in _UNDECAYED_NAMES:
                undecayed_ids.add(id(param))
    trainable = [param for param in model.parameters() if param.requires_grad]
    decayed = [param for param in trainable if id(param) not in undecayed_ids]
    undecayed = [param for param in trainable if id(param) in undecayed_ids]
    return decayed, undecayed


@checked
def build_warmup_cosine(
    optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_lr_scale: float = 0.0
) -> LambdaLR:
    """Build the warm-up and cosine schedule of a step-based run, stepped per applied step.

    Args:
        optimizer: Its groups' learning rates are the base rates.
        warmup_steps: Updates of linear warm-up, at least 0; 0 starts at the full rate.
        total_steps: All updates of the run, including warm-up, at least 1. A warm-up that fills the run is allowed,
            with a warning.
        min_lr_scale: Fraction of the base rate after the last update, 0 to 1.

    Returns:
        A LambdaLR whose state holds plain numbers only; the formula is that of
        `treadle.optim.schedules.warmup_cosine_factor`. Its shape is not part of the state: a resumed run follows
        the ``total_steps`` it was built with.

    Raises:
        ValueError: A number is outside its range.

    Example:
        >>> from torch import nn
        >>> optimizer = build_optimizer(nn.Linear(2, 3), lr=1.0)
        >>> scheduler = build_warmup_cosine(optimizer, warmup_steps=4, total_steps=20)
        >>> scheduler.get_last_lr()
        [0.25, 0.25]
    """
    return build_schedule(
        optimizer, "cosine", total_steps=total_steps, warmup_steps=warmup_steps, min_scale=min_lr_scale
    )
