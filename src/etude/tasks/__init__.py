"""Tasks from real codebases: made, validated, sealed, scored."""
