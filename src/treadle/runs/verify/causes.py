"""Diagnosis of the first difference: its likely cause and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.runs.verify.compare import STEPS, Difference

_SEED = "call treadle.set_seed(0) before the trainer is made; in a configuration, write seed: 0"
_KEEP = (
    "save it in the hook's on_state_dict and read it back in on_load_state_dict, or compute it from trainer.step alone"
)
_REGISTER = (
    "register it with self.register_buffer(name, tensor), so that it is saved, loaded and moved with the model "
    "(persistent=True, which is the default)"
)
_DETERMINISTIC = (
    "call treadle.set_seed(0, deterministic=True), and do not let a value depend on the time or on files that a run "
    "leaves outside its folder"
)


@dataclass(frozen=True)
class Cause:
    """Likely cause of a difference.

    Attributes:
        name: a short key for programs.
        rule: the observation and what it means.
        fix: what to change.
    """

    name: str
    rule: str
    fix: str


def likely_cause(difference: Difference, device: str = "cpu") -> Cause:
    """Return the likely cause of a difference.

    Args:
        difference: the first difference.
        device: the device of the target.
    """
    if difference.part == STEPS:
        return Cause(
            "other_length", "the runs have different steps", "let the number of steps depend on nothing random"
        )
    if difference.uninterrupted:
        return _between_uninterrupted_runs(difference, device)
    return _after_a_kill(difference, device)


def _between_uninterrupted_runs(difference: Difference, device: str) -> Cause:
    part = difference.part
    if "weights before the forward pass" in difference.parts and difference.after_resume == 1:
        return Cause(
            "unseeded_script", "two uninterrupted runs start from different weights: nothing seeds them", _SEED
        )
    if part == "sample ids":
        return Cause(
            "unseeded_order",
            "two uninterrupted runs read the samples in different orders although they start from equal weights: the "
            "order depends on something that no seed reaches, such as time.time(), an unseeded generator or the order "
            "of a set",
            "use shuffle=True under treadle.set_seed, or a sampler with generator=torch.Generator().manual_seed(seed)",
        )
    if part == "batch content":
        return _unseeded_content(difference)
    if difference.seeds != ((), ()) and part.startswith("random state"):
        return _reseeded(difference)
    if part.startswith("random state"):
        return Cause(
            "unseeded_draw",
            f"the {difference.leaf} generator differs between two uninterrupted runs: something seeds it with the "
            "time, or draws a number of values that depends on the time",
            f"{_SEED}. Seed nowhere else",
        )
    kernels = "kernels that sum in varying order (atomics) or " if device != "cpu" else ""
    return Cause(
        "not_deterministic",
        f"two uninterrupted runs with equal data, weights and random state differ in the {part}: {kernels}a value that "
        "depends on the time, on an unseeded generator, on the order of a set or on a file that an earlier run left",
        _DETERMINISTIC,
    )


def _unseeded_content(difference: Difference) -> Cause:
    return Cause(
        "unseeded_data",
        "two uninterrupted runs read the same samples and got different values: the data set or its collate "
        "function draws from a generator that no seed reaches, such as np.random.default_rng() without a seed"
        f"{_named(difference)}",
        "draw from random, numpy.random or torch, whose state treadle keeps (also in workers), or seed by sample: "
        "np.random.default_rng([seed, index])",
    )


def _reseeded(difference: Difference) -> Cause:
    ours, theirs = difference.seeds
    shown = (theirs or ours)[0]
    before = (
        f" (in the uninterrupted run: {ours[0].split(' at ')[0]})" if ours and theirs and ours[0] != theirs[0] else ""
    )
    return Cause(
        "reseeded_in_forward",
        f"the forward pass seeds a generator: {shown}{before}. So its random numbers, a dropout mask for one, do not "
        f"continue where they were{_named(difference)}",
        "remove the call and seed once at the start with treadle.set_seed; the state of the generators is kept over "
        "a stop. For its own numbers a module can use a torch.Generator, or treadle.seed.forked_rng(seed)",
    )


def _after_a_kill(difference: Difference, device: str) -> Cause:
    part = difference.part
    if part == "sample ids":
        return Cause(
            "order_not_restored",
            "after a resume the samples come in a different order: the sampler keeps its own state, or draws from a "
            f"generator that treadle does not know{_named(difference, 'sampler', 'loader')}",
            "give the sampler an attribute `generator` (a torch.Generator), let its order depend on a seed and "
            "set_epoch(epoch) alone, or give the loader state_dict and load_state_dict",
        )
    if part == "batch content":
        return Cause(
            "state_in_dataset",
            "after a resume the same samples have different values: the data set keeps a state between items (a "
            f"counter, a cache, its own generator), so an item depends on what was read before it"
            f"{_named(difference, 'dataset', 'loader', 'global')}",
            "let __getitem__ depend on the index and on the generators of random, numpy.random and torch alone; "
            "per-sample noise: np.random.default_rng([seed, index])",
        )
    if part.startswith("random state"):
        if difference.seeds != ((), ()):
            return _reseeded(difference)
        where = "in the forward pass" if "after the forward" in part else "between two steps, a hook for one,"
        return Cause(
            "extra_draw",
            f"after a resume the {difference.leaf} generator has a different state: something {where} draws, or "
            f"seeds by a value that is not saved{_named(difference)}",
            _KEEP,
        )
    if part == "loss":
        if difference.seeds != ((), ()) and difference.seeds[0] != difference.seeds[1]:
            return _reseeded(difference)
        return _unregistered(difference, device)
    return _unsaved(difference)


def _unregistered(difference: Difference, device: str) -> Cause:
    kernels = "; if no such value exists: kernels that add in varying order" if device != "cpu" else ""
    return Cause(
        "unregistered_buffer",
        "after a resume data, weights and random state are equal and the loss is not: the forward pass uses a value "
        f"that is not in the model's state dict{_named(difference, 'model', 'trainer', 'global', 'hook')}{kernels}",
        _REGISTER,
    )


def _unsaved(difference: Difference) -> Cause:
    part = difference.part
    named = _named(difference, "hook", "trainer", "global", "model")
    if part == "learning rate":
        return Cause(
            "unsaved_hook_state",
            f"after a resume {difference.leaf.rsplit('.', 1)[-1]} of the optimizer differs although data, "
            f"weights, scheduler and random state are equal: a hook or the script sets it by a value that is not saved"
            f"{named}",
            _KEEP,
        )
    if part in ("gradients", "weights", "weights before the forward pass"):
        return Cause(
            "unsaved_hook_state",
            f"after a resume the {part.removesuffix(' before the forward pass')} differ although data, random state "
            f"and loss agree up to there: a hook changes them by a value that is not saved{named}",
            _KEEP,
        )
    if part == "hooks":
        key = difference.leaf.split(".")[1] if "." in difference.leaf else difference.leaf
        return Cause(
            "hook_state_not_restored",
            f"the hook {key!r} saves a state that it does not get back in full: {difference.leaf}",
            "read in on_load_state_dict all that on_state_dict writes, and nothing else",
        )
    if part == "log":
        return Cause(
            "log_not_restored",
            f"the state of the run is equal and its records are not: a record is computed from values that are not "
            f"saved{named}",
            _KEEP,
        )
    return Cause(
        "state_not_restored",
        f"the {part} differs after a resume: {difference.leaf} is not restored by its state_dict and "
        f"load_state_dict{named}",
        "put all that it depends on into its state_dict",
    )


def _named(difference: Difference, *kinds: str) -> str:
    """List the values outside checkpoints that differ, the likely culprits."""
    names = list(difference.outside)
    first = [name for kind in kinds for name in names if name.split(" ")[0] == kind]
    ordered: Sequence[str] = first or ([] if kinds else names)
    shown = [f"{name} is {difference.outside[name][1]} and was {difference.outside[name][0]}" for name in ordered[:3]]
    return f". Not in any checkpoint: {'; '.join(shown)}" if shown else ""
