"""Settings that depend on the network: decided or refused before anything is learned."""

import ast
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import helper

from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core.errors import ModelError, UnsupportedError
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.network_and_data import fit_settings, make_task
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.models.contract import read_contract
from tests.helpers.assembling import assemble
from tests.helpers.calling import Called, call
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of
from tests.helpers.own_data import QUICK, write_data

FLAGSHIP = ("dtype=u8s8", "per_channel=true", "reduce_range=true", "float_output=true")


def write_depthwise(path: Path) -> Path:
    """A depthwise convolution, and at the end, as in MobileNet, a convolution as classifier."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["pixels", "deep"], ["d"], "deep", pads=[1] * 4, group=3),
        helper.make_node("Relu", ["d"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Conv", ["p", "last"], ["l"], "last"),
        helper.make_node("Flatten", ["l"], ["scores"], "flatten"),
    ]
    deep = random.random((3, 1, 3, 3)).astype(np.float32)
    constants = {"deep": deep, "last": np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)}
    sides = {"pixels": ["N", 3, 8, 6]}, {"scores": ["N", 3]}
    onnx.save(assemble(nodes, *sides, constants, opset=13), path)
    return path


def run(folder: Path, *words: str) -> Called:
    data = write_data(folder / "a.npz")
    network = write_depthwise(folder / "own.onnx")
    paths = (f"data.root={data}", f"model.path={network}", "calib.samples_per_class=5")
    return call(folder, "data=arrays", *paths, *QUICK, *words)


@pytest.mark.slow
@pytest.mark.parametrize("corrected", [False, True])
def test_the_quick_flagship_runs_on_a_network_that_ends_in_a_convolution(tmp_path, corrected):
    corrections = f"corrections.bias_correction={str(corrected).lower()}"
    ended = run(tmp_path, "experiment=flagship_quick", "seed=1", corrections)
    assert ended.code == 0
    [child] = ended.children
    assert child.data.tags["status"] == "ok"
    params = ended.result(child)["params"]
    assert (params["format"], params["file_format"]) == ("auto", "QDQ")
    said = " ".join(ended.err.split())
    assert "format=auto: qdq (the last layer becomes QLinearConv, which returns 8 bits)" in said
    warned = "7-bit weights in 1 depthwise convolutions: rounding shifts the mean" in said
    assert warned is not corrected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("format=qoperator",), 0, "which returns 8 bits; expected format=auto or format=qdq"),
        (("nodes_to_exclude=[lost]",), 2, "nodes_to_exclude: got 'lost', expected names of"),
    ],
)
def test_a_network_that_a_setting_does_not_fit_is_refused_before_the_learning(
    tmp_path, words, code, said
):
    learning = AssertionError("learned first")
    with mock.patch.object(preparation, "prepare", side_effect=learning):
        ended = run(tmp_path, *FLAGSHIP, "corrections.adaround=true", *words)
    assert ended.code == code
    assert said in " ".join(f"{ended.out} {ended.err}".split())


def test_tflite_refuses_an_onnx_file_before_the_learning(shapes_model):
    quantizer = quantizer_of(make_config("backend=tflite"))
    assert quantizer.fit(shapes_model) == {}
    with pytest.raises(UnsupportedError, match="expected a Keras file or a SavedModel"):
        quantizer.fit(mock.Mock(source=Path("net.onnx"), fold=True))


@pytest.mark.parametrize(
    ("words", "format_"),
    [
        (FLAGSHIP, "qoperator"),  # ResNet8 ends in a Gemm
        ((*FLAGSHIP[:-1], "float_output=false"), "qoperator"),
        (("dtype=w4a8", "per_channel=true"), "qdq"),
    ],
)
def test_auto_is_the_smaller_format_that_works(shapes_model, words, format_):
    quantizer = quantizer_of(make_config("format=auto", *words))
    assert quantizer.resolve().file_format is None
    assert quantizer.fit(shapes_model) == {"format": format_}


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (("backend=torch",), "backend=onnx"),
        (("backend=torch_pt2e", "method=qat"), "backend=onnx method=static"),
        (("backend=onnx", "method=qat"), "method=static"),
        (("corrections.reconstruction=true",), "corrections.reconstruction=false"),
    ],
)
def test_a_network_that_torch_cannot_run_is_unsupported_there(shapes_model, words, mend):
    fails = {shapes_model.onnx_path.name: "Padding size 0"}
    fp32 = replace(shapes_model, conversion=replace(shapes_model.conversion, without_torch=fails))
    config = make_config("data=shapes", *words)
    reason = f"torch cannot run the network: Padding size 0; try {mend}$"
    with pytest.raises(UnsupportedError, match=reason):
        fit_settings(resolve(config), fp32)
    other = make_config("data=shapes", "backend=onnx", "corrections.adaround=true")
    fit_settings(resolve(other), fp32)


def test_a_network_that_returns_the_class_alone_gets_the_call_that_cuts_it(
    shapes, shapes_model, tmp_path
):
    proto = onnx.load(shapes_model.onnx_path)
    [scores] = proto.graph.output
    proto.graph.node.append(helper.make_node("ArgMax", [scores.name], ["best"], axis=1, keepdims=0))
    del proto.graph.output[:]
    best = helper.make_tensor_value_info("best", onnx.TensorProto.INT64, ["N"])
    proto.graph.output.append(best)
    onnx.save(proto, tmp_path / "network.onnx")
    contract = read_contract(proto.graph)
    conversion = replace(shapes_model.conversion, contract=contract, final="values")
    fp32 = replace(shapes_model, onnx_path=tmp_path / "network.onnx", conversion=conversion)
    with pytest.raises(ModelError) as caught:
        make_task(TaskConfig("classification"), shapes, fp32, scored=shapes.test)
    [names] = re.findall(r"extract_model\('IN.onnx', 'OUT.onnx', (.*)\)$", str(caught.value))
    inputs, outputs = ast.literal_eval(names)
    cut = tmp_path / "cut.onnx"
    onnx.utils.extract_model(tmp_path / "network.onnx", cut, inputs, outputs)
    assert [value.name for value in onnx.load(cut).graph.output] == [scores.name]
