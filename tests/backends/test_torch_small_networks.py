"""Networks of a few operators in torch's flows: their layers, and their outputs beside FP32's."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torchao.quantization.pt2e import qat_utils

from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.torch_module import load_torch_module
from resnet8ptq.models.model import Fp32Model
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of

FLOWS = ("torch", "torch_pt2e")


def quantize_and_run(
    proto: onnx.ModelProto,
    model: Fp32Model,
    folder: Path,
    weights: dict[str, tuple[int, ...]],
    backend: str = "torch",
) -> tuple[NDArray[np.float32], NDArray[np.float32], tuple[int, int]]:
    """Quantize a graph of [N, 2, 4, 4]; return outputs, those in float, and kernels."""
    random = np.random.default_rng(0)
    for name, shape in weights.items():
        values = 3 * random.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    for number, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{number}"
    onnx.save(proto, folder / "network.onnx")
    samples = random.normal(size=(20, 2, 4, 4)).astype(np.float32)
    quantizer = quantizer_of(make_config("data=shapes", f"backend={backend}", "per_channel=true"))
    at = replace(model, onnx_path=folder / "network.onnx")
    path = quantize_network(quantizer, at, Split(samples, None, "made"), folder).path
    [got] = quantizer.load(path, THREADS).predict(samples)
    expected = load_torch_module(at.onnx_path)(torch.from_numpy(samples)).detach().numpy()
    return got, expected, quantizer.count_kernels(path)


@pytest.mark.parametrize("backend", FLOWS)
def test_a_normalization_before_a_convolution_stays_in_float(
    shapes_model, tmp_path, monkeypatch, backend
):
    """As dense blocks have it, where it cannot be folded."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 2, 4, 4] x) => (float[N, 4, 4, 4] y)
        <float[2] mean = {0.5, -1}, float[2] variance = {1, 4}, float[2] bias = {0.1, 0.2}>
        { scaled = BatchNormalization (x, scale, bias, mean, variance)
          kept = Relu(scaled)  y = Conv(kept, w) }"""
    )
    monkeypatch.setattr(qat_utils, "_fold_conv_bn_qat_helper", None)  # minutes of tracing
    weights = {"scale": (2,), "w": (4, 2, 1, 1)}
    got, expected, kernels = quantize_and_run(proto, shapes_model, tmp_path, weights, backend)
    assert kernels[0] == 1
    assert 0 < np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("backend", FLOWS)
def test_values_are_chosen_by_comparisons(shapes_model, tmp_path, backend):
    """The gate of exported programs refused the files."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 2, 4, 4] x) => (float[N, 4, 4, 4] y)
        <float edge = {0.5}, float other = {-0.25}, float top = {4}, float low = {-4}>
        { wide = Conv(x, v)  above = Greater(wide, edge)  first = Where(above, wide, other)
          below = Less(first, top)  second = Where(below, first, edge)
          least = GreaterOrEqual(second, edge)  third = Where(least, second, low)
          most = LessOrEqual(third, top)  kept = Where(most, third, other)  y = Conv(kept, w) }"""
    )
    weights = {"v": (4, 2, 1, 1), "w": (4, 4, 1, 1)}
    got, expected, kernels = quantize_and_run(proto, shapes_model, tmp_path, weights, backend)
    assert kernels == (2, 0)
    assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.98


@dataclass(frozen=True)
class Small:
    """A network of [N, 2, 4, 4]: its layers run in 8 bits, and its outputs stay near FP32's.

    Attributes:
        weights: names and shapes of constants that are drawn.
        limit: largest error, of the largest output; FX has 7 bits without VNNI.
    """

    steps: str
    weights: dict[str, tuple[int, ...]]
    backends: tuple[str, ...] = FLOWS
    kernels: tuple[int, int] = (2, 0)
    limit: float = 0.06
    gives: str = "N, 4, 4, 4"
    constants: str = ""


FX = ("torch",)
TWO = {"v": (4, 2, 1, 1), "w": (4, 4, 1, 1)}
THREE = {"u": (8, 8, 1, 1), "v": (4, 2, 1, 1), "w": (4, 2, 1, 1)}
DIFFERENT = "first = Conv(x, v)  wide = Relu(first)  {}  joined = Concat <axis = 1> (wide, wider)"
EVEN = "wide = Conv(x, v)  even = BatchNormalization(wide, scale, shift, mean, variance)"
SPREAD = """float[4] scale = {20, 0.5, 1, 10}, float[4] shift = {1, -2, 3, 0},
 float[4] mean = {0, 1, -1, 0}, float[4] variance = {1, 2, 0.5, 1}"""
FIXED = """wide = Conv(x, v)  other = Conv(x, w)  tanh = Tanh(other)
 small = Transpose <perm = [0, 1, 3, 2]> (tanh)"""
# Operators that onnx2torch lacks; torch's quantized PReLU multiplied values above 0 by the largest
# slope.
LACKED = """float zero = {0}, int64[1] two = {2}, float[4] factors = {1, 1, 1.5, 2},
 float[4, 1, 1] slopes = {0.2, 0.1, 0.25, 0.05}"""
ASYMMETRIC = 'mode = "linear", coordinate_transformation_mode = "asymmetric"'
NEAREST = 'coordinate_transformation_mode = "tf_half_pixel_for_nn"'
REPLACED: dict[str, tuple[str, ...]] = {
    "changed = Clip(wide, zero)": FX,  # a Relu
    "changed = Clip(wide, , zero)": FX,
    "changed = PRelu(wide, slopes)": FX,
    "changed = LpPool <kernel_shape = [2, 2], pads = [0, 0, 1, 1], p = 3> (wide)": FX,
    f"changed = Resize <{ASYMMETRIC}> (wide, , factors)": FLOWS,
    "changed, places = TopK <axis = 2> (wide, two)": FLOWS,
    f"changed = Resize <{NEAREST}> (wide, , factors)": ("torch_pt2e",),
}
SMALL = {
    "a convolution behind blocks of the input, as the Focus of YOLOX": Small(
        "blocks = SpaceToDepth <blocksize = 2> (x)  y = Conv(blocks, w)",
        {"w": (4, 8, 1, 1)},
        kernels=(1, 0),
        gives="N, 4, 2, 2",
    ),
    "a transposed convolution stays in float": Small(
        "wide = Conv(x, v)  y = ConvTranspose <strides = [2, 2]> (wide, w)",
        {"v": (4, 2, 1, 1), "w": (4, 3, 2, 2)},
        *(FX, (1, 1), 0.03, "N, 3, 8, 8"),
    ),
    "an instance normalization stays in float": Small(
        "wide = Conv(x, v)  even = InstanceNormalization(wide, scale, shift)  y = Conv(even, w)",
        TWO,
        (*FLOWS, "executorch"),
        constants="float[4] scale = {2, 0.5, 1, 3}, float[4] shift = {1, -2, 3, 0}",
    ),
    **{  # torch gives them an observer of its own
        f"{operator} is calibrated": Small(
            f"wide = Conv(x, v)  changed = {operator} (wide, c)  y = Conv(changed, w)",
            {**TWO, "c": shape},
            FX,
        )
        for operator, shape in (("LayerNormalization <axis = 1>", (4, 4, 4)), ("PRelu", (4, 1, 1)))
    },
    # As in networks that were not folded; FX and torchao fold it by themselves.
    **{
        f"a normalization behind a convolution, {behind}": Small(
            f"{EVEN}  {behind}", TWO, constants=SPREAD
        )
        for behind in ("y = Conv(even, w)", "kept = Relu(even)  y = Conv(kept, w)")
    },
    "a cubic resize, as of super-resolution, stays in float": Small(
        'wide = Conv(x, v)  larger = Resize <mode = "cubic"> (wide, , scales)  y = Conv(larger, w)',
        TWO,
        FX,
        gives="N, 4, 8, 8",
        constants="float[4] scales = {1, 1, 2, 2}",
    ),
    **{
        step: Small(
            f"wide = Conv(x, v)  {step}  y = Conv(changed, w)",
            TWO,
            backends,
            kernels=(2, 2 if "Resize" in step else 0),  # it is two products in float
            gives="N, 4, a, b",
            constants=LACKED,
        )
        for step, backends in REPLACED.items()
    },
    "a pad with ones, as linear attention sums its weights": Small(
        "wide = Conv(x, v)  kept = Relu(wide)  padded = Pad(kept, widths, value)"
        "  y = Conv(padded, w)",
        {"v": (4, 2, 1, 1), "w": (4, 5, 1, 1)},
        limit=0.03,
        constants="int64[8] widths = {0, 0, 0, 0, 0, 1, 0, 0}, float value = {200}",
    ),
    # As dense blocks do; XNNPACK refuses to load 8 bits of several scales.
    "tensors of different ranges are concatenated": Small(
        f"{DIFFERENT.format('wider = Conv(wide, w)')}  y = Conv(joined, u)",
        {"u": (8, 8, 1, 1), "v": (4, 2, 1, 1), "w": (4, 4, 1, 1)},
        (*FLOWS, "executorch"),
        (3, 0),
        gives="N, 8, 4, 4",
    ),
    "one of them behind a Neg": Small(
        f"{DIFFERENT.format('rest = Conv(x, w)  wider = Neg(rest)')}  y = Conv(joined, u)",
        THREE,
        kernels=(3, 0),
        gives="N, 8, 4, 4",
    ),
    "a tensor of two concatenations, as in feature pyramids": Small(
        """small = Conv(x, v)  turned = Transpose <perm = [0, 1, 3, 2]> (small)
        rest = Conv(x, w)  wide = Mul(rest, four)  other = Conv(x, t)
        first = Concat <axis = 1> (turned, wide)  second = Concat <axis = 1> (other, small)
        one = Conv(first, u)  two = Conv(second, s)  y = Concat <axis = 1> (one, two)""",
        {"s": (8, 8, 1, 1), "u": (8, 8, 1, 1), **dict.fromkeys("vwt", (4, 2, 1, 1))},
        kernels=(5, 0),
        gives="N, 16, 4, 4",
        constants="float four = {4}",
    ),
    **{
        f"a tensor beside one of fixed scale: {order}": Small(
            f"{FIXED}  joined = Concat <axis = 1> ({order})  y = Conv(joined, u)",
            THREE,
            FX,
            (3, 0),
            0.05,
            "N, 8, 4, 4",
        )
        for order in ("small, wide", "wide, small")
    },
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=[pytest.mark.slow] if backend == "executorch" else [])
        for name, small in SMALL.items()
        for backend in small.backends
    ],
)
def test_a_small_network_keeps_its_outputs_in_8_bits(shapes_model, tmp_path, caplog, backend, name):
    small = SMALL[name]
    constants = f"<{small.constants}>" if small.constants else ""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 2, 4, 4] x) => (float[{small.gives}] y) {constants} {{ {small.steps} }}"""
    )
    weights = small.weights
    got, expected, kernels = quantize_and_run(proto, shapes_model, tmp_path, weights, backend)
    assert kernels == small.kernels
    assert 0 < np.abs(got - expected).max() < small.limit * np.abs(expected).max()
    transposed = "ConvTranspose" in small.steps
    assert ("transposed convolutions stay in float" in caplog.text) == transposed
