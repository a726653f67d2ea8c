"""Code that tests share."""
