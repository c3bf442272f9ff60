"""Tokens per second in training token models: a hand-written loop, treadle eager, captured and compiled.

    python benchmarks/tokens.py                    # on a GPU, in bf16; writes results/tokens_gpu.md and .json
    python benchmarks/tokens.py --models small     # on the CPU, in fp32; writes results/tokens.md and .json
    python benchmarks/tokens.py --tiny             # a trial on the CPU, nothing is captured, compiled or written

*small* and *gpt2* are decoders with a next-token loss, on random tokens that are on the device; their loss is torch's
linear cross-entropy from hidden states if torch has it, and ``full logits`` is the loop without it. *astro* is the
model of the astronomy pack with its combined loss from hidden states, on batches in host memory, as in its trainer; the
terms of this loss are counted on the host, so its step cannot be captured. ``token_losses.py`` measures the losses
alone. Compiled means compiled layer by layer.

All have a fused AdamW and clipping, and nothing is logged or written. Every way is built once and warmed up, which
includes compiling or capturing; every round runs every way, in a new order each time, including the GPU's work. On the
CPU, where nothing is compiled or captured, the seconds are processor time, since other programs use it too.

The table is written after every turn of a way, and a way that fails gets a row. The total time on a GPU is not known;
the steps alone should take two minutes on an H200, plus the compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from machine import describe, write_result
from rounds import Rounds, exit_if_failed
from torch import Tensor, nn
from torch.nn import functional as F

from treadle import Engine, StepOutput, TensorLoader
from treadle.astro import (
    AstroTrainer,
    CausalTransformerLM,
    build_vocab_spec,
    choose_positions,
    collate_sequences,
    encode_sequence,
    hidden_losses,
    prepare_codebooks,
)
from treadle.capture.compile import compile_model

CLIP, RATE = 1.0, 3e-4
LOOP = "hand loop"
COLUMNS = ("model", "way", "tokens/s", "ms a step", f"times the {LOOP}")
Run = Callable[[int], object]  # trains a number of steps
Row = dict[str, str]
FAILED = "failed"


@dataclass(frozen=True)
class Size:
    """Size of a model and its batches.

    Attributes:
        title: the title in the table.
        vocab_size: tokens; 0: those of the astronomy pack.
        length: predicted tokens per sequence; approximate for *astro*.
        steps: the steps of each way in each round.
    """

    title: str
    vocab_size: int
    width: int
    num_layers: int
    length: int
    batch_size: int
    steps: int

    def build(self, vocab_size: int, device: torch.device, *, compiled: bool) -> CausalTransformerLM:
        torch.manual_seed(0)
        heads, longest = max(self.width // 64, 1), 2 * self.length
        model = CausalTransformerLM(
            vocab_size, 16, self.width, self.num_layers, heads, 4 * self.width, 0.0, longest
        ).to(device)  # fmt: skip
        compile_model(model, "blocks" if compiled else False)
        return model


SIZES = {
    "small": Size("decoder d128 x2, V 1,024, 8 x 64 tokens", 1024, 128, 2, 64, 8, 200),
    "gpt2": Size("decoder d768 x12, V 50,304, 8 x 1,024 tokens", 50304, 768, 12, 1024, 8, 10),
    "astro": Size("astronomy, d512 x8, V 13,317, 16 sequences", 0, 512, 8, 580, 16, 20),
}
TINY = {
    "small": Size("decoder", 64, 16, 1, 16, 2, 3),
    "astro": Size("astronomy", 0, 16, 1, 32, 2, 2),
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)


def loop(model: nn.Module, loss_of: Callable[[Any], Tensor], device: torch.device) -> Callable[[Any], None]:
    """Return a hand-written step on a batch."""
    optimizer = optimizer_of(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


# -- decoders with a next-token loss ------------------------------------------------------------------------------


def next_token_loss(model: CausalTransformerLM, tokens: Tensor, *, fused: bool) -> Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    hidden = model.hidden_states(inputs, torch.zeros_like(inputs)).flatten(0, 1)
    if not fused:
        return F.cross_entropy(model.head(hidden).float(), targets)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden.to(dtype), model.head.weight.to(dtype), targets, options=options)


class NextToken:
    """Next-token task for the engine."""

    def __init__(self, *, fused: bool) -> None:
        self.fused = fused

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        return StepOutput(next_token_loss(model, batch, fused=self.fused))


def tokens_of(size: Size, device: torch.device) -> Tensor:
    """Return the sequences of a round."""
    shape = (size.batch_size * size.steps, size.length + 1)
    return torch.randint(size.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)


def decoder_loop(size: Size, device: torch.device, *, fused: bool, compiled: bool = False) -> Run:
    model, tokens = size.build(size.vocab_size, device, compiled=compiled), tokens_of(size, device)
    step = loop(model, functools.partial(next_token_loss, model, fused=fused), device)

    def run(steps: int) -> None:
        for rows in torch.randperm(len(tokens)).to(device).split(size.batch_size)[:steps]:
            step(tokens[rows])

    return run


def decoder_engine(size: Size, device: torch.device, *, fused: bool, compiled: bool, capture: bool) -> Run:
    model, on_gpu = size.build(size.vocab_size, device, compiled=compiled), device.type == "cuda"
    engine = Engine(
        model, optimizer_of(model), NextToken(fused=fused), device=device, precision="bf16" if on_gpu else None,
        grad_clip=CLIP, capture=capture and (on_gpu or "auto"),
    )  # fmt: skip
    loader = TensorLoader(tokens_of(size, device), batch_size=size.batch_size, shuffle=True, num_buffers=1)
    return lambda steps: engine.run(loader, max_steps=engine.step + steps)


def decoder_ways(size: Size, device: torch.device, *, captured: bool) -> dict[str, Callable[[], Run]]:
    """Return the builder of each way, by name."""
    fused = hasattr(F, "linear_cross_entropy")
    make_loop = functools.partial(decoder_loop, size, device)
    make_engine = functools.partial(decoder_engine, size, device, fused=fused)
    ways: dict[str, Callable[[], Run]] = {LOOP: lambda: make_loop(fused=fused)}
    if fused:
        ways[f"{LOOP}, full logits"] = lambda: make_loop(fused=False)
    ways["treadle Engine"] = lambda: make_engine(compiled=False, capture=False)
    if captured:
        ways["treadle Engine, captured"] = lambda: make_engine(compiled=False, capture=True)
    if device.type == "cuda":
        ways[f"{LOOP}, compiled"] = lambda: make_loop(fused=fused, compiled=True)
        ways["treadle Engine, compiled"] = lambda: make_engine(compiled=True, capture=False)
        ways["treadle Engine, compiled and captured"] = lambda: make_engine(compiled=True, capture=True)
    return ways


# -- the astronomy pack -------------------------------------------------------------------------------------------


class Survey:
    """Random objects of all modalities, their vocabulary and codebooks."""

    def __init__(self, size: Size, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(0)
        self.vocab = vocab = build_vocab_spec()
        self.tables = {
            "image": torch.randn(vocab.v_image, 192, generator=draw),
            "spectrum": {group: torch.randn(vocab.v_spectra, 64, generator=draw) for group in vocab.spectrum_groups},
            "scalar": torch.randn(vocab.n_columns, vocab.scalar_bins, generator=draw).sort(1).values,
        }
        self.codebooks = prepare_codebooks(vocab, **self.tables, device=device)
        share = size.length // 9  # four of them image, one each spectrum group

        def some(count: int, most: int) -> Tensor:
            return torch.randint(most, (count,), generator=draw)

        objects = [
            encode_sequence(
                vocab, image=some(4 * share, vocab.v_image), scalars=some(vocab.n_columns, vocab.scalar_bins).tolist(),
                spectra={group: some(share, vocab.v_spectra) for group in vocab.spectrum_groups},
            )
            for _ in range(size.batch_size * size.steps)
        ]  # fmt: skip
        starts = range(0, len(objects), size.batch_size)
        self.batches = [collate_sequences(objects[at : at + size.batch_size]) for at in starts]

    @property
    def tokens(self) -> int:
        """Return the number of predicted tokens of a batch."""
        return self.batches[0]["tokens"][:, 1:].numel()


WEIGHTS = {"img": 0.1, "sca": 0.1, "spec": 0.1}  # the pack's defaults


def astro_loop(size: Size, survey: Survey, device: torch.device, *, compiled: bool) -> Run:
    model = size.build(survey.vocab.vocab_size, device, compiled=compiled)
    draw = torch.Generator().manual_seed(0)

    def loss_of(batch: Any) -> Tensor:
        positions = choose_positions(batch["tokens"][:, 1:], survey.vocab, generator=draw).to(device)
        parts = [batch[name].to(device, non_blocking=True)[:, :-1] for name in ("tokens", "types", "attn_mask")]
        hidden = model.hidden_states(*parts)
        return hidden_losses.loss_of_hidden(hidden, model.head, positions, survey.codebooks, WEIGHTS).loss

    step = loop(model, loss_of, device)

    def run(steps: int) -> None:
        for batch in survey.batches[:steps]:
            step(batch)

    return run


def astro_trainer(size: Size, survey: Survey, device: torch.device, *, compiled: bool) -> Run:
    model = size.build(survey.vocab.vocab_size, device, compiled=compiled)
    optimizer = optimizer_of(model)
    trainer = AstroTrainer(
        model, survey.vocab, survey.batches, {"log_every": 0, "save_every_steps": 0, "grad_accum_steps": 1},
        image_codebook=survey.tables["image"], spectrum_codebook=survey.tables["spectrum"],
        scalar_centers=survey.tables["scalar"], device=device, amp_dtype="bf16", optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    )  # fmt: skip
    return lambda steps: trainer.train_epoch()


def astro_ways(size: Size, survey: Survey, device: torch.device) -> dict[str, Callable[[], Run]]:
    """Return the builder of each way, by name."""
    ways: dict[str, Callable[[], Run]] = {}
    for compiled in (False, True) if device.type == "cuda" else (False,):
        end = ", compiled" if compiled else ""
        ways[LOOP + end] = functools.partial(astro_loop, size, survey, device, compiled=compiled)
        ways["AstroTrainer" + end] = functools.partial(astro_trainer, size, survey, device, compiled=compiled)
    return ways


# -- rounds and table ---------------------------------------------------------------------------------------------


def seconds(run: Run, steps: int, device: torch.device) -> float:
    """Return the seconds of a number of steps: wall-clock with the GPU's work, or processor time without a GPU."""
    if device.type == "cpu":
        start = time.process_time()
        run(steps)
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(steps)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def table(size: Size, taken: Rounds[str, float], tokens: int) -> list[Row]:
    """Return a row for each way, from its rounds so far."""
    base = taken.figures.get(LOOP, [])
    rows = []
    for way, each in taken.figures.items():
        slow, middle, fast = (f"{tokens / value:,.0f}" for value in (max(each), median(each), min(each)))
        pairs = list(zip(base, each, strict=False))  # a round may be in progress
        ratio = f"{median(a / b for a, b in pairs):.2f}" if pairs else ""
        cells = (size.title, way, f"{middle} ({slow} – {fast})", f"{1e3 * median(each):.3f}", ratio)
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows + [{"model": size.title, "way": f"{way}: {FAILED}, {why[:200]}"} for way, why in taken.failed.items()]


def rows_of(
    size: Size, device: torch.device, *, rounds: int, report: Callable[[list[Row]], None], captured: bool = True
) -> list[Row]:
    """Measure all ways of a model and return a row for each; report partial rows after each turn."""
    torch.compiler.reset()  # graphs compiled for another model count towards torch's limit and make sizes dynamic
    if size.vocab_size:
        ways, tokens = decoder_ways(size, device, captured=captured), size.batch_size * size.length
    else:
        survey = Survey(size, device)
        ways, tokens = astro_ways(size, survey, device), survey.tokens
    taken = Rounds(ways, lambda run, number: seconds(run, size.steps, device) / size.steps)
    for way, found in taken.play(rounds):
        if found is not None:
            print(f"{size.title}, {way}: {tokens / found:,.0f} tokens/s", flush=True)
        report(table(size, taken, tokens))
    return table(size, taken, tokens)


def write(rows: Sequence[Row], rounds: int, *, on_gpu: bool, partial: bool) -> None:
    title = f"Tokens a second of training, {'bf16 on a GPU' if on_gpu else 'fp32 on the CPU, processor time'}"
    machine = describe() | {"rounds": str(rounds)}
    write_result("tokens_gpu" if on_gpu else "tokens", title, COLUMNS, rows, machine, partial=partial)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    logging.getLogger("treadle").setLevel(logging.ERROR)
    on_gpu = torch.cuda.is_available() and not options.tiny
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = list(TINY.values()) if options.tiny else [SIZES[name] for name in options.models]
    if options.tiny:
        options.rounds = 1
    elif not on_gpu:
        torch.set_num_threads(1)
        sizes = [dataclasses.replace(size, steps=40) for size in sizes]
    save = functools.partial(write, rounds=options.rounds, on_gpu=on_gpu)
    rows: list[Row] = []
    for size in sizes:
        done = tuple(rows)
        rows += rows_of(
            size, device, rounds=options.rounds, captured=on_gpu or options.tiny,
            report=lambda now, done=done: None if options.tiny else save([*done, *now], partial=True),
        )  # fmt: skip
    if options.tiny:
        print(*rows, sep="\n")
    else:
        save(rows, partial=False)
    exit_if_failed(any(f": {FAILED}, " in row["way"] for row in rows))


if __name__ == "__main__":
    main()
