"""What the driver promises, as small programs: the same binary runs with its stand-in in the tests."""
