"""Every payment notification is applied exactly once; every event that follows is delivered, signed and accounted for."""

__version__ = "0.1.0"
