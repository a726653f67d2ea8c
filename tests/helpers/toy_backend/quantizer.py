"""Rounds weights."""

from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx
from onnx import numpy_helper

from resnet8ptq.backends.contract import (
    Artifact,
    Predictor,
    Quantizer,
    Resolved,
    options_of,
    refuse_others,
)
from resnet8ptq.core import files
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from tests.helpers.toy_backend.files import WORD, fetch, open_run
from tests.helpers.toy_backend.options import ToyConfig


class ToyQuantizer(Quantizer):
    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        if self.config.dtype.is_fp32:
            return Resolved()
        refuse_others(self.config, {"dtype.name": (["int8"], "toys have int8 weights")})
        return Resolved("int8", "float32", "simulated", 8, file_format="Toy")

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        proto, rounded = onnx.load(model.onnx_path), 0
        levels = options_of(self.config, ToyConfig).levels
        for weights in proto.graph.initializer if not self.config.dtype.is_fp32 else ():
            values = numpy_helper.to_array(weights)
            if values.dtype == np.float32 and values.ndim > 1:
                scale = np.abs(values).max() / levels
                whole = (np.rint(values / scale) * scale).astype(np.float32)
                weights.CopyFrom(numpy_helper.from_array(whole, weights.name))
                rounded += 1
        path = folder / "model.toy"
        files.write_bytes(path, WORD + proto.SerializeToString())
        return Artifact(path, rounded)

    def load(self, path: Path, threads: int) -> Predictor:
        run = open_run(fetch(path), threads)
        return Predictor(lambda batch: run([batch]), lambda: None)

    def count_kernels(self, path: Path) -> tuple[int, int]:
        return 0, 1

    def profile(self, path: Path, threads: int) -> NoReturn:
        raise UnsupportedError("toys have no profiler")
