"""Makes untrusted text safe for a terminal, a page or a file name; suggests words in messages."""

import re
from collections.abc import Collection, Iterable


def redact(text: str) -> str:
    """Return a message without the user names, passwords and parameters of its URLs.

    A password may contain any of `/?#@`, so everything up to the last `@` of a URL may belong to
    it. In the path of an SQLite or local file, an `@` stays.

    >>> redact("cannot reach http://me:a/b@c@host:5000/runs")
    'cannot reach http://host:5000/runs'
    >>> redact("postgresql://host/name?password=secret: refused")
    'postgresql://host/name?... refused'
    """
    return _URL.sub(_without_secrets, text)


_URL = re.compile(r"(?<![\w+.-])([\w+.-]+://)(\S+)")


def _without_secrets(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    user, _, address = rest.rpartition("@")
    if re.fullmatch(r"(sqlite(\+\w+)?|file)://", scheme) and rest.startswith("/"):
        # an @ here belongs to the path
        user = ""
        address = rest
    if "?" in user:  # the ? is part of the password, or of parameters that contain an @
        return f"{scheme}..."
    shown, mark, _ = address.partition("?")
    return f"{scheme}{shown}{mark and '?...'}"


def printable(text: str) -> str:
    """Return an untrusted text in one line without control characters.

    Use it for each text of a file, a store or a library that reaches a terminal, a log or a page.
    Such a text could move the cursor, or imitate a line of this program.

    >>> printable("int8\\n\\x1b[2J done")
    'int8 ?[2J done'
    """
    return show(" ".join(text.split()))


def one_line(error: BaseException) -> str:
    """Return an error's type and text in one line of at most 300 characters, after `redact`.

    >>> one_line(OSError("cannot reach\\nhttp://me:password@host/runs"))
    'OSError: cannot reach http://host/runs'
    """
    return shorten(printable(redact(f"{type(error).__name__}: {error}")), 300)


def shorten(text: str, length: int) -> str:
    """Return a text of at most `length` characters: its beginning and its end.

    The end matters, because ONNX Runtime's messages name the node, then a C++ signature, then the
    reason.

    >>> shorten("Attention failed in f(int, int, int): wrong shape", 27)
    'Attention f ... wrong shape'
    """
    if len(text) <= length:
        return text
    half = (length - len(" ... ")) // 2
    return f"{text[:half].rstrip()} ... {text[-half:].lstrip()}"


def escape_markdown(text: object) -> str:
    """Return a text in one line with its Markdown characters escaped, except those of lists."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!&])", r"\\\1", printable(str(text)))


def code_span(text: object) -> str:
    """Return a text in one line as Markdown code, which no backtick in the text can end.

    >>> code_span("calib=`x`")
    '`` calib=`x` ``'
    """
    shown = printable(str(text)) or " "
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""  # Markdown removes one space on each side
    return f"{fence}{pad}{shown}{pad}{fence}"


def unescape_markdown(text: str) -> str:
    """Remove the escapes of `escape_markdown`.

    >>> unescape_markdown(escape_markdown("per_channel=true"))
    'per_channel=true'
    """
    return re.sub(r"\\(.)", r"\1", text)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is closest to a mistyped word; None if none is close.

    >>> nearest("INT8", ["fp32", "int8", "uint8"])
    'int8'
    >>> nearest("depoly", ["advise", "deploy", "report"])
    'deploy'
    >>> nearest("imagnet", ["raw", "torchvision_imagenet"])
    'torchvision_imagenet'
    """
    from difflib import get_close_matches

    wanted = word.casefold().rstrip("=")
    spelled = {name.casefold().rstrip("="): name for name in known}
    close = get_close_matches(wanted, spelled, n=1)
    if close:
        return spelled[close[0]]

    # Otherwise compare parts of names, such as imagenet of torchvision_imagenet
    parts: dict[str, str] = {}
    for name in spelled:
        if "_" in name:
            named = filter(None, reversed(name.split("_")))
            parts |= dict.fromkeys(named, name)
    close = get_close_matches(wanted, parts, n=1, cutoff=0.8)
    if not close:
        return None
    return spelled[parts[close[0]]]


_MANY = 20  # longer lists would hide the rest of the message
_SOME = 5  # words of a longer list


def or_nearest(word: object, known: Collection[str], in_help: bool = True) -> str:
    """Return the known words for a message, with the closest match to `word`, if any.

    For more than 20 words, the text has their number, and a few of them unless `--help` lists all.

    >>> or_nearest("int9", ["fp32", "int8"])
    'fp32 | int8 (nearest: int8)'

    Args:
        in_help: whether `--help` lists the words, as it does settings and their options.
    """
    close = nearest(str(word), known)
    listed = " | ".join(known)
    if len(known) > _MANY:
        some = " | ".join(list(known)[:_SOME])
        listed = f"one of {len(known)}, such as {some}"
        if in_help:
            listed = f"one of {len(known)} that --help lists"
    if not close:
        return listed
    return f"{listed} (nearest: {close})"


def no_such_key(key: str, known: Collection[str], option: str = "") -> str:
    """Return the message for an unknown setting, with the closest match, if any.

    Args:
        option: the chosen option that lacks the key, such as `backend=torch`.
    """
    where = f" with {option}" if option else ""
    return f"{key}: no such key{where}; expected {or_nearest(key.rpartition('.')[2], known)}"


def no_such_name(key: str, name: str, known: Collection[str], in_help: bool = True) -> str:
    """Return the message for a name that is not among the known ones, see `or_nearest`.

    >>> no_such_name("format", "yml", ["json", "yaml"])
    "format: got 'yml', expected json | yaml (nearest: yaml)"
    """
    return f"{key}: got {name!r}, expected {or_nearest(name, known, in_help)}"


_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}


def mend_value(key: str, got: object) -> str:
    """Return the end of a message: the setting that a value such as `30s`, `1%` or `32x24` means.

    A time needs a key that ends in `minutes` or `seconds`. For other values, the text is empty.

    >>> mend_value("max_drop", "1%"), mend_value("minutes", "30s")
    ('; try max_drop=0.01', '; try minutes=0.5')
    >>> mend_value("calib.percentile", "99.9%")
    '; try calib.percentile=99.9'
    >>> mend_value("preprocess.size", "32x24")
    '; try preprocess.size=[32,24]'
    """
    sides = re.fullmatch(r"(\d+)[x*](\d+)", str(got))
    if sides:
        return f"; try {key}=[{sides[1]},{sides[2]}]"
    quantity = re.fullmatch(r"(\d+(?:\.\d+)?) ?(%|[a-z]+)", str(got))
    if not quantity:
        return ""

    # Convert the unit of the value to that of the key
    number = float(quantity[1])
    unit = quantity[2]
    if unit == "%":
        value = number if key.endswith("percentile") else number / 100
        return f"; try {key}={value:.6g}"
    seconds_of_key = {"minutes": 60, "seconds": 1}.get(re.split(r"[._]", key)[-1])
    if seconds_of_key is None or unit not in _SECONDS:
        return ""
    return f"; try {key}={number * _SECONDS[unit] / seconds_of_key:.6g}"


def safe_name(text: str) -> str:
    """Return a text as a file or folder name of at most 100 characters and 200 bytes.

    Separators, wildcards and other unusual characters become `_`.
    """
    name = re.sub(r"[^\w.,=-]|^\.", "_", text)[:100]
    return name.encode()[:200].decode(errors="ignore") or "_"  # file systems take 255 bytes


def show(text: object) -> str:
    """Return a text with `?` for each unprintable character except line feeds.

    Control characters could move the cursor or change the settings of a terminal.
    """
    shown = []
    for character in str(text):
        is_safe = character.isprintable() or character == "\n"
        shown.append(character if is_safe else "?")
    return "".join(shown)


def plain(text: str) -> str:
    """Return a label for matplotlib from the first 80 characters, with `$` escaped.

    matplotlib would read text between two `$` as a formula.
    """
    return printable(text)[:80].replace("$", r"\$")


def list_names(names: Iterable[str], separator: str = ", ", mistyped: str = "") -> str:
    """Return names for a message: the first 20, cut off after 300 characters.

    For more than 20 names, the text also has their number.

    >>> list_names(["id", "text", "label"], mistyped="labels")
    'label, id, text'

    Args:
        mistyped: the name that the user gave; the name nearest to it comes first.
    """
    listed = list(names)
    near = nearest(mistyped, listed)
    if near is not None:
        listed.remove(near)
        listed.insert(0, near)
    shown = printable(separator.join(listed[:20]))[:300]
    if len(listed) > 20:
        shown += f"{separator}... ({len(listed)} in all)"
    return shown
