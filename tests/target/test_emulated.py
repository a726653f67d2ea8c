"""Files give the same predictions on an emulated ARM CPU.

ARM64_ROOT names a folder that .ci/arm64_root wrote.
"""

import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from resnet8ptq.target.target import Target
from resnet8ptq.tasks.scoring.distortion import KERNELS_DB, sqnr_db

QEMU = shutil.which("qemu-aarch64-static")
ROOT = os.environ.get("ARM64_ROOT", "")
IMAGES = 20

pytestmark = pytest.mark.skipif(
    QEMU is None or not ROOT, reason="needs qemu-aarch64-static, and an arm64 root in ARM64_ROOT"
)


@pytest.fixture(scope="module")
def emulated():
    python = Path(ROOT, "usr/bin/python3.11")
    target = Target(shlex.join([str(QEMU), "-L", ROOT, str(python)]), timeout_s=120)
    yield target
    target._connection.close()


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("onnxruntime", ("backend=onnx", "dtype=fp32")),
        ("onnxruntime", ("backend=onnx", "dtype=u8s8", "per_channel=true")),
        ("onnxruntime", ("backend=onnx", "dtype=int8")),
        ("ai-edge-litert", ("backend=tflite",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_file_predicts_the_same_on_arm(runtime, words, emulated, quantize):
    cell = quantize(*words)
    here = cell.predict(IMAGES, IMAGES)
    batch = next(iter(cell.data.test.take(np.arange(IMAGES)).batches(IMAGES)))
    [there], _ = emulated.load(cell.artifact.path, runtime, threads=1).run(batch)
    assert emulated.describe()["machine"] == "aarch64"
    assert (here.argmax(1) == there.argmax(1)).mean() >= 0.95
    noise = sqnr_db([here], [there])
    assert noise is None or noise >= KERNELS_DB
