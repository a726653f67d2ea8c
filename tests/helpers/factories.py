"""Parts of a run, made from its config."""

from dataclasses import replace
from pathlib import Path

from resnet8ptq.backends.contract import Artifact, Quantizer
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration.statistics import Ranges
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.models import model
from resnet8ptq.tasks import classification

THREADS = 1


def runtime_of(config: RunConfig) -> Runtime:
    """Return what a run of these settings may use."""
    return cache.runtime(config.cache_dir, config.threads)


def settings_of(config: RunConfig) -> Settings:
    """Return these settings as decided ones; for a network that is not read from its file."""
    return Settings(config, config, runtime_of(config), Path())


def quantizer_of(config: RunConfig) -> Quantizer:
    """Return the framework of these settings."""
    return make_quantizer(config, runtime_of(config))


def evaluator_of(config: RunConfig, fp32: model.Fp32Model) -> Evaluator:
    """Return what measures a classification with these settings."""
    task = classification.build(tuple("0123456789"))
    return Evaluator(quantizer_of(config), fp32, task, config.evaluate.batch_size)


def quantize_network(
    quantizer: Quantizer,
    network: model.Fp32Model,
    images: Split,
    folder: Path,
    ranges: Ranges | None = None,
) -> Artifact:
    """Quantize with the decisions that the settings contain, and ranges from elsewhere."""
    decisions = replace(quantizer.asked, ranges=ranges or {})
    return quantizer.quantize(network, decisions, images, folder)
