"""Layer sensitivity, and the choice of nodes that it rests on."""

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError, QuantizationError
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.evaluation.evaluator import Compared
from resnet8ptq.experiment.layers import sensitivity, sensitivity_table
from resnet8ptq.experiment.layers.ranking import LayerSensitivity, SensitivityResult
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.plan import Selection, find_float_nodes
from resnet8ptq.tasks.classification import ACCURACY
from resnet8ptq.tasks.scoring.outputs import Outputs
from tests.helpers.calling import call
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of
from tests.helpers.frameworks import QUANTIZING, skip_without_float_layers

# PT2E chooses for ExecuTorch, whose lowering takes seconds.
COUNTED = [name if name != "executorch" else "torch_pt2e" for name in QUANTIZING]
LAYERS = 10  # ResNet8: nine convolutions, one dense layer
SHORT_RUN = (
    *("data=shapes", "calib.samples_per_class=10"),
    *("+analysis=sensitivity", "held_out_images=200"),
)


@pytest.fixture(scope="session")
def graph(shapes_model: Fp32Model) -> onnx.GraphProto:
    return onnx.load(shapes_model.onnx_path).graph


@pytest.fixture(scope="session")
def nodes(graph: onnx.GraphProto) -> dict[str, str]:
    """Names of the layers' nodes, by short name."""
    return {name: node.name for name, node in weight_layers(graph).items()}


Quantize = Callable[[RunConfig], Artifact]


@pytest.fixture
def quantize(shapes: Dataset, shapes_model: Fp32Model, tmp_path: Path) -> Quantize:
    def run(config: RunConfig) -> Artifact:
        split = draw_calibration(shapes, 5, config.seed).split
        return quantize_network(quantizer_of(config), shapes_model, split, tmp_path)

    return run


def choose(backend: str, key: str, *names: str) -> RunConfig:
    config = make_config("data=shapes", f"backend={backend}", "dtype=u8s8")
    skip_without_float_layers(config)
    setattr(config, key, list(names))
    return config


def float_layers(config: RunConfig, artifact: Artifact) -> int:
    """Count layers in the artifact that multiply by float32 weights."""
    suffix = artifact.path.suffix
    if suffix == ".pt2":
        return quantizer_of(config).count_kernels(artifact.path)[1]
    if suffix == ".onnx":
        graph = onnx.load(artifact.path).graph
        tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        weights = [n.input[1] for n in graph.node if n.op_type in ("Conv", "Gemm", "MatMul")]
        return sum(name in tensors and tensors[name].dtype == np.float32 for name in weights)
    if suffix != ".pt":  # a format that this test does not read
        return LAYERS - artifact.quantized_layers
    with known_warnings():
        graph = str(torch.jit.load(artifact.path).inlined_graph)
    return len(re.findall(r"= aten::(?:_convolution|conv2d|linear|addmm)\w*\(", graph))


def test_layers_have_short_names(graph):
    layers = weight_layers(graph)
    assert len(layers) == LAYERS
    assert all("/" not in name and name in node.name for name, node in layers.items())


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["m/a/Conv", "m/b/Conv"], ["a", "b"]),
        (["m/a/x/Conv", "m/a/y/Conv", "m/b/Conv"], ["a.x", "a.y", "b"]),
        (["Conv_0", "Conv_1"], ["Conv_0", "Conv_1"]),
        (["m/a/Conv", "m/a/Conv/Fused"], ["m.a.Conv", "m.a.Conv.Fused"]),
        (["m/a:0/Conv", "m/b/Conv"], ["a_0", "b"]),
        (["Conv"], ["Conv"]),
    ],
)
def test_short_names_tell_layers_apart(names, short):
    nodes = [onnx.helper.make_node("Conv", ["x", "w"], ["y"], name=name) for name in names]
    weight = numpy_helper.from_array(np.zeros((1, 1, 1, 1), np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "graph", [], [], [weight])
    assert list(weight_layers(graph)) == short


def test_a_product_of_two_activations_is_no_weight_layer():
    node = onnx.helper.make_node("MatMul", ["x", "y"], ["z"], name="MatMul")
    assert weight_layers(onnx.helper.make_graph([node], "graph", [], [])) == {}


@pytest.mark.parametrize("chosen", ["nodes_to_exclude=[]", "nodes_to_exclude=auto"])
def test_every_node_is_quantized_until_others_are_chosen(graph, chosen):
    assert find_float_nodes(graph, Selection.of(make_config(chosen))) == []


def test_a_chosen_layer_takes_its_activation_along(graph, nodes):
    config = choose("onnx", "nodes_to_quantize", nodes["conv2d_1"])
    chosen = {node.name for node in graph.node} - set(find_float_nodes(graph, Selection.of(config)))
    types = {node.name: node.op_type for node in graph.node}
    assert sorted(types[name] for name in chosen) == ["Conv", "Relu"]


@pytest.mark.parametrize("key", ["nodes_to_quantize", "nodes_to_exclude"])
@pytest.mark.parametrize("backend", QUANTIZING)
def test_unknown_node_is_refused_with_the_nearest(quantize, nodes, backend, key):
    with pytest.raises(ConfigError) as caught:
        quantize(choose(backend, key, "conv2d_1"))
    message = str(caught.value)
    assert message.startswith(f"{key}: got 'conv2d_1', expected ")
    assert nodes["conv2d_1"] in message.partition("nearest: ")[2]


@pytest.mark.parametrize("backend", [b for b in QUANTIZING if b != "executorch"])
def test_excluded_layer_keeps_float_weights(quantize, nodes, backend):
    for name in ("conv2d_1", "conv2d_3_1", "dense_1"):  # the first, a strided one, the last
        config = choose(backend, "nodes_to_exclude", nodes[name])
        artifact = quantize(config)
        assert artifact.quantized_layers == LAYERS - 1
        assert float_layers(config, artifact) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", COUNTED)
def test_chosen_layer_alone_is_quantized(quantize, nodes, backend):
    for name in ("conv2d_1", "conv2d_3_1", "dense_1"):
        config = choose(backend, "nodes_to_quantize", nodes[name])
        artifact = quantize(config)
        assert artifact.quantized_layers == 1
        assert float_layers(config, artifact) == LAYERS - 1


@pytest.mark.parametrize("backend", COUNTED)
def test_quantizing_nothing_is_an_error(quantize, graph, backend):
    everything = [node.name for node in graph.node]
    pooling = next(node.name for node in graph.node if node.op_type == "AveragePool")
    with pytest.raises(QuantizationError, match="no node to quantize"):
        quantize(choose(backend, "nodes_to_exclude", *everything))
    with pytest.raises(QuantizationError, match="quantized nothing"):
        quantize(choose(backend, "nodes_to_quantize", pooling))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["held_out_images=0"], r"held_out_images: got 0, expected an integer >= 1"),
        (["analysis.mode=half"], r"analysis\.mode: got 'half', expected one_at_a_time"),
        (["dtype=fp32"], r"dtype\.name: got 'fp32', expected int8"),
        (["nodes_to_exclude=[a]"], r"nodes_to_exclude: got \['a'\], expected \[\]"),
        (["nodes_to_exclude=auto"], r"nodes_to_exclude: got 'auto', expected \[\]"),
        (["nodes_to_quantize=[a]"], r"nodes_to_quantize: got \['a'\], expected null"),
    ],
)
def test_wrong_settings_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        make_config("+analysis=sensitivity", *overrides)


def test_keys_that_nothing_would_read_are_refused():
    with pytest.raises(ConfigError, match=r"\+analysis=sensitivity"):
        make_config("analysis.mode=all_but_one")


def test_network_is_cut_before_its_softmax(shapes, shapes_model, tmp_path):
    cut = sensitivity.cut_softmax(shapes_model, tmp_path / "logits.onnx")
    again = sensitivity.cut_softmax(cut, tmp_path / "again.onnx")
    assert (shapes_model.final, cut.final) == ("probabilities", "logits")
    assert again is cut
    batch = shapes.test.stored[:20].astype(np.float32)
    onnx_quantizer = quantizer_of(make_config())
    logits, expected = (
        onnx_quantizer.load(m.onnx_path, THREADS).predict(batch)[0] for m in (cut, shapes_model)
    )
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("sqnr_db", "output", "expected"),
    [(12.5, 1.0, 12.5), (None, 1.0, math.inf), (None, np.nan, -math.inf)],
)
def test_outputs_of_nan_have_the_lowest_sqnr(sqnr_db, output, expected):
    outputs = Outputs((np.full((2, 3), output, np.float32),))
    compared = Compared(SimpleNamespace(outputs=outputs), SimpleNamespace(sqnr_db=sqnr_db))
    assert compared.sqnr_db == expected


def test_figure_has_a_row_for_each_layer():
    layers = (
        LayerSensitivity("conv", "", 30.0, 0.9, 0.001, 1, 5000),
        LayerSensitivity("dense", "", 40.0, 0.9, 0, 1, 0),
    )
    result = SensitivityResult(
        "ok",
        **{"layers": layers, "whole": layers[0], "mode": "one_at_a_time", "output": "logits"},
        **{"metric": ACCURACY, "samples": 9, "fp32_value": 0.9, "fp32_size_bytes": 9},
    )
    figure = sensitivity_table.draw_sensitivity(result, "title")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["conv  30.0", "dense  40.0"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow's store
@pytest.mark.parametrize(("backend", "mode"), [("onnx", "one_at_a_time"), ("torch", "all_but_one")])
def test_analysis_ranks_every_layer(tmp_path, nodes, backend, mode):
    done = call(tmp_path, *SHORT_RUN, f"backend={backend}", "dtype=u8s8", f"analysis.mode={mode}")
    assert done.code == 0, done.err
    (table,) = tmp_path.glob("runs/*/*/sensitivity.csv")
    assert table.with_suffix(".png").stat().st_size > 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert {row["layer"]: row["node"] for row in rows} == nodes
    assert [int(row["rank"]) for row in rows] == list(range(1, LAYERS + 1))
    ratios = [float(row["logits_sqnr_db"]) for row in rows]
    assert ratios == sorted(ratios, reverse=mode == "all_but_one")
    assert len({int(row["size_bytes"]) + int(row["saved_bytes"]) for row in rows}) == 1  # FP32's
    assert all(name in done.out for name in (*nodes, "held-out training samples"))

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("resnet8ptq").experiment_id])
    metrics = done.result(run)["metrics"]
    for row, ratio in zip(rows, ratios, strict=True):
        short = row["layer"].replace("/", ".")
        assert metrics[f"sensitivity/sqnr_db/{short}"] == pytest.approx(ratio)
    assert run.data.params["analysis.mode"] == mode
    logged = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"sensitivity.csv", "sensitivity.png"} <= logged


@pytest.mark.slow
def test_analysis_in_a_sweep(tmp_path):
    done = call(tmp_path, "-m", "backend=onnx,torch", "dtype=uint8", *SHORT_RUN)
    assert done.code == 0, done.err
    assert len(list(tmp_path.glob("runs/sweeps/*/*/*/sensitivity.csv"))) == 1
    assert "unsupported" in done.err  # torch takes no uint8 weights
