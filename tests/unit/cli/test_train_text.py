"""``treadle train text`` from the first line on the terminal to the files it leaves, stopped at every place."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from command_kit import draw_nothing, treadle
from fault_points import in_child, killed
from helpers import differences
from treadle import ConfigError, TensorLoader, load_weights
from treadle.checkpoint import load_checkpoint
from treadle.cli.main import main
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.engine.observers import observing
from treadle.errors import MissingExtraError
from treadle.runs.pack import Run
from treadle.text import report as text_report
from treadle.text import run_data as text_data
from treadle.text import runs as text_run
from treadle.text.run_config import FREE, TextConfig
from treadle.text.run_data import prepare_data

TINY = [
    "epochs=2", "data.max_topics=20", "data.vocab_size=280", "data.block_length=32", "data.val_fraction=0.2",
    "model.n_embd=8", "model.n_layer=1", "model.n_head=2", "schedule.warmup_steps=2", "training.checkpoint_interval=5",
    "lora.epochs=2", "lora.r=2", "lora.val_fraction=0.3", "samples.num_tokens=8", "samples.count=2",
    "data.test_fraction=0", "lora.test_fraction=0",
]  # fmt: skip
BASE_STEPS, LORA_STEPS = 34, 14
PLACES = ("", "lora/")


def run(out: Path, *arguments: str, settings: list[str] = TINY) -> int:
    """Run the command in this process and return its exit code."""
    own = {argument.partition("=")[0] for argument in arguments}
    kept = [setting for setting in settings if setting.partition("=")[0] not in own]
    with pytest.raises(SystemExit) as left:
        main(["train", "text", *kept, "--out", str(out), "--device", "cpu", *arguments])
    return left.value.code if isinstance(left.value.code, int) else 0


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "text"
    assert run(out) == 0
    return out


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the slow picture out, which the full run draws."""
    monkeypatch.setattr(text_report, "plot_losses", draw_nothing)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def command(*arguments: object) -> int:
    return treadle(*arguments, "--device", "cpu")


def shown_values(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


# -- what a run leaves --------------------------------------------------------------------------------------------


def test_the_run_folder_is_complete(finished: Path) -> None:
    for name in ("config.json", "tokenizer.json", "samples.txt", "metrics.json"):
        assert (finished / name).stat().st_size > 0
    for place, steps in zip(PLACES, (BASE_STEPS, LORA_STEPS), strict=True):
        for name in ("history.json", "best_model.pt", f"checkpoints/checkpoint_step_{steps}.pt"):
            assert (finished / place / name).stat().st_size > 0
        lines = (finished / place / "steps.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
        assert read(finished, f"{place}history.json")["epoch"] == [1, 2]
    assert (finished / "pictures" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_are_means_over_tokens_and_what_follows_from_them(finished: Path) -> None:
    metrics, history = read(finished, "metrics.json"), read(finished, "history.json")
    val = metrics["val"]
    assert val["loss"] == min(history["eval_loss"])  # the weights that were scored, to the bit
    assert val["perplexity"] == math.exp(val["loss"])
    assert val["bits_per_byte"] == pytest.approx(val["loss"] * val["tokens"] / math.log(2) / val["bytes"])
    assert metrics["lora"]["after"]["loss"] == min(read(finished, "lora/history.json")["eval_loss"])
    for scores in (metrics["baselines"], metrics["lora"]["baselines"]):
        assert scores["bigram"]["loss"] < scores["unigram"]["loss"]
    assert metrics["baselines"]["unigram"]["tokens"] == val["tokens"]


def test_the_validation_loss_is_that_of_every_token_by_hand(finished: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(finished / "pretrained").eval()
    config = TextConfig()
    for key, value in read(finished, "config.json")["data"].items():
        setattr(config.data, key, value)
    config.lora.val_fraction, config.lora.test_fraction = 0.3, 0.0
    part = prepare_data(config).val
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(part.tokens_N) - 1, 31):
            tokens = part.tokens_N[start : start + 32][None]
            logits = model(input_ids=tokens).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").double()
    assert float(total) / (len(part.tokens_N) - 1) == pytest.approx(read(finished, "metrics.json")["val"]["loss"])


def test_topics_are_in_one_part_only_and_those_about_statements_are_kept_for_lora(finished: Path) -> None:
    topics = read(finished, "metrics.json")["topics"]
    names = [name for part in topics.values() for name in part]
    assert len(names) == len(set(names))
    assert {"pass", "continue", "break"} <= {*topics["lora_train"], *topics["lora_val"]}
    assert {"await", "numbers"} <= {*topics["train"], *topics["val"]}
    assert all(topics.values())


def test_the_test_part_is_of_further_topics_and_leads_the_tables(tmp_path: Path, no_picture: None) -> None:
    out = tmp_path / "run"
    assert run(out, settings=[*TINY[:-2], "epochs=1", "lora.epochs=1"]) == 0
    metrics = read(out, "metrics.json")
    names = [name for part in metrics["topics"].values() for name in part]
    assert len(names) == len(set(names))
    assert len(metrics["topics"]["test"]) == len(metrics["topics"]["lora_test"]) == 1
    base, tuned = text_report.results(metrics).tables
    assert base.rows[0][1] == f"{metrics['test']['loss']:.3f}"
    assert base.rows[-1][1] == f"{metrics['val']['loss']:.3f}"
    assert [row[1] for row in tuned.rows[:2]] == [
        f"{metrics['lora'][f'test_{at}']['loss']:.3f}" for at in ("before", "after")
    ]
    assert command("evaluate", out, "--split", "test") == 0
    assert read(out, "eval_results_test.json")["equal_to_metrics"] is True


def test_a_run_from_before_there_was_a_test_part_keeps_its_text() -> None:
    config = text_run.PACK.read_settings(TINY[:-2], "cpu")
    older = prepare_data(text_run.PACK.read_settings(TINY, "cpu"))
    assert set(older.parts) == {"train", "val", "lora_train", "lora_val"}
    assert text_data.prepare_data_of(config, older.fingerprint).fingerprint == older.fingerprint
    assert text_data.prepare_data_of(config, None).fingerprint != older.fingerprint


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks by a former name
def test_from_pretrained_loads_the_best_weights_and_the_tokenizer(finished: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished / "pretrained")
    best = load_weights(finished / "best_model.pt")
    assert differences(dict(model.state_dict()), best) == []
    tokenizer = AutoTokenizer.from_pretrained(finished / "pretrained")
    assert tokenizer.decode(tokenizer("import this").input_ids) == "import this"
    tuned = PeftModel.from_pretrained(model, finished / "lora" / "pretrained").state_dict()
    adapters = load_weights(finished / "lora" / "best_model.pt")
    assert adapters
    assert all("lora_" in name for name in adapters)
    assert all(torch.equal(tuned[name], value) for name, value in adapters.items())
    assert any(bool(value.any()) for name, value in adapters.items() if "lora_B" in name)


def test_samples_are_shown_before_and_after(finished: Path) -> None:
    text = (finished / "samples.txt").read_text(encoding="utf-8")
    assert text.startswith("no prompt: the model begins a topic; temperature 0.7, top_k 40, seed 0\n")
    for name in ("base", "fine-tuned"):
        assert [f"===== {name}, {number} of 2 =====" in text for number in (1, 2)] == [True, True]


# -- going on -----------------------------------------------------------------------------------------------------


def the_end(out: Path) -> dict[str, object]:
    """Return every file of a run that shows what it computed."""
    end: dict[str, object] = {
        name: (out / name).read_bytes()
        for name in (
            "samples.txt", "metrics.json", "tokenizer.json", "pretrained/model.safetensors",
            "lora/pretrained/adapter_model.safetensors",
        )
    }  # fmt: skip
    for place, steps in zip(PLACES, (BASE_STEPS, LORA_STEPS), strict=True):
        end[f"{place}history"] = (out / place / "history.json").read_text()
        end[f"{place}steps"] = (out / place / "steps.jsonl").read_text()
        for name in ("best_model.pt", f"checkpoints/checkpoint_step_{steps}.pt"):
            end[place + name] = load_checkpoint(out / place / name)
    return end


class Killed(BaseException):
    """Stands for the end of the process: nothing in the library may hold it up."""


def kill() -> None:
    raise Killed


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Stop(BaseHook):
    """Does something at one place of one of the two trainings of a run.

    Args:
        training: 1 or 2.
        event: the event of a hook, or ``"before_running"``, before the training begins.
        step: at which the event counts.
        act: what to do.
    """

    def __init__(self, training: int, event: str, step: int, act: Callable[[], None]):
        self.training, self.step, self.act, self.seen = training, step, act, 0
        self.event = event
        if event != "before_running":
            setattr(self, event, self._happens)

    def _happens(self, trainer: Engine, *rest: object) -> None:
        if trainer.step == self.step:
            self.act()

    def before_building(self, engine: Engine) -> None:
        """Of the step face only."""

    def before_running(self, engine: Engine) -> None:
        self.seen += 1
        if self.seen == self.training and self.event == "before_running":
            self.act()
        elif self.seen == self.training:
            engine.hooks = [*engine.hooks, self]


PLACES_TO_STOP = {
    "first step, nothing saved": (1, "on_before_optimizer_step", 1),
    "inside a step": (1, "on_before_optimizer_step", 13),
    "first epoch over, not evaluated": (1, "on_after_step", 17),
    "last epoch evaluated, not written": (1, "on_after_epoch", BASE_STEPS),
    "between the two trainings": (2, "before_running", 0),
    "first step of the fine-tuning": (2, "on_before_optimizer_step", 1),
    "inside the fine-tuning": (2, "on_before_optimizer_step", 9),
    "fine-tuning over, not reported": (2, "on_after_train", LORA_STEPS),
}


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("place", PLACES_TO_STOP.values(), ids=PLACES_TO_STOP.keys())
def test_killed_anywhere_the_same_command_ends_the_same(
    place: tuple[int, str, int], finished: Path, tmp_path: Path
) -> None:
    with observing(Stop(*place, kill)), pytest.raises(Killed):
        main(["train", "text", *TINY, "--out", str(tmp_path), "--device", "cpu"])
    assert not (tmp_path / "metrics.json").exists()
    assert run(tmp_path) == 0
    assert differences(the_end(finished), the_end(tmp_path)) == []


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(("training", "step"), [(1, 12), (2, 8)])
def test_ctrl_c_saves_at_the_step_and_the_rerun_goes_on_from_it(
    training: int, step: int, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with observing(Stop(training, "on_before_step", step, interrupt)):
        assert run(tmp_path) == 130
    assert f"saved at step {step}; the same command resumes from here" in capsys.readouterr().err
    latest = tmp_path / PLACES[training - 1] / "checkpoints" / f"checkpoint_step_{step}.pt"
    assert load_checkpoint(latest)["global_step"] == step
    assert run(tmp_path) == 0
    assert f"resumes from {latest}" in capsys.readouterr().err
    assert differences(the_end(finished), the_end(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.usefixtures("no_picture")
def test_sigkill_in_either_training_changes_nothing(finished: Path, tmp_path: Path) -> None:
    for training, step in ((1, 12), (2, 8)):
        with observing(Stop(training, "on_after_step", step, killed)):
            assert in_child(lambda: run(tmp_path)) == signal.SIGKILL
    assert run(tmp_path) == 0
    assert differences(the_end(finished), the_end(tmp_path)) == []


def test_a_rerun_of_a_finished_run_shows_the_table_and_touches_nothing(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    assert run(copied) == 0
    shown = capsys.readouterr()
    assert "before LoRA" in shown.out
    assert "is finished" in shown.err
    assert files(copied) == before


# -- the finished run is asked again ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "split", "keys"),
    [("", None, ["val"]), ("", "lora_val", ["lora", "before"]), ("lora", None, ["lora", "after"]),
     ("lora", "val", ["lora", "val_after"])],
)  # fmt: skip
def test_both_parts_are_evaluated_as_the_run_did(
    stage: str, split: str | None, keys: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("evaluate", finished / stage, "--json", *(["--split", split] if split else [])) == 0
    found = shown_values(capsys)
    expected = read(finished, "metrics.json")
    for key in keys:
        expected = expected[key]
    assert {**found["metrics"], "tokens": found["tokens"], "bytes": found["bytes"]} == expected
    assert (found["stage"], found["equal_to_metrics"]) == (stage or "base", True)
    assert read(finished / stage, f"eval_results_{found['split']}.json") == found


def test_an_evaluation_says_what_it_is_of_and_when_it_is_not_what_the_report_has(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = read(copied, "metrics.json")
    metrics["lora"]["val_after"]["loss"] += 1e-9
    (copied / "metrics.json").write_text(json.dumps(metrics))
    assert command("evaluate", copied / "lora", "--split", "val", "--num-workers", "1") == 0
    said = capsys.readouterr()
    assert f"not equal to the bit to {copied / 'metrics.json'}" in said.out
    assert "lora, val, " in said.out
    assert "bits_per_byte" in said.out
    assert "num_workers=1: has no effect" in said.err
    monkeypatch.chdir(copied / "lora")
    assert command("evaluate", ".", "--json") == 0
    assert shown_values(capsys)["split"] == "lora_val"
    assert command("evaluate", copied, "--split", "train", "--batch-size", "7", "--json") == 0
    assert "equal_to_metrics" not in shown_values(capsys)


@pytest.mark.parametrize(("stage", "drawn"), [("", "base"), ("lora", "fine-tuned")])
def test_continuations_are_those_of_the_samples_unless_said_otherwise(
    stage: str, drawn: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "texts.csv"
    assert command("predict", finished / stage, "--json", "--out", out) == 0
    found = shown_values(capsys)
    texts = [row["text"] for row in found["texts"]]
    assert len(texts) == 2
    assert texts[0] == read(finished, "metrics.json")["excerpts"][drawn]
    with out.open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == found["texts"]


def test_a_continuation_depends_on_its_prompt_and_seed_alone(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def texts(*arguments: object) -> list[str]:
        assert command("predict", finished, "--json", "--out", tmp_path / "t.npz", *arguments) == 0
        return [row["text"] for row in shown_values(capsys)["texts"]]

    both = texts("--prompt", "The", "--prompt", "A list", "--count", "1", "--seed", "3", "--num-tokens", "20")
    assert [text.startswith(prompt) for text, prompt in zip(both, ("The", "A list"), strict=True)] == [True, True]
    alone = ["--prompt", "A list", "--count", "1", "--num-tokens", "20"]
    assert texts(*alone, "--seed", "3") == both[1:]
    assert texts(*alone, "--seed", "0") != both[1:]
    likeliest = texts("--prompt", "The", "--greedy")
    assert len(likeliest) == 1
    assert texts("--prompt", "The", "--prompt", "The", "--greedy") == likeliest * 2


def test_texts_are_shown_and_written_beside_the_run(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("predict", copied, "--prompt", "The", "--greedy") == 0
    assert "===== 1 of 1 =====\n\nThe" in capsys.readouterr().out
    assert (copied / "continuations.csv").read_text(encoding="utf-8").startswith("prompt,text\nThe,")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "--split", "lora_vl"], "did you mean 'lora_val'?"),
        (["evaluate", "--split", "test"], "split='test'"),
        (["predict", "--split", "val"], "--split val: a run of the face text has no rows of a split"),
        (["predict", "--greedy", "--seed", "0"], "leave out --seed and --count"),
        (["predict", "--out", "l.txt"], "must end in .npz or .csv"),
    ],
)
def test_a_wrong_question_is_one_line(
    arguments: list[str], words: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(arguments[0], finished, *arguments[1:]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_run_of_several_ranks_that_captured_its_steps_is_asked_in_one_process(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read(copied, "run.json")
    record["config"]["training"] |= {"parallel": "fsdp", "capture": True}
    (copied / "run.json").write_text(json.dumps(record))
    assert command("evaluate", copied / "lora", "--json") == 0
    assert shown_values(capsys)["equal_to_metrics"] is True
    assert command("predict", copied, "--greedy") == 0


def test_adapters_on_another_base_are_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = load_checkpoint(copied / "best_model.pt")
    for value in trained["model"].values():
        value.add_(1)
    torch.save(trained["model"], copied / "best_model.pt")
    assert command("evaluate", copied / "lora") == 1
    assert "was trained on another base model" in capsys.readouterr().err
    (copied / "best_model.pt").unlink()
    assert command("evaluate", copied / "lora") == 1
    assert "best_model.pt" in capsys.readouterr().err


# -- the same command with other settings -------------------------------------------------------------------------


@pytest.mark.usefixtures("no_picture")
def test_other_samples_are_drawn_from_the_same_weights(copied: Path) -> None:
    before = the_end(copied)
    assert run(copied, "samples.seed=1", "samples.prompt=The") == 0
    after = the_end(copied)
    text = (copied / "samples.txt").read_text(encoding="utf-8")
    assert text.startswith("prompt 'The'; temperature 0.7, top_k 40, seed 1\n")
    assert text.count("=====\n\nThe") == 4
    changed = ("samples.txt", "metrics.json")
    assert differences(*({key: end[key] for key in end if key not in changed} for end in (before, after))) == []


@pytest.mark.usefixtures("no_picture")
def test_a_longer_training_goes_on_and_fine_tunes_anew(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(copied, "epochs=3") == 0
    shown = capsys.readouterr().err
    assert "epochs was 2 and is now 3: the learning rate follows the new schedule" in shown
    assert "lora belonged to an earlier run and is now lora.1" in shown
    assert read(copied, "history.json")["epoch"] == [1, 2, 3]
    assert read(copied, "lora/history.json")["epoch"] == [1, 2]
    assert (copied / "lora.1" / "best_model.pt").exists()


@pytest.mark.usefixtures("no_picture")
def test_other_adapters_start_anew_on_the_same_base(copied: Path) -> None:
    base = load_checkpoint(copied / "best_model.pt")
    assert run(copied, "lora.r=1") == 0
    assert differences(load_checkpoint(copied / "best_model.pt"), base) == []
    assert all(1 in value.shape for value in load_weights(copied / "lora" / "best_model.pt").values())


@pytest.mark.usefixtures("no_picture")
def test_no_resume_starts_afresh_and_sets_the_old_run_aside(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = load_weights(copied / "best_model.pt")
    with observing(Stop(1, "on_before_optimizer_step", 3, kill)), pytest.raises(Killed):
        main(["train", "text", *TINY, "seed=1", "--out", str(copied), "--device", "cpu", "--no-resume"])
    assert "start     fresh" in capsys.readouterr().err
    assert (copied / "earlier.1" / "checkpoints").is_dir()
    assert (copied / "earlier.1" / "lora").is_dir()
    assert differences(load_weights(copied / "earlier.1" / "best_model.pt"), old) == []
    assert run(copied, "seed=1") == 0  # the killed fresh start, not the finished run that was here before
    assert any(not torch.equal(old[name], value) for name, value in load_weights(copied / "best_model.pt").items())


def test_another_model_or_text_is_refused_and_nothing_is_lost(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(copied)
    assert run(copied, "model.n_embd=16", "optimizer.lr=0.1") == 2
    error = capsys.readouterr().err
    for words in ("model.n_embd was 8 and is now 16", "optimizer.lr was", "--out", "--no-resume"):
        assert words in error
    assert run(copied, "epochs=1") == 2
    assert "epochs=1: the run in" in capsys.readouterr().err
    assert run(copied, "lora.epochs=1") == 2
    assert "has completed 2 epochs already" in capsys.readouterr().err
    manual = text_data.load_manual()
    monkeypatch.setattr(text_data, "load_manual", lambda: {**manual, "await": manual["await"] + " And more."})
    assert run(copied, "epochs=3") == 2
    assert "a different text: the manual differs between Python versions" in capsys.readouterr().err
    assert files(copied) == before


@pytest.mark.parametrize(("place", "steps"), [("", (3, 33)), ("lora", (2, 13))], ids=["training", "fine-tuning"])
def test_a_step_run_again_is_its_record_to_the_bit(
    place: str, steps: tuple[int, ...], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(finished)
    for step in steps:
        with pytest.raises(SystemExit) as left:
            main(["replay", str(finished / place), "--step", str(step), "--device", "cpu", "--json"])
        assert left.value.code in (0, None)
        shown = json.loads(capsys.readouterr().out)
        assert shown["equal"] is True
        assert shown["start_step"] == max(at for at in (0, *((30,) if not place else (10,))) if at < step)
    assert files(finished) == before


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.n_emdb=8", ["unknown setting", "'model.n_embd'"]),
        ("lora.rank=4", ["unknown setting", "'lora."]),
        ("epochs=0", ["epochs=0", "at least 1"]),
        ("model.n_head=3", ["model.", "n_head=3"]),
        ("data.vocab_size=100", ["data.", "vocab_size=100", "257"]),
        ("data.val_fraction=2.0", ["data.", "val_fraction=2.0"]),
        ("data.max_topics=2", ["data.", "leaves none to validate on", "more topics"]),
        ("optimizer.lr=-1.0", ["optimizer.lr=-1.0"]),
        ("training.mixed_precision=half", ["half"]),
        ("lora.r=0", ["lora.r=0", "at least 1"]),
        ("lora.dropout=1.5", ["lora.dropout=1.5"]),
        ("samples.temperature=-1", ["samples.temperature=-1", "at least 0"]),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    setting: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(out, setting) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not out.exists()


def test_an_unwritable_place_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert run(tmp_path / "file" / "run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--out" in error
    assert "is not a folder" in error


def test_a_missing_package_is_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise MissingExtraError("treadle.text needs transformers (no such module): pip install 'treadle[hf]'")

    monkeypatch.setattr(text_run, "build_gpt2", missing)
    assert run(tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install 'treadle[hf]'" in error


def test_what_may_change_is_made_of_settings_that_exist() -> None:
    from treadle.runs.settings import flat

    assert set(FREE) <= set(flat(TextConfig().to_dict()))


def test_help_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in {
        ("train", "text", "--help"): ["--no-resume", "Examples:\n", "  treadle train text epochs=4"],
        ("train", "text", "--show-settings", "epochs=7"): ["epochs=7", "model.n_embd=128", "lora.r=8"],
    }.items():
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code in (0, None)
        shown = capsys.readouterr().out
        for word in words:
            assert word in shown


def test_verify_takes_it_as_a_target_and_refuses_a_wrong_setting(capsys: pytest.CaptureFixture[str]) -> None:
    from treadle.runs.exact import check_arguments

    assert check_arguments("text", ["epochs=3"], None, 3) == 120
    with pytest.raises(SystemExit) as left:
        main(["verify", "text", "model.n_emdb=3"])
    assert left.value.code == 2
    assert "model.n_embd" in capsys.readouterr().err


def test_a_configuration_file_may_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("face: text\nepochs: 3\nmodel: {n_layer: 5}\nsamples: {top_k: null}\n")
    with pytest.raises(SystemExit) as left:
        main(["train", str(tmp_path / "run.yaml"), "lora.r=3", "--show-settings"])
    assert left.value.code in (0, None)
    shown = capsys.readouterr().out.splitlines()
    assert {"epochs=3", "model.n_layer=5", "samples.top_k=None", "lora.r=3"} <= set(shown)


@pytest.mark.slow
def test_verify_says_exact(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "treadle", "verify", "text", *TINY, "--steps", "24", "--kills", "2", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] == "EXACT"


@pytest.mark.parametrize(("setting", "first", "second"), [("true", True, "auto"), ("auto", "auto", "auto")])
def test_capture_reaches_both_trainings(tmp_path: Path, setting: str, first: object, second: object) -> None:
    config = text_run.PACK.read_settings([*TINY, f"training.capture={setting}"], "cpu")
    no_data = SimpleNamespace(train=Rows(), lora_train=Rows())
    run = Run(config, tmp_path, torch.device("cpu"), Console(quiet=True))
    trainer = text_run.build_base(run, no_data)
    assert trainer._engine.capture == first
    assert text_run.build_lora(trainer.model, run, no_data)._engine.capture == second
    with pytest.raises(ConfigError, match="capture='often'"):
        text_run.PACK.read_settings(["training.capture=often"], "cpu")


class Rows:
    """A part with 16 blocks."""

    def loader(self, batch_size: int) -> TensorLoader:
        return TensorLoader(torch.zeros(16, 2), batch_size=batch_size)


@pytest.mark.parametrize(
    ("setting", "words"),
    [("data.vocab_size=4000", "rows of the embedding are never trained"), ("data.block_length=9000", "is padding")],
)
def test_rows_that_the_text_cannot_train_are_named_before_the_model_is_built(
    setting: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_run.TextPack, "build", lambda *given: sys.exit(3))
    assert run(tmp_path / "run", setting) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert f"{setting}: the training text" in error
    assert words in error
