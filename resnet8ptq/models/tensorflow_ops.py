"""Operators that tf2onnx lacks; importing this module adds them to its table.

tf2onnx calls the handler of a node with its graph, `ctx`.
"""

import math
from typing import Any

import numpy as np
from tf2onnx.handler import tf_op


class _Writer:
    """Writes nodes with the shape and dtype of the node that they replace."""

    def __init__(self, ctx: Any, node: Any) -> None:
        [output] = node.output
        self.ctx = ctx
        self.name = node.name
        self.output = output
        self.like = {"shapes": [ctx.get_shape(output)], "dtypes": [ctx.get_dtype(output)]}
        ctx.remove_node(node.name)

    def write(self, kind: str, *inputs: str | float, last: bool = False) -> str:
        """Write a node, and return the name of its output.

        Args:
            last: whether the output gets the name of the replaced node's output.
        """
        settings = dict(self.like)
        if last:
            settings["outputs"] = [self.output]
        node = self.ctx.make_node(kind, list(map(self._name, inputs)), **settings)
        return str(node.output[0])

    def _name(self, value: str | float) -> str:
        """Return a name as it is, or the name of a new constant for a number."""
        if isinstance(value, str):
            return value
        name = f"{self.name}__{value:.9g}"
        return str(self.ctx.make_const(name, np.array(value, np.float32)).output[0])


@tf_op("Erfc")
class Erfc:
    """Converts Erfc, 1 - erf(x); Keras's exact GELU is x / 2 * erfc(-x / sqrt(2))."""

    @classmethod
    def version_9(cls, ctx: Any, node: Any, **_: Any) -> None:
        """Write Erf and Sub."""
        [values] = node.input
        graph = _Writer(ctx, node)
        graph.write("Sub", 1.0, graph.write("Erf", values), last=True)


@tf_op("Expm1")
class Expm1:
    """Converts Expm1, exp(x) - 1, which Keras's CELU uses."""

    @classmethod
    def version_7(cls, ctx: Any, node: Any, **_: Any) -> None:
        """Write Exp and Sub."""
        [values] = node.input
        graph = _Writer(ctx, node)
        graph.write("Sub", graph.write("Exp", values), 1.0, last=True)


@tf_op("TFL_GELU")
class Gelu:
    """Converts TFLite's GELU, x / 2 * (1 + erf(x / sqrt(2))) or its approximation by tanh.

    Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016.
    """

    @classmethod
    def version_9(cls, ctx: Any, node: Any, **_: Any) -> None:
        """Write Erf or Tanh, and the arithmetic around it."""
        [values] = node.input
        approximate = node.get_attr_value("approximate", False)
        graph = _Writer(ctx, node)
        if approximate:
            cubes = graph.write("Mul", graph.write("Mul", values, values), values)
            bent = graph.write("Add", values, graph.write("Mul", cubes, 0.044715))
            curve = graph.write("Tanh", graph.write("Mul", bent, math.sqrt(2 / math.pi)))
        else:
            curve = graph.write("Erf", graph.write("Mul", values, math.sqrt(0.5)))
        half = graph.write("Mul", values, 0.5)
        graph.write("Mul", half, graph.write("Add", curve, 1.0), last=True)
