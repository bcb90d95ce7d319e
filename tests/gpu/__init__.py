"""The GPU plane, on stand-ins for libcuda and libnccl."""
