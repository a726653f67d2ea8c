"""FP32 that is no better than chance raises a doubt."""

import math

import numpy as np
import pytest

from resnet8ptq.tasks import perplexity, regression
from resnet8ptq.tasks.detection.decoding import NOTHING
from resnet8ptq.tasks.scoring import statistics
from resnet8ptq.tasks.scoring.comparison import doubt_below
from resnet8ptq.tasks.scoring.outputs import LOGITS, PROBABILITIES, VALUES, Outputs, Targets
from tests.helpers.task_cases import (
    CASES,
    ITEMS,
    MASKS,
    RANDOM,
    TARGETS,
    WINDOWS,
    WORDS,
    drawn,
    every,
)

NOISE = RANDOM.normal(size=(ITEMS, 7)).astype(np.float32)
BROKEN = {  # outputs of a broken network by task
    "classification": Outputs((np.eye(7, dtype=np.float32)[np.zeros(ITEMS, int)],)),
    "top5": Outputs((drawn(4).random((ITEMS, 7)).astype(np.float32),)),
    "binary": Outputs((drawn(4).random((ITEMS, 1)).astype(np.float32),), None, PROBABILITIES),
    "multilabel": Outputs((NOISE,), None, LOGITS),
    "anomaly": Outputs((WINDOWS + NOISE[:, :4],), None, VALUES),
    "regression": Outputs((TARGETS[::-1].copy(),), None, VALUES),
    "verification": Outputs((NOISE,), None, LOGITS),
    "ctc": Outputs((drawn(4).integers(0, 8, (ITEMS, 12)),), None, VALUES),
    "perplexity": Outputs(
        perplexity.NextToken(0, 7)((drawn(4).normal(size=(ITEMS, 12, 7)),), WORDS), None, VALUES
    ),
    "similarity": Outputs((np.ones((ITEMS, 1), np.float32),), None, VALUES),
    "segmentation": Outputs((drawn(4).integers(0, 7, MASKS.shape, np.uint8),), None, VALUES),
    "detection": Outputs((np.full((ITEMS, 4, 6), NOTHING, np.float32),), None, VALUES),
    "keypoints": Outputs((np.full((ITEMS, 4, 12), NOTHING, np.float32),), None, VALUES),
    "instance_segmentation": Outputs(
        (np.full((ITEMS, 4, 6), NOTHING, np.float32), np.full(ITEMS, b"")), None, VALUES
    ),
}


@every
def test_a_good_fp32_network_is_not_doubted(case):
    scores = case.task.score(case.outputs(0.0), case.targets)
    assert case.task.doubt(scores, None) is None


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.task.name in BROKEN])
def test_fp32_at_chance_is_doubted(case):
    scores = case.task.score(BROKEN[case.task.name], case.targets)
    doubt = case.task.doubt(scores, None)
    assert doubt is not None
    assert doubt.startswith(("NEAR CHANCE, ", "NO BETTER THAN THE MEAN, ", "NEAR ZERO, "))


@pytest.mark.parametrize(("share", "doubted"), [(0.02, True), (0.1, False)])
def test_many_samples_prove_a_little_skill_which_is_doubted(share, doubted):
    """As of a network that takes pixels from 0 to 1, and gets them from 0 to 255."""
    labels = drawn(0).integers(0, 7, 20_000)
    predictions = np.where(drawn(1).random(20_000) < share, labels, drawn(2).permutation(labels))
    assert statistics.above_chance(labels, predictions, 7) < 0.05
    task = CASES["classification"].task
    scores = task.score(Outputs((np.eye(7, dtype=np.float32)[predictions],)), Targets(labels))
    assert (task.doubt(scores, None) is not None) == doubted


@pytest.mark.parametrize("target", [1.0, 0.1])  # the mean of 20 times 0.1 is not 0.1
def test_constant_targets_raise_no_doubt(target):
    task, same = regression.build(resamples=100), Targets(np.full((20, 1), target))
    outputs = Outputs((np.full((20, 1), 1.1, np.float32),), None, VALUES)
    assert task.doubt(task.score(outputs, same), None) is None


@pytest.mark.parametrize(
    ("high", "expected", "doubted"),
    [
        (0.7, 0.8, True),
        (0.8, 0.8, False),
        (0.7, None, False),
        (math.nan, 0.8, False),  # too many bootstrap samples have no value
    ],
)
def test_only_an_interval_below_the_expected_value_raises_a_doubt(high, expected, doubted):
    assert (doubt_below("AP 0.6", (high - 0.2, high), expected) is not None) == doubted
