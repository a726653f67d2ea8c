"""Rounds weights of the layers that are to be quantized, and refuses what it cannot do."""

from pathlib import Path
from typing import NoReturn

import onnx

from resnet8ptq.backends.contract import (
    Artifact,
    Predict,
    Predictor,
    Quantizer,
    Resolved,
    Takes,
    options_of,
    refuse_empty,
    refuse_others,
)
from resnet8ptq.core import files
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.session import end_at_logits, open_runner
from resnet8ptq.graph.weights import read_weights, write_weights
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.plan import find_quantized_layers
from tests.helpers.toy_backend.files import fetch, pack, unpack
from tests.helpers.toy_backend.options import ToyConfig

_WEIGHTS = "toys have int8 weights"
_TAKES: Takes = {"method": (["static"], _WEIGHTS), "dtype.name": (["int8"], _WEIGHTS)}


class ToyQuantizer(Quantizer):
    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        if self.config.dtype.is_fp32:
            return Resolved()
        refuse_others(self.config, _TAKES)
        if self.plan(decisions).is_narrow:
            raise UnsupportedError(f"weights below 8 bits: {_WEIGHTS}")
        return Resolved("int8", "float32", "simulated", 8, file_format="Toy")

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        proto = onnx.load(model.onnx_path)
        proto.producer_name = options_of(self.config, ToyConfig).producer
        layers = {}
        if not self.config.dtype.is_fp32:
            layers = find_quantized_layers(proto.graph, self.select(decisions))
            if not layers:
                refuse_empty("backend=toy", proto.graph)
        for name, node in layers.items():
            weights = read_weights(proto.graph, node)
            grid = self.plan(decisions).scheme(name).grid(weights, 0)
            write_weights(proto.graph, node, grid.round(weights))
        path = folder / "model.toy"
        files.write_bytes(path, pack(proto))
        return Artifact(path, len(layers))

    def load(self, path: Path, threads: int) -> Predictor:
        run = open_runner(unpack(fetch(path)), threads)
        return Predictor(run, lambda: _open_logits(path, threads))

    def count_kernels(self, path: Path) -> tuple[int, int]:
        return 0, 1

    def profile(self, path: Path, threads: int) -> NoReturn:
        raise UnsupportedError("toys have no profiler")


def _open_logits(path: Path, threads: int) -> Predict | None:
    proto = unpack(fetch(path))
    return open_runner(proto, threads) if end_at_logits(proto) else None
