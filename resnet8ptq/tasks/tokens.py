"""`task=tokens`: the tag of each word, scored by the F1 of entities, or by accuracy.

The rules for entities are those of seqeval 1.2.2: of its default mode, which follows conlleval of
the CoNLL shared tasks, or of its strict mode for IOB2, IOBES and BILOU. The package seqeval, last
released in 2020, is not needed.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import TokensConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, ModelError, errors_as
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, Replicates
from resnet8ptq.tasks.scoring.classwise import (
    CLASSES,
    ClasswiseScores,
    count_lost,
    draw_classes,
    draw_weights,
    list_classes,
)
from resnet8ptq.tasks.scoring.comparison import doubt_below
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import (
    Array,
    Outputs,
    Targets,
    TaskContext,
    check_labels,
    describe,
)
from resnet8ptq.tasks.scoring.statistics import Values
from resnet8ptq.tasks.task import Scope, Task, TaskFiles, TaskType, hash_file, keep_values

METRICS = {
    "entity_f1": Metric("entity_f1", "entity F1", percent=True),
    "token_accuracy": Metric("token_accuracy", "token accuracy", percent=True),
}
ENTITY_TAG = re.compile(r"O|[BIESLU](-.*)?")
EXPECTED = "expected a file with a tag in each line, or a config.json of Hugging Face with id2label"
MAX_BYTES = 2**24  # largest file of tags

Tags = Sequence[str]
Spans = set[tuple[str, int, int]]  # kind, first word, last word
Find = Callable[[Tags], Spans]


def find_entities(tags: Tags) -> Spans:
    """Return the entities of one sentence, by the rules of seqeval's default mode.

    An entity also begins at an I- after O, or after another kind.

    >>> sorted(find_entities(["B-PER", "I-PER", "O", "I-LOC"]))
    [('LOC', 3, 3), ('PER', 0, 1)]
    """
    spans: Spans = set()
    start = 0
    before = "O"
    kind_before = "_"
    for index, tag in enumerate([*tags, "O"]):
        now, kind = _part(tag)

        # An entity ends before this tag, also at a change of the kind
        changed = kind != kind_before
        if before in ("E", "S") or (before in ("B", "I") and now in ("B", "S", "O")):
            ends = True
        else:
            ends = before not in ("O", ".") and changed
        if ends:
            spans.add((kind_before, start, index - 1))

        # An entity begins at this tag, also without B-
        resumes = before in ("E", "S", "O") and now in ("E", "I")
        if now in ("B", "S") or resumes or (now not in ("O", ".") and changed):
            start = index
        before = now
        kind_before = kind
    return spans


def find_strict_entities(tags: Tags, closed: bool = False) -> Spans:
    """Return the entities of one sentence that are tagged as their scheme demands.

    Args:
        closed: whether the scheme tags ends and single words, as IOBES and BILOU do; otherwise, the
            scheme is IOB2.

    >>> sorted(find_strict_entities(["B-PER", "I-PER", "O", "I-LOC"]))
    [('PER', 0, 1)]
    """
    parts = [_part(tag) for tag in tags]
    spans: Spans = set()
    start = 0
    while start < len(parts):
        prefix, kind = parts[start]

        # Follow the tags of the same kind after a B-
        last = prefix
        end = start
        while prefix == "B" and end + 1 < len(parts):
            inner, inner_kind = parts[end + 1]
            if inner not in "IEL" or inner_kind != kind:
                break
            end += 1
            last = inner
            if inner != "I":  # the tag ends the entity
                break

        # Keep what is complete, and go on behind it
        is_whole = prefix == "B" and (not closed or last in "EL")
        if is_whole or prefix in "SU":
            spans.add((kind, start, end))
        start = end + 1
    return spans


def find_words(tags: Tags) -> Spans:
    """Return each word as a span, with its tag as the kind."""
    return {(tag, index, index) for index, tag in enumerate(tags)}


def _part(tag: str) -> tuple[str, str]:
    """Return the prefix and the kind of a tag, as seqeval does.

    >>> _part("B-PER"), _part("O")
    (('B', 'PER'), ('O', '_'))
    """
    return tag[0], tag[1:].split("-", maxsplit=1)[-1] or "_"


@dataclass(frozen=True)
class TagDecoder:
    """The tags of classes and labels, and the rules that find spans of tags.

    Attributes:
        tags: the tag of each class of the network.
        of_labels: the tag of each label number.
        output: the index of the output [n, tokens, classes].
        strict: whether entities are found in seqeval's strict mode.
    """

    tags: tuple[str, ...]
    of_labels: tuple[str, ...]
    output: int = 0
    strict: bool = False

    def find(self, metric: str) -> Find:
        """Return the function that finds the spans that a metric counts."""
        if metric == "token_accuracy":
            return find_words
        if not self.strict:
            return find_entities
        closed = any(tag[0] in "ESLU" for tag in (*self.tags, *self.of_labels))
        return partial(find_strict_entities, closed=closed)

    def list_kinds(self, metric: str) -> tuple[str, ...]:
        """Return the kinds of spans that a metric counts: tags, or kinds of entities."""
        different = dict.fromkeys((*self.tags, *self.of_labels))
        if metric == "token_accuracy":
            return tuple(different)
        kinds = set()
        for tag in different:
            if tag[0] != "O":
                kinds.add(_part(tag)[1])
        return tuple(sorted(kinds))


@dataclass(frozen=True)
class TokenScores(ClasswiseScores):
    """The true and the predicted tags of n sentences.

    Attributes:
        true, said: the true and the predicted tags of the labelled tokens of each sentence.
        scored: the mask of the labelled tokens [n, tokens].
        metric: the name of the primary metric, a key of `METRICS`.
    """

    true: Sequence[Tags]
    said: Sequence[Tags]
    scored: NDArray[np.bool_]
    decoder: TagDecoder
    metric: str
    resamples: int

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The numbers of right, true and predicted spans of each sentence [n, 3, kinds]."""
        return self._count(self.metric, zip(self.true, self.said, strict=True))

    def _count(self, metric: str, pairs: Iterable[tuple[Tags, Tags]]) -> NDArray[np.int64]:
        """Return `counts` for any metric, and for any pairs of true and predicted tags."""
        find = self.decoder.find(metric)
        numbers = {kind: number for number, kind in enumerate(self.decoder.list_kinds(metric))}
        counts = np.zeros((len(self.true), 3, len(numbers)), np.int64)
        for row, (true, said) in zip(counts, pairs, strict=True):
            expected = find(true)
            predicted = find(said)
            for count, spans in zip(row, (expected & predicted, expected, predicted), strict=True):
                for kind, _, _ in spans:
                    count[numbers[kind]] += 1
        return counts

    @cached_property
    def of_class(self) -> Values:
        """F1 of each kind [kinds]; NaN without true spans."""
        totals = self.counts.sum(axis=0)
        return np.where(totals[1] > 0, _f1(totals), np.nan)

    @cached_property
    def _weights(self) -> NDArray[np.float64]:
        return draw_weights(self.total, self.resamples).astype(np.float64)

    @cached_property
    def by_class(self) -> Values:
        """F1 of each kind on each bootstrap sample [resamples, kinds]; NaN without any span."""
        pooled = self._weights @ self.counts.reshape(self.total, -1)
        return _f1(pooled.reshape(self.resamples, 3, -1))

    @property
    def samples_of_class(self) -> NDArray[np.int64]:
        """The number of sentences with true spans of each kind [kinds]."""
        return np.count_nonzero(self.counts[:, 1], axis=0)

    @cached_property
    def value(self) -> float:
        """F1 of the spans of all kinds; if spans are words, this is the accuracy."""
        return float(_f1(self.counts.sum(axis=(0, 2))))

    @cached_property
    def per_sample(self) -> Replicates:
        """The metric on each bootstrap sample.

        Sentences with neither true nor predicted spans do not count as items, because they do not
        change the F1.
        """
        of_sentence = self.counts.sum(axis=2)
        replicates = _f1((self._weights @ of_sentence).T[np.newaxis])[0]
        items = np.count_nonzero(of_sentence.any(axis=1), keepdims=True)
        return Replicates(replicates, class_counts=items)

    @property
    def of_others(self) -> float:
        """The metric with the labels of other sentences, which is the level of chance."""
        half = self.total // 2
        others = [*self.true[half:], *self.true[:half]]
        pairs = []  # each cut to the shorter of the two
        for true, said in zip(others, self.said, strict=True):
            pairs.append((true[: len(said)], said[: len(true)]))
        counts = self._count(self.metric, pairs)
        return float(_f1(counts.sum(axis=(0, 2))))

    def more(self) -> Metrics:
        """Return the token accuracy, unless it is the primary metric."""
        if self.metric == "token_accuracy":
            return {}
        counts = self._count("token_accuracy", zip(self.true, self.said, strict=True))
        return {"token_accuracy": float(_f1(counts.sum(axis=(0, 2))))}

    def sqnr_db(self, baseline: "TokenScores") -> float | None:
        """Return the SQNR in dB of the output for labelled tokens; None if it is not finite."""
        return distortion.sqnr_db([self._pick_scored(baseline)], [self._pick_scored(self)])

    def _pick_scored(self, scores: "TokenScores") -> Array:
        """Return the scored output of a model for the labelled tokens [k, classes]."""
        output = scores.outputs.values[self.decoder.output]
        return output[:, : self.scored.shape[1]][self.scored]


def _f1(counts: Array) -> Values:
    """Return the F1 [..., kinds] of counts [..., 3, kinds] or [3]; NaN without any span."""
    if counts.ndim > 1:
        counts = np.moveaxis(counts, -2, 0)
    right, true, said = counts
    total = true + said
    return np.divide(2 * right, total, out=np.full(np.shape(total), np.nan), where=total > 0)


def build(
    primary: str = "entity_f1", decoder: TagDecoder | None = None, resamples: int = 2000
) -> Task:
    """Return `task=tokens` with these settings.

    Args:
        primary: a key of `METRICS`.
        decoder: the tags, and the rules for their spans; None for a finished run.
    """
    # A finished run has neither kinds nor names
    kinds: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    scope = Scope()
    if decoder is not None:
        kinds = decoder.list_kinds(primary)
        class_names = decoder.tags
        scope = Scope(output=decoder.output)

    # The accuracy is a second metric, unless it is the first
    beside: tuple[Metric, ...] = ()
    if primary == "entity_f1":
        beside = (METRICS["token_accuracy"],)
    return Task(
        "tokens",
        METRICS[primary],
        partial(_score, primary, decoder, resamples),
        replace(BOOTSTRAP, intervals=f"{BOOTSTRAP.intervals} over the sentences"),
        beside=beside,
        class_names=class_names,
        pair_metrics=count_lost,
        scope=scope,
        files=TaskFiles(
            arrays=partial(keep_values, attrgetter("counts")),
            tables=partial(list_classes, "f1", kinds),
            figures=partial(draw_classes, kinds),
            captions={CLASSES: "F1 by class: those that changed most, beside FP32"},
        ),
        doubt=partial(_doubt, METRICS[primary]),
    )


def _score(
    metric: str, decoder: TagDecoder | None, resamples: int, outputs: Outputs, targets: Targets
) -> TokenScores:
    assert decoder is not None  # only finished runs have none
    classes = outputs.values[decoder.output].argmax(axis=2)
    labels = np.asarray(targets.labels)
    length = classes.shape[1]
    if (labels[:, length:] >= 0).any():
        raise ModelError(f"returns {length} tokens of a sample with more; expected one for each")

    # Name the tags of the tokens that have a label
    labels = labels[:, :length]
    scored = labels >= 0
    true = []
    said = []
    for exact, predicted, kept in zip(labels, classes, scored, strict=True):
        of_labelled = predicted[: len(kept)][kept]
        true.append([decoder.of_labels[label] for label in exact[kept]])
        said.append([decoder.tags[number] for number in of_labelled])
    return TokenScores(outputs, true, said, scored, decoder, metric, resamples)


def _doubt(metric: Metric, baseline: TokenScores, expected: float | None) -> str | None:
    """Return a doubt if the interval includes chance or worse, or lies below `expected`."""
    interval = baseline.per_sample.interval
    shown = metric.show(baseline.value)
    chance = baseline.of_others
    # Too few entities (NaN) give no verdict anyway, and a single sentence has no others
    if baseline.total < 2 or not interval[0] <= chance:
        return doubt_below(shown, interval, expected)
    return (
        f"NEAR CHANCE, {shown} (with the tags of other sentences {metric.show(chance)}; is the "
        "order of the tags that of the network? task.classes=)"
    )


def read_tags(path: Path) -> tuple[str, ...]:
    """Return the tags of a file, in the order of the network's classes.

    Raises:
        ConfigError: the file is not readable as tags, has the same tag twice, or has fewer than two
            tags.
    """
    with errors_as(ConfigError, f"task.classes: got {path}", EXPECTED):
        text = files.read_bytes(path, MAX_BYTES).decode("utf-8")
        if path.suffix == ".json":
            by_number = {}
            for number, tag in json.loads(text)["id2label"].items():
                by_number[int(number)] = str(tag)
            tags = tuple(by_number[number] for number in range(len(by_number)))
        else:
            tags = tuple(text.split())

        # One tag cannot be wrong, and equal tags would hide an error in the file
        if len(set(tags)) < len(tags) or len(tags) < 2:
            raise ValueError("not two or more different tags")
        return tags


def _make(config: TokensConfig, context: TaskContext) -> Task:
    expected = "a class for each token [N, tokens], or lists of a label for each word"
    kinds = ""
    if context.of_tokens:
        kinds = "i"
    check_labels("tokens", context, kinds, expected)
    assert context.labels is not None

    # A file of tags names the network's classes, otherwise the data do
    of_labels = context.class_names
    tags = of_labels
    if config.classes is not None:
        tags = read_tags(Path(config.classes))
        if not context.named:  # the labels are the numbers of the network's classes
            of_labels = tags

    # Check that every label has a tag
    used = np.unique(np.asarray(context.labels))
    used = used[used >= 0]
    if not len(used):
        raise ConfigError(f"task=tokens: no token of {context.data} has a label")
    for number in used.tolist():
        if number >= len(of_labels):
            unknown = str(number)
        elif of_labels[number] not in tags:
            unknown = repr(of_labels[number])
        else:
            continue
        raise ConfigError(
            f"task.classes: got {config.classes} with {len(tags)} tags, and {context.data} has the "
            f"label {unknown}; expected every label"
        )

    # Check the tags, because entities need the tags of a scheme
    output = _find_output(context, tags)
    odd = [tag for tag in tags if not ENTITY_TAG.fullmatch(tag)]
    if odd and config.primary == "entity_f1":
        raise ConfigError(
            f"task.primary: got entity_f1, and the tags of {context.data} include {odd[0]!r}; "
            "expected O, B-..., I-... (or E-..., S-...); try task.classes= with the names of the "
            "network's classes, or task=tokens task.primary=token_accuracy"
        )

    # An F1 of entities needs an entity
    decoder = TagDecoder(tags, of_labels, output, config.strict)
    prefixes = {of_labels[number][0] for number in used}
    if config.primary == "entity_f1" and prefixes <= {"O"}:
        raise ConfigError(f"task=tokens: no entity in {context.data}: every tag is O")
    return build(config.primary, decoder, config.resamples)


def _find_output(context: TaskContext, tags: Tags) -> int:
    """Return the index of the first output with a value of each tag for each token.

    Raises:
        ModelError: there is no such output.
    """
    for number, shape in enumerate(context.outputs.values()):
        if len(shape) == 2 and shape[1] == len(tags):
            return number
    raise ModelError(
        f"returns {describe(context.outputs)}, and {context.data} has {len(tags)} tags; expected "
        f"one output [tokens, {len(tags)}]; task.classes=FILE names the network's classes"
    )


TOKENS = TaskType(
    make=_make,
    recall=lambda config, class_names: build(config.primary, resamples=config.resamples),
    schema=TokensConfig,
    fingerprint=partial(hash_file, "classes"),
)
