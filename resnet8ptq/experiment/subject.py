"""What an analysis looks at: a network, the samples it is measured on, and what scores it."""

from dataclasses import dataclass

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.data.sampling import draw_calibration, draw_held_out
from resnet8ptq.evaluation.trial import Bench
from resnet8ptq.experiment.compatibility import load, settle, settle_task
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.contract import Task


@dataclass(frozen=True)
class Subject:
    """A network, and training samples that neither calibrate nor test it.

    Attributes:
        config: with the data's place settled.
        dataset: as the network takes it.
    """

    config: RunConfig
    runtime: Runtime
    dataset: Dataset
    fp32: Fp32Model
    held_out: Split
    calibration: CalibrationSet
    task: Task

    @property
    def digests(self) -> dict[str, str]:
        """Which samples calibrated, and which were held out."""
        drawn = self.calibration.digest
        return {"calibration_digest": drawn, "held_out_digest": self.held_out.digest}

    def bench(self, final: str) -> Bench:
        """Return where variants are made and measured; `final` is what they return."""
        size = self.config.evaluate.batch_size
        return Bench(self.fp32.sha256, self.runtime, size, final, self.task.reduction)


def open_subject(config: RunConfig, run: Recorder) -> Subject:
    """Read data and network, draw the samples, and log the settings.

    Raises:
        PtqError: what is missing or does not fit, in one line.
    """
    runtime = cache.runtime(config.cache_dir, config.threads)
    config = settle(config, runtime.cache_root)
    run.log_config(config)
    dataset, fp32 = load(config, runtime.cache_root)
    held_out = draw_held_out(dataset, config.held_out_images)
    calibration = draw_calibration(dataset, config.calib.samples_per_class, config.seed, [held_out])
    task = settle_task(config.task, dataset, held_out, fp32)
    run.log_params(task.describe())
    return Subject(config, runtime, dataset, fp32, held_out, calibration, task)
