"""The interface through which an experiment records a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.data.dataset import CalibrationSet, Dataset
from resnet8ptq.evaluation.result import RunResult


class Recorder(Protocol):
    """An open run, to which an experiment logs."""

    def log_config(self, config: RunConfig) -> None:
        """Log every setting."""

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log params that the run determines, in addition to the config."""

    def log_datasets(
        self, data: Dataset, calibration: CalibrationSet, class_names: Sequence[str] = ()
    ) -> None:
        """Log the calibration samples, the scored samples, their digests, and the class names."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log points of curves, such as a loss, at `step`."""

    def log_model(
        self, path: Path, outputs: Mapping[str, Sequence[int]], engine: str | None = None
    ) -> None:
        """Log the artifact as a model that can be served.

        Args:
            path: the artifact, in a folder with `example.npz`.
            outputs: the shape of each output, without the batch axis; a free size is -1.
            engine: the engine that was measured, see `backends.contract.Resolved`.
        """

    def log_result(self, result: RunResult) -> None:
        """Log the metrics, the params and the status of the result."""
