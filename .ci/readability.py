"""Print how dense the lines of a package are: python .ci/readability.py [FOLDER]

Short functions whose lines do several things each are slow to read. These are measures to learn
from, not limits; CONTRIBUTING.md has those of other projects beside ours.
"""

import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def print_measures(folder: Path) -> None:
    """Print one line for each measure of the Python files below a folder."""
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    lines = sum(text.count("\n") for text in texts)
    functions = sorted(
        node.end_lineno - node.lineno + 1
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    docstrings = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED)]
    written = [docstring for docstring in docstrings if docstring]

    def say(name: str, value: str) -> None:
        print(f"{name:50} {value}")

    def in_1000(count: int) -> str:
        return f"{1000 * count / lines:.1f}"

    say("lines", f"{lines:,}")
    longest = f"{statistics.median(functions):.0f} / {functions[int(0.9 * len(functions))]}"
    say("median / 90% / longest function, lines", f"{longest} / {functions[-1]}")
    say("comprehensions in 1,000 lines", in_1000(sum(isinstance(n, COMPREHENSIONS) for n in nodes)))
    say("tuple assignments in 1,000", in_1000(sum(map(assigns_a_tuple, nodes))))
    say("conditional expressions in 1,000", in_1000(sum(isinstance(n, ast.IfExp) for n in nodes)))
    say("star tuples in calls, in 1,000", in_1000(sum(map(has_star_tuple, nodes))))
    say("comment lines in 100", f"{100 * sum(map(count_comments, texts)) / lines:.1f}")
    mean = statistics.mean(len(docstring.splitlines()) for docstring in written)
    say("lines of a docstring, mean", f"{mean:.1f}")
    examples = sum(any(find_examples(docstring)) for docstring in written)
    say("docstrings with an example", f"{100 * examples / len(written):.0f}%")


def assigns_a_tuple(node: ast.AST) -> bool:
    """Return whether a statement binds several names at once."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)


def has_star_tuple(node: ast.AST) -> bool:
    """Return whether a call unpacks a tuple that is written out, as in f(*(a, b))."""
    return isinstance(node, ast.Call) and any(
        isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
        for argument in node.args
    )


def count_comments(text: str) -> int:
    """Return the number of lines that hold a comment alone."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type == tokenize.COMMENT and t.line.lstrip().startswith("#") for t in tokens)


def find_examples(docstring: str) -> Iterator[bool]:
    """Go through the lines of a docstring: whether each belongs to an indented example."""
    after_blank = False
    section = False
    for line in docstring.splitlines():
        if line.strip() in ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:"):
            section = True
        indented = line.startswith("    ") and after_blank and not section
        yield indented or line.strip().startswith(">>>")
        after_blank = not line.strip()


if __name__ == "__main__":
    print_measures(Path(sys.argv[1] if len(sys.argv) > 1 else "resnet8ptq"))
