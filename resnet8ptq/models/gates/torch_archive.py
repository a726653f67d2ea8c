"""Checks the zip archive of an exported program before torch reads it.

`torch.export.load` can execute the content of an archive, so only the records of `program.save` are
allowed. torch gets a copy of the checked records, because two readers of one zip file may read
different content.
"""

import io
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from resnet8ptq.core.errors import QuantizationError, errors_as

MAX_BYTES = 2**27  # of the compressed records, which are JSON

# The operators of inference. No operator here reads or writes files, uses memory outside its
# tensors, or calls its arguments. `relu_` counts as `relu`.
_ATEN = """
abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d add
addmm alias all alpha_dropout amax amin any arange argmax argmin argsort asin asinh atan atan2 atanh
avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bitwise_and bitwise_not bitwise_or bitwise_xor
bmm broadcast_tensors broadcast_to cat ceil celu channel_shuffle chunk clamp clamp_max clamp_min
clip clone concat constant_pad_nd contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d
conv_transpose3d convolution copy cos cosh cumprod cumsum detach diff div dot dropout einsum elu
embedding eq erf erfc exp expand expand_as expm1 eye feature_dropout flatten flip floor floor_divide
fmod full full_like gather ge gelu glu greater greater_equal grid_sampler group_norm gru gt
hardshrink hardsigmoid hardswish hardtanh index index_put index_select instance_norm isfinite isinf
isnan item layer_norm le leaky_relu lerp less less_equal lift_fresh_copy linalg_vector_norm linear
log log10 log1p log2 log_sigmoid log_softmax logical_and logical_not logical_or logical_xor
logsumexp lstm lt masked_fill matmul max max_pool1d max_pool2d max_pool3d maximum mean min minimum
mish mm movedim mul mv narrow ne neg new_zeros nonzero norm numel one_hot ones ones_like pad permute
pixel_shuffle pixel_unshuffle pow prelu prod reciprocal reflection_pad1d reflection_pad2d relu relu6
remainder repeat replication_pad1d replication_pad2d reshape rms_norm rnn_relu rnn_tanh roll round
rrelu rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add select selu sigmoid
sign silu sin sinh size slice slice_scatter softmax softplus softshrink sort split split_with_sizes
sqrt square squeeze stack std sub sum swapaxes sym_numel sym_size t tan tanh tensor_split threshold
tile to topk transpose tril triu true_divide trunc type_as unbind unflatten unsqueeze
upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d var view where zeros zeros_like _assert_scalar
_assert_tensor_metadata _convolution _log_softmax _softmax _to_copy _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d __and__ __or__
"""
_DECOMPOSED = """
quantize_per_tensor dequantize_per_tensor quantize_per_channel dequantize_per_channel
"""
OPERATORS = {
    "aten": frozenset(_ATEN.split()),
    "quantized_decomposed": frozenset(_DECOMPOSED.split()),
}


def is_allowed(namespace: str, name: str) -> bool:
    """Return whether an operator is allowed in inference."""
    known = OPERATORS.get(namespace, frozenset())
    return name in known or (name.endswith("_") and name[:-1] in known)


def read_archive(path: Path, records: re.Pattern[str]) -> dict[str, bytes]:
    """Return the content of each record by its name; the file's size bounds the memory.

    Raises:
        QuantizationError: the file is not a zip archive, is damaged, or has records that are not
        allowed.
    """
    with (
        errors_as(QuantizationError, f"{path}: not an archive, or damaged"),
        zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive,
    ):
        strange = next(_strange(archive, records, path.stat().st_size), None)
        if strange is None:
            return {name: archive.read(name) for name in archive.namelist()}
    raise refusal(path, strange)


def pack(records: Mapping[str, bytes]) -> io.BytesIO:
    """Return an archive of these records, for torch to load."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as copy:
        for name, content in records.items():
            copy.writestr(name, content)
    archive.seek(0)
    return archive


def refusal(path: Path, strange: str) -> QuantizationError:
    """Return the error for a part that no artifact of this package has."""
    return QuantizationError(f"{path}: not a program that was saved here ({strange[:200]})")


def describe(names: Collection[str]) -> str:
    """Return the kind of an archive, judged by its records, and the remedy, if it is no .keras
    file.
    """
    records = {name.partition("/")[2] for name in names}
    if "archive_format" in records:
        return "an exported program of torch; expected a name that ends in .pt2"
    if "data.pkl" not in records:
        return "a zip archive without config.json; expected a file of `model.save`"
    if any(name.startswith("code/") for name in records):
        return (
            "a TorchScript file, which is code; expected the .pt2 file that torch.export.save "
            "makes of the same module"
        )
    return (
        "pickled by torch.save; expected a .pt2 file of torch.export.save, or a state dict with "
        "model.module=package.module.Class model.state_dict=FILE"
    )


def _strange(archive: zipfile.ZipFile, records: re.Pattern[str], file_bytes: int) -> Iterator[str]:
    """Yield the records that `torch.export.save` does not write, or the fault of the archive."""
    names = set()  # in lower case, because some file systems ignore case
    packed_bytes = 0
    unpacked_bytes = 0  # of the compressed records
    two_lengths = False
    for info in archive.infolist():
        if not records.fullmatch(info.filename):
            yield info.filename
        names.add(info.filename.casefold())
        packed_bytes += info.compress_size
        if info.compress_type != zipfile.ZIP_STORED:
            unpacked_bytes += info.file_size
        elif info.file_size != info.compress_size:
            two_lengths = True
    if len(names) < len(archive.infolist()):
        yield "two records with the same name"
    if two_lengths:
        yield "a record with two lengths"
    if packed_bytes > file_bytes:
        yield "records that overlap"
    if unpacked_bytes > MAX_BYTES:
        yield "more data than an artifact has"
