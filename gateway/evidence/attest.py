"""The vLLM side of the evidence: `vllm serve … --middleware gateway.evidence.attest.IdentityMiddleware`.

Owns: GET /plimsoll/identity, GET /plimsoll/tokenizer, the `x-plimsoll-config` header on every response, and the count of
requests in flight, split into those that carry a gateway's mark and those that do not.
Promises: standard library only, so it imports in any vLLM environment; answers under the server's own API key, compared in
constant time; never hands out a secret; the document and its hash are made once, for vLLM's configuration does not change
while the process lives (LoRA adapters loaded later are listed beside the document; elastic scaling makes the topology unknown).
Talks to: `app.state.vllm_config`, `app.state.args` and the model's files, through `effective`, `host` and `model_files`.
"""

import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from gateway.evidence import effective, host, model_files
from gateway.evidence.plain_json import Json, digest

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

IDENTITY_SCHEMA = "plimsoll-identity/v1"
IDENTITY_PATH = "/plimsoll/identity"
TOKENIZER_PATH = "/plimsoll/tokenizer"
CONFIG_HEADER = b"x-plimsoll-config"
GATEWAY_HEADER = b"x-plimsoll-gateway"
MAX_GATEWAYS = 256
MAX_GATEWAY_ID_BYTES = 64

# POST routes that put work on the engine. Everything else (health, metrics, tokenizing) is not "in flight".
GENERATION_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/invocations",
        "/generative_scoring",
        "/inference/v1/generate",
        "/cohere/v2/chat",
        "/v1/systemone",
    }
)


class IdentityMiddleware:
    """Pure ASGI middleware. vLLM builds it with `app` alone; a stand-in server may pass its own versions and hardware."""

    def __init__(
        self, app: App, *, versions: Mapping[str, Json] | None = None, hardware: Mapping[str, Json] | None = None
    ) -> None:
        self._app = app
        self._versions = versions
        self._hardware = hardware
        self._start_id: str | None = None
        self._started_at = time.time()
        self._document: dict[str, Json] | None = None
        self._hash: bytes | None = None
        self._foreign = 0
        self._gateways: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve our two paths; pass everything else on, with the header added and the work counted."""
        state = getattr(scope.get("app"), "state", None)
        self._learn(state)
        if scope["type"] == "http":
            await self._http(scope, receive, send, state)
        elif scope["type"] == "websocket":
            await self._counted(scope, receive, send, state)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send, state: object) -> None:
        path = _path(scope)
        if path in (IDENTITY_PATH, TOKENIZER_PATH):
            await self._own(path, scope, send, state)
        elif scope["method"] == "POST" and path in GENERATION_PATHS:
            await self._counted(scope, receive, send, state)
        else:
            await self._forward(scope, receive, send)

    async def _own(self, path: str, scope: Scope, send: Send, state: object) -> None:
        if not authorised(scope, server_keys(state)):
            await self._answer(send, 401, {"error": "Unauthorized"})
        elif scope["method"] != "GET":
            await self._answer(send, 405, {"error": "Method Not Allowed"}, [(b"allow", b"GET")])
        elif self._document is None or state is None:
            await self._answer(send, 503, {"error": "the engine's configuration is not there yet"})
        elif path == IDENTITY_PATH:
            await self._answer(send, 200, self._identity(state, self._document))
        else:
            await self._answer(send, 200, _tokenizer(state))

    async def _counted(self, scope: Scope, receive: Receive, send: Send, state: object) -> None:
        """Forward, and count the request for as long as its response lasts."""
        gateway = self._mark(scope, state)
        if gateway is None:
            self._foreign += 1
        else:
            self._gateways[gateway] += 1
        try:
            await self._forward(scope, receive, send)
        finally:
            if gateway is None:
                self._foreign -= 1
            else:
                self._gateways[gateway] -= 1
                if not self._gateways[gateway]:
                    del self._gateways[gateway]

    def _mark(self, scope: Scope, state: object) -> str | None:
        """The gateway's instance id, if the request has a usable one and the server's key; None makes it foreign."""
        value = _header(scope, GATEWAY_HEADER)
        if value is None or not 0 < len(value) <= MAX_GATEWAY_ID_BYTES or not authorised(scope, server_keys(state)):
            return None
        gateway = value.decode("latin-1")
        known = gateway in self._gateways or len(self._gateways) < MAX_GATEWAYS
        return gateway if known and gateway.isascii() and gateway.isprintable() else None

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the header on the response. An exception that nobody answered becomes a 500 that has it too."""
        started = False

        async def marked(message: Message) -> None:
            nonlocal started
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *self._config_header()]}
            elif message["type"] == "websocket.accept":
                message = {**message, "headers": [*message.get("headers", ()), *self._config_header()]}
            await send(message)

        try:
            await self._app(scope, receive, marked)
        except Exception:
            if scope["type"] == "http" and not started:
                await self._answer(send, 500, _SERVER_ERROR)
            raise

    async def _answer(self, send: Send, status: int, body: Json, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw)), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": status, "headers": [*lines, *headers, *self._config_header()]})
        await send({"type": "http.response.body", "body": raw})

    def _config_header(self) -> list[tuple[bytes, bytes]]:
        return [(CONFIG_HEADER, self._hash)] if self._hash is not None else []

    def _learn(self, state: object) -> None:
        """Make the document, once, as soon as the server has its configuration."""
        vllm_config = getattr(state, "vllm_config", None)
        if self._document is not None or vllm_config is None:
            return
        versions = self._versions if self._versions is not None else host.read_versions()
        hardware = self._hardware if self._hardware is not None else host.read_hardware(effective.device_count(vllm_config))
        document = effective.configuration(vllm_config, getattr(state, "args", None), versions, hardware)
        self._start_id = host.engine_start_id(effective.api_processes(vllm_config))
        self._document, self._hash = document, digest(document).encode("ascii")

    def _identity(self, state: object, document: dict[str, Json]) -> dict[str, Json]:
        fields = effective.identity_fields(document)
        return {
            "schema": IDENTITY_SCHEMA,
            "server_configuration_hash": fields["server_configuration_hash"],
            "identity": fields,
            "configuration": document,
            "capabilities": effective.capabilities(getattr(state, "vllm_config", None)),
            "runtime": {
                "engine_start_id": self._start_id,
                "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_at)),
                "api_key_required": bool(server_keys(state)),
                "foreign_in_flight": self._foreign,
                "gateway_in_flight": dict(self._gateways),
                **effective.runtime_facts(state),
            },
        }


_SERVER_ERROR: dict[str, Json] = {
    "error": {"message": "Internal Server Error", "type": "InternalServerError", "param": None, "code": 500}
}


def server_keys(state: object) -> list[str]:
    """The keys vLLM itself accepts: `--api-key` (one or more), else VLLM_API_KEY. Empty when it asks for none."""
    given = getattr(getattr(state, "args", None), "api_key", None)
    keys = [given] if isinstance(given, str) else list(given or ())
    return [key for key in (keys or [os.environ.get("VLLM_API_KEY")]) if key]


def authorised(scope: Scope, keys: list[str]) -> bool:
    """Whether the request bears one of `keys`; every key is compared, in constant time. True when there are none."""
    if not keys:
        return True
    scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        return False
    shown = hashlib.sha256(token).digest()
    matches = [secrets.compare_digest(shown, hashlib.sha256(key.encode("utf-8")).digest()) for key in keys]
    return any(matches)


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header that occurs exactly once; None when it is absent or repeated."""
    values = [value for key, value in scope.get("headers", ()) if key.lower() == name]
    return bytes(values[0]) if len(values) == 1 else None


def _path(scope: Scope) -> str:
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    return path.removeprefix(root) if root else path


def _tokenizer(state: object) -> dict[str, Json]:
    directory = effective.tokenizer_directory_of(getattr(state, "vllm_config", None))
    args = getattr(state, "args", None)
    bundle = model_files.tokenizer_bundle(directory, effective.given_template(args))
    return {**bundle, "chat_template_kwargs": effective.plain(getattr(args, "default_chat_template_kwargs", None) or {})}
