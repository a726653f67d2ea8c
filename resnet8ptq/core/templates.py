"""Jinja templates of Markdown and of code; the filters `md` and `html` escape untrusted text."""

import html
import re
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from resnet8ptq.core.text import printable


@cache
def load(package: str, name: str) -> Template:
    """Return a template from the folder `templates` of a package."""
    environment = Environment(
        loader=PackageLoader(package),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # neither Markdown nor code is HTML
    )
    environment.filters |= {"md": escape, "html": lambda text: html.escape(printable(text))}
    return environment.get_template(name)


def escape(text: object) -> str:
    """Return a text in one line with its Markdown characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!&])", r"\\\1", printable(str(text)))


def tidy(markdown: str) -> str:
    """Return Markdown with at most one empty line between paragraphs."""
    return re.sub(r"\n{3,}", "\n\n", markdown).strip() + "\n"
