"""dtype=w8a16: 16-bit activations in ONNX and TFLite files."""

import numpy as np
import onnx
from ai_edge_litert.schema_py_generated import TensorType
from onnx import TensorProto

from resnet8ptq.backends.tflite import contents, predictor
from tests.helpers.factories import quantizer_of

WIDE = "dtype=w8a16"


def test_an_onnx_file_holds_uint16_activations_in_onnx_own_operators(quantize):
    cell = quantize("backend=onnx", WIDE)
    proto = onnx.load(cell.artifact.path)
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    assert {types[node.input[2]] for node in nodes} == {TensorProto.UINT16}
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    assert next(e.version for e in proto.opset_import if not e.domain) >= 21
    resolved = quantizer_of(cell.config).resolve()
    assert (resolved.execution, resolved.activation_bits) == ("simulated", 16)


def test_a_tflite_file_holds_symmetric_int16_activations(quantize):
    cell = quantize("backend=tflite", WIDE)
    model = contents.read_model(cell.artifact.path.read_bytes())
    tensors = [t for t in model.subgraphs[0].tensors if not contents.is_constant(model, t)]
    tensors = [t for t in tensors if t.type != TensorType.INT32]  # shapes
    assert {tensor.type for tensor in tensors} == {TensorType.INT16}
    assert {int(tensor.quantization.zeroPoint[0]) for tensor in tensors} == {0}
    assert quantizer_of(cell.config).count_kernels(cell.artifact.path) == (10, 0)


def test_16_bits_are_nearer_to_fp32_than_8(quantize):
    exact = quantize("backend=onnx", "dtype=fp32").predict()
    narrow, wide = (
        np.square(quantize("backend=onnx", dtype, "per_channel=true").predict() - exact).mean()
        for dtype in ("dtype=int8", WIDE)
    )
    assert wide < narrow


def test_an_int16_input_takes_all_of_its_levels():
    details = {"dtype": np.int16, "quantization": (0.5, 0)}
    levels = predictor.to_input(np.array([-1e6, 1.0, 1e6], np.float32), details)
    assert (levels.dtype, levels.tolist()) == (np.dtype(np.int16), [-32768, 2, 32767])
