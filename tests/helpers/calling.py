"""Calling `run.py`: in the process of the test or, where the process is the point, in its own."""

import gc
import io
import json
import logging
import os
import pickle
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import cloudpickle
import pytest
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure

from resnet8ptq.__main__ import main
from resnet8ptq.api import serving
from resnet8ptq.core import background, command_process, console, figures
from resnet8ptq.data import locate
from resnet8ptq.evaluation import paired_latency
from resnet8ptq.tasks.scoring import class_plots
from tests.helpers import composing
from tests.helpers.stores import copy_database

if TYPE_CHECKING:  # most tests do without MLflow
    from mlflow import MlflowClient
    from mlflow.entities import Run

REPO = Path(__file__).parents[2]
RUN = str(REPO / "run.py")
NO_REAL_FILES = {"CIFAR10_DIR": "", "RESNET8_H5": ""}
# MLflow's server otherwise starts eight processes for jobs of its own, which no test asks for.
NO_SERVER_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
EMPTY = figures.to_png(Figure(figsize=(0.1, 0.1)))
QUICK = (  # for a run whose accuracy does not matter
    *("data=shapes", "latency.enabled=false", "report.columns=[all]"),
    *("evaluate.split=held_out", "held_out_images=500", "calib.samples_per_class=20"),
)
FAILS = ("calib=percentile", "calib.num_bins=2048,2047")


@dataclass(frozen=True)
class Called:
    """A finished `run.py`, and the folder it ran in."""

    folder: Path
    code: int
    out: str
    err: str

    @property
    def client(self) -> "MlflowClient":
        import mlflow

        return mlflow.MlflowClient(tracking_uri=f"sqlite:///{self.folder / 'mlruns' / 'mlflow.db'}")

    @property
    def runs(self) -> list["Run"]:
        """All runs of the store, the oldest first."""
        experiment = self.client.get_experiment_by_name("resnet8ptq")
        assert experiment is not None
        order = ["attributes.start_time ASC"]
        return list(self.client.search_runs([experiment.experiment_id], order_by=order))

    @property
    def parent(self) -> "Run":
        (result,) = [run for run in self.runs if "overrides" in run.data.tags]
        return result

    @property
    def children(self) -> list["Run"]:
        parent_id = self.parent.info.run_id
        return [r for r in self.runs if r.data.tags.get("mlflow.parentRunId") == parent_id]

    def artifacts(self, run: "Run") -> dict[str, Path]:
        root = Path(run.info.artifact_uri.removeprefix("file://"))
        return {path.name: path for path in root.iterdir()}

    def result(self, run: "Run") -> dict[str, Any]:
        """The exact settings and metrics of a measured run."""
        kept: dict[str, Any] = json.loads(self.artifacts(run)["result.json"].read_text())
        return kept

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def table(self) -> list[dict[str, str]]:
        """The rows of the printed table."""
        rows = [
            [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
            for line in self.out.splitlines()
            if line.startswith(("│", "┃"))
        ]
        return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


@contextmanager
def without_figures() -> Iterator[None]:
    """Write empty pictures in the place of figures."""
    blank = dict.fromkeys(("classes", "confusion"), lambda *_: Figure())
    with (
        mock.patch.object(figures, "to_png", lambda _: EMPTY),
        mock.patch.multiple(class_plots, **blank),
    ):
        yield


@contextmanager
def handed_over_here() -> Iterator[None]:
    """Make the calls for the process beside in this one, pickled as for that one."""

    def put(function: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(pickle.loads(cloudpickle.dumps(partial(function, *args, **named)))())
        return done

    with mock.patch.object(background, "put", put):
        yield


def call(
    folder: Path, *args: str, drawn: bool = False, installed: bool = False, **env: str
) -> Called:
    """Call `run.py` in `folder`, as a person would; runs/ and mlruns/ land there.

    If it is `installed`, call `resnet8ptq run` instead.

    In this process, where everything is imported and loaded already. Its figures are empty pictures
    unless `drawn`: they take half a second each. Models race in 3 blocks and not in 10, for each of
    which they are loaded again. Hydra composes each choice of groups once (`composing`), which is
    half of a short run; processes of their own compose as for a user.
    """
    with quick_parts(drawn):
        if installed:
            return call_beside(folder, "run", *args, **env)
        return _call(lambda: runpy.run_path(RUN, run_name="__main__"), folder, [RUN, *args], env)


@contextmanager
def answered_here() -> Iterator[None]:
    """Run the commands of the Python interface in this process, as `call` does."""

    def run(name: str, words: Sequence[str], quiet: bool = False) -> dict[str, Any]:
        answers = []

        def serve() -> None:
            answers.append(json.dumps(serving.COMMANDS[name](list(words))))
            sys.exit(0)

        with quick_parts():
            done = _call(serve, Path.cwd(), ["resnet8ptq"], {})
        answer: dict[str, Any] = json.loads(answers[0])
        assert answer["error"] is None, done.err
        return answer

    with mock.patch.object(command_process, "run", run):
        yield


@contextmanager
def quick_parts(drawn: bool = False) -> Iterator[None]:
    """Leave out what takes long in a run and is not looked at; see `call`."""
    pictures = nullcontext() if drawn else without_figures()
    here = mock.patch.object(background, "allowed", handed_over_here)
    with pictures, here, mock.patch.object(paired_latency, "BLOCKS", 3):
        yield


def call_beside(folder: Path, *args: str, **env: str) -> Called:
    """Call `python -m resnet8ptq` in `folder`, in this process."""
    return _call(lambda: sys.exit(main()), folder, ["resnet8ptq", *args], env)


def _call(run: Callable[[], object], folder: Path, argv: list[str], env: dict[str, str]) -> Called:
    from resnet8ptq.tracking.mlflow_store import store

    out, err = io.StringIO(), io.StringIO()
    with (
        kept_globals(),
        composing.once(),
        chdir(folder),
        mock.patch.dict(os.environ, clean_environment(**env), clear=True),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(store, "_make_database", partial(copy_database, store._make_database)),
        # Hydra closes every handler that there is, and absl's closes what it writes to: pytest's.
        mock.patch.object(logging, "_handlerList", []),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        run()
    assert isinstance(ended.value.code, int)
    return Called(folder, ended.value.code, out.getvalue(), err.getvalue())


@contextmanager
def kept_globals() -> Iterator[None]:
    """Give the block what a new process would find, and put back what it changes of that."""
    root, threshold = logging.getLogger(), gc.get_threshold()
    handlers, level, terminated = root.handlers[:], root.level, signal.getsignal(signal.SIGTERM)
    searched = sys.path[:]
    forget()
    try:
        yield
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        sys.path[:] = searched
        root.handlers[:] = handlers
        root.setLevel(level)
        signal.signal(signal.SIGTERM, terminated)
        gc.set_threshold(*threshold)
        forget()


def forget() -> None:
    """Forget what a process keeps from the first run on, but for imports and data."""
    HydraConfig.instance().cfg = None
    for kept in (console.stderr, locate._find_cifar10, console.log_once, console.warn_once):
        kept.cache_clear()


def clean_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with `changes`, and with no store but one named there.

    Nothing tells the new process of this call of pytest: one that runs pytest itself would take
    the folder above its own for the one that its processes share, and find another call's files.
    """
    dropped = ("MLFLOW_TRACKING_URI", "HYDRA_FULL_ERROR")  # set in this process by MLflow and cli
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in dropped and not key.startswith("PYTEST_")
    }
    return {**inherited, **changes}
