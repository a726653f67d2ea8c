"""Describes `backend=openvino_nncf`: NNCF's own quantizer, a reference for `backend=openvino`."""

from resnet8ptq.core.descriptor import Backend

BACKEND = Backend(
    name="openvino_nncf",
    rank=6,
    other_names=("nncf",),
    quantizer="resnet8ptq.backends.openvino_nncf.quantizer:NncfQuantizer",
    options="resnet8ptq.backends.openvino_nncf.options:NncfConfig",
    runtime="openvino",
    packages=("openvino", "nncf"),
    extra="nncf",
    has_ranges=False,  # NNCF calibrates
    suffixes=(".zip",),
    advice="resnet8ptq.backends.openvino_nncf.advice",
    example="resnet8ptq.backends.openvino",
    serving="resnet8ptq.backends.openvino.serving",
)
