"""Text from outside, made fit for a terminal, a log, a page or a file name."""

import re


def redact(text: str) -> str:
    """Return a message without the user names and passwords of the URLs in it."""
    return re.sub(r"(?<=://)[^/\s?#]*@", "", text)


def printable(text: str) -> str:
    """Return a text in one line, without what would steer a terminal: it may quote a file."""
    return show(" ".join(text.split()))


def one_line(error: Exception) -> str:
    """Return an error's text, folded into one line and cut; it may quote what a file says."""
    return printable(redact(f"{type(error).__name__}: {error}"))[:300]


def safe_name(text: str) -> str:
    """Return a text as the name of one file or folder: no path, no glob."""
    return re.sub(r"[^\w.,=-]|^\.", "_", text)[:100] or "_"


def show(text: object) -> str:
    """Return a text as a terminal may show it: control characters would steer it."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text))


def plain(text: str) -> str:
    """Return a text from outside as a label: no formula between dollars, and of limited length."""
    return printable(text)[:80].replace("$", r"\$")
