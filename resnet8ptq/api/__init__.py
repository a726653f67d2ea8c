"""The Python interface: the commands as functions of networks and samples, in memory or files."""
