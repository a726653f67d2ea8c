"""What identifies a run: a hash of its settings, code, versions, network and images."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache, files, machine
from resnet8ptq.data import registry
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.experiment.compatibility import settle
from resnet8ptq.models import locate as networks
from resnet8ptq.tasks import registry as tasks

CODE = (  # of this package, on which what a run finds depends
    *("core", "config", "tasks", "data", "graph", "precision", "models", "calibration"),
    *("backends", "corrections", "finetuning", "simulation", "evaluation", "experiment"),
)
# Where things are kept, and what is done with the results: no run depends on it. Paths of inputs
# neither, since their contents are hashed.
_IGNORED = ("tracking", "report", "sweep", "objectives", "cache_dir", "per_backend")
_ELSEWHERE = ("sweep.", "tracking.", "report.", "cache_dir=")  # the same among a sweep's overrides


def find(config: RunConfig) -> str:
    """Return a hash, in hexadecimal, that two runs share only if they would give the same.

    The same settings, code of this package, versions of the frameworks, network, training and
    test images. The CPU is not part of it: the jobs of a sweep may run on several kinds.

    Raises:
        PtqError: the images or the network are not available.
    """
    config = mlperf_tiny.settle(config)
    root = cache.folder(config.cache_dir)
    config = settle(config, root, quiet=True)
    images = registry.read(config.data, config.preprocess, root, config.calib.images)
    settings = {key: value for key, value in asdict(config).items() if key not in _IGNORED}
    settings["data"] = [images.name, images.train.digest, images.test.digest]
    if images.calibration is not None:
        settings["calib"] |= {"images": images.calibration.digest}
    network = networks.digest(config.model, networks.locate(config.model, images.name))
    settings["model"] = {**settings["model"], "path": network, "state_dict": None}
    if config.calib.table is not None:
        settings["calib"] |= {"table": files.sha256(Path(config.calib.table))}
    settings["task"] |= {"own_code": tasks.fingerprint(config.task)}
    return _hash(settings)


def sweep_key(overrides: Sequence[str]) -> str:
    """Return a hash of what a sweep asks for, and the code and versions it runs with."""
    return _hash([word for word in overrides if not word.lstrip("+~").startswith(_ELSEWHERE)])


def _hash(asked: object) -> str:
    text = json.dumps([asked, cache.code(*CODE), machine.versions()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
