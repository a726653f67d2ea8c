"""Quantizes by NNCF, OpenVINO's own quantizer: a reference for the files of `backend=openvino`.

NNCF itself calibrates, corrects and places scales, so few settings apply; `resolve` refuses others
with a reason. NNCF runs in a separate process, because it imports torch and prints on
stdout.
"""

import logging
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.backends.contract import (
    WITH_ACTIVATIONS,
    Artifact,
    Resolved,
    Takes,
    options_of,
    refuse_others,
    without_corrections,
)
from resnet8ptq.backends.openvino import archive, profiler
from resnet8ptq.backends.openvino.library import library, read_graph
from resnet8ptq.backends.openvino.quantizer import OpenvinoQuantizer, RunsInOpenvino
from resnet8ptq.backends.openvino_nncf import BACKEND
from resnet8ptq.backends.openvino_nncf.options import NncfConfig
from resnet8ptq.core import files, isolation
from resnet8ptq.core.errors import QuantizationError, UnsupportedError, errors_as
from resnet8ptq.core.records import feed
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.lazy import LazySamples, in_parts
from resnet8ptq.graph.attention import find_attention
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions

log = logging.getLogger(__name__)

_MISSING = "backend=openvino_nncf: got no package nncf; try pip install 'resnet8ptq[nncf]'"
_OWN = "NNCF chooses the operators to quantize"
_RANGES = "NNCF chooses the ranges itself"
_PRESET = "backend.preset sets it"
_TAKES: Takes = {
    "method": (["static"], f"NNCF is static here; {WITH_ACTIVATIONS['method'][1]}"),
    "dtype.name": (["int8"], "NNCF has int8 kernels only, with weights of 8 bits; expected int8"),
    "calib.name": (["minmax"], f"{_RANGES}; expected minmax for them"),
    "calib.table": ([None], _RANGES),
    "format": ([None], "only for ONNX files"),
    "symmetric.weights": ([None, True], "NNCF's weights have no zero point"),
    "symmetric.activations": ([None], _PRESET),
    "nodes_to_quantize": ([None], _OWN),
    "nodes_to_exclude": ([[]], _OWN),
    "op_types": ([None], _OWN),
    "float_output": ([False], _OWN),
    "float_tail": ([False, None], f"{_OWN}; expected float_tail=false"),
    "precision.plan": ([None], _OWN),
    "slim": ([False], "only for ONNX and TFLite files"),
    **without_corrections("NNCF corrects by itself: backend.bias_correction"),
}


class NncfQuantizer(RunsInOpenvino):
    """Quantizes with NNCF, and runs the archive in OpenVINO."""

    widths: ClassVar[tuple[int, ...]] = (8,)

    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        """Return the dtypes, bits and schemes of NNCF's file, with OpenVINO as the engine.

        See `contract.Quantizer`.
        """
        if self.config.dtype.is_fp32:
            return self.with_engine(Resolved())
        if not BACKEND.is_installed:
            raise UnsupportedError(_MISSING)
        refuse_others(self.config, _TAKES)
        options = self._options

        # Without a preset, NNCF uses mixed for a transformer, and performance for other networks
        mixed = options.preset == "mixed" or (not options.preset and options.model_type)
        weight_bits = 7 if self.config.reduce_range else 8
        activation_scheme = "affine" if mixed else "symmetric"
        resolved = Resolved(
            weight_dtype="int8",
            activation_dtype="uint8",
            execution="integer",
            weight_bits=weight_bits,
            activation_bits=8,
            weight_scheme="symmetric",
            activation_scheme=activation_scheme,
            file_format="OpenVINO IR",
        )
        return self.with_engine(resolved)

    def fit(self, model: Fp32Model) -> dict[str, object]:
        """Check that OpenVINO reads the network; return no settings, see `contract.Quantizer`.

        Unless dtype=fp32, the function warns if `model_type` is not set for a network with
        attention: NNCF then also quantizes normalizations and sums.
        """
        with errors_as(UnsupportedError, "backend=openvino_nncf: OpenVINO cannot read the network"):
            read_graph(model.onnx_path)

        # NNCF does not look for attention itself
        is_unset = not self.config.dtype.is_float and not self._options.model_type
        if is_unset and find_attention(onnx.load(model.onnx_path).graph):
            log.warning(
                "backend.model_type: got null for a network with attention, whose outliers NNCF "
                "then rounds; try backend.model_type=transformer"
            )
        return {}

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        """Write NNCF's network as an archive, or FP32 as an ONNX file; see `contract.Quantizer`.

        Raises:
            UnsupportedError: a setting does not apply, NNCF cannot quantize the network, every
                layer of its file runs in float, or OpenVINO cannot compile it.
            QuantizationError: NNCF crashes.
        """
        self.resolve()
        if self.config.dtype.is_fp32:
            float_file = OpenvinoQuantizer(self.config, self.runtime)
            return float_file.quantize(model, decisions, calibration, folder)

        # The other process reads the samples from a file, one by one
        crashed = QuantizationError(f"{model.onnx_path}: quantizing it crashed NNCF")
        settings = self._options, self.config.per_channel, self.config.reduce_range
        with tempfile.TemporaryDirectory() as scratch:
            stored = Path(scratch, "samples.npy")
            _store(calibration.stored, stored)
            samples = replace(calibration, stored=calibration.stored[:0])
            paths = model.onnx_path, stored
            content = isolation.call(quantize, *paths, samples, *settings, crashed=crashed)

        # NNCF may leave all layers in float without an error
        path = folder / f"model{archive.SUFFIX}"
        files.write_bytes(path, content)
        on_integers, in_float = profiler.count_kernels(path)
        if not on_integers:
            path.unlink()
            raise UnsupportedError(
                f"backend=openvino_nncf: all {in_float} layers of NNCF's file run in float"
            )
        return Artifact(
            path, quantized_layers=on_integers, ranges={}, details={"float_layers": str(in_float)}
        )

    @property
    def _options(self) -> NncfConfig:
        return options_of(self.config, NncfConfig)


def quantize(
    network: Path,
    stored: Path,
    samples: Split,
    options: NncfConfig,
    per_channel: bool,
    reduce_range: bool | None,
) -> bytes:
    """Quantize an ONNX file by NNCF; return an archive of OpenVINO's files.

    Call this in a separate process, because it silences the stdout of the process.

    Args:
        network: the ONNX file.
        stored: the file with the values of the samples, which are read one by one.
        samples: the calibration samples without their values.
        reduce_range: whether weights have 7 bits; None if only those of the first convolutions do.

    Raises:
        UnsupportedError: NNCF or OpenVINO cannot process the network.
    """
    samples = replace(samples, stored=np.load(stored, mmap_mode="r"))
    openvino = library()  # called before NNCF, to disable the telemetry of both
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    why = "backend=openvino_nncf: NNCF cannot quantize the network"
    with errors_as(UnsupportedError, why, "try backend=openvino"):
        import nncf
        from nncf.quantization.advanced_parameters import QuantizationParameters

        nncf.set_log_level(logging.ERROR)
        graph = read_graph(network)
        names = [value.get_any_name() for value in graph.inputs]
        preset = None
        if options.preset:
            preset = nncf.QuantizationPreset(options.preset)
        model_type = None
        if options.model_type:
            model_type = nncf.ModelType(options.model_type)

        # Translate the settings
        channels = QuantizationParameters(per_channel=per_channel)
        fix = {None: None, True: nncf.OverflowFix.ENABLE, False: nncf.OverflowFix.DISABLE}
        smooth = nncf.AdvancedSmoothQuantParameters()
        if not options.smooth_quant:
            smooth.matmul = -1  # off

        # NNCF gets indices as its data, so that it reads one sample at a time
        def read_sample(number: int) -> Any:
            return feed(samples.inputs(np.array([number])), names)

        quantized = nncf.quantize(
            graph,
            nncf.Dataset(range(len(samples)), read_sample),
            subset_size=len(samples),
            preset=preset,
            model_type=model_type,
            fast_bias_correction=options.bias_correction == "fast",
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                disable_bias_correction=options.bias_correction == "none",
                overflow_fix=fix[reduce_range],
                weights_quantization_params=channels,
                smooth_quant_alphas=smooth,
            ),
        )

        # Save equal networks as equal files
        renumber(quantized)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "model.xml")
            openvino.save_model(quantized, path, compress_to_fp16=False)
            return archive.pack(path.read_bytes(), path.with_suffix(".bin").read_bytes())


def _store(samples: LazySamples | NDArray[Any], path: Path) -> None:
    """Write samples into an .npy file in parts, because they may not fit in memory."""
    file = np.lib.format.open_memmap(path, "w+", samples.dtype, samples.shape)
    start = 0
    for part in in_parts(samples):
        file[start : start + len(part)] = part
        start += len(part)
    file.flush()


def renumber(graph: Any) -> None:
    """Rename the operators that OpenVINO has named, by their type and position, in place.

    OpenVINO numbers operators without a name by a counter of the process, so equal settings would
    give different files.
    """
    for position, operator in enumerate(graph.get_ordered_ops()):
        kind = operator.get_type_name()
        if re.fullmatch(rf"{kind}_\d+", operator.get_friendly_name()):
            operator.set_friendly_name(f"{kind}_{position}")
