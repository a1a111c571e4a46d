"""Host. The demo's client: starts the server, waits for health, streams one answer, says how speculation went.

Standard library only, and it ends no process but the one it started.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
DEFAULT_PORT = 8000
START_SECONDS = 900  # a first start compiles; a later one reads the cache

# An edit: most of the answer stands in the question, which is where drafting from the context pays.
QUESTION = '''Rewrite this Python function so that it also returns the number of lines that were skipped. \
Keep everything else the same and output the whole function.

```python
def load_scores(path, delimiter=","):
    """Read name and score pairs from a text file."""
    scores = {}
    with open(path, "r", encoding="utf-8") as handle:
        for line_number, line in enumerate(handle, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            parts = line.split(delimiter)
            if len(parts) != 2:
                print(f"line {line_number}: expected 2 fields, got {len(parts)}")
                continue
            name, value = parts[0].strip(), parts[1].strip()
            try:
                scores[name] = float(value)
            except ValueError:
                print(f"line {line_number}: bad number {value!r}")
    return scores
```'''


def main() -> int:
    """Run the demo. Returns 0 when the answer came."""
    parser = argparse.ArgumentParser("demo.sh", description="SmolLM2 answers through a speculative server.")
    parser.add_argument("--once", action="store_true", help="stop the server after the answer")
    parser.add_argument("--port", type=int, default=None, help=f"port of the server; {DEFAULT_PORT} or a free one")
    parser.add_argument("--prompt", default=QUESTION, help="what to ask")
    args = parser.parse_args()

    began = time.monotonic()
    port = args.port if args.port is not None else free_port()
    log = ROOT / ".jaxspec_cache" / f"demo-server-{port}.log"
    server = None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    try:
        server = start(port, log)
        print(f"starting the server at http://{HOST}:{port} (its log: {log.relative_to(ROOT)})", flush=True)
        if not wait_until_ready(server, port, log):
            return 1
        print(f"ready after {time.monotonic() - began:.1f} s\n\n> {args.prompt}\n", flush=True)
        ask(port, args.prompt, began)
        if not args.once:
            print(f"\nThe server stays at http://{HOST}:{port}/v1 until Ctrl-C.", flush=True)
            server.wait()
            print(f"the server ended by itself; see {log}", file=sys.stderr)
            return 1
        return 0
    except KeyboardInterrupt:
        print()
        return 0
    finally:
        if server is not None:
            stop(server)


def start(port: int, log: Path) -> subprocess.Popen[bytes]:
    """The server, writing to log. It has a session of its own, so that Ctrl-C reaches this script alone."""
    log.parent.mkdir(exist_ok=True)
    words = ["--config", "configs/demo.yaml", "--host", HOST, "--port", str(port)]
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxspec.serve", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def free_port() -> int:
    """The default port, or one that the system has free."""
    for port in (DEFAULT_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            found = probe.getsockname()[1]
            if port == 0:
                print(f"port {DEFAULT_PORT} is taken, using {found}", flush=True)
            return found
    raise SystemExit("no port is free")


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    """Whether /health said 200 before the server ended or time ran out; if not, the end of its log is shown."""
    deadline = time.monotonic() + START_SECONDS
    told = time.monotonic()
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        if time.monotonic() - told > 15:
            told = time.monotonic()
            print(f"… still compiling ({last_line(log)})", flush=True)
    why = f"ended with status {server.returncode}" if server.poll() is not None else f"not ready in {START_SECONDS} s"
    print(f"the server {why}; the end of {log}:", file=sys.stderr)
    print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
    return False


def last_line(log: Path) -> str:
    """The newest line of the server's log."""
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1][:100] if lines else "no log yet"


def ask(port: int, prompt: str, began: float) -> None:
    """Stream one answer to the terminal, then one line about it."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 256,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    sent = time.monotonic()
    first = None
    totals = {}
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise SystemExit(f"the server answered with an error: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                text = choice["delta"].get("content", "")
                if text and first is None:
                    first = time.monotonic()
                print(text, end="", flush=True)
            if not chunk["choices"]:
                totals = chunk
    done = time.monotonic()
    if first is None:
        raise SystemExit("the server sent no text")
    print("\n")
    num_tokens = totals["usage"]["completion_tokens"]
    figures = totals["metrics"]["speculative_decoding"]
    print(
        f"[{num_tokens} tokens in {done - sent:.2f} s, {num_tokens / (done - sent):.1f} tokens/s; first token "
        f"{first - sent:.2f} s after the question, {first - began:.1f} s after the start]"
    )
    print(
        f"[speculation: mean acceptance length {figures['mean_acceptance_length']:.2f}, accepted "
        f"{figures['num_accepted_draft_tokens']} of {figures['num_draft_tokens']} drafts "
        f"({100 * figures['draft_acceptance_rate']:.0f} %), {figures['tokens_per_round']:.2f} tokens a round]",
        flush=True,
    )


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server that this script started, gently first."""
    if server.poll() is not None:
        return
    server.send_signal(signal.SIGINT)
    try:
        server.wait(timeout=15)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    raise SystemExit(main())
