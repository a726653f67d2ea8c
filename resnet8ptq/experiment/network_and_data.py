"""Loads network, data and task of a run, and checks that they and the settings fit together."""

import logging
from dataclasses import replace
from typing import Any

import onnx

from resnet8ptq.config.schema import QuantizationConfig, RunConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError, ModelError, UnsupportedError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.graph.footprint import samples_at_once
from resnet8ptq.graph.links import input_names
from resnet8ptq.models import model
from resnet8ptq.models.contract import match_samples
from resnet8ptq.models.conversion import UNFOLDED
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.plan import Selection, check_known, find_float_nodes
from resnet8ptq.tasks import registry as tasks
from resnet8ptq.tasks.scoring.outputs import TaskContext
from resnet8ptq.tasks.task import Task

log = logging.getLogger(__name__)

SYNTHETIC = 100  # number of synthetic samples


def fit_data(dataset: Dataset, fp32: Fp32Model) -> Dataset:
    """Return the data set with the network's form of samples and its limits of the batch size.

    Callers draw the samples of each role afterwards, so that all roles have the same form. Pictures
    [N, H, W, C] become [N, C, H, W] when they are read, if the network takes that order.

    Raises:
        ModelError: the network cannot take the samples.
        UnsupportedError: the network takes a fixed number of samples at once that is above one.
    """
    contract = fp32.contract
    if contract.batch not in (None, 1):
        raise UnsupportedError(
            f"{fp32.source}: takes {contract.batch} samples at once, and its batch cannot be freed "
            f"({fp32.conversion.why_fixed})"
        )
    test = dataset.test
    matched = match_samples(test.stored[:1], test.preprocessing, contract)
    longest = None if matched.fields is None else matched.fields.longest(test.stored.dtype)
    most = samples_at_once(onnx.load(fp32.onnx_path), longest)
    # A split and a match have attributes of the same names.
    changes: dict[str, Any] = {**vars(matched), "at_once": contract.batch, "within_memory": most}
    return dataset.with_splits(lambda split: replace(split, **changes))


def load_data_and_network(settings: Settings) -> tuple[Dataset, Fp32Model]:
    """Read data and network; return the data arranged for the network, and the network.

    With `calib.synthetic`, the data have synthetic calibration samples.

    Raises:
        PtqError: data or network are missing or damaged, or do not fit each other or the settings.
    """
    config = settings.config
    cache_root = settings.runtime.cache_root
    data = settings.data
    torch = settings.quantizer.runs_torch or _learns(config)
    fp32 = model.load_network(config.model, data, cache_root, torch=torch)
    data = fit_data(data, fp32)
    if config.calib.synthetic:
        data = replace(data, calibration=_synthesize(settings, data.test, fp32))
    return data, fp32


def _synthesize(settings: Settings, like: Split, fp32: Fp32Model) -> Split:
    """Return synthetic calibration samples, see `simulation.synthetic`.

    Raises:
        ConfigError: `calib.images` is set too, or torch does not see the GPU of `device`.
        UnsupportedError: synthetic samples cannot be made for this network.
    """
    from resnet8ptq.simulation import synthetic  # imports torch

    calib = settings.config.calib
    if calib.images is not None:
        raise ConfigError(
            f"calib.synthetic: got true, and calib.images={calib.images}; expected one of them"
        )
    log.warning(
        "calib.synthetic: the ranges are those of synthetic samples, a last resort: calibrate with "
        "samples of the network's use if there are any"
    )
    return synthetic.make_samples(
        unfolded=fp32.onnx_path.with_name(UNFOLDED),
        like=like,
        count=calib.samples_per_class or SYNTHETIC,
        seed=settings.config.seed,
        runtime=settings.runtime,
        source=str(fp32.source),
    )


def _learns(config: QuantizationConfig) -> bool:
    """Return whether the run learns in torch, by AdaRound, reconstruction or fine-tuning."""
    return config.corrections.adaround or any(_training(config).values())


def make_task(
    config: TaskConfig, dataset: Dataset, fp32: Fp32Model, scored: Split, name: str = ""
) -> Task:
    """Return the task that scores the network on the samples `scored`.

    Args:
        name: the name of these samples in errors; empty for the data set's name.

    Raises:
        ConfigError: the samples or the settings do not fit the task, for example because the
            samples have no labels.
        ModelError: the task does not score outputs of this form.
    """
    shapes = {output.name: output.shape for output in fp32.contract.outputs}
    context = TaskContext(
        name or dataset.name,
        scored.labels,
        dataset.class_names,
        named=dataset.named,
        input_shape=scored.input_shape,
        outputs=shapes,
        final=fp32.final,
        class_ids=dataset.class_ids,
        grouped=scored.groups is not None,
    )
    try:
        return tasks.make(config, context)
    except ModelError as error:
        raise ModelError(f"{fp32.source}: {error}{_ask_for_scores(fp32)}") from None


def _ask_for_scores(fp32: Fp32Model) -> str:
    """Return the mend for a network whose outputs are all made by ArgMax; empty for others."""
    graph = onnx.load(fp32.onnx_path).graph
    names = [value.name for value in graph.output]
    scores = []
    for node in graph.node:
        if node.op_type == "ArgMax" and node.output[0] in names:
            scores.append(node.input[0])
    if len(scores) < len(names):
        return ""
    inputs = input_names(graph)
    return (
        "; its ArgMax hides the scores: export the network without it, for an ONNX file by "
        f"onnx.utils.extract_model('IN.onnx', 'OUT.onnx', {inputs}, {scores})"
    )


def fit_settings(settings: Settings, fp32: Fp32Model) -> Settings:
    """Return the settings with the backend's defaults for the network.

    Raises:
        ConfigError: a setting names an unknown node, operator or layer, or `precision.plan` gives a
            product of attention fewer than 8 bits.
        QuantizationError: the settings leave no node to quantize.
        UnsupportedError: this network cannot be quantized with these settings.
    """
    config = settings.config
    _refuse_training(config, fp32)

    # Refuse settings under which torch runs a network that it cannot run
    mends = ["backend=onnx"] if settings.quantizer.runs_torch else []
    mends += [_WITHOUT[setting] for setting, is_set in _training(config).items() if is_set]
    reason = fp32.conversion.without_torch.get(fp32.onnx_path.name)
    if reason and mends:
        raise UnsupportedError(f"torch cannot run the network: {reason}; try {' '.join(mends)}")

    # Refuse unknown names of nodes
    graph = onnx.load(fp32.onnx_path).graph
    if not config.dtype.is_float:
        find_float_nodes(graph, Selection.of(config))
    elif not config.dtype.is_fp32:
        excluded = Decisions.of(config).in_float
        check_known("nodes_to_exclude", excluded, [node.name for node in graph.node])
    return settings.fit(fp32)


_WITHOUT = {
    "method=qat": "method=static",
    "corrections.reconstruction=true": "corrections.reconstruction=false",
}


def _training(config: QuantizationConfig) -> dict[str, bool]:
    """Return the settings that learn with the whole network in torch, and whether each is set."""
    return {
        "method=qat": config.method == "qat",
        "corrections.reconstruction=true": config.corrections.reconstruction,
    }


def _refuse_training(config: RunConfig, fp32: Fp32Model) -> None:
    """Raise `UnsupportedError` for settings of `_training`, if the network has several inputs."""
    contract = fp32.contract
    for setting, is_set in _training(config).items():
        if is_set and len(contract.inputs) > 1:
            raise UnsupportedError(
                f"{setting}: got a network of {len(contract.inputs)} inputs "
                f"({contract.input_names}), expected one; try corrections.adaround=true"
            )
