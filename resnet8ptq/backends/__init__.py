"""The frameworks that quantize: a folder for each, behind the interface of `contract.py`."""
