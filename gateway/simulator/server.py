"""The simulator as a real HTTP server.

Owns the listening socket, the connections, and the faults of the whole server: freeze, refuse, crash, restart with another
configuration, slow start. Promises: the port stays the same over restarts; `async with SimulatorServer(config) as sim`
leaves nothing running. Talks to uvicorn's protocol class and to the application.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway.simulator.app import build_app
from gateway.simulator.config import SimulatorConfig, typed_changes
from gateway.simulator.connection import SimulatorConnection
from gateway.simulator.control import control_routes
from gateway.simulator.engine import Engine
from gateway.simulator.faults import SERVER_KINDS, Fault, FaultBoard, FaultKind, parse_fault
from gateway.simulator.sequence import EngineStats
from gateway.simulator.simulation import SeenRequest, Simulation, new_simulation
from gateway.simulator.tokens import TokenModel

_KEEP_ALIVE_S = 5


class SimulatorServer:
    """One simulated vLLM. `port` 0 takes a free one; it is kept over restarts."""

    def __init__(self, config: SimulatorConfig | None = None, port: int = 0, host: str = "127.0.0.1") -> None:
        self.config = config or SimulatorConfig()
        self.host = host
        self.port = port
        self.faults = FaultBoard()
        self.connections_opened = 0
        self.crashed = asyncio.Event()
        self._model = TokenModel()
        self._requests: deque[SeenRequest] | None = None
        self._simulation: Simulation | None = None
        self._listener: asyncio.Server | None = None
        self._factory: Callable[[], asyncio.Protocol] | None = None
        self._state = ServerState()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        await self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    @property
    def simulation(self) -> Simulation:
        """The parts of the present start."""
        if self._simulation is None:
            raise RuntimeError("the simulator has not been started")
        return self._simulation

    @property
    def engine(self) -> Engine:
        """The engine of the present start."""
        return self.simulation.engine

    @property
    def stats(self) -> EngineStats:
        """The engine's counters of truth, since its start."""
        return self.engine.stats

    @property
    def peak_in_flight(self) -> int:
        """Most sequences that were in the engine at once, waiting ones included, since its start."""
        return self.stats.peak_in_flight

    @property
    def requests(self) -> list[SeenRequest]:
        """The last requests that reached a handler, restarts included."""
        return list(self.simulation.requests)

    async def start(self) -> None:
        """Start the engine and listen, after the start delay."""
        if self.config.start_delay_s:
            await asyncio.sleep(self.config.start_delay_s)
        simulation = new_simulation(self.config, self._model, self.faults)
        if self._requests is not None:
            simulation.requests = self._requests
        self._requests = simulation.requests
        self._simulation = simulation
        self.crashed.clear()
        simulation.driver.start()
        self._factory = self._protocol_factory(simulation)
        await self._listen()

    async def stop(self) -> None:
        """Close everything at once."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._go_down()

    async def restart(self, down_s: float = 0.0, **changes: Any) -> None:
        """Die and come back on the same port with other settings, after `down_s` seconds without a listener."""
        config = replace(self.config, **changes)
        await self._go_down()
        await asyncio.sleep(down_s)
        self.config = config
        await self.start()

    async def crash(self) -> None:
        """Die: connections are reset, the port refuses."""
        await self._go_down()
        self.crashed.set()

    async def refuse(self, seconds: float | None = None) -> None:
        """Refuse new connections, for a while or until `accept`; those that are open live on."""
        self._close_listener()
        if seconds is not None:
            self._spawn(self._accept_later(seconds))

    async def accept(self) -> None:
        """Listen again."""
        if self._listener is None:
            await self._listen()

    def freeze(self, frozen: bool = True) -> None:
        """Stop (or resume) the engine; every other route keeps answering."""
        self.simulation.driver.frozen = frozen

    async def set_fault(self, fault: Fault | str) -> None:
        """Put a fault in force, given as such or as its text. Raises FaultError."""
        fault = parse_fault(fault) if isinstance(fault, str) else fault
        if fault.kind in SERVER_KINDS:
            await self._server_fault(fault)
        else:
            self.faults.add(fault)

    async def clear_faults(self) -> None:
        """Lift every fault that has not killed the server."""
        self.faults.clear()
        self.freeze(False)
        await self.accept()

    def set_fault_soon(self, fault: Fault) -> None:
        """The same from inside a handler, whose own answer still has to leave."""
        self._spawn(self._after_answer(fault))

    async def _after_answer(self, fault: Fault) -> None:
        await asyncio.sleep(0.05)
        await self.set_fault(fault)

    async def _server_fault(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.FREEZE:
                self.freeze()
                if fault.seconds is not None:
                    asyncio.get_running_loop().call_later(fault.seconds, self._thaw, self.simulation)
            case FaultKind.REFUSE:
                await self.refuse(fault.seconds)
            case FaultKind.CRASH:
                await self.crash()
            case FaultKind.RESTART:
                await self.restart(fault.seconds or 0.0, **typed_changes(self.config, dict(fault.changes)))

    @staticmethod
    def _thaw(simulation: Simulation) -> None:
        simulation.driver.frozen = False

    async def _accept_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.accept()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _protocol_factory(self, simulation: Simulation) -> Callable[[], asyncio.Protocol]:
        routes = control_routes(self) if self.config.allow_control else ()
        app = build_app(simulation, routes)
        settings = Config(app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=_KEEP_ALIVE_S)
        settings.load()
        self._state = ServerState()

        def make() -> asyncio.Protocol:
            connection = SimulatorConnection(config=settings, server_state=self._state, app_state={})
            self.connections_opened += 1
            connection.number = self.connections_opened
            return connection

        return make

    async def _listen(self) -> None:
        if self._factory is None:
            raise RuntimeError("the simulator has not been started")
        # With the protocol named, for asyncio turns Nagle's algorithm off only then; 40 ms an answer would not be the model's.
        handle = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        handle.bind((self.host, self.port))
        self.port = handle.getsockname()[1]
        self._listener = await asyncio.get_running_loop().create_server(self._factory, sock=handle, backlog=2048)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _go_down(self) -> None:
        self._close_listener()
        for connection in list(self._state.connections):
            if isinstance(connection, SimulatorConnection):
                connection.reset()
        if self._simulation is not None:
            await self._simulation.driver.stop()
        pending = [task for task in self._state.tasks if task is not asyncio.current_task()]
        if pending:
            await asyncio.wait(pending, timeout=5.0)
