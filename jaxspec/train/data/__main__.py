"""Host. `python -m jaxspec.train.data --config FILE`: makes or continues a corpus."""

import argparse
import logging
import sys
from collections.abc import Sequence

from jaxspec.config.load import add_flags, gather, parse_flags, pick
from jaxspec.errors import JaxspecError
from jaxspec.train.data.recipe import DataConfig, make_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Make a corpus. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m jaxspec.train.data", description="Makes a corpus to train drafters on.", allow_abbrev=False
    )
    add_flags(parser, [DataConfig])
    try:
        config = pick(DataConfig, gather([DataConfig], parse_flags(parser, sys.argv[1:] if argv is None else argv)))
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        print(f"{make_corpus(config, show_progress=sys.stderr.isatty())} tokens in {config.output}")
    except JaxspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
