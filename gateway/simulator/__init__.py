"""A deterministic stand-in for a vLLM 0.32 server: the backend of the demo and the tool of the tests."""
