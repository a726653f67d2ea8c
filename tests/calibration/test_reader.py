"""The calibration reader, alone and with ONNX Runtime's own quantization."""

import doctest
import itertools
import shutil

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization import CalibrationDataReader, quantize_static

from resnet8ptq.calibration import reader
from resnet8ptq.calibration.reader import CalibrationReader
from resnet8ptq.core.errors import ConfigError, DataNotFoundError
from resnet8ptq.data import locate
from resnet8ptq.data.sampling import draw_calibration
from tests.helpers.configs import make_config


def images(count: int) -> np.ndarray:
    """Draw `count` images whose pixels are all their place."""
    return np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 2, 2, 3))


def places(reader: CalibrationReader) -> list[list[int]]:
    """Read on to the end; return the places of the images of each batch."""
    return [batch["input"][:, 0, 0, 0].astype(int).tolist() for batch in reader]


def test_serial_by_default():
    reader = CalibrationReader(images(3), input_name="pixels")
    assert isinstance(reader, CalibrationDataReader)
    first = reader.get_next()
    assert first is not None
    assert list(first) == ["pixels"]
    assert first["pixels"].shape == (1, 2, 2, 3)
    assert first["pixels"].dtype == np.float32
    assert len(list(reader)) == 2
    assert reader.get_next() is None


@given(count=st.integers(0, 40), size=st.integers(1, 50), data=st.data())
def test_every_image_once_and_in_order(count, size, data):
    reader = CalibrationReader(images(count), batch_size=size)
    batches = places(reader)
    assert list(itertools.chain(*batches)) == list(range(count))
    assert len(batches) == len(reader)
    assert all(len(batch) == size for batch in batches[:-1])

    assert reader.get_next() is None
    reader.rewind()
    assert places(reader) == batches

    start, end = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(reader))])))
    reader.set_range(start, end)
    assert places(reader) == batches[start:end]
    reader.rewind()
    assert places(reader) == batches[start:end]
    assert len(reader) == len(batches)


@pytest.mark.parametrize("wrong", [(-1, 1), (0, 4), (2, 1)])
def test_ranges_beyond_the_images_are_refused(wrong):
    with pytest.raises(IndexError, match="expected 0 <= start <= end <= 3"):
        CalibrationReader(images(5), batch_size=2).set_range(*wrong)


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_nothing_is_refused(size):
    with pytest.raises(ValueError, match="batch_size: got"):
        CalibrationReader(images(5), batch_size=size)


@pytest.mark.parametrize("wrong", [{"samples_per_class": 0}, {"seed": -1}, {"batch_size": 0}])
def test_numbers_that_are_too_small_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got .*, expected an integer >="):
        CalibrationReader.draw("shapes", **wrong)


def test_it_draws_what_a_run_draws(shapes):
    config = make_config("data=shapes", "calib.samples_per_class=3", "seed=7")
    drawn = draw_calibration(shapes, config.calib.samples_per_class, config.seed)
    reader = CalibrationReader.draw("shapes", samples_per_class=3, seed=7, batch_size=100)
    assert np.array_equal(next(reader)["input"], drawn.split.stored)


def test_its_defaults_are_those_of_a_run():
    config = make_config()
    name, samples, seed, root, _ = CalibrationReader.draw.__func__.__defaults__
    assert (name, root) == (config.data.name, config.data.root)
    assert (samples, seed) == (config.calib.samples_per_class, config.seed)


def test_it_falls_back_on_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "_find_cifar10", lambda: (None, "everywhere"))
    with pytest.raises(DataNotFoundError):
        CalibrationReader.draw("cifar10")
    with pytest.raises(ConfigError, match=r"data\.root"):
        CalibrationReader.draw("cifar10", root=str(tmp_path / "none"))


def test_the_example_of_the_docstring(tmp_path, monkeypatch, shapes_model):
    """As it is written, in a folder with a model; and the result is quantized."""
    shutil.copyfile(shapes_model.onnx_path, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder(recurse=False).find(CalibrationReader, module=reader)
    assert len(example.examples) == 4
    assert doctest.DocTestRunner().run(example).failed == 0
    operators = {node.op_type for node in onnx.load("model.int8.onnx").graph.node}
    assert "QuantizeLinear" in operators


def test_strided_calibration_finds_the_same_ranges(tmp_path, shapes_model):
    """ONNX Runtime reads 3 of 12 batches at a time; what it finds must not depend on it."""
    written = []
    for stride in (None, 3):
        reader = CalibrationReader.draw("shapes", samples_per_class=6, batch_size=5)
        assert len(reader) == 12
        path = tmp_path / f"{stride}.onnx"
        options = {"CalibStridedMinMax": stride} if stride else {}
        quantize_static(shapes_model.onnx_path, path, reader, extra_options=options)
        written.append(path.read_bytes())
    assert written[0] == written[1]
