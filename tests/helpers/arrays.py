"""Array files, and the samples of a data set in one order."""

import struct

import numpy as np

IDX_CODES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def pack_idx(array) -> bytes:
    code = IDX_CODES[array.dtype.str.lstrip("|")]
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


def whole(data):
    """All samples of both splits, in one order."""
    both = np.concatenate([data.train.images[:], data.test.images[:]])
    labels = np.concatenate([data.train.labels, data.test.labels])
    order = np.lexsort(both.reshape(len(both), -1).T)
    return both[order], labels[order]
