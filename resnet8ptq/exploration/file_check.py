"""Finds why a file that another program has quantized loses accuracy.

The search for a cause uses training samples, never test samples. It first tries the causes outside
of the file's layers, see `find_cause`. A comparison of tensors would blame the first or the last
layer for such a cause. If no such cause applies, it looks for a faulty layer.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from scipy.special import expit

from resnet8ptq.backends.contract import options_of
from resnet8ptq.backends.file import reading
from resnet8ptq.backends.file.options import FileConfig
from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ModelError, UnsupportedError
from resnet8ptq.core.records import feed
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.preprocessing import Preprocessing
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment.preprocessing_check import run_all, usual
from resnet8ptq.exploration.tensors import findings, network_picture
from resnet8ptq.exploration.tensors.comparing import compare_file
from resnet8ptq.exploration.tensors.spread import power, to_db
from resnet8ptq.graph.links import output_names
from resnet8ptq.graph.session import open_runner
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.distortion import find_units, softmax, sqnr_db

log = logging.getLogger(__name__)

SAMPLES = 100  # training samples, at most
FAR_DB = 10.0  # the noise has a tenth of the signal's power
BETTER_DB = 6.0  # a quarter of the noise power

Outputs = Sequence[NDArray[Any]]  # each output [N, ...] for all samples
Matrix = NDArray[np.float64]  # [N, outputs]
Run = Callable[[NDArray[Any]], Outputs]


def check_against_fp32(
    evaluator: Evaluator,
    data: Dataset,
    path: Path,
    comparison: Comparison,
    config: RunConfig,
    folder: Path,
) -> dict[str, str]:
    """Warn if a file is far from FP32 or loses more than the limit; return the cause as a param.

    The dict is empty if the file does neither, or if no cause is found. Without training samples,
    it is empty too, and no warning is given.

    Args:
        data: the data set, arranged for the network.
        config: the run's config, with the limit of the loss.
        folder: the run's folder, for the picture of the network if a layer is the cause.
    """
    sqnr = comparison.sqnr_db
    is_near = sqnr is None or sqnr >= FAR_DB
    is_within = comparison.loss() <= comparison.metric.limit(config.report)
    if not len(data.train) or (is_near and is_within):
        return {}

    # Describe the distance, then look for its cause
    distance = f"loss {comparison.metric.say_loss(round(comparison.loss(), 4))}"
    if sqnr is not None:
        distance += f", SQNR {sqnr:.1f} dB"
    fault = f"the file is far from FP32 ({distance})"
    cause = find_cause(
        evaluator, samples=data.train.spaced(SAMPLES), path=path, config=config, folder=folder
    )
    if not cause:
        tried = "preprocessing, outputs, input range and tensors"
        if not reading.gives_tensors(path.suffix.lower()):
            tried = f"preprocessing, outputs and input range; {path.suffix} files give no tensors"
        log.warning("%s: no cause found in its %s", fault, tried)
        return {}
    log.warning("%s: %s", fault, cause)
    return {"cause": cause}


def find_cause(
    evaluator: Evaluator, samples: Split, path: Path, config: RunConfig, folder: Path
) -> str:
    """Return the first cause that is found, as text; empty if none is found.

    The causes are tried in this order: another preprocessing, exchanged height and width, another
    last step such as a missing softmax, another order of the classes, one scale for different
    units, a wrong input range, and faulty layers.
    """
    # Run both networks once, for most causes
    threads = evaluator.runtime.threads
    expected = run_all(open_runner(str(evaluator.network.onnx_path), threads), samples)
    run = evaluator.quantizer.load(path, threads).predict
    sized = config.preprocess.size is not None
    outputs = run_all(run, samples)
    fp32 = onnx.load(evaluator.network.onnx_path, load_external_data=False)
    names = output_names(fp32.graph)

    # The cheap causes first; a comparison of tensors would blame a layer for them
    return (
        _find_preprocessing(run, samples, expected, sized)
        or _find_exchanged_axes(evaluator, run, samples, expected=expected, outputs=outputs)
        or _find_last_step(outputs, expected)
        or _find_class_order(outputs, expected)
        or _find_mixed_units(names, outputs, expected)
        or _find_input_range(evaluator, samples, path)
        or _find_layer(evaluator, samples, path, config=config, folder=folder)
    )


def _find_preprocessing(run: Run, samples: Split, expected: Outputs, sized: bool) -> str:
    """Return a cause as text if another usual preprocessing suits the file better; else empty."""

    def measure(split: Split) -> float:
        try:
            return _sqnr_db(expected, run_all(run, split))
        except ModelError:  # an integer input without a scale takes only whole numbers
            return -math.inf

    # Another preprocessing must be clearly better than the network's own
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
        f"of the usual preprocessings, the file fits best with {best} (SQNR {best_db:.1f} dB on "
        f"{len(samples)} training samples, {now:.1f} dB with the network's own)"
    )


def _other_steps(samples: Split, sized: bool) -> Iterator[tuple[str, Preprocessing]]:
    """Yield the usual preprocessings, and for colour pictures the other order of channels."""
    yield from usual(samples, sized)
    own = samples.preprocessing
    if samples.has_pictures and samples.stored.shape[-1] == 3:
        order = "rgb" if own.bgr else "bgr"
        yield f"preprocess.channels={order}", replace(own, bgr=not own.bgr)


def _find_exchanged_axes(
    evaluator: Evaluator, run: Run, samples: Split, expected: Outputs, outputs: Outputs
) -> str:
    """Return a cause as text if the file takes height and width exchanged; else empty.

    Only a network with a single input of square pictures is checked.
    """
    # Run the file on samples whose height and width are exchanged
    pairs = options_of(evaluator.quantizer.config, FileConfig).inputs or {}
    if not samples.has_pictures or len(pairs) != 1:
        return ""
    height = 1 if samples.channels_first else 0  # the axis of the height in a sample
    width = height + 1
    shape = samples.stored.shape[1:]
    if shape[height] != shape[width]:
        return ""
    turned = replace(samples, stored=np.swapaxes(samples.stored[:], height + 1, width + 1))
    exchanged = _sqnr_db(expected, run_all(run, turned))
    now = _sqnr_db(expected, outputs)
    if exchanged <= max(FAR_DB, now + BETTER_DB):
        return ""

    # Find the setting that exchanges both axes
    layout = samples.layout or (0, 1, 2)  # the axes of a sample in FP32's input
    rows = layout.index(height)
    columns = layout.index(width)
    other = {rows: columns, columns: rows}
    [(name, pair)] = pairs.items()
    axes = [other.get(axis, axis) for axis in pair["axes"] or range(len(layout))]
    return (
        f"the file fits with height and width exchanged (SQNR {exchanged:.1f} dB on "
        f"{len(samples)} training samples, {now:.1f} dB as they are); try "
        f"'backend.inputs={{{name}: {{name: {pair['name']}, axes: {axes}}}}}'"
    )


def _find_last_step(outputs: Outputs, expected: Outputs) -> str:
    """Return a cause as text if the file has one last step more or less than FP32; else empty.

    The steps are softmax, sigmoid and logarithm. Only a single output [n, values] is checked.
    """
    ours = expected[0].astype(np.float64)
    theirs = outputs[0].astype(np.float64)
    if len(outputs) != 1 or theirs.ndim != 2 or theirs.shape != ours.shape:
        return ""

    # The file may have one step more, or one less; constants do not count
    now = _centred_db(ours, theirs)
    for name, step in _LAST_STEPS.items():
        with np.errstate(all="ignore"):
            added = _centred_db(step(ours), theirs)
            left_out = _centred_db(ours, step(theirs))
        if max(added, left_out) <= max(FAR_DB, now + BETTER_DB):
            continue
        if added >= left_out:
            return f"its output is the {name} of the network's (SQNR {added:.1f} dB)"
        return f"the network's output is the {name} of the file's (SQNR {left_out:.1f} dB)"
    return ""


_LAST_STEPS: dict[str, Callable[[Any], Any]] = {
    "softmax": softmax,
    "sigmoid": expit,
    "logarithm": np.log,
}


def _centred_db(expected: Matrix, outputs: Matrix) -> float:
    """Return the SQNR without the mean of each output; -inf if a value is not finite."""
    if not (np.isfinite(expected).all() and np.isfinite(outputs).all()):
        return -math.inf
    return _sqnr_db([expected - expected.mean(axis=0)], [outputs - outputs.mean(axis=0)])


def _find_class_order(outputs: Outputs, expected: Outputs) -> str:
    """Return a cause as text if the file has the classes in another order; else empty.

    Only a single output of 3 to 1,000 classes is checked.
    """
    ours = expected[0]
    theirs = outputs[0]
    if len(outputs) != 1 or theirs.ndim != 2 or theirs.shape != ours.shape:
        return ""
    classes = theirs.shape[1]
    if not 3 <= classes <= 1000:
        return ""

    # Pair the classes by correlation, which must give each a partner
    with np.errstate(invalid="ignore", divide="ignore"):
        alike = np.nan_to_num(np.corrcoef(ours.T, theirs.T)[:classes, classes:])
    order = alike.argmax(axis=1)  # the file's column for each column of FP32
    if len({*order.tolist()}) < classes or (order == np.arange(classes)).all():
        return ""
    if _sqnr_db([ours], [theirs[:, order]]) <= FAR_DB:
        return ""
    return f"its classes are in another order: {order[:20].tolist()} of the network's"


def _find_mixed_units(names: Sequence[str], outputs: Outputs, expected: Outputs) -> str:
    """Return a cause as text if the file loses a part of an output with mixed units; else empty.

    An 8-bit scale for coordinates in pixels has no levels for scores from 0 to 1.
    """
    for name, ours, theirs in zip(names, expected, outputs, strict=True):
        if theirs.shape != ours.shape:
            continue

        # Compare the parts of the output that have one unit each
        cuts = find_units(ours)
        by_part = [_sqnr_db([ours[cut]], [theirs[cut]]) for cut in cuts]
        worst = min(by_part)
        best = max(by_part)
        if worst >= FAR_DB or best < max(FAR_DB, worst + BETTER_DB):
            continue
        lost = cuts[by_part.index(worst)]
        kept = cuts[by_part.index(best)]
        return (
            f"its output {name} joins values of different units in one 8-bit scale: "
            f"{_say_cut(kept)} of axis {len(kept) - 1} have an SQNR of {best:.1f} dB, "
            f"{_say_cut(lost)} one of {worst:.1f} dB; leave the nodes behind the last layers in "
            "float"
        )
    return ""


def _say_cut(cut: tuple[slice, ...]) -> str:
    return f"values {cut[-1].start} to {cut[-1].stop - 1}"


def _find_input_range(evaluator: Evaluator, samples: Split, path: Path) -> str:
    """Return a cause as text if an input's range cuts much of the samples' values; else empty."""
    contents = reading.admit(path, evaluator.runtime.cache_root).contents
    pairs = options_of(evaluator.quantizer.config, FileConfig).inputs or {}
    values = feed(samples.inputs(slice(None)), [*pairs])
    ports = {port.name: port for port in contents.inputs}
    for name, pair in pairs.items():
        port = ports[pair["name"]]
        if port.low is None or port.high is None or values[name].dtype.kind != "f":
            continue

        # Values beyond the port's range are cut
        held = np.clip(values[name], port.low, port.high)
        if to_db(power(values[name]), power(held - values[name])) < FAR_DB:
            return (
                f"its input {port.name} holds values of {port.low:.4g} to {port.high:.4g}, and the "
                f"samples have {values[name].min():.4g} to {values[name].max():.4g}: it was "
                "calibrated on samples of another preprocessing"
            )
    return ""


def _sqnr_db(expected: Outputs, outputs: Outputs) -> float:
    """Return the SQNR in dB: infinite for equal outputs, else -inf if it is not finite."""
    value = sqnr_db(expected, outputs)
    if value is not None:
        return value
    is_equal = all(map(np.array_equal, expected, outputs))
    return math.inf if is_equal else -math.inf


def _find_layer(
    evaluator: Evaluator, samples: Split, path: Path, config: RunConfig, folder: Path
) -> str:
    """Return the faulty layer and other findings as text, and draw the network.

    If the weights of most layers differ from FP32's, the text only says so. The text is empty if no
    layer is faulty, no tensor is matched, or the format gives no tensors.
    """
    runtime = evaluator.runtime
    admitted = reading.admit(path, runtime.cache_root)
    inputs = options_of(evaluator.quantizer.config, FileConfig).inputs or {}
    with suppress(UnsupportedError):
        compared = compare_file(
            evaluator.network, admitted, inputs, split=samples, threads=runtime.threads
        )
        if compared is None:
            return ""
        worst = compared.faulty
        if worst is None:
            return ""

        # Draw the network with its faults
        faults = findings.find_faults(compared)
        title = Combination.of_config(config).describe(config.data.name, "tensors")
        picture = network_picture.draw_network(compared, faults, title)
        files.write_text(folder / network_picture.FILE, picture)

        other = findings.describe_other_weights(compared)
        if other:
            return other

        # The sentence names the worst layer, so its own findings add nothing
        sentences = [compared.describe()]
        unsure = {worst.name, *compared.doubtful}
        for fault in faults:
            if not unsure.intersection(fault.tensors):
                sentences.append(fault.say())
        return "; ".join(sentences)
    return ""
