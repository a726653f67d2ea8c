"""Run one target under atheris: `python -m fuzz TARGET [libFuzzer's options or files]`."""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["resnet8ptq"]):
    from fuzz.mutation import mutate
    from fuzz.targets import TARGETS

    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"python -m fuzz TARGET [options]; a target is one of {', '.join(TARGETS)}")
    target = TARGETS[sys.argv[1]]()

assert target.check(target.seed), "the valid file is refused"
corpus = Path(tempfile.mkdtemp(prefix="corpus-"))
(corpus / "seed").write_bytes(target.seed)
words = [sys.argv[0], "-timeout=10", "-rss_limit_mb=3000", *sys.argv[2:]]
if not any(Path(word).is_file() for word in sys.argv[2:]):
    words.append(str(corpus))


def custom_mutate(content: bytes, most: int, seed: int) -> bytes:
    """Change a file along its structure for odd seeds; else let libFuzzer change its bytes."""
    changed = mutate(content, seed) if seed % 2 else atheris.Mutate(content, most)
    return bytes(changed[:most])


atheris.Setup(words, lambda content: target.check(content) and None, custom_mutator=custom_mutate)
atheris.Fuzz()
