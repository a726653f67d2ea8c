"""The training of `method=qat`: distillation from FP32, with a checkpoint after each epoch."""

import hashlib
import io
import logging
import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from resnet8ptq.config.schema import QatConfig
from resnet8ptq.core import files
from resnet8ptq.core.console import track
from resnet8ptq.core.deadline import Deadline, TimeUpError
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.data.dataset import Split

log = logging.getLogger(__name__)

PADDING = 4  # pixels around a picture, for the random crop
POINTS = 10  # points of the loss curve in each epoch
RANGE_RATE = 1.0  # rate of the logarithms of `log_growth`, relative to the learning rate
VALIDATION_BATCH = 500

Point = dict[str, float]  # a point of a curve: `step`, and metrics by name


@dataclass
class _State:
    """The state of a training after `epoch` epochs, as a checkpoint stores it.

    Attributes:
        student, optimizer: the `state_dict` of each.
        best: the student's `state_dict` with the smallest loss on held-out samples so far.
        points: the points of the curves so far.
    """

    epoch: int
    student: dict[str, Any]
    optimizer: dict[str, Any]
    best: dict[str, Any]
    best_loss: float
    points: list[Point]


@dataclass(frozen=True)
class Trainer:
    """A training with its settings, networks and samples.

    Attributes:
        threads: number of threads of torch.
        student: the module to train, from network inputs [n, ...] to logits [n, classes].
        teacher: the FP32 network, with the same inputs and outputs.
        held_out: held-out training samples for the choice of the epoch.
        checkpoint: the file for continuing an interrupted training.
        log_point: called with each point of the curves, including points before an interruption.
        deadline: the time limit, at which the training stops; the weights of an incomplete epoch
            are lost.
        device: the device of student and teacher.
    """

    settings: QatConfig
    seed: int
    threads: int
    student: Any
    teacher: Any
    train: Split
    held_out: Split
    checkpoint: Path
    log_point: Callable[[Point], None]
    deadline: Deadline
    device: torch.device

    def run(self) -> tuple[int, list[Point]]:
        """Train the student and restore its best state; return the number of epochs and the curves.

        The best state has the smallest loss on held-out samples; it may be the untrained one.
        The number is that of complete epochs; after the time limit, the curves may have points of
        an incomplete one. Both include epochs before an interruption.

        Raises:
            QuantizationError: the loss on a training batch is NaN or infinite.
        """
        torch.set_num_threads(self.threads)
        optimizer = self._optimizer()
        state = self._resume(optimizer)
        with suppress(TimeUpError):
            while state.epoch < self.settings.epochs:
                self._train_epoch(state, optimizer)
                state.epoch += 1
                state.student = self._weights()
                state.optimizer = optimizer.state_dict()
                self._validate(state)
                _save(vars(state), self.checkpoint)
        self.student.load_state_dict(state.best)
        return state.epoch, state.points

    def _optimizer(self) -> torch.optim.Adam:
        """Return Adam; the `unit` of a tensor, its root mean square, scales the learning rate.

        With raw pixels and folded batch normalization, the weights of the first layer may be a
        hundred times smaller than others. LAMB (ICLR 2020) scales by the norm instead. The unit of
        `log_growth`, a logarithm, is `RANGE_RATE`; that of a tensor of zeros is 1.
        """
        groups = []
        for name, values in self.student.named_parameters():
            size = float(values.detach().square().mean().sqrt())
            unit = RANGE_RATE if name.endswith("log_growth") else size or 1.0
            groups.append({"params": [values], "unit": unit})
        return torch.optim.Adam(groups)

    def _resume(self, optimizer: torch.optim.Adam) -> _State:
        checkpoint = None
        if self.checkpoint.exists():
            checkpoint = _load(self.checkpoint)
        if checkpoint is not None:
            state = _State(**checkpoint)
            self.student.load_state_dict(state.student)
            optimizer.load_state_dict(state.optimizer)
            for point in state.points:
                self.log_point(point)
            log.info("qat: continues after epoch %d of %d", state.epoch, self.settings.epochs)
            return state

        # Otherwise start with the untrained student, which may stay the best
        student = self._weights()
        state = _State(0, student, optimizer.state_dict(), student, math.inf, [])
        self._validate(state)
        return state

    def _train_epoch(self, state: _State, optimizer: torch.optim.Adam) -> None:
        # Each epoch has its own generator, so that an interruption does not change the draws
        settings = self.settings
        epoch = state.epoch
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.train))
        starts = range(0, len(order), settings.batch_size)
        marks = {round(len(starts) * (i + 1) / POINTS) for i in range(POINTS)}
        losses: list[float] = []
        for batch in track(starts, f"Fine-tuning: epoch {epoch + 1} of {settings.epochs}"):
            self.deadline.check()
            step = epoch * len(starts) + batch // settings.batch_size
            progress = step / (settings.epochs * len(starts))

            # The rate falls to 0 along a cosine
            rate = (1 + math.cos(math.pi * progress)) / 2 * settings.learning_rate
            for group in optimizer.param_groups:
                group["lr"] = rate * group["unit"]

            # Take a step on a batch
            chosen = order[batch : batch + settings.batch_size]
            stored = self.train.stored[chosen]
            shown = self._augment(stored, random)
            loss, _ = self._loss(torch.from_numpy(self.train.prepare(shown)).to(self.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # Add the mean loss since the last point to the curve
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise QuantizationError(
                    f"method=qat: the loss is {losses[-1]} after {step} steps; "
                    f"qat.learning_rate={settings.learning_rate} is too large"
                )
            if step - epoch * len(starts) + 1 in marks:
                point = {"step": step + 1.0, "qat/loss": float(np.mean(losses))}
                self._add(state, {**point, "qat/learning_rate": rate})
                losses = []

    def _augment(self, stored: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
        """Return stored samples; pictures are shifted and mirrored at random, see `augment`."""
        if not self.train.has_pictures:
            return stored
        if self.train.channels_first:
            return np.moveaxis(augment(np.moveaxis(stored, 1, -1), random), -1, 1)
        return augment(stored, random)

    def _loss(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the student's logits.

        The target is the teacher's output. For a picture, it is the mean of the outputs for the
        picture and its mirror image.
        """
        with torch.no_grad():
            target = self.teacher(images)
            if self.train.has_pictures:
                width = 2 if self.train.channels_first else 1  # the width axis of a stored picture
                width_axis = 1 + (self.train.layout or (0, 1, 2)).index(width)
                target = (target + self.teacher(images.flip(width_axis))) / 2
        logits = self.student(images)
        return distillation_loss(logits, target, self.settings.temperature), logits

    def _validate(self, state: _State) -> None:
        """Add held-out loss and accuracy to the curves; keep the student with the smallest loss.

        Without labels that are classes, the classes that the teacher predicts stand in for them.
        """
        # Sum over batches, because a batch may be smaller than the others
        right = 0
        total = 0.0
        labels = self.held_out.labels
        size = self.held_out.limit(VALIDATION_BATCH)
        starts = range(0, len(self.held_out), size)
        with torch.no_grad():
            for start, stored in zip(starts, self.held_out.batches(size), strict=True):
                batch = torch.from_numpy(stored).to(self.device)
                loss, logits = self._loss(batch)
                if labels is None or labels.dtype.kind != "i":
                    classes = self.teacher(batch).argmax(dim=1)
                else:
                    classes = torch.from_numpy(labels[start : start + size]).to(self.device)
                right += int((logits.argmax(dim=1) == classes).sum())
                total += float(loss) * len(batch)

        # Keep the student with the smallest loss
        mean = total / len(self.held_out)
        accuracy = right / len(self.held_out)
        if mean < state.best_loss:
            state.best = state.student
            state.best_loss = mean

        # The point lies at the end of the epoch
        steps = state.epoch * -(-len(self.train) // self.settings.batch_size)
        point = {"qat/validation_loss": mean, "qat/validation_accuracy": accuracy}
        self._add(state, {"step": float(steps), **point})
        log.info(
            "qat: epoch %d of %d: held-out loss %.5f, accuracy %.2f %%",
            state.epoch,
            self.settings.epochs,
            mean,
            100 * accuracy,
        )

    def _weights(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.student.state_dict().items()}

    def _add(self, state: _State, point: Point) -> None:
        state.points.append(point)
        self.log_point(point)


def distillation_loss(
    logits: torch.Tensor, target: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the mean KL divergence of softened probabilities, times temperature squared.

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015.
    """
    student = functional.log_softmax(logits / temperature, dim=1)
    teacher = functional.log_softmax(target / temperature, dim=1)
    divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return divergence * temperature**2


def augment(images: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Return images [n, H, W, C], each shifted at random and mirrored with probability 0.5.

    An image moves by at most `PADDING` pixels along each axis. Pixels of the edge fill the gaps.
    """
    count, height, width, _ = images.shape
    around = (PADDING, PADDING)
    padded = np.pad(images, ((0, 0), around, around, (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    down, right = random.integers(0, 2 * PADDING + 1, size=(2, count))
    shifted = windows[np.arange(count), down, right]  # [n, C, H, W], a copy
    flipped = random.random(count) < 0.5
    shifted[flipped] = shifted[flipped][..., ::-1]
    return np.moveaxis(shifted, 1, -1)


def _save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with its SHA-256 in front, because torch does not detect flipped bits."""
    content = io.BytesIO()
    torch.save(state, content)
    digest = hashlib.sha256(content.getvalue()).digest()
    files.write_bytes(path, digest + content.getvalue())


def _load(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint; None, with a warning, if it is damaged or torch cannot read it."""
    whole = path.read_bytes()
    digest = whole[:32]
    content = whole[32:]
    if hashlib.sha256(content).digest() == digest:
        try:
            return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        except (RuntimeError, pickle.UnpicklingError):  # torch of another version wrote the file
            pass
    log.warning("qat: %s is damaged; training starts again", path)
    return None
