"""The middleware inside a real Starlette application: who may ask, what is told, what is counted, what never leaves."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from gateway.evidence.attest import IdentityMiddleware
from gateway.evidence.canonical import digest
from gateway.evidence.identity import diff, parse_attested

KEY = "the-servers-own-key"
AUTH = {"authorization": f"Bearer {KEY}"}
HARDWARE = {"device": "none", "profile": "test bench"}
VERSIONS = {"vllm": "0.32.0"}


class Hold:
    """A route that answers when it is told to."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def endpoint(self, request):
        async def body():
            self.entered.set()
            yield b"first"
            await self.release.wait()
            yield b"last"

        return StreamingResponse(body())


async def _boom(request):
    raise RuntimeError("nobody handles this")


def make_config(model_dir, **overrides):
    """An object tree with vLLM's attribute names; `overrides` are dotted paths with __ for the dot."""
    root = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model_dir), tokenizer=str(model_dir), revision=None, dtype="bfloat16", quantization=None,
            max_model_len=2048, served_model_name="tiny", enforce_eager=True, hf_token="hf-secret",
            get_diff_sampling_param=lambda: {"top_p": 0.9},
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, enable_elastic_ep=False, _api_process_count=1,
            _api_process_rank=0, data_parallel_master_port=29500,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=2048, enable_chunked_prefill=True,
            policy="fcfs"),
        cache_config=SimpleNamespace(
            block_size=16, gpu_memory_utilization=0.92, cache_dtype="auto", enable_prefix_caching=True, num_gpu_blocks=4096,
            kv_cache_size_tokens=65536,
        ),
        speculative_config=None, lora_config=None, instance_id="abc",
    )  # fmt: skip
    for path, value in overrides.items():
        *groups, name = path.split("__")
        target = root
        for group in groups:
            target = getattr(target, group)
        setattr(target, name, value)
    return root


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "chat_template": "{{ messages }}"}
        )
    )
    return tmp_path


def make_app(config, *, api_key=(KEY,), routes=()):
    app = Starlette(
        routes=[Route("/health", lambda _: PlainTextResponse("ok")), Route("/boom", _boom, methods=["POST"]), *routes]
    )
    app.add_middleware(IdentityMiddleware, versions=VERSIONS, hardware=HARDWARE)
    app.state.vllm_config = config
    app.state.args = SimpleNamespace(api_key=list(api_key) if api_key else None, hf_token="hf-secret", chat_template=None)
    return app


def client_of(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://vllm")


async def identity(app):
    async with client_of(app) as client:
        response = await client.get("/plimsoll/identity", headers=AUTH)
    assert response.status_code == 200
    return parse_attested(response.content)


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": "Basic " + KEY}, {"x-api-key": KEY}],
)
@pytest.mark.parametrize("path", ["/plimsoll/identity", "/plimsoll/tokenizer"])
async def test_without_the_servers_key_nothing_is_told(model_dir, headers, path):
    async with client_of(make_app(make_config(model_dir))) as client:
        response = await client.get(path, headers=headers)
    assert response.status_code == 401
    assert "configuration" not in response.text


async def test_two_authorization_headers_are_no_authorization(model_dir):
    async with client_of(make_app(make_config(model_dir))) as client:
        response = await client.get(
            "/plimsoll/identity", headers=[("authorization", "Bearer x"), ("authorization", f"Bearer {KEY}")]
        )
    assert response.status_code == 401


async def test_any_of_several_keys_opens(model_dir):
    async with client_of(make_app(make_config(model_dir), api_key=("other", KEY))) as client:
        assert (await client.get("/plimsoll/identity", headers=AUTH)).status_code == 200


async def test_the_key_may_come_from_the_environment(model_dir, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    async with client_of(make_app(make_config(model_dir), api_key=None)) as client:
        assert (await client.get("/plimsoll/identity")).status_code == 401
        assert (await client.get("/plimsoll/identity", headers=AUTH)).status_code == 200


async def test_a_server_without_a_key_is_open_and_says_so(model_dir, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    async with client_of(make_app(make_config(model_dir), api_key=None)) as client:
        response = await client.get("/plimsoll/identity")
    assert parse_attested(response.content).api_key_required is False


async def test_the_document_hashes_to_what_the_header_says_on_every_response(model_dir):
    stream = Hold()
    app = make_app(make_config(model_dir), routes=[Route("/v1/completions", stream.endpoint, methods=["POST"])])
    stream.release.set()
    async with client_of(app) as client:
        told = (await client.get("/plimsoll/identity", headers=AUTH)).json()
        responses = [
            await client.get("/health"),
            await client.get("/nothing-here"),
            await client.post("/boom"),
            await client.get("/plimsoll/identity"),
            await client.post("/plimsoll/identity", headers=AUTH),
            await client.get("/plimsoll/tokenizer", headers=AUTH),
            await client.post("/v1/completions"),
        ]
    assert [r.status_code for r in responses] == [200, 404, 500, 401, 405, 200, 200]
    expected = digest(told["configuration"])
    assert told["server_configuration_hash"] == expected
    for response in responses:
        assert response.headers.get_list("x-plimsoll-config") == [expected]


async def test_before_the_engine_is_there_no_hash_is_claimed(model_dir):
    app = make_app(None)
    async with client_of(app) as client:
        response = await client.get("/plimsoll/identity", headers=AUTH)
        assert response.status_code == 503
        assert "x-plimsoll-config" not in response.headers
        app.state.vllm_config = make_config(model_dir)
        assert (await client.get("/plimsoll/identity", headers=AUTH)).status_code == 200


async def test_keys_and_tokens_stay_in_the_process(model_dir, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "environment-secret")
    monkeypatch.setenv("HF_TOKEN", "environment-secret")
    async with client_of(make_app(make_config(model_dir))) as client:
        text = (await client.get("/plimsoll/identity", headers=AUTH)).text + (
            await client.get("/plimsoll/tokenizer", headers=AUTH)
        ).text
    assert KEY not in text and "secret" not in text


async def test_the_same_configuration_has_the_same_hash_and_another_start_id(model_dir):
    one, two = await identity(make_app(make_config(model_dir))), await identity(make_app(make_config(model_dir)))
    assert one.hash == two.hash
    assert one.engine_start_id != two.engine_start_id


async def test_the_api_processes_of_one_engine_share_its_start_id(model_dir):
    one, two = [await identity(make_app(make_config(model_dir, parallel_config___api_process_count=2))) for _ in range(2)]
    assert one.engine_start_id is not None
    assert one.engine_start_id == two.engine_start_id
    assert one.api_processes == 2


async def test_server_arguments_that_change_a_prompt_or_its_cost_change_the_hash(model_dir):
    base = await identity(make_app(make_config(model_dir)))
    app = make_app(make_config(model_dir))
    app.state.args.tool_call_parser = "hermes"
    changed = await identity(app)
    assert [change.field for change in diff(base.document, changed.document)] == ["serving.tool_call_parser"]


async def test_another_adapter_or_draft_model_changes_the_hash(model_dir, tmp_path_factory):
    other = tmp_path_factory.mktemp("adapter")
    app = make_app(make_config(model_dir, speculative_config=SimpleNamespace(model=str(other), method="draft")))
    app.state.args.lora_modules = [SimpleNamespace(name="style", path=str(other))]
    hashes = []
    for content in ("{}", '{"r": 8}'):
        (other / "adapter_config.json").write_text(content)
        (other / "config.json").write_text(content)
        app.middleware_stack = None  # a new start: the document is made once
        hashes.append((await identity(app)).document)
    changed = [change.field for change in diff(*hashes)]
    assert changed == ["lora.adapters", "speculation.files.config.json"]


OUTSIDE = {
    "parallel_config__data_parallel_master_port": 31111,
    "parallel_config___api_process_rank": 3,
    "cache_config__num_gpu_blocks": 17,
    "cache_config__kv_cache_size_tokens": 1234,
    "model_config__served_model_name": "alias",
    "instance_id": "zzz",
}
INSIDE = {
    "scheduler_config__max_num_seqs": ("scheduler.max_num_seqs", 8),
    "scheduler_config__max_num_batched_tokens": ("scheduler.max_num_batched_tokens", 512),
    "scheduler_config__policy": ("scheduler.policy", "priority"),
    "scheduler_config__enable_chunked_prefill": ("scheduler.enable_chunked_prefill", False),
    "model_config__max_model_len": ("model.max_model_len", 4096),
    "model_config__dtype": ("model.dtype", "float16"),
    "model_config__quantization": ("model.quantization", "fp8"),
    "cache_config__gpu_memory_utilization": ("cache.gpu_memory_utilization", 0.5),
    "cache_config__enable_prefix_caching": ("cache.enable_prefix_caching", False),
    "parallel_config__tensor_parallel_size": ("parallelism.tensor_parallel_size", 2),
    "parallel_config___api_process_count": ("parallelism.api_processes", 4),
    "model_config__enforce_eager": ("compilation.enforce_eager", False),
}


@pytest.mark.parametrize("path", OUTSIDE)
async def test_what_does_not_shape_capacity_stays_out_of_the_hash(model_dir, path):
    base = await identity(make_app(make_config(model_dir)))
    assert (await identity(make_app(make_config(model_dir, **{path: OUTSIDE[path]})))).hash == base.hash


@pytest.mark.parametrize("path", INSIDE)
async def test_each_knob_that_shapes_capacity_changes_the_hash_and_is_named(model_dir, path):
    field, value = INSIDE[path]
    base = await identity(make_app(make_config(model_dir)))
    changed = await identity(make_app(make_config(model_dir, **{path: value})))
    assert changed.hash != base.hash
    assert [change.field for change in diff(base.document, changed.document)] == [field]


async def test_an_environment_variable_that_shapes_capacity_changes_the_hash(model_dir, monkeypatch):
    base = await identity(make_app(make_config(model_dir)))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    changed = await identity(make_app(make_config(model_dir)))
    assert "environment.VLLM_CPU_KVCACHE_SPACE" in [change.field for change in diff(base.document, changed.document)]


async def test_other_files_are_another_revision(model_dir):
    base = await identity(make_app(make_config(model_dir)))
    (model_dir / "tokenizer.json").write_text('{"model": {"other": 1}}')
    changed = await identity(make_app(make_config(model_dir)))
    assert base.identity.model_revision is not None
    assert changed.identity.model_revision not in (None, base.identity.model_revision)


async def test_a_resolved_commit_is_the_revision(tmp_path):
    class Revision(str):
        resolved = "c0ffee"

    config = make_config("org/model", model_config__revision=Revision("main"))
    assert (await identity(make_app(config))).identity.model_revision == "c0ffee"


async def test_what_this_vllm_does_not_have_is_unknown_never_a_default(model_dir):
    config = make_config(model_dir)
    del config.scheduler_config.policy
    seen = await identity(make_app(config))
    assert "scheduler.policy" in seen.unknown
    assert seen.document["speculation"]["method"] is None  # not configured is known


async def test_a_topology_that_may_change_at_run_time_is_unknown(model_dir):
    seen = await identity(make_app(make_config(model_dir, parallel_config__enable_elastic_ep=True)))
    assert "parallelism.data_parallel_size" in seen.unknown


async def _counts(client):
    runtime = (await client.get("/plimsoll/identity", headers=AUTH)).json()["runtime"]
    return runtime["foreign_in_flight"], runtime["gateway_in_flight"]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({**AUTH, "x-plimsoll-gateway": "gw-1"}, (0, {"gw-1": 1})),
        (AUTH, (1, {})),
        ({"x-plimsoll-gateway": "gw-1"}, (1, {})),  # the mark without the server's key is nobody's
        ({**AUTH, "x-plimsoll-gateway": "x" * 65}, (1, {})),
        ({**AUTH, "x-plimsoll-gateway": ""}, (1, {})),
    ],
)
async def test_requests_in_flight_are_counted_by_whose_they_are(model_dir, headers, expected):
    hold = Hold()
    app = make_app(make_config(model_dir), routes=[Route("/v1/completions", hold.endpoint, methods=["POST"])])
    async with client_of(app) as client:
        running = asyncio.create_task(client.post("/v1/completions", headers=headers))
        await hold.entered.wait()
        assert await _counts(client) == expected
        hold.release.set()
        await running
        assert await _counts(client) == (0, {})


async def test_a_cancelled_request_stops_counting(model_dir):
    hold = Hold()
    app = make_app(make_config(model_dir), routes=[Route("/v1/completions", hold.endpoint, methods=["POST"])])
    async with client_of(app) as client:
        running = asyncio.create_task(client.post("/v1/completions"))
        await hold.entered.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await _counts(client) == (0, {})


async def test_health_and_metrics_are_not_requests_in_flight(model_dir):
    hold = Hold()
    app = make_app(
        make_config(model_dir), routes=[Route("/metrics", hold.endpoint), Route("/tokenize", hold.endpoint, methods=["POST"])]
    )
    async with client_of(app) as client:
        running = [asyncio.create_task(client.get("/metrics")), asyncio.create_task(client.post("/tokenize"))]
        await hold.entered.wait()
        assert await _counts(client) == (0, {})
        hold.release.set()
        await asyncio.gather(*running)


async def test_a_websocket_is_foreign_work_and_other_scopes_pass_through(model_dir):
    seen = []

    async def inner(scope, receive, send):
        seen.append(scope["type"])
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept", "headers": []})
            seen.append((await _identity_runtime(middleware, scope["app"]))["foreign_in_flight"])

    sent = []

    async def send(message):
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(vllm_config=make_config(model_dir), args=SimpleNamespace(api_key=[KEY])))
    middleware = IdentityMiddleware(inner, versions=VERSIONS, hardware=HARDWARE)
    await middleware({"type": "lifespan", "app": app}, None, send)
    await middleware({"type": "websocket", "path": "/v1/realtime", "headers": [], "app": app}, None, send)
    assert seen == ["lifespan", "websocket", 1]
    assert [name for name, _ in sent[0]["headers"]] == [b"x-plimsoll-config"]
    assert (await _identity_runtime(middleware, app))["foreign_in_flight"] == 0


async def _identity_runtime(middleware, app):
    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    await middleware({"type": "http", "method": "GET", "path": "/plimsoll/identity", "headers": headers, "app": app}, None, send)
    return json.loads(sent[1]["body"])["runtime"]


async def test_the_tokenizer_is_handed_out_with_what_a_prompt_needs(model_dir):
    async with client_of(make_app(make_config(model_dir))) as client:
        bundle = (await client.get("/plimsoll/tokenizer", headers=AUTH)).json()
    assert bundle == {
        "tokenizer": '{"model": {}}',
        "chat_template": "{{ messages }}",
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "flags": {"add_bos_token": True},
        "chat_template_kwargs": {},
    }


async def test_a_template_given_to_the_server_wins(model_dir):
    given = model_dir / "given.jinja"
    given.write_text("{{ 'given' }}")
    app = make_app(make_config(model_dir))
    app.state.args.chat_template = str(given)
    plain = await identity(make_app(make_config(model_dir)))
    async with client_of(app) as client:
        assert (await client.get("/plimsoll/tokenizer", headers=AUTH)).json()["chat_template"] == "{{ 'given' }}"
    assert (await identity(app)).hash != plain.hash


def test_weights_are_told_apart_by_header_and_by_data(tmp_path):
    from gateway.evidence.model_files import weights_digest

    header = json.dumps({"w": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}}).encode()

    def write(data):
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        return weights_digest(tmp_path)

    assert weights_digest(tmp_path) is None
    first = write(b"\0" * 4096)
    assert first == write(b"\0" * 4096)
    assert first != write(b"\0" * 4095 + b"\1")
