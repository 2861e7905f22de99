"""Everything that only a GPU can show, in one command of at most 4.5 minutes; see README.md beside this file."""
