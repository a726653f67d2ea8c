"""A run from config to result, and the figures that are to be reproduced."""

import filecmp
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import onnx
import pytest

from resnet8ptq import dispatch
from resnet8ptq.backends.contract import Artifact
from resnet8ptq.backends.onnx.quantizer import OnnxQuantizer
from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import machine
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.evaluation.inference import targets_of
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment import pipeline, preparation
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.experiment.workspace import Workspace
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.models import model
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.classification import ClassScores
from resnet8ptq.tasks.scoring.outputs import Outputs
from resnet8ptq.tracking import history, journal
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.run import start_run
from tests.helpers.configs import make_config
from tests.helpers.factories import evaluator_of
from tests.helpers.frameworks import QUANTIZING
from tests.helpers.stores import new_store

Ranges = Mapping[str, Range] | None
FEW = (
    *("calib.samples_per_class=20", "latency.enabled=false"),
    *("evaluate.split=held_out", "held_out_images=500"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return new_store(tmp_path_factory.mktemp("mlruns"))


def run(store: Store, folder: Path, *overrides: str) -> tuple[RunResult, RunRecord]:
    config = make_config("data=shapes", *FEW, *overrides)
    with start_run(store, "name", folder) as opened:
        result = dispatch.run_or_analyse(resolve(config), folder, opened)
    return result, history.load_named(store, "run_id", opened.run_id)


@pytest.mark.slow
def test_run_is_measured_and_logged(store, tmp_path):
    result, record = run(store, tmp_path, "dtype=uint8")
    measurement = result.measurement
    assert measurement is not None
    assert record.tags["status"] == result.status == "ok"
    assert record.metrics == result.to_metrics()
    assert record.params["weight_dtype"] == record.params["activation_dtype"] == "uint8"
    drop = record.metrics["baseline/accuracy"] - record.metrics["accuracy"]
    assert record.loss == pytest.approx(drop)
    assert measurement.size_bytes == (tmp_path / "model.onnx").stat().st_size
    assert measurement.comparison.baseline.value > 0.85
    assert measurement.comparison.model.agreement(measurement.comparison.baseline) < 1
    assert record.metrics["counts/quantized_layers"] == 10


@pytest.mark.parametrize(
    "overrides", [("backend=torch", "dtype=uint8"), ("backend=onnx", "calib=histogram")]
)
def test_unsupported_combination_does_no_work(store, tmp_path, monkeypatch, overrides):
    def refuse(*args: object) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr(registry, "read", refuse)
    monkeypatch.setattr(model, "load_network", refuse)
    result, record = run(store, tmp_path, *overrides)
    assert result.status == record.tags["status"] == "unsupported"
    assert result.reason == record.tags["reason"] != ""
    assert record.loss is None
    assert record.metrics == {}
    assert {path.name for path in tmp_path.iterdir()} == {journal.FILE, journal.LOCK}


@pytest.mark.slow
def test_held_out_images_are_the_same_for_every_seed(store, tmp_path):
    overrides = ("dtype=fp32", "evaluate.split=held_out", "held_out_images=203")
    tags = []
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        tags.append(run(store, tmp_path / seed, *overrides, f"seed={seed}")[1].tags)
    assert tags[0]["test_digest"] == tags[1]["test_digest"]
    assert tags[0]["calibration_digest"] != tags[1]["calibration_digest"]


@pytest.mark.parametrize("choice", ["method=qat", "nodes_to_exclude=auto"])
@pytest.mark.parametrize("split", ["test", "held_out"])
def test_no_image_calibrates_chooses_and_is_scored(store, tmp_path, monkeypatch, choice, split):
    seen: list[Split] = []

    def look(work: Workspace) -> None:
        samples = work.samples
        seen.extend((samples.reported, samples.calibrating.split, samples.held_out))
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "prepare", look)
    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path, choice, f"evaluate.split={split}", "held_out_images=300")
    total = sum(map(len, seen))
    assert len(np.unique(np.concatenate([result.pixel_hashes for result in seen]))) == total
    assert len(seen[2]) == 300


def swap_quantizer(monkeypatch, kind: type[OnnxQuantizer]) -> None:
    """Let another class quantize for backend=onnx."""
    descriptor = replace(BACKENDS["onnx"], quantizer=f"{__name__}:{kind.__name__}")
    monkeypatch.setitem(BACKENDS, "onnx", descriptor)


@dataclass(frozen=True)
class Swapping(OnnxQuantizer):
    """Leaves the FP32 network on disk in place of what it quantized."""

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        artifact = super().quantize(model, decisions, calibration, folder)
        shutil.copyfile(model.onnx_path, artifact.path)
        return artifact


@pytest.mark.slow
def test_what_is_evaluated_is_the_file_on_disk(store, tmp_path, monkeypatch):
    swap_quantizer(monkeypatch, Swapping)
    result, record = run(store, tmp_path)
    assert result.measurement is not None
    comparison = result.measurement.comparison
    assert comparison.model.agreement(comparison.baseline) == 1
    assert record.loss == 0
    assert record.size_reduction == 0


@dataclass(frozen=True)
class Counting(OnnxQuantizer):
    """Notes the samples of each call."""

    calls: ClassVar[list[int]] = []

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        self.calls.append(len(calibration))
        return super().quantize(model, decisions, calibration, folder)


def test_the_fp32_network_is_converted_once_for_all_samples(
    shapes, shapes_model, tmp_path, monkeypatch
):
    swap_quantizer(monkeypatch, Counting)
    config = make_config("data=shapes", "dtype=fp32", f"cache_dir={tmp_path}")
    evaluator = evaluator_of(config, shapes_model)
    few, more = (shapes.test.take(np.arange(count)) for count in (20, 30))
    baselines = [evaluator.baseline(samples) for samples in (few, more)]
    assert [len(baseline.outputs.values[0]) for baseline in baselines] == [20, 30]
    artifact = evaluator.quantize(shapes_model, Decisions(), few, tmp_path)
    assert filecmp.cmp(artifact.path, baselines[0].path, shallow=False)
    assert Counting.calls == [20]


@dataclass(frozen=True)
class Truncating(OnnxQuantizer):
    """Leaves half a file on disk."""

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        artifact = super().quantize(model, decisions, calibration, folder)
        whole = artifact.path.read_bytes()
        artifact.path.write_bytes(whole[: len(whole) // 2])
        return artifact


def test_damaged_artifact_fails_the_run(store, tmp_path, monkeypatch):
    swap_quantizer(monkeypatch, Truncating)
    config = make_config("data=shapes", *FEW)
    with (
        pytest.raises(Exception, match=r"model\.onnx: .*invalid file"),
        start_run(store, "name", tmp_path) as opened,
    ):
        dispatch.run_or_analyse(resolve(config), tmp_path, opened)
    record = history.load_named(store, "run_id", opened.run_id)
    assert record.tags["status"] == "failed"
    assert record.metrics == {}
    assert not (tmp_path / "result.json").exists()


def test_excluded_nodes_keep_their_float32_weights_in_a_float16_file(store, tmp_path, shapes_model):
    node = next(iter(weight_layers(onnx.load(shapes_model.onnx_path).graph).values())).name
    _, record = run(store, tmp_path, "dtype=fp16", f"nodes_to_exclude=[{node}]")
    assert record.metrics["counts/quantized_layers"] == 9  # of ten


def test_too_many_calibration_images_are_refused(store, tmp_path):
    with pytest.raises(
        ConfigError, match=r"calib.samples_per_class: got 1001, expected at most 1000"
    ):
        run(store, tmp_path, "calib.samples_per_class=1001", "evaluate.split=test")


@pytest.mark.slow
@pytest.mark.parametrize("backend", QUANTIZING)
def test_fp32_run_equals_its_baseline(store, tmp_path, backend):
    result, record = run(store, tmp_path, f"backend={backend}", "dtype=fp32")
    assert result.measurement is not None
    comparison = result.measurement.comparison
    assert comparison.model.agreement(comparison.baseline) == 1
    assert record.loss == 0
    assert record.metrics["paired/p_value"] == 1
    assert record.size_reduction == 0
    assert record.metrics["counts/quantized_layers"] == 0


@pytest.fixture(scope="module")
def cifar10() -> Dataset:
    settled = locate.find_data(make_config("data.on_missing=error").data)
    return registry.load(settled.name, settled.root)


@pytest.fixture(scope="module")
def resnet8(cifar10: Dataset, cache_root: Path) -> Fp32Model:
    return model.load_network(make_config().model, cifar10, cache_root)


def score(config: RunConfig, network: Fp32Model, dataset: Dataset, folder: Path) -> ClassScores:
    """Quantize, reload, evaluate: the middle of the recipe."""
    calibration = draw_calibration(dataset, 100, 42)
    evaluator = evaluator_of(config, network)
    decisions = Decisions.of(config)
    quantized = evaluator.quantize(network, decisions, calibration.split, folder)
    return scored(evaluator.run(quantized.path, dataset.test).outputs, dataset)


def scored(outputs: Outputs, dataset: Dataset) -> ClassScores:
    return classification.score(outputs, targets_of(dataset.test))


@pytest.mark.slow
@pytest.mark.usefixtures("real_files")
def test_fp32_accuracy_is_reproduced(request):
    """In ONNX Runtime; that every framework predicts the same is checked elsewhere."""
    dataset: Dataset = request.getfixturevalue("cifar10")
    network: Fp32Model = request.getfixturevalue("resnet8")
    config = make_config()
    kept = evaluator_of(config, network).baseline(dataset.test)
    baseline = scored(kept.outputs, dataset)
    assert (baseline.correct, baseline.total) == (8703, 9980)
    dog = dataset.class_names.index("dog")
    assert baseline.class_accuracy(dog) == pytest.approx(0.742, abs=0.0005)


# Measured with onnxruntime 1.31.1 and torch 2.13: minmax, batch normalization folded, percent.
# Each dtype, granularity and framework once; test_backends.py has all of them on `shapes`.
REFERENCE = [
    ("onnx", "int8", "false", 86.75),
    ("onnx", "uint8", "true", 86.85),
    ("onnx", "u8s8", "false", 86.75),
    ("torch", "int8", "true", 86.88),
]


@pytest.mark.slow
@pytest.mark.usefixtures("real_files")
@pytest.mark.parametrize(("backend", "dtype", "per_channel", "expected"), REFERENCE)
def test_accuracy_is_reproduced(backend, dtype, per_channel, expected, request, tmp_path):
    if not machine.has_vnni() and (backend == "torch" or dtype == "u8s8"):
        pytest.skip("measured on a CPU with VNNI: without it 16-bit sums saturate")
    config = make_config(f"backend={backend}", f"dtype={dtype}", f"per_channel={per_channel}")
    dataset: Dataset = request.getfixturevalue("cifar10")
    network: Fp32Model = request.getfixturevalue("resnet8")
    scores = score(config, network, dataset, tmp_path)
    assert 100 * scores.value == pytest.approx(expected, abs=0.3)
    assert np.isfinite(scores.probabilities).all()


def test_operators_that_the_backend_never_quantizes_are_named(caplog):
    nodes = [
        onnx.helper.make_node("PRelu", ["x", "slope"], ["positive"]),
        onnx.helper.make_node("Relu", ["positive"], ["y"]),
        onnx.helper.make_node("Shape", ["x"], ["sizes"]),
    ]
    graph = onnx.helper.make_graph(nodes, "network", [], [])
    caplog.set_level("INFO")
    pipeline._say_unknown(graph, "onnx", BACKENDS["onnx"].find_operators())
    assert "in float, as backend=onnx does not quantize them: PRelu 1" in caplog.messages


@pytest.mark.parametrize(("method", "said"), [("static", 1), ("mixed", 0)])
def test_lstms_of_method_mixed_are_not_called_float(method, said, caplog, tmp_path):
    nodes = [
        onnx.helper.make_node("LSTM", ["x", "w", "r"], ["h"], "lstm", hidden_size=2),
        onnx.helper.make_node("Gemm", ["h", "m"], ["y"], "last"),
    ]
    constants = [onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), name) for name in "wrm"]
    graph = onnx.helper.make_graph(nodes, "network", [], [], constants)
    onnx.save(onnx.helper.make_model(graph), tmp_path / "network.onnx")
    config = make_config(f"method={method}", "float_tail=false")
    work = SimpleNamespace(config=config)
    prepared = SimpleNamespace(network=SimpleNamespace(onnx_path=tmp_path / "network.onnx"))
    caplog.set_level("INFO")
    assert pipeline._float_operators(work, prepared) == {}
    assert caplog.text.count("does not quantize them: LSTM 1") == said
