"""`+analysis=diagnose`: why is the quantized network worse than FP32, and what helps?

Measured on training samples that did not calibrate, never on test samples.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import onnx

from resnet8ptq.backends.contract import refuse_others
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.evaluation.baseline import load_baseline
from resnet8ptq.evaluation.evaluate import Evaluation, targets_of, with_logits
from resnet8ptq.evaluation.trial import Trial
from resnet8ptq.experiment import preparation, preprocessing_check
from resnet8ptq.experiment.diagnosis import changes, diagnosis_table, findings, measuring
from resnet8ptq.experiment.diagnosis.conclusion import (
    ACTIVATIONS,
    WEIGHTS,
    DiagnosisResult,
    Halves,
)
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.subject import Subject, open_subject
from resnet8ptq.graph import qdq
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.contract import Comparison, Scores

_TAKES = "+analysis=diagnose takes the graphs of backend=onnx method=static: type these"


def analyse(config: RunConfig, folder: Path, run: Recorder) -> DiagnosisResult:
    """Measure tensor by tensor, find what is wrong, try what may help, and print it.

    See `analyses`.

    Raises:
        UnsupportedError: the backend's or the method's files hold no QDQ graph.
    """
    refuse_others(config, {"backend.name": (["onnx"], _TAKES), "method": (["static"], _TAKES)})
    resolved = make_quantizer(config, cache.runtime(config.cache_dir, config.threads)).resolve()
    notes = []
    if config.format in ("qoperator", "auto"):
        notes.append("diagnosed in format=qdq: format=qoperator hides what is between its layers")
    # A slim file has lost the names of its tensors.
    subject = open_subject(replace(config, format="qdq", slim=False), run)
    with tempfile.TemporaryDirectory() as scratch:
        result = _diagnose(_Workshop(subject, Path(scratch), run))
    result = replace(
        result, notes=tuple(notes), resolved={**resolved.to_params(), **subject.digests}
    )
    diagnosis_table.write(folder, subject.config, result)
    diagnosis_table.print_tables(result, diagnosis_table.describe(subject.config))
    return result


def _diagnose(workshop: "_Workshop") -> DiagnosisResult:
    subject = workshop.subject
    config, task = subject.config, subject.task
    trial, network = workshop.quantize(config)
    reference = workshop.compare(trial.evaluation)
    measured = measuring.measure(
        onnx.load(network.onnx_path),
        onnx.load(trial.artifact.path),
        subject.calibration.split,
        subject.held_out,
        subject.runtime.threads,
    )
    found = findings.find(measured, config)
    doubt = preprocessing_check.check(
        config, task, subject.dataset, subject.fp32, workshop.reference, subject.runtime.threads
    )
    if doubt is not None:
        found.insert(0, findings.doubtful_fp32(doubt))
    halves = workshop.halves(trial, network, reference)
    answers = [change for finding in found for change in finding.changes]
    answers += changes.usual(config, findings.worst_layer(measured))
    if halves.costs_more == WEIGHTS:
        answers += changes.correct(config)
    tried = {change.words: change for change in answers}  # each once
    outcomes = changes.attempt(
        config,
        list(tried.values()),
        reference,
        task,
        lambda variant: workshop.compare(workshop.quantize(variant)[0].evaluation),
    )
    return DiagnosisResult(
        "ok",
        measured=measured,
        findings=tuple(found),
        outcomes=tuple(outcomes),
        before=changes.as_it_is(reference),
        halves=halves,
        metric=task.metric,
        fp32_value=workshop.reference.value,
        images=len(subject.held_out),
    )


class _Workshop:
    """Makes variants of a run as the run itself would, and compares them with FP32."""

    def __init__(self, subject: Subject, scratch: Path, run: Recorder) -> None:
        self.subject = subject
        self._scratch = scratch
        self._run = run
        self._bench = subject.bench(subject.fp32.final)
        self._targets = targets_of(subject.held_out)
        baseline = load_baseline(self._bench, subject.config, subject.fp32, subject.held_out)
        self.reference: Scores = subject.task.score(baseline.outputs, self._targets)

    def quantize(self, config: RunConfig) -> tuple[Trial, Fp32Model]:
        """Quantize and run the held-out samples; return the FP32 network it was made of as well."""
        subject, drawn = self.subject, self.subject.calibration
        if config.calib.samples_per_class != subject.config.calib.samples_per_class:
            drawn = draw_calibration(
                subject.dataset, config.calib.samples_per_class, config.seed, [subject.held_out]
            )
        prepared = preparation.prepare(
            *(config, self._bench, subject.fp32, subject.dataset, drawn, None),
            *(self._scratch, self._scratch, self._run),
        )
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        trial = self._bench.run(
            prepared.config,
            prepared.network,
            drawn.split,
            subject.held_out,
            folder,
            prepared.ranges,
        )
        return trial, prepared.network

    def halves(self, trial: Trial, network: Fp32Model, reference: Comparison) -> Halves:
        """Run the network with rounded weights alone, and with rounded activations alone.

        Args:
            trial: of an artifact in QDQ format.
            network: that it was made of: corrected, where corrections are on.
            reference: the trial, compared with FP32.
        """
        subject = self.subject
        fp32, given, quantized = map(
            onnx.load, (subject.fp32.onnx_path, network.onnx_path, trial.artifact.path)
        )
        weights = qdq.rounded_weights(given.graph, quantized.graph)
        variants = {
            WEIGHTS: qdq.with_weights_rounded(given, weights),
            ACTIVATIONS: qdq.with_activations_rounded(
                fp32, qdq.rounded_activations(given.graph, quantized.graph)
            ),
        }
        found = {}
        for name, proto in variants.items():
            path = self._scratch / "half.onnx"
            onnx.save(proto, path)
            label = f"Rounding the {name} alone"
            run = self._bench.evaluate(subject.config, path, subject.held_out, label)
            compared = self.compare(run)
            found[name] = changes.weigh(f"({name} alone)", compared, reference, subject.task)
        return Halves(found[WEIGHTS], found[ACTIVATIONS])

    def compare(self, evaluation: Evaluation) -> Comparison:
        """Compare with FP32 on the held-out samples, which were run."""
        subject = self.subject
        scores = subject.task.score(with_logits(evaluation, subject.held_out), self._targets)
        return subject.task.compare(scores, self.reference)
