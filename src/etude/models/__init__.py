"""Base models: which are known, where they come from, and how they are loaded."""
