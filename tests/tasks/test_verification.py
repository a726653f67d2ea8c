"""`task=verification` against the ROC curve of scikit-learn."""

import numpy as np
import pytest
from scipy.interpolate import interp1d
from scipy.optimize import brentq
from sklearn.metrics import roc_curve
from sklearn.neighbors import NearestNeighbors

from resnet8ptq.config.schema import VerificationConfig
from resnet8ptq.core.errors import ConfigError, DataError, ModelError
from resnet8ptq.tasks import verification
from resnet8ptq.tasks.scoring.outputs import LOGITS, Outputs, Targets, TaskContext

RANDOM = np.random.default_rng(0)
PEOPLE = np.repeat(np.arange(40), 4)
VALUES = RANDOM.normal(size=(40, 6))[PEOPLE] + RANDOM.normal(size=(160, 6))


def value(primary: str, values: np.ndarray, targets: Targets, **settings) -> float:
    task = verification.build(primary, resamples=100, **settings)
    return task.score(Outputs((values,)), targets).value


def cosines(values: np.ndarray) -> np.ndarray:
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    return unit @ unit.T


@pytest.mark.parametrize("digits", [8, 1])  # with one digit, many cosines are equal
@pytest.mark.parametrize("listed", [False, True])
def test_the_values_of_scikit_learn(digits, listed):
    if listed:  # in the plane, so that the scores have few values
        angles = np.round(RANDOM.random(300) * 3, digits)
        same = RANDOM.random(300) < 1 - angles / 3
        turned = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        values = np.stack([np.tile([1.0, 0.0], (300, 1)), turned], axis=1).reshape(600, 2)
        targets = Targets(np.repeat(same, 2).astype(int), np.repeat(np.arange(300), 2))
        scores = np.cos(angles)
    else:
        values = np.round(VALUES, digits)
        targets = Targets(PEOPLE)
        one, other = np.triu_indices(160, 1)
        scores = np.round(cosines(values)[one, other], 12)
        same = PEOPLE[one] == PEOPLE[other]
    false, true, _ = roc_curve(same, np.round(scores, 12), drop_intermediate=False)
    expected = brentq(lambda x: 1 - x - interp1d(false, true)(x), 0, 1)
    assert value("eer", values, targets) == pytest.approx(expected, abs=1e-6)
    for far in (0.01, 0.1):
        best = true[false <= far].max()
        assert value("tar", values, targets, far=far) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        ([3, 3, 4, 4], "data.labels: got other labels than 0 and 1"),
        (["0", "0", "1", "1"], "data.labels: got other labels than 0 and 1"),
        ([0, 1, 1, 1], "data.groups: a pair has two labels"),
    ],
)
def test_labels_of_pairs_are_0_and_1_and_equal(labels, named):
    targets = Targets(np.array(labels), np.array([0, 0, 1, 1]))
    with pytest.raises(DataError, match=named):
        value("eer", VALUES[:4], targets)


@pytest.mark.parametrize("k", [1, 5])
def test_recall_of_the_nearest_samples(k):
    near = NearestNeighbors(n_neighbors=k + 1, metric="cosine").fit(VALUES)
    others = near.kneighbors(VALUES, return_distance=False)[:, 1:]
    expected = (PEOPLE[others] == PEOPLE[:, None]).any(axis=1).mean()
    assert value("recall", VALUES, Targets(PEOPLE), k=k) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("primary", "worst"), [("eer", 1), ("tar", 0), ("recall", 0)])
def test_embeddings_of_nan_are_wrong(monkeypatch, primary, worst):
    """Pairs of one identity come first in a long list, and NaN kept this order."""
    monkeypatch.setattr(verification, "MOST_PAIRS", 500)
    none = np.full_like(VALUES, np.nan)
    assert value(primary, none, Targets(PEOPLE)) == worst


def test_a_sample_with_nan_is_near_no_other():
    broken = np.arange(len(VALUES)) % 4 == 0
    values = np.where(broken[:, np.newaxis], np.nan, VALUES)
    hits = verification.find_hits(values, PEOPLE, 1)
    assert not hits[broken].any()
    assert (hits[~broken] == verification.find_hits(VALUES[~broken], PEOPLE[~broken], 1)).all()


def test_many_pairs_of_different_identities_are_drawn(monkeypatch):
    monkeypatch.setattr(verification, "MOST_PAIRS", 500)
    assert len(verification._list_pairs(PEOPLE)) == 500 + 40 * 6


def test_identities_may_be_text_and_lone_samples_are_no_queries():
    names = np.array(["ann", "ann", "bob"])
    values = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    assert value("recall", values, Targets(names)) == 1


def test_what_does_not_fit_is_refused():
    def make(labels, **outputs):
        data = TaskContext("faces", labels, (), True, (4,), outputs, LOGITS)
        return verification.VERIFICATION.make(verification.VerificationConfig(), data)

    assert make(PEOPLE, out=(6,)).metric.name == "eer"
    with pytest.raises(ConfigError, match="the labels of faces are none, expected an identity"):
        make(None, out=(6,))
    with pytest.raises(ModelError, match="takes one output, the embedding"):
        make(PEOPLE, out=(1,))
    with pytest.raises(ConfigError, match="has 3 identities for 3 samples"):
        make(np.arange(3), out=(6,))


def test_more_neighbours_than_samples_name_the_key():
    data = TaskContext("faces", np.repeat([0, 1], 3), (), True, (4,), {"out": (8,)}, LOGITS)
    config = VerificationConfig(primary="recall", k=5)
    with pytest.raises(ConfigError, match=r"task\.k: got 5, and faces has 6 samples"):
        verification.VERIFICATION.make(config, data)


def test_recall_of_a_list_of_pairs_is_refused():
    data = TaskContext(
        "faces", np.tile([0, 1], 4), (), True, (4,), {"out": (8,)}, LOGITS, grouped=True
    )
    with pytest.raises(
        ConfigError, match=r"task\.primary: got recall, and faces has a list of pairs"
    ):
        verification.VERIFICATION.make(VerificationConfig(primary="recall"), data)
