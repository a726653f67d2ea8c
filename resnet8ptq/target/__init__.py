"""Measures files on another machine: accuracy and latency where the network will run."""
