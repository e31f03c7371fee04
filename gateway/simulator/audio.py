"""POST /v1/audio/transcriptions and /v1/audio/translations.

Owns multipart parsing, what a second of audio costs, and the answer's formats: json, verbose_json, text, srt, vtt, and the
event stream. Talks to `Generation` for text.
"""

import hashlib
import io
import re
import wave
from collections.abc import Mapping
from typing import Any

from gateway.simulator.chat import DONE, data
from gateway.simulator.errors import bad_request
from gateway.simulator.exchange import Exchange
from gateway.simulator.generation import Generation, TokenIds, output_limit, sequence_specs
from gateway.simulator.schema import Sampling
from gateway.simulator.simulation import Simulation

_PROMPT_TOKENS_PER_S = 50
_OUTPUT_TOKENS_PER_S = 3
_RAW_BYTES_PER_S = 32_000
_BOUNDARY = re.compile(r'boundary="?([^";]+)"?', re.IGNORECASE)
_NAME = re.compile(rb'\bname="([^"]*)"', re.IGNORECASE)
_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")


def parse_multipart(content_type: str | None, body: bytes) -> dict[str, bytes]:
    """Fields of a multipart/form-data body by name; a repeated name keeps its last value. Raises ApiError 400."""
    found = _BOUNDARY.search(content_type or "")
    if found is None:
        raise bad_request("The body must be multipart/form-data with a boundary.")
    mark = b"--" + found[1].encode("latin-1")
    fields: dict[str, bytes] = {}
    for part in (b"\r\n" + body).split(b"\r\n" + mark)[1:]:
        head, blank, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if blank and name is not None:
            fields[name[1].decode("utf-8", "replace")] = content
    return fields


def duration_s(audio: bytes) -> float:
    """Seconds of a WAV file by its header; of anything else as 16 kHz 16-bit mono."""
    try:
        with wave.open(io.BytesIO(audio)) as file:
            return float(file.getnframes() / (file.getframerate() or 1))
    except (wave.Error, EOFError):
        return len(audio) / _RAW_BYTES_PER_S


def _audio_prompt(simulation: Simulation, audio: bytes, seconds: float, text: str) -> TokenIds:
    """Placeholder ids for the audio, different for different audio, then the prompt text."""
    digest = hashlib.sha256(audio).digest()
    count = max(1, int(seconds * _PROMPT_TOKENS_PER_S))
    return tuple(digest[i % len(digest)] for i in range(count)) + simulation.model.encode(text)


async def transcribe(simulation: Simulation, exchange: Exchange) -> None:
    """Both routes."""
    fields = parse_multipart(exchange.header("content-type"), exchange.body)
    texts = {name: value.decode("utf-8", "replace") for name, value in fields.items() if name != "file"}
    model = simulation.served(texts.get("model"))
    if not fields.get("file"):
        raise bad_request("file: an audio file is required.", "file")
    if texts.get("response_format", "json") not in _FORMATS:
        raise bad_request(f"response_format must be one of {', '.join(_FORMATS)}.", "response_format")
    seconds = duration_s(fields["file"])
    prompt = _audio_prompt(simulation, fields["file"], seconds, texts.get("prompt", ""))
    wanted = max(1, int(seconds * _OUTPUT_TOKENS_PER_S))
    limit = output_limit(simulation.config.max_model_len, len(prompt), None, wanted)
    specs = sequence_specs(simulation, exchange, Sampling(ignore_eos=True), prompt, limit, None, False)
    async with Generation(simulation, exchange, specs) as generation:
        if texts.get("stream", "").lower() in ("1", "true"):
            await _stream(simulation, exchange, generation, model)
        else:
            text = "".join([piece.text async for piece in generation]).strip()
            await _whole(exchange, texts, text, seconds)


async def _whole(exchange: Exchange, fields: Mapping[str, str], text: str, seconds: float) -> None:
    kind = fields.get("response_format", "json")
    if kind in ("text", "srt", "vtt"):
        await exchange.json(200, _plain(kind, text, seconds).encode(), b"text/plain; charset=utf-8")
        return
    body: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": round(seconds)}}
    if kind == "verbose_json":
        segment = {"id": 0, "start": 0.0, "end": seconds, "text": text}
        body = {"duration": str(seconds), "language": fields.get("language", "en"), "text": text, "segments": [segment]}
    await exchange.json(200, body)


def _plain(kind: str, text: str, seconds: float) -> str:
    if kind == "text":
        return text + "\n"
    stamps = f"{_stamp(0.0, kind)} --> {_stamp(seconds, kind)}"
    return f"1\n{stamps}\n{text}\n\n" if kind == "srt" else f"WEBVTT\n\n{stamps}\n{text}\n\n"


def _stamp(seconds: float, kind: str) -> str:
    total_ms = round(seconds * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    comma = "," if kind == "srt" else "."
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{ms // 1000:02d}{comma}{ms % 1000:03d}"


async def _stream(simulation: Simulation, exchange: Exchange, generation: Generation, model: str) -> None:
    kind = "translation.chunk" if exchange.path.endswith("translations") else "transcription.chunk"
    head = {"id": simulation.new_id("trsc"), "object": kind, "created": simulation.created, "model": model}
    await exchange.start_stream()
    async for piece in generation:
        choice = {"delta": {"content": piece.text}, "finish_reason": piece.finish}
        await exchange.content(data({**head, "choices": [choice]}))
    await exchange.write(DONE)
    await exchange.end_stream()
