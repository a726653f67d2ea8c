"""What a process imports: nothing that its work does not need."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.calling import QUICK, RUN, clean_environment
from tests.helpers.stores import new_store

FRAMEWORKS = {"tensorflow", "keras", "torch", "torchvision", "torchao", "ai_edge_litert"}
# MLflow imports pandas and scipy.sparse by itself.
YARDSTICKS = {"scipy.stats", "sklearn", "statsmodels", "cpuinfo"}
REPORT = {"jinja2", "markdown_it", "resnet8ptq.report.pages.page", "resnet8ptq.report.pages.plots"}
LIBRARIES = {"mlflow", "numpy", "scipy", "pandas", "matplotlib", "onnx", "onnxruntime"}


def imported(folder: Path, *args: str) -> set[str]:
    """Call `run.py` in `folder`; return the modules it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", RUN, *args],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(re.findall(r"^import time: .*\| +(\S+)$", done.stderr, flags=re.MULTILINE))


@pytest.mark.parametrize("args", [["--help"], ["--cfg", "job", "backend=torch"]])
def test_questions_are_answered_without_the_libraries(tmp_path, args):
    modules = imported(tmp_path, *args)
    assert "hydra" in modules
    assert not modules & (FRAMEWORKS | YARDSTICKS | REPORT | LIBRARIES)


def loaded(statements: str, packages: set[str], folder: Path | None = None) -> set[str]:
    """Return which of the packages a fresh process has after these statements."""
    code = f"import sys; {statements}; print(); print(*({packages} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.splitlines()[-1].split())


def test_a_verdict_needs_no_library_that_runs_or_draws_a_network():
    imports = "from resnet8ptq.results import continuous_integration"
    left = {"onnx", "onnx_ir", "onnxruntime", "sympy", "matplotlib", "mlflow"}
    assert loaded(imports, left) == set()


def test_drawing_the_figures_of_a_task_needs_no_library_that_rewrites_networks():
    imports = (
        "from resnet8ptq.tasks import classification, segmentation;"
        "from resnet8ptq.tasks.detection import task"
    )
    assert loaded(imports, {"onnx_ir", "sympy", "matplotlib"}) == set()


@pytest.mark.slow
def test_mlflow_and_matplotlib_are_left_to_the_process_that_uploads_and_draws():
    imports = (
        "from resnet8ptq.experiment import pipeline; from resnet8ptq import job;"
        "from resnet8ptq.sweeps import callback, jobs, resume; from resnet8ptq.tracking import run;"
        "from resnet8ptq.report import loading, terminal, verdicts"
    )
    left = {"mlflow", "sqlalchemy", "pandas", "pyarrow", "matplotlib"}
    assert loaded(imports, left) == set()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="py-cpuinfo tells the CPU elsewhere")
def test_a_cached_run_imports_its_own_framework_only_and_a_sweep_its_report(tmp_path, shapes_model):
    """One process runs both; only the background process imports MLflow."""
    new_store(tmp_path / "mlruns")
    words = ["backend=onnx", *QUICK]
    left = FRAMEWORKS | YARDSTICKS | {"mlflow"}
    both = (
        f"from resnet8ptq import run; assert run.start({words}) == 0;"
        f"early = {left | REPORT} & set(sys.modules); assert not early, early;"
        f"assert run.start({['-m', *words]}) == 0"
    )
    assert loaded(both, {*left, *REPORT, "onnxruntime"}, tmp_path) == {*REPORT, "onnxruntime"}


@pytest.mark.slow
def test_only_the_conversion_imports_tensorflow_and_only_pt2e_torchao():
    imports = (
        "from resnet8ptq.models import conversion, model;"
        "from resnet8ptq.experiment import pipeline; from resnet8ptq.sweeps import callback;"
        "from resnet8ptq.backends.onnx import quantizer;"
        "from resnet8ptq.backends.tflite import quantizer;"
        "from resnet8ptq.backends.torch import quantizer"
    )
    frameworks = {"torch", "torchao", "tensorflow", "keras", "tf2onnx"}
    assert loaded(imports, frameworks) == {"torch"}
