"""The settings of a run: schema, limits, the command line and loading."""
