"""The combined token loss from hidden states against the formula on full logits: time, memory, values, gradients.

    PYTHONPATH=src python benchmarks/token_losses.py            # on a GPU; writes results/token_losses.md and .json
    PYTHONPATH=src python benchmarks/token_losses.py --sweep    # also tries chunk sizes
    python benchmarks/token_losses.py --tiny --dry              # on the CPU, in seconds; nothing is written

N = 16,384 positions of width 768 in bfloat16 and vocabularies of 13,317 and 68,613 ids (1 and 55 scalar columns). Each
row is one forward and backward pass from hidden states and head to their gradients: the median time, and the peak of
the memory beyond that used before, gradients included. Errors are relative to full logits in float32. The measured
passes take a quarter of a minute on an H200.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from machine import describe, write_result
from torch import Tensor
from torch.nn import functional as F

from treadle.astro import (
    Codebooks,
    LossPositions,
    VocabSpec,
    build_vocab_spec,
    choose_positions,
    hidden_losses,
    loss_terms,
    prepare_codebooks,
)
from treadle.astro.losses import loss_of_logits

WEIGHTS = {"img": 0.1, "sca": 0.1, "spec": 0.1}
COLUMNS = ("V", "what", "ms", "GiB", "loss", "hidden gradient", "head gradient")
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Case:
    """Vocabulary with its states, head, targets and codebooks on the device."""

    vocab: VocabSpec
    hidden: Tensor
    head: Tensor
    targets: Tensor
    positions: LossPositions
    codebooks: Codebooks


def make_case(vocab: VocabSpec, rows: int, width: int, k: int, device: torch.device) -> Case:
    """Draw a third of the targets from each modality, evenly over columns and groups."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([vocab.base_image, vocab.base_scalar, vocab.first_spectrum_id, vocab.vocab_size])
    modality = torch.randint(0, 3, (rows,), generator=generator)
    sizes = (starts[1:] - starts[:-1])[modality]
    targets = starts[modality] + (torch.rand(rows, generator=generator) * sizes).long()
    half = torch.bfloat16
    hidden = torch.randn(rows, width, generator=generator).to(device, half).requires_grad_()
    head = (torch.randn(vocab.vocab_size, width, generator=generator) * 0.05).to(device, half).requires_grad_()
    groups = vocab.spectrum_groups
    codebooks = prepare_codebooks(
        vocab,
        image=torch.randn(vocab.v_image, 192, generator=generator),
        spectrum={group: torch.randn(vocab.v_spectra, 64, generator=generator) for group in groups},
        scalar=torch.randn(vocab.n_columns, vocab.scalar_bins, generator=generator).sort(1).values,
        device=device,
    )
    positions = choose_positions(targets, vocab, {"sample_k": k}, generator=generator).to(device)
    return Case(vocab, hidden, head, targets.to(device), positions, codebooks)


def plain_terms(logits: Tensor, case: Case) -> Tensor:
    """Compute the reconstruction terms with autograd; a modality's ids are gathered and multiplied at once here too."""
    total = logits.new_zeros((), dtype=torch.float32)
    books = {"img": case.codebooks.image, "sca": case.codebooks.scalar, "spec": case.codebooks.spectrum}
    occurring = sum(count > 0 for term, count in case.positions.counts.items() if term.startswith("spec/"))
    for block in case.positions.blocks:
        modality, groups = block.terms[0].split("/")[0], len(block.rows_GM)
        book = books[modality]
        assert book is not None
        ids = logits[:, block.first_id : block.first_id + groups * block.num_ids].unflatten(1, (groups, block.num_ids))
        numbers = torch.arange(groups, device=logits.device)[:, None]
        values = book.values_GKD[block.first_group : block.first_group + groups]
        expected = ids[block.rows_GM, numbers].float().softmax(-1) @ values
        errors = (expected - values[numbers, block.codes_GM.clamp(min=0)]).square().mean(-1)
        errors = torch.where(block.codes_GM >= 0, errors, 0.0).sum(1)
        for group, error_of_group in enumerate(errors):
            share = case.positions.counts[block.terms[group % len(block.terms)]]
            share *= occurring if modality == "spec" else 1
            total = total + WEIGHTS[modality] * error_of_group / share
    return total


def rivals(case: Case) -> dict[str, Loss]:
    """Return the compared losses by name, each as a function of hidden states and head."""
    no_ce = choose_positions(case.targets, case.vocab, {"enabled": False}).to(case.hidden.device)

    def ours(positions: LossPositions) -> Loss:
        return lambda hidden, head: hidden_losses.loss_of_hidden(hidden, head, positions, case.codebooks, WEIGHTS).loss

    def on_logits(hidden: Tensor, head: Tensor) -> Tensor:
        return loss_of_logits(hidden @ head.T, case.positions, case.codebooks, WEIGHTS).loss

    def plain(hidden: Tensor, head: Tensor) -> Tensor:
        logits = hidden @ head.T
        return F.cross_entropy(logits.float(), case.targets) + plain_terms(logits, case)

    found: dict[str, Loss] = {
        "combined, autograd on full logits": plain,
        "combined, treadle on full logits": on_logits,
        "combined, treadle from hidden states": ours(case.positions),
        "cross-entropy, torch on full logits": lambda hidden, head: F.cross_entropy(
            (hidden @ head.T).float(), case.targets
        ),
        "cross-entropy, treadle from hidden states": ours(no_ce),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        found["cross-entropy, torch fused"] = lambda hidden, head: F.linear_cross_entropy(
            hidden, head, case.targets, options=options
        )
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["cross-entropy, Liger"] = lambda hidden, head: liger(head, hidden, case.targets)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        found["cross-entropy, cut-cross-entropy"] = lambda hidden, head: linear_cross_entropy(
            hidden, head, case.targets
        )
    return found


def reference(case: Case, *, combined: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and gradients of full logits in float32."""
    hidden, head = (tensor.detach().float().requires_grad_() for tensor in (case.hidden, case.head))
    logits = hidden @ head.T
    loss = F.cross_entropy(logits, case.targets)
    if combined:
        loss = loss + plain_terms(logits, case)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, head))


def measure(loss_fn: Loss, case: Case, repeats: int) -> tuple[float, float | None]:
    """Return the median milliseconds of a forward and backward pass, and its extra peak memory in GiB on a GPU."""
    on_gpu = case.hidden.device.type == "cuda"

    def step() -> None:
        case.hidden.grad = case.head.grad = None
        loss_fn(case.hidden, case.head).backward()

    times = []
    for _ in range(repeats + 3):
        if on_gpu:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begun = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begun))
    if not on_gpu:
        return median(times[3:]), None
    case.hidden.grad = case.head.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return median(times[3:]), (torch.cuda.max_memory_allocated() - before) / 2**30


def error(gradient: Tensor, exact: Tensor) -> str:
    return f"{float((gradient.float() - exact).norm() / exact.norm()):.1e}"


def compare(case: Case, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each rival."""
    rows: list[dict[str, Any]] = []
    exact: dict[bool, tuple[Tensor, Tensor, Tensor]] = {}
    for name, loss_fn in rivals(case).items():
        combined = name.startswith("combined")
        if combined not in exact:
            exact = {combined: reference(case, combined=combined)}  # one at a time, since they are large
            rows.append({"V": case.vocab.vocab_size, "what": "float32 reference", "loss": f"{exact[combined][0]:.5f}"})
        milliseconds, memory = measure(loss_fn, case, repeats)
        case.hidden.grad = case.head.grad = None
        loss = loss_fn(case.hidden, case.head)
        loss.backward()
        assert case.hidden.grad is not None and case.head.grad is not None  # noqa: PT018
        rows.append({
            "V": case.vocab.vocab_size, "what": name, "ms": f"{milliseconds:.2f}", **_gib(memory),
            "loss": f"{loss.detach().item():.5f}", "hidden gradient": error(case.hidden.grad, exact[combined][1]),
            "head gradient": error(case.head.grad, exact[combined][2]),
        })  # fmt: skip
    if case.hidden.device.type == "cuda":
        rows.append({"V": case.vocab.vocab_size, "what": f"waits of the host in a step: {host_waits(case)}"})
    return rows


def host_waits(case: Case) -> str:
    """Return whether a step from hidden states, including sending new positions, ever waits for the device."""
    positions = choose_positions(case.targets.cpu(), case.vocab, {"sample_k": 512})
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hidden_losses.loss_of_hidden(case.hidden, case.head, positions, case.codebooks, WEIGHTS).loss.backward()
    except RuntimeError as raised:
        return str(raised)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def sampling(case: Case, ks: list[int], repeats: int) -> list[dict[str, Any]]:
    """Time the reconstruction terms for several k, with the cosine of the head's gradient to that of all positions."""
    rows, whole, slowest = [], None, None
    for k in (len(case.targets), *ks):
        positions = choose_positions(
            case.targets, case.vocab, {"sample_k": k}, use_ce=False, generator=torch.Generator().manual_seed(1)
        ).to(case.hidden.device)

        def loss_fn(hidden: Tensor, head: Tensor, positions: LossPositions = positions) -> Tensor:
            return hidden_losses.loss_of_hidden(hidden, head, positions, case.codebooks, WEIGHTS).loss

        milliseconds, memory = measure(loss_fn, case, repeats)
        case.hidden.grad = case.head.grad = None
        loss_fn(case.hidden, case.head).backward()
        assert case.head.grad is not None
        gradient = case.head.grad.flatten().float()
        whole, slowest = (gradient, milliseconds) if whole is None else (whole, slowest)
        cosine = float(F.cosine_similarity(gradient, whole, dim=0))
        rows.append({
            "V": case.vocab.vocab_size, "what": f"reconstruction terms, k = {k if k < len(case.targets) else 'all'}",
            "ms": f"{milliseconds:.2f} ({slowest / milliseconds:.1f}x)", **_gib(memory),
            "head gradient": f"cosine {cosine:.3f}",
        })  # fmt: skip
    return rows


def sweep(case: Case, repeats: int) -> list[dict[str, Any]]:
    """Time the combined loss from hidden states for several chunk sizes."""
    rows = []
    loss_fn = rivals(case)["combined, treadle from hidden states"]
    usual = hidden_losses._PIECE_LOGITS, loss_terms.FLOAT_LOGITS
    for piece in (1 << 24, 1 << 25, 3 << 24, 1 << 26, 1 << 27):
        for part in (1 << 21, 1 << 22, 1 << 23, 1 << 24):
            hidden_losses._PIECE_LOGITS, loss_terms.FLOAT_LOGITS = piece, part
            milliseconds, memory = measure(loss_fn, case, repeats)
            rows.append({
                "V": case.vocab.vocab_size, "what": f"pieces of {piece >> 20} Mi logits, in float32 {part >> 20} Mi",
                "ms": f"{milliseconds:.2f}", **_gib(memory),
            })  # fmt: skip
    hidden_losses._PIECE_LOGITS, loss_terms.FLOAT_LOGITS = usual
    return rows


def _gib(memory: float | None) -> Mapping[str, str]:
    return {} if memory is None else {"GiB": f"{memory:.3f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small vocabulary on the CPU")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    parser.add_argument("--sweep", action="store_true", help="try sizes of the pieces")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if args.tiny:
        device, rows, width, ks = torch.device("cpu"), 256, 32, [16, 64]
        vocabs = [build_vocab_spec(32, 64, 32, ["a", "b"], scalar_bins=16)]
    else:
        device, rows, width, ks = torch.device("cuda"), 16384, 768, [256, 1024, 4096]
        vocabs = [build_vocab_spec(), build_vocab_spec(v_scalar=56320)]
    found = []
    for vocab in vocabs:
        case = make_case(vocab, rows, width, ks[-1], device)
        found += compare(case, args.repeats)
        found += sampling(case, ks, args.repeats)
        found += sweep(case, args.repeats) if args.sweep else []
    title = f"The combined token loss at {rows:,} positions of width {width}, k = {ks[-1]:,}"
    if args.dry:
        for row in found:
            print(row)
    else:
        write_result("token_losses", title, COLUMNS, found, describe())


if __name__ == "__main__":
    main()
