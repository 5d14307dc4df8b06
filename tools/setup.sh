#!/bin/sh
# Makes the course's environment: a .venv in the checkout with gpukern and the tested versions of its packages on it.
# usage: tools/setup.sh [PYTHON]
#
# .venv/ready names what it was made from. Where that is still true nothing is done; anything else is mended, and
# an environment whose first installation failed is removed, so that no later command trusts it.
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3}
venv=.venv
sources="$(pwd) $(cat pyproject.toml constraints.txt tools/setup.sh | cksum)"

fail() {
    printf '\nerror: %s\n' "$1" >&2
    exit 1
}

works() { "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; }

if works && [ "$(cat "$venv/ready" 2>/dev/null)" = "$sources" ]; then
    exit 0
fi
rm -f "$venv/ready"

if ! works; then
    command -v "$python" >/dev/null || fail "there is no '$python' here. Install Python 3.11 or newer \
(Debian: apt-get install python3 python3-venv), or name one: make setup PYTHON=/path/to/python3.12"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$("$python" --version 2>&1) is too old; \
the course needs Python 3.11 or newer. Name one: make setup PYTHON=/path/to/python3.12"
    "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python cannot make virtual environments. Install what \
it lacks (Debian: apt-get install python3-venv) and run the command again."
    trap 'rm -rf "$venv"' EXIT
    trap 'exit 1' HUP INT TERM
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || fail "$python could not make $venv (see above). Is this folder writable, and is \
there room on its disk?"
fi

echo "Installing the course and its packages into $venv; the first time this takes some minutes."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" ||
    fail "pip could not install the packages (see above). Check the network and the room on the disk, then run the \
command again. A package without a version for this Python: name another, make clean setup PYTHON=/path/to/python3.12"

# JupyterLab asks at its first start whether it may fetch news; a class of learners need not answer.
mkdir -p "$venv/etc/jupyter/labconfig"
echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}' \
    >"$venv/etc/jupyter/labconfig/default_setting_overrides.json"

trap - EXIT
echo "$sources" >"$venv/ready"
