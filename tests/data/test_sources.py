"""What every source of the user's own data promises, whatever the data lie in."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image

from resnet8ptq.config.schema import DataConfig, PreprocessConfig
from resnet8ptq.core.errors import PtqError
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sources import SOURCES
from tests.helpers.arrays import pack_idx
from tests.helpers.configs import make_config

NAMES = ("cat", "dog", "owl")
COUNT = 24
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 4, 5, 3), np.uint8)
LABELS = np.arange(COUNT) % len(NAMES)


def write_arrays(root: Path) -> list[str]:
    np.savez(root / "data.npz", images=PIXELS, labels=LABELS, class_names=NAMES)
    return ["data=arrays", f"data.root={root / 'data.npz'}"]


def write_idx(root: Path) -> list[str]:
    (root / "images-idx4-ubyte").write_bytes(pack_idx(PIXELS))
    (root / "labels-idx1-ubyte").write_bytes(pack_idx(LABELS.astype(np.uint8)))
    given = [f"data.labels={root / 'labels-idx1-ubyte'}", f"data.classes=[{','.join(NAMES)}]"]
    return ["data=arrays", f"data.root={root / 'images-idx4-ubyte'}", *given]


def write_pictures(root: Path) -> list[str]:
    paths = []
    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        paths.append(f"{NAMES[label]}/{number}.png")
        (root / NAMES[label]).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(root / paths[-1])
    return paths


def write_folder(root: Path) -> list[str]:
    write_pictures(root)
    return ["data=folder", f"data.root={root}"]


def write_table(root: Path) -> list[str]:
    names = [NAMES[label] for label in LABELS]
    table = pa.table({"path": write_pictures(root), "label": names})
    pa.csv.write_csv(table, root / "rows.csv")
    return ["data=table", f"data.root={root / 'rows.csv'}"]


def write_parquet(root: Path) -> list[str]:
    columns = {f"p{n}": column for n, column in enumerate(PIXELS.reshape(COUNT, -1).T)}
    names = [NAMES[label] for label in LABELS]
    pa.parquet.write_table(pa.table({**columns, "label": names}), root / "rows.parquet")
    return ["data=table", f"data.root={root / 'rows.parquet'}", "data.shape=[4,5,3]"]


def write_huggingface(root: Path) -> list[str]:
    datasets = pytest.importorskip("datasets", reason="needs the extra huggingface")
    datasets.disable_progress_bars()
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))}
    content = {"image": [Image.fromarray(pixels) for pixels in PIXELS], "label": LABELS.tolist()}
    saved = datasets.Dataset.from_dict(content, features=datasets.Features(kinds))
    saved.save_to_disk(root / "saved")
    return ["data=huggingface", f"data.root={root / 'saved'}"]


WRITERS: dict[str, Callable[[Path], list[str]]] = {
    "arrays": write_arrays,
    "idx": write_idx,
    "folder": write_folder,
    "table": write_table,
    "parquet": write_parquet,
    "huggingface": write_huggingface,
}


@pytest.fixture(params=WRITERS)
def settled(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    """The settings of a source in which the samples lie."""
    (tmp_path / "data").mkdir()
    return locate.settle(make_config(*WRITERS[request.param](tmp_path / "data")).data)


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Callable[..., Dataset]]:
    """Read a source anew, past what the process keeps."""

    def call(config: DataConfig, **preprocess: object) -> Dataset:
        registry._read.cache_clear()
        return registry.read(config, PreprocessConfig(**preprocess), tmp_path / "cache")

    yield call
    registry._read.cache_clear()


def test_every_source_of_the_users_own_is_tried_here():
    others = {"cifar10", "shapes", "phrases", "coco"}  # COCO's boxes: test_coco
    assert set(SOURCES) - others == set(WRITERS) - {"idx", "parquet"}


def test_each_sample_comes_once_with_its_label_and_a_share_of_each_class(settled, read):
    data = read(settled)
    assert data.class_names == NAMES and data.named
    assert data.image_shape == PIXELS.shape[1:]
    for split in (data.train, data.test):
        assert split.labels.dtype == np.int64
        assert np.bincount(split.labels).tolist() == [COUNT // 2 // len(NAMES)] * len(NAMES)
    pixels = np.concatenate([data.train.images[:], data.test.images[:]])
    labels = np.concatenate([data.train.labels, data.test.labels])
    places = [int(np.flatnonzero((each == PIXELS).all(axis=(1, 2, 3)))[0]) for each in pixels]
    assert sorted(places) == list(range(COUNT))
    assert (labels == LABELS[places]).all()


def test_the_split_is_the_seeds(settled, read):
    first, again = read(settled), read(settled)
    other = read(replace(settled, split_seed=1))
    assert first.test.digest == again.test.digest != other.test.digest
    assert first.train.digest == again.train.digest != other.train.digest


def test_the_samples_are_preprocessed_alike(settled, read):
    data = read(settled, scale=0.5, mean=[1.0, 2.0, 3.0], channels="bgr")
    plain = read(settled)
    expected = plain.test.images[:][..., ::-1] * np.float32(0.5) - np.float32([1, 2, 3])
    np.testing.assert_allclose(data.test.inputs(slice(None)), expected, rtol=1e-6)
    assert data.test.digest != plain.test.digest


def test_a_root_that_is_not_there_is_one_line_that_names_it(settled):
    with pytest.raises(PtqError) as caught:
        locate.settle(replace(settled, root=f"{settled.root}x"))
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"data.root: got {settled.root}x (not there), expected ")
