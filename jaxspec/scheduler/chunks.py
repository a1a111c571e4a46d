"""Host. How a prompt's tokens are cut into the sizes that prefill is compiled for."""

from functools import cache


def cut_into_chunks(num_tokens: int, sizes: tuple[int, ...], call_tokens: int) -> tuple[int, ...]:
    """Tokens of each call, so that the calls cost the least: one runs as many tokens as its size, padded, and takes as
    long as `call_tokens` more.

    >>> cut_into_chunks(70, (16, 64, 256), 16), cut_into_chunks(250, (16, 64, 256), 16)
    ((64, 6), (250,))
    """
    first, calls = _first_calls(sizes, call_tokens), []
    while num_tokens > first[num_tokens]:
        calls.append(first[num_tokens])
        num_tokens -= calls[-1]
    return (*calls, num_tokens)


@cache
def _first_calls(sizes: tuple[int, ...], call_tokens: int) -> tuple[int, ...]:
    """The size of the first call for 0, 1, … tokens, up to the largest size."""
    first, costs = [], []  # a cost is (tokens, calls)
    for num_tokens in range(sizes[-1] + 1):
        options = []
        for size in reversed(sizes):  # of those that cost the same, the largest comes first
            rest, calls = costs[num_tokens - size] if size < num_tokens else (0, 0)
            options.append(((rest + size + call_tokens, calls + 1), size))
        cost, size = min(options, key=lambda option: option[0])
        first.append(size)
        costs.append(cost)
    return tuple(first)
