"""What stands in deploy/: files that are checked by the programs that read them, and run where they can be run."""
