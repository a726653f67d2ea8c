"""Settings that a backend does not support: each is named with the reason, before any work."""

import pytest

from resnet8ptq.core.errors import UnsupportedError
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of

W4 = "method=weight_only dtype=w4"
WEIGHTS_ALONE = r": .*backend=onnx .*method=weight_only"
W8A16 = "dtype=w8a16"
UNCHANGED = r"the file of backend\.path is scored"
CASES = [
    ("onnx", "calib=histogram", r"calib=histogram.*minmax \| moving_average"),
    ("onnx", "method=dynamic format=qdq", "format=.*method=dynamic"),
    ("onnx", "method=dynamic float_output=true", "float_output=.*method=dynamic"),
    ("onnx", "method=dynamic symmetric.activations=true", "symmetric.activations=.*method=dynamic"),
    ("onnx", "dtype=w4", "dtype=w4" + WEIGHTS_ALONE),
    ("onnx", "dtype=w8", "dtype=w8" + WEIGHTS_ALONE),
    (
        "onnx",
        "method=weight_only dtype=int8",
        r"dtype=int8: .* takes dtype=w4 \| w8",
    ),
    ("onnx", f"{W4} format=qdq", "format=qdq: has no meaning"),
    ("onnx", f"{W4} reduce_range=true", "reduce_range=true: "),
    ("onnx", f"{W4} float_output=true", "float_output=true: has no meaning"),
    ("onnx", f"{W4} symmetric.activations=true", "symmetric.activations=true: "),
    (
        "onnx",
        f"{W4} corrections.bias_correction=true",
        "bias_correction=true: .*method=weight_only",
    ),
    ("onnx", f"{W4} precision.plan={{a:8}}", "precision.plan="),
    ("onnx", "method=weight_only dtype=w8 weight_only.algorithm=hqq", "dtype=w8: .*hqq"),
    ("onnx", f"{W4} symmetric.weights=true weight_only.algorithm=hqq", "weights=true: .*hqq"),
    ("onnx", f"{W4} weight_only.int8_products=true weight_only.algorithm=hqq", "_products=true: "),
    ("onnx", "method=weight_only dtype=w8 op_types=[MatMul,Gather]", "dtype=w8: .*Gather"),
    ("onnx", f"{W4} op_types=[MatMul,Gather] weight_only.algorithm=hqq", "=hqq: .*Gather"),
    ("onnx", f"{W8A16} method=dynamic", "dtype=w8a16 is static"),
    ("onnx", f"{W8A16} format=qoperator", "16-bit activations take format=qdq"),
    ("onnx", f"{W8A16} calib=mse", "calib=mse: the method chooses ranges for 8 bits"),
    ("onnx", f"{W8A16} reduce_range=true", "reduce_range=true: no kernel"),
    ("torch", "dtype=uint8", r"qint8 weights.*backend=torch_pt2e"),
    ("torch", W8A16, "qint8 weights"),
    ("torch", "dtype=w4", "dtype=w4" + WEIGHTS_ALONE),
    ("torch", "dtype=w8", "dtype=w8" + WEIGHTS_ALONE),
    ("torch", W4, "dtype=w4: .*try dtype=w8"),
    ("torch", "method=weight_only dtype=w8", r"block_size=32: .*try weight_only\.block_size=null"),
    (
        "tflite",
        "method=weight_only dtype=w8 weight_only.block_size=null op_types=[Conv]",
        r"op_types=.*: .*all layers.*try backend=onnx",
    ),
    (
        "onnx",
        "method=weight_only dtype=w8 weight_only.block_size=null precision.placement=measured",
        "precision.placement=measured: has no meaning",
    ),
    ("torch", "float_output=true", "always returns 8 bits"),
    ("torch", "symmetric.weights=false", "require symmetric weights"),
    ("torch", "format=qdq", "QDQ and QOperator are ONNX's"),
    ("torch", "slim=true", r"backend\.freeze"),
    ("torch", "method=dynamic dtype=uint8", "qint8 weights"),
    ("torch", "method=dynamic symmetric.activations=true", "affine"),
    ("torch", "method=dynamic reduce_range=false", "always takes 7 bits"),
    ("torch_pt2e", W8A16, "simulates 8 bits"),
    ("torch_pt2e", "dtype=w4", "dtype=w4" + WEIGHTS_ALONE),
    ("torch_pt2e", "dtype=w8", "dtype=w8" + WEIGHTS_ALONE),
    ("torch_pt2e", W4, "dtype=w4: .*try dtype=w8"),
    ("torch", "method=mixed", r"method=mixed: .*backend=onnx"),
    ("onnx", "method=mixed dtype=w4a8", r"method=mixed: weights below 8 bits"),
    ("torch_pt2e", "method=dynamic", r"backend\.flow=pt2e is static"),
    ("torch_pt2e", "calib=histogram", r"backend\.flow=fx"),
    ("torch_pt2e", "backend.engine=fbgemm", r"backend\.engine=fbgemm: for"),
    ("torch_pt2e", "symmetric.weights=false per_channel=true", "one zero point"),
    ("tflite", W4, "dtype=w4: .*try dtype=w8"),
    ("tflite", "dtype=fp16 nodes_to_exclude=auto", "nodes_to_exclude=auto: .*list of names"),
    ("tflite", "method=dynamic dtype=w4a8", "stay unchanged"),
    ("tflite", "method=dynamic precision.plan={conv2d:4}", "stay unchanged"),
    ("tflite", "method=dynamic corrections.bias_correction=true", "stay unchanged"),
    ("tflite", "method=dynamic backend.integer_io=true", r"backend\.integer_io=true"),
    ("tflite", f"{W8A16} calib=percentile", "try backend.flow=onnx2tf"),
    ("tflite", f"{W8A16} corrections.adaround=true", "try backend.flow=onnx2tf"),
    ("tflite", f"{W8A16} backend.flow=onnx2tf symmetric.activations=false", "are symmetric"),
    ("executorch", "dtype=uint8", "int8 activations"),
    ("executorch", "dtype=fp16", "int8 weights; expected int8$"),
    ("executorch", "dtype=u8s8", "int8 activations"),
    ("executorch", "symmetric.weights=false", "symmetric int8 weights"),
    ("executorch", "reduce_range=true", "take 8 bits"),
    ("executorch", "method=dynamic", "static only"),
    ("executorch", "calib=histogram", "observer of backend=torch"),
    ("executorch", "format=qdq", "QDQ and QOperator are ONNX's"),
    ("openvino_nncf", "method=dynamic", "NNCF is static here"),
    ("openvino_nncf", "calib=percentile", "chooses the ranges itself"),
    ("openvino_nncf", "symmetric.activations=true", r"backend\.preset sets it"),
    ("openvino_nncf", "corrections.bias_correction=true", "corrects by itself"),
    ("openvino_nncf", "nodes_to_exclude=[c1]", "chooses the operators"),
    ("file", "corrections.adaround=true", r"corrections\.adaround=true: " + UNCHANGED),
    ("file", "slim=true", "slim=true: " + UNCHANGED),
    ("file", "method=qat", "method=qat: " + UNCHANGED),
    ("file", "nodes_to_exclude=[a]", r"nodes_to_exclude=.*: " + UNCHANGED),
]


@pytest.mark.parametrize(("backend", "settings", "reason"), CASES)
def test_what_a_backend_does_not_support_is_named(backend, settings, reason):
    with pytest.raises(UnsupportedError, match=reason):
        quantizer_of(make_config(f"backend={backend}", *settings.split())).resolve()
