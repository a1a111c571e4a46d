"""Host. Family name -> its functions. A new family is one module and one line here."""

from jaxspec.errors import ConfigError
from jaxspec.models import llama
from jaxspec.models.base import Family

FAMILIES: dict[str, Family] = {"llama": llama.FAMILY}


def family_of(name: str) -> Family:
    """The functions of a family, or a ConfigError that lists the known ones."""
    if name not in FAMILIES:
        raise ConfigError(f"model family must be one of {sorted(FAMILIES)}, got {name!r}")
    return FAMILIES[name]
