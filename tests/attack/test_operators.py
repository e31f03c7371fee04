"""The operators' listener: what is done there is written down, and what may not be done there leaves a trace too."""

from __future__ import annotations

import copy
import json

import httpx
import pytest

from gateway.changes import of_policy, without_credentials
from gateway.edge.admin import admin_app
from gateway.edge.shell import Rules
from gateway.evidence import signing
from gateway.evidence.lab import record_for
from gateway.evidence.record import dump, record_id, validate
from gateway.observe.audit import AuditLog
from tests.edge_local.world import World
from tests.support.client import within
from tests.support.gateway import KEYS, configuration_of, hash_of
from tests.support.raw import dial, request, say, stranger


async def audit(gateway) -> list[dict]:
    got = await say(gateway.admin_port, request("GET", "/admin/audit", key=KEYS["operator"]))
    return got.json()["entries"]


def a_record(gateway, width: int):
    """A record of backend a that is not in the store yet."""
    raw = record_for(configuration_of("a", gateway.backends["a"]), 64, 8, width)
    return validate(raw)


async def test_a_change_of_the_file_is_audited_with_before_and_after(fort):
    gateway = fort.gateway
    document = copy.deepcopy(gateway.policy())
    document["keys"] = [key for key in document["keys"] if key["id"] != "prober"]
    document["tenants"]["other"]["requests_per_minute"] = 7
    await gateway.reload_document(document)

    async def told(name: str) -> bool:
        return any(name in json.dumps([each["before"], each["after"]]) for each in await audit(gateway))

    await within(5, lambda: told("keys.prober.role"), "the revoked key is in the audit log")
    entry = next(each for each in await audit(gateway) if "keys.prober.role" in (each["before"] or ()))
    assert entry["who"] in ("signal", "file") and entry["what"] == "policy reload" and entry["result"] == "done"
    assert entry["before"]["keys.prober.role"] == "prober" and "keys.prober.role" not in entry["after"]
    assert entry["before"]["tenants.other.requests_per_minute"] is None
    assert entry["after"]["tenants.other.requests_per_minute"] == 7
    assert hash_of(KEYS["prober"]) not in json.dumps(entry), "a digest is told by its start alone"

    gateway.write({"models": "nonsense"})
    await within(5, lambda: told("policy_error"), "a refused file is in the audit log")
    entry = next(each for each in await audit(gateway) if "policy_error" in (each["after"] or ()))
    assert (entry["who"], entry["result"]) == ("file", "refused: invalid_body")
    await gateway.reload_document(gateway.policy())
    await within(5, lambda: told('"keys.prober.role": "prober"'), "the key that came back is in the audit log")


async def test_an_operator_who_reloads_is_named_with_what_that_changed(fort):
    gateway = fort.gateway
    document = copy.deepcopy(gateway.policy())
    document["timeouts"]["stall_s"] = 1.5
    gateway.write(document)
    got = await say(gateway.admin_port, request("POST", "/admin/reload", key=KEYS["operator"]))
    assert got.status == 200

    async def told() -> bool:  # by the operator, unless the file was looked at in between
        return any((each["after"] or {}).get("timeouts.stall_s") == 1.5 for each in await audit(gateway))

    await within(5, told, "the change is in the audit log")
    assert (await audit(gateway))[0]["who"] in ("operator", "file")
    await gateway.reload_document(gateway.policy())


async def test_a_record_that_comes_or_goes_is_audited(fort):
    gateway = fort.gateway
    record = a_record(gateway, 2)
    path = gateway.folder / "records" / f"{record_id(record)}.json"
    path.write_bytes(dump(record))

    async def told(where: str, list_name: str) -> bool:
        entries = [each for each in await audit(gateway) if each["what"] == "records"]
        return any(path.name in (each[where] or {}).get(list_name, ()) for each in entries)

    await within(5, lambda: told("after", "came"), "the record that came")
    path.unlink()
    await within(5, lambda: told("before", "gone"), "the record that went")


async def test_a_pushed_record_brings_its_signatures_and_no_other(fort):
    gateway = fort.gateway
    record = a_record(gateway, 3)
    pem, public = signing.new_key()
    good = signing.written(signing.sign(record, pem))
    other = signing.written(signing.sign(a_record(gateway, 4), pem))
    for line in ("x", "ed25519:00 11", good + "0"):
        got = await say(
            gateway.admin_port,
            request("POST", "/admin/records", f"x-plimsoll-signature: {line}", key=KEYS["operator"], body=dump(record)),
        )
        assert got.status == 400, (line, got)
    lines = [f"x-plimsoll-signature: {each}" for each in (good, other)]
    got = await say(gateway.admin_port, request("POST", "/admin/records", *lines, key=KEYS["operator"], body=dump(record)))
    assert got.status in (200, 201), got
    beside = gateway.folder / "records" / f"{record_id(record)}.sig.json"
    kept = json.loads(beside.read_bytes())["signatures"]
    assert [each["public_key"] for each in kept] == [public], "a signature that does not hold is not kept"
    beside.unlink()
    (gateway.folder / "records" / f"{record_id(record)}.json").unlink()


@pytest.mark.parametrize(("host", "wanted"), [("127.0.0.1", False), ("[::1]", False), ("10.1.2.3", True), ("ops.example", True)])
async def test_a_record_over_another_address_than_loopback_must_be_signed(host, wanted, tmp_path):
    world = World()
    app = admin_app(world, lambda: Rules(world.keys), world.account, AuditLog(tmp_path / "audit"), lambda: 1.7e9)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=f"http://{host}") as client:
        headers = [("authorization", f"Bearer {world.tokens['ops']}"), ("x-plimsoll-signature", "a b")]
        assert (await client.post("/admin/records", content=b"{}", headers=headers)).status_code == 201
        many = [*headers, *[("x-plimsoll-signature", "a b")] * 20]
        assert (await client.post("/admin/records", content=b"{}", headers=many)).status_code == 400
    assert world.pushed == [(b"{}", ("a b",), wanted)]


async def test_a_key_of_another_role_that_knocks_is_in_the_journal(fort):
    port = fort.gateway.admin_port
    for who in ("scraper", "prober", "client"):
        got = await say(port, request("POST", "/admin/backends/a/drain", key=KEYS[who]))
        assert got.status == 403
        row = await fort.gateway.account(got.fields["x-request-id"])
        assert (row["key"], row["reason"], row["status"]) == (who, "not_permitted", 403), row


async def test_guesses_are_limited_whether_or_not_their_body_comes(fort):
    """Without a body's end the head alone is judged, on the operators' listener as on the public one."""
    for port, path in ((fort.gateway.admin_port, "/admin/reload"), (fort.port, "/v1/chat/completions")):
        source, statuses = stranger(), []
        for number in range(320):
            async with dial(port, source) as client:
                await client.send(b"POST %b HTTP/1.1\r\nhost: g\r\nauthorization: Bearer sk-%d\r\ncontent-length: 9\r\n\r\n"
                                  % (path.encode(), number))  # fmt: skip
                statuses.append((await client.response()).status)
        assert set(statuses[:250]) == {401} and 429 in statuses[250:], statuses
        good = await say(fort.gateway.admin_port, request("GET", "/admin/status", key=KEYS["operator"]), source=source)
        assert good.status == 200, "a good key passes from there all the same"


async def test_what_is_told_of_a_policy_holds_no_credential():
    from tests.edge_path.site import policy_for

    old, new = policy_for(1), policy_for(2)
    new = new.model_copy(update={"state": new.state.model_copy(update={"url": "rediss://user:hunter2@r.example:6379/0"})})
    changed = of_policy(old, new)
    assert changed.after["state.url"] == "rediss://r.example:6379/0" and changed.before["state.url"] == "memory"
    assert changed.after["backends.a.url"] == "http://127.0.0.1:2"
    assert "hunter2" not in without_credentials(str(new.state))
