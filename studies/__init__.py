"""Studies: choices that were measured once. README.md lists them, with dates and commands."""
