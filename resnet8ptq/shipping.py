"""Finds, with one command and within a time limit, a model whose loss passes the limit.

    resnet8ptq ship                                    ResNet8 on CIFAR-10, in ONNX Runtime
    resnet8ptq ship model.path=FILE data=folder data.root=DIR preprocess=unit
    resnet8ptq ship backend=onnx,torch goal=smallest minutes=20 report.max_drop=0.005
    resnet8ptq ship experiment=npu                     16-bit activations, for NPUs

goal=fastest (default): the first model of each backend that passes, by latency
goal=smallest: by bytes, with fewer than 8 bits where they pass
goal=best: the smallest loss
minutes=10: time for the whole command; after a first result, a step starts only if it should fit

It starts with plain 8 bits, finds the causes of the loss, tries settings against them, and confirms
the best model on test samples that no choice uses, if there are enough. It prints each step with
its reason, then the winner, its file, and the `resnet8ptq run` line that makes it again. The best
model so far is a file in the sweep's folder once a step has measured one, also after an error of a
later step, Ctrl-C or the end of the time. Settings of `resnet8ptq run` apply to every step, see
`resnet8ptq run --help`; the command is short for `resnet8ptq run experiment=auto`. Ctrl-C prints
the command to continue.

Exit codes: 0 the winner passes; 3 the model closest to FP32 fails, none is worth deploying instead
of FP32, or nothing can be quantized; 4 undecided, void or not confirmed; 2 wrong input; 1 an error;
130 interrupted.
More: docs/ship.md.
"""

from collections.abc import Sequence

from resnet8ptq import run
from resnet8ptq.core import invocation
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import nearest

_OWN = ("goal", "minutes")  # settings that belong to the sweeper
# The settings of conf/experiment/npu.yaml
_NPU = ("dtype=w8a16", "attention=all", "latency.enabled=false")


def main(words: Sequence[str]) -> int:
    """Run the search, or print the help; return the exit code."""
    if {"-h", "--help"} & set(words):
        print(invocation.adapt(__doc__ or ""))
        return 0
    return run.start(to_run(words), command_line=["ship", *words])


def to_run(words: Sequence[str]) -> list[str]:
    """Return the words of `resnet8ptq run` for the words of `resnet8ptq ship`.

    Raises:
        ConfigError: the words name another experiment, or a key of the search is misspelt or has
            several values.

    >>> to_run(["goal=best", "data=shapes"])
    ['experiment=auto', 'hydra.sweeper.goal=best', 'data=shapes']
    """
    settings = ["experiment=auto"]
    for word in words:
        if word == "experiment=npu":
            settings += _NPU
            continue

        # Refuse words that `run` would misunderstand
        key, _, value = word.lstrip("+").partition("=")
        if key == "experiment" and value != "auto":
            raise ConfigError(
                f"experiment: got {value}, expected auto | npu with ship; try run {word}"
            )
        meant = None
        if key not in _OWN and "." not in key:
            meant = nearest(key, _OWN)
        if meant is not None:
            raise ConfigError(f"{key}: no such key; try {meant}={value}")
        is_own = word.partition("=")[0] in _OWN
        if is_own and "," in value:
            first = value.partition(",")[0]
            raise ConfigError(f"{key}: got several values, expected one; try {key}={first}")
        if is_own:
            word = f"hydra.sweeper.{word}"
        settings.append(word)
    return settings
