"""Finds calibration samples that stand out.

It looks at the network's inputs before the run quantizes anything, and at the tensors inside the
network after its calibration.
"""

from pathlib import Path

import onnx

from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.outliers import Outliers, find_in_inputs
from resnet8ptq.config.schema import CalibConfig, RunConfig
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.links import input_names


def check_inputs(calib: CalibConfig, graph: onnx.GraphProto, samples: Split) -> list[Outliers]:
    """Return the samples that stand out in an input of the network; warn about each.

    It does not run the network, so it also works for frameworks that calibrate themselves.
    """
    outliers = list(find_in_inputs(samples, input_names(graph)))
    for outlier in outliers:
        outlier.warn(samples, calib)
    return outliers


def find_inside(
    calib: CalibConfig, network: Path, samples: Split, runtime: Runtime
) -> list[Outliers]:
    """Return the samples that stood out in a tensor when the network was calibrated."""
    return Activations(network, calibration=samples, calib=calib, runtime=runtime).outliers()


def calibrates(config: RunConfig) -> bool:
    """Return whether the samples determine ranges."""
    alone = config.dtype.is_float or config.method in ("dynamic", "weight_only")
    return not alone and config.backend.quantizes and config.calib.table is None
