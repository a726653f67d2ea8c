"""The network as a torch module that simulates integer kernels in float."""
