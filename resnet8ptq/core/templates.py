"""Jinja templates of Markdown, code, HTML and SVG, which escape no value automatically.

Filters for untrusted text: `md` in Markdown, `code` as Markdown code, `line` in a line of an
indented block, `html` in HTML and SVG.
"""

import html
import re
from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template

from resnet8ptq.core.text import code_span, escape_markdown, printable


@cache
def load(package: str, name: str, extends: str | None = None) -> Template:
    """Return a template from the folder `templates` of a package.

    Args:
        extends: the package of the template that this one extends, if it is another package.
    """
    packages = [package]
    if extends:
        packages.append(extends)
    loaders = [PackageLoader(name) for name in packages]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # neither Markdown nor code is HTML
    )
    environment.filters["md"] = escape_markdown
    environment.filters["code"] = code_span
    environment.filters["line"] = lambda text: printable(str(text))
    environment.filters["html"] = lambda text: html.escape(printable(text))
    return environment.get_template(name)


def tidy(markdown: str) -> str:
    """Return Markdown with at most one empty line between paragraphs."""
    return re.sub(r"\n{3,}", "\n\n", markdown).strip() + "\n"
