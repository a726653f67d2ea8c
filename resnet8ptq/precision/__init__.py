"""Which levels values are rounded to, and for which nodes."""
