"""A decoder's inputs for earlier tokens are removed only where nothing else needs them."""

import pytest
from onnx import parser

from resnet8ptq.models import past_tokens

PAST = "past_key_values.0.key"


def decoder(node: str):
    return parser.parse_graph(
        f"""decoder (int64[N, T] input_ids, float[N, 2, P, 3] "{PAST}", float[N, 2, T, 3] key)
        => (float[N, 2, Q, 3] y) {{ {node} }}"""
    )


@pytest.mark.parametrize(
    "node",
    [
        f'y = Add("{PAST}", key)',
        f'y = Shape<start = 2>("{PAST}")',
        f'y = Concat<axis = 1>("{PAST}", key)',  # not of tokens
        f'y = Concat<axis = 2>("{PAST}", "{PAST}")',
        f"""y = If(flag) <then_branch = inner () => (float[N, 2, P, 3] a) {{ a = Neg("{PAST}") }},
            else_branch = other () => (float[N, 2, T, 3] b) {{ b = Neg(key) }}>""",
    ],
)
def test_an_input_that_a_node_computes_with_stays(node):
    graph = decoder(node)
    assert past_tokens.remove_past(graph) == []
    assert [value.name for value in graph.input] == ["input_ids", PAST, "key"]


def test_an_input_that_is_joined_is_removed():
    graph = decoder(f'y = Concat<axis = 2>("{PAST}", key)')
    assert past_tokens.remove_past(graph) == [PAST]
    assert [value.name for value in graph.input] == ["input_ids", "key"]
    assert list(graph.node[0].input) == ["key"]
