"""Applies the corrections of the FP32 network in order, the same for all backends that take them.

Each correction returns a corrected ONNX graph.

SmoothQuant and equalization come first: they keep the network's function, but change the weights
and therefore their grid. AdaRound or block-wise reconstruction then choose the levels. Bias
correction comes last: it removes the mean of the remaining error, which depends on the levels.
AdaRound with bias correction already corrects the bias of each layer, so little remains.
"""

import logging
import statistics
from pathlib import Path

import onnx

from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import CORRECTIONS, CorrectionsConfig
from resnet8ptq.core import files
from resnet8ptq.corrections import bias_correction, equalization, layers, smooth_quant
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.models.model import Fp32Model

log = logging.getLogger(__name__)

FILE = "corrected.onnx"


def correct(
    model: Fp32Model,
    chosen: CorrectionsConfig,
    setting: CorrectionSettings,
    seed: int,
    folder: Path,
) -> tuple[Fp32Model, dict[str, Range] | None]:
    """Apply the chosen corrections; return the model unchanged if there are none.

    The function also returns the activation ranges that reconstruction learns, by ONNX tensor name;
    None without reconstruction. SmoothQuant logs its own effect; of the others, the function logs
    the effect on the layers' relative squared error (`layers.errors`).

    Args:
        folder: an existing folder for `corrected.onnx`.

    Raises:
        ConfigError: see `find_float_nodes`; or with AdaRound or reconstruction, `device` is `cuda`
            without a GPU.
        QuantizationError: no layer with weights is left to quantize, or with reconstruction, an
            activation is NaN or infinite.
        UnsupportedError: see `reconstruct`.
    """
    asked = [name for name in CORRECTIONS if vars(chosen)[name]]
    if not asked:
        return model, None

    # SmoothQuant and equalization keep the function: the result is the new FP32 network
    fp32 = onnx.load(model.onnx_path)
    if chosen.smooth_quant:
        fp32 = smooth_quant.smooth(fp32, setting)
    before = layers.errors(fp32, fp32, setting)
    if chosen.equalization:
        fp32 = equalization.equalize(fp32, setting.selection)
        before = _log("equalization", before, layers.errors(fp32, fp32, setting))

    # The other corrections change the function, and are compared with the new FP32 network
    corrected = fp32
    if chosen.adaround:
        from resnet8ptq.corrections import adaround  # imports torch

        corrected = adaround.learn_rounding(
            corrected,
            setting,
            iterations=chosen.adaround_iterations,
            seed=seed,
            correct_biases=chosen.bias_correction,
        )
        before = _log("adaround", before, layers.errors(fp32, corrected, setting))

    # Only reconstruction learns ranges
    ranges = None
    path = folder / FILE
    if chosen.reconstruction:
        from resnet8ptq.corrections import reconstruction  # imports torch

        onnx.save(corrected, path)
        corrected, ranges = reconstruction.reconstruct(
            path, setting, iterations=chosen.reconstruction_iterations, seed=seed
        )
        before = _log("reconstruction", before, layers.errors(fp32, corrected, setting))

    # Remove the mean of the remaining error
    if chosen.bias_correction:
        corrected = bias_correction.correct_biases(fp32, corrected, setting)
        _log("bias_correction", before, layers.errors(fp32, corrected, setting))
    with files.atomic(path) as temporary:
        onnx.save(corrected, temporary)
    return model.with_weights_of(path), ranges


def _log(name: str, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    # Count the layers whose error grows, in steps of 0.1%
    changes = []
    larger = 0
    for layer, error in before.items():
        if error > 0:
            change = after[layer] / error - 1
            changes.append(change)
            larger += round(change, 3) > 0

    # Log a summary; debugging shows each layer
    log.info(
        "corrections.%s: squared error of a layer's output %+.1f%% in the median, larger in %d of "
        "%d layers",
        name,
        100 * statistics.median(changes or [0.0]),
        larger,
        len(changes),
    )
    for layer in before:
        log.debug("corrections.%s: %s: %.3g, was %.3g", name, layer, after[layer], before[layer])
    return after
