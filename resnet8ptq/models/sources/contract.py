"""The result of a reader, and the setup of TensorFlow."""

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import onnx
from numpy.typing import NDArray

from resnet8ptq.core.records import names_of
from resnet8ptq.models.batch_axis import Predict

Sample = NDArray[Any] | None  # a sample [1, ...] as stored, perhaps a record; None without data


def is_record(sample: Sample) -> bool:
    """Return whether a sample is a record, whose fields fill inputs by name."""
    return sample is not None and bool(names_of(sample.dtype))


@dataclass(frozen=True)
class Network:
    """A network as a reader returns it.

    Attributes:
        proto: the graph as ONNX, in a supported opset; its batch size may be fixed.
        predict: runs the original in the framework of the file, on network inputs.
        source_opset: opset of an ONNX file, or of the export from another format.
        moved: the original batch axis of each input and output whose batch axis was moved to the
            front.
        original_dtype: the dtype in which the original computes, if it is not float32; graph and
            `predict` compute in float32 even then.
        emptied: names of the removed inputs for earlier tokens of a decoder.
    """

    proto: onnx.ModelProto
    predict: Predict
    source_opset: int
    moved: dict[str, int] = field(default_factory=dict)
    original_dtype: str = ""
    emptied: list[str] = field(default_factory=list)


def prepare_tensorflow() -> None:
    """Silence TensorFlow's C++ log and tf2onnx's warnings, and disable oneDNN.

    Call this before TensorFlow is imported.
    """
    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # Plain FP32 sums, and no banner on import
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
