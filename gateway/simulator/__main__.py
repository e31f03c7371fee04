"""`python -m gateway.simulator`."""

from gateway.simulator.command import app

app()
