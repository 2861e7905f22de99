"""Where keys and values live: blocks, who holds them, and the caches that models see."""
