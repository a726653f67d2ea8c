"""`task=custom`: a metric of the user's own, a callable that `task.metric._target_` names."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from numpy.typing import NDArray
from omegaconf.errors import OmegaConfBaseException

from resnet8ptq.config.schema import CustomConfig, TaskConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import one_line
from resnet8ptq.tasks import bootstrap, contract
from resnet8ptq.tasks.bootstrap import Comparison, Paired, Scores
from resnet8ptq.tasks.contract import Metric, Outputs, Setting, Targets

TAKES = "takes a callable (outputs, targets) -> a number, or one for each sample"


@dataclass(frozen=True)
class Custom(contract.Task):
    """Whatever the metric takes.

    Attributes:
        call: the metric; None where only what a run has kept is read.
        title: what it is called: the last part of `_target_`.
        direction, percent: see `Metric`.
        resamples: see `bootstrap.Scores`.
    """

    call: Callable[[Any, Any], Any] | None = None
    title: str = "metric"
    direction: str = "maximize"
    percent: bool = False
    resamples: int = 9999

    name = "custom"
    test = bootstrap.TEST
    intervals = bootstrap.INTERVALS
    paired: ClassVar[type[contract.Paired]] = Paired
    schema = CustomConfig

    @classmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Import the metric, and what it was given besides."""
        assert isinstance(config, CustomConfig)  # see `registry`
        return cls._make(config, _load(config.metric))

    @classmethod
    def recall(cls, config: TaskConfig, class_names: tuple[str, ...]) -> Self:
        """Set the task up for what a run has kept; nothing is imported that a store names."""
        assert isinstance(config, CustomConfig)
        return cls._make(config, None)

    @classmethod
    def fingerprint(cls, config: TaskConfig) -> str:
        """Return the hash of the file that the metric is in; of what has no file, nothing."""
        assert isinstance(config, CustomConfig)
        call = _load(config.metric)
        try:
            found = inspect.getsourcefile(getattr(call, "func", type(call)))
        except TypeError:  # built in
            found = None
        return files.sha256(Path(found)) if found else ""

    @classmethod
    def _make(cls, config: CustomConfig, call: Callable[[Any, Any], Any] | None) -> Self:
        title = str((config.metric or {}).get("_target_", "metric")).rpartition(".")[2]
        return cls((), call, title, config.direction, config.percent, config.resamples)

    @property
    def metric(self) -> Metric:
        """The user's, as `custom_metric`."""
        maximize = self.direction == "maximize"
        return Metric("custom_metric", self.title, maximize, self.percent, bounded=self.percent)

    def score(self, outputs: Outputs, targets: Targets) -> Scores:
        """Call the metric on all samples, and on bootstrap samples where it has no value for each.

        Raises:
            ConfigError: it returns neither a number nor one for each sample, or fails.
        """
        labels, items = targets.labels, len(outputs)

        def measure(
            call: Callable[[Any, Any], Any], chosen: NDArray[np.int64] | slice
        ) -> NDArray[np.float64]:
            some = [array[chosen] for array in outputs.values]
            wanted = None if labels is None else labels[chosen]
            return np.asarray(call(some[0] if len(some) == 1 else some, wanted), np.float64)

        assert self.call is not None  # see `recall`
        try:
            whole = measure(self.call, slice(None))
        except Exception as error:  # the user's own
            raise ConfigError(f"task.metric: {self.title} failed ({one_line(error)})") from error
        if whole.shape not in ((), (items,)) or not np.isfinite(whole).all():
            raise ConfigError(
                f"task.metric: {self.title} returns {whole.shape or whole}; {TAKES}, all finite"
            )
        if whole.shape:
            return Scores(outputs, bootstrap.mean_of(whole), items, self.resamples, whole)
        call = _once_checked(self.call)
        return Scores(outputs, lambda chosen: float(measure(call, chosen)), items, self.resamples)

    def compare(self, model: Scores, baseline: Scores) -> Comparison:
        """Compare the metric."""
        return Comparison(model, baseline)


def _once_checked(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the metric without Hydra's check of each call, which takes longer than most metrics.

    To be used once a call has passed it: the target and what it was given stay the same.
    """
    if isinstance(call, partial):
        return partial(call.func, *call.args, **call.keywords)
    return call


def _load(given: Any) -> Callable[[Any, Any], Any]:
    """Import what `_target_` names: a function, or a class, of which an instance is made."""
    target = (given or {}).get("_target_")
    if not target:
        raise ConfigError(f"task.metric._target_: got null, {TAKES}")
    try:
        arguments = {} if isinstance(get_object(target), type) else {"_partial_": True}
        call = instantiate({**given, **arguments})
    except (HydraException, OmegaConfBaseException, ImportError, ValueError) as error:
        raise ConfigError(
            f"task.metric._target_: got {target} ({one_line(error)}), {TAKES}"
        ) from error
    if not callable(call):
        raise ConfigError(f"task.metric._target_: got {target}, {TAKES}")
    return call
