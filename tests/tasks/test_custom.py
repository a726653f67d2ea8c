"""`task=custom`: a metric of the user."""

from typing import Any

import pytest

from resnet8ptq.config.schema import BinaryConfig, CustomConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.scoring.outputs import Targets
from resnet8ptq.tasks.task import Task
from tests.helpers.task_cases import TARGETS, context, errors, noisy_values

CASES_MODULE = "tests.helpers.task_cases"


def largest(outputs, targets):
    """A metric with a mistake."""
    return outputs.max(axis=0)


class Scaled:
    """A metric with settings."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, outputs, targets):
        return self.factor * errors(outputs, targets)


def made(target: str | None, **arguments: Any) -> Task:
    config = CustomConfig(metric={"_target_": target, **arguments}, direction="minimize")
    return registry.make(config, context(TARGETS))


def test_functions_and_classes_are_called():
    function = made(f"{__name__}.errors")
    scaled = made(f"{__name__}.Scaled", factor=10)
    values = [task.score(noisy_values(0.5), Targets(TARGETS)).value for task in (function, scaled)]
    assert values[1] == pytest.approx(10 * values[0])
    assert function.metric.title == "errors"


def test_other_code_of_a_metric_is_another_identity(tmp_path, monkeypatch):
    """A resumed sweep must not take results of another metric."""
    monkeypatch.syspath_prepend(tmp_path)
    fingerprints = []
    for number in (1, 2):
        path = tmp_path / "edited_metric.py"
        path.write_text(f"def metric(outputs, targets):\n    return {number}\n")
        config = CustomConfig(metric={"_target_": "edited_metric.metric"})
        fingerprints.append(registry.fingerprint(config))
    assert fingerprints[0] != fingerprints[1]
    assert registry.fingerprint(CustomConfig(metric={"_target_": "math.sqrt"})) == ""
    assert registry.fingerprint(TaskConfig()) == registry.fingerprint(BinaryConfig()) == ""


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "task.metric._target_: got null, expected a callable"),
        (5, "task.metric._target_: got 5, expected a callable"),
        ("no_such_module.metric", r"got no_such_module.metric \("),
        (f"{CASES_MODULE}.ITEMS", f"got {CASES_MODULE}.ITEMS"),
        (f"{__name__}.largest", r"largest returns \(2,\)"),
        ("math.sqrt", "sqrt failed"),
    ],
)
def test_a_wrong_metric_is_refused_in_one_line(target, message):
    with pytest.raises(ConfigError, match=message) as caught:
        made(target).score(noisy_values(0.5), Targets(TARGETS))
    assert "\n" not in str(caught.value)
