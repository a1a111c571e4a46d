"""Host. `python -m jaxspec.train --config FILE`: trains a drafter, or goes on with a run that was interrupted."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from jaxspec.config.load import add_flags, gather, parse_flags, pick
from jaxspec.errors import JaxspecError
from jaxspec.train.config import TrainConfig
from jaxspec.train.run import train


def main(argv: Sequence[str] | None = None) -> int:
    """Train. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m jaxspec.train", description="Trains a drafter for a target.", allow_abbrev=False
    )
    add_flags(parser, [TrainConfig])
    try:
        config = pick(TrainConfig, gather([TrainConfig], parse_flags(parser, sys.argv[1:] if argv is None else argv)))
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
        print(json.dumps(train(config, show_progress=sys.stderr.isatty())))
    except JaxspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
