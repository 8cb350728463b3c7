"""MLflow, through its client: the user's active run and its thread are left alone."""

from __future__ import annotations

import contextlib
import getpass
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from hydrogen_magic.core.library_types import is_installed
from hydrogen_magic.driver.trackers import MetricPoint, RunInfo, TrackedRun, Tracker

_STATES = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "STOPPED": "KILLED"}
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")
"""Of metrics and parameters, by MLflow's rules."""
_LONGEST_NAME = 250
_BATCH = 1000
"""Metrics in one request, by MLflow's limits."""
_PARAMS_BATCH = 100


class MlflowTracker(Tracker):
    """Runs of the current experiment, at the tracking URI of their launch."""

    def __init__(self) -> None:
        self._clients: dict[str, Any] = {}
        """By the run id of a group."""

    def fault(self) -> str | None:
        if not is_installed("mlflow"):
            return "mlflow is not installed: pip install mlflow-skinny"
        try:
            uri = _tracking_uri()
        except Exception as error:
            return f"mlflow cannot be imported: {type(error).__name__}: {error}"
        try:
            _client()  # of a server, it sends nothing yet
        except ImportError as error:
            return (
                f"the store {uri} cannot be opened ({error}): pip install mlflow, which has what local "
                "databases need, or set MLFLOW_TRACKING_URI to a server"
            )
        except Exception as error:
            return f"the store {uri} cannot be opened: {type(error).__name__}: {error}"
        return None

    def start(self, info: RunInfo) -> TrackedRun:
        tags = {f"hydrogen_magic.{name}": text for name, text in info.about.items()}
        tags["hydrogen_magic.gang"] = info.gang
        if info.group:
            tags["mlflow.parentRunId"] = info.group
        client = _client()
        run = _MlflowRun(_created(client, info.name, tags), client)
        run.set_params(info.params)
        return run

    def open_group(self, name: str) -> str:
        """Begin a run that is the parent of the others; return its id."""
        client = _client()
        group = str(_created(client, name, {}).info.run_id)
        self._clients[group] = client
        return group

    def close_group(self, group: str, state: str) -> None:
        self._clients.pop(group).set_terminated(group, _STATES[state])


def _client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


def _tracking_uri() -> str:
    import mlflow

    return str(mlflow.get_tracking_uri())


def _created(client: Any, name: str, tags: Mapping[str, str]) -> Any:
    # Private; the public functions that know the current experiment start a run, which belongs to a thread.
    from mlflow.tracking.fluent import _get_experiment_id

    described = {"mlflow.source.type": "NOTEBOOK", **tags}
    # In a container, a user may have no name.
    with contextlib.suppress(KeyError, OSError, ImportError):
        described["mlflow.user"] = getpass.getuser()
    return client.create_run(_get_experiment_id(), tags=described, run_name=name)


class _MlflowRun(TrackedRun):
    def __init__(self, run: Any, client: Any) -> None:
        self._id = run.info.run_id
        self._client = client
        """Of the tracking URI of the launch: the notebook may set another one."""
        uri, experiment = _tracking_uri(), run.info.experiment_id
        is_server = uri.startswith("http")
        are_files = urlsplit(uri).scheme in ("", "file") and uri != "databricks"
        self._metric = _Names(are_files)
        self._param = _Names(are_files)
        self.where = f"{uri}/#/experiments/{experiment}/runs/{self._id}" if is_server else uri

    def set_params(self, params: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        each = [Param(self._param.of(name), str(value)) for name, value in params.items()]
        for start in range(0, len(each), _PARAMS_BATCH):
            self._client.log_batch(self._id, params=each[start : start + _PARAMS_BATCH])

    def log(self, points: Sequence[MetricPoint]) -> None:
        from mlflow.entities import Metric

        each = [
            Metric(self._metric.of(name), value, int(point.unix_s * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(each), _BATCH):
            self._client.log_batch(self._id, metrics=each[start : start + _BATCH])

    def add_file(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def end(self, state: str) -> None:
        self._client.set_terminated(self._id, _STATES[state])


class _Names:
    """The names of a run's metrics or parameters in a store: one that it refused would end the tracking."""

    def __init__(self, are_files: bool) -> None:
        self._are_files = are_files
        """A name cannot also be the folder of another one."""
        self._known: dict[str, str] = {}
        self._given: set[str] = set()
        self._folders: set[str] = set()

    def of(self, text: str) -> str:
        if text not in self._known:
            self._known[text] = self._allowed(_name(text))
        return self._known[text]

    def _allowed(self, name: str) -> str:
        while name in self._given or (self._are_files and self._is_refused(name)):
            name = name.replace("/", "_") + "_"
        self._given.add(name)
        self._folders |= _folders(name)
        return name

    def _is_refused(self, name: str) -> bool:
        return name in self._folders or not self._given.isdisjoint(_folders(name))


def _folders(name: str) -> set[str]:
    return set(map(str, PurePosixPath(name).parents))


def _name(text: str) -> str:
    """Return a name that MLflow allows.

    Its stores use names as paths, which must be relative, without ``..`` and in their shortest form.
    """
    name = _NOT_IN_NAMES.sub("_", text)[:_LONGEST_NAME] or "_"
    is_path = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    return name if is_path else re.sub("[./]", "_", name)
