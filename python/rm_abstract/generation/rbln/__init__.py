"""optimum-rbln, Rebellions' own generation, as the engine of one model."""
