"""`python -m hf_paged.cli`, where the `hf-paged` script is not on the path."""

from . import main

main()
