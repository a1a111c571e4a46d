"""Host. Family name -> its functions. A new family is one module and one line here."""

from jaxspec.errors import ConfigError
from jaxspec.models import (
    deepseek_v3,
    ernie4_5_moe,
    gemma,
    glm4_moe,
    gpt2,
    llama,
    mixtral,
    phi3,
    qwen3_moe,
)
from jaxspec.models.base import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "gemma": gemma.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "mixtral": mixtral.FAMILY,
    "phi3": phi3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}


def family_of(name: str) -> Family:
    """The functions of a family, or a ConfigError that lists the known ones."""
    if name not in FAMILIES:
        raise ConfigError(f"model family must be one of {sorted(FAMILIES)}, got {name!r}")
    return FAMILIES[name]
