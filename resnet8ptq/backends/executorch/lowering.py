"""Lowers a torch network to an ExecuTorch program (.pte) whose operators XNNPACK runs."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from resnet8ptq.backends.torch.program import export
from resnet8ptq.backends.torch.torchscript import Example
from resnet8ptq.core import invocation
from resnet8ptq.core.errors import QuantizationError, UnsupportedError, errors_as

_FLOAT_LAYER = (
    "a layer in float behind one in 8 bits: XNNPACK's partitioner refuses it; expected networks "
    "without nodes_to_exclude and without 32 bits in precision.plan"
)


def check_installed() -> None:
    """Raise `UnsupportedError` without the extra `executorch`."""
    if find_spec("executorch") is None:
        mend = invocation.install("executorch")
        raise UnsupportedError(f"backend=executorch: ExecuTorch is not installed; try {mend}")


def lower(module: Any, example: Example, most: int) -> bytes:
    """Return the content of a .pte file; XNNPACK gets the operators that it supports.

    Args:
        example: the inputs for tracing.
        most: the largest batch; the runtime plans its memory for it and refuses larger ones.

    Raises:
        UnsupportedError: a float layer takes an 8-bit input.
        QuantizationError: torch cannot export the network, or ExecuTorch cannot lower it.
    """
    with errors_as(QuantizationError, "backend=executorch: cannot lower the network"), silenced():
        from executorch.exir import to_edge_transform_and_lower

        # Even in a trace, torch chooses a kernel of its own for a convolution, and asks whether the
        # batch has 16 samples: 16 as the largest batch would be the only one.
        program = export(module, example, 15 if most == 16 else most)
        try:
            lowered = to_edge_transform_and_lower(program, partitioner=[_make_partitioner()])
        except RuntimeError as error:
            if "should both be quantized" in str(error):
                raise UnsupportedError(_FLOAT_LAYER) from None
            raise
        return bytes(lowered.to_executorch().buffer)


def _make_partitioner() -> Any:
    """Return XNNPACK's partitioner, which leaves out the Concats that XNNPACK cannot load.

    XNNPACK concatenates 8-bit tensors of one scale only; its partitioner does not compare scales.
    """
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS, CatConfig
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    class OneScaleCat(CatConfig):  # type: ignore[misc]
        def check_constraints(self, node: Any, ep: Any) -> bool:
            around = [*node.args[0], *node.users]
            grids = [n.args[1:3] for n in around if "quantize_per_tensor" in str(n.target)]
            one = not grids or (len(grids) == len(around) and grids.count(grids[0]) == len(grids))
            return one and bool(super().check_constraints(node, ep))

    kept = (config for config in ALL_PARTITIONER_CONFIGS if config is not CatConfig)
    return XnnpackPartitioner(configs=[*kept, OneScaleCat])


@contextmanager
def silenced() -> Iterator[None]:
    """Silence ExecuTorch's and torchao's warnings about other processors and their own calls."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
