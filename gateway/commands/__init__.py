"""The subcommands of `plimsoll`. `cli.py` mounts them; each module owns the commands of one subject."""
