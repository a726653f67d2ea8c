"""The Python interface: commands as functions of networks and samples, in memory or in files."""
