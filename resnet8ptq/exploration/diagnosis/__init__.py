"""Diagnoses an accuracy loss tensor by tensor, and suggests remedies."""
