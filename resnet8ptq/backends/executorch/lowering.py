"""Lowers a torch network to an ExecuTorch program (.pte) for XNNPACK."""

from typing import Any

import torch

from resnet8ptq.backends.executorch import BACKEND
from resnet8ptq.backends.torch.program import export
from resnet8ptq.backends.torch.torchscript import Example
from resnet8ptq.core import invocation
from resnet8ptq.core.console import silenced, waiting
from resnet8ptq.core.errors import UnsupportedError, errors_as

# The messages for users, by a part of ExecuTorch's message.
_REFUSED = {
    "should both be quantized": (
        "backend=executorch: XNNPACK refuses a layer in float after one in 8 bits, such as a "
        "transposed convolution along one axis; try backend=onnx"
    ),
    "quantized_decomposed::dequantize_per_channel": (
        "per_channel=true: XNNPACK has no kernel for a layer of the network, such as a convolution "
        "with three axes, or one before a Clip with one bound; try backend=onnx"
    ),
}


def check_installed() -> None:
    """Raise `UnsupportedError` if the extra `executorch` is not installed."""
    if not BACKEND.is_installed:
        mend = invocation.install("executorch")
        raise UnsupportedError(f"backend=executorch: ExecuTorch is not installed; try {mend}")


def lower(module: Any, example: Example, most: int) -> bytes:
    """Return a .pte file's content; XNNPACK runs the operators that `_make_partitioner` chooses.

    `module` first runs once on the example; errors of this run pass unchanged.

    Args:
        most: the largest batch, for which the runtime plans its memory; 15 replaces 16.

    Raises:
        UnsupportedError: torch cannot export the network, or ExecuTorch cannot lower it. For
            example, XNNPACK lacks the kernel of a layer with a scale for each channel.
    """
    with torch.inference_mode():
        module(*example.inputs)
    why = "backend=executorch: ExecuTorch cannot lower the network"
    with errors_as(UnsupportedError, why, "try backend=onnx"), silenced():
        from executorch.exir import to_edge_transform_and_lower

        # To choose a convolution's kernel, torch tests whether the batch has 16 samples, even while
        # it traces. With 16 as the largest batch, the program would take only batches of 16.
        if most == 16:
            most = 15
        program = export(module, example, most)
        with waiting(f"Lowering a graph of {len(program.graph.nodes)} nodes to XNNPACK"):
            try:
                lowered = to_edge_transform_and_lower(
                    program, [_copy_dequantized], [_make_partitioner()]
                )
                return bytes(lowered.to_executorch().buffer)
            except RuntimeError as error:
                for text, reason in _REFUSED.items():
                    if text in str(error):
                        raise UnsupportedError(reason) from None
                raise


def _copy_dequantized(module: Any) -> Any:
    """Give each user of a dequantized tensor its own copy, as a pass over the program's graph.

    When XNNPACK changes the layout of a shared tensor for one user, the tensor changes for the
    others too.
    """
    from torch.fx.passes.infra.pass_base import PassResult

    for node in list(module.graph.nodes):
        if "dequantize" not in str(node.target):
            continue
        for user in list(node.users)[1:]:
            with module.graph.inserting_after(node):
                user.replace_input_with(node, module.graph.node_copy(node))
    module.recompile()
    return PassResult(module, True)


def _make_partitioner() -> Any:
    """Return a partitioner that keeps two patterns from XNNPACK, which handles them wrongly.

    The first is a Concat of 8-bit tensors with several scales: XNNPACK needs one scale, which its
    own partitioner does not check. The second is a Pad with 8 bits on one side only: XNNPACK rounds
    the output of a Pad of an 8-bit tensor, even if the program keeps that output in float.

    The function also mends ExecuTorch's softmax, for the whole process.
    """
    from executorch.backends.xnnpack._passes.channels_last_tagged_reshape_pass import (
        ChannelsLastTaggedReshapePass,
    )
    from executorch.backends.xnnpack.partition.config import (
        ALL_PARTITIONER_CONFIGS,
        CatConfig,
        ConstantPadConfig,
    )
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir.dialects._ops import ops as exir_ops

    class OneScaleCat(CatConfig):  # type: ignore[misc]
        def check_constraints(self, node: Any, ep: Any) -> bool:
            around = [*node.args[0], *node.users]
            grids = []
            for other in around:
                if "quantize_per_tensor" in str(other.target):
                    grids.append(other.args[1:3])  # scale and zero point
            if grids and grids != [grids[0]] * len(around):
                return False
            return bool(super().check_constraints(node, ep))

    class SameTypePad(ConstantPadConfig):  # type: ignore[misc]
        def check_constraints(self, node: Any, ep: Any) -> bool:
            reads_levels = "dequantize" in str(node.args[0].target)
            gives_levels = any("quantize_per_tensor" in str(user.target) for user in node.users)
            if reads_levels != gives_levels:
                return False
            return bool(super().check_constraints(node, ep))

    # XNNPACK's softmax runs over the last axis. After a convolution, XNNPACK's last axis is the
    # program's channel axis.
    ChannelsLastTaggedReshapePass.memory_sensitive_ops_nchw.add(exir_ops.edge.aten._softmax.default)
    own = {CatConfig: OneScaleCat, ConstantPadConfig: SameTypePad}
    return XnnpackPartitioner(configs=[own.get(kind, kind) for kind in ALL_PARTITIONER_CONFIGS])
