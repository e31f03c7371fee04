"""The harness of black-box tests: a real gateway process, backends and clients on raw sockets."""
