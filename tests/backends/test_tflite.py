"""What is special to TFLite; the contract of every backend is in test_backends."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from ai_edge_litert.schema_py_generated import TensorType
from ai_edge_litert.tools import flatbuffer_utils

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.backends.tflite import contents, converter, predictor, quantizer, serving
from resnet8ptq.backends.tflite.predictor import end_at_logits
from resnet8ptq.core import isolation
from resnet8ptq.core.errors import ModelError, QuantizationError, UnsupportedError
from resnet8ptq.data import registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.models import model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.target.measure import TfliteFile
from resnet8ptq.tasks.classification import ClassScores
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, evaluator_of, quantize_network, quantizer_of
from tests.helpers.originals import start_isolated
from tests.helpers.quantized import Quantize
from tests.helpers.recurrent_file import STEPS, WIDTH, make_recurrent_file

FileOf = Callable[..., Path]


def tflite(*overrides: str) -> Quantizer:
    return quantizer_of(make_config("data=shapes", "backend=tflite", *overrides))


@pytest.fixture
def file_of(quantize: Quantize) -> FileOf:
    """Return the file of a configuration, written once."""
    return lambda *overrides: quantize("backend=tflite", *overrides).artifact.path


@pytest.fixture
def batch(shapes: Dataset) -> np.ndarray:
    return next(iter(shapes.test.batches(100)))


def test_data_behind_the_graph_is_read(file_of):
    """ai-edge-quantizer writes large buffers so."""
    content = file_of("dtype=int8").read_bytes()
    model = flatbuffer_utils.convert_bytearray_to_object(content)
    buffer = max(model.buffers, key=lambda one: 0 if one.data is None else len(one.data))
    data, at = bytes(buffer.data), 2 * len(content)
    buffer.data, buffer.offset, buffer.size = None, at, len(data)
    moved = flatbuffer_utils.convert_object_to_bytearray(model)
    read = contents.read_model(moved.ljust(at, b"\0") + data)
    assert contents.write_model(read) == contents.write_model(contents.read_model(content))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("dtype=uint8", "int8 or int16"),
        ("dtype=u8s8", "int8 or int16"),
        ("calib=histogram", "torch's own observer"),
        ("nodes_to_quantize=[conv]", "every operator"),
        ("nodes_to_exclude=[conv]", "every operator"),
        ("nodes_to_exclude=auto", "every operator"),
        ("op_types=[Conv]", "every operator"),
        ("float_output=true", "every operator"),
        ("float_tail=true", "every operator; expected float_tail=false"),
        ("format=qdq", "only for ONNX"),
        ("reduce_range=true", "8 bits"),
        ("symmetric.activations=true", "have a zero point"),
        ("symmetric.weights=false", "have no zero point"),
    ],
)
def test_what_the_converter_cannot_do_is_unsupported(
    override, reason, shapes, shapes_model, tmp_path
):
    asked = tflite(override)
    key = override.partition("=")[0].lstrip("+").partition(".")[0]
    with pytest.raises(UnsupportedError, match=f"^{key}.*: .*{reason}"):
        asked.resolve()
    with pytest.raises(UnsupportedError, match=reason):  # for who asks without resolve
        quantize_network(asked, shapes_model, shapes.train, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unfolded_network_is_unsupported(shapes, shapes_model, tmp_path):
    unfolded = replace(shapes_model, fold=False)
    with pytest.raises(UnsupportedError, match=r"^model.fold=false: .*always folds"):
        quantize_network(tflite(), unfolded, shapes.train, tmp_path)


@pytest.mark.parametrize(
    "override", ["reduce_range=false", "symmetric.activations=false", "symmetric.weights=true"]
)
def test_what_the_converter_does_anyway_is_supported(override):
    assert tflite(override).resolve() == tflite().resolve()


def test_other_networks_are_unsupported(shapes, shapes_model, tmp_path):
    other = replace(shapes_model, source=shapes_model.onnx_path)
    with pytest.raises(UnsupportedError, match=r"got folded\.onnx, expected a Keras file"):
        quantize_network(tflite(), other, shapes.train, tmp_path)


def test_a_file_that_keras_refuses(shapes, shapes_model, tmp_path):
    broken = tmp_path / "broken.h5"
    broken.write_bytes(shapes_model.source.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"broken\.h5: Keras refuses it"):
        quantize_network(tflite(), replace(shapes_model, source=broken), shapes.train, tmp_path)


def crash(*_: object) -> None:
    os._exit(1)


def test_a_crash_of_the_converter_is_an_error(shapes, shapes_model, tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "start", start_isolated)
    monkeypatch.setattr(converter, "convert", crash)
    with pytest.raises(QuantizationError, match="crashed TensorFlow"):
        quantize_network(tflite(), shapes_model, shapes.train, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("per_channel", [False, True])
def test_integers_throughout(file_of, per_channel):
    path = file_of(f"per_channel={str(per_channel).lower()}")
    read = flatbuffer_utils.read_model(path)
    tensors = read.subgraphs[0].tensors
    assert {tensor.type for tensor in tensors} == {TensorType.INT8, TensorType.INT32}
    ends = (*read.subgraphs[0].inputs, *read.subgraphs[0].outputs)
    assert [tensors[i].type for i in ends] == [TensorType.INT8] * 2
    layers = list(contents.layers(read))
    assert len(layers) == 10
    for weights in (layer.weights for layer in layers):
        assert len(weights.quantization.scale) == (weights.shape[0] if per_channel else 1)
        assert not np.any(weights.quantization.zeroPoint)
    with pytest.raises(UnsupportedError, match=r"^per_channel=\w+: .* scales for"):
        tflite(f"per_channel={str(not per_channel).lower()}")._read(path.read_bytes(), path)


def test_quantizing_nothing_is_an_error(file_of):
    path = file_of("dtype=fp32")
    with pytest.raises(QuantizationError, match="quantized nothing"):
        tflite()._read(path.read_bytes(), path)


def test_calibration_is_minmax(file_of, shapes):
    path = file_of("per_channel=false")
    read = flatbuffer_utils.read_model(path)
    graph = read.subgraphs[0]
    name = graph.tensors[graph.operators[-1].inputs[0]].name.decode()
    low, high = quantizer._activation_ranges(read)[name.partition(";")[0]]
    [images] = draw_calibration(shapes, 20, 42).split.batches(200)
    logits = tflite("dtype=fp32").load(file_of("dtype=fp32"), THREADS).logits(images)
    assert logits is not None
    least, most = float(logits.min()), float(logits.max())
    assert (low, high) == pytest.approx((least, most), abs=(most - least) / 255)


@pytest.mark.parametrize("overrides", [("dtype=fp32",), ("per_channel=false",)])
def test_any_batch_size_gives_the_same_bits(file_of, batch, overrides):
    predictor = tflite(*overrides).load(file_of(*overrides), THREADS)
    for run in (lambda images: predictor.predict(images)[0], predictor.logits):
        whole = run(batch)
        for size in (1, 7, 100):
            parts = [run(batch[i : i + size]) for i in range(0, len(batch), size)]
            np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_integers_are_scaled_by_the_file(file_of, batch):
    path = file_of("per_channel=false")
    interpreter = Interpreter(model_path=str(path))
    interpreter.allocate_tensors()
    (taken,), (value,) = interpreter.get_input_details(), interpreter.get_output_details()
    assert taken["quantization"] == (1.0, -128)  # raw pixels are levels: the scale rounds none
    predictor = tflite().load(path, THREADS)
    for image in batch[:20].astype(np.int16):
        interpreter.set_tensor(taken["index"], (image[None] - 128).astype(np.int8))
        interpreter.invoke()
        levels = interpreter.get_tensor(value["index"]).astype(np.int16)
        output = predictor.predict(image[None].astype(np.float32))[0]
        np.testing.assert_array_equal(output, (levels + 128) / np.float32(256))
    beyond = predictor.predict(np.full((1, 32, 32, 3), 300, np.float32))[0]
    np.testing.assert_array_equal(
        beyond, predictor.predict(np.full((1, 32, 32, 3), 255, np.float32))[0]
    )


def test_without_a_softmax_there_are_no_logits(file_of, batch, tmp_path):
    path = file_of("per_channel=false")
    predictor = tflite().load(path, THREADS)
    content = end_at_logits(path.read_bytes())
    assert content is not None
    cut = tmp_path / "cut.tflite"
    cut.write_bytes(content)
    bare = tflite().load(cut, THREADS)
    assert bare.logits(batch) is None
    np.testing.assert_array_equal(bare.predict(batch)[0], predictor.logits(batch))


def test_dynamic_leaves_small_layers_in_float_and_says_so(shapes, shapes_model, tmp_path, caplog):
    dynamic = tflite("method=dynamic", "per_channel=true")
    assert dynamic.resolve().execution == "integer"
    artifact = quantize_network(dynamic, shapes_model, shapes.train, tmp_path)
    layers = list(contents.layers(flatbuffer_utils.read_model(artifact.path)))
    assert artifact.details == {"float_layers": str(10 - artifact.quantized_layers)}
    assert f"left {10 - artifact.quantized_layers} of 10 layers in float" in caplog.text
    for weights in (layer.weights for layer in layers):  # as TensorFlow documents it
        assert (weights.type == TensorType.INT8) == (np.prod(weights.shape) >= 1024)
    assert artifact.ranges == {}

    predictor = dynamic.load(artifact.path, THREADS)
    test = shapes.test.take(np.arange(1000))
    scores = ClassScores(
        np.concatenate([predictor.predict(b)[0] for b in test.batches(250)]), test.labels
    )
    assert scores.value > 0.85
    [batch] = shapes.test.take(np.arange(30)).batches(30)
    single = np.concatenate([predictor.predict(image[None])[0] for image in batch])
    np.testing.assert_array_equal(single, predictor.predict(batch)[0])  # ranges are an image's own


@pytest.mark.slow
@pytest.mark.usefixtures("real_files")
def test_the_real_network(cache_root, tmp_path):
    real = registry.load("cifar10", os.environ["CIFAR10_DIR"])
    network = model.load_network(make_config().model, real, cache_root)
    config, some = (
        make_config("backend=tflite", "per_channel=true"),
        real.test.take(np.arange(2000)),
    )
    evaluator = evaluator_of(config, network)
    fp32, onnx = (
        evaluator_of(framework, network).baseline(some).outputs.values[0].argmax(1)
        for framework in (config, make_config("backend=onnx"))
    )
    np.testing.assert_array_equal(fp32, onnx)

    calibration = draw_calibration(real, 20, 42).split
    quantized = evaluator.quantize(network, Decisions(), calibration, tmp_path)
    result = evaluator.run(quantized.path, some).outputs.values[0].argmax(1)
    accuracy, expected = ((classes == some.labels).mean() for classes in (result, fp32))
    assert accuracy == pytest.approx(expected, abs=0.01)
    assert quantized.size_bytes < 100_000


@pytest.mark.parametrize("runner", ["here", "target", "served"])
def test_outputs_of_a_recurrent_file_do_not_depend_on_earlier_samples(runner, tmp_path):
    content = make_recurrent_file()
    path = tmp_path / "a.tflite"
    path.write_bytes(content)

    def run(batch: np.ndarray) -> np.ndarray:
        if runner == "here":
            [values] = predictor.open_run(content, threads=1)(batch)
        elif runner == "target":
            [values] = TfliteFile(content, threads=1).run([batch])
        else:
            [values] = serving.load(path, None)({"x": batch})
        return values

    batch = np.random.default_rng(1).normal(size=(3, STEPS, WIDTH)).astype(np.float32)
    alone = [run(batch[number : number + 1]).reshape(STEPS, -1) for number in range(3)]
    together = run(batch).reshape(3, STEPS, -1)
    np.testing.assert_array_equal(together, np.stack(alone))
