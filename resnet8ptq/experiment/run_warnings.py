"""Warnings of a run: sums that saturate, few bits in depthwise layers, noise, large files.

Weights that the quantized file stores twice are logged too.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence

import onnx

from resnet8ptq.backends import kernels
from resnet8ptq.backends.contract import Resolved
from resnet8ptq.calibration.outliers import Outliers
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import machine
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.graph.embeddings import find_tied
from resnet8ptq.graph.layers import channel_axis, is_grouped, weight_layers

log = logging.getLogger(__name__)

LOW_SQNR_DB = 10.0  # the noise has a tenth of the signal's power
TINY_BYTES = 2**14  # bytes of weights; operators, names and scales of a file need about as many
MANY_SCALES = 6  # weights for each scale, below which scale and zero point cost what 8 bits save


def warn_before(config: RunConfig, resolved: Resolved, graph: onnx.GraphProto) -> bool:
    """Warn about saturation and few bits in depthwise layers; return whether sums may saturate.

    The function also logs weights that the quantized file stores twice.
    """
    saturates = _warn_of_saturation(resolved, graph)
    _warn_of_depthwise(config, resolved, graph)
    if config.backend.quantizes and not config.dtype.is_float:
        _report_tied_weights(graph)
    return saturates


def warn_of_noise(
    config: RunConfig,
    sqnr_db: float | None,
    saturates: bool,
    outliers: Sequence[Outliers],
    samples: Split,
) -> None:
    """Warn if the outputs of the quantized network are far from those of FP32.

    Args:
        outliers: calibration samples that stand out; if there are any, the warning describes the
            first entry with its mend, and suggests no other setting.
        samples: the calibration samples.
    """
    if sqnr_db is not None and sqnr_db < LOW_SQNR_DB:
        if outliers:
            which = outliers[0].describe(samples)
            mend = outliers[0].mend(config.calib)
            text = "SQNR %.1f dB: far from FP32's outputs. First, %s, since %s"
            log.warning(text, sqnr_db, mend, which)
            return
        finest = config.per_channel or config.method == "weight_only"
        finer = "nodes_to_exclude=auto" if finest else "per_channel=true"
        settings = "reduce_range=true" if saturates else finer
        log.warning("SQNR %.1f dB: far from FP32's outputs; %s may help", sqnr_db, settings)


def warn_of_size(
    graph: onnx.GraphProto, size_bytes: float, fp32_bytes: float, settings: Settings
) -> None:
    """Warn if the quantized file is larger than the FP32 file, with the reason if it is known."""
    if size_bytes > fp32_bytes:
        log.warning(
            "the quantized file is larger than FP32's (%.1f kB, %.1f kB)%s",
            size_bytes / 1000,
            fp32_bytes / 1000,
            _find_growth(graph, settings),
        )


def _find_growth(graph: onnx.GraphProto, settings: Settings) -> str:
    """Return why the file is larger than FP32's, and a mend if there is one; empty if unknown."""
    layers = weight_layers(graph).values()
    read = Counter(node.input[1] for node in layers)
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.name in read}
    sizes = {name: math.prod(tensor.dims) for name, tensor in tensors.items()}
    stored = sum(sizes.values())
    channels = sum(tensors[node.input[1]].dims[channel_axis(node)] for node in layers)
    copies = sum((read[name] - 1) * size for name, size in sizes.items())
    constants = 0  # with those of layers that stay in float, such as LSTMs
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            constants += math.prod(tensor.dims)

    # The first reason that fits explains the most bytes
    shorter = "; try slim=true" if _could_be_slim(settings) else ""
    if 4 * constants < TINY_BYTES:
        kilobytes = f"{4 * constants / 1000:.1f} kB"
        return f": its weights have {kilobytes} only, so scales and names weigh more{shorter}"
    if copies > 3 * stored:  # the copies have more bytes than 8 bits save
        return ": weights that several layers share are stored for each of them"
    if settings.config.per_channel and stored < MANY_SCALES * channels:
        return ": there is a scale for every few weights; try per_channel=false"
    if shorter:
        return f": the names and nodes of its scales weigh more than the weights save{shorter}"
    return ""


def _could_be_slim(settings: Settings) -> bool:
    """Return whether `slim` is false, and the backend accepts `slim=true`."""
    if settings.config.slim:
        return False
    try:
        settings.vary(slim=True).quantizer.resolve()
    except UnsupportedError:
        return False
    return True


def _warn_of_saturation(resolved: Resolved, graph: onnx.GraphProto) -> bool:
    """Warn if sums may saturate in this CPU's kernels; return whether they may."""
    operators = {node.op_type for node in graph.node}
    saturates = kernels.saturates(resolved, operators, machine.cpu()[1])
    if saturates:
        log.warning(
            "this CPU has no VNNI: 16-bit sums of %s activations and %s weights may saturate, and "
            "make the outputs wrong; %s avoids it",
            resolved.activation_dtype,
            resolved.weight_dtype,
            kernels.avoid_saturation(resolved),
        )
    return saturates


def _warn_of_depthwise(config: RunConfig, resolved: Resolved, graph: onnx.GraphProto) -> None:
    """Warn about weights below 8 bits in grouped convolutions, such as depthwise ones.

    A depthwise channel sums few products, mostly nine, so rounding errors do not average out and
    shift its mean output. With bias correction, learned rounding or training, which act against
    the shift, there is no warning.
    """
    changes = config.corrections
    corrected = changes.bias_correction or changes.adaround or changes.reconstruction
    elsewhere = config.method in ("qat", "weight_only")  # weights are trained, or stay in float
    if corrected or elsewhere or (resolved.weight_bits or 8) >= 8:
        return
    grouped = sum(map(is_grouped, graph.node))
    if grouped:
        log.warning(
            "%d-bit weights in %d depthwise convolutions: rounding shifts the mean of their "
            "channels, and much accuracy may be lost; corrections.bias_correction=true takes "
            "seconds, experiment=flagship learns the rounding",
            resolved.weight_bits,
            grouped,
        )


def _report_tied_weights(graph: onnx.GraphProto) -> None:
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    for table, product in find_tied(graph):
        log.info(
            "%s and %s have the same weights, %s values: the quantized file stores them twice",
            table.name,
            product.name,
            f"{sizes[table.input[0]]:,}",
        )
