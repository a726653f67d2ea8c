"""Splits the steps of a network into blocks of consecutive steps.

If possible, later steps read only the last step of a block.
"""

from collections.abc import Collection, Sequence


def split_into_blocks(sources: Sequence[Collection[int]], most: int) -> list[list[int]]:
    """Return the indices of the steps in at most `most` blocks, see `_split`.

    The smallest size of a block that gives so few blocks is taken.

    Args:
        sources: for each step, in the order of execution, the earlier steps that it reads.

    >>> split_into_blocks([[], [0], [1], [2], [3]], most=3)
    [[0, 1], [2, 3], [4]]
    """
    last = list(range(len(sources)))  # for each step, the last step that reads it
    for index, read in enumerate(sources):
        for source in read:
            last[source] = index

    # Try longer blocks until there are few enough
    blocks: list[list[int]] = []
    for size in range(1, len(sources) + 1):
        blocks = _split(last, size)
        if len(blocks) <= most:
            break
    return blocks


def _split(last: Sequence[int], size: int) -> list[list[int]]:
    """Return blocks of `size` to twice `size` steps; the last one may be shorter.

    A block of `size` or more steps ends where no later step reads a step before its last one.

    Args:
        last: for each step, the last step that reads it, or the step itself.
    """
    blocks: list[list[int]] = []
    block: list[int] = []
    open_until = 0  # the last reader of all steps before the current one
    for index, end in enumerate(last):
        block.append(index)
        is_passed = open_until <= index
        open_until = max(open_until, end)
        longest = size if is_passed else 2 * size
        if len(block) >= longest:
            blocks.append(block)
            block = []
    if block:
        blocks.append(block)
    return blocks
