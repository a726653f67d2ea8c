"""Networks of token ids and a mask, small enough to read."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser


def write(
    path: Path,
    nodes: str,
    words: int,
    *,
    width: int = 4,
    ids: str = "ids",
    mask: str = "int64[N, L] mask",
) -> Path:
    """Write a network that sums the rows of its words.

    Args:
        nodes: from `rows`, those of the words, to `logits`; they may take `weights`, `one`, `two`.
        words: rows of the table.
        width: of a row.
        ids, mask: name and declaration of its inputs.
    """
    proto = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (int64[N, L] {ids}, {mask}) => (float[N, 3] logits) {{
            rows = Gather(table, {ids})
            {nodes}
        }}""")
    for index, node in enumerate(proto.graph.node):
        node.name = f"node{index}"
    random = np.random.default_rng(0)
    constants = {
        "table": random.normal(size=(words, width)).astype(np.float32),
        "weights": random.normal(size=(width, 3)).astype(np.float32),
        "one": np.array([1]),
        "two": np.array([2]),
    }
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    onnx.save(proto, path)
    return path
