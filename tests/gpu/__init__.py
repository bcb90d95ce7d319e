"""Tests of the GPU plane, on stand-ins for libcuda and libnccl."""
