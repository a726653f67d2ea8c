"""What makes a result good: metrics, confidence intervals and paired tests."""
