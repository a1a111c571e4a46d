"""Host. `jaxspec serve` and `jaxspec` as commands: what cannot start says so before anything slow begins."""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jaxspec import cli
from jaxspec.config.server import ServerConfig
from jaxspec.serve.app import create_app
from jaxspec.serve.server import bind, http_server, main
from tests.serve.fake import Client, FakeEngine

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
        (["m", "--ssl-keyfile", "k.pem"], "go together"),
        (["m", "--ssl-keyfile", "no/k.pem", "--ssl-certfile", "no/c.pem"], "no/c.pem"),
        (["m", "--api-key-file", "no/keys"], "no/keys"),
        (["m", "--chat-template", "no/template.jinja"], "no/template.jinja"),
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


def test_the_config_is_printed_without_its_secrets(capsys, monkeypatch):
    monkeypatch.setenv("JAXSPEC_API_KEY", "sesame")
    monkeypatch.setenv("JAXSPEC_PORT", "9001")
    assert main(["m", "--max-num-seqs", "3", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "sesame" not in printed
    assert {"model: m", "max_num_seqs: 3", "port: 9001"} <= set(printed.splitlines())
    monkeypatch.setenv("JAXSPEC_PROT", "1")
    assert main(["m", "--print-config"]) == 2
    assert "JAXSPEC_PORT" in capsys.readouterr().err


def test_https(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make a certificate")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    config = ServerConfig(ssl_keyfile=key, ssl_certfile=certificate)
    listening = bind("127.0.0.1", 0)
    server = http_server(config)
    server.config.app = create_app(FakeEngine(), config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        context = ssl.create_default_context(cafile=certificate)
        raw = socket.create_connection(("127.0.0.1", listening.getsockname()[1]), timeout=10)
        with context.wrap_socket(raw, server_hostname="localhost") as secure:
            secure.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b" 200 " in secure.recv(1000)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


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
    # Asked to end, it takes nobody more, and answers whom it has taken.
    answers = []
    asked = {"prompt": [5, 6, 7], "max_tokens": 29, "ignore_eos": True, "n": 4}
    ask = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", asked).json))
    ask.start()
    while " " not in running(client):
        assert ask.is_alive()
    process.send_signal(signal.SIGTERM)
    ask.join(60)
    assert answers[0]["usage"]["completion_tokens"] == 4 * 29
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert 'path="/v1/completions" status=200' in said
    with pytest.raises(ConnectionError):
        client.get("/health")


def running(client):
    """The lines of /metrics that say requests are running or waiting, none if none are."""
    found = re.findall(
        r"^vllm:num_requests_(?:running|waiting)\{.*\} [^0].*$", client.get("/metrics").text, re.MULTILINE
    )
    return "".join(found)


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
