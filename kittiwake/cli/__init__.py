"""The command line: one file a command. Heavy imports happen inside the commands, so ``--help`` is quick."""
