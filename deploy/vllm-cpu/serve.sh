#!/usr/bin/env bash
# Starts the real vLLM on a CPU with a tiny model without weights, with Plimsoll's identity middleware in front.
#
#   VLLM_API_KEY=... deploy/vllm-cpu/serve.sh --port 8000 [any flag of `vllm serve`]
#
# MODEL picks another directory (default: the tiny model that setup.sh wrote), VLLM_CPU_KVCACHE_SPACE the cache in GiB.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${PLIMSOLL_CACHE:-$HOME/.cache/plimsoll}
venv=$cache/vllm-0.32.0
[ -f "$venv/.done" ] || {
    echo "run $here/setup.sh first" >&2
    exit 1
}
export PATH=$venv/bin:$PATH
export PYTHONPATH=$(cd "$here/../.." && pwd)
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
exec "$venv/bin/vllm" serve "${MODEL:-$cache/models/none}" --served-model-name tiny --load-format dummy --enforce-eager \
    --max-model-len 2048 --max-num-seqs 16 --host 127.0.0.1 \
    --middleware gateway.evidence.attest.IdentityMiddleware "$@"
