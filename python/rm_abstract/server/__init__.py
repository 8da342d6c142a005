"""An OpenAI-compatible server in front of models that this package runs (`rm-abstract serve`)."""
