from __future__ import annotations

import logging
import shutil

import pytest

import treadle.distributed


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Every tracker stays on this machine, and finds nothing of the caller's in the environment."""
    for name in ("WANDB_RUN_ID", "WANDB_DIR", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def empty_mlflow_store(tmp_path_factory):
    """A store with its tables; making them takes MLflow seconds."""
    import os

    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_workspace(empty_mlflow_store, tmp_path):
    """A workspace with an empty store in it."""
    shutil.copy(empty_mlflow_store, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def other_rank(monkeypatch):
    """Make this process rank 1, as far as hooks ask."""
    monkeypatch.setattr(treadle.distributed, "rank", lambda: 1)
