"""Where code that a model wrote runs: isolated, bounded, thrown away."""
