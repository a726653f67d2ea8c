"""A sweep that is killed between any two of its writes: resumed, it ends as one that was not.

SIGKILL cleans up nothing: it leaves what is on disk. So one sweep copies its folder before each of
its writes, and each copy is resumed, in a process of its own. The jobs only record made-up results,
through the same calls as real ones. `python -m fuzz.kills` kills real sweeps at random moments.
"""

import json
import multiprocessing
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sqlalchemy import event
from sqlalchemy.engine import Engine

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core import background, figures
from resnet8ptq.report.logged_limits import limits_of
from resnet8ptq.report.pages import page
from resnet8ptq.report.selection import load_selections
from resnet8ptq.sweeps import resume
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store import sync
from resnet8ptq.tracking.mlflow_store.store import open_store
from resnet8ptq.tracking.run import end_parent, replace_runs, restart_parent, start_parent
from resnet8ptq.tracking.sweep_file import SharedSweep
from tests.helpers import forked
from tests.helpers.calling import EMPTY
from tests.helpers.logged_runs import record_measured
from tests.helpers.stores import new_store, without_waiting_for_the_disk

KEY = "a sweep"
LOSSES = (0, 12)  # images that each job loses
WRITES = "writes.json"


class Queue:
    """Stands for the background process at its slowest: calls wait until somebody needs them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def put(self, function: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.calls.append((done, partial(function, *args, **named)))
        return done

    def drain(self) -> None:
        while self.calls:
            done, call = self.calls.pop(0)
            done.set_result(call())

    def result(self, done: Future[Any]) -> Any:
        self.drain()
        return done.result()


def run_sweep(root: Path, name: str) -> None:
    """Run the jobs of the sweep that are not finished, and write its report."""
    store = open_store(TrackingConfig(root=str(root / "mlruns")))
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    earlier = resume.find_sweep(store, KEY)
    if earlier is None:
        parent_id = start_parent(store, "sweep", folder, {"sweep_key": KEY})
    else:
        sync.sync(store, Path(earlier.folder))
        parent_id = restart_parent(store, earlier, folder)
    sweep = SharedSweep(store, parent_id, folder, resume=True)
    sweep.save()
    for number, lost in enumerate(LOSSES):
        if resume.find_finished(sweep, number, str(number)) is None:
            tags = {"job_number": str(number), "identity": str(number)}
            replaced = partial(replace_runs, store, resume.find_attempts(sweep, number))
            record_measured(store, folder / str(number), parent_id, tags, lost, opened=replaced)
    background.wait()
    sync.sync(store, folder)
    records = history.load_compared(store, parent_id)
    parent = history.load_run(store, parent_id)
    limits = limits_of(records, {})
    page.write_report(store, parent_id, load_selections(store, parent, records, limits), folder)
    end_parent(store, parent_id, "ok", folder)


def run_and_copy(root: Path, copies: Path) -> None:
    """Run a sweep and copy its folder to `copies` before each write; list the writes there.

    A write gives a file its name, or commits a change of the database.
    """
    queue = Queue()
    background.put, background.result = queue.put, queue.result  # type: ignore[assignment]
    background.wait_until_idle = background.wait = queue.drain
    writes: list[str] = []

    def write(name: str) -> None:
        shutil.copytree(root, copies / str(len(writes)))
        writes.append(name)

    def audit(name: str, args: tuple[Any, ...]) -> None:
        if name == "os.rename" and str(root) in str(args[1]):
            write(str(args[1]))

    def execute(connection: Any, _: Any, statement: str, *__: Any) -> None:
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            connection.info["changed"] = True

    def commit(connection: Any) -> None:
        if connection.info.pop("changed", False):
            write("commit")

    sys.addaudithook(audit)
    event.listen(Engine, "before_cursor_execute", execute)
    event.listen(Engine, "commit", commit)
    run_sweep(root, "first")
    (copies / WRITES).write_text(json.dumps(writes))


def resume_and_check(root: Path) -> None:
    run_sweep(root, "second")
    check(root)


def kill_before_each_write(folder: Path) -> None:
    """Run a sweep, and resume its copies; each in a process that is forked from this one.

    This process has run another sweep, so that the others need not compose and compile again.
    """
    without_waiting_for_the_disk().start()
    figures.to_png = lambda _: EMPTY
    new_store(folder / "other" / "mlruns")
    run_sweep(folder / "other", "first")

    root = folder / "root"
    copies = folder / "copies"
    call_alone("fork", new_store, root / "mlruns")
    call_alone("fork", run_and_copy, root, copies)
    writes = json.loads((copies / WRITES).read_text())
    call_alone("fork", check, root)
    names = [Path(name).name for name in writes]
    assert names.index("classes.png") > names.index("predictions.npz")
    for last in points(writes):
        shutil.rmtree(root)
        (copies / str(last)).rename(root)
        call_alone("fork", resume_and_check, root)


def call_alone(method: str, function: Callable[..., object], *args: Any) -> None:
    """Call a function in another process; its traceback is in pytest's captured output."""
    process = multiprocessing.get_context(method).Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0, (function.__name__, *args)


def check(root: Path) -> None:
    """Check that the store has each job once and whole, and that the report judges both."""
    store = open_store(TrackingConfig(root=str(root / "mlruns")))
    parent = history.find_parent(store)
    assert parent is not None
    children = history.load_children(store, parent.run_id)
    assert [child.ended for child in (parent, *children)] == [True] * 3
    assert [(c.job_number, c.status, c.loss) for c in children] == [
        (str(number), "ok", lost / 1000) for number, lost in enumerate(LOSSES)
    ]
    assert len(history.find_runs(store, history.under(parent.run_id))) == len(LOSSES)
    for child in children:
        folder = Path(child.artifact_uri.removeprefix("file://"))
        read_all(folder)
        assert {"predictions.npz", "ranges.json"} <= {path.name for path in folder.iterdir()}
    text = (Path(parent.folder) / "report.md").read_text()
    assert "Verdicts on the 2 quantized models: 2 pass" in text
    assert sync.sync(store, root / "runs").logged == []


def read_all(folder: Path) -> None:
    """Read each visible file; a killed process may leave temporary files, which are hidden."""
    for path in folder.rglob("[!.]*"):
        if path.suffix == ".png":
            Image.open(path).load()
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                assert [arrays[name].size for name in arrays]
        if path.suffix == ".json":
            json.loads(path.read_text())


def points(writes: Sequence[str]) -> list[int]:
    """Return the writes to die before: not all of the second job and of the report are needed."""
    second = next(n for n, name in enumerate(writes) if "/1/record.json" in name)
    closing = max(n for n, name in enumerate(writes) if "/1/" in name)
    own = [*range(second + 1), *range(closing + 1, len(writes))]
    others = re.compile(r"(first|artifacts)/\w+\.(png|svg|html|csv)")
    return [n for n in own if n < second or not others.search(writes[n])]


@pytest.mark.slow
def test_a_sweep_killed_before_any_write_is_resumed(tmp_path):
    """Jobs draw and upload as late as they can: FINISHED is in the folders before the figures."""
    forked.start_server()
    call_alone("forkserver", kill_before_each_write, tmp_path)
