"""`plimsoll health` as an exec probe: exit codes, TLS, and what it costs to start."""

from __future__ import annotations

import datetime as dt
import json
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from gateway.cli import build
from gateway.commands.output import CommandError

KEY = "plimsoll-probe"


class Gateway(BaseHTTPRequestHandler):
    """Live with the right key, and not ready."""

    def do_GET(self) -> None:
        known = self.headers["authorization"] == f"Bearer {KEY}"
        status = 401 if not known else 200 if self.path == "/health/live" else 503
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"{}" if status == 200 else json.dumps({"error": {"message": f"no: {status}"}}).encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A PEM file with a certificate for localhost, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "gateway.pem"
    file.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return file


@pytest.fixture(params=["http", "https"])
def address(request, certificate):
    """A gateway's address, plain and with TLS."""
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    if request.param == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"{request.param}://localhost:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def health(*words: str, key: str = KEY):
    return CliRunner().invoke(build("health"), ["health", *words], env={"PLIMSOLL_KEY": key})


def test_the_exit_code_says_whether_it_is_ready_and_the_text_why(address, certificate):
    trust = ("--ca-file", str(certificate))
    live = health("--gateway", address, "--live", *trust)
    assert (live.exit_code, live.output.strip()) == (0, "ready")
    ready = health("--gateway", address, *trust)
    assert (ready.exit_code, ready.output.strip()) == (1, "not ready: no: 503")
    stranger = health("--gateway", address, "--live", "--json", *trust, key="another")
    assert stranger.exit_code == 1 and json.loads(stranger.output) == {"ready": False, "why": "no: 401"}


@pytest.mark.parametrize("address", ["https"], indirect=True)
def test_a_certificate_that_nobody_vouches_for_or_of_another_name_is_not_ready(address, certificate):
    assert health("--gateway", address, "--live").exit_code == 1
    other_name = address.replace("localhost", "127.0.0.1")
    assert health("--gateway", other_name, "--live", "--ca-file", str(certificate)).exit_code == 1


@pytest.mark.parametrize("wrong", ["localhost:8080", "ftp://localhost", "http://", "http://localhost:port"])
def test_an_address_that_is_none_is_told(wrong):
    assert isinstance(health("--gateway", wrong).exception, CommandError)


def test_an_authority_that_cannot_be_read_is_told(tmp_path):
    failed = health("--gateway", "https://localhost:1", "--ca-file", str(tmp_path / "none.pem"))
    assert isinstance(failed.exception, CommandError) and "none.pem" in str(failed.exception)


def test_a_key_is_needed():
    assert isinstance(health(key="").exception, CommandError)


def test_a_probe_does_not_load_what_it_has_no_use_for():
    code = "import sys; from gateway.cli import build; build('health'); print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert "gateway.commands.health" in loaded
    assert not loaded & {"pydantic", "httpx", "numpy", "yaml", "gateway.policy", "uvicorn", "matplotlib", "cryptography"}
