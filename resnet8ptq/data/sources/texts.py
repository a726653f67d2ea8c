"""Turns texts in columns of a table into tokens: records [N] of BERT's three inputs.

A text may be a list of words with a label each. The first token of a word then gets the word's
label.

A tokenizer file is untrusted, and a short text may become many tokens. A separate process with
limited memory therefore tokenizes, and writes the records to a file, from which they are mapped.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config import limits
from resnet8ptq.config.limits import listed
from resnet8ptq.config.schema import TableConfig
from resnet8ptq.core import cache, code, files, invocation, isolation
from resnet8ptq.core.confinement import MAX_SECONDS
from resnet8ptq.core.errors import ConfigError, DataError, errors_as
from resnet8ptq.core.records import Array
from resnet8ptq.core.text import list_names
from resnet8ptq.data.lazy import AT_ONCE
from resnet8ptq.data.sources import columns
from resnet8ptq.data.sources.columns import DataTable
from resnet8ptq.data.sources.labels import IGNORED
from resnet8ptq.data.sources.rows import RowNames

log = logging.getLogger(__name__)

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
PAIRS = (("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"))
TEXTS = ("text", "sentence", "question", "tokens")
# Further names of label columns, where none has a usual name
LABELS = ("score", "similarity", "category", "intent", "ner_tags", "tags")
MAX_TOKENS = 128  # the default, if neither settings nor tokenizer set a length
MAX_BYTES = 2**28  # largest tokenizer file
EXPECTED = "expected a tokenizer.json of Hugging Face's tokenizers"

Texts = list[str]
Words = list[list[str]]


def find_columns(table: DataTable, config: TableConfig, others: Sequence[str]) -> list[str]:
    """Return the column of texts, or two columns of pairs, by `data.text` or by usual names.

    Args:
        others: the columns that may hold texts.

    Raises:
        ConfigError: `data.text` is null, and no columns or several choices have usual names; or
            `data.inputs` is set.
    """
    if config.inputs is not None:
        raise ConfigError(
            f"data.inputs: got {config.inputs} with data.tokenizer, expected null; "
            "try data.text= for the columns of texts"
        )
    if config.text is not None:
        return [str(name) for name in limits.listed(config.text)]

    # List each choice of columns with usual names
    by_lower = {name.lower(): name for name in others}
    usual = []
    for one, other in PAIRS:
        if one in by_lower and other in by_lower:
            usual.append([by_lower[one], by_lower[other]])
    for name in TEXTS:
        if name in by_lower:
            usual.append([by_lower[name]])
    if len(usual) != 1:
        pairs = " | ".join(f"[{one}, {other}]" for one, other in PAIRS)
        raise ConfigError(
            f"data.text: got null, and {table.source} has the columns {list_names(table.names)}; "
            f"expected one column, two for pairs, or one of {' | '.join(TEXTS)} | "
            f"{pairs} in the table"
        )
    log.info("%s: data.text: %s", table.source, list_names(usual[0]))
    return usual[0]


@dataclass(frozen=True)
class Encoded:
    """Texts and their tokens.

    Attributes:
        records: the tokens [N].
        texts: the texts [N]; two texts of one sample are joined by ` / `, words by spaces.
        words: for each token [N, tokens], the number from 0 of the word that the token begins; -1
            for other tokens. None unless the texts are lists of words in one column.
    """

    records: Array
    texts: Texts
    words: NDArray[np.int64] | None


def encode(
    table: DataTable, names: Sequence[str], config: TableConfig, cache_root: Path
) -> Encoded:
    """Return the texts of each row as tokens, mapped from the cache.

    The tokens are padded to the longest sample. With `data.pairs=apart`, each text is a sample; the
    two texts of a row are adjacent. A warning reports the number of truncated samples.

    Args:
        names: one column, or two columns with the texts of a pair.

    Raises:
        ConfigError: the package tokenizers is not installed, or `data.text`, `data.pairs` or
            `data.max_tokens` is unsuitable.
        DataError: the tokenizer cannot be read, a column does not hold texts, or a cell is null or
            has no tokens.
    """
    if find_spec("tokenizers") is None:
        raise ConfigError(
            f"data.tokenizer: got {config.tokenizer}, which needs the package tokenizers; "
            f"try {invocation.install('text')}"
        )
    path = Path(str(config.tokenizer))
    if path.stat().st_size > MAX_BYTES:  # a sparse file can be larger than the disk
        raise DataError(f"{path}: larger than {MAX_BYTES:,} bytes; {EXPECTED}")
    texts = [_read_texts(table, name) for name in names]
    apart = config.pairs == "apart"
    if apart and len(names) != 2:
        raise ConfigError(f"data.pairs: got apart with data.text={names[0]}, expected two columns")

    # Tokenize once, in a separate process
    crashed = DataError(f"{path}: reading it crashed, or took too much memory or time; {EXPECTED}")

    def make(folder: Path) -> None:
        sources = (table.rows, texts, apart, config.max_tokens, folder)
        isolation.call(_write, path, *sources, crashed=crashed, seconds=MAX_SECONDS)

    key: cache.Key = {
        "sha256": table.sha256,
        "tokenizer": files.sha256(path),
        "texts": json.dumps([list(names), config.max_tokens, apart]),
        "code": code.behind(__name__),
    }
    entry = cache.entry(cache_root, "texts", key, make)

    # Map the records from the cache
    noted = json.loads((entry / "notes.json").read_text())
    records = np.load(entry / "records.npy", mmap_mode="r")
    words = None
    if are_words(table, names):
        words = np.load(entry / "words.npy")
    if noted["truncated"]:
        log.warning(
            "%s: %d of %d texts have more than %d tokens and are truncated; "
            "try data.max_tokens=, up to the length that the network takes",
            table.source,
            noted["truncated"],
            len(records),
            noted["most"],
        )

    # Show each sample as one text
    shown = []
    for row in zip(*texts, strict=True):
        of_row = [" ".join(listed(text)) for text in row]
        if apart:
            shown.extend(of_row)
        else:
            shown.append(" / ".join(of_row))
    return Encoded(records, shown, words)


def are_words(table: DataTable, names: Sequence[str]) -> bool:
    """Return whether the texts are lists of words, in one column."""
    return len(names) == 1 and columns.are_words(table.column("data.text", names[0]))


def align(words: NDArray[np.int64], labels: NDArray[np.object_]) -> NDArray[np.int64]:
    """Return labels [N, tokens]: the label of a word at its first token, `IGNORED` elsewhere.

    >>> labels = np.empty(1, np.object_)
    >>> labels[0] = np.array([5, 2])
    >>> align(np.array([[-1, 0, -1, 1, -1]]), labels).tolist()
    [[-100, 5, -100, 2, -100]]

    Args:
        words: see `Encoded`.
        labels: for each row [N], the labels of its words.
    """
    aligned = np.full(words.shape, IGNORED, np.int64)
    for row, numbers, of_words in zip(aligned, words, labels, strict=True):
        begins = numbers >= 0
        row[begins] = of_words[numbers[begins]]
    return aligned


def _read_texts(table: DataTable, name: str) -> Texts | Words:
    column = table.column("data.text", name)
    if not (columns.is_text(column) or columns.are_words(column)):
        raise DataError(
            f"{table.source}: column {name!r}: got {column.type}, expected text, or lists of words"
        )
    columns.check_filled(column, partial(table.rows.cell, name))
    read: Texts | Words = column.to_pylist()
    return read


def _write(
    path: Path,
    rows: RowNames,
    texts: Sequence[Texts | Words],
    apart: bool,
    most: int | None,
    to: Path,
) -> None:
    """Tokenize texts and write them as records; runs in a separate process."""
    import tokenizers

    with errors_as(DataError, f"{path}: cannot be read", EXPECTED):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        cut = tokenizer.truncation or {}
        most = most or cut.get("max_length", MAX_TOKENS)
        added = tokenizer.num_special_tokens_to_add(len(texts) == 2 and not apart)
        if most <= added:  # so short a limit leaves no room for text
            raise ConfigError(
                f"data.max_tokens: got {most}, expected more than the {added} tokens that {path} "
                "adds"
            )
        tokenizer.enable_truncation(**{**cut, "max_length": most, "stride": 0})
        tokenizer.no_padding()
        samples: list[Any] = list(zip(*texts, strict=True))  # a text or a pair for each row
        if len(texts) == 1 or apart:
            samples = list(chain.from_iterable(samples))
        ids, types, words, truncated = _tokenize(tokenizer, samples)

    # A sample without tokens cannot be run
    per_row = len(texts) if apart else 1
    for number, tokens in enumerate(ids):
        if not len(tokens):
            name = rows.name(number // per_row)
            raise DataError(f"{name}: has no tokens; expected text in each row")
    _save(ids, types, to / "records.npy")
    if words:
        np.save(to / "words.npy", _pad(words, max(map(len, ids))))
    files.write_text(to / "notes.json", json.dumps({"truncated": truncated, "most": most}))


Rows = list[NDArray[np.integer]]


def _tokenize(tokenizer, samples) -> tuple[Rows, Rows, Rows, int]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Return ids, types and words of the tokens, and the number of truncated samples.

    A sample is a text, a pair of texts, or a list of words. The words are empty unless samples are
    lists of words; see `Encoded.words`.
    """
    ids: Rows = []
    types: Rows = []
    words: Rows = []
    truncated = 0
    are_words = isinstance(samples[0], list)
    for start in range(0, len(samples), AT_ONCE):
        some = samples[start : start + AT_ONCE]
        for encoded in tokenizer.encode_batch(some, is_pretokenized=are_words):
            ids.append(np.array(encoded.ids, np.int32))
            types.append(np.array(encoded.type_ids, np.uint8))
            if are_words:
                words.append(_find_begins(encoded.word_ids))
            truncated += bool(encoded.overflowing)
    return ids, types, words, truncated


def _find_begins(numbers: Sequence[int | None]) -> NDArray[np.int64]:
    """Return for each token the number of the word that it begins; -1 for all other tokens.

    >>> _find_begins([None, 0, 0, 1, None]).tolist()
    [-1, 0, -1, 1, -1]
    """
    begins = []
    last = None
    for number in numbers:
        is_begin = number is not None and number != last
        begin = number if is_begin else -1
        begins.append(begin)
        last = number
    return np.array(begins, np.int64)


def _pad(rows: Rows, length: int) -> NDArray[np.int64]:
    padded = np.full((len(rows), length), -1, np.int64)
    for whole, row in zip(padded, rows, strict=True):
        whole[: len(row)] = row
    return padded


def _save(ids: Rows, types: Rows, to: Path) -> None:
    """Write records, padded with zeros at the end to the longest sample."""
    longest = max(map(len, ids))
    dtype = np.dtype([(name, "<i8", (longest,)) for name in INPUTS])
    files.check_room(dtype.itemsize * len(ids), to.parent)
    records = np.lib.format.open_memmap(to, "w+", dtype, (len(ids),))
    for record, tokens, kinds in zip(records, ids, types, strict=True):
        length = len(tokens)
        record["input_ids"][:length] = tokens
        record["token_type_ids"][:length] = kinds
        record["attention_mask"][:length] = 1
    records.flush()
