"""What a network's file is said to be, without running it."""

import onnx
import pytest
from onnx import TensorProto, helper
from test_onnx_source import build

from resnet8ptq.core.errors import ModelError
from resnet8ptq.models import inspection
from resnet8ptq.models.inspection import inspect, print_inspection


@pytest.fixture
def found(tmp_path):
    nodes = [
        helper.make_node("Shape", ["relu"], ["shape"]),
        helper.make_node("Reshape", ["relu", "shape"], ["same"]),
        helper.make_node("Erf", ["same"], ["middle"]),
    ]
    path = tmp_path / "[bold]network.onnx"
    onnx.save(build(13, takes=[1, 32, 32, 3], gives=[1, 10], middle=nodes), path)
    return inspect(path)


def test_an_onnx_file_is_read_without_a_conversion(found, monkeypatch):
    monkeypatch.setattr(inspection, "_export", None)
    assert [str(each) for each in found.contract.inputs] == ["pixels:0 [32, 32, 3] float32"]
    assert [str(each) for each in found.contract.outputs] == ["given [10] float32"]
    assert (found.contract.batch, found.opset, found.format) == (1, 13, ".onnx file")
    assert found.layers == 2
    assert found.parameters == 8 * 3 * 3 * 3 + 8 * 10 + 10
    assert sum(found.operators.values()) == 9  # without Shape
    assert found.operators["Conv"] == 1


def test_it_is_told_what_stays_in_float(found):
    for backend in inspection.BACKENDS:
        assert found.treatment("Conv", backend) == "8 bits"
        assert found.treatment("Erf", backend) == "float"
        assert found.treatment("BatchNormalization", backend) == "folded"


def test_what_it_takes_to_run_it_is_told(found):
    needs = "\n".join(found.needs)
    assert "32 x 32 pictures in RGB or BGR (NHWC)" in needs
    assert "labels of 10 classes, if these are classes: probabilities" in needs
    assert "batches of 1" in needs


def test_a_network_that_returns_what_it_takes_needs_no_classes(tmp_path):
    proto = build(takes=["B", 32, 32, 3])
    proto.graph.node.append(helper.make_node("Identity", ["pixels:0"], ["copy"]))
    del proto.graph.output[:]
    proto.graph.output.append(
        helper.make_tensor_value_info("copy", TensorProto.FLOAT, ["B", 32, 32, 3])
    )
    onnx.save(proto, tmp_path / "network.onnx")
    assert any("of anomalies" in need for need in inspect(tmp_path / "network.onnx").needs)


def test_the_tables_are_printed_as_text(found, capsys):
    print_inspection(found)
    shown = capsys.readouterr().out
    for part in ("[bold]network.onnx", "pixels:0", "[32, 32, 3]", "Erf", "float", "8 bits"):
        assert part in shown
    assert "  - samples that are [32, 32, 3] float32: 32 x 32 pictures" in shown


def test_no_network_is_refused_by_its_key(tmp_path):
    with pytest.raises(ModelError, match=r"^model\.path: got .*gone, no such file; takes a "):
        inspect(tmp_path / "gone")
    (tmp_path / "text").write_text("x = 1")
    with pytest.raises(ModelError, match=r"^model\.path: .*text is not a model; takes a "):
        inspect(tmp_path / "text")
