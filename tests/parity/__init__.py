"""`generate` on a paged model and on the same unpaged one: every field alone, and random combinations."""
