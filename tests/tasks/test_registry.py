"""The task that fits the data, and data that fit no task."""

import numpy as np
import pytest

from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core import console
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.scoring.outputs import LOGITS, PROBABILITIES, VALUES, Outputs, Targets
from tests.helpers.configs import make_config
from tests.helpers.task_cases import (
    CLASSES,
    LINES,
    MASKS,
    NAMES,
    PICTURES,
    SENTENCES,
    SEVERAL,
    TAGS,
    TARGETS,
    TWO,
    context,
)

CHOSEN = [  # labels and outputs, and the task that `auto` takes
    (context(TWO), "classification"),
    (context(TWO, {"out": (1,)}), "binary"),
    (context(TARGETS), "regression"),
    (context(PICTURES, {"out": (3, 12, 12)}, VALUES), "dense"),
    (context(MASKS, {"out": (7, 8, 8)}, VALUES, NAMES), "segmentation"),
    (context(SENTENCES, {"out": (None, 5)}, VALUES, TAGS), "tokens"),
    (context(SEVERAL, {"out": (7,)}, LOGITS, NAMES), "multilabel"),
    (context(np.repeat(LINES[:9], 2), {"out": (5,)}, LOGITS), "verification"),
    (context(np.repeat(LINES[:9], 2), {"out": (64,)}, VALUES), "verification"),
    (context(None), "agreement"),
    (context(None, {"out": (4,)}, VALUES), "deviation"),  # a reconstruction
    (context(None, {"out": (1,)}, LOGITS), "deviation"),
    (context(None, {"out": (3,)}, LOGITS), "deviation"),  # logits, or three values
    (context(TARGETS, {"out": (2,)}, LOGITS), "regression"),
    (context(None, {"scores": (7, 2), "boxes": (7, 4)}, VALUES), "deviation"),
]


@pytest.mark.parametrize(("data", "name"), CHOSEN)
def test_the_task_that_fits(data, name, caplog):
    caplog.set_level("INFO")
    console.log_once.cache_clear()
    for _ in range(2):
        assert registry.make(TaskConfig(), data).name == name
    [line] = [line for line in caplog.messages if line.startswith("task=auto chose ")]
    assert line.startswith(f"task=auto chose {name}: ")  # once, with the reason


def test_every_task_that_auto_takes_has_its_reason():
    chosen = {name for _, name in CHOSEN}
    # Detectors' labels and alphabets have tests of their own.
    assert set(registry.BECAUSE) == chosen | {
        *("detection", "keypoints", "instance_segmentation", "ctc")
    }


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("classification", context(None), ConfigError, "labels of pets are none, expected classes"),
        ("classification", context(LINES), ConfigError, "try numpy.unique(labels, "),
        ("classification", context(TARGETS), ConfigError, "float32 [120, 2], expected classes"),
        ("classification", context(TWO, {"out": (3,)}), ModelError, "returns 3 values; pets"),
        (
            "classification",
            context(TWO + 1, names=("0", "1", "2"), named=False),
            ModelError,
            "the labels start at 1: subtract 1",
        ),
        (
            "classification",
            context(TWO, {"a": (7, 2)}, VALUES),
            ModelError,
            "returns a [7, 2]; exp",
        ),
        ("binary", context(TWO * 0), ConfigError, "expected two, with samples of both"),
        ("anomaly", context(CLASSES), ConfigError, "expected 0 (normal) and 1 (an anomaly)"),
        ("anomaly", context(None), ConfigError, "labels of pets are None; expected 0 (normal)"),
        ("anomaly", context(TWO), ModelError, "the reconstructed input [4], or a score"),
        ("regression", context(None), ConfigError, "are none, expected values [N, ...]"),
        (
            "regression",
            context(TARGETS, {"out": (3,)}),
            ModelError,
            "2 values to predict; expected on",
        ),
        ("segmentation", context(TWO), ConfigError, "pets has no masks; expected a folder of"),
        ("segmentation", context(MASKS, {"out": (3,)}), ModelError, "takes values [classes, "),
        (
            "segmentation",
            context(MASKS, {"out": (5, 8, 8)}, VALUES, ()),
            ModelError,
            "returns out [5, 8, 8], and pets has 7 classes and labels up to 6",
        ),
        (
            "dense",
            context(PICTURES, {"out": (3, 24, 24)}),
            ModelError,
            "pets has targets [12, 12, 3]; task=dense expects one output of their size",
        ),
        ("agreement", context(None, {"out": (1,)}), ModelError, "task=deviation compares values"),
    ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(name, data, error, message):
    with pytest.raises(error) as caught:
        registry.make(registry._find(name).schema(name=name), data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", registry.TASKS)
def test_the_option_of_a_task_has_the_schema_of_its_type(name):
    schema = registry._find(name).schema
    assert type(make_config(f"task={name}").task) is schema, (
        f"see defaults in conf/task/{name}.yaml"
    )


def test_options_need_their_group():
    with pytest.raises(ConfigError, match="try task=binary"):
        registry.make(TaskConfig("binary"), context(TWO))


def test_a_network_may_know_more_classes_than_unnamed_samples_show():
    data = context(TWO, {"out": (5,)}, named=False)
    assert registry.make(TaskConfig(), data).class_names == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize("shape", [(1, 1), ()])
def test_axes_of_size_1_do_not_hide_the_classes(shape):
    scores = context(TWO, {"out": (2, *shape)}, LOGITS)
    assert registry.make(TaskConfig(), scores).name == "classification"
    one = context(TWO, {"out": shape}, LOGITS)
    assert registry.make(TaskConfig(), one).name == "binary"


@pytest.mark.parametrize("shape", [(1, 1), ()])
@pytest.mark.parametrize("final", [PROBABILITIES, LOGITS])
def test_scores_are_those_of_a_flat_output(shape, final):
    drawn = np.random.default_rng(0).random((len(TWO), 2)).astype(np.float32)
    targets = Targets(TWO)
    for columns in (2, 1):
        task = registry.make(TaskConfig(), context(TWO, {"out": (columns,)}, final))
        flat = drawn[:, :columns]
        lead = (len(TWO), columns) if columns > 1 else (len(TWO),)
        deep = flat.reshape(*lead, *shape)
        values = []
        for array in (flat, deep):
            values.append(task.score(Outputs((array,), None, final), targets).value)
        assert values[0] == values[1]


def test_the_output_that_holds_the_classes_is_named():
    several = context(TWO, {"embedding": (16,), "scores": (2,)}, VALUES)
    with pytest.raises(ModelError, match=r"model\.outputs=\[scores\]"):
        registry.make(TaskConfig(), several)
    both = context(TWO, {"features": (16,), "logits": (2,), "probabilities": (2,)}, VALUES)
    with pytest.raises(ModelError, match=r"model\.outputs=\[logits\]"):
        registry.make(TaskConfig(), both)
    maps = context(TWO, {"map": (4, 4)}, VALUES)
    with pytest.raises(ModelError) as raised:
        registry.make(TaskConfig(), maps)
    assert "model.outputs" not in str(raised.value)  # there is nothing to choose
