"""Networks with several inputs, converted: by name, of any length, from ONNX and from torch."""

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.records import pack
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models import conversion
from tests.helpers import converted
from tests.helpers.text_networks import write

COUNT, LONGEST, WORDS = 8, 6, 20
RANDOM = np.random.default_rng(0)
MASK = (np.arange(LONGEST) < 2 + np.arange(COUNT)[:, None] % 5).astype(np.int64)
IDS = RANDOM.integers(1, WORDS, (COUNT, LONGEST)) * MASK
TEXTS = pack({"ids": IDS, "mask": MASK})

MASKED = """
    counted = Cast<to = 1>(mask)
    wide = Unsqueeze(counted, two)
    kept = Mul(rows, wide)
    sums = ReduceSum<keepdims = 0>(kept, one)
    logits = MatMul(sums, weights)
"""
UNMASKED = """
    sums = ReduceSum<keepdims = 0>(rows, one)
    whole = Cast<to = 1>(mask)
    total = ReduceSum<keepdims = 1>(whole, one)
    zeros = Sub(total, total)
    shifted = Add(sums, zeros)
    logits = MatMul(shifted, weights)
"""


def convert(path: Path, folder: Path, samples=TEXTS, module: str | None = None):
    return converted.convert(path, folder, samples, module=module)


def test_a_network_that_ignores_padding_takes_any_length(tmp_path):
    record = convert(write(tmp_path / "a.onnx", MASKED, WORDS), tmp_path / "made")
    assert [tensor.shape for tensor in record.contract.inputs] == [(None,), (None,)]
    assert set(record.parity) == {
        *("onnx, unfolded", "onnx, folded", "torch, unfolded", "torch, folded")
    }
    run = open_runner(str(tmp_path / "made" / "folded.onnx"))
    short = pack({"ids": IDS[:1, :2], "mask": MASK[:1, :2]})
    np.testing.assert_allclose(run(short)[0], run(TEXTS[:1])[0], rtol=1e-5)


def test_a_network_with_an_output_for_each_token_takes_any_length(tmp_path):
    each = MASKED.replace("sums = ReduceSum<keepdims = 0>(kept, one)", "").replace("sums", "kept")
    path = write(tmp_path / "a.onnx", each, WORDS)
    model = onnx.load(path)
    shape = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", "L", 3])
    model.graph.output[0].CopyFrom(shape)
    onnx.save(model, path)
    record = convert(path, tmp_path / "made")
    assert [tensor.shape for tensor in record.contract.inputs] == [(None,), (None,)]


def test_rows_of_a_table_that_are_repeated_for_each_token_leave_the_length_free(tmp_path):
    """As in a BERT without `token_type_ids`: the same row for each sample and each token."""
    kinds = """
        shape = Shape(ids)
        first = ConstantOfShape<value = int64[1] {0}>(shape)
        kind = Gather(kinds, first)
        both = Add(rows, kind)
    """
    nodes = kinds + MASKED.replace("Mul(rows", "Mul(both")
    path = write(tmp_path / "a.onnx", nodes, WORDS, kinds=np.ones((2, 4), np.float32))
    record = convert(path, tmp_path / "made")
    assert [tensor.shape for tensor in record.contract.inputs] == [(None,), (None,)]


def test_a_size_of_minus_one_that_holds_the_batch_keeps_the_samples_apart(tmp_path):
    """As in keys that torch's exporter transposes: [-1, length, width] for all samples' heads."""
    transposed = """
        shape = Shape(ids)
        count = Gather(shape, first)
        length = Gather(shape, one)
        apart = Concat<axis = 0>(count, length, two, two)
        heads = Reshape(rows, apart)
        by_head = Transpose<perm = [0, 2, 1, 3]>(heads)
        joined = Concat<axis = 0>(minus, length, two)
        keys = Reshape(by_head, joined)
        turned = Transpose<perm = [0, 2, 1]>(keys)
        again = Concat<axis = 0>(count, two, two, length)
        by_sample = Reshape(turned, again)
        ordered = Transpose<perm = [0, 3, 1, 2]>(by_sample)
        whole = Concat<axis = 0>(count, length, four)
        both = Reshape(ordered, whole)
    """
    nodes = transposed + MASKED.replace("Mul(rows", "Mul(both")
    sizes = {"first": np.array([0]), "minus": np.array([-1]), "four": np.array([4])}
    path = write(tmp_path / "a.onnx", nodes, WORDS, **sizes)
    record = convert(path, tmp_path / "made")
    assert [tensor.shape for tensor in record.contract.inputs] == [(None,), (None,)]
    original = open_runner(str(path))
    run = open_runner(str(tmp_path / "made" / "folded.onnx"))
    for count in (1, 2, 5):
        np.testing.assert_allclose(run(TEXTS[:count])[0], original(TEXTS[:count])[0], rtol=1e-5)


def test_a_network_that_counts_padding_keeps_the_stored_length(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        record = convert(write(tmp_path / "a.onnx", UNMASKED, WORDS), tmp_path / "made")
    assert [tensor.shape for tensor in record.contract.inputs] == [(LONGEST,), (LONGEST,)]
    assert "ids, mask: all samples are padded to the longest one" in caplog.text


@pytest.mark.parametrize("dtype", ["bool", "float16", "int32", "float"])
def test_each_input_has_its_own_dtype(tmp_path, dtype):
    path = write(tmp_path / "a.onnx", MASKED, WORDS, mask=f"{dtype}[N, L] mask")
    record = convert(path, tmp_path / "made")
    assert record.contract.inputs[1].dtype == {"float": "float32"}.get(dtype, dtype)


def test_a_scalar_among_the_inputs_takes_a_fixed_value(tmp_path):
    nodes = MASKED.replace(
        "kept = Mul(rows, wide)", "half = Mul(rows, rate) kept = Mul(half, wide)"
    )
    path = write(tmp_path / "a.onnx", nodes, WORDS, mask="int64[N, L] mask, float rate")
    with pytest.raises(
        ModelError, match=r"rate is a single number.*model\.inputs=\{rate: \.\.\.\}"
    ):
        convert(path, tmp_path / "refused")
    folder = tmp_path / "made"
    folder.mkdir()
    conversion.convert(path, folder, TEXTS, ModelConfig(inputs={"rate": 0.5}))
    assert [t.name for t in conversion.read_record(folder).contract.inputs] == ["ids", "mask"]


@pytest.mark.parametrize("value", [300, -1, 2.5, float("inf"), "a"])
def test_a_fixed_value_that_its_dtype_lacks_is_named(tmp_path, value):
    nodes = MASKED.replace(
        "kept = Mul(rows, wide)",
        "cast = Cast<to = 1>(rate) half = Mul(rows, cast) kept = Mul(half, wide)",
    )
    path = write(tmp_path / "a.onnx", nodes, WORDS, mask="int64[N, L] mask, uint8 rate")
    folder = tmp_path / "made"
    folder.mkdir()
    with pytest.raises(ModelError, match=rf"model\.inputs\.rate: got {value}, expected numbers"):
        conversion.convert(path, folder, TEXTS, ModelConfig(inputs={"rate": value}))


def test_one_array_does_not_fill_two_inputs(tmp_path):
    with pytest.raises(ModelError, match=r"has 2 inputs .*and the samples are one array"):
        convert(write(tmp_path / "a.onnx", MASKED, WORDS), tmp_path / "made", IDS)


class Network(torch.nn.Module):
    """The same as a module; its parameters name the inputs, in another order than the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(WORDS, 4), torch.nn.Linear(4, 3)

    def forward(self, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [n, 3]."""
        return self.head((self.table(ids) * mask[:, :, None]).sum(1))


@pytest.mark.slow
def test_a_module_takes_its_inputs_by_the_names_of_its_parameters(tmp_path):
    network = Network()
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    record = convert(tmp_path / "weights.pt", tmp_path / "made", module=f"{__name__}.Network")
    assert [str(t) for t in record.contract.inputs] == ["mask [?] int64", "ids [?] int64"]
    run = open_runner(str(tmp_path / "made" / "folded.onnx"))
    expected = network(torch.from_numpy(MASK), torch.from_numpy(IDS)).detach().numpy()
    np.testing.assert_allclose(run(TEXTS)[0], expected, rtol=1e-4, atol=1e-6)


def test_a_module_that_refuses_its_inputs_says_so_once(tmp_path):
    torch.save(Network().state_dict(), tmp_path / "weights.pt")
    wrong = pack({"ids": IDS, "mask": MASK[:, :3]})
    with pytest.raises(ModelError) as refused:
        convert(tmp_path / "weights.pt", tmp_path / "made", wrong, f"{__name__}.Network")
    assert str(refused.value).count("(3,)") == 1
