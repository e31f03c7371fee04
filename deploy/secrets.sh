#!/usr/bin/env bash
# Makes what compose.yaml expects beside it, once; running it again changes nothing that is there:
#   secrets/*.key        one key a file, mode 0400: the callers' keys, vLLM's own, Grafana's password
#   policy/policy.yaml   policy.template.yaml and the digests of those keys; yours to edit from then on
#   data/                records and Prometheus's samples
#   .env                 the user that the containers run as: you, or 10001 when you are root
# PLIMSOLL names the command: by default the one on the PATH, else ../.venv/bin/plimsoll. Without Python on this host:
#   docker build -f deploy/Dockerfile -t plimsoll:0.1.0 . && PLIMSOLL="docker run --rm plimsoll:0.1.0" deploy/secrets.sh
# An argument is the folder to work in, in place of the one of this script.
set -euo pipefail
umask 077
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${1:-$here}
policy=$target/policy/policy.yaml

command_line=${PLIMSOLL:-$(command -v plimsoll || true)}
read -ra plimsoll <<<"${command_line:-$here/../.venv/bin/plimsoll}"

uid=$(id -u) gid=$(id -g)
if [ "$uid" -eq 0 ]; then uid=10001 gid=10001; fi

# A file appears whole or not at all, so that an interrupted run can simply be repeated.
keep() { # keep PATH MODE <content
    cat >"$1.part"
    chmod "$2" "$1.part"
    mv "$1.part" "$1"
}

# One field of the JSON that `plimsoll keys new` prints; a key is letters, digits and hyphens, a tenant is a plain name.
field() { sed -n 's/.*"'"$1"'": "\([^"\\]*\)".*/\1/p'; }

new_key() { # new_key ID ROLE [TENANT]
    local file=$target/secrets/$1.key json key
    [ -s "$file" ] && return
    json=$("${plimsoll[@]}" keys new --json --id "$1" --role "$2" ${3:+--tenant "$3"})
    key=$(field key <<<"$json")
    [ -n "$key" ] || { echo "no key in the answer of: ${plimsoll[*]} keys new" >&2; exit 1; }
    keep "$file" 0400 <<<"$key"
    echo "made $file"
}

random_key() { # random_key ID
    local file=$target/secrets/$1.key
    [ -s "$file" ] && return
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' | keep "$file" 0400
    echo "made $file"
}

line() { # line ID ROLE [TENANT]: the key's entry in the policy
    local digest
    digest=$(tr -d '\n' <"$target/secrets/$1.key" | sha256sum | cut -d' ' -f1)
    echo "  - {id: $1, hash: \"sha256:$digest\", role: $2${3:+, tenant: $3}}"
}

keys=("acme-1 client acme" "operator operator" "scraper scraper" "prober prober")

mkdir -p "$target"/{secrets,policy,data/records,data/prometheus}
for key in "${keys[@]}"; do
    # shellcheck disable=SC2086  # the words of an entry are the arguments
    new_key $key
done
random_key vllm
random_key grafana

if [ ! -e "$policy" ]; then
    { cat "$here/policy.template.yaml"; echo "keys:"; for key in "${keys[@]}"; do line $key; done; } | keep "$policy" 0640
    echo "made $policy"
else
    for key in "${keys[@]}"; do
        digest=$(line $key | grep -o 'sha256:[0-9a-f]*')
        grep -q "$digest" "$policy" || echo "note: $policy does not name secrets/${key%% *}.key; for the key to work add: $(line $key)" >&2
    done
fi

if [ ! -e "$target/.env" ]; then
    keep "$target/.env" 0600 <<<"PLIMSOLL_UID=$uid
PLIMSOLL_GID=$gid"
    echo "made $target/.env"
fi
if [ "$(id -u)" -eq 0 ]; then
    chown -R "$uid:$gid" "$target"/{secrets,policy,data}
fi
