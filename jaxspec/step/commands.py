"""Host. One call of a program as bytes, so that another process can make the same: its name and the arrays that it was
handed, in JSON and raw numbers. What lies on the devices of all stays there, and is named."""

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import HostError
from jaxspec.step.state import DecodeState

_DIGEST_SIZE = 16
_LENGTH = struct.Struct("<I")


class Wire:
    """Writes calls, or reads them, one after the other; each carries the digest of all so far."""

    def __init__(self):
        self._digest = bytes(_DIGEST_SIZE)

    def pack(self, name: str, args: Sequence[Any], weights: Any, kept: Sequence[jax.Array]) -> bytes:
        """The call of program `name`: of its args, `weights` and a DecodeState go by name, and so do arrays of
        `kept`, which every process has from the same calls before; the others are numpy."""
        places = {id(leaf): at for at, leaf in enumerate(kept)}
        described, buffers = [], []
        for arg in args:
            if arg is weights or isinstance(arg, DecodeState):
                described.append("weights" if arg is weights else "state")
                continue
            leaves = []
            for leaf in jax.tree.leaves(arg):
                if isinstance(leaf, jax.Array):
                    leaves.append(places[id(leaf)])
                else:
                    array = np.asarray(leaf)
                    leaves.append([array.dtype.name, array.shape])
                    buffers.append(array.tobytes())
            described.append(leaves)
        head = json.dumps([name, described]).encode()
        body = b"".join((_LENGTH.pack(len(head)), head, *buffers))
        return self._next(body) + body

    def unpack(self, payload: bytes) -> tuple[str, list[Any]]:
        """(name, args): "weights", "state", or a list of leaves, in which a number is a place in what was kept.

        Raises:
            HostError: calls were lost, or came in another order or changed.
        """
        digest, body = payload[:_DIGEST_SIZE], payload[_DIGEST_SIZE:]
        if self._next(body) != digest:
            raise HostError("the calls that came are not those that host 0 has sent; start the job again")
        start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        name, described = json.loads(body[_LENGTH.size : start])
        args: list[Any] = []
        for arg in described:
            if isinstance(arg, str):
                args.append(arg)
                continue
            leaves: list[Any] = []
            for leaf in arg:
                if isinstance(leaf, int):
                    leaves.append(leaf)
                    continue
                dtype, shape = jnp.dtype(leaf[0]), tuple(leaf[1])
                size = int(np.prod(shape))
                leaves.append(np.frombuffer(body, dtype, size, start).reshape(shape))
                start += size * dtype.itemsize
            args.append(leaves)
        return name, args

    def _next(self, body: bytes) -> bytes:
        self._digest = hashlib.blake2b(body, digest_size=_DIGEST_SIZE, key=self._digest).digest()
        return self._digest


def arguments_of(
    program: Any, args: Sequence[Any], weights: Any, state: DecodeState | None, kept: Sequence[jax.Array]
) -> tuple[Any, ...]:
    """What `unpack` gave, as the compiled program takes it."""
    trees = program.in_tree.children()[0].children()
    named = {"weights": weights, "state": state}
    return tuple(
        named[arg] if isinstance(arg, str) else tree.unflatten([kept[x] if isinstance(x, int) else x for x in arg])
        for tree, arg in zip(trees, args, strict=True)
    )


def small_results(results: Any, keep: Callable[[DecodeState], None] | None = None) -> list[Any]:
    """Leaves of what a program gave, but for the state, of which `keep` is told."""
    leaves = []
    for one in results if isinstance(results, tuple) else (results,):
        if not isinstance(one, DecodeState):
            leaves += jax.tree.leaves(one)
        elif keep is not None:
            keep(one)
    return leaves
