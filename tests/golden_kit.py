"""Small trainers of every face that write the golden checkpoints, and the index that describes a state.

Only public names are used, so that later code can make the same runs, wherever its modules are.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

import treadle
from treadle import (
    BaseTrainer,
    BestRule,
    CheckpointingHook,
    EmaHook,
    Engine,
    EpochTrainer,
    LoggingHook,
    NonFiniteHook,
    StepLogHook,
    StepOutput,
    TensorLoader,
    Trainer,
    set_seed,
)
from treadle.data import RankBatchSampler
from treadle.hooks import BaseHook

FILES = Path(__file__).parent / "golden" / "files"
WIDTH, ROWS, EPOCHS = 4, 14, 3
CUT = {
    "engine": 3, "base": 6, "functional": 6, "spectra": 6, "graphs": 3, "astro": 6, "text": 5, "sharded": 6, "fsdp": 6,
}  # fmt: skip
"""Face -> the step of its golden checkpoint, in the middle of the second epoch."""

# -- describing a state -------------------------------------------------------------------------------------------

VARY = re.compile(r"versions\.\w+|.*[._]time")
"""Paths whose values no two runs share: the versions of packages, and the seconds that an epoch or a step took."""
ADDED_SINCE = re.compile(r"(data\.(ranks\[\d+\]\.)?)?built")
"""Entries that checkpoints have since the golden files were written: they are optional, and these load without them."""
_OF_TORCH = re.compile(r"(optimizer\.param_groups|scheduler|scaler)\b.*")
"""Paths whose keys are torch's own, and may be others in another version."""
_LONG = 8


def index(tree: Any, path: str = "") -> dict[str, str]:
    """Describe each leaf of a state by its path, in order: kind, then shape and digest, or the value."""
    if isinstance(tree, torch.Tensor):
        return {path: f"{str(tree.dtype)[6:]} {list(tree.shape)} {_digest(_bytes(tree))}"}
    if isinstance(tree, Mapping) and tree:
        found = {}
        for place, value in inside(tree, path):
            found |= index(value, place)
        return found
    if isinstance(tree, (list, tuple)) and tree:
        if len(tree) > _LONG and all(isinstance(value, (int, float)) for value in tree):
            kinds = sorted({type(value).__name__ for value in tree})
            return {path: f"list of {len(tree)} {'/'.join(kinds)} {_digest(repr(tree).encode())}"}
        found = {}
        for number, value in enumerate(tree):
            found |= index(value, f"{path}[{number}]")
        return found
    return {path: f"{type(tree).__name__} {tree!r}"}


def inside(tree: Mapping[Any, Any], path: str) -> list[tuple[str, Any]]:
    """Return the values of a mapping with their paths, without those that were added since."""
    places = [(f"{path}.{key}" if path else str(key), value) for key, value in tree.items()]
    return [(place, value) for place, value in places if not ADDED_SINCE.fullmatch(place)]


def shapes(found: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the paths in order, with the parts equal on any machine: kinds, dtypes, shapes, texts and counts."""
    return [(path, _kind(path, text)) for path, text in found.items() if not _of_another_torch(path)]


def values(found: Mapping[str, str]) -> dict[str, str]:
    """Return the entries that are equal on the platform that wrote them: all but those that match ``VARY``."""
    return {path: text for path, text in found.items() if not VARY.fullmatch(path)}


def _kind(path: str, text: str) -> str:
    if VARY.fullmatch(path) or text.startswith("float "):
        return text.split(" ")[0]
    return re.sub(r" [0-9a-f]{16}$", "", text)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def this_platform() -> dict[str, str]:
    """Identify the kernels that determine the last bits of a result: versions and processor."""
    vendor = re.search(r"vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text()) if _has_cpuinfo() else None
    return {
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "vendor": vendor.group(1) if vendor else platform.processor(),
    }


@functools.cache
def _same_torch() -> bool:
    path = FILES / "golden.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))["platform"]["torch"] if path.exists() else None
    return recorded in (None, str(torch.__version__))


def _of_another_torch(path: str) -> bool:
    return _OF_TORCH.fullmatch(path) is not None and not _same_torch()


def _has_cpuinfo() -> bool:
    return Path("/proc/cpuinfo").is_file()


def far(found: Any, expected: Any, *, exact: bool, path: str = "") -> list[str]:
    """List the paths at which two states differ, to the bit or beyond a tolerance.

    The tolerance covers a few steps of Adam, which amplify last-bit differences of kernels: a step moves a weight by up
    to its learning rate, 0.02.
    """
    if VARY.fullmatch(path) or _of_another_torch(path):
        return []
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return [f"{path}: {found.dtype} {list(found.shape)} and {expected.dtype} {list(expected.shape)}"]
        if exact or not found.is_floating_point():
            return [] if _bytes(found) == _bytes(expected) else [path]
        return [] if torch.allclose(found, expected, rtol=1e-2, atol=5e-3, equal_nan=True) else [path]
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        mine, theirs = inside(found, path), inside(expected, path)
        if [place for place, _ in mine] != [place for place, _ in theirs]:
            return [f"{path}: keys {list(found)} and {list(expected)}"]
        pairs = [(place, one, other) for (place, one), (_, other) in zip(mine, theirs, strict=True)]
    elif isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{path}: {len(found)} and {len(expected)} items"]
        pairs = [(f"{path}[{number}]", *pair) for number, pair in enumerate(zip(found, expected, strict=True))]
    else:
        if isinstance(found, float) and isinstance(expected, float) and not exact:
            same = abs(found - expected) <= 5e-3 + 1e-2 * abs(expected) or repr(found) == repr(expected)
        elif path.startswith("base.") and not exact:  # of frozen weights: dtype, shape and CRC-32
            same = found.split()[:2] == expected.split()[:2]
        else:
            same = type(found) is type(expected) and repr(found) == repr(expected)
        return [] if same else [f"{path}: {found!r} and {expected!r}"]
    return [line for place, x, y in pairs for line in far(x, y, exact=exact, path=place)]


# -- data, models, hooks ------------------------------------------------------------------------------------------


class Rows(Dataset):
    """Data set of rows with random augmentation from three generators."""

    def __init__(self, width: int = WIDTH):
        self.x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.x[number] + noise, self.x[number].sum().reshape(1)


class Stream(IterableDataset):
    """Stream of the rows in an order drawn at the start of an epoch."""

    def __iter__(self) -> Any:
        rows = Rows()
        for number in torch.randperm(ROWS).tolist():
            yield rows[number]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))


class OfBatch(nn.Module):
    """Model that reads the features of a whole batch, as graph models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch.x)


def as_batch(rows: Any) -> Any:
    x, y = zip(*rows, strict=True)
    return SimpleNamespace(x=torch.stack(x), y=torch.stack(y), num_graphs=len(x))


class MeanSquare:
    """Task with the mean squared error as loss."""

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        x, y = batch
        loss = nn.functional.mse_loss(model(x).float(), y)
        return StepOutput(loss, {"size": len(x)}, weight=float(len(x)), num_samples=len(x))


class Tally(BaseHook):
    """Hook with a state, which keeps a reference to the engine so that the end state can be collected."""

    engine: Any = None

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_before_step(self, trainer: Any) -> None:  # a hook that begins adds the settings it begins with to the state
        self.engine = trainer

    def on_after_step(self, trainer: Any) -> None:
        self.losses.append(float(trainer.step_info["loss"][0]))

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["hooks"][self.state_key] = {"losses": list(self.losses), "last": torch.tensor(self.losses[-1:])}

    def on_load_state_dict(self, trainer: Any, state_dict: Mapping[str, Any]) -> None:
        self.losses = list(state_dict["hooks"][self.state_key]["losses"])


# -- the faces ----------------------------------------------------------------------------------------------------

Train = Callable[[], Any]
Load = Callable[[Path], Any]
Made = tuple[Train, Load | None]


def _engine(folder: Path, hooks: list[BaseHook]) -> Made:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine = Engine(
        model, optimizer, MeanSquare(), scheduler=StepLR(optimizer, 1, 0.7), scheduler_interval="epoch", device="cpu",
        precision="fp16", grad_clip=0.5, accumulation_steps=2, hooks=[EmaHook(0.9, use_buffers=True), *hooks],
    )  # fmt: skip
    driver = EpochTrainer(engine, best=BestRule("val_loss"))
    sampler = BatchSampler(RandomSampler(range(ROWS), replacement=True, num_samples=ROWS), 4, drop_last=False)
    loader, validation = DataLoader(Rows(), batch_sampler=sampler), DataLoader(Rows(), batch_size=7)
    return lambda: driver.fit(loader, validation, EPOCHS), None


class Base(BaseTrainer):
    """Trainer of the step face; its loader has a worker."""

    def build_data_loader(self) -> Any:
        return DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1)

    def build_model(self) -> Any:
        return net()

    def build_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def build_lr_scheduler(self) -> Any:
        return CosineAnnealingLR(self.optimizer, 12)

    def forward(self, input: Any) -> Any:
        x, y = input
        return nn.functional.mse_loss(self.model(x).float(), y), {"size": len(x)}, float(len(x))


def _base(folder: Path, hooks: list[BaseHook]) -> Made:
    own = [NonFiniteHook("skip"), EmaHook(0.9)]
    trainer = Base(12, 0.5, 2, "bf16", workspace=folder, device="cpu", hooks=[*own, *hooks, StepLogHook()])
    return trainer.train, None


def _functional(folder: Path, hooks: list[BaseHook]) -> Made:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    training = {"max_grad_norm": 0.5, "mixed_precision": "bf16", "ema_decay": 0.9}
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    trainer = Trainer(model, optimizer, nn.MSELoss(), {"training": training}, "cpu", plateau, hooks=hooks)
    loader, validation = DataLoader(Stream(), batch_size=4), DataLoader(Rows(), batch_size=7)
    return lambda: trainer.train(loader, EPOCHS, validation), trainer.load_checkpoint


def _spectra(folder: Path, hooks: list[BaseHook]) -> Made:
    from treadle.spectra import ChemoMAE, SpectraTrainer, TrainerConfig, build_optimizer

    model = ChemoMAE(
        seq_len=8, d_model=8, nhead=2, num_layers=1, dim_feedforward=8, latent_dim=2, n_blocks=4, n_mask=2
    )  # fmt: skip
    optimizer = build_optimizer(model, lr=0.02)
    x = Rows(8).x
    trainer = SpectraTrainer(
        model, optimizer, TensorLoader(x, batch_size=4, shuffle=True), TensorLoader(x, batch_size=7),
        scheduler=OneCycleLR(optimizer, 0.05, total_steps=40), hooks=hooks,
        cfg=TrainerConfig(out_dir=folder / "run", amp=True, amp_dtype="bf16", ema_decay=0.9, device="cpu"),
    )  # fmt: skip
    return lambda: trainer.fit(EPOCHS), trainer.load_checkpoint


def _graphs(folder: Path, hooks: list[BaseHook]) -> Made:
    from treadle.graphs import GraphTrainer, get_optimizer

    model = OfBatch()
    optimizer = get_optimizer(model, lr=0.02)
    trainer = GraphTrainer(
        model, optimizer, StepLR(optimizer, 1, 0.7), device="cpu", grad_clip=0.5, accumulation_steps=2, log_every=3,
        mixed_precision="bf16", hooks=[EmaHook(0.9), *hooks],
    )  # fmt: skip
    sampler = WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS, generator=torch.Generator().manual_seed(9))
    loader = DataLoader(Rows(), batch_size=4, sampler=sampler, collate_fn=as_batch)
    validation = DataLoader(Rows(), batch_size=7, collate_fn=as_batch)
    return lambda: trainer.fit(loader, validation, EPOCHS, "mae"), trainer.load_checkpoint


def _astro(folder: Path, hooks: list[BaseHook]) -> Made:
    from treadle.astro import AstroTrainer, CausalTransformerLM, build_vocab_spec, collate_sequences, encode_sequence

    vocab = build_vocab_spec(16, 8, 8, ["a"], scalar_bins=8)

    def as_sequences(items: Any) -> Any:
        made = []
        for row, _ in items:
            image, scalar, spectrum = (
                (row[part] * size / 4 + size / 2).long().clamp(0, size - 1)
                for part, size in ((slice(0, 2), 16), (slice(2, 3), 8), (slice(3, 4), 8))
            )
            made.append(encode_sequence(vocab, image=image, scalars=scalar.tolist(), spectra={"a": spectrum}))
        return collate_sequences(made)

    draw = torch.Generator().manual_seed(1)
    codebooks = [torch.randn(size, 2, generator=draw) for size in (16, 8)]
    config = {
        "grad_clip": 0.5, "warmup_steps": 2, "total_steps": 12, "meaningful_loss": {"sample_k_per_modality": 3},
    }  # fmt: skip
    trainer = AstroTrainer(
        CausalTransformerLM(vocab.vocab_size, 8, 8, 1, 2, 8, 0.1, 32), vocab,
        DataLoader(Rows(), batch_size=4, shuffle=True, collate_fn=as_sequences), config, *codebooks,
        torch.randn(1, 8, generator=draw), device="cpu", use_amp=True, hooks=[EmaHook(0.9), *hooks],
    )  # fmt: skip
    validation = DataLoader(Rows(), batch_size=7, collate_fn=as_sequences)
    return lambda: trainer.train(EPOCHS, validation), trainer.load_checkpoint


def _text(folder: Path, hooks: list[BaseHook]) -> Made:
    from treadle.text import TokenBlocks, add_lora, build_gpt2

    base = build_gpt2(16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():  # only the adapters are in the checkpoint: the base must have the same bits on any machine
        for weight in base.parameters():
            weight.copy_(torch.randint(-8, 9, weight.shape, generator=draw) / 32)
    model = add_lora(base, r=2, dropout=0.1)
    optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=0.02)
    tokens = torch.randint(1, 16, (85,), generator=torch.Generator().manual_seed(3))
    settings = {"scheduler_step_per_batch": True, "gradient_accumulation_steps": 1}
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = Trainer(model, optimizer, None, {"training": settings}, "cpu", schedule, hooks=hooks)
    blocks = TokenBlocks(tokens, 8)
    loader, validation = DataLoader(blocks, batch_size=4, shuffle=True), DataLoader(blocks, batch_size=4)
    return lambda: trainer.train(loader, EPOCHS, validation), trainer.load_checkpoint


def _sharded(folder: Path, hooks: list[BaseHook]) -> Made:
    return _engine_of_rows(hooks, None), None


def _fsdp(folder: Path, hooks: list[BaseHook]) -> Made:
    return _engine_of_rows(hooks, "fsdp"), None


def _engine_of_rows(hooks: list[BaseHook], kind: Any) -> Train:
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if kind is not None:
        model = treadle.parallelize(model, kind, optimizer=optimizer)
    engine = Engine(model, optimizer, MeanSquare(), device="cpu", grad_clip=0.5, hooks=[EmaHook(0.5), *hooks])
    x = Rows().x.repeat(2, 1)[:24]
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_sampler=RankBatchSampler(24, 3, shuffle=True, seed=5))
    return lambda: engine.run(loader, max_steps=10)


MAKE: dict[str, Callable[[Path, list[BaseHook]], Made]] = {
    "engine": _engine, "base": _base, "functional": _functional, "spectra": _spectra, "graphs": _graphs,
    "astro": _astro, "text": _text, "sharded": _sharded, "fsdp": _fsdp,
}  # fmt: skip
ALONE = tuple(face for face in MAKE if face != "fsdp")


def checkpoint_name(face: str) -> str:
    return f"checkpoint_step_{CUT[face]}" + ("" if face in ("sharded", "fsdp") else ".pt")


def golden(face: str) -> Path:
    """Return the golden checkpoint of a face."""
    return FILES / "faces" / (face if face in ("sharded", "fsdp") else f"{face}.pt")


def end_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the end state without generator states, which would take most of the space.

    Sharded parts are gathered: all ranks must call this.
    """
    return {key: value for key, value in tree.items() if key not in ("rng", "data")}


def run(face: str, folder: Path, *, resume: Path | None = None) -> Any:
    """Train a face to its end, writing ``checkpoint_step_N`` on the way, and return the end state.

    Args:
        face: a key of :data:`MAKE`.
        folder: for its files.
        resume: a checkpoint to continue from; the run then starts from another seed.
    """
    set_seed(0 if resume is None else 1)
    loads_itself = face in ("engine", "base", "sharded", "fsdp")
    load = None if resume is None or not loads_itself else resume
    tally = Tally()
    saving = CheckpointingHook(CUT[face], None, path=(folder / "saved").absolute(), load=load, sharded=_sharding(face))
    train, load_into = MAKE[face](folder, [tally, LoggingHook(4), saving])
    if resume is not None and load_into is not None:
        load_into(resume)
    train()
    return tally.engine.state_dict()


def _sharding(face: str) -> bool | None:
    return True if face == "sharded" else None
