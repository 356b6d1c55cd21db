"""How well an agent does: trials on disk, their statistics, four axes, and the report."""
