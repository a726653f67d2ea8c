"""The backends, a folder for each, behind the interface of `contract.py`."""
