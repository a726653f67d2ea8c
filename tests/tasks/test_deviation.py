"""The limit of outputs without labels."""

import numpy as np
import pytest

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.evaluation.stopped_hits import read_pair
from resnet8ptq.report.verdicts import FAIL, PASS, UNDECIDED, decide
from resnet8ptq.tasks import deviation
from resnet8ptq.tasks.deviation import DeviationValues
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.outputs import VALUES, Outputs, Targets
from resnet8ptq.tasks.task import Task
from tests.helpers.task_cases import drawn


def compared_at(db: float, items: int = 300) -> tuple[Task, Comparison]:
    """Compare two outputs with noise of this SQNR; one is ten thousand times as large."""
    random = drawn(int(db))
    signal = [scale * random.normal(size=(items, 8)) for scale in (1, 1e4)]
    noise = [random.normal(size=(items, 8)) for _ in signal]
    scale = 10 ** (-db / 20)
    noisy = [
        x + scale * n * np.linalg.norm(x) / np.linalg.norm(n)
        for x, n in zip(signal, noise, strict=True)
    ]
    task = deviation.build(("a", "b"))
    outputs = (Outputs(tuple(values), None, VALUES) for values in (noisy, signal))
    return task, task.compare(*(task.score(values, Targets()) for values in outputs))


@pytest.mark.parametrize(("db", "outcome"), [(28, PASS), (22, FAIL), (25.05, UNDECIDED)])
def test_without_labels_the_limit_is_an_sqnr(db, outcome):
    task, comparison = compared_at(db)
    assert comparison.sqnr_db == pytest.approx(db)
    kept = read_pair(task.test, comparison.paired.arrays())
    limit = task.metric.limit(ReportConfig())
    [verdict] = decide([(kept.margin(task.metric, limit, 300), 300)])
    assert verdict.outcome == outcome
    metrics = task.metrics(comparison)
    assert metrics["drop"] == pytest.approx(10 ** (-db / 10))
    assert (metrics["drop"] <= limit) == (db > 25)
    assert (
        task.metric.say_limit(task.metric.limit(ReportConfig()))
        == "SQNR of at least 25 dB against FP32"
    )
    assert task.metric.show_limit(ReportConfig()) == "report.min_sqnr_db=25"


def test_the_bound_of_the_sqnr_keeps_its_level():
    """Simulated at the limit: the one-sided test is wrong in about 5% of cases."""
    random, wrong = drawn(8), 0
    for _ in range(2000):
        signal = random.chisquare(8, 200) / 8
        noise = 0.01 * random.chisquare(8, 200) / 8
        values = DeviationValues(replicates=noise, noise=noise, signal=signal)
        margin = values.margin(values, deviation.RELATIVE_ERROR, 0.01, 200)
        wrong += margin.p_within < 0.05
    assert 0.02 < wrong / 2000 < 0.06


def detected(random: np.random.Generator, last: bool) -> np.ndarray:
    """Return boxes in pixels beside scores of three classes, for 40 pictures and 50 anchors."""
    boxes = random.uniform(5, 300, (40, 4, 50))
    scores = random.uniform(0, 0.9, (40, 3, 50)) ** 8
    joined = np.concatenate([boxes, scores], axis=1)
    return joined.swapaxes(1, 2) if last else joined


@pytest.mark.parametrize("last", [False, True])
def test_scores_beside_boxes_are_judged_by_themselves(last):
    """An 8-bit scale for pixels rounds every score to 0; over all values, the SQNR is 45 dB."""
    random = drawn(3)
    exact = detected(random, last)
    step = 300 / 255
    rounded = np.round(exact / step) * step
    task = deviation.build(("boxes",))
    outputs = [Outputs((values,), None, VALUES) for values in (rounded, exact)]
    assert task.scope.find_silent(("boxes",), *outputs) == "output boxes is zero for every sample"
    comparison = task.compare(*(task.score(values, Targets()) for values in outputs))
    metrics = task.metrics(comparison)
    assert metrics["sqnr_db"] < 1
    assert metrics["drop"] > task.metric.limit(ReportConfig())
    assert distortion.to_db(distortion.noise_ratio(exact, rounded)) > 45


@pytest.mark.parametrize("shape", [(40, 7), (40, 7, 50), (40, 7, 9, 9)])
def test_channels_of_one_unit_stay_together(shape):
    random = drawn(4)
    sizes = random.lognormal(0, 1.5, 7).reshape(7, *[1] * (len(shape) - 2))
    signal = sizes * random.normal(size=shape)
    signal[:, 2] = 0  # a dead channel
    assert len(distortion.find_units(signal)) == 1


@pytest.mark.parametrize(
    ("loss", "text"), [(0.0, "equal outputs"), (0.01, "SQNR 20.0 dB"), (np.nan, "outputs of NaN")]
)
def test_outputs_of_nan_are_not_called_equal(loss, text):
    assert deviation.RELATIVE_ERROR.state_loss(loss) == text
