"""COCO's evaluation of an ONNX file, with ONNX Runtime and without a run of this package."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.calibration.coco_reader import IMAGE_ID, CocoReader
from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.graph.session import open_session
from resnet8ptq.tasks.contract import Outputs
from resnet8ptq.tasks.detection import average_precision
from resnet8ptq.tasks.detection.decoding import Decoder, make_decoder
from resnet8ptq.tasks.detection.scores import DetectionScores


class CocoEvaluator:
    """Runs a detector over the pictures of readers, and scores those that it has run.

    >>> steps = PreprocessConfig(size=416, resize="letterbox", align="top_left", pad=114,
    ...                          channels="bgr")
    >>> reader = CocoReader("val2017", "images", steps, "instances_val2017.json",
    ...                     is_evaluation=True, batch_size=8)
    >>> evaluator = CocoEvaluator("yolox.onnx", reader)
    >>> evaluator.predict()
    >>> evaluator.evaluate(evaluator.get_result(), "instances_val2017.json")
    {'ap': 0.2635, 'ap50': 0.4235, ...}

    A part of the pictures at a time (`size_limit` and `start_index` of the reader) adds up:
    `predict(reader)` for each part, then `get_result` and `evaluate` once.
    """

    def __init__(
        self,
        model: str | Path,
        reader: CocoReader,
        config: DetectionConfig | None = None,
        threads: int = 0,
    ) -> None:
        """Load the model.

        Args:
            reader: of the first pictures, with annotations and `is_evaluation`.
            config: how boxes are decoded and chosen; None: as `task=detection` does by default.
            threads: of ONNX Runtime; 0: every core.
        """
        self.session = open_session(str(model), threads)
        self.reader = reader
        self.config = config or DetectionConfig()
        self._results: list[dict[str, Any]] = []
        self._run: set[int] = set()
        self._decoder: Decoder | None = None
        self._of_one: Sequence[int] = ()  # places of outputs that have no batch axis

    def predict(self, reader: CocoReader | None = None) -> None:
        """Run what is left of the pictures of a reader; detections are added to earlier ones.

        Args:
            reader: None: the first one.

        Raises:
            ModelError: no head fits the outputs.
            ValueError: the reader has no annotations, or a picture was run before.
        """
        reader = reader or self.reader
        if reader.annotations is None or reader.records is None or not reader.is_evaluation:
            raise ValueError("reader: takes one with annotations and is_evaluation=True")
        while (step := reader.get_next()) is not None:
            records = reader.records[step.pop(IMAGE_ID)]
            ids = set(records["image_id"].tolist())
            if self._run & ids:
                raise ValueError(f"picture {min(self._run & ids)} was run before")
            class_ids = reader.annotations.class_ids
            if self._decoder is None:
                self._decoder = self._find_decoder(step, reader.input_name, class_ids)
            detections = Outputs(self._decoder(self._run_on(step)))
            scores = DetectionScores(detections, records, class_ids, self.config.resamples)
            self._results += scores.results
            self._run |= ids

    def get_result(self) -> list[dict[str, Any]]:
        """Return the detections so far in COCO's results format."""
        return list(self._results)

    def evaluate(
        self, results: Sequence[Mapping[str, Any]], annotations: str | Path | Mapping[str, Any]
    ) -> dict[str, float]:
        """Return AP and its kin by name, of the pictures that were run and of no others.

        Args:
            results: what `get_result` returned, or a part of it.
            annotations: in COCO's format, or a file of them.
        """
        whole = annotations
        if not isinstance(whole, Mapping):
            whole = json.loads(Path(whole).read_bytes())
        scored = {
            "images": [each for each in whole["images"] if each["id"] in self._run],
            "annotations": [e for e in whole["annotations"] if e["image_id"] in self._run],
            "categories": whole["categories"],
        }
        return average_precision.evaluate(results, scored).metrics

    def _run_on(self, step: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs [n, ...]."""
        found = self.session.run(None, dict(step))
        return [each[np.newaxis] if n in self._of_one else each for n, each in enumerate(found)]

    def _find_decoder(
        self, step: Mapping[str, NDArray[Any]], input_name: str, class_ids: tuple[int, ...]
    ) -> Decoder:
        """Return the decoder, and note which outputs lack a batch axis: of a picture of nothing."""
        pictures = np.zeros_like(step[input_name])
        blank = {**step, input_name: pictures}
        if len(pictures) == 1:
            found = self.session.run(None, blank)
            self._of_one = [n for n, each in enumerate(found) if each.shape[:1] != (1,)]
        names = [output.name for output in self.session.get_outputs()]
        shapes = [each.shape[1:] for each in self._run_on(blank)]
        outputs = dict(zip(names, shapes, strict=True))
        return make_decoder(self.config, pictures.shape[1:], outputs, class_ids)
