"""Etude: from an open base model to your own coding agent, every stage measured, the family tree included."""

__version__ = "0.1.0"
