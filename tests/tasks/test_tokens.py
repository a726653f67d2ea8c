"""`task=tokens`: entities by seqeval's rules, and what fits data and network."""

import json
import os

import numpy as np
import pytest

from resnet8ptq.config.schema import TaskConfig, TokensConfig
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.tasks import registry, tokens
from resnet8ptq.tasks.scoring.outputs import VALUES, Outputs, Targets, TaskContext

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def score(true: str, said: str, strict: bool = False, metric: str = "entity_f1"):
    """Score sentences of tags, divided by semicolons; each tag is one token."""
    rows = [[sentence.split() for sentence in text.split(";")] for text in (true, said)]
    tags = tuple(sorted({tag for sentences in rows for row in sentences for tag in row}))
    length = max(map(len, rows[0]))
    labels = np.full((len(rows[0]), length), -100)
    outputs = np.zeros((len(rows[0]), length, len(tags)), np.float32)
    for index, (of_true, of_said) in enumerate(zip(*rows, strict=True)):
        for place, (label, answer) in enumerate(zip(of_true, of_said, strict=True)):
            labels[index, place] = tags.index(label)
            outputs[index, place, tags.index(answer)] = 1
    task = tokens.build(metric, tokens.TagDecoder(tags, tags, strict=strict), 100)
    return task.score(Outputs((outputs,), None, VALUES), Targets(labels))


# True and predicted tags; f1_score of seqeval 1.2.2, and that of mode="strict" with the scheme
# IOB2, IOBES or BILOU. The first is the example of seqeval's README.
SEQEVAL = [
    (
        *("O O O B-MISC I-MISC I-MISC O;B-PER I-PER O",),
        *("O O B-MISC I-MISC I-MISC I-MISC O;B-PER I-PER O", 0.5, 0.5),
    ),
    ("B-NP I-NP O;B-PER I-PER O", "I-NP I-NP O;I-PER I-LOC O", 0.4, 0),
    ("B-A I-B I-B O I-A;B-A B-A", "B-A I-A I-B O B-A;B-A I-A", 0.222222222, 0),
    ("B-A I-A E-A O S-B;S-A B-B E-B", "B-A E-A E-A O S-B;S-A B-B I-B", 0.666666667, 0.571428571),
    ("B-A I-A I-A O S-B;E-A S-B I-B O", "B-A I-A O O S-B;S-A S-B E-B O", 0.8, 0.8),
    ("B-A I-A L-A O U-B;U-A L-A U-B", "B-A L-A L-A O U-B;U-A U-A U-A", 0.571428571, 0.444444444),
    ("B-A-B I-A-B O B I;O", "B-A-B I-A O B I;O", 0.4, 0.5),
]


@pytest.mark.parametrize(("true", "said", "default", "strict"), SEQEVAL)
def test_entities_are_those_of_seqeval(true, said, default, strict):
    assert score(true, said).value == pytest.approx(default, abs=1e-6)
    assert score(true, said, strict=True).value == pytest.approx(strict, abs=1e-6)


def test_accuracy_counts_labelled_tokens():
    scores = score("B-A I-A O;O", "B-A O O;B-A", metric="token_accuracy")
    assert scores.value == 2 / 4
    assert score("B-A I-A O;O", "B-A O O;B-A").more() == {"token_accuracy": 2 / 4}


def test_sentences_without_entities_prove_nothing():
    """No entity of 10 changed: the loss may be 1 point, in however many other sentences."""
    task = tokens.build("entity_f1", tokens.TagDecoder(TAGS, TAGS))
    for with_entities, passes in ((10, False), (400, True)):
        text = ";".join(["B-A"] * with_entities + ["O"] * 400)
        scores = score(text, text)
        margin = task.compare(scores, scores).paired.margin(task.metric, 0.01, scores.total)
        assert (margin.p_within < 0.05) is passes
    few = score(";".join(["B-A", *["O"] * 60]), ";".join(["B-A", *["O"] * 60]))
    assert np.isnan(few.per_sample.interval[0]) and task.doubt(few, None) is None


def test_outputs_may_be_longer_than_the_labels_and_not_shorter():
    labels = np.array([[1, 2, -100, -100]])
    decoder = tokens.TagDecoder(TAGS, TAGS)
    task = tokens.build("entity_f1", decoder, 100)
    for length in (2, 3, 9):
        logits = np.zeros((1, length, 5), np.float32)
        logits[0, :2] = np.eye(5)[[1, 2]]
        scores = task.score(Outputs((logits,), None, VALUES), Targets(labels))
        assert scores.value == 1
        assert scores.sqnr_db(scores) is None  # without noise
    with pytest.raises(ModelError, match="returns 1 tokens"):
        task.score(Outputs((logits[:, :1],), None, VALUES), Targets(labels))


LABELS = np.array([[1, 2, 0, -100], [0, 3, -100, -100]])


def make(labels, outputs, names=TAGS, named=True, **settings):
    data = TaskContext("news", labels, names, named, (4,), outputs, VALUES)
    return tokens.TOKENS.make(TokensConfig(**settings), data)


def test_the_tags_of_a_file_are_those_of_the_network(tmp_path):
    lines = tmp_path / "tags.txt"
    lines.write_text("\n".join(TAGS))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"id2label": {str(n): tag for n, tag in enumerate(TAGS)}}))
    by_alphabet = tuple(sorted(TAGS))
    moved = np.array([by_alphabet.index(tag) for tag in TAGS])
    labels = np.where(LABELS < 0, LABELS, moved[np.maximum(LABELS, 0)])
    logits = np.eye(5, dtype=np.float32)[np.maximum(LABELS, 0)]
    for path in (lines, config):
        task = make(labels, {"other": (3,), "out": (None, 5)}, by_alphabet, classes=str(path))
        outputs = Outputs((np.zeros((2, 3)), logits), None, VALUES)
        assert task.score(outputs, Targets(labels)).value == 1
        assert task.class_names == TAGS  # in the order of the outputs
        numbered = make(LABELS, {"out": (4, 5)}, ("0", "1", "2", "3"), False, classes=str(path))
        assert numbered.score(Outputs((logits,), None, VALUES), Targets(LABELS)).value == 1


def test_what_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "tags.txt"
    path.write_text("O B-PER I-PER O")
    with pytest.raises(ConfigError, match=r"task\.classes: got .*not two or more different tags"):
        make(LABELS, {"out": (4, 4)}, classes=str(path))
    path.write_text("O B-PER I-PER")
    with pytest.raises(ConfigError, match="has the label 'B-LOC'"):
        make(LABELS, {"out": (4, 3)}, classes=str(path))
    with pytest.raises(ModelError, match=r"5 tags; expected one output \[tokens, 5\]"):
        make(LABELS, {"out": (4, 7)})
    with pytest.raises(ConfigError, match=r"task=tokens task\.primary=token_accuracy"):
        make(LABELS, {"out": (4, 4)}, ("NOUN", "VERB", "DET", "ADJ"))
    with pytest.raises(ConfigError, match="labels of news are int64 \\[2\\], expected a class for"):
        make(np.array([0, 1]), {"out": (4, 5)})
    with pytest.raises(ConfigError, match="every tag is O"):
        make(np.zeros((2, 4), np.int64), {"out": (4, 5)})


def test_tags_that_never_end_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"task\.classes: got .*not a regular file"):
        make(LABELS, {"out": (4, 5)}, classes=str(tmp_path / "pipe"))


def test_auto_takes_labels_of_tokens_and_classification_does_not(caplog):
    data = TaskContext("news", LABELS, TAGS, True, (4,), {"out": (None, 5)}, VALUES)
    assert registry.make(TaskConfig(), data).name == "tokens"
    with pytest.raises(ConfigError, match="expected classes"):
        registry.make(TaskConfig("classification"), data)


def test_tags_in_another_order_are_doubted():
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, (60, 6))
    task = tokens.build("entity_f1", tokens.TagDecoder(TAGS, TAGS), 200)
    right, wrong = (
        task.score(Outputs((np.eye(5)[classes],), None, VALUES), Targets(labels))
        for classes in (labels, (labels + 1) % 5)
    )
    assert task.doubt(right, None) is None
    assert "NEAR CHANCE" in task.doubt(wrong, None)
    alone = Outputs((np.eye(5)[labels[:1]],), None, VALUES[:1])
    assert task.doubt(task.score(alone, Targets(labels[:1])), None) is None  # has no others
