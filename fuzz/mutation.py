"""Changes of a valid file along its structure: parts of JSON, opcodes of pickles, zip members."""

import io
import pickletools
import random
import re
import struct
import zipfile

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\w.+-]+|\s+|.', re.DOTALL)
_ODD = (
    *(b"", b"\x00", b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x80" * 9 + b"\x01", b"[" * 2000),
    *(b"NaN", b"-1", b"1e999", b"9" * 5000, b"null", b'"../../x"', b'"\\ud800"', b'"\\u001b[31m"'),
    *(b"cos\nsystem\n", b"r\xff\xff\xff\x7f", b"(", b"R", b"b", b"Q", b"P1:9\n", b"h\x00"),
    *(b"torch.os.system", b"=cmd()", b"\n", b",", b"{}", b"\xed\xa0"),
    *(struct.pack("<q", number) for number in (-1, 2**31, 2**40, 2**62)),
)


def mutate(content: bytes, seed: int) -> bytes:
    """Return `content` with one to four changes, the same ones for the same `seed`."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 4)):
        content = _change_member(content, chance) or _change(content, chance)
    return content


def _change_member(content: bytes, chance: random.Random) -> bytes | None:
    """Change one member of a zip archive and write it anew; None where it is not an archive."""
    if not content.startswith(b"PK") or chance.random() < 0.2:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = chance.choice(list(members))
    except Exception:  # damaged by an earlier change
        return None
    members[name] = _change(members[name], chance)
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w", chance.choice((0, 8))) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return changed.getvalue()


def _change(content: bytes, chance: random.Random) -> bytes:
    """Remove, duplicate, swap or replace a part."""
    parts = _split(content)
    if not parts:
        return chance.choice(_ODD)
    here, there = (chance.randrange(len(parts)) for _ in range(2))
    match chance.randrange(5):
        case 0:
            del parts[min(here, there) : min(here, there) + chance.randint(1, 3)]
        case 1:
            parts[here:here] = parts[there : there + chance.randint(1, 5)]
        case 2:
            parts[here], parts[there] = parts[there], parts[here]
        case 3:
            parts[here] = chance.choice(_ODD)
        case _:
            part = bytearray(parts[here] or b"\x00")
            part[chance.randrange(len(part))] = chance.randrange(256)
            parts[here] = bytes(part)
    return b"".join(parts)[:100_000]


def _split(content: bytes) -> list[bytes]:
    if content.startswith(b"\x80"):
        ends = []
        try:
            ends = [place for _, _, place in pickletools.genops(content) if place]
        except Exception:  # damaged by an earlier change
            ends = ends or list(range(1, min(len(content), 400)))
        starts = [0, *ends]
        return [content[a:b] for a, b in zip(starts, [*ends, len(content)], strict=True)]
    if b" " <= content[:1] <= b"~":
        return _TOKENS.findall(content)
    return [content[place : place + 1] for place in range(len(content))]
