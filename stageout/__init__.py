"""File transfer for HTCondor that frees the CPU slot first and delivers verified output afterwards."""

__version__ = "0.1.0"
