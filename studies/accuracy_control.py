"""NNCF's quantization with accuracy control: `python -m studies.accuracy_control FILE.xml ...`.

    python -m studies.accuracy_control FILE.xml data=cifar10 seed=42

Other arguments are settings of `resnet8ptq run`. The calibration samples and the selection samples
are those of a sweep with these settings; `max_drop` is 0.01, NNCF's default. NNCF compares hits:
against the labels, or without labels against FP32's classes. Tasks without hits are refused. A
network with attention gets NNCF's scheme for transformers. Needs the extra `nncf`.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hydra import compose, initialize_config_dir

from benchmarks.setting import REPO
from resnet8ptq.backends.openvino.library import library, read_graph
from resnet8ptq.config import loading
from resnet8ptq.core.records import feed
from resnet8ptq.experiment import samples
from resnet8ptq.experiment.network_and_data import load_data_and_network
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.graph.attention import find_attention

MAX_DROP = 0.01


def quantize(words: list[str], path: Path) -> None:
    """Write OpenVINO's files of the network."""
    openvino = library()  # before NNCF: disables the telemetry of both
    import nncf

    loading.register_schemas()
    with initialize_config_dir(str(REPO / "conf"), version_base=None):
        asked = [*words, "backend=openvino", "evaluate.split=choice"]
        settings = resolve(loading.parse_config(compose("config", overrides=asked)))
    data, fp32 = load_data_and_network(settings)
    drawn = samples.draw(settings.config, data, tunes=False, check=lambda split: None)
    selection, calibrating, graph = (
        drawn.reported,
        drawn.calibrating.split,
        read_graph(fp32.onnx_path),
    )
    names = [value.get_any_name() for value in graph.inputs]

    def classify(model: Any, numbers: Iterable[int]) -> list[int]:
        inputs = (feed(selection.inputs(np.array([number])), names) for number in numbers)
        return [int(np.argmax(model(one)[0])) for one in inputs]

    classes = selection.labels
    if classes is None:
        compiled = openvino.Core().compile_model(graph, "CPU")
        classes = np.array(classify(compiled, range(len(selection))))

    def validate(model: Any, numbers: Iterable[int]) -> tuple[float, list[float]]:
        chosen = list(numbers)
        hits = np.array(classify(model, chosen)) == classes[chosen]
        return float(hits.mean()), hits.astype(float).tolist()

    attends = find_attention(onnx.load(fp32.onnx_path).graph)
    quantized = nncf.quantize_with_accuracy_control(
        graph,
        nncf.Dataset(
            range(len(calibrating)), lambda n: feed(calibrating.inputs(np.array([n])), names)
        ),
        nncf.Dataset(range(len(selection))),
        validate,
        max_drop=MAX_DROP,
        model_type=nncf.ModelType.TRANSFORMER if attends else None,
        subset_size=len(calibrating),
    )
    openvino.save_model(quantized, path, compress_to_fp16=False)


if __name__ == "__main__":
    quantize(sys.argv[2:], Path(sys.argv[1]))
