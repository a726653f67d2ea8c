"""What a process imports: nothing that its work does not need."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from calling import COMMAND, QUICK, clean_environment

from resnet8ptq.models.model import Fp32Model

FRAMEWORKS = {"tensorflow", "keras", "torch", "torchvision", "torchao", "ai_edge_litert"}
# MLflow imports pandas and scipy.sparse by itself.
YARDSTICKS = {"scipy.stats", "sklearn", "statsmodels", "cpuinfo"}
REPORT = {"jinja2", "markdown_it", "resnet8ptq.report.page", "resnet8ptq.report.plots"}
LIBRARIES = {"mlflow", "numpy", "scipy", "pandas", "matplotlib", "onnx", "onnxruntime"}


def imported(folder: Path, *args: str) -> set[str]:
    """Call `run.py` in `folder`; return the modules it imported."""
    python, script = COMMAND
    done = subprocess.run(
        [python, "-X", "importtime", script, *args],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(re.findall(r"^import time: .*\| +(\S+)$", done.stderr, flags=re.MULTILINE))


@pytest.mark.parametrize("args", [["--help"], ["--cfg", "job", "backend=torch"]])
def test_questions_are_answered_without_the_libraries(tmp_path: Path, args: list[str]) -> None:
    modules = imported(tmp_path, *args)
    assert "hydra" in modules
    assert not modules & (FRAMEWORKS | YARDSTICKS | REPORT | LIBRARIES)


@pytest.mark.skipif(sys.platform != "linux", reason="py-cpuinfo tells the CPU elsewhere")
def test_a_cached_run_imports_its_own_framework_only(
    tmp_path: Path, shapes_model: Fp32Model
) -> None:
    modules = imported(tmp_path, "backend=onnx", *QUICK)
    assert "onnxruntime" in modules
    assert not modules & (FRAMEWORKS | YARDSTICKS | REPORT)


def test_the_fx_flow_does_without_torchao() -> None:
    code = (
        "import sys, resnet8ptq.backends.torch.quantizer;"
        "print('torch' in sys.modules, *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("True ")
    assert "torchao" not in done.stdout.split()
