"""Generation by an engine in a process of its own: the process, its wire, its streams, its weights."""
