"""What the files of a served model say: digests for the configuration document, and the tokenizer bundle.

Owns: finding the model's directory, digesting its files, reading what is needed to render and count a prompt.
Promises: the standard library only; a file that cannot be read is the value "unknown", an absent one is None.
Talks to: the file system of the vLLM server, read only.
"""

import hashlib
import json
import os
from pathlib import Path

from gateway.evidence.plain_json import Json, digest

UNKNOWN = "unknown"
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
TOKENIZER_FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "tokenizer_class")
MAX_HEADER_BYTES = 100 * 1024 * 1024
MAX_TEXT_BYTES = 64 * 1024 * 1024
_WINDOW_BYTES = 64 * 1024


def model_dir(model: str, commit: str | None) -> Path | None:
    """The directory that holds the model: itself when local, else its snapshot in the hub cache; None when neither."""
    path = Path(model)
    if path.is_dir():
        return path
    if commit is None or "/" not in model:
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshot = cache / ("models--" + model.replace("/", "--")) / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def file_digest(path: Path) -> str | None:
    """`sha256:…` of a whole file; None when there is no such file; "unknown" when it cannot be read."""
    try:
        with path.open("rb") as handle:
            return "sha256:" + hashlib.file_digest(handle, "sha256").hexdigest()
    except FileNotFoundError:
        return None
    except OSError:
        return UNKNOWN


def weights_digest(directory: Path) -> str | None:
    """One digest over every safetensors file: its name, size, header, and three windows of its data.

    The header names each tensor with its type and shape. The windows (start, middle, end of the file) tell a
    fine-tuned copy from its parent without reading all of it. None when the directory holds no such file.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".safetensors"))
        parts: list[Json] = [_weight_part(directory / name) for name in names]
    except OSError:
        return UNKNOWN
    return digest(parts) if parts else None


def _weight_part(path: Path) -> Json:
    size = path.stat().st_size
    hasher = hashlib.sha256()
    with path.open("rb") as handle:
        header = int.from_bytes(handle.read(8), "little")
        hasher.update(handle.read(min(header, MAX_HEADER_BYTES)))
        for offset in (handle.tell(), size // 2, max(0, size - _WINDOW_BYTES)):
            handle.seek(offset)
            hasher.update(handle.read(_WINDOW_BYTES))
    return [path.name, str(size), hasher.hexdigest()]


def digests(directory: Path | None, names: tuple[str, ...]) -> dict[str, Json]:
    """Digest per file name; files that are absent are left out; "unknown" for all when the directory is not known."""
    if directory is None:
        return dict.fromkeys(names, UNKNOWN)
    found = {name: file_digest(directory / name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def template_digest(template: str | None) -> str | None:
    """Digest of the chat template given to the server: the file's content, or the literal text. None when not given."""
    if template is None:
        return None
    if _is_literal(template):
        return "sha256:" + hashlib.sha256(template.encode("utf-8")).hexdigest()
    return file_digest(Path(template)) or UNKNOWN


def _is_literal(template: str) -> bool:
    """A template given as text, not as a path: it holds braces or a line end."""
    return any(mark in template for mark in "{}\n")


def tokenizer_bundle(directory: Path | None, template: str | None) -> dict[str, Json]:
    """What a client needs to render and count a prompt exactly as this server does.

    `tokenizer` is the text of tokenizer.json, `chat_template` the template in force (the one given to the server wins),
    `special_tokens` name -> text, `flags` the tokenizer_config switches that change ids. None where there is none.
    """
    config = _load_json(directory, "tokenizer_config.json")
    special = {**_load_json(directory, "special_tokens_map.json"), **config}
    tokens = {name: _token_text(special.get(name)) for name in SPECIAL_TOKENS}
    return {
        "tokenizer": _read_text(directory, "tokenizer.json"),
        "chat_template": _chat_template(directory, config, template),
        "special_tokens": {name: text for name, text in tokens.items() if text is not None},
        "flags": {name: config[name] for name in TOKENIZER_FLAGS if isinstance(config.get(name), bool | str)},
    }


def _chat_template(directory: Path | None, config: dict[str, Json], given: str | None) -> Json:
    if given is not None:
        return _template_text(given)
    text = _read_text(directory, "chat_template.jinja")
    if text is not None:
        return text
    named = _load_json(directory, "chat_template.json").get("chat_template")
    found = named if named is not None else config.get("chat_template")
    if isinstance(found, list):  # several named templates: [{"name", "template"}, …]
        pairs = {str(item["name"]): item.get("template") for item in found if isinstance(item, dict) and "name" in item}
        return dict(pairs)
    return found if isinstance(found, str) else None


def _template_text(given: str) -> str | None:
    if _is_literal(given):
        return given
    path = Path(given)
    return _read_text(path.parent, path.name)


def _token_text(value: Json) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_text(directory: Path | None, name: str) -> str | None:
    if directory is None:
        return None
    try:
        path = directory / name
        return path.read_text("utf-8") if path.stat().st_size <= MAX_TEXT_BYTES else None
    except (OSError, ValueError):
        return None


def _load_json(directory: Path | None, name: str) -> dict[str, Json]:
    text = _read_text(directory, name)
    try:
        loaded = json.loads(text) if text is not None else {}
    except ValueError:
        return {}
    return loaded if isinstance(loaded, dict) else {}
