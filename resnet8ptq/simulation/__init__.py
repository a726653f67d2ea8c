"""The network as a torch module that computes in float what integer kernels would."""
