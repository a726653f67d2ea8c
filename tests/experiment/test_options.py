"""Every option on the real network and real images, from preparation to the artifact on disk."""

from dataclasses import replace

import numpy as np
import pytest

from resnet8ptq.core import cache, machine
from resnet8ptq.data import locate, registry
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.samples import draw_to_analyse
from resnet8ptq.experiment.workspace import Workspace
from resnet8ptq.models import model
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, evaluator_of, quantizer_of, settings_of

IMAGES = 500
FP32_ACCURACY = 0.87

OPTIONS = [
    ("method=dynamic", "dtype=uint8", "per_channel=true"),
    ("method=qat", "qat.epochs=1", "per_channel=true", "held_out_images=200"),
    ("format=qoperator", "dtype=u8s8"),
    ("symmetric.activations=true",),
    ("symmetric.weights=false",),
    ("float_output=true",),
    ("slim=true",),
    ("op_types=[Conv]",),
    ("nodes_to_quantize=[model_1/conv2d_1_2/BiasAdd]",),
    ("nodes_to_exclude=[model_1/conv2d_1/BiasAdd]",),
    ("nodes_to_exclude=auto", "dtype=u8s8", "per_channel=true", "max_drop=0.02"),
    ("calib=moving_average",),
    ("calib=mse",),
    ("corrections.equalization=true",),
    ("corrections.bias_correction=true",),
    ("model.fold=false",),
    ("backend=torch", "method=dynamic"),
    ("backend=torch", "symmetric.activations=true"),
    ("backend=torch_pt2e", "dtype=uint8", "per_channel=true", "float_output=true"),
    ("backend=tflite", "method=dynamic", "per_channel=true"),
    (
        "experiment=flagship",
        "seed=1",
        "corrections.adaround_iterations=50",
        "calib.samples_per_class=5",
    ),
]


class Nowhere:
    """In place of an MLflow run: nothing is kept."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.slow
@pytest.mark.parametrize("overrides", OPTIONS, ids=" ".join)
def test_option_keeps_the_accuracy(real_files, overrides, tmp_path):
    if overrides == ("symmetric.activations=true",) and not machine.has_vnni():
        pytest.skip("without VNNI 16-bit sums saturate: this network loses 14 points")
    config = make_config("held_out_images=500", "calib.samples_per_class=20", *overrides)
    config = replace(config, data=locate.find_data(config.data))
    config.latency.enabled = False
    whole = registry.load(config.data.name, config.data.root)
    dataset = replace(
        whole, train=whole.train.take(np.arange(1000)), test=whole.test.take(np.arange(IMAGES))
    )
    fp32 = model.load_network(config.model, whole, cache.folder(None))
    samples = draw_to_analyse(config, dataset)
    quantizer_of(config).resolve()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    evaluator = evaluator_of(config, fp32)
    work = Workspace(settings_of(config), evaluator, samples, tmp_path, scratch, Nowhere())
    prepared = preparation.prepare(work)
    assert (config.method == "qat") == (tmp_path / "qat_loss.png").exists()
    artifact = work.quantize(prepared, tmp_path).artifact
    predictor = work.settings.quantizer.load(artifact.path, THREADS)
    outputs = [predictor.predict(batch)[0] for batch in dataset.test.batches(250)]
    accuracy = (np.concatenate(outputs).argmax(axis=1) == dataset.test.labels).mean()
    assert artifact.quantized_layers > 0
    assert accuracy == pytest.approx(FP32_ACCURACY, abs=0.04)
