"""Host. How a prompt's tokens are cut into the sizes that prefill is compiled for."""

from functools import cache


@cache
def cut_into_chunks(num_tokens: int, sizes: tuple[int, ...], call_tokens: int) -> tuple[int, ...]:
    """Tokens of each call, so that the calls cost the least: one runs as many tokens as its size, padded, and takes as
    long as `call_tokens` more.

    >>> cut_into_chunks(70, (16, 64, 256), 16), cut_into_chunks(250, (16, 64, 256), 16)
    ((64, 6), (250,))
    """

    def cuts():
        for size in reversed(sizes):  # of those that cost the same, the first is taken
            if size >= num_tokens:
                yield (num_tokens,)
            else:
                yield (size, *cut_into_chunks(num_tokens - size, sizes, call_tokens))

    def cost(calls: tuple[int, ...]) -> tuple[int, int]:
        run = sum(next(size for size in sizes if size >= call) for call in calls)
        return run + call_tokens * len(calls), len(calls)

    return min(cuts(), key=cost)
