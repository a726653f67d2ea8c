"""Jinja templates of Markdown and code; the filters `md`, `code`, `html` escape untrusted text."""

import html
import re
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from resnet8ptq.core.text import escape_markdown, in_backticks, printable


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
    environment.filters["md"] = escape_markdown
    environment.filters["code"] = in_backticks
    environment.filters["html"] = lambda text: html.escape(printable(text))
    return environment.get_template(name)


def tidy(markdown: str) -> str:
    """Return Markdown with at most one empty line between paragraphs."""
    return re.sub(r"\n{3,}", "\n\n", markdown).strip() + "\n"
