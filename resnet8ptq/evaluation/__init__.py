"""What is measured of an artifact."""
