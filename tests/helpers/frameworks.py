"""The backends that tests run over, and a mark for those of an extra."""

import pytest

from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.descriptor import find_backends
from tests.helpers.factories import quantizer_of

FILE = "file"  # the backend of files of other programs
SHIPPED = (
    *("onnx", "torch", "torch_pt2e", "tflite", "executorch", "openvino", "openvino_nncf", FILE),
)
QUANTIZING = [name for name, backend in find_backends().items() if backend.quantizes]


def needs(name: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test where the extra of a backend is not installed.

    A test with a parameter `backend` needs no mark: `conftest` skips it.
    """
    backend = find_backends()[name]
    return pytest.mark.skipif(not backend.is_installed, reason=f"needs the extra {backend.extra}")


def skip_without_float_layers(config: RunConfig) -> None:
    """Skip a backend that quantizes all layers of a network; `test_backends` has its refusal."""
    if FLOAT_BITS not in quantizer_of(config).widths:
        pytest.skip("no layer can stay in float")
