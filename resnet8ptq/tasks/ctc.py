"""`task=ctc`: lines of text, or speech, decoded greedily; scored by character and word error rate.

CTC: Graves et al., "Connectionist Temporal Classification", ICML 2006. The largest value of a frame
gives the symbol; repeated symbols are merged, and blanks dropped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import CtcConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, ModelError, errors_as
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, ReducedScores, of_sums, ratio
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import (
    Array,
    Outputs,
    Targets,
    TaskContext,
    check_labels,
    describe,
)
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, Margin
from resnet8ptq.tasks.task import Scope, Table, Task, TaskFiles, TaskType, hash_file

METRICS = {
    "cer": Metric("cer", "character error rate", maximize=False, percent=True),
    "wer": Metric("wer", "word error rate", maximize=False, percent=True),
}
EXPECTED = "expected a file with a symbol in each line, or a vocab.json of symbols and numbers"
MAX_BYTES = 2**24  # largest file of an alphabet

Counts = NDArray[np.float64]


@dataclass(frozen=True)
class Alphabet:
    """The symbols of an output's classes.

    Attributes:
        symbols: a text for each class; empty for the blank and for special tokens of a JSON file.
        output: the index of the output.
        axis: the axis of the classes in a batch's output [n, frames, classes] or [n, classes,
            frames].
        blank: the class of the blank.
    """

    symbols: tuple[str, ...]
    output: int
    axis: int
    blank: int = 0

    def __call__(
        self, outputs: Sequence[Array], inputs: Array | None = None
    ) -> tuple[NDArray[np.int32]]:
        """Return the class of each frame, counted from the blank [n, frames].

        The evaluation pads shorter batches with zeros, which are blanks.
        """
        classes = outputs[self.output].argmax(axis=self.axis)
        return (((classes - self.blank) % len(self.symbols)).astype(np.int32),)

    def decode(self, classes: NDArray[np.int32]) -> str:
        """Return the text of a line, without outer spaces.

        Args:
            classes: the frames of the line, as `__call__` returns them [frames].
        """
        if not len(classes):
            return ""
        starts = np.append(True, classes[1:] != classes[:-1])  # where the symbol changes
        symbols = [*self.symbols[self.blank :], *self.symbols[: self.blank]]
        return "".join(symbols[number] for number in classes[starts]).strip()


@dataclass(frozen=True)
class LineScores(ReducedScores):
    """The error rate of lines of text, and the lines.

    Attributes:
        texts, labels: the decoded and the true text of each line.
        errors: the number of wrong characters of each line [n], see `count_errors`.
    """

    texts: Sequence[str] = ()
    labels: Sequence[str] = ()
    errors: Counts = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def errors_of_others(self) -> Counts:
        """The number of wrong characters of each line against the true text of the next line [n].

        The last line is compared with the first.
        """
        others = [*self.labels[1:], *self.labels[:1]]
        return np.array(list(map(count_errors, self.texts, others)))


def count_errors(said: Sequence[str], true: Sequence[str]) -> float:
    """Return the edit distance of two sequences (Levenshtein, 1966).

    >>> count_errors("kitten", "sitting")
    3.0
    """
    columns = np.arange(len(true) + 1)
    truth = np.array(list(true), np.object_)
    row = columns
    for number, symbol in enumerate(said, 1):
        best = np.minimum(row[:-1] + (truth != symbol), row[1:] + 1)
        row = np.append(number, best) - columns
        row = np.minimum.accumulate(row) + columns  # insertions, from left to right
    return float(row[-1])


def build(primary: str = "cer", alphabet: Alphabet | None = None, resamples: int = 9999) -> Task:
    """Return `task=ctc` with these settings.

    Args:
        primary: `cer` or `wer`.
        alphabet: decodes the outputs; None for a finished run.
    """
    other = METRICS["cer"]
    if primary == "cer":
        other = METRICS["wer"]
    return Task(
        "ctc",
        METRICS[primary],
        partial(_score, primary, alphabet, resamples),
        BOOTSTRAP,
        beside=(other,),
        scope=Scope(reduction=alphabet),
        files=TaskFiles(tables=_list_lines),
        doubt=partial(_doubt, METRICS[primary]),
    )


def _score(
    primary: str, alphabet: Alphabet | None, resamples: int, outputs: Outputs, targets: Targets
) -> LineScores:
    assert alphabet is not None  # only finished runs have none
    [frames] = outputs.values

    # Shorter samples have fewer frames, in proportion
    ends = np.full(len(frames), frames.shape[1])
    if targets.lengths is not None and targets.whole_length:
        share = targets.lengths / targets.whole_length
        ends = np.ceil(frames.shape[1] * share).astype(np.int64)

    # Count the errors of each line, from which the bootstrap adds up rates
    texts = []
    labels = []
    characters = []  # wrong and all characters of each line
    words = []  # wrong and all words of each line
    for line, end, label in zip(frames, ends, np.asarray(targets.labels).tolist(), strict=True):
        said = alphabet.decode(line[:end])
        true = label.strip()  # as jiwer does
        true_words = true.split()
        texts.append(said)
        labels.append(true)
        wrong_characters = count_errors(said, true)
        wrong_words = count_errors(said.split(), true_words)
        characters.append((wrong_characters, len(true)))
        words.append((wrong_words, len(true_words)))

    # Make the error rates functions of line indices, for the bootstrap
    by_character = np.array(characters, np.float64)
    cer = of_sums(ratio, by_character)
    wer = of_sums(ratio, np.array(words, np.float64))
    every = np.arange(len(texts))
    others: Metrics
    if primary == "cer":
        statistic = cer
        others = {"wer": wer(every)}
    else:
        statistic = wer
        others = {"cer": cer(every)}
    return LineScores(
        outputs,
        statistic,
        resamples,
        others=others,
        texts=texts,
        labels=labels,
        errors=by_character[:, 0],
    )


def _list_lines(comparison: Comparison) -> dict[str, Table]:
    """Return the lines whose text changed, with the most additional errors first."""
    model = comparison.model
    fp32 = comparison.baseline
    more = model.errors - fp32.errors
    rows: list[list[object]] = [["line", "true", "fp32", "quantized", "more_errors"]]
    for line in np.argsort(-more, kind="stable").tolist():
        before = fp32.texts[line]
        after = model.texts[line]
        if after != before:
            rows.append([line, model.labels[line], before, after, int(more[line])])
    return {"changed_lines.csv": rows}


def _doubt(metric: Metric, baseline: LineScores, expected: float | None) -> str | None:
    """Return a doubt if the texts are not proven nearer to their own lines than to others."""
    excess = baseline.errors - baseline.errors_of_others
    if Margin.of_mean(excess).p_within <= SIGNIFICANCE:
        return None
    return (
        f"NEAR CHANCE, {metric.show(baseline.value)}: the texts fit other lines as well (do "
        "task.alphabet and task.blank fit?)"
    )


def read_alphabet(path: Path) -> list[str]:
    """Return the symbols of an alphabet file, in the order of the classes.

    A JSON file is a vocab.json of Hugging Face. If it has no space, `|` stands for the space. The
    symbols of its special tokens, such as `<pad>`, are empty.

    Raises:
        ConfigError: the file is not readable as an alphabet.
    """
    with errors_as(ConfigError, f"task.alphabet: got {path}", EXPECTED):
        text = files.read_bytes(path, MAX_BYTES).decode("utf-8")
        if path.suffix == ".json":
            return _read_vocabulary(json.loads(text))
        return text.removesuffix("\n").replace("\r", "").split("\n")


def _read_vocabulary(numbers: Mapping[str, int]) -> list[str]:
    if not isinstance(numbers, dict):
        raise ValueError("no mapping from symbols to numbers")
    if sorted(numbers.values()) != list(range(len(numbers))):
        raise ValueError("its numbers are not 0, 1, ...")

    # Special tokens print nothing, and Hugging Face writes the space as |
    symbols = []
    for symbol in sorted(numbers, key=numbers.__getitem__):
        if len(symbol) > 1 and symbol[0] in "<[":  # the symbol is a special token
            symbol = ""
        elif symbol == "|" and " " not in numbers:
            symbol = " "
        symbols.append(symbol)
    return symbols


def _fit(config: CtcConfig, outputs: Mapping[str, tuple[int | None, ...]]) -> Alphabet:
    """Return the alphabet, with the first output that has a class for each symbol and the blank.

    The file may have a line for the blank or not.

    Raises:
        ConfigError: `task.alphabet` is null or not readable, or `task.blank` is no class of the
            network.
        ModelError: no output fits.
    """
    if config.alphabet is None:
        raise ConfigError(f"task.alphabet: got null, {EXPECTED}; try task=ctc task.alphabet=FILE")
    symbols = read_alphabet(Path(config.alphabet))

    # Classes are usually last; the blank may be one more class than the file has
    for number, shape in enumerate(outputs.values()):
        for axis in (1, 0):
            if len(shape) != 2 or shape[axis] not in (len(symbols), len(symbols) + 1):
                continue

            # The blank may be counted from the end
            classes = shape[axis] or 0
            if not -classes <= config.blank < classes:
                raise ConfigError(
                    f"task.blank: got {config.blank}, expected one of the network's {classes} "
                    "classes, from 0, or -1 for the last"
                )
            blank = config.blank % classes
            if classes > len(symbols):
                symbols.insert(blank, "")
            symbols[blank] = ""
            return Alphabet(tuple(symbols), number, axis + 1, blank)
    raise ModelError(
        f"returns {describe(outputs)}; {config.alphabet} has {len(symbols)} symbols; expected one "
        f"output [frames, {len(symbols) + 1}], with the blank (or {len(symbols)}, if the file has "
        "a line for it)"
    )


def _make(config: CtcConfig, context: TaskContext) -> Task:
    expected = "the text of each line (a column named transcript, or an array of texts)"
    check_labels("ctc", context, "U", expected)
    if not any(np.asarray(context.labels).tolist()):
        raise ConfigError(f"task=ctc: the texts of {context.data} are empty")
    return build(config.primary, _fit(config, context.outputs), config.resamples)


CTC = TaskType(
    make=_make,
    recall=lambda config, names: build(config.primary, resamples=config.resamples),
    schema=CtcConfig,
    fingerprint=partial(hash_file, "alphabet"),
)
