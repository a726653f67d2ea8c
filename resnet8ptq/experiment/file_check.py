"""Finds causes of the loss of a file quantized by another program.

On training samples, never on reported ones, it tries other preprocessing and another order of the
classes, and checks the ranges of the file's inputs; else it compares the tensors.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import options_of
from resnet8ptq.backends.file import reading
from resnet8ptq.backends.file.options import FileConfig
from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.errors import ModelError, UnsupportedError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.preprocessing import Preprocessing
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment.preprocessing_check import run_all, usual
from resnet8ptq.experiment.tensors.comparing import SOUND_DB, compare_file
from resnet8ptq.graph.session import open_runner
from resnet8ptq.tasks.comparison import Comparison
from resnet8ptq.tasks.distortion import sqnr_db

log = logging.getLogger(__name__)

SAMPLES = 100
FAR_DB = 10.0  # the noise has a tenth of the signal's power
BETTER_DB = 6.0  # a quarter of the noise
CUT = 2.0  # times the range in the file: an input whose values reach further is cut
COARSE = 8.0  # times the values: an input with a larger range is coarse


def check(
    evaluator: Evaluator,
    data: Dataset,
    path: Path,
    comparison: Comparison,
    report: ReportConfig,
    sized: bool,
) -> dict[str, str]:
    """Warn if a file is far from FP32; return the causes as a param.

    Args:
        data: the data set, arranged for the network.
        report: the limit of the loss.
        sized: whether the preprocessing resizes pictures.
    """
    sqnr = comparison.sqnr_db
    near = sqnr is None or sqnr >= FAR_DB
    within = comparison.loss() <= comparison.metric.limit(report)
    if not len(data.train) or (near and within):
        return {}
    tried = _Trial(evaluator, data.train.spaced(SAMPLES), path)
    causes = [*tried.input_ranges(), *tried.preprocessing(sized), *tried.class_order()]
    causes = causes or [*tried.tensors()]
    shown = "" if sqnr is None else f", SQNR {sqnr:.1f} dB"
    what = f"the file is far from FP32 (loss {comparison.loss():.4g}{shown})"
    if not causes:
        log.warning("%s: no cause found in its inputs, class order and tensors", what)
        return {}
    log.warning("%s: %s", what, "; ".join(causes))
    return {"cause": "; ".join(causes)}


class _Trial:
    """A file and FP32 on the same samples."""

    def __init__(self, evaluator: Evaluator, split: Split, path: Path) -> None:
        runtime = evaluator.runtime
        self.network, self.samples, self.threads = evaluator.network, split, runtime.threads
        self.admitted = reading.admit(path, runtime.cache_root)
        self.contents = self.admitted.contents
        self.inputs = options_of(evaluator.quantizer.config, FileConfig).inputs or {}
        self.run = evaluator.quantizer.load(path, runtime.threads).predict
        self.reference = run_all(open_runner(str(self.network.onnx_path), self.threads), split)

    def input_ranges(self) -> Iterator[str]:
        """Yield the inputs whose range in the file differs from the samples' range."""
        if self.samples.has_records:
            return
        ends = [(float(batch.min()), float(batch.max())) for batch in self.samples.batches(1)]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        for port in self.contents.inputs:
            least, most = port.low, port.high
            if least is None or most is None or high <= low:
                continue
            holds = f"its input {port.name!r} holds {least:.4g} to {most:.4g}, the samples reach "
            holds += f"{low:.4g} to {high:.4g}"
            if max(high / most if most > 0 else 0, low / least if least < 0 else 0) > CUT:
                yield f"{holds}: it was calibrated on samples of another preprocessing"
            elif (most - least) / (high - low) > COARSE:
                yield f"{holds}: most of its levels are unused; look at the preprocessing"

    def preprocessing(self, sized: bool) -> Iterator[str]:
        """Yield a text if another usual preprocessing brings the file's outputs near FP32's."""
        now = self._sqnr(self.samples)
        sqnr_db: dict[str, float] = {}
        for setting, steps in self._others(sized):
            sqnr_db[setting] = self._sqnr(replace(self.samples, preprocessing=steps))
        best = max(sqnr_db, key=lambda setting: sqnr_db[setting], default="")
        if best and sqnr_db[best] > max(FAR_DB, now + BETTER_DB):
            yield (
                f"the file fits with {best} instead (SQNR {sqnr_db[best]:.1f} dB on "
                f"{len(self.samples)} training samples, {now:.1f} dB with the network's own)"
            )

    def _others(self, sized: bool) -> Iterator[tuple[str, Preprocessing]]:
        yield from usual(self.samples, sized)
        own = self.samples.preprocessing
        if self.samples.has_pictures and self.samples.images.shape[-1] == 3:
            order = "rgb" if own.bgr else "bgr"
            yield f"preprocess.channels={order}", replace(own, bgr=not own.bgr)

    def class_order(self) -> Iterator[str]:
        """Yield a text if the file's classes are FP32's in another order."""
        outputs = run_all(self.run, self.samples)
        expected, got = self.reference[0], outputs[0]
        if len(outputs) != 1 or got.ndim != 2 or got.shape != expected.shape:
            return
        if not 3 <= got.shape[1] <= 1000:
            return
        with np.errstate(invalid="ignore", divide="ignore"):
            alike = np.nan_to_num(np.corrcoef(expected.T, got.T)[: len(got.T), len(got.T) :])
        order = alike.argmax(axis=1)  # the file's column for each of FP32's
        if len({*order.tolist()}) < len(order) or (order == np.arange(len(order))).all():
            return
        if _sqnr([expected], [got[:, order]]) > FAR_DB:
            yield f"its classes are in another order: {order[:20].tolist()} of the network's"

    def tensors(self) -> Iterator[str]:
        """Yield the layer that costs most, if the format gives its tensors."""
        inputs = self.inputs
        with suppress(UnsupportedError):
            compared = compare_file(self.network, self.admitted, inputs, self.samples, self.threads)
            if compared is not None and compared.costliest.own_db < SOUND_DB:
                yield compared.describe()

    def _sqnr(self, split: Split) -> float:
        try:
            return _sqnr(self.reference, run_all(self.run, split))
        except ModelError:  # an input of integers without a scale takes whole numbers only
            return -math.inf


def _sqnr(reference: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> float:
    value = sqnr_db(reference, outputs)
    return -math.inf if value is None else value
