"""The OpenAI-compatible server over any policy."""
