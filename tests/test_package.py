"""Host. A built wheel works where nothing of this checkout is in sight."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "data" / "goldens" / "tiny" / "llama"

SPEAK = """
import pathlib, sys
import jaxspec
assert pathlib.Path(jaxspec.__file__).is_relative_to(sys.prefix), jaxspec.__file__
engine = jaxspec.Engine(sys.argv[1], max_model_len=32, max_num_seqs=1, compilation_cache_dir=None, use_tqdm=False,
                        speculative_config={"method": "ngram", "num_speculative_tokens": 2})
params = jaxspec.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
(output,) = engine.generate({"prompt_token_ids": [5, 6, 7, 5, 6]}, params, use_tqdm=False)
print(len(output.outputs[0].token_ids))
"""


@pytest.mark.heavy
def test_a_wheel_works_in_a_clean_environment(tmp_path):
    def run(*words, **env):
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(words, cwd=tmp_path, env=clean | env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("jaxspec-*.whl")
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxspec" / "drafters").rglob("*.*")}
    assert shipped <= set(zipfile.ZipFile(wheel).namelist())
    assert wheel.stat().st_size < 45 * 10**6
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", str(home))
    python = home / "bin" / "python"
    # The dependencies are those of this environment. Its own .pth files, the checkout's among them, are not followed.
    site = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    assert run(str(home / "bin" / "jaxspec"), "--version").startswith("jaxspec 0.")
    assert "--speculative-config" in run(str(home / "bin" / "jaxspec"), "serve", "--help")
    assert run(str(python), "-c", SPEAK, str(TINY), JAX_PLATFORMS="cpu").strip() == "5"
