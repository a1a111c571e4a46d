"""Host. A proposer of the user's own: an object handed over, or what a dotted path leads to; checked before use."""

import difflib
import importlib
from typing import Any

from jaxspec.config.methods import drafter_of
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.errors import ConfigError
from jaxspec.proposers.base import HostProposer, Proposer

_ON_HOST = ("observe", "propose", "finish")
_ON_DEVICE = ("init", "prefill", "propose")


def check_custom(speculative: SpeculativeConfig | None, proposer: Any) -> None:
    """Raises: ConfigError unless a proposer of the user's comes from exactly one place, and what is given is one."""
    is_custom = speculative is not None and drafter_of(speculative.method or "") == "custom"
    is_named = speculative is not None and is_custom and speculative.model is not None
    if proposer is not None and is_named:
        raise ConfigError("method 'custom' takes `model`, a dotted path, or the engine's argument `proposer`; drop one")
    if is_custom != (proposer is not None or is_named):
        raise ConfigError("method 'custom' and the engine's argument `proposer` go together; give both or neither")
    if proposer is not None:
        _checked(proposer, "the engine's argument `proposer`")


def load_custom(resolved: ResolvedConfig) -> Proposer | HostProposer:
    """The proposer at the dotted path that is the config's `model`: an object, or what a class or a function makes of
    the ResolvedConfig.

    Raises: ConfigError where nothing is there, what is there fails, or what it gives is no proposer.
    """
    assert resolved.speculative_config is not None
    name = resolved.speculative_config.model or ""
    found = _find(name)
    if isinstance(found, Proposer) or (hasattr(found, "observe") and not isinstance(found, type)):
        return _checked(found, repr(name))
    if not callable(found):
        raise ConfigError(f"{name!r} must be a Proposer, a HostProposer or what makes one, got {found!r}")
    try:
        made = found(resolved)
    except Exception as error:
        raise ConfigError(
            f"{name!r} raised {type(error).__name__}: {error}; it is called with one argument, the resolved config"
        ) from error
    return _checked(made, repr(name))


def _find(name: str) -> Any:
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        if is_absent or isinstance(error, ValueError):  # ValueError: the name before the last dot is empty or relative
            raise ConfigError(
                f"method 'custom' needs model='package.module.name' that can be imported, and there is no file or "
                f"folder of that name either; got {name!r} ({error}); mind PYTHONPATH"
            ) from error
        raise ConfigError(f"importing {module_name!r} for {name!r} raised {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, dir(module), n=3)
        remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else "correct the name behind the last dot"
        raise ConfigError(f"{name!r}: module {module_name!r} has no {attribute!r}; {remedy}") from error


def _checked(found: Any, source: str) -> Proposer | HostProposer:
    """The same object. Raises: ConfigError unless it has every member of one of the two protocols."""
    members = _ON_DEVICE if isinstance(found, Proposer) else _ON_HOST
    if isinstance(found, type):
        raise ConfigError(f"{source} must be a proposer, got the class {found.__name__!r} itself; give an instance")
    missing = [key for key in members if not callable(getattr(found, key, None))]
    if isinstance(found, Proposer) and found.commit is not None and not callable(found.commit):
        missing.append("commit")
    if missing:
        kind = "Proposer" if isinstance(found, Proposer) else "HostProposer"
        raise ConfigError(
            f"{source} must give a Proposer or a HostProposer, got {found!r:.200}: as a {kind} it lacks the function"
            f"{'s' * (len(missing) > 1)} {', '.join(missing)}"
        )
    num_tokens = getattr(found, "num_tokens", None)
    if type(num_tokens) is not int or num_tokens < 0:
        raise ConfigError(
            f"{source}: num_tokens must be the drafts a row in a round, a whole number, got {num_tokens!r}; set it"
        )
    return found
