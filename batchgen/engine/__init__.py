"""The engine: scheduler, KV blocks, sampling, and the process it lives in."""
