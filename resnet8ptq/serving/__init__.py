"""The tracking server for many."""
