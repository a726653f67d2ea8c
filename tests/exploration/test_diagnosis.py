"""A network broken on purpose is diagnosed by name, and a healthy one is not."""

import csv
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from resnet8ptq import dispatch
from resnet8ptq.backends.file import onnx_file
from resnet8ptq.core import machine
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluator import Compared
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.exploration.diagnosis import diagnosing
from resnet8ptq.exploration.diagnosis.conclusion import ACTIVATIONS, WEIGHTS, DiagnosisResult
from resnet8ptq.exploration.diagnosis.diagnosis_table import to_markdown
from resnet8ptq.exploration.diagnosis.outcomes import Outcome, weigh
from resnet8ptq.exploration.search import step_table
from resnet8ptq.tasks.scoring.outputs import Outputs
from tests.helpers.assembling import assemble
from tests.helpers.calling import call
from tests.helpers.configs import make_config

CLASSES = 3
COPIES = 40  # of each colour
HIDDEN = CLASSES * COPIES + 1  # the last channel is zero unless it is broken
MIXED = 4  # the three colours, and what is left
NAMES = ("first", "second", "head")  # of its weights
COLOUR = np.arange(HIDDEN) // COPIES


@dataclass
class Parts:
    """The parameters of a network that tells the brightest colour of a picture."""

    first: Any = field(default_factory=lambda: np.zeros((HIDDEN, 3, 1, 1), np.float32))
    bias: Any = field(default_factory=lambda: np.zeros(HIDDEN, np.float32))
    second: Any = field(default_factory=lambda: np.zeros((MIXED, HIDDEN, 1, 1), np.float32))
    clip: bool = True
    joined: float = 0  # by how much the other input of a concatenation is larger


def healthy() -> Parts:
    parts = Parts()
    for colour in range(CLASSES):
        parts.first[colour == COLOUR, colour] = 1
        parts.second[colour, colour == COLOUR] = 1 / COPIES
    parts.second[CLASSES, :-1] = 1 / (HIDDEN - 1)
    return parts


def outlier_weight() -> Parts:
    parts = healthy()
    parts.second[0, -1] = 30  # of a channel that is zero
    return parts


def unlike_channels() -> Parts:
    """Large weights that cancel each other, since the copies of a colour are equal."""
    parts = healthy()
    parts.second[CLASSES, :-1, 0, 0] = 20 * (-1.0) ** np.arange(HIDDEN - 1)
    return parts


def outlier_activation() -> Parts:
    parts = healthy()
    parts.clip = False
    parts.bias[-1] = 100  # nobody reads it
    return parts


def unlike_inputs() -> Parts:
    parts = healthy()
    parts.joined = 400
    return parts


def write_network(path: Path, parts: Parts) -> Path:
    """Conv, Clip or Relu, perhaps Concat, Conv, GlobalAveragePool, Gemm: logits."""
    act = ["c", "low", "high"] if parts.clip else ["c"]
    nodes = [
        helper.make_node("Conv", ["pixels", "first", "bias"], ["c"], "first"),
        helper.make_node("Clip" if parts.clip else "Relu", act, ["r"], "act"),
        helper.make_node("Conv", ["j" if parts.joined else "r", "second"], ["m"], "second"),
        helper.make_node("GlobalAveragePool", ["m"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "head"], ["scores"], "head"),
    ]
    second = parts.second
    if parts.joined:
        second = np.concatenate([second, np.zeros_like(second)], axis=1)
        nodes[2:2] = [
            helper.make_node("Mul", ["r", "factor"], ["large"], "enlarge"),
            helper.make_node("Concat", ["r", "large"], ["j"], "join", axis=1),
        ]
    constants = {
        "first": parts.first,
        "bias": parts.bias,
        "second": second,
        "head": np.eye(MIXED, CLASSES, dtype=np.float32),
        "low": np.float32(0),
        "high": np.float32(1),
        "factor": np.float32(parts.joined),
    }
    used = {name for node in nodes for name in node.input}
    needed = {name: value for name, value in constants.items() if name in used}
    sides = {"pixels": ["N", 3, 6, 6]}, {"scores": ["N", CLASSES]}
    onnx.save(assemble(nodes, *sides, needed, opset=13), path)
    return path


def write_data(path: Path) -> Path:
    """Pictures [6, 6, 3] of which one colour is brighter: that colour is the class."""
    random, labels = np.random.default_rng(0), np.arange(120) % CLASSES
    images = random.integers(1, 140, (120, 6, 6, 3), dtype=np.uint8)
    images[np.arange(120), :, :, labels] += 100
    np.savez(path, images=images, labels=labels)
    return path


class Recorder:
    """An open run that keeps nothing but what it is asked."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def diagnose(tmp_path: Path) -> Any:
    def run(parts: Parts, *overrides: str) -> RunResult:
        files = (f"data.root={write_data(tmp_path / 'data.npz')}", "data=arrays", "threads=1")
        files += (f"model.path={write_network(tmp_path / 'own.onnx', parts)}",)
        chosen = overrides if "preprocess=raw" in overrides else ("preprocess=unit", *overrides)
        words = ("+analysis=diagnose", "evaluate.batch_size=30", "dtype=uint8", *files, *chosen)
        return dispatch.run_or_analyse(resolve(make_config(*words)), tmp_path, Recorder())

    return run


def names(result: RunResult) -> list[str]:
    assert isinstance(result, DiagnosisResult), result.reason
    return [finding.name for finding in result.reasons]


@pytest.mark.parametrize("granularity", ["per_channel=false", "per_channel=true"])
def test_a_healthy_network_has_no_finding(diagnose, granularity, capsys):
    result = diagnose(healthy(), granularity)
    assert result.findings == ()
    assert capsys.readouterr().out.splitlines()[1].startswith("no single cause: ")


@dataclass(frozen=True)
class Broken:
    parts: Parts
    name: str  # of the finding
    tensor: str
    answer: str
    half: str | None = None  # which costs more
    overrides: tuple[str, ...] = ()


LOW = ("calib=percentile", "calib.percentile=70")
BROKEN = [
    Broken(outlier_weight(), "outlier weight", "second", "nodes_to_exclude=[second]", WEIGHTS),
    Broken(
        *(unlike_channels(), "channels of very different scale", "second", "per_channel=true"),
        WEIGHTS,
    ),
    Broken(healthy(), "clipped activation", "m", "calib=minmax", ACTIVATIONS, LOW),
    Broken(*(outlier_activation(), "outlier channel", "r", "nodes_to_exclude=["), ACTIVATIONS),
    Broken(unlike_inputs(), "joined inputs of very different scale", "j", "nodes_to_exclude=["),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_what_is_broken_is_named_and_its_half_costs_more(diagnose, capsys, broken):
    result = diagnose(broken.parts, *broken.overrides)
    assert broken.name in names(result), result.conclusion
    (finding,) = [reason for reason in result.reasons if reason.name == broken.name]
    assert broken.tensor in finding.tensors
    assert result.answer(finding).words.startswith(broken.answer)
    first = capsys.readouterr().out.splitlines()[1]
    assert first.startswith("fault: ")
    halves, whole = result.halves, result.before
    if broken.half is not None:
        assert halves.costs_more == broken.half
        assert result.conclusion[-2].startswith(f"larger cost: the {broken.half}: ")
        worse, better = sorted([halves.weights.sqnr_db, halves.activations.sqnr_db])
        assert worse == pytest.approx(whole.sqnr_db, abs=3.0)  # of both together
        assert better > whole.sqnr_db
        assert f"({broken.half} alone)" in to_markdown(result, "title")


def test_a_change_that_comes_first_is_called_best_only_if_no_other_gains_more(diagnose):
    """The removal of outlying samples comes first, also if another change gains more."""
    result = diagnose(healthy())
    removal = replace(result.before, words="removal", won_db=5.0)
    for gain, rank in ((4.0, "removal helps most"), (6.0, "removal comes first")):
        other = replace(result.before, words="other", won_db=gain)
        assert replace(result, outcomes=(removal, other)).summary().endswith(rank)


@pytest.mark.slow
def test_corrections_are_tried_where_the_weights_of_each_channel_cost_more(diagnose):
    tried = {
        granularity: {outcome.words for outcome in diagnose(outlier_weight(), granularity).outcomes}
        for granularity in ("per_channel=false", "per_channel=true")
    }
    words = {change.words for change in (step_table.BIAS, step_table.LEARN)}
    assert words <= tried["per_channel=true"]
    assert not words & tried["per_channel=false"]


needs_saturation = pytest.mark.skipif(
    machine.sums_exactly(),
    reason="sums do not saturate on this CPU",
)


@needs_saturation
def test_a_saturated_sum_is_named(diagnose):
    """Two products of bright pixels and the largest weight exceed 16 bits."""
    result = diagnose(healthy(), "dtype=u8s8")
    assert names(result) == ["saturated sum"]
    assert result.reasons[0].tensors[0] == "m"
    assert result.outcomes[0].words in ("dtype=uint8", "reduce_range=true")
    assert result.outcomes[0].helps


def test_kernels_that_saturate_are_named_on_any_cpu(diagnose, monkeypatch):
    open_tensors = onnx_file.open_tensors

    def open_saturated(content: bytes, threads: int) -> Any:
        tensors = open_tensors(content, threads)

        def run(values: Any) -> Any:
            return [np.minimum(array, array.max() / 2) for array in tensors.run_kernels(values)]

        return replace(tensors, run_kernels=run)

    monkeypatch.setattr(onnx_file, "open_tensors", open_saturated)
    for flags, name in ((("sse2",), "saturated sum"), (("asimd",), "inexact kernel")):
        monkeypatch.setattr(machine, "cpu", lambda flags=flags: ("a CPU", flags))
        result = diagnose(healthy(), "dtype=u8s8", "per_channel=true")
        assert [finding.name for finding in result.findings] == [name]


def test_wrong_preprocessing_is_named(diagnose):
    """Raw pixels are all cut off at 1: each class looks like the first."""
    result = diagnose(healthy(), "preprocess=raw")
    assert names(result)[0] == "wrong preprocessing"
    assert "preprocess=unit gets 100.00%" in result.conclusion[0]


@pytest.fixture
def damaged(tmp_path: Path) -> list[str]:
    """Float pictures, one of which is 10,000 times too large; and the network for them."""
    write_data(tmp_path / "bytes.npz")
    with np.load(tmp_path / "bytes.npz") as arrays:
        images = arrays["images"].astype(np.float32) / 255
    images = np.concatenate([images, images[:, ::-1] + 0.01])
    images[7] *= 1e4
    np.savez(tmp_path / "data.npz", x_train=images, x_test=images[120:200] + 0.001)
    parts = healthy()
    parts.clip = False
    network = write_network(tmp_path / "own.onnx", parts)
    return ["data=arrays", f"data.root={tmp_path / 'data.npz'}", f"model.path={network}"]


def test_a_damaged_calibration_sample_is_named_first_and_its_removal_helps_most(damaged, tmp_path):
    words = ("+analysis=diagnose", "dtype=uint8", "threads=1", "evaluate.batch_size=30", *damaged)
    result = dispatch.run_or_analyse(
        resolve(make_config(*words, "held_out_images=50")), tmp_path, Recorder()
    )
    assert names(result)[0] == diagnosing.OUTLIER_SAMPLE
    assert "wrong preprocessing" not in names(result)
    assert "in sample 7 of " in result.conclusion[0]
    assert result.best.words == diagnosing.REMOVE
    assert result.best.sqnr_db > 20 > 1 > result.before.sqnr_db


def test_calibration_samples_in_another_range_are_named():
    held_out = Split(np.full((4, 2, 2, 3), 200, np.uint8), None, "held out")
    for factor, count in ((1 / 255, 1), (0.9, 0)):
        drawn = replace(held_out, stored=(held_out.stored * factor).astype(np.float32))
        assert len(diagnosing.other_preprocessing(drawn, held_out)) == count


def test_tokens_have_no_range():
    tokens = Split(np.arange(8).reshape(4, 2), None, "tokens", dtype="int64")
    assert diagnosing.other_preprocessing(tokens, tokens.take(np.arange(1))) == []


def test_files_hold_every_tensor(diagnose, tmp_path):
    """The QDQ form of QOperator is diagnosed, and named."""
    result = diagnose(healthy(), "format=qoperator", "slim=true")
    assert "format=qdq" in result.notes[0]
    assert result.resolved["file_format"] == "QDQ"
    rows = list(csv.DictReader((tmp_path / "diagnosis.csv").read_text().splitlines()))
    tensors = [row["tensor"] for row in rows]
    assert sorted(tensors) == sorted(["pixels", "r", "m", "p", "f", "scores", *NAMES])
    page = (tmp_path / "diagnosis.md").read_text()
    assert page.splitlines()[2].startswith("no single cause: ")
    assert (tmp_path / "diagnosis.png").stat().st_size > 0
    metrics = result.to_metrics()
    assert metrics["diagnosis/findings"] == 0 and metrics["diagnosis/accuracy"] == 1


@pytest.mark.slow
def test_a_diagnosis_is_logged(tmp_path):
    short = ("data=shapes", "calib.samples_per_class=10", "held_out_images=100")
    done = call(tmp_path, *short, "+analysis=diagnose", "dtype=uint8", "calib=entropy")
    assert done.code == 0, done.err
    assert "fault: clipped activation in " in done.out
    (run,) = done.runs
    assert {"diagnosis.csv", "diagnosis.md", "diagnosis.png"} <= set(done.artifacts(run))
    assert run.data.metrics["diagnosis/findings"] >= 1
    assert run.data.metrics["diagnosis/best_sqnr_db"] > run.data.metrics["diagnosis/sqnr_db"]
    assert done.result(run)["params"]["held_out_digest"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [("backend=torch", "backend=torch_pt2e"), ("method=dynamic", "+analysis=compare")],
)
def test_what_has_no_tensors_or_ranges_is_unsupported(diagnose, override, hint):
    result = diagnose(healthy(), override, "dtype=int8")
    assert result.status == "unsupported"
    assert hint in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch_pt2e", "openvino"])
def test_the_files_of_other_backends_are_diagnosed(diagnose, backend):
    result = diagnose(unlike_inputs(), f"backend={backend}", "dtype=int8")
    assert isinstance(result, DiagnosisResult), result.reason
    assert "joined inputs of very different scale" in [one.name for one in result.findings]


@pytest.mark.slow
def test_a_tflite_file_is_diagnosed(tmp_path):
    """TensorFlow converts this network; an ONNX file would need an environment of onnx2tf."""
    short = ("data=shapes", "calib.samples_per_class=10", "held_out_images=100", "threads=1")
    words = ("+analysis=diagnose", *short, "backend=tflite", "dtype=int8", "calib=entropy")
    result = dispatch.run_or_analyse(resolve(make_config(*words)), tmp_path, Recorder())
    assert isinstance(result, DiagnosisResult), result.reason
    assert "clipped activation" in [one.name for one in result.findings]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtype=fp32", "dtype.name: got 'fp32', expected int8"),
        ("nodes_to_exclude=auto", "nodes_to_exclude: got 'auto', expected a list of names"),
        ("analysis.mode=all_but_one", "analysis.mode: has no effect without"),
    ],
)
def test_wrong_settings_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        make_config("+analysis=diagnose", override)


def compared(sqnr_db, output):
    """The comparison of a model with these outputs, without a difference of the metric."""
    comparison = SimpleNamespace(
        sqnr_db=sqnr_db, loss=lambda: 0.0, model=SimpleNamespace(value=0.9)
    )
    outputs = Outputs((np.full((2, 3), output, np.float32),))
    return Compared(SimpleNamespace(outputs=outputs), comparison)


def test_outputs_of_nan_gain_nothing():
    task = SimpleNamespace(compare=lambda model, other: SimpleNamespace(p_value=None))
    sound = compared(20.0, 1.0)
    broken = compared(None, np.nan)
    assert not weigh("calib=mse", broken, sound, task).helps
    mended = weigh("calib=mse", sound, broken, task)
    assert mended.helps and mended.won_db == math.inf


def test_a_change_that_was_not_tried_is_named_once():
    reason = "dtype=uint8: the kernels take int8"
    assert Outcome("dtype=uint8", reason=reason).refusal == reason
    assert Outcome("dtype=uint8", reason="no kernels").refusal == "dtype=uint8: no kernels"
