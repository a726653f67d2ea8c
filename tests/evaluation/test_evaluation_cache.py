"""A file that ran on some samples does not run on them again, and its outputs stay the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.backends.onnx.quantizer import OnnxQuantizer
from resnet8ptq.core.machine import Runtime
from resnet8ptq.evaluation import evaluation_cache, evaluator, inference
from resnet8ptq.evaluation.batching import Batching
from resnet8ptq.evaluation.inference import Evaluation
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.scoring.outputs import LOGITS, PROBABILITIES, Outputs
from tests.helpers.configs import make_config


@pytest.fixture
def opened(shapes_model, shapes, monkeypatch, tmp_path):
    """An evaluator with an empty cache, and the paths of the artifacts that it loads."""
    loaded: list[Path] = []
    load = OnnxQuantizer.load

    def counting(quantizer: OnnxQuantizer, path: Path, threads: int) -> Predictor:
        loaded.append(path)
        return load(quantizer, path, threads)

    monkeypatch.setattr(OnnxQuantizer, "load", counting)
    monkeypatch.setattr(evaluator, "find_batching", lambda *_: Batching(64, 1, 1))
    task = classification.build(shapes.class_names)
    quantizer = OnnxQuantizer(make_config("data=shapes"), Runtime(tmp_path, 1, True))
    return evaluator.Evaluator(quantizer, shapes_model, task, 64), loaded


def test_an_equal_file_is_not_run_again(opened, quantize, shapes, tmp_path):
    measuring, loaded = opened
    cell, images = quantize("backend=onnx"), shapes.test.take(np.arange(130))
    copy = tmp_path / "copy.onnx"
    copy.write_bytes(cell.artifact.path.read_bytes())
    first = measuring.run(cell.artifact.path, images, logits=True)
    again = measuring.run(copy, images, logits=True)
    assert loaded == [cell.artifact.path]
    assert again == replace(first, outputs=again.outputs, cached=True)
    np.testing.assert_array_equal(again.outputs.values[0], first.outputs.values[0])
    assert first.outputs.logits is not None
    np.testing.assert_array_equal(again.outputs.logits, first.outputs.logits)


def test_outputs_that_depend_on_the_batch_are_named_from_the_cache_too(
    opened, quantize, shapes, monkeypatch, caplog
):
    monkeypatch.setattr(inference, "sqnr_or_infinity", lambda alone, in_batch: 3.0)
    measuring, loaded = opened
    path = quantize("backend=onnx").artifact.path
    for times in (1, 2):
        measuring.run(path, shapes.test.take(np.arange(130)))
        assert loaded == [path]
        assert [message.count("in a batch of 64") for message in caplog.messages] == [1] * times


def test_another_file_sample_or_batch_is_run(opened, quantize, shapes):
    measuring, loaded = opened
    cell, images = quantize("backend=onnx"), shapes.test.take(np.arange(130))
    other = quantize("backend=onnx", "dtype=uint8")
    measuring.run(cell.artifact.path, images)
    for again in (
        measuring.run(other.artifact.path, images),
        measuring.run(cell.artifact.path, images.take(np.arange(129))),
        measuring.run(cell.artifact.path, images, batch_size=1),
        measuring.run(cell.artifact.path, images, logits=True),
    ):
        assert not again.cached
    assert len(loaded) == 5


def evaluation_of(outputs: Outputs) -> Evaluation:
    return Evaluation(outputs, 1.5, Batching(16, 1, 2))


def test_what_is_kept_is_found_again(tmp_path):
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    outputs = Outputs((rows, rows + 1), rows + 2, LOGITS, (rows + 3,))
    evaluation_cache.keep(tmp_path, {"file": "a"}, evaluation_of(outputs))
    assert evaluation_cache.find(tmp_path, {"file": "b"}, LOGITS) is None
    evaluation = evaluation_cache.find(tmp_path, {"file": "a"}, LOGITS)
    assert evaluation is not None
    assert (evaluation.seconds, evaluation.batching, evaluation.cached) == (
        1.5,
        Batching(16, 1, 2),
        True,
    )
    assert evaluation.outputs.final == LOGITS
    ours = (*evaluation.outputs.values, evaluation.outputs.logits, *evaluation.outputs.raw)
    for number, values in enumerate(ours):
        np.testing.assert_array_equal(values, rows + number)


@pytest.mark.parametrize("part", ["values", "raw"])
def test_large_outputs_are_not_kept(tmp_path, monkeypatch, part):
    rows = np.zeros((130, 10), np.float32)
    outputs = replace(Outputs((rows[:1],)), **{part: (rows,)})
    for room, kept in ((2 * rows.nbytes, True), (rows.nbytes - 1, False)):
        monkeypatch.setattr(evaluation_cache, "MAX_BYTES", room)
        evaluation_cache.keep(tmp_path, {"room": room}, evaluation_of(outputs))
        evaluation = evaluation_cache.find(tmp_path, {"room": room}, PROBABILITIES)
        assert (evaluation is not None) == kept


def test_a_damaged_evaluation_is_made_again(opened, quantize, shapes, tmp_path):
    measuring, _ = opened
    cell, images = quantize("backend=onnx"), shapes.test.take(np.arange(130))
    first = measuring.run(cell.artifact.path, images)
    [entry] = (tmp_path / evaluation_cache.KIND).glob("[!.]*")
    (entry / "output0.npy").write_bytes(b"")
    again = measuring.run(cell.artifact.path, images)
    assert not again.cached
    np.testing.assert_array_equal(again.outputs.values[0], first.outputs.values[0])
