"""One request as it arrives, before anything is known of it but bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.edge.keys import KeyRing, Principal
    from gateway.edge.routes import Route
    from gateway.edge.rules import PathRules

_ONCE = (b"host", b"content-type", b"content-encoding", b"content-length", b"transfer-encoding")


class Incoming:
    """Head and body of one request. `received_at`: monotonic seconds of its first byte.

    `fields` holds the last value of each header (names in lower case); `headers` all of them in order. `route` and
    `principal` are set once the request has been screened; `cleared` are the rules under which any request with this very
    head passes, None where each must be looked at.
    """

    __slots__ = (
        "body", "cleared", "expects_continue", "fields", "head_done", "headers", "http_1_0", "keep_alive", "method", "principal",
        "received_at", "route", "screened", "size", "target", "whole",
    )  # fmt: skip

    def __init__(self, received_at: float) -> None:
        self.received_at = received_at
        self.method = b""
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.fields: dict[bytes, bytes] = {}
        self.body: list[bytes | bytearray] = []
        self.size = 0
        self.keep_alive = False
        self.http_1_0 = False
        self.expects_continue = False
        self.head_done = self.whole = self.screened = False
        self.route: Route | None = None
        self.principal: Principal | None = None
        self.cleared: PathRules | None = None

    def again(self, received_at: float, body: bytes) -> Incoming:
        """Another whole request that came with the same head, byte for byte. Its own screening is still to come."""
        new = Incoming(received_at)
        new.method, new.target, new.headers, new.fields = self.method, self.target, self.headers, self.fields
        new.keep_alive, new.http_1_0, new.expects_continue = self.keep_alive, self.http_1_0, self.expects_continue
        new.route, new.principal, new.cleared = self.route, self.principal, self.cleared
        new.body = [body]
        new.size = len(body)
        new.head_done = new.whole = True
        return new

    @property
    def path(self) -> bytes:
        """The raw path: the target without its query."""
        return self.target.partition(b"?")[0]

    @property
    def websocket(self) -> bool:
        """Whether it asks for a WebSocket, be it among other things."""
        return any(b"websocket" in value.lower() for name, value in self.headers if name == b"upgrade")

    def repeats(self) -> bool:
        """Whether a header stands twice of which there can only be one."""
        if len(self.fields) == len(self.headers):
            return False
        names = [name for name, _ in self.headers]
        return any(names.count(name) > 1 for name in _ONCE)

    def head_size(self) -> int:
        """Bytes of target, names and values, with what HTTP puts between them."""
        return len(self.target) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def take_body(self) -> bytes:
        """The whole body; the pieces are let go."""
        pieces, self.body = self.body, []
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)


class Known:
    """The caller of a connection, remembered: a connection that shows the same bytes again is not looked up again.

    A key that can expire is looked up each time, and a new ring (the policy was reloaded) forgets whom the old one knew.
    """

    __slots__ = ("_authorization", "_principal", "_ring")

    def __init__(self) -> None:
        self._ring: KeyRing | None = None
        self._authorization: bytes | None = None
        self._principal: Principal | None = None

    def principal(self, ring: KeyRing, incoming: Incoming) -> Principal | None:
        """Whose key the request bears; None for every way of not being known."""
        fields = incoming.fields
        authorization = fields.get(b"authorization")
        if len(fields) != len(incoming.headers) or b"x-api-key" in fields or b"api-key" in fields:
            return ring.identify(incoming.headers)
        if ring is self._ring and authorization == self._authorization:
            return self._principal
        principal = ring.identify(incoming.headers)
        if principal is not None and principal.expires is None:
            self._ring, self._authorization, self._principal = ring, authorization, principal
        return principal
