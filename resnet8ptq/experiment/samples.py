"""Draws the samples of a run or an analysis, by role."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resnet8ptq.config.schema import EvaluateConfig, RunConfig
from resnet8ptq.core.console import warn_once
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.data.sampling import (
    LEAST_TO_CHOOSE,
    draw_calibration,
    draw_held_out,
    draw_selection,
    halve,
    shuffle,
)
from resnet8ptq.tasks.task import Task

log = logging.getLogger(__name__)

Check = Callable[[Split], object]  # raises ConfigError for samples that the task cannot score


@dataclass(frozen=True)
class SamplesByRole:
    """The samples of a run or an analysis, by their roles.

    Attributes:
        data: the data set, arranged for the network; its test split has the reported samples.
        calibrating: samples that determine activation ranges.
        tuning: training samples for the choices of the run's steps, or for the measurements of an
            analysis; None without either.
        selection: the samples for the sweep's recommendation, if they are not the reported ones.
        selected_from: the origin of `selection`, as text.
    """

    data: Dataset
    calibrating: CalibrationSet
    tuning: Split | None = None
    selection: Split | None = None
    selected_from: str = ""

    @property
    def reported(self) -> Split:
        """The samples of the reported results."""
        return self.data.test

    def as_scored(self, evaluate: EvaluateConfig) -> "SamplesByRole":
        """Return the samples; the reported ones in random order if scoring may stop early."""
        if evaluate.stop == "all":
            return self
        return replace(self, data=replace(self.data, test=shuffle(self.data.test)))

    @property
    def held_out(self) -> Split:
        """The tuning samples, for runs and analyses that have them."""
        assert self.tuning is not None
        return self.tuning

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the calibrating samples and of any tuning samples, as params."""
        drawn = {"calibration_digest": self.calibrating.digest}
        return drawn if self.tuning is None else drawn | {"held_out_digest": self.tuning.digest}

    def without(self, indices: Sequence[int]) -> "SamplesByRole":
        """Return the samples without some calibrating samples.

        Args:
            indices: their positions in `calibrating.split`.
        """
        drawn = self.calibrating
        kept = np.setdiff1d(np.arange(len(drawn.split)), indices)
        left = CalibrationSet(drawn.split.take(kept), drawn.indices[kept])
        return replace(self, calibrating=left)

    def calibrated_with(self, samples_per_class: int | None, seed: int) -> "SamplesByRole":
        """Return the samples with another calibration draw, disjoint from `tuning`."""
        drawn = draw_calibration(self.data, samples_per_class, seed, taken=[self.held_out])
        return replace(self, calibrating=drawn)


def draw(config: RunConfig, data: Dataset, tunes: bool, check: Check) -> SamplesByRole:
    """Draw the samples of a run for every role.

    Args:
        data: the data set, arranged for the network.
        tunes: whether steps of the run choose on tuning samples.
        check: raises `ConfigError` for samples that the task cannot score, such as the training
            samples of an anomaly task, which are all normal.

    Raises:
        ConfigError: there are too few samples for a role, or unsuitable ones.
        DataError: all calibration samples are test samples too.
    """
    # Each role draws from the samples that earlier roles left. Only `_choose` may let two roles
    # share samples: the tuning samples may also be the selection samples.
    taken = []
    if config.evaluate.split == "held_out":
        data = replace(data, test=draw_held_out(data, config.held_out_images))
        taken.append(data.test)
    tuning = draw_held_out(data, config.held_out_images, taken) if tunes else None
    if tuning is not None:
        check(tuning)
        taken.append(tuning)
    drawn = draw_calibration(data, config.calib.samples_per_class, config.seed, taken=taken)
    samples = SamplesByRole(data, drawn, tuning)
    if config.evaluate.split == "held_out":
        return samples
    samples = _choose(config, samples, check)
    return _report_selection(samples) if config.evaluate.split == "choice" else samples


def draw_to_analyse(config: RunConfig, data: Dataset) -> SamplesByRole:
    """Draw training samples for the measurements of an analysis, and others for calibration.

    Raises:
        ConfigError: there are too few samples to draw from.
        DataError: all calibration samples are test samples too.
    """
    tuning = draw_held_out(data, config.held_out_images)
    drawn = draw_calibration(data, config.calib.samples_per_class, config.seed, taken=[tuning])
    return SamplesByRole(data, drawn, tuning)


def draw_to_calibrate(config: RunConfig, data: Dataset) -> CalibrationSet:
    """Draw calibration samples only.

    Raises:
        ConfigError: there are too few samples to draw from.
        DataError: all calibration samples are test samples too.
    """
    return draw_calibration(data, config.calib.samples_per_class, config.seed)


def _choose(config: RunConfig, samples: SamplesByRole, check: Check) -> SamplesByRole:
    """Return the samples with the selection samples of `evaluate.choice`.

    `auto` uses training samples. If `draw_selection` returns None, or the task cannot score these
    samples, `auto` uses half of the test samples. `auto` and `half` add no samples if the halves
    would be too small or the task cannot score them.

    Raises:
        ConfigError: `held_out` finds too few unused training samples that the task can score; see
            also `draw_held_out`.
    """
    how = config.evaluate.choice
    data = samples.data
    if how == "none":
        return samples

    # Use training samples, if there are enough
    if how != "half":
        selection = samples.tuning
        if selection is None:
            selection = draw_selection(data, config.held_out_images, samples.calibrating.split)
        if selection is not None and _passes(check, selection):
            return replace(samples, selection=selection, selected_from="training samples")
        if how == "held_out":
            unit = "samples" if data.train.groups is None else "groups"
            raise ConfigError(
                f"evaluate.choice: got held_out, expected half or none: {data.name} has fewer than "
                f"{LEAST_TO_CHOOSE} unused training {unit} that task={config.task.name} can score"
            )

    # Otherwise use half of the test samples
    halves = halve(data.test, len(data.class_names))
    if halves is None or not all(_passes(check, half) for half in halves):
        warn_once(
            log,
            "%s: too few samples of each class for separate selection samples; the recommendation "
            "is chosen and reported on the same %d test samples",
            data.name,
            len(data.test),
        )
        return samples
    selection, rest = halves
    log.info(
        "%s: too few training samples to spare: %d of %d test samples are selection samples, the "
        "others are reported on; evaluate.choice=none reports on all, a smaller "
        "calib.samples_per_class may leave enough",
        data.name,
        len(selection),
        len(data.test),
    )
    data = replace(data, test=rest)
    return replace(samples, data=data, selection=selection, selected_from="of the test samples")


def _report_selection(samples: SamplesByRole) -> SamplesByRole:
    """Return the samples with the selection samples as the reported ones.

    All other roles are drawn as for `evaluate.split=test`, so the same settings calibrate with the
    same samples in both cases. Without separate selection samples, the test samples keep both
    roles.
    """
    if samples.selection is None:
        return samples
    data = replace(samples.data, test=samples.selection)
    return replace(samples, data=data, selection=None)


def _passes(check: Check, split: Split) -> bool:
    try:
        check(split)
    except ConfigError:
        return False
    return True


def has_groups(samples: Split, task: Task) -> bool:
    """Return whether samples of one group are scored separately; they are not independent."""
    groups = samples.groups
    if groups is None or task.scope.joins_groups:
        return False
    return len(np.unique(groups)) < len(groups)
