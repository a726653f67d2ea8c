"""COCO's evaluation of an ONNX file in ONNX Runtime, outside any run of this package."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.calibration.coco_reader import IMAGE_ID, CocoReader
from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.graph.session import open_session
from resnet8ptq.tasks.detection import average_precision
from resnet8ptq.tasks.detection.decoding import Decoder, make_decoder
from resnet8ptq.tasks.detection.scores import DetectionScores
from resnet8ptq.tasks.scoring.outputs import Outputs


class CocoEvaluator:
    """Runs a detector over the pictures of its readers, and scores it on these pictures.

    >>> steps = PreprocessConfig(size=416, resize="letterbox", align="top_left", pad=114,
    ...                          channels="bgr")
    >>> reader = CocoReader("val2017", "images", steps, "instances_val2017.json",
    ...                     is_evaluation=True, batch_size=8)
    >>> evaluator = CocoEvaluator("yolox.onnx", reader)
    >>> evaluator.predict()
    >>> evaluator.evaluate(evaluator.get_result(), "instances_val2017.json")
    {'ap': 0.2635, 'ap50': 0.4235, ...}

    To score in parts (`size_limit` and `start_index` of the reader), call `predict(reader)` for
    each part, then `get_result` and `evaluate` once.
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
            reader: the reader of the first pictures; it needs annotations and `is_evaluation`.
            config: settings of decoding and suppression; None for the defaults of `task=detection`.
            threads: threads of ONNX Runtime; 0 for every core.
        """
        self.session = open_session(str(model), threads)
        self.reader = reader
        self.config = config or DetectionConfig()
        self._results: list[dict[str, Any]] = []
        self._run: set[int] = set()
        self._decoder: Decoder | None = None
        self._unbatched: Sequence[int] = ()  # indices of outputs without a batch axis

    def predict(self, reader: CocoReader | None = None) -> None:
        """Run the remaining pictures of a reader, and add the detections to earlier ones.

        Args:
            reader: None for the reader of the first pictures.

        Raises:
            ConfigError: `head` in the settings is unknown.
            DataError: see `CocoReader.get_next`.
            ModelError: no single head fits the outputs.
            ValueError: the reader lacks annotations or `is_evaluation`, or a picture was run
                before.
        """
        reader = reader or self.reader
        if reader.annotations is None or reader.records is None or not reader.is_evaluation:
            raise ValueError("reader: expected annotations and is_evaluation=True")

        # Run and decode batch by batch, so that only detections stay in memory
        class_ids = reader.annotations.class_ids
        for step in iter(reader.get_next, None):
            records = reader.records[step.pop(IMAGE_ID)]
            ids = set(records["image_id"].tolist())
            repeated = self._run & ids
            if repeated:
                raise ValueError(f"picture {min(repeated)} was run before")
            if self._decoder is None:  # the first batch shows the shapes of the outputs
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
        """Return AP, AP50 and COCO's other metrics by name, on the pictures that were run.

        Args:
            results: the results of `get_result`, or a part of them.
            annotations: annotations in COCO's format, or the path of their file.

        Raises:
            OSError: the file cannot be read.
            KeyError: the annotations lack images, annotations or categories.
            ValueError: the file is not JSON; or a result belongs to a picture that was not run,
                or is not in `annotations`.
        """
        whole = annotations
        if not isinstance(whole, Mapping):
            whole = json.loads(Path(whole).read_bytes())

        # Leave out the pictures that were not run
        images = [image for image in whole["images"] if image["id"] in self._run]
        boxes = [box for box in whole["annotations"] if box["image_id"] in self._run]
        scored = {"images": images, "annotations": boxes, "categories": whole["categories"]}
        return average_precision.evaluate(results, scored).metrics

    def _run_on(self, step: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs [n, ...], with a batch axis added where the network has none."""
        outputs: list[NDArray[Any]] = self.session.run(None, dict(step))
        for index in self._unbatched:
            outputs[index] = outputs[index][np.newaxis]
        return outputs

    def _find_decoder(
        self, step: Mapping[str, NDArray[Any]], input_name: str, class_ids: tuple[int, ...]
    ) -> Decoder:
        """Run blank pictures to find the decoder, and to note the outputs without a batch axis.

        In a batch of several pictures, all outputs count as having a batch axis.
        """
        pictures = np.zeros_like(step[input_name])
        blank = {**step, input_name: pictures}
        if len(pictures) == 1:
            outputs = self.session.run(None, blank)
            self._unbatched = [n for n, values in enumerate(outputs) if values.shape[:1] != (1,)]
        shapes = {}
        for output, values in zip(self.session.get_outputs(), self._run_on(blank), strict=True):
            shapes[output.name] = values.shape[1:]
        return make_decoder(self.config, pictures.shape[1:], shapes, class_ids)
