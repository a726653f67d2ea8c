"""Picture files, in class folders and damaged."""

from pathlib import Path

from PIL import Image

RED, GREEN = (200, 30, 10), (20, 180, 40)


def picture(colour, size=(6, 4), mode="RGB") -> Image.Image:
    """A picture whose left half is of that colour; `size` is width and height."""
    result = Image.new("RGB", size)
    result.paste(colour, (0, 0, size[0] // 2, size[1]))
    return result.convert(mode)


def write_classes(root: Path, count: int = 4, suffix: str = ".png") -> Path:
    for name, colour in (("red", RED), ("green", GREEN)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            shade = tuple(value + number for value in colour)
            picture(shade).save(root / name / f"{number}{suffix}")
    return root


def spoil(root: Path, kind: str) -> Path:
    path = root / "red" / "1.png"
    content = path.read_bytes()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "text":
        path.write_text("no picture")
    elif kind == "gif":  # in a name that promises another
        picture(RED).save(path, "GIF")
    else:  # a bomb: 400 million pixels in a few kB
        header = Image.new("1", (20000, 20000))
        header.save(path)
    return path
