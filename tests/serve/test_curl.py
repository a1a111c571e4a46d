"""Host. curl, with README's own words: an answer streams, and what is refused is a status that scripts see."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.fake import ANSWER, FakeEngine, serving

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def test_curl():
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    (line,) = re.findall(r"^curl localhost:8000/(?:[^\n]*\\\n)*[^\n]*", README, re.MULTILINE)
    with serving(FakeEngine()) as client:
        words = shlex.split(line.replace("\\\n", "").replace("localhost:8000", f"127.0.0.1:{client.port}"))
        said = subprocess.run([*words, "-sSN"], capture_output=True, text=True, timeout=30, check=True).stdout
        events = [event.removeprefix("data: ") for event in said.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
        refused = [*words[:-1], '{"messages": 3}', "--fail", "-s"]
        assert subprocess.run(refused, capture_output=True, timeout=30, check=False).returncode == 22
