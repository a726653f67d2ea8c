"""Finds calibration samples that stand out, and values that dynamic ranges cannot hold.

Samples that stand out in the network's inputs are found without running the network. Samples that
stand out in tensors inside the network are found after calibration.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.outliers import Outliers, find_in_inputs
from resnet8ptq.config.schema import CalibConfig, RunConfig
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.attention import say_full_mask
from resnet8ptq.graph.layers import float_tensors
from resnet8ptq.graph.links import input_names
from resnet8ptq.graph.session import expose, open_runner

SAMPLES = 8  # that show whether values are finite


def check_inputs(calib: CalibConfig, graph: onnx.GraphProto, samples: Split) -> list[Outliers]:
    """Return the samples that stand out in an input, see `find_in_inputs`; warn about each input.

    The network is not run, so the check also works for frameworks that calibrate themselves.
    """
    outliers = list(find_in_inputs(samples, input_names(graph)))
    for outlier in outliers:
        outlier.warn(samples, calib)
    return outliers


def find_inside(
    calib: CalibConfig, network: Path, samples: Split, runtime: Runtime
) -> list[Outliers]:
    """Return the samples that stand out in a calibrated tensor of the network.

    The list is empty if the cache has no statistics of the network's activations.
    """
    return Activations(network, calibration=samples, calib=calib, runtime=runtime).outliers()


def check_dynamic(
    proto: onnx.ModelProto, layers: Iterable[onnx.NodeProto], samples: Split, threads: int
) -> None:
    """Check on a few samples that the inputs of quantized layers are finite.

    A NaN or an infinite value leaves no range for the other values of its tensor.

    Args:
        layers: the quantized layers; with method=mixed, also those with static ranges.

    Raises:
        QuantizationError: a layer's input has a NaN or an infinite value; the message names the
            layer.
    """
    taken = {node.input[0]: node for node in layers}
    watched = {*taken}
    for node in proto.graph.node:
        if node.op_type == "Softmax":
            watched.update((node.input[0], node.output[0]))
    names = [name for name in float_tensors(proto) if name in watched]
    if not names:
        return

    # Run a few samples, without optimization that would remove tensors
    run = open_runner(expose(proto, names), threads, optimized=False)
    unbounded: set[str] = set()
    undefined: set[str] = set()
    for batch in samples.spaced(SAMPLES).batches(1):
        for name, values in zip(names, run(batch), strict=True):
            if not np.isfinite(values).all():
                unbounded.add(name)
            if np.isnan(values).any():
                undefined.add(name)

    # Name the first layer; a Softmax of a full mask is a usual cause
    for name in names:
        if name in unbounded and name in taken:
            layer = taken[name]
            mend = say_full_mask(proto.graph, undefined)
            raise QuantizationError(
                f"{layer.op_type} {layer.name} takes NaN or infinite values, which leave no range: "
                f"{name}; {mend or f'try nodes_to_exclude=[{layer.name}]'}"
            )


def calibrates(config: RunConfig) -> bool:
    """Return whether calibration samples determine ranges in this run, and no table does."""
    alone = config.dtype.is_float or config.method in ("dynamic", "weight_only")
    return not alone and config.backend.quantizes and config.calib.table is None
