"""`python -m hf_paged.cli`: the same as `hf-paged`."""

from . import main

main()
