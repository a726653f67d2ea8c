"""Data sets that Hugging Face's `datasets` has saved."""

import json
import sys

import numpy as np
import pyarrow as pa
import pytest

from resnet8ptq.config.schema import HuggingFaceConfig, PreprocessConfig
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data import locate, registry
from resnet8ptq.data.sources import columns
from resnet8ptq.data.sources.columns import Limits
from tests.helpers.arrays import whole
from tests.helpers.pictures import GREEN, RED, picture

datasets = pytest.importorskip("datasets", reason="needs the extra huggingface")


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def read(path, **settings):
    config = locate.find_data(HuggingFaceConfig(root=str(path), **settings))
    return registry.read(config, PreprocessConfig(), path.parent / "cache")


def pictures(first, count=4, names=("red", "green")):
    shades = [tuple(value + first + n // 2 for value in (RED, GREEN)[n % 2]) for n in range(count)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
    )
    content = {"image": [picture(shade) for shade in shades], "label": [0, 1] * (count // 2)}
    return datasets.Dataset.from_dict(content, features=features)


@pytest.mark.parametrize("side", ["test", "validation"])
def test_splits_and_class_names_are_kept(tmp_path, side):
    saved = {"train": pictures(0), side: pictures(2, 2), "unused": pictures(3, 2)}
    del saved["unused"]
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "a")
    data = read(tmp_path / "a")
    assert (data.name, data.class_names, data.named) == ("a", ("red", "green"), True)
    assert (len(data.train), len(data.test)) == (4, 2)
    assert data.test.names[0] == f"{tmp_path / 'a' / side}: row 1"
    for split in (data.train, data.test):
        assert np.array_equal(split.stored[:][:, 0, 0].argmax(1), split.labels)


def test_a_third_split_is_refused_with_the_way_to_leave_it_out(tmp_path):
    saved = {"train": pictures(0), "test": pictures(2, 2), "unsupervised": pictures(3, 2)}
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "a")
    with pytest.raises(DataError, match=r"got 'unsupervised'.*del data\['unsupervised'\]"):
        read(tmp_path / "a")


def test_a_column_of_sides_beside_splits_is_refused(tmp_path):
    """It would have no effect."""
    saved = {"train": pictures(0), "test": pictures(2, 2)}
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"data\.split: got fold, .* the splits train, test"):
        read(tmp_path / "a", split="fold")


def test_arrays_and_a_selection(tmp_path):
    """Of a data set that was shuffled or selected from, what it shows is read."""
    features = datasets.Features(
        {"x": datasets.Array2D((2, 3), "float32"), "y": datasets.Value("int64")}
    )
    values = [np.full((2, 3), n).tolist() for n in range(8)]
    result = datasets.Dataset.from_dict({"x": values, "y": [0, 1] * 4}, features=features)
    result.select(range(1, 7)).save_to_disk(tmp_path / "a")
    samples, labels = whole(read(tmp_path / "a"))
    assert samples.shape == (6, 2, 3) and samples[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert labels.tolist() == [1, 0, 1, 0, 1, 0]


def test_damage_is_refused(tmp_path):
    pictures(0).save_to_disk(tmp_path / "a")
    [arrow] = (tmp_path / "a").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(
        DataError, match=r"a: cannot be read \(.*expected a folder that save_to_disk"
    ):
        read(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(
        DataError, match=r"b: cannot be read \(.*expected a folder that save_to_disk"
    ):
        read(tmp_path / "b")


def test_paths_outside_are_refused(tmp_path):
    """A saved picture is its bytes; where there are none, a path, which may lead anywhere."""
    pictures(0, 2).save_to_disk(tmp_path / "a")
    [arrow] = (tmp_path / "a").glob("*.arrow")
    paths = pa.StructArray.from_arrays(
        [pa.nulls(2, pa.binary()), pa.array(["/etc/hostname"] * 2)], ["bytes", "path"]
    )
    listed = pa.table({"image": paths, "label": [0, 1]})
    with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_stream(file, listed.schema) as stream:
        stream.write_table(listed)
    with pytest.raises(
        DataError, match=r"row 1: got /etc/hostname, outside of .*/a; expected paths"
    ):
        read(tmp_path / "a")


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data\.name: got 'huggingface', .*'\.\[huggingface\]'"):
        read(tmp_path / "a")


@pytest.mark.slow
def test_many_columns(tmp_path, monkeypatch):
    count = 2000
    content = {f"g{n}": np.arange(8) + n for n in range(count)}
    datasets.Dataset.from_dict({**content, "label": [0, 1] * 4}).save_to_disk(tmp_path / "a")
    samples, _ = whole(read(tmp_path / "a"))
    assert sorted(samples[:, -1]) == list(range(count - 1, count + 7))
    monkeypatch.setattr(columns, "LIMITS", Limits(columns=count))
    with pytest.raises(DataError, match="a: has 2,001 columns, expected at most 2,000"):
        read(tmp_path / "a", test_fraction=0.25)


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("linked", [False, True])
def test_rows_that_lie_elsewhere_are_refused_before_they_are_read(tmp_path, linked):
    """Also where they are sound: a data set is the folder, whose hash stands for its rows."""
    pictures(0).save_to_disk(tmp_path / "a")
    [arrow] = (tmp_path / "a").glob("*.arrow")
    arrow.rename(tmp_path / "other.arrow")
    if linked:
        arrow.symlink_to(tmp_path / "other.arrow")
    else:
        change(tmp_path / "a" / "state.json", _data_files=[{"filename": "../other.arrow"}])
    with pytest.raises(DataError, match=r"a: names .*, which lies elsewhere; expected a folder"):
        read(tmp_path / "a")
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_a_split_that_lies_elsewhere_is_refused(tmp_path):
    datasets.DatasetDict({"train": pictures(0), "test": pictures(2)}).save_to_disk(tmp_path / "a")
    (tmp_path / "a" / "test").rename(tmp_path / "test")
    change(tmp_path / "a" / "dataset_dict.json", splits=["train", "../test"])
    with pytest.raises(DataError, match=r"a: names .*, which lies elsewhere"):
        read(tmp_path / "a")


def test_other_rows_under_the_same_arrow_files_are_read_anew(tmp_path):
    """Whichever files the data set's JSON names, and whatever they are called."""
    pictures(0, 4).save_to_disk(tmp_path / "a")
    [arrow] = (tmp_path / "a").glob("*.arrow")
    change(tmp_path / "a" / "state.json", _data_files=[{"filename": "rows.bin"}])
    arrow.rename(tmp_path / "a" / "rows.bin")
    before, _ = whole(read(tmp_path / "a"))
    pictures(8, 4).save_to_disk(tmp_path / "b")
    [other] = (tmp_path / "b").glob("*.arrow")
    other.rename(tmp_path / "a" / "rows.bin")
    registry._read.cache_clear()  # as another run
    after, _ = whole(read(tmp_path / "a"))
    assert not np.array_equal(before, after)


def test_rows_with_offsets_beyond_the_file_are_refused(tmp_path):
    """Arrow maps a file without a look at its offsets, and reads what they lead to."""
    columns_ = {"x": [[1.0, 2.0]] * 4, "label": [0, 1] * 2}
    datasets.Dataset.from_dict(columns_).save_to_disk(tmp_path / "a")
    [arrow] = (tmp_path / "a").glob("*.arrow")
    near, far = (np.array([0, 2, 4, 6, end], np.int32).tobytes() for end in (8, 2**30))
    assert arrow.read_bytes().count(near) == 1
    arrow.write_bytes(arrow.read_bytes().replace(near, far))
    with pytest.raises(DataError, match="a: cannot be read"):
        read(tmp_path / "a")


def test_a_data_set_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "LIMITS", Limits(bytes=1_000_000))
    content = {"x": [[0.0] * 1000] * 5000, "label": [0, 1] * 2500}
    datasets.Dataset.from_dict(content).save_to_disk(tmp_path / "a")
    with pytest.raises(DataError, match="unpacks to more than 1,000,000 bytes"):
        read(tmp_path / "a")
