"""What clients send: models of request bodies, with every bound that can be checked by looking at the body alone."""
