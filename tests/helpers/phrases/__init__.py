"""Texts for tests: requests in 2 to 23 words, in eight classes of topics, and a network for them.

A request contains words of its topic, and words that a neighbouring topic shares. Half of the
longer phrases also exclude another topic ("not about ..."), before or after the request, so a
network must use the order of the words. Some words have a doubled letter, so they are not in the
vocabulary. A small transformer is right on about 19 phrases in 20.

The phrases are the same everywhere: each random number comes from `numpy.random.RandomState`,
whose stream is frozen.
"""

import csv
import functools
import io
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import files
from resnet8ptq.core.records import Array, pack, unpack
from resnet8ptq.data.dataset import SIDES, Side

NETWORK = Path(__file__).with_name("encoder.onnx")  # made by studies/train_phrases.py
TOKENS = 24  # the longest sample, with the token that starts it
PADDING, UNKNOWN, START = range(3)  # token ids before those of the words
_SPLITS: dict[Side, tuple[int, int]] = {"train": (1, 1000), "test": (2, 500)}  # seed, per class
_SHORTEST = 2  # words
_FOR_ASIDE = 9  # words of a phrase that may exclude another topic
_ASIDES = 0.5  # share with an aside, of the phrases that are long enough
_SHARED = 0.15  # of the topic words of a request
_MISSPELT = 0.03  # of all words

_TOPICS = {
    "food": "recipe dinner soup bread oven salad cheese pasta lunch breakfast cake pepper",
    "health": "doctor pain fever pills clinic cough sleep dentist pulse vaccine allergy bandage",
    "money": "account bank loan card transfer balance salary coins invoice tax savings rent",
    "shopping": "shirt shoes size shop discount cart refund coat basket gift brand store",
    "sport": "match goal race tennis coach stadium league bicycle swim medal referee score",
    "travel": "train ticket flight hotel airport luggage platform passport journey gate map tour",
    "weather": "rain snow storm wind sun cloud fog frost degrees forecast umbrella thunder",
    "work": "meeting office report project manager desk deadline client team contract slides email",
}
CLASS_NAMES: tuple[str, ...] = tuple(_TOPICS)  # in alphabetical order, as tables have them
# Words that two topics share.
_BETWEEN = {
    ("weather", "travel"): "season delay beach mountain",
    ("travel", "food"): "menu restaurant market kitchen",
    ("food", "shopping"): "order delivery price list",
    ("shopping", "money"): "payment bill receipt cost",
    ("money", "work"): "budget number form hours",
    ("work", "health"): "stress break insurance chair",
    ("health", "sport"): "training diet injury water",
    ("sport", "weather"): "outdoors season park jacket",
}
_ASKING = "show find tell need want help check send book about"
_EXCLUDING = "not without except instead forget skip"
_FILLING = (
    "a the my your this that some please now today tomorrow tonight later again for to me us with "
    "on at in from is are was can could would should i we you it they and or so then just very "
    "really maybe quickly soon first last new old good best next long little more there here what "
    "where when how which who again always never still already kindly hello thanks okay well"
)


def _split(words: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words.split()))


_OWN = tuple(map(_split, _TOPICS.values()))
_JOINT = tuple(
    tuple(word for pair, words in _BETWEEN.items() if name in pair for word in _split(words))
    for name in CLASS_NAMES
)
VOCABULARY: tuple[str, ...] = _split(
    " ".join([*_TOPICS.values(), *_BETWEEN.values(), _ASKING, _EXCLUDING, _FILLING])
)
IDS = {word: number for number, word in enumerate(VOCABULARY, START + 1)}


def settings(folder: Path) -> tuple[str, ...]:
    """Return the settings of a run on the phrases, which are written into `folder` once."""
    return (*data_settings(folder), f"model.path={NETWORK}")


def data_settings(folder: Path) -> tuple[str, ...]:
    """Return the settings of the data alone; see `settings`."""
    path = folder / "phrases.npz"
    if not path.exists():
        arrays: dict[str, Array] = {"classes": np.array(CLASS_NAMES)}
        for side in SIDES:
            records, labels = encode_split(side)
            arrays |= {f"{name}_{side}": values for name, values in unpack(records).items()}
            arrays[f"labels_{side}"] = labels
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
        files.write_bytes(path, content.getvalue())
    return ("data=arrays", f"data.root={path}")


def write_tables(folder: Path) -> None:
    """Write the files that docs/data.md names for texts: tables, a tokenizer and the network."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    shutil.copyfile(NETWORK, folder / "my_text_network.onnx")
    ids = {"[PAD]": PADDING, "[UNK]": UNKNOWN, "[CLS]": START, **IDS}
    tokenizer = Tokenizer(models.WordLevel(ids, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    start = [("[CLS]", START)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A", "[CLS] $A $B:1", start)
    tokenizer.enable_truncation(TOKENS)
    tokenizer.save(str(folder / "my_tokenizer.json"))
    for side, name in (("train", "my_texts.csv"), ("test", "my_test_texts.csv")):
        texts, labels = write(side)  # type: ignore[arg-type]  # of a tuple of literals
        rows = [(text, CLASS_NAMES[label]) for text, label in zip(texts, labels, strict=True)]
        _write_csv(folder / name, ("text", "label"), rows)
    pairs = zip(texts[::2], texts[1::2], labels[::2] == labels[1::2], strict=True)
    scored = [(one, other, str(float(alike))) for one, other, alike in pairs]
    _write_csv(folder / "my_pairs.csv", ("sentence1", "sentence2", "score"), scored)


def _write_csv(path: Path, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heads, *rows])


def encode_split(side: Side) -> tuple[Array, NDArray[np.int64]]:
    """Return one split as records of tokens [N], see `encode`, and labels [N]."""
    phrases, labels = write(side)
    return encode(phrases), labels


def tokenize(phrase: str) -> tuple[int, ...]:
    """Return START and the ids of the words, at most TOKENS in all."""
    return (START, *(IDS.get(word, UNKNOWN) for word in phrase.split()))[:TOKENS]


def encode(phrases: Sequence[str]) -> Array:
    """Return phrases as records [N] of `input_ids` and `attention_mask`, int64 [TOKENS] each.

    >>> encode(["show rain", "show raain"])["input_ids"][:, :4].tolist()
    [[2, 130, 75, 0], [2, 130, 1, 0]]
    """
    ids = np.full((len(phrases), TOKENS), PADDING, np.int64)
    for row, phrase in zip(ids, phrases, strict=True):
        tokens = tokenize(phrase)
        row[: len(tokens)] = tokens
    return pack({"input_ids": ids, "attention_mask": (ids != PADDING).astype(np.int64)})


def write(side: Side) -> tuple[list[str], NDArray[np.int64]]:
    """Write one split of the data set: 8,000 training or 4,000 test phrases; see `write_seeded`."""
    return write_seeded(*_SPLITS[side], tested=side == "test")


def write_seeded(
    seed: int, per_class: int, tested: bool = False
) -> tuple[list[str], NDArray[np.int64]]:
    """Write `per_class` phrases of each class from a seed.

    Args:
        tested: whether these are the test phrases. Otherwise, a phrase with the tokens of a test
            phrase is drawn again.

    Returns:
        Phrases, and labels [N], which index CLASS_NAMES. The classes are balanced and in shuffled
        order.
    """
    rng = np.random.RandomState(seed)
    labels = rng.permutation(np.repeat(np.arange(len(CLASS_NAMES), dtype=np.int64), per_class))
    left_out = frozenset() if tested else _test_tokens()
    return [_write_other(rng, int(label), left_out) for label in labels], labels


@functools.cache
def _test_tokens() -> frozenset[tuple[int, ...]]:
    return frozenset(map(tokenize, write("test")[0]))


def _write_other(
    rng: np.random.RandomState, topic: int, left_out: Collection[tuple[int, ...]]
) -> str:
    while tokenize(phrase := _write_one(rng, topic)) in left_out:
        pass
    return phrase


def _write_one(rng: np.random.RandomState, topic: int) -> str:
    length = rng.randint(_SHORTEST, TOKENS)
    aside: list[str] = []
    if length >= _FOR_ASIDE and rng.random_sample() < _ASIDES:
        other = (topic + rng.randint(1, len(CLASS_NAMES))) % len(CLASS_NAMES)
        aside = [_pick(rng, _split(_EXCLUDING)), *_mention(rng, other, rng.randint(1, 4))]
    request = [_pick(rng, _split(_ASKING)), *_mention(rng, topic, 1 + rng.randint(0, 3))]
    request = request[: length - len(aside)]
    parts = [request, aside] if rng.random_sample() < 0.5 else [aside, request]
    words = [word for part in parts for word in part]
    while len(words) < length:
        words.insert(rng.randint(0, len(words) + 1), _pick(rng, _split(_FILLING)))
    return " ".join(_misspell(rng, word) for word in words)


def _mention(rng: np.random.RandomState, topic: int, count: int) -> list[str]:
    """Return words of a topic; a neighbouring topic shares some of them."""
    shared = rng.random_sample(count) < _SHARED
    return [_pick(rng, (_JOINT if some else _OWN)[topic]) for some in shared]


def _pick(rng: np.random.RandomState, words: Sequence[str]) -> str:
    return words[rng.randint(len(words))]


def _misspell(rng: np.random.RandomState, word: str) -> str:
    """Return a word, rarely with one letter doubled."""
    if rng.random_sample() >= _MISSPELT:
        return word
    position = rng.randint(len(word))
    return word[:position] + word[position] + word[position:]
