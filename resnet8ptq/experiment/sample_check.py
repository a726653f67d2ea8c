"""Finds calibration samples that stand out.

The inputs of the network are checked before the run quantizes anything, and the tensors inside the
network after calibration.
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

    The network is not run, so the check also works for frameworks that calibrate themselves.
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
    """Return whether the calibration samples determine ranges in this run."""
    alone = config.dtype.is_float or config.method in ("dynamic", "weight_only")
    return not alone and config.backend.quantizes and config.calib.table is None
