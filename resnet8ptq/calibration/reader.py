"""Feeds calibration samples to ONNX Runtime's own tools."""

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader

from resnet8ptq.config.schema import DataConfig
from resnet8ptq.data import locate, registry
from resnet8ptq.data.lazy import Stored
from resnet8ptq.data.sampling import draw_calibration


class CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
    """Feeds samples to ONNX Runtime, one by one or in batches.

    ONNX Runtime's calibrators for entropy and percentile keep the activations of all samples. With
    many samples, give `quantize_static` the extra option `CalibStridedMinMax`: the number of
    batches to collect at once, which must divide `len(reader)`.

    An example with the calibration samples of a run of this package:

    >>> from onnxruntime.quantization import quantize_static
    >>> from resnet8ptq.calibration.reader import CalibrationReader
    >>> reader = CalibrationReader.draw("shapes", samples_per_class=5)
    >>> quantize_static("model.onnx", "model.int8.onnx", reader)

    Attributes:
        stored: samples [N, H, W, C] of raw pixels.
        input_name: the network's input.
        batch_size: samples per step; the last batch may have fewer.
    """

    def __init__(self, stored: Stored, input_name: str = "input", batch_size: int = 1) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected an integer >= 1")
        self.stored = stored
        self.input_name = input_name
        self.batch_size = batch_size
        self.set_range(0, len(self))

    @classmethod
    def draw(
        cls,
        name: str = "cifar10",
        samples_per_class: int = 100,
        seed: int = 42,
        root: str | None = None,
        batch_size: int = 1,
    ) -> "CalibrationReader":
        """Draw the calibration samples of a run with these settings, and else the defaults.

        Args:
            name: `cifar10` or `shapes`.
            root: the folder of CIFAR-10's batches; None for the folder that a run would find.

        Raises:
            DataError: the data set is not available, or is damaged.
            ConfigError: every class has fewer samples, `name` is not one of the two, or `root` is
                not a folder.
            ValueError: a number is too small.
        """
        if samples_per_class < 1:
            raise ValueError(
                f"samples_per_class: got {samples_per_class}, expected an integer >= 1"
            )
        if seed < 0:
            raise ValueError(f"seed: got {seed}, expected an integer >= 0")
        config = locate.find_data(DataConfig(name, root, on_missing="error"))
        drawn = draw_calibration(registry.load(config.name, config.root), samples_per_class, seed)
        return cls(drawn.split.stored, batch_size=batch_size)

    def __len__(self) -> int:
        """Return the number of batches in all samples, regardless of `set_range`."""
        return -(-len(self.stored) // self.batch_size)

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        """Return the next batch [<=batch_size, H, W, C] by the input's name; None after the last.

        Batches are float32 with pixels 0..255.
        """
        index = next(self._rest, None)
        if index is None:
            return None
        start = index * self.batch_size
        return {self.input_name: self.stored[start : start + self.batch_size].astype(np.float32)}

    def set_range(self, start_index: int, end_index: int) -> None:
        """Read only the batches from `start_index` to before `end_index`, and restart there.

        Raises:
            IndexError: a batch does not exist, or the end lies before the start.
        """
        if not 0 <= start_index <= end_index <= len(self):
            raise IndexError(
                f"set_range: got {start_index}, {end_index}; expected 0 <= start <= end <= "
                f"{len(self)}"
            )
        self._range = range(start_index, end_index)
        self.rewind()

    def rewind(self) -> None:
        """Restart at the first batch of the range."""
        self._rest = iter(self._range)
