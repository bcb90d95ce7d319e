"""Guarantees of the driver as small programs; the tests run the same binary with the driver's stand-in."""
