"""Advice on TensorFlow Lite; see `backends.advice`."""

from collections.abc import Collection, Iterator

from resnet8ptq.backends.advice import CANNOT, TRY, Advice, granularity, in_float
from resnet8ptq.models.summary import Summary


def sweep(flags: Collection[str], network: Summary | None) -> str | None:
    """Return the settings of a sweep; None if no flow supports the network."""
    if not _takes(network):
        return None
    return f"dtype=int8 {granularity(network)}"


def advise(flags: Collection[str], network: Summary | None) -> Iterator[Advice]:
    """Yield TensorFlow Lite's 8-bit configuration, or the reason why it does not apply."""
    if not _takes(network):
        why = "takes networks of one input of float32"
        yield Advice("backend=tflite", CANNOT, why, "docs/quantization.md")
        return
    why = f"XNNPACK's kernels take s8 activations{in_float('tflite', network)}"
    if network is None or "tflite" not in network.converted:
        others = "" if network else "networks other than Keras files and SavedModels are "
        why += f"; {others}converted by onnx2tf, installed once (660 MB; Python 3.12 or 3.13)"
    source = "TensorFlow's quantization spec"
    yield Advice("backend=tflite dtype=int8 per_channel=true", TRY, why, source)


def _takes(network: Summary | None) -> bool:
    return network is None or "tflite" in network.quantized
