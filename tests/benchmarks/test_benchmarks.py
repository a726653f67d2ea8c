"""The benchmark: its bare loop does our job, and its page is made from its measurements."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bare, commands, equality, process, results, setting, sweeps
from benchmarks.__main__ import main
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.data.sources import cifar10
from tests.helpers.calling import REPO
from tests.helpers.cifar_files import pickle_published
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of

TESTED = 500  # images


@pytest.fixture(scope="module")
def batches(shapes: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded set in CIFAR-10's files."""
    folder = tmp_path_factory.mktemp("batches")
    train = np.array_split(np.arange(len(shapes.train)), 5)
    parts = {f"data_batch_{n}": shapes.train.take(part) for n, part in enumerate(train, 1)}
    parts["test_batch"] = shapes.test.take(np.arange(TESTED))
    for name, split in parts.items():
        planes = split.stored[:].transpose(0, 3, 1, 2).reshape(len(split), -1)
        batch = {"data": np.ascontiguousarray(planes), "labels": split.labels.tolist()}
        (folder / name).write_bytes(pickle_published(batch))
    return folder


def test_bare_loop_reads_and_draws_the_same_images(batches, shapes):
    names = list(cifar10.BATCHES["train"])
    images, labels = bare.read_images(batches, names)
    expected_images, expected_labels = cifar10.read_split(batches, "train")
    np.testing.assert_array_equal(images, expected_images)
    np.testing.assert_array_equal(labels, expected_labels)
    drawn = draw_calibration(shapes, 100, 42)
    np.testing.assert_array_equal(bare.draw_calibration(images, labels), drawn.split.stored)


def test_bare_loop_refuses_a_pickle_that_runs_code(tmp_path):
    (tmp_path / "test_batch").write_bytes(b"cposix\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(Exception, match=r"it asks for posix\.system"):
        bare.read_images(tmp_path, ["test_batch"])


# Of a CPU without VNNI, where another engine is the default.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Default qconfig of oneDNN backend")
def test_bare_loop_does_the_same_job(batches, shapes, shapes_model, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bare", shapes_model.onnx_path, "--grid", "4"],
        cwd=REPO,
        env={**os.environ, "CIFAR10_DIR": str(batches)},
        capture_output=True,
        text=True,
        check=True,
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    fp32 = [run["accuracy"] for run in runs if run["dtype"] == "fp32"]
    assert fp32[0] == fp32[1]
    calibration = draw_calibration(shapes, 100, 42).split
    tested = shapes.test.take(np.arange(TESTED))
    for run in runs[2:]:
        options = ["backend.engine=onednn", "reduce_range=false"]  # as on a CPU with VNNI
        config = make_config(
            "data=shapes",
            f"backend={run['backend']}",
            f"dtype={run['dtype']}",
            *(options if run["backend"] == "torch" else []),
        )
        folder = tmp_path / f"{run['backend']}-{run['dtype']}"
        folder.mkdir()
        quantizer = quantizer_of(config)
        predictor = quantizer.load(
            quantize_network(quantizer, shapes_model, calibration, folder).path, THREADS
        )
        scores = np.concatenate([predictor.predict(batch)[0] for batch in tested.batches(256)])
        assert run["accuracy"] == (scores.argmax(axis=1) == tested.labels).mean()
        assert run["quantize_s"] > 0 and run["evaluate_s"] > 0


def test_process_measures_and_reports_a_failure(tmp_path):
    program = "import sys; held = bytearray(300_000_000); print('out'); sys.exit({})"
    done = process.run([sys.executable, "-c", program.format(0)], tmp_path, os.environ)
    assert done.out == "out\n"
    assert done.usage.max_rss_bytes > 300_000_000 and done.usage.wall_s > 0
    with pytest.raises(RuntimeError, match="exit code 3"):
        process.run([sys.executable, "-c", program.format(3)], tmp_path, os.environ)


def test_setting_reads_the_runs_of_a_sweep(sweep):
    folders = sorted(setting.find_runs(sweep.folder), key=setting.job_number)
    runs = [setting.read_run(folder) for folder in folders]
    assert [(run["backend"], run["dtype"]) for run in runs] == [
        ("onnx", "int8"),
        ("onnx", "uint8"),
        ("torch", "int8"),
    ]
    assert all(run["evaluate_s"] > 0 and run["quantize_s"] > 0 for run in runs)


def test_equal_is_to_the_last_bit(tmp_path):
    probabilities = np.full((2, 10), 0.1, dtype=np.float32)
    nudged = probabilities.copy()
    nudged[1, 3] = np.nextafter(nudged[1, 3], np.float32(1))
    for name, array in (("a", probabilities), ("b", probabilities.copy()), ("c", nudged)):
        (tmp_path / name).mkdir()
        np.savez_compressed(tmp_path / name / "predictions.npz", probabilities=array)
    assert equality.same_predictions(tmp_path / "a", tmp_path / "b")
    assert not equality.same_predictions(tmp_path / "a", tmp_path / "c")


def recorded() -> dict[str, Any]:
    """Measurements of every section, of two rounds."""
    cells = [
        {"backend": b, "dtype": d, "calib": c, "per_channel": p}
        for b, d in (("onnx", "int8"), ("onnx", "uint8"), ("torch", "int8"))
        for c in ("minmax", "entropy", "percentile")
        for p in (False, True)
    ]
    figures = {"accuracy": 0.87, "quantize_s": 0.5, "evaluate_s": 0.5, "peak_memory_bytes": 5e8}

    def sample(wall_s: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"wall_s": wall_s, "user_s": 1.0, "sys_s": 0.5, "max_rss_bytes": 600_000_000}
        return {"usage": usage, "runs": [{**run, **figures} for run in runs]}

    walls = {"bare_shared": 50.0, "warm_no_latency": 25.0}
    grid = {
        name: [sample(walls.get(name, 30.0) + n, cells) for n in range(2)]
        for name in sweeps.SWEEP24
    }
    usage = sample(0.5, [])["usage"]
    called = {name: [usage] * 2 for name in (*commands.COMMANDS, *commands.IMPORTS)}
    four = [cell for cell in cells if cell["calib"] == "minmax" and not cell["per_channel"]]
    result: dict[str, Any] = {
        "sweep4": {"samples": {name: [sample(8.0, four)] * 2 for name in sweeps.SWEEP4}},
        "sweep24": {"samples": grid},
        "commands": {"usages": called},
        "equality": {"runs": [{**cell, "equal": True} for cell in cells]},
    }
    measured = {
        **{"date": "2026-01-02 03:04", "commit": "0123456789abcdef-dirty", "rounds": 2},
        **{"cpu": "A CPU", "cores": 2, "memory_bytes": 8_000_000_000, "platform": "Linux x86_64"},
        **{"load_average": 0.1, "versions": {"version.onnxruntime": "1.0"}},
    }
    return {name: {**section, "measured": {**measured}} for name, section in result.items()}


@pytest.mark.slow
def test_page_is_made_from_the_measurements(tmp_path):
    results.write(recorded(), tmp_path)
    page = (tmp_path / results.MARKDOWN_FILE).read_text()
    assert page == results.render(results.load(tmp_path))
    assert "A CPU, 2 cores, 8 GB" in page and "commit 0123456789ab-dirty" in page
    assert "Predictions of 18 of 18 configurations" in page


def test_page_begins_with_one_table_of_every_promise(tmp_path):
    summary = results.render(recorded()).split("\n\n")[3]
    rows = [line.strip("| ").split(" | ") for line in summary.splitlines()[2:]]
    names = [row[0] for row in rows]
    assert {"sweep of 4, warm cache", "verdict", "run.py --help"} <= set(names)
    grid = rows[names.index("grid of 24, warm cache")]
    ours, beside, theirs, ratio, *measured = grid[1:]
    assert (ours, beside) == ("25.50 (25.00 to 26.00)", "fastest bare loop")
    assert (theirs, ratio) == ("50.50 (50.00 to 51.00)", "0.50 (0.50 to 0.51)")
    assert measured == ["2 rounds", "2026-01-02", "A CPU, 2 cores"]


def test_page_says_what_differs(tmp_path):
    result = copy.deepcopy(recorded())
    result["equality"]["runs"][0]["equal"] = False
    result["sweep4"]["measured"]["commit"] = "fedcba9876543210"
    page = results.render(result)
    assert "Predictions of 17 of 18" in page and "| onnx | int8 | minmax | False |" in page
    assert "sweep4: A CPU" in page and "fedcba987654" in page


def test_nothing_is_rendered_without_measurements(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results.load, "__defaults__", (tmp_path,))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--render"])
    assert main() == 2
    assert "results.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
