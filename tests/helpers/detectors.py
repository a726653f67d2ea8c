"""Pictures of coloured squares with boxes in COCO's format, and networks that find them.

The pictures have a grid of cells of 16 pixels, of which some are red, green or blue: a convolution
over each cell tells which. So every head can be made from the same two layers.
"""

import json
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.data.boxes import pack
from resnet8ptq.data.sources import coco
from tests.helpers.assembling import assemble

CELL, CELLS = 16, 4  # pixels, along a side
SIZE = CELL * CELLS
STEPS = PreprocessConfig(size=SIZE, resize="letterbox", align="top_left")
NAMES = ("red", "green", "blue")
IDS = (3, 7, 20)  # with gaps
HEADS = ("yolox", "yolov3", "yolov5", "yolov8", "ssd", "selected", "detections", "rows")
CORNERS = (0, 0, CELL, CELL)  # the two keypoints of a square: x and y from its left top


def boxes_and_scores(random: np.random.Generator) -> onnx.ModelProto:
    """Return a network that joins boxes in pixels with scores from 0 to 1; takes x [N, 8, 3]."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["boxes"], name="boxes"),
        helper.make_node("MatMul", ["x", "v"], ["logits"], name="logits"),
        helper.make_node("Sigmoid", ["logits"], ["scores"], name="scores"),
        helper.make_node("Concat", ["boxes", "scores"], ["y"], name="joined", axis=2),
    ]
    constants = {
        "w": 40 * random.normal(size=(3, 4)).astype(np.float32),
        "v": random.normal(size=(3, 2)).astype(np.float32),
    }
    return assemble(nodes, {"x": ["N", 8, 3]}, {"y": ["N", 8, 6]}, constants)


def write_pictures(
    folder: Path,
    count: int = 24,
    seed: int = 0,
    squares: int = 3,
    keypoints: bool = False,
    masks: bool = False,
) -> Path:
    """Write pictures into `folder`/images and their boxes into a file, which is returned.

    The first picture is empty, and the second has a crowd. Every other one lies on its side: half
    as high as it is wide. With `keypoints` every square has `CORNERS`, of which some are not
    labelled. With `masks` every square lacks its last quarter, and the crowd is run lengths.
    """
    random = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number in range(count):
        rows = CELLS // 2 if number % 2 else CELLS
        pixels = random.integers(0, 40, (rows * CELL, SIZE, 3), np.uint8)
        image_id, name = 10 * number + 5, f"{number}.png"
        width, height = SIZE, rows * CELL
        images.append({"id": image_id, "file_name": name, "width": width, "height": height})
        places = random.choice(rows * CELLS, squares, replace=False) if number else ()
        for turn, position in enumerate(places):
            row, column = divmod(int(position), CELLS)
            label = int(random.integers(len(NAMES)))
            box = [column * CELL, row * CELL, CELL, CELL]
            area = slice(box[1], box[1] + CELL), slice(box[0], box[0] + CELL)
            pixels[(*area, label)] = random.integers(150, 255)
            annotations.append(
                {
                    **{"id": len(annotations) + 1, "image_id": image_id, "bbox": box},
                    **{"category_id": IDS[label], "area": CELL * CELL},
                    "iscrowd": int(number == 1 and turn == 0),
                }
            )
            if masks:
                quarter = slice(box[1] + 8, box[1] + CELL), slice(box[0] + 8, box[0] + CELL)
                pixels[(*quarter, label)] = 0
                annotations[-1]["segmentation"] = _outline(
                    box, width, height, number == 1 == turn + 1
                )
                annotations[-1]["area"] = CELL * CELL * 3 // 4
            if keypoints:
                seen = (number + turn) % 4  # the fourth has none
                points = np.full((2, 3), 2)
                points[:, :2] = np.reshape(CORNERS, (2, 2)) + box[:2]
                points[seen:] = 0
                annotations[-1] |= {"keypoints": points.ravel().tolist()}
                annotations[-1] |= {"num_keypoints": min(seen, 2)}
        Image.fromarray(pixels).save(folder / "images" / name)
    categories = [{"id": i, "name": n} for i, n in zip(IDS, NAMES, strict=True)]
    path = folder / "instances.json"
    content = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(content))
    return path


def read_labels(folder: Path) -> NDArray[np.void]:
    """Return the annotations of all pictures in `folder`, as records of `data.boxes`."""
    annotations = coco.read_annotations(folder / "instances.json")
    placed = [coco.annotate(annotations, image_id, STEPS) for image_id in annotations.images]
    return pack(placed, annotations.keypoints)


def read_inputs(folder: Path) -> NDArray[np.float32]:
    """Return all pictures in `folder` as inputs of the network [n, 3, SIZE, SIZE]."""
    annotations = coco.read_annotations(folder / "instances.json")
    inputs = np.zeros((len(annotations.images), 3, SIZE, SIZE), np.float32)
    for picture, (name, _, _) in zip(inputs, annotations.images.values(), strict=True):
        pixels = np.asarray(Image.open(folder / "images" / name))
        picture[:, : len(pixels)] = pixels.transpose(2, 0, 1)
    return inputs


def _outline(box: list[int], width: int, height: int, crowd: bool) -> object:
    """Return a square without its last quarter as a polygon; that of a crowd as run lengths."""
    left, top, *_ = box
    if not crowd:
        right, bottom = left + CELL, top + CELL
        corners = (left, top, right, top, right, top + 8, left + 8, top + 8, left + 8, bottom)
        return [[*map(float, corners), float(left), float(bottom)]]
    mask = np.zeros((height, width), int)
    mask[top : top + CELL, left : left + CELL] = 1
    mask[top + 8 : top + CELL, left + 8 : left + CELL] = 0
    edges = np.flatnonzero(np.diff(mask.ravel(order="F"), prepend=0, append=0))
    runs = np.diff(edges, prepend=0, append=height * width)
    return {"size": [height, width], "counts": [int(run) for run in runs if run]}


def overrides(folder: Path, task: str = "detection") -> list[str]:
    """Return what a run of them is told, but for the network."""
    return [
        *("data=coco", f"data.images={folder / 'images'}", f"task={task}"),
        *(f"data.annotations={folder / 'instances.json'}", f"preprocess.size={SIZE}"),
        *("preprocess.resize=letterbox", "preprocess.align=top_left", "task.strides=[16]"),
    ]


def write_detector(
    path: Path,
    head: str,
    other_input: bool = False,
    keypoints: bool = False,
    masks: bool = False,
) -> Path:
    """Write a network [N, 3, 64, 64] of pixels 0..255 with that head, of two convolutions.

    Args:
        head: of `HEADS`; `rows` is `detections` in one output.
        other_input: boxes are multiplied by a second input, `image_shape`, and divided by 64.
        keypoints: `CORNERS` of each box follow, for yolov5 and yolov8.
        masks: the scores follow as coefficients of three maps of colours [3, 32, 32].
    """
    graph = _Graph()
    colours = np.zeros((3, 3, CELL, CELL), np.float32)
    colours[range(3), range(3)] = 1 / (300 * CELL**2)
    scores = graph.layer("images", np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1), 1)
    scores = graph.node("Relu", scores)
    scores = graph.layer(scores, colours, CELL, -0.15)  # of a square.s own colour 0.35 to 0.7
    if head == "yolov3":
        still = graph.layer(
            "images", np.zeros((5, 3, CELL, CELL), np.float32), CELL, [0, 0, 0, 0, 9]
        )
        return _write(graph, path, {"map": graph.node("Concat", still, scores, axis=1)})
    scores = graph.node("Clip", scores, graph.constant(0.0), graph.constant(1.0))
    if head == "yolox":
        still = graph.layer(
            "images", np.zeros((5, 3, CELL, CELL), np.float32), CELL, [0.5, 0.5, 0, 0, 1]
        )
        joined = graph.node("Concat", still, scores, axis=1)
        return _write(graph, path, {"output": graph.rows(joined, 8)})
    rows = graph.rows(scores, 3)  # [N, 16, 3]
    y, x = np.mgrid[:CELLS, :CELLS].reshape(2, -1) * float(CELL)
    written = {
        **dict.fromkeys(("yolov5", "yolov8"), (x + 8, y + 8, 0 * x + CELL, 0 * x + CELL)),
        **dict.fromkeys(("ssd", "detections", "rows"), (x, y, x + CELL, y + CELL)),
        "selected": (y, x, y + CELL, x + CELL),
    }[head]
    boxes = graph.constant(np.stack(written, axis=-1)[np.newaxis])
    if other_input:
        sizes = graph.node("Concat", "image_shape", "image_shape", axis=1)
        sizes = graph.node("Unsqueeze", sizes, graph.integers([1]))
        boxes = graph.node("Mul", boxes, graph.node("Div", sizes, graph.constant(64.0)))
    first = graph.node("Slice", rows, *map(graph.integers, ([0], [1], [2])))
    nothing = graph.node("Mul", first, graph.constant(0.0))
    boxes = graph.node("Add", boxes, nothing)  # one for each picture
    sure = graph.node("Add", nothing, graph.constant(1.0))
    corners = np.stack([x, y, 0 * x + 1, x + CELL, y + CELL, 0 * x + 1], axis=-1)
    points = graph.node("Add", graph.constant(corners[np.newaxis]), nothing)
    further = [points] if keypoints else [rows] if masks else []
    maps = {}
    if masks:
        means = np.eye(3, dtype=np.float32)[:, :, np.newaxis, np.newaxis] * np.full((2, 2), 0.25)
        maps["maps"] = graph.layer("images", means.astype(np.float32), 2, -80.0)
    if head == "yolov5":
        joined = graph.node("Concat", boxes, sure, rows, *further, axis=2)
        return _write(graph, path, {"output": joined, **maps})
    if head == "yolov8":
        joined = graph.node("Concat", boxes, rows, *further, axis=2)
        turned = graph.node("Transpose", joined, perm=[0, 2, 1])
        return _write(graph, path, {"output": turned, **maps})
    if head == "ssd":
        return _write(graph, path, {"scores": rows, "boxes": boxes})
    by_class = graph.node("Transpose", rows, perm=[0, 2, 1])
    limits = graph.integers([10]), graph.constant([0.5]), graph.constant([0.1])
    chosen = graph.node("NonMaxSuppression", boxes, by_class, *limits)
    outputs = {"boxes": boxes, "scores": by_class, "indices": chosen}
    if head == "selected":
        return _write(graph, path, outputs, other_input)
    label, box = (graph.column(chosen, position) for position in (1, 2))
    result = graph.node("Gather", graph.node("Squeeze", boxes, graph.integers([0])), box, axis=0)
    pairs = graph.node("Concat", box, label, axis=0)
    pairs = graph.node("Reshape", pairs, graph.integers([2, -1]))
    pairs = graph.node("Transpose", pairs, perm=[1, 0])
    flat = graph.node("Squeeze", rows, graph.integers([0]))
    values = graph.node("GatherND", flat, pairs)
    if head == "detections":
        return _write(graph, path, {"dets": result, "score": values, "labels": label}, other_input)
    columns = [values, graph.node("Cast", label, to=TensorProto.FLOAT)]
    columns = [graph.node("Unsqueeze", column, graph.integers([1])) for column in columns]
    joined = graph.node("Concat", result, *columns, axis=1)
    return _write(graph, path, {"rows": graph.node("Unsqueeze", joined, graph.integers([0]))})


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, values: object) -> str:
        self.constants.append(
            numpy_helper.from_array(np.array(values, np.float32), f"c{len(self.constants)}")
        )
        return self.constants[-1].name

    def integers(self, values: list[int]) -> str:
        self.constants.append(
            numpy_helper.from_array(np.array(values, np.int64), f"c{len(self.constants)}")
        )
        return self.constants[-1].name

    def node(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [f"{name}_out"], name, **attributes))
        return f"{name}_out"

    def layer(
        self, value: str, weights: NDArray[np.float32], stride: int, bias: object = 0.0
    ) -> str:
        biases = np.broadcast_to(np.array(bias, np.float32), len(weights))
        names = self.constant(weights), self.constant(biases)
        return self.node("Conv", value, *names, strides=[stride, stride])

    def rows(self, maps: str, values: int) -> str:
        """Return maps [N, values, 4, 4] as rows [N, 16, values]."""
        flat = self.node("Reshape", maps, self.integers([0, values, CELLS * CELLS]))
        return self.node("Transpose", flat, perm=[0, 2, 1])

    def column(self, rows: str, place: int) -> str:
        column = self.node("Gather", rows, self.integers([place]), axis=1)
        return self.node("Squeeze", column, self.integers([1]))


def _write(graph: _Graph, path: Path, outputs: dict[str, str], other_input: bool = False) -> Path:
    counted = any(node.op_type == "NonMaxSuppression" for node in graph.nodes)
    renamed = {made: name for name, made in outputs.items()}
    for node in graph.nodes:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    batch = 1 if counted else "N"
    inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, SIZE, SIZE])]
    if other_input:
        inputs.append(helper.make_tensor_value_info("image_shape", TensorProto.FLOAT, [batch, 2]))
    made = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name in ("indices", "labels") else TensorProto.FLOAT, None
        )
        for name in outputs
    ]
    proto = helper.make_model(
        helper.make_graph(graph.nodes, "detector", inputs, made, graph.constants),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    onnx.checker.check_model(inferred)
    onnx.save(inferred, path)
    return path
