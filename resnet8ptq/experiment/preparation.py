"""Steps that prepare the network and its settings before a backend quantizes it."""

import time
from dataclasses import replace
from pathlib import Path

import onnx

from resnet8ptq.calibration import table
from resnet8ptq.config.schema import CorrectionsConfig, RunConfig
from resnet8ptq.core import background
from resnet8ptq.corrections import sequence
from resnet8ptq.experiment.layers import exclusion, planning
from resnet8ptq.experiment.workspace import Preparation, Step, Workspace
from resnet8ptq.finetuning import qat
from resnet8ptq.graph.attention import attention_products
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.plan import Selection, find_quantized_layers


def tunes(config: RunConfig) -> bool:
    """Return whether a step chooses layers, bits or an epoch on tuning samples."""
    choice = config.method == "qat" or "auto" in (config.nodes_to_exclude, config.precision.plan)
    return choice and config.dtype.name != "fp32"


def prepare(work: Workspace) -> Preparation:
    """Run each step that the settings enable."""
    start = time.perf_counter()
    prepared = Preparation(work.config, work.fp32, work.fp32)
    if work.config.dtype.name == "fp32":
        return prepared
    steps: list[Step] = [plan_bits, fine_tune, correct, read_table, leave_in_float]
    for step in steps:
        prepared = step(work, prepared)
    if prepared.network is work.fp32 and not prepared.params:
        return prepared
    return replace(prepared, seconds=time.perf_counter() - start)


def plan_bits(work: Workspace, prepared: Preparation) -> Preparation:
    """Choose the bits of each layer's weights with `precision.plan=auto`; log any plan."""
    config, metrics = prepared.config, prepared.metrics
    if config.precision.plan == "auto":
        chosen = planning.choose_bits(work, prepared, correct)
        config = replace(config, precision=replace(config.precision, plan=dict(chosen.bits)))
        metrics = {**metrics, "plan/bytes": chosen.size_bytes}
    if config.precision.plan is None:
        return prepared
    graph = onnx.load(work.fp32.onnx_path).graph
    layers, products = find_quantized_layers(graph, Selection.of(config)), attention_products(graph)
    params = prepared.params | work.plan(config).to_params(layers, config.precision, products)
    return replace(prepared, config=config, params=params, metrics=metrics)


def fine_tune(work: Workspace, prepared: Preparation) -> Preparation:
    """Fine-tune with `method=qat`; log the curves, and draw `qat_loss.png`."""
    config = prepared.config
    if config.method != "qat":
        return prepared
    settings = qat.QatSettings(
        config.qat,
        config.calib,
        work.plan(config),
        work.activations,
        Selection.of(config),
        config.float_output,
        config.seed,
    )
    points: list[dict[str, float]] = []

    def report(point: dict[str, float]) -> None:
        points.append(point)
        curves = {name: value for name, value in point.items() if name != "step"}
        work.run.log_step(int(point["step"]), curves)

    samples, runtime = work.samples, work.evaluator.runtime
    network, ranges = qat.fine_tune(
        settings, work.fp32, samples.data, samples.calibrating, samples.held_out, runtime, report
    )
    background.put(_draw_curves, points, work.folder / "qat_loss.png")
    return replace(prepared, trained=network, network=network, learned=ranges, ranges=ranges)


def correct(work: Workspace, prepared: Preparation) -> Preparation:
    """Apply the enabled corrections to the trained network."""
    config = prepared.config
    setting = work.setting(config, work.samples.calibrating.split)
    network, ranges = sequence.correct(
        prepared.trained, config.corrections, setting, config.seed, work.scratch
    )
    return replace(prepared, network=network, ranges=prepared.learned if ranges is None else ranges)


def read_table(work: Workspace, prepared: Preparation) -> Preparation:
    """Read the ranges that `calib.table` names."""
    path = prepared.config.calib.table
    if path is None:
        return prepared
    return replace(prepared, ranges=table.load(path, work.provenance(prepared)))


def leave_in_float(work: Workspace, prepared: Preparation) -> Preparation:
    """With `nodes_to_exclude=auto`, choose the layers that stay in float."""
    config = prepared.config
    if config.nodes_to_exclude != "auto":
        return prepared

    def correct_again(variant: RunConfig, folder: Path) -> Fp32Model:
        return correct(replace(work, scratch=folder), replace(prepared, config=variant)).network

    chosen = exclusion.choose(
        config,
        work.evaluator,
        work.samples,
        prepared.network,
        work.folder,
        ranges=prepared.ranges,
        correct=correct_again if _corrects_again(config.corrections) else None,
    )
    prepared = replace(
        prepared,
        config=replace(config, nodes_to_exclude=chosen.nodes),
        params=prepared.params | chosen.to_params(),
        metrics=prepared.metrics | chosen.to_metrics(),
    )
    # The weights of the chosen layers are not to be rounded after all.
    return read_table(work, correct(work, prepared)) if chosen.nodes else prepared


def _corrects_again(chosen: CorrectionsConfig) -> bool:
    """Return whether each trial of layers in float is corrected again, within seconds.

    Smoothing and equalization do not change the function of a layer in float. Together with them,
    rounding would be learned again for minutes: only without them does the cache have AdaRound's
    layers.
    """
    changes = chosen.smooth_quant or chosen.equalization
    learns = chosen.reconstruction or (chosen.adaround and changes)
    return (chosen.adaround or chosen.bias_correction) and not learns


def _draw_curves(points: list[dict[str, float]], path: Path) -> None:
    from resnet8ptq.core import figures  # only the process that draws imports matplotlib
    from resnet8ptq.experiment import plots

    figures.save(plots.fine_tuning(points), path)
