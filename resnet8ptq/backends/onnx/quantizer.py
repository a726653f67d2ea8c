"""The quantizer of `backend=onnx`, with every method of `method=`; the artifact is an ONNX file."""

import itertools
import logging
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import onnx
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.calibrate import CalibrationMethod, save_tensors_data
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from resnet8ptq.backends.contract import (
    WITH_16_BITS,
    WITH_ACTIVATIONS,
    Artifact,
    Predict,
    Predictor,
    Profiler,
    Quantizer,
    Resolved,
    Takes,
    check_same,
    refuse_empty,
    refuse_others,
    resolve_stored,
    run_once,
    running,
)
from resnet8ptq.backends.onnx import (
    checking,
    dynamic,
    mixed,
    predictor,
    profiler,
    rewriting,
    weight_only,
    weight_storage,
)
from resnet8ptq.backends.onnx.slim import slim
from resnet8ptq.calibration import table
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.methods import SHARED
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.config.schema import DTYPES
from resnet8ptq.core import files
from resnet8ptq.core.errors import QuantizationError, UnsupportedError, errors_as
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.attention import attention_products, find_attention
from resnet8ptq.graph.embeddings import find_tables
from resnet8ptq.graph.layers import (
    LAYERS,
    RECURRENT,
    find_split_groups,
    find_stacks,
    weight_layers,
)
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.passes import Pass, remove_unused, rewrite, sort
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.plan import Plan, find_float_nodes
from resnet8ptq.target.measure import CPU

log = logging.getLogger(__name__)

MODEL_FILE = "model.onnx"

FORMATS = {"qdq": QuantFormat.QDQ, "qoperator": QuantFormat.QOperator}
_METHODS = ("static", "dynamic", "mixed", "qat")
_NARROW_TAKES: Takes = {
    "method": (["static", "qat"], "weights below 8 bits are quantized statically"),
    "format": ([None, "qdq", "auto"], "weights below 8 bits take format=qdq"),
    "symmetric.weights": ([None, True], "weights below 8 bits are symmetric"),
}
_16_BITS_TAKES: Takes = {
    **WITH_16_BITS,
    "format": ([None, "qdq", "auto"], "16-bit activations take format=qdq"),
    "reduce_range": ([None, False], "no kernel sums 16-bit activations in 16 bits"),
}
# In a network with attention, float operators read these outputs: rounding gains nothing.
_FLOAT_OUTPUTS = ["MatMul", "Gemm"]
_INTEGER_LAYERS = ("QLinearConv", "QGemm", "QLinearMatMul")


class OnnxQuantizer(Quantizer):
    """Quantizes for ONNX Runtime, and runs the file there; see `contract.Quantizer`."""

    widths: ClassVar[tuple[int, ...]] = (2, 4, 8, FLOAT_BITS)

    @property
    def provider(self) -> str:
        """The execution provider that runs the files."""
        return self.config.backend.provider

    @property
    def level_pools(self) -> tuple[str, ...]:
        """AveragePool; none for format=qoperator, whose QLinearAveragePool has an output scale."""
        return () if self.config.format == "qoperator" else ("AveragePool",)

    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        """Return dtypes, schemes and the format; see `contract.Quantizer`.

        Raises:
            UnsupportedError: the execution provider is missing, or the backend does not support the
                settings.
        """
        config = self.config
        if self.provider != CPU:
            predictor.refuse_missing(self.provider)
        if config.dtype.is_fp32:
            return Resolved()
        if config.dtype.is_float:
            return resolve_stored(config, file_format="Cast")
        if config.method == "weight_only":
            return weight_only.resolve(config)

        # The other methods quantize both weights and activations
        refuse_others(config, {**WITH_ACTIVATIONS, "method": (_METHODS, "")})
        weights = WeightScheme.of(config, bool(config.reduce_range))
        dtype = DTYPES[config.dtype.name][0]
        # `fit` replaces `auto`, which depends on the network.
        file_format = {"qdq": "QDQ", "qoperator": "QOperator"}.get(config.format or "qdq")
        plan = Plan.of(decisions or self.asked, weights)

        # Each method and bit width accepts only some of the settings
        wide = dtype == "uint16"
        if plan.is_narrow:
            refuse_others(config, _NARROW_TAKES)
        if wide:
            refuse_others(config, _16_BITS_TAKES)
        if config.method == "dynamic":
            dynamic.refuse_static_settings(config)
            dtype = "uint8 (dynamic)"
            file_format = "IntegerOps"
        else:
            if config.method == "mixed":
                dtype = f"{dtype}, uint8 (dynamic)"
            own = f"torch's own observer; onnx takes {' | '.join(SHARED)}"
            refuse_others(config, {"calib.name": (SHARED, own)})
        resolved = Resolved(
            weight_dtype=plan.describe(),
            weight_scheme=_name_scheme(weights.symmetric),
            weight_bits=plan.most_bits,
            activation_dtype=dtype,
            activation_scheme=_name_scheme(bool(config.symmetric.activations)),
            execution="integer",
            file_format=file_format,
        )
        if wide:
            resolved = replace(resolved, activation_bits=16)
        if wide or plan.is_narrow:  # ONNX Runtime has no integer kernel for these widths
            resolved = replace(resolved, execution="simulated")
        return resolved

    def fit(self, model: Fp32Model) -> dict[str, object]:
        """Check that the settings suit the network, and choose the format if it is `auto`.

        method=dynamic is not checked here. With method=weight_only, `op_types` becomes the
        operators that the method quantizes. See also `contract.Quantizer`.

        Raises:
            UnsupportedError: the network has no layer for method=weight_only or dtype=fp16, no
                convolution or no dynamic layer for method=mixed, or `float_output` is impossible.
            QuantizationError, ConfigError: see `contract.Quantizer`.
        """
        config = self.config
        if config.dtype.is_fp32 or config.method == "dynamic":
            return {}
        graph = onnx.load(model.onnx_path).graph
        if config.dtype.is_float:
            weight_storage.check_storable(graph, (), half=True)
            return {}

        # Refuse a selection that leaves nothing to quantize
        skipped = find_float_nodes(graph, self.select(self.asked))
        if config.method == "mixed":
            mixed.check_both_kinds(graph, skipped)
            skipped, _ = self._find_skipped(graph, self.asked)
        if config.method == "weight_only":
            operators = weight_only.find_operators(config)
            others = [node.name for node in graph.node if node.op_type not in operators]
            weight_only.check_layers(graph, [*skipped, *others], config)
            return {"op_types": operators}

        # The format depends on the operators and on `float_output`
        if config.float_output:
            rewriting.find_output_nodes(graph)
        if config.format == "auto":
            return {"format": self._choose_format(graph, self.asked, skipped)}
        if config.float_output and config.format == "qoperator":
            rewriting.check_float_output(graph, skipped)
        return {}

    def _choose_format(
        self, graph: onnx.GraphProto, decisions: Decisions, skipped: Collection[str]
    ) -> str:
        """Return the format of the settings, by default qdq.

        `auto` becomes qoperator, whose files are smaller, unless `_why_qdq` has a reason.
        """
        asked = self.config.format or "qdq"
        if asked != "auto" or self.config.method == "dynamic":
            return asked
        why = self._why_qdq(graph, decisions, skipped)
        if why:
            log.info("format=auto: qdq (%s)", why)
            return "qdq"
        log.info("format=auto: qoperator")
        return "qoperator"

    def _why_qdq(
        self, graph: onnx.GraphProto, decisions: Decisions, skipped: Collection[str]
    ) -> str:
        """Return the reason against format=qoperator; empty if there is none."""
        if self.plan(decisions).is_narrow:
            return "weights are below 8 bits"
        if self.config.dtype.name == "w8a16":
            return "activations have 16 bits"
        if self._leaves_outputs_in_float(graph):
            return "matrix products return float before the float operators of attention"

        # QDQ quantizes more operators
        kinds = {node.op_type for node in graph.node if node.name not in skipped}
        without = kinds & QDQRegistry.keys() - QLinearOpsRegistry.keys()
        if without:
            return f"qoperator has no integer operator for {', '.join(sorted(without))}"
        try:
            if self.config.float_output:
                rewriting.check_float_output(graph, skipped)
        except UnsupportedError as error:
            _, _, reason = str(error).partition(": ")  # without the setting, and without the mend
            return reason.partition(";")[0]
        return ""

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        """Quantize by the method, then run the passes of `_passes`; see `contract.Quantizer`.

        dtype=fp32 copies the network instead, and dtype=fp16 stores its weights in float16.
        """
        path = folder / MODEL_FILE
        config = self.config
        calibrated: dict[str, Range] = {}
        details: dict[str, str] = {}
        with files.atomic(path) as temporary, tempfile.TemporaryDirectory() as scratch:
            if config.dtype.is_fp32:
                shutil.copyfile(model.onnx_path, temporary)
                return Artifact(path)
            proto = onnx.load(model.onnx_path)
            if config.dtype.is_float:
                weight_storage.check_storable(proto.graph, decisions.in_float, half=True)
                proto = weight_storage.quantize(proto, decisions.in_float, half=True)
                self._save(proto, temporary, calibration)
                return Artifact(path, weight_storage.count_layers(proto.graph))

            # The methods from here on compute some layers on integers
            skipped, dynamic_nodes = self._find_skipped(proto.graph, decisions)
            file_format = self._choose_format(proto.graph, decisions, skipped)
            tables = self._find_tables(proto.graph, decisions, skipped)
            skipped += tables
            narrow = self._find_narrow(proto.graph, decisions, skipped)

            # ONNX Runtime writes files next to its input, which must not be in the cache.
            source = Path(scratch, model.onnx_path.name)
            least = min((scheme.bits for scheme in narrow.values()), default=8)
            if narrow or config.dtype.name == "w8a16":
                onnx.save(rewriting.raise_opset_for_bits(proto, least), source)
            else:
                onnx.save(proto, source)

            # Quantize by the method
            if config.method == "dynamic":
                dynamic.quantize(source, path=temporary, skipped=skipped, config=config)
            elif config.method == "weight_only":
                weight_only.quantize(source, path=temporary, skipped=skipped, config=config)
                details = weight_only.describe_left(proto.graph, skipped, config)
            else:
                if dynamic_nodes:  # method=mixed quantizes these first
                    names = [node.name for node in proto.graph.node]
                    others = [name for name in names if name not in dynamic_nodes]
                    dynamic.quantize(source, path=source, skipped=others, config=config)
                activations = self.activations(model, decisions, calibration)
                calibrated = self._quantize_static(
                    source,
                    path=temporary,
                    graph=proto.graph,
                    skipped=skipped,
                    file_format=file_format,
                    activations=activations,
                )

            # Change the file where ONNX Runtime's quantizer lacks an option
            written = onnx.load(temporary)
            count = self._count(written, proto.graph, file_format)
            written = rewrite(written, self._passes(proto.graph, narrow, tables))
            self._save(written, temporary, calibration)
        return Artifact(path, quantized_layers=count, ranges=calibrated, details=details)

    def _save(self, written: onnx.ModelProto, path: Path, calibration: Split) -> None:
        """Save a file; with the setting `slim`, save the copy that `slim.slim` makes.

        Raises:
            QuantizationError: the slim file is invalid, or gives other outputs on a batch of
                calibration samples.
            UnsupportedError: ONNX Runtime cannot run the whole file or the slim one.
        """
        if not self.config.slim:
            return onnx.save(written, path)
        onnx.save(slim(written), path)
        with errors_as(QuantizationError, "slim: the slimmed file is invalid"):
            predictor.check_file(path)
        # Compare without graph optimization: with it, a slim copy (96 convolutions) rounded
        # differently.
        batches = calibration.batches(self.config.calib.batch_size)
        threads = self.runtime.threads
        with running(self.config.backend.name):
            whole = open_runner(written, threads, optimized=False)
            small = open_runner(str(path), threads, optimized=False)
            # The outputs would differ if a constant was lost
            check_same(whole, small, itertools.islice(batches, 1))

    def _find_skipped(
        self, graph: onnx.GraphProto, decisions: Decisions
    ) -> tuple[list[str], list[str]]:
        """Return names of nodes: those without a static range, and those that become dynamic.

        Only method=mixed has dynamic nodes here. Both lists then contain them. With other methods,
        the first list has the nodes that stay in float.
        """
        skipped = find_float_nodes(graph, self.select(decisions))
        if self.config.method != "mixed":
            return skipped, []
        products = mixed.find_dynamic(graph, skipped)
        return mixed.find_not_static(graph, {*skipped, *products}), products

    def _count(self, written: onnx.ModelProto, network: onnx.GraphProto, file_format: str) -> int:
        """Return the number of quantized layers; refuse a file without any.

        Raises:
            UnsupportedError: the network has products of several matrices, for which ONNX Runtime
                lacks a kernel with these settings.
            QuantizationError: no layer is quantized for another reason.
        """
        count = count_quantized_layers(written)
        if count > 0:
            return count

        # Products of several matrices and an LSTM are causes that other settings avoid
        on_operators = self.config.method == "dynamic" or file_format == "qoperator"
        if self.config.per_channel and on_operators:
            stacks = find_stacks(network)
            if stacks:
                raise UnsupportedError(
                    f"per_channel=true: the integer operators have no scales by channel for "
                    f"products of several matrices ({', '.join(stacks)[:100]}); try "
                    "per_channel=false, or method=static format=qdq"
                )
        if any(node.op_type in RECURRENT for node in network.node):
            refuse_empty("ONNX Runtime", network, "; method=dynamic quantizes its LSTM")
        refuse_empty("ONNX Runtime", network)

    def _passes(
        self, network: onnx.GraphProto, narrow: dict[str, WeightScheme], tables: Sequence[str]
    ) -> list[Pass]:
        """Return the passes over the quantized file, in order."""
        passes: list[Pass] = [
            rewriting.restore_outputs([value.name for value in network.output]),
            sort,  # the quantizer ignores the tensors that inner graphs use
            rewriting.write_narrow_weights(network, narrow),
        ]
        if self.config.float_output:
            passes.append(rewriting.leave_output_in_float)
        passes += [
            rewriting.quantize_tables(tables),
            remove_unused,
            rewriting.protect_float_layers,
            rewriting.keep_sums_apart,
        ]
        return passes

    def verify(self, artifact: Artifact, model: Fp32Model, calibration: Split) -> dict[str, str]:
        """Check the file, run one sample, and compare the kernels with the file's definition.

        Float dtypes have no kernels to compare. See also `contract.Quantizer`.
        """
        params = run_once(self, artifact, calibration, read=predictor.check_file)
        if self.config.dtype.is_float:
            return params

        # Compare the kernels with the definition and FP32
        path = artifact.path
        threads = self.runtime.threads
        open_fp32 = partial(open_runner, str(model.onnx_path), threads)

        def open_file(optimized: bool = True, without: Sequence[str] = ()) -> Predict:
            if not optimized:  # compute the definition node by node on the CPU
                return open_runner(str(path), threads, optimized=False)
            return predictor.open_kernels(path, threads, self.provider, without)

        return params | checking.compare_kernels(path.name, open_file, open_fp32, calibration)

    def _find_narrow(
        self, graph: onnx.GraphProto, decisions: Decisions, skipped: Collection[str]
    ) -> dict[str, WeightScheme]:
        """Return the schemes of quantized layers below 8 bits, by short name.

        There are none with method=weight_only, which stores such weights itself.
        """
        if self.config.method == "weight_only":
            return {}
        layers = weight_layers(graph)
        schemes = {}
        for name, scheme in self.plan(decisions).narrow(layers, attention_products(graph)).items():
            if layers[name].name not in skipped:
                schemes[name] = scheme
        return schemes

    def _find_tables(
        self, graph: onnx.GraphProto, decisions: Decisions, skipped: Collection[str]
    ) -> list[str]:
        """Return the names of the Gather nodes whose embedding tables get 8 bits.

        There are none if method=weight_only stores tables in 4-bit blocks, for `Gather` in
        `op_types`.
        """
        method = self.config.method
        if method == "weight_only" and "Gather" in weight_only.find_operators(self.config):
            return []
        if method in ("weight_only", "mixed"):  # no static layer reads the tables
            skipped = decisions.in_float
        return [node.name for node in find_tables(graph) if node.name not in skipped]

    def _find_unbounded(self, activations: Activations, skipped: Collection[str]) -> list[str]:
        """Return the nodes of `Activations.find_unbounded` that are not in `skipped`."""
        names = [name for name in activations.find_unbounded() if name not in skipped]
        if names:
            log.info("left in float, since values are infinite: %s", ", ".join(names)[:200])
        return names

    def _leaves_outputs_in_float(self, graph: onnx.GraphProto) -> bool:
        """Return whether matrix products return float, for the float operators of attention."""
        return self.config.attention != "all" and bool(find_attention(graph))

    def _find_unsplit(
        self, graph: onnx.GraphProto, left: Collection[str]
    ) -> dict[str, list[dict[str, str]]]:
        """Return the constants that keep one scale with per_channel=true, as quantizer options.

        The options of each constant are one empty entry, which stands for one scale. With a scale
        for each channel, products of several matrices do not run, and ONNX Runtime's quantizer
        fails on the bias of a grouped ConvTranspose.

        Args:
            left: names of the nodes that stay in float.
        """
        names = {*find_stacks(graph), *find_split_groups(graph)}.difference(left)
        nodes = [node for node in graph.node if node.name in names]
        if nodes:
            listed = ", ".join(node.name for node in nodes)
            log.info("per_channel: one scale for all channels of %s", listed[:200])
        constants = Links(graph).constants
        unsplit: dict[str, list[dict[str, str]]] = {}
        for node in nodes:
            for name in node.input[:2]:
                if name in constants:
                    unsplit[name] = [{}]
        return unsplit

    def _quantize_static(
        self,
        source: Path,
        path: Path,
        graph: onnx.GraphProto,
        skipped: Sequence[str],
        file_format: str,
        activations: Activations,
    ) -> dict[str, Range]:
        """Quantize `source` into `path`; return the ranges that ONNX Runtime's quantizer gets.

        Args:
            source: the file to quantize, which gets added nodes; ranges.json is written beside it.
            graph: the FP32 network, without the dynamic layers that `source` may have.
            skipped: names of the nodes without static ranges.
        """
        config = self.config

        # Nodes that ONNX Runtime's quantizer must not quantize; names, in order
        in_float = dict.fromkeys(skipped)
        if config.float_output:
            in_float |= dict.fromkeys(rewriting.find_output_nodes(graph))
        in_float |= dict.fromkeys(self._find_unbounded(activations, in_float))
        kept = rewriting.find_not_fused(graph, config.format == "qoperator")
        in_float |= dict.fromkeys(kept)

        # Calibrate the tensors around all other nodes
        ranges = activations.find_around(in_float)
        in_float |= dict.fromkeys(_find_without_range(graph, ranges))

        # Layers without a scale for each channel keep one scale; QOperator has no option for it
        whole: dict[str, list[dict[str, str]]] = {}  # options for weights with one scale
        if config.per_channel and file_format == "qoperator":
            in_float |= dict.fromkeys(find_stacks(graph))
        elif config.per_channel:
            whole = self._find_unsplit(graph, in_float)

        # Weights below 8 bits are int8 here, and written afterwards
        activation_dtype, weight_dtype = DTYPES[config.dtype.name]
        inputs = dynamic.INTEGERS[activation_dtype]
        weights = dynamic.INTEGERS.get(weight_dtype, QuantType.QInt8)

        # ONNX Runtime takes external ranges through its calibration cache.
        cache = source.with_name("ranges.json")
        save_tensors_data(table.as_tensors_data(ranges), cache)
        float_outputs: list[str] = []
        if self._leaves_outputs_in_float(graph):
            float_outputs = _FLOAT_OUTPUTS

        # Leave alone all nodes that FP32 lacks: added readers, and dynamic layers
        proto = rewrite(onnx.load(source), [rewriting.add_readers])
        known = {node.name for node in graph.node}
        added = [node.name for node in proto.graph.node if node.name not in known]
        in_float |= dict.fromkeys(added)
        onnx.save(proto, source)
        with _lines_counted():
            quantize_static(
                source,
                path,
                quant_format=FORMATS[file_format],
                activation_type=inputs,
                weight_type=weights,
                per_channel=config.per_channel,
                reduce_range=bool(config.reduce_range),
                nodes_to_exclude=[*in_float],
                calibrate_method=CalibrationMethod.MinMax,
                calibration_cache_path=cache,
                extra_options={
                    "ActivationSymmetric": bool(config.symmetric.activations),
                    "WeightSymmetric": config.symmetric.weights,
                    "OpTypesToExcludeOutputQuantization": float_outputs,
                    "TensorQuantOverrides": whole,
                },
            )
        return ranges

    count_kernels = staticmethod(profiler.count_kernels)

    def load(self, path: Path, threads: int) -> Predictor:
        """Load a file on the provider of the settings; see `contract.Quantizer`."""
        return predictor.load(path, threads, self.provider)

    def profile(self, path: Path, threads: int) -> AbstractContextManager[Profiler]:
        """Load a file to time its nodes on the CPU; see `contract.Quantizer`.

        Raises:
            UnsupportedError: the settings name another provider.
        """
        if self.provider != CPU:
            raise UnsupportedError(
                f"backend.provider={self.provider}: nodes are timed on the CPU only; a run's "
                "provider_nodes counts the nodes of each provider"
            )
        return profiler.profile(path, threads)


def _find_without_range(graph: onnx.GraphProto, ranges: Mapping[str, Range]) -> list[str]:
    """Return the names of the Softmax nodes without a range, such as those in float64.

    ONNX Runtime's quantizer replaces the calibrated range of each Softmax that it quantizes, and
    fails if there is no range to replace (1.31). It leaves other nodes without a range in float.
    """
    names = []
    for node in graph.node:
        if node.op_type == "Softmax" and node.output[0] not in ranges:
            names.append(node.name)
    return names


def _name_scheme(symmetric: bool) -> str:
    return "symmetric" if symmetric else "affine"


@contextmanager
def _lines_counted() -> Iterator[None]:
    """Replace ONNX Runtime's lines about biases beyond 32 bits by one line of each kind.

    ONNX Runtime logs a line for each raised weight scale, and for each bias that is cut off. Its
    lines about scales without a channel axis, tensors of types other than float, and copied biases
    are dropped.
    """
    raised = cut = 0

    def count(record: logging.LogRecord) -> bool:
        nonlocal raised, cut
        message = record.getMessage()
        raises = message.startswith(("Increased scale", "Increasing scale"))
        cuts = message.startswith("Quantized bias") and "exceeds the range" in message
        raised += raises
        cut += cuts
        # A normalization's scales have no second axis, so they are quantized per tensor.
        vector = message.startswith("Axis ") and message.endswith("with rank 1")
        # Tensors of integers, such as shapes, have no range
        integers = message.startswith("Inference failed or unsupported type")
        copied = message.startswith("Created a copy of bias input")
        return not (raises or cuts or vector or integers or copied)

    logging.getLogger().addFilter(count)  # a filter of the root sees only records of the root
    try:
        yield
    finally:
        logging.getLogger().removeFilter(count)
    if raised:
        log.info(
            "ONNX Runtime raised the weight scales of %d channels or layers, whose weights are too "
            "small relative to their 32-bit bias; the results include the effect",
            raised,
        )
    if cut:
        log.warning(
            "ONNX Runtime cut biases off at the ends of 32 bits (layers: %d), which may make the "
            "outputs wrong: the weights are too small relative to the bias; try dtype=int8 or "
            "dtype=u8s8, which raise the weights' scales",
            cut,
        )


def count_quantized_layers(proto: onnx.ModelProto) -> int:
    """Count the layers with quantized data and weights, or with weights alone in fewer bits.

    Layers with quantized data are convolutions, matrix products and dynamic LSTMs. In QDQ format,
    such a layer is a Conv, Gemm or MatMul whose first two inputs are dequantized. Weights alone are
    stored in blocks, or as `weight_storage.count_layers` describes.
    """
    nodes = proto.graph.node
    dequantized = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    by_operator = (*_INTEGER_LAYERS, *dynamic.LAYERS, weight_only.OPERATOR)
    count = weight_storage.count_layers(proto.graph)
    for node in nodes:
        in_qdq = node.op_type in LAYERS and dequantized.issuperset(node.input[:2])
        if node.op_type in by_operator or in_qdq:
            count += 1
    return count
