"""Finds why a file that another program has quantized loses accuracy.

It uses training samples, never reported ones. It first tries two causes outside of the file's
layers: another preprocessing of the pixels, and another order of the classes. A comparison of
tensors would blame the first or the last layer for these. If neither is the cause, that comparison
finds the layer that costs most.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import options_of
from resnet8ptq.backends.file import reading
from resnet8ptq.backends.file.options import FileConfig
from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ModelError, UnsupportedError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.preprocessing import Preprocessing
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment.preprocessing_check import run_all, usual
from resnet8ptq.exploration.tensors import findings, network_picture
from resnet8ptq.exploration.tensors.comparing import compare_file
from resnet8ptq.graph.session import open_runner
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.distortion import sqnr_db

log = logging.getLogger(__name__)

SAMPLES = 100
FAR_DB = 10.0  # the noise has a tenth of the signal's power
BETTER_DB = 6.0  # a quarter of the noise

Outputs = Sequence[NDArray[Any]]  # of all samples, each [N, ...]
Run = Callable[[NDArray[Any]], Outputs]


def check_against_fp32(
    evaluator: Evaluator,
    data: Dataset,
    path: Path,
    comparison: Comparison,
    config: RunConfig,
    folder: Path,
) -> dict[str, str]:
    """Warn if a file is far from FP32; return the cause as a param.

    Args:
        data: the data set, arranged for the network.
        config: the run's config, with the limit of the loss.
        folder: the run's folder; gets the picture of the network if a layer is the cause.
    """
    sqnr = comparison.sqnr_db
    is_near = sqnr is None or sqnr >= FAR_DB
    is_within = comparison.loss() <= comparison.metric.limit(config.report)
    if not len(data.train) or (is_near and is_within):
        return {}

    distance = f"loss {comparison.metric.say_loss(round(comparison.loss(), 4))}"
    if sqnr is not None:
        distance += f", SQNR {sqnr:.1f} dB"
    fault = f"the file is far from FP32 ({distance})"
    cause = find_cause(
        evaluator, samples=data.train.spaced(SAMPLES), path=path, config=config, folder=folder
    )
    if not cause:
        log.warning("%s: no cause found in its preprocessing, class order and tensors", fault)
        return {}
    log.warning("%s: %s", fault, cause)
    return {"cause": cause}


def find_cause(
    evaluator: Evaluator, samples: Split, path: Path, config: RunConfig, folder: Path
) -> str:
    """Return the preprocessing or the order of classes that fits, else the layer that costs most.

    Empty if no cause is found.
    """
    threads = evaluator.runtime.threads
    expected = run_all(open_runner(str(evaluator.network.onnx_path), threads), samples)
    run = evaluator.quantizer.load(path, threads).predict
    sized = config.preprocess.size is not None
    return (
        _find_preprocessing(run, samples, expected, sized)
        or _find_class_order(run_all(run, samples), expected)
        or _find_layer(evaluator, samples, path, config=config, folder=folder)
    )


def _find_preprocessing(run: Run, samples: Split, expected: Outputs, sized: bool) -> str:
    """Return a text if another usual preprocessing brings the file's outputs near FP32's."""

    def measure(split: Split) -> float:
        try:
            return _sqnr_db(expected, run_all(run, split))
        except ModelError:  # an input of integers without a scale takes whole numbers only
            return -math.inf

    now = measure(samples)
    best = ""
    best_db = max(FAR_DB, now + BETTER_DB)
    for setting, steps in _other_steps(samples, sized):
        value = measure(replace(samples, preprocessing=steps))
        if value > best_db:
            best = setting
            best_db = value
    if not best:
        return ""
    return (
        f"the file fits with {best} instead (SQNR {best_db:.1f} dB on {len(samples)} training "
        f"samples, {now:.1f} dB with the network's own)"
    )


def _other_steps(samples: Split, sized: bool) -> Iterator[tuple[str, Preprocessing]]:
    yield from usual(samples, sized)
    own = samples.preprocessing
    if samples.has_pictures and samples.stored.shape[-1] == 3:
        order = "rgb" if own.bgr else "bgr"
        yield f"preprocess.channels={order}", replace(own, bgr=not own.bgr)


def _find_class_order(outputs: Outputs, expected: Outputs) -> str:
    """Return a text if the file's classes are FP32's in another order."""
    ours = expected[0]
    theirs = outputs[0]
    if len(outputs) != 1 or theirs.ndim != 2 or theirs.shape != ours.shape:
        return ""
    classes = theirs.shape[1]
    if not 3 <= classes <= 1000:
        return ""
    with np.errstate(invalid="ignore", divide="ignore"):
        alike = np.nan_to_num(np.corrcoef(ours.T, theirs.T)[:classes, classes:])
    order = alike.argmax(axis=1)  # the file's column for each of FP32's
    if len({*order.tolist()}) < classes or (order == np.arange(classes)).all():
        return ""
    if _sqnr_db([ours], [theirs[:, order]]) <= FAR_DB:
        return ""
    return f"its classes are in another order: {order[:20].tolist()} of the network's"


def _sqnr_db(expected: Outputs, outputs: Outputs) -> float:
    value = sqnr_db(expected, outputs)
    return -math.inf if value is None else value


def _find_layer(
    evaluator: Evaluator, samples: Split, path: Path, config: RunConfig, folder: Path
) -> str:
    """Return the layer that costs most, and other findings in the file's tensors.

    Empty if all layers are near FP32, or the format gives no tensors.
    """
    runtime = evaluator.runtime
    admitted = reading.admit(path, runtime.cache_root)
    inputs = options_of(evaluator.quantizer.config, FileConfig).inputs or {}
    with suppress(UnsupportedError):
        compared = compare_file(
            evaluator.network, admitted, inputs, split=samples, threads=runtime.threads
        )
        worst = None if compared is None else compared.faulty
        if compared is None or worst is None:
            return ""
        faults = findings.find_faults(compared)
        title = Combination.of_config(config).describe(config.data.name, "tensors")
        picture = network_picture.draw_network(compared, faults, title)
        files.write_text(folder / network_picture.FILE, picture)

        # The sentence names the worst layer, so its own findings add nothing
        sentences = [compared.describe()]
        for fault in faults:
            if worst.name not in fault.tensors:
                sentences.append(fault.say())
        return "; ".join(sentences)
    return ""
