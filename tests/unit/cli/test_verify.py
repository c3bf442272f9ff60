"""``treadle verify`` finds each planted fault, names it, and calls what is exact exact."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from treadle.cli.main import main
from treadle.errors import ConfigError, TreadleError
from treadle.runs.verify.describe import as_json, describe_difference, verdict_reason
from treadle.runs.verify.jobs import read_records
from treadle.runs.verify.runs import Verifier, plan_kills, two_servers
from verify_kit import write_script


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("PYTHONHASHSEED", raising=False)  # the two hash strings differently, unless told how
        with two_servers("train.py", 0, tmp_path_factory.mktemp("servers") / "server.log") as both:
            yield both


@pytest.fixture
def verify(servers, tmp_path):
    """Verify the script with some of its places changed; 12 steps cross the end of an epoch, which has 5."""

    def run(*arguments, seed=0, kills=2, **changes):
        script = write_script(tmp_path, **changes)
        settings = {"steps": 12, "kills": kills, "seed": seed, "folder": tmp_path / "runs"}
        return Verifier(str(script), arguments, log_progress=lambda text: None, **settings).run(servers)

    return run


EXACT = {
    # State of the user's own objects, which checkpoints carry.
    "counter_in_dataset": {"item": "self.reads += 1; x = x * (1 + 0.01 * self.reads)"},
    "buffer_not_registered": {"forward": "self.scale = 0.9 * self.scale + 0.1 * x.detach().std(); x = x / self.scale"},
    "seeded_by_a_counter_in_forward": {"forward": "self.calls += 1; torch.manual_seed(self.calls)"},
    "plain": {},
    "two_workers": {
        "loader": "return DataLoader(Data(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)"
    },
    "no_saving_hook": {"saves": "BaseHook()"},
    "only_torch_is_seeded": {
        "start": "torch.manual_seed(0)",
        "loader": "return DataLoader(torch.utils.data.TensorDataset(Data().x, Data().x.sum(1)), 4, shuffle=True)",
    },
    "signals": {"saves": "CheckpointingHook(10, exit_signals=15)"},
    "ends_before_the_last_step": {"steps": "9"},
    "hook_with_saved_state": {
        "hook": "def on_state_dict(self, trainer, state): state['hooks']['Watch'] = self.count\n"
        "    def on_load_state_dict(self, trainer, state): self.count = state['hooks']['Watch']\n"
        "    def on_before_step(self, trainer):\n"
        "        self.count += 1\n"
        "        trainer.optimizer.param_groups[0]['lr'] = 0.001 * self.count"
    },
}


# The long tests run all of them; those named here are near relatives of others.
LONG = {"signals", "unseeded_numpy_in_workers", "generator_in_dataset", "hook_changes_gradients", "order_of_a_set"}


def cases(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in names]


@pytest.mark.parametrize("name", cases(EXACT))
def test_what_resumes_exactly_is_called_exact(verify, tmp_path, name):
    result = verify(**EXACT[name])
    assert result.verdict == "EXACT", describe_difference(result.difference)
    assert len(result.kills) == 2
    assert {kill.signal for kill in result.kills} == {"SIGKILL", "SIGTERM"}
    assert any(step > 0 for step in result.resumed_from)
    assert result.last_step == (9 if name == "ends_before_the_last_step" else 12)
    assert result.records > 12  # steps between a checkpoint and a kill were run and compared twice
    assert not (tmp_path / "users_own_run").exists()
    assert not (tmp_path / "users_own_run.reached").exists()


def test_what_was_arranged_is_said(verify):
    assert verify(saves="BaseHook()").arranged == [
        "a CheckpointingHook added: there is none (every 3 steps, and SIGTERM)"
    ]


UNSEEDED = "np.random.default_rng().normal()"
# A generator that a hook made late cannot be written.
IN_HOOK = (
    "def on_{event}(self, trainer):\n        self.late = getattr(self, 'late', None) or (i for i in range(1, 99))\n"
    "        self.count = next(self.late)\n        {action}"
)
# fault -> (places of the script, name of the cause, part that differs first, words of the report)
FAULTS = {
    "unseeded_numpy_in_getitem": (
        {"item": f"x = x + {UNSEEDED}"}, "unseeded_data", "batch content", ["default_rng([seed, index])"],
    ),
    "unseeded_numpy_in_workers": (
        {"item": f"x = x + {UNSEEDED}", "loader": "return DataLoader(Data(), batch_size=4, num_workers=2)"},
        "unseeded_data", "batch content", ["default_rng"],
    ),
    "generator_in_dataset": (
        {"item": "self.late = getattr(self, 'late', None) or (i for i in range(1, 999))\n"
         "        self.count = next(self.late)\n        x = x + self.count"},
        "state_in_dataset", "batch content", ["dataset Data.count", "default_rng([seed, index])"],
    ),
    "hook_sets_lr": (
        {"hook": IN_HOOK.format(
            event="before_step", action="trainer.optimizer.param_groups[0]['lr'] = 0.001 * self.count"
        )},
        "unsaved_hook_state", "learning rate", ["on_state_dict", "lr of the optimizer"],
    ),
    "hook_moves_weights": (
        {"hook": IN_HOOK.format(
            event="after_step", action="trainer.model.layers[0].bias.data.add_(1e-4 * self.count)"
        )},
        "unsaved_hook_state", "weights", ["model.layers.0.bias"],
    ),
    "hook_changes_gradients": (
        {"hook": IN_HOOK.format(
            event="before_optimizer_step", action="trainer.model.layers[3].weight.grad.mul_(self.count)"
        )},
        "unsaved_hook_state", "gradients", ["on_state_dict", "layers.3.weight"],
    ),
    "order_by_the_clock": (
        {"loader": "order = np.random.RandomState(int(time.time())).permutation(40).tolist()\n"
         "        return DataLoader(Data(), batch_size=4, sampler=order)"},
        "unseeded_order", "sample ids", ["time.time()", "two uninterrupted runs"],
    ),
    "order_of_a_set": (
        {"loader": "order = [int(name[1:]) for name in {f'n{i}' for i in range(40)}]\n"
         "        return DataLoader(Data(), batch_size=4, sampler=order)"},
        "unseeded_order", "sample ids", ["order of a set"],
    ),
    "seeded_by_the_clock_in_forward": (
        {"forward": "torch.manual_seed(int(1000 * time.time()))"},
        "reseeded_in_forward", "random state after the forward pass", ["torch.manual_seed(", "train.py:"],
    ),
    "no_seed_at_all": ({"start": "torch.seed()"}, "unseeded_script", "sample ids", ["set_seed(0) before the trainer"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", cases(FAULTS))
def test_a_planted_fault_is_found_and_named(verify, fault):
    changes, cause, part, words = FAULTS[fault]
    result = verify(**changes)
    assert result.verdict == "NOT EXACT"
    assert (result.cause.name, result.difference.part) == (cause, part)
    said = " ".join([describe_difference(result.difference), result.cause.rule, result.cause.fix])
    assert [word for word in words if word not in said] == [], said
    unseeded = cause.startswith("unseeded") or "clock" in fault
    assert result.difference.uninterrupted == unseeded
    assert result.kills == [] if unseeded else len(result.kills) == 2
    if not unseeded:  # an unsaved value shows in the first step after a resume
        assert result.difference.after_resume == 1
        assert "first step after the resume" in verdict_reason(result)


def test_the_same_seed_in_every_forward_pass_is_exact_and_pointed_out(verify):
    result = verify(forward="torch.manual_seed(5)")
    assert result.verdict == "EXACT"
    assert any("torch.manual_seed(5) at train.py:" in note and "dropout mask" in note for note in result.notes)


def test_runs_that_never_resume_prove_nothing(verify):
    result = verify(saves="CheckpointingHook(10, load=None)")
    assert result.verdict == "NOT CHECKED"
    assert "load='latest'" in result.reason


def test_a_rerun_that_fails_is_not_exact(verify):
    hook = "def on_load_state_dict(self, trainer, state): raise RuntimeError('cannot go on')"
    result = verify(hook=hook)
    assert result.verdict == "NOT EXACT"
    assert "after kill 1 failed" in result.reason
    assert "cannot go on" in result.reason


def test_what_is_a_matter_of_the_script_alone_is_told_apart(verify):
    with pytest.raises(
        TreadleError, match=r"the target itself failed, without a kill \(exit code 1\): ValueError: no such thing"
    ):
        verify(start="raise ValueError('no such thing')")
    with pytest.raises(ConfigError, match="ended without training"):
        verify(start="sys.exit(0)")
    with pytest.raises(ConfigError, match="at least 2"):
        verify(steps="1")


def test_arguments_reach_the_script(verify):
    with pytest.raises(TreadleError, match=r"\['--lr', '3'\]"):
        verify("--lr", "3", start="raise ValueError(sys.argv[1:])")


def test_kills_come_at_rising_steps_and_leave_a_step_to_rerun():
    for seed in range(200):
        chance = random.Random(seed)
        first, last, count = chance.randrange(50), 0, chance.randrange(1, 6)
        last = first + chance.randrange(2, 30)
        steps = [kill.step for kill in plan_kills(chance, count, first, last)]
        assert steps == sorted(set(steps))
        assert len(steps) == min(count, last - first - 1)
        assert all(first < step < last for step in steps)


def test_a_torn_last_line_is_no_record(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "start"}\n{"kind": "st')
    assert read_records(path) == [{"kind": "start"}]


def test_the_result_is_plain_values(verify):
    plain = json.loads(json.dumps(as_json(verify(**FAULTS["hook_changes_gradients"][0]))))
    assert plain["verdict"] == "NOT EXACT"
    assert plain["difference"]["part"] == "gradients"
    assert plain["cause"]["name"] == "unsaved_hook_state"
    assert plain["parts"]["sample ids"]["differing"] == 0


def command(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "treadle", "verify", *arguments], capture_output=True, text=True, env=environment
    )


def test_the_command_prints_plain_lines_and_keeps_what_it_needs(tmp_path):
    done = command(tmp_path, str(write_script(tmp_path)), "--steps", "8", "--kills", "2")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "Traceback" not in done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("EXACT: 8 steps, 2 kills (SIGKILL ")
    folder = next(line.split(" are in ")[1] for line in done.stdout.splitlines() if line.startswith("files: "))
    assert sorted(os.listdir(folder)) == ["killed", "server.log", "uninterrupted-1", "uninterrupted-2"]
    assert sorted(os.listdir(os.path.join(folder, "killed"))) == ["output.log", "records.jsonl"]


def test_the_spectra_command_is_exact(tmp_path):
    settings = ["data.max_rows=80", "batch_size=16", "model.d_model=16", "model.nhead=2", "model.num_layers=1"]
    done = command(tmp_path, "spectra", *settings, "model.dropout=0.1", "--steps", "14", "--kills", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["verdict"] == "EXACT"
    assert max(result["resumed_from"]) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_script.py"], "TARGET=no_such_script.py: must be a script that exists"),
        (["spectra", "epoch=3"], "did you mean 'epochs'?"),
        (["spectra", "--steps", "1"], "--steps 1: must be at least 2"),
        (["spectra", "--kills", "0"], "--kills 0: must be at least 1"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["verify", *arguments])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said
