"""The native engine. Nothing in here imports a framework or anything from `engine`."""
