"""Golden run folders of an earlier commit resume to the same end, replay to the bit, and are evaluated and reported.

Each test works on a copy. Where torch or the processor is another one than there, last bits may differ: a replay may
then report a difference, and numbers are compared with a tolerance. The text pack trains on the manual of the running
Python: on another version its folders are only read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import golden_kit as kit
import golden_runs_kit as runs_kit
from golden_runs_kit import FOLDER, PACKS, RUNS, evaluation_key, spoken, treadle

# torch_geometric compiles functions with torch.jit.script; peft asks a model of transformers by a former name.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)

RECORDED = json.loads((kit.FILES / "golden.json").read_text(encoding="utf-8"))
EXACT = RECORDED["platform"] == kit.this_platform()
FINISHED = [name for name in RUNS if name != "text-lora"]
STARTS = ("sessions.jsonl", "run.json", "README.md")
"""Files with times and paths of a start, and the model card that peft writes; not compared."""


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes pictures without drawing them, which is slow."""
    from matplotlib.figure import Figure

    def write(figure: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(target, "write"):
            target.write(_DOT)
        else:
            Path(target).write_bytes(_DOT)

    monkeypatch.setattr(Figure, "savefig", write)


_DOT = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6360000000020001"
    "48afa4710000000049454e44ae426082"
)
"""A picture of one pixel."""


def golden(name: str, state: str, folder: Path) -> Path:
    """Unpacks a golden run; that of another manual is left out."""
    if name.startswith("text") and RECORDED["manual"] != runs_kit.manual_digest():
        pytest.skip("the manual of this Python is another text")
    return runs_kit.unpack("text" if (name, state) == ("text-lora", "finished") else name, state, folder)


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_goes_on_to_the_end_of_the_uninterrupted_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = golden(name, "interrupted", tmp_path / "found")
    expected = golden(name, "finished", tmp_path / "expected")
    monkeypatch.chdir(found.parent)
    assert runs_kit.start(RUNS[name]) == 0
    assert list(differences(found, expected)) == []


def differences(found: Path, expected: Path) -> Iterator[str]:
    """Yields each file that is missing or differs; additional files are allowed."""
    for path in sorted(path for path in expected.rglob("*") if path.is_file()):
        name = path.relative_to(expected)
        if name.name in STARTS:
            continue
        if not (found / name).exists():
            yield f"{name} is missing"
        else:
            mine, theirs = with_its_end(without_sizes(read(found / name), read(path)), read(path))
            if name.name in ("config.json", "metrics.json"):
                mine = without_newer(mine, theirs, results=name.name == "metrics.json")
                if "baselines" in theirs and "probe" in theirs:
                    # Colours come from the spectra now, and baselines count hidden channels alone, as the loss does.
                    mine, theirs = ({**values, "probe": None, "baselines": None} for values in (mine, theirs))
            yield from (f"{name} at {place}" for place in kit.far(mine, theirs, exact=EXACT))


def without_newer(found: Any, expected: Any, *, results: bool) -> Any:
    """Leaves out what is newer than the expected values: settings that are switched off, and further results."""
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        return found
    return {
        key: without_newer(value, expected.get(key), results=results and key != "config")
        for key, value in found.items()
        if key in expected or not (results or value is None or value is False)
    }


def without_sizes(found: Any, expected: Any) -> Any:
    """Leaves out of a state the sizes that checkpoints between two epochs hold since then."""
    if not (isinstance(expected, dict) and isinstance(expected.get("data"), dict)):
        return found
    newer = {"accumulation_steps", "batch_size"} - set(expected["data"])
    return {**found, "data": {key: value for key, value in found["data"].items() if key not in newer}}


def with_its_end(found: Any, expected: Any) -> tuple[Any, Any]:
    """Returns two states; of a last step that was saved again once its epoch was evaluated, what the step left."""
    if not (isinstance(expected, dict) and "format" in expected) or found["epoch"] != expected["epoch"] + 1:
        return found, expected
    kept = ("model", "optimizer", "scaler", "ema", "global_step", "base")
    return {key: found[key] for key in kept}, {key: expected[key] for key in kept}


def read(path: Path) -> Any:
    """Loads a file as tensors, values or lines; returns the bytes of any other kind, or None on another platform."""
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    if path.suffix == ".json":
        values = json.loads(path.read_text(encoding="utf-8"))
        if path.name == "adapter_config.json":  # peft writes a set
            values["target_modules"].sort()
        if path.name == "event.json":  # the newest checkpoint then; the interruption wrote one more
            values.pop("checkpoint")
        return values
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix == ".yaml":
        return path.read_text(encoding="utf-8")
    return path.read_bytes() if EXACT else None


@pytest.mark.parametrize("name", PACKS)
def test_a_finished_run_is_known_to_be_finished(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = golden(name, "finished", tmp_path)
    before = contents(run)
    monkeypatch.chdir(tmp_path)
    assert runs_kit.start(RUNS[name]) == 0
    assert contents(run) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


REPLAYED = [(name, step) for name in FINISHED if RUNS[name].replay is not None for step in RUNS[name].replayed]


@pytest.mark.parametrize(("name", "step"), REPLAYED)
def test_a_step_replays_to_the_bit(name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = golden(name, "finished", tmp_path)
    before = contents(run)
    monkeypatch.chdir(tmp_path)
    code, said = spoken("replay", FOLDER, "--json", "--step", step, *RUNS[name].replay)
    shown = json.loads(said)
    recorded = next(row for row in read(run / "steps.jsonl") if row["step"] == step)
    same = {key: recorded[key] for key in ("step", "epoch", "applied")}
    assert {key: shown[key] for key in same} == same
    if EXACT:
        assert (code, shown["equal"], shown["first_difference"]) == (0, True, None)
    else:
        assert code in (0, 3)
    assert kit.far(shown["loss"], recorded["loss"], exact=EXACT) == []
    assert contents(run) == before


EVALUATED = [(name, arguments) for name in FINISHED for arguments in RUNS[name].evaluate]


@pytest.mark.parametrize(("name", "arguments"), EVALUATED)
def test_the_evaluation_is_that_of_the_report(
    name: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = golden(name, "finished", tmp_path)
    monkeypatch.chdir(tmp_path)
    code, said = spoken("evaluate", FOLDER, "--json", *arguments)
    shown = json.loads(said)
    assert code == 0
    assert shown["metrics"]
    assert read(run / f"eval_results_{shown['split']}.json") == shown
    expected = RECORDED["evaluations"][evaluation_key(name, arguments)]
    verdicts = {key: shown.pop(key) for key in list(shown) if key.startswith("equal_to")}
    assert verdicts.keys() == {key for key in expected if key.startswith("equal_to")}
    assert all(verdicts.values()) or not EXACT
    assert kit.far(shown, {key: expected[key] for key in expected if key not in verdicts}, exact=EXACT) == []


@pytest.mark.parametrize("name", [name for name in PACKS if EXACT or name != "text"])  # other bits, another text
def test_the_predictions_are_those_of_then(name: str, tmp_path: Path) -> None:
    found, recorded = runs_kit.predictions(name, tmp_path / name), RECORDED["predictions"][name]
    assert kit.shapes(found) == kit.shapes(recorded)
    if EXACT:
        assert kit.values(found) == recorded


@pytest.mark.parametrize("name", RUNS)
def test_a_page_about_a_run_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = "interrupted" if name == "text-lora" else "finished"
    run = runs_kit.unpack(name, state, tmp_path)  # nothing is trained: any Python reads it
    monkeypatch.chdir(tmp_path)
    assert treadle("report", FOLDER) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    for path in run.glob("checkpoints/*.pt"):
        assert path.name in page


def test_the_table_of_runs_says_the_same_of_every_folder(tmp_path: Path) -> None:
    assert runs_kit.listed(tmp_path) == RECORDED["runs"]
