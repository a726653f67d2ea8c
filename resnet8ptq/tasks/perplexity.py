"""`task=perplexity`: the perplexity of the next tokens that a causal language model predicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from resnet8ptq.config.schema import PerplexityConfig
from resnet8ptq.core.errors import DataError, ModelError
from resnet8ptq.core.records import find_mask, names_of
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, ReducedScores, of_sums, ratio
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.outputs import Array, Outputs, Targets, TaskContext, describe
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, Margin, Values
from resnet8ptq.tasks.task import Scope, Table, Task, TaskFiles, TaskType

METRIC = Metric("perplexity", "perplexity", maximize=False, bounded=False, geometric=True)
TOKENS = "input_ids"


@dataclass(frozen=True)
class NextToken:
    """Reduces logits [n, tokens, vocabulary] to -ln p of each next token.

    Attributes:
        output: the index of the output with the logits.
        vocabulary: the number of different tokens.
    """

    output: int
    vocabulary: int

    def __call__(
        self, outputs: Sequence[Array], inputs: Array
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return -ln p(token) and the number, counted from 1, of each next token [n, tokens - 1].

        Both are 0 if the token or the one before it is padding. The evaluation later pads shorter
        batches with 0.

        Raises:
            DataError: the inputs are not windows of tokens of the vocabulary, see `_read`.
            ModelError: the network does not return logits for each token.
        """
        tokens, is_text = self._read(inputs)
        returned = outputs[self.output].shape[1]
        if returned != tokens.shape[1]:
            raise ModelError(
                f"returns logits of {returned} tokens for windows of {tokens.shape[1]}; "
                "expected one for each"
            )

        # A logit predicts the token after it, so both must be text
        following = tokens[:, 1:, np.newaxis]
        counted = is_text[:, 1:] & is_text[:, :-1]
        surprise = np.zeros(counted.shape, np.float32)
        for row, logits in enumerate(outputs[self.output]):  # one by one, as a vocabulary is large
            before = logits[:-1].astype(np.float64)
            at_token = np.take_along_axis(before, following[row], axis=1)[:, 0]
            surprise[row] = logsumexp(before, axis=1) - at_token
        numbers = np.where(counted, tokens[:, 1:] + 1, 0)
        return np.where(counted, surprise, 0), numbers.astype(np.int32)

    def _read(self, inputs: Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the tokens of the inputs, and a mask that is False at padding [n, tokens].

        Without a mask in the inputs (`find_mask`), no token is padding.

        Raises:
            DataError: the tokens are not integers [n, 2 or more] within the vocabulary, or
                `_find_tokens` does not find them.
        """
        tokens = inputs
        names = names_of(inputs.dtype)
        if names:
            tokens = inputs[_find_tokens(names)]
        if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or tokens.shape[1] < 2:
            raise DataError(
                f"task=perplexity: the samples are {tokens.dtype} {list(tokens.shape[1:])}; "
                "expected windows of two or more tokens, integers"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise DataError(
                f"task=perplexity: the tokens are {tokens.min()} to {tokens.max()}; expected 0 to "
                f"{self.vocabulary - 1}, as the network's outputs"
            )

        # Without a mask, every token is text
        is_text = np.ones(tokens.shape, np.bool_)
        mask = find_mask(inputs.dtype)
        if mask is not None:
            is_text = inputs[mask] != 0
        return tokens.astype(np.int64), is_text


def _find_tokens(names: Sequence[str]) -> str:
    """Return the name of the tokens' input: `TOKENS`, or the only name that does not end in mask.

    Raises:
        DataError: there is no `TOKENS`, and not exactly one input besides masks.
    """
    if TOKENS in names:
        return TOKENS
    others = [name for name in names if not name.lower().endswith("mask")]
    if len(others) != 1:
        raise DataError(
            f"task=perplexity: the inputs are {', '.join(names)}; expected one named {TOKENS}, or "
            "a single one beside masks"
        )
    return others[0]


@dataclass(frozen=True)
class WindowScores(ReducedScores):
    """The perplexity of windows.

    Attributes:
        surprise: the sum of -ln p(token) of each window [n].
        of_unigram: the same sum for a prediction by frequencies [n], see `measure_unigram`.
        tokens: the number of counted next tokens of each window [n].
    """

    surprise: Values = field(default_factory=lambda: np.zeros(0))
    of_unigram: Values = field(default_factory=lambda: np.zeros(0))
    tokens: Values = field(default_factory=lambda: np.zeros(0))


def build(next_token: NextToken | None = None, resamples: int = 9999) -> Task:
    """Return `task=perplexity` with these settings.

    Args:
        next_token: reduces the logits; None for a finished run.
    """
    vocabulary = next_token.vocabulary if next_token else 0
    return Task(
        "perplexity",
        METRIC,
        partial(_score, vocabulary, resamples),
        BOOTSTRAP,
        scope=Scope(reduction=next_token),
        files=TaskFiles(tables=_list_windows),
        doubt=_doubt,
    )


def _score(vocabulary: int, resamples: int, outputs: Outputs, targets: Targets) -> WindowScores:
    surprise, numbers = outputs.values
    tokens = np.count_nonzero(numbers, axis=1).astype(np.float64)
    if not tokens.any():
        raise DataError("task=perplexity: no window has two tokens")

    # The perplexity of any windows follows from sums of surprise and tokens
    sums = surprise.sum(axis=1, dtype=np.float64)
    return WindowScores(
        outputs,
        of_sums(_to_perplexity, np.stack([sums, tokens], axis=1)),
        resamples,
        surprise=sums,
        of_unigram=measure_unigram(numbers, vocabulary),
        tokens=tokens,
    )


def _to_perplexity(sums: NDArray[np.float64]) -> float:
    return float(np.exp(ratio(sums)))


def measure_unigram(numbers: NDArray[np.integer], vocabulary: int) -> Values:
    """Return the sum of -ln p(token) of each window [n], by token frequencies in other windows.

    Each token of the vocabulary is counted once more (Laplace), so that none has a probability of
    0. If the windows have far fewer tokens than the vocabulary, the distribution is
    close to uniform.

    Args:
        numbers: the next tokens, counted from 1 [n, tokens - 1]; 0 for those that do not count.
    """
    counts = np.bincount(numbers.reshape(-1), minlength=vocabulary + 1)
    total = counts[1:].sum() + vocabulary
    sums = np.zeros(len(numbers))
    for row, window in enumerate(numbers):
        own, times = np.unique(window[window > 0], return_counts=True)
        shares = (counts[own] - times + 1) / (total - times.sum())
        sums[row] = -(times * np.log(shares)).sum()
    return sums


def _list_windows(comparison: Comparison) -> dict[str, Table]:
    """Return the rows of `windows.csv`, under its file name.

    The window with the largest loss against FP32 comes first.
    """
    model = comparison.model
    fp32 = comparison.baseline
    rows: list[list[object]] = [["window", "tokens", "fp32_nll", "nll"]]
    for window in np.argsort(fp32.surprise - model.surprise, kind="stable").tolist():
        tokens = int(model.tokens[window])
        rows.append([window, tokens, float(fp32.surprise[window]), float(model.surprise[window])])
    return {"windows.csv": rows}


def _doubt(baseline: WindowScores, expected: float | None) -> str | None:
    """Return a doubt if the network is not proven to predict better than token frequencies."""
    if Margin.of_mean(baseline.surprise - baseline.of_unigram).p_within <= SIGNIFICANCE:
        return None
    sums = baseline.of_unigram.sum(), baseline.tokens.sum()
    unigram = METRIC.show(_to_perplexity(np.array(sums)))
    return (
        f"NEAR CHANCE, {METRIC.show(baseline.value)} (of the tokens' frequencies {unigram}; do "
        "the tokens fit, and does the network predict the next one?)"
    )


def _make(config: PerplexityConfig, context: TaskContext) -> Task:
    fitting = []
    for output, shape in enumerate(context.outputs.values()):
        vocabulary = shape[1] if len(shape) == 2 else None
        if vocabulary is not None and vocabulary > 1:
            fitting.append(NextToken(output, vocabulary))
    if len(fitting) != 1:
        raise ModelError(
            f"returns {describe(context.outputs)}; task=perplexity takes one output [tokens, "
            "vocabulary] with the logits of each next token"
        )
    return build(fitting[0], config.resamples)


PERPLEXITY = TaskType(
    make=_make,
    recall=lambda config, names: build(resamples=config.resamples),
    schema=PerplexityConfig,
)
