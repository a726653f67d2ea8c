"""Write data and a small trained network into the current folder, to try the commands of the docs.

    python docs/examples/task_data.py pictures        # docs/data.md: pictures, a table, an array
    python docs/examples/task_data.py segmentation    # docs/tasks.md, one for each task
    python docs/examples/task_data.py clips
    python docs/examples/task_data.py dense
    python docs/examples/task_data.py multilabel
    python docs/examples/task_data.py verification
    python docs/examples/task_data.py ctc
    python docs/examples/task_data.py tokens          # needs the extra `text`
    python docs/examples/task_data.py instance_segmentation    # docs/detection.md
    python docs/examples/task_data.py perplexity

All data are drawn with a fixed seed or come from the embedded pictures. Nothing is downloaded.
"""

import csv
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor, nn

from resnet8ptq.data import registry, shapes

SYMBOLS = "0123456789 "
Floats = NDArray[np.float32]


def export(network: nn.Module, example: Tensor, path: str) -> None:
    """Write the network with a free batch axis."""
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(network.eval(), (example[:2].clone(),), dynamic_shapes=(batch,))
    torch.export.save(program, path)


def learn(network: nn.Module, loss_of: Callable[[], Tensor], steps: int, rate: float) -> None:
    """Take `steps` steps of Adam against the loss that `loss_of` draws."""
    optimizer = torch.optim.Adam(network.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()


def write_pictures(folder: str, arrays: NDArray[np.uint8]) -> None:
    """Write `FOLDER/0.png`, `FOLDER/1.png` and so on."""
    Path(folder).mkdir()
    for number, array in enumerate(arrays):
        Image.fromarray(array).save(f"{folder}/{number}.png")


def make_pictures() -> None:
    """Write `my_network.h5`, and the same samples as an array, class folders and a table."""
    shutil.copyfile(shapes.WEIGHTS, "my_network.h5")
    data = registry.load("shapes", None)
    images = data.test.stored[:1000]
    labels = data.test.labels[:1000]
    np.savez("my_data.npz", images=images, labels=labels, classes=data.class_names)
    rows = [("path", "label")]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = Path("my_pictures", data.class_names[label], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        rows.append((str(path), str(label)))
    with Path("my_table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def make_segmentation() -> None:
    """Write scenes of two drawn shapes, their masks, and a network that marks the shapes."""
    random = np.random.default_rng(0)
    drawn = registry.load("shapes", None).test
    scenes = np.zeros((600, 64, 64, 3), np.uint8)
    masks = np.zeros((600, 64, 64), np.uint8)
    for scene, mask in zip(scenes, masks, strict=True):
        scene[:] = random.integers(0, 60)
        for top, left in random.permutation([(0, 0), (0, 32), (32, 0), (32, 32)])[:2]:
            index = random.integers(len(drawn.stored))
            area = slice(top, top + 32), slice(left, left + 32)
            scene[area] = drawn.stored[index]
            mask[area] = 1 + drawn.labels[index] // 5
    write_pictures("my_scenes", scenes)
    write_pictures("my_masks", masks)

    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 2), (16, 32, 2), (32, 64, 2), (64, 64, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Conv2d(64, 3, 1))
    x = torch.tensor(scenes).permute(0, 3, 1, 2) / 255.0
    y = torch.tensor(masks).long()

    def loss_of() -> Tensor:
        chosen = torch.randint(300, (32,))
        logits = nn.functional.interpolate(network(x[chosen]), size=64, mode="bilinear")
        return nn.functional.cross_entropy(logits, y[chosen])

    learn(network, loss_of, steps=400, rate=0.003)
    export(network, x, "my_segmenter.pt2")


def make_dense() -> None:
    """Write noisy and clean pictures, and a network that removes the noise."""
    random = np.random.default_rng(0)
    clean = registry.load("shapes", None).test.stored[:600]
    noisy = (clean + random.normal(0, 20, clean.shape)).clip(0, 255).astype(np.uint8)
    write_pictures("my_noisy", noisy)
    write_pictures("my_clean", clean)

    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(16, 3, 3, 1, 1),
    )
    x = torch.tensor(np.moveaxis(noisy, 3, 1)) / 255.0
    y = torch.tensor(np.moveaxis(clean, 3, 1)) / 255.0

    def loss_of() -> Tensor:
        chosen = torch.randint(300, (32,))
        return nn.functional.mse_loss(network(x[chosen]), y[chosen])

    learn(network, loss_of, steps=300, rate=0.003)
    export(network, x, "my_denoiser.pt2")


def make_clips() -> None:
    """Write clips of eight noisy windows with one of four pitches, and a network for a window."""
    random = np.random.default_rng(0)
    clips = random.integers(0, 4, 1500)
    pitch = (clips + 2)[:, None, None] * np.linspace(0, 6, 64)
    x = np.sin(pitch + random.random((1500, 8, 1)) * 6) + 2 * random.normal(size=(1500, 8, 64))
    windows = torch.tensor(x.reshape(-1, 64)).float()
    labels = np.repeat(clips, 8)
    np.savez("my_windows.npz", x=windows.numpy(), y=labels, groups=np.repeat(np.arange(1500), 8))

    network = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4), nn.Softmax(1))
    targets = torch.tensor(labels)

    def loss_of() -> Tensor:
        chosen = torch.randint(6000, (128,))
        return nn.functional.nll_loss(network(windows[chosen]).log(), targets[chosen])

    learn(network, loss_of, steps=600, rate=0.002)
    export(network, windows, "my_listener.pt2")


def make_multilabel() -> None:
    """Write vectors with five labels, each true for a fifth of them, and a network for these."""
    random = np.random.default_rng(0)
    x = random.normal(size=(2000, 16)).astype(np.float32)
    y = x @ random.normal(size=(16, 5)) > 3
    np.savez("my_sounds.npz", x=x, y=y, classes=["dog", "rain", "siren", "voice", "wind"])

    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    inputs = torch.tensor(x[:1000])
    targets = torch.tensor(y[:1000] * 1.0)

    def loss_of() -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(network(inputs), targets)

    learn(network, loss_of, steps=300, rate=0.01)
    export(network, inputs, "my_sounds.pt2")


def make_verification() -> None:
    """Write twelve noisy vectors of each of 100 people, and an untrained network."""
    random = np.random.default_rng(0)
    people = np.arange(1200) // 12
    centres = random.normal(size=(100, 24))
    x = (centres[people] + 0.7 * random.normal(size=(1200, 24))).astype(np.float32)
    np.savez("my_faces.npz", x=x, y=people)
    network = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))
    export(network, torch.tensor(x), "my_faces.pt2")


class LineReader(nn.Module):
    """From pictures [n, 8, 48, 1] to logits [n, 24 frames, 12 symbols], the blank first."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Conv2d(1, 64, (8, 7), (1, 2), (0, 3))
        self.frames = nn.Conv1d(64, 64, 5, padding=2)
        self.symbols = nn.Conv1d(64, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each frame."""
        columns = torch.relu(self.columns(x.permute(0, 3, 1, 2)).squeeze(2))
        return self.symbols(torch.relu(self.frames(columns))).permute(0, 2, 1)


def make_ctc() -> None:
    """Write noisy pictures of lines of digits, their alphabet, and a network that reads them."""
    random = np.random.default_rng(0)
    glyphs = random.random((11, 8, 6)) < 0.5
    glyphs[10] = 0  # the space
    texts = ["".join(random.choice(list(SYMBOLS), 6)).strip() for _ in range(1500)]
    x = np.zeros((1500, 8, 48, 1), np.float32)
    for picture, text in zip(x, texts, strict=True):
        for position, symbol in enumerate(text):
            left = 8 * position
            picture[:, left : left + 6, 0] = glyphs[SYMBOLS.index(symbol)]
    x += random.normal(size=x.shape).astype(np.float32) * 0.4
    np.savez("my_lines.npz", x=x, y=texts)
    Path("my_symbols.txt").write_text("\n".join(SYMBOLS))

    network = LineReader()
    numbers = [torch.tensor([1 + SYMBOLS.index(symbol) for symbol in text]) for text in texts]

    def loss_of() -> Tensor:
        chosen = random.integers(0, 700, 64)
        logits = network(torch.tensor(x[chosen])).log_softmax(2).permute(1, 0, 2)
        targets = [numbers[index] for index in chosen]
        lengths = torch.tensor([len(target) for target in targets])
        frames = torch.full((64,), len(logits))
        return nn.functional.ctc_loss(logits, torch.cat(targets), frames, lengths)

    learn(network, loss_of, steps=400, rate=0.003)
    export(network, torch.tensor(x), "my_reader.pt2")


class Tagger(nn.Module):
    """From token ids and their mask [n, tokens] to logits [n, tokens, 5 tags]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(120, 32)
        self.first = nn.Conv1d(32, 64, 7, padding=3)
        self.second = nn.Conv1d(64, 64, 7, padding=3)
        self.tags = nn.Linear(64, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits of each token, which padding does not change."""
        kept = attention_mask.unsqueeze(1)
        rows = self.table(input_ids).transpose(1, 2) * kept
        rows = torch.relu(self.first(rows)) * kept
        return self.tags(torch.relu(self.second(rows)).transpose(1, 2))


def make_tokens() -> None:
    """Write sentences with drawn names of people and places, a tokenizer, and a tagger."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    random = np.random.default_rng(0)
    sentences = []
    for _ in range(2000):
        words: list[str] = []
        tags: list[str] = []
        for kind in random.choice(["PER", "LOC"], random.integers(2, 5)):
            verbs = ["met", "asked", "thanked"] if kind == "PER" else ["reached", "left", "saw"]
            words += [random.choice(["we", "they", "I", "nobody"]), random.choice(verbs)]
            tags += ["O", "O"]
            for part in range(random.integers(1, 3)):
                syllables = random.choice(["ka", "lo", "mi", "ra", "su", "te", "no", "vi"], 3)
                words.append("".join(syllables).capitalize())
                tags.append(f"{'I' if part else 'B'}-{kind}")
        sentences.append((words, tags))
    with Path("my_entities.conll").open("w") as file:
        for words, tags in sentences:
            rows = [f"{word}\t{tag}" for word, tag in zip(words, tags, strict=True)]
            file.write("\n".join(rows) + "\n\n")

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator([" ".join(words) for words, _ in sentences], trainer)
    tokenizer.save("my_pieces.json")
    classes = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    Path("my_tags.txt").write_text("\n".join(classes))

    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch([words for words, _ in sentences], is_pretokenized=True)
    ids = torch.tensor([one.ids for one in encoded])
    mask = torch.tensor([one.attention_mask for one in encoded])
    labels = torch.full(ids.shape, -100)
    for row, one, (_, tags) in zip(labels, encoded, sentences, strict=True):
        for token, word in enumerate(one.word_ids):
            if word is not None:
                row[token] = classes.index(tags[word])
    network = Tagger()

    def loss_of() -> Tensor:
        chosen = torch.randint(1000, (64,))
        logits = network(ids[chosen], mask[chosen]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[chosen].flatten())

    learn(network, loss_of, steps=150, rate=0.003)
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=512)}
    torch.onnx.export(
        network.eval(),
        (ids[:2], mask[:2]),
        "my_tagger.onnx",
        input_names=["input_ids", "attention_mask"],
        dynamic_shapes=(free, free),
        external_data=False,
    )


def _convolve(before: int, after: int, stride: int) -> nn.Sequential:
    """Return a convolution of 3x3 with batch normalization and a ReLU."""
    convolution = nn.Conv2d(before, after, 3, stride, 1)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


class Outliner(nn.Module):
    """From pictures [n, 3, 64, 64] to boxes, scores and coefficients [n, 14, 4], and 8 prototypes.

    One object in each quarter of the picture, in the form of YOLOv8's segmentation exports.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(_convolve(3, 16, 2), _convolve(16, 24, 1))
        self.prototypes = nn.Sequential(_convolve(24, 24, 1), nn.Conv2d(24, 8, 1))
        steps = ((24, 32), (32, 48), (48, 64), (64, 64))
        self.coarse = nn.Sequential(*[_convolve(before, after, 2) for before, after in steps])
        self.head = nn.Conv2d(64, 14, 1)
        centres = torch.tensor([[16.0, 48, 16, 48], [16, 16, 48, 48]])
        self.register_buffer("centres", centres)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows and the prototypes."""
        fine = self.fine(x)
        rows = self.head(self.coarse(fine)).reshape(-1, 14, 4)
        centres = rows[:, :2] * 4 + self.centres
        sizes = rows[:, 2:4].exp() * 16
        scores = rows[:, 4:6].sigmoid()
        joined = torch.cat([centres, sizes, scores, rows[:, 6:]], 1)
        return joined, self.prototypes(fine)


@dataclass
class Scenes:
    """600 drawn pictures with up to four objects each, one in each quarter.

    Attributes:
        pixels: [n, 64, 64, 3].
        kinds: [n, 4, 2], one-hot; zeros without an object.
        boxes: [n, 4, 4], centre and size.
        masks: [n, 4, 64, 64].
        annotations: the objects, as in COCO's files.
    """

    pixels: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((600, 64, 64, 3), np.uint8))
    kinds: Floats = field(default_factory=lambda: np.zeros((600, 4, 2), np.float32))
    boxes: Floats = field(default_factory=lambda: np.zeros((600, 4, 4), np.float32))
    masks: Floats = field(default_factory=lambda: np.zeros((600, 4, 64, 64), np.float32))
    annotations: list[dict[str, Any]] = field(default_factory=list)


def draw_scenes() -> Scenes:
    """Draw triangles and discs on noise."""
    random = np.random.default_rng(0)
    scenes = Scenes()
    for number in range(600):
        scene = Image.fromarray(random.integers(0, 90, (64, 64, 3), np.uint8))
        for quarter in random.permutation(4)[: random.integers(1, 5)].tolist():
            kind = int(random.integers(2))
            corner_count = (3, 24)[kind]
            radius = random.uniform(7, 14)
            centre = 16 + 32 * np.array([quarter % 2, quarter // 2]) + random.uniform(-2, 2, 2)
            angles = random.uniform(0, 6) + np.arange(corner_count) * 2 * np.pi / corner_count
            corners = centre + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
            outline = corners.ravel().tolist()
            mask = Image.new("L", (64, 64))
            ImageDraw.Draw(scene).polygon(outline, tuple(random.integers(110, 256, 3).tolist()))
            ImageDraw.Draw(mask).polygon(outline, 1)

            low = corners.min(0)
            size = corners.max(0) - low
            scenes.kinds[number, quarter, kind] = 1
            scenes.masks[number, quarter] = np.asarray(mask)
            scenes.boxes[number, quarter] = [*(low + size / 2), *size]
            annotation = {
                "id": len(scenes.annotations) + 1,
                "image_id": number,
                "category_id": kind,
                "bbox": [*low.tolist(), *size.tolist()],
                "area": int(scenes.masks[number, quarter].sum()),
                "iscrowd": 0,
                "segmentation": [outline],
            }
            scenes.annotations.append(annotation)
        scenes.pixels[number] = np.asarray(scene)
    return scenes


def make_instance_segmentation() -> None:
    """Write drawn objects with their outlines in COCO's format, and a network that finds them."""
    scenes = draw_scenes()
    write_pictures("my_objects", scenes.pixels)
    document = {
        "images": [
            {"id": number, "file_name": f"{number}.png", "width": 64, "height": 64}
            for number in range(600)
        ],
        "annotations": scenes.annotations,
        "categories": [{"id": 0, "name": "triangle"}, {"id": 1, "name": "disc"}],
    }
    Path("my_objects.json").write_text(json.dumps(document))

    network = Outliner()
    x = torch.tensor(scenes.pixels).permute(0, 3, 1, 2) / 255.0
    kinds = torch.tensor(scenes.kinds)
    boxes = torch.tensor(scenes.boxes)
    # The prototypes have half of the picture's size.
    any_mask = torch.tensor(scenes.masks).amax(1, keepdim=True)
    halves = nn.functional.avg_pool2d(any_mask, 2).expand(-1, 4, -1, -1)

    def loss_of() -> Tensor:
        chosen = torch.randint(300, (32,))
        rows, prototypes = network(x[chosen])
        is_object = kinds[chosen].any(2)
        outlines = torch.einsum("nma,nmhw->nahw", rows[:, 6:], prototypes)[is_object]
        of_kinds = nn.functional.binary_cross_entropy(rows[:, 4:6].mT, kinds[chosen])
        of_boxes = (rows[:, :4].mT - boxes[chosen])[is_object].abs().mean() / 8
        targets = halves[chosen][is_object]
        of_masks = nn.functional.binary_cross_entropy_with_logits(outlines, targets)
        return of_kinds + of_boxes + of_masks

    learn(network, loss_of, steps=400, rate=0.003)
    export(network, x, "my_outliner.pt2")


class Block(nn.Module):
    """A layer of a decoder, on values [n, tokens, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.heads = nn.Linear(64, 192)
        self.joined = nn.Linear(64, 64)
        self.after = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        )
        self.register_buffer("future", torch.full((64, 64), -1e4).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the values after attention to earlier tokens, and after two dense layers."""
        heads = self.heads(self.norm(x)).reshape(-1, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        weights = (query @ key.transpose(2, 3) / 4 + self.future).softmax(3)
        x = x + self.joined((weights @ value).transpose(1, 2).reshape(-1, 64, 64))
        return x + self.after(x)


class Decoder(nn.Module):
    """From windows of 64 bytes [n, 64] to logits of each next byte [n, 64, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, 64)
        self.positions = nn.Parameter(0.1 * torch.randn(64, 64))
        self.blocks = nn.Sequential(Block(), Block())
        self.logits = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        return self.logits(self.blocks(self.tokens(tokens) + self.positions))


def make_perplexity() -> None:
    """Write the documentation in windows of 64 bytes, and a small decoder that learns it."""
    pages = sorted(Path(__file__).parents[1].glob("*.md"))
    text = "".join(page.read_text() for page in pages).encode("ascii", "ignore")
    x = np.frombuffer(text, np.uint8)[: len(text) // 64 * 64].reshape(-1, 64).astype(np.int64)
    np.savez("my_windows_of_text.npz", x=x)

    network = Decoder()
    windows = torch.tensor(x[: len(x) // 2])

    def loss_of() -> Tensor:
        chosen = windows[torch.randint(len(windows), (32,))]
        logits = network(chosen)[:, :-1].reshape(-1, 128)
        return nn.functional.cross_entropy(logits, chosen[:, 1:].reshape(-1))

    learn(network, loss_of, steps=600, rate=0.003)
    export(network, windows, "my_decoder.pt2")


MAKERS = {
    "pictures": make_pictures,
    "segmentation": make_segmentation,
    "clips": make_clips,
    "dense": make_dense,
    "multilabel": make_multilabel,
    "verification": make_verification,
    "ctc": make_ctc,
    "tokens": make_tokens,
    "instance_segmentation": make_instance_segmentation,
    "perplexity": make_perplexity,
}

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in MAKERS:
        sys.exit(f"got {' '.join(sys.argv[1:])!r}, expected one of {', '.join(MAKERS)}")
    torch.manual_seed(0)
    MAKERS[name]()
