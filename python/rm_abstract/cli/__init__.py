"""The command `rm-abstract`. Every subcommand imports what it needs when it runs."""
