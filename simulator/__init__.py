"""Serving in virtual time: the real engine and gateway code on a pretended device, fed from a trace."""
