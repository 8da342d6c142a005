"""Tools for testing plugins: the C ABI from Python and the conformance suite."""
