# Sourced by other scripts: puts a Python with all required packages first in the PATH.
#   use_environment "$@"       uses the project's .venv, which it creates and fills on first use; with --no-venv among the
#                              arguments it uses the active environment. It leaves the remaining arguments in the array
#                              `arguments`.
# Packages are installed again only if requirements.txt, setup.py or the version of Python changes. LLN_INSTALL_SECONDS
# is the time that the installation took.

fail() { echo "error: $*" >&2; exit 1; }

# Runs a command that ends when this script receives Ctrl-C or SIGTERM.
run() {
    local code=0
    trap 'kill $(jobs -p) 2>/dev/null; echo interrupted >&2; exit 130' INT
    trap 'kill $(jobs -p) 2>/dev/null; echo interrupted >&2; exit 143' TERM
    "$@" &
    wait "$!" || code=$?
    trap - INT TERM
    return $code
}

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

# Prints the name of a supported Python on the PATH.
find_python() {
    local name unsupported=""
    for name in python3 python3.11 python3.12 python; do
        command -v "$name" >/dev/null || continue
        if is_supported "$name"; then echo "$name"; return; fi
        unsupported+=" $name=$("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo broken)"
    done
    fail "Python 3.11 or 3.12 is needed (fairseq has wheels for these); on the PATH:${unsupported:- none}"
}

use_environment() {
    local argument venv="" python start=$SECONDS stamp fingerprint timer code=0
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "x86-64 Linux is needed (fairseq has wheels for it alone), this is $(uname -sm)"
    arguments=()
    for argument in "$@"; do
        if [ "$argument" = --no-venv ]; then venv=none; else arguments+=("$argument"); fi
    done
    if [ "$venv" = none ]; then
        python=$(command -v python3 || command -v python) || fail "no python on the PATH"
        is_supported "$python" || fail "Python 3.11 or 3.12 is needed, $python is $("$python" --version 2>&1)"
        stamp=$("$python" -c 'import sys; print(sys.prefix)')/.lln-fairseq-installed
    else
        if ! is_supported .venv/bin/python; then
            python=$(find_python) || exit 1
            echo "creating .venv with $("$python" --version)"
            run "$python" -m venv --clear .venv || {
                rm -rf .venv # it may have a Python without pip
                fail "cannot create .venv: is Python's venv module installed?"
            }
        fi
        export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
        python=.venv/bin/python
        stamp=.venv/.lln-fairseq-installed
    fi
    fingerprint=$("$python" -c 'import hashlib, pathlib, sys
parts = [pathlib.Path(name).read_bytes() for name in ("requirements.txt", "setup.py")]
print(sys.version_info[:2], pathlib.Path.cwd(), hashlib.sha256(b"".join(parts)).hexdigest())')
    if [ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ]; then
        "$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip: remove .venv if it is from an interrupted installation"
        echo "installing the packages of requirements.txt (about a minute, longer if torch includes CUDA)"
        while sleep 30 >/dev/null 2>&1; do echo "still installing, after $((SECONDS - start)) seconds"; done &
        timer=$!
        # Python compiles modules when they are first imported. Compiling all of torch's would take half a minute.
        run "$python" -m pip install --no-compile --quiet --disable-pip-version-check -r requirements.txt -e '.[test]' || code=$?
        { kill "$timer" && wait "$timer"; } 2>/dev/null || true
        [ "$code" = 0 ] || fail "the installation failed, see the message of pip above"
        # Compiling fairseq prints warnings about its syntax, which would otherwise appear in the first run.
        "$python" -W ignore -m compileall -q "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/fairseq
        echo "$fingerprint" >"$stamp"
    fi
    export LLN_INSTALL_SECONDS=$((SECONDS - start))
}
