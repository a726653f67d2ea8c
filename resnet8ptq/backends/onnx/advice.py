"""Advice on ONNX Runtime; see `backends.advice`."""

from collections.abc import Collection, Iterator

from resnet8ptq.backends.advice import (
    DOCS,
    FRAMEWORKS,
    MEASURED,
    OUT_OF_16_BITS,
    SLOW,
    TRIED,
    TRY,
    WRONG,
    Advice,
    beyond_x86,
    granularity,
    in_float,
    may_saturate,
)
from resnet8ptq.backends.contract import Resolved
from resnet8ptq.backends.kernels import saturates
from resnet8ptq.core.machine import is_x86
from resnet8ptq.models.summary import Summary


def sweep(flags: Collection[str], network: Summary | None) -> str | None:
    """Return the settings of a sweep for a CPU with these flags."""
    dtypes = "dtype=u8s8"
    if may_saturate("u8s8", flags):
        dtypes = "dtype=uint8,u8s8 reduce_range=true"
    elif not is_x86(flags):
        dtypes = "dtype=int8,u8s8"
    return f"{dtypes} {granularity(network)}"


def advise(flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    """Yield advice on static and dynamic quantization for a CPU with these flags."""
    yield from _static(flags, network)
    yield from _dynamic(flags, network)


def _static(flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    """Yield advice on the dtypes of static quantization."""
    rest = in_float("onnx", network)
    best = "backend=onnx per_channel=true"
    if not is_x86(flags):
        for dtype in ("int8", "u8s8"):
            yield Advice(f"{best} dtype={dtype}", TRY, f"{beyond_x86(flags)}{rest}", DOCS)
        return

    # x86: only VNNI sums u8s8 exactly
    if may_saturate("u8s8", flags):
        narrow = "weights of 7 bits keep the 16-bit sums of vpmaddubsw exact: the fast kernels"
        yield Advice(f"{best} dtype=u8s8 reduce_range=true", TRY, f"{narrow}{rest}", TRIED)
        wide = "products with unsigned weights are summed in 32 bits: exact, about FP32's speed"
        yield Advice(f"{best} dtype=uint8", TRY, f"{wide}{rest}", MEASURED)
        worst = f"{OUT_OF_16_BITS}; worst with symmetric.activations=true"
        yield Advice("backend=onnx dtype=u8s8,int8", WRONG, worst, TRIED)
    else:
        amx = "; AMX multiplies whole tiles of them" if "amx_int8" in flags else ""
        fast = f"VNNI multiplies u8 by s8, four products in one exact 32-bit sum{amx}"
        yield Advice(f"{best} dtype=u8s8", TRY, f"{fast}{rest}", DOCS)
    signed = (
        "the fast kernels take u8 activations: in QDQ format some s8 ones are converted, and "
        "the layers between stay in float; format=qoperator runs a plain loop"
    )
    yield Advice("backend=onnx dtype=int8 reduce_range=true", SLOW, signed, f"{DOCS}; {MEASURED}")


def _dynamic(flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    """Yield advice on dynamic quantization; an unknown network may have any layer."""
    operators = network.operators if network else {"Conv": 1, "Gemm": 1}
    settings = "backend=onnx method=dynamic"
    dynamic = Resolved(
        "int8",
        activation_dtype="uint8 (dynamic)",
        execution="integer",
        weight_bits=8,
        file_format="IntegerOps",
    )

    # Convolutions decide the speed, matrix products whether sums may saturate
    if "Conv" in operators:
        why = "ConvInteger has no fast kernel: 0.13 (int8) to 0.56 (uint8) of FP32's speed"
        yield Advice(settings, SLOW, why, FRAMEWORKS)
    else:
        why = "advised for networks of matrix products; nothing has to be calibrated"
        yield Advice(f"{settings} dtype=uint8", TRY, why, DOCS)
    if saturates(dynamic, operators, flags):
        why = f"MatMulInteger with s8 weights: {OUT_OF_16_BITS}"
        yield Advice(f"{settings} dtype=int8,u8s8", WRONG, why, TRIED)
