#!/usr/bin/env bash
# Makes a virtual environment: deploy/python-venv.sh PYTHON DIR. On a Debian machine it installs python3-venv when it may.
set -euo pipefail

python=${1:-} target=$2
if [ -z "$python" ]; then
    echo "Plimsoll needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2
    exit 1
fi
[ -x "$target/bin/python" ] && "$target/bin/python" -m pip --version >/dev/null 2>&1 && exit 0

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "$python has no venv module; on Debian: apt-get install python3-venv" >&2
        exit 1
    fi
    apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3-venv >&2
fi
rm -rf "$target"
"$python" -m venv "$target"
