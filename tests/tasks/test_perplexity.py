"""`task=perplexity`: next tokens in windows, against torch."""

import numpy as np
import pytest
import torch

from resnet8ptq.config.schema import PerplexityConfig
from resnet8ptq.core.errors import DataError, ModelError
from resnet8ptq.core.records import pack
from resnet8ptq.tasks import perplexity, registry
from resnet8ptq.tasks.perplexity import NextToken, measure_unigram
from resnet8ptq.tasks.scoring.outputs import VALUES, Outputs, Targets, TaskContext

WINDOWS, LENGTH, VOCABULARY = 40, 9, 13
RANDOM = np.random.default_rng(0)
LOGITS = (3 * RANDOM.normal(size=(WINDOWS, LENGTH, VOCABULARY))).astype(np.float32)
TOKENS = RANDOM.integers(0, VOCABULARY, (WINDOWS, LENGTH))
MASK = (np.arange(LENGTH) < RANDOM.integers(2, LENGTH + 1, (WINDOWS, 1))).astype(np.int64)


def score(inputs, logits=LOGITS):
    outputs = Outputs(NextToken(0, VOCABULARY)([logits], inputs), None, VALUES)
    return perplexity.build(NextToken(0, VOCABULARY), 200).score(outputs, Targets())


def by_torch(tokens, mask):
    """Return the cross entropy of each next token [n, tokens - 1], 0 at padding."""
    expected = torch.tensor(np.where(mask, tokens, -100)[:, 1:])
    logits = torch.tensor(LOGITS[:, :-1], dtype=torch.float64).transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, expected, reduction="none").numpy()


@pytest.mark.parametrize("mask", [np.ones_like(MASK), MASK])
def test_perplexity_is_torch_s(mask):
    whole = mask.all()
    scores = score(TOKENS if whole else pack({"attention_mask": mask, "input_ids": TOKENS}))
    expected = by_torch(TOKENS, mask)
    tokens = mask[:, 1:].sum()
    assert scores.value == pytest.approx(np.exp(expected.sum() / tokens), rel=1e-6)
    np.testing.assert_allclose(scores.surprise, expected.sum(axis=1), rtol=1e-6)
    assert (scores.total, scores.tokens.sum()) == (WINDOWS, tokens)


def test_tokens_and_their_mask_are_found_by_name():
    causal = np.tril(np.ones((LENGTH, LENGTH), np.int64))[np.newaxis].repeat(WINDOWS, axis=0)
    others = {"a_mask": np.ones_like(MASK), "causal_mask": causal, "places": TOKENS}
    named = score(pack({**others, "attention_mask": MASK, "input_ids": TOKENS}))
    assert named.tokens.sum() == MASK[:, 1:].sum()
    with pytest.raises(DataError, match="expected one named input_ids"):
        score(pack({**others, "tokens": TOKENS}))


def test_the_unigram_has_the_frequencies_of_the_other_windows():
    numbers = np.array([[1, 1, 2], [1, 3, 0]])
    sums = measure_unigram(numbers, 3)
    assert sums[0] == pytest.approx(-2 * np.log(2 / 5) - np.log(1 / 5))
    assert sums[1] == pytest.approx(-np.log(3 / 6) - np.log(1 / 6))


def test_windows_are_listed_by_their_loss():
    task = perplexity.build(NextToken(0, VOCABULARY), 200)
    comparison = task.compare(score(TOKENS, LOGITS * 0.5), score(TOKENS))
    names, *rows = task.files.tables(comparison)["windows.csv"]
    losses = [row[3] - row[2] for row in rows]
    assert names == ["window", "tokens", "fp32_nll", "nll"]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("tokens", [TOKENS + 1, TOKENS - 1, TOKENS * 1.0, TOKENS[:, :1]])
def test_samples_that_are_no_tokens_of_the_vocabulary_are_refused(tokens):
    with pytest.raises(DataError, match="task=perplexity: the "):
        score(tokens, LOGITS[:, : tokens.shape[1]])


@pytest.mark.parametrize("logits", [LOGITS[:, 1:], LOGITS[:, -1:]])
def test_logits_of_other_tokens_are_refused(logits):
    with pytest.raises(ModelError, match=f"logits of {logits.shape[1]} tokens for windows of 9"):
        score(TOKENS, logits)


@pytest.mark.parametrize("outputs", [{"out": (13,)}, {"one": (9, 13), "other": (9, 4)}])
def test_outputs_without_logits_of_tokens_are_refused(outputs):
    context = TaskContext("texts", None, (), False, (9,), outputs, VALUES)
    with pytest.raises(ModelError, match="takes one output \\[tokens, vocabulary\\]"):
        registry.make(PerplexityConfig(), context)
    context = TaskContext(
        "texts", None, (), False, (9,), {"past": (2, 9, 4), "logits": (9, 13)}, VALUES
    )
    assert registry.make(PerplexityConfig(), context).scope.reduction == NextToken(1, 13)
