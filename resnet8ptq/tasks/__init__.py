"""What makes a result good, and how sure a difference is."""
