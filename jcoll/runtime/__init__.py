"""The native library: loading, registration with XLA, metrics."""
