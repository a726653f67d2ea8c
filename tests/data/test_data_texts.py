"""Texts of tables and saved data sets, as tokens."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core.errors import ConfigError, DataError, PtqError
from resnet8ptq.core.records import unpack
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration, draw_held_out
from resnet8ptq.data.sources import texts
from tests.helpers.configs import make_config

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "rain", "snow", "train", "ticket", "soup")
PAD, UNKNOWN, START, END = range(4)
ROWS = [
    *[{"text": f"rain {'snow ' * (n % 4)}", "label": "weather"} for n in range(12)],
    *[{"text": f"train {'ticket ' * n}", "label": "travel"} for n in range(12)],
]

words = st.lists(st.sampled_from([*WORDS[4:], "unseen"]), min_size=1, max_size=12)
Read = Callable[..., Dataset]


def write_tokenizer(path: Path, most: int | None = None) -> Path:
    model = tokenizers.models.WordLevel({w: n for n, w in enumerate(WORDS)}, "[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", START), ("[SEP]", END)]
    )
    made.enable_padding(length=40)  # of no effect: a batch is padded to its longest sample
    if most is not None:
        made.enable_truncation(most)
    made.save(str(path))
    return path


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def read(tmp_path: Path, tokenizer: Path) -> Read:
    def call(root: Path, *words: str, tokenizer: Path = tokenizer, kind: str = "table") -> Dataset:
        registry._read.cache_clear()
        given = (f"data={kind}", f"data.root={root}", f"data.tokenizer={tokenizer}", *words)
        config = locate.find_data(make_config(*given).data)
        return registry.read(config, PreprocessConfig(), tmp_path / "cache")

    yield call
    registry._read.cache_clear()


def tokens(data: Dataset) -> set[tuple[int, ...]]:
    """The tokens of all samples of both sides, without padding."""
    rows = [row for split in (data.train, data.test) for row in split.stored[:]]
    return {tuple(row["input_ids"][row["attention_mask"] == 1].tolist()) for row in rows}


# Tokens


@given(st.lists(st.tuples(words, words), min_size=1, max_size=6), st.booleans(), st.integers(5, 30))
def test_records_are_the_tokens_of_each_text_padded_to_the_longest(
    tmp_path_factory, pairs, paired, most
):
    folder = tmp_path_factory.mktemp("texts")
    path = write_tokenizer(folder / "tokenizer.json")
    columns = [[" ".join(pair[side]) for pair in pairs] for side in range(1 + paired)]
    texts._write(path, "rows.csv", columns, False, most, folder)
    arrays = unpack(np.load(folder / "records.npy"))
    plain = tokenizers.Tokenizer.from_file(str(path))
    plain.no_padding()
    cut = 0
    plain.enable_truncation(most)
    expected = [plain.encode(*row) for row in zip(*columns, strict=True)]
    for number, encoded in enumerate(expected):
        length = len(encoded.ids)
        assert length <= most
        for name, values in zip(
            texts.INPUTS, (encoded.ids, [1] * length, encoded.type_ids), strict=True
        ):
            row = arrays[name][number].tolist()
            assert row[:length] == values and set(row[length:]) <= {PAD}
        full = sum(map(len, pairs[number][: 1 + paired])) + 2 + paired
        cut += full > most
    assert arrays["input_ids"].shape[1] == max(len(encoded.ids) for encoded in expected)
    assert json.loads((folder / "notes.json").read_text()) == {"truncated": cut, "most": most}


def test_a_source_gives_each_text_once_and_classes_by_name(read, tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra huggingface")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    roots = [write_rows(tmp_path / f"rows.{kind}", ROWS) for kind in ("csv", "parquet")]
    sources = [(root, "table") for root in roots] + [(tmp_path / "saved", "huggingface")]
    expected = {
        (START, *(WORDS.index(word) for word in str(row["text"]).split()), END) for row in ROWS
    }
    for root, kind in sources:
        data = read(root, kind=kind)
        assert data.class_names == ("travel", "weather")
        assert tokens(data) == expected
        for split in (data.train, data.test):
            assert split.stored.dtype.names == texts.INPUTS
            assert split.stored.dtype["input_ids"].shape == (14,)  # equal on both sides
            ids = split.stored[:]["input_ids"]
            assert ((ids[:, 1] == WORDS.index("rain")) == (split.labels == 1)).all()


def test_longer_texts_are_truncated_with_one_warning(read, tmp_path, caplog):
    root = write_rows(tmp_path / "rows.csv", ROWS)
    assert max(map(len, tokens(read(root, "data.max_tokens=6")))) == 6
    [line] = [m for m in caplog.messages if "truncated" in m]
    assert line.startswith(f"{root}: 8 of 24 texts have more than 6 tokens and are truncated; try ")
    caplog.clear()
    short = write_tokenizer(tmp_path / "short.json", most=8)
    assert max(map(len, tokens(read(root, tokenizer=short)))) == 8  # the tokenizer's own length
    read(root)
    assert len([m for m in caplog.messages if "truncated" in m]) == 1


def test_a_tokenizer_is_part_of_the_identity(read, tmp_path):
    root = write_rows(tmp_path / "rows.csv", ROWS)
    other = write_tokenizer(tmp_path / "other.json", most=8)
    assert read(root).test.digest != read(root, tokenizer=other).test.digest


# Pairs


def write_pairs(path: Path) -> Path:
    rows = [
        {"sentence1": f"rain {'snow ' * n}", "sentence2": f"soup {'train ' * n}", "score": n / 2}
        for n in range(12)
    ]
    return write_rows(path, rows)


def test_a_pair_of_texts_is_one_sample(read, tmp_path):
    data = read(write_pairs(tmp_path / "pairs.csv"))
    for row, score in zip(data.test.stored[:], data.test.labels, strict=True):
        count = int(2 * score)
        assert row["attention_mask"].sum() == 5 + 2 * count
        assert row["token_type_ids"].sum() == 2 + count
    assert len(data.train) + len(data.test) == 12 and data.test.groups is None


def has_pairs(split):
    return {*np.unique(split.groups, return_counts=True)[1]} == {2}


def test_the_texts_of_a_pair_are_two_samples_of_a_group(read, tmp_path):
    root = write_pairs(tmp_path / "pairs.csv")
    data = read(root, "data.pairs=apart")
    assert has_pairs(data.train) and has_pairs(data.test)
    assert not {*data.train.groups} & {*data.test.groups}
    ids, scores = data.test.stored[:]["input_ids"], data.test.labels
    assert (ids[::2, 1] == WORDS.index("rain")).all() and (
        ids[1::2, 1] == WORDS.index("soup")
    ).all()
    assert (data.test.groups[::2] == data.test.groups[1::2]).all()
    assert (scores == data.test.groups / 2).all()
    with pytest.raises(
        ConfigError, match=r"data.pairs: got apart with data.text=sentence1, expected t"
    ):
        read(root, "data.pairs=apart", "data.text=sentence1")


def test_samples_that_choose_are_whole_pairs(read, tmp_path):
    data = read(write_pairs(tmp_path / "pairs.csv"), "data.pairs=apart")
    for images in (2, 4, 5):
        held_out = draw_held_out(data, images)
        assert has_pairs(held_out) and len(held_out) == images // 2 * 2
        calibration = draw_calibration(data, 4, 42, [held_out]).split
        assert has_pairs(calibration) and len(calibration) == 4
        assert not {*calibration.groups} & {*held_out.groups}


# Two files


def test_rows_of_a_second_file_test(read, tmp_path):
    train = write_rows(tmp_path / "train.csv", ROWS[:-1])
    test = write_rows(tmp_path / "test.csv", [ROWS[0], ROWS[-1]])
    data = read(train, f"data.test={test}")
    assert (len(data.train), len(data.test)) == (len(ROWS) - 1, 2)
    assert data.train.stored.dtype == data.test.stored.dtype
    assert data.test.stored.dtype["input_ids"].shape == (14,)  # of the second file
    with pytest.raises(ConfigError, match=r"data.split: got label with data.test="):
        read(train, f"data.test={test}", "data.split=label")
    other = write_rows(tmp_path / "other.csv", [{"text": "rain", "label": 1.5}])
    with pytest.raises(DataError, match=r"other.csv: its columns do not fit those of "):
        read(train, f"data.test={other}")
    with pytest.raises(
        ConfigError, match=r"data.test: got nowhere.csv \(not there\), expected a file"
    ):
        read(train, "data.test=nowhere.csv")


# Refused


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        (
            [{"words": 1, "label": 0}],
            ("data.text=words",),
            "column 'words': got int64, expected text",
        ),
        ([{"text": "a", "label": 0}], ("data.inputs=text",), "data.inputs: got text with data.to"),
        ([{"text": "a", "sentence": "b", "label": 0}], (), "data.text: got null, and "),
        ([{"words": "a", "label": 0}], (), "data.text: got null, and "),
        ([{"words": "a", "label": 0}], ("data.text=no",), "data.text: got no, and "),
    ],
)
def test_columns_that_hold_no_texts_are_one_line(read, tmp_path, rows, given, message):
    root = write_rows(tmp_path / "rows.csv", rows * 4)
    with pytest.raises(PtqError, match=message) as caught:
        read(root, *given)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_texts_name_their_row(read, tmp_path):
    rows = [{"text": "a", "label": "x"}, {"text": None, "label": "y"}]
    with pytest.raises(DataError, match=r"column 'text', row 2: holds nothing"):
        read(write_rows(tmp_path / "rows.parquet", rows))


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff\xfe", b'{"model": ' + b"[" * 10_000, b'{"version": "1.0", "model": {}}'],
)
def test_a_damaged_tokenizer_is_one_line(read, tmp_path, content):
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    root = write_rows(tmp_path / "rows.csv", ROWS)
    with pytest.raises(
        DataError, match=r"damaged.json: .*; expected a tokenizer.json of "
    ) as caught:
        read(root, tokenizer=path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_panic_of_the_library_is_one_line(read, tmp_path, tokenizer, capfd):
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}
    content = {**json.loads(tokenizer.read_text()), "normalizer": normalizer}
    path = tmp_path / "panics.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"panics.json: reading it crashed"):
        read(write_rows(tmp_path / "rows.csv", ROWS), tokenizer=path)
    assert "Traceback" not in capfd.readouterr().err


def test_a_tokenizer_larger_than_any_is_not_hashed(read, tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(2**43)  # of holes
    with pytest.raises(DataError, match=r"large.json: larger than "):
        read(write_rows(tmp_path / "rows.csv", ROWS), tokenizer=path)


@pytest.mark.parametrize(("pairs", "added"), [("together", 3), ("apart", 2)])
def test_a_length_that_special_tokens_fill_is_refused(read, tmp_path, pairs, added):
    """The tokenizer would truncate nothing."""
    root = write_pairs(tmp_path / "pairs.csv")
    given = f"data.pairs={pairs}"
    with pytest.raises(ConfigError, match=f"got {added}, expected more than the {added} tokens"):
        read(root, given, f"data.max_tokens={added}")
    assert max(map(len, tokens(read(root, given, f"data.max_tokens={added + 3}")))) == added + 3


def test_without_the_package_the_line_says_how_to_install_it(read, tmp_path, monkeypatch):
    root = write_rows(tmp_path / "rows.csv", ROWS)
    monkeypatch.setattr(texts, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"which needs the package tokenizers; try .*\[text\]'$"):
        read(root)


def test_settings_of_texts_need_a_tokenizer(tmp_path):
    root = write_rows(tmp_path / "rows.csv", [{"text": "rain", "label": 0}] * 4)
    config = locate.find_data(make_config("data=table", f"data.root={root}").data)
    with pytest.raises((ConfigError, DataError)) as caught:
        registry.read(config, PreprocessConfig(), tmp_path / "cache")
    assert str(caught.value).endswith("for texts, data.tokenizer=")


# Words with a label each

SENTENCES = [
    (["rain", "in", "rain-snow"], ["O", "O", "B-LOC"]),
    (["soup"], ["O"]),
    (["train", "ticket", "soup"], ["B-PER", "I-PER", "O"]),
    (["ticket", "ticket"], ["O", "B-PER"]),
]
TAGS = ["O", "B-PER", "I-PER", "B-LOC"]


def write_sentences(path: Path) -> Path:
    if path.suffix == ".conll":
        lines = ["# id = 1", "-DOCSTART-\tX\tO", ""]
        for row, tags in SENTENCES:
            lines += [f"{word}\tX\t{tag}" for word, tag in zip(row, tags, strict=True)] + ["", ""]
        path.write_text("\n".join(lines))
        return path
    rows = [{"tokens": row, "ner_tags": tags} for row, tags in SENTENCES]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
        return path
    for row in rows:
        row["ner_tags"] = [TAGS.index(tag) for tag in row["ner_tags"]]
    return write_rows(path, rows)


@pytest.mark.parametrize("name", ["news.conll", "news.jsonl", "news.parquet"])
def test_the_first_token_of_a_word_has_its_label(read, tmp_path, name):
    data = read(write_sentences(tmp_path / name), f"data.classes=[{','.join(TAGS)}]")
    assert data.class_names == tuple(TAGS)
    labelled = set()
    for side in (data.train, data.test):
        for record, labels, text in zip(side.stored[:], side.labels, side.texts, strict=True):
            assert (labels[record["attention_mask"] == 0] == -100).all()
            assert labels[0] == -100  # of [CLS]
            labelled.add((text, tuple(labels[labels != -100].tolist())))
            if text == "rain in rain-snow":  # five tokens
                assert labels[1:7].tolist() == [0, 0, 3, -100, -100, -100]
    assert labelled == {
        (" ".join(row), tuple(TAGS.index(tag) for tag in tags)) for row, tags in SENTENCES
    }


def test_words_of_no_labels_are_texts(read, tmp_path):
    data = read(write_sentences(tmp_path / "news.conll"), "data.labels=none")
    assert data.test.labels is None
    assert len(data.train) + len(data.test) == 4


def test_only_lists_of_words_keep_the_places_of_words(read, tmp_path):
    """These take a third of the room of the tokens."""
    kept = tmp_path / "cache"
    read(write_rows(tmp_path / "rows.csv", ROWS))
    assert not [*kept.rglob("words.npy")]
    read(write_sentences(tmp_path / "news.conll"))
    assert len([*kept.rglob("words.npy")]) == 1


def test_truncated_words_are_not_scored(read, tmp_path):
    data = read(write_sentences(tmp_path / "news.conll"), "data.max_tokens=4")
    counts = [(labels >= 0).sum() for side in (data.train, data.test) for labels in side.labels]
    assert sorted(counts) == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("rain\tO\nsnow", "line 2: has 1 columns, expected 2"),
        ("rain", "line 1: has 1 columns, expected 2"),
        ("rain O\nsnow X O", "line 2: has 3 columns, expected 2"),
        ("", "has no rows"),
    ],
)
def test_a_line_without_a_tag_is_named(read, tmp_path, lines, message):
    path = tmp_path / "news.conll"
    path.write_text(lines)
    with pytest.raises(DataError, match=message):
        read(path)


def test_deeply_nested_rows_are_one_line(read, tmp_path):
    path = tmp_path / "news.jsonl"
    path.write_text(f'{{"tokens": {"[" * 200_000}{"]" * 200_000}}}')
    with pytest.raises(DataError, match=r"news\.jsonl: reading it crashed"):
        read(path)


def test_a_sentence_with_a_label_too_few_is_named(read, tmp_path):
    rows = [{"tokens": ["rain", "snow"], "tags": ["O"] * n} for n in (2, 1)]
    path = tmp_path / "news.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="line 3: has 1 labels and 2 words"):
        read(path)
    path.write_text(json.dumps({"tokens": ["rain", "snow"], "label": "O"}))
    with pytest.raises(DataError, match="expected lists of a label for each word"):
        read(path)
