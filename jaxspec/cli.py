"""Host. The `jaxspec` command: a table of subcommands, each imported only when it is asked for."""

import importlib
import sys
from collections.abc import Sequence

# name -> (module whose main takes the words after the name and returns an exit status, what it does)
COMMANDS = {
    "serve": ("jaxspec.serve.server", "an OpenAI-compatible server"),
    "verify": ("jaxspec.tools.verify", "proves that speculation changes no answer of a model"),
    "doctor": ("jaxspec.tools.doctor", "measures a drafter's acceptance, and says why it is poor"),
    "inspect": ("jaxspec.tools.inspect", "says what a checkpoint is, and what jaxspec would do with it"),
    "convert": ("jaxspec.tools.convert", "writes a checkpoint anew, as safetensors or Orbax"),
    "bench": ("jaxspec.bench.__main__", "benchmarks: speculation against plain decoding, and a server under load"),
    "replay": ("jaxspec.tools.rerun", "runs what an engine recorded again, and says where it comes out otherwise"),
    "aot": ("jaxspec.aot.command", "says what a config costs on accelerators that are not there, and whether it fits"),
    "tune": ("jaxspec.bench.tune", "finds the fastest speculative_config for your prompts, and writes it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns its exit status, or 2 when there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])
    if words[:1] == ["--version"]:
        from importlib.metadata import version

        print(f"jaxspec {version('jaxspec')}")
        return 0
    asked_for_help = not words or words[0] in ("-h", "--help", "help")
    if not asked_for_help:
        print(f"jaxspec: no command {words[0]!r}", file=sys.stderr)
    listed = [f"  {name:<8} {what}" for name, (_, what) in COMMANDS.items()]
    lines = ["usage: jaxspec COMMAND …", "", *listed, "", "jaxspec COMMAND --help says more."]
    print("\n".join(lines), file=sys.stdout if asked_for_help else sys.stderr)
    return 0 if asked_for_help else 2


if __name__ == "__main__":
    raise SystemExit(main())
