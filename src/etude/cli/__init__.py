"""The command `etude`."""
