"""Host. Asked to end under load, the server takes nobody more and answers everybody it has taken."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.serve.fake import ANSWER, Client

ROOT = Path(__file__).resolve().parents[2]
# The command itself, over the engine of known answers, each letter of which takes its time.
SERVE = """
import asyncio, sys
from jaxspec.serve import server
from tests.serve.fake import FakeEngine

class Engine(FakeEngine):
    def __init__(self, config, **options):
        super().__init__(block=1)

    def start(self):
        pass

    def shutdown(self):
        print("the engine ends with", len(self.running), "running", file=sys.stderr)

    async def generate(self, *request):
        async for output in super().generate(*request):
            await asyncio.sleep(0.03)
            yield output

server.AsyncEngine = Engine
sys.exit(server.main(["fake", "--port", "0", "--log-format", "json", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("ending", "grace"),
    [
        (signal.SIGTERM, "60"),
        pytest.param(signal.SIGINT, "60", marks=pytest.mark.heavy),
        pytest.param(signal.SIGTERM, "0", marks=pytest.mark.heavy),
    ],
)
def test_open_requests_are_answered_first(ending, grace):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "--shutdown-timeout-s", grace],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        line = process.stderr.readline()
        client = Client(int(re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)[1]))
        answers, lost = [], []

        def ask(streamed):
            try:
                if streamed:
                    chunks = client.stream("/v1/completions", {"prompt": "hi", "max_tokens": 40})
                    answers.append("".join(c["text"] for chunk in chunks for c in chunk["choices"]))
                else:
                    body = client.post("/v1/completions", {"prompt": "hi", "max_tokens": 40}).json
                    answers.append(body["choices"][0]["text"])
            except Exception as error:
                lost.append(error)

        asking = [threading.Thread(target=ask, args=(index % 2 == 0,)) for index in range(6)]
        for thread in asking:
            thread.start()
        while _tokens(client) < 12:
            time.sleep(0.01)
        process.send_signal(ending)
        for thread in asking:
            thread.join(30)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0, said
        if grace == "60":
            assert answers == [ANSWER[:40]] * 6
            assert "the engine ends with 0 running" in said
            assert said.count('"status": 200') >= 6
        else:
            assert len(lost) == 6, "with no grace they are cut"
        with pytest.raises(ConnectionError):
            client.get("/health")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _tokens(client):
    return float(re.search(r"^vllm:generation_tokens_total\{.*\} (.*)$", client.get("/metrics").text, re.MULTILINE)[1])
