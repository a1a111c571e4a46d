"""Host. The demo script around a stub server: it waits, asks, reports, and ends the one process it started."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands where jaxspec.serve would: healthy on the third look, then streams three words and their figures.
STUB = """
import http.server, json, os, sys
looks = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        global looks
        looks += 1
        self.send_response(200 if looks > 2 else 503)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["stream"] and body["stream_options"]["include_usage"]
        self.send_response(200)
        self.end_headers()
        chunks = [{"choices": [{"delta": {"content": word}}]} for word in ("", "draft ", "verify ", "accept")]
        figures = {"mean_acceptance_length": 2.5, "num_accepted_draft_tokens": 3, "num_draft_tokens": 4,
                   "draft_acceptance_rate": 0.75, "tokens_per_round": 1.5}
        chunks.append({"choices": [], "usage": {"completion_tokens": 3}, "metrics": {"speculative_decoding": figures}})
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")
words = sys.argv[1:]
if os.environ.get("STUB_FAILS"):
    print("the stub cannot start"); sys.exit(3)
open("pid", "w").write(str(os.getpid()))
host, port = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
http.server.HTTPServer((host, port), Handler).serve_forever()
"""


# Shells start what runs in the background with the interrupt ignored, and processes inherit that.
WITH_INTERRUPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def project(tmp_path):
    """A folder with the demo script and a stub for the server."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo.py", tmp_path / "scripts" / "demo.py")
    (tmp_path / "jaxspec" / "serve").mkdir(parents=True)
    (tmp_path / "jaxspec" / "__init__.py").touch()
    (tmp_path / "jaxspec" / "serve" / "__init__.py").touch()
    (tmp_path / "jaxspec" / "serve" / "__main__.py").write_text(STUB)
    return tmp_path


def start(project, *words, **env):
    return subprocess.Popen(
        [sys.executable, "-c", WITH_INTERRUPT, "scripts/demo.py", *words],
        cwd=project, env=os.environ | {"HOME": ""} | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_once_answers_reports_and_stops(project):
    for _ in range(2):  # safe to run twice
        demo = start(project, "--once")
        output, _ = demo.communicate(timeout=60)
        assert demo.returncode == 0, output
        assert "draft verify accept" in output
        assert "mean acceptance length 2.50, accepted 3 of 4 drafts (75 %), 1.50 tokens a round" in output
        assert not is_running(int((project / "pid").read_text()))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_server_stays_until_it_is_interrupted(project, ending):
    demo = start(project)
    for line in demo.stdout:
        if "until Ctrl-C" in line:
            break
    server = int((project / "pid").read_text())
    time.sleep(0.2)
    assert is_running(server)
    demo.send_signal(ending)
    demo.communicate(timeout=30)
    assert demo.returncode == (0 if ending == signal.SIGINT else 128 + ending)
    assert not is_running(server)


def test_an_interrupt_while_it_starts_leaves_nothing(project):
    (project / "jaxspec" / "serve" / "__main__.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    demo = start(project)
    while not (project / "pid").exists() or not (project / "pid").read_text():
        time.sleep(0.02)
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=30)
    assert not is_running(int((project / "pid").read_text()))


def test_a_server_that_cannot_start_shows_its_log(project):
    demo = start(project, "--once", STUB_FAILS="1")
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "ended with status 3" in output
    assert "the stub cannot start" in output


def test_another_port_is_found_when_the_default_is_taken(project):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8000))
            taken.listen()
        except OSError:
            pass  # someone else's already, which is as good
        demo = start(project, "--once")
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, output
    assert "port 8000 is taken, using" in output


@pytest.mark.heavy
def test_the_demo_speaks_with_the_real_model():
    demo = start(ROOT, "--once", "--port", str(free_port()))
    output, _ = demo.communicate(timeout=1200)
    assert demo.returncode == 0, output
    assert "tokens a round]" in output


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
