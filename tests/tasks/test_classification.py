"""Many classes."""

import numpy as np
import pytest

from resnet8ptq.config.schema import BinaryConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks import classification, registry
from resnet8ptq.tasks.scoring.outputs import LOGITS, Outputs, Targets
from tests.helpers import task_cases


def test_a_thousand_classes_stay_readable():
    random = np.random.default_rng(0)
    labels = random.integers(0, 1000, 3000)
    names = tuple(f"class {number}" for number in range(1000))
    task = classification.build(names)
    pair = []
    for noise in (1.0, 1.1):
        logits = random.normal(size=(3000, 1000)).astype(np.float32) * noise
        logits[np.arange(3000), labels] += 4
        pair.append(task.score(Outputs((logits,), None, LOGITS), Targets(labels)))
    comparison = task.compare(*pair)
    assert len(task.metrics(comparison)) < 40
    assert task.few_names == ()
    assert len(task.files.tables(comparison)["per_class.csv"]) == 1001
    for figure in task.files.figures(comparison, "many").values():
        assert len(figure.axes[0].get_xticks()) == 20
        assert "the 20 of 1000 classes" in (
            figure.axes[0].get_title() + getattr(figure, "get_suptitle", str)()
        )


@pytest.mark.parametrize(
    ("config", "output"),
    [(TaskConfig("classification"), 2), (BinaryConfig(), 2), (BinaryConfig(), 1)],
    ids=["classification", "binary", "one value"],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_labels_of_pixels_or_tokens_are_no_classes(config, output, dtype):
    labels = np.tile(np.array([0, 1], dtype), (4, 1))
    data = task_cases.context(labels, {"out": (output,)}, LOGITS)
    with pytest.raises(ConfigError, match=r"the labels of pets are u?int\d+ \[4, 2\], expected"):
        registry.make(config, data)
