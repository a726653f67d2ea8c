"""The environment of onnx2tf, which tests share with the user."""

import os
from pathlib import Path

from resnet8ptq.backends.tflite import environment
from resnet8ptq.core import cache

ASKS = "RESNET8PTQ_TEST_ONNX2TF"  # set: install onnx2tf in the user's cache
USERS_CACHE = cache.folder(None)  # before the tests have one of their own


def link(cache_root: Path) -> bool:
    """Link the user's environment into the tests' cache; return whether there is one."""
    made = environment.path_of(USERS_CACHE)
    if not made.exists() and ASKS not in os.environ:
        return False
    environment.find_interpreter(USERS_CACHE)
    linked = environment.path_of(cache_root)
    linked.parent.mkdir(exist_ok=True)
    if not linked.exists():
        linked.symlink_to(made)
    return True
