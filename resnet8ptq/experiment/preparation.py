"""Steps that prepare the network, and the decisions for it, before a backend quantizes it."""

import logging
import time
from dataclasses import replace
from pathlib import Path

import onnx

from resnet8ptq.backends.contract import LARGEST_HALF
from resnet8ptq.calibration import foreign_table, table
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.config.schema import CorrectionsConfig, RunConfig
from resnet8ptq.core import background
from resnet8ptq.corrections import sequence
from resnet8ptq.experiment.layers import exclusion, placement, planning
from resnet8ptq.experiment.workspace import Prepared, Step, Workspace
from resnet8ptq.finetuning import qat
from resnet8ptq.graph.attention import attention_products
from resnet8ptq.precision.plan import find_quantized_layers

log = logging.getLogger(__name__)


def tunes(config: RunConfig) -> bool:
    """Return whether a step chooses layers, bits or an epoch on tuning samples."""
    choice = config.method == "qat" or "auto" in (config.nodes_to_exclude, config.precision.plan)
    return choice and not config.dtype.is_float


def prepare(work: Workspace) -> Prepared:
    """Run each step that the settings enable, and return the network with its decisions.

    A step takes the decisions of earlier steps and returns them with its own; it changes neither
    settings nor samples.
    """
    start = time.perf_counter()
    prepared = work.unprepared
    if work.config.dtype.is_fp32:
        return prepared
    steps: list[Step] = [plan_bits, fine_tune, correct, read_table, leave_in_float, place]
    if work.config.dtype.is_float:
        steps = [keep_large_in_float]
    for step in steps:
        prepared = step(work, prepared)
    if prepared.network is work.fp32 and not prepared.params:
        return prepared
    return replace(prepared, seconds=time.perf_counter() - start)


def plan_bits(work: Workspace, prepared: Prepared) -> Prepared:
    """Choose the bits of each layer with `precision.plan=auto`; add the params of any plan."""
    if work.config.precision.plan is None:
        return prepared
    metrics = prepared.metrics
    if work.config.precision.plan == "auto":
        chosen = planning.choose_bits(work, prepared, correct)
        prepared = prepared.decide(bits=chosen.bits)
        metrics = {**metrics, "plan/bytes": chosen.size_bytes}

    # Describe a plan of the settings too
    decisions = prepared.decisions
    graph = onnx.load(work.fp32.onnx_path).graph
    layers = find_quantized_layers(graph, work.settings.quantizer.select(decisions))
    products = attention_products(graph)
    params = work.plan(decisions).to_params(layers, decisions.bits or {}, products)
    return replace(prepared, params=prepared.params | params, metrics=metrics)


def fine_tune(work: Workspace, prepared: Prepared) -> Prepared:
    """Fine-tune with `method=qat`; log the curves, and draw `qat_loss.png`."""
    config = work.config
    if config.method != "qat":
        return prepared
    settings = qat.QatSettings(
        config.qat,
        config.calib,
        weights=work.plan(prepared.decisions),
        activations=work.activations,
        selection=work.settings.quantizer.select(prepared.decisions),
        float_output=config.float_output,
        seed=config.seed,
    )
    points: list[dict[str, float]] = []

    def log_point(point: dict[str, float]) -> None:
        points.append(point)
        curves = {name: value for name, value in point.items() if name != "step"}
        work.run.log_step(int(point["step"]), curves)

    # Train here, and draw the curves in the background
    samples = work.samples
    runtime = work.evaluator.runtime
    network, ranges = qat.fine_tune(
        settings,
        work.fp32,
        dataset=samples.data,
        calibration=samples.calibrating,
        held_out=samples.held_out,
        runtime=runtime,
        log_point=log_point,
    )
    background.put(_draw_curves, points, work.folder / "qat_loss.png")
    prepared = replace(prepared, trained=network, network=network, learned=ranges)
    return prepared.decide(ranges=ranges)


def correct(work: Workspace, prepared: Prepared) -> Prepared:
    """Apply the enabled corrections to the trained network."""
    setting = work.correction_settings(prepared.decisions, work.samples.calibrating.split)
    network, ranges = sequence.correct(
        prepared.trained,
        chosen=work.config.corrections,
        setting=setting,
        seed=work.config.seed,
        folder=work.scratch,
    )
    prepared = replace(prepared, network=network)
    return prepared.decide(ranges=prepared.learned if ranges is None else ranges)


def read_table(work: Workspace, prepared: Prepared) -> Prepared:
    """Read the ranges of `calib.table`; with `calib.trust`, from a table of any origin.

    Raises:
        ConfigError: see `table.load_ranges`; or with `calib.trust`, the table has no tensor of the
            network.
    """
    calib = work.config.calib
    if calib.table is None:
        return prepared
    if not calib.trust:
        provenance = work.provenance(prepared.network)
        return prepared.decide(ranges=table.load_ranges(calib.table, provenance))
    ranges = table.load_ranges(calib.table, provenance=None)
    graph = onnx.load(prepared.network.onnx_path, load_external_data=False).graph
    return prepared.decide(ranges=foreign_table.match_tensors(ranges, graph, calib.table))


def leave_in_float(work: Workspace, prepared: Prepared) -> Prepared:
    """With `nodes_to_exclude=auto`, choose the nodes that stay in float.

    If any stay, the network is corrected again for the remaining layers.
    """
    if work.config.nodes_to_exclude != "auto":
        return prepared
    again = correct if _corrects_again(work.config.corrections) else None
    chosen = exclusion.choose(work, prepared, again)
    prepared = replace(
        prepared,
        params=prepared.params | chosen.to_params(),
        metrics=prepared.metrics | chosen.to_metrics(),
    ).decide(in_float=chosen.nodes)
    if not chosen.nodes:
        return prepared
    # The weights of the chosen layers must not be rounded
    return read_table(work, correct(work, prepared))


def place(work: Workspace, prepared: Prepared) -> Prepared:
    """With `precision.placement=measured`, choose the nodes in float that make the file faster.

    If there are any, the network is corrected again for the remaining layers.
    """
    if work.config.precision.placement is None:
        return prepared
    chosen = placement.choose(work, prepared)
    prepared = replace(
        prepared,
        params=prepared.params | chosen.to_params(),
        metrics=prepared.metrics | chosen.to_metrics(),
    )
    if not chosen.nodes:
        return prepared
    prepared = prepared.decide(in_float=[*prepared.decisions.in_float, *chosen.nodes])
    return read_table(work, correct(work, prepared))


def keep_large_in_float(work: Workspace, prepared: Prepared) -> Prepared:
    """With `dtype=fp16`, keep layers in float32 whose inputs or outputs are too large for float16.

    Otherwise, a runtime that computes in float16 would overflow.
    """
    calib = replace(work.config.calib, name="minmax", table=None)
    samples = work.samples.calibrating.split
    runtime = work.evaluator.runtime
    activations = Activations(
        prepared.network.onnx_path, calibration=samples, calib=calib, runtime=runtime
    )

    # Add the layers beyond float16's largest value to those already in float
    beyond = activations.find_beyond(LARGEST_HALF)
    if beyond:
        listed = ", ".join(f"{name} ({peak:,.0f})" for name, peak in beyond.items())
        log.warning(
            "dtype=fp16: these layers stay in float32, since values are beyond float16's 65,504: "
            "%s",
            listed[:500],
        )
        params = prepared.params | {"beyond_float16": ", ".join(beyond)}
        prepared = replace(prepared, params=params)
    in_float = dict.fromkeys([*prepared.decisions.in_float, *beyond])
    return prepared.decide(in_float=[*in_float])


def _corrects_again(chosen: CorrectionsConfig) -> bool:
    """Return whether the network is corrected again for each trial of nodes in float.

    Smoothing and equalization alone need no new correction: they do not change the function of a
    layer in float. AdaRound and bias correction are repeated, unless rounding would be learned
    again for minutes. Reconstruction always learns again. AdaRound does with smoothing or
    equalization, because the cache lacks the learned layers of the changed network.
    """
    changes = chosen.smooth_quant or chosen.equalization
    learns = chosen.reconstruction or (chosen.adaround and changes)
    return (chosen.adaround or chosen.bias_correction) and not learns


def _draw_curves(points: list[dict[str, float]], path: Path) -> None:
    from resnet8ptq.core import figures  # only the process that draws imports matplotlib
    from resnet8ptq.experiment import plots

    figures.save(plots.fine_tuning(points), path)
