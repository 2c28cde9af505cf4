# Sourced by the other scripts: puts a Python with everything installed in front of the PATH.
#   use_environment "$@"       .venv of the project, made and filled on first use; with --no-venv among the arguments the
#                              environment that is active. The other arguments are left in the array `arguments`.
# Installs again only when requirements.txt, setup.py or the Python changes. LLN_INSTALL_SECONDS says how long it took.

fail() { echo "error: $*" >&2; exit 1; }

# Runs a command that Ctrl-C and SIGTERM of this script end too.
run() {
    local code=0
    trap 'kill $(jobs -p) 2>/dev/null; echo interrupted >&2; exit 130' INT
    trap 'kill $(jobs -p) 2>/dev/null; echo interrupted >&2; exit 143' TERM
    "$@" &
    wait "$!" || code=$?
    trap - INT TERM
    return $code
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
    local name found=""
    for name in python3 python3.11 python3.12 python; do
        command -v "$name" >/dev/null || continue
        if supported "$name"; then echo "$name"; return; fi
        found+=" $name=$("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo broken)"
    done
    fail "Python 3.11 or 3.12 is needed (fairseq has wheels for these); on the PATH:${found:- none}"
}

use_environment() {
    local argument venv="" python start=$SECONDS stamp wanted clock code=0
    arguments=()
    for argument in "$@"; do
        if [ "$argument" = --no-venv ]; then venv=none; else arguments+=("$argument"); fi
    done
    if [ "$venv" = none ]; then
        python=$(command -v python3 || command -v python) || fail "no python on the PATH"
        supported "$python" || fail "Python 3.11 or 3.12 is needed, $python is $("$python" --version 2>&1)"
        stamp=$("$python" -c 'import sys; print(sys.prefix)')/.lln-fairseq-installed
    else
        if ! supported .venv/bin/python; then
            python=$(find_python) || exit 1
            echo "making .venv with $("$python" --version)"
            run "$python" -m venv --clear .venv || fail "cannot make .venv: is Python's venv module installed?"
        fi
        export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
        python=.venv/bin/python stamp=.venv/.lln-fairseq-installed
    fi
    wanted=$("$python" -c 'import hashlib, pathlib, sys
parts = [pathlib.Path(name).read_bytes() for name in ("requirements.txt", "setup.py")]
print(sys.version_info[:2], pathlib.Path.cwd(), hashlib.sha256(b"".join(parts)).hexdigest())')
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing the packages of requirements.txt (about a minute, more where torch brings CUDA)"
        while sleep 30 >/dev/null 2>&1; do echo "still installing, after $((SECONDS - start)) seconds"; done &
        clock=$!
        run "$python" -m pip install --quiet --disable-pip-version-check -r requirements.txt -e '.[test]' || code=$?
        { kill "$clock" && wait "$clock"; } 2>/dev/null || true
        [ "$code" = 0 ] || fail "installation failed, pip says why above"
        echo "$wanted" >"$stamp"
    fi
    export LLN_INSTALL_SECONDS=$((SECONDS - start))
}
