"""What a network's file is said to be, without running it."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from resnet8ptq.backends.advice import TRY
from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.exploration.inspection import _compare, _compare_classes, _SampleFacts
from resnet8ptq.exploration.search import candidates
from resnet8ptq.models import summary
from resnet8ptq.models.contract import Contract, Tensor
from resnet8ptq.models.summary import print_summary, requirements, summarize
from tests.helpers.assembling import assemble
from tests.helpers.calling import call
from tests.helpers.configs import make_config
from tests.helpers.onnx_networks import build


@pytest.fixture
def found(tmp_path):
    nodes = [
        helper.make_node("Shape", ["relu"], ["shape"]),
        helper.make_node("Reshape", ["relu", "shape"], ["same"]),
        helper.make_node("Erf", ["same"], ["middle"]),
    ]
    path = tmp_path / "[bold]network.onnx"
    onnx.save(build(13, takes=[1, 32, 32, 3], gives=[1, 10], middle=nodes), path)
    return summarize(path, tmp_path)


def test_an_onnx_file_is_parsed_in_a_process_of_its_own_without_a_conversion(tmp_path, monkeypatch):
    path = tmp_path / "network.onnx"
    onnx.save(build(13, takes=[1, 32, 32, 3], gives=[1, 10]), path)
    monkeypatch.setattr(summary.gate, "read_onnx", None)  # of this process
    monkeypatch.setattr(summary.onnx, "shape_inference", None)
    assert str(summarize(path, tmp_path).contract.outputs[0]) == "given [10] float32"


def test_the_content_of_an_onnx_file_is_summarized(found):
    assert [str(output) for output in found.contract.inputs] == ["pixels:0 [32, 32, 3] float32"]
    assert [str(output) for output in found.contract.outputs] == ["given [10] float32"]
    assert (found.contract.batch, found.opset, found.format) == (1, 13, ".onnx file")
    assert found.layers == 2
    assert found.parameters == 8 * 3 * 3 * 3 + 8 * 10 + 10
    assert sum(found.operators.values()) == 9  # without Shape
    assert found.operators["Conv"] == 1


def test_it_is_reported_what_stays_in_float(found):
    for backend in ("onnx", "torch", "tflite"):
        assert found.treatment("Conv", backend) == "8 bits"
        assert found.treatment("Erf", backend) == "float"
        assert found.treatment("BatchNormalization", backend) == "folded"


@pytest.mark.parametrize(("folds", "expected"), [(0, "float"), (1, "folded: 1 of 2")])
def test_batch_normalization_without_a_layer_before_it_is_not_called_folded(
    tmp_path, folds, expected
):
    """As in networks that normalize after the activation."""
    statistics = ["scale", "bias", "mean", "variance"]
    constants = {name: np.ones(4, np.float32) for name in statistics}
    constants["w"] = np.ones((4, 4), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a0"])]
    if folds:
        nodes.append(helper.make_node("BatchNormalization", ["a0", *statistics], ["a1"]))
    nodes.append(helper.make_node("Relu", [nodes[-1].output[0]], ["positive"]))
    nodes.append(helper.make_node("BatchNormalization", ["positive", *statistics], ["y"]))
    path = tmp_path / "network.onnx"
    onnx.save(assemble(nodes, {"x": ["N", 4]}, {"y": ["N", 4]}, constants), path)
    assert summarize(path, tmp_path).treatment("BatchNormalization", "onnx") == expected


def _write_sequence(folder):
    """Write a network that joins a sequence before its layers; return its path."""
    nodes = [
        helper.make_node("SplitToSequence", ["relu"], ["parts"], axis=1),
        helper.make_node("ConcatFromSequence", ["parts"], ["middle"], axis=1),
    ]
    path = folder / "sequence.onnx"
    onnx.save(build(13, takes=[1, 32, 32, 3], gives=[1, 10], middle=nodes), path)
    return path


def test_a_backend_that_lacks_an_operator_quantizes_nothing(tmp_path):
    sequence = summarize(_write_sequence(tmp_path), tmp_path)
    for backend in ("torch", "tflite", "executorch"):
        assert sequence.treatment("Conv", backend) == "-"
    for backend in ("onnx", "openvino"):
        assert sequence.treatment("Conv", backend) == "8 bits"
    needs = "\n".join(requirements(sequence))
    assert "other than torch, which lacks ConcatFromSequence, SplitToSequence" in needs
    assert "float32 input" not in needs


def test_tflite_lacks_loops(tmp_path):
    steps = onnx.parser.parse_graph(
        """body (int64 i, bool going, float[N, 8, 16, 16] state)
            => (bool still, float[N, 8, 16, 16] next)
        { still = Identity(going)
          next = Add(state, state) }"""
    )
    loop = helper.make_node("Loop", ["count", "", "relu"], ["middle"], body=steps)
    count = helper.make_node("Constant", [], ["count"], value_int=3)
    path = tmp_path / "loop.onnx"
    onnx.save(build(13, takes=[1, 32, 32, 3], gives=[1, 10], middle=[count, loop]), path)
    summary = summarize(path, tmp_path)
    assert summary.treatment("Conv", "tflite") == "-"
    assert summary.treatment("Conv", "openvino") == "8 bits"


def test_openvino_takes_the_operators_that_onnx_runtime_rounds_in_qdq(quantize):
    """Some of them, such as Add, have no class of their own in ONNX Runtime's quantizer."""
    graph = onnx.load(quantize("backend=openvino", "dtype=int8").artifact.path).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    rounded = set()
    for node in graph.node:
        if makers.get(node.input[0]) == "DequantizeLinear":
            rounded.add(node.op_type)
    assert "Add" in rounded
    assert rounded - {"QuantizeLinear"} <= BACKENDS["openvino"].find_operators()


def test_a_backend_that_lacks_an_operator_is_not_advised(tmp_path):
    sequence = summarize(_write_sequence(tmp_path), tmp_path)
    for flags in (("sse2", "avx2"), ("asimd",)):
        advised = [one for one in candidates.advise(flags, sequence) if one.verdict == TRY]
        assert advised and not any("torch" in one.settings for one in advised)
        assert not any("torch" in line for line in candidates.sweeps(flags, sequence))


def test_what_it_takes_to_run_it_is_reported(found):
    taken = "\n".join(requirements(found))
    assert "as pictures of 32 x 32 in RGB or BGR are (NHWC)" in taken
    assert "labels of 10 classes, if these are classes: probabilities" in taken
    assert "batches of 1" in taken


@pytest.mark.parametrize(("batch", "said"), [("N", False), (4, True)])
def test_the_batch_is_that_of_the_samples_alone(tmp_path, batch, said):
    """A recurrent state has its layers on the first axis."""
    proto = build(takes=[batch, 32, 32, 3])
    state = helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, "N", 64])
    proto.graph.input.append(state)
    onnx.save(proto, tmp_path / "network.onnx")
    taken = "\n".join(requirements(summarize(tmp_path / "network.onnx", tmp_path)))
    assert "model.inputs={state: ...}" in taken
    assert ("batches of 4" in taken) == said
    assert "batches of 2" not in taken


def test_a_network_that_returns_what_it_takes_needs_no_classes(tmp_path):
    proto = build(takes=["B", 32, 32, 3])
    proto.graph.node.append(helper.make_node("Identity", ["pixels:0"], ["copy"]))
    del proto.graph.output[:]
    proto.graph.output.append(
        helper.make_tensor_value_info("copy", TensorProto.FLOAT, ["B", 32, 32, 3])
    )
    onnx.save(proto, tmp_path / "network.onnx")
    assert any(
        "of anomalies" in need
        for need in requirements(summarize(tmp_path / "network.onnx", tmp_path))
    )


@pytest.mark.parametrize(
    ("tensor", "shape"), [("relu", ["B", 8, 32, 32]), ("pixels:0", ["B", 32, 32, 3])]
)
def test_a_network_that_returns_a_map_takes_masks(tmp_path, tensor, shape):
    """Those of a segmentation network may have the shape of its pictures."""
    proto = build(takes=["B", 32, 32, 3])
    proto.graph.node.append(helper.make_node("Identity", [tensor], ["map"]))
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info("map", TensorProto.FLOAT, shape))
    onnx.save(proto, tmp_path / "network.onnx")
    taken = "\n".join(requirements(summarize(tmp_path / "network.onnx", tmp_path)))
    assert "data.masks=" in taken
    assert "data=coco" not in taken


def test_the_tables_are_printed_as_text(found, capsys):
    print_summary(found)
    shown = capsys.readouterr().out
    for part in ("[bold]network.onnx", "pixels:0", "[32, 32, 3]", "Erf", "float", "8 bits"):
        assert part in shown
    assert "  - samples that are [32, 32, 3] float32, as pictures of" in shown


# On the command line


def test_it_is_reported_what_the_settings_lack(tmp_path):
    network = tmp_path / "own.onnx"
    onnx.save(build(13, takes=["N", 3, 28, 28], gives=["N", 5]), network)
    words = ("+analysis=inspect", f"model.path={network}", "backend=tflite")
    done = call(tmp_path, *words, "data=cifar10")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    said = [line for line in lines if line.startswith("  - data=cifar10: ")]
    assert "does not fit: takes (3, 28, 28), the samples are (32, 32, 3)" in said[0]
    assert "; preprocess.size=[28,28] makes pictures fit" in said[0]
    assert said[1] == "  - data=cifar10: 10 classes do not fit: it returns 5 values"
    assert not any("backend=tflite" in line for line in lines)  # onnx2tf converts it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.onnx"]  # no run was recorded
    done = call(tmp_path, *words)
    [messages] = [line for line in done.out.splitlines() if "data" in line]
    assert messages.startswith("  - data: not given; data=arrays | ")


def test_a_backend_that_lacks_an_operator_is_unsupported(tmp_path):
    network = _write_sequence(tmp_path)
    done = call(tmp_path, "+analysis=inspect", f"model.path={network}", "backend=torch_pt2e")
    assert "backend=torch: unsupported: it lacks ConcatFromSequence" in done.out


def test_settings_that_fit(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4 * 28 * 28 * 3).reshape(4, 28, 28, 3), y=[0, 0, 1, 1])
    onnx.save(build(13, takes=["N", 3, 28, 28], gives=["N", 2]), tmp_path / "own.onnx")
    files = (f"model.path={tmp_path / 'own.onnx'}", f"data.root={tmp_path / 'a.npz'}")
    done = call(tmp_path, "+analysis=inspect", "data=arrays", *files)
    assert "data=arrays: samples [28, 28, 3] fit as [3, 28, 28]" in done.out
    assert "data=arrays: labels from 0 to 1 fit: it returns 2 values" in done.out
    (tmp_path / "b.npz").write_bytes(b"no archive")
    words = (*files, f"data.root={tmp_path / 'b.npz'}")
    done = call(tmp_path, "+analysis=inspect", "data=arrays", *words)
    assert done.code == 0
    assert "data=arrays: " in done.out and "b.npz" in done.out
    (tmp_path / "a.npz").unlink()
    done = call(tmp_path, "+analysis=inspect", "data=arrays", *files)
    assert (done.code, len(done.errors)) == (2, 1)
    assert "(not there)" in done.errors[0]


def test_a_network_that_a_backend_cannot_run_is_reported(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4 * 32 * 32 * 3).reshape(4, 32, 32, 3), y=[0, 0, 1, 1])
    files = (f"model.path={_write_sequence(tmp_path)}", f"data.root={tmp_path / 'a.npz'}")
    done = call(tmp_path, "+analysis=inspect", "data=arrays", "backend=torch", *files)
    assert done.code == 0, done.err
    [reason] = [line for line in done.out.splitlines() if "unsupported" in line]
    assert reason.startswith("  - a run is unsupported: torch cannot run the network: ")


def test_a_sweep_of_inspections_is_refused(tmp_path):
    done = call(tmp_path, "-m", "+analysis=inspect", "seed=1,2")
    assert (done.code, done.errors) == (
        2,
        ["error: analysis.name: got 'inspect', expected one run: leave out -m"],
    )


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".onnx", None),
        (".onnx", b""),
        (".h5", b"x = 1"),
        (".tflite", b"\0\0\0\0TFL3"),
        (".pt2", b"PK\x03\x04"),
    ],
)
def test_no_network_is_refused_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"network{suffix}"
    if content is not None:
        path.write_bytes(content)
    done = call(tmp_path, "+analysis=inspect", f"model.path={path}", "data=shapes")
    assert done.code == 2
    *_, error = done.err.strip().splitlines()  # a slow machine says first what it reads
    assert error.startswith("error: ") and str(path) in error


@pytest.mark.parametrize(
    ("classes", "named", "values", "says"),
    [
        (3, True, 3, "3 classes fit: it returns 3 values"),
        (3, True, 4, "3 classes do not fit: it returns 4 values"),
        (3, True, None, "3 classes fit: it returns any number of values"),
        (3, False, 4, "labels from 0 to 2 fit: it returns 4 values"),
        (3, False, 2, "labels from 0 to 2 do not fit: it returns 2 values"),
        (2, True, 1, "two classes fit task=binary: it returns one value"),
        (2, False, 1, "two classes fit task=binary: it returns one value"),
    ],
)
def test_classes_are_compared_with_outputs(classes, named, values, says):
    assert _compare_classes(_SampleFacts(np.zeros((1, 5)), classes, named), values) == says


def test_the_output_that_holds_the_classes_is_named():
    outputs = (Tensor("embedding", (16,), "float32"), Tensor("scores", (10,), "float32"))
    contract = Contract((Tensor("x", (3, 8, 8), "float32"),), outputs)
    sample = _SampleFacts(np.zeros((1, 3, 8, 8)), 10, named=False, single_labels=True)
    lines = _compare(make_config(), contract, sample)
    assert any("do not fit" in line and "model.outputs=[scores]" in line for line in lines)
    kept = make_config("model.outputs=[scores]")
    lines = _compare(kept, contract, sample)
    assert any("labels from 0 to 9 fit" in line for line in lines)


def test_the_labels_of_known_data_are_compared_with_several_outputs(tmp_path):
    """CIFAR-10 is not read, but each of its samples has one class."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["embedding"]),
        helper.make_node("MatMul", ["embedding", "w"], ["scores"]),
    ]
    gives = {"embedding": ["N", 3], "scores": ["N", 10]}
    constants = {"w": np.ones((3, 10), np.float32)}
    path = tmp_path / "network.onnx"
    onnx.save(assemble(nodes, {"x": ["N", 3, 32, 32]}, gives, constants), path)
    done = call(tmp_path, "+analysis=inspect", f"model.path={path}", "data=cifar10")
    assert "data=cifar10: labels from 0 to 9 do not fit" in done.out, done.err
    assert "model.outputs=[scores] keeps one" in done.out


@pytest.mark.parametrize("pictures", [True, False])
def test_no_size_is_advised_for_features(found, pictures):
    [messages, *_] = _compare(
        make_config(), found.contract, _SampleFacts(np.zeros((1, 49, 10, 3)), 2, pictures=pictures)
    )
    assert "takes (32, 32, 3), the samples are (49, 10, 3)" in messages
    assert ("preprocess.size=[32,32]" in messages) == pictures


@pytest.mark.parametrize(
    ("shape", "name", "is_asked"),
    [((6,), "raw", False), ((6,), "unit", True), ((3, 8, 8), "raw", True)],
)
def test_the_preprocessing_of_a_table_is_not_asked_for(shape, name, is_asked):
    contract = Contract((Tensor("x", shape, "float32"),), (Tensor("y", (1,), "float32"),))
    lines = _compare(
        make_config(f"preprocess={name}"), contract, _SampleFacts(np.zeros((1, *shape)), 0)
    )
    assert any("trained with" in line for line in lines) == is_asked
