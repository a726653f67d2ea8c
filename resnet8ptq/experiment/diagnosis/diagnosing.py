"""`+analysis=diagnose`: causes of a loss against FP32, and the changes that help.

Measured on training samples that did not calibrate, never on test samples.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from resnet8ptq.backends.contract import refuse_others
from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.calibration.outliers import Outliers
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.evaluation.evaluator import Quantized
from resnet8ptq.experiment import preparation, preprocessing_check, sample_check
from resnet8ptq.experiment.diagnosis import diagnosis_table, findings, measuring, outcomes
from resnet8ptq.experiment.diagnosis.conclusion import ACTIVATIONS, WEIGHTS, DiagnosisResult, Halves
from resnet8ptq.experiment.diagnosis.outcomes import Outcome
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import Samples
from resnet8ptq.experiment.search import step_table
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.experiment.subject import open_subject
from resnet8ptq.experiment.workspace import Workspace
from resnet8ptq.graph import qdq
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.comparison import Comparison

REMOVE = "remove the named calibration samples"
_DIAGNOSED = [name for name, backend in BACKENDS.items() if backend.search.diagnoses]
_TAKES = (
    f"+analysis=diagnose reads the graphs of backend={' | '.join(_DIAGNOSED)} method=static; set "
    "both"
)


def analyse(settings: Settings, folder: Path, run: Recorder) -> DiagnosisResult:
    """Measure tensor by tensor, find faults, try changes, and print the result.

    See `running.run`.

    Raises:
        UnsupportedError: the backend's or the method's files hold no QDQ graph.
    """
    config = settings.config
    refuse_others(config, {"backend.name": (_DIAGNOSED, _TAKES), "method": (["static"], _TAKES)})
    resolved = settings.quantizer.resolve()
    notes = []
    if config.format in ("qoperator", "auto"):
        notes.append("diagnosed in format=qdq: format=qoperator hides what is between its layers")
    # A slim file has lost the names of its tensors.
    settings = settings.vary(format="qdq", slim=False)
    config = settings.config
    evaluator, samples = open_subject(settings, run)
    with tempfile.TemporaryDirectory() as scratch:
        work = Workspace(settings, evaluator, samples, Path(scratch), Path(scratch), run)
        result = _diagnose(work)
    params = {**resolved.to_params(), **samples.digests, "findings": result.to_json()}
    result = replace(result, notes=tuple(notes), resolved=params)
    diagnosis_table.write(folder, config, result)
    if config.analysis.try_changes:  # otherwise a search reads the findings
        diagnosis_table.print_tables(result, diagnosis_table.describe(config))
    return result


def _diagnose(work: Workspace) -> DiagnosisResult:
    config, evaluator, samples = work.config, work.evaluator, work.samples
    quantized, network = _quantize(work)
    compared = _compare(work, quantized.path)
    outliers = _find_outliers(work, network)
    others = samples.without(sorted({index for one in outliers for index in one.samples}))
    measured = measuring.measure(
        onnx.load(network.onnx_path),
        onnx.load(quantized.path),
        others.calibrating.split,  # the finding names the outliers, not their range
        samples.held_out,
        evaluator.runtime.threads,
    )
    calibrating = samples.calibrating.split
    problems = [findings.outlier_samples(one, calibrating, config.calib) for one in outliers]
    problems += findings.find(measured, config)
    fp32, expected = evaluator.reference(samples.held_out), config.report.expected_accuracy
    doubt = preprocessing_check.check(config.preprocess, evaluator, samples.data, fp32, expected)
    if doubt is not None:
        problems.insert(len(outliers), findings.doubtful_fp32(doubt))
    halves = _halve(work, quantized, network, compared)
    answers = [change for problem in problems for change in problem.changes]
    answers += step_table.usual(config, findings.worst_layer(measured))
    if halves.costs_more == WEIGHTS:
        answers += step_table.correct(config)
    once = {change.words: change for change in answers if config.analysis.try_changes}
    tried = outcomes.attempt(
        config, list(once.values()), compared, evaluator.task, partial(_attempt, work)
    )
    if outliers and config.analysis.try_changes:
        removal = _leave_out(work, others, compared)
        tried.insert(0 if removal.helps else len(tried), removal)
    return DiagnosisResult(
        "ok",
        measured=measured,
        findings=tuple(problems),
        outcomes=tuple(tried),
        before=outcomes.unchanged(compared),
        halves=halves,
        metric=evaluator.task.metric,
        fp32_value=fp32.value,
        images=len(samples.held_out),
    )


def _attempt(work: Workspace, config: RunConfig) -> Comparison:
    """Quantize with these settings, including their number of calibration samples; compare."""
    drawn = work.samples.calibrated_with(config.calib.samples_per_class, config.seed)
    return _compare(work, _quantize(replace(work.vary(config), samples=drawn))[0].path)


def _quantize(work: Workspace) -> tuple[Quantized, Fp32Model]:
    """Quantize by the run's own steps; return the artifact and the network before quantization."""
    folder = Path(tempfile.mkdtemp(dir=work.scratch))
    prepared = preparation.prepare(work)
    return work.quantize(prepared, folder), prepared.network


def _compare(work: Workspace, path: Path, label: str = "Evaluating") -> Comparison:
    """Compare an artifact with FP32 on the tuning samples."""
    return work.evaluator.compare(path, work.samples.held_out, label).comparison


def _find_outliers(work: Workspace, network: Fp32Model) -> list[Outliers]:
    """Return the calibration samples that stand out in an input, else in another tensor."""
    if not sample_check.calibrates(work.config):
        return []
    calib, path = work.config.calib, network.onnx_path
    samples, runtime = work.samples.calibrating.split, work.evaluator.runtime
    inputs = sample_check.check_inputs(calib, onnx.load(path).graph, samples)
    return inputs or sample_check.find_inside(calib, path, samples, runtime)


def _leave_out(work: Workspace, others: Samples, reference: Comparison) -> Outcome:
    """Return the outcome of calibrating with the other samples."""
    compared = _compare(work, _quantize(replace(work, samples=others))[0].path)
    return outcomes.weigh(REMOVE, compared, reference, work.evaluator.task)


def _halve(
    work: Workspace, quantized: Quantized, network: Fp32Model, reference: Comparison
) -> Halves:
    """Run the network with only weights rounded, and with only activations rounded.

    Args:
        quantized: the quantized network in QDQ format.
        network: the network before quantization, including corrections.
        reference: the artifact, compared with FP32.
    """
    paths = work.fp32.onnx_path, network.onnx_path, quantized.path
    fp32, exact, rounded = map(onnx.load, paths)
    weights = qdq.rounded_weights(exact.graph, rounded.graph)
    activations = qdq.rounded_activations(exact.graph, rounded.graph)
    protos = {
        WEIGHTS: qdq.with_weights_rounded(exact, weights),
        ACTIVATIONS: qdq.with_activations_rounded(fp32, activations),
    }
    halves = {}
    for name, proto in protos.items():
        path = work.scratch / "half.onnx"
        onnx.save(proto, path)
        compared = _compare(work, path, f"Rounding the {name} alone")
        words = f"({name} alone)"
        halves[name] = outcomes.weigh(words, compared, reference, work.evaluator.task)
    return Halves(halves[WEIGHTS], halves[ACTIVATIONS], work.config.per_channel)
