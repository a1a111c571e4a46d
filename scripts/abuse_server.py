"""Host. Streams from a live server whose clients leave at random, and whether it gives everything back.

`python scripts/abuse_server.py --port 8000 --streams 200` against `jaxspec serve MODEL`. A client reads its stream to
the end, or leaves after a random number of chunks: closes, resets, half-closes, or is killed (kill -9). Meanwhile
/metrics is read all the time. It fails (status 1) unless rows and pages return, no counter ever falls, never are more
drafts accepted than made, and everyone who stays is answered whole. The last line of stdout is one JSON object.
"""

import argparse
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.parser import text_string_to_metric_families

WAYS = ("stays", "closes", "resets", "half-closes")
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
# Of its own process, so that it can be killed: it passes its socket's bytes on to its standard output.
CLIENT = """
import os, socket, sys
raw = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
raw.sendall(bytes.fromhex(sys.argv[2]))
while piece := raw.recv(4096):
    os.write(1, piece)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Streams that leave at random.", allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8000, help="of the server, on this machine")
    parser.add_argument("--streams", type=int, default=200, help="requests")
    parser.add_argument("--kills", type=int, default=10, help="of them, clients of their own process, ended by kill -9")
    parser.add_argument("--concurrency", type=int, default=16, help="at a time")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--prompt", default="Once upon a time, and a time, and a time,", help="of every request")
    parser.add_argument("--seed", type=int, default=0, help="of who leaves when, and how")
    args = parser.parse_args(argv)
    body = {"prompt": args.prompt, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True}
    report = abuse(args.port, body, args.streams, kills=args.kills, concurrency=args.concurrency, seed=args.seed)
    print(json.dumps(report))
    return 1 if report["faults"] else 0


def abuse(port: int, body: dict, streams: int, *, kills: int = 0, concurrency: int = 8, seed: int = 0) -> dict:
    """Do it, and say what came of it; "faults" lists what must not be."""
    draw = random.Random(seed)
    plan = [
        ("is killed" if i < kills else draw.choice(WAYS), draw.randrange(body["max_tokens"])) for i in range(streams)
    ]
    draw.shuffle(plan)
    raw = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    request = request % len(raw) + raw
    scrapes, done = [scrape(port)], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            scrapes.append(scrape(port))

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(concurrency) as pool:
            heard = list(pool.map(lambda one: client(port, request, *one), plan))
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 30
        while any((last := scrape(port))[name] for name in GAUGES) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        done.set()
        watching.join()
    scrapes.append(last)
    faults = [f"{name} is {last[name]:g} at the end" for name in GAUGES if last[name]]
    for before, after in itertools.pairwise(scrapes):
        faults += [f"{name} fell" for name, value in before.items() if name.endswith("_total") and after[name] < value]
        if after["vllm:spec_decode_num_accepted_tokens_total"] > after["vllm:spec_decode_num_draft_tokens_total"]:
            faults.append("more drafts accepted than made")
    for (way, _), text in zip(plan, heard, strict=True):
        if way == "stays" and (b"[DONE]" not in text or b'"completion_tokens":%d' % body["max_tokens"] not in text):
            faults.append(f"one who stayed heard only {text[-200:]!r}")
    written = last["vllm:generation_tokens_total"] - scrapes[0]["vllm:generation_tokens_total"]
    return {
        "streams": dict(Counter(way for way, _ in plan)),
        "seconds": round(seconds, 2),
        "scrapes": len(scrapes),
        "tokens_written": written,
        "tokens_if_nobody_had_left": streams * body["max_tokens"],
        "chunks_heard": sum(text.count(b'"text":"') for text in heard),
        "faults": sorted(set(faults)),
    }


def client(port: int, request: bytes, way: str, chunks: int) -> bytes:
    """What one client hears. chunks: after so many it leaves, if it does."""
    if way == "is killed":
        return killed(port, request, chunks)
    with socket.create_connection(("127.0.0.1", port), timeout=120) as raw:
        raw.sendall(request)
        heard = b""
        while way == "stays" or heard.count(b"data: ") < chunks:
            piece = raw.recv(65536)
            if not piece:
                return heard
            heard += piece
        if way == "half-closes":
            raw.shutdown(socket.SHUT_WR)
            try:
                while piece := raw.recv(65536):
                    heard += piece
            except ConnectionError:
                pass
        elif way == "resets":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return heard


def killed(port: int, request: bytes, chunks: int) -> bytes:
    words = [sys.executable, "-S", "-c", CLIENT, str(port), request.hex()]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        heard = b""
        while heard.count(b"data: ") < max(1, chunks) and (piece := os.read(process.stdout.fileno(), 65536)):
            heard += piece
        process.send_signal(signal.SIGKILL)
    return heard


def scrape(port: int) -> dict[str, float]:
    """Every counter and gauge, summed over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    found: Counter = Counter()
    for family in families:
        for sample in family.samples:
            if family.type in ("counter", "gauge") and not sample.name.endswith("_created"):
                found[sample.name] += sample.value
    return dict(found)


if __name__ == "__main__":
    raise SystemExit(main())
