"""Non-maximum suppression of the boxes of each class, by ONNX Runtime."""

from functools import cache

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.tasks.detection.heads import Candidates, Detections


def suppress(candidates: Candidates, config: DetectionConfig) -> Detections:
    """Drop each box that overlaps a kept box of its class whose score is at least as high.

    ONNX Runtime's NonMaxSuppression computes this. Boxes overlap if their IoU is above
    `iou_threshold`. The result has only boxes above `score_threshold`, at most `max_detections` of
    each class in a picture.
    """
    scores = np.ascontiguousarray(candidates.scores.swapaxes(1, 2))
    run = _suppression(config.max_detections, config.iou_threshold, config.score_threshold)
    boxes = np.ascontiguousarray(candidates.boxes[..., :4])
    [selected] = run.run(None, {"boxes": boxes, "scores": scores})
    picture, label, box = selected.T
    return Detections(picture, candidates.boxes[picture, box], scores[picture, label, box], label)


@cache
def _suppression(most: int, iou: float, score: float) -> onnxruntime.InferenceSession:
    """Return a session of NonMaxSuppression; the two corners of a box may be in either order."""
    boxes = helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [None, None, 4])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, None, None])
    selected = helper.make_tensor_value_info("selected", TensorProto.INT64, [None, 3])

    # The settings are constants of the graph, so each combination has a session
    constants = [
        helper.make_tensor("most", TensorProto.INT64, [1], [most]),
        helper.make_tensor("iou", TensorProto.FLOAT, [1], [iou]),
        helper.make_tensor("score", TensorProto.FLOAT, [1], [score]),
    ]
    names = ["boxes", "scores", "most", "iou", "score"]
    node = helper.make_node("NonMaxSuppression", names, ["selected"])
    graph = helper.make_graph([node], "suppression", [boxes, scores], [selected], constants)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto)
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
