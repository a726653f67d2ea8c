"""A run with two inputs of any length, deployed: its card, its example, its MLflow model."""

import sys
from pathlib import Path

import mlflow.pyfunc
import numpy as np
import pytest

from resnet8ptq.data import registry
from resnet8ptq.deploy import card, example
from resnet8ptq.deploy.interface import FileTensor, Interface
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.experiment.outputs import TOKENIZER
from tests.helpers import phrases, text_networks
from tests.helpers.calling import call, call_beside
from tests.helpers.cells import predictions, record
from tests.helpers.configs import make_config

FAST = ("latency.enabled=false", "calib.samples_per_class=5")


@pytest.mark.parametrize(("samples", "most"), [(5, "8"), (8, 'cut.get("max_length", ')])
def test_the_example_cuts_a_text_to_the_only_length_of_a_network(tmp_path, samples, most):
    (tmp_path / TOKENIZER).write_text("{}")
    source = SourceRun(
        record("a", predictions()), make_config("data=table"), tmp_path / "model.onnx"
    )
    kept, taken = (np.zeros(2, [("input_ids", "i8", (n,))]) for n in (samples, 8))
    vectors = Vectors(kept, taken, (np.zeros((2, 3), np.float32),), (0.1,))
    assert f"    most = {most}" in example.render_example(source, vectors, "model.onnx", ["logits"])


@pytest.mark.parametrize("name", ["tokens", "input_ids"])
def test_the_card_of_a_language_model_has_the_kind_of_the_hub(name):
    taken = np.zeros(2, [(name, "i8", (8,))])
    vectors = Vectors(taken, taken, (np.zeros((2, 8, 9), np.float32),), (0.1,))
    source = SourceRun(
        record("a", predictions(), scored_as="perplexity"), make_config(), Path(__file__)
    )
    tensor = FileTensor(name, ("n", 8), "int64")
    facts = card.Facts(Interface((tensor,), (tensor,)), vectors, "")
    rendered = card.render_card(source, Path(__file__), facts)
    assert "pipeline_tag: text-generation" in rendered


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.load
@pytest.mark.parametrize("backend", ["onnx", "torch", "executorch", "openvino"])
def test_a_network_of_texts_is_deployed_and_served(tmp_path, cache_root, backend):
    settings = phrases.data_settings(cache_root)
    data = registry.load("arrays", str(cache_root / "phrases.npz"), cache_root)
    network = text_networks.write_bag_of_words(tmp_path / "bag.onnx", data)
    words = (*settings, f"model.path={network}", f"backend={backend}", *FAST)
    ended = call(tmp_path, *words)
    assert ended.code == 0, ended.err
    [run] = ended.runs
    folder = tmp_path / "out"
    named = (f"run_id={run.info.run_id}", f"folder={folder}", "register=texts", "verify=false")
    done = call_beside(tmp_path, "deploy", *named)
    assert done.code == 0, done.err
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert '"input_ids": [' in card and '"attention_mask": [' in card
    assert "output 0: 10 samples" in example.run_example(sys.executable, folder)
    with np.load(folder / "test_vectors.npz") as kept:
        vectors = dict(kept)
    model = mlflow.pyfunc.load_model(f"models:/{run.outputs.model_outputs[0].model_id}")
    inputs = {name: vectors["inputs"][name] for name in ("input_ids", "attention_mask")}
    for length in (None, int(inputs["attention_mask"].sum(1).max())):
        served = model.predict({name: values[:, :length] for name, values in inputs.items()})
        np.testing.assert_allclose(served["logits"], vectors["output_0"], atol=1e-3)
