"""The campaign replaces parts of the data path, which only the sources allow; gateways that it starts run what users run."""

import os

os.environ.setdefault("PLIMSOLL_INTERPRETED", "1")  # before anything here imports the gateway
