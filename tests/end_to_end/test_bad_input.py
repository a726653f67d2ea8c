"""What a person sees of files that are wrong: one line that says what was got and what is taken."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.helpers.calling import call
from tests.helpers.own_data import write_data, write_network
from tests.helpers.pictures import picture, spoil, write_classes

QUICK = ("dtype=fp32", "latency.enabled=false", "threads=1", "evaluate.batch_size=50")


def folder(tmp_path: Path, kind: str) -> tuple[str, ...]:
    """Class folders with one file that is no picture."""
    root = write_classes(tmp_path / "pictures")
    spoil(root, kind)
    return ("data=folder", f"data.root={root}")


def no_classes(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "pictures").mkdir()
    picture((1, 2, 3)).save(tmp_path / "pictures" / "a.png")
    return ("data=folder", f"data.root={tmp_path / 'pictures'}")


def empty_class(tmp_path: Path) -> tuple[str, ...]:
    root = write_classes(tmp_path / "pictures")
    (root / "blue").mkdir()
    return ("data=folder", f"data.root={root}")


def many_classes(tmp_path: Path) -> tuple[str, ...]:
    for number in range(10_000):
        (tmp_path / "pictures" / str(number)).mkdir(parents=True)
    return ("data=folder", f"data.root={tmp_path / 'pictures'}")


def arrays(tmp_path: Path, **changes: object) -> tuple[str, ...]:
    with np.load(write_data(tmp_path / "a.npz", 12)) as given:
        np.savez(tmp_path / "a.npz", **({**given} | changes))
    return ("data=arrays", f"data.root={tmp_path / 'a.npz'}")


def nan(tmp_path: Path) -> tuple[str, ...]:
    features = np.ones((12, 8, 6, 3), np.float32)
    features[7, 0, 0, 0] = np.nan
    return arrays(tmp_path, images=features)


def table(tmp_path: Path, content: str) -> tuple[str, ...]:
    (tmp_path / "a.csv").write_text(content)
    return ("data=table", f"data.root={tmp_path / 'a.csv'}")


def free_network(tmp_path: Path) -> tuple[str, ...]:
    """A network whose output has as many rows as its input has values above zero."""
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["pixels", "kernel"], ["c"], "conv"),
            helper.make_node("NonZero", ["c"], ["places"], "places"),
            helper.make_node("Cast", ["places"], ["scores"], "cast", to=TensorProto.FLOAT),
        ],
        "free",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["N", 3, "H", "W"])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["M", "K"])],
        [onnx.numpy_helper.from_array(np.ones((3, 3, 1, 1), np.float32), "kernel")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(proto, tmp_path / "own.onnx")
    return arrays(tmp_path)


def three_for_two(tmp_path: Path) -> tuple[str, ...]:
    write_network(tmp_path / "own.onnx", outputs=2)
    return arrays(tmp_path)


def module(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "weights.pt").write_bytes(b"any")
    weights = f"model.state_dict={tmp_path / 'weights.pt'}"
    return ("model.path=null", "model.module=nowhere.Net", weights)


PICKLED = np.array([{"a": 1}, None] * 6, dtype=object)
CASES = {
    "empty": (lambda p: folder(p, "empty"), "red/1.png: cannot be read (it is empty);"),
    "truncated": (lambda p: folder(p, "truncated"), "red/1.png: cannot be read (OSError: "),
    "no picture": (lambda p: folder(p, "text"), "red/1.png: cannot be read (Unidentified"),
    "bomb": (lambda p: folder(p, "bomb"), "red/1.png: cannot be read (DecompressionBomb"),
    "no classes": (no_classes, "pictures: has 0 class folders; takes 2 to 1000"),
    "empty class": (empty_class, "blue: has no pictures; takes .jpg, .jpeg, .png"),
    "10,000 classes": (many_classes, "pictures: has 10000 class folders; takes 2 to 1000"),
    "10,000 labels": (
        lambda p: arrays(p, labels=np.arange(12) * 900),
        "labels: labels from 0 to 9900; takes 0 to 999",
    ),
    "NaN": (nan, "images: NaN or infinity in sample 7; takes finite values"),
    "pickles": (
        lambda p: arrays(p, images=PICKLED),
        "images: holds pickled Python objects, which may run code; takes numbers",
    ),
    "NaN in a table": (
        lambda p: table(p, "a,b,y\n1,2,0\n3,nan,1\n"),
        "a.csv: column 'b', row 2: holds nothing, or NaN; takes a value",
    ),
    "infinity in a table": (
        lambda p: table(p, "a,b,y\n1,2,0\n3,inf,1\n"),
        "a.csv: column 'b', row 2: NaN or infinity; takes finite numbers",
    ),
    "a path outside": (
        lambda p: table(p, "path,y\n../a.png,0\nb.png,1\n"),
        "a.csv: column 'path', row 1: got ../a.png, outside of ",
    ),
    "a size that is not settled": (free_network, "own.onnx: "),
    "a module that does not import": (
        lambda p: (*arrays(p), *module(p)),
        "model.module: got 'nowhere.Net', which is not found; takes package.module.Class, on",
    ),
    "labels that do not fit": (
        three_for_two,
        "own.onnx: returns 2 values; a has 3 classes; takes a network with one output for",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong(tmp_path, case):
    write_network(tmp_path / "own.onnx")
    prepare, says = CASES[case]
    settings = (f"model.path={tmp_path / 'own.onnx'}", *prepare(tmp_path))
    done = call(tmp_path, *QUICK, *settings)
    [error] = done.errors
    assert says in error
    assert error.startswith("error: ") and "Traceback" not in done.err
    assert done.code == 2
