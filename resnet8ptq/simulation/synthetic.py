"""Makes calibration samples without data, from the statistics of batch normalization.

A BatchNormalization holds the mean and the variance of its input on the training samples. Gradient
descent changes noise so that the inputs of all these nodes approach these statistics (Cai et al.,
"ZeroQ: A Novel Zero Shot Quantization Framework", CVPR 2020, section 3.1). The graph is read before
folding, which removes the statistics.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from resnet8ptq.core import cache, files
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.preprocessing import RAW
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.torch_module import to_torch_module
from resnet8ptq.graph.weights import read_initializer
from resnet8ptq.simulation.device import find_device

log = logging.getLogger(__name__)

BATCH = 16  # samples whose statistics are measured together
STEPS = 100  # steps of Adam for each batch
LEARNING_RATE = 0.1  # learning rate in units of the input's spread
_MEND = "try calib.images=, a folder of pictures, or training samples"

Statistics = dict[str, tuple[torch.Tensor, torch.Tensor]]  # mean and standard deviation, by node


def make_samples(
    unfolded: Path, like: Split, count: int, seed: int, runtime: Runtime, source: str
) -> Split:
    """Return `count` synthetic network inputs, as an unlabelled split; the cache keeps them.

    Args:
        unfolded: the network with its BatchNormalization.
        like: samples with the shape and the type of the inputs; if they are stored as pixels, they
            also give the range of the values.
        source: the network's file, for messages.

    Raises:
        UnsupportedError: the network does not take a single float32 input, has no
            BatchNormalization with constant statistics, or cannot be converted to torch.
        ConfigError: see `find_device` and `cache.entry`.
    """
    shape = like.zeros.shape[1:]
    if like.fields is not None or like.zeros.dtype != np.float32:
        raise UnsupportedError(f"calib.synthetic: expected a network of one float input; {_MEND}")
    low, high = _find_range(like)
    device = find_device(runtime.device)
    key: cache.Key = {
        "graph": files.sha256(unfolded),
        "inputs": str((count, shape, low, high)),
        "seed": seed,
        "threads": runtime.threads,
        "device": device.type,
        **cache.made_with(__name__),
    }

    def make(folder: Path) -> None:
        proto = onnx.load(unfolded)
        statistics = _read_statistics(proto.graph)
        if not statistics:
            raise UnsupportedError(
                f"calib.synthetic: {source} has no BatchNormalization whose mean and variance "
                f"could be read; {_MEND}"
            )

        # Learn the inputs, not the weights
        torch.set_num_threads(runtime.threads)
        module = to_torch_module(proto).to(device).requires_grad_(False)
        values = _learn(
            module,
            statistics,
            shape=(count, *shape),
            ends=(low, high),
            seed=seed,
            device=device,
        )
        np.save(folder / "samples.npy", values)

    # Map the samples from the cache, because they may be large
    folder = cache.entry(runtime.cache_root, "synthetic", key, make)
    values = np.asarray(np.load(folder / "samples.npy", mmap_mode="r"))
    return Split(
        stored=values,
        labels=None,
        source="synthetic samples",
        preprocessing=RAW,
        at_once=like.at_once,
        within_memory=like.within_memory,
    )


def _find_range(like: Split) -> tuple[float, float]:
    """Return the ends of the values that prepared pixels can have; infinite for other samples."""
    stored = like.stored[:1]
    if stored.dtype != np.uint8:
        return -np.inf, np.inf
    ends = [like.prepare(np.full_like(stored, pixel)) for pixel in (0, 255)]
    return float(np.min(ends)), float(np.max(ends))


def _read_statistics(graph: onnx.GraphProto) -> Statistics:
    """Return mean and standard deviation [channels] for each BatchNormalization, by node name.

    A node whose statistics are not constants is left out.
    """
    links = Links(graph)
    statistics = {}
    for node in graph.node:
        if node.op_type == "BatchNormalization" and links.constants.keys() >= {*node.input[3:5]}:
            mean = torch.from_numpy(read_initializer(links, node.input[3]))
            variance = torch.from_numpy(read_initializer(links, node.input[4]))
            statistics[node.name] = mean, variance.clamp(min=1e-6).sqrt()
    return statistics


def _learn(
    module: Any,
    statistics: Statistics,
    shape: tuple[int, ...],
    ends: tuple[float, float],
    seed: int,
    device: torch.device,
) -> NDArray[np.float32]:
    """Return inputs with which the tensors before batch normalization approach `statistics`.

    Args:
        shape: the shape of the inputs, [count, ...].
        ends: the smallest and the largest value of an input; infinite for no limit.
    """
    losses: list[torch.Tensor] = []
    for name, (mean, deviation) in statistics.items():
        compare = partial(_compare, losses, mean.to(device), deviation.to(device))
        module.get_submodule(name).register_forward_pre_hook(compare)

    # Start from noise, around the middle of the range
    random = torch.Generator().manual_seed(seed)
    middle = 0.0
    spread = 1.0
    if not np.isinf(ends).any():
        middle = sum(ends) / 2
        spread = (ends[1] - ends[0]) / 4
    noise = middle + spread * torch.randn(shape, generator=random)

    # Each batch is learned alone
    learned = []
    for part in track(noise.split(BATCH), "Synthetic samples", "batches"):
        batch = part.clamp(*ends).to(device).requires_grad_()
        optimizer = torch.optim.Adam([batch], lr=LEARNING_RATE * spread)
        before = after = 0.0
        for step in range(STEPS):
            losses.clear()
            module(batch)
            loss = torch.stack(losses).mean()
            after = float(loss.detach())
            if step == 0:
                before = after
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                batch.clamp_(*ends)
        learned.append(batch.detach().cpu().numpy())
    log.info("calib.synthetic: distance from the statistics %.3g -> %.3g", before, after)
    return np.concatenate(learned)


def _compare(
    losses: list[torch.Tensor],
    mean: torch.Tensor,
    deviation: torch.Tensor,
    _: Any,
    inputs: tuple[torch.Tensor, ...],
) -> None:
    """Append the squared distance of a tensor's mean and deviation from the statistics to `losses`.

    The distance is relative to the deviation.

    Args:
        inputs: the tensor [n, channels, ...], as the only input of a module.
    """
    rows = inputs[0].transpose(0, 1).flatten(1)  # [channels, values]
    shift = (rows.mean(1) - mean) / deviation
    stretch = rows.std(1, correction=0) / deviation - 1
    losses.append(shift.square().mean() + stretch.square().mean())
