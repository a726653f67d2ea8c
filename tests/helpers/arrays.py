"""Array files, the samples of a data set in one order, and any values of activations."""

import struct

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

# As activations are: zero, or of a size that float32 can divide into bins.
NUMBERS = st.one_of(
    st.just(0.0),
    st.floats(2.0**-20, 2.0**20, width=32),
    st.floats(-(2.0**20), -(2.0**-20), width=32),
)
TENSORS = arrays.arrays(np.float32, st.integers(1, 60), elements=NUMBERS)
IDX_CODES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def pack_idx(array) -> bytes:
    code = IDX_CODES[array.dtype.str.lstrip("|")]
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


def whole(data):
    """All samples of both splits, in one order."""
    both = np.concatenate([data.train.stored[:], data.test.stored[:]])
    labels = np.concatenate([data.train.labels, data.test.labels])
    order = np.lexsort(both.reshape(len(both), -1).T)
    return both[order], labels[order]
