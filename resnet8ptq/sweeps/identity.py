"""The identity of a run: a hash of its settings, code, versions, network and samples."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from resnet8ptq import dispatch
from resnet8ptq.backends.file import reading
from resnet8ptq.core import code, files, machine
from resnet8ptq.core.errors import PtqError
from resnet8ptq.experiment.settings import Settings, Unresolved
from resnet8ptq.tasks import registry as tasks

# Settings of storage and of the report's form, which change no result. Paths of inputs do not count
# either, because their contents are hashed. `max_seconds` does not count, but a run that it cut
# short is never reused. The limits in `report` count, because a run logs p-values at its limit, and
# whether FP32 is in doubt.
_IGNORED = ("tracking", "sweep", "cache_dir", "per_backend", "max_seconds")
_OF_REPORT = ("columns", "prefer")
# The same settings among a sweep's overrides.
_ELSEWHERE = (
    "sweep.",
    "tracking.",
    "cache_dir=",
    "max_seconds=",
    *(f"report.{name}=" for name in _OF_REPORT),
)


def tag(settings: Settings | Unresolved) -> dict[str, str]:
    """Return the run's `identity` tag; empty if its settings or files are wrong.

    This reads the data set, which the run needs anyway. With wrong files, the run itself fails and
    records the error.
    """
    if isinstance(settings, Unresolved):
        return {}
    try:
        return {"identity": hash_run(settings)}
    except (PtqError, OSError):
        return {}


def hash_run(settings: Settings) -> str:
    """Return a hexadecimal hash; runs with the same hash would repeat each other.

    The hash covers the settings that can change a result, the code, the versions of the frameworks,
    and the content of all input files.
    It does not cover the CPU, because the jobs of a sweep may run on several kinds of CPU.

    Raises:
        PtqError: the samples, the network or another file is missing or damaged.
        OSError: a file cannot be read.
    """
    config = settings.config
    samples = settings.data
    hashed = {key: value for key, value in asdict(config).items() if key not in _IGNORED}
    hashed["threads"] = settings.asked.threads  # a worker's threads change no result
    for name in _OF_REPORT:
        del hashed["report"][name]

    # Put contents in place of paths
    hashed["data"] = [samples.name, samples.train.digest, samples.test.digest]
    if samples.calibration is not None:
        hashed["calib"] |= {"images": samples.calibration.digest}
    network = settings.network.sha256
    hashed["model"] = {**hashed["model"], "path": network, "state_dict": None}
    if config.backend.path is not None:
        hashed["backend"] |= {"path": reading.digest(files.expand(config.backend.path))}
    if config.calib.table is not None:
        hashed["calib"] |= {"table": files.sha256(Path(config.calib.table))}
    hashed["task"] |= {"own_code": tasks.fingerprint(config.task)}
    return _hash(hashed)


def sweep_key(overrides: Sequence[str]) -> str:
    """Return a hash of code, versions and a sweep's overrides other than those in `_ELSEWHERE`."""
    return _hash([word for word in overrides if not word.lstrip("+~").startswith(_ELSEWHERE)])


def _hash(asked: object) -> str:
    text = json.dumps([asked, code.behind(dispatch.__name__), machine.versions()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
