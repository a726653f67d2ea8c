"""How often does the paired test of a task pass, or fail, a model that is exactly at the limit?

    python studies/task_errors.py [trials=400] [task=NAME]

A population of samples with the outputs of FP32 and of a model has a known loss, which is the
limit. Each trial draws samples of it, with replacement, and runs the test of the task at the level
of 5%. It also tests at twice the limit, and tests a model without a loss, which should pass: FP32
and the model exchange their outputs for half of the samples. Writes task_errors.csv; with `task`,
only the rows of tasks whose name starts with NAME are replaced.
"""

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks import (
    classification,
    ctc,
    dense,
    deviation,
    joining,
    multilabel,
    perplexity,
    regression,
    segmentation,
    tokens,
    verification,
)
from resnet8ptq.tasks.detection import ap_bootstrap
from resnet8ptq.tasks.detection import task as detection
from resnet8ptq.tasks.detection.average_precision import Matches
from resnet8ptq.tasks.scoring.classwise import ClasswiseScores, draw_weights
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.outputs import LOGITS, Outputs, Targets
from resnet8ptq.tasks.scoring.statistics import Margin, Values
from resnet8ptq.tasks.task import Task

LEVEL = 0.05
SIZE = 20_000  # of a population
SAMPLES = (50, 200)
RESAMPLES = 400
SEED = 0


@dataclass(frozen=True)
class Population:
    """Targets, and the outputs of FP32 and of a model, of `SIZE` samples."""

    task: Task
    targets: Targets
    fp32: Outputs
    model: Outputs

    def take(self, rows: NDArray[np.int64]) -> "Population":
        """Return the samples at `rows`."""
        labels = self.targets.labels
        targets = replace(self.targets, labels=None if labels is None else labels[rows])
        both = (
            replace(outputs, values=tuple(values[rows] for values in outputs.values))
            for outputs in (self.fp32, self.model)
        )
        return Population(self.task, targets, *both)

    def margins(self, *limits: float) -> list[Margin]:
        """Return the margin at each limit."""
        comparison = self.compare()
        metric = self.task.metric
        paired = comparison.paired
        return [paired.margin(metric, limit, comparison.model.total) for limit in limits]

    def exchange(self, random: np.random.Generator) -> "Population":
        """Return the samples with the outputs of both networks exchanged for half of them."""
        rows = np.flatnonzero(random.random(len(self.fp32)) < 0.5)
        both = []
        for ours, theirs in ((self.fp32, self.model), (self.model, self.fp32)):
            values = []
            for own, other in zip(ours.values, theirs.values, strict=True):
                mixed = own.copy()
                mixed[rows] = other[rows]
                values.append(mixed)
            both.append(replace(ours, values=tuple(values)))
        return replace(self, fp32=both[0], model=both[1])

    def compare(self) -> Comparison:
        """Score both networks."""
        scores = (self.task.score(each, self.targets) for each in (self.model, self.fp32))
        return self.task.compare(*scores)


def segmented(random: np.random.Generator, shares: Sequence[float]) -> Population:
    """Masks of up to three of five classes, drawn by their shares; some have more wrong pixels."""
    common = random.choice(5, (SIZE, 3), p=shares)
    masks = common[np.arange(SIZE)[:, None], random.integers(0, 3, (SIZE, 64))].astype(np.uint8)
    hard = random.beta(1, 6, (SIZE, 1))
    fp32 = np.where(random.random(masks.shape) < hard, random.integers(0, 5, masks.shape), masks)
    flips = random.random(masks.shape) < 0.1 * hard
    model = np.where(flips, random.integers(0, 5, masks.shape), fp32)
    task = segmentation.build(tuple("abcde"), resamples=RESAMPLES)
    outputs = (Outputs((each.astype(np.uint8).reshape(SIZE, 8, 8),)) for each in (fp32, model))
    return Population(task, Targets(masks.reshape(SIZE, 8, 8)), *outputs)


def measured(random: np.random.Generator) -> Population:
    """Depth of 16 pixels, whose relative error differs by picture; the model adds an error."""
    depth = random.uniform(1, 9, (SIZE, 4, 4))
    fp32 = depth * (1 + random.gamma(2, 0.04, (SIZE, 1, 1)) * random.normal(size=depth.shape))
    model = fp32 + random.gamma(1, 0.1, (SIZE, 1, 1)) * random.normal(size=depth.shape)
    outputs = (Outputs((each.astype(np.float32),)) for each in (fp32, model))
    return Population(dense.build("rmse", resamples=RESAMPLES), Targets(depth), *outputs)


def noisy(random: np.random.Generator) -> Population:
    """Outputs without labels, whose noise differs by sample (log-normal)."""
    fp32 = random.normal(size=(SIZE, 10))
    model = fp32 + 0.05 * np.exp(0.5 * random.normal(size=(SIZE, 1))) * random.normal(
        size=fp32.shape
    )
    return Population(deviation.build(), Targets(), Outputs((fp32,)), Outputs((model,)))


def labelled(random: np.random.Generator) -> Population:
    """Samples with three labels of shares 30%, 10% and 3%; the model's logits are noisier."""
    labels = random.random((SIZE, 3)) < (0.3, 0.1, 0.03)
    fp32 = 3 * labels + random.normal(size=labels.shape)
    model = fp32 + 0.3 * random.normal(size=labels.shape)
    task = multilabel.build(("a", "b", "c"), resamples=RESAMPLES)
    return Population(task, Targets(labels), Outputs((fp32,)), Outputs((model,)))


class Gallery(Population):
    """Identities with four samples each; a trial draws whole identities."""

    def take(self, rows: NDArray[np.int64]) -> "Population":
        """Return the identities at `rows`; an identity drawn twice counts as two."""
        samples = (4 * rows[:, np.newaxis] + np.arange(4)).reshape(-1)
        targets = self.draw(samples, np.repeat(np.arange(len(rows)), 4))
        both = (
            replace(outputs, values=(outputs.values[0][samples],))
            for outputs in (self.fp32, self.model)
        )
        return Population(self.task, targets, *both)

    def draw(self, samples: NDArray[np.int64], numbers: NDArray[np.int64]) -> Targets:
        """Return the targets of `samples` of the identities or clips `numbers`."""
        return Targets(numbers)


class Clips(Gallery):
    """Clips of four windows each; a trial draws whole clips."""

    def draw(self, samples: NDArray[np.int64], numbers: NDArray[np.int64]) -> Targets:
        """Return the targets of the windows `samples` of the clips `numbers`."""
        assert self.targets.labels is not None
        return Targets(self.targets.labels[samples], numbers)


def heard(how: str, random: np.random.Generator) -> Population:
    """Logits of four classes in windows; whole clips are hard; the model's logits are noisier."""
    labels = np.repeat(random.integers(0, 4, SIZE), 4)
    hard = np.repeat(random.normal(size=(SIZE, 4)), 4, axis=0)
    fp32 = 2 * np.eye(4)[labels] + hard + random.normal(size=hard.shape)
    model = fp32 + 0.7 * random.normal(size=hard.shape)
    task = joining.join(classification.build(tuple("abcd")), how)
    targets = Targets(labels, np.repeat(np.arange(SIZE), 4))
    return Clips(task, targets, *(Outputs((each,), None, LOGITS) for each in (fp32, model)))


def valued(random: np.random.Generator) -> Population:
    """A value for each window, whose error is partly that of the clip; the model's is larger."""
    labels = np.repeat(random.normal(size=(SIZE, 1)), 4, axis=0)
    common = np.repeat(random.gamma(1, 0.3, (SIZE, 1)) * random.normal(size=(SIZE, 1)), 4, axis=0)
    fp32 = labels + common + 0.3 * random.normal(size=labels.shape)
    model = fp32 + 0.3 * random.normal(size=labels.shape)
    task = joining.join(regression.build(resamples=RESAMPLES), "mean")
    targets = Targets(labels, np.repeat(np.arange(SIZE), 4))
    return Clips(task, targets, Outputs((fp32,)), Outputs((model,)))


def recognized(primary: str, random: np.random.Generator) -> Population:
    """Embeddings of `SIZE` identities; the model's are noisier."""
    people = np.repeat(random.normal(size=(SIZE, 8)), 4, axis=0)
    fp32 = people + 0.6 * random.normal(size=people.shape)
    model = fp32 + 0.3 * random.normal(size=people.shape)
    task = verification.build(primary, 0.05, resamples=RESAMPLES)
    targets = Targets(np.repeat(np.arange(SIZE), 4))
    return Gallery(task, targets, Outputs((fp32,)), Outputs((model,)))


def read(primary: str, random: np.random.Generator) -> Population:
    """Lines of 2 to 12 symbols and spaces, of which some are hard; the model misreads more."""
    alphabet = ctc.Alphabet(("", *"abcd "), 0, 2)
    lines = random.integers(1, 6, (SIZE, 12)) * (np.arange(12) < random.integers(2, 13, (SIZE, 1)))
    frames = np.zeros((SIZE, 24), np.int32)
    frames[:, ::2] = lines
    texts = np.array([alphabet.decode(line) for line in frames])
    hard = random.beta(1, 9, (SIZE, 1))
    flips = random.random(frames.shape) < hard
    fp32 = np.where(flips, random.integers(0, 6, frames.shape), frames)
    flips = random.random(frames.shape) < 0.2 * hard
    model = np.where(flips, random.integers(0, 6, frames.shape), fp32)
    task = ctc.build(primary, alphabet, RESAMPLES)
    outputs = (Outputs((each.astype(np.int32),)) for each in (fp32, model))
    return Population(task, Targets(texts), *outputs)


def tagged(random: np.random.Generator) -> Population:
    """Sentences of 4 to 15 words with few entities, of which some are hard; the model errs more."""
    tags = ("O", "B-A", "I-A", "B-B", "I-B")
    shares = (0.8, 0.06, 0.04, 0.06, 0.04)
    labels = random.choice(5, (SIZE, 15), p=shares)
    hard = random.beta(1, 12, (SIZE, 1))

    def replaced(classes: NDArray[np.int64], share: NDArray[np.float64]) -> NDArray[np.int64]:
        wrong = random.random(classes.shape) < share
        return np.where(wrong, random.choice(5, classes.shape, p=shares), classes)

    fp32 = replaced(labels, hard)
    model = replaced(fp32, 0.2 * hard)
    labels[np.arange(15) >= random.integers(4, 16, (SIZE, 1))] = -100
    task = tokens.build("entity_f1", tokens.TagDecoder(tags, tags), RESAMPLES)
    outputs = (Outputs((np.eye(5, dtype=np.float32)[each],)) for each in (fp32, model))
    return Population(task, Targets(labels), *outputs)


def spoken(random: np.random.Generator) -> Population:
    """Windows of 32 tokens, of which some are hard to predict; the model's logits are noisier."""
    words = random.integers(0, 8, (SIZE, 32))
    hard = random.gamma(2, 0.7, (SIZE, 1, 1))
    following = np.eye(8)[np.roll(words, -1, axis=1)]
    fp32 = 2 * following + hard * random.normal(size=following.shape)
    model = fp32 + 0.3 * hard * random.normal(size=following.shape)
    reduce = perplexity.NextToken(0, 8)
    both = (Outputs(reduce([logits], words)) for logits in (fp32, model))
    return Population(perplexity.build(reduce, RESAMPLES), Targets(), *both)


@dataclass(frozen=True)
class MatchedScores(ClasswiseScores):
    """Detections whose correctness is known; `outputs` and `matches` hold them."""

    matches: Sequence[Matches]
    resamples: int

    @property
    def of_class(self) -> Values:
        """AP of each class [classes]."""
        weights = np.ones((1, self.total), np.int32)
        return np.asarray(ap_bootstrap.by_class(self.matches, weights)[0])

    @property
    def value(self) -> float:
        """AP."""
        return float(np.nanmean(self.of_class))

    @property
    def by_class(self) -> Values:
        """AP of each class on each bootstrap sample [resamples, classes]."""
        return ap_bootstrap.by_class(self.matches, draw_weights(self.total, self.resamples))

    @property
    def samples_of_class(self) -> NDArray[np.int64]:
        """Number of pictures with objects of each class [classes]."""
        return np.array([np.count_nonzero(match.objects) for match in self.matches])


ROWS = 12  # of an object's mask; a mask that lacks n of them has an IoU of 1 - n / 12


def match(outputs: Outputs, targets: Targets) -> MatchedScores:
    """Score detections [n, 4, 3]: missing rows, class and score, in the order of the objects."""
    lost, labels, scores = np.moveaxis(outputs.values[0], 2, 0)
    kinds = np.asarray(targets.labels)
    thresholds = np.linspace(0.5, 0.95, 10)[:, np.newaxis] - 1e-12
    matches = []
    for kind in range(2):
        picture, place = np.nonzero(labels == kind)
        order = np.argsort(-scores[picture, place], kind="stable")
        picture, place = picture[order], place[order]
        right = (1 - lost[picture, place] / ROWS >= thresholds) & (kinds[picture, place] == kind)
        objects = np.count_nonzero(kinds == kind, axis=1)
        matches.append(Matches(picture, right, np.zeros_like(right), objects))
    return MatchedScores(outputs, matches, RESAMPLES)


def outlined(random: np.random.Generator) -> Population:
    """Four masks of two classes in each picture; in hard pictures FP32's lack rows, or have the
    other class. The model's lack more rows, and more have the other class.
    """
    kinds = (random.random((SIZE, 4)) < 0.3).astype(np.int64)
    hard = random.gamma(1, 1, (SIZE, 1))
    lost = random.poisson(hard, (SIZE, 4))
    wrong = random.random((SIZE, 4)) < 0.05 * hard
    more = random.poisson(0.2 * hard, (SIZE, 4))
    differ = random.random((SIZE, 4)) < 0.01 * hard
    logits = 2 - hard + random.normal(size=(SIZE, 4))
    noisier = logits + 0.3 * random.normal(size=logits.shape)

    def detect(
        lost: NDArray[np.int64], labels: NDArray[np.int64], logits: NDArray[np.float64]
    ) -> Outputs:
        scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
        return Outputs((np.stack([lost.clip(0, ROWS - 1), labels, scores], axis=2),))

    task = replace(detection.build(("a", "b"), name="instance_segmentation"), score=match)
    fp32 = detect(lost, kinds ^ wrong, logits)
    model = detect(lost + more, kinds ^ wrong ^ differ, noisier)
    return Population(task, Targets(kinds), fp32, model)


# A task, and the function that draws its population.
TASKS: dict[str, Callable[[np.random.Generator], Population]] = {
    "segmentation": partial(segmented, shares=(0.2, 0.2, 0.2, 0.2, 0.2)),
    "segmentation, a class in 6% of the pictures": partial(
        segmented, shares=(0.4, 0.3, 0.2, 0.08, 0.02)
    ),
    "dense": measured,
    "deviation": noisy,
    "multilabel": labelled,
    "verification eer": partial(recognized, "eer"),
    "classification, mean of 4 windows": partial(heard, "mean"),
    "classification, votes of 4 windows": partial(heard, "vote"),
    "regression, mean of 4 windows": valued,
    "tokens": tagged,
    "ctc cer": partial(read, "cer"),
    "ctc wer": partial(read, "wer"),
    "perplexity": spoken,
    "instance_segmentation": outlined,
}


def simulate(population: Population, samples: int, trials: int) -> list[float]:
    """Return the shares of trials that pass at the limit, fail there, pass at twice the limit, and
    pass without a loss.
    """
    limit = population.compare().loss()
    draws = np.random.default_rng(SEED + samples)
    exchanges = np.random.default_rng(SEED)
    p_values = []
    of_equal = []
    for trial in range(trials):
        drawn = population.take(draws.integers(0, SIZE, samples))
        at_limit, at_twice = drawn.margins(limit, 2 * limit)
        p_values.append((at_limit.p_within, at_limit.p_beyond, at_twice.p_within))
        # In every fourth trial, since it takes as long as the others together. Not for tasks with a
        # reference: exchanged with it, a model is as far from it.
        if trial % 4 == 0 and drawn.task.reference is None:
            [margin] = drawn.exchange(exchanges).margins(limit)
            of_equal.append(margin.p_within)
    shares: list[float] = (np.array(p_values) <= LEVEL).mean(axis=0).tolist()
    return [*shares, float(np.mean([p <= LEVEL for p in of_equal])) if of_equal else np.nan]


def main() -> None:
    """Simulate the tasks, and write the table."""
    words = dict(word.split("=") for word in sys.argv[1:])
    trials = int(words.get("trials", 400))
    chosen = words.get("task", "")
    path = Path(__file__).with_suffix(".csv")
    rows: list[list[object]] = [
        ["task", "metric", "samples", "trials", "passed", "failed", "passed_twice", "passed_equal"]
    ]
    with path.open(newline="") as file:
        kept = [row for row in [*csv.reader(file)][1:] if not row[0].startswith(chosen)]
    for name, draw in TASKS.items():
        rows += [row for row in kept if row[0] == name]
        if not name.startswith(chosen):
            continue
        population = draw(np.random.default_rng(SEED))
        for samples in SAMPLES:
            shares = simulate(population, samples, trials)
            metric = population.task.metric.title
            rows.append([name, metric, samples, trials, *(f"{share:.4f}" for share in shares)])
            print(*rows[-1], flush=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
