"""torchspec-lite: train speculative-decoding drafters online, against the traffic they serve."""

__version__ = "0.1.0"
