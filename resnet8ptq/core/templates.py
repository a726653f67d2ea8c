"""Jinja templates of Markdown and of code; the filters `md` and `html` escape untrusted text."""

import html
import re
from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template

from resnet8ptq.core.text import escape_markdown, printable


@cache
def load(package: str, name: str, extends: str | None = None) -> Template:
    """Return a template from the folder `templates` of a package.

    Args:
        extends: the package of the template that it extends, if not its own.
    """
    packages = [package, *([extends] if extends else [])]
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in packages]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # neither Markdown nor code is HTML
    )
    environment.filters["md"] = escape_markdown
    environment.filters["html"] = lambda text: html.escape(printable(text))
    return environment.get_template(name)


def tidy(markdown: str) -> str:
    """Return Markdown with at most one empty line between paragraphs."""
    return re.sub(r"\n{3,}", "\n\n", markdown).strip() + "\n"
