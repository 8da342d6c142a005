"""The parity gate: a program's results against eager's, and the reference it is measured with."""
