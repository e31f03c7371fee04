"""How configuration values become canonical, and what is said of the machine."""

import enum
import sys
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from gateway.evidence import effective, host, model_files


class Mode(enum.IntEnum):
    EAGER = 3


class DType:
    def __str__(self):
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (2**60, str(2**60)),
        (0.92, "0.92"),
        (1e-7, "0.0000001"),
        (float("inf"), "inf"),
        ("text", "text"),
        ("\ud800", "?"),
        (Mode.EAGER, "EAGER"),
        (DType(), "bfloat16"),
        (PurePosixPath("/a/b"), "/a/b"),
        ((1, 0.5), [1, "0.5"]),
        ({"b", "a"}, ["a", "b"]),
        ({"k": 0.1, 3: None}, {"k": "0.1", "3": None}),
        (Mode, f"{__name__}.Mode"),
        (object(), "unknown"),  # its text would hold an address, another one each time
    ],
)
def test_a_value_has_one_stable_plain_form(value, expected):
    assert effective.plain(value) == expected


@pytest.mark.parametrize(
    ("path", "expected"), [("a.b", 1), ("a.c", "unknown"), ("none.anything.below", None), ("nowhere.at.all", "unknown")]
)
def test_a_missing_attribute_is_unknown_and_an_unset_group_is_none(path, expected):
    root = SimpleNamespace(a=SimpleNamespace(b=1), none=None)
    assert effective.resolve(root, path) == expected


@pytest.mark.parametrize(("sizes", "expected"), [((2, 3, 4), 24), ((1, 1, None), None)])
def test_devices_are_counted_only_when_every_size_is_known(sizes, expected):
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    config = SimpleNamespace(parallel_config=SimpleNamespace(**dict(zip(names, sizes, strict=True))))
    assert effective.device_count(config) == expected


def test_default_sampling_that_cannot_be_read_is_unknown(tmp_path):
    def read():
        raise OSError("no such file")

    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), tokenizer=str(tmp_path), get_diff_sampling_param=read)
    )
    document = effective.configuration(config, None, {}, {})
    assert document["model"]["default_sampling"] == "unknown"
    assert document["model"]["revision"] == "unknown"  # a directory without a config.json says nothing


def test_this_machine_tells_its_versions_and_its_processor():
    versions = host.read_versions()
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["tokenizers"] != "none"
    facts = host.read_hardware(1)
    assert facts["device_type"] == "unknown"  # no vLLM is loaded here, so no device is claimed
    assert facts["profile"] == "unknown"
    assert facts["cpus"] >= 1


class _Gpu:
    device_type = "cuda"

    def get_device_name(self, index):
        return "Example GPU"

    def get_device_total_memory(self, index):
        return 80 * 1024**3


class _Dumb(_Gpu):
    def get_device_name(self, index):
        raise RuntimeError("driver is gone")


@pytest.mark.parametrize(
    ("platform", "devices", "profile"),
    [
        (_Gpu(), 4, "4 x Example GPU (80 GiB)"),
        (_Gpu(), None, "unknown"),
        (_Dumb(), 4, "unknown"),
    ],
)
def test_the_hardware_profile_names_device_count_and_memory_or_is_unknown(monkeypatch, platform, devices, profile):
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    assert host.read_hardware(devices)["profile"] == profile


def test_a_cpu_profile_names_the_processor(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=SimpleNamespace(device_type="cpu")))
    facts = host.read_hardware(1)
    assert facts["profile"] == f"cpu: {facts['cpu']} x {facts['cpus']}"


def test_one_api_process_draws_an_id_and_several_share_their_launchers():
    assert host.engine_start_id(1) != host.engine_start_id(1)
    assert host.engine_start_id("unknown") != host.engine_start_id("unknown")
    assert host.engine_start_id(2) == host.engine_start_id(4)


def test_a_hub_model_is_found_in_the_cache_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    assert model_files.model_dir("org/name", "c0ffee") == snapshot
    assert model_files.model_dir("org/name", "other") is None
    assert model_files.model_dir("org/name", None) is None
    assert model_files.model_dir(str(snapshot), None) == snapshot


def test_where_the_files_are_not_known_every_digest_is_unknown():
    assert model_files.digests(None, ("config.json",)) == {"config.json": "unknown"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "from file"}, "from file"),
        ({"chat_template.json": '{"chat_template": "from json"}'}, "from json"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "a"}]}'}, {"default": "a"}),
        ({"tokenizer_config.json": "not json"}, None),
        ({}, None),
    ],
)
def test_the_chat_template_in_force_is_found(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert model_files.tokenizer_bundle(tmp_path, None)["chat_template"] == expected


def test_a_template_may_be_given_as_text(tmp_path):
    assert model_files.tokenizer_bundle(tmp_path, "{{ x }}")["chat_template"] == "{{ x }}"
    assert model_files.template_digest("{{ x }}") != model_files.template_digest("{{ y }}")
    assert model_files.template_digest(str(tmp_path / "absent")) == "unknown"
    assert model_files.template_digest(None) is None


def test_weights_that_cannot_be_listed_are_unknown():
    assert model_files.weights_digest(Path("/nowhere/at/all")) == "unknown"
