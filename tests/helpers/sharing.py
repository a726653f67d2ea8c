"""A folder and sweeps that all processes of the tests share."""

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers.calling import NO_REAL_FILES, Called, call


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of the whole call of pytest; each of its processes has one below it."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def call_once(
    factory: pytest.TempPathFactory, name: str, *args: str, drawn: bool = False
) -> Called:
    """Call a sweep; the first process of the tests that wants it does."""
    shared = shared_folder(factory)
    folder, record = shared / name, shared / f"{name}.json"
    with FileLock(shared / f"{name}.lock"):
        if not record.exists():
            folder.mkdir()
            done = call(folder, "-m", *args, drawn=drawn, **NO_REAL_FILES)
            record.write_text(json.dumps([done.code, done.out, done.err]))
    return Called(folder, *json.loads(record.read_text()))
