"""`run.py` from the outside: what a person types, sees, and finds on disk and in MLflow."""

import csv
import re
import shlex
import signal
from pathlib import Path

import numpy as np
import onnx
import pytest
from hydra.errors import HydraException
from mlflow.entities import Run

from resnet8ptq.config.loading import parse_config
from resnet8ptq.core import command
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data import locate
from resnet8ptq.data.shapes import drawing
from resnet8ptq.report.timing import KEYS
from tests.helpers.calling import NO_REAL_FILES, QUICK, REPO, RUN, Called, call
from tests.helpers.configs import compose_whole
from tests.helpers.forked import Process, interrupt
from tests.helpers.onnx_networks import build

pytestmark = pytest.mark.slow

REASON = (
    "dtype=uint8: FBGEMM's and oneDNN's quantized convolutions require qint8 weights; "
    "backend.flow=pt2e (backend=torch_pt2e) simulates uint8 in float"
)

# A wrong value by itself would be refused before the first job; this one is beside another.
REFUSED = "calib.num_bins: got 2047, expected an even number > 2 * calib.num_quantized_bins = 256"

METRICS = {
    *("accuracy", "ci95/value_low", "ci95/value_high", "drop", "counts/total"),
    *("counts/tied", "expected_accuracy"),
    "baseline/accuracy",
    *("paired/right_to_wrong", "paired/wrong_to_right"),
    *("paired/p_value", "agreement", "size_bytes", "baseline/size_bytes"),
    *("counts/quantized_layers", "system/quantize_s", "system/evaluate_s"),
    *("system/evaluate_batch_size", "system/evaluate_threads"),
    *("sqnr_db", "kl_divergence", "speedup", "latency_p50_ms", "baseline/latency_p50_ms"),
    *(f"class/{name}/accuracy" for name in drawing.CLASS_NAMES),
    *(f"class/{name}/drop" for name in drawing.CLASS_NAMES),
}
# Those that lead MLflow's table: the others are in groups.
LEADING = {
    *("accuracy_percent", "loss_points", "sqnr_db", "size_kb", "accuracy", "size_bytes"),
    *("latency_ms", "latency_batch_ms", "speedup", "speedup_batch"),
}
ARTIFACTS = {
    *("config.yaml", "result.json", "per_class.csv", "confusion.png", "confusion.csv"),
    *("classes.png", "predictions.npz", "calibration.csv", "ranges.json", "run.log"),
    *("example.npz", "wrong_examples.json"),
}


def cell_of(run: Run) -> tuple[str, str]:
    return run.data.params["backend"], run.data.params["dtype"]


def test_sweep_prints_every_cell_and_the_reason(sweep):
    assert sweep.code == 0, sweep.err
    result = {(r["framework"], r["dtype"]): r["status"] for r in sweep.table}
    assert result == {
        ("onnx", "fp32"): "baseline",
        ("torch", "fp32"): "baseline",
        ("onnx", "int8"): "ok",
        ("onnx", "uint8"): "ok",
        ("torch", "int8"): "ok",
        ("torch", "uint8"): "unsupported",
    }
    assert f"unsupported: {REASON} (torch uint8" in sweep.out
    assert "shapes, resnet8, 500 held-out training samples" in sweep.out
    assert "Traceback" not in sweep.err
    assert "Warning" not in sweep.err


def test_readme_shows_columns_of_the_table(sweep):
    (row,) = re.findall(r"^\| model \|.*", (REPO / "README.md").read_text(), re.M)
    model, *shown = [name.strip() for name in row.strip("|").split("|")]
    printed = [name for name in sweep.table[0] if name in shown]
    assert model == "model" and len(shown) == 5 and shown == printed


def test_sweep_is_one_parent_with_a_child_for_each_cell(sweep):
    assert len(sweep.runs) == 5
    assert (sweep.parent.info.status, sweep.parent.data.tags["status"]) == ("FINISHED", "ok")
    assert sweep.parent.data.tags["overrides"].startswith("backend=onnx,torch")
    assert {cell_of(run): run.data.tags["status"] for run in sweep.children} == {
        ("onnx", "int8"): "ok",
        ("onnx", "uint8"): "ok",
        ("torch", "int8"): "ok",
        ("torch", "uint8"): "unsupported",
    }
    assert {run.info.status for run in sweep.children} == {"FINISHED"}


def test_children_carry_params_metrics_and_artifacts(sweep):
    for run in sweep.children:
        params, tags = run.data.params, run.data.tags
        assert params["data"] == "shapes" and "data.name" not in params  # said once
        assert (params["calib"], params["per_channel"]) == ("minmax", "false")
        if tags["status"] == "unsupported":
            assert tags["reason"] == REASON
            assert tags["verdict"] == "unsupported"
            assert run.data.metrics == {}
            continue
        assert {"weight_dtype", "activation_dtype"} <= set(params)
        assert set(sweep.result(run)["metrics"]) >= METRICS
        assert {name for name in run.data.metrics if "/" not in name} == LEADING
        assert tags["verdict"] in ("pass", "fail") or tags["verdict"].startswith("undecided")
        assert f"run_id={run.info.run_id}" in tags["mlflow.note.content"]
        model = "model.onnx" if params["backend"] == "onnx" else "model.pt"
        assert set(sweep.artifacts(run)) >= {*ARTIFACTS, model}


def test_table_result_file_and_mlflow_agree(sweep):
    for run in sweep.children:
        if run.data.tags["status"] != "ok":
            continue
        files, shown = sweep.artifacts(run), run.data.metrics
        metrics = sweep.result(run)["metrics"]
        assert shown["accuracy_percent"] == round(100 * metrics["accuracy"], 2)
        assert shown["loss_points"] == round(100 * metrics["drop"], 2)
        assert shown["size_kb"] == round(metrics["size_bytes"] / 1000, 1)
        (row,) = [r for r in sweep.table if (r["framework"], r["dtype"]) == cell_of(run)]
        assert row["accuracy"] == f"{metrics['accuracy']:.2%}"
        assert row["delta"] == f"{100 * (metrics['accuracy'] - metrics['baseline/accuracy']):+.2f}"
        assert row["size kB"] == f"{metrics['size_bytes'] / 1000:.1f}"
        assert (
            row["reduction"] == f"{1 - metrics['size_bytes'] / metrics['baseline/size_bytes']:.1%}"
        )
        # Those of the turns, in MLflow as in the table.
        assert row["speedup"] == f"{shown['speedup']:.2f}"
        assert float(row["ms"]) == shown["latency_ms"]
        model = files["model.onnx" if row["framework"] == "onnx" else "model.pt"]
        assert model.stat().st_size == metrics["size_bytes"]

        with np.load(files["predictions.npz"], allow_pickle=False) as arrays:
            hits = arrays["predictions"] == arrays["labels"]
            baseline_hits = arrays["baseline_predictions"] == arrays["labels"]
        assert (hits.mean(), len(hits)) == (metrics["accuracy"], metrics["counts/total"])
        assert baseline_hits.mean() == metrics["baseline/accuracy"]
        with files["confusion.csv"].open(newline="") as file:
            counts = np.array([row[1:] for row in list(csv.reader(file))[1:]], dtype=int)
        assert counts.trace() / counts.sum() == metrics["accuracy"]
        assert counts.sum() == metrics["counts/total"]


def test_run_folder_holds_what_was_uploaded(sweep):
    for run in sweep.children:
        folder = Path(run.data.tags["folder"])
        uploaded = {n: p.read_bytes() for n, p in sweep.artifacts(run).items() if p.is_file()}
        left = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        assert left.keys() == uploaded.keys() | {".lock", "record.json"}
        same = uploaded.keys() - {"run.log"}  # the log goes on after the upload
        assert all(left[name] == uploaded[name] for name in same)
        log = uploaded["run.log"].decode()
        assert f"{run.info.run_name}: started" in log
        if run.data.tags["status"] == "ok":
            metrics = sweep.result(run)["metrics"]
            correct = metrics["accuracy"] * metrics["counts/total"]
            outcome = f"{correct:.0f} of {metrics['counts/total']:.0f} correct"
        else:
            outcome = "unsupported"
        assert f"{run.info.run_name}: {outcome}" in log


def test_uploaded_model_is_a_quantized_one(sweep):
    (run,) = [run for run in sweep.children if cell_of(run) == ("onnx", "uint8")]
    graph = onnx.load(sweep.artifacts(run)["model.onnx"]).graph
    assert any(node.op_type == "QuantizeLinear" for node in graph.node)


def test_sweep_leaves_its_report(sweep):
    (path,) = (sweep.folder / "runs" / "sweeps").rglob("runs.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run_id"] for row in rows] == [run.info.run_id for run in sweep.children]
    for row, run in zip(rows, sweep.children, strict=True):
        if run.data.tags["status"] == "ok":
            for key, value in sweep.result(run)["metrics"].items():
                assert key in KEYS or float(row[key]) == value
    report = {name: file.read_bytes() for name, file in sweep.artifacts(sweep.parent).items()}
    figures = {"trade_offs.svg", "classes.png", "confusion.png"}
    assert set(report) >= {"runs.csv", "report.md", "report.html", *figures}
    assert report == {name: (path.parent / name).read_bytes() for name in report}


def test_failing_cell_is_on_record_and_does_not_stop_the_sweep(failing_sweep):
    good, bad = failing_sweep.children
    assert (good.info.status, good.data.tags["status"]) == ("FINISHED", "ok")
    assert good.data.metrics["accuracy_percent"] > 85
    assert bad.data.tags["verdict"] == "failed"
    assert (bad.info.status, bad.data.tags["status"]) == ("FAILED", "failed")
    assert bad.data.params["calib.num_bins"] == "2047"
    assert bad.data.tags["reason"] == REFUSED
    assert "ConfigError" in failing_sweep.artifacts(bad)["traceback.txt"].read_text()
    parent = failing_sweep.parent
    assert (parent.info.status, parent.data.tags["status"]) == ("FAILED", "failed")
    assert (failing_sweep.code, len(failing_sweep.errors)) == (1, 1)
    pairs = [(row["calib.num_bins"], row["status"]) for row in failing_sweep.table]
    assert pairs == [("", "baseline"), ("2048", "ok"), ("2047", "failed")]
    assert f"failed: {REFUSED} (" in " ".join(failing_sweep.out.split())


@pytest.mark.parametrize(
    ("override", "named", "recorded"),
    [
        ("backend=onxx,onnx", "onxx", []),  # it does not get as far as a run
        ("seed=1,${nokey}", "nokey", []),
        ("seed=1,abc", "abc", ["FAILED"]),
    ],
)
def test_sweep_that_cannot_be_composed_has_failed(tmp_path, override, named, recorded):
    result = call(tmp_path, "-m", *QUICK, override, **NO_REAL_FILES)
    assert len(result.errors) == 1
    assert named in result.errors[0]
    assert "Traceback" not in result.err
    assert result.code == 2
    assert "Browse:" not in result.out  # there is nothing to see
    runs = result.runs if (tmp_path / "mlruns").exists() else []
    assert [run.info.status for run in runs] == recorded
    assert {run.data.tags["status"] for run in runs} <= {"failed"}


PASSWORD = "http://user:hunter2@127.0.0.1:9"
ERRORS: list[tuple[list[str], dict[str, str], int, str]] = [
    (["backend=onxx"], {}, 2, "onxx"),
    ([f"tracking.uri={PASSWORD}"], {}, 2, "tracking.uri: holds a password"),
    (["model.path=/nonexistent.h5"], {}, 2, "model.path: got /nonexistent.h5"),
    ([], {"MLFLOW_TRACKING_URI": PASSWORD}, 1, "http://127.0.0.1:9 "),
]


@pytest.mark.parametrize(
    ("args", "env", "code", "named"), ERRORS, ids=["composing", "config", "model", "server"]
)
def test_error_is_one_line_and_harms_no_earlier_run(sweep, args, env, code, named):
    before = {run.info.run_id: run.to_dictionary() for run in [sweep.parent, *sweep.children]}
    result = call(sweep.folder, *QUICK, *args, **env)
    assert_one_error(result, code, named)
    after = {run.info.run_id: run.to_dictionary() for run in sweep.runs}
    assert {key: after[key] for key in before} == before


def assert_one_error(result: Called, code: int, named: str) -> None:
    assert result.code == code
    assert len(result.errors) == 1
    assert named in result.errors[0]
    assert result.err.splitlines()[-1] == result.errors[0]
    for unwanted in ("Traceback", "hunter2", "HYDRA_FULL_ERROR", "Error executing job"):
        assert unwanted not in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("calib.percentile=abc", "error: calib.percentile: got 'abc', expected a number\n"),
        ("per_channel=yess", "error: per_channel: got 'yess', expected true | false\n"),
        ("seed=1.5", "error: seed: got '1.5', expected an integer\n"),
        ("calib.percentile=120", "calib.percentile: got 120"),
        ("nosuchkey=1", "error: nosuchkey: no such key; expected one of "),
        ("nosuchkey=1", " that --help lists\n"),
        ("per_chanel=true", "error: per_chanel: no such key; expected one of "),
        ("per_chanel=true", " that --help lists (nearest: per_channel)\n"),
        ("modle.path=a", "error: modle: no such key; expected one of "),
        (
            "data.rot=a",
            "error: data.rot: no such key; expected name | root | on_missing (nearest: root)",
        ),
        (
            "+data.rot=a",
            "error: data.rot: no such key; expected name | root | on_missing (nearest: root)",
        ),
        (
            "backend.integer_io=true",
            "error: backend.integer_io: no such key with backend=onnx; expected name | ",
        ),
        ("data.root=/nonexistent", "data.root: got /nonexistent"),
    ],
)
def test_wrong_setting_is_one_line(override, named, capsys):
    with pytest.raises((HydraException, ConfigError)) as caught:
        config = parse_config(compose_whole(override, return_hydra_config=False))
        locate.find_data(config.data)
    assert command.print_error(caught.value) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert named in err
    assert "append" not in err


@pytest.mark.parametrize(("name", "mode"), [("runs", []), ("mlruns", ["-m"])], ids=str)
def test_file_in_the_way_of_the_outputs(tmp_path, name, mode):
    (tmp_path / name).write_text("mine")
    assert_one_error(call(tmp_path, *mode, *QUICK), 1, str(tmp_path / name))
    assert (tmp_path / name).read_text() == "mine"


def test_help_lists_the_groups(tmp_path):
    result = call(tmp_path, "--help", "all")
    assert result.code == 0
    for group, option in (("backend", "file"), ("dtype", "u8s8"), ("data", "huggingface")):
        assert f"\n  {group}={option} " in result.out
    assert "\n  backend=onnx (default) " in result.out
    assert "schema" not in result.out
    assert f"choose it: python {RUN} data=arrays --help" in result.out
    examples = [line for line in result.out.splitlines() if f"python {RUN}" in line]
    commands = [line.split("   ")[0] for line in map(str.strip, examples)]
    assert len(set(commands)) == len(commands) > 5
    assert list(tmp_path.iterdir()) == []


def test_missing_data_falls_back_loudly(tmp_path):
    nowhere = {  # neither a copy in the cache nor a way to the server
        **{"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        **{"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"},
        **{"no_proxy": "", "NO_PROXY": ""},
    }
    quick = [word for word in QUICK if word != "data=shapes"]
    result = call(tmp_path, "dtype=uint8", *quick, **NO_REAL_FILES, **nowhere)
    assert result.code == 0, result.err
    warning = " ".join(result.err.split())
    assert warning.count("CIFAR-10 NOT FOUND") == 1
    assert "`shapes`" in warning
    assert "set CIFAR10_DIR or data.root" in warning
    assert "shapes, resnet8, 500 held-out training samples" in result.out
    (run,) = result.runs
    assert run.data.params["data"] == "shapes"
    assert run.data.tags["status"] == "ok"


@pytest.mark.usefixtures("shapes_model")  # a conversion would not be interrupted
def test_interrupted_sweep_is_closed_and_can_be_followed_by_another(tmp_path):
    result = interrupt(tmp_path, signal.SIGINT, {"0"})
    assert result.code == 130
    assert "Traceback" not in result.err
    (how_far,) = [line for line in result.err.splitlines() if "runs finished" in line]
    said, _, command = how_far.partition("; continue: ")
    assert said == "0 of 2 runs finished"
    words = shlex.split(command)
    assert words[:2] == ["python", RUN] and "-m" in words and words[-1] == "sweep.resume=true"
    assert {*QUICK, "dtype=int8,uint8"} <= {*words}
    (child,) = result.children  # the second was not started
    for run in (result.parent, child):
        assert (run.info.status, run.data.tags["status"]) == ("KILLED", "killed")
    hidden = {path.name for path in (tmp_path / "runs").rglob(".*")}
    assert hidden <= {".hydra", ".gitignore", ".lock"}

    later = call(tmp_path, "-m", *QUICK, "dtype=fp32")
    assert later.code == 0, later.err
    assert sorted(run.info.status for run in later.runs) == ["FINISHED"] * 2 + ["KILLED"] * 2


def test_two_runs_at_once_share_a_fresh_store_but_no_folder(tmp_path):
    words = (*QUICK, "backend=tflite", "dtype=uint8")
    with (
        Process(tmp_path, *words, "per_channel=false") as one,
        Process(tmp_path, *words, "per_channel=true") as other,
    ):
        ended = [one.wait(), other.wait()]
    assert [call.code for call in ended] == [0, 0], ended
    called = ended[0]
    experiments = called.client.search_experiments()
    assert sorted(experiment.name for experiment in experiments) == ["Default", "resnet8ptq"]
    runs = called.runs
    assert [run.data.tags["status"] for run in runs] == ["unsupported"] * 2  # at once
    assert {run.data.params["per_channel"] for run in runs} == {"false", "true"}
    assert len({run.data.tags["folder"] for run in runs}) == 2


def test_an_error_that_jobs_share_is_reported_once(tmp_path):
    np.savez(tmp_path / "a.npz", pictures=np.zeros((4, 8, 8, 3), np.uint8), more=np.zeros(4))
    onnx.save(build(), tmp_path / "a.onnx")
    files = (f"data.root={tmp_path / 'a.npz'}", f"model.path={tmp_path / 'a.onnx'}")
    result = call(tmp_path, "-m", "data=arrays", *files, "seed=1,2", **NO_REAL_FILES)
    log = " ".join((result.out + result.err).split())
    assert log.count("failed: data.inputs: got null") == 1  # no table repeats the log
    assert "1_onnx-int8-minmax: failed: the same error as 0_onnx-int8-minmax" in log
    assert result.code == 1
