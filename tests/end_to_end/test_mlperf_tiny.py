"""MLPerf Tiny's tasks: where their files are found, and the table of a sweep over them."""

from dataclasses import replace

import pytest

from resnet8ptq.core.errors import ConfigError, UnsupportedError
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.experiment.mlperf_tiny import Paths
from resnet8ptq.experiment.settings import check_names
from resnet8ptq.report.mlperf_tiny import COLUMNS, rows
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.calling import REPO, call
from tests.helpers.configs import make_config

TASKS = sorted(path.stem for path in REPO.glob("conf/benchmark/*.yaml"))


@pytest.fixture
def no_downloads(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("no network in tests")

    monkeypatch.setattr(mlperf_tiny.pooch, "retrieve", refuse)
    monkeypatch.delenv("MLPERF_TINY", raising=False)


@pytest.fixture
def folder(tmp_path):
    """Files of the names that the suite's have, and of other contents."""
    for task in mlperf_tiny.SUITE.values():
        for file in filter(None, (task.network, task.data, task.official)):
            path = tmp_path / file.path.replace("*", "samples")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"other")
    return tmp_path


@pytest.mark.parametrize("name", TASKS)
def test_files_are_found_in_the_folder(name, folder, no_downloads, caplog):
    asked = make_config(f"benchmark={name}", f"benchmark.folder={folder}").benchmark
    files = mlperf_tiny.find_files(asked, Paths(), quantizes=False)
    task = mlperf_tiny.SUITE[name]
    assert files.quantized == str(folder / task.official.path)
    if task.network is not None:
        assert files.network == str(folder / task.network.path)
    if task.data is not None:
        assert files.data == str(folder / task.data.path.replace("*", "samples"))
    fixed = [file for file in (task.network, task.official) if file is not None and file.sha256]
    assert caplog.text.count("is not the suite's own file") == len(fixed)


@pytest.mark.parametrize("name", TASKS)
def test_what_is_missing_is_unsupported_and_says_where_it_is(name, no_downloads):
    asked = make_config(f"benchmark={name}").benchmark
    with pytest.raises(
        UnsupportedError, match=rf"^benchmark={name}: .* is not in benchmark.folder"
    ):
        mlperf_tiny.find_files(asked, Paths(), quantizes=False)


def test_what_is_set_is_kept(folder, no_downloads):
    named = Paths("mine.npz", "mine.h5")
    assert mlperf_tiny.find_files(make_config("benchmark=vww").benchmark, named) == named


def test_another_task_is_refused():
    asked = make_config()
    other = replace(asked, benchmark=replace(asked.benchmark, name="ner"))
    with pytest.raises(
        ConfigError, match=r"^benchmark\.name: got 'ner', expected ic \| ic02 \| kws"
    ):
        check_names(other)


def test_a_sweep_names_what_it_lacks(tmp_path):
    """Its row stays in the table, and the sweep has not failed."""
    done = call(
        tmp_path, "-m", "benchmark=kws", "backend=onnx,torch", f"benchmark.folder={tmp_path}"
    )
    assert done.code == 0, done.err
    assert "kws/*.npz is not in benchmark.folder=" in done.out
    cells = [line.split("│")[1:-1] for line in done.out.splitlines() if "│ kws DS-CNN" in line]
    assert [cell[-1].strip() for cell in cells] == ["unsupported"] * 2
    names = {run.info.run_name for run in done.children}
    assert names == {f"kws-{backend}-int8-minmax-per_tensor" for backend in ("onnx", "torch")}


@pytest.mark.parametrize("analysis", ["sensitivity", "diagnose", "profile", "inspect"])
def test_an_analysis_takes_the_files_of_the_task(analysis, tmp_path):
    done = call(tmp_path, f"+analysis={analysis}", "benchmark=kws", f"benchmark.folder={tmp_path}")
    said = " ".join((done.out + done.err).split())  # the log wraps
    assert "kws/*.npz is not in benchmark.folder=" in said


def test_the_table_says_which_targets_are_met():
    params = {"model": "kws", "backend": "onnx", "dtype": "int8", "benchmark.target": "0.9"}
    metrics = {
        "counts/total": 1000.0,
        "baseline/accuracy": 0.913,
        "ci95/value_low": 0.88,
        "ci95/value_high": 0.92,
    }
    metrics |= {"size_bytes": 53936.0}
    result = rows(
        [
            RunRecord.of("1", params, metrics | {"accuracy": 0.902}, {"status": "ok"}),
            RunRecord.of("2", params, metrics | {"accuracy": 0.899}, {"status": "ok"}),
            RunRecord.of("3", params, {}, {"status": "unsupported"}),
            RunRecord.of("4", {**params, "benchmark.target": "null"}, {}, {"status": "failed"}),
        ]
    )
    start = ["kws", "onnx", "int8"]
    middle = ["1,000", "accuracy", "91.30%"]
    end = ["88.00% to 92.00%", "90.00%"]
    assert result == [
        [*start, *middle, "90.20%", *end, "yes", "53.9", "ok"],
        [*start, *middle, "89.90%", *end, "no", "53.9", "ok"],
        [*start, "", "", "", "", "", "0.9", "", "", "unsupported"],
        [*start, *[""] * 8, "failed"],
    ]


@pytest.mark.parametrize("target", [{}, {"benchmark.target": "null"}])
def test_a_run_without_a_target_neither_meets_nor_misses_one(target):
    params = {"model": "kws", "backend": "onnx", "dtype": "int8", **target}
    metrics = {"counts/total": 1000.0, "baseline/accuracy": 0.913, "accuracy": 0.902}
    metrics |= {"size_bytes": 53936.0}
    [row] = rows([RunRecord.of("1", params, metrics, {"status": "ok"})])
    cells = dict(zip(COLUMNS, row, strict=True))
    assert (cells["target"], cells["met"]) == ("", "")
