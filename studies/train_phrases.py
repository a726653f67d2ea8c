"""Trains a small transformer on the phrases of the tests and exports it as ONNX.

    python -m studies.train_phrases                  replaces tests/helpers/phrases/encoder.onnx
    python -m studies.train_phrases epochs=10 output=PATH

An epoch has 16,000 new phrases; training takes about a minute on one core. The default arguments
made the network of this package. The seeds are fixed, but sums may differ in the last digit on
another processor, so a second run may give slightly different weights.
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from resnet8ptq.core import command, files
from resnet8ptq.core.records import Array, unpack
from tests.helpers.phrases import (
    CLASS_NAMES,
    IDS,
    NETWORK,
    START,
    TOKENS,
    encode,
    encode_split,
    write_seeded,
)

_SEED = 1  # of the weights and of the order of the phrases
_PHRASES_SEED = 1000  # plus the epoch; the seeds of the published splits are 1 and 2
_PER_CLASS = 2000  # phrases written for each epoch
_BATCH = 64
_PEAK_RATE = 3e-3
_MASKED = -10_000.0  # added to the scores of padding, as BERT does
_OPSET = 17


class Layer(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A layer of BERT: attention and a network of two layers, each normalized after its sum."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map [N, L, width] to [N, L, width]; `mask` [N, 1, 1, L] is added to the scores."""
        samples, length, width = x.shape
        size = width // self.heads
        query, key, value = (
            made(x).reshape(samples, length, self.heads, size).transpose(1, 2)
            for made in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) * size**-0.5
        mixed = torch.softmax(scores + mask, -1) @ value
        mixed = mixed.transpose(1, 2).reshape(samples, length, width)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Encoder(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Maps tokens to class logits, which are computed from the first token.

    Args:
        width: the width of the embeddings; `hidden`: the width of the inner layers.
    """

    def __init__(self, width: int = 64, heads: int = 4, hidden: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(START + 1 + len(IDS), width)
        self.positions = nn.Embedding(TOKENS, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(depth))
        self.head = nn.Linear(width, len(CLASS_NAMES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits [N, classes] from ids and mask, int64 [N, L]; the mask is 0 at padding."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(positions))
        mask = (1 - attention_mask[:, None, None, :].to(x.dtype)) * _MASKED
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[:, 0])


def train(epochs: int) -> Encoder:
    """Train a network on new phrases in every epoch, so that none is seen twice."""
    torch.manual_seed(_SEED)
    network = Encoder()
    steps = epochs * -(-_PER_CLASS * len(CLASS_NAMES) // _BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK_RATE, steps)
    for epoch in range(epochs):
        phrases, labels = write_seeded(_PHRASES_SEED + epoch, _PER_CLASS)
        tokens, losses = encode(phrases), []
        for start in range(0, len(labels), _BATCH):
            some = slice(start, start + _BATCH)
            logits = network(*_tensors(tokens[some]))
            loss = functional.cross_entropy(logits, torch.from_numpy(labels[some]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}/{epochs}: loss {np.mean(losses):.3f}", flush=True)
    return network.eval()


def export(network: Encoder, path: Path) -> None:
    """Write a network as ONNX, with inputs of any batch size and any length."""
    free = {0: "batch", 1: "length"}
    names = ["input_ids", "attention_mask"]
    example = _tensors(encode(["show rain", "show"]))
    with warnings.catch_warnings(action="ignore"):  # the exporter of traces is deprecated
        torch.onnx.export(
            network,
            example,
            str(path),
            input_names=names,
            output_names=["logits"],
            opset_version=_OPSET,
            dynamic_axes={**dict.fromkeys(names, free), "logits": {0: "batch"}},
            dynamo=False,
        )


def _tensors(tokens: Array) -> tuple[Tensor, ...]:
    """Return the ids and the mask, cut to the longest sample."""
    arrays = unpack(tokens)
    length = int(arrays["attention_mask"].sum(1).max())
    return tuple(torch.from_numpy(array[:, :length]) for array in arrays.values())


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.train_phrases`."""

    epochs: int = 10
    output: str = str(NETWORK)


def main() -> None:
    """Train, export, and print the accuracy on the test split."""
    arguments = command.parse_words(sys.argv[1:], Arguments, __doc__)
    network = train(arguments.epochs)
    with files.atomic(Path(arguments.output)) as temporary:
        export(network, temporary)
    tokens, labels = encode_split("test")
    with torch.no_grad():
        classes = network(*_tensors(tokens)).argmax(1).numpy()
    accuracy = float((classes == labels).mean())
    print(f"test accuracy {accuracy:.4f}; saved {arguments.output}")


if __name__ == "__main__":
    main()
