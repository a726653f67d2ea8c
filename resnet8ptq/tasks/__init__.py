"""Tasks: metrics, confidence intervals and paired tests."""
