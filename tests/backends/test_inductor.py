"""Packages of AOTInductor: what is compiled, what is given to it, and on which CPU."""

import os
import re
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resnet8ptq.backends.torch import package
from resnet8ptq.backends.torch.torchscript import Example
from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.core import files as core_files
from resnet8ptq.core import machine
from resnet8ptq.core.errors import ConfigError, PtqError, QuantizationError, UnsupportedError
from resnet8ptq.deploy import source
from resnet8ptq.models.gates import exported_program as gate
from resnet8ptq.tracking import history
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of
from tests.helpers.quantized import Cell, Quantize

NAME, FLAGS = machine.cpu()


@pytest.fixture(scope="module")
def cell(quantize: Quantize) -> Cell:
    """The network of `shapes`, compiled once for all tests."""
    return quantize("backend=torch_inductor", "dtype=int8")


def test_the_same_integers_as_simulated(cell: Cell, quantize: Quantize) -> None:
    # Without VNNI, Inductor's kernels take 7 bits, so that their sums do not saturate.
    reduced = quantizer_of(cell.config).resolve().activation_bits == 7
    bits = ["reduce_range=true"] if reduced else []
    simulated = quantize("backend=torch_pt2e", "dtype=u8s8", *bits)
    assert cell.artifact.ranges == simulated.artifact.ranges
    same = cell.predict().argmax(1) == simulated.predict().argmax(1)
    assert same.mean() > 0.98


def test_inputs_are_checked_and_put_in_order(cell: Cell) -> None:
    images = cell.data.test.inputs(slice(8))
    strided = np.asfortranarray(images)
    assert not strided.flags.c_contiguous
    predict = cell.predictor.predict
    np.testing.assert_array_equal(predict(strided)[0], predict(images)[0])
    for wrong in (images[:, ::2], images.transpose(0, 3, 1, 2), images.astype(np.float64)):
        with pytest.raises(ValueError, match=r"takes float32 \[n, 32, 32, 3\]"):
            predict(wrong)


def test_the_file_holds_the_shared_object_alone(cell: Cell) -> None:
    with zipfile.ZipFile(cell.artifact.path) as archive:
        code = [name for name in archive.namelist() if name.endswith((".so", ".cpp"))]
    assert len(code) == 1 and code[0].endswith(".so")
    assert cell.artifact.size_bytes < 700_000


def test_it_cannot_be_cut_or_profiled(cell: Cell) -> None:
    assert cell.predictor.logits(cell.data.test.inputs(slice(1))) is None
    with pytest.raises(UnsupportedError, match="one shared object"):
        quantizer_of(cell.config).profile(cell.artifact.path, 1)


def test_it_is_no_network_to_start_from(cell: Cell) -> None:
    for read in (gate.read, gate.read_network):
        with pytest.raises(PtqError, match=r"model\.pt2"):
            read(cell.artifact.path)


def test_loading_leaves_nothing(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded = package.load(cell.artifact.path)
    assert not [*tmp_path.iterdir()]
    assert loaded.predict(cell.data.test.inputs(slice(2)))[0].shape == (2, 10)


def test_another_cpu_is_told_before_anything_is_loaded(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = tuple(flag for flag in FLAGS if flag != "avx2")
    monkeypatch.setattr(machine, "cpu", lambda: ("Another", fewer))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", None)
    with pytest.raises(QuantizationError, match=r"this CPU \(Another\) lacks avx2 of it") as told:
        package.load(cell.artifact.path)
    assert re.search(f"compiled for {re.escape(NAME)}", str(told.value))


def test_no_compiler_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for dtype in ("fp32", "int8"):
        with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler.*no-such-compiler"):
            quantizer_of(make_config("backend=torch_inductor", f"dtype={dtype}")).resolve()


def test_another_architecture_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: ("Neoverse", ("asimd", "asimddp")))
    with pytest.raises(UnsupportedError, match="those of x86"):
        quantizer_of(make_config("backend=torch_inductor")).resolve()


@pytest.mark.parametrize(("vnni", "bits"), [((), 7), (("avx512_vnni",), 8)])
def test_activations_take_7_bits_without_vnni(
    vnni: tuple[str, ...], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: ("x", ("sse2", *vnni)))
    resolved = quantizer_of(make_config("backend=torch_inductor")).resolve()
    assert (resolved.activation_bits, resolved.engine) == (bits, "onednn")
    assert resolved.execution == "integer"


def test_a_failing_compiler_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    scratch, folder = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir(), folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with (
        config.patch({"cpp.cxx": (None, "false")}),
        pytest.raises(QuantizationError, match="AOTInductor failed"),
    ):
        example = Example((torch.zeros(1, 4),), (False,))
        package.save(torch.nn.Linear(4, 2), example, folder / "model.pt2")
    assert not [*scratch.iterdir(), *folder.iterdir()]
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


@pytest.mark.filterwarnings("ignore::UserWarning:mlflow", "ignore:`torch.jit")
def test_served_without_this_package(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    from resnet8ptq.tracking.serving_code.torch_model import TorchModel

    path = str(cell.artifact.path)
    context = SimpleNamespace(
        model_config={"outputs": ["probabilities"], "engine": "onednn"}, artifacts={"model": path}
    )
    served = TorchModel()
    served.load_context(context)
    images = cell.data.test.inputs(slice(4))
    found = served.predict(context, images)["probabilities"]
    np.testing.assert_array_equal(found, cell.predictor.predict(images)[0])
    monkeypatch.setattr(Path, "read_text", lambda _: "flags : sse2")
    with pytest.raises(RuntimeError, match=r"this CPU lacks .*avx2"):
        TorchModel().load_context(context)


def test_no_package_of_a_store_is_deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, scratch = tmp_path / "kept", tmp_path / "scratch"
    kept.mkdir(), scratch.mkdir()
    (kept / "model.pt2").write_bytes(b"a shared object")
    save_config(make_config("backend=torch_inductor"), kept / CONFIG_FILE)
    monkeypatch.setattr(history, "artifact", lambda store, record, name: nullcontext(kept / name))
    files = [SimpleNamespace(path=path.name) for path in kept.iterdir()]
    store: Any = SimpleNamespace(client=SimpleNamespace(list_artifacts=lambda run_id: files))
    made = {"artifact_sha256": core_files.sha256(kept / "model.pt2")}
    record = RunRecord("0123", made, {}, {"status": "ok"})
    with pytest.raises(ConfigError, match=r"backend\.flow=inductor, a shared object .* takes"):
        source.fetch(store, record, scratch, trust=True)
