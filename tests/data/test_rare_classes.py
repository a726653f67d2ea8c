"""Classes of one sample, or of none: split, calibrated, held out and chosen by like all others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core.errors import DataError
from resnet8ptq.data.sampling import draw_calibration, draw_held_out, draw_selection, halve
from resnet8ptq.data.splitting import stratify
from resnet8ptq.experiment.pipeline import run_experiment
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.tracking.run import start_run
from tests.helpers.configs import make_config
from tests.helpers.own_data import write_tiny
from tests.helpers.tables import read, write

CLASSES, SAMPLES = 1000, 1300


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """As a small draw of ImageNet: a third of the classes has one sample, a quarter none."""
    random = np.random.default_rng(0)
    content = {f"x{n}": random.normal(size=SAMPLES).astype("f4") for n in range(4)}
    labels = random.integers(0, CLASSES, SAMPLES)
    path = tmp_path_factory.mktemp("rare") / "a.parquet"
    return write(path, **content, label=labels), np.bincount(labels, minlength=CLASSES)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60), st.floats(0.01, 0.99))
def test_whatever_can_be_split_is(labels, test_fraction):
    labels, units = np.array(labels), np.arange(len(labels))
    train, test = stratify(labels, units, test_fraction, 0)
    assert sorted([*train, *test]) == units.tolist()
    assert len(train) and len(test)
    counts = [np.bincount(labels[side], minlength=10) for side in (train, test)]
    several = np.bincount(labels, minlength=10) > 1
    assert all((count[several] > 0).all() for count in counts)


def test_a_thousand_classes_of_few_samples(table, caplog):
    path, counts = table
    lone = int((counts == 1).sum())
    assert lone > 300
    names = [f"c{n}" for n in range(CLASSES)]
    data = read(path, classes=names, test_fraction=0.2)
    assert f"{lone} of 1000 classes have one distinct sample, such as 'c" in caplog.text
    assert f"{(counts == 0).sum()} of 1000 classes have no samples, such as 'c" in caplog.text
    sides = [np.bincount(side.labels, minlength=CLASSES) for side in (data.train, data.test)]
    assert (sum(sides) == counts).all()
    assert (np.minimum(*sides)[counts > 1] >= 1).all()
    assert sides[1][counts == 1].sum() == round(0.2 * lone)

    held_out = draw_held_out(data, None)
    calibration = draw_calibration(data, None, 42, [held_out])
    assert len(held_out) == len(data.train) // 2
    assert np.bincount(calibration.split.labels).max() == 2  # of 2,000 for all classes
    assert draw_selection(data, None, draw_calibration(data, None, 42).split) is not None
    parted = halve(data.test, CLASSES)
    assert parted is not None and abs(len(parted[0]) - len(parted[1])) < len(data.test) / 3


def test_a_set_of_classes_of_one_sample_each_is_halved(tmp_path):
    content = {"a": list(range(400)), "label": list(range(400))}
    data = read(write(tmp_path / "a.csv", **content), test_fraction=0.5)
    assert (len(data.train), len(data.test)) == (200, 200)
    one, other = halve(data.test, 400)
    assert (len(one), len(other)) == (100, 100)


def test_one_sample_alone_cannot_be_split(tmp_path):
    with pytest.raises(
        DataError, match="has 1 different samples; expected 2, one to train and one"
    ):
        read(write(tmp_path / "a.csv", a=[1, 1], label=[0, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("calib.samples_per_class=1",)])
def test_a_run_on_them(table, tmp_path, own_store, settings):
    path, _ = table
    network = write_tiny(tmp_path / "own.onnx", 4, CLASSES)
    config = make_config(
        *("data=table", f"data.root={path}", f"model.path={network}", "dtype=uint8"),
        *("latency.enabled=false", "threads=1", *settings),
    )
    (tmp_path / "run").mkdir()
    with start_run(own_store, "own", tmp_path / "run") as opened:
        result = run_experiment(resolve(config), tmp_path / "run", opened)
    assert result.measurement.comparison.model.total > 300
