"""What is known of kernels by a CPU's flags, what is advised by it, and the warning of a run."""

import itertools
import shlex
from contextlib import chdir
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.kernels import saturates
from resnet8ptq.config.words import check_and_arrange
from resnet8ptq.core import machine
from resnet8ptq.experiment.network_properties import PRODUCTS
from resnet8ptq.experiment.path_words import complete
from resnet8ptq.exploration.search.candidates import (
    CANNOT,
    SLOW,
    TRY,
    WRONG,
    advise,
    describe_cpu,
    steps,
    sweeps,
)
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.summary import summarize
from tests.helpers.calling import QUICK, REPO, call, call_beside
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of
from tests.helpers.onnx_networks import build
from tests.helpers.own_data import write_data, write_network

CONF = REPO / "conf"
AVX2 = ("avx2", "sse2")
VNNI = (*AVX2, "avx512bw", "avx512_vnni")
ARM = ("asimd", "asimddp")
ONNX = Resolved("int8", "uint8", "integer", 8, file_format="QDQ")
TORCH = Resolved("int8", "uint8", "integer", activation_bits=8, engine="onednn")
EXECUTORCH = Resolved("int8", "int8", "integer", 8, activation_bits=8, file_format="ExecuTorch")
PT2E = Resolved("int8", "uint8", "simulated", activation_bits=8, file_format="PT2")


@pytest.mark.parametrize(
    ("resolved", "operators", "may"),
    [
        (ONNX, ("Conv",), True),
        (replace(ONNX, activation_dtype="int8"), ("Conv",), True),
        (replace(ONNX, weight_dtype="uint8"), ("Conv",), False),
        (replace(ONNX, weight_bits=7), ("Conv",), False),
        (replace(ONNX, file_format="QOperator"), ("Conv",), True),
        (replace(ONNX, file_format="QOperator", activation_dtype="int8"), ("Conv",), False),
        (replace(ONNX, file_format="IntegerOps"), ("Conv", "Gemm"), True),
        (replace(ONNX, file_format="IntegerOps"), ("Conv",), False),
        (replace(ONNX, file_format="TFLite"), ("Conv",), False),
        (TORCH, (), True),
        (replace(TORCH, activation_bits=7), (), False),
        (replace(TORCH, engine="qnnpack"), (), False),
        (replace(ONNX, engine="openvino"), (), True),
        (EXECUTORCH, ("Conv",), False),
        (PT2E, ("Conv",), False),
        (Resolved(), ("Conv",), False),
    ],
)
def test_what_may_saturate(resolved, operators, may):
    assert saturates(resolved, operators, AVX2) is may
    for flags in (VNNI, (*AVX2, "avx_vnni"), ARM, ()):
        assert not saturates(resolved, operators, flags)


def two_products(activation, weight):
    """255 * weight twice, by QLinearMatMul on integers of these types; scaled by 1 / 1000."""
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"largest ({activation.__name__}[1, 64] x) => (float[1, 16] y) {{"
        "q = QLinearMatMul(x, one, zero_x, w, one, zero_w, large, zero_x)"
        "y = DequantizeLinear(q, large, zero_x) }"
    )
    values = {
        "one": np.float32(1),
        "zero_x": activation(0),
        "w": np.full((64, 16), np.iinfo(weight).max, weight),
        "zero_w": weight(0),
        "large": np.float32(20_000),
    }
    for name, value in values.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    largest = np.iinfo(activation).max
    result = open_runner(proto)(np.full((1, 64), largest, activation))[0]
    return float(result[0, 0]) / (64 * float(largest) * np.iinfo(weight).max)


@pytest.mark.parametrize(
    ("activation", "weight"), [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)]
)
def test_this_cpu_saturates_where_it_is_said_to(activation, weight):
    resolved = replace(
        ONNX,
        file_format="QOperator",
        activation_dtype=activation.__name__,
        weight_dtype=weight.__name__,
    )
    may = saturates(resolved, ("MatMul",), machine.cpu()[1])
    assert (two_products(activation, weight) < 0.6) is may


@pytest.fixture
def network(tmp_path):
    middle = [helper.make_node("Erf", ["relu"], ["middle"])]
    path = tmp_path / "own network.onnx"
    onnx.save(build(13, takes=[1, 32, 32, 3], gives=[1, 10], middle=middle), path)
    return summarize(path, tmp_path)


def verdicts(flags, network=None):
    return {row.settings: row.verdict for row in advise(flags, network)}


def test_without_vnni_exact_sums_are_tried_first():
    result = verdicts(AVX2)
    assert list(result.values()) == sorted(result.values(), key=[TRY, SLOW, WRONG, CANNOT].index)
    assert result["backend=onnx per_channel=true dtype=uint8"] == TRY
    assert result["backend=onnx per_channel=true dtype=u8s8 reduce_range=true"] == TRY
    assert result["backend=onnx dtype=u8s8,int8"] == WRONG
    assert result["backend=torch reduce_range=false"] == WRONG
    assert "dtype=uint8,u8s8 reduce_range=true" in sweeps(AVX2)[0]


@pytest.mark.parametrize("flags", [VNNI, (*AVX2, "avx_vnni"), ARM, ("asimd",), ()])
def test_elsewhere_nothing_saturates(flags):
    assert WRONG not in verdicts(flags).values()
    assert "reduce_range" not in " ".join(sweeps(flags))


@pytest.mark.parametrize("flags", [AVX2, VNNI, ARM])
def test_every_run_of_a_sweep_is_supported(flags):
    for command in sweeps(flags):
        swept = [word.partition("=") for word in command.partition(" run -m ")[2].split()]
        for values in itertools.product(*(value.split(",") for _, _, value in swept)):
            words = [f"{key}={value}" for (key, _, _), value in zip(swept, values, strict=True)]
            assert quantizer_of(make_config(*words)).resolve().execution == "integer"


def test_the_fast_pair_depends_on_the_cpu():
    assert verdicts(VNNI)["backend=onnx per_channel=true dtype=u8s8"] == TRY
    assert verdicts(VNNI)["backend=onnx dtype=int8 reduce_range=true"] == SLOW
    assert verdicts(ARM)["backend=onnx per_channel=true dtype=int8"] == TRY
    reasons = {flags: advise(flags)[0].why for flags in (ARM, ("asimd",), ())}
    assert "dot product sums" in reasons[ARM]
    assert "without dot product" in reasons["asimd",]
    assert "nothing is known" in reasons[()]
    assert "AMX" in advise((*VNNI, "amx_int8"))[0].why


def test_a_network_narrows_it(network):
    result = {item.settings: item for item in advise(AVX2, network)}
    tflite = result["backend=tflite dtype=int8 per_channel=true"]
    assert tflite.verdict == TRY and "converted by onnx2tf" in tflite.why
    assert "Erf 1" in result["backend=onnx per_channel=true dtype=uint8"].why
    assert "per_channel=false" not in result
    deep = replace(network, depthwise=3)
    assert verdicts(AVX2, deep)["per_channel=false"] == WRONG
    command, *others = sweeps(AVX2, deep)
    assert any("tflite" in other for other in others)
    two = replace(network, quantized={"onnx": frozenset()})  # of two inputs
    assert verdicts(AVX2, two)["backend=tflite"] == CANNOT
    assert f"'model.path={network.path}'" in command and command.endswith("per_channel=true")
    products = replace(network, operators={"MatMul": 2})
    assert verdicts(AVX2, products)["backend=onnx method=dynamic dtype=uint8"] == TRY


def test_the_cpu_is_reported_in_a_line():
    assert describe_cpu("A", (*VNNI, "amx_int8")) == "A: AVX2, AVX512, VNNI, AMX"
    assert describe_cpu("A", ("sse2",)) == "A: SSE2, no VNNI"
    assert describe_cpu("B", ARM) == "B: ARM, dot product"
    assert describe_cpu("C", ()) == "C: no known CPU flags"


# On the command line


def test_advice_is_printed(tmp_path, network, monkeypatch):
    monkeypatch.setattr(machine, "cpu", lambda: ("[bold]CPU", AVX2))
    done = call_beside(tmp_path, "advise", f"model.path={network.path}")
    assert done.code == 0, done.err
    for part in (
        "[bold]CPU: AVX2, no VNNI",
        "own network.onnx",
        "may be wrong here",
        "reduce_range",
        " ship ",
        "corrections.bias_correction=true",
    ):
        assert part in done.out
    assert call_beside(tmp_path, "advise").code == 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.path=missing.onnx", "model.path: got "),
        ("model.path=here.txt", "here.txt is not a model"),
        ("model.path=broken.onnx", "not an ONNX model"),
        ("modl.path=a.onnx", "modl: no such key"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, word, message):
    (tmp_path / "here.txt").write_text("text")
    (tmp_path / "broken.onnx").write_bytes(b"broken")
    done = call_beside(tmp_path, "advise", word)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert message in done.err


@pytest.mark.slow
@pytest.mark.parametrize(("words", "warned"), [((), True), (("reduce_range=true",), False)])
def test_a_run_warns_where_sums_may_saturate(tmp_path, monkeypatch, words, warned):
    monkeypatch.setattr(machine, "cpu", lambda: ("CPU", AVX2))
    done = call(tmp_path, *QUICK, "dtype=u8s8", *words)
    assert done.code == 0, done.err
    text = " ".join(done.err.split())
    assert ("reduce_range=true or dtype=uint8 avoids it" in text) is warned


def test_the_printed_commands_are_taken_as_they_are(tmp_path):
    write_network(tmp_path / "my.onnx")
    write_data(tmp_path / "my (own).npz", 12)
    words = ("my.onnx", "data.root='my (own).npz'", "preprocess=unit")
    done = call_beside(tmp_path, "advise", *words)
    assert done.code == 0, done.err
    commands = [line for line in done.out.splitlines() if line.startswith("  resnet8ptq run ")]
    assert len(commands) >= 2
    for command in commands:
        _, _, *settings = shlex.split(command)
        with chdir(tmp_path):
            assert complete(settings, CONF) == settings
            assert {*check_and_arrange(settings, CONF)} == {*settings}
        for word in ("data=arrays", "data.root='my (own).npz'", "preprocess=unit"):
            assert word in shlex.split(command)


def test_the_network_is_once_in_a_command(tmp_path, network):
    done = call_beside(tmp_path, "advise", f"+model.path={network.path}")
    assert done.code == 0, done.err
    commands = [line for line in done.out.splitlines() if line.startswith("  resnet8ptq run ")]
    assert commands
    assert all(command.count("model.path=") == 1 for command in commands)


def test_several_networks_are_refused(tmp_path):
    for name in ("one.onnx", "two.onnx"):
        write_network(tmp_path / name)
    done = call_beside(tmp_path, "advise", "model.path=one.onnx,two.onnx")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "model.path: got one.onnx,two.onnx" in done.err


def test_an_input_with_a_fixed_value_does_not_count(tmp_path):
    """TensorFlow Lite takes one input; `model.inputs` makes a constant of the other."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        two (float[n, 4] x, float[1] rate) => (float[n, 2] y)
        <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { z = MatMul(x, w)  y = Mul(z, rate) }""")
    onnx.save(proto, tmp_path / "two.onnx")
    cannot = "takes networks of one input"
    assert cannot in call_beside(tmp_path, "advise", "two.onnx").out
    done = call_beside(tmp_path, "advise", "two.onnx", "model.inputs={rate: 2}")
    assert done.code == 0, done.err
    assert cannot not in done.out


def test_settings_that_the_advice_is_about_are_refused(tmp_path):
    done = call_beside(tmp_path, "advise", "dtype=int8")
    assert (done.code, len(done.errors)) == (2, 1)
    assert "dtype: got int8" in done.errors[0]


def test_the_steps_of_advice_are_those_of_the_search():
    """One table: dynamic quantization comes early for matrix products, and not for others."""
    products = [settings for settings, _ in steps([PRODUCTS])]
    others = [settings for settings, _ in steps([])]
    assert products[1].startswith("method=dynamic")
    assert not any("method=dynamic" in settings for settings in others)
    assert products[2].startswith("method=weight_only dtype=w8")
    assert others[-3].startswith("method=weight_only dtype=w8")
    assert others[-2].startswith("dtype=fp16")
