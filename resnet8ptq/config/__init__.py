"""The settings of a run: schema, limits, loading, names, the command line and its help."""
