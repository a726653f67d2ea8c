"""How a sweep ends: its report, and its run in MLflow whatever becomes of that."""

import errno
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from resnet8ptq import run, shipping
from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import command, invocation
from resnet8ptq.core.errors import DataError, TrackingError
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.report.pages import page, run_pages
from resnet8ptq.sweeps import closing, ongoing
from resnet8ptq.sweeps.running import RunningSweep
from resnet8ptq.tracking import history, journal
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.run import start_parent, start_run
from resnet8ptq.tracking.sweep_file import SharedSweep
from tests.helpers.calling import NO_REAL_FILES, call
from tests.helpers.configs import make_config


@pytest.fixture
def running(own_store: Store, tmp_path: Path) -> RunningSweep:
    """A sweep with one job, which has ended."""
    folder = tmp_path / "sweep"
    (folder / "0").mkdir(parents=True)
    parent_id = start_parent(own_store, "sweep", folder, {})
    with start_run(own_store, "cell", folder / "0", parent_id) as opened:
        opened.log_config(make_config("data=shapes", "backend=torch", "dtype=uint8"))
        opened.log_result(RunResult("unsupported", "no such kernel"))
    sweep = SharedSweep(own_store, parent_id, folder)
    return RunningSweep(lambda: sweep, None, ReportConfig(), journal.lock(folder))


@pytest.mark.parametrize(
    "typed", [("run", "-m", "dtype=int8,u8s8"), ("ship", "goal=best", "sweep.resume=true")]
)
def test_an_interrupted_sweep_is_continued_by_the_command_that_began_it(running, capsys, typed):
    replace(running, words=typed).close("killed")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "continue:" in line]
    settings = [word for word in typed if word != "sweep.resume=true"]
    assert line.endswith(invocation.command(*settings, "sweep.resume=true"))


def test_ship_is_continued_as_ship(monkeypatch):
    begun: list[ongoing.Ongoing | None] = []
    monkeypatch.setattr(run, "_call_hydra", lambda typed: begun.append(ongoing.find_ongoing()))
    shipping.main(["goal=best", "data=shapes"])
    assert [one.words for one in begun if one] == [("ship", "goal=best", "data=shapes")]


def test_an_interrupt_before_the_store_opens_is_returned(tmp_path, monkeypatch, capsys):
    def refuse() -> SharedSweep:
        raise TrackingError("tracking.root: cannot be written")

    def interrupt(typed: list[str]) -> None:
        begun = ongoing.find_ongoing()
        assert begun is not None
        begun.sweep = RunningSweep(refuse, None, ReportConfig(), journal.lock(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_call_hydra", interrupt)
    outcome = run.execute(["-m"])
    assert isinstance(outcome.ending.error, KeyboardInterrupt)
    assert outcome.sweep_folder is None
    assert capsys.readouterr().err.count("tracking.root: cannot be written") == 1


FAULTS = [ValueError("two\nlines"), KeyError("x"), OSError(errno.ENOSPC, "No space left on device")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_report_that_fails_is_one_line_and_closes_the_sweep(running, monkeypatch, capsys, fault):
    def fail(*args: object) -> None:
        raise fault

    monkeypatch.setattr(page, "write_report", fail)
    assert command.finish(lambda: None, lambda: running).code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: the report could not be made ({type(fault).__name__}: ")
    assert f"try `{report_command(running)}`" in line
    parent = running.shared.store.client.get_run(running.shared.parent_id)
    assert (parent.info.status, parent.data.tags["status"]) == ("FINISHED", "ok")


def test_a_failed_report_does_not_hide_a_failed_job(running, monkeypatch, capsys):
    sweep = running.shared
    (child,) = history.load_children(sweep.store, sweep.parent_id)
    sweep.store.client.set_tag(child.run_id, "status", "failed")
    monkeypatch.setattr(page, "write_report", lambda: None)  # takes no arguments
    assert command.finish(lambda: None, lambda: running).code == 1
    assert "TypeError" in capsys.readouterr().err
    parent = sweep.store.client.get_run(sweep.parent_id)
    assert (parent.info.status, parent.data.tags["status"]) == ("FAILED", "failed")


def report_command(running: RunningSweep) -> str:
    root = Path(running.shared.store.uri.removeprefix("sqlite:///")).parent
    return f"python -m resnet8ptq report run_id={running.shared.parent_id} root={root}"


@pytest.mark.parametrize("second", [True, False])
def test_an_interrupt_while_the_sweep_is_closed_is_one_line(running, monkeypatch, capsys, second):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "write_report", interrupt)
    assert command.finish(interrupt if second else lambda: None, lambda: running).code == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"interrupted: the report was not written; try `{report_command(running)}`"
    parent = running.shared.store.client.get_run(running.shared.parent_id)
    assert parent.info.status == ("KILLED" if second else "FINISHED")


@pytest.mark.parametrize(("goal", "code"), [(None, 1), ("fastest", 2)])
def test_wrong_input_is_exit_code_2_unless_other_jobs_have_run(running, monkeypatch, goal, code):
    def fail() -> None:
        raise DataError("no such file")

    monkeypatch.setattr(page, "write_report", lambda *args: None)
    assert command.finish(fail, lambda: replace(running, goal=goal)).code == code


@pytest.mark.slow
def test_a_sweep_over_splits_compares_each_apart(tmp_path):
    splits = "evaluate.split=test,held_out"
    quick = ("data=shapes", "calib.samples_per_class=5", "latency.enabled=false", "threads=1")
    quick = (*quick, "held_out_images=500")
    result = call(tmp_path, "-m", splits, *quick, **NO_REAL_FILES)
    assert result.code == 0, result.err
    assert result.parent.info.status == "FINISHED"
    assert "scored on 2 different sets of samples" in result.out
    (report,) = tmp_path.glob("runs/sweeps/*/*/report.md")
    sections = report.read_text().split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "shapes, resnet8, 5,000 test samples",
        "shapes, resnet8, 500 held-out training samples",
    ]
    for number, section in enumerate(sections, 1):
        assert "1 combinations requested: 1 measured" in section
        figures = re.findall(r"\((.*\.png)\)", section)
        assert figures
        assert all(name.startswith(f"set{number}_") for name in figures)
        assert all(report.with_name(name).exists() for name in figures)


def test_the_time_left_is_that_of_the_jobs_before(running):
    begun = replace(running, jobs=4, begun_s=time.monotonic() - 20)
    assert begun.seconds_left(0) is None  # nothing has been measured
    assert begun.seconds_left(2) == pytest.approx(20, rel=0.1)
    assert replace(begun, jobs=None).seconds_left(2) is None


def test_a_search_that_is_late_still_logs_its_verdicts(running, monkeypatch, capsys):
    """The report is not drawn, and the pages in MLflow have the answer."""
    logged = []
    monkeypatch.setattr(closing, "_is_late", lambda _: True)
    monkeypatch.setattr(run_pages, "log_answers", lambda *given: logged.append(given[1]))
    assert command.finish(lambda: None, lambda: running).code == 0
    assert report_command(running) in capsys.readouterr().out
    assert logged == [running.shared.parent_id]
