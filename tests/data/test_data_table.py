"""Tables of the user's own: which column is what, splits, pictures by path, and what is refused."""

import datetime
import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import TableConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, DataError, PtqError
from resnet8ptq.data import locate
from resnet8ptq.data.sources import columns, find_settings, table
from resnet8ptq.data.sources.columns import DataTable, Limits
from tests.helpers.arrays import whole
from tests.helpers.configs import make_config
from tests.helpers.pictures import GREEN, RED, picture
from tests.helpers.tables import read, write

KINDS = ("red", "green")


def read_columns(path):
    return table.read(path, files.sha256(path), path.parent / "cache")


def numbers(count=8):
    return {
        "a": list(range(count)),
        "b": [value / 2 for value in range(count)],
        "label": [value % 2 for value in range(count)],
    }


def write_pictures(folder, count=4):
    """Pictures in folders, and the columns that list them."""
    paths, names = [], []
    for name, colour in zip(KINDS, (RED, GREEN), strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            shade = tuple(value + number for value in colour)
            picture(shade).save(folder / name / f"{number}.png")
            paths.append(f"{name}/{number}.png")
            names.append(name)
    return {"path": paths, "label": names}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_of_numbers(tmp_path, suffix):
    data = read(write(tmp_path / f"a{suffix}", **numbers()))
    assert (data.name, data.class_names, data.named) == ("a", ("0", "1"), False)
    result, labels = whole(data)
    assert sorted(map(tuple, result)) == [(n, n / 2) for n in range(8)]
    assert np.array_equal(labels, result[:, 0] % 2)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators(tmp_path, separator):
    rows = [["a", "b", "y"], *([str(n), "1", str(n % 2)] for n in range(4))]
    (tmp_path / "a.csv").write_text("\n".join(separator.join(row) for row in rows))
    assert read(tmp_path / "a.csv").image_shape == (2,)


def test_types_are_those_of_all_cells(tmp_path):
    """Not of the first megabyte, after which Arrow has usually decided."""
    values = ["1"] * 300_000 + ["1.5"]
    (tmp_path / "a.csv").write_text("a\n" + "\n".join(values))
    assert read_columns(tmp_path / "a.csv")["a"].type == pa.float64()


def test_pixels_become_pictures(tmp_path):
    pixels = {f"p{n}": [n, 255 - n, 7, 9] for n in range(12)}
    path = write(tmp_path / "a.csv", label=[0, 0, 1, 1], **pixels)
    data = read(path, shape=[2, 2, 3])
    assert data.test.has_pictures and data.image_shape == (2, 2, 3)
    assert read(path, {"size": 4}, shape=[2, 2, 3]).image_shape == (4, 4, 3)
    with pytest.raises(ConfigError, match=r"data\.shape: got \[5\], expected sizes that make 12"):
        read(path, shape=[5])


def test_a_column_of_lists(tmp_path):
    lists = [[[n, 1.0], [2.0, 3.0], [4.0, 5.0]] for n in range(4)]
    path = write(tmp_path / "a.parquet", x=lists, other=[1, 2, 3, 4], y=[0, 0, 1, 1])
    data = read(path)
    assert data.image_shape == (3, 2)
    assert sorted(whole(data)[0][:, 0, 0]) == [0, 1, 2, 3]


def test_named_columns(tmp_path):
    content = {**numbers(), "kind": ["no", "yes"] * 4}
    data = read(
        write(tmp_path / "a.csv", **content), inputs=["b"], labels="kind", classes=["yes", "no"]
    )
    assert data.image_shape == (1,) and data.class_names == ("yes", "no")
    result, labels = whole(data)
    assert np.array_equal(labels, 1 - (2 * result[:, 0]) % 2)


@pytest.mark.parametrize("kinds", [["no", "yes"], [False, True]])
def test_text_labels_are_classes(tmp_path, kinds):
    data = read(write(tmp_path / "a.parquet", **(numbers() | {"label": kinds * 4})))
    assert data.class_names == (("no", "yes") if kinds[0] == "no" else ("false", "true"))
    assert data.named


def test_float_labels_are_values(tmp_path):
    data = read(write(tmp_path / "a.parquet", **numbers()), labels="b", inputs=["a"])
    assert data.class_names == ()
    assert sorted(data.test.labels) == sorted(data.test.stored[:][:, 0] / 2)


def test_no_labels(tmp_path):
    data = read(write(tmp_path / "a.csv", a=[1, 2, 3, 4]), labels="none")
    assert (data.test.labels, data.class_names, len(data.test)) == (None, (), 2)


def test_groups_stay_together(tmp_path):
    data = read(write(tmp_path / "a.csv", **numbers(), clips=["x", "x", "y", "y"] * 2))
    for split in (data.train, data.test):
        assert len(set(split.groups)) == 1 and len(split) == 4


def test_a_row_without_a_group_is_named(tmp_path):
    """All such rows would be one group."""
    path = write(tmp_path / "a.csv", **numbers(), clips=["x", "", "y", ""] * 2)
    with pytest.raises(DataError, match="column 'clips', line 3: holds nothing"):
        read(path)


def test_groups_that_are_lists_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", **numbers(), clips=[[1], [2]] * 4)
    with pytest.raises(DataError, match=r"column 'clips': got list.* expected groups as numbers"):
        read(path)


def test_pictures_by_path(tmp_path):
    path = write(tmp_path / "a.csv", **write_pictures(tmp_path))
    data = read(path)
    assert data.class_names == ("green", "red") and data.image_shape == (4, 6, 3)
    result, labels = whole(data)
    assert np.array_equal(result[:, 0, 0].argmax(1), np.where(labels == 1, 0, 1))


def test_transcripts_of_digits_are_texts(tmp_path):
    paths = write_pictures(tmp_path)["path"]
    path = write(tmp_path / "a.csv", path=paths, transcript=[f"00{n}" for n in range(len(paths))])
    data = read(path)
    assert {"000", "001"} <= {*data.train.labels, *data.test.labels}


def test_pictures_elsewhere(tmp_path):
    (tmp_path / "lists").mkdir()
    path = write(tmp_path / "lists" / "a.csv", **write_pictures(tmp_path / "pictures"))
    assert len(read(path, folder=str(tmp_path / "pictures")).train) == 4


@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_paths_that_all_lead_nowhere_ask_for_the_folder(tmp_path, on_bad):
    (tmp_path / "lists").mkdir()
    path = write(tmp_path / "lists" / "a.csv", **write_pictures(tmp_path / "pictures"))
    with pytest.raises(DataError, match=r"line 2: .*0\.png: no such file.*data\.folder: got null"):
        read(path, on_bad=on_bad)


def test_the_split_of_a_column_is_kept(tmp_path):
    sides = ["train", "test", "Val", "train", "train", "train", "val", "test"]
    data = read(write(tmp_path / "a.csv", **numbers(), split=sides))
    assert data.train.stored[:][:, 0].tolist() == [0, 3, 4, 5]
    assert data.test.stored[:][:, 0].tolist() == [1, 7]
    sides = [side.replace("test", "train") for side in sides]
    data = read(write(tmp_path / "b.csv", **numbers(), fold=sides), split="fold", inputs="a")
    assert data.test.stored[:].ravel().tolist() == [2, 6]


def test_equal_samples_in_both_sides_are_named(tmp_path, caplog):
    content = {"a": [1, 2, 3, 1], "label": [0, 1, 0, 0], "split": ["train"] * 2 + ["test"] * 2}
    path = write(tmp_path / "a.csv", **content)
    read(path)
    assert "1 of 2 test samples are training samples too" in caplog.text
    assert f"{path}: line 5 is {path}: line 2" in caplog.text


def test_unreadable_pictures_are_left_out_with_their_labels(tmp_path, caplog):
    content = write_pictures(tmp_path)
    (tmp_path / "red" / "1.png").write_bytes(b"no picture")
    content["path"][4] = "green/gone.png"
    path = write(tmp_path / "a.csv", **content, split=["train", "test"] * 4)
    with pytest.raises(
        DataError, match=r"a\.csv: line 3: .*1\.png: cannot be read .* and 1 others"
    ):
        read(path)
    data = read(path, on_bad="skip")
    assert "2 of 8 pictures cannot be read" in caplog.text and "(no such file)" in caplog.text
    assert (len(data.train), len(data.test)) == (3, 3)
    for split in (data.train, data.test):
        assert np.array_equal(split.stored[:][:, 0, 0].argmax(1), 1 - split.labels)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("a,label\n1,0\n2,1\n3,0", [2, 3, 4]),
        ("a,label\n\n1,0\n2,1\n\n\n3,0\n", [3, 4, 7]),
        ("a,label\r\n1,0\r\n\r\n2,1\r\n3,0\r\n", [2, 4, 5]),
        ("a,note,label\n1,x,0\n2,'one\ntwo',1\n3,y,0", [2, 3, 5]),
        ("a;label\n\n1;0\n2;1\n3;0\n", [3, 4, 5]),
    ],
)
def test_a_row_is_named_by_its_line(content, lines, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(content.replace("'", '"').encode())
    data = read(path)
    named = {}
    for split in (data.train, data.test):
        named.update(zip(split.stored[:][:, 0].tolist(), split.names, strict=True))
    assert [named[value] for value in (1, 2, 3)] == [f"{path}: line {line}" for line in lines]


def test_rows_of_a_second_file_are_named_by_it(tmp_path):
    first = write(tmp_path / "a.csv", a=[1.5, 2.5], label=[0, 1])
    second = write(tmp_path / "b.parquet", a=[3.5, 4.5], label=[0, 1])
    data = read(first, test=str(second))
    assert [*data.train.names] == [f"{first}: line 2", f"{first}: line 3"]
    assert [*data.test.names] == [f"{second}: row 1", f"{second}: row 2"]


def test_a_label_of_words_is_named_by_its_row():
    words = pa.table({"words": [["a", "b"], ["c"]], "tags": [["O", "O"], [None]]})
    with pytest.raises(DataError, match="column 'tags', row 2: holds nothing"):
        columns.word_labels(DataTable(Path("t"), words, ""), ["tags"], None, "words")


def test_labels_of_words_must_be_integers_or_texts():
    """Fractions were cut to integers without an error."""
    words = pa.table({"words": [["a", "b"]], "tags": [[0.5, 1.5]]})
    with pytest.raises(DataError, match="column 'tags': got lists of double"):
        columns.word_labels(DataTable(Path("t"), words, ""), ["tags"], None, "words")


def test_lists_without_labels_of_words_are_refused():
    empty = pa.array([[], []], pa.list_(pa.int64()))
    words = pa.table({"words": pa.array([[], []], pa.list_(pa.string())), "tags": empty})
    with pytest.raises(DataError, match="column 'tags': all lists are empty"):
        columns.word_labels(DataTable(Path("t"), words, ""), ["tags"], None, "words")


# What is refused

CELLS = {
    "no label": ({"label": [0, 1] * 3 + [None, 1]}, "column 'label', row 7: holds nothing"),
    "an empty label": ({"label": ["no", ""] * 4}, "column 'label', row 2: holds nothing"),
    "a negative label": ({"label": [-1, 1] * 4}, "labels from -1 to 1; expected 0 to 999"),
    "10,000 classes": ({"label": [0, 9999] * 4}, "labels from 0 to 9999; expected 0 to 999"),
    "one class": ({"label": ["no"] * 8}, "has 1 different labels; expected 2 to 1000"),
    "NaN": ({"b": [1.0] * 4 + [float("nan")] * 4}, "column 'b', row 5: NaN or infinity"),
    "nothing": ({"b": [1.0, None] * 4}, "column 'b', row 2: holds nothing"),
    "ragged lists": (
        {"x": [[1, 2]] * 7 + [[1]]},
        "column 'x', row 8: has 1 values, the first row 2",
    ),
    "nothing in a list": ({"x": [[1, 2]] * 7 + [[1, None]]}, "column 'x', row 8: holds nothing"),
    "another split": ({"split": ["train", "tast"] * 4}, "row 2: got 'tast', expected train | "),
    "no test side": ({"split": ["train"] * 8}, "has 8 rows to train and 0 to test"),
}


@pytest.mark.parametrize("case", CELLS)
def test_what_does_not_fit_is_named(tmp_path, case):
    changes, says = CELLS[case]
    path = write(tmp_path / "a.parquet", **(numbers() | changes))
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    assert says in message


def test_targets_with_decimal_commas_are_named(tmp_path):
    targets = [f"{number},5" for number in range(1001)]
    path = write(tmp_path / "a.parquet", a=list(range(1001)), label=targets)
    with pytest.raises(DataError, match=r"1000 classes, or numbers with a decimal point, not a"):
        read(path)


def test_text_among_numbers_is_named(tmp_path):
    path = write(tmp_path / "a.csv", a=["1", "x", "2"], b=[1, 2, 3], y=[0, 1, 1])
    with pytest.raises(DataError, match=r"column 'a', line 3: got 'x', expected a number"):
        read(path, inputs=["a", "b"])


def test_the_column_that_is_nearest_to_a_misspelt_name_comes_first(tmp_path):
    sensors = {f"sensor_{number}": [1, 2] for number in range(65)}
    path = write(tmp_path / "a.csv", **sensors, defect=[0, 1])
    with pytest.raises(ConfigError, match=r"expected one of defect, sensor_0.*66 in all"):
        read(path, labels="defekt")


def test_columns_that_are_not_there(tmp_path):
    path = write(tmp_path / "a.csv", a=[1, 2], kind=[0, 1], day=[datetime.date(2020, 1, 1)] * 2)
    with pytest.raises(ConfigError, match=r"data\.labels: got null, .* the columns day, a, kind;"):
        read(path)
    with pytest.raises(ConfigError, match=r"data\.labels: got kinds, .* has no column of that"):
        read(path, labels="kinds")
    with pytest.raises(ConfigError, match=r"data\.split: got side, .* has no column of that name"):
        read(path, labels="kind", split="side")
    with pytest.raises(ConfigError, match=r"data\.labels: got kinds, .* has no column of that"):
        read(path, labels=["kind", "kinds"])
    with pytest.raises(DataError, match=r"column 'day', line 2: got datetime.*expected a number"):
        read(path, labels="kind", inputs=["day"])
    (tmp_path / "b.csv").write_text("a,a,y\n1,2,0\n")
    with pytest.raises(
        ConfigError, match=r"data\.inputs: got a, and .* has several columns of that"
    ):
        read(tmp_path / "b.csv", inputs=["a"])


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "red/../../secret.png", "link"])
def test_a_path_outside_is_refused(tmp_path, name):
    root = tmp_path / "root"
    content = write_pictures(root)
    picture(RED).save(tmp_path / "secret.png")
    (root / "link").symlink_to(tmp_path / "secret.png")
    content["path"][2] = name
    path = write(root / "a.csv", **content)
    with pytest.raises(DataError) as caught:
        read(path, on_bad="skip")
    assert str(caught.value) == (
        f"{path}: column 'path', line 4: got {name}, outside of {root}; expected paths below it; "
        "data.folder= sets another folder"
    )


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"\x00\xff" * 50, b"a,label\n1\n"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_damaged_file_is_refused(tmp_path, content, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(PtqError) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.inputs=[]", "data.inputs: got [], expected null, a column or a list of columns"),
        ("data.inputs=3", "data.inputs: got 3, expected null, a column or a list of columns"),
        ("data.shape=[0]", "data.shape: got [0], expected null or sizes of at least 1"),
        ("data.on_bad=stop", "data.on_bad: got 'stop', expected error | skip"),
    ],
)
def test_settings_out_of_range(override, says):
    with pytest.raises(ConfigError) as caught:
        make_config("data=table", override)
    assert str(caught.value) == says


def test_a_root_that_is_no_file(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^data\.root: got .*, expected a \.csv, \.parquet or \.jsonl file"
    ):
        locate.find_data(TableConfig(root=str(tmp_path)))


# Any table: what comes out is what went in, or one line says why not.

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64)
CELL = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), FLOATS, st.text(max_size=5))


def samples(content, names, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "samples.npy"
    columns.write_numbers(path, content, names, None)
    return np.load(path)


@given(st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=6))
def test_numbers_come_out_as_they_are(tmp_path_factory, rows):
    names = ["a", "b", "c"]
    content = DataTable(
        Path("t"), pa.table(dict(zip(names, zip(*rows, strict=True), strict=True))), ""
    )
    np.testing.assert_array_equal(samples(content, names, tmp_path_factory), rows)


@given(st.lists(CELL, min_size=1, max_size=6))
def test_any_column_is_taken_or_refused_in_one_line(tmp_path_factory, cells):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    quoted = (f'"{cell}"'.replace("\0", "") if cell is not None else "" for cell in cells)
    path.write_text("a,y\n" + "".join(f"{cell},{cell}\n" for cell in quoted), "utf-8", "replace")
    try:
        result = DataTable(Path("t"), read_columns(path), "")
        labels, names, _ = columns.labels(result, ["y"], None)
        assert len(labels) == len(result.columns)
        assert labels.dtype.kind in "fb" or labels.max() < len(names)
        assert np.isfinite(samples(result, ["a"], tmp_path_factory)).all()
    except PtqError as error:
        assert str(error) and "\n" not in str(error)


@given(st.text(max_size=30))
def test_no_path_leads_outside(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp().resolve()
    content = DataTable(
        Path("t"), pa.table({"path": [text.encode("utf-8", "replace").decode()]}), ""
    )
    try:
        [result] = columns.pictures_at(content, "path", folder)
    except DataError as error:
        assert str(error).startswith("t: column 'path', row 1: ")
    else:
        assert result.content.resolve().is_relative_to(folder)


def test_what_numbers_the_rows_is_no_input(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,a,b,label\n" + "".join(f"{n},{n % 7},{n % 5},{n % 2}\n" for n in range(40)))
    assert read(path).image_shape == (2,)
    assert read(path, inputs=["id", "a"]).image_shape == (2,)


def test_the_order_of_named_classes_is_reported(tmp_path, caplog):
    caplog.set_level("INFO")
    path = write(tmp_path / "a.csv", a=[1, 2, 3, 4] * 4, label=["yes", "no"] * 8)
    assert read(path).class_names == ("no", "yes")
    assert "in alphabetical order: no, yes; data.classes= sets" in caplog.text
    caplog.clear()
    assert read(path, classes=["yes", "no"]).class_names == ("yes", "no")
    assert "alphabet" not in caplog.text


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_of_many_columns(tmp_path, suffix):
    """As gene tables are: thousands of columns, few rows."""
    count = 5000
    random = np.random.default_rng(0)
    genes = {f"g{n}": random.normal(size=12) for n in range(count)}
    data = read(write(tmp_path / f"a{suffix}", **genes, label=[0, 1] * 6))
    assert data.image_shape == (count,)
    result, expected = whole(data)[0], np.stack(list(genes.values()), axis=1)
    np.testing.assert_array_equal(
        result[np.argsort(result[:, 0])], expected[expected[:, 0].argsort()]
    )


def write_names(path, count):
    names = [f"g{n}" for n in range(count)]
    if path.suffix == ".csv":
        path.write_text(",".join(names) + "\n" + ",".join("1" * count) + "\n")
    else:
        pq.write_table(pa.table([pa.array([1])] * count, names=names), path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_more_columns_than_a_table_may_have(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(columns, "LIMITS", Limits(columns=10))
    assert len(read_columns(write_names(tmp_path / f"a{suffix}", 10)).column_names) == 10
    with pytest.raises(
        DataError, match=r"a\.\w+: has 11 columns, expected at most 10; try one column"
    ):
        read_columns(write_names(tmp_path / f"a{suffix}", 11))


def test_a_million_columns_are_refused_before_they_are_read(tmp_path):
    path = write_names(tmp_path / "a.csv", 1_000_000)
    with pytest.raises(DataError, match="has 1,000,000 columns, expected at most 100,000"):
        read(path)


def test_the_line_of_names_may_have_lines_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "LIMITS", Limits(columns=3))
    path = tmp_path / "a.csv"
    path.write_text('"a\nb",c,"d,e"\n1,2,3\n')
    assert read_columns(path).column_names == ["a\nb", "c", "d,e"]
    path.write_text('"a\nb",c,d,e\n1,2,3,4\n')
    with pytest.raises(DataError, match="has 4 columns"):
        read_columns(path)
    monkeypatch.setattr(table, "MAX_HEAD_BYTES", 8)
    with pytest.raises(DataError, match="its line of names is longer than 8 bytes"):
        read_columns(path)


def test_a_parquet_file_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "LIMITS", Limits(bytes=1_000_000))
    path = write(tmp_path / "a.parquet", text=["a" * 1000] * 5000, label=[0] * 5000)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match="unpacks to more than 1,000,000 bytes"):
        read(path)
    monkeypatch.setattr(columns, "LIMITS", Limits(rows=4999))
    with pytest.raises(DataError, match="has 5,000 rows, expected at most 4,999"):
        read(path)


def test_categories_of_parquet_are_text(tmp_path):
    kinds = pa.array(["no", "yes"] * 2000).dictionary_encode()
    pq.write_table(pa.table({"a": range(4000), "label": kinds}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").class_names == ("no", "yes")


def test_a_gzipped_table_is_refused(tmp_path):
    with gzip.open(tmp_path / "a.csv.gz", "wb") as file:
        file.write(b"a,label\n1,0\n2,1\n")
    with pytest.raises(DataError, match=r"a\.csv\.gz: is gzipped, expected it unpacked"):
        read(tmp_path / "a.csv.gz")


def test_a_parquet_file_is_unpacked_in_a_process_of_its_own(tmp_path, monkeypatch):
    """A row may be a list of any length, which Arrow unpacks before it says so."""
    path = write(tmp_path / "a.parquet", **numbers())
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", None)  # of this process
    assert len(read_columns(path)) == 8


@pytest.mark.parametrize(
    ("columns_of", "chosen", "names"),
    [
        ({"y": ["cat|dog", "", "dog"]}, ["y"], ("cat", "dog")),
        ({"y": ["cat | dog", " ", "dog|"]}, ["y"], ("cat", "dog")),
        ({"y": [["cat", "dog"], [], ["dog"]]}, ["y"], ("cat", "dog")),
        ({"y": [[0, 1], [], [1]]}, ["y"], ("0", "1")),
        ({"y": [[1, 1], [0, 0], [0, 1]]}, ["y"], ("0", "1")),
        ({"cat": [1, 0, 0], "dog": [1, 0, 1]}, ["cat", "dog"], ("cat", "dog")),
    ],
)
def test_several_labels_a_sample(columns_of, chosen, names):
    content = DataTable(Path("t"), pa.table(columns_of), "")
    labels, classes, _ = columns.labels(content, chosen, None)
    assert labels.dtype == np.bool_
    assert labels.tolist() == [[True, True], [False, False], [False, True]]
    assert classes == names


@pytest.mark.parametrize(
    ("columns_of", "chosen", "message"),
    [
        ({"y": ["cat|dog", "cow"]}, ["y"], "row 2: class 'cow' is none of data.classes"),
        ({"y": [[0.5], [1.0]]}, ["y"], "expected labels as integers"),
        ({"cat": [1, 2], "dog": [1, 0]}, ["cat", "dog"], "got other values than 0 and 1"),
    ],
)
def test_labels_that_are_no_classes_are_refused(columns_of, chosen, message):
    content = DataTable(Path("t"), pa.table(columns_of), "")
    with pytest.raises(DataError, match=message):
        columns.labels(content, chosen, ["cat", "dog"])


@pytest.mark.parametrize(
    ("columns_of", "chosen"),
    [({"y": [[1, 1], [0, 0]]}, ["y"]), ({"cat": [1, 0], "dog": [1, 0]}, ["cat", "dog"])],
)
def test_more_names_than_columns_of_labels_are_refused(columns_of, chosen):
    """The table of the classes needs a name for each column."""
    content = DataTable(Path("t"), pa.table(columns_of), "")
    with pytest.raises(DataError, match=r"labels up to 1, but 3 class names \(data\.classes\)"):
        columns.labels(content, chosen, ["cat", "dog", "cow"])


@pytest.mark.parametrize(("limit", "says"), [({"rows": 3}, "has 4 rows"), ({"bytes": 30}, "bytes")])
def test_a_csv_file_has_the_limits_of_other_tables(limit, says, tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", a=[1, 2, 3, 4], label=[0, 1, 0, 1])
    monkeypatch.setattr(columns, "LIMITS", Limits(**limit))
    with pytest.raises(DataError, match=says):
        read(path)


# Columns that would be left out, or taken, without a word

ODD_NUMBERS = {
    "a mark for a missing number": (["1.5", "?", "2.5"], r"row 2: got '\?', where 2 of 3 rows"),
    "decimal commas": (["1,5", "2,5", "3,5"], "row 1: got '1,5', .* try a decimal point"),
    "thousands": (["1,234.5", "2,000", "5"], "row 1: got '1,234.5'"),
    "percent": (["5%", "6%", "7 %"], "row 1: got '5%'"),
}


@pytest.mark.parametrize("case", ODD_NUMBERS)
def test_numbers_that_are_text_are_not_left_out(tmp_path, case):
    cells, says = ODD_NUMBERS[case]
    path = write(tmp_path / "a.parquet", a=cells, b=[1.5, 2.5, 3.5], label=[0, 1, 1])
    with pytest.raises(DataError, match=f"column 'a', {says}"):
        read(path)
    assert read(path, inputs=["b"]).image_shape == (1,)


def test_a_column_of_texts_is_left_out(tmp_path):
    names = ["Mill St 4", "7", "Elm St"]
    path = write(tmp_path / "a.csv", street=names, b=[1.5, 2.5, 3.5], label=[0, 1, 1])
    assert read(path).image_shape == (1,)


def test_a_number_called_x_is_one_of_several(tmp_path):
    path = write(tmp_path / "a.csv", x=[1.5, 2.5, 3.5], z=[4.5, 5.5, 6.5], label=[0, 1, 1])
    assert read(path).image_shape == (2,)


@pytest.mark.parametrize("name", [None, "patient"])
def test_an_index_of_pandas_is_no_input(tmp_path, name):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.5, 2.5, 3.5], "label": [0, 1, 1]}, index=[7, 5, 6])
    frame.rename_axis(name).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").image_shape == (1,)


def test_decimals_of_a_database_are_numbers(tmp_path):
    prices = pa.array([1, 2, 3]).cast(pa.decimal128(25, 2))
    labels = pa.array([0, 1, 1]).cast(pa.decimal128(19, 0)).cast(pa.decimal128(9, 0))
    pq.write_table(pa.table({"a": prices, "label": labels}), tmp_path / "a.parquet")
    samples, numbered = whole(read(tmp_path / "a.parquet"))
    assert samples.dtype == np.float64 and sorted(samples[:, 0]) == [1, 2, 3]
    assert sorted(numbered) == [0, 1, 1]


def test_spaces_and_a_mark_before_the_names(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\ufeffsentence, b , label\n" + "".join(f"00{n},{n},{n}\n" for n in (0, 1)))
    content = read_columns(path)
    assert content.column_names == ["sentence", "b", "label"]
    assert content.column("sentence").to_pylist() == ["000", "001"]


@pytest.mark.parametrize(
    ("content", "encoding", "says"),
    [
        ("a,label\n1,ü\n2,o\n", "latin-1", "column 'label', line 2: is not in UTF-8"),
        ("path,label\nö.png,0\n", "cp1252", "column 'path', line 2: is not in UTF-8"),
        ("größe,label\n1,0\n", "latin-1", "its line of names is not in UTF-8"),
        ("a,label\n1,0\n", "utf-16", "is in UTF-16, expected UTF-8"),
    ],
)
def test_another_encoding_is_named(tmp_path, content, encoding, says):
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode(encoding))
    with pytest.raises(DataError, match=says):
        read(path)


def test_booleans_take_the_order_of_classes_in_any_case(tmp_path):
    path = write(tmp_path / "a.parquet", a=[1.5, 2.5, 3.5], label=[True, False, True])
    data = read(path, classes=["True", "False"])
    assert data.class_names == ("true", "false")
    assert whole(data)[1].tolist() == [int(value == 2.5) for value in whole(data)[0][:, 0]]


ONE_HOT = [[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    "rows",
    [
        {"y": ONE_HOT},
        {"y": (np.array(ONE_HOT) == 1).tolist()},
        {"y": np.float64(ONE_HOT).tolist()},
        {f"y_{number}": values for number, values in enumerate(zip(*ONE_HOT, strict=True))},
        {f"y_{number}": values for number, values in enumerate(np.float64(ONE_HOT).T)},
    ],
)
def test_one_hot_labels_are_classes(rows, caplog):
    caplog.set_level("INFO")
    content = DataTable(Path("t"), pa.table(rows), "")
    labels, classes, _ = columns.labels(content, [*rows], None)
    assert labels.tolist() == [1, 2, 0, 1] and len(classes) == 3
    assert "one-hot, taken as 3 classes" in caplog.text


def test_one_hot_lists_of_two_classes():
    content = DataTable(Path("t"), pa.table({"y": [[0, 1], [1, 0], [0, 1]]}), "")
    assert columns.labels(content, ["y"], None)[0].tolist() == [1, 0, 1]


def test_tab_separated_files_are_tables(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tlabel\n1\t0\n")
    assert find_settings(tmp_path / "a.tsv")["data"] == "table"


def test_bytes_that_are_no_picture_are_named_without_their_object(tmp_path):
    content = {"image": [b"II*\0", b"MM\0*"], "label": [0, 1]}
    with pytest.raises(DataError, match=r"row 1: cannot be read \(ValueError: it is no JPEG or"):
        read(write(tmp_path / "a.parquet", **content))


def test_white_space_of_other_scripts_may_be_a_word(tmp_path):
    (tmp_path / "a.conll").write_bytes("\u3000 O\r\na\u00a0b  B-X\r\n\r\n".encode())
    content = read_columns(tmp_path / "a.conll")
    assert content.column("tokens").to_pylist() == [["\u3000", "a\u00a0b"]]
    assert content.column("labels").to_pylist() == [["O", "B-X"]]


def test_columns_of_one_file_only_are_listed(tmp_path, caplog):
    caplog.set_level("INFO")
    first = write(tmp_path / "a.csv", a=[1.5, 2.5], b=[1.5, 2.5], label=[0, 1])
    second = write(tmp_path / "b.csv", a=[3.5, 4.5], label=[0, 1])
    with pytest.raises(DataError, match=r"b\.csv: column 'b', line 2: holds nothing"):
        read(first, test=str(second))
    assert "b.csv: columns in one of both files only: b" in caplog.text


@pytest.mark.parametrize("divided", [True, False])
def test_groups_that_the_split_divides_are_counted(tmp_path, caplog, divided):
    groups = ["g", "g", "h", "i"] if divided else ["g", "h", "i", "i"]
    split = ["train", "test", "train", "train"]
    path = write(
        tmp_path / "a.csv", a=[1.5, 2, 3, 4], label=[0, 1, 0, 1], groups=groups, split=split
    )
    read(path)
    assert ("1 of 1 groups of the test samples have training" in caplog.text) == divided
