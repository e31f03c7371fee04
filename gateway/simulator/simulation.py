"""One simulated server's parts, and what its handlers share.

Owns `Simulation` (made anew at each start of the engine) and `SeenRequest`. Talks to nobody; the server makes it, the handlers
read it.
"""

import time
import zlib
from collections import deque
from dataclasses import dataclass, field

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.driver import EngineDriver
from gateway.simulator.engine import Engine
from gateway.simulator.errors import model_not_found
from gateway.simulator.faults import FaultBoard
from gateway.simulator.metrics import EngineMetrics
from gateway.simulator.tokens import TokenModel

MAX_SEEN = 2000


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """What reached the server: for tests, the truth about what a gateway sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection_id: int
    at_s: float


@dataclass(slots=True)
class Simulation:
    """Engine, tokenizer, faults and memory of one server process."""

    config: SimulatorConfig
    model: TokenModel
    engine: Engine
    metrics: EngineMetrics
    driver: EngineDriver
    faults: FaultBoard
    requests: deque[SeenRequest] = field(default_factory=lambda: deque(maxlen=MAX_SEEN))
    created: int = field(default_factory=lambda: int(time.time()))
    _ids: int = 0

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers: version and configuration."""
        return f"vllm-{self.config.vllm_version}-{zlib.crc32(repr(self.config).encode()):08x}"

    def new_id(self, prefix: str) -> str:
        """A response id, counted so that runs repeat."""
        self._ids += 1
        return f"{prefix}-{self.config.seed:08x}{self._ids:016x}"

    def served(self, model: str | None) -> str:
        """The model's name, or the first one when none is asked for. Raises ApiError 404."""
        if model is None or model == "":
            return self.config.served_model_names[0]
        if model not in self.config.served_model_names:
            raise model_not_found(model, self.config.served_model_names)
        return model


def new_simulation(config: SimulatorConfig, model: TokenModel, faults: FaultBoard) -> Simulation:
    """Put the parts of one start together."""
    engine = Engine(config, model.words)
    metrics = EngineMetrics(config)
    return Simulation(config, model, engine, metrics, EngineDriver(engine, metrics), faults)
