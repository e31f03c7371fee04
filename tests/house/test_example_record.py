"""The example record in records/examples: whole, of no particular machine, and evidence for nobody's gate."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
import zstandard

from gateway import policy
from gateway.evidence.canonical import digest
from gateway.evidence.record import Record, load, record_id
from gateway.evidence.store import RecordStore
from gateway.qualify import plan as plans
from tests.bench.example_record import PATH_OF_A_MACHINE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "records" / "examples"
POLICIES = (
    ROOT / "policies" / "example.yaml",
    ROOT / "deploy" / "policy.template.yaml",
    ROOT / "tests" / "bench" / "policy.yaml",
)
ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://([^/\s:\"'<>)]+)")
LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}
NAMES_OF_FORMATS = {"www.w3.org", "purl.org", "creativecommons.org", "matplotlib.org"}  # SVG names its namespaces so

FOUND = sorted(EXAMPLES.glob("[0-9a-f]*.json"))
pytestmark = pytest.mark.skipif(not FOUND, reason="no example has been measured yet (make example-record)")


@pytest.fixture(scope="module")
def record() -> Record:
    assert len(FOUND) == 1, "one example"
    return load(FOUND[0].read_bytes())


def texts() -> dict[str, str]:
    """What is shipped beside the plan, by file; samples unpacked. Pictures are no text."""
    found = {}
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix == ".zst":
            found[path.name] = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).decode()
        elif path.suffix in (".json", ".html", ".yaml", ".svg"):
            found[path.name] = path.read_text()
    return found


def test_it_verifies_with_its_samples(record: Record) -> None:
    words = [sys.executable, "-m", "gateway", "records", "verify", str(FOUND[0]), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["problems"] == []
    assert record.samples is not None, "with raw samples"
    assert (EXAMPLES / "report.html").exists()


def test_it_was_measured_by_the_plan_beside_it(record: Record) -> None:
    plan = plans.load(str(EXAMPLES / "plan.yaml"))
    assert record.protocol.plan == plan.digest
    assert record.identity.server_configuration_hash == digest(record.configuration)
    assert record.protocol.identity_source == "attested"
    assert len(record.slices) == len(plan.cells)
    assert all(not level.void and level.e2e_ms.p95_upper is not None for each in record.slices for level in each.levels)


def test_it_holds_no_path_and_no_name_of_a_machine() -> None:
    here = socket.gethostname()
    for name, text in texts().items():
        # A picture in a page is base64, in which anything may turn up by chance.
        text = re.sub(r"base64,[A-Za-z0-9+/=\s]+", "", text)
        assert (found := PATH_OF_A_MACHINE.search(text.encode())) is None, (name, found)
        assert set(ADDRESS.findall(text)) <= LOOPBACK | NAMES_OF_FORMATS, name
        assert not re.search(rf"(?<![\w.-]){re.escape(here)}(?![\w.-])", text) or here in LOOPBACK, name


@pytest.mark.parametrize("file", POLICIES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_policy_that_is_shipped_loads_it(file: Path, record: Record) -> None:
    stated = yaml.safe_load(file.read_text()).get("records", policy.Policy.model_fields["records"].default)
    directory = (file.parent / str(stated)).resolve()
    assert directory != EXAMPLES
    if directory.is_dir():
        assert record_id(record) not in RecordStore(directory).load().records


def test_a_store_of_all_records_does_not_reach_into_it(record: Record) -> None:
    assert record_id(record) not in RecordStore(ROOT / "records").load().records
