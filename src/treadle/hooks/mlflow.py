"""MlflowHook: log points, parameters and images to MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.hooks.tracking import TrackerHook
from treadle.hooks.values import flat_settings, require

if TYPE_CHECKING:
    from treadle.engine import Engine

_ID_FILE = "mlflow_run_id"
_LAST_STEP = "treadle.last_step"
_LONGEST = 500  # maximal length of a parameter's value in all versions of MLflow
_BATCH = 100  # maximal number of parameters per request; metrics may be more


class MlflowHook(TrackerHook):
    """MLflow tracker: log points at ``trainer.step`` and images ``images/<step>/<key>.png``, on rank 0.

    The run's id is stored in ``<workspace>/mlflow_run_id``, from which the run is continued; the environment variable
    ``MLFLOW_RUN_ID`` overrides the file. After a resume, points that the run already has are not sent again. The hook
    uses its own client and does not touch the process's active MLflow run.

    Args:
        experiment: name of the experiment, created if missing; None takes ``MLFLOW_EXPERIMENT_NAME``, else MLflow's
            ``Default``, or ``treadle`` in a store that the hook creates.
        tracking_uri: URI of the tracking store. None takes MLflow's setting (``MLFLOW_TRACKING_URI``), else
            ``sqlite:///<workspace>/mlflow.db`` with the artifacts next to it.
        run_name: name of a new run.
        params: parameters of the run; None takes the trainer's settings. Nested keys are joined by ``/``.

    Raises:
        ImportError: when training starts, if MLflow is not installed.
        ConfigError: when training starts, if there is neither a tracking URI nor a workspace.

    Example:
        >>> hook = MlflowHook(experiment="digits", params={"lr": 1e-3})
    """

    @checked
    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
    ):
        super().__init__(params)
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.run_name = run_name
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._last_steps: dict[str, int] = {}

    def check(self, trainer: Engine) -> None:
        """Import MLflow and find the store."""
        self._mlflow = require("mlflow", "MlflowHook")
        if self.tracking_uri is None and trainer.workspace is None and not self._mlflow.is_tracking_uri_set():
            raise ConfigError(
                "=None and the trainer has no workspace to keep the runs in; pass tracking_uri= to "
                "MlflowHook, workspace= to the trainer, or set MLFLOW_TRACKING_URI",
                argument="tracking_uri",
            )

    def open(self, trainer: Engine) -> None:
        """Start the run, or continue the stored one."""
        own_store = self.tracking_uri is None and not self._mlflow.is_tracking_uri_set()
        uri = self.tracking_uri
        if trainer.workspace is None:
            trainer.logger.warning(
                "MlflowHook: without a workspace the run id is not saved, so a resume starts a new run"
            )
        else:
            trainer.workspace.mkdir(parents=True, exist_ok=True)
            if own_store:
                uri = f"sqlite:///{(trainer.workspace / 'mlflow.db').absolute().as_posix()}"
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        self._last_steps = {}
        run = self._known_run(trainer) or self._client.create_run(
            self._experiment_id(trainer, own_store), run_name=self.run_name
        )
        self._run_id = run.info.run_id
        if trainer.workspace is not None:
            (trainer.workspace / _ID_FILE).write_text(f"{self._run_id}\n", encoding="utf-8")
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_params(trainer, run.data.params)
        self.sent_through = int(run.data.tags.get(_LAST_STEP, -1))
        self.say_what_is_kept(trainer, self._run_id, _ID_FILE)

    def _known_run(self, trainer: Engine) -> Any:
        named = os.environ.get("MLFLOW_RUN_ID")
        if named:
            return self._client.get_run(named)
        file = None if trainer.workspace is None else trainer.workspace / _ID_FILE
        if file is None or not file.is_file():
            return None
        kept = file.read_text(encoding="utf-8").strip()
        try:
            return self._client.get_run(kept)
        except self._mlflow.MlflowException as error:
            trainer.logger.warning(
                "MlflowHook: cannot continue the run in %s (%s); starting a new one", _ID_FILE, error
            )
            return None

    def _experiment_id(self, trainer: Engine, own_store: bool) -> str:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(name)
        if found is not None and not (own_store and name == "Default"):
            return str(found.experiment_id)
        artifacts = None
        if own_store and trainer.workspace is not None:
            # Unless given a location, the artifacts of a local store go to the current directory.
            artifacts = (trainer.workspace / "mlflow_artifacts").absolute().as_uri()
            name = "treadle" if name == "Default" else name
            found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name, artifact_location=artifacts))

    def _log_params(self, trainer: Engine, logged: Mapping[str, str]) -> None:
        """Log the parameters that the run lacks; MLflow does not allow changes."""
        param = self._mlflow.entities.Param
        wanted = {_name(key): str(value)[:_LONGEST] for key, value in flat_settings(self.settings(trainer)).items()}
        changed = [key for key, value in wanted.items() if logged.get(key, value) != value]
        if changed:
            trainer.logger.warning("MlflowHook: the run keeps its earlier values of the params %s", changed)
        missing = [param(key, value) for key, value in wanted.items() if key not in logged]
        for start in range(0, len(missing), _BATCH):
            self._client.log_batch(self._run_id, params=missing[start : start + _BATCH])

    def was_sent(self, key: str, step: int) -> bool:
        """Query the store, once per key."""
        name = _name(key)
        if name not in self._last_steps:
            history = self._client.get_metric_history(self._run_id, name)
            self._last_steps[name] = max((metric.step for metric in history), default=-1)
        return step <= self._last_steps[name]

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Send the numbers with a tag of their step."""
        tag = [self._mlflow.entities.RunTag(_LAST_STEP, str(max(trainer.step, self.sent_through)))]
        self._send(trainer, self.only_numbers(trainer, values), tag)

    def write_final(self, trainer: Engine, values: dict[str, float]) -> None:
        """Send the final metrics as metrics of the last step."""
        self._send(trainer, values, [])

    def _send(self, trainer: Engine, values: Mapping[str, float], tags: list[Any]) -> None:
        now, kind = int(time.time() * 1000), self._mlflow.entities.Metric
        metrics = [kind(_name(key), value, now, trainer.step) for key, value in values.items()]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH], tags=tags)

    def write_images(self, trainer: Engine, images: dict[str, Any]) -> None:
        """Store the images as artifacts; a repeated step replaces its images."""
        for key, image in images.items():
            self._client.log_image(self._run_id, image, artifact_file=f"images/{trainer.step}/{_name(key)}.png")

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """End the run as finished, killed or failed."""
        killed = isinstance(error, (KeyboardInterrupt, SystemExit))
        status = "FINISHED" if error is None else "KILLED" if killed else "FAILED"
        self._client.set_terminated(self._run_id, status=status)


def _name(key: str) -> str:
    """Return a key in characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", key)
