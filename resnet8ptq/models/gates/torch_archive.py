"""Checks the zip archive of an exported program before torch reads it.

Only the records that a network needs are allowed, because `torch.export.load` can execute the
content of an archive. Two readers of one zip file may read different content, so torch gets a copy
of the checked records.
"""

import io
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from resnet8ptq.core.errors import QuantizationError, errors_as

MAX_BYTES = 2**27  # most unpacked bytes of the compressed records, which are JSON

# The operators of inference. No operator here reads or writes files, uses memory outside its
# tensors, or calls its arguments. `relu_` counts as `relu`.
_ATEN = """
abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv
addr affine_grid_generator alias alias_copy all allclose alpha_dropout amax amin aminmax angle any
arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere asin
asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm
batch_norm bilinear bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor blackman_window block_diag bmm broadcast_tensors broadcast_to bucketize cat cdist ceil
celu chain_matmul channel_shuffle chunk clamp clamp_max clamp_min clip clone col2im column_stack
complex concat concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d conv3d
conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copysign cos cosh
cosine_similarity count_nonzero cross cummax cummin cumprod cumsum deg2rad det detach diag
diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff dist div divide dot dropout dsplit
dstack einsum elu embedding eq equal erf erfc erfinv exp exp2 expand expand_as expand_copy expm1 eye
feature_dropout fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn
fft_ifftshift fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fill fix
flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod frac frobenius_norm full
full_like gather ge gelu ger glu greater greater_equal grid_sampler grid_sampler_2d grid_sampler_3d
group_norm gru gru_cell gt hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh
heaviside hsplit hstack hypot im2col index index_add index_copy index_fill index_put index_reduce
index_select inner instance_norm is_nonzero isclose isfinite isin isinf isnan isneginf isposinf
isreal istft item kron layer_norm ldexp le leaky_relu lerp less less_equal lift_fresh
lift_fresh_copy linalg_cross linalg_det linalg_inv linalg_matmul linalg_matrix_norm linalg_multi_dot
linalg_norm linalg_vecdot linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid
log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not
logical_or logical_xor logit logspace logsumexp lstm lstm_cell lt mH mT masked_fill masked_scatter
masked_select matmul matrix_H max max_pool1d max_pool1d_with_indices max_pool2d
max_pool2d_with_indices max_pool3d max_pool3d_with_indices maximum mean meshgrid min minimum mish mm
moveaxis movedim mse_loss mul multiply mv nan_to_num nanmean nansum narrow native_channel_shuffle
native_group_norm native_layer_norm ne neg negative new_full new_ones new_zeros nonzero norm
norm_except_dim not_equal numel numpy_T one_hot ones ones_like outer pad pairwise_distance pdist
permute permute_copy pixel_shuffle pixel_unshuffle polar positive pow prelu prod quantile rad2deg
reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 remainder repeat
repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as
resolve_conj resolve_neg result_type rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll
rot90 round row_stack rrelu rsqrt rsub scalar_tensor scaled_dot_product_attention scatter
scatter_add scatter_reduce select select_copy select_scatter selu sgn sigmoid sign signbit silu sin
sinc sinh size slice slice_copy slice_scatter softmax softplus softshrink sort special_entr
special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1
special_log1p special_log_softmax special_logit special_logsumexp special_round special_sinc
special_softmax special_xlogy split split_with_sizes split_with_sizes_copy sqrt square squeeze
squeeze_copy stack std std_mean stft sub subtract sum sum_to_size swapaxes swapdims
sym_constrain_range sym_constrain_range_for_size sym_numel sym_size t t_copy take take_along_dim tan
tanh tensor_split tensordot threshold tile to topk trace transpose transpose_copy tril tril_indices
triu triu_indices true_divide trunc type_as unbind unbind_copy unflatten unfold unfold_copy
unique_consecutive unique_dim unsafe_chunk unsafe_split unsqueeze unsqueeze_copy upsample_bicubic2d
upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_trilinear3d var var_mean view view_as view_as_complex view_as_complex_copy view_as_real
view_as_real_copy view_copy vsplit vstack where xlogy zero zeros zeros_like _adaptive_avg_pool2d
_adaptive_avg_pool3d _assert_scalar _assert_tensor_metadata _conj _convolution _convolution_mode
_fused_rms_norm _linalg_det _local_scalar_dense _log_softmax _pad_circular _pad_enum _prelu_kernel
_safe_softmax _scaled_dot_product_attention_math _shape_as_tensor _softmax _to_copy _unique2
_unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d __and__ __lshift__ __or__ __rshift__ __xor__
"""
_DECOMPOSED = """
choose_qparams choose_qparams_symmetric quantize_per_tensor dequantize_per_tensor
quantize_per_channel dequantize_per_channel
"""
OPERATORS = {
    "aten": frozenset(_ATEN.split()),
    "quantized_decomposed": frozenset(_DECOMPOSED.split()),
}


def is_allowed(namespace: str, name: str) -> bool:
    """Return whether `OPERATORS` has an operator, or the one that `name` applies in place.

    >>> is_allowed("aten", "relu_"), is_allowed("aten", "from_file")
    (True, False)
    """
    known = OPERATORS.get(namespace, frozenset())
    return name in known or (name.endswith("_") and name[:-1] in known)


def read_archive(path: Path, records: re.Pattern[str]) -> dict[str, bytes]:
    """Return the content of each record by its name.

    The file's size and `MAX_BYTES` limit the memory.

    Args:
        records: a pattern of the allowed names.

    Raises:
        QuantizationError: the file is not a zip archive, is damaged, unpacks to too much, or has
            records that are not allowed.
    """
    with (
        errors_as(QuantizationError, f"{path}: not an archive, or damaged"),
        zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive,
    ):
        strange = next(_strange(archive, records, path.stat().st_size), None)
        if strange is None:
            return {name: archive.read(name) for name in archive.namelist()}
    raise refusal(path, strange)


def pack(records: Mapping[str, bytes], like: Path | None = None) -> io.BytesIO:
    """Return an archive of these records, for torch to load.

    Args:
        like: an archive; its records are compressed in the new one as they are there. By default,
            no record is compressed.
    """
    kinds = {}
    if like is not None:
        with zipfile.ZipFile(like) as other:
            kinds = {record.filename: record.compress_type for record in other.infolist()}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as copy:
        for name, content in records.items():
            copy.writestr(name, content, kinds.get(name, zipfile.ZIP_STORED))
    archive.seek(0)
    return archive


def refusal(path: Path, strange: str) -> QuantizationError:
    """Return the error for a file that resnet8ptq has not saved.

    Args:
        strange: the part or the fault that no file of resnet8ptq has.
    """
    return QuantizationError(f"{path}: not a program that was saved here ({strange[:200]})")


def describe(names: Collection[str]) -> str:
    """Return the kind of an archive without Keras's config, and the remedy, for a message.

    Args:
        names: the names of its records.
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
    """Yield the records whose names are not allowed, then the faults of the archive."""
    names = set()  # in lower case, because some file systems ignore case
    packed_bytes = 0
    unpacked_bytes = 0  # bytes of the compressed records
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

    # torch and Python may read such archives differently
    if len(names) < len(archive.infolist()):
        yield "two records with the same name"
    if two_lengths:
        yield "a record with two lengths"
    if packed_bytes > file_bytes:
        yield "records that overlap"
    if unpacked_bytes > MAX_BYTES:
        yield "more data than an artifact has"
