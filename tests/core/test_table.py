"""A table of typed columns in its renderings."""

import io

from rich.console import Console

from resnet8ptq.core.table import Column, Table, number, to_csv

COLUMNS = (
    Column("name", lambda row: row[0], key="name"),
    Column("note", lambda row: row[2], str.upper),
    Column("", lambda row: row[1], key="value"),
    number("value", lambda row: row[1], ".1f"),
)
TABLE = Table(COLUMNS, [("a|b", 0.25, None), ("c", 2.0, None)], "Title")


def test_texts_are_for_people_and_values_for_files():
    assert TABLE.heads == ["name", "note", "value"]
    assert TABLE.lines == [["a|b", "", "0.2"], ["c", "", "2.0"]]
    assert to_csv(TABLE) == "name,value\na|b,0.25\nc,2.0\n"


def test_columns_without_a_text_are_left_out():
    assert TABLE.without_empty().heads == ["name", "value"]


def test_a_column_that_another_table_lacks_is_empty_in_the_file():
    other = Table([Column("", str.title, key="other")], ["x"])
    assert to_csv(TABLE, other) == "name,value,other\na|b,0.25,\nc,2.0,\n,,X\n"


def test_markdown_is_escaped_and_numbers_are_aligned_to_the_right():
    text = TABLE.without_empty().to_markdown(lambda cell: cell.replace("|", r"\|"))
    assert text == "| name | value |\n|---|---:|\n| a\\|b | 0.2 |\n| c | 2.0 |"


def test_a_terminal_gets_title_heads_and_cells():
    out = io.StringIO()
    TABLE.print(Console(file=out, width=80, color_system=None))
    assert all(text in out.getvalue() for text in ("Title", "note", "a|b", "2.0"))
