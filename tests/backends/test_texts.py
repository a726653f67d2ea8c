"""Networks with several inputs and of any length, in every backend that takes them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.core.records import pack
from resnet8ptq.data import registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.experiment.network_and_data import fit_data, fit_settings
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.graph.attention import attention_products
from resnet8ptq.graph.passes import remove_unused, rewrite
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models import model
from resnet8ptq.tasks.scoring.distortion import sqnr_db
from tests.helpers import phrases as texts
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of
from tests.helpers.frameworks import QUANTIZING
from tests.helpers.text_networks import MASKED, write, write_bag_of_words

UNTRIED = ("openvino_nncf",)  # a reference; tests/zoo has its networks
BACKENDS = [
    name
    for name in (*QUANTIZING, "torch_pt2e")
    if name not in UNTRIED and (name == "torch_pt2e" or not find_backends()[name].single_input)
]
ROUNDING = 1e-4  # of logits of about 10


@pytest.fixture(scope="module")
def phrases(cache_root: Path) -> tuple[Dataset, model.Fp32Model]:
    config = make_config(*texts.settings(cache_root))
    data = registry.load("arrays", config.data.root, cache_root)
    fp32 = model.load_network(config.model, data, cache_root)
    return fit_data(data, fp32), fp32


@pytest.fixture(scope="module")
def attention(phrases, tmp_path_factory: pytest.TempPathFactory) -> model.Fp32Model:
    """The encoder up to its first attention: the part that reads other positions."""
    _, fp32 = phrases
    proto = onnx.load(fp32.onnx_path)
    first, second = (f"/layers.{n}/LayerNormalization_output_0" for n in ("0/norm1", "1/norm2"))
    [last] = [node for node in proto.graph.node if second in node.input]
    last.input[0] = first
    proto = rewrite(proto, [remove_unused])
    path = tmp_path_factory.mktemp("encoder") / "attention.onnx"
    onnx.save(proto, path)
    return replace(fp32, onnx_path=path)


def test_the_conversion_keeps_both_inputs_and_frees_the_length(phrases):
    data, fp32 = phrases
    assert [(t.name, t.shape) for t in fp32.contract.inputs] == [
        ("input_ids", (None,)),
        ("attention_mask", (None,)),
    ]
    assert not fp32.conversion.without_torch
    assert len({batch.dtype for batch in data.test.take(np.arange(50)).batches(5)}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "backend"),
    # ExecuTorch's fp32 is lowered with the same bounds: 20 s for the same answer.
    [(d, b) for d in ("fp32", "int8") for b in BACKENDS if (d, b) != ("fp32", "executorch")],
)
def test_outputs_do_not_depend_on_the_batch_size(phrases, attention, backend, dtype, tmp_path):
    """Neither on the padding that a batch adds."""
    data, _ = phrases
    config = make_config("data=shapes", f"backend={backend}", f"dtype={dtype}", "per_channel=true")
    quantizer = quantizer_of(config)
    artifact = quantize_network(quantizer, attention, draw_calibration(data, 10, 0).split, tmp_path)
    predict, some = quantizer.load(artifact.path, 1).predict, data.test.take(np.arange(0, 4000, 16))
    outputs = []
    for size in (1, 32, 250):
        batches = some.batches(size)
        outputs.append(batches.restore(np.concatenate([predict(batch)[0] for batch in batches])))
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], atol=ROUNDING)
    run, batches = open_runner(str(attention.onnx_path)), some.batches(250)
    expected = batches.restore(np.concatenate([run(batch)[0] for batch in batches]))
    assert np.corrcoef(expected.ravel(), outputs[0].ravel())[0, 1] > 0.99
    if backend == "executorch":  # looked at here, since it lowers the encoder for many seconds
        products = len(attention_products(onnx.load(attention.onnx_path).graph))
        layers = artifact.quantized_layers
        assert quantizer.count_kernels(artifact.path) == (layers, products)
        assert products > 0 < layers
        delegated, whole = artifact.details["delegated_operators"].split(" of ")
        assert int(delegated) < int(whole)  # LayerNormalization has no kernel in XNNPACK


@pytest.mark.parametrize("backend", ["onnx", "torch", "torch_pt2e"])
def test_rows_of_different_size_are_rounded_once(phrases, backend, tmp_path):
    """Each by its own scale; a normalization would enlarge the error of one scale for all."""
    data, fp32 = phrases
    random = np.random.default_rng(0)
    count = 1 + int(data.test.stored[:]["input_ids"].max())
    sizes = 10 ** random.uniform(-2, 0, size=(count, 1))
    table = (sizes * random.normal(size=(count, 64))).astype(np.float32)
    named = {"ids": "input_ids", "mask": "int64[N, L] attention_mask"}
    normed = f"normed = LayerNormalization(rows, gain) {MASKED.replace('rows', 'normed')}"
    constants = {"table": table, "gain": np.ones(64, np.float32)}
    path = write(tmp_path / "sizes.onnx", normed, count, width=64, **named, **constants)
    float_nodes = [f"node{index}" for index in range(1, 6)]  # all but the table and the product
    words = [f"backend={backend}", "per_channel=true", f"nodes_to_exclude={float_nodes}"]
    quantizer = quantizer_of(make_config("data=shapes", "dtype=int8", *words))
    artifact = quantize_network(
        quantizer, replace(fp32, onnx_path=path), draw_calibration(data, 10, 0).split, tmp_path
    )
    [batch] = data.test.take(np.arange(20)).batches(20)
    [expected] = open_runner(str(path))(batch)
    [outputs] = quantizer.load(artifact.path, 1).predict(batch)
    assert sqnr_db([expected], [outputs]) > 20


# tests/deploy/test_deploy_texts.py lowers such a network by ExecuTorch.
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "executorch"])
def test_a_mask_that_stays_an_integer_is_not_quantized(phrases, backend, tmp_path):
    data, fp32 = phrases
    path = write_bag_of_words(tmp_path / "masked.onnx", data)
    config = make_config("data=shapes", f"backend={backend}", "dtype=int8", "per_channel=true")
    quantizer = quantizer_of(config)
    network = replace(fp32, onnx_path=path)
    artifact = quantize_network(quantizer, network, draw_calibration(data, 10, 0).split, tmp_path)
    [batch] = data.test.take(np.arange(20)).batches(20)
    [expected] = open_runner(str(path))(batch)
    [outputs] = quantizer.load(artifact.path, 1).predict(batch)
    assert sqnr_db([expected], [outputs]) > 20


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_no_sum_is_fused_with_a_normalization(phrases, method, tmp_path):
    """The fused operator of ONNX Runtime is slower than the two."""
    data, fp32 = phrases
    config = make_config("data=shapes", "backend=onnx", f"method={method}", "per_channel=true")
    artifact = quantize_network(
        quantizer_of(config), fp32, draw_calibration(data, 10, 0).split, tmp_path
    )
    kinds = []
    for path in (fp32.onnx_path, artifact.path):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        loaded = onnx.load(tmp_path / "loaded.onnx").graph
        kinds.append({node.op_type for node in loaded.node})
    assert "SkipLayerNormalization" in kinds[0] - kinds[1]
    assert "LayerNormalization" in kinds[1]


def test_padding_does_not_calibrate(phrases, tmp_path):
    """Ranges of samples that are stored longer are equal: no position of padding is counted."""
    data, fp32 = phrases
    config = make_config("data=shapes", "backend=onnx", "per_channel=true")
    drawn = draw_calibration(data, 10, 0).split
    stored = drawn.stored[:]
    longer = {name: np.pad(stored[name], [(0, 0), (0, 9)]) for name in stored.dtype.names}
    padded = replace(drawn, stored=pack(longer))
    ranges = [
        quantize_network(quantizer_of(config), fp32, split, folder).ranges
        for split, folder in ((drawn, tmp_path / "a"), (padded, tmp_path / "b"))
        if folder.mkdir() is None
    ]
    assert ranges[0] == ranges[1]


@pytest.mark.parametrize("setting", ["method=qat", "corrections.reconstruction=true"])
def test_what_trains_a_simulation_of_one_input_is_unsupported(phrases, setting):
    config = make_config("data=shapes", "backend=onnx", setting)
    with pytest.raises(UnsupportedError, match=f"{setting}: got a network of 2 inputs"):
        fit_settings(resolve(config), phrases[1])
