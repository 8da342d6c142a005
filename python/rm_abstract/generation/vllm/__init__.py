"""vLLM as a generation engine: its options, what its sampling parameters mean, its worker."""
