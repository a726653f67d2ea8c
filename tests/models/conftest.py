"""A network as an ONNX file, converted here: what it becomes, or why it is refused."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from numpy.typing import NDArray

from resnet8ptq.core.errors import ModelError
from resnet8ptq.models import conversion
from tests.helpers import converted
from tests.helpers.onnx_networks import IMAGES

Take = Callable[..., conversion.Conversion]


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """Convert here, not in a process of its own, into `tmp_path / "made"`."""

    def run(
        network: onnx.ModelProto | Path, samples: NDArray = IMAGES, outputs: list[str] | None = None
    ) -> conversion.Conversion:
        path = network if isinstance(network, Path) else tmp_path / "network.onnx"
        if not isinstance(network, Path):
            onnx.save(network, path)
        return converted.convert(path, tmp_path / "made", samples, outputs=outputs)

    return run


@pytest.fixture
def refused(take: Take) -> Callable[[onnx.ModelProto | Path], str]:
    """Return the one line that a file is refused by."""

    def run(network: onnx.ModelProto | Path) -> str:
        with pytest.raises(ModelError) as caught:
            take(network)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return run
