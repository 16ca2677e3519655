"""Live pictures of the engine for notebooks: one shell (Scrubber), two renderers (plotly, and small ES modules)."""
