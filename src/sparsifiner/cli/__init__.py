"""The command line: one file a verb, no logic of its own, torch imported only inside the verbs."""
