"""Feeds a detector's pictures to other code, such as ONNX Runtime's quantizer, in batches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core.errors import DataError
from resnet8ptq.data import pictures
from resnet8ptq.data.boxes import pack
from resnet8ptq.data.preprocessing import arrange, make_preprocessing
from resnet8ptq.data.sources.coco import Annotations, annotate, read_annotations
from resnet8ptq.data.sources.folder import find_pictures

IMAGE_ID = "image_id"
AT_ONCE = 64  # pictures in memory


class CocoReader(CalibrationDataReader):  # type: ignore[misc]
    """Feeds pictures to ONNX Runtime's quantizer, or to `evaluation.coco_evaluator`.

    >>> from onnxruntime.quantization import quantize_static
    >>> steps = PreprocessConfig(size=416, resize="letterbox", align="top_left", pad=114,
    ...                          channels="bgr")
    >>> reader = CocoReader("pictures", "images", steps, size_limit=100)
    >>> quantize_static("yolox.onnx", "yolox.int8.onnx", reader)

    Attributes:
        paths: the pictures' paths, sorted or in the order of the annotations.
        annotations: the content of the annotation file; None without one.
        records: the annotations of the pictures, [n], see `data.boxes`; None without annotations.
    """

    def __init__(
        self,
        images: str | Path,
        input_name: str,
        preprocess: PreprocessConfig,
        annotations: str | Path | None = None,
        *,
        start_index: int = 0,
        size_limit: int = 0,
        stride: int = AT_ONCE,
        batch_size: int = 1,
        is_evaluation: bool = False,
        channels_first: bool = True,
        inputs: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Choose the pictures; `get_next` reads them.

        Args:
            images: the folder of the pictures.
            input_name: the network's input for pictures.
            preprocess: the settings of the preprocessing; `size` is required unless all pictures
                have one size.
            annotations: a file in COCO's format that lists the pictures; None for all pictures in
                the folder.
            start_index: index of the first picture.
            size_limit: the largest number of pictures; 0 for no limit.
            stride: number of pictures that are decoded at once, and in memory, rounded down to
                whole batches; at least one batch.
            batch_size: pictures of each step; the last step may have fewer.
            is_evaluation: whether each step contains the indices of its pictures, as `image_id`.
            channels_first: whether the network takes [C, H, W].
            inputs: values of the network's other inputs, such as `image_shape`, for one sample.

        Raises:
            DataError: there are no pictures from `start_index` on, or `read_annotations` refuses
                the annotations.
            ValueError: a number is too small.
        """
        for name, value, least in (
            ("start_index", start_index, 0),
            ("size_limit", size_limit, 0),
            ("stride", stride, 1),
            ("batch_size", batch_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: got {value}, expected an integer >= {least}")

        # List the pictures of the annotations, or else of the folder
        folder = Path(images)
        chosen = slice(start_index, None)
        if size_limit:
            chosen = slice(start_index, start_index + size_limit)
        self.annotations: Annotations | None = None
        self.records: NDArray[Any] | None = None
        if annotations is not None:
            coco = read_annotations(Path(annotations))
            self.annotations = coco
            ids = list(coco.images)[chosen]
            self.paths = [folder / coco.images[image_id][0] for image_id in ids]
            placed = [annotate(coco, image_id, preprocess) for image_id in ids]
            self.records = pack(placed, coco.keypoints)
        else:
            self.paths = find_pictures(folder)[chosen]
        if not self.paths:
            raise DataError(f"{folder}: has no pictures from index {start_index} on")

        self.input_name = input_name
        self.preprocess = preprocess
        self.stride = max(stride, batch_size) // batch_size * batch_size
        self.batch_size = batch_size
        self.is_evaluation = is_evaluation
        self.channels_first = channels_first
        self.inputs = inputs or {}
        self.rewind()

    def __len__(self) -> int:
        """Return the number of steps."""
        return -(-len(self.paths) // self.batch_size)

    def rewind(self) -> None:
        """Restart at the first picture."""
        self._next = 0
        self._decoded: tuple[int, NDArray[np.float32]] | None = None

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """Return the next batch by the inputs' names; None after the last.

        Raises:
            DataError: a picture cannot be read, or, without `size`, pictures that are decoded at
                once differ in size.
        """
        start = self._next
        if start >= len(self.paths):
            return None
        stop = min(start + self.batch_size, len(self.paths))
        self._next = stop

        # Decode the pictures of several batches at once, from the index `first` on
        first = start // self.stride * self.stride
        if self._decoded is None or self._decoded[0] != first:
            self._decoded = first, self._decode(self.paths[first : first + self.stride])
        batch = self._decoded[1][start - first : stop - first]

        # Add the values of the other inputs, and the indices of the pictures
        step: dict[str, NDArray[Any]] = {self.input_name: batch}
        for name, values in self.inputs.items():
            step[name] = np.tile(np.asarray(values, np.float32), (len(batch), 1))
        if self.is_evaluation:
            step[IMAGE_ID] = np.arange(start, stop)
        return step

    def _decode(self, paths: Sequence[Path]) -> NDArray[np.float32]:
        decoded = []
        for path in paths:
            try:
                decoded.append(pictures.decode(path, self.preprocess))
            except Exception as error:  # Pillow raises a dozen types
                raise DataError(f"{path}: cannot be read ({error})") from error
        if len({picture.shape for picture in decoded}) > 1:
            raise DataError(
                f"{paths[0].parent}: the pictures differ in size; expected `size` in preprocess"
            )
        stored = np.stack(decoded)
        preprocessing = make_preprocessing(
            self.preprocess, shape=stored.shape[1:], offset=0.0, step=1.0
        )
        values = preprocessing.apply(stored)
        if self.channels_first:
            values = arrange(values, (2, 0, 1))
        return np.ascontiguousarray(values)
