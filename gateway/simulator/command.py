"""`plimsoll simulator`: run the stand-in from the command line.

Owns the flags, named as vLLM names them, and the line on standard output that tells the URL. Secrets come from the environment
or a file, never from an argument. Talks to `SimulatorServer`.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from gateway.simulator.config import ConfigError, SimulatorConfig
from gateway.simulator.faults import Fault, FaultError, FaultKind, parse_fault
from gateway.simulator.server import SimulatorServer

app = typer.Typer(add_completion=False, help="A deterministic stand-in for a vLLM 0.32 server. It needs no model and no GPU.")

_SERVE, _ENGINE, _MODEL, _FAULTS = "Serving", "Engine", "Time and chance", "Faults"
_FAULT_HELP = (
    "A fault in force from the start, as KIND;name=value. May be repeated. Kinds: "
    + ", ".join(FaultKind)
    + ". Names: after (content events that still pass), seconds, times (requests hit), factor, keepalive."
)


@app.callback(invoke_without_command=True)
def simulate(
    port: Annotated[int, typer.Option(help="0 takes a free port.", rich_help_panel=_SERVE)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVE)] = "127.0.0.1",
    served_model_name: Annotated[list[str] | None, typer.Option(help="May be repeated.", rich_help_panel=_SERVE)] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with one key a line. Else VLLM_API_KEY is read.", rich_help_panel=_SERVE)
    ] = None,
    sse_keep_alive_interval: Annotated[
        float | None, typer.Option(help="Seconds between comments on silent streams.", rich_help_panel=_SERVE)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.", rich_help_panel=_ENGINE)] = 16,
    max_model_len: Annotated[int, typer.Option(help="Prompt and output together.", rich_help_panel=_ENGINE)] = 4096,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.", rich_help_panel=_ENGINE)] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.", rich_help_panel=_ENGINE)] = 16,
    num_blocks: Annotated[int, typer.Option(help="KV blocks.", rich_help_panel=_ENGINE)] = 4096,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Told, not used.", rich_help_panel=_ENGINE)] = 0.9,
    dtype: Annotated[str, typer.Option(help="Told, not used.", rich_help_panel=_ENGINE)] = "bfloat16",
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="Answer 503 beyond so many sequences.", rich_help_panel=_ENGINE)
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse KV blocks of equal prefixes.", rich_help_panel=_ENGINE)
    ] = True,
    enable_chunked_prefill: Annotated[bool, typer.Option(help="Split long prompts over steps.", rich_help_panel=_ENGINE)] = True,
    seed: Annotated[int, typer.Option(help="Answers and jitter follow from it.", rich_help_panel=_MODEL)] = 0,
    speed: Annotated[float, typer.Option(help="Divides every modelled duration.", rich_help_panel=_MODEL)] = 1.0,
    mean_output_tokens: Annotated[int, typer.Option(help="Mean length of an answer.", rich_help_panel=_MODEL)] = 64,
    start_delay: Annotated[float, typer.Option(help="Seconds before the port answers.", rich_help_panel=_MODEL)] = 0.0,
    fault: Annotated[list[str] | None, typer.Option(help=_FAULT_HELP, rich_help_panel=_FAULTS)] = None,
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Serve /sim/* and heed x-sim-fault.", rich_help_panel=_FAULTS)
    ] = False,
) -> None:
    """Serve until stopped. Prints one JSON line with the URL on standard output when it listens."""
    try:
        config = SimulatorConfig(
            served_model_names=tuple(served_model_name or ("tiny",)),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            dtype=dtype,
            max_num_queued_reqs=max_num_queued_reqs,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            seed=seed,
            speed=speed,
            mean_output_tokens=mean_output_tokens,
            start_delay_s=start_delay,
            sse_keep_alive_s=sse_keep_alive_interval,
            allow_control=allow_control,
            api_keys=read_keys(api_key_file),
        )
        faults = [parse_fault(text) for text in fault or ()]
    except (ConfigError, FaultError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    sys.exit(uvloop.run(_serve(config, host, port, faults)))


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Keys from a file, one a line, else from VLLM_API_KEY; empty when there is neither."""
    if path is not None:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    key = os.environ.get("VLLM_API_KEY")
    return (key,) if key else ()


async def _serve(config: SimulatorConfig, host: str, port: int, faults: list[Fault]) -> int:
    """Run until a signal (0) or a crash fault (1)."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with SimulatorServer(config, port, host) as server:
        for fault in faults:
            await server.set_fault(fault)
        print(json.dumps({"url": server.url}), flush=True)
        waits = [asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(server.crashed.wait())]
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        return 1 if server.crashed.is_set() else 0
