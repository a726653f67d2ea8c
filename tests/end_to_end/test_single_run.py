"""A single run is no dead end: what it prints, and the commands without arguments after it."""

import json

import pytest

from resnet8ptq.results import load_run, load_sweep
from tests.helpers.calling import NO_REAL_FILES, QUICK, Called, call, call_beside


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Called:
    folder = tmp_path_factory.mktemp("single")
    words = (*QUICK, "dtype=u8s8", "threads=1")
    done = call(folder, *words, installed=True, **NO_REAL_FILES)
    assert done.code == 0, done.err
    return done


@pytest.fixture
def run_id(single: Called) -> str:
    (run,) = single.runs
    return str(run.info.run_id)


def test_it_prints_its_id_and_its_deploy_command(single, run_id):
    lines = single.out.splitlines()
    assert f"Run:    {run_id}" in lines
    assert f"Deploy: resnet8ptq deploy run_id={run_id}" in lines


def test_a_run_that_fails_has_no_deploy_command(tmp_path):
    """Its last line named the command that deploys it."""
    words = (*QUICK, "dtype=u8s8", "threads=1", "report.min_accuracy=0.999")
    done = call(tmp_path, *words, **NO_REAL_FILES)
    assert "Verdict: Fails: " in done.out
    assert "Deploy:" not in done.out


def test_the_newest_run_is_judged_and_reported_by_default(single, run_id):
    judged = call_beside(single.folder, "verdict")
    assert json.loads(judged.out)["choice"]["run_id"] == run_id
    assert f"the newest run: {run_id}" in judged.err
    reported = call_beside(single.folder, "report")
    assert reported.code == 0, reported.err
    assert f"the newest run: {run_id}" in reported.err
    assert "report.html" in reported.out


@pytest.mark.slow
def test_the_newest_run_is_deployed_by_default(single, run_id):
    done = call_beside(single.folder, "deploy", "verify=false", "folder=out")
    assert done.code == 0, done.err
    assert f"the newest run {run_id}" in done.err
    assert run_id in (single.folder / "out" / "README.md").read_text()


def test_uses_are_of_sweeps(single):
    done = call_beside(single.folder, "deploy", "use=smallest")
    assert (done.code, len(done.errors)) == (2, 1)
    assert "use: got 'smallest'" in done.errors[0]


def test_python_reads_it(single, run_id, monkeypatch):
    monkeypatch.chdir(single.folder)
    assert load_run().run_id == run_id
    with pytest.raises(Exception, match=run_id):  # and names load_run()
        load_sweep()


@pytest.mark.parametrize("command", ["deploy", "verdict", "report"])
def test_without_a_run_the_command_for_one_is_named(tmp_path, command):
    done = call_beside(tmp_path, command)
    assert (done.code, len(done.errors)) == (2, 1)
    assert "resnet8ptq run model.path=FILE data.root=PATH" in done.errors[0]


def test_after_a_sweep_it_is_the_newest(sweep):
    judged = call_beside(sweep.folder, "verdict")
    assert f"the newest sweep: {sweep.parent.info.run_id}" in judged.err
