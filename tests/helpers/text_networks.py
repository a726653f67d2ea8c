"""Networks of token ids and a mask, small enough to read."""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from resnet8ptq.data.dataset import Dataset

MASKED = """
    wide = Unsqueeze(attention_mask, two)
    counted = Cast<to = 1>(wide)
    kept = Mul(rows, counted)
    sums = ReduceSum<keepdims = 0>(kept, one)
    logits = MatMul(sums, weights)
"""


def write(
    path: Path,
    nodes: str,
    words: int,
    *,
    width: int = 4,
    classes: int = 3,
    ids: str = "ids",
    mask: str = "int64[N, L] mask",
    **constants: NDArray[np.float32],
) -> Path:
    """Write a network that sums the rows of its words.

    Args:
        nodes: from `rows`, those of the words, to `logits`; they may take `weights`, `one`, `two`.
        words: rows of the table.
        width: of a row.
        classes: number of logits.
        ids, mask: name and declaration of its inputs.
        constants: in the place of random ones.
    """
    proto = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (int64[N, L] {ids}, {mask}) => (float[N, {classes}] logits) {{
            rows = Gather(table, {ids})
            {nodes}
        }}""")
    for index, node in enumerate(proto.graph.node):
        node.name = f"node{index}"
    random = np.random.default_rng(0)
    constants = {
        "table": random.normal(size=(words, width)).astype(np.float32),
        "weights": random.normal(size=(width, classes)).astype(np.float32),
        "one": np.array([1]),
        "two": np.array([2]),
        **constants,
    }
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    onnx.save(proto, path)
    return path


def write_bag_of_words(path: Path, data: Dataset) -> Path:
    """Write a network that adds what each word of a text says of its class, by naive Bayes."""
    ids, classes = data.train.stored[:]["input_ids"], len(data.class_names)
    counts = np.ones((ids.max() + 1, classes))
    np.add.at(counts, (ids, data.train.labels[:, None]), 1)
    table = np.log(counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
    constants = {"table": table, "weights": np.eye(classes, dtype=np.float32)}
    names = {"ids": "input_ids", "mask": "int64[N, L] attention_mask"}
    return write(path, MASKED, len(table), classes=classes, **names, **constants)
