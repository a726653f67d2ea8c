"""Small networks of this study, trained in seconds.

Seeds are fixed. Sums may differ in the last digit on another processor, so a second run may give
slightly different weights.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from resnet8ptq.data import registry
from studies.kinds.subjects import AbsentError, export, write_samples

Array = NDArray[Any]
Samples = tuple[Array, Array | None]  # inputs and labels; None without labels
Loss = Callable[[Tensor, Tensor], Tensor]
_BATCH = 64


def train(
    network: nn.Module,
    inputs: Array,
    targets: Array,
    epochs: int,
    loss: Loss = functional.cross_entropy,
    rate: float = 2e-3,
) -> None:
    """Train by Adam with a learning rate that falls to 0 as a cosine."""
    torch.manual_seed(1)
    x = torch.from_numpy(inputs)
    y = torch.from_numpy(targets)
    steps = epochs * -(-len(x) // _BATCH)
    optimizer = torch.optim.Adam(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    network.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(_BATCH):
            optimizer.zero_grad()
            loss(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
            schedule.step()
    network.eval()


def write(
    folder: Path,
    network: nn.Module,
    calibrating: Samples,
    reported: Samples,
    name: str = "x",
) -> tuple[str, ...]:
    """Write a network of one input and its samples; return the settings that name them.

    Args:
        calibrating: samples and labels for calibration and choices.
        reported: those of the reported figures. Labels are None for a comparison with FP32.
    """
    arrays: dict[str, Array] = {}
    for side, (samples, labels) in {"train": calibrating, "test": reported}.items():
        arrays[f"{name}_{side}"] = samples
        if labels is not None:
            arrays[f"y_{side}"] = labels
    example = {name: torch.from_numpy(reported[0][:2])}
    return (*write_samples(folder, arrays), export(folder, network, example))


def cifar(train_images: int, test_images: int) -> tuple[Array, Array, Array, Array]:
    """Return images [N, 3, 32, 32] in 0..1 and labels of CIFAR-10, for training and testing."""
    if not os.environ.get("CIFAR10_DIR"):
        raise AbsentError("CIFAR-10: set CIFAR10_DIR")
    data = registry.load("cifar10", os.environ["CIFAR10_DIR"])
    arrays: list[Array] = []
    for split, count in ((data.train, train_images), (data.test, test_images)):
        labels = np.asarray(split.labels, np.int64)
        chosen = np.random.default_rng(1).permutation(len(labels))[:count]
        images = np.asarray(split.stored[:])[chosen].astype(np.float32) / 255
        arrays += [np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels[chosen]]
    return arrays[0], arrays[1], arrays[2], arrays[3]


def digits() -> tuple[Array, Array, Array, Array]:
    """Return scikit-learn's digits [N, 1, 8, 8] in 0..1 and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise AbsentError("package scikit-learn") from error
    loaded = load_digits()
    order = np.random.default_rng(1).permutation(len(loaded.target))
    images = (loaded.images[order, None] / 16).astype(np.float32)
    labels = loaded.target[order].astype(np.int64)
    return images[:900], labels[:900], images[900:], labels[900:]


def block(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution of 3x3 with batch normalization and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def head(width: int, classes: int) -> nn.Sequential:
    """Return an average over the picture and a linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def convolutional(folder: Path) -> tuple[str, ...]:
    """Three convolutions on scikit-learn's digits."""
    x, y, x_test, y_test = digits()
    network = nn.Sequential(block(1, 16), block(16, 32, 2), block(32, 32), head(32, 10))
    train(network, x, y, epochs=12)
    return write(folder, network, (x, y), (x_test, y_test))


def convolutional_few(folder: Path) -> tuple[str, ...]:
    """The network of `convolutional` with a softmax and 50 samples, without labels."""
    x, y, x_test, _ = digits()
    network = nn.Sequential(block(1, 16), block(16, 32, 2), block(32, 32), head(32, 10))
    network.append(nn.Softmax(1))
    train(network, x, y, epochs=12, loss=log_likelihood)
    return write(folder, network, (x[:50], None), (x_test[:50], None))


def log_likelihood(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of a network that ends in a softmax."""
    return functional.nll_loss((probabilities + 1e-9).log(), labels)


def depthwise(folder: Path) -> tuple[str, ...]:
    """Depthwise separable convolutions on CIFAR-10, with ReLU6."""

    def separable(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        deep = block(inputs, inputs, stride, groups=inputs)
        deep[2] = nn.ReLU6()
        point = nn.Conv2d(inputs, outputs, 1, bias=False)
        return nn.Sequential(deep, point, nn.BatchNorm2d(outputs), nn.ReLU6())

    x, y, x_test, y_test = cifar(6_000, 2_000)
    layers = [block(3, 16, 2), separable(16, 32), separable(32, 64, 2), separable(64, 128)]
    network = nn.Sequential(*layers, head(128, 10))
    train(network, x, y, epochs=5)
    return write(folder, network, (x[:2_000], y[:2_000]), (x_test, y_test))


class Residual(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two convolutions with SiLU and a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, width, H, W] to the same shape."""
        inner = functional.silu(self.norms[0](self.first(x)))
        return functional.silu(x + self.norms[1](self.second(inner)))


def residual_silu(folder: Path) -> tuple[str, ...]:
    """Residual blocks with SiLU on CIFAR-10."""
    x, y, x_test, y_test = cifar(6_000, 2_000)
    stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.SiLU())
    down = nn.Sequential(nn.Conv2d(24, 48, 3, 2, 1), nn.SiLU())
    network = nn.Sequential(stem, Residual(24), down, Residual(48), head(48, 10))
    train(network, x, y, epochs=4)
    return write(folder, network, (x[:2_000], y[:2_000]), (x_test, y_test))


class Counts(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A dense network on counts, which it takes as whole numbers."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, classes),
        )

    def forward(self, counts: Tensor) -> Tensor:
        """Map [N, features] to logits."""
        return self.layers(counts.to(torch.float32) / 100)


def make_counts(number: int) -> tuple[Array, Array]:
    """Return counts [N, 256] and one of eight classes; features and samples differ in scale."""
    random = np.random.default_rng(2)
    scales = np.exp(random.uniform(0, 5, 256))
    patterns = random.normal(0, 0.3, (8, 256))
    labels = random.integers(0, 8, number)
    sizes = np.exp(random.normal(0, 1.2, (number, 1)))
    spread = random.normal(0, 0.7, (number, 256))
    counts = scales * sizes * np.exp(patterns[labels] + spread)
    return np.minimum(counts, 2e6).astype(np.int64), labels


def dense_integers(folder: Path) -> tuple[str, ...]:
    """A dense network of 794,000 parameters on counts of very different scales."""
    x, y = make_counts(6_000)
    network = Counts(256, 768, 8)
    train(network, x[:4_000], y[:4_000], epochs=12, rate=5e-4)
    return write(folder, network, (x[:1_000], y[:1_000]), (x[4_000:], y[4_000:]), name="counts")


def dense_regression(folder: Path) -> tuple[str, ...]:
    """A dense network that predicts a sum of products of 24 values."""
    random = np.random.default_rng(5)
    x = random.normal(0, 1, (6_000, 24)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + x[:, 3:].mean(1)).astype(np.float32)
    layers = [nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1)]
    network = nn.Sequential(*layers)
    train(network, x[:4_000], y[:4_000, None], epochs=25, loss=functional.mse_loss)
    return write(folder, network, (x[:1_000], y[:1_000]), (x[4_000:], y[4_000:]))


def make_waves(number: int, length: int, seed: int) -> tuple[Array, Array]:
    """Return waves [N, length] of six kinds in noise: tones, sweeps, pulses; and the kinds."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 6, number)
    time = np.arange(length) / 8_000
    waves = np.empty((number, length), np.float32)
    for row, label in enumerate(labels):
        pitch = random.uniform(90, 260)
        sweep = (label % 3 - 1) * random.uniform(200, 600)
        phase = 2 * np.pi * (pitch + sweep * time) * time
        harmonics = (1, 2, 3, 4) if label >= 3 else (1, 3)
        tone = sum(np.sin(h * phase) / h for h in harmonics)
        envelope = np.exp(-(((time / time[-1] - random.uniform(0.3, 0.7)) / 0.25) ** 2))
        noise = random.normal(0, random.uniform(0.02, 0.3), length)
        waves[row] = random.uniform(0.05, 0.5) * (tone * envelope + noise)
    return waves, labels


def spectra(waves: Array) -> Array:
    """Return logs of power [N, 31, 64] of windows of 256 values."""
    window = np.hanning(256)
    frames = np.lib.stride_tricks.sliding_window_view(waves, 256, axis=1)[:, ::128] * window
    power = np.abs(np.fft.rfft(frames)[..., :64]) ** 2
    return np.log10(power + 1e-6).astype(np.float32)


class Recurrent(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A recurrent layer and a linear one on its last step."""

    def __init__(self, layer: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, steps, features] to [N, outputs]."""
        return self.head(self.layer(x)[0][:, -1])


def lstm(folder: Path) -> tuple[str, ...]:
    """An LSTM that classifies waves, by 31 spectra."""
    waves, y = make_waves(4_000, 4_096, seed=6)
    x = spectra(waves)
    network = Recurrent(nn.LSTM(64, 96, batch_first=True), 96, 6)
    train(network, x[:2_500], y[:2_500], epochs=8, rate=4e-3)
    return write(folder, network, (x[:500], y[:500]), (x[2_500:], y[2_500:]))


class ConvolvedSteps(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Convolutions on a spectrogram, an LSTM along its steps, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(block(1, 32, 2), block(32, 64, 2), block(64, 64, 2))
        self.steps = Recurrent(nn.LSTM(512, 64, batch_first=True), 64, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, 1, 31, 64] to [N, 6]."""
        return self.steps(self.convolutions(x).transpose(1, 2).flatten(2))  # [N, 4, 512]


def convolved_lstm(folder: Path) -> tuple[str, ...]:
    """Convolutions and an LSTM that classify waves, as in speech recognition."""
    waves, y = make_waves(3_000, 4_096, seed=10)
    pictures = spectra(waves)[:, None]
    network = ConvolvedSteps()
    train(network, pictures[:2_000], y[:2_000], epochs=3, rate=2e-3)
    return write(folder, network, (pictures[:500], y[:500]), (pictures[2_000:], y[2_000:]))


def gru(folder: Path) -> tuple[str, ...]:
    """A GRU that predicts the next eight values of a series, without labels."""
    random = np.random.default_rng(7)
    start = random.uniform(0, 6, (3_000, 1, 3))
    speed = random.uniform(0.1, 0.6, (3_000, 1, 3))
    series = np.sin(start + speed * np.arange(48)[None, :, None]).sum(2).astype(np.float32)
    x, y = series[:, :40, None], series[:, 40:]
    network = Recurrent(nn.GRU(1, 64, batch_first=True), 64, 8)
    train(network, x[:2_500], y[:2_500], epochs=10, loss=functional.mse_loss, rate=5e-3)
    return write(folder, network, (x[:200], None), (x[2_500:], None))


def wave_convolutions(folder: Path) -> tuple[str, ...]:
    """1-D convolutions on waves of a fifth of a second."""

    def step(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
        convolution = nn.Conv1d(inputs, outputs, size, stride, size // 2)
        return nn.Sequential(convolution, nn.BatchNorm1d(outputs), nn.ReLU())

    x, y = make_waves(5_000, 1_600, seed=8)
    x = x[:, None]
    layers = [step(1, 24, 32, 8), step(24, 48, 5, 2), step(48, 64, 5, 2), step(64, 64, 3, 2)]
    ends = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 6)]
    network = nn.Sequential(*layers, *ends)
    train(network, x[:3_500], y[:3_500], epochs=6)
    return write(folder, network, (x[:500], y[:500]), (x[3_500:], y[3_500:]))


def spectrogram(folder: Path) -> tuple[str, ...]:
    """Convolutions on log spectrograms of waves, with 40 samples."""
    waves, y = make_waves(3_000, 4_096, seed=9)
    pictures = spectra(waves)[:, None]
    network = nn.Sequential(block(1, 16, 2), block(16, 32, 2), block(32, 48, 2), head(48, 6))
    train(network, pictures[:2_500], y[:2_500], epochs=6)
    calibrating = (pictures[:40], y[:40])
    return write(folder, network, calibrating, (pictures[2_500:], y[2_500:]))


class Transformer(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Layers of attention, each with a normalization before it."""

    def __init__(self, width: int, heads: int, depth: int, tokens: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.positions = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.mixing = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        hidden = torch.full((tokens, tokens), -10_000.0).triu(1)
        self.register_buffer("mask", hidden if causal else torch.zeros(tokens, tokens))

    def attend(self, x: Tensor, layer: int) -> Tensor:
        """Map [N, tokens, width] to the same shape."""
        samples, tokens, width = x.shape
        size = width // self.heads
        mixed = self.mixing[layer](x).reshape(samples, tokens, 3, self.heads, size)
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(query @ key.transpose(-1, -2) * size**-0.5 + self.mask, -1)
        return self.out[layer]((weights @ value).transpose(1, 2).reshape(samples, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, tokens, width] to the same shape."""
        x = x + self.positions
        for layer in range(len(self.mixing)):
            x = x + self.attend(self.norms[2 * layer](x), layer)
            inner = functional.gelu(self.up[layer](self.norms[2 * layer + 1](x)))
            x = x + self.down[layer](inner)
        return self.norms[-1](x)


class Vision(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A transformer on patches of 4x4 pixels."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = Transformer(width, 4, depth, 64, causal=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures [N, 3, 32, 32] to logits."""
        return self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def vision(folder: Path) -> tuple[str, ...]:
    """A vision transformer on CIFAR-10."""
    x, y, x_test, y_test = cifar(6_000, 2_000)
    network = Vision(96, 3, 10)
    train(network, x, y, epochs=4, rate=1e-3)
    return write(folder, network, (x[:2_000], y[:2_000]), (x_test, y_test))


class Writer(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A decoder: the logits of the next character at each position."""

    def __init__(self, characters: int, width: int, depth: int, tokens: int) -> None:
        super().__init__()
        self.words = nn.Embedding(characters, width)
        self.layers = Transformer(width, 4, depth, tokens, causal=True)
        self.head = nn.Linear(width, characters)

    def forward(self, ids: Tensor) -> Tensor:
        """Map [N, tokens] to [N, tokens, characters]."""
        return self.head(self.layers(self.words(ids)))


def decoder(folder: Path) -> tuple[str, ...]:
    """A causal decoder of characters, on this project's documents; without labels."""
    docs = Path(__file__).parents[2] / "docs"
    text = "".join(path.read_text() for path in sorted(docs.glob("*.md")))
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64) % 128
    starts = np.random.default_rng(10).integers(0, len(codes) - 65, 4_000)
    windows = codes[starts[:, None] + np.arange(65)]
    x, y = windows[:, :-1], windows[:, 1:]
    network = Writer(128, 128, 3, 64)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    train(network, x[:3_600], y[:3_600], epochs=5, loss=loss)
    return write(folder, network, (x[:100], None), (x[3_600:3_800], None), name="ids")


class Unet(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two levels down and up, joined by concatenation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, width), block(width, 2 * width, 2)])
        self.middle = block(2 * width, 4 * width, 2)
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures [N, 3, H, W] to logits of two classes of each pixel."""
        first = self.down[0](x)
        second = self.down[1](first)
        inner = functional.interpolate(self.middle(second), scale_factor=2.0)
        inner = self.up[0](torch.cat([inner, second], 1))
        inner = functional.interpolate(inner, scale_factor=2.0)
        return self.head(self.up[1](torch.cat([inner, first], 1)))


def unet(folder: Path) -> tuple[str, ...]:
    """A U-Net that finds discs on pictures of CIFAR-10; without labels."""
    x, _, x_test, _ = cifar(2_000, 300)
    pictures = np.concatenate([x, x_test])
    random = np.random.default_rng(11)
    centre = random.uniform(8, 24, (len(pictures), 2, 1, 1))
    radius = random.uniform(4, 8, (len(pictures), 1, 1))
    rows = np.arange(32)[None, :, None] - centre[:, 0]
    columns = np.arange(32)[None, None, :] - centre[:, 1]
    discs = rows**2 + columns**2 < radius**2
    colours = random.uniform(0, 1, (len(pictures), 3, 1, 1))
    mixed = np.where(discs[:, None], 0.5 * pictures + 0.5 * colours, pictures).astype(np.float32)
    network = Unet(16)
    train(network, mixed[:2_000], discs[:2_000].astype(np.int64), epochs=3)
    return write(folder, network, (mixed[:200], None), (mixed[2_000:], None))


class Embedding(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Convolutions that map a picture to a vector of length 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            block(3, 32, 2), block(32, 64, 2), block(64, 96), head(96, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, 3, 32, 32] to [N, width]."""
        return functional.normalize(self.layers(x), dim=1)


def embedding(folder: Path) -> tuple[str, ...]:
    """An embedding of CIFAR-10, trained to bring the pictures of a class together."""
    x, y, x_test, _ = cifar(6_000, 300)
    network = Embedding(64)
    centres = functional.normalize(torch.randn(10, 64, generator=torch.manual_seed(12)), dim=1)

    def loss(made: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(10 * made @ centres.T, labels)

    train(network, x, y, epochs=4, loss=loss)
    return write(folder, network, (x[:200], None), (x_test, None))
