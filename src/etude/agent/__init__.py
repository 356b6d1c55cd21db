"""The coding agent: tools, formats of calls, the harness, traces, summaries of itself."""
