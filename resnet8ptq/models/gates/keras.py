"""Checks an untrusted Keras file against a list of allowed layers, functions and settings.

A config names classes and functions, which Keras looks up and calls with values from the file.
Keras's safe mode refuses only some of them. For example, it accepts
`keras.datasets.mnist.load_data`, which accesses the internet. The texts in a config may therefore
only be classes, functions, modules and words listed here, names, and einsum equations. Keras gets
a copy of the checked content, because two readers of one file may read different content.
"""

import io
import json
import re
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.models.gates import torch_archive

CONFIG = "config.json"
WEIGHTS = "model.weights.h5"
LEGACY_CONFIG = "model_config"  # the attribute of a .h5 file with the config
MAX_BYTES = 2**31 - 1  # most bytes of all weights, as for ONNX files
MAX_CONFIG_BYTES = 2**24
_HDF5 = b"\x89HDF\r\n\x1a\n"
_TRAINING = "compile_config"  # optimizer, loss and metrics, which are dropped

# None of these layers reads files, calls its arguments, or accesses the internet.
_LAYERS = """
Activation ActivityRegularization Add AdditiveAttention AlphaDropout Attention Average
AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D AdaptiveMaxPooling1D
AdaptiveMaxPooling2D AdaptiveMaxPooling3D AveragePooling1D AveragePooling2D AveragePooling3D
BatchNormalization Bidirectional CategoryEncoding CenterCrop Concatenate Conv1D Conv1DTranspose
Conv2D Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Cropping1D Cropping2D
Cropping3D Dense DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense
Embedding Flatten Functional GRU GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D
GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D
GlobalMaxPooling3D GroupNormalization GroupQueryAttention Identity InputLayer LSTM LSTMCell
LayerNormalization LayerScale LeakyReLU Masking MaxPooling1D MaxPooling2D MaxPooling3D Maximum
Minimum Model MultiHeadAttention Multiply Normalization PReLU Permute RMSNormalization RNN
RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop
RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale RandomHue
RandomInvert RandomPerspective RandomPosterization RandomRotation RandomSaturation RandomSharpness
RandomTranslation RandomZoom ReLU RepeatVector Rescaling Reshape Resizing SeparableConv1D
SeparableConv2D Sequential SimpleRNN SimpleRNNCell Softmax SpatialDropout1D SpatialDropout2D
SpatialDropout3D SpectralNormalization StackedRNNCells Subtract TimeDistributed UnitNormalization
UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""
# Operators that networks apply to tensors, as in `x[:, 0] / 2` or `keras.ops.mean(x, axis=1)`.
_OPERATORS = """
Abs Absolute Amax Amin Append Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh Argmax Argmin
AveragePool BroadcastTo Cast Ceil Celu Clip Conv Copy Cos Cosh Cumprod Cumsum DepthToSpace
DepthwiseConv Diff Divide DivideNoNan DotProductAttention Dstack Einsum Elu Equal Erf Exp Exp2
ExpandDims Expm1 ExtractPatches Fabs Flip Fliplr Flipud Floor FloorDivide Fmax Fmin Gelu GetItem Glu
Greater GreaterEqual HardShrink HardSigmoid HardSilu HardTanh Hstack Hypot LayerNorm LeakyRelu Less
LessEqual Log Log10 Log2 LogSigmoid LogSoftmax LogicalAnd LogicalNot LogicalOr Logsumexp Matmul Max
MaxPool Mean Min Mod Moments Moveaxis NanToNum Negative Norm Normalize NotEqual OneHot OnesLike Pad
Power Prod RGBToGrayscale RMSNorm Ravel Reciprocal Relu Relu6 Repeat Resize Roll Round Rsqrt Selu
Sigmoid Sign Silu Sin Sinh Slice SoftShrink Softplus Softsign Sort SpaceToDepth Sparsemax Split Sqrt
Square Squareplus Squeeze Stack Std StopGradient Sum Swapaxes Take Tan Tanh TanhShrink Tensordot
Tile TopK Transpose Tril Triu TrueDivide Trunc Unstack Var Vstack Where ZerosLike
"""
_PARTS = """
Constant GlorotNormal GlorotUniform HeNormal HeUniform Identity IdentityInitializer LecunNormal
LecunUniform Ones Orthogonal OrthogonalInitializer RandomNormal RandomUniform TruncatedNormal
VarianceScaling Zeros L1 L1L2 L2 OrthogonalRegularizer MaxNorm MinMaxNorm NonNeg UnitNorm
"""
_FUNCTIONS = """
celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu
linear log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus
softsign sparse_plus sparse_sigmoid sparsemax squareplus swish tanh tanh_shrink threshold
"""
_NUMBERS = """
bfloat16 bool float16 float32 float64 int16 int32 int64 int8 mixed_bfloat16 mixed_float16 uint16
uint32 uint64 uint8
"""
# Texts allowed as settings of layers. For a .h5 file, Keras turns the name of a function of
# `keras.layers` into the function; of these, only `dot`, which multiplies tensors, is listed.
_SETTINGS = """
constant glorot_normal glorot_uniform he_normal he_uniform identity lecun_normal lecun_uniform
normal one ones orthogonal random_normal random_uniform truncated_normal uniform untruncated_normal
variance_scaling zero zeros fan_avg fan_in fan_out l1 l1_l2 l1l2 l2 orthogonal_regularizer rows
columns max_norm min_max_norm non_neg unit_norm auto causal full same valid channels_first
channels_last area bicubic bilinear gaussian lanczos3 lanczos5 mitchellcubic nearest edge reflect
symmetric wrap ave concat dot mul sum count int multi_hot one_hot horizontal horizontal_and_vertical
vertical
"""
LAYERS = frozenset(_LAYERS.split())
FUNCTIONS = frozenset(_FUNCTIONS.split())
DTYPES = frozenset(_NUMBERS.split())
CLASSES = LAYERS | {*_OPERATORS.split(), *_PARTS.split(), "DTypePolicy", "SeedGenerator"}
WORDS = FUNCTIONS | DTYPES | {*_PARTS.split(), *_SETTINGS.split()}
MODULES = (
    "keras.src.applications.convnext",  # has LayerScale
    "builtins",
    "keras",
    "keras.activations",
    "keras.constraints",
    "keras.dtype_policies",
    "keras.initializers",
    "keras.layers",
    "keras.models",
    "keras.random",
    "keras.regularizers",
    "keras.src.models.functional",
    "keras.src.models.model",
    "keras.src.models.sequential",
    "keras.src.ops.core",
    "keras.src.ops.image",
    "keras.src.ops.linalg",
    "keras.src.ops.math",
    "keras.src.ops.nn",
    "keras.src.ops.numpy",
)
# Keys of an object; a layer of a network also has `name` and `inbound_nodes`.
_KEYS = frozenset(
    ("class_name", "config", "module", "registered_name", "build_config", "name", "inbound_nodes")
) | {"shared_object_id", "__passive_serialization__"}
_KEYS_OF_OBJECTS = ("class_name", "module", "registered_name")  # never keys of settings
_INDICES = ("__slice__", "__ellipsis__")  # keys of a tensor's indices
_NAME = re.compile(r"[\w .()+-]{1,256}")  # name of a layer or an input, without paths and addresses
_KEY = re.compile(r"\w{1,64}")
_EQUATION = re.compile(r"[a-zA-Z.,>-]{1,64}")  # equation of an EinsumDense or Einsum

Reasons = Iterator[str]


@dataclass(frozen=True)
class KerasFile:
    """A checked Keras file.

    Attributes:
        config: the JSON that describes the layers, without training settings.
        content: the content of an HDF5 file: the weights of a .keras file, or the whole .h5 file.
        is_zip: whether the file is a .keras file.
    """

    config: dict[str, Any]
    content: bytes
    is_zip: bool

    def write(self, folder: Path) -> Path:
        """Write the layers and weights as a file that Keras can load; return its path."""
        config = json.dumps(self.config)
        if self.is_zip:
            path = folder / "model.keras"
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("metadata.json", "{}")
                archive.writestr(CONFIG, config)
                archive.writestr(WEIGHTS, self.content)
        else:
            path = folder / "model.h5"
            path.write_bytes(self.content)
            with h5py.File(path, "r+") as file:
                file.attrs[LEGACY_CONFIG] = config
        return path


def read_keras(path: Path) -> KerasFile:
    """Read a .h5 or .keras file, and check that it holds only allowed layers and weights.

    Raises:
        ModelError: the file is damaged, too large or not a Keras file, or has layers, functions or
            settings that are not allowed, or weights outside the file.
    """
    with errors_as(ModelError, f"{path}: Keras refuses it"):
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{path}: larger than 2 GiB; expected at most {MAX_BYTES} bytes")
        content = path.read_bytes()
        is_zip = not content.startswith(_HDF5)
        open_file = _open_zip if is_zip else _open_hdf5
        config, content, reason = open_file(content)
        for value in find_objects(config):
            value.pop(_TRAINING, None)
        if reason is None:
            reason = next(_reasons_against(config, content), None)
    if reason is not None:
        raise ModelError(f"{path}: {reason}")
    return KerasFile(config, content, is_zip)


def find_objects(config: Any) -> Iterator[dict[str, Any]]:
    """Yield each JSON object of a config, always before the objects inside it."""
    waiting = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _open_hdf5(content: bytes) -> tuple[Any, bytes, str | None]:
    """Return the config of a .h5 file, `content` itself, and the reason to refuse it, if any."""
    with h5py.File(io.BytesIO(content)) as file:
        config = file.attrs.get(LEGACY_CONFIG)
    if config is None:
        return None, content, "holds weights and no layers; expected a file of `model.save`"
    return json.loads(config), content, None


def _open_zip(content: bytes) -> tuple[Any, bytes, str | None]:
    """Return the config of a .keras file, its weights, and the reason to refuse it, if any."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        if CONFIG not in sizes:
            return None, b"", torch_archive.describe(sizes)
        if len(sizes) < len(archive.infolist()):
            return None, b"", "two of its members have the same name"
        total = sum(sizes.values())
        if sizes[CONFIG] > MAX_CONFIG_BYTES or total > MAX_BYTES:
            return None, b"", f"unpacks to {total} bytes; expected at most {MAX_BYTES}"
        config = json.loads(archive.read(CONFIG))
        if WEIGHTS not in sizes:
            return config, b"", f"has no {WEIGHTS}; expected a file of `model.save`"
        return config, archive.read(WEIGHTS), None


def _reasons_against(config: Any, content: bytes) -> Reasons:
    """Yield the reasons to refuse a file: those in its config, then those in its weights."""
    yield from _strange_config(config)
    with h5py.File(io.BytesIO(content)) as file:
        yield from _strange_weights(file)


def _strange_config(config: Any) -> Reasons:
    if not isinstance(config, dict) or not _is_one_of(config.get("class_name"), LAYERS):
        yield _refusal("the network", config, "a network of Keras")
    else:
        yield from _strange_object(config, "the network")


def _refusal(where: str, got: Any, expected: str) -> str:
    shown = repr(got)
    if len(shown) >= 100:
        shown = f"{shown[:100]}..."
    return f"{where}: got {shown}, expected {expected}"


def _is_one_of(value: Any, known: Collection[str]) -> bool:
    return isinstance(value, str) and value in known


def _strange_object(value: dict[str, Any], where: str) -> Reasons:
    """Yield reasons to refuse an object: its class or function, its settings, its other keys."""
    kind = value.get("class_name")
    config = value.get("config")
    if kind == "__tuple__" and value.keys() == {"class_name", "items"}:
        yield from _strange_value(value["items"], where)
        return

    # Messages name the layer
    if isinstance(config, dict):
        name = config.get("name", value.get("name"))
        if isinstance(name, str):
            where = f"layer {name!r:.100}"

    # The class decides the form of the settings
    if kind == "function":
        if not _is_one_of(config, FUNCTIONS):
            yield _refusal(where, f"function {config}", "activation functions of Keras")
    elif not _is_one_of(kind, CLASSES):
        expected = "layers of Keras that hold no code; try a SavedModel or an ONNX file"
        yield _refusal(where, f"class {kind}", expected)
    elif kind == "DTypePolicy":
        yield from _strange_value(config, where)
    elif isinstance(config, dict):
        yield from _strange_settings(config, where)
    else:
        yield _refusal(where, config, f"the settings of its {kind}")
    yield from _strange_origin(value, where)


def _strange_origin(value: dict[str, Any], where: str) -> Reasons:
    """Yield reasons to refuse an object's keys other than class and settings."""
    for key in value.keys() - _KEYS:
        yield _refusal(where, f"key {key}", "keys that Keras writes")
    if value.get("module") is not None and not _is_one_of(value["module"], MODULES):
        yield _refusal(where, f"module {value['module']}", "modules of Keras with layers")

    # A registered name must be that of the class or function itself
    named = value.get("registered_name")
    own = (value["class_name"], value.get("config"))
    if named is not None and not (isinstance(named, str) and named in own):
        yield _refusal(where, f"registered name {named}", "layers of Keras alone")
    if "name" in value:
        yield from _strange_name(value["name"], where)
    for key in ("build_config", "shared_object_id", "__passive_serialization__"):
        yield from _strange_value(value.get(key), where)
    nodes = value.get("inbound_nodes", [])
    if not isinstance(nodes, list):
        nodes = [nodes]
    for node in nodes:
        yield from _strange_node(node, where)


def _strange_settings(config: dict[str, Any], where: str) -> Reasons:
    """Yield reasons to refuse the settings of an object; some keys have their own grammar."""
    for key, value in config.items():
        yield from _strange_key(key, where)
        if key == "name":
            if value is not None:
                yield from _strange_name(value, where)
        elif key in ("input_layers", "output_layers"):
            yield from _strange_tensors(value, where)
        elif key in ("equation", "subscripts"):
            if not isinstance(value, str) or not _EQUATION.fullmatch(value):
                yield _refusal(where, value, "an equation of letters")
        else:
            yield from _strange_value(value, f"{where}, {key}")


def _strange_value(value: Any, where: str) -> Reasons:
    """Yield reasons to refuse the texts, keys and objects inside a value that are not allowed."""
    if isinstance(value, str) and value not in WORDS:
        yield _refusal(where, value, "a word that Keras's layers take as a setting")
    elif isinstance(value, list):
        for item in value:
            yield from _strange_value(item, where)
    elif isinstance(value, dict):
        if "class_name" in value:
            yield from _strange_object(value, where)
            return
        for key, item in value.items():
            yield from _strange_key(key, where)
            yield from _strange_value(item, where)


def _strange_key(key: str, where: str) -> Reasons:
    if key in _KEYS_OF_OBJECTS or not _KEY.fullmatch(key):
        yield _refusal(where, f"key {key}", "names of settings")


def _strange_name(name: Any, where: str) -> Reasons:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield _refusal(where, name, "names of letters, digits, spaces and _.()+-")


def _strange_tensors(value: Any, where: str) -> Reasons:
    """Yield reasons to refuse values other than nests of tensors: [layer's name, node, output]."""
    if _is_tensor(value):
        yield from _strange_name(value[0], where)
    elif isinstance(value, list):
        for item in value:
            yield from _strange_tensors(item, where)
    elif isinstance(value, dict):
        for name in value:
            yield from _strange_name(name, where)
        for item in value.values():
            yield from _strange_tensors(item, where)
    else:
        yield _refusal(where, value, "outputs of layers")


def _is_tensor(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return [type(item) for item in value] == [str, int, int]


def _strange_node(node: Any, where: str) -> Reasons:
    """Yield reasons to refuse the arguments with which a layer is called.

    Tensors, numbers, booleans, null, indices of `_INDICES` and nests of these are allowed. A node
    is {"args": ..., "kwargs": ...}, or in Keras 2 a list of [name, node, output, kwargs].
    """
    if isinstance(node, dict) and node.keys() <= {"args", "kwargs"}:
        yield from _strange_argument(list(node.values()), where)
    elif isinstance(node, list):
        for tensor in node:
            if isinstance(tensor, list) and _is_tensor(tensor[:3]) and len(tensor) <= 4:
                yield from _strange_name(tensor[0], where)
                yield from _strange_argument(tensor[3:], where)
            else:
                yield _refusal(where, tensor, "outputs of layers as its input")
    else:
        yield _refusal(where, node, "outputs of layers as its input")


def _strange_argument(value: Any, where: str) -> Reasons:
    if isinstance(value, str):
        yield _refusal(f"{where}, called with", value, "tensors and numbers")
    elif isinstance(value, list):
        for item in value:
            yield from _strange_argument(item, where)
    elif isinstance(value, dict) and _is_one_of(value.get("class_name"), _INDICES):
        parts = [item for key, item in value.items() if key != "class_name"]
        yield from _strange_argument(parts, where)
    elif isinstance(value, dict) and "class_name" in value:
        yield from _strange_keras_tensor(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strange_key(key, where)
            yield from _strange_argument(item, where)


def _strange_keras_tensor(value: dict[str, Any], where: str) -> Reasons:
    """Yield reasons to refuse an object other than the output of a layer, as Keras 3 writes it."""
    config = value.get("config")
    if (
        value.keys() == {"class_name", "config"}
        and value["class_name"] == "__keras_tensor__"
        and isinstance(config, dict)
        and config.keys() == {"shape", "dtype", "keras_history"}
        and _is_tensor(config["keras_history"])
        and _is_one_of(config["dtype"], DTYPES)
    ):
        yield from _strange_argument(config["shape"], where)
        yield from _strange_name(config["keras_history"][0], where)
    else:
        yield _refusal(f"{where}, called with", value, "tensors and numbers")


def _strange_weights(file: h5py.File) -> Reasons:
    """Yield reasons to refuse weights: links, data in other files, or more than `MAX_BYTES`."""
    groups: list[h5py.Group] = [file]
    seen = {file["/"]}
    count = 0
    while groups:
        group = groups.pop()
        for name in group:
            if isinstance(group.get(name, getlink=True), h5py.ExternalLink | h5py.SoftLink):
                yield f"{name!r} is a link; expected weights in the file itself"
                continue

            # Count the weights, and visit each group once
            item = group[name]
            if isinstance(item, h5py.Dataset):
                if item.external or item.is_virtual:
                    yield f"{name!r} lies in another file; expected weights in the file itself"
                count += item.size * item.dtype.itemsize
            elif isinstance(item, h5py.Group) and item not in seen:
                seen.add(item)
                groups.append(item)
    if count > MAX_BYTES:
        yield f"claims {count} bytes of weights; expected at most {MAX_BYTES}"
