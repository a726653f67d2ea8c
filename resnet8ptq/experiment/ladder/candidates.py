"""Configurations worth trying for a network on a CPU, from its flags and operators alone.

Each candidate names its source. Figures were measured on the machine of docs/speed.md.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.kernels import is_arm, saturates
from resnet8ptq.config.schema import DTYPES
from resnet8ptq.config.words import assign
from resnet8ptq.core import invocation, machine
from resnet8ptq.core.machine import VNNI, is_x86
from resnet8ptq.models.summary import Summary

TRY, SLOW, WRONG, CANNOT = "try", "slow here", "may be wrong here", "cannot"

_DOCS = "ONNX Runtime's docs (Quantize ONNX models)"
_TRIED = "largest integers tried elsewhere: docs/speed.md"
_MEASURED = "measured elsewhere: docs/speed.md"
_OUT_OF_16_BITS = "vpmaddubsw sums two products in 16 bits, which saturate without VNNI"


@dataclass(frozen=True)
class Candidate:
    """A configuration with its verdict, the reason and the source.

    Attributes:
        settings: the settings, as typed.
        verdict: `TRY`, `SLOW`, `WRONG` or `CANNOT`.
    """

    settings: str
    verdict: str
    why: str
    source: str


def advise(flags: Collection[str], network: Summary | None = None) -> list[Candidate]:
    """Return the known configurations, sorted: first those to try.

    Args:
        flags: the CPU's flags, see `machine.cpu`.
        network: None: any network.
    """
    order = (TRY, SLOW, WRONG, CANNOT)
    listed = [*_onnx(flags, network), *_dynamic(flags, network), *_torch(flags, network)]
    listed += [*_executorch(network), *_openvino(flags, network), *_tflite(network)]
    listed += [*_per_tensor(network)]
    return sorted(listed, key=lambda candidate: order.index(candidate.verdict))


def sweeps(
    flags: Collection[str], network: Summary | None = None, settings: Sequence[str] = ()
) -> list[str]:
    """Return commands that measure the candidates to try, with the user's own `settings`."""
    weights = "per_channel=true" if network and network.depthwise else "per_channel=false,true"
    dtypes = "dtype=u8s8"
    if _saturates("u8s8", flags):
        dtypes = "dtype=uint8,u8s8 reduce_range=true"
    elif not is_x86(flags):
        dtypes = "dtype=int8,u8s8"
    chosen = [f"backend=onnx,torch {dtypes} {weights}"]
    if network is None or "tflite" in network.quantized:
        chosen.append(f"backend=tflite dtype=int8 {weights}")
    if "version.openvino" in machine.versions():
        narrow = " reduce_range=true" if _saturates("int8", flags) else ""
        chosen.append(f"backend=openvino dtype=int8{narrow} {weights}")
    path = [assign("model.path", str(network.path))] if network else []
    own = [*path, *settings]
    return [invocation.command("run", "-m", *own, *words.split()) for words in chosen]


def _onnx(flags: Collection[str], network: Summary | None) -> Iterator[Candidate]:
    rest = _in_float("onnx", network)
    best = "backend=onnx per_channel=true"
    if not is_x86(flags):
        for dtype in ("int8", "u8s8"):
            yield Candidate(f"{best} dtype={dtype}", TRY, f"{_beyond_x86(flags)}{rest}", _DOCS)
        return
    if _saturates("u8s8", flags):
        narrow = "weights of 7 bits keep the 16-bit sums of vpmaddubsw exact: the fast kernels"
        yield Candidate(f"{best} dtype=u8s8 reduce_range=true", TRY, f"{narrow}{rest}", _TRIED)
        wide = "products with unsigned weights are summed in 32 bits: exact, about FP32's speed"
        yield Candidate(f"{best} dtype=uint8", TRY, f"{wide}{rest}", _MEASURED)
        worst = f"{_OUT_OF_16_BITS}; worst with symmetric.activations=true"
        yield Candidate("backend=onnx dtype=u8s8,int8", WRONG, worst, _TRIED)
    else:
        amx = "; AMX multiplies whole tiles of them" if "amx_int8" in flags else ""
        fast = f"VNNI multiplies u8 by s8, four products in one exact 32-bit sum{amx}"
        yield Candidate(f"{best} dtype=u8s8", TRY, f"{fast}{rest}", _DOCS)
    signed = (
        "the fast kernels take u8 activations: of s8 ones in QDQ format some are converted, and "
        "the layers between stay in float; format=qoperator runs a plain loop"
    )
    yield Candidate(
        "backend=onnx dtype=int8 reduce_range=true", SLOW, signed, f"{_DOCS}; {_MEASURED}"
    )


def _dynamic(flags: Collection[str], network: Summary | None) -> Iterator[Candidate]:
    operators = network.operators if network else {"Conv": 1, "Gemm": 1}
    settings = "backend=onnx method=dynamic"
    dynamic = Resolved("int8", "uint8 (dynamic)", "integer", 8, file_format="IntegerOps")
    if "Conv" in operators:
        why = "ConvInteger has no fast kernel: 0.13 (int8) to 0.56 (uint8) of FP32's speed"
        yield Candidate(settings, SLOW, why, "measured elsewhere: studies/frameworks.md")
    else:
        why = "advised for networks of matrix products; nothing has to be calibrated"
        yield Candidate(f"{settings} dtype=uint8", TRY, why, _DOCS)
    if saturates(dynamic, operators, flags):
        why = f"MatMulInteger with s8 weights: {_OUT_OF_16_BITS}"
        yield Candidate(f"{settings} dtype=int8,u8s8", WRONG, why, _TRIED)


def _torch(flags: Collection[str], network: Summary | None) -> Iterator[Candidate]:
    wide = Resolved("int8", "uint8", "integer", activation_bits=8, engine="onednn")
    if saturates(wide, (), flags):
        why = "its default engine takes activations of 7 bits, which keep 16-bit sums exact"
        wrong = f"{_OUT_OF_16_BITS}; so with backend.engine=onednn"
        yield Candidate("backend=torch reduce_range=false", WRONG, wrong, _TRIED)
    elif is_x86(flags):
        why = "oneDNN sums u8 by s8 products in 32 bits by VNNI"
    else:
        why = _beyond_x86(flags)
    settings = "backend=torch dtype=int8 per_channel=true"
    yield Candidate(settings, TRY, f"{why}{_in_float('torch', network)}", "torch's engines")
    why = "integer kernels take s8 weights only"
    yield Candidate("backend=torch dtype=uint8", CANNOT, why, "FBGEMM, oneDNN: docs/settings.md")
    why = "simulates in float what integer kernels would compute: never faster than FP32"
    yield Candidate("backend=torch_pt2e", SLOW, why, "docs/settings.md")


def _executorch(network: Summary | None) -> Iterator[Candidate]:
    rest = _in_float("executorch", network)
    why = f"XNNPACK's kernels take s8 activations; runs on phones too{rest}"
    settings = "backend=executorch dtype=int8 per_channel=true"
    yield Candidate(settings, TRY, why, "measured elsewhere: studies/frameworks.md")


def _openvino(flags: Collection[str], network: Summary | None) -> Iterator[Candidate]:
    settings = "backend=openvino dtype=int8 per_channel=true"
    if _saturates("int8", flags):
        settings += " reduce_range=true"
    fast = f"{_beyond_x86(flags)}: " if not is_x86(flags) else ""
    why = f"{fast}its integer kernels take s8 weights (extra openvino)"
    source = "measured elsewhere: studies/frameworks.md"
    yield Candidate(settings, TRY, f"{why}{_in_float('openvino', network)}", source)
    nncf = "NNCF's own quantizer, a reference for backend=openvino (extra nncf)"
    yield Candidate("backend=openvino_nncf dtype=int8 per_channel=true", TRY, nncf, source)
    yield Candidate("backend=openvino dtype=uint8", CANNOT, "u8 weights run in float", source)


def _tflite(network: Summary | None) -> Iterator[Candidate]:
    if network is not None and "tflite" not in network.quantized:
        why = "takes networks of one input of float32"
        yield Candidate("backend=tflite", CANNOT, why, "docs/quantization.md")
        return
    why = f"XNNPACK's kernels take s8 activations{_in_float('tflite', network)}"
    if network is None or not network.by_tensorflow:
        others = "" if network else "networks other than Keras files and SavedModels are "
        why += f"; {others}converted by onnx2tf, installed once (660 MB; Python 3.12 or 3.13)"
    source = "TensorFlow's quantization spec"
    yield Candidate("backend=tflite dtype=int8 per_channel=true", TRY, why, source)


def _per_tensor(network: Summary | None) -> Iterator[Candidate]:
    if network is not None and network.depthwise:
        why = (
            f"{network.depthwise} convolutions in groups (depthwise): channels of very different "
            "ranges share a scale; per_channel=true gives each its own"
        )
        yield Candidate("per_channel=false", WRONG, why, "Krishnamoorthi 2018, arXiv:1806.08342")


def _saturates(dtype: str, flags: Collection[str]) -> bool:
    activations, weights = DTYPES[dtype]
    return saturates(Resolved(weights, activations, "integer", 8, file_format="QDQ"), (), flags)


def _beyond_x86(flags: Collection[str]) -> str:
    if not is_arm(flags):
        return "nothing is known of this CPU's kernels: measure"
    if "asimddp" in flags:
        return "ARM's dot product sums four products in one exact 32-bit sum"
    return "ARM without dot product widens to 16 bits first: exact, and less is gained"


def _in_float(backend: str, network: Summary | None) -> str:
    """Return the operators that stay in float, by their names, as text."""
    left = [
        f"{name} {count}"
        for name, count in (network.operators.items() if network else ())
        if network and network.treatment(name, backend) == "float"
    ]
    return f"; in float between conversions: {', '.join(left)}" if left else ""


def describe_cpu(name: str, flags: Collection[str]) -> str:
    """Return the CPU and its relevant features in one line."""
    if is_arm(flags):
        return f"{name}: ARM, {'dot product' if 'asimddp' in flags else 'no dot product'}"
    if not is_x86(flags):
        return f"{name}: no flags that say what it can"
    wide = [kind for flag, kind in _WIDTHS.items() if flag in flags] or ["SSE2"]
    vnni = "VNNI" if not VNNI.isdisjoint(flags) else "no VNNI"
    return f"{name}: {', '.join([*wide, vnni, *(['AMX'] if 'amx_int8' in flags else [])])}"


_WIDTHS = {"avx2": "AVX2", "avx512bw": "AVX512"}
