"""The Python API: LLM, AsyncLLM and run_job, and what they are made of."""
