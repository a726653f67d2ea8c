"""An FP32 accuracy that cannot be right, and the preprocessing that would have fitted."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.preprocessing import Preprocessing
from resnet8ptq.graph.session import open_session
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.classification import Scores
from resnet8ptq.tasks.statistics import above_chance

log = logging.getLogger(__name__)

SAMPLES = 200  # of the training split
SIGNIFICANCE = 0.01
BETTER = 0.1  # of the samples: less may be luck, as the best of several is taken
BATCH_SIZE = 20

# What conf/preprocess does to pixels 0..255: scale, mean, std.
_USUAL = {
    "raw": (1.0, (0.0,), (1.0,)),
    "unit": (1 / 255, (0.0,), (1.0,)),
    "symmetric": (1 / 127.5, (1.0,), (1.0,)),
    "torchvision_imagenet": (1 / 255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "caffe": (1.0, (103.939, 116.779, 123.68), (1.0,)),
}


def check(
    config: RunConfig, dataset: Dataset, fp32: Fp32Model, baseline: Scores, threads: int
) -> None:
    """Warn where the FP32 accuracy cannot be right, and name the usual preprocessing that fits.

    Args:
        dataset: as the network takes it; its training samples are tried.
        baseline: of the FP32 network.
    """
    reason = _doubt(baseline, config.report.expected_accuracy)
    if reason is None:
        return
    chosen = np.linspace(0, len(dataset.train) - 1, min(SAMPLES, len(dataset.train)))
    split = dataset.train.take(chosen.astype(np.int64))
    now = _count_right(fp32, split, threads)
    found = {
        setting: _count_right(fp32, replace(split, preprocessing=steps), threads)
        for setting, steps in _usual(split, sized=config.preprocess.size is not None)
    }
    best = max(found, key=lambda setting: found[setting], default="")
    if best and found[best] - now > BETTER * len(split):
        advice = f"{best} gets {found[best]} of {len(split)} training samples right, this run {now}"
    else:
        advice = (
            "no usual preprocessing of the pixels does better; look at the order of the classes, "
            "at preprocess.resize, data.offset and data.scale"
        )
    log.warning("FP32 ACCURACY %s: does the preprocessing fit the network? %s", reason, advice)


def _doubt(baseline: Scores, expected: float | None) -> str | None:
    """Say what is strange about an accuracy: near chance, or below `expected`."""
    classes = baseline.probabilities.shape[1]
    found = f"{baseline.accuracy:.2%} ({baseline.correct} of {baseline.total}"
    if above_chance(baseline.correct, baseline.total, classes) > SIGNIFICANCE:
        return f"NEAR CHANCE, {found}, {classes} classes)"
    if expected is not None and baseline.interval[1] < expected:
        return f"BELOW report.expected_accuracy={expected:g}, {found})"
    return None


def _usual(split: Split, sized: bool) -> Iterator[tuple[str, Preprocessing]]:
    """Yield what pixels are usually made of, by the settings that choose it."""
    if split.images.dtype != np.uint8:
        return
    coloured = split.images.shape[-1] == 3
    for name, (scale, mean, std) in _USUAL.items():
        steps = replace(split.preprocessing, bgr=name == "caffe", scale=scale, mean=mean, std=std)
        setting = f"preprocess={name}"
        if name == "torchvision_imagenet" and not sized:
            setting += " preprocess.size=null"
        if len(mean) == 1 or coloured:
            yield setting, steps
        if name != "caffe" and coloured:
            yield f"{setting} preprocess.channels=bgr", replace(steps, bgr=True)


def _count_right(fp32: Fp32Model, split: Split, threads: int) -> int:
    session = open_session(str(fp32.onnx_path), threads)
    name = session.get_inputs()[0].name
    found = [session.run(None, {name: batch})[0].argmax(1) for batch in split.batches(BATCH_SIZE)]
    return int((np.concatenate(found) == split.labels).sum())
