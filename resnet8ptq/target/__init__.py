"""Runs files on another machine, and measures latency there, where the network will run."""
