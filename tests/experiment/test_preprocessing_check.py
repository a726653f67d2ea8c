"""The check of a doubtful FP32 network tries the arithmetic of every preset."""

from pathlib import Path

import numpy as np
import pytest

from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment.preprocessing_check import usual
from tests.helpers.calling import REPO
from tests.helpers.configs import make_config

PRESETS = sorted(path.stem for path in Path(REPO, "conf", "preprocess").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_the_arithmetic_of_every_preset_is_tried(name):
    taken = make_config("data=shapes", f"preprocess={name}").preprocess
    pictures = Split(np.zeros((2, 8, 8, 3), np.uint8), None, "own")
    tried = []
    for _, steps in usual(pictures, sized=True):
        tried.append((steps.bgr, np.ravel(steps.mean).tolist(), np.ravel(steps.std).tolist()))
        tried[-1] += (pytest.approx(steps.scale),)
    wanted = (taken.channels == "bgr", taken.mean, taken.std, taken.scale)
    assert wanted in tried
