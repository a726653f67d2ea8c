"""Writes .tflite files, float or quantized, which LiteRT's interpreter runs.

`backend.flow` names the converter; `options.choose_flow` gives its default. With `convert`,
TensorFlow's converter converts and quantizes Keras files and SavedModels. With `onnx2tf`, onnx2tf
converts the ONNX graph of a network in any format, and ai-edge-quantizer quantizes the result. In
both flows, `weight_storage` writes the weights of dtype=fp16 and method=weight_only. With
`convert`, a float .tflite file is its own FP32 baseline.

TensorFlow's converter is the deployment path of MLPerf Tiny. The converter folds, calibrates and
places scales itself, so few settings apply; `resolve` and `fit` refuse others with a reason. After
corrections, fine-tuning, fewer bits or another calibration, `rewriting` writes the new weights and
ranges into the converter's file. Its ranges then come from `calibration.activations`.

The converter's calibrator (2.21) has a fault: it observes an operator's inputs again after the
operator ran. An addition overwrites its first input, whose range then includes the range of the
sum. The shortcut convolutions of a residual network thus lose many of their levels. Files that
`rewriting` changes have the true ranges.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import onnx
from ai_edge_litert.schema_py_generated import TensorType

from resnet8ptq.backends.contract import (
    WITH_16_BITS,
    WITH_ACTIVATIONS,
    Artifact,
    Quantizer,
    Resolved,
    Takes,
    check_same,
    options_of,
    refuse_others,
    resolve_stored,
    run_once,
    without_corrections,
)
from resnet8ptq.backends.tflite import (
    checking,
    contents,
    converter,
    correspondence,
    edge_quantizer,
    onnx_converter,
    predictor,
    rewriting,
    slim,
    weight_storage,
)
from resnet8ptq.backends.tflite.options import TfliteConfig
from resnet8ptq.calibration.methods import SHARED
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.core import files, isolation
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import find_stacks
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.models.sources.formats import is_tflites
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.plan import find_float_nodes

log = logging.getLogger(__name__)

MODEL_FILE = "model.tflite"

_ONNX_FILES = "only for ONNX files"
_OPERATORS = "the converter quantizes every operator"
_WIDTHS = "TFLite's kernels take int8 or int16 activations, and int8 or int4 weights"
_BOTH: Takes = {  # values that TensorFlow's converter and ai-edge-quantizer take
    "calib.name": (SHARED, f"torch's own observer; tflite takes {' | '.join(SHARED)}"),
    "format": ([None], _ONNX_FILES),
    "reduce_range": ([None, False], "TFLite's kernels take 8 bits"),
    "symmetric.weights": ([None, True], "TFLite's weights have no zero point"),
}
_CONVERT_TAKES: Takes = {
    "method": WITH_ACTIVATIONS["method"],
    "dtype.name": (["int8", "w4a8", "w8a16"], _WIDTHS),
    "nodes_to_quantize": ([None], _OPERATORS),
    "nodes_to_exclude": ([[]], _OPERATORS),
    "op_types": ([None], _OPERATORS),
    "float_output": ([False], _OPERATORS),
    "float_tail": ([False, None], f"{_OPERATORS}; expected float_tail=false"),
    "corrections.smooth_quant": ([False], "the converter's file keeps the network's scales"),
    "symmetric.activations": ([None, False], "TFLite's activations have a zero point"),
    **_BOTH,
}
_ONNX2TF = "backend.flow=onnx2tf"
_ONNX2TF_TAKES: Takes = {
    "method": (["static", "qat"], f"{_ONNX2TF} is static; {WITH_ACTIVATIONS['method'][1]}"),
    "dtype.name": (["int8", "w8a16"], f"{_ONNX2TF} takes int8 | w8a16; {_WIDTHS}"),
    "float_output": ([False], "TFLite's integer layers return 8 bits"),
    **_BOTH,
}
_STORED = "the weights of all layers are stored in 8 bits; try backend=onnx"
_STORED_TAKES: Takes = {
    "op_types": ([None], _STORED),
    "nodes_to_quantize": ([None], _STORED),
}
_DYNAMIC = "with method=dynamic the converter's weights stay unchanged"
_DYNAMIC_TAKES: Takes = {
    "dtype.name": (["int8"], _DYNAMIC),
    "precision.plan": ([None], _DYNAMIC),
    **without_corrections(_DYNAMIC),
}
_WIDE = "16-bit activations of TFLite are symmetric"
_ONLY_CONVERTED = f"dtype=w8a16 takes the calibration of TensorFlow's converter; try {_ONNX2TF}"
_WIDE_TAKES = {
    "convert": {
        **WITH_16_BITS,
        "calib.name": (["minmax"], _ONLY_CONVERTED),
        "calib.table": ([None], _ONLY_CONVERTED),
        "precision.plan": ([None], _ONLY_CONVERTED),
        **without_corrections(_ONLY_CONVERTED),
    },
    "onnx2tf": {**WITH_16_BITS, "symmetric.activations": ([None, True], _WIDE)},
}
_TAKES = {"convert": _CONVERT_TAKES, "onnx2tf": _ONNX2TF_TAKES}


class TfliteQuantizer(Quantizer):
    """Writes .tflite files by one of two converters, and runs them in LiteRT."""

    level_pools: ClassVar[tuple[str, ...]] = ()  # `rewriting` turns pools of whole maps into means

    @property
    def widths(self) -> tuple[int, ...]:
        """The weight bits that the flow supports; `FLOAT_BITS` stands for float layers."""
        return (8, FLOAT_BITS) if self._flow == "onnx2tf" else (4, 8)

    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        """Return the dtypes, the execution and the file format; see `contract.Quantizer`."""
        if self.config.dtype.is_fp32:
            return Resolved()
        decisions = decisions or self.asked
        if self.config.computes_in_float:
            if not self.config.dtype.is_float:
                refuse_others(self.config, _STORED_TAKES)
            return resolve_stored(self.config, file_format="TFLite")

        # Each flow, method and dtype accepts only some of the settings
        plan = self.plan(decisions)
        refuse_others(self.config, _TAKES[self._flow])
        if self._flow == "onnx2tf":
            if plan.is_narrow:
                raise UnsupportedError(f"precision.plan: {_ONNX2TF} takes 8 or {FLOAT_BITS} bits")
        elif self.select(decisions).float_layers:
            raise UnsupportedError(f"precision.plan: got {FLOAT_BITS} bits; {_OPERATORS}")
        if self._options.integer_io and self.config.method == "dynamic":
            raise UnsupportedError("backend.integer_io=true: method=dynamic takes floats only")
        if self.config.method == "dynamic":
            refuse_others(self.config, _DYNAMIC_TAKES)
        if self._is_wide:
            refuse_others(self.config, _WIDE_TAKES[self._flow])

        # Both converters write integer layers of the same dtypes
        resolved = Resolved(
            weight_dtype=plan.describe(),
            activation_dtype="int8",  # method=dynamic rounds activations at inference
            execution="integer",
            file_format="TFLite",
        )
        if self._is_wide:
            resolved = replace(resolved, activation_dtype="int16", activation_bits=16)
        return resolved

    def fit(self, model: Fp32Model) -> dict[str, object]:
        """Check that the network is folded, and that the flow supports its format and inputs.

        Returns no settings; see `contract.Quantizer`.
        """
        if not model.fold:
            raise UnsupportedError(
                "model.fold=false: backend=tflite always folds; try model.fold=true"
            )

        # Each converter has its own formats and inputs
        if self._flow != "onnx2tf" and not is_tflites(model.format, self.config.computes_in_float):
            raise UnsupportedError(
                f"backend.flow=convert: got {model.source.name}, expected a Keras file or a "
                "SavedModel; try backend.flow=onnx2tf"
            )
        contract = model.contract
        if len(contract.inputs) != 1:
            raise UnsupportedError(
                f"backend=tflite: got a network of {len(contract.inputs)} inputs "
                f"({contract.input_names}), expected one; try backend=onnx"
            )
        if self._flow == "onnx2tf":
            onnx_converter.check_input(model)
        return {}

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        """Write the float or quantized .tflite file; converters run in separate processes.

        Raises:
            UnsupportedError: `resolve`, `fit`, a converter, ai-edge-quantizer, `rewriting` or
                `weight_storage` refuses the network or a setting; onnx2tf crashes; the file ignores
                `per_channel`; or a single layer should stay in float32 although all weights are
                stored in fewer bits.
            QuantizationError: another process crashes, a range is not finite, no node or layer is
                quantized, the rewritten file lacks the chosen levels, or the slimmed file predicts
                differently.
            ConfigError: a setting names an unknown layer, node or operator, or the cache cannot be
                written.
            ModelError: see `converter.convert`.
        """
        self.resolve(decisions)
        path = folder / MODEL_FILE
        self.fit(model)

        # The ways to make a file: float, stored weights, onnx2tf, TensorFlow's converter
        if self.config.dtype.is_fp32:
            content = self._make_float(model, calibration)
            artifact = Artifact(path)
        elif self.config.computes_in_float:
            half = self.config.dtype.is_float
            if decisions.in_float:
                asked = "dtype=fp16" if half else "method=weight_only"
                listed = ", ".join(decisions.in_float)
                raise UnsupportedError(
                    f"{asked}: backend=tflite leaves no single layer in float32, such as {listed}; "
                    "try backend=onnx"
                )
            content = self._make_float(model, calibration)
            content, layers = weight_storage.store(content, half)
            artifact = Artifact(path, layers)
        elif self._flow == "onnx2tf":
            content, used = self._quantize_converted(model, decisions, calibration)
            artifact = replace(self._read(content, path), ranges=used)
        else:
            content = self._convert(model.source, calibration)
            content = self._rewrite(content, model, decisions, calibration)
            artifact = self._read(content, path)

        # Slim the quantized file, if it then predicts the same
        if self.config.slim and not self.config.dtype.is_fp32:
            slimmed = slim.slim(content)
            whole = predictor.open_run(content, self.runtime.threads)
            small = predictor.open_run(slimmed, self.runtime.threads)
            check_same(whole, small, calibration.batches(self.config.calib.batch_size))
            content = slimmed
        files.write_bytes(path, content)
        return artifact

    def verify(self, artifact: Artifact, model: Fp32Model, calibration: Split) -> dict[str, str]:
        """Run a sample; compare the kernels of an integer file with LiteRT's reference kernels."""
        params = run_once(
            self, artifact, calibration, read=lambda p: contents.read_model(p.read_bytes())
        )
        if self.config.computes_in_float:
            return params
        path = artifact.path
        threads = self.runtime.threads
        open_file = partial(predictor.open_run, path.read_bytes(), threads)
        open_fp32 = partial(open_runner, str(model.onnx_path), threads)
        return params | checking.compare_kernels(path.name, open_file, open_fp32, calibration)

    load = staticmethod(predictor.load)

    def count_kernels(self, path: Path) -> tuple[int, int]:
        """Count layers and BATCH_MATMULs by their dtypes, which LiteRT keeps."""
        model = contents.read_model(path.read_bytes())
        quantized, in_float = self._split(model)
        on_integers = len(quantized)
        for code, operator in contents.operators(model):
            if code != "BATCH_MATMUL":
                continue
            if contents.is_integer(model, operator):
                on_integers += 1
            else:
                in_float += 1
        return on_integers, in_float

    def _split(self, model: Any) -> tuple[list[Any], int]:
        """Return the weights of a file's quantized layers, and the number of other layers."""
        # The dtype of a quantized layer's output depends on the method
        output = TensorType.INT8
        if self.config.method == "dynamic":
            output = TensorType.FLOAT32
        elif self._is_wide:
            output = TensorType.INT16

        # With float weights or another output, a layer runs in float
        quantized = []
        in_float = 0
        for layer in contents.layers(model):
            is_narrow = layer.weights.type in (TensorType.INT8, TensorType.INT4)
            if is_narrow and layer.output.type == output:
                quantized.append(layer.weights)
            else:
                in_float += 1
        return quantized, in_float

    def profile(self, path: Path, threads: int) -> NoReturn:
        """Raise `UnsupportedError`: the interpreter times no operators."""
        raise UnsupportedError(
            "backend=tflite: LiteRT's interpreter times no operators in Python; its "
            "benchmark_model does, with --enable_op_profiling=true"
        )

    @property
    def _is_wide(self) -> bool:
        return self.config.dtype.name == "w8a16"

    @property
    def _options(self) -> TfliteConfig:
        return options_of(self.config, TfliteConfig)

    @property
    def _flow(self) -> str:
        return self._options.flow or "convert"

    def _make_float(self, model: Fp32Model, samples: Split) -> bytes:
        if self._flow == "onnx2tf":
            return onnx_converter.convert(model, samples, self.runtime)
        if model.format == "tflite":
            return model.source.read_bytes()
        return self._convert(model.source, samples)

    def _quantize_converted(
        self, model: Fp32Model, decisions: Decisions, calibration: Split
    ) -> tuple[bytes, dict[str, Range]]:
        """Convert the ONNX graph and quantize the file.

        Returns the file's content and the activation ranges, by ONNX tensor name.
        """
        config = self.config
        network = model.onnx_path
        preset = decisions.ranges
        content = onnx_converter.convert(model, calibration, self.runtime)
        count = min(correspondence.SAMPLES, len(calibration))
        some = np.concatenate([*calibration.take(np.arange(count)).batches(count)])
        by_index = correspondence.find_onnx_names(content, network, some)
        graph = onnx.load(network).graph

        # Choose the operators that the settings ask for and that have integer kernels
        file = contents.read_model(content)
        rewriting.pools_to_means(file)
        skipped = find_float_nodes(graph, self.select(decisions))
        if config.per_channel:  # TFLite's kernel for several matrices takes one scale
            skipped = [*skipped, *find_stacks(graph)]
        operators = edge_quantizer.find_quantized(
            file, names=by_index, graph=graph, skipped=skipped
        )
        around = edge_quantizer.tensors_around(file, operators)

        # Find ranges by ONNX name, because corrections set some of them
        names = {}
        for index, alike in by_index.items():
            if index in around:
                chosen = [name for name in alike if name in preset]
                # The last of equal tensors is the output of a fused activation
                names[index] = chosen[-1] if chosen else alike[-1]
        activations = self.activations(model, decisions, calibration)
        ranges = activations.find_ranges(dict.fromkeys(names.values()))
        known = {}
        for index, name in names.items():
            if name in ranges:
                known[index] = ranges[name]

        # Quantize; 16-bit activations are symmetric
        symmetric = bool(config.symmetric.activations)
        integer_io = self._options.integer_io
        wide = self._is_wide
        scheme = edge_quantizer.Scheme(
            config.per_channel, symmetric=symmetric or wide, integer_io=integer_io, wide=wide
        )
        return edge_quantizer.quantize(file, operators, ranges=known, scheme=scheme), ranges

    def _convert(self, source: Path, calibration: Split) -> bytes:
        quantized = not self.config.computes_in_float
        calibrated = quantized and self.config.method != "dynamic"
        samples = None
        if calibrated:
            # The other process gets only these samples, not the file that holds them.
            samples = replace(calibration, stored=calibration.stored[:])
        integer_io = self._options.integer_io is not False  # null means true in this flow
        settings = (quantized, self.config.per_channel, integer_io, self._is_wide)
        crashed = QuantizationError(f"{source}: converting it crashed TensorFlow")
        return isolation.call(converter.convert, source, samples, *settings, crashed=crashed)

    def _rewrite(
        self, content: bytes, model: Fp32Model, decisions: Decisions, calibration: Split
    ) -> bytes:
        """Return the converter's file with the weights and ranges of this run.

        The file stays unchanged with method=dynamic, and if the converter has already written these
        weights and ranges.
        """
        config = self.config
        plan = self.plan(decisions)
        if config.method == "dynamic":
            return content

        # The converter's own file has minmax ranges, 8 bits, and the weights of the source
        changed = decisions.ranges or config.calib.name != "minmax" or model.uncorrected
        if not (changed or plan.is_narrow or plan.bits):
            return content

        # Layers are matched by the weights that the converter has read, before corrections
        activations = self.activations(model, decisions, calibration)
        fp32 = onnx.load(model.uncorrected or model.onnx_path).graph
        corrected = onnx.load(model.onnx_path).graph
        return rewriting.write_corrected(
            content, fp32, corrected, plan=plan, ranges=activations.find_around([])
        )

    def _read(self, content: bytes, path: Path) -> Artifact:
        """Return the artifact, with layers, ranges and details that are read from the file.

        Raises:
            QuantizationError: the file has no quantized layer.
            UnsupportedError: a layer has another number of scales than `per_channel` asks for.
        """
        model = contents.read_model(content)
        quantized, in_float = self._split(model)
        if not quantized:
            raise QuantizationError(f"backend.flow={self._flow} quantized nothing")

        # The converter's option for scales per channel is not public, so its effect is checked
        per_channel = self.config.per_channel
        for weights in quantized:
            scales = len(weights.quantization.scale)
            channels = int(weights.shape[weights.quantization.quantizedDimension])
            expected = channels if per_channel else 1
            if scales != expected:
                raise UnsupportedError(
                    f"per_channel={str(per_channel).lower()}: backend.flow={self._flow} gave "
                    f"{contents.name_of(weights)} {scales} scales for {channels} channels"
                )

        # Report the layers that stay in float
        details = {"float_layers": str(in_float)}
        if self._flow == "onnx2tf":
            bits = 16 if self._is_wide else 8
            details[f"operators_in_{bits}_bits"] = contents.count_integer(model)
        elif in_float:  # dynamic-range quantization skips weights of under 1,024 values
            count = in_float + len(quantized)
            log.warning("TFLite's converter left %d of %d layers in float", in_float, count)
        return Artifact(
            path, quantized_layers=len(quantized), ranges=_activation_ranges(model), details=details
        )


def _activation_ranges(model: Any) -> dict[str, Range]:
    """Return the range that each integer activation can hold, by a name of its tensor.

    The name of a fused tensor lists its parts, separated by semicolons. The key is the first part,
    unless an earlier tensor has that key; then it is the whole name.
    """
    ranges: dict[str, Range] = {}
    for tensor in model.subgraphs[0].tensors:
        if tensor.type in contents.ACTIVATIONS and not contents.is_constant(model, tensor):
            ends = np.iinfo(contents.ACTIVATIONS[tensor.type])
            scale = float(tensor.quantization.scale[0])
            zero_point = int(tensor.quantization.zeroPoint[0])
            whole = contents.name_of(tensor)
            first = whole.partition(";")[0]
            name = whole if first in ranges else first
            ranges[name] = (scale * (ends.min - zero_point), scale * (ends.max - zero_point))
    return ranges
