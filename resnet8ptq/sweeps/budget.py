"""The time of a search: the time left, and the expected time of a step.

The expected times of steps follow from the measured times of earlier steps, so they grow with the
load of the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from resnet8ptq.exploration.search.searching import Step, Tried
from resnet8ptq.exploration.search.step_table import START

LATE = 0.08  # fraction of the limit by which the last job may end later
LATEST = 0.1  # fraction of the limit by which the command may end later
FIRST = 0.1  # least fraction of the limit for the first file, even if reading took all the time
FP32_SLOWER = 2.0  # largest ratio of FP32's time to the model's
TIMED_RUNS = 500  # runs of one sample that time a model and FP32 in turns
MOST_TIMING_S = 10.0  # longest timing of both together


@dataclass(frozen=True)
class Budget:
    """The time limit of a search, from the start of the command to its end.

    Attributes:
        loading_s: seconds from the start of the command until the search is set up. The end of the
            command, which sends the runs and prints the table, should take less on this machine.
    """

    limit_s: float
    loading_s: float = 0.0

    @property
    def closing_s(self) -> float:
        """The seconds kept for the end of the command."""
        return min(self.loading_s, self.limit_s / 4)

    def left_s(self, spent_s: float) -> float:
        """Return the seconds left for steps.

        >>> Budget(limit_s=600, loading_s=20).left_s(spent_s=100)
        480
        """
        return max(0.0, self.limit_s - self.closing_s - spent_s)

    def until_late_s(self, spent_s: float) -> float:
        """Return the seconds until a job would end too late, see `LATE`; negative from then on."""
        return (1 + LATE) * self.limit_s - self.closing_s - spent_s

    def first_s(self, spent_s: float) -> float:
        """Return the seconds until a job is interrupted, as long as no model was measured.

        The job gets at least `FIRST` of the whole limit, however long the network took to read.
        """
        return max(self.until_late_s(spent_s), FIRST * self.limit_s)

    def has_time_to_draw(self, spent_s: float) -> bool:
        """Return whether a report that takes as long as loading would end in time, see `LATEST`."""
        return spent_s + self.loading_s <= (1 + LATEST) * self.limit_s


def again_s(tried: Tried) -> float:
    """Return the expected seconds to repeat a step, with learned layers and choices in the cache.

    A backend's first job also converts the network and measures FP32, and some steps learn or
    search until the deadline. The repetition of such a job is expected to take at most twice its
    seconds of quantization and evaluation.
    """
    if tried.step.kind == START or tried.step.part < 1:
        return min(tried.seconds, 2 * tried.own_seconds or tried.seconds)
    return tried.seconds


def confirm_s(tried: Tried, reported: int) -> float:
    """Return the expected seconds of a model's confirmation.

    The confirmation quantizes again, runs the model and FP32 on the reported samples, and times
    both.

    Args:
        reported: number of reported samples; 0 if unknown, which counts as the number of the step's
            samples.
    """
    if not tried.samples:
        return again_s(tried)
    run_s = tried.evaluate_s / tried.samples  # for one sample
    more = max(reported - tried.samples, 0)
    timing_s = min(TIMED_RUNS * run_s, MOST_TIMING_S)
    return again_s(tried) + (1 + FP32_SLOWER) * more * run_s + timing_s


def expect_s(step: Step, tried: Sequence[Tried]) -> float:
    """Return the expected seconds of a step, based on measured steps; 0 before the first.

    A cost above 1 counts as more time of quantization and evaluation, not of the rest of the job.
    """
    measured = [trial for trial in tried if trial.status == "ok"]
    own = [trial for trial in measured if trial.step.backend == step.backend] or measured
    alike = [trial for trial in own if trial.step.kind == step.kind]
    if alike:
        return max(map(_warm_s, alike))

    # Scale the longest job to a step of cost 1
    job_s = 0.0
    varying_s = 0.0  # time beyond what every job takes
    for trial in own:
        plain_s = _warm_s(trial) / max(trial.step.cost, 1)
        job_s = max(job_s, plain_s)
        varying_s = max(varying_s, trial.own_seconds or plain_s)
    return min(step.cost, 1) * job_s + max(step.cost - 1, 0) * varying_s


def _warm_s(tried: Tried) -> float:
    """Return the seconds that another step of the same kind would take."""
    return again_s(tried) if tried.step.kind == START else tried.seconds
