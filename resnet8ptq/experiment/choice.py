"""The samples that a sweep chooses its recommendation by, apart from those it reports on."""

import logging
from dataclasses import replace

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sampling import LEAST_TO_CHOOSE, draw_choice, halve
from resnet8ptq.experiment.compatibility import settle_task
from resnet8ptq.models.model import Fp32Model

log = logging.getLogger(__name__)


def part(
    config: RunConfig,
    data: Dataset,
    calibration: Split,
    held_out: Split | None,
    fp32: Fp32Model,
) -> tuple[Dataset, Split | None]:
    """Return the data whose test samples are reported on, and the samples to choose by.

    Args:
        config: `evaluate.choice` says which; `auto` takes training samples where it can.
        calibration: samples that do not choose.
        held_out: training samples that the run has drawn already, for choices of its own.

    Returns:
        None for the second where the sweep has nothing to choose, or too few samples.

    Raises:
        ConfigError: `evaluate.choice=held_out`, and there are too few training samples.
    """
    how = config.evaluate.choice if config.evaluate.split == "test" else "none"
    if how == "none":
        return data, None
    if how != "half":
        found = held_out
        if found is None:
            found = draw_choice(data, config.held_out_images, calibration)
        if found is not None and _can_be_scored(config, data, found, fp32):
            return data, found
        if how == "held_out":
            raise ConfigError(
                f"evaluate.choice: got held_out, takes half or none: {data.name} has fewer than "
                f"{LEAST_TO_CHOOSE} training samples to spare that task={config.task.name} scores"
            )
    halves = halve(data.test, len(data.class_names))
    if halves is None or not all(_can_be_scored(config, data, half, fp32) for half in halves):
        log.warning(
            "%s: too few samples of each kind to choose by some and report on others; a "
            "recommendation is chosen on the %d test samples it is reported on",
            *(data.name, len(data.test)),
        )
        return data, None
    choice, rest = halves
    log.info(
        "%s: too few training samples to spare, so %d of %d test samples choose and the others are "
        "reported on; evaluate.choice=none reports on all, and a smaller calib.samples_per_class "
        "may leave enough",
        *(data.name, len(choice), len(data.test)),
    )
    return replace(data, test=rest), choice


def _can_be_scored(config: RunConfig, data: Dataset, found: Split, fp32: Fp32Model) -> bool:
    """Tell whether the task can do with training samples; those of an anomaly task are all good."""
    try:
        settle_task(config.task, data, found, fp32)
    except ConfigError:
        return False
    return True
