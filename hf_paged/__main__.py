"""`python -m hf_paged`: the same as `hf-paged`."""

from .cli import main

main()
