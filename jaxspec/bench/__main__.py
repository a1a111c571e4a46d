"""Host. `python -m jaxspec.bench`: a table of benches."""

import importlib
import sys
from collections.abc import Sequence

BENCHES = {
    "offline": ("jaxspec.bench.offline", "speculation against plain decoding, in one process"),
    "serve": ("jaxspec.bench.serve", "latencies under a load on a live server"),
    "overhead": ("jaxspec.bench.overhead", "HTTP streaming against the engine itself"),
    "sweep": ("jaxspec.bench.sweep", "methods, drafts and batch sizes against plain decoding"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a bench by its name. Returns its exit status, or 2 when there is no such bench."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in BENCHES:
        return importlib.import_module(BENCHES[words[0]][0]).main(words[1:])
    lines = ["usage: python -m jaxspec.bench NAME …", *(f"  {name:<8} {what}" for name, (_, what) in BENCHES.items())]
    print("\n".join(lines), file=sys.stderr)
    return 0 if words[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    raise SystemExit(main())
