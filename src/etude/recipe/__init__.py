"""A recipe: one base, an ordered list of stages, their settings. TOML in, a checked and complete description out."""
