"""What a person sees of files that are wrong: one line that says what was got and what is taken."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.helpers.assembling import assemble
from tests.helpers.calling import call
from tests.helpers.own_data import write_data, write_network
from tests.helpers.pictures import spoil, write_classes

QUICK = ("dtype=fp32", "latency.enabled=false", "threads=1", "evaluate.batch_size=50")


def folder(tmp_path: Path, kind: str) -> tuple[str, ...]:
    """Class folders with one file that is no picture."""
    root = write_classes(tmp_path / "pictures")
    spoil(root, kind)
    return ("data=folder", f"data.root={root}")


def many_classes(tmp_path: Path) -> tuple[str, ...]:
    for number in range(10_000):
        (tmp_path / "pictures" / str(number)).mkdir(parents=True)
    return ("data=folder", f"data.root={tmp_path / 'pictures'}")


def arrays(tmp_path: Path, **changes: object) -> tuple[str, ...]:
    with np.load(write_data(tmp_path / "a.npz", 12)) as value:
        np.savez(tmp_path / "a.npz", **({**value} | changes))
    return ("data=arrays", f"data.root={tmp_path / 'a.npz'}")


def table(tmp_path: Path, content: str) -> tuple[str, ...]:
    (tmp_path / "a.csv").write_text(content)
    return ("data=table", f"data.root={tmp_path / 'a.csv'}")


def free_network(tmp_path: Path) -> tuple[str, ...]:
    """A network whose output has as many rows as its input has values above zero."""
    nodes = [
        helper.make_node("Conv", ["pixels", "kernel"], ["c"], "conv"),
        helper.make_node("NonZero", ["c"], ["places"], "places"),
        helper.make_node("Cast", ["places"], ["scores"], "cast", to=TensorProto.FLOAT),
    ]
    sides = {"pixels": ["N", 3, "H", "W"]}, {"scores": ["M", "K"]}
    kernel = np.ones((3, 3, 1, 1), np.float32)
    onnx.save(assemble(nodes, *sides, {"kernel": kernel}, opset=13), tmp_path / "own.onnx")
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
    "truncated": (lambda p: folder(p, "truncated"), "red/1.png: cannot be read (OSError: "),
    "10,000 classes": (many_classes, "pictures: has 10000 class folders; expected 2 to 1000"),
    "pickles": (
        lambda p: arrays(p, images=PICKLED),
        "images: holds pickled Python objects, which may run code; expected numbers",
    ),
    "NaN in a table": (
        lambda p: table(p, "a,b,y\n1,2,0\n3,nan,1\n"),
        "a.csv: column 'b', line 3: holds nothing, or NaN; expected a value",
    ),
    "a size that is not settled": (free_network, "own.onnx: "),
    "a module that does not import": (
        lambda p: (*arrays(p), *module(p)),
        "model.module: got 'nowhere.Net', which is not found; expected package.module.Class in "
        "the current folder or on PYTHONPATH",
    ),
    "labels that do not fit": (
        three_for_two,
        "own.onnx: returns 2 values; a has 3 classes; expected a network with one output for",
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
