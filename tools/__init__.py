"""Tools for developers: generators, checks against third-party headers, and parts of the build."""
