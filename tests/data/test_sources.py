"""What every source of the user's own data promises, whatever the data lie in."""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from resnet8ptq.config.schema import DataConfig, PreprocessConfig, RunConfig
from resnet8ptq.core.errors import DataError, PtqError
from resnet8ptq.data import locate, pictures, registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sources import SOURCES
from tests.helpers.arrays import pack_idx
from tests.helpers.cifar_files import write_folder as write_batches
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
    return locate.find_data(make_config(*WRITERS[request.param](tmp_path / "data")).data)


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Callable[..., Dataset]]:
    """Read a source anew, past what the process keeps."""

    def call(config: DataConfig, **preprocess: object) -> Dataset:
        registry._read.cache_clear()
        return registry.read(config, PreprocessConfig(**preprocess), tmp_path / "cache")

    yield call
    registry._read.cache_clear()


def test_every_source_of_the_users_own_is_tried_here():
    others = {"cifar10", "shapes", "coco"}  # COCO's boxes: test_coco
    assert set(SOURCES) - others == set(WRITERS) - {"idx", "parquet"}


@pytest.mark.parametrize("name", SOURCES)
def test_the_option_of_a_source_has_its_schema(name):
    schema = SOURCES[name].schema
    assert type(make_config(f"data={name}").data) is schema, (
        f"see defaults in conf/data/{name}.yaml"
    )


def test_each_sample_comes_once_with_its_label_and_a_share_of_each_class(settled, read):
    data = read(settled)
    assert data.class_names == NAMES and data.named
    assert data.image_shape == PIXELS.shape[1:]
    for split in (data.train, data.test):
        assert split.labels.dtype == np.int64
        assert np.bincount(split.labels).tolist() == [COUNT // 2 // len(NAMES)] * len(NAMES)
    pixels = np.concatenate([data.train.stored[:], data.test.stored[:]])
    labels = np.concatenate([data.train.labels, data.test.labels])
    places = [int(np.flatnonzero((pixel == PIXELS).all(axis=(1, 2, 3)))[0]) for pixel in pixels]
    assert sorted(places) == list(range(COUNT))
    assert (labels == LABELS[places]).all()


def test_sizes_are_compared_by_the_headers_of_the_pictures(settled, read, tmp_path, monkeypatch):
    sizes = registry.list_sizes(settled, tmp_path / "cache")
    assert sizes <= {PIXELS.shape[1:3]}
    listed = SOURCES[settled.name].pictures
    if not listed or not resolve_name(listed)(settled, tmp_path / "cache"):
        return  # it stores arrays, which have one size
    registry._list_sizes.cache_clear()
    sizes = iter([(5, 4)] * (COUNT - 1) + [(4, 5)])
    with monkeypatch.context() as patched:
        patched.setattr(pictures, "read_size", lambda file: next(sizes))
        patched.setattr(pictures, "decode", None)
        assert len(registry.list_sizes(settled, tmp_path / "cache")) == 2
    registry._list_sizes.cache_clear()


def test_the_split_is_the_seeds(settled, read):
    first, again = read(settled), read(settled)
    other = read(replace(settled, split_seed=1))
    assert first.test.digest == again.test.digest != other.test.digest
    assert first.train.digest == again.train.digest != other.train.digest


def test_the_samples_are_preprocessed_alike(settled, read):
    data = read(settled, scale=0.5, mean=[1.0, 2.0, 3.0], channels="bgr")
    plain = read(settled)
    expected = plain.test.stored[:][..., ::-1] * np.float32(0.5) - np.float32([1, 2, 3])
    np.testing.assert_allclose(data.test.inputs(slice(None)), expected, rtol=1e-6)
    assert data.test.digest != plain.test.digest


def test_a_root_that_is_not_there_is_one_line_that_names_it(settled):
    with pytest.raises(PtqError) as caught:
        locate.find_data(replace(settled, root=f"{settled.root}x"))
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"data.root: got {settled.root}x (not there), expected ")


# Damaged files: each source and format, one file changed


def write_packed(root: Path) -> list[str]:
    for name, array in (("train-images", PIXELS), ("train-labels", LABELS.astype(np.uint8))):
        (root / f"{name}.gz").write_bytes(gzip.compress(pack_idx(array)))
    np.save(root / "class_names.npy", NAMES)
    return ["data=arrays", f"data.root={root}"]


def write_compressed(root: Path) -> list[str]:
    np.savez_compressed(root / "data.npz", images=PIXELS, labels=LABELS)
    return ["data=arrays", f"data.root={root / 'data.npz'}"]


def write_cifar10(root: Path) -> list[str]:
    return ["data=cifar10", f"data.root={write_batches(root)}"]


def write_coco(root: Path) -> list[str]:
    (root / "pictures").mkdir()
    paths = write_pictures(root / "pictures")
    sizes = {"width": PIXELS.shape[2], "height": PIXELS.shape[1]}
    boxes = {
        "images": [{"id": n, "file_name": path, **sizes} for n, path in enumerate(paths)],
        "annotations": [
            {"image_id": n, "category_id": 1, "bbox": [0, 0, 2, 2]} for n in range(COUNT)
        ],
        "categories": [{"id": 1, "name": "pet"}],
    }
    (root / "boxes.json").write_text(json.dumps(boxes))
    named = [f"data.images={root / 'pictures'}", f"data.annotations={root / 'boxes.json'}"]
    return ["data=coco", *named]


DAMAGED = WRITERS | {
    "packed": write_packed,
    "compressed": write_compressed,
    "cifar10": write_cifar10,
    "coco": write_coco,
}


@pytest.fixture(scope="module")
def sound(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[RunConfig, list[Path]]]:
    """Write a source once; return its settings and its files."""

    @cache
    def call(name: str) -> tuple[RunConfig, list[Path]]:
        root = tmp_path_factory.mktemp(name)
        config = make_config(*DAMAGED[name](root))
        return config, sorted(path for path in root.rglob("*") if path.is_file())

    return call


def read_damaged(config: RunConfig, path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Read a source while `damage` has changed one of its files."""
    content = path.read_bytes()
    replace_file(path, damage(content))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            registry._read.cache_clear()
            data = registry.read(locate.find_data(config.data), PreprocessConfig(), Path(scratch))
            assert len(data.test.digest) == 64
    finally:
        replace_file(path, content)


def replace_file(path: Path, content: bytes) -> None:
    """Put another file there: the one that was read may be mapped into memory still."""
    path.unlink()
    path.write_bytes(content)


def test_every_source_is_damaged_here():
    embedded = {name for name, source in SOURCES.items() if not source.takes}
    formats = {"idx", "parquet", "packed", "compressed"}
    assert set(DAMAGED) - formats == set(SOURCES) - embedded


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED)
@settings(max_examples=30, derandomize=True, database=None)
@given(
    number=st.integers(0, 99),
    start=st.floats(0, 1),
    length=st.integers(0, 200),
    inserted=st.binary(max_size=8),
)
@example(number=0, start=0.5, length=2**30, inserted=b"")  # cut in the middle
@example(number=1, start=0.1, length=4, inserted=b"\xff" * 4)
def test_a_damaged_file_is_read_or_refused_in_one_line(
    sound, name, number, start, length, inserted
):
    config, files = sound(name)

    def damage(content: bytes) -> bytes:
        begin = int(start * len(content))
        return content[:begin] + inserted + content[begin + length :]

    try:
        read_damaged(config, files[number % len(files)], damage)
    except PtqError as error:
        assert str(error).isprintable()


def test_a_damaged_gzip_file_in_a_folder_is_named(tmp_path, read):
    config = locate.find_data(make_config(*write_packed(tmp_path)).data)
    damaged = tmp_path / "train-images.gz"
    damaged.write_bytes(damaged.read_bytes()[:10] + b"\xff" * 50)
    with pytest.raises(DataError, match=r"train-images\.gz: cannot be read"):
        read(config)


def test_an_unforeseen_error_of_a_library_names_setting_and_file(tmp_path, read):
    """Such as that of text beyond Unicode."""
    overrides = write_packed(tmp_path)
    names = tmp_path / "class_names.npy"
    names.write_bytes(names.read_bytes()[:-4] + b"\xff" * 4)
    with pytest.raises(DataError) as caught:
        read(locate.find_data(make_config(*overrides).data))
    assert str(caught.value).startswith(f"data.root: got {tmp_path}, ")
