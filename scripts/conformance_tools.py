"""Host. What the runners of conformance cases share: comparing, expecting errors, and finding inputs by their names."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import JaxspecError


class NotYetError(Exception):
    """The case needs something that jaxspec does not have yet."""


class MismatchError(Exception):
    """The case gives something other than expected."""


def check(found: Any, expected: Any) -> None:
    if found != expected:
        raise MismatchError(f"expected {expected!r}, got {found!r}")


def check_close(name: str, found: Any, expected: Any, tolerance: float) -> None:
    """Numbers or equally nested lists of them, each within the tolerance."""
    is_same_shape = np.shape(found) == np.shape(expected)
    if not is_same_shape or not np.all(np.abs(np.subtract(found, expected)) <= tolerance):
        raise MismatchError(f"{name}: expected {expected!r} within {tolerance}, got {found!r}")


def expect_error(run: Callable[[], Any], expected: Mapping[str, Any]) -> None:
    """The call raises an error of jaxspec's whose message holds the `match`."""
    try:
        found = run()
    except JaxspecError as error:
        if expected.get("match", "") not in str(error):
            raise MismatchError(f"no {expected['match']!r} in the message {str(error)!r}") from error
        return
    raise MismatchError(f"expected an error, got {found!r}")


def ints(values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def first_of(given: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of the names that is given, else None."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def matrix_of(given: Mapping[str, Any], *words: str) -> list[list[int]]:
    """The input that is a list of lists and has one of the words in its name."""
    for word in words:
        for name, value in given.items():
            if word in name and isinstance(value, list) and all(isinstance(row, list) for row in value):
                return value
    raise MismatchError(f"no list of lists named like {words} among {sorted(given)}")
