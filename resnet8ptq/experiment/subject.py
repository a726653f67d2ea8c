"""Opens the network of an analysis, and the samples to measure it on."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment.network_and_data import fit_settings, load_data_and_network, make_task
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import SamplesByRole, draw_to_analyse
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.experiment.workspace import Workspace
from resnet8ptq.tasks.registry import AUTO

log = logging.getLogger(__name__)


def open_subject(
    settings: Settings, run: Recorder, needs_labels: bool = True
) -> tuple[Evaluator, SamplesByRole]:
    """Read data and network, draw the samples, log the task; return the evaluator and the samples.

    The measured samples are the tuning samples: training samples that do not calibrate.

    Args:
        needs_labels: whether the labels decide the result. Otherwise, training samples that the
            task cannot score, such as those of anomaly data, get a task that needs no labels.

    Raises:
        PtqError: data or network are missing or damaged, or do not fit each other or the task; or
            there are too few samples to draw from.
    """
    config = settings.config
    data, fp32 = load_data_and_network(settings)
    samples = draw_to_analyse(config, data)

    # Training samples that the task cannot score are compared with FP32, if that is enough
    name = f"the training samples of {data.name}"
    make = partial(make_task, dataset=data, fp32=fp32, name=name)
    try:
        task = make(config.task, scored=samples.held_out)
    except ConfigError as error:
        if needs_labels:
            raise
        samples = replace(samples, tuning=replace(samples.held_out, labels=None))
        task = make(TaskConfig(AUTO), scored=samples.held_out)
        log.info("task=%s compares the training samples with FP32: %s", task.name, error)
    run.log_params(task.describe())
    evaluator = Evaluator(settings.quantizer, fp32, task, config.evaluate.batch_size)
    return evaluator, samples


@contextmanager
def open_fitted(
    settings: Settings, run: Recorder, needs_labels: bool = True
) -> Iterator[Workspace]:
    """Open network and samples, with settings that have the backend's defaults for the network.

    The files of the workspace are removed at the end of the block.

    Args:
        needs_labels: see `open_subject`.

    Raises:
        PtqError: see `open_subject` and `fit_settings`.
    """
    evaluator, samples = open_subject(settings, run, needs_labels)
    settings = fit_settings(settings, evaluator.network)
    evaluator = evaluator.with_quantizer(settings.quantizer)
    with tempfile.TemporaryDirectory() as scratch:
        yield Workspace(
            settings, evaluator, samples, folder=Path(scratch), scratch=Path(scratch), run=run
        )
