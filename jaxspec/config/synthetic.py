"""Host. Acceptance made to order: the rates of `rejection_sample_method: synthetic`, for measuring speed alone."""

import itertools
from collections.abc import Sequence

from jaxspec.errors import ConfigError


def rates_of_length(length: float, num_tokens: int) -> tuple[float, ...]:
    """The rates that give a mean acceptance length with the least variance.

    Raises: ConfigError for a length outside [1, num_tokens + 1].

    >>> rates_of_length(2.5, 3)
    (1.0, 0.5, 0.0)
    """
    if not 1 <= length <= num_tokens + 1:
        raise ConfigError(
            f"synthetic_acceptance_length must be in [1, {num_tokens + 1}] (it counts the target's own token), "
            f"got {length!r}; correct it"
        )
    return tuple(float(min(max(length - 1 - place, 0.0), 1.0)) for place in range(num_tokens))


def checked_rates(rates: Sequence[float], num_tokens: int) -> tuple[float, ...]:
    """The rates as given: entry i is how often the first i + 1 drafts are all kept.

    Raises: ConfigError if they are not num_tokens non-increasing numbers in [0, 1].
    """
    if len(rates) != num_tokens:
        raise ConfigError(
            f"synthetic_acceptance_rates must have length {num_tokens} (num_speculative_tokens), got {list(rates)!r}"
        )
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"synthetic_acceptance_rates must be in [0, 1], got {list(rates)!r}; correct them")
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise ConfigError(
            f"synthetic_acceptance_rates must be non-increasing (entry i is for the first i + 1 drafts together), "
            f"got {list(rates)!r}; multiply them up"
        )
    return tuple(float(rate) for rate in rates)


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """How often draft i is kept once those before it are, from how often the first i + 1 are all kept.

    >>> conditional_rates((0.8, 0.4, 0.0))
    (0.8, 0.5, 0.0)
    """
    before = (1.0, *rates)
    return tuple(rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=False))
