"""What is special to PyTorch: its flows, their files, and the options they take."""

import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from resnet8ptq.backends.kernels import saturates
from resnet8ptq.backends.torch import program, torchscript
from resnet8ptq.backends.torch import quantizer as torch_quantizer
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.core import machine
from resnet8ptq.core.errors import ConfigError, QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.graph.torch_module import load_torch_module, to_torch_module
from resnet8ptq.models.gates import torch_archive
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.plan import Selection, find_float_nodes
from tests.helpers import transformers
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of
from tests.helpers.quantized import Cell

FLOWS = ("torch", "torch_pt2e")
WEIGHT_LAYERS = 10


def layer_weights(model: Fp32Model) -> dict[str, NDArray[np.float32]]:
    """The float weights by the ONNX node's name, output channels first."""
    graph = onnx.load(model.onnx_path).graph
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    result = {}
    for node in weight_layers(graph).values():
        weights = constants[node.input[1]]
        turned = node.op_type != "Conv" and not any(
            a.name == "transB" and a.i for a in node.attribute
        )
        result[node.name] = weights.T if turned else weights
    return result


def stored_levels(cell: Cell) -> list[NDArray[np.int64]]:
    """The integer weights in an artifact, in the order of the network."""
    if cell.artifact.path.suffix == ".pt2":
        module = torch.export.load(cell.artifact.path).module()
        state = dict(module.named_buffers()) | dict(module.named_parameters())
        stored = [w for w in state.values() if w.dtype in (torch.int8, torch.uint8)]
        return [np.asarray(w.numpy(), dtype=np.int64) for w in stored]
    with known_warnings():
        packed = torch.jit.load(cell.artifact.path)
    weights = []
    for node in packed.inlined_graph.nodes():
        if node.kind() == "prim::Constant" and "PackedParams" in str(node.output().type()):
            weight, _ = node.output().toIValue().unpack()
            weights.append(weight.int_repr().numpy().astype(np.int64))
    return weights


@pytest.mark.parametrize("per_channel", ["false", "true"])
@pytest.mark.parametrize(
    "settings",
    [
        # FX rounds to torch's own levels unless the weights were placed on the grid
        "backend=torch dtype=int8 corrections.adaround=true",
        "backend=torch dtype=int8 corrections.reconstruction=true",
        "backend=torch_pt2e dtype=int8",
        "backend=torch_pt2e dtype=uint8",
    ],
)
def test_integer_weights_are_those_of_the_grid(quantize, shapes_model, settings, per_channel):
    cell = quantize(*settings.split(), f"per_channel={per_channel}")
    seven = quantizer_of(cell.config).resolve().weight_bits == 7  # without VNNI
    scheme = WeightScheme.of(cell.config, seven)
    expected = [scheme.grid(w, 0).quantize(w) for w in layer_weights(shapes_model).values()]
    stored = stored_levels(cell)
    assert len(stored) == len(expected) == WEIGHT_LAYERS
    by_size = sorted(stored, key=lambda w: (w.size, w.flat[:8].tolist()))
    for result, levels in zip(
        by_size, sorted(expected, key=lambda w: (w.size, w.flat[:8].tolist())), strict=True
    ):
        assert (result.reshape(levels.shape) == levels).all()


@pytest.mark.parametrize("backend", FLOWS)
def test_ranges_go_by_onnx_tensors(quantize, shapes_model, backend):
    graph = onnx.load(shapes_model.onnx_path).graph
    tensors = {graph.input[0].name, *(name for node in graph.node for name in node.output)}
    ranges = quantize(f"backend={backend}").artifact.ranges
    assert set(ranges) <= tensors
    assert graph.input[0].name in ranges
    (softmax,) = [node for node in graph.node if node.op_type == "Softmax"]
    assert softmax.input[0] in ranges
    assert ranges == quantize(f"backend={backend}").artifact.ranges


def test_both_flows_choose_the_same_ranges(quantize):
    fx, pt2e = (quantize(f"backend={backend}").artifact.ranges for backend in FLOWS)
    assert {name for name in fx if name not in pt2e} <= {"functional_1/flatten_1/Reshape:0"}
    for name, chosen in pt2e.items():
        assert fx[name] == pytest.approx(chosen, rel=1e-4)


@pytest.fixture(scope="module")
def clipped_model(shapes_model: Fp32Model, tmp_path_factory: pytest.TempPathFactory) -> Fp32Model:
    """The network with ReLU6, as ONNX has it, for each Relu."""
    proto = onnx.load(shapes_model.onnx_path)
    for name, value in (("low", 0.0), ("high", 0.5)):
        constant = onnx.numpy_helper.from_array(np.array(value, np.float32), name)
        proto.graph.initializer.append(constant)
    for node in proto.graph.node:
        if node.op_type == "Relu":
            node.op_type = "Clip"
            node.input.extend(["low", "high"])
    path = tmp_path_factory.mktemp("clipped") / "clipped.onnx"
    onnx.save(proto, path)
    return replace(shapes_model, onnx_path=path)


@pytest.mark.slow
def test_what_a_clip_takes_has_the_levels_of_what_is_left(shapes, clipped_model, tmp_path):
    samples = draw_calibration(shapes, 1, 0).split
    fx, pt2e = (
        quantize_network(
            quantizer_of(make_config("data=shapes", f"backend={backend}")),
            clipped_model,
            samples,
            tmp_path,
        ).ranges
        for backend in FLOWS
    )
    clips = [n for n in onnx.load(clipped_model.onnx_path).graph.node if n.op_type == "Clip"]
    for node in clips:
        assert node.input[0] not in fx
        assert 0 <= fx[node.output[0]][0] < fx[node.output[0]][1] <= 0.5
        assert fx[node.output[0]] == pytest.approx(pt2e[node.output[0]])


def test_a_reshape_before_the_softmax_changes_nothing(quantize, shapes_model, tmp_path):
    whole = quantize("backend=torch", "dtype=u8s8")
    proto = onnx.load(shapes_model.onnx_path)
    shape = onnx.numpy_helper.from_array(np.array([-1, 10]), "shape")
    proto.graph.initializer.append(shape)
    softmax = proto.graph.node[-1]
    reshape = onnx.helper.make_node("Reshape", [softmax.input[0], "shape"], ["flat"], "reshape")
    softmax.input[0] = "flat"
    proto.graph.node.insert(len(proto.graph.node) - 1, reshape)
    onnx.save(proto, tmp_path / "reshaped.onnx")
    model = replace(shapes_model, onnx_path=tmp_path / "reshaped.onnx")
    quantizer = quantizer_of(whole.config)
    artifact = quantize_network(
        quantizer, model, draw_calibration(whole.data, 20, whole.config.seed).split, tmp_path
    )
    images = whole.data.test.stored[:50].astype(np.float32)
    [result] = quantizer.load(artifact.path, THREADS).predict(images)
    np.testing.assert_allclose(result, whole.predict(images=50), atol=2 / 256)


def test_what_depends_on_constants_alone_can_be_traced():
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]>
        network (float[N, 4, 2] x) => (float[N, 8] y)
        <float half = {2.0}, int64[2] shape = {0, -1}>
        { parts = Div(x, half)  y = Reshape(parts, shape) }"""
    )
    module = to_torch_module(proto)
    traced = torch.fx.symbolic_trace(module)
    inputs = torch.arange(16.0).reshape(2, 4, 2)
    assert torch.equal(traced(inputs), inputs.reshape(2, 8) / 2)
    assert traced(inputs[:1]).shape == (1, 8)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("torch", r"^FX cannot trace the network .*torch_pt2e"),
        ("torch_pt2e", r"^torch\.export cannot trace the network, which backend=onnx takes \("),
    ],
)
def test_a_network_that_cannot_be_traced_is_unsupported(
    shapes, shapes_model, tmp_path, monkeypatch, capfd, backend, message
):
    class Choosy(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values if values.sum() > 0 else -values

    def load(path: Path) -> torch.fx.GraphModule:
        module = load_torch_module(path)
        first = next(node.target for node in module.graph.nodes if node.op == "call_module")
        module.set_submodule(first, Choosy())
        return module

    monkeypatch.setattr(torch_quantizer, "load_torch_module", load)
    config = make_config("data=shapes", f"backend={backend}")
    with pytest.raises(UnsupportedError, match=message):
        quantize_network(
            quantizer_of(config), shapes_model, draw_calibration(shapes, 1, 0).split, tmp_path
        )
    assert "def forward" not in capfd.readouterr().err  # torch would print the whole graph


def test_a_network_that_torch_cannot_run_is_not_saved(tmp_path):
    """As with an operator that has no quantized kernel."""

    class Lacking(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.quantize_per_tensor(values, 0.1, 0, torch.quint8).erf()

    example = torchscript.Example((torch.zeros(1, 2),), (False,))
    with pytest.raises(UnsupportedError, match=r"TorchScript cannot trace.*erf.*; try .*pt2e"):
        torchscript.save(Lacking(), example, tmp_path / "model.pt", freeze=True)
    assert not list(tmp_path.iterdir())


def test_a_program_that_could_not_be_read_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setitem(torch_archive.OPERATORS, "aten", frozenset())
    example = torchscript.Example((torch.zeros(1, 2),), (False,))
    with pytest.raises(UnsupportedError, match=r"may not hold.*aten\.relu\.default"):
        program.save(torch.nn.ReLU(), example, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "kernels"),
    [
        (("backend=torch",), (8, 2)),
        # FX's `quantized::matmul` dequantizes its operands.
        (("backend=torch", "attention=products"), (8, 2)),
        (("backend=torch", "method=dynamic"), (8, 2)),
        (("backend=torch_pt2e",), (8, 2)),
        (("backend=torch_pt2e", "attention=products"), (10, 0)),
    ],
)
def test_the_products_of_a_transformer_are_counted_by_their_kernels(
    shapes_model, tmp_path, overrides, kernels
):
    onnx.save(transformers.build(), tmp_path / "transformer.onnx")
    model = replace(shapes_model, onnx_path=tmp_path / "transformer.onnx")
    pictures = np.random.default_rng(0).normal(size=(20, 3, 8, 6)).astype(np.float32)
    quantizer = quantizer_of(make_config("data=shapes", *overrides))
    artifact = quantize_network(quantizer, model, Split(pictures, None, "made"), tmp_path)
    assert quantizer.count_kernels(artifact.path) == kernels
    assert artifact.quantized_layers == kernels[0]
    [scores] = quantizer.load(artifact.path, THREADS).predict(pictures)
    with torch.inference_mode():
        expected = load_torch_module(model.onnx_path)(torch.from_numpy(pictures)).numpy()
    assert np.corrcoef(scores.ravel(), expected.ravel())[0, 1] > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("backend", FLOWS)
def test_several_outputs_are_saved_and_read_back(shapes, shapes_model, tmp_path, backend):
    proto = onnx.load(shapes_model.onnx_path)
    [relu, *_] = [node for node in proto.graph.node if node.op_type == "Relu"]
    proto.graph.output.append(onnx.ValueInfoProto(name=relu.output[0]))
    onnx.save(proto, tmp_path / "two.onnx")
    assert isinstance(load_torch_module(tmp_path / "two.onnx")(torch.zeros(1, 32, 32, 3)), tuple)
    quantizer = quantizer_of(make_config("data=shapes", f"backend={backend}"))
    model = replace(shapes_model, onnx_path=tmp_path / "two.onnx")
    artifact = quantize_network(quantizer, model, draw_calibration(shapes, 1, 0).split, tmp_path)
    predictor = quantizer.load(artifact.path, THREADS)
    images = shapes.test.inputs(slice(3))
    scores, features = predictor.predict(images)
    assert (scores.shape, features.shape[0], features.min()) == ((3, 10), 3, 0)
    assert predictor.logits(images) is None


@pytest.mark.slow
def test_pt2e_float_output_is_not_rounded(quantize):
    cell = quantize("backend=torch_pt2e", "float_output=true")
    probabilities = cell.predict(images=100)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    assert not np.array_equal(np.round(probabilities * 256), probabilities * 256)
    assert cell.artifact.quantized_layers == WEIGHT_LAYERS


@pytest.mark.parametrize("backend", FLOWS)
def test_method_qat_is_not_refused(backend):
    resolved = quantizer_of(make_config(f"backend={backend}", "method=qat")).resolve()
    assert resolved.execution == ("simulated" if backend == "torch_pt2e" else "integer")


@pytest.mark.slow
@pytest.mark.parametrize("backend", FLOWS)
def test_symmetric_activations_change_the_model(quantize, backend):
    cell = quantize(f"backend={backend}", "symmetric.activations=true")
    plain = quantize(f"backend={backend}")
    assert cell.artifact.ranges == plain.artifact.ranges
    assert not np.array_equal(cell.predict(images=100), plain.predict(images=100))


@pytest.mark.slow
@pytest.mark.parametrize("backend", FLOWS)
def test_op_types_leave_the_rest_in_float(quantize, backend):
    cell = quantize(f"backend={backend}", "op_types=[Conv]")
    assert cell.artifact.quantized_layers == WEIGHT_LAYERS - 1  # all but the dense layer


def test_op_types_names_the_nearest(shapes_model):
    graph = onnx.load(shapes_model.onnx_path).graph
    with pytest.raises(ConfigError, match=r"op_types: got 'Convv'.*nearest: Conv"):
        find_float_nodes(graph, Selection.of(make_config("op_types=[Convv]")))
    floats = find_float_nodes(graph, Selection.of(make_config("op_types=[Conv]")))
    kinds = {node.name: node.op_type for node in graph.node}
    assert {"Add", "Gemm", "Softmax"} <= {kinds[name] for name in floats}
    behind = [n.name for n in graph.node if n.op_type == "Relu" and n.name not in floats]
    assert behind  # a Relu goes along with its convolution


def test_dynamic_quantizes_the_linear_layers(quantize, shapes_model):
    cell = quantize("backend=torch", "method=dynamic")
    (dense,) = [n.name for n in onnx.load(shapes_model.onnx_path).graph.node if n.op_type == "Gemm"]
    assert cell.artifact.details["dynamic_layers"] == dense
    assert cell.artifact.quantized_layers == 1
    assert not np.array_equal(
        cell.predict(images=100), quantize("backend=torch", "dtype=fp32").predict(images=100)
    )


def test_dynamic_without_a_linear_layer_is_unsupported(quantize_anew):
    with pytest.raises(UnsupportedError, match="linear layers only, and none is left"):
        quantize_anew("backend=torch", "method=dynamic", "op_types=[Conv]")


class _Planted:
    """What a pickle would run as it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("loaded",))


@pytest.mark.parametrize(
    ("record", "content"),
    [
        ("archive/data/sample_inputs/model.pt", pickle.dumps(_Planted())),
        ("archive/data/weights/model.pt", pickle.dumps(_Planted())),
        ("archive/data/constants/custom_obj_0", pickle.dumps(_Planted())),
        ("archive/models/model.json", b'{"guards_code": ["print(1)"]}'),
        ("archive/models/model.json", b'{"expr_str": "print(1)"}'),
        ("archive/data/weights/model_weights_config.json", b'{"use_pickle": true}'),
    ],
)
def test_a_program_that_would_run_code_is_refused(quantize, tmp_path, record, content):
    cell = quantize("backend=torch_pt2e")
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(cell.artifact.path) as whole, zipfile.ZipFile(path, "w") as planted:
        for name in whole.namelist():
            if name != record:
                planted.writestr(name, whole.read(name))
        planted.writestr(record, content)
    with pytest.raises(QuantizationError, match="not a program that was saved here"):
        quantizer_of(cell.config).load(path, THREADS)


def test_refuses_a_module_in_which_nothing_is_quantized(
    shapes, shapes_model, tmp_path, monkeypatch
):
    from torch import fx, nn

    from resnet8ptq.backends.torch import quantizer as backend

    def without_layers(path: Path) -> Any:
        return fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Softmax(dim=1))).eval()

    monkeypatch.setattr(backend, "load_torch_module", without_layers)
    split = draw_calibration(shapes, 1, 0).split
    with pytest.raises(QuantizationError, match="quantized nothing"):
        quantize_network(
            quantizer_of(make_config("data=shapes", "backend=torch")), shapes_model, split, tmp_path
        )


def test_engine_missing_from_the_build_is_unsupported(monkeypatch):
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["none", "x86"])
    quantizer = quantizer_of(make_config("backend=torch", "backend.engine=qnnpack"))
    with pytest.raises(UnsupportedError, match=r"engine=qnnpack: this build of torch has.*x86"):
        quantizer.resolve()


@pytest.mark.parametrize("vnni", [True, False])
def test_engine_auto_is_onednn_where_the_cpu_has_vnni(monkeypatch, vnni):
    if "onednn" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(torch.backends.quantized, "engine", "fbgemm")
    monkeypatch.setattr(machine, "has_vnni", lambda: vnni)
    resolved = quantizer_of(make_config("backend=torch")).resolve()
    assert (resolved.engine == "onednn") == vnni


def test_engine_auto_does_not_depend_on_the_run_before(monkeypatch, quantize_anew):
    monkeypatch.setattr(machine, "has_vnni", lambda: False)
    auto = quantizer_of(make_config("backend=torch"))
    before = auto.resolve().engine
    other = "qnnpack" if before == "fbgemm" else "fbgemm"
    quantize_anew("backend=torch", f"backend.engine={other}")
    assert auto.resolve().engine == before


@pytest.mark.parametrize(
    ("engine", "value", "expected"),
    [
        ("fbgemm", "null", 7),
        ("x86", "null", 7),
        ("onednn", "null", 8),
        ("fbgemm", "false", 8),
        ("onednn", "true", 7),
    ],
)
def test_reduce_range_follows_the_engine(engine, value, expected):
    if engine not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this build of torch has no {engine}")
    overrides = (f"backend.engine={engine}", f"reduce_range={value}")
    resolved = quantizer_of(make_config("backend=torch", *overrides)).resolve()
    assert resolved.activation_bits == expected


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        (("per_channel=true",), (7, 8)),
        (("per_channel=false",), (None, 7)),
        (("per_channel=true", "backend.reduced=activations"), (None, 7)),
        (("per_channel=false", "backend.reduced=weights"), (7, 8)),
        (("per_channel=true", "method=dynamic"), (None, 7)),
    ],
)
def test_weights_take_the_reduced_range_if_each_channel_has_a_scale(settings, bits):
    """Either avoids sums that saturate."""
    resolved = quantizer_of(make_config("backend=torch", "reduce_range=true", *settings)).resolve()
    assert (resolved.weight_bits, resolved.activation_bits) == bits
    assert not saturates(resolved, ["Conv"], ["sse2"])


@pytest.mark.parametrize("backend", FLOWS)
def test_weights_of_7_bits_keep_their_levels_within_64(quantize, backend):
    cell = quantize(f"backend={backend}", "per_channel=true", "reduce_range=true")
    most = [int(np.abs(levels).max()) for levels in stored_levels(cell)]
    assert most == [64] * WEIGHT_LAYERS


@pytest.mark.slow
def test_reduce_range_changes_the_model(quantize):
    seven, eight = (
        quantize("backend=torch", f"reduce_range={value}") for value in ("true", "false")
    )
    assert seven.artifact.ranges == eight.artifact.ranges
    assert not np.array_equal(seven.predict(), eight.predict())


def test_file_holds_one_class_and_no_debug_records(quantize):
    slim = quantize("backend=torch")
    whole = quantize("backend=torch", "backend.freeze=false")
    full = quantize("backend=torch", "backend.freeze=false", "backend.debug_records=true")

    def records(cell: Cell, suffix: str) -> list[str]:
        with zipfile.ZipFile(cell.artifact.path) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
        return [name for name in names if "torch/classes" not in name]  # torch's own

    assert records(slim, ".debug_pkl") == records(whole, ".debug_pkl") == []
    assert records(full, ".debug_pkl") != []
    assert len(records(slim, ".py")) == 1 < len(records(whole, ".py")) == len(records(full, ".py"))
    assert slim.artifact.size_bytes < whole.artifact.size_bytes < full.artifact.size_bytes
    assert np.array_equal(slim.predict(), full.predict())
    assert np.array_equal(slim.predict(), whole.predict())


@pytest.mark.slow
def test_histogram_observer_is_its_own_method(quantize):
    histogram = quantize("backend=torch", "calib=histogram")
    assert histogram.artifact.quantized_layers == WEIGHT_LAYERS
    assert not np.array_equal(histogram.predict(), quantize("backend=torch").predict())
