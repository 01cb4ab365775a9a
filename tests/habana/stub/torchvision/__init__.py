"""Empty: one of optimum-habana's tokenizers imports `transforms`. The real package needs a CUDA build of torch."""

transforms = None
