"""What is special to OpenVINO: no telemetry, integer kernels that are counted, every batch size."""

import filecmp
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.openvino import (
    BACKEND,
    archive,
    library,
    predictor,
    profiler,
    serving,
)
from resnet8ptq.backends.openvino.predictor import make_network
from resnet8ptq.backends.openvino.profiler import count_kernels
from resnet8ptq.backends.openvino.quantizer import OpenvinoQuantizer
from resnet8ptq.backends.openvino.rewriting import avoid_faults
from resnet8ptq.config.schema import RunConfig, find_fields
from resnet8ptq.core import isolation
from resnet8ptq.core.descriptor import Backend
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.deploy import example
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.evaluation.evaluator import loader
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.conversion import FOLDED
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.target.connection import Reply
from resnet8ptq.target.measure import PRECISIONS, OpenVinoFile
from resnet8ptq.target.target import Target
from resnet8ptq.tasks.scoring.distortion import KERNELS_DB, sqnr_db
from tests.helpers import converted, transformers
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of, runtime_of
from tests.helpers.frameworks import needs
from tests.helpers.originals import start_isolated

needs_openvino = needs("openvino")
needs_nncf = needs("openvino_nncf")


def test_its_absence_is_one_line(monkeypatch):
    monkeypatch.setattr(Backend, "is_installed", False)
    library.library.cache_clear()
    with pytest.raises(UnsupportedError, match=r"pip install 'resnet8ptq\[openvino\]'"):
        quantizer_of(make_config("backend=openvino")).resolve()
    library.library.cache_clear()


@needs_openvino
def test_without_the_extra_nncf_a_run_is_unsupported(monkeypatch):
    monkeypatch.setattr(Backend, "is_installed", False)
    with pytest.raises(UnsupportedError, match=r"pip install 'resnet8ptq\[nncf\]'"):
        quantizer_of(make_config("backend=openvino_nncf", "dtype=int8")).resolve()


@pytest.mark.slow
@needs_openvino
@pytest.mark.parametrize(("words", "warned"), [((), True), (("transformer",), False)])
def test_a_transformer_without_its_type_is_warned_of(shapes_model, tmp_path, caplog, words, warned):
    onnx.save(transformers.build(), tmp_path / "network.onnx")
    settings = ["backend=openvino_nncf", *(f"backend.model_type={word}" for word in words)]
    network = replace(shapes_model, onnx_path=tmp_path / "network.onnx")
    quantizer_of(make_config(*settings, "dtype=int8")).fit(network)
    assert ("try backend.model_type=transformer" in caplog.text) == warned
    quantizer_of(make_config(*settings, "dtype=int8")).fit(shapes_model)
    assert caplog.text.count("try backend.model_type") == warned


@needs_nncf
def test_options_of_nncf_have_an_effect(quantize):
    settings = ("backend=openvino_nncf", "dtype=int8", "per_channel=true")
    plain = quantize(*settings)
    changed = quantize(*settings, "backend.preset=mixed", "backend.bias_correction=none")
    assert count_kernels(plain.artifact.path) == count_kernels(changed.artifact.path) == (10, 0)
    assert not np.array_equal(plain.predict(images=100), changed.predict(images=100))


@needs_nncf
@pytest.mark.parametrize(("reduce_range", "most"), [("true", {63, 64}), ("false", {127})])
def test_reduce_range_is_the_overflow_fix_of_nncf(quantize, reduce_range, most):
    settings = ("backend=openvino_nncf", "dtype=int8", f"reduce_range={reduce_range}")
    graph = archive.read(quantize(*settings).artifact.path.read_bytes())
    constants = [node for node in graph.get_ops() if node.get_type_name() == "Constant"]
    levels = [node.data for node in constants if node.get_element_type().get_type_name() == "i8"]
    assert len(levels) == 10
    assert {int(np.abs(values.astype(np.int16)).max()) for values in levels} == most


@needs_openvino
def test_int8_and_u8s8_are_one_file(quantize):
    """From s8, OpenVINO computes a convolution behind a Concat with wrong zero points."""
    signed, unsigned = (quantize("backend=openvino", f"dtype={name}") for name in ("int8", "u8s8"))
    assert filecmp.cmp(signed.artifact.path, unsigned.artifact.path, shallow=False)


BF16 = ("backend=openvino", "dtype=fp16", "backend.inference_precision=bf16")


def capabilities() -> list[str]:
    if not BACKEND.is_installed:
        return []
    return list(library.core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


needs_bf16 = pytest.mark.skipif("BF16" not in capabilities(), reason="needs a CPU with bfloat16")


def old_cpu() -> SimpleNamespace:
    return SimpleNamespace(get_property=lambda device, name: ["FP32", "INT8"])


@needs_openvino
@pytest.mark.parametrize("backend", ["openvino", "openvino_nncf"])
def test_fp32_is_computed_in_float32(backend, monkeypatch):
    monkeypatch.setattr(library, "core", old_cpu)
    settings = (f"backend={backend}", "dtype=fp32", "backend.inference_precision=bf16")
    assert quantizer_of(make_config(*settings)).resolve() == Resolved(engine="openvino")


@needs_openvino
def test_a_float_type_that_the_cpu_lacks_is_unsupported(monkeypatch):
    """OpenVINO itself would emulate it, or compute in another one."""
    monkeypatch.setattr(library, "core", old_cpu)
    with pytest.raises(UnsupportedError) as caught:
        quantizer_of(make_config(*BF16)).resolve()
    assert str(caught.value) == (
        "backend.inference_precision: bf16 is no type of this CPU in OpenVINO, expected f32"
    )
    elsewhere = quantizer_of(make_config(*BF16, "target.command=python3")).resolve()
    assert elsewhere.engine == "openvino bf16"


def test_a_target_is_asked_for_the_float_type_but_not_for_fp32(tmp_path):
    class Asked(Target):
        def ask(self, request, payload=b""):
            precisions.append(request.get("precision"))
            return Reply({"names": ["x"]}, [])

    precisions: list[str | None] = []
    target = Asked("python3", timeout_s=1)
    (tmp_path / "model.onnx").write_bytes(b"read there")
    for dtype in ("fp16", "fp32"):
        settings = (*BF16, f"dtype={dtype}", "target.command=python3")
        loader(quantizer_of(make_config(*settings)), tmp_path / "model.onnx", target)(1)
    assert precisions == ["bf16", None]


def test_the_settings_and_the_target_have_the_same_float_types():
    [way] = find_fields("backend.inference_precision")
    [limit] = way[-1].metadata["limits"]
    assert limit.choices == tuple(PRECISIONS)


@needs_bf16
def test_a_file_is_computed_in_the_same_float_type_everywhere(quantize, shapes, tmp_path):
    cell = quantize(*BF16)
    path = cell.artifact.path
    resolved = quantizer_of(cell.config).resolve()
    assert (resolved.engine, resolved.activation_dtype) == ("openvino bf16", "bfloat16")
    images = shapes.test.take(np.arange(8)).inputs(np.arange(8))
    [coarse] = quantizer_of(cell.config).load(path, 1).predict(images)
    [exact] = predictor.load(path, 1).predict(images)
    noise = sqnr_db([exact], [coarse])
    assert noise is not None and 20 < noise < 60
    [served] = serving.load(path, resolved.engine)({"input": images})
    [on_target] = OpenVinoFile(path.read_bytes(), 1, "bf16").run([images])
    np.testing.assert_allclose(served, coarse, atol=1e-6)
    np.testing.assert_allclose(on_target, coarse, atol=1e-6)

    # The example of a deployed folder
    record = SimpleNamespace(engine=resolved.engine, class_names=None)
    source = SourceRun(record, cell.config, path)
    vectors = Vectors(images, images, outputs=(coarse,), tolerances=(1e-6,))
    (tmp_path / path.name).write_bytes(path.read_bytes())
    vectors.save(tmp_path / "test_vectors.npz")
    code = example.render_example(source, vectors=vectors, file=path.name, outputs=["y"])
    (tmp_path / "example.py").write_text(code)
    example.run_example(sys.executable, tmp_path)


@needs_bf16
@pytest.mark.skipif("FP16" in capabilities(), reason="needs a CPU without float16")
def test_another_float_type_is_served_with_a_warning(quantize):
    with pytest.warns(UserWarning, match="no f16: computes in bf16"):
        serving.load(quantize(*BF16).artifact.path, "openvino f16")


@needs_openvino
def test_importing_it_reports_nothing(tmp_path):
    """Its telemetry writes an id below the home folder before it sends."""
    code = (
        "from resnet8ptq.backends.openvino.library import library; library(); import sys; "
        "assert sys.modules['openvino_telemetry'] is None; "
        "assert not any(name.startswith('openvino_telemetry.') for name in sys.modules)"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert list(tmp_path.iterdir()) == []


@needs_openvino
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["dtype=uint8"], "weights of u8"),
        (["dtype=w4a8"], "below 8 bits"),
        (["dtype=int8", "method=dynamic"], "expected static | qat"),
        (["dtype=int8", "format=qoperator"], "expected qdq"),
        (["dtype=w8", "method=weight_only"], "try weight_only.block_size=null"),
    ],
)
def test_what_it_computes_in_float_is_unsupported(settings, reason):
    with pytest.raises(UnsupportedError, match=reason):
        quantizer_of(make_config("backend=openvino", *settings)).resolve()


@needs_openvino
@pytest.mark.parametrize("dtype", ["int8", "u8s8"])
def test_every_layer_runs_on_integers(quantize, dtype):
    cell = quantize("backend=openvino", f"dtype={dtype}", "per_channel=true")
    assert count_kernels(cell.artifact.path) == (10, 0)
    assert count_kernels(quantize("backend=openvino", "dtype=fp32").artifact.path) == (0, 10)


def crash(_: object) -> None:
    os._exit(1)


def refuse(_: object) -> None:
    raise RuntimeError("Exception from graph_rewrite.cpp")


@pytest.mark.slow
@needs_openvino
@pytest.mark.parametrize(
    ("count", "kind", "reason"),
    [
        (crash, QuantizationError, "it crashed"),
        (refuse, UnsupportedError, "RuntimeError: Exception from"),
    ],
)
def test_openvino_that_cannot_compile_a_file_does_not_end_the_sweep(
    shapes, shapes_model, tmp_path, monkeypatch, count, kind, reason
):
    monkeypatch.setattr(isolation, "start", start_isolated)
    monkeypatch.setattr(profiler, "count_kernels", count)
    quantizer = quantizer_of(make_config("data=shapes", "backend=openvino", "dtype=int8"))
    why = rf"OpenVINO cannot compile the quantized file; try backend=onnx \({reason}"
    with pytest.raises(kind, match=why):
        quantize_network(quantizer, shapes_model, draw_calibration(shapes, 5, 0).split, tmp_path)


@needs_openvino
def test_a_file_that_runs_in_float_is_not_called_quantized(
    quantize, shapes, shapes_model, tmp_path
):
    """Weights of u8 are in the file, but OpenVINO has no kernels for them."""
    assert count_kernels(quantize("backend=onnx", "dtype=uint8").artifact.path) == (0, 10)
    config = make_config("data=shapes", "backend=openvino", "dtype=uint8")  # `resolve` refuses it
    quantizer = OpenvinoQuantizer(config, runtime_of(config))
    with pytest.raises(UnsupportedError, match="all 10 layers of the quantized file in float"):
        quantize_network(quantizer, shapes_model, draw_calibration(shapes, 5, 0).split, tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_openvino
def test_ranges_are_those_of_onnx(quantize):
    settings = ("dtype=int8", "per_channel=true", "calib=percentile")
    ours, others = (quantize(f"backend={name}", *settings) for name in ("openvino", "onnx"))
    assert ours.artifact.ranges == others.artifact.ranges


@needs_openvino
@pytest.mark.parametrize("dtype", ["fp32", "int8", "u8s8"])
def test_outputs_do_not_depend_on_the_batch_size(quantize, dtype):
    cell = quantize("backend=openvino", f"dtype={dtype}", "per_channel=true")
    whole, parts, single = (cell.predict(size, images=250) for size in (250, 32, 1))
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    np.testing.assert_allclose(single, whole, atol=1e-6)


@needs_openvino
def test_a_scale_of_one_does_not_keep_a_layer_in_float(quantize):
    """Pixels 0..255 in u8 have it."""
    settings = ("dtype=u8s8", "per_channel=true")
    theirs, ours = (quantize(f"backend={name}", *settings) for name in ("onnx", "openvino"))
    assert count_kernels(theirs.artifact.path) == (9, 1)
    proto = onnx.load(theirs.artifact.path)
    proto = avoid_faults(proto)
    assert proto == onnx.load(ours.artifact.path)
    pixels = theirs.data.test.take(np.arange(50)).inputs(np.arange(50))
    (before,), (after,) = (open_runner(str(c.artifact.path))(pixels) for c in (theirs, ours))
    np.testing.assert_allclose(after, before, atol=1e-5)


@needs_openvino
def test_each_input_is_read_before_its_memory_is_freed():
    """Several inputs, each a temporary array, in the order of their names."""
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        "two (int64[N, L] first, int64[N, L] second) => (int64[N, L] y) { y = Sub(first, second) }"
    )
    network = make_network(library.read_graph(proto.SerializeToString()), 1)
    for size in (1, 5, 300):
        records = np.zeros(size, [("second", np.int64, (7,)), ("first", np.int64, (7,))])
        records["first"] = np.arange(7 * size).reshape(size, 7)
        records["second"] = 3
        np.testing.assert_array_equal(network(records)[0], records["first"] - 3)


def add_constants(graph: onnx.GraphProto, constants: dict[str, Any]) -> None:
    """Add the constants that a graph takes."""
    for name, value in constants.items():
        if any(name in node.input for node in graph.node):
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))


SIGNALS = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 12, 6] x) => (float[N, 3] y) {
    padded = Pad(x, pads)
    moved = Transpose<perm = [0, 2, 1]>(padded)
    made = Conv(moved, kernels)
    part = Conv(moved, kernels)
    found = Relu(made)
    summed = Add(found, part)
    %s
    y = MatMul(pooled, weights)
}"""


def make_signals(folder: Path, pool: str, padding: int) -> tuple[Fp32Model, Split]:
    """Return a network of signals, [N, steps, channels], and samples of it."""
    random = np.random.default_rng(0)
    proto = parser.parse_model(SIGNALS % pool)
    constants = {
        "pads": np.array([0, padding, 0, 0, 0, 0]),
        "kernels": random.normal(size=(8, 6, 3)).astype(np.float32),
        "weights": random.normal(size=(8, 3)).astype(np.float32),
        "one": np.array([1]),
    }
    add_constants(proto.graph, constants)
    onnx.save(proto, folder / "signals.onnx")
    samples = random.normal(size=(40, 12, 6)).astype(np.float32)
    record = converted.convert(folder / "signals.onnx", folder / "made", samples)
    path = folder / "made" / FOLDED
    network = Fp32Model("own", folder / "signals.onnx", "", path, True, record)
    return network, Split(samples, np.zeros(40, np.int64), "")


def settings_of(backend: str) -> RunConfig:
    settings = ("dtype=u8s8", "per_channel=true", "reduce_range=true")
    return make_config(f"backend={backend}", *settings)


MEANS = [
    "mean = GlobalAveragePool(summed) pooled = Flatten(mean)",
    "pooled = ReduceMean<axes = [-1], keepdims = 0>(summed)",
    "flat = Transpose<perm = [0, 2, 1]>(summed) "
    "mean = ReduceMean<axes = [1], keepdims = 1>(flat) pooled = Squeeze(mean, one)",
]


@needs_openvino
@pytest.mark.parametrize("pool", MEANS)
def test_signals_are_computed_as_in_onnx_runtime(tmp_path, pool, caplog):
    """OpenVINO's own were wrong: causal padding, and means in batches of 9 and more."""
    network, split = make_signals(tmp_path, pool, 2)
    outputs = []
    for name in ("onnx", "openvino"):
        quantizer, folder = quantizer_of(settings_of(name)), tmp_path / name
        folder.mkdir()
        artifact = quantize_network(quantizer, network, split, folder)
        outputs.append(np.concatenate(quantizer.load(artifact.path, 1).predict(split.stored)))
    theirs, ours = outputs
    assert np.square(theirs - ours).sum() < 1e-3 * np.square(theirs).sum()
    verified = quantizer.verify(artifact, network, split)
    assert float(verified.get("kernels_sqnr_db", "inf")) > KERNELS_DB
    assert not caplog.messages


@needs_openvino
def test_kernels_that_add_more_noise_than_quantization_are_reported(tmp_path, caplog):
    """OpenVINO computes ONNX Runtime's file wrongly, in batches of 9 and more."""
    network, split = make_signals(tmp_path, MEANS[0], 0)
    theirs = quantize_network(quantizer_of(settings_of("onnx")), network, split, tmp_path)
    quantizer = quantizer_of(settings_of("openvino"))
    quantizer.verify(theirs, network, split.take(np.arange(8)))
    assert not caplog.messages
    many = quantizer.verify(theirs, network, split)
    assert float(many["kernels_sqnr_db"]) < KERNELS_DB
    assert "OpenVINO's integer kernels add more noise" in caplog.text
    assert "try backend=onnx" in caplog.text


@needs_openvino
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        *((f"Reduce{kind}", "input") for kind in ("Mean", "Sum", "Max", "Min")),
        ("ReduceMean", "attribute"),  # until opset 18
    ],
)
def test_values_reduced_behind_a_product_are_those_of_onnx_runtime(kind, axes, tmp_path):
    """OpenVINO's own were wrong by 198 to 229 of 256 steps where the axis is dropped."""
    opset, reduction = {
        "attribute": (17, f"{kind}<axes = [1], keepdims = 0>(a)"),
        "input": (18, f"{kind}<keepdims = 0>(a, one)"),
    }[axes]
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 12, 64)).astype(np.float32)
    scales = random.uniform(0.001, 0.003, 32).astype(np.float32)
    levels = random.integers(-64, 64, (64, 32)).astype(np.int8)
    reduce = {"ReduceMean": np.mean, "ReduceSum": np.sum, "ReduceMax": np.max, "ReduceMin": np.min}
    reduced = reduce[kind](x @ (levels * scales), axis=1)
    constants = {"w": levels, "ws": scales, "wz": np.zeros(32, np.int8), "one": np.array([1])}
    for name, values in (("x", x), ("m", reduced)):
        low, high = min(0, values.min()), max(0, values.max())
        constants[f"{name}s"] = np.float32((high - low) / 255)
        constants[f"{name}z"] = np.uint8(round(-low / constants[f"{name}s"]))
    proto = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : {opset}]>
        g (float[N, 12, 64] x) => (float[N, 32] y) {{
            xq = QuantizeLinear(x, xs, xz)
            xd = DequantizeLinear(xq, xs, xz)
            wd = DequantizeLinear<axis = 1>(w, ws, wz)
            a = MatMul(xd, wd)
            m = {reduction}
            mq = QuantizeLinear(m, ms, mz)
            md = DequantizeLinear(mq, ms, mz)
            y = Relu(md)
        }}"""
    )
    add_constants(proto.graph, constants)
    [expected] = open_runner(proto.SerializeToString())(x)
    proto = avoid_faults(proto)
    onnx.checker.check_model(proto)
    onnx.save(proto, tmp_path / "model.onnx")
    [made] = predictor.load(tmp_path / "model.onnx", 1).predict(x)
    np.testing.assert_allclose(made, expected, atol=2.5 * constants["ms"])


@needs_openvino
@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 0, 1, 1]])
def test_zeros_that_a_pool_counts_are_zeros(pads, tmp_path):
    """As torch's AvgPool2d counts them; OpenVINO's own added noise 8 dB above the signal."""
    random = np.random.default_rng(0)
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 2, 8, 8] x) => (float[N, 3, H, W] y) {{
            wide = Conv(x, v)
            mean = AveragePool<kernel_shape = [3, 3], pads = {pads}, count_include_pad = 1>(wide)
            y = Conv(mean, w)
        }}"""
    )
    kernels = {"v": (4, 2, 1, 1), "w": (3, 4, 1, 1)}
    values = {name: random.normal(size=s).astype(np.float32) for name, s in kernels.items()}
    add_constants(proto.graph, values)
    for number, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{number}"
    onnx.save(proto, tmp_path / "network.onnx")
    pictures = random.normal(size=(20, 2, 8, 8)).astype(np.float32)
    record = converted.convert(tmp_path / "network.onnx", tmp_path / "made", pictures)
    network = Fp32Model("own", tmp_path, "", tmp_path / "made" / FOLDED, True, record)
    quantizer, folder = quantizer_of(settings_of("openvino")), tmp_path / "quantized"
    folder.mkdir()
    artifact = quantize_network(quantizer, network, Split(pictures, None, "made"), folder)
    [got] = quantizer.load(artifact.path, 1).predict(pictures)
    [expected] = open_runner(proto.SerializeToString())(pictures)
    assert artifact.quantized_layers == 2
    assert 0 < np.square(got - expected).sum() < 0.01 * np.square(expected).sum()
