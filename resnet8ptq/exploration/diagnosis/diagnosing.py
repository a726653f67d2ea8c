"""`+analysis=diagnose`: finds causes of a loss against FP32, and changes that help.

Losses and tensors are measured on training samples that did not calibrate, never on test samples.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from resnet8ptq.backends.contract import refuse_others
from resnet8ptq.backends.registry import BACKENDS, make_quantizer
from resnet8ptq.calibration.outliers import Outliers
from resnet8ptq.config.schema import CalibConfig, RunConfig
from resnet8ptq.core.descriptor import find_search
from resnet8ptq.core.records import names_of, unpack
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluator import Compared, Quantized, baseline_config
from resnet8ptq.experiment import preparation, preprocessing_check, sample_check
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import SamplesByRole
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.experiment.subject import open_fitted
from resnet8ptq.experiment.workspace import Workspace
from resnet8ptq.exploration.diagnosis import diagnosis_table, outcomes
from resnet8ptq.exploration.diagnosis.conclusion import (
    ACTIVATIONS,
    WEIGHTS,
    DiagnosisResult,
    Halves,
)
from resnet8ptq.exploration.diagnosis.outcomes import Outcome
from resnet8ptq.exploration.search import step_table
from resnet8ptq.exploration.search.changes import Change, change
from resnet8ptq.exploration.tensors import analysing, findings
from resnet8ptq.exploration.tensors.comparing import SAMPLES, TensorComparison
from resnet8ptq.exploration.tensors.findings import Finding
from resnet8ptq.exploration.tensors.spread import Spread
from resnet8ptq.graph import qdq
from resnet8ptq.models.model import Fp32Model

REMOVE = "remove the named calibration samples"
OUTLIER_SAMPLE = "outlier among the calibration samples"
WRONG_PREPROCESSING = "wrong preprocessing"
OTHER_RANGE = 4  # ratio of the reaches of calibration and held-out samples
_STATIC = "+analysis=diagnose takes calibrated ranges; +analysis=compare takes any method"


def analyse(settings: Settings, folder: Path, run: Recorder) -> DiagnosisResult:
    """Measure tensor by tensor, find faults, try changes, and write and print the result.

    With `analysis.try_changes=false`, no change is tried, and the result is not printed. See
    `dispatch.run_or_analyse`.

    Raises:
        UnsupportedError: the method is not `static`, the backend cannot take the settings or the
            network, its files do not give their tensors, or none is matched.
        PtqError: network or samples cannot be read, or do not fit each other or the settings; or
            quantization fails.
    """
    config = settings.config
    refuse_others(config, {"method": (["static"], _STATIC)})
    settings.quantizer.resolve()
    notes = []
    if find_search(config.backend.name).diagnoses:
        if config.format in ("qoperator", "auto"):
            notes.append("diagnosed in format=qdq: format=qoperator hides the tensors in it")
        # A slim file has lost the names of its tensors.
        settings = settings.vary(format="qdq", slim=False)

    # Diagnose, and write the result with its params
    with open_fitted(settings, run, needs_labels=preparation.tunes(config)) as work:
        result = _diagnose(work)
    config = work.config
    resolved = work.settings.quantizer.resolve()
    params = {**resolved.to_params(), **work.samples.digests, "findings": result.to_json()}
    result = replace(result, notes=tuple(notes), resolved=params)
    diagnosis_table.write_diagnosis(folder, config, result)
    if config.analysis.try_changes:  # without changes, a search reads the findings
        diagnosis_table.print_tables(result, config)
    return result


def _diagnose(work: Workspace) -> DiagnosisResult:
    # Measure the quantized file, its tensors and its calibration samples
    config = work.config
    evaluator = work.evaluator
    samples = work.samples
    quantized, network = _quantize(work)
    compared = _compare(work, quantized.path)
    outliers = _find_outliers(work, network)
    left_out: set[int] = set()
    for outlier in outliers:
        left_out.update(outlier.samples)
    others = samples.without(sorted(left_out))
    measured = analysing.compare_artifact(
        work.settings, network, quantized.path, split=samples.held_out
    )

    # Find faults of the samples, of the preprocessing and of the file
    calibrating = samples.calibrating.split
    problems = [outlier_samples(one, calibrating, config.calib) for one in outliers]
    fp32 = evaluator.baseline_scores(samples.held_out)
    expected = config.report.expected_accuracy
    doubt = preprocessing_check.check(
        config.preprocess, evaluator, dataset=samples.data, baseline=fp32, expected=expected
    )
    if doubt is not None:
        problems.append(Finding(WRONG_PREPROCESSING, ("FP32",), doubt, certain=True))
    # The outliers have their own finding, so ranges are compared without them.
    problems += other_preprocessing(others.calibrating.split, samples.held_out)
    problems += analysing.find_faults(work.settings, measured)
    halves = _halve(work, measured, network, reference=compared)

    # Try the changes against the faults
    changes = _find_changes(config, problems, measured, halves)
    attempt = partial(_attempt, work)
    tried = outcomes.attempt(config, changes, compared, task=evaluator.task, compare=attempt)
    if outliers and config.analysis.try_changes:
        removal = _leave_out(work, others, compared)
        if removal.helps:
            tried.insert(0, removal)
        else:
            tried.append(removal)
    return DiagnosisResult(
        "ok",
        compared=measured,
        findings=tuple(problems),
        outcomes=tuple(tried),
        before=outcomes.unchanged(compared),
        halves=halves,
        metric=evaluator.task.metric,
        fp32_value=fp32.value,
        samples=len(samples.held_out),
    )


def _find_changes(
    config: RunConfig,
    problems: Sequence[Finding],
    measured: TensorComparison,
    halves: Halves | None,
) -> list[Change]:
    """Return the changes to try, each once; none with `analysis.try_changes=false`."""
    if not config.analysis.try_changes:
        return []
    answers: list[Change] = []
    for problem in problems:
        answers += problem.changes
    answers += step_table.usual(config, findings.worst_layer(measured))
    if halves is not None and halves.costs_more == WEIGHTS:
        answers += step_table.correct(config)
    by_words = {answer.words: answer for answer in answers}
    return list(by_words.values())


def _attempt(work: Workspace, config: RunConfig) -> Compared:
    """Quantize with these settings and the samples that they draw; compare with FP32."""
    drawn = work.samples.calibrated_with(config.calib.samples_per_class, config.seed)
    varied = replace(work.vary(config), samples=drawn)
    quantized, _ = _quantize(varied)
    return _compare(work, quantized.path)


def _quantize(work: Workspace) -> tuple[Quantized, Fp32Model]:
    """Quantize by the steps of a run; return the artifact and the network before quantization."""
    folder = Path(tempfile.mkdtemp(dir=work.scratch))
    prepared = preparation.prepare(work)
    return work.quantize(prepared, folder), prepared.network


def _compare(work: Workspace, path: Path) -> Compared:
    """Compare an artifact with FP32 on the held-out samples."""
    return work.evaluator.compare(path, work.samples.held_out)


def _find_outliers(work: Workspace, network: Fp32Model) -> list[Outliers]:
    """Return the calibration samples that stand out in an input, else those in another tensor.

    The list is empty if the settings calibrate nothing.
    """
    if not sample_check.calibrates(work.config):
        return []
    calib = work.config.calib
    path = network.onnx_path
    samples = work.samples.calibrating.split
    runtime = work.evaluator.runtime
    inputs = sample_check.check_inputs(calib, onnx.load(path).graph, samples)
    return inputs or sample_check.find_inside(calib, network=path, samples=samples, runtime=runtime)


def _leave_out(work: Workspace, others: SamplesByRole, reference: Compared) -> Outcome:
    """Return the outcome of a calibration with the samples `others`, which lack the outliers."""
    quantized, _ = _quantize(replace(work, samples=others))
    compared = _compare(work, quantized.path)
    return outcomes.weigh(REMOVE, compared=compared, reference=reference, task=work.evaluator.task)


def _halve(
    work: Workspace, measured: TensorComparison, network: Fp32Model, reference: Compared
) -> Halves | None:
    """Score the network with only weights rounded, and with only activations rounded.

    Returns None if the file does not give the weights of its layers.

    Args:
        measured: the tensors of the file.
        network: the network before quantization, including corrections.
        reference: the comparison of the artifact with FP32.
    """
    weights = [weight.rounded for weight in measured.weights]
    activations = []
    for tensor in measured.tensors:
        rounded = tensor.rounded
        if rounded is not None:
            activations.append(rounded)
    if not weights:
        return None

    # Round activations in FP32, but weights in the corrected network, which they belong to
    fp32 = onnx.load(work.fp32.onnx_path)
    exact = onnx.load(network.onnx_path)
    protos = {
        WEIGHTS: qdq.with_weights_rounded(exact, weights),
        ACTIVATIONS: qdq.with_activations_rounded(fp32, activations),
    }
    in_onnx = replace(baseline_config(work.config), backend=BACKENDS["onnx"].schema("onnx"))
    quantizer = make_quantizer(in_onnx, work.evaluator.runtime)
    evaluator = work.evaluator.with_quantizer(quantizer)

    # Score both with the float backend, on the samples of the reference
    halves = {}
    for name, proto in protos.items():
        path = work.scratch / "half.onnx"
        onnx.save(proto, path)
        label = f"Rounding the {name} alone"
        compared = evaluator.compare(path, work.samples.held_out, label)
        words = f"({name} alone)"
        halves[name] = outcomes.weigh(
            words, compared=compared, reference=reference, task=work.evaluator.task
        )
    return Halves(halves[WEIGHTS], halves[ACTIVATIONS], work.config.per_channel)


def outlier_samples(outliers: Outliers, samples: Split, calib: CalibConfig) -> Finding:
    """Return the finding of calibration samples that stand out."""
    clip = outliers.clip(calib)
    meaning = f"{outliers.describe(samples)}; {outliers.mend(calib)}"
    changes: tuple[Change, ...] = ()
    if clip:
        changes = (change(clip),)
    return Finding(OUTLIER_SAMPLE, (outliers.tensor,), meaning, changes=changes, certain=True)


def other_preprocessing(calibrating: Split, held_out: Split) -> list[Finding]:
    """Report calibration samples whose reach is far from that of the held-out samples.

    See `Spread.reach`. Reaches are far apart if one is at least `OTHER_RANGE` times the other.
    """
    drawn = _find_spread(calibrating)
    fed = _find_spread(held_out)
    least, most = sorted((drawn.reach, fed.reach))
    if not least or most / least < OTHER_RANGE:
        return []
    meaning = (
        f"their values lie within {drawn.low:.4g} to {drawn.high:.4g}, those of the held-out "
        f"samples within {fed.low:.4g} to {fed.high:.4g}; take calibration samples (calib.images) "
        "that are stored like the others, or a preprocess= that fits both"
    )
    return [Finding(WRONG_PREPROCESSING, ("the calibration samples",), meaning, certain=True)]


def _find_spread(split: Split) -> Spread:
    """Return the magnitudes of some samples' float inputs; integers such as tokens are left out."""
    spread = Spread()
    for batch in split.spaced(8 * SAMPLES).batches(SAMPLES):
        inputs = [batch]
        if names_of(batch.dtype):
            inputs = [*unpack(batch).values()]
        for values in inputs:
            if values.dtype.kind == "f":
                spread.add(values, values)
    return spread
