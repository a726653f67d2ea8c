"""A float TFLite file as the source of the FP32 network."""

from pathlib import Path

from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.core.records import feed
from resnet8ptq.models.batch_axis import Outputs, in_full_batches
from resnet8ptq.models.contract import SampleArray
from resnet8ptq.models.gates import onnx as onnx_gate
from resnet8ptq.models.gates import tflite as gate
from resnet8ptq.models.normalization import OPSET
from resnet8ptq.models.sources.contract import Network, Sample, prepare_tensorflow
from resnet8ptq.models.sources.onnx import to_supported


def read(source: Path, sample: Sample) -> Network:
    """Read a TFLite file; the original runs in LiteRT, in batches of the size in the file.

    Free sizes are set to those of the samples.

    Raises:
        ModelError: see `gates.tflite.check`, `gates.onnx.check_graph` and `to_supported`; or LiteRT
            cannot run the file.
    """
    prepare_tensorflow()
    import tf2onnx
    from ai_edge_litert.interpreter import Interpreter

    from resnet8ptq.models import tensorflow_ops  # noqa: F401  tf2onnx lacks them

    gate.check(source)
    proto, _ = tf2onnx.convert.from_tflite(str(source), opset=OPSET)
    onnx_gate.check_graph(proto, source)
    supported = to_supported(proto, source, sample)

    # Open the original, which the graph must agree with
    with errors_as(ModelError, f"{source}: LiteRT cannot run it"):
        interpreter = Interpreter(str(source), num_threads=1)
        inputs = {}  # index of the tensor, by name
        shapes: dict[str, tuple[int, ...]] = {}
        has_free_sizes = False
        for detail in interpreter.get_input_details():
            inputs[detail["name"]] = detail["index"]
            shapes[detail["name"]] = tuple(detail["shape"])
            has_free_sizes = has_free_sizes or -1 in detail["shape_signature"]
        batch = int(next(iter(shapes.values()))[0])
        # The file has a 1 for each free size, which may be too small for the network
        if has_free_sizes:
            shapes = {}  # nothing is allocated yet
        else:
            interpreter.allocate_tensors()
    outputs = interpreter.get_output_details()

    def predict(samples: SampleArray) -> Outputs:
        fed = feed(samples, list(inputs))
        needed = {name: values.shape for name, values in fed.items()}
        if needed != shapes:
            for name, shape in needed.items():
                interpreter.resize_tensor_input(inputs[name], shape, strict=True)
            interpreter.allocate_tensors()
            shapes.update(needed)
        for name, values in fed.items():
            interpreter.set_tensor(inputs[name], values)
        interpreter.invoke()
        return [interpreter.get_tensor(output["index"]) for output in outputs]

    return Network(supported, in_full_batches(predict, batch), OPSET)
