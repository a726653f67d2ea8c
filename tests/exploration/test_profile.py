"""Time by operator: traces, conclusions, tables; runs for their structure."""

import csv
import io
import re
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper
from rich.console import Console

from resnet8ptq.backends.contract import NodeTime, describe_execution, to_nodes
from resnet8ptq.backends.onnx import profiler
from resnet8ptq.backends.onnx.profiler import find_unfused, read_trace
from resnet8ptq.backends.torch.profiler import read_events
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.evaluation.latency import ModelLatency, Timings
from resnet8ptq.exploration.profiling import profile_table
from resnet8ptq.exploration.profiling.breakdown import Breakdown, ProfileResult
from tests.helpers.calling import call
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of


def event(name, ts, dur, cat="NodeTime", operator="", taken=()):
    types = [{dtype: [1]} for dtype in taken]
    args = {"op_name": operator, "input_type_shape": types} if operator else {}
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def run_from(start, conv_us):
    """The events of a run, in the order in which ONNX Runtime writes them."""
    return [
        event("q_kernel_time", start, 2, operator="QuantizeLinear", taken=["float"]),
        event("conv_kernel_time", start + 5, conv_us, operator="QLinearConv", taken=["uint8"]),
        event("dq_kernel_time", start + 50, 1, operator="DequantizeLinear", taken=["uint8"]),
        event("relu_kernel_time", start + 60, 4, operator="Relu", taken=["float"]),
        event("shape_kernel_time", start + 70, 1, operator="Gather", taken=["int64"]),
        event("SequentialExecutor::Execute", start, 90, "Session"),
        event("model_run", start, 95, "Session"),
    ]


def test_a_trace_is_read_run_by_run():
    loading = [event("session_initialization", 0, 900, "Session")]
    events = [*loading, *run_from(1000, 1_000), *run_from(3000, 20), *run_from(4000, 40)]
    assert read_trace(events, {"relu"}, runs=2) == [  # without the first, which warmed up
        NodeTime("q", "QuantizeLinear", "conversion", 0.002),
        NodeTime("conv", "QLinearConv", "integer", 0.03),
        NodeTime("dq", "DequantizeLinear", "conversion", 0.001),
        NodeTime("relu", "Relu", "unfused", 0.004),
        NodeTime("shape", "Gather", "other", 0.001),
    ]
    assert read_trace(events, (), runs=1)[3].kind == "float"


def test_what_disturbs_a_run_does_not_count():
    key = ("conv", "Conv", "float")
    [node] = to_nodes([{key: ms} for ms in (1.0, 1.0, 3.0, 50.0)])
    assert node == NodeTime(*key, 2.0)
    assert to_nodes([{key: 1.0}, {}])[0].ms == 0.5


def test_nodes_between_conversions_are_unfused():
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s"], ["a"], name="dq"),
        helper.make_node("Conv", ["a", "w"], ["b"], name="conv"),
        helper.make_node("QuantizeLinear", ["b", "s"], ["c"], name="q"),
        helper.make_node("DequantizeLinear", ["c", "s"], ["d"], name="last"),
        helper.make_node("Softmax", ["d"], ["y"], name="softmax"),
    ]
    assert find_unfused(helper.make_graph(nodes, "graph", [], [])) == {"conv"}


def test_the_operators_that_torch_calls_itself_count_once():
    def called(name, ms, parent, *dtypes):
        return SimpleNamespace(
            name=name, cpu_parent=parent, cpu_time_total=1000 * ms, input_dtypes=list(dtypes)
        )

    forward = called("forward", 9.0, None)
    conv = called("quantized::conv2d", 3.0, forward, "c10::quint8", "")
    events = [
        called("aten::lift_fresh", 0.1, None, "float"),
        forward,
        called("aten::quantize_per_tensor", 1.0, forward, "float"),
        conv,
        called("aten::empty", 0.5, conv),
        called("aten::permute", 0.2, forward, "c10::quint8"),
        called("aten::pad", 0.4, forward, "float"),
        called("aten::dequantize", 0.3, None, "c10::quint8"),
    ]
    kinds = {name: kind for _, name, kind in read_events(events)}
    assert kinds == {
        "aten::quantize_per_tensor": "conversion",
        "quantized::conv2d": "integer",
        "aten::permute": "integer",
        "aten::pad": "float",
        "aten::dequantize": "conversion",
    }
    assert sum(read_events(events).values()) == pytest.approx(4.9)


CONV = NodeTime("[bold]conv", "Conv", "float", 1.0)


def breakdown(*model, ms=1.0):
    return Breakdown(1, model, [CONV], ms, 1.0)


@pytest.mark.parametrize(
    ("integer_ms", "cost_ms", "said"),
    [
        (0.5, 0.1, "take 0.500 ms less; conversions cost 0.100 ms, 20% of that gain"),
        (0.5, 0.6, "conversions cost 0.600 ms, more than that gain"),
        (1.2, 0.1, "the operators take 0.200 ms more, and conversions cost 0.100 ms"),
    ],
)
def test_the_conclusion_weighs_conversions_against_kernels(integer_ms, cost_ms, said):
    nodes = [
        NodeTime("conv", "QLinearConv", "integer", integer_ms),
        NodeTime("q", "QuantizeLinear", "conversion", cost_ms),
    ]
    concluded = breakdown(*nodes, ms=0.8).conclude()
    assert "0.800 ms quantized, 1.000 ms in FP32: 1.25 times" in concluded
    assert said in concluded
    assert "meant" not in concluded
    unfused = NodeTime("next", "Conv", "unfused", 0.25)
    assert "0.250 ms are spent in float" in breakdown(*nodes, unfused).conclude()


def test_tables_and_files_show_every_node():
    nodes = [NodeTime("conv", "QLinearConv", "integer", 0.5), CONV]
    actual = breakdown(*nodes, ms=1.0)
    rows = list(csv.DictReader(profile_table.to_csv([actual]).splitlines()))
    assert [(row["model"], row["operator"]) for row in rows] == [
        ("fp32", "Conv"),
        ("quantized", "QLinearConv"),
        ("quantized", "Conv"),
    ]
    assert [item.name for item in actual.operators()] == ["Conv", "QLinearConv"]
    out = io.StringIO()
    whole = ModelLatency(Timings(np.ones(1), None))
    result = ProfileResult("ok", breakdowns=(actual, actual), latency=whole)
    profile_table.print_tables(result, "title", Console(file=out, width=200, color_system=None))
    for part in (
        "0.500",
        "33%",
        "in float: [bold]conv (Conv) 1.000 ms",
        "adds 50% to the quantized run",
    ):
        assert part in out.getvalue()
    figure = profile_table.draw_bars([actual, actual], "title")
    assert [axes.get_title() for axes in figure.axes] == ["batch 1", "batch 1"]
    heights = sum(bar.get_height() for bar in figure.axes[0].patches)
    assert heights == pytest.approx(1.0 + 1.5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtype=fp32", r"dtype\.name: got 'fp32', expected int8"),
        (
            "latency.enabled=false",
            "latency.enabled: got false, expected true with analysis=profile",
        ),
        ("nodes_to_exclude=auto", "nodes_to_exclude: got 'auto', expected a list of names"),
        ("method=qat", "method: got 'qat', expected static | dynamic"),
        ("analysis.mode=all_but_one", r"\+analysis=sensitivity"),
    ],
)
def test_wrong_settings_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        make_config("+analysis=profile", override)


SHORT_RUN = (
    *("data=shapes", "+analysis=profile", "dtype=u8s8", "calib.samples_per_class=5"),
    *("latency.repeats=2", "latency.batch_repeats=2", "latency.batch_size=4"),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow's store
@pytest.mark.parametrize(
    ("backend", "fp32", "integer", "conversion"),
    [
        ("onnx", "Conv", "QLinearConv", "QuantizeLinear"),
        ("torch", "aten::_convolution", "quantized::conv2d_relu", "aten::dequantize"),
        ("openvino", "Convolution", "Convolution", "Reorder"),
    ],
)
def test_a_run_profiles_both_models(tmp_path, backend, fp32, integer, conversion):
    done = call(tmp_path, *SHORT_RUN, f"backend={backend}")
    assert done.code == 0, done.err
    [table] = tmp_path.glob("runs/*/*/profile.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert {row["batch_size"] for row in rows} == {"1", "4"}
    kinds = {(row["model"], row["operator"]): row["kind"] for row in rows}
    assert kinds["fp32", fp32] == "float"
    assert kinds["quantized", integer] == "integer"
    assert kinds["quantized", conversion] == "conversion"
    assert not any(kind in ("integer", "unfused") for (m, _), kind in kinds.items() if m == "fp32")
    for part in (integer, "times FP32's speed", "the run, without a profiler"):
        assert part in done.out
    [run] = done.runs
    assert {"profile.csv", "profile.png"} <= set(done.artifacts(run))
    metrics = done.result(run)["metrics"]
    assert metrics["profile/conversions_ms"] > 0
    assert metrics["profile/integer_batch_ms"] > 0
    assert {
        "profile/speedup",
        "profile/latency_p50_ms",
        "profile/baseline/latency_batch_p50_ms",
    } <= set(metrics)


@pytest.mark.parametrize("backend", ["onnx", "torch", "tflite", "openvino"])
def test_kernels_are_counted_where_they_run(quantize, backend):
    """As a profile has it, of all layers of the network; ONNX Runtime leaves some in float."""
    cell = quantize(f"backend={backend}", "dtype=int8")
    quantizer, path = quantizer_of(cell.config), cell.artifact.path
    on_integers, in_float = quantizer.count_kernels(path)
    assert on_integers + in_float == cell.artifact.quantized_layers
    if backend == "tflite":  # has no profile
        assert in_float == 0
        return
    with quantizer.profile(path, 1) as profiled:
        for batch in cell.data.test.take(np.arange(1)).batches(1):
            profiled.predict(batch)
        nodes = profiled.nodes(1)
    layers = [
        node.kind for node in nodes if re.search("(?i)conv|gemm|::linear|^fully", node.operator)
    ]
    assert (layers.count("integer"), len(layers)) == (on_integers, on_integers + in_float)


def mixed() -> onnx.ModelProto:
    """Three convolutions: quantized, quantized by ONNX Runtime as it loads, and in float."""
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        mixed (float[N, 4, 8, 8] x) => (float[N, 4, 8, 8] y)
        <float scale = {0.1}, int8 zero = {0}>
        {
            a = QuantizeLinear(x, scale, zero)
            b = DequantizeLinear(a, scale, zero)
            w = DequantizeLinear(whole, scale, zero)
            c = Conv(b, w)
            d = QuantizeLinear(c, scale, zero)
            e = DequantizeLinear(d, scale, zero)
            f = Conv(e, weights)
            g = QuantizeLinear(f, scale, zero)
            h = DequantizeLinear(g, scale, zero)
            y = Conv(h, weights)
        }
    """
    proto = onnx.parser.parse_model(text)
    weights = np.random.default_rng(0).normal(size=(4, 4, 1, 1)).astype(np.float32)
    arrays = {"weights": weights, "whole": np.round(10 * weights).astype(np.int8)}
    tensors = [onnx.numpy_helper.from_array(values, name) for name, values in arrays.items()]
    proto.graph.initializer.extend(tensors)
    for position, node in enumerate(proto.graph.node):
        node.name = f"n{position}"
    return proto


def test_execution_is_what_the_runtime_makes_of_the_file(tmp_path):
    """ONNX Runtime quantizes a layer that the file does not, and leaves another in float."""
    path = tmp_path / "model.onnx"
    onnx.save(mixed(), path)
    on_integers, in_float = profiler.count_kernels(path)
    with profiler.profile(path, 1) as profiled:
        profiled.predict(np.ones((1, 4, 8, 8), np.float32))
        nodes = profiled.nodes(1)
    layers = [node for node in nodes if "Conv" in node.operator]
    assert sum(node.kind == "integer" for node in layers) == on_integers == 2
    assert sum(node.kind in ("float", "unfused") for node in layers) == in_float == 1
    assert describe_execution("integer", on_integers, in_float) == "mixed, 1 of 3 layers in float"
    assert describe_execution("integer", 0, 2) == "float, 2 of 2 layers in float"
    assert describe_execution("simulated", 1, 2) == "simulated"


@pytest.mark.parametrize(
    ("backend", "reason"), [("tflite", "benchmark_model"), ("torch_pt2e", "simulates")]
)
def test_where_nothing_is_reported_it_is_unsupported(tmp_path, backend, reason):
    done = call(tmp_path, *SHORT_RUN, f"backend={backend}", "dtype=int8")
    assert done.code == 0, done.err
    text = " ".join(done.err.split())
    assert "unsupported: " in text and reason in text
    assert done.runs[0].data.tags["status"] == "unsupported"
