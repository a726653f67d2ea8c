"""Searches: the return value of a run for Hydra's sweeper, and checks before the first trial.

`objectives` names the metrics that a search weighs against each other. Without them, the sweeper
gets the drop: the loss against FP32 by the task's metric.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from resnet8ptq.config.loading import check_objectives
from resnet8ptq.config.schema import OBJECTIVES
from resnet8ptq.core.errors import ConfigError

if TYPE_CHECKING:  # run.py imports this module for --help too
    from resnet8ptq.tracking.record import RunRecord


log = logging.getLogger(__name__)

RESULTS_FILE = "optimization_results.yaml"  # written by Optuna's sweeper in the sweep's folder
_OPTUNA = "hydra_plugins.hydra_optuna_sweeper"


def to_return_value(
    record: "RunRecord", objectives: Sequence[str] | None
) -> float | list[float] | None:
    """Return the value of a run for the sweeper: the drop, or its objectives.

    Returns:
        One metric, or a list of several; None if one was not measured: an unsupported combination,
        or no latency. Optuna's sweeper then counts the trial as failed, and its samplers ignore it.
    """
    if not objectives:
        return record.drop
    metrics = record.metrics
    if metrics and (missing := [name for name in objectives if name not in metrics]):
        log.warning("objectives: %s not measured; the search skips the run", ", ".join(missing))
    if not set(objectives) <= set(metrics):
        return None
    values = [metrics[name] for name in objectives]
    return values if len(values) > 1 else values[0]


def prepare(config: DictConfig) -> dict[str, str]:
    """Check the sweeper's directions against `objectives`, and silence Optuna.

    Args:
        config: as Hydra composed it, with its own settings.

    Returns:
        Tags for the parent run.

    Raises:
        ConfigError: an objective is unknown, or `hydra.sweeper.direction` does not fit.
    """
    objectives = list(config.objectives or [])
    check_objectives(objectives)
    if config.hydra.sweeper.get("_target_", "").startswith(_OPTUNA):
        _check_directions(objectives, config.hydra.sweeper.direction)
        _quiet_optuna()
    return {"objectives": " ".join(objectives)} if objectives else {}


def _check_directions(objectives: Sequence[str], asked: Any) -> None:
    several = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    directions = [str(getattr(direction, "name", direction)) for direction in several]
    expected = [OBJECTIVES[name] for name in objectives] or ["minimize"]
    if directions != expected:
        raise ConfigError(
            f"hydra.sweeper.direction: got [{', '.join(directions)}], takes "
            f"[{', '.join(expected)}] for {' '.join(objectives) or 'the drop'}"
        )


def _quiet_optuna() -> None:
    """Silence Optuna's messages on runs, which run.py reports."""
    import warnings

    with warnings.catch_warnings():
        # From Optuna 2.10's SQL storage, unused here, with the SQLAlchemy that MLflow requires.
        warnings.filterwarnings("ignore", message=".*declarative_base")
        import optuna
    optuna.logging.set_verbosity(logging.WARNING)
    # It reports an unsupported combination as an error, for its missing numbers.
    logging.getLogger(_OPTUNA).setLevel(logging.ERROR)
