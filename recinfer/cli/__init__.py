"""The command line: one module for each subcommand of ``recinfer`` and the helpers that they share."""
