"""Host. The drafting methods by name; the table is config's, which checks what users write against it."""

from jaxspec.config.methods import METHODS as METHODS
