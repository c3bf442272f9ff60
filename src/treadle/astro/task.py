"""Astronomy training task: cross-entropy and expected-value errors of a batch of token sequences.

Shapes: B = sequences, L = positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from treadle.astro.hidden_losses import loss_of_hidden
from treadle.astro.loss_inputs import Codebooks, LossConfig
from treadle.astro.loss_terms import LossValues
from treadle.astro.losses import Stats, check_shapes, loss_of_logits
from treadle.astro.sampling import LossPositions, choose_positions, flat_ids
from treadle.astro.step_records import records_of, records_of_stats
from treadle.astro.vocab import VocabSpec
from treadle.data.host_copies import host_of
from treadle.device import moved
from treadle.distributed import replicated, unwrap
from treadle.errors import ConfigError
from treadle.optim.loss_weights import as_count
from treadle.task import Rng, StepOutput, Totals

ComputeLoss = Callable[[Tensor, Tensor], tuple[Tensor, Mapping[str, Any]]]
_PARTS = ("tokens", "types", "attn_mask")


class AstroTask:
    """Next-token prediction on multimodal token sequences.

    Args:
        device: device that batches are moved to.
        vocab: the vocabulary.
        codebooks: prepared for the vocabulary, on the device.
        config: which loss terms are computed, and at how many positions.
        use_ce: whether to include the cross-entropy.
        draw_seed: returns the seed for sampling positions of the current micro-batch.
        own_loss: a user-supplied loss on logits and targets; None uses the terms.
        compiled: whether to compile the forward pass.
    """

    def __init__(
        self,
        device: torch.device,
        vocab: VocabSpec,
        *,
        codebooks: Codebooks,
        config: LossConfig,
        use_ce: bool,
        draw_seed: Callable[[], int],
        own_loss: ComputeLoss | None = None,
        compiled: bool = False,
    ):
        self.device = device
        self.vocab = vocab
        self.codebooks = codebooks
        self.config = config
        self.term_weights = config.term_weights(vocab)
        self.use_ce = use_ce
        self._draw_seed = draw_seed
        self._own_loss = own_loss
        self._compiled: dict[str, Callable[..., Tensor]] | None = {} if compiled else None
        self._targets: tuple[Tensor, Tensor] | None = None  # of the current micro-batch, on the device and as given

    def weights(self, batch: Any) -> Mapping[str, float] | None:
        """Return the number of positions of each term, without sampling them."""
        if self._own_loss is not None:
            return None
        return self._counts(_targets_in(_parts_of(batch)[0]))

    def prepare_batch(self, model: nn.Module, batch: Any) -> tuple[Any, float | None]:
        """Count the weight of a user-supplied loss, if the batch is on the host."""
        if self._own_loss is None:
            return batch, None
        count = self._num_targets(_targets_in(_parts_of(batch)[0]))
        return batch, None if isinstance(count, Tensor) else count

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        """Return the loss of a batch, or its share of the step's loss if ``totals`` are given."""
        tokens, types, attn_mask = _parts_of(batch)
        targets = _targets_in(tokens)
        # Whole tensors are moved, since a slice could not be copied directly from pinned memory.
        inputs = [moved(part, self.device)[:, :-1] for part in (tokens, types, attn_mask)]
        if self._own_loss is not None:
            return self._step_of_own_loss(model, inputs, targets)
        if not any((self._counts(targets) if totals is None else totals).values()):
            positions = self._choose(targets, generator)
            nothing = LossValues(torch.zeros(()), {}, positions.counts)
            return StepOutput(None, records_of(nothing), num_samples=len(tokens))
        positions = self._choose(targets, generator).to(self.device)
        if offers_hidden_states(model):
            hidden_BLD = self._run(model, inputs, hidden=True)
            head = cast("nn.Linear", unwrap(model).head)
            values = loss_of_hidden(hidden_BLD, head, positions, self.codebooks, self.term_weights, totals=totals)
        else:
            logits_BLV = self._run(model, inputs, hidden=False)
            check_shapes("logits", logits_BLV, logits_BLV.shape[-1], targets, self.vocab)
            values = loss_of_logits(logits_BLV, positions, self.codebooks, self.term_weights, totals=totals)
        return StepOutput(values.loss, records_of(values), num_samples=len(tokens))

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits of a batch (B, L - 1, V)."""
        logits: Tensor = self._run(model, [moved(part, self.device)[:, :-1] for part in _parts_of(batch)], hidden=False)
        return logits

    def loss_and_stats(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Stats]:
        """Return the loss of a single batch and its statistics, at the positions of the current micro-batch."""
        check_shapes("logits", logits, logits.shape[-1], targets, self.vocab)
        known = self._targets  # the same ids on the host, where reading them does not synchronise
        positions = self._choose(known[1] if known is not None and known[0] is targets else targets, None)
        values = loss_of_logits(logits, positions.to(logits.device), self.codebooks, self.term_weights)
        return values.loss, values.stats()

    def _step_of_own_loss(self, model: nn.Module, inputs: list[Tensor], targets: Tensor) -> StepOutput:
        assert self._own_loss is not None
        there = moved(targets, self.device)
        self._targets = there, targets
        try:
            loss, stats = self._own_loss(self._run(model, inputs, hidden=False), there)
        finally:
            self._targets = None
        weight = self._num_targets(targets)
        return StepOutput(loss, records_of_stats(stats), weight=weight, num_samples=len(targets))

    def _num_targets(self, targets: Tensor) -> float | Tensor:
        return as_count((targets != self.vocab.pad_id).sum())

    def _run(self, model: nn.Module, inputs: list[Tensor], *, hidden: bool) -> Tensor:
        """Run the model, compiled once if requested; parameter names are unaffected."""
        run: Callable[..., Tensor] = unwrap(model).hidden_states if hidden else model  # type: ignore[assignment]
        if self._compiled is not None:
            name = "hidden" if hidden else "logits"
            run = self._compiled[name] if name in self._compiled else torch.compile(run)
            self._compiled[name] = run
        return run(*inputs)

    def _choose(self, targets: Tensor, generator: torch.Generator | None) -> LossPositions:
        if generator is None:
            generator = torch.Generator().manual_seed(self._draw_seed())
        return choose_positions(targets, self.vocab, self.config, use_ce=self.use_ce, generator=generator)

    def _counts(self, targets: Tensor) -> dict[str, float]:
        vocab, k = self.vocab, self.config.sample_k
        types = vocab.types_of(flat_ids(targets, vocab.vocab_size))
        found = torch.bincount(types, minlength=vocab.n_types).tolist()
        image, scalar, *groups = found[5:]
        share = max(1, k // max(1, len(groups)))
        counts = {"ce": (sum(found) - found[vocab.pad_id]) * self.use_ce}
        counts["img"] = min(image, k) * bool(self.term_weights["img"])
        counts["sca"] = min(scalar, k) * bool(self.term_weights["sca"])
        for group, number in zip(vocab.spectrum_groups, groups, strict=True):
            counts[f"spec/{group}"] = min(number, share) * bool(self.term_weights["spec"])
        return {term: float(count) for term, count in counts.items()}


def offers_hidden_states(model: nn.Module) -> bool:
    """Return whether the losses may use a model's hidden states and apply its head themselves.

    The model must have ``hidden_states`` with the arguments of its forward, and a plain linear ``head`` without bias.
    Its forward must have nothing attached that would be bypassed: hooks, or a wrapper other than
    DistributedDataParallel, whose gradients the engine reduces itself.
    """
    inner = unwrap(model)
    if model is not inner and not (replicated(model) is model and getattr(model, "module", None) is inner):
        return False
    head = getattr(inner, "head", None)
    plain = type(head) is nn.Linear and head.bias is None
    watched = any(module._forward_hooks or module._forward_pre_hooks for module in (inner, head) if module is not None)
    return plain and callable(getattr(inner, "hidden_states", None)) and not watched


def _targets_in(tokens: Tensor) -> Tensor:
    """Return the targets, on the host if the tokens are there."""
    return host_of(tokens)[:, 1:]


def _parts_of(batch: Any) -> list[Tensor]:
    if not isinstance(batch, Mapping) or any(not isinstance(batch.get(name), Tensor) for name in _PARTS):
        found = f"the keys {sorted(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ConfigError(
            f"{found}; it must be a mapping with the tensors tokens, types and attn_mask, as "
            "collate_sequences makes it",
            argument="batch",
        )
    parts = [batch[name] for name in _PARTS]
    shapes = [tuple(part.shape) for part in parts]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2 or shapes[0][1] < 2:
        raise ConfigError(
            f"tokens, types and attn_mask have the shapes {shapes}; all must be (B, L) with L >= 2, since each "
            "position predicts the one after it",
            argument="batch",
        )
    return parts
