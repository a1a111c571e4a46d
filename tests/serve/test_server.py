"""Host. `jaxspec serve` and `jaxspec` as commands: what cannot start says so before anything slow begins."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jaxspec import cli
from jaxspec.serve.server import main
from tests.serve.fake import Client

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "goldens" / "tiny" / "llama"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "'model'"),
        (["m", "--prt", "1"], "--port"),
        (["m", "--port", "70000"], "port"),
        (["m", "--host", "256.1.1.1"], "256.1.1.1"),
        (["m", "--speculative-method", "dspark", "--num-speculative-tokens", "2"], "'dspark' needs 'model'"),
        (["--config", "no/such.yaml"], "no/such.yaml"),
    ],
)
def test_a_wrong_config_ends_with_status_2(capsys, words, says):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxspec serve: ")
    assert says in said


def test_a_taken_port_is_said_before_anything_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["no-such-model", "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err


def test_the_command_lists_its_subcommands(capsys):
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in cli.COMMANDS)
    assert cli.main(["dance"]) == 2
    assert "no command 'dance'" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_subcommand_is_there(name, capsys):
    with suppress(SystemExit):  # argparse ends this way
        cli.main([name, "--help"])
    said = capsys.readouterr()
    assert "usage" in said.out + said.err


@pytest.fixture
def command():
    """The server as a process of its own, over a model without tokenizer, and the port it says it listens on."""
    words = ["--max-model-len", "32", "--max-num-seqs", "1", "--compilation-cache-dir", "null", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxspec.serve", str(TINY), *words],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        said = ""
        while (found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, Client(int(found[1]))
    finally:
        process.kill()
        process.communicate()


def test_the_command_serves_until_it_is_interrupted(command):
    process, client = command
    deadline = time.monotonic() + 300
    while client.get("/health").status != 200:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    body = client.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).json
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body["metrics"] is None  # nothing was speculated
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def test_an_interrupt_while_it_compiles_ends_it_at_once(command):
    process, client = command
    assert client.get("/health").status == 503
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert "terminate" not in said


def test_an_engine_that_cannot_start_ends_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec.serve", str(tmp_path), "--port", "0"],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the engine did not start" in done.stderr.splitlines()[-1]
    assert str(tmp_path) in done.stderr.splitlines()[-1]
