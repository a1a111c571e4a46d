"""Writes the reports in docs/aot.md anew: what `jaxspec aot --no-compile` says of the configs that ship.

python scripts/aot_doc.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxspec.aot.describe import describe  # noqa: E402
from jaxspec.aot.report import acceptance_lengths, default_context, fewest_devices, report_of, text_of  # noqa: E402
from jaxspec.aot.settle import settle  # noqa: E402
from jaxspec.aot.topology import topology_of  # noqa: E402
from jaxspec.config.engine import EngineConfig  # noqa: E402
from jaxspec.config.load import pick, read_yaml  # noqa: E402

DOCUMENT = ROOT / "docs" / "aot.md"
BEGIN, END = "<!-- written by scripts/aot_doc.py -->", "<!-- end of what scripts/aot_doc.py writes -->"
REPORTS = {
    "llama3.1-8b-eagle3": "h100:1",
    "llama3.1-70b-draft": "h100:8",
    "v6e-8-draft-model": "v6e:2x4",
    "qwen3-32b-eagle3": "v6e:2x4",
    "qwen3-30b-a3b": "h200:1",
    "deepseek-v3-mtp": "h200:2x8",
}
COMPARED = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "h100:8", "h200:8", "b200:8")
COMPARED_BATCHES = (1, 8, 32, 64)
LENGTHS = (1.5, 2.0, 2.5, 3.0)


def on_paper(name: str, topology_name: str, lengths=None, context: int | None = None) -> dict:
    """The report of a config that ships, over as few devices as hold it."""
    path = ROOT / "configs" / f"{name}.yaml"
    config, topology = pick(EngineConfig, read_yaml(path)), topology_of(topology_name)
    described = describe(config, [path.parent / "models"])
    resolved = settle(config, described, topology)
    context = context or default_context(resolved)
    paper = fewest_devices(config, described, topology, context)
    lengths = acceptance_lengths(lengths, resolved.num_speculative_tokens)
    return report_of(paper, config, context=context, lengths=lengths)


def written() -> str:
    """What stands between the two marks."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from ("", "## Reports of the configs that ship", "")
    for name, topology in REPORTS.items():
        yield from (f"### `configs/{name}.yaml` on `{topology}`", "", "```")
        yield text_of(on_paper(name, topology))
        yield from ("```", "")
    yield from ("## Chips side by side", "")
    for name in ("llama3.1-8b-eagle3", "qwen3-32b-eagle3"):
        yield from _table(name)


def _table(name: str) -> Iterator[str]:
    context = 2048
    yield from (
        f"`configs/{name}.yaml`, {context} tokens a request: tokens a second of a chip",
        "",
    )
    yield f"| chips | devices a copy | requests | plain | {' | '.join(map(str, LENGTHS))} |"
    yield f"| --- | --- | --- | --- | {' | '.join('---' for _ in LENGTHS)} |"
    for topology in COMPARED:
        report = on_paper(name, topology, LENGTHS, context)
        for one in report["speeds"]:
            if one["batch"] in COMPARED_BATCHES:
                cells = [cell["tokens_per_s_per_chip"] for cell in one["at_acceptance_length"].values()]
                numbers = " | ".join(f"{cell:.0f}" for cell in (one["plain_tokens_per_s_per_chip"], *cells))
                yield f"| `{topology}` | {report['tensor']} | {one['batch']} | {numbers} |"
    yield ""


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(f"{before}{BEGIN}{written()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
