from __future__ import annotations

import logging
import math
import sys

import pytest
import torch

from hook_kit import Small, Stop, bare_engine, picture, stop_at_15_and_resume_from_10
from treadle.errors import ConfigError
from treadle.hooks import LoggingHook, MlflowHook

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def client(workspace):
    import mlflow

    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{workspace / 'mlflow.db'}")


def run_id(workspace):
    return (workspace / "mlflow_run_id").read_text().strip()


def run(workspace):
    return client(workspace).get_run(run_id(workspace))


def history(workspace, key):
    return [(metric.step, metric.value) for metric in client(workspace).get_metric_history(run_id(workspace), key)]


def opened(workspace, step=0, **arguments):
    hook, engine = MlflowHook(**arguments), bare_engine(workspace, step=step)
    hook.on_before_train(engine)
    return engine, hook


def test_after_a_stop_at_15_and_a_resume_from_10_one_run_has_each_step_once(mlflow_workspace):
    stop_at_15_and_resume_from_10(mlflow_workspace, lambda: MlflowHook(run_name="first", params={"model": {"lr": 0.1}}))
    assert history(mlflow_workspace, "train/number") == [(step, float(step)) for step in range(1, 21)]
    assert [step for step, _ in history(mlflow_workspace, "train/loss")] == list(range(1, 21))
    assert [step for step, _ in history(mlflow_workspace, "epoch_end/number")] == [4, 8, 12, 16]
    found = run(mlflow_workspace)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "first")
    assert found.data.params == {"model/lr": "0.1"}
    experiment = client(mlflow_workspace).get_experiment(found.info.experiment_id)
    assert len(client(mlflow_workspace).search_runs([experiment.experiment_id])) == 1


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_the_status_says_how_the_run_ended(mlflow_workspace, error, status):
    engine, hook = opened(mlflow_workspace)
    hook.on_close(engine, error())
    assert run(mlflow_workspace).info.status == status


def test_nan_infinity_and_odd_names_are_stored(mlflow_workspace):
    engine, hook = opened(mlflow_workspace, step=0)
    engine.progress.step = 1
    hook.on_log(engine, {"nan": math.nan, "big": math.inf, "acc@1 (%)": torch.tensor(0.5).bfloat16()})
    assert math.isnan(history(mlflow_workspace, "nan")[0][1])
    assert history(mlflow_workspace, "big")[0][1] > 1e300
    assert history(mlflow_workspace, "acc_1 ___") == [(1, 0.5)]


def test_images_become_artifacts_in_the_workspace(mlflow_workspace):
    engine, hook = opened(mlflow_workspace, step=3)
    hook.on_log_images(engine, {"val": {"sample": picture(), "tensor": torch.zeros(3, 4, 4)}})
    listed = client(mlflow_workspace).list_artifacts(run_id(mlflow_workspace), "images/3/val")
    assert sorted(item.path for item in listed) == ["images/3/val/sample.png", "images/3/val/tensor.png"]
    assert len(list((mlflow_workspace / "mlflow_artifacts").rglob("*.png"))) == 2


def test_params_are_logged_in_any_number_and_keep_their_first_value(mlflow_workspace, caplog):
    many = {f"p{i}": i for i in range(150)}
    engine, hook = opened(mlflow_workspace, experiment="digits", params=many)
    hook.on_close(engine)
    opened(mlflow_workspace, experiment="digits", params={**many, "p3": "changed"})
    found = run(mlflow_workspace)
    assert found.data.params == {key: str(value) for key, value in many.items()}
    assert client(mlflow_workspace).get_experiment(found.info.experiment_id).name == "digits"
    assert any("p3" in record.message for record in caplog.records if record.levelno == logging.WARNING)


def test_the_environment_wins_over_the_kept_run(mlflow_workspace, monkeypatch):
    opened(mlflow_workspace)
    first = run_id(mlflow_workspace)
    (mlflow_workspace / "mlflow_run_id").unlink()
    opened(mlflow_workspace)
    assert run_id(mlflow_workspace) != first
    monkeypatch.setenv("MLFLOW_RUN_ID", first)
    opened(mlflow_workspace)
    assert run_id(mlflow_workspace) == first


def test_a_kept_run_that_is_not_in_the_store_is_warned_of_and_replaced(mlflow_workspace, caplog):
    (mlflow_workspace / "mlflow_run_id").write_text("nowhere\n")
    opened(mlflow_workspace)
    assert run_id(mlflow_workspace) != "nowhere"
    assert any("nowhere" in record.message for record in caplog.records if record.levelno == logging.WARNING)


def test_a_start_from_nothing_in_a_run_that_has_points_warns(mlflow_workspace, caplog):
    Small(3, mlflow_workspace, [LoggingHook(1), MlflowHook()]).train()
    Small(5, mlflow_workspace, [LoggingHook(1), MlflowHook()]).train()
    assert [step for step, _ in history(mlflow_workspace, "train/loss")] == [1, 2, 3, 4, 5]
    assert any("up to step 3" in record.message for record in caplog.records if record.levelno == logging.WARNING)


def test_a_store_that_fails_while_logging_does_not_end_the_training(mlflow_workspace, caplog):
    hook = MlflowHook()

    class Break(Stop):
        def on_after_step(self, trainer):
            if trainer.step == self.at:
                hook._client = None

    trainer = Small(4, mlflow_workspace, [LoggingHook(1), Break(2), hook])
    trainer.train()
    assert trainer.step == 4
    assert sum("MlflowHook" in record.message for record in caplog.records if record.levelno == logging.WARNING) == 1


def test_without_a_uri_and_a_workspace_there_is_nowhere_to_write():
    with pytest.raises(ConfigError, match="tracking_uri"):
        MlflowHook().on_before_train(bare_engine(None))


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"treadle\[track\]"):
        MlflowHook().on_before_train(bare_engine(tmp_path))


def test_only_rank_0_writes(tmp_path, other_rank):
    engine, hook = opened(tmp_path)
    hook.on_log(engine, {"a": 1})
    hook.on_close(engine)
    assert list(tmp_path.iterdir()) == []
