"""An ONNX file, run in ONNX Runtime."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from resnet8ptq.graph.logits import end_at_logits
from resnet8ptq.graph.session import open_session


@dataclass(frozen=True)
class OnnxPredictor:
    """An inference session on the file at `path`."""

    session: onnxruntime.InferenceSession
    path: Path
    threads: int

    def predict(self, batch: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Return each output [n, ...] for network inputs [n, ...]."""
        return tuple(self.session.run(None, {self.session.get_inputs()[0].name: batch}))

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the final softmax takes [n, classes]; None without a softmax."""
        session = self._logits_session
        if session is None:
            return None
        return np.asarray(session.run(None, {session.get_inputs()[0].name: batch})[0])

    @cached_property
    def _logits_session(self) -> onnxruntime.InferenceSession | None:
        proto = onnx.load(self.path)
        cut = end_at_logits(proto)
        return open_session(proto.SerializeToString(), self.threads) if cut else None
