"""What the gateway examples share: servers, environments, load, checks, the report and the command line."""
