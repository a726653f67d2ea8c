"""CIFAR-10's files, written as Python 2 wrote the published ones: read exactly, or refused."""

import contextlib
import os
import pickle
import pickletools
import resource
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resnet8ptq.core.errors import DataError
from resnet8ptq.data.sources import cifar10
from tests.helpers.calling import REPO
from tests.helpers.cifar_files import WIDTH, make_batch, pickle_published, read_test, write_folder
from tests.helpers.memory_limit import limit_memory

# Reading


def test_the_writer_writes_what_python_2_wrote():
    assert pickle.loads(pickle_published({"a": [1, "b"]}), encoding="latin1") == {"a": [1, "b"]}
    array = np.arange(300, dtype=np.uint8).reshape(2, 150)
    assert np.array_equal(pickle.loads(pickle_published(array), encoding="latin1"), array)


def test_pixels_come_back_in_rows_and_columns_of_red_green_blue(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
    planes = np.stack([images[..., channel].reshape(7, 1024) for channel in range(3)], axis=1)
    batch = {**make_batch(7), "data": planes.reshape(7, WIDTH)}
    read, labels = read_test(tmp_path, pickle_published(batch))
    assert read.dtype == np.uint8
    assert np.array_equal(read, images)
    assert labels.dtype == np.int64
    assert labels.tolist() == batch["labels"]


def test_training_batches_are_read_in_order(tmp_path):
    folder = write_folder(tmp_path / "batches", train=3)
    images, labels = cifar10.read_split(folder, "train")
    assert images.shape == (15, 32, 32, 3)
    assert labels.tolist() == [0, 1, 2] * 5
    for number in range(5):
        first = make_batch(3, seed=number)["data"][0]
        assert np.array_equal(images[3 * number].transpose(2, 0, 1).ravel(), first)


def test_batches_may_differ_in_length(tmp_path):
    folder = write_folder(tmp_path / "batches", train=3)
    (folder / "data_batch_4").write_bytes(pickle_published(make_batch(1)))
    assert len(cifar10.read_split(folder, "train")[0]) == 13


@pytest.mark.parametrize("protocol", [3, 4])
def test_python_3_and_numpy_2_pickles_are_read_too(tmp_path, protocol):
    batch = make_batch(2)
    images, _ = read_test(tmp_path, pickle.dumps(batch, protocol=protocol))
    assert np.array_equal(images.transpose(0, 3, 1, 2).reshape(2, WIDTH), batch["data"])


def test_images_are_writable_and_contiguous(tmp_path):
    images, _ = read_test(tmp_path, pickle_published(make_batch(2)))
    assert images.flags["C_CONTIGUOUS"]
    assert images.flags["WRITEABLE"]


# Refusing what does not fit


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_missing_batch_is_named(tmp_path, split):
    folder = write_folder(tmp_path / "batches")
    name = cifar10.BATCHES[split][-1]
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        cifar10.read_split(folder, split)


def test_a_folder_in_place_of_a_batch_is_named(tmp_path):
    (tmp_path / "test_batch").mkdir()
    with pytest.raises(DataError, match="test_batch"):
        cifar10.read_split(tmp_path, "test")


def wide(count: int, width: int, dtype: type = np.uint8) -> np.ndarray:
    return np.zeros((count, width), dtype=dtype)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": [1, 2]}, "3 images but 2 labels"),
        ({"labels": [1, 2, 3, 4]}, "3 images but 4 labels"),
        ({"labels": [0, 1, 10]}, "labels from 0 to 10"),
        ({"labels": [0, 1, -1]}, "labels from -1 to 1"),
        ({"labels": [0, 1, 2.0]}, "list of integers"),
        ({"labels": [0, 1, True]}, "list of integers"),
        ({"labels": ["0", "1", "2"]}, "list of integers"),
        ({"labels": np.zeros(3, dtype=np.uint8)}, "list of integers"),
        ({"labels": None}, "list of integers"),
        ({"data": wide(3, 3071)}, "3071"),
        ({"data": wide(3, 3073)}, "3073"),
        ({"data": wide(0, WIDTH), "labels": []}, "0, 3072"),
        ({"data": wide(3, WIDTH, np.int8)}, "uint8"),
        ({"data": wide(3, WIDTH, np.float32)}, "uint8"),
        ({"data": wide(3, WIDTH).reshape(3, 3, 32, 32)}, "3, 3, 32, 32"),
        ({"data": [[0] * WIDTH] * 3}, "uint8 array"),
        ({"data": None}, "uint8 array"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(tmp_path, change, says):
    with pytest.raises(DataError) as caught:
        read_test(tmp_path, pickle_published({**make_batch(3), **change}))
    assert str(caught.value).startswith(str(tmp_path / "test_batch"))
    assert says in str(caught.value)


@pytest.mark.parametrize("key", ["data", "labels"])
def test_a_batch_without_a_key_is_named(tmp_path, key):
    batch = make_batch(3)
    del batch[key]
    with pytest.raises(DataError, match=f"test_batch.*{key}"):
        read_test(tmp_path, pickle_published(batch))


@pytest.mark.parametrize("content", [[1, 2], "text", 5, None], ids=repr)
def test_a_pickle_of_something_else_is_named(tmp_path, content):
    with pytest.raises(DataError, match="test_batch"):
        read_test(tmp_path, pickle_published(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"hello, world\n", b"\x1f\x8b\x08\x00", b"\x82\x01.", b"Pid\n.", b"\x80\xff."],
    ids=repr,
)
def test_a_file_that_is_no_pickle_is_named(tmp_path, content):
    with pytest.raises(DataError, match="test_batch"):
        read_test(tmp_path, content)


# Refusing what would run code


class Gadget:
    """Asks the unpickler to call a function."""

    state: object = None

    def __init__(self, function: Any, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return (*self.call, self.state)


def gadgets(target: Path) -> dict[str, Gadget]:
    """Each would make the file `target`."""
    return {
        "os.system": Gadget(os.system, f"touch '{target}'"),
        "os.mkdir": Gadget(os.mkdir, str(target)),
        "eval": Gadget(eval, f"open({str(target)!r}, 'w').close()"),
        "exec": Gadget(exec, f"open({str(target)!r}, 'w').close()"),
        "subprocess": Gadget(subprocess.call, ["touch", str(target)]),
        "numpy.save": Gadget(np.save, str(target.with_suffix(".npy")), [1]),
        "numpy.memmap": Gadget(np.memmap, str(target), "u1", "w+", 0, (4,)),
        "method": Gadget(Path.touch, target),
    }


def wraps(gadget: Gadget) -> dict[str, object]:
    """Places in a batch where a gadget may lie."""
    boxed = np.empty(1, dtype=object)
    boxed[0] = gadget
    return {
        "alone": gadget,
        "value": {**make_batch(1), "filenames": gadget},
        "label": {**make_batch(1), "labels": [gadget]},
        "in an array": {**make_batch(1), "data": boxed},
    }


@pytest.mark.parametrize("position", ["alone", "value", "label", "in an array"])
@pytest.mark.parametrize("name", gadgets(Path("x")))
def test_a_hostile_pickle_is_refused_before_it_acts(tmp_path, name, position):
    target = tmp_path / "target"
    for protocol in range(6):
        content = pickle.dumps(wraps(gadgets(target)[name])[position], protocol=protocol)
        with pytest.raises(DataError, match="test_batch"):
            read_test(tmp_path, content)
        assert {path.name for path in tmp_path.iterdir()} == {"test_batch"}

    with contextlib.suppress(Exception):  # it would have acted
        pickle.loads(content)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'touch target'\ntR.",  # GLOBAL, REDUCE
        b"(S'touch target'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch target'\no.",  # OBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch target\x85R.",  # STACK_GLOBAL
        b"\x80\x02cos\nsystem\nS'touch target'\n\x85\x81.",  # NEWOBJ
    ],
    ids=["GLOBAL", "INST", "OBJ", "STACK_GLOBAL", "NEWOBJ"],
)
def test_every_way_to_call_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"it asks for os\.system"):
        read_test(tmp_path, content)
    assert not Path("target").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "fromfile"),
        ("numpy", "load"),
        ("numpy", "frombuffer"),
        ("numpy", "ndarray.tofile"),
        ("numpy", "dtype.__class__"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "fromstring"),
        ("numpy.core.multiarray", "_reconstruct.__self__"),
        ("numpy", "_reconstruct"),
        ("builtins", "getattr"),
        ("", ""),
    ],
)
def test_no_other_global_of_numpy_is_given_out(tmp_path, module, name):
    short = bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    with pytest.raises(DataError, match="it asks for"):
        read_test(tmp_path, b"\x80\x04\x8c" + short + b"\x93.")


@pytest.mark.parametrize(
    "content", [b"\x80\x02P0:9\n.", b"P0:9\n.", b"\x80\x02U\x030:9Q."], ids=["2", "0", "binary"]
)
def test_an_object_outside_of_the_file_is_refused(tmp_path, content):
    with pytest.raises(DataError, match="test_batch"):
        read_test(tmp_path, content)


@pytest.mark.usefixtures("real_files")
def test_the_real_files():
    folder = Path(os.environ["CIFAR10_DIR"])
    test_images, test_labels = cifar10.read_split(folder, "test")
    train_images, train_labels = cifar10.read_split(folder, "train")
    assert test_images.shape == (9980, 32, 32, 3)
    assert train_images.shape == (49927, 32, 32, 3)
    assert set(test_labels) == set(train_labels) == set(range(10))
    assert cifar10.read_class_names(folder) == cifar10.CLASS_NAMES
    content = pickle.loads((folder / "data_batch_5").read_bytes(), encoding="latin1")
    places = np.arange(0, len(content["labels"]), 7)
    last = train_images[len(train_images) - len(content["labels"]) + places]
    assert np.array_equal(last.transpose(0, 3, 1, 2).reshape(-1, WIDTH), content["data"][places])


# Damage


@pytest.fixture(scope="module")
def little_memory() -> Iterator[None]:
    """A damaged length must not take the memory of the machine that runs these tests."""
    old = limit_memory(1 << 29)
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def read_or_refuse(folder: Path, content: bytes) -> None:
    try:
        images, labels = read_test(folder, content)
    except DataError as error:
        assert "test_batch" in str(error)
    else:
        assert images.shape == (len(labels), 32, 32, 3)
        assert set(labels.tolist()) <= set(range(10))


@pytest.mark.usefixtures("little_memory")
@given(content=st.binary(max_size=200))
@settings(deadline=None, max_examples=300)
def test_any_bytes_are_read_or_refused(scratch, content):
    read_or_refuse(scratch, content)
    read_or_refuse(scratch, b"\x80\x02}" + content)


VALID = pickle_published(make_batch(2))


# Where the array is described: what numpy makes of damage there can outlive the call that read it,
# so that it is read in a process of its own, below.
DESCRIPTION = range(VALID.index(b"cnumpy\ndtype"), VALID.index(b"\x89T"))
# Among the pixels any value is right.
# Every opcode, and the ends of numbers.
WRONG = sorted({*map(ord, pickletools.code2op), 0, 1, 127, 128, 254, 255})
OUTSIDE = [*range(260), *range(len(VALID) - 60, len(VALID))]


@pytest.mark.usefixtures("little_memory")
@given(
    place=st.sampled_from([place for place in OUTSIDE if place not in DESCRIPTION]),
    values=st.binary(min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=300)
def test_damaged_bytes_are_read_or_refused(scratch, place, values):
    read_or_refuse(scratch, VALID[:place] + values + VALID[place + len(values) :])


@given(length=st.integers(0, len(VALID) - 1))
@settings(deadline=None, max_examples=100)
def test_a_file_cut_anywhere_is_refused(scratch, length):
    with pytest.raises(DataError, match=r"test_batch.*damaged"):
        read_test(scratch, VALID[:length])


READ_EACH = """
import os, pickle, sys
from pathlib import Path
from resnet8ptq.data.sources import cifar10
from resnet8ptq.core.errors import DataError

sys.path.insert(0, sys.argv[3])
from tests.helpers.memory_limit import limit_memory

sys.unraisablehook = lambda _: os._exit(3)  # what is read must not break when it is freed, either
folder = Path(sys.argv[1])
contents = pickle.loads((folder / "contents").read_bytes())
limit_memory(int(sys.argv[2]))
for content in contents:
    (folder / "test_batch").write_bytes(content)
    try:
        cifar10.read_split(folder, "test")
    except DataError:
        pass
status = Path("/proc/self/status")
lines = status.read_text().splitlines() if status.exists() else ["VmHWM: 0 kB"]
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def read_in_own_process(folder: Path, contents: list[bytes], extra_bytes: int = 1 << 26) -> int:
    """Read each content as a batch, which must end in DataError if at all; return the peak, kB."""
    (folder / "contents").write_bytes(pickle.dumps(contents))
    command = [sys.executable, "-c", READ_EACH, str(folder), str(extra_bytes), str(REPO)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    return int(done.stdout)


@pytest.mark.slow
def test_no_flipped_bit_goes_further_than_a_refusal(tmp_path):
    contents = []
    for position, bit in product(OUTSIDE, range(8)):
        content = bytearray(VALID)
        content[position] ^= 1 << bit
        contents.append(bytes(content))
    read_in_own_process(tmp_path, contents)


@pytest.mark.slow
def test_no_damaged_byte_in_the_description_of_the_array_crashes_the_process(tmp_path):
    """numpy trusts the state of a pickled dtype; the process may not die of one wrong byte."""
    contents = [
        VALID[:position] + bytes([value]) + VALID[position + 1 :]
        for position, value in product(DESCRIPTION, WRONG)
    ]
    read_in_own_process(tmp_path, contents)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\x00\x00\x00\x02.",  # LONG_BINPUT: put None into place 33,554,432 of the memo
        b"\x80\x02cnumpy\nndarray\nJ\x00\x00\x00\x02\x85U\x01O\x86R.",  # as many objects
    ],
    ids=["memo", "array"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux has it")
def test_a_tiny_file_cannot_take_much_memory(tmp_path, content):
    plain_kb = read_in_own_process(tmp_path, [VALID], extra_bytes=1 << 30)
    assert read_in_own_process(tmp_path, [content], extra_bytes=1 << 30) < plain_kb + 200_000


# Class names


def meta(names: object) -> bytes:
    return pickle_published({"num_cases_per_batch": 10000, "label_names": names, "num_vis": WIDTH})


def test_without_meta_the_published_names_are_used(tmp_path):
    assert cifar10.read_class_names(tmp_path) == cifar10.CLASS_NAMES


def test_names_are_read_from_meta(tmp_path):
    names = [f"class_{letter}" for letter in "abcdefghij"]
    (tmp_path / "batches.meta").write_bytes(meta(names))
    assert cifar10.read_class_names(tmp_path) == tuple(names)


PUBLISHED = list(cifar10.CLASS_NAMES)


@pytest.mark.parametrize(
    "names",
    [
        *(
            [*PUBLISHED[:9], bad]
            for bad in (
                "../../x",
                "a/b",
                "a b",
                "a\nb",
                "",
                "_",
                "<b>",
                "a\x00b",
                "=cmd()",
                5,
                None,
            )
        ),
        PUBLISHED[:9],
        [*PUBLISHED, "eleventh"],
        [],
        None,
        "abcdefghij",
        [*PUBLISHED[:9], PUBLISHED[0]],
    ],
    ids=repr,
)
def test_names_that_are_no_ten_different_names_are_refused(tmp_path, names):
    """They become keys of metrics and words in reports and files."""
    (tmp_path / "batches.meta").write_bytes(meta(names))
    with pytest.raises(DataError, match=r"batches\.meta"):
        cifar10.read_class_names(tmp_path)


def test_a_hostile_meta_is_refused(tmp_path):
    target = tmp_path / "target"
    content = pickle.dumps(gadgets(target)["os.system"], protocol=2)
    (tmp_path / "batches.meta").write_bytes(content)
    with pytest.raises(DataError, match=r"batches\.meta"):
        cifar10.read_class_names(tmp_path)
    assert not target.exists()
