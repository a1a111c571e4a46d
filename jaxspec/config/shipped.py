"""Host. The trained drafters that come with the package: for which target and method, and where they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.config.methods import drafter_of
from jaxspec.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[1] / "drafters"


class Shipped(NamedTuple):
    """A folder of FOLDER, whose card is its README.md, and the drafts a row that its card found best."""

    folder: str
    num_tokens: int


_SMOLLM2 = {"eagle3": Shipped("smollm2-135m-instruct-eagle3", 2)}
# The target as a config may name it, in lower case -> method -> its drafter.
SHIPPED: dict[str, dict[str, Shipped]] = {
    "smollm2-135m-instruct": _SMOLLM2,
    "huggingfacetb/smollm2-135m-instruct": _SMOLLM2,
}


def with_shipped(speculative: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """A speculative_config that names a trained drafter's method and no `model`, with the one that ships for the
    target, and as many drafts as its card says unless it says itself; any other config as it is.

    Raises: ConfigError where a method has shipped drafters, but not for this target.
    """
    given = dict(speculative)
    method = given.get("method")
    if not isinstance(method, str) or given.get("model") is not None or given.get("parallel_drafting") is True:
        return given
    drafter = drafter_of(method)
    found = SHIPPED.get(str(target).lower(), {}).get(drafter)
    if found is not None:
        given["model"] = str(FOLDER / found.folder)
        if given.get("num_speculative_tokens") is None:
            given["num_speculative_tokens"] = found.num_tokens
    elif any(drafter in drafters for drafters in SHIPPED.values()):
        raise ConfigError(
            f"method {method!r} needs 'model' for the target {target!r}: with the package come {told_shipped()}; give "
            "the draft's alias, hub name or folder, or train one (docs/training.md)"
        )
    return given


def told_shipped() -> str:
    """All of it, for people."""
    return "; ".join(f"{', '.join(drafters)} for {target}" for target, drafters in SHIPPED.items()) or "none"
